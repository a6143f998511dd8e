"""Losses of the caller's in a pipeline: whose hooks see which gradients, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from sppo_hf.pipeline.gradients import StepGradients, step_values
from sppo_hf.pipeline.token_outputs import TokenCall

pytestmark = pytest.mark.fake


def held(parameters: list[nn.Parameter], *own: float | None) -> Tensor:
    """Return a call's output, `[]`; its backward gives each parameter its own gradient, or none."""
    call = TokenCall.__new__(TokenCall)
    call._parameters = parameters
    step = StepGradients(parameters)
    for parameter, grad in zip(parameters, own, strict=True):
        parameter.grad = None if grad is None else torch.full_like(parameter, grad)
    step.collect()
    (output,) = step_values((torch.ones(()),), parameters, lambda _: call._release(step, 2.0))
    return output


def make(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2)) for _ in range(count)]


def test_hooks_see_gradients_alone() -> None:
    used, unused = make(2)
    seen: list[tuple[str, Any]] = []
    used.register_hook(lambda grad: seen.append(("used", grad.tolist())))
    kept = unused.register_hook(lambda grad: seen.append(("unused", grad)))
    hooks = dict(unused._backward_hooks or {})
    held([used, unused], 3.0, None).backward()
    assert seen == [("used", [6.0, 6.0])]
    assert unused.grad is None
    assert unused._backward_hooks == hooks, "what was put around them is gone"
    held([used, unused], None, 1.0).backward()
    assert [name for name, _ in seen] == ["used", "unused"]
    kept.remove()
    assert not unused._backward_hooks


def test_what_another_call_gives_is_seen_once_and_whole() -> None:
    one, other = make(2)
    seen: list[list[float]] = []
    one.register_hook(lambda grad: seen.append(grad.tolist()))
    (held([one, other], 1.0, None) + held([one, other], None, 1.0)).backward()
    assert seen == [[2.0, 2.0]]
    assert one.grad is not None
    assert one.grad.tolist() == [2.0, 2.0]


def test_a_hook_on_several_parameters_is_called_once_all_have_been_visited() -> None:
    used, unused = make(2)
    seen: list[list[bool]] = []
    register_multi_grad_hook((used, unused), lambda grads: seen.append([g is None for g in grads]))
    held([used, unused], 1.0, None).backward()
    assert seen == [[False, True]]


def test_a_backward_that_fails_leaves_hooks_that_work() -> None:
    used, unused = make(2)
    seen: list[Tensor] = []
    unused.register_hook(seen.append)

    def fail(_: Tensor) -> None:
        raise RuntimeError("in the middle")

    failing = used.register_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        held([used, unused], 1.0, None).backward()
    failing.remove()
    held([used, unused], 1.0, None).backward()
    held([used, unused], None, 1.0).backward()
    assert len(seen) == 1
