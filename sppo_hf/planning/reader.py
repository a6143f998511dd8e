"""Reads layer shapes off a Transformers config, by attribute names alone, and refuses nonsense.

This is the one place that knows how families spell their sizes (`n_embd`, `moe_intermediate_size`,
`first_k_dense_replace` ...). It imports neither torch nor transformers: any object with the right
attributes will do. What a family leaves out gets the default its own modelling code uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from sppo_hf.errors import UnsupportedModelError
from sppo_hf.planning import family_defaults
from sppo_hf.planning.families import FamilyTraits, traits_of
from sppo_hf.planning.layer import ExpertShape, LatentShape, LayerShape, MixerShape
from sppo_hf.rules import refuse

# Families with one K/V head for all queries that say so with a flag of their own.
_MOST_LAYERS = 4096
MIXER_KINDS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Layer types with a recurrent or convolutional mixer."""
_WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "moe", "mlp"})
_OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
_NEMOTRON_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_MULTI_QUERY_FAMILIES = frozenset({"falcon", "gpt_bigcode"})
_ACTIVATION_FIELDS = (
    *("hidden_activation", "hidden_act", "activation_function"),
    *("mlp_hidden_act", "hidden_activation_function"),
)


def text_config(config: object) -> object:
    """Returns the decoder's own config: multimodal configs keep it one level down."""
    getter = getattr(config, "get_text_config", None)
    return getter() if callable(getter) else getattr(config, "text_config", None) or config


def find_int(config: object, *names: str, least: int = 1) -> int | None:
    """Returns the first of the named attributes that is not None, else the family's default.

    Args:
        config: any object with attributes.
        *names: by which families call the size.
        least: smallest value that makes sense: 0 where that stands for none.

    Raises:
        ConfigError: it is no whole number, below `least`, or 2**31 or more.
    """
    for name in names:
        value: object = getattr(config, name, None)
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31:
            return value
        allowed = f"a whole number, {least} to {2**31 - 1:,}"
        refuse(name, value, allowed=allowed, remedy="mend the model's config.json")
    defaults = family_defaults.SIZES.get(family(config), {})
    return next((defaults[name] for name in names if name in defaults), None)


def need_int(config: object, *names: str) -> int:
    """Like `find_int`; raises UnsupportedModelError where no name holds an int."""
    value = find_int(config, *names)
    if value is None:
        raise UnsupportedModelError(
            f"{type(config).__name__} (model_type {family(config)!r}) has none of "
            f"{', '.join(names)}, so its shape cannot be read. Only decoder-only causal language "
            "models are supported; pass the config of the language model itself."
        )
    return value


def family(config: object) -> str:
    """Returns the config's `model_type`, or an empty string."""
    return str(getattr(config, "model_type", "") or "")


def read_layers(config: object) -> tuple[LayerShape, ...]:
    """Returns one `LayerShape` per decoder layer.

    Raises:
        UnsupportedModelError: a size that cannot do without is missing.
        ConfigError: a size is nonsense, or there are more than 4,096 layers.
    """
    num_layers = need_int(config, *_LAYERS)
    if num_layers > _MOST_LAYERS:
        refuse(
            "num_hidden_layers",
            num_layers,
            allowed=f"1 to {_MOST_LAYERS:,}",
            remedy="mend the model's config.json",
        )
    # Equal layers share one object: a plan walks them often.
    shapes: dict[LayerShape, LayerShape] = {}
    layers = (_read_layer(config, index) for index in range(num_layers))
    return tuple(shapes.setdefault(layer, layer) for layer in layers)


def is_tied(config: object) -> bool:
    """Whether embedding and head are one matrix."""
    for owner in (config, text_config(config)):
        value = getattr(owner, "tie_word_embeddings", None)
        if isinstance(value, bool):
            return value
    return family(text_config(config)) in family_defaults.TIED


