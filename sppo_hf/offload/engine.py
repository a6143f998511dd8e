"""What an offload engine has moved and holds, as plain numbers; knows nothing of how.

All storages of an engine: how each is moved, brought back and given up.

The engine's inner half: it is called under the engine's lock, looks at storages and not at handles,
and leaves to the engine what callers are promised. Why there is no race: [Note: offload lifetimes].

What is on its way out waits in a queue, oldest first. One stream copies in order, so what compute
waits for, and what the host sees done, is always a prefix of this queue: rules 2 and 3 of the note.


The owner of everything that is away from the device: starts, awaits, frees and accounts for it.

Two verbs for a copy, `prefetch` and `wait_for`, and one for its end, `release` (dropping the handle
does the same). `layer_offload` brings layers and autograd in. Why there is no race: [Note: offload
lifetimes] in `sppo_hf/offload/__init__.py`.

Not covered: CUDA graph capture, and tensors that other streams than the compute stream write.
"""

from __future__ import annotations

import gc
import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sppo_hf.errors import OffloadError
from sppo_hf.offload.copy_streams import Copier, CudaRuntime, HostCopier, StreamCopier, wait_for_all
from sppo_hf.offload.disk import DiskStore
from sppo_hf.offload.host_memory import HostPool, Progress, Region
from sppo_hf.offload.storage import (
    MODIFIED,
    ByteRange,
    OffloadedStorage,
    OffloadedTensor,
    StorageRef,
    StorageRegistry,
    bytes_of,
)
from sppo_hf.offload.tiers import DEFAULT_STAGING_BYTES, HostTier, Staging, Tier, allocate
from sppo_hf.planning.memory import HOST_SLAB_BYTES
from sppo_hf.planning.tiers import OffloadTier


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

    def limit_pending_d2h(self, max_pending_d2h_bytes: int | None) -> None:
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


