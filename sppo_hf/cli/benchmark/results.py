"""Jobs and rows of a benchmark, and the JSON lines that rows are kept in.

The file is the one truth: table, picture and what a resumed benchmark leaves out are all read from
it. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from sppo_hf.errors import ConfigError
from sppo_hf.reading import read_text

_NOT_IN_KEY = ("trace", "predict")
_NOT_IN_SETTINGS = (*_NOT_IN_KEY, "contender", "total_tokens", "layers", "steps", "warm_up")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One contender at one length under the settings of a benchmark."""

    model: str
    """Shipped name, or path of a `config.json` or of a folder that holds one."""

    contender: str
    """Name as `contenders.parse` takes it."""

    total_tokens: int
    """Length of the one row of a batch."""

    device: str
    """"cuda", "cuda:1" or "cpu"."""

    device_name: str = ""
    """What it is called: rows of another device are other measurements."""

    dtype: str = "bfloat16"
    """Dtype of the weights, and of the compute unless `autocast` says otherwise."""

    lora_rank: int | None = None
    """Rank of adapters on all linear layers; None trains all weights."""

    lora_dtype: str = "float32"
    """Dtype of the adapters: float32, as PEFT makes those of 16-bit models, or `dtype`."""

    steps: int = 3
    """Steps that are measured."""

    warm_up: int = 3
    """Steps before them. What ours learns from its second step it plans anew within the third."""

    attention: str = "auto"
    """As `sppo bench --attention` takes it."""

    autocast: bool = False
    """Train under bfloat16 autocast, as `TrainingArguments(bf16=True)` does."""

    device_memory: int | float | str | None = None
    """Budget on the device for ours, and on CUDA the most that any contender is given."""

    host_memory: int | float | str | None = None
    """Budget in host memory for ours."""

    hardware: str | None = None
    """Hardware profile for ours; None takes what is known of this device."""

    layers: int | None = None
    """Keep only so many decoder layers; None for all."""

    seed: int = 0
    """Of weights, adapters and tokens."""

    trace: str | None = None
    """File for a profiler's trace of one more step; None for none."""

    predict: bool = False
    """Also ask the estimator for the longest length that fits (ours only)."""

    def key(self) -> str:
        """What tells this measurement from others, as text."""
        return _text(self, _NOT_IN_KEY)

    def settings(self) -> str:
        """What contenders and lengths of one comparison have in common, as text."""
        return _text(self, _NOT_IN_SETTINGS)

    def replace(self, **changes: Any) -> Self:
        """Returns the job with other values."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields in plain JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Reads what `to_dict` returned; fields of other versions are passed over."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in fields.items() if name in known})


def _text(job: Job, left_out: tuple[str, ...]) -> str:
    fields = {name: value for name, value in job.to_dict().items() if name not in left_out}
    return json.dumps(fields, sort_keys=True)


Status = Literal[
    "measured",
    "extrapolated",
    "out of memory",
    "killed",
    "timeout",
    "failed",
    "not available",
    "not tried",
]
"""What became of a job. "killed": by SIGKILL, which is usually the host's memory. "failed": by any
other error. "not available": a package or a device is missing. "not tried": a shorter length did
not fit."""

Kind = Literal["speed", "part", "try", "longest"]
"""What a row is: "speed" one contender at one length, "part" one with few layers for extrapolating,
"try" one of a search for the longest length, "longest" that search's result."""

