"""Rotary tables whose frequencies depend on the length of the whole sequence.

"dynamic" and "longrope" choose their frequencies by the largest position they are shown, so a chunk
shown alone would get the short table. While a sequence runs, hooks on those rotary modules append
the sequence's last position to every call and cut its row off the result: the module's own code
then chooses, for every chunk, exactly what it would have chosen for the whole. All other kinds
(default, linear, yarn, llama3 ...) depend on each position alone and are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sppo_hf.errors import UnsupportedModelError

LastPosition = Callable[[], Tensor | None]


def length_dependent_rotaries(base: nn.Module) -> list[nn.Module]:
    """Rotary modules of `base` whose table depends on the sequence length."""
    return [m for m in base.modules() if any(_depends(t) for t in _rope_types(m))]


def hook_rotary(module: nn.Module, last_position: LastPosition) -> list[RemovableHandle]:
    """Make `module` see the last position of the running sequence in every call.

    Args:
        module: A rotary module, called as `module(x, position_ids, ...)`.
        last_position: Returns the running sequence's largest position as a `[1, 1]` tensor, or None
            when no sequence runs; the module is then left alone.

    Returns:
        The hooks' handles.
    """
    return [
        module.register_forward_pre_hook(partial(_append, last_position), with_kwargs=True),
        module.register_forward_hook(partial(_cut_output, last_position)),
    ]


def _append(
    last_position: LastPosition, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    last = last_position()
    if last is None:
        return None
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": _with_last(kwargs["position_ids"], last)}
    if len(args) < 2:
        raise UnsupportedModelError(
            "a rotary embedding that depends on the sequence length is called without "
            "position_ids; its table cannot be kept right chunk by chunk."
        )
    return (args[0], _with_last(args[1], last), *args[2:]), kwargs


def _with_last(position_ids: Tensor, last: Tensor) -> Tensor:
    return torch.cat([position_ids, last.expand(*position_ids.shape[:-1], 1)], dim=-1)


def _cut_output(last_position: LastPosition, _: nn.Module, __: Any, output: Any) -> Any:
    return None if last_position() is None else _cut(output)


def _cut(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output[..., :-1, :]
    return tuple(_cut(part) for part in output)


def _rope_types(module: nn.Module) -> list[str]:
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        return [str(value) for value in kind.values()]
    return [kind] if isinstance(kind, str) else []


def _depends(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"
