"""JSON output of `sppo estimate --json` and `sppo plan --json`.

Seconds, bytes and tokens are plain numbers; keys name the unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sppo_hf.planning.feasibility import PlanResult, PolicyResult
from sppo_hf.planning.memory import MemoryEstimate
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.solve import BudgetViolation
from sppo_hf.planning.tiers import TIERS


def answer_to_dict(answer: PlanResult) -> dict[str, Any]:
    """Returns an answer in plain JSON types.

    If no plan fits, `chunks` is empty, values of a plan are None, and `peak_by_cause` and `moments`
    are those of the plan that comes closest.
    """
    plan = answer.plan
    predicted = None if plan is None else plan.prediction
    profile = answer.request.device.profile
    return {
        "fits": answer.fits,
        "first_limit": _limit(answer.first_limit),
        "chunks": [] if plan is None else chunks_to_list(plan),
        "peak_bytes": _peaks(None if plan is None else plan.estimate),
        "step_seconds": None if predicted is None else predicted.step_seconds,
        "tokens_per_second": None if predicted is None else predicted.tokens_per_second,
        "mfu": None if predicted is None else predicted.mfu,
        "stall_seconds": None if predicted is None else predicted.stall_seconds,
        "update_seconds": None if predicted is None else predicted.update_seconds,
        "attention_again_seconds": None if plan is None else plan.program().attention_rerun_seconds,
        "max_seq_len": answer.max_seq_len,
        "policy": None if predicted is None else predicted.policy,
        "order": None if plan is None else plan.order,
        "weights": None if plan is None else weight_placement(plan)[0],
        "optimizer": None if plan is None else weight_placement(plan)[1],
        "layer_tile_tokens": None if plan is None else plan.layer_tile_tokens,
        "kv_tier": None if plan is None else plan.farthest_kv_tier,
        "kv_modes": None if plan is None else list(plan.kv_modes),
        "kv_block_tokens": None if plan is None else plan.kv_block_tokens,
        "hardware": answer.request.device.name,
        "estimated": profile is None or profile.estimated,
        "peak_by_cause": {
            tier: {str(cause): size for cause, size in answer.estimate.of(tier).shown()}
            for tier in TIERS
        },
        "moments": {tier: answer.estimate.moment_of(tier) for tier in TIERS},
        "warnings": [] if plan is None else list(plan.warnings),
    }


def weight_placement(plan: Plan) -> tuple[str, str]:
    """Returns where layers' weights and the optimizer are kept: "device" or "host"."""
    resident = plan.shape.host_resident
    weights = resident is not None and not resident.keeps_device_copies
    optimizer = resident is not None and resident.gradient_bytes > 0
    return "host" if weights else "device", "host" if optimizer else "device"


def actions_to_list(plan: Plan | None) -> list[list[str]]:
    """Returns the actions of the only rank, in order, in their text form."""
    return [] if plan is None else [[str(action) for action in plan.program().actions]]


def policies_to_list(results: Sequence[PolicyResult]) -> list[dict[str, Any]]:
    """Returns a comparison of policies, in the given order."""
    return [
        {
            "policy": result.policy,
            "frames": result.recompute,
            "fits": result.first_limit is None,
            "first_limit": _limit(result.first_limit),
            "step_seconds": result.step_seconds,
            "tokens_per_second": result.tokens_per_second,
            "peak_bytes": _peaks(result.estimate),
        }
        for result in results
    ]


def chunks_to_list(plan: Plan) -> list[dict[str, Any]]:
    """Returns one object per chunk, first to last.

    `keep_layers` is the number of layers whose activations are all kept on the device,
    `offload_layers` of layers with offloaded activations, and `recompute_layers` of layers with any
    recomputation; a layer may count in the last two. `attention_again_layers` is the number of
    layers whose attention is recomputed too. `offload_ratio` is the offloaded share of the chunk's
    saved bytes.
    """
    assert plan.prediction is not None, "a plan made with a profile is predicted"
    reruns = plan.program().reruns_attention.sum(axis=1).tolist()
    ratios = offload_ratios(plan)
    chunks: list[dict[str, Any]] = []
    for chunk, ((start, end), modes) in enumerate(zip(plan.bounds, plan.layer_modes, strict=True)):
        seconds = plan.prediction.chunks[chunk]
        chunks.append(
            {
                "start": start,
                "end": end,
                "tokens": end - start,
                "keep_layers": sum(not (mode.recompute or mode.offload) for mode in modes),
                "offload_layers": sum(mode.offload for mode in modes),
                "recompute_layers": sum(mode.recompute for mode in modes),
                "attention_again_layers": reruns[chunk],
                "offload_ratio": ratios[chunk],
                "compute_seconds": seconds.compute_seconds,
                "d2h_seconds": seconds.d2h_seconds,
                "h2d_seconds": seconds.h2d_seconds,
            }
        )
    return chunks


def offload_ratios(plan: Plan) -> list[float]:
    """Returns the fraction of each chunk's saved bytes that is offloaded, 0 to 1."""
    program = plan.program()
    sizes = program.offloaded_bytes, program.activation_bytes
    away, saved = (size.sum(axis=1).tolist() for size in sizes)
    return [part / whole if whole else 0.0 for part, whole in zip(away, saved, strict=True)]


def _limit(limit: BudgetViolation | None) -> dict[str, Any] | None:
    if limit is None:
        return None
    return {"tier": limit.tier, "missing_bytes": limit.missing_bytes, "moment": limit.moment}


def _peaks(predicted: MemoryEstimate | None) -> dict[str, int | None]:
    return {tier: None if predicted is None else predicted.of(tier).total for tier in TIERS}
