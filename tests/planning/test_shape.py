"""ModelShape against hand-worked numbers and against counted FLOPs of tiny models."""

from typing import Any

import pytest

from sppo_hf.planning.shape import ModelShape
from tests.planning.shapes import gpt_shape, llama_config, tiny_shape

COUNTED_TOKENS = 24
FAMILIES = (
    "llama mistral qwen2 qwen3 gemma2 gemma3_text phi3 olmo2 granite starcoder2 cohere2 smollm3 "
    "glm4 gpt_oss mixtral qwen3_moe deepseek_v3 gpt2"
).split()
# Biases and head norms are not counted; in models this tiny they weigh up to 4% of the parameters.
PARAMETER_TOLERANCE = 0.04


def test_llama_8b_by_hand() -> None:
    shape = ModelShape.from_config(llama_config(), dtype_bytes=2)
    assert shape.total_parameters == 8_030_261_248
    assert shape.weight_bytes == 2 * shape.total_parameters
    assert shape.kv_bytes_per_token() == 32 * 2 * 8 * 128 * 2
    assert shape.kv_bytes_per_token(0) == 2 * 8 * 128 * 2
    assert shape.dkv_bytes_per_token(0) == 2 * shape.kv_bytes_per_token(0)
    # Layer input and attention output of 4,096 in bf16, one float32 per head.
    assert shape.skeleton_bytes_per_token(0) == 2 * 4096 * 2 + 32 * 4
    assert shape.attention_flops_per_key() == 32 * 4 * 4096
    assert shape.linear_flops_per_token() == pytest.approx(2 * 7.5e9, rel=0.01)
    # Two norms with a float32 input, a float32 scale and a bf16 value each; q and attention
    # output; two inputs of projections; gate, activated gate, up and product.
    elements = 2 * 4096 + 2 * 4096 + 2 * 4096 + 4 * 14_336
    assert shape.frame_bytes_per_token(0) == elements * 2 + 2 * 4096 * 4 + 2 * 4 + 32 * 4


def test_gpt_layer_has_24_h_squared_linear_flops() -> None:
    assert gpt_shape(4096, 32, 32).linear_flops_per_token(0) == 24 * 4096**2


def test_trainable_share_and_measured_bytes() -> None:
    shape = ModelShape.from_config(
        llama_config(),
        dtype_bytes=2,
        total_parameters=1000,
        trainable_parameters=10,
        weight_bytes=600,
        gradient_bytes=40,
    )
    assert shape.trainable_fraction == 0.01
    assert (shape.weight_bytes, shape.gradient_bytes) == (600, 40)
    assert tiny_shape().trainable_fraction == 1.0


def test_float64_keeps_float64_accumulators() -> None:
    shape = ModelShape.from_config(llama_config(), dtype_bytes=8)
    assert shape.dkv_bytes_per_token(0) == shape.kv_bytes_per_token(0)
    assert shape.skeleton_bytes_per_token(0) == 2 * 4096 * 8 + 32 * 8


def test_mla_keeps_expanded_heads() -> None:
    config = llama_config(
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_key_value_heads=32,
        head_dim=64,
    )
    shape = ModelShape.from_config(config, dtype_bytes=2)
    layer = shape.layers[0]
    assert (layer.qk_head_size, layer.v_head_size, layer.num_kv_heads) == (192, 128, 32)
    assert shape.kv_bytes_per_token(0) == 32 * (192 + 128) * 2


@pytest.mark.fake
@pytest.mark.parametrize("family", FAMILIES)
def test_linear_flops_and_parameters_against_the_model(family: str) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    from sppo_hf.model.tiny import build_tiny_model

    model = build_tiny_model(family).float()
    # The counter sees every matrix product of the eager paths; fused expert kernels it does not.
    model.set_attn_implementation("eager")
    model.config._experts_implementation = "eager"
    shape = ModelShape.from_config(model.config, dtype_bytes=4)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(COUNTED_TOKENS).unsqueeze(0) + 3, use_cache=False)
    # Eager attention computes all pairs, masked or not.
    attention = shape.attention_flops_per_key() * COUNTED_TOKENS**2
    counted = (counter.get_total_flops() - attention) / COUNTED_TOKENS
    assert counted == pytest.approx(shape.linear_flops_per_token(), rel=0.02)
    parameters = sum(p.numel() for p in model.parameters())
    assert shape.total_parameters == pytest.approx(parameters, rel=PARAMETER_TOLERANCE)


@pytest.mark.fake
@pytest.mark.parametrize("family", FAMILIES)
def test_kv_bytes_against_what_attention_is_given(family: str) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from sppo_hf.model.tiny import build_tiny_model

    given: list[int] = []

    def counting(module: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        given.append(k.numel() * k.element_size() + v.numel() * v.element_size())
        for unknown_to_sdpa in ("s_aux", "softcap"):
            kwargs.pop(unknown_to_sdpa, None)
        return sdpa_attention_forward(module, q, k, v, *args, **kwargs)

    AttentionInterface.register("counting_kv_bytes", counting)
    model = build_tiny_model(family).float()
    model.set_attn_implementation("counting_kv_bytes")
    with torch.no_grad():
        model(input_ids=torch.arange(COUNTED_TOKENS).unsqueeze(0) + 3, use_cache=False)
    shape = ModelShape.from_config(model.config, dtype_bytes=4)
    expected = [shape.kv_bytes_per_token(i) * COUNTED_TOKENS for i in range(shape.num_layers)]
    assert given == expected
