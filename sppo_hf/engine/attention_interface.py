"""Attention and masks that Transformers calls while a chunk runs.

`attention_forward` and `mask_meaning` are registered once with AttentionInterface and
AttentionMaskInterface under `IMPLEMENTATION`; a model's configs name it only while one of its
chunks runs. Which layer and chunk attends is read from the `ChunkContext`.

Transformers builds a mask per kind of layer from a function `visible(batch, head, query, key)`. Our
entry in its mask registry does not build a mask: it asks that function a few questions and returns
a `MaskMeaning`, which travels through the untouched decoder layers to attention in place of the
mask. So the window of each layer is what the model would really have used, whatever its config
calls it, and a mask that is neither causal nor a causal window is refused instead of being ignored.
Beside what is causal, spans of tokens may see each other in both directions: those of an image,
which the function knows from a table. Padding and packing are not looked at here; the batch layout
knows them.

[Note: asking a model for its masks] Transformers looks for packed documents in the `position_ids`
that a model hands to its masking utilities, and models hand on different ones: their positions as
they are, the first of four axes (multimodal rotary positions, text first), or none. Types of
tokens, too, mean an image in one family and a prefix that is read in both directions in another.
So the model's own forward runs on two tokens, up to the moment at which it builds a mask, and the
mask is asked who sees whom.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from sppo_hf.attention.backends.base import AttentionSpec, Backend
from sppo_hf.attention.chunk_attention import AttentionCall, chunk_attention
from sppo_hf.attention.kv_cache import KVStore
from sppo_hf.attention.segments import BidirectionalSpan, chunk_segments
from sppo_hf.engine.chunk_context import ChunkContext, current
from sppo_hf.engine.model_parts import CAPTURES, ModelParts, patched_attribute
from sppo_hf.engine.sequence_group import (
    SequenceGroup,
    check_heads,
    local_heads,
    needed_kv_heads,
    rank_tokens,
    select_kv_heads,
)
from sppo_hf.errors import SPPOError, UnsupportedModelError

# B batch rows, N query heads, K key/value heads, c tokens of this rank's part, C tokens of the
# chunk, T tokens of the sequence, H head size, A axes of positions.

logger = logging.getLogger(__name__)

IMPLEMENTATION = "sppo"
"""Name under which attention and mask are registered with Transformers."""

MASK_PROBE = "sppo_question"
"""Name of the mask implementation that ends a model's forward by `MaskFound`."""

_PROBE_POSITIONS = (1 << 24, (1 << 24) + 77, (1 << 25) + 5003)
"""Far from zero, and not multiples of each other, so that masks that depend on the position modulo
something (attention in blocks) cannot look like a window at all of them."""

_KEYS_AT_ONCE = 256
"""Keys in one call of a mask function: it runs a dozen operations, however many keys there are."""


class _MaskRead(UnsupportedModelError, AttributeError):
    """Code has used a mask as a tensor; an AttributeError too, so that `hasattr` returns False."""


@dataclass(frozen=True, slots=True)
class MaskMeaning:
    """The meaning of a causal mask, which stands in for the mask itself."""

    window: int | None
    """Tokens that a query sees, itself included; None for all up to its own."""
    local: int | None = None
    """Tokens of a block; a query sees its own block only (Llama 4's chunked attention)."""
    spans: tuple[BidirectionalSpan, ...] = ()
    """Tokens that see each other in both directions, in order of row and token."""
    refusal: UnsupportedModelError | None = None
    """Error for a mask of another kind, raised by the first layer that attends with it; a model may
    build masks that none of its layers uses (Qwen2-MoE's window of 0)."""

    def of_rows(self, start: int, end: int) -> MaskMeaning:
        """Return the mask of batch rows `[start, end)`."""
        spans = (replace(s, row=s.row - start) for s in self.spans if start <= s.row < end)
        return replace(self, spans=tuple(spans))

    def within(self, real: Sequence[tuple[int, int]]) -> MaskMeaning:
        """Return the mask without padding: tokens `[start, end)` of each row are `real`.

        No query sees padding, which a span may run into.
        """
        bounds = ((s, max(s.start, real[s.row][0]), min(s.end, real[s.row][1])) for s in self.spans)
        spans = (replace(s, start=start, end=end) for s, start, end in bounds if end - start > 1)
        return replace(self, spans=tuple(spans))

    @property
    def ndim(self) -> int:
        """4, as of a finished mask `[B, 1, T, T]`, which Transformers passes on unchanged."""
        return 4

    @property
    def shape(self) -> tuple[int, ...]:
        """Empty sizes of a finished mask; see `ndim`."""
        return (1, 1, 0, 0)

    def __getitem__(self, index: Any) -> MaskMeaning:
        """Return the mask for a slice over all of it; refuse others as `__getattr__` does."""
        whole = slice(None)
        # Of the last two, which stand for all heads, `indexer` makes the mask itself.
        if index in ((whole, whole, slice(0, None), whole), (whole, 0, whole, whole), (whole, 0)):
            return self
        return self.__getattr__("__getitem__")

    def __getattr__(self, name: str) -> Any:
        """Refuse a model whose own code reads its mask."""
        raise _MaskRead(
            f"its own code reads its attention mask (.{name}), and there is none while chunks run"
            " (a dynamic mask). Train it without sppo_hf."
        )


