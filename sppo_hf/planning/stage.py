"""Lowers decisions about one stage to lanes of actions, which `sppo_hf.schedule` simulates.

One compute stream, a copy lane in each direction and the disk's two directions; the rules of the
look-ahead are those that the offload engine carries out (what a frame waits for follows from byte
counts, not from timing), so the simulated step is the step that runs. Knows nothing of how
decisions are found.

Layer index `num_layers` stands for the head and the loss of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sppo_hf.planning.cost import StageCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.modes import Tier
from sppo_hf.planning.stage_bytes import StageBytes
from sppo_hf.planning.streams import KVStreams
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.simulate import simulate
from sppo_hf.schedule.timeline import Timeline

COMPUTE, D2H, H2D, WRITE, READ = "compute", "d2h", "h2d", "disk write", "disk read"


@dataclass(slots=True)
class StageLanes:
    """Actions by lane, with what each takes and what it waits for."""

    lanes: dict[str, list[Action]] = field(
        default_factory=lambda: {lane: [] for lane in (COMPUTE, D2H, H2D, WRITE, READ)}
    )
    seconds: dict[Action, float] = field(default_factory=dict[Action, float])
    after: dict[Action, list[Action]] = field(default_factory=dict[Action, list[Action]])

    def add(self, lane: str, action: Action, seconds: float, after: Iterable[Action]) -> Action:
        """Appends an action to a lane."""
        self.lanes[lane].append(action)
        self.seconds[action] = seconds
        self.after[action] = list(after)
        return action

    def simulate(self, held: StageBytes | None = None) -> Timeline:
        """Runs all lanes; with the bytes of every tier over time where `held` is given."""
        return simulate(
            self.lanes,
            seconds=self.seconds.__getitem__,
            after=self.after.__getitem__,
            changes=None if held is None else held.changes,
            standing=() if held is None else held.standing(),
        )


def lower(decisions: Decisions, cost: StageCost) -> StageLanes:
    """Returns the lanes of one step (of one forward, where there is no training)."""
    return _Lowering(decisions, cost).lower()


@dataclass(slots=True)
class _Queue:
    """Bytes that are somewhere until an action ends, oldest first, and who must wait for that."""

    limit_bytes: int | None
    """None: what was added last only."""
    queue: list[tuple[Action, int]] = field(default_factory=list[tuple[Action, int]])
    first: int = 0
    """Index of the oldest entry that nobody waited for."""
    num_bytes: int = 0
    """Of the entries that nobody waited for."""

    def add(self, action: Action, num_bytes: int) -> None:
        self.queue.append((action, num_bytes))
        self.num_bytes += num_bytes

    def settle(self, room_bytes: int = 0) -> list[Action]:
        """What must have ended so that `room_bytes` more are within the limit; oldest first."""
        ended: list[Action] = []
        while self.first < len(self.queue) and self._too_much(room_bytes):
            action, num_bytes = self.queue[self.first]
            self.num_bytes -= num_bytes
            self.first += 1
            ended.append(action)
        return ended

    def _too_much(self, room_bytes: int) -> bool:
        if self.limit_bytes is None:
            return len(self.queue) - self.first > 1
        return self.num_bytes + room_bytes > self.limit_bytes


class _Lowering:
    """One lowering under way."""

    def __init__(self, decisions: Decisions, cost: StageCost) -> None:
        self._what = decisions
        self._cost = cost
        self._streams = KVStreams(decisions, cost)
        self._out = StageLanes()
        # Copies of one lane end in order, so compute waits for the last of those that must end.
        self._leaving = _Queue(decisions.leave_bytes)
        self._waits: list[Action] = []
        """What the next unit waits for, beside its own frame."""
        self._staged = _Queue(decisions.staging_bytes)
        """Host bytes of frames on their way to the disk or back."""
        # K/V pass chunk by chunk, in bytes far below a layer's; a layer's writes lag by one layer.
        self._kv_staged = _Queue(None)
        self._away: dict[tuple[int, int], Action] = {}
        """After which action a frame can come back."""
        self._kv_away: dict[int, list[Action]] = {}
        """The same of a layer's newest keys, values and gradient sums."""
        self._turn: list[Action] = []
        """The last action of forward: nothing is read ahead before it has ended."""

    def lower(self) -> StageLanes:
        self._forward()
        if self._what.training:
            self._turn = self._out.lanes[COMPUTE][-1:]
            self._backward()
        return self._out

    # -- forward -----------------------------------------------------------------------------

    def _forward(self) -> None:
        what, cost = self._what, self._cost
        for chunk, (start, end) in enumerate(what.bounds):
            for layer in range(what.num_layers):
                coming = self._stream_in(chunk, layer, self._streams.forward_in(layer, chunk), 0)
                seconds = cost.forward_seconds(layer, start, end)
                unit = self._compute(Action("F", 0, chunk, layer), seconds)
                if what.training:
                    self._send_frame(chunk, layer, unit)
                self._stream_out(chunk, layer, self._streams.forward_out(layer, chunk), 0, unit)
                self._waits += [*self._leaving.settle()[-1:], *coming]
            head = cost.head_seconds(end - start, training=what.training)
            self._compute(Action("F", 0, chunk, what.num_layers), head)

    def _compute(self, action: Action, seconds: float, *after: Action) -> Action:
        waits, self._waits = self._waits, []
        return self._out.add(COMPUTE, action, seconds, [*waits, *after])

    def _send_frame(self, chunk: int, layer: int, unit: Action) -> None:
        mode = self._what.layer_modes[chunk][layer]
        if mode.offload:
            num_bytes = self._frame_bytes(chunk, layer)
            copy = Action("D", 0, chunk, layer)
            seconds = self._cost.d2h_seconds(num_bytes, both=self._streams.active)
            self._away[chunk, layer] = self._send(copy, num_bytes, seconds, unit, mode.tier)

    def _send(
        self, copy: Action, num_bytes: int, seconds: float, unit: Action, tier: Tier
    ) -> Action:
        """Copies bytes to the host, and on to the disk; returns what ends when they are away."""
        staged = self._staged if copy.kind == "D" else self._kv_staged
        room = staged.settle(num_bytes) if tier == "disk" else []
        self._out.add(D2H, copy, seconds, [unit, *room])
        self._leaving.add(copy, num_bytes)
        if tier != "disk":
            return copy
        write = copy._replace(kind="S", part=None if copy.kind == "D" else (copy.part or 0) + 1)
        self._out.add(WRITE, write, self._cost.disk_write_seconds(num_bytes), [copy])
        staged.add(write, num_bytes)
        return write

    # -- backward ----------------------------------------------------------------------------

    def _backward(self) -> None:
        what, cost, streams = self._what, self._cost, self._streams
        layers = range(what.num_layers - 1, -1, -1)
        order = [(chunk, layer) for chunk in range(what.num_chunks - 1, -1, -1) for layer in layers]
        gates = self._fetches(order)
        for position, (chunk, layer) in enumerate(order):
            start, end = what.bounds[chunk]
            mode = what.layer_modes[chunk][layer]
            for fetch in gates.get(position, ()):
                self._fetch_frame(*fetch)
            coming = self._stream_in(chunk, layer, streams.backward_in(layer, chunk), 1)
            frame = [Action("H", 0, chunk, layer)] if mode.offload else []
            seconds = cost.backward_seconds(layer, start, end)
            seconds += cost.recompute_seconds(layer, end - start, mode.saved)
            unit = self._compute(Action("B", 0, chunk, layer), seconds, *frame)
            self._stream_out(chunk, layer, streams.backward_out(layer, chunk), 1, unit)
            if streams.active:
                self._waits += [*self._leaving.settle()[-1:], *coming]

    def _fetches(self, order: list[tuple[int, int]]) -> dict[int, list[tuple[int, int]]]:
        """Which frames are asked for when backward enters the frame at each position.

        The tape's rule (`sppo_hf.offload.tape`): what is ahead of its use stays within the limit,
        but one frame may always be ahead. Frames that are kept whole are not on the tape, so
        entering them asks for nothing.
        """
        what = self._what
        modes = [what.layer_modes[chunk][layer] for chunk, layer in order]
        sizes = [
            self._frame_bytes(*at) if mode.offload else 0
            for at, mode in zip(order, modes, strict=True)
        ]
        gates: dict[int, list[tuple[int, int]]] = {}
        following = ahead_bytes = 0
        limit = what.fetch_bytes or 0
        for position, mode in enumerate(modes):
            if not (mode.offload or mode.recompute):
                continue
            fetched: list[tuple[int, int]] = []
            if following > position:
                ahead_bytes -= sizes[position]
            else:
                following = position + 1
                if sizes[position]:
                    fetched.append(order[position])
            while following < len(order):
                size = sizes[following]
                if size and ahead_bytes and ahead_bytes + size > limit:
                    break
                if size:
                    fetched.append(order[following])
                    ahead_bytes += size
                following += 1
            gates[position] = fetched
        return gates

    def _fetch_frame(self, chunk: int, layer: int) -> None:
        num_bytes = self._frame_bytes(chunk, layer)
        after = [self._out.lanes[COMPUTE][-1], self._away[chunk, layer]]
        from_disk = self._what.layer_modes[chunk][layer].tier == "disk"
        if from_disk:
            # Reads run ahead of their copies, as far as staging holds.
            waits = [*self._turn, after[-1], *self._staged.settle(num_bytes)]
            read = Action("L", 0, chunk, layer)
            after.append(self._out.add(READ, read, self._cost.disk_read_seconds(num_bytes), waits))
        seconds = self._cost.h2d_seconds(num_bytes, both=self._streams.active)
        copy = self._out.add(H2D, Action("H", 0, chunk, layer), seconds, after)
        if from_disk:
            self._staged.add(copy, num_bytes)

    def _frame_bytes(self, chunk: int, layer: int) -> int:
        start, end = self._what.bounds[chunk]
        saved = self._what.layer_modes[chunk][layer].saved
        return self._cost.frame_bytes(layer, end - start, saved)

    # -- keys and values ---------------------------------------------------------------------

    def _stream_in(self, chunk: int, layer: int, num_bytes: int, part: int) -> list[Action]:
        """Brings a layer's prefix in beside its attention; returns what the next unit waits for.

        A unit cannot end before its last block has come, which is said here as: the next unit
        cannot begin. Blocks of a unit come while the one before it still computes.
        """
        if not num_bytes:
            return []
        after = [*self._out.lanes[COMPUTE][-2:-1], *self._kv_away.get(layer, ())]
        if self._what.kv_tier == "disk":
            read = Action("L", 0, chunk, layer, part + 1)
            seconds = self._cost.disk_read_seconds(num_bytes)
            after = [*after, self._out.add(READ, read, seconds, after)]
        seconds = self._cost.h2d_seconds(num_bytes, both=True)
        return [self._out.add(H2D, Action("K", 0, chunk, layer, part), seconds, after)]

    def _stream_out(self, chunk: int, layer: int, num_bytes: int, part: int, unit: Action) -> None:
        """Sends a chunk's new K/V away (forward), or the prefix's gradient sums (backward)."""
        if num_bytes:
            copy = Action("O", 0, chunk, layer, part)
            seconds = self._cost.d2h_seconds(num_bytes, both=True)
            away = self._send(copy, num_bytes, seconds, unit, self._what.kv_tier)
            # Both lanes are in order, so the newest stands for all before it.
            self._kv_away[layer] = [away]
