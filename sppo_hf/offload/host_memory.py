"""Host memory for offloaded bytes: slabs from the operating system, and regions within them.

`host_memory` makes pieces of memory, plain or page-locked by several threads. `HostPool` allocates
regions of them within a budget. Slabs are kept for the life of a pool, because pinning costs
milliseconds and a step must not pay it twice; best they are made before the first step, by
`reserve`. Nothing here is thread-safe by itself; the engine calls a pool under its lock.

[Note: page-locked memory]
Copies overlap with compute only from and into page-locked memory, and training with offload wants
tens of GiB of it before its first step. One call of cudaHostAlloc makes, clears and maps all pages
in one thread. Here several threads write to every page of a piece first, which is most of the work,
and then one call has the driver lock what is there, while the pages of the next piece are made.
(RAPIDS cuDF, pull request 23457, an instance with 16 processors: 16 GiB in 7.9 s by cudaHostAlloc,
in 1.5 s this way with four threads. `recipes/benchmarks/pinning.py` measures it here.)

- A piece is yielded when all of it is locked. A refusal is raised after the pieces before it were
  yielded; what was made ahead is freed.
- It has exactly the bytes that were requested, where PyTorch's pinned memory has a power of two,
  and returns to the system, unlocked first, when the last tensor in it is gone.
- Its pages are shared with forked processes. Private pages that are locked would be copied for each
  of them at once (Linux since 5.12); without them, reading a host-resident weight would end a
  worker of a DataLoader.
- The driver is called in a thread that then ends: CUDA's runtime remembers a refusal for the thread
  that met it, and that thread's next kernel would raise it again.
- It is memory of this process, so a control group's limit and the resident size count it. If less
  is free, it is refused here: touching it would have this process killed.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.slabs import FreeList, Run, Slab, SlabAllocator, round_up
from sppo_hf.planning.machine import free_host_memory_bytes
from sppo_hf.planning.memory import HOST_SLAB_BYTES, MAX_SLAB_BYTES
from sppo_hf.rules import format_bytes

ALIGNMENT_BYTES = 512
"""Regions start at multiples of it within their slab, unless a pool says otherwise."""
PAGE_BYTES = 4096
"""Pieces of memory start at a multiple of it, as transfers past the page cache want."""
MAX_THREADS = 8
"""Threads that write to pages; more made nothing faster where that was measured (see the note)."""
_PART_BYTES = 2**28
"""Bytes that a thread writes to at a time."""

Progress = Callable[[int, int], None]
"""Called with the bytes that have been made so far, and with how many will be."""


# -- pages from the operating system -----------------------------------------------------------


class PageLocker(Protocol):
    """Page-locks memory with a device's driver; called from any thread."""

    def lock_pages(self, address: int, num_bytes: int) -> None:
        """Lock these bytes, from the start of a page on.

        Raises:
            RuntimeError: The driver refuses.
        """
        ...

    def unlock_pages(self, address: int) -> None:
        """Wait for copies and compute, and unlock what was locked from this address on."""
        ...


class _Pages(mmap.mmap):
    """Bytes [n] that this process shares with its children."""

    _locker: PageLocker | None = None
    _process = 0

    def array(self) -> NDArray[np.uint8]:
        return np.frombuffer(self, np.uint8)

    def lock(self, locker: PageLocker) -> None:
        locker.lock_pages(self.array().ctypes.data, len(self))
        self._locker, self._process = locker, os.getpid()
        with _locked_pages_guard:
            _locked_pages.add(self)

    def __del__(self) -> None:
        # The driver forgets a process that ends, and knows nothing of its children.
        if self._locker is None or self._process != os.getpid() or sys.is_finalizing():
            return
        self._locker.unlock_pages(self.array().ctypes.data)


_locked_pages: weakref.WeakSet[_Pages] = weakref.WeakSet()
_locked_pages_guard = threading.Lock()
"""Held while pieces are added, in a thread, or counted, in another; one may go at any time."""


def locked_bytes() -> int:
    """Page-locked memory of this process in bytes, without PyTorch's own."""
    with _locked_pages_guard:
        return sum(map(len, _locked_pages))


def host_memory(
    sizes: Sequence[int], locker: PageLocker | None = None, *, threads: int | None = None
) -> Iterator[Tensor]:
    """Yield pieces of host memory, uint8 [size], each from the start of a page on.

    `locker` page-locks them, None for plain memory, after `threads` have written to the pages, None
    for as many as help.

    Raises:
        OffloadError: The operating system or the driver gives no more; what was yielded stays.
    """
    if locker is None:
        return map(_plain_memory, sizes)
    return _locked_memory(sizes, locker, threads or _num_threads())


