"""Speeds of copies between device and host: each way alone, and both ways at once.

On CUDA from and into pinned memory, each way on a stream of its own. On a CPU these are plain
copies from memory to memory, the second way in a thread of its own. Knows nothing of profiles.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from sppo_hf.runtime.stopwatch import Stopwatch

# Copies per direction that run into each other, so that their beginning and end do not show.
_ROUNDS = 6
_REPEATS = 3


class CopySpeed(NamedTuple):
    """Bytes per second."""

    d2h: float
    h2d: float
    both_d2h: float
    both_h2d: float


def measure_copies(watch: Stopwatch, num_bytes: int) -> CopySpeed:
    """Time copies of `num_bytes` bytes.

    Args:
        watch: on the device to measure.
        num_bytes: of one copy; two times as many are taken on the device and on the host.

    Raises:
        RuntimeError: the host memory cannot be pinned (CUDA's own message).
    """
    pinned = watch.device.type == "cuda"
    # Filled, not merely allocated: pages that nobody has touched copy faster than any memory.
    host_in, host_out = (
        torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)
    )
    device_in, device_out = (
        torch.ones(num_bytes, dtype=torch.uint8, device=watch.device) for _ in range(2)
    )

    def d2h() -> None:
        host_out.copy_(device_out, non_blocking=True)

    def h2d() -> None:
        device_in.copy_(host_in, non_blocking=True)

    at_once = _on_two_streams if pinned else _in_two_threads
    both = [at_once(d2h, h2d) for _ in range(_REPEATS)]
    both_d2h, both_h2d = (statistics.median(seconds) for seconds in zip(*both, strict=True))
    return CopySpeed(
        d2h=num_bytes / watch.seconds(d2h),
        h2d=num_bytes / watch.seconds(h2d),
        both_d2h=num_bytes / both_d2h,
        both_h2d=num_bytes / both_h2d,
    )


def _on_two_streams(d2h: Callable[[], None], h2d: Callable[[], None]) -> tuple[float, float]:
    """Seconds of one copy each way while the other runs; both streams start together."""
    torch.cuda.synchronize()
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for copy, stream in ((d2h, torch.cuda.Stream()), (h2d, torch.cuda.Stream())):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            start.record()
            for _ in range(_ROUNDS):
                copy()
            end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    down, up = (start.elapsed_time(end) / 1e3 / _ROUNDS for start, end in events)
    return down, up


def _in_two_threads(d2h: Callable[[], None], h2d: Callable[[], None]) -> tuple[float, float]:
    """Seconds of one copy each way while the other runs; both threads start together."""
    ready = threading.Barrier(2)
    seconds: dict[Callable[[], None], float] = {}

    def run(copy: Callable[[], None]) -> None:
        ready.wait()
        start_seconds = time.perf_counter()
        for _ in range(_ROUNDS):
            copy()
        seconds[copy] = (time.perf_counter() - start_seconds) / _ROUNDS

    other = threading.Thread(target=run, args=(h2d,))
    other.start()
    run(d2h)
    other.join()
    return seconds[d2h], seconds[h2d]
