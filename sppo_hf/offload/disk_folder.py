"""The private folder of a disk store: made, locked, and removed even after a crash.

A folder is `<directory>/sppo-<host>-<process>-<random>` and holds the file `lock`, on which its
process keeps an flock for as long as it lives, however it ends. So whoever gets that lock knows
that the owner is gone, kill -9 included, and removes what it left. Knows nothing of what the other
files hold.

Not covered: a filesystem without flock. Stores work there, but what a crash leaves stays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from sppo_hf.errors import ConfigError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

logger = logging.getLogger(__name__)

_LOCK = "lock"
_FOLDER = re.compile(r"sppo-(?P<host>[^-]+)-[0-9]+-[0-9a-f]{16}")
# Two names that other processes can take before us are chance; eight are a broken filesystem.
_MAX_TRIES = 8


class StoreFolder:
    """One private folder below `directory`, which is made if it does not exist.

    Making one also removes what ended processes of this host left there.

    Args:
        directory: where the user wants offloaded bytes, the setting `offload_dir`.

    Raises:
        ConfigError: the directory cannot be made or written, or is a file.
    """

    def __init__(self, directory: Path) -> None:
        self.process_id = os.getpid()
        """The process that owns the folder; a forked child must leave it alone."""
        if fcntl is None:
            raise _refusal(directory, "this system has no POSIX file locks")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(directory)
            self.path, lock = _make(directory)
        except FileExistsError as error:
            raise _refusal(directory, "it is a file") from error
        except OSError as error:
            raise _refusal(directory, error.strerror or str(error)) from error
        self._lock: int | None = lock

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child of the folder's process."""
        return os.getpid() != self.process_id

    @property
    def free_bytes(self) -> int:
        """Bytes that this process may still take on the filesystem of the folder."""
        assert self._lock is not None, "the folder was removed"
        return free_bytes(self._lock)

    def remove(self) -> None:
        """Delete the folder and all in it; does nothing the second time or in a forked child."""
        if self._lock is None or self.is_foreign:
            return
        lock, self._lock = self._lock, None
        try:
            _empty(self.path)
        except OSError as error:
            logger.warning("%s could not be removed: %s", self.path, error)
        close_descriptor(lock)


def open_descriptor(path: Path, flags: int) -> int:
    """Open a file for this process alone: neither a forked nor a started child keeps it open.

    A child that did would keep the lock, and the disk space of removed files, past our end.
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


def _host() -> str:
    """The name of this machine as a part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9.]", "_", platform.node()) or "unknown"


def _make(directory: Path) -> tuple[Path, int]:
    """Make and lock a new folder; return it with the descriptor that holds the lock.

    Between making and locking, another process may take the folder for a leftover. Then the lock is
    gone or not to be had, and another name is tried.
    """
    for _ in range(_MAX_TRIES):
        path = directory / f"sppo-{_host()}-{os.getpid()}-{secrets.token_hex(8)}"
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


def _refusal(directory: Path, reason: str) -> ConfigError:
    """The error of a directory that cannot be used."""
    return ConfigError(
        f"offload_dir is '{directory}', which cannot be used: {reason}. Allowed: a folder that "
        "exists or can be made, and that can be written to. Remedy: name such a folder, best on a "
        "fast local disk."
    )
