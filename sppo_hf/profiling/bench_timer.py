"""Timing one piece of work on a device: warmed up, repeated, the median; and curves of rates.

Nothing of a training step goes through here, for it waits for the device. Knows nothing of what it
times.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable

import torch

from sppo_hf.attention.backends.autotune import device_seconds
from sppo_hf.planning.hardware import Curve

# So short that a clock or an event's own cost would show: shorter work is timed in groups.
_LEAST_SAMPLE_SECONDS = 3e-3
_MOST_CALLS = 200


class BenchTimer:
    """Measures seconds of work that is given as a function without arguments."""

    def __init__(
        self,
        device: torch.device,
        *,
        repeats: int = 5,
        most_seconds: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make one.

        Args:
            device: where the work runs; on CUDA its current stream is timed with events.
            repeats: samples that the median is taken of.
            most_seconds: no further sample is begun once this much time has gone into them.
            clock: seconds that pass on the host.
        """
        self.device = device
        self.clock = clock
        self._repeats = repeats
        self._most_seconds = most_seconds

    def seconds(self, work: Callable[[], object]) -> float:
        """Median seconds of one call of `work`, after calls that warm it up.

        The first call is never the measurement, however long it takes: it may build kernels, which
        takes up to a hundred times what they then do. Work whose second call takes more than a
        third of `most_seconds` is not repeated.
        """
        return self._timed(work)[0]

    def _timed(self, work: Callable[[], object]) -> tuple[float, float]:
        """Median seconds of a call, and the seconds of all calls but what the first one built."""
        first = self._sample(work, 1)
        single = self._sample(work, 1)
        # A kernel that plans (cuDNN) takes a second for each new size, before it does anything.
        spent = min(first, single) + single
        if 3 * single > self._most_seconds:
            return single, spent
        wanted = math.ceil(_LEAST_SAMPLE_SECONDS / max(single, 1e-9))
        calls = min(max(1, wanted), _MOST_CALLS)
        samples: list[float] = []
        while len(samples) < self._repeats:
            sample = self._sample(work, calls)
            samples.append(sample / calls)
            spent += sample
            if spent > self._most_seconds:
                break
        return statistics.median(samples), spent

    def curve(
        self,
        tokens: Iterable[int],
        work_of: Callable[[int], tuple[Callable[[], object], float]],
        *,
        budget_seconds: float,
    ) -> Curve:
        """Rates of work by tokens.

        Args:
            tokens: strictly increasing.
            work_of: makes the work for so many tokens, and says how much it is (FLOPs).
            budget_seconds: larger sizes are left out when two more calls, as long as the rate so
                far lets expect, would exceed this; the first is always measured. Building kernels
                does not count: the sizes that matter are the last.

        Returns:
            The curve up to the largest size that fits into time and memory.
        """
        spent = 0.0
        points: list[tuple[int, float]] = []
        for count in tokens:
            try:
                work, amount = work_of(count)
                if points and spent + 2 * amount / points[-1][1] > budget_seconds:
                    break
                seconds, took = self._timed(work)
                points.append((count, amount / seconds))
                spent += took
            except torch.OutOfMemoryError:
                if not points:
                    raise
                break
        return Curve(tuple(points))

    def _sample(self, work: Callable[[], object], calls: int) -> float:
        """Seconds that `calls` calls take together."""
        return device_seconds(work, self.device, calls=calls, clock=self.clock)
