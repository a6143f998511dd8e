"""Warm-up of attention kernels that build a plan for each shape, before a step runs.

cuDNN compiles a plan for every new shape. That takes about a second, once per calling thread, and
memory from the driver, which has none in the middle of a step: PyTorch's allocator holds what is
free. `WarmUp` runs one layer's attention on zeros, chunk by chunk, through the same code as the
step, so that the kernel gets the same shapes, layouts and masks, forward in the caller's thread and
backward in autograd's. Only the kernel's plans remain.

All K/V of the layer exist meanwhile, as in the step. K/V that the step offloads take no memory
here; they are loaded as zeros, block by block.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from sppo_hf.attention.backends.base import (
    AttentionOutput,
    Backend,
    Gradients,
    Mask,
    Scores,
    determinism,
    empty_forward,
)
from sppo_hf.attention.chunk_attention import AttentionCall, chunk_attention
from sppo_hf.attention.kv_cache import KVStore, KVStream, KVTransfer, LayerKV
from sppo_hf.attention.segments import BidirectionalSpan, Bounds, RowSpans, chunk_segments

# B batch rows, N query heads, K key/value heads, C tokens of a chunk, T tokens of a run of keys, H
# head size.

MAX_REMEMBERED = 256
"""Maximum (layer, rows) pairs that are remembered; packed rows differ from batch to batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """Attention of one kind of layer on this rank."""

    num_heads: int
    num_kv_heads: int
    qk_head_size: int
    v_head_size: int
    window: int | None
    local: int | None = None
    """Block length of local attention in tokens, see `AttentionCall`."""
    chosen: bool = False
    """Whether an indexer chooses the keys that queries read."""
    softcap: float | None
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedRows:
    """The rows that run together, and their chunks."""

    batch_rows: int
    bounds: Bounds
    """`(start, end)` of every chunk, in tokens."""
    chunks: range
    """Chunks that run here; K/V of all earlier ones exist."""
    spans: tuple[RowSpans, ...] | None = None
    """Documents and padding of every row; None where each is one document."""
    bidirectional: tuple[BidirectionalSpan, ...] = ()
    """Tokens that see each other in both directions, in any kind of layer."""
    block_tokens: int | None = None
    """Tokens of a K/V block if K/V are offloaded; None if all are on the device."""
    backward: bool = True
    """Whether a backward follows."""
    reruns_attention: bool = False
    """Whether attention of some layers is recomputed in backward."""


class WarmUp:
    """Remembers which shapes kernels have built plans for, and builds the missing ones."""

    def __init__(self, *, budget_seconds: float) -> None:
        """Begin with no shape built.

        After `budget_seconds` of a `run` no new shape is started; the step itself builds the rest.
        """
        self._budget_seconds = budget_seconds
        self._built: set[Any] = set()
        """Shapes that have a plan. Not bounded: the kernel's plans, which stay too, are larger."""
        self._done: dict[Any, None] = {}
        """Calls of `run` that need not be repeated, least recently used first."""

    def run(
        self, layer: LayerAttention, rows: ChunkedRows, backend: Backend, device: torch.device
    ) -> int:
        """Run `backend` on all shapes such layers need for such rows; returns how many are new.

        Does nothing for backends without plans, and for what was run before.
        """
        key = (_thread(), backend, determinism(), layer, rows, device)
        if not backend.plans_each_shape:
            return 0
        if key in self._done:
            self._done[key] = self._done.pop(key)
            return 0
        deadline = time.monotonic() + self._budget_seconds
        kernel = _NewShapesOnly(backend, self._built, rows.reruns_attention, device, deadline)
        with torch.set_grad_enabled(rows.backward):
            _attend_layer(layer, rows, kernel, device)
        self._done[key] = None  # not if memory ran out, which the next call may have
        if len(self._done) > MAX_REMEMBERED:
            del self._done[next(iter(self._done))]
        if kernel.new and device.type == "cuda":
            torch.cuda.empty_cache()  # the driver needs it for the plans of other shapes
        return kernel.new


