"""Which jobs run, which do not, and in which order, with a fake worker."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sppo_hf.cli.benchmark.driver import (
    Benchmark,
    Workers,
    _row,
    extrapolate,
    extrapolate_length,
    last_line,
    uniform_layers,
    worker_environment,
)
from sppo_hf.cli.benchmark.results import Job, Numbers, ResultFile, Row
from sppo_hf.cli.benchmark.worker import _PR_SET_PDEATHSIG, end_with_parent
from tests.cli.benchmark.made_rows import ENVIRONMENT, JOB, speed_row
from tests.cli.benchmark.tiny import FIELDS, tiny_job
from tests.integrations.launch import run_ranks
from tests.sweeps import ALL


class PretendedWorker:
    """Trains up to a length by contender, with seconds that are linear in layers."""

    def __init__(self, **max_tokens: int) -> None:
        self.max_tokens = {name.replace("_", "-"): tokens for name, tokens in max_tokens.items()}
        self.jobs: list[Job] = []
        self.fails: Callable[[Job], Row] = lambda job: Row(
            status="out of memory", job=job, reason="device: full", environment=ENVIRONMENT
        )

    def __call__(self, job: Job) -> Row:
        self.jobs.append(job)
        most = self.max_tokens.get(job.contender, 10**9)
        if job.layers is None and job.total_tokens > most:
            return self.fails(job)
        if job.trace is not None:
            Path(job.trace).write_text("a trace")
        seconds = job.total_tokens * (1 + (job.layers or FIELDS["num_hidden_layers"]))
        numbers = Numbers(
            step_seconds=(seconds,),
            median_step_seconds=seconds,
            tokens_per_second=job.total_tokens / seconds,
            planned_longest_tokens=640 if job.predict else None,
        )
        return Row(status="measured", job=job, numbers=numbers, environment=ENVIRONMENT)

    @property
    def ran(self) -> list[tuple[str, int]]:
        return [(job.contender, job.total_tokens) for job in self.jobs]


def benchmark(folder: Path, worker: Callable[[Job], Row], *names: str, **changes: Any) -> Benchmark:
    settings: dict[str, Any] = {
        "base": tiny_job(folder, device="cuda"),
        "contenders": names,
        "file": ResultFile(folder),
        "run": worker,
        "on_row": lambda _: None,
    }
    return Benchmark(**{**settings, **changes})


def statuses(folder: Path, *kinds: Any) -> dict[tuple[str, int], str]:
    rows = ResultFile(folder).rows(*kinds or ("speed",))
    return {(row.job.contender, row.job.total_tokens): row.status for row in rows}


def test_short_lengths_first_and_every_row_is_kept(tmp_path: Path) -> None:
    worker = PretendedWorker()
    seen: list[Row] = []
    benchmark(tmp_path, worker, "plain", "sppo-auto", on_row=seen.append).measure([256, 64, 256])
    order = [("plain", 64), ("sppo-auto", 64), ("plain", 256), ("sppo-auto", 256)]
    assert worker.ran == order
    assert ResultFile(tmp_path).rows() == seen


def test_jobs_with_rows_are_not_run_again(tmp_path: Path) -> None:
    benchmark(tmp_path, PretendedWorker(plain=64), "plain", "ideal").measure([64, 128])
    worker, seen = PretendedWorker(), []
    benchmark(tmp_path, worker, "plain", "ideal", on_row=seen.append).measure([64, 128, 256])
    assert worker.ran == [("ideal", 256)], "plain ran out of memory at 128 already"
    assert len(seen) == 6
    worker = PretendedWorker()
    benchmark(tmp_path, worker, "plain", again=True).measure([64, 128])
    assert worker.ran == [("plain", 64), ("plain", 128)]
    assert statuses(tmp_path)["plain", 128] == "measured"
    worker = PretendedWorker()
    other = benchmark(tmp_path, worker, "plain")
    dataclasses.replace(other, base=other.base.replace(dtype="bfloat16")).measure([64])
    assert worker.ran == [("plain", 64)], "other settings are another measurement"


@pytest.mark.parametrize("status", ["out of memory", "killed", "timeout"])
def test_lengths_above_one_that_did_not_fit_are_not_tried(tmp_path: Path, status: Any) -> None:
    worker = PretendedWorker(checkpointing=64)
    worker.fails = lambda job: Row(status=status, job=job, reason="r", environment=ENVIRONMENT)
    benchmark(tmp_path, worker, "checkpointing", "sppo-auto").measure([64, 128, 256, 512])
    assert [run for run in worker.ran if run[0] == "checkpointing"] == [
        ("checkpointing", 64),
        ("checkpointing", 128),
    ]
    found = statuses(tmp_path)
    assert found["checkpointing", 128] == status
    assert found["checkpointing", 256] == found["checkpointing", 512] == "not tried"
    assert found["sppo-auto", 512] == "measured"
    reasons = {row.reason for row in ResultFile(tmp_path).rows() if row.status == "not tried"}
    assert reasons == {f"{status} at 128 tokens already"}


def test_a_failed_contender_is_tried_at_the_next_length(tmp_path: Path) -> None:
    worker = PretendedWorker(plain=0)
    worker.fails = lambda job: Row(status="failed", job=job, reason="KeyError: a")
    benchmark(tmp_path, worker, "plain").measure([64, 128])
    assert worker.ran == [("plain", 64), ("plain", 128)]
    mended = PretendedWorker()
    benchmark(tmp_path, mended, "plain").measure([64, 128])
    assert mended.ran == worker.ran, "what failed may have been mended"
    assert set(statuses(tmp_path).values()) == {"measured"}


def test_a_missing_package_gives_a_row_until_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: set[str] = set()
    monkeypatch.setattr(
        "sppo_hf.cli.benchmark.contenders.find_spec", lambda name: name in installed or None
    )
    worker = PretendedWorker()
    benchmark(tmp_path, worker, "plain+liger").measure([64])
    assert worker.ran == []
    assert statuses(tmp_path) == {("plain+liger", 64): "not available"}
    installed |= {"liger_kernel", "triton"}
    benchmark(tmp_path, worker, "plain+liger").measure([64])
    assert statuses(tmp_path) == {("plain+liger", 64): "measured"}


def test_the_ideal_is_extrapolated_where_it_does_not_fit(tmp_path: Path) -> None:
    worker = PretendedWorker(ideal=64)
    benchmark(tmp_path, worker, "ideal").measure([64, 128, 256])
    assert [(job.total_tokens, job.layers) for job in worker.jobs] == [
        *[(64, None), (128, None), (128, 1), (128, 2)],
        *[(256, 1), (256, 2)],  # the whole model is not tried once more
    ]
    rows = {row.job.total_tokens: row for row in ResultFile(tmp_path).rows("speed")}
    assert [rows[n].status for n in (64, 128, 256)] == ["measured", *["extrapolated"] * 2]
    for tokens in (128, 256):
        assert rows[tokens].numbers.median_step_seconds == tokens * 3, "as two layers would take"
        assert rows[tokens].numbers.model_flops is not None
    assert "extrapolated to 2 layers" in rows[128].reason
    assert "out of memory, device: full" in rows[128].reason
    worker = PretendedWorker()
    benchmark(tmp_path, worker, "ideal").measure([64, 128, 256])
    assert worker.ran == []


def test_the_ideal_of_unlike_layers_is_not_extrapolated(tmp_path: Path) -> None:
    worker = PretendedWorker(ideal=0)
    kinds = {"layer_types": ["full_attention", "sliding_attention"]}
    asked = benchmark(tmp_path, worker, "ideal")
    (tmp_path / "config.json").write_text(json.dumps({**FIELDS, **kinds}))
    asked.measure([64])
    (row,) = ResultFile(tmp_path).rows()
    assert row.status == "out of memory"
    assert "its layers differ in kind" in row.reason


def test_the_ideal_is_extrapolated_from_shorter_lengths(
    tmp_path: Path,
) -> None:
    worker = PretendedWorker(ideal=0)
    most = 16_384
    run = worker.__call__

    def two_layers_end_at_some_length(job: Job) -> Row:
        if job.layers == 2 and job.total_tokens > most:
            worker.jobs.append(job)
            return worker.fails(job)
        row = run(job)
        if not row.trained:
            return row
        seconds = job.total_tokens * (1 + (job.layers or 0) * (1 + job.total_tokens / 1e4))
        numbers = dataclasses.replace(row.numbers, median_step_seconds=seconds)
        return dataclasses.replace(row, numbers=numbers)

    asked = benchmark(tmp_path, worker, "ideal", run=two_layers_end_at_some_length)
    asked.measure([65_536, 131_072])
    rows = {row.job.total_tokens: row for row in ResultFile(tmp_path).rows("speed")}
    for tokens in (65_536, 131_072):
        assert rows[tokens].status == "extrapolated", rows[tokens].reason
        seconds = tokens * (1 + 2 * (1 + tokens / 1e4))
        assert rows[tokens].numbers.median_step_seconds == pytest.approx(seconds)
        assert "from 8,192 and 16,384" in rows[tokens].reason
    tried = [(job.total_tokens, job.layers) for job in worker.jobs]
    assert len(tried) == len(set(tried)), "nothing is tried twice"
    assert (131_072, 2) not in tried, "longer than what did not fit"


def test_the_ideal_fails_where_no_layer_fits(tmp_path: Path) -> None:
    worker = PretendedWorker()
    run = worker.fails
    benchmark(tmp_path, worker, "ideal", run=run).measure([64])
    (row,) = ResultFile(tmp_path).rows("speed")
    assert row.status == "out of memory"
    assert "nor could 1 layer be measured" in row.reason
    assert "no two lengths down to 4,096 tokens" in row.reason


def test_missing_traces_of_sppo_are_made(tmp_path: Path) -> None:
    benchmark(tmp_path, PretendedWorker(), "plain", "sppo-auto").measure([64])
    for expected in ([("sppo-auto", 64)], []):
        worker = PretendedWorker()
        benchmark(tmp_path, worker, "plain", "sppo-auto", trace_folder=tmp_path).measure([64])
        assert worker.ran == expected
    assert (tmp_path / "trace-sppo-auto-64.json.gz").exists()


def test_the_longest_is_searched_and_resumed(tmp_path: Path) -> None:
    worker = PretendedWorker(checkpointing=200, sppo_auto=700)
    asked = benchmark(tmp_path, worker, "checkpointing", "sppo-auto")
    asked.find_longest(step_tokens=64, max_tokens=4096)
    rows = {row.job.contender: row for row in ResultFile(tmp_path).rows("longest")}
    theirs, ours = rows["checkpointing"].numbers, rows["sppo-auto"].numbers
    assert (theirs.longest_tokens, theirs.failed_tokens) == (192, 256)
    assert (ours.longest_tokens, ours.failed_tokens) == (640, 704)
    assert (theirs.planned_longest_tokens, ours.planned_longest_tokens) == (None, 640)
    assert rows["sppo-auto"].reason == "704 tokens: out of memory, device: full"
    # Ours plans anew after two steps, and that plan has to fit too.
    warm_up = {job.contender: (job.warm_up, job.steps) for job in worker.jobs}
    assert warm_up == {"checkpointing": (1, 1), "sppo-auto": (2, 1)}
    # Stopped in the middle: the tries that are there are not run again.
    lines = (tmp_path / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "results.jsonl").write_text("".join(lines[:-3]))
    again = PretendedWorker(sppo_auto=700)
    benchmark(tmp_path, again, "checkpointing", "sppo-auto").find_longest(
        step_tokens=64, max_tokens=4096
    )
    assert len(again.jobs) == 2
    assert ResultFile(tmp_path).rows("longest") == list(rows.values())


def test_searches_that_end_at_either_end(tmp_path: Path) -> None:
    benchmark(tmp_path, PretendedWorker(plain=0), "plain", "ideal").find_longest(
        step_tokens=64, max_tokens=128
    )
    plain, ideal = ResultFile(tmp_path).rows("longest")
    assert (plain.status, plain.numbers.longest_tokens) == ("out of memory", 0)
    assert (ideal.status, ideal.numbers.longest_tokens) == ("measured", 128)
    assert ideal.reason == "reached the limit of the search"


pytestmark = pytest.mark.process


def run(folder: Path, script: str, *, timeout_seconds: float = 60.0, row: Row | None = None) -> Row:
    """Run a worker that is a few lines of Python; `ROW` is a row in JSON, already a line."""
    text = json.dumps((row or speed_row("plain", 8192, 1.5)).to_dict())
    lines = f"import sys, os, time, signal\nROW = {text!r}\n{script}"
    return fakes(folder, lines, timeout_seconds).run(JOB)


def fakes(folder: Path, lines: str, timeout_seconds: float = 60.0) -> Workers:
    command = (sys.executable, "-c", lines)
    return Workers(timeout_seconds=timeout_seconds, logs=folder / "logs", command=command)


def test_the_last_line_is_the_row(tmp_path: Path) -> None:
    row = run(tmp_path, "print('chatter'); print(ROW); print('{\"cut off')")
    assert row.status == "measured"
    assert row.numbers.median_step_seconds == 1.5
    assert row.environment["device_name"] == "Pretended GPU"
    assert row.environment["command"].startswith("sppo")
    assert row.wall_seconds is not None


def test_out_of_memory_is_reported_by_the_worker(tmp_path: Path) -> None:
    said = Row(status="out of memory", job=JOB, reason="device: CUDA out of memory")
    row = run(tmp_path, "print(ROW)", row=said)
    assert (row.status, row.reason) == (said.status, said.reason)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler: what a shell starts in the background may have inherited none."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_what_was_known_when_interrupted_is_kept(tmp_path: Path) -> None:
    """As where a machine is there for minutes: the row is run again, unless it was there before."""
    text = json.dumps(speed_row("plain", 8192, 1.5, status="killed").to_dict())
    lines = f"import os, signal, time\nprint({text!r}, flush=True)\n"
    lines += "os.kill(os.getppid(), signal.SIGINT)\ntime.sleep(60)"
    interrupted = fakes(tmp_path, lines).run

    with pytest.raises(KeyboardInterrupt):
        benchmark(tmp_path, interrupted, "plain").measure([8192])
    (row,) = ResultFile(tmp_path).rows("speed")
    assert row.status == "failed"
    assert row.reason.startswith("interrupted after ")
    assert row.numbers.median_step_seconds == 1.5
    assert row.environment["command"].startswith("sppo")

    benchmark(tmp_path, PretendedWorker(), "plain").measure([8192])
    (before,) = ResultFile(tmp_path).rows("speed")
    assert before.status == "measured"
    again = dataclasses.replace(benchmark(tmp_path, interrupted, "plain"), again=True)
    with pytest.raises(KeyboardInterrupt):
        again.measure([8192])
    assert ResultFile(tmp_path).rows("speed") == [before]


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
    wait_for(lambda: not alive(pid), seconds=5)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_worker_ends_with_the_benchmark_however_that_ends(tmp_path: Path) -> None:
    # Of the worker's module that function alone, for all of it takes ten seconds to import.
    worker = f"""
