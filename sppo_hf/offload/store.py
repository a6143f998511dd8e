"""Stores of tiers behind the host: background threads write host bytes away and read them back.

`TierSpace` is what a tier gives: where bytes are kept, and how they are written and read. `Store`
is what others call: it does a space's work in threads. `Transfers` counts what is queued and makes
the host wait where it must. Threads refer to `Transfers` and not to the store, so that a store that
nobody refers to any more can be closed, even with work in its queue.

Writes and reads have separate threads and queues, so that neither waits behind the other. What
waits to be written is bounded: a host that produces faster than the tier takes is held back.

Nothing here imports torch, so that planning can read a tier whose space is in the same file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from sppo_hf.errors import BudgetError, OffloadError

if TYPE_CHECKING:
    from torch import Tensor

    from sppo_hf.planning.tiers import TierModel

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
"""Memory as a NumPy array, uint8 [n]."""

DEFAULT_QUEUED_BYTES = 256 * 2**20
"""Bytes that may wait to be written: 40 ms of a fast disk, enough to keep its threads busy."""
SLOW_WAIT_SECONDS = 30.0
"""After a single wait of this length the host logs one warning that the tier is slow."""

_SUMMED_BYTES = 4096
_WEIGHTS = np.random.default_rng(0).integers(0, 2**63, _SUMMED_BYTES // 8, np.uint64) * 2 + 1
"""Odd factors of a block's words in its checksum, uint64 [512]; the same ones in every process."""


def checksum(memory: Bytes) -> int:
    """Return a 32-bit checksum of uint8 `memory` [n].

    The CRC-32 of one 64-bit sum for each block of 4096 bytes: its words times odd factors, modulo
    2**64. Factors differ, and a CRC knows order, so neither words nor blocks change places unseen.
    Zeroed, stale, foreign or flipped bytes go unseen in one case of 2**32; more often only if
    nothing but the highest bits of several words of one block are flipped, which can cancel. It
    does not protect against deliberate changes.

    Four times as fast as the CRC-32 of all bytes, in one call that leaves Python's lock free.
    """
    whole_bytes = memory.size - memory.size % _SUMMED_BYTES
    sums = memory[:whole_bytes].view(np.uint64).reshape(-1, _WEIGHTS.size).dot(_WEIGHTS)
    return zlib.crc32(memory[whole_bytes:].data, zlib.crc32(sums.data))


@dataclass(slots=True, eq=False)
class Slot:
    """What `TierSpace.allocate` returns unless a subclass has a place of its own."""

    num_bytes: int
    held: Any = None
    """Whatever `write` leaves here for `read`."""

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes"


class TierSpace:
    """Where a tier behind the host keeps bytes. A subclass has at least `write` and `read`.

    `allocate` and `free` are called one at a time; `write` and `read` in several threads at once,
    for each place first one write and then any number of reads. They may block, and raise what they
    like: the step then ends with an `OffloadError` that names it.

    Args:
        tier: The tier, for messages.
        budget_bytes: Maximum of all places together; None for no limit.
    """

    threads: int = 2
    """Number of threads that write, and of threads that read."""

    def __init__(self, tier: TierModel, budget_bytes: int | None) -> None:
        self.tier = tier
        self.budget_bytes = budget_bytes
        self.reserved_bytes = 0
        """Bytes that are taken from the machine now, in use or not."""

    def allocate(self, num_bytes: int) -> Any:
        """Take space for `num_bytes` and return the place.

        Raises:
            BudgetError: There is none; the bytes then go to the next tier, if any.
            OffloadError: The machine gives none.
        """
        if self.budget_bytes is not None and self.reserved_bytes + num_bytes > self.budget_bytes:
            raise BudgetError(
                f"{self.tier.name} tier: {num_bytes} bytes more are needed, while "
                f"{self.reserved_bytes} of {self.budget_bytes} bytes are in use. {self.tier.remedy}"
            )
        self.reserved_bytes += num_bytes
        return Slot(num_bytes)

    def free(self, place: Any) -> None:
        """Give the space of a place back; no write or read of it is under way, or none ever was."""
        self.reserved_bytes -= place.num_bytes
        place.held = None

    def write(self, place: Any, source: Bytes, on_moved: Callable[[int], None]) -> None:
        """Keep `source`, uint8 [n]; `on_moved` may be told the bytes as they move, for messages."""
        raise NotImplementedError

    def read(self, place: Any, target: Bytes, on_moved: Callable[[int], None]) -> None:
        """Fill `target`, uint8 [n], with what was written."""
        raise NotImplementedError

    def describe(self, action: str, place: Any, error: OSError) -> str:
        """Return why a transfer failed, and the remedy; `action` is "writing" or "reading"."""
        return f"{action} {place} failed: {error}"

    def close(self) -> None:
        """Give everything back; nothing is under way."""

    def __str__(self) -> str:
        return f"the {self.tier.name} tier"


