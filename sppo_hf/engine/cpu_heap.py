"""Keeps the C library's heap from fragmenting on a CPU; CUDA's allocator does not need this.

The C library puts tensors of a few megabytes into its heap. A layer's temporaries come and go
there, and what is kept of a chunk until its backward (inputs, attention outputs, keys, values)
would lie between free blocks that the next chunk's tensors do not fit into: measured with SmolLM2
at 4,096 tokens, the heap grew to twice the live bytes. So a chunk's kept tensors are copied into
slabs, one per kind for all layers (`CpuChunkArena`). A slab is a memory mapping of its own,
whatever size the C library would map, and returns to the operating system when backward has used
its last part. Free heap that remains is returned between layers (`HeapWatch`).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from sppo_hf.planning.memory import Cause, MemoryEstimate
from sppo_hf.planning.plan import Plan

_MAPPED_BYTES = 2**20
"""Smaller slabs are left to the C library: a process has about 65,000 mappings at most."""


class CpuChunkArena:
    """Slabs for the kept tensors of one chunk; a slab lives as long as any part of it.

    In the order by layer, for those of one layer: "layers" here are then its chunks.
    """

    def __init__(self, num_layers: int, *, keep_whole_inputs: bool | None = None) -> None:
        """Prepare for tensors that each of `num_layers` layers keeps once.

        `keep_whole_inputs` says, in the order by layer, whether all chunks keep their inputs. These
        are parts of one tensor, which then serves as the slab; if some chunks do not, none may keep
        the whole tensor alive.
        """
        self._num_layers = num_layers
        self._keep_whole_inputs = keep_whole_inputs
        self._slabs: dict[tuple[str, torch.Size, torch.dtype], tuple[Tensor, int]] = {}

    def keep(self, kind: str, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of `tensor` in the slab of its kind; not on a CPU, the tensor.

        Either is detached. Each layer keeps one tensor of a kind.
        """
        is_part = kind == "inputs" and tensor.untyped_storage().nbytes() > tensor.nbytes
        if is_part and self._keep_whole_inputs:
            return tensor.detach()
        if tensor.device.type != "cpu":
            must_copy = is_part and self._keep_whole_inputs is False
            return tensor.detach().clone() if must_copy else tensor.detach()
        key = (kind, tensor.shape, tensor.dtype)
        slab, used = self._slabs.get(key, (None, 0))
        if slab is None or used == self._num_layers:
            slab, used = _slab((self._num_layers, *tensor.shape), tensor.dtype), 0
        self._slabs[key] = (slab, used + 1)
        # `.data`, so that each part has a version counter of its own and not the slab's.
        return slab[used].copy_(tensor.detach()).data


def _slab(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialized dense tensor, whose memory returns to the system with it."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes >= _MAPPED_BYTES and hasattr(mmap, "MAP_ANONYMOUS"):
        with contextlib.suppress(OSError):  # too many mappings
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return torch.frombuffer(memory, dtype=dtype).view(*shape)
    return torch.empty(*shape, dtype=dtype, device="cpu")


_MIN_GROWTH_BYTES = 4 * 2**20
"""Growth from which on free heap is returned; looking through the heap takes milliseconds."""

_min_resident_bytes = 0.0
"""Minimum of the resident bytes since free heap was last returned."""


def return_free_heap(*, always: bool = False) -> None:
    """Return free pages inside the C library's heap to the operating system.

    glibc before 2.38 cannot reuse a freed block for an aligned block of the same size, so the free
    blocks that a chunk's temporaries leave add up. Does nothing without glibc, nor, unless
    `always`, if this process has grown by less than 4 MiB since the last time.
    """
    global _min_resident_bytes
    if _malloc_trim is None:
        return
    if not always:
        now = resident_bytes()
        _min_resident_bytes = min(_min_resident_bytes, now)
        if now - _min_resident_bytes < _MIN_GROWTH_BYTES:
            return
    _malloc_trim(0)
    _min_resident_bytes = resident_bytes()


class HeapWatch:
    """Returns free heap between layers, before a step would exceed its planned memory.

    Returned pages have to be mapped and zeroed again, which every few layers costs a tenth of a
    step's time. So free heap is kept while as much again would still fit.
    """

    def __init__(self, max_bytes: float | None, *, workspace_bytes: float = 0.0) -> None:
        """Watch one step.

        `max_bytes` is the limit of `resident_bytes` (`max_resident_bytes`), None returns free heap
        every time; `workspace_bytes` come and go while a layer runs.
        """
        self._max_bytes = max_bytes
        self._workspace_bytes = workspace_bytes
        self._last_bytes = math.inf

    @classmethod
    def of_step(cls, plan: Plan, parameters: Iterable[Tensor]) -> HeapWatch:
        """Return the watch of a step that is about to begin, with all its groups of rows.

        Free heap may be kept on a CPU if most layers are recomputed: else most saved activations
        lie in the heap, between the temporaries.
        """
        max_bytes: float | None = None
        recomputes = [mode.recompute for row in plan.layer_modes for mode in row]
        if plan.device.kind == "cpu" and 2 * sum(recomputes) >= len(recomputes):
            max_bytes = max_resident_bytes(plan.estimate, parameters)
        return cls(max_bytes, workspace_bytes=plan.estimate.most_bytes(Cause.WORKSPACE))

    @property
    def may_keep_free_heap(self) -> bool:
        """Whether some free heap may be kept."""
        return self._max_bytes is not None

    def between_layers(self) -> None:
        """Return free heap if the growth since the last call would not fit once more."""
        if self._max_bytes is None:
            return return_free_heap()
        now_bytes = resident_bytes()
        growth_bytes = max(self._workspace_bytes, now_bytes - self._last_bytes)
        if now_bytes + growth_bytes > self._max_bytes:
            return_free_heap(always=True)
            now_bytes = resident_bytes()
        self._last_bytes = now_bytes


def resident_bytes() -> float:
    """This process's memory in RAM, without files'; infinite if the system does not say."""
    try:
        # Called between layers: unbuffered and binary takes half the time.
        with open("/proc/self/statm", "rb", buffering=0) as file:
            _, resident, shared, *_ = file.read().split()
    except OSError:
        return math.inf
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def max_resident_bytes(estimate: MemoryEstimate, parameters: Iterable[Tensor]) -> float:
    """Return the limit of `resident_bytes` in a step that is about to begin.

    Within it the step takes no more than its estimate, even if no free heap is reused. Weights and
    the optimizer's state are resident already, or are not in this step; those gradients that exist
    are part of the estimate.
    """
    return_free_heap(always=True)
    known_bytes = sum(p.grad.nbytes for p in parameters if p.grad is not None)
    causes = (Cause.WEIGHTS, Cause.LORA, Cause.OPTIMIZER)
    known_bytes += sum(estimate.standing_bytes(cause) for cause in causes)
    return resident_bytes() + estimate.peak_bytes("device", "host") - known_bytes


def _find_malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


_malloc_trim = _find_malloc_trim()
