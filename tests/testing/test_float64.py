"""The float64 mode does what exactness in float64 rests on, and leaves no trace."""

import contextlib
import sys
import types
from typing import Any

import pytest
import torch

from sppo_hf.testing.exactness import float64_everywhere, run_batch
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch

FLOAT32 = torch.float32


def test_requests_for_float32_are_answered_in_float64() -> None:
    x = torch.ones(3, dtype=torch.float64)
    with float64_everywhere():
        assert x.float().dtype == torch.float64
        assert x.to(torch.float32).dtype == torch.float64
        assert x.to(dtype=torch.float32).dtype == torch.float64
        assert x.type(torch.float32).dtype == torch.float64
        assert torch.softmax(x, dim=-1, dtype=torch.float32).dtype == torch.float64
        assert torch.nn.functional.softmax(x, dim=-1, dtype=torch.float32).dtype == torch.float64
        assert torch.arange(3, dtype=torch.float).dtype == torch.float64
        assert torch.arange(3).float().dtype == torch.float64
        assert torch.zeros(3).dtype == torch.float64
        assert torch.arange(3).dtype == torch.int64
        assert x.to(torch.bfloat16).dtype == torch.bfloat16
    assert x.float().dtype == FLOAT32
    assert x.to(torch.float32).dtype == FLOAT32
    assert torch.zeros(3).dtype == FLOAT32


def test_it_leaves_torch_as_it_was() -> None:
    before = dict(vars(torch)), torch.Tensor.float
    with float64_everywhere():
        assert sys.modules["torch"] is not torch  # what torch's own code sees is torch
        assert sys.modules["torch"].float32 is not torch.float32
        assert torch.Tensor is sys.modules["torch"].Tensor
        assert torch.nn.Module is sys.modules["torch"].nn.Module
    assert torch is sys.modules["torch"]
    assert (dict(vars(torch)), torch.Tensor.float) == before
    assert "float" not in vars(torch.Tensor)


def test_modules_that_are_imported_later_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):  # the second takes the place of the first
        with float64_everywhere():
            pass
        monkeypatch.delitem(sys.modules, "tests.imported_later", raising=False)
        later: Any = types.ModuleType("tests.imported_later")
        later.torch = torch
        monkeypatch.setitem(sys.modules, later.__name__, later)
        with float64_everywhere():
            assert later.torch.float32 == torch.float64
        assert later.torch.float32 is FLOAT32


def test_what_another_thread_is_importing_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow: Any = types.ModuleType("tests.imported_slowly")
    slow.__spec__ = types.SimpleNamespace(_initializing=True)
    for module in (slow, types.ModuleType("tests.imported_meanwhile")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with float64_everywhere():
        pass
    slow.torch = torch
    slow.__spec__._initializing = False
    with float64_everywhere():
        assert slow.torch.float32 == torch.float64
    assert slow.torch.float32 is FLOAT32


def _given(dtype: torch.dtype = torch.float32, *, named: torch.dtype = torch.float32) -> Any:
    return dtype, named


class _Holds:
    @torch.no_grad()
    def method(self, dtype: torch.dtype = torch.float32) -> torch.dtype:
        return dtype

    @staticmethod
    def function(*, dtype: torch.dtype = torch.float32) -> torch.dtype:
        return dtype


def test_names_and_default_arguments_are_replaced_too() -> None:
    """Some write `from torch import float32`, and some `def norm(x, dtype=torch.float32)`."""

    def seen() -> set[torch.dtype]:
        return {FLOAT32, *_given(), _Holds().method(), _Holds.function()}

    assert seen() == {FLOAT32}
    before = _given.__defaults__, _given.__kwdefaults__
    with float64_everywhere():
        assert seen() == {torch.float64}
    assert seen() == {FLOAT32} == {torch.float32}
    assert (_given.__defaults__, _given.__kwdefaults__) == before


def test_new_attributes_of_torch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with float64_everywhere():
        monkeypatch.setattr(sys.modules["torch"], "new_here", 1, raising=False)
        assert torch.new_here == 1  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match="no_such"):
            _ = torch.no_such  # type: ignore[attr-defined]


def test_an_exception_leaves_no_trace() -> None:
    with contextlib.suppress(ZeroDivisionError), float64_everywhere():
        raise ZeroDivisionError
    assert torch.zeros(1).float().dtype == FLOAT32


def test_the_mode_ends_when_the_last_context_exits() -> None:
    """Also where they do not leave in the order in which they came, as threads do."""
    first, second = float64_everywhere(), float64_everywhere()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.zeros(1).float().dtype == torch.float64
    second.__exit__(None, None, None)
    assert torch.zeros(1).float().dtype == FLOAT32


def test_code_that_autograd_calls_computes_in_float64() -> None:
    """Layers run again in backward; torch takes modes of its own off the stack there."""
    seen: list[torch.dtype] = []

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.extend((grad.float().dtype, grad.to(torch.float32).dtype))
            return grad

    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with float64_everywhere():
        Again.apply(x).sum().backward()
    assert seen == [torch.float64] * 2


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_moe", "deepseek_v3", "olmo2"])
def test_two_orders_of_the_same_sums_agree(family: str) -> None:
    """Eager and SDPA add up in other orders; only in real float64 do they agree this closely."""
    gradients = {}
    for attention in ("eager", "sdpa"):
        model = build_tiny_model(family)
        model.set_attn_implementation(attention)
        gradients[attention] = run_batch(model, make_batch(rows=2, padding=(0, 5)))
    assert gradients["eager"].loss == pytest.approx(gradients["sdpa"].loss, rel=1e-12)
    for name, eager in gradients["eager"].by_name.items():
        sdpa = gradients["sdpa"].by_name[name]
        assert eager is not None
        assert sdpa is not None
        assert (eager - sdpa).abs().max() <= 1e-10 * eager.abs().max(), name


def test_without_the_mode_two_orders_of_sums_differ() -> None:
    """The reason for the mode: float64 weights alone leave differences of float32 size."""
    gradients = []
    for attention in ("eager", "sdpa"):
        model = build_tiny_model("llama")
        model.set_attn_implementation(attention)
        model(**make_batch(rows=2)).loss.backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    eager, sdpa = gradients
    assert (eager - sdpa).abs().max() > 1e-9 * eager.abs().max()
