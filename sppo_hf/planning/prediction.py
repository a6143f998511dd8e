"""What a simulated step says, chunk by chunk: seconds of compute, copies and standing still.

Knows nothing of how a plan was found.
"""

from __future__ import annotations

from dataclasses import dataclass

from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.flops import forward_flops, peak_flops, step_flops
from sppo_hf.planning.lowering import COMPUTE, D2H, H2D, HOST, READ, WRITE, lower
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

    disk_seconds: float = 0.0
    """Writes and reads of its bytes."""

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
    """Model TFLOP/s, recomputation not counted."""

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
    model_flops = flops(cost.shape, decisions.batch_rows, decisions.total_tokens)
    step_seconds = timeline.end_seconds
    peak = peak_flops(cost.profile.name)
    d2h_bytes, h2d_bytes = lower(decisions, cost).copied_bytes
    return Prediction(
        policy=policy,
        step_seconds=step_seconds,
        stall_seconds=step_seconds - timeline.busy_seconds(COMPUTE) - timeline.busy_seconds(HOST),
        update_seconds=timeline.busy_seconds(HOST),
        bound_seconds=bound_seconds,
        tokens_per_second=tokens / step_seconds,
        tflops=model_flops / step_seconds / 1e12,
        mfu=None if peak is None else model_flops / step_seconds / peak,
        chunks=_by_chunk(decisions, timeline),
        d2h_bytes=d2h_bytes,
        h2d_bytes=h2d_bytes,
    )


def _by_chunk(decisions: Decisions, timeline: Timeline) -> tuple[ChunkPrediction, ...]:
    fields = {D2H: "d2h_seconds", H2D: "h2d_seconds", WRITE: "disk_seconds", READ: "disk_seconds"}
    sums: list[dict[str, float]] = [{} for _ in decisions.bounds]
    for span in timeline.spans():
        if span.lane == HOST:
            continue  # the optimizer's, of no chunk
        name = fields.get(span.lane)
        if span.lane == COMPUTE:
            name = "backward_seconds" if span.action.kind == "B" else "forward_seconds"
        assert name is not None, "all other lanes are copies or the disk"
        chunk = sums[span.action.unit]
        chunk[name] = chunk.get(name, 0.0) + span.end_seconds - span.start_seconds
    return tuple(ChunkPrediction(**chunk) for chunk in sums)