class OffloadEngine:
    """Moves tensors of one device to a host pool and back without blocking the host.

    All methods may be called from any thread.

    Args:
        copier: how bytes travel.
        pool: where they stay.
        min_offload_elements: tensors with fewer elements stay on the device.
        staging: the way to the disk; None for an engine without that tier.
    """

    def __init__(
        self,
        copier: Copier,
        pool: HostPool,
        *,
        min_offload_elements: int = 1024,
        staging: Staging | None = None,
    ) -> None:
        self.pool = pool
        self.copier = copier
        """What moves the bytes."""
        self._min_elements = min_offload_elements
        self._lock = threading.RLock()
        self._tiers: tuple[Tier, ...] = (HostTier(pool), *(() if staging is None else (staging,)))
        self._moves = TransferManager(copier, self._tiers)
        self._last_stats = self.stats()

    @property
    def device(self) -> torch.device:
        """The device whose tensors move."""
        return self.copier.device

    @property
    def reads_ahead(self) -> bool:
        """Whether some tier takes time to load bytes into host memory."""
        return any(tier.reads_ahead for tier in self._tiers)

    def reserve(self, host_bytes: int, progress: Progress | None = None) -> int | None:
        """Make the host slabs that a step will need before it starts, and those of staging.

        Args:
            host_bytes: what the host tier will hold at most, without staging; cut to the budget.
            progress: is told of the host tier's slabs as they are made.

        Returns:
            Bytes that the host tier has, if the system refused to give all of these; else None.

        Raises:
            OffloadError: the host gives no (pinned) memory.
        """
        with self._lock:
            nearest, *others = self._tiers
            nearest.reserve(host_bytes, progress)
            for tier in others:
                tier.reserve()
            short = self.pool.refusal and self.pool.reserved_bytes < host_bytes
            return self.pool.reserved_bytes if short else None

    def can_offload(self, tensor: Tensor) -> bool:
        """Whether `start_offload` would move `tensor` rather than keep it in the handle."""
        return (
            tensor.numel() >= max(self._min_elements, 1)
            and tensor.device == self.copier.device
            # Subclasses (DTensor, quantized weights) are more than their bytes.
            and type(tensor) in (Tensor, torch.nn.Parameter)
            and tensor.layout == torch.strided
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
            and not tensor.is_inference()
            and tensor.untyped_storage().nbytes() > 0
        )

    @torch.no_grad()
    def start_offload(
        self, tensor: Tensor, *, label: object = None, tier: OffloadTier = "host"
    ) -> OffloadedTensor:
        """Start copying `tensor` to the host or on to the disk; return what stands for it.

        The caller drops its own reference; the device memory is free once the copy is over and
        nobody else refers to it. Until then a `wait_for` gives the original bytes back. Views of
        a storage that is away already cost no bytes.

        Args:
            tensor: any strides, any dtype; kept in the handle if it is not `can_offload`.
            label: what the tensor belongs to, for messages.
            tier: where its bytes are to wait. What finds no room on the host goes to the disk, if
                there is one. The host waits where the disk is slower than what goes there.

        Raises:
            BudgetError: the pool or the disk has no room left.
            OffloadError: the host gives no memory, the engine has no disk, or the disk failed.
        """
        with self._lock:
            self._moves.tend()
            if not self.can_offload(tensor):
                return OffloadedTensor.stayed(tensor, label)
            return OffloadedTensor.moved(tensor, self._moves.move(tensor, tier), label)

    @torch.no_grad()
    def prefetch(self, handle: OffloadedTensor) -> None:
        """Start bringing the tensor back to the device; does nothing if it is there or stayed.

        What is on disk is read in the background; a later call of the engine sends it on.

        Raises:
            OffloadError: the handle was released or abandoned, or the disk failed.
        """
        with self._lock:
            self._moves.tend()
            if handle.is_offloaded:
                self._moves.fetch(handle.stored())

    def poll(self) -> None:
        """Move on what has ended: copies that are over go on to their tier behind the host.

        Raises:
            OffloadError: the disk failed.
        """
        with self._lock:
            self._moves.tend()

    def read_ahead(self, handle: OffloadedTensor) -> bool:
        """Start reading the tensor from disk into host memory, if it is there.

        Returns:
            False if there is no room for it yet, so that a later call may do more.
        """
        with self._lock:
            return not handle.is_loadable or handle.stored().tier.read_ahead(handle.stored())

    @torch.no_grad()
    def wait_for(self, handle: OffloadedTensor) -> Tensor:
        """The tensor on the device, with its shape and strides; compute is behind its copy.

        May be called again until the handle is released; all calls share one device copy, which
        lives as long as the handles of its storage. The host waits where a disk has yet to give the
        bytes.

        Raises:
            OffloadError: the handle was released or abandoned, its source was modified in place
                before it could be copied, or the disk failed.
        """
        with self._lock:
            self._moves.tend()
            if not handle.is_offloaded:
                return handle.kept_tensor()
            stored = handle.stored()
            self._moves.bring(stored)
            stored.check_overwritten()
            if stored.overwritten:
                raise OffloadError(f"{handle} {MODIFIED}")
            if stored.in_ticket is not None:
                stored.in_ticket.wait()
            assert stored.on_device is not None, "a fetched storage has device bytes"
            return handle.rebuild(stored.on_device, stored.span)

    def release(self, handle: OffloadedTensor) -> None:
        """Give the handle's bytes back; the last handle of a storage frees host and device bytes.

        Tensors from `wait_for` stay valid as long as they are referenced.
        """
        with self._lock:
            handle.forget()
            self._moves.pass_on()

    def bytes_to_prefetch(self, handles: Iterable[OffloadedTensor]) -> int:
        """Device bytes that a prefetch of all `handles` would take; aliases count once."""
        with self._lock:
            storages = {handle.stored() for handle in handles if handle.is_loadable}
            return sum(stored.span.num_bytes for stored in storages if not stored.coming)

    def evict(self, handle: OffloadedTensor) -> None:
        """Free the device bytes, keep the others: the handle can be prefetched again.

        All handles of one storage share its device bytes, so they lose them together; whichever
        is used next brings them back for all. Tensors from `wait_for` stay valid as long as they
        are referenced. If the source has not left yet, it leaves as it would have. Compute waits
        for a copy back that nobody waited for. Does nothing for what stayed.

        Raises:
            OffloadError: the handle was released or abandoned, or the disk failed.
        """
        with self._lock:
            self._moves.tend()
            if handle.is_offloaded:
                handle.stored().evict()

    def limit_pending_d2h(self, max_pending_d2h_bytes: int | None = None) -> None:
        """Mark a frame boundary: compute waits until few enough bytes are on their way out.

        With `max_pending_d2h_bytes` None, until no frame but this one is, so that at most two
        frames wait on the device for their copies; see rule 3 of the note.

        Raises:
            OffloadError: the disk failed.
        """
        with self._lock:
            self._moves.tend()
            self._moves.pending.limit_pending_d2h(max_pending_d2h_bytes)

    def abandon(self) -> None:
        """Give up everything that is away, after an exception; its handles raise from now on.

        The pool is clean afterwards but for copies under way, which return when they end.
        """
        with self._lock:
            self._moves.abandon()

    def close(self) -> None:
        """Abandon everything and let compute wait for the copies under way; call before dropping.

        An engine dropped without it could free device bytes under a copy. Its disk is closed too,
        after what still uses the staging memory: from then on only that tier is out of use.
        """
        with self._lock:
            self._moves.abandon()
            self._moves.settle_limbo()
            for tier in self._tiers:
                tier.close()

    def assert_drained(self) -> None:
        """Prove that nothing is left away.

        Raises:
            OffloadError: some handle still owns bytes, so a graph is alive or a frame leaked.
        """
        with self._lock:
            self._moves.collect()
            live = self._moves.live
            if live:
                gc.collect()  # a handle may only wait in a reference cycle
                self._moves.collect()
            if live:
                num_bytes = sum(stored.span.num_bytes for stored in live)
                raise OffloadError(
                    f"{len(live)} offloaded storages ({num_bytes} bytes) are still owned, "
                    "where none should be: a graph is held that had no backward yet (delete its "
                    "loss), or was kept by retain_graph=True"
                )
            assert self._moves.is_clean, "every region has a storage"

    def stats(self) -> OffloadStats:
        """Bytes and seconds since the engine was made, and what it holds now."""
        with self._lock:
            self._moves.collect()
            pools = [tier.pool for tier in self._tiers]
            reserved_bytes = sum(pool.reserved_bytes for pool in pools)
            disk_stall_seconds = sum(tier.stall_seconds for tier in self._tiers)
            return OffloadStats(
                d2h_bytes=self._moves.d2h_bytes,
                h2d_bytes=self._moves.h2d_bytes,
                stall_seconds=self.copier.stall_seconds() + disk_stall_seconds,
                pinned_bytes=reserved_bytes if self.pool.pinned else 0,
                host_bytes=reserved_bytes,
                host_used_bytes=sum(pool.used_bytes for pool in pools),
                live_handles=len(self._moves.live),
                host_peak_bytes=sum(pool.peak_bytes for pool in pools),
                fragmentation=self.pool.fragmentation,
                grown_bytes=self.pool.grown_bytes,
                disk_write_bytes=sum(tier.write_bytes for tier in self._tiers),
                disk_read_bytes=sum(tier.read_bytes for tier in self._tiers),
                disk_stall_seconds=disk_stall_seconds,
                spilled_bytes=self._moves.spilled_bytes,
            )

    def take_stats(self) -> OffloadStats:
        """Like `stats`, but bytes moved and stall seconds since the last call."""
        with self._lock:
            now, last = self.stats(), self._last_stats
            self._last_stats = now
            return now.since(last)