@torch.inference_mode(False)  # a slab outlives the evaluation that needs it first
def _plain_memory(num_bytes: int) -> Tensor:
    try:
        memory = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise OffloadError(
            f"the host gave no memory for a slab of {num_bytes} bytes ({error}); "
            "lower host_memory or use shorter sequences"
        ) from error
    skip_bytes = -memory.data_ptr() % PAGE_BYTES
    return memory[skip_bytes : skip_bytes + num_bytes]


def _locked_memory(sizes: Sequence[int], locker: PageLocker, threads: int) -> Iterator[Tensor]:
    with (
        ThreadPoolExecutor(threads, "sppo-pages") as touching,
        ThreadPoolExecutor(1, "sppo-lock") as locking,
    ):
        before: Future[Tensor] | None = None
        pages: _Pages | None = None
        try:
            for size in sizes:
                try:
                    pages = _touched_pages(size, touching)
                except OffloadError:
                    if before is not None:
                        yield before.result()
                    raise
                if before is not None:
                    yield before.result()
                before = locking.submit(_lock, pages, locker)
            if before is not None:
                yield before.result()
        finally:
            # An error's traceback leads here, and would keep what was made ahead.
            before = pages = None


def _touched_pages(num_bytes: int, threads: ThreadPoolExecutor) -> _Pages:
    """Memory of which every page has been written to."""
    free_bytes = free_host_memory_bytes()
    if free_bytes < num_bytes:
        raise _lock_error(num_bytes, f"{format_bytes(free_bytes)} of host memory are free")
    try:
        pages = _Pages(-1, num_bytes)
    except OSError as error:
        raise _lock_error(num_bytes, str(error)) from error
    with suppress(AttributeError, OSError):  # not Linux, or a system without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    starts = range(0, num_bytes, _PART_BYTES)
    for touched in [threads.submit(_touch, pages, start) for start in starts]:
        touched.result()
    return pages


def _touch(pages: _Pages, start: int) -> None:
    """Write to a part's pages; NumPy lets other threads run meanwhile."""
    pages.array()[start : start + _PART_BYTES : PAGE_BYTES] = 0


def _lock(pages: _Pages, locker: PageLocker) -> Tensor:
    try:
        pages.lock(locker)
    except RuntimeError as error:
        raise _lock_error(len(pages), str(error)) from error
    return torch.frombuffer(pages, dtype=torch.uint8)


def _lock_error(num_bytes: int, reason: str) -> OffloadError:
    return OffloadError(
        f"pinning a host slab of {num_bytes} bytes failed ({reason}); pinned memory is a budget "
        f"of its own, here {_memlock_limit()}. Lower host_memory, raise the limit "
        "(ulimit -l), or set use_pin_memory to false (slower copies)"
    )


def _memlock_limit() -> str:
    """The operating system's limit on locked memory of this process, in words."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return "without a known limit"
    soft_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft_bytes == resource.RLIM_INFINITY:
        return "RLIMIT_MEMLOCK unlimited"
    return f"RLIMIT_MEMLOCK {soft_bytes} bytes"


def _num_threads() -> int:
    """One for each processor that this process may run on, up to `MAX_THREADS`."""
    allowed = getattr(os, "sched_getaffinity", None)
    processors = os.cpu_count() or 1 if allowed is None else len(allowed(0))
    return min(MAX_THREADS, processors)


# -- regions of slabs --------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _MemorySlab(Slab):
    memory: Tensor
    """uint8 [n]."""


@dataclass(slots=True, eq=False)
class Region(Run[_MemorySlab]):
    """Host bytes allocated from a `HostPool`."""

    released: bool = False

    @property
    def memory(self) -> Tensor:
        """The bytes as a uint8 tensor [num_bytes], a view of the slab."""
        assert not self.released, "a host region was used after its release"
        return self.slab.memory[self.offset : self.offset + self.num_bytes]


class HostPoolFull(BudgetError):
    """No free block of the host's pool holds a piece, and no further slab is within its budget."""


