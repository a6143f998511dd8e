"""The adapters that turn kernels into backends: heads, cut bands, bottom-right alignment."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sppo_hf.attention.backends.adapters import (
    Form,
    KernelNeeds,
    Rectangle,
    adapted_backward,
    adapted_forward,
    align_band,
    cut_band,
    group_queries,
    sum_repeated_heads,
    ungroup_queries,
)
from sppo_hf.attention.backends.aten import CuDNN
from sppo_hf.attention.backends.base import AttentionOutput, BackwardInputs, CausalBand, Gradients
from tests.attention.backends.cases import bands, check
from tests.attention.backends.fake_kernels import FakeAten, _attend, _attend_backward, _bottom_right
from tests.attention.oracle import Answer, assert_equal, make_problem, solve, visible

NEEDS = [
    KernelNeeds(grouped_heads=grouped, head_multiple=multiple, equal_head_sizes=equal)
    for grouped in (True, False)
    for multiple in (1, 8)
    for equal in (True, False)
]


@pytest.mark.parametrize("unmasked", [True, False])
@pytest.mark.parametrize("v_head_size", [3, 12, 20])
@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_adapted_kernel_matches_oracle(needs, v_head_size, unmasked):
    problem = make_problem(rows=6, keys=6, head_size=12, v_head_size=v_head_size)
    seen = torch.ones(6, 6, dtype=torch.bool)
    seen = seen if unmasked else seen.tril()

    def look(q, k, v):
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        assert q.shape[-1] % needs.head_multiple == v.shape[-1] % needs.head_multiple == 0
        assert not needs.equal_head_sizes or q.shape[-1] == v.shape[-1]
        assert needs.grouped_heads or q.shape[1] == k.shape[1] == v.shape[1]
        # Grouping makes more rows; all of them see everything.
        return seen if q.shape[2] == 6 else torch.ones(q.shape[2], 6, dtype=torch.bool)

    def forward(q, k, v):
        return AttentionOutput(*_attend(q, k, v, look(q, k, v), 0.3))

    def backward(given):
        return Gradients(*_attend_backward(*given, look(*given[1:4]), 0.3))

    q, k, v, dout = problem
    attended = adapted_forward(forward, q, k, v, needs=needs, unmasked=unmasked)
    given = BackwardInputs(dout, q, k, v, *attended)
    grads = adapted_backward(backward, given, needs=needs, unmasked=unmasked)
    assert_equal(Answer(*attended, *grads), solve(problem, seen, scale=0.3), 1e-12)


def test_keys_are_not_repeated_where_nothing_is_masked():
    q, k, v, _ = make_problem(rows=6, keys=6, heads=8, kv_heads=2)
    heads = []

    def forward(q, k, v):
        heads.append((q.shape[1], k.shape[1]))
        return AttentionOutput(*_attend(q, k, v, torch.ones(q.shape[2], 6, dtype=torch.bool), 0.3))

    needs = KernelNeeds(grouped_heads=False)
    adapted_forward(forward, q, k, v, needs=needs, unmasked=True)
    adapted_forward(forward, q, k, v, needs=needs, unmasked=False)
    assert heads == [(2, 2), (8, 8)]


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_grouping_is_undone(batch, kv_heads, groups, tokens):
    x = torch.randn(batch, kv_heads * groups, tokens, 3)
    assert torch.equal(ungroup_queries(group_queries(x, kv_heads), kv_heads * groups), x)


def test_repeated_heads_are_summed_in_float32():
    # 1 + 2^-7 has no bit to spare in bfloat16, so sums there would be rounded.
    x = torch.full((1, 8, 1, 1), 1 + 2**-7, dtype=torch.bfloat16)
    summed = sum_repeated_heads(x, 1)
    assert summed.dtype == torch.float32
    assert summed.item() == 8 * (1 + 2**-7)


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


def test_top_left_does_not_touch_keys_outside_the_window():
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


@given(bands())
@example((24, 5, CausalBand(5, 10)))
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


def test_bottom_right_does_not_touch_keys_outside_the_window():
    (call,) = align_band(CausalBand(100_000, 1000), 512, 100_512)
    assert (call.key_start, call.key_stop) == (100_000 - 999, 100_512)
