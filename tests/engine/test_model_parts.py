"""Models that are refused for their parts; planning refuses them with the same reason."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sppo_hf import ConfigError, SPPOConfig, UnsupportedModelError
from sppo_hf.engine.convert import convert
from sppo_hf.engine.model_parts import (
    BUILD_ERRORS,
    all_modules,
    are_sharded,
    auto_class_of,
    find_parts,
    own_parameters,
)
from sppo_hf.planning.config_file import check_config, load_config
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch, tiny_config
from tests.sweeps import sample

NESTED = [
    name
    for name in ("dots3_note", "emu3", "llama4", "qwen3_5", "qwen3_5_moe", "phi4_multimodal")
    if name in CONFIG_MAPPING_NAMES
]
"""Types of which AutoModelForCausalLM loads the text decoder alone, and one without a decoder."""

pytestmark = pytest.mark.filterwarnings("ignore")  # families warn at their first import


@pytest.mark.parametrize("name", NESTED)
def test_nested_configs_of_plain_language_models_are_planned_as_they_train(
    name: str, tmp_path: Path
) -> None:
    text = tiny_config(f"{name}_text" if f"{name}_text" in CONFIG_MAPPING_NAMES else name)
    text = text.get_text_config(decoder=True)
    fields = AutoConfig.for_model(name).to_dict()
    if name != "phi4_multimodal":
        fields["text_config"] = text.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(fields, default=str))
    whole = AutoConfig.for_model(name)
    with torch.device("meta"):
        model_class: Any = AutoModelForCausalLM._model_mapping[type(whole)]
        model = model_class._from_config(text)
    trained = _said(lambda: find_parts(model))
    planned = _said(lambda: check_config(load_config(tmp_path)))
    assert trained == planned


@pytest.mark.slow
def test_every_family_is_planned_as_it_trains(tmp_path: Path) -> None:
    differ = {}
    for name in sample(list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), 3):
        try:
            config = tiny_config(name)
            config.save_pretrained(tmp_path)
            with torch.device("meta"):
                model = auto_class_of(config).from_config(config)
        except (ConfigError, *BUILD_ERRORS):
            continue  # of what cannot be built, nothing can be told
        trained = _said(lambda: find_parts(model))  # noqa: B023 — called at once
        planned = _said(lambda: check_config(load_config(tmp_path)))
        if bool(trained) != bool(planned) and model.config.model_type not in FOUND_BY_TRYING:
            differ[name] = (trained, planned)
    assert not differ


FOUND_BY_TRYING = ("diffllama", "longcat_flash", "doge")
"""Refused by the first forward, which this does not run."""


def _said(check: Callable[[], object]) -> str:
    """The reason why `check` refuses, without names and remedies; "" if it does not."""
    try:
        check()
    except UnsupportedModelError as error:
        reason = str(error).partition(" cannot be trained ")[2]
        return re.split(r"[;.(]", reason)[0].strip()
    return ""


def test_the_text_decoder_of_a_model_with_images_is_what_counts() -> None:
    model = build_tiny_model("gemma3")
    assert find_parts(model).text_config is model.config.text_config
    model.config.text_config.layer_types = ["full_attention", "lightning_attention"]
    with pytest.raises(UnsupportedModelError, match="lightning_attention, which are not known"):
        find_parts(model)


def test_batches_with_images_are_refused_where_the_decoder_is_the_model() -> None:
    model = convert(build_tiny_model("llama"), SPPOConfig(num_chunks=2, show_plan=False))
    with pytest.raises(ConfigError, match="image_pixel_values holds images or sound"):
        model(**make_batch(), image_pixel_values=torch.zeros(1, 3, 4, 4))


def _nested_model() -> nn.ModuleDict:
    """A model with a shared module, an empty place, tied weights and a parameter of its own."""
    shared = nn.Linear(2, 2)
    inner = nn.Sequential(nn.LayerNorm(2), shared, nn.Sequential(nn.ReLU(), shared))
    model = nn.ModuleDict({"first": inner, "second": nn.Linear(2, 2), "third": nn.Linear(2, 2)})
    model["third"].weight = model["second"].weight
    model.register_module("nothing", None)
    model.register_parameter("own", nn.Parameter(torch.ones(1)))
    model.register_parameter("no", None)
    return model


def test_modules_and_parameters_are_torchs_in_its_order() -> None:
    model = _nested_model()
    assert all_modules(model) == list(model.modules())
    found = own_parameters(all_modules(model))
    assert list(map(id, found)) == list(map(id, model.parameters()))
    left_out = {model["first"], model["third"]}
    rest = [module for _, module in model.named_modules(memo=set(left_out))]
    assert all_modules(model, *left_out) == rest
    assert all_modules(model, model) == []


def test_modules_of_a_scripted_model_are_torchs() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))))
    assert all_modules(model) == list(model.modules())
    assert len(own_parameters(all_modules(model))) == len(list(model.parameters()))


def test_sharding_is_seen_whenever_it_comes() -> None:
    """FSDP2 gives modules another class, after the conversion."""
    model = _nested_model()
    assert not are_sharded(all_modules(model))
    inner: Any = model["first"]
    inner.__class__ = type("FSDPSequential", (nn.Sequential,), {"unshard": lambda self: None})
    assert are_sharded(all_modules(model))
