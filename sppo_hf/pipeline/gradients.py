"""Gradients of a pipeline's step: held back until `loss.backward()`, reduced over replicas.

A pipeline computes gradients inside `forward`, at the scale that the last `loss.backward()` had.
The loss's own backward gives them to autograd as gradients of the parameters, multiplied by what
that scale has changed by (nothing, almost always). So a loss that is never run backward leaves no
trace, gradients accumulate as always, hooks on parameters run once and see a parameter's whole
gradient, and a gradient scaler may change its mind between steps.

[Note: what is reduced]
With replicas, gradients are averaged over them once per optimizer step, as DistributedDataParallel
does, and while the schedule still runs. What earlier micro-steps have left in `.grad` is in the
sum, so that it travels once, and the average becomes `.grad` without autograd. This takes for
granted that nobody touches `.grad` between forward and backward, that the loss's gradient is what
it was the last time, and that no hook waits for a gradient, on all replicas. Where that turns out
wrong (`zero_grad` in between, two forwards before a backward, a loss that each replica weighs
differently, a hook), what was reduced is dropped, and what is in `.grad` when backward has ended is
averaged instead: exact too, without the overlap. Replicas agree on which. As under
DistributedDataParallel, hooks see the replica's own gradient; post-accumulate hooks, which may want
to step an optimizer with it, are refused therefore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd import Variable

from sppo_hf.engine.structure import has_parameter_hooks
from sppo_hf.errors import ConfigError, SPPOError
from sppo_hf.pipeline.agreement import all_true

BUCKET_BYTES = 64 * 2**20
"""Bytes that are reduced at a time: large enough for a link's full speed."""


class StepGradients:
    """The gradients of one forward, of all trained parameters of this rank."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set aside what `.grad` holds: from here to `take` it collects this step's gradients."""
        self._parameters = [p for p in parameters if p.requires_grad]
        self._earlier = [p.grad for p in self._parameters]
        self._versions = [_version(grad) for grad in self._earlier]
        self._own: list[Tensor | None] = []
        self._reduced: dict[int, Tensor] = {}
        self._buckets: list[tuple[Any, Tensor, list[nn.Parameter]]] = []
        self._replicas: Replicas | None = None
        self._taken = False
        for parameter in self._parameters:
            parameter.grad = None

    def take(self) -> None:
        """The schedule has run: hold its gradients, and give `.grad` back what it had."""
        self._wait()
        if self._taken:
            return
        self._taken = True
        self._own = [p.grad for p in self._parameters]
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            parameter.grad = earlier

    def abandon(self) -> None:
        """The schedule failed: drop its gradients."""
        self._buckets.clear()
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            parameter.grad = earlier
        self._taken = True

    def start_reducing(self, parameters: Sequence[nn.Parameter], replicas: Replicas) -> None:
        """Start averaging over replicas the gradients of `parameters`, whose backward is done."""
        self._replicas = replicas
        earlier = {id(p): g for p, g in zip(self._parameters, self._earlier, strict=True)}
        for bucket in buckets_of([p for p in parameters if id(p) in earlier]):
            flat = torch.cat([_sum(p, p.grad, earlier[id(p)]).reshape(-1) for p in bucket])
            self._buckets.append((replicas.average(flat), flat, bucket))

    def _wait(self) -> None:
        for work, flat, bucket in self._buckets:
            work.wait()
            self._reduced |= _cut(flat, bucket)
        self._buckets.clear()

    def add_shared(self, parameters: Sequence[nn.Parameter], group: Any) -> None:
        """Sum the gradients of parameters that both ends of a pipeline hold.

        Called when the schedule has run, before anything of these is reduced over replicas.
        """
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that got a gradient in this step."""
        assert self._taken, "gradients are all there when the schedule has run"
        return [p for p, g in zip(self._parameters, self._own, strict=True) if g is not None]

    @torch.no_grad()
    def hand_out(self, factor: float) -> list[Tensor | None]:
        """Gradients of `parameters()`, once, for the backward that runs now.

        None where `.grad` was set here; see [Note: what is reduced]. `factor` is the gradient of
        the loss now, over the one that the schedule ran with.
        """
        given, reduced, replicas = self.parameters(), self._reduced, self._replicas
        averaged = [p for p in self._parameters if id(p) in reduced]
        if replicas is not None:
            as_expected = factor == 1.0 and self._untouched() and not has_parameter_hooks(averaged)
            if replicas.all_true(as_expected):
                for parameter in averaged:
                    parameter.grad = reduced[id(parameter)]
            else:
                reduced = {}
                average_after_backward(averaged, replicas)
        own = [grad for grad in self._own if grad is not None]
        self._parameters, self._own, self._earlier, self._reduced = [], [], [], {}
        return [
            None if id(parameter) in reduced else grad if factor == 1.0 else grad.mul_(factor)
            for parameter, grad in zip(given, own, strict=True)
        ]

    def _untouched(self) -> bool:
        """Whether `.grad` is what it was when forward began."""
        places = zip(self._parameters, self._earlier, self._versions, strict=True)
        return all(p.grad is grad and _version(grad) == version for p, grad, version in places)


def refuse_post_accumulate_hooks(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse hooks that would see one replica's `.grad` before it is averaged.

    Raises:
        ConfigError: Naming a parameter that has such a hook.
    """
    for name, parameter in named:
        if parameter._post_accumulate_grad_hooks:
            raise ConfigError(
                f"{name} has a post-accumulate gradient hook, and this pipeline has replicas: the "
                "hook would see the gradient of one replica, before it is averaged over all. "
                "Remedy: remove the hook and work on .grad after backward, use register_hook, or "
                "start as many processes as pp_size, so that there are no replicas."
            )


