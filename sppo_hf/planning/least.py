"""The least that a batch must hold: whether it fits at all, and what breaks first if not.

Asks only for bytes, never for seconds. Also what may be chosen from (`Choices`), and the bytes of
the look-ahead, which every plan has to hold beside its frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sppo_hf.planning.cost import StageCost
from sppo_hf.planning.decisions import Decisions, KVMode, LayerModes, layer_modes_of
from sppo_hf.planning.linear_program import LayerKinds
from sppo_hf.planning.lowering import estimate
from sppo_hf.planning.memory import HOST_SLAB_BYTES, byte_tables
from sppo_hf.planning.modes import AWAY_TIERS, TIERS, FrameMode, Saved, Tier, mode_of
from sppo_hf.planning.moments import Budgets, MemoryEstimate
from sppo_hf.planning.policies import uniform_modes
from sppo_hf.planning.shape import ModelShape

# With more frames than this, nothing that is rebuilt or on its way weighs as much as what waits.
_FEW_FRAMES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the solver may choose from."""

    saved: tuple[Saved, ...] = ("whole", "products", "skeleton")
    """How frames may be reduced."""

    tiers: tuple[Tier, ...] = ("device", "host")
    """Where frames may wait."""

    kv_tiers: tuple[Tier, ...] = ("device",)
    """Where K/V may wait; of those that fit, the fastest is taken, and the first of equals."""

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


def kv_modes_of(shape: ModelShape, base: Decisions, choices: Choices) -> tuple[KVMode, ...]:
    """Returns what may become of K/V.

    By layer they may be made again where layers may. Those that other layers borrow must be there
    for all of them.
    """
    if not base.by_layer:
        return choices.kv_tiers
    if any(layer.borrows_keys for layer in shape.layers):
        return ("device",)
    again = "skeleton" in choices.saved and "device" in choices.kv_tiers
    return (*choices.kv_tiers, "recompute") if again else choices.kv_tiers


def fits(predicted: MemoryEstimate, budgets: Budgets) -> bool:
    """Whether every tier's peak is within its budget."""
    return next(over_budget(predicted, budgets), None) is None


def over_budget(predicted: MemoryEstimate, budgets: Budgets) -> Iterator[FirstLimit]:
    """Yields the tiers whose peak is over its budget, the device first."""
    for tier in TIERS:
        budget = budgets.of(tier)
        missing = 0 if budget is None else predicted.peak_bytes(tier) - budget
        if missing > 0:
            moment = predicted.peak(tier).name
            yield FirstLimit(tier=tier, missing_bytes=missing, moment=moment)


def least_memory(
    cost: StageCost, base: Decisions, budgets: Budgets, choices: Choices, device_kind: str
) -> Decisions:
    """Returns the plan that is most likely to fit: small frames, as far away as there is room.

    The earliest frames (needed last) go to the disk when the host is full, and the latest (needed
    first) stay on the device when nothing else has room. Reduced frames are smallest, but what is
    rebuilt from them, and what is on its way, needs room too; so with few layers or chunks another
    choice may hold less, and the one that comes closest is taken.
    """
    plans: list[Decisions] = []
    few = base.num_chunks * base.num_layers <= _FEW_FRAMES
    for saved in choices.saved[::-1] if few else choices.saved[-1:]:
        modes = _as_far_as_possible(cost, base, budgets, choices, saved, device_kind)
        plans.append(with_lookahead(cost, base, modes, frames=1))
        if few and "device" in choices.tiers:
            modes = uniform_modes(base.num_chunks, base.num_layers, mode_of(saved, "device"))
            plans.append(with_lookahead(cost, base, modes, frames=1))
    if len(plans) == 1:
        return plans[0]
    best, least_missing = plans[0], float("inf")
    for plan in plans:
        predicted = estimate(cost.shape, plan, device_kind=device_kind)
        missing = sum(limit.missing_bytes for limit in over_budget(predicted, budgets))
        if missing < least_missing:
            best, least_missing = plan, missing
        if not missing:
            break
    return best


