"""Who owns which bytes of the disk tier: slab files within a budget, sub-allocated.

The disk's counterpart of `pool`. Who gives an extent back vouches that no transfer touches it, and
the store calls all of this under its lock.


The background side of the disk tier: what transfers do, what they cost, and who waits for them.

`disk` puts it together. Threads refer to `Transfers` and not to the store, so that a store that
nobody refers to any more goes, even with work in its queue.


The disk tier: host bytes go to files on a fast disk and come back, by threads of their own.

Writes and reads have separate threads and queues, so that neither waits behind the other. What
waits to be written is bounded: a host that produces faster than the disk takes is held back. The
files are private, reserved at full size before anything is written to them, and removed as soon as
they are open, or at the end where the file system does not allow that.

The files of the tier, lowest first: `disk_files` moves bytes, `disk_folder` says where to,
`disk_space` lends them, `disk_queue` does the work in the background, this file is the door.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.disk_files import (
    BLOCK_BYTES,
    NO_ROOM,
    Bytes,
    SlabFile,
    StoreFolder,
    checksum,
    round_up,
)
from sppo_hf.offload.host_memory import FreeList, Slab, Slabs

logger = logging.getLogger(__name__)

# Each new file is at most this part of all before it, which is also the most reserved in vain.
_GROWTH = 8


@dataclass(slots=True, eq=False)
class DiskSlab(Slab):
    """One file and what is free of it."""

    file: SlabFile


@dataclass(slots=True, eq=False)
class DiskExtent:
    """A run of bytes on the disk, lent by a `DiskStore`; opaque to who holds it."""

    slab: DiskSlab = field(repr=False)
    offset: int
    """First byte within the file."""
    num_bytes: int
    """Bytes asked for."""
    reserved_bytes: int
    """Bytes taken from the file: `num_bytes` rounded up to whole blocks."""
    transfers: int = 0
    """Writes and reads that are not over."""
    released: bool = False
    written: Future[None] | None = field(default=None, repr=False)
    """The write that fills the extent."""
    checksum: int | None = None
    """Of what was written, if the store checks; see `disk_files.checksum`."""
    failure: OffloadError | None = field(default=None, repr=False)
    """Why the bytes cannot be had any more."""

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes at offset {self.offset} of {self.slab.file}"


class DiskSpace(Slabs[DiskSlab]):
    """Lends extents of files in a folder.

    Args:
        folder: where the files are.
        slab_bytes: size of the first files. Later ones grow with what there is, so that a disk
            full of them needs dozens of open files and not thousands.
        budget_bytes: the most that all files together may take.
    """

    def __init__(self, folder: StoreFolder, *, slab_bytes: int, budget_bytes: int) -> None:
        assert slab_bytes > 0, "a slab holds at least one byte"
        super().__init__()
        self.budget_bytes = budget_bytes
        self._folder = folder
        self._slab_bytes = round_up(slab_bytes)

    def allocate(self, num_bytes: int) -> DiskExtent:
        """Lend `num_bytes` (at least 1), adding a file where no hole is large enough.

        Raises:
            BudgetError: another file would exceed the budget, or the disk has no room for it.
            OffloadError: the file cannot be made for another reason.
        """
        assert num_bytes > 0, "an extent holds at least one byte"
        size = round_up(num_bytes)
        return DiskExtent(*self._lend(size), num_bytes, size)

    def give(self, extent: DiskExtent) -> None:
        """Take an extent back; no transfer may touch it any more."""
        self._give(extent.slab, extent.offset, extent.reserved_bytes)

    def close(self) -> None:
        """Close the files; those with a name go with their folder. No transfer may be under way."""
        for slab in self._slabs:
            slab.file.close()
        self._slabs.clear()
        self.used_bytes = self.reserved_bytes = 0

    def _grow(self, size: int) -> None:
        """Add a file of at least `size` bytes."""
        left_bytes = self.budget_bytes - self.reserved_bytes
        left_bytes -= left_bytes % BLOCK_BYTES
        if left_bytes < size:
            raise BudgetError(self._no_room(size, "its budget is spent"))
        # Whole slabs, so that extents which fill one without a rest fill a larger one as well.
        slabs = max(1, self.reserved_bytes // (_GROWTH * self._slab_bytes))
        wanted_bytes = max(size, slabs * self._slab_bytes)
        try:
            slab = self._new_slab(min(wanted_bytes, left_bytes), size)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise BudgetError(self._no_room(size, error.strerror or str(error))) from error
            raise OffloadError(
                f"disk tier: a file of {size} bytes could not be made in {self._folder.path}: "
                f"{error}. Check the disk, or set offload_dir to a folder on another one"
            ) from error
        self._add(slab, slab.file.num_bytes)
        # Files without a name are seen by nobody who lists the folder.
        logger.info(
            "disk tier: %d bytes are reserved in %s, in %d files%s",
            *(self.reserved_bytes, self._folder.path, len(self._slabs)),
            "" if slab.file.keeps_name else " without names (df and lsof show them, du does not)",
        )

    def _new_slab(self, wanted_bytes: int, least_bytes: int) -> DiskSlab:
        """Make a file of the wanted size, or of the least if the disk is nearly full."""
        try:
            return DiskSlab(FreeList(wanted_bytes), self._folder.new_file(wanted_bytes))
        except OSError as error:
            if error.errno not in NO_ROOM or wanted_bytes == least_bytes:
                raise
        return DiskSlab(FreeList(least_bytes), self._folder.new_file(least_bytes))

    def _no_room(self, size: int, reason: str) -> str:
        return (
            f"disk tier: {size} bytes more are needed in one piece in {self._folder.path}, but "
            f"{reason}: {self.reserved_bytes} of {self.budget_bytes} bytes are reserved, "
            f"{self.free_bytes} of them free in smaller pieces, and the disk has "
            f"{self._folder.free_bytes} bytes free. Free some or raise disk_memory, set "
            "offload_dir to a folder on a larger disk, or use shorter sequences"
        )


def describe(action: str, extent: DiskExtent, error: OSError, folder: StoreFolder) -> str:
    """Say what became of a transfer that the disk refused.

    Args:
        action: "writing" or "reading".
        extent: what was to be moved.
        error: what the system said.
        folder: where the file is.
    """
    reason = f"{errno.errorcode.get(error.errno or 0, 'error')}, {error.strerror or error}"
    if error.errno in NO_ROOM:
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


DEFAULT_DISK_SLAB_BYTES = 2**30
DEFAULT_QUEUED_BYTES = 256 * 2**20
"""What may wait to be written: 40 ms of a fast disk, enough to keep its threads busy."""

_LEAST_LEFT_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class DiskWrite:
    """A write that was started: where its bytes will be, and what to ask about it."""

    extent: DiskExtent
    ticket: DiskTicket


class DiskStore:
    """Keeps runs of host bytes in files until they are released.

    All methods may be called from any thread, but only in the process that made the store.

    Args:
        directory: where to make the files; made itself if it does not exist.
        budget_bytes: the most that the files may take; None for what is free now less 1 GiB or 5%
            of it, whichever is more. Stores that share a disk need budgets of their own.
        slab_bytes: size of the first files.
        checksum: check all bytes that come back, in the background threads; see
            `disk_files.checksum`.
        threads: how many write, and how many read.
        max_queued_bytes: what may wait to be written; None for `DEFAULT_QUEUED_BYTES`.

    Raises:
        ConfigError: the directory cannot be made or written to, or is a file.
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
        assert threads > 0, "somebody must do the work"
        folder = StoreFolder(Path(directory))
        if budget_bytes is None:
            free_bytes = folder.free_bytes
            budget_bytes = max(0, free_bytes - max(_LEAST_LEFT_BYTES, free_bytes // 20))
        queued_bytes = DEFAULT_QUEUED_BYTES if max_queued_bytes is None else max_queued_bytes
        self.space = DiskSpace(folder, slab_bytes=slab_bytes, budget_bytes=budget_bytes)
        """The files, and what is lent of them."""
        self.transfers = Transfers(
            folder, self.space, verify=checksum, max_queued_bytes=queued_bytes
        )
        """What is under way, and the books."""
        self._writers = _make_threads(self.transfers, threads, "write")
        self._readers = _make_threads(self.transfers, threads, "read")
        # Runs on close, when nobody refers to the store any more, or at the interpreter's exit.
        self._finalizer = weakref.finalize(
            self, _dismantle, self.transfers, self._writers, self._readers
        )

    def start_write(self, host_bytes: Tensor) -> DiskWrite:
        """Start writing `host_bytes`, uint8 [n], n > 0; blocks while the queue is full.

        The bytes must stay untouched until the ticket is done. Memory at multiples of 4096 bytes is
        written as it is; other memory is copied piece by piece, in the background.

        Raises:
            BudgetError: the budget or the disk has no room for them.
            OffloadError: the store was closed, or a file could not be made.
        """
        source = _as_array(host_bytes)
        transfers = self.transfers
        transfers.check_process()  # first of all: a forked child may find the lock held for ever
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
            OffloadError: the extent was lost by a failed transfer before, or the store was closed.
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
        """Give an extent back, at any moment; its bytes are free once its transfers are over.

        A write that has not begun is called off. Reads that were started are finished.
        """
        self.transfers.check_process()
        self.transfers.release(extent)

    def close(self) -> None:
        """Give up what waits, end the threads and remove the files; nothing the second time.

        Transfers under way are finished first. What was not read is lost, and its tickets raise.
        """
        self._finalizer()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied: the threads and the lock cannot be."""
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
    assert host_bytes.dtype == torch.uint8, "the disk holds bytes"
    assert host_bytes.dim() == 1, "the disk holds runs of bytes"
    assert host_bytes.is_contiguous(), "the disk holds bytes without gaps"
    assert host_bytes.device.type == "cpu", "the disk is behind host memory"
    return host_bytes.numpy()


def _dismantle(
    transfers: Transfers, writers: ThreadPoolExecutor, readers: ThreadPoolExecutor
) -> None:
    """End a store; not a method, so that it can run when the store is gone."""
    if transfers.folder.is_foreign:
        return
    if threading.get_ident() in transfers.threads:
        # A garbage collection in one of our threads, which cannot wait for itself.
        arguments = (transfers, writers, readers)
        threading.Thread(target=_dismantle, args=arguments, name="sppo-disk-end").start()
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
