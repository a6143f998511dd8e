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

import torch

from sppo_hf.engine.chunk_timer import Mark, mark
from sppo_hf.errors import ConfigError
from sppo_hf.reporting.chrome_trace import write_trace
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.measured_timeline import ActionRecord, executed_timeline


class ActionLog:
    """The actions of one forward and its backward on one device, and when they ran.

    On CUDA times are those of the device, known once it has passed the last mark.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin with nothing."""
        self._device = device
        self._noted: list[tuple[Action, Mark, Mark]] = []
        self._open: tuple[Action, Mark] | None = None
        self._ended: Callable[[], None] | None = None
        self._begin = mark(device)

    def begin(self, action: Action, ended: Callable[[], None] | None = None) -> None:
        """Compute turns to an action; it is noted when it ends.

        Args:
            action: What begins.
            ended: Is called by `finish`, calls `end` and notes what else belongs to the action; for
                those whose end nobody sees.
        """
        self.finish()
        self._open = action, mark(self._device)
        self._ended = ended

    def end(self) -> None:
        """Note the action that began, if one did."""
        if self._open is not None:
            (action, begin), self._open = self._open, None
            self._noted.append((action, begin, mark(self._device)))

    def finish(self) -> None:
        """What began has ended, for something else begins or nothing comes any more."""
        if self._open is not None and self._ended is not None:
            self._ended()
        self.end()

    def note(self, action: Action) -> None:
        """Note an action beside compute, at the moment at which it is enqueued."""
        now = mark(self._device)
        self._noted.append((action, now, now))

    @property
    def actions(self) -> list[Action]:
        """What was noted, in order."""
        return [action for action, _, _ in self._noted]

    def done(self) -> list[ActionRecord] | None:
        """The same with seconds since the log began; None while the device is not there yet."""
        if not all(end.passed() for _, _, end in self._noted[-1:]):
            return None
        return [
            ActionRecord(action, start, self._begin.seconds_until(end), start)
            for action, begin, end in self._noted
            for start in (self._begin.seconds_until(begin),)
        ]


class TraceFolder:
    """The files of this process in `trace_dir`: those of its last step."""

    def __init__(self, folder: str) -> None:
        """Make the folder, if it is not there.

        Args:
            folder: Whose path the settings have.

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
        write_trace(executed_timeline(self.rank, done), path)
