"""Loads long documents from installed packages, local files or a hub.

Every source becomes a `datasets.Dataset` with two text columns, `name` and `text`, one row for each
document, always in the same order. `packing.py` makes tokens, rows and batches of them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from datasets import Dataset, load_dataset

from sppo_hf.errors import ConfigError

INSTALLED_PACKAGES = "installed-packages"

_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".rs", ".go", ".java", ".js")
_TABLE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_TEXT_COLUMNS = ("text", "content", "document", "code", "body")
# Longer source files are nearly always generated tables (Unicode ranges, opcodes), not code.
_MAX_FILE_CHARS = 100_000
_SKIPPED_FOLDERS = re.compile(
    r"(^|/)(tests?|testing|_?vendor(ed)?|third_party|__pycache__|node_modules|\.[^/.][^/]*)(/|$)"
)


class Split(NamedTuple):
    """Documents for training and for evaluation; no text is in both."""

    train: Dataset
    held_out: Dataset


def load_documents(
    source: str,
    *,
    config_name: str | None = None,
    split: str = "train",
    text_column: str | None = None,
) -> Dataset:
    """Load documents from the source that a user named.

    Args:
        source: `installed-packages`; or a path to a .jsonl, .json, .parquet, .csv or text file, or
            to a folder of such files; or else a dataset's id on the hub.
        config_name: the hub dataset's configuration.
        split: the hub dataset's split, also a slice such as `train[:1%]`.
        text_column: the column that holds the text; found by its usual names if left out.

    Returns:
        A dataset with the columns `name` and `text`.

    Raises:
        ConfigError: if nothing is there, or no column can be taken for the text.
    """
    if source == INSTALLED_PACKAGES:
        return installed_packages()
    path = Path(source).expanduser()
    if path.exists():
        return local_documents(path, text_column=text_column)
    if path.suffix.lower() in (*_TEXT_SUFFIXES, *_TABLE_BUILDERS) or source.startswith(
        (".", "/", "~")
    ):
        raise ConfigError(
            f"dataset {source!r}: no such file or folder. Give an existing path, a hub id such as "
            f"'owner/name', or {INSTALLED_PACKAGES!r}."
        )
    rows = load_dataset(source, config_name, split=split)
    return _as_documents(rows, source, text_column)


def installed_packages(
    names: Sequence[str] | None = None,
    *,
    max_document_chars: int = 400_000,
    min_document_chars: int = 20_000,
) -> Dataset:
    """Repository-level code: one document per installed Python distribution.

    A document is the distribution's own .py files in path order, each under a `# file: path` line,
    without tests, vendored copies and files that are too long to be written by hand.

    Args:
        names: the distributions to take, by name; all that are installed if None.
        max_document_chars: where a document is cut off, so that one package does not fill the set.
        min_document_chars: distributions with less code than this are left out, unless named.

    Returns:
        A dataset with the columns `name` (such as `peft==0.21.2`) and `text`, sorted by name.

    Raises:
        ConfigError: if a named distribution is not installed, or no code is found at all.
    """
    found = {_canonical(dist.name): dist for dist in metadata.distributions() if dist.name}
    wanted = sorted(found) if names is None else sorted({_canonical(name) for name in names})
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ConfigError(
            f"packages {missing} are not installed; installed are {', '.join(sorted(found))}"
        )
    documents = []
    for name in wanted:
        text = _join_sources(_source_files(found[name]), max_document_chars)
        if len(text) >= (min_document_chars if names is None else 1):
            documents.append({"name": f"{name}=={found[name].version}", "text": text})
    if not documents:
        raise ConfigError(
            f"no Python source of at least {min_document_chars:,} characters in {len(wanted)} "
            "installed packages; name a dataset instead"
        )
    return Dataset.from_list(documents)


def local_documents(path: str | Path, *, text_column: str | None = None) -> Dataset:
    """Documents of a local file or folder.

    Tables (.jsonl, .json, .parquet, .csv) give one document a row; any text file is one document.
    A folder is walked in path order; if it holds tables they alone are read, else its text files.

    Args:
        path: a file or a folder.
        text_column: the tables' text column; found by its usual names if left out.

    Returns:
        A dataset with the columns `name` and `text`.

    Raises:
        ConfigError: if there is no such path, nothing readable in it, or no text column.
    """
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"dataset {str(path)!r}: no such file or folder")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    tables = [file for file in files if file.suffix.lower() in _TABLE_BUILDERS]
    if tables:
        builders = {_TABLE_BUILDERS[file.suffix.lower()] for file in tables}
        if len(builders) > 1:
            raise ConfigError(
                f"dataset {str(path)!r} mixes {sorted(builders)} tables; keep one kind in a folder"
            )
        rows = load_dataset(builders.pop(), data_files=[str(t) for t in tables], split="train")
        return _as_documents(rows, str(path), text_column)
    texts = [f for f in files if path.is_file() or f.suffix.lower() in _TEXT_SUFFIXES]
    documents = [
        {"name": str(file.relative_to(path)) if path.is_dir() else file.name, "text": text}
        for file, text in _readable(texts)
    ]
    if not documents:
        raise ConfigError(
            f"dataset {str(path)!r} holds no text: looked for {', '.join(_TABLE_BUILDERS)} tables "
            f"and non-empty {', '.join(_TEXT_SUFFIXES)} files among {len(files)} files"
        )
    return Dataset.from_list(documents)


def split_documents(documents: Dataset, *, held_out_fraction: float = 0.1, seed: int = 0) -> Split:
    """Hold whole documents out, before anything is cut into rows.

    Repeated texts are dropped first, so that no held-out text is also trained on.

    Args:
        documents: a dataset with the columns `name` and `text`.
        held_out_fraction: the share of documents to hold out, at least one of them.
        seed: which ones; the same seed and documents give the same split.

    Returns:
        The two parts, each in the order of `documents`.

    Raises:
        ConfigError: if the fraction is not between 0 and 1, or fewer than two texts differ.
    """
    if not 0.0 < held_out_fraction < 1.0:
        raise ConfigError(f"held_out_fraction={held_out_fraction}: must lie between 0 and 1")
    first_of_text: dict[str, int] = {}
    for index, text in enumerate(documents["text"]):
        first_of_text.setdefault(text, index)
    distinct = sorted(first_of_text.values())
    if len(distinct) < 2:
        raise ConfigError(
            f"{len(distinct)} distinct document cannot be split into training and held-out "
            "documents; give at least two, or a held-out dataset of its own"
        )
    count = min(max(1, round(held_out_fraction * len(distinct))), len(distinct) - 1)
    held_out = set(random.Random(seed).sample(distinct, count))
    return Split(
        train=documents.select([i for i in distinct if i not in held_out]),
        held_out=documents.select(sorted(held_out)),
    )


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _source_files(distribution: metadata.Distribution) -> Iterator[tuple[str, str]]:
    """Relative path and text of the distribution's own Python files, in path order."""
    paths = sorted(
        (file.as_posix(), Path(str(file.locate())))
        for file in distribution.files or ()
        if file.suffix == ".py" and not _SKIPPED_FOLDERS.search(file.as_posix())
    )
    names = {path: name for name, path in paths}
    for path, text in _readable(path for _, path in paths):
        if len(text) <= _MAX_FILE_CHARS:
            yield names[path], text


