"""Which of several backends is the fastest here: a short race over one representative chunk.

Costs one call of each backend, which builds and warms up its kernels, and at most `BUDGET_SECONDS`
of timed calls and one beyond, once per device, versions and requirement: the result is a value that
`planning/autotune_store.py` keeps.

[Note: ranks may attend differently]
Every rank of a job times its own device, so noise could let two ranks take different backends. On
one machine (or one shared HF_HOME) they do not: whoever is first to publish a result decides, and
all read what is published before they choose. Where machines share no folder they may differ, and
nothing breaks: a rank runs forward and backward of a (layer, chunk) itself, and where attention
runs again it is on that rank, by that backend, so no two ranks compute two halves of one thing.
Backends agree within the rounding of the dtype (each was compared with the reference), as two
data-parallel ranks with different rows do anyway; replicas stay equal, since all apply the same
summed gradients. Chunk bounds do not depend on the backend. What a user who wants the same bits
everywhere sets is a backend's name.

Each is timed on a chunk of random queries against the keys before it, in a place that the caller's
state does not reach, its random numbers included; waiting for the device on purpose, which no part
of a training step does.

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
    """Seconds that `calls` calls of `work` take together.

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


BACKWARD_FORWARDS = 2.5
"""FLOPs of a backward by those of its forward: five matrix products instead of two."""

