"""Bands: trimming keeps exactly the pairs that see each other."""

import torch
from hypothesis import given

from sppo_hf.attention.backends.base import AttentionSpec
from tests.attention.backends.cases import bands
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
