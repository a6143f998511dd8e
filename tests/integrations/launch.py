"""Run a job on gloo ranks, and fail with their output when one does not end well."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from sppo_hf.planning.json_store import write_atomically
from tests.deprecations import assert_no_deprecation
from tests.pipeline.fork_server import ROOT, environment, fork_server, free_port

__all__ = [
    "ROOT",
    "assert_same_run",
    "environment",
    "free_port",
    "launch_environment",
    "make_once",
    "run_job",
    "run_ranks",
    "series",
]

TIMEOUT_SECONDS = 100
NEAR = 1e-4
"""Tolerance in float32 after a few steps; AdamW makes rounding errors grow until step fifty."""
EXACT = 1e-9
"""Tolerance in float64, even after many steps."""


def launch_environment(*words: str) -> dict[str, str]:
    """Return the environment variables that `accelerate launch` sets with these arguments."""
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(list(words)))
    made = prepare_multi_gpu_env(args)
    return {name: x for name, x in made.items() if os.environ.get(name) != x}


def run_ranks(
    module: str,
    job: dict[str, Any],
    ranks: int,
    folder: Path,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> None:
    """Run `main(job)` of a module of tests on each rank, and wait for all.

    Raises:
        AssertionError: A rank failed or took too long; the message is what all of them printed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ended = fork_server().launch(
        module, job, ranks=ranks, folder=folder, limit=timeout_seconds, together=True
    )
    printed = "\n".join(f"--- rank {r}\n{log[-4000:]}" for r, log in enumerate(ended.logs))
    said = f"exit codes {ended.codes} (None: was still running)\n{printed}"
    assert ended.codes == [0] * ranks, said
    for log in ended.logs:
        assert_no_deprecation(log)


def run_job(job: dict[str, Any], ranks: int, folder: Path) -> dict[str, Any]:
    """Run `two_ranks.py` and return what its rank 0 wrote.

    A job without settings, which others are compared with, runs once for all processes of tests.
    """
    key = sha256(json.dumps([job, ranks], sort_keys=True).encode()).hexdigest()[:16]
    known = Path(os.environ["SPPO_TESTS_HF_HOME"]) / "plain" / f"{key}.json"
    if "settings" not in job and known.exists():
        return json.loads(known.read_text())
    out = folder / "result.json"
    run_ranks("tests.integrations.two_ranks", {**job, "out": str(out)}, ranks, folder)
    text = out.read_text()
    if "settings" not in job:
        write_atomically(known, text)
    return json.loads(text)


def series(result: dict[str, Any], name: str) -> list[float]:
    """Return the numbers of this name in the history of a job of `two_ranks.py`."""
    return [entry[name] for entry in result["history"] if name in entry]


def assert_same_run(ours: dict[str, Any], plain: dict[str, Any], names: tuple[str, ...]) -> None:
    """Check that a job logged the numbers of one without SPPO, and ended with its weights.

    Of a pipeline these are those of the first stage, which rank 0 holds.
    """
    near = EXACT if plain.get("float64") else NEAR
    for name in names:
        expected = series(plain, name)
        assert expected
        assert series(ours, name) == pytest.approx(expected, abs=near, rel=near), name
    assert 0 < len(ours["weights"]) <= len(plain["weights"])
    for name, value in ours["weights"].items():
        assert value == pytest.approx(plain["weights"][name], rel=10 * near), name


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make(folder)` has filled, in one of the processes of tests.

    A fixture of a module is made by each process that runs a test of it.
    """
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / name
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / f"{name}.made").exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            (base / f"{name}.made").touch()
    return folder
