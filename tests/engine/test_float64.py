"""The float64 mode does what exactness in float64 rests on, and leaves no trace."""

import contextlib

import pytest
import torch

from sppo_hf.testing.exactness import Float64Everywhere, float64_everywhere, run_batch
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch


def test_requests_for_float32_are_answered_in_float64() -> None:
    x = torch.ones(3, dtype=torch.float64)
    with Float64Everywhere():
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
    assert x.float().dtype == torch.float32
    assert torch.zeros(3).dtype == torch.float32


def test_an_exception_leaves_no_trace() -> None:
    with contextlib.suppress(ZeroDivisionError), Float64Everywhere():
        raise ZeroDivisionError
    assert torch.zeros(1).float().dtype == torch.float32


def test_wrapped_layers_get_their_forward_back() -> None:
    model = build_tiny_model("llama")
    before = [dict(vars(layer)) for layer in model.model.layers]
    with float64_everywhere(model):
        assert all("forward" in vars(layer) for layer in model.model.layers)
    assert [dict(vars(layer)) for layer in model.model.layers] == before


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


def test_without_the_mode_they_do_not() -> None:
    """The reason for the mode: float64 weights alone leave differences of float32 size."""
    gradients = []
    for attention in ("eager", "sdpa"):
        model = build_tiny_model("llama")
        model.set_attn_implementation(attention)
        model(**make_batch(rows=2)).loss.backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    eager, sdpa = gradients
    assert (eager - sdpa).abs().max() > 1e-9 * eager.abs().max()
