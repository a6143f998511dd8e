"""Fakes of the CUDA kernels that run on the CPU, with the signatures of the real ones.

Each fake computes with plain operations, asserts what the real kernel requires (dense heads, head
sizes, layouts, a contiguous log-sum-exp), and aligns its mask as the real one does.
"""

import math

import torch
from torch import Tensor


def _widen(*tensors):
    """Convert to float32 or wider, the precision in which kernels add up."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _attend(q, k, v, seen, scale, softcap=0.0):
    """Return output and log-sum-exp, +inf for a row without keys, as kernels do."""
    dtype, groups = q.dtype, q.shape[1] // k.shape[1]
    q, k, v = _widen(q, k, v)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    out = torch.softmax(scores, -1) @ v
    return out.to(dtype), lse.masked_fill(lse == -math.inf, math.inf)


def _attend_backward(dout, q, k, v, out, lse, seen, scale, softcap=0.0):
    """Return gradients computed from the given `out` and `lse`, as kernels do."""
    dtype, kv_heads, groups = q.dtype, k.shape[1], q.shape[1] // k.shape[1]
    dout, q, k, v, out = _widen(dout, q, k, v, out)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * scale
    slope = torch.ones_like(scores)
    if softcap:
        slope = 1 - torch.tanh(scores / softcap) ** 2
        scores = softcap * torch.tanh(scores / softcap)
    p = torch.exp(scores - lse.unsqueeze(-1)) * seen
    delta = (dout * out).sum(-1, keepdim=True)
    ds = p * (dout @ v.transpose(-1, -2) - delta) * scale * slope
    dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout
    dk, dv = (x.unflatten(1, (kv_heads, groups)).sum(2) for x in (dk, dv))
    return tuple(x.to(dtype) for x in (ds @ k, dk, dv))


def _square_or_all(rows: int, keys: int, causal: bool) -> Tensor:
    assert not causal or rows == keys, "causal only for as many queries as keys"
    seen = torch.ones(rows, keys, dtype=torch.bool)
    return seen.tril() if causal else seen


def _not_hidden(q: Tensor, k: Tensor, causal: bool, bias: Tensor | None) -> Tensor:
    """The mask of CUTLASS's kernel, which reads a bias 16 bytes at a time, of rows that see any."""
    seen = _square_or_all(q.shape[2], k.shape[2], causal)
    if bias is None:
        return seen
    assert bias.shape == (*q.shape[:3], k.shape[2])
    assert bias.dtype == q.dtype
    assert bias.stride(3) == 1
    assert all(stride * bias.element_size() % 16 == 0 for stride in bias.stride()[:3])
    seen = seen & (bias == 0)
    assert seen.any(dim=-1).all()
    return seen


def _bottom_right(rows: int, keys: int, causal: bool, left: int, right: int) -> Tensor:
    """Flash attention's mask; -1 is unlimited.

    A side that is as long as the keys counts as unlimited, and an unlimited right side beside a
    limited left one as as long as the keys, which is less where there are more rows than keys.
    """
    right = 0 if causal else right
    left, right = (-1 if side >= keys else side for side in (left, right))
    right = keys if left >= 0 > right else right
    own = torch.arange(keys - rows, keys).unsqueeze(1)
    key = torch.arange(keys)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if left >= 0:
        seen &= key >= own - left
    if right >= 0:
        seen &= key <= own + right
    return seen


def _swap(*tensors):
    return [x.transpose(1, 2) for x in tensors]


