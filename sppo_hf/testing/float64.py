"""A mode under which Transformers' models really compute in float64.

[Note: why float64 has to be enforced]
A model whose weights are float64 does not compute in float64. Transformers raises norms, rotary
tables, router logits, attention's softmax and the loss to float32 on purpose (`x.float()`,
`x.to(torch.float32)`, `softmax(..., dtype=torch.float32)`), which for a float64 model is a step
*down*: two orders of the same sum then differ by 1e-7, and a wrong chunk whose error is 1e-8 goes
unseen. Under `Float64Everywhere` every such step stays in float64, for the unmodified model and for
ours alike, so that the only differences left are those of float64 rounding (1e-13 or so), and a
tolerance of 1e-9 means something.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from transformers.modeling_layers import GradientCheckpointingLayer

from sppo_hf.engine.structure import on_instances


class Float64Everywhere(TorchFunctionMode):
    """While active, whatever asks torch for float32 gets float64.

    Covers `Tensor.float()`, dtype arguments of every torch function (positional and by name), and
    the default dtype of newly made tensors. Integer dtypes and half precision are left alone. See
    [Note: why float64 has to be enforced].

    Entering changes torch's default dtype for the process; leaving restores it. Python code that
    autograd calls in backward does not see the mode: use `float64_everywhere` around models.
    """

    def __enter__(self) -> Float64Everywhere:
        """Activate the mode."""
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the default dtype."""
        super().__exit__(exc_type, exc_value, traceback)
        torch.set_default_dtype(self._default)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func` with float64 wherever it would have used float32."""
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        # Loops, for this runs at every access to a tensor: comprehensions take twice as long.
        for arg in args:
            if arg is torch.float32:
                args = [torch.float64 if arg is torch.float32 else arg for arg in args]
                break
        if not kwargs:
            return func(*args)
        for arg in kwargs.values():
            if arg is torch.float32:
                kwargs = {
                    name: torch.float64 if arg is torch.float32 else arg
                    for name, arg in kwargs.items()
                }
                break
        return func(*args, **kwargs)


@contextlib.contextmanager
def float64_everywhere(model: nn.Module) -> Iterator[None]:
    """Run `model`, forward and backward, under `Float64Everywhere`.

    Autograd empties the stack of function modes before it calls Python, so a layer that is run
    again in backward would compute in float32 where it computed in float64 before. The `forward` of
    each decoder layer, norm and rotary table (a pipeline may run all of them there), and of what
    layers are made of (which may run in tiles), is therefore wrapped, for the duration, to enter it
    by itself.
    """
    forwards = {layer: _in_float64(layer.forward) for layer in set(_may_run_again(model))}
    with on_instances("forward", forwards), _float64_once():
        yield


def _may_run_again(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        name = type(module).__name__.lower()
        if "norm" in name or "rotary" in name:
            yield module
        if isinstance(module, GradientCheckpointingLayer):
            yield from (part for part in module.modules() if any(part.children()))


def _in_float64(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _float64_once():
            return forward(*args, **kwargs)

    return wrapped


def _float64_once() -> contextlib.AbstractContextManager[object]:
    """The mode, unless it is active: every call on a tensor would go through each of them."""
    stack = _get_current_function_mode_stack()
    if any(isinstance(mode, Float64Everywhere) for mode in stack):
        return contextlib.nullcontext()
    return Float64Everywhere()
