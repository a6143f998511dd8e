"""Trimmed bands, merging by log-sum-exp, and what backends say they cannot do."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.attention.backends.aten import AtenFlash, CPUFlash, CuDNN, Efficient
from sppo_hf.attention.backends.base import (
    AttentionOutput,
    AttentionSpec,
    CausalBand,
    merge_into,
    merge_partials,
)
from sppo_hf.attention.backends.reference import Reference
from tests.attention.backends.cases import bands
from tests.attention.backends.fake_kernels import FakeAten
from tests.attention.oracle import Answer, assert_equal, make_problem, solve, visible


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


@pytest.mark.parametrize("backend", [Reference(), CPUFlash()], ids=lambda backend: backend.name)
@given(case=bands(), data=st.data())
def test_keys_split_anywhere_give_the_whole(backend, case, data):
    """Note "why merged values make backward exact": forward merged, backward in the same parts."""
    rows, keys, band = case
    cuts = data.draw(st.sets(st.integers(1, keys), max_size=4).map(sorted))
    edges = [0, *(cut for cut in cuts if cut < keys), keys]
    q, k, v, dout = problem = make_problem(rows=rows, keys=keys)
    parts = [
        (slice(start, stop), CausalBand(band.q_start - start, band.window))
        for start, stop in itertools.pairwise(edges)
    ]
    merged = None
    for part, shifted in parts:
        here = backend.forward(q, k[:, :, part], v[:, :, part], band=shifted, scale=0.4)
        merged = here if merged is None else merge_partials(merged, here)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for part, shifted in parts:
        grads = backend.backward(
            dout, q, k[:, :, part], v[:, :, part], *merged, band=shifted, scale=0.4
        )
        dq += grads.dq_BNCH
        dk[:, :, part] += grads.dk_BKTH
        dv[:, :, part] += grads.dv_BKTH
    expected = solve(problem, visible(band, rows, keys), scale=0.4)
    assert_equal(Answer(*merged, dq, dk, dv), expected, 1e-10)


def attended(lse, value, dtype=torch.float32):
    rows = len(lse)
    out = torch.full((1, 1, rows, 2), value, dtype=dtype)
    return AttentionOutput(out, torch.tensor(lse).view(1, 1, rows))


def test_weights_are_the_shares_of_the_softmax():
    merged = merge_partials(
        attended([0.0], 1.0), attended([float(torch.log(torch.tensor(3.0)))], 5.0)
    )
    assert merged.lse_BNC.exp().item() == pytest.approx(4.0)
    assert merged.out_BNCH[0, 0, 0, 0].item() == pytest.approx(0.25 * 1.0 + 0.75 * 5.0)


def test_a_mean_of_equal_outputs_is_that_output():
    """For any rounding of the weights, so errors do not add up over many blocks."""
    torch.manual_seed(0)
    out, lse = torch.full((1, 2, 64, 3), 1 / 3), torch.randn(1, 2, 64)
    for _ in range(200):
        merge_into(
            out, lse, AttentionOutput(torch.full_like(out, 1 / 3), 3 * torch.randn(1, 2, 64))
        )
    assert torch.equal(out, torch.full_like(out, 1 / 3))


def test_rows_without_keys():
    inf = float("inf")
    merged = merge_partials(attended([-inf, -inf, 0.0], 0.0), attended([-inf, 2.0, -inf], 7.0))
    assert merged.lse_BNC.flatten().tolist() == [-inf, 2.0, 0.0]
    assert merged.out_BNCH[0, 0, :, 0].tolist() == [0.0, 7.0, 0.0]


def test_huge_scores_do_not_overflow():
    merged = merge_partials(attended([1e4], 1.0), attended([-1e4], 2.0))
    assert merged.lse_BNC.item() == 1e4
    assert merged.out_BNCH[0, 0, 0, 0].item() == 1.0


def test_inputs_stay_and_dtype_stays():
    first, second = attended([0.0], 1.0, torch.bfloat16), attended([0.0], 2.0, torch.bfloat16)
    merged = merge_partials(first, second)
    assert merged.out_BNCH.dtype == torch.bfloat16
    assert merged.lse_BNC.dtype == torch.float32
    assert first.out_BNCH.unique().tolist() == [1.0]
    assert first.lse_BNC.item() == 0.0


def test_merging_into_a_view_leaves_the_rest():
    out, lse = torch.zeros(1, 1, 4, 2), torch.full((1, 1, 4), float("-inf"))
    merge_into(out[:, :, 1:2], lse[:, :, 1:2], attended([0.5], 3.0))
    assert out[0, 0, :, 0].tolist() == [0.0, 3.0, 0.0, 0.0]
    assert lse[0, 0].tolist()[1] == 0.5
