"""Files of a checkpoint: written with digests, read without running code, errors with a file name.

Tensors are safetensors files, everything else is JSON. Neither can hold code, so a checkpoint of
unknown origin can be resumed from and exported: at worst it is refused. Whatever goes wrong while a
file is read or written is raised again with the file's name. Nothing here knows ranks or models.

Not covered: what Transformers and Accelerate read themselves. They call `torch.load` with
`weights_only=True`.

[Note: marks of complete checkpoints]
Several ranks write into a folder, and any may die. So a mark that says "incomplete" is written
before the first of them writes, and is replaced atomically by one that lists every file with its
digest when all have written. A folder without a mark was not written by a pipeline; then what the
Trainer itself writes last, its state, stands for the mark. A mark has the number of the
checkpoint's format. Format 1, which is not written any more, has no number and notes sizes without
digests.

[Note: what a digest is, and what it costs]
The CRC-32 of a file's blocks' CRC-32s, a block being 64 MiB. It finds damage (a flipped bit, a torn
page). It is not a signature: whoever changes a file on purpose can change its digest, too. Of the
hashes in Python's standard library CRC-32 is the fastest: 2.2 GB/s on one core of a server (SHA-256
1.2, BLAKE2b 1.0). Reading a file out of the page cache and hashing it took 0.67 s for a GiB with
one thread (1.6 GB/s, on a busy machine). Up to eight threads hash blocks at once, and all ranks
share the files. A save hashes what it writes while it writes it.
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
from transformers.modeling_utils import str_to_torch_dtype

from sppo_hf.errors import ConfigError, PipelineError

Digest: TypeAlias = tuple[int, str]
"""Bytes of a file and eight hexadecimal digits; see [Note: what a digest is, and what it costs]."""

BLOCK_BYTES = 64 * 2**20
MAX_JSON = 64 * 2**20
"""Bytes of the largest JSON file that is read: an index of some 300,000 parameters."""

_READ_BYTES = 8 * 2**20
_MAX_THREADS = 8
_DTYPES = {**str_to_torch_dtype, "C64": torch.complex64}
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
"""Names of dtypes in safetensors files."""


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
        message = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ConfigError(
            f"{str(path)!r} cannot be read ({message}). Allowed: files as they were saved. Remedy: "
            "the file is damaged, or no checkpoint's; resume from another checkpoint."
        ) from error


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Raise errors of the file system inside as an error that names `path` or the file in it.

    Raises:
        PipelineError: A file could not be written.
    """
    try:
        yield
    except OSError as error:
        # Not errors of the network, which have no number, or these types.
        if error.errno is None or isinstance(error, ConnectionError | TimeoutError):
            raise
        raise _not_written(error.filename or path, error.strerror or str(error)) from error
    except RuntimeError as error:  # torch.save drops the OSError
        if not any(word in str(error) for word in ("PytorchStreamWriter", "inline_container")):
            raise
        raise _not_written(path, str(error).splitlines()[0]) from error


def _not_written(path: str | Path, reason: str) -> PipelineError:
    return PipelineError(
        f"{str(path)!r} could not be written: {reason}. Allowed: a disk, a quota and a limit on "
        "the size of files (ulimit -f) with enough space for the checkpoint. Remedy: free space or "
        "choose another output_dir; the checkpoints that were complete before are still complete, "
        "so that resume_from_checkpoint=True goes on from the newest of them."
    )


# -- digests -----------------------------------------------------------------------------------


class Hasher:
    """Computes a digest of bytes that come in pieces."""

    def __init__(self) -> None:
        self._num_bytes = self._block_crc = self._crc = 0

    def update(self, data: memoryview) -> None:
        """Add bytes; releases the GIL meanwhile."""
        while data:
            head = data[: BLOCK_BYTES - self._num_bytes % BLOCK_BYTES]
            self._block_crc = zlib.crc32(head, self._block_crc)
            self._num_bytes += len(head)
            data = data[len(head) :]
            if self._num_bytes % BLOCK_BYTES == 0:
                self._end_block()

    def digest(self) -> Digest:
        """Return the digest of all bytes; none can be added afterwards."""
        if self._num_bytes % BLOCK_BYTES:
            self._end_block()
        return self._num_bytes, f"{self._crc:08x}"

    def _end_block(self) -> None:
        self._crc = zlib.crc32(self._block_crc.to_bytes(4, "little"), self._crc)
        self._block_crc = 0


