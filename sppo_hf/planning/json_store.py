"""Small JSON files that processes keep for each other under the Hugging Face home.

A file's name has what the value hangs on as a digest, so that values of several environments lie
side by side and one of another format is not even opened. Knows nothing of what is in them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """Folder of one kind of files, `sppo_hf/<kind>` under the Hugging Face home.

    That home is $HF_HOME, else `huggingface` under $XDG_CACHE_HOME or `~/.cache`: read here and
    now, because huggingface_hub reads it once at import.
    """
    cache_home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache_home, "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "sppo_hf" / kind


def keyed_path(kind: str, name: str, key: object) -> Path:
    """Where a value lies, whether or not it exists.

    Args:
        kind: of values; see `cache_folder`.
        name: to recognise the file by.
        key: all that the value hangs on, in values that JSON knows.
    """
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]
    return cache_folder(kind) / "-".join(part for part in (slug, digest + ".json") if part)


def write_whole(path: Path, text: str) -> None:
    """Writes a file, whole or not at all, over one that is there.

    Raises:
        OSError: it cannot be written.
    """
    written = write_beside(path, text)
    os.replace(written, path)


def write_beside(path: Path, text: str) -> Path:
    """Writes a file under a name of its own in the folder of `path`, which is made.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=".new-", delete=False
    ) as file:
        file.write(text)
    return Path(file.name)