def encoder_weights(config: object) -> int:
    """About how many weights the encoders of images and sound beside a text decoder have.

    Four square matrices of attention and two of an MLP a layer; patches, tables and projectors,
    which are small beside them, are left out.
    """
    total = 0
    for name in ("vision_config", "audio_config"):
        encoder = getattr(config, name, None)
        width = find_int(encoder, "embed_dim", "hidden_size", "d_model")
        layers = find_int(encoder, "depth", "num_hidden_layers", "encoder_layers")
        if width is None or layers is None:
            continue
        inner = find_int(encoder, "intermediate_size", "encoder_ffn_dim") or 4 * width
        total += layers * width * (4 * width + 2 * inner)
    return total


def learned_positions(config: object) -> int:
    """Rows of a learned position table; 0 for rotary models."""
    if family(config) not in family_defaults.LEARNED_POSITIONS:
        return 0
    return find_int(config, "n_positions", "max_position_embeddings") or 0


def per_layer_vocabulary(config: object) -> int:
    """Rows of the table of per-layer embeddings (Gemma 4); as many as the vocabulary's else."""
    return find_int(config, "vocab_size_per_layer_input") or need_int(config, "vocab_size")


def rotary_limit_tokens(config: object) -> int | None:
    """Returns the longest sequence the position encoding was made for; None where it has no end."""
    limit = find_int(config, "max_position_embeddings", "n_positions", "n_ctx")
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if limit is None or not isinstance(scaling, dict):
        return limit
    rope = cast("dict[str, Any]", scaling)
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if rope.get("rope_type", rope.get("type")) == "dynamic":
        return None
    if isinstance(original, int) and isinstance(factor, (int, float)):
        # Also false of NaN.
        if not 0 < factor < 2**31 or not 0 < original < 2**31:
            seen = {"original_max_position_embeddings": original, "factor": factor}
            refuse(
                "rope_parameters",
                seen,
                allowed="numbers above zero and below 2**31",
                remedy="mend the model's config.json",
            )
        return max(limit, int(original * factor))
    return limit


def _read_layer(config: object, index: int) -> LayerShape:
    traits = _traits(config)
    own = _own_config(config, index)
    hidden_size = need_int(config, "hidden_size", "n_embd", "d_model")
    heads = _num_heads(own, index)
    sparse = _is_sparse(config, index)
    kv_heads = _num_kv_heads(own, heads)
    head_size = find_int(own, "head_dim", "kv_channels") or hidden_size // heads
    if not head_size or heads % kv_heads:
        seen = {"heads": heads, "key and value heads": kv_heads, "hidden_size": hidden_size}
        refuse(
            "the attention of this model",
            seen,
            allowed="at most as many heads as hidden_size, a multiple of the key and value heads",
            remedy="mend the model's config.json",
        )
    layer = LayerShape(
        hidden_size=hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        qk_head_size=head_size,
        v_head_size=0,
        window=_window(config, index),
        traits=traits,
        head_norm=bool(traits.head_norm) and _switched_on(config, traits.head_norm_switch),
        clipped=getattr(config, "clip_qkv", None) is not None,
        dense_width=_shared_width(own) if sparse else _dense_width(own, hidden_size),
        experts=_read_experts(own) if sparse else None,
        activation=_activation(config, traits),
        per_layer_input=find_int(config, "hidden_size_per_layer_input", least=0) or 0,
    )
    if traits.attention_experts:
        return _with_attention_experts(layer)
    kind = _layer_type(config, index)
    if kind in MIXER_KINDS:
        layer = replace(layer, mixer=_read_mixer(own, hidden_size))
    if not _has_mlp(config, kind):
        layer = replace(layer, dense_width=0, experts=None)
    if kind in _WITHOUT_ATTENTION:
        return replace(layer, num_heads=0, num_kv_heads=0, window=None, head_norm=False)
    latent = _read_latent(own)
    if latent is not None:
        return _with_latent(own, layer, latent)
    if family(config) == "mimo_v2_flash" and kind == "sliding_attention":
        layer = replace(layer, num_kv_heads=2 * layer.num_kv_heads)
    shared_keys = getattr(config, "attention_k_eq_v", False) is True and kind == "full_attention"
    v_size = find_int(own, "v_head_dim") or layer.qk_head_size
    layer = replace(layer, v_head_size=v_size, shared_keys=shared_keys)
    if index < need_int(config, *_LAYERS) - (
        find_int(config, "num_kv_shared_layers", least=0) or 0
    ):
        return layer
    wide = 2 if getattr(config, "use_double_wide_mlp", False) is True else 1
    return replace(layer, borrows_keys=True, dense_width=wide * layer.dense_width)