def _documents(cu_q, cu_k, max_q, max_k, queries, keys):
    """Check the offsets as kernels do; return the slices of queries and keys of each document."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (cu_q[0], cu_k[0]) == (0, 0)
    assert (cu_q[-1], cu_k[-1]) == (queries, keys)
    assert (cu_q.diff().max(), cu_k.diff().max()) == (max_q, max_k)
    ends = zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:], strict=False)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in ends]


def _each_forward(one, q, k, v, cu_q, cu_k, max_q, max_k):
    """Run `one` on each document; return output [tokens, heads, H] and lse [heads, tokens]."""
    parts = []
    for rows, keys in _documents(cu_q, cu_k, max_q, max_k, len(q), len(k)):
        out, lse = one(q[None, rows], k[None, keys], v[None, keys])
        parts.append((out[0], lse[0]))
    outs, sums = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(sums, dim=1)


def _each_backward(one, dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k):
    """Run `one` on each document; return gradients [tokens, heads, H]."""
    assert lse.shape == (q.shape[1], len(q))
    parts = []
    for rows, keys in _documents(cu_q, cu_k, max_q, max_k, len(q), len(k)):
        given = (dout[None, rows], q[None, rows], k[None, keys], v[None, keys], out[None, rows])
        parts.append([grad[0] for grad in one(*given, lse[None, :, rows].contiguous())])
    return [torch.cat(grads) for grads in zip(*parts, strict=True)]


class FakeAten:
    """Stands in for `torch.ops.aten`."""

    def __init__(self, *, grouped_heads=True, lse_rank=4):
        """Make a release with or without grouped heads, whose cuDNN lse has `lse_rank` dims."""
        self.grouped_heads, self.lse_rank = grouped_heads, lse_rank
        self.calls = []

    def _check_heads(self, q, k, v, *, grouped, equal_sizes):
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        assert q.shape[-1] % 8 == 0
        assert v.shape[-1] % 8 == 0
        if equal_sizes and v.shape[-1] != q.shape[-1]:
            raise RuntimeError("expected equal head sizes")
        if not grouped and q.shape != (*k.shape[:-2], *q.shape[-2:]):
            raise RuntimeError("expected as many key heads as query heads")

    def _flash_attention_forward(
        self, q, k, v, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
        scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert (dropout_p, return_debug_mask) == (0.0, False)
        rest = (torch.zeros(2), torch.zeros(()), torch.zeros(0))
        if cum_q is not None:

            def one(q, k, v):
                lengths = (None, None, q.shape[1], k.shape[1], 0.0, is_causal, False)
                window = {"window_size_left": window_size_left, "window_size_right": 0}
                return self._flash_attention_forward(q, k, v, *lengths, scale=scale, **window)[:2]

            return *_each_forward(one, q, k, v, cum_q, cum_k, max_q, max_k), *rest
        assert cum_k is None
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        left, right = (-1 if x is None else x for x in (window_size_left, window_size_right))
        seen = _bottom_right(max_q, max_k, is_causal, left, right)
        q, k, v = _swap(q, k, v)
        self._check_heads(q, k, v, grouped=self.grouped_heads, equal_sizes=True)
        out, lse = _attend(q, k, v, seen, scale)
        return out.transpose(1, 2), lse, *rest

    def _flash_attention_backward(
        self, dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal,
        rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert dropout_p == 0.0
        assert lse.is_contiguous()
        assert isinstance(rng_state, Tensor)
        assert isinstance(unused, Tensor)
        if cum_q is not None:

            def one(dout, q, k, v, out, lse):
                lengths = (None, None, q.shape[1], k.shape[1], 0.0, is_causal, rng_state, unused)
                window = {"window_size_left": window_size_left, "window_size_right": 0}
                return self._flash_attention_backward(
                    dout, q, k, v, out, lse, *lengths, scale=scale, **window
                )

            lengths = (cum_q, cum_k, max_q, max_k)
            return tuple(_each_backward(one, dout, q, k, v, out, lse, *lengths))
        assert cum_k is None
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        left, right = (-1 if x is None else x for x in (window_size_left, window_size_right))
        seen = _bottom_right(max_q, max_k, is_causal, left, right)
        dout, q, k, v, out = _swap(dout, q, k, v, out)
        self._check_heads(q, k, v, grouped=self.grouped_heads, equal_sizes=True)
        return tuple(_swap(*_attend_backward(dout, q, k, v, out, lse, seen, scale)))

    def _scaled_dot_product_cudnn_attention(
        self, q, k, v, bias, compute_lse, dropout_p, is_causal, return_debug_mask, *, scale=None
    ):
        assert (bias, compute_lse, dropout_p, return_debug_mask) == (None, True, 0.0, False)
        assert min(q.shape[2], k.shape[2]) > 1, "a single query or key"
        self._check_heads(q, k, v, grouped=self.grouped_heads, equal_sizes=False)
        self.calls.append((tuple(q.shape), tuple(k.shape)))
        out, lse = _attend(q, k, v, _square_or_all(q.shape[2], k.shape[2], is_causal), scale)
        return out, lse.unsqueeze(-1) if self.lse_rank == 4 else lse, None, None, 0, 0

    def _scaled_dot_product_cudnn_attention_backward(
        self, dout, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k,
        dropout_p, is_causal, *, scale=None,
    ):  # fmt: skip
        assert (bias, cum_q, cum_k, dropout_p) == (None, None, None, 0.0)
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        assert min(max_q, max_k) > 1, "a single query or key"
        assert lse.dim() == self.lse_rank
        assert lse.is_contiguous()
        assert 0 not in dout.stride()
        assert seed.dtype == offset.dtype == torch.int64
        self._check_heads(q, k, v, grouped=self.grouped_heads, equal_sizes=False)
        seen = _square_or_all(max_q, max_k, is_causal)
        lse = lse.squeeze(-1) if self.lse_rank == 4 else lse
        return _attend_backward(dout, q, k, v, out, lse, seen, scale)

    def _scaled_dot_product_efficient_attention(
        self, q, k, v, bias, compute_lse, dropout_p, is_causal, *, scale=None
    ):
        assert (compute_lse, dropout_p) == (True, 0.0)
        self._check_heads(q, k, v, grouped=False, equal_sizes=False)
        self.calls.append((tuple(q.shape), tuple(k.shape)))
        out, lse = _attend(q, k, v, _not_hidden(q, k, is_causal, bias), scale)
        padded = torch.full(
            (*lse.shape[:2], math.ceil(lse.shape[2] / 32) * 32), math.inf, dtype=lse.dtype
        )
        padded[:, :, : lse.shape[2]] = lse
        return out, padded, torch.zeros(()), torch.zeros(())

    def _scaled_dot_product_efficient_attention_backward(
        self, dout, q, k, v, bias, out, lse, seed, offset, dropout_p, mask, is_causal, *, scale=None
    ):
        assert (dropout_p, mask) == (0.0, [True, True, True, False])
        assert lse.shape[2] == math.ceil(q.shape[2] / 32) * 32
        assert lse.is_contiguous()
        assert (lse[:, :, q.shape[2] :] == math.inf).all()
        # Its rows are stepped through by all heads' elements, whatever its strides are.
        assert out.transpose(1, 2).is_contiguous()
        self._check_heads(q, k, v, grouped=False, equal_sizes=False)
        seen = _not_hidden(q, k, is_causal, bias)
        lse = lse[:, :, : q.shape[2]]
        return *_attend_backward(dout, q, k, v, out, lse, seen, scale), None


def _flash_forward(q, k, v, scale, causal, left, right, softcap):
    seen = _bottom_right(q.shape[1], k.shape[1], causal, left, right)
    q, k, v = _swap(q, k, v)
    assert q.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    out, lse = _attend(q, k, v, seen, scale, softcap)
    return out.transpose(1, 2), lse


def _flash_backward(dout, q, k, v, out, lse, scale, causal, left, right, softcap):
    assert lse.is_contiguous()
    assert dout.is_contiguous()
    seen = _bottom_right(q.shape[1], k.shape[1], causal, left, right)
    dout, q, k, v, out = _swap(dout, q, k, v, out)
    return _swap(*_attend_backward(dout, q, k, v, out, lse, seen, scale, softcap))


class FakeFlash2:
    """flash-attn 2.7 and later."""

    @staticmethod
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, return_softmax,
    ):  # fmt: skip
        assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
        sides = (window_size_left, window_size_right)
        return *_flash_forward(q, k, v, softmax_scale, causal, *sides, softcap), None, None

    @staticmethod
    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, alibi_slopes, rng_state) == (0.0, None, None)
        sides = (window_size_left, window_size_right)
        grads = _flash_backward(
            dout, q, k, v, out, softmax_lse, softmax_scale, causal, *sides, softcap
        )
        for buffer, grad in zip((dq, dk, dv), grads, strict=True):
            buffer.copy_(grad)

    @staticmethod
    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax,
        block_table,
    ):  # fmt: skip
        assert (dropout_p, alibi_slopes, return_softmax, block_table) == (0.0, None, False, None)
        mask = (softmax_scale, causal, window_size_left, window_size_right, softcap)
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return *_each_forward(lambda *x: _flash_forward(*x, *mask), q, k, v, *lengths), None, None

    @staticmethod
    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
        softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        assert (dropout_p, alibi_slopes, rng_state, zero_tensors) == (0.0, None, None, False)
        mask = (softmax_scale, causal, window_size_left, window_size_right, softcap)
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        given = (dout, q, k, v, out, softmax_lse)
        grads = _each_backward(lambda *x: _flash_backward(*x, *mask), *given, *lengths)
        for buffer, grad in zip((dq, dk, dv), grads, strict=True):
            buffer.copy_(grad)


class FakeFlash2Old:
    """flash-attn before 2.7: a window is one argument."""

    @staticmethod
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        return _flash_forward(q, k, v, softmax_scale, causal, *window_size, softcap)

    @staticmethod
    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        grads = _flash_backward(
            dout, q, k, v, out, softmax_lse, softmax_scale, causal, *window_size, softcap
        )
        for buffer, grad in zip((dq, dk, dv), grads, strict=True):
            buffer.copy_(grad)


class FakeFlash3:
    """flash-attn-3 as of 2025: many arguments about caches."""

    @staticmethod
    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, softmax_scale=None, causal=False,
        window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0,
        cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    ):  # fmt: skip
        mask = (softmax_scale, causal, window_size_left, window_size_right, softcap)
        if cu_seqlens_q is None:
            return *_flash_forward(q, k, v, *mask), None, None
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return *_each_forward(lambda *x: _flash_forward(*x, *mask), q, k, v, *lengths), None, None

    @staticmethod
    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        max_seqlen_k=None, dq=None, dk=None, dv=None,
        softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1,
        softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        mask = (softmax_scale, is_causal, window_size_left, window_size_right, softcap)
        given = (dout, q, k, v, out, softmax_lse)
        if cu_seqlens_q is None:
            grads = _flash_backward(*given, *mask)
        else:
            lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            grads = _each_backward(lambda *x: _flash_backward(*x, *mask), *given, *lengths)
        for buffer, grad in zip((dq, dk, dv), grads, strict=True):
            buffer.copy_(grad)


class FakeFlash4:
    """flash-attn-4: None for unlimited, gradients returned."""

    @staticmethod
    def _flash_attn_fwd(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, softmax_scale=None, causal=False,
        softcap=None, window_size_left=None, window_size_right=None, return_lse=False,
    ):  # fmt: skip
        assert return_lse
        sides = (-1 if x is None else x for x in (window_size_left, window_size_right))
        mask = (softmax_scale, causal, *sides, softcap)
        if cu_seqlens_q is None:
            return _flash_forward(q, k, v, *mask)
        longest = (x.diff().max() for x in (cu_seqlens_q, cu_seqlens_k))
        lengths = (cu_seqlens_q, cu_seqlens_k, *longest)
        return _each_forward(lambda *x: _flash_forward(*x, *mask), q, k, v, *lengths)

    @staticmethod
    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0,
        window_size_left=None, window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None,
        deterministic=False,
    ):  # fmt: skip
        sides = (-1 if x is None else x for x in (window_size_left, window_size_right))
        mask, given = (softmax_scale, causal, *sides, softcap), (dout, q, k, v, out, lse)
        if cu_seqlens_q is None:
            return tuple(_flash_backward(*given, *mask))
        longest = (x.diff().max() for x in (cu_seqlens_q, cu_seqlens_k))
        lengths = (cu_seqlens_q, cu_seqlens_k, *longest)
        return tuple(_each_backward(lambda *x: _flash_backward(*x, *mask), *given, *lengths))


class FakeFlash4Early(FakeFlash4):
    """flash-attn-4 before its backward knew windows."""

    @staticmethod
    def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0):
        return tuple(
            _flash_backward(dout, q, k, v, out, lse, softmax_scale, causal, -1, -1, softcap)
        )
