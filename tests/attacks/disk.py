"""Faults of the disk under offloaded activations: exact, or a clear error and then exact again.

A tiny model sends all that it can to disk, for some steps of different lengths. In one of them the
disk fails, lies or fills up, its folder goes, a child process is forked or the user's own code
raises. What comes out of that step must be exact or an error of ours; the steps after it must be
exact. Files have no names, so damage is done through the descriptors that this process holds.
"""

import contextlib
import copy
import errno
import fcntl
import functools
import gc
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from sppo_hf.config import SPPOConfig
from sppo_hf.engine import plan_cache
from sppo_hf.engine.convert import convert
from sppo_hf.errors import BudgetError, ConfigError, OffloadError, SPPOError
from sppo_hf.offload import disk, disk_files
from sppo_hf.offload.disk_files import BLOCK_BYTES
from sppo_hf.offload.store import Store
from sppo_hf.testing.exactness import Gradients, parameter_errors
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch
from tests.attacks.outcomes import Case, answered_in_process

TOKENS = (17, 29, 23)
"""Tokens of each batch; the second is the longest, so that files are added for it."""
FAULTY = 1
"""The batch that meets the fault."""
SLAB_BYTES = 16 * BLOCK_BYTES
TOLERANCE = 1e-5
"""Largest error of float64 gradients; Transformers computes some functions in float32."""
EXACT = "exact"
PATIENCE_SECONDS = 5.0
MOST_SECONDS = 30.0
"""Limit of a case: enough for a dozen training steps on a busy machine, unless one hangs."""

Fault = AbstractContextManager[object]


@functools.cache
def _model() -> nn.Module:
    return build_tiny_model("llama", num_hidden_layers=2)


@functools.cache
def _reference(step: int) -> Gradients:
    return _gradients(copy.deepcopy(_model()), step)


def _gradients(
    model: nn.Module, step: int, before_backward: Callable[[], object] = lambda: None
) -> Gradients:
    loss = model(**_batch(step)).loss
    before_backward()
    loss.backward()
    return Gradients(loss.item(), {name: p.grad for name, p in model.named_parameters()})


def _batch(step: int) -> dict[str, torch.Tensor]:
    return make_batch(rows=1 + step % 2, tokens=TOKENS[step], seed=step)


class Run:
    """A converted model whose steps are compared with those of the unmodified one."""

    def __init__(self, dice: random.Random, folder: str, **settings: Any) -> None:
        self.model: nn.Module = copy.deepcopy(_model())
        self.stores: list[Store] = []
        self.keeps_names = dice.random() < 0.2
        """Whether files are not removed while they are open, as on some network file systems."""
        self.threads_before = set(threading.enumerate())
        self.settings = {
            "num_chunks": dice.choice((2, 3)),
            "offload": "full",
            "offload_kv": dice.choice(("none", "full")),
            "recompute": dice.choice(("none", "full")),
            "min_offload_size": 1,
            "disk_memory": "64MiB",
            **settings,
        }
        convert(self.model, SPPOConfig(offload_dir=folder, show_plan=False, **self.settings))

    @property
    def store(self) -> Store:
        """The disk of the model, once a step has made it."""
        return self.stores[-1]

    def step(self, number: int, before_backward: Callable[[], object] = lambda: None) -> str:
        """Run a batch; return `EXACT`, or the worst parameter."""
        self.model.zero_grad()

        def noted(*arguments: Any, **settings: Any) -> Store:
            self.stores.append(Store(*arguments, **settings))
            return self.stores[-1]

        small = functools.partial(disk.DiskSpace, slab_bytes=SLAB_BYTES)

        refused = "an attack says so" if self.keeps_names else None
        with (
            mock.patch.object(plan_cache, "Store", noted),
            mock.patch.object(disk, "DiskSpace", small),
            mock.patch.object(disk_files, "_why_names_are_needed", return_value=refused),
        ):
            ours = _gradients(self.model, number, before_backward)
        worst = parameter_errors(ours, _reference(number))[0]
        loss_error = abs(ours.loss - _reference(number).loss)
        is_exact = max(worst.error, loss_error) <= TOLERANCE
        return EXACT if is_exact else f"batch {number}: {worst}"

    def await_writes(self) -> None:
        """Wait until all that was sent away is on the disk."""
        end_seconds = time.monotonic() + PATIENCE_SECONDS
        while self.store.transfers.queued_bytes and time.monotonic() < end_seconds:
            time.sleep(0.001)

    def end(self, folder: Path | None) -> str:
        """Drop the model; return `EXACT`, or what it leaves behind."""
        assert self.store.space.peak_bytes > 0, "a run without a disk attacks nothing"
        self.model = nn.Identity()
        self.stores.clear()
        gc.collect()
        threads = [one.name for one in set(threading.enumerate()) - self.threads_before]
        names = list(folder.iterdir()) if folder is not None and folder.is_dir() else []
        left = [*threads, *names]
        return f"left behind: {left}" if left else EXACT


