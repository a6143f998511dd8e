"""`LayerKV`: chunks are joined, gradients are summed in float32, memory is freed by chunk."""

import pytest
import torch

from sppo_hf.attention.kv_cache import LayerKV, join_tokens, own_sum
from sppo_hf.errors import SPPOError

BOUNDS = ((0, 3), (3, 4), (4, 9))


def _filled(dtype=torch.float64):
    torch.manual_seed(0)
    keys = torch.randn(2, 2, 9, 4, dtype=dtype)
    values = torch.randn(2, 2, 9, 5, dtype=dtype)
    kv = LayerKV(BOUNDS)
    for chunk, (start, end) in enumerate(BOUNDS):
        kv.put(chunk, keys[:, :, start:end], values[:, :, start:end])
    return kv, keys, values


@pytest.mark.parametrize("run", [(0, 9), (0, 3), (1, 3), (2, 5), (3, 4), (8, 9)])
@pytest.mark.parametrize("row", [None, 1])
def test_run_is_the_same_tokens(run, row):
    kv, keys, values = _filled()
    k, v = kv.run(*run, row)
    rows = slice(None) if row is None else slice(row, row + 1)
    assert torch.equal(k, keys[rows, :, run[0] : run[1]])
    assert torch.equal(v, values[rows, :, run[0] : run[1]])


def test_gradients_of_rows_and_runs_add_up():
    kv, keys, values = _filled()
    expected_k, expected_v = torch.zeros_like(keys), torch.zeros_like(values)
    for start, end, row in [(0, 9, None), (2, 5, 1), (0, 4, 0), (0, 9, None)]:
        rows = slice(None) if row is None else slice(row, row + 1)
        dk = torch.randn_like(keys[rows, :, start:end])
        dv = torch.randn_like(values[rows, :, start:end])
        kv.add_gradient(start, dk, dv, row)
        expected_k[rows, :, start:end] += dk
        expected_v[rows, :, start:end] += dv
    for chunk in (2, 1, 0):
        start, end = BOUNDS[chunk]
        dk, dv = kv.take_gradient(chunk)
        torch.testing.assert_close(dk, expected_k[:, :, start:end])
        torch.testing.assert_close(dv, expected_v[:, :, start:end])


def test_bfloat16_gradients_meet_in_float32():
    kv, keys, _ = _filled(torch.bfloat16)
    one = torch.ones_like(keys)
    tiny = torch.full_like(keys, 2**-9)
    v_one, v_tiny = torch.ones(2, 2, 9, 5).bfloat16(), torch.full((2, 2, 9, 5), 2**-9).bfloat16()
    kv.add_gradient(0, one, v_one, None)
    for _ in range(8):  # each alone is lost when added to 1 in bfloat16
        kv.add_gradient(0, tiny, v_tiny, None)
    dk, _ = kv.take_gradient(2)
    assert dk.dtype == torch.bfloat16
    assert torch.equal(dk, torch.full_like(dk, 1 + 2**-6))


def test_bytes_fall_chunk_by_chunk():
    kv, keys, values = _filled()
    kv.add_gradient(0, torch.ones_like(keys), torch.ones_like(values), None)
    bytes_per_token = 2 * 2 * (4 + 5) * 8
    assert kv.kv_bytes == 9 * bytes_per_token
    for chunk, left in ((2, 4), (1, 3), (0, 0)):
        kv.take_gradient(chunk)
        assert kv.kv_bytes == kv.gradient_bytes == left * bytes_per_token


def test_a_slice_of_a_fused_projection_does_not_keep_it_alive():
    fused = torch.randn(1, 3, 12, 2).transpose(1, 2)  # q, k and v of one projection
    kv = LayerKV(((0, 3),))
    kv.put(0, fused[:, 4:8], fused[:, 8:12])
    k, _ = kv.run(0, 3, None)
    assert k.untyped_storage().nbytes() == k.numel() * k.element_size()
    assert torch.equal(k, fused[:, 4:8])


