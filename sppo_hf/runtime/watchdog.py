"""Signs of life between the ranks of a launch, so that one that dies or throws ends them all.

Every rank counts up a number in the launch's key-value store and reads its neighbours'. A rank that
throws writes down why, where others find it. Whoever learns that a rank is gone has its main thread
a little time to fail by itself (its messages break off, as a rule); if it is stuck in a collective,
the process ends, with the reason printed.

Knows nothing of schedules or models; what a rank is doing is told to it as text.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import distributed as dist

from sppo_hf.errors import PipelineError

logger = logging.getLogger(__name__)

EXIT_STATUS = 70
"""Of a process that the watchdog ends (EX_SOFTWARE of sysexits.h)."""

_GRACE_SECONDS = 5.0
_WORDS_SECONDS = 3.0


class Watchdog:
    """Watches the other ranks of a launch from a thread of its own."""

    def __init__(
        self,
        rank: int,
        others: Iterable[int],
        *,
        timeout_seconds: float,
        store: Any = None,
        end: Callable[[str], None] | None = None,
    ) -> None:
        """Start watching.

        Args:
            rank: This rank, of all.
            others: The ranks to watch.
            timeout_seconds: Without a sign of life for so long, a rank counts as dead.
            store: A key-value store of the launch; by default the process group's own.
            end: Ends the process with a message; for tests.
        """
        self._rank = rank
        self._others = [other for other in others if other != rank]
        self._timeout = timeout_seconds
        self._pause = min(2.0, timeout_seconds / 8)
        # A client of its own: one that waits blocks all threads that share it.
        self._store = _own_client() if store is None else store
        self._end = end or _end_process
        self.activity = "starting"
        """What this rank does."""
        self._failure: str | None = None
        self._failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sppo-watchdog", daemon=True)
        self._thread.start()

    def doing(self, what: str) -> None:
        """What this rank does now, for the words of others when it dies."""
        self.activity = what

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed."""
        self._failed = True
        words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        text = f"rank {self._rank} failed while {self.activity}: {words}"
        try:
            # The first one to fail is the one to blame: what follows is its consequence.
            self._store.compare_set("sppo/failed", "", text)
        except (RuntimeError, OSError):
            logger.warning("the launch's store is gone; other ranks are not told: %s", text)

    def explain(self, error: BaseException) -> BaseException:
        """What to raise for an error of this rank: the reason, where another rank failed first."""
        deadline = time.monotonic() + _WORDS_SECONDS
        while time.monotonic() < deadline:
            told = self._failure or self._told()
            if told is not None:
                if told.startswith(f"rank {self._rank} "):
                    return error
                return PipelineError(f"another rank of the launch failed: {told}")
            time.sleep(0.1)
        return error

    def watch_exit(self) -> None:
        """Tell the others how this process ends: in order, or by which error.

        What is raised outside of a step (by the optimizer, the data, a save) is else only seen by
        its own rank, while the others wait for it.
        """
        atexit.register(self.close)
        before = sys.excepthook

        def tell(kind: Any, error: Any, traceback: Any) -> None:
            if not self._failed:
                self.report(error)
            before(kind, error, traceback)

        sys.excepthook = tell

    def close(self) -> None:
        """Stop watching; the others are told that this rank left in order, if it did not fail."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout=5)
        if self._failed:
            return
        try:
            self._store.set(f"sppo/alive/{self._rank}", "left")
        except (RuntimeError, OSError):
            logger.debug("the launch's store is gone already")

    def _told(self) -> str | None:
        try:
            if self._store.check(["sppo/failed"]):
                return self._store.get("sppo/failed").decode()
        except (RuntimeError, OSError):
            return None
        return None

    def _watch(self) -> None:
        seen: dict[int, tuple[bytes, float]] = {}
        count = 0
        lost_store: float | None = None
        while not self._stop.wait(self._pause):
            count += 1
            try:
                self._store.set(f"sppo/alive/{self._rank}", f"{count} {self.activity}")
                failure = self._told() or self._silent(seen)
                lost_store = None
            except (RuntimeError, OSError) as error:
                if any(value == b"left" for value, _ in seen.values()):
                    return  # the one that held the store has left in order: all are about to
                lost_store = lost_store or time.monotonic()
                failure = None
                if time.monotonic() - lost_store > self._timeout / 2:
                    failure = f"the process that holds the launch's store is gone ({error})"
            if failure is not None:
                self._fail(failure)
                return

    def _silent(self, seen: dict[int, tuple[bytes, float]]) -> str | None:
        now = time.monotonic()
        for other in self._others:
            key = f"sppo/alive/{other}"
            value = self._store.get(key) if self._store.check([key]) else b""
            before, since = seen.get(other, (b"", now))
            if value != before or value == b"left":
                before, since = value, now
            seen[other] = (before, since)
            if value and now - since > self._timeout:
                words = value.decode().partition(" ")[2]
                return (
                    f"rank {other} has given no sign of life for {self._timeout:.0f} seconds "
                    f"(pp_timeout_seconds); it was last seen {words}"
                )
        return None

    def _fail(self, failure: str) -> None:
        self._failure = failure
        if failure.startswith(f"rank {self._rank} "):
            return  # our own words; the exception is on its way
        if not self._stop.wait(_GRACE_SECONDS):
            self._end(f"sppo_hf: rank {self._rank} ends because {failure}")


def _own_client() -> Any:
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def _end_process(message: str) -> None:
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)  # noqa: T201 (the process ends here)
    os._exit(EXIT_STATUS)
