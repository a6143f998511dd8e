"""Files of a checkpoint: written with a digest, read without running anything, errors with a name.

Tensors are safetensors files, everything else is JSON. Neither can hold code, so a checkpoint of
unknown origin can be resumed from and exported: at worst it is refused. Whatever goes wrong while a
file is read or written is raised again with the file's name.

Not covered: what Transformers and Accelerate read themselves. They call `torch.load` with
`weights_only=True`.

Several ranks write into a folder, and any may die. So a mark that says "incomplete" is there before
the first of them writes, and is replaced in one step by one that lists every file with its digest
when all have written. A folder without a mark was not written by a pipeline; then what the Trainer
itself writes last, its state, stands for the mark. A mark has the number of the checkpoint's
format. Format 1, which is written no more, has no number and notes sizes without digests.

Knows files only: nothing of ranks or models.

[Note: what a digest is, and what it costs]
The CRC-32 of a file's blocks' CRC-32s, a block being 64 MiB. It finds damage (a flipped bit, a torn
page), and it is no signature: who changes a file on purpose can change its digest, too. Of the
hashes in Python's standard library CRC-32 is the fastest: 2.2 GB/s on one core of a server (SHA-256
1.2, BLAKE2b 1.0). Reading a file out of the page cache and hashing it took 0.67 s for a GiB with
one thread (1.6 GB/s, on a busy machine). Up to eight threads hash blocks at
once, and all ranks share the files. A save hashes what it writes while it writes it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from sppo_hf.errors import ConfigError, PipelineError

Digest: TypeAlias = tuple[int, str]
"""Bytes of a file and eight hexadecimal digits; see [Note: what a digest is, and what it costs]."""

BLOCK = 64 * 2**20
MAX_JSON = 64 * 2**20
"""Bytes of the largest JSON file that is read: an index of some 300,000 parameters."""

_PIECE = 8 * 2**20
_THREADS = 8
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
"""What safetensors calls dtypes."""


# -- errors ------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Raise whatever goes wrong inside as an error that names `path`.

    Raises:
        ConfigError: The file is damaged, or holds something else than it should.
    """
    try:
        yield
    except ConfigError:
        raise
    # Bytes that nobody wrote make pickle, zip, JSON and safetensors raise anything.
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ConfigError(
            f"{str(path)!r} cannot be read ({said}). Allowed: files as they were saved. Remedy: "
            "the file is damaged, or no checkpoint's; resume from another checkpoint."
        ) from error


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Raise what the disk says inside as an error that names `path` or the file in it.

    Raises:
        PipelineError: A file could not be written.
    """
    try:
        yield
    except OSError as error:
        # Errors of a network have no number, or are of these kinds.
        if error.errno is None or isinstance(error, ConnectionError | TimeoutError):
            raise
        raise _not_written(error.filename or path, error.strerror or str(error)) from error
    except RuntimeError as error:  # torch.save forgets what the system said
        if not any(word in str(error) for word in ("PytorchStreamWriter", "inline_container")):
            raise
        raise _not_written(path, str(error).splitlines()[0]) from error


def _not_written(path: str | Path, said: str) -> PipelineError:
    return PipelineError(
        f"{str(path)!r} could not be written: {said}. Allowed: a disk, a quota and a limit on the "
        "size of files (ulimit -f) that have room for the checkpoint. Remedy: make room or choose "
        "another output_dir; the checkpoints that were complete before are still complete, so that "
        "resume_from_checkpoint=True goes on from the newest of them."
    )


# -- digests -----------------------------------------------------------------------------------


class Hasher:
    """Makes a digest of bytes that come one after the other."""

    def __init__(self) -> None:
        self._bytes = self._block = self._all = 0

    def update(self, data: memoryview) -> None:
        """Add bytes; lets other threads run meanwhile."""
        while data:
            head = data[: BLOCK - self._bytes % BLOCK]
            self._block = zlib.crc32(head, self._block)
            self._bytes += len(head)
            data = data[len(head) :]
            if self._bytes % BLOCK == 0:
                self._end_block()

    def digest(self) -> Digest:
        """Of all that came; nothing can be added afterwards."""
        if self._bytes % BLOCK:
            self._end_block()
        return self._bytes, f"{self._all:08x}"

    def _end_block(self) -> None:
        self._all = zlib.crc32(self._block.to_bytes(4, "little"), self._all)
        self._block = 0


def digests_of(paths: list[Path]) -> list[Digest]:
    """Digests of files, in their order; blocks are read by up to eight threads.

    Raises:
        OSError: A file cannot be read.
    """
    sizes = [path.stat().st_size for path in paths]
    blocks = [
        (path, start)
        for path, size in zip(paths, sizes, strict=True)
        for start in range(0, size, BLOCK)
    ]
    threads = max(1, min(_THREADS, os.cpu_count() or 1, len(blocks)))
    with ThreadPoolExecutor(threads) as pool:
        crcs = iter(list(pool.map(_crc_of_block, blocks)))
    found = []
    for size in sizes:
        whole = 0
        for _ in range(0, size, BLOCK):
            whole = zlib.crc32(next(crcs).to_bytes(4, "little"), whole)
        found.append((size, f"{whole:08x}"))
    return found


def _crc_of_block(block: tuple[Path, int]) -> int:
    path, start = block
    crc, left, buffer = 0, BLOCK, memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[: min(left, _PIECE)])):
            crc = zlib.crc32(buffer[:count], crc)
            left -= count
    return crc


# -- tensors -----------------------------------------------------------------------------------


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> Digest:
    """Write a safetensors file, see that it is on the disk, and return its digest.

    Needs host memory for one tensor at a time: each is copied from its device, written and let go.
    Bytes are hashed by a second thread while the next ones are written.

    Raises:
        ConfigError: A tensor is of a kind that safetensors files cannot hold.
        PipelineError: The file could not be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Larger items first, so that every tensor lies at a multiple of its items' size.
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in ordered:
        tensor = tensors[name]
        refuse_other_tensors(tensor, name)
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    hasher = Hasher()
    with writing(path), path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        pending = None
        for part in (len(text).to_bytes(8, "little"), text, *ordered):
            view = memoryview(part if isinstance(part, bytes) else _bytes_of(tensors[part]))
            while view:
                piece, view = view[:BLOCK], view[BLOCK:]
                if pending is not None:
                    pending.result()
                pending = pool.submit(hasher.update, piece)
                while piece:
                    piece = piece[file.write(piece) :]
        if pending is not None:
            pending.result()
        os.fsync(file.fileno())
    return hasher.digest()


