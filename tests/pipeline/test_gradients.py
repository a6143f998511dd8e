"""Gradients of a step: held back, scaled by what the loss's scale changed by, reduced once.

Here replicas are made up: a fake `all_reduce` answers as if another one had three times ours, so an
average is twice what this rank has, and one that is missing or done twice shows. Real ones are in
test_pipeline_exactness.py.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sppo_hf.errors import ConfigError, SPPOError
from sppo_hf.pipeline import agreement
from sppo_hf.pipeline import gradients as module
from sppo_hf.pipeline.gradients import (
    Replicas,
    StepGradients,
    refuse_post_accumulate_hooks,
    step_values,
)

OTHERS = 3.0
AVERAGE = (1 + OTHERS) / 2


class FakeReplicas(Replicas):
    """Two replicas; the other has `OTHERS` times our numbers, and agrees with us if `agrees`."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self) -> None:
        super().__init__("replicas", "control")
        self.reduced: list[int] = []
        self.agrees = True

    def get_world_size(self, group: Any) -> int:
        assert group == "replicas"
        return 2

    def all_reduce(
        self, tensor: Tensor, *, group: Any, async_op: bool = False, op: Any = None
    ) -> Any:
        if group == "control":
            assert op == self.ReduceOp.MIN
            tensor.mul_(int(self.agrees))
            return None
        self.reduced.append(tensor.numel())
        if not async_op:
            tensor.mul_(1 + OTHERS)
            return None
        # Nothing is there before somebody waits.
        return SimpleNamespace(wait=lambda: tensor.mul_(1 + OTHERS))


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> FakeReplicas:
    made = FakeReplicas()
    monkeypatch.setattr(module, "dist", made)
    monkeypatch.setattr(agreement, "dist", made)
    return made


def make(*earlier: float | None) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(2, index + 1)) for index in range(len(earlier))]
    for parameter, value in zip(parameters, earlier, strict=True):
        parameter.grad = None if value is None else torch.full_like(parameter, value)
    return parameters


def compute(parameters: list[nn.Parameter], *own: float | None) -> None:
    """Set gradients as a schedule does."""
    for parameter, value in zip(parameters, own, strict=True):
        assert parameter.grad is None
        parameter.grad = None if value is None else torch.full_like(parameter, value)


def backward(step: StepGradients, factor: float) -> None:
    """Run the loss's backward with `factor` times the gradient that the schedule assumed."""
    loss_of(step.release, step.parameters()).backward(torch.tensor(factor))


def loss_of(
    release: Callable[[float], list[Tensor | None]],
    parameters: list[nn.Parameter],
    value: Tensor | None = None,
) -> Tensor:
    """Return a loss of 2.5, or `value`, whose backward calls `release` with its gradient."""

    def take(grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        assert grads[0] is not None
        return release(grads[0].item())

    value = torch.tensor(2.5) if value is None else value
    (loss,) = step_values((value,), parameters, take)
    return loss


def values(parameters: list[nn.Parameter]) -> list[float | None]:
    found: list[float | None] = []
    for parameter in parameters:
        grad = parameter.grad
        assert grad is None or grad.min() == grad.max()
        found.append(None if grad is None else grad.max().item())
    return found


def test_gradients_come_with_the_losss_backward_and_not_before() -> None:
    parameters = make(None, 5.0, None, 7.0)
    step = StepGradients(parameters)
    compute(parameters, 1.0, 2.0, None, None)
    step.collect()
    assert values(parameters) == [None, 5.0, None, 7.0]
    backward(step, 1.0)
    assert values(parameters) == [1.0, 7.0, None, 7.0]


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 3.0])
def test_only_this_steps_gradients_are_scaled(factor: float) -> None:
    parameters = make(None, 5.0)
    step = StepGradients(parameters)
    compute(parameters, 1.0, 2.0)
    step.collect()
    backward(step, factor)
    assert values(parameters) == [factor, 5.0 + 2.0 * factor]


def test_accumulation_adds_into_the_same_tensor() -> None:
    # Optimizers and buckets of others may hold on to it.
    parameters = make(5.0)
    held = parameters[0].grad
    step = StepGradients(parameters)
    compute(parameters, 2.0)
    step.collect()
    backward(step, 1.0)
    assert parameters[0].grad is held


def test_frozen_parameters_are_left_alone() -> None:
    frozen, trained = make(5.0, None)
    frozen.requires_grad_(False)
    step = StepGradients([frozen, trained])
    assert values([frozen]) == [5.0]
    trained.grad = torch.ones_like(trained)
    step.collect()
    backward(step, 2.0)
    assert values([frozen, trained]) == [5.0, 2.0]


