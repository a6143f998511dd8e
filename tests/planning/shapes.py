"""Configs and shapes by hand, for tests that need no Transformers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sppo_hf.planning.config_file import load_config
from sppo_hf.planning.shape import ModelShape


def gpt_shape(hidden_size: int, layers: int, heads: int) -> ModelShape:
    """The papers' GPT: a 4h MLP of two matrices, as many K/V heads as heads, GPT-2's vocabulary."""
    config = SimpleNamespace(
        model_type="gpt2", n_embd=hidden_size, n_layer=layers, n_head=heads, vocab_size=50_257
    )
    return ModelShape.from_config(config, dtype_bytes=2)


def known_config(name: str) -> object:
    """A published model's `config.json`, shortened to what its shape depends on."""
    return load_config(Path(__file__).with_name("configs") / f"{name}.json")


def llama_config(**changes: Any) -> SimpleNamespace:
    """Llama-3.1-8B's sizes, changed where asked."""
    sizes: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    }
    return SimpleNamespace(**{**sizes, **changes})


def tiny_shape(**changes: Any) -> ModelShape:
    """Two layers, easy numbers: hidden 8, 2 heads of 4, 1 K/V head, MLP 16, vocabulary 10."""
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "vocab_size": 10,
    }
    return ModelShape.from_config(llama_config(**{**sizes, **changes}), dtype_bytes=4)
