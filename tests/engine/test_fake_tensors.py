"""Cheap fake tensors against real ones: shapes, strides, dtypes, shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.nn import functional

from sppo_hf.engine import fake_tensors
from sppo_hf.engine.fake_tensors import Fake, fake_like, run_fake
from sppo_hf.engine.selective import storage_key

pytestmark = pytest.mark.fake

OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "a product": lambda x: x @ x.transpose(0, 1),
    "of one integer": lambda x: x.new_ones(3, dtype=torch.long) * 2,
    "of one float": lambda x: x.new_ones(3, dtype=torch.long) * 2.0,
    "of one bool": lambda x: x.new_ones(3, dtype=torch.long) * True,
    "a slice of a slice": lambda x: x[1:][:, 2:5],
    "pieces": lambda x: x.split([2, 4], dim=1),
    "with a real one": lambda x: x + torch.ones(6, dtype=torch.float64),
    "by a mask": lambda x: x.masked_fill(torch.ones(4, 6, dtype=torch.bool), 0.0),
    "in place": lambda x: x.mul_(2).add_(1),
    "with statistics": lambda x: torch.native_layer_norm(x, (6,), None, None, 1e-5),
    "a convolution": lambda x: functional.conv1d(x[None], x.new_ones(4, 1, 3), groups=4),
    "cast": lambda x: x.to(torch.bfloat16).t().contiguous(),
    "chosen": lambda x: x[torch.tensor([2, 0])],
    "sorted": lambda x: x.topk(2, dim=-1),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_return_what_they_return_on_real_tensors(name: str, dtype: torch.dtype) -> None:
    for _ in range(2):  # asked, and remembered
        real = torch.ones(4, 6, dtype=dtype)
        fake = fake_like(real)
        assert _looks(OPERATIONS[name](fake), fake) == _looks(OPERATIONS[name](real), real)


def _looks(out: Any, given: Tensor) -> list[Any]:
    tensors = [out] if isinstance(out, Tensor) else out
    return [
        (
            *(x.shape, x.stride(), x.storage_offset(), x.dtype, x.device),
            *(storage_key(x) == storage_key(given), x is given),
            x.untyped_storage().nbytes(),
        )
        for x in tensors
    ]


def test_gradients_and_autocast() -> None:
    x = fake_like(torch.ones(4, 6, requires_grad=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = functional.silu(x @ x.t()).float()
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert isinstance(gradient, Fake)
    assert (gradient.shape, gradient.dtype) == (x.shape, torch.float32)


def test_an_operation_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    ask = fake_tensors._ask

    def counting(func: Any, args: Any, kwargs: Any) -> Any:
        asked.append(func)
        return ask(func, args, kwargs)

    monkeypatch.setattr(fake_tensors, "_answers", {})
    monkeypatch.setattr(fake_tensors, "_ask", counting)
    one, other, longer = (fake_like(torch.ones(n, 3)) for n in (2, 2, 5))
    assert [one.exp().shape, other.exp().shape, longer.exp().shape] == [(2, 3), (2, 3), (5, 3)]
    assert len(asked) == 2


def test_answers_follow_the_default_dtype() -> None:
    whole = fake_like(torch.ones(3, dtype=torch.long))
    default = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert (whole / whole).dtype == whole.sqrt().dtype == dtype
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize("ask", ["__bool__", "item", "tolist", "nonzero"])
def test_values_are_refused(ask: str) -> None:
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        getattr(fake_like(torch.ones(())), ask)()


@pytest.mark.parametrize("write", ["copy_", "add_", "index_put_"])
def test_a_constant_that_something_fake_is_written_into_has_no_value(write: str) -> None:
    aten = torch.ops.aten
    constant, other = torch.zeros(4), torch.zeros(4)
    view = constant[:2]
    fake = fake_like(torch.ones(2))
    writes: dict[str, Callable[[], Any]] = {
        "copy_": lambda: run_fake(aten.copy_.default, (view, fake), {}),
        "add_": lambda: run_fake(aten.add_.Tensor, (view, fake), {}),
        "index_put_": lambda: run_fake(
            aten.index_put_.default, (constant, [torch.tensor([0, 1])], fake), {}
        ),
    }
    assert run_fake(aten._local_scalar_dense.default, (constant[0],), {}) == 0.0
    writes[write]()
    for stale in (constant[0], view[1], constant[3]):
        with pytest.raises(DataDependentOutputException):
            run_fake(aten._local_scalar_dense.default, (stale,), {})
    assert isinstance(run_fake(aten.mul.Tensor, (constant, 2.0), {}), Fake)
    assert run_fake(aten._local_scalar_dense.default, (other[0],), {}) == 0.0


def test_constants_keep_their_values() -> None:
    assert run_fake(torch.ops.aten.mul.Tensor, (torch.tensor(2.0), 3.0), {}).item() == 6.0
