"""Measuring a HardwareProfile on this machine: what is measured, how large, and in which order.

Takes under a minute on a CPU and under two on a GPU, because every measurement has a limit in
seconds of its own. This synchronises with the device; it is no part of a training step.
"""

from __future__ import annotations

import datetime
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.device_facts import (
    bound_to_device,
    device_facts,
    device_numa_node,
    device_versions,
)
from sppo_hf.errors import ConfigError
from sppo_hf.planning.hardware import Curve, HardwareProfile
from sppo_hf.planning.machine import free_disk_bytes, host_memory_bytes, lockable_bytes
from sppo_hf.profiling.calibrate import (
    AttentionSpeed,
    BenchTimer,
    CopySpeed,
    DiskSpeed,
    Heads,
    measure_attention,
    measure_copies,
    measure_disk,
    measure_host_update,
    measure_launch,
    measure_matmul,
    measure_memory,
)

Progress = Callable[[str, int, int], None]
"""Called with the next measurement's name, the number of those done, and of all."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the measured work is."""

    dtype_names: tuple[str, ...]
    """Dtypes measured unless others are asked for."""

    weights: tuple[tuple[int, int], ...]
    """(inputs, outputs) of the linear layers."""

    matmul_tokens: tuple[int, ...]
    """Rows of their inputs."""

    heads: Heads
    """Of attention."""

    attention_tokens: tuple[int, ...]
    """Of a chunk; its keys are five times as many."""

    memory_bytes: int
    """Read, and as many written, by elementwise work; far more than caches hold."""

    copy_bytes: int
    """Of one copy."""

    disk_bytes: int
    """Of the file."""

    budget_seconds: float
    """For one curve, see `BenchTimer.curve`."""

    most_seconds: float
    """For one point, see `BenchTimer`."""


SIZES: dict[str, Sizes] = {
    # Layers of an 8B model.
    "cuda": Sizes(
        dtype_names=("bfloat16", "float32"),
        weights=((4096, 4096), (4096, 14336)),
        matmul_tokens=(256, 512, 1024, 2048, 4096, 8192, 16384),
        heads=Heads(query=32, key_value=8, size=128),
        attention_tokens=(256, 512, 1024, 2048, 4096, 8192, 16384),
        memory_bytes=2**30,
        copy_bytes=2**28,
        disk_bytes=2**30,
        budget_seconds=5.0,
        most_seconds=1.0,
    ),
    # Layers of a model that someone might train on a CPU.
    "cpu": Sizes(
        dtype_names=("float32", "bfloat16"),
        weights=((576, 1536), (1024, 1024)),
        matmul_tokens=(64, 256, 1024, 4096),
        heads=Heads(query=9, key_value=3, size=64),
        attention_tokens=(64, 256, 1024, 4096),
        memory_bytes=2**27,
        copy_bytes=2**27,
        disk_bytes=2**30,
        budget_seconds=4.0,
        most_seconds=1.0,
    ),
}
"""By device type."""

QUICK = Sizes(
    dtype_names=("float32",),
    weights=((64, 96),),
    matmul_tokens=(32, 128),
    heads=Heads(query=2, key_value=1, size=32),
    attention_tokens=(32, 64),
    memory_bytes=2**22,
    copy_bytes=2**22,
    disk_bytes=2**26,
    budget_seconds=0.5,
    most_seconds=0.05,
)
"""A few seconds altogether, to see that everything runs; the figures mean little."""


