"""Rules that lay modes over layers."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.planning.activation_modes import KEEP, ActivationMode, all_modes
from sppo_hf.planning.policies import sppo_modes, spread, spread_kinds, uniform_modes
from tests.planning.modes import OFFLOAD, RECOMPUTE
from tests.planning.situations import decided, falling_bounds, slow_cost, small_shape


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
        frame = cost.activation_bytes(0, end - start, "whole")
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
