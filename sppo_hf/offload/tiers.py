"""Tiers: the places away from the device where offloaded bytes are kept, as the engine uses them.

Copies from and to the device always have one end in host memory, so every tier allocates a host
region for each D2H copy. The host tier leaves the bytes there (`Tier` itself). A tier behind the
host (`Staging`) writes them to its store and reads them back through a slab of its own: once the
host has seen a D2H copy end, a background thread writes its region away and the region is free
again; a tensor comes back by a read into a region and an H2D copy from there. Space in the store is
taken before the copy starts, so what finds none goes to the next tier.

[Note: staging never deadlocks]

Each tier behind the host has a slab of its own, which bytes of no other tier can take. Whatever
holds a region gives it up by itself, without needing a further one of this or another slab: a D2H
copy ends and becomes a write, a write ends, an H2D copy ends, and what was read ahead can be
dropped, since the store still has it. So whoever needs a region makes the host wait for these in
turn (`_make_progress`); at the latest when all are through, the slab is one free block, and any
region no larger than the slab fits. Copies of all tiers share their stream, which the device works
off without the host, and each store has threads of its own; so it does not matter to one slab what
another waits for. Space in a store is taken before a region, and waits at most for transfers under
way, which need nothing more. Two regions of the largest size are the minimum at which a copy and a
write overlap, but that is a matter of speed only.

Threads write and read these regions, and what the compute stream waits for orders nothing for a
thread. So a region of staging is free when the host has *seen* all its copies end, while for one of
the host tier it is enough that compute stands behind them: rule 7 of [Note: offload lifetimes].
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sppo_hf.errors import BudgetError, SPPOError
from sppo_hf.offload.copy_streams import Ticket
from sppo_hf.offload.host_memory import PAGE_BYTES, HostPool, PageLocker, Progress, Region
from sppo_hf.offload.storage import OffloadedStorage, StagedState
from sppo_hf.offload.store import Extent, Store, Transfer
from sppo_hf.planning.tiers import HOST, OffloadTier

DEFAULT_STAGING_BYTES = 2**30


class Tier:
    """Stores bytes that leave the device, and loads them into host memory on their way back.

    As it is, the host tier: bytes stay in the region that they were copied to. All methods are
    called under the engine's lock.

    Args:
        pool: Host memory that its regions come from.
    """

    name: OffloadTier = HOST
    reads_ahead: bool = False
    """Whether loading bytes into host memory takes time, so that asking early helps."""
    write_bytes: int = 0
    """Bytes written from host memory to the tier since the engine was made."""
    read_bytes: int = 0
    """Bytes read from the tier into host memory since the engine was made."""
    stall_seconds: float = 0.0
    """Seconds that the host has waited for the tier."""

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool

    @property
    def reserved_bytes(self) -> int:
        """Bytes that it has reserved beyond host memory, in use or not."""
        return 0

    def connect(
        self, *, start_h2d: Callable[[OffloadedStorage], None], free_dropped: Callable[[], None]
    ) -> None:
        """Take the engine's callbacks.

        `start_h2d` starts the H2D copy of a storage whose bytes are on the host, and then calls
        `on_h2d_started`; `free_dropped` makes compute wait for the copies of retired storages,
        which frees them.
        """
        self._start_h2d = start_h2d
        self._free_dropped = free_dropped

    def reserve(self, num_bytes: int, progress: Progress | None = None) -> None:
        """Allocate the host memory that a step will need: `num_bytes` on the host tier."""
        self.pool.reserve(num_bytes, progress)

    def allocate(self, num_bytes: int) -> Region:
        """Allocate a host region for a D2H copy.

        The host tier makes compute wait for dropped storages before its pool grows.

        Raises:
            BudgetError: The tier has no free space for it, and will not have any.
        """
        region = self.pool.try_allocate(num_bytes)
        if region is None:
            self._free_dropped()
            region = self.pool.try_allocate(num_bytes)
        return region or self.pool.allocate(num_bytes)

    def give_back(self, region: Region) -> None:
        """Take back a region of `allocate` whose copy could not be started."""
        self.pool.release(region)

    def store(self, stored: OffloadedStorage) -> None:
        """Take over a storage whose D2H copy has just been enqueued."""

    def load(self, stored: OffloadedStorage) -> None:
        """Start bringing the bytes to the device; they are not on the host."""
        raise AssertionError(f"bytes of the {self.name} tier are always on the host")

    def wait_loaded(self, stored: OffloadedStorage) -> None:
        """Block the host until the bytes are in host memory, or on their way to the device."""

    def read_ahead(self, stored: OffloadedStorage) -> bool:
        """Start loading the bytes into host memory; False if there is no free space for it now."""
        return True

    def on_h2d_started(self, stored: OffloadedStorage) -> None:
        """Called when an H2D copy has been enqueued from the storage's region."""

    def retire(self, stored: OffloadedStorage) -> None:
        """Free what a storage that has no owner any more holds beyond host memory."""

    def is_drained(self, dropped: Iterable[OffloadedStorage]) -> bool:
        """Whether no host memory is in use but that of retired storages that wait for a copy."""
        regions = [stored.region for stored in dropped if stored.region is not None]
        return self.pool.used_bytes == sum(region.reserved_bytes for region in regions)

    def poll(self) -> None:
        """Advance what has ended."""

    def raise_failure(self) -> None:
        """Raise the first background error that was not raised yet."""

    def forget(self) -> None:
        """Drop errors, and all storages, which are retired."""

    def close(self) -> None:
        """Free the host memory and what is beyond it, once nothing touches it any more."""
        self.pool.close()


