"""What stands for an offloaded tensor: a handle, and the state of its storage's stay on the host.

One storage moves once, however many views of it are saved: each view has a handle, all of them
share one `Owner`, and the owner's `Cargo` says which bytes are where. Only `engine` changes a
cargo. Who owns what, and why nothing here is counted by hand: [Note: offload lifetimes].
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sppo_hf.errors import OffloadError
from sppo_hf.offload.lanes import Ticket
from sppo_hf.offload.pool import Region

# Views of other dtypes may share a moved span, so its first byte suits the widest of them.
_SPAN_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Span:
    """A run of bytes of a storage."""

    start_byte: int
    num_bytes: int

    @property
    def end_byte(self) -> int:
        """First byte behind the span."""
        return self.start_byte + self.num_bytes

    def contains(self, other: Span) -> bool:
        """Whether every byte of `other` lies within."""
        return self.start_byte <= other.start_byte and other.end_byte <= self.end_byte

    @classmethod
    def of(cls, tensor: Tensor) -> Span:
        """The bytes from the first to the last element of `tensor` (strided, at least one)."""
        first = int(tensor.storage_offset())
        last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        item = tensor.element_size()
        return cls(first * item, (last + 1 - first) * item)

    @classmethod
    def to_move(cls, tensor: Tensor) -> Span:
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


def bytes_of(tensor: Tensor, span: Span) -> Tensor:
    """The bytes of `tensor`'s storage within `span` as uint8 [span.num_bytes], sharing memory."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), span.start_byte, (span.num_bytes,), (1,))


class Owner:
    """Shared by the handles of one moved storage; when it dies, its cargo is retired."""

    __slots__ = ("__weakref__", "cargo")

    def __init__(self, cargo: Cargo) -> None:
        self.cargo = cargo


@dataclass(slots=True, eq=False)
class Cargo:
    """Where the bytes of one moved span are, and which copies touch them."""

    span: Span
    storage_key: int
    """Identity of the storage they came from (engine's own)."""
    region: Region
    """Host bytes, from the start of the move until the cargo is retired."""
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
    abandoned: bool = False
    retired: bool = False

    @property
    def ordered(self) -> bool:
        """Whether host and device bytes can be given away: no copy can still touch them."""
        return self.out_ticket.ordered and (self.in_ticket is None or self.in_ticket.ordered)

    def order(self) -> None:
        """Let compute wait for the copies, so that `ordered` holds."""
        self.out_ticket.wait()
        if self.in_ticket is not None:
            self.in_ticket.wait()

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

    def order_source(self) -> None:
        """Let compute wait for the copy out, and free its source."""
        self.out_ticket.wait()
        self.drop_source()

    def evict(self) -> None:
        """Free the device bytes for backward; those on the host stay, and a source on its way."""
        if self.in_ticket is not None:
            # Compute takes the freed block next, and the copy into it may only be under way.
            self.in_ticket.wait()
            self.in_ticket = None
        self.on_device = None
        if self.source is None:
            self.watched = None  # nobody reads the source any more

    def drop_device_bytes(self) -> None:
        """Free everything on the device; all copies are ordered."""
        self.source = self.watched = self.on_device = None


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
    _owner: Owner | None = field(repr=False)
    _stayed: Tensor | None = field(repr=False)
    _stayed_version: int = 0
    label: object = None
    """For messages: what the tensor belongs to."""

    @classmethod
    def moved(cls, tensor: Tensor, owner: Owner, label: object) -> OffloadedTensor:
        """A handle for a view whose bytes `owner` holds."""
        start_byte = int(tensor.storage_offset()) * tensor.element_size()
        return cls(tensor.shape, tensor.stride(), start_byte, tensor.dtype, owner, None, 0, label)

    @classmethod
    def stayed(cls, tensor: Tensor, label: object) -> OffloadedTensor:
        """A handle that keeps the tensor on the device."""
        # detach: a handle inside the graph must not hold the graph.
        kept = tensor.detach()
        return cls(kept.shape, (), 0, kept.dtype, None, kept, _version_of(kept), label)

    @property
    def is_moved(self) -> bool:
        """Whether the bytes go to the host (else the tensor stays on the device)."""
        return self._stayed is None

    @property
    def is_away(self) -> bool:
        """Whether the tensor was moved and can still be had."""
        return self._owner is not None and not self._owner.cargo.abandoned

    @property
    def is_released(self) -> bool:
        """Whether `OffloadEngine.release` took the bytes back."""
        return self._owner is None and self._stayed is None

    def cargo(self) -> Cargo:
        """The live cargo of a moved tensor.

        Raises:
            OffloadError: the bytes were released or abandoned, or are not those that were saved.
        """
        if self._owner is None:
            raise OffloadError(
                f"{self} was released after its use in backward. A second backward through the "
                "same graph (retain_graph=True) is not possible here; run the forward again"
            )
        cargo = self._owner.cargo
        if cargo.abandoned:
            raise OffloadError(
                f"{self} was abandoned when an earlier step failed; run the forward again"
            )
        return cargo

    def stayed_tensor(self) -> Tensor:
        """The tensor that stayed.

        Raises:
            OffloadError: it was modified in place since.
        """
        assert self._stayed is not None, "only a tensor that stayed can be had without a copy"
        if _version_of(self._stayed) != self._stayed_version:
            raise OffloadError(f"{self} {MODIFIED}")
        return self._stayed

    def rebuild(self, device_bytes: Tensor, span: Span) -> Tensor:
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


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


MODIFIED = (
    "was modified in place while backward still needs it; "
    "use an operation that is not in place there, or set offload to 'none'"
)
