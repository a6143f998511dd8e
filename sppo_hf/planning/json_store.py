"""Small JSON files that processes keep for each other under the Hugging Face home.

A file's name contains a digest of everything that the value depends on, so that values of several
environments and format versions lie side by side.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def cache_folder(kind: str) -> Path:
    """Folder of one kind of files, `sppo_hf/<kind>` under the Hugging Face home.

    That home is $HF_HOME, else `huggingface` under $XDG_CACHE_HOME or `~/.cache`: read here and
    now, because huggingface_hub reads it once at import.
    """
    cache_home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache_home, "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "sppo_hf" / kind


def cache_path(kind: str, name: str, key: object) -> Path:
    """Path of the file of a value, whether or not it exists.

    `key` is everything that the value depends on, serializable as JSON; `name` is for people.
    """
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]
    return cache_folder(kind) / "-".join(part for part in (slug, digest + ".json") if part)


def write_atomically(path: Path, text: str) -> None:
    """Writes a file atomically, replacing one that exists.

    Raises:
        OSError: it cannot be written.
    """
    written = write_temporary(path, text)
    os.replace(written, path)


def write_temporary(path: Path, text: str) -> Path:
    """Writes a file with a temporary name in the folder of `path`, which is created.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=".new-", delete=False
    ) as file:
        file.write(text)
    return Path(file.name)


@contextmanager
def file_lock(path: Path, *, most_seconds: float) -> Generator[None]:
    """Holds a lock of the operating system on a file beside `path` while a process makes `path`.

    The lock ends with the process that holds it. A process that has waited `most_seconds` goes on
    without it, as do all where files cannot be locked: `path` is then made more than once.
    """
    lock = path.with_suffix(".lock")
    until = time.monotonic() + most_seconds
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        yield
        return
    try:
        locked = _locked(descriptor, until)
        yield
        if locked:
            with suppress(OSError):
                lock.unlink()
    finally:
        os.close(descriptor)


def _locked(descriptor: int, until: float) -> bool:
    """Whether the lock was acquired in time."""
    while fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(_LOOK_EVERY_SECONDS)
        except OSError:  # no locks on this filesystem
            return False
    return False


_LOOK_EVERY_SECONDS = 0.05
