"""Byte ranges of tensors, and handles after their bytes are gone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.offload.copy_streams import HostCopier
from sppo_hf.offload.engine import OffloadEngine
from sppo_hf.offload.host_memory import HostPool
from sppo_hf.offload.storage import ByteRange, bytes_of


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(st.integers(0, 7), min_size=4, max_size=4),
    st.integers(0, 50),
    st.integers(0, 40),
)
def test_a_byte_range_covers_exactly_the_elements(
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


def test_a_slice_of_a_large_storage_is_copied_alone() -> None:
    large = torch.zeros(1000, 16)
    assert ByteRange.to_offload(large[10:20]).num_bytes == 10 * 16 * 4


def test_interleaved_views_copy_their_whole_storage() -> None:
    fused = torch.zeros(100, 48)
    whole = ByteRange(0, 100 * 48 * 4)
    assert [ByteRange.to_offload(part) for part in fused.split(16, dim=1)] == [whole] * 3


VIEWS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "sliced": lambda t: t[1:3, :, 2:7],
    "one row": lambda t: t[2],
    "steps": lambda t: t[::2, ::3],
    "expanded": lambda t: t[0, 0].expand(9, 5, -1),
    "narrow column": lambda t: t[:, :, 3],
    "flipped dims": lambda t: t.permute(2, 0, 1)[1:],
    "one element": lambda t: t[3, 4, 5],
}
DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_restored(view: str, dtype: torch.dtype) -> None:
    engine = OffloadEngine(HostCopier(), HostPool(2**16), min_offload_elements=1)
    tensor = VIEWS[view](torch.arange(4 * 6 * 10).reshape(4, 6, 10).to(dtype))
    handle = engine.start_offload(tensor)
    assert handle.is_offloaded
    back = engine.wait_for(handle)
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()
    assert back.dtype == dtype
    assert back.data_ptr() != tensor.data_ptr()