import contextlib, ctypes, os, signal, sys, time
_PR_SET_PDEATHSIG = {_PR_SET_PDEATHSIG}
{inspect.getsource(end_with_parent)}
end_with_parent(int(sys.argv[1]))
open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
time.sleep(120)
"""
    script = f"""
from pathlib import Path
from sppo_hf.cli.benchmark.driver import Workers
from tests.cli.benchmark.made_rows import JOB
command = {sys.executable!r}, "-c", {worker!r}
Workers(timeout_seconds=60, logs=Path({str(tmp_path)!r}), command=command).run(JOB)
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
    """Wait until `what` returns something true, and return that."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return found


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and waits to be noticed does not."""
    try:
        return state(pid) != "Z"
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


def test_the_error_is_found_before_later_warnings(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback\n  File\ntorch.AcceleratorError: bad launch\nwarning: leaked\n\n")
    assert last_line(log) == "torch.AcceleratorError: bad launch"
    log.write_text("only words\n")
    assert last_line(log) == "only words"
    log.write_text("")
    assert last_line(log) == ""


# What a fake worker does that waits for its job: it notes its number, and a row is its last line.
WAITS = """
import json, os, signal, sys, time
from pathlib import Path
with open(NOTES, "a") as notes:
    print(os.getpid(), file=notes)
text = sys.stdin.read()
if not text:
    sys.exit()
row["job"] = json.loads(text)
def tell(**numbers):
    print(json.dumps(row | {"numbers": numbers}), flush=True)
"""


def waiting(folder: Path, script: str) -> Workers:
    """Fake workers that wait for their job, the next one early, and then run a script."""
    row = speed_row("plain", 8192, 1.5).to_dict()
    notes = str(folder / "notes")
    workers = fakes(folder, f"row = {row!r}\nNOTES = {notes!r}\n{WAITS}\n{script}")
    workers.ahead = True
    return workers


def started(folder: Path, number: int) -> list[int]:
    """The processes of all workers, once there are so many."""
    found = wait_for(lambda: len(text_of(folder / "notes").split()) == number)
    assert found
    return [int(text) for text in text_of(folder / "notes").split()]


def test_the_next_worker_waits_while_a_job_runs(tmp_path: Path) -> None:
    workers = waiting(tmp_path, "tell(median_step_seconds=os.getpid())")
    with closing(workers):
        ran = [workers.run(JOB.replace(contender=name)) for name in ("plain", "ideal")]
        pids = {int(row.numbers.median_step_seconds or 0) for row in ran}
        (third,) = {*started(tmp_path, 3)} - pids
        assert alive(third)
    assert not alive(third), "it has no job, and nothing to wait for"
    assert len(pids) == 2
    assert [row.job.contender for row in ran] == ["plain", "ideal"]
    assert {row.status for row in ran} == {"measured"}
    logs = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert logs == ["ideal-8192.log", "plain-8192.log"]


def test_a_worker_that_died_before_its_job_is_replaced(tmp_path: Path) -> None:
    workers = waiting(tmp_path, "tell(median_step_seconds=os.getpid())")
    with closing(workers):
        workers.start()
        (first,) = started(tmp_path, 1)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: not alive(first))
        row = workers.run(JOB)
        assert row.status == "measured"
        assert row.numbers.median_step_seconds in {*started(tmp_path, 3)} - {first}
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["plain-8192.log"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_next_worker_stands_still_while_steps_are_measured(tmp_path: Path) -> None:
    script = f"""
tell()
time.sleep(0.5)
tell(warm_up_seconds=[1.0] * {JOB.warm_up})
while not Path({str(tmp_path / "seen")!r}).exists():
    time.sleep(0.05)
"""
    workers = waiting(tmp_path, script)
    states: list[str] = []

    def the_next() -> int:
        process = wait_for(lambda: workers._next)
        return process.pid

    def look() -> None:
        started(tmp_path, 2)
        wait_for(lambda: state(the_next()) == "T")
        states.append(state(the_next()))
        (tmp_path / "seen").touch()

    looker = threading.Thread(target=look)
    looker.start()
    with closing(workers):
        assert workers.run(JOB).status == "measured"
        looker.join()
        assert states == ["T"]
        wait_for(lambda: state(the_next()) != "T")
        # Its own job comes as if it had not been stopped.
        assert workers.run(JOB).status == "measured"


@pytest.mark.usefixtures("interruptible")
def test_no_worker_is_left_behind_by_an_interruption(tmp_path: Path) -> None:
    script = """
while len(open(NOTES).read().split()) < 2:
    time.sleep(0.05)
os.kill(int(sys.argv[1]), signal.SIGINT)
time.sleep(60)
"""
    with pytest.raises(KeyboardInterrupt), closing(waiting(tmp_path, script)) as workers:
        workers.run(JOB)
    assert not any(map(alive, started(tmp_path, 2)))


def test_a_waiting_worker_ends_when_the_benchmark_is_killed(tmp_path: Path) -> None:
    notes = str(tmp_path / "notes")
    worker = f"import os, sys; print(os.getpid(), file=open({notes!r}, 'w')); sys.stdin.read()"
    script = f"""
import time
from pathlib import Path
from sppo_hf.cli.benchmark.driver import Workers
command = {sys.executable!r}, "-c", {worker!r}
Workers(timeout_seconds=60, logs=Path({str(tmp_path)!r}), command=command).start()
time.sleep(60)
"""
    driver = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[3])
    try:
        (pid,) = started(tmp_path, 1)
        assert alive(pid)
    finally:
        driver.kill()
        driver.wait()
    wait_for(lambda: not alive(pid), seconds=30)


