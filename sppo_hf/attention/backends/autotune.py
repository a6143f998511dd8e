"""Timing of attention backends on one representative chunk, to find the fastest on this device.

Costs one untimed call of each backend, which builds its kernels, and about `BUDGET_SECONDS` of
timed calls, once per device, versions and requirement; `planning/autotune_store.py` stores the
result.

[Note: ranks may attend differently]
Every rank of a job times its own device, so noise could make two ranks choose different backends.
On one machine (or with a shared HF_HOME) the first published result decides, because all ranks read
it before they choose. Machines without a shared folder may differ, and nothing breaks: forward,
backward and recomputation of a (layer, chunk) all run on one rank, with one backend. Backends agree
within the rounding of the dtype (each was compared with the reference), and replicas stay equal,
because all apply the same summed gradients. Chunk bounds do not depend on the backend. For the same
bits everywhere, set a backend by name.

Timing runs isolated from the caller's state, its random numbers included. It waits for the device,
so it must not be part of a training step.

Shapes: B batch (always 1), N query heads, K key/value heads, C query tokens, T key tokens, H head
size.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any, TypeVar

import torch
from torch import Tensor

from sppo_hf.attention.backends.base import (
    AttentionOutput,
    AttentionSpec,
    Backend,
    CausalBand,
    Gradients,
    determinism,
)
from sppo_hf.planning.autotune_store import AutotuneResult, Timing
from sppo_hf.planning.machine import nvidia_driver_version, processor_name

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

_T = TypeVar("_T")


def device_seconds(
    work: Callable[[], object],
    device: torch.device,
    *,
    calls: int = 1,
    clock: Clock = time.perf_counter,
) -> float:
    """Return the seconds that `calls` calls of `work` take together.

    On CUDA between two events on the current stream, on other devices by `clock`.
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


