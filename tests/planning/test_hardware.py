"""Curves give rates between and outside their points, and dtypes stand in for one another."""

import dataclasses
import json
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import ConfigError
from sppo_hf.planning.config_file import shipped_models
from sppo_hf.planning.hardware import (
    DATASHEETS,
    PROFILE_FORMAT,
    Curve,
    HardwareProfile,
    cpu_estimate,
    cuda_estimate,
    curve_for,
    datasheet,
    load_profile,
    peak_flops,
    profile_for,
    profile_from_dict,
    profile_from_json,
    profile_path,
    profile_to_dict,
    profile_to_json,
    save_profile,
    shipped_profiles,
    stored_profile,
)
from sppo_hf.planning.json_store import cache_folder
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
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA RTX 6000 Ada Generation", 364e12),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 504e12),
        ("Quadro RTX 6000", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("x86_64", None),
    ],
)
def test_peak_by_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_a_known_peak_is_scaled() -> None:
    small, large = cuda_estimate("NVIDIA L40"), cuda_estimate("NVIDIA L40S")
    for tokens in (1, 300, 4096, 10**6):
        rate = small.matmul_flops["bfloat16"].at(tokens)
        assert rate < 181e12
        assert large.matmul_flops["bfloat16"].at(tokens) == pytest.approx(2 * rate)
    assert large.memory_bytes_per_second == small.memory_bytes_per_second < 864e9
    assert "3.62e+14" in large.source


@pytest.mark.parametrize("tokens", [300, 4096, 10**6])
def test_attention_reaches_the_measured_share_where_cudnns_kernel_runs(tokens: int) -> None:
    measured = shipped_profiles()["h200"]
    for name, share in (
        ("GH200", 1.0),
        ("NVIDIA B200", 2250 / 989),
        ("NVIDIA H100 NVL", 835 / 989),
    ):
        profile = cuda_estimate(name)
        assert "NVIDIA H200" in profile.source
        for curves in ("attention_forward_flops", "attention_backward_flops"):
            rate, known = (
                getattr(one, curves)["bfloat16"].at(tokens) for one in (profile, measured)
            )
            assert rate == pytest.approx(share * known)
        same_chip = profile.matmul_flops["bfloat16"] == measured.matmul_flops["bfloat16"]
        assert same_chip == (share == 1.0)


@pytest.mark.parametrize("name", ["NVIDIA L40S", "NVIDIA GeForce RTX 5090", "AMD Instinct MI300X"])
def test_elsewhere_attention_reaches_flash_attentions_share(name: str) -> None:
    peak, profile = peak_flops(name), cuda_estimate(name)
    assert peak is not None
    forward = profile.attention_forward_flops["bfloat16"].at(2**14)
    assert forward == pytest.approx(0.34 * peak)
    assert profile.attention_backward_flops["bfloat16"].at(2**14) < 0.7 * forward


def test_an_unknown_one_is_slower_in_everything_than_a_large_one() -> None:
    unknown, known = cuda_estimate("a"), cuda_estimate("NVIDIA L40S")
    assert unknown.matmul_flops["float32"].at(99) < known.matmul_flops["float32"].at(99)
    assert unknown.d2h_bytes_per_second < known.d2h_bytes_per_second
    assert unknown.memory_bytes_per_second < known.memory_bytes_per_second
    assert unknown.estimated
    assert known.estimated
    assert unknown.device_bytes is unknown.node_bytes_per_second is None


def test_datasheets_rank_as_the_machines_do() -> None:
    for name, sheet in DATASHEETS.items():
        profile = cuda_estimate(name)
        assert profile.device_bytes == int(sheet.device_gib * 2**30)
        assert profile.memory_bytes_per_second < sheet.memory_bytes_per_second
        assert profile.node_bytes_per_second is not None
        if sheet.node_bytes_per_second is None:  # sends through the host, there and back
            assert profile.node_bytes_per_second < profile.d2h_bytes_per_second
    for shipped in shipped_profiles().values():
        sheet = datasheet(shipped.name)
        assert sheet is not None
        assert sheet.copy_bytes_per_second == pytest.approx(shipped.d2h_bytes_per_second, rel=0.1)
        assert sheet.node_bytes_per_second == shipped.node_bytes_per_second
        assert shipped.device_bytes == pytest.approx(sheet.device_gib * 2**30, rel=0.01)


