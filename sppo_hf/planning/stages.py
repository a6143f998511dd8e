"""Stages of a pipeline: their layers, what each holds, their share of the memory, and the chunks.

Stages are runs of decoder layers of about the same cost; embedding, head and loss count. All ranks
must cut sequences alike, so chunks follow from the whole model and the settings alone; what becomes
of a stage's frames is each rank's own affair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError
from sppo_hf.planning.chunk_bounds import (
    Bounds,
    PrefixCost,
    balanced_bounds,
    chunk_bounds,
    even_bounds,
    lengthened,
    partition_of,
)
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.lowering import StepProgram
from sppo_hf.planning.memory import OPTIMIZER_BYTES_PER_PARAMETER, ByteTables
from sppo_hf.planning.memory_snapshots import Budgets, Bytes
from sppo_hf.planning.model_profile import LayerProfile
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.tiers import TIERS, Tier
from sppo_hf.schedule.actions import Kind
from sppo_hf.schedule.lower import KVCopy


def split_layers(
    layer_costs: Sequence[float], num_stages: int, *, last: float = 0.0
) -> tuple[range, ...]:
    """Cuts layers into stages so that the most expensive stage costs as little as possible.

    Of cuts that are equal in that, the one with the least sum of squares.

    Args:
        layer_costs: of each layer, in any unit.
        num_stages: how many runs of at least one layer.
        last: what the last stage has beside its layers: head and loss.

    Raises:
        ConfigError: fewer than one stage, or more stages than layers.
    """
    return _split(tuple(layer_costs), num_stages, last)


# Layouts that differ in what they keep or send away ask for the same stages.
@lru_cache(maxsize=256)
def _split(layer_costs: tuple[float, ...], num_stages: int, last: float) -> tuple[range, ...]:
    num_layers = len(layer_costs)
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"{num_stages} stages were asked for of a model with {num_layers} layers. Allowed: 1 "
            f"to {num_layers}; each stage has a layer at least. Remedy: use fewer stages."
        )
    sums = np.array([0.0, *accumulate(layer_costs)])
    # [end, begin] What a stage costs; one that ends where it begins, or before, is none.
    runs = sums[:, None] - sums
    runs[-1] += last
    runs[np.triu_indices(num_layers + 1)] = math.inf
    squares = runs * runs
    # [end] Of the stages so far that end there: highest cost, sum of squares.
    most, sum_squares = runs[:, 0], squares[:, 0]
    begins: list[list[int]] = []
    for _ in range(1, num_stages):
        highest = np.maximum(most, runs)
        most = highest.min(axis=1)
        sums_of = np.where(highest == most[:, None], sum_squares + squares, math.inf)
        sum_squares = sums_of.min(axis=1)
        begins.append(sums_of.argmin(axis=1).tolist())
    bounds = [num_layers]
    for cuts in reversed(begins):
        bounds.append(cuts[bounds[-1]])
    return tuple(range(start, end) for start, end in pairwise([0, *reversed(bounds)]))


def balanced_stages(cost: ModelCost, bounds: Bounds, num_stages: int) -> tuple[range, ...]:
    """Cuts a model so that stages take the same time for a whole sequence, head and loss counted.

    Raises:
        ConfigError: fewer than one stage, or more than layers.
    """
    seconds = {
        i: sum(cost.forward_seconds(i, *b) + cost.backward_seconds(i, *b) for b in bounds)
        for i in set(cost.shape.layer_kinds)
    }
    head = sum(cost.head_seconds(end - start) for start, end in bounds)
    return split_layers([seconds[i] for i in cost.shape.layer_kinds], num_stages, last=head)


@dataclass(frozen=True, slots=True)
class StageWeights:
    """What a stage holds from step to step, in bytes."""

    weights: int
    """Parameters; tied embeddings are on the first stage and on the last."""

    gradients: int
    """Gradients of those that train."""

    optimizer: int
    """Two float32 states of each, as AdamW keeps."""

    @classmethod
    def of(cls, shape: ModelShape, layers: range) -> StageWeights:
        """Counts the parameters of a run of layers, and of what stands at the model's ends."""
        held = shape.layers[layers.start : layers.stop]
        first, last = layers.start == 0, layers.stop == shape.num_layers
        table = shape.vocab_size * shape.hidden_size
        adapters = sum(work.adapter_weights for work in held)
        own = sum(work.total_weights for work in held)
        if last:
            own += shape.hidden_size + (0 if shape.tied and first else table)
        if first:
            # Positions and the like stand beside the embedding.
            own += _ends(shape) - shape.hidden_size - (0 if shape.tied else table)
        all_adapters = sum(work.adapter_weights for work in shape.layers)
        # Not the dtype's size, for quantised weights.
        size = (shape.weight_bytes - shape.lora_bytes) / (shape.total_parameters - all_adapters)
        weights = round(own * size)
        if shape.lora is not None:
            adapter_bytes = adapters * shape.lora.dtype_bytes
            optimizer = OPTIMIZER_BYTES_PER_PARAMETER * adapters
            return cls(weights + adapter_bytes, adapter_bytes, optimizer)
        share = shape.trainable_fraction
        optimizer = round(OPTIMIZER_BYTES_PER_PARAMETER * own * share)
        return cls(weights, round(weights * share), optimizer)


def _ends(shape: ModelShape) -> int:
    """Parameters outside decoder layers: embedding, positions, final norm, head."""
    inside = sum(work.total_weights + work.adapter_weights for work in shape.layers)
    return shape.total_parameters - inside


