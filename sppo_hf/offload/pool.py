"""Host memory for offloaded bytes: few large slabs, sub-allocated first-fit with coalescing.

Who releases a region vouches that no copy still touches it. Slabs are kept for the life of the
pool, because pinning costs milliseconds and a step must not pay it twice; better still they are
made before the first step, by `reserve`. Not thread-safe by itself; the engine calls it under its
lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.host_memory import FreeList, PageLocker, Slab, Slabs, host_memory
from sppo_hf.planning.memory import HOST_SLAB_BYTES

ALIGNMENT_BYTES = 512
MOST_SLAB_BYTES = 8 * 2**30
"""A slab that `reserve` makes is no larger: the driver may refuse tens of GiB in one piece which it
gives in several."""

Progress = Callable[[int, int], None]
"""Is told how many bytes of how many are there."""


@dataclass(slots=True, eq=False)
class _Slab(Slab):
    memory: Tensor


@dataclass(slots=True, eq=False)
class Region:
    """A run of host bytes lent by a `HostPool`."""

    slab: _Slab = field(repr=False)
    offset: int
    """First byte within the slab."""
    num_bytes: int
    """Bytes asked for."""
    reserved_bytes: int
    """Bytes taken from the slab: `num_bytes` rounded up to the alignment."""
    released: bool = False

    @property
    def memory(self) -> Tensor:
        """The bytes as a uint8 tensor [num_bytes], a view of the slab."""
        assert not self.released, "a host region was used after its release"
        return self.slab.memory[self.offset : self.offset + self.num_bytes]


class HostPool(Slabs[_Slab]):
    """Lends regions of host slabs within a budget.

    Args:
        slab_bytes: size of a slab; one that a larger request needs is made as large as that.
        locker: page-locks the slabs, which copies that overlap with compute need; None for none.
        budget_bytes: the most that all slabs together may take; None for no limit.
        alignment_bytes: regions start at multiples of it within their slab, and slabs hold whole
            numbers of it.
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
        super().__init__()
        self._locker = locker
        self.budget_bytes = budget_bytes
        self._alignment_bytes = alignment_bytes
        self._slab_bytes = _round_up(slab_bytes, alignment_bytes)
        self.refusal = ""
        """Why the system gave less than was asked for; empty where it did not refuse anything."""
        self.grown_bytes = 0
        """Bytes of slabs that were made when they were needed rather than by `reserve`."""

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes that lies outside the largest hole, from 0 to 1."""
        free_bytes = self.free_bytes
        largest_bytes = max((slab.free_list.largest_bytes for slab in self._slabs), default=0)
        return 1.0 - largest_bytes / free_bytes if free_bytes else 0.0

    @property
    def pinned(self) -> bool:
        """Whether slabs are page-locked."""
        return self._locker is not None

    def reserve(self, num_bytes: int, progress: Progress | None = None) -> None:
        """Make slabs until they hold `num_bytes` in all, or the whole budget if that is less.

        In as few pieces of at most `MOST_SLAB_BYTES` as possible. If the system refuses one after
        others, these are the budget from then on.

        Args:
            num_bytes: what all slabs are to hold.
            progress: is told before the first slab and after each.

        Raises:
            OffloadError: the operating system or the driver gives no (pinned) memory at all.
        """
        if self.budget_bytes is not None:
            num_bytes = min(num_bytes, self.budget_bytes)
        sizes: list[int] = []
        held_bytes = self.reserved_bytes
        while held_bytes < num_bytes:
            size = self._slab_size(min(num_bytes - held_bytes, MOST_SLAB_BYTES), held_bytes)
            if size <= 0:
                break  # the rest of the budget is smaller than any slab
            sizes.append(size)
            held_bytes += size
        if not sizes:
            return
        tell = progress or (lambda done_bytes, wanted_bytes: None)
        tell(self.reserved_bytes, held_bytes)
        try:
            for memory in host_memory(sizes, self._locker):
                self._add_slab(memory)
                tell(self.reserved_bytes, held_bytes)
        except OffloadError as error:
            if not self._slabs:
                raise
            self.budget_bytes, self.refusal = self.reserved_bytes, f"; {error}"

    def allocate(self, num_bytes: int) -> Region:
        """Lend `num_bytes` (at least 1), adding a slab where no hole is large enough.

        Raises:
            BudgetError: a further slab would exceed the budget.
            OffloadError: the operating system or the driver gives no (pinned) memory.
        """
        assert num_bytes > 0, "a region holds at least one byte"
        size = _round_up(num_bytes, self._alignment_bytes)
        return Region(*self._lend(size), num_bytes, size)

    def try_allocate(self, num_bytes: int) -> Region | None:
        """Lend `num_bytes` (at least 1) from the slabs there are; None where no hole fits."""
        assert num_bytes > 0, "a region holds at least one byte"
        size = _round_up(num_bytes, self._alignment_bytes)
        taken = self._take(size)
        return None if taken is None else Region(*taken, num_bytes, size)

    def release(self, region: Region) -> None:
        """Take a region back; its copies must be over or ordered before any later use."""
        assert not region.released, "a host region was released twice"
        assert region.slab in self._slabs, "a host region was released to a pool it is not from"
        region.released = True
        self._give(region.slab, region.offset, region.reserved_bytes)

    def close(self) -> None:
        """Give the slabs back, if no region is lent; later requests make new ones."""
        if not self.used_bytes:
            self._slabs.clear()
            self.reserved_bytes = 0

    def _grow(self, size: int) -> None:
        slab_bytes = self._slab_size(size, self.reserved_bytes)
        if slab_bytes < size:
            raise BudgetError(
                f"host tier: offloading needs {size} bytes more in one piece, while "
                f"{self.reserved_bytes} of {self.budget_bytes} bytes are reserved and "
                f"{self.reserved_bytes - self.used_bytes} of them free in smaller pieces; "
                "raise host_memory, set offload_dir to let the rest go to disk, use shorter "
                f"sequences, or set offload to 'none'{self.refusal}"
            )
        for memory in host_memory([slab_bytes], self._locker):
            self._add_slab(memory)
        self.grown_bytes += slab_bytes

    def _slab_size(self, size: int, held_bytes: int) -> int:
        """Size of a slab for `size` bytes beside others: less only where the budget leaves less."""
        slab_bytes = max(_round_up(size, self._alignment_bytes), self._slab_bytes)
        if self.budget_bytes is not None:
            left = self.budget_bytes - held_bytes
            slab_bytes = min(slab_bytes, left - left % self._alignment_bytes)
        return slab_bytes

    def _add_slab(self, memory: Tensor) -> None:
        self._add(_Slab(FreeList(memory.numel()), memory), memory.numel())


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
