"""All storages of an engine: how each is moved, brought back and given up.

The engine's inner half: it is called under the engine's lock, looks at storages and not at handles,
and leaves to the engine what callers are promised. Why there is no race: [Note: offload lifetimes].

What is on its way out waits in a queue, oldest first. One stream copies in order, so what compute
waits for, and what the host sees done, is always a prefix of this queue: rules 2 and 3 of the note.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from sppo_hf.errors import OffloadError
from sppo_hf.offload.copy_streams import Copier, wait_for_all
from sppo_hf.offload.host_memory import Region
from sppo_hf.offload.storage import (
    ByteRange,
    OffloadedStorage,
    StorageRef,
    StorageRegistry,
    bytes_of,
)
from sppo_hf.offload.tiers import HostTier, Tier, allocate
from sppo_hf.planning.tiers import OffloadTier


class PendingCopies:
    """The storages whose source is still on the device although its copy has been enqueued.

    One for all prefetch orders of an engine: the device's memory is one, and so is the lane.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[int, OffloadedStorage]] = deque()  # (frame, storage)
        self._frame = 0
        self.num_bytes = 0
        """Bytes enqueued and not yet ordered."""

    def add(self, stored: OffloadedStorage) -> None:
        """Append a storage whose copy has just been enqueued; it belongs to the open frame."""
        self._queue.append((self._frame, stored))
        self.num_bytes += stored.span.num_bytes

    def close_frame(self, max_pending_d2h_bytes: int | None) -> None:
        """Let compute wait for the oldest copies until at most `max_pending_d2h_bytes` are left.

        With None, until nothing but the frame that closes is left. Which copies are waited for
        follows from sizes alone, not from time. One wait, for the last of them, does for all.
        """
        going: list[OffloadedStorage] = []
        while self._queue:
            frame, _ = self._queue[0]
            enough = (
                frame == self._frame
                if max_pending_d2h_bytes is None
                else self.num_bytes <= max_pending_d2h_bytes
            )
            if enough:
                break
            going.append(self._pop())
        wait_for_all(stored.out_ticket for stored in going)
        for stored in going:
            stored.drop_source()
        self._frame += 1

    def poll(self) -> None:
        """Free the sources whose copies have ended; never blocks."""
        while self._queue and self._queue[0][1].out_ticket.ordered:
            self._pop().drop_source()

    def forget(self) -> None:
        """Empty the queue; who owns the storages sees to their copies."""
        self._queue.clear()
        self.num_bytes = 0

    def _pop(self) -> OffloadedStorage:
        _, stored = self._queue.popleft()
        self.num_bytes -= stored.span.num_bytes
        return stored


class TransferManager:
    """Storages by state, and the copies that change it.

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
        self.live: set[OffloadedStorage] = set()
        self.registry = StorageRegistry()
        self.pending = PendingCopies()
        # Filled by finalizers at any moment, hence only appended to; see rule 6 of the note.
        self.retired: deque[OffloadedStorage] = deque()
        self.limbo: list[OffloadedStorage] = []
        self.d2h_bytes = 0
        self.h2d_bytes = 0
        self.spilled_bytes = 0

    @property
    def is_clean(self) -> bool:
        """Whether no host bytes are in use but for copies under way; asked when nothing lives."""
        return all(tier.is_drained(self._waiting_of(tier)) for tier in self.tiers)

    def _waiting_of(self, tier: Tier) -> list[OffloadedStorage]:
        return [stored for stored in self.limbo if stored.tier is tier]

    def move(self, tensor: Tensor, wanted: OffloadTier) -> StorageRef:
        """Start copying out what `tensor` reaches, unless a move before has it."""
        owner = self.registry.owner_of(tensor)
        if owner is not None:
            return owner
        span = ByteRange.to_move(tensor)
        source = bytes_of(tensor, span)
        tier, region = self._room(span.num_bytes, wanted)
        try:
            ticket = self._copier.start_d2h(source, region.memory)
        except BaseException:
            tier.pool.release(region)
            raise
        self.d2h_bytes += span.num_bytes
        stored = OffloadedStorage(
            span=span,
            storage_key=tensor.untyped_storage()._cdata,
            region=region,
            out_ticket=ticket,
            source=source,
            watched=tensor.detach(),
            version=tensor._version,
            tier=tier,
            disk=tier.on_disk(),
        )
        owner = StorageRef(stored)
        weakref.finalize(owner, self.retired.append, stored).atexit = False
        self.live.add(stored)
        self.pending.add(stored)
        self.registry.add(tensor, owner)
        tier.store(stored)
        return owner

    def _room(self, num_bytes: int, wanted: OffloadTier) -> tuple[Tier, Region]:
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

    def fetch(self, stored: OffloadedStorage) -> None:
        """Start bringing a storage back to the device, unless it is there or on its way."""
        if stored.on_device is not None:
            return
        if stored.source is not None:
            stored.on_device = stored.source  # not gone yet: spare the way back
        elif stored.host_bytes is not None:
            self.land(stored)
        else:
            stored.tier.load(stored)

    def bring(self, stored: OffloadedStorage) -> None:
        """Like `fetch`, but the copy to the device is enqueued when it returns."""
        self.fetch(stored)
        if stored.on_device is None:
            stored.tier.wait_loaded(stored, self.land)
            self.fetch(stored)

    def land(self, stored: OffloadedStorage) -> None:
        """Start the copy to the device from the bytes on the host."""
        # What nobody wants any more leaves the device before more comes back to it.
        self.settle_limbo()
        if stored.retired:
            return
        assert stored.host_bytes is not None, "a copy to the device has a source"
        stored.on_device, stored.in_ticket = self._copier.start_h2d(
            stored.host_bytes, stored.out_ticket
        )
        self.h2d_bytes += stored.span.num_bytes
        stored.tier.landed(stored)

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
        """Give all storages up."""
        for stored in self.live:
            stored.abandoned = True
            self.retired.append(stored)
        self.pending.forget()
        self.collect()
        for tier in self.tiers:
            tier.forget()

    def collect(self) -> None:
        """Free what no copy touches any more; polls, never blocks."""
        self.pending.poll()
        while self.retired:
            stored = self.retired.popleft()
            if not stored.retired:
                stored.retired = True
                self.live.discard(stored)
                self.registry.forget(stored)
                self.limbo.append(stored)
                stored.tier.retire(stored)
        limbo, self.limbo = self.limbo, []
        for stored in limbo:
            if stored.ordered:  # asked once: a copy may end between two looks
                stored.drop_device_bytes()
                if stored.region is not None:
                    stored.tier.pool.release(stored.region)
            else:
                self.limbo.append(stored)

    def settle_limbo(self) -> None:
        """Free what was dropped under a copy, by letting compute wait for that copy."""
        wait_for_all(ticket for stored in self.limbo for ticket in stored.tickets)
        self.collect()
