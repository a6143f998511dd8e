"""What a step really did, action by action: noted while it runs, and kept in files.

On one device actions are those of single layers; in a pipeline the executor notes whole units
(`sppo_hf.pipeline.executor`). Both end as the two files of each rank that `TraceFolder` writes.

[Note: the order that is noted] An action is noted where the host has enqueued it. A backward of a
layer is entered when the gradient of its output is there; what is prefetched then comes before it.
What streams in or out within a layer's attention is noted once a layer, beside its forward or
backward. Threads of the disk do their work beside all others, as early as they can: S and L are
noted with the D and H that they belong to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from sppo_hf.attention.streamed_kv import KVStream
from sppo_hf.engine.kv_offload import EngineTransfer
from sppo_hf.engine.step_observer import Mark
from sppo_hf.errors import ConfigError
from sppo_hf.offload.layer_offload import PrefetchGroup
from sppo_hf.offload.weights import HostWeights
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.tiers import TIERS
from sppo_hf.reporting.chrome_trace import write_trace
from sppo_hf.schedule.actions import Action, Kind
from sppo_hf.schedule.measured_timeline import ActionRecord, rank_timeline


class ActionLog:
    """The actions of one forward and its backward on one device, and when they ran.

    On CUDA times are those of the device, known once it has passed the last mark.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noted: list[tuple[Action, Mark, Mark]] = []
        self._open: tuple[Action, Mark] | None = None
        self._ended: Callable[[], None] | None = None
        self._begin = Mark(device)

    def begin(self, action: Action, ended: Callable[[], None] | None = None) -> None:
        """Compute turns to an action; it is noted when it ends.

        `ended`, for those whose end nobody sees, is called by `finish`, calls `end` and notes what
        else belongs to the action.
        """
        self.finish()
        self._open = action, Mark(self._device)
        self._ended = ended

    def end(self) -> None:
        """Note the action that began, if one did."""
        if self._open is not None:
            (action, begin), self._open = self._open, None
            self._noted.append((action, begin, Mark(self._device)))

    def finish(self) -> None:
        """What began has ended, for something else begins or nothing comes any more."""
        if self._open is not None and self._ended is not None:
            self._ended()
        self.end()

    def note(self, action: Action) -> None:
        """Note an action beside compute, at the moment at which it is enqueued."""
        now = Mark(self._device)
        self._noted.append((action, now, now))

    @property
    def actions(self) -> list[Action]:
        """What was noted, in order."""
        return [action for action, _, _ in self._noted]

    def done(self) -> list[ActionRecord] | None:
        """The same with seconds since the log began; None while the device is not there yet."""
        if not all(end.is_reached() for _, _, end in self._noted[-1:]):
            return None
        return [
            ActionRecord(action, start, self._begin.seconds_until(end), start)
            for action, begin, end in self._noted
            for start in (self._begin.seconds_until(begin),)
        ]


