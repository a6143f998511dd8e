"""The way between device and disk: host bytes that are only passed through.

Bytes leave by a copy into a staging region; once the host has seen that copy end, a background
thread writes the region to disk and it is free again. They return by a read into a staging region
and a copy from there. All of it moves on when the engine calls `poll`, which does not wait. Knows
nothing of handles, tapes or autograd; called under the engine's lock.

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
is enough that compute stands behind them.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from sppo_hf.errors import BudgetError, SPPOError
from sppo_hf.offload.cargo import Cargo, DiskStay
from sppo_hf.offload.disk_verbs import Disk, finish, is_over
from sppo_hf.offload.pool import PAGE_BYTES, HostPool, Region
from sppo_hf.offload.returns import Returns
from sppo_hf.offload.tiers import Land, Tier

DEFAULT_STAGING_BYTES = 2**30


class Staging(Tier):
    """The disk tier: staging regions and what is under way through them.

    Args:
        disk: keeps the bytes; closed by `close`.
        budget_bytes: size of the staging slab; where pages are locked, its largest power of two.
        pin: page-lock the slab.
        clock: seconds, to count how long the host waits.
    """

    name = "disk"
    reads_ahead = True

    def __init__(
        self,
        disk: Disk,
        budget_bytes: int = DEFAULT_STAGING_BYTES,
        *,
        pin: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if pin:
            budget_bytes = 1 << (max(budget_bytes, PAGE_BYTES).bit_length() - 1)
        self.budget_bytes = max(budget_bytes - budget_bytes % PAGE_BYTES, PAGE_BYTES)
        self.pool = HostPool(
            self.budget_bytes,
            pin=pin,
            budget_bytes=self.budget_bytes,
            alignment_bytes=PAGE_BYTES,
        )
        self.write_bytes = 0
        self.read_bytes = 0
        self.stall_seconds = 0.0
        self._disk = disk
        self._clock = clock
        self._waiting = False
        # A cargo passes through these in order; retired ones are left for whoever looks next.
        self._out: deque[Cargo] = deque()
        self._writing: deque[Cargo] = deque()
        self._wanted: deque[Cargo] = deque()
        self._reading: deque[Cargo] = deque()
        self._arrived: dict[Cargo, None] = {}
        self._returns = Returns(self.pool)
        self._failures: list[SPPOError] = []

    @property
    def ahead_bytes(self) -> int:
        """Bytes being read or read that nobody has asked for on the device yet."""
        reading = (cargo for cargo in self._reading if not (cargo.retired or _stay(cargo).wanted))
        return sum(cargo.span.num_bytes for cargo in (*reading, *self._arrived))

    def is_drained(self, waiting: Iterable[Cargo] = ()) -> bool:
        """Whether no cargo has a region any more; some may still be on their way back."""
        return self.pool.used_bytes == self._returns.num_bytes

    def reserve(self, num_bytes: int | None = None) -> None:
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

    def stay(self) -> DiskStay:
        """What a new cargo has of the disk: nothing yet."""
        return DiskStay()

    def store(self, cargo: Cargo) -> None:
        """Follow a cargo of the disk tier whose copy out has just been enqueued."""
        self._out.append(cargo)
        self._hand_over()  # on the CPU its copy has ended already

    def poll(self, land: Land) -> None:
        """Move on what has come to an end; does not wait, but for a disk with a full queue."""
        self._hand_over()
        self._end_writes()
        self._end_reads(land)
        self._returns.poll()
        self._start_wanted()

    def raise_failure(self) -> None:
        """Raise the first error of a background transfer that was not raised yet.

        Raises:
            OffloadError: a write or read failed; its cargo is lost.
            BudgetError: the disk is full.
        """
        if self._failures:
            error = self._failures[0]
            self._failures.clear()
            raise type(error)(str(error)) from error

    def load(self, cargo: Cargo) -> None:
        """Bring a cargo from the disk to the device as soon as may be, in the order of calls."""
        stay = _stay(cargo)
        stay.raise_failure()
        if stay.wanted:
            return
        stay.wanted = True
        if stay.read is None:
            self._wanted.append(cargo)
            self._start_wanted()

    def wait_loaded(self, cargo: Cargo, land: Land) -> None:
        """Wait until the bytes of a cargo are on the host, or on their way to the device.

        Raises:
            OffloadError: they are lost, or another transfer failed meanwhile.
        """
        stay = _stay(cargo)
        with self._stall():
            while cargo.on_device is None and cargo.host_bytes is None:
                self.poll(land)
                self.raise_failure()
                stay.raise_failure()
                if stay.read is not None:
                    finish(stay.read)
                    self._reading.remove(cargo)
                    self._end_read(cargo, land)
                elif cargo.region is None and not self._start_read(cargo):
                    self._make_progress()

    def read_ahead(self, cargo: Cargo) -> bool:
        """Start reading a cargo that will be wanted; False if there is no room for it now.

        At most half of staging is used for this, but always for one cargo.
        """
        stay = _stay(cargo)
        if cargo.coming or cargo.region is not None or stay.failure is not None:
            return True
        ahead_bytes = self.ahead_bytes
        if self._wanted or (
            ahead_bytes and ahead_bytes + cargo.span.num_bytes > self.budget_bytes // 2
        ):
            return False
        return self._start_read(cargo)

    def landed(self, cargo: Cargo) -> None:
        """Note that a copy to the device has been enqueued from the cargo's region."""
        stay = _stay(cargo)
        stay.wanted = False
        assert cargo.in_ticket is not None, "a landed cargo has a copy to the device"
        stay.copies.append(cargo.in_ticket)
        self._arrived.pop(cargo, None)
        if stay.extent is not None and stay.write is None:
            self._let_go(cargo)

    def retire(self, cargo: Cargo) -> None:
        """Give up what a cargo has of host and disk; nobody owns it any more."""
        stay = _stay(cargo)
        stay.wanted = False
        self._arrived.pop(cargo, None)
        if stay.extent is not None:
            self._disk.release(stay.extent)
            stay.extent = None
        self._let_go(cargo)

    def forget(self) -> None:
        """Drop the errors that nobody was told, and all cargoes, which are retired."""
        self._failures.clear()
        for queue in (self._out, self._writing, self._wanted, self._reading):
            assert all(cargo.retired for cargo in queue), "only retired cargoes are forgotten"
            queue.clear()

    def close(self) -> None:
        """Wait for what still touches the staging memory, and close the disk."""
        self.forget()
        while self._returns:
            self._returns.finish_first()
        self._disk.close()

    def _hand_over(self) -> None:
        """Start writing what has come out of the device."""
        while self._out and (self._out[0].retired or self._out[0].out_ticket.done()):
            cargo = self._out.popleft()
            if cargo.retired:
                continue
            assert cargo.region is not None, "bytes on their way out have a region"
            try:
                with self._stall():
                    write = self._disk.start_write(cargo.region.memory)
            except SPPOError as error:
                self._fail(cargo, error)
                continue
            stay = _stay(cargo)
            stay.extent, stay.write = write.extent, write.ticket
            self._writing.append(cargo)
            self.write_bytes += cargo.span.num_bytes

    def _end_writes(self) -> None:
        while self._writing:
            cargo = self._writing[0]
            write = _stay(cargo).write
            if not cargo.retired and write is not None:
                try:
                    if not write.done():
                        return
                except SPPOError as error:
                    self._fail(cargo, error)
                else:
                    _stay(cargo).write = None
                    self._let_go(cargo)
            self._writing.popleft()

    def _end_reads(self, land: Land) -> None:
        while self._reading:
            cargo = self._reading[0]
            read = _stay(cargo).read
            if not cargo.retired and read is not None and not is_over(read):
                return
            self._reading.popleft()
            if not cargo.retired:
                self._end_read(cargo, land)

    def _end_read(self, cargo: Cargo, land: Land) -> None:
        """See what came of a read that is over."""
        stay = _stay(cargo)
        assert stay.read is not None, "a read that is over was started"
        try:
            stay.read.done()
        except SPPOError as error:
            self._fail(cargo, error)
            return
        stay.read = None
        self._arrived[cargo] = None
        if stay.wanted:
            land(cargo)

    def _start_wanted(self) -> None:
        while self._wanted:
            cargo = self._wanted[0]
            waits = _stay(cargo).wanted and cargo.region is None
            if waits and not self._start_read(cargo):
                return
            self._wanted.popleft()

    def _start_read(self, cargo: Cargo) -> bool:
        """Start reading into a new region; False if there is no room."""
        stay = _stay(cargo)
        region = self._take(cargo.span.num_bytes)
        if region is None:
            return False
        try:
            stay.read = self._disk.start_read(stay.extent, region.memory)
        except SPPOError as error:
            self.pool.release(region)
            self._fail(cargo, error)
            return True
        cargo.region = region
        self._reading.append(cargo)
        self.read_bytes += cargo.span.num_bytes
        return True

    def _take(self, num_bytes: int) -> Region | None:
        self.reserve()
        region = self.pool.try_allocate(num_bytes)
        if region is None and self._returns:
            self._returns.poll_all()
            region = self.pool.try_allocate(num_bytes)
        return region

    def _let_go(self, cargo: Cargo) -> None:
        """Free the region as soon as nothing touches it; the disk has its bytes, or nobody will."""
        if cargo.region is None:
            return
        stay = _stay(cargo)
        transfers = [one for one in (stay.write, stay.read) if one is not None]
        self._returns.add(cargo.region, [*stay.copies, cargo.out_ticket], transfers)
        cargo.region = stay.write = stay.read = None
        stay.copies = []

    def _make_progress(self) -> None:
        """Let the host wait for something that gives a region up; see the note."""
        if self._returns:
            self._returns.finish_first()
        elif self._writing:
            write = _stay(self._writing[0]).write
            assert write is not None, "a write under way has a ticket"
            finish(write)
        elif self._out:
            self._out[0].out_ticket.finish()
        elif self._reading:
            read = _stay(self._reading[0]).read
            assert read is not None, "a read under way has a ticket"
            finish(read)
        else:
            assert self._arrived, "an empty slab has room for any region"
            cargo, _ = self._arrived.popitem()  # the newest is needed last
            self._let_go(cargo)

    def _fail(self, cargo: Cargo, error: SPPOError) -> None:
        stay = _stay(cargo)
        # Not the error itself: its frames, and those of its cause, lead to the step's and so to the
        # graph that holds this cargo, a circle through autograd that no garbage collection sees.
        stay.failure = type(error)(str(error))
        stay.wanted = False
        self._failures.append(stay.failure)
        self._arrived.pop(cargo, None)
        self._let_go(cargo)

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


def _stay(cargo: Cargo) -> DiskStay:
    assert cargo.disk is not None, "only cargoes of the disk tier pass through staging"
    return cargo.disk
