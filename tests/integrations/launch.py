"""Run a job on gloo ranks, and fail with their output when one does not end well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.deprecations import assert_no_deprecation
from tests.pipeline.fork_server import ROOT, environment, fork_server, free_port

__all__ = ["ROOT", "environment", "free_port", "run_job", "run_ranks"]

TIMEOUT_SECONDS = 100


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

    A job without settings, which others are compared with, runs once in a process of tests.
    """
    key = json.dumps([job, ranks], sort_keys=True)
    if key not in _plain:
        out = folder / "result.json"
        run_ranks("tests.integrations.two_ranks", {**job, "out": str(out)}, ranks, folder)
        if "settings" in job:
            return json.loads(out.read_text())
        _plain[key] = out.read_text()
    return json.loads(_plain[key])


_plain: dict[str, str] = {}
"""Output of jobs without settings, by job, as JSON."""
