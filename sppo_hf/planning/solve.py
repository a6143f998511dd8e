"""The solver: finds the fastest plan that fits, or the violated budget.

`solve` does so for given bounds and order; `solve_chunks` compares several of both, and
`reduce_host_memory` then gives up a little speed where that frees much host memory.

The linear program says how many layers of each chunk (by layer: chunks of each layer) get which
mode. Counts are rounded to integers, the estimate is checked against every budget, and candidates
are compared by simulation. The fixed policies are candidates like any other, so the answer is never
slower, in its own simulation, than any of them that fits.

Before any search, `min_memory` finds the plan with the fewest bytes, the look-ahead included:
whether the batch fits at all, and if not, which budget is exceeded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from sppo_hf.planning.activation_modes import (
    ATTENTION_ONCE,
    RECOMPUTE_BY_SAVED,
    SAVED,
    ActivationMode,
    Saved,
    mode_of,
)
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import (
    Batch,
    Decisions,
    KVMode,
    LayerModes,
    Order,
    layer_modes_of,
    modes_used,
)
from sppo_hf.planning.linear_program import LinearProgram, chunk_groups
from sppo_hf.planning.lowering import (
    compute_seconds,
    fixed_levels,
    lower,
    min_device_bytes,
)
from sppo_hf.planning.memory import (
    FRAGMENTATION,
    Budgets,
    Cause,
    MemoryEstimate,
    byte_tables,
    most_piece_bytes,
    standing_device_bytes,
)
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.policies import Chosen, spread_kinds, uniform_modes
from sppo_hf.planning.tiers import TIERS, Tier, offload_tiers, tiers_behind_host
from sppo_hf.planning.tile_sizes import kv_block_tokens, passing_bytes
from sppo_hf.registry import OFFLOAD_POLICIES
from sppo_hf.schedule.timeline import Timeline

if TYPE_CHECKING:
    from numpy.typing import NDArray

# With more units than this, recomputation buffers and copies in flight are small compared to saved
# activations.
_FEW_UNITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The modes and tiers that the solver may use."""

    saved: tuple[Saved, ...] = ATTENTION_ONCE
    """How much of a layer may be saved."""

    tiers: tuple[Tier, ...] = ("device", "host")
    """Tiers that may hold activations."""

    kv_tiers: tuple[Tier, ...] = ("device",)
    """Tiers that may hold K/V. Of those with which a plan fits the fastest is taken, and the first
    of equally fast ones."""

    @property
    def modes(self) -> tuple[ActivationMode, ...]:
        """All allowed modes."""
        return tuple(mode_of(saved, tier) for saved in self.saved for tier in self.tiers)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetViolation:
    """A budget that is exceeded."""

    tier: Tier
    missing_bytes: int
    """Bytes above the budget."""

    moment: str
    """Name of the point of the tier's peak."""


def kv_modes_of(shape: ModelShape, base: Decisions, choices: Choices) -> tuple[KVMode, ...]:
    """Returns the allowed K/V modes.

    By layer, K/V may be recomputed if layers may be, but not by ranks that share sequences, which
    would exchange them once more. K/V that other layers read must be held until all of these have
    run.
    """
    if not base.by_layer:
        return choices.kv_tiers
    if any(layer.borrows_keys for layer in shape.layers):
        return ("device",)
    recomputable = {"inputs", "hidden"} & {*choices.saved} and "device" in choices.kv_tiers
    return (*choices.kv_tiers, "recompute") if recomputable and shape.sp == 1 else choices.kv_tiers


def fits(predicted: MemoryEstimate, budgets: Budgets) -> bool:
    """Whether every tier's peak is within its budget."""
    return next(over_budget(predicted, budgets), None) is None


def over_budget(predicted: MemoryEstimate, budgets: Budgets) -> Iterator[BudgetViolation]:
    """Yields the tiers whose peak is over its budget, the device first."""
    for tier in TIERS:
        budget = budgets.of(tier)
        missing = 0 if budget is None else predicted.peak_bytes(tier) - budget
        if missing > 0:
            moment = predicted.moment_of(tier)
            yield BudgetViolation(tier=tier, missing_bytes=missing, moment=moment)


