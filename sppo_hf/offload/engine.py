"""The owner of everything that is away from the device: starts, awaits, frees and accounts for it.

Two verbs for a copy, `prefetch` and `wait_for`, and one for its end, `release` (dropping the
handle does the same). Knows nothing of layers, chunks or autograd; `frames` brings those in.
Why there is no race: [Note: offload lifetimes] in `sppo_hf/offload/__init__.py`.

Not covered: CUDA graph capture, and tensors that other streams than the compute stream write.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from sppo_hf.errors import OffloadError
from sppo_hf.offload.handles import MODIFIED, Cargo, OffloadedTensor, Owner, Span, bytes_of
from sppo_hf.offload.lanes import Copier, CudaRuntime, HostCopier, StreamCopier
from sppo_hf.offload.leaving import Leaving
from sppo_hf.offload.origins import Origins
from sppo_hf.offload.pool import DEFAULT_SLAB_BYTES, HostPool, Region
from sppo_hf.offload.stats import OffloadStats
from sppo_hf.offload.tape import Tape


class OffloadEngine:
    """Moves tensors of one device to a host pool and back without blocking the host.

    All methods may be called from any thread.

    Args:
        copier: how bytes travel.
        pool: where they stay.
        min_offload_elements: tensors with fewer elements stay on the device.
    """

    def __init__(self, copier: Copier, pool: HostPool, *, min_offload_elements: int = 1024) -> None:
        self.pool = pool
        self._copier = copier
        self._min_elements = min_offload_elements
        self._lock = threading.RLock()
        self._live: set[Cargo] = set()
        self._origins = Origins()
        self._leaving = Leaving()
        # Filled by finalizers at any moment, hence only appended to; see rule 6 of the note.
        self._retired: deque[Cargo] = deque()
        self._limbo: list[Cargo] = []
        self._d2h_bytes = 0
        self._h2d_bytes = 0
        self._last_stats = self.stats()

    @property
    def device(self) -> torch.device:
        """The device whose tensors move."""
        return self._copier.device

    def new_tape(self, *, leave_bytes: int | None = None, fetch_bytes: int | None = None) -> Tape:
        """A tape for one sequence; its `record` is this engine's frame boundary.

        Args:
            leave_bytes: when a frame closes, compute waits until no more than these device bytes
                are on their way out. The engine's, whichever tape or K/V store they are from: the
                device's memory is one. None: until only the frame that closes is on its way.
            fetch_bytes: the most bytes of this tape's frames that are prefetched and not yet in
                use, but for the next frame, which always is. None: that one alone.
        """
        return Tape(self, leave_bytes=leave_bytes, fetch_bytes=fetch_bytes or 0)

    def can_move(self, tensor: Tensor) -> bool:
        """Whether `start_offload` would move `tensor` rather than keep it in the handle."""
        return (
            tensor.numel() >= max(self._min_elements, 1)
            and tensor.device == self._copier.device
            # Subclasses (DTensor, quantized weights) are more than their bytes.
            and type(tensor) in (Tensor, torch.nn.Parameter)
            and tensor.layout == torch.strided
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
            and not tensor.is_inference()
            and tensor.untyped_storage().nbytes() > 0
        )

    @torch.no_grad()
    def start_offload(self, tensor: Tensor, *, label: object = None) -> OffloadedTensor:
        """Start copying `tensor` to the host and return what stands for it.

        The caller drops its own reference; the device memory is free once the copy is over and
        nobody else refers to it. Until then a `wait_for` gives the original bytes back. Views of
        a storage that is away already cost no bytes.

        Args:
            tensor: any strides, any dtype; kept in the handle if it is not `can_move`.
            label: what the tensor belongs to, for messages.

        Raises:
            BudgetError: the pool has no room left.
            OffloadError: the host gives no memory.
        """
        with self._lock:
            self._collect()
            if not self.can_move(tensor):
                return OffloadedTensor.stayed(tensor, label)
            owner = self._origins.owner_of(tensor) or self._move(tensor)
            return OffloadedTensor.moved(tensor, owner, label)

    @torch.no_grad()
    def prefetch(self, handle: OffloadedTensor) -> None:
        """Start bringing the tensor back to the device; does nothing if it is there or stayed.

        Raises:
            OffloadError: the handle was released or abandoned.
        """
        with self._lock:
            self._collect()
            if handle.is_moved:
                self._fetch(handle.cargo())

    @torch.no_grad()
    def wait_for(self, handle: OffloadedTensor) -> Tensor:
        """The tensor on the device, with its shape and strides; compute is behind its copy.

        May be called again until the handle is released; all calls share one device copy, which
        lives as long as the handles of its storage.

        Raises:
            OffloadError: the handle was released or abandoned, or its source was modified in
                place before it could be copied.
        """
        with self._lock:
            self._collect()
            if not handle.is_moved:
                return handle.stayed_tensor()
            cargo = handle.cargo()
            self._fetch(cargo)
            cargo.check_overwritten()
            if cargo.overwritten:
                raise OffloadError(f"{handle} {MODIFIED}")
            if cargo.in_ticket is not None:
                cargo.in_ticket.wait()
            assert cargo.on_device is not None, "a fetched cargo has device bytes"
            return handle.rebuild(cargo.on_device, cargo.span)

    def release(self, handle: OffloadedTensor) -> None:
        """Give the handle's bytes back; the last handle of a storage frees host and device bytes.

        Tensors from `wait_for` stay valid as long as they are referenced.
        """
        with self._lock:
            handle.forget()
            self._collect()

    def bytes_to_fetch(self, handles: Iterable[OffloadedTensor]) -> int:
        """Device bytes that a prefetch of all `handles` would take; aliases count once."""
        with self._lock:
            cargoes = {handle.cargo() for handle in handles if handle.is_away}
            return sum(cargo.span.num_bytes for cargo in cargoes if cargo.on_device is None)

    def evict(self, handle: OffloadedTensor) -> None:
        """Free the device bytes, keep the others: the handle can be prefetched again.

        All handles of one storage share its device bytes, so they lose them together; whichever
        is used next brings them back for all. Tensors from `wait_for` stay valid as long as they
        are referenced. If the source has not left yet, it leaves as it would have. Compute waits
        for a copy back that nobody waited for. Does nothing for what stayed.

        Raises:
            OffloadError: the handle was released or abandoned.
        """
        with self._lock:
            self._collect()
            if handle.is_moved:
                handle.cargo().evict()

    def close_frame(self, leave_bytes: int | None = None) -> None:
        """Mark a frame boundary: compute waits until few enough bytes are on their way out.

        With `leave_bytes` None, until no frame but this one is, so that at most two frames wait on
        the device for their copies; see rule 3 of the note.
        """
        with self._lock:
            self._collect()
            self._leaving.close_frame(leave_bytes)

    def abandon(self) -> None:
        """Give up everything that is away, after an exception; its handles raise from now on.

        The pool is clean afterwards but for copies under way, which return when they end.
        """
        with self._lock:
            for cargo in self._live:
                cargo.abandoned = True
                self._retired.append(cargo)
            self._leaving.forget()
            self._collect()

    def close(self) -> None:
        """Abandon everything and let compute wait for the copies under way; call before dropping.

        An engine dropped without it could free device bytes under a copy.
        """
        with self._lock:
            self.abandon()
            self._settle_limbo()

    def assert_drained(self) -> None:
        """Prove that nothing is left away.

        Raises:
            OffloadError: some handle still owns bytes, so a graph is alive or a frame leaked.
        """
        with self._lock:
            self._collect()
            if self._live:
                gc.collect()  # a handle may only wait in a reference cycle
                self._collect()
            if self._live:
                num_bytes = sum(cargo.span.num_bytes for cargo in self._live)
                raise OffloadError(
                    f"{len(self._live)} offloaded storages ({num_bytes} bytes) are still owned, "
                    "where none should be: a graph is held that had no backward yet (delete its "
                    "loss), or was kept by retain_graph=True"
                )
            in_limbo_bytes = sum(cargo.region.reserved_bytes for cargo in self._limbo)
            assert self.pool.used_bytes == in_limbo_bytes, "every region has a cargo"

    def stats(self) -> OffloadStats:
        """Bytes and seconds since the engine was made, and what it holds now."""
        with self._lock:
            self._collect()
            return OffloadStats(
                d2h_bytes=self._d2h_bytes,
                h2d_bytes=self._h2d_bytes,
                stall_seconds=self._copier.stall_seconds(),
                pinned_bytes=self.pool.reserved_bytes if self.pool.pinned else 0,
                host_bytes=self.pool.reserved_bytes,
                host_used_bytes=self.pool.used_bytes,
                live_handles=len(self._live),
            )

    def take_stats(self) -> OffloadStats:
        """Like `stats`, but bytes moved and stall seconds since the last call."""
        with self._lock:
            now, last = self.stats(), self._last_stats
            self._last_stats = now
            return now.since(last)

    def _move(self, tensor: Tensor) -> Owner:
        span = Span.to_move(tensor)
        source = bytes_of(tensor, span)
        region = self._allocate(span.num_bytes)
        try:
            ticket = self._copier.start_d2h(source, region.memory)
        except BaseException:
            self.pool.release(region)
            raise
        self._d2h_bytes += span.num_bytes
        cargo = Cargo(
            span=span,
            storage_key=tensor.untyped_storage()._cdata,
            region=region,
            out_ticket=ticket,
            source=source,
            watched=tensor.detach(),
            version=tensor._version,
        )
        owner = Owner(cargo)
        weakref.finalize(owner, self._retired.append, cargo).atexit = False
        self._live.add(cargo)
        self._leaving.add(cargo)
        self._origins.add(tensor, owner)
        return owner

    def _allocate(self, num_bytes: int) -> Region:
        region = self.pool.try_allocate(num_bytes)
        if region is None:
            self._settle_limbo()  # rather let compute wait than let the pool grow
            region = self.pool.try_allocate(num_bytes)
        return region or self.pool.allocate(num_bytes)

    def _fetch(self, cargo: Cargo) -> None:
        if cargo.on_device is not None:
            return
        if cargo.source is not None:
            cargo.on_device = cargo.source  # not gone yet: spare the way back
            return
        # What nobody wants any more leaves the device before more comes back to it.
        self._settle_limbo()
        cargo.on_device, cargo.in_ticket = self._copier.start_h2d(
            cargo.region.memory, cargo.out_ticket
        )
        self._h2d_bytes += cargo.span.num_bytes

    def _collect(self) -> None:
        """Free what no copy touches any more; polls, never blocks."""
        self._leaving.poll()
        while self._retired:
            cargo = self._retired.popleft()
            if not cargo.retired:
                cargo.retired = True
                self._live.discard(cargo)
                self._origins.forget(cargo)
                self._limbo.append(cargo)
        limbo, self._limbo = self._limbo, []
        for cargo in limbo:
            if cargo.ordered:  # asked once: a copy may end between two looks
                cargo.drop_device_bytes()
                self.pool.release(cargo.region)
            else:
                self._limbo.append(cargo)

    def _settle_limbo(self) -> None:
        """Free what was dropped under a copy, by letting compute wait for that copy."""
        for cargo in self._limbo:
            cargo.order()
        self._collect()


def make_engine(
    device: torch.device,
    *,
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_elements: int = 1024,
    slab_bytes: int = DEFAULT_SLAB_BYTES,
    budget_bytes: int | None = None,
) -> OffloadEngine:
    """An engine for `device`, CPU or CUDA.

    Args:
        device: where the tensors are; on the CPU the host tier is plain memory beside them.
        use_pin_memory: page-lock the slabs (CUDA only); without it copies block the host.
        use_streams: copy on lanes of their own (CUDA only) rather than on the compute stream.
        min_offload_elements: tensors with fewer elements stay on the device.
        slab_bytes: size of a host slab.
        budget_bytes: the most that the host slabs may take; None for no limit.

    Raises:
        OffloadError: the device is of another kind.
    """
    copier: Copier
    if device.type == "cpu":
        copier = HostCopier()
    elif device.type == "cuda":
        copier = StreamCopier(CudaRuntime(device), own_streams=use_streams)
    else:
        raise OffloadError(
            f"offloading from device {device} was asked for, but only cpu and cuda are supported; "
            "set offload to 'none'"
        )
    pin = use_pin_memory and device.type == "cuda"
    pool = HostPool(slab_bytes, pin=pin, budget_bytes=budget_bytes)
    return OffloadEngine(copier, pool, min_offload_elements=min_offload_elements)