class HostPool(SlabAllocator[_MemorySlab, Region]):
    """Allocates regions of host slabs within a budget.

    Args:
        slab_bytes: Size of a slab; a larger request gets a slab as large as itself.
        locker: Page-locks the slabs, which copies need to overlap with compute; None for plain
            memory.
        budget_bytes: Maximum size of all slabs together; None for no limit.
        alignment_bytes: Slabs are multiples of it, too.
    """

    def __init__(
        self,
        slab_bytes: int = HOST_SLAB_BYTES,
        *,
        locker: PageLocker | None = None,
        budget_bytes: int | None = None,
        alignment_bytes: int = ALIGNMENT_BYTES,
    ) -> None:
        assert slab_bytes > 0, "a slab holds at least one byte"
        super().__init__(Region, alignment_bytes)
        self.locker = locker
        self.budget_bytes = budget_bytes
        self._slab_bytes = round_up(slab_bytes, alignment_bytes)
        self.refusal = ""
        """Why the system gave less than was requested; empty if it did not refuse anything."""
        self.grown_bytes = 0
        """Bytes of slabs that were made when they were needed rather than by `reserve`."""

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes that lies outside the largest free block, from 0 to 1."""
        free_bytes = self.free_bytes
        largest_bytes = max((slab.free_list.largest_bytes for slab in self._slabs), default=0)
        return 1.0 - largest_bytes / free_bytes if free_bytes else 0.0

    @property
    def pinned(self) -> bool:
        """Whether slabs are page-locked."""
        return self.locker is not None

    def reserve(self, num_bytes: int, progress: Progress | None = None) -> None:
        """Make slabs until they hold `num_bytes` in all, or the whole budget if that is less.

        In as few pieces of at most `MAX_SLAB_BYTES` as possible; `progress` is called before the
        first and after each. If the system refuses one after others, these are the budget from then
        on.

        Raises:
            OffloadError: The operating system or the driver gives no (pinned) memory at all.
        """
        if self.budget_bytes is not None:
            num_bytes = min(num_bytes, self.budget_bytes)
        sizes: list[int] = []
        held_bytes = self.reserved_bytes
        while held_bytes < num_bytes:
            size = self._new_slab_bytes(min(num_bytes - held_bytes, MAX_SLAB_BYTES), held_bytes)
            if size <= 0:
                break  # the rest of the budget is smaller than any slab
            sizes.append(size)
            held_bytes += size
        if not sizes:
            return
        if progress is not None:
            progress(self.reserved_bytes, held_bytes)
        try:
            for memory in host_memory(sizes, self.locker):
                self._add_memory(memory)
                if progress is not None:
                    progress(self.reserved_bytes, held_bytes)
        except OffloadError as error:
            self._take_refusal(error)

    def try_allocate(self, num_bytes: int) -> Region | None:
        """Allocate `num_bytes` (at least 1) from the present slabs; None if no free block fits."""
        return self._find(num_bytes)

    def release(self, region: Region) -> None:
        """Free a region; its copies must be over, or ordered before any later use."""
        assert not region.released, "a host region was released twice"
        assert region.slab in self._slabs, "a host region was released to a pool it is not from"
        region.released = True
        self.free(region)

    def close(self) -> None:
        """Free the slabs if no region is allocated; later requests make new ones."""
        if not self.used_bytes:
            self._slabs.clear()
            self.reserved_bytes = 0

    def _grow(self, size: int) -> None:
        slab_bytes = self._new_slab_bytes(size, self.reserved_bytes)
        if slab_bytes < size:
            raise self._full(size)
        try:
            for memory in host_memory([slab_bytes], self.locker):
                self._add_memory(memory)
        except OffloadError as error:
            self._take_refusal(error)
            raise self._full(size) from None
        self.grown_bytes += slab_bytes

    def _take_refusal(self, error: OffloadError) -> None:
        """Make what there is the budget, as the system gives no more; raise `error` if none is."""
        if not self._slabs:
            raise error
        self.budget_bytes, self.refusal = self.reserved_bytes, f"; {error}"

    def _full(self, size: int) -> HostPoolFull:
        return HostPoolFull(
            f"host tier: offloading needs {size} bytes more in one piece, while "
            f"{self.reserved_bytes} of {self.budget_bytes} bytes are reserved and "
            f"{self.reserved_bytes - self.used_bytes} of them free in smaller pieces; "
            "raise host_memory, set offload_dir to let the rest go to disk, use shorter "
            f"sequences, or set offload to 'none'{self.refusal}"
        )

    def _new_slab_bytes(self, size: int, held_bytes: int) -> int:
        """Size of a new slab for `size` bytes; less only if the budget leaves less."""
        slab_bytes = max(round_up(size, self.alignment_bytes), self._slab_bytes)
        if self.budget_bytes is not None:
            left_bytes = self.budget_bytes - held_bytes
            slab_bytes = min(slab_bytes, left_bytes - left_bytes % self.alignment_bytes)
        return slab_bytes

    def _add_memory(self, memory: Tensor) -> None:
        self._add_slab(_MemorySlab(FreeList(memory.numel()), memory), memory.numel())