def missing_bytes(predicted: MemoryEstimate, budgets: Budgets) -> int:
    """Returns the bytes by which peaks exceed their budgets, summed over tiers; 0 if all fit."""
    return sum(limit.missing_bytes for limit in over_budget(predicted, budgets))


def min_missing_bytes(
    cost: ModelCost, base: Decisions, budgets: Budgets, choices: Choices
) -> float:
    """Returns bytes that every plan with these bounds, order and K/V tier lacks; 0 if unknown.

    A lower bound from the device bytes that no mode changes, and from the bytes of all tiers
    together when backward begins, where every activation is held somewhere. Takes a fifth of the
    time of an estimate.
    """
    if not base.training:
        return 0.0
    program = lower(base, cost)
    tables, points = program.tables, program.points
    device = float("inf") if budgets.device is None else budgets.device
    over = standing_device_bytes(cost.shape, cost.profile.kind) - device
    always = min_device_bytes(tables)
    over = max(over, float(always.max()) - device)
    sizes = [size for tier in TIERS if (size := budgets.of(tier)) is not None]
    if len(sizes) < len(TIERS):
        return max(0.0, over)
    begin = points.backward(points.num_chunks - 1, points.num_layers - 1)
    allowed = [SAVED.index(saved) for saved in choices.saved]
    smallest = tables.saved[:, allowed].min(axis=1)
    # The running layer's activations are either all kept, or recomputed.
    running = tables.saved + tables.workspace_backward - smallest[:, None]
    running = running[tables.kind_of[-1], allowed, -1].min()
    held = always[begin] + float(tables.of_layers(smallest).sum() + running)
    held += sum(tables.host_resident.values())
    held += sum(int(program.kv_bytes(tier)[:-1].sum()) for tier in TIERS)
    for tier in offload_tiers():
        held += sum(int(level.during[begin]) for level in fixed_levels(tables)[tier].values())
    return max(0.0, over, held - sum(sizes))


def min_memory(cost: ModelCost, base: Decisions, budgets: Budgets, choices: Choices) -> Decisions:
    """Returns the plan most likely to fit: few saved bytes, on the farthest tiers with free bytes.

    The earliest activations (needed last) go to the disk when the host is full, and the latest
    (needed first) are kept on the device when no other tier has free bytes. Saving less takes fewer
    bytes, but recomputation buffers and copies in flight need memory too. So with few layers or
    chunks other choices are tried, and the one that comes closest to the budgets is returned.
    """
    few = base.num_chunks * base.num_layers <= _FEW_UNITS
    best, fewest = base, float("inf")
    for saved in choices.saved[::-1] if few else choices.saved[-1:]:
        ways = [_farthest_modes(cost, base, budgets, choices, saved)]
        if few and "device" in choices.tiers:
            keep = mode_of(saved, "device")
            ways.append(uniform_modes(base.num_chunks, base.num_layers, keep))
        for modes in ways:
            plan = with_lookahead(cost, base, modes, units=1)
            if not few:
                return plan
            missing = missing_bytes(lower(plan, cost).estimate, budgets)
            if missing < fewest:
                best, fewest = plan, missing
            if not missing:
                return plan
    return best


def _farthest_modes(
    cost: ModelCost,
    base: Decisions,
    budgets: Budgets,
    choices: Choices,
    saved: Saved,
) -> LayerModes:
    """Returns modes with one `Saved` value, on the farthest tiers with free bytes, unit by unit."""
    away: list[Tier] = [tier for tier in offload_tiers() if tier in choices.tiers]
    room = {tier: _free_bytes(cost, base, budgets, tier, away) for tier in away}
    places: dict[Tier, float] = {}
    # The device keeps the bytes that do not fit on other tiers, beginning with the latest unit.
    sizes = byte_tables(cost.shape, base, cost.profile.kind).activations(saved)
    if base.by_layer:
        sizes = sizes.T
    total = float(sizes.sum())
    if "device" in choices.tiers:
        places["device"] = max(0.0, total - sum(room.values()))
    for tier in away:
        places[tier] = room[tier]
    overfull = next(iter(places))
    rows: list[tuple[ActivationMode, ...]] = []
    for row_sizes in reversed(sizes.tolist()):
        whole, size = _next_tier(places, min(row_sizes)), sum(row_sizes)
        if places[whole] >= size:
            places[whole] -= size
            rows.append((mode_of(saved, whole),) * len(row_sizes))
            continue
        if whole == overfull and places[overfull] <= 0:
            # No tier has free bytes for any of these units.
            places[overfull] -= size
            rows.append((mode_of(saved, overfull),) * len(row_sizes))
            continue
        row: list[ActivationMode] = []
        for size in reversed(row_sizes):
            tier = _next_tier(places, size)
            places[tier] -= size
            row.append(mode_of(saved, tier))
        rows.append(tuple(reversed(row)))
    return layer_modes_of(rows[::-1], by_layer=base.by_layer)


