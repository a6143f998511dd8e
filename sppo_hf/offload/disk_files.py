"""Files of the disk tier: where they are made, and how bytes are moved past the page cache.

*Reading and writing* (`SlabFile`). What is read back a step later has no use for the page cache,
and would push out what has; so files are opened with O_DIRECT where the file system has it. Then
addresses, offsets and lengths must be multiples of `BLOCK_BYTES`; memory that is not passes through
a small aligned buffer of the thread. Elsewhere pages are given back to the system after use.

*Names* (`StoreFolder`). A file is removed from its folder as soon as it is open, before any space
is taken for it. The system keeps its bytes for as long as it is open and frees them when the
process ends, however it ends, kill -9 included. All local file systems of Linux and macOS do so,
and NFS, whose client renames such files (`.nfs…`) until they are closed. `_why_names_are_needed`
does not go by names of file systems: it fills and reads one removed block for every new store.

Elsewhere (some FUSE and 9p mounts) files keep their names, in a private folder
`<directory>/sppo-<host>-<process>-<random>` with the file `lock`, on which its process keeps an
flock for as long as it lives. So whoever gets that lock knows that the owner has ended, and removes
what it left; every new store looks for such folders. On a file system without flock, what a crash
leaves stays.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from sppo_hf.errors import ConfigError
from sppo_hf.offload.slabs import round_up
from sppo_hf.offload.store import Bytes
from sppo_hf.rules import show

logger = logging.getLogger(__name__)

BLOCK_BYTES = 4096
"""O_DIRECT may require addresses, offsets and lengths to be multiples of this on a usual disk."""
PIECE_BYTES = 16 * 2**20
"""Maximum bytes of one system call, so that progress shows and closing need not wait long."""
BOUNCE_BYTES = 4 * 2**20
"""Size of a thread's aligned buffer for memory that is not aligned."""

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors by which the system says that there is no space, or none for this user or process."""

_Call = Callable[[int, list[memoryview], int], int]
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_local = threading.local()


class SlabFile:
    """A file of fixed size whose space on the disk is taken when it is made.

    `write` and `read` may run in several threads at once, on bytes that do not overlap.

    Args:
        path: A file that does not exist yet.
        num_bytes: Its size, a multiple of `BLOCK_BYTES`.
        keep_name: Whether it stays in its folder, rather than being removed at once.

    Raises:
        OSError: The disk is full (ENOSPC and the like) or gives no file. Nothing is left then.
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

        `source` is uint8 [n], contiguous; the rest of the last block may hold anything afterwards.
        `on_moved` is called with the bytes that each system call moved.

        Raises:
            OSError: The disk refused.
        """
        for start, end, bounced in self._pieces(source):
            piece = source[start:end]
            if bounced:
                piece = _bounce(end - start)
                piece[: end - start] = source[start:end]
            self._move(os.pwritev, piece, offset + start, on_moved)

    def read(self, target: Bytes, offset: int, on_moved: Callable[[int], None]) -> None:
        """Fill `target`, uint8 [n], with the bytes at `offset`; arguments as for `write`."""
        for start, end, bounced in self._pieces(target):
            piece = _bounce(end - start) if bounced else target[start:end]
            self._move(os.preadv, piece, offset + start, on_moved)
            if bounced:
                target[start:end] = piece[: end - start]

    def close(self) -> None:
        """Close the file, without transfers under way; frees its bytes if it has no name."""
        close_descriptor(self._buffered)
        if self._direct is not None:
            close_descriptor(self._direct)

    def _pieces(self, memory: Bytes) -> Iterator[tuple[int, int, bool]]:
        """Cut `memory` into (start, end, whether the piece must pass through the buffer)."""
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

    A child that did would keep the disk space of removed files, and locks, beyond this process.
    """
    descriptor = os.open(path, flags, 0o600)
    _descriptors.add(descriptor)
    return descriptor


def close_descriptor(descriptor: int) -> None:
    """Close a descriptor of `open_descriptor`."""
    _descriptors.discard(descriptor)
    os.close(descriptor)


def free_bytes(descriptor: int) -> int:
    """Bytes that this process may still take on the file system of an open file."""
    status = os.fstatvfs(descriptor)
    return status.f_bavail * status.f_frsize


_descriptors: set[int] = set()


def _close_all_in_child() -> None:
    while _descriptors:
        os.close(_descriptors.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all_in_child)


def aligned_bytes(num_bytes: int) -> Bytes:
    """Memory whose address is a multiple of `BLOCK_BYTES`: uint8 [num_bytes], not initialized."""
    memory: Bytes = np.empty(num_bytes + BLOCK_BYTES, np.uint8)
    skip = -memory.ctypes.data % BLOCK_BYTES
    return memory[skip : skip + num_bytes]


