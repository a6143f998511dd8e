"""However a worker ends, there is a row: measured, out of memory, killed, too slow, or failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sppo_hf.cli.benchmark.process import last_line, run_in_process, worker_environment
from sppo_hf.cli.benchmark.results import Row
from tests.cli.benchmark.made_rows import JOB, speed_row
from tests.cli.benchmark.tiny import tiny_job

pytestmark = pytest.mark.process


def run(folder: Path, script: str, *, timeout_seconds: float = 60.0, row: Row | None = None) -> Row:
    """Run a worker that is a few lines of Python; `ROW` is a row in JSON, already a line."""
    text = json.dumps((row or speed_row("plain", 8192, 1.5)).to_dict())
    lines = f"import sys, os, time, signal\nROW = {text!r}\n{script}"
    command = (sys.executable, "-c", lines)
    return run_in_process(
        JOB, timeout_seconds=timeout_seconds, log=folder / "logs" / "a.log", command=command
    )


def test_the_last_line_is_the_row(tmp_path: Path) -> None:
    row = run(tmp_path, "print('chatter'); print(ROW); print('{\"cut off')")
    assert row.status == "measured"
    assert row.numbers.median_step_seconds == 1.5
    assert row.environment["device_name"] == "Pretended GPU"
    assert row.environment["command"].startswith("sppo")
    assert row.wall_seconds is not None


def test_out_of_memory_is_what_the_worker_says(tmp_path: Path) -> None:
    said = Row(status="out of memory", job=JOB, reason="device: CUDA out of memory")
    row = run(tmp_path, "print(ROW)", row=said)
    assert (row.status, row.reason) == (said.status, said.reason)


def test_killed_by_the_system(tmp_path: Path) -> None:
    so_far = speed_row("plain", 8192, 1.5, status="killed", host_peak_bytes=123)
    row = run(tmp_path, "print(ROW, flush=True); os.kill(os.getpid(), signal.SIGKILL)", row=so_far)
    assert row.status == "killed"
    assert "SIGKILL, which is usually the host running out of memory" in row.reason
    assert row.numbers.host_peak_bytes == 123, "what was known is kept"
    row = run(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)")
    # Not for want of memory, so longer lengths are still tried.
    assert (row.status, row.reason) == ("failed", "killed by SIGSEGV")
    assert row.job == JOB


def test_too_slow(tmp_path: Path) -> None:
    # A child of the worker's own must go with it, or it would hold the device.
    script = f"""
import subprocess
print(ROW, flush=True)
child = subprocess.Popen(["sleep", "60"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
child.wait()
"""
    row = run(tmp_path, script, timeout_seconds=1.5)
    assert row.status == "timeout"
    assert "2 s, the limit (--timeout)" in row.reason
    assert row.numbers.median_step_seconds == 1.5
    pid = int((tmp_path / "pid").read_text())
    for _ in range(50):
        if not alive(pid):
            break
        time.sleep(0.1)
    assert not alive(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_worker_ends_with_the_benchmark_however_that_ends(tmp_path: Path) -> None:
    worker = (
        "import os, time; from sppo_hf.cli.benchmark.worker import end_with_parent;"
        f"end_with_parent(); open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()));"
        "time.sleep(120)"
    )
    script = f"""
from pathlib import Path
from sppo_hf.cli.benchmark.process import run_in_process
from tests.cli.benchmark.made_rows import JOB
run_in_process(
    JOB, timeout_seconds=60, log=Path({str(tmp_path / "log")!r}),
    command=({sys.executable!r}, "-c", {worker!r}),
)
"""
    driver = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[3])
    try:
        pid = int(wait_for(lambda: text_of(tmp_path / "pid")))
        assert alive(pid)
    finally:
        driver.kill()
        driver.wait()
    wait_for(lambda: not alive(pid), seconds=30)  # long before it would end by itself


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What it returns as soon as that is true."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and waits to be noticed does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("print(ROW); raise ValueError('no such thing')", "ValueError: no such thing"),
        ("raise OSError('a'); print(ROW)", "OSError: a"),
        ("sys.exit(3)", "exit status 3"),
        ("pass", "exit status 0"),
    ],
)
def test_other_errors(tmp_path: Path, script: str, reason: str) -> None:
    row = run(tmp_path, script)
    assert row.status == "failed"
    assert row.reason == reason


def test_errors_are_told_from_what_follows_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback\n  File\ntorch.AcceleratorError: bad launch\nwarning: leaked\n\n")
    assert last_line(log) == "torch.AcceleratorError: bad launch"
    log.write_text("only words\n")
    assert last_line(log) == "only words"
    log.write_text("")
    assert last_line(log) == ""


def test_one_gpu_is_shown_and_memory_is_mapped_in_pages() -> None:
    shown = worker_environment({"CUDA_VISIBLE_DEVICES": "3,4", "A": "b"})
    given = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }
    assert shown == {"CUDA_VISIBLE_DEVICES": "3", "A": "b", **given}
    assert worker_environment({})["CUDA_VISIBLE_DEVICES"] == "0"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        own = {name: "max_split_size_mb:64", "CUDA_VISIBLE_DEVICES": "0"}
        own["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        assert worker_environment(own) == own


def test_a_real_worker_from_start_to_end(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    job = tiny_job(tmp_path, "sppo-full", lora_rank=4, steps=2)
    row = run_in_process(job, timeout_seconds=100, log=tmp_path / "log")
    assert row.status == "measured", row.reason
    assert row.job == job
    assert len(row.numbers.step_seconds) == 2
    assert row.environment["versions"]["torch"]
    assert row.environment["device_name"]