def _next_tier(places: dict[Tier, float], size: int) -> Tier:
    """Returns the nearest tier with free bytes for one more unit."""
    for tier, room in places.items():
        # The device's bytes are a quota that must be reached, so the unit that exceeds it counts.
        if room > 0 if tier == "device" else room >= size:
            return tier
    return next(iter(places))


def _free_bytes(
    cost: ModelCost,
    base: Decisions,
    budgets: Budgets,
    tier: Tier,
    away: Sequence[Tier],
) -> float:
    """Returns the bytes free for activations on a tier, beside K/V and staging."""
    budget = budgets.of(tier)
    if budget is None:
        return float("inf")
    tables = byte_tables(cost.shape, base, cost.profile.kind)
    if tier == "host":
        budget -= sum(tables.host_resident.values())
    if tier == "host" and cost.profile.kind == "cuda":
        budget = most_piece_bytes(budget)
    if tier == "host":
        passing = {*tiers_behind_host()} & {*away, base.kv_tier, *base.kv_modes}
        budget -= len(passing) * base.staging_bytes
    if base.by_layer:
        waiting = [i for i in range(base.num_layers) if base.kv_mode(i) == tier]
        budget -= int(tables.layer_kv[waiting].sum())
    elif base.kv_tier == tier:
        budget -= int(tables.of_layers(tables.kv + tables.dkv).sum())
    return float(max(0, budget))


def with_lookahead(cost: ModelCost, base: Decisions, modes: LayerModes, *, units: int) -> Decisions:
    """Returns `base` with other modes and a look-ahead of `units` units of the largest mode."""
    away: set[Saved] = {mode.saved for mode in modes_used(modes) if mode.offload}
    ahead = lookahead_bytes(cost, base, away, units)
    return with_lookahead_bytes(cost, replace(base, layer_modes=modes), ahead)


def with_lookahead_bytes(cost: ModelCost, decisions: Decisions, activation_bytes: int) -> Decisions:
    """Sets the look-ahead in bytes of activations, plus one layer's streamed gradient sums.

    By layer plus one layer's K/V, if any are offloaded.
    """
    tables = byte_tables(cost.shape, decisions, cost.profile.kind)
    sums = int(tables.kv_out_backward[:, -1].max())
    if decisions.by_layer and set(offload_tiers()) & set(decisions.kv_modes):
        sums = int(tables.layer_kv.max())
    max_pending_d2h_bytes = activation_bytes + sums
    # If nothing is offloaded, the engine's default applies, whose bounds are never reached.
    return replace(
        decisions,
        max_pending_d2h_bytes=max_pending_d2h_bytes or None,
        max_prefetch_bytes=activation_bytes or None,
    )


def lookahead_bytes(cost: ModelCost, base: Decisions, saved: Iterable[Saved], units: int) -> int:
    """Returns the bytes of `units` units, of the largest unit of any of these `Saved` values."""
    tables = byte_tables(cost.shape, base, cost.profile.kind)
    indices = [SAVED.index(one) for one in saved]
    return units * int(tables.saved[:, indices].max(initial=0))