def calibrate(
    device: torch.device,
    *,
    dtype_names: Sequence[str] = (),
    offload_dir: str | os.PathLike[str] | None = None,
    quick: bool = False,
    on_progress: Progress | None = None,
) -> HardwareProfile:
    """Measure `device`, its copies and, where a folder is given, a disk.

    The process runs next to the device meanwhile, see `bound_to_device`.

    Args:
        device: a CPU or CUDA device.
        dtype_names: dtypes to measure, such as "float16"; none takes the device type's usual ones.
        offload_dir: folder on the disk to measure; it is made where it does not exist.
        quick: measure small sizes only, in a few seconds. The figures mean little.
        on_progress: told of every measurement before it starts, and at the end.

    Raises:
        ConfigError: a device of another type or one that is absent, an unknown dtype, or a folder
            that cannot be written.
    """
    device = _checked_device(device)
    sizes = QUICK if quick else SIZES[device.type]
    dtypes = {name: _dtype(name) for name in dtype_names or sizes.dtype_names}
    with bound_to_device(device), _current(device), torch.no_grad():
        measured = _measure(device, sizes, dtypes, offload_dir, on_progress or _silent)
    facts = device_facts(device, SPPOConfig())
    backends = ", ".join(
        f"{speed.backend} for {name}" for name, speed in measured.attention.items()
    )
    small = ", with sizes too small to plan with" if quick else ""
    return HardwareProfile(
        name=facts.name,
        kind=facts.kind,
        estimated=False,
        source=f"measured on {datetime.date.today()}{small}; attention: {backends}",
        matmul_flops=measured.matmul,
        attention_forward_flops={n: speed.forward for n, speed in measured.attention.items()},
        attention_backward_flops={n: speed.backward for n, speed in measured.attention.items()},
        memory_bytes_per_second=measured.memory,
        launch_seconds=measured.launch_seconds,
        d2h_bytes_per_second=measured.copies.d2h,
        h2d_bytes_per_second=measured.copies.h2d,
        both_d2h_bytes_per_second=measured.copies.both_d2h,
        both_h2d_bytes_per_second=measured.copies.both_h2d,
        host_update_bytes_per_second=measured.host_update,
        disk_write_bytes_per_second=None if measured.disk is None else measured.disk.write,
        disk_read_bytes_per_second=None if measured.disk is None else measured.disk.read,
        device_bytes=facts.device_memory_bytes,
        host_bytes=host_memory_bytes(),
        pinned_bytes=_pinnable_bytes(device, pinned_so_far_bytes=2 * sizes.copy_bytes),
        disk_bytes=None if offload_dir is None else free_disk_bytes(offload_dir),
        offload_dir=None if offload_dir is None else os.path.abspath(offload_dir),
        numa_node=device_numa_node(device),
        versions=device_versions(device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Everything that took time; units as in `HardwareProfile`."""

    matmul: dict[str, Curve]
    attention: dict[str, AttentionSpeed]
    memory: float
    launch_seconds: float
    copies: CopySpeed
    host_update: float
    disk: DiskSpeed | None


def _measure(
    device: torch.device,
    sizes: Sizes,
    dtypes: Mapping[str, torch.dtype],
    offload_dir: str | os.PathLike[str] | None,
    on_progress: Progress,
) -> _Measured:
    """Run all measurements, one after another."""
    watch = BenchTimer(device, most_seconds=sizes.most_seconds)
    host = BenchTimer(torch.device("cpu"), most_seconds=sizes.most_seconds)
    total = 2 * len(dtypes) + 4 + (offload_dir is not None)
    done = 0

    def run(title: str, measure: Callable[[], _T]) -> _T:
        nonlocal done
        on_progress(title, done, total)
        result = measure()
        done += 1
        return result

    def matmul(dtype: torch.dtype) -> Curve:
        return measure_matmul(
            watch,
            dtype,
            weights=sizes.weights,
            tokens=sizes.matmul_tokens,
            budget_seconds=sizes.budget_seconds,
        )

    def attention(dtype: torch.dtype) -> AttentionSpeed:
        return measure_attention(
            watch,
            dtype,
            heads=sizes.heads,
            tokens=sizes.attention_tokens,
            budget_seconds=sizes.budget_seconds,
        )

    # The disk comes first, because a folder may be refused.
    disk = None
    if offload_dir is not None:
        disk = run("disk", partial(measure_disk, offload_dir, sizes.disk_bytes))
    measured = _Measured(
        disk=disk,
        matmul={
            name: run(f"matrix products, {name}", partial(matmul, dtype))
            for name, dtype in dtypes.items()
        },
        attention={
            name: run(f"attention, {name}", partial(attention, dtype))
            for name, dtype in dtypes.items()
        },
        memory=run("memory", partial(measure_memory, watch, sizes.memory_bytes)),
        launch_seconds=run("launches", partial(measure_launch, watch)),
        copies=run("copies", partial(measure_copies, watch, sizes.copy_bytes)),
        host_update=run(
            "update on the host", partial(measure_host_update, host, sizes.copy_bytes // 4)
        ),
    )
    on_progress("done", done, total)
    return measured


def _silent(title: str, done: int, total: int) -> None:
    """Nobody asked."""


def _checked_device(device: torch.device) -> torch.device:
    """The device with its number."""
    if device.type == "cpu":
        return torch.device("cpu")
    number = device.index or 0
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type != "cuda" or number >= present:
        there = ", ".join(["cpu", *(f"cuda:{index}" for index in range(present))])
        raise ConfigError(
            f"device={str(device)!r} cannot be calibrated. Allowed: {there}. Remedy: name one of "
            "these; a CUDA device needs a CUDA build of torch and must be visible."
        )
    return torch.device("cuda", number if device.index is not None else torch.cuda.current_device())


def _dtype(name: str) -> torch.dtype:
    """The torch dtype of a name."""
    allowed = ("bfloat16", "float16", "float32", "float64")
    if name not in allowed:
        nearest = difflib.get_close_matches(name, allowed, n=1, cutoff=0)[0]
        raise ConfigError(
            f"dtype={name!r} is not measured. Allowed: {', '.join(allowed)}. Remedy: use the "
            f"nearest, {nearest!r}."
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one, which events, streams and backends go by."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _pinnable_bytes(device: torch.device, *, pinned_so_far_bytes: int) -> int | None:
    """The limit on pinned memory that this process really has, or None.

    RLIMIT_MEMLOCK bounds `mlock`, but NVIDIA's driver pins without charging it, so a limit that
    the copies' buffers have just exceeded is none. A CPU pins nothing.
    """
    limit = lockable_bytes()
    if device.type != "cuda" or limit is None or pinned_so_far_bytes > limit:
        return None
    return limit
