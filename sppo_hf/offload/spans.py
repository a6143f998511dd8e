"""Runs of bytes of a storage: which of them a tensor reaches, and which move for it.

Knows nothing of copies or of where the bytes go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
