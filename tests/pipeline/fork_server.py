"""A process that has imported everything and forks the ranks of one launch after another.

A rank that is started by itself spends seconds on imports, and as much again on what torch does
when it is first asked; a forked one begins at once. So a test may lose many launches:

    ended = fork_server().launch("tests.pipeline.failing_ranks", job, ranks=3, folder=tmp_path)

or have several at a time, where ranks wait for a time limit.

Processes of tests (workers of xdist) have one each, forked from what the first to ask has started:
all is imported once. What all ranks of a launch would do in the same way, such as building models,
its module's `prepare(job)` does before the fork.

Each rank runs `main(job)` of the module, in `folder`, with what a launcher would set in its
environment, as the last call of its interpreter: what it raises is uncaught, and `sys.exit` ends
it. What it leaves in memory is left to the system, unless the job says `finalized`: to take apart
all that was imported, each page of it a copy of the server's, takes a rank half a second.
What another program would start itself may be forked too: `forked_python.py`.
Processes that a program does start: tests/test_run.py, tests/cli/benchmark/test_driver.py.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]

WARM = ("accelerate", "peft", "transformers.trainer", "transformers.models.llama", "sppo_hf")
"""Imported before the first fork; a launch's own module is before its fork."""


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
    """Return a port that was free a moment ago.

    It is below those that systems give to outgoing connections (from 32768 on Linux, from 49152
    elsewhere): any of these may be taken before this launch's first rank listens.
    """
    numbers = random.SystemRandom()
    while True:
        port = numbers.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass(frozen=True)
class Ended:
    """Exit statuses and logs of the ranks of a launch that has ended."""

    codes: list[int | None]
    """Exit status of each rank, negative for a signal; None if it had to be killed at the end."""
    logs: list[str]
    """All that each rank printed."""
    seconds: float
    """Seconds from the failure of one rank to the end of the last of the others."""


class ForkServer:
    """The process, from the side of the tests; ends when they let go of it."""

    def __init__(self) -> None:
        """Ask for one, and wait for nothing."""
        home = os.environ.get("SPPO_TESTS_HF_HOME") or tempfile.mkdtemp(prefix="sppo-tests-")
        self._errors = Path(home) / "fork_server.errors"
        self._channel = _connect(Path(home), self._errors).makefile("rw")

    def launch(
        self,
        module: str,
        job: dict[str, Any],
        *,
        ranks: int,
        folder: Path,
        limit: float = 60.0,
        together: bool = False,
        started: Callable[[list[int]], None] = lambda numbers: None,
    ) -> Ended:
        """Run a job on some ranks until all have ended.

        Args:
            module: Dotted name of the module whose `main` the ranks run.
            job: For `main`, in JSON types; `folder` is added to it. A rank that fails on purpose
                is named in it as `rank`, and writes the file `reached` in `folder` before it does.
            ranks: How many.
            folder: For logs and files, and where ranks run; is there.
            limit: Seconds after the failure (or after the start) at which all are killed.
            together: Whether all are killed as soon as one has failed.
            started: Called with the numbers of the processes once they have been started.
        """
        task = _task(module, job, ranks, folder, limit=limit, together=together)
        return self._run([task], lambda numbers: started(numbers[0]))[0]

    def launch_all(
        self, module: str, jobs: Sequence[dict[str, Any]], *, ranks: Sequence[int], folder: Path
    ) -> list[Ended]:
        """Run several jobs at a time, each in a folder of its own in `folder`; as `launch`."""
        tasks = []
        for index, (job, count) in enumerate(zip(jobs, ranks, strict=True)):
            own = folder / str(index)
            own.mkdir()
            tasks.append(_task(module, job, count, own))
        return self._run(tasks)

    def _run(
        self,
        tasks: list[dict[str, Any]],
        started: Callable[[list[list[int]]], None] = lambda numbers: None,
    ) -> list[Ended]:
        with contextlib.suppress(OSError):  # nothing will be answered
            self._channel.write(json.dumps(tasks) + "\n")
            self._channel.flush()
        started(self._answer())
        found = []
        for task, answer in zip(tasks, self._answer(), strict=True):
            files = [f"{task['folder']}/rank{r}.log" for r in range(len(task["environments"]))]
            logs = [Path(file).read_text() for file in files]
            found.append(Ended(answer["codes"], logs, answer["seconds"]))
        return found

    def _answer(self) -> Any:
        line = ""
        with contextlib.suppress(OSError):
            line = self._channel.readline()
        if not line:
            raise AssertionError(f"the fork server has ended: {self._errors.read_text()[-4000:]}")
        return json.loads(line)