def _survives(
    run: Run,
    folder: Path | None,
    *,
    fault: Fault | None = None,
    before_backward: Callable[[], object] = lambda: None,
    expected: tuple[type[BaseException], ...] = (),
) -> str:
    """Take the fault in the second batch, and go on.

    Returns:
        `EXACT`, or what was not.

    Raises:
        SPPOError: the second batch was refused, and all others were exact.
    """
    seen = [_undisturbed(run, 0)]
    refusal: Exception | None = None
    try:
        with fault or nullcontext():
            seen.append(run.step(FAULTY, before_backward))
    except (OffloadError, BudgetError) as error:
        refusal = type(error)(str(error))  # without the frames, which know the model
    except expected:
        pass
    seen += [_undisturbed(run, FAULTY), _undisturbed(run, 2), run.end(folder)]
    wrong = [one for one in seen if one != EXACT]
    if wrong:
        return "; ".join([*wrong, f"after {refusal!r}"])
    if refusal is not None:
        raise refusal
    return EXACT


def _undisturbed(run: Run, number: int) -> str:
    """Run a batch in which nothing is wrong, so that being refused is no answer."""
    try:
        return run.step(number)
    except SPPOError as error:
        return f"batch {number} failed: {error}"


# -- what can go wrong ----------------------------------------------------------------------------


