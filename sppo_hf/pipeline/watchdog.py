"""Signs of life between the ranks of a launch, so that one that is lost ends all, by its own name.

Every rank keeps a note in the launch's key-value store: what it is doing, since when, and in which
process. It reads the notes of the others, and on its own machine it sees their processes too. The
first rank to fail by itself writes down why; of one that was killed or stopped, those that notice
write what they know.

[Note: whose fault it is]
When a rank is lost, the connections of its neighbours break, then those of their neighbours. An
error of a connection is therefore never the failure of the rank that raises it. Such a rank asks
here (`explain`): has a rank reported an error of its own, has a process ended without one, has a
rank left or become silent? Only if none of this can be seen within a few seconds does it write down
that its connection broke, and what every rank was doing, and blames nobody.

[Note: two threads]
A store whose process is stopped answers nothing, and whoever asks it waits for as long. So one
thread alone talks to the store, and another one judges by what the first has read, and when.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import distributed as dist

from sppo_hf.errors import PipelineError, RankLostError

logger = logging.getLogger(__name__)

EXIT_STATUS = 70
"""Of a process that the watchdog ends (EX_SOFTWARE of sysexits.h)."""

GROUP_MARGIN_SECONDS = 15
"""How much later than the watchdog an operation of a group gives up: the watchdog knows why."""

_BEFORE_TRAINING = "before training"

AFTER_TRAINING = "after training"
"""What a rank does that may end in any way without harm to the others."""

_GRACE_SECONDS = 5.0
_TICK_SECONDS = 0.5
_TELL_SECONDS = 3.0

# The last is what Gloo says to who waits while another operation's time is over: no file's name.
_BROKEN = re.compile(r"\bgloo\b|\bNCCL\b|\btimeout caused pair closure\b", re.IGNORECASE)


def is_broken_connection(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, is of a connection between ranks."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # What torch.distributed.checkpoint collects from all ranks is no `Exception`.
        speaks = isinstance(error, RuntimeError) or not isinstance(error, Exception)
        if isinstance(error, dist.DistError) or (speaks and _BROKEN.search(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a launch cannot go on."""

    of: int | None
    """The rank that failed; None where nobody can tell."""
    by: int
    """The rank that says so."""
    words: str


@dataclass(frozen=True, slots=True)
class Process:
    """A process, as others of the same machine can find it."""

    machine: str
    """The running system and its numbering of processes; empty where that cannot be known."""
    number: int
    started: int
    """In clock ticks after the system's start: numbers of processes are used again."""


def this_process() -> Process:
    """Return this process; of use to others on Linux alone."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
        _, started = _read_process(os.getpid())
    except (OSError, ValueError, IndexError):
        return Process("", os.getpid(), 0)
    return Process(machine, os.getpid(), started)


def state_of(process: Process, own: Process) -> str | None:
    """What can be seen of a process: "runs", "stopped" or "gone"; None from another machine."""
    if not own.machine or process.machine != own.machine:
        return None
    try:
        state, started = _read_process(process.number)
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    except (OSError, ValueError, IndexError):
        return None
    if started != process.started or state in "ZXx":
        return "gone"
    return "stopped" if state in "Tt" else "runs"


def _read_process(number: int) -> tuple[str, int]:
    """Letter of its state, and start in clock ticks."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


@dataclass(frozen=True, slots=True)
class Note:
    """What a rank tells the others of itself."""

    beat: int
    doing: str
    seconds: int
    """For how long it has been doing that."""
    process: Process
    left: bool = False
    """It ended in order."""
    heard: bool = False
    """It knows that the launch is at its end."""

    @staticmethod
    def read(text: bytes) -> Note:
        """Read what `json.dumps(asdict(note))` made."""
        fields = json.loads(text)
        return Note(**{**fields, "process": Process(**fields["process"])})


@dataclass(slots=True)
class _Other:
    note: Note
    changed: float
    """When its note was last seen to be another one; `time.monotonic()`."""
    gone_at: float | None = None
    """When its process was first found gone."""

    def may_end(self, *, urgent: bool) -> bool:
        """Whether nobody would miss its process."""
        return self.note.left or (self.note.doing == AFTER_TRAINING and not urgent)


@dataclass(slots=True)
class _Store:
    """How it is with the launch's key-value store."""

    read_at: float = field(default_factory=time.monotonic)
    """When the last complete reading began."""
    broke_at: float | None = None
    words: str = ""


