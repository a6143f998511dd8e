"""Room for what a chunk keeps until its backward, side by side instead of between temporaries.

On a CPU the C library puts tensors of a few megabytes into its heap. A layer's temporaries come and
go there, and what a frame keeps (inputs, attention outputs, keys, values) would stay behind as
islands between holes that the next chunk's tensors do not fit into: measured with SmolLM2 at 4,096
tokens, the heap grew to twice what was alive. So a chunk's kept tensors are copied into slabs, one
per kind for all layers. A slab is a mapping of its own, whatever size the C library would map, and
goes back to the operating system when backward has used its last part. CUDA's allocator does not
need this.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from sppo_hf.planning.causes import Cause
from sppo_hf.planning.memory_snapshots import MemoryEstimate
from sppo_hf.planning.plan import Plan

_MAPPED_BYTES = 2**20
"""Smaller slabs are left to the C library: a process has about 65,000 mappings at most."""


class CpuChunkArena:
    """Slabs for the kept tensors of one chunk; a slab lives as long as any part of it.

    By layer, for those of one layer: "layers" here are then its chunks.
    """

    def __init__(self, num_layers: int, *, keep_whole_inputs: bool | None = None) -> None:
        """Prepare for tensors that every one of `num_layers` layers keeps once.

        Args:
            num_layers: Parts of a slab.
            keep_whole_inputs: By layer, whether all chunks keep their inputs: these are parts of
                one tensor, which then is slab enough. If not, none may keep the whole alive.
                None chunk by chunk.
        """
        self._num_layers = num_layers
        self._inputs_stay = keep_whole_inputs
        self._slabs: dict[tuple[str, torch.Size, torch.dtype], tuple[Tensor, int]] = {}

    def keep(self, kind: str, tensor: Tensor) -> Tensor:
        """A copy of `tensor` beside those of the same kind, or the tensor itself if not on a CPU.

        Args:
            kind: What it is; layers keep one tensor of a kind each.
            tensor: Any strides; the copy is contiguous and detached.
        """
        part = kind == "inputs" and tensor.untyped_storage().nbytes() > tensor.nbytes
        if part and self._inputs_stay:
            return tensor.detach()
        if tensor.device.type != "cpu":
            return (
                tensor.detach().clone() if part and self._inputs_stay is False else tensor.detach()
            )
        key = (kind, tensor.shape, tensor.dtype)
        slab, used = self._slabs.get(key, (None, 0))
        if slab is None or used == self._num_layers:
            slab, used = _slab((self._num_layers, *tensor.shape), tensor.dtype), 0
        self._slabs[key] = (slab, used + 1)
        # As `.data`, each part counts writes into itself alone, not those into the whole slab.
        return slab[used].copy_(tensor.detach()).data


def _slab(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A dense tensor with whatever values, whose memory goes back to the system with it."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes >= _MAPPED_BYTES and hasattr(mmap, "MAP_ANONYMOUS"):
        with contextlib.suppress(OSError):  # too many mappings
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return torch.frombuffer(memory, dtype=dtype).view(*shape)
    return torch.empty(*shape, dtype=dtype)


_WORTH_BYTES = 4 * 2**20
"""Looking through the heap takes milliseconds: not for what grew by less."""

_least_resident = 0.0
"""Since free heap last went back."""


def return_free_heap(*, always: bool = False) -> None:
    """Give free pages inside the C library's heap back to the operating system.

    glibc before 2.38 cannot reuse a freed block for an aligned block of the same size, so the holes
    that a chunk's temporaries leave add up. Does nothing where there is no glibc, nor, unless
    `always`, where this process has grown by less than 4 MiB since.
    """
    global _least_resident
    if _malloc_trim is None:
        return
    if not always:
        now = resident_bytes()
        _least_resident = min(_least_resident, now)
        if now - _least_resident < _WORTH_BYTES:
            return
    _malloc_trim(0)
    _least_resident = resident_bytes()


class HeapWatch:
    """Gives free heap back between layers, before a step would pass its plan.

    What is given back has to be mapped and zeroed again: every few layers, a tenth of a step's
    time. So holes stay while there is room for as many again.
    """

    def __init__(self, most: float | None, *, passing: float = 0.0) -> None:
        """Watch one step.

        Args:
            most: See `max_resident_bytes`; None gives free heap back every time.
            passing: Bytes that come and go while a layer runs.
        """
        self._most = most
        self._passing = passing
        self._last = math.inf

    @classmethod
    def of_step(cls, plan: Plan, parameters: Iterable[Tensor]) -> HeapWatch:
        """Watch a step that is about to begin, with all its groups of rows; see the class.

        Free heap may stay on a CPU, but not where most of what is kept lies where autograd saves
        it, between the temporaries.

        Args:
            plan: Of the step.
            parameters: The model's.
        """
        most: float | None = None
        again = [mode.recompute for row in plan.layer_modes for mode in row]
        if plan.device.kind == "cpu" and 2 * sum(again) >= len(again):
            most = max_resident_bytes(plan.estimate, parameters)
        return cls(most, passing=plan.estimate.most_bytes(Cause.WORKSPACE))

    @property
    def may_keep_free_heap(self) -> bool:
        """Whether some free heap may stay."""
        return self._most is not None

    def between_layers(self) -> None:
        """Give free heap back if what was added since the last time would not fit once more."""
        if self._most is None:
            return return_free_heap()
        now = resident_bytes()
        if now + max(self._passing, now - self._last) > self._most:
            return_free_heap(always=True)
            now = resident_bytes()
        self._last = now


def resident_bytes() -> float:
    """This process's own memory that is in RAM, without files'; infinite where nobody says."""
    try:
        # Asked between layers: without text and a buffer it takes half the time.
        with open("/proc/self/statm", "rb", buffering=0) as file:
            _, resident, shared, *_ = file.read().split()
    except OSError:
        return math.inf
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def max_resident_bytes(estimate: MemoryEstimate, parameters: Iterable[Tensor]) -> float:
    """What may be resident in a step that is about to begin.

    The step then takes no more than its estimate says, even if none of the holes is used again.

    Args:
        estimate: Of the step. Weights and what an optimizer holds are there, or not in this step.
        parameters: The model's; their gradients count as the step's own, which they are in it.
    """
    return_free_heap(always=True)
    there = sum(p.grad.nbytes for p in parameters if p.grad is not None)
    causes = (Cause.WEIGHTS, Cause.LORA, Cause.OPTIMIZER)
    there += sum(estimate.standing_bytes(cause) for cause in causes)
    return resident_bytes() + estimate.peak_bytes("device", "host") - there


def _find_malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


_malloc_trim = _find_malloc_trim()
