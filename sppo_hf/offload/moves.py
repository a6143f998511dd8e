"""All cargoes of an engine: how each is moved, brought back and given up.

The engine's inner half: it is called under the engine's lock, looks at cargoes and not at handles,
and leaves to the engine what callers are promised. Why there is no race: [Note: offload lifetimes].
"""

from __future__ import annotations

import weakref
from collections import deque

from torch import Tensor

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.cargo import Cargo, DiskStay, Owner
from sppo_hf.offload.lanes import Copier, wait_for_all
from sppo_hf.offload.leaving import Leaving
from sppo_hf.offload.origins import Origins
from sppo_hf.offload.pool import HostPool, Region
from sppo_hf.offload.spans import Span, bytes_of
from sppo_hf.offload.staging import Staging
from sppo_hf.planning.modes import AwayTier


class Moves:
    """Cargoes by state, and the copies that change it.

    Args:
        copier: how bytes travel.
        pool: where those of the host tier stay.
        staging: the way to the disk; None where there is none.
    """

    def __init__(self, copier: Copier, pool: HostPool, staging: Staging | None) -> None:
        self.pool = pool
        self.staging = staging
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
        regions = [cargo.region for cargo in self.limbo if cargo.region is not None]
        in_limbo_bytes = sum(region.reserved_bytes for region in regions)
        staged = self.staging is not None and not self.staging.is_drained
        return self.pool.used_bytes == in_limbo_bytes and not staged

    def move(self, tensor: Tensor, tier: AwayTier) -> Owner:
        """Start copying out what `tensor` reaches, unless a move before has it."""
        owner = self.origins.owner_of(tensor)
        if owner is not None:
            return owner
        span = Span.to_move(tensor)
        source = bytes_of(tensor, span)
        pool, region = self._room(span.num_bytes, tier)
        try:
            ticket = self._copier.start_d2h(source, region.memory)
        except BaseException:
            pool.release(region)
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
            disk=None if pool is self.pool else DiskStay(),
        )
        owner = Owner(cargo)
        weakref.finalize(owner, self.retired.append, cargo).atexit = False
        self.live.add(cargo)
        self.leaving.add(cargo)
        self.origins.add(tensor, owner)
        if self.staging is not None and cargo.disk is not None:
            self.staging.add(cargo)
        return owner

    def _room(self, num_bytes: int, tier: AwayTier) -> tuple[HostPool, Region]:
        """A region for a copy out, and the pool that it is from."""
        if tier == "host":
            try:
                return self.pool, self._allocate(num_bytes)
            except BudgetError:
                if self.staging is None:
                    raise
        if self.staging is None:
            raise OffloadError(
                "a tensor was to go to disk, but this engine has none; set offload_dir to a folder "
                "on a fast disk"
            )
        region = self.staging.allocate(num_bytes, self.land)
        self.spilled_bytes += num_bytes if tier == "host" else 0
        return self.staging.pool, region

    def _allocate(self, num_bytes: int) -> Region:
        region = self.pool.try_allocate(num_bytes)
        if region is None:
            self.settle_limbo()  # rather let compute wait than let the pool grow
            region = self.pool.try_allocate(num_bytes)
        return region or self.pool.allocate(num_bytes)

    def fetch(self, cargo: Cargo) -> None:
        """Start bringing a cargo back to the device, unless it is there or on its way."""
        if cargo.on_device is not None:
            return
        if cargo.source is not None:
            cargo.on_device = cargo.source  # not gone yet: spare the way back
        elif cargo.host_bytes is not None:
            self.land(cargo)
        else:
            assert self.staging is not None, "only the disk tier gives its host bytes up"
            self.staging.want(cargo)

    def bring(self, cargo: Cargo) -> None:
        """Like `fetch`, but the copy to the device is enqueued when it returns."""
        self.fetch(cargo)
        if cargo.on_device is None:
            assert self.staging is not None, "all other bytes can be fetched at once"
            self.staging.bring(cargo, self.land)
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
        if self.staging is not None and cargo.disk is not None:
            self.staging.landed(cargo)

    def tend(self) -> None:
        """Move on what has ended; never blocks but for a disk whose queue is full.

        Raises:
            OffloadError: something went wrong in the background.
        """
        self.pass_on()
        if self.staging is not None:
            self.staging.raise_failure()

    def pass_on(self) -> None:
        """Like `tend`, but leaves it to a later call to raise."""
        self.collect()
        if self.staging is not None:
            self.staging.poll(self.land)

    def abandon(self) -> None:
        """Give all cargoes up."""
        for cargo in self.live:
            cargo.abandoned = True
            self.retired.append(cargo)
        self.leaving.forget()
        self.collect()
        if self.staging is not None:
            self.staging.forget()

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
                if self.staging is not None and cargo.disk is not None:
                    self.staging.retire(cargo)
        limbo, self.limbo = self.limbo, []
        for cargo in limbo:
            if cargo.ordered:  # asked once: a copy may end between two looks
                cargo.drop_device_bytes()
                if cargo.region is not None:
                    self.pool.release(cargo.region)
            else:
                self.limbo.append(cargo)

    def settle_limbo(self) -> None:
        """Free what was dropped under a copy, by letting compute wait for that copy."""
        wait_for_all(ticket for cargo in self.limbo for ticket in cargo.tickets)
        self.collect()
