"""The disk tier: host bytes go to files on a fast disk and come back, by threads of their own.

Writes and reads have separate threads and queues, so that neither waits behind the other. What
waits to be written is bounded: a host that produces faster than the disk takes is held back. The
files are private, reserved at full size before anything is written to them, and removed as soon as
they are open, or at the end where the file system does not allow that.

The files of the tier, lowest first: `disk_files` moves bytes, `disk_folder` says where to,
`disk_space` lends them, `disk_queue` does the work in the background, this file is the door.
"""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from sppo_hf.errors import OffloadError
from sppo_hf.offload.disk import DiskExtent, DiskSpace, DiskTicket, Transfers
from sppo_hf.offload.disk_files import Bytes, StoreFolder

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
