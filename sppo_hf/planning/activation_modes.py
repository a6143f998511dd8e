"""Activation modes: how much of a (layer, chunk) is saved for backward, and on which tier.

The plan chooses an `ActivationMode` per (layer, chunk), and the engine carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from sppo_hf.planning.tiers import DEVICE, HOST, TIERS, Tier

Saved = Literal["whole", "matmuls", "inputs", "hidden"]
"""How much of a layer's activations is saved.

"whole": everything that autograd saves; nothing is recomputed. "matmuls": the layer input and the
outputs of attention and of matmuls; elementwise work is recomputed. "inputs": the layer input, the
attention output and its log-sum-exp; the layer except attention is recomputed. "hidden": the layer
input alone; attention is recomputed too, in no other mode.
"""

SAVED_BY_RECOMPUTE: dict[str, Saved] = {
    "none": "whole",
    "selective": "matmuls",
    "full": "inputs",
}
"""How much of a layer is saved for each value of the setting `recompute`."""

RECOMPUTE_BY_SAVED: dict[Saved, str] = {
    **{saved: word for word, saved in SAVED_BY_RECOMPUTE.items()},
    "hidden": "full with attention",
}
"""Name of each `Saved` value in tables. No setting requests the last one."""


@dataclass(frozen=True, slots=True)
class ActivationMode:
    """How the activations of one (layer, chunk) are kept from forward to backward."""

    saved: Saved
    """How much is saved; the rest is recomputed in backward."""

    tier: Tier

    @property
    def recompute(self) -> bool:
        """Whether a part of the layer is recomputed in backward."""
        return self.saved != "whole"

    @property
    def offload(self) -> bool:
        """Whether the saved activations are offloaded."""
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
"""All `Saved` values, from most bytes to fewest."""

ATTENTION_ONCE: tuple[Saved, ...] = tuple(saved for saved in SAVED if saved != "hidden")
"""The `Saved` values with which attention's forward runs only once."""


def all_modes() -> tuple[ActivationMode, ...]:
    """Returns all modes of the registered tiers, tier by tier."""
    return tuple(mode_of(saved, tier) for tier in TIERS for saved in SAVED)


@cache
def mode_of(saved: Saved, tier: Tier) -> ActivationMode:
    """Returns the one shared object for a mode, so that plans hold few objects.

    Raises:
        KeyError: there is no such tier.
    """
    return ActivationMode(saved, TIERS[tier].name)


KEEP = mode_of("whole", DEVICE)
