"""Guessed profiles scale with the peak and say that they are guesses."""

import pytest

from sppo_hf.planning.hardware import cpu_estimate, cuda_estimate


def test_a_known_peak_is_scaled() -> None:
    small, large = cuda_estimate("a", 100e12), cuda_estimate("b", 1000e12)
    for tokens in (1, 300, 4096, 10**6):
        rate = small.matmul_flops["bfloat16"].at(tokens)
        assert rate < 100e12
        assert large.matmul_flops["bfloat16"].at(tokens) == pytest.approx(10 * rate)
    assert large.memory_bytes_per_second == 2e12
    assert "1e+15" in large.source


def test_an_unknown_one_is_slower_in_everything_than_a_large_one() -> None:
    unknown, known = cuda_estimate("a", None), cuda_estimate("b", 312e12)
    assert unknown.matmul_flops["float32"].at(99) < known.matmul_flops["float32"].at(99)
    assert unknown.d2h_bytes_per_second < known.d2h_bytes_per_second
    assert unknown.memory_bytes_per_second < known.memory_bytes_per_second
    assert unknown.estimated
    assert known.estimated


def test_a_processor_copies_each_way_at_half_speed_when_both_ways_run() -> None:
    profile = cpu_estimate("x")
    assert profile.both_d2h_bytes_per_second == profile.d2h_bytes_per_second / 2
    assert profile.both_h2d_bytes_per_second == profile.h2d_bytes_per_second / 2
