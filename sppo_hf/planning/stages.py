"""Stages of a pipeline: their layers, weights and memory budgets, and the chunks of a row.

Stages are runs of decoder layers of about the same cost, with embedding, head and loss counted. All
ranks must use the same chunks, so these follow from the whole model and the settings alone; which
activations to save or offload is planned by each rank for its stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError
from sppo_hf.planning.chunk_bounds import (
    Bounds,
    chunk_bounds,
    counted_bounds,
    names_cut,
    partition_of,
)
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.lowering import StepProgram
from sppo_hf.planning.memory import OPTIMIZER_BYTES_PER_PARAMETER, Budgets, Bytes, ByteTables
from sppo_hf.planning.model_profile import LayerProfile
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.tiers import TIERS, Tier
from sppo_hf.schedule.actions import Kind
from sppo_hf.schedule.lower import KVCopy


def split_layers(
    layer_costs: Sequence[float], num_stages: int, *, last: float = 0.0
) -> tuple[range, ...]:
    """Divides layers into stages so that the most expensive stage costs as little as possible.

    Among equals, minimizes the sum of squared costs.

    Args:
        layer_costs: cost of each layer, in any unit.
        num_stages: number of stages, each of at least one layer.
        last: cost of head and loss, which the last stage adds.

    Raises:
        ConfigError: fewer than one stage, or more stages than layers.
    """
    num_layers = len(layer_costs)
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"{num_stages} stages were asked for of a model with {num_layers} layers. Allowed: 1 "
            f"to {num_layers}; each stage has a layer at least. Remedy: use fewer stages."
        )
    sums = np.array([0.0, *accumulate(layer_costs)])
    # [end, begin] Cost of a stage of these layers; infinite where it has none.
    runs = sums[:, None] - sums
    runs[-1] += last
    runs[np.triu_indices(num_layers + 1)] = math.inf
    squares = runs * runs
    # [end] Best division so far of the layers before `end`: highest cost, sum of squares.
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
    """Divides a model so that stages take about the same time for a row, head and loss counted.

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
    """Bytes of a stage's weights, gradients and optimizer states."""

    weights: int
    """Parameters; tied embeddings are on the first and on the last stage."""

    gradients: int
    """Gradients of trained parameters."""

    optimizer: int
    """Two float32 states of each trained parameter, as in AdamW."""

    @classmethod
    def of(cls, shape: ModelShape, layers: range) -> StageWeights:
        """Counts the parameters of a run of layers, with embedding and head at the model's ends.

        Of a model that FSDP2 shards, which has one stage, the bytes on each device by chunk.
        """
        if shape.shards > 1:
            assert len(layers) == shape.num_layers, "no pipeline shards its stages"
            gradients = max(shape.unsharded_gradient_bytes, shape.gradient_bytes)
            return cls(shape.weight_bytes, gradients, shape.states_bytes)
        held = shape.layers[layers.start : layers.stop]
        first, last = layers.start == 0, layers.stop == shape.num_layers
        table = shape.vocab_size * shape.hidden_size
        adapters = sum(work.adapter_weights for work in held)
        own = sum(work.total_weights for work in held)
        all_adapters = sum(work.adapter_weights for work in shape.layers)
        if last:
            own += shape.hidden_size + (0 if shape.tied and first else table)
        if first:
            # Also position embeddings and the like, outside of the layers.
            inside = sum(work.total_weights for work in shape.layers) + all_adapters
            ends = shape.total_parameters - inside
            own += ends - shape.hidden_size - (0 if shape.tied else table)
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


# Units per stage where the settings leave chunks open: ranks then idle at most a fifth of the time,
# (P-1) / (NM + P-1), arXiv 2406.03488.
_UNITS_PER_STAGE = 4
MIN_CHUNK_TOKENS = {"cpu": 16, "cuda": 2048}
"""Minimum mean tokens of a chunk, by kind of device; kernels are slow below."""


def pipeline_bounds(
    config: SPPOConfig,
    shape: ModelShape,
    total_tokens: int,
    *,
    stages: int,
    micro_batches: int,
    device_kind: str,
) -> Bounds:
    """Returns the chunks of a pipeline's rows: more than for one device where that fills it.

    Raises:
        ConfigError: the settings do not fit this length.
    """
    bounds = chunk_bounds(config, shape, total_tokens, device_kind=device_kind, stages=stages)
    wanted = math.ceil(_UNITS_PER_STAGE * stages / micro_batches)
    most = max(1, total_tokens // MIN_CHUNK_TOKENS.get(device_kind, 1))
    if names_cut(config) or len(bounds) >= min(wanted, most):
        return bounds
    return bounds_with_count(config, shape, total_tokens, min(wanted, most))


def bounds_with_count(
    config: SPPOConfig, shape: ModelShape, total_tokens: int, number: int
) -> Bounds:
    """Returns the bounds of a pipeline's row in `number` chunks of equal length or equal work."""
    partition = partition_of(config, stages=config.pp_size)
    return counted_bounds(shape, total_tokens, number, partition)


def stage_shape(shape: ModelShape, layers: range, *, last: bool) -> ModelShape:
    """Returns the shape of one stage: its layers, and the head where it is the last.

    `shape` has the whole model's layers, with the parameters that are on this rank.
    """
    return replace(
        shape,
        layers=_with_own_keys(shape.layers[layers.start : layers.stop]),
        vocab_size=shape.vocab_size if last else 1,
    )


def with_copies_by_unit(decisions: Decisions, shape: ModelShape, device_kind: str) -> Decisions:
    """Returns a stage's decisions with copies of whole units, as a pipeline's schedule has them.

    While a unit computes, one unit is copied out (D) and the next one that is used is copied back
    (H), with all its layers (`schedule.lower.add_offload`).
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
    """Returns the copies of K/V beside units, where K/V are not kept on the device.

    `stages` are, for each stage, [kinds] the number of its layers.
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
    """Returns a stage's layers; one that reads K/V of an earlier stage's layer stores its own."""
    seen: set[tuple[int | None, ...]] = set()
    found: list[LayerProfile] = []
    for layer in layers:
        kind = (layer.window, layer.num_kv_heads, layer.qk_head_size, layer.v_head_size)
        found.append(layer if kind in seen else replace(layer, borrows_keys=False))
        seen.add(kind)
    return tuple(found)


def budgets_per_micro_batch(budgets: Budgets, *, standing_bytes: int, alive: float) -> Budgets:
    """Returns the part of a rank's budgets that one micro-batch on one stage may use.

    A plan is made for one micro-batch of one stage, but several are in flight at once. Each gets an
    equal share of what weights and gradients leave.

    Args:
        budgets: budgets of the rank.
        standing_bytes: bytes of weights and gradients, which are on the device once.
        alive: micro-batches in flight at once, over all of the rank's stages; may be fractional.
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