def test_a_loss_that_is_never_run_backward_leaves_no_trace() -> None:
    parameters = make(None, 5.0)
    held = parameters[1].grad
    step = StepGradients(parameters)
    compute(parameters, 1.0, 2.0)
    step.collect()
    del step
    assert values(parameters) == [None, 5.0]
    assert parameters[1].grad is held


def test_a_failed_schedule_leaves_no_trace(replicas: FakeReplicas) -> None:
    parameters = make(None, 5.0)
    step = StepGradients(parameters)
    compute(parameters, 1.0, 2.0)
    step.start_averaging(parameters[:1], replicas)
    step.discard()
    assert values(parameters) == [None, 5.0]


@pytest.mark.parametrize("factor", [1.0, 0.5, 3.0])
def test_an_average_has_what_accumulated_and_this_step(
    replicas: FakeReplicas, factor: float
) -> None:
    parameters = make(None, 5.0, 5.0, None)
    step = StepGradients(parameters)
    compute(parameters, 1.0, 2.0, None, None)
    step.start_averaging(parameters, replicas)
    step.collect()
    assert values(parameters) == [None, 5.0, 5.0, None]
    assert replicas.reduced == [2 + 4 + 6 + 8], "one message for all"
    backward(step, factor)
    expected = [factor, 5.0 + 2.0 * factor, 5.0, 0.0]
    assert values(parameters) == [AVERAGE * one for one in expected]


def test_grad_zeroed_between_forward_and_backward_is_not_added(replicas: FakeReplicas) -> None:
    """`loss = model(...)`, then `zero_grad()`, then `backward()`: an older gradient is gone."""
    parameters = make(5.0, 5.0)
    step = StepGradients(parameters)
    compute(parameters, 1.0, 1.0)
    step.start_averaging(parameters, replicas)
    step.collect()
    parameters[0].grad = None
    assert parameters[1].grad is not None
    parameters[1].grad.zero_()
    backward(step, 1.0)
    assert values(parameters) == [AVERAGE, AVERAGE]


def test_two_forwards_before_a_backward_add_up(replicas: FakeReplicas) -> None:
    parameters = make(None)
    steps = []
    for own in (1.0, 10.0):
        step = StepGradients(parameters)
        compute(parameters, own)
        step.start_averaging(parameters, replicas)
        step.collect()
        steps.append(step)
    backward(steps[0], 1.0)
    first = AVERAGE * 1.0
    assert values(parameters) == [first]
    backward(steps[1], 1.0)
    # What is averaged already is the same everywhere; the fake's other replica has three times it.
    assert values(parameters) == [AVERAGE * (first + 10.0)]


def test_replicas_that_do_not_agree_reduce_again(replicas: FakeReplicas) -> None:
    """The other replica's loss has another scale, so what was reduced is of no use."""
    parameters = make(5.0)
    step = StepGradients(parameters)
    compute(parameters, 1.0)
    step.start_averaging(parameters, replicas)
    step.collect()
    replicas.agrees = False
    backward(step, 1.0)
    assert values(parameters) == [AVERAGE * 6.0]
    assert len(replicas.reduced) == 2


def test_a_step_without_reduction_and_one_with_it(replicas: FakeReplicas) -> None:
    """Accumulation: what the first step leaves on each replica travels with the second's."""
    parameters = make(None)
    for turn, reduces in enumerate((False, True)):
        step = StepGradients(parameters)
        compute(parameters, 1.0 + turn)
        if reduces:
            step.start_averaging(parameters, replicas)
        step.collect()
        backward(step, 1.0)
        assert len(replicas.reduced) == int(reduces)
    assert values(parameters) == [AVERAGE * 3.0]


def test_some_reduced_and_some_not(replicas: FakeReplicas) -> None:
    parameters = make(None, None)
    step = StepGradients(parameters)
    compute(parameters, 1.0, 1.0)
    step.start_averaging(parameters[1:], replicas)
    step.collect()
    backward(step, 2.0)
    assert values(parameters) == [2.0, 2.0 * AVERAGE]


def test_parameters_that_are_not_trained_here_are_not_sent(replicas: FakeReplicas) -> None:
    parameters = make(None, None)
    parameters[1].requires_grad_(False)
    step = StepGradients(parameters)
    parameters[0].grad = torch.ones_like(parameters[0])
    step.start_averaging(parameters, replicas)
    assert replicas.reduced == [parameters[0].numel()]


