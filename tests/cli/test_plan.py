"""`sppo plan`: the plan, chunk by chunk, policies with the winner first, pictures and traces."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sppo_hf.cli import app
from tests.cli.configs import LLAMA_8B, TINY, write_config

MACHINE = ("--device-memory", "40GiB", "--host-memory", "64GiB", "--lora", "16")
TINY_MACHINE = ("--device-memory", "2GiB", "--host-memory", "1GiB")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *arguments], terminal_width=120)
    return result.exit_code, result.stdout, result.stderr


def read_json(*arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(*arguments, "--json")
    return code, json.loads(out)


def test_the_plan_of_an_8b_model(tmp_path: Path) -> None:
    code, out, err = run(write_config(tmp_path, LLAMA_8B), "--seq-len", "32K", *MACHINE)
    assert (code, err) == (0, "")
    flat = " ".join(out.split())
    for said in ("SPPO plan", "fits yes", "chunk tokens layers", "policy recompute", "auto mixed"):
        assert said in flat
    assert "recomputation not counted" in flat


@pytest.mark.parametrize("length", ["8K", "48K"])
def test_auto_is_at_least_as_fast_as_every_policy_that_fits(tmp_path: Path, length: str) -> None:
    model = write_config(tmp_path, LLAMA_8B)
    code, result = read_json(model, "--seq-len", length, *MACHINE)
    assert code == 0
    policies = result["policies"]
    assert policies[0]["policy"] == "auto"
    assert policies[0]["tokens_per_second"] == pytest.approx(result["tokens_per_second"])
    speeds = [policy["tokens_per_second"] for policy in policies if policy["fits"]]
    assert speeds == sorted(speeds, reverse=True)


@pytest.mark.parametrize("policy", ["none", "full", "sppo"])
def test_fixed_policies(tmp_path: Path, policy: str) -> None:
    model = write_config(tmp_path, TINY)
    cut = ("--seq-len", "16K", "--num-chunks", "4", *TINY_MACHINE)
    code, result = read_json(model, *cut, "--policy", policy)
    assert code == 0
    chunks = result["chunks"]
    assert all(chunk["recompute_layers"] == 0 for chunk in chunks)
    leaving = [chunk["offload_layers"] for chunk in chunks]
    assert {"none": leaving == [0] * 4, "full": leaving == [2] * 4, "sppo": leaving[-1] == 0}[
        policy
    ]
    (actions,) = result["actions"]
    assert actions[:1] + actions[-1:] == ["0F0.0", "0B0.0"]
    assert sum("H" in action for action in actions) == sum(leaving)
    recomputed = read_json(model, *cut, "--policy", policy, "--recompute", "full")[1]
    assert all(chunk["recompute_layers"] == 2 for chunk in recomputed["chunks"])


def test_a_policy_that_does_not_fit(tmp_path: Path) -> None:
    model = write_config(tmp_path, LLAMA_8B)
    code, result = read_json(model, "--seq-len", "32K", *MACHINE, "--policy", "none")
    assert code == 1
    assert result["fits"] is False
    assert result["first_limit"]["tier"] == "device"
    assert result["policies"][0]["policy"] == "auto"
    assert result["policies"][0]["fits"] is True


def test_the_picture_and_the_trace(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = write_config(tmp_path, TINY)
    figure, trace = tmp_path / "plan.svg", tmp_path / "trace.json"
    files = ("--figure", str(figure), "--trace", str(trace))
    code, out, err = run(model, "--seq-len", "8K", "--num-chunks", "4", *TINY_MACHINE, *files)
    assert (code, err) == (0, "")
    assert out
    assert "<svg" in figure.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"compute"} <= {e["args"].get("name") for e in events if e["ph"] == "M"}
    assert any(event["ph"] == "C" and event["name"] == "device memory" for event in events)


def test_nothing_is_drawn_of_what_does_not_fit(tmp_path: Path) -> None:
    figure = tmp_path / "plan.png"
    model = write_config(tmp_path, LLAMA_8B)
    code, _, err = run(model, "--seq-len", "1K", *TINY_MACHINE, "--figure", str(figure), "--json")
    assert code == 1
    assert "no plan to draw" in err
    assert not figure.exists()


@pytest.mark.parametrize("option", ["--figure", "--trace"])
def test_files_that_cannot_be_written(tmp_path: Path, option: str) -> None:
    model = write_config(tmp_path, TINY)
    missing = tmp_path / "missing" / "plan.svg"
    code, out, err = run(model, "--seq-len", "1K", *TINY_MACHINE, option, str(missing))
    assert (code, out) == (2, "")
    assert "plan.svg" in err
    assert "cannot be written" in err


def test_a_picture_of_an_unknown_kind(tmp_path: Path) -> None:
    code, _, err = run(write_config(tmp_path, TINY), "--seq-len", "1K", "--figure", "plan.gif")
    assert code == 2
    assert ".svg" in err
