"""FSDP2's share of bytes and seconds, counted by hand.

How often weights are gathered and gradients reduced is counted on two ranks in
tests/integrations/test_distributed.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from sppo_hf.planning.activation_modes import mode_of
from sppo_hf.planning.chunk_bounds import even_bounds
from sppo_hf.planning.cluster import (
    ClusterRequest,
    layouts,
    program_of_one_stage,
    simulate_layout,
    solve_cluster,
)
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Batch, Order
from sppo_hf.planning.layouts import Layout
from sppo_hf.planning.lowering import estimate, lower
from sppo_hf.planning.memory import Budgets, Cause
from sppo_hf.planning.model_profile import LoraShape
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.policies import uniform_modes
from tests.planning.profiles import PROFILE
from tests.planning.shapes import llama_config, shape_of

pytestmark = pytest.mark.pure

LAYERS, CHUNKS, SHARDS, TOKENS = 4, 8, 4, 16_384
CONFIG = llama_config(
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=LAYERS,
    vocab_size=32_000,
    num_attention_heads=8,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)
ALL = shape_of(CONFIG, dtype_bytes=2)
LORA = shape_of(CONFIG, dtype_bytes=2, lora=LoraShape(rank=8, dtype_bytes=4))
TABLE = 32_000 * 1024
"""Elements of the embedding, and of the head."""
# Attention's four matrices, three of the MLP, two norms.
LAYER = 4 * 1024**2 + 3 * 1024 * 3584 + 2 * 1024
ADAPTERS = 8 * (4 * 2 * 1024 + 3 * (1024 + 3584))
"""Of a layer, of rank 8: at each of seven products one factor by its input, one by its output."""
SLOW, FAST = 1e6, 1e18
"""Bytes per second with which nothing else counts, and with which they do not."""


def cost_of(shape: ModelShape, rate: float = FAST) -> ModelCost:
    cost = ModelCost(shape=shape, profile=PROFILE, dtype_name="bfloat16")
    return cost.with_shards(SHARDS, rate)


def moved_seconds(elements: int) -> float:
    """Of n devices each receives (n - 1) / n of all elements, in bf16."""
    return (SHARDS - 1) / SHARDS * 2 * elements / SLOW


def question(shape: ModelShape, rate: float = FAST, rows: int = SHARDS) -> ClusterRequest:
    return ClusterRequest(
        cost=ModelCost(shape=shape, profile=PROFILE, dtype_name="bfloat16"),
        total_tokens=TOKENS,
        rows=rows,
        gpus=SHARDS,
        budgets=Budgets(device=None, host=None, disk=0),
        link_bytes_per_second=rate,
    )


def test_bytes_where_all_weights_train() -> None:
    """Weights and gradients in float32, and two moments: sixteen bytes each, shared by all."""
    shape, total = cost_of(ALL).shape, LAYERS * LAYER + 2 * TABLE + 1024
    assert total == ALL.total_parameters
    # Three layers and the head in bf16, and the gradient of the larger of both twice.
    passing = 2 * (3 * LAYER + TABLE) + 2 * 2 * max(LAYER, TABLE)
    assert shape.weight_bytes == 4 * total // SHARDS + passing
    assert (shape.gradient_bytes, shape.states_bytes) == (total, 2 * total)
    assert shape.unsharded_gradient_bytes == 2 * total


def test_bytes_of_adapters() -> None:
    """Frozen weights stay in bf16, and are gathered with the adapters."""
    shape = cost_of(LORA).shape
    frozen, trained = LAYERS * LAYER + 2 * TABLE + 1024, LAYERS * ADAPTERS
    passing = 2 * (3 * (LAYER + ADAPTERS) + TABLE) + 2 * 2 * ADAPTERS
    assert shape.weight_bytes == -(-(2 * frozen + 4 * trained) // SHARDS) + passing
    assert shape.gradient_bytes == trained
    assert shape.unsharded_gradient_bytes == 2 * trained


def test_a_float32_model_keeps_its_dtype() -> None:
    shape = shape_of(CONFIG, dtype_bytes=4)
    wide = ModelCost(shape=shape, profile=PROFILE, dtype_name="float32")
    shape = wide.with_shards(SHARDS, FAST).shape
    assert shape.unsharded_gradient_bytes == 4 * shape.total_parameters
    assert wide.with_shards(1, FAST).shape is wide.shape


@pytest.mark.parametrize(
    ("order", "accumulates", "elements"),
    [
        ("by_layer", False, 4 / SHARDS),
        ("by_chunk", False, 2),
        ("by_layer", True, 2 + 4 / SHARDS / LAYERS),
    ],
)
def test_gradients_are_whole_until_they_are_reduced(
    order: Order, accumulates: bool, elements: float
) -> None:
    """By chunk autograd holds all of them, in the dtype of compute, until the first chunk's."""
    shape = cost_of(ALL).shape
    batch = Batch(batch_rows=1, tile_tokens=512, training=True, accumulates=accumulates)
    decisions = batch.decisions(even_bounds(TOKENS, CHUNKS), LAYERS, order)
    held = estimate(shape, decisions)
    assert held.most_bytes(Cause.GRADIENTS) == elements * shape.total_parameters


