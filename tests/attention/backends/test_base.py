"""Bands keep exactly the pairs that see each other; backends say what they cannot."""

import pytest
import torch
from hypothesis import given

from sppo_hf.attention.backends.aten import AtenFlash, CPUFlash, CuDNN, Efficient
from sppo_hf.attention.backends.base import AttentionSpec
from sppo_hf.attention.backends.reference import Reference
from tests.attention.backends.cases import bands
from tests.attention.backends.fake_kernels import FakeAten
from tests.attention.oracle import visible


@given(bands())
def test_trim_keeps_all_visible_pairs_and_no_dead_row_or_key(case):
    rows, keys, band = case
    seen = visible(band, rows, keys)
    trimmed = band.trim(rows, keys)
    inner = seen[trimmed.rows, trimmed.keys]
    assert inner.sum() == seen.sum()
    assert inner.any(1).all()
    if trimmed.empty:
        return
    assert inner[:, 0].any()
    assert inner[:, -1].any()
    assert trimmed.band.q_start >= 0
    assert torch.equal(visible(trimmed.band, *inner.shape), inner)


@given(bands())
def test_trim_drops_a_window_that_hides_nothing(case):
    rows, keys, band = case
    trimmed = band.trim(rows, keys)
    if trimmed.band.window is not None:
        position = trimmed.band.q_start + trimmed.row_stop - trimmed.row_start - 1
        assert position - trimmed.band.window >= 0


def test_requirement_says_itself_in_words():
    requirement = AttentionSpec(
        device_type="cuda",
        dtype=torch.bfloat16,
        qk_head_size=192,
        v_head_size=128,
        softcap=True,
        window=True,
        gqa_ratio=4,
    )
    assert str(requirement) == (
        "CUDA, bfloat16, head size 192 (values 128), 4 query heads per key head, "
        "sliding window, soft-capped scores"
    )


HALF = {"device_type": "cuda", "dtype": torch.bfloat16, "qk_head_size": 128, "v_head_size": 128}
SINGLE = {"device_type": "cpu", "dtype": torch.float32, "qk_head_size": 64, "v_head_size": 64}
FLASH = [
    ({}, None),
    ({"window": True}, None),
    ({"device_type": "cpu"}, "CUDA"),
    ({"dtype": torch.float32}, "float32"),
    ({"qk_head_size": 512}, "512"),
    ({"softcap": True}, "soft-cap"),
]
CANNOT = [
    *((AtenFlash(aten=FakeAten()), HALF, *case) for case in FLASH),
    *((CuDNN(aten=FakeAten()), HALF, *case) for case in FLASH),
    (Efficient(aten=FakeAten()), HALF, {"dtype": torch.float32, "window": True}, None),
    (Efficient(aten=FakeAten()), HALF, {"device_type": "cpu"}, "CUDA"),
    (Efficient(aten=FakeAten()), HALF, {"dtype": torch.float64}, "float64"),
    (Efficient(aten=FakeAten()), HALF, {"softcap": True}, "soft-cap"),
    (CPUFlash(), SINGLE, {"window": True, "v_head_size": 32}, None),
    (CPUFlash(), SINGLE, {"softcap": True}, "soft-cap"),
    (CPUFlash(), SINGLE, {"device_type": "cuda"}, "CPU"),
    (CPUFlash(), SINGLE, {"dtype": torch.float8_e4m3fn}, "float8"),
    (Reference(), SINGLE, {"dtype": torch.int32}, "floating"),
]


@pytest.mark.parametrize(("backend", "usual", "changes", "reason"), CANNOT)
def test_a_backend_says_what_it_cannot(backend, usual, changes, reason):
    found = backend.reason_unsupported(AttentionSpec(**usual | changes))
    assert found is None if reason is None else reason in found
