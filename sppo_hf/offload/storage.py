"""Offloaded storages: which of their bytes are where, and the handles that stand for tensors.

A storage is copied once, however many views of it are saved, by however many layers: each view has
a handle (`OffloadedTensor`), all of them share one `StorageRef`, and its `OffloadedStorage` says
which bytes are on the device, the host and behind it. Plain state; only `engine` and `tiers` change
it. Why nothing here counts references by hand: [Note: offload lifetimes].
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sppo_hf.errors import OffloadError, SPPOError
from sppo_hf.offload.copy_streams import Ticket
from sppo_hf.offload.host_memory import Region
from sppo_hf.offload.store import Extent, Transfer

if TYPE_CHECKING:
    from sppo_hf.offload.tiers import Tier

# Views of other dtypes may share an offloaded span, so its first byte suits the widest of them.
_SPAN_ALIGNMENT_BYTES = 16

MODIFIED = (
    "was modified in place while backward still needs it; change weights after backward, and use "
    "operations that are not in place for all else"
)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Contiguous bytes of a storage."""

    start_byte: int
    num_bytes: int

    @property
    def end_byte(self) -> int:
        """First byte behind the range."""
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
    def to_offload(cls, tensor: Tensor) -> ByteRange:
        """The bytes to copy for `tensor`: its range, or the whole storage if that is most of it.

        Fused projections are saved as interleaved views whose ranges differ a little; the whole
        storage, copied for the first of them, serves the others.
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


def version_of(tensor: Tensor) -> int:
    """Number of in-place writes so far to `tensor`, or to what it is a view of."""
    return 0 if tensor.is_inference() else tensor._version


class StorageRef:
    """Shared by the handles of one offloaded storage; when it dies, the storage is retired."""

    __slots__ = ("__weakref__", "stored")

    def __init__(self, stored: OffloadedStorage) -> None:
        self.stored = stored


@dataclass(slots=True, eq=False)
class StagedState:
    """A storage's side of a tier behind the host; only `Staging` changes it."""

    extent: Extent
    """Its bytes in the tier's store."""
    is_written: bool = False
    """Whether the store has the bytes."""
    write: Transfer | None = None
    """The write of the host region, while it is under way."""
    read: Transfer | None = None
    """The read that fills the host region, while it is under way."""
    copies: list[Ticket] = field(default_factory=list)
    """H2D copies that read the host region."""
    wanted: bool = False
    """Whether the bytes are to be copied to the device as soon as they are on the host."""
    failure: SPPOError | None = None
    """The error by which the bytes were lost."""

    def raise_failure(self) -> None:
        """Raise the error by which the bytes were lost, if they were."""
        if self.failure is not None:
            # A new one each time, since raising adds to an error's traceback.
            raise type(self.failure)(str(self.failure)) from self.failure


@dataclass(slots=True, eq=False)
class OffloadedStorage:
    """Where the bytes of one offloaded storage are, and which copies touch them."""

    span: ByteRange
    """The bytes of the original storage that were copied."""
    storage_key: int
    """Identity of the original storage, for the registry."""
    region: Region | None
    """Host bytes. The host tier holds them until the storage is retired, tiers behind it only
    between device and store."""
    tier: Tier
    """Where the bytes are kept."""
    d2h_ticket: Ticket
    source: Tensor | None
    """Device bytes being copied out, held until `d2h_ticket` is ordered."""
    watched: Tensor | None
    """Shares the version counter of the source; held as long as the source can be read."""
    version: int
    """Version of the source when its copy started."""
    overwritten: bool = False
    """Whether the source was modified in place while it was still read: the bytes may be torn."""
    device_bytes: Tensor | None = None
    """Device bytes for backward: the H2D copy, or the source if that was still there."""
    h2d_ticket: Ticket | None = None
    staged: StagedState | None = None
    """Set by tiers behind the host."""
    abandoned: bool = False
    """Whether the engine gave it up after an exception; its handles raise."""
    retired: bool = False
    """Whether nobody owns it any more."""

    @property
    def host_bytes(self) -> Tensor | None:
        """The bytes on the host, uint8 [span.num_bytes], behind `d2h_ticket`; None if not there."""
        if self.region is None or (self.staged is not None and self.staged.read is not None):
            return None
        return self.region.memory

    @property
    def is_prefetched(self) -> bool:
        """Whether the bytes are on the device, or requested there."""
        return self.device_bytes is not None or (self.staged is not None and self.staged.wanted)

    @property
    def ordered(self) -> bool:
        """Whether compute stands behind all its copies, so its memory may be reused.

        That is its device bytes, and a region of the host tier; see rule 5 of the note.
        """
        return self.d2h_ticket.ordered and (self.h2d_ticket is None or self.h2d_ticket.ordered)

    @property
    def tickets(self) -> list[Ticket]:
        """All its copies; once compute waits for these, `ordered` holds."""
        return [self.d2h_ticket] if self.h2d_ticket is None else [self.d2h_ticket, self.h2d_ticket]

    def check_overwritten(self) -> None:
        """Note whether the source changed before its copy was ordered, or before its use."""
        if self.watched is not None and self.watched._version != self.version:
            self.overwritten = True

    def drop_source(self) -> None:
        """Free the source on the device; its copy is ordered."""
        self.check_overwritten()
        if self.device_bytes is None:  # else backward reads the source itself, so keep watching it
            self.watched = None
        self.source = None

    def evict(self) -> None:
        """Free the device bytes for backward, but not a source that is being copied out."""
        if self.h2d_ticket is not None:
            # Compute reuses the freed block next, and the copy into it may be under way.
            self.h2d_ticket.wait()
            self.h2d_ticket = None
        if self.staged is not None:
            self.staged.wanted = False
        self.device_bytes = None
        if self.source is None:
            self.watched = None  # nobody reads the source any more

    def drop_device_bytes(self) -> None:
        """Free everything on the device; all copies are ordered."""
        self.source = self.watched = self.device_bytes = None