# Where nothing is said about chunks: so many units per stage, which idles at most a fifth of the
# time ((P-1) / (NM + P-1), arXiv 2406.03488), of at least so many tokens, below which kernels are
# slow.
_UNITS_PER_STAGE = 4
MIN_CHUNK_TOKENS = {"cpu": 16, "cuda": 2048}
"""Of a chunk, on average, by kind of device: below, kernels are slow."""


def pipeline_bounds(
    config: SPPOConfig,
    shape: ModelShape,
    total_tokens: int,
    *,
    stages: int,
    micro_batches: int,
    device_kind: str,
) -> Bounds:
    """Cuts the sequences of a pipeline; more often than for one device where that fills it.

    Raises:
        ConfigError: the settings do not fit this length.
    """
    bounds = chunk_bounds(config, shape, total_tokens, device_kind=device_kind, stages=stages)
    fixed = config.num_chunks != "auto" or config.chunk_lengths or config.chunk_tokens
    wanted = math.ceil(_UNITS_PER_STAGE * stages / micro_batches)
    most = max(1, total_tokens // MIN_CHUNK_TOKENS.get(device_kind, 1))
    if fixed or len(bounds) >= min(wanted, most):
        return bounds
    return bounds_with_count(config, shape, total_tokens, min(wanted, most))


def bounds_with_count(
    config: SPPOConfig, shape: ModelShape, total_tokens: int, number: int
) -> Bounds:
    """Returns so many chunks of a pipeline's row, even or of the same work as the settings say."""
    if partition_of(config, stages=config.pp_size) == "even":
        return lengthened(even_bounds(total_tokens, number), shape)
    return lengthened(balanced_bounds(PrefixCost.of(shape), total_tokens, number), shape)


def stage_shape(shape: ModelShape, layers: range, *, last: bool) -> ModelShape:
    """Returns the shape of one stage: its layers, and the head where it is the last.

    Args:
        shape: the whole model's layers, with the parameters that are on this rank.
        layers: the stage's.
        last: whether logits are computed here.
    """
    return replace(
        shape,
        layers=_with_own_keys(shape.layers[layers.start : layers.stop]),
        vocab_size=shape.vocab_size if last else 1,
    )


def with_copies_by_unit(decisions: Decisions, shape: ModelShape, device_kind: str) -> Decisions:
    """Returns the decisions about a stage with copies by unit, as a pipeline's schedule lists them.

    While a unit computes, one is on its way out (D), and the one that is used next on its way back
    (H), all layers of it (`schedule.lower.add_offload`).
    """
    away = StepProgram(decisions, shape, device_kind).offloaded_bytes.sum(axis=1)
    if not away.any():
        return decisions
    max_pending_d2h_bytes = max(int(away.max()), decisions.max_pending_d2h_bytes or 0)
    return replace(
        decisions,
        max_pending_d2h_bytes=max_pending_d2h_bytes,
        max_prefetch_bytes=None,
        prefetch_chunks=1,
    )


def kv_copies_of(tables: ByteTables, kv_tier: Tier, stages: Sequence[Bytes]) -> frozenset[KVCopy]:
    """Returns what keys and values do beside the units of stages, where they wait elsewhere.

    `stages` are the layers of each kind of each stage: [kinds].
    """
    behind = TIERS[kv_tier].behind_host
    copies: tuple[tuple[Kind, int, Bytes], ...] = (
        ("K", 0, tables.kv_in_forward),
        ("O", 0, tables.kv_out_forward),
        ("K", 1, tables.kv_in_backward),
        ("O", 1, tables.kv_out_backward),
    )
    found: set[KVCopy] = set()
    for kind, part, sizes in copies:
        moved = [counts @ sizes for counts in stages]
        for stage, chunk in np.argwhere(np.array(moved) > 0).tolist():
            found.add((kind, stage, chunk, part))
            if behind:
                found.add(("L" if kind == "K" else "S", stage, chunk, part + 1))
    return frozenset(found)


def _with_own_keys(layers: tuple[LayerProfile, ...]) -> tuple[LayerProfile, ...]:
    """The layers of a stage, of which the first to read keys of another stage stores them here."""
    seen: set[tuple[int | None, ...]] = set()
    found: list[LayerProfile] = []
    for layer in layers:
        kind = (layer.window, layer.num_kv_heads, layer.qk_head_size, layer.v_head_size)
        found.append(layer if kind in seen else replace(layer, borrows_keys=False))
        seen.add(kind)
    return tuple(found)


def budgets_per_micro_batch(budgets: Budgets, *, standing_bytes: int, alive: float) -> Budgets:
    """Returns what one micro-batch on one stage may use of a rank's budgets.

    A plan is made for one micro-batch; of a pipeline's micro-batches several are alive at once, in
    part, and a rank may have several stages. Each has its share of what weights leave.

    Args:
        budgets: the rank's.
        standing_bytes: weights and gradients, which are on the device once.
        alive: micro-batches alive at once, in units of whole ones, over the rank's stages.
    """
    share = max(1.0, alive)
    each = {
        tier: None if size is None else round(size / share)
        for tier, size in budgets.by_tier.items()
    }
    device = budgets.device
    if device is not None:
        rest = max(0, device - standing_bytes) / share
        each["device"] = min(device, round(standing_bytes + rest))
    return Budgets(**each)
