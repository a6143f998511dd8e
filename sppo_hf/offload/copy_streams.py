"""Copies between device and host: how they start, and how the compute stream waits for them.

`start_d2h` and `start_h2d` begin a copy and return a ticket; the ticket's `wait` orders the compute
stream behind the copy. Nothing here blocks the host on an accelerator but a ticket's `finish`,
which is for bytes on their way to a disk, and unlocking page-locked memory. `StreamCopier` needs
nothing of a device but the few methods of `CudaRuntime`, so the same ordering code runs on the fake
device of the tests.

Why no order is missing: [Note: offload lifetimes] in `sppo_hf/offload/__init__.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sppo_hf.offload.host_memory import PageLocker


class Ticket:
    """One copy; as it is, one that ended before `start_*` returned."""

    number: int = 0
    """Its place among the copier's copies in its direction, which end in this order."""

    @property
    def ordered(self) -> bool:
        """Whether all compute work enqueued from now on comes after the copy; may poll it."""
        return True

    def done(self) -> bool:
        """Whether the host knows that the copy has ended; polls, never blocks."""
        return True

    def wait(self) -> None:
        """Order the compute stream behind the copy; the host does not wait."""

    def finish(self) -> None:
        """Block the host until the copy has ended; only the way to the disk needs it."""


def wait_for_all(tickets: Iterable[Ticket]) -> None:
    """Order the compute stream behind all of `tickets`, with at most one wait per direction."""
    for ticket in sorted(tickets, key=lambda ticket: ticket.number, reverse=True):
        ticket.wait()


# A copier starts copies of flat byte tensors between one device and the host; those of a direction
# end in the order in which they were started.


