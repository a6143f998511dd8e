"""The solver: of all plans for given bounds, the fastest that fits, or the first limit that breaks.

The linear programme says how many layers of each chunk get which mode; counts are rounded to whole
layers, the estimate is checked against every budget, and the simulator has the last word. The fixed
policies are candidates like any other, so the answer is never worse, in its own simulation, than
any of them that fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sppo_hf.planning.cost import StageCost
from sppo_hf.planning.decisions import Decisions, LayerModes
from sppo_hf.planning.memory import MemoryEstimate, MemoryModel, estimate
from sppo_hf.planning.modes import AWAY_TIERS, TIERS, FrameMode, Saved, Tier, mode_of
from sppo_hf.planning.policies import sppo_modes, spread_kinds, uniform_modes
from sppo_hf.planning.programme import Budgets, LayerKinds, Mix, Programme
from sppo_hf.planning.stage import lower
from sppo_hf.schedule.timeline import Timeline

_ATTEMPTS = 4
# Frames of the largest kind that may be on their way: more hide hiccups, fewer save memory.
_FRAMES_AHEAD = 2
_MOST_FRAMES_AHEAD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the solver may choose from."""

    saved: tuple[Saved, ...] = ("whole", "products", "skeleton")
    """How frames may be reduced."""

    tiers: tuple[Tier, ...] = ("device", "host")
    """Where frames may wait."""

    kv_tiers: tuple[Tier, ...] = ("device",)
    """Where K/V may wait, in the order in which they are tried; the first that fits is taken."""

    @property
    def modes(self) -> tuple[FrameMode, ...]:
        """All allowed modes."""
        return tuple(mode_of(saved, tier) for saved in self.saved for tier in self.tiers)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLimit:
    """What keeps a batch from fitting, whatever is chosen."""

    tier: Tier
    """The tier whose budget breaks."""

    missing_bytes: int
    """By how much."""

    moment: str
    """When."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A plan that fits, with what it is predicted to take."""

    decisions: Decisions
    """What is done."""

    estimate: MemoryEstimate
    """What it holds."""

    timeline: Timeline
    """When what happens, simulated."""

    policy: str
    """Which candidate won: "solver", or a fixed policy by name."""

    bound_seconds: float
    """No mix of the allowed modes is faster, by the linear programme; 0 where it was not asked."""

    @property
    def step_seconds(self) -> float:
        """Simulated duration of the step."""
        return self.timeline.end_seconds


def solve(
    cost: StageCost,
    base: Decisions,
    budgets: Budgets,
    choices: Choices,
    *,
    device_kind: str = "cuda",
) -> Solution | FirstLimit:
    """Finds the fastest plan that fits.

    Args:
        cost: seconds and bytes of every unit.
        base: rows, bounds and tile; its modes and look-ahead are replaced.
        budgets: bytes per tier.
        choices: modes and tiers that may be used.
        device_kind: "cpu" or "cuda".
    """
    for kv_tier in choices.kv_tiers:
        placed = with_kv(base, kv_tier)
        least = least_memory(cost, placed, budgets, choices, device_kind)
        if base.training and not fits(
            estimate(cost.shape, least, device_kind=device_kind), budgets
        ):
            continue
        candidates = list(_mixed(cost, placed, budgets, choices, device_kind))
        bound = min((seconds for *_, seconds in candidates), default=0.0)
        named = [(name, decisions) for name, decisions, _ in candidates]
        named += [*fixed_policies(cost, placed, choices), ("least memory", least)]
        best: Solution | None = None
        for name, decisions, predicted in _that_fit(cost, budgets, device_kind, named):
            if best is not None and compute_seconds(decisions, cost) >= best.step_seconds:
                continue  # its simulation cannot end before its compute
            solution = play(decisions, cost, predicted, policy=name, bound_seconds=bound)
            if best is None or solution.step_seconds < best.step_seconds:
                best = solution
        if best is not None:
            return best
    return first_limit(cost, base, budgets, choices, device_kind=device_kind)


