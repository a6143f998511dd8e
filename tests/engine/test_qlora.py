"""QLoRA: 4-bit base weights under LoRA adapters, where bitsandbytes is installed."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from sppo_hf import SPPOConfig, UnsupportedModelError
from sppo_hf.engine.convert import convert, revert
from sppo_hf.planning.activation_modes import mode_of
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model
from tests.engine.forced_plans import force_modes

bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")


def _quantise(module, bits=4):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            sizes = (child.in_features, child.out_features, child.bias is not None)
            linear = (
                bnb.nn.Linear4bit(*sizes, compute_dtype=torch.float32, quant_type="nf4")
                if bits == 4
                else bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
            )
            linear.load_state_dict(child.state_dict())
            setattr(module, name, linear.to("cpu"))
        else:
            _quantise(child, bits)


@pytest.mark.parametrize("settings", [
    {"recompute": "full"}, {"recompute": "none"},
    {"recompute": "none", "offload": "full", "min_offload_size": 1},
])  # fmt: skip
def test_adapters_get_the_gradients_of_the_unmodified_model(settings):
    _assert_same_gradients(_quantised_model(), **settings)


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_get_them_too_where_products_are_kept(monkeypatch, bits, tier):
    force_modes(monkeypatch, lambda chunk, layer: mode_of("matmuls", tier))
    _assert_same_gradients(_quantised_model(bits), min_offload_size=1)


@pytest.mark.parametrize("bits", [4, 8])
def test_modules_of_the_users_own_among_them_are_tried(bits):
    class Scaled(nn.Module):
        def __init__(self, mlp, mixes=False):
            super().__init__()
            self.mlp, self.mixes = mlp, mixes
            self.weight = nn.Parameter(torch.zeros(64))

        def forward(self, x):
            return self.mlp(x + self.weight * (x.mean(1, keepdim=True) if self.mixes else x))

    model = _quantised_model(bits)
    layer = model.base_model.model.model.layers[1]
    layer.mlp = Scaled(layer.mlp)
    _assert_same_gradients(model)
    mixing = _quantised_model(bits)
    layer = mixing.base_model.model.model.layers[1]
    layer.mlp = Scaled(layer.mlp, mixes=True)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp \(Scaled\).*other tokens"):
        convert(mixing, SPPOConfig(num_chunks=3, show_plan=False))


@pytest.mark.parametrize("training", [True, False])
def test_inputs_of_8_bit_layers_are_recomputed_too(monkeypatch, training):
    """In eval mode the CPU runs the autograd function that CUDA runs in both modes."""
    model = _quantised_model(8)
    convert(model, SPPOConfig(num_chunks=3, show_plan=False, recompute="full", offload="none"))
    for module in model.modules():
        module.training = training
    forward, inputs = bnb.nn.Linear8bitLt.forward, []

    def watched(self, x):
        inputs.append(weakref.ref(x))
        return forward(self, x)

    ids = torch.randint(0, 97, (2, 23), generator=torch.Generator().manual_seed(0))
    with monkeypatch.context() as patched:
        patched.setattr(bnb.nn.Linear8bitLt, "forward", watched)
        loss = model(input_ids=ids, labels=ids).loss
    gc.collect()
    assert len(inputs) == 3 * 3 * 7
    assert not any(reference() is not None for reference in inputs)
    loss.backward()
    assert any(p.grad is not None for p in model.parameters())
    revert(model)
    assert not any("forward" in m.__dict__ for m in model.modules() if "8bit" in type(m).__name__)


def _quantised_model(bits=4):
    model = build_tiny_model("llama", dtype=torch.float32, hidden_size=64)
    _quantise(model.model.layers, bits)
    return add_lora(model).train()


def _assert_same_gradients(model, **settings):
    ids = torch.randint(0, 97, (2, 23), generator=torch.Generator().manual_seed(0))

    def gradients(model):
        model(input_ids=ids, labels=ids).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients(copy.deepcopy(model))
    ours = gradients(convert(model, SPPOConfig(num_chunks=3, show_plan=False, **settings)))
    assert expected
    assert all("lora_" in name or name.endswith("mlp.weight") for name in ours)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5)
