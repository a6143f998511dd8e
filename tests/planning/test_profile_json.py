"""Profiles survive JSON unchanged, and a bad file is refused by file, field and remedy."""

import dataclasses
import json
from typing import Any

import pytest

from sppo_hf.errors import ConfigError
from sppo_hf.planning.hardware import HardwareProfile
from sppo_hf.planning.profile_json import (
    PROFILE_FORMAT,
    profile_from_dict,
    profile_from_json,
    profile_to_dict,
    profile_to_json,
)
from tests.planning.profiles import PROFILE, changed


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