class StorageRegistry:
    """Finds the offloaded storage that already has a tensor's bytes.

    Storages are known by identity; a weak reference to each keeps its identity from being given to
    another as long as some `StorageRef` of it lives.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, list[weakref.ref[StorageRef]]]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def owner_of(self, tensor: Tensor) -> StorageRef | None:
        """The owner of a copy with all bytes of `tensor` in their present version, or None."""
        span = ByteRange.of(tensor)
        for owner in self._owners(tensor.untyped_storage()._cdata):
            if owner.stored.version == tensor._version and owner.stored.span.contains(span):
                return owner
        return None

    def add(self, tensor: Tensor, owner: StorageRef) -> None:
        """Remember that `owner` has bytes of `tensor`, whose storage has the key of its storage."""
        storage = StorageWeakRef(tensor.untyped_storage())
        _, owners = self._known.setdefault(owner.stored.storage_key, (storage, []))
        owners.append(weakref.ref(owner))

    def forget(self, stored: OffloadedStorage) -> None:
        """Forget an offloaded storage that nobody owns any more."""
        if stored.storage_key not in self._known:
            return
        _, owners = self._known[stored.storage_key]
        owners[:] = [weakref.ref(owner) for owner in self._owners(stored.storage_key)]
        if not owners:
            del self._known[stored.storage_key]

    def _owners(self, storage_key: int) -> Iterator[StorageRef]:
        _, owners = self._known.get(storage_key, (None, []))
        for reference in owners:
            owner = reference()
            if owner is not None and not owner.stored.abandoned:
                yield owner


@dataclass(slots=True, eq=False, weakref_slot=True)
class OffloadedTensor:
    """Handle that stands for a tensor given to `OffloadEngine.start_offload`.

    It owns the bytes: when the last handle of a storage is released or dropped, its host bytes
    return to the pool. Small tensors, and those that cannot be offloaded, are kept in the handle.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    start_byte: int
    """First byte within the original storage."""
    dtype: torch.dtype
    _owner: StorageRef | None = field(repr=False)
    _kept: Tensor | None = field(repr=False)
    _kept_version: int = 0
    label: object = None
    """What the tensor belongs to, for error messages."""

    @classmethod
    def offloaded(cls, tensor: Tensor, owner: StorageRef, label: object) -> OffloadedTensor:
        """A handle for a view whose bytes `owner` has."""
        start_byte = int(tensor.storage_offset()) * tensor.element_size()
        return cls(tensor.shape, tensor.stride(), start_byte, tensor.dtype, owner, None, 0, label)

    @classmethod
    def kept(cls, tensor: Tensor, label: object) -> OffloadedTensor:
        """A handle that keeps the tensor on the device."""
        # detach: a handle inside the graph must not hold the graph.
        kept = tensor.detach()
        return cls(kept.shape, (), 0, kept.dtype, None, kept, version_of(kept), label)

    @property
    def is_offloaded(self) -> bool:
        """Whether the bytes were copied away from the device, rather than kept there."""
        return self._kept is None

    @property
    def is_loadable(self) -> bool:
        """Whether the tensor was offloaded and was neither released nor abandoned."""
        return self._owner is not None and not self._owner.stored.abandoned

    @property
    def is_released(self) -> bool:
        """Whether `OffloadEngine.release` took the bytes back."""
        return self._owner is None and self._kept is None

    def stored(self) -> OffloadedStorage:
        """The storage of an offloaded tensor.

        Raises:
            OffloadError: The bytes were released or abandoned.
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
        """The tensor that was kept on the device.

        Raises:
            OffloadError: It was modified in place since.
        """
        assert self._kept is not None, "only a kept tensor can be had without a copy"
        if version_of(self._kept) != self._kept_version:
            raise OffloadError(f"{self} {MODIFIED}")
        return self._kept

    def rebuild(self, device_bytes: Tensor, span: ByteRange) -> Tensor:
        """The tensor with its shape and strides, as a view of `device_bytes` (`span` of it)."""
        item = self.dtype.itemsize
        offset_bytes = self.start_byte - span.start_byte
        assert offset_bytes % item == 0, "a range starts at an element of each of its views"
        offset = device_bytes.storage_offset() + offset_bytes
        assert offset % item == 0, "device bytes start at an element of each of their views"
        view = torch.empty(0, dtype=self.dtype, device=device_bytes.device)
        return view.set_(device_bytes.untyped_storage(), offset // item, self.shape, self.stride)

    def forget(self) -> None:
        """Let go of the bytes; the handle can no longer be used."""
        assert not self.is_released, f"{self} was released twice"
        self._owner = self._kept = None

    def __str__(self) -> str:
        where = f" of {self.label}" if self.label is not None else ""
        return f"an offloaded tensor{where}, {self.dtype}, shape {tuple(self.shape)},"
