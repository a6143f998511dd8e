"""The script for a first half hour on a GPU: its order, what it does again, and its time limits.

A made-up Python stands in for all that the steps start; what they start is tested where it is.
"""

import os
import shlex
import subprocess
import tarfile
from pathlib import Path

import pytest
import typer

from recipes.benchmarks.lacking import lacking
from sppo_hf.cli import app
from sppo_hf.cli.benchmark.contenders import parse_list
from sppo_hf.cli.common import parse_tokens
from sppo_hf.registry import ATTENTION_BACKENDS

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipes" / "benchmarks" / "first_gpu_run.sh"
PYTHON = """#!/usr/bin/env bash
case "$*" in
    *lacking.py*) cat "$CALLS.lacks" 2>/dev/null; exit 0 ;;
    -c*) echo 3.12; exit 0 ;;
esac
printf '%q ' "$@" >>"$CALLS"
echo >>"$CALLS"
echo "$HF_HUB_OFFLINE" >"$CALLS.offline"
case "$*" in
    "-m pytest"*) exit "$(cat "$CALLS.pytest" 2>/dev/null || echo 0)" ;;
    *attention_kernels*) [[ -e $CALLS.kernels-work ]] || exit 3 ;;
    *cli\\ calibrate*) [[ ! -e $CALLS.late ]] || { sleep 61.23 & sleep 61.24; } ;;
    *trace-*) ;;
    *--profile*) mkdir -p "${@: -1}" && touch "${@: -1}/trace-sppo-auto-256.json.gz" ;;
esac
"""


@pytest.fixture
def run(tmp_path: Path):
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(PYTHON)
    python.chmod(0o755)
    settings = {
        "SPPO_PYTHON": str(python),
        "SPPO_STEP_SECONDS": "3",
        "SPPO_GRACE_SECONDS": "1",
        "CALLS": str(calls),
    }

    def start(*arguments: str, size: str = "--tiny") -> tuple[int, str, list[str]]:
        calls.write_text("")
        command = ["bash", str(SCRIPT), "--output", str(tmp_path / "out"), *arguments]
        command += [size] if size else []
        env = {**os.environ, **settings}
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
        return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines()

    return start


def test_what_fails_or_is_late_stops_nothing_and_is_done_again(run, tmp_path: Path) -> None:
    (tmp_path / "calls.late").touch()
    status, said, calls = run()
    assert status == 1
    assert "== kernels: failed (3)" in said
    assert "== calibrate: out of time after" in said
    assert "== trace: ok" in said
    names = ("collect_env", "tests/offload", "--profile", "attention_kernels", "calibrate")
    order = [next(i for i, call in enumerate(calls) if name in call) for name in names]
    assert order == sorted(order), "what is right first, then one step, then the benchmark"
    rows = [shlex.split(call) for call in calls if "/out/bench" in call and "--contenders" in call]
    named = [(row[row.index("--seq-lens") + 1], row[row.index("--contenders") + 1]) for row in rows]
    checkpointing = "checkpointing+liger,checkpointing+tiled"
    others = ["sppo-auto", checkpointing, "checkpointing-default+tiled"]
    lengths = ("256", "512")
    expected = [("256", name) for name in others[:2]]
    expected += [("256", name) for name in (*others, "checkpointing-default")]
    expected += [("512", name) for name in others]
    assert named == [*expected, *((length, "ideal+liger,ideal") for length in lengths)]
    assert "kernels\tfailed (3)" in said, "the report ends with what became of each step"

    (tmp_path / "calls.kernels-work").touch()
    (tmp_path / "calls.late").unlink()
    status, said, calls = run()
    assert status == 0
    assert "== facts: done before" in said
    assert [call for call in calls if "attention_kernels" in call or "calibrate" in call]
    assert len(calls) == 3, f"the two that had not succeeded, and the report: {calls}"


def test_tests_that_have_all_run_are_not_run_again(run, tmp_path: Path) -> None:
    status_of_pytest = tmp_path / "calls.pytest"
    for code, runs_again in ((2, True), (4, True), (1, False)):  # interrupted, misused, some failed
        status_of_pytest.write_text(str(code))
        status, said, _ = run("right")
        assert status == 1
        assert f"== right: failed ({code})" in said
        status, said, calls = run("right")
        assert bool(calls) == runs_again
    assert status == 0
    assert "== right: done before" in said


def test_no_library_asks_the_hub_unless_told_to(run, tmp_path: Path, monkeypatch) -> None:
    for given, seen in ((None, "1"), ("0", "0")):
        if given is None:
            monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        else:
            monkeypatch.setenv("HF_HUB_OFFLINE", given)
        run("facts", "--again")
        assert (tmp_path / "calls.offline").read_text().strip() == seen


def test_a_smaller_device_is_everyones(run) -> None:
    _, _, calls = run("--device-memory", "79GiB", size="")
    rows = [shlex.split(call) for call in calls if "--contenders" in call]
    assert len(rows) > 10
    for row in rows:
        assert row[row.index("--device-memory") + 1] == "79GiB", row


