"""Seconds and bytes of units, by hand where every figure is round."""

from dataclasses import replace

import pytest

from sppo_hf.planning.cost import Correction, ModelCost
from sppo_hf.planning.hardware import Curve
from sppo_hf.planning.model_profile import LoraShape
from tests.planning.profiles import PROFILE, changed
from tests.planning.shapes import llama_config, shape_of
from tests.planning.situations import slow_cost, small_shape

NO_MEMORY_TIME = {"memory_bytes_per_second": 1e30}


def test_forward_is_linear_plus_visible_pairs() -> None:
    shape = small_shape()
    cost = slow_cost(shape, **NO_MEMORY_TIME)
    pairs = sum(range(301, 501))
    flops = 200 * shape.linear_flops_per_token(0) + pairs * shape.layers[0].attention_flops_per_key
    assert cost.forward_seconds(0, 300, 500) == pytest.approx(flops / 1e12)


def test_windows_see_no_more_than_their_keys() -> None:
    shape = small_shape(window=100)
    cost = slow_cost(shape, **NO_MEMORY_TIME)
    flops = 200 * (shape.linear_flops_per_token(0) + 100 * shape.layers[0].attention_flops_per_key)
    assert cost.forward_seconds(0, 300, 500) == pytest.approx(flops / 1e12)
    assert cost.forward_seconds(1, 300, 500) > cost.forward_seconds(0, 300, 500)


def test_backward_of_frozen_weights_has_no_weight_gradients() -> None:
    frozen = small_shape()
    trained = replace(frozen, trainable_parameters=frozen.total_parameters)
    short, long = (
        slow_cost(shape, **NO_MEMORY_TIME).backward_seconds(0, 0, 100)
        for shape in (frozen, trained)
    )
    assert 1.5 < long / short < 2.0


def test_attention_backward_is_two_and_a_half_forwards() -> None:
    cost = slow_cost(small_shape(), **NO_MEMORY_TIME)
    shape = cost.shape
    near, far = ((0, 100), (100_000, 100_100))
    pairs = 100 * 100_000
    forward = cost.forward_seconds(0, *far) - cost.forward_seconds(0, *near)
    backward = cost.backward_seconds(0, *far) - cost.backward_seconds(0, *near)
    assert forward == pytest.approx(pairs * shape.layers[0].attention_flops_per_key / 1e12)
    assert backward == pytest.approx(2.5 * forward)


def test_recomputation_runs_attention_only_where_its_output_is_not_saved() -> None:
    cost = slow_cost(small_shape())
    assert cost.recompute_seconds(0, 100, "whole") == 0.0
    products, inputs = (cost.recompute_seconds(0, 100, s) for s in ("matmuls", "inputs"))
    assert 0.0 < products < inputs < cost.forward_seconds(0, 0, 100)
    pairs = sum(range(301, 401))
    again = cost.recompute_seconds(0, 100, "hidden", start=300) - inputs
    flops = pairs * cost.shape.layers[0].attention_flops_per_key
    assert again == pytest.approx(flops / cost.profile.attention_forward_flops["bfloat16"].at(100))


def test_a_unit_takes_as_long_as_its_launches() -> None:
    cost = slow_cost(small_shape(), launch_seconds=1.0)
    assert cost.forward_seconds(0, 0, 1) == 1.0
    assert cost.backward_seconds(0, 0, 1) == 2.0


def test_a_mode_that_keeps_python_busy_costs_that_of_short_chunks_alone() -> None:
    calm, busy = (slow_cost(small_shape(), launch_seconds=s) for s in (0.0, 1.0))
    # To note each product keeps Python busy for longer than one more run of the layer.
    inputs, matmuls = (busy.recompute_seconds(0, 1, saved) for saved in ("inputs", "matmuls"))
    assert busy.forward_seconds(0, 0, 1) <= inputs < matmuls
    long = 10**7
    for saved in ("inputs", "matmuls"):
        assert calm.forward_seconds(0, 0, long) > 10
        assert busy.recompute_seconds(0, long, saved) == pytest.approx(
            calm.recompute_seconds(0, long, saved)
        )


def test_rows_multiply_work() -> None:
    one = slow_cost(small_shape())
    two = replace(one, batch_rows=2)
    assert two.forward_seconds(0, 0, 500) == pytest.approx(2 * one.forward_seconds(0, 0, 500))
    assert two.head_seconds(500) == pytest.approx(2 * one.head_seconds(500))