def test_a_processor_copies_each_way_at_half_speed_when_both_ways_run() -> None:
    profile = cpu_estimate("x")
    assert profile.both_d2h_bytes_per_second == profile.d2h_bytes_per_second / 2
    assert profile.both_h2d_bytes_per_second == profile.h2d_bytes_per_second / 2


VERSIONS = {"torch": "2.13.0", "cuda": "13.0"}
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf"


def test_shipped_profiles_are_estimates_with_sense_in_them() -> None:
    assert set(shipped_profiles()) == {"a100-80gb", "h100-80gb", "h200"}
    for profile in shipped_profiles().values():
        assert profile.estimated
        assert "public figures" in profile.source
        assert profile.kind == "cuda"
        forward, backward = profile.attention_forward_flops, profile.attention_backward_flops
        for curves in (profile.matmul_flops, forward, backward):
            assert set(curves) == {"bfloat16", "float16", "float32"}
            for curve in curves.values():
                rates = [rate for _, rate in curve.points]
                rising = all(b >= 0.95 * a for a, b in pairwise(rates))
                assert rising, "small chunks are slower, but for the noise of a measurement"
        half = profile.matmul_flops["bfloat16"]
        assert half.at(256) < 0.9 * half.at(8192)
        assert 0.6 <= backward["bfloat16"].at(8192) / forward["bfloat16"].at(8192) < 1
        assert profile.both_d2h_bytes_per_second < profile.d2h_bytes_per_second


def test_shipped_profiles_rank_as_the_machines_do() -> None:
    a100, h100, h200 = shipped_profiles().values()
    matmul = [p.matmul_flops["bfloat16"].at(8192) for p in (a100, h100, h200)]
    memory = [p.memory_bytes_per_second for p in (a100, h100, h200)]
    assert matmul[0] < 312e12 < matmul[1] <= matmul[2] < 989e12
    assert memory[0] < 2.04e12 < memory[1] < 3.35e12 < memory[2] < 4.8e12
    assert a100.d2h_bytes_per_second < 32e9 < h100.d2h_bytes_per_second < 64e9


@pytest.mark.parametrize("name", ["h100", "H100", "H100-80GB", "nvidia h100 80gb hbm3"])
def test_names_in_any_case_short_or_full(name: str) -> None:
    assert load_profile(name) is shipped_profiles()["h100-80gb"]


@pytest.mark.parametrize(
    "name", ["rtx-4090", "RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "geforce-rtx-4090"]
)
def test_names_of_datasheets(name: str) -> None:
    profile = load_profile(name)
    assert profile == dataclasses.replace(cuda_estimate("RTX 4090"), name=profile.name)


def test_a_shipped_device_with_other_memory() -> None:
    small = load_profile("a100-40gb")
    assert small.matmul_flops is shipped_profiles()["a100-80gb"].matmul_flops
    assert small.device_bytes == 40 * 2**30


def test_cpu_is_a_name() -> None:
    assert load_profile("CPU").kind == "cpu"
    assert load_profile("cpu").estimated


def test_an_unknown_name_gets_the_nearest() -> None:
    told = r"hardware='h10'.*Allowed.*a100.*rtx-4090.*nearest name, 'h100'"
    with pytest.raises(ConfigError, match=told):
        load_profile("h10")
    with pytest.raises(ConfigError, match="nearest name, 'rtx-4090'"):
        load_profile("rtx 4090 laptop")


def test_a_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(profile_to_json(PROFILE))
    assert load_profile(path) == load_profile(str(path)) == PROFILE
    with pytest.raises(ConfigError, match=r"absent.json.*cannot be read: No such file.*Remedy"):
        load_profile(tmp_path / "absent.json")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"mine.json.*not UTF-8"):
        load_profile(path)


def test_a_calibrated_profile_is_found_again(home: Path) -> None:
    assert stored_profile(PROFILE.name, "cuda", VERSIONS) is None
    path = save_profile(PROFILE)
    assert path.parent == home / "sppo_hf" / "hardware"
    assert [path] == list(path.parent.iterdir()), "nothing half-written is left"
    assert profile_for(PROFILE.name, "cuda", VERSIONS) == PROFILE
    faster = changed(launch_seconds=1e-4)
    assert save_profile(faster) == path
    assert profile_for(PROFILE.name, "cuda", VERSIONS) == faster


