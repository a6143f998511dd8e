"""Reads layer shapes off a Transformers config, by attribute names alone.

This is the one place that knows how families spell their sizes (`n_embd`, `moe_intermediate_size`,
`first_k_dense_replace` ...). It imports neither torch nor transformers: any object with the right
attributes will do. What a family leaves out gets the default its own modelling code uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from sppo_hf.errors import UnsupportedModelError
from sppo_hf.planning.families import traits_of
from sppo_hf.planning.layer import LayerShape

# Families with one K/V head for all queries that say so with a flag of their own.
_MULTI_QUERY_FAMILIES = frozenset({"falcon", "gpt_bigcode"})


def text_config(config: object) -> object:
    """Returns the decoder's own config: multimodal configs keep it one level down."""
    getter = getattr(config, "get_text_config", None)
    return getter() if callable(getter) else getattr(config, "text_config", None) or config


def find_int(config: object, *names: str) -> int | None:
    """Returns the first of the named attributes that holds an int, or None."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


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
    """
    num_layers = need_int(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    hidden_size = need_int(config, "hidden_size", "n_embd", "d_model")
    per_layer = getattr(config, "per_layer_config", None)
    # Equal layers share one object: a plan walks them often.
    shapes: dict[LayerShape, LayerShape] = {}
    layers: list[LayerShape] = []
    for index in range(num_layers):
        # Where layers differ in such sizes, Transformers refuses to read them off the whole config.
        own: object = config if per_layer is None else per_layer[index]
        attention = _read_attention(own, hidden_size)
        sparse = _is_sparse(config, index)
        mlp = _read_experts(own, hidden_size) if sparse else _read_mlp(own, hidden_size)
        layer = LayerShape(
            hidden_size=hidden_size,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            qk_head_size=attention.qk_head_size,
            v_head_size=attention.v_head_size,
            window=_window(config, index),
            attention_weights=attention.weights,
            latent_size=attention.latent_size,
            mlp_weights=mlp.active_weights,
            total_mlp_weights=mlp.total_weights,
            mlp_width=mlp.width,
            routed_experts=mlp.routed_experts,
            traits=traits_of(family(config)),
        )
        layers.append(shapes.setdefault(layer, layer))
    return tuple(layers)


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
        return max(limit, int(original * factor))
    return limit


@dataclass(frozen=True, slots=True)
class _Attention:
    num_heads: int
    num_kv_heads: int
    qk_head_size: int
    v_head_size: int
    weights: int
    latent_size: int = 0


def _read_attention(config: object, hidden_size: int) -> _Attention:
    heads = need_int(config, "num_attention_heads", "n_head", "num_heads", "n_heads")
    kv_rank = find_int(config, "kv_lora_rank")
    if kv_rank is not None:
        return _read_latent_attention(config, hidden_size, heads, kv_rank)
    kv_heads = find_int(config, "num_key_value_heads", "num_kv_heads") or heads
    if family(config) in _MULTI_QUERY_FAMILIES and getattr(config, "multi_query", False) is True:
        kv_heads = 1
    size = find_int(config, "head_dim") or hidden_size // heads
    weights = hidden_size * size * (2 * heads + 2 * kv_heads)
    return _Attention(heads, kv_heads, size, size, weights)


def _read_latent_attention(
    config: object, hidden_size: int, heads: int, kv_rank: int
) -> _Attention:
    """Multi-head latent attention, as it reaches the attention call.

    K/V are expanded to all heads before that call, and the KV store keeps what the call is given.
    The rotary part of a key is shared by the heads in the weights, repeated per head in the store.
    """
    nope = need_int(config, "qk_nope_head_dim")
    rope = need_int(config, "qk_rope_head_dim")
    v_size = need_int(config, "v_head_dim")
    q_rank = find_int(config, "q_lora_rank")
    q_out = heads * (nope + rope)
    q_weights = hidden_size * q_out if q_rank is None else q_rank * (hidden_size + q_out)
    kv_weights = hidden_size * (kv_rank + rope) + kv_rank * heads * (nope + v_size)
    weights = q_weights + kv_weights + heads * v_size * hidden_size
    return _Attention(
        heads, heads, nope + rope, v_size, weights, latent_size=(q_rank or 0) + kv_rank
    )


@dataclass(frozen=True, slots=True)
class _Mlp:
    active_weights: int
    total_weights: int
    width: int
    routed_experts: int = 0


def _read_mlp(config: object, hidden_size: int) -> _Mlp:
    width = find_int(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    width = 4 * hidden_size if width is None else width
    weights = (3 if traits_of(family(config)).gated else 2) * hidden_size * width
    return _Mlp(weights, weights, width)


def _num_experts(config: object) -> int:
    return (
        find_int(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        or 0
    )


def _read_experts(config: object, hidden_size: int) -> _Mlp:
    experts = _num_experts(config)
    active = find_int(config, "num_experts_per_tok", "moe_topk", "moe_k") or 1
    width = find_int(config, "moe_intermediate_size") or need_int(config, "intermediate_size")
    shared = find_int(config, "shared_expert_intermediate_size", "shared_intermediate_size")
    if shared is None:
        shared = width * (find_int(config, "n_shared_experts", "moe_num_shared_experts") or 0)
    router = hidden_size * experts
    return _Mlp(
        active_weights=3 * hidden_size * (active * width + shared) + router,
        total_weights=3 * hidden_size * (experts * width + shared) + router,
        width=active * width + shared,
        routed_experts=active,
    )


def _is_sparse(config: object, layer: int) -> bool:
    if _num_experts(config) <= 1 or getattr(config, "enable_moe_block", True) is False:
        return False
    if layer < (find_int(config, "first_k_dense_replace", "moe_layer_start_index") or 0):
        return False
    kinds = _sequence(config, "mlp_layer_types")
    if kinds is not None:
        return kinds[layer] == "sparse"
    if layer in (_sequence(config, "mlp_only_layers") or ()):
        return False
    return (layer + 1) % (find_int(config, "decoder_sparse_step") or 1) == 0


def _window(config: object, layer: int) -> int | None:
    window = find_int(config, "sliding_window")
    kinds = _sequence(config, "layer_types")
    if kinds is not None:
        if kinds[layer] == "chunked_attention":
            return find_int(config, "attention_chunk_size")
        return window if kinds[layer] == "sliding_attention" else None
    if getattr(config, "use_sliding_window", True) is False:
        return None
    return window


def _sequence(config: object, name: str) -> Sequence[object] | None:
    value = getattr(config, name, None)
    return cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else None