@dataclass(slots=True, eq=False)
class _ReclaimedRegion:
    """A region that is not needed any more, with the copies and transfers that may touch it."""

    region: Region
    copies: list[Ticket]
    transfers: list[Transfer]

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
    """Regions of a pool that are freed once nothing touches them, oldest first."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._queue: deque[_ReclaimedRegion] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool that are queued."""
        return sum(entry.region.reserved_bytes for entry in self._queue)

    def add(self, region: Region, copies: list[Ticket], transfers: list[Transfer]) -> None:
        """Free `region` when all of `copies` and `transfers` have ended."""
        self._queue.append(_ReclaimedRegion(region, copies, transfers))

    def poll(self) -> None:
        """Free regions from the oldest on, up to the first that is still touched; cheap."""
        while self._queue and self._release_if_over(self._queue[0]):
            self._queue.popleft()

    def poll_all(self) -> None:
        """Free all that can be: a region queued behind a slow write may be over."""
        self._queue = deque(entry for entry in self._queue if not self._release_if_over(entry))

    def finish_first(self) -> None:
        """Block the host until the oldest region is free, and free it."""
        self._queue[0].finish()
        self.poll()

    def _release_if_over(self, entry: _ReclaimedRegion) -> bool:
        if not entry.is_over():
            return False
        self._pool.release(entry.region)
        return True


