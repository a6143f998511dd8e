"""The linear program behind "auto": how many frames of each slot get which mode.

Time is cut into slots, forward and backward of each chunk, or by layer of each layer. A slot lasts
as long as its compute (recomputation included) and at least as long as the copies that must go on
in it; the sum is minimised. Bytes are conserved: what leaves was produced, what comes back is there
before its use, no more than the look-ahead waits on the device. All of it is linear in the numbers
of frames, so the optimum over fractional numbers is found exactly (HiGHS) and bounds
every plan of these modes and look-ahead from below; rounding to whole frames is `solve`'s.

By chunk the frames of a slot are those of its layers, in groups of layers that cost the same. By
layer they are those of its chunks, taken as equal: their bytes and their recomputation grow with
their tokens alone. Only where attention may run again, which takes longer the more keys a chunk
sees, are they put into groups (`chunk_groups`). Keys and values of the layer are one more thing
there, with modes of their own.

Knows nothing of budgets' origin, of rounding or of simulation.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sppo_hf.planning.activation_modes import SAVED, FrameMode
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions, KVMode
from sppo_hf.planning.lowering import LAYERS_THERE, MOVED, mode_free_levels
from sppo_hf.planning.memory import CONTEXT_BYTES, FRAGMENTATION, HOST_SLAB_BYTES, byte_tables
from sppo_hf.planning.memory_snapshots import Budgets, Bytes
from sppo_hf.planning.tiers import Tier, away_tiers, tiers_behind_host


@dataclass(frozen=True, slots=True)
class Mix:
    """The optimum over fractional numbers of frames."""

    counts: NDArray[np.float64]
    """[chunk, kind, mode]: layers; by layer [layer, group, mode]: chunks (`chunk_groups`)."""

    seconds: float
    """Duration of the step: no plan with these modes and look-ahead is faster."""

    keys: NDArray[np.float64] | None = None
    """By layer: [layer, K/V mode]."""


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """Layers that cost the same, by a representative."""

    representative: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, cost: ModelCost) -> LayerKinds:
        """Groups the layers of a model.

        A group is stood for by its last layer: under LoRA the first one saves a little less, which
        is not worth a second set of variables.
        """
        groups: dict[object, list[int]] = {}
        for index, layer in enumerate(cost.shape.layers):
            groups.setdefault(layer, []).append(index)
        members = tuple(tuple(group) for group in groups.values())
        return cls(tuple(group[-1] for group in members), members)


def chunk_groups(num_chunks: int, modes: Sequence[FrameMode]) -> tuple[tuple[int, ...], ...]:
    """Returns the chunks that are taken as equal by layer: all, or an eighth each.

    Eighths where attention may run again: it takes the first a fifteenth of the last's time.
    """
    parts = min(num_chunks, 8) if any(mode.saved == "hidden" for mode in modes) else 1
    ends = (num_chunks * part // parts for part in range(parts + 1))
    return tuple(tuple(range(start, end)) for start, end in pairwise(ends))


class Rows:
    """Constraints on `row . x`, collected sparsely."""

    def __init__(self) -> None:
        self.data: list[float] = []
        self.columns: list[int] = []
        self.starts = [0]
        self.bounds: list[float] = []

    def add(self, terms: Sequence[tuple[int, float]], bound: float) -> None:
        """Adds one row: (column, factor) terms, no column twice, and its bound."""
        self.columns += [column for column, factor in terms if factor]
        self.data += [factor for _, factor in terms if factor]
        self.starts.append(len(self.data))
        self.bounds.append(bound)


def minimise(objective: NDArray[np.float64], less: Rows, equal: Rows) -> NDArray[np.float64] | None:
    """Returns the x >= 0 that minimises `objective . x`, or None where there is none.

    Args:
        objective: [width].
        less: rows that are at most their bound.
        equal: rows that are their bound.
    """
    # Not at the top: who plans by a rule, or on a CPU without a budget, solves no program.
    from highspy import Highs, HighsLp, HighsModelStatus, MatrixFormat, kHighsInf

    width, height = len(objective), len(less.bounds) + len(equal.bounds)
    program = HighsLp()
    program.num_col_, program.num_row_ = width, height
    program.col_cost_ = objective
    program.col_lower_, program.col_upper_ = np.zeros(width), np.full(width, kHighsInf)
    unbounded = np.full(len(less.bounds), -kHighsInf)
    program.row_lower_ = np.concatenate([unbounded, equal.bounds])
    program.row_upper_ = np.concatenate([less.bounds, equal.bounds])
    matrix = program.a_matrix_
    matrix.format_ = MatrixFormat.kRowwise
    matrix.num_col_, matrix.num_row_ = width, height
    matrix.start_ = np.array([*less.starts, *(len(less.data) + at for at in equal.starts[1:])])
    matrix.index_ = np.array(less.columns + equal.columns)
    matrix.value_ = np.array(less.data + equal.data)
    solver = Highs()
    solver.silent()
    solver.passModel(program)
    solver.run()
    if solver.getModelStatus() != HighsModelStatus.kOptimal:
        return None
    return np.array(solver.getSolution().col_value)


class _Group(NamedTuple):
    """Things that every slot has so many of, each treated in one of some ways."""

    number: int
    """How many a slot has."""

    tiers: list[Tier]
    """[ways] Where each puts them."""

    sizes: NDArray[np.float64]
    """[ways, slots] GiB of one there."""

    seconds: NDArray[np.float64]
    """[ways, slots] What backward runs again for one."""


class LinearProgram:
    """The program of one batch shape, for given modes and look-ahead."""

    def __init__(
        self,
        decisions: Decisions,
        cost: ModelCost,
        budgets: Budgets,
        modes: Sequence[FrameMode],
        *,
        kv_modes: Sequence[KVMode] = (),
        device_kind: str,
    ) -> None:
        """Prepare; neither modes nor K/V modes of `decisions` are looked at."""
        self._what = decisions
        self._cost = cost
        self._budgets = budgets
        self._modes = modes
        self._device_kind = device_kind
        self._tables = byte_tables(cost.shape, decisions, device_kind)
        self._work = cost.unit_seconds(decisions.bounds, decisions.layer_tile_tokens)
        if decisions.by_layer:
            self._groups = [*self._frames_of_layers(), self._keys_of_layers(kv_modes)]
        else:
            self._groups = self._frames_of_chunks()
        last = len(self._groups) - 1
        self._keys = range(last, last + 1) if decisions.by_layer else range(0)
        """Groups that are keys and values."""
        self._all = range(decisions.num_layers if decisions.by_layer else decisions.num_chunks)
        self._slab_bytes = HOST_SLAB_BYTES if device_kind == "cuda" else 1
        slots = len(self._all)
        ways = [len(group.tiers) for group in self._groups]
        self._first = [sum(ways[:at]) for at in range(len(ways))]
        self._each = sum(ways)
        self._x = slots * self._each
        # Behind the counts: one column per slot and purpose.
        self._away = away_tiers()
        self._behind = tiers_behind_host()
        written, stored, read = (
            [f"{what} {tier}" for tier in self._behind] for what in ("written", "stored", "read")
        )
        names = (
            *("forward", "backward", "kept", *self._away),
            *("out", *written, "sums", *stored, "coming", "back", *read),
        )
        self._column = {name: self._x + i * slots for i, name in enumerate(names)}
        self._width = self._x + len(names) * slots
        self._compute_seconds = 0.0
        self._less = Rows()
        self._equal = Rows()

    def _frames_of_chunks(self) -> list[_Group]:
        """Layers of each kind; in the tables, which tell more layers apart, by one of them."""
        tables, groups = self._tables, list[_Group]()
        saved = [SAVED.index(mode.saved) for mode in self._modes]
        tiers: list[Tier] = [mode.tier for mode in self._modes]
        kinds = LayerKinds.of(self._cost)
        for last, members in zip(kinds.representative, kinds.members, strict=True):
            sizes = tables.saved[tables.kind_of[last]][saved].astype(float) / _GIB
            seconds = self._work.recompute[tables.kind_of[members[0]]][saved]
            groups.append(_Group(len(members), tiers, sizes, seconds))
        return groups

    def _frames_of_layers(self) -> list[_Group]:
        """Chunks, each of the mean length of its group.

        Attention that runs again takes what it takes that of them whose queries see fewest keys.
        """
        tables, work, groups = self._tables, self._work.recompute, list[_Group]()
        saved = [SAVED.index(mode.saved) for mode in self._modes]
        tiers: list[Tier] = [mode.tier for mode in self._modes]
        hidden, inputs = SAVED.index("hidden"), SAVED.index("inputs")
        per_token = (work[:, hidden] - work[:, inputs]) / tables.lengths
        for chunks in map(list, chunk_groups(self._what.num_chunks, self._modes)):
            sizes, seconds = (
                table[:, :, chunks].mean(axis=2) for table in (tables.saved / _GIB, work)
            )
            again = per_token[:, chunks].min(axis=1) * tables.lengths[chunks].mean()
            seconds[:, hidden] = seconds[:, inputs] + again
            sizes, seconds = (table[tables.kind_of].T[saved] for table in (sizes, seconds))
            groups.append(_Group(len(chunks), tiers, sizes, seconds))
        return groups

    def _keys_of_layers(self, kv_modes: Sequence[KVMode]) -> _Group:
        layers = self._what.num_layers
        sizes, seconds = np.zeros((2, len(kv_modes), layers))
        tiers: list[Tier] = []
        for way, mode in enumerate(kv_modes):
            if mode == "recompute":
                seconds[way] = self._work.keys.sum(axis=1)[self._tables.kind_of]
                tiers.append("device")
            else:
                sizes[way] = self._tables.layer_kv / _GIB
                tiers.append(mode)
        return _Group(1, tiers, sizes, seconds)

    def solve(self) -> Mix | None:
        """Returns the optimum, or None where nothing fits the budgets."""
        self._count_layers()
        self._hold_device()
        self._hold_elsewhere()
        self._take_time()
        self._copy_out()
        self._copy_back()
        objective = np.zeros(self._width)
        slots = len(self._all)
        for name in ("forward", "backward"):
            first = self._column[name]
            objective[first : first + slots] = 1.0
        # Of equally fast plans, the one that moves less; never at a price that counts.
        moved = np.zeros(self._x)
        most = 0.0
        for slot in self._all:
            for column, size in self._terms(slot, self._away):
                moved[column] = size
        for at, group in enumerate(self._groups):
            first, ways = self._first[at], len(group.tiers)
            of_group = moved.reshape(slots, self._each)[:, first : first + ways]
            most += float(of_group.max(axis=1, initial=0.0).sum()) * group.number
        if most > 0.0:
            objective[: self._x] = _MOVING_SHARE * self._compute_seconds / most * moved
        values = minimise(objective, self._less, self._equal)
        if values is None:
            return None
        first = self._column["forward"]
        seconds = float(values[first : first + 2 * slots].sum())
        counts = values[: self._x].reshape(slots, self._each)
        frames = self._each - sum(len(self._groups[at].tiers) for at in self._keys)
        if self._what.training:
            seconds += self._cost.update_seconds
        return Mix(
            counts[:, :frames].reshape(slots, -1, len(self._modes)),
            seconds,
            counts[:, frames:] if self._what.by_layer else None,
        )

    # -- terms -------------------------------------------------------------------------------

    def _at(self, slot: int, group: int, way: int) -> int:
        return slot * self._each + self._first[group] + way

    def _col(self, name: str, slot: int) -> int:
        return self._column[name] + slot

    def _terms(
        self, slot: int, tiers: Container[str], groups: Sequence[int] | None = None
    ) -> list[tuple[int, float]]:
        """Bytes of a slot's frames and keys on some tiers, in GiB for the solver's sake.

        Args:
            slot: the slot.
            tiers: which.
            groups: of which groups; None for all.
        """
        terms: list[tuple[int, float]] = []
        for at in range(len(self._groups)) if groups is None else groups:
            group = self._groups[at]
            for way, tier in enumerate(group.tiers):
                if tier in tiers:
                    terms.append((self._at(slot, at, way), float(group.sizes[way, slot])))
        return terms

    def _key_terms(self, slot: int, tiers: Container[str]) -> list[tuple[int, float]]:
        """Those of keys and values alone; none where the slot is a chunk, or before the first."""
        return self._terms(slot, tiers, self._keys) if slot >= 0 else []

    def _from_the_end(self, slot: int, tiers: Sequence[str]) -> list[tuple[int, float]]:
        """GiB of what this and all later slots have on some tiers."""
        terms: list[tuple[int, float]] = []
        for tier in tiers:
            terms.append((self._col(tier, self._all[-1]), 1.0))
            if slot:
                terms.append((self._col(tier, slot - 1), -1.0))
        return terms

    # -- constraints -------------------------------------------------------------------------

    def _count_layers(self) -> None:
        for slot in self._all:
            for at, group in enumerate(self._groups):
                terms = [(self._at(slot, at, way), 1.0) for way in range(len(group.tiers))]
                self._equal.add(terms, group.number)

    def _sum_up(self, name: str, tiers: Container[str]) -> None:
        """Makes column `name` of each slot the GiB of all up to it on some tiers."""
        for slot in self._all:
            terms = self._terms(slot, tiers)
            terms.append((self._col(name, slot), -1.0))
            if slot:
                terms.append((self._col(name, slot - 1), 1.0))
            self._equal.add(terms, 0.0)

    def _hold_device(self) -> None:
        """What is kept and all else are within the budget where a slot's forward and backward end.

        Between these ends both change linearly. What is on its way, or is rebuilt, is counted as
        the modes allow.
        """
        self._sum_up("kept", _HERE)
        budget = self._budgets.device
        if budget is None:
            return
        share = 1.0 + FRAGMENTATION[self._device_kind]
        held = self._held_device()
        copies, forward, backward = self._passing()
        for slot in self._all:
            ahead, heads, begin, end = self._ends(slot)
            # Of the running layer's keys and values all know; those of the one below come ahead.
            running = _negative(self._key_terms(slot, _HERE))
            below = self._key_terms(slot - 1, self._away)
            moments = [
                (ahead, forward[slot], slot, running),
                *((head, 0, slot, list[tuple[int, float]]()) for head in heads),
                (begin, backward[slot], slot, running),
            ]
            if slot:
                moments.append((end, backward[slot], slot - 1, below))
            for at, passing, framed, keys in moments:
                fixed = held[at] + share * (passing + copies[slot])
                terms = [(self._col("kept", framed), share)]
                terms += [(column, share * size) for column, size in keys]
                if framed < slot:
                    # Of the slot itself, the frame that runs.
                    terms += self._share_of_frame(slot, share=share)
                self._less.add(terms, (budget - fixed) / _GIB)

    def _ends(self, slot: int) -> tuple[int, list[int], int, int]:
        """Points at which a slot's forward ends, of heads behind it, and of its backward's ends."""
        points = self._tables.points
        last_chunk, last_layer = points.num_chunks - 1, points.num_layers - 1
        begin, end = (slot, last_layer), (slot, 0)
        heads = [points.forward(slot, last_layer + 1)]
        if self._what.by_layer:
            begin, end = (last_chunk, slot), (0, slot)
            heads = [points.forward(last_chunk, last_layer + 1)] if slot == last_layer else []
        return points.forward(*begin), heads, points.backward(*begin), points.backward(*end)

    def _held_device(self) -> NDArray[np.float64]:
        """[points] What the device holds whatever the modes are, holes counted."""
        share = FRAGMENTATION[self._device_kind]
        standing = sum(self._tables.standing.values()) + CONTEXT_BYTES[self._device_kind]
        held = np.full(self._tables.points.count, float(standing))
        for cause, level in mode_free_levels(self._tables)["device"].items():
            held += level.during * (1.0 + share * (cause in MOVED))
        return held

    def _passing(self) -> tuple[Bytes, Bytes, Bytes]:
        """[slots] The most that copies, and workspaces forward and backward, take."""
        tables, what = self._tables, self._what
        again = tables.rebuilt if any(mode.recompute for mode in self._modes) else 0

        def most(table: Bytes) -> Bytes:
            """The most of any layer of a chunk, or of any chunk of a layer."""
            return table.max(axis=1)[tables.kind_of] if what.by_layer else table.max(axis=0)

        running = np.zeros(len(self._all), dtype=np.int64)
        for mode in self._modes:
            if mode.offload:
                running = np.maximum(running, most(tables.saved[:, SAVED.index(mode.saved)]))
        largest = np.maximum.accumulate(running)
        leaves = what.max_pending_d2h_bytes or 0
        copies = running + np.maximum(max(leaves, what.max_prefetch_bytes or 0), largest)
        keys_leave = tables.streams or any(
            tier in self._away for at in self._keys for tier in self._groups[at].tiers
        )
        copies = np.where(largest > 0, copies, leaves if keys_leave else 0)
        return copies, most(tables.workspace_forward), most(tables.workspace_backward + again)

    def _share_of_frame(self, slot: int, *, share: float) -> list[tuple[int, float]]:
        """GiB of one kept frame of the first layer, or chunk, where modes are spread evenly."""
        at = 0
        if not self._what.by_layer:
            kinds = LayerKinds.of(self._cost)
            (at,) = (k for k, members in enumerate(kinds.members) if 0 in members)
        share /= self._groups[at].number
        return [(column, share * size) for column, size in self._terms(slot, _HERE, [at])]

    def _hold_elsewhere(self) -> None:
        what, points = self._what, self._tables.points
        last, layers = what.num_chunks - 1, points.num_layers
        used = {what.kv_tier, *(tier for group in self._groups for tier in group.tiers)}
        passing = any(tier in used for tier in self._behind)
        for tier in self._away:
            self._sum_up(tier, {tier})
            budget = self._budgets.of(tier)
            if budget is None:
                continue
            if tier == "host":
                budget -= budget % self._slab_bytes
                budget -= what.staging_bytes * passing
            levels = mode_free_levels(self._tables)[tier].values()
            # Where forward ends, and after the first chunk's backward, when most gradient sums
            # wait.
            ends = [(points.forward(last, layers), self._all[-1])]
            if last and not what.by_layer:
                ends.append((points.backward(last - 1, layers - 1), last - 1))
            for at, framed in ends:
                held = sum(int(level.during[at]) for level in levels)
                self._less.add([(self._col(tier, framed), 1.0)], (budget - held) / _GIB)

    def _take_time(self) -> None:
        work, layers = self._work, self._tables.kind_of
        if self._what.by_layer:
            forward, backward = (w.sum(axis=1)[layers] for w in (work.forward, work.backward))
            forward[-1] += work.head.sum()
        else:
            forward = work.forward[layers].sum(axis=0) + work.head
            backward = work.backward[layers].sum(axis=0)
        self._compute_seconds = float((forward + backward).sum())
        for slot in self._all:
            terms = [
                (self._at(slot, at, way), float(group.seconds[way, slot]))
                for at, group in enumerate(self._groups)
                for way in range(len(group.tiers))
            ]
            self._less.add([(self._col("forward", slot), -1.0)], -float(forward[slot]))
            terms.append((self._col("backward", slot), -1.0))
            self._less.add(terms, -float(backward[slot]))

    def _copy_out(self) -> None:
        """D2H and writes: how much has left the device, and the host, by the end of each slot."""
        cost, what, tables = self._cost, self._what, self._tables
        per_gib = cost.d2h_seconds(_GIB, both=tables.both_ways[0])
        chunks = range(what.num_chunks)
        most_sums = max(self._largest_gib(chunk, tables.kv_out_backward) for chunk in chunks)
        leave = what.max_pending_d2h_bytes / _GIB if what.max_pending_d2h_bytes else most_sums
        kv_gib = 0.0
        stage = leave + what.staging_bytes / _GIB
        stage += (what.kv_tier in self._behind) * 2 * most_sums
        stage += 2 * max((float(self._groups[at].sizes.max()) for at in self._keys), default=0.0)
        for slot in self._all:
            kv_gib += self._kv_gib(slot, tables.kv_out_forward)
            frames = [(self._col(tier, slot), 1.0) for tier in self._away]
            keys = self._key_terms(slot, self._away)
            self._flow("out", slot, frames, kv_gib, lag_gib=leave, later=keys)
            for tier in self._behind:
                stored, keys = [(self._col(tier, slot), 1.0)], self._key_terms(slot, {tier})
                kv = (what.kv_tier == tier) * kv_gib
                self._flow(f"written {tier}", slot, stored, kv, lag_gib=stage, later=keys)
        self._pace("out", "forward", per_gib)
        for tier in self._behind:
            self._pace(f"written {tier}", "forward", cost.store_seconds(tier, _GIB))
        gradients = self._gradients_gib()
        if not (tables.streams or gradients.any()):
            return
        # The gradient sums of backward, behind what of forward has not left yet; and gradients of
        # weights, of which one slot's may be on their way.
        end = self._all[-1]
        frames = [(self._col(tier, end), 1.0) for tier in self._away]
        leave += float(gradients.max())
        sent_gib = 0.0
        for slot in reversed(self._all):
            kv_gib += self._kv_gib(slot, tables.kv_out_backward)
            sent_gib += gradients[slot]
            self._flow("sums", slot, frames, kv_gib + sent_gib, lag_gib=leave)
            for tier in self._behind:
                kv = (what.kv_tier == tier) * kv_gib
                stored = [(self._col(tier, end), 1.0)]
                self._flow(f"stored {tier}", slot, stored, kv, lag_gib=stage)
        per_gib = cost.d2h_seconds(_GIB, both=tables.both_ways[1])
        self._pace("sums", "backward", per_gib, follows="out")
        for tier in self._behind:
            seconds = cost.store_seconds(tier, _GIB)
            self._pace(f"stored {tier}", "backward", seconds, follows=f"written {tier}")

    def _copy_back(self) -> None:
        """H2D and reads: what has come by the end of each slot; frames from the last slot on."""
        cost, what, tables = self._cost, self._what, self._tables
        per_gib = cost.h2d_seconds(_GIB, both=tables.both_ways[0])
        behind = what.kv_tier in self._behind
        # What streams from behind the host comes at its pace.
        weights = self._weights_gib() * (not behind)
        fetch, staged = (what.max_prefetch_bytes or 0) / _GIB, what.staging_bytes / _GIB
        kv_gib, last = 0.0, self._all[-1]
        if tables.streams or weights.any():
            # K/V of a slot's first unit come while the unit before it still runs.
            for slot in self._all:
                kv_gib += self._kv_gib(slot, tables.kv_in_forward) + float(weights[0, slot])
                first = self._largest_gib(min(slot + 1, last), tables.kv_in_forward)
                self._flow("coming", slot, [], kv_gib, lead_gib=first)
            read = cost.load_seconds(what.kv_tier, _GIB) if behind else 0.0
            self._pace("coming", "forward", max(per_gib, read))
        kv_gib = 0.0
        per_gib = cost.h2d_seconds(_GIB, both=tables.both_ways[1])
        for slot in reversed(self._all):
            kv_gib += self._kv_gib(slot, tables.kv_in_backward) + float(weights[1, slot])
            lead = fetch + self._largest_gib(max(slot - 1, 0), tables.kv_in_backward)
            # By layer, keys of the slot below are there before it begins.
            frames = self._from_the_end(slot, self._away)
            frames += self._key_terms(slot - 1, self._away)
            self._flow("back", slot, frames, kv_gib, lead_gib=lead)
            for tier in self._behind:
                stored = self._from_the_end(slot, (tier,))
                stored += self._key_terms(slot - 1, {tier})
                kv = (what.kv_tier == tier) * kv_gib
                self._flow(f"read {tier}", slot, stored, kv, lead_gib=lead + staged)
        first = self._largest_gib(last, tables.kv_in_backward)
        self._pace("back", "backward", per_gib, head_start_gib=first)
        for tier in self._behind:
            read = cost.load_seconds(tier, _GIB)
            self._pace(f"read {tier}", "backward", read, head_start_gib=first)

    def _weights_gib(self) -> NDArray[np.float64]:
        """[2, slots] GiB of weights that come from the host in each slot's forward and backward.

        Those that the first unit waits for are left out.
        """
        resting, layers = self._cost.shape.resting, self._tables.points.num_layers
        found = np.zeros((2, len(self._all)))
        if resting is None:
            return found
        sizes = np.array(resting.layer_bytes) / _GIB
        if not self._what.by_layer:
            assert resting.stays, "by chunk weights would come once for every chunk"
            found[0, 0] = sizes[1:].sum()
            return found
        found[0, :-1] = sizes[1:]
        if not resting.stays and layers > LAYERS_THERE:
            found[1, 1 : layers - LAYERS_THERE + 1] = sizes[: layers - LAYERS_THERE]
        return found

    def _gradients_gib(self) -> NDArray[np.float64]:
        """[slots] GiB of gradients of weights that each slot's backward sends to the host."""
        resting = self._cost.shape.resting
        found = np.zeros(len(self._all))
        if resting is not None:
            sizes = np.array(resting.layer_gradient_bytes) / _GIB
            if self._what.by_layer:
                found[:] = sizes
            else:
                found[0] = sizes.sum()
        return found

    def _flow(
        self,
        name: str,
        slot: int,
        frames: list[tuple[int, float]],
        fixed_gib: float,
        *,
        lag_gib: float = 0.0,
        lead_gib: float = 0.0,
        later: Sequence[tuple[int, float]] = (),
    ) -> None:
        """Column `name` is within a lag or a lead of frames and fixed bytes, at a slot's end.

        Of the frames, `later` can only move once the slot has ended.
        """
        moved = self._col(name, slot)
        self._less.add([(moved, 1.0), *_negative(frames), *later], fixed_gib + lead_gib)
        self._less.add([*frames, (moved, -1.0)], lag_gib - fixed_gib)

    def _pace(
        self,
        name: str,
        slot: str,
        per_gib: float,
        *,
        follows: str | None = None,
        head_start_gib: float = 0.0,
    ) -> None:
        """What moves in a slot takes no longer than the slot.

        Args:
            name: column of what has moved by the end of each slot.
            slot: "forward" or "backward", which says the order of the slots too.
            per_gib: seconds.
            follows: a forward column that `name` goes on from; else it begins with nothing.
            head_start_gib: what may have moved before the first slot.
        """
        slots = self._all if slot == "forward" else self._all[::-1]
        before = None if follows is None else self._col(follows, self._all[-1])
        for at in slots:
            terms = [(self._col(name, at), per_gib), (self._col(slot, at), -1.0)]
            if before is not None:
                terms.append((before, -per_gib))
            self._less.add(terms, head_start_gib * per_gib if before is None else 0.0)
            before = self._col(name, at)

    def _kv_gib(self, slot: int, streamed: Bytes) -> float:
        """GiB that all layers of a chunk stream; none by layer."""
        if self._what.by_layer:
            return 0.0
        return float(streamed[self._tables.kind_of, slot].sum()) / _GIB

    def _largest_gib(self, slot: int, streamed: Bytes) -> float:
        return 0.0 if self._what.by_layer else float(streamed[:, slot].max()) / _GIB


_GIB = 2**30
# The most that a plan's time may be off for moving fewer bytes.
_MOVING_SHARE = 1e-5
_HERE = frozenset({"device"})


def _negative(terms: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(column, -value) for column, value in terms]