def digests_of(paths: list[Path]) -> list[Digest]:
    """Return digests of files, in order; blocks are read by up to eight threads.

    Raises:
        OSError: A file cannot be read.
    """
    sizes = [path.stat().st_size for path in paths]
    blocks = [
        (path, start)
        for path, size in zip(paths, sizes, strict=True)
        for start in range(0, size, BLOCK_BYTES)
    ]
    num_threads = max(1, min(_MAX_THREADS, os.cpu_count() or 1, len(blocks)))
    with ThreadPoolExecutor(num_threads) as pool:
        block_crcs = iter(list(pool.map(_crc_of_block, blocks)))
    digests = []
    for size in sizes:
        crc = 0
        for _ in range(0, size, BLOCK_BYTES):
            crc = zlib.crc32(next(block_crcs).to_bytes(4, "little"), crc)
        digests.append((size, f"{crc:08x}"))
    return digests


def _crc_of_block(block: tuple[Path, int]) -> int:
    path, start = block
    crc, left, buffer = 0, BLOCK_BYTES, memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[: min(left, _READ_BYTES)])):
            crc = zlib.crc32(buffer[:count], crc)
            left -= count
    return crc


# -- tensors -----------------------------------------------------------------------------------


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> Digest:
    """Write a safetensors file, flush it to the disk, and return its digest.

    Needs host memory for one tensor at a time: each is copied from its device, written and freed.
    A second thread hashes bytes while the next ones are written.

    Raises:
        ConfigError: A tensor is of a kind that safetensors files cannot hold.
        PipelineError: The file could not be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Larger items first, so that every tensor is aligned to its item size.
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in ordered:
        tensor = tensors[name]
        refuse_unsupported_tensor(tensor, name)
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
                piece, view = view[:BLOCK_BYTES], view[BLOCK_BYTES:]
                if pending is not None:
                    pending.result()
                pending = pool.submit(hasher.update, piece)
                while piece:
                    piece = piece[file.write(piece) :]
        if pending is not None:
            pending.result()
        os.fsync(file.fileno())
    return hasher.digest()


def refuse_unsupported_tensor(tensor: Tensor, name: str) -> None:
    """Refuse tensors that a safetensors file cannot hold.

    Raises:
        ConfigError: It is of a subclass, sparse, or of a dtype that safetensors does not know.
    """
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.dtype not in DTYPE_NAMES:
        raise ConfigError(
            f"{name} is a {type(tensor).__name__} of {tensor.dtype}, which a checkpoint of a "
            "pipeline cannot hold. Allowed: plain tensors. Remedy: another optimizer (the "
            "Trainer's optim), or save_only_model=True."
        )


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


class TensorFiles:
    """The safetensors files of a folder, opened when the first tensor of each is read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}

    def read(self, file: str, name: str) -> Tensor:
        """Return a tensor mapped from the file: its pages are read when they are used.

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
    """Return the path of a file that an index in the folder lists.

    Raises:
        ConfigError: The name is not that of a file below `folder`.
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
    """Whether `name` is a relative path below a folder; does not access the file system."""
    if not isinstance(name, str) or not name.isprintable() or len(name.encode()) > 1024:
        return False
    parts = name.replace("\\", "/").split("/")
    return all(part not in ("", ".", "..") and len(part.encode()) < 256 for part in parts)


