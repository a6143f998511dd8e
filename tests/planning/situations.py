"""Small models on slow machines, and random situations to plan for."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from sppo_hf.planning.activation_modes import KEEP, ActivationMode, Saved, all_modes
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions, LayerModes, Order
from sppo_hf.planning.hardware import Curve
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.policies import uniform_modes
from sppo_hf.planning.tiers import TIERS
from tests.planning.profiles import changed
from tests.planning.shapes import llama_config, shape_of

MIB = 2**20


def small_shape(layers: int = 4, *, window: int | None = None, kv_heads: int = 2) -> ModelShape:
    """Hidden 256, 4 heads; with a window, every other layer is local, as in Gemma."""
    kinds = [
        "sliding_attention" if window and layer % 2 == 0 else "full_attention"
        for layer in range(layers)
    ]
    config = llama_config(
        hidden_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        intermediate_size=1024,
        vocab_size=500,
        layer_types=kinds,
        sliding_window=window,
    )
    return shape_of(config, dtype_bytes=2, trainable_parameters=1000)


def on_host(shape: ModelShape, *, weights: bool) -> ModelShape:
    """All of a model is trained, with its optimizer and perhaps its layers' weights on the host."""
    trained = replace(
        shape, trainable_parameters=shape.total_parameters, gradient_bytes=shape.weight_bytes
    )
    return trained.with_host_residents(weights=weights, optimizer=True)


def slow_cost(shape: ModelShape, **changes: Any) -> ModelCost:
    """A machine of 1 TFLOP/s whose copies take about as long as its compute."""
    curve = {"bfloat16": Curve(((256, 1e12),))}
    figures: dict[str, Any] = {
        "matmul_flops": curve,
        "attention_forward_flops": curve,
        "attention_backward_flops": curve,
        "memory_bytes_per_second": 1e11,
        "launch_seconds": 1e-6,
        "d2h_bytes_per_second": 5e8,
        "h2d_bytes_per_second": 5e8,
        "both_d2h_bytes_per_second": 4e8,
        "both_h2d_bytes_per_second": 4e8,
        "disk_write_bytes_per_second": 1e8,
        "disk_read_bytes_per_second": 2e8,
    }
    return ModelCost(shape=shape, profile=changed(**{**figures, **changes}), dtype_name="bfloat16")


def saved_bytes(cost: ModelCost, layer: int, tokens: int, saved: Saved = "whole") -> int:
    """What a layer of a model without states saves over some tokens of one row."""
    return tokens * cost.shape.activation_bytes_per_token(layer, saved)


def kv_bytes(cost: ModelCost, layer: int, tokens: int) -> int:
    """K/V of some tokens of one row."""
    return tokens * cost.shape.kv_bytes_per_token(layer)


def dkv_bytes(cost: ModelCost, layer: int, tokens: int) -> int:
    """Sums of dK/dV of some tokens of one row."""
    return tokens * cost.shape.dkv_bytes_per_token(layer)


def decided(
    bounds: Bounds, modes: LayerModes | ActivationMode = KEEP, *, layers: int = 4, **changes: Any
) -> Decisions:
    """Training decisions; one mode for all frames or one for each."""
    if isinstance(modes, ActivationMode):
        modes = uniform_modes(len(bounds), layers, modes)
    settings: dict[str, Any] = {"tile_tokens": 64, "staging_bytes": MIB, **changes}
    return Decisions(batch_rows=1, bounds=bounds, layer_modes=modes, training=True, **settings)


def falling_bounds(num_chunks: int, tokens: int = 512) -> Bounds:
    """Chunks whose lengths fall from about three times the mean's half, as balanced ones do."""
    ends = [round(num_chunks * tokens * (at / num_chunks) ** 0.75) for at in range(num_chunks + 1)]
    return tuple(pairwise(ends))


@st.composite
def costs(draw: st.DrawFn, *, layers: st.SearchStrategy[int] | None = None) -> ModelCost:
    """Dense, grouped or windowed models on machines with random copy speeds."""
    shape = small_shape(
        draw(st.integers(1, 5) if layers is None else layers),
        window=draw(st.sampled_from([None, None, 300])),
        kv_heads=draw(st.sampled_from([1, 4])),
    )
    d2h, h2d = (draw(st.sampled_from([1e7, 1e8, 1e9, 1e10])) for _ in range(2))
    return slow_cost(
        shape,
        d2h_bytes_per_second=d2h,
        h2d_bytes_per_second=h2d,
        both_d2h_bytes_per_second=0.8 * d2h,
        both_h2d_bytes_per_second=0.8 * h2d,
        disk_write_bytes_per_second=draw(st.sampled_from([1e7, 1e9])),
    )


@st.composite
def bounds_of(draw: st.DrawFn, most: int = 6) -> Bounds:
    """One chunk to `most`, of any lengths."""
    lengths = draw(st.lists(st.integers(16, 900), min_size=1, max_size=most))
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return tuple(pairwise(ends))


@st.composite
def any_modes(draw: st.DrawFn, chunks: int, layers: int) -> LayerModes:
    """Each frame its own mode, all tiers included."""
    row = st.tuples(*[st.sampled_from(all_modes())] * layers)
    return draw(st.tuples(*[row] * chunks))


@st.composite
def runs(
    draw: st.DrawFn, orders: tuple[Order, ...] = ("by_chunk", "by_layer")
) -> tuple[ModelCost, Decisions]:
    """Anything the engine may be told to do, with any look-ahead and any place for K/V.

    And with weights and optimizer on the device or the host.
    """
    cost = draw(costs())
    bounds = draw(bounds_of())
    layers = cost.shape.num_layers
    base = decided(bounds, draw(any_modes(len(bounds), layers)), layers=layers)
    largest = max(
        (
            saved_bytes(cost, layer, end - start, base.mode(layer, chunk).saved)
            for chunk, (start, end) in enumerate(bounds)
            for layer in range(layers)
        ),
    )
    ahead: Callable[[], int | None] = lambda: draw(  # noqa: E731
        st.sampled_from([None, largest, 2 * largest, 5 * largest])
    )
    base = replace(
        base,
        max_pending_d2h_bytes=ahead(),
        max_prefetch_bytes=ahead(),
        staging_bytes=draw(st.sampled_from([largest, 3 * largest])),
        order=draw(st.sampled_from(orders)),
    )
    places = draw(
        st.sampled_from(["device", "optimizer", "weights" if base.by_layer else "device"])
    )
    if places != "device":
        cost = replace(cost, shape=on_host(cost.shape, weights=places == "weights"))
    if base.by_layer:
        kv_modes = draw(st.tuples(*[st.sampled_from((*TIERS, "recompute"))] * layers))
        return cost, replace(base, kv_modes=kv_modes)
    kv_tier = draw(st.sampled_from(["device", "device", "host", "disk"]))
    return cost, replace(
        base,
        kv_tier=kv_tier,
        kv_block_tokens=0 if kv_tier == "device" else base.total_tokens,
    )
