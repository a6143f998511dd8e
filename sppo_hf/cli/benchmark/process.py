"""A worker process from its start to the row that comes of it, however it ends.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from sppo_hf.cli.benchmark.results import Job, Row, Status
from sppo_hf.planning.machine import connect_all_streams, expand_segments

WORKER = (sys.executable, "-m", "sppo_hf.cli.benchmark.worker")

# A worker that does not end by itself when it is told to is ended after so many seconds.
_GRACE_SECONDS = 10.0


def run_in_process(
    job: Job, *, timeout_seconds: float, log: Path, command: Sequence[str] = WORKER
) -> Row:
    """Runs a job in a process of its own.

    Returns:
        Its last row; where it did not come to its end, the last that was known, with a status and a
        reason that say how it ended.
    """
    began = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    timed_out = False
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [*command, json.dumps(job.to_dict())],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=worker_environment(os.environ),
            # A group of its own, so that all that it starts can be ended with it; no session of
            # its own, or it would outlive what ends the benchmark's session.
            process_group=0,
        )
        try:
            out, _ = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
            out = _end(process)
        except BaseException:
            _end(process)
            raise
    seconds = time.monotonic() - began
    row = _last_row(out) or Row(status="killed", job=job)
    row = dataclasses.replace(row, wall_seconds=seconds)
    environment = {**row.environment, "command": shlex.join(["sppo", *sys.argv[1:]])}
    if timed_out:
        reason = f"ended after {timeout_seconds:,.0f} s, the limit (--timeout)"
        return dataclasses.replace(
            row, status="timeout", reason=reason, numbers=row.numbers, environment=environment
        )
    if process.returncode < 0:
        # Only what ended for want of memory would end so at every longer length too.
        status: Status = "killed" if process.returncode == -signal.SIGKILL else "failed"
        return dataclasses.replace(
            row, status=status, reason=_killed_by(-process.returncode), environment=environment
        )
    if process.returncode > 0 or row.status == "killed":
        reason = last_line(log) or f"exit status {process.returncode}"
        return dataclasses.replace(row, status="failed", reason=reason, environment=environment)
    return dataclasses.replace(row, environment=environment)


def worker_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables for a worker.

    They show it one GPU (with more, a Trainer splits), and give every contender the allocator that
    leaves no holes and a queue for each stream, unless the user has said what he wants.
    """
    shown = variables.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    found = {**variables, "CUDA_VISIBLE_DEVICES": shown}
    expand_segments(found)
    connect_all_streams(found)
    return found


def last_line(log: Path) -> str:
    """Returns the last line of a log that is not blank; of a traceback that is the error."""
    with log.open(encoding="utf-8", errors="replace") as file:
        lines = deque((line.strip() for line in file if line.strip()), maxlen=200)
    # What was told to stderr after the error (a warning at exit, say) does not say what failed.
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return (errors or list(lines) or [""])[-1][:300]


def _end(process: subprocess.Popen[str]) -> str:
    """Ends a worker and all that it started; returns what it had written."""
    out = ""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            pass
        try:
            out, _ = process.communicate(timeout=_GRACE_SECONDS)
            break
        except subprocess.TimeoutExpired:
            continue
    return out or ""


def _killed_by(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number == signal.SIGKILL:
        return f"killed by {name}, which is usually the host running out of memory"
    return f"killed by {name}"


def _last_row(out: str) -> Row | None:
    for line in reversed(out.splitlines()):
        try:
            return Row.from_dict(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # cut off in the middle
    return None
