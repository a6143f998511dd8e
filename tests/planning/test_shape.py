"""ModelShape against hand-worked numbers and known models; `test_families` measures real ones."""

from typing import Any

import pytest

from sppo_hf.planning.lora import LoraShape
from sppo_hf.planning.shape import ModelShape
from tests.planning.shapes import gpt_shape, known_config, llama_config, tiny_shape

COUNTED_TOKENS = 24
FAMILIES = (
    "llama mistral qwen2 qwen3 gemma2 gemma3_text phi3 olmo2 granite starcoder2 cohere2 smollm3 "
    "glm4 gpt_oss mixtral qwen3_moe deepseek_v3 gpt2 jetmoe mimo_v2_flash laguna"
).split()
KNOWN_PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-4b": 4_022_468_096,
    "smollm2-135m": 134_515_008,
    "mixtral-8x7b": 46_702_792_704,
    # Without the layer for multi-token prediction, which Transformers does not load.
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-20b": 20_914_757_184,
    # 3,880,099,328 in its text decoder; the vision encoder is counted roughly.
    "gemma-3-4b": 4_310_244_864,
}


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
    # Two norms with a float32 input, its root, and a bf16 value each; q and attention output; two
    # inputs of projections; gate, activated gate, up and product.
    elements = 2 * 4096 + 2 * 4096 + 2 * 4096 + 4 * 14_336
    assert shape.frame_bytes_per_token(0) == elements * 2 + 2 * 4097 * 4 + 32 * 4
    assert shape.frame_bytes_per_token(0, "skeleton") == shape.skeleton_bytes_per_token(0)
    # Products beside the skeleton: q, the output projection, gate and up. Keys and values serve
    # attention alone, the last product the next layer.
    kept = (2 * 4096 + 2 * 14_336) * 2
    assert shape.frame_bytes_per_token(0, "products") == 2 * 4096 * 2 + 32 * 4 + kept


def test_recomputation_leaves_out_keys_values_and_the_last_product() -> None:
    shape = ModelShape.from_config(llama_config(), dtype_bytes=2)
    last, keys_and_values = 2 * 4096 * 14_336, 2 * 4096 * 2 * 1024
    linear = shape.linear_flops_per_token(0)
    assert shape.recompute_flops_per_token(0, "skeleton") == linear - last - keys_and_values
    assert shape.recompute_flops_per_token(0, "products") == 0
    assert shape.recompute_flops_per_token(0, "whole") == 0
    # A norm behind the last product needs it.
    post = ModelShape.from_config(llama_config(model_type="olmo2"), dtype_bytes=2)
    # ... and its norms of queries and keys need those.
    assert post.recompute_flops_per_token(0, "skeleton") == linear - keys_and_values // 2
    # An adapter's second factor saves its input after the frozen product beside it.
    lora = ModelShape.from_config(llama_config(), dtype_bytes=2, lora=LoraShape(rank=16))
    factors = 2 * 16 * (6 * 4096 + 14_336 + 2 * 4096 + 2 * 1024 + 2 * 14_336)
    again = lora.recompute_flops_per_token(1, "skeleton")
    assert again == linear - last - keys_and_values + factors
    kept = "products"
    assert post.frame_bytes_per_token(0, kept) > shape.frame_bytes_per_token(0, kept)


def test_backward_is_twice_the_forward_when_all_is_trained() -> None:
    shape = tiny_shape()
    assert shape.backward_linear_flops_per_token(1) == 2 * shape.linear_flops_per_token(1)
    assert shape.backward_linear_flops_per_token() == 2 * shape.linear_flops_per_token()


def test_lora_of_llama_8b_by_hand() -> None:
    frozen = ModelShape.from_config(llama_config(), dtype_bytes=2)
    shape = ModelShape.from_config(llama_config(), dtype_bytes=2, lora=LoraShape(rank=16))
    # q, o: 4096 + 4096; k, v: 4096 + 1024; gate, up, down: 4096 + 14336.
    adapters = 16 * (2 * 8192 + 2 * 5120 + 3 * 18_432)
    assert shape.trainable_parameters == 32 * adapters == 41_943_040
    assert shape.total_parameters == frozen.total_parameters + 32 * adapters
    assert shape.gradient_bytes == 32 * adapters * 4
    assert shape.weight_bytes == frozen.weight_bytes + 32 * adapters * 4
    linear = frozen.linear_flops_per_token(1)
    assert shape.linear_flops_per_token(1) == linear + 2 * adapters
    # Input gradients of all, weight gradients of the adapters alone.
    assert shape.backward_linear_flops_per_token(1) == linear + 4 * adapters
    head = frozen.head_flops_per_token
    layers = 31 * (linear + 4 * adapters) + shape.backward_linear_flops_per_token(0)
    assert shape.backward_linear_flops_per_token() == layers + head
    # Norms keep their float32 input and its root; attention q, its output and the sums; SwiGLU
    # gate, activated gate and up; each adapter a float32 copy of its input and what A makes of it.
    kept = 2 * 4097 * 4 + (2 * 4096 * 2 + 32 * 4) + 3 * 14_336 * 2
    assert shape.frame_bytes_per_token(1) == kept + (6 * 4096 + 14_336) * 4 + 7 * 16 * 4
    # Nothing before the first adapter needs a gradient: the first norm saves nothing.
    assert shape.frame_bytes_per_token(0) == shape.frame_bytes_per_token(1) - 4097 * 4


def test_lora_on_some_layers_and_with_dropout() -> None:
    def frame(lora: LoraShape) -> int:
        return ModelShape.from_config(
            llama_config(), dtype_bytes=2, lora=lora
        ).frame_bytes_per_token(1)

    only_v = frame(LoraShape(rank=8, targets=("v_proj",), dtype_bytes=2))
    both = frame(LoraShape(rank=8, targets=("q_proj", "v_proj"), dtype_bytes=2))
    # In the model's own dtype both adapters keep the same input.
    assert both - only_v == 8 * 2
    # In another dtype each has its own.
    wide = frame(LoraShape(rank=8, targets=("q_proj", "v_proj")))
    assert wide - both == 2 * 4096 * 4 - 4096 * 2 + 2 * 8 * 2
    # A mask of one byte, and what it lets through, which takes the input's place.
    dropped = frame(LoraShape(rank=8, targets=("q_proj", "v_proj"), dropout=0.1))
    assert dropped - wide == 2 * 4096


@pytest.mark.parametrize("name", KNOWN_PARAMETERS)
def test_known_models(name: str) -> None:
    shape = ModelShape.from_config(known_config(name), dtype_bytes=2)
    assert shape.total_parameters == pytest.approx(KNOWN_PARAMETERS[name], rel=0.001)


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
