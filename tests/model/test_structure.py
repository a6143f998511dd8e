"""Multimodal models are refused as such, the remedy works, and planning gives the same reason.

Models are tiny, saved to disk and loaded again, as a user's would be.
"""

import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sppo_hf import ConfigError, SPPOConfig, UnsupportedModelError
from sppo_hf.model.convert import convert, is_converted
from sppo_hf.model.exactness import compare
from sppo_hf.model.structure import find_parts
from sppo_hf.model.tiny import build_tiny_model, make_batch, randomise, shrink, tiny_config
from sppo_hf.planning import refusals
from sppo_hf.planning.config_file import load_config

QUIET = SPPOConfig(num_chunks=3, recompute="full", min_offload_size=1, show_plan=False)

# With a text decoder that can be taken out, and without one.
TAKEN_OUT = ("gemma3", "gemma4", "mistral3", "llava", "llava_onevision", "qwen2_audio")
STUCK = ("qwen2_5_vl", "qwen3_vl", "aya_vision")

NESTED = [
    name
    for name in sorted(refusals.LOADED_AS_TEXT | {"phi4_multimodal"})
    if name in CONFIG_MAPPING_NAMES
]

pytestmark = pytest.mark.filterwarnings("ignore")  # families warn at their first import


def _whole_config(name: str, *, tied: bool = True) -> PreTrainedConfig:
    """The tiny configuration of a model with all that is around its text decoder."""
    settings: dict[str, Any] = shrink(AutoConfig.for_model(name))
    if isinstance(settings.get("text_config"), dict):
        settings["text_config"] |= {"pad_token_id": 0, "tie_word_embeddings": tied}
    return AutoConfig.for_model(name, **settings, tie_word_embeddings=tied)


def _whole_model(name: str, folder: Path, *, tied: bool = True) -> PreTrainedModel:
    """A tiny random multimodal model, loaded from `folder`."""
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(_whole_config(name, tied=tied))
    randomise(model)
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32).train()


def _reason(refused: pytest.ExceptionInfo[UnsupportedModelError]) -> str:
    """A refusal without the name it begins with: a class here, a model type in a plan."""
    return str(refused.value).partition(" cannot be trained ")[2]


@pytest.mark.parametrize("name", [*TAKEN_OUT, *STUCK])
def test_training_and_planning_say_multimodal_in_the_same_words(name: str, tmp_path: Path) -> None:
    model = _whole_model(name, tmp_path)
    with pytest.raises(UnsupportedModelError, match="multimodal") as refused:
        convert(model, QUIET)
    assert type(model).__name__ in str(refused.value)
    assert not is_converted(model)
    with pytest.raises(UnsupportedModelError, match=f"'{name}'") as planned:
        refusals.check_config(load_config(tmp_path))
    assert _reason(refused) == _reason(planned)
    assert ("text = AutoModelForCausalLM" in str(refused.value)) == (name in TAKEN_OUT)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", TAKEN_OUT)
def test_the_remedy_works(name: str, tied: bool, tmp_path: Path) -> None:
    model = _whole_model(name, tmp_path / "whole", tied=tied)
    with pytest.raises(UnsupportedModelError) as refused:
        convert(model, QUIET)
    lines = [line for line in str(refused.value).splitlines() if line.startswith("    ")]
    scope = {"torch": torch, "AutoModelForCausalLM": AutoModelForCausalLM, "model": model}
    exec(textwrap.dedent("\n".join(lines)), scope)
    text: Any = scope["text"]

    # Nothing of it is new: no parameter without memory, none that the whole model does not hold.
    ours = {id(parameter) for parameter in model.parameters()}
    assert all(id(parameter) in ours for parameter in text.parameters())
    batch = make_batch(rows=2, tokens=29, padding=(0, 5))
    expected = model.eval()(**batch).logits
    torch.testing.assert_close(text.eval()(**batch).logits, expected)
    report = compare(text.train(), batch, QUIET)
    assert report.exact, str(report)

    text.save_pretrained(tmp_path / "text")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not info["missing_keys"]
    torch.testing.assert_close(again.eval()(**batch).logits, expected)
    refusals.check_config(load_config(tmp_path / "text"))
    assert is_converted(convert(again, QUIET))


@pytest.mark.parametrize("name", NESTED)
def test_nested_configs_of_plain_language_models_are_planned_as_they_train(
    name: str, tmp_path: Path
) -> None:
    text = tiny_config(name).get_text_config(decoder=True)
    fields = AutoConfig.for_model(name).to_dict()
    if name in refusals.LOADED_AS_TEXT:
        fields["text_config"] = text.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(fields, default=str))
    whole = AutoConfig.for_model(name)
    with torch.device("meta"):
        model_class = AutoModelForCausalLM._model_mapping[type(whole)]
        model = model_class._from_config(text)
    trained = _said(lambda: find_parts(model))
    planned = _said(lambda: refusals.check_config(load_config(tmp_path)))
    assert trained == planned
    assert "multimodal" not in planned


@pytest.mark.slow
def test_every_family_is_planned_as_it_trains(tmp_path: Path) -> None:
    differ = {}
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = tiny_config(name)
            config.save_pretrained(tmp_path)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except (ValueError, TypeError, AttributeError, AssertionError):
            continue  # of what cannot be built, nothing can be told
        trained = _said(lambda: find_parts(model))  # noqa: B023 — called at once
        planned = _said(lambda: refusals.check_config(load_config(tmp_path)))
        if bool(trained) != bool(planned) and model.config.model_type not in FOUND_BY_TRYING:
            differ[name] = (trained, planned)
    assert not differ


FOUND_BY_TRYING = (
    *("diffllama", "longcat_flash", "doge", "gemma3n_text", "inkling2", "inkling_text"),
)
"""Refused by the first forward, which this does not run."""


def _said(check: Callable[[], object]) -> str:
    """Why `check` refuses, without names and remedies; empty where it does not."""
    try:
        check()
    except UnsupportedModelError as error:
        reason = str(error).partition(" cannot be trained ")[2]
        return re.split(r"[;.(]", reason)[0].strip()
    return ""


def test_every_type_whose_decoder_is_loaded_alone_is_known() -> None:
    import transformers

    found = set()
    for name, model_class in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if not re.search("text|vision|llama4|mllama|emu|qwen|dots|gemma", name):
            continue
        config_class = type(AutoConfig.for_model(name)) if "assistant" not in name else None
        inner = None if config_class is None else config_class.sub_configs.get("text_config")
        if inner is not None and getattr(transformers, model_class).config_class is inner:
            found.add(name)
    assert found <= refusals.LOADED_AS_TEXT
    assert found >= {n for n in refusals.LOADED_AS_TEXT if n in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}


def test_batches_with_images_are_refused_where_the_decoder_is_the_model() -> None:
    model = convert(build_tiny_model("llama"), SPPOConfig(num_chunks=2, show_plan=False))
    with pytest.raises(ConfigError, match="image_pixel_values holds images or sound"):
        model(**make_batch(), image_pixel_values=torch.zeros(1, 3, 4, 4))
