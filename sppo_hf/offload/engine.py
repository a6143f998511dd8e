"""Moves tensors of a device to host memory or tiers behind it and back, without blocking the host.

Every copy has two verbs: `prefetch` starts it, `wait_for` orders the compute stream behind it and
returns the tensor. `release` (or dropping the handle) frees the bytes. `layer_offload` connects the
engine to what autograd saves. Why there is no race: [Note: offload lifetimes] in
`sppo_hf/offload/__init__.py`.

Not covered: CUDA graph capture, and tensors that streams other than the compute stream write to.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sppo_hf.config import MORE_TIERS
from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.copy_streams import (
    Copier,
    CudaRuntime,
    HostCopier,
    StreamCopier,
    wait_for_all,
)
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
from sppo_hf.offload.store import Store
from sppo_hf.offload.tiers import DEFAULT_STAGING_BYTES, Staging, Tier
from sppo_hf.planning.memory import HOST_SLAB_BYTES
from sppo_hf.planning.tiers import HOST, TIERS, OffloadTier


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadStats:
    """Counters of an engine, which only grow, and what it holds at the moment."""

    d2h_bytes: int = 0
    """Bytes copied from the device to the host."""
    h2d_bytes: int = 0
    """Bytes copied from the host to the device."""
    stall_seconds: float = 0.0
    """Time that compute stood still for copies, `disk_stall_seconds` included. On an accelerator,
    of the waits that the device has passed so far."""
    grown_bytes: int = 0
    """Host bytes allocated in the middle of a step, after the first `reserve`."""
    disk_write_bytes: int = 0
    """Bytes written from host memory to tiers behind it, such as a disk."""
    disk_read_bytes: int = 0
    """Bytes read from those tiers."""
    disk_stall_seconds: float = 0.0
    """Time that the host stood still for those tiers, or for free staging memory."""
    spilled_bytes: int = 0
    """Bytes that went to a farther tier because the one they were meant for was full."""
    pinned_bytes: int = 0
    """Page-locked bytes reserved now."""
    host_bytes: int = 0
    """Bytes of host slabs reserved now, pinned or not."""
    host_used_bytes: int = 0
    """Bytes of host slabs in use now."""
    live_handles: int = 0
    """Offloaded storages that a handle still owns now."""
    host_peak_bytes: int = 0
    """Maximum of `host_used_bytes` since the engine was made."""
    fragmentation: float = 0.0
    """Share of the host slabs' free bytes outside the largest free block, from 0 to 1, now."""

    def since(self, before: OffloadStats) -> OffloadStats:
        """These stats with the counters reduced by those of `before`."""
        return self._combine_counters(operator.sub, before)

    def __add__(self, before: OffloadStats) -> OffloadStats:
        """These stats with the counters increased by those of `before`."""
        return self._combine_counters(operator.add, before)

    def _combine_counters(
        self, combine: Callable[[float, float], float], other: OffloadStats
    ) -> OffloadStats:
        counted = {name: combine(getattr(self, name), getattr(other, name)) for name in _COUNTERS}
        return replace(self, **counted)


