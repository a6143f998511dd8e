"""The two ends of a unit's graph, without the tensors that pass there.

Frames decide where hidden states wait for a unit's backward. A leaf for what the unit was given, or
a reference to what it gave on, would keep these on the device whatever the frames do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

# B rows of a micro-batch, C tokens of a chunk, D model width, W width of a message.


@dataclass(slots=True)
class StageInput:
    """Where the gradient of what a unit was given arrives."""

    grad: Tensor | None = None


class _Enter(torch.autograd.Function):
    """The beginning of a unit's graph, which holds none of what goes in."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, x: Tensor, inlet: StageInput) -> Tensor:  # type: ignore[override]
        ctx.inlet = inlet
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.inlet.grad = grad
        return None, None, None


@dataclass(frozen=True, slots=True)
class StateEnd:
    """A state that a unit left for the next one: where its gradient goes, and where it arrives."""

    end: GradientEdge
    inlet: StageInput

    @property
    def grad(self) -> Tensor | None:
        """The state's gradient; None where nothing that the unit after trains depends on it."""
        return self.inlet.grad

    @classmethod
    def of(cls, state: Tensor, inlet: StageInput) -> StateEnd:
        """Note the end of the graph that leads to `state`, and the unit after's inlet for it."""
        return cls(get_gradient_edge(state), inlet)


@dataclass(slots=True)
class UnitGraph:
    """What waits for a unit's backward."""

    end: GradientEdge | None
    """Of what the unit gave on, or its loss was computed from; None where nothing is trained."""
    shape: torch.Size
    """Of that, `[B, C, D]`, or `[B, C, W]` of a whole message."""
    received_shape: torch.Size
    """Of what it was given, likewise."""
    dtype: torch.dtype
    device: torch.device
    inlet: StageInput | None
    """For what it was given; None where it began with tokens."""
    loss: Tensor | None = None
    """Sum of the chunk's losses, on the last stage, where it has labels."""
    router: Tensor | None = None
    """The chunk's sums of router probabilities `[E]`, where the model has a loss of its routers."""

    @classmethod
    def of(cls, given: Tensor, inlet: StageInput | None, received: Tensor | None) -> UnitGraph:
        """Note the ends of a graph that leads from `received` to `given`."""
        end = get_gradient_edge(given) if given.requires_grad else None
        received_shape = given.shape if received is None else received.shape
        return cls(end, given.shape, received_shape, given.dtype, given.device, inlet)

    def zeros(self) -> Tensor:
        """No gradient of what it gave on."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def received_zeros(self) -> Tensor:
        """No gradient of what it was given."""
        return torch.zeros(self.received_shape, dtype=self.dtype, device=self.device)


def enter(x: Tensor) -> tuple[Tensor, StageInput | None]:
    """`x` as the beginning of a graph, and where its gradient will be."""
    if not torch.is_grad_enabled():
        return x.detach(), None
    inlet = StageInput()
    anchor = torch.zeros((), device=x.device, requires_grad=True)
    return _Enter.apply(anchor, x.detach(), inlet), inlet
