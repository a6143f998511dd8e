"""How many chunks, and how long a row."""

from dataclasses import replace
from typing import get_args

import pytest

from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.decisions import Order
from sppo_hf.planning.lowering import estimate
from sppo_hf.planning.memory import Budgets
from sppo_hf.planning.search import (
    TARGET_TOKENS,
    Batch,
    chunk_cuts,
    longest,
    solve_chunks,
    tiled_layers,
)
from sppo_hf.planning.solve import BudgetViolation, Choices, Solution, min_memory, solve
from tests.planning.situations import MIB, decided, falling_bounds, slow_cost, small_shape

BATCH = Batch(batch_rows=1, tile_tokens=64, staging_bytes=MIB)
NO_LIMIT = Budgets(device=None, host=None, disk=0)


def test_batch_carries_over() -> None:
    batch = replace(BATCH, batch_rows=3, training=False, return_logits=True)
    what = batch.decisions(((0, 5), (5, 9)), 2)
    assert (what.batch_rows, what.training, what.return_logits) == (3, False, True)
    assert (what.num_chunks, what.num_layers, what.tile_tokens) == (2, 2, 64)
    assert what.staging_bytes == MIB


def test_cuts_aim_at_targets_once_each() -> None:
    cost = slow_cost(small_shape())
    cuts = list(chunk_cuts(cost, 65_536, "flops"))
    assert [len(bounds) for bounds in cuts] == [65_536 // target for target in TARGET_TOKENS]
    assert len(list(chunk_cuts(cost, 1000, "flops"))) == 1


def test_rows_of_any_length_have_a_cut_with_few_chunks() -> None:
    for tokens in (2**20, 2**24):
        cuts = list(chunk_cuts(slow_cost(small_shape()), tokens, "even"))
        assert cuts
        assert min(len(bounds) for bounds in cuts) <= max(256, tokens // 16_384)


def test_cuts_may_come_from_elsewhere() -> None:
    asked: list[int] = []

    def cut(target: int) -> Bounds:
        asked.append(target)
        return ((0, 100),)

    assert list(chunk_cuts(slow_cost(small_shape()), 100, "flops", cut)) == [((0, 100),)]
    assert asked == list(TARGET_TOKENS)


def test_the_fastest_cut_wins() -> None:
    cost = slow_cost(small_shape(), launch_seconds=1.0)
    cuts = [falling_bounds(6), falling_bounds(2, 1536), falling_bounds(3, 1024)]
    found = solve_chunks(cost, BATCH, cuts, NO_LIMIT, Choices())
    assert isinstance(found, Solution)
    assert found.decisions.num_chunks == 2  # launches cost a second each


def test_a_cut_that_does_not_fit_gives_way() -> None:
    cost = slow_cost(small_shape(), launch_seconds=1.0)
    long, short = falling_bounds(1, 16_384), falling_bounds(16, 1024)
    needs = [
        solve(cost, decided(bounds), Budgets(device=10, host=None), Choices())
        for bounds in (long, short)
    ]
    assert all(isinstance(limit, BudgetViolation) for limit in needs)
    more, less = (10 + limit.missing_bytes for limit in needs if isinstance(limit, BudgetViolation))
    assert less < more
    budgets = Budgets(device=(less + more) // 2, host=None)
    found = solve_chunks(cost, BATCH, [long, short], budgets, Choices())
    assert isinstance(found, Solution)
    assert found.decisions.bounds == short
    tight = Budgets(device=less - 5, host=None)
    limit = solve_chunks(cost, BATCH, [long, short], tight, Choices())
    assert isinstance(limit, BudgetViolation)
    assert limit.missing_bytes == 5


@pytest.mark.parametrize("most", [0, 1, 5, 1000, 4097])
def test_longest_finds_the_last_that_is_possible(most: int) -> None:
    assert longest(lambda tokens: tokens - most * 1024) == most * 1024


def test_of_two_orders_the_faster_that_fits() -> None:
    cost, cuts = slow_cost(small_shape(8, kv_heads=4)), [falling_bounds(8, 1024)]
    bounds = cuts[0]
    orders: tuple[Order, ...] = get_args(Order)
    roomy = Budgets(device=None, host=None)
    least, most = (
        [
            estimate(
                cost.shape,
                min_memory(cost, base, roomy, choices),
            ).device.total
            for order in orders
            for base in [BATCH.decisions(bounds, 8, order)]
        ]
        for choices in (Choices(), Choices(tiers=("device",), saved=("whole",)))
    )
    assert least[orders.index("by_layer")] < least[orders.index("by_chunk")]
    for device in (min(least) + 2**20, sum(most) // 3):
        budgets = Budgets(device=device, host=None)
        alone = [solve_chunks(cost, BATCH, cuts, budgets, Choices(), orders=(o,)) for o in orders]
        both = solve_chunks(cost, BATCH, cuts, budgets, Choices(), orders=orders)
        assert isinstance(both, Solution)
        found = [one.step_seconds for one in alone if isinstance(one, Solution)]
        assert both.step_seconds == min(found)


def test_layers_over_all_tokens_in_tiles_are_one_more_way() -> None:
    """Fewer launches than chunks inside layers have, and more memory: what fits decides."""
    cost, cuts = slow_cost(small_shape(8), launch_seconds=1.0), [falling_bounds(8, 1024)]
    inside = BATCH.decisions(cuts[0], 8, "by_layer")
    (tiled,) = tiled_layers(BATCH, 8192, 8, (1024, 8192))
    limits = [
        solve(cost, base, Budgets(device=10, host=None), Choices()) for base in (inside, tiled)
    ]
    less, more = (10 + x.missing_bytes for x in limits if isinstance(x, BudgetViolation))
    assert less < more
    for device, way in ((None, tiled), (more, tiled), (more - 1, inside)):
        found = solve_chunks(
            cost,
            BATCH,
            cuts,
            Budgets(device=device, host=None),
            Choices(),
            orders=("by_layer",),
            tiles=(1024, 8192),
        )
        assert isinstance(found, Solution)
        chosen = found.decisions
        assert (chosen.bounds, chosen.layer_tile_tokens) == (way.bounds, way.layer_tile_tokens)
