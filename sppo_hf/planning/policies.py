"""Fixed policies: modes of every frame by a rule instead of by a search.

"none" keeps every frame, "full" offloads every frame, "sppo" is the paper's rule (see `policy`).
Each may save frames whole or reduced. Also how counts of layers become modes of layers, which rules
and solver share. Knows nothing of budgets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from sppo_hf.planning.cost import StageCost
from sppo_hf.planning.decisions import Decisions, KVMode, LayerModes, layer_modes_of
from sppo_hf.planning.modes import FrameMode, Saved, Tier, mode_of
from sppo_hf.planning.policy import sppo_ratios

Chosen = TypeVar("Chosen", FrameMode, KVMode)


def uniform_modes(num_chunks: int, num_layers: int, mode: FrameMode) -> LayerModes:
    """Returns the same mode for every frame."""
    return ((mode,) * num_layers,) * num_chunks


def sppo_modes(
    cost: StageCost, base: Decisions, *, saved: Saved = "whole", tier: Tier = "host"
) -> LayerModes:
    """Returns the paper's rule: of each chunk as many layers leave as one chunk's compute can copy.

    `alpha_i = min(1, BW * T_chunk / A_i)` with T_chunk the mean forward time of a chunk; layers are
    whole, so alpha is rounded to the nearest of them. The last chunk stays, as does what is not
    offloaded. The copies' speed is that of both directions at once, as in a pipeline, whose
    forwards and backwards take turns; plans for a pipeline count on the same. By layer the same is
    said of each layer's chunks, and the last layer stays.
    """
    lengths, bounds = base.chunk_lengths, base.bounds
    slots = [base.units(slot) for slot in base.slots]
    sizes = [sum(cost.frame_bytes(i, lengths[chunk], saved) for chunk, i in s) for s in slots]
    layers = range(base.num_layers)
    forward = sum(cost.forward_seconds(i, start, end) for i in layers for start, end in bounds)
    threshold_bytes = forward / len(slots) / cost.d2h_seconds(1.0, both=True)
    keep, away = mode_of(saved, "device"), mode_of(saved, tier)
    rows: list[tuple[FrameMode, ...]] = []
    for ratio, units in zip(sppo_ratios(sizes, threshold_bytes), slots, strict=True):
        leaving = round(ratio * len(units))
        rows.append(spread({away: leaving, keep: len(units) - leaving}, len(units)))
    return layer_modes_of(rows, by_layer=base.by_layer)


def spread(counts: Mapping[Chosen, int], num_layers: int) -> tuple[Chosen, ...]:
    """Lays modes over layers as evenly as their counts allow, so that copy lanes are used evenly.

    Args:
        counts: layers per mode; they sum to `num_layers`.
        num_layers: how many layers there are.
    """
    assert sum(counts.values()) == num_layers, "every layer has one mode"
    given = dict.fromkeys(counts, 0)
    chosen: list[Chosen] = []
    for layer in range(num_layers):
        # The mode that lags most behind its share of the layers so far.
        mode = max(counts, key=lambda m: counts[m] * (layer + 1) / num_layers - given[m])
        given[mode] += 1
        chosen.append(mode)
    return tuple(chosen)


def spread_kinds(
    counts: Sequence[Mapping[Chosen, int]], members: Sequence[Sequence[int]], num_layers: int
) -> tuple[Chosen, ...]:
    """Like `spread`, kind of layer by kind of layer."""
    chosen: list[Chosen | None] = [None] * num_layers
    for kind, layers in zip(counts, members, strict=True):
        for layer, mode in zip(layers, spread(kind, len(layers)), strict=True):
            chosen[layer] = mode
    return tuple(mode for mode in chosen if mode is not None)