@pytest.mark.parametrize(
    ("sharded", "rows", "elements"),
    [(False, 1, 2), (False, 2, 2 + 2), (True, 1, 2), (True, 2, 2 + 4 / SHARDS)],
)
def test_gradients_of_several_rows_are_accumulated(
    sharded: bool, rows: int, elements: float
) -> None:
    layout = Layout("seq1f1b", 1, 1, 1, CHUNKS, "flops", "whole", "none", sp=SHARDS)
    asked = question(ALL, rows=rows)
    program = program_of_one_stage(asked, layout._replace(sharded=sharded), rows)
    assert program.estimate.most_bytes(Cause.GRADIENTS) == elements * ALL.total_parameters


@pytest.mark.parametrize("shape", [ALL, LORA], ids=["all weights", "LoRA"])
def test_seconds_by_chunk(shape: ModelShape) -> None:
    """All weights come for every chunk in both directions, gradients leave once."""
    layout = Layout("seq1f1b", 1, SHARDS, 1, CHUNKS, "even", "whole", "none", sharded=True)
    found = simulate_layout(question(shape, SLOW), layout).step_seconds
    trains_all = shape is ALL
    layers = LAYERS * (LAYER + (0 if trains_all else ADAPTERS))
    # The head stays from the last forward to the first backward.
    elements = 2 * CHUNKS * layers + CHUNKS * TABLE
    elements += (1 + trains_all) * CHUNKS * TABLE
    elements += LAYERS * LAYER + 2 * TABLE if trains_all else LAYERS * ADAPTERS
    norms = LAYERS * 2 * 1024
    assert found == pytest.approx(moved_seconds(elements), rel=norms / layers)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("shape", [ALL, LORA], ids=["all weights", "LoRA"])
def test_seconds_by_layer(shape: ModelShape, rows: int) -> None:
    """Weights come once in both directions for every row, gradients leave once in a step."""
    layout = Layout(
        *("seq1f1b", 1, SHARDS, 1, CHUNKS, "flops", "whole", "none"),
        sharded=True,
        order="by_layer",
    )
    found = simulate_layout(question(shape, SLOW, rows * SHARDS), layout).step_seconds
    trains_all = shape is ALL
    # The embedding at the begin, and again in backward if it trains; the head once.
    coming = 2 * LAYERS * (LAYER + (0 if trains_all else ADAPTERS)) + (2 + trains_all) * TABLE
    leaving = LAYERS * LAYER + 2 * TABLE if trains_all else LAYERS * ADAPTERS
    assert found == pytest.approx(moved_seconds(rows * coming + leaving), rel=1e-3)


def test_fast_links_cost_nothing_but_the_second_forward_of_the_head() -> None:
    for order in ("by_layer", "by_chunk"):
        alone = Layout("seq1f1b", 1, SHARDS, 1, CHUNKS, "flops", "whole", "none", order=order)
        shared = alone._replace(sp=SHARDS, replicas=1) if order == "by_chunk" else alone
        plain, sharded = (
            simulate_layout(question(LORA), shared._replace(sharded=on)) for on in (False, True)
        )
        heads = sharded.step_seconds - plain.step_seconds
        assert 0 < heads < 0.1 * plain.step_seconds
        assert sharded.host_bytes == plain.host_bytes


@pytest.mark.parametrize("rows", [1, 3])
def test_a_replica_by_layer_does_for_each_row_what_one_device_does(rows: int) -> None:
    layout = Layout(
        *("seq1f1b", 1, SHARDS, 1, CHUNKS, "flops", "matmuls", "full", "host"), order="by_layer"
    )
    asked = question(LORA, rows=rows * SHARDS)
    plan, cost = simulate_layout(asked, layout), asked.cost
    batch = Batch(
        batch_rows=1,
        tile_tokens=cost.loss_tile_tokens,
        training=True,
        accumulates=rows > 1,
    )
    decisions = replace(
        batch.decisions(plan.bounds, LAYERS, "by_layer"),
        layer_modes=uniform_modes(CHUNKS, LAYERS, mode_of("matmuls", "host")),
        # The last layer's backward follows at once.
        kv_modes=(*("host",) * (LAYERS - 1), "device"),
    )
    program = lower(decisions, cost)
    assert plan.step_seconds == pytest.approx(rows * program.simulate().end_seconds)
    assert plan.peak_bytes == (program.estimate.peak_bytes("device"),)
    assert plan.host_bytes == SHARDS * program.estimate.peak_bytes("host")
    assert plan.offloads