class HostCopier:
    """Copies within the host, for the CPU as the device; each ends before its method returns.

    Compute stands still meanwhile, so all of the time counts as stall.
    """

    device = torch.device("cpu")
    page_locker: PageLocker | None = None
    """Page-locks host memory so that copies overlap with compute; None where they never do."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def start_d2h(self, source_bytes: Tensor, host_bytes: Tensor) -> Ticket:
        """Copy uint8 `source_bytes` [n] into `host_bytes` [n]."""
        start = time.perf_counter()
        host_bytes.copy_(source_bytes)
        self._seconds += time.perf_counter() - start
        return Ticket()

    def start_h2d(self, host_bytes: Tensor, after: Ticket | None = None) -> tuple[Tensor, Ticket]:
        """Copy `host_bytes` [n] into a new tensor [n]."""
        start = time.perf_counter()
        copied = host_bytes.clone()
        self._seconds += time.perf_counter() - start
        return copied, Ticket()

    def stall_seconds(self) -> float:
        """Seconds spent copying so far."""
        return self._seconds


class CudaRuntime:
    """What offloading needs from one CUDA device; nothing that a step calls blocks on it."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._compute = torch.cuda.current_stream(self.device)
        """The stream that copies were ordered against the last time."""
        self._streams: list[torch.cuda.Stream] = []

    def current_stream(self) -> torch.cuda.Stream:
        """This thread's current CUDA stream on the device."""
        self._compute = torch.cuda.current_stream(self.device)
        return self._compute

    def new_stream(self) -> torch.cuda.Stream:
        """A new CUDA stream."""
        stream = torch.cuda.Stream(self.device)
        self._streams.append(stream)
        return stream

    def new_event(self, *, timed: bool) -> torch.cuda.Event:
        """A new CUDA event, with timing if `timed`."""
        return torch.cuda.Event(enable_timing=timed)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """`torch.cuda.stream`."""
        return torch.cuda.stream(stream)

    def empty_bytes(self, num_bytes: int) -> Tensor:
        """Bytes [num_bytes] from the caching allocator, for the current stream."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def copy_bytes(self, destination: Tensor, source: Tensor) -> None:
        """An asynchronous copy if the host side is pinned; pageable memory blocks the host."""
        destination.copy_(source, non_blocking=True)

    def lock_pages(self, address: int, num_bytes: int) -> None:
        """`cudaHostRegister`."""
        cuda: Any = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            torch.cuda.check_error(cuda.cudaHostRegister(address, num_bytes, 0))

    def unlock_pages(self, address: int) -> None:
        """`cudaHostUnregister`, after copies and compute so far, which may use the memory.

        Not after all that the device has to do: in a garbage collection in the middle of a
        pipeline's step that may be a receive, of what another rank sends only after a message of
        this one.
        """
        cuda: Any = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            for stream in (*self._streams, self._compute):
                stream.synchronize()
            torch.cuda.check_error(cuda.cudaHostUnregister(address))


@dataclass(slots=True, eq=False)
class _CopyStream:
    """A stream of copies, first in first out: what is behind the n-th is behind all before it."""

    stream: torch.cuda.Stream | None
    """None: copies are enqueued on the compute stream itself."""
    num_issued: int = 0
    """Copies enqueued so far, which is the number of the last one."""
    last_ordered: int = 0
    """Number of the last copy that compute stands behind."""
    last_seen: int = 0
    """Number of the last copy that the host has seen done."""


class StreamTicket(Ticket):
    """A copy and the event at its end as one object; nobody outside waits on a raw event."""

    __slots__ = ("_copier", "copy_stream", "event", "number")

    def __init__(
        self, copier: StreamCopier, copy_stream: _CopyStream, event: torch.cuda.Event
    ) -> None:
        self.number = copy_stream.num_issued
        """Its place in its stream, from 1."""
        self.copy_stream = copy_stream
        self._copier = copier
        self.event = event
        """Passed when the copy has ended."""

    @property
    def is_behind(self) -> bool:
        """Whether compute was told to wait for this copy or a later one."""
        return self.number <= self.copy_stream.last_ordered

    @property
    def ordered(self) -> bool:
        """Whether compute was told to wait, or the host has just seen the copy done."""
        return self.is_behind or self.done()

    def done(self) -> bool:
        """Whether the host has seen the copy done."""
        if self.number > self.copy_stream.last_seen and self.event.query():
            self.copy_stream.last_seen = self.number
        return self.number <= self.copy_stream.last_seen

    def wait(self) -> None:
        """Make the compute stream wait for the copy, unless it is behind it already."""
        # If it is, that may have been another stream than the one that is current now, which the
        # copier then orders behind that one.
        if self.is_behind or not self.done():
            self._copier.order_compute_behind(self)

    def finish(self) -> None:
        """Block the host until the copy has ended."""
        self.event.synchronize()
        self.copy_stream.last_seen = max(self.copy_stream.last_seen, self.number)


class StreamCopier:
    """Copies on a D2H stream and an H2D stream of their own beside the compute stream.

    With `own_streams=False` copies are enqueued on the compute stream itself: slower, since
    nothing overlaps, but with no order left to arrange.
    """

    def __init__(self, runtime: CudaRuntime, *, own_streams: bool = True) -> None:
        self.device = runtime.device
        self.page_locker: PageLocker | None = runtime
        self._runtime = runtime
        self._compute = runtime.current_stream()
        # All that compute has been on. Memory is freed to the stream that allocated it, so each of
        # them is ordered behind copies.
        self._compute_streams = [self._compute]
        self._d2h = _CopyStream(runtime.new_stream() if own_streams else None)
        self._h2d = _CopyStream(runtime.new_stream() if own_streams else None)
        self._stall_seconds = 0.0
        # A stream that waits for an event waits for what the event stood for at that moment, so
        # one that is waited for at once can be recorded again and again.
        self._now = runtime.new_event(timed=False)
        self._open_stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._idle_pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start_d2h(self, source_bytes: Tensor, host_bytes: Tensor) -> Ticket:
        """Start copying uint8 `source_bytes` [n] into `host_bytes` [n], behind compute so far.

        The caller keeps `source_bytes` alive until the ticket is ordered.
        """
        ready = self._compute_now()
        return self._copy(self._d2h, ready, None, host_bytes, source_bytes)

    def start_h2d(self, host_bytes: Tensor, after: Ticket | None = None) -> tuple[Tensor, Ticket]:
        """Start copying `host_bytes` [n] into new device bytes [n], behind the copy `after`.

        The bytes belong to the compute stream. They may be used after the ticket's `wait`, and
        must stay alive until it is ordered.
        """
        destination = self._runtime.empty_bytes(host_bytes.numel())
        # After the allocation: what used this block before is compute work in front of this event.
        ready = self._compute_now()
        return destination, self._copy(self._h2d, ready, after, destination, host_bytes)

    def stall_seconds(self) -> float:
        """Seconds between the event before and after each wait of compute, of those passed."""
        while self._open_stalls and self._open_stalls[0][1].query():
            start, end = pair = self._open_stalls.popleft()
            self._stall_seconds += start.elapsed_time(end) / 1e3
            self._idle_pairs.append(pair)
        return self._stall_seconds

    def order_compute_behind(self, ticket: StreamTicket) -> None:
        """Make the compute stream wait for the copy, and time how long it stands still for it."""
        compute = self._compute_stream()
        if ticket.is_behind:
            return
        self.stall_seconds()  # or the events of a whole step would be alive at its end
        start, end = self._idle_pairs.pop() if self._idle_pairs else self._new_pair()
        start.record(compute)
        compute.wait_event(ticket.event)
        end.record(compute)
        self._order_others_behind(ticket.event)
        self._open_stalls.append((start, end))
        ticket.copy_stream.last_ordered = ticket.number

    def _new_pair(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return self._runtime.new_event(timed=True), self._runtime.new_event(timed=True)

    def _copy(
        self,
        queue: _CopyStream,
        ready: torch.cuda.Event,
        after: Ticket | None,
        destination: Tensor,
        source: Tensor,
    ) -> Ticket:
        """Enqueue a copy behind the event `ready` and the copy `after`."""
        done = self._runtime.new_event(timed=False)
        if queue.stream is None:
            self._runtime.copy_bytes(destination, source)
            done.record(self._compute)
            self._order_others_behind(done)
            queue.num_issued += 1
            queue.last_ordered = queue.num_issued
            return StreamTicket(self, queue, done)
        queue.stream.wait_event(ready)
        if after is not None:
            assert isinstance(after, StreamTicket), "a copy waits for a ticket of its own copier"
            queue.stream.wait_event(after.event)
        with self._runtime.use_stream(queue.stream):
            self._runtime.copy_bytes(destination, source)
        done.record(queue.stream)
        queue.num_issued += 1
        return StreamTicket(self, queue, done)

    def _compute_now(self) -> torch.cuda.Event:
        """An event behind all compute so far, valid until the next call."""
        self._now.record(self._compute_stream())
        return self._now

    def _compute_stream(self) -> torch.cuda.Stream:
        """The current stream, ordered behind the one that was current the last time."""
        current = self._runtime.current_stream()
        if current != self._compute:
            self._now.record(self._compute)
            current.wait_event(self._now)
            self._compute = current
            if current not in self._compute_streams:
                self._compute_streams.append(current)
        return current

    def _order_others_behind(self, event: torch.cuda.Event) -> None:
        """Make the streams wait that compute was on before the current one."""
        for stream in self._compute_streams:
            if stream != self._compute:
                stream.wait_event(event)


Copier = HostCopier | StreamCopier
