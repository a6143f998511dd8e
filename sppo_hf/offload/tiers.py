"""What a tier is to the engine: a place away from the device where offloaded bytes wait.

Copies from and to the device always have one end in host memory, so a tier lends a region for each
copy out. What it does with the bytes behind that region is its own affair: the host tier leaves
them there, the disk tier (`staging`) writes them to files and reads them back. A further tier is
one more class with these methods, handed to `OffloadEngine` behind the others; what finds no room
on one goes to the next. All methods are called under the engine's lock.


The way between device and disk: host bytes that are only passed through.

Bytes leave by a copy into a staging region; once the host has seen that copy end, a background
thread writes the region to disk and it is free again. They return by a read into a staging region
and a copy from there. All of it moves on when the engine calls `poll`, which does not wait. Knows
nothing of handles, prefetch orders or autograd; called under the engine's lock.

[Note: staging never deadlocks]

Staging is one slab of its own, which bytes of the host tier cannot take. Whatever holds a region
gives it up by itself, without needing a further one: a copy out ends and becomes a write, a write
ends, a copy to the device ends, and what was read ahead can be dropped, since the disk still has
it. So whoever needs room lets the host wait for these in turn (`_make_progress`); at the latest
when all are through, the slab is one hole, and any region no larger than the slab fits. Two regions
of the largest kind are the least that lets a copy and a write overlap, but that is a matter of
speed only.

Threads write and read these regions, and the compute stream orders nothing for a thread. So a
region here is free when the host has *seen* all its copies end, while for one of the host tier it
is enough that compute stands behind them: rule 7 of [Note: offload lifetimes].
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from sppo_hf.errors import BudgetError, SPPOError
from sppo_hf.offload.copy_streams import Ticket
from sppo_hf.offload.disk import DiskStore, DiskTicket
from sppo_hf.offload.host_memory import PAGE_BYTES, HostPool, PageLocker, Progress, Region
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


@dataclass(slots=True, eq=False)
class _Return:
    """A region that nobody wants any more, and what may still touch it."""

    region: Region
    copies: list[Ticket]
    transfers: list[DiskTicket]

    def is_over(self) -> bool:
        while self.copies and self.copies[-1].done():
            self.copies.pop()
        while not self.copies and self.transfers and _is_over(self.transfers[-1]):
            self.transfers.pop()
        return not self.copies and not self.transfers

    def finish(self) -> None:
        for copy in self.copies:
            copy.finish()
        for transfer in self.transfers:
            _finish(transfer)


class ReclaimQueue:
    """The regions of `pool` that are on their way back to it, oldest first."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._queue: deque[_Return] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def num_bytes(self) -> int:
        """Bytes taken from the pool by what is on its way back."""
        return sum(one.region.reserved_bytes for one in self._queue)

    def add(self, region: Region, copies: list[Ticket], transfers: list[DiskTicket]) -> None:
        """Give `region` back when all of `copies` and `transfers` have ended."""
        self._queue.append(_Return(region, copies, transfers))

    def poll(self) -> None:
        """Give back what is free, up to the first that is not; cheap."""
        while self._queue and self._give(self._queue[0]):
            self._queue.popleft()

    def poll_all(self) -> None:
        """Give back all that is free: what comes after a slow write may be."""
        self._queue = deque(one for one in self._queue if not self._give(one))

    def finish_first(self) -> None:
        """Block the host until the oldest is free, and give it back."""
        self._queue[0].finish()
        self.poll()

    def _give(self, one: _Return) -> bool:
        if not one.is_over():
            return False
        self._pool.release(one.region)
        return True


DEFAULT_STAGING_BYTES = 2**30


