"""Marks that tell a complete checkpoint folder from one whose save was cut short.

Several ranks write into a folder, and any may die. So a mark that says "incomplete" is there before
the first of them writes, and is replaced in one step by one that lists every file and its size when
all have written. A folder without a mark was not written by a pipeline; then what the Trainer
itself writes last, its state, stands for the mark.

Knows files only: nothing of ranks or models.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sppo_hf.errors import ConfigError

MARK_NAME = "sppo_checkpoint.json"
"""The mark's file name."""

TRAINER_STATE_NAME = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_SIZED = {".safetensors", ".distcp", ".pt", ".pth", ".bin"}


def mark_incomplete(folder: Path) -> None:
    """Make `folder` and mark it as being written."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, {"complete": False})


def mark_complete(folder: Path, about: Mapping[str, Any]) -> None:
    """Mark `folder` as written, with a list of what must be in it.

    Of files of tensors the size in bytes is noted, of JSON files the name alone: people edit those.

    Args:
        folder: What `mark_incomplete` was called with.
        about: What else to note, in JSON types.
    """
    sizes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(MARK_NAME) and not _foreign(path, folder):
            sized = path.suffix in _SIZED or path.name == ".metadata"
            if sized or path.suffix == ".json":
                sizes[str(path.relative_to(folder))] = path.stat().st_size if sized else None
    _write(folder, {"complete": True, **about, "files": sizes})


def read_mark(folder: Path) -> dict[str, Any] | None:
    """The mark of a folder; None where there is none, `{}` where it cannot be read."""
    try:
        mark: object = json.loads((folder / MARK_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return mark if isinstance(mark, dict) else {}


def what_is_torn(folder: Path) -> str | None:
    """Say what `folder` lacks as a checkpoint; None where nothing does."""
    mark = read_mark(folder)
    if mark is None:
        has_state = (folder / TRAINER_STATE_NAME).is_file()
        return None if has_state else f"it has no {TRAINER_STATE_NAME}, which is written last"
    if not mark.get("complete"):
        return "its save did not come to its end"
    for name, size in mark.get("files", {}).items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if size is not None and path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def checkpoints_in(run_folder: Path) -> list[Path]:
    """The `checkpoint-N` folders of a run, newest (highest N) first."""
    found = []
    for path in run_folder.iterdir() if run_folder.is_dir() else ():
        match = _CHECKPOINT.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found, reverse=True)]


def newest_complete(run_folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """Find where a run can be resumed.

    Returns:
        The newest complete checkpoint, if there is one, and what the newer ones lack.
    """
    torn = {}
    for folder in checkpoints_in(run_folder):
        lacks = what_is_torn(folder)
        if lacks is None:
            return folder, torn
        torn[folder] = lacks
    return None, torn


def refuse_torn(folder: Path) -> None:
    """Refuse a checkpoint whose save was cut short.

    Raises:
        ConfigError: Naming the folder, what it lacks and the newest complete one beside it.
    """
    lacks = what_is_torn(folder) if folder.is_dir() else None
    if lacks is None:
        return
    newest, _ = newest_complete(folder.parent)
    there = (
        f"resume from {str(newest)!r}, the newest complete one"
        if newest
        else (f"start anew: no checkpoint in {str(folder.parent)!r} is complete")
    )
    raise ConfigError(
        f"The checkpoint {str(folder)!r} is torn: {lacks}. Allowed: complete checkpoints. "
        f"Remedy: {there}, and delete the torn one."
    )


def _foreign(path: Path, folder: Path) -> bool:
    """Whether a file belongs to a checkpoint, or a repository, inside this folder."""
    inside = path.relative_to(folder).parts[:-1]
    return any(_CHECKPOINT.fullmatch(part) or part.startswith(".") for part in inside)


def _write(folder: Path, mark: Mapping[str, Any]) -> None:
    fresh = folder / f"{MARK_NAME}.new"
    with fresh.open("w", encoding="utf-8") as file:
        json.dump(mark, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(folder / MARK_NAME)
