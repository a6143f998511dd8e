"""The script for a first hour on a GPU: its order, what it does again, and its time limits.

A made-up Python stands in for all that the steps start; what they start is tested where it is.
"""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parents[2] / "recipes" / "benchmarks" / "first_gpu_run.sh"
PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$*" in
    *attention_kernels*) [[ -e $CALLS.kernels-work ]] || exit 3 ;;
    *calibrate*) [[ -e $CALLS.fast ]] || { sleep 61.23 & sleep 61.24; } ;;
    *trace-*) ;;
    *--profile*) mkdir -p "${@: -1}" && touch "${@: -1}/trace-sppo-auto-256.json.gz" ;;
esac
"""


@pytest.fixture
def run(tmp_path: Path):
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(PYTHON)
    python.chmod(0o755)
    env = {
        **os.environ,
        "SPPO_PYTHON": str(python),
        "SPPO_STEP_SECONDS": "2",
        "CALLS": str(calls),
    }

    def start(*arguments: str) -> tuple[int, str, list[str]]:
        calls.write_text("")
        command = ["bash", str(SCRIPT), "--tiny", "--output", str(tmp_path / "out"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
        return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines()

    return start


def test_what_fails_or_is_late_stops_nothing_and_is_done_again(run, tmp_path: Path) -> None:
    status, said, calls = run()
    assert status == 1
    assert "== kernels: failed (3)" in said
    assert "== calibrate: out of time after" in said
    assert "== trace: ok" in said
    names = ("collect_env", "-m gpu tests/attention", "attention_kernels", "calibrate", "--profile")
    order = [next(i for i, call in enumerate(calls) if name in call) for name in names]
    assert order == sorted(order), "kernels first, then one step, then the benchmark"
    measured = [call for call in calls if "/out/bench" in call and "--show" not in call]
    assert [call.split("--seq-lens ")[1].split()[0] for call in measured] == ["256", "512"]
    assert "kernels\tfailed (3)" in said, "the report ends with what became of each step"

    (tmp_path / "calls.kernels-work").touch()
    (tmp_path / "calls.fast").touch()
    status, said, calls = run()
    assert status == 0
    assert "== facts: done before" in said
    assert [call for call in calls if "attention_kernels" in call or "calibrate" in call]
    assert len(calls) == 3, "the two that had not succeeded, and the report"


def test_a_time_limit_ends_all_that_a_step_has_started(run) -> None:
    run("calibrate")
    listed = subprocess.run(["pgrep", "-f", "sleep 61.2[34]"], capture_output=True, text=True)
    assert listed.stdout == ""


def test_unknown_words_are_refused_before_anything_runs(run) -> None:
    for word in ("kernel", "--small"):
        status, said, calls = run(word)
        assert status == 2
        assert word in said
        assert calls == []
