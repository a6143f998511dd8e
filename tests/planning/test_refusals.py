"""Refusals from a config alone: they agree with what Transformers says of its classes."""

from types import SimpleNamespace
from typing import Any

import pytest

from sppo_hf.errors import UnsupportedModelError
from sppo_hf.planning.config_file import (
    STATE_REASONS,
    bypasses_attention_interface,
    check_config,
)
from tests.planning.shapes import llama_config


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mamba"}, "state of zeros"),
        ({"model_type": "rwkv"}, "in place over the one before"),
        ({"model_type": "bloom"}, "AttentionInterface"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"layer_types": ["full_attention", "indexed_attention"]}, "layers of type indexed_att"),
        (
            {"model_type": "qwen4_exp", "text_config": SimpleNamespace(model_type="llama")},
            "an indexer",
        ),
        ({"model_type": "opt"}, "no list of decoder layers"),
    ],
)
def test_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as raised:
        check_config(llama_config(**changes))
    assert "sppo check" in str(raised.value), "the remedy"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"layer_types": ["linear_attention", "full_attention", "conv", "hybrid"]},
        {"layer_types": ["mamba", "attention"]},  # as Granite 4's files still say
        {"num_kv_shared_layers": 2},
        {"model_type": "mamba2"},
        {"model_type": "qwen3_5", "text_config": SimpleNamespace(model_type="qwen3_5_text")},
    ],
)
def test_accepted(changes: dict[str, Any]) -> None:
    check_config(llama_config(**changes))


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_vl", "phi4_multimodal", "emu3"])
def test_models_with_encoders_are_accepted(model_type: str) -> None:
    inner = SimpleNamespace(model_type="llama")
    check_config(llama_config(model_type=model_type, text_config=inner, vision_config=inner))


@pytest.mark.fake
def test_names_are_what_transformers_says_of_its_classes() -> None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    # A few of each: importing every family takes half a minute.
    some = ("mamba", "mamba2", "rwkv", "bloom", "gptj", "llama")
    for family in some:
        model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
        stateful = bool(getattr(model, "_is_stateful", False))
        known = family in STATE_REASONS or family == "mamba2"
        assert stateful == known, family
        own = not stateful and not getattr(model, "_supports_attention_backend", False)
        assert own == bypasses_attention_interface(family), family
