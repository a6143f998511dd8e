"""Heartbeats between the ranks of a launch: a rank that is lost ends all, with an error naming it.

Every rank keeps a heartbeat in the launch's key-value store: what it does, since when, and in which
process. It reads the heartbeats of the others, and on its own machine it sees their processes too.
The first rank to fail by itself writes why; of one that was killed or stopped, the ranks that
notice it write what they know.

[Note: which rank is blamed]
When a rank is lost, the connections of its neighbours break, then those of their neighbours. An
error of a connection is therefore never blamed on the rank that raises it. Such a rank asks here
(`Watchdog.translate_error`): has a rank reported an error of its own, has a process ended without
one, has a rank left or become silent? Only if none of this can be seen within a few seconds does it
report that its connection broke, and what every rank was doing, and blames nobody.

[Note: two threads]
A store whose process is stopped never answers, and its client blocks. So only one thread talks to
the store, and another one judges by what the first has read, and when.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import distributed as dist

from sppo_hf.errors import PipelineError, RankLostError

logger = logging.getLogger(__name__)

EXIT_STATUS = 70
"""Exit status of a process that the watchdog ends (EX_SOFTWARE of sysexits.h)."""

GROUP_MARGIN_SECONDS = 15
"""A collective times out this much later than the watchdog, which knows the reason."""

_BEFORE_TRAINING = "before training"

AFTER_TRAINING = "after training"
"""Activity in which a rank may end in any way without harm to the others."""

_GRACE_SECONDS = 5.0
_TICK_SECONDS = 0.5
_TELL_SECONDS = 3.0

# The last is Gloo's message where another operation timed out; it names no source file.
_BROKEN = re.compile(r"\bgloo\b|\bNCCL\b|\btimeout caused pair closure\b", re.IGNORECASE)


def is_broken_connection(error: BaseException | None) -> bool:
    """Return whether an error, or a cause of it, is of a connection between ranks."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # What torch.distributed.checkpoint collects from all ranks is no `Exception`.
        has_message = isinstance(error, RuntimeError) or not isinstance(error, Exception)
        if isinstance(error, dist.DistError) or (has_message and _BROKEN.search(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a launch cannot go on."""

    rank: int | None
    """The rank that failed; None where nobody can tell."""
    reported_by: int
    """The rank that found it."""
    message: str


@dataclass(frozen=True, slots=True)
class Process:
    """A process, as others of the same machine can find it."""

    machine: str
    """Boot id and pid namespace of the running system; empty where these cannot be read."""
    pid: int
    start_ticks: int
    """Start in clock ticks after the system's: pids are used again."""


def this_process() -> Process:
    """Return this process; of use to others on Linux only."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
        _, start_ticks = _read_process(os.getpid())
    except (OSError, ValueError, IndexError):
        return Process("", os.getpid(), 0)
    return Process(machine, os.getpid(), start_ticks)


def process_state(process: Process, own: Process) -> str | None:
    """Return "runs", "stopped" or "gone" of a process; None for one of another machine."""
    if not own.machine or process.machine != own.machine:
        return None
    try:
        state, start_ticks = _read_process(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    except (OSError, ValueError, IndexError):
        return None
    if start_ticks != process.start_ticks or state in "ZXx":
        return "gone"
    return "stopped" if state in "Tt" else "runs"


def _read_process(pid: int) -> tuple[str, int]:
    """Return a process's state letter, and its start in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Message in which a rank tells the others what it does."""

    number: int
    activity: str
    seconds: int
    """Seconds since the activity began."""
    process: Process
    has_left: bool = False
    """Whether the rank ended in order."""
    knows_end: bool = False
    """Whether it knows that the launch is at its end."""

    @staticmethod
    def parse(text: bytes) -> Heartbeat:
        """Parse the JSON of `dataclasses.asdict`."""
        fields = json.loads(text)
        return Heartbeat(**{**fields, "process": Process(**fields["process"])})


@dataclass(slots=True)
class _Peer:
    heartbeat: Heartbeat
    changed_at: float
    """Time (`time.monotonic()`) at which a new heartbeat was last read."""
    gone_at: float | None = None
    """Time at which its process was first found gone."""

    def may_end(self, *, urgent: bool) -> bool:
        """Whether its process may end without being missed."""
        after_training = self.heartbeat.activity == AFTER_TRAINING
        return self.heartbeat.has_left or (after_training and not urgent)


class Watchdog:
    """Watches the other ranks of a launch."""

    def __init__(
        self,
        rank: int,
        others: Iterable[int],
        *,
        timeout_seconds: float,
        store: Any = None,
        store_rank: int | None = 0,
        is_joined: Callable[[], bool] = lambda: True,
        end_process: Callable[[str], None] | None = None,
    ) -> None:
        """Start watching.

        Args:
            rank: This global rank.
            others: The global ranks to watch.
            timeout_seconds: A rank without a heartbeat for so long counts as lost.
            store: Key-value store of the launch; by default the process group's own.
            store_rank: The rank whose process holds the store; None where a launcher does.
            is_joined: Returns whether this process is still part of the launch.
            end_process: Ends the process with a message; for tests.
        """
        self.rank = rank
        self._ranks = [other for other in others if other != rank]
        self._timeout = timeout_seconds
        self._beat_seconds = min(2.0, timeout_seconds / 8)
        self._tick_seconds = min(_TICK_SECONDS, self._beat_seconds)
        # Its own client: one that waits blocks all threads that share it.
        self._client = _clone_store() if store is None else store
        self._store_rank = store_rank
        self._is_joined = is_joined
        self._end_process = end_process or _end_process
        self._process = this_process()
        self._step, self._detail, self._since = "", _BEFORE_TRAINING, time.monotonic()
        self._section_depth = 0
        self._peers: dict[int, _Peer] = {}
        self._store_read_at = time.monotonic()
        """Time at which the last complete reading of the launch's store began."""
        self._store_broke_at: float | None = None
        self._store_error = ""
        self._failure: Failure | None = None
        self._is_published = False
        self._has_failed = False
        self._exit_message: str | None = None
        self._left = False
        self._left_is_published = False
        self._checked_at, self._stopped_seconds, self._resumed_at = time.monotonic(), 0.0, 0.0
        self._wake, self._stop = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(
                target=self._exchange_heartbeats, name="sppo-watchdog-store", daemon=True
            ),
            threading.Thread(target=self._watch_peers, name="sppo-watchdog", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # -- what this rank does -----------------------------------------------------------------

    @property
    def activity(self) -> str:
        """This rank's step and what it does there, such as "in step 3, clipping gradients"."""
        return ", ".join(part for part in (self._step, self._detail) if part)

    def set_step(self, step: str) -> None:
        """Set the training step of the activity: "in step 3", "after step 3"."""
        self._step, self._detail, self._since = step, "", time.monotonic()

    def set_activity(self, detail: str) -> None:
        """Set what this rank does in its step; others name it when this rank is lost."""
        self._detail, self._since, self._exit_message = detail, time.monotonic(), None

    @contextlib.contextmanager
    def collective_section(self, detail: str | None = None) -> Iterator[None]:
        """Context of work that needs the other ranks: translates errors of connections.

        `detail` is the activity until the end of the context, or for good if an error passes.

        Raises:
            RankLostError: In place of any error of a connection; names the rank that was lost.
        """
        step, previous = self._step, self._detail
        if detail is not None:
            self.set_activity(detail)
        self._section_depth += 1
        try:
            yield
        except SystemExit as error:
            self._exit_message = (
                f"rank {self.rank} ended {self.activity} by sys.exit({error.code!r})"
            )
            raise
        except BaseException as error:
            if (reason := self.translate_error(error)) is not error:
                raise reason from error
            raise
        finally:
            self._section_depth -= 1
        # Of another step by now, as after training.
        self.set_activity(previous if self._step == step else "")

    # -- failures ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def reporting_failures(
        self, *, except_for: tuple[type[BaseException], ...] = ()
    ) -> Iterator[None]:
        """Context of work that the other ranks wait for: an exception in it ends all of them.

        `except_for` are exceptions that all ranks raise alike, after which a script may go on; see
        [Note: who may raise when] in `agreement`.

        Raises:
            PipelineError: In place of other exceptions, with what this rank was doing.
        """
        try:
            yield
        except except_for:
            raise
        except BaseException as error:
            if is_broken_connection(error):
                raise
            self.report_failure(error)
            if not isinstance(error, Exception):
                raise  # an interrupt, which is nobody's failure
            raise PipelineError(self.describe_failure(error)) from error

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed by itself."""
        self._has_failed = True
        self._publish(Failure(self.rank, self.rank, self.describe_failure(error)))

    def describe_failure(self, error: BaseException) -> str:
        """Describe a failure of this rank: rank, step, action and error."""
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return f"rank {self.rank} failed {self.activity}: {message}"

    def translate_error(self, error: BaseException) -> BaseException:
        """Return what to raise for an error: itself, or for one of a connection a RankLostError.

        See [Note: which rank is blamed]. Takes some seconds where no rank has reported a failure.
        """
        if isinstance(error, RankLostError) or not is_broken_connection(error):
            return error
        failure = self._failure
        self._wake.set()
        began = time.monotonic()
        while failure is None and time.monotonic() < began + 6 * self._beat_seconds:
            # One reading newer than the error: failures are written before connections break.
            is_read = self._store_read_at > began or self._store_broke_at is not None
            is_late = time.monotonic() > began + 2 * self._beat_seconds
            failure = self._find_failure(urgent=True) if is_read or is_late else self._failure
            time.sleep(0.02)
        if failure is None:
            failure = Failure(None, self.rank, self._describe_unknown_failure(error))
        failure = self._publish(failure)
        if failure.rank == failure.reported_by == self.rank:
            return error
        return RankLostError(self._message_here(failure))

    def _message_here(self, failure: Failure) -> str:
        if failure.rank == self.rank:
            return f"the other ranks have gone on without this one: {failure.message}"
        if failure.reported_by == self.rank and failure.rank is None:
            return failure.message
        return f"{failure.message} (rank {self.rank} cannot go on; it was {self.activity})"

    def _describe_unknown_failure(self, error: BaseException) -> str:
        others = "; ".join(
            f"rank {rank} is {peer.heartbeat.activity} for {peer.heartbeat.seconds} seconds"
            for rank, peer in sorted(self._peers.items())
        )
        unseen = [rank for rank in self._ranks if rank not in self._peers]
        if unseen:
            others += f"{'; ' if others else ''}nothing was heard yet of {_ranks(unseen)}"
        return (
            f"rank {self.rank} lost its connection to other ranks {self.activity}, or got no "
            f"answer in time, and no rank has reported an error ({others}): "
            f"{type(error).__name__}: {error}"
        )

    def _publish(self, failure: Failure) -> Failure:
        """Publish a failure, unless another was published before; returns the published one."""
        if self._failure is None:
            self._failure = failure
            self._wake.set()
            deadline = time.monotonic() + _TELL_SECONDS
            while not self._is_published and self._store_broke_at is None:
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.02)
            if not self._is_published and failure.rank == failure.reported_by == self.rank:
                text = "the launch's store does not answer; other ranks are not told: %s"
                logger.warning(text, failure.message)
        return self._failure

    # -- the end of this process -------------------------------------------------------------

    def watch_exit(self) -> None:
        """Tell the others how this process ends: in order, or by which error.

        Otherwise only this rank would see what is raised outside of a step (by the optimizer, the
        data, a save), while the others wait for it.
        """
        atexit.register(self.close)
        before = sys.excepthook

        def tell(kind: Any, error: Any, traceback: Any) -> None:
            if not self._is_active():
                before(kind, error, traceback)
                return
            reason = self.translate_error(error)
            if reason is not error:
                reason.__cause__ = error
                kind, error, traceback = type(reason), reason, None
            elif not isinstance(error, RankLostError) and not self._has_failed:
                self.report_failure(error)
            before(kind, error, traceback)

        sys.excepthook = tell

    def _is_active(self) -> bool:
        # A forked child inherits the hooks, but neither the threads nor a rank.
        return os.getpid() == self._process.pid and not self._stop.is_set()

    def close(self) -> None:
        """Stop watching, and tell the others that this rank left, if it did not fail.

        The process that holds the store waits until they have read it, for seconds at most.
        """
        if not self._is_active():
            return
        if self._exit_message is not None and self._failure is None and self._is_joined():
            self._publish(Failure(self.rank, self.rank, self._exit_message))
        self._left = True
        self._wake.set()
        deadline = time.monotonic() + _TELL_SECONDS
        talks = self._threads[0].is_alive
        while time.monotonic() < deadline and self._store_broke_at is None and talks():
            # Where the group was left before, the others had the time to read it.
            waits = self.rank == self._store_rank and self._is_joined()
            if self._left_is_published and not (waits and any(map(self._needs_store, self._ranks))):
                break
            time.sleep(0.02)
            self._wake.set()
        self._stop.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(timeout=1)

    def _needs_store(self, rank: int) -> bool:
        peer = self._peers.get(rank)
        if peer is None or peer.heartbeat.has_left or peer.heartbeat.knows_end:
            return False
        return process_state(peer.heartbeat.process, self._process) not in ("gone", "stopped")

    # -- the thread that talks to the store --------------------------------------------------

    def _exchange_heartbeats(self) -> None:
        number, due, knew_end = 0, 0.0, False
        while not self._stop.is_set():
            began = time.monotonic()
            if not self._is_joined():
                self._left = True
            try:
                self._exchange_failure()
                if self._store_rank is not None and self._store_rank != self.rank:
                    self._read_heartbeat(self._store_rank)
                knows_end = self._failure is not None or self._store_rank_left()
                if began >= due or self._wake.is_set() or knows_end != knew_end:
                    self._wake.clear()
                    number, due, left = number + 1, began + self._beat_seconds, self._left
                    knew_end = knows_end
                    seconds = int(began - self._since)
                    heartbeat = Heartbeat(
                        number, self.activity, seconds, self._process, left, knows_end
                    )
                    self._client.set(f"sppo/alive/{self.rank}", json.dumps(asdict(heartbeat)))
                    self._left_is_published = left
                    if self._is_published and self._store_rank != self.rank:
                        # All is said and known. Who holds the store may end it from now on, of
                        # which a read would print a C++ backtrace, after the reason.
                        return
                    for rank in self._ranks:
                        self._read_heartbeat(rank)
                    self._store_read_at = began
                self._store_broke_at = None
            except (RuntimeError, OSError) as error:
                self._wake.clear()
                if self._store_broke_at is None:
                    self._store_broke_at, self._store_error = time.monotonic(), str(error)
                if self._store_rank_left():
                    return  # that rank ended the store in order
            if self._left and self._left_is_published and not self._is_joined():
                return
            self._wake.wait(self._tick_seconds)

    def _exchange_failure(self) -> None:
        """Write the failure found here to the store, or read that of others."""
        if self._failure is None:
            if self._client.check(["sppo/failed"]):
                self._failure = Failure(**json.loads(self._client.get("sppo/failed")))
                self._is_published = True
        elif not self._is_published:
            # The first to fail is blamed: what follows is its consequence.
            own = json.dumps(asdict(self._failure))
            written = self._client.compare_set("sppo/failed", "", own)
            if written is not None and not self._has_failed:
                self._failure = Failure(**json.loads(written))
            self._is_published = True

    def _read_heartbeat(self, rank: int) -> None:
        key = f"sppo/alive/{rank}"
        if rank not in self._peers and not self._client.check([key]):
            return
        heartbeat, now = Heartbeat.parse(self._client.get(key)), time.monotonic()
        peer = self._peers.get(rank)
        if peer is None:
            self._peers[rank] = _Peer(heartbeat, now)
        elif heartbeat != peer.heartbeat:
            peer.heartbeat, peer.changed_at = heartbeat, now

    def _store_rank_left(self) -> bool:
        peer = None if self._store_rank is None else self._peers.get(self._store_rank)
        return peer is not None and peer.heartbeat.has_left

    # -- the thread that judges --------------------------------------------------------------

    def _watch_peers(self) -> None:
        while not self._stop.wait(self._tick_seconds):
            if not self._is_joined():
                return
            failure = self._find_failure()
            if failure is not None:
                self._end_after_grace(self._publish(failure))
                return

    def _find_failure(self, *, urgent: bool = False) -> Failure | None:
        """Find the failure of the launch, by what is known now.

        With `urgent` a connection broke, so some rank is lost, and weaker signs count as well.
        """
        if self._failure is not None:
            return self._failure
        now = time.monotonic()
        if now - self._checked_at > self._timeout / 2:
            # This process was stopped, or its interpreter blocked: what was read is old.
            self._stopped_seconds, self._resumed_at = now - self._checked_at, now
            self._store_read_at = now
        self._checked_at = now
        found = self._find_ended_process(urgent=urgent) or self._find_silent_rank(urgent=urgent)
        found = found or self._find_lost_store(now, urgent=urgent)
        for rank, peer in list(self._peers.items() if urgent or self._section_depth else ()):
            # A rank that ended in order while this one needs it; in the last step some ranks
            # finish long before others.
            untrained = peer.heartbeat.activity == _BEFORE_TRAINING
            if found is None and peer.heartbeat.has_left and (urgent or untrained):
                how = "its process ended without an error (at the end of its script, or sys.exit)"
                found = self._lost(rank, how)
        if urgent and self._stopped_seconds > self._timeout > now - self._resumed_at:
            message = (
                f"rank {self.rank} itself was stopped, or held up, for {self._stopped_seconds:.0f} "
                f"seconds {self.activity}, longer than pp_timeout_seconds"
            )
            found = Failure(self.rank, -1, message)
        return found

    def _find_ended_process(self, *, urgent: bool) -> Failure | None:
        """Find a rank of this machine whose process ended without telling why."""
        for rank, peer in list(self._peers.items()):
            if peer.may_end(urgent=urgent):
                continue
            if process_state(peer.heartbeat.process, self._process) != "gone":
                continue
            if peer.gone_at is None:
                peer.gone_at = time.monotonic()
                self._wake.set()
            # Its own failure may be newer than what was read; not that of the rank that holds the
            # store, which waits until all have read it.
            unreadable = self._store_broke_at is not None and rank == self._store_rank
            if self._store_read_at > peer.gone_at or unreadable:
                return self._lost(
                    rank, "its process ended without an error (by a signal, or by os._exit)"
                )
        return None

    def _find_silent_rank(self, *, urgent: bool) -> Failure | None:
        """Find a rank without a heartbeat for too long."""
        for rank, peer in list(self._peers.items()):
            if peer.may_end(urgent=urgent) or peer.gone_at is not None:
                continue
            state = process_state(peer.heartbeat.process, self._process)
            limit = self._timeout
            if urgent and state is None:
                limit = 4 * self._beat_seconds
            elif urgent and state == "stopped":
                limit = 2 * self._beat_seconds
            # Until the last reading: a store that does not answer says nothing of other ranks.
            silent = self._store_read_at - peer.changed_at
            if silent > limit:
                return self._lost(rank, self._describe_silence(silent, state))
        return None

    def _find_lost_store(self, now: float, *, urgent: bool) -> Failure | None:
        """Find that the process that holds the store is lost."""
        if self._store_rank_left():
            return None
        peer = None if self._store_rank is None else self._peers.get(self._store_rank)
        state = None if peer is None else process_state(peer.heartbeat.process, self._process)
        weak = urgent and state != "runs"
        broke_at, unread = self._store_broke_at, now - self._store_read_at
        if broke_at is not None:
            if now - broke_at <= (2 * self._beat_seconds if weak else self._timeout / 2):
                return None
            message = f"the process that holds the launch's store is gone ({self._store_error})"
        else:
            if unread <= self._beat_seconds + (4 * self._beat_seconds if weak else self._timeout):
                return None
            silence = self._describe_silence(unread, state)
            message = f"the launch's store, which it holds, does not answer; {silence}"
        if self._store_rank is None or self._store_rank == self.rank:
            return Failure(None, self.rank, message.replace(", which it holds,", ""))
        return self._lost(self._store_rank, message)

    def _describe_silence(self, seconds: float, state: str | None) -> str:
        stopped = "; its process is stopped" if state == "stopped" else ""
        return (
            f"it has given no sign of life for {seconds:.0f} seconds "
            f"(pp_timeout_seconds: {self._timeout:g}){stopped}"
        )

    def _lost(self, rank: int, how: str) -> Failure:
        peer = self._peers.get(rank)
        last = "" if peer is None else f", last seen {peer.heartbeat.activity}"
        return Failure(rank, self.rank, f"lost rank {rank}{last}: {how}")

    def _end_after_grace(self, failure: Failure) -> None:
        if failure.rank == failure.reported_by == self.rank:
            return  # the exception is on its way
        # A rank that does not need the others may be about to end in order.
        waited = needed = 0.0
        while needed < _GRACE_SECONDS and waited < self._timeout:
            if self._stop.wait(0.1) or not self._is_joined():
                return
            waited += 0.1
            needed = needed + 0.1 if self._section_depth else 0.0
        self._end_process(f"sppo_hf: rank {self.rank} ends because {self._message_here(failure)}")


# -- the watchdog of this process ------------------------------------------------------------

_current: tuple[Watchdog, Any] | None = None
_lock = threading.Lock()


def watch_launch(timeout_seconds: float) -> Watchdog:
    """Return the watchdog of this process and its process group; started on the first call."""
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
            store_rank=None if agent else 0,
            is_joined=lambda: dist.is_initialized() and dist.group.WORLD is world,
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
    """Return the watchdog of this process; None where it is in no pipeline."""
    return None if _current is None else _current[0]


@contextlib.contextmanager
def collective_section(detail: str | None = None) -> Iterator[None]:
    """Enter `Watchdog.collective_section` of this process's watchdog, if any; also a decorator."""
    current = watchdog()
    with contextlib.nullcontext() if current is None else current.collective_section(detail):
        yield


def _ranks(numbers: Iterable[int]) -> str:
    return ", ".join(f"rank {number}" for number in numbers)


def _clone_store() -> Any:
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def _end_process(message: str) -> None:
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)  # noqa: T201 (the process ends here)
    os._exit(EXIT_STATUS)