_ATTEMPTS = 4
# `solve_chunks` solves for ways to cut by increasing compute until so many fit, several chunks and
# one in tiles each: compute alone does not tell which of the two needs less recomputation.
_PLANS_COMPARED = 2
# Units of the largest mode that may be in flight: more hide jitter, fewer save memory.
_LAYERS_AHEAD = 2
_MAX_LAYERS_AHEAD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A plan that fits, with its simulation."""

    decisions: Decisions
    timeline: Timeline
    policy: str
    """The winning candidate: "solver", or a fixed policy by name."""

    @property
    def step_seconds(self) -> float:
        """Simulated duration of the step."""
        return self.timeline.end_seconds


def solve(
    cost: ModelCost,
    base: Decisions,
    budgets: Budgets,
    choices: Choices,
    *,
    best: Solution | None = None,
    under_seconds: float = float("inf"),
) -> Solution | BudgetViolation:
    """Finds the fastest plan that fits.

    Args:
        cost: seconds of every unit.
        base: rows, bounds, order and tile; its modes and look-ahead are replaced.
        budgets: bytes per tier.
        choices: what may be used.
        best: another plan that fits; returned if none is faster.
        under_seconds: the caller needs a plan faster than this; if there is none, any plan that
            fits will do.
    """
    found = _best_candidate(cost, base, budgets, choices, best=best, under_seconds=under_seconds)
    if found is best or isinstance(found, BudgetViolation):
        return found
    if found.step_seconds <= _STALL_RATIO * compute_seconds(found.decisions, cost):
        return found
    # The linear program ensures that copies fit beside compute in total, but not at every moment.
    # So a mixed plan may wait for copies where a plan with fewer modes does not.
    for saved in choices.saved if len(choices.saved) > 1 else ():
        one_kind = replace(choices, saved=(saved,))
        other = _best_candidate(
            cost, base, budgets, one_kind, best=found, under_seconds=under_seconds
        )
        assert not isinstance(other, BudgetViolation), "there was one that fits"
        found = other
    return found


def _best_candidate(
    cost: ModelCost,
    base: Decisions,
    budgets: Budgets,
    choices: Choices,
    *,
    best: Solution | None,
    under_seconds: float,
) -> Solution | BudgetViolation:
    """Returns the fastest of `best`, rounded optima, fixed policies and the least memory.

    Candidates that do not fit, or cannot be faster than the best so far, are not simulated.
    """
    solved = False
    broken: list[list[BudgetViolation]] = []
    for kv_mode in kv_modes_of(cost.shape, base, choices):
        placed = with_kv(base, kv_mode, cost.shape, budgets, cost.profile.kind)
        least = min_memory(cost, placed, budgets, choices)
        broken.append([*over_budget(lower(least, cost).estimate, budgets)])
        if base.training and broken[-1]:
            continue
        # By layer, one program covers all K/V modes.
        mixed: list[tuple[str, Decisions, float]] = []
        if not solved:
            under = under_seconds if best is None else min(under_seconds, best.step_seconds)
            whole = _whole_slabs(budgets, cost, placed)
            for modes, kv_modes in _mode_sets(cost.shape, placed, choices):
                mix = _solve_mix(cost, placed, whole, modes, kv_modes, under_seconds=under)
                mixed += [("solver", *mix)] if mix is not None else []
        solved = base.by_layer
        named = [*fixed_policies(cost, placed, choices), ("least memory", least)]
        # The most promising candidates come first; those that cannot win are not simulated.
        mixed.sort(key=lambda candidate: candidate[2])
        for name, decisions, seconds in [*mixed, *((*one, 0.0) for one in named)]:
            if best is not None:
                seconds = max(seconds, compute_seconds(decisions, cost))
                if seconds >= best.step_seconds:
                    continue
            if fits(lower(decisions, cost).estimate, budgets):
                solution = simulate_plan(decisions, cost, policy=name)
                if best is None or solution.step_seconds < best.step_seconds:
                    best = solution
    if best is not None:
        return best
    # Report the K/V mode that misses the fewest bytes in total and, for it, the worst tier.
    closest = min(broken, key=lambda limits: sum(limit.missing_bytes for limit in limits))
    assert closest, "what does not fit breaks a limit"
    return max(closest, key=lambda limit: limit.missing_bytes)


def solve_chunks(
    cost: ModelCost,
    batch: Batch,
    cuts: Sequence[Bounds],
    budgets: Budgets,
    choices: Choices,
    *,
    orders: Sequence[Order] = ("by_chunk",),
    tiles: Sequence[int] = (),
    under_seconds: float = float("inf"),
) -> Solution | BudgetViolation:
    """Returns the fastest plan over several ways to cut a sequence and orders of the grid.

    Args: as of `solve`, and
        cuts: bounds to choose from, at least one.
        orders: orders to choose from; the first of equally fast ones is taken.
        tiles: by layer, tile sizes for one chunk over all tokens, an alternative to several chunks.
    """
    best: Solution | None = None
    closest: BudgetViolation | None = None
    for order in orders:
        found_plans = {False: 0, True: 0}
        other = best  # what another order has come to is to be beaten
        bases = [batch.decisions(bounds, cost.shape.num_layers, order) for bounds in cuts]
        if order == "by_layer":
            bases += tiled_layers(batch, cuts[0][-1][1], cost.shape.num_layers, tiles)
        for base in sorted(bases, key=lambda base: compute_seconds(base, cost)):
            in_tiles = bool(base.layer_tile_tokens)
            if found_plans[in_tiles] >= _PLANS_COMPARED:
                continue
            if other is not None and compute_seconds(base, cost) >= other.step_seconds:
                break
            found = solve(cost, base, budgets, choices, best=other, under_seconds=under_seconds)
            if isinstance(found, BudgetViolation):
                if closest is None or found.missing_bytes < closest.missing_bytes:
                    closest = found
                continue
            found_plans[in_tiles] += 1
            if best is None or found.step_seconds < best.step_seconds:
                best = found
    if best is not None:
        return best
    assert closest is not None, "there is at least one way to cut"
    return closest


def tiled_layers(
    batch: Batch, total_tokens: int, num_layers: int, tiles: Sequence[int]
) -> Iterator[Decisions]:
    """Yields plans by layer in one chunk, with token-wise modules in tiles."""
    for tile_tokens in tiles:
        if tile_tokens < total_tokens * batch.batch_rows:
            whole = batch.decisions(((0, total_tokens),), num_layers, "by_layer")
            yield replace(whole, layer_tile_tokens=tile_tokens)


EQUALLY_FAST = 1.01
"""Plans whose durations differ by less than this ratio are equally fast; simulation is not more
exact."""

# A plan that takes longer than its compute times this waits for copies, and may not be the best.
_STALL_RATIO = 1.01

HOST_PRICE = 0.03
"""Share of a step's seconds that all of the host's budget has to save to be used, and a part of it
in proportion. Host memory is page-locked, which takes time at the start, and what a plan leaves
remains for data loading, checkpoints and other processes."""

# Shares of `EQUALLY_FAST` that the linear program may use, in this order until a plan is found: its
# counts are rounded to whole units, and copies may delay each other, which takes more.
_SLOWER_SHARES = (0.9, 0.45)
# Share of a plan's host memory with which another is searched: the linear program also offloads for
# gains that are tiny, or that rounding takes away.
_LESS_HOST_SHARE = 0.8


def reduce_host_memory(
    cost: ModelCost, found: Solution, budgets: Budgets, choices: Choices
) -> Solution:
    """Returns a plan that uses less host memory than `found` where that is worth it, or `found`.

    It has the bounds and the order of `found`, saves no larger kinds, and has no more bytes behind
    the host. It takes at most `EQUALLY_FAST` times as long, and what it takes longer
    is less than the price of the host memory that it frees.
    """
    base = found.decisions
    held = lower(base, cost).estimate
    most_bytes = held.host.total
    if not most_bytes:
        return found
    capacity_bytes = budgets.host or most_bytes
    price = HOST_PRICE * found.step_seconds / capacity_bytes
    used = modes_used(base.layer_modes)
    largest = min(SAVED.index(mode.saved) for mode in used)
    offloaded = min((SAVED.index(m.saved) for m in used if m.offload), default=len(SAVED))
    budgets = budgets.replace(**{tier: held.peak_bytes(tier) for tier in offload_tiers()})

    def host_seconds(decisions: Decisions) -> float:
        """Returns the price of the plan's host memory."""
        return price * lower(decisions, cost).estimate.host.total

    best, best_priced = found, found.step_seconds + price * most_bytes
    most_seconds = EQUALLY_FAST * found.step_seconds
    less = budgets.replace(host=int(_LESS_HOST_SHARE * most_bytes))
    kinds = tuple(kind for kind in choices.saved if kind in {mode.saved for mode in used})
    same = replace(choices, saved=kinds)
    tried = solve(cost, base, less, same, under_seconds=found.step_seconds)
    if isinstance(tried, Solution) and tried.step_seconds <= most_seconds:
        priced = tried.step_seconds + host_seconds(tried.decisions)
        if priced < best_priced:
            best, best_priced = tried, priced
    modes = tuple(
        mode
        for mode in choices.modes
        if SAVED.index(mode.saved) >= (offloaded if mode.offload else largest)
    )
    every = kv_modes_of(cost.shape, base, choices) if base.by_layer else ()
    kv_modes = tuple(m for m in every if m not in offload_tiers() or m in base.kv_modes)
    # By layer the last one's K/V stay, wherever those of others must be.
    kv_modes = kv_modes or base.kv_modes[-1:]
    for share in _SLOWER_SHARES:
        slower = 1.0 + share * (EQUALLY_FAST - 1.0)
        mix = _solve_mix(
            cost,
            base,
            budgets,
            modes,
            kv_modes,
            host_price=price * 2**30,
            most_seconds=slower * found.step_seconds,
        )
        if mix is None:
            break
        decisions, bound = mix
        limit_seconds = min(most_seconds, best_priced - host_seconds(decisions))
        if bound >= limit_seconds:
            break
        light = simulate_plan(decisions, cost, policy="solver")
        if light.step_seconds < limit_seconds:
            return light
    return best


