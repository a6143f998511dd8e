"""What becomes of a frame between forward and backward: how much is saved, and where it waits.

Knows nothing of models, bytes or devices. A `FrameMode` is chosen per (layer, chunk) by the
plan and carried out by the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Saved = Literal["whole", "matmuls", "inputs"]
"""How much of a frame is saved.

"whole": all that autograd saves; nothing is recomputed. "matmuls": the layer input and the outputs
of attention and of the matrix products; only elementwise work is recomputed. "inputs": the layer
input, the attention output and its log-sum-exp; the layer's linear part is recomputed. Attention
itself is never run again.
"""

SAVED_BY_RECOMPUTE: dict[str, Saved] = {
    "none": "whole",
    "selective": "matmuls",
    "full": "inputs",
}
"""What is saved by the setting `recompute`, where that says it."""

RECOMPUTE_BY_SAVED: dict[Saved, str] = {saved: word for word, saved in SAVED_BY_RECOMPUTE.items()}
"""The same the other way round: what tables and settings call it."""

Tier = Literal["device", "host", "disk"]
"""Where bytes wait: beside the compute, in host memory, or in files below `offload_dir`."""

AwayTier = Literal["host", "disk"]
"""A tier that bytes leave the device for."""


@dataclass(frozen=True, slots=True)
class FrameMode:
    """How one (layer, chunk) bridges the time between its forward and its backward."""

    saved: Saved
    """What is saved; the rest is recomputed in backward."""

    tier: Tier
    """Where it waits."""

    @property
    def recompute(self) -> bool:
        """Whether any of the layer runs again in backward."""
        return self.saved != "whole"

    @property
    def offload(self) -> bool:
        """Whether what is saved leaves the device."""
        return self.tier != "device"

    def __str__(self) -> str:
        if self.tier == "device":
            return _RECOMPUTED[self.saved] or "keep"
        where = "offload" if self.tier == "host" else "disk"
        return "+".join(part for part in (_RECOMPUTED[self.saved], where) if part)


_RECOMPUTED: dict[Saved, str] = {
    "whole": "",
    "matmuls": "recompute elementwise",
    "inputs": "recompute",
}

SAVED: tuple[Saved, ...] = ("whole", "matmuls", "inputs")
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
AWAY_TIERS: tuple[AwayTier, ...] = ("host", "disk")
"""Tiers that a frame leaves the device for, nearest first."""

ALL_MODES = tuple(FrameMode(saved, tier) for tier in TIERS for saved in SAVED)

_MODES = {(mode.saved, mode.tier): mode for mode in ALL_MODES}


def mode_of(saved: Saved, tier: Tier) -> FrameMode:
    """Returns the shared constant for the two answers, so that plans hold nine objects at most."""
    return _MODES[saved, tier]


KEEP = mode_of("whole", "device")
OFFLOAD = mode_of("whole", "host")
RECOMPUTE = mode_of("inputs", "device")
RECOMPUTE_OFFLOAD = mode_of("inputs", "host")
