"""MemoryEstimate: what all tiers hold at each moment of a step, and when each holds most.

Knows nothing of models, plans or how the figures come about.
"""

from __future__ import annotations

from dataclasses import dataclass

from sppo_hf.planning.modes import Tier
from sppo_hf.planning.tier_bytes import TierBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What all tiers hold at one moment of a step."""

    name: str
    """In words: "start of backward of chunk 8 of 8"."""

    chunk: int
    """Index of the running chunk."""

    device: TierBytes
    """On the accelerator; in ordinary memory when the CPU computes."""

    host: TierBytes
    """In host memory, offloaded."""

    disk: TierBytes
    """In files."""

    def tier(self, tier: Tier) -> TierBytes:
        """Returns the bytes of one tier."""
        return {"device": self.device, "host": self.host, "disk": self.disk}[tier]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Predicted bytes per tier over a step."""

    moments: tuple[Moment, ...]
    """In the order of time."""

    def peak(self, tier: Tier) -> Moment:
        """Returns the moment at which a tier holds most; the first of equal ones."""
        return max(self.moments, key=lambda moment: moment.tier(tier).total)

    @property
    def device(self) -> TierBytes:
        """The device's bytes at its peak."""
        return self.peak("device").device

    @property
    def host(self) -> TierBytes:
        """Offloaded bytes in host memory at its peak."""
        return self.peak("host").host

    @property
    def disk(self) -> TierBytes:
        """Bytes in files at their peak."""
        return self.peak("disk").disk

    @property
    def moment(self) -> str:
        """When the device's peak is reached, in words."""
        return self.peak("device").name