class Staging(Tier):
    """A tier behind the host: a staging slab, a store behind it, and the transfers between the two.

    Args:
        store: Keeps the bytes; closed by `close`.
        budget_bytes: Size of the staging slab.
        locker: Page-locks the slab; None for plain memory.
        clock: Returns seconds, to count how long the host waits.
    """

    reads_ahead = True

    def __init__(
        self,
        store: Store,
        budget_bytes: int = DEFAULT_STAGING_BYTES,
        *,
        locker: PageLocker | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = store.name
        self.budget_bytes = max(budget_bytes - budget_bytes % PAGE_BYTES, PAGE_BYTES)
        super().__init__(
            HostPool(
                self.budget_bytes,
                locker=locker,
                budget_bytes=self.budget_bytes,
                alignment_bytes=PAGE_BYTES,
            )
        )
        self._store = store
        self._clock = clock
        self._is_stalled = False
        self._extents: dict[Region, Extent] = {}
        """Extents by the regions of copies that are about to be started."""
        # A storage passes through these in order. Retired ones stay queued; whoever looks at them
        # next skips them.
        self._out: deque[OffloadedStorage] = deque()
        """D2H copy under way."""
        self._writing: deque[OffloadedStorage] = deque()
        self._wanted: deque[OffloadedStorage] = deque()
        """Prefetched, and waiting for a free region to be read into."""
        self._reading: deque[OffloadedStorage] = deque()
        self._loaded: dict[OffloadedStorage, None] = {}
        """Read into host memory, without an H2D copy yet; the newest at the end."""
        self._reclaims = ReclaimQueue(self.pool)
        self._failures: list[SPPOError] = []

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the store has taken from the machine, in use or not."""
        return self._store.reserved_bytes

    @property
    def ahead_bytes(self) -> int:
        """Bytes read, or being read, that nobody has prefetched to the device yet."""
        reading = (
            stored for stored in self._reading if not (stored.retired or _staged(stored).wanted)
        )
        return sum(stored.span.num_bytes for stored in (*reading, *self._loaded))

    def is_drained(self, dropped: Iterable[OffloadedStorage] = ()) -> bool:
        """Whether no storage has a region any more; regions in the reclaim queue do not count."""
        return self.pool.used_bytes == self._reclaims.num_bytes

    def reserve(self, num_bytes: int = 0, progress: Progress | None = None) -> None:
        """Allocate the staging slab if it is not there; `num_bytes` is not used."""
        self.pool.reserve(self.budget_bytes)

    def allocate(self, num_bytes: int) -> Region:
        """Take space in the store and a region for a D2H copy, blocking until one is free.

        Raises:
            BudgetError: The store is full, or the bytes are more than all of staging.
            OffloadError: A transfer failed meanwhile, or the host or the store gives no memory.
        """
        if num_bytes > self.budget_bytes:
            raise BudgetError(
                f"{self.name} tier: a tensor of {num_bytes} bytes cannot pass through the staging "
                f"memory of {self.budget_bytes} bytes on its way there; raise host_memory (staging "
                "is a part of it) or use shorter chunks"
            )
        with self._count_stall():
            extent = self._store.allocate(num_bytes)
        try:
            region = self._allocate_region(num_bytes)
        except BaseException:
            self._store.release(extent)
            raise
        self._extents[region] = extent
        return region

    def _allocate_region(self, num_bytes: int) -> Region:
        region = self._try_allocate(num_bytes)
        while region is None:
            with self._count_stall():
                self.poll()
                self.raise_failure()
                region = self._try_allocate(num_bytes)
                if region is None:
                    self._make_progress()
        return region

    def give_back(self, region: Region) -> None:
        """Take back a region whose copy could not be started, and its space in the store."""
        self._store.release(self._extents.pop(region))
        super().give_back(region)

    def store(self, stored: OffloadedStorage) -> None:
        """Follow a storage whose D2H copy has just been enqueued."""
        assert stored.region is not None, "bytes on their way out have a region"
        stored.staged = StagedState(self._extents.pop(stored.region))
        self._out.append(stored)
        self._start_writes()  # on the CPU its copy has ended already

    def poll(self) -> None:
        """Advance what has ended; blocks only for a store whose write queue is full."""
        self._start_writes()
        self._end_writes()
        self._end_reads()
        self._reclaims.poll()
        self._start_wanted()

    def raise_failure(self) -> None:
        """Raise the first error of a background transfer that was not raised yet.

        Raises:
            OffloadError: A write or read failed; its storage is lost.
            BudgetError: The store is full.
        """
        if self._failures:
            error = self._failures[0]
            self._failures.clear()
            raise type(error)(str(error)) from error

    def load(self, stored: OffloadedStorage) -> None:
        """Bring a storage back to the device as soon as possible, in order of calls."""
        staged = _staged(stored)
        staged.raise_failure()
        if staged.wanted:
            return
        staged.wanted = True
        if staged.read is None:
            self._wanted.append(stored)
            self._start_wanted()

    def wait_loaded(self, stored: OffloadedStorage) -> None:
        """Block the host until the bytes are on the host, or on their way to the device.

        Raises:
            OffloadError: They are lost, or another transfer failed meanwhile.
        """
        staged = _staged(stored)
        with self._count_stall():
            while stored.device_bytes is None and stored.host_bytes is None:
                self.poll()
                self.raise_failure()
                staged.raise_failure()
                if staged.read is not None:
                    _finish(staged.read)
                    self._reading.remove(stored)
                    self._end_read(stored)
                elif stored.region is None and not self._start_read(stored):
                    self._make_progress()

    def read_ahead(self, stored: OffloadedStorage) -> bool:
        """Start reading a storage that will be prefetched; False if there is no free region now.

        At most half of staging is used for this, but always enough for one storage.
        """
        staged = _staged(stored)
        if stored.is_prefetched or stored.region is not None or staged.failure is not None:
            return True
        ahead_bytes = self.ahead_bytes
        if self._wanted or (
            ahead_bytes and ahead_bytes + stored.span.num_bytes > self.budget_bytes // 2
        ):
            return False
        return self._start_read(stored)

    def on_h2d_started(self, stored: OffloadedStorage) -> None:
        """Free the storage's region after its H2D copy, if the store has the bytes."""
        staged = _staged(stored)
        staged.wanted = False
        assert stored.h2d_ticket is not None, "the H2D copy has been enqueued"
        staged.copies.append(stored.h2d_ticket)
        self._loaded.pop(stored, None)
        if staged.is_written:
            self._reclaim(stored)

    def retire(self, stored: OffloadedStorage) -> None:
        """Free the host memory and space of a storage that has no owner any more."""
        staged = _staged(stored)
        staged.wanted = False
        self._loaded.pop(stored, None)
        self._store.release(staged.extent)
        self._reclaim(stored)

    def forget(self) -> None:
        """Drop errors that were not raised, and all storages, which are retired."""
        self._failures.clear()
        for queue in (self._out, self._writing, self._wanted, self._reading):
            assert all(stored.retired for stored in queue), "only retired storages are forgotten"
            queue.clear()

    def close(self) -> None:
        """Wait for what still touches the staging memory, and close the store."""
        self.forget()
        while self._reclaims:
            self._reclaims.finish_first()
        self._store.close()
        self.pool.close()

    def _start_writes(self) -> None:
        """Start writing the storages whose D2H copy the host has seen end."""
        while self._out and (self._out[0].retired or self._out[0].d2h_ticket.done()):
            stored = self._out[0]
            if not stored.retired:
                self._start_write(stored)
            self._out.popleft()  # not before: an interrupt may end the wait for the store's queue

    def _start_write(self, stored: OffloadedStorage) -> None:
        assert stored.region is not None, "bytes on their way out have a region"
        staged = _staged(stored)
        try:
            with self._count_stall():
                staged.write = self._store.start_write(staged.extent, stored.region.memory)
        except SPPOError as error:
            self._fail(stored, error)
            return
        self._writing.append(stored)
        self.write_bytes += stored.span.num_bytes

    def _end_writes(self) -> None:
        while self._writing:
            stored = self._writing[0]
            write = _staged(stored).write
            if not stored.retired and write is not None:
                try:
                    if not write.done():
                        return
                except SPPOError as error:
                    self._fail(stored, error)
                else:
                    _staged(stored).is_written, _staged(stored).write = True, None
                    self._reclaim(stored)
            self._writing.popleft()

    def _end_reads(self) -> None:
        while self._reading:
            stored = self._reading[0]
            read = _staged(stored).read
            if not stored.retired and read is not None and not _is_over(read):
                return
            self._reading.popleft()
            if not stored.retired:
                self._end_read(stored)

    def _end_read(self, stored: OffloadedStorage) -> None:
        """Take the result of a read that is over, and copy on what is wanted."""
        staged = _staged(stored)
        assert staged.read is not None, "a read that is over was started"
        try:
            staged.read.done()
        except SPPOError as error:
            self._fail(stored, error)
            return
        staged.read = None
        self._loaded[stored] = None
        if staged.wanted:
            self._start_h2d(stored)

    def _start_wanted(self) -> None:
        while self._wanted:
            stored = self._wanted[0]
            needs_read = _staged(stored).wanted and stored.region is None
            if needs_read and not self._start_read(stored):
                return
            self._wanted.popleft()

    def _start_read(self, stored: OffloadedStorage) -> bool:
        """Start reading into a new region; False if none is free."""
        staged = _staged(stored)
        region = self._try_allocate(stored.span.num_bytes)
        if region is None:
            return False
        try:
            staged.read = self._store.start_read(staged.extent, region.memory)
        except SPPOError as error:
            self.pool.release(region)
            self._fail(stored, error)
            return True
        stored.region = region
        self._reading.append(stored)
        self.read_bytes += stored.span.num_bytes
        return True

    def _try_allocate(self, num_bytes: int) -> Region | None:
        self.reserve()
        region = self.pool.try_allocate(num_bytes)
        if region is None and self._reclaims:
            self._reclaims.poll_all()
            region = self.pool.try_allocate(num_bytes)
        return region

    def _reclaim(self, stored: OffloadedStorage) -> None:
        """Free the region as soon as nothing touches it; its bytes are stored, or not needed."""
        if stored.region is None:
            return
        staged = _staged(stored)
        transfers = [ticket for ticket in (staged.write, staged.read) if ticket is not None]
        self._reclaims.add(stored.region, [*staged.copies, stored.d2h_ticket], transfers)
        stored.region = staged.write = staged.read = None
        staged.copies = []

    def _make_progress(self) -> None:
        """Block the host on something that gives up a region; [Note: staging never deadlocks]."""
        for queue in (self._out, self._writing, self._reading):
            while queue and queue[0].retired:  # since the last poll; its region is free, or queued
                queue.popleft()
        if self._reclaims:
            self._reclaims.finish_first()
        elif self._writing:
            write = _staged(self._writing[0]).write
            assert write is not None, "a write under way has a ticket"
            _finish(write)
        elif self._out:
            self._out[0].d2h_ticket.finish()
        elif self._reading:
            read = _staged(self._reading[0]).read
            assert read is not None, "a read under way has a ticket"
            _finish(read)
        else:
            assert self._loaded, "an empty slab has free space for any region"
            stored, _ = self._loaded.popitem()  # the newest is needed last
            self._reclaim(stored)

    def _fail(self, stored: OffloadedStorage, error: SPPOError) -> None:
        staged = _staged(stored)
        # Not the error itself: the Python frames of its traceback lead to the step's, hence to the
        # graph that holds this storage: a cycle through autograd that no garbage collection sees.
        staged.failure = type(error)(str(error))
        staged.wanted = False
        self._failures.append(staged.failure)
        self._loaded.pop(stored, None)
        self._reclaim(stored)

    @contextlib.contextmanager
    def _count_stall(self) -> Iterator[None]:
        """Add the seconds inside to `stall_seconds`; nested calls count once."""
        if self._is_stalled:
            yield
            return
        self._is_stalled, start_seconds = True, self._clock()
        try:
            yield
        finally:
            self._is_stalled = False
            self.stall_seconds += self._clock() - start_seconds


def _staged(stored: OffloadedStorage) -> StagedState:
    assert stored.staged is not None, "only storages of tiers behind the host pass through staging"
    return stored.staged


def _is_over(transfer: Transfer) -> bool:
    """Whether a transfer has ended, successfully or not; does not block."""
    try:
        return transfer.done()
    except SPPOError:
        return True


def _finish(transfer: Transfer) -> None:
    """Block the host until a transfer has ended, successfully or not."""
    with contextlib.suppress(SPPOError):
        transfer.wait()
