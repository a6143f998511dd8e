"""Shapes of Llama models worked out by hand, and configurations of published models.

The planner's tests need neither torch nor a traced model: a Llama layer is simple enough to be
written down. `tests/engine/test_trace_profile.py` holds the tracer to the same numbers.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sppo_hf.planning.config_file import load_config
from sppo_hf.planning.model_profile import LayerProfile, LoraShape, ModelProfile, Training
from sppo_hf.planning.model_shape import ModelShape


def shape_of(
    config: Any,
    *,
    dtype_bytes: int = 2,
    lora: LoraShape | None = None,
    **counts: int,
) -> ModelShape:
    """The shape of a Llama model; `counts` as `ModelShape.from_profile` takes them."""
    training = Training(dtype_bytes=dtype_bytes, parameter_bytes=dtype_bytes, lora=lora)
    return ModelShape.from_profile(by_hand(config, training), **counts)


def by_hand(config: Any, training: Training) -> ModelProfile:
    """The profile of a Llama model (a `Tracer`); of LoRA on all linear layers in float32 only.

    Frames are those without autocast.
    """
    windows: list[int | None] = [getattr(config, "sliding_window", None)] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        windows = [
            window if kind == "sliding_attention" else None
            for window, kind in zip(windows, kinds, strict=True)
        ]
    layers = [_layer(config, training, window) for window in windows]
    if training.lora is not None:
        layers[0] = _unreached(config, training, layers[0])
    table = config.vocab_size * config.hidden_size
    return ModelProfile(
        training=training,
        layers=tuple(layers),
        vocab_size=config.vocab_size,
        tied=config.tie_word_embeddings,
        max_positions_tokens=config.max_position_embeddings,
        outer_weights=(1 if config.tie_word_embeddings else 2) * table + config.hidden_size,
    )


def _layer(config: Any, training: Training, window: int | None) -> LayerProfile:
    hidden, width, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    head = hidden // heads
    kv = config.num_key_value_heads * head
    size, wide = training.dtype_bytes, max(4, training.dtype_bytes)
    inputs = [hidden, hidden, hidden, hidden, hidden, hidden, width]
    outputs = [hidden, kv, kv, hidden, width, width, hidden]
    weights = sum(a * b for a, b in zip(inputs, outputs, strict=True))
    skeleton = 2 * hidden * size + heads * wide
    # Keys and values serve attention alone, the last product the next layer.
    products = skeleton + (2 * hidden + 2 * width) * size
    # Two norms, each its input in float32 and the root; attention's queries, output and sums.
    both = 2 * (hidden + 1) * wide + 2 * hidden * size + heads * wide
    whole = both + 4 * hidden * size + 4 * width * size
    # Of attention the results are in the skeleton, and where nothing is cast the norm's input is.
    given = hidden * size + heads * wide + hidden * size * (size == wide)
    # Before attention: what the first norm saves, what it gives to projections, and queries.
    early = (hidden + 1) * wide + 3 * hidden * size - hidden * size * (size == wide)
    common = LayerProfile(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads,
        qk_head_size=head,
        v_head_size=head,
        window=window,
        mlp_width=width,
        forward_flops=2 * weights,
        input_gradient_flops=2 * weights,
        weight_gradient_flops=2 * weights,
        # Nothing needs keys and values, nor the last product.
        inputs_recompute_flops=2 * (weights - hidden * width - 2 * hidden * kv),
        matmuls_recompute_flops=0,
        inputs_bytes=skeleton,
        matmuls_bytes=products,
        # What the norms scale, and what they give to projections; gate, activated gate, up and
        # their product.
        whole_bytes=whole,
        inputs_rerun_bytes=whole - given,
        inputs_rerun_early_bytes=early,
        matmuls_rerun_bytes=whole - given - 2 * width * size,
        matmuls_rerun_early_bytes=early,
        largest_bytes=max(hidden * wide, width * size),
        total_weights=weights + 2 * hidden,
        # In tiles: all but what modules are given. The MLP saves most.
        tiled_bytes=2 * (hidden + 1) * wide + 4 * width * size,
        tile_bytes=4 * width * size,
    )
    if training.lora is None:
        return common
    rank = training.lora.rank
    adapters = rank * (sum(inputs) + sum(outputs))
    whole = both + 3 * width * size + (sum(inputs) + 7 * rank) * 4
    early += 3 * (hidden + rank) * 4 - 2 * hidden * size
    return replace(
        common,
        forward_flops=2 * (weights + adapters),
        input_gradient_flops=2 * (weights + adapters),
        weight_gradient_flops=2 * adapters,
        # All but the last adapter's second factor, which saves what it multiplies first.
        inputs_recompute_flops=common.inputs_recompute_flops + 2 * (adapters - rank * hidden),
        matmuls_recompute_flops=2 * rank * (sum(outputs) - hidden),
        matmuls_bytes=products + 7 * rank * 4,
        tiled_bytes=2 * (hidden + 1) * wide
        + 3 * width * size
        + (sum(inputs) + 7 * rank) * 4
        - 4 * hidden * size,
        tile_bytes=3 * width * size + (2 * hidden + width + 3 * rank) * 4,
        # Of attention's adapters the first factors; keys and values, which nothing needs.
        tiles_recompute_flops=2 * (2 * hidden * kv + 4 * rank * hidden),
        # Each adapter: its input in float32, and what the first factor makes of it.
        whole_bytes=whole,
        inputs_rerun_bytes=whole - given,
        inputs_rerun_early_bytes=early,
        matmuls_rerun_bytes=whole - given - 7 * rank * 4,
        matmuls_rerun_early_bytes=early - 3 * rank * 4,
        largest_bytes=width * 4,
        adapter_weights=adapters,
        adapted_mlp_width=width * any(map(training.lora.adapts, ("gate_proj", "up_proj"))),
    )


def _unreached(config: Any, training: Training, layer: LayerProfile) -> LayerProfile:
    """The first layer under LoRA: its first norm saves nothing, its input gets no gradient."""
    assert training.lora is not None, "without LoRA all layers' inputs need a gradient"
    hidden = config.hidden_size
    kv = layer.num_kv_heads * layer.qk_head_size
    first = hidden * (hidden + 2 * kv) + 3 * training.lora.rank * hidden
    norm = (hidden + 1) * 4
    return replace(
        layer,
        inputs_rerun_bytes=layer.inputs_rerun_bytes - norm,
        inputs_rerun_early_bytes=layer.inputs_rerun_early_bytes - norm,
        matmuls_rerun_bytes=layer.matmuls_rerun_bytes - norm,
        matmuls_rerun_early_bytes=layer.matmuls_rerun_early_bytes - norm,
        input_gradient_flops=layer.input_gradient_flops - 2 * first,
        whole_bytes=layer.whole_bytes - norm,
        tiled_bytes=layer.tiled_bytes - norm + hidden * training.dtype_bytes,
    )


def gpt_shape(hidden_size: int, layers: int, heads: int) -> ModelShape:
    """A GPT as the paper sizes them, as far as FLOPs go: 24 h^2 for a token and layer."""
    sizes = {"hidden_size": hidden_size, "num_hidden_layers": layers, "vocab_size": 50_257}
    shape = shape_of(llama_config(**sizes, num_attention_heads=heads, num_key_value_heads=heads))
    layer = replace(shape.layers[0], forward_flops=24 * hidden_size**2)
    return replace(shape, layers=(layer,) * layers)


def known_config(name: str) -> object:
    """A published model's `config.json`, shortened to what its shape depends on."""
    return load_config(Path(__file__).with_name("configs") / f"{name}.json")


def llama_config(**changes: Any) -> SimpleNamespace:
    """Llama-3.1-8B's sizes, changed where asked."""
    sizes: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    }
    return SimpleNamespace(**{**sizes, **changes})


def tiny_shape(**changes: Any) -> ModelShape:
    """Two layers, easy numbers: hidden 8, 2 heads of 4, 1 K/V head, MLP 16, vocabulary 10."""
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "vocab_size": 10,
    }
    return shape_of(llama_config(**{**sizes, **changes}), dtype_bytes=4)
