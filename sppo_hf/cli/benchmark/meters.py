"""What is read off a training run: seconds per step and per chunk, losses, peaks, stalls.

Knows nothing of contenders. A step is waited for at its beginning and at its end; within a step
nothing waits for the device.
"""

from __future__ import annotations

import re
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from sppo_hf.model.observer import Direction, StepObserver, StepRecord
from sppo_hf.model.stopwatch import Stopwatch

if TYPE_CHECKING:
    from sppo_hf.planning.measured import MeasuredStep
    from sppo_hf.planning.plan import Plan


class StepClock(TrainerCallback):
    """Seconds and loss of every optimizer step."""

    def __init__(self, device: torch.device) -> None:
        """Start with no steps.

        Args:
            device: is waited for at the ends of a step.
        """
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.on_step: Callable[[], None] = lambda: None
        self._device = device
        self._began = 0.0
        self._loss: Tensor | None = None

    def listen(self, model: nn.Module) -> None:
        """Reads losses off what `model` returns; the Trainer's own are means over steps."""

        def keep(_module: nn.Module, _args: object, output: Any) -> None:
            self._loss = output["loss"].detach()

        model.register_forward_hook(keep)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Starts the clock."""
        self._wait()
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stops it."""
        self._wait()
        self.seconds.append(time.perf_counter() - self._began)
        self.losses.append(float("nan") if self._loss is None else self._loss.item())
        self.on_step()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class UnitClock(StepObserver):
    """Seconds per chunk, forward and backward, of every step of ours, and the plan's words."""

    def __init__(self, device: torch.device) -> None:
        """Start with no steps.

        Args:
            device: its kind decides between events and the host's clock.
        """
        self.plan: Plan | None = None
        self.records: list[StepRecord] = []
        self._kind = device.type
        self._steps: list[Stopwatch] = []
        self._running = False
        self._stall_seconds: list[float] = []
        self._stalled = 0.0

    def on_plan(self, plan: Plan, model_name: str) -> None:
        """Keeps the plan."""
        self.plan = plan

    def on_correction(self, before: Plan, after: Plan, measured: MeasuredStep) -> None:
        """Keeps the plan from now on."""
        self.plan = after

    def on_unit(self, direction: Direction, chunk: int, num_chunks: int) -> None:
        """Marks the beginning of a unit."""
        if not self._running:
            self._steps.append(Stopwatch(self._kind))
            self._running = True
        self._steps[-1].enter(direction, chunk)

    def on_record(self, record: StepRecord) -> None:
        """Marks the end of the last unit."""
        if self._running:
            self._steps[-1].enter("end")
        self._running = False
        self.records.append(record)

    def chunk_seconds(self, direction: Direction, steps: slice) -> tuple[float, ...]:
        """Returns the median per chunk over these steps; () where none of them has ended."""
        done = self._steps[: len(self.records)][steps]
        if not done or self.plan is None:
            return ()
        seconds = [step.seconds(direction, self.plan.num_chunks) for step in done]
        return tuple(statistics.median(of_chunk) for of_chunk in zip(*seconds, strict=True))

    def step_ended(self, stall_seconds: float) -> None:
        """Keeps how long compute stood still in the step that the device has just ended.

        Records do not say it: they are made when the host is done, which is ahead of the device.

        Args:
            stall_seconds: of all steps so far.
        """
        self._stall_seconds.append(stall_seconds - self._stalled)
        self._stalled = stall_seconds

    def stall_seconds(self, steps: slice) -> float | None:
        """Returns the mean per step over these steps; None where none of them has ended."""
        stalls = self._stall_seconds[steps]
        return statistics.fmean(stalls) if stalls else None


def host_bytes() -> int:
    """Returns the resident memory of this process now."""
    return psutil.Process().memory_info().rss


def host_peak_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Returns the largest resident memory since the process began or since `forget_peaks`.

    Args:
        status: of this process, where Linux keeps it; elsewhere the peak is never forgotten.
    """
    # What getrusage says begins with the resident memory of the process that started this one.
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peaks(device: torch.device) -> None:
    """Starts all peaks afresh; the host's only where Linux allows it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what making the weights took is no part of training
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_peak_host_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def memory_numbers(device: torch.device) -> dict[str, Any]:
    """Returns the peaks since `forget_peaks`, under the names that `Numbers` has for them."""
    numbers: dict[str, Any] = {"host_peak_bytes": host_peak_bytes()}
    if device.type == "cuda":
        stats: dict[str, Any] = torch.cuda.memory_stats(device)
        pinned: dict[str, Any] = torch.cuda.host_memory_stats()
        numbers |= {
            "device_allocated_bytes": torch.cuda.max_memory_allocated(device),
            "device_reserved_bytes": torch.cuda.max_memory_reserved(device),
            "device_retries": int(stats.get("num_alloc_retries", 0)),
            "pinned_bytes": int(pinned.get("allocated_bytes.peak", 0)),
        }
    return numbers
