"""Attention of one chunk against all keys so far, as one autograd node.

The node owns the mathematics of a (layer, chunk): it stores the chunk's keys and values, runs a
backend over the segments of the chunk, and in backward adds dK/dV of the whole prefix to the store.
The store may bring the prefix in several blocks; their results are merged by log-sum-exp. What
recomputation needs comes in as a `Stash`.

[Note: why chunks run backward in reverse] dK/dV of chunk i needs the backward of all later
chunks of this layer. Each node therefore takes a `link`, an empty tensor that the previous
chunk's node of the same layer returned. Autograd sees an edge from chunk i+1 to chunk i and runs
i only after i+1: no hook, no global order, and any loss that starts from any of the chunks works.
Among nodes that are ready autograd prefers the one created last, so a chunk's backward also runs
through all layers before the chunk before it starts, and memory falls chunk by chunk.

[Note: layers that share keys] A layer that reads another layer's keys (Gemma 3n, Gemma 4) uses that
layer's store. Its gradients for them meet the owner's in the store's sums, not in autograd: the
owner's node of the same chunk runs later, because what it returned led to the reader's queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sppo_hf.attention.backends.base import (
    AttentionOutput,
    Backend,
    CausalBand,
    Documents,
    Mask,
    accumulation_dtype,
    merge_into,
)
from sppo_hf.attention.kv_cache import Keep, Keys, KVStore
from sppo_hf.attention.segments import AttentionSegment, side_by_side

# B batch rows, N query heads, K key/value heads, C tokens of this chunk, T tokens of a run of
# keys, H head size. `out` has the values' head size.


class Stash(Protocol):
    """Where a frame keeps attention's results, so that recomputation need not attend again.

    A frame may keep none: then attention runs again, on keys and values that are still there.
    """

    @property
    def is_recompute(self) -> bool:
        """Whether this is the second forward."""
        ...

    def get(self) -> tuple[Tensor, Tensor] | None:
        """Return `(out_BNCH, lse_BNC)` kept by the first forward, or None where attention runs."""
        ...

    def put(self, out_BNCH: Tensor, lse_BNC: Tensor) -> None:
        """Take the results of an attention that ran."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Everything about one (layer, chunk) that is not a differentiable tensor."""

    kv: KVStore
    chunk: int
    chunk_start: int
    segments: tuple[AttentionSegment, ...]
    backend: Backend
    scale: float
    window: int | None = None
    local: int | None = None
    """Tokens of a block whose keys alone a query sees; `segments` are cut by it already."""
    softcap: float | None = None
    borrowed: bool = False
    """Keys and values are another layer's, which has put them into `kv_cache` in this chunk; this
    call reads them and adds its share of their gradients, and that layer takes the sum."""
    stash: Stash | None = None
    counters: dict[str, int] = field(default_factory=dict)
    """Number of attention forwards really run, for the tests of invariant 3."""
    wait_for_query: Callable[[Tensor], Tensor] | None = None
    """Returns the queries once they are there, where they may be on their way when a layer that was
    recomputed comes to its attention's backward; None where they are always there."""


