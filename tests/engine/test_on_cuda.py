"""Whole steps in bfloat16 on CUDA, with every kernel and every way to keep what backward needs.

Ours may be no farther from float32 than the unmodified model in bfloat16 is, times 1.1. The heads
are as large as real ones, and sequences of thousands of tokens, so that kernels, copies and
allocator work as in training. The CPU runs the same body, small, so that it is known to work.

The first thing to run on a new card: `python -m pytest -v -m gpu tests/engine/test_on_cuda.py`.
"""

import functools

import pytest
import torch

from sppo_hf import SPPOConfig
from sppo_hf.attention.backends.base import AttentionSpec
from sppo_hf.engine.model_parts import suppress_peft_warnings
from sppo_hf.testing.exactness import compare_drift
from sppo_hf.testing.tiny_models import build_tiny_model
from tests.attention.backends.usable import usable_backend

LARGE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 3,
    "max_position_embeddings": 8192,
}

OFFLOADED = {"recompute": "full", "offload": "full"}
WAYS = {
    "kept": {"recompute": "none", "offload": "none", "num_chunks": 1, "order": "by_layer"},
    "kept, chunks": {"recompute": "none", "offload": "none", "num_chunks": 4, "order": "by_chunk"},
    "selective": {"recompute": "selective", "offload": "none", "num_chunks": 2},
    "selective, offloaded": {"recompute": "selective", "offload": "full", "num_chunks": 2},
    "all offloaded": {"recompute": "none", "offload": "full", "num_chunks": 3, "order": "by_chunk"},
    "by layer": {**OFFLOADED, "num_chunks": 3, "order": "by_layer"},
    "by chunk": {**OFFLOADED, "num_chunks": 3, "order": "by_chunk", "offload_kv": "full"},
    "tiles": {**OFFLOADED, "num_chunks": 1, "order": "by_layer", "layer_tile_tokens": 512},
    "weights on the host": {**OFFLOADED, "num_chunks": 2, "order": "by_layer", "weights": "host"},
}


def with_adapters(model):
    """Add LoRA adapters whose second factors are not zero, so that both have gradients."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with suppress_peft_warnings():
        model = peft.get_peft_model(model, settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def check(device, sizes, *, tokens, num_batches, dtype, lora=False, **settings):
    torch.manual_seed(0)
    model = build_tiny_model("llama", dtype=torch.float32, **sizes)
    if lora:
        model = with_adapters(model)
    model.to(device).train()
    batches = [
        {"input_ids": ids, "labels": ids}
        for ids in (torch.randint(0, 97, (1, tokens), device=device) for _ in range(num_batches))
    ]
    config = SPPOConfig(show_plan=False, min_offload_size=64, **settings)
    report = compare_drift(model, batches, config, dtype=dtype)
    assert report.unmodified_drift > 0
    assert report.drift <= report.allowed_drift, report
    assert report.loss == pytest.approx(report.reference_loss, rel=2e-2)


def on_the_cpu(**settings):
    sizes = {"num_hidden_layers": 2}
    check("cpu", sizes, tokens=200, num_batches=2, dtype=torch.bfloat16, **settings)


on_cuda = functools.partial(check, "cuda", LARGE, tokens=4000, num_batches=2, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["aten_flash", "cudnn", "efficient"])
def test_each_kernel(name):
    asked = AttentionSpec(
        device_type="cuda",
        dtype=torch.bfloat16,
        qk_head_size=LARGE["head_dim"],
        v_head_size=LARGE["head_dim"],
        gqa_ratio=2,
    )
    usable_backend(name, asked)
    # Not multiples of a kernel's tile, as users may cut them.
    on_cuda(attention_backend=name, chunk_lengths=(1000, 1, 2200, 799), recompute="full")


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_keep_activations(way):
    on_cuda(**WAYS[way])


@pytest.mark.gpu
def test_adapters():
    on_cuda(lora=True, recompute="selective", offload="full", num_chunks=2)


@pytest.mark.parametrize("way", ["selective, offloaded", "by chunk", "weights on the host"])
def test_some_ways_on_the_cpu(way):
    on_the_cpu(**WAYS[way])


def test_uneven_chunks_on_the_cpu():
    on_the_cpu(chunk_lengths=(50, 1, 110, 39), recompute="full")