class Watchdog:
    """Watches the other ranks of a launch."""

    def __init__(
        self,
        rank: int,
        others: Iterable[int],
        *,
        timeout_seconds: float,
        store: Any = None,
        holder: int | None = 0,
        joined: Callable[[], bool] = lambda: True,
        end: Callable[[str], None] | None = None,
    ) -> None:
        """Start watching.

        Args:
            rank: This rank, of all.
            others: The ranks to watch.
            timeout_seconds: Without a sign of life for so long, a rank counts as lost.
            store: A key-value store of the launch; by default the process group's own.
            holder: The rank whose process holds the store; None where a launcher does.
            joined: Whether this process is still part of the launch.
            end: Ends the process with a message; for tests.
        """
        self.rank = rank
        self._ranks = [other for other in others if other != rank]
        self._timeout = timeout_seconds
        self._pause = min(2.0, timeout_seconds / 8)
        self._tick = min(_TICK_SECONDS, self._pause)
        # A client of its own: one that waits blocks all threads that share it.
        self._client = _own_client() if store is None else store
        self._holder = holder
        self._joined = joined
        self._end = end or _end_process
        self._process = this_process()
        self._step, self._detail, self._since = "", _BEFORE_TRAINING, time.monotonic()
        self._depth = 0
        self._others: dict[int, _Other] = {}
        self._store = _Store()
        self._failure: Failure | None = None
        self._told = False
        self._failed = False
        self._exit: str | None = None
        self._left = False
        self._left_is_told = False
        self._judged, self._held_up, self._held_until = time.monotonic(), 0.0, 0.0
        self._hurry, self._stop = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._exchange, name="sppo-watchdog-store", daemon=True),
            threading.Thread(target=self._watch, name="sppo-watchdog", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # -- what this rank does -----------------------------------------------------------------

    @property
    def activity(self) -> str:
        """What this rank does, to be put after "failed"."""
        return ", ".join(part for part in (self._step, self._detail) if part)

    def set_step(self, words: str) -> None:
        """The trainer has come to another step: "in step 3", "after step 3"."""
        self._step, self._detail, self._since = words, "", time.monotonic()

    def set_activity(self, detail: str) -> None:
        """What this rank does in its step, for the words of others when it is lost."""
        self._detail, self._since, self._exit = detail, time.monotonic(), None

    @contextlib.contextmanager
    def collective_section(self, detail: str | None = None) -> Iterator[None]:
        """Where this rank needs the others: broken connections are explained.

        `detail` says what is done; of an error that passes through, this stays the place.

        Raises:
            RankLostError: In the place of any error of a connection; names the rank that was lost.
        """
        before = self._detail
        if detail is not None:
            self.set_activity(detail)
        self._depth += 1
        try:
            yield
        except SystemExit as error:
            self._exit = f"rank {self.rank} ended {self.activity} by sys.exit({error.code!r})"
            raise
        except BaseException as error:
            if (reason := self.explain(error)) is not error:
                raise reason from error
            raise
        finally:
            self._depth -= 1
        self.set_activity(before)

    # -- failures ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def reporting_failures(
        self, *, except_for: tuple[type[BaseException], ...] = ()
    ) -> Iterator[None]:
        """Context of work that the other ranks wait for: what is raised in it ends all of them.

        What all ranks raise alike (`except_for`), after which a script may go on, passes unchanged.

        Raises:
            PipelineError: In place of an exception, with what this rank was doing.
        """
        try:
            yield
        except except_for:
            raise
        except BaseException as error:
            if is_broken_connection(error):
                raise
            self.report(error)
            if not isinstance(error, Exception):
                raise  # an interrupt, which is nobody's failure
            raise PipelineError(self.describe_failure(error)) from error

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed by itself."""
        self._failed = True
        self._accept(Failure(self.rank, self.rank, self.describe_failure(error)))

    def describe_failure(self, error: BaseException) -> str:
        """This rank's failure in words: rank, step, action and error."""
        words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return f"rank {self.rank} failed {self.activity}: {words}"

    def explain(self, error: BaseException) -> BaseException:
        """What to raise for an error: as it is, or for one of a connection who was lost.

        See [Note: whose fault it is]. Takes some seconds where nobody has said why.
        """
        if isinstance(error, RankLostError) or not is_broken_connection(error):
            return error
        failure = self._failure
        self._hurry.set()
        began = time.monotonic()
        while failure is None and time.monotonic() < began + 6 * self._pause:
            # One reading that is newer than the error: words come before connections break.
            fresh = self._store.read_at > began or self._store.broke_at is not None
            late = time.monotonic() > began + 2 * self._pause
            failure = self._judge(urgent=True) if fresh or late else self._failure
            time.sleep(0.02)
        if failure is None:
            failure = Failure(None, self.rank, self._unexplained(error))
        failure = self._accept(failure)
        if failure.of == self.rank and failure.by == self.rank:
            return error
        return RankLostError(self._told_here(failure))

    def _told_here(self, failure: Failure) -> str:
        if failure.of == self.rank:
            return f"the other ranks have gone on without this one: {failure.words}"
        if failure.by == self.rank and failure.of is None:
            return failure.words
        return f"{failure.words} (rank {self.rank} cannot go on; it was {self.activity})"

    def _unexplained(self, error: BaseException) -> str:
        others = "; ".join(
            f"rank {rank} is {other.note.doing} for {other.note.seconds} seconds"
            for rank, other in sorted(self._others.items())
        )
        unseen = [rank for rank in self._ranks if rank not in self._others]
        if unseen:
            others += f"{'; ' if others else ''}nothing was heard yet of {_ranks(unseen)}"
        return (
            f"rank {self.rank} lost its connection to other ranks {self.activity}, or got no "
            f"answer in time, and no rank has reported an error ({others}): "
            f"{type(error).__name__}: {error}"
        )

    def _accept(self, failure: Failure) -> Failure:
        """Make it the launch's, unless another one is; returns the one that is."""
        if self._failure is None:
            self._failure = failure
            self._hurry.set()
            deadline = time.monotonic() + _TELL_SECONDS
            while not self._told and self._store.broke_at is None and time.monotonic() < deadline:
                time.sleep(0.02)
            if not self._told and failure.of == failure.by == self.rank:
                logger.warning(
                    "the launch's store does not answer; other ranks are not told: %s",
                    failure.words,
                )
        return self._failure

    # -- the end of this process -------------------------------------------------------------

    def watch_exit(self) -> None:
        """Tell the others how this process ends: in order, or by which error.

        What is raised outside of a step (by the optimizer, the data, a save) is else only seen by
        its own rank, while the others wait for it.
        """
        atexit.register(self.close)
        before = sys.excepthook

        def tell(kind: Any, error: Any, traceback: Any) -> None:
            if not self._is_ours():
                before(kind, error, traceback)
                return
            reason = self.explain(error)
            if reason is not error:
                reason.__cause__ = error
                kind, error, traceback = type(reason), reason, None
            elif not isinstance(error, RankLostError) and not self._failed:
                self.report(error)
            before(kind, error, traceback)

        sys.excepthook = tell

    def _is_ours(self) -> bool:
        # A forked child has the hooks, but neither the threads nor a place in the launch.
        return os.getpid() == self._process.number and not self._stop.is_set()

    def close(self) -> None:
        """Stop watching; the others are told that this rank left, if it did not fail.

        The process that holds the store stays until they have heard it, for seconds at most.
        """
        if not self._is_ours():
            return
        if self._exit is not None and self._failure is None and self._joined():
            self._accept(Failure(self.rank, self.rank, self._exit))
        self._left = True
        self._hurry.set()
        deadline = time.monotonic() + _TELL_SECONDS
        while time.monotonic() < deadline and self._store.broke_at is None:
            # Where the group was left before, the others have had the time to hear it.
            waits = self.rank == self._holder and self._joined()
            if self._left_is_told and not (waits and any(map(self._has_not_heard, self._ranks))):
                break
            time.sleep(0.02)
            self._hurry.set()
        self._stop.set()
        self._hurry.set()
        for thread in self._threads:
            thread.join(timeout=1)

    def _has_not_heard(self, rank: int) -> bool:
        other = self._others.get(rank)
        if other is None or other.note.left or other.note.heard:
            return False
        return state_of(other.note.process, self._process) not in ("gone", "stopped")

    # -- the thread that talks to the store --------------------------------------------------

    def _exchange(self) -> None:
        beat, due, heard = 0, 0.0, False
        while not self._stop.is_set():
            began = time.monotonic()
            if not self._joined():
                self._left = True
            try:
                self._tell_failure()
                if self._holder is not None and self._holder != self.rank:
                    self._read_note(self._holder)
                hears = self._failure is not None or self._holder_left()
                if began >= due or self._hurry.is_set() or hears != heard:
                    self._hurry.clear()
                    beat, due, heard, left = beat + 1, began + self._pause, hears, self._left
                    seconds = int(began - self._since)
                    note = Note(beat, self.activity, seconds, self._process, left, heard)
                    self._client.set(f"sppo/alive/{self.rank}", json.dumps(asdict(note)))
                    self._left_is_told = left
                    for rank in self._ranks:
                        self._read_note(rank)
                    self._store.read_at = began
                self._store.broke_at = None
            except (RuntimeError, OSError) as error:
                self._hurry.clear()
                if self._store.broke_at is None:
                    self._store.broke_at, self._store.words = time.monotonic(), str(error)
                if self._holder_left():
                    return  # which ended the store in order
            if self._left and self._left_is_told and not self._joined():
                return
            self._hurry.wait(self._tick)

    def _tell_failure(self) -> None:
        """Write down the failure found here, or read that of others."""
        if self._failure is None:
            if self._client.check(["sppo/failed"]):
                self._failure = Failure(**json.loads(self._client.get("sppo/failed")))
                self._told = True
        elif not self._told:
            # The first one to fail is the one to blame: what follows is its consequence.
            ours = json.dumps(asdict(self._failure))
            theirs = self._client.compare_set("sppo/failed", "", ours)
            if theirs is not None and not self._failed:
                self._failure = Failure(**json.loads(theirs))
            self._told = True

    def _read_note(self, rank: int) -> None:
        key = f"sppo/alive/{rank}"
        if rank not in self._others and not self._client.check([key]):
            return
        note, now = Note.read(self._client.get(key)), time.monotonic()
        other = self._others.get(rank)
        if other is None:
            self._others[rank] = _Other(note, now)
        elif note != other.note:
            other.note, other.changed = note, now

    def _holder_left(self) -> bool:
        other = None if self._holder is None else self._others.get(self._holder)
        return other is not None and other.note.left

    # -- the thread that judges --------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stop.wait(self._tick):
            if not self._joined():
                return
            failure = self._judge()
            if failure is not None:
                self._fail(self._accept(failure))
                return

    def _judge(self, *, urgent: bool = False) -> Failure | None:
        """Who is lost, by what is known now.

        `urgent`: a connection broke, so somebody is, and weaker signs count as well.
        """
        if self._failure is not None:
            return self._failure
        now = time.monotonic()
        if now - self._judged > self._timeout / 2:
            # This process was stopped, or its interpreter held up: what was read is old.
            self._held_up, self._held_until = now - self._judged, now
            self._store.read_at = now
        self._judged = now
        found = self._gone(urgent=urgent) or self._silent(urgent=urgent)
        found = found or self._store_lost(now, urgent=urgent)
        if found is None and (urgent or self._depth):
            found = self._left_early(urgent=urgent)
        if urgent and self._held_up > self._timeout > now - self._held_until:
            words = (
                f"rank {self.rank} itself was stopped, or held up, for {self._held_up:.0f} "
                f"seconds {self.activity}, longer than pp_timeout_seconds"
            )
            found = Failure(self.rank, -1, words)
        return found

    def _gone(self, *, urgent: bool) -> Failure | None:
        """A rank of this machine whose process ended without a word."""
        for rank, other in list(self._others.items()):
            if other.may_end(urgent=urgent):
                continue
            if state_of(other.note.process, self._process) != "gone":
                continue
            if other.gone_at is None:
                other.gone_at = time.monotonic()
                self._hurry.set()
            # Its last words may be newer than what was read; those of the store's holder, which
            # waits until all have heard it, are not.
            unreadable = self._store.broke_at is not None and rank == self._holder
            if self._store.read_at > other.gone_at or unreadable:
                return self._lost(
                    rank, "its process ended without an error (by a signal, or by os._exit)"
                )
        return None

    def _silent(self, *, urgent: bool) -> Failure | None:
        """A rank that has given no sign of life for too long."""
        for rank, other in list(self._others.items()):
            if other.may_end(urgent=urgent) or other.gone_at is not None:
                continue
            state = state_of(other.note.process, self._process)
            limit = self._timeout
            if urgent and state is None:
                limit = 4 * self._pause
            elif urgent and state == "stopped":
                limit = 2 * self._pause
            # Up to the last reading: a store that is silent itself says nothing of others.
            silent = self._store.read_at - other.changed
            if silent > limit:
                return self._lost(rank, self._silence(silent, state))
        return None

    def _store_lost(self, now: float, *, urgent: bool) -> Failure | None:
        """The store's process is lost."""
        if self._holder_left():
            return None
        other = None if self._holder is None else self._others.get(self._holder)
        state = None if other is None else state_of(other.note.process, self._process)
        weak = urgent and state != "runs"
        broke_at, unread = self._store.broke_at, now - self._store.read_at
        if broke_at is not None:
            if now - broke_at <= (2 * self._pause if weak else self._timeout / 2):
                return None
            words = f"the process that holds the launch's store is gone ({self._store.words})"
        else:
            if unread <= self._pause + (4 * self._pause if weak else self._timeout):
                return None
            silence = self._silence(unread, state)
            words = f"the launch's store, which it holds, does not answer; {silence}"
        if self._holder is None or self._holder == self.rank:
            return Failure(None, self.rank, words.replace(", which it holds,", ""))
        return self._lost(self._holder, words)

    def _left_early(self, *, urgent: bool) -> Failure | None:
        """A rank that ended in order while this one needs it."""
        for rank, other in list(self._others.items()):
            # In the last step some ranks are done long before others.
            if other.note.left and (urgent or other.note.doing == _BEFORE_TRAINING):
                words = "its process ended without an error (at the end of its script, or sys.exit)"
                return self._lost(rank, words)
        return None

    def _silence(self, seconds: float, state: str | None) -> str:
        stopped = "; its process is stopped" if state == "stopped" else ""
        return (
            f"it has given no sign of life for {seconds:.0f} seconds "
            f"(pp_timeout_seconds: {self._timeout:g}){stopped}"
        )

    def _lost(self, rank: int, how: str) -> Failure:
        other = self._others.get(rank)
        last = "" if other is None else f", last seen {other.note.doing}"
        return Failure(rank, self.rank, f"lost rank {rank}{last}: {how}")

    def _fail(self, failure: Failure) -> None:
        if failure.of == failure.by == self.rank:
            return  # the exception is on its way
        # Where it does not need the others, a rank may be about to end in order.
        waited = needed = 0.0
        while needed < _GRACE_SECONDS and waited < self._timeout:
            if self._stop.wait(0.1) or not self._joined():
                return
            waited += 0.1
            needed = needed + 0.1 if self._depth else 0.0
        self._end(f"sppo_hf: rank {self.rank} ends because {self._told_here(failure)}")


