"""What an offload engine has moved and holds, as plain numbers; knows nothing of how."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadStats:
    """What an engine has moved, which only grows, and what it holds now."""

    d2h_bytes: int = 0
    """Bytes copied from the device to the host."""
    h2d_bytes: int = 0
    """Bytes copied from the host to the device."""
    stall_seconds: float = 0.0
    """Compute standing still for copies; on an accelerator, of the waits passed so far. Includes
    `disk_stall_seconds`."""
    grown_bytes: int = 0
    """Host bytes reserved after the first `reserve`: growth that a step had to pay for."""
    disk_write_bytes: int = 0
    """Bytes written to `offload_dir`."""
    disk_read_bytes: int = 0
    """Bytes read from it."""
    disk_stall_seconds: float = 0.0
    """The host standing still for disk reads, disk writes or the staging bytes they hold."""
    spilled_bytes: int = 0
    """Bytes meant for the host that went to disk because the host budget was full."""
    pinned_bytes: int = 0
    """Page-locked bytes reserved now."""
    host_bytes: int = 0
    """Bytes of host slabs reserved now, pinned or not."""
    host_used_bytes: int = 0
    """Bytes of host slabs in use now."""
    live_handles: int = 0
    """Moved storages that a handle still owns now."""
    host_peak_bytes: int = 0
    """The most bytes of host slabs that were in use at once since the engine was made."""
    fragmentation: float = 0.0
    """Share of the host slabs' free bytes outside the largest hole, from 0 to 1, now."""

    def since(self, before: OffloadStats) -> OffloadStats:
        """The same, with what only ever grows counted from `before` on."""
        return self._counted(operator.sub, before)

    def __add__(self, before: OffloadStats) -> OffloadStats:
        """The same, with what was moved `before` added."""
        return self._counted(operator.add, before)

    def _counted(
        self, combine: Callable[[float, float], float], other: OffloadStats
    ) -> OffloadStats:
        counted = {name: combine(getattr(self, name), getattr(other, name)) for name in _GROWING}
        return replace(self, **counted)


_GROWING = (
    "d2h_bytes",
    "h2d_bytes",
    "stall_seconds",
    "grown_bytes",
    "disk_write_bytes",
    "disk_read_bytes",
    "disk_stall_seconds",
    "spilled_bytes",
)
