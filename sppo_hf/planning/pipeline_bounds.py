"""Plans of one stage of a pipeline: its share of the model, its share of the memory, the chunks.

All ranks must cut sequences alike, so chunks follow from the whole model and the settings alone;
what becomes of a stage's frames is each rank's own affair. Knows nothing of torch or of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sppo_hf.config import SPPOConfig
from sppo_hf.planning.chunk_bounds import (
    Bounds,
    PrefixCost,
    balanced_bounds,
    chunk_bounds,
    even_bounds,
    lengthened,
    partition_of,
)
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.lowering import StepProgram
from sppo_hf.planning.memory import ByteTables
from sppo_hf.planning.memory_snapshots import Budgets, Bytes
from sppo_hf.planning.model_profile import LayerProfile
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.tiers import TIERS, Tier
from sppo_hf.schedule.actions import Kind
from sppo_hf.schedule.lower import Stream

# Where nothing is said about chunks: so many units per stage, which idles at most a fifth of the
# time ((P-1) / (NM + P-1), arXiv 2406.03488), of at least so many tokens, below which kernels are
# slow.
_UNITS_PER_STAGE = 4
LEAST_TOKENS = {"cpu": 16, "cuda": 2048}
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

    Args:
        config: the settings; what they say about chunks is done.
        shape: the whole model.
        total_tokens: length of each row.
        stages: stages of the pipeline.
        micro_batches: micro-batches of a step.
        device_kind: "cuda" or "cpu".

    Raises:
        ConfigError: the settings do not fit this length.
    """
    bounds = chunk_bounds(config, shape, total_tokens, device_kind=device_kind, stages=stages)
    fixed = config.num_chunks != "auto" or config.chunk_lengths or config.chunk_tokens
    wanted = math.ceil(_UNITS_PER_STAGE * stages / micro_batches)
    most = max(1, total_tokens // LEAST_TOKENS.get(device_kind, 1))
    if fixed or len(bounds) >= min(wanted, most):
        return bounds
    return cut_number(config, shape, total_tokens, min(wanted, most))


def cut_number(config: SPPOConfig, shape: ModelShape, total_tokens: int, number: int) -> Bounds:
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


def asked_by_unit(decisions: Decisions, shape: ModelShape, device_kind: str) -> Decisions:
    """Returns the decisions about a stage with copies by unit, as a pipeline's schedule lists them.

    While a unit computes, one is on its way out (D), and the one that is used next on its way back
    (H), all layers of it (`schedule.lower.add_offload`).
    """
    away = StepProgram(decisions, shape, device_kind).away_bytes.sum(axis=1)
    if not away.any():
        return decisions
    max_pending_d2h_bytes = max(int(away.max()), decisions.max_pending_d2h_bytes or 0)
    return replace(
        decisions,
        max_pending_d2h_bytes=max_pending_d2h_bytes,
        max_prefetch_bytes=None,
        fetch_chunks=1,
    )


def streams_of(tables: ByteTables, kv_tier: Tier, stages: Sequence[Bytes]) -> frozenset[Stream]:
    """Returns what keys and values do beside the units of stages, where they wait elsewhere.

    Args:
        tables: bytes of the chunks.
        kv_tier: where they wait.
        stages: of each stage, [kinds] its layers of each kind.
    """
    behind = TIERS[kv_tier].behind_host
    copies: tuple[tuple[Kind, int, Bytes], ...] = (
        ("K", 0, tables.kv_in_forward),
        ("O", 0, tables.kv_out_forward),
        ("K", 1, tables.kv_in_backward),
        ("O", 1, tables.kv_out_backward),
    )
    found: set[Stream] = set()
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


def shared_budgets(budgets: Budgets, *, standing_bytes: int, alive: float) -> Budgets:
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
