"""Hooks of others on parameters, which must see whole gradients and no parts of them.

`register_hook`, `register_post_accumulate_grad_hook` and `register_multi_grad_hook` promise one
call per backward, with the gradient of everything that the parameter took part in. What computes
gradients piece by piece (tiles of the loss, units of a pipeline) takes hooks off the parameters
meanwhile, and hands the sum to an ordinary backward, where they run.

Not covered: hooks on autograd nodes that a parameter's gradient passes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def hooks_set_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context in which backward runs no hook that was set on `parameters` before it."""
    aside: list[tuple[Any, dict[int, Any]]] = []
    for parameter in parameters:
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            if hooks:
                # The mapping itself belongs to autograd and to the handles that remove hooks.
                aside.append((hooks, dict(hooks)))
                hooks.clear()
    try:
        yield
    finally:
        for hooks, before in aside:
            since = dict(hooks)
            hooks.clear()
            hooks.update(before | since)


def any_hooks(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a hook is set on any of `parameters`."""
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