def _attend_layer(
    layer: LayerAttention, rows: ChunkedRows, backend: Backend, device: torch.device
) -> None:
    """Run one layer's attention on zeros: forward of every chunk and, if needed, backward."""

    def zeros(heads: int, tokens: int, size: int) -> Tensor:
        """Return zeros in the layout of projections, `[B, tokens, heads, H]` in memory."""
        shape = (rows.batch_rows, tokens, heads, size)
        return torch.zeros(shape, dtype=layer.dtype, device=device).transpose(1, 2)

    def keys_and_values(chunk: int) -> tuple[Tensor, Tensor]:
        start, end = rows.bounds[chunk]
        sizes = (layer.qk_head_size, layer.v_head_size)
        k, v = (zeros(layer.num_kv_heads, end - start, size) for size in sizes)
        return k, v

    store: KVStore = LayerKV(rows.bounds)
    if rows.block_tokens is not None:
        stream = KVStream(
            _ZerosTransfer(device),
            rows.bounds,
            rows=rows.spans,
            block_tokens=rows.block_tokens,
            linked=False,
        )
        store = stream.add_layer()
    for chunk in range(rows.chunks.stop):
        store.put_attended(chunk, *keys_and_values(chunk))
    # In reverse, so that each backward frees the keys that no other chunk reads.
    for chunk in reversed(rows.chunks):
        start, end = rows.bounds[chunk]
        call = AttentionCall(
            kv=store,
            chunk=chunk,
            chunk_start=start,
            segments=chunk_segments(start, end, rows.spans, window=layer.window, local=layer.local),
            backend=backend,
            scale=layer.qk_head_size**-0.5,
            window=layer.window,
            local=layer.local,
            softcap=layer.softcap,
            spans=tuple(span for span in rows.bidirectional if start <= span.start < end),
        )
        q, (k, v) = zeros(layer.num_heads, end - start, layer.qk_head_size), keys_and_values(chunk)
        q, k, v = (x.requires_grad_(rows.backward) for x in (q, k, v))
        out_BCNH, _ = chunk_attention(q, k, v, sinks_N=None, link=None, call=call)
        if rows.backward:
            # In the thread that autograd has for the device.
            torch.autograd.grad(out_BCNH, (q, k, v), torch.zeros_like(out_BCNH))


def _thread() -> int:
    """Return the thread, because kernels keep their plans per thread."""
    return threading.get_ident()


@dataclass(eq=False)
class _NewShapesOnly(Backend):
    """Calls a backend for shapes that are new in this thread; returns zeros for all others."""

    backend: Backend
    built: set[Any]
    reruns_attention: bool
    device: torch.device
    deadline: float

    def __post_init__(self) -> None:
        self.name = self.backend.name
        self.documents_at_once = self.backend.documents_at_once
        self.new = 0

    def reason_unsupported(self, requirement: Any) -> str | None:
        return self.backend.reason_unsupported(requirement)

    def forward(
        self, q_BNCH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, **scores: Unpack[Scores]
    ) -> AttentionOutput:
        tensors = (q_BNCH, k_BKTH, v_BKTH)
        run = functools.partial(self.backend.forward, *tensors, **scores)
        found = self._run_new("forward", tensors, scores["band"], run)
        return empty_forward(q_BNCH, v_BKTH.shape[3]) if found is None else found

    def backward(self, *given: Tensor, **scores: Unpack[Scores]) -> Gradients:
        attended = given[1:4]
        if self.reruns_attention:
            self.forward(*attended, **scores)
        run = functools.partial(self.backend.backward, *given, **scores)
        found = self._run_new("backward", attended, scores["band"], run)
        return Gradients(*map(torch.zeros_like, attended)) if found is None else found

    def _run_new(
        self, direction: str, tensors: tuple[Tensor, ...], band: Mask, run: Callable[[], Any]
    ) -> Any:
        layouts = tuple((tuple(x.shape), x.stride(), x.dtype) for x in tensors)
        key = (_thread(), self.backend, determinism(), direction, layouts, band)
        if key in self.built or time.monotonic() >= self.deadline:
            return None
        found = run()
        self.built.add(key)
        self.new += 1
        if self.device.type == "cuda":
            # So that its time counts against the deadline, and its memory is free again.
            torch.cuda.current_stream(self.device).synchronize()
        return found


class _ZerosTransfer(KVTransfer):
    """Drops the bytes of offloaded tensors; a handle keeps shape, strides and dtype."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to("meta")

    def prefetch(self, handle: Tensor) -> None:
        pass

    def fetch(self, handle: Tensor) -> Tensor:
        return torch.zeros_like(handle, device=self._device)

    def evict(self, handle: Tensor) -> None:
        pass

    def release(self, handle: Tensor) -> None:
        pass

    def settle(self) -> None:
        pass
