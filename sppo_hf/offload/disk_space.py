"""Who owns which bytes of the disk tier: slab files within a budget, sub-allocated.

The disk's counterpart of `pool`. Who gives an extent back vouches that no transfer touches it, and
the store calls all of this under its lock.
"""

from __future__ import annotations

import errno
import logging
from concurrent.futures import Future
from dataclasses import dataclass, field

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.disk_files import BLOCK_BYTES, NO_ROOM, SlabFile, StoreFolder, round_up
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
