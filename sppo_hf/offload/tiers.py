"""What a tier is to the engine: a place away from the device where offloaded bytes wait.

Copies from and to the device always have one end in host memory, so a tier lends a region for each
copy out. What it does with the bytes behind that region is its own affair: the host tier leaves
them there, the disk tier (`staging`) writes them to files and reads them back. A further tier is
one more class with these methods, handed to `OffloadEngine` behind the others; what finds no room
on one goes to the next. All methods are called under the engine's lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from sppo_hf.errors import BudgetError
from sppo_hf.offload.host_memory import HostPool, Progress, Region
from sppo_hf.offload.storage import DiskState, OffloadedStorage
from sppo_hf.planning.tiers import OffloadTier

Land = Callable[[OffloadedStorage], None]
"""Starts the copy to the device of a storage whose bytes are on the host; then calls `landed`."""


class Tier:
    """Stores bytes that leave the device, and loads them into host memory for their way back."""

    name: ClassVar[OffloadTier]
    pool: HostPool
    """Host memory that its regions are from; its budget is the tier's, or that of the way there."""
    reads_ahead: ClassVar[bool] = False
    """Whether it takes time to bring bytes into host memory, so that asking early helps."""
    write_bytes: int = 0
    """Bytes written behind host memory since the engine was made."""
    read_bytes: int = 0
    """Bytes read from there."""
    stall_seconds: float = 0.0
    """Seconds that the host has waited for the tier."""

    def reserve(self, num_bytes: int | None = None, progress: Progress | None = None) -> None:
        """Make the host memory that a step will need; None: as much as the tier always has."""
        raise NotImplementedError

    def allocate(self, num_bytes: int, land: Land) -> Region:
        """Lend a region for a copy out of the device.

        Raises:
            BudgetError: the tier has no room for it, and will not have any.
        """
        raise NotImplementedError

    def on_disk(self) -> DiskState | None:
        """What a new storage remembers of the place behind host memory; None: nothing."""
        return None

    def store(self, stored: OffloadedStorage) -> None:
        """Take over a storage whose copy out has just been enqueued."""

    def load(self, stored: OffloadedStorage) -> None:
        """Bring the bytes to the device as soon as may be; they are not on the host."""
        raise AssertionError(f"bytes of the {self.name} tier are always on the host")

    def wait_loaded(self, stored: OffloadedStorage, land: Land) -> None:
        """Let the host wait until the bytes are in host memory, or on their way to the device."""

    def read_ahead(self, stored: OffloadedStorage) -> bool:
        """Start bringing the bytes into host memory; False if there is no room for it now."""
        return True

    def landed(self, stored: OffloadedStorage) -> None:
        """Note that a copy to the device has been enqueued from the storage's region."""

    def retire(self, stored: OffloadedStorage) -> None:
        """Give up what a storage has behind host memory; nobody owns it any more."""

    def is_drained(self, waiting: Iterable[OffloadedStorage]) -> bool:
        """Whether no host memory is in use but that of retired storages which wait for a copy."""
        raise NotImplementedError

    def poll(self, land: Land) -> None:
        """Move on what has come to an end."""

    def raise_failure(self) -> None:
        """Raise what went wrong in the background and was not raised yet."""

    def forget(self) -> None:
        """Drop failures, and all storages, which are retired."""

    def close(self) -> None:
        """Give up the host memory and what is behind it, when nothing touches it any more."""


class HostTier(Tier):
    """Bytes stay in the region that they were copied to.

    Args:
        pool: lends the regions.
    """

    name = "host"

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self.make_room: Callable[[], None] = lambda: None
        """Lets compute wait for copies of retired storages, so that their regions are free."""

    def reserve(self, num_bytes: int | None = None, progress: Progress | None = None) -> None:
        """Make the slabs for `num_bytes`, cut to the budget."""
        self.pool.reserve(num_bytes or 0, progress)

    def allocate(self, num_bytes: int, land: Land) -> Region:
        """Lend a region; rather lets compute wait than the pool grow."""
        region = self.pool.try_allocate(num_bytes)
        if region is None:
            self.make_room()
            region = self.pool.try_allocate(num_bytes)
        return region or self.pool.allocate(num_bytes)

    def is_drained(self, waiting: Iterable[OffloadedStorage]) -> bool:
        """Whether all other regions are back."""
        regions = [stored.region for stored in waiting if stored.region is not None]
        return self.pool.used_bytes == sum(region.reserved_bytes for region in regions)

    def close(self) -> None:
        """Give the slabs back."""
        self.pool.close()


def allocate(tiers: Sequence[Tier], num_bytes: int, land: Land) -> tuple[Tier, Region]:
    """Lend a region of the first of some tiers that has room.

    Raises:
        BudgetError: none has; says why the last has not.
    """
    *nearer, last = tiers
    for tier in nearer:
        # The error is not kept: its traceback leads to frames that hold the step's tensors.
        with contextlib.suppress(BudgetError):
            return tier, tier.allocate(num_bytes, land)
    return last, last.allocate(num_bytes, land)
