"""Jobs and rows of a benchmark, and the file of JSON lines that holds the rows.

Tables, pictures, and what a resumed benchmark skips are all read from that file. Imports no torch.
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
from sppo_hf.planning.hardware import peak_flops
from sppo_hf.text_files import read_text

_NOT_IN_KEY = ("trace", "predict")
_NOT_IN_SETTINGS = (*_NOT_IN_KEY, "contender", "total_tokens", "layers", "steps", "warm_up")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One contender at one length, under the settings of a benchmark."""

    model: str
    """Shipped name, or path of a `config.json` or of a folder that holds one."""

    contender: str
    """Name as `contenders.parse` takes it."""

    total_tokens: int
    """Tokens of the one row of each batch."""

    device: str
    """"cuda", the only device that workers see, or "cpu"."""

    device_name: str = ""
    """Name of the device's model, which distinguishes measurements."""

    dtype: str = "bfloat16"
    """Dtype of the weights, and of compute unless `autocast` is set."""

    lora_rank: int | None = None
    """Rank of adapters on all linear layers; None trains all weights."""

    lora_dtype: str = "float32"
    """Dtype of the adapters: float32, PEFT's default for 16-bit models, or `dtype`."""

    steps: int = 3
    """Steps that are measured."""

    warm_up: int = 3
    """Steps before them. sppo corrects its plan in the third step, from measuring the second."""

    attention: str = "auto"
    """Value of `sppo bench --attention`."""

    autocast: bool = False
    """Train under bfloat16 autocast, as `TrainingArguments(bf16=True)` does."""

    device_memory: int | float | str | None = None
    """Device budget of sppo, and on CUDA a limit for every contender."""

    host_memory: int | float | str | None = None
    """Host memory budget of sppo."""

    hardware: str | None = None
    """Hardware profile for sppo; None takes what is known of this device."""

    layers: int | None = None
    """Number of decoder layers that are kept; None for all."""

    seed: int = 0
    """Seed of weights, adapters and tokens."""

    trace: str | None = None
    """File for a profiler's trace of one further step; None for no trace."""

    predict: bool = False
    """Whether the estimator also predicts the longest length that fits (sppo only)."""

    def key(self) -> str:
        """Return as text what distinguishes this measurement from others."""
        return _text(self, _NOT_IN_KEY)

    def settings(self) -> str:
        """Return as text the settings that all jobs of one comparison share."""
        return _text(self, _NOT_IN_SETTINGS)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with changed fields."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Read what `dataclasses.asdict` returned; other versions' unknown fields are ignored."""
        return cls(**_known_fields(cls, fields))


