"""Sizes read off configs as families spell them."""

from types import SimpleNamespace
from typing import Any

import pytest

from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.planning.layer import ExpertShape
from sppo_hf.planning.reader import is_tied, read_layers, rotary_limit_tokens, text_config
from tests.planning.shapes import llama_config


def test_a_config_without_sizes_is_refused_with_the_names_looked_for() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"model_type 'odd'.*num_hidden_layers.*n_layer"
    ):
        read_layers(SimpleNamespace(model_type="odd"))


def test_windows_by_layer_type() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = llama_config(num_hidden_layers=3, layer_types=kinds, sliding_window=512)
    assert [layer.window for layer in read_layers(config)] == [512, None, 512]


@pytest.mark.parametrize(("used", "window"), [(True, 512), (False, None)])
def test_window_of_all_layers_unless_switched_off(used: bool, window: int | None) -> None:
    config = llama_config(sliding_window=512, use_sliding_window=used)
    assert {layer.window for layer in read_layers(config)} == {window}


@pytest.mark.parametrize(
    ("fields", "attending"),
    [
        ({"layer_types": ["mamba", "attention", "mamba", "mamba"]}, [1]),
        ({"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "conv"]}, [1]),
        ({"model_type": "qwen3_next"}, [3]),
        ({"full_attention_interval": 2}, [1, 3]),
        ({"attn_layer_indices": [0, 2]}, [0, 2]),
        ({"model_type": "lfm2", "full_attn_idxs": [2]}, [2]),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*-E"}, [1]),
        ({"linear_attn_config": {"full_attn_layers": [4], "num_heads": 2, "head_dim": 8}}, [3]),
        ({"model_type": "falcon_h1"}, [0, 1, 2, 3]),
        ({"model_type": "mamba2"}, []),
    ],
)
def test_which_layers_of_a_hybrid_attend(fields: dict[str, Any], attending: list[int]) -> None:
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
    sizes |= (
        {"linear_num_value_heads": 2, "linear_key_head_dim": 8} if "qwen" in str(fields) else {}
    )
    layers = read_layers(llama_config(num_hidden_layers=4, **sizes, **fields))
    assert [index for index, layer in enumerate(layers) if layer.num_heads] == attending
    assert all(layer.kv_elements == 0 for layer in layers if not layer.num_heads)
    assert any(layer.mixer is not None for layer in layers)


def test_first_layers_dense_then_shared_and_active_experts() -> None:
    config = llama_config(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=64,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=10,
    )
    dense, sparse, _ = read_layers(config)
    assert (dense.mlp_width, dense.experts) == (64, None)
    assert (sparse.mlp_width, sparse.dense_width) == (30, 10)
    assert sparse.experts == ExpertShape(count=8, active=2, width=10)


def test_every_other_layer_sparse() -> None:
    config = llama_config(
        num_hidden_layers=4, num_experts=4, num_experts_per_tok=1, decoder_sparse_step=2
    )
    assert [layer.routed_experts for layer in read_layers(config)] == [0, 1, 0, 1]


def test_sizes_that_differ_by_layer() -> None:
    own = [llama_config(head_dim=64), llama_config(head_dim=128, num_key_value_heads=4)]
    layers = read_layers(llama_config(num_hidden_layers=2, head_dim=32, per_layer_config=own))
    assert [layer.qk_head_size for layer in layers] == [64, 128]
    assert [layer.num_kv_heads for layer in layers] == [8, 4]


def test_overrides_by_layer_as_a_file_has_them() -> None:
    config = llama_config(
        num_hidden_layers=2, head_dim=32, per_layer_config={"1": {"head_dim": 64}}
    )
    assert [layer.qk_head_size for layer in read_layers(config)] == [32, 64]


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("gemma2", [512, None, 512, None]),
        ("cohere2", [512, 512, 512, None]),
        ("mistral", [512] * 4),
    ],
)
def test_windows_by_the_familys_pattern(family: str, windows: list[int | None]) -> None:
    config = llama_config(model_type=family, num_hidden_layers=4, sliding_window=512)
    assert [layer.window for layer in read_layers(config)] == windows


