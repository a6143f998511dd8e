"""The linear programme behind "auto": how many layers of each chunk get which mode.

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
from sppo_hf.planning.highs import Rows, minimise
from sppo_hf.planning.memory import MemoryModel
from sppo_hf.planning.modes import FrameMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes that each tier may hold; None where there is no limit, 0 where there is no tier."""

    device: int | None
    host: int | None
    disk: int | None = 0

    def of(self, tier: str) -> int | None:
        """Returns the bytes of a tier."""
        return {"device": self.device, "host": self.host, "disk": self.disk}[tier]


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
        """Groups the layers of a model."""
        groups: dict[object, list[int]] = {}
        for index, layer in enumerate(cost.shape.layers):
            groups.setdefault(layer, []).append(index)
        members = tuple(tuple(group) for group in groups.values())
        return cls(tuple(group[0] for group in members), members)


class Programme:
    """The programme of one batch shape, for given modes and look-ahead."""

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
        self._kinds = LayerKinds.of(cost)
        self._memory = MemoryModel(cost.shape, decisions, device_kind)
        chunks, kinds = decisions.num_chunks, len(self._kinds.members)
        self._shape = (chunks, kinds, len(modes))
        self._x = chunks * kinds * len(modes)
        # Behind the counts: one column per chunk and purpose.
        names = ("forward", "backward", "out", "back", "kept", "written", "read", "host", "disk")
        self._column = {name: self._x + i * chunks for i, name in enumerate(names)}
        self._width = self._x + len(names) * chunks
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
        self._use_disk()
        objective = np.zeros(self._width)
        chunks = self._what.num_chunks
        for name in ("forward", "backward"):
            first = self._column[name]
            objective[first : first + chunks] = 1.0
        # Of equally fast plans, the one that moves less.
        scale = 1e-3 / max(1.0, float(self._bytes_of_everything()))
        objective[: self._x] = scale * self._moved().ravel()
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
        for kind, layer in enumerate(self._kinds.representative):
            for index, mode in enumerate(self._modes):
                if mode.tier in tiers:
                    size = self._memory.frame_bytes(layer, chunk, mode.saved)
                    terms.append((self._at(chunk, kind, index), size / _GIB))
        return terms

    def _from_the_end(self, chunk: int, tiers: Sequence[str]) -> list[tuple[int, float]]:
        """GiB of the frames of this and all later chunks on some tiers."""
        terms: list[tuple[int, float]] = []
        for tier in tiers:
            terms.append((self._col(tier, self._what.num_chunks - 1), 1.0))
            if chunk:
                terms.append((self._col(tier, chunk - 1), -1.0))
        return terms

    def _bytes_of_everything(self) -> float:
        return float(self._moved().sum()) or 1.0

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
        self._sum_up("kept", frozenset({"device"}))
        budget = self._budgets.device
        if budget is None:
            return
        modes = frozenset(self._modes)
        for chunk, phase, kv_tokens, dkv_tokens, framed in self._memory.moments():
            if not framed:
                continue
            fixed = self._memory.fixed_device(chunk, phase, kv_tokens, dkv_tokens, modes).total
            share = 1.0 + _FRAGMENTATION_SHARE
            terms = [(self._col("kept", framed - 1), share)]
            self._less.add(terms, (budget - fixed) / _GIB)

    def _hold_elsewhere(self) -> None:
        last = self._what.num_chunks - 1
        tokens = self._what.total_tokens
        kv = self._cost.shape.kv_bytes_per_token() + self._cost.shape.dkv_bytes_per_token()
        for tier in ("host", "disk"):
            self._sum_up(tier, frozenset({tier}))
            budget = self._budgets.of(tier)
            if budget is None:
                continue
            if self._what.kv_tier == tier:
                budget -= kv * tokens * self._what.batch_rows
            if tier == "host" and any(mode.tier == "disk" for mode in self._modes):
                budget -= self._what.staging_bytes
            self._less.add([(self._col(tier, last), 1.0)], budget / _GIB)

    def _take_time(self) -> None:
        cost = self._cost
        for chunk, (start, end) in enumerate(self._what.bounds):
            forward = cost.head_seconds(end - start, training=True)
            backward: float = 0.0
            terms: list[tuple[int, float]] = []
            for kind, members in enumerate(self._kinds.members):
                layer = members[0]
                forward += len(members) * cost.forward_seconds(layer, start, end)
                backward += len(members) * cost.backward_seconds(layer, start, end)
                terms += [
                    (
                        self._at(chunk, kind, index),
                        cost.recompute_seconds(layer, end - start, mode.saved),
                    )
                    for index, mode in enumerate(self._modes)
                ]
            self._less.add([(self._col("forward", chunk), -1.0)], -forward)
            self._less.add([*terms, (self._col("backward", chunk), -1.0)], -backward)

    def _copy_out(self) -> None:
        """D2H: "out" is what has left by the end of a chunk's forward."""
        cost, what = self._cost, self._what
        streams = what.kv_tier != "device"
        per_gib = cost.d2h_seconds(_GIB, both=streams)
        limit = (what.leave_bytes or 0) / _GIB
        for chunk, (start, end) in enumerate(what.bounds):
            produced = [(self._col("host", chunk), 1.0), (self._col("disk", chunk), 1.0)]
            out = self._col("out", chunk)
            # Not before it is there; not so late that more than the look-ahead waits.
            self._less.add([(out, 1.0), *_negative(produced)], 0.0)
            self._less.add([*produced, (out, -1.0)], limit)
            terms = [(out, per_gib), (self._col("forward", chunk), -1.0)]
            if chunk:
                terms.append((self._col("out", chunk - 1), -per_gib))
            kv_out, kv_in = self._stream_seconds(chunk, start, end, backward=False)
            self._less.add(terms, -kv_out)
            self._less.add([(self._col("forward", chunk), -1.0)], -kv_in)

    def _copy_back(self) -> None:
        """H2D: "back" is what has come by the end of a chunk's backward, from the last chunk on."""
        cost, what = self._cost, self._what
        streams = what.kv_tier != "device"
        per_gib = cost.h2d_seconds(_GIB, both=streams)
        limit = (what.fetch_bytes or 0) / _GIB
        last = what.num_chunks - 1
        for chunk in range(last, -1, -1):
            start, end = what.bounds[chunk]
            needed = self._from_the_end(chunk, ("host", "disk"))
            back = self._col("back", chunk)
            self._less.add([*needed, (back, -1.0)], 0.0)
            self._less.add([(back, 1.0), *_negative(needed)], limit)
            terms = [(back, per_gib), (self._col("backward", chunk), -1.0)]
            if chunk < last:
                terms.append((self._col("back", chunk + 1), -per_gib))
            kv_out, kv_in = self._stream_seconds(chunk, start, end, backward=True)
            self._less.add(terms, -kv_in)
            self._less.add([(self._col("backward", chunk), -1.0)], -kv_out)

    def _stream_seconds(
        self, chunk: int, start: int, end: int, *, backward: bool
    ) -> tuple[float, float]:
        """Seconds of a chunk's K/V and dK/dV streams, to the host and to the device."""
        cost, what = self._cost, self._what
        if what.kv_tier == "device":
            return 0.0, 0.0
        out_bytes = in_bytes = 0
        for members in self._kinds.members:
            layer, count = members[0], len(members)
            window = cost.shape.layers[layer].window
            if backward:
                seen = end if window is None else min(end, window + end - start)
                dkv = cost.dkv_bytes(layer, seen)
                out_bytes += count * dkv
                in_bytes += count * (cost.kv_bytes(layer, seen) + dkv)
            else:
                seen = start if window is None else min(start, window + end - start)
                out_bytes += count * cost.kv_bytes(layer, end - start)
                in_bytes += count * cost.kv_bytes(layer, seen)
        if what.kv_tier == "disk":
            return (
                max(cost.d2h_seconds(out_bytes, both=True), cost.disk_write_seconds(out_bytes)),
                max(cost.h2d_seconds(in_bytes, both=True), cost.disk_read_seconds(in_bytes)),
            )
        return cost.d2h_seconds(out_bytes, both=True), cost.h2d_seconds(in_bytes, both=True)

    def _use_disk(self) -> None:
        """Writes keep up with forward, reads with backward, but for what staging holds."""
        if not any(mode.tier == "disk" for mode in self._modes):
            return
        cost, what = self._cost, self._what
        write, read = cost.disk_write_seconds(_GIB), cost.disk_read_seconds(_GIB)
        staged = what.staging_bytes / _GIB
        last = what.num_chunks - 1
        for chunk in range(what.num_chunks):
            produced = [(self._col("disk", chunk), 1.0)]
            written = self._col("written", chunk)
            self._less.add([(written, 1.0), *_negative(produced)], 0.0)
            self._less.add([*produced, (written, -1.0)], staged)
            terms = [(written, write), (self._col("forward", chunk), -1.0)]
            if chunk:
                terms.append((self._col("written", chunk - 1), -write))
            self._less.add(terms, 0.0)
        for chunk in range(last, -1, -1):
            needed = self._from_the_end(chunk, ("disk",))
            back = self._col("read", chunk)
            self._less.add([*needed, (back, -1.0)], 0.0)
            self._less.add([(back, 1.0), *_negative(needed)], staged)
            terms = [(back, read), (self._col("backward", chunk), -1.0)]
            if chunk < last:
                terms.append((self._col("read", chunk + 1), -read))
            self._less.add(terms, 0.0)


_GIB = 2**30
_AWAY = frozenset({"host", "disk"})
_FRAGMENTATION_SHARE = 0.02


def _negative(terms: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(column, -value) for column, value in terms]