def play(
    decisions: Decisions,
    cost: StageCost,
    predicted: MemoryEstimate,
    *,
    policy: str,
    bound_seconds: float = 0.0,
) -> Solution:
    """Returns the solution that `decisions` are, simulated."""
    return Solution(
        decisions=decisions,
        estimate=predicted,
        timeline=lower(decisions, cost).simulate(),
        policy=policy,
        bound_seconds=bound_seconds,
    )


def compute_seconds(decisions: Decisions, cost: StageCost) -> float:
    """Returns the seconds of all compute of a step, waiting left out."""
    total = 0.0
    kinds = LayerKinds.of(cost)
    for (start, end), modes in zip(decisions.bounds, decisions.layer_modes, strict=True):
        total += cost.head_seconds(end - start, training=decisions.training)
        for layer, members in zip(kinds.representative, kinds.members, strict=True):
            total += len(members) * cost.forward_seconds(layer, start, end)
            if decisions.training:
                total += len(members) * cost.backward_seconds(layer, start, end)
                counts: Counter[Saved] = Counter(modes[i].saved for i in members)
                for saved, count in counts.items():
                    total += count * cost.recompute_seconds(layer, end - start, saved)
    return total


def with_kv(base: Decisions, kv_tier: Tier) -> Decisions:
    """Returns `base` with K/V on a tier; away from the device they come layer by layer."""
    if kv_tier == "device":
        return replace(base, kv_tier="device", kv_block_tokens=0)
    return replace(base, kv_tier=kv_tier, kv_block_tokens=base.total_tokens)


def fits(predicted: MemoryEstimate, budgets: Budgets) -> bool:
    """Whether every tier's peak is within its budget."""
    return next(over_budget(predicted, budgets), None) is None


def over_budget(predicted: MemoryEstimate, budgets: Budgets) -> Iterator[FirstLimit]:
    """Yields the tiers whose peak is over its budget, the device first."""
    for tier in TIERS:
        budget = budgets.of(tier)
        moment = predicted.peak(tier)
        missing = 0 if budget is None else moment.tier(tier).total - budget
        if missing > 0:
            yield FirstLimit(tier=tier, missing_bytes=missing, moment=moment.name)


def fixed_policies(
    cost: StageCost, base: Decisions, choices: Choices
) -> Iterator[tuple[str, Decisions]]:
    """Yields (name, decisions) of the fixed policies that use allowed modes only."""
    for saved in choices.saved:
        for policy in ("none", "full", "sppo"):
            decisions = fixed_policy(cost, base, policy, saved, choices)
            if decisions is not None:
                yield f"{policy}, frames {_SAVED_WORDS[saved]}", decisions


def fixed_policy(
    cost: StageCost, base: Decisions, policy: str, saved: Saved, choices: Choices
) -> Decisions | None:
    """Returns one fixed policy, or None where it needs a tier that is not allowed."""
    away: Tier | None = next((tier for tier in AWAY_TIERS if tier in choices.tiers), None)
    if policy == "none":
        if "device" not in choices.tiers:
            return None
        modes = uniform_modes(base.num_chunks, base.num_layers, mode_of(saved, "device"))
        return replace(base, layer_modes=modes)
    if away is None or (policy == "sppo" and "device" not in choices.tiers):
        return None
    if policy == "full":
        modes = uniform_modes(base.num_chunks, base.num_layers, mode_of(saved, away))
    else:
        modes = sppo_modes(cost, base.bounds, saved=saved, tier=away)
    return _with_lookahead(cost, base, modes, frames=_FRAMES_AHEAD)


