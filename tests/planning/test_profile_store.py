"""The right profile is found: calibrated before shipped before guessed, and by name or path."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sppo_hf.errors import ConfigError
from sppo_hf.planning.config_file import shipped_models
from sppo_hf.planning.hardware import (
    load_profile,
    profile_for,
    profile_from_json,
    profile_path,
    profile_to_json,
    save_profile,
    shipped_profiles,
    stored_profile,
)
from sppo_hf.planning.json_store import cache_folder
from tests.planning.profiles import PROFILE, changed

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
                assert rates == sorted(rates), "small chunks are slower"
        half = profile.matmul_flops["bfloat16"]
        assert half.at(512) < 0.6 * half.at(8192)
        assert 0.6 <= backward["bfloat16"].at(8192) / forward["bfloat16"].at(8192) <= 0.8
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


def test_cpu_is_a_name() -> None:
    assert load_profile("CPU").kind == "cpu"
    assert load_profile("cpu").estimated


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"hardware='h10'.*Allowed.*a100.*nearest name, 'h100'"):
        load_profile("h10")


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