FILE_NAME = "results.jsonl"
_MOST_BYTES = 2**25
_TRAINED: tuple[Status, ...] = ("measured", "extrapolated")
# Not "failed": whatever it was may have been mended.
_FINAL: tuple[Status, ...] = (*_TRAINED, "out of memory", "killed", "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What was measured; what is not known is None.

    See [Note: what the numbers of a benchmark mean] in this package's docstring.
    """

    step_seconds: tuple[float, ...] = ()
    """Each measured step."""

    median_step_seconds: float | None = None
    """Their median."""

    tokens_per_second: float | None = None
    """Tokens of a row over the median."""

    model_flops: float | None = None
    """FLOPs of the model per step: causal attention counted once, recomputation not counted."""

    model_tflops: float | None = None
    """Model FLOPs per second, in 1e12."""

    mfu: float | None = None
    """The same over the device's dense bfloat16 peak; None where that is unknown."""

    device_allocated_bytes: int | None = None
    """Peak of what tensors took on the CUDA device."""

    device_reserved_bytes: int | None = None
    """Peak of what PyTorch's allocator took of the device."""

    device_retries: int | None = None
    """Times that allocator had to give its cache back and try again, which costs time."""

    host_peak_bytes: int | None = None
    """Largest resident memory of the process in training."""

    host_loaded_bytes: int | None = None
    """Resident memory when the model was there and training had not begun."""

    pinned_bytes: int | None = None
    """Peak of page-locked host bytes that PyTorch's allocator held, rounded up as it does."""

    stall_seconds: float | None = None
    """Of a step, the mean time in which compute stood still for copies; known for ours only."""

    forward_chunk_seconds: tuple[float, ...] = ()
    """Median per chunk; the last one runs until backward begins. Ours only."""

    backward_chunk_seconds: tuple[float, ...] = ()
    """Median per chunk, in the chunks' order (backward runs them in reverse)."""

    chunk_lengths: tuple[int, ...] = ()
    """Tokens of each chunk; ours only."""

    planned_seconds: float | None = None
    """What the plan predicted for forward and backward; ours only."""

    planned_device_bytes: int | None = None
    """The device's peak as the plan predicted it; ours only."""

    planned_longest_tokens: int | None = None
    """The longest length that the estimator says fits; ours only, and only where it was asked."""

    first_loss: float | None = None
    """Loss of the very first step, before any weight changed."""

    loss: float | None = None
    """Loss of the last measured step."""

    kernel: str | None = None
    """The attention kernel that ran, where one was chosen."""

    longest_tokens: int | None = None
    """Of a search: the longest length that trained."""

    failed_tokens: int | None = None
    """Of a search: the shortest length that did not."""

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Reads what `dataclasses.asdict` returned; fields of other versions are passed over."""
        known = {f.name for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()
        }
        return cls(**{name: value for name, value in values.items() if name in known})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the file."""

    kind: Kind = "speed"
    status: Status
    job: Job
    reason: str = ""
    """Why it was not measured, or how it was extrapolated."""

    numbers: Numbers = Numbers()
    environment: dict[str, Any] = field(default_factory=dict)
    """Device, its memory, the host's, versions, date, command."""

    wall_seconds: float | None = None
    """Duration of the whole process."""

    @property
    def trained(self) -> bool:
        """Whether the length was trained, or would be if it fitted."""
        return self.status in _TRAINED

    @property
    def final(self) -> bool:
        """Whether running it again would say the same."""
        return self.status in _FINAL

    def to_dict(self) -> dict[str, Any]:
        """Returns the row in plain JSON types; numbers that are not known are left out."""
        numbers = {
            name: value
            for name, value in dataclasses.asdict(self.numbers).items()
            if value is not None and value != ()
        }
        return {**dataclasses.asdict(self), "job": self.job.to_dict(), "numbers": numbers}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Reads what `to_dict` returned.

        Raises:
            KeyError, TypeError: the fields are not those of a row.
        """
        return cls(
            kind=fields["kind"],
            status=fields["status"],
            job=Job.from_dict(fields["job"]),
            reason=fields.get("reason", ""),
            numbers=Numbers.from_dict(fields.get("numbers", {})),
            environment=fields.get("environment", {}),
            wall_seconds=fields.get("wall_seconds"),
        )


class ResultFile:
    """The rows of one folder; every row is on the disk before the next begins."""

    def __init__(self, folder: Path) -> None:
        """Reads what is there.

        Raises:
            ConfigError: the folder or its file cannot be read, or a line is damaged.
        """
        self.path = folder / FILE_NAME
        self._rows: dict[tuple[Kind, str], Row] = {}
        for row in _read(self.path):
            self._rows[row.kind, row.job.key()] = row

    def rows(self, *kinds: Kind) -> list[Row]:
        """Returns the newest row of every job, in the order of their first appearance.

        Args:
            *kinds: only these; all if there are none.
        """
        return [row for row in self._rows.values() if not kinds or row.kind in kinds]

    def find(self, kind: Kind, job: Job) -> Row | None:
        """Returns the row of a job, or None."""
        return self._rows.get((kind, job.key()))

    def add(self, row: Row) -> None:
        """Appends a row; one that says what the job's last row said is not written again.

        Raises:
            ConfigError: the file cannot be written.
        """
        before = self.find(row.kind, row.job)
        if before is not None and not row.final and before.status == row.status:
            return
        self._rows[row.kind, row.job.key()] = row
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            cut_off = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n" * cut_off + json.dumps(row.to_dict()) + "\n")
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written: {error.strerror}. Remedy: name a writable folder "
                "with --output."
            ) from error


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """Returns rows that may be compared with each other, together: same settings, same device."""
    found: dict[tuple[str, str], list[Row]] = {}
    devices: dict[str, str] = {}
    for row in (listed := list(rows)):
        if "device_name" in row.environment:
            devices[row.job.settings()] = str(row.environment["device_name"])
    for row in listed:
        settings = row.job.settings()
        # A row without an environment (nothing ran) belongs to the device of the others.
        device = row.environment.get("device_name", devices.get(settings, ""))
        found.setdefault((settings, str(device)), []).append(row)
    return list(found.values())


def best_environment(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the environment of the last row that has one; {} if none has."""
    return next((row.environment for row in reversed(rows) if row.environment), {})


def _read(path: Path) -> list[Row]:
    if not os.path.lexists(path):
        return []
    remedy = "name another folder"
    text = read_text(path, what="results", max_bytes=_MOST_BYTES, remedy=remedy)
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            fields: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue  # cut off when the machine went down; its job runs again
        try:
            rows.append(Row.from_dict(fields))
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"line {number} of {path} is no row of a benchmark ({error!r}). Remedy: mend or "
                "delete the line, or name another folder."
            ) from error
    return rows
