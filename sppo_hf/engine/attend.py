"""The attention function that Transformers calls while a chunk runs.

Registered once with AttentionInterface under `IMPLEMENTATION`; a model's configs point to it only
while one of its chunks runs. Which layer and chunk attends, it finds in the `ChunkContext`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from sppo_hf.attention.backends.base import AttentionSpec, Backend
from sppo_hf.attention.chunk_attention import AttentionCall, chunk_attention
from sppo_hf.attention.kv_cache import KVStore
from sppo_hf.attention.segments import chunk_pieces
from sppo_hf.engine.attention_interface import IMPLEMENTATION, MaskMeaning, attention_implementation
from sppo_hf.engine.chunk_context import ChunkContext, current
from sppo_hf.engine.sequence_group import (
    SequenceGroup,
    check_heads,
    local_heads,
    needed_kv_heads,
    rank_tokens,
    select_kv_heads,
)
from sppo_hf.errors import SPPOError, UnsupportedModelError


@contextlib.contextmanager
def chunked_attention(context: ChunkContext) -> Iterator[None]:
    """Let Transformers call our attention and masks in the context's model, in this context."""
    with attention_implementation(IMPLEMENTATION, context.model.configs), context.entered():
        yield


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of the running chunk, in the signature of Transformers' attention functions.

    Args:
        module: The attention module; only named in errors.
        query: `[B, N, C, H]`, positions encoded; of a shared chunk, the tokens of this rank.
        key: `[B, K, C, H]`, positions encoded; likewise.
        value: `[B, K, C, Hv]`; likewise.
        attention_mask: The `MaskMeaning` that stands for the mask while chunks run.
        scaling: Factor of the logits; `H ** -0.5` if None.
        dropout: Must be zero.
        softcap: Cap of the logits, or None.
        s_aux: One sink logit per head, or None.
        **others: What other backends need; windows come with the mask. Those that would change
            the result are refused.

    Returns:
        `[B, C, N, Hv]` and None for the attention weights.

    Raises:
        UnsupportedModelError: If the call asks for what chunked attention cannot do exactly.
        ConfigError: If the ranks that share the chunk cannot share its heads.
    """
    context = _context_for(module)
    _refuse(context, module, attention_mask, dropout, others)
    store, borrowed = _store_of(context, key, value)
    query, key, value = (_autocast(x) for x in (query, key, value))
    own_tokens = query.shape[2]
    if context.group is not None:
        query, key, value, s_aux = _own_heads(
            context, context.group, query, key, value, s_aux, needs_keys=not borrowed
        )
    if context.on_kv is not None:
        context.on_kv(key.detach(), value.detach())
    window, local = attention_mask.window, attention_mask.local
    out, context.attended.link = chunk_attention(
        query,
        key,
        value,
        sinks_N=s_aux,
        link=context.link,
        keep=context.keep,
        call=AttentionCall(
            kv=store,
            chunk=context.chunk,
            chunk_start=context.start,
            pieces=chunk_pieces(
                context.start, context.end, context.rows, window=window, local=local
            ),
            backend=_backend(context, query, key, value, attention_mask, softcap),
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=window,
            local=local,
            softcap=softcap,
            borrowed=borrowed,
            stash=context.stash,
            counters=context.counters,
            wait_for_query=None if context.group is None else context.group.wait_for,
        ),
    )
    if context.group is not None:
        out = _own_tokens(context, context.group, out)
        if out.shape[1] < own_tokens:  # see [Note: a rank without tokens] in sequence_group
            out = F.pad(out, (0, 0, 0, 0, 0, own_tokens - out.shape[1]))
    return out.contiguous(), None


def _context_for(module: nn.Module) -> ChunkContext:
    """The context of the layer in which `module` attends."""
    context = current()
    if context is None:
        raise SPPOError(
            f"{type(module).__name__} was called with sppo_hf's attention outside a chunk. "
            "Do not set attn_implementation='sppo' yourself; use SPPOPlugin."
        )
    if context.layer is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends outside the decoder layers, which chunks do not "
            "reach. Train the model without sppo_hf."
        )
    return context


def _store_of(context: ChunkContext, key: Tensor, value: Tensor) -> tuple[KVStore, bool]:
    """Where the layer's keys and values are, and whether another layer has put them there."""
    store = None if context.owners is None else context.owners.store_of(key, value)
    if store is not None:
        return store, True
    assert context.kv is not None, "a layer without keys and values was refused"
    if context.owners is not None:
        context.owners.add(key, value, context.kv)
    return context.kv, False


def _backend(
    context: ChunkContext,
    q_BNCH: Tensor,
    k_BKCH: Tensor,
    v_BKCH: Tensor,
    mask: MaskMeaning,
    softcap: float | None,
) -> Backend:
    assert context.choose_backend is not None, "layers run with a choice of backends"
    return context.choose_backend(
        AttentionSpec(
            device_type=q_BNCH.device.type,
            dtype=q_BNCH.dtype,
            qk_head_size=q_BNCH.shape[-1],
            v_head_size=v_BKCH.shape[-1],
            softcap=softcap is not None,
            window=mask.window is not None,
            gqa_ratio=q_BNCH.shape[1] // k_BKCH.shape[1],
            varied=context.rows is not None or mask.local is not None,
        )
    )


