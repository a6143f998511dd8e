"""Tiers: the memories that hold bytes between their uses, in the form that planning reads.

A tier is one class here (or in a user's package) under `@register_tier("name")`: its capacity, its
rates and its name in messages. Budgets, estimates, the linear program, the simulator's resources,
tables, pictures and JSON have one entry per tier. A class of the same name in
`sppo_hf.offload.tiers` stores and loads the bytes.

The device can copy only from and to host memory. So a tier is the device, the host, or *behind* the
host: then its bytes are first copied to a staging region in host memory and written from there, on
the tier's own resources, while the next bytes are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sppo_hf.config import SPPOConfig, parse_bytes
from sppo_hf.planning.hardware import HardwareProfile
from sppo_hf.registry import TIERS as TIERS

Tier = str
"""Name of a tier: "device" (memory of the computing device), "host", "disk" (below `offload_dir`)
..."""

OffloadTier = Tier
"""Name of a tier other than the device; a class in `offload.tiers` stores its bytes."""

DEVICE: Tier = "device"
HOST: Tier = "host"


class TierModel:
    """Properties of a tier that planning uses. `TIERS` has all tiers, nearest first."""

    name: Tier = ""
    """Name under which the tier is registered."""

    behind_host: bool = False
    """Whether its bytes pass through a staging region in host memory, each way."""

    setting: str = ""
    """Config field with the tier's budget; "" if there is none."""

    fact: str = ""
    """Field of `DeviceFacts` with the bytes that the machine has; "" if there is none."""

    remedy: str = ""
    """Remedy shown when this tier's budget is exceeded; a full sentence."""

    called: str = ""
    """Name of the tier's memory in remedies, as in "more host memory"; "" if it cannot be added."""

    colour: str = "#999999"
    """Colour of its bytes and copies in figures."""

    @property
    def store_resource(self) -> str:
        """Simulator resource of the tier's writes."""
        return f"{self.name} write"

    @property
    def load_resource(self) -> str:
        """Simulator resource of the tier's reads."""
        return f"{self.name} read"

    @property
    def option(self) -> str:
        """Command-line option of the setting with the tier's budget."""
        return "--" + self.setting.replace("_", "-")

    def is_available(self, config: SPPOConfig, device_kind: str) -> bool:
        """Whether bytes may be held on this tier."""
        return True

    def allowing(self, config: SPPOConfig) -> SPPOConfig:
        """Returns the settings with this tier allowed, to find how much of it would be enough."""
        return config

    def named(self, config: SPPOConfig) -> int | float | str | None:
        """Returns the budget that the user named; None where none was."""
        return getattr(config, self.setting) if self.setting else None

    def capacity_bytes(self, config: SPPOConfig, facts: Any) -> int | None:
        """Returns its capacity: the user's budget, else what the machine has (`DeviceFacts`)."""
        has: int | None = getattr(facts, self.fact) if self.fact else None
        value = self.named(config)
        if value is None:
            return has
        return parse_bytes(value, field=self.setting, total_bytes=has)

    def store_rate(self, profile: HardwareProfile) -> float:
        """Bytes per second from host memory to the tier; only for tiers behind the host."""
        raise NotImplementedError

    def load_rate(self, profile: HardwareProfile) -> float:
        """Bytes per second from the tier to host memory; only for tiers behind the host."""
        raise NotImplementedError

    def of_one_device(self, profile: HardwareProfile, devices: int) -> HardwareProfile:
        """Returns the profile with one device's share of the tier's rates on `devices` devices."""
        return profile


def register_tier(name: Tier) -> Callable[[type[TierModel]], type[TierModel]]:
    """Decorator that registers a tier as farther than those registered before.

    Args:
        name: name of the tier in plans, JSON and tables.
    """

    def register(made: type[TierModel]) -> type[TierModel]:
        tier = made()
        tier.name = name
        TIERS.add(name, tier)
        return made

    return register


def offload_tiers() -> tuple[Tier, ...]:
    """Returns all tiers but the device, nearest first."""
    return tuple(name for name in TIERS if name != DEVICE)


def tiers_behind_host() -> tuple[Tier, ...]:
    """Returns the tiers behind the host, nearest first."""
    return tuple(name for name, tier in TIERS.items() if tier.behind_host)


@register_tier("device")
class Device(TierModel):
    """Memory of the device; ordinary memory if the CPU computes."""

    setting = "device_memory"
    fact = "device_memory_bytes"
    colour = "#0072B2"
    remedy = (
        "Raise device_memory, give K/V room elsewhere (offload_kv='auto', host_memory, "
        "offload_dir), train fewer parameters, or shorten the sequences."
    )


@register_tier("host")
class Host(TierModel):
    """Host memory, page-locked for devices with copy engines."""

    setting = "host_memory"
    fact = "host_memory_bytes"
    called = "host memory"
    colour = "#E69F00"
    remedy = "Raise host_memory, name a fast disk as offload_dir, or shorten the sequences."

    def is_available(self, config: SPPOConfig, device_kind: str) -> bool:
        """False on a CPU, where host memory is the device's own."""
        return device_kind != "cpu"


# Bytes per second assumed for a disk that is not measured, as of a SATA disk. `sppo calibrate
# --offload-dir` measures it.
_UNKNOWN_DISK = 0.5e9


@register_tier("disk")
class Disk(TierModel):
    """Files below `offload_dir`."""

    behind_host = True
    setting = "disk_memory"
    fact = "disk_memory_bytes"
    called = "fast disk"
    colour = "#CC79A7"
    remedy = "Raise disk_memory or free space in offload_dir, or shorten the sequences."

    def is_available(self, config: SPPOConfig, device_kind: str) -> bool:
        """Whether `offload_dir` is set."""
        return config.offload_dir is not None

    def allowing(self, config: SPPOConfig) -> SPPOConfig:
        """Returns the settings with a folder; only whether there is one matters to decisions."""
        return config if config.offload_dir is not None else config.replace(offload_dir="disk")

    def capacity_bytes(self, config: SPPOConfig, facts: Any) -> int | None:
        """Returns the disk's capacity; 0 without `offload_dir`."""
        return 0 if config.offload_dir is None else super().capacity_bytes(config, facts)

    def store_rate(self, profile: HardwareProfile) -> float:
        """Measured bytes per second written; a guess if not measured."""
        return profile.disk_write_bytes_per_second or _UNKNOWN_DISK

    def load_rate(self, profile: HardwareProfile) -> float:
        """Measured bytes per second read; a guess if not measured."""
        return profile.disk_read_bytes_per_second or _UNKNOWN_DISK

    def of_one_device(self, profile: HardwareProfile, devices: int) -> HardwareProfile:
        """Divides the rates, as all devices share one disk."""
        return replace(
            profile,
            disk_write_bytes_per_second=self.store_rate(profile) / devices,
            disk_read_bytes_per_second=self.load_rate(profile) / devices,
        )
