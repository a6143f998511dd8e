"""The free bytes of runs of memory or file: first-fit, with coalescing; and slabs of them.

Pure bookkeeping: who takes multiples of an alignment gets multiples of it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Generic, TypeVar


class FreeList:
    """Free (offset, size) pairs in bytes, sorted by offset, never adjacent.

    Args:
        num_bytes: the length of the run; all of it is free at first.
    """

    __slots__ = ("_free",)

    def __init__(self, num_bytes: int) -> None:
        self._free: list[tuple[int, int]] = [(0, num_bytes)]

    @property
    def free_bytes(self) -> int:
        """Bytes in all holes together."""
        return sum(size for _, size in self._free)

    @property
    def largest_bytes(self) -> int:
        """Bytes in the largest hole; 0 if there is none."""
        return max((size for _, size in self._free), default=0)

    def take(self, size: int) -> int | None:
        """Cut `size` bytes from the first hole that has them; return the offset, or None."""
        for index, (offset, hole) in enumerate(self._free):
            if hole > size:
                self._free[index] = (offset + size, hole - size)
                return offset
            if hole == size:
                del self._free[index]
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        """Make [offset, offset + size) a hole and join it with the holes that touch it."""
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
    """What is free of it."""


SlabT = TypeVar("SlabT", bound=Slab)


class Slabs(Generic[SlabT]):
    """Runs of bytes lent first-fit out of a growing list of slabs, and counted."""

    def __init__(self) -> None:
        self.used_bytes = 0
        """Lent now."""
        self.peak_bytes = 0
        """The most that was lent at once."""
        self.reserved_bytes = 0
        """Of all slabs."""
        self._slabs: list[SlabT] = []

    @property
    def free_bytes(self) -> int:
        """Bytes of all holes together."""
        return sum(slab.free_list.free_bytes for slab in self._slabs)

    def _grow(self, size: int) -> None:
        """Add a slab of at least `size` bytes."""
        raise NotImplementedError

    def _lend(self, size: int) -> tuple[SlabT, int]:
        """Lend `size` bytes, growing where no hole is large enough: the slab and the offset."""
        taken = self._take(size)
        if taken is None:
            self._grow(size)
            taken = self._take(size)
            assert taken is not None, "a new slab holds the request that it was made for"
        return taken

    def _take(self, size: int) -> tuple[SlabT, int] | None:
        """Lend `size` bytes of the first slab that has such a hole: the slab and the offset."""
        for slab in self._slabs:
            offset = slab.free_list.take(size)
            if offset is not None:
                self.used_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.used_bytes)
                return slab, offset
        return None

    def _give(self, slab: SlabT, offset: int, size: int) -> None:
        """Take a run back."""
        slab.free_list.give(offset, size)
        self.used_bytes -= size

    def _add(self, slab: SlabT, num_bytes: int) -> None:
        """Grow by a slab."""
        self._slabs.append(slab)
        self.reserved_bytes += num_bytes
