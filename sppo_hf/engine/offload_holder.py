"""Makes the offload engine of one model for its first plan, and replaces it when it must grow."""

from __future__ import annotations

import torch

from sppo_hf.config import SPPOConfig
from sppo_hf.offload.copy_streams import Copier
from sppo_hf.offload.disk import DiskStore
from sppo_hf.offload.engine import OffloadEngine, OffloadStats, make_copier, make_engine
from sppo_hf.offload.host_memory import Progress
from sppo_hf.offload.tiers import Staging
from sppo_hf.planning.memory import Cause
from sppo_hf.planning.plan import Plan


def offloaded_bytes(plan: Plan) -> int:
    """Peak host bytes of a plan's offload engine: all but weights, optimizer and gradients."""
    host = plan.estimate.host
    others = (Cause.WEIGHTS, Cause.OPTIMIZER, Cause.GRADIENTS)
    return host.held - sum(host[cause] for cause in others)


def new_offload_engine(
    config: SPPOConfig, device: torch.device, plan: Plan, *, copier: Copier | None = None
) -> OffloadEngine:
    """Return an offload engine for the settings of `config` and the budgets of `plan`.

    Args:
        config: The settings.
        device: Where the model is.
        plan: Has the budgets.
        copier: Copies host-resident weights; None if there are none.

    Raises:
        ConfigError: `offload_dir` cannot be used.
    """
    disk = None
    if config.offload_dir is not None:
        disk = DiskStore(
            config.offload_dir,
            budget_bytes=plan.budgets.of(Staging.name),
            checksum=config.offload_checksum,
            max_queued_bytes=plan.staging_bytes,
        )
    budget = plan.budgets.host
    if disk is not None and device.type == "cpu":
        # The host's memory is the device's: it only stages what goes to the disk.
        budget = plan.staging_bytes
    return make_engine(
        device,
        use_streams=config.use_streams,
        use_pin_memory=config.use_pin_memory,
        budget_bytes=budget,
        min_offload_elements=config.min_offload_size,
        disk=disk,
        staging_bytes=plan.staging_bytes if disk is not None else None,
        copier=copier,
    )


class OffloadHolder:
    """Keeps the offload engine between plans; there is none before `prepare`."""

    def __init__(self, config: SPPOConfig) -> None:
        self._config = config
        self._engine: OffloadEngine | None = None
        self._staging_bytes = 0
        self._copier: Copier | None = None

    def copier(self, device: torch.device) -> Copier:
        """Return the copier for host-resident weights, which the offload engine shares."""
        if self._copier is None and self._engine is not None:
            self._copier = self._engine.copier
        elif self._copier is None:
            self._copier = make_copier(device, use_streams=self._config.use_streams)
        return self._copier

    def prepare(
        self,
        device: torch.device,
        *plans: Plan,
        batches: int = 1,
        progress: Progress | None = None,
    ) -> int | None:
        """Make the engine for the first plans, and reserve the host memory that the plans need.

        Pinning memory takes seconds and must not happen in the middle of a step.

        Args:
            device: Where the model is.
            plans: Plans that will run, one for each stage on this rank.
            batches: Batches of each plan that may be offloaded at the same time.
            progress: Called as memory is made.

        Returns:
            Bytes that the host tier has if the system refused to give what the plans need, else
            None.

        Raises:
            ConfigError: `offload_dir` cannot be used.
            OffloadError: the host gives no (pinned) memory.
        """
        # Longer chunks need a larger staging slab. An engine that holds tensors is not replaced.
        largest = max(plans, key=lambda plan: plan.staging_bytes)
        grows = self._engine is not None and self._staging_bytes < largest.staging_bytes
        if grows and not self.engine.stats().live_handles:
            self.close()
        if self._engine is None:
            self._engine = new_offload_engine(self._config, device, largest, copier=self._copier)
            self._staging_bytes = largest.staging_bytes
        return self._engine.reserve(batches * sum(map(offloaded_bytes, plans)), progress)

    @property
    def engine(self) -> OffloadEngine:
        """The offload engine; `prepare` must have been called."""
        assert self._engine is not None, "no batch was planned yet"
        return self._engine

    def take_stats(self) -> OffloadStats:
        """Counters of the engine since the last call; zeros without an engine."""
        return OffloadStats() if self._engine is None else self._engine.take_stats()

    def close(self) -> None:
        """Wait for copies under way and give the host memory back."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