_COUNTERS = (
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
    """Queue of the storages whose D2H copy is enqueued and whose source is still on the device.

    The D2H stream copies in order, so what compute is made to wait for, and what the host sees
    done, is always a prefix of this queue (rules 2 and 3 of the note). All layers and K/V of an
    engine share one queue, because they share the stream and the device's memory.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[int, OffloadedStorage]] = deque()  # (group, storage)
        self._group = 0
        self.num_bytes = 0
        """Bytes enqueued and not yet ordered."""

    def add(self, stored: OffloadedStorage) -> None:
        """Append a storage whose copy has just been enqueued; it belongs to the open group."""
        self._queue.append((self._group, stored))
        self.num_bytes += stored.span.num_bytes

    def close_group(self, max_bytes: int | None) -> None:
        """Make compute wait for the oldest copies until at most `max_bytes` are pending.

        With None, until only the copies since the last call are pending. Which copies are waited
        for depends on sizes alone, not on timing. One wait, for the last of them, covers all.
        """
        ordered: list[OffloadedStorage] = []
        while self._queue:
            if max_bytes is None and self._queue[0][0] == self._group:
                break
            if max_bytes is not None and self.num_bytes <= max_bytes:
                break
            ordered.append(self._pop())
        wait_for_all(stored.d2h_ticket for stored in ordered)
        for stored in ordered:
            stored.drop_source()
        self._group += 1

    def poll(self) -> None:
        """Free the sources whose copies have ended; never blocks."""
        while self._queue and self._queue[0][1].d2h_ticket.ordered:
            self._pop().drop_source()

    def clear(self) -> None:
        """Empty the queue without waiting; the storages still hold their tickets."""
        self._queue.clear()
        self.num_bytes = 0

    def _pop(self) -> OffloadedStorage:
        _, stored = self._queue.popleft()
        self.num_bytes -= stored.span.num_bytes
        return stored


class OffloadEngine:
    """Owns everything that is offloaded from one device.

    Public methods may be called from any thread: they hold the engine's lock. Private methods
    expect it to be held.

    Args:
        copier: Copies bytes between device and host.
        pool: Host memory of the host tier.
        min_offload_elements: Tensors with fewer elements are kept on the device.
        behind: Tiers behind the host, nearest first.
    """

    def __init__(
        self,
        copier: Copier,
        pool: HostPool,
        *,
        min_offload_elements: int = 1024,
        behind: Sequence[Tier] = (),
    ) -> None:
        self.pool = pool
        self.copier = copier
        """Copies bytes between device and host."""
        self._min_elements = min_offload_elements
        self._lock = threading.RLock()
        # What finds no space on one tier goes to the next.
        self._tiers: tuple[Tier, ...] = (Tier(pool), *behind)
        for tier in self._tiers:
            tier.connect(start_h2d=self._start_h2d, free_dropped=self._free_dropped)
        self._live: set[OffloadedStorage] = set()
        self._registry = StorageRegistry()
        self._pending = PendingCopies()
        # Finalizers append to it at any moment, hence a deque; see rule 6 of the note.
        self._unowned: deque[OffloadedStorage] = deque()
        # Retired storages that a copy may still touch.
        self._dropped: list[OffloadedStorage] = []
        self._d2h_bytes = 0
        self._h2d_bytes = 0
        self._spilled_bytes = 0
        self._last_stats = self.stats()

    @property
    def device(self) -> torch.device:
        """The device whose tensors are offloaded."""
        return self.copier.device

    @property
    def reads_ahead(self) -> bool:
        """Whether some tier takes time to load bytes into host memory."""
        return any(tier.reads_ahead for tier in self._tiers)

    @property
    def reserved_bytes(self) -> Mapping[OffloadTier, int]:
        """Bytes beyond host memory that each tier has taken from the machine, in use or not."""
        with self._lock:
            return {tier.name: tier.reserved_bytes for tier in self._tiers}

    def reserve(self, host_bytes: int, progress: Progress | None = None) -> int | None:
        """Allocate host memory before a step: `host_bytes` for the host tier, and all staging.

        What is more than the budget is cut; `progress` is called as the host tier's slabs are made.

        Returns:
            Bytes that the host tier has if the system refused to give all of these, else None.

        Raises:
            OffloadError: The host gives no (pinned) memory.
        """
        with self._lock:
            for tier in self._tiers:
                tier.reserve(host_bytes, progress)
            short = self.pool.refusal and self.pool.reserved_bytes < host_bytes
            return self.pool.reserved_bytes if short else None

    def can_offload(self, tensor: Tensor) -> bool:
        """Whether `start_offload` would copy `tensor` rather than keep it in the handle."""
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
        self, tensor: Tensor, *, label: object = None, tier: OffloadTier = HOST
    ) -> OffloadedTensor:
        """Start copying `tensor` away from the device; return the handle that stands for it.

        The caller drops its own reference; the device memory is free once the copy is over and
        nobody else refers to it. Until then `wait_for` returns the original bytes. Views of a
        storage that is offloaded already cost no bytes. The host blocks only where a tier
        behind it is slower than what goes there.

        Args:
            tensor: Any strides, any dtype; kept in the handle if it is not `can_offload`.
            label: What the tensor belongs to, for error messages.
            tier: Where its bytes go. What finds no space there goes to the next tier, if any.

        Raises:
            BudgetError: That tier and all behind it are full.
            OffloadError: The host gives no memory, the engine has no such tier, or one failed.
        """
        with self._lock:
            self._poll_and_raise()
            if not self.can_offload(tensor):
                return OffloadedTensor.kept(tensor, label)
            return OffloadedTensor.offloaded(tensor, self._start_d2h(tensor, tier), label)

    @torch.no_grad()
    def prefetch(self, handle: OffloadedTensor) -> None:
        """Start bringing the tensor back to the device; does nothing if it is there.

        A tensor behind the host is read in the background; a later call of the engine copies it on.

        Raises:
            OffloadError: The handle was released or abandoned, or a tier failed.
        """
        with self._lock:
            self._poll_and_raise()
            if handle.is_offloaded:
                self._start_load(handle.stored())

    def poll(self) -> None:
        """Advance what has ended: finished copies go on to tiers, finished reads to the device.

        Raises:
            OffloadError: A tier failed.
        """
        with self._lock:
            self._poll_and_raise()

    def read_ahead(self, handle: OffloadedTensor) -> bool:
        """Start reading the tensor into host memory, if it is on a tier behind it.

        Returns:
            False if staging has no free space for it yet, so that a later call may succeed.
        """
        with self._lock:
            return not handle.is_loadable or handle.stored().tier.read_ahead(handle.stored())

    @torch.no_grad()
    def wait_for(self, handle: OffloadedTensor) -> Tensor:
        """Return the tensor on the device, with its shape and strides; compute is behind its copy.

        May be called again until the handle is released; all calls share one device copy, which
        lives as long as the handles of its storage. The host blocks only for a read.

        Raises:
            OffloadError: The handle was released or abandoned, its source was modified in place
                before it could be copied, or a tier failed.
        """
        with self._lock:
            self._poll_and_raise()
            if not handle.is_offloaded:
                return handle.kept_tensor()
            stored = handle.stored()
            self._start_load(stored)
            if stored.device_bytes is None:
                stored.tier.wait_loaded(stored)
                self._start_load(stored)
            stored.check_overwritten()
            if stored.overwritten:
                raise OffloadError(f"{handle} {MODIFIED}")
            if stored.h2d_ticket is not None:
                stored.h2d_ticket.wait()
            assert stored.device_bytes is not None, "a loaded storage has device bytes"
            return handle.rebuild(stored.device_bytes, stored.span)

    def release(self, handle: OffloadedTensor) -> None:
        """Give the handle's bytes back; the last handle of a storage frees host and device bytes.

        Tensors returned by `wait_for` stay valid as long as they are referenced.
        """
        with self._lock:
            handle.forget()
            self._poll()

    def bytes_to_prefetch(self, handles: Iterable[OffloadedTensor]) -> int:
        """Device bytes that a prefetch of all `handles` would take; aliases count once."""
        with self._lock:
            storages = {handle.stored() for handle in handles if handle.is_loadable}
            return sum(stored.span.num_bytes for stored in storages if not stored.is_prefetched)

    def evict(self, handle: OffloadedTensor) -> None:
        """Free the device bytes but not the offloaded ones, so it can be prefetched again.

        All handles of one storage share its device bytes; the next use of any brings them back for
        all. Tensors returned by `wait_for` stay valid as long as they are referenced. A D2H copy
        under way continues. Compute waits for an H2D copy that nobody waited for. Does nothing for
        a tensor that was kept on the device.

        Raises:
            OffloadError: The handle was released or abandoned, or a tier failed.
        """
        with self._lock:
            self._poll_and_raise()
            if handle.is_offloaded:
                handle.stored().evict()

    def limit_pending_d2h(self, max_pending_d2h_bytes: int | None = None) -> None:
        """End a group of offloads (a layer's, for one): make compute wait for the oldest copies.

        With None, for those of all earlier groups, so that the sources of at most two groups are on
        the device at a time; see rule 3 of the note.

        Raises:
            OffloadError: A tier failed.
        """
        with self._lock:
            self._poll_and_raise()
            self._pending.close_group(max_pending_d2h_bytes)

    def abandon(self) -> None:
        """Give up everything that is offloaded, after an exception; its handles raise from now on.

        The pool is empty afterwards but for copies under way, whose regions return when they end.
        """
        with self._lock:
            for stored in self._live:
                stored.abandoned = True
                self._unowned.append(stored)
            self._pending.clear()
            self._free_unowned()
            for tier in self._tiers:
                tier.forget()

    def close(self) -> None:
        """Abandon everything and make compute wait for copies under way; call before dropping.

        An engine dropped without it could free device bytes under a copy. Only tiers behind
        the host are out of use afterwards.
        """
        with self._lock:
            self.abandon()
            self._free_dropped()
            for tier in self._tiers:
                tier.close()

    def assert_drained(self) -> None:
        """Check that nothing is offloaded any more.

        Raises:
            OffloadError: Some handle still owns bytes: a graph is alive, or a handle leaked.
        """
        with self._lock:
            self._free_unowned()
            if self._live:
                gc.collect()  # a handle may only wait in a reference cycle
                self._free_unowned()
            if self._live:
                num_bytes = sum(stored.span.num_bytes for stored in self._live)
                raise OffloadError(
                    f"{len(self._live)} offloaded storages ({num_bytes} bytes) are still owned, "
                    "where none should be: a graph is held that had no backward yet (delete its "
                    "loss), or was kept by retain_graph=True"
                )
            for tier in self._tiers:
                dropped = [stored for stored in self._dropped if stored.tier is tier]
                assert tier.is_drained(dropped), "every region has a storage"

    def stats(self) -> OffloadStats:
        """Counters since the engine was made, and what it holds now."""
        with self._lock:
            self._free_unowned()
            pools = [tier.pool for tier in self._tiers]
            reserved_bytes = sum(pool.reserved_bytes for pool in pools)
            disk_stall_seconds = sum(tier.stall_seconds for tier in self._tiers)
            return OffloadStats(
                d2h_bytes=self._d2h_bytes,
                h2d_bytes=self._h2d_bytes,
                stall_seconds=self.copier.stall_seconds() + disk_stall_seconds,
                pinned_bytes=reserved_bytes if self.pool.pinned else 0,
                host_bytes=reserved_bytes,
                host_used_bytes=sum(pool.used_bytes for pool in pools),
                live_handles=len(self._live),
                host_peak_bytes=sum(pool.peak_bytes for pool in pools),
                fragmentation=self.pool.fragmentation,
                grown_bytes=self.pool.grown_bytes,
                disk_write_bytes=sum(tier.write_bytes for tier in self._tiers),
                disk_read_bytes=sum(tier.read_bytes for tier in self._tiers),
                disk_stall_seconds=disk_stall_seconds,
                spilled_bytes=self._spilled_bytes,
            )

    def take_stats(self) -> OffloadStats:
        """Like `stats`, with the counters since the last call."""
        with self._lock:
            now, last = self.stats(), self._last_stats
            self._last_stats = now
            return now.since(last)

    # -- copies, under the lock --------------------------------------------------------------

    def _start_d2h(self, tensor: Tensor, tier_name: OffloadTier) -> StorageRef:
        """Start copying the storage of `tensor`, unless an earlier call has copied these bytes."""
        owner = self._registry.owner_of(tensor)
        if owner is not None:
            return owner
        span = ByteRange.to_offload(tensor)
        source = bytes_of(tensor, span)
        tier, region = self._allocate(span.num_bytes, tier_name)
        if tier.name != tier_name:
            self._spilled_bytes += span.num_bytes
        try:
            ticket = self.copier.start_d2h(source, region.memory)
        except BaseException:
            tier.give_back(region)
            raise
        self._d2h_bytes += span.num_bytes
        stored = OffloadedStorage(
            span=span,
            storage_key=tensor.untyped_storage()._cdata,
            region=region,
            d2h_ticket=ticket,
            source=source,
            watched=tensor.detach(),
            version=tensor._version,
            tier=tier,
        )
        owner = StorageRef(stored)
        weakref.finalize(owner, self._unowned.append, stored).atexit = False
        self._live.add(stored)
        self._pending.add(stored)
        self._registry.add(tensor, owner)
        tier.store(stored)
        return owner

    def _allocate(self, num_bytes: int, tier_name: OffloadTier) -> tuple[Tier, Region]:
        """Allocate host memory for a D2H copy on the named tier, or on one behind it.

        Raises:
            BudgetError: None has free space; says why the last has none.
        """
        names = [tier.name for tier in self._tiers]
        if tier_name not in names:
            needed = TIERS.facts(tier_name).get("needs", MORE_TIERS)
            raise OffloadError(
                f"a tensor was to go to {tier_name}, but this engine has {' and '.join(names)} "
                f"alone; set {needed}, or offload_tier to one of these"
            )
        *nearer, last = self._tiers[names.index(tier_name) :]
        for tier in nearer:
            # The error is not kept: its traceback leads to Python frames that hold the step's
            # tensors.
            with contextlib.suppress(BudgetError):
                return tier, tier.allocate(num_bytes)
        return last, last.allocate(num_bytes)

    def _start_load(self, stored: OffloadedStorage) -> None:
        """Start bringing a storage back to the device, unless it is there or on its way."""
        if stored.device_bytes is not None:
            return
        if stored.source is not None:
            stored.device_bytes = stored.source  # not freed yet: no copy is needed
        elif stored.host_bytes is not None:
            self._start_h2d(stored)
        else:
            stored.tier.load(stored)

    def _start_h2d(self, stored: OffloadedStorage) -> None:
        """Start the copy to the device of a storage whose bytes are on the host."""
        # Free device bytes that are not needed any more before allocating others.
        self._free_dropped()
        if stored.retired:
            return
        assert stored.host_bytes is not None, "a copy to the device has a source"
        stored.device_bytes, stored.h2d_ticket = self.copier.start_h2d(
            stored.host_bytes, stored.d2h_ticket
        )
        self._h2d_bytes += stored.span.num_bytes
        stored.tier.on_h2d_started(stored)

    def _poll_and_raise(self) -> None:
        self._poll()
        for tier in self._tiers:
            tier.raise_failure()

    def _poll(self) -> None:
        """Advance what has ended; never blocks but for a tier whose write queue is full."""
        self._free_unowned()
        for tier in self._tiers:
            tier.poll()

    def _free_unowned(self) -> None:
        """Free storages without an owner that no copy touches any more; polls, never blocks."""
        self._pending.poll()
        while self._unowned:
            stored = self._unowned.popleft()
            if not stored.retired:
                stored.retired = True
                self._live.discard(stored)
                self._registry.forget(stored)
                self._dropped.append(stored)
                stored.tier.retire(stored)
        dropped, self._dropped = self._dropped, []
        for stored in dropped:
            if stored.ordered:  # read once: a copy may end between two reads
                stored.drop_device_bytes()
                if stored.region is not None:
                    stored.tier.pool.release(stored.region)
            else:
                self._dropped.append(stored)

    def _free_dropped(self) -> None:
        """Free what was dropped under a copy, by making compute wait for that copy."""
        wait_for_all(ticket for stored in self._dropped for ticket in stored.tickets)
        self._free_unowned()


def make_copier(device: torch.device, *, use_streams: bool = True) -> Copier:
    """Return the copier between the host and `device`, CPU or CUDA.

    With `use_streams` (CUDA only) it copies on streams of its own, not on the compute stream.

    Raises:
        OffloadError: The device is of another type.
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
    stores: Sequence[Store] = (),
    staging_bytes: int | None = None,
    copier: Copier | None = None,
) -> OffloadEngine:
    """Return an engine for `device`, CPU or CUDA; on the CPU the host tier is memory beside it.

    `budget_bytes` is the maximum of all host slabs together; None for no limit. `stores` keep the
    bytes of tiers behind the host, nearest first, and are owned by the engine from now on; each has
    `staging_bytes` of the budget, through which bytes pass on their way there and back, None for an
    equal part of a quarter of it, at most 1 GiB. A given `copier` is shared
    with other users, so that all copies of a direction end in one order; else one is made, by
    `make_copier`, and slabs are page-locked with `use_pin_memory` (CUDA only).

    Raises:
        OffloadError: The device is of another type.
    """
    if copier is None:
        copier = make_copier(device, use_streams=use_streams)
    locker = copier.page_locker if use_pin_memory else None
    if staging_bytes is None:
        share_bytes = DEFAULT_STAGING_BYTES
        if budget_bytes is not None and stores:
            share_bytes = budget_bytes // (4 * len(stores))
        staging_bytes = min(share_bytes, DEFAULT_STAGING_BYTES)
    behind = [Staging(store, staging_bytes, locker=locker) for store in stores]
    if budget_bytes is not None:
        budget_bytes = max(0, budget_bytes - sum(tier.budget_bytes for tier in behind))
    pool = HostPool(slab_bytes, locker=locker, budget_bytes=budget_bytes)
    return OffloadEngine(copier, pool, min_offload_elements=min_offload_elements, behind=behind)
