"""A device with a logical clock: streams, events, kernels and copies, checked as a race detector.

`FakeDevice` stands in for a `CudaRuntime`, so `StreamCopier` and everything above it run on it.
Its memory is the CPU's, its time is a number that only `advance` moves. The one way to make the
host wait is an event's `synchronize`, which moves the time as well and is counted, so a test can
tell that code does not synchronise.

What it asserts, whatever the durations, by vector clocks (one counter per stream; the host's clock
joins what `query` has told it, and everything enqueued later inherits that):

- *Happens-before*: two accesses to the same bytes, one of them a write, are ordered. The host
  bytes of slabs count as well as device bytes.
- *No use after free*: when a device storage dies, its block goes back to the stream that allocated
  it (that is how PyTorch's caching allocator works). Every access by another stream must then be
  over for the host, or be ordered before that stream's next work.
- *No use before allocation*: an access by another stream comes after the point in the owning
  stream's work at which the block was handed out, since what was there before may still be in use.

Values move at once, so data are right only as far as the order is; the order is what is proved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Clock = dict[str, int]


class RaceError(AssertionError):
    """Two pieces of work touch the same bytes without an order between them."""


@dataclass(slots=True)
class _Access:
    what: str
    stream: str
    index: int
    first_byte: int
    end_byte: int
    writes: bool

    def happened_before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.index


@dataclass(slots=True)
class _Block:
    """A storage the device has seen; `home` is None for host memory."""

    storage: StorageWeakRef
    num_bytes: int
    home: str | None
    free_since: Clock
    """The owning stream's clock when the block was allocated."""
    accesses: list[_Access] = field(default_factory=list)


class FakeStream:
    """A queue of work in order; work starts when the one before it and all waits are over."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.ready_at = 0.0
        self.clock: Clock = {}
        self.waits = 0
        """Times that it was told to wait for an event."""

    def wait_event(self, event: FakeEvent) -> None:
        """Order later work behind `event`; one never recorded orders nothing, as on CUDA."""
        self.waits += 1
        self.device.look_for_freed()
        self.ready_at = max(self.ready_at, event.time)
        _join(self.clock, event.clock)

    def enqueue(self, seconds: float) -> int:
        """Add work of `seconds`; return its index in this stream."""
        _join(self.clock, self.device.host_clock)
        self.ready_at = max(self.ready_at, self.device.now) + seconds
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]


class FakeEvent:
    """A point in a stream."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.time = 0.0
        self.clock: Clock = {}

    def record(self, stream: FakeStream) -> None:
        """Put the event behind all work of `stream` so far."""
        self._device.look_for_freed()
        self.time = max(stream.ready_at, self._device.now)
        self.clock = dict(stream.clock)

    def query(self) -> bool:
        """Whether the clock has passed; if so, the host knows it from now on."""
        self._device.look_for_freed()
        if self._device.now < self.time:
            return False
        _join(self._device.host_clock, self.clock)
        return True

    def synchronize(self) -> None:
        """Let the host wait until the clock has passed."""
        self._device.look_for_freed()
        if self._device.now < self.time:
            self._device.host_waits += 1
            self._device.now = self.time
        _join(self._device.host_clock, self.clock)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        """Logical milliseconds between two events that have passed."""
        assert max(self.time, end_event.time) <= self._device.now, "timed an event still ahead"
        return (end_event.time - self.time) * 1e3


