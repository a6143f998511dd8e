"""One slab file of the disk tier: reserved at once, written and read past the page cache.

What is read back a step later has no use for the page cache, and would push out what has; so files
are opened with O_DIRECT where the filesystem has it. Then addresses, offsets and lengths must be
multiples of `BLOCK_BYTES`; memory that is not passes through a small aligned buffer of the thread.
Elsewhere pages are given back to the system after use. Knows nothing of who owns which bytes.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sppo_hf.offload.disk_folder import close_descriptor, free_bytes, open_descriptor

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
"""A run of memory as numpy sees it, uint8 [n]."""

BLOCK_BYTES = 4096
"""What O_DIRECT may ask addresses, offsets and lengths to be multiples of, on any usual disk."""
PIECE_BYTES = 16 * 2**20
"""The most that one system call moves; so that progress shows and closing need not wait long."""
BOUNCE_BYTES = 4 * 2**20
"""Size of a thread's aligned buffer for memory that is not aligned."""

_Call = Callable[[int, list[memoryview], int], int]
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_local = threading.local()


class SlabFile:
    """A file of fixed size whose space on the disk is taken when it is made.

    `write` and `read` may run in several threads at once, on bytes that do not overlap.

    Args:
        path: a file that does not exist yet.
        num_bytes: its size, a multiple of `BLOCK_BYTES`.

    Raises:
        OSError: the disk has no room (ENOSPC and the like) or gives no file. Nothing stays then.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        assert num_bytes % BLOCK_BYTES == 0, "a slab file is a whole number of blocks"
        self.path = path
        self.num_bytes = num_bytes
        self._direct: int | None = None
        self._buffered = open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            _reserve(self._buffered, num_bytes)
            self._direct = _open_direct(path)
        except BaseException:
            close_descriptor(self._buffered)
            path.unlink()
            raise
        self._is_direct = self._direct is not None

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
        """Close the file, which stays on the disk. No transfer may be under way."""
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


def _open_direct(path: Path) -> int | None:
    """Open the file past the page cache; None where the system or the filesystem cannot."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return open_descriptor(path, os.O_RDWR | os.O_DIRECT)
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
