"""Measuring how fast this machine computes, copies, and reads and writes its disk.

`calibrate` returns a `HardwareProfile`. It takes under a minute on a CPU and under two on a GPU,
because every measurement has a time limit of its own. `BenchTimer` times one piece of work: warmed
up, repeated, the median. The `measure_` functions time one kind of work each:

- matrix products, attention, elementwise work, and kernel launches;
- copies between device and host, each way alone and both at once: on CUDA from and into pinned
  memory on two streams, on a CPU from memory to memory in two threads;
- the disk under a folder, past the page cache: one large file in aligned blocks with O_DIRECT where
  the file system has it, else through the cache with a flush and the file's pages dropped before
  reading.

All of it waits for the device, so nothing here may be called in a training step.
"""

from __future__ import annotations

import datetime
import difflib
import errno
import math
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import functional

from sppo_hf.attention.backends.autotune import Workload, device_seconds
from sppo_hf.attention.backends.base import AttentionSpec
from sppo_hf.attention.backends.select import select_backend
from sppo_hf.config import SPPOConfig
from sppo_hf.engine.device_facts import (
    as_current_device,
    bound_to_device,
    device_facts,
    device_numa_node,
    device_versions,
)
from sppo_hf.engine.layer_kernels import liger_runs_on
from sppo_hf.errors import ConfigError
from sppo_hf.offload.disk_files import check_parent_exists
from sppo_hf.planning.hardware import Curve, HardwareProfile
from sppo_hf.planning.machine import free_disk_bytes, host_memory_bytes, lockable_bytes
from sppo_hf.testing.tiny_models import VOCAB_SIZE, build_tiny_model

# Shorter work is timed in groups, so that the cost of the clock or of events does not matter.
_MIN_SAMPLE_SECONDS = 3e-3
_MAX_CALLS = 200

_LOAD_SECONDS = 0.5
"""Of a GPU, before samples. In training it is at its power limit and clocks down (an H100 at 700 W
to 1,400 to 1,650 of its 1,980 MHz), which the first milliseconds of work after a pause do not
show."""