def _as_far_as_possible(
    cost: StageCost,
    base: Decisions,
    budgets: Budgets,
    choices: Choices,
    saved: Saved,
    device_kind: str,
) -> LayerModes:
    """Frames of one kind on the farthest tiers that have room, frame by frame."""
    away: list[Tier] = [tier for tier in AWAY_TIERS if tier in choices.tiers]
    room = {tier: _room_bytes(cost, base, budgets, tier, away, device_kind) for tier in away}
    places: dict[Tier, float] = {}
    # All bytes, less what fits away, stay: the device takes that much, from the latest frame on.
    lengths = base.chunk_lengths
    sizes = [
        [cost.frame_bytes(layer, lengths[chunk], saved) for chunk, layer in base.units(slot)]
        for slot in base.slots
    ]
    total = float(sum(map(sum, sizes)))
    if "device" in choices.tiers:
        places["device"] = max(0.0, total - sum(room.values()))
    for tier in away:
        places[tier] = room[tier]
    rows: list[tuple[FrameMode, ...]] = []
    for frames in reversed(sizes):
        whole, size = _next_place(places, 0), sum(frames)
        if places[whole] >= size:
            places[whole] -= size
            rows.append((mode_of(saved, whole),) * len(frames))
            continue
        row: list[FrameMode] = []
        for size in reversed(frames):
            tier = _next_place(places, size)
            places[tier] -= size
            row.append(mode_of(saved, tier))
        rows.append(tuple(reversed(row)))
    return layer_modes_of(rows[::-1], by_layer=base.by_layer)


def _next_place(places: dict[Tier, float], size: int) -> Tier:
    """The nearest tier with room for one more frame."""
    for tier, room in places.items():
        # What must stay is a quota: it takes the frame that crosses it too.
        if room > 0 if tier == "device" else room >= size:
            return tier
    return next(iter(places))


def _room_bytes(
    cost: StageCost,
    base: Decisions,
    budgets: Budgets,
    tier: Tier,
    away: Sequence[Tier],
    device_kind: str,
) -> float:
    """Bytes that frames may take on a tier, beside K/V and what passes through."""
    budget = budgets.of(tier)
    if budget is None:
        return float("inf")
    if tier == "host" and device_kind == "cuda":
        budget -= budget % HOST_SLAB_BYTES
    if tier == "host" and ("disk" in away or "disk" in (base.kv_tier, *base.kv_modes)):
        budget -= base.staging_bytes
    if base.by_layer:
        waiting = (i for i in range(base.num_layers) if base.kv_mode(i) == tier)
        budget -= sum(cost.kv_bytes(layer, base.total_tokens) for layer in waiting)
    elif base.kv_tier == tier:
        shape = cost.shape
        kv = shape.kv_bytes_per_token() * base.total_tokens
        kv += shape.dkv_bytes_per_token() * base.bounds[-1][0]
        budget -= kv * base.batch_rows
    return float(max(0, budget))


def with_lookahead(
    cost: StageCost, base: Decisions, modes: LayerModes, *, frames: int
) -> Decisions:
    """Returns `base` with other modes, and room for so many of their frames on their way."""
    away: set[Saved] = {m.saved for row in modes for m in row if m.offload}
    ahead = lookahead_bytes(cost, base, away, frames)
    return looking_ahead(cost, replace(base, layer_modes=modes), ahead)


def looking_ahead(cost: StageCost, decisions: Decisions, frame_bytes: int) -> Decisions:
    """Lets so many bytes of frames be on their way, and one layer's streamed gradient sums.

    By layer, its keys and values where any leave.
    """
    tables = byte_tables(cost.shape, decisions, cost.profile.kind)
    sums = int(tables.kv_out_backward[:, -1].max())
    if decisions.by_layer and {"host", "disk"} & set(decisions.kv_modes):
        sums = int(tables.layer_kv.max())
    leave_bytes = frame_bytes + sums
    # With nothing to move, the engine's own rule, whose bounds are never reached.
    return replace(decisions, leave_bytes=leave_bytes or None, fetch_bytes=frame_bytes or None)


def lookahead_bytes(cost: StageCost, base: Decisions, saved: Iterable[Saved], frames: int) -> int:
    """Returns the bytes of so many of the largest frames of these kinds."""
    longest = max(base.chunk_lengths)
    layers = LayerKinds.of(cost).representative
    sizes = [cost.frame_bytes(i, longest, kind) for i in layers for kind in set(saved)]
    return frames * max(sizes, default=0)
