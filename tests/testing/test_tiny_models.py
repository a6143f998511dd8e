"""Tiny models are tiny, random everywhere, reproducible, and keep the features of their family.

What could not be tiny is refused before it is built, in every type of the installed Transformers.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from transformers import AutoConfig, BeitConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sppo_hf.errors import ConfigError
from sppo_hf.testing import tiny_models as tiny
from sppo_hf.testing.exactness import run_batch
from sppo_hf.testing.tiny_families import FAMILIES
from sppo_hf.testing.tiny_models import (
    IMAGE_TOKEN,
    LARGEST_BYTES,
    VOCAB_SIZE,
    add_images,
    add_lora,
    build_tiny_model,
    image_batch,
    make_batch,
    model_from_config,
    shrink,
    shrunk_config,
    tiny_config,
    weights_bytes,
)
from tests.sweeps import sample

# Gradients that are zero in exact arithmetic: without rotary, the key bias moves all scores alike.
ALWAYS_ZERO = {"opt": "k_proj.bias", "biogpt": "k_proj.bias"}


@pytest.mark.parametrize(
    "family",
    ["llama", "gemma2", "gpt_oss", "deepseek_v3", "mixtral", "granite", "gpt2", "opt", "olmo2"],
)
def test_every_parameter_matters(family: str) -> None:
    model = build_tiny_model(family)
    assert sum(parameter.numel() for parameter in model.parameters()) < 100_000
    gradients = run_batch(model, make_batch(rows=2))
    expected_zero = ALWAYS_ZERO.get(family, "no such name")
    for name, grad in gradients.by_name.items():
        assert grad is not None, name
        assert (grad.abs().max() > 1e-9) != name.endswith(expected_zero), name


def test_nothing_is_dropped_by_chance() -> None:
    """Encoders of images have rates of their own, for whole layers."""
    config = BeitConfig(drop_path_rate=0.1, hidden_dropout_prob=0.1)
    settings = shrink(config)
    assert settings["drop_path_rate"] == settings["hidden_dropout_prob"] == 0


def test_the_seed_decides_and_the_global_state_is_left_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    one, again, other = (build_tiny_model("llama", seed=seed) for seed in (1, 1, 2))
    make_batch(seed=3)
    assert torch.equal(torch.rand(1), expected)
    weights = [dict(m.named_parameters())["lm_head.weight"] for m in (one, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_copy_has_all_that_its_model_has_and_shares_no_table() -> None:
    model = build_tiny_model("bamba")  # with a convolution, whose state is restored in its own way
    twin = tiny.copy_of(model)
    for one, other in zip(model.modules(), twin.modules(), strict=True):
        assert type(one) is type(other)
        assert vars(one).keys() == vars(other).keys()
        for name, value in vars(one).items():
            assert value is not vars(other)[name] or not isinstance(value, dict | set), name
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()


def test_what_a_test_does_to_a_model_or_its_code_reaches_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = build_tiny_model("llama")
    weight = first.get_parameter("model.norm.weight")
    before = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()
    first.config.vocab_size = 3
    again = build_tiny_model("llama")
    assert torch.equal(again.get_parameter("model.norm.weight"), before)
    assert again.config.vocab_size == VOCAB_SIZE
    kind = type(first.get_submodule("model.norm"))
    other = type("Other", (kind,), {})
    monkeypatch.setattr(sys.modules[kind.__module__], kind.__name__, other)
    assert type(build_tiny_model("llama").get_submodule("model.norm")) is other
    monkeypatch.undo()
    assert type(build_tiny_model("llama").get_submodule("model.norm")) is kind


def test_two_dtypes_of_one_seed_are_the_same_model() -> None:
    wide = build_tiny_model("llama").lm_head.weight
    narrow = build_tiny_model("llama", dtype=torch.bfloat16).lm_head.weight
    assert torch.equal(wide.to(torch.bfloat16), narrow)


def test_attention_is_far_from_uniform() -> None:
    model = build_tiny_model("llama").eval()
    model.set_attn_implementation("eager")
    batch = make_batch(tokens=24)
    weights = model(input_ids=batch["input_ids"], output_attentions=True).attentions[0]
    last_row = weights[0, :, -1]
    assert last_row.max() > 3 / 24, "a uniform row would have 1/24 everywhere"


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("mistral", "sliding_window", 8),
        ("gemma2", "attn_logit_softcapping", 1.5),
        ("granite", "residual_multiplier", 0.4),
        ("smollm3", "no_rope_layers", [1, 0, 1]),
        ("deepseek_v3", "v_head_dim", 12),
        ("gpt2", "attn_pdrop", 0.0),
        ("gpt_oss", "layer_types", ["sliding_attention", "full_attention", "sliding_attention"]),
    ],
)
def test_features_survive(family: str, field: str, value: object) -> None:
    assert getattr(tiny_config(family), field) == value


def test_a_real_configuration_is_shrunk_with_its_features() -> None:
    original = AutoConfig.for_model(
        "phi3",
        sliding_window=2047,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0 + i / 48 for i in range(48)],
            "long_factor": [1.0 + i for i in range(48)],
            "original_max_position_embeddings": 4096,
        },
        max_position_embeddings=131072,
    )
    config = AutoConfig.for_model("phi3", **shrink(original))
    assert config.num_hidden_layers == 3
    assert config.sliding_window == 8
    assert config.rope_parameters["long_factor"] == [1.0, 13.0, 25.0, 37.0]
    model = model_from_config(config)
    assert torch.isfinite(model(**make_batch()).loss)


def test_layers_of_every_kind_survive() -> None:
    types = ["sliding_attention"] * 5 + ["full_attention"]
    original = AutoConfig.for_model("gemma3_text", num_hidden_layers=12, layer_types=types * 2)
    assert shrink(original)["layer_types"] == [
        *("full_attention", "sliding_attention", "full_attention")
    ]


@pytest.mark.parametrize("layers", [2, 5])
@pytest.mark.parametrize("family", ["gemma3_text", "qwen2_moe", "nemotron_h", "llama4_text"])
def test_another_number_of_layers_keeps_the_kinds_of_the_last_ones(
    family: str, layers: int
) -> None:
    usual: Any = tiny_config(family)
    config: Any = tiny_config(family, num_hidden_layers=layers)
    both = min(layers, usual.num_hidden_layers)
    assert config.num_hidden_layers == layers == len(config.layer_types)
    assert config.layer_types[-both:] == usual.layer_types[-both:]
    build_tiny_model(family, num_hidden_layers=layers)


def test_settings_of_single_layers_follow_their_layer() -> None:
    config = shrunk_config(AutoConfig.for_model("gemma4_text"))
    sizes = [config.per_layer_config[layer].head_dim for layer in range(3)]
    assert config.layer_types == ["full_attention", "sliding_attention", "full_attention"]
    assert sizes == [16, 8, 16]
    assert torch.isfinite(model_from_config(config)(**make_batch()).loss)


def _outcome(model_type: str) -> int | str:
    """Return the bytes of a tiny model of a type, counted without memory, or the refusal."""
    try:
        return weights_bytes(tiny_config(model_type))
    except ConfigError as error:
        return str(error)


LARGE_ENCODERS = {"janus", "muse_glimmer", "muse_spark", "qwen2_5_omni", "vibevoice_asr"}
"""Types whose encoders have sizes that are no settings; they are refused before they are built."""


def _assert_tiny(outcomes: dict[str, int | str]) -> None:
    large = {n: size for n, size in outcomes.items() if isinstance(size, int)}
    assert {name for name, size in large.items() if size > LARGEST_BYTES} <= LARGE_ENCODERS
    told = {name: text for name, text in outcomes.items() if isinstance(text, str)}
    assert not [text for text in told.values() if "\n" in text], "one line each"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_type_with_configurations_inside_stays_tiny() -> None:
    # Types without a causal language model are refused before anything of them is shrunk or built.
    nested = [name for name in CONFIG_MAPPING if CONFIG_MAPPING[name].sub_configs]
    assert len(nested) > 150
    built = {"gemma3", "gemma4", "llama4", "phi4_multimodal", "qwen3_5", "dbrx"} & set(nested)
    outcomes = {name: _outcome(name) for name in {*sample(nested, 24), *built}}
    _assert_tiny(outcomes)
    assert all(isinstance(outcomes[name], int) for name in built), "they are counted, not refused"


@pytest.mark.parametrize("family", ["llama4_text", "nemotron_h", "zaya", "jetmoe"])
def test_sizes_that_one_family_has_are_shrunk_too(family: str) -> None:
    assert weights_bytes(tiny_config(family)) < 2**20


def test_what_would_be_large_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "randomise", lambda _: pytest.fail("it was built"))
    with pytest.raises(ConfigError, match=r"7\.45 TiB.*Allowed: 256 MiB.*vocab_size=16000000000"):
        build_tiny_model("llama", vocab_size=16_000_000_000)
    with pytest.raises(ConfigError, match="num_hidden_layers is 100000"):
        build_tiny_model("llama", num_hidden_layers=100_000)


def test_configurations_inside_are_shrunk_too() -> None:
    config = tiny_config("phi4_multimodal")
    assert config.vision_config.hidden_size == config.audio_config.hidden_size == 32
    assert config.vision_config.num_hidden_layers == 3


def test_multimodal_models_are_built_whole() -> None:
    config = shrunk_config(AutoConfig.for_model("gemma3"))
    assert config.model_type == "gemma3"
    assert config.text_config.num_hidden_layers == 3
    assert config.vision_config.hidden_size == 32
    assert type(model_from_config(config)).__name__ == "Gemma3ForConditionalGeneration"


@pytest.mark.parametrize(
    ("family", "stated", "layers"),
    [
        # Each has fields that follow from others, of which a saved configuration has the values.
        ("zamba2", {}, {"hybrid_layer_ids": [1]}),
        ("zamba2", {"use_shared_attention_adapter": True}, {"hybrid_layer_ids": [1]}),
        ("bamba", {"attn_layer_indices": [9, 18, 27]}, {"attn_layer_indices": [1]}),
    ],
    ids=["shared layers", "with adapters", "lists of layers"],
)
@pytest.mark.filterwarnings("ignore")  # of kernels that are not installed
def test_a_model_of_full_size_is_shrunk_to_one_that_runs(
    family: str, stated: dict[str, Any], layers: dict[str, list[int]]
) -> None:
    config = AutoConfig.for_model(family, **stated)
    config = shrunk_config(type(config).from_dict(config.to_dict()))
    assert {name: getattr(config, name) for name in layers} == layers
    assert torch.isfinite(model_from_config(config)(**make_batch(tokens=9)).loss)


def test_a_text_decoder_stands_for_what_has_no_language_model_as_a_whole() -> None:
    assert shrunk_config(AutoConfig.for_model("minimax_m3_vl_text")).model_type.endswith("text")


def test_unknown_families_are_named() -> None:
    with pytest.raises(ConfigError, match="'no_such_family'"):
        build_tiny_model("no_such_family")
    with pytest.raises(ConfigError, match="'t5' has no causal language model"):
        build_tiny_model("t5")


def test_batches_are_padded_on_the_right_and_padding_has_no_label() -> None:
    batch = make_batch(rows=2, tokens=9, padding=(0, 4))
    assert batch["attention_mask"].tolist() == [[1] * 9, [1] * 5 + [0] * 4]
    assert (batch["labels"][1, 5:] == -100).all()
    assert batch["input_ids"].max() < VOCAB_SIZE


def test_lora_trains_random_adapters_only() -> None:
    model = add_lora(build_tiny_model("llama"))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert all(p.dtype == torch.float64 and p.abs().min() > 0 for p in trained.values())


def test_families_set_fields_that_their_configurations_have() -> None:
    # Transformers takes any other name silently, and the entry would exercise nothing.
    elsewhere = {
        *("global_head_dim", "num_global_key_value_heads"),  # Gemma 4 makes layers' own of them
        *("vision_start_token_id", "rope_theta"),  # read without being declared
    }

    def unknown(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> Iterator[str]:
        for name, value in overrides.items():
            stored = config.attribute_map.get(name, name)
            inner = getattr(config, stored, None)
            if isinstance(inner, PreTrainedConfig):
                yield from unknown(inner, value)
            elif not hasattr(config, stored) and name not in elsewhere:
                yield name

    for name, family in FAMILIES.items():
        if family.model_type in CONFIG_MAPPING:
            config = AutoConfig.for_model(family.model_type)
            assert not list(unknown(config, family.overrides)), name


_FORMS: dict[str, dict[str, tuple[int, ...]]] = {
    "qwen3_vl": {"pixel_values": (48, 1536), "image_grid_thw": (3, 3)},
    "paddleocr_vl": {"pixel_values": (48, 3, 14, 14), "image_grid_thw": (3, 3)},
    "lfm2_vl": {
        "pixel_values": (3, 16, 768),
        "spatial_shapes": (3, 2),
        "pixel_attention_mask": (3, 16),
    },
    # Whole images, not as many as there are patches; and tiles of each, the whole among them.
    "aya_vision": {"pixel_values": (3, 3, 56, 56)},
    "llava_next": {"pixel_values": (3, 3, 3, 56, 56), "image_sizes": (3, 2)},
    "smolvlm": {"pixel_values": (1, 3, 3, 128, 128)},
    "mistral3": {"pixel_values": (3, 3, 56, 56), "image_sizes": (3, 2)},
    "video_llama_3": {
        "pixel_values": (48, 768),
        "image_grid_thw": (3, 3),
        "image_merge_sizes": (3,),
    },
    "deepseek_vl_hybrid": {
        "pixel_values": (3, 3, 64, 64),
        "high_res_pixel_values": (3, 3, 64, 64),
    },
}


@pytest.mark.parametrize("family", _FORMS)
@pytest.mark.filterwarnings("ignore")  # families warn at their first import
def test_images_have_the_form_of_the_models_processor(family: str) -> None:
    batch = image_batch(build_tiny_model(family))
    usual = ("input_ids", "labels", "attention_mask")
    others = {n: tuple(x.shape) for n, x in batch.items() if n not in usual and "type" not in n}
    assert others == _FORMS[family]
    images = batch["input_ids"] == IMAGE_TOKEN
    assert images.sum(1).tolist() == [2 * images[1].sum(), images[1].sum()]
    assert (batch["labels"][images] == -100).all()
    assert batch["attention_mask"][images].all()
    assert not batch["attention_mask"].all()


@pytest.mark.parametrize(
    ("family", "stated"),
    [("llava_next", {}), ("vipllava", {}), ("gemma4_unified", {"vision_config": {}})],
)
@pytest.mark.filterwarnings("ignore")  # families warn at their first import
def test_a_real_configuration_is_shrunk_with_its_encoder(
    family: str, stated: dict[str, Any]
) -> None:
    model = model_from_config(shrunk_config(AutoConfig.for_model(family, **stated)))
    assert torch.isfinite(model(**image_batch(model)).loss)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("gemma3", ["token_type_ids"]),
        ("qwen3_vl", ["mm_token_type_ids"]),
        ("ernie4_5_vl_moe", ["mm_token_type_ids", "moe_mm_token_type_ids"]),
        ("llava", []),
    ],
)
@pytest.mark.filterwarnings("ignore")  # families warn at their first import
def test_token_types_have_the_names_that_the_model_takes(family: str, names: list[str]) -> None:
    batch = add_images(build_tiny_model(family), make_batch(tokens=60), images=2)
    assert [name for name in batch if "type" in name] == names
    for name in names:
        assert torch.equal(batch[name], (batch["input_ids"] == IMAGE_TOKEN).long())


def test_rows_that_are_too_short_for_images_say_how_long_they_must_be() -> None:
    model = build_tiny_model("llava")
    with pytest.raises(ConfigError, match="tokens is 23; 2 images of 16 need 43"):
        add_images(model, make_batch(tokens=23))
    add_images(model, make_batch(tokens=43))
    with pytest.raises(ConfigError, match="no encoder of images"):
        add_images(build_tiny_model("llama"), make_batch(tokens=60))