class BenchTimer:
    """Measures the seconds of a function without arguments."""

    def __init__(
        self,
        device: torch.device,
        *,
        repeats: int = 5,
        most_seconds: float = 1.0,
        load_seconds: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make one.

        Args:
            device: where the work runs; on CUDA its current stream is timed with events.
            repeats: number of samples for the median.
            most_seconds: no further sample starts after this total time.
            load_seconds: how long the work runs before the first sample, beside that time.
            clock: seconds on the host.
        """
        self.device = device
        self.clock = clock
        self._load_seconds = load_seconds
        self._repeats = repeats
        self._most_seconds = most_seconds

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median seconds of one call of `work`, after warm-up calls.

        The first call never counts: it may build kernels, which takes up to a hundred times as long
        as running them. Work whose second call takes more than a
        third of `most_seconds` is not repeated.
        """
        return self._timed(work)[0]

    def _timed(self, work: Callable[[], object]) -> tuple[float, float]:
        """Return the median seconds of a call, and all without building kernels and load."""
        first, single = self._sample(work, 1), self._sample(work, 1)
        # A kernel that is built for each new size (cuDNN) takes a second in its first call.
        spent = min(first, single) + single
        if 3 * single > self._most_seconds:
            return single, spent
        calls = min(max(1, math.ceil(_MIN_SAMPLE_SECONDS / max(single, 1e-9))), _MAX_CALLS)
        loaded = 0.0
        while loaded < self._load_seconds:
            loaded += self._sample(work, calls)
        samples: list[float] = []
        while len(samples) < self._repeats and spent <= self._most_seconds:
            sample = self._sample(work, calls)
            samples.append(sample / calls)
            spent += sample
        return statistics.median(samples), spent

    def curve(
        self,
        tokens: Iterable[int],
        work_of: Callable[[int], tuple[Callable[[], object], float]],
        *,
        budget_seconds: float,
    ) -> Curve:
        """Measure rates of work (FLOPs per second) by tokens.

        Args:
            tokens: numbers of tokens, strictly increasing.
            work_of: returns the work for a number of tokens, and its FLOPs.
            budget_seconds: a larger size is left out if two more calls, at the rate so far, would
                exceed this; the first size is always measured. Building kernels and `load_seconds`
                do not count.

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
        """Return the seconds that `calls` calls take together."""
        return device_seconds(work, self.device, calls=calls, clock=self.clock)


# Consecutive copies per direction, so that start and end of the overlap hardly matter.
_ROUNDS = 6
_REPEATS = 3


class CopySpeed(NamedTuple):
    """Bytes per second."""

    d2h: float
    h2d: float
    both_d2h: float
    both_h2d: float


def measure_copies(timer: BenchTimer, num_bytes: int) -> CopySpeed:
    """Time copies between device and host, each way alone and both at once.

    Args:
        timer: measures on the device.
        num_bytes: bytes of one copy; twice as many are allocated on device and host.

    Raises:
        RuntimeError: the host memory cannot be pinned (CUDA's own message).
    """
    pinned = timer.device.type == "cuda"
    # Filled, not merely allocated: pages that were never written copy faster than memory.
    host_in, host_out = (
        torch.ones(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in range(2)
    )
    device_in, device_out = (
        torch.ones(num_bytes, dtype=torch.uint8, device=timer.device) for _ in range(2)
    )

    def d2h() -> None:
        host_out.copy_(device_out, non_blocking=True)

    def h2d() -> None:
        device_in.copy_(host_in, non_blocking=True)

    at_once = _on_two_streams if pinned else _in_two_threads
    both = [at_once(d2h, h2d) for _ in range(_REPEATS)]
    both_d2h, both_h2d = (statistics.median(seconds) for seconds in zip(*both, strict=True))
    return CopySpeed(
        d2h=num_bytes / timer.seconds(d2h),
        h2d=num_bytes / timer.seconds(h2d),
        both_d2h=num_bytes / both_d2h,
        both_h2d=num_bytes / both_h2d,
    )


def _on_two_streams(d2h: Callable[[], None], h2d: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of one copy each way while both directions run, on two streams."""
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
    """Return the seconds of one copy each way while both directions run, in two threads."""
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


_BLOCK_BYTES = 8 * 2**20
_MIN_BLOCKS = 4
# Errors of file systems without O_DIRECT (tmpfs and some network ones).
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


class DiskSpeed(NamedTuple):
    """Bytes per second."""

    write: float
    read: float
    """May be too fast where the page cache cannot be bypassed and has served some of the reads."""


def measure_disk(
    folder: str | os.PathLike[str],
    num_bytes: int,
    *,
    most_seconds: float = 15.0,
    clock: Callable[[], float] = time.perf_counter,
) -> DiskSpeed:
    """Time writing and reading a temporary file.

    Args:
        folder: created if it does not exist.
        num_bytes: size of the file; at most a quarter of the free bytes is used.
        most_seconds: limit for each direction, which is then measured by what was moved so far.
        clock: seconds on the host.

    Raises:
        ConfigError: the folder cannot be created or written, or its disk is full; the message has
            the folder and the system's reason.
    """
    path = Path(folder)
    try:
        check_parent_exists(path)
        path.mkdir(exist_ok=True)
        blocks = min(num_bytes, free_disk_bytes(path) // 4) // _BLOCK_BYTES
        if blocks < _MIN_BLOCKS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with tempfile.NamedTemporaryFile(dir=path, prefix=".sppo-calibrate-") as file:
            try:
                return _time_file(file.name, blocks, most_seconds, clock, direct=True)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
            return _time_file(file.name, blocks, most_seconds, clock, direct=False)
    # ValueError: the path is not possible.
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"offload_dir={os.fspath(folder)!r} cannot be measured: {reason}. Allowed: a "
            f"folder that can be written, with at least {4 * _MIN_BLOCKS * _BLOCK_BYTES >> 20} "
            "MiB free. Remedy: name another folder, or free some space there."
        ) from error


def _time_file(
    name: str, blocks: int, most_seconds: float, clock: Callable[[], float], *, direct: bool
) -> DiskSpeed:
    """Write and read `blocks` blocks.

    Raises:
        OSError: from the system; EINVAL or EOPNOTSUPP if the file system has no O_DIRECT.
    """
    flag = getattr(os, "O_DIRECT", 0) if direct else 0
    # Anonymous memory of mmap is aligned to pages, which O_DIRECT requires.
    with mmap.mmap(-1, _BLOCK_BYTES) as block:
        # Not zeros, which some disks and file systems do not store.
        block.write(os.urandom(_BLOCK_BYTES))
        descriptor = os.open(name, os.O_RDWR | flag)
        try:
            start_seconds = clock()
            written = 0
            while written < blocks and clock() - start_seconds < most_seconds:
                _check_full_block(os.pwrite(descriptor, block, written * _BLOCK_BYTES))
                written += 1
            os.fsync(descriptor)
            write_seconds = clock() - start_seconds
            if not direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            start_seconds = clock()
            read = 0
            while read < written and clock() - start_seconds < most_seconds:
                _check_full_block(os.preadv(descriptor, [block], read * _BLOCK_BYTES))
                read += 1
            read_seconds = clock() - start_seconds
        finally:
            os.close(descriptor)
    return DiskSpeed(
        write=written * _BLOCK_BYTES / write_seconds, read=read * _BLOCK_BYTES / read_seconds
    )


def _check_full_block(moved_bytes: int) -> None:
    """Raise for a short transfer, which happens when the disk is full."""
    if moved_bytes != _BLOCK_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


PREFIX_CHUNKS = 4
"""Chunks before the one whose attention is timed, as in the middle of a sequence."""

_LAYERS = 8
_LAYER_TOKENS = 4


class Heads(NamedTuple):
    """Heads of an attention layer: how many, and elements of one query, key or value."""

    query: int
    key_value: int
    size: int

    def __str__(self) -> str:
        """Write the heads briefly: "32/8 heads of 128"."""
        return f"{self.query}/{self.key_value} heads of {self.size}"


class AttentionSpeed(NamedTuple):
    """FLOP/s by tokens of a chunk, and the backend that was timed."""

    forward: Curve
    backward: Curve
    backend: str


def measure_matmul(
    timer: BenchTimer,
    dtype: torch.dtype,
    *,
    weights: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    budget_seconds: float,
) -> Curve:
    """Measure FLOP/s of linear layers by tokens.

    Args:
        timer: measures on the device.
        dtype: dtype of inputs and weights.
        weights: (inputs, outputs) of each layer; one sample runs all of them.
        tokens: numbers of input rows, increasing.
        budget_seconds: see `BenchTimer.curve`.
    """
    matrices = [
        torch.randn(outputs, inputs, device=timer.device, dtype=dtype)
        for inputs, outputs in weights
    ]
    flops_per_token = sum(2 * inputs * outputs for inputs, outputs in weights)

    def work_of(count: int) -> tuple[Callable[[], object], float]:
        rows = [
            torch.randn(count, matrix.shape[1], device=timer.device, dtype=dtype)
            for matrix in matrices
        ]

        def work() -> None:
            for row, matrix in zip(rows, matrices, strict=True):
                functional.linear(row, matrix)

        return work, float(flops_per_token * count)

    return timer.curve(tokens, work_of, budget_seconds=budget_seconds)


def measure_attention(
    timer: BenchTimer,
    dtype: torch.dtype,
    *,
    heads: Heads,
    tokens: Sequence[int],
    budget_seconds: float,
) -> AttentionSpeed:
    """Measure FLOP/s of attention forward and backward by tokens of a chunk.

    The backend is the one that "auto" selects on this device. FLOPs are those of a `Workload`.

    Args:
        timer: measures on the device.
        dtype: dtype of queries, keys and values.
        heads: heads of the layer.
        tokens: chunk lengths, increasing; keys are `PREFIX_CHUNKS + 1` times as many.
        budget_seconds: for each direction, see `BenchTimer.curve`.
    """
    requirement = AttentionSpec(
        device_type=timer.device.type,
        dtype=dtype,
        qk_head_size=heads.size,
        v_head_size=heads.size,
        gqa_ratio=heads.query // heads.key_value,
    )
    backend = select_backend("auto", requirement).backend

    def made(count: int) -> tuple[Workload, Any]:
        load = Workload(
            requirement=requirement,
            query_heads=heads.query,
            chunk_tokens=count,
            prefix_tokens=PREFIX_CHUNKS * count,
        )
        return load, load.make(timer.device)

    def forward_of(count: int) -> tuple[Callable[[], object], float]:
        load, work = made(count)
        return lambda: work.forward(backend), load.forward_flops

    def backward_of(count: int) -> tuple[Callable[[], object], float]:
        load, work = made(count)
        attended = work.forward(backend)
        return lambda: work.backward(backend, attended), load.backward_flops

    forward = timer.curve(tokens, forward_of, budget_seconds=budget_seconds)
    # Sizes that were too slow for forward are not tried in backward.
    measured = [count for count, _ in forward.points]
    backward = timer.curve(measured, backward_of, budget_seconds=budget_seconds)
    return AttentionSpeed(forward, backward, backend.name)


def measure_memory(timer: BenchTimer, num_bytes: int) -> float:
    """Measure bytes per second, read plus written, of elementwise work on the device."""
    source = torch.ones(num_bytes // 4, device=timer.device)
    target = torch.ones_like(source)
    seconds = timer.seconds(lambda: torch.mul(source, 2.0, out=target))
    return 2 * source.nbytes / seconds


def measure_host_update(timer: BenchTimer, num_parameters: int) -> float:
    """Measure bytes per second, read plus written, of torch's fused AdamW in host memory.

    Args:
        timer: measures on the CPU; all its threads take part.
        num_parameters: number of float32 parameters, of 16 bytes each with their states.
    """
    parameter = torch.nn.Parameter(torch.ones(num_parameters, device="cpu"))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    # Weights and both moments are read and written, the gradient is read.
    return 7 * parameter.nbytes / timer.seconds(optimizer.step)


def measure_launch(timer: BenchTimer) -> float:
    """Measure the seconds of one decoder layer's forward when kernels have almost nothing to do.

    Runs a tiny Llama of Transformers, in training mode, on a few tokens, and includes a small share
    for embedding and head. The hooks of this package are not included.
    """
    model: Any = build_tiny_model("llama", dtype=torch.float32, num_hidden_layers=_LAYERS)
    model.to(timer.device)
    ids = torch.arange(_LAYER_TOKENS, device=timer.device)[None] % VOCAB_SIZE
    with torch.enable_grad():
        return timer.seconds(lambda: model(input_ids=ids, use_cache=False)) / _LAYERS


Progress = Callable[[str, int, int], None]
"""Called with the next measurement's name, the number of finished ones, and of all."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the measured work."""

    dtype_names: tuple[str, ...]
    """Dtypes that are measured by default."""

    weights: tuple[tuple[int, int], ...]
    """(inputs, outputs) of each linear layer."""

    heads: Heads
    """Heads of attention."""

    tokens: tuple[int, ...]
    """Rows of linear layers' inputs, and chunk lengths for attention, whose keys are five times as
    many."""

    memory_bytes: int
    """Bytes that elementwise work reads, and writes; far more than the caches' size."""

    copy_bytes: int
    """Bytes of one copy."""

    disk_bytes: int
    """Bytes of the file on disk."""

    budget_seconds: float
    """Time limit of one curve, see `BenchTimer.curve`."""

    most_seconds: float
    """Time limit of one point, see `BenchTimer`."""


SIZES: dict[str, Sizes] = {
    # Layers of an 8B model.
    "cuda": Sizes(
        dtype_names=("bfloat16", "float32"),
        weights=((4096, 4096), (4096, 14336)),
        heads=Heads(query=32, key_value=8, size=128),
        tokens=(256, 512, 1024, 2048, 4096, 8192, 16384),
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
        heads=Heads(query=9, key_value=3, size=64),
        tokens=(64, 256, 1024, 4096),
        memory_bytes=2**27,
        copy_bytes=2**27,
        disk_bytes=2**30,
        budget_seconds=4.0,
        most_seconds=1.0,
    ),
}
"""Sizes by device type."""

QUICK = Sizes(
    dtype_names=("float32",),
    weights=((64, 96),),
    heads=Heads(query=2, key_value=1, size=32),
    tokens=(32, 128),
    memory_bytes=2**22,
    copy_bytes=2**22,
    disk_bytes=2**26,
    budget_seconds=0.5,
    most_seconds=0.05,
)
"""Sizes for `--quick`: a few seconds in all, to test that everything runs."""


def calibrate(
    device: torch.device,
    *,
    dtype_names: Sequence[str] = (),
    offload_dir: str | os.PathLike[str] | None = None,
    quick: bool = False,
    on_progress: Progress | None = None,
) -> HardwareProfile:
    """Measure `device`, its copies and, if a folder is given, a disk.

    Meanwhile the process is bound to CPUs near the device, see `bound_to_device`.

    Args:
        device: a CPU or CUDA device.
        dtype_names: dtypes to measure, such as "float16"; empty for the device type's defaults.
        offload_dir: folder on the disk to measure; created if it does not exist.
        quick: measure small sizes only, in a few seconds; the results are not useful for planning.
        on_progress: called before every measurement, and at the end.

    Raises:
        ConfigError: a device of another type or one that is absent, an unknown dtype, or a folder
            that cannot be written.
    """
    device = _checked_device(device)
    sizes = QUICK if quick else SIZES[device.type]
    dtypes = {name: _dtype(name) for name in dtype_names or sizes.dtype_names}
    load_seconds = _LOAD_SECONDS if device.type == "cuda" and not quick else 0.0
    timer = BenchTimer(device, most_seconds=sizes.most_seconds, load_seconds=load_seconds)
    host_timer = BenchTimer(torch.device("cpu"), most_seconds=sizes.most_seconds)
    total = 2 * len(dtypes) + 4 + (offload_dir is not None)
    done = 0

    def run(title: str, measure: Callable[[], _T]) -> _T:
        nonlocal done
        if on_progress is not None:
            on_progress(title, done, total)
        done += 1
        return measure()

    def by_dtype(title: str, measure: Callable[..., _T], **work: object) -> dict[str, _T]:
        work["budget_seconds"] = sizes.budget_seconds
        return {
            name: run(f"{title}, {name}", partial(measure, timer, dtype, **work))
            for name, dtype in dtypes.items()
        }

    with bound_to_device(device), as_current_device(device), torch.no_grad():
        # The disk first, because its folder may be refused.
        disk = None
        if offload_dir is not None:
            disk = run("disk", partial(measure_disk, offload_dir, sizes.disk_bytes))
        matmul = by_dtype(
            "matrix products", measure_matmul, weights=sizes.weights, tokens=sizes.tokens
        )
        attention = by_dtype("attention", measure_attention, heads=sizes.heads, tokens=sizes.tokens)
        memory = run("memory", partial(measure_memory, timer, sizes.memory_bytes))
        launch_seconds = run("launches", partial(measure_launch, timer))
        copies = run("copies", partial(measure_copies, timer, sizes.copy_bytes))
        update = run(
            "update on the host", partial(measure_host_update, host_timer, sizes.copy_bytes // 4)
        )
    if on_progress is not None:
        on_progress("done", done, total)
    facts = device_facts(device, SPPOConfig())
    backends = ", ".join(f"{speed.backend} for {name}" for name, speed in attention.items())
    small = ", with sizes too small to plan with" if quick else ""
    return HardwareProfile(
        name=facts.name,
        kind=facts.kind,
        estimated=False,
        source=f"measured on {datetime.date.today()}{small}; attention: {backends}",
        matmul_flops=matmul,
        attention_forward_flops={name: speed.forward for name, speed in attention.items()},
        attention_backward_flops={name: speed.backward for name, speed in attention.items()},
        memory_bytes_per_second=memory,
        launch_seconds=launch_seconds,
        d2h_bytes_per_second=copies.d2h,
        h2d_bytes_per_second=copies.h2d,
        both_d2h_bytes_per_second=copies.both_d2h,
        both_h2d_bytes_per_second=copies.both_h2d,
        host_update_bytes_per_second=update,
        disk_write_bytes_per_second=None if disk is None else disk.write,
        disk_read_bytes_per_second=None if disk is None else disk.read,
        device_bytes=facts.memory_bytes["device"],
        host_bytes=host_memory_bytes(),
        pinned_bytes=_pinnable_bytes(device, pinned_so_far_bytes=2 * sizes.copy_bytes),
        disk_bytes=None if offload_dir is None else free_disk_bytes(offload_dir),
        offload_dir=None if offload_dir is None else os.path.abspath(offload_dir),
        numa_node=device_numa_node(device),
        layer_kernels=liger_runs_on(device),
        versions=device_versions(device),
    )


def _checked_device(device: torch.device) -> torch.device:
    """Return the device with its index, or raise ConfigError."""
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
    """Return the torch dtype of a name, or raise ConfigError."""
    allowed = ("bfloat16", "float16", "float32", "float64")
    if name not in allowed:
        nearest = difflib.get_close_matches(name, allowed, n=1, cutoff=0)[0]
        raise ConfigError(
            f"dtype={name!r} is not measured. Allowed: {', '.join(allowed)}. Remedy: use the "
            f"nearest, {nearest!r}."
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _pinnable_bytes(device: torch.device, *, pinned_so_far_bytes: int) -> int | None:
    """Return the effective limit on pinned memory, or None.

    RLIMIT_MEMLOCK bounds `mlock`, but NVIDIA's driver pins without counting against it, so a limit
    that the copies' buffers have just exceeded does not apply. On a CPU nothing is pinned.
    """
    limit = lockable_bytes()
    if device.type != "cuda" or limit is None or pinned_so_far_bytes > limit:
        return None
    return limit
