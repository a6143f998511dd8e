"""The attention function that Transformers calls while a chunk runs.

Registered once with AttentionInterface under `IMPLEMENTATION`; a model's configs point to it only
while the engine runs one of its chunks. Which sequence, layer and chunk is running is a
thread-local value that lives exactly as long as one call of a decoder layer: some families do not
pass unknown keywords through to attention, and backward recomputes layers on another thread than
forward's, so neither an argument nor a plain global would do. Each forward call has its own keys
and values, so two forwards before one backward do not mix.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedConfig

from sppo_hf.attention.backends.base import AttentionSpec, Backend
from sppo_hf.attention.chunk_attention import AttentionCall, Stash, chunk_attention
from sppo_hf.attention.kv_cache import Keep, KVStore
from sppo_hf.attention.segments import RowSpans, chunk_pieces
from sppo_hf.engine.mask import IMPLEMENTATION, MaskMeaning
from sppo_hf.engine.recurrent_state import LayerStates
from sppo_hf.engine.sequence_group import (
    ExchangedAgain,
    SequenceGroup,
    check_heads,
    key_heads,
    key_heads_of,
    own_heads,
    part_of,
)
from sppo_hf.errors import SPPOError, UnsupportedModelError

ChooseBackend = Callable[[AttentionSpec], Backend]


class KeyOwners:
    """Which layer's store holds the keys that a layer attends to, for one chunk.

    Layers that share keys (Gemma 3n, Gemma 4) are given the very tensors of an earlier layer.
    """

    def __init__(self) -> None:
        self._owners: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor], KVStore]] = {}

    def store_of(self, key: Tensor, value: Tensor) -> KVStore | None:
        """The store of the layer that attended with these tensors before; None for the first."""
        known = self._owners.get(id(key))
        if known is not None and known[0]() is key and known[1]() is value:
            return known[2]
        return None

    def add(self, key: Tensor, value: Tensor, store: KVStore) -> None:
        """`store` holds these from now on."""
        self._owners[id(key)] = (weakref.ref(key), weakref.ref(value), store)


@dataclass(slots=True)
class LayerCall:
    """One call of one decoder layer for one chunk, as its attention sees it."""

    layer: int
    chunk: int
    start: int
    end: int
    rows: tuple[RowSpans, ...] | None
    kv: KVStore | None
    """None in a layer without attention."""
    choose_backend: ChooseBackend
    counters: dict[str, int]
    link: Tensor | None = None
    """In: the previous chunk's link. Out, after attention ran: this chunk's."""
    stash: Stash | None = None
    keep: Keep | None = None
    states: LayerStates | None = None
    """None in a model without recurrent or convolutional layers."""
    attended: int = 0
    take_keys: Callable[[Tensor, Tensor], None] | None = None
    """While a layer runs again for its keys and values alone: gets them, BKCH, and raises."""
    owners: KeyOwners | None = None
    """Who has stored which keys in this chunk; None while a layer runs again."""
    group: SequenceGroup | None = None
    """The ranks that share the chunk; None where this one has all of it."""
    exchanged: ExchangedAgain | None = None
    """While a layer of a shared chunk runs again."""
    model_name: str = field(default="this model")


class _Running(threading.local):
    call: LayerCall | None = None
    taken_over: int = 0


_running = _Running()


def begin_layer(call: LayerCall) -> LayerCall | None:
    """Make `call` the running one; returns what ran before, for `end_layer`."""
    before, _running.call = _running.call, call
    return before


def end_layer(before: LayerCall | None) -> None:
    """End the running layer call."""
    _running.call = before


def running_states() -> LayerStates | None:
    """The states of the layer that runs in this thread; None outside layers."""
    return None if _running.call is None else _running.call.states


@contextlib.contextmanager
def attention_taken_over(configs: tuple[PreTrainedConfig, ...]) -> Iterator[None]:
    """Point the model's configs to our attention and mask, and back at exit."""
    # The attribute behind the property: its setter would also walk into sub-configs.
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = IMPLEMENTATION
    _running.taken_over += 1
    try:
        yield
    finally:
        _running.taken_over -= 1
        for config, value in zip(configs, before, strict=True):
            config._attn_implementation_internal = value


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
    call = _running.call
    if call is None and _running.taken_over:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends outside the decoder layers, which chunks do not "
            "reach. Train the model without sppo_hf."
        )
    if call is None:
        raise SPPOError(
            f"{type(module).__name__} was called with sppo_hf's attention outside a chunk. "
            "Do not set attn_implementation='sppo' yourself; use SPPOPlugin."
        )
    _refuse(call, module, attention_mask, dropout, others)
    store = None if call.owners is None else call.owners.store_of(key, value)
    borrowed = store is not None
    if store is None:
        store = call.kv
        assert store is not None, "a layer without keys and values was refused"
        if call.owners is not None:
            call.owners.add(key, value, store)
    query, key, value = (_autocast(x) for x in (query, key, value))
    own_tokens = query.shape[2]
    if call.group is not None:
        query, key, value, s_aux = _own_heads(
            call, call.group, query, key, value, s_aux, needs_keys=not borrowed
        )
    if call.take_keys is not None:
        call.take_keys(key.detach(), value.detach())
    requirement = AttentionSpec(
        device_type=query.device.type,
        dtype=query.dtype,
        qk_head_size=query.shape[-1],
        v_head_size=value.shape[-1],
        softcap=softcap is not None,
        window=attention_mask.window is not None,
        gqa_ratio=query.shape[1] // key.shape[1],
        varied=call.rows is not None or attention_mask.local is not None,
    )
    window, local = attention_mask.window, attention_mask.local
    out, call.link = chunk_attention(
        query,
        key,
        value,
        sinks_N=s_aux,
        link=call.link,
        call=AttentionCall(
            kv=store,
            chunk=call.chunk,
            chunk_start=call.start,
            pieces=chunk_pieces(call.start, call.end, call.rows, window=window, local=local),
            backend=call.choose_backend(requirement),
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=window,
            local=local,
            softcap=softcap,
            borrowed=borrowed,
            stash=call.stash,
            keep=call.keep,
            counters=call.counters,
            wait_for_query=None if call.group is None else call.group.wait_for,
        ),
    )
    if call.group is not None:
        out = _own_tokens(call, call.group, out)
        if out.shape[1] < own_tokens:  # see [Note: a rank without tokens] in sequence_group
            out = F.pad(out, (0, 0, 0, 0, 0, own_tokens - out.shape[1]))
    return out.contiguous(), None