# -- the watchdog of this process ------------------------------------------------------------

_current: tuple[Watchdog, Any] | None = None
_lock = threading.Lock()


def watch_launch(timeout_seconds: float) -> Watchdog:
    """The watchdog of this process and its process group, started unless it is."""
    global _current
    with _lock:
        world = dist.group.WORLD
        if _current is not None and _current[1] is world:
            return _current[0]
        if _current is not None:
            _current[0].close()
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        made = Watchdog(
            dist.get_rank(),
            range(dist.get_world_size()),
            timeout_seconds=timeout_seconds,
            holder=None if agent else 0,
            joined=lambda: dist.is_initialized() and dist.group.WORLD is world,
        )
        made.watch_exit()
        _current = made, world
        return made


def watch_launch_when_joined(timeout_seconds: float) -> None:
    """Start the watchdog as soon as this process has joined a launch, if it is part of one.

    A rank may be lost while it loads its model or its data, long before it meets the others.
    """
    if _current is not None or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return

    def wait() -> None:
        while not dist.is_initialized():
            time.sleep(_TICK_SECONDS / 2)
        with contextlib.suppress(RuntimeError, ValueError):  # left again already
            watch_launch(timeout_seconds)

    threading.Thread(target=wait, name="sppo-watchdog-start", daemon=True).start()


def watchdog() -> Watchdog | None:
    """The watchdog of this process; None where it is in no pipeline."""
    return None if _current is None else _current[0]


@contextlib.contextmanager
def collective_section(detail: str | None = None) -> Iterator[None]:
    """`Watchdog.collective_section` of this process's watchdog; also a decorator."""
    current = watchdog()
    with contextlib.nullcontext() if current is None else current.collective_section(detail):
        yield


def _ranks(numbers: Iterable[int]) -> str:
    return ", ".join(f"rank {number}" for number in numbers)


def _own_client() -> Any:
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def _end_process(message: str) -> None:
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)  # noqa: T201 (the process ends here)
    os._exit(EXIT_STATUS)
