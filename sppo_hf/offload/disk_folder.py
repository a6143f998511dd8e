"""Where a disk store keeps its files: below the user's folder, and gone with its process.

Where the file system keeps the bytes of a removed file for as long as it is open, every file is
removed as soon as it is open and before it has any bytes, so nothing is left on the disk whatever
ends the process, kill -9 included. All local file systems of Linux and macOS do so, and NFS, whose
client renames such files (`.nfs…`) until they are closed. `_why_not_nameless` does not go by names
of file systems: it fills and reads one removed block whenever a store is made.

Elsewhere (some FUSE and 9p mounts) files keep their names, in a private folder
`<directory>/sppo-<host>-<process>-<random>` with the file `lock`, on which its process keeps an
flock for as long as it lives, however it ends. So whoever gets that lock knows that the owner is
gone, kill -9 included, and removes what it left; every new store looks for such folders. Where a
filesystem has no flock either, what a crash leaves stays.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sppo_hf.errors import ConfigError
from sppo_hf.offload.disk_files import (
    BLOCK_BYTES,
    NO_ROOM,
    SlabFile,
    aligned_bytes,
    close_descriptor,
    free_bytes,
    open_descriptor,
)
from sppo_hf.rules import show

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

logger = logging.getLogger(__name__)

_LOCK = "lock"
_FOLDER = re.compile(r"sppo-(?P<host>[^-]+)-[0-9]+-[0-9a-f]{16}")
_MOST_SHOWN = 400
# Two names that other processes can take before us are chance; eight are a broken filesystem.
_MAX_TRIES = 8


class StoreFolder:
    """A place for one store's files below `directory`, which is made if its parent exists.

    Making one also removes what ended processes of this host left there under a name.

    Args:
        directory: where the user wants offloaded bytes, the setting `offload_dir`.

    Raises:
        ConfigError: the directory cannot be made or written, or is a file.
    """

    def __init__(self, directory: Path) -> None:
        self.process_id = os.getpid()
        """The process that owns the folder; a forked child must leave it alone."""
        with refuse_unusable(directory):
            if fcntl is None:
                raise OSError("this system has no POSIX file locks")
            self.path = directory.absolute()
            """Where files are to be made: `directory`, or a private folder below it."""
            refuse_missing_parent(self.path)
            self.path.mkdir(exist_ok=True)
            _remove_leftovers(self.path)
            refused = _why_not_nameless(self.path)
            self.keeps_names = refused is not None
            """Whether files must keep their names until they are closed."""
            if self.keeps_names:
                self.path, descriptor = _make(self.path)
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
            OSError: the disk has no room, or gives no file.
        """
        return SlabFile(self.path / f"{_new_name()}.bin", num_bytes, keep_name=self.keeps_names)

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child of the folder's process."""
        return os.getpid() != self.process_id

    @property
    def free_bytes(self) -> int:
        """Bytes that this process may still take on the filesystem of the folder."""
        assert self._descriptor is not None, "the folder was removed"
        return free_bytes(self._descriptor)

    def remove(self) -> None:
        """Delete what has a name; does nothing the second time or in a forked child."""
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
def refuse_unusable(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the system says of `directory`, the setting `offload_dir`, into one error.

    Raises:
        ConfigError: it has no such name, or cannot be reached, made or written, or is a file.
    """
    try:
        yield
    except FileExistsError as error:
        raise _refusal(directory, "what has that name is not a folder") from error
    except OSError as error:
        raise _refusal(directory, error.strerror or str(error)) from error
    except ValueError as error:
        # Zero bytes, and characters that no encoding of file names has.
        raise _refusal(directory, f"no file can have that name ({error})") from error


def refuse_missing_parent(directory: Path) -> None:
    """Refuse a folder below one that does not exist: a name mistyped, or a disk not mounted.

    Raises:
        FileNotFoundError: there is no such parent.
    """
    parent = directory.absolute().parent
    if not parent.exists():
        raise FileNotFoundError(errno.ENOENT, f"{show(str(parent))} does not exist")


def _why_not_nameless(directory: Path) -> str | None:
    """Why a file there cannot be filled and read after its removal; None if it can."""
    block, seen = aligned_bytes(BLOCK_BYTES), aligned_bytes(BLOCK_BYTES)
    block[:] = np.arange(BLOCK_BYTES) % 251
    seen[:] = 0  # new memory may hold the same bytes from another trial
    try:
        file = SlabFile(directory / f"{_new_name()}.bin", BLOCK_BYTES, keep_name=False)
        try:
            file.write(block, 0, lambda _: None)
            file.read(seen, 0, lambda _: None)
        finally:
            file.close()
    except OSError as error:
        # A full disk says nothing about names, and will be told of when it is to be used.
        return None if error.errno in NO_ROOM else error.strerror or str(error)
    return None if np.array_equal(block, seen) else "other bytes came back"


def _host() -> str:
    """The name of this machine as a part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9.]", "_", platform.node()) or "unknown"


