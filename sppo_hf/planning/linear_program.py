# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# SciPy, which is imported when the first program is solved, has no stubs.
"""The linear program behind "auto": how many layers of each chunk get which mode.

Time is cut into 2N slots, forward and backward of each chunk. A slot lasts as long as its compute
(recomputation included) and at least as long as the copies that must go on in it; the sum is
minimised. Bytes are conserved: what leaves was produced, what comes back is there before its use,
no more than the look-ahead waits on the device. All of it is linear in the numbers of layers, so
the optimum over fractional numbers is found exactly (HiGHS, through SciPy) and bounds every plan
of these modes and look-ahead from below; rounding to whole layers is `solve`'s.

Knows nothing of budgets' origin, of rounding or of simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sppo_hf.planning.cost import StageCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.lowering import MOVED, mode_free_levels
from sppo_hf.planning.memory import CONTEXT_BYTES, FRAGMENTATION, HOST_SLAB_BYTES, byte_tables
from sppo_hf.planning.modes import SAVED, TIERS, FrameMode
from sppo_hf.planning.moments import Budgets, Bytes


@dataclass(frozen=True, slots=True)
class Mix:
    """The optimum over fractional numbers of layers."""

    counts: NDArray[np.float64]
    """[chunk, kind, mode]: layers."""

    seconds: float
    """Duration of the step: no plan with these modes and look-ahead is faster."""


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """Layers that cost the same, by a representative."""

    representative: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, cost: StageCost) -> LayerKinds:
        """Groups the layers of a model.

        A group is stood for by its last layer: under LoRA the first one saves a little less, which
        is not worth a second set of variables.
        """
        groups: dict[object, list[int]] = {}
        for index, layer in enumerate(cost.shape.layers):
            groups.setdefault(layer, []).append(index)
        members = tuple(tuple(group) for group in groups.values())
        return cls(tuple(group[-1] for group in members), members)


class Rows:
    """Constraints on `row . x`, collected sparsely."""

    def __init__(self) -> None:
        self.data: list[float] = []
        self.columns: list[int] = []
        self.starts = [0]
        self.bounds: list[float] = []

    def add(self, terms: Sequence[tuple[int, float]], bound: float) -> None:
        """Adds one row: (column, factor) terms, no column twice, and its bound."""
        for column, factor in terms:
            if factor:
                self.columns.append(column)
                self.data.append(factor)
        self.starts.append(len(self.data))
        self.bounds.append(bound)


def minimise(objective: NDArray[np.float64], less: Rows, equal: Rows) -> NDArray[np.float64] | None:
    """Returns the x >= 0 that minimises `objective . x`, or None where there is none.

    Args:
        objective: [width].
        less: rows that are at most their bound.
        equal: rows that are their bound.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    def matrix(rows: Rows) -> csr_array:
        shape = (len(rows.bounds), len(objective))
        return csr_array((rows.data, rows.columns, rows.starts), shape)

    result = linprog(
        objective,
        A_ub=matrix(less),
        b_ub=np.array(less.bounds),
        A_eq=matrix(equal),
        b_eq=np.array(equal.bounds),
        bounds=(0, None),
        method="highs",
    )
    return None if result.status != 0 else np.asarray(result.x)