def _damage(dice: random.Random, folder: Path) -> str:
    """Something changes the bytes while they wait."""
    run = Run(dice, str(folder))

    def at_random() -> None:
        run.await_writes()
        descriptor = dice.choice(_descriptors(folder))
        size = os.fstat(descriptor).st_size
        how = dice.choice(("flip", "zero", "noise", "swap", "stale", "shift", "truncate"))
        place = dice.randrange(size)
        block, other = (dice.randrange(size // BLOCK_BYTES) * BLOCK_BYTES for _ in range(2))
        if how == "flip":
            (byte,) = os.pread(descriptor, 1, place)
            os.pwrite(descriptor, bytes([byte ^ 1 << dice.randrange(8)]), place)
        elif how == "zero":
            os.pwrite(descriptor, bytes(BLOCK_BYTES), block)
        elif how == "noise":
            num_bytes = min(dice.randrange(1, 3 * BLOCK_BYTES), size - place)
            os.pwrite(descriptor, dice.randbytes(num_bytes), place)
        elif how == "truncate":
            os.ftruncate(descriptor, place)
        else:
            first = os.pread(descriptor, BLOCK_BYTES, block)
            second = os.pread(descriptor, BLOCK_BYTES, other)
            if how == "shift":
                first = first[8:] + first[:8]
                os.pwrite(descriptor, first, block)
                return
            os.pwrite(descriptor, first, other)
            if how == "swap":
                os.pwrite(descriptor, second, block)

    return _survives(run, folder, before_backward=at_random)


def _descriptors(folder: Path) -> list[int]:
    """This process's slab files below `folder`, without those that go past the page cache."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):
            is_ours = os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/sppo-")
            is_direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
            if is_ours and not is_direct and os.fstat(descriptor).st_size:
                found.append(descriptor)
    return sorted(found)


def _system_calls(dice: random.Random, folder: Path) -> str:
    """A read or write is refused, stops early, or does something else than it says."""
    at = dice.randrange(12)
    is_write = dice.random() < 0.5
    how = dice.choice(("refuse", "short", "end", "memory", "lie", "elsewhere", "torn"))
    number = dice.choice((errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EBADF, errno.EINVAL))
    real = os.pwritev if is_write else os.preadv
    calls = [0]

    def faulty(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls[0] += 1
        if calls[0] - 1 != at:
            return real(descriptor, buffers, offset)
        (memory,) = buffers
        if how == "refuse":
            raise OSError(number, os.strerror(number))
        if how == "memory":
            raise MemoryError
        if how == "end":
            return 0
        if how == "short":
            return real(descriptor, [memory[: BLOCK_BYTES * dice.randrange(1, 3)]], offset)
        if how == "elsewhere":
            return real(descriptor, buffers, offset + BLOCK_BYTES if offset == 0 else 0)
        if how == "torn" and is_write:
            real(descriptor, [memory[: memory.nbytes // BLOCK_BYTES // 2 * BLOCK_BYTES]], offset)
        elif not is_write:
            real(descriptor, buffers, offset)
            memory[dice.randrange(memory.nbytes)] ^= 1 << dice.randrange(8)
        return memory.nbytes  # a write that only says that it was made

    fault = mock.patch.object(os, "pwritev" if is_write else "preadv", faulty)
    return _survives(Run(dice, str(folder)), folder, fault=fault)


def _no_room(dice: random.Random, folder: Path) -> str:
    """The disk, a quota or a limit is exhausted when files are to be added."""
    number = dice.choice((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))
    good = [dice.randrange(3)]
    real = os.posix_fallocate

    def full(descriptor: int, offset: int, num_bytes: int) -> None:
        good[0] -= 1
        if good[0] < 0:
            raise OSError(number, os.strerror(number))
        real(descriptor, offset, num_bytes)

    fault = mock.patch.object(os, "posix_fallocate", full)
    return _survives(Run(dice, str(folder)), folder, fault=fault)


def _folder_goes(dice: random.Random, folder: Path) -> str:
    """The folder is removed, moved or replaced during a step, and comes back."""
    target, aside = folder / "store", folder / "aside"
    how = dice.choice(("remove", "move", "file"))

    def go() -> None:
        if how == "move":
            target.rename(aside)
        else:
            shutil.rmtree(target)
        if how == "file":
            target.touch()

    @contextlib.contextmanager
    def gone(at_once: bool) -> Iterator[None]:
        if at_once:
            go()
        try:
            yield
        finally:
            if how == "file":
                target.unlink(missing_ok=True)
            target.mkdir(exist_ok=True)

    run = Run(dice, str(target))
    run.keeps_names = False  # a private folder below would be gone for good
    if dice.random() < 0.5:
        return _survives(run, target, fault=gone(True))
    return _survives(run, target, fault=gone(False), before_backward=go)


def _fork(dice: random.Random, folder: Path) -> str:
    """A forked child uses the model: it is refused there, and nothing happens here."""
    run = Run(dice, str(folder))

    def fork() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fork beside threads, which is the point
            child = os.fork()
        if child == 0:
            signal.alarm(20)
            code = 9
            try:
                run.step(2)
            except OffloadError as error:
                code = 0 if "forked" in str(error) else 8
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == 0, f"the child ended with {code}"

    return _survives(run, folder, before_backward=fork)


def _names(dice: random.Random, folder: Path) -> str:
    """Odd names of the folder."""
    (folder / "file").touch()
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "dangling").symlink_to(folder / "nowhere")
    odd = "".join(dice.choice("a \n\t'\"\\{}%$~*-.\u00e9\u4e2d\U0001f600") for _ in range(20))
    name = dice.choice(
        (
            *("x" * dice.randrange(250, 400), "x/" * dice.randrange(100, 4000), "a\0b"),
            *("a\ud800b", "a\udcffb", f"b{odd}", "file", "file/deeper", "loop", "dangling"),
            *("a/../b", "a//b/", "-rf", "~", "...", "/proc/x", "/dev/null", "/sys/x"),
        )
    )
    run = Run(dice, str(folder / name))
    seen = [run.step(0), run.step(1), run.end(None)]
    return next((one for one in seen if one != EXACT), EXACT)


def _budgets(dice: random.Random, folder: Path) -> str:
    """Budgets from nothing to a little."""
    sizes = {
        name: int(10 ** dice.uniform(3, 7))
        for name in ("disk_memory", "host_memory", "device_memory")
        if dice.random() < 0.6
    }
    run = Run(dice, str(folder), **sizes)
    seen = [run.step(number) for number in (0, FAULTY)]
    if run.stores and run.store.space.peak_bytes:
        seen.append(run.end(folder))
    return next((one for one in seen if one != EXACT), EXACT)


class _UserError(Exception):
    pass


def _user_raises(dice: random.Random, folder: Path) -> str:
    """The user's own code raises in forward or recomputation, again and again."""
    run = Run(dice, str(folder))
    at, calls = [-1], [0]

    def raise_sometimes(*_: object) -> None:
        calls[0] += 1
        if calls[0] == at[0]:
            raise _UserError

    for name, module in run.model.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_pre_hook(raise_sometimes)
    del module  # it knows the model, which must go in the end
    seen = [_undisturbed(run, 0), _undisturbed(run, FAULTY)]
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        calls[0], at[0] = 0, dice.randrange(1, 20)
        with contextlib.suppress(_UserError):
            seen.append(run.step(FAULTY))
        at[0] = -1
        seen.append(_undisturbed(run, FAULTY))
    after = len(os.listdir("/proc/self/fd")), threading.active_count()
    if after > before:
        seen.append(f"{before} files and threads became {after}")
    seen.append(run.end(folder))
    return next((one for one in seen if one != EXACT), EXACT)


KINDS: tuple[Callable[[random.Random, Path], str], ...] = (
    *(_damage, _system_calls, _damage, _system_calls, _no_room),
    *(_folder_goes, _names, _budgets, _user_raises, _names),
)


def cases(count: int, seed: int) -> Iterator[Case]:
    """Yield `count` cases; all kinds of fault take turns."""
    for number in range(count):
        kind = _fork if number % 20 == 19 else KINDS[number % len(KINDS)]
        yield Case(
            f"disk: {kind.__name__[1:]} {number} of seed {seed}", _attempt(kind, number, seed)
        )


def _attempt(
    kind: Callable[[random.Random, Path], str], number: int, seed: int
) -> Callable[[], Any]:
    def ask() -> str:
        with tempfile.TemporaryDirectory() as folder:
            return kind(random.Random(f"{seed} {number}"), Path(folder))

    refusals = (OffloadError, BudgetError, ConfigError)
    return lambda: answered_in_process(
        ask, refusals=refusals, right=lambda seen: seen == EXACT, seconds=MOST_SECONDS
    )
