"""Limits that a config and a machine set for the solver: budgets, allowed modes and tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sppo_hf.config import SPPOConfig
from sppo_hf.planning.activation_modes import ATTENTION_ONCE, SAVED, SAVED_BY_RECOMPUTE, Saved
from sppo_hf.planning.decisions import Order
from sppo_hf.planning.hardware import HardwareProfile
from sppo_hf.planning.memory import Budgets
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.solve import Choices
from sppo_hf.planning.tiers import DEVICE, HOST, TIERS, Tier
from sppo_hf.planning.tile_sizes import LAYER_TILES_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Facts about the machine that planning uses; collected by packages that may import torch."""

    kind: str
    """"cpu" or "cuda"."""

    name: str
    memory_bytes: Mapping[Tier, int | None] = field(default_factory=dict[Tier, int | None])
    """Bytes of each tier that a plan may count on; None, or left out, if unknown. For a CPU, those
    of the device are the machine's."""

    expandable_segments: bool = True
    """Whether PyTorch's CUDA allocator uses expandable segments, which hardly fragment."""

    profile: HardwareProfile | None = None
    """The machine's speeds; None if unknown, and plans are then not compared by time."""


# Allocations of real steps, replayed on a model of the allocator without expandable segments,
# needed between 2% and 10% more than their peak.
FRAGMENTATION_SHARE = 0.08
"""Share of the device that is reserved for fragmentation without expandable segments."""


def read_budgets(config: SPPOConfig, facts: DeviceFacts) -> Budgets:
    """Returns the budget of each tier: the config's, else what the machine has.

    Without a budget in the config, memory is reserved for fragmentation of an allocator without
    expandable segments.
    """
    budgets = {name: tier.capacity_bytes(config, facts) for name, tier in TIERS.items()}
    device = budgets[DEVICE]
    if device is not None and reserves_fragmentation(config, facts):
        budgets[DEVICE] = device - int(FRAGMENTATION_SHARE * device)
    return Budgets(**budgets)


def reserves_fragmentation(config: SPPOConfig, facts: DeviceFacts) -> bool:
    """Whether a part of the device's memory is reserved for fragmentation."""
    return config.device_memory is None and facts.kind == "cuda" and not facts.expandable_segments


def named_budgets(config: SPPOConfig) -> frozenset[Tier]:
    """Returns the tiers with a budget in the config; only these are a reason to refuse a batch.

    Exceeding what the machine has is only warned about: weights may be sharded over devices in a
    way that is not visible here, and an estimate may be wrong.
    """
    return frozenset(name for name, tier in TIERS.items() if tier.named(config) is not None)


def may_rerun_attention(config: SPPOConfig, facts: DeviceFacts, shape: ModelShape) -> bool:
    """Whether attention of some layers may be recomputed in backward, if nothing fits otherwise.

    Not if layers share K/V (recomputation would need another layer's), if ranks share sequences
    (they would exchange tokens once more), or in a pipeline (whose stages wait for each other).
    """
    if config.attention_once or config.recompute != "auto" or config.sharing_ranks > 1:
        return False
    if not is_searched(config, facts):
        return False
    attends = any(layer.num_heads for layer in shape.layers)
    return attends and not any(layer.borrows_keys for layer in shape.layers)


def read_choices(
    config: SPPOConfig, facts: DeviceFacts, *, rerun_attention: bool = False
) -> Choices:
    """Returns the modes and tiers that the config allows on this device."""
    saved: tuple[Saved, ...] = SAVED if rerun_attention else ATTENTION_ONCE
    if config.recompute != "auto":
        saved = (SAVED_BY_RECOMPUTE[config.recompute],)
    if config.compile:
        # Matmul outputs are recorded by a dispatch mode, with which compiled code does not run.
        saved = tuple(one for one in saved if one != "matmuls")
    away = allowed_offload_tiers(config, facts)
    activation_tiers = allowed_activation_tiers(config, facts)
    tiers: tuple[Tier, ...] = (DEVICE, *activation_tiers)
    if config.offload == "none":
        tiers = (DEVICE,)
    elif config.offload == "full":
        tiers = activation_tiers or (HOST,)
    kv_tiers: tuple[Tier, ...] = (DEVICE, *away)
    if config.offload_kv == "none":
        kv_tiers = (DEVICE,)
    elif config.offload_kv == "full":
        kv_tiers = away or (HOST,)
    return Choices(saved=saved, tiers=tiers, kv_tiers=kv_tiers)


