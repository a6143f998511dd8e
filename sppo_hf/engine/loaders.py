"""Which of Transformers' automatic classes makes a language model of a configuration, if any.

And adapters on it, made without a warning that is none of the user's doing.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """Context for PEFT's `get_peft_model` and `from_pretrained`.

    PEFT asks models for `is_gradient_checkpointing`, a name that newer releases of Transformers
    call deprecated. Nothing else is silenced.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


BUILD_ERRORS = (
    *(ValueError, TypeError, RuntimeError, AttributeError, LookupError, ArithmeticError),
    *(AssertionError, ImportError, OSError, StrictDataclassError),
)
"""What model and configuration classes raise where settings do not fit together, or where some of
them are looked up on the hub."""


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of a causal language model: `config`, or that of its text decoder alone.

    Returns:
        `config` itself if Transformers has a language model of it as a whole, encoders of images
        and sound included, or if its text decoder has none of its own.
    """
    text = config.get_text_config(decoder=True)
    if loader_of(config) is None and loader_of(text) is not None:
        return text
    return config


def loader_of(config: PreTrainedConfig) -> Any:
    """The automatic class that makes a language model of this very configuration, or None."""
    for loader in (AutoModelForCausalLM, AutoModelForMultimodalLM):
        if type(config) not in loader._model_mapping:
            continue
        model_class: Any = loader._model_mapping[type(config)]
        # Of some types AutoModelForCausalLM loads the text decoder alone, by the configuration
        # inside; draft models are described by their model's configuration.
        inner = getattr(config, "sub_configs", {}).get("text_config")
        if inner is None or model_class.config_class is not inner:
            return loader
    return None


def first_line(error: Exception) -> str:
    """An error of another library in one line: its class and the beginning of what it says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{'…' if len(text) > 200 else ''}"
