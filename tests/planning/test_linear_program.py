"""The linear program: its optimum bounds every simulated plan of its modes and look-ahead."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given

from sppo_hf.planning.activation_modes import KEEP, ActivationMode, all_modes
from sppo_hf.planning.chunk_bounds import even_bounds
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions, Order
from sppo_hf.planning.linear_program import (
    LinearProgram,
    Mix,
    Rows,
    Terms,
    chunk_groups,
    joined,
    minimise,
)
from sppo_hf.planning.lowering import compute_seconds, estimate, lower
from sppo_hf.planning.memory import Budgets, Cause, byte_tables
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.policies import uniform_modes
from sppo_hf.planning.tiers import TIERS
from tests.planning.modes import OFFLOAD, RECOMPUTE
from tests.planning.shapes import llama_config, shape_of
from tests.planning.situations import (
    decided,
    falling_bounds,
    kv_bytes,
    runs,
    saved_bytes,
    slow_cost,
    small_shape,
)
from tests.sweeps import examples

NO_LIMIT = Budgets(device=None, host=None, disk=None)


def optimum(
    what: Decisions,
    cost: ModelCost,
    budgets: Budgets = NO_LIMIT,
    modes: tuple[ActivationMode, ...] = all_modes(),
) -> Mix:
    kv_modes = (*TIERS, "recompute") if what.by_layer else ()
    program = LinearProgram(what, cost, budgets, modes, kv_modes=kv_modes)
    mix = program.solve()
    assert mix is not None
    return mix


@pytest.mark.parametrize("window", [None, 100])
def test_counts_are_all_layers(window: int | None) -> None:
    cost = slow_cost(small_shape(5, window=window))
    what = decided(
        falling_bounds(4), layers=5, max_pending_d2h_bytes=2**20, max_prefetch_bytes=2**20
    )
    everything = estimate(cost.shape, what).device
    budget = everything.total - everything[Cause.ACTIVATIONS] // 3
    mix = optimum(what, cost, Budgets(device=budget, host=None, disk=None))
    kinds = [5] if window is None else [3, 2]
    assert mix.counts.shape == (4, len(kinds), len(all_modes()))
    assert mix.counts.min() > -1e-9
    sums = mix.counts.sum(axis=2)
    assert sums == pytest.approx(np.tile(kinds, (4, 1)))


def test_with_room_for_all_nothing_moves_and_nothing_runs_again() -> None:
    cost, what = slow_cost(small_shape()), decided(falling_bounds(3))
    mix = optimum(what, cost)
    assert mix.counts[:, :, all_modes().index(KEEP)] == pytest.approx(np.full((3, 1), 4.0))
    assert mix.seconds == pytest.approx(compute_seconds(what, cost), rel=1e-5)


@pytest.mark.parametrize("order", ["by_chunk", "by_layer"])
def test_host_memory_is_used_for_its_price_within_the_seconds(order: Order) -> None:
    cost = slow_cost(small_shape(8))
    what = replace(
        decided(falling_bounds(4), layers=8),
        order=order,
        max_pending_d2h_bytes=2**20,
        max_prefetch_bytes=2**20,
    )
    device = estimate(cost.shape, what).device
    budgets = Budgets(device=device.total - device[Cause.ACTIVATIONS] // 2, host=None, disk=0)
    modes = tuple(mode for mode in all_modes() if mode.tier != "disk")
    kv_modes = ("device",) if what.by_layer else ()

    def solved(**limits: float) -> tuple[float, float]:
        """Return the seconds of the optimum and the bytes that it has on the host."""
        mix = LinearProgram(what, cost, budgets, modes, kv_modes=kv_modes, **limits).solve()
        assert mix is not None
        away = [at for at, mode in enumerate(modes) if mode.offload]
        return mix.seconds, float(mix.counts[:, :, away].sum())

    fast, most = solved()
    slow, least = solved(host_price=1e6)
    assert slow > 1.01 * fast
    assert least < 0.5 * most
    limit = (fast + slow) / 2
    between, some = solved(host_price=1e6, most_seconds=limit)
    assert between == pytest.approx(limit, rel=1e-6)
    assert least < some < most
    program = LinearProgram(what, cost, budgets, modes, kv_modes=kv_modes, most_seconds=0.99 * fast)
    assert program.solve() is None


def test_no_room_no_answer() -> None:
    cost, what = slow_cost(small_shape()), decided(falling_bounds(3))
    tight = Budgets(device=10, host=None, disk=None)
    assert LinearProgram(what, cost, tight, (KEEP, RECOMPUTE)).solve() is None


@pytest.mark.parametrize("order", ["by_chunk", "by_layer"])
def test_a_mode_fits_by_the_program_from_the_estimates_peak_on(order: Order) -> None:
    """Or from a little above it where units are on their way."""
    even = even_bounds(24_576, 6)
    rising = tuple((24_576 - end, 24_576 - start) for start, end in falling_bounds(6, 4096)[::-1])

    def shape(layers: int, **sizes: int) -> ModelShape:
        config = llama_config(hidden_size=256, num_hidden_layers=layers, **sizes)
        return shape_of(config, dtype_bytes=2, trainable_parameters=1000)

    narrow, wide = shape(4, vocab_size=500), shape(1, vocab_size=500, intermediate_size=2**16)
    first_wide = replace(narrow, layers=(*wide.layers, *narrow.layers[1:]))
    moments: set[str] = set()
    for model, bounds in (
        # By chunk every layer counts with the largest one's workspace.
        (first_wide if order == "by_layer" else narrow, even),
        (narrow, rising),
        (shape(2, vocab_size=100_000), rising),
    ):
        cost, layers = slow_cost(model), len(model.layers)
        ahead = 2 * saved_bytes(cost, 0, bounds[-1][1] - bounds[-1][0])
        for mode, above in ((KEEP, 1.001), (RECOMPUTE, 1.001), (OFFLOAD, 1.2)):
            what = replace(
                decided(bounds, mode, layers=layers, tile_tokens=24_576, order=order),
                max_pending_d2h_bytes=ahead,
                max_prefetch_bytes=ahead,
            )
            kv_modes = ("device",) if what.by_layer else ()
            predicted = estimate(cost.shape, what)
            moments.add(predicted.moment.partition(" of ")[0])
            for share in (0.999, above):
                budgets = Budgets(device=int(share * predicted.device.total), host=None)
                mix = LinearProgram(what, cost, budgets, (mode,), kv_modes=kv_modes).solve()
                assert (mix is not None) == (share > 1), (predicted.moment, bounds, mode, share)
    assert moments >= {"loss", "start"}


def test_free_copies_are_preferred_to_recomputation_and_slow_ones_are_not() -> None:
    for rate, preferred in ((1e12, OFFLOAD), (1e5, RECOMPUTE)):
        cost = slow_cost(small_shape(), d2h_bytes_per_second=rate, h2d_bytes_per_second=rate)
        frame = saved_bytes(cost, 0, 768)
        what = decided(
            falling_bounds(6), max_pending_d2h_bytes=2 * frame, max_prefetch_bytes=2 * frame
        )
        modes = (KEEP, OFFLOAD, RECOMPUTE)
        everything = estimate(cost.shape, what).device
        budgets = Budgets(device=everything.total - everything[Cause.ACTIVATIONS] // 4, host=None)
        counts = optimum(what, cost, budgets, modes).counts.sum(axis=(0, 1))
        assert counts[modes.index(preferred)] > 1
        others = {OFFLOAD, RECOMPUTE} - {preferred}
        assert all(counts[modes.index(other)] < 0.01 for other in others)


@given(run=runs())
@examples(33, whole=100)
def test_the_optimum_bounds_every_simulation(run: tuple[ModelCost, Decisions]) -> None:
    cost, what = run
    largest = max(
        saved_bytes(cost, layer, end - start)
        for start, end in what.bounds
        for layer in range(what.num_layers)
    )
    # The engine's own look-ahead (None) has no bound in bytes for the program to know.
    leave = what.max_pending_d2h_bytes or 2 * largest
    if what.by_layer:
        # Keys of a layer leave in one.
        leave += max(kv_bytes(cost, layer, what.total_tokens) for layer in range(what.num_layers))
    what = replace(
        what,
        max_pending_d2h_bytes=leave,
        max_prefetch_bytes=max(what.max_prefetch_bytes or 0, largest),
    )
    simulated = lower(what, cost).simulate().end_seconds
    assert _fixed_seconds(what, cost) <= simulated * (1 + 1e-6)
    assert optimum(what, cost).seconds <= simulated * (1 + 1e-6)


def _fixed_seconds(what: Decisions, cost: ModelCost) -> float:
    """The program's answer where `what`'s own modes are all there is: the bound is tight then."""
    ways = (*TIERS, "recompute") if what.by_layer else ()
    program = LinearProgram(what, cost, NO_LIMIT, all_modes(), kv_modes=ways)
    modes = all_modes()

    def fix(slot: int, way: int, count: float) -> None:
        program._equal.add((_row({int(program._at[slot, way]): 1.0}), count))

    if what.by_layer:
        lengths, groups = what.chunk_lengths, chunk_groups(what.num_chunks, modes)
        for layer, kv_mode in enumerate(what.kv_modes):
            for (group, chunks), (index, mode) in product(enumerate(groups), enumerate(modes)):
                mean = sum(lengths[chunk] for chunk in chunks) / len(chunks)
                tokens = sum(lengths[c] for c in chunks if what.mode(layer, c) == mode)
                fix(layer, group * len(modes) + index, tokens / mean)
            fix(layer, len(groups) * len(modes) + ways.index(kv_mode), 1.0)
    kinds = byte_tables(cost.shape, what, cost.profile.kind).members
    for chunk, row in enumerate(() if what.by_layer else what.layer_modes):
        for kind, members in enumerate(kinds):
            for index, mode in enumerate(modes):
                count = sum(row[layer] == mode for layer in members)
                fix(chunk, kind * len(modes) + index, count)
    mix = program.solve()
    assert mix is not None
    return mix.seconds


def test_the_bound_is_near() -> None:
    cost = slow_cost(small_shape(16), d2h_bytes_per_second=2e8, h2d_bytes_per_second=2e8)
    frame = saved_bytes(cost, 0, 800)
    what = decided(
        falling_bounds(8),
        uniform_modes(8, 16, OFFLOAD),
        layers=16,
        max_pending_d2h_bytes=2 * frame,
        max_prefetch_bytes=2 * frame,
    )
    simulated = lower(what, cost).simulate().end_seconds
    assert simulated > 1.2 * compute_seconds(what, cost)
    assert _fixed_seconds(what, cost) > 0.95 * simulated


def test_least_of_a_small_program() -> None:
    less, equal = Rows(), Rows()
    less.add((_row({0: -1.0, 1: -2.0}), -4.0))  # x + 2y >= 4
    equal.add((_row({0: 1.0, 1: 1.0}), 3.0))
    x = minimise(np.array([3.0, 5.0]), less, equal)
    assert x is not None
    assert x == pytest.approx([2.0, 1.0])


def test_the_solver_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS prints a banner from its constructor on."""
    assert minimise(np.array([1.0]), Rows(), Rows()) is not None
    assert capfd.readouterr() == ("", "")


def test_nothing_is_negative() -> None:
    x = minimise(np.array([1.0]), Rows(), Rows())
    assert x is not None
    assert x == pytest.approx([0.0])


def test_what_cannot_be_has_no_answer() -> None:
    less = Rows()
    less.add((_row({0: 1.0}), -1.0))
    assert minimise(np.array([1.0]), less, Rows()) is None


def _row(terms: dict[int, float]) -> Terms:
    return Terms(np.array([[*terms]]), np.array([[*terms.values()]]))


def test_terms_of_zero_and_rows_that_are_not_there_are_left_out() -> None:
    rows = Rows()
    first = Terms(np.array([[0], [1]]), np.array([[0.0], [2.0]]))
    second = joined(first, Terms(np.array([[2], [3]]), np.array([[4.0], [5.0]])))
    there = np.array([[True, True], [False, True]])
    rows.add((first, np.array([6.0, 7.0])), (second.before(), 8.0), exists=there)
    starts, columns, factors = Rows.matrix(Rows(), rows)
    assert starts.tolist() == [0, 0, 0, 1]
    assert columns.tolist() == [2]
    assert factors.tolist() == [4.0]
    assert rows.bounds.tolist() == [6.0, 8.0, 8.0]
