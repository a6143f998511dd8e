"""Speed of the disk under a folder, past the page cache, which would answer for it otherwise.

Writes one large file in aligned blocks and reads it back, with O_DIRECT where the file system has
it; else it writes through the cache, flushes, and drops the file's pages before reading. Knows
nothing of the disk tier that will use the folder, nor of torch.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sppo_hf.errors import ConfigError
from sppo_hf.planning.machine import free_disk_bytes

_BLOCK_BYTES = 8 * 2**20
_LEAST_BLOCKS = 4
# What file systems answer that know no O_DIRECT (tmpfs and some network ones).
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


class DiskSpeed(NamedTuple):
    """Bytes per second."""

    write: float
    read: float
    direct: bool
    """Whether the page cache was bypassed; if not, reads may still have come from it in part."""


def measure_disk(
    folder: str | os.PathLike[str],
    num_bytes: int,
    *,
    most_seconds: float = 15.0,
    clock: Callable[[], float] = time.perf_counter,
) -> DiskSpeed:
    """Time writing and reading a file of `num_bytes` bytes that is removed afterwards.

    Args:
        folder: made where it does not exist.
        num_bytes: of the file; less where less than four times as much is free.
        most_seconds: each direction stops here and is measured by what it did.
        clock: seconds that pass.

    Raises:
        ConfigError: the folder cannot be made or written, or its disk is full; the message names
            it and what the system said.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        blocks = min(num_bytes, free_disk_bytes(path) // 4) // _BLOCK_BYTES
        if blocks < _LEAST_BLOCKS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with tempfile.NamedTemporaryFile(dir=path, prefix=".sppo-calibrate-") as file:
            try:
                return _run(file.name, blocks, most_seconds, clock, direct=True)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
            return _run(file.name, blocks, most_seconds, clock, direct=False)
    # A ValueError where no file can have that name, a RecursionError from pathlib where too many
    # folders would have to be made.
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"offload_dir={os.fspath(folder)!r} cannot be measured: {reason}. Allowed: a "
            f"folder that can be written, with at least {4 * _LEAST_BLOCKS * _BLOCK_BYTES >> 20} "
            "MiB free. Remedy: name another folder, or make room there."
        ) from error


def _run(
    name: str, blocks: int, most_seconds: float, clock: Callable[[], float], *, direct: bool
) -> DiskSpeed:
    """Write and read `blocks` blocks.

    Raises:
        OSError: from the system; EINVAL or EOPNOTSUPP where `direct` is not known there.
    """
    flag = getattr(os, "O_DIRECT", 0) if direct else 0
    # Anonymous memory of mmap is aligned to pages, which O_DIRECT asks for.
    with mmap.mmap(-1, _BLOCK_BYTES) as block:
        # Not zeros: some disks and file systems store those as nothing.
        block.write(os.urandom(_BLOCK_BYTES))
        descriptor = os.open(name, os.O_RDWR | flag)
        try:
            start_seconds = clock()
            written = 0
            while written < blocks and clock() - start_seconds < most_seconds:
                _whole(os.pwrite(descriptor, block, written * _BLOCK_BYTES))
                written += 1
            os.fsync(descriptor)
            write_seconds = clock() - start_seconds
            if not direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            start_seconds = clock()
            read = 0
            while read < written and clock() - start_seconds < most_seconds:
                _whole(os.preadv(descriptor, [block], read * _BLOCK_BYTES))
                read += 1
            read_seconds = clock() - start_seconds
        finally:
            os.close(descriptor)
    return DiskSpeed(
        write=written * _BLOCK_BYTES / write_seconds,
        read=read * _BLOCK_BYTES / read_seconds,
        direct=bool(flag),
    )


def _whole(moved_bytes: int) -> None:
    """Refuse a short transfer: it happens when the disk runs full.

    Raises:
        OSError: fewer bytes than a block were moved.
    """
    if moved_bytes != _BLOCK_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