def simulate_plan(decisions: Decisions, cost: ModelCost, *, policy: str) -> Solution:
    """Simulates a plan."""
    return Solution(decisions=decisions, timeline=lower(decisions, cost).simulate(), policy=policy)


def with_kv(
    base: Decisions, kv_mode: KVMode, shape: ModelShape, budgets: Budgets, device_kind: str
) -> Decisions:
    """Returns `base` with a K/V mode, and the staging memory that it needs.

    Offloaded K/V are loaded layer by layer, and by chunk block by block if they are large. By layer
    K/V of the last layer are kept on the device, as its backward follows at once.
    """
    rows = base.batch_rows
    block = 0
    if base.by_layer:
        base = replace(base, kv_modes=((kv_mode,) * (base.num_layers - 1) + ("device",)))
    elif kv_mode != "device":
        block = kv_block_tokens(
            shape,
            base.total_tokens,
            batch_rows=rows,
            device_kind=device_kind,
            device_bytes=budgets.device,
        )
    passing = passing_bytes(
        shape,
        max(base.chunk_lengths),
        batch_rows=rows,
        block_tokens=block if kv_mode in tiers_behind_host() else 0,
    )
    return replace(
        base,
        kv_tier="device" if base.by_layer or kv_mode == "recompute" else kv_mode,
        kv_block_tokens=block,
        staging_bytes=max(base.staging_bytes, passing),
    )