def _bounce(num_bytes: int) -> Bytes:
    """The whole blocks of this thread's aligned buffer that hold `num_bytes`."""
    if not hasattr(_local, "buffer"):
        _local.buffer = aligned_bytes(BOUNCE_BYTES)
    return _local.buffer[: round_up(num_bytes, BLOCK_BYTES)]


def _open_direct(path: Path, opened: int) -> int | None:
    """Open the file past the page cache; None if the system or the file system cannot.

    `opened` is a descriptor of it: in a folder of many users another file may get its name.
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
    # Space is then only taken when it is written; a disk filled by others meanwhile is an error of
    # that write.
    os.ftruncate(descriptor, num_bytes)


try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None


_LOCK = "lock"
_FOLDER = re.compile(r"sppo-(?P<host>[^-]+)-[0-9]+-[0-9a-f]{16}")
_MAX_SHOWN = 400
# Losing two folders to other processes is chance; losing eight means a broken file system.
_MAX_TRIES = 8


class StoreFolder:
    """The folder of one store's files: `directory`, or a private folder below it.

    It is made if its parent exists. What ended processes of this host left there is removed.

    Args:
        directory: The setting `offload_dir`.

    Raises:
        ConfigError: The directory cannot be made or written, or is a file.
    """

    def __init__(self, directory: Path) -> None:
        self.process_id = os.getpid()
        """The process that owns the folder; a forked child must not touch it."""
        with unusable_folder_errors(directory):
            if fcntl is None:
                raise OSError("this system has no POSIX file locks")
            self.path = directory.absolute()
            """Where files are made."""
            check_parent_exists(self.path)
            self.path.mkdir(exist_ok=True)
            _remove_leftovers(self.path)
            refused = _why_names_are_needed(self.path)
            self.keeps_names = refused is not None
            """Whether files must keep their names until they are closed."""
            if self.keeps_names:
                self.path, descriptor = _make_locked_folder(self.path)
            else:
                descriptor = open_descriptor(self.path, os.O_RDONLY)
        self._descriptor: int | None = descriptor
        if refused is not None:
            logger.warning(
                "%s: a file that is removed cannot be used any longer here (%s), so files stay in "
                "this folder until the end; if the process is killed, until the next run",
                *(self.path, refused),
            )

    def new_file(self, num_bytes: int) -> SlabFile:
        """Make a file of `num_bytes` bytes, a multiple of `BLOCK_BYTES`.

        Raises:
            OSError: The disk is full, or gives no file.
        """
        return SlabFile(self.path / f"{_new_name()}.bin", num_bytes, keep_name=self.keeps_names)

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child of the folder's process."""
        return os.getpid() != self.process_id

    @property
    def free_bytes(self) -> int:
        """Bytes that this process may still take on the file system of the folder."""
        assert self._descriptor is not None, "the folder was removed"
        return free_bytes(self._descriptor)

    def remove(self) -> None:
        """Delete what has a name; does nothing the second time, or in a forked child."""
        if self._descriptor is None or self.is_foreign:
            return
        descriptor, self._descriptor = self._descriptor, None
        if self.keeps_names:
            try:
                _empty(self.path)
            except OSError as error:
                logger.warning("%s could not be removed: %s", self.path, error)
        close_descriptor(descriptor)


@contextlib.contextmanager
def unusable_folder_errors(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the system's errors about `directory`, the setting `offload_dir`, into one.

    Raises:
        ConfigError: It cannot be named, reached, made or written, or is a file.
    """
    try:
        yield
    except FileExistsError as error:
        raise _unusable_error(directory, "what has that name is not a folder") from error
    except OSError as error:
        raise _unusable_error(directory, error.strerror or str(error)) from error
    except ValueError as error:
        # Zero bytes, and characters that no encoding of file names has.
        raise _unusable_error(directory, f"no file can have that name ({error})") from error


def check_parent_exists(directory: Path) -> None:
    """Check that the folder above exists: else a name is mistyped, or a disk not mounted.

    Raises:
        FileNotFoundError: It does not exist.
    """
    parent = directory.absolute().parent
    if not parent.exists():
        raise FileNotFoundError(errno.ENOENT, f"{show(str(parent))} does not exist")


def _why_names_are_needed(directory: Path) -> str | None:
    """The reason why a file there cannot be used after its removal; None if it can."""
    block, seen = aligned_bytes(BLOCK_BYTES), aligned_bytes(BLOCK_BYTES)
    block[:] = np.arange(BLOCK_BYTES) % 251
    seen[:] = 0  # new memory may hold the same bytes from an earlier call
    try:
        file = SlabFile(directory / f"{_new_name()}.bin", BLOCK_BYTES, keep_name=False)
        try:
            file.write(block, 0, lambda _: None)
            file.read(seen, 0, lambda _: None)
        finally:
            file.close()
    except OSError as error:
        # A full disk says nothing about names, and is reported when it is used.
        return None if error.errno in DISK_FULL_ERRNOS else error.strerror or str(error)
    return None if np.array_equal(block, seen) else "other bytes came back"


def _host_name() -> str:
    """The name of this machine, as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9.]", "_", platform.node()) or "unknown"


