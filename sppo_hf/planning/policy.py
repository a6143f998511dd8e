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


def activations_by_chunk(
    activation_bytes: Sequence[float], ratios: Sequence[float]
) -> tuple[float, ...]:
    """Returns the activation bytes on the device at the end of each chunk's forward.

    `M_i = M_(i-1) + A_i - alpha_(i-1) A_(i-1)`: what left of chunk i - 1 is gone when chunk i ends.
    """
    held: list[float] = []
    for chunk, size in enumerate(activation_bytes):
        before = held[-1] - ratios[chunk - 1] * activation_bytes[chunk - 1] if chunk else 0.0
        held.append(before + size)
    return tuple(held)


def full_offload_peak(activation_bytes: Sequence[float]) -> float:
    """Returns the peak when every chunk is offloaded whole: two neighbours are there at once.

    A chunk's bytes go when its whole copy has ended, which happens while the next one computes.
    """
    following = [*activation_bytes[1:], 0.0]
    return max(a + b for a, b in zip(activation_bytes, following, strict=True))


def sppo_peak(activation_bytes: Sequence[float], threshold_bytes: float) -> float:
    """Returns the peak of the rule in closed form: `A_k + sum_(j<k) (A_j - M_th)`.

    k is the last chunk with `A_k > M_th` (the paper's printed formula drops the sum). Holds for
    activations that fall from chunk to chunk, as balanced chunks' do.
    """
    over = [i for i, size in enumerate(activation_bytes) if size > threshold_bytes]
    if not over:
        return max(activation_bytes)
    kept = sum(activation_bytes[j] - threshold_bytes for j in range(over[-1]))
    return activation_bytes[over[-1]] + kept
