"""The two ends of a unit's autograd graph, where each unit's backward is run by itself.

`begin_graph` and `UnitGraph` make and keep these ends. They hold no tensors: whether
hidden states stay on the device until the unit's backward is decided where activations are saved,
and a leaf tensor here, or a reference to the output, would keep them there regardless.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

# B batch rows, C tokens of a chunk, D model width, W width of a message, E experts.


@dataclass(slots=True)
class InputGradient:
    """Receives the gradient of a unit's input."""

    grad: Tensor | None = None

    def receive(self, grad: Tensor | None) -> tuple[None]:
        """Take it, as the backward of a node without inputs that need one."""
        self.grad = grad
        return (None,)


class GraphNode(torch.autograd.Function):
    """A node of autograd's graph with an output and a backward of its own, which hold no tensors.

    `result` makes the output. `backward` gets its gradient, None if there is none, and returns
    those of all `inputs`.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        result: Callable[[], Tensor],
        backward: Callable[[Tensor | None], tuple[Tensor | None, ...]],
        *inputs: Tensor,
    ) -> Tensor:
        """Make the output."""
        ctx.run = backward
        ctx.set_materialize_grads(False)
        return result()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Run `backward`."""
        return None, None, *ctx.run(grad)


@dataclass(frozen=True, slots=True)
class StateEnd:
    """A recurrent state passed to the next unit: the end of its graph, and its gradient."""

    end: GradientEdge
    input_gradient: InputGradient

    @property
    def grad(self) -> Tensor | None:
        """The state's gradient; None if the next unit's loss does not depend on it."""
        return self.input_gradient.grad

    @classmethod
    def of(cls, state: Tensor, input_gradient: InputGradient) -> StateEnd:
        """Keep the end of the graph of `state`, and the receiver of its gradient."""
        return cls(get_gradient_edge(state), input_gradient)


@dataclass(slots=True)
class UnitGraph:
    """The ends of a unit's autograd graph, which its backward starts from."""

    end: GradientEdge | None
    """Edge of the unit's output; None if nothing before it is trained."""
    shape: torch.Size
    """Shape of the output: hidden states `[B, C, D]`, or a whole message `[B, C, W]`."""
    received_shape: torch.Size
    """Shape of the input, hidden states or a message."""
    dtype: torch.dtype
    device: torch.device
    input_gradient: InputGradient | None
    """Receives the gradient of the input; None if the input is token ids."""
    loss: Tensor | None = None
    """Sum of the chunk's losses, on the last stage if the chunk has labels."""
    router: Tensor | None = None
    """Sums of the chunk's router probabilities, `[E]`, if the model has a router loss."""

    @classmethod
    def of(
        cls, given: Tensor, input_gradient: InputGradient | None, received: Tensor | None
    ) -> UnitGraph:
        """Keep the ends of the graph that leads from `received` to `given`."""
        end = get_gradient_edge(given) if given.requires_grad else None
        received_shape = given.shape if received is None else received.shape
        return cls(end, given.shape, received_shape, given.dtype, given.device, input_gradient)

    def zeros(self) -> Tensor:
        """A zero gradient of the output."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def received_zeros(self) -> Tensor:
        """A zero gradient of the input."""
        return torch.zeros(self.received_shape, dtype=self.dtype, device=self.device)


def begin_graph(x: Tensor) -> tuple[Tensor, InputGradient | None]:
    """Return `x` as the beginning of a new graph, and the receiver of its gradient."""
    if not torch.is_grad_enabled():
        return x.detach(), None
    input_gradient = InputGradient()
    anchor = torch.zeros((), device=x.device, requires_grad=True)
    return GraphNode.apply(x.detach, input_gradient.receive, anchor), input_gradient
