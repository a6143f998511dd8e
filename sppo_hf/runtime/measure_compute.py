"""Speeds of computing: matrix products, attention, elementwise work, and launching itself.

Each function times one kind of work and returns rates in the sense of `HardwareProfile`. Knows
nothing of profiles, copies or progress.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from sppo_hf.attention.backends.base import Requirement
from sppo_hf.attention.backends.select import select_backend
from sppo_hf.attention.backends.workload import Workload
from sppo_hf.model.tiny import VOCAB_SIZE, build_tiny_model
from sppo_hf.planning.hardware import Curve
from sppo_hf.runtime.stopwatch import Stopwatch

# N query heads, K key/value heads, C tokens of the chunk, T tokens of keys, H head size.

PREFIX_CHUNKS = 4
"""Chunks before the one whose attention is timed: neither the first nor the last of a sequence."""

_LAYERS = 8
_LAYER_TOKENS = 4


class Heads(NamedTuple):
    """Heads of an attention layer."""

    query: int
    key_value: int
    size: int


class AttentionSpeed(NamedTuple):
    """FLOP/s by chunk tokens, and the backend they belong to."""

    forward: Curve
    backward: Curve
    backend: str


def measure_matmul(
    watch: Stopwatch,
    dtype: torch.dtype,
    *,
    weights: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    budget_seconds: float,
) -> Curve:
    """FLOP/s of linear layers by tokens.

    Args:
        watch: on the device to measure.
        dtype: of inputs and weights.
        weights: (inputs, outputs) of each layer; one sample runs all of them.
        tokens: rows of the input, increasing.
        budget_seconds: see `Stopwatch.curve`.
    """
    matrices = [
        torch.randn(outputs, inputs, device=watch.device, dtype=dtype)
        for inputs, outputs in weights
    ]
    flops_per_token = sum(2 * inputs * outputs for inputs, outputs in weights)

    def work_of(count: int) -> tuple[Callable[[], object], float]:
        rows = [
            torch.randn(count, matrix.shape[1], device=watch.device, dtype=dtype)
            for matrix in matrices
        ]

        def work() -> None:
            for row, matrix in zip(rows, matrices, strict=True):
                functional.linear(row, matrix)

        return work, float(flops_per_token * count)

    return watch.curve(tokens, work_of, budget_seconds=budget_seconds)


def measure_attention(
    watch: Stopwatch,
    dtype: torch.dtype,
    *,
    heads: Heads,
    tokens: Sequence[int],
    budget_seconds: float,
) -> AttentionSpeed:
    """FLOP/s of attention forward and backward by chunk tokens, as the engine would run it.

    The backend is the one that "auto" takes on this device. FLOPs are those of a `Workload`.

    Args:
        watch: on the device to measure.
        dtype: of queries, keys and values.
        heads: of the layer.
        tokens: of the chunk, increasing; keys are `PREFIX_CHUNKS + 1` times as many.
        budget_seconds: for each direction, see `Stopwatch.curve`.
    """
    requirement = Requirement(
        device_type=watch.device.type,
        dtype=dtype,
        qk_head_size=heads.size,
        v_head_size=heads.size,
        gqa_ratio=heads.query // heads.key_value,
    )
    backend = select_backend("auto", requirement).backend

    def load_of(count: int) -> Workload:
        return Workload(
            requirement=requirement,
            query_heads=heads.query,
            chunk_tokens=count,
            prefix_tokens=PREFIX_CHUNKS * count,
        )

    def forward_of(count: int) -> tuple[Callable[[], object], float]:
        load = load_of(count)
        made = load.make(watch.device)
        return lambda: made.forward(backend), load.forward_flops

    def backward_of(count: int) -> tuple[Callable[[], object], float]:
        load = load_of(count)
        made = load.make(watch.device)
        attended = made.forward(backend)
        return lambda: made.backward(backend, attended), load.backward_flops

    forward = watch.curve(tokens, forward_of, budget_seconds=budget_seconds)
    # What forward could not do in its time, backward need not even prepare.
    measured = [count for count, _ in forward.points]
    backward = watch.curve(measured, backward_of, budget_seconds=budget_seconds)
    return AttentionSpeed(forward, backward, backend.name)


def measure_memory(watch: Stopwatch, num_bytes: int) -> float:
    """Bytes per second, read and written together, of elementwise work on the device."""
    source = torch.ones(num_bytes // 4, device=watch.device)
    target = torch.ones_like(source)
    seconds = watch.seconds(lambda: torch.mul(source, 2.0, out=target))
    return 2 * source.nbytes / seconds


def measure_launch(watch: Stopwatch) -> float:
    """Seconds that the forward of one decoder layer takes when it has almost nothing to do.

    A tiny Llama of Transformers, in training, over a few tokens; embedding and head are in it, a
    small part. The hooks of this package come on top.
    """
    model: Any = build_tiny_model("llama", dtype=torch.float32, num_hidden_layers=_LAYERS)
    model.to(watch.device)
    ids = torch.arange(_LAYER_TOKENS, device=watch.device)[None] % VOCAB_SIZE
    with torch.enable_grad():
        return watch.seconds(lambda: model(input_ids=ids, use_cache=False)) / _LAYERS
