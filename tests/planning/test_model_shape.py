"""What a shape adds to its layers; `tests/engine/test_trace_profile.py` has the layers."""

from dataclasses import replace

import pytest

from sppo_hf.planning.model_profile import LoraShape
from sppo_hf.planning.model_shape import HostResident, forward_flops, step_flops, visible_pairs
from tests.planning.shapes import llama_config, shape_of, tiny_shape


def test_backward_is_twice_the_forward_when_all_is_trained() -> None:
    shape = tiny_shape()
    assert shape.backward_linear_flops_per_token(1) == 2 * shape.linear_flops_per_token(1)
    assert shape.backward_linear_flops_per_token() == 2 * shape.linear_flops_per_token()


def test_lora_of_llama_8b() -> None:
    frozen = shape_of(llama_config())
    shape = shape_of(llama_config(), lora=LoraShape(rank=16))
    # q, o: 4096 + 4096; k, v: 4096 + 1024; gate, up, down: 4096 + 14336.
    adapters = 16 * (2 * 8192 + 2 * 5120 + 3 * 18_432)
    assert shape.trainable_parameters == 32 * adapters == 41_943_040
    assert shape.total_parameters == frozen.total_parameters + 32 * adapters
    assert shape.gradient_bytes == 32 * adapters * 4
    assert shape.weight_bytes == frozen.weight_bytes + 32 * adapters * 4
    head = frozen.head_flops_per_token
    layers = 31 * shape.backward_linear_flops_per_token(1)
    layers += shape.backward_linear_flops_per_token(0)
    # The head is frozen: only the gradient of its input.
    assert shape.backward_linear_flops_per_token() == layers + head
    assert shape.layer_kinds == (0, *[1] * 31)


def test_llama_8b() -> None:
    shape = shape_of(llama_config())
    assert shape.total_parameters == 8_030_261_248
    assert shape.weight_bytes == 2 * shape.total_parameters
    assert shape.kv_bytes_per_token(0) == 2 * 8 * 128 * 2
    assert shape.dkv_bytes_per_token(0) == 2 * shape.kv_bytes_per_token(0)
    assert sum(layer.attention_flops_per_key for layer in shape.layers) == 32 * 4 * 4096
    assert shape.linear_flops_per_token() == pytest.approx(2 * 7.5e9, rel=0.01)
    assert shape.layer_kinds == (0,) * 32


@pytest.mark.parametrize("lora", [None, LoraShape(rank=16)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_classifiers_head_replaces_the_language_models(
    lora: LoraShape | None, tied: bool
) -> None:
    shape = replace(shape_of(llama_config(), lora=lora), tied=tied)
    found = shape.with_classifier(3)
    more = 4096 * (3 - (0 if tied else 128_256))
    assert found.total_parameters - shape.total_parameters == more
    assert found.weight_bytes - shape.weight_bytes == 2 * more
    assert found.trainable_parameters - shape.trainable_parameters == (0 if lora else more)
    assert found.gradient_bytes - shape.gradient_bytes == (0 if lora else 2 * more)
    assert (found.num_logits, found.head_flops_per_token) == (3, 2 * 4096 * 3)


def test_trainable_share_and_measured_bytes() -> None:
    shape = shape_of(
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
    shape = shape_of(llama_config(), dtype_bytes=8)
    assert shape.dkv_bytes_per_token(0) == shape.kv_bytes_per_token(0)


@pytest.mark.parametrize("lora", [None, 16])
def test_what_rests_on_the_host_is_not_on_the_device(lora: int | None) -> None:
    whole = shape_of(llama_config(), lora=None if lora is None else LoraShape(rank=lora))
    layer = whole.layers[0].total_weights * 2
    rests = whole.with_host_residents(weights=True, optimizer=lora is None)
    assert rests.host_resident is not None
    assert whole.weight_bytes - rests.weight_bytes == (len(whole.layers) - 2) * layer
    assert rests.with_host_residents(weights=True, optimizer=True) is rests
    if lora is None:
        assert rests.gradient_bytes == 2 * layer
        # bfloat16 weights and gradients, two float32 moments; the latter are away.
        assert whole.standing_bytes == (2 + 2 + 8) * whole.total_parameters
        assert rests.standing_bytes == rests.weight_bytes + 2 * layer
        assert rests.host_resident == HostResident(
            layer_bytes=(layer,) * len(whole.layers),
            outer_bytes=whole.gradient_bytes - len(whole.layers) * layer,
            keeps_device_copies=False,
            layer_gradient_bytes=(layer,) * len(whole.layers),
            outer_gradient_bytes=whole.gradient_bytes - len(whole.layers) * layer,
            optimizer_bytes=8 * whole.trainable_parameters,
        )
        assert (
            rests.host_resident.weight_bytes
            == rests.host_resident.gradient_bytes
            == whole.gradient_bytes
        )
        # Weights and both moments are read and written, gradients read.
        assert rests.host_resident.update_bytes == (3 * 2 + 2 * 8) * whole.trainable_parameters
    else:
        assert rests.gradient_bytes == whole.gradient_bytes
        assert rests.host_resident.weight_bytes == len(whole.layers) * layer
        assert rests.standing_bytes == whole.standing_bytes - (len(whole.layers) - 2) * layer
    assert whole.with_host_residents(weights=False, optimizer=False) is whole


@pytest.mark.parametrize("total_tokens", [1, 2, 7, 20])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
def test_visible_pairs_by_counting(total_tokens: int, window: int | None) -> None:
    pairs = sum(
        1
        for query in range(total_tokens)
        for key in range(query + 1)
        if window is None or key > query - window
    )
    assert visible_pairs(total_tokens, window) == pairs


@pytest.mark.parametrize("total_tokens", [32_768, 131_072, 1_048_576])
def test_llama_8b_yardstick(total_tokens: int) -> None:
    shape = shape_of(llama_config(), dtype_bytes=2)
    per_token = 6 * 7.5e9 + 6 * total_tokens * 131_072
    assert step_flops(shape, 1, total_tokens) == pytest.approx(per_token * total_tokens, rel=0.01)


def test_rows_multiply_and_training_is_three_forwards() -> None:
    shape = tiny_shape()
    assert step_flops(shape, 1, 33) == 3 * forward_flops(shape, 1, 33)
    assert step_flops(shape, 4, 33) == 4 * step_flops(shape, 1, 33)


def test_frozen_weights_skip_their_gradient() -> None:
    full = shape_of(llama_config(), dtype_bytes=2)
    frozen = shape_of(llama_config(), dtype_bytes=2, trainable_parameters=0)
    saved = step_flops(full, 1, 1000) - step_flops(frozen, 1, 1000)
    assert saved == full.linear_flops_per_token() * 1000


def test_lora_costs_about_two_forwards_of_the_linear_part() -> None:
    full = shape_of(llama_config(), dtype_bytes=2)
    adapted = shape_of(llama_config(), dtype_bytes=2, lora=LoraShape(rank=16))
    linear = full.linear_flops_per_token() * 1000
    ratio = (step_flops(full, 1, 1000) - step_flops(adapted, 1, 1000)) / linear
    assert ratio == pytest.approx(1, abs=0.03)


def test_windowed_layers_see_fewer_keys() -> None:
    full, windowed = tiny_shape(), tiny_shape(sliding_window=4)
    per_key = sum(layer.attention_flops_per_key for layer in full.layers)
    difference = forward_flops(full, 1, 100) - forward_flops(windowed, 1, 100)
    assert difference == per_key * (visible_pairs(100, None) - visible_pairs(100, 4))
