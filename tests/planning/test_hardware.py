"""Curves give rates between and outside their points, and dtypes stand in for one another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import ConfigError
from sppo_hf.planning.hardware import Curve, curve_for

CURVE = Curve(((256, 1e14), (1024, 3e14), (4096, 4e14)))


def test_a_curve_hits_its_points_and_is_flat_outside() -> None:
    assert [CURVE.at(tokens) for tokens, _ in CURVE.points] == [1e14, 3e14, 4e14]
    assert CURVE.at(1) == CURVE.at(0) == 1e14
    assert CURVE.at(10**6) == 4e14


def test_a_curve_is_linear_in_the_logarithm_of_tokens() -> None:
    assert CURVE.at(512) == pytest.approx(2e14)
    assert CURVE.at(2048) == pytest.approx(3.5e14)


@given(st.floats(1, 1e5), st.floats(1, 1e5))
def test_a_rising_curve_never_falls(first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert CURVE.at(low) <= CURVE.at(high) * (1 + 1e-12)


def test_a_curve_of_one_point_is_flat() -> None:
    assert Curve(((512, 7.0),)).at(3) == Curve(((512, 7.0),)).at(9999) == 7.0


@pytest.mark.parametrize("points", [(), ((0, 1.0),), ((2, 1.0), (2, 2.0)), ((4, 1.0), (2, 2.0))])
def test_bad_tokens_are_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ConfigError, match="strictly increasing"):
        Curve(points)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_bad_rates_are_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="above zero"):
        Curve(((2, 1.0), (4, rate)))


def test_dtypes_stand_in_for_one_another() -> None:
    half, single = Curve(((1, 100.0),)), Curve(((1, 10.0),))
    both = {"float16": half, "float32": single}
    assert curve_for(both, "float16") is half
    assert curve_for(both, "bfloat16") == half
    assert curve_for(both, "float64").at(1) == 5.0
    assert curve_for({"bfloat16": half}, "float32").at(1) == 10.0
    assert curve_for({"float32": single}, "bfloat16") == single
    assert curve_for(both, "float8_e4m3fn") is single, "the slowest, for one not known"