def test_a_time_limit_ends_all_that_a_step_has_started(run, tmp_path: Path) -> None:
    (tmp_path / "calls.late").touch()
    _, said, _ = run("calibrate")
    assert "== calibrate: out of time after" in said
    listed = subprocess.run(["pgrep", "-f", "sleep 61.2[34]"], capture_output=True, text=True)
    assert listed.stdout == ""


def test_what_is_missing_is_named_before_anything_runs(run, tmp_path: Path) -> None:
    lacks = tmp_path / "calls.lacks"
    lacks.write_text("peft peft>=0.18\ngguf gguf>=0.17\n")
    status, said, calls = run("facts", "trace", "quickstart")
    assert status == 1
    assert said.index("lacks 'gguf>=0.17' 'peft>=0.18'") < said.index("pip download")
    assert "--python-version 3.12" in said
    assert said.index("pip download") < said.index("== facts")
    assert "== facts: ok" in said
    assert "== trace: lacks peft>=0.18" in said
    assert "== quickstart: lacks peft>=0.18 gguf>=0.17" in said
    assert not any("--profile" in call for call in calls)
    lacks.write_text("sppo-hf highspy>=1.10\n")
    _, said, calls = run()
    assert calls == [], "every step needs the package"


def test_what_is_missing_is_read_off_the_project() -> None:
    assert [*lacking(["sppo-hf", "pytest", "hypothesis"])] == []
    ((asked, found),) = lacking(["a-package-that-is-none"])
    assert (asked, str(found)) == ("a-package-that-is-none", "a-package-that-is-none")


def test_unknown_words_are_refused_before_anything_runs(run) -> None:
    for word in ("kernel", "--small"):
        status, said, calls = run(word)
        assert status == 2
        assert word in said
        assert calls == []


def test_all_that_is_started_on_a_gpu_is_there_and_takes_its_arguments(run) -> None:
    """A misspelt contender or option would end a step at once, on the machine that is rare."""
    _, said, calls = run(size="")
    assert "no step" not in said
    commands = typer.main.get_command(app)
    started = set()
    for call in map(shlex.split, calls):
        if call[:2] == ["-m", "sppo_hf.cli"]:
            name, rest = call[2], call[3:]
            command = commands.get_command(typer.Context(commands), name)
            context = command.make_context(name, rest)  # parses, runs nothing
            if name == "bench" and context.params["show"] is None:
                parse_list(context.params["contenders"])
                assert not context.params["picture"], "matplotlib is none of what the step needs"
                assert parse_tokens(context.params["seq_lens"] or context.params["longest_step"])
            started.add(name)
        elif call[:2] == ["-m", "pytest"]:
            paths = [word for word in call if word.startswith("tests/")]
            assert paths
            for path in paths:
                found = ROOT / path
                files = [found] if found.is_file() else list(found.rglob("test_*.py"))
                assert any("pytest.mark.gpu" in file.read_text() for file in files), path
            started.add("pytest")
        elif call[0] != "-m":
            assert (ROOT / call[0]).is_file()
            known = (ROOT / call[0]).read_text()
            options = [word.lstrip("-") for word in call[1:] if word.startswith("--")]
            assert all(option in known for option in options), options
            if "--backends" in call:
                names = call[call.index("--backends") + 1 : call.index("--json")]
                assert set(names) <= set(ATTENTION_BACKENDS.names())
            started.add(Path(call[0]).stem)
    recipes = {"attention_kernels", "finetune", "pinning", "steady_memory", "trace_summary"}
    assert started == {"bench", "calibrate", "pytest", *recipes}


def test_it_ends_in_its_time_and_what_it_found_is_kept_outside(run, tmp_path: Path) -> None:
    kept = tmp_path / "kept" / "results.tar.gz"
    (tmp_path / "calls.late").touch()
    status, said, _ = run("--seconds", "23", "--keep", str(kept), "facts", "calibrate", "trace")
    assert "== facts: ok" in said
    assert "== trace: no time left" in said
    assert status == 1
    with tarfile.open(kept) as found:
        names = found.getnames()
    assert "./facts.log" in names
    assert "./.done-facts" in names, "unpacked elsewhere it is not run again"


def test_a_step_that_could_find_nothing_in_what_is_left_is_not_begun(run) -> None:
    steps = ("tests", "ideal-64K", "steady", "attention", "far", "longest", "quickstart")
    status, said, calls = run("--seconds", "100", *steps, size="")
    assert status == 1
    assert calls == []
    for step in steps:
        assert f"== {step}: no time left" in said


def test_no_try_for_the_longest_row_is_ended_by_its_time(run) -> None:
    _, _, calls = run("longest", size="")
    (row,) = (shlex.split(call) for call in calls if "--longest" in call)
    tokens = parse_tokens(row[row.index("--longest-limit") + 1])
    steps, start_seconds, step_seconds = 3, 60, 171 * (tokens / 2**18) ** 2
    assert float(row[row.index("--timeout") + 1]) >= start_seconds + steps * step_seconds
