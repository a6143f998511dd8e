"""A disk on the fake device's clock: writes and reads take logical time in threads of their own.

`FakeDisk` has what `Staging` calls of a `Store`. Each thread is one more stream of the
`FakeDevice`, so its race detector sees host memory that is lent out, or touched by a copy, under a
transfer. Data move at once. It asserts that each extent is written before it is read, has the
size it is read with, and is released once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sppo_hf.errors import BudgetError, OffloadError
from tests.fakes.device import FakeDevice, FakeEvent


@dataclass(eq=False)
class FakeExtent:
    num_bytes: int
    data: Tensor | None = None
    written: FakeEvent | None = None
    is_lost: bool = False
    is_released: bool = False


@dataclass
class FakeDiskTicket:
    disk: FakeDisk
    over: FakeEvent
    failure: str | None = None

    def done(self) -> bool:
        if not self.over.query():
            return False
        if self.failure is not None:
            raise OffloadError(self.failure)
        return True

    def wait(self) -> None:
        self.over.synchronize()
        assert self.done()


@dataclass(eq=False)
class FakeDisk:
    """See the module.

    Args:
        device: whose clock and race detector it shares.
        write_seconds: duration of a write of so many bytes.
        read_seconds: duration of a read of so many bytes.
        threads: how many transfers of each kind run at once.
        budget_bytes: the most that extents take.
        name: the tier's.
    """

    device: FakeDevice
    write_seconds: Callable[[int], float] = lambda num_bytes: 1.0
    read_seconds: Callable[[int], float] = lambda num_bytes: 1.0
    threads: int = 2
    budget_bytes: int | None = None
    name: str = "disk"
    fail_writes: bool = False
    fail_reads: bool = False
    extents: set[FakeExtent] = field(default_factory=set)
    writes: int = 0
    reads: int = 0
    is_closed: bool = False

    def __post_init__(self) -> None:
        self._writers = [self.device.new_stream() for _ in range(self.threads)]
        self._readers = [self.device.new_stream() for _ in range(self.threads)]

    @property
    def used_bytes(self) -> int:
        return sum(extent.num_bytes for extent in self.extents)

    @property
    def reserved_bytes(self) -> int:
        return self.used_bytes

    def allocate(self, num_bytes: int) -> FakeExtent:
        if self.budget_bytes is not None and self.used_bytes + num_bytes > self.budget_bytes:
            raise BudgetError(f"{self.name} tier: no room in /fake")
        extent = FakeExtent(num_bytes)
        self.extents.add(extent)
        return extent

    def start_write(self, extent: FakeExtent, host_bytes: Tensor) -> FakeDiskTicket:
        if self.is_closed:
            raise OffloadError("the disk store in /fake was closed")
        assert not extent.is_released, "an extent is written after its release"
        assert extent.data is None, "an extent is written once"
        assert host_bytes.numel() == extent.num_bytes, "an extent is written as a whole"
        num_bytes = host_bytes.numel()
        stream = self._writers[self.writes % self.threads]
        self.writes += 1
        self.device.host_memory(stream, host_bytes, self.write_seconds(num_bytes), writes=False)
        over = FakeEvent(self.device)
        over.record(stream)
        with _disable_current_modes():  # no operation of the program's
            extent.data = host_bytes.clone()
        extent.written, extent.is_lost = over, self.fail_writes
        failure = "disk tier: writing /fake/slab failed" if self.fail_writes else None
        return FakeDiskTicket(self, over, failure)

    def start_read(self, extent: FakeExtent, host_bytes: Tensor) -> FakeDiskTicket:
        assert not extent.is_released, "an extent is read after its release"
        assert extent.data is not None, "an extent is written before it is read"
        assert extent.written is not None, "an extent is written before it is read"
        assert host_bytes.numel() == extent.num_bytes, "an extent is read as a whole"
        if extent.is_lost:
            raise OffloadError("disk tier: writing /fake/slab failed")
        stream = self._readers[self.reads % self.threads]
        self.reads += 1
        stream.wait_event(extent.written)
        seconds = self.read_seconds(host_bytes.numel())
        self.device.host_memory(stream, host_bytes, seconds, writes=True)
        over = FakeEvent(self.device)
        over.record(stream)
        with _disable_current_modes():
            host_bytes.copy_(extent.data)
        failure = "disk tier: reading /fake/slab failed" if self.fail_reads else None
        return FakeDiskTicket(self, over, failure)

    def release(self, extent: FakeExtent) -> None:
        assert not extent.is_released, "an extent is released twice"
        extent.is_released = True
        self.extents.discard(extent)

    def close(self) -> None:
        self.is_closed = True
        self.extents.clear()
