"""Backward in two halves: gradients of inputs at once, those of weights when they are asked for.

Zero-bubble schedules fill waiting time with weight gradients (arXiv 2401.10241). While a
`WeightGradients` is entered, every `linear` on a trained parameter becomes an autograd node whose
backward computes the gradient of its input and notes down what the weight's needs. Everything else
that trains (norms, biases of other operations, experts' grouped products) gets its gradient in the
first half, which is exact as well and costs little.

Knows nothing of chunks or schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class WeightGradients:
    """Weight gradients that are due, in order; one object per unit of backward."""

    def __init__(self) -> None:
        """Owe nothing yet."""
        self._due: list[tuple[Tensor, Tensor, Tensor, Tensor | None]] = []

    def add(self, x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Note a product `x @ weight.T + bias` whose output has gradient `grad`."""
        self._due.append((x, grad, weight, bias))

    def __len__(self) -> int:
        """Products that are due."""
        return len(self._due)

    @torch.no_grad()
    def run(self) -> None:
        """Compute what is due and add it to `.grad`, last layers first, letting go as it goes."""
        self._due.reverse()
        while self._due:
            x, grad, weight, bias = self._due.pop()
            grad_MO = grad.reshape(-1, grad.shape[-1])
            if weight.requires_grad:
                x_MI = x.reshape(-1, x.shape[-1]).to(grad.dtype)
                _accumulate(weight, grad_MO.T @ x_MI)
            if bias is not None and bias.requires_grad:
                _accumulate(bias, grad_MO.sum(0))


class DeferWeights(TorchFunctionMode):
    """Context in which linear layers leave their weights' gradients to `store()`.

    Args:
        store: Returns where to note what is due, when backward runs.
    """

    def __init__(self, store: Callable[[], WeightGradients]) -> None:
        super().__init__()
        self._store = store

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace `linear` where a parameter is trained."""
        kwargs = kwargs or {}
        if func is F.linear and torch.is_grad_enabled():
            x, weight, bias = _linear_arguments(*args, **kwargs)
            if isinstance(weight, nn.Parameter) and weight.requires_grad:
                return _Linear.apply(x, weight, bias, self._store)
        return func(*args, **kwargs)


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        store: Callable[[], WeightGradients],
    ) -> Tensor:
        ctx.save_for_backward(x)
        # Parameters are not saved tensors here: they are no activations, and no frame's business.
        ctx.weight, ctx.bias, ctx.store = weight, bias, store
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        ctx.store().add(x.detach(), grad, ctx.weight, ctx.bias)
        dx = (grad @ ctx.weight.to(grad.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, None


def _accumulate(parameter: Tensor, grad: Tensor) -> None:
    grad = grad.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad += grad
