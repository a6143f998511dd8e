"""One slab file of the disk tier: reserved at once, written and read past the page cache.

What is read back a step later has no use for the page cache, and would push out what has; so files
are opened with O_DIRECT where the filesystem has it. Then addresses, offsets and lengths must be
multiples of `BLOCK_BYTES`; memory that is not passes through a small aligned buffer of the thread.
Elsewhere pages are given back to the system after use.

A file is removed from its folder as soon as it is open, before any space is taken for it, unless it
has to keep its name (`disk_folder` knows). The system then keeps its bytes for as long as it is
open, and frees them when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
"""A run of memory as numpy sees it, uint8 [n]."""

BLOCK_BYTES = 4096
"""What O_DIRECT may ask addresses, offsets and lengths to be multiples of, on any usual disk."""
PIECE_BYTES = 16 * 2**20
"""The most that one system call moves; so that progress shows and closing need not wait long."""
BOUNCE_BYTES = 4 * 2**20
"""Size of a thread's aligned buffer for memory that is not aligned."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system answers where there is no space, or not for this user or process."""

_WEIGHTS = np.random.default_rng(0).integers(0, 2**63, BLOCK_BYTES // 8, np.uint64) * 2 + 1
"""Odd factors of a block's words in its checksum, uint64 [512]; the same ones in every process."""

_Call = Callable[[int, list[memoryview], int], int]
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_local = threading.local()


class SlabFile:
    """A file of fixed size whose space on the disk is taken when it is made.

    `write` and `read` may run in several threads at once, on bytes that do not overlap.

    Args:
        path: a file that does not exist yet.
        num_bytes: its size, a multiple of `BLOCK_BYTES`.
        keep_name: whether it stays in its folder; else nobody sees it there any more.

    Raises:
        OSError: the disk has no room (ENOSPC and the like) or gives no file. Nothing stays then.
    """

    def __init__(self, path: Path, num_bytes: int, *, keep_name: bool) -> None:
        assert num_bytes % BLOCK_BYTES == 0, "a slab file is a whole number of blocks"
        self.path = path
        self.num_bytes = num_bytes
        self.keeps_name = keep_name
        self._direct: int | None = None
        self._buffered = open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            self._direct = _open_direct(path, self._buffered)
            if not keep_name:
                path.unlink()
            # Last, because it can take long: a process that is killed in it leaves nothing.
            _reserve(self._buffered, num_bytes)
        except BaseException:
            self.close()
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            raise
        self._is_direct = self._direct is not None

    def __str__(self) -> str:
        return str(self.path) if self.keeps_name else f"{self.path} (removed once it was open)"

    def write(self, source: Bytes, offset: int, on_moved: Callable[[int], None]) -> None:
        """Write `source` at `offset`, a multiple of `BLOCK_BYTES`, in whole blocks.

        What the rest of the last block holds afterwards is left open.

        Args:
            source: uint8 [n], contiguous.
            offset: first byte in the file.
            on_moved: told the bytes that each system call moved.

        Raises:
            OSError: the disk refused.
        """
        for start, end, bounced in self._pieces(source):
            piece = source[start:end]
            if bounced:
                piece = _bounce(end - start)
                piece[: end - start] = source[start:end]
            self._move(os.pwritev, piece, offset + start, on_moved)

    def read(self, target: Bytes, offset: int, on_moved: Callable[[int], None]) -> None:
        """Fill `target`, uint8 [n], with the bytes that were written at `offset`; as `write`."""
        for start, end, bounced in self._pieces(target):
            piece = _bounce(end - start) if bounced else target[start:end]
            self._move(os.preadv, piece, offset + start, on_moved)
            if bounced:
                target[start:end] = piece[: end - start]

    def close(self) -> None:
        """Close the file; without a name its bytes are free then. No transfer may be under way."""
        close_descriptor(self._buffered)
        if self._direct is not None:
            close_descriptor(self._direct)

    def _pieces(self, memory: Bytes) -> Iterator[tuple[int, int, bool]]:
        """Cut `memory` into (start, end, whether it must pass through the aligned buffer)."""
        straight_bytes = memory.size
        if self._is_direct:
            aligned = memory.ctypes.data % BLOCK_BYTES == 0
            straight_bytes = memory.size // BLOCK_BYTES * BLOCK_BYTES if aligned else 0
        for start in range(0, straight_bytes, PIECE_BYTES):
            yield start, min(start + PIECE_BYTES, straight_bytes), False
        for start in range(straight_bytes, memory.size, BOUNCE_BYTES):
            yield start, min(start + BOUNCE_BYTES, memory.size), True

    def _move(
        self,
        call: _Call,
        piece: Bytes,
        offset: int,
        on_moved: Callable[[int], None],
    ) -> None:
        """Repeat a system call until all of `piece` has moved."""
        done_bytes = 0
        while done_bytes < piece.size:
            # What a partial transfer left unaligned goes through the page cache.
            direct = self._is_direct and done_bytes % BLOCK_BYTES == 0
            moved = self._call(call, piece[done_bytes:], offset + done_bytes, direct=direct)
            if moved == 0:
                raise OSError(errno.EIO, "the file ended early")
            done_bytes += moved
            on_moved(moved)

    def _call(
        self,
        call: _Call,
        memory: Bytes,
        offset: int,
        *,
        direct: bool,
    ) -> int:
        """One system call; return the bytes that it moved."""
        if direct:
            assert self._direct is not None, "is_direct says that there is such a descriptor"
            try:
                return call(self._direct, [memory.data], offset)
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
                logger.debug("%s: O_DIRECT was accepted but does not work (%s)", self.path, error)
                self._is_direct = False
        moved = call(self._buffered, [memory.data], offset)
        if hasattr(os, "posix_fadvise"):
            # After a write this only starts the write-back; the pages go with the read.
            os.posix_fadvise(self._buffered, offset, moved, os.POSIX_FADV_DONTNEED)
        return moved


def open_descriptor(path: Path, flags: int) -> int:
    """Open a file for this process alone: neither a forked nor a started child keeps it open.

    A child that did would keep the disk space of removed files, and locks, past our end.
    """
    descriptor = os.open(path, flags, 0o600)
    _descriptors.add(descriptor)
    return descriptor


def close_descriptor(descriptor: int) -> None:
    """Close what `open_descriptor` opened."""
    _descriptors.discard(descriptor)
    os.close(descriptor)


def free_bytes(descriptor: int) -> int:
    """Bytes that this process may still take on the filesystem of an open file."""
    status = os.fstatvfs(descriptor)
    return status.f_bavail * status.f_frsize


_descriptors: set[int] = set()


def _close_all_in_child() -> None:
    while _descriptors:
        os.close(_descriptors.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all_in_child)


def checksum(memory: Bytes) -> int:
    """A number of 32 bits that tells uint8 `memory` [n] from what damage makes of it.

    The CRC-32 of one 64-bit sum for each block of 4096 bytes: its words times odd factors, modulo
    2**64. Factors differ, and a CRC knows order, so neither words nor blocks change places unseen.
    Zeroed, stale, foreign or flipped bytes go unseen in one case of 2**32; more often only if
    nothing but the highest bits of several words of one block are flipped, which can cancel. It is
    no defence against somebody who means to deceive.

    Four times as fast as the CRC-32 of all bytes, in one call that leaves Python's lock free.
    """
    whole_bytes = memory.size - memory.size % BLOCK_BYTES
    sums = memory[:whole_bytes].view(np.uint64).reshape(-1, _WEIGHTS.size).dot(_WEIGHTS)
    return zlib.crc32(memory[whole_bytes:].data, zlib.crc32(sums.data))


def aligned_bytes(num_bytes: int) -> Bytes:
    """Memory whose address is a multiple of `BLOCK_BYTES`: uint8 [num_bytes], not initialized."""
    memory: Bytes = np.empty(num_bytes + BLOCK_BYTES, np.uint8)
    skip = -memory.ctypes.data % BLOCK_BYTES
    return memory[skip : skip + num_bytes]


def round_up(num_bytes: int) -> int:
    """The bytes of the whole blocks that hold `num_bytes`."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _bounce(num_bytes: int) -> Bytes:
    """The whole blocks of this thread's aligned buffer that hold `num_bytes`."""
    if not hasattr(_local, "buffer"):
        _local.buffer = aligned_bytes(BOUNCE_BYTES)
    return _local.buffer[: round_up(num_bytes)]


def _open_direct(path: Path, opened: int) -> int | None:
    """Open the file past the page cache; None where the system or the filesystem cannot.

    Args:
        path: its name.
        opened: a descriptor of it, since in a folder of many users a name can change its file.
    """
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        direct = open_descriptor(path, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW)
        if os.path.samestat(os.fstat(direct), os.fstat(opened)):
            return direct
        close_descriptor(direct)
        raise OSError(errno.ESTALE, "somebody put another file in its place")
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        logger.debug("%s: no O_DIRECT here (%s), so through the page cache", path, error)
        return None


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Take the file's space now, so that a full disk shows here and never in a later write."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
        else:
            return
    if free_bytes(descriptor) < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    # Space is then only found when it is written; a disk filled by others meanwhile is an error of
    # that write.
    os.ftruncate(descriptor, num_bytes)
