"""Units that several ranks of a pipeline share (`schedule.generate.msp`): which models have them.

The runtime (`sppo_hf.pipeline.multiplex`) refuses by what is said here, and plans over devices
propose nothing that it refuses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from sppo_hf.errors import ConfigError
from sppo_hf.planning.model_profile import LayerProfile


def unsharable_reason(text: object, *, has_states: bool, is_multimodal: bool) -> str | None:
    """Why ranks cannot share units of a model, whatever their number; None where they can.

    Args:
        text: the decoder's config: of Transformers, or with the fields of a `config.json`.
        has_states: whether any layer carries a state from chunk to chunk.
        is_multimodal: whether there are encoders beside the decoder.
    """
    if has_states:
        return "it has recurrent or convolutional layers, whose states go from token to token"
    if getattr(text, "num_kv_shared_layers", 0):
        return "it has layers that read the keys of other layers (num_kv_shared_layers)"
    if getattr(text, "hidden_size_per_layer_input", 0):
        return "its layers have inputs of their own, which is not proven exact with shared units"
    if is_multimodal:
        return "it is multimodal, which is not proven exact with shared units"
    return None


def head_granules(layers: Iterable[LayerProfile], pp_size: int, name: str) -> int | None:
    """How ranks of sets of every size up to `pp_size` divide the attention heads of a model.

    Where all sizes divide the query heads, evenly. Else by key/value heads, as evenly as these can
    be divided: with 8 of them, three ranks have 2, 3 and 3, and the largest share sets the pace.

    Args:
        layers: Those that attend.
        pp_size: P.
        name: Of the model.

    Returns:
        See `own_heads`; one for all layers.

    Raises:
        ConfigError: Some size does neither.
    """
    heads = {(layer.num_heads, layer.num_kv_heads) for layer in layers}
    queries = math.gcd(*(queries for queries, _ in heads))
    keys = math.gcd(*(keys for _, keys in heads))
    if all(queries % size == 0 for size in range(2, pp_size + 1)):
        return None
    if keys >= pp_size:
        return keys
    least = next(size for size in range(2, pp_size + 1) if queries % size)
    allowed = range(2, max(keys + 1, least))
    raise ConfigError(
        f"pp_msp='on' with pp_size={pp_size} lets 2 to {pp_size} ranks share units of {name}, and "
        f"{least} ranks cannot divide its {queries} attention heads, nor {pp_size} its {keys} "
        f"key/value heads. Allowed: pp_size={' or '.join(map(str, allowed)) or 'none'} with this "
        "model. Remedy: one of these, or pp_msp='off'."
    )
