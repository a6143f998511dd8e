"""FLOPs of a training step, and the peaks that devices are measured against.

Model FLOPs utilisation as this package reports it:

    MFU = step_flops / (step_seconds * peak_flops)

`step_flops` counts what the *model* needs for one forward and one backward: every multiply-add of a
matrix product as two, attention over the visible (causal, windowed) half only, nothing elementwise,
and no recomputation, so recomputing never looks like progress. `peak_flops` is the device's dense
bf16 figure.
"""

from __future__ import annotations

import re
from dataclasses import replace

from sppo_hf.planning.model_shape import ModelShape

# Dense bf16 tensor-core FLOP/s with float32 accumulation, from the vendors' public datasheets
# (where a sheet prints the figure with sparsity, half of it). Estimates of what cannot be reached.
PEAK_FLOPS: dict[str, float] = {
    "A100": 312e12,
    "H100": 989e12,
    "H100 PCIE": 756e12,
    "H100 NVL": 835e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "A10": 125e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
}

# Names that contain a listed one but run slower than it, or are only a slice of it.
_OTHER_DEVICES = frozenset({"LAPTOP", "D", "MIG", "MAX"})


def visible_pairs(total_tokens: int, window: int | None) -> int:
    """Number of (query, visible key) pairs of a causal sequence, each token seeing itself.

    Args:
        total_tokens: tokens of the sequence.
        window: keys a query sees at most, its own included; None sees all before it.
    """
    seen = total_tokens if window is None else min(window, total_tokens)
    return seen * (seen + 1) // 2 + (total_tokens - seen) * seen


def forward_flops(shape: ModelShape, batch_rows: int, total_tokens: int) -> int:
    """Model FLOPs of one forward over `batch_rows` rows of `total_tokens` tokens."""
    attention = sum(
        layer.attention_flops_per_key * visible_pairs(total_tokens, layer.window)
        for layer in shape.layers
    )
    return batch_rows * (shape.linear_flops_per_token() * total_tokens + attention)


def step_flops(shape: ModelShape, batch_rows: int, total_tokens: int) -> int:
    """Model FLOPs of one forward and one backward over `batch_rows` rows of `total_tokens` tokens.

    Linear: forward, the gradient of the input, and the gradient of what is trained of the weights;
    `ModelShape.backward_linear_flops_per_token` says which. Attention has no weights and twice its
    forward in backward. Recomputation is not counted.
    """
    linear = shape.linear_flops_per_token() * total_tokens * batch_rows
    attention = forward_flops(shape, batch_rows, total_tokens) - linear
    backward = shape.backward_linear_flops_per_token() * total_tokens * batch_rows
    return linear + backward + 3 * attention


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by the name its driver gives it, or None where unknown.

    Whole words are compared ("A10" is neither "A100" nor "A10G"); the most specific entry wins.
    """
    words = set(re.split(r"[\s\-_/]+", device_name.upper()))
    if words & _OTHER_DEVICES:
        return None
    known = [name for name in PEAK_FLOPS if set(name.split()) <= words]
    return PEAK_FLOPS[max(known, key=len)] if known else None


def layer_costs(shape: ModelShape, total_tokens: int) -> tuple[list[int], int]:
    """FLOPs of a training step of one row, layer by layer, and of the head."""
    layers = [
        step_flops(replace(shape, layers=(layer,), vocab_size=0), 1, total_tokens)
        for layer in shape.layers
    ]
    return layers, step_flops(shape, 1, total_tokens) - sum(layers)
