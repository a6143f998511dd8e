"""A model's `config.json` as an object with attributes, without Transformers.

What `reader` and `ModelShape.from_config` need of a config is its attributes, so a JSON file will
do: commands that only plan start in a fraction of the time that importing Transformers takes.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from sppo_hf.errors import ConfigError
from sppo_hf.planning.reader import text_config
from sppo_hf.reading import MOST_JSON_BYTES, parse_json, read_text
from sppo_hf.rules import show

# Sub-configurations of multimodal models; other nested objects (rotary parameters) stay dicts.
_SUB_CONFIGS = ("text_config", "vision_config", "audio_config")


@cache
def shipped_models() -> dict[str, Path]:
    """Returns the configurations that come with the package, by name ("llama-3.1-8b")."""
    folder = Path(str(resources.files("sppo_hf.planning").joinpath("models")))
    return {file.stem: file for file in sorted(folder.glob("*.json"))}


def find_config(path: str | Path) -> Path:
    """Returns the file that a user means.

    Args:
        path: a `config.json`, a folder that holds one, or, where there is no such path, the name
            of a shipped configuration in any case ("Llama-3.1-8B").

    Returns:
        A path, which need not exist.
    """
    file = Path(os.path.expanduser(path))
    if not os.path.exists(file):
        return shipped_models().get(str(path).lower(), file)
    return file / "config.json" if os.path.isdir(file) else file


def load_config(path: str | Path) -> object:
    """Reads a model's configuration.

    Args:
        path: as for `find_config`.

    Returns:
        A namespace of the file's fields; `text_config` and its like are namespaces too.

    Raises:
        ConfigError: there is no such file, it is no regular file, it has more than 4 MiB, it holds
            no JSON object, or it names no `model_type`.
    """
    return _namespace(read_fields(path))


def read_fields(path: str | Path) -> dict[str, Any]:
    """Reads a model's configuration as the JSON object that it is.

    Args:
        path: as for `find_config`.

    Raises:
        ConfigError: as `load_config`.
    """
    file = find_config(path)
    text = read_text(
        file,
        what="model configuration",
        most_bytes=MOST_JSON_BYTES,
        remedy="give a model's config.json, the folder that holds it (the model's page on the "
        f"Hugging Face hub has the file), or one of {', '.join(shipped_models())}",
    )
    try:
        fields: Any = parse_json(text)
    except ConfigError as error:
        raise ConfigError(
            f"{file} is not valid JSON: {error}. Fetch the file again, or mend it there"
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(
            f"{file} holds a JSON {type(fields).__name__} where a model's configuration is an "
            "object; give the config.json of a model"
        )
    known = cast("dict[str, Any]", fields)
    if not isinstance(known.get("model_type"), str):
        raise ConfigError(
            f"{file} names no model_type (it has {show(sorted(known)[:5]) if known else 'nothing'}"
            " ...), so it is not a Transformers configuration. Other JSON files beside it "
            "(generation_config.json, adapter_config.json) will not do; give config.json"
        )
    return known


def weight_dtype(config: object) -> str:
    """Returns the name of the dtype that the weights are stored in; "float32" where none is named.

    That is what Transformers makes of such a config too.
    """
    for owner in (config, text_config(config)):
        for field in ("dtype", "torch_dtype"):
            value = getattr(owner, field, None)
            if value is not None:
                return str(value).removeprefix("torch.")
    return "float32"


def _namespace(fields: dict[str, Any]) -> SimpleNamespace:
    for name in _SUB_CONFIGS:
        if isinstance(fields.get(name), dict):
            fields = {**fields, name: _namespace(cast("dict[str, Any]", fields[name]))}
    return SimpleNamespace(**fields)
