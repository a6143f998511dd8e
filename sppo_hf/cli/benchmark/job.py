"""Job: everything that one worker is told, and what makes two jobs the same measurement."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Self

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
    """One of `kernels.CHOICES`."""

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
