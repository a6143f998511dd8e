"""A process that runs one job: `python -m sppo_hf.cli.benchmark.worker JOB`.

JOB is a `Job` in JSON. Every line on stdout is a row in JSON, the last one counts: earlier ones say
what was known when the process was killed. Whatever the libraries print goes to stderr. Running out
of memory is a row and exit status 0; any other error is a traceback and status 1.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers

import sppo_hf
from sppo_hf.cli.benchmark.job import Job
from sppo_hf.cli.benchmark.measure import Measurement
from sppo_hf.cli.benchmark.results import Row
from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.planning.machine import host_memory_bytes, nvidia_driver_version, processor_name

_PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "liger-kernel", "flash-attn")
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS")

_PR_SET_PDEATHSIG = 1
"""See prctl(2)."""

_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Returns what a reader must know to judge a number, in plain JSON types."""
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
    """Runs a job in this process.

    Args:
        job: what to measure.
        tell: takes rows; the last one is the result.

    Raises:
        ConfigError: a setting is wrong.
        Exception: whatever training raises that is not for want of memory.
    """
    device = torch.device(job.device)
    environment = describe_machine(device)
    measurement = Measurement(job)

    def tell_so_far() -> None:
        numbers = measurement.known()
        tell(Row(status="killed", job=job, numbers=numbers, environment=environment))

    try:
        numbers = measurement.run(tell_so_far)
    except (RuntimeError, MemoryError, BudgetError, OffloadError) as error:
        reason = memory_reason(error)
        if reason is None:
            raise
        tell(
            Row(
                status="out of memory",
                job=job,
                reason=reason,
                numbers=measurement.known(),
                environment=environment,
            )
        )
        return
    tell(Row(status="measured", job=job, numbers=numbers, environment=environment))


def memory_reason(error: BaseException) -> str | None:
    """Says which memory an error is about; None if it is about none.

    PyTorch raises `torch.OutOfMemoryError` for the device, but plain errors for host memory, for
    pinned memory, and for what CUDA's libraries want beside the allocator.
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
    if any(sign.lower() in str(error).lower() for sign in _SIGNS):
        return f"host or device: {first_line}"
    return None


def be_killed_first() -> None:
    """Asks Linux to end this process rather than the benchmark when the host's memory is gone."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        return


def end_with_parent() -> None:
    """Asks Linux to end this process when the benchmark's ends, however that ends.

    Else it would go on holding the device, and whatever is measured next would share it.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Runs the job of the command line."""
    end_with_parent()
    out = os.dup(1)
    os.dup2(2, 1)

    def tell(row: Row) -> None:
        os.write(out, (json.dumps(row.to_dict()) + "\n").encode())

    be_killed_first()
    transformers.logging.set_verbosity_error()
    fields: dict[str, Any] = json.loads(arguments[0])
    run_job(Job.from_dict(fields), tell)


if __name__ == "__main__":
    main(sys.argv[1:])
