"""What becomes of a frame between forward and backward: two yes/no questions, four answers.

Knows nothing of models, bytes or devices. A `FrameMode` is chosen per (layer, chunk) by the
plan and carried out by the engine.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FrameMode:
    """How one (layer, chunk) bridges the time between its forward and its backward."""

    recompute: bool
    """Drop all but the skeleton (layer input, attention output, log-sum-exp) and run the layer's
    linear part again in backward. Attention itself is never run again."""

    offload: bool
    """Let what remains (the frame, or its skeleton) wait in host memory."""

    def __str__(self) -> str:
        if self.recompute:
            return "recompute+offload" if self.offload else "recompute"
        return "offload" if self.offload else "keep"


KEEP = FrameMode(recompute=False, offload=False)
OFFLOAD = FrameMode(recompute=False, offload=True)
RECOMPUTE = FrameMode(recompute=True, offload=False)
RECOMPUTE_OFFLOAD = FrameMode(recompute=True, offload=True)

ALL_MODES = (KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_OFFLOAD)


def mode_of(*, recompute: bool, offload: bool) -> FrameMode:
    """Returns the shared constant for the two answers, so that plans hold four objects at most."""
    return next(m for m in ALL_MODES if m.recompute == recompute and m.offload == offload)
