"""`sppo bench`: from a command line to rows, table, picture and JSON; bad input; quick to show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sppo_hf.cli import app
from sppo_hf.cli.benchmark.contenders import BASES
from sppo_hf.cli.benchmark.driver import Workers
from sppo_hf.cli.benchmark.results import Job, Numbers, ResultFile, Row
from tests.cli.benchmark.made_rows import ENVIRONMENT, many_rows
from tests.cli.configs import TINY, write_config


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", *arguments], terminal_width=120)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Jobs that reached the pretended workers; plain has no room past 128 tokens."""
    seen: list[Job] = []

    def pretend(workers: Workers, job: Job) -> Row:
        seen.append(job)
        assert workers._timeout_seconds == 5.0
        assert workers._logs.name == "logs"
        assert not workers.ahead, "the device is a CPU"
        if job.contender == "plain" and job.total_tokens > 128:
            return Row(status="out of memory", job=job, reason="host: full")
        numbers = Numbers(median_step_seconds=2.0, tokens_per_second=job.total_tokens / 2)
        return Row(status="measured", job=job, numbers=numbers, environment=ENVIRONMENT)

    monkeypatch.setattr(Workers, "run", pretend)
    return seen


def test_a_whole_benchmark(tmp_path: Path, jobs: list[Job]) -> None:
    model, folder = write_config(tmp_path, TINY), tmp_path / "out"
    settings = ("--lora", "full", "--dtype", "float32", "--device", "cpu", "--timeout", "5")
    common = (model, *settings, "--output", str(folder), "--contenders", "plain,sppo-auto")
    code, out, err = run(*common, "--seq-lens", "128,1K", "--steps", "4", "--warm-up", "0")
    assert code == 0, err
    assert [(job.contender, job.total_tokens) for job in jobs] == [
        *[("plain", 128), ("sppo-auto", 128)],
        *[("plain", 1024), ("sppo-auto", 1024)],
    ]
    assert {(job.lora_rank, job.dtype, job.steps, job.warm_up) for job in jobs} == {
        (None, "float32", 4, 0)
    }
    lines = err.splitlines()
    assert len(lines) == 4
    assert "[3/4] plain at 1,024: out of memory: host: full" in lines[2]
    assert "all weights" in " ".join(out.split())
    assert "512" in out
    assert (folder / "results.png").exists()
    # Shown again from the file alone, and resumed without a job.
    jobs.clear()
    (folder / "results.png").unlink()
    code, again, _ = run("--show", str(folder))
    assert (code, again) == (0, out)
    assert (folder / "results.png").exists()
    code, again, _ = run(*common, "--seq-lens", "128,1K", "--steps", "4", "--warm-up", "0")
    assert (code, again, jobs) == (0, out, [])


def test_the_longest_length(tmp_path: Path, jobs: list[Job]) -> None:
    model, folder = write_config(tmp_path, TINY), tmp_path / "out"
    search = ("--longest", "--longest-step", "64", "--longest-limit", "512")
    code, out, err = run(
        *(model, *search, "--contenders", "plain,sppo-auto", "--device", "cpu"),
        *("--timeout", "5", "--output", str(folder), "--json"),
    )
    assert code == 0, err
    rows = {row["job"]["contender"]: row for row in json.loads(out)["rows"]}
    assert len(json.loads(out)["rows"]) == len(ResultFile(folder).rows())
    assert rows["plain"]["kind"] == "longest"
    assert rows["plain"]["numbers"]["longest_tokens"] == 128
    assert rows["sppo-auto"]["numbers"]["longest_tokens"] == 512
    assert {job.predict for job in jobs if job.contender == "sppo-auto"} == {True}
    assert all(job.lora_rank == 16 for job in jobs)
    assert "try plain at 256: out of memory" in err
    _, shown, _ = run("--show", str(folder), "--no-picture")
    assert "Longest, " in shown
    assert not (folder / "results.png").exists()


def test_json_is_one_object(tmp_path: Path) -> None:
    file = ResultFile(tmp_path)
    for row in many_rows():
        file.add(row)
    code, out, err = run("--show", str(tmp_path), "--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    found = json.loads(out)
    assert [Row.from_dict(row) for row in found["rows"]] == many_rows()
    assert found["pictures"] == [str(tmp_path / "results.png")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contenders", "fast"], "nearest name"),
        (["--seq-lens", "12G"], "128K"),
        (["--lora", "many"], "full"),
        (["--lora", "0"], "full"),
        (["--lora-dtype", "float16"], "float32, bfloat16"),
        (["--attention", "turbo"], "cudnn, flash"),
        (["--attention", "cudnn", "--device", "cpu"], "the device is the CPU"),
        (["--device", "tpu"], "auto, cuda, cpu"),
        (["--longest", "--longest-step", "x"], "128K"),
        (["--longest", "--longest-limit", "64"], "--longest-limit"),
        (["--device-memory", "80", "--device", "cpu"], "--device-memory"),
        (["--host-memory", "much", "--device", "cpu"], "--host-memory"),
        (["--hardware", "h900", "--device", "cpu"], "h100"),
    ],
)
def test_bad_input(tmp_path: Path, arguments: list[str], message: str, jobs: list[Job]) -> None:
    common = (write_config(tmp_path, TINY), *arguments, "--output", str(tmp_path / "out"))
    code, out, err = run(*common)
    assert (code, out, jobs) == (2, "", [])
    assert message in err
    assert "Traceback" not in err
    code, out, _ = run(*common, "--json")
    assert code == 2
    assert json.loads(out)["status"] == "bad input"


def test_models_and_folders_that_are_not_there(tmp_path: Path) -> None:
    for arguments, message in (
        ((), "MODEL is missing"),
        ((str(tmp_path / "nothing"),), "no file or folder"),
        ((write_config(tmp_path, TINY, model_type="mamba"), "--device", "cpu"), "recurrent"),
        (("--show", str(tmp_path / "nothing")), "no result"),
    ):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert message in err


_SHOW = """
import sys
from sppo_hf.cli import app
try:
    app(["bench", "--show", sys.argv[1], "--no-picture"])
except SystemExit as exit:
    assert exit.code == 0
for absent in ("torch", "transformers", "accelerate", "matplotlib", "huggingface_hub"):
    assert absent not in sys.modules, absent
"""


@pytest.mark.process
def test_results_are_shown_without_torch(tmp_path: Path) -> None:
    file = ResultFile(tmp_path)
    for row in many_rows():
        file.add(row)
    command = [sys.executable, "-c", _SHOW, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "sppo-auto" in done.stdout


def test_help_names_what_is_compared() -> None:
    code, out, _ = run("--help")
    assert code == 0
    for name in (*BASES, "llama-3.1-8b", "--longest"):
        assert name in out