def first_limit(
    cost: StageCost, base: Decisions, budgets: Budgets, choices: Choices, *, device_kind: str
) -> FirstLimit:
    """Returns what breaks first when as little as possible is held, and where."""
    limits = [
        limit
        for kv_tier in choices.kv_tiers
        for limit in over_budget(
            estimate(
                cost.shape,
                least_memory(cost, with_kv(base, kv_tier), budgets, choices, device_kind),
                device_kind=device_kind,
            ),
            budgets,
        )
    ]
    assert limits, "what does not fit breaks a limit"
    # The K/V tier that comes closest.
    return min(limits, key=lambda limit: limit.missing_bytes)


def least_memory(
    cost: StageCost, base: Decisions, budgets: Budgets, choices: Choices, device_kind: str
) -> Decisions:
    """Returns the plan that is most likely to fit: smallest frames, as far away as there is room.

    Chunks go to the host, the earliest (needed last) to the disk when it is full, and the latest
    (needed first) stay on the device when nothing else has room.
    """
    saved: Saved = choices.saved[-1]
    layers = range(base.num_layers)
    sizes = [
        sum(cost.frame_bytes(i, end - start, saved) for i in layers) for start, end in base.bounds
    ]
    order: list[Tier] = [tier for tier in AWAY_TIERS if tier in choices.tiers]
    room: dict[Tier, float] = {}
    for tier in order:
        budget = budgets.of(tier)
        room[tier] = float("inf") if budget is None else float(budget)
        if base.kv_tier == tier:
            kv = cost.shape.kv_bytes_per_token() + cost.shape.dkv_bytes_per_token()
            room[tier] -= kv * base.total_tokens * base.batch_rows
    if "disk" in order and "host" in room:
        room["host"] -= base.staging_bytes
    tiers: list[Tier] = []
    for size in reversed(sizes):
        free: list[Tier] = [tier for tier in order if room[tier] >= size]
        place: Tier = free[0] if free else "device"
        if place == "device" and "device" not in choices.tiers:
            place = order[-1]
        if place != "device":
            room[place] -= size
        tiers.append(place)
    modes = tuple((mode_of(saved, tier),) * base.num_layers for tier in reversed(tiers))
    return _with_lookahead(cost, base, modes, frames=1)


def _mixed(
    cost: StageCost, base: Decisions, budgets: Budgets, choices: Choices, device_kind: str
) -> Iterator[tuple[str, Decisions, float]]:
    """Yields rounded optima, for look-aheads that suit small frames and large ones."""
    kinds = LayerKinds.of(cost)
    for modes in _mode_sets(choices):
        away: set[Saved] = {mode.saved for mode in modes if mode.offload}
        ahead = _lookahead_bytes(cost, base, away, _FRAMES_AHEAD)
        shaped = replace(base, leave_bytes=ahead, fetch_bytes=ahead)
        tight = budgets
        for _ in range(_ATTEMPTS):
            mix = Programme(shaped, cost, tight, modes, device_kind=device_kind).solve()
            if mix is None:
                break
            decisions = replace(shaped, layer_modes=_rounded(mix, kinds, modes))
            decisions = _settled(cost, decisions, budgets, device_kind)
            predicted = estimate(cost.shape, decisions, device_kind=device_kind)
            over = list(over_budget(predicted, budgets))
            if not over:
                yield "solver", decisions, mix.seconds
                break
            tight = _tightened(tight, over)


def _mode_sets(choices: Choices) -> Iterator[tuple[FrameMode, ...]]:
    """Allowed modes, with fewer and fewer of the large frames leaving the device.

    What leaves needs room for its look-ahead, and that of whole frames is ten times a skeleton's.
    """
    leaving = list(choices.saved)
    while leaving:
        yield tuple(m for m in choices.modes if not m.offload or m.saved in leaving)
        leaving.pop(0)
        if len(choices.tiers) == 1:
            return


