"""Seconds of work on a device, and a place to run it where the caller's state does not reach.

Waits for the device on purpose; no part of a training step. Knows nothing of what it times.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Clock = Callable[[], float]

_T = TypeVar("_T")


def device_seconds(
    work: Callable[[], object],
    device: torch.device,
    *,
    calls: int = 1,
    clock: Clock = time.perf_counter,
) -> float:
    """Seconds that `calls` calls of `work` take together.

    Args:
        work: on CUDA, work on the current stream; timed between two events there.
        device: where it runs.
        calls: how often.
        clock: seconds that pass on the host; read for other devices than CUDA.
    """
    if device.type != "cuda":
        start_seconds = clock()
        for _ in range(calls):
            work()
        return clock() - start_seconds
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def run_apart(function: Callable[[], _T], device: torch.device) -> _T:
    """Run `function` as if nothing were going on around it, and return what it returns.

    A layer may be in the middle of its forward: with autocast, hooks on what autograd saves,
    dispatch modes, a stream of its own. All of these belong to a thread, so the function gets one
    of its own, without gradients and on the device's default stream. Random generators belong to
    the process: their state is put back. On CUDA the device's earlier work is waited for, and
    memory that was freed is given back to the driver.

    Raises:
        Exception: whatever `function` raises.
    """

    def alone() -> _T:
        with contextlib.ExitStack() as stack:
            if device.type == "cuda":
                stack.callback(torch.cuda.empty_cache)
                stack.enter_context(torch.cuda.device(device))
                torch.cuda.synchronize(device)
            devices = [device] if device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(devices=devices))
            stack.enter_context(torch.no_grad())
            return function()

    with ThreadPoolExecutor(1, thread_name_prefix="sppo-apart") as pool:
        return pool.submit(alone).result()
