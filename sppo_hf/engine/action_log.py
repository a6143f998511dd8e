"""The actions that a step executed, logged while it runs and written to `trace_dir`.

On one device actions are those of single layers; in a pipeline the executor logs whole units
(`sppo_hf.pipeline.executor`). Both are written by `TraceFolder` to two files for each rank.

[Note: order of logged actions] An action is logged when the host has enqueued it. The backward of a
layer begins when the gradient of its output arrives; prefetches started at that moment come before
it. K/V copies within a layer's attention are logged once for each layer, beside its forward or
backward. A store's threads work as early as they can, so S and L are logged together with the D
and H that they belong to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from sppo_hf.attention.kv_cache import KVStream
from sppo_hf.engine.kv_offload import EngineTransfer
from sppo_hf.engine.step_observer import Mark
from sppo_hf.errors import ConfigError
from sppo_hf.offload.layer_offload import PrefetchGroup
from sppo_hf.offload.weights import HostWeights
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.tiers import TIERS, Tier
from sppo_hf.reporting.chrome_trace import write_trace
from sppo_hf.schedule.actions import Action, Kind
from sppo_hf.schedule.measured_timeline import ActionRecord, rank_timeline


class ActionLog:
    """The actions of one forward and its backward on one device, and when they ran.

    On CUDA times are those of the device, known once it has passed the last mark.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._entries: list[tuple[Action, Mark, Mark, Tier]] = []
        self._open: tuple[Action, Mark] | None = None
        self._on_end: Callable[[], None] | None = None
        self._begin = Mark(device)

    def begin(self, action: Action, on_end: Callable[[], None] | None = None) -> None:
        """Begin an action of the compute stream, which is logged when it ends.

        `on_end` is for actions that end when the next one begins: `finish` calls it, and it calls
        `end` and logs what else belongs to the action.
        """
        self.finish()
        self._open = action, Mark(self._device)
        self._on_end = on_end

    def end(self) -> None:
        """Log the open action, if there is one."""
        if self._open is not None:
            (action, begin), self._open = self._open, None
            self._entries.append((action, begin, Mark(self._device), ""))

    def finish(self) -> None:
        """End the open action, because another one begins or the step is over."""
        if self._open is not None and self._on_end is not None:
            self._on_end()
        self.end()

    def note(self, action: Action, tier: Tier = "") -> None:
        """Log an action of another stream at the moment at which it is enqueued."""
        now = Mark(self._device)
        self._entries.append((action, now, now, tier))

    @property
    def actions(self) -> list[Action]:
        """All logged actions, in order."""
        return [action for action, *_ in self._entries]

    def records(self) -> list[ActionRecord] | None:
        """All actions with seconds since the log began; None until the device has finished them."""
        if not all(end.is_reached() for _, _, end, _ in self._entries[-1:]):
            return None
        return [
            ActionRecord(action, start, self._begin.seconds_until(end), start, tier)
            for action, begin, end, tier in self._entries
            for start in (self._begin.seconds_until(begin),)
        ]


