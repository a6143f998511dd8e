"""The paper's offload rule, as formulas on plain numbers.

SPPO (arXiv 2503.10377), sequence-aware offloading: chunk i's activations are A_i bytes, the copy of
chunk i - 1 overlaps the compute of chunk i, and the bytes moved per chunk are held constant at the
threshold M_th = (bytes per second to the host) x (seconds of one balanced chunk). K and V stay on
the device; what is not offloaded is kept. Knows nothing of models, layers or devices.
"""

from __future__ import annotations

from collections.abc import Sequence


def sppo_ratios(activation_bytes: Sequence[float], threshold_bytes: float) -> tuple[float, ...]:
    """Returns alpha_i = min(1, M_th / A_i), the share of each chunk's activations that leaves.

    Args:
        activation_bytes: A_i of every chunk, first to last.
        threshold_bytes: M_th, what one chunk's compute time can copy.

    Returns:
        One ratio in [0, 1] per chunk. The last chunk's is 0: its backward comes next.
    """
    last = len(activation_bytes) - 1
    return tuple(
        0.0 if chunk == last else min(1.0, threshold_bytes / size) if size > 0 else 1.0
        for chunk, size in enumerate(activation_bytes)
    )
