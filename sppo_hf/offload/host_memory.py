"""Host memory from the operating system: plain, or page-locked by several threads.

[Note: page-locked memory]
Copies overlap with compute only from and into page-locked memory, and training with offload wants
tens of GiB of it before its first step. One call of cudaHostAlloc makes, clears and maps all pages
in one thread. Here threads of ours write to every page of a piece first, which is most of the work,
and then one call has the driver lock what is there, while the pages of the next piece are made.
(RAPIDS cuDF, pull request 23457, an instance with 16 processors: 16 GiB in 7.9 s by cudaHostAlloc,
in 1.5 s so with four threads. Nothing of ours was measured; `recipes/benchmarks/pinning.py` does.)

- A piece is given out when all of it is locked. A refusal is raised in its turn, after the pieces
  before it; what was made ahead is given back.
- It has as many bytes as it was asked for, where PyTorch's pinned memory has a power of two, and
  goes back to the system, unlocked before, when the last tensor in it is gone.
- Its pages are shared with processes that are forked. Private pages that are locked would be copied
  for each of them at once (Linux since 5.12); without them, reading a weight that rests here would
  end a worker of a DataLoader.
- The driver is called in a thread that then ends: CUDA's runtime remembers a refusal for the thread
  that met it, and that thread's next kernel would raise it again.
- It is memory of this process, so a control group's limit and the resident size count it. Where
  less is free, it is refused here: touching it would have this process killed.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sppo_hf.errors import OffloadError
from sppo_hf.planning.machine import free_host_memory_bytes
from sppo_hf.rules import format_bytes

PAGE_BYTES = 4096
"""Memory that is handed out starts at a multiple of it, as transfers past the page cache want."""
MOST_THREADS = 8
"""Threads that write to pages; more made nothing faster where that was measured (see the note)."""
_PART_BYTES = 2**28
"""What a thread writes to at a time."""


class PageLocker(Protocol):
    """Tells a device's driver that pages stay where they are; called from any thread."""

    def lock_pages(self, address: int, num_bytes: int) -> None:
        """Lock these bytes, from the start of a page on.

        Raises:
            RuntimeError: the driver refuses.
        """
        ...

    def unlock_pages(self, address: int) -> None:
        """Wait for the device, and unlock what was locked from this address on."""
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
        with _adding:
            _locked.add(self)

    def __del__(self) -> None:
        # The driver forgets a process that ends, and knows nothing of its children.
        if self._locker is None or self._process != os.getpid() or sys.is_finalizing():
            return
        self._locker.unlock_pages(self.array().ctypes.data)


_locked: weakref.WeakSet[_Pages] = weakref.WeakSet()
_adding = threading.Lock()
"""Held while pieces are added, in a thread, or counted, in another; one may go at any time."""


def locked_bytes() -> int:
    """Page-locked memory that this process holds, but PyTorch's own."""
    with _adding:
        return sum(map(len, _locked))


def host_memory(
    sizes: Sequence[int], locker: PageLocker | None = None, *, threads: int | None = None
) -> Iterator[Tensor]:
    """Yields pieces of host memory, uint8 [size], each from the start of a page on.

    Args:
        sizes: bytes of each, at least 1.
        locker: page-locks them; None for plain memory.
        threads: that write to pages to be locked; None for as many as help.

    Raises:
        OffloadError: the operating system or the driver gives no more; what was yielded stays.
    """
    if locker is None:
        return map(_plain, sizes)
    return _locked_memory(sizes, locker, threads or _num_threads())


def _plain(num_bytes: int) -> Tensor:
    try:
        memory = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8)
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
                    pages = _touched(size, touching)
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


def _touched(num_bytes: int, threads: ThreadPoolExecutor) -> _Pages:
    """Memory of which every page is there."""
    free_bytes = free_host_memory_bytes()
    if free_bytes < num_bytes:
        raise _refused(num_bytes, f"{format_bytes(free_bytes)} of host memory are free")
    try:
        pages = _Pages(-1, num_bytes)
    except OSError as error:
        raise _refused(num_bytes, str(error)) from error
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
        raise _refused(len(pages), str(error)) from error
    return torch.frombuffer(pages, dtype=torch.uint8)


def _refused(num_bytes: int, reason: str) -> OffloadError:
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
    """As many as there are processors for them; on those of the device's NUMA node, once bound."""
    allowed = getattr(os, "sched_getaffinity", None)
    processors = os.cpu_count() or 1 if allowed is None else len(allowed(0))
    return min(MOST_THREADS, processors)