@dataclass(slots=True, eq=False)
class Extent:
    """Bytes that a `Store` keeps; opaque to its holder."""

    num_bytes: int
    place: Any
    """Where, as the space says it."""
    transfers: int = 0
    """Writes and reads that are not over."""
    released: bool = False
    written: Future[None] | None = field(default=None, repr=False)
    """The write that fills it."""
    checksum: int | None = None
    """Checksum of what was written, if the store checks."""
    failure: OffloadError | None = field(default=None, repr=False)
    """The error by which the bytes were lost."""


@dataclass(eq=False)
class Transfers:
    """Counts a store's transfers and does the work of its threads.

    All counters are guarded by `lock`.
    """

    name: str
    """Name of the tier."""
    space: TierSpace
    """Keeps the bytes."""
    _: KW_ONLY
    verify: bool
    """Whether what is read must have the checksum of what was written."""
    max_queued_bytes: int
    """Bytes that may wait to be written."""

    def __post_init__(self) -> None:
        # Reentrant, because a garbage collection in here may close a store. Entered itself and not
        # through the condition, whose `__enter__` is written in Python: a Ctrl-C may end that after
        # it has acquired the lock, which the threads would then wait for for ever.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Notified when a transfer is over."""
        self.process_id = os.getpid()
        self.closed = False
        self.threads: set[int] = set()
        self.queued_bytes = 0
        self._moved_bytes = 0
        self._num_releasing = 0
        self._is_slow_reported = False

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child of the store's process."""
        return os.getpid() != self.process_id

    def check_usable(self) -> None:
        """Raise if the store cannot be used here.

        Raises:
            OffloadError: This is a forked child, or the store was closed.
        """
        self.check_process()
        if self.closed:
            raise OffloadError(f"the store of {self.space} was closed; make a new one")

    def check_process(self) -> None:
        """Raise in a forked child, which has none of the threads."""
        if self.is_foreign:
            raise OffloadError(
                f"the store of {self.space} belongs to process {self.process_id} and cannot be "
                f"used in process {os.getpid()}, which was forked from it; make a store of its own "
                "there"
            )

    def allocate(self, num_bytes: int) -> Extent:
        """Allocate an extent, waiting for those that are about to be freed; called with the lock.

        Raises:
            BudgetError: The tier is full, and no extent is about to be freed.
            OffloadError: The store was closed.
        """
        since = self._now()
        while True:
            self.check_usable()
            try:
                return Extent(num_bytes, self.space.allocate(num_bytes))
            except BudgetError:
                if not self._num_releasing:
                    raise
            self.changed.wait(SLOW_WAIT_SECONDS)
            self._report_if_slow(since)

    def admit(self, extent: Extent) -> None:
        """Wait until a write fits into the queue, and count it; called with the lock.

        A write that is larger than the whole queue goes alone.

        Raises:
            OffloadError: The store was closed.
        """
        since, left_bytes = self._now(), self.max_queued_bytes - extent.num_bytes
        while self.queued_bytes and self.queued_bytes > left_bytes and not self.closed:
            self.changed.wait(SLOW_WAIT_SECONDS)
            self._report_if_slow(since)
        self.check_usable()
        extent.transfers += 1
        self.queued_bytes += extent.num_bytes

    def release(self, extent: Extent) -> None:
        """Free an extent as soon as no transfer touches it."""
        with self.lock:
            assert not extent.released, "an extent was released twice"
            extent.released = True
            if self.closed:
                return
            self._num_releasing += 1
            if extent.transfers == 1 and extent.written is not None and extent.written.cancel():
                self.end_write(extent)
            else:
                self._free_if_over(extent)

    def end_write(self, extent: Extent) -> None:
        """Count a write as over, whether it ran or was cancelled."""
        with self.lock:
            self.queued_bytes -= extent.num_bytes
            self.end_transfer(extent)

    def end_transfer(self, extent: Extent) -> None:
        """Count a transfer as over."""
        with self.lock:
            extent.transfers -= 1
            self._free_if_over(extent)
            self.changed.notify_all()

    def write(self, extent: Extent, source: Bytes) -> None:
        """Fill `extent` from `source`, uint8 [n]; runs in a thread.

        Raises:
            OffloadError: The tier refused.
        """
        try:
            with self._naming_place("writing", extent):
                if self.verify:
                    extent.checksum = checksum(source)
                self.space.write(extent.place, source, self._count)
        finally:
            # Before the ticket is done, so that whoever has waited for it finds the counters right.
            self.end_write(extent)

    def read(self, extent: Extent, target: Bytes) -> None:
        """Fill `target`, uint8 [n], from `extent`, after its write; runs in a thread.

        Raises:
            OffloadError: The tier refused, now or in the write, or gave other bytes.
        """
        try:
            assert extent.written is not None, "an extent that is read has a write"
            lost = extent.failure or self.failure_of(extent.written)
            if lost is not None:
                raise OffloadError(self.failure_message(lost)) from lost
            with self._naming_place("reading", extent):
                self.space.read(extent.place, target, self._count)
                self._check(extent, target)
        finally:
            self.end_transfer(extent)

    def wait_for(self, future: Future[None]) -> None:
        """Block until a transfer is over, successfully or not."""
        since = self._now()
        while not future.done():
            # A cancelled transfer is over as well, and a timeout only means to look again.
            with contextlib.suppress(CancelledError, TimeoutError):
                future.exception(SLOW_WAIT_SECONDS)
            self._report_if_slow(since)

    def failure_of(self, future: Future[None]) -> BaseException | None:
        """The error of a transfer, or None; waits until it is over."""
        try:
            return future.exception()
        except CancelledError as error:
            lost = OffloadError(f"the store of {self.space} was closed before")
            lost.__cause__ = error
            return lost

    def failure_message(self, failure: BaseException) -> str:
        """The message of a failed transfer; an unexpected error gets a prefix with its origin."""
        if isinstance(failure, OffloadError):
            return str(failure)
        return f"{self.name} tier: a transfer failed unexpectedly: {failure!r}"

    def _free_if_over(self, extent: Extent) -> None:
        if extent.released and not extent.transfers:
            self._num_releasing -= 1
            self.space.free(extent.place)

    def _check(self, extent: Extent, target: Bytes) -> None:
        if extent.checksum is None:
            return
        seen = checksum(target)
        if seen != extent.checksum:
            raise OffloadError(
                f"{self.name} tier: {extent.place} came back changed: their checksum is "
                f"{seen:#010x} and was {extent.checksum:#010x} when written. The hardware of "
                f"{self.space} is failing, or something else wrote there; offload to another place"
            )

    @contextmanager
    def _naming_place(self, action: str, extent: Extent) -> Iterator[None]:
        """Turn the system's error into one that names the place, and store it in the extent."""
        try:
            yield
        except OSError as error:
            reason = self.space.describe(action, extent.place, error)
            extent.failure = OffloadError(f"{self.name} tier: {reason}")
            raise extent.failure from error
        except OffloadError as error:
            extent.failure = error
            raise

    def _count(self, moved_bytes: int) -> None:
        with self.lock:
            self._moved_bytes += moved_bytes

    def _now(self) -> tuple[float, int]:
        """(seconds, bytes moved) at which a wait begins."""
        return time.monotonic(), self._moved_bytes

    def _report_if_slow(self, since: tuple[float, int]) -> None:
        seconds, moved_bytes = time.monotonic() - since[0], self._moved_bytes - since[1]
        if seconds < SLOW_WAIT_SECONDS or self._is_slow_reported:
            return
        self._is_slow_reported = True
        logger.warning(
            "waiting for %s for %.1f s now, in which it moved %d bytes (%.3g bytes/s). Is it that "
            "slow, or stuck? Raise host_memory so that less goes there, or offload to a faster "
            "place",
            *(self.space, seconds, moved_bytes, moved_bytes / seconds),
        )


