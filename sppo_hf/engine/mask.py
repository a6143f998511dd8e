"""What a model's attention masks mean, found out by asking them.

Transformers builds a mask per kind of layer from a function `visible(batch, head, query, key)`. Our
entry in its mask registry does not build a mask: it asks that function a few questions and returns
a `MaskMeaning`, which travels through the untouched decoder layers to attention in place of the
mask. So the window of each layer is what the model would really have used, whatever its config
calls it, and a mask that is neither causal nor a causal window is refused instead of being ignored.

Padding and packing are not looked at here; the batch layout knows them.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, PreTrainedConfig

from sppo_hf.engine.structure import ModelParts
from sppo_hf.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

IMPLEMENTATION = "sppo"
"""Name under which attention and mask are registered with Transformers."""

QUESTION = "sppo_question"
"""Name of a mask that ends a model's forward by `MaskFound`."""

# B batch rows, T tokens of the sequence, A axes of positions.

# Far from zero, and not multiples of each other, so that masks that depend on the position modulo
# something (chunked attention) cannot look like a window at all of them.
_PROBES = (1 << 24, (1 << 24) + 77, (1 << 25) + 5003)


_KEYS_AT_ONCE = 256
"""Of which a mask is asked: it takes a dozen operations each time, and hardly longer for many."""


class _MaskRead(UnsupportedModelError, AttributeError):
    """Somebody wanted a tensor; an AttributeError as well, so that `hasattr` answers no."""


