"""Fixed policies: activation modes of every (layer, chunk) by a rule instead of by a search.

Each works with any `Saved` value. `spread` and `spread_kinds`, which turn numbers of layers per
mode into a mode for each layer, are shared with the solver.

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
from sppo_hf.planning.memory import byte_tables
from sppo_hf.planning.tiers import Tier
from sppo_hf.registry import OFFLOAD_POLICIES


def sppo_ratios(activation_bytes: Sequence[float], threshold_bytes: float) -> tuple[float, ...]:
    """Returns alpha_i = min(1, M_th / A_i), the share of each chunk's activations to offload.

    Args:
        activation_bytes: A_i of every chunk, first to last.
        threshold_bytes: M_th, the bytes that can be copied during one chunk's compute.

    Returns:
        One ratio in [0, 1] per chunk. The last chunk's is 0: its backward comes next.
    """
    last = len(activation_bytes) - 1
    return tuple(
        0.0 if chunk == last else min(1.0, threshold_bytes / size) if size > 0 else 1.0
        for chunk, size in enumerate(activation_bytes)
    )


Policy = Callable[[ModelCost, Decisions, Saved, Tier, float], LayerModes]
"""Function that returns the modes of all (layer, chunk). Arguments: costs of the model on a device;
the batch; how much of a layer is saved; the nearest offload tier; bytes of K/V offloaded there."""


def register_policy(
    name: str, *, keeps: bool, leaves: bool, reason: str
) -> Callable[[Policy], Policy]:
    """Decorator that registers a policy as a value of `offload` and as a candidate of the solver.

    It keeps some activations on the device, or offloads some (`leaves`). One that does both needs
    to know the device's speed to choose between them. `reason` describes it in the plan's table.
    """

    def register(made: Policy) -> Policy:
        OFFLOAD_POLICIES.add(name, made, keeps=keeps, leaves=leaves, reason=reason)
        return made

    return register


Chosen = TypeVar("Chosen", ActivationMode, KVMode)


def uniform_modes(num_chunks: int, num_layers: int, mode: ActivationMode) -> LayerModes:
    """Returns the same mode for every (layer, chunk)."""
    return ((mode,) * num_layers,) * num_chunks


@register_policy("none", keeps=True, leaves=False, reason="all stays on the device")
def none_modes(
    cost: ModelCost, base: Decisions, saved: Saved, tier: Tier, kv_bytes: float = 0.0
) -> LayerModes:
    """Returns modes that keep all activations on the device."""
    return uniform_modes(base.num_chunks, base.num_layers, mode_of(saved, "device"))


@register_policy("full", keeps=False, leaves=True, reason="all leaves the device")
def full_modes(
    cost: ModelCost, base: Decisions, saved: Saved, tier: Tier, kv_bytes: float = 0.0
) -> LayerModes:
    """Returns modes that offload all activations."""
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
    """Returns modes by the paper's rule: each chunk offloads what one chunk's compute can hide.

    By layer, the rule is applied to each layer's chunks instead of each chunk's layers.
    """
    sizes = byte_tables(cost.shape, base, cost.profile.kind).activations(saved)
    if base.by_layer:
        sizes = sizes.T
    layers, bounds, most = range(base.num_layers), base.bounds, sizes.shape[1]
    forward = sum(cost.forward_seconds(i, start, end) for i in layers for start, end in bounds)
    keep, away = mode_of(saved, "device"), mode_of(saved, tier)
    whole = sizes.sum(axis=1).tolist()
    leave = sppo_leaving(cost, whole, forward, members=most, kv_bytes=kv_bytes)
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
    """Returns the number of layers to offload of each chunk by the paper's rule.

    `alpha_i = min(1, BW * T_chunk / A_i)`, where T_chunk is the mean forward time of a chunk
    without the head. Whole layers are offloaded, so alpha is rounded to a number of layers. The
    last chunk and all other layers are kept on the device. BW is the speed of a copy while another
    runs the other way, as in a pipeline, where forwards and backwards alternate; the bytes of K/V
    are subtracted from what can be copied.

    By layer, chunks and layers change places in all of this. A_i are summed over the `members`
    layers of the device or stage, and seconds of forward and bytes of K/V over all chunks.
    """
    room = max(0.0, forward_seconds / cost.d2h_seconds(1.0, both=True) - kv_bytes)
    ratios = sppo_ratios(activation_bytes, room / len(activation_bytes))
    return [round(ratio * members) for ratio in ratios]


def spread(counts: Mapping[Chosen, int], num_layers: int) -> tuple[Chosen, ...]:
    """Returns a mode for each layer, with each mode's layers spread as evenly as possible.

    So compute and copies are used evenly over time.
    """
    assert sum(counts.values()) == num_layers, "every layer has one mode"
    given = dict.fromkeys(counts, 0)
    chosen: list[Chosen] = []
    for layer in range(num_layers):
        # Take the mode that is farthest below its share of the layers so far.
        mode = max(counts, key=lambda m: counts[m] * (layer + 1) / num_layers - given[m])
        given[mode] += 1
        chosen.append(mode)
    return tuple(chosen)


def spread_kinds(
    counts: Sequence[Mapping[Chosen, int]], members: Sequence[Sequence[int]], num_layers: int
) -> tuple[Chosen, ...]:
    """Returns a mode for each layer like `spread`, separately for each kind of layer.

    `counts` are the numbers of layers with each mode, and `members` the layers' indices, by kind.
    """
    chosen: list[Chosen | None] = [None] * num_layers
    for kind, layers in zip(counts, members, strict=True):
        for layer, mode in zip(layers, spread(kind, len(layers)), strict=True):
            chosen[layer] = mode
    return tuple(mode for mode in chosen if mode is not None)
