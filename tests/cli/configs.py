"""Configurations as files, for commands that read a model's config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from sppo_hf.planning.cluster import ClusterRequest, ClusterResult, simulate_layout
from sppo_hf.planning.config_file import read_fields
from sppo_hf.planning.layouts import Layout

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


def answer_with(monkeypatch: pytest.MonkeyPatch, layout: Layout) -> None:
    """Has `sppo plan` answer one layout, which a search may find elsewhere."""

    def answer(question: ClusterRequest, **_: object) -> ClusterResult:
        best = simulate_layout(question, layout)
        return ClusterResult(best=(best,), closest=None, num_simulated=1, num_candidates=1)

    monkeypatch.setattr("sppo_hf.cli.plan.solve_cluster", answer)


def write_config(folder: Path, fields: dict[str, Any], **changes: Any) -> str:
    """Writes a config.json and returns its path."""
    path = folder / "config.json"
    path.write_text(json.dumps({**fields, **changes}))
    return str(path)
