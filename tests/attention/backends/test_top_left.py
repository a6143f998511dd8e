"""Cutting a band into rectangles, and a backend on a kernel that knows only those."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.attention.backends.adapters import Form, Rectangle, cut_band
from sppo_hf.attention.backends.aten import CuDNN
from sppo_hf.attention.backends.base import CausalBand
from tests.attention.backends.cases import bands, check
from tests.attention.backends.fake_kernels import FakeAten
from tests.attention.oracle import visible

MASKS = {
    Form.FULL: lambda seen: torch.ones_like(seen),
    Form.CAUSAL: torch.tril,
    Form.EDGE: torch.triu,
}


@given(bands(), st.sampled_from([1, 2, 5, 512]))
def test_rectangles_cover_every_visible_pair_once(case, tile_rows):
    rows, keys, band = case
    count = torch.zeros(rows, keys, dtype=torch.int64)
    for rectangle in cut_band(band, rows, keys, tile_rows=tile_rows):
        part = count[rectangle.rows, rectangle.keys]
        assert part.numel()
        if rectangle.form is not Form.FULL:
            assert part.shape[0] == part.shape[1]
        part += MASKS[rectangle.form](torch.ones_like(part))
    assert torch.equal(count, visible(band, rows, keys).long())


def test_no_window_takes_two_calls():
    forms = [rectangle.form for rectangle in cut_band(CausalBand(1000), 500, 1500)]
    assert forms == [Form.CAUSAL, Form.FULL]


def test_first_chunk_takes_one_call():
    assert [rectangle.form for rectangle in cut_band(CausalBand(0), 500, 500)] == [Form.CAUSAL]


@pytest.mark.parametrize(
    ("band", "num_keys", "first_key"),
    [
        (CausalBand(0), 1, 0),
        (CausalBand(1000), 1001, 0),
        (CausalBand(1000, 30), 1001, 971),
        (CausalBand(1000, 1), 1001, 1000),
        (CausalBand(1000), 900, 0),  # a padded query
    ],
)
def test_one_row_takes_one_call_without_a_mask(band, num_keys, first_key):
    assert cut_band(band, 1, num_keys) == [Rectangle(0, 1, first_key, num_keys, Form.FULL)]


def test_keys_outside_the_window_are_never_touched():
    rectangles = cut_band(CausalBand(100_000, 1000), 512, 100_512)
    assert min(rectangle.key_start for rectangle in rectangles) == 100_000 - 999


def test_a_wide_window_is_no_window():
    assert cut_band(CausalBand(100, 10_000), 50, 150) == cut_band(CausalBand(100), 50, 150)


@pytest.mark.parametrize("window", [None, 30])
def test_key_gradients_keep_their_dtype_where_nothing_is_summed(window):
    q = torch.randn(1, 2, 40, 8, dtype=torch.bfloat16)
    k = torch.randn(1, 2, 90, 8, dtype=torch.bfloat16)
    backend, band = CuDNN(aten=FakeAten()), CausalBand(50, window)
    out, lse = backend.forward(q, k, k, band=band, scale=1.0)
    grads = backend.backward(q, q, k, k, out, lse, band=band, scale=1.0)
    assert grads.dq_BNCH.dtype == torch.bfloat16
    assert grads.dk_BKTH.dtype == (torch.bfloat16 if window is None else torch.float32)


def test_empty_batch():
    check(CuDNN(aten=FakeAten()), CausalBand(3), rows=4, keys=7, batch=0)