def _new_name() -> str:
    return f"sppo-{_host()}-{os.getpid()}-{secrets.token_hex(8)}"


def _make(directory: Path) -> tuple[Path, int]:
    """Make and lock a new folder; return it with the descriptor that holds the lock.

    Between making and locking, another process may take the folder for a leftover. Then the lock is
    gone or not to be had, and another name is tried.
    """
    for _ in range(_MAX_TRIES):
        path = directory / _new_name()
        path.mkdir(mode=0o700)
        try:
            lock = open_descriptor(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileNotFoundError:
            continue
        try:
            if _take_lock(lock) and _is_still(path / _LOCK, lock):
                return path, lock
        except OSError as error:
            logger.warning(
                "%s: no file locks here (%s); remove what a crash leaves by hand", directory, error
            )
            return path, lock
        close_descriptor(lock)
    raise OSError(f"other processes removed {_MAX_TRIES} new folders before they could be locked")


def _take_lock(descriptor: int) -> bool:
    """Whether the lock was free and is ours now.

    Raises:
        OSError: the filesystem has no locks.
    """
    assert fcntl is not None, "checked when the folder was made"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the file at `path` is the one that is open as `descriptor`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_leftovers(directory: Path) -> None:
    """Remove the folders of processes of this host that have ended."""
    freed_bytes, num_folders = 0, 0
    for path in _own_folders(directory):
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


def _own_folders(directory: Path) -> Iterator[Path]:
    """The folders in `directory` that a store of this user on this host has made."""
    for entry in os.scandir(directory):
        name = _FOLDER.fullmatch(entry.name)
        # Locks of another host may not be seen here (network disks), so its folders stay.
        if name is None or name["host"] != _host() or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            owner = entry.stat(follow_symlinks=False).st_uid
        except FileNotFoundError:  # its process has just ended
            continue
        if owner == os.geteuid():
            yield Path(entry.path)


def _remove_if_dead(path: Path) -> int | None:
    """Remove a folder whose lock is free; return the bytes it held, or None if it stays."""
    try:
        lock = open_descriptor(path / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        # Its maker died before making the lock, or is about to and will then choose another name.
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
    # Two stores may clean up at once, and a user may have been here before us.
    with contextlib.suppress(FileNotFoundError):
        for file in sorted(path.iterdir(), key=lambda file: file.name == _LOCK):
            with contextlib.suppress(FileNotFoundError):
                num_bytes += file.stat().st_blocks * 512
                file.unlink()
        path.rmdir()
    return num_bytes


def _refusal(directory: str | os.PathLike[str], reason: str) -> ConfigError:
    """The error of a directory that cannot be used."""
    # Escaped, so that any name can be printed; whole, unless it would fill the screen.
    name = repr(os.fspath(directory))
    seen = name if len(name) <= _MOST_SHOWN else show(os.fspath(directory))
    return ConfigError(
        f"offload_dir is {seen}, which cannot be used: {reason}. Allowed: a folder that "
        "exists or can be made in one that does, and that can be written to. Remedy: name such a "
        "folder, best on a fast local disk; where it is to be on a disk of its own, mount that."
    )