class Staging(Tier):
    """The disk tier: staging regions and what is under way through them.

    Args:
        disk: keeps the bytes; closed by `close`.
        budget_bytes: size of the staging slab.
        locker: page-locks the slab; None for none.
        clock: seconds, to count how long the host waits.
    """

    name = "disk"
    reads_ahead = True

    def __init__(
        self,
        disk: DiskStore,
        budget_bytes: int = DEFAULT_STAGING_BYTES,
        *,
        locker: PageLocker | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.budget_bytes = max(budget_bytes - budget_bytes % PAGE_BYTES, PAGE_BYTES)
        self.pool = HostPool(
            self.budget_bytes,
            locker=locker,
            budget_bytes=self.budget_bytes,
            alignment_bytes=PAGE_BYTES,
        )
        self.write_bytes = 0
        self.read_bytes = 0
        self.stall_seconds = 0.0
        self._disk = disk
        self._clock = clock
        self._waiting = False
        # A storage passes through these in order; retired ones are left for whoever looks next.
        self._out: deque[OffloadedStorage] = deque()
        self._writing: deque[OffloadedStorage] = deque()
        self._wanted: deque[OffloadedStorage] = deque()
        self._reading: deque[OffloadedStorage] = deque()
        self._arrived: dict[OffloadedStorage, None] = {}
        self._reclaims = ReclaimQueue(self.pool)
        self._failures: list[SPPOError] = []

    @property
    def ahead_bytes(self) -> int:
        """Bytes being read or read that nobody has asked for on the device yet."""
        reading = (
            stored for stored in self._reading if not (stored.retired or _disk_state(stored).wanted)
        )
        return sum(stored.span.num_bytes for stored in (*reading, *self._arrived))

    def is_drained(self, waiting: Iterable[OffloadedStorage] = ()) -> bool:
        """Whether no storage has a region any more; some may still be on their way back."""
        return self.pool.used_bytes == self._reclaims.num_bytes

    def reserve(self, num_bytes: int | None = None, progress: Progress | None = None) -> None:
        """Make the slab, if it is not made yet."""
        self.pool.reserve(self.budget_bytes)

    def allocate(self, num_bytes: int, land: Land) -> Region:
        """Lend a region for a copy out, waiting for what is under way if there is no room.

        Raises:
            BudgetError: it is larger than all of staging.
            OffloadError: a transfer failed meanwhile, or the host gives no memory.
        """
        if num_bytes > self.budget_bytes:
            raise BudgetError(
                f"disk tier: a tensor of {num_bytes} bytes cannot pass through the staging memory "
                f"of {self.budget_bytes} bytes on its way to disk; raise host_memory (staging is "
                "a part of it) or use shorter chunks"
            )
        region = self._take(num_bytes)
        while region is None:
            with self._stall():
                self.poll(land)
                self.raise_failure()
                region = self._take(num_bytes)
                if region is None:
                    self._make_progress()
        return region

    def on_disk(self) -> DiskState:
        """What a new storage has of the disk: nothing yet."""
        return DiskState()

    def store(self, stored: OffloadedStorage) -> None:
        """Follow a storage of the disk tier whose copy out has just been enqueued."""
        self._out.append(stored)
        self._hand_over()  # on the CPU its copy has ended already

    def poll(self, land: Land) -> None:
        """Move on what has come to an end; does not wait, but for a disk with a full queue."""
        self._hand_over()
        self._end_writes()
        self._end_reads(land)
        self._reclaims.poll()
        self._start_wanted()

    def raise_failure(self) -> None:
        """Raise the first error of a background transfer that was not raised yet.

        Raises:
            OffloadError: a write or read failed; its storage is lost.
            BudgetError: the disk is full.
        """
        if self._failures:
            error = self._failures[0]
            self._failures.clear()
            raise type(error)(str(error)) from error

    def load(self, stored: OffloadedStorage) -> None:
        """Bring a storage from the disk to the device as soon as may be, in the order of calls."""
        on_disk = _disk_state(stored)
        on_disk.raise_failure()
        if on_disk.wanted:
            return
        on_disk.wanted = True
        if on_disk.read is None:
            self._wanted.append(stored)
            self._start_wanted()

    def wait_loaded(self, stored: OffloadedStorage, land: Land) -> None:
        """Wait until the bytes of a storage are on the host, or on their way to the device.

        Raises:
            OffloadError: they are lost, or another transfer failed meanwhile.
        """
        on_disk = _disk_state(stored)
        with self._stall():
            while stored.on_device is None and stored.host_bytes is None:
                self.poll(land)
                self.raise_failure()
                on_disk.raise_failure()
                if on_disk.read is not None:
                    _finish(on_disk.read)
                    self._reading.remove(stored)
                    self._end_read(stored, land)
                elif stored.region is None and not self._start_read(stored):
                    self._make_progress()

    def read_ahead(self, stored: OffloadedStorage) -> bool:
        """Start reading a storage that will be wanted; False if there is no room for it now.

        At most half of staging is used for this, but always for one storage.
        """
        on_disk = _disk_state(stored)
        if stored.coming or stored.region is not None or on_disk.failure is not None:
            return True
        ahead_bytes = self.ahead_bytes
        if self._wanted or (
            ahead_bytes and ahead_bytes + stored.span.num_bytes > self.budget_bytes // 2
        ):
            return False
        return self._start_read(stored)

    def landed(self, stored: OffloadedStorage) -> None:
        """Note that a copy to the device has been enqueued from the storage's region."""
        on_disk = _disk_state(stored)
        on_disk.wanted = False
        assert stored.in_ticket is not None, "a landed storage has a copy to the device"
        on_disk.copies.append(stored.in_ticket)
        self._arrived.pop(stored, None)
        if on_disk.extent is not None and on_disk.write is None:
            self._let_go(stored)

    def retire(self, stored: OffloadedStorage) -> None:
        """Give up what a storage has of host and disk; nobody owns it any more."""
        on_disk = _disk_state(stored)
        on_disk.wanted = False
        self._arrived.pop(stored, None)
        if on_disk.extent is not None:
            self._disk.release(on_disk.extent)
            on_disk.extent = None
        self._let_go(stored)

    def forget(self) -> None:
        """Drop the errors that nobody was told, and all storages, which are retired."""
        self._failures.clear()
        for queue in (self._out, self._writing, self._wanted, self._reading):
            assert all(stored.retired for stored in queue), "only retired storages are forgotten"
            queue.clear()

    def close(self) -> None:
        """Wait for what still touches the staging memory, and close the disk."""
        self.forget()
        while self._reclaims:
            self._reclaims.finish_first()
        self._disk.close()
        self.pool.close()

    def _hand_over(self) -> None:
        """Start writing what has come out of the device."""
        while self._out and (self._out[0].retired or self._out[0].out_ticket.done()):
            stored = self._out.popleft()
            if stored.retired:
                continue
            assert stored.region is not None, "bytes on their way out have a region"
            try:
                with self._stall():
                    write = self._disk.start_write(stored.region.memory)
            except SPPOError as error:
                self._fail(stored, error)
                continue
            on_disk = _disk_state(stored)
            on_disk.extent, on_disk.write = write.extent, write.ticket
            self._writing.append(stored)
            self.write_bytes += stored.span.num_bytes

    def _end_writes(self) -> None:
        while self._writing:
            stored = self._writing[0]
            write = _disk_state(stored).write
            if not stored.retired and write is not None:
                try:
                    if not write.done():
                        return
                except SPPOError as error:
                    self._fail(stored, error)
                else:
                    _disk_state(stored).write = None
                    self._let_go(stored)
            self._writing.popleft()

    def _end_reads(self, land: Land) -> None:
        while self._reading:
            stored = self._reading[0]
            read = _disk_state(stored).read
            if not stored.retired and read is not None and not _is_over(read):
                return
            self._reading.popleft()
            if not stored.retired:
                self._end_read(stored, land)

    def _end_read(self, stored: OffloadedStorage, land: Land) -> None:
        """See what came of a read that is over."""
        on_disk = _disk_state(stored)
        assert on_disk.read is not None, "a read that is over was started"
        try:
            on_disk.read.done()
        except SPPOError as error:
            self._fail(stored, error)
            return
        on_disk.read = None
        self._arrived[stored] = None
        if on_disk.wanted:
            land(stored)

    def _start_wanted(self) -> None:
        while self._wanted:
            stored = self._wanted[0]
            waits = _disk_state(stored).wanted and stored.region is None
            if waits and not self._start_read(stored):
                return
            self._wanted.popleft()

    def _start_read(self, stored: OffloadedStorage) -> bool:
        """Start reading into a new region; False if there is no room."""
        on_disk = _disk_state(stored)
        region = self._take(stored.span.num_bytes)
        if region is None:
            return False
        try:
            on_disk.read = self._disk.start_read(on_disk.extent, region.memory)
        except SPPOError as error:
            self.pool.release(region)
            self._fail(stored, error)
            return True
        stored.region = region
        self._reading.append(stored)
        self.read_bytes += stored.span.num_bytes
        return True

    def _take(self, num_bytes: int) -> Region | None:
        self.reserve()
        region = self.pool.try_allocate(num_bytes)
        if region is None and self._reclaims:
            self._reclaims.poll_all()
            region = self.pool.try_allocate(num_bytes)
        return region

    def _let_go(self, stored: OffloadedStorage) -> None:
        """Free the region as soon as nothing touches it; the disk has its bytes, or nobody will."""
        if stored.region is None:
            return
        on_disk = _disk_state(stored)
        transfers = [one for one in (on_disk.write, on_disk.read) if one is not None]
        self._reclaims.add(stored.region, [*on_disk.copies, stored.out_ticket], transfers)
        stored.region = on_disk.write = on_disk.read = None
        on_disk.copies = []

    def _make_progress(self) -> None:
        """Let the host wait for something that gives a region up; see the note."""
        if self._reclaims:
            self._reclaims.finish_first()
        elif self._writing:
            write = _disk_state(self._writing[0]).write
            assert write is not None, "a write under way has a ticket"
            _finish(write)
        elif self._out:
            self._out[0].out_ticket.finish()
        elif self._reading:
            read = _disk_state(self._reading[0]).read
            assert read is not None, "a read under way has a ticket"
            _finish(read)
        else:
            assert self._arrived, "an empty slab has room for any region"
            stored, _ = self._arrived.popitem()  # the newest is needed last
            self._let_go(stored)

    def _fail(self, stored: OffloadedStorage, error: SPPOError) -> None:
        on_disk = _disk_state(stored)
        # Not the error itself: its frames, and those of its cause, lead to the step's and so to the
        # graph that holds this storage, a circle through autograd that no garbage collection sees.
        on_disk.failure = type(error)(str(error))
        on_disk.wanted = False
        self._failures.append(on_disk.failure)
        self._arrived.pop(stored, None)
        self._let_go(stored)

    @contextlib.contextmanager
    def _stall(self) -> Iterator[None]:
        """Count the seconds in here, once."""
        if self._waiting:
            yield
            return
        self._waiting, start_seconds = True, self._clock()
        try:
            yield
        finally:
            self._waiting = False
            self.stall_seconds += self._clock() - start_seconds


def _disk_state(stored: OffloadedStorage) -> DiskState:
    assert stored.disk is not None, "only storages of the disk tier pass through staging"
    return stored.disk


def _is_over(transfer: DiskTicket) -> bool:
    """Whether a transfer has ended, well or not; does not wait."""
    try:
        return transfer.done()
    except SPPOError:
        return True


def _finish(transfer: DiskTicket) -> None:
    """Block the host until a transfer has ended, well or not."""
    with contextlib.suppress(SPPOError):
        transfer.wait()