class Transfer:
    """One transfer between host memory and a tier, under way or over.

    Args:
        transfers: Counts it, and does its work.
        future: The work of a thread.
        needed: Whether a cancelled transfer is an error. It is for a read; a write that was
            cancelled by its extent's release leaves the memory free just as well.
    """

    __slots__ = ("_future", "_needed", "_transfers")

    def __init__(self, transfers: Transfers, future: Future[None], *, needed: bool) -> None:
        self._transfers = transfers
        self._future = future
        self._needed = needed

    def done(self) -> bool:
        """Whether the transfer is over and its memory free or filled; does not block.

        Raises:
            OffloadError: The transfer failed, or the store was closed before a read.
        """
        self._transfers.check_process()
        if not self._future.done():
            return False
        self._raise_failure()
        return True

    def wait(self) -> None:
        """Block the host until the transfer is over.

        Raises:
            OffloadError: As for `done`.
        """
        self._transfers.check_process()
        if not self._future.done():
            self._transfers.wait_for(self._future)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._future.cancelled() and not self._needed:
            return
        failure = self._transfers.failure_of(self._future)
        if failure is not None:
            # A new one each time, since raising adds to an error's traceback.
            raise OffloadError(self._transfers.failure_message(failure)) from failure


class Store:
    """Keeps host bytes on a tier behind the host until they are released.

    Methods may be called from any thread, but only in the process that made the store.

    Args:
        name: Name of the tier.
        space: Keeps the bytes; closed with the store.
        checksum: Check all bytes that are read, in the background threads.
        max_queued_bytes: Bytes that may wait to be written.

    Raises:
        OffloadError: The system gives no threads; the space is closed.
    """

    def __init__(
        self,
        name: str,
        space: TierSpace,
        *,
        checksum: bool = True,
        max_queued_bytes: int = DEFAULT_QUEUED_BYTES,
    ) -> None:
        assert space.threads > 0, "there is at least one thread"
        self.name = name
        self.space = space
        self.transfers = Transfers(name, space, verify=checksum, max_queued_bytes=max_queued_bytes)
        """Does the work of the threads, and counts it."""
        try:
            self._writers = _make_threads(self.transfers, "write")
            self._readers = _make_threads(self.transfers, "read")
        except BaseException:
            space.close()
            raise
        # Runs on close, when nobody refers to the store any more, or at the interpreter's exit.
        self._finalizer = weakref.finalize(
            self, _close_store, self.transfers, self._writers, self._readers
        )

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the space has taken from the machine, in use or not."""
        return self.space.reserved_bytes

    def allocate(self, num_bytes: int) -> Extent:
        """Allocate space, for one write; blocks while space that was released is still in use.

        Raises:
            BudgetError: The budget or the machine has no space.
            OffloadError: The store was closed, or the machine gives no space.
        """
        self.transfers.check_process()  # first: a forked child may find the lock held for ever
        with self.transfers.lock:
            return self.transfers.allocate(num_bytes)

    def start_write(self, extent: Extent, host_bytes: Tensor) -> Transfer:
        """Start filling an extent with `host_bytes`, uint8 [n], n > 0; blocks while too much waits.

        The bytes must not change until the transfer is done.

        Raises:
            OffloadError: The store was closed.
        """
        source = _as_array(extent, host_bytes)
        transfers = self.transfers
        transfers.check_process()
        with transfers.lock:
            transfers.admit(extent)
            try:
                extent.written = self._writers.submit(transfers.write, extent, source)
            except BaseException:
                transfers.end_write(extent)
                raise
        return Transfer(transfers, extent.written, needed=False)

    def start_read(self, extent: Extent, host_bytes: Tensor) -> Transfer:
        """Start filling `host_bytes`, uint8 [n], with an extent of n bytes, after its write.

        Raises:
            OffloadError: The extent was lost by a failed transfer, or the store was closed.
        """
        target = _as_array(extent, host_bytes)
        transfers = self.transfers
        transfers.check_process()
        with transfers.lock:
            transfers.check_usable()
            assert not extent.released, "an extent was read after its release"
            if extent.failure is not None:
                raise OffloadError(str(extent.failure)) from extent.failure
            extent.transfers += 1
            try:
                future = self._readers.submit(transfers.read, extent, target)
            except BaseException:
                transfers.end_transfer(extent)
                raise
        return Transfer(transfers, future, needed=True)

    def release(self, extent: Extent) -> None:
        """Release an extent, at any moment; its bytes are free once its transfers are over.

        A write that has not begun is cancelled. Reads that were started are finished.
        """
        self.transfers.check_process()
        self.transfers.release(extent)

    def close(self) -> None:
        """Cancel what waits, end the threads and close the space; does nothing the second time.

        Transfers under way are finished first. What was not read is lost, and its tickets raise.
        """
        self._finalizer()

    def __reduce__(self) -> NoReturn:
        """Raise: threads and a lock can be neither pickled nor copied."""
        raise TypeError(
            f"the store of {self.space} can be neither pickled nor copied, since what it keeps "
            "belongs to this process; make a Store in the process or place that needs one"
        )


def _make_threads(transfers: Transfers, action: str) -> ThreadPoolExecutor:
    """Return an executor all of whose threads run already.

    One that were to be started in the middle of a step might be refused then, and what `submit`
    raises for would still be queued, and be done later by another thread.

    Raises:
        OffloadError: The system gives no threads.
    """
    threads = ThreadPoolExecutor(
        transfers.space.threads,
        thread_name_prefix=f"sppo-{transfers.name}-{action}",
        initializer=lambda: transfers.threads.add(threading.get_ident()),
    )
    all_run = threading.Event()
    try:
        for _ in range(transfers.space.threads):
            threads.submit(all_run.wait)
    except RuntimeError as error:
        raise OffloadError(
            f"the system gives no threads for {transfers.space} ({error}); raise the limit of "
            "processes (ulimit -u, or the container's), or use fewer of them"
        ) from error
    finally:
        all_run.set()
    return threads


def _as_array(extent: Extent, host_bytes: Tensor) -> Bytes:
    assert host_bytes.device.type == "cpu", "tiers read and write host memory"
    assert host_bytes.dim() == 1, "tiers store flat bytes"
    assert host_bytes.is_contiguous(), "tiers store contiguous bytes"
    memory: Bytes = host_bytes.numpy()
    assert memory.dtype == np.uint8, "tiers store bytes"
    assert memory.size == extent.num_bytes, "an extent is written and read as a whole"
    return memory


def _close_store(
    transfers: Transfers, writers: ThreadPoolExecutor, readers: ThreadPoolExecutor
) -> None:
    """Close a store; not a method, so that it can run when the store object is gone."""
    if transfers.is_foreign:
        return
    if threading.get_ident() in transfers.threads:
        # A garbage collection in one of the store's threads, which cannot wait for itself.
        arguments, name = (transfers, writers, readers), f"sppo-{transfers.name}-end"
        threading.Thread(target=_close_store, args=arguments, name=name).start()
        return
    with transfers.lock:
        transfers.closed = True
        transfers.changed.notify_all()
    for executor in (writers, readers):
        executor.shutdown(wait=False, cancel_futures=True)
    for executor in (writers, readers):
        executor.shutdown(wait=True)
    transfers.space.close()