def _rounded(mix: Mix, kinds: LayerKinds, modes: Sequence[FrameMode]) -> LayerModes:
    """Whole layers by largest remainder, what is missing carried on to the next chunk."""
    num_layers = sum(len(members) for members in kinds.members)
    carry = np.zeros(mix.counts.shape[1:])
    rows: list[tuple[FrameMode, ...]] = []
    for counts in mix.counts:
        wanted = np.maximum(counts + carry, 0.0)
        per_kind: list[dict[FrameMode, int]] = []
        for kind, members in enumerate(kinds.members):
            whole = np.floor(wanted[kind] + 1e-9).astype(int)
            while whole.sum() > len(members):
                whole[int(np.argmax(whole))] -= 1
            rest = wanted[kind] - whole
            while whole.sum() < len(members):
                most = int(np.argmax(rest))
                whole[most] += 1
                rest[most] -= 1.0
            carry[kind] = counts[kind] + carry[kind] - whole
            per_kind.append({m: int(n) for m, n in zip(modes, whole, strict=True) if n})
        rows.append(spread_kinds(per_kind, kinds.members, num_layers))
    return tuple(rows)


def _settled(
    cost: StageCost, decisions: Decisions, budgets: Budgets, device_kind: str
) -> Decisions:
    """Fits the look-ahead to the frames that really leave, and gives it what room is left."""
    away: set[Saved] = {m.saved for row in decisions.layer_modes for m in row if m.offload}
    if not away:
        return replace(decisions, leave_bytes=None, fetch_bytes=None)
    least = _lookahead_bytes(cost, decisions, away, _FRAMES_AHEAD)
    most = _lookahead_bytes(cost, decisions, away, _MOST_FRAMES_AHEAD)
    decisions = replace(decisions, leave_bytes=least, fetch_bytes=least)
    if budgets.device is None:
        return replace(decisions, leave_bytes=most, fetch_bytes=most)
    peak = estimate(cost.shape, decisions, device_kind=device_kind).device.total
    # A little less than all of it: the reserve grows with what is held.
    spare = int(0.9 * (budgets.device - peak))
    ahead = min(most, least + max(0, spare))
    return replace(decisions, leave_bytes=ahead, fetch_bytes=ahead)


def _with_lookahead(
    cost: StageCost, base: Decisions, modes: LayerModes, *, frames: int
) -> Decisions:
    away: set[Saved] = {m.saved for row in modes for m in row if m.offload}
    ahead = _lookahead_bytes(cost, base, away, frames)
    return replace(base, layer_modes=modes, leave_bytes=ahead, fetch_bytes=ahead)


def _lookahead_bytes(cost: StageCost, base: Decisions, saved: Iterable[Saved], frames: int) -> int:
    longest = max(base.chunk_lengths)
    layers = LayerKinds.of(cost).representative
    sizes = [cost.frame_bytes(i, longest, kind) for i in layers for kind in set(saved)]
    return frames * max(sizes, default=0)


def _tightened(budgets: Budgets, over: Sequence[FirstLimit]) -> Budgets:
    """Budgets lowered by what rounding broke them by, and a little more."""
    lowered = {limit.tier: limit.missing_bytes + 2**20 for limit in over}

    def of(tier: str) -> int | None:
        budget = budgets.of(tier)
        return None if budget is None else budget - lowered.get(tier, 0)

    return Budgets(device=of("device"), host=of("host"), disk=of("disk"))


def _that_fit(
    cost: StageCost,
    budgets: Budgets,
    device_kind: str,
    candidates: Iterable[tuple[str, Decisions]],
) -> Iterator[tuple[str, Decisions, MemoryEstimate]]:
    seen: set[tuple[object, ...]] = set()
    for name, decisions in candidates:
        key = (decisions.layer_modes, decisions.leave_bytes)
        if key in seen:
            continue
        seen.add(key)
        predicted = MemoryModel(cost.shape, decisions, device_kind).estimate()
        if fits(predicted, budgets):
            yield name, decisions, predicted


_SAVED_WORDS: dict[Saved, str] = {
    "whole": "whole",
    "products": "reduced to products",
    "skeleton": "reduced to skeletons",
}
