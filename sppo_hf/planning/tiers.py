"""Tiers: where bytes wait between their uses, as values that planning iterates over.

A tier is one class here (or in a package of the user's) under `@register_tier("name")`: how much it
holds, how fast bytes come and go, and what is said of it. Budgets, estimates, the linear program,
the simulator's resources, tables, pictures and JSON have one entry for each. How bytes are really
stored and loaded is said by a class of the same name in `sppo_hf.offload.tiers`.

Copies from and to the device have their other end in host memory. So a tier is the device, the
host, or *behind* the host: then bytes are first copied to a staging region there, and stored from
it on resources of the tier's own, while the next ones are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sppo_hf.config import SPPOConfig, parse_bytes
from sppo_hf.planning.hardware import HardwareProfile
from sppo_hf.registry import TIERS as TIERS

Tier = str
"""Name of a tier: "device" beside the compute, "host" memory, "disk" below `offload_dir` ..."""

OffloadTier = Tier
"""Name of one that bytes leave the device for; what stores them is a class (`offload.tiers`)."""

DEVICE: Tier = "device"
HOST: Tier = "host"


class TierModel:
    """What planning knows of a tier; nearest first in `TIERS`."""

    name: Tier = ""
    """As it is registered."""

    behind_host: bool = False
    """Whether its bytes pass through a region of host memory, each way."""

    setting: str = ""
    """Field of the config that says how much of it may be used; "" where none does."""

    fact: str = ""
    """Field of `DeviceFacts` with the bytes that the machine has of it; "" where none has."""

    remedy: str = ""
    """What would help where its budget breaks, with a full stop."""

    called: str = ""
    """What more of it would be: "host memory"; "" where more cannot be had."""

    colour: str = "#999999"
    """Its bytes' and copies' in pictures."""

    @property
    def store_resource(self) -> str:
        """The resource that its writes occupy one after another."""
        return f"{self.name} write"

    @property
    def load_resource(self) -> str:
        """The resource that its reads occupy."""
        return f"{self.name} read"

    @property
    def option(self) -> str:
        """The command line's name of its setting."""
        return "--" + self.setting.replace("_", "-")

    def is_available(self, config: SPPOConfig, device_kind: str) -> bool:
        """Whether bytes may leave the device for it."""
        return True

    def allowing(self, config: SPPOConfig) -> SPPOConfig:
        """Returns the settings with such a tier, for the question how much would be enough."""
        return config

    def named(self, config: SPPOConfig) -> int | float | str | None:
        """Returns the budget that the user named; None where none was."""
        return getattr(config, self.setting) if self.setting else None

    def capacity_bytes(self, config: SPPOConfig, facts: Any) -> int | None:
        """Returns what it may hold: what the user named, else what the machine has.

        Args:
            config: the settings.
            facts: the `DeviceFacts`.
        """
        has: int | None = getattr(facts, self.fact) if self.fact else None
        value = self.named(config)
        if value is None:
            return has
        return parse_bytes(value, field=self.setting, total_bytes=has)

    def store_rate(self, profile: HardwareProfile) -> float:
        """Bytes per second from host memory to it; asked of tiers behind the host."""
        raise NotImplementedError

    def load_rate(self, profile: HardwareProfile) -> float:
        """Bytes per second from it to host memory."""
        raise NotImplementedError

    def of_one_device(self, profile: HardwareProfile, devices: int) -> HardwareProfile:
        """Returns the profile with what one of so many devices of a machine has of its rates."""
        return profile


def register_tier(name: Tier) -> Callable[[type[TierModel]], type[TierModel]]:
    """Decorator: the tier is planned with, behind those that were registered before.

    Args:
        name: how it is called in plans, JSON and tables.
    """

    def register(made: type[TierModel]) -> type[TierModel]:
        tier = made()
        tier.name = name
        TIERS.add(name, tier)
        return made

    return register


def offload_tiers() -> tuple[Tier, ...]:
    """Returns the tiers that a frame leaves the device for, nearest first."""
    return tuple(name for name in TIERS if name != DEVICE)


def tiers_behind_host() -> tuple[Tier, ...]:
    """Returns those whose bytes pass through host memory, nearest first."""
    return tuple(name for name, tier in TIERS.items() if tier.behind_host)


@register_tier("device")
class Device(TierModel):
    """Beside the compute; ordinary memory where the CPU computes."""

    setting = "device_memory"
    fact = "device_memory_bytes"
    colour = "#0072B2"
    remedy = (
        "Raise device_memory, give K/V room elsewhere (offload_kv='auto', host_memory, "
        "offload_dir), train fewer parameters, or shorten the sequences."
    )


@register_tier("host")
class Host(TierModel):
    """Host memory, page-locked where the device copies by itself."""

    setting = "host_memory"
    fact = "host_memory_bytes"
    called = "host memory"
    colour = "#E69F00"
    remedy = "Raise host_memory, name a fast disk as offload_dir, or shorten the sequences."

    def is_available(self, config: SPPOConfig, device_kind: str) -> bool:
        """On a CPU host memory is the device's own."""
        return device_kind != "cpu"


# A SATA-like guess for a disk that nobody has measured; `sppo calibrate --offload-dir` does.
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
        """Where a folder was named."""
        return config.offload_dir is not None

    def allowing(self, config: SPPOConfig) -> SPPOConfig:
        """Nothing is written: what may be decided depends on whether there is a folder."""
        return config if config.offload_dir is not None else config.replace(offload_dir="disk")

    def capacity_bytes(self, config: SPPOConfig, facts: Any) -> int | None:
        """No bytes without a folder."""
        return 0 if config.offload_dir is None else super().capacity_bytes(config, facts)

    def store_rate(self, profile: HardwareProfile) -> float:
        """As measured, else guessed."""
        return profile.disk_write_bytes_per_second or _UNKNOWN_DISK

    def load_rate(self, profile: HardwareProfile) -> float:
        """As measured, else guessed."""
        return profile.disk_read_bytes_per_second or _UNKNOWN_DISK

    def of_one_device(self, profile: HardwareProfile, devices: int) -> HardwareProfile:
        """All devices write to one disk."""
        return replace(
            profile,
            disk_write_bytes_per_second=self.store_rate(profile) / devices,
            disk_read_bytes_per_second=self.load_rate(profile) / devices,
        )
