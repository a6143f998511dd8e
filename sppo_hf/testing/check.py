"""Check one model by name: is it exact, or refused, and why?

The basis of `sppo check` and of the table of families (recipes/MODELS.md). Finds or builds a small
model, compares the unmodified and the converted one, and returns the outcome as a result; it raises
only if the input names no model that can run.
"""

from __future__ import annotations

import inspect
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import AutoConfig, PreTrainedConfig

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import convert
from sppo_hf.engine.model_parts import BUILD_ERRORS, auto_class_of, decoder_config
from sppo_hf.errors import ConfigError, SPPOError, UnsupportedModelError, first_line
from sppo_hf.planning.config_file import check_sizes, classifier_kind, read_fields
from sppo_hf.rules import format_bytes, refuse, show
from sppo_hf.testing.exactness import TOLERANCE, compare, compare_drift, run_reference
from sppo_hf.testing.tiny_families import FAMILIES, UNLISTED
from sppo_hf.testing.tiny_models import (
    IMAGE_TOKEN,
    LARGEST_BYTES,
    batch_for,
    build_tiny_model,
    classifier_class,
    copy_of,
    image_batch,
    make_batch,
    model_from_config,
    shrunk_config,
    takes_images,
    weights_bytes,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LARGEST_PARAMETERS = 20_000_000
"""Largest local model that is checked with its own weights, not as a tiny random one."""

_DRIFT_BATCHES = 4

_NAMES = (
    "Give a Transformers model type such as 'llama', a folder with a config.json, a config.json,"
    " or a hub id that is cached or can be downloaded."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesResult:
    """What became of a batch with images."""

    status: Literal["exact", "not exact", "refused", "not tried"]
    reason: str = ""
    """Why it was refused or not tried, or which parameter is the worst."""
    error: float | None = None
    """As a `CheckResult`'s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The outcome of checking one model."""

    name: str
    """The name that was given."""
    status: Literal["exact", "not exact", "refused"]
    model_class: str = ""
    """Transformers class of the model."""
    reason: str = ""
    """Why the model was refused."""
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
    """False if a local model's own weights were used."""
    note: str = ""
    """Says so if only the text decoder of the named model was checked."""
    images: ImagesResult | None = None
    """None if no images were asked for, the model takes none, or text is not exact."""


def check_model(
    name: str,
    config: SPPOConfig,
    *,
    rows: int = 2,
    tokens: int = 29,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    images: bool = False,
) -> CheckResult:
    """Compare loss and gradients of one model with and without chunks.

    Args:
        name: as for `small_model`.
        config: settings of the converted model.
        rows: rows of the batch; with several, a third of the last one is padding.
        tokens: length of each row.
        dtype: float64 and float32 compare with the unmodified model directly; bfloat16 and
            float16 compare both models' distances from float32.
        seed: seed of the batch.
        images: whether to try a batch with images, too, where the model takes some and text is
            exact. It has a length and four chunks of its own. A model that is not exact with them
            is not exact; one that is refused with them, or takes them in an unknown form, may be.
            Only in float64 and float32.

    Raises:
        ConfigError: `name` is no model, `config` does not fit the batch, the unmodified model
            cannot run it, or `tokens` would take more than `LARGEST_BYTES`.
    """
    kept = dtype if dtype in TOLERANCE else torch.float32
    with warnings.catch_warnings(action="ignore"):
        model, random_weights, note = small_model(name, dtype=kept)
        result = _check(model, name, config, rows=rows, tokens=tokens, dtype=dtype, seed=seed)
        if images and result.status == "exact" and takes_images(model):
            found = _check_images(model, config, dtype=dtype, seed=seed)
            status = "not exact" if found.status == "not exact" else result.status
            result = replace(result, images=found, status=status)
        return replace(result, random_weights=random_weights, note=note)


def check_config(
    hf_config: PreTrainedConfig,
    config: SPPOConfig,
    *,
    model_class: type[PreTrainedModel] | None = None,
    left_padded_rows: int = 0,
) -> CheckResult:
    """Check a tiny random model of a Transformers configuration in float64, as `check_model`.

    Args:
        hf_config: what the tiny model is made from.
        config: settings of the chunked run.
        model_class: the model's class; None takes Transformers' own.
        left_padded_rows: rows of one batch that begins with padding, which is then all that is
            tried; 0 for batches that do not.

    Raises:
        ConfigError: no tiny model of this configuration can be built.
    """
    with warnings.catch_warnings(action="ignore"):
        model = tiny_model(hf_config, model_class=model_class)
        if left_padded_rows:
            return _check(
                model, hf_config.model_type, config, rows=left_padded_rows, left_padding=True
            )
        result = _check(model, hf_config.model_type, config, rows=2)
        if result.status != "exact":
            return result
        # One row without padding has no attention mask, which is another code path in models.
        return _check(model, hf_config.model_type, config, rows=1)


def tiny_model(
    hf_config: PreTrainedConfig, *, model_class: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """Build the tiny random model in float64 that `check_config` checks.

    Raises:
        ConfigError: it cannot be built.
    """
    with warnings.catch_warnings(action="ignore"):
        return model_from_config(shrunk_config(hf_config, model_class), model_class=model_class)


def _check(
    model: PreTrainedModel,
    name: str,
    config: SPPOConfig,
    *,
    rows: int,
    tokens: int = 29,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    left_padding: bool = False,
) -> CheckResult:
    text = model.config.get_text_config(decoder=True)
    vocab_size = getattr(text, "vocab_size", None)
    if vocab_size is None:
        raise ConfigError(f"model type {text.model_type!r} has no vocabulary. {_NAMES}")
    _check_tokens(rows, tokens, getattr(text, "num_attention_heads", 1), vocab_size)
    padding = (0,) * (rows - 1) + (tokens // 3,)
    sizes: dict[str, Any] = {"rows": rows, "tokens": tokens, "vocab_size": vocab_size}
    sizes |= {"left_padding": padding} if left_padding else {"padding": padding * (rows > 1)}
    batches = [
        batch_for(model, make_batch(**sizes, seed=seed + index))
        for index in range(1 if dtype in TOLERANCE else _DRIFT_BATCHES)
    ]
    return _check_batches(model, name, config, batches, dtype)


def _check_batches(
    model: PreTrainedModel,
    name: str,
    config: SPPOConfig,
    batches: list[dict[str, Any]],
    dtype: torch.dtype,
) -> CheckResult:
    facts: dict[str, Any] = {
        "name": name,
        "model_class": type(model).__name__,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
    }
    try:
        if dtype in TOLERANCE:
            report = compare(model, batches[0], config)
            numbers: dict[str, Any] = {
                "error": report.error,
                "allowed": report.tolerance,
                "reference_loss": report.reference_loss,
                "worst_parameters": tuple((p.name, p.error) for p in report.parameters[:5]),
                "num_chunks": report.num_chunks,
            }
        else:
            report = compare_drift(model, batches, config, dtype=dtype)
            numbers = {
                "error": report.drift,
                "allowed": report.allowed_drift,
                "reference_loss": report.unmodified_loss,
            }
    except UnsupportedModelError as error:
        return CheckResult(status="refused", reason=str(error), **facts)
    except SPPOError:
        raise
    except BUILD_ERRORS as error:
        _check_runs(model, batches[0])
        reason = f"it fails in chunks, where the unmodified model does not ({first_line(error)})"
        return CheckResult(status="refused", reason=reason, **facts)
    status = "exact" if report.exact else "not exact"
    return CheckResult(status=status, loss=report.loss, **numbers, **facts)


def _check_images(
    model: PreTrainedModel, config: SPPOConfig, *, dtype: torch.dtype, seed: int
) -> ImagesResult:
    """Compare a batch with images, of which a chunk ends within the first one."""
    if dtype not in TOLERANCE:
        return ImagesResult(status="not tried", reason="only in float64 and float32")
    try:
        batch = image_batch(model, seed=seed)
        text = model.config.get_text_config(decoder=True)
        rows, tokens = batch["input_ids"].shape
        _check_tokens(rows, tokens, getattr(text, "num_attention_heads", 1), text.vocab_size)
        others = {
            name: -tensor if tensor.is_floating_point() else tensor
            for name, tensor in batch.items()
        }
        loss, other_loss = (run_reference(model, x, hooks=False).loss for x in (batch, others))
    except ConfigError as error:
        refusal = _refusal_of_pixels(model, config)
        if refusal:
            return ImagesResult(status="refused", reason=refusal)
        return ImagesResult(status="not tried", reason=str(error))
    except BUILD_ERRORS as error:
        reason = f"the unmodified model fails with them ({first_line(error)})"
        return ImagesResult(status="not tried", reason=reason)
    if loss == other_loss:
        return ImagesResult(status="not tried", reason="its loss does not depend on their pixels")
    of_an_image = int((batch["input_ids"][0] == IMAGE_TOKEN).sum()) // 2
    first = 1 + -(-of_an_image // 2)
    third = (tokens - first) // 3
    lengths = (first, third, third, tokens - first - 2 * third)
    cut = config.replace(num_chunks="auto", chunk_tokens=None, chunk_lengths=lengths)
    try:
        found = _check_batches(model, "", cut, [batch], dtype)
    except SPPOError as error:
        return ImagesResult(status="refused", reason=str(error))
    worst = f"in {found.worst_parameters[0][0]}" if found.status == "not exact" else ""
    return ImagesResult(status=found.status, reason=found.reason or worst, error=found.error)


def _refusal_of_pixels(model: PreTrainedModel, config: SPPOConfig) -> str:
    """Why the converted model takes images in no form at all; "" if that depends on the form."""
    pixels = next(n for n in inspect.signature(model.base_model.forward).parameters if "pixel" in n)
    uncut = config.replace(num_chunks="auto", chunk_tokens=None, chunk_lengths=None)
    try:
        convert(copy_of(model), uncut)(**make_batch(), **{pixels: torch.zeros(1)})
    except SPPOError as error:
        return str(error)
    except BUILD_ERRORS:
        pass  # the model's own code has read them
    return ""


def _check_tokens(rows: int, tokens: int, heads: int, vocab_size: int) -> None:
    """Refuse a length whose attention scores or logits would take more than `LARGEST_BYTES`."""
    max_tokens = next(
        length
        for length in (2**power for power in range(24, -1, -1))
        if rows * length * max(heads * length, vocab_size) * torch.float64.itemsize <= LARGEST_BYTES
    )
    if tokens > max_tokens:
        refuse(
            "tokens",
            tokens,
            allowed=f"at most {max_tokens:,} ({heads} heads and a vocabulary of {vocab_size:,}:"
            f" attention scores and logits of {format_bytes(LARGEST_BYTES)})",
            remedy="check a shorter sequence: exactness does not depend on the length",
        )


def _check_runs(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> None:
    """Refuse a model that cannot run `batch` without sppo_hf either."""
    try:
        run_reference(model, batch)
    except BUILD_ERRORS as error:
        raise ConfigError(
            f"the unmodified {type(model).__name__} cannot run"
            f" {batch['input_ids'].shape[1]} tokens in {model.dtype} itself ({first_line(error)})."
            " Give fewer tokens, or the folder of a model that runs"
        ) from error


def small_model(
    name: str, *, dtype: torch.dtype = torch.float64
) -> tuple[PreTrainedModel, bool, str]:
    """Find or build the small model to check in place of `name`.

    Args:
        name: a tiny family or Transformers model type; a local folder with a model (its own
            weights if it has at most 20 million parameters, else a tiny random model of its
            configuration); a `config.json`; or a hub id, of which only the configuration is read.
            If a type has no language model as a whole, its text decoder is built.
        dtype: dtype of the weights.

    Returns:
        The model in training mode on the CPU, whether its weights are random, and a note if it is
        only the text decoder of the named model.

    Raises:
        ConfigError: there is no such model, it is no causal language model, or no tiny model of it
            can be built.
    """
    path = Path(name).expanduser()
    local = os.path.exists(path)  # False for what can be no path, where Path raises
    if not (local or "/" in name or name.endswith(".json")):
        try:
            model = build_tiny_model(name, dtype=dtype)
        except ConfigError as error:
            model = _tiny_text_decoder(name, dtype, error)
        if name in {*FAMILIES, *UNLISTED} or model.config.model_type == name:
            return model, True, ""
        return model, True, _part_of(AutoConfig.for_model(name), model)
    config = _read_config(name, path, local)
    kind = classifier_kind(config)
    model_class = None if kind is None else classifier_class(config, kind)
    whole = model_class is not None or decoder_config(config) is config
    if (
        local
        and whole
        and (any(path.glob("*.safetensors")) or any(path.glob("*.bin")))
        and weights_bytes(config, model_class) <= LARGEST_PARAMETERS * torch.float64.itemsize
    ):
        try:
            loader = model_class or auto_class_of(config)
            model = loader.from_pretrained(path, dtype=dtype)
        except BUILD_ERRORS as error:
            raise ConfigError(
                f"the model in {path} cannot be loaded ({first_line(error)}). {_NAMES}"
            ) from error
        return model.train(), False, ""
    model = model_from_config(
        shrunk_config(config, model_class), model_class=model_class, dtype=dtype
    )
    return model, True, "" if whole else _part_of(config, model)


def _part_of(config: PreTrainedConfig, model: PreTrainedModel) -> str:
    """The note that `model` is only the text decoder of the model that `config` describes."""
    return f"the text decoder of {config.model_type} alone ({model.config.model_type})"


def _tiny_text_decoder(name: str, dtype: torch.dtype, whole: ConfigError) -> PreTrainedModel:
    """The tiny text decoder of a multimodal type; raises `whole` if there is none."""
    try:
        text = AutoConfig.for_model(name).get_text_config(decoder=True)
    except BUILD_ERRORS:
        raise whole from None
    if text.model_type == name or auto_class_of(text) is None:
        raise whole
    return build_tiny_model(text.model_type, dtype=dtype)


def _read_config(name: str, path: Path, local: bool) -> PreTrainedConfig:
    if not local and (path.is_absolute() or name.count("/") != 1):
        raise ConfigError(f"{show(name)} is no file or folder. {_NAMES}")
    source = path if local else name
    try:
        # Sizes are checked in the JSON, before the configuration's class makes lists of layers.
        fields = read_fields(path) if local else PreTrainedConfig.get_config_dict(name)[0]
        check_sizes(fields)
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except SPPOError:
        raise
    except BUILD_ERRORS as error:
        raise ConfigError(
            f"no model configuration could be read from {show(name)} ({first_line(error)})."
            f" {_NAMES}"
        ) from error
