"""The owner of everything that is away from the device: starts, awaits, frees and accounts for it.

Two verbs for a copy, `prefetch` and `wait_for`, and one for its end, `release` (dropping the handle
does the same). `layer_offload` brings layers and autograd in. Why there is no race: [Note: offload
lifetimes] in `sppo_hf/offload/__init__.py`.

Not covered: CUDA graph capture, and tensors that other streams than the compute stream write.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from sppo_hf.errors import OffloadError
from sppo_hf.offload.copy_streams import Copier, CudaRuntime, HostCopier, StreamCopier
from sppo_hf.offload.disk import DiskStore
from sppo_hf.offload.engine import OffloadStats, TransferManager
from sppo_hf.offload.host_memory import HostPool, Progress
from sppo_hf.offload.layer_offload import PrefetchOrder
from sppo_hf.offload.storage import MODIFIED, OffloadedTensor
from sppo_hf.offload.tiers import DEFAULT_STAGING_BYTES, HostTier, Staging, Tier
from sppo_hf.planning.memory import HOST_SLAB_BYTES
from sppo_hf.planning.tiers import OffloadTier


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

    def new_prefetch_order(
        self,
        *,
        max_pending_d2h_bytes: int | None = None,
        asked: Sequence[int] | None = None,
        on_prefetch: Callable[[int], None] | None = None,
    ) -> PrefetchOrder:
        """A prefetch order for one sequence; its `record` is this engine's frame boundary.

        Args:
            max_pending_d2h_bytes: when a frame closes, compute waits until no more than these
                device bytes are on their way out. The engine's, whichever prefetch order or K/V
                store they are from: the device's memory is one. None: until only the frame that
                closes is on its way.
            asked: which frames each frame prefetches; see `PrefetchOrder`.
            on_prefetch: is told the number of each frame that is prefetched.
        """
        return PrefetchOrder(
            self,
            max_pending_d2h_bytes=max_pending_d2h_bytes,
            asked=asked,
            reads_ahead=any(tier.reads_ahead for tier in self._tiers),
            on_prefetch=on_prefetch,
        )

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

    def can_move(self, tensor: Tensor) -> bool:
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
            tensor: any strides, any dtype; kept in the handle if it is not `can_move`.
            label: what the tensor belongs to, for messages.
            tier: where its bytes are to wait. What finds no room on the host goes to the disk, if
                there is one. The host waits where the disk is slower than what goes there.

        Raises:
            BudgetError: the pool or the disk has no room left.
            OffloadError: the host gives no memory, the engine has no disk, or the disk failed.
        """
        with self._lock:
            self._moves.tend()
            if not self.can_move(tensor):
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
            if handle.is_moved:
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
            return not handle.is_away or handle.stored().tier.read_ahead(handle.stored())

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
            if not handle.is_moved:
                return handle.stayed_tensor()
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

    def bytes_to_fetch(self, handles: Iterable[OffloadedTensor]) -> int:
        """Device bytes that a prefetch of all `handles` would take; aliases count once."""
        with self._lock:
            storages = {handle.stored() for handle in handles if handle.is_away}
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
            if handle.is_moved:
                handle.stored().evict()

    def close_frame(self, max_pending_d2h_bytes: int | None = None) -> None:
        """Mark a frame boundary: compute waits until few enough bytes are on their way out.

        With `max_pending_d2h_bytes` None, until no frame but this one is, so that at most two
        frames wait on the device for their copies; see rule 3 of the note.

        Raises:
            OffloadError: the disk failed.
        """
        with self._lock:
            self._moves.tend()
            self._moves.pending.close_frame(max_pending_d2h_bytes)

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