def _task(
    module: str,
    job: dict[str, Any],
    ranks: int,
    folder: Path,
    *,
    limit: float = 60.0,
    together: bool = False,
) -> dict[str, Any]:
    port = free_port()
    return {
        "module": module,
        "job": {**job, "folder": str(folder)},
        "environments": [environment(rank, ranks, port) for rank in range(ranks)],
        "folder": str(folder),
        "limit": limit,
        "failing": job.get("rank"),
        "together": together,
    }


@functools.cache
def fork_server() -> ForkServer:
    """The one of this process, asked for when it is first needed."""
    return ForkServer()


_IDLE_SECONDS = 2.0
"""After which the process that imports looks whether anybody still needs it."""

_started: list[subprocess.Popen[bytes]] = []


def _connect(home: Path, errors: Path) -> socket.socket:
    """A connection to a fork server of one's own, forked from what the first to ask has started."""
    channel = socket.socket(socket.AF_UNIX)
    with _alone_in(home), short_path(home) as short:
        address = f"{short}/fork_server"
        try:
            channel.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            (home / "fork_server").unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener, errors.open("ab") as file:
                listener.bind(address)
                listener.listen(64)
                command = [sys.executable, str(Path(__file__).resolve()), str(home)]
                started = subprocess.Popen(
                    command, env=environment(0, 1, 0), stdin=listener, stdout=file, stderr=file
                )
            _started.append(started)
            # It is answered when all is imported; so is whoever connects meanwhile.
            channel.connect(address)
    return channel