SOFTCAP = 50.0
"""Of the scores where the requirement caps them (Gemma 2 has this one)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of one attention."""

    requirement: AttentionSpec
    """Dtype, head sizes and features."""

    query_heads: int
    """N; a multiple of the requirement's `gqa_ratio`."""

    chunk_tokens: int
    """C, at least 1."""

    prefix_tokens: int
    """Keys before the chunk's own; may be 0."""

    window_tokens: int | None = None
    """Keys that a query sees, its own included; None for all before it."""

    def __post_init__(self) -> None:
        """Refuse heads that cannot be shared out."""
        whole = self.query_heads % self.requirement.gqa_ratio == 0
        assert whole, f"{self.query_heads} heads for groups of {self.requirement.gqa_ratio}"

    def __str__(self) -> str:
        """Its tokens in words: "4K x 32K", "512 x 0, window 1K"."""
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
        """Pairs of a query and a key that it sees, of one head."""
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
        """FLOPs of the forward; only visible pairs count, so the causal half counts once."""
        sizes = self.requirement.qk_head_size + self.requirement.v_head_size
        return 2.0 * self.visible_pairs * self.query_heads * sizes

    @property
    def backward_flops(self) -> float:
        """FLOPs of the backward; its own recomputation of scores is one of the five products."""
        return BACKWARD_FORWARDS * self.forward_flops

    @property
    def num_bytes(self) -> int:
        """Bytes of inputs, results and gradients, those of keys in float32; not a kernel's own."""
        sizes = self.requirement.qk_head_size + self.requirement.v_head_size
        itemsize = self.requirement.dtype.itemsize
        rows = self.query_heads * self.chunk_tokens * (2 * sizes * itemsize + 4)
        return rows + self.kv_heads * self.num_keys * sizes * (itemsize + max(4, itemsize))

    def shortened(self, most_bytes: int) -> Workload:
        """The same with a shorter prefix, and then a shorter chunk, so that `num_bytes` fits.

        Nothing becomes shorter than `_LEAST_TOKENS`.
        """
        load = self
        while load.num_bytes > most_bytes and load.prefix_tokens > _LEAST_TOKENS:
            load = replace(load, prefix_tokens=max(_LEAST_TOKENS, load.prefix_tokens // 2))
        while load.num_bytes > most_bytes and load.chunk_tokens > _LEAST_TOKENS:
            load = replace(load, chunk_tokens=max(_LEAST_TOKENS, load.chunk_tokens // 2))
        return load

    def make(self, device: torch.device, *, seed: int = 0) -> WorkloadTensors:
        """Its tensors on `device`, from a generator of their own."""
        return WorkloadTensors(self, device, seed)


class WorkloadTensors:
    """The tensors of a workload, laid out as models do: views of [B, tokens, heads, H]."""

    def __init__(self, load: Workload, device: torch.device, seed: int) -> None:
        needs = load.requirement
        generator = torch.Generator(device).manual_seed(seed)

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
        """Gradient of `forward` given its results."""
        tensors = (self.dout_BNCH, self.q_BNCH, self.k_BKTH, self.v_BKTH, *attended)
        return backend.backward(*tensors, **self._scores)

    def work(self, backend: Backend) -> tuple[Callable[[], object], Callable[[], object]]:
        """Forward and backward as functions without arguments; runs the forward once."""
        attended = self.forward(backend)
        return lambda: self.forward(backend), lambda: self.backward(backend, attended)


def short(tokens: int) -> str:
    """Writes tokens as people say them: "512", "4K", "1M", "1,536"."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"


BUDGET_SECONDS = 1.2
"""No further timed call is begun once timed calls have taken this long.

What building kernels takes does not count: the slowest to build may be the fastest."""

CHUNK_TOKENS = 4096
PREFIX_TOKENS = 32768
WINDOW_TOKENS = 1024
QUERY_HEADS = 16
"""Enough work to fill a large GPU a few times over, and a few milliseconds for its best kernel."""

_SAMPLES = 3
_NO_TIME = "was not timed, for lack of time"
_MEMORY_SHARE = 0.25
_LEAST_TOKENS = 1024

Timer = Callable[[Callable[[], object]], float]
"""Seconds that one call of some work takes."""


def autotune_key(
    names: Sequence[str], requirement: AttentionSpec, device: torch.device
) -> tuple[str, dict[str, object]]:
    """What the result of a race hangs on, as `autotune_path` takes it.

    Returns:
        The device's name as its driver gives it, and the rest: versions, requirement, names.
    """
    key: dict[str, object] = {
        "torch": torch.__version__,
        "requirement": {**asdict(requirement), "dtype": str(requirement.dtype)},
        "backends": list(names),
        "packages": _package_versions(),
        # Kernels that sum in a fixed order are slower, some much more than others.
        "deterministic": determinism(),
    }
    if device.type != "cuda":
        return processor_name(), key
    key["cuda"] = torch.version.cuda or getattr(torch.version, "hip", None) or "unknown"
    key["cudnn"] = torch.backends.cudnn.version()
    key["driver"] = nvidia_driver_version()
    return torch.cuda.get_device_properties(device).name, key


def _package_versions() -> dict[str, str]:
    """Of the kernels that are installed beside torch."""
    found: dict[str, str] = {}
    for name in ("flash-attn", "flash-attn-3", "flash-attn-4"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def representative(requirement: AttentionSpec, free_bytes: int | None) -> Workload:
    """The chunk that backends race over; of `free_bytes`, if given, it takes a quarter at most."""
    groups = requirement.gqa_ratio
    load = Workload(
        requirement=requirement,
        query_heads=max(1, QUERY_HEADS // groups) * groups,
        chunk_tokens=CHUNK_TOKENS,
        # Keys before the window are never looked at.
        prefix_tokens=CHUNK_TOKENS if requirement.window else PREFIX_TOKENS,
        window_tokens=WINDOW_TOKENS if requirement.window else None,
    )
    return load if free_bytes is None else load.shortened(int(_MEMORY_SHARE * free_bytes))


def autotune(
    backends: Sequence[Backend],
    requirement: AttentionSpec,
    device: torch.device,
    *,
    load: Workload | None = None,
    timer: Timer | None = None,
    clock: Clock = time.perf_counter,
    budget_seconds: float = BUDGET_SECONDS,
) -> AutotuneResult:
    """Time forward and backward of each backend; call it through `run_isolated`.

    Args:
        backends: in the order that decides where none is clearly faster.
        requirement: what all of them can do.
        device: where; on CUDA the current one.
        load: what they do; None for the `representative` one.
        timer: seconds of one call; None times on the device.
        clock: seconds that pass on the host.
        budget_seconds: for the timed calls of all together. The first that works is always timed.

    Returns:
        A lap for each that finished; the others with the reason in `left_out`. A backend that
        raises, out of memory or otherwise, is logged and left out. The result is not a lasting one
        if memory or time was lacking.
    """
    if load is None:
        free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        load = representative(requirement, free_bytes)
    seconds_of = timer or (lambda work: device_seconds(work, device, clock=clock))
    laps: list[Timing] = []
    left_out: dict[str, str] = {}
    transient = False
    left_seconds = budget_seconds
    tensors: WorkloadTensors | None = None
    flops = load.forward_flops + load.backward_flops
    for backend in backends:
        if left_seconds <= 0 and laps:
            left_out[backend.name] = _NO_TIME
            transient = True
            continue
        try:
            tensors = tensors or load.make(device)
            samples, took_seconds = _run(tensors, backend, seconds_of, clock, left_seconds)
            left_seconds -= took_seconds
            seconds = statistics.median(samples)
            laps.append(Timing(backend.name, seconds, flops / seconds))
        # Kernels fail with whatever exception they like; none may stop a training that has others.
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            left_out[backend.name] = f"raised {type(error).__name__} when timed: {first_line}"
            transient |= isinstance(error, torch.OutOfMemoryError)
            logger.warning("attention backend %s %s", backend.name, left_out[backend.name])
            logger.debug("attention backend %s", backend.name, exc_info=True)
    return AutotuneResult(str(load), tuple(laps), left_out, lasting=not transient)


def _run(
    tensors: WorkloadTensors,
    backend: Backend,
    seconds_of: Timer,
    clock: Clock,
    budget_seconds: float,
) -> tuple[list[float], float]:
    """Seconds of forward and backward, at least once, and what timing them took.

    One call goes before that is not timed: kernels are built in it.
    """

    def step() -> None:
        attended = tensors.forward(backend)
        tensors.backward(backend, attended)

    seconds_of(step)
    began = clock()
    samples = [seconds_of(step)]
    while len(samples) < _SAMPLES and clock() - began < budget_seconds:
        samples.append(seconds_of(step))
    return samples, clock() - began