def test_a_changed_cost_forgets_what_it_knew() -> None:
    cost = slow_cost(small_shape())
    before = cost.forward_seconds(0, 0, 500)
    twice = replace(cost, correction=Correction(forward=2.0, backward=3.0, d2h=4.0, h2d=5.0))
    assert twice.forward_seconds(0, 0, 500) == pytest.approx(2 * before)
    assert twice.backward_seconds(0, 0, 500) == pytest.approx(3 * cost.backward_seconds(0, 0, 500))
    assert twice.recompute_seconds(0, 9, "inputs") == pytest.approx(
        3 * cost.recompute_seconds(0, 9, "inputs")
    )
    assert twice.d2h_seconds(10) == pytest.approx(4 * cost.d2h_seconds(10))
    assert twice.h2d_seconds(10) == pytest.approx(5 * cost.h2d_seconds(10))


def test_copies_both_ways_are_slower() -> None:
    cost = slow_cost(small_shape())
    assert cost.d2h_seconds(5e8) == pytest.approx(1.0)
    assert cost.d2h_seconds(4e8, both=True) == pytest.approx(1.0)
    assert cost.h2d_seconds(4e8, both=True) == pytest.approx(1.0)


def test_a_disk_that_nobody_measured_is_slow() -> None:
    unknown = slow_cost(
        small_shape(), disk_write_bytes_per_second=None, disk_read_bytes_per_second=None
    )
    assert unknown.store_seconds("disk", 1e9) == unknown.load_seconds("disk", 1e9) == 2.0
    assert slow_cost(small_shape()).load_seconds("disk", 2e8) == 1.0


def test_adapters_pass_what_they_adapt_through_memory() -> None:
    """Summing over a rank takes no time, passing inputs and outputs does."""
    tokens, rank = 8192, 16

    def seconds(lora: LoraShape, kind: str = "cuda") -> dict[str, float]:
        shape = shape_of(llama_config(), lora=LoraShape(rank=rank))
        cost = ModelCost(
            shape=replace(shape, lora=lora), profile=changed(kind=kind), dtype_name="bfloat16"
        )
        return {
            "forward": cost.forward_seconds(1, 0, tokens),
            "backward": cost.backward_seconds(1, 0, tokens),
            "again": cost.recompute_seconds(1, tokens, "inputs"),
        }

    narrow, wide = (seconds(LoraShape(rank=rank, dtype_bytes=size)) for size in (2, 4))
    cast = seconds(LoraShape(rank=rank, dtype_bytes=4, autocast=True))
    assert cast == narrow
    on_cpu = [seconds(LoraShape(rank=rank, dtype_bytes=size), "cpu") for size in (2, 4)]
    assert on_cpu[0] == on_cpu[1]
    # Of each linear: its input and its output, in two bytes; as an H200's trace showed.
    passed = 2 * tokens * (38_912 + 43_008) / PROFILE.memory_bytes_per_second
    for part, times in (("forward", 2.2), ("backward", 3.3), ("again", 2.2)):
        assert narrow[part] - on_cpu[0][part] == pytest.approx(times * passed)
        assert wide[part] - narrow[part] == pytest.approx(times * passed)


def test_short_chunks_are_slower_per_token() -> None:
    curve = {"bfloat16": Curve(((128, 1e11), (2048, 1e12)))}
    cost = ModelCost(
        shape=small_shape(),
        profile=changed(matmul_flops=curve, **NO_MEMORY_TIME, launch_seconds=0.0),
        dtype_name="bfloat16",
    )
    assert cost.forward_seconds(0, 0, 128) / 128 > 5 * cost.forward_seconds(0, 0, 2048) / 2048


def test_evaluation_has_no_head_gradients() -> None:
    cost = slow_cost(small_shape(), **NO_MEMORY_TIME)
    assert cost.head_seconds(100) == pytest.approx(2 * cost.head_seconds(100, training=False))


def test_the_gradient_of_a_head_is_summed_once_a_tile() -> None:
    """Each tile of 2,048 tokens reads and writes a sum in float32, on a device of 80 GB."""
    shape = shape_of(llama_config(), dtype_bytes=2)
    profile = replace(PROFILE, kind="cuda", device_bytes=80 * 2**30)
    cost = ModelCost(shape=shape, profile=profile, dtype_name="bfloat16")
    sums = 2 * 4 * shape.vocab_size * shape.hidden_size / profile.memory_bytes_per_second
    one_more = cost.head_seconds(4096 + 1) - cost.head_seconds(4096)
    assert one_more == pytest.approx(sums, rel=0.05)
    frozen = shape_of(llama_config(), dtype_bytes=2, lora=LoraShape(rank=8))
    cost = replace(cost, shape=frozen)
    assert cost.head_seconds(4096 + 1) - cost.head_seconds(4096) < 0.05 * sums
