"""The fixed policies: how they lay modes over layers, and the figures of the paper's rule."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.planning.activation_modes import KEEP, ActivationMode, all_modes
from sppo_hf.planning.policies import sppo_modes, sppo_ratios, spread, spread_kinds, uniform_modes
from tests.planning.modes import OFFLOAD, RECOMPUTE
from tests.planning.situations import (
    decided,
    falling_bounds,
    saved_bytes,
    slow_cost,
    small_shape,
)


def test_uniform() -> None:
    assert uniform_modes(2, 3, OFFLOAD) == ((OFFLOAD,) * 3,) * 2


def test_spread_alternates() -> None:
    assert spread({KEEP: 2, OFFLOAD: 2}, 4) in (
        (KEEP, OFFLOAD, KEEP, OFFLOAD),
        (OFFLOAD, KEEP, OFFLOAD, KEEP),
    )


@given(
    counts=st.dictionaries(st.sampled_from(all_modes()), st.integers(0, 30), min_size=1).filter(
        lambda counts: sum(counts.values()) > 0
    )
)
def test_spread_keeps_counts_and_never_lags_far(counts: dict[ActivationMode, int]) -> None:
    layers = sum(counts.values())
    chosen = spread(counts, layers)
    assert Counter(chosen) == Counter(counts)
    for mode, count in counts.items():
        for end in range(layers + 1):
            assert abs(chosen[:end].count(mode) - count * end / layers) < len(counts)


def test_spread_refuses_counts_that_miss_a_layer() -> None:
    with pytest.raises(AssertionError, match="every layer has one mode"):
        spread({KEEP: 2}, 3)


def test_spread_kinds_puts_each_kind_where_its_layers_are() -> None:
    chosen = spread_kinds([{KEEP: 2}, {OFFLOAD: 1, RECOMPUTE: 1}], [(0, 2), (1, 3)], 4)
    assert chosen[0] == chosen[2] == KEEP
    assert {chosen[1], chosen[3]} == {OFFLOAD, RECOMPUTE}


def test_sppo_moves_what_one_chunk_can_copy() -> None:
    cost = slow_cost(small_shape(40), d2h_bytes_per_second=3e8)
    bounds = falling_bounds(6)
    modes = sppo_modes(cost, decided(bounds, layers=40))
    forward = sum(cost.forward_seconds(i, *chunk) for i in range(40) for chunk in bounds)
    threshold = forward / len(bounds) / cost.d2h_seconds(1, both=True)
    counts = [row.count(OFFLOAD) for row in modes]
    assert counts[-1] == 0
    assert 0 < counts[0] < 40
    assert counts[:-1] == sorted(counts[:-1])
    for (start, end), count in zip(bounds[:-1], counts, strict=False):
        frame = saved_bytes(cost, 0, end - start)
        assert count * frame == pytest.approx(min(threshold, 40 * frame), abs=0.5 * frame + 1)
    assert {mode for row in modes for mode in row} == {KEEP, OFFLOAD}


def test_sppo_of_skeletons_leaves_more_layers() -> None:
    cost = slow_cost(small_shape(40), d2h_bytes_per_second=3e8)
    whole, reduced = (
        sppo_modes(cost, decided(falling_bounds(6), layers=40), saved=saved)
        for saved in ("whole", "inputs")
    )
    assert sum(mode.offload for row in reduced for mode in row) > sum(
        mode.offload for row in whole for mode in row
    )
    assert all(mode.recompute for row in reduced for mode in row)


FIGURE = (4.0, 3.0, 2.0, 1.0)
# 65B, 128K tokens, N = 8, in GB; M_th = 4.3 GB.
LARGE = (10.59, 7.1, 5.7, 5.0, 4.4, 4.0, 3.3, 2.87)
LARGE_THRESHOLD = 4.3


def activations_by_chunk(
    activation_bytes: Sequence[float], ratios: Sequence[float]
) -> tuple[float, ...]:
    """Returns the activation bytes on the device at the end of each chunk's forward.

    `M_i = M_(i-1) + A_i - alpha_(i-1) A_(i-1)`: what left of chunk i - 1 is gone when chunk i ends.
    """
    held: list[float] = []
    for chunk, size in enumerate(activation_bytes):
        before = held[-1] - ratios[chunk - 1] * activation_bytes[chunk - 1] if chunk else 0.0
        held.append(before + size)
    return tuple(held)


def full_offload_peak(activation_bytes: Sequence[float]) -> float:
    """Returns the peak when every chunk is offloaded whole: two neighbours are there at once.

    A chunk's bytes go when its whole copy has ended, which happens while the next one computes.
    """
    following = [*activation_bytes[1:], 0.0]
    return max(a + b for a, b in zip(activation_bytes, following, strict=True))


def sppo_peak(activation_bytes: Sequence[float], threshold_bytes: float) -> float:
    """Returns the peak of the rule in closed form: `A_k + sum_(j<k) (A_j - M_th)`.

    k is the last chunk with `A_k > M_th` (the paper's printed formula drops the sum). Holds for
    activations that fall from chunk to chunk, as balanced chunks' do.
    """
    over = [i for i, size in enumerate(activation_bytes) if size > threshold_bytes]
    if not over:
        return max(activation_bytes)
    kept = sum(activation_bytes[j] - threshold_bytes for j in range(over[-1]))
    return activation_bytes[over[-1]] + kept


def test_worked_figure() -> None:
    ratios = sppo_ratios(FIGURE, 2.0)
    assert ratios == pytest.approx((1 / 2, 2 / 3, 1.0, 0.0))
    assert activations_by_chunk(FIGURE, ratios) == pytest.approx((4.0, 5.0, 5.0, 4.0))
    assert full_offload_peak(FIGURE) == 7.0
    assert sppo_peak(FIGURE, 2.0) == 5.0


def test_65b_figure() -> None:
    printed = (0.41, 0.60, 0.74, 0.86, 0.96, 1.0, 1.0, 1.0)
    formula = [min(1.0, LARGE_THRESHOLD / size) for size in LARGE]
    assert formula == pytest.approx(printed, rel=0.03)
    # The printed alpha of the last chunk is the formula's; the text says it is never offloaded.
    assert sppo_ratios(LARGE, LARGE_THRESHOLD) == (*formula[:-1], 0.0)
    assert sum(LARGE) == pytest.approx(43.5, rel=0.03)
    assert sppo_peak(LARGE, LARGE_THRESHOLD) == pytest.approx(15.9, rel=0.03)
    held = activations_by_chunk(LARGE, sppo_ratios(LARGE, LARGE_THRESHOLD))
    assert max(held) == pytest.approx(15.9, rel=0.03)


@given(
    sizes=st.lists(st.floats(0.1, 100), min_size=1, max_size=12).map(
        lambda sizes: sorted(sizes, reverse=True)
    ),
    threshold=st.floats(0.05, 200),
)
def test_closed_form_is_the_walk(sizes: list[float], threshold: float) -> None:
    held = activations_by_chunk(sizes, sppo_ratios(sizes, threshold))
    peak = sppo_peak(sizes, threshold)
    if sizes[-1] <= threshold:
        # The last chunk's exemption changes nothing: nothing leaves after it.
        assert max(held) == pytest.approx(max(peak, held[-1]))
    assert max(held) >= max(sizes) - 1e-9
    assert max(held) <= sum(sizes) + 1e-9


@given(sizes=st.lists(st.floats(0, 100), min_size=1, max_size=12), threshold=st.floats(0.1, 200))
def test_bytes_moved_per_chunk_are_the_threshold_or_all(
    sizes: list[float], threshold: float
) -> None:
    ratios = sppo_ratios(sizes, threshold)
    assert ratios[-1] == 0.0
    for size, ratio in zip(sizes[:-1], ratios[:-1], strict=True):
        assert ratio * size == pytest.approx(min(size, threshold))