class LayerLog:
    """Logs what the layers of one chunk runner do; see [Note: order of logged actions].

    Layers count from the runner's first one; norm and head count as one more layer at the end.
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
        self._num_copies = (0, 0)
        """K/V copies so far: to the device, and to the host."""
        self._offloaded: set[tuple[int, int]] = set()
        """(chunk, layer) of activations that were offloaded."""
        self._last_chunk = 0

    def begin_layer(self, chunk: int, layer: int, hidden: Tensor) -> None:
        """Log the beginning of a layer's forward; `hidden` is its input."""
        self._last_chunk = max(self._last_chunk, chunk)
        following = self._after_backward(chunk, layer)
        if following is not None and hidden.requires_grad:
            # When the gradient of its input arrives, the next layer's backward begins.
            hidden.register_hook(lambda _grad: self._enter_backward(*following))
        if self._plan.order == "by_chunk" or layer < self._plan.num_layers:
            self._log.begin(self._action("F", chunk, layer))

    def begin_head(self, chunk: int) -> None:
        """Log the beginning of norm and head, in runs layer by layer."""
        self._log.begin(self._action("F", chunk, self._plan.num_layers))

    def _after_backward(self, chunk: int, layer: int) -> tuple[int, int] | None:
        """(chunk, layer) whose backward follows this one's; None if no layer's does."""
        if self._plan.order == "by_layer" and chunk > 0:
            return None if layer == self._plan.num_layers else (chunk - 1, layer)
        if layer == 0:
            return None
        return (self._last_chunk if self._plan.order == "by_layer" else chunk), layer - 1

    def end_layer(self, chunk: int, layer: int, group: PrefetchGroup | None) -> None:
        """Log the end of a layer's forward, with its offloads."""
        loaded, sent = self._kv_copied()
        if loaded:
            self._log.note(self._action("K", chunk, layer, 0))
        self._log.end()
        if group is not None and any(handle.is_offloaded for handle in group.handles()):
            self._offloaded.add((chunk, layer))
            self._log.note(self._action("D", chunk, layer))
            if TIERS[tier := self._plan.mode(layer, chunk).tier].behind_host:
                self._log.note(self._action("S", chunk, layer), tier)
        if sent:
            self._log.note(self._action("O", chunk, layer, 0))

    def end_head(self) -> None:
        """Log the end of a chunk's loss."""
        self._log.end()

    def prefetched(self, number: int) -> None:
        """Log a prefetch; `number` is that of the activations (see `ChunkRunner._number`)."""
        if self._plan.order == "by_chunk":
            chunk, layer = divmod(number, self._plan.num_layers)
        else:
            layer, chunk = divmod(number, self._plan.num_chunks + 1)
        if chunk == self._plan.num_chunks:
            self.kv_moved(layer, back=True)
        elif (chunk, layer) in self._offloaded:
            if TIERS[tier := self._plan.mode(layer, chunk).tier].behind_host:
                self._log.note(self._action("L", chunk, layer), tier)
            self._log.note(self._action("H", chunk, layer))

    def kv_moved(self, layer: int, *, back: bool) -> None:
        """Log that the K/V of all chunks of a layer are copied, in runs layer by layer."""
        self._log.note(self._action("K" if back else "O", self._plan.num_chunks - 1, layer, 0))

    def _enter_backward(self, chunk: int, layer: int) -> None:
        def on_end() -> None:
            loaded, sent = self._kv_copied()
            if loaded:
                self._log.note(self._action("K", chunk, layer, 1))
            self._log.end()
            if sent:
                self._log.note(self._action("O", chunk, layer, 1))
            if chunk == 0 and self._weights is not None:
                # Gradients outside of the layers are copied with those of the first layer.
                for index in (layer,) if layer else (layer, self._plan.num_layers):
                    if index in self._weights.layers_with_sent_gradients:
                        self._log.note(Action("G", 0, 0, index))

        self._log.begin(self._action("B", chunk, layer), on_end)

    def _kv_copied(self) -> tuple[bool, bool]:
        """Whether K/V or their gradients were copied, to the device and to the host.

        Counted since the last call.
        """
        if self._mover is None:
            return False, False
        before, self._num_copies = self._num_copies, (self._mover.fetches, self._mover.sends)
        return self._num_copies[0] > before[0], self._num_copies[1] > before[1]

    def _action(self, kind: Kind, chunk: int, layer: int, part: int | None = None) -> Action:
        return Action(kind, 0, self._first_unit + chunk, layer, part)


class TraceFolder:
    """Writes the actions and times of this process's last step to `trace_dir`."""

    def __init__(self, folder: str) -> None:
        """Create the folder, if it does not exist.

        Raises:
            ConfigError: The folder cannot be created or written to.
        """
        self._folder = Path(folder)
        self._pending: ActionLog | None = None
        """The log whose times are not written yet."""
        self._last: ActionLog | None = None
        """The log of the last step, to which the optimizer's update belongs."""
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
        """The launcher's rank of this process, which names the files."""

    def keep_log(self, log: ActionLog) -> None:
        """Write a step's actions; a later `poll` writes their times if the device is behind."""
        log.finish()
        self._last = log
        self._write_actions(log.actions)
        self._pending = log
        self.poll()

    def begin_update(self) -> None:
        """Log the beginning of an update of host-resident weights, after the step just kept."""
        if self._last is not None:
            self._last.begin(Action("U", 0, 0))

    def end_update(self) -> None:
        """Log the end of the update."""
        log, self._last = self._last, None
        if log is not None:
            self.keep_log(log)
            self._last = None

    def poll(self) -> None:
        """Write the pending times, if the device has finished the step."""
        records = None if self._pending is None else self._pending.records()
        if records is not None:
            self._pending = None
            self._write_times(records)

    def keep(self, records: Sequence[ActionRecord]) -> None:
        """Write a step's actions and times."""
        self._write_actions([record.action for record in records])
        self._write_times(records)

    def _write_actions(self, actions: Sequence[Action]) -> None:
        text = "".join(f"{action}\n" for action in actions)
        (self._folder / f"rank{self.rank}.actions").write_text(text, encoding="utf-8")

    def _write_times(self, records: Sequence[ActionRecord]) -> None:
        path = self._folder / f"rank{self.rank}.trace.json"
        write_trace(rank_timeline(self.rank, records), path)
