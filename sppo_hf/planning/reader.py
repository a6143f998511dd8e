"""Reads what planning must know of a Transformers config itself, by attribute names alone.

What its layers cost is traced (`model_profile`). This imports neither torch nor transformers: any
object with the right attributes will do.
"""

from __future__ import annotations

from typing import Any, cast

from sppo_hf.rules import refuse


def text_config(config: object) -> object:
    """Returns the decoder's own config: multimodal configs keep it one level down."""
    getter = getattr(config, "get_text_config", None)
    return getter() if callable(getter) else getattr(config, "text_config", None) or config


def find_int(config: object, *names: str, least: int = 1) -> int | None:
    """Returns the first of the named attributes that is not None; None where there is none.

    Args:
        config: any object with attributes.
        *names: by which families call the size.
        least: smallest value that makes sense: 0 where that stands for none.

    Raises:
        ConfigError: it is no whole number, below `min_memory`, or 2**31 or more.
    """
    for name in names:
        value: object = getattr(config, name, None)
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31:
            return value
        allowed = f"a whole number, {least} to {2**31 - 1:,}"
        refuse(name, value, allowed=allowed, remedy="mend the model's config.json")
    return None


def family(config: object) -> str:
    """Returns the config's `model_type`, or an empty string."""
    return str(getattr(config, "model_type", "") or "")


def rotary_limit_tokens(config: object) -> int | None:
    """Returns the longest sequence the position encoding was made for; None where it has no end."""
    limit = find_int(config, "max_position_embeddings", "n_positions", "n_ctx")
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if limit is None or not isinstance(scaling, dict):
        return limit
    rope = cast("dict[str, Any]", scaling)
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "dynamic":
        return None
    if kind == "llama3":
        return limit  # of the scaled positions; the factor is of low frequencies alone
    if isinstance(original, int) and isinstance(factor, (int, float)):
        # Also false of NaN.
        if not 0 < factor < 2**31 or not 0 < original < 2**31:
            seen = {"original_max_position_embeddings": original, "factor": factor}
            refuse(
                "rope_parameters",
                seen,
                allowed="numbers above zero and below 2**31",
                remedy="mend the model's config.json",
            )
        return max(limit, int(original * factor))
    return limit