class Replicas:
    """The ranks that hold the same stages of other pipelines."""

    def __init__(self, group: Any, control: Any) -> None:
        self._group = group
        self._control = control

    def average(self, flat: Tensor) -> Any:
        """Start averaging in place; wait for what is returned."""
        flat /= dist.get_world_size(self._group)
        return dist.all_reduce(flat, group=self._group, async_op=True)

    def all_true(self, value: bool) -> bool:
        """Whether all ranks say so; every rank asks at the same moments."""
        return all_true(value, self._control)


class PipelineLoss(torch.autograd.Function):
    """The loss of a step whose gradients are there already; backward hands them out."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        value: Tensor,
        _anchor: Tensor,
        hand_out: Callable[[float], list[Tensor | None]],
        *parameters: Tensor,
    ) -> Tensor:
        """Return `value`, the loss, `[]`.

        In backward `hand_out` is called with the gradient that arrives, and returns those of
        `parameters`, whatever got one in the step. The anchor requires a gradient, also where no
        parameter does.
        """
        ctx.hand_out = hand_out
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        """Hand out the gradients.

        Raises:
            SPPOError: They were handed out before.
        """
        if ctx.hand_out is None:
            raise SPPOError(
                "backward ran twice through the loss of a pipeline's step. Chunked sequences allow "
                "one backward per forward (retain_graph=True is not supported); run the forward "
                "again."
            )
        hand_out, ctx.hand_out = ctx.hand_out, None
        # The only read from the device, when all of the step's work has been handed to it.
        return None, None, None, *hand_out(grad.item())


def average_after_backward(parameters: list[nn.Parameter], replicas: Replicas) -> None:
    """When the backward that runs now has ended, average `.grad` of `parameters` over replicas."""

    @torch.no_grad()
    def average() -> None:
        averaged: dict[int, Tensor] = {}
        for bucket in buckets_of(parameters):
            flat = torch.cat([_sum(p, p.grad, None).reshape(-1) for p in bucket])
            replicas.average(flat).wait()
            averaged |= _cut(flat, bucket)
        for parameter in parameters:
            parameter.grad = averaged[id(parameter)]

    Variable._execution_engine.queue_callback(average)


def _sum(parameter: nn.Parameter, own: Tensor | None, earlier: Tensor | None) -> Tensor:
    if own is None and earlier is None:
        return torch.zeros_like(parameter)
    if own is None or earlier is None:
        return own if own is not None else earlier  # type: ignore[return-value]
    return own + earlier


def _version(grad: Tensor | None) -> int | None:
    return None if grad is None else grad._version


def _cut(flat: Tensor, bucket: Sequence[nn.Parameter]) -> dict[int, Tensor]:
    """The parts of a bucket, by the parameters' identity."""
    parts = flat.split([p.numel() for p in bucket])
    return {id(p): part.view_as(p) for p, part in zip(bucket, parts, strict=True)}


def buckets_of(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of one dtype in runs of about `BUCKET_BYTES`."""
    buckets: list[list[nn.Parameter]] = []
    room: dict[torch.dtype, tuple[int, list[nn.Parameter]]] = {}
    for parameter in parameters:
        size = parameter.nbytes
        used, bucket = room.get(parameter.dtype, (BUCKET_BYTES, []))
        if used + size > BUCKET_BYTES:
            used, bucket = 0, []
            buckets.append(bucket)
        bucket.append(parameter)
        room[parameter.dtype] = (used + size, bucket)
    return buckets
