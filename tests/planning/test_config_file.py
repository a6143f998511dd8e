"""Config files, good and bad, without Transformers."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.planning.config_file import (
    STATE_REASONS,
    bypasses_attention_interface,
    check_config,
    classifier_outputs,
    load_config,
    read_fields,
    rotary_limit_tokens,
    shipped_models,
    text_config,
)
from tests.planning.shapes import known_config, llama_config


def written(folder: Path, text: str) -> Path:
    path = folder / "config.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_folder_or_its_file(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({"model_type": "llama", "hidden_size": 8}))
    assert vars(load_config(path)) == vars(load_config(str(tmp_path)))
    assert load_config(path).hidden_size == 8  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fields", "outputs"),
    [
        ({}, None),
        ({"architectures": ["LlamaForCausalLM"], "id2label": {"0": "a"}}, None),
        ({"architectures": ["LlamaForSequenceClassification"]}, 2),
        ({"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a"}}, 1),
        ({"architectures": ["LlamaForTokenClassification"], "id2label": dict.fromkeys("abc")}, 3),
        ({"architectures": ["LlamaForQuestionAnswering"], "id2label": dict.fromkeys("abc")}, 2),
    ],
)
def test_a_classifier_is_known_by_its_architecture(
    fields: dict[str, Any], outputs: int | None
) -> None:
    assert classifier_outputs(SimpleNamespace(**fields)) == outputs


def test_nested_configs_are_objects_and_rotary_parameters_dicts() -> None:
    config = known_config("gemma-3-4b")
    assert config.text_config.num_hidden_layers == 34  # type: ignore[attr-defined]
    assert config.text_config.rope_scaling["factor"] == 8.0  # type: ignore[attr-defined]


def test_shipped_models_go_by_name() -> None:
    names = "llama-3.1-8b llama-3.1-70b qwen3-4b qwen3-30b-a3b smollm2-135m gpt-oss-20b"
    assert set(shipped_models()) == set(names.split())
    assert load_config("Llama-3.1-8B") == load_config("llama-3.1-8b")
    assert read_fields("smollm2-135m")["num_hidden_layers"] == 30


def test_a_path_that_exists_hides_a_shipped_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "qwen3-4b").mkdir()
    written(tmp_path / "qwen3-4b", json.dumps({"model_type": "llama", "hidden_size": 8}))
    monkeypatch.chdir(tmp_path)
    assert load_config("qwen3-4b").hidden_size == 8  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "a JSON list"),
        ("{}", "names no model_type.*it has nothing"),
        ('{"peft_type": "LORA"}', "names no model_type.*peft_type"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_names_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json' cannot be read: No such file"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match=r"one of gpt-oss-20b, llama-3\.1-70b, llama-3\.1-8b"):
        load_config("llama-3.1-9b")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="cannot be read: it is not UTF-8 text"):
        load_config(path)


@pytest.mark.parametrize(
    "text", ["9" * 5000, "[" * 100_000, '{"a":' * 5000, '{"a": ' + "[" * 40 + "]" * 40 + "}"]
)
def test_no_json_is_too_odd_to_be_refused_in_words(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_config(path)


def test_only_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    for path in (tmp_path, "/dev/zero", "x" * 5000, "~no-such-user/config.json"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_config(path)


def test_text_config_of_a_multimodal_one() -> None:
    inner = llama_config()
    assert text_config(SimpleNamespace(text_config=inner)) is inner
    assert text_config(inner) is inner


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        (None, 4096),
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16_384),
        ({"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}, 4096),
        ({"rope_type": "dynamic", "factor": 2.0}, None),
    ],
)
def test_rotary_limit(rope: dict[str, object] | None, limit: int | None) -> None:
    config = llama_config(max_position_embeddings=4096, rope_parameters=rope)
    assert rotary_limit_tokens(config) == limit


@pytest.mark.parametrize("value", [0, -4, "64", True, 64.0, [64], {}, 2**31])
@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "head_dim"])
def test_a_size_that_is_none_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is .* Allowed: a whole number.*Remedy"):
        check_config(llama_config(**{name: value}))


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -2.0, 0])
def test_a_rotary_factor_that_is_none_is_refused(factor: float) -> None:
    rope = {"original_max_position_embeddings": 8192, "factor": factor}
    with pytest.raises(ConfigError, match=r"rope_parameters is .*factor"):
        rotary_limit_tokens(llama_config(rope_parameters=rope))


_INDEXED = ["full_attention", "indexed_attention"]
_DEEPSEEK = {"model_type": "deepseek_v32", "layer_types": _INDEXED, "index_topk": 8}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mamba"}, "state of zeros"),
        ({"model_type": "rwkv"}, "in place over the one before"),
        ({"model_type": "bloom"}, "AttentionInterface"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"layer_types": ["full_attention", "other_attention"]}, "layers of type other_att"),
        ({"model_type": "glm5_next", "layer_types": _INDEXED, "index_topk": 8}, "an indexer"),
        ({**_DEEPSEEK, "kv_source_layers": [0, 0]}, r"what another layer .*layers=\[0, 0\]"),
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
        _DEEPSEEK,
        {**_DEEPSEEK, "kv_source_layers": [0, 1]},
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