def refuse_other_tensors(tensor: Tensor, name: str) -> None:
    """Refuse tensors that are more than numbers in a row.

    Raises:
        ConfigError: It is of a subclass, sparse, or of a dtype that safetensors does not know.
    """
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.dtype not in DTYPE_NAMES:
        raise ConfigError(
            f"{name} is a {type(tensor).__name__} of {tensor.dtype}, which a checkpoint of a "
            "pipeline cannot hold. Allowed: plain tensors. Remedy: another optimizer (the "
            "Trainer's optim), or save_only_model=True."
        )


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


class TensorFiles:
    """The safetensors files of a folder; a tensor is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}

    def read(self, file: str, name: str) -> Tensor:
        """A tensor, in memory that is the file's: its pages are read when they are used.

        Raises:
            ConfigError: The file is not in this folder, is damaged, or has no such tensor.
        """
        path = inside(self._folder, file)
        with reading(path):
            if file not in self._files:
                refuse_other_files(path)
                self._files[file] = safe_open(path, framework="pt")
            tensor: Tensor = self._files[file].get_tensor(name)
            return tensor


def inside(folder: Path, name: object) -> Path:
    """The path of a file that a list in the folder names.

    Raises:
        ConfigError: The name is none of a file below `folder`.
    """
    if not is_inside(name):
        shown = repr(name)
        shown = shown if len(shown) < 80 else f"{shown[:77]}..."
        raise ConfigError(
            f"{str(folder)!r} lists the file {shown}, which is not in it. Allowed: names of files "
            "below the folder. Remedy: this is not as it was saved; resume from another checkpoint."
        )
    return folder / str(name)


def is_inside(name: object) -> bool:
    """Whether `name` is the relative name of a file below a folder; asks no file system."""
    if not isinstance(name, str) or not name.isprintable() or len(name.encode()) > 1024:
        return False
    parts = name.replace("\\", "/").split("/")
    return all(part not in ("", ".", "..") and len(part.encode()) < 256 for part in parts)


def refuse_other_files(path: Path) -> None:
    """Refuse what is no ordinary file, such as a pipe, which might never end.

    Raises:
        OSError: The path is missing or leads to something else.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path.name} is no ordinary file")


# -- everything else ---------------------------------------------------------------------------


