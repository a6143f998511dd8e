"""The disk tier's store: host bytes are written to files and read back by background threads.

`DiskStore` is what others call. `DiskSpace` allocates runs of bytes (extents) in files within a
budget, and `Transfers` counts what is queued, does the work of the threads and makes the host wait
where it must. Threads refer to `Transfers` and not to the store, so that a store that nobody refers
to any more can be closed, even with work in its queue.

Writes and reads have separate threads and queues, so that neither waits behind the other. What
waits to be written is bounded: a host that produces faster than the disk takes is held back. The
files (`disk_files`) are private, reserved at full size before anything is written to them, and
removed as soon as they are open, or at the end if the file system does not allow that.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.disk_files import (
    BLOCK_BYTES,
    DISK_FULL_ERRNOS,
    Bytes,
    SlabFile,
    StoreFolder,
    checksum,
)
from sppo_hf.offload.host_memory import FreeList, Run, Slab, SlabAllocator, round_up

logger = logging.getLogger(__name__)

DEFAULT_DISK_SLAB_BYTES = 2**30
DEFAULT_QUEUED_BYTES = 256 * 2**20
"""Bytes that may wait to be written: 40 ms of a fast disk, enough to keep its threads busy."""
SLOW_WAIT_SECONDS = 30.0
"""After a single wait of this length the host logs one warning that the disk is slow."""

_MIN_FREE_BYTES = 2**30
"""Disk space that the default budget leaves free."""
_GROWTH = 8
"""A new file is at most 1/8 of all files before it, so that little space is reserved in vain."""


@dataclass(slots=True, eq=False)
class DiskSlab(Slab):
    """One file and what is free of it."""

    file: SlabFile


@dataclass(slots=True, eq=False)
class DiskExtent(Run[DiskSlab]):
    """Bytes on the disk, allocated by a `DiskStore`; opaque to its holder."""

    transfers: int = 0
    """Writes and reads that are not over."""
    released: bool = False
    written: Future[None] | None = field(default=None, repr=False)
    """The write that fills it."""
    checksum: int | None = None
    """Checksum of what was written (`disk_files.checksum`), if the store checks."""
    failure: OffloadError | None = field(default=None, repr=False)
    """The error by which the bytes were lost."""

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes at offset {self.offset} of {self.slab.file}"


class DiskSpace(SlabAllocator[DiskSlab, DiskExtent]):
    """Allocates extents of files in a folder; called under the store's lock.

    Args:
        folder: Where the files are.
        slab_bytes: Size of the first files. Later ones grow with the total, so that a disk full of
            them needs dozens of open files and not thousands.
        budget_bytes: Maximum size of all files together.
    """

    def __init__(self, folder: StoreFolder, *, slab_bytes: int, budget_bytes: int) -> None:
        assert slab_bytes > 0, "a slab holds at least one byte"
        super().__init__(DiskExtent, BLOCK_BYTES)
        self.budget_bytes = budget_bytes
        self.folder = folder
        self._slab_bytes = round_up(slab_bytes, BLOCK_BYTES)

    def close(self) -> None:
        """Close the files, without transfers under way; those with a name go with the folder."""
        for slab in self._slabs:
            slab.file.close()
        self._slabs.clear()
        self.used_bytes = self.reserved_bytes = 0

    def _grow(self, size: int) -> None:
        """Add a file of at least `size` bytes."""
        left_bytes = self.budget_bytes - self.reserved_bytes
        left_bytes -= left_bytes % BLOCK_BYTES
        if left_bytes < size:
            raise BudgetError(self._full_message(size, "its budget is spent"))
        # A multiple of slabs, so that extents which fill one slab exactly fill a larger one, too.
        slabs = max(1, self.reserved_bytes // (_GROWTH * self._slab_bytes))
        wanted_bytes = max(size, slabs * self._slab_bytes)
        try:
            slab = self._new_slab(min(wanted_bytes, left_bytes), size)
        except OSError as error:
            if error.errno in DISK_FULL_ERRNOS:
                raise BudgetError(self._full_message(size, error.strerror or str(error))) from error
            raise OffloadError(
                f"disk tier: a file of {size} bytes could not be made in {self.folder.path}: "
                f"{error}. Check the disk, or set offload_dir to a folder on another one"
            ) from error
        self._add_slab(slab, slab.file.num_bytes)
        # Listing the folder does not show files without a name.
        logger.info(
            "disk tier: %d bytes are reserved in %s, in %d files%s",
            *(self.reserved_bytes, self.folder.path, len(self._slabs)),
            "" if slab.file.keeps_name else " without names (df and lsof show them, du does not)",
        )

    def _new_slab(self, wanted_bytes: int, min_bytes: int) -> DiskSlab:
        """Make a file of `wanted_bytes`, or of `min_bytes` if the disk is nearly full."""
        try:
            return DiskSlab(FreeList(wanted_bytes), self.folder.new_file(wanted_bytes))
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS or wanted_bytes == min_bytes:
                raise
        return DiskSlab(FreeList(min_bytes), self.folder.new_file(min_bytes))

    def _full_message(self, size: int, reason: str) -> str:
        return (
            f"disk tier: {size} bytes more are needed in one piece in {self.folder.path}, but "
            f"{reason}: {self.reserved_bytes} of {self.budget_bytes} bytes are reserved, "
            f"{self.free_bytes} of them free in smaller pieces, and the disk has "
            f"{self.folder.free_bytes} bytes free. Free some or raise disk_memory, set "
            "offload_dir to a folder on a larger disk, or use shorter sequences"
        )


def describe(action: str, extent: DiskExtent, error: OSError, folder: StoreFolder) -> str:
    """Return the error message of a failed transfer; `action` is "writing" or "reading"."""
    reason = f"{errno.errorcode.get(error.errno or 0, 'error')}, {error.strerror or error}"
    if error.errno in DISK_FULL_ERRNOS:
        remedy = (
            f"The disk has {folder.free_bytes} bytes free; free some, lower disk_memory, or set "
            "offload_dir to a folder on a larger disk"
        )
    else:
        remedy = (
            "The step cannot be finished; check the disk (the system's log names bad blocks) or "
            "set offload_dir to a folder on another one"
        )
    return f"disk tier: {action} {extent} failed: {reason}. {remedy}"


@dataclass(eq=False)
class Transfers:
    """Counts a store's transfers and does the work of its threads.

    All counters are guarded by the condition `changed`.
    """

    folder: StoreFolder
    """Where the files are."""
    space: DiskSpace
    """Allocates their bytes."""
    _: KW_ONLY
    verify: bool
    """Whether what is read must have the checksum of what was written."""
    max_queued_bytes: int
    """Bytes that may wait to be written."""

    def __post_init__(self) -> None:
        # Reentrant, because a garbage collection in here may close a store.
        self.changed = threading.Condition(threading.RLock())
        self.closed = False
        self.threads: set[int] = set()
        self.queued_bytes = 0
        self.write_bytes = 0
        self.read_bytes = 0
        self.wait_seconds = 0.0
        self._moved_bytes = 0
        self._num_releasing = 0
        self._is_slow_reported = False

    def check_usable(self) -> None:
        """Raise if the store cannot be used here.

        Raises:
            OffloadError: This is a forked child, or the store was closed.
        """
        self.check_process()
        if self.closed:
            raise OffloadError(f"the disk store in {self.folder.path} was closed; make a new one")

    def check_process(self) -> None:
        """Raise in a forked child, which has none of the threads."""
        if self.folder.is_foreign:
            raise OffloadError(
                f"the disk store in {self.folder.path} belongs to process "
                f"{self.folder.process_id} and cannot be used in process {os.getpid()}, which was "
                "forked from it; make a store of its own there"
            )

    def admit(self, num_bytes: int) -> DiskExtent:
        """Wait until a write fits into the queue, and allocate its extent; called with the lock.

        A write that is larger than the whole queue goes alone.

        Raises:
            BudgetError: The disk is full, and no extent is about to be freed.
            OffloadError: The store was closed.
        """
        if self.queued_bytes and self.queued_bytes + num_bytes > self.max_queued_bytes:
            with self._waiting() as report_if_slow:
                while self.queued_bytes and self.queued_bytes + num_bytes > self.max_queued_bytes:
                    self.changed.wait(SLOW_WAIT_SECONDS)
                    report_if_slow()
                    self.check_usable()
        while True:
            self.check_usable()
            try:
                extent = self.space.allocate(num_bytes)
            except BudgetError:
                if not self._num_releasing:
                    raise
                with self._waiting() as report_if_slow:
                    self.changed.wait(SLOW_WAIT_SECONDS)
                    report_if_slow()
                continue
            extent.transfers = 1
            self.queued_bytes += num_bytes
            return extent

    def release(self, extent: DiskExtent) -> None:
        """Free an extent as soon as no transfer touches it."""
        with self.changed:
            assert not extent.released, "a disk extent was released twice"
            extent.released = True
            if self.closed:
                return
            self._num_releasing += 1
            if extent.transfers == 1 and extent.written is not None and extent.written.cancel():
                self.end_write(extent)
            else:
                self._free_if_over(extent)

    def end_write(self, extent: DiskExtent) -> None:
        """Count a write as over, whether it ran or was cancelled."""
        with self.changed:
            self.queued_bytes -= extent.num_bytes
            self.end_transfer(extent)

    def end_transfer(self, extent: DiskExtent) -> None:
        """Count a transfer as over."""
        with self.changed:
            extent.transfers -= 1
            self._free_if_over(extent)
            self.changed.notify_all()

    def write(self, extent: DiskExtent, source: Bytes) -> None:
        """Fill `extent` from `source`, uint8 [n]; runs in a thread.

        Raises:
            OffloadError: The disk refused.
        """
        try:
            with self._naming_extent("writing", extent):
                if self.verify:
                    extent.checksum = checksum(source)
                extent.slab.file.write(source, extent.offset, self._count)
            with self.changed:
                self.write_bytes += extent.num_bytes
        finally:
            # Before the ticket is done, so that whoever has waited for it finds the counters right.
            self.end_write(extent)

    def read(self, extent: DiskExtent, target: Bytes) -> None:
        """Fill `target`, uint8 [n], from `extent`, after its write; runs in a thread.

        Raises:
            OffloadError: The disk refused, now or in the write, or gave other bytes.
        """
        try:
            assert extent.written is not None, "an allocated extent has a write"
            lost = extent.failure or self.failure_of(extent.written)
            if lost is not None:
                raise OffloadError(_failure_message(lost)) from lost
            with self._naming_extent("reading", extent):
                extent.slab.file.read(target, extent.offset, self._count)
                self._check(extent, target)
            with self.changed:
                self.read_bytes += extent.num_bytes
        finally:
            self.end_transfer(extent)

    def wait_for(self, future: Future[None]) -> None:
        """Block until a transfer is over, successfully or not."""
        with self._waiting() as report_if_slow:
            while not future.done():
                # A cancelled transfer is over as well, and a timeout only means to look again.
                with contextlib.suppress(CancelledError, TimeoutError):
                    future.exception(SLOW_WAIT_SECONDS)
                report_if_slow()

    def failure_of(self, future: Future[None]) -> BaseException | None:
        """The error of a transfer, or None; waits until it is over."""
        try:
            return future.exception()
        except CancelledError as error:
            lost = OffloadError(f"the disk store in {self.folder.path} was closed before")
            lost.__cause__ = error
            return lost

    def _free_if_over(self, extent: DiskExtent) -> None:
        if extent.released and not extent.transfers:
            self._num_releasing -= 1
            self.space.free(extent)

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
    def _naming_extent(self, action: str, extent: DiskExtent) -> Iterator[None]:
        """Turn the system's error into one that names the extent, and store it in the extent."""
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
        """Count the seconds inside; yields a function to call whenever the wait goes on."""
        start_seconds, start_bytes = time.monotonic(), self._moved_bytes

        def report_if_slow() -> None:
            seconds = time.monotonic() - start_seconds
            if seconds < SLOW_WAIT_SECONDS or self._is_slow_reported:
                return
            self._is_slow_reported = True
            moved_bytes = self._moved_bytes - start_bytes
            logger.warning(
                "waiting for the disk in %s for %.1f s now, in which it moved %d bytes "
                "(%.3g bytes/s). Is it that slow, or stuck? Set offload_dir to a faster disk, or "
                "raise host_memory so that less goes there",
                *(self.folder.path, seconds, moved_bytes, moved_bytes / seconds),
            )

        try:
            yield report_if_slow
        finally:
            with self.changed:
                self.wait_seconds += time.monotonic() - start_seconds