def refuse_other_files(path: Path) -> None:
    """Refuse what is no regular file, such as a pipe, which might never end.

    Raises:
        OSError: The path is missing or leads to something else.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path.name} is no ordinary file")


# -- JSON ---------------------------------------------------------------------------


def write_json(value: Any, path: Path) -> None:
    """Write a JSON file atomically: a reader finds the former one or this one.

    Raises:
        PipelineError: The file could not be written.
    """
    temporary = path.with_name(f"{path.name}.new")
    text = json.dumps(value, indent=1, sort_keys=True).encode()
    with writing(path):
        with temporary.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


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
    """Return a value as JSON types, with tensors put into a file.

    Args:
        value: None, numbers, texts, dtypes, tensors, arrays, and lists, tuples, dicts and Counters
            of these.
        path: Name of the value in errors; tensors in it are named by their paths below it.
        keep: Takes a tensor's path and the tensor, and returns the file that it will be in.

    Raises:
        ConfigError: It contains another type, which could only be stored as code.
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
        refuse_unsupported_tensor(value, path)
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
    """Return the value that `encode` returned `value` for, with the same path.

    `read` takes a file's and a tensor's name, and returns the tensor.

    Raises:
        ValueError: `encode` never returns this.
    """
    if isinstance(value, list):
        return [decode(item, f"{path}/{index}", read) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        if isinstance(value, int):
            float(value)  # raises OverflowError for integers that no optimizer or generator has
        return value
    tags = [key for key in value if key.startswith("!")]
    if not tags:
        return {key: decode(item, f"{path}/{key}", read) for key, item in value.items()}
    if len(value) != 1 or tags[0] not in _DECODERS:
        raise ValueError(f"{path} has the unknown tag {tags[0][:40]!r}")
    return _DECODERS[tags[0]](value[tags[0]], path, read)


def _decode_items(value: Any, path: str, read: Any) -> dict[Any, Any]:
    if any(isinstance(key, list | dict) for key, _ in value):
        raise ValueError(f"{path} has lists or objects for keys")
    return {key: decode(item, f"{path}/{key}", read) for key, item in value}


_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}
_DECODERS: dict[str, Callable[[Any, str, Any], Any]] = {
    "!float": lambda value, path, read: _NOT_FINITE[value],
    "!dtype": lambda value, path, read: _BY_NAME[value],
    # A copy: a tensor mapped from the file would change when the file is written again.
    "!tensor": lambda value, path, read: read(value, path).clone(),
    "!array": lambda value, path, read: read(value, path).numpy().copy(),
    "!tuple": lambda value, path, read: tuple(decode(value, path, read)),
    "!dict": _decode_items,
    "!counter": lambda value, path, read: Counter(_decode_items(value, path, read)),
}


# -- marks of complete folders --------------------------------------------------------------------

FORMAT = 2
"""Number of the format that is written; formats up to it can be read."""

MARK_NAME = "sppo_checkpoint.json"

STATE_FOLDER = "sppo_optimizer"
"""Folder with optimizers, schedulers and random state. Its name contains "optimizer" so that a
Trainer without SPPO, which finds no optimizer.pt, stops instead of starting a fresh optimizer."""

TRAINER_STATE_NAME = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_HASHED = {".safetensors", ".pt", ".pth", ".bin"}

FileStates = dict[str, tuple[int, int, int]]
"""Inode, size and time of the last change of each file, by name; rewriting a file changes them."""

FindDamage = Callable[[Path], str | None]
"""Returns why a folder is no complete checkpoint; see `find_damage`."""


def mark_incomplete(folder: Path) -> FileStates:
    """Make `folder` and mark it as being written; returns the files in it already."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json({"complete": False}, folder / MARK_NAME)
    return _file_states(folder)


def mark_complete(
    folder: Path,
    about: Mapping[str, Any],
    *,
    existing: FileStates | None = None,
    digests: Mapping[str, Digest] | None = None,
) -> None:
    """Mark `folder` as complete, with a list of its files.

    Files that are read when training resumes are listed with their digest, other JSON files by name
    only: people edit configurations.

    `about` are other entries of the mark, in JSON types. A file that is as in `existing`, which
    `mark_incomplete` returned, is not listed. `digests` are, by name, those of files that were
    hashed when they were written; others are read.
    """
    digests = digests or {}
    states = _file_states(folder)
    names = sorted(name for name, state in states.items() if (existing or {}).get(name) != state)
    # Of another size: it was replaced after it had been hashed.
    to_hash = [n for n in names if _is_hashed(n) and digests.get(n, (-1, ""))[0] != states[n][1]]
    files: dict[str, Any] = {n: list(digests[n]) if n in digests else None for n in names}
    for name, digest in zip(to_hash, digests_of([folder / n for n in to_hash]), strict=True):
        files[name] = list(digest)
    mark = {"complete": True, "format": FORMAT, **about, "files": files}
    write_json(mark, folder / MARK_NAME)


def read_mark(folder: Path) -> dict[str, Any] | None:
    """Return the mark of a folder; None where there is none, `{}` where it cannot be read.

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
    """Return why `folder` is no complete checkpoint; None if it is one.

    Reads all files that have digests; see [Note: what a digest is, and what it costs]. With `share`
    (i, n) only every n-th digest is compared, from the i-th on.

    Raises:
        ConfigError: It was written in a later format.
    """
    mark = read_mark(folder)
    if mark is None:  # the Trainer itself saved it, without `mark_incomplete`
        last = MARK_NAME if (folder / STATE_FOLDER).is_dir() else TRAINER_STATE_NAME
        if not (folder / last).is_file():
            return f"it has no {last}, which is written last"
        try:
            read_json(folder / last)
        except ConfigError:
            return f"its {last} is damaged"
        return None
    if mark and mark.get("complete") is not True:
        return "its save did not come to its end"
    files = _listed_files(mark)
    if files is None:
        return f"its {MARK_NAME} is damaged"
    try:
        return _find_changed_file(folder, files, share)
    except OSError as error:
        return f"{error.filename or 'a file'} cannot be read ({error.strerror})"