def read_tiles(config: SPPOConfig, device: DeviceFacts) -> tuple[int, ...]:
    """Returns the allowed tile sizes of a layer over all tokens, if one chunk is allowed."""
    several = config.num_chunks not in ("auto", 1) or len(config.chunk_lengths or ()) > 1
    if several or config.chunk_tokens or config.compile or config.sharing_ranks > 1:
        return ()
    if config.layer_tile_tokens == "auto":
        return LAYER_TILES_TOKENS[device.kind]
    return (config.layer_tile_tokens,) if config.layer_tile_tokens else ()


def named_loss_tile(config: SPPOConfig) -> int | None:
    """Returns the tokens per tile of the loss that the config names, if it does."""
    return None if config.loss_tile_tokens == "auto" else config.loss_tile_tokens


def read_orders(
    config: SPPOConfig, *, by_layer: bool = True, sharded: bool = False
) -> tuple[Order, ...]:
    """Returns the allowed orders, the one with less memory first.

    With `sharded` weights are gathered from all ranks whenever a layer runs.
    """
    # A stage of a pipeline passes each chunk on before it begins the next.
    if not by_layer or config.pp_size > 1 or config.order == "by_chunk":
        return ("by_chunk",)
    if config.weights == "host" or sharded:
        # By chunk all weights would come once for every chunk; gathered ones also for each of the
        # chunks that other ranks have, if rows have other lengths there.
        return ("by_layer",)
    return ("by_layer",) if config.order == "by_layer" else ("by_layer", "by_chunk")


class Placement(NamedTuple):
    """The parts of a model that are host-resident."""

    weights: bool
    """Weights of layers, except trained ones whose optimizer is on the device."""

    optimizer: bool
    """Trained weights, with their gradients and the optimizer."""

    def set_in(self, config: SPPOConfig) -> SPPOConfig:
        """Returns the settings with this placement and nothing left open."""
        weights, optimizer = ("host" if away else "device" for away in self)
        return config.replace(weights=weights, optimizer=optimizer)


def read_placements(
    config: SPPOConfig,
    facts: DeviceFacts,
    *,
    adapters: bool = False,
    by_layer: bool = True,
) -> tuple[Placement, ...]:
    """Returns the allowed placements, the one with the fewest bytes on the host first.

    An optimizer left to "auto" follows the weights: it runs where they are. That of adapters alone
    would free little. With `by_layer` the model's layers can be called on parts of a sequence.
    """
    asked = Placement(*config.host_resident)
    # On a CPU host memory is the device's own; ranks that share batches keep their weights on the
    # device, as each also needs them for the others' chunks.
    if facts.kind == "cpu" or config.sharing_ranks > 1:
        return (asked,)
    found = [asked]
    if config.optimizer == "auto" and not (asked.optimizer or adapters):
        found.append(Placement(weights=False, optimizer=True))
    once = by_layer and config.order != "by_chunk" and config.micro_batch_size is None
    if config.weights == "auto" and once:
        found.append(Placement(weights=True, optimizer=config.optimizer != "device"))
    return tuple(found)


def is_searched(config: SPPOConfig, facts: DeviceFacts) -> bool:
    """Whether plans are compared by time; on a CPU only within a budget that the user named."""
    saves_memory = facts.kind == "cpu" and config.device_memory is None
    return not (saves_memory or facts.profile is None or is_fixed(config, facts))


def is_fixed(config: SPPOConfig, facts: DeviceFacts) -> bool:
    """Whether nothing is left to search: modes are fixed, and one tier takes what is offloaded."""
    # With two offload tiers, the solver has to choose between them.
    one_place = config.offload == "none" or len(allowed_activation_tiers(config, facts)) < 2
    fixed = config.offload != "auto" and config.recompute != "auto" and one_place
    return fixed or config.offload_is_partial


def allowed_activation_tiers(config: SPPOConfig, facts: DeviceFacts) -> tuple[Tier, ...]:
    """Returns the tiers of `allowed_offload_tiers` that saved activations may use."""
    away = allowed_offload_tiers(config, facts)
    if config.offload_tier == "auto":
        return away
    return tuple(tier for tier in away if tier == config.offload_tier)


def allowed_offload_tiers(config: SPPOConfig, facts: DeviceFacts) -> tuple[Tier, ...]:
    """Returns the tiers that bytes may be offloaded to, nearest first.

    On a CPU the host is not among them, as its memory is the device's own.
    """
    there = (name for name, tier in TIERS.items() if tier.is_available(config, facts.kind))
    return tuple(name for name in there if name != DEVICE)