def _own_heads(
    call: LayerCall,
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
    num_heads, tokens = q_BNcH.shape[1], call.end - call.start
    heads = None
    if group.granules is None:
        check_heads(num_heads, group.size, f"layer {call.layer} of {call.model_name}")
        heads = key_heads(num_heads, k_BKcH.shape[1], group.size)
    first, end = part_of(call.start, call.end, group.rank, group.size)
    if first == end:
        q_BNcH, k_BKcH, v_BKcH = (x[:, :, :0] for x in (q_BNcH, k_BKcH, v_BKcH))
    k_BKcH, v_BKcH = key_heads_of(k_BKcH, heads), key_heads_of(v_BKcH, heads)
    if sinks_N is not None:
        mine = own_heads(num_heads, group.rank, group.size, group.granules)
        sinks_N = sinks_N[mine.start : mine.stop]
    # See [Note: what an exchange hides behind] in sequence_group.
    again = call.exchanged
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


def _own_tokens(call: LayerCall, group: SequenceGroup, out_BCNH: Tensor) -> Tensor:
    """Attention's output of this rank's tokens, `[B, c, N, H]`."""
    if call.exchanged is not None:
        return _as_of(out_BCNH, call.exchanged.out.wait().transpose(1, 2))
    return group.start_heads_to_tokens(out_BCNH.transpose(1, 2)).wait().transpose(1, 2)


def _unsent(x_BKcH: Tensor, group: SequenceGroup, tokens: int) -> Tensor:
    rows, num_heads, _, head_size = x_BKcH.shape
    own = own_heads(num_heads, group.rank, group.size, group.granules)
    return _as_of(x_BKcH, x_BKcH.detach().new_empty(rows, len(own), tokens, head_size))


def _as_of(x: Tensor, found: Tensor) -> Tensor:
    """Let `found` need a gradient where `x` does; of a layer that runs again, none ever comes."""
    return found.requires_grad_(x.requires_grad and torch.is_grad_enabled())


_CHANGE_THE_RESULT = ("position_bias", "indices", "block_indices", "sinks")


def _refuse(
    call: LayerCall, module: nn.Module, mask: Any, dropout: float, others: dict[str, Any]
) -> None:
    call.attended += 1
    reason = None
    foreign = [name for name in _CHANGE_THE_RESULT if others.get(name) is not None]
    if call.attended > 1:
        reason = "one of its decoder layers attends twice"
    elif call.kv is None:
        reason = f"layer {call.layer} attends, and is said to have no keys and values"
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
            f"{call.model_name} cannot run chunk by chunk: {reason}. Train it without sppo_hf."
        )


def _autocast(x: Tensor) -> Tensor:
    # As torch's own scaled_dot_product_attention does under autocast.
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


AttentionInterface.register(IMPLEMENTATION, attention_forward)