@contextlib.contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """Another path of a folder, while this lasts: a socket's has 107 characters at most."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _alone_in(home: Path) -> Iterator[None]:
    """Only one process at a time starts what all share, or ends it."""
    with (home / "fork_server.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fork_servers(home: Path) -> socket.socket | None:
    """The connection of a new server, in its process; None here, when all of them have ended."""
    listener = socket.socket(fileno=os.dup(0))
    listener.settimeout(_IDLE_SECONDS)
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if _has_children():
                continue
            with _alone_in(home):
                if select.select([listener], [], [], 0)[0]:
                    continue
                (home / "fork_server").unlink()
                return None
        with connection:
            if os.fork() == 0:
                listener.close()
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                return connection.dup()


def _has_children() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _fork_ranks(task: dict[str, Any]) -> list[int] | None:
    """Numbers of the new processes; None in each of them."""
    numbers = []
    for rank, variables in enumerate(task["environments"]):
        number = os.fork()
        if number == 0:
            os.environ.clear()
            os.environ.update(variables)
            os.chdir(task["folder"])
            log = os.open(f"{task['folder']}/rank{rank}.log", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            return None
        numbers.append(number)
    return numbers


def _wait_for(numbers: list[int], task: dict[str, Any]) -> Generator[None, None, dict[str, Any]]:
    """Look, at each call, whether all but the rank that fails have ended or the limit has come."""
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
        late |= task["together"] and any(codes)
        if late or all(codes[rank] is not None for rank in others):
            break
        yield
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
                yield
    last = max(ended_at[rank] or time.monotonic() for rank in others)
    return {"codes": codes, "seconds": last - (failed_at or started_at)}


def _is_stopped(number: int) -> bool:
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _serve(channel: socket.socket) -> dict[str, Any] | None:
    """Answer tasks; returns one where this process has become a rank."""

    def answer(found: Any) -> None:
        channel.sendall(f"{json.dumps(found)}\n".encode())

    with channel, channel.makefile("r") as lines:
        for line in lines:
            tasks = json.loads(line)
            for task in tasks:
                with contextlib.suppress(Exception):  # the ranks will say it
                    _prepare(task)
            # This looks through what was imported, which in a rank would be a copy of it.
            with importlib.import_module("sppo_hf.testing.exactness").float64_everywhere():
                pass
            # What was imported stays: ranks that look for garbage need not look through it, nor
            # often.
            gc.freeze()
            gc.set_threshold(50_000)
            numbers = []
            for task in tasks:
                numbers.append(_fork_ranks(task))
                if numbers[-1] is None:
                    return task
            answer(numbers)
            answer(_wait_for_all([_wait_for(*both) for both in zip(numbers, tasks, strict=True)]))
    return None


def _prepare(task: dict[str, Any]) -> None:
    """Import the module of a task, and let it do what its ranks would all do in the same way."""
    module = importlib.import_module(task["module"])
    if hasattr(module, "prepare") and not _built_for_cuda():
        module.prepare(task["job"])


def _built_for_cuda() -> bool:
    """Whether fake tensors announce a device, for which autograd has a thread; no fork keeps it."""
    import torch

    return torch.backends.cuda.is_built()


def _wait_for_all(waiting: list[Generator[None, None, dict[str, Any]]]) -> list[dict[str, Any]]:
    ended: dict[int, dict[str, Any]] = {}
    while True:
        for index, one in enumerate(waiting):
            if index not in ended:
                try:
                    next(one)
                except StopIteration as end:
                    ended[index] = end.value
        if len(ended) == len(waiting):
            return [ended[index] for index in range(len(waiting))]
        time.sleep(0.02)


def _become_rank(module: str, job: dict[str, Any]) -> None:
    """Run a rank's job, and end its process as an interpreter does, but for what is in memory."""
    if job.get("finalized"):
        importlib.import_module(module).main(job)
        return
    status = 0
    try:
        importlib.import_module(module).main(job)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    except Exception:  # noqa: BLE001 (shown as an interpreter shows what nobody catches)
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    _leave_operators()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def leave_together() -> NoReturn:
    """End this rank when all have come this far, without shutting down in order.

    A thread of gloo's that asks for the interpreter while it shuts down is ended by force, which
    C++ answers with "terminate called without an active exception": seen once in hundreds of runs
    on a busy machine, with FSDP2, after all was done.
    """
    from torch import distributed as dist

    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _leave_operators() -> None:
    """Leave torch's operators registered: to take them back one by one takes 0.1 seconds."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        alive = finalizer.peek()
        if alive is not None and alive[1].__module__ == "torch.library":
            finalizer.atexit = False


def _let_trace_few_tokens() -> None:
    """Let every rank trace the profiles of its tiny models over few tokens."""
    import pytest

    from tests.engine.forced_plans import trace_few_tokens

    trace_few_tokens(pytest.MonkeyPatch())


def _warm_up() -> None:
    """Trace and train a tiny model, so that no rank has to do what is done but once a process."""
    import torch

    if _built_for_cuda():
        return
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from sppo_hf.config import SPPOConfig
    from sppo_hf.engine.convert import convert, revert
    from sppo_hf.engine.trace_profile import trace_config
    from sppo_hf.planning.model_profile import Training
    from sppo_hf.testing.exactness import float64_everywhere
    from sppo_hf.testing.tiny_models import build_tiny_model, make_batch

    with float64_everywhere():  # looks through all modules
        pass
    with torch.random.fork_rng(devices=[]):
        model = build_tiny_model("llama", dtype=torch.float32)
        # Its profile may have been kept by another test.
        trace_config(model.config, Training(dtype_bytes=4, parameter_bytes=4))
        convert(model, SPPOConfig(num_chunks=2, recompute="full", show_plan=False))
        model(**make_batch(rows=1, tokens=8)).loss.backward()
        revert(model)
    # To save or load any model, patterns for the weights of all families are compiled.
    get_checkpoint_conversion_mapping("llama")


if __name__ == "__main__":
    # No rank has weights of four bits; PEFT would import it, and it half of torch's compiler.
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
    # Looking through all that is imported, again and again, takes most of a second.
    gc.disable()
    for name in WARM:
        importlib.import_module(name)
    _let_trace_few_tokens()
    gc.enable()
    gc.freeze()
    _warm_up()
    own = _fork_servers(Path(sys.argv[1]))
    mine = None if own is None else _serve(own)
    if mine is None:
        os._exit(0)
    _become_rank(mine["module"], mine["job"])