def run_isolated(function: Callable[[], _T], device: torch.device) -> _T:
    """Run `function` isolated from the caller's torch state, and return its result.

    The caller may be in the middle of a layer's forward: under autocast, saved-tensor hooks,
    dispatch modes or another stream. All of these are thread-local, so the function runs in a
    thread of its own, without gradients and on the device's default stream. The state of random
    generators, which is global, is restored. On CUDA it waits for earlier work of the device first,
    and returns cached memory to the driver afterwards.

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


BACKWARD_FORWARDS = 2.5
"""FLOPs of backward divided by those of forward: five matrix products instead of two."""

SOFTCAP = 50.0
"""Cap of scores where the requirement has one; Gemma 2's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of one attention call to time."""

    requirement: AttentionSpec
    """Dtype, head sizes and features."""

    query_heads: int
    """N, a multiple of the requirement's `gqa_ratio`."""

    chunk_tokens: int
    """C, at least 1."""

    prefix_tokens: int
    """Keys before the chunk's own; may be 0."""

    window_tokens: int | None = None
    """Keys that a query sees, its own included; None for all before it."""

    def __post_init__(self) -> None:
        """Check that query heads can be divided among key heads."""
        whole = self.query_heads % self.requirement.gqa_ratio == 0
        assert whole, f"{self.query_heads} heads for groups of {self.requirement.gqa_ratio}"

    def __str__(self) -> str:
        """Write the chunk and prefix lengths: "4K x 32K", "512 x 0, window 1K"."""
        text = f"{short(self.chunk_tokens)} x {short(self.prefix_tokens)}"
        window = self.window_tokens
        return text if window is None else f"{text}, window {short(window)}"

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.query_heads // self.requirement.gqa_ratio

    @property
    def num_keys(self) -> int:
        """T: the prefix and the chunk itself."""
        return self.prefix_tokens + self.chunk_tokens

    @property
    def visible_pairs(self) -> int:
        """Number of pairs of a query and a key that it sees, per head."""
        rows, before = self.chunk_tokens, self.prefix_tokens
        causal = rows * before + rows * (rows + 1) // 2
        if self.window_tokens is None:
            return causal
        # Row i has before + 1 + i keys; from row `full` on, more than the window lets it see.
        full = min(max(self.window_tokens - before, 0), rows)
        short_rows = full * before + full * (full + 1) // 2
        return short_rows + (rows - full) * self.window_tokens

    @property
    def forward_flops(self) -> float:
        """FLOPs of forward, counting visible pairs only."""
        sizes = self.requirement.qk_head_size + self.requirement.v_head_size
        return 2.0 * self.visible_pairs * self.query_heads * sizes

    @property
    def backward_flops(self) -> float:
        """FLOPs of backward, including its recomputation of scores."""
        return BACKWARD_FORWARDS * self.forward_flops

    @property
    def num_bytes(self) -> int:
        """Bytes of inputs, results and gradients (of keys in float32), without kernel workspace."""
        sizes = self.requirement.qk_head_size + self.requirement.v_head_size
        itemsize = self.requirement.dtype.itemsize
        rows = self.query_heads * self.chunk_tokens * (2 * sizes * itemsize + 4)
        return rows + self.kv_heads * self.num_keys * sizes * (itemsize + max(4, itemsize))

    def shortened(self, max_bytes: int) -> Workload:
        """Return it with a shorter prefix, and then a shorter chunk, so that `num_bytes` fits.

        Neither becomes shorter than `_MIN_TOKENS`.
        """
        load = self
        while load.num_bytes > max_bytes and load.prefix_tokens > _MIN_TOKENS:
            load = replace(load, prefix_tokens=max(_MIN_TOKENS, load.prefix_tokens // 2))
        while load.num_bytes > max_bytes and load.chunk_tokens > _MIN_TOKENS:
            load = replace(load, chunk_tokens=max(_MIN_TOKENS, load.chunk_tokens // 2))
        return load

    def make(self, device: torch.device) -> WorkloadTensors:
        """Return random tensors of these sizes on `device`, the same in every call."""
        return WorkloadTensors(self, device)


class WorkloadTensors:
    """The tensors of a workload, laid out as in models: views of [B, tokens, heads, H]."""

    def __init__(self, load: Workload, device: torch.device) -> None:
        needs = load.requirement
        generator = torch.Generator(device).manual_seed(0)

        def random(heads: int, tokens: int, size: int) -> Tensor:
            shape = (1, tokens, heads, size)
            x = torch.randn(shape, generator=generator, device=device, dtype=needs.dtype)
            return x.transpose(1, 2)

        self.load = load
        self.q_BNCH = random(load.query_heads, load.chunk_tokens, needs.qk_head_size)
        self.k_BKTH = random(load.kv_heads, load.num_keys, needs.qk_head_size)
        self.v_BKTH = random(load.kv_heads, load.num_keys, needs.v_head_size)
        self.dout_BNCH = random(load.query_heads, load.chunk_tokens, needs.v_head_size)
        self._scores: dict[str, Any] = {
            "band": CausalBand(load.prefix_tokens, load.window_tokens),
            "scale": needs.qk_head_size**-0.5,
            "softcap": SOFTCAP if needs.softcap else None,
        }

    def forward(self, backend: Backend) -> AttentionOutput:
        """Attend with `backend`."""
        return backend.forward(self.q_BNCH, self.k_BKTH, self.v_BKTH, **self._scores)

    def backward(self, backend: Backend, attended: AttentionOutput) -> Gradients:
        """Return the gradients of `forward`, given its results."""
        tensors = (self.dout_BNCH, self.q_BNCH, self.k_BKTH, self.v_BKTH, *attended)
        return backend.backward(*tensors, **self._scores)

    def work(self, backend: Backend) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return forward and backward as functions without arguments; runs forward once."""
        attended = self.forward(backend)
        return lambda: self.forward(backend), lambda: self.backward(backend, attended)


def short(tokens: int) -> str:
    """Write a number of tokens briefly: "512", "4K", "1M", "1,536"."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"


BUDGET_SECONDS = 1.2
"""No timed call starts after timed calls have taken this long together.

The first backend that works is always timed. The untimed first calls do not count: the kernel that
is slowest to build may be the fastest."""

CHUNK_TOKENS = 4096
PREFIX_TOKENS = 32768
WINDOW_TOKENS = 1024
QUERY_HEADS = 16
"""Enough work to fill a large GPU several times; its best kernel takes a few milliseconds."""

_SAMPLES = 3
_NO_TIME = "was not timed, for lack of time"
_MEMORY_FRACTION = 0.25
_MIN_TOKENS = 1024


def autotune_key(
    names: Sequence[str], requirement: AttentionSpec, device: torch.device
) -> tuple[str, dict[str, object]]:
    """Return all that a timing result depends on, as the arguments of `autotune_path`.

    Returns:
        The device's name from its driver, and versions, requirement and backends' names.
    """
    key: dict[str, object] = {
        "torch": torch.__version__,
        "requirement": {**asdict(requirement), "dtype": str(requirement.dtype)},
        "backends": list(names),
        "packages": _package_versions(),
        # Deterministic kernels are slower, some of them much more than others.
        "deterministic": determinism(),
    }
    if device.type != "cuda":
        return processor_name(), key
    key["cuda"] = torch.version.cuda or getattr(torch.version, "hip", None) or "unknown"
    key["cudnn"] = torch.backends.cudnn.version()
    key["driver"] = nvidia_driver_version()
    return torch.cuda.get_device_properties(device).name, key


def _package_versions() -> dict[str, str]:
    """Return the versions of installed packages of kernels."""
    found: dict[str, str] = {}
    for name in ("flash-attn", "flash-attn-3", "flash-attn-4"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def representative_workload(requirement: AttentionSpec, free_bytes: int | None) -> Workload:
    """Return the chunk that is timed; it needs at most a quarter of `free_bytes`, if given."""
    groups = requirement.gqa_ratio
    load = Workload(
        requirement=requirement,
        query_heads=max(1, QUERY_HEADS // groups) * groups,
        chunk_tokens=CHUNK_TOKENS,
        # Keys before the window are not read.
        prefix_tokens=CHUNK_TOKENS if requirement.window else PREFIX_TOKENS,
        window_tokens=WINDOW_TOKENS if requirement.window else None,
    )
    return load if free_bytes is None else load.shortened(int(_MEMORY_FRACTION * free_bytes))


def autotune(
    backends: Sequence[Backend],
    requirement: AttentionSpec,
    device: torch.device,
    *,
    load: Workload | None = None,
    clock: Clock = time.perf_counter,
) -> AutotuneResult:
    """Time forward and backward of each backend; call it through `run_isolated`.

    All support `requirement`; in order of preference, for ties. On CUDA `device` is the current
    one. `load` is `representative_workload` if None.

    Returns:
        A timing for each backend that finished, and the reasons for the others in `left_out`. A
        backend that raises, out of memory or otherwise, is logged and left out. The result is not
        `lasting` if memory or time was lacking.
    """
    if load is None:
        free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        load = representative_workload(requirement, free_bytes)
    timings: list[Timing] = []
    left_out: dict[str, str] = {}
    transient = False
    left_seconds = BUDGET_SECONDS
    tensors: WorkloadTensors | None = None
    flops = load.forward_flops + load.backward_flops
    for backend in backends:
        if left_seconds <= 0 and timings:
            left_out[backend.name] = _NO_TIME
            transient = True
            continue
        try:
            tensors = tensors or load.make(device)
            samples, spent_seconds = _run(tensors, backend, device, clock, left_seconds)
            left_seconds -= spent_seconds
            seconds = statistics.median(samples)
            timings.append(Timing(backend.name, seconds, flops / seconds))
        # Kernels raise all kinds of exceptions; none may stop a training that has other kernels.
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            left_out[backend.name] = f"raised {type(error).__name__} when timed: {first_line}"
            transient |= isinstance(error, torch.OutOfMemoryError)
            logger.warning("attention backend %s %s", backend.name, left_out[backend.name])
            logger.debug("attention backend %s", backend.name, exc_info=True)
    return AutotuneResult(str(load), tuple(timings), left_out, lasting=not transient)


def _run(
    tensors: WorkloadTensors,
    backend: Backend,
    device: torch.device,
    clock: Clock,
    budget_seconds: float,
) -> tuple[list[float], float]:
    """Return samples of seconds of forward and backward, at least one, and the total time.

    An untimed first call builds the kernels.
    """

    def step() -> None:
        attended = tensors.forward(backend)
        tensors.backward(backend, attended)

    device_seconds(step, device, clock=clock)
    start_seconds = clock()
    samples = [device_seconds(step, device, clock=clock)]
    while len(samples) < _SAMPLES and clock() - start_seconds < budget_seconds:
        samples.append(device_seconds(step, device, clock=clock))
    return samples, clock() - start_seconds