class LinearProgram:
    """The program of one batch shape, for given modes and look-ahead."""

    def __init__(
        self,
        decisions: Decisions,
        cost: StageCost,
        budgets: Budgets,
        modes: Sequence[FrameMode],
        *,
        device_kind: str,
    ) -> None:
        """Prepare; `decisions.layer_modes` is not looked at."""
        self._what = decisions
        self._cost = cost
        self._budgets = budgets
        self._modes = modes
        self._device_kind = device_kind
        self._kinds = LayerKinds.of(cost)
        self._tables = tables = byte_tables(cost.shape, decisions, device_kind)
        self._work = cost.unit_seconds(decisions.bounds)
        # In the tables, which tell more layers apart: each kind's representative, its first layer.
        self._like = [tables.kind_of[i] for i in self._kinds.representative]
        self._like_first = [tables.kind_of[members[0]] for members in self._kinds.members]
        self._all = range(decisions.num_chunks)
        self._slab_bytes = HOST_SLAB_BYTES if device_kind == "cuda" else 1
        chunks, kinds = decisions.num_chunks, len(self._kinds.members)
        self._shape = (chunks, kinds, len(modes))
        self._x = chunks * kinds * len(modes)
        # Behind the counts: one column per chunk and purpose.
        names = (
            *("forward", "backward", "kept", "host", "disk"),
            *("out", "written", "sums", "stored", "coming", "back", "read"),
        )
        self._column = {name: self._x + i * chunks for i, name in enumerate(names)}
        self._width = self._x + len(names) * chunks
        self._compute_seconds = 0.0
        self._less = Rows()
        self._equal = Rows()

    def solve(self) -> Mix | None:
        """Returns the optimum, or None where nothing fits the budgets."""
        self._count_layers()
        self._hold_device()
        self._hold_elsewhere()
        self._take_time()
        self._copy_out()
        self._copy_back()
        objective = np.zeros(self._width)
        chunks = self._what.num_chunks
        for name in ("forward", "backward"):
            first = self._column[name]
            objective[first : first + chunks] = 1.0
        # Of equally fast plans, the one that moves less; never at a price that counts.
        moved = self._moved()
        most = moved.max(axis=2).sum(axis=0) @ [len(layers) for layers in self._kinds.members]
        if most > 0.0:
            objective[: self._x] = _MOVING_SHARE * self._compute_seconds / most * moved.ravel()
        values = minimise(objective, self._less, self._equal)
        if values is None:
            return None
        first = self._column["forward"]
        seconds = float(values[first : first + 2 * chunks].sum())
        return Mix(values[: self._x].reshape(self._shape), seconds)

    # -- terms -------------------------------------------------------------------------------

    def _at(self, chunk: int, kind: int, mode: int) -> int:
        _, kinds, modes = self._shape
        return (chunk * kinds + kind) * modes + mode

    def _col(self, name: str, chunk: int) -> int:
        return self._column[name] + chunk

    def _frame_terms(self, chunk: int, tiers: frozenset[str]) -> list[tuple[int, float]]:
        """Bytes of a chunk's frames on some tiers, in units of GiB for the solver's sake."""
        terms: list[tuple[int, float]] = []
        for kind, like in enumerate(self._like):
            for index, mode in enumerate(self._modes):
                if mode.tier in tiers:
                    size = self._tables.saved[like, SAVED.index(mode.saved), chunk]
                    terms.append((self._at(chunk, kind, index), float(size) / _GIB))
        return terms

    def _from_the_end(self, chunk: int, tiers: Sequence[str]) -> list[tuple[int, float]]:
        """GiB of the frames of this and all later chunks on some tiers."""
        terms: list[tuple[int, float]] = []
        for tier in tiers:
            terms.append((self._col(tier, self._what.num_chunks - 1), 1.0))
            if chunk:
                terms.append((self._col(tier, chunk - 1), -1.0))
        return terms

    def _moved(self) -> NDArray[np.float64]:
        moved = np.zeros(self._shape)
        for chunk in range(self._what.num_chunks):
            for column, size in self._frame_terms(chunk, _AWAY):
                moved.ravel()[column] = size
        return moved

    # -- constraints -------------------------------------------------------------------------

    def _count_layers(self) -> None:
        for chunk in range(self._what.num_chunks):
            for kind, members in enumerate(self._kinds.members):
                terms = [(self._at(chunk, kind, m), 1.0) for m in range(len(self._modes))]
                self._equal.add(terms, len(members))

    def _sum_up(self, name: str, tiers: frozenset[str]) -> None:
        """Makes column `name` of each chunk the GiB of all frames up to it on some tiers."""
        for chunk in range(self._what.num_chunks):
            terms = self._frame_terms(chunk, tiers)
            terms.append((self._col(name, chunk), -1.0))
            if chunk:
                terms.append((self._col(name, chunk - 1), 1.0))
            self._equal.add(terms, 0.0)

    def _hold_device(self) -> None:
        """Kept frames and all else are within the budget where a chunk's forward and backward end.

        Between these ends both change linearly. What is on its way, or is rebuilt, is counted as
        the modes allow.
        """
        self._sum_up("kept", frozenset({"device"}))
        budget = self._budgets.device
        if budget is None:
            return
        share = 1.0 + FRAGMENTATION[self._device_kind]
        points = self._tables.points
        held = self._held_device()
        copies, forward, backward = self._passing()
        last = points.num_layers - 1
        for chunk in self._all:
            moments = [
                (points.forward(chunk, last), forward[chunk], chunk),
                (points.forward(chunk, last + 1), 0, chunk),
                (points.backward(chunk, last), backward[chunk], chunk),
            ]
            if chunk:
                moments.append((points.backward(chunk, 0), backward[chunk], chunk - 1))
            for at, passing, framed in moments:
                fixed = held[at] + share * (passing + copies[chunk])
                terms = [(self._col("kept", framed), share)]
                if framed < chunk:
                    # Of the chunk itself, the frame of the layer that runs.
                    terms += self._share_of_frame(chunk, layer=0, share=share)
                self._less.add(terms, (budget - fixed) / _GIB)

    def _held_device(self) -> NDArray[np.float64]:
        """[points] What the device holds whatever the modes are, holes counted."""
        share = FRAGMENTATION[self._device_kind]
        standing = sum(self._tables.standing.values()) + CONTEXT_BYTES[self._device_kind]
        held = np.full(self._tables.points.count, float(standing))
        for cause, level in mode_free_levels(self._tables)["device"].items():
            held += level.during * (1.0 + share * (cause in MOVED))
        return held

    def _passing(self) -> tuple[Bytes, Bytes, Bytes]:
        """[chunks] The most that copies, and workspaces forward and backward, take."""
        tables, what = self._tables, self._what
        saved = tables.saved.max(axis=0)
        running = np.zeros_like(tables.lengths)
        for mode in self._modes:
            if mode.offload:
                running = np.maximum(running, saved[SAVED.index(mode.saved)])
        largest = np.maximum.accumulate(running)
        leaves = what.leave_bytes or 0
        copies = running + np.maximum(max(leaves, what.fetch_bytes or 0), largest)
        copies = np.where(largest > 0, copies, leaves if tables.streams else 0)
        again = tables.rebuilt if any(mode.recompute for mode in self._modes) else 0
        backward = (tables.workspace_backward + again).max(axis=0)
        return copies, tables.workspace_forward.max(axis=0), backward

    def _share_of_frame(self, chunk: int, *, layer: int, share: float) -> list[tuple[int, float]]:
        """GiB of a layer's kept frame, where modes are spread evenly over layers like it."""
        (kind,) = (k for k, members in enumerate(self._kinds.members) if layer in members)
        first = self._at(chunk, kind, 0)
        every = range(first, first + len(self._modes))
        share /= len(self._kinds.members[kind])
        terms = self._frame_terms(chunk, frozenset({"device"}))
        return [(column, share * size) for column, size in terms if column in every]

    def _hold_elsewhere(self) -> None:
        what, points = self._what, self._tables.points
        last, layers = self._all[-1], points.num_layers
        to_disk = "disk" in {what.kv_tier, *(mode.tier for mode in self._modes)}
        for tier in TIERS[1:]:
            self._sum_up(tier, frozenset({tier}))
            budget = self._budgets.of(tier)
            if budget is None:
                continue
            if tier == "host":
                budget -= budget % self._slab_bytes
                budget -= what.staging_bytes * to_disk
            levels = mode_free_levels(self._tables)[tier].values()
            # Where forward ends, and after the first chunk's backward, when most gradient sums
            # wait.
            ends = [(points.forward(last, layers), last)]
            if last:
                ends.append((points.backward(last - 1, layers - 1), last - 1))
            for at, framed in ends:
                held = sum(int(level.during[at]) for level in levels)
                self._less.add([(self._col(tier, framed), 1.0)], (budget - held) / _GIB)

    def _take_time(self) -> None:
        work = self._work
        layers = self._tables.kind_of
        forward = work.forward[layers].sum(axis=0) + work.head
        backward = work.backward[layers].sum(axis=0)
        self._compute_seconds = float((forward + backward).sum())
        for chunk in self._all:
            terms = [
                (
                    self._at(chunk, kind, index),
                    float(work.recompute[like, SAVED.index(mode.saved), chunk]),
                )
                for kind, like in enumerate(self._like_first)
                for index, mode in enumerate(self._modes)
            ]
            self._less.add([(self._col("forward", chunk), -1.0)], -float(forward[chunk]))
            terms.append((self._col("backward", chunk), -1.0))
            self._less.add(terms, -float(backward[chunk]))

    def _copy_out(self) -> None:
        """D2H and writes: how much has left the device, and the host, by the end of each slot."""
        cost, what, tables = self._cost, self._what, self._tables
        per_gib = cost.d2h_seconds(_GIB, both=tables.streams)
        most_sums = max(self._largest_gib(chunk, tables.kv_out_backward) for chunk in self._all)
        leave = what.leave_bytes / _GIB if what.leave_bytes else most_sums
        kv_gib, on_disk = 0.0, what.kv_tier == "disk"
        stage = leave + what.staging_bytes / _GIB + on_disk * 2 * most_sums
        for chunk in self._all:
            kv_gib += self._kv_gib(chunk, tables.kv_out_forward)
            frames = [(self._col("host", chunk), 1.0), (self._col("disk", chunk), 1.0)]
            self._flow("out", chunk, frames, kv_gib, lag_gib=leave)
            stored = [(self._col("disk", chunk), 1.0)]
            self._flow("written", chunk, stored, on_disk * kv_gib, lag_gib=stage)
        self._pace("out", "forward", per_gib)
        self._pace("written", "forward", cost.disk_write_seconds(_GIB))
        if not tables.streams:
            return
        # The gradient sums of backward, behind what of forward has not left yet.
        frames = [(self._col(tier, self._all[-1]), 1.0) for tier in ("host", "disk")]
        for chunk in reversed(self._all):
            kv_gib += self._kv_gib(chunk, tables.kv_out_backward)
            self._flow("sums", chunk, frames, kv_gib, lag_gib=leave)
            self._flow("stored", chunk, frames[1:], on_disk * kv_gib, lag_gib=stage)
        self._pace("sums", "backward", per_gib, follows="out")
        self._pace("stored", "backward", cost.disk_write_seconds(_GIB), follows="written")

    def _copy_back(self) -> None:
        """H2D and reads: what has come by the end of each slot; frames from the last chunk on."""
        cost, what, tables = self._cost, self._what, self._tables
        per_gib = cost.h2d_seconds(_GIB, both=tables.streams)
        read = cost.disk_read_seconds(_GIB)
        fetch, staged = (what.fetch_bytes or 0) / _GIB, what.staging_bytes / _GIB
        kv_gib, on_disk, last = 0.0, what.kv_tier == "disk", self._all[-1]
        if tables.streams:
            # K/V of a slot's first unit come while the unit before it still runs.
            for chunk in self._all:
                kv_gib += self._kv_gib(chunk, tables.kv_in_forward)
                first = self._largest_gib(min(chunk + 1, last), tables.kv_in_forward)
                self._flow("coming", chunk, [], kv_gib, lead_gib=first)
            self._pace("coming", "forward", max(per_gib, on_disk * read))
        kv_gib = 0.0
        for chunk in reversed(self._all):
            kv_gib += self._kv_gib(chunk, tables.kv_in_backward)
            lead = fetch + self._largest_gib(max(chunk - 1, 0), tables.kv_in_backward)
            frames = self._from_the_end(chunk, ("host", "disk"))
            self._flow("back", chunk, frames, kv_gib, lead_gib=lead)
            stored = self._from_the_end(chunk, ("disk",))
            self._flow("read", chunk, stored, on_disk * kv_gib, lead_gib=lead + staged)
        first = self._largest_gib(last, tables.kv_in_backward)
        self._pace("back", "backward", per_gib, head_start_gib=first)
        self._pace("read", "backward", read, head_start_gib=first)

    def _flow(
        self,
        name: str,
        chunk: int,
        frames: list[tuple[int, float]],
        fixed_gib: float,
        *,
        lag_gib: float = 0.0,
        lead_gib: float = 0.0,
    ) -> None:
        """Column `name` is within a lag or a lead of frames and fixed bytes, at a slot's end."""
        moved = self._col(name, chunk)
        self._less.add([(moved, 1.0), *_negative(frames)], fixed_gib + lead_gib)
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
            slot: "forward" or "backward", which says the order of the chunks too.
            per_gib: seconds.
            follows: a forward column that `name` goes on from; else it begins with nothing.
            head_start_gib: what may have moved before the first slot.
        """
        chunks = self._all if slot == "forward" else self._all[::-1]
        before = None if follows is None else self._col(follows, self._all[-1])
        for chunk in chunks:
            terms = [(self._col(name, chunk), per_gib), (self._col(slot, chunk), -1.0)]
            if before is not None:
                terms.append((before, -per_gib))
            self._less.add(terms, head_start_gib * per_gib if before is None else 0.0)
            before = self._col(name, chunk)

    def _kv_gib(self, chunk: int, streamed: Bytes) -> float:
        """GiB that all layers of a chunk stream."""
        return float(streamed[self._tables.kind_of, chunk].sum()) / _GIB

    def _largest_gib(self, chunk: int, streamed: Bytes) -> float:
        return float(streamed[:, chunk].max()) / _GIB


_GIB = 2**30
# The most that a plan's time may be off for moving fewer bytes.
_MOVING_SHARE = 1e-5
_AWAY = frozenset({"host", "disk"})


def _negative(terms: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(column, -value) for column, value in terms]