class MaskFound(Exception):
    """Ends a model's forward at its first mask."""

    def __init__(self, mask_function: Callable[..., Any]) -> None:
        super().__init__("the forward was run for its mask alone")
        self.mask_function = mask_function


@contextlib.contextmanager
def attention_implementation(
    implementation: str, configs: tuple[PreTrainedConfig, ...]
) -> Iterator[None]:
    """Set the attention and mask implementation in a model's configs; at exit as before."""
    # The attribute behind the property, whose setter would also change sub-configs.
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = implementation
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config._attn_implementation_internal = value


def sees(mask_function: Callable[..., Any], *, query: int, key: int) -> bool:
    """Whether the token at `query` sees the one at `key`."""
    return _ask(_on_the_host(mask_function), query, [key])[0]


def mask_meaning(*_: Any, mask_function: Callable[..., Any], **kwargs: Any) -> MaskMeaning:
    """Return the meaning of `mask_function`, or why it has none; for AttentionMaskInterface."""
    finished = kwargs.get("attention_mask")
    if isinstance(finished, MaskMeaning):
        return finished  # a multimodal model has built it for its text decoder
    function = _on_the_host(mask_function)
    tables: list[Tensor] = []
    causal = _with_leaves(function, lambda leaf: _without_spans(leaf, tables))
    try:
        windows = {_window_at(causal, position) for position in _PROBE_POSITIONS}
    except IndexError:  # another table with an entry for each token
        return MaskMeaning(None, refusal=_not_causal(kwargs))
    window = windows.pop()
    runs = _runs_of(tables)
    is_band = not windows and (window is None or window > 0)
    if not is_band or runs is None:
        local = _block_tokens(causal) if runs == [] else None
        return MaskMeaning(None, local, refusal=None if local else _not_causal(kwargs))
    spans = [_seen_within(function, run, window) for run in runs]
    seen = tuple(span for span in spans if span is not None)
    whole = len(seen) == len(spans)
    return MaskMeaning(window, spans=seen, refusal=None if whole else _not_causal(kwargs))


def _without_spans(value: Any, tables: list[Tensor]) -> Any:
    """Return a mask function by which no tokens see each other, for one that reads a table.

    Multimodal models let the tokens of an image see each other, by a table `[B, T]` of numbers of
    images, of which -1 is text. It is added to `tables`. At the probe positions it has no entries.
    """
    if not inspect.isfunction(value):
        return value
    table = inspect.getclosurevars(value).nonlocals.get("block_sequence_ids")
    if not isinstance(table, Tensor):
        return value
    tables.append(table)
    return _sees_nothing


def _sees_nothing(_batch: Any, _head: Any, query: Tensor, _key: Any) -> Tensor:
    return torch.zeros_like(query, dtype=torch.bool)


def _runs_of(tables: list[Tensor]) -> list[BidirectionalSpan] | None:
    """Return the runs of equal numbers in a table, but for text and single tokens.

    None if tokens that are apart have the same number, or if there are several tables.
    """
    spans: list[BidirectionalSpan] = []
    for row, ids_T in enumerate(tables[0] if tables else ()):
        changes = (torch.diff(ids_T).nonzero()[:, 0] + 1).tolist()
        runs = list(pairwise([0, *changes, len(ids_T)]))
        images = [(int(ids_T[start]), start, end) for start, end in runs if ids_T[start] >= 0]
        if len({number for number, _, _ in images}) < len(images):
            return None
        spans += [BidirectionalSpan(row, start, end) for _, start, end in images if end - start > 1]
    return spans if len(tables) <= 1 else None