def test_workers_see_one_gpu_with_expandable_segments() -> None:
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
    """Started with everything asked for; else forked, which spares it ten seconds of imports."""
    pytest.importorskip("peft")
    job = tiny_job(tmp_path, "sppo-full", lora_rank=4, steps=2)
    if ALL:
        row = Workers(timeout_seconds=100, logs=tmp_path / "logs").run(job)
    else:
        given = {"given": dataclasses.asdict(job)}
        run_ranks("tests.cli.benchmark.worker_rank", given, 1, tmp_path)
        *_, row = filter(None, map(_row, (tmp_path / "rank0.log").read_text().splitlines()))
    assert row.status == "measured", row.reason
    assert row.job == job
    assert len(row.numbers.step_seconds) == 2
    assert row.environment["versions"]["torch"]
    assert row.environment["device_name"]


def test_a_layer_costs_what_the_second_adds() -> None:
    ends, layer, gib = 0.25, 0.5, 2**30
    one, two = (
        speed_row(
            "ideal",
            65_536,
            ends + layers * layer,
            job={"layers": layers},
            device_allocated_bytes=(3 + 7 * layers) * gib,
            kernel="cudnn",
        )
        for layers in (1, 2)
    )
    row = extrapolate(one, two, num_layers=32, model_flops=1e15)
    assert row.status == "extrapolated"
    assert row.trained
    assert row.job == one.job.replace(layers=None)
    n = row.numbers
    assert n.median_step_seconds == pytest.approx(ends + 32 * layer)
    assert n.tokens_per_second == pytest.approx(65_536 / 16.25)
    assert n.model_tflops == pytest.approx(1e3 / 16.25)
    assert n.device_allocated_bytes == (3 + 7 * 32) * gib
    assert n.step_seconds == (), "no step was measured"
    assert (n.mfu, n.kernel) == (None, "cudnn")
    assert "32 layers from 1 and 2" in row.reason