def _known_fields(kind: type[Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of JSON that a dataclass has, lists as tuples."""
    known = {field.name for field in dataclasses.fields(kind)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in fields.items()
        if name in known
    }


def _text(job: Job, left_out: tuple[str, ...]) -> str:
    fields = dataclasses.asdict(job).items()
    return json.dumps({k: v for k, v in fields if k not in left_out}, sort_keys=True)


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
"""How a job ended. "killed": by SIGKILL, usually because host memory ran out. "failed": by any
other error. "not available": a package or a device is missing. "not tried": a shorter length did
not fit."""

Kind = Literal["speed", "part", "try", "longest"]
"""Kind of a row. "speed": one contender at one length. "part": a model of few layers, to
extrapolate from. "try": one length of a search for the longest. "longest": that search's result."""

FILE_NAME = "results.jsonl"
_MAX_FILE_BYTES = 2**25
_TRAINED: tuple[Status, ...] = ("measured", "extrapolated")
# Not "failed": its cause may have been removed.
_FINAL: tuple[Status, ...] = (*_TRAINED, "out of memory", "killed", "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Measured numbers, None where unknown; see [Note: what the numbers of a benchmark mean]."""

    step_seconds: tuple[float, ...] = ()
    """Seconds of each measured step."""

    warm_up_seconds: tuple[float, ...] = ()
    """Seconds of each step before them; ours plans, page-locks and corrects its plan in these."""

    median_step_seconds: float | None = None
    """Median of these."""

    tokens_per_second: float | None = None
    """Tokens of a row over the median seconds."""

    model_flops: float | None = None
    """FLOPs of the model per step, causal attention counted once, without recomputation."""

    model_tflops: float | None = None
    """Model FLOPs per second, in 1e12."""

    mfu: float | None = None
    """Model FLOPs per second over the device's dense bfloat16 peak; None where that is unknown."""

    device_allocated_bytes: int | None = None
    """Peak of the bytes that tensors took on the CUDA device."""

    device_reserved_bytes: int | None = None
    """Peak of the bytes that PyTorch's allocator reserved on the device."""

    device_step_bytes: tuple[int, ...] = ()
    """Peak of the bytes that tensors took in each step, those before the measured ones too."""

    device_outside_bytes: int | None = None
    """Bytes of the device that were in use after the last step outside of PyTorch's allocator: of
    the driver, kernels' code and cuDNN's plans, and of other processes."""

    device_retries: int | None = None
    """Times that the allocator had to release its cache and retry, which is slow."""

    host_peak_bytes: int | None = None
    """Peak of the process's resident memory in training."""

    host_loaded_bytes: int | None = None
    """Resident memory after the model was made, before training."""

    pinned_bytes: int | None = None
    """Peak of the page-locked host bytes, as the allocators round them up."""

    stall_seconds: float | None = None
    """Mean seconds of a step in which compute waited for copies; sppo only."""

    forward_chunk_seconds: tuple[float, ...] = ()
    """Median per chunk, [chunks]; the last lasts until backward begins. sppo only."""

    backward_chunk_seconds: tuple[float, ...] = ()
    """Median per chunk, [chunks] in the order of the sequence. sppo only."""

    chunk_lengths: tuple[int, ...] = ()
    """Tokens of each chunk, [chunks]; sppo only."""

    planned_seconds: float | None = None
    """Predicted seconds of forward and backward; sppo only."""

    planned_device_bytes: int | None = None
    """Predicted peak on the device; sppo only."""

    planned_device_causes: dict[str, int] | None = None
    """The same peak by cause of the bytes."""

    planned_host_bytes: int | None = None
    """Peak in host memory that the last plan of ours predicts."""

    correction: dict[str, float] | None = None
    """Measured over predicted seconds with which that plan was made, by kind of work."""

    planned_longest_tokens: int | None = None
    """Predicted longest length that fits; sppo only, and only if the job has `predict`."""

    first_loss: float | None = None
    """Loss of the first step, before any weight changed."""

    loss: float | None = None
    """Loss of the last measured step."""

    kernel: str | None = None
    """Name of the attention kernel, where one was chosen."""

    longest_tokens: int | None = None
    """Longest length that trained, in a row of kind "longest"."""

    failed_tokens: int | None = None
    """Shortest length that did not, in a row of kind "longest"."""

    def with_speed(self, seconds: float, total_tokens: int, device_name: str | None) -> Numbers:
        """Return a copy with the speeds that follow from the median seconds of a step.

        Args:
            seconds: Of a step.
            total_tokens: Of a step.
            device_name: Name of a CUDA device's model, for its peak; None for others.
        """
        assert self.model_flops is not None, "the FLOPs of a model are always known"
        flops_per_second = self.model_flops / seconds
        peak = None if device_name is None else peak_flops(device_name)
        return dataclasses.replace(
            self,
            median_step_seconds=seconds,
            tokens_per_second=total_tokens / seconds,
            model_tflops=flops_per_second / 1e12,
            mfu=None if peak is None else flops_per_second / peak,
        )

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Read what `dataclasses.asdict` returned; unknown fields are ignored."""
        return cls(**_known_fields(cls, fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the file."""

    kind: Kind = "speed"
    status: Status
    job: Job
    reason: str = ""
    """Why the job was not measured, or how its row was extrapolated."""

    numbers: Numbers = Numbers()
    environment: dict[str, Any] = field(default_factory=dict)
    """Device, its memory, the host's memory, versions, date, command line."""

    wall_seconds: float | None = None
    """Seconds from when a worker was given the job to the worker's end."""

    @property
    def trained(self) -> bool:
        """Whether the length was trained, or extrapolated."""
        return self.status in _TRAINED

    @property
    def final(self) -> bool:
        """Whether the job need not be run again."""
        return self.status in _FINAL

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON types, without unknown numbers."""
        fields = dataclasses.asdict(self)
        numbers = fields["numbers"].items()
        fields["numbers"] = {k: v for k, v in numbers if v is not None and v != ()}
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Read what `to_dict` returned.

        Raises:
            KeyError, TypeError: The fields are not those of a row.
        """
        job, numbers = Job.from_dict(fields["job"]), Numbers.from_dict(fields.get("numbers", {}))
        return cls(**{**_known_fields(cls, fields), "job": job, "numbers": numbers})


class ResultFile:
    """The rows of one folder; each is written before the next job begins."""

    def __init__(self, folder: Path) -> None:
        """Read the rows that the folder holds.

        Raises:
            ConfigError: The folder or its file cannot be read, or a line is damaged.
        """
        self.path = folder / FILE_NAME
        self._rows: dict[tuple[Kind, str], Row] = {}
        for row in _read(self.path):
            self._rows[row.kind, row.job.key()] = row

    def rows(self, *kinds: Kind) -> list[Row]:
        """Return the newest row of every job, in the order of their first appearance.

        Args:
            *kinds: Only rows of these kinds; all by default.
        """
        return [row for row in self._rows.values() if not kinds or row.kind in kinds]

    def find(self, kind: Kind, job: Job) -> Row | None:
        """Return the row of a job, or None."""
        return self._rows.get((kind, job.key()))

    def add(self, row: Row) -> None:
        """Append a row, unless it only repeats the job's last one.

        Raises:
            ConfigError: The file cannot be written.
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
    """Group rows that may be compared with each other: same settings, same device."""
    found: dict[tuple[str, str], list[Row]] = {}
    devices: dict[str, str] = {}
    for row in (listed := list(rows)):
        if "device_name" in row.environment:
            devices[row.job.settings()] = str(row.environment["device_name"])
    for row in listed:
        settings = row.job.settings()
        # A row without an environment (nothing ran) counts for the other rows' device.
        device = row.environment.get("device_name", devices.get(settings, ""))
        found.setdefault((settings, str(device)), []).append(row)
    return list(found.values())


def best_environment(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the environment of the last row whose process described its machine; {} if none did.

    One that failed before has only its command.
    """
    return next((row.environment for row in reversed(rows) if "versions" in row.environment), {})


def _read(path: Path) -> list[Row]:
    if not os.path.lexists(path):
        return []
    remedy = "name another folder"
    text = read_text(path, what="results", max_bytes=_MAX_FILE_BYTES, remedy=remedy)
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            fields: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue  # cut off by a crash; the job runs again
        try:
            rows.append(Row.from_dict(fields))
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"line {number} of {path} is no row of a benchmark ({error!r}). Remedy: mend or "
                "delete the line, or name another folder."
            ) from error
    return rows
