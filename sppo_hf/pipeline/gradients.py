"""Gradients of a pipeline's step: held back until `loss.backward()`, averaged over replicas.

A pipeline computes gradients inside `forward`, for the gradient of the loss that the last
`loss.backward()` had. The loss's own backward gives them to autograd as gradients of the
parameters, multiplied by what the loss's gradient has changed by (almost always 1). So a loss that
is never run backward leaves no trace, gradients accumulate as always, hooks on parameters run once
and see a parameter's whole gradient, and a gradient scaler may change its scale between steps.

[Note: what is averaged]
With replicas, gradients are averaged over them once per optimizer step, as DistributedDataParallel
does, and while the schedule still runs. What earlier micro-steps left in `.grad` is added before,
so that it is sent once, and the average becomes `.grad` without autograd. This assumes, on all
replicas, that nobody changes `.grad` between forward and backward, that the loss's gradient is what
it was the last time, and that no parameter has hooks. Where that turns out wrong (`zero_grad` in
between, two forwards before a backward, a loss that each replica weighs differently, a hook), the
averages are dropped, and what is in `.grad` when backward has ended is averaged instead: exact too,
without the overlap. Replicas agree on which of both they do. As under DistributedDataParallel,
hooks see the replica's own gradient; post-accumulate hooks, which may want to step an optimizer
with it, are refused therefore.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd import Variable

from sppo_hf.engine.model_parts import has_parameter_hooks
from sppo_hf.errors import ConfigError, SPPOError
from sppo_hf.pipeline.agreement import all_true

BUCKET_BYTES = 64 * 2**20
"""Bytes per collective: large enough for a link's full speed."""


class LossGradient:
    """The gradient that the next `loss.backward()` is expected to have: that of the last one."""

    def __init__(self, causal_lm: nn.Module) -> None:
        """Expect 1, times the scale of the gradient scaler if there is one."""
        self._causal_lm: Any = causal_lm
        self.scaler: Any = None
        """Gradient scaler of float16 training, which will multiply the loss by its scale."""
        self._unscaled = 1.0
        """Gradient of the mean loss in the last backward, without the scaler's scale."""

    def expected(self) -> Tensor:
        """Return the expected gradient of the mean loss, `[]`, at the current scale."""
        wide = torch.promote_types(self._causal_lm.dtype, torch.float32)
        return torch.as_tensor(self._unscaled * self.loss_scale(), dtype=wide)

    def note(self, grad: float, loss_scale: Tensor | float | None = None) -> None:
        """Store the gradient of the mean loss that a backward had.

        `loss_scale` is the scale that `grad` contains; None for the current one.
        """
        # A gradient of zero, or one that overflowed, is of no use for the prediction.
        if grad != 0.0 and math.isfinite(grad):
            scale = self.loss_scale() if loss_scale is None else loss_scale
            self._unscaled = grad / float(scale)

    def loss_scale(self) -> Tensor | float:
        """Return the scale by which the loss will be multiplied, `[]`; 1 without a scaler."""
        if self.scaler is None or not self.scaler.is_enabled():
            return 1.0
        # The scaler creates the tensor `_scale` when it first scales a loss.
        return self.scaler._init_scale if self.scaler._scale is None else self.scaler._scale.clone()


