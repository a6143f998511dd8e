"""Marks between chunks, and the seconds between them, without waiting for the device.

On a CPU a mark is a clock reading. On CUDA it is an event, whose time is known only once the device
has passed it; until then the stopwatch says so, and the engine asks again at its next call. Knows
nothing of plans.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

Phase = Literal["forward", "backward", "end"]


class Mark(Protocol):
    """A point in the work."""

    def passed(self) -> bool:
        """Whether the work has come to this point; never waits."""
        ...

    def seconds_until(self, later: Mark) -> float:
        """Seconds from here to a later mark of the same kind; both passed."""
        ...


class ClockMark:
    """A reading of the host's clock."""

    def __init__(self) -> None:
        self.at_seconds = time.perf_counter()

    def passed(self) -> bool:
        """Return True: the host runs no work ahead of itself."""
        return True

    def seconds_until(self, later: Mark) -> float:
        """Seconds between two readings."""
        assert isinstance(later, ClockMark), "marks of one stopwatch are of one kind"
        return later.at_seconds - self.at_seconds


class CudaMark:
    """An event in the current CUDA stream of a device, which need not be the current device."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        # Autograd's thread has the model's device as its current one, others have what is set.
        self.event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        """Whether the device has passed the event."""
        return self.event.query()

    def seconds_until(self, later: Mark) -> float:
        """Seconds of device time between two passed events."""
        assert isinstance(later, CudaMark), "marks of one stopwatch are of one kind"
        return self.event.elapsed_time(later.event) / 1e3


def mark(device: torch.device | str) -> Mark:
    """The point in a device's work at which the host is now."""
    device = torch.device(device)
    return CudaMark(device) if device.type == "cuda" else ClockMark()


@dataclass(slots=True)
class ChunkTimer:
    """The marks of one forward call and its backward."""

    device: torch.device | str
    """Where the work runs; without an index, on the current device of that kind."""

    _marks: list[tuple[Phase, int, Mark]] = field(default_factory=list)

    def enter(self, phase: Phase, chunk: int = 0) -> None:
        """Mark that a chunk begins, or that a phase ends."""
        self._marks.append((phase, chunk, mark(self.device)))

    def ready(self) -> bool:
        """Whether all marks have been passed."""
        return not self._marks or self._marks[-1][2].passed()

    def seconds(self, phase: Phase, num_chunks: int) -> tuple[float, ...]:
        """Seconds per chunk in a phase; chunks that several groups of rows went through add up.

        By layer, units count on through the layers, and a chunk's of all layers add up.
        """
        assert self.ready(), "seconds are known once the work is done"
        sums = [0.0] * num_chunks
        for (name, chunk, begin), (_, _, later) in zip(self._marks, self._marks[1:], strict=False):
            if name == phase:
                sums[chunk % num_chunks] += begin.seconds_until(later)
        return tuple(sums)
