"""Configurations as files, for commands that read a model's config.json."""

import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sppo_hf.planning.config_file import read_fields

LLAMA_8B: dict[str, Any] = read_fields("llama-3.1-8b")
"""A model whose profile is shipped."""

LLAMA_70B: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
"""Likewise of Llama-3.1-70B."""

TINY: dict[str, Any] = {
    **LLAMA_8B,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
"""Two layers: answers in no time."""


_answers: dict[tuple[object, str], Any] = {}


def ask_once(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    """Has a command's module answer what was asked before, in words or in JSON, as it was then."""
    answer: Callable[..., Any] = pkgutil.resolve_name(f"{module}:{name}")

    def ask(question: object, **how: object) -> Any:
        key = answer, repr((question, how))
        if key not in _answers:
            _answers[key] = answer(question, **how)
        return _answers[key]

    monkeypatch.setattr(f"{module}.{name}", ask)


def write_config(folder: Path, fields: dict[str, Any], **changes: Any) -> str:
    """Writes a config.json and returns its path."""
    path = folder / "config.json"
    path.write_text(json.dumps({**fields, **changes}))
    return str(path)