def _has_mlp(config: object, kind: object) -> bool:
    """Whether a layer has an MLP or experts behind its mixer, or is one."""
    if family(config) == "nemotron_h":
        return kind in ("moe", "mlp")  # one block a layer
    return family(config) != "mamba2" and (family(config) != "zamba2" or kind == "hybrid")


def _read_mixer(config: object, hidden_size: int) -> MixerShape:
    """A layer's mixer: a gated delta net, a state-space model or a short convolution.

    What scans save was measured of Transformers' torch code, with heads of 64 and 128, and fitted;
    kernels save less.
    """
    names = ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_L_cache")
    kernel = find_int(config, *names, "conv_kernel_size") or 4
    kimi = getattr(config, "linear_attn_config", None)
    if isinstance(kimi, Mapping) and "num_heads" in kimi:
        sizes = cast("Mapping[str, Any]", kimi)
        named = {"linear_num_heads": "num_heads", "linear_head_dim": "head_dim"}
        config = SimpleNamespace(**{ours: sizes.get(theirs) for ours, theirs in named.items()})
    values = find_int(config, "linear_num_value_heads", "linear_num_heads")
    if values is not None:
        keys = find_int(config, "linear_num_key_heads", "linear_num_heads") or values
        k_size = need_int(config, "linear_key_head_dim", "linear_head_dim")
        v_size = find_int(config, "linear_value_head_dim", "linear_head_dim") or k_size
        conv, out = 2 * keys * k_size + values * v_size, values * v_size
        block = 64
        # With a decay for each element of a key, decays between the tokens of a block.
        own_decays = find_int(config, "linear_num_heads") is not None
        decays = 10 * block * k_size // 3 if own_decays else 0
        return MixerShape(
            in_elements=conv + out + 2 * values,
            conv_elements=conv,
            conv_kernel=kernel,
            out_elements=out,
            state_elements=values * k_size * v_size,
            scan_flops=2 * values * (block * (3 * k_size + 2 * v_size) + 3 * k_size * v_size),
            scan_elements=values * (5 * block + 11 * k_size + 8 * v_size + decays),
        )
    heads = find_int(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    if heads is None or family(config) in ("lfm2", "lfm2_moe", "lfm3", "inkling_text"):
        return MixerShape(
            in_elements=3 * hidden_size,
            conv_elements=hidden_size,
            conv_kernel=kernel,
            out_elements=hidden_size,
        )
    size = need_int(config, "mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    state = need_int(config, "mamba_d_state", "ssm_state_size", "state_size")
    groups = find_int(config, "mamba_n_groups", "mamba_ngroups", "n_groups") or 1
    block = find_int(config, "mamba_chunk_size", "chunk_size") or 256
    out = heads * size
    conv = out + 2 * groups * state
    return MixerShape(
        in_elements=conv + out + heads,
        conv_elements=conv,
        conv_kernel=kernel,
        out_elements=out,
        state_elements=out * state,
        scan_flops=2 * heads * (block * (state + size) + 3 * size * state),
        scan_elements=heads * (3 * block + 7 * state + 6 * size),
    )


def _own_config(config: object, index: int) -> object:
    """What a layer reads its sizes off: an entry of `per_layer_config`, else the config."""
    per_layer = getattr(config, "per_layer_config", None)
    widths = _sequence(config, "intermediate_size")
    if widths is not None and len(widths) >= need_int(config, *_LAYERS):
        return SimpleNamespace(**{**vars(config), "intermediate_size": widths[index]})
    if per_layer is None:
        return config
    if isinstance(per_layer, Mapping):
        # As in a config.json: overrides by the layer's number, for some layers.
        overrides = cast("Mapping[str, Mapping[str, Any]]", per_layer).get(str(index), {})
        return SimpleNamespace(**{**vars(config), **overrides})
    # Where layers differ in such sizes, Transformers refuses to read them off the whole config.
    return cast("Sequence[object]", per_layer)[index]


def _traits(config: object) -> FamilyTraits:
    """The family's traits, and what its config may change about them."""
    traits = traits_of(family(config))
    if family(config) == "gpt_neox" and getattr(config, "use_parallel_residual", True) is False:
        return replace(traits, placement="before")
    if family(config) == "hyperclovax" and getattr(config, "use_post_norm", True) is False:
        return replace(traits, placement="before")
    if family(config) == "laguna" and getattr(config, "gating", True) not in (True, "per-head"):
        return replace(traits, attention_gate="element")
    return traits


def _switched_on(config: object, switch: str) -> bool:
    return not switch or getattr(config, switch, False) is True


def _activation(config: object, traits: FamilyTraits) -> str:
    for name in _ACTIVATION_FIELDS:
        value = getattr(config, name, None)
        if isinstance(value, str):
            return value
    return traits.activation


def _num_heads(config: object, index: int) -> int:
    per_layer = _per_layer(config, "num_attention_heads_per_layer")
    if per_layer is not None:
        name = f"num_attention_heads_per_layer[{index}]"
        return need_int(SimpleNamespace(**{name: per_layer[index]}), name)
    return need_int(config, "num_attention_heads", "n_head", "num_heads", "n_heads")


def _num_kv_heads(config: object, heads: int) -> int:
    if family(config) in _MULTI_QUERY_FAMILIES and getattr(config, "multi_query", True) is True:
        return 1
    return find_int(config, "num_key_value_heads", "num_kv_heads") or heads


def _read_latent(config: object) -> LatentShape | None:
    kv_rank = find_int(config, "kv_lora_rank")
    if kv_rank is None:
        return None
    return LatentShape(
        q_rank=find_int(config, "q_lora_rank"),
        kv_rank=kv_rank,
        rope_size=need_int(config, "qk_rope_head_dim"),
    )


def _with_latent(config: object, layer: LayerShape, latent: LatentShape) -> LayerShape:
    """Multi-head latent attention, as it reaches the attention call.

    K/V are expanded to all heads before that call, and the KV store keeps what the call is given.
    The rotary part of a key is shared by the heads in the weights, repeated per head in the store.
    """
    return replace(
        layer,
        num_kv_heads=layer.num_heads,
        qk_head_size=need_int(config, "qk_nope_head_dim") + latent.rope_size,
        v_head_size=need_int(config, "v_head_dim"),
        latent=latent,
    )


def _with_attention_experts(layer: LayerShape) -> LayerShape:
    """JetMoE: one set of heads per active expert, and keys repeated for each."""
    active = layer.routed_experts
    heads = layer.num_kv_heads * active
    return replace(layer, num_heads=heads, num_kv_heads=heads, v_head_size=layer.qk_head_size)


def _dense_width(config: object, hidden_size: int) -> int:
    if getattr(config, "intermediate_size", 0) is None:
        need_int(config, "intermediate_size")
    width = find_int(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    if width is not None and getattr(config, "block_auto_adjust_ff_dim", False) is True:
        # LFM2: two thirds, rounded up.
        step = find_int(config, "block_multiple_of") or 1
        factor = getattr(config, "block_ffn_dim_multiplier", None) or 1.0
        return -(-int(factor * (2 * width // 3)) // step) * step
    return 4 * hidden_size if width is None else width


def _num_experts(config: object) -> int:
    return (
        find_int(
            config,
            *("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
            least=0,
        )
        or 0
    )


def _read_experts(config: object) -> ExpertShape:
    return ExpertShape(
        count=_num_experts(config),
        active=find_int(
            config,
            "num_experts_per_tok",
            "num_experts_per_token",
            "moe_topk",
            "moe_k",
            "top_k_experts",
        )
        or 1,
        width=_expert_width(config),
        biased=traits_of(family(config)).clamped_experts,
    )


def _expert_width(config: object) -> int:
    return find_int(config, "moe_intermediate_size") or need_int(config, "intermediate_size")


def _shared_width(config: object) -> int:
    """Intermediate elements of all shared experts together."""
    names = ("shared_expert_intermediate_size", "shared_intermediate_size")
    width = find_int(config, *names, least=0)
    if width is not None:
        return width
    if family(config) in ("hunyuan_v1_moe", "gemma4_text"):
        return need_int(config, "intermediate_size")
    names = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return _expert_width(config) * (find_int(config, *names, least=0) or 0)


def _is_sparse(config: object, layer: int) -> bool:
    if _num_experts(config) <= 1 or getattr(config, "enable_moe_block", True) is False:
        return False
    kinds = _per_layer(config, "mlp_layer_types")
    if kinds is not None:
        return kinds[layer] == "sparse"
    if family(config) == "nemotron_h":
        return _layer_type(config, layer) == "moe"
    names = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
    dense = find_int(config, *names, least=0)
    if layer < (dense or 0):
        return False
    if layer in (_sequence(config, "mlp_only_layers") or ()):
        return False
    return (layer + 1) % (find_int(config, "decoder_sparse_step") or 1) == 0


def _window(config: object, layer: int) -> int | None:
    # Some families write 0 for none.
    window = find_int(config, "sliding_window", least=0) or None
    kind = _layer_type(config, layer)
    if kind is not None:
        if kind == "chunked_attention":
            return find_int(config, "attention_chunk_size")
        return window if kind == "sliding_attention" else None
    if getattr(config, "use_sliding_window", family(config) not in family_defaults.NO_WINDOW) is (
        False
    ):
        return None
    full_every = find_int(config, "sliding_window_pattern", "global_attn_every_n_layers")
    full_every = full_every or family_defaults.FULL_EVERY.get(family(config), 0)
    return None if full_every and (layer + 1) % full_every == 0 else window


def _layer_type(config: object, layer: int) -> object:
    for name in ("layer_types", "layers_block_type"):
        kinds = _per_layer(config, name)
        if kinds is not None:
            return _OLD_NAMES.get(str(kinds[layer]), kinds[layer])
    pattern: object = getattr(config, "hybrid_override_pattern", None)
    if isinstance(pattern, str) and len(pattern) > layer:
        return _NEMOTRON_KINDS.get(pattern[layer])
    attends = _attends(config, layer)
    if attends is not None:
        other = "conv" if family(config).startswith("lfm") else "linear_attention"
        return "full_attention" if attends else other
    return family_defaults.LAYER_TYPE.get(family(config))


def _attends(config: object, layer: int) -> bool | None:
    """Whether a hybrid's layer has attention, where a file says that in its family's own way."""
    for name in ("attn_layer_indices", "full_attn_idxs"):
        indices = _sequence(config, name)
        if indices is not None:
            return layer in indices
    kimi = getattr(config, "linear_attn_config", None)
    if isinstance(kimi, Mapping):
        counted = cast("Mapping[str, Sequence[int]]", kimi).get("full_attn_layers", ())
        return layer + 1 in counted
    every = find_int(config, "full_attention_interval", "layer_group_size")
    return None if every is None else (layer + 1) % every == 0


def _per_layer(config: object, name: str) -> Sequence[object] | None:
    """Returns what a list says of each layer.

    Raises:
        ConfigError: it has fewer entries than there are layers.
    """
    values = _sequence(config, name)
    num_layers = need_int(config, *_LAYERS)
    if values is not None and len(values) < num_layers:
        refuse(
            name,
            values,
            allowed=f"one entry for each of the {num_layers} layers",
            remedy="mend the model's config.json",
        )
    return values


def _sequence(config: object, name: str) -> Sequence[object] | None:
    value = getattr(config, name, None)
    return cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else None
