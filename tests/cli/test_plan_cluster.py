"""`sppo plan --gpus`: best layouts as a table and as JSON, what does not fit, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from sppo_hf.cli import app
from tests.cli.configs import LLAMA_8B, TINY, write_config

MODEL: dict[str, Any] = {**LLAMA_8B, "num_hidden_layers": 8, "vocab_size": 32_000}


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *arguments], terminal_width=120)
    return result.exit_code, result.stdout, result.stderr


def test_the_best_five_and_why(tmp_path: Path) -> None:
    model = write_config(tmp_path, MODEL)
    question = (model, "--gpus", "2", "--seq-len", "64K", "--host-memory", "512GiB")
    code, out, err = run(*question, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["fits"] is True
    assert len(result["plans"]) == 5
    seconds = [plan["step_seconds"] for plan in result["plans"]]
    assert seconds == sorted(seconds)
    best = result["plans"][0]
    assert best["stages"] * best["replicas"] * best["sp"] == 2
    assert sum(best["chunk_lengths"]) == 65_536
    assert best["layers"][0][0] == 0
    assert best["layers"][-1][1] == 8
    assert best["why"].startswith("idle ")
    code, out, err = run(*question)
    assert (code, err) == (0, "")
    assert f"{best['tokens_per_second']:,.0f}" in out
    assert "layouts were simulated" in out
    assert "\N{HORIZONTAL ELLIPSIS}" not in out


def test_what_leaves_nothing_is_not_called_offloaded(tmp_path: Path) -> None:
    """Nor shown beside the same layout without."""
    model = write_config(tmp_path, MODEL)
    question = (model, "--gpus", "2", "--micro-batch-size", "2", "--seq-len", "1")
    code, out, _ = run(*question)
    assert code == 0
    assert "offloaded" not in out
    plans = json.loads(run(*question, "--json")[1])["plans"]
    assert {plan["offload"] for plan in plans} == {"none"}
    # Of equals the first moves nothing.
    assert plans[0]["kv_tier"] == "device"


def test_stages_share_units_where_the_runtime_can(tmp_path: Path) -> None:
    """One long row over two stages: they fill and drain together, and the files say so."""
    model = write_config(tmp_path, MODEL)
    question = (model, "--gpus", "2", "--seq-len", "256K", "--host-memory", "512GiB")
    question += ("--lora", "16", "--gpus-per-node", "1")
    code, out, _ = run(*question, "--write", str(tmp_path / "run"))
    assert code == 0
    assert "msp: ranks share the units that fill and drain the pipeline (pp_msp: on)." in flat(out)
    assert "msp 1/2/1" in flat(out)
    settings = yaml.safe_load((tmp_path / "run" / "sppo.yaml").read_text())
    assert settings["pp_msp"] == "on"
    assert settings["pp_size"] == 2
    assert "pp_schedule" not in settings


def test_a_disk_is_used_where_it_is_allowed_and_nothing_else_fits(tmp_path: Path) -> None:
    model = write_config(tmp_path, MODEL)
    question = (model, "--gpus", "2", "--seq-len", "512K", "--lora", "16")
    question += ("--device-memory", "32GiB", "--host-memory", "16GiB")
    code, out, _ = run(*question, "--json")
    assert (code, json.loads(out)["plans"]) == (1, [])
    disk = ("--disk-memory", "4TiB", "--offload-dir", "/fast")
    code, out, _ = run(*question, *disk, "--json", "--write", str(tmp_path / "run"))
    best = json.loads(out)["plans"][0]
    assert (code, best["frame_tier"]) == (0, "disk")
    assert best["host_bytes"] < 16 * 2**30 < best["disk_bytes"]
    settings = yaml.safe_load((tmp_path / "run" / "sppo.yaml").read_text())
    assert (settings["offload_tier"], settings["offload_dir"]) == ("disk", "/fast")
    # Two processes of one machine share what it has; stages of a pipeline do not peak together.
    shares = {"disk_memory": 2 * 2**40, "host_memory": 8 * 2**30} if best["stages"] == 1 else {}
    assert {name: settings.get(name) for name in shares} == shares
    assert best["stages"] == 1 or not {"disk_memory", "host_memory"} & settings.keys()
    code, out, _ = run(*question, "--disk-memory", "4TiB", "--json")
    assert (code, json.loads(out)["plans"][0]["frame_tier"]) == (0, "disk")


def flat(text: str) -> str:
    return " ".join(text.split())


def test_what_does_not_fit(tmp_path: Path) -> None:
    model = write_config(tmp_path, MODEL)
    question = (model, "--gpus", "2", "--seq-len", "64K", "--device-memory", "8GiB")
    code, out, _ = run(*question, "--json")
    assert code == 1
    result = json.loads(out)
    assert (result["fits"], result["plans"]) == (False, [])
    assert result["closest"]["missing_bytes"] > 0
    code, out, _ = run(*question)
    assert code == 1
    assert "None fits; the one shown comes closest and lacks" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-chunks", "4"), "--num-chunks was given with --gpus 2"),
        (("--partition", "even"), "--partition was given"),
        (("--policy", "full"), "--offload was given"),
        (("--figure", "a.png"), "a.png was asked for with --gpus 2"),
        (("--link", "fast"), "--link is 'fast'"),
    ],
)
def test_refusals(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    model = write_config(tmp_path, TINY)
    code, out, err = run(model, "--gpus", "2", "--seq-len", "8K", *arguments)
    assert (code, out) == (2, "")
    assert message in err
