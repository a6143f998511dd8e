"""What is away: spans of storages, where their bytes are, and the handles that stand for tensors.

One storage moves once, however many views of it are saved, by however many frames: each view has a
handle (`OffloadedTensor`), all of them share one `StorageRef`, and the owner's `OffloadedStorage`
says which bytes are on the device, the host and the disk. Plain state; only `engine`, `transfers`
and the tiers change it. Why nothing here is counted by hand: [Note: offload lifetimes].

Storages are known by identity (`StorageRegistry`); a weak reference to each keeps its identity from
being given to another as long as a move of it is known.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sppo_hf.errors import OffloadError, SPPOError
from sppo_hf.offload.copy_streams import Ticket
from sppo_hf.offload.disk import DiskTicket
from sppo_hf.offload.host_memory import Region

if TYPE_CHECKING:
    from sppo_hf.offload.tiers import Tier

# Views of other dtypes may share a moved span, so its first byte suits the widest of them.
_SPAN_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A run of bytes of a storage."""

    start_byte: int
    num_bytes: int

    @property
    def end_byte(self) -> int:
        """First byte behind the span."""
        return self.start_byte + self.num_bytes

    def contains(self, other: ByteRange) -> bool:
        """Whether every byte of `other` lies within."""
        return self.start_byte <= other.start_byte and other.end_byte <= self.end_byte

    @classmethod
    def of(cls, tensor: Tensor) -> ByteRange:
        """The bytes from the first to the last element of `tensor` (strided, at least one)."""
        first = int(tensor.storage_offset())
        last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        item = tensor.element_size()
        return cls(first * item, (last + 1 - first) * item)

    @classmethod
    def to_move(cls, tensor: Tensor) -> ByteRange:
        """The bytes to move for `tensor`: its span, or the whole storage if that is most of it.

        Fused projections are saved as interleaved views whose spans differ a little; the whole
        storage, moved for the first of them, serves the others.
        """
        span = cls.of(tensor)
        storage_bytes = tensor.untyped_storage().nbytes()
        if 2 * span.num_bytes > storage_bytes:
            return cls(0, storage_bytes)
        start = span.start_byte - span.start_byte % _SPAN_ALIGNMENT_BYTES
        return cls(start, span.end_byte - start)


