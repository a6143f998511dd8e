"""A rank of a pipeline is killed in the middle of training: all end, and training goes on later."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sppo_hf.runtime.checkpoint_marks import what_is_torn
from tests.integrations.launch import environment, free_port, run_job

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]

TIMEOUT_SECONDS = 15
SETTINGS = {"pp_size": 2, "num_chunks": 3, "pp_timeout_seconds": TIMEOUT_SECONDS}
# The learning rate must not depend on where training is to end.
ARGUMENTS = {"lr_scheduler_type": "constant", "eval_strategy": "no"}


def _kill_one_rank_in_training(folder: Path) -> tuple[list[int | None], list[str], float]:
    """Train without end on two ranks, and kill the second when the fourth step is saved."""
    folder.mkdir()
    arguments = {**ARGUMENTS, "max_steps": 100_000, "save_strategy": "steps", "save_steps": 4}
    job = {"kind": "ddp", "rows": 4, "settings": SETTINGS, "arguments": arguments}
    job |= {"folder": str(folder), "out": str(folder / "never.json")}
    script, port = Path(__file__).with_name("two_ranks.py"), free_port()
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), json.dumps(job)],
            env=environment(rank, 2, port),
            cwd=folder,
            stdout=logs[rank].open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        saved, deadline = folder / "checkpoint-4", time.monotonic() + 90
        while time.monotonic() < deadline:
            if (saved / "trainer_state.json").exists() and what_is_torn(saved) is None:
                break
            time.sleep(0.02)
        os.kill(processes[1].pid, signal.SIGKILL)
        killed_at = time.monotonic()
        while any(p.poll() is None for p in processes) and time.monotonic() < killed_at + 60:
            time.sleep(0.05)
        seconds = time.monotonic() - killed_at
        return [p.poll() for p in processes], [log.read_text() for log in logs], seconds
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_killed_rank_ends_all_and_the_last_checkpoint_continues_the_curve(tmp_path):
    codes, logs, seconds = _kill_one_rank_in_training(tmp_path / "run")
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (None, 0), logs[0][-2000:]
    assert seconds < TIMEOUT_SECONDS
    assert "lost rank 1, last seen " in logs[0]
    assert "its process ended without an error" in logs[0]
    assert "lost rank 0" not in logs[0]
    assert "rank 0 failed" not in logs[0]

    last = max(
        int(path.name.partition("-")[2])
        for path in (tmp_path / "run").glob("checkpoint-*")
        if what_is_torn(path) is None
    )
    end = {**ARGUMENTS, "max_steps": last + 6}
    job = {"kind": "ddp", "rows": 4, "arguments": end}
    resumed = run_job({**job, "settings": SETTINGS, "resume": True}, 2, tmp_path / "run")
    plain = run_job(job, 1, tmp_path / "plain")
    for name in ("loss", "grad_norm"):
        ours, theirs = (
            {entry["step"]: entry[name] for entry in seen["history"] if name in entry}
            for seen in (resumed, plain)
        )
        assert set(ours) == set(theirs) == set(range(1, last + 7))
        assert ours == pytest.approx(theirs, abs=1e-4)