def test_buckets_are_of_one_dtype_and_bounded(
    replicas: FakeReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Float32 parameters of 8, 16, 24 and 32 bytes; the second is float64 and so takes 32.
    monkeypatch.setattr(module, "BUCKET_BYTES", 40)
    parameters = make(None, None, None, None)
    parameters[1] = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    step = StepGradients(parameters)
    compute(parameters, 1.0, 2.0, 3.0, 4.0)
    step.start_averaging(parameters, replicas)
    step.collect()
    backward(step, 1.0)
    # 8 and 24 bytes fit into one, 32 more do not; float64 is apart.
    assert sorted(replicas.reduced) == [4, 2 + 6, 8]
    assert values(parameters) == [AVERAGE * one for one in (1.0, 2.0, 3.0, 4.0)]
    dtypes = [parameter.grad.dtype for parameter in parameters if parameter.grad is not None]
    assert dtypes == [torch.float32, torch.float64, torch.float32, torch.float32]


def test_shared_parameters_are_summed_over_both_ends(replicas: FakeReplicas) -> None:
    parameters = make(5.0, None)
    step = StepGradients(parameters)
    compute(parameters, 1.0, None)
    step.sum_tied(parameters, "ends")
    step.collect()
    backward(step, 1.0)
    # The sum holds this step's alone; what the step had before was summed when it came.
    assert values(parameters) == [5.0 + (1 + OTHERS), 0.0]


def test_the_loss_hands_out_its_gradient_at_backward() -> None:
    seen: list[float] = []

    def release(grad: float) -> list[Tensor | None]:
        seen.append(grad)
        return [torch.ones(2), None]

    parameters = make(None, None)
    parameters[0] = nn.Parameter(torch.zeros(2))
    value = torch.tensor(2.5, dtype=torch.float64)
    loss = loss_of(release, parameters, value)
    assert loss.requires_grad
    assert loss.item() == 2.5
    assert loss.dtype == torch.float64
    assert not seen
    (loss * 3 / 4).backward()
    assert seen == [0.75]
    assert values(parameters) == [1.0, None]
    # The caller's own number is no part of the graph.
    loss.detach().mul_(0)
    assert value.item() == 2.5


def test_a_second_backward_is_refused() -> None:
    seen: list[float] = []

    def release(grad: float) -> list[Tensor | None]:
        seen.append(grad)
        return []

    loss = loss_of(release, [])
    loss.backward(retain_graph=True)
    with pytest.raises(SPPOError, match=r"backward ran twice.*run the forward again"):
        loss.backward()
    assert seen == [1.0]


def hook_all(parameters: list[nn.Parameter], calls: list[float]) -> None:
    """Hooks that are not linear, and note what they get."""

    def square(grad: Tensor) -> Tensor:
        calls.append(grad.max().item())
        return grad.square()

    for parameter in parameters:
        parameter.register_hook(square)


def test_hooks_run_once_on_what_this_step_adds() -> None:
    parameters, calls = make(None, 5.0, 7.0), []
    hook_all(parameters, calls)
    step = StepGradients(parameters)
    compute(parameters, 2.0, 3.0, None)
    step.collect()
    assert not calls
    backward(step, 2.0)
    assert sorted(calls) == [4.0, 6.0], "and none for what had no gradient"
    assert values(parameters) == [16.0, 5.0 + 36.0, 7.0]


def test_hooks_see_a_replicas_own_gradient_before_it_is_averaged(replicas: FakeReplicas) -> None:
    parameters, calls = make(5.0, None), []
    hook_all(parameters[:1], calls)
    step = StepGradients(parameters)
    compute(parameters, 2.0, 3.0)
    step.start_averaging(parameters, replicas)
    step.collect()
    backward(step, 1.0)
    assert calls == [2.0]
    assert values(parameters) == [AVERAGE * (5.0 + 4.0), AVERAGE * 3.0]


def test_post_accumulate_hooks_are_refused_where_they_would_see_half() -> None:
    (parameter,) = make(None)
    refuse_post_accumulate_hooks([("head.weight", parameter)])
    handle = parameter.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ConfigError, match=r"head\.weight has a post-accumulate.*Remedy"):
        refuse_post_accumulate_hooks([("head.weight", parameter)])
    handle.remove()
    refuse_post_accumulate_hooks([("head.weight", parameter)])
