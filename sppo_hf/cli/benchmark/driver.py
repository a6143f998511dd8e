"""Benchmark: which jobs run, each in a worker process, and what is extrapolated from their rows.

Every row is written before the next job begins, and however a job ends there is a row: measured,
out of memory, killed, too slow, or failed. What a model that does not fit would need is
extrapolated from models of one layer and two, or from shorter lengths. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sppo_hf.cli.benchmark.contenders import IDEAL, parse
from sppo_hf.cli.benchmark.results import Job, Kind, Numbers, ResultFile, Row, Status
from sppo_hf.cli.common import model_path, trace_unknown_model
from sppo_hf.planning.config_file import load_config, read_fields
from sppo_hf.planning.feasibility import DTYPE_BYTES, search_longest
from sppo_hf.planning.machine import request_expandable_segments, set_max_connections
from sppo_hf.planning.model_profile import LoraShape, Training, find_profile
from sppo_hf.planning.model_shape import ModelShape, step_flops

PARTS = (1, 2)
"""Numbers of layers of the models that are measured to extrapolate from."""

SHORTEST_TOKENS = 4096
"""Shortest length to extrapolate from; on shorter ones kernels do not fill the device."""


def uniform_layers(fields: dict[str, Any]) -> bool:
    """Whether all decoder layers cost the same, by the `layer_types` of a `config.json`."""
    return len(set(fields.get("layer_types") or ())) <= 1


def extrapolate(one: Row, two: Row, *, num_layers: int, model_flops: float) -> Row:
    """Extrapolate to the whole model: each layer takes what the second adds to the first.

    Embedding, head, loss and fixed costs of a step are in the row of one layer.

    Returns:
        A row with status "extrapolated", from medians of steps; its peaks may be more than the
        device has. "failed" where two layers were not slower than one.
    """
    first, second = one.numbers.median_step_seconds, two.numbers.median_step_seconds
    assert first is not None, "parts that were measured have seconds"
    assert second is not None, "parts that were measured have seconds"
    seconds = first + (num_layers - 1) * (second - first)
    job = one.job.replace(layers=None)
    if seconds <= 0:
        return Row(
            status="failed",
            job=job,
            reason=f"two layers were not slower than one ({first} s), so "
            "nothing can be extrapolated; measure more steps",
            environment=two.environment,
        )
    reason = f"extrapolated to {num_layers} layers from 1 and 2"
    return _extrapolated(one, two, num_layers - 1, job, reason, seconds, model_flops)


def extrapolate_length(shorter: Row, longer: Row, *, total_tokens: int, model_flops: float) -> Row:
    """Extrapolate to a length at which not even two layers of the model fit.

    Seconds are b S + c S^2 of the length S, for the linear layers and causal attention; bytes are
    linear in S. At both lengths kernels must fill the device.

    Returns:
        A row with status "extrapolated"; "failed" where no such curve goes through the two.
    """
    first, second = shorter.job.total_tokens, longer.job.total_tokens
    times = shorter.numbers.median_step_seconds, longer.numbers.median_step_seconds
    assert times[0] is not None, "rows that trained have seconds"
    assert times[1] is not None, "rows that trained have seconds"
    job = longer.job.replace(total_tokens=total_tokens, layers=None)
    per_token = times[0] / first, times[1] / second
    square = (per_token[1] - per_token[0]) / (second - first)
    linear = per_token[0] - square * first
    if square < 0 or linear < 0:
        return Row(
            status="failed",
            job=job,
            reason=f"{times[0]:.3g} s at {first:,} and {times[1]:.3g} s at {second:,} tokens are on"
            " no curve b S + c S^2, so nothing can be extrapolated; measure more steps",
            environment=longer.environment,
        )
    seconds = linear * total_tokens + square * total_tokens**2
    reason = f"extrapolated to {total_tokens:,} tokens from {first:,} and {second:,}"
    times = (total_tokens - first) / (second - first)
    return _extrapolated(shorter, longer, times, job, reason, seconds, model_flops)


def _extrapolated(
    one: Row,
    largest: Row,
    times: float,
    job: Job,
    reason: str,
    seconds: float,
    model_flops: float,
) -> Row:
    """Return the row of a job that was not run, from two that were.

    Bytes are `one + times * (largest - one)`. Seconds and FLOPs are those of a step.
    """
    numbers = Numbers(
        model_flops=model_flops,
        device_allocated_bytes=_linear(one, largest, times, "device_allocated_bytes"),
        host_peak_bytes=_linear(one, largest, times, "host_peak_bytes"),
        kernel=largest.numbers.kernel,
    )
    device_name = str(largest.environment.get("device_name", ""))
    return Row(
        status="extrapolated",
        job=job,
        reason=reason,
        numbers=numbers.with_speed(seconds, job.total_tokens, device_name),
        environment=largest.environment,
    )


def _linear(one: Row, largest: Row, times: float, name: str) -> int | None:
    first, second = getattr(one.numbers, name), getattr(largest.numbers, name)
    return None if None in (first, second) else round(first + times * (second - first))


class Interrupted(KeyboardInterrupt):
    """The benchmark was interrupted while a job ran; `row` has what was known of the job."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.row = row


