"""A process that runs one job: `python -m sppo_hf.cli.benchmark.worker PARENT`.

PARENT is the number of the benchmark's process. The worker imports what any job needs, without the
device, and then reads a `Job` as JSON from stdin. Each line on stdout is a row as JSON, of which
the last counts; earlier ones hold what is known if the process is killed. What libraries print goes
to stderr. Running out of memory gives a row and exit status 0, any other error a traceback and
status 1.

The device is waited for at the beginning and the end of a step, and nowhere within it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import platform
import re
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import transformers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback

import sppo_hf
from sppo_hf.cli.benchmark import training
from sppo_hf.cli.benchmark.contenders import TODAY, parse
from sppo_hf.cli.benchmark.driver import model_shape
from sppo_hf.cli.benchmark.results import Job, Numbers, Row, Status
from sppo_hf.cli.benchmark.trace_summary import STEP_LABEL
from sppo_hf.cli.benchmark.training import choose_kernel
from sppo_hf.config import SPPOConfig, parse_bytes
from sppo_hf.engine.convert import get_engine
from sppo_hf.engine.device_facts import device_facts
from sppo_hf.engine.step_observer import ChunkTimer, Direction, StepObserver, StepRecord
from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.host_memory import locked_bytes
from sppo_hf.planning.feasibility import assess_request
from sppo_hf.planning.machine import host_memory_bytes, nvidia_driver_version, processor_name
from sppo_hf.planning.model_shape import ModelShape, step_flops
from sppo_hf.planning.plan import PlanRequest

if TYPE_CHECKING:
    from sppo_hf.planning.plan import Plan
    from sppo_hf.planning.prediction import MeasuredStep


class StepClock(TrainerCallback):
    """Measures seconds and loss of every optimizer step, and waits for the device at both ends."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.peaks: list[tuple[int, int]] = []
        """Peaks of each step on CUDA: bytes of tensors, and bytes that their allocator reserves."""
        self.on_step: Callable[[], None] = lambda: None
        self._device = device
        self._start_seconds = 0.0
        self._loss: Tensor | None = None

    def listen(self, model: nn.Module) -> None:
        """Read losses off the outputs of `model`; those of the Trainer are means over steps."""

        def keep(_module: nn.Module, _args: object, output: Any) -> None:
            self._loss = output["loss"].detach()

        model.register_forward_hook(keep)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._wait()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._start_seconds = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock."""
        self._wait()
        self.seconds.append(time.perf_counter() - self._start_seconds)
        self.losses.append(float("nan") if self._loss is None else self._loss.item())
        if self._device.type == "cuda":
            self.peaks.append(_device_peaks(self._device))
        self.on_step()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class UnitClock(StepObserver):
    """Collects plan, seconds of each chunk, records and stalls of a model converted by sppo."""

    def __init__(self, device: torch.device) -> None:
        self.plan: Plan | None = None
        self.records: list[StepRecord] = []
        self._kind = device.type
        self._steps: list[ChunkTimer] = []
        self._running = False
        self._stall_seconds: list[float] = []
        self._stalled = 0.0

    def on_plan(self, plan: Plan, model_name: str) -> None:
        """Keep the plan."""
        self.plan = plan

    def on_correction(self, before: Plan, after: Plan, measured: MeasuredStep) -> None:
        """Keep the corrected plan."""
        self.plan = after

    def on_unit(self, direction: Direction, chunk: int, num_chunks: int) -> None:
        """Mark the beginning of a unit."""
        if not self._running:
            self._steps.append(ChunkTimer(self._kind))
            self._running = True
        self._steps[-1].enter(direction, chunk)

    def on_record(self, record: StepRecord) -> None:
        """Mark the end of the last unit."""
        if self._running:
            self._steps[-1].enter("end")
        self._running = False
        self.records.append(record)

    def chunk_seconds(self, direction: Direction, steps: slice) -> tuple[float, ...]:
        """Return the median seconds per chunk over these steps; () if none of them has ended."""
        done = self._steps[: len(self.records)][steps]
        if not done or self.plan is None:
            return ()
        seconds = [step.seconds(direction, self.plan.num_chunks) for step in done]
        return tuple(statistics.median(of_chunk) for of_chunk in zip(*seconds, strict=True))

    def step_ended(self, stall_seconds: float) -> None:
        """Keep how long compute waited for copies in the step that the device has just ended.

        Records cannot have this, because they are made when the host is done, before the device is.

        Args:
            stall_seconds: Total of all steps so far.
        """
        self._stall_seconds.append(stall_seconds - self._stalled)
        self._stalled = stall_seconds

    def stall_seconds(self, steps: slice) -> float | None:
        """Return the mean per step over these steps; None if none of them has ended."""
        stalls = self._stall_seconds[steps]
        return statistics.fmean(stalls) if stalls else None


def host_peak_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Return the peak resident memory since the process began or since `reset_peaks`.

    Args:
        status: This process's status file on Linux; without it the peak cannot be reset.
    """
    # getrusage starts from the peak of the parent process, so it is only the second choice.
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peaks(device: torch.device) -> None:
    """Reset all peaks, that of host memory only where Linux allows it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # making the weights is no part of training
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_peak_host_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _device_peaks(device: torch.device) -> tuple[int, int]:
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def memory_numbers(device: torch.device, steps: Sequence[tuple[int, int]] = ()) -> dict[str, Any]:
    """Return the peaks since `reset_peaks`, as fields of `Numbers`.

    `steps` are the device's in steps that have begun, when PyTorch forgot earlier ones.
    """
    # Resident memory includes what the offload engine pins, but not what PyTorch pins.
    numbers: dict[str, Any] = {"host_peak_bytes": host_peak_bytes() - locked_bytes()}
    if device.type == "cuda":
        stats: dict[str, Any] = torch.cuda.memory_stats(device)
        pinned: dict[str, Any] = torch.cuda.host_memory_stats()
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        outside_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
        allocated_bytes, reserved_bytes = map(max, zip(*steps, _device_peaks(device), strict=True))
        numbers |= {
            "device_allocated_bytes": allocated_bytes,
            "device_step_bytes": tuple(step[0] for step in steps),
            "device_outside_bytes": outside_bytes,
            "device_reserved_bytes": reserved_bytes,
            "device_retries": int(stats.get("num_alloc_retries", 0)),
            "pinned_bytes": int(pinned.get("allocated_bytes.peak", 0)) + locked_bytes(),
        }
    return numbers


class Measurement:
    """Builds and trains the contender of a job, and knows its numbers at any time."""

    def __init__(self, job: Job) -> None:
        """Read the job; builds no model and does not touch the device.

        Raises:
            ConfigError: The contender is unknown, or the model's configuration cannot be read.
        """
        self._job = job
        self._contender = parse(job.contender)
        self._config = training.model_config(job)
        self._shape = model_shape(job, self._config)
        self._device = torch.device(job.device)
        self._steps = StepClock(self._device)
        self._units = UnitClock(self._device)
        self._loaded_bytes: int | None = None
        self._kernel: str | None = None
        self._longest: int | None = None

    def run(self, on_step: Callable[[], None] = lambda: None) -> Numbers:
        """Train, and return all numbers.

        Args:
            on_step: Called when the weights are made, and after every step.

        Raises:
            Exception: Whatever building and training raise; `known` has the numbers until then.
        """
        job = self._job
        _limit_memory(job, self._device)
        dtype = torch.bfloat16 if job.autocast else getattr(torch, job.dtype)
        softcap = getattr(self._config, "attn_logit_softcapping", None) is not None
        choice = "sdpa" if self._contender.base == TODAY else job.attention
        kernel = choose_kernel(choice, self._device, self._shape, dtype, softcap=softcap)
        self._kernel = kernel.name
        model = training.build_model(job, self._config, kernel)
        plugin = training.make_plugin(job, self._contender, kernel)
        if plugin is not None:
            plugin.observer.subscribe(self._units)
        self._steps.listen(model)

        def step_ended() -> None:
            engine = get_engine(model) if plugin is not None else None
            if engine is not None:
                self._units.step_ended(engine.offload.stats().stall_seconds)
            on_step()

        self._steps.on_step = step_ended
        reset_peaks(self._device)
        self._loaded_bytes = psutil.Process().memory_info().rss
        on_step()
        trace = _Trace(job, self._device)
        with tempfile.TemporaryDirectory() as folder, kernel.in_use():
            trainer = training.make_trainer(
                job,
                model,
                kernel,
                self._shape,
                contender=self._contender,
                plugin=plugin,
                num_steps=job.warm_up + job.steps + trace.steps,
                # The trace's clock is inside the step's: opening a profiler is not the step.
                callbacks=[trace, self._steps] if trace.steps else [self._steps],
                folder=folder,
            )
            trainer.train()
        if job.predict and plugin is not None:
            self._longest = _predict_longest(self._shape, plugin.config, job, self._device)
        return self.known()

    def known(self) -> Numbers:
        """Return what is known so far."""
        job = self._job
        steps = slice(job.warm_up, job.warm_up + job.steps)  # a traced step comes after them
        measured = self._steps.seconds[steps]
        losses = self._steps.losses
        numbers = Numbers(
            step_seconds=tuple(measured),
            warm_up_seconds=tuple(self._steps.seconds[: job.warm_up]),
            model_flops=float(step_flops(self._shape, 1, job.total_tokens)),
            host_loaded_bytes=self._loaded_bytes,
            first_loss=losses[0] if losses else None,
            loss=losses[job.warm_up + len(measured) - 1] if measured else None,
            kernel=self._kernel,
            planned_longest_tokens=self._longest,
            **(
                {}
                if self._loaded_bytes is None
                else memory_numbers(self._device, self._steps.peaks)
            ),
        )
        if measured:
            is_cuda = self._device.type == "cuda"
            numbers = numbers.with_speed(
                statistics.median(measured),
                job.total_tokens,
                torch.cuda.get_device_name(self._device) if is_cuda else None,
            )
        if self._units.plan is not None:
            numbers = dataclasses.replace(numbers, **self._plan_numbers(steps, numbers))
        return numbers

    def _plan_numbers(self, steps: slice, numbers: Numbers) -> dict[str, Any]:
        plan = self._units.plan
        assert plan is not None, "ours has a plan once it has run"
        prediction = plan.prediction
        found: dict[str, Any] = {
            "chunk_lengths": tuple(plan.chunk_lengths),
            "planned_seconds": None if prediction is None else prediction.step_seconds,
            "planned_device_bytes": plan.estimate.device.total,
            "planned_device_causes": {
                cause.value: num_bytes for cause, num_bytes in plan.estimate.device.shown()
            },
            "planned_host_bytes": plan.estimate.host.total,
            "correction": None if plan.cost is None else dataclasses.asdict(plan.cost.correction),
        }
        if self._units.records:
            pinned = self._units.records[-1].offload.pinned_bytes
            found["pinned_bytes"] = max(pinned, numbers.pinned_bytes or 0)
        if numbers.step_seconds:
            found |= {
                "stall_seconds": self._units.stall_seconds(steps),
                "forward_chunk_seconds": self._units.chunk_seconds("forward", steps),
                "backward_chunk_seconds": self._units.chunk_seconds("backward", steps),
            }
        return found


_MOST_MEMORY_EVENTS = 500_000


class _Trace(TrainerCallback):
    """Profiles one step after the measured ones, if the job has a file for the trace.

    On CUDA the allocations of one more step go to a file beside it, for pytorch.org/memory_viz.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.steps = 0 if job.trace is None else 1 + self._cuda
        self._path = job.trace
        self._last = job.warm_up + job.steps
        self._open = contextlib.ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Open the profiler before the traced step."""
        if self._path is None:
            return
        if state.global_step == self._last:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
            self._profiler = self._open.enter_context(profile(activities=activities))
            self._open.enter_context(record_function(STEP_LABEL))
        elif state.global_step == self._last + 1 and self._cuda:
            torch.cuda.memory._record_memory_history(
                stacks="python", max_entries=_MOST_MEMORY_EVENTS
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the trace after it."""
        if self._path is None:
            return
        if state.global_step == self._last + 1:
            if self._cuda:
                torch.cuda.synchronize()
            self._open.close()
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(self._path)
        elif state.global_step == self._last + 2 and self._cuda:
            name = Path(self._path).name.removesuffix(".json.gz").replace("trace", "memory", 1)
            file = Path(self._path).with_name(f"{name}.pickle")
            torch.cuda.memory._dump_snapshot(str(file))
            torch.cuda.memory._record_memory_history(enabled=None)


