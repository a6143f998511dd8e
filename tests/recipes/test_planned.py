"""What `sppo plan --write` writes is launched, and every rank does what the plan lists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from sppo_hf.cli import app
from sppo_hf.cli.plan import FSDP2_SETTINGS
from sppo_hf.planning.layouts import Layout
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.generate import MSP
from tests.cli.configs import TINY, answer_with, write_config
from tests.integrations.launch import launch_environment, run_ranks
from tests.integrations.training import needs_fsdp2
from tests.sweeps import ALL

pytestmark = pytest.mark.process

TOKENS = 512
FIELDS: dict[str, Any] = {**TINY, "num_hidden_layers": 4, "dtype": "float32", "torch_dtype": None}


def _plan(folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Config and answer of a command that writes into `folder / "run"`."""
    model = write_config(folder, FIELDS)
    words = [model, "--seq-len", str(TOKENS), "--dtype", "float32", "--hardware", "h100"]
    words += ["--write", str(folder / "run"), "--json", *arguments]
    result = CliRunner().invoke(app, ["plan", *words])
    assert result.exit_code == 0, result.output
    return model, json.loads(result.stdout)


def _launch(folder: Path, model: str, answer: dict[str, Any]) -> list[list[str]]:
    """What each rank did in the run that was written; all else of the files stays as it is."""
    processes = yaml.safe_load((folder / "run" / "accelerate.yaml").read_text())["num_processes"]
    settings = folder / "run" / "sppo.yaml"
    kept = f"trace_dir: {folder / 'did'}\nmin_offload_size: 1\nshow_plan: false\n"
    settings.write_text(settings.read_text() + kept)
    rows, accumulated = (
        int((re.findall(rf"{name} (\d+)", answer["arguments"]) or ["1"])[0])
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    script = str(Path(__file__).with_name("train_planned.py"))
    argv = ["--config", str(settings), script, model]
    argv += [*map(str, (TOKENS, rows, accumulated)), str(folder / "out")]
    accelerate = ("--config_file", str(folder / "run" / "accelerate.yaml"), "train.py")
    environment = {} if processes == 1 else launch_environment(*accelerate)
    job = {"module": "sppo_hf.run", "argv": argv, "environment": environment}
    run_ranks("tests.recipes.script_ranks", job, processes, folder / "ranks")
    return [
        (folder / "did" / f"rank{rank}.actions").read_text().split() for rank in range(processes)
    ]


def test_the_fastest_layout(tmp_path: Path) -> None:
    model, answer = _plan(tmp_path, "--gpus", "2", "--rows", "1")
    best = answer["plans"][0]
    assert best["stages"] * best["sp"] == 2
    assert _launch(tmp_path, model, answer) == answer["actions"]


_PIPELINES = {
    "selective, K/V on the host": ("zb_seq1f1b", 2, 1, 1, 4, "flops", "matmuls", "full", "host"),
    "the paper's rule": ("seq1f1b", 2, 1, 1, 4, "flops", "whole", "sppo", "device"),
    "shared by two": ("seq1f1b", 1, 1, 1, 4, "even", "inputs", "full", "device", 2),
    "interleaved, bounded": (
        *("interleaved_seq1f1b", 2, 1, 2, 4, "bounded", "inputs", "full", "device"),
    ),
    "units shared between stages": (MSP, 2, 1, 1, 4, "flops", "matmuls", "full", "device"),
    "shared units, K/V on the host": (MSP, 2, 1, 1, 4, "flops", "matmuls", "full", "host"),
    "shared units, the paper's rule": (MSP, 2, 1, 1, 5, "even", "whole", "sppo", "device"),
    "on the disk": (
        *("seq1f1b", 2, 1, 1, 4, "flops", "inputs", "full", "device", 1, False, "disk"),
    ),
}

_SHARDED = {
    "FSDP2": ("seq1f1b", 1, 2, 1, 4, "flops", "matmuls", "full", "host", 1, True),
    "FSDP2, kept": ("seq1f1b", 1, 2, 1, 2, "flops", "whole", "none", "device", 1, True),
    "FSDP2, shared by two": ("seq1f1b", 1, 1, 1, 4, "even", "inputs", "full", "device", 2, True),
}

_TOGETHER = ("the paper's rule", "units shared between stages", "shared units, K/V on the host")
"""Have nothing that others have not."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in _PIPELINES if ALL or name not in _TOGETHER])
def test_whatever_may_be_answered(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search is made to answer a layout that it may answer elsewhere."""
    layout = Layout(*_PIPELINES[name])  # type: ignore[arg-type]
    answer_with(monkeypatch, layout)
    disk = ("--disk-memory", "1GiB", "--offload-dir", str(tmp_path / "disk"))
    asked = disk if layout.activation_tier == "disk" else ()
    model, answer = _plan(tmp_path, "--gpus", "2", "--rows", "2", *asked)
    kinds = {Action.parse(text).kind for text in answer["actions"][0]}
    assert ("S" in kinds) == (layout.activation_tier == "disk")
    assert ("RECV_KV" in kinds) == (layout.schedule == MSP)
    assert any("D" in Action.parse(a).kind for a in answer["actions"][0])
    assert _launch(tmp_path, model, answer) == answer["actions"]


@needs_fsdp2
@pytest.mark.slow
@pytest.mark.parametrize("name", _SHARDED)
def test_sharded_layouts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(*_SHARDED[name])  # type: ignore[arg-type]
    layout = layout._replace(order="by_layer" if layout.sp == 1 else "by_chunk")
    answer_with(monkeypatch, layout)
    model, answer = _plan(tmp_path, "--gpus", "2", "--rows", "2")
    assert answer["plans"][0]["name"].startswith("FSDP2")
    launch = yaml.safe_load((tmp_path / "run" / "accelerate.yaml").read_text())
    assert (launch["distributed_type"], launch["num_processes"]) == ("FSDP", 2)
    assert launch["fsdp_config"] == FSDP2_SETTINGS
    # Those of one replica; others do the same.
    assert _launch(tmp_path, model, answer) == answer["actions"] * layout.replicas
    assert (tmp_path / "out" / "wrapper").read_text().startswith("FSDP")


def test_one_device(tmp_path: Path) -> None:
    """A policy that leaves nothing open, for a CPU decides otherwise than the GPU planned for."""
    cut = ("--num-chunks", "3", "--policy", "full", "--recompute", "selective")
    model, answer = _plan(tmp_path, *cut)
    settings = yaml.safe_load((tmp_path / "run" / "sppo.yaml").read_text())
    assert settings["recompute"] == "selective"
    assert _launch(tmp_path, model, answer) == answer["actions"]
