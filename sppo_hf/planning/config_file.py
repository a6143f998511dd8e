"""A model's `config.json` as an object with its fields, which is all that `ModelShape` reads.

Knows neither Transformers nor the hub.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from sppo_hf.errors import ConfigError

# Configs within the config; other objects (rope_scaling, quantization_config) stay mappings.
_NESTED = ("text_config",)


def load_config(path: str | os.PathLike[str]) -> SimpleNamespace:
    """Reads a `config.json`.

    Args:
        path: the file, or the folder that it lies in.

    Raises:
        ConfigError: there is no such file, or it is not a JSON object.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        fields: object = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"The model's configuration {os.fspath(file)!r} cannot be read: {error.strerror}. "
            "Remedy: give a model folder that holds a config.json, or the path of one."
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{os.fspath(file)!r} is not JSON ({error}). Remedy: give a model's config.json."
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(
            f"{os.fspath(file)!r} holds a {type(fields).__name__}, not an object of settings. "
            "Remedy: give a model's config.json."
        )
    return _namespace(cast("dict[str, Any]", fields))


def _namespace(fields: dict[str, Any]) -> SimpleNamespace:
    nested = {
        name: _namespace(cast("dict[str, Any]", fields[name]))
        for name in _NESTED
        if isinstance(fields.get(name), dict)
    }
    return SimpleNamespace(**{**fields, **nested})
