"""The disk tier: extents of files below `offload_dir`, which threads of a `Store` write and read.

The files (`disk_files`) are private, reserved at full size before anything is written to them, and
removed as soon as they are open, or at the end if the file system does not allow that.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.disk_files import (
    BLOCK_BYTES,
    DISK_FULL_ERRNOS,
    SlabFile,
    StoreFolder,
    check_parent_exists,
    unusable_folder_errors,
)
from sppo_hf.offload.slabs import FreeList, Run, Slab, SlabAllocator, round_up
from sppo_hf.offload.store import Bytes, TierSpace
from sppo_hf.planning.hardware import HardwareProfile
from sppo_hf.planning.machine import free_disk_bytes
from sppo_hf.planning.tiers import TierModel, register_tier

logger = logging.getLogger(__name__)

DEFAULT_DISK_SLAB_BYTES = 2**30

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
    """Bytes of a file."""

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes at offset {self.offset} of {self.slab.file}"


class DiskSpace(SlabAllocator[DiskSlab, DiskExtent], TierSpace):
    """Allocates extents of files in a folder, writes and reads them.

    Has the allocator of slabs in place of the one of `TierSpace`. Memory at multiples of 4096 bytes
    is written as it is; other memory is copied piece by piece.

    Args:
        folder: Where the files are; removed by `close`.
        slab_bytes: Size of the first files. Later ones grow with the total, so that a disk full of
            them needs dozens of open files and not thousands.
        budget_bytes: Maximum size of all files together; None for what is free now less 1 GiB or 5%
            of it, whichever is more. Stores that share a disk need budgets of their own.
    """

    def __init__(
        self,
        folder: StoreFolder,
        *,
        slab_bytes: int = DEFAULT_DISK_SLAB_BYTES,
        budget_bytes: int | None = None,
    ) -> None:
        assert slab_bytes > 0, "a slab holds at least one byte"
        super().__init__(DiskExtent, BLOCK_BYTES)
        if budget_bytes is None:
            free_bytes = folder.free_bytes
            budget_bytes = max(0, free_bytes - max(_MIN_FREE_BYTES, free_bytes // 20))
        self.budget_bytes: int = budget_bytes
        self.folder = folder
        self._slab_bytes = round_up(slab_bytes, BLOCK_BYTES)

    def write(self, place: DiskExtent, source: Bytes, on_moved: Callable[[int], None]) -> None:
        """Write to the file, past the page cache where the system can."""
        place.slab.file.write(source, place.offset, on_moved)

    def read(self, place: DiskExtent, target: Bytes, on_moved: Callable[[int], None]) -> None:
        """Read from the file."""
        place.slab.file.read(target, place.offset, on_moved)

    def describe(self, action: str, place: DiskExtent, error: OSError) -> str:
        """Return place, cause and remedy."""
        reason = f"{errno.errorcode.get(error.errno or 0, 'error')}, {error.strerror or error}"
        if error.errno in DISK_FULL_ERRNOS:
            remedy = (
                f"The disk has {self.folder.free_bytes} bytes free; free some, lower disk_memory, "
                "or set offload_dir to a folder on a larger disk"
            )
        else:
            remedy = (
                "The step cannot be finished; check the disk (the system's log names bad blocks) "
                "or set offload_dir to a folder on another one"
            )
        return f"{action} {place} failed: {reason}. {remedy}"

    def close(self) -> None:
        """Close the files, without transfers under way, and remove the folder's private part."""
        try:
            for slab in self._slabs:
                slab.file.close()
        finally:
            self.folder.remove()
        self._slabs.clear()
        self.used_bytes = self.reserved_bytes = 0

    def __str__(self) -> str:
        return f"the disk in {self.folder.path}"

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


@register_tier("disk", distance=2, setting="disk_memory", needs="offload_dir")
class Disk(TierModel):
    """Files below `offload_dir`; `sppo calibrate --offload-dir` measures their disk."""

    called = "fast disk"
    colour = "#CC79A7"
    remedy = "Raise disk_memory or free space in offload_dir, or shorten the sequences."

    def is_available(self, config: SPPOConfig, device_kind: str) -> bool:
        """Whether `offload_dir` is set."""
        return config.offload_dir is not None

    def allowing(self, config: SPPOConfig) -> SPPOConfig:
        """Returns the settings with a folder; only whether there is one matters to decisions."""
        return config if config.offload_dir is not None else config.replace(offload_dir=self.name)

    def measure(self, config: SPPOConfig, *, processes: int, own_bytes: int) -> int | None:
        """Returns what is free in `offload_dir`, and what this process has reserved there."""
        assert config.offload_dir is not None, "only a disk that is available is measured"
        with unusable_folder_errors(config.offload_dir):
            check_parent_exists(Path(config.offload_dir))
            return free_disk_bytes(config.offload_dir) // processes + own_bytes

    def profiled_bytes(self, profile: HardwareProfile) -> int | None:
        """What was free when the disk was measured."""
        return profile.disk_bytes

    def store_rate(self, profile: HardwareProfile) -> float:
        """Measured bytes per second written; a guess if not measured."""
        return profile.disk_write_bytes_per_second or super().store_rate(profile)

    def load_rate(self, profile: HardwareProfile) -> float:
        """Measured bytes per second read; a guess if not measured."""
        return profile.disk_read_bytes_per_second or super().load_rate(profile)

    def of_one_device(self, profile: HardwareProfile, devices: int) -> HardwareProfile:
        """Divides the rates, as all devices share one disk."""
        return replace(
            profile,
            disk_write_bytes_per_second=self.store_rate(profile) / devices,
            disk_read_bytes_per_second=self.load_rate(profile) / devices,
        )

    def open(self, config: SPPOConfig, budget_bytes: int | None) -> DiskSpace:
        """Makes or takes the folder."""
        assert config.offload_dir is not None, "only a disk that is available is opened"
        return DiskSpace(StoreFolder(Path(config.offload_dir)), budget_bytes=budget_bytes)