@pytest.mark.parametrize(
    ("name", "kind", "versions"),
    [
        ("Other Device", "cuda", VERSIONS),
        (PROFILE.name, "cpu", VERSIONS),
        (PROFILE.name, "cuda", {**VERSIONS, "torch": "2.14.0"}),
        (PROFILE.name, "cuda", {"torch": "2.13.0"}),
    ],
)
def test_another_device_or_version_does_not_get_it(
    name: str, kind: str, versions: dict[str, str]
) -> None:
    save_profile(PROFILE)
    assert stored_profile(name, kind, versions) is None
    assert profile_for(name, kind, versions).estimated


def test_another_format_does_not_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = profile_path("d", "cpu", {})
    monkeypatch.setattr("sppo_hf.planning.hardware.PROFILE_FORMAT", 99)
    assert profile_path("d", "cpu", {}) != before


def test_a_damaged_file_is_named() -> None:
    path = save_profile(PROFILE)
    path.write_text("{")
    with pytest.raises(ConfigError, match=rf"{path.name}.*Remedy.*sppo calibrate"):
        profile_for(PROFILE.name, "cuda", VERSIONS)


@pytest.mark.parametrize(
    ("device_name", "shipped", "device_bytes"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb", 79 * 2**30),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb", 79 * 2**30),
        ("NVIDIA A100-PCIE-40GB", "a100-80gb", 40 * 2**30),
        ("NVIDIA H200", "h200", 139 * 2**30),
    ],
)
def test_shipped_ones_by_the_words_of_the_name(
    device_name: str, shipped: str, device_bytes: int
) -> None:
    profile = profile_for(device_name, "cuda", VERSIONS)
    assert profile.matmul_flops is shipped_profiles()[shipped].matmul_flops
    assert profile.name == device_name
    assert profile.device_bytes == device_bytes


@pytest.mark.parametrize(
    "device_name", ["NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA L40S"]
)
def test_variants_are_scaled_from_their_own_peak(device_name: str) -> None:
    profile = profile_for(device_name, "cuda", VERSIONS)
    assert profile.estimated
    assert "datasheet" in profile.source
    shipped = {id(p.matmul_flops) for p in shipped_profiles().values()}
    assert id(profile.matmul_flops) not in shipped


def test_what_nobody_knows_gets_a_conservative_guess() -> None:
    slice_of_one = profile_for("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "cuda", VERSIONS)
    unknown = profile_for("Some GPU", "cuda", VERSIONS)
    assert slice_of_one.matmul_flops == unknown.matmul_flops
    assert unknown.estimated
    assert unknown.matmul_flops["bfloat16"].at(8192) < 100e12
    processor = profile_for("AMD EPYC", "cpu", VERSIONS)
    assert processor.estimated
    assert processor.name == "AMD EPYC"
    assert 0.5e11 <= processor.matmul_flops["float32"].at(1024) <= 2e11


def test_guesses_are_valid_profiles() -> None:
    for profile in (load_profile("cpu"), profile_for("Some GPU", "cuda", {})):
        assert profile_from_json(profile_to_json(profile), where="x") == profile


def test_the_cache_is_where_hugging_face_has_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert cache_folder("hardware") == home / "sppo_hf" / "hardware"
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("hardware") == tmp_path / "huggingface" / "sppo_hf" / "hardware"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("hardware") == tmp_path / ".cache" / "huggingface" / "sppo_hf" / "hardware"


@pytest.mark.process
def test_the_default_agrees_with_huggingface_hub(tmp_path: Path) -> None:
    script = (
        "from huggingface_hub.constants import HF_HOME as theirs;"
        "from sppo_hf.planning.json_store import cache_folder;"
        "import sys; sys.exit(str(cache_folder('hardware')) != theirs + '/sppo_hf/hardware')"
    )
    for environment in ({"HF_HOME": "~/x"}, {"XDG_CACHE_HOME": "/a/b"}, {}):
        variables = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **environment}
        ran = subprocess.run([sys.executable, "-c", script], env=variables, check=False)
        assert ran.returncode == 0, environment


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/x.json' cannot be written.*--output"):
        save_profile(PROFILE, tmp_path / "file" / "x.json")


@pytest.mark.process
def test_profiles_are_in_the_wheel(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="builds the wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in shipped_profiles():
        assert f"sppo_hf/planning/profiles/{name}.json" in names
    for name in shipped_models():
        assert f"sppo_hf/planning/models/{name}.json" in names
        assert f"sppo_hf/planning/model_profiles/{name}.json" in names