def fixed_policies(
    cost: ModelCost, base: Decisions, choices: Choices
) -> Iterator[tuple[str, Decisions]]:
    """Yields (name, decisions) of the fixed policies that use allowed modes only."""
    for saved in choices.saved:
        for policy in OFFLOAD_POLICIES:
            decisions = fixed_policy(cost, base, policy, saved, choices)
            if decisions is not None:
                yield f"{policy}, recompute {RECOMPUTE_BY_SAVED[saved]}", decisions


def fixed_policy(
    cost: ModelCost, base: Decisions, policy: str, saved: Saved, choices: Choices
) -> Decisions | None:
    """Returns the plan of a fixed policy; None if it needs a tier that is not allowed."""
    away: Tier | None = next((tier for tier in offload_tiers() if tier in choices.tiers), None)
    facts = OFFLOAD_POLICIES.facts(policy)
    if facts["keeps"] and "device" not in choices.tiers:
        return None
    if not facts["leaves"]:
        modes = OFFLOAD_POLICIES[policy](cost, base, saved, "device", 0.0)
        return replace(base, layer_modes=modes)
    if away is None:
        return None
    tables = byte_tables(cost.shape, base, cost.profile.kind)
    kv_bytes = int(tables.of_layers(tables.kv_out_forward).sum())
    modes = OFFLOAD_POLICIES[policy](cost, base, saved, away, kv_bytes)
    return with_lookahead(cost, base, modes, units=_LAYERS_AHEAD)


