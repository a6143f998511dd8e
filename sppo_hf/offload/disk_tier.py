"""The disk tier: files below `offload_dir`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sppo_hf.config import SPPOConfig
from sppo_hf.planning.hardware import HardwareProfile
from sppo_hf.planning.machine import free_disk_bytes
from sppo_hf.planning.tiers import TierModel, register_tier

if TYPE_CHECKING:
    from sppo_hf.offload.disk import DiskSpace


@register_tier("disk", distance=2, setting="disk_memory", needs="offload_dir")
class Disk(TierModel):
    """Files below `offload_dir`; `sppo calibrate --offload-dir` measures their disk."""

    called = "fast disk"
    colour = "#CC79A7"
    remedy = "Raise disk_memory or free space in offload_dir, or shorten the sequences."

    def is_available(self, config: SPPOConfig, device_kind: str) -> bool:
        """Whether `offload_dir` is set."""
        return config.offload_dir is not None

    def allowing(self, config: SPPOConfig) -> SPPOConfig:
        """Returns the settings with a folder; only whether there is one matters to decisions."""
        return config if config.offload_dir is not None else config.replace(offload_dir=self.name)

    def measure(self, config: SPPOConfig, *, processes: int, own_bytes: int) -> int | None:
        """Returns what is free in `offload_dir`, and what this process has reserved there."""
        # They need torch, and planning does not.
        from sppo_hf.offload.disk_files import check_parent_exists, unusable_folder_errors

        assert config.offload_dir is not None, "only a disk that is available is measured"
        with unusable_folder_errors(config.offload_dir):
            check_parent_exists(Path(config.offload_dir))
            return free_disk_bytes(config.offload_dir) // processes + own_bytes

    def profiled_bytes(self, profile: HardwareProfile) -> int | None:
        """What was free when the disk was measured."""
        return profile.disk_bytes

    def store_rate(self, profile: HardwareProfile) -> float:
        """Measured bytes per second written; a guess if not measured."""
        return profile.disk_write_bytes_per_second or super().store_rate(profile)

    def load_rate(self, profile: HardwareProfile) -> float:
        """Measured bytes per second read; a guess if not measured."""
        return profile.disk_read_bytes_per_second or super().load_rate(profile)

    def of_one_device(self, profile: HardwareProfile, devices: int) -> HardwareProfile:
        """Divides the rates, as all devices share one disk."""
        return replace(
            profile,
            disk_write_bytes_per_second=self.store_rate(profile) / devices,
            disk_read_bytes_per_second=self.load_rate(profile) / devices,
        )

    def open(self, config: SPPOConfig, budget_bytes: int | None) -> DiskSpace:
        """Makes or takes the folder."""
        from sppo_hf.offload.disk import DiskSpace
        from sppo_hf.offload.disk_files import StoreFolder

        assert config.offload_dir is not None, "only a disk that is available is opened"
        return DiskSpace(StoreFolder(Path(config.offload_dir)), budget_bytes=budget_bytes)