class FakeDevice:
    """See the module.

    Args:
        copy_seconds: duration of a copy of so many bytes on the named stream.
    """

    device = torch.device("cpu")

    def __init__(self, copy_seconds: Callable[[str, int], float] | None = None) -> None:
        self._copy_seconds = copy_seconds or (lambda stream, num_bytes: num_bytes * 1e-9)
        self.now = 0.0
        self.host_waits = 0
        self.host_clock: Clock = {}
        self.compute = FakeStream(self, "compute")
        self._current = self.compute
        self._streams = [self.compute]
        self._blocks: dict[int, _Block] = {}
        self.device_bytes = 0
        self.peak_device_bytes = 0
        self.locked: dict[int, int] = {}
        """Number of locked bytes by the address of the first."""
        self.on_lock: Callable[[int, int], None] = lambda address, num_bytes: None
        """Called with address and bytes before they are locked; may raise, as a driver does."""

    def current_stream(self) -> FakeStream:
        """The current stream."""
        return self._current

    def new_stream(self) -> FakeStream:
        """A lane; the first is the D2H stream and the second the H2D stream of a `StreamCopier`."""
        self._streams.append(FakeStream(self, f"lane {len(self._streams)}"))
        return self._streams[-1]

    def new_event(self, *, timed: bool) -> FakeEvent:
        """An event not yet recorded."""
        return FakeEvent(self)

    @contextmanager
    def use_stream(self, stream: FakeStream) -> Iterator[None]:
        """Make `stream` current."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def empty_bytes(self, num_bytes: int) -> Tensor:
        """Device bytes [num_bytes] of the current stream, filled with rubbish."""
        return self._allocate(torch.full((num_bytes,), 0xA5, dtype=torch.uint8))

    def copy_bytes(self, destination: Tensor, source: Tensor) -> None:
        """A copy on the current stream."""
        self.look_for_freed()
        stream = self._current
        name, num_bytes = stream.name, source.numel()
        index = stream.enqueue(self._copy_seconds(name, num_bytes))
        self._access(source, index, writes=False, what=f"copy's read on {name}")
        self._access(destination, index, writes=True, what=f"copy's write on {name}")
        destination.copy_(source)

    def lock_pages(self, address: int, num_bytes: int) -> None:
        """Lock pages, and check that they are whole and not locked yet."""
        assert address % 4096 == 0, "locked memory starts with a page"
        for start, size in self.locked.items():
            assert address + num_bytes <= start or start + size <= address, "locked twice"
        self.on_lock(address, num_bytes)
        self.locked[address] = num_bytes

    def unlock_pages(self, address: int) -> None:
        """Let time pass until all queues are empty, as CUDA does.

        It comes when garbage is collected, whenever that is, so it raises nothing and is not one of
        the host's waits.
        """
        self.now = max([self.now, *(stream.ready_at for stream in self._streams)])
        del self.locked[address]

    def host_memory(
        self, stream: FakeStream, memory: Tensor, seconds: float, *, writes: bool
    ) -> None:
        """Work of a thread of the host on `memory`; its queue counts as one more stream.

        A thread starts when the host says so, and knows of the device's work what the host knows.
        """
        what = f"{'write' if writes else 'read'} by {stream.name}"
        self.look_for_freed()
        with self.use_stream(stream):
            self._access(memory, stream.enqueue(seconds), writes=writes, what=what)

    def kernel(
        self, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = (), seconds: float = 0.0
    ) -> None:
        """Work on the current stream that touches the given tensors."""
        self.look_for_freed()
        index = self._current.enqueue(seconds)
        for tensor in reads:
            self._access(tensor, index, writes=False, what="kernel's read")
        for tensor in writes:
            self._access(tensor, index, writes=True, what="kernel's write")

    def tensor(self, values: Tensor, seconds: float = 0.0) -> Tensor:
        """A device tensor that a kernel of `seconds` fills with `values`."""
        result = self._allocate(values.clone())
        self.kernel(writes=[result], seconds=seconds)
        return result

    def adopt(self, tensor: Tensor) -> None:
        """Treat a tensor made by PyTorch itself as one that the compute stream allocated."""
        if StorageWeakRef(tensor.untyped_storage()).cdata not in self._blocks:
            self._allocate(tensor)

    def advance(self, seconds: float) -> None:
        """Let time pass on the device while the host does something else."""
        self.look_for_freed()
        self.now += seconds

    def finish(self) -> None:
        """Let time pass until all queues are empty; the host still has to `query` to know."""
        self.look_for_freed()
        self.now = max([self.now, *(stream.ready_at for stream in self._streams)])

    def look_for_freed(self) -> None:
        """Check the storages freed since the last call; called before any work is ordered."""
        # Of all blocks, before each operation: `StorageWeakRef` takes four times as long.
        expired = torch.UntypedStorage._expired
        for key in [key for key in self._blocks if expired(key)]:
            self._freed(self._blocks[key])
            del self._blocks[key]

    def _allocate(self, tensor: Tensor) -> Tensor:
        self.look_for_freed()
        stream = self._current
        storage = StorageWeakRef(tensor.untyped_storage())
        num_bytes = tensor.untyped_storage().nbytes()
        # The block may be in use by anything that this stream's next work will be behind.
        self._blocks[storage.cdata] = _Block(storage, num_bytes, stream.name, dict(stream.clock))
        self.device_bytes += num_bytes
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
        return tensor

    def _freed(self, block: _Block) -> None:
        if block.home is None:
            return
        self.device_bytes -= block.num_bytes
        home = next(stream for stream in self._streams if stream.name == block.home)
        for access in block.accesses:
            over = access.happened_before(self.host_clock) or access.happened_before(home.clock)
            if access.stream != block.home and not over:
                raise RaceError(f"device bytes were freed under a {access.what}")

    def _access(self, tensor: Tensor, index: int, *, writes: bool, what: str) -> None:
        """Check one access of the work just enqueued; `look_for_freed` was called before it."""
        stream = self._current
        block = self._block_of(tensor)
        first = tensor.storage_offset() * tensor.element_size()
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        end = first + (last + 1) * tensor.element_size()
        if any(stream.clock.get(name, 0) < at for name, at in block.free_since.items()):
            raise RaceError(f"a {what} may come before its bytes are free for it")
        block.accesses = [one for one in block.accesses if not one.happened_before(self.host_clock)]
        for other in block.accesses:
            overlaps = other.first_byte < end and first < other.end_byte
            ordered = other.happened_before(stream.clock)
            if overlaps and (writes or other.writes) and not ordered:
                raise RaceError(f"a {what} is not ordered behind a {other.what}")
        block.accesses.append(_Access(what, stream.name, index, first, end, writes))

    def _block_of(self, tensor: Tensor) -> _Block:
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage.cdata not in self._blocks:
            num_bytes = tensor.untyped_storage().nbytes()
            self._blocks[storage.cdata] = _Block(storage, num_bytes, None, {})
        return self._blocks[storage.cdata]


def _join(clock: Clock, other: Clock) -> None:
    for stream, index in other.items():
        clock[stream] = max(clock.get(stream, 0), index)
