"""Units that several ranks of a pipeline share (`schedule.generate.msp`): which models have them.

The runtime (`sppo_hf.pipeline.multiplex`) refuses by what is said here, and plans over devices
propose nothing that it refuses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from sppo_hf.errors import ConfigError
from sppo_hf.planning.model_profile import LayerProfile


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
