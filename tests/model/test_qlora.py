"""QLoRA: 4-bit base weights under LoRA adapters, where bitsandbytes is installed."""

import copy

import pytest
import torch
from torch import nn

from sppo_hf import SPPOConfig
from sppo_hf.model.convert import convert
from sppo_hf.model.tiny import add_lora, build_tiny_model

bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")


def _quantise(module):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            linear = bnb.nn.Linear4bit(
                child.in_features,
                child.out_features,
                bias=child.bias is not None,
                compute_dtype=torch.float32,
                quant_type="nf4",
            )
            linear.load_state_dict(child.state_dict())
            setattr(module, name, linear.to("cpu"))
        else:
            _quantise(child)


@pytest.mark.parametrize("settings", [
    {"recompute": "full"}, {"recompute": "none"},
    {"recompute": "none", "offload": "full", "min_offload_size": 1},
])  # fmt: skip
def test_adapters_get_the_gradients_of_the_unmodified_model(settings):
    model = build_tiny_model("llama", dtype=torch.float32, hidden_size=64)
    _quantise(model.model.layers)
    model = add_lora(model).train()
    ids = torch.randint(0, 97, (2, 23), generator=torch.Generator().manual_seed(0))

    def gradients(model):
        model(input_ids=ids, labels=ids).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients(copy.deepcopy(model))
    ours = gradients(convert(model, SPPOConfig(num_chunks=3, show_plan=False, **settings)))
    assert expected
    assert set(ours) == set(expected)
    assert all("lora_" in name for name in ours)
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-5)