@dataclass(frozen=True, slots=True)
class MaskMeaning:
    """A causal mask; with `window`, a query sees itself and the `window - 1` tokens before it."""

    window: int | None
    local: int | None = None
    """Tokens of a block; a query sees those of its own block only (Llama 4's chunked attention)."""
    refusal: UnsupportedModelError | None = None
    """Set if the mask is neither; raised by the first layer that attends with it. A model may make
    masks of kinds that none of its layers uses (Qwen2-MoE's window of 0)."""

    @property
    def ndim(self) -> int:
        """As of a finished mask `[B, 1, T, T]`, which Transformers hands on as it is."""
        return 4

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes that say nothing; see `ndim`."""
        return (1, 1, 0, 0)

    def __getitem__(self, index: Any) -> MaskMeaning:
        """All of it; a part is refused as in `__getattr__`."""
        if index == (slice(None), slice(None), slice(0, None), slice(None)):
            return self
        return self.__getattr__("__getitem__")

    def __getattr__(self, name: str) -> Any:
        """Refuse a model whose own code computes with its mask."""
        raise _MaskRead(
            f"its own code reads its attention mask (.{name}), and there is none while chunks run"
            " (a dynamic mask). Train it without sppo_hf."
        )


class MaskFound(Exception):
    """Ends a forward of which only the mask was wanted."""

    def __init__(self, mask_function: Callable[..., Any]) -> None:
        super().__init__("only the mask was wanted")
        self.mask_function = mask_function


@contextlib.contextmanager
def attention_implementation(
    implementation: str, configs: tuple[PreTrainedConfig, ...]
) -> Iterator[None]:
    """Let a model take its attention and masks by this name, by its configs; at exit as before."""
    # The attribute behind the property: its setter would also walk into sub-configs.
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
    """Entry for AttentionMaskInterface: the meaning of `mask_function`, or why it has none."""
    made = kwargs.get("attention_mask")
    if isinstance(made, MaskMeaning):
        # A multimodal model made it for its text decoder, which takes a finished mask as it is.
        return made
    mask_function = _on_the_host(_without_idle_blocks(mask_function))
    windows = {_window_at(mask_function, position) for position in _PROBES}
    window = windows.pop()
    if windows or (window is not None and window < 1):
        local = _block_tokens(mask_function)
        return MaskMeaning(None, local, None if local else _not_causal(kwargs))
    return MaskMeaning(window)


def _without_idle_blocks(mask_function: Callable[..., Any]) -> Callable[..., Any]:
    """`mask_function` without blocks that see each other, where no token is in one.

    Multimodal models let the tokens of an image see each other, by a table of as many entries as
    there are tokens; -1 is text. Far from zero, where masks are asked, a table has no entry.
    """
    functions = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions")
    if not isinstance(functions, tuple) or "or_masks" not in mask_function.__qualname__:
        return mask_function
    told = [f for f in functions if not _is_idle_block(f)]
    return told[0] if len(told) == 1 else mask_function


def _is_idle_block(mask_function: Callable[..., Any]) -> bool:
    table = inspect.getclosurevars(mask_function).nonlocals.get("block_sequence_ids")
    return isinstance(table, Tensor) and bool((table == -1).all())


def _on_the_host(mask_function: Callable[..., Any]) -> Callable[..., Any]:
    """`mask_function` with the tensors that it has by closure on the CPU, where it is asked.

    Llama 4's subtracts a row's padding, which lies with its inputs, from the index of a key. Asked
    on a GPU it would be waited for at each of a hundred questions; so it is once.
    """
    closure = getattr(mask_function, "__closure__", None) or ()
    before = [cell.cell_contents for cell in closure]
    moved = [_held_on_the_host(value) for value in before]
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


def _held_on_the_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.device.type in ("cpu", "meta") else value.cpu()
    if isinstance(value, tuple):
        moved = tuple(map(_held_on_the_host, value))
        same = all(one is other for one, other in zip(moved, value, strict=True))
        return value if same else moved
    return _on_the_host(value) if inspect.isfunction(value) else value


def _block_tokens(visible: Callable[..., Any]) -> int | None:
    """Length of the blocks within which queries see keys; None if the mask is another one."""
    starts = []
    for position in _PROBES:
        window = _window_at(visible, position)
        if window is None or window < 1:
            return None
        starts.append(position - window + 1)
    # The last query of a block still sees its first key, and the next one does not.
    seen, hidden = _PROBES[0], 2 * _PROBES[0]
    while hidden - seen > 1:
        middle = (seen + hidden) // 2
        if sees(visible, query=middle, key=starts[0]):
            seen = middle
        else:
            hidden = middle
    length = hidden - starts[0]
    expected = [position - position % length for position in _PROBES]
    return length if starts == expected else None


def _window_at(visible: Callable[..., Any], position: int) -> int | None:
    """Window of the query at `position`: None for all keys, 0 if the mask is not a causal band."""
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
        # The edge is between two of them, or beside one at the end.
        hidden, seen = [hidden, *keys, seen][index : index + 2]
    return position - seen + 1


def _ask(visible: Callable[..., Any], query: int, keys: list[int]) -> list[bool]:
    zero = torch.zeros(len(keys), dtype=torch.long)
    answer = visible(zero, zero, torch.full_like(zero, query), torch.tensor(keys))
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
# Asked with every batch; and from the second on, weights may rest elsewhere than the inputs are.
_causal: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, int, bool], bool]]
_causal = weakref.WeakKeyDictionary()


def document_positions(parts: ModelParts, position_ids: Tensor) -> Tensor | None:
    """The positions in which `parts` looks for packed documents where no attention mask is given.

    They are given as `[B or 1, T]` or `[A, B or 1, T]`.

    Returns:
        `[B or 1, T]`; None where the model lets documents of one row see each other.
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
    """Whether tokens whose types are all `value` see what they see without types.

    The types' argument is called `token_type_ids`, for one.
    """
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
    """Whether a restart in one axis hides the token before it; None where no mask was built."""
    positions = torch.arange(2, device=device).repeat(axes, 1, 1)
    positions[axis] = 0
    mask = _first_mask(parts, positions if axes > 1 else positions[0], {})
    return None if mask is None else not sees(mask, query=1, key=0)


def _first_mask(
    parts: ModelParts, position_ids: Tensor, inputs: dict[str, Tensor]
) -> Callable[..., Any] | None:
    """The function of the first mask that the model builds for two tokens; None if it fails."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=position_ids.device)
    try:
        with torch.no_grad(), attention_implementation(QUESTION, parts.configs):
            # Without hooks: what shards a model must not see a forward that does not end.
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
        # Nobody has asked the model to run: callers take the default, or say no.
        logger.debug("%s makes no mask of two tokens", parts.name, exc_info=True)
    return None


AttentionMaskInterface.register(IMPLEMENTATION, mask_meaning)
AttentionMaskInterface.register(QUESTION, _end_forward)
