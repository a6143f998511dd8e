"""A model of two small layers, as a config.json, and jobs that train it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sppo_hf.cli.benchmark.results import Job

FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}


def tiny_job(folder: Path, contender: str = "plain", **changes: Any) -> Job:
    """One step of warm-up and one measured, 64 tokens, float32, all weights, on the CPU."""
    path = folder / "config.json"
    path.write_text(json.dumps(FIELDS))
    settings: dict[str, Any] = {
        "model": str(path),
        "contender": contender,
        "total_tokens": 64,
        "device": "cpu",
        "dtype": "float32",
        "steps": 1,
        "warm_up": 1,
    }
    return Job(**{**settings, **changes})