def _solve_mix(
    cost: ModelCost,
    base: Decisions,
    budgets: Budgets,
    modes: tuple[ActivationMode, ...],
    kv_modes: tuple[KVMode, ...],
    *,
    under_seconds: float = float("inf"),
    host_price: float = 0.0,
    most_seconds: float = float("inf"),
) -> tuple[Decisions, float] | None:
    """Returns the rounded optimum with these modes that fits, and the seconds before rounding.

    These are a bound on the seconds of every plan with these modes if host memory has no price.
    None if there is none, or none that takes less than `under_seconds`. See `LinearProgram` for
    the price of a GiB of host memory and the limit of the seconds.
    """
    members = byte_tables(cost.shape, base, cost.profile.kind).members
    away: set[Saved] = {mode.saved for mode in modes if mode.offload}
    ahead = lookahead_bytes(cost, base, away, _LAYERS_AHEAD)
    if base.by_layer:
        members = chunk_groups(base.num_chunks, modes)
        nearest = next((mode for mode in kv_modes if mode in offload_tiers()), "device")
        base = replace(base, kv_modes=(nearest,) * base.num_layers)
    base = with_lookahead_bytes(cost, base, ahead)
    tight, bound = budgets, float("inf")
    for _ in range(_ATTEMPTS):
        mix = LinearProgram(
            *(base, cost, tight, modes),
            kv_modes=kv_modes,
            host_price=host_price,
            most_seconds=most_seconds,
        ).solve()
        bound = bound if mix is None else min(bound, mix.seconds)
        if mix is None or bound >= under_seconds:
            break
        rows = _round_counts(mix.counts, members, modes)
        decisions = replace(base, layer_modes=layer_modes_of(rows, by_layer=base.by_layer))
        if mix.kv_shares is not None:
            rounded_kv = _round_counts(mix.kv_shares[:, None], ((0,),), kv_modes)
            decisions = replace(decisions, kv_modes=tuple(mode for (mode,) in rounded_kv))
        decisions = _fit_lookahead(cost, decisions, budgets)
        predicted = lower(decisions, cost).estimate
        over = list(over_budget(predicted, budgets))
        if not over:
            return decisions, bound
        # A few excess bytes on the host occupy a whole slab, which is not to be subtracted.
        slabs = {"host": predicted.standing_bytes(Cause.SLABS)}
        tight = lower_budgets(tight, over, unused=slabs)
    return None


def _whole_slabs(budgets: Budgets, cost: ModelCost, base: Decisions) -> Budgets:
    """Returns budgets in which activations on the host fill whole slabs of its pool."""
    if budgets.host is None or cost.profile.kind != "cuda":
        return budgets
    host_resident = sum(byte_tables(cost.shape, base, cost.profile.kind).host_resident.values())
    pieces = most_piece_bytes(budgets.host - host_resident)
    return budgets.replace(host=min(budgets.host, host_resident + pieces))