def test_what_was_kept_as_it_is_does_not_keep_a_fused_projection_alive_either():
    fused = torch.randn(2, 3, 12, 2, requires_grad=True).transpose(1, 2)
    kv = LayerKV(((0, 3),))
    kv.put(0, fused[:, 4:8], fused[:, 8:12], keep=lambda kind, x: x.detach())
    for got, want in zip(kv.run(0, 3, None), (fused[:, 4:8], fused[:, 8:12]), strict=True):
        assert got.untyped_storage().nbytes() == got.numel() * got.element_size()
        assert torch.equal(got, want)
        assert got.transpose(1, 2).is_contiguous(), "copied as it lay, with the gaps left out"


def test_a_place_in_something_larger_stays_the_place():
    slabs = {kind: torch.zeros(4, 1, 2, 3, 2) for kind in ("keys", "values")}
    kv = LayerKV(((0, 3),))
    k, v = torch.randn(2, 1, 2, 3, 2)
    kv.put(0, k, v, keep=lambda kind, x: slabs[kind][1].copy_(x))
    kept_k, kept_v = kv.run(0, 3, None)
    assert kept_k.data_ptr() == slabs["keys"][1].data_ptr()
    assert kept_v.data_ptr() == slabs["values"][1].data_ptr()
    assert torch.equal(kept_k, k)


def _projected(head_size, dtype=torch.float64):
    """Keys as a projection gives them: BKTH over BTKH memory."""
    return torch.randn(2, 9, 3, head_size, dtype=dtype).transpose(1, 2)


def test_runs_and_gradients_lie_in_memory_as_the_keys_do():
    k, v = _projected(4, torch.bfloat16), _projected(5, torch.bfloat16)
    kv = LayerKV(BOUNDS)
    for chunk, (start, end) in enumerate(BOUNDS):  # each chunk's is memory of its own
        ours = [x[:, :, start:end].transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
        kv.put(chunk, ours[0], ours[1])
    for run in ((0, 9), (0, 4), (3, 9)):
        for got, want in zip(kv.run(*run, None), (k, v), strict=True):
            assert torch.equal(got, want[:, :, run[0] : run[1]])
            assert got.transpose(1, 2).is_contiguous()
    assert all(x.transpose(1, 2).is_contiguous() for x in kv.run(0, 9, 1))
    kv.add_gradient(0, _projected(4), _projected(5), None)  # whole chunks: copies
    kv.add_gradient(0, _projected(4)[:1, :, :5], _projected(5)[:1, :, :5], 0)
    assert all(x.transpose(1, 2).is_contiguous() for x in kv.take_gradient(2))
    kv = LayerKV(((0, 9),))
    kv.put(0, k, v)
    kv.add_gradient(0, _projected(4)[:1, :, :5], _projected(5)[:1, :, :5], 0)  # parts: zeros
    assert all(x.transpose(1, 2).is_contiguous() for x in kv.take_gradient(0))


@pytest.mark.parametrize("num_contiguous", [1, 3])
def test_runs_of_keys_that_lie_head_by_head(num_contiguous):
    parts = [_projected(4)[:, :, :3] for _ in range(3)]
    parts = [x.contiguous() if i < num_contiguous else x for i, x in enumerate(parts)]
    joined = join_tokens(parts)
    assert joined.is_contiguous()
    assert torch.equal(joined, torch.cat(parts, dim=2))


def test_freed_keys_are_a_clear_error():
    kv, _, _ = _filled()
    kv.take_gradient(2)
    with pytest.raises(SPPOError, match=r"chunk 2.*one backward per forward"):
        kv.run(0, 9, None)


def test_a_first_contribution_is_held_only_where_sums_may_be_added_to_it() -> None:
    whole = torch.ones(1, 2, 4, 8)
    assert own_sum(whole) is whole
    for shared in (whole[:, :1], whole[:, :1].expand(1, 2, 4, 8), torch.ones(1).expand(1, 2, 4, 8)):
        held = own_sum(shared)
        held += 1
        assert torch.equal(held, torch.full_like(shared, 2.0))
        assert torch.equal(shared, torch.ones_like(shared))