def _own_heads(
    context: ChunkContext,
    group: SequenceGroup,
    q_BNcH: Tensor,
    k_BKcH: Tensor,
    v_BKcH: Tensor,
    sinks_N: Tensor | None,
    *,
    needs_keys: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """This rank's heads of all tokens of a shared chunk: queries, keys, values and sinks.

    Nobody reads the keys and values of a layer that runs again or that borrows another's: those
    are not sent.
    """
    num_heads, tokens = q_BNcH.shape[1], context.end - context.start
    heads = None
    if group.head_blocks is None:
        check_heads(num_heads, group.size, f"layer {context.layer} of {context.model.name}")
        heads = needed_kv_heads(num_heads, k_BKcH.shape[1], group.size)
    first, end = rank_tokens(context.start, context.end, group.rank, group.size)
    if first == end:
        q_BNcH, k_BKcH, v_BKcH = (x[:, :, :0] for x in (q_BNcH, k_BKcH, v_BKcH))
    k_BKcH, v_BKcH = select_kv_heads(k_BKcH, heads), select_kv_heads(v_BKcH, heads)
    if sinks_N is not None:
        mine = local_heads(num_heads, group.rank, group.size, group.head_blocks)
        sinks_N = sinks_N[mine.start : mine.stop]
    # See [Note: what an exchange hides behind] in sequence_group.
    again = context.exchanged
    if again is not None:
        again.query = again.query or group.start_tokens_to_heads(q_BNcH.detach(), tokens)
        q_BNCH = _as_of(q_BNcH, again.query.pending())
    elif needs_keys:
        coming = [group.start_tokens_to_heads(x, tokens) for x in (q_BNcH, k_BKcH, v_BKcH)]
        q_BNCH, k_BKCH, v_BKCH = (exchange.wait() for exchange in coming)
        return q_BNCH, k_BKCH, v_BKCH, sinks_N
    else:
        q_BNCH = group.start_tokens_to_heads(q_BNcH, tokens).wait()
    k_BKCH, v_BKCH = (_unsent(x, group, tokens) for x in (k_BKcH, v_BKcH))
    return q_BNCH, k_BKCH, v_BKCH, sinks_N


def _own_tokens(context: ChunkContext, group: SequenceGroup, out_BCNH: Tensor) -> Tensor:
    """Attention's output of this rank's tokens, `[B, c, N, H]`."""
    if context.exchanged is not None:
        return _as_of(out_BCNH, context.exchanged.out.wait().transpose(1, 2))
    return group.start_heads_to_tokens(out_BCNH.transpose(1, 2)).wait().transpose(1, 2)


def _unsent(x_BKcH: Tensor, group: SequenceGroup, tokens: int) -> Tensor:
    rows, num_heads, _, head_size = x_BKcH.shape
    own = local_heads(num_heads, group.rank, group.size, group.head_blocks)
    return _as_of(x_BKcH, x_BKcH.detach().new_empty(rows, len(own), tokens, head_size))


def _as_of(x: Tensor, found: Tensor) -> Tensor:
    """Let `found` need a gradient where `x` does; of a layer that runs again, none ever comes."""
    return found.requires_grad_(x.requires_grad and torch.is_grad_enabled())


_CHANGE_THE_RESULT = ("position_bias", "indices", "block_indices", "sinks")


def _refuse(
    context: ChunkContext, module: nn.Module, mask: Any, dropout: float, others: dict[str, Any]
) -> None:
    context.attended.times += 1
    reason = None
    foreign = [name for name in _CHANGE_THE_RESULT if others.get(name) is not None]
    if context.attended.times > 1:
        reason = "one of its decoder layers attends twice"
    elif context.kv is None:
        reason = f"layer {context.layer} attends, and is said to have no keys and values"
    elif not isinstance(mask, MaskMeaning):
        reason = "its attention mask does not come from Transformers' masking utilities"
    elif mask.refusal is not None:
        raise mask.refusal
    elif getattr(module, "is_causal", True) is False:
        reason = (
            f"{type(module).__name__} is not causal by itself (is_causal=False), so that what it "
            "sees without a mask depends on its kernel"
        )
    elif foreign or others.get("is_causal") is False:
        reason = f"its attention is given {', '.join(foreign) or 'is_causal=False'}"
    elif dropout:
        reason = f"{type(module).__name__} drops attention probabilities (dropout={dropout})"
    if reason is not None:
        raise UnsupportedModelError(
            f"{context.model.name} cannot run chunk by chunk: {reason}. Train it without sppo_hf."
        )


def _autocast(x: Tensor) -> Tensor:
    # As torch's own scaled_dot_product_attention does under autocast.
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


AttentionInterface.register(IMPLEMENTATION, attention_forward)