def bytes_of(tensor: Tensor, span: ByteRange) -> Tensor:
    """The bytes of `tensor`'s storage within `span` as uint8 [span.num_bytes], sharing memory."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), span.start_byte, (span.num_bytes,), (1,))


class StorageRef:
    """Shared by the handles of one moved storage; when it dies, its storage is retired."""

    __slots__ = ("__weakref__", "stored")

    def __init__(self, stored: OffloadedStorage) -> None:
        self.stored = stored


@dataclass(slots=True, eq=False)
class DiskState:
    """What a storage of the disk tier has of the disk; only `staging` changes it."""

    extent: Any = None
    """The place on the disk, from the moment at which the host bytes were handed over."""
    write: DiskTicket | None = None
    """The write of the region, while it is under way."""
    read: DiskTicket | None = None
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
class OffloadedStorage:
    """Where the bytes of one moved span are, and which copies touch them."""

    span: ByteRange
    storage_key: int
    """Identity of the storage they came from (engine's own)."""
    region: Region | None
    """Host bytes. Those of the host tier are held until the storage is retired, those of the disk
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
    disk: DiskState | None = None
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


@dataclass(slots=True)
class _Origin:
    """The moves that started from one storage."""

    storage: StorageWeakRef
    owners: list[weakref.ref[StorageRef]]

    def alive(self) -> Iterator[StorageRef]:
        for reference in self.owners:
            owner = reference()
            if owner is not None and not owner.stored.abandoned:
                yield owner


class StorageRegistry:
    """The moves under way or over whose bytes somebody still owns, by storage."""

    def __init__(self) -> None:
        self._origins: dict[int, _Origin] = {}

    def __len__(self) -> int:
        return len(self._origins)

    def owner_of(self, tensor: Tensor) -> StorageRef | None:
        """The owner of a move that already holds all bytes of `tensor` in their present version."""
        origin = self._origins.get(tensor.untyped_storage()._cdata)
        if origin is None:
            return None
        span = ByteRange.of(tensor)
        for owner in origin.alive():
            stored = owner.stored
            if stored.version == tensor._version and stored.span.contains(span):
                return owner
        return None

    def add(self, tensor: Tensor, owner: StorageRef) -> None:
        """Remember that `owner` moved `tensor`; its storage has the storage's key."""
        storage = StorageWeakRef(tensor.untyped_storage())
        origin = self._origins.setdefault(owner.stored.storage_key, _Origin(storage, []))
        origin.owners.append(weakref.ref(owner))

    def forget(self, stored: OffloadedStorage) -> None:
        """Forget a move that nobody owns any more."""
        origin = self._origins.get(stored.storage_key)
        if origin is None:
            return
        origin.owners = [weakref.ref(owner) for owner in origin.alive()]
        if not origin.owners:
            del self._origins[stored.storage_key]


@dataclass(slots=True, eq=False, weakref_slot=True)
class OffloadedTensor:
    """Stands for a tensor given to `OffloadEngine.start_offload`.

    Whoever holds it owns the bytes: when the last handle of a storage is released or dropped, its
    host bytes return to the pool. Small tensors, and those that cannot move, stay in the handle.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    start_byte: int
    """First byte within the storage the tensor came from."""
    dtype: torch.dtype
    _owner: StorageRef | None = field(repr=False)
    _stayed: Tensor | None = field(repr=False)
    _stayed_version: int = 0
    label: object = None
    """For messages: what the tensor belongs to."""

    @classmethod
    def moved(cls, tensor: Tensor, owner: StorageRef, label: object) -> OffloadedTensor:
        """A handle for a view whose bytes `owner` holds."""
        start_byte = int(tensor.storage_offset()) * tensor.element_size()
        return cls(tensor.shape, tensor.stride(), start_byte, tensor.dtype, owner, None, 0, label)

    @classmethod
    def stayed(cls, tensor: Tensor, label: object) -> OffloadedTensor:
        """A handle that keeps the tensor on the device."""
        # detach: a handle inside the graph must not hold the graph.
        kept = tensor.detach()
        return cls(kept.shape, (), 0, kept.dtype, None, kept, version_of(kept), label)

    @property
    def is_offloaded(self) -> bool:
        """Whether the bytes go to the host (else the tensor stays on the device)."""
        return self._stayed is None

    @property
    def is_loadable(self) -> bool:
        """Whether the tensor was moved and can still be had."""
        return self._owner is not None and not self._owner.stored.abandoned

    @property
    def is_released(self) -> bool:
        """Whether `OffloadEngine.release` took the bytes back."""
        return self._owner is None and self._stayed is None

    def stored(self) -> OffloadedStorage:
        """The live storage of a moved tensor.

        Raises:
            OffloadError: the bytes were released or abandoned, or are not those that were saved.
        """
        if self._owner is None:
            raise OffloadError(
                f"{self} was released after its use in backward. A second backward through the "
                "same graph (retain_graph=True) is not possible here; run the forward again"
            )
        stored = self._owner.stored
        if stored.abandoned:
            raise OffloadError(
                f"{self} was abandoned when an earlier step failed; run the forward again"
            )
        return stored

    def kept_tensor(self) -> Tensor:
        """The tensor that stayed.

        Raises:
            OffloadError: it was modified in place since.
        """
        assert self._stayed is not None, "only a tensor that stayed can be had without a copy"
        if version_of(self._stayed) != self._stayed_version:
            raise OffloadError(f"{self} {MODIFIED}")
        return self._stayed

    def rebuild(self, device_bytes: Tensor, span: ByteRange) -> Tensor:
        """The tensor with its shape and strides, as a view of `device_bytes` (`span` of it)."""
        item = self.dtype.itemsize
        offset_bytes = self.start_byte - span.start_byte
        assert offset_bytes % item == 0, "a span starts at an element of each of its views"
        offset = device_bytes.storage_offset() + offset_bytes
        assert offset % item == 0, "device bytes start at an element of each of their views"
        view = torch.empty(0, dtype=self.dtype, device=device_bytes.device)
        return view.set_(device_bytes.untyped_storage(), offset // item, self.shape, self.stride)

    def forget(self) -> None:
        """Let go of the bytes; the handle can no longer be used."""
        assert not self.is_released, f"{self} was released twice"
        self._owner = self._stayed = None

    def __str__(self) -> str:
        where = f" of {self.label}" if self.label is not None else ""
        return f"an offloaded tensor{where}, {self.dtype}, shape {tuple(self.shape)},"


def version_of(tensor: Tensor) -> int:
    """How often `tensor`, or what it is a view of, was written into in place."""
    return 0 if tensor.is_inference() else tensor._version


MODIFIED = (
    "was modified in place while backward still needs it; change weights after backward, and use "
    "operations that are not in place for all else"
)
