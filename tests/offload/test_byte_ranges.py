"""A span covers what a view reaches, and what moves for it is little more than that."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.offload.storage import ByteRange, bytes_of


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(st.integers(0, 7), min_size=4, max_size=4),
    st.integers(0, 50),
    st.integers(0, 40),
)
def test_a_span_covers_exactly_what_is_reached(
    shape: list[int], strides: list[int], offset: int, rest: int
) -> None:
    stride = strides[: len(shape)]
    last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    storage = torch.arange(offset + last + 1 + rest, dtype=torch.int16)
    view = storage.as_strided(shape, stride, offset)
    span = ByteRange.of(view)
    assert span.start_byte == 2 * int(view.min())
    assert span.end_byte == 2 * (int(view.max()) + 1)
    moved = ByteRange.to_offload(view)
    assert moved.contains(span)
    assert 0 <= moved.start_byte
    assert moved.end_byte <= storage.untyped_storage().nbytes()
    # At most twice the bytes of the span, but for the alignment of its start.
    assert moved.num_bytes <= 2 * span.num_bytes + 16
    assert bytes_of(view, moved).numel() == moved.num_bytes


def test_a_slice_of_a_large_storage_moves_alone() -> None:
    large = torch.zeros(1000, 16)
    assert ByteRange.to_offload(large[10:20]).num_bytes == 10 * 16 * 4


def test_interleaved_views_move_their_whole_storage() -> None:
    fused = torch.zeros(100, 48)
    whole = ByteRange(0, 100 * 48 * 4)
    assert [ByteRange.to_offload(part) for part in fused.split(16, dim=1)] == [whole] * 3
