"""A process that has imported everything and forks the ranks of one launch after another.

A rank that is started by itself spends seconds on imports; a forked one begins at once. So a test
may lose many launches:

    with Nursery("tests.runtime.failing_ranks") as nursery:
        ended = nursery.launch({"how": "throw"}, ranks=3, folder=tmp_path)

Each rank runs `main(job)` of the module, with what a launcher would set in its environment, as the
last call of its interpreter: what it raises is uncaught, and `sys.exit` ends it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.integrations.launch import environment, free_port


@dataclass(frozen=True)
class Ended:
    """What became of the ranks of a launch."""

    codes: list[int | None]
    """Exit status of each rank, negative for a signal; None if it had to be killed at the end."""
    logs: list[str]
    """All that each rank printed."""
    seconds: float
    """From the failure of one rank until the end of the last one of the others."""


class Nursery:
    """The process, from the side of the tests."""

    def __init__(self, module: str) -> None:
        """Start it, and wait for nothing."""
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), module],
            env=environment(0, 1, 0),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def launch(
        self, job: dict[str, Any], *, ranks: int, folder: Path, limit: float = 60.0
    ) -> Ended:
        """Run a job on some ranks until all have ended.

        Args:
            job: For `main`, in JSON types; `folder` is added to it. The rank that fails writes the
                file `reached` there before it does.
            ranks: How many.
            folder: For logs and files; is there.
            limit: Seconds after the failure (or after the start) at which all are killed.
        """
        port = free_port()
        task = {
            "job": {**job, "folder": str(folder)},
            "environments": [environment(rank, ranks, port) for rank in range(ranks)],
            "folder": str(folder),
            "limit": limit,
            "failing": job.get("rank"),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        logs = [(folder / f"rank{rank}.log").read_text() for rank in range(ranks)]
        return Ended(answer["codes"], logs, answer["seconds"])


def _fork_ranks(task: dict[str, Any]) -> list[int] | None:
    """Numbers of the new processes; None in each of them."""
    numbers = []
    for rank, variables in enumerate(task["environments"]):
        number = os.fork()
        if number == 0:
            os.environ.clear()
            os.environ.update(variables)
            log = os.open(f"{task['folder']}/rank{rank}.log", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            return None
        numbers.append(number)
    return numbers


def _wait_for(numbers: list[int], task: dict[str, Any]) -> dict[str, Any]:
    """Wait until all but the rank that fails have ended, or the limit has come."""
    codes: list[int | None] = [None] * len(numbers)
    ended_at = [0.0] * len(numbers)
    reached, failing = Path(task["folder"]) / "reached", task["failing"]
    failed_at, started_at = 0.0, time.monotonic()
    while True:
        if not failed_at and reached.exists():
            failed_at = time.monotonic()
        for rank, number in enumerate(numbers):
            if codes[rank] is None and (found := os.waitpid(number, os.WNOHANG))[0]:
                codes[rank], ended_at[rank] = os.waitstatus_to_exitcode(found[1]), time.monotonic()
        others = [rank for rank in range(len(numbers)) if rank != failing]
        late = time.monotonic() - (failed_at or started_at) > task["limit"]
        if late or all(codes[rank] is not None for rank in others):
            break
        time.sleep(0.02)
    # The rank that failed may be about to end, unless it is stopped.
    deadline = time.monotonic() + 10.0
    for rank, number in enumerate(numbers):
        while codes[rank] is None:
            if (found := os.waitpid(number, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(found[1])
            elif late or time.monotonic() > deadline or _is_stopped(number):
                os.kill(number, signal.SIGKILL)
                os.waitpid(number, 0)
                break
            else:
                time.sleep(0.02)
    last = max(ended_at[rank] or time.monotonic() for rank in others)
    return {"codes": codes, "seconds": last - (failed_at or started_at)}


def _is_stopped(number: int) -> bool:
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _serve() -> dict[str, Any] | None:
    """Answer tasks; returns a job where this process has become a rank."""
    for line in sys.stdin:
        task = json.loads(line)
        numbers = _fork_ranks(task)
        if numbers is None:
            return task["job"]
        sys.stdout.write(json.dumps(_wait_for(numbers, task)) + "\n")
        sys.stdout.flush()
    return None


if __name__ == "__main__":
    run = importlib.import_module(sys.argv[1]).main
    mine = _serve()
    if mine is not None:
        run(mine)