def _limit_memory(job: Job, device: torch.device) -> None:
    """Limit the device memory of every contender to sppo's budget."""
    if job.device_memory is None or device.type != "cuda":
        return
    _, total_bytes = torch.cuda.mem_get_info(device)
    budget = parse_bytes(job.device_memory, field="--device-memory", total_bytes=total_bytes)
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total_bytes))


def _predict_longest(
    shape: ModelShape, config: SPPOConfig, job: Job, device: torch.device
) -> int | None:
    """Predict the longest row that fits this device; None where no speed is known."""
    facts = device_facts(device, config)
    if facts.profile is None:
        return None
    request = PlanRequest(
        shape=shape,
        config=config,
        device=facts,
        # A short length, because the answer is never below the one that is asked about.
        total_tokens=min(4096, job.total_tokens),
        dtype_name="bfloat16" if job.autocast else job.dtype,
    )
    return assess_request(request).max_seq_len


_PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "liger-kernel", "flash-attn")
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS")

_PR_SET_PDEATHSIG = 1
"""Constant of prctl(2): a signal for when the parent ends."""

_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the machine, versions and variables that numbers depend on, as plain JSON types."""
    versions = {"python": platform.python_version(), "sppo-hf": sppo_hf.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    found: dict[str, Any] = {
        "device_name": processor_name(),
        "device_memory_bytes": None,
        "host_memory_bytes": host_memory_bytes(),
        "host_threads": torch.get_num_threads(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device_name": properties.name,
            "device_memory_bytes": properties.total_memory,
            "processor": processor_name(),
        }
        versions |= {"cuda": torch.version.cuda or "unknown", "driver": nvidia_driver_version()}
    return {**found, "versions": versions}


def run_job(job: Job, tell: Callable[[Row], None]) -> None:
    """Run a job in this process.

    Args:
        job: The job.
        tell: Called with the row of what is known after every step, and with the final one.

    Raises:
        Exception: Whatever training raises, except running out of memory.
    """
    device = torch.device(job.device)
    environment = describe_machine(device)
    measurement = Measurement(job)

    def tell_known(status: Status, reason: str = "", numbers: Numbers | None = None) -> None:
        numbers = measurement.known() if numbers is None else numbers
        tell(Row(status=status, job=job, reason=reason, numbers=numbers, environment=environment))

    try:
        # The row counts if the process is killed before it writes the next one.
        numbers = measurement.run(partial(tell_known, "killed"))
    except (RuntimeError, MemoryError, BudgetError, OffloadError) as error:
        reason = out_of_memory_reason(error)
        if reason is None:
            raise
        tell_known("out of memory", reason)
        return
    tell_known("measured", numbers=numbers)


def out_of_memory_reason(error: BaseException) -> str | None:
    """Return which memory ran out and the error's first line; None for other errors.

    PyTorch raises `torch.OutOfMemoryError` for the device, but plain RuntimeErrors for host memory,
    for pinned memory, and for what CUDA's libraries allocate themselves.
    """
    first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
    if isinstance(error, torch.OutOfMemoryError):
        return f"device: {first_line}"
    if isinstance(error, MemoryError):
        return f"host: {first_line}"
    if isinstance(error, BudgetError):
        return f"refused before the first step: {first_line}"
    if isinstance(error, OffloadError):
        return f"pinned host memory: {first_line}"
    if any(sign.lower() in str(error).lower() for sign in _OUT_OF_MEMORY_TEXTS):
        return f"host or device: {first_line}"
    return None


def prefer_oom_kill() -> None:
    """Ask Linux to kill this process rather than the benchmark when host memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def end_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when the benchmark's process ends, however that ends.

    Otherwise it would keep the device, which the next measurement would have to share. `parent` is
    the number of that process, which may have ended before this call.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Run the job that is read from stdin; none is there if the benchmark has ended."""
    end_with_parent(int(arguments[0]))
    prefer_oom_kill()
    text = sys.stdin.read()
    if not text:
        return
    out = os.dup(1)
    os.dup2(2, 1)

    def tell(row: Row) -> None:
        os.write(out, (json.dumps(row.to_dict()) + "\n").encode())

    transformers.logging.set_verbosity_error()
    run_job(Job.from_dict(json.loads(text)), tell)


if __name__ == "__main__":
    main(sys.argv[1:])
