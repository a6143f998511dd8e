"""What becomes of a frame between forward and backward: how much is saved, and where it waits.

A `ActivationMode` is chosen per (layer, chunk) by the plan and carried out by the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from sppo_hf.planning.tiers import DEVICE, HOST, TIERS, Tier

Saved = Literal["whole", "matmuls", "inputs", "hidden"]
"""How much of a frame is saved.

"whole": all that autograd saves; nothing is recomputed. "matmuls": the layer input and the outputs
of attention and of the matrix products; only elementwise work is recomputed. "inputs": the layer
input, the attention output and its log-sum-exp; the layer's linear part is recomputed. "hidden":
the layer input alone; attention runs again too, which no other mode makes it do.
"""

SAVED_BY_RECOMPUTE: dict[str, Saved] = {
    "none": "whole",
    "selective": "matmuls",
    "full": "inputs",
}
"""What is saved by the setting `recompute`, where that says it."""

RECOMPUTE_BY_SAVED: dict[Saved, str] = {
    **{saved: word for word, saved in SAVED_BY_RECOMPUTE.items()},
    "hidden": "full with attention",
}
"""What tables call it; but for the last, which no setting asks for, settings too."""


@dataclass(frozen=True, slots=True)
class ActivationMode:
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
        return self.tier != DEVICE

    def __str__(self) -> str:
        if self.tier == DEVICE:
            return _RECOMPUTED[self.saved] or "keep"
        where = "offload" if self.tier == HOST else self.tier
        return "+".join(part for part in (_RECOMPUTED[self.saved], where) if part)


_RECOMPUTED: dict[Saved, str] = {
    "whole": "",
    "matmuls": "recompute elementwise",
    "inputs": "recompute",
    "hidden": "recompute with attention",
}

SAVED: tuple[Saved, ...] = ("whole", "matmuls", "inputs", "hidden")
"""From most bytes to least."""

ATTENTION_ONCE: tuple[Saved, ...] = tuple(saved for saved in SAVED if saved != "hidden")
"""Those in which attention's forward runs once."""


def all_modes() -> tuple[ActivationMode, ...]:
    """Returns all modes of the tiers that there are, tier by tier."""
    return tuple(mode_of(saved, tier) for tier in TIERS for saved in SAVED)


@cache
def mode_of(saved: Saved, tier: Tier) -> ActivationMode:
    """Returns the shared constant for the two answers, so that plans hold few objects.

    Raises:
        KeyError: there is no such tier.
    """
    return ActivationMode(saved, TIERS[tier].name)


KEEP = mode_of("whole", DEVICE)