def _new_name() -> str:
    return f"sppo-{_host_name()}-{os.getpid()}-{secrets.token_hex(8)}"


def _make_locked_folder(directory: Path) -> tuple[Path, int]:
    """Make and lock a new folder; return it with the descriptor of the lock.

    Between making and locking, another process may take the folder for a leftover. Then the lock is
    removed or held by that process, and another name is tried.
    """
    for _ in range(_MAX_TRIES):
        path = directory / _new_name()
        path.mkdir(mode=0o700)
        try:
            lock = open_descriptor(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileNotFoundError:
            continue
        try:
            if _take_lock(lock) and _is_same_file(path / _LOCK, lock):
                return path, lock
        except OSError as error:
            logger.warning(
                "%s: no file locks here (%s); remove what a crash leaves by hand", directory, error
            )
            return path, lock
        close_descriptor(lock)
    raise OSError(f"other processes removed {_MAX_TRIES} new folders before they could be locked")


def _take_lock(descriptor: int) -> bool:
    """Take a file lock; False if another process has it.

    Raises:
        OSError: The file system has no locks.
    """
    assert fcntl is not None, "checked when the folder was made"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same_file(path: Path, descriptor: int) -> bool:
    """Whether the file at `path` is the one open as `descriptor`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_leftovers(directory: Path) -> None:
    """Remove the folders of processes of this host that have ended."""
    freed_bytes, num_folders = 0, 0
    for path in _folders_of_this_user(directory):
        try:
            size = _remove_if_dead(path)
        except OSError as error:
            logger.warning("%s is left from an ended process but stays: %s", path, error)
            continue
        if size is not None:
            freed_bytes += size
            num_folders += 1
    if num_folders:
        logger.info(
            "%s: removed %d folders of processes that had ended without doing so, %d bytes",
            *(directory, num_folders, freed_bytes),
        )


def _folders_of_this_user(directory: Path) -> Iterator[Path]:
    """Yield the folders in `directory` that stores of this user on this host have made."""
    for entry in os.scandir(directory):
        name = _FOLDER.fullmatch(entry.name)
        # Locks of another host may not be seen here (network disks), so its folders stay.
        if name is None or name["host"] != _host_name() or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            owner = entry.stat(follow_symlinks=False).st_uid
        except FileNotFoundError:  # its process has just ended
            continue
        if owner == os.geteuid():
            yield Path(entry.path)


def _remove_if_dead(path: Path) -> int | None:
    """Remove a folder whose lock is free; return its bytes, or None if its process lives."""
    try:
        lock = open_descriptor(path / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        # Its process ended before it made the lock, or is about to and will choose another name.
        with contextlib.suppress(FileNotFoundError):
            path.rmdir()
        return 0
    try:
        return _empty(path) if _take_lock(lock) else None
    finally:
        close_descriptor(lock)


def _empty(path: Path) -> int:
    """Delete a folder and the files in it, the lock last; return the bytes they took."""
    num_bytes = 0
    # Two stores, or a user, may clean up at once.
    with contextlib.suppress(FileNotFoundError):
        for file in sorted(path.iterdir(), key=lambda file: file.name == _LOCK):
            with contextlib.suppress(FileNotFoundError):
                num_bytes += file.stat().st_blocks * 512
                file.unlink()
        path.rmdir()
    return num_bytes


def _unusable_error(directory: str | os.PathLike[str], reason: str) -> ConfigError:
    # Escaped, so that any name can be printed; whole, unless it would fill the screen.
    name = repr(os.fspath(directory))
    seen = name if len(name) <= _MAX_SHOWN else show(os.fspath(directory))
    return ConfigError(
        f"offload_dir is {seen}, which cannot be used: {reason}. Allowed: a folder that "
        "exists or can be made in one that does, and that can be written to. Remedy: name such a "
        "folder, best on a fast local disk; where it is to be on a disk of its own, mount that."
    )
