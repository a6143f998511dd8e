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

_MIXED_WINDOWS = {"sliding_window": _WINDOW_TOKENS, "layer_types": _MIXED_3}
_PAIRS_OF_LAYERS: dict[str, Any] = {
    "sliding_window": _WINDOW_TOKENS,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.25,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyFamily:
    """A Transformers model type and the settings laid over its tiny default."""

    model_type: str
    """Transformers' `model_type`."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Configuration fields set after shrinking."""
    feature: str = ""
    """What this entry tests, in a few words, for tables."""


def _family(feature: str = "", **overrides: Any) -> tuple[str, dict[str, Any]]:
    return feature, overrides


def _by_name(entries: Mapping[str, tuple[str, dict[str, Any]]]) -> dict[str, TinyFamily]:
    """Make families of what a name's first part, up to a hyphen, says the model type of."""
    return {
        name: TinyFamily(model_type=name.partition("-")[0], feature=feature, overrides=overrides)
        for name, (feature, overrides) in entries.items()
    }


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10_000.0, **parameters}


_DENSE = {
    "llama": _family("GQA"),
    "llama-dynamic-rope": _family(
        "rotary base grows with the length",
        max_position_embeddings=_ORIGINAL_TOKENS,
        rope_parameters=_rope("dynamic", factor=2.0),
    ),
    "llama-yarn": _family(
        "yarn",
        rope_parameters=_rope(
            "yarn", factor=4.0, original_max_position_embeddings=_ORIGINAL_TOKENS
        ),
    ),
    "llama-llama3-rope": _family(
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
        "biases, tied head", attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "mistral": _family("window", sliding_window=_WINDOW_TOKENS),
    "ministral": _family("mixed windows", layer_types=_MIXED_3),
    "ministral3": _family("query scaling by position"),
    "qwen2": _family(
        "biases, mixed windows",
        use_sliding_window=True,
        sliding_window=_WINDOW_TOKENS,
        max_window_layers=1,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "qwen3": _family("QK norm"),
    "gemma": _family("embedding scaling"),
    "gemma2": _family(
        "soft caps, mixed windows",
        **_MIXED_WINDOWS,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=4.0,
        query_pre_attn_scalar=12,
    ),
    "gemma3_text": _family(
        "QK norm, mixed windows, two rotary tables", **_MIXED_WINDOWS, query_pre_attn_scalar=12
    ),
    "gemma4_text": _family(
        "per-layer embeddings, two head sizes, mixed windows",
        **_PAIRS_OF_LAYERS,
        global_head_dim=16,
    ),
    "vaultgemma": _family("soft caps", layer_types=_MIXED_3),
    "phi": _family("partial rotary, parallel blocks, head bias"),
    "phi3": _family("fused QKV", sliding_window=_WINDOW_TOKENS),
    "phi3-longrope": _family(
        "longrope",
        original_max_position_embeddings=_ORIGINAL_TOKENS,
        rope_parameters=_rope(
            "longrope",
            short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[1.0, 2.0, 4.0, 8.0],
            original_max_position_embeddings=_ORIGINAL_TOKENS,
        ),
    ),
    "olmo": _family("norms without weights, clipped QKV", clip_qkv=1.0),
    "olmo2": _family("QK norm over all heads, norm after"),
    "olmo3": _family("mixed windows", layer_types=_MIXED_3),
    "granite": _family("four multipliers", **_MULTIPLIERS),
    "starcoder2": _family("window, biases", sliding_window=_WINDOW_TOKENS),
    "cohere": _family("logit scale, parallel blocks", logit_scale=0.5, use_qk_norm=True),
    "cohere2": _family(
        "logit scale, parallel blocks, NoPE layers", logit_scale=0.5, **_MIXED_WINDOWS
    ),
    "smollm3": _family("NoPE layers", no_rope_layers=[1, 0, 1]),
    "glm": _family("partial rotary"),
    "glm4": _family("partial rotary, sandwich norms"),
    "exaone4": _family("mixed windows, NoPE layers", layer_types=_MIXED_3),
    "nemotron": _family("squared ReLU"),
    "arcee": _family("squared ReLU"),
    "apertus": _family("xIELU"),
    "helium": _family(),
    "seed_oss": _family(),
    "ernie4_5": _family(),
    "hunyuan_v1_dense": _family("QK norm"),
    "nanochat": _family("soft-capped logits"),
    "afmoe": _family("gated attention, mixed windows", layer_types=_MIXED_3),
    "bitnet": _family("norms inside attention"),
    "hyperclovax": _family("multipliers"),
    "jais2": _family("biases"),
    "granite_swa": _family("sinks, windows"),
    "minicpm3": _family("MLA"),
    "youtu": _family("MLA"),
    "cwm": _family("mixed windows", layer_types=_MIXED_3),
    "stablelm": _family("partial rotary", use_qkv_bias=True),
    "persimmon": _family("QK norm, partial rotary", qk_layernorm=True),
    "gpt2": _family("learned positions, tied head"),
    "gpt_neox": _family("parallel blocks"),
    "gpt_bigcode": _family("multi-query"),
    "opt": _family("learned positions from the mask"),
    "biogpt": _family("learned positions"),
}

_ROUTER_LOSS = "ernie4_5_moe gpt_oss mixtral olmoe qwen2_moe qwen3_moe".split()

_EXPERTS = {
    "gpt_oss": _family(
        "sinks, mixed windows",
        **_MIXED_WINDOWS,
    ),
    "mixtral": _family("window", sliding_window=_WINDOW_TOKENS),
    "qwen2_moe": _family("shared expert"),
    "qwen3_moe": _family("QK norm"),
    "olmoe": _family("QK norm"),
    "granitemoe": _family("multipliers", **_MULTIPLIERS),
    "granitemoeshared": _family("shared expert, multipliers", **_MULTIPLIERS),
    "deepseek_v2": _family("MLA"),
    "deepseek_v3": _family("MLA, grouped routing"),
    "glm4_moe": _family("grouped routing"),
    "ernie4_5_moe": _family("shared expert"),
    "dots1": _family("grouped routing"),
    "glm4_moe_lite": _family("MLA, grouped routing"),
    "hunyuan_v1_moe": _family("QK norm"),
    "exaone_moe": _family("mixed windows, NoPE layers"),
    "flex_olmo": _family("QK norm"),
    "jetmoe": _family("experts inside attention"),
    "laguna": _family(),
    "mellum": _family(),
    "mimo_v2_flash": _family("sinks, windows, two value head sizes"),
    "solar_open": _family(),
    "minimax_m2": _family("QK norm"),
    "cohere2_moe": _family(
        "shared expert, parallel blocks, NoPE layers, mixed windows",
        layer_types=_MIXED_3,
        mlp_layer_types=["dense", "sparse", "sparse"],
        num_shared_experts=1,
        expert_selection_fn="sigmoid",
        logit_scale=0.5,
    ),
    **{
        f"{name}-router-loss": _family(
            "auxiliary router loss", output_router_logits=True, router_aux_loss_coef=0.1
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
    "qwen3_next": _family("gated delta net, attention", layer_types=_MIXED_LINEAR),
    "qwen3_5_text": _family("gated delta net, gated attention", layer_types=_MIXED_LINEAR),
    "qwen3_5_moe_text": _family("gated delta net, gated attention", layer_types=_MIXED_LINEAR),
    "olmo_hybrid": _family("gated delta net, attention", layer_types=_MIXED_LINEAR),
    "kimi_linear": _family("Kimi delta attention, MLA"),
    "bailing_hybrid": _family("Kimi delta attention, MLA"),
    "bamba": _family("Mamba2, attention", attn_layer_indices=[1]),
    "falcon_h1": _family(
        "Mamba2 beside attention, multipliers", attention_in_multiplier=0.5, ssm_out_multiplier=2.0
    ),
    "granitemoehybrid": _family("Mamba2, attention", layer_types=_MIXED_LINEAR),
    "nemotron_h": _family("Mamba2, attention, MLP and experts as layers"),
    "zamba2": _family("Mamba2, shared attention"),
    "mamba2": _family("Mamba2 alone"),
    "lfm2": _family("short convolutions, attention", layer_types=_MIXED_CONV),
    "lfm2_moe": _family("short convolutions, attention", layer_types=_MIXED_CONV),
    "lfm3": _family("short convolutions, windows"),
    "zaya": _family("convolved attention"),
    "mamba": _family("Mamba"),
    "falcon_mamba": _family("Mamba"),
    "jamba": _family("Mamba, attention", attn_layer_period=2, attn_layer_offset=1),
    "zamba": _family(
        "Mamba, shared attention",
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid"] * 2,
    ),
    "minimax": _family("lightning attention"),
    "recurrent_gemma": _family("recurrence"),
    "rwkv": _family("recurrence"),
    "xlstm": _family("recurrence"),
}

_OTHERS = {
    "qwen4_exp_text": _family(
        "linear attention, sparse attention by an indexer",
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=8,
        indexer_compress_ratio=2,
    ),
    "dbrx": _family(
        "clipped QKV", attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0}
    ),
    "cohere_compass_text": _family(
        "parallel blocks",
        rope_parameters={"full_attention": _rope("default", mrope_section=[1, 1, 2])},
    ),
    "deepseek_v4": _family("sparse attention by an indexer, compressed keys"),
    "falcon": _family("own attention", alibi=True),
    "bloom": _family("ALiBi"),
    "mpt": _family("ALiBi"),
    "gptj": _family("parallel blocks; from Transformers 5.24 on", rotary_dim=4),
    "codegen": _family("parallel blocks; from Transformers 5.24 on", rotary_dim=4),
    "gpt_neo": _family("own attention"),
    "llama4_text": _family("attention within blocks, queries scaled by index", **_LLAMA4),
    "diffllama": _family("differential attention"),
    "gemma4_text-26b-a4b": _family(
        "experts beside a dense layer, keys that are values too",
        **_PAIRS_OF_LAYERS,
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
        "layers that read another layer's keys",
        **_PAIRS_OF_LAYERS,
        num_kv_shared_layers=2,
        global_head_dim=16,
    ),
    "gemma3n_text": _family(
        "layers that read another layer's keys, per-layer inputs, several residual streams",
        **_PAIRS_OF_LAYERS,
        num_kv_shared_layers=2,
    ),
    "doge": _family("dynamic mask"),
    "t5": _family("encoder-decoder"),
}

_AXES = {"rope_parameters": _rope("default", mrope_section=[1, 1, 2])}
_HALF_AXES = {
    "rope_parameters": _rope("default", mrope_section=[0, 1, 1], partial_rotary_factor=0.5)
}
_DEEPSTACK = {"deepstack_visual_indexes": [0, 1]}
_THREE_AXES = "multimodal, three axes of positions"

_MULTIMODAL = {
    "gemma3": _family("multimodal", text_config={**_MIXED_WINDOWS, "query_pre_attn_scalar": 12}),
    "gemma4": _family(
        "multimodal",
        text_config={
            **_PAIRS_OF_LAYERS,
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
        "multimodal, blocks of image tokens",
        text_config=_PAIRS_OF_LAYERS,
        vision_config={
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 32,
            "mm_posemb_size": 64,
            "output_proj_dims": 32,
        },
    ),
    "llama4": _family(
        "multimodal, attention within blocks",
        text_config=_LLAMA4,
        vision_config={"projector_input_dim": 64, "projector_output_dim": 64},
    ),
    "mistral3": _family("multimodal"),
    "mistral_large4": _family(
        "multimodal, MLA, an indexer chooses keys for several layers",
        text_config={"indexer_types": ["full", "shared", "full", "shared", "full", "full"]},
    ),
    "llava": _family("multimodal"),
    "internvl": _family("multimodal"),
    "smolvlm": _family("multimodal"),
    "paligemma": _family("multimodal, its mask is made outside its text decoder"),
    "qwen2_vl": _family(
        _THREE_AXES,
        text_config=_AXES,
        vision_config={"embed_dim": 32, "num_heads": 4, "hidden_size": 32},
    ),
    "qwen2_5_vl": _family(
        "multimodal, three axes of positions, mixed windows",
        text_config={
            **_AXES,
            "use_sliding_window": True,
            "sliding_window": _WINDOW_TOKENS,
            "max_window_layers": 1,
            "layer_types": _MIXED_3,
        },
    ),
    "qwen3_vl": _family(_THREE_AXES, text_config=_AXES, vision_config=_DEEPSTACK),
    "qwen3_vl_moe": _family(_THREE_AXES, text_config=_AXES, vision_config=_DEEPSTACK),
    "glm4v": _family(_THREE_AXES, text_config=_AXES),
    "glm46v": _family(_THREE_AXES, text_config=_AXES),
    "glm_ocr": _family(_THREE_AXES, text_config=_AXES),
    "glm4v_moe": _family(_THREE_AXES, text_config=_HALF_AXES),
    "paddleocr_vl": _family(_THREE_AXES, text_config=_AXES),
    "glm5_next": _family(
        "Kimi delta attention, sparse attention by an indexer",
        text_config={"qk_rope_head_dim": 0, "num_key_value_heads": 4},
    ),
}

_INDEXED = {
    "deepseek_v32": _family("MLA, an indexer chooses keys"),
    "axk2": _family("MLA, an indexer chooses keys"),
    "dots3_note_text": _family("MLA, an indexer chooses keys, windows"),
    "hy_v4": _family("MLA, an indexer chooses keys for several layers, four residual streams"),
    "glm_moe_dsa": _family(
        "MLA, an indexer chooses keys for several layers",
        indexer_types=["full", "shared", "full"],
    ),
}

MULTIMODAL = frozenset(_MULTIMODAL)
"""Families with encoders of images or sound beside their text decoder."""

INDEXED = frozenset((*_INDEXED, "mistral_large4"))
"""Families in which an indexer chooses the keys that a query reads."""

FAMILIES: Mapping[str, TinyFamily] = _by_name(
    {**_DENSE, **_EXPERTS, **_STATES, **_OTHERS, **_MULTIMODAL, **_INDEXED}
)
"""Every tiny family and variant by name."""

UNLISTED: Mapping[str, TinyFamily] = _by_name(
    {
        "glmga": _family(_THREE_AXES, text_config=_AXES),
        "hunyuan_vl": _family(_THREE_AXES, text_config=_AXES),
        "ernie4_5_vl_moe": _family(
            "multimodal, three axes of positions, experts of two kinds",
            text_config={**_AXES, "moe_intermediate_size": [24, 24], "moe_num_experts": 4},
        ),
        "qwen2_5_omni_thinker": _family(_THREE_AXES, vision_start_token_id=5, text_config=_AXES),
        "qwen3_omni_moe_thinker": _family(_THREE_AXES, vision_start_token_id=5),
        "chameleon": _family(
            "multimodal, QK norm",
            vocabulary_map={"<image>": _WINDOW_TOKENS},
            vq_config={"base_channels": 32, "num_embeddings": 64},
        ),
        "gemma4-bidirectional": _family(
            "multimodal, tokens of an image see each other in both directions",
            **{
                **_MULTIMODAL["gemma4"][1],
                "text_config": {
                    **_MULTIMODAL["gemma4"][1]["text_config"],
                    "use_bidirectional_attention": "vision",
                },
            },
        ),
        "muse_glimmer": _family("multimodal", out_hidden_size=128, projector_hidden_size=32),
        "step3p7": _family("multimodal", text_config={"sliding_window": _WINDOW_TOKENS}),
    }
)
"""Types that are in no table, with the settings that their tiny models need."""