# Longer sequences would end in the same way.
_TOO_LONG: tuple[Status, ...] = (
    *("out of memory", "killed", "timeout", "not tried"),
    "extrapolated",  # because the whole model ended in one of the others
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Runs jobs and keeps their rows."""

    base: Job
    """Settings of all jobs; contender and length are replaced."""

    contenders: tuple[str, ...]
    """Names, in the order in which they run."""

    file: ResultFile
    """Holds the rows; jobs with a final row are not run again."""

    run: Callable[[Job], Row]
    """Runs one job, usually `Workers.run`."""

    on_row: Callable[[Row], None]
    """Called with every row, also with those of earlier runs."""

    again: bool = False
    """Whether jobs with a final row are run again."""

    trace_folder: Path | None = None
    """Folder for traces; None for no traces."""

    trace_all: bool = False
    """Whether every contender is traced, not only sppo."""

    def measure(self, lengths: Sequence[int]) -> None:
        """Measure every contender at every length, shorter lengths first."""
        for total_tokens in sorted(set(lengths)):
            for name in self.contenders:
                self.on_row(self._speed(self._job(name, total_tokens)))

    def find_longest(self, *, step_tokens: int, max_tokens: int) -> None:
        """Search the longest length that each contender trains."""
        for name in self.contenders:
            self.on_row(self._longest(name, step_tokens, max_tokens))

    def _job(self, name: str, total_tokens: int) -> Job:
        trace = None
        if self.trace_folder is not None and (self.trace_all or parse(name).offload is not None):
            trace = str(trace_path(self.trace_folder, name, total_tokens))
        return self.base.replace(contender=name, total_tokens=total_tokens, trace=trace)

    def _speed(self, job: Job) -> Row:
        finished = self._finished_row("speed", job)
        if finished is not None:
            return finished
        if parse(job.contender).base == IDEAL:
            return self._ideal(job)
        return self._keep("speed", job, self._try_or_skip(job))

    def _try_or_skip(self, job: Job, kind: Kind = "speed") -> Row:
        """Run a job unless it cannot run here, or a shorter length did not fit."""
        unavailable = _unavailable(job)
        if unavailable is not None:
            return unavailable
        for row in self.file.rows(kind):
            alike = row.job.replace(total_tokens=job.total_tokens).key() == job.key()
            shorter = row.job.total_tokens < job.total_tokens
            if alike and shorter and row.status in _TOO_LONG:
                if row.status == "not tried":
                    return Row(status="not tried", job=job, reason=row.reason)
                ended = "did not fit" if row.status == "extrapolated" else row.status
                reason = f"{ended} at {row.job.total_tokens:,} tokens already"
                return Row(status="not tried", job=job, reason=reason)
        return self._run(kind, job)

    def _run(self, kind: Kind, job: Job) -> Row:
        """Run a job; if that is interrupted, its row replaces none with more in it."""
        try:
            return self.run(job)
        except Interrupted as interrupted:
            known = self.file.find(kind, job)
            if known is None or not known.trained:
                self._keep(kind, job, interrupted.row)
            raise

    def _ideal(self, job: Job) -> Row:
        """Measure the whole model; if it does not fit, extrapolate from layers or from lengths."""
        whole = self._try_or_skip(job)
        if whole.status not in _TOO_LONG:
            return self._keep("speed", job, whole)
        if not uniform_layers(read_fields(model_path(job.model))):
            reason = f"{whole.reason}; not extrapolated, because its layers differ in kind"
            return self._keep("speed", job, dataclasses.replace(whole, reason=reason))
        row = self._from_layers(job)
        if row.status in _TOO_LONG and not row.trained:
            row = self._from_lengths(job, row.reason)
        if not row.trained:
            reason = f"{whole.reason}; {row.reason}"
            return self._keep("speed", job, dataclasses.replace(whole, reason=reason))
        reason = f"{row.reason} (the whole model: {whole.status}, {whole.reason})"
        return self._keep("speed", job, dataclasses.replace(row, reason=reason))

    def _from_layers(self, job: Job) -> Row:
        """Extrapolate from models of one layer and two; if one fails, return its row."""
        parts = []
        for layers in PARTS:
            part = job.replace(layers=layers, trace=None)
            row = self._finished_row("part", part)
            row = row or self._keep("part", part, self._try_or_skip(part, "part"))
            if not row.trained:
                name = f"{layers} layer{'s' * (layers > 1)}"
                reason = f"nor could {name} be measured ({row.status})"
                return dataclasses.replace(row, reason=reason)
            parts.append(row)
        shape = _shape(job)
        flops = float(step_flops(shape, 1, job.total_tokens))
        return extrapolate(*parts, num_layers=len(shape.layers), model_flops=flops)

    def _from_lengths(self, job: Job, reason: str) -> Row:
        """Extrapolate from the two longest lengths, each half of the next, that can be trained."""
        found: list[Row] = []
        total_tokens = job.total_tokens // 2
        while len(found) < 2 and total_tokens >= SHORTEST_TOKENS:
            shorter = job.replace(total_tokens=total_tokens, trace=None)
            row = self.file.find("speed", shorter)
            if row is None or row.status != "measured":
                row = self._from_layers(shorter)
            if row.trained:
                found.append(row)
            total_tokens //= 2
        if len(found) < 2:
            reason += f", and below no two lengths down to {SHORTEST_TOKENS:,} tokens could either"
            return Row(status="failed", job=job, reason=reason)
        flops = float(step_flops(_shape(job), 1, job.total_tokens))
        longer, shorter_row = found
        return extrapolate_length(
            shorter_row, longer, total_tokens=job.total_tokens, model_flops=flops
        )

    def _longest(self, name: str, step_tokens: int, max_tokens: int) -> Row:
        is_sppo = parse(name).offload is not None
        # sppo corrects its plan after the second step, and the new plan has to fit as well.
        base = self.base.replace(contender=name, warm_up=1 + is_sppo, steps=1, predict=is_sppo)
        job = base.replace(total_tokens=max_tokens)
        finished = self._finished_row("longest", job)
        if finished is not None:
            return finished
        unavailable = _unavailable(job)
        if unavailable is not None:
            return self._keep("longest", job, unavailable)
        tries: dict[int, Row] = {}

        def missing(total_tokens: int) -> int:
            part = base.replace(total_tokens=total_tokens)
            row = self._finished_row("try", part) or self._keep("try", part, self._run("try", part))
            self.on_row(row)
            tries[total_tokens] = row
            return -1 if row.trained else 1

        found = search_longest(missing, step_tokens=step_tokens, most_tokens=max_tokens)
        best = tries.get(found.longest_tokens)
        worst = None if found.failed_tokens is None else tries[found.failed_tokens]
        last = best or worst
        assert last is not None, "a search tries one length at least"
        return self._keep("longest", job, _summary(job, found.longest_tokens, last, worst))

    def _finished_row(self, kind: Kind, job: Job) -> Row | None:
        """Return the row of an earlier run; None if the job is to be run (again)."""
        row = self.file.find(kind, job)
        if row is None or self.again or not row.final:
            return None
        if job.trace is not None and row.trained and not Path(job.trace).exists():
            return None
        return row

    def _keep(self, kind: Kind, job: Job, row: Row) -> Row:
        row = dataclasses.replace(row, kind=kind, job=job)
        self.file.add(row)
        return row


def trace_path(folder: Path, contender: str, total_tokens: int) -> Path:
    """Return the path of the trace of a contender at a length."""
    return folder / f"trace-{contender}-{total_tokens}.json.gz"


def model_shape(job: Job, config: object) -> ModelShape:
    """Return the shape of a configuration's model, for FLOPs, which all contenders share.

    Raises:
        UnsupportedModelError: A size is missing.
    """
    lora = None
    if job.lora_rank is not None:
        lora = LoraShape(rank=job.lora_rank, dtype_bytes=DTYPE_BYTES[job.lora_dtype])
    size = 2 if job.autocast else DTYPE_BYTES[job.dtype]
    training = Training(dtype_bytes=size, parameter_bytes=size, lora=lora)
    return ModelShape.from_profile(find_profile(config, training, trace_unknown_model))


def _shape(job: Job) -> ModelShape:
    return model_shape(job, load_config(model_path(job.model)))


def _unavailable(job: Job) -> Row | None:
    """Return the row of a contender that cannot run here; None if it can."""
    contender = parse(job.contender)
    reason = contender.unavailable(lora=job.lora_rank is not None, device=job.device)
    return None if reason is None else Row(status="not available", job=job, reason=reason)


def _summary(job: Job, longest_tokens: int, last: Row, worst: Row | None) -> Row:
    """Return the row of a search: the longest length, and what ended the search."""
    reason = "reached the limit of the search"
    if worst is not None:
        reason = f"{worst.job.total_tokens:,} tokens: {worst.status}, {worst.reason}"
    numbers = last.numbers if last.trained else Numbers()
    return Row(
        status="measured" if longest_tokens else worst.status if worst else "failed",
        job=job,
        reason=reason,
        numbers=dataclasses.replace(
            numbers,
            longest_tokens=longest_tokens,
            failed_tokens=None if worst is None else worst.job.total_tokens,
        ),
        environment=last.environment,
    )


WORKER = (sys.executable, "-m", "sppo_hf.cli.benchmark.worker")

# Seconds that a worker has to end by itself before it is killed.
_GRACE_SECONDS = 10.0


class Workers:
    """Runs jobs, each in a process of its own.

    [Note: the worker after this one]
    A worker imports PyTorch and Transformers, which takes 15 to 40 s, and only then reads its job.
    So with `ahead` the next one is started when a job begins: it imports while that job makes its
    weights and warms up, is stopped while steps are measured, and then waits for its job. Until it
    has one it does nothing with the device. It ends with `close`, and, as its standard input does,
    with this process. One that died meanwhile is replaced.
    """

    def __init__(
        self, *, timeout_seconds: float, logs: Path, command: Sequence[str] = WORKER
    ) -> None:
        """Start nothing yet.

        Args:
            timeout_seconds: For one job, from when it is given to a worker.
            logs: Folder of the workers' errors, a file for each job.
            command: Reads a job as JSON from its standard input, to the end of that. This process's
                number is its last argument.
        """
        self.ahead = False
        """Whether the next worker is started early."""
        self._timeout_seconds = timeout_seconds
        self._logs = logs
        self._command = command
        self._next: subprocess.Popen[str] | None = None
        self._next_log = logs

    def start(self) -> None:
        """Start the worker of the next job, unless there is one that runs."""
        if self._next is not None and self._next.poll() is None:
            return
        self.close()
        self._logs.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=self._logs, prefix="next-", suffix=".log", delete=False
        ) as errors:
            self._next_log = Path(errors.name)
            self._next = subprocess.Popen(
                [*self._command, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=worker_environment(os.environ),
                # A process group of its own, to end the worker with all that it starts; but in the
                # same session, so that it ends with the benchmark's session.
                process_group=0,
            )

    def close(self) -> None:
        """End the worker that has no job, which has nothing to put in order."""
        if self._next is not None:
            self._signal_next(signal.SIGKILL)
            self._next.communicate()
            self._next_log.unlink(missing_ok=True)
            self._next = None

    def run(self, job: Job) -> Row:
        """Run a job.

        Returns:
            The worker's last row; if it did not end by itself, with a status and a reason for that.

        Raises:
            Interrupted: In place of KeyboardInterrupt, when the worker has been ended.
        """
        start_seconds = time.monotonic()
        self.start()
        process, self._next = self._next, None
        assert process is not None, "it was just started, or before"
        assert process.stdin is not None, "it is a pipe"
        layers = "" if job.layers is None else f"-{job.layers}-layers"
        log = self._next_log.rename(self._logs / f"{job.contender}-{job.total_tokens}{layers}.log")
        timed_out = interrupted = False
        lines: list[str] = []
        listener = threading.Thread(target=self._listen, args=(process, job, lines), daemon=True)
        listener.start()
        try:
            if self.ahead:
                self.start()
            with contextlib.suppress(BrokenPipeError), process.stdin as given:
                given.write(json.dumps(dataclasses.asdict(job)))
            listener.join(self._timeout_seconds)
            process.wait(max(0.0, start_seconds + self._timeout_seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            timed_out = True
        except KeyboardInterrupt:
            interrupted = True
        finally:
            if listener.is_alive() or process.poll() is None:
                _end(process)
                listener.join(_GRACE_SECONDS)
            self._signal_next(signal.SIGCONT)
        seconds = time.monotonic() - start_seconds
        row = next(filter(None, map(_row, reversed(lines))), Row(status="killed", job=job))
        status, reason = row.status, row.reason
        if interrupted:
            status, reason = "failed", f"interrupted after {seconds:,.0f} s"
        elif timed_out:
            limit = f"{self._timeout_seconds:,.0f} s, the limit (--timeout)"
            status, reason = "timeout", f"ended after {limit}"
        elif process.returncode < 0:
            # SIGKILL means that host memory ran out, which it would at every longer length too.
            status = "killed" if process.returncode == -signal.SIGKILL else "failed"
            reason = _killed_by(-process.returncode)
        elif process.returncode > 0 or row.status == "killed":
            status, reason = "failed", last_line(log) or f"exit status {process.returncode}"
        environment = {**row.environment, "command": shlex.join(["sppo", *sys.argv[1:]])}
        row = dataclasses.replace(
            row, status=status, reason=reason, wall_seconds=seconds, environment=environment
        )
        if interrupted:
            raise Interrupted(row)
        return row

    def _listen(self, process: subprocess.Popen[str], job: Job, lines: list[str]) -> None:
        """Collect the output of a worker, and stop the next one before steps are measured."""
        assert process.stdout is not None, "it is a pipe"
        with process.stdout as out:
            for line in out:
                lines.append(line)
                row = _row(line)
                if row is not None and len(row.numbers.warm_up_seconds) == job.warm_up:
                    self._signal_next(signal.SIGSTOP)

    def _signal_next(self, number: signal.Signals) -> None:
        if self._next is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._next.pid, number)


def worker_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a worker.

    It sees one GPU (with more, the Trainer uses `nn.DataParallel`). Unless the user has set these
    variables, all contenders have expandable segments, against fragmentation, and a hardware queue
    for each stream.
    """
    shown = variables.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    found = {**variables, "CUDA_VISIBLE_DEVICES": shown}
    request_expandable_segments(found)
    set_max_connections(found)
    return found


def last_line(log: Path) -> str:
    """Return the last error of a log; without one, its last line that is not blank."""
    with log.open(encoding="utf-8", errors="replace") as file:
        lines = deque((line.strip() for line in file if line.strip()), maxlen=200)
    # Warnings at exit, for one, may follow the error.
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return (errors or list(lines) or [""])[-1][:300]


def _end(process: subprocess.Popen[str]) -> None:
    """End a worker and all that it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE_SECONDS)
            return


def _killed_by(number: int) -> str:
    known = {one.value: one.name for one in signal.Signals}
    memory = ", which is usually the host running out of memory" if number == signal.SIGKILL else ""
    return f"killed by {known.get(number, f'signal {number}')}{memory}"


def _row(line: str) -> Row | None:
    """Read a line of a worker's output; None for one that is cut off, or a library's."""
    try:
        return Row.from_dict(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
