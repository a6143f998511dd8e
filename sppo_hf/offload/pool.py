"""Host memory for offloaded bytes: few large slabs, sub-allocated first-fit with coalescing.

Who releases a region vouches that no copy still touches it. Slabs are kept for the life of the
pool, because pinning costs milliseconds and a step must not pay it twice; better still they are
made before the first step, by `reserve`. Not thread-safe by itself; the engine calls it under its
lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.free_list import FreeList, Slab, Slabs
from sppo_hf.planning.memory import HOST_SLAB_BYTES

ALIGNMENT_BYTES = 512
PAGE_BYTES = 4096
"""Slabs start at multiples of it, as transfers past the page cache want."""
MOST_SLAB_BYTES = 8 * 2**30
"""A slab that `reserve` makes is no larger: the driver locks pages at a few GB a second and may
refuse tens of GiB in one piece which it gives in several."""


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
        pin: page-lock the slabs, which copies that overlap with compute need.
        budget_bytes: the most that all slabs together may take; None for no limit.
        alignment_bytes: regions start at multiples of it within their slab, and slabs hold whole
            numbers of it.
    """

    def __init__(
        self,
        slab_bytes: int = HOST_SLAB_BYTES,
        *,
        pin: bool = False,
        budget_bytes: int | None = None,
        alignment_bytes: int = ALIGNMENT_BYTES,
    ) -> None:
        assert slab_bytes > 0, "a slab holds at least one byte"
        super().__init__()
        self.pinned = pin
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

    def reserve(self, num_bytes: int) -> None:
        """Make slabs until they hold `num_bytes` in all, or the whole budget if that is less.

        In as few pieces of at most `MOST_SLAB_BYTES` as possible, powers of two where pages are
        locked. If the system refuses one after others, these are the budget from then on.

        Raises:
            OffloadError: the operating system or the driver gives no (pinned) memory at all.
        """
        if self.budget_bytes is not None:
            num_bytes = min(num_bytes, self.budget_bytes)
        while self.reserved_bytes < num_bytes:
            missing_bytes = min(num_bytes - self.reserved_bytes, MOST_SLAB_BYTES)
            if self.pinned:
                missing_bytes = 1 << (missing_bytes.bit_length() - 1)
            slab_bytes = self._slab_size(missing_bytes)
            if slab_bytes <= 0:
                return  # the rest of the budget is smaller than any slab
            try:
                self._add_slab(slab_bytes)
            except OffloadError as error:
                if not self._slabs:
                    raise
                self.budget_bytes, self.refusal = self.reserved_bytes, f"; {error}"
                return

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

    def _grow(self, size: int) -> None:
        slab_bytes = self._slab_size(size)
        if slab_bytes < size:
            raise BudgetError(
                f"host tier: offloading needs {size} bytes more in one piece, while "
                f"{self.reserved_bytes} of {self.budget_bytes} bytes are reserved and "
                f"{self.reserved_bytes - self.used_bytes} of them free in smaller pieces; "
                "raise host_memory, set offload_dir to let the rest go to disk, use shorter "
                f"sequences, or set offload to 'none'{self.refusal}"
            )
        self._add_slab(slab_bytes)
        self.grown_bytes += slab_bytes

    def _slab_size(self, size: int) -> int:
        """Size of a slab made for `size` bytes: less only where the budget leaves less."""
        slab_bytes = max(_round_up(size, self._alignment_bytes), self._slab_bytes)
        if self.pinned:
            # PyTorch's pinned allocator rounds up to powers of two; ask for all that it takes.
            slab_bytes = 1 << (slab_bytes - 1).bit_length()
        if self.budget_bytes is not None:
            slab_bytes = min(slab_bytes, self._largest_within(self.budget_bytes))
        return slab_bytes

    def _largest_within(self, budget_bytes: int) -> int:
        left = budget_bytes - self.reserved_bytes
        left -= left % self._alignment_bytes
        if self.pinned and left > 0:
            left = 1 << (left.bit_length() - 1)
        return left

    def _add_slab(self, slab_bytes: int) -> None:
        self._add(_Slab(FreeList(slab_bytes), _host_bytes(slab_bytes, self.pinned)), slab_bytes)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _host_bytes(num_bytes: int, pin: bool) -> Tensor:
    """Host memory, uint8 [num_bytes], from the start of a page on."""
    # Locked memory starts at a page anyway, and its allocator would double what one page exceeds.
    spare_bytes = 0 if pin else PAGE_BYTES
    try:
        memory = torch.empty(num_bytes + spare_bytes, dtype=torch.uint8, pin_memory=pin)
    except RuntimeError as error:
        if not pin:
            raise OffloadError(
                f"the host gave no memory for a slab of {num_bytes} bytes ({error}); "
                "lower host_memory or use shorter sequences"
            ) from error
        raise OffloadError(
            f"pinning a host slab of {num_bytes} bytes failed ({error}); pinned memory is a budget "
            f"of its own, here {_memlock_limit()}. Lower host_memory, raise the limit "
            "(ulimit -l), or set use_pin_memory to false (slower copies)"
        ) from error
    skip_bytes = -memory.data_ptr() % PAGE_BYTES if spare_bytes else 0
    return memory[skip_bytes : skip_bytes + num_bytes]


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
