"""What a model's attention masks mean, found out by asking them.

Transformers builds a mask per kind of layer from a function `visible(batch, head, query, key)`. Our
entry in its mask registry does not build a mask: it asks that function a few questions and returns
a `MaskMeaning`, which travels through the untouched decoder layers to attention in place of the
mask. So the window of each layer is what the model would really have used, whatever its config
calls it, and a mask that is neither causal nor a causal window is refused instead of being ignored.

Padding and packing are not looked at here; the batch layout knows them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface

from sppo_hf.errors import UnsupportedModelError

IMPLEMENTATION = "sppo"
"""Name under which attention and mask are registered with Transformers."""

# Far from zero, and not multiples of each other, so that masks that depend on the position modulo
# something (chunked attention) cannot look like a window at all of them.
_PROBES = (1 << 24, (1 << 24) + 77, (1 << 25) + 5003)


class _MaskRead(UnsupportedModelError, AttributeError):
    """Somebody wanted a tensor; an AttributeError as well, so that `hasattr` answers no."""


@dataclass(frozen=True, slots=True)
class MaskMeaning:
    """A causal mask; with `window`, a query sees itself and the `window - 1` tokens before it."""

    window: int | None
    refusal: UnsupportedModelError | None = None
    """Set if the mask is neither; raised by the first layer that attends with it. A model may make
    masks of kinds that none of its layers uses (Qwen2-MoE's window of 0)."""

    def __getattr__(self, name: str) -> Any:
        """Refuse a model whose own code computes with its mask."""
        raise _MaskRead(
            f"its own code reads its attention mask (.{name}), and there is none while chunks run"
            " (a dynamic mask). Train it without sppo_hf."
        )


def mask_meaning(*_: Any, mask_function: Callable[..., Any], **kwargs: Any) -> MaskMeaning:
    """Entry for AttentionMaskInterface: the meaning of `mask_function`, or why it has none."""
    windows = {_window_at(mask_function, position) for position in _PROBES}
    window = windows.pop()
    if windows or (window is not None and window < 1):
        return MaskMeaning(None, refusal=_not_causal(kwargs))
    return MaskMeaning(window)


def _window_at(visible: Callable[..., Any], position: int) -> int | None:
    """Window of the query at `position`: None for all keys, 0 if the mask is not a causal band."""
    if _ask(visible, position, [position, position + 1, position + 4096]) != [True, False, False]:
        return 0
    if _ask(visible, position, [0])[0]:
        between = [position // 3, position // 2, position - 1]
        return None if all(_ask(visible, position, between)) else 0
    hidden, seen = 0, position
    while seen - hidden > 1:
        middle = (seen + hidden) // 2
        if _ask(visible, position, [middle])[0]:
            seen = middle
        else:
            hidden = middle
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
        f"{model_type}: its attention mask is neither causal nor a causal sliding window (chunked "
        "or bidirectional attention), so it cannot run chunk by chunk. Train it without sppo_hf."
    )


AttentionMaskInterface.register(IMPLEMENTATION, mask_meaning)
