"""Families on CUDA, against the unmodified model there, and under the Trainer with Liger's patches.

The other tests of families run on the CPU, where masks, tables and encoders' results are on the
device by themselves. A CPU runs the same bodies for one family of each kind.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from sppo_hf import SPPOConfig
from sppo_hf.testing.exactness import compare
from sppo_hf.testing.tiny_models import (
    batch_for,
    build_tiny_classifier,
    build_tiny_model,
    image_batch,
    make_batch,
)
from tests.engine import liger_trainer

WAYS: dict[str, dict[str, Any]] = {
    "by layer": {"recompute": "full", "order": "by_layer"},
    "by chunk": {"recompute": "selective", "order": "by_chunk", "offload_kv": "full"},
}
TEXT = (
    *("llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "glm4", "olmo3", "deepseek_v3"),
    *("qwen3_moe", "mixtral", "granitemoehybrid", "bamba", "nemotron_h", "falcon_h1", "lfm2"),
    *("qwen3_5_text", "qwen3_next", "kimi_linear", "llama4_text", "gemma4_text"),
    *("deepseek_v32", "glm_moe_dsa"),
)
IMAGES = (
    *("gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava", "internvl", "mistral3"),
    *("glm4v", "idefics3"),
)
CLASSIFIERS = ("llama", "qwen3")
LIGER = ("llama", "qwen3_moe", "mixtral", "gemma3", "qwen2_5_vl")


def check(model: torch.nn.Module, batch: dict[str, Any], device: str, way: str) -> None:
    settings = SPPOConfig(
        show_plan=False, min_offload_size=1, offload="full", num_chunks=3, **WAYS[way]
    )
    model.to(device).train()
    batch = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    report = compare(model, batch, settings)
    assert report.exact, report


def check_text(family: str, device: str, way: str, tokens: int) -> None:
    model = build_tiny_model(family, dtype=torch.float32)
    check(model, make_batch(rows=2, tokens=tokens, padding=(0, tokens // 3)), device, way)


def check_images(family: str, device: str, way: str) -> None:
    model = build_tiny_model(family, dtype=torch.float32)
    check(model, image_batch(model), device, way)


def check_classifier(family: str, device: str) -> None:
    model = build_tiny_classifier(family, "ForSequenceClassification", dtype=torch.float32)
    batch = batch_for(model, make_batch(rows=2, tokens=60, padding=(0, 20)))
    check(model, batch, device, "by layer")


def check_trainer(family: str, device: str) -> None:
    """Losses and gradients' norms of steps in bfloat16, ours beside the unmodified model's.

    In a process of its own, for Liger's patches stay in Transformers' modules.
    """
    command = [sys.executable, "-m", liger_trainer.__name__, family, device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    plain, ours = json.loads(done.stdout.splitlines()[-1])
    assert len(plain) == liger_trainer.STEPS
    for (loss, norm), (own_loss, own_norm) in zip(plain, ours, strict=True):
        assert own_loss == pytest.approx(loss, rel=5e-3)
        assert own_norm == pytest.approx(norm, rel=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", TEXT)
def test_text(family: str, way: str) -> None:
    # Chunks are longer than the block of any scan, which is 256 tokens.
    check_text(family, "cuda", way, tokens=900)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", IMAGES)
def test_images(family: str, way: str) -> None:
    check_images(family, "cuda", way)


@pytest.mark.gpu
@pytest.mark.parametrize("family", CLASSIFIERS)
def test_classifiers(family: str) -> None:
    check_classifier(family, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("family", LIGER)
def test_the_trainer_with_ligers_patches(family: str) -> None:
    pytest.importorskip("liger_kernel")
    check_trainer(family, "cuda")


@pytest.mark.parametrize("way", WAYS)
def test_the_same_on_the_cpu(way: str) -> None:
    check_text("llama", "cpu", way, tokens=60)
    check_images("gemma3", "cpu", way)
    check_classifier("llama", "cpu")


def test_the_trainer_on_the_cpu() -> None:
    check_trainer("llama", "cpu")
