"""Sizes read off configs as families spell them."""

from types import SimpleNamespace

import pytest

from sppo_hf.errors import UnsupportedModelError
from sppo_hf.planning.reader import read_layers, rotary_limit_tokens, text_config
from sppo_hf.planning.shape import ModelShape
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
    assert (dense.mlp_width, dense.routed_experts) == (64, 0)
    assert (sparse.mlp_width, sparse.routed_experts) == (30, 2)
    shape = ModelShape.from_config(config, dtype_bytes=2)
    attention = 4 * 16 * 16
    assert shape.linear_flops_per_token(0) == 2 * (attention + 3 * 16 * 64)
    assert shape.linear_flops_per_token(1) == 2 * (attention + 3 * 16 * (2 * 10 + 10) + 16 * 8)


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
