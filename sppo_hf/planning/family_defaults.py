"""What a family's config class fills in where a `config.json` is silent.

A config that Transformers has loaded has every field; a file has those that its author wrote. Only
what shapes depend on is here, and only where the general rule (no window, as many K/V heads as
heads, head size from the width, untied head) is not the family's.
"""

from __future__ import annotations

from collections.abc import Mapping

SIZES: Mapping[str, Mapping[str, int]] = {
    "cwm": {"head_dim": 128},
    "ernie4_5": {"head_dim": 128},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "vocab_size": 262_208,
    },
    "gpt_oss": {"head_dim": 64, "sliding_window": 128},
    "jetmoe": {"kv_channels": 128},
    "laguna": {"head_dim": 128},
    "mellum": {"head_dim": 128},
    "mimo_v2_flash": {"head_dim": 192},
    "minimax_m2": {"head_dim": 128},
    "qwen3": {"head_dim": 128},
    "qwen3_5_moe_text": {"full_attention_interval": 4, "head_dim": 256},
    "qwen3_5_text": {"full_attention_interval": 4, "head_dim": 256},
    "qwen3_next": {"full_attention_interval": 4, "head_dim": 256},
    "seed_oss": {"head_dim": 128},
    "solar_open": {"head_dim": 128},
    "vaultgemma": {"head_dim": 256, "sliding_window": 4096},
}
"""Sizes by family and field."""

TIED = frozenset(
    (
        "biogpt cohere cohere2 ernie4_5 ernie4_5_moe gemma gemma2 gemma3_text gemma4_text gpt2 "
        "gpt_bigcode gpt_neo granite_swa jetmoe minicpm3 opt smollm3 starcoder2 vaultgemma youtu"
    ).split()
)
"""Families whose embedding and head are one matrix unless the config says otherwise."""

FULL_EVERY: Mapping[str, int] = {
    "afmoe": 4,
    "cohere2": 4,
    "exaone4": 4,
    "exaone_moe": 4,
    "gemma2": 2,
    "gemma3_text": 6,
    "gpt_oss": 2,
    "olmo3": 4,
    "vaultgemma": 2,
}
"""Every so manieth layer sees all keys, the others a window, where no `layer_types` are given."""

LAYER_TYPE: Mapping[str, str] = {
    "falcon_h1": "hybrid",
    "mamba2": "linear_attention",
    "zaya": "hybrid",
}
"""What every layer is, in families whose files do not say it."""

NO_WINDOW = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"})
"""Families that use their `sliding_window` only when `use_sliding_window` is true."""

LEARNED_POSITIONS = frozenset({"biogpt", "gpt2", "gpt_bigcode", "gpt_neo", "opt"})
"""Families with a learned table of positions, which counts among their parameters."""
