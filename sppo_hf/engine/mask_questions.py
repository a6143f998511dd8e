"""What a model's masks are made of, found out by asking the model itself.

Transformers looks for packed documents in the `position_ids` that a model hands to its masking
utilities, and models hand on different ones: their positions as they are, the first of four axes
(multimodal rotary positions, text first), or none. Types of tokens, too, mean an image in one
family and a prefix that is read in both directions in another. So the model's own forward runs on
two tokens, up to the moment at which it builds a mask, and the mask is asked who sees whom.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sppo_hf.engine.mask import QUESTION, MaskAsked, attending_with, sees
from sppo_hf.engine.structure import ModelParts

# B batch rows, T tokens of the sequence, A axes of positions.

_answers: weakref.WeakKeyDictionary[nn.Module, dict[int, tuple[int, ...]]]
_answers = weakref.WeakKeyDictionary()


def separating_positions(parts: ModelParts, position_ids: Tensor) -> Tensor | None:
    """The positions in which `parts` looks for packed documents where no attention mask is given.

    Args:
        parts: The model.
        position_ids: `[B or 1, T]`, or `[A, B or 1, T]`.

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

    Args:
        parts: The model.
        argument: Name of the argument, `token_type_ids` for one.
        value: The type.
    """
    device = next(parts.causal_lm.parameters()).device
    types = torch.full((1, 2), value, device=device)
    mask = _first_mask(parts, torch.arange(2, device=device)[None], {argument: types})
    return mask is not None and sees(mask, query=1, key=0) and not sees(mask, query=0, key=1)


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
        with torch.no_grad(), attending_with(QUESTION, parts.configs):
            # Without hooks: what shards a model must not see a forward that does not end.
            parts.base.forward(
                input_ids=ids,
                position_ids=position_ids,
                **inputs,
                use_cache=False,
                return_dict=True,
            )
    except MaskAsked as asked:
        return asked.mask_function
    except Exception:  # noqa: BLE001 — whatever a family's own code meets without its hooks
        return None
    return None