def _mode_sets(
    shape: ModelShape, base: Decisions, choices: Choices
) -> Iterable[tuple[tuple[ActivationMode, ...], tuple[KVMode, ...]]]:
    """Returns sets of allowed modes and of K/V modes (by chunk one), with less and less offloading.

    Offloading needs memory for its look-ahead. That of whole activations is ten times that of a
    layer's inputs, and that of a layer's K/V grows with the sequence. Bytes behind the host that
    gain little may arrive late; so where K/V need not be there, the same sets follow without tiers
    behind the host.
    """
    kv_modes = kv_modes_of(shape, base, choices) if base.by_layer else (base.kv_tier,)
    behind = tiers_behind_host()
    allowed = [(choices, kv_modes)]
    near = tuple(tier for tier in choices.tiers if tier not in behind)
    near_kv = tuple(mode for mode in kv_modes if mode not in behind)
    if near and near_kv:
        allowed.append((replace(choices, tiers=near), near_kv))
    found: dict[tuple[tuple[ActivationMode, ...], tuple[KVMode, ...]], None] = {}
    for some, kv_of_some in allowed:
        stays = tuple(mode for mode in kv_of_some if mode not in offload_tiers())
        for some_kv in dict.fromkeys((kv_of_some, stays or kv_of_some)):
            for skipped in range(len(some.saved) if some.tiers != ("device",) else 0):
                leaving = some.saved[skipped:]
                modes = tuple(m for m in some.modes if not m.offload or m.saved in leaving)
                found[modes, some_kv] = None
            if "device" in some.tiers:
                found[tuple(m for m in some.modes if not m.offload), some_kv] = None
    return found


def _round_counts(
    mix: NDArray[np.float64], members: Sequence[Sequence[int]], modes: Sequence[Chosen]
) -> list[tuple[Chosen, ...]]:
    """Rounds counts of layers (or chunks) by largest remainder, carried over to the next slot.

    Args:
        mix: [slot, kind, mode] counts.
        members: indices of the layers (or chunks) of each kind.
        modes: the modes, in the order of the last dimension of `mix`.

    Returns:
        The modes of every slot's members.
    """
    total = sum(map(len, members))
    carry = np.zeros(mix.shape[1:])
    rows: list[tuple[Chosen, ...]] = []
    for counts in mix:
        wanted = np.maximum(counts + carry, 0.0)
        per_kind: list[dict[Chosen, int]] = []
        for kind, alike in enumerate(members):
            whole = np.floor(wanted[kind] + 1e-9).astype(int)
            while whole.sum() > len(alike):
                whole[int(np.argmax(whole))] -= 1
            rest = wanted[kind] - whole
            while whole.sum() < len(alike):
                most = int(np.argmax(rest))
                whole[most] += 1
                rest[most] -= 1.0
            carry[kind] = counts[kind] + carry[kind] - whole
            per_kind.append({m: int(n) for m, n in zip(modes, whole, strict=True) if n})
        rows.append(spread_kinds(per_kind, members, total))
    return rows


def _fit_lookahead(cost: ModelCost, decisions: Decisions, budgets: Budgets) -> Decisions:
    """Fits the look-ahead to the activations that are offloaded, and extends it into free bytes."""
    used = modes_used(decisions.layer_modes)
    away: set[Saved] = {mode.saved for mode in used if mode.offload}
    if not away:
        return with_lookahead_bytes(cost, decisions, 0)
    least = lookahead_bytes(cost, decisions, away, _LAYERS_AHEAD)
    most = lookahead_bytes(cost, decisions, away, _MAX_LAYERS_AHEAD)
    if budgets.device is None:
        return with_lookahead_bytes(cost, decisions, most)
    decisions = with_lookahead_bytes(cost, decisions, least)
    peak = lower(decisions, cost).estimate.device.total
    # The reserve for fragmentation grows with the bytes held.
    spare = int((budgets.device - peak) / (1.0 + FRAGMENTATION[cost.profile.kind]))
    more = with_lookahead_bytes(cost, decisions, min(most, least + max(0, spare)))
    # Whole units are prefetched, so a peak may grow by slightly more than the look-ahead.
    peak = lower(more, cost).estimate.device.total
    return more if peak <= budgets.device else decisions


def lower_budgets(
    budgets: Budgets,
    over: Sequence[BudgetViolation],
    *,
    unused: Mapping[Tier, int] = MappingProxyType({}),
) -> Budgets:
    """Returns budgets lowered by the excess over them, and a little more.

    `unused` bytes of the excess hold nothing, and are not subtracted.
    """
    lowered = {
        limit.tier: limit.missing_bytes - unused.get(limit.tier, 0) + 2**20 for limit in over
    }
    sizes = {tier: budgets.of(tier) for tier in lowered}
    return budgets.replace(
        **{tier: None if size is None else size - lowered[tier] for tier, size in sizes.items()}
    )