def make_copier(device: torch.device, *, use_streams: bool = True) -> Copier:
    """What moves bytes between `device`, CPU or CUDA, and the host.

    Args:
        device: where the tensors are.
        use_streams: copy on lanes of their own (CUDA only) rather than on the compute stream.

    Raises:
        OffloadError: the device is of another kind.
    """
    if device.type == "cpu":
        return HostCopier()
    if device.type == "cuda":
        return StreamCopier(CudaRuntime(device), own_streams=use_streams)
    raise OffloadError(
        f"offloading from device {device} was asked for, but only cpu and cuda are supported; "
        "set offload to 'none'"
    )


def make_engine(
    device: torch.device,
    *,
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_elements: int = 1024,
    slab_bytes: int = HOST_SLAB_BYTES,
    budget_bytes: int | None = None,
    disk: DiskStore | None = None,
    staging_bytes: int | None = None,
    copier: Copier | None = None,
) -> OffloadEngine:
    """An engine for `device`, CPU or CUDA.

    Args:
        device: where the tensors are; on the CPU the host tier is plain memory beside them.
        use_pin_memory: page-lock the slabs (CUDA only); without it copies block the host.
        use_streams: copy on lanes of their own (CUDA only) rather than on the compute stream.
        min_offload_elements: tensors with fewer elements stay on the device.
        slab_bytes: size of a host slab.
        budget_bytes: the most that the host slabs may take, staging included; None for no limit.
        disk: the disk tier, from now on the engine's; None for none.
        staging_bytes: the part of the budget that bytes pass through on their way to and from the
            disk; None for a quarter of it, 1 GiB at most.
        copier: moves bytes of others too, so that all copies of a direction end in one order; None
            makes one.

    Raises:
        OffloadError: the device is of another kind.
    """
    if copier is None:
        copier = make_copier(device, use_streams=use_streams)
    locker = copier.page_locker if use_pin_memory else None
    staging = None
    if disk is not None:
        if staging_bytes is None:
            share_bytes = DEFAULT_STAGING_BYTES if budget_bytes is None else budget_bytes // 4
            staging_bytes = min(share_bytes, DEFAULT_STAGING_BYTES)
        staging = Staging(disk, staging_bytes, locker=locker)
        if budget_bytes is not None:
            budget_bytes = max(0, budget_bytes - staging.budget_bytes)
    pool = HostPool(slab_bytes, locker=locker, budget_bytes=budget_bytes)
    return OffloadEngine(copier, pool, min_offload_elements=min_offload_elements, staging=staging)