def _join_sources(files: Iterable[tuple[str, str]], max_chars: int) -> str:
    parts: list[str] = []
    size_chars = 0
    for name, text in files:
        parts.append(f"# file: {name}\n{text.rstrip()}\n\n")
        size_chars += len(parts[-1])
        if size_chars >= max_chars:
            break
    return "".join(parts)[:max_chars]


def _readable(paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Yield files with their text, without empty, binary and missing files."""
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        if text.strip():
            yield path, text


def _as_documents(rows: Dataset, source: str, text_column: str | None) -> Dataset:
    columns = rows.column_names
    if text_column is None:
        text_column = next((name for name in _TEXT_COLUMNS if name in columns), None)
    if text_column is None or text_column not in columns:
        raise ConfigError(
            f"dataset {source!r} has the columns {columns} and none is known to be the text; "
            f"name one with text_column (looked for {', '.join(_TEXT_COLUMNS)})"
        )
    rows = rows.select_columns([text_column])
    if text_column != "text":
        rows = rows.rename_column(text_column, "text")
    rows = rows.add_column("name", [f"{source}#{index}" for index in range(len(rows))])
    rows = rows.filter(lambda text: bool(text and text.strip()), input_columns="text")
    if not len(rows):
        raise ConfigError(f"dataset {source!r}: every {text_column!r} is empty")
    return rows
