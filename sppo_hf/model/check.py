"""Check one model by name: is it exact, or refused and why?

What `sppo check` and the README's table of families are made of: finds or builds a small model,
compares it unmodified and converted, and turns what happened into one result. Knows nothing of
terminals and files to write; raises only for input that names no model at all.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.model.exactness import compare, compare_drift
from sppo_hf.model.tiny import build_tiny_model, make_batch, model_from_config, shrunk_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["CheckResult", "check_config", "check_model", "small_model"]

LARGEST_PARAMETERS = 20_000_000
"""A local model with more parameters than this is checked as a tiny random one of its config."""

_DRIFT_BATCHES = 4

_NAMES = (
    "Give a Transformers model type such as 'llama', a folder with a config.json, a config.json,"
    " or a hub id that is cached or can be downloaded."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What came of checking one model."""

    name: str
    """As it was asked for."""
    status: Literal["exact", "not exact", "refused"]
    model_class: str = ""
    """Transformers class of the model; empty where it could not be built."""
    reason: str = ""
    """Why it was refused."""
    error: float | None = None
    """Worst error of loss and gradients; in low precision the distance from float32."""
    allowed: float | None = None
    """Largest error that counts as exact."""
    loss: float | None = None
    reference_loss: float | None = None
    worst_parameters: tuple[tuple[str, float], ...] = ()
    """Names and errors of the worst parameters, the worst first; empty in low precision."""
    num_chunks: int | None = None
    num_parameters: int | None = None
    dtype: str = "float64"
    random_weights: bool = True
    """False where a local model's own weights were used."""


def check_model(
    name: str,
    config: SPPOConfig,
    *,
    rows: int = 2,
    tokens: int = 29,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> CheckResult:
    """Compare loss and gradients of one model with and without chunks.

    Args:
        name: see `small_model`.
        config: the settings of the converted model.
        rows: sequences of the batch; the last is padded by a third if there are several.
        tokens: length of each.
        dtype: float64 and float32 compare with the unmodified model directly; bfloat16 and
            float16 compare both models' distances from float32.
        seed: of weights and batch.

    Raises:
        ConfigError: `name` is no model, or `config` does not fit the batch.
    """
    direct = dtype in (torch.float64, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, random_weights = small_model(name, dtype=dtype if direct else torch.float32)
        return _check(model, random_weights, name, config, rows, tokens, dtype, seed)


def check_config(hf_config: PretrainedConfig, config: SPPOConfig) -> CheckResult:
    """The same for a tiny random model of a Transformers configuration, in float64.

    Raises:
        ConfigError: no tiny model of this configuration can be built.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _tiny_of(hf_config, torch.float64)
        return _check(model, True, hf_config.model_type, config, 2, 29, torch.float64, 0)


def _check(
    model: PreTrainedModel,
    random_weights: bool,
    name: str,
    config: SPPOConfig,
    rows: int,
    tokens: int,
    dtype: torch.dtype,
    seed: int,
) -> CheckResult:
    direct = dtype in (torch.float64, torch.float32)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    padding = (0,) * (rows - 1) + (tokens // 3,) if rows > 1 else ()
    batches = [
        make_batch(
            rows=rows, tokens=tokens, vocab_size=vocab_size, padding=padding, seed=seed + index
        )
        for index in range(1 if direct else _DRIFT_BATCHES)
    ]
    facts: dict[str, Any] = {
        "name": name,
        "model_class": type(model).__name__,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
        "random_weights": random_weights,
    }
    try:
        if direct:
            return _direct(model, batches[0], config, facts)
        return _by_drift(model, batches, config, dtype, facts)
    except UnsupportedModelError as error:
        return CheckResult(status="refused", reason=str(error), **facts)


def _direct(
    model: PreTrainedModel,
    batch: dict[str, torch.Tensor],
    config: SPPOConfig,
    facts: dict[str, Any],
) -> CheckResult:
    report = compare(model, batch, config)
    return CheckResult(
        status="exact" if report.exact else "not exact",
        error=report.error,
        allowed=report.tolerance,
        loss=report.loss,
        reference_loss=report.reference_loss,
        worst_parameters=tuple((item.name, item.error) for item in report.parameters[:5]),
        num_chunks=report.num_chunks,
        **facts,
    )


def _by_drift(
    model: PreTrainedModel,
    batches: list[dict[str, torch.Tensor]],
    config: SPPOConfig,
    dtype: torch.dtype,
    facts: dict[str, Any],
) -> CheckResult:
    report = compare_drift(model, batches, config, dtype=dtype)
    return CheckResult(
        status="exact" if report.exact else "not exact",
        error=report.drift,
        allowed=report.allowed_drift,
        loss=report.loss,
        reference_loss=report.unmodified_loss,
        **facts,
    )


def small_model(name: str, *, dtype: torch.dtype = torch.float64) -> tuple[PreTrainedModel, bool]:
    """Find or build the small model that stands for `name`.

    Args:
        name: a tiny family or Transformers model type; a local folder with a model (its own
            weights if it has at most 20 million parameters, else a tiny random model of its
            configuration); a `config.json`; or a hub id, of which only the configuration is read.
        dtype: of the weights.

    Returns:
        The model in training mode on the CPU, and whether its weights are random.

    Raises:
        ConfigError: there is no such model, or it is no causal language model.
    """
    path = Path(name).expanduser()
    if path.exists() or "/" in name or name.endswith(".json"):
        config = _read_config(name, path)
        if path.is_dir() and _parameters(config) <= LARGEST_PARAMETERS and _has_weights(path):
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
            return model.train(), False
        return _tiny_of(config, dtype), True
    return build_tiny_model(name, dtype=dtype), True


def _tiny_of(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    return model_from_config(shrunk_config(config), dtype=dtype)


def _read_config(name: str, path: Path) -> PretrainedConfig:
    if not path.exists() and (path.is_absolute() or name.count("/") != 1):
        raise ConfigError(f"{name!r} is no file or folder. {_NAMES}")
    try:
        return AutoConfig.from_pretrained(path if path.exists() else name)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(
            f"no model configuration could be read from {name!r}: {first_line}. {_NAMES}"
        ) from error


def _parameters(config: PretrainedConfig) -> int:
    """Parameters of a model of `config`, counted without memory."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ConfigError(
            f"model type {config.model_type!r} has no causal language model in Transformers;"
            " only decoder-only causal language models can be fine-tuned"
        ) from error
    return sum(parameter.numel() for parameter in model.parameters())


def _has_weights(path: Path) -> bool:
    return any(path.glob("*.safetensors")) or any(path.glob("*.bin"))
