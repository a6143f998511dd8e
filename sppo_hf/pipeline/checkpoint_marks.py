"""Marks that tell a complete checkpoint folder from one that was cut short or damaged.

Several ranks write into a folder, and any may die. So a mark that says "incomplete" is there before
the first of them writes, and is replaced in one step by one that lists every file with its digest
when all have written. A folder without a mark was not written by a pipeline; then what the Trainer
itself writes last, its state, stands for the mark.

A mark has the number of the checkpoint's format. Format 1, which is written no more, has no number
and notes sizes without digests.

Knows files only: nothing of ranks or models.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sppo_hf.errors import ConfigError
from sppo_hf.pipeline.checkpoint_files import (
    Digest,
    digests_of,
    is_inside,
    read_json,
    write_json,
)

FORMAT = 2
"""Number of the format that is written; formats up to it are read."""

MARK_NAME = "sppo_checkpoint.json"
"""The mark's file name."""

STATE_FOLDER = "sppo_optimizer"
"""Folder with optimizers, schedulers and random numbers. A Trainer without SPPO that finds a folder
named after an optimizer and no optimizer.pt stops, where it would otherwise go on with a fresh
optimizer."""

TRAINER_STATE_NAME = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_HASHED = {".safetensors", ".pt", ".pth", ".bin"}

Seen = dict[str, tuple[int, int, int]]
"""What tells whether a file was written anew: inode, size and time of the last change, by name."""

Judge = Callable[[Path], str | None]
"""Says what a folder lacks as a checkpoint; see `what_is_torn`."""


