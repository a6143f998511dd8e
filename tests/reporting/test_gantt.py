"""Parts of a timeline's picture: bars keep all work, curves their peak."""

from bisect import bisect_right
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.reporting.figures import (
    DARK_KINDS,
    FINEST,
    KIND_COLOURS,
    Bar,
    Clock,
    byte_unit,
    join_spans,
    longest_bars,
    mixed,
    thin_out,
)
from sppo_hf.schedule.actions import COMPUTE_KINDS, KIND_NAMES, Action
from sppo_hf.schedule.timeline import Span, Timeline
from tests.schedule.simulated import simulate


def span(text: str, start: float, end: float) -> Span:
    return Span(Action.parse(text), "resource", start, end, start)


def lasting(seconds: float) -> Timeline:
    return simulate({"a": [Action("F", 0, 0)]}, seconds=lambda _: seconds, after=lambda _: ())


def test_spans_of_one_chunk_become_one_bar() -> None:
    spans = [
        span("0F0.0", 0.0, 1.0),
        span("0F0.1", 1.05, 2.0),
        span("0F1.0", 2.0, 3.0),
        span("0B1.0", 3.0, 4.0),
        span("0B1.1", 4.2, 5.0),
    ]
    bars = join_spans(spans, finest_seconds=0.1)
    assert [(bar.kind, bar.unit, bar.start_seconds, bar.end_seconds) for bar in bars] == [
        ("F", 0, 0.0, 2.0),
        ("F", 1, 2.0, 3.0),
        ("B", 1, 3.0, 4.0),
        ("B", 1, 4.2, 5.0),
    ]
    assert bars[0].busy_seconds == pytest.approx(1.95)


def test_gaps_too_fine_to_be_seen_make_a_bar_paler() -> None:
    assert Bar("B", 0, 0.0, 1.0, 1.0).colour == KIND_COLOURS["B"]
    half, little = Bar("B", 0, 0.0, 1.0, 0.5).colour, Bar("B", 0, 0.0, 1.0, 0.01).colour
    assert half == mixed(KIND_COLOURS["B"], 0.5)
    assert little == mixed(KIND_COLOURS["B"], 0.75)
    assert Bar("B", 1, 0.0, 1.0, 1.0).colour not in (KIND_COLOURS["B"], half, little)
    assert Bar("F", 0, 1.0, 1.0, 0.0).colour == KIND_COLOURS["F"]


def test_only_the_longest_bar_of_a_chunk_is_numbered() -> None:
    long, short = Bar("F", 0, 2.0, 4.0, 2.0), Bar("F", 0, 0.0, 1.0, 1.0)
    other, fine = Bar("B", 0, 4.0, 5.0, 1.0), Bar("B", 1, 5.0, 5.1, 0.1)
    assert longest_bars([short, long, other, fine], at_least_seconds=0.5) == [long, other]


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50)), max_size=200),
    st.sampled_from([100.0, 1e6]),
)
def test_a_thinned_curve_keeps_its_peak_and_its_end(
    points: list[tuple[float, int]], end_seconds: float
) -> None:
    curve = sorted({0.0: 0, **dict(points)}.items())
    instants = thin_out(curve, end_seconds)
    assert instants == sorted(set(instants))
    held = dict(curve)
    assert max(held[at] for at in instants) == max(held.values())
    assert instants[-1] == curve[-1][0]
    # Whenever nothing happens for longer than a column, what is drawn is what is held.
    shown = [held[at] for at in instants]
    for (now, num_bytes), (following, _) in pairwise(curve):
        if following - now > end_seconds * FINEST:
            assert shown[bisect_right(instants, now) - 1] == num_bytes


def test_thinning_bounds_what_is_drawn() -> None:
    curve = [(at / 1000, at % 7) for at in range(100_000)]
    assert len(thin_out(curve, 100.0)) <= 2 / FINEST + 2


@pytest.mark.parametrize(
    ("seconds", "said", "end"),
    [
        (12_345.6, "12,346 seconds", 12_345.6),
        (9.876, "9.88 seconds", 9.876),
        (0.25, "250 milliseconds", 250.0),
        (2.5e-5, "25 microseconds", 25.0),
        (0.0, "0 seconds", 1.0),
    ],
)
def test_clock(seconds: float, said: str, end: float) -> None:
    clock = Clock.of(lasting(seconds))
    assert clock.say(seconds) == said
    assert clock.end == pytest.approx(end)
    assert clock.place(0.0, seconds) == pytest.approx((0.0, 0.0 if seconds == 0 else end))


def test_byte_units() -> None:
    sizes = (5, 2000, 2**20, 2**40)
    assert [byte_unit(size)[0] for size in sizes] == ["bytes", "KiB", "MiB", "GiB"]


def test_every_kind_has_a_colour_of_its_own() -> None:
    assert set(KIND_COLOURS) == set(KIND_NAMES)
    assert len(set(KIND_COLOURS.values())) == len(KIND_NAMES)
    assert set(KIND_NAMES) > COMPUTE_KINDS
    assert set(KIND_NAMES) > DARK_KINDS
