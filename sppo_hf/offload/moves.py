"""All cargoes of an engine: how each is moved, brought back and given up.

The engine's inner half: it is called under the engine's lock, looks at cargoes and not at handles,
and leaves to the engine what callers are promised. Why there is no race: [Note: offload lifetimes].
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from sppo_hf.errors import OffloadError
from sppo_hf.offload.cargo import Cargo, Owner
from sppo_hf.offload.lanes import Copier, wait_for_all
from sppo_hf.offload.leaving import Leaving
from sppo_hf.offload.origins import Origins
from sppo_hf.offload.pool import Region
from sppo_hf.offload.spans import Span, bytes_of
from sppo_hf.offload.tiers import HostTier, Tier, allocate
from sppo_hf.planning.modes import AwayTier


class Moves:
    """Cargoes by state, and the copies that change it.

    Args:
        copier: how bytes travel.
        tiers: where they wait, nearest first; what finds no room on one goes to the next.
    """

    def __init__(self, copier: Copier, tiers: Sequence[Tier]) -> None:
        self.tiers = tuple(tiers)
        for tier in self.tiers:
            if isinstance(tier, HostTier):
                tier.make_room = self.settle_limbo
        self._copier = copier
        self.live: set[Cargo] = set()
        self.origins = Origins()
        self.leaving = Leaving()
        # Filled by finalizers at any moment, hence only appended to; see rule 6 of the note.
        self.retired: deque[Cargo] = deque()
        self.limbo: list[Cargo] = []
        self.d2h_bytes = 0
        self.h2d_bytes = 0
        self.spilled_bytes = 0

    @property
    def is_clean(self) -> bool:
        """Whether no host bytes are in use but for copies under way; asked when nothing lives."""
        return all(tier.is_drained(self._waiting_of(tier)) for tier in self.tiers)

    def _waiting_of(self, tier: Tier) -> list[Cargo]:
        return [cargo for cargo in self.limbo if cargo.tier is tier]

    def move(self, tensor: Tensor, wanted: AwayTier) -> Owner:
        """Start copying out what `tensor` reaches, unless a move before has it."""
        owner = self.origins.owner_of(tensor)
        if owner is not None:
            return owner
        span = Span.to_move(tensor)
        source = bytes_of(tensor, span)
        tier, region = self._room(span.num_bytes, wanted)
        try:
            ticket = self._copier.start_d2h(source, region.memory)
        except BaseException:
            tier.pool.release(region)
            raise
        self.d2h_bytes += span.num_bytes
        cargo = Cargo(
            span=span,
            storage_key=tensor.untyped_storage()._cdata,
            region=region,
            out_ticket=ticket,
            source=source,
            watched=tensor.detach(),
            version=tensor._version,
            tier=tier,
            disk=tier.stay(),
        )
        owner = Owner(cargo)
        weakref.finalize(owner, self.retired.append, cargo).atexit = False
        self.live.add(cargo)
        self.leaving.add(cargo)
        self.origins.add(tensor, owner)
        tier.store(cargo)
        return owner

    def _room(self, num_bytes: int, wanted: AwayTier) -> tuple[Tier, Region]:
        """A region for a copy out, and the tier that it is of."""
        names = [tier.name for tier in self.tiers]
        if wanted not in names:
            raise OffloadError(
                f"a tensor was to go to {wanted}, but this engine has none; set offload_dir to a "
                "folder on a fast disk"
            )
        tier, region = allocate(self.tiers[names.index(wanted) :], num_bytes, self.land)
        self.spilled_bytes += num_bytes if tier.name != wanted else 0
        return tier, region

    def fetch(self, cargo: Cargo) -> None:
        """Start bringing a cargo back to the device, unless it is there or on its way."""
        if cargo.on_device is not None:
            return
        if cargo.source is not None:
            cargo.on_device = cargo.source  # not gone yet: spare the way back
        elif cargo.host_bytes is not None:
            self.land(cargo)
        else:
            cargo.tier.load(cargo)

    def bring(self, cargo: Cargo) -> None:
        """Like `fetch`, but the copy to the device is enqueued when it returns."""
        self.fetch(cargo)
        if cargo.on_device is None:
            cargo.tier.wait_loaded(cargo, self.land)
            self.fetch(cargo)

    def land(self, cargo: Cargo) -> None:
        """Start the copy to the device from the bytes on the host."""
        # What nobody wants any more leaves the device before more comes back to it.
        self.settle_limbo()
        if cargo.retired:
            return
        assert cargo.host_bytes is not None, "a copy to the device has a source"
        cargo.on_device, cargo.in_ticket = self._copier.start_h2d(
            cargo.host_bytes, cargo.out_ticket
        )
        self.h2d_bytes += cargo.span.num_bytes
        cargo.tier.landed(cargo)

    def tend(self) -> None:
        """Move on what has ended; never blocks but for a disk whose queue is full.

        Raises:
            OffloadError: something went wrong in the background.
        """
        self.pass_on()
        for tier in self.tiers:
            tier.raise_failure()

    def pass_on(self) -> None:
        """Like `tend`, but leaves it to a later call to raise."""
        self.collect()
        for tier in self.tiers:
            tier.poll(self.land)

    def abandon(self) -> None:
        """Give all cargoes up."""
        for cargo in self.live:
            cargo.abandoned = True
            self.retired.append(cargo)
        self.leaving.forget()
        self.collect()
        for tier in self.tiers:
            tier.forget()

    def collect(self) -> None:
        """Free what no copy touches any more; polls, never blocks."""
        self.leaving.poll()
        while self.retired:
            cargo = self.retired.popleft()
            if not cargo.retired:
                cargo.retired = True
                self.live.discard(cargo)
                self.origins.forget(cargo)
                self.limbo.append(cargo)
                cargo.tier.retire(cargo)
        limbo, self.limbo = self.limbo, []
        for cargo in limbo:
            if cargo.ordered:  # asked once: a copy may end between two looks
                cargo.drop_device_bytes()
                if cargo.region is not None:
                    cargo.tier.pool.release(cargo.region)
            else:
                self.limbo.append(cargo)

    def settle_limbo(self) -> None:
        """Free what was dropped under a copy, by letting compute wait for that copy."""
        wait_for_all(ticket for cargo in self.limbo for ticket in cargo.tickets)
        self.collect()
