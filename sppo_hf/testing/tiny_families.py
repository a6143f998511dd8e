"""Settings of tiny models with which each family's features have an effect at 20-30 tokens.

Every entry begins with the family's default configuration, shrunk by
`sppo_hf.testing.tiny_models.shrink`, and turns on what is special about the family: a window of 8
tokens, low soft caps, rotary scaling past 16 tokens, multipliers other than one. A variant
("phi3-longrope") is a family with other settings. Whether a family is exact or refused is not
listed here, but found out by running it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_WINDOW_TOKENS = 8
_MIXED_3 = ["sliding_attention", "full_attention", "sliding_attention"]
_ORIGINAL_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyFamily:
    """A Transformers model type and the settings laid over its tiny default."""

    model_type: str
    """Transformers' `model_type`."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Configuration fields set after shrinking."""
    feature: str = ""
    """What this entry tests, in a few words, for tables."""


def _family(model_type: str, feature: str = "", **overrides: Any) -> TinyFamily:
    return TinyFamily(model_type=model_type, overrides=overrides, feature=feature)


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10_000.0, **parameters}


_DENSE = {
    "llama": _family("llama", "GQA"),
    "llama-dynamic-rope": _family(
        "llama",
        "rotary base grows with the length",
        max_position_embeddings=_ORIGINAL_TOKENS,
        rope_parameters=_rope("dynamic", factor=2.0),
    ),
    "llama-yarn": _family(
        "llama",
        "yarn",
        rope_parameters=_rope(
            "yarn", factor=4.0, original_max_position_embeddings=_ORIGINAL_TOKENS
        ),
    ),
    "llama-llama3-rope": _family(
        "llama",
        "llama3 rotary scaling",
        rope_parameters=_rope(
            "llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=_ORIGINAL_TOKENS,
        ),
    ),
    "llama-bias-tied": _family(
        "llama", "biases, tied head", attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "mistral": _family("mistral", "window", sliding_window=_WINDOW_TOKENS),
    "ministral": _family("ministral", "mixed windows", layer_types=_MIXED_3),
    "ministral3": _family("ministral3", "query scaling by position"),
    "qwen2": _family(
        "qwen2",
        "biases, mixed windows",
        use_sliding_window=True,
        sliding_window=_WINDOW_TOKENS,
        max_window_layers=1,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "qwen3": _family("qwen3", "QK norm"),
    "gemma": _family("gemma", "embedding scaling"),
    "gemma2": _family(
        "gemma2",
        "soft caps, mixed windows",
        sliding_window=_WINDOW_TOKENS,
        layer_types=_MIXED_3,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=4.0,
        query_pre_attn_scalar=12,
    ),
    "gemma3_text": _family(
        "gemma3_text",
        "QK norm, mixed windows, two rotary tables",
        sliding_window=_WINDOW_TOKENS,
        layer_types=_MIXED_3,
        query_pre_attn_scalar=12,
    ),
    "gemma4_text": _family(
        "gemma4_text",
        "per-layer embeddings, two head sizes, mixed windows",
        sliding_window=_WINDOW_TOKENS,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        global_head_dim=16,
    ),
    "vaultgemma": _family("vaultgemma", "soft caps", layer_types=_MIXED_3),
    "phi": _family("phi", "partial rotary, parallel blocks, head bias"),
    "phi3": _family("phi3", "fused QKV", sliding_window=_WINDOW_TOKENS),
    "phi3-longrope": _family(
        "phi3",
        "longrope",
        original_max_position_embeddings=_ORIGINAL_TOKENS,
        rope_parameters=_rope(
            "longrope",
            short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[1.0, 2.0, 4.0, 8.0],
            original_max_position_embeddings=_ORIGINAL_TOKENS,
        ),
    ),
    "olmo": _family("olmo", "norms without weights, clipped QKV", clip_qkv=1.0),
    "olmo2": _family("olmo2", "QK norm over all heads, norm after"),
    "olmo3": _family("olmo3", "mixed windows", layer_types=_MIXED_3),
    "granite": _family(
        "granite",
        "four multipliers",
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.4,
        attention_multiplier=0.25,
    ),
    "starcoder2": _family("starcoder2", "window, biases", sliding_window=_WINDOW_TOKENS),
    "cohere": _family("cohere", "logit scale, parallel blocks", logit_scale=0.5, use_qk_norm=True),
    "cohere2": _family(
        "cohere2",
        "logit scale, parallel blocks, NoPE layers",
        logit_scale=0.5,
        sliding_window=_WINDOW_TOKENS,
        layer_types=_MIXED_3,
    ),
    "smollm3": _family("smollm3", "NoPE layers", no_rope_layers=[1, 0, 1]),
    "glm": _family("glm", "partial rotary"),
    "glm4": _family("glm4", "partial rotary, sandwich norms"),
    "exaone4": _family("exaone4", "mixed windows, NoPE layers", layer_types=_MIXED_3),
    "nemotron": _family("nemotron", "squared ReLU"),
    "arcee": _family("arcee", "squared ReLU"),
    "apertus": _family("apertus", "xIELU"),
    "helium": _family("helium"),
    "seed_oss": _family("seed_oss"),
    "ernie4_5": _family("ernie4_5"),
    "hunyuan_v1_dense": _family("hunyuan_v1_dense", "QK norm"),
    "nanochat": _family("nanochat", "soft-capped logits"),
    "afmoe": _family("afmoe", "gated attention, mixed windows", layer_types=_MIXED_3),
    "bitnet": _family("bitnet", "norms inside attention"),
    "hyperclovax": _family("hyperclovax", "multipliers"),
    "jais2": _family("jais2", "biases"),
    "granite_swa": _family("granite_swa", "sinks, windows"),
    "minicpm3": _family("minicpm3", "MLA"),
    "youtu": _family("youtu", "MLA"),
    "cwm": _family("cwm", "mixed windows", layer_types=_MIXED_3),
    "stablelm": _family("stablelm", "partial rotary", use_qkv_bias=True),
    "persimmon": _family("persimmon", "QK norm, partial rotary", qk_layernorm=True),
    "gpt2": _family("gpt2", "learned positions, tied head"),
    "gpt_neox": _family("gpt_neox", "parallel blocks"),
    "gpt_bigcode": _family("gpt_bigcode", "multi-query"),
    "opt": _family("opt", "learned positions from the mask"),
    "biogpt": _family("biogpt", "learned positions"),
}

_ROUTER_LOSS = "ernie4_5_moe gpt_oss mixtral olmoe qwen2_moe qwen3_moe".split()

_EXPERTS = {
    "gpt_oss": _family(
        "gpt_oss", "sinks, mixed windows", sliding_window=_WINDOW_TOKENS, layer_types=_MIXED_3
    ),
    "mixtral": _family("mixtral", "window", sliding_window=_WINDOW_TOKENS),
    "qwen2_moe": _family("qwen2_moe", "shared expert"),
    "qwen3_moe": _family("qwen3_moe", "QK norm"),
    "olmoe": _family("olmoe", "QK norm"),
    "granitemoe": _family(
        "granitemoe",
        "multipliers",
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.4,
        attention_multiplier=0.25,
    ),
    "deepseek_v2": _family("deepseek_v2", "MLA"),
    "deepseek_v3": _family("deepseek_v3", "MLA, grouped routing"),
    "glm4_moe": _family("glm4_moe", "grouped routing"),
    "ernie4_5_moe": _family("ernie4_5_moe", "shared expert"),
    "dots1": _family("dots1", "grouped routing"),
    "glm4_moe_lite": _family("glm4_moe_lite", "MLA, grouped routing"),
    "hunyuan_v1_moe": _family("hunyuan_v1_moe", "QK norm"),
    "exaone_moe": _family("exaone_moe", "mixed windows, NoPE layers"),
    "flex_olmo": _family("flex_olmo", "QK norm"),
    "jetmoe": _family("jetmoe", "experts inside attention"),
    "laguna": _family("laguna"),
    "mellum": _family("mellum"),
    "mimo_v2_flash": _family("mimo_v2_flash", "sinks, windows, two value head sizes"),
    "solar_open": _family("solar_open"),
    "minimax_m2": _family("minimax_m2", "QK norm"),
    **{
        f"{name}-router-loss": _family(
            name, "auxiliary router loss", output_router_logits=True, router_aux_loss_coef=0.1
        )
        for name in _ROUTER_LOSS
    },
}

_LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 3,
    "moe_layers": [1],
    "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 7,
    "floor_scale": 5,
    "attn_scale": 0.5,
}

_MIXED_LINEAR = ["linear_attention", "full_attention", "linear_attention"]
_MIXED_CONV = ["conv", "full_attention", "conv"]

_STATES = {
    "qwen3_next": _family("qwen3_next", "gated delta net, attention", layer_types=_MIXED_LINEAR),
    "qwen3_5_text": _family(
        "qwen3_5_text", "gated delta net, gated attention", layer_types=_MIXED_LINEAR
    ),
    "qwen3_5_moe_text": _family(
        "qwen3_5_moe_text", "gated delta net, gated attention", layer_types=_MIXED_LINEAR
    ),
    "olmo_hybrid": _family("olmo_hybrid", "gated delta net, attention", layer_types=_MIXED_LINEAR),
    "kimi_linear": _family("kimi_linear", "Kimi delta attention, MLA"),
    "bailing_hybrid": _family("bailing_hybrid", "Kimi delta attention, MLA"),
    "bamba": _family("bamba", "Mamba2, attention", attn_layer_indices=[1]),
    "falcon_h1": _family(
        "falcon_h1",
        "Mamba2 beside attention, multipliers",
        attention_in_multiplier=0.5,
        ssm_out_multiplier=2.0,
    ),
    "granitemoehybrid": _family("granitemoehybrid", "Mamba2, attention", layer_types=_MIXED_LINEAR),
    "nemotron_h": _family("nemotron_h", "Mamba2, attention, MLP and experts as layers"),
    "zamba2": _family("zamba2", "Mamba2, shared attention"),
    "mamba2": _family("mamba2", "Mamba2 alone"),
    "lfm2": _family("lfm2", "short convolutions, attention", layer_types=_MIXED_CONV),
    "lfm2_moe": _family("lfm2_moe", "short convolutions, attention", layer_types=_MIXED_CONV),
    "lfm3": _family("lfm3", "short convolutions, windows"),
    "zaya": _family("zaya", "convolved attention"),
    "mamba": _family("mamba", "Mamba"),
    "falcon_mamba": _family("falcon_mamba", "Mamba"),
    "jamba": _family("jamba", "Mamba, attention", attn_layer_period=2, attn_layer_offset=1),
    "zamba": _family(
        "zamba",
        "Mamba, shared attention",
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid"] * 2,
    ),
    "minimax": _family("minimax", "lightning attention"),
    "recurrent_gemma": _family("recurrent_gemma", "recurrence"),
    "rwkv": _family("rwkv", "recurrence"),
    "xlstm": _family("xlstm", "recurrence"),
}

_OTHERS = {
    "qwen4_exp_text": _family(
        "qwen4_exp_text",
        "linear attention, sparse attention by an indexer",
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=8,
        indexer_compress_ratio=2,
    ),
    "dbrx": _family(
        "dbrx",
        "clipped QKV",
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
    ),
    "cohere_compass_text": _family(
        "cohere_compass_text",
        "parallel blocks",
        rope_parameters={"full_attention": _rope("default", mrope_section=[1, 1, 2])},
    ),
    "deepseek_v32": _family("deepseek_v32", "sparse attention by an indexer"),
    "deepseek_v4": _family("deepseek_v4", "sparse attention by an indexer, compressed keys"),
    "glm_moe_dsa": _family("glm_moe_dsa", "sparse attention by an indexer"),
    "falcon": _family("falcon", "own attention", alibi=True),
    "bloom": _family("bloom", "ALiBi"),
    "mpt": _family("mpt", "ALiBi"),
    "gptj": _family("gptj", "parallel blocks; from Transformers 5.24 on", rotary_dim=4),
    "codegen": _family("codegen", "parallel blocks; from Transformers 5.24 on", rotary_dim=4),
    "gpt_neo": _family("gpt_neo", "own attention"),
    "llama4_text": _family(
        "llama4_text", "attention within blocks, queries scaled by index", **_LLAMA4
    ),
    "diffllama": _family("diffllama", "differential attention"),
    "gemma4_text-26b-a4b": _family(
        "gemma4_text",
        "experts beside a dense layer, keys that are values too",
        sliding_window=_WINDOW_TOKENS,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=24,
        hidden_size_per_layer_input=0,
    ),
    "gemma4_text-shared-kv": _family(
        "gemma4_text",
        "layers that read another layer's keys",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        global_head_dim=16,
    ),
    "gemma3n_text": _family(
        "gemma3n_text",
        "layers that read another layer's keys, per-layer inputs, several residual streams",
        sliding_window=_WINDOW_TOKENS,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
    ),
    "doge": _family("doge", "dynamic mask"),
    "t5": _family("t5", "encoder-decoder"),
}

_AXES = {"rope_parameters": _rope("default", mrope_section=[1, 1, 2])}
_HALF_AXES = {
    "rope_parameters": _rope("default", mrope_section=[0, 1, 1], partial_rotary_factor=0.5)
}
_MIXED_GEMMA = {"sliding_window": _WINDOW_TOKENS, "layer_types": _MIXED_3}

_MULTIMODAL = {
    "gemma3": _family(
        "gemma3", "multimodal", text_config={**_MIXED_GEMMA, "query_pre_attn_scalar": 12}
    ),
    "gemma4": _family(
        "gemma4",
        "multimodal",
        text_config={
            "sliding_window": _WINDOW_TOKENS,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 16,
        },
        vision_config={
            "model_type": "gemma4_vision",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
        },
    ),
    "gemma4_unified": _family(
        "gemma4_unified",
        "multimodal, blocks of image tokens",
        text_config={
            "sliding_window": _WINDOW_TOKENS,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "llama4": _family("llama4", "multimodal, attention within blocks", text_config=_LLAMA4),
    "mistral3": _family("mistral3", "multimodal"),
    "llava": _family("llava", "multimodal"),
    "internvl": _family("internvl", "multimodal"),
    "smolvlm": _family("smolvlm", "multimodal"),
    "paligemma": _family("paligemma", "multimodal, its mask is made outside its text decoder"),
    "qwen2_vl": _family(
        "qwen2_vl",
        "multimodal, three axes of positions",
        text_config=_AXES,
        vision_config={"embed_dim": 32, "num_heads": 4, "hidden_size": 32},
    ),
    "qwen2_5_vl": _family(
        "qwen2_5_vl",
        "multimodal, three axes of positions, mixed windows",
        text_config={
            **_AXES,
            "use_sliding_window": True,
            "sliding_window": _WINDOW_TOKENS,
            "max_window_layers": 1,
            "layer_types": _MIXED_3,
        },
    ),
    "qwen3_vl": _family("qwen3_vl", "multimodal, three axes of positions", text_config=_AXES),
    "qwen3_vl_moe": _family(
        "qwen3_vl_moe", "multimodal, three axes of positions", text_config=_AXES
    ),
    "glm4v": _family("glm4v", "multimodal, three axes of positions", text_config=_AXES),
    "glm46v": _family("glm46v", "multimodal, three axes of positions", text_config=_AXES),
    "glm_ocr": _family("glm_ocr", "multimodal, three axes of positions", text_config=_AXES),
    "glm4v_moe": _family(
        "glm4v_moe", "multimodal, three axes of positions", text_config=_HALF_AXES
    ),
    "paddleocr_vl": _family(
        "paddleocr_vl", "multimodal, three axes of positions", text_config=_AXES
    ),
    "glm5_next": _family(
        "glm5_next",
        "Kimi delta attention, sparse attention by an indexer",
        text_config={"qk_rope_head_dim": 0, "num_key_value_heads": 4},
    ),
}

MULTIMODAL = frozenset(_MULTIMODAL)
"""Families with encoders of images or sound beside their text decoder."""

FAMILIES: Mapping[str, TinyFamily] = {
    **_DENSE,
    **_EXPERTS,
    **_STATES,
    **_OTHERS,
    **_MULTIMODAL,
}
"""Every tiny family and variant by name."""

UNLISTED: Mapping[str, TinyFamily] = {
    "glmga": _family("glmga", "multimodal, three axes of positions", text_config=_AXES),
    "hunyuan_vl": _family("hunyuan_vl", "multimodal, three axes of positions", text_config=_AXES),
    "ernie4_5_vl_moe": _family(
        "ernie4_5_vl_moe",
        "multimodal, three axes of positions, experts of two kinds",
        text_config={**_AXES, "moe_intermediate_size": [24, 24], "moe_num_experts": 4},
    ),
    "qwen2_5_omni_thinker": _family(
        "qwen2_5_omni_thinker",
        "multimodal, three axes of positions",
        vision_start_token_id=5,
        text_config=_AXES,
    ),
    "qwen3_omni_moe_thinker": _family(
        "qwen3_omni_moe_thinker", "multimodal, three axes of positions", vision_start_token_id=5
    ),
    "chameleon": _family(
        "chameleon", "multimodal, QK norm", vocabulary_map={"<image>": _WINDOW_TOKENS}
    ),
    "step3p7": _family("step3p7", "multimodal", text_config={"sliding_window": _WINDOW_TOKENS}),
}
"""Types that are in no table, with the settings that their tiny models need."""
