"""Sub-allocation: `SlabAllocator` hands out runs of bytes of a growing list of slabs.

First-fit with coalescing. A slab is a piece of host memory (`host_memory`) or a file (`disk`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not less than `value`."""
    return -(-value // multiple) * multiple


class FreeList:
    """Free blocks of one slab: (offset, size) in bytes, sorted by offset, never adjacent.

    Args:
        num_bytes: Size of the slab; all of it is free at first.
    """

    __slots__ = ("_free",)

    def __init__(self, num_bytes: int) -> None:
        self._free: list[tuple[int, int]] = [(0, num_bytes)]

    @property
    def free_bytes(self) -> int:
        """Bytes of all free blocks together."""
        return sum(size for _, size in self._free)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest free block; 0 if there is none."""
        return max((size for _, size in self._free), default=0)

    def allocate(self, size: int) -> int | None:
        """Take `size` bytes from the first block that has them; return the offset, or None."""
        for index, (offset, block) in enumerate(self._free):
            if block > size:
                self._free[index] = (offset + size, block - size)
                return offset
            if block == size:
                del self._free[index]
                return offset
        return None

    def free(self, offset: int, size: int) -> None:
        """Free [offset, offset + size) and join it with the free blocks that touch it."""
        index = bisect_left(self._free, (offset, 0))
        end = offset + size
        if index < len(self._free):
            assert end <= self._free[index][0], "a released region overlaps free memory"
            if end == self._free[index][0]:
                end += self._free.pop(index)[1]
        if index > 0:
            before, before_size = self._free[index - 1]
            assert before + before_size <= offset, "a released region overlaps free memory"
            if before + before_size == offset:
                offset = before
                del self._free[index - 1]
                index -= 1
        self._free.insert(index, (offset, end - offset))


@dataclass(slots=True, eq=False)
class Slab:
    """One piece of memory, or one file."""

    free_list: FreeList


SlabT = TypeVar("SlabT", bound=Slab)


@dataclass(slots=True, eq=False)
class Run(Generic[SlabT]):
    """Bytes allocated from a slab."""

    slab: SlabT = field(repr=False)
    offset: int
    """First byte within the slab."""
    num_bytes: int
    """Bytes requested."""
    reserved_bytes: int
    """Bytes taken from the slab: `num_bytes` rounded up to the alignment."""


RunT = TypeVar("RunT", bound=Run[Any])


class SlabAllocator(Generic[SlabT, RunT]):
    """Allocates runs of bytes, first-fit, out of a growing list of slabs.

    Each is a multiple of `alignment_bytes` and starts at one; `make_run` makes it out of slab,
    offset, bytes requested and bytes taken.
    """

    def __init__(self, make_run: Callable[[SlabT, int, int, int], RunT], alignment: int) -> None:
        self.alignment_bytes = alignment
        self.used_bytes = 0
        """Bytes allocated now."""
        self.peak_bytes = 0
        """Maximum of `used_bytes` so far."""
        self.reserved_bytes = 0
        """Bytes of all slabs."""
        self._slabs: list[SlabT] = []
        self._make_run = make_run

    @property
    def free_bytes(self) -> int:
        """Bytes of all free blocks together."""
        return sum(slab.free_list.free_bytes for slab in self._slabs)

    def allocate(self, num_bytes: int) -> RunT:
        """Allocate `num_bytes` (at least 1), adding a slab if no free block is large enough.

        Raises:
            BudgetError: A further slab would exceed the budget, or the disk is full.
            OffloadError: The system or the driver gives no (pinned) memory, or no file.
        """
        allocated = self._find(num_bytes)
        if allocated is None:
            self._grow(round_up(num_bytes, self.alignment_bytes))
            allocated = self._find(num_bytes)
            assert allocated is not None, "a new slab holds the request that it was made for"
        return allocated

    def free(self, run: RunT) -> None:
        """Free a run; nothing may touch it any more."""
        run.slab.free_list.free(run.offset, run.reserved_bytes)
        self.used_bytes -= run.reserved_bytes

    def _grow(self, size: int) -> None:
        """Add a slab of at least `size` bytes."""
        raise NotImplementedError

    def _find(self, num_bytes: int) -> RunT | None:
        """Allocate from the first slab with such a free block; None if there is none."""
        assert num_bytes > 0, "what is allocated holds at least one byte"
        size = round_up(num_bytes, self.alignment_bytes)
        for slab in self._slabs:
            offset = slab.free_list.allocate(size)
            if offset is not None:
                self.used_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.used_bytes)
                return self._make_run(slab, offset, num_bytes, size)
        return None

    def _add_slab(self, slab: SlabT, num_bytes: int) -> None:
        self._slabs.append(slab)
        self.reserved_bytes += num_bytes
