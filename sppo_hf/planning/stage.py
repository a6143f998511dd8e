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
from sppo_hf.planning.stage_bytes import StageBytes
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
class _Leaving:
    """Copies that have been enqueued, oldest first, and which of them compute waits for."""

    limit_bytes: int | None
    queue: list[tuple[Action, int]] = field(default_factory=list[tuple[Action, int]])
    first: int = 0
    """Index of the oldest copy that nobody waited for."""
    waiting_bytes: int = 0

    def add(self, action: Action, num_bytes: int) -> None:
        self.queue.append((action, num_bytes))
        self.waiting_bytes += num_bytes

    def settle(self) -> Action | None:
        """The copy that must have ended now, so that no more than the limit waits."""
        last = None
        while self.first < len(self.queue) and self._too_much():
            last, num_bytes = self.queue[self.first]
            self.waiting_bytes -= num_bytes
            self.first += 1
        return last

    def _too_much(self) -> bool:
        if self.limit_bytes is None:
            return len(self.queue) - self.first > 1
        return self.waiting_bytes > self.limit_bytes


class _Lowering:
    """One lowering under way."""

    def __init__(self, decisions: Decisions, cost: StageCost) -> None:
        self._what = decisions
        self._cost = cost
        self._out = StageLanes()
        self._streams = decisions.kv_tier != "device"
        self._copy_of: dict[tuple[int, int], Action] = {}
        self._read = _Leaving(decisions.staging_bytes)
        self._last_streams: list[Action] = []

    def lower(self) -> StageLanes:
        self._forward()
        if self._what.training:
            self._backward()
        return self._out

    # -- forward -----------------------------------------------------------------------------

    def _forward(self) -> None:
        what, cost, out = self._what, self._cost, self._out
        leaving = _Leaving(what.leave_bytes)
        staged = _Leaving(what.staging_bytes)
        wait: Action | None = None
        for chunk, (start, end) in enumerate(what.bounds):
            for layer in range(what.num_layers):
                action = Action("F", 0, chunk, layer)
                after = [wait] if wait is not None else []
                after += self._stream_in(chunk, layer, start, backward=False)
                out.add(COMPUTE, action, cost.forward_seconds(layer, start, end), after)
                wait = None
                if what.training:
                    self._send_frame(chunk, layer, leaving, staged)
                    wait = leaving.settle()
                self._stream_out(chunk, layer, action, end - start, backward=False)
            head = cost.head_seconds(end - start, training=what.training)
            after = [wait] if wait is not None else []
            wait = None
            out.add(COMPUTE, Action("F", 0, chunk, what.num_layers), head, after)

    def _send_frame(self, chunk: int, layer: int, leaving: _Leaving, staged: _Leaving) -> None:
        what, cost = self._what, self._cost
        mode = what.layer_modes[chunk][layer]
        if not mode.offload:
            return
        start, end = what.bounds[chunk]
        num_bytes = cost.frame_bytes(layer, end - start, mode.saved)
        seconds = cost.d2h_seconds(num_bytes, both=self._streams)
        after = [Action("F", 0, chunk, layer)]
        if mode.tier == "disk":
            written = staged.settle()
            after += [written] if written is not None else []
        copy = self._out.add(D2H, Action("D", 0, chunk, layer), seconds, after)
        leaving.add(copy, num_bytes)
        self._copy_of[chunk, layer] = copy
        if mode.tier == "disk":
            write = Action("S", 0, chunk, layer)
            self._out.add(WRITE, write, cost.disk_write_seconds(num_bytes), [copy])
            staged.add(write, num_bytes)
            self._copy_of[chunk, layer] = write

    # -- backward ----------------------------------------------------------------------------

    def _backward(self) -> None:
        what, cost, out = self._what, self._cost, self._out
        layers = range(what.num_layers - 1, -1, -1)
        order = [(chunk, layer) for chunk in range(what.num_chunks - 1, -1, -1) for layer in layers]
        gates = self._fetches(order)
        for position, (chunk, layer) in enumerate(order):
            start, end = what.bounds[chunk]
            mode = what.layer_modes[chunk][layer]
            for fetch in gates.get(position, ()):
                self._fetch_frame(*fetch, out.lanes[COMPUTE][-1])
            after = [Action("H", 0, chunk, layer)] if mode.offload else []
            after += self._stream_in(chunk, layer, end, backward=True)
            seconds = cost.backward_seconds(layer, start, end)
            seconds += cost.recompute_seconds(layer, end - start, mode.saved)
            action = out.add(COMPUTE, Action("B", 0, chunk, layer), seconds, after)
            self._stream_out(chunk, layer, action, end, backward=True)

    def _fetches(self, order: list[tuple[int, int]]) -> dict[int, list[tuple[int, int]]]:
        """Which frames are fetched when backward enters the frame at each position."""
        what, cost = self._what, self._cost
        sizes: list[int] = []
        for chunk, layer in order:
            mode = what.layer_modes[chunk][layer]
            start, end = what.bounds[chunk]
            sizes.append(cost.frame_bytes(layer, end - start, mode.saved) if mode.offload else 0)
        gates: dict[int, list[tuple[int, int]]] = {}
        next_fetch = unused_bytes = 0
        limit = what.fetch_bytes or 0
        for position in range(len(order)):
            fetched: list[tuple[int, int]] = []
            while next_fetch < len(order):
                size = sizes[next_fetch]
                if next_fetch > position + 1 and unused_bytes + size > limit:
                    break
                if size:
                    fetched.append(order[next_fetch])
                    unused_bytes += size
                next_fetch += 1
            unused_bytes -= sizes[position]
            if fetched:
                gates[position] = fetched
        return gates

    def _fetch_frame(self, chunk: int, layer: int, gate: Action) -> None:
        what, cost = self._what, self._cost
        mode = what.layer_modes[chunk][layer]
        start, end = what.bounds[chunk]
        num_bytes = cost.frame_bytes(layer, end - start, mode.saved)
        after = [gate, self._copy_of[chunk, layer]]
        if mode.tier == "disk":
            # Reads run ahead of their copies, as far as staging holds.
            read = Action("L", 0, chunk, layer)
            copied = self._read.settle()
            waits = [after[1]] if copied is None else [after[1], copied]
            self._out.add(READ, read, cost.disk_read_seconds(num_bytes), waits)
            after.append(read)
        seconds = cost.h2d_seconds(num_bytes, both=self._streams)
        copy = self._out.add(H2D, Action("H", 0, chunk, layer), seconds, after)
        if mode.tier == "disk":
            self._read.add(copy, num_bytes)

    # -- keys and values ---------------------------------------------------------------------

    def _stream_in(self, chunk: int, layer: int, tokens: int, *, backward: bool) -> list[Action]:
        """Brings a layer's prefix in beside its attention; returns what its unit waits for.

        A unit cannot end before its last block has come, which is said here as: the next unit
        cannot begin. Blocks of a unit come while the one before it still computes.
        """
        if not self._streams:
            return []
        out, cost = self._out, self._cost
        lane = out.lanes[COMPUTE]
        part = 1 if backward else 0
        waits, self._last_streams = self._last_streams, []
        if tokens:
            num_bytes = cost.kv_bytes(layer, self._visible(layer, chunk, tokens))
            if backward and chunk < self._what.num_chunks - 1:
                num_bytes += cost.dkv_bytes(layer, self._visible(layer, chunk, tokens))
            gate = [lane[-2]] if len(lane) > 1 else []
            if self._what.kv_tier == "disk":
                read = Action("L", 0, chunk, layer, 1 + part)
                out.add(READ, read, cost.disk_read_seconds(num_bytes), gate)
                gate = [*gate, read]
            stream = Action("K", 0, chunk, layer, part)
            out.add(H2D, stream, cost.h2d_seconds(num_bytes, both=True), gate)
            self._last_streams = [stream]
        return waits

    def _stream_out(
        self, chunk: int, layer: int, unit: Action, tokens: int, *, backward: bool
    ) -> None:
        """Sends a chunk's new K/V away (forward), or the prefix's gradient sums (backward)."""
        if not self._streams:
            return
        out, cost = self._out, self._cost
        part = 1 if backward else 0
        if backward:
            num_bytes = cost.dkv_bytes(layer, self._visible(layer, chunk, tokens))
        else:
            num_bytes = cost.kv_bytes(layer, tokens)
        copy = Action("O", 0, chunk, layer, part)
        out.add(D2H, copy, cost.d2h_seconds(num_bytes, both=True), [unit])
        if self._what.kv_tier == "disk":
            write = Action("S", 0, chunk, layer, 1 + part)
            out.add(WRITE, write, cost.disk_write_seconds(num_bytes), [copy])

    def _visible(self, layer: int, chunk: int, tokens: int) -> int:
        """Tokens of the prefix that the chunk's queries see."""
        window = self._cost.shape.layers[layer].window
        start, end = self._what.bounds[chunk]
        return tokens if window is None else min(tokens, window + end - start)
