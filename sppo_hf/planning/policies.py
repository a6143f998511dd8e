"""Fixed policies: modes of every frame by a rule instead of by a search.

Each may save frames whole or reduced. Also how counts of layers become modes of layers, which rules
and solver share.

The paper's rule (SPPO, arXiv 2503.10377, sequence-aware offloading) is here as formulas on plain
numbers: chunk i's activations are A_i bytes, the copy of chunk i - 1 overlaps the compute of chunk
i, and the bytes moved per chunk are held constant at the threshold M_th = (bytes per second to the
host) x (seconds of one balanced chunk). K and V stay on the device; what is not offloaded is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from sppo_hf.planning.activation_modes import ActivationMode, Saved, mode_of
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions, KVMode, LayerModes, layer_modes_of
from sppo_hf.planning.tiers import Tier
from sppo_hf.registry import OFFLOAD_POLICIES


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


Policy = Callable[[ModelCost, Decisions, Saved, Tier, float], LayerModes]
"""From a model's costs on a device, the batch, how much is saved of a layer, the nearest tier away
from the device and the bytes of K/V that go there too: modes of all frames."""


def register_policy(
    name: str, *, keeps: bool, leaves: bool, reason: str
) -> Callable[[Policy], Policy]:
    """Decorator: the policy can be asked for by name, and is a candidate of the solver.

    Args:
        name: value of the setting `offload`.
        keeps: whether some frames stay on the device.
        leaves: whether some leave it. A policy of which both are true chooses between frames, so
            it needs to know how fast the device is.
        reason: what it does, for the plan's table.
    """

    def register(made: Policy) -> Policy:
        OFFLOAD_POLICIES.add(name, made, keeps=keeps, leaves=leaves, reason=reason)
        return made

    return register


Chosen = TypeVar("Chosen", ActivationMode, KVMode)


def uniform_modes(num_chunks: int, num_layers: int, mode: ActivationMode) -> LayerModes:
    """Returns the same mode for every frame."""
    return ((mode,) * num_layers,) * num_chunks


@register_policy("none", keeps=True, leaves=False, reason="all stays on the device")
def none_modes(
    cost: ModelCost, base: Decisions, saved: Saved, tier: Tier, kv_bytes: float = 0.0
) -> LayerModes:
    """Returns modes that keep every frame on the device."""
    return uniform_modes(base.num_chunks, base.num_layers, mode_of(saved, "device"))


@register_policy("full", keeps=False, leaves=True, reason="all leaves the device")
def full_modes(
    cost: ModelCost, base: Decisions, saved: Saved, tier: Tier, kv_bytes: float = 0.0
) -> LayerModes:
    """Returns modes that let every frame leave."""
    return uniform_modes(base.num_chunks, base.num_layers, mode_of(saved, tier))


@register_policy(
    "sppo",
    keeps=True,
    leaves=True,
    reason="of each chunk as much as one chunk's compute time can copy",
)
def sppo_modes(
    cost: ModelCost,
    base: Decisions,
    saved: Saved = "whole",
    tier: Tier = "host",
    kv_bytes: float = 0.0,
) -> LayerModes:
    """Returns the paper's rule: of each chunk as many layers leave as one chunk's compute can copy.

    By layer the same is said of each layer's chunks.
    """
    lengths, bounds = base.chunk_lengths, base.bounds
    slots = [base.units(slot) for slot in base.slots]
    sizes = [sum(cost.activation_bytes(i, lengths[chunk], saved) for chunk, i in s) for s in slots]
    layers = range(base.num_layers)
    forward = sum(cost.forward_seconds(i, start, end) for i in layers for start, end in bounds)
    keep, away = mode_of(saved, "device"), mode_of(saved, tier)
    most = len(slots[0])
    leave = sppo_leaving(cost, sizes, forward, members=most, kv_bytes=kv_bytes)
    rows = [spread({away: leaving, keep: most - leaving}, most) for leaving in leave]
    return layer_modes_of(rows, by_layer=base.by_layer)


def sppo_leaving(
    cost: ModelCost,
    activation_bytes: Sequence[float],
    forward_seconds: float,
    *,
    members: int,
    kv_bytes: float,
) -> list[int]:
    """Returns how many layers of each chunk leave by the paper's rule, on a device or a stage.

    `alpha_i = min(1, BW * T_chunk / A_i)` with T_chunk the mean forward time of a chunk, the head's
    left out; layers are whole, so alpha is rounded to the nearest of them. The last chunk stays, as
    does what is not offloaded. The copies' speed is that of both directions at once, as in a
    pipeline, whose forwards and backwards take turns, less what K/V take of it.

    Args:
        cost: Its rate of copies is looked at.
        activation_bytes: A_i of every chunk, all layers of the stage together.
        forward_seconds: Of all chunks through all layers.
        members: Layers of the stage; by layer, chunks, and the other way round in all of the above.
        kv_bytes: What K/V of all chunks copy to the host meanwhile.
    """
    room = max(0.0, forward_seconds / cost.d2h_seconds(1.0, both=True) - kv_bytes)
    ratios = sppo_ratios(activation_bytes, room / len(activation_bytes))
    return [round(ratio * members) for ratio in ratios]


def spread(counts: Mapping[Chosen, int], num_layers: int) -> tuple[Chosen, ...]:
    """Lays modes over layers as evenly as their counts allow, so that resources are used evenly."""
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
