"""Backward in two halves: what waits, what does not, and that both make the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sppo_hf.pipeline.stage_runner import DeferWeights, WeightGradients

Grads = dict[str, Tensor | None]


class Block(nn.Module):
    """Two linear layers around a norm, the first with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.out = nn.Linear(10, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.norm(self.into(x))))


def make(dtype: torch.dtype = torch.float64) -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    return Block().to(dtype), torch.randn(2, 3, 6, dtype=dtype, requires_grad=True)


def grads_of(module: nn.Module) -> Grads:
    return {name: p.grad for name, p in module.named_parameters()}


def split_run(module: nn.Module, x: Tensor) -> tuple[Tensor, WeightGradients]:
    """Forward, and the first half of backward."""
    due = WeightGradients()
    with DeferWeights(lambda: due):
        y = module(x)
    y.square().sum().backward()
    return y, due


def assert_same(ours: Grads, theirs: Grads, **tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, **tolerance)


def test_weights_of_linear_layers_wait_and_nothing_else_does() -> None:
    module, x = make()
    plain, y = copy.deepcopy(module), x.detach().clone().requires_grad_()
    plain(y).square().sum().backward()
    _, due = split_run(module, x)
    early = {name for name, grad in grads_of(module).items() if grad is not None}
    assert early == {"norm.weight", "norm.bias"}
    torch.testing.assert_close(x.grad, y.grad)
    assert len(due) == 2
    due.run()
    assert len(due) == 0
    assert_same(grads_of(module), grads_of(plain))
    due.run()
    assert_same(grads_of(module), grads_of(plain))


def test_each_backward_has_its_own_weights_to_wait_for() -> None:
    module, x = make()
    plain = copy.deepcopy(module)
    stores = [WeightGradients(), WeightGradients()]
    now = stores[0]
    with DeferWeights(lambda: now):
        losses = [module(scale * x).square().sum() for scale in (1.0, 2.0)]
    # Whose they are is asked when backward runs, not before.
    for now, loss in zip(stores, losses, strict=True):  # noqa: B007
        loss.backward()
    assert [len(store) for store in stores] == [2, 2]
    stores[1].run()
    plain(2.0 * x.detach()).square().sum().backward()
    assert_same(
        {n: g for n, g in grads_of(module).items() if "norm" not in n},
        {n: g for n, g in grads_of(plain).items() if "norm" not in n},
    )
    stores[0].run()
    plain(x.detach()).square().sum().backward()
    assert_same(grads_of(module), grads_of(plain))


def test_what_is_there_already_is_added_to() -> None:
    module, x = make()
    module.into.weight.grad = torch.ones_like(module.into.weight)
    held = module.into.weight.grad
    _, due = split_run(module, x)
    assert torch.equal(held, torch.ones_like(held))
    due.run()
    assert module.into.weight.grad is held
    fresh, y = make()
    fresh(y).square().sum().backward()
    torch.testing.assert_close(held, fresh.into.weight.grad + 1)  # type: ignore[operator]


@pytest.mark.parametrize("frozen", ["into.weight", "into.bias", "out.weight"])
def test_frozen_parameters_get_nothing(frozen: str) -> None:
    module, x = make()
    module.get_parameter(frozen).requires_grad_(False)
    plain = copy.deepcopy(module)
    _, due = split_run(module, x)
    due.run()
    plain(x.detach().requires_grad_()).square().sum().backward()
    theirs = grads_of(plain)
    assert theirs[frozen] is None
    assert_same(grads_of(module), theirs)


def test_adapters_wait_and_the_frozen_weight_is_not_touched() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    module, x = make(torch.float32)
    adapted = get_peft_model(
        module,  # type: ignore[arg-type]
        LoraConfig(r=2, target_modules=["into", "out"], init_lora_weights=False),
    )
    plain = copy.deepcopy(adapted)
    _, due = split_run(adapted, x)
    assert len(due) == 4
    waiting = [n for n, p in adapted.named_parameters() if p.requires_grad and p.grad is None]
    assert len(waiting) == 4
    due.run()
    plain(x.detach().requires_grad_()).square().sum().backward()
    assert_same(grads_of(adapted), grads_of(plain))


def test_under_autocast_gradients_are_the_unsplit_ones() -> None:
    module, x = make(torch.float32)
    plain, z = copy.deepcopy(module), x.detach().clone().requires_grad_()
    due = WeightGradients()
    with DeferWeights(lambda: due), torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(z)
    assert y.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected)
    y.float().square().sum().backward()
    expected.float().square().sum().backward()
    due.run()
    assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {torch.float32}
    # Products in bfloat16 sum in another order.
    assert_same(grads_of(module), grads_of(plain), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(x.grad, z.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("run", [
    lambda w, x: F.linear(x, w),
    lambda w, x: F.linear(input=x, weight=w),
    lambda w, x: F.linear(x, w, None),
    lambda w, x: F.linear(x, weight=w, bias=None),
])  # fmt: skip
def test_every_way_to_call_linear(run: Callable[[Tensor, Tensor], Tensor]) -> None:
    weight, x = nn.Parameter(torch.randn(3, 4)), torch.randn(5, 4)
    due = WeightGradients()
    with DeferWeights(lambda: due):
        run(weight, x).sum().backward()
    assert weight.grad is None
    due.run()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(3, 4))


def test_what_is_no_parameter_or_needs_no_gradient_goes_its_usual_way() -> None:
    x = torch.randn(5, 4)
    weight = torch.randn(3, 4, requires_grad=True)
    parameter = nn.Parameter(torch.randn(3, 4))
    due = WeightGradients()
    with DeferWeights(lambda: due):
        F.linear(x, weight * 1.0).sum().backward()
        with torch.no_grad():
            assert not F.linear(x, parameter).requires_grad
        F.linear(x, parameter.requires_grad_(False))
    assert weight.grad is not None
    assert len(due) == 0


def test_recomputed_layers_leave_their_weights_too() -> None:
    from torch.utils.checkpoint import checkpoint

    module, x = make()
    plain = copy.deepcopy(module)
    due = WeightGradients()
    with DeferWeights(lambda: due):
        y = checkpoint(
            module,
            x,
            use_reentrant=False,
            context_fn=lambda: (DeferWeights(lambda: due), DeferWeights(lambda: due)),
        )
    y.square().sum().backward()
    assert module.into.weight.grad is None
    due.run()
    plain(x.detach().requires_grad_()).square().sum().backward()
    assert_same(grads_of(module), grads_of(plain))
