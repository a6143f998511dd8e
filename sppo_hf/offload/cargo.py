"""One moved span of bytes: where they are on the device, the host and the disk, and who owns them.

Plain state; only `engine` and `staging` change it. Why nothing here is counted by hand:
[Note: offload lifetimes].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sppo_hf.errors import SPPOError
from sppo_hf.offload.disk_verbs import DiskTransfer
from sppo_hf.offload.lanes import Ticket
from sppo_hf.offload.pool import Region
from sppo_hf.offload.spans import Span

if TYPE_CHECKING:
    from sppo_hf.offload.tiers import Tier


class Owner:
    """Shared by the handles of one moved storage; when it dies, its cargo is retired."""

    __slots__ = ("__weakref__", "cargo")

    def __init__(self, cargo: Cargo) -> None:
        self.cargo = cargo


@dataclass(slots=True, eq=False)
class DiskStay:
    """What a cargo of the disk tier has of the disk; only `staging` changes it."""

    extent: Any = None
    """The place on the disk, from the moment at which the host bytes were handed over."""
    write: DiskTransfer | None = None
    """The write of the region, while it is under way."""
    read: DiskTransfer | None = None
    """The read that fills the region, while it is under way."""
    copies: list[Ticket] = field(default_factory=list)
    """Copies to the device that read the region."""
    wanted: bool = False
    """The bytes are to go on to the device as soon as they are on the host."""
    failure: SPPOError | None = None
    """Why the bytes cannot be had any more."""

    def raise_failure(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.failure is not None:
            # A new one each time, since raising adds to an error's traceback.
            raise type(self.failure)(str(self.failure)) from self.failure


@dataclass(slots=True, eq=False)
class Cargo:
    """Where the bytes of one moved span are, and which copies touch them."""

    span: Span
    storage_key: int
    """Identity of the storage they came from (engine's own)."""
    region: Region | None
    """Host bytes. Those of the host tier are held until the cargo is retired, those of the disk
    tier only on their way through."""
    tier: Tier
    """Where the bytes wait."""
    out_ticket: Ticket
    source: Tensor | None
    """Device bytes being copied out, held until `out_ticket` is ordered."""
    watched: Tensor | None
    """Shares the version counter of the source; held as long as the source can be read."""
    version: int
    """Version of the source when its copy started."""
    overwritten: bool = False
    """The source was modified in place while it was still read: the bytes may be torn."""
    on_device: Tensor | None = None
    """Device bytes for backward: the copy back, or the source where it had not left yet."""
    in_ticket: Ticket | None = None
    disk: DiskStay | None = None
    """For the disk tier: what becomes of the bytes behind the host."""
    abandoned: bool = False
    retired: bool = False

    @property
    def host_bytes(self) -> Tensor | None:
        """The bytes on the host, uint8 [span.num_bytes], behind `out_ticket`; None if not there."""
        if self.region is None or (self.disk is not None and self.disk.read is not None):
            return None
        return self.region.memory

    @property
    def coming(self) -> bool:
        """Whether the bytes are on the device, or asked for."""
        return self.on_device is not None or (self.disk is not None and self.disk.wanted)

    @property
    def ordered(self) -> bool:
        """Whether device bytes and a region of the host tier can be given away.

        No copy can then still touch them; see rule 5 of the note.
        """
        return self.out_ticket.ordered and (self.in_ticket is None or self.in_ticket.ordered)

    @property
    def tickets(self) -> list[Ticket]:
        """The copies; when compute stands behind them, `ordered` holds."""
        return [self.out_ticket] if self.in_ticket is None else [self.out_ticket, self.in_ticket]

    def check_overwritten(self) -> None:
        """Notice that the source changed before its copy was ordered, or before its use."""
        if self.watched is not None and self.watched._version != self.version:
            self.overwritten = True

    def drop_source(self) -> None:
        """Free the source on the device; its copy is ordered."""
        self.check_overwritten()
        if self.on_device is None:  # else backward reads the source itself, so keep watching it
            self.watched = None
        self.source = None

    def evict(self) -> None:
        """Free the device bytes for backward; those on the host stay, and a source on its way."""
        if self.in_ticket is not None:
            # Compute takes the freed block next, and the copy into it may only be under way.
            self.in_ticket.wait()
            self.in_ticket = None
        if self.disk is not None:
            self.disk.wanted = False
        self.on_device = None
        if self.source is None:
            self.watched = None  # nobody reads the source any more

    def drop_device_bytes(self) -> None:
        """Free everything on the device; all copies are ordered."""
        self.source = self.watched = self.on_device = None