def test_a_window_that_is_off_unless_the_config_says_so() -> None:
    config = llama_config(model_type="qwen2", sliding_window=512)
    assert {layer.window for layer in read_layers(config)} == {None}


def test_what_a_family_fills_in() -> None:
    config = SimpleNamespace(
        model_type="gemma3_text", hidden_size=2560, intermediate_size=10_240, num_hidden_layers=12
    )
    layers = read_layers(config)
    assert (layers[0].num_heads, layers[0].num_kv_heads, layers[0].qk_head_size) == (8, 4, 256)
    assert [layer.window for layer in layers] == [4096] * 5 + [None] + [4096] * 5 + [None]
    assert layers[0].activation == "gelu_pytorch_tanh"
    assert is_tied(config)
    assert not is_tied(llama_config())
    assert not is_tied(SimpleNamespace(model_type="llama"))


def test_norms_of_queries_that_a_config_turns_on() -> None:
    plain = llama_config(model_type="cohere", use_qk_norm=False)
    assert not read_layers(plain)[0].head_norm
    plain.use_qk_norm = True
    assert read_layers(plain)[0].head_norm
    assert read_layers(llama_config(model_type="qwen3"))[0].head_norm


@pytest.mark.parametrize(
    ("family", "field", "value", "placement"),
    [
        ("gpt_neox", "use_parallel_residual", True, "parallel"),
        ("gpt_neox", "use_parallel_residual", False, "before"),
        ("hyperclovax", "use_post_norm", False, "before"),
        ("hyperclovax", "use_post_norm", True, "both"),
    ],
)
def test_placement_that_a_config_changes(
    family: str, field: str, value: bool, placement: str
) -> None:
    config = llama_config(model_type=family, **{field: value})
    assert read_layers(config)[0].traits.placement == placement


def test_equal_layers_are_one_object() -> None:
    assert len({id(layer) for layer in read_layers(llama_config())}) == 1


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
        ({"rope_type": "dynamic", "factor": 2.0}, None),
    ],
)
def test_rotary_limit(rope: dict[str, object] | None, limit: int | None) -> None:
    config = llama_config(max_position_embeddings=4096, rope_parameters=rope)
    assert rotary_limit_tokens(config) == limit


@pytest.mark.parametrize("value", [0, -4, "64", True, 64.0, [64], {}, 2**31])
@pytest.mark.parametrize(
    "name",
    [
        *("hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim"),
    ],
)
def test_a_size_that_is_none_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is .* Allowed: a whole number.*Remedy"):
        read_layers(llama_config(**{name: value}))


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "num_attention_heads"])
def test_a_size_that_is_null_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        read_layers(llama_config(**{name: None}))


def test_zero_stands_for_none_where_families_write_it_so() -> None:
    names = ("num_experts", "sliding_window", "first_k_dense_replace", "num_shared_experts")
    assert read_layers(llama_config(**dict.fromkeys(names, 0))) == read_layers(llama_config())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_hidden_layers": 4097}, r"num_hidden_layers is 4097.*4,096"),
        ({"num_attention_heads": 8192, "num_key_value_heads": 8}, "attention of this model"),
        ({"num_key_value_heads": 5}, "attention of this model"),
        ({"layer_types": ["full_attention"]}, "layer_types.*one entry for each"),
        ({"num_attention_heads_per_layer": ["x"] * 99}, r"num_attention_heads_per_layer\[0\]"),
    ],
)
def test_sizes_that_make_no_layers_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_layers(llama_config(**fields))


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -2.0, 0])
def test_a_rotary_factor_that_is_none_is_refused(factor: float) -> None:
    rope = {"original_max_position_embeddings": 8192, "factor": factor}
    with pytest.raises(ConfigError, match=r"rope_parameters is .*factor"):
        rotary_limit_tokens(llama_config(rope_parameters=rope))
