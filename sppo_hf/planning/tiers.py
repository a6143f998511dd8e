"""Tiers: the memories that hold bytes between their uses.

A tier is one class under `@register_tier("name")`, in a file of `sppo_hf/offload` or of a user's
package: its budget, what the machine has of it, its rates, its words in messages, and, from `open`,
the space that keeps its bytes. Budgets, estimates, the linear program, the simulator's resources,
tables, pictures and JSON have one entry per tier, and the offload engine one store.

The device can copy only from and to host memory. So a tier is the device, the host, or *behind* the
host: then its bytes are first copied to a staging region in host memory and written from there, on
the tier's own resources, while the next bytes are copied.

Planning is free of torch, so the module of a tier is, too, but for imports within functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sppo_hf.config import MORE_TIERS, SPPOConfig, parse_bytes, read_tiers, write_tiers
from sppo_hf.planning.hardware import HardwareProfile
from sppo_hf.registry import TIERS as TIERS

if TYPE_CHECKING:
    from sppo_hf.offload.store import TierSpace

Tier = str
"""Name of a tier: device (memory of the computing device), host, disk (below `offload_dir`) ..."""

OffloadTier = Tier
"""Name of a tier other than the device."""

DEVICE: Tier = "device"
HOST: Tier = "host"

UNKNOWN_RATE = 0.5e9
"""Bytes per second assumed for a tier that is not measured, as of a SATA disk."""


class TierModel:
    """All that is particular to a tier. `TIERS` has all tiers, nearest first.

    A tier behind the host overrides `open` and, where it knows better, the rest.
    """

    name: Tier = ""
    """Name under which the tier is registered."""

    setting: str = MORE_TIERS
    """Config field with the tier's budget; from the decorator."""

    behind_host: bool = True
    """Whether its bytes pass through a staging region in host memory, each way."""

    remedy: str = "Give this tier more, or shorten the sequences."
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
        """Whether bytes may be held on this tier; unless overridden, if `more_tiers` names it."""
        return self.name in read_tiers(config.more_tiers)

    def named(self, config: SPPOConfig) -> int | float | str | None:
        """Returns the budget that the user named; None where none was."""
        if self.setting == MORE_TIERS:
            return read_tiers(config.more_tiers).get(self.name)
        value: int | float | str | None = getattr(config, self.setting)
        return value

    def with_budget(self, config: SPPOConfig, value: int | None) -> SPPOConfig:
        """Returns the settings with this budget, or with none named; a further tier is allowed."""
        if self.setting == MORE_TIERS:
            return config.replace(
                more_tiers=write_tiers({**read_tiers(config.more_tiers), self.name: value})
            )
        return config.replace(**{self.setting: value})

    def allowing(self, config: SPPOConfig) -> SPPOConfig:
        """Returns the settings with this tier allowed, to find how much of it would be enough."""
        if self.setting != MORE_TIERS or self.name in read_tiers(config.more_tiers):
            return config
        return self.with_budget(config, None)

    def capacity_bytes(self, config: SPPOConfig, facts: Any) -> int | None:
        """Returns its capacity: the user's budget, else what the machine has (`DeviceFacts`)."""
        if self.behind_host and not self.is_available(config, facts.kind):
            return 0
        has: int | None = facts.memory_bytes.get(self.name)
        value = self.named(config)
        return has if value is None else parse_bytes(value, field=self.setting, total_bytes=has)

    def measure(self, config: SPPOConfig, *, processes: int, own_bytes: int) -> int | None:
        """Returns the bytes that this machine has for one of several processes; None if unknown.

        `own_bytes` are those that this process has taken already, which are available to it.

        Raises:
            ConfigError: the settings name something that cannot be used.
        """
        return None

    def profiled_bytes(self, profile: HardwareProfile) -> int | None:
        """Returns the bytes that the machine of a profile has; None if unknown."""
        return None

    def store_rate(self, profile: HardwareProfile) -> float:
        """Bytes per second from host memory to the tier; only for tiers behind the host."""
        return UNKNOWN_RATE

    def load_rate(self, profile: HardwareProfile) -> float:
        """Bytes per second from the tier to host memory; only for tiers behind the host."""
        return UNKNOWN_RATE

    def of_one_device(self, profile: HardwareProfile, devices: int) -> HardwareProfile:
        """Returns the profile with one device's share of the tier's rates on `devices` devices."""
        return profile

    def open(self, config: SPPOConfig, budget_bytes: int | None) -> TierSpace:
        """Returns the space that keeps the tier's bytes in this process, at most `budget_bytes`.

        Raises:
            ConfigError: the settings name something that cannot be used.
        """
        raise NotImplementedError


def register_tier(
    name: Tier, *, distance: float = math.inf, setting: str = MORE_TIERS, needs: str = MORE_TIERS
) -> Callable[[type[TierModel]], type[TierModel]]:
    """Decorator that registers a tier.

    Args:
        name: name of the tier in plans, JSON and tables.
        distance: its place among the others, which are at 0 (device), 1 (host) and 2 (disk); the
            farthest if left out.
        setting: config field with its budget, if it has one of its own.
        needs: config field without which the tier is not used; "" if there is none.
    """

    def register(made: type[TierModel]) -> type[TierModel]:
        tier = made()
        tier.name, tier.setting = name, setting
        TIERS.add(name, tier, distance=distance, setting=setting, needs=needs)
        return made

    return register


def offload_tiers() -> tuple[Tier, ...]:
    """Returns all tiers but the device, nearest first."""
    return tuple(name for name in TIERS if name != DEVICE)


def tiers_behind_host() -> tuple[Tier, ...]:
    """Returns the tiers behind the host, nearest first."""
    return tuple(name for name, tier in TIERS.items() if tier.behind_host)


def allowed_behind_host(config: SPPOConfig, device_kind: str) -> tuple[Tier, ...]:
    """Returns the tiers behind the host that the settings allow, nearest first."""
    return tuple(t for t in tiers_behind_host() if TIERS[t].is_available(config, device_kind))


@register_tier("device", distance=0, setting="device_memory", needs="")
class Device(TierModel):
    """Memory of the device; ordinary memory if the CPU computes."""

    behind_host = False
    colour = "#0072B2"
    remedy = (
        "Raise device_memory, give K/V room elsewhere (offload_kv='auto', host_memory, "
        "offload_dir), train fewer parameters, or shorten the sequences."
    )

    def is_available(self, config: SPPOConfig, device_kind: str) -> bool:
        """Always."""
        return True

    def profiled_bytes(self, profile: HardwareProfile) -> int | None:
        """Memory of the device."""
        return profile.device_bytes


@register_tier("host", distance=1, setting="host_memory", needs="")
class Host(TierModel):
    """Host memory, page-locked for devices with copy engines."""

    behind_host = False
    called = "host memory"
    colour = "#E69F00"
    remedy = "Raise host_memory, name a fast disk as offload_dir, or shorten the sequences."

    def is_available(self, config: SPPOConfig, device_kind: str) -> bool:
        """False on a CPU, where host memory is the device's own."""
        return device_kind != "cpu"

    def profiled_bytes(self, profile: HardwareProfile) -> int | None:
        """All host memory of the process."""
        return profile.host_bytes


TIERS.load()
