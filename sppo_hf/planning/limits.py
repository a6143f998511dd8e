"""What a plan has to say about limits: which budget breaks, by how many bytes, and what helps."""

from __future__ import annotations

from collections.abc import Iterator

from sppo_hf.config import SPPOConfig
from sppo_hf.planning.choices import HOLES, DeviceFacts, leaves_holes, named_budgets
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.memory import check_budget
from sppo_hf.planning.modes import FrameMode, Tier
from sppo_hf.planning.moments import Budgets, MemoryEstimate
from sppo_hf.planning.shape import ModelShape
from sppo_hf.planning.solve import FirstLimit, over_budget
from sppo_hf.rules import format_bytes

_FULL = 0.8
"""Share of the device's budget from which on more of it would change a plan."""


def limit_text(limit: FirstLimit, budgets: Budgets, total_tokens: int) -> str:
    """Why nothing fits, in bytes, and what would help."""
    have = budgets.of(limit.tier) or 0
    need = have + limit.missing_bytes
    remedies = {
        "device": "Raise device_memory, give K/V room elsewhere (offload_kv='auto', host_memory, "
        "offload_dir), train fewer parameters, or shorten the sequences.",
        "host": "Raise host_memory, name a fast disk as offload_dir, or shorten the sequences.",
        "disk": "Raise disk_memory or free space in offload_dir, or shorten the sequences.",
    }
    return (
        f"{limit.tier} memory cannot hold rows of {total_tokens:,} tokens under any allowed "
        f"plan: at least {need:,} bytes ({format_bytes(need)}) at the {limit.moment}, "
        f"{have:,} bytes ({format_bytes(have)}) in the budget, {limit.missing_bytes:,} bytes "
        f"missing. {remedies[limit.tier]}"
    )


def check_standing_bytes(
    config: SPPOConfig, shape: ModelShape, budgets: Budgets, *, training: bool
) -> None:
    """Holds what stays on the device throughout against the budget that the user named.

    Raises:
        BudgetError: no choice of chunks can fit.
    """
    # Only a budget that the user named is a reason to refuse: without one, the weights are already
    # where they are, or sharded over devices in a way that is not visible here.
    budget = budgets.device
    if "device" not in named_budgets(config) or budget is None:
        return
    check_budget(
        "device",
        "weights and gradients" if training else "the weights",
        need_bytes=shape.weight_bytes + (shape.gradient_bytes if training else 0),
        have_bytes=budget,
        remedy="Raise device_memory, train fewer parameters (LoRA has almost no gradients), or load"
        " the model in a smaller dtype or quantised. No choice of chunks changes these bytes.",
    )


def check_named_budgets(config: SPPOConfig, budgets: Budgets, predicted: MemoryEstimate) -> None:
    """Holds what the user named against what fixed modes need; a solved plan fits already.

    Raises:
        BudgetError: a budget of the host or the disk is too small.
    """
    for limit in over_budget(predicted, budgets):
        if limit.tier == "device" or limit.tier not in named_budgets(config):
            continue
        have = budgets.of(limit.tier)
        assert have is not None, "a tier over its budget has one"
        check_budget(
            limit.tier,
            f"what offload={config.offload!r} sends there",
            need_bytes=have + limit.missing_bytes,
            have_bytes=have,
            remedy=f"Raise {limit.tier}_memory, set recompute='full' (less to send) or "
            "offload='auto' (sends what fits), or shorten the sequences.",
        )


def limit_warnings(
    shape: ModelShape,
    decisions: Decisions,
    predicted: MemoryEstimate,
    budgets: Budgets,
    total_tokens: int,
) -> Iterator[str]:
    """What a user should know before the first step, though nothing here stops it."""
    limit = shape.max_positions_tokens
    if limit is not None and total_tokens > limit:
        yield (
            f"sequences of {total_tokens:,} tokens are longer than the {limit:,} positions "
            "this model was made for; expect poor quality unless its rotary scaling is changed"
        )
    modes = {mode for row in decisions.layer_modes for mode in row}
    for over in over_budget(predicted, budgets):
        have = budgets.of(over.tier) or 0
        total = have + over.missing_bytes
        yield (
            f"predicted {over.tier} peak {format_bytes(total)} is over the "
            f"{format_bytes(have)} there are ({_largest_cause(predicted, over.tier)}); "
            + _remedy(modes, over.tier)
        )


def estimate_warnings(shape: ModelShape) -> tuple[str, ...]:
    """Says which of a plan's numbers hang on installed kernels: what scans take."""
    scans = sum(layer.scans for layer in shape.layers)
    if not scans:
        return ()
    return (
        f"{scans} of {shape.num_layers} layers are recurrent: the FLOPs and saved bytes of their "
        "scans are those of Transformers' torch code; kernels save less",
    )


def resting_warnings(shape: ModelShape) -> tuple[str, ...]:
    """Says what a prediction leaves out where weights or the optimizer rest on the host."""
    if shape.resting is None:
        return ()
    copied = format_bytes(shape.resting.weight_bytes)
    return (
        f"{copied} of weights rest on the host; the seconds of their copies (and of the "
        "optimizer's step there) are not in the prediction",
    )


def hole_warnings(
    config: SPPOConfig, facts: DeviceFacts, predicted: MemoryEstimate, budgets: Budgets
) -> Iterator[str]:
    """Says that a setting of PyTorch would let a plan that fills the device use more of it."""
    budget = budgets.device
    if not leaves_holes(config, facts) or budget is None:
        return
    if predicted.device.total > _FULL * budget:
        yield (
            f"{HOLES:.0%} of the device's memory are left to holes in PyTorch's allocator; to use "
            "them, add expandable_segments:True to PYTORCH_ALLOC_CONF, or leave that unset"
        )


def _largest_cause(predicted: MemoryEstimate, tier: Tier) -> str:
    cause, size = max(predicted.peak(tier).tier(tier).items(), key=lambda item: item[1])
    return f"most of it {cause}, {format_bytes(size)}"


def _remedy(modes: set[FrameMode], tier: Tier) -> str:
    if tier == "device" and not all(mode.recompute for mode in modes):
        return "recompute='full' holds less"
    if tier == "device" and not all(mode.offload for mode in modes):
        return "shorter sequences, or offload='full' where the host has room, hold less"
    if tier == "host" and not all(mode.recompute for mode in modes):
        return "recompute='full' sends less"
    return "shorter chunks or shorter sequences hold less"
