"""What stands for an offloaded tensor: a handle, which says how the tensor looks at its bytes.

One storage moves once, however many views of it are saved: each view has a handle, all of them
share one `StorageRef`, and the owner's `OffloadedStorage` says which bytes are where.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sppo_hf.errors import OffloadError
from sppo_hf.offload.storage import ByteRange, OffloadedStorage, StorageRef


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
    def is_moved(self) -> bool:
        """Whether the bytes go to the host (else the tensor stays on the device)."""
        return self._stayed is None

    @property
    def is_away(self) -> bool:
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

    def stayed_tensor(self) -> Tensor:
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
