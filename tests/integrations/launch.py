"""Start a job on gloo ranks, and fail with their output when one does not end well."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.deprecations import assert_no_deprecation

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 100


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment that a launcher would give to one rank; one rank needs none."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # A rank that dies of a signal says where it was.
    env["PYTHONFAULTHANDLER"] = "1"
    if ranks > 1:
        env |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    return env


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def run_ranks(
    command: list[str], ranks: int, folder: Path, *, timeout_seconds: float = TIMEOUT_SECONDS
) -> None:
    """Run a Python command line once per rank and wait for all.

    Raises:
        AssertionError: A rank failed or took too long; the message is what all of them printed.
    """
    port = free_port()
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment(rank, ranks, port),
            cwd=folder,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    deadline = time.monotonic() + timeout_seconds
    try:
        # A rank that fails leaves the others waiting for it: stop as soon as one has.
        while any(process.poll() is None for process in processes):
            failed = any(process.poll() not in (None, 0) for process in processes)
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    printed = "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in logs)
    assert codes == [0] * ranks, f"exit codes {codes} (None: still running)\n{printed}"
    for log in logs:
        assert_no_deprecation(log.read_text())


def run_job(job: dict[str, Any], ranks: int, folder: Path) -> dict[str, Any]:
    """Run `two_ranks.py` and return what its rank 0 wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "result.json"
    job = {**job, "folder": str(folder), "out": str(out)}
    script = Path(__file__).with_name("two_ranks.py")
    run_ranks([str(script), json.dumps(job)], ranks, folder)
    result: dict[str, Any] = json.loads(out.read_text())
    return result
