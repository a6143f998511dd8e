"""The closed forms, against the numbers that the papers and our notes give."""

from fractions import Fraction

import pytest

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.formulas import (
    UnitCosts,
    bubble_fraction,
    group_units,
    peak_units,
    step_length,
)
from sppo_hf.schedule.generate import Size


def test_bubble_of_seq1f1b_is_that_of_the_notes() -> None:
    # (P - 1) / (N M + P - 1); for P=8, N=4, M=16 .099 against .304 of plain 1F1B.
    assert bubble_fraction("seq1f1b", Size(8, 16, 4)) == Fraction(7, 71)
    assert float(bubble_fraction("seq1f1b", Size(8, 16, 4))) == pytest.approx(0.099, abs=5e-4)
    assert float(bubble_fraction("1f1b", Size(8, 16))) == pytest.approx(0.304, abs=5e-4)


def test_idle_time_is_the_papers() -> None:
    size, costs = Size(4, 8, 4), UnitCosts(3, 2, 1)
    work = 32 * 6
    # (P - 1)(F + B) / N of a micro-batch's F and B, which are N times a unit's.
    assert step_length("seq1f1b", size, costs) - work == 3 * (12 + 12) // 4
    # (P - 1)(F + B - W) / N with B the gradient of the input alone.
    assert step_length("zb_seq1f1b", size, costs) - work == 3 * (12 + 8 - 4) // 4
    # (P - 1)(F + B) / (N V), where a unit has 1 / V of the layers.
    size = size._replace(num_virtual=2)
    assert step_length("interleaved_seq1f1b", size, costs) - 2 * work == 3 * (24 + 24) // (4 * 2)


def test_peaks_are_the_papers() -> None:
    assert peak_units("seq1f1b", Size(4, 8, 4)) == [7, 6, 5, 4]
    assert peak_units("1f1b", Size(4, 8)) == [4, 3, 2, 1]
    assert peak_units("1f1b", Size(4, 8, 4)) == [16, 12, 8, 4]
    assert peak_units("gpipe", Size(4, 8, 4)) == [32] * 4
    # (V - 1) P + 2 (P - r - 1) + N - 1 warm-up forwards, and one more.
    assert peak_units("interleaved_seq1f1b", Size(4, 8, 4, 2)) == [14, 12, 10, 8]
    # No more than there are.
    assert peak_units("seq1f1b", Size(8, 1, 4)) == [4] * 8


@pytest.mark.parametrize(
    ("size", "group"),
    [
        (Size(4, 8, 4), 4),
        (Size(4, 8, 2), 4),
        (Size(4, 8, 1), 4),
        (Size(4, 8, 8), 8),
        (Size(4, 8, 3), 6),
        (Size(4, 7, 2), 6),
        (Size(8, 2, 2), 4),
    ],
)
def test_groups_are_whole_micro_batches(size: Size, group: int) -> None:
    assert group_units(size) == group


def test_names_are_checked() -> None:
    for formula in (step_length, bubble_fraction, peak_units):
        with pytest.raises(ScheduleError, match="no formula for schedule 'zb'"):
            formula("zb", Size(1, 1))
