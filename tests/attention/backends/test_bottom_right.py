"""Bands as calls that align at the bottom right."""

import torch
from hypothesis import given

from sppo_hf.attention.backends.adapters import align_band
from sppo_hf.attention.backends.base import CausalBand
from tests.attention.backends.cases import bands
from tests.attention.backends.fake_kernels import _bottom_right
from tests.attention.oracle import visible


@given(bands())
def test_calls_cover_every_visible_pair_once(case):
    rows, keys, band = case
    count = torch.zeros(rows, keys, dtype=torch.int64)
    calls = align_band(band, rows, keys)
    for call in calls:
        part = count[call.rows, call.keys]
        left, right = (-1 if x is None else x for x in (call.reach.left, call.reach.right))
        mask = _bottom_right(*part.shape, call.reach.causal, left, right)
        assert mask.any(1).all(), "a row without keys, for which kernels differ"
        part += mask
    assert torch.equal(count, visible(band, rows, keys).long())
    assert len({row for call in calls for row in range(call.row_start, call.row_stop)}) == sum(
        call.row_stop - call.row_start for call in calls
    )


def test_a_chunk_takes_one_call():
    assert len(align_band(CausalBand(1000, 300), 500, 1500)) == 1


def test_keys_outside_the_window_are_never_touched():
    (call,) = align_band(CausalBand(100_000, 1000), 512, 100_512)
    assert (call.key_start, call.key_stop) == (100_000 - 999, 100_512)
