"""Predicted durations of a step, by chunk, and their correction by measured steps.

Hardware profiles are inexact: they were measured with other kernels or at another temperature, or
estimated. The first steps show by how much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sppo_hf.planning.cost import Correction, ModelCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.hardware import peak_flops
from sppo_hf.planning.lowering import COMPUTE, D2H, H2D, HOST_COMPUTE, lower
from sppo_hf.planning.model_shape import forward_flops, step_flops
from sppo_hf.planning.tiers import TIERS, Tier
from sppo_hf.schedule.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPrediction:
    """Predicted seconds of one chunk."""

    forward_seconds: float = 0.0
    """Seconds of compute of the chunk's forward, including head and loss."""

    backward_seconds: float = 0.0
    """Seconds of compute of the chunk's backward, including recomputation."""

    d2h_seconds: float = 0.0
    """Seconds of copies of the chunk's bytes to the host, hidden behind compute or not."""

    h2d_seconds: float = 0.0
    """Seconds of copies of the chunk's bytes to the device."""

    tier_seconds: Mapping[Tier, float] = field(default_factory=dict[Tier, float])
    """Seconds of writes and reads of the chunk's bytes, by tier behind the host."""

    @property
    def compute_seconds(self) -> float:
        """Seconds of compute in forward and backward."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Summary of a simulated step."""

    policy: str
    """The winning candidate: "solver", or a fixed policy by name."""

    step_seconds: float
    stall_seconds: float
    """Time that compute waits for copies and disk."""

    update_seconds: float = 0.0
    """Seconds of the optimizer's update on the host, after backward; 0 if it is on the device."""

    tokens_per_second: float
    """Tokens per second, over all rows."""

    mfu: float | None
    """Share of the device's dense bf16 peak; None if that is unknown."""

    chunks: tuple[ChunkPrediction, ...]
    """Durations by chunk."""

    d2h_bytes: int = 0
    """Bytes copied to the host, including those that go on to the disk."""

    h2d_bytes: int = 0
    """Bytes copied to the device; streamed K/V count once for each chunk that uses them."""

    @property
    def forward_backward_seconds(self) -> float:
        """Seconds of the step without an update on the host, as the engine measures it."""
        return self.step_seconds - self.update_seconds


def predict(
    decisions: Decisions,
    cost: ModelCost,
    timeline: Timeline,
    *,
    policy: str,
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
        tokens_per_second=tokens / step_seconds,
        mfu=None if peak is None else model_flops / step_seconds / peak,
        chunks=_by_chunk(decisions, timeline),
        d2h_bytes=d2h_bytes,
        h2d_bytes=h2d_bytes,
    )


def _by_chunk(decisions: Decisions, timeline: Timeline) -> tuple[ChunkPrediction, ...]:
    fields = {COMPUTE: "", D2H: "d2h_seconds", H2D: "h2d_seconds"}
    tiers = {
        resource: name
        for name, tier in TIERS.items()
        if tier.behind_host
        for resource in (tier.store_resource, tier.load_resource)
    }
    sums: list[dict[str, float]] = [{} for _ in decisions.bounds]
    behind: list[dict[Tier, float]] = [{} for _ in decisions.bounds]
    for span in timeline.spans():
        if span.resource == HOST_COMPUTE:
            continue  # the optimizer's, of no chunk
        taken = span.end_seconds - span.start_seconds
        chunk = span.action.unit
        if span.resource in tiers:
            tier = tiers[span.resource]
            behind[chunk][tier] = behind[chunk].get(tier, 0.0) + taken
            continue
        name = fields[span.resource]
        if span.resource == COMPUTE:
            name = "backward_seconds" if span.action.kind == "B" else "forward_seconds"
        sums[chunk][name] = sums[chunk].get(name, 0.0) + taken
    return tuple(
        ChunkPrediction(**chunk, tier_seconds=others)
        for chunk, others in zip(sums, behind, strict=True)
    )


# A stall longer than predicted by more than this share of the step is attributed to copies.
_STALL_NOISE = 0.02
# Corrections smaller than this are noise and change no plan.
_WORTH_CORRECTING = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """Measured durations and bytes of one forward and backward."""

    forward_seconds: tuple[float, ...]
    """Seconds of each chunk's forward, stalls included."""

    backward_seconds: tuple[float, ...]
    """Seconds of each chunk's backward, stalls included."""

    stall_seconds: float
    """Time that compute waits for copies and disk, over the step."""

    d2h_bytes: int = 0
    h2d_bytes: int = 0
    disk_write_bytes: int = 0
    disk_read_bytes: int = 0

    @property
    def step_seconds(self) -> float:
        """Seconds of forward and backward, summed over chunks."""
        return sum(self.forward_seconds) + sum(self.backward_seconds)


def learn(prediction: Prediction, measured: MeasuredStep, before: Correction) -> Correction:
    """Returns the correction that makes the prediction agree with a measurement.

    Compute time is the measured time minus stalls, which are subtracted from forward and backward
    in proportion. If compute waited longer than predicted, the copies were slower by that time.

    `measured` is not the first step of the plan, which compiles, allocates and pins; `before` is
    the correction with which the prediction was made.
    """
    step = measured.step_seconds
    busy = max(0.0, 1.0 - measured.stall_seconds / step) if step > 0 else 1.0
    forward = _ratio(
        busy * sum(measured.forward_seconds), sum(c.forward_seconds for c in prediction.chunks)
    )
    backward = _ratio(
        busy * sum(measured.backward_seconds), sum(c.backward_seconds for c in prediction.chunks)
    )
    late = measured.stall_seconds - prediction.stall_seconds * max(forward, backward)
    copies = sum(c.d2h_seconds + c.h2d_seconds for c in prediction.chunks)
    slower = 1.0 + late / copies if copies > 0 and late > _STALL_NOISE * step else 1.0
    return Correction(
        forward=before.forward * forward,
        backward=before.backward * backward,
        d2h=before.d2h * slower,
        h2d=before.h2d * slower,
    )


def worth_correcting(before: Correction, after: Correction) -> bool:
    """Whether *relative* speeds changed enough for another plan to be better.

    If everything is slower by the same factor, the same plan is the fastest.
    """
    factors = [
        after.forward / before.forward,
        after.backward / before.backward,
        after.d2h / before.d2h,
        after.h2d / before.h2d,
    ]
    return max(factors) > (1.0 + _WORTH_CORRECTING) * min(factors)


def _ratio(measured: float, predicted: float) -> float:
    return measured / predicted if predicted > 0 and measured > 0 else 1.0