def test_the_search_offers_what_the_runtime_does() -> None:
    asked = replace(question(ALL), gpus=4, rows=4)
    sharded = [layout for layout in layouts(asked) if layout.sharded]
    assert {(x.stages, x.replicas, x.sp) for x in sharded} == {(1, 4, 1), (1, 2, 2), (1, 1, 4)}
    assert {x.order for x in sharded} == {"by_layer"}
    others = {(x.sp, x.order) for x in layouts(asked) if x.stages == 1 and not x.sharded}
    assert others == set(product((1, 2, 4), ("by_layer", "by_chunk")))
    assert not any(x.sharded for x in layouts(replace(asked, gpus=1)))


def test_a_model_that_cannot_go_layer_by_layer_goes_by_chunk() -> None:
    """As Zaya, whose layers pass on more than hidden states."""
    layers = tuple(replace(layer, returns_more=index > 0) for index, layer in enumerate(ALL.layers))
    shape = replace(ALL, layers=layers)
    assert ALL.by_layer_refusal is None
    assert shape.by_layer_refusal == "layer 1 returns more than hidden states"
    asked = replace(question(shape, rate=1e9), rows=2, gpus=2)
    found = list(layouts(asked))
    assert {layout.order for layout in found} == {"by_chunk"}
    sharded = [layout for layout in found if layout.sharded and layout.saved == "inputs"]
    assert sharded
    assert len(set(found)) == len(found)
    for layout in sharded:
        assert asked.min_step_seconds(layout) <= simulate_layout(asked, layout).step_seconds
    assert {x.order for x in layouts(question(ALL))} == {"by_layer", "by_chunk"}


def test_fsdp2_may_be_left_out() -> None:
    asked = replace(question(ALL), fsdp2_refusal="it was not tried")
    assert not any(layout.sharded for layout in layouts(asked))
    answer = solve_cluster(asked, keep=1)
    assert answer.best
    assert answer.sharded is None


def test_layers_that_fsdp2_gathers_may_save_less() -> None:
    narrow = tuple(replace(x, whole_bytes=3 * x.whole_bytes // 4) for x in LORA.layers)
    gathered = replace(LORA, layers=narrow, lora=LoraShape(rank=8, dtype_bytes=2))
    layout = Layout(
        *("seq1f1b", 1, SHARDS, 1, CHUNKS, "flops", "whole", "none"), sharded=True, order="by_layer"
    )
    asked = question(LORA)
    other = replace(asked, sharded_cost=replace(asked.cost, shape=gathered))
    wide, less = (simulate_layout(one, layout).peak_bytes[0] for one in (asked, other))
    assert less < wide
    alone = layout._replace(sharded=False)
    assert simulate_layout(other, alone) == simulate_layout(asked, alone)
    standing = [one.bounds_of_layout.cost(layout).shape.standing_bytes for one in (asked, other)]
    assert standing[0] == standing[1], "masters of adapters are in float32 in both"


def test_fsdp2_is_compared_where_it_is_not_among_the_best() -> None:
    """As over slow links."""
    asked = question(ALL, rate=1e9)
    answer = solve_cluster(asked, keep=1)
    assert not answer.best[0].layout.sharded
    assert answer.sharded is not None
    fastest = min(
        simulate_layout(asked, layout).step_seconds for layout in layouts(asked) if layout.sharded
    )
    assert answer.sharded.step_seconds == fastest > answer.best[0].step_seconds
    fast = solve_cluster(question(ALL), keep=100)
    assert any(plan.layout.sharded for plan in fast.best)
    assert fast.sharded is None


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ({"replicas": 8, "sharded": True, "order": "by_layer"}, "FSDP2, 8 GPUs"),
        ({"replicas": 8, "order": "by_layer"}, "DDP, 8 GPUs"),
        ({"replicas": 8}, "DDP by chunk, 8 GPUs"),
        ({"sp": 8, "sharded": True, "order": "by_layer"}, "FSDP2 with sequence parallelism of 8"),
        ({"replicas": 2, "sp": 4}, "DDP by chunk with sequence parallelism of 4, 8 GPUs"),
        ({"stages": 4, "replicas": 2}, "seq1f1b, 2 x 4 stages, 8 GPUs"),
        ({"stages": 4, "sp": 2}, "seq1f1b, 4 stages with sequence parallelism of 2, 8 GPUs"),
    ],
)
def test_names(layout: dict[str, int], name: str) -> None:
    one = Layout("seq1f1b", 1, 1, 1, 4, "flops", "whole", "none")
    assert one._replace(**layout).name == name