def chunk_attention(
    q_BNCH: Tensor,
    k_BKCH: Tensor,
    v_BKCH: Tensor,
    *,
    sinks_N: Tensor | None,
    link: Tensor | None,
    call: AttentionCall,
    keep: Keep | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend the chunk's queries to all keys so far.

    Args:
        q_BNCH: Queries of this chunk.
        k_BKCH: Keys of this chunk, positions already encoded.
        v_BKCH: Values of this chunk; their head size may differ.
        sinks_N: One learned logit per head that takes part in the softmax without a value
            (gpt-oss), or None.
        link: The link returned by the previous chunk's call in this layer; None for the first.
        call: Store, segments, backend and scale.
        keep: Gives keys and values that stay their place on the device.

    Returns:
        `out_BCNH`, the layout Transformers' attention functions return, and the link for the next
        chunk of this layer.
    """
    out_BNCH, next_link = _ChunkAttention.apply(q_BNCH, k_BKCH, v_BKCH, sinks_N, link, call, keep)
    return out_BNCH.transpose(1, 2), next_link


class _ChunkAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q_BNCH: Tensor,
        k_BKCH: Tensor,
        v_BKCH: Tensor,
        sinks_N: Tensor | None,
        link: Tensor | None,
        call: AttentionCall,
        keep: Keep
        | None,  # not in `call`: the node outlives the chunk, whose room this keeps alive
    ) -> tuple[Tensor, Tensor]:
        stashed = call.stash.get() if call.stash is not None else None
        if stashed is None:
            again = call.stash is not None and call.stash.is_recompute
            if not (call.borrowed or again):
                call.kv.put(call.chunk, k_BKCH, v_BKCH, keep=keep)
            out_BNCH, lse_BNC = _attend(q_BNCH, sinks_N, v_BKCH.shape[-1], call, again=again)
            if call.stash is not None:
                # Detached: the returned tensor gets this node as its grad_fn, and a stash that
                # held it would keep the whole graph alive in a circle.
                call.stash.put(out_BNCH.detach(), lse_BNC)
        else:
            out_BNCH, lse_BNC = stashed[0].detach(), stashed[1]
        ctx.call = call
        ctx.has_link = link is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q_BNCH, out_BNCH, lse_BNC, sinks_N)
        return out_BNCH, q_BNCH.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BNCH: Tensor | None, _dlink: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        call: AttentionCall = ctx.call
        q_BNCH, out_BNCH, lse_BNC, sinks_N = ctx.saved_tensors
        if call.wait_for_query is not None:
            q_BNCH = call.wait_for_query(q_BNCH)
        dq_BNCH = dsinks_N = None
        needs_kv = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        if dout_BNCH is not None:
            dq_BNCH = _attend_backward(dout_BNCH, q_BNCH, out_BNCH, lse_BNC, call, needs_kv)
            if sinks_N is not None and ctx.needs_input_grad[3]:
                dsinks_N = _sinks_backward(dout_BNCH, out_BNCH, lse_BNC, sinks_N)
        dk_BKCH = dv_BKCH = None
        if not call.borrowed:
            # Also without dout: later chunks may have left gradients for this chunk's keys.
            dk_BKCH, dv_BKCH = call.kv.take_gradient(call.chunk)
        dlink = q_BNCH.new_empty(0) if ctx.has_link else None
        return dq_BNCH, dk_BKCH, dv_BKCH, dsinks_N, dlink, None, None


def _attend(
    q_BNCH: Tensor, sinks_N: Tensor | None, v_head_size: int, call: AttentionCall, *, again: bool
) -> tuple[Tensor, Tensor]:
    call.counters["attention_forwards"] = call.counters.get("attention_forwards", 0) + 1
    out_BNCH, lse_BNC = _attend_to_keys(q_BNCH, v_head_size, call, again=again)
    if sinks_N is None:
        return out_BNCH.to(q_BNCH.dtype), lse_BNC
    # A sink is one more key with value zero: it joins the normaliser and nothing else.
    merged_BNC = torch.logaddexp(lse_BNC, sinks_N.to(lse_BNC.dtype)[None, :, None])
    keep = torch.exp(lse_BNC - merged_BNC)[..., None]
    return (out_BNCH.to(keep.dtype) * keep).to(q_BNCH.dtype), merged_BNC


def _attend_to_keys(
    q_BNCH: Tensor, v_head_size: int, call: AttentionCall, *, again: bool
) -> AttentionOutput:
    """Attention to all keys so far; the output is still in float32 where it was merged."""
    blocks = call.kv.blocks(call.segments, window=call.window, local=call.local)
    merging = len(blocks) > 1
    sums_dtype = accumulation_dtype(q_BNCH.dtype)
    attended: AttentionOutput | None = None
    if merging or not _is_whole(q_BNCH, call):
        out_dtype = sums_dtype if merging else q_BNCH.dtype
        num_rows, num_heads, num_tokens, _ = q_BNCH.shape
        # In memory BCNH, as kernels give their parts and the output projection takes the whole.
        out_BCNH = q_BNCH.new_zeros(num_rows, num_tokens, num_heads, v_head_size, dtype=out_dtype)
        attended = AttentionOutput(
            out_BCNH.transpose(1, 2),
            q_BNCH.new_full(q_BNCH.shape[:3], float("-inf"), dtype=sums_dtype),
        )
    # In backward another layer's forward does not come next.
    for keys in call.kv.walk(call.chunk, blocks, borrowed=call.borrowed or again):
        for segments in _calls(keys, call, len(q_BNCH)):
            rows, tokens = _where(segments, call)
            part = _forward(q_BNCH[rows, :, tokens], segments, keys, call)
            if attended is None:
                attended = part
            elif merging:
                out_BNCH, lse_BNC = attended
                merge_into(out_BNCH[rows, :, tokens], lse_BNC[rows, :, tokens], part)
            else:
                attended.out_BNCH[rows, :, tokens] = part.out_BNCH
                attended.lse_BNC[rows, :, tokens] = part.lse_BNC
    assert attended is not None, "a segment that is the whole chunk sees keys"
    return attended


def _attend_backward(
    dout_BNCH: Tensor,
    q_BNCH: Tensor,
    out_BNCH: Tensor,
    lse_BNC: Tensor,
    call: AttentionCall,
    needs_kv: bool,
) -> Tensor:
    blocks = call.kv.blocks(call.segments, window=call.window, local=call.local)
    merging = len(blocks) > 1
    dq_BNCH: Tensor | None = None
    if merging:
        dq_BNCH = torch.zeros_like(q_BNCH, dtype=accumulation_dtype(q_BNCH.dtype))
    elif not _is_whole(q_BNCH, call):
        dq_BNCH = torch.zeros_like(q_BNCH)
    for keys in call.kv.walk_back(call.chunk, blocks, borrowed=call.borrowed):
        for segments in _calls(keys, call, len(q_BNCH)):
            rows, tokens = _where(segments, call)
            attended = AttentionOutput(out_BNCH[rows, :, tokens], lse_BNC[rows, :, tokens])
            dout, q = dout_BNCH[rows, :, tokens], q_BNCH[rows, :, tokens]
            dq = _backward(dout, q, attended, segments, keys, call, needs_kv)
            if dq_BNCH is None:
                dq_BNCH = dq
            elif merging:
                dq_BNCH[rows, :, tokens] += dq
            else:
                dq_BNCH[rows, :, tokens] = dq
    assert dq_BNCH is not None, "a segment that is the whole chunk sees keys"
    return dq_BNCH.to(q_BNCH.dtype)


def _calls(
    keys: Keys, call: AttentionCall, num_rows: int
) -> Iterator[tuple[AttentionSegment, ...]]:
    """The backend's calls over these keys: the segments of each."""
    segments = keys.block.cut(call.segments)
    for run in side_by_side(segments):
        # A kernel for documents takes tokens without rows.
        if call.backend.documents_at_once and (num_rows == 1 or run[0].row is not None):
            yield run
        else:
            yield from ((segment,) for segment in run)


def _forward(
    q_BNCH: Tensor, segments: tuple[AttentionSegment, ...], keys: Keys, call: AttentionCall
) -> AttentionOutput:
    k_BKTH, v_BKTH = keys.run(segments[0].k_start, segments[-1].k_end, segments[0].row)
    return call.backend.forward(
        *(q_BNCH, k_BKTH, v_BKTH),
        band=_mask(segments, call.window),
        scale=call.scale,
        softcap=call.softcap,
    )


def _backward(
    dout_BNCH: Tensor,
    q_BNCH: Tensor,
    attended: AttentionOutput,
    segments: tuple[AttentionSegment, ...],
    keys: Keys,
    call: AttentionCall,
    needs_kv: bool,
) -> Tensor:
    k_BKTH, v_BKTH = keys.run(segments[0].k_start, segments[-1].k_end, segments[0].row)
    grads = call.backend.backward(
        *(dout_BNCH, q_BNCH, k_BKTH, v_BKTH, *attended),
        band=_mask(segments, call.window),
        scale=call.scale,
        softcap=call.softcap,
    )
    if needs_kv:
        keys.add_gradient(segments[0].k_start, grads.dk_BKTH, grads.dv_BKTH, segments[0].row)
    return grads.dq_BNCH


def _mask(segments: tuple[AttentionSegment, ...], window: int | None) -> Mask:
    if len(segments) == 1:
        return CausalBand(segments[0].q_start - segments[0].k_start, window)
    num_queries = tuple(segment.q_end - segment.q_start for segment in segments)
    num_keys = tuple(segment.k_end - segment.k_start for segment in segments)
    return Documents(num_queries, num_keys, window)


def _where(segments: tuple[AttentionSegment, ...], call: AttentionCall) -> tuple[slice, slice]:
    row, start = segments[0].row, call.chunk_start
    rows = slice(None) if row is None else slice(row, row + 1)
    return rows, slice(segments[0].q_start - start, segments[-1].q_end - start)


def _is_whole(q_BNCH: Tensor, call: AttentionCall) -> bool:
    if len(call.segments) != 1:
        return False
    (segment,) = call.segments
    return segment.row is None and segment.q_end - segment.q_start == q_BNCH.shape[2]


def _sinks_backward(
    dout_BNCH: Tensor, out_BNCH: Tensor, lse_BNC: Tensor, sinks_N: Tensor
) -> Tensor:
    """Gradient of the sink logits: -p_sink * sum(dout * out), as for a key with value zero."""
    dtype = lse_BNC.dtype
    delta_BNC = (dout_BNCH.to(dtype) * out_BNCH.to(dtype)).sum(-1)
    p_sink_BNC = torch.exp(sinks_N.to(dtype)[None, :, None] - lse_BNC)
    return -(p_sink_BNC * delta_BNC).sum(dim=(0, 2)).to(sinks_N.dtype)
