"""Multimodal checkpoints as they load, trained on batches of text; other batches are refused.

Losses and gradients of every family are compared in `test_exactness`; here is what only multimodal
models have: encoders that no batch of text runs, types of tokens, positions with several axes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from sppo_hf import ConfigError, SPPOConfig
from sppo_hf.engine.attention_interface import is_causal_with
from sppo_hf.engine.convert import convert, revert
from sppo_hf.engine.model_parts import find_parts
from sppo_hf.engine.trace_profile import trace_config
from sppo_hf.planning.config_file import check_config, load_config
from sppo_hf.planning.model_profile import Training
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.testing.exactness import compare
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model, make_batch
from tests.sweeps import pairs, turn

SETTINGS = SPPOConfig(
    chunk_lengths=(9, 1, 13), recompute="full", min_offload_size=1, show_plan=False
)

pytestmark = pytest.mark.filterwarnings("ignore")  # families warn at their first import


def _encoders(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    named = dict(model.named_parameters())
    return {n: p for n, p in named.items() if "vision" in n or "visual" in n}


@pytest.mark.parametrize("loader", [AutoModelForCausalLM, AutoModelForImageTextToText])
def test_a_checkpoint_trains_as_it_loads_and_is_saved_alike(loader: Any, tmp_path: Path) -> None:
    build_tiny_model("gemma3", dtype=torch.float32).save_pretrained(tmp_path / "before")
    model = loader.from_pretrained(tmp_path / "before").train()
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    converted = convert(model, SETTINGS)
    converted(**make_batch()).loss.backward()
    encoders = _encoders(model)
    assert encoders
    assert all(parameter.grad is None for parameter in encoders.values())
    converted.save_pretrained(tmp_path / "after")
    again, info = loader.from_pretrained(tmp_path / "after", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert set(again.state_dict()) == set(model.state_dict())
    revert(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert type(model.forward(**make_batch())).__name__ == "Gemma3CausalLMOutputWithPast"


@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        (name, scenario)
        for index, name in enumerate(["gemma3", "qwen3_vl"])
        for scenario in turn(["frozen encoder", "lora", "accumulation"], 2, index)
    ],
)
def test_settings_of_a_user(name: str, scenario: str) -> None:
    model: Any = build_tiny_model(name)
    if scenario == "lora":
        model = add_lora(model)
    elif scenario == "frozen encoder":
        for parameter in _encoders(model).values():
            parameter.requires_grad_(False)
    batch = make_batch(rows=3, tokens=23, padding=(4, 0, 11))
    report = compare(model, batch, SETTINGS, accumulation=2 if scenario == "accumulation" else 1)
    assert report.exact, str(report)


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("gemma3", "pixel_values", torch.zeros(1, 3, 8, 8)),
        ("gemma3", "token_type_ids", torch.tensor([[0] * 20 + [1] * 3])),
        ("gemma4", "input_features", torch.zeros(1, 23, 8)),
        ("gemma4", "mm_token_type_ids", torch.tensor([[0] * 20 + [2] * 3])),
        ("qwen3_vl", "pixel_values_videos", torch.zeros(16, 12)),
        ("qwen3_vl", "image_grid_thw", torch.ones(1, 3, dtype=torch.long)),
    ],
)
def test_inputs_other_than_text_are_refused_by_name(name: str, argument: str, value: Any) -> None:
    model = convert(build_tiny_model(name, dtype=torch.float32), SETTINGS)
    with pytest.raises(ConfigError, match=rf"{argument} .*leave {argument} out"):
        model(**make_batch(), **{argument: value})
    model(**make_batch()).loss.backward()  # the remedy


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("gemma3", "token_type_ids", 0),
        ("gemma4", "mm_token_type_ids", 0),
        ("qwen3_vl", "mm_token_type_ids", 0),
    ],
)
def test_token_types_of_text_change_nothing(name: str, argument: str, value: int) -> None:
    batch = make_batch(tokens=23)
    batch[argument] = torch.full_like(batch["input_ids"], value)
    report = compare(build_tiny_model(name), batch, SETTINGS)
    assert report.exact, str(report)


def test_a_prefix_that_is_read_in_both_directions_is_no_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PaliGemma's types of tokens mean another thing than other models': 0 is such a prefix."""
    parts = find_parts(build_tiny_model("paligemma"))
    assert not is_causal_with(parts, "token_type_ids", 0)
    assert is_causal_with(parts, "token_type_ids", 1)
    # Asked with every batch, when weights may rest on the host: the answer is remembered.
    monkeypatch.setattr(parts.base, "forward", None)
    assert is_causal_with(parts, "token_type_ids", 1)


def _positions(axes: int, restarts: bool) -> torch.Tensor:
    """`[axes, 2, 23]`, or `[2, 23]` for no axes: text, or a picture's time, height and width."""
    text = torch.arange(23) % 9 if restarts else torch.arange(23)
    rows = torch.stack([text, text])
    if axes == 0:
        return rows
    picture = torch.stack([rows, rows // 2, rows // 3])
    return torch.cat([rows[None], picture]) if axes == 4 else picture


@pytest.mark.parametrize(
    ("name", "axes", "restarts"), pairs(["qwen3_vl", "qwen2_5_vl"], [0, 3, 4], [False, True])
)
def test_positions_of_several_axes(name: str, axes: int, restarts: bool) -> None:
    """Packed documents are kept apart where the model does so: Qwen2.5-VL only by a fourth axis."""
    batch: dict[str, Any] = {**make_batch(rows=2, tokens=23), "use_cache": False}
    batch["position_ids"] = _positions(axes, restarts)
    report = compare(build_tiny_model(name), batch, SETTINGS)
    assert report.exact, str(report)


def test_positions_of_other_shapes_are_refused() -> None:
    batch = make_batch(rows=2, tokens=23)
    batch["position_ids"] = _positions(3, restarts=False)
    llama = convert(build_tiny_model("llama"), SETTINGS)
    with pytest.raises(ConfigError, match=r"position_ids has shape \(3, 2, 23\)"):
        llama(**batch)


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl", "mistral3"])
def test_planning_reads_what_training_runs(name: str, tmp_path: Path) -> None:
    model = build_tiny_model(name, dtype=torch.float32)
    model.config.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    check_config(config)
    parts = find_parts(model)
    shape = ModelShape.from_profile(
        trace_config(config, Training(dtype_bytes=4, parameter_bytes=4))
    )
    assert shape.num_layers == len(parts.layers)
    ends = {*parts.decoder.parameters(), *parts.head_parameters()}
    decoder = sum(parameter.numel() for parameter in ends)
    assert shape.trainable_parameters == pytest.approx(decoder, rel=0.1)
    assert shape.total_parameters > shape.trainable_parameters, "encoders take memory too"