class LayerLog:
    """Tells an action log what the layers of one sequence do; see [Note: the order that is noted].

    Layers count from the first of the sequence; the one behind the last is norm and head.
    """

    def __init__(
        self,
        log: ActionLog,
        plan: Plan,
        stream: KVStream | None,
        first_unit: int,
        weights: HostWeights | None,
    ) -> None:
        self._log = log
        self._weights = weights
        self._plan = plan
        self._mover = None if stream is None else cast(EngineTransfer, stream.transfer)
        self._first_unit = first_unit
        self._moved = (0, 0)
        self._away: set[tuple[int, int]] = set()
        """(chunk, layer) of frames that moved."""
        self._last_chunk = 0

    def begin_layer(self, chunk: int, layer: int, hidden: Tensor) -> None:
        """Forward enters a layer, whose input is `hidden`; by layer norm and head are apart."""
        self._last_chunk = max(self._last_chunk, chunk)
        following = self._after_backward(chunk, layer)
        if following is not None and hidden.requires_grad:
            # With the gradient of its input the backward of a layer ends, and that of another
            # begins.
            hidden.register_hook(lambda _grad: self._enter_backward(*following))
        if self._plan.order == "by_chunk" or layer < self._plan.num_layers:
            self._log.begin(self._action("F", chunk, layer))

    def begin_head(self, chunk: int) -> None:
        """Where norm and head are apart: the head begins."""
        self._log.begin(self._action("F", chunk, self._plan.num_layers))

    def _after_backward(self, chunk: int, layer: int) -> tuple[int, int] | None:
        """(chunk, layer) of the layer whose backward comes next; None where none of a layer's."""
        if self._plan.order == "by_layer" and chunk > 0:
            return None if layer == self._plan.num_layers else (chunk - 1, layer)
        if layer == 0:
            return None
        return (self._last_chunk if self._plan.order == "by_layer" else chunk), layer - 1

    def end_layer(self, chunk: int, layer: int, frame: PrefetchGroup | None) -> None:
        """Forward has left a layer."""
        came, left = self._streamed()
        if came:
            self._log.note(self._action("K", chunk, layer, 0))
        self._log.end()
        moved = frame is not None and any(handle.is_offloaded for handle in frame.handles())
        if moved:
            self._away.add((chunk, layer))
            self._log.note(self._action("D", chunk, layer))
            if TIERS[self._plan.mode(layer, chunk).tier].behind_host:
                self._log.note(self._action("S", chunk, layer))
        if left:
            self._log.note(self._action("O", chunk, layer, 0))

    def end_head(self) -> None:
        """A chunk's loss is done."""
        self._log.end()

    def prefetched(self, number: int) -> None:
        """The frame of this number (see `ChunkRunner._number`) is on its way back."""
        if self._plan.order == "by_chunk":
            chunk, layer = divmod(number, self._plan.num_layers)
        else:
            layer, chunk = divmod(number, self._plan.num_chunks + 1)
        if chunk == self._plan.num_chunks:
            self.kv_moved(layer, back=True)
        elif (chunk, layer) in self._away:
            if TIERS[self._plan.mode(layer, chunk).tier].behind_host:
                self._log.note(self._action("L", chunk, layer))
            self._log.note(self._action("H", chunk, layer))

    def kv_moved(self, layer: int, *, back: bool) -> None:
        """By layer: all keys and values of a layer are on their way."""
        copy = self._action("K" if back else "O", self._plan.num_chunks - 1, layer, 0)
        self._log.note(copy)

    def _enter_backward(self, chunk: int, layer: int) -> None:
        def ended() -> None:
            came, left = self._streamed()
            if came:
                self._log.note(self._action("K", chunk, layer, 1))
            self._log.end()
            if left:
                self._log.note(self._action("O", chunk, layer, 1))
            if chunk == 0 and self._weights is not None:
                # With the first layer's are those of what is outside of the layers.
                ends = (layer,) if layer else (layer, self._plan.num_layers)
                for sent in ends:
                    if sent in self._weights.layers_with_sent_gradients:
                        self._log.note(Action("G", 0, 0, sent))

        self._log.begin(self._action("B", chunk, layer), ended)

    def _streamed(self) -> tuple[bool, bool]:
        """Whether keys and values came, and whether they or their gradients left, since asked."""
        if self._mover is None:
            return False, False
        (came, left), self._moved = self._moved, (self._mover.fetches, self._mover.sends)
        return self._moved[0] > came, self._moved[1] > left

    def _action(self, kind: Kind, chunk: int, layer: int, part: int | None = None) -> Action:
        return Action(kind, 0, self._first_unit + chunk, layer, part)


class TraceFolder:
    """The files of this process in `trace_dir`: those of its last step."""

    def __init__(self, folder: str) -> None:
        """Make the folder, if it is not there.

        Raises:
            ConfigError: It cannot be made or written to.
        """
        self._folder = Path(folder)
        self._waiting: ActionLog | None = None
        self._last: ActionLog | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self._folder, os.W_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise ConfigError(
                f"trace_dir={folder!r} cannot be written: {error.strerror}. Allowed: a folder, or "
                "where one can be made. Remedy: name another one, or drop trace_dir."
            ) from error
        self.rank = int(os.environ.get("RANK", "0"))
        """Whose files they are: that of the launcher, among all processes."""

    def keep_log(self, log: ActionLog) -> None:
        """Write what a step did; its times follow with a later `poll` if the device is behind."""
        log.finish()
        self._last = log
        self._write_actions(log.actions)
        self._waiting = log
        self.poll()

    def begin_update(self) -> None:
        """The optimizer begins to update weights in host memory, after the step that was kept."""
        if self._last is not None:
            self._last.begin(Action("U", 0, 0))

    def end_update(self) -> None:
        """It has ended."""
        log, self._last = self._last, None
        if log is not None:
            self.keep_log(log)
            self._last = None  # the next update follows another step

    def poll(self) -> None:
        """Write times that have become known."""
        done = None if self._waiting is None else self._waiting.done()
        if done is not None:
            self._waiting = None
            self._write_times(done)

    def keep(self, done: Sequence[ActionRecord]) -> None:
        """Write what a step did and when."""
        self._write_actions([one.action for one in done])
        self._write_times(done)

    def _write_actions(self, actions: Sequence[Action]) -> None:
        text = "".join(f"{action}\n" for action in actions)
        (self._folder / f"rank{self.rank}.actions").write_text(text, encoding="utf-8")

    def _write_times(self, done: Sequence[ActionRecord]) -> None:
        path = self._folder / f"rank{self.rank}.trace.json"
        write_trace(rank_timeline(self.rank, done), path)
