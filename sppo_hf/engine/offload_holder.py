"""The offload engine of one model, made when the first plan says how large, and replaced to grow.

Knows plans by what they need of host memory, and nothing of layers or chunks.
"""

from __future__ import annotations

import torch

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.device_facts import new_offload_engine
from sppo_hf.offload.copy_streams import Copier
from sppo_hf.offload.engine import OffloadEngine, OffloadStats, make_copier
from sppo_hf.planning.causes import Cause
from sppo_hf.planning.plan import Plan


def offloaded_bytes(plan: Plan) -> int:
    """Host bytes that a plan's offload engine holds: all but weights and what is kept with them."""
    host = plan.estimate.host
    others = (Cause.WEIGHTS, Cause.OPTIMIZER, Cause.GRADIENTS)
    return host.held - sum(host[cause] for cause in others)


class OffloadHolder:
    """Holds the offload engine between plans."""

    def __init__(self, config: SPPOConfig) -> None:
        """Hold nothing until `prepare`."""
        self._config = config
        self._engine: OffloadEngine | None = None
        self._staging_bytes = 0
        self._copier: Copier | None = None

    def copier(self, device: torch.device) -> Copier:
        """What moves weights that rest on the host: the offload engine's, now and from now on."""
        if self._copier is None and self._engine is not None:
            self._copier = self._engine.copier
        elif self._copier is None:
            self._copier = make_copier(device, use_streams=self._config.use_streams)
        return self._copier

    def prepare(self, device: torch.device, plan: Plan, *, batches: int = 1) -> int | None:
        """Make the engine for the first plan, and what host memory each plan will need.

        Pinning memory takes seconds and must not happen in the middle of a step.

        Args:
            device: Where the model is.
            plan: What will run.
            batches: How many of the plan's batches may be away at once.

        Returns:
            Bytes that the host tier has, if the system refused to give what the plan needs; else
            None.

        Raises:
            ConfigError: `offload_dir` cannot be used.
            OffloadError: the host gives no (pinned) memory.
        """
        # Longer chunks need more room on their way to the disk; what is away must come back first.
        grows = self._engine is not None and self._staging_bytes < plan.staging_bytes
        if grows and not self.engine.stats().live_handles:
            self.close()
        if self._engine is None:
            self._engine = new_offload_engine(self._config, device, plan, copier=self._copier)
            self._staging_bytes = plan.staging_bytes
        return self._engine.reserve(batches * offloaded_bytes(plan))

    @property
    def engine(self) -> OffloadEngine:
        """The offload engine; there once a plan is."""
        assert self._engine is not None, "no batch was planned yet"
        return self._engine

    def take_stats(self) -> OffloadStats:
        """What the engine did since the last time this was asked."""
        return OffloadStats() if self._engine is None else self._engine.take_stats()

    def close(self) -> None:
        """Wait for copies under way and give the host memory back."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