class DiskTicket:
    """One transfer between memory and disk, under way or over.

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
            raise OffloadError(_failure_message(failure)) from failure


def _failure_message(failure: BaseException) -> str:
    """The message of a failed transfer; an unexpected error gets a prefix that says its origin."""
    if isinstance(failure, OffloadError):
        return str(failure)
    return f"disk tier: a transfer failed unexpectedly: {failure!r}"


@dataclass(frozen=True, slots=True)
class DiskWrite:
    """A write that was started."""

    extent: DiskExtent
    ticket: DiskTicket


class DiskStore:
    """Keeps host bytes in files until they are released.

    Methods may be called from any thread, but only in the process that made the store.

    Args:
        directory: Where to make the files; made itself if it does not exist.
        budget_bytes: Maximum size of the files; None for what is free now less 1 GiB or 5% of it,
            whichever is more. Stores that share a disk need budgets of their own.
        slab_bytes: Size of the first files.
        checksum: Check all bytes that are read, in the background threads (`disk_files.checksum`).
        threads: Number of threads that write, and of threads that read.
        max_queued_bytes: Bytes that may wait to be written; None for `DEFAULT_QUEUED_BYTES`.

    Raises:
        ConfigError: The directory cannot be made or written to, or is a file.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        budget_bytes: int | None = None,
        slab_bytes: int = DEFAULT_DISK_SLAB_BYTES,
        checksum: bool = True,
        threads: int = 2,
        max_queued_bytes: int | None = None,
    ) -> None:
        assert threads > 0, "there is at least one thread"
        folder = StoreFolder(Path(directory))
        if budget_bytes is None:
            free_bytes = folder.free_bytes
            budget_bytes = max(0, free_bytes - max(_MIN_FREE_BYTES, free_bytes // 20))
        queued_bytes = DEFAULT_QUEUED_BYTES if max_queued_bytes is None else max_queued_bytes
        self.space = DiskSpace(folder, slab_bytes=slab_bytes, budget_bytes=budget_bytes)
        """Allocates bytes of the files."""
        self.transfers = Transfers(
            folder, self.space, verify=checksum, max_queued_bytes=queued_bytes
        )
        """Does the work of the threads, and counts it."""
        self._writers = _make_threads(self.transfers, threads, "write")
        self._readers = _make_threads(self.transfers, threads, "read")
        # Runs on close, when nobody refers to the store any more, or at the interpreter's exit.
        self._finalizer = weakref.finalize(
            self, _close_store, self.transfers, self._writers, self._readers
        )

    def start_write(self, host_bytes: Tensor) -> DiskWrite:
        """Start writing `host_bytes`, uint8 [n], n > 0; blocks while the queue is full.

        The bytes must not change until the ticket is done. Memory at multiples of 4096 bytes is
        written as it is; other memory is copied piece by piece, in the background.

        Raises:
            BudgetError: The budget or the disk has no space for them.
            OffloadError: The store was closed, or a file could not be made.
        """
        source = _as_array(host_bytes)
        transfers = self.transfers
        transfers.check_process()  # first: a forked child may find the lock held for ever
        with transfers.changed:
            extent = transfers.admit(source.size)
            try:
                future = self._writers.submit(transfers.write, extent, source)
            except BaseException:
                transfers.release(extent)
                transfers.end_write(extent)
                raise
            extent.written = future
        return DiskWrite(extent, DiskTicket(transfers, future, needed=False))

    def start_read(self, extent: DiskExtent, host_bytes: Tensor) -> DiskTicket:
        """Start filling `host_bytes`, uint8 [n], with an extent of n bytes, after its write.

        Raises:
            OffloadError: The extent was lost by a failed transfer, or the store was closed.
        """
        target = _as_array(host_bytes)
        assert target.size == extent.num_bytes, "an extent is read as a whole"
        transfers = self.transfers
        transfers.check_process()
        with transfers.changed:
            transfers.check_usable()
            assert not extent.released, "a disk extent was read after its release"
            if extent.failure is not None:
                raise OffloadError(str(extent.failure)) from extent.failure
            extent.transfers += 1
            try:
                future = self._readers.submit(transfers.read, extent, target)
            except BaseException:
                transfers.end_transfer(extent)
                raise
        return DiskTicket(transfers, future, needed=True)

    def release(self, extent: DiskExtent) -> None:
        """Release an extent, at any moment; its bytes are free once its transfers are over.

        A write that has not begun is cancelled. Reads that were started are finished.
        """
        self.transfers.check_process()
        self.transfers.release(extent)

    def close(self) -> None:
        """Cancel what waits, end the threads and remove the files; does nothing the second time.

        Transfers under way are finished first. What was not read is lost, and its tickets raise.
        """
        self._finalizer()

    def __reduce__(self) -> NoReturn:
        """Raise: threads and a lock can be neither pickled nor copied."""
        raise TypeError(
            f"the disk store in {self.transfers.folder.path} can be neither pickled nor copied, "
            "since its files belong to this process; make a DiskStore in the process or place that "
            "needs one"
        )


def _make_threads(transfers: Transfers, threads: int, name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        threads,
        thread_name_prefix=f"sppo-disk-{name}",
        initializer=lambda: transfers.threads.add(threading.get_ident()),
    )


def _as_array(host_bytes: Tensor) -> Bytes:
    assert host_bytes.dtype == torch.uint8, "the disk stores bytes"
    assert host_bytes.dim() == 1, "the disk stores flat bytes"
    assert host_bytes.is_contiguous(), "the disk stores contiguous bytes"
    assert host_bytes.device.type == "cpu", "the disk reads and writes host memory"
    return host_bytes.numpy()


def _close_store(
    transfers: Transfers, writers: ThreadPoolExecutor, readers: ThreadPoolExecutor
) -> None:
    """Close a store; not a method, so that it can run when the store object is gone."""
    if transfers.folder.is_foreign:
        return
    if threading.get_ident() in transfers.threads:
        # A garbage collection in one of the store's threads, which cannot wait for itself.
        arguments = (transfers, writers, readers)
        threading.Thread(target=_close_store, args=arguments, name="sppo-disk-end").start()
        return
    with transfers.changed:
        transfers.closed = True
        transfers.changed.notify_all()
    for executor in (writers, readers):
        executor.shutdown(wait=False, cancel_futures=True)
    try:
        for executor in (writers, readers):
            executor.shutdown(wait=True)
        transfers.space.close()
    finally:
        transfers.folder.remove()
