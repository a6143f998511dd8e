"""What an offload engine has moved and holds, as plain numbers; knows nothing of how."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """What an engine has moved and holds."""

    d2h_bytes: int
    h2d_bytes: int
    stall_seconds: float
    """Compute standing still for copies; on an accelerator, of the waits passed so far. Includes
    `disk_stall_seconds`."""
    pinned_bytes: int
    """Page-locked bytes reserved now."""
    host_bytes: int
    """Bytes of host slabs reserved now, pinned or not."""
    host_used_bytes: int
    """Bytes of host slabs in use now."""
    live_handles: int
    """Moved storages that a handle still owns now."""
    host_peak_bytes: int = 0
    """The most bytes of host slabs that were in use at once since the engine was made."""
    fragmentation: float = 0.0
    """Share of the host slabs' free bytes outside the largest hole, from 0 to 1, now."""
    grown_bytes: int = 0
    """Host bytes reserved after the first `reserve`: growth that a step had to pay for."""
    disk_write_bytes: int = 0
    disk_read_bytes: int = 0
    disk_stall_seconds: float = 0.0
    """The host standing still for disk reads, disk writes or the staging bytes they hold."""
    spilled_bytes: int = 0
    """Bytes meant for the host that went to disk because the host budget was full."""

    def since(self, before: OffloadStats) -> OffloadStats:
        """The same, with what only ever grows counted from `before` on."""
        return replace(
            self,
            d2h_bytes=self.d2h_bytes - before.d2h_bytes,
            h2d_bytes=self.h2d_bytes - before.h2d_bytes,
            stall_seconds=self.stall_seconds - before.stall_seconds,
            grown_bytes=self.grown_bytes - before.grown_bytes,
            disk_write_bytes=self.disk_write_bytes - before.disk_write_bytes,
            disk_read_bytes=self.disk_read_bytes - before.disk_read_bytes,
            disk_stall_seconds=self.disk_stall_seconds - before.disk_stall_seconds,
            spilled_bytes=self.spilled_bytes - before.spilled_bytes,
        )


NOTHING_MOVED = OffloadStats(
    d2h_bytes=0,
    h2d_bytes=0,
    stall_seconds=0.0,
    pinned_bytes=0,
    host_bytes=0,
    host_used_bytes=0,
    live_handles=0,
)