def _seen_within(
    visible: Callable[..., Any], span: BidirectionalSpan, window: int | None
) -> BidirectionalSpan | None:
    """Return a span of a table as the mask has it; None if its tokens do not see each other.

    Its first token is asked for all later ones, and its last one for all that the window hides.
    """
    if not all(_ask(visible, span.start, list(range(span.start, span.end)), row=span.row)):
        return None
    hidden = [] if window is None else list(range(span.start, span.end - window))
    answers = set(_ask(visible, span.end - 1, hidden, row=span.row)) if hidden else {False}
    return replace(span, beyond_window=answers.pop()) if len(answers) == 1 else None


def _on_the_host(mask_function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `mask_function` with the tensors of its closure moved to the CPU.

    Llama 4's subtracts a row's padding, a tensor on the device, from the index of a key. There each
    of a hundred calls would wait for the device.
    """
    return _with_leaves(mask_function, _moved_to_host)


def _with_leaves(
    mask_function: Callable[..., Any], change: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Return `mask_function` with what its closure holds replaced by what `change` returns.

    Tuples and functions that `change` returns as they are are looked into.
    """
    closure = getattr(mask_function, "__closure__", None) or ()
    before = [cell.cell_contents for cell in closure]
    moved = [_with_changed(value, change) for value in before]
    if all(one is other for one, other in zip(moved, before, strict=True)):
        return mask_function
    function = types.FunctionType(
        mask_function.__code__,
        mask_function.__globals__,
        mask_function.__name__,
        mask_function.__defaults__,
        tuple(types.CellType(value) for value in moved),
    )
    function.__kwdefaults__ = mask_function.__kwdefaults__
    return function


def _with_changed(value: Any, change: Callable[[Any], Any]) -> Any:
    changed = change(value)
    if changed is not value:
        return changed
    if isinstance(value, tuple):
        parts = tuple(_with_changed(part, change) for part in value)
        same = all(one is other for one, other in zip(parts, value, strict=True))
        return value if same else parts
    return _with_leaves(value, change) if inspect.isfunction(value) else value


def _moved_to_host(value: Any) -> Any:
    is_elsewhere = isinstance(value, Tensor) and value.device.type not in ("cpu", "meta")
    return value.cpu() if is_elsewhere else value


def _block_tokens(visible: Callable[..., Any]) -> int | None:
    """Return the tokens of the blocks in which queries see keys; None if the mask has no blocks."""
    starts = []
    for position in _PROBE_POSITIONS:
        window = _window_at(visible, position)
        if window is None or window < 1:
            return None
        starts.append(position - window + 1)
    # The last query of a block still sees its first key, and the next one does not.
    seen, hidden = _PROBE_POSITIONS[0], 2 * _PROBE_POSITIONS[0]
    while hidden - seen > 1:
        middle = (seen + hidden) // 2
        if sees(visible, query=middle, key=starts[0]):
            seen = middle
        else:
            hidden = middle
    length = hidden - starts[0]
    expected = [position - position % length for position in _PROBE_POSITIONS]
    return length if starts == expected else None


def _window_at(visible: Callable[..., Any], position: int) -> int | None:
    """Return the window at `position`: None for all keys, 0 if the mask is not a causal band."""
    before = [0, position // 3, position // 2, position - 1]
    first, *between, itself, next_one, far = _ask(
        visible, position, [*before, position, position + 1, position + 4096]
    )
    if not itself or next_one or far:
        return 0
    if first:
        return None if all(between) else 0
    hidden, seen = 0, position
    while seen - hidden > 1:
        keys = range(hidden + 1, seen, max(1, (seen - hidden) // _KEYS_AT_ONCE))
        answers = _ask(visible, position, list(keys))
        index = answers.index(True) if True in answers else len(keys)
        # The window's edge is between two of these keys, or beside the first or last.
        hidden, seen = [hidden, *keys, seen][index : index + 2]
    return position - seen + 1


def _ask(visible: Callable[..., Any], query: int, keys: list[int], *, row: int = 0) -> list[bool]:
    zero = torch.zeros(len(keys), dtype=torch.long, device="cpu")
    index = torch.tensor(keys, device="cpu")
    answer = visible(zero + row, zero, torch.full_like(zero, query), index)
    if not isinstance(answer, Tensor):
        return [bool(answer)] * len(keys)
    return [bool(x) for x in answer.expand(len(keys)).tolist()]


def _not_causal(kwargs: dict[str, Any]) -> UnsupportedModelError:
    model_type = getattr(kwargs.get("config"), "model_type", "this model")
    return UnsupportedModelError(
        f"{model_type}: its attention mask is neither causal, nor a causal sliding window, nor cut "
        "into blocks (bidirectional attention, for one), so it cannot run chunk by chunk. Train it "
        "without sppo_hf."
    )


def _end_forward(*_: Any, mask_function: Callable[..., Any], **__: Any) -> None:
    raise MaskFound(mask_function)


_answers: weakref.WeakKeyDictionary[nn.Module, dict[int, tuple[int, ...]]]
_answers = weakref.WeakKeyDictionary()
# Needed for every batch; and from the second on, weights may be on another device than the inputs.
_causal: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, int, bool], bool]]
_causal = weakref.WeakKeyDictionary()


def document_positions(parts: ModelParts, position_ids: Tensor) -> Tensor | None:
    """Return the positions by which a model without an attention mask separates packed documents.

    `[B or 1, T]`, of `[B or 1, T]` or `[A, B or 1, T]`; None where the model lets documents of one
    row see each other.
    """
    axes = position_ids.shape[0] if position_ids.ndim == 3 else 1
    known = _answers.setdefault(parts.base, {})
    if axes not in known:
        device = position_ids.device
        known[axes] = tuple(a for a in range(axes) if _separates(parts, a, axes, device))
        if not known[axes] and axes == 1 and _separates(parts, 0, 1, device) is None:
            known[axes] = (0,)
    if not known[axes]:
        return None
    return position_ids if position_ids.ndim == 2 else position_ids[known[axes][0]]


def is_causal_with(parts: ModelParts, argument: str, value: int) -> bool:
    """Whether attention is causal if `argument` (`token_type_ids`, say) is `value` everywhere."""
    known = _causal.setdefault(parts.base, {})
    key = argument, value, parts.causal_lm.training
    if key not in known:
        device = next(parts.causal_lm.parameters()).device
        types = torch.full((1, 2), value, device=device)
        mask = _first_mask(parts, torch.arange(2, device=device)[None], {argument: types})
        found = mask is not None and sees(mask, query=1, key=0) and not sees(mask, query=0, key=1)
        known[key] = found
    return known[key]


def _separates(parts: ModelParts, axis: int, axes: int, device: torch.device) -> bool | None:
    """Whether positions that restart hide the token before; None where no mask was built."""
    positions = torch.arange(2, device=device).repeat(axes, 1, 1)
    positions[axis] = 0
    mask = _first_mask(parts, positions if axes > 1 else positions[0], {})
    return None if mask is None else not sees(mask, query=1, key=0)


def _first_mask(
    parts: ModelParts, position_ids: Tensor, inputs: dict[str, Tensor]
) -> Callable[..., Any] | None:
    """Return the function of the first mask that the model builds for two tokens; None if none."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=position_ids.device)
    embedding: Any = parts.causal_lm.get_input_embeddings()

    def embed(ids: Tensor) -> Tensor:
        width, dtype = embedding.weight.shape[-1], embedding.weight.dtype
        return torch.zeros(*ids.shape, width, dtype=dtype, device=ids.device)

    # What stands for the embedding of another stage has no weights, and returns zeros itself.
    replaced = {embedding: embed} if hasattr(embedding, "weight") else {}
    try:
        with (
            torch.no_grad(),
            attention_implementation(MASK_PROBE, parts.configs),
            # Without hooks: those that shard a model must not see a forward that does not end, and
            # would gather the embedding, for which other ranks may not ask.
            patched_attribute("_call_impl", replaced),
            # Layers do not run here, and some may be on other ranks.
            patched_attribute(CAPTURES, dict.fromkeys((parts.base, parts.decoder), True)),
        ):
            parts.base.forward(
                input_ids=ids,
                position_ids=position_ids,
                **inputs,
                use_cache=False,
                return_dict=True,
            )
    except MaskFound as asked:
        return asked.mask_function
    except Exception:
        # The user has not run the model; callers have a default.
        logger.debug("%s makes no mask of two tokens", parts.name, exc_info=True)
    return None


AttentionMaskInterface.register(IMPLEMENTATION, mask_meaning)
AttentionMaskInterface.register(MASK_PROBE, _end_forward)


@contextlib.contextmanager
def chunked_attention(context: ChunkContext) -> Iterator[None]:
    """Make the context's model use chunked attention and its masks, and enter `context`."""
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
    indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of the running chunk, in the signature of Transformers' attention functions.

    `query` is `[B, N, C, H]`, this rank's tokens of the chunk, `key` `[B, K, C, H]`, both rotated,
    `value` `[B, K, C, Hv]`, `attention_mask` a `MaskMeaning`, `scaling` the factor of the logits
    (`H ** -0.5` if None), `s_aux` one sink logit per head, and `indices` `[B, C, S]` the keys that
    each query reads of those that it sees. Other arguments are refused if they would change the
    result.

    Returns:
        `[B, C, N, Hv]` and None for the attention weights.

    Raises:
        UnsupportedModelError: Chunked attention cannot be exact for these arguments.
        ConfigError: The heads cannot be divided among the ranks that share the chunk.
    """
    context = _context_for(module)
    _refuse(context, module, attention_mask, dropout, {**others, "indices": indices})
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
    if indices is not None:
        indices = _all_indices(context, indices)
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
            segments=chunk_segments(
                context.start, context.end, context.rows, window=window, local=local
            ),
            backend=_backend(
                context, query, key, value, attention_mask, softcap, chosen=indices is not None
            ),
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=window,
            local=local,
            softcap=softcap,
            spans=tuple(s for s in attention_mask.spans if context.start <= s.start < context.end),
            indices_BCS=indices,
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
    """Return the context of the layer in which `module` attends."""
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
    """Return the store of the layer's keys and values, and whether it is another layer's."""
    known = context.owners.get(id(key))
    if known is not None and known[0]() is key and known[1]() is value:
        return known[2], True
    assert context.kv is not None, "a layer without keys and values was refused"
    context.owners[id(key)] = weakref.ref(key), weakref.ref(value), context.kv
    return context.kv, False


def _backend(
    context: ChunkContext,
    q_BNCH: Tensor,
    k_BKCH: Tensor,
    v_BKCH: Tensor,
    mask: MaskMeaning,
    softcap: float | None,
    *,
    chosen: bool,
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
            chosen=chosen,
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
    """Return queries, keys, values and sinks of this rank's heads for all tokens of a shared chunk.

    Keys and values of a layer that is rerun, or that reads another layer's, are not used and not
    sent.
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
    # See [Note: what the exchanges overlap with] in sequence_group.
    exchanged = context.exchanged
    if exchanged is not None:
        exchanged.query = exchanged.query or group.start_tokens_to_heads(q_BNcH.detach(), tokens)
        q_BNCH = _as_of(q_BNcH, exchanged.query.pending())
    elif needs_keys:
        coming = [group.start_tokens_to_heads(x, tokens) for x in (q_BNcH, k_BKcH, v_BKcH)]
        q_BNCH, k_BKCH, v_BKCH = (exchange.wait() for exchange in coming)
        return q_BNCH, k_BKCH, v_BKCH, sinks_N
    else:
        q_BNCH = group.start_tokens_to_heads(q_BNcH, tokens).wait()
    k_BKCH, v_BKCH = (_unsent(x, group, tokens) for x in (k_BKcH, v_BKcH))
    return q_BNCH, k_BKCH, v_BKCH, sinks_N


def _all_indices(context: ChunkContext, indices_BcS: Tensor) -> Tensor | None:
    """Return what all queries of a chunk read, `[B, C, S]`; None where it is all that they see."""
    if indices_BcS.shape[-1] >= context.end:
        return None
    if context.group is None:
        return indices_BcS
    tokens, exchanged = context.end - context.start, context.exchanged
    if exchanged is None:
        return context.group.gather_tokens(indices_BcS, tokens)
    if exchanged.indices is None:
        exchanged.indices = context.group.gather_tokens(indices_BcS, tokens)
    return exchanged.indices


def _own_tokens(context: ChunkContext, group: SequenceGroup, out_BCNH: Tensor) -> Tensor:
    """Return attention's output for this rank's tokens, `[B, c, N, H]`."""
    if context.exchanged is not None:
        return _as_of(out_BCNH, context.exchanged.out.wait().transpose(1, 2))
    return group.start_heads_to_tokens(out_BCNH.transpose(1, 2)).wait().transpose(1, 2)


def _unsent(x_BKcH: Tensor, group: SequenceGroup, tokens: int) -> Tensor:
    rows, num_heads, _, head_size = x_BKcH.shape
    own = local_heads(num_heads, group.rank, group.size, group.head_blocks)
    return _as_of(x_BKcH, x_BKcH.detach().new_empty(rows, len(own), tokens, head_size))


def _as_of(x: Tensor, found: Tensor) -> Tensor:
    """Let `found` require a gradient where `x` does; in a rerun none is ever computed."""
    return found.requires_grad_(x.requires_grad and torch.is_grad_enabled())


_CHANGE_THE_RESULT = ("position_bias", "block_indices", "sinks")


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
    elif others["indices"] is not None and mask.spans:
        reason = "an indexer chooses keys, and tokens of an image see each other in both directions"
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
