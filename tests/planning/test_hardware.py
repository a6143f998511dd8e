"""Curves give rates between and outside their points, and dtypes stand in for one another."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import ConfigError
from sppo_hf.planning.hardware import (
    PROFILE_FORMAT,
    Curve,
    HardwareProfile,
    curve_for,
    profile_from_dict,
    profile_from_json,
    profile_to_dict,
    profile_to_json,
)
from tests.planning.profiles import PROFILE, changed

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


def test_round_trip() -> None:
    bare = changed(
        **{
            field.name: field.default
            for field in dataclasses.fields(HardwareProfile)
            if field.default is not dataclasses.MISSING
        }
    )
    for profile in (PROFILE, bare):
        assert profile_from_json(profile_to_json(profile), where="x") == profile


def test_every_field_is_written() -> None:
    names = {field.name for field in dataclasses.fields(HardwareProfile)}
    assert set(profile_to_dict(PROFILE)) == {"format", *names}


def test_optional_fields_may_be_left_out() -> None:
    data = profile_to_dict(PROFILE)
    for field in dataclasses.fields(HardwareProfile):
        if field.default is not dataclasses.MISSING:
            del data[field.name]
    assert profile_from_dict(data, where="x").disk_read_bytes_per_second is None


def _spoilt(**changes: Any) -> dict[str, Any]:
    return {**profile_to_dict(PROFILE), **changes}


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (_spoilt(d2h_bytes_per_sec=1.0), ["unknown field 'd2h_bytes_per_sec'", "d2h_bytes_per_s"]),
        (_spoilt(launch_seconds=0), ["launch_seconds=0", "above zero", "sppo calibrate"]),
        (_spoilt(launch_seconds=1e-300), ["launch_seconds=1e-300", "1e-12"]),
        (_spoilt(launch_seconds=10**400), ["launch_seconds=a number of about 400 digits"]),
        (_spoilt(device_bytes=2**63), ["device_bytes=9223372036854775808", "below 2**63"]),
        (_spoilt(matmul_flops={"bfloat16": {"9" * 400: 1.0}}), ["matmul_flops="]),
        (_spoilt(launch_seconds="1"), ["launch_seconds='1'"]),
        (_spoilt(launch_seconds=True), ["launch_seconds=True"]),
        (_spoilt(kind="tpu"), ["kind='tpu'", "'cpu' or 'cuda'"]),
        (_spoilt(device_bytes=-1), ["device_bytes=-1", "whole number"]),
        (_spoilt(device_bytes=1.5), ["device_bytes=1.5"]),
        (_spoilt(estimated=1), ["estimated=1", "true or false"]),
        (_spoilt(name=""), ["name=''"]),
        (_spoilt(matmul_flops={}), ["matmul_flops={}", "bfloat16"]),
        (_spoilt(matmul_flops={"bfloat16": {}}), ["matmul_flops", "at least one point"]),
        (_spoilt(matmul_flops={"bfloat16": {"9": 1, "3": 1}}), ["matmul_flops", "increasing"]),
        (_spoilt(matmul_flops={"bfloat16": [1]}), ["matmul_flops="]),
        (_spoilt(versions={"torch": 2}), ["versions="]),
        (_spoilt(format=PROFILE_FORMAT + 1), [f"format={PROFILE_FORMAT + 1}", "sppo calibrate"]),
        ({"name": "x"}, ["format=None"]),
        ([], ["no JSON object"]),
    ],
)
def test_refusals_name_file_field_and_remedy(data: object, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        profile_from_dict(data, where="there.json")
    message = str(caught.value)
    for part in ["there.json", "Remedy", *parts]:
        assert part in message


@pytest.mark.parametrize(
    "name", [f.name for f in dataclasses.fields(HardwareProfile) if f.default is f.default_factory]
)
def test_a_missing_field_is_named(name: str) -> None:
    data = profile_to_dict(PROFILE)
    del data[name]
    with pytest.raises(ConfigError, match=f"there.json: the field '{name}' is missing.*Remedy"):
        profile_from_dict(data, where="there.json")


def test_text_that_is_no_json() -> None:
    with pytest.raises(ConfigError, match=r"there.json is not readable as JSON.*Remedy"):
        profile_from_json(json.dumps(profile_to_dict(PROFILE))[:-1], where="there.json")
