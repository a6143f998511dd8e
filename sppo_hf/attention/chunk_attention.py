"""Attention of one chunk against all keys so far, as one autograd node.

The node of a (layer, chunk) stores the chunk's keys and values, runs a backend over the chunk's
segments, and in backward adds dK/dV of the whole prefix to the store. The store may provide the
prefix in several blocks; their results are merged by log-sum-exp. A `Stash` keeps the results for a
recomputed layer, so that its attention need not run again.

[Note: why chunks run backward in reverse] dK/dV of chunk i needs the backward of all later
chunks of this layer. Each node therefore takes a `link`, an empty tensor that the previous
chunk's node of the same layer returned. Autograd sees an edge from chunk i+1 to chunk i and runs
i only after i+1: no hook, no global order, and any loss that starts from any of the chunks works.
Among nodes that are ready autograd prefers the one created last, so a chunk's backward also runs
through all layers before the chunk before it starts, and memory falls chunk by chunk.

[Note: layers that share keys] A layer that reads another layer's K/V (Gemma 3n, Gemma 4) uses that
layer's store. Its gradients for them are added to the owner's in the store, not by autograd: the
owner's node of the same chunk runs backward later, because the reader's queries depend on it.

[Note: tokens that see each other in both directions] Such a span lies within one chunk. Its queries
attend causally, as all do, and then to the later keys of the span: of n tokens the first n - 1
queries to the last n - 1 keys. Seen from the end of the span this is a causal mask, so every
backend can do it on reversed tokens; results are merged by log-sum-exp. Where a sliding window does
not count within a span, its last queries attend to its first keys, too: causally, by the window's
distance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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
from sppo_hf.attention.kv_cache import Keep, KVStore, LayerKV
from sppo_hf.attention.segments import AttentionSegment, BidirectionalSpan, group_adjacent

# B batch rows, N query heads, K key/value heads, C tokens of this chunk, T tokens of a run of
# keys, S keys that a query may read, H head size. `out` has the values' head size.


class Stash(Protocol):
    """Keeps attention's results for a recomputed layer.

    It may keep none; attention is then recomputed, on keys and values that are still in the store.
    """

    @property
    def is_recompute(self) -> bool:
        """Whether this forward recomputes the layer in backward."""
        ...

    def get(self) -> tuple[Tensor, Tensor] | None:
        """Return `(out_BNCH, lse_BNC)` of the first forward, or None where attention must run."""
        ...

    def put(self, out_BNCH: Tensor, lse_BNC: Tensor) -> None:
        """Take the results of attention that has just run."""
        ...

    def begin_choice(self) -> None:
        """An indexer chooses keys from here to `end_choice`, before attention."""
        ...

    def end_choice(self, indices_BCS: Tensor | None) -> None:
        """Take what it has chosen, see `AttentionCall.indices_BCS`; None for all visible keys."""
        ...

    def chosen(self) -> Tensor | None:
        """Return what was chosen in the first forward."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Everything about the attention of one (layer, chunk) that is not a differentiable tensor."""

    kv: KVStore
    chunk: int
    """Index of the chunk."""
    chunk_start: int
    """Position of its first token in the sequence."""
    segments: tuple[AttentionSegment, ...]
    """Which of the chunk's queries see which keys, see `chunk_segments`."""
    backend: Backend
    scale: float
    window: int | None = None
    """Sliding window in tokens, the query's own included; None sees all earlier keys."""
    local: int | None = None
    """Block length in tokens of Llama 4's local attention, by which `segments` are cut already."""
    softcap: float | None = None
    spans: tuple[BidirectionalSpan, ...] = ()
    """Tokens of the chunk that see each other in both directions."""
    indices_BCS: Tensor | None = None
    """Places in the sequence of the keys that each query reads of those that it sees, int32; None
    for all. The node does not keep them here, but as a saved tensor."""
    borrowed: bool = False
    """Whether K/V belong to another layer, which has put them into `kv` in this chunk. This call
    reads them and adds its share of their gradients; the other layer takes the sum."""
    stash: Stash | None = None
    counters: dict[str, int] = field(default_factory=dict)
    """Counts the attention forwards that ran, for the tests that each runs once."""
    wait_for_query: Callable[[Tensor], Tensor] | None = None
    """Waits until the queries' copy to the device is over and returns them; None where they are
    always on the device when backward of a recomputed layer needs them."""


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

    Positions of the keys are already encoded; the values' head size may differ. `sinks_N` has one
    learned logit per head that takes part in the softmax without a value (gpt-oss), `link` is what
    the previous chunk's call in this layer returned, None for the first. `keep` copies K/V that are
    kept on the device to where they can stay; None keeps them in place.

    Returns:
        `out_BCNH`, the layout Transformers' attention functions return, and the link for the next
        chunk of this layer.
    """
    indices_BCS, call = call.indices_BCS, replace(call, indices_BCS=None)
    out_BNCH, next_link = _ChunkAttention.apply(
        q_BNCH, k_BKCH, v_BKCH, sinks_N, link, indices_BCS, call, keep
    )
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
        indices_BCS: Tensor | None,
        call: AttentionCall,
        # Not a field of `call`, which the node keeps: `keep` holds memory of the running chunk.
        keep: Keep | None,
    ) -> tuple[Tensor, Tensor]:
        stashed = call.stash.get() if call.stash is not None else None
        if stashed is None:
            recompute = call.stash is not None and call.stash.is_recompute
            if not (call.borrowed or recompute):
                call.kv.put(call.chunk, k_BKCH, v_BKCH, keep=keep)
            choosing = replace(call, indices_BCS=indices_BCS)
            out_BNCH, lse_BNC = _attend(
                q_BNCH, sinks_N, v_BKCH.shape[-1], choosing, recompute=recompute
            )
            if call.stash is not None:
                # Detached: the returned tensor gets this node as its grad_fn, and a stash that held
                # it would form a reference cycle with the graph.
                call.stash.put(out_BNCH.detach(), lse_BNC)
        else:
            out_BNCH, lse_BNC = stashed[0].detach(), stashed[1]
        ctx.call = call
        ctx.has_link = link is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q_BNCH, out_BNCH, lse_BNC, sinks_N, indices_BCS)
        return out_BNCH, q_BNCH.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BNCH: Tensor | None, _dlink: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        q_BNCH, out_BNCH, lse_BNC, sinks_N, indices_BCS = ctx.saved_tensors
        call: AttentionCall = replace(ctx.call, indices_BCS=indices_BCS)
        if call.wait_for_query is not None:
            q_BNCH = call.wait_for_query(q_BNCH)
        dq_BNCH = dsinks_N = None
        needs_kv = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        if dout_BNCH is not None:
            dq_BNCH = _attend_backward(dout_BNCH, q_BNCH, out_BNCH, lse_BNC, call, needs_kv)
            if ctx.needs_input_grad[3]:
                dsinks_N = _sinks_backward(dout_BNCH, out_BNCH, lse_BNC, sinks_N)
        dk_BKCH = dv_BKCH = None
        if not call.borrowed:
            # Also without dout: later chunks may have added gradients for this chunk's keys.
            dk_BKCH, dv_BKCH = call.kv.take_gradient(call.chunk)
        dlink = q_BNCH.new_empty(0) if ctx.has_link else None
        return dq_BNCH, dk_BKCH, dv_BKCH, dsinks_N, dlink, None, None, None


def _attend(
    q_BNCH: Tensor,
    sinks_N: Tensor | None,
    v_head_size: int,
    call: AttentionCall,
    *,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    call.counters["attention_forwards"] = call.counters.get("attention_forwards", 0) + 1
    out_BNCH, lse_BNC = _attend_to_keys(q_BNCH, v_head_size, call, recompute=recompute)
    if sinks_N is None:
        return out_BNCH.to(q_BNCH.dtype), lse_BNC
    # A sink is one more key with value zero: it changes only the softmax's denominator.
    merged_BNC = torch.logaddexp(lse_BNC, sinks_N.to(lse_BNC.dtype)[None, :, None])
    keep = torch.exp(lse_BNC - merged_BNC)[..., None]
    return (out_BNCH.to(keep.dtype) * keep).to(q_BNCH.dtype), merged_BNC


def _attend_to_keys(
    q_BNCH: Tensor, v_head_size: int, call: AttentionCall, *, recompute: bool
) -> AttentionOutput:
    """Attend to all keys so far; a merged output is returned in the accumulation dtype."""
    blocks = call.kv.blocks(call.segments, window=call.window, local=call.local)
    merging = len(blocks) > 1 or bool(call.spans)
    sums_dtype = accumulation_dtype(q_BNCH.dtype)
    attended: AttentionOutput | None = None
    if merging or not _is_whole(q_BNCH, call):
        out_dtype = sums_dtype if merging else q_BNCH.dtype
        num_rows, num_heads, num_tokens, _ = q_BNCH.shape
        # [B, C, N, H] in memory, the layout of kernels' results and of the output projection.
        out_BCNH = q_BNCH.new_zeros(num_rows, num_tokens, num_heads, v_head_size, dtype=out_dtype)
        attended = AttentionOutput(
            out_BCNH.transpose(1, 2),
            q_BNCH.new_full(q_BNCH.shape[:3], float("-inf"), dtype=sums_dtype),
        )
    # In a recomputed layer the next layer's forward does not follow: prefetch nothing for it.
    for kv_block in call.kv.forward_blocks(call.chunk, blocks, borrowed=call.borrowed or recompute):
        for segments in _backend_calls(kv_block, call, len(q_BNCH)):
            rows, tokens = _slices(segments, call)
            part = _forward(q_BNCH[rows, :, tokens], segments, kv_block, call)
            if attended is None:
                attended = part
            elif merging:
                out_BNCH, lse_BNC = attended
                merge_into(out_BNCH[rows, :, tokens], lse_BNC[rows, :, tokens], part)
            else:
                attended.out_BNCH[rows, :, tokens] = part.out_BNCH
                attended.lse_BNC[rows, :, tokens] = part.lse_BNC
        for found in _span_segments(kv_block, call):
            assert attended is not None, "where spans are, results are merged"
            _merge_span_segments(q_BNCH, attended, found, kv_block, call)
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
    merging = len(blocks) > 1 or bool(call.spans)
    dq_BNCH: Tensor | None = None
    if merging:
        dq_BNCH = torch.zeros_like(q_BNCH, dtype=accumulation_dtype(q_BNCH.dtype))
    elif not _is_whole(q_BNCH, call):
        dq_BNCH = torch.zeros_like(q_BNCH)
    for kv_block in call.kv.backward_blocks(call.chunk, blocks, borrowed=call.borrowed):
        for segments in _backend_calls(kv_block, call, len(q_BNCH)):
            rows, tokens = _slices(segments, call)
            attended = AttentionOutput(out_BNCH[rows, :, tokens], lse_BNC[rows, :, tokens])
            dout, q = dout_BNCH[rows, :, tokens], q_BNCH[rows, :, tokens]
            dq = _backward(dout, q, attended, segments, kv_block, call, needs_kv)
            if dq_BNCH is None:
                dq_BNCH = dq
            elif merging:
                dq_BNCH[rows, :, tokens] += dq
            else:
                dq_BNCH[rows, :, tokens] = dq
        for found in _span_segments(kv_block, call):
            assert dq_BNCH is not None, "where spans are, results are merged"
            whole = AttentionOutput(out_BNCH, lse_BNC)
            _add_span_gradients(dout_BNCH, q_BNCH, whole, dq_BNCH, found, kv_block, call, needs_kv)
    assert dq_BNCH is not None, "a segment that is the whole chunk sees keys"
    return dq_BNCH.to(q_BNCH.dtype)


def _backend_calls(
    kv_block: LayerKV, call: AttentionCall, num_rows: int
) -> Iterator[tuple[AttentionSegment, ...]]:
    """Yield the segments of each backend call over these keys."""
    segments = kv_block.block.cut(call.segments)
    for run in group_adjacent(segments):
        # Kernels for packed documents take the tokens of one row.
        if call.backend.documents_at_once and (num_rows == 1 or run[0].row is not None):
            yield run
        else:
            yield from ((segment,) for segment in run)


def _forward(
    q_BNCH: Tensor, segments: tuple[AttentionSegment, ...], kv_block: LayerKV, call: AttentionCall
) -> AttentionOutput:
    k_BKTH, v_BKTH = kv_block.run(segments[0].k_start, segments[-1].k_end, segments[0].row)
    return call.backend.forward(
        *(q_BNCH, k_BKTH, v_BKTH),
        band=_mask_of(segments, call.window),
        scale=call.scale,
        softcap=call.softcap,
        chosen_BCS=_chosen(segments, call),
    )


def _chosen(segments: tuple[AttentionSegment, ...], call: AttentionCall) -> Tensor | None:
    """Return the keys that the queries of `segments` read, from the first that these see."""
    if call.indices_BCS is None:
        return None
    return call.indices_BCS[_slices(segments, call)] - segments[0].k_start


def _backward(
    dout_BNCH: Tensor,
    q_BNCH: Tensor,
    attended: AttentionOutput,
    segments: tuple[AttentionSegment, ...],
    kv_block: LayerKV,
    call: AttentionCall,
    needs_kv: bool,
) -> Tensor:
    k_BKTH, v_BKTH = kv_block.run(segments[0].k_start, segments[-1].k_end, segments[0].row)
    grads = call.backend.backward(
        *(dout_BNCH, q_BNCH, k_BKTH, v_BKTH, *attended),
        band=_mask_of(segments, call.window),
        scale=call.scale,
        softcap=call.softcap,
        chosen_BCS=_chosen(segments, call),
    )
    if needs_kv:
        kv_block.add_gradient(segments[0].k_start, grads.dk_BKTH, grads.dv_BKTH, segments[0].row)
    return grads.dq_BNCH


_SpanSegments = tuple[tuple[AttentionSegment, ...], bool]
"""Segments of equal length of spans whose tokens see each other, and whether they are reversed."""


def _span_segments(kv_block: LayerKV, call: AttentionCall) -> Iterator[_SpanSegments]:
    """Yield what spans whose keys are in this block need beside the causal segments."""
    alike: dict[tuple[int, bool], list[AttentionSegment]] = {}
    for span in call.spans:
        if kv_block.block.start <= span.start and span.end <= kv_block.block.end:
            for segment, is_reversed in span.segments(call.window):
                key = segment.q_end - segment.q_start, is_reversed
                alike.setdefault(key, []).append(segment)
    for (_, is_reversed), segments in alike.items():
        yield tuple(segments), is_reversed


def _merge_span_segments(
    q_BNCH: Tensor,
    attended: AttentionOutput,
    found: _SpanSegments,
    kv_block: LayerKV,
    call: AttentionCall,
) -> None:
    """Merge what the queries of `found` see of its keys into `attended`."""
    part = call.backend.forward(
        *(_span_queries(q_BNCH, found, call), *_span_keys(kv_block, found)),
        band=CausalBand(0),
        scale=call.scale,
        softcap=call.softcap,
    )
    out, lse = (_turned(x, found) for x in part)
    for index, segment in enumerate(found[0]):
        rows, tokens = _slices((segment,), call)
        of_segment = AttentionOutput(out[index : index + 1], lse[index : index + 1])
        merge_into(
            attended.out_BNCH[rows, :, tokens], attended.lse_BNC[rows, :, tokens], of_segment
        )


def _add_span_gradients(
    dout_BNCH: Tensor,
    q_BNCH: Tensor,
    attended: AttentionOutput,
    dq_BNCH: Tensor,
    found: _SpanSegments,
    kv_block: LayerKV,
    call: AttentionCall,
    needs_kv: bool,
) -> None:
    """Add the gradients of `_merge_span_segments` to `dq_BNCH` and to the sums of the keys."""
    dout, q, out, lse = (_span_queries(x, found, call) for x in (dout_BNCH, q_BNCH, *attended))
    grads = call.backend.backward(
        *(dout, q, *_span_keys(kv_block, found), out, lse),
        band=CausalBand(0),
        scale=call.scale,
        softcap=call.softcap,
    )
    dq, dk, dv = (_turned(x, found) for x in grads)
    for index, segment in enumerate(found[0]):
        rows, tokens = _slices((segment,), call)
        one = slice(index, index + 1)
        dq_BNCH[rows, :, tokens] += dq[one]
        if needs_kv:
            kv_block.add_gradient(segment.k_start, dk[one], dv[one], segment.row)


def _span_queries(x_BNC: Tensor, found: _SpanSegments, call: AttentionCall) -> Tensor:
    """Return what belongs to the queries of `found`, a batch row per segment."""
    slices = [_slices((segment,), call) for segment in found[0]]
    return _turned(torch.cat([x_BNC[rows, :, tokens] for rows, tokens in slices]), found)


def _span_keys(kv_block: LayerKV, found: _SpanSegments) -> tuple[Tensor, Tensor]:
    """Return the keys and values of `found`, a batch row per segment."""
    pairs = [kv_block.run(one.k_start, one.k_end, one.row) for one in found[0]]
    k_BKCH, v_BKCH = (_turned(torch.cat(xs), found) for xs in zip(*pairs, strict=True))
    return k_BKCH, v_BKCH


def _turned(x_BNC: Tensor, found: _SpanSegments) -> Tensor:
    return x_BNC.flip(2) if found[1] else x_BNC


def _mask_of(segments: tuple[AttentionSegment, ...], window: int | None) -> Mask:
    if len(segments) == 1:
        return CausalBand(segments[0].q_start - segments[0].k_start, window)
    num_queries = tuple(segment.q_end - segment.q_start for segment in segments)
    num_keys = tuple(segment.k_end - segment.k_start for segment in segments)
    return Documents(num_queries, num_keys, window)


def _slices(segments: tuple[AttentionSegment, ...], call: AttentionCall) -> tuple[slice, slice]:
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
