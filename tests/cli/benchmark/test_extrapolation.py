"""The ideal that does not fit: exact where cost is linear in layers, refused where it is not."""

import pytest

from sppo_hf.cli.benchmark.driver import (
    extrapolate,
    extrapolate_length,
    uniform_layers,
)
from tests.cli.benchmark.made_rows import speed_row


def test_a_layer_costs_what_the_second_adds() -> None:
    ends, layer, gib = 0.25, 0.5, 2**30
    one, two = (
        speed_row(
            "ideal",
            65_536,
            ends + layers * layer,
            job={"layers": layers},
            device_allocated_bytes=(3 + 7 * layers) * gib,
            kernel="cudnn",
        )
        for layers in (1, 2)
    )
    row = extrapolate(one, two, num_layers=32, model_flops=1e15)
    assert row.status == "extrapolated"
    assert row.trained
    assert row.job == one.job.replace(layers=None)
    n = row.numbers
    assert n.median_step_seconds == pytest.approx(ends + 32 * layer)
    assert n.tokens_per_second == pytest.approx(65_536 / 16.25)
    assert n.model_tflops == pytest.approx(1e3 / 16.25)
    assert n.device_allocated_bytes == (3 + 7 * 32) * gib
    assert n.step_seconds == (), "no step was measured"
    assert (n.mfu, n.kernel) == (None, "cudnn")
    assert "32 layers from 1 and 2" in row.reason


def test_mfu_needs_a_known_device() -> None:
    one, two = (speed_row("ideal", 1024, seconds) for seconds in (1.0, 1.5))
    two.environment["device_name"] = "NVIDIA H100 80GB HBM3"
    try:
        row = extrapolate(one, two, num_layers=3, model_flops=989e12)
    finally:
        two.environment["device_name"] = "Pretended GPU"
    assert row.numbers.mfu == pytest.approx(1 / 2)


def test_noise_that_makes_layers_free_is_no_result() -> None:
    one, two = (speed_row("ideal", 64, seconds) for seconds in (1.0, 0.5))
    row = extrapolate(one, two, num_layers=32, model_flops=1.0)
    assert row.status == "failed"
    assert "two layers were not slower" in row.reason


def test_layers_of_several_kinds_are_not_extrapolated() -> None:
    assert uniform_layers({})
    assert uniform_layers({"layer_types": ["full_attention"] * 3})
    assert not uniform_layers({"layer_types": ["full_attention", "sliding_attention"]})


def test_a_length_is_on_the_curve_of_two_shorter_ones() -> None:
    def seconds(tokens: int) -> float:
        return 2e-4 * tokens + 3e-9 * tokens**2

    rows = [
        speed_row("ideal", n, seconds(n), kernel="cudnn", device_allocated_bytes=10**9 + 1000 * n)
        for n in (16_384, 32_768)
    ]
    row = extrapolate_length(*rows, total_tokens=131_072, model_flops=1e15)
    assert row.status == "extrapolated"
    assert row.job == rows[0].job.replace(total_tokens=131_072)
    n = row.numbers
    assert n.median_step_seconds == pytest.approx(seconds(131_072))
    assert n.tokens_per_second == pytest.approx(131_072 / seconds(131_072))
    assert n.model_tflops == pytest.approx(1e3 / seconds(131_072))
    assert (n.device_allocated_bytes, n.kernel) == (10**9 + 131_072_000, "cudnn")
    assert row.reason == "extrapolated to 131,072 tokens from 16,384 and 32,768"


@pytest.mark.parametrize("longer", [1.9, 9.0])
def test_lengths_on_no_such_curve_are_no_result(longer: float) -> None:
    # Twice the length takes at least twice the time, and at most four times.
    rows = (speed_row("ideal", 8192, 1.0), speed_row("ideal", 16_384, longer))
    row = extrapolate_length(*rows, total_tokens=32_768, model_flops=1.0)
    assert row.status == "failed"
    assert "no curve" in row.reason
