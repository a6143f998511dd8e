"""`sppo calibrate`: what is printed, where the profile goes, and errors that name the remedy."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sppo_hf.cli import app
from sppo_hf.cli.calibrate import _scaled
from sppo_hf.config import SPPOConfig
from sppo_hf.engine.device_facts import device_facts
from sppo_hf.planning.hardware import load_profile, profile_from_json
from sppo_hf.profiling import calibrate as runtime
from tests.planning.profiles import PROFILE


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Replace measuring by a fixed profile; holds what was asked for."""
    asked: dict[str, object] = {}

    def fixed(device: object, **arguments: object) -> object:
        asked.update(arguments, device=str(device))
        return PROFILE

    monkeypatch.setattr(runtime, "calibrate", fixed)
    return asked


def _calibrate(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["calibrate", *arguments], terminal_width=200)
    return result.exit_code, result.stdout, result.stderr


def test_it_prints_and_keeps_the_profile(home: Path, measured: dict[str, object]) -> None:
    code, out, _ = _calibrate(
        *("--device", "cpu", "--dtype", "float32", "--dtype", "float16", "--offload-dir", "/disk")
    )
    assert code == 0
    for part in ("Test Device 80GB", "100 T", "300 T", "25.0 GB/s", "5.50 GB/s", "1.00 ms"):
        assert part in out
    (path,) = (home / "sppo_hf" / "hardware").iterdir()
    assert str(path) in out
    assert load_profile(path) == PROFILE
    assert measured["device"] == "cpu"
    assert measured["dtype_names"] == ["float32", "float16"]
    assert measured["offload_dir"] == Path("/disk")
    assert measured["quick"] is False


def test_json_is_the_profile_and_nothing_else(measured: dict[str, object]) -> None:
    code, out, _ = _calibrate("--json")
    assert code == 0
    assert profile_from_json(out, where="stdout") == PROFILE


def test_output_goes_to_the_file_only(
    home: Path, tmp_path: Path, measured: dict[str, object]
) -> None:
    path = tmp_path / "mine.json"
    code, out, _ = _calibrate("--output", str(path))
    assert code == 0
    assert str(path) in out
    assert load_profile(path) == PROFILE
    assert not home.exists()


def test_a_real_quick_run_is_not_kept(home: Path) -> None:
    code, out, err = _calibrate("--quick", "--device", "cpu")
    assert code == 0, err
    assert device_facts(runtime.torch.device("cpu"), SPPOConfig()).name in out
    assert "not measured" in out
    assert "not kept" in out
    assert not home.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda:99"], "device='cuda:99'"),
        (["--device", "cpu", "--dtype", "half"], "dtype='half'"),
        (["--device", "cpu", "--offload-dir", "/proc/nowhere"], "offload_dir='/proc/nowhere'"),
    ],
)
def test_bad_input(arguments: list[str], message: str) -> None:
    code, _, err = _calibrate("--quick", *arguments)
    assert code == 2
    assert message in err
    assert "Remedy" in err
    assert "Traceback" not in err
    code, out, _ = _calibrate("--quick", "--json", *arguments)
    assert code == 2
    assert message in json.loads(out)["reason"]


def test_a_device_that_is_none() -> None:
    code, _, err = _calibrate("--device", "gpu please")
    assert code == 2
    assert "--device" in err


@pytest.mark.parametrize(
    ("rate", "text"),
    [(4.123e14, "412 T"), (2.5e13, "25.0 T"), (9.99e11, "999 G"), (5e9, "5.00 G"), (3.0, "3 ")],
)
def test_rates_have_three_digits(rate: float, text: str) -> None:
    assert _scaled(rate) == text