def _find_changed_file(
    folder: Path, files: Mapping[str, tuple[int | None, str | None]], share: tuple[int, int]
) -> str | None:
    """Compare files with their listed size and hash; returns the first difference."""
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if size is not None and path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    hashed = [(n, (size or 0, crc)) for n, (size, crc) in files.items() if crc is not None]
    # The largest first, so that shares are about equal.
    own = sorted(hashed, key=lambda item: (-item[1][0], item[0]))[share[0] :: share[1]]
    found = digests_of([folder / name for name, _ in own])
    for (name, noted), digest in zip(own, found, strict=True):
        if digest != noted:
            return f"the bytes of {name} are not those that were saved"
    return None


def _listed_files(mark: Mapping[str, Any]) -> dict[str, tuple[int | None, str | None]] | None:
    """Return size and hash, or None, of each listed file; None if the mark is damaged."""
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
    """Return the `checkpoint-N` folders of a run, newest (highest N) first."""
    found = []
    for path in run_folder.iterdir() if run_folder.is_dir() else ():
        match = _CHECKPOINT.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found, reverse=True)]


def newest_complete(
    run_folder: Path, find_damage: FindDamage = find_damage
) -> tuple[Path | None, dict[Path, str]]:
    """Find the newest complete checkpoint of a run, to resume from.

    Returns:
        Its folder, if there is one, and why the newer ones are not complete.
    """
    incomplete = {}
    for folder in checkpoints_in(run_folder):
        damage = find_damage(folder)
        if damage is None:
            return folder, incomplete
        incomplete[folder] = damage
    return None, incomplete


def check_complete(folder: Path, find_damage: FindDamage = find_damage) -> None:
    """Refuse a checkpoint whose save was cut short, or that was damaged later.

    Raises:
        ConfigError: Naming the folder, the damage and the newest complete checkpoint beside it.
    """
    damage = find_damage(folder) if folder.is_dir() else None
    if damage is None:
        return
    newest, _ = newest_complete(folder.parent, find_damage)
    remedy = (
        f"resume from {str(newest)!r}, the newest complete one"
        if newest
        else f"start anew: no checkpoint in {str(folder.parent)!r} is complete"
    )
    raise ConfigError(
        f"The checkpoint {str(folder)!r} is torn: {damage}. Allowed: complete checkpoints. "
        f"Remedy: {remedy}, and delete the torn one."
    )


def _is_hashed(name: str) -> bool:
    """Whether a file is read when training resumes."""
    path = Path(name)
    read = path.name == TRAINER_STATE_NAME or path.name.endswith(".index.json")
    return path.suffix in _HASHED or read or path.parts[0] == STATE_FOLDER


def _file_states(folder: Path) -> FileStates:
    """Return the state of the files that may belong to a checkpoint, by name."""
    states = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if not (_is_hashed(name) or path.suffix == ".json"):
            continue
        # Of another checkpoint, or a repository, inside this folder.
        nested = any(
            _CHECKPOINT.fullmatch(part) or part.startswith(".") for part in name.split("/")[:-1]
        )
        if path.is_file() and not nested and not path.name.startswith(MARK_NAME):
            entry = path.stat()
            states[name] = entry.st_ino, entry.st_size, entry.st_mtime_ns
    return states