def test_mfu_needs_a_known_device() -> None:
    one, two = (speed_row("ideal", 1024, seconds) for seconds in (1.0, 1.5))
    two.environment["device_name"] = "NVIDIA H100 80GB HBM3"
    try:
        row = extrapolate(one, two, num_layers=3, model_flops=989e12)
    finally:
        two.environment["device_name"] = "Pretended GPU"
    assert row.numbers.mfu == pytest.approx(1 / 2)


def test_noise_that_makes_layers_free_is_no_result() -> None:
    one, two = (speed_row("ideal", 64, seconds) for seconds in (1.0, 0.5))
    row = extrapolate(one, two, num_layers=32, model_flops=1.0)
    assert row.status == "failed"
    assert "two layers were not slower" in row.reason


def test_layers_of_several_kinds_are_not_extrapolated() -> None:
    assert uniform_layers({})
    assert uniform_layers({"layer_types": ["full_attention"] * 3})
    assert not uniform_layers({"layer_types": ["full_attention", "sliding_attention"]})


def test_a_length_is_on_the_curve_of_two_shorter_ones() -> None:
    def seconds(tokens: int) -> float:
        return 2e-4 * tokens + 3e-9 * tokens**2

    rows = [
        speed_row("ideal", n, seconds(n), kernel="cudnn", device_allocated_bytes=10**9 + 1000 * n)
        for n in (16_384, 32_768)
    ]
    row = extrapolate_length(*rows, total_tokens=131_072, model_flops=1e15)
    assert row.status == "extrapolated"
    assert row.job == rows[0].job.replace(total_tokens=131_072)
    n = row.numbers
    assert n.median_step_seconds == pytest.approx(seconds(131_072))
    assert n.tokens_per_second == pytest.approx(131_072 / seconds(131_072))
    assert n.model_tflops == pytest.approx(1e3 / seconds(131_072))
    assert (n.device_allocated_bytes, n.kernel) == (10**9 + 131_072_000, "cudnn")
    assert row.reason == "extrapolated to 131,072 tokens from 16,384 and 32,768"


@pytest.mark.parametrize("longer", [1.9, 9.0])
def test_lengths_on_no_such_curve_are_no_result(longer: float) -> None:
    # Twice the length takes at least twice the time, and at most four times.
    rows = (speed_row("ideal", 8192, 1.0), speed_row("ideal", 16_384, longer))
    row = extrapolate_length(*rows, total_tokens=32_768, model_flops=1.0)
    assert row.status == "failed"
    assert "no curve" in row.reason
