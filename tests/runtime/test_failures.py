"""A rank that throws, hangs or is killed ends all ranks of its pipeline, with its reason."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integrations.launch import environment, free_port

pytestmark = [pytest.mark.process, pytest.mark.slow]

TIMEOUT_SECONDS = 12
RANKS = 3


def _run(how: str, rank: int, folder: Path) -> tuple[list[int | None], list[str], float]:
    """Start the ranks, kill one if `how` says so; returns exit codes, logs, seconds until all end.

    Seconds count from the moment at which the rank failed.
    """
    job = {"pp_size": RANKS, "rank": rank, "how": how, "timeout": TIMEOUT_SECONDS}
    job["folder"] = str(folder)
    script = Path(__file__).with_name("failing_ranks.py")
    port = free_port()
    logs = [folder / f"rank{r}.log" for r in range(RANKS)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), json.dumps(job)],
            env=environment(r, RANKS, port),
            stdout=logs[r].open("w"),
            stderr=subprocess.STDOUT,
        )
        for r in range(RANKS)
    ]
    try:
        reached, deadline = folder / "reached", time.monotonic() + 60
        while not reached.exists() and time.monotonic() < deadline:
            if how == "config" and all(p.poll() is not None for p in processes):
                break
            time.sleep(0.02)
        if how == "die":
            time.sleep(0.2)
            os.kill(int(reached.read_text()), signal.SIGKILL)
        failed_at = time.monotonic()
        while any(p.poll() is None for p in processes) and time.monotonic() < failed_at + 60:
            time.sleep(0.05)
        seconds = time.monotonic() - failed_at
        return [p.poll() for p in processes], [log.read_text() for log in logs], seconds
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_rank_that_throws_ends_all_with_its_error_step_and_action(tmp_path):
    codes, logs, seconds = _run("throw", 1, tmp_path)
    assert all(code not in (None, 0) for code in codes), codes
    assert seconds < TIMEOUT_SECONDS
    for log in logs:
        assert "ValueError: sabotage" in log
        assert "(1B1: backward of stage 1, micro-batch 0, chunk 1)" in log


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_is_killed_ends_all(tmp_path, rank):
    codes, logs, seconds = _run("die", rank, tmp_path)
    assert codes[rank] == -signal.SIGKILL
    assert all(code not in (None, 0) for code in codes), codes
    assert seconds < TIMEOUT_SECONDS
    others = [log for r, log in enumerate(logs) if r != rank]
    assert all("PipelineError" in log or "sppo_hf: rank" in log for log in others), others


def test_a_rank_that_hangs_ends_all_within_the_timeout(tmp_path):
    # It still shows signs of life, so its neighbours' messages are what times out.
    codes, logs, seconds = _run("hang", 1, tmp_path)
    assert all(code not in (None, 0) for code in codes), codes
    assert seconds < 3 * TIMEOUT_SECONDS
    assert "sppo_hf: rank 1 ends because" in logs[1]


def test_ranks_that_disagree_say_so(tmp_path):
    codes, logs, _ = _run("config", 1, tmp_path)
    assert all(code not in (None, 0) for code in codes), codes
    assert any("about to run different steps" in log for log in logs)
