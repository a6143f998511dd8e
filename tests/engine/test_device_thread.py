"""Steps whose backward runs on a thread of the device, as on CUDA, are the same steps.

What a layer needs to be recomputed must be in its saved activations, since thread-local settings
are not there. See `tests/fakes/device_thread.py`, and [Note: backward has no context] in
`engine/chunk_context.py`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from sppo_hf import SPPOConfig
from sppo_hf.engine.convert import convert
from sppo_hf.engine.family_guard import family_check_disabled
from sppo_hf.engine.model_parts import suppress_peft_warnings
from sppo_hf.planning.activation_modes import ActivationMode
from sppo_hf.testing.exactness import compare
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model, make_batch
from tests.engine.forced_plans import force_kv, force_modes, trace_short_scans
from tests.fakes.device_thread import on_a_thread

LENGTHS = (5, 9, 7)
MODES = [
    ActivationMode("whole", "host"),
    ActivationMode("matmuls", "host"),
    ActivationMode("inputs", "device"),
    ActivationMode("hidden", "device"),
    ActivationMode("inputs", "host"),
]
BY_CHUNK: dict[str, Any] = {"order": "by_chunk", "chunk_lengths": LENGTHS}
BY_LAYER: dict[str, Any] = {"order": "by_layer", "chunk_lengths": LENGTHS}
TILES: dict[str, Any] = {"order": "by_layer", "num_chunks": 1, "layer_tile_tokens": 5}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", BY_CHUNK),
        ("phi3-longrope", BY_LAYER),
        ("gpt_oss", {**BY_LAYER, "weights": "host"}),
        ("qwen3_moe", TILES),
        ("deepseek_v3", BY_CHUNK),
        ("bamba", BY_CHUNK),
    ],
)
def test_gradients_are_exact(
    monkeypatch: pytest.MonkeyPatch, family: str, settings: dict[str, Any]
) -> None:
    trace_short_scans(monkeypatch)
    force_modes(monkeypatch, lambda chunk, layer: MODES[(chunk + 2 * layer) % len(MODES)])
    model = add_lora(build_tiny_model(family, dtype=torch.float64))
    config = SPPOConfig(min_offload_size=1, show_plan=False, **settings)
    with family_check_disabled(), on_a_thread() as thread:
        report = compare(model, make_batch(rows=2, tokens=sum(LENGTHS)), config)
    assert thread.backwards >= 2, "the unmodified model's, ours, and those of tiles of the loss"
    assert report.exact, str(report)


def test_streamed_keys_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    force_modes(monkeypatch, lambda chunk, layer: MODES[(chunk + layer) % len(MODES)])
    force_kv(monkeypatch, block_tokens=6)
    config = SPPOConfig(min_offload_size=1, show_plan=False, **BY_CHUNK)
    model = build_tiny_model("mistral", dtype=torch.float64)
    with on_a_thread():
        report = compare(model, make_batch(rows=2, tokens=sum(LENGTHS)), config)
    assert report.exact, str(report)


def with_dropout(model: Any) -> Any:
    """Add LoRA adapters with dropout; both factors have gradients."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(
        r=4, lora_dropout=0.2, target_modules="all-linear", init_lora_weights=False
    )
    with suppress_peft_warnings():
        return peft.get_peft_model(model, lora)


@pytest.mark.parametrize("settings", [BY_CHUNK, BY_LAYER, TILES], ids=["chunk", "layer", "tiles"])
def test_a_layer_runs_again_under_the_autocast_and_the_dropout_of_its_forward(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Compared bit by bit: the thread has another autocast dtype and random state."""
    force_modes(monkeypatch, lambda chunk, layer: ActivationMode("inputs", "device"))
    model: Any = build_tiny_model("llama", dtype=torch.float32, num_hidden_layers=2)
    model = with_dropout(model).train()
    convert(model, SPPOConfig(show_plan=False, **settings))
    batch = make_batch(rows=1, tokens=sum(LENGTHS))

    def step() -> list[Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**batch).loss
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    there = step()
    with on_a_thread():
        elsewhere = step()
    assert len(there) == len(elsewhere) > 0
    assert all(torch.equal(one, other) for one, other in zip(there, elsewhere, strict=True))


def test_the_thread_is_like_that_of_cuda() -> None:
    """It knows that autocast is on, but not its dtype; nested backwards stay on it."""
    seen: list[tuple[object, ...]] = []
    x = torch.ones(2, requires_grad=True)

    def note(_: Tensor) -> None:
        kind = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        with contextlib.suppress(RuntimeError), torch.enable_grad():
            torch.autograd.grad((x * 3).sum(), x)
        seen.append(kind)

    y = x * 2
    y.register_hook(note)
    with on_a_thread() as thread, torch.autocast("cpu", dtype=torch.float16):
        y.sum().backward()
    assert seen == [(True, torch.bfloat16)]
    assert thread.backwards == 1