class StepGradients:
    """The gradients that one forward computes for all trained parameters of this rank."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set aside what `.grad` holds: until `collect`, it holds this step's gradients only."""
        self._parameters = [p for p in parameters if p.requires_grad]
        self._earlier = [p.grad for p in self._parameters]
        """Contents of `.grad` when forward began."""
        self._versions = [_version(grad) for grad in self._earlier]
        self._own: list[Tensor | None] = []
        """This step's gradients, once they were collected."""
        self._averages: dict[int, Tensor] = {}
        """Averages over replicas of this step's and earlier gradients, by id of the parameter."""
        self._buckets: list[tuple[Any, Tensor, list[nn.Parameter]]] = []
        """Running averages: c10d Work, flat buffer, and the parameters in it."""
        self._replicas: Replicas | None = None
        self._is_collected = False
        for parameter in self._parameters:
            parameter.grad = None

    def collect(self) -> None:
        """Take this step's gradients out of `.grad`, after the schedule, and restore `.grad`."""
        for work, flat, bucket in self._buckets:
            work.wait()
            self._averages |= {id(p): part for p, part in parts_of(flat, bucket)}
        self._buckets.clear()
        if not self._is_collected:
            self._own = [p.grad for p in self._parameters]
            self._restore()

    def discard(self) -> None:
        """Drop this step's gradients after the schedule failed, and restore `.grad`."""
        self._buckets.clear()
        self._restore()

    def _restore(self) -> None:
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            parameter.grad = earlier
        self._is_collected = True

    def start_averaging(self, parameters: Sequence[nn.Parameter], replicas: Replicas) -> None:
        """Start averaging the gradients of `parameters`, whose backward is done, over replicas."""
        self._replicas = replicas
        earlier = {id(p): g for p, g in zip(self._parameters, self._earlier, strict=True)}
        for bucket in buckets_of([p for p in parameters if id(p) in earlier]):
            flat = torch.cat([_sum(p, p.grad, earlier[id(p)]).reshape(-1) for p in bucket])
            self._buckets.append((replicas.start_average(flat), flat, bucket))

    def sum_tied(self, parameters: Sequence[nn.Parameter], group: Any) -> None:
        """Sum the gradients of parameters that both ends of a pipeline hold, over `group`.

        Called after the schedule, before any of these is averaged over replicas.
        """
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that got a gradient in this step."""
        assert self._is_collected, "gradients are complete when the schedule has run"
        return [p for p, g in zip(self._parameters, self._own, strict=True) if g is not None]

    @torch.no_grad()
    def release(self, factor: float) -> list[Tensor | None]:
        """Return the gradients of `parameters()` to the backward that runs now; once.

        None where the average was put into `.grad`; see [Note: what is averaged]. `factor` is the
        gradient of the loss now, over the one that the schedule ran with.
        """
        parameters, averages, replicas = self.parameters(), self._averages, self._replicas
        averaged = [p for p in self._parameters if id(p) in averages]
        if replicas is not None:
            states = zip(self._parameters, self._earlier, self._versions, strict=True)
            as_assumed = (
                factor == 1.0
                and all(p.grad is grad and _version(grad) == old for p, grad, old in states)
                and not has_parameter_hooks(averaged)
            )
            if replicas.all_true(as_assumed):
                for parameter in averaged:
                    parameter.grad = averages[id(parameter)]
            else:
                averages = {}
                average_after_backward(averaged, replicas)
        own = [grad for grad in self._own if grad is not None]
        self._parameters, self._own, self._earlier, self._averages = [], [], [], {}
        return [
            None if id(parameter) in averages else grad if factor == 1.0 else grad.mul_(factor)
            for parameter, grad in zip(parameters, own, strict=True)
        ]


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
    """Collectives of the ranks that hold the same stages of other pipelines."""

    def __init__(self, group: Any, control_group: Any) -> None:
        self._group = group
        self._control_group = control_group

    def start_average(self, flat: Tensor) -> Any:
        """Start averaging in place; returns the c10d Work."""
        flat /= dist.get_world_size(self._group)
        return dist.all_reduce(flat, group=self._group, async_op=True)

    def all_true(self, value: bool) -> bool:
        """Whether `value` is true on all replicas; all of them call this at the same moments."""
        return all_true(value, self._control_group)


Release = Callable[[tuple[Tensor | None, ...]], list[Tensor | None]]
"""Takes the gradients of a step's values, None for those without; returns the parameters'."""


def step_values(
    values: Sequence[Tensor], parameters: Iterable[Tensor], release: Release
) -> tuple[Tensor, ...]:
    """Return copies of `values`, whose backward gives `parameters` what `release` returns.

    It runs once, also without parameters; a second backward raises an SPPOError.
    """
    anchor = torch.zeros((), device=values[0].device, requires_grad=True)
    return _StepValues.apply(release, len(values), anchor, *values, *parameters)


class _StepValues(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, release: Release, count: int, _anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.release = release
        values = tuple(value.clone() for value in tensors[:count])
        ctx.mark_non_differentiable(*(x for x in values if not x.is_floating_point()))
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if ctx.release is None:
            raise SPPOError(
                "backward ran twice through what a pipeline returned. Chunked sequences allow one "
                "backward per forward (retain_graph=True is not supported); run the forward again."
            )
        release, ctx.release = ctx.release, None
        return *(None,) * (3 + len(grads)), *release(grads)


def average_after_backward(parameters: list[nn.Parameter], replicas: Replicas) -> None:
    """Average `.grad` of `parameters` over replicas once the backward that runs now has ended."""

    @torch.no_grad()
    def average() -> None:
        for bucket in buckets_of(parameters):
            flat = torch.cat([_sum(p, p.grad, None).reshape(-1) for p in bucket])
            replicas.start_average(flat).wait()
            for parameter, part in parts_of(flat, bucket):
                parameter.grad = part

    Variable._execution_engine.queue_callback(average)


def _sum(parameter: nn.Parameter, own: Tensor | None, earlier: Tensor | None) -> Tensor:
    if own is None:
        return torch.zeros_like(parameter) if earlier is None else earlier
    return own if earlier is None else own + earlier


def _version(grad: Tensor | None) -> int | None:
    return None if grad is None else grad._version


def parts_of(flat: Tensor, bucket: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter of a bucket with its part of the flat tensor, in its shape."""
    parts = flat.split([p.numel() for p in bucket]) if bucket else ()
    yield from ((p, part.view_as(p)) for p, part in zip(bucket, parts, strict=True))


def buckets_of(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divide parameters into buckets of one dtype and about `BUCKET_BYTES`."""
    buckets: list[list[nn.Parameter]] = []
    current: dict[torch.dtype, tuple[int, list[nn.Parameter]]] = {}
    """Bytes of the bucket to fill, and the bucket, by dtype."""
    for parameter in parameters:
        used, bucket = current.get(parameter.dtype, (BUCKET_BYTES, []))
        if used + parameter.nbytes > BUCKET_BYTES:
            used, bucket = 0, []
            buckets.append(bucket)
        bucket.append(parameter)
        current[parameter.dtype] = (used + parameter.nbytes, bucket)
    return buckets