def write_json(value: Any, path: Path) -> Digest:
    """Write a JSON file in one step: a reader finds the former one or this one.

    Raises:
        PipelineError: The file could not be written.
    """
    fresh = path.with_name(f"{path.name}.new")
    text = json.dumps(value, indent=1, sort_keys=True).encode()
    with writing(path):
        with fresh.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    hasher = Hasher()
    hasher.update(memoryview(text))
    return hasher.digest()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ConfigError: There is none, it is larger than 64 MiB, nested too deep, or damaged.
    """
    with reading(path):
        refuse_other_files(path)
        with path.open("rb") as file:
            text = file.read(MAX_JSON + 1)
        if len(text) > MAX_JSON:
            raise ValueError(f"it is larger than {MAX_JSON} bytes")
        value: object = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__} where an object belongs")
        return value


def encode(value: Any, path: str, keep: Callable[[str, Tensor], str]) -> Any:
    """What JSON can hold of a value, and the tensors in it.

    Args:
        value: None, numbers, texts, dtypes, tensors, arrays, and lists, tuples, dicts and Counters
            of these.
        path: Of the value; tensors in it are named after their own paths.
        keep: Takes a tensor and its path, and returns the name of the file that it will be in.

    Raises:
        ConfigError: There is something else in it, which could only be stored as code.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {"!float": repr(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return encode(value.item(), path, keep)
    if isinstance(value, torch.dtype):
        return {"!dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Tensor):
        refuse_other_tensors(value, path)
        return {"!tensor": keep(path, value)}
    if isinstance(value, np.ndarray):
        return {"!array": keep(path, torch.from_numpy(value.copy()))}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{path}/{index}", keep) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"!tuple": items}
    if isinstance(value, dict) and all(isinstance(k, str | int | float) for k in value):
        items = {k: encode(v, f"{path}/{k}", keep) for k, v in value.items()}
        if isinstance(value, Counter):
            return {"!counter": [list(item) for item in items.items()]}
        if all(isinstance(k, str) and not k.startswith("!") for k in items):
            return items
        return {"!dict": [list(item) for item in items.items()]}
    raise ConfigError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold without code. "
        "Allowed: numbers, texts, tensors, and lists, tuples and dicts of these. Remedy: another "
        "optimizer or scheduler, or save_only_model=True."
    )


def decode(value: Any, path: str, read: Callable[[str, str], Tensor]) -> Any:
    """What `encode` was given, of what it returned and the same path.

    `read` takes a file's and a tensor's name, and returns the tensor.

    Raises:
        ValueError: `encode` returns no such thing.
    """
    if isinstance(value, list):
        return [decode(item, f"{path}/{index}", read) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        if isinstance(value, int):
            float(value)  # or an OverflowError: no optimizer and no generator has such numbers
        return value
    tags = [key for key in value if key.startswith("!")]
    if not tags:
        return {key: decode(item, f"{path}/{key}", read) for key, item in value.items()}
    if len(value) != 1 or tags[0] not in _DECODERS:
        raise ValueError(f"{path} has the unknown tag {tags[0][:40]!r}")
    return _DECODERS[tags[0]](value[tags[0]], path, read)


def _decode_items(value: Any, path: str, read: Any) -> dict[Any, Any]:
    if any(isinstance(key, list | dict) for key, _ in value):
        raise ValueError(f"{path} has keys that are none")
    return {key: decode(item, f"{path}/{key}", read) for key, item in value}


def _decode_dtype(value: Any, path: str, read: Any) -> torch.dtype:
    found = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}
    return found[value]


_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_DECODERS: dict[str, Callable[[Any, str, Any], Any]] = {
    "!float": lambda value, path, read: _NOT_FINITE[value],
    "!dtype": _decode_dtype,
    # A copy: what is the file's would follow it when it is written anew.
    "!tensor": lambda value, path, read: read(value, path).clone(),
    "!array": lambda value, path, read: read(value, path).numpy().copy(),
    "!tuple": lambda value, path, read: tuple(decode(value, path, read)),
    "!dict": _decode_items,
    "!counter": lambda value, path, read: Counter(_decode_items(value, path, read)),
}


# -- marks of complete folders --------------------------------------------------------------------

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
"""Says what a folder lacks as a checkpoint; see `find_damage`."""


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


def find_damage(folder: Path, *, share: tuple[int, int] = (0, 1)) -> str | None:
    """Say what `folder` lacks as a checkpoint; None where nothing does.

    Reads all files that have digests; see [Note: what a digest is, and what it costs]. With `share`
    (i, n) only every n-th digest is compared, from the i-th on.

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
    run_folder: Path, judge: Judge = find_damage
) -> tuple[Path | None, dict[Path, str]]:
    """Find where a run can be resumed, in whose folder the `checkpoint-N` folders are.

    Returns:
        The newest complete checkpoint, if there is one, and what the newer ones lack, by `judge`.
    """
    torn = {}
    for folder in checkpoints_in(run_folder):
        lacks = judge(folder)
        if lacks is None:
            return folder, torn
        torn[folder] = lacks
    return None, torn


def check_complete(folder: Path, judge: Judge = find_damage) -> None:
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