def mark_incomplete(folder: Path) -> Seen:
    """Make `folder` and mark it as being written; returns what is in it already."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json({"complete": False}, folder / MARK_NAME)
    return _seen(folder)


def mark_complete(
    folder: Path,
    about: Mapping[str, Any],
    *,
    before: Seen | None = None,
    digests: Mapping[str, Digest] | None = None,
) -> None:
    """Mark `folder` as written, with a list of what must be in it.

    Of what is read when training resumes the digest is noted, of other JSON files the name alone:
    people edit configurations.

    Args:
        folder: What `mark_incomplete` was called with.
        about: What else to note, in JSON types.
        before: What `mark_incomplete` returned; a file that is still the same is not listed.
        digests: Of files that were hashed when they were written, by name; the others are read.
    """
    digests = digests or {}
    after = _seen(folder)
    names = sorted(name for name, seen in after.items() if (before or {}).get(name) != seen)
    # Of another size: it was replaced after it had been hashed.
    to_hash = [n for n in names if _is_hashed(n) and digests.get(n, (-1, ""))[0] != after[n][1]]
    files: dict[str, Any] = {n: list(digests[n]) if n in digests else None for n in names}
    for name, digest in zip(to_hash, digests_of([folder / n for n in to_hash]), strict=True):
        files[name] = list(digest)
    mark = {"complete": True, "format": FORMAT, **about, "files": files}
    write_json(mark, folder / MARK_NAME)


def read_mark(folder: Path) -> dict[str, Any] | None:
    """The mark of a folder; None where there is none, `{}` where it cannot be read.

    Raises:
        ConfigError: It was written in a later format.
    """
    if not os.path.lexists(folder / MARK_NAME):
        return None
    try:
        mark = read_json(folder / MARK_NAME)
    except ConfigError:
        return {}
    number = mark.get("format", 1)
    if type(number) is not int or number < 1:
        return {}
    if number > FORMAT:
        raise ConfigError(
            f"The checkpoint {str(folder)!r} has format {str(number)[:20]}, of a later version of "
            f"sppo_hf. Allowed: formats up to {FORMAT}. Remedy: install the version that wrote it, "
            "or a newer one."
        )
    return mark


def what_is_torn(folder: Path, *, share: tuple[int, int] = (0, 1)) -> str | None:
    """Say what `folder` lacks as a checkpoint; None where nothing does.

    Reads all files that have digests; see [Note: what a digest is, and what it costs].

    Args:
        folder: Of a checkpoint.
        share: (i, n): of the digests, compare every n-th only, from the i-th on.

    Raises:
        ConfigError: It was written in a later format.
    """
    mark = read_mark(folder)
    if mark is None:
        return _what_is_torn_without_mark(folder)
    if mark and mark.get("complete") is not True:
        return "its save did not come to its end"
    files = _listed(mark)
    if files is None:
        return f"its {MARK_NAME} is damaged"
    try:
        return _what_is_changed(folder, files, share)
    except OSError as error:
        return f"{error.filename or 'a file'} cannot be read ({error.strerror})"


def _what_is_torn_without_mark(folder: Path) -> str | None:
    """Judge what the Trainer itself has saved; nothing that `mark_incomplete` was called for."""
    last = MARK_NAME if (folder / STATE_FOLDER).is_dir() else TRAINER_STATE_NAME
    if not (folder / last).is_file():
        return f"it has no {last}, which is written last"
    try:
        read_json(folder / last)
    except ConfigError:
        return f"its {last} is damaged"
    return None


def _what_is_changed(
    folder: Path, files: Mapping[str, tuple[int | None, str | None]], share: tuple[int, int]
) -> str | None:
    """Compare files with what is noted of them: size and hash."""
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if size is not None and path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    hashed = [(n, (size or 0, crc)) for n, (size, crc) in files.items() if crc is not None]
    # The largest come first, so that shares are about equal.
    mine = sorted(hashed, key=lambda item: (-item[1][0], item[0]))[share[0] :: share[1]]
    found = digests_of([folder / name for name, _ in mine])
    for (name, noted), digest in zip(mine, found, strict=True):
        if digest != noted:
            return f"the bytes of {name} are not those that were saved"
    return None


def _listed(mark: Mapping[str, Any]) -> dict[str, tuple[int | None, str | None]] | None:
    """Size and hash of the files that a mark lists, where they are noted; None if it is damaged."""
    files = mark.get("files")
    if not isinstance(files, dict):
        return None
    found: dict[str, tuple[int | None, str | None]] = {}
    for name, noted in files.items():
        match noted:
            case None:
                found[name] = None, None
            case int() if mark.get("format", 1) == 1:
                found[name] = noted, None
            case [int(size), str(crc)]:
                found[name] = size, crc
            case _:
                return None
        if not is_inside(name):
            return None
    return found


def checkpoints_in(run_folder: Path) -> list[Path]:
    """The `checkpoint-N` folders of a run, newest (highest N) first."""
    found = []
    for path in run_folder.iterdir() if run_folder.is_dir() else ():
        match = _CHECKPOINT.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found, reverse=True)]


def newest_complete(
    run_folder: Path, judge: Judge = what_is_torn
) -> tuple[Path | None, dict[Path, str]]:
    """Find where a run can be resumed.

    Args:
        run_folder: Has the `checkpoint-N` folders.
        judge: Says what a folder lacks.

    Returns:
        The newest complete checkpoint, if there is one, and what the newer ones lack.
    """
    torn = {}
    for folder in checkpoints_in(run_folder):
        lacks = judge(folder)
        if lacks is None:
            return folder, torn
        torn[folder] = lacks
    return None, torn


def refuse_torn(folder: Path, judge: Judge = what_is_torn) -> None:
    """Refuse a checkpoint whose save was cut short, or that was damaged later.

    Raises:
        ConfigError: Naming the folder, what it lacks and the newest complete one beside it.
    """
    lacks = judge(folder) if folder.is_dir() else None
    if lacks is None:
        return
    newest, _ = newest_complete(folder.parent, judge)
    there = (
        f"resume from {str(newest)!r}, the newest complete one"
        if newest
        else (f"start anew: no checkpoint in {str(folder.parent)!r} is complete")
    )
    raise ConfigError(
        f"The checkpoint {str(folder)!r} is torn: {lacks}. Allowed: complete checkpoints. "
        f"Remedy: {there}, and delete the torn one."
    )


def _is_hashed(name: str) -> bool:
    """Whether a file is read when training resumes."""
    path = Path(name)
    read = path.name == TRAINER_STATE_NAME or path.name.endswith(".index.json")
    return path.suffix in _HASHED or read or path.parts[0] == STATE_FOLDER


def _seen(folder: Path) -> Seen:
    """The files that may belong to a checkpoint, by name."""
    seen = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if not (_is_hashed(name) or path.suffix == ".json") or _foreign(path, folder):
            continue
        if path.is_file() and not path.name.startswith(MARK_NAME):
            entry = path.stat()
            seen[name] = entry.st_ino, entry.st_size, entry.st_mtime_ns
    return seen


def _foreign(path: Path, folder: Path) -> bool:
    """Whether a file belongs to a checkpoint, or a repository, inside this folder."""
    inside = path.relative_to(folder).parts[:-1]
    return any(_CHECKPOINT.fullmatch(part) or part.startswith(".") for part in inside)
