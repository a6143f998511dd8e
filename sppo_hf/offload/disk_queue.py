"""The background side of the disk tier: what transfers do, what they cost, and who waits for them.

`disk` puts it together. Threads refer to `Transfers` and not to the store, so that a store that
nobody refers to any more goes, even with work in its queue.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.disk import DiskExtent, DiskSpace, describe
from sppo_hf.offload.disk_files import Bytes, StoreFolder, checksum

logger = logging.getLogger(__name__)

SLOW_WAIT_SECONDS = 30.0
"""A host that waits as long as this in one piece for the disk is told so, once."""


class Transfers:
    """Books and work of a store's threads; every number is guarded by `changed`.

    Args:
        folder: where the files are.
        space: who owns which of their bytes.
        verify: whether what is read must have the checksum of what was written.
        max_queued_bytes: what may wait to be written.
    """

    def __init__(
        self, folder: StoreFolder, space: DiskSpace, *, verify: bool, max_queued_bytes: int
    ) -> None:
        self.folder = folder
        self.space = space
        # Reentrant, because a garbage collection in here may close a store.
        self.changed = threading.Condition(threading.RLock())
        self.closed = False
        self.threads: set[int] = set()
        self.queued_bytes = 0
        self.write_bytes = 0
        self.read_bytes = 0
        self.wait_seconds = 0.0
        self._verify = verify
        self._max_queued_bytes = max_queued_bytes
        self._moved_bytes = 0
        self._ending = 0
        self._told_slow = False

    def check_usable(self) -> None:
        """Refuse to work for another process, or after the end.

        Raises:
            OffloadError: this is a forked child, or the store was closed.
        """
        self.check_process()
        if self.closed:
            raise OffloadError(f"the disk store in {self.folder.path} was closed; make a new one")

    def check_process(self) -> None:
        """Refuse to work for another process, which has none of our threads."""
        if self.folder.is_foreign:
            raise OffloadError(
                f"the disk store in {self.folder.path} belongs to process "
                f"{self.folder.process_id} and cannot be used in process {os.getpid()}, which was "
                "forked from it; make a store of its own there"
            )

    def admit(self, num_bytes: int) -> DiskExtent:
        """Wait until the queue has room for a write, and lend its extent; called with the lock.

        What is larger than the whole queue goes alone.

        Raises:
            BudgetError: there is no room on the disk, and none is about to be given back.
            OffloadError: the store was closed.
        """
        if self.queued_bytes and self.queued_bytes + num_bytes > self._max_queued_bytes:
            with self._waiting() as still:
                while self.queued_bytes and self.queued_bytes + num_bytes > self._max_queued_bytes:
                    self.changed.wait(SLOW_WAIT_SECONDS)
                    still()
                    self.check_usable()
        while True:
            self.check_usable()
            try:
                extent = self.space.allocate(num_bytes)
            except BudgetError:
                if not self._ending:
                    raise
                with self._waiting() as still:
                    self.changed.wait(SLOW_WAIT_SECONDS)
                    still()
                continue
            extent.transfers = 1
            self.queued_bytes += num_bytes
            return extent

    def release(self, extent: DiskExtent) -> None:
        """Give an extent back as soon as no transfer touches it."""
        with self.changed:
            assert not extent.released, "a disk extent was released twice"
            extent.released = True
            if self.closed:
                return
            self._ending += 1
            if extent.transfers == 1 and extent.written is not None and extent.written.cancel():
                self.end_write(extent)
            else:
                self._give_if_over(extent)

    def end_write(self, extent: DiskExtent) -> None:
        """Take a write off the books, over or never begun."""
        with self.changed:
            self.queued_bytes -= extent.num_bytes
            self.end_transfer(extent)

    def end_transfer(self, extent: DiskExtent) -> None:
        """Take a transfer off the books."""
        with self.changed:
            extent.transfers -= 1
            self._give_if_over(extent)
            self.changed.notify_all()

    def write(self, extent: DiskExtent, source: Bytes) -> None:
        """In a thread: fill `extent` from `source`, uint8 [n].

        Raises:
            OffloadError: the disk refused.
        """
        try:
            with self._blaming("writing", extent):
                if self._verify:
                    extent.checksum = checksum(source)
                extent.slab.file.write(source, extent.offset, self._count)
            with self.changed:
                self.write_bytes += extent.num_bytes
        finally:
            # Before the ticket is done, so that who has waited finds the books in order.
            self.end_write(extent)

    def read(self, extent: DiskExtent, target: Bytes) -> None:
        """In a thread: fill `target`, uint8 [n], from `extent` once that is written.

        Raises:
            OffloadError: the disk refused, now or in the write, or gave other bytes.
        """
        try:
            assert extent.written is not None, "a lent extent has a write"
            lost = extent.failure or self.failure_of(extent.written)
            if lost is not None:
                raise OffloadError(_told(lost)) from lost
            with self._blaming("reading", extent):
                extent.slab.file.read(target, extent.offset, self._count)
                self._check(extent, target)
            with self.changed:
                self.read_bytes += extent.num_bytes
        finally:
            self.end_transfer(extent)

    def wait_for(self, future: Future[None]) -> None:
        """Block until a transfer is over, however it ended."""
        with self._waiting() as still:
            while not future.done():
                # Cancelled is done as well; and time passing is no error of ours.
                with contextlib.suppress(CancelledError, TimeoutError):
                    future.exception(SLOW_WAIT_SECONDS)
                still()

    def failure_of(self, future: Future[None]) -> BaseException | None:
        """Why a transfer came to nothing, or None; waits until it is over."""
        try:
            return future.exception()
        except CancelledError as error:
            lost = OffloadError(f"the disk store in {self.folder.path} was closed before")
            lost.__cause__ = error
            return lost

    def _give_if_over(self, extent: DiskExtent) -> None:
        if extent.released and not extent.transfers:
            self._ending -= 1
            self.space.give(extent)

    def _check(self, extent: DiskExtent, target: Bytes) -> None:
        if extent.checksum is None:
            return
        seen = checksum(target)
        if seen != extent.checksum:
            raise OffloadError(
                f"disk tier: {extent} came back changed: their checksum is {seen:#010x} and was "
                f"{extent.checksum:#010x} when written. The disk, its cable or the memory is "
                "failing, or something wrote to the file; set offload_dir to a folder on another "
                "disk"
            )

    @contextmanager
    def _blaming(self, action: str, extent: DiskExtent) -> Iterator[None]:
        """Turn what the system says into an error that names the extent, and remember it there."""
        try:
            yield
        except OSError as error:
            extent.failure = OffloadError(describe(action, extent, error, self.folder))
            raise extent.failure from error
        except OffloadError as error:
            extent.failure = error
            raise

    def _count(self, moved_bytes: int) -> None:
        with self.changed:
            self._moved_bytes += moved_bytes

    @contextmanager
    def _waiting(self) -> Iterator[Callable[[], None]]:
        """Count the seconds that the host waits; yield what to call when it still has to."""
        start_seconds, start_bytes = time.monotonic(), self._moved_bytes

        def still() -> None:
            seconds = time.monotonic() - start_seconds
            if seconds < SLOW_WAIT_SECONDS or self._told_slow:
                return
            self._told_slow = True
            moved_bytes = self._moved_bytes - start_bytes
            logger.warning(
                "waiting for the disk in %s for %.1f s now, in which it moved %d bytes "
                "(%.3g bytes/s). Is it that slow, or stuck? Set offload_dir to a faster disk, or "
                "raise host_memory so that less goes there",
                *(self.folder.path, seconds, moved_bytes, moved_bytes / seconds),
            )

        try:
            yield still
        finally:
            with self.changed:
                self.wait_seconds += time.monotonic() - start_seconds


class DiskTicket:
    """What to ask about one transfer between memory and disk.

    Args:
        transfers: the books of its store.
        future: the transfer.
        needed: whether a transfer that was given up is an error. It is for a read; a write that
            its extent's release has called off leaves the memory free just as well.
    """

    __slots__ = ("_future", "_needed", "_transfers")

    def __init__(self, transfers: Transfers, future: Future[None], *, needed: bool) -> None:
        self._transfers = transfers
        self._future = future
        self._needed = needed

    def done(self) -> bool:
        """Whether the transfer is over and its memory free or filled; does not wait.

        Raises:
            OffloadError: the transfer failed, or the store was closed before a read.
        """
        self._transfers.check_process()
        if not self._future.done():
            return False
        self._raise()
        return True

    def wait(self) -> None:
        """Block the host until the transfer is over.

        Raises:
            OffloadError: as `done`.
        """
        self._transfers.check_process()
        if not self._future.done():
            self._transfers.wait_for(self._future)
        self._raise()

    def _raise(self) -> None:
        if self._future.cancelled() and not self._needed:
            return
        failure = self._transfers.failure_of(self._future)
        if failure is not None:
            # A new one each time, since raising adds to an error's traceback.
            raise OffloadError(_told(failure)) from failure


def _told(failure: BaseException) -> str:
    """What to say of a failed transfer; what is not ours does not say where it comes from."""
    if isinstance(failure, OffloadError):
        return str(failure)
    return f"disk tier: a transfer failed unexpectedly: {failure!r}"
