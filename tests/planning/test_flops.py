"""Step FLOPs against brute force and the yardstick; peaks by device name."""

import pytest

from sppo_hf.planning.model_profile import LoraShape
from sppo_hf.planning.model_shape import forward_flops, peak_flops, step_flops, visible_pairs
from tests.planning.shapes import llama_config, shape_of, tiny_shape


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


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("x86_64", None),
    ],
)
def test_peak_by_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak
