"""What a simulated step says, chunk by chunk: seconds of compute, copies and standing still.

Knows nothing of how a plan was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.flops import forward_flops, peak_flops, step_flops
from sppo_hf.planning.lowering import COMPUTE, D2H, H2D, HOST_COMPUTE, lower
from sppo_hf.planning.tiers import TIERS, Tier
from sppo_hf.schedule.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPrediction:
    """Seconds of one chunk."""

    forward_seconds: float = 0.0
    """Compute of its forward, head and loss included."""

    backward_seconds: float = 0.0
    """Compute of its backward, recomputation included."""

    d2h_seconds: float = 0.0
    """Copies of its bytes to the host, whether hidden or not."""

    h2d_seconds: float = 0.0
    """Copies of its bytes to the device."""

    tier_seconds: Mapping[Tier, float] = field(default_factory=dict[Tier, float])
    """Writes and reads of its bytes, by tier behind the host."""

    @property
    def compute_seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A simulated step."""

    policy: str
    """The candidate that won: "solver", or a fixed policy by name."""

    step_seconds: float
    """Duration."""

    stall_seconds: float
    """Compute standing still for copies and disk."""

    update_seconds: float = 0.0
    """The optimizer's update on the host, which follows backward; 0 where it is on the device."""

    bound_seconds: float
    """Duration of the program's optimum over fractional layers; 0 where it was not asked."""

    tokens_per_second: float
    """Of all rows."""

    tflops: float
    """Model TFLOP/s of one device, recomputation not counted."""

    mfu: float | None
    """Of the device's dense bf16 peak; None where that is unknown."""

    chunks: tuple[ChunkPrediction, ...]
    """First to last."""

    d2h_bytes: int = 0
    """Activations that leave the device, for the host or on to the disk."""

    h2d_bytes: int = 0
    """What of them comes back; keys and values, where they leave, for each chunk that uses them."""

    @property
    def forward_backward_seconds(self) -> float:
        """The step without an update on the host, as an engine can measure it."""
        return self.step_seconds - self.update_seconds


def predict(
    decisions: Decisions,
    cost: ModelCost,
    timeline: Timeline,
    *,
    policy: str,
    bound_seconds: float = 0.0,
) -> Prediction:
    """Summarises a simulated step."""
    tokens = decisions.batch_rows * decisions.total_tokens
    flops = step_flops if decisions.training else forward_flops
    model_flops = flops(cost.shape, decisions.batch_rows, decisions.total_tokens) / cost.sp
    step_seconds = timeline.end_seconds
    peak = peak_flops(cost.profile.name)
    d2h_bytes, h2d_bytes = lower(decisions, cost).copied_bytes
    return Prediction(
        policy=policy,
        step_seconds=step_seconds,
        stall_seconds=step_seconds
        - timeline.busy_seconds(COMPUTE)
        - timeline.busy_seconds(HOST_COMPUTE),
        update_seconds=timeline.busy_seconds(HOST_COMPUTE),
        bound_seconds=bound_seconds,
        tokens_per_second=tokens / step_seconds,
        tflops=model_flops / step_seconds / 1e12,
        mfu=None if peak is None else model_flops / step_seconds / peak,
        chunks=_by_chunk(decisions, timeline),
        d2h_bytes=d2h_bytes,
        h2d_bytes=h2d_bytes,
    )


def _by_chunk(decisions: Decisions, timeline: Timeline) -> tuple[ChunkPrediction, ...]:
    fields = {COMPUTE: "", D2H: "d2h_seconds", H2D: "h2d_seconds"}
    tiers = {
        lane: name
        for name, tier in TIERS.items()
        if tier.behind_host
        for lane in (tier.store_lane, tier.load_lane)
    }
    sums: list[dict[str, float]] = [{} for _ in decisions.bounds]
    behind: list[dict[Tier, float]] = [{} for _ in decisions.bounds]
    for span in timeline.spans():
        if span.lane == HOST_COMPUTE:
            continue  # the optimizer's, of no chunk
        taken = span.end_seconds - span.start_seconds
        chunk = span.action.unit
        if span.lane in tiers:
            tier = tiers[span.lane]
            behind[chunk][tier] = behind[chunk].get(tier, 0.0) + taken
            continue
        name = fields[span.lane]
        if span.lane == COMPUTE:
            name = "backward_seconds" if span.action.kind == "B" else "forward_seconds"
        sums[chunk][name] = sums[chunk].get(name, 0.0) + taken
    return tuple(
        ChunkPrediction(**chunk, tier_seconds=others)
        for chunk, others in zip(sums, behind, strict=True)
    )
