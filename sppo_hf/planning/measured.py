"""A step as it was measured, laid beside the plan, and what the plan learns from it.

Profiles lie: they were made with other kernels, at another temperature, or by somebody's guess. The
first steps say by how much. Knows nothing of clocks or of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from sppo_hf.planning.cost import Correction
from sppo_hf.planning.prediction import Prediction

# A stall this much longer than predicted, as a share of the step, is the copies' fault.
_STALL_NOISE = 0.02
# Factors nearer to one than this are noise and change no plan.
_WORTH_CORRECTING = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """What one forward and backward took and moved."""

    forward_seconds: tuple[float, ...]
    """Per chunk, first to last, standing still included."""

    backward_seconds: tuple[float, ...]
    """The same of backward."""

    stall_seconds: float
    """Compute standing still for copies and disk, over the whole step."""

    d2h_bytes: int = 0
    """Bytes copied to the host."""

    h2d_bytes: int = 0
    """Bytes copied to the device."""

    disk_write_bytes: int = 0
    """Bytes written to disk."""

    disk_read_bytes: int = 0
    """Bytes read from it."""

    @property
    def step_seconds(self) -> float:
        """Forward and backward."""
        return sum(self.forward_seconds) + sum(self.backward_seconds)


def learn(prediction: Prediction, measured: MeasuredStep, before: Correction) -> Correction:
    """Returns the correction that makes the prediction agree with what was measured.

    Compute is what was measured without the stalls, which are taken off forward and backward in
    proportion. If compute stood still for longer than predicted, copies were slower than predicted
    by as much as that.

    Args:
        prediction: of the plan that ran.
        measured: a step of it, not the first (which compiles, allocates and pins).
        before: the correction the prediction was made with.
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
