"""Adapting heads to what a kernel takes: head sizes, strides, grouped heads.

Of the mask one bit counts: putting grouped queries behind each other is right only where every
query sees every key.

Shapes: B batch, N query heads, K key/value heads, G = N/K, C query tokens, T key tokens,
H head size; R = G*C for queries grouped by key head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sppo_hf.attention.backends.base import (
    AttentionOutput,
    Backend,
    BackwardInputs,
    Gradients,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNeeds:
    """What a kernel demands of its heads."""

    grouped_heads: bool
    """Takes fewer key/value heads than query heads."""

    head_multiple: int = 1
    """Head sizes must be a multiple of this."""

    equal_head_sizes: bool = True
    """Values must have the head size of queries and keys."""

    def padded_sizes(self, qk_head_size: int, v_head_size: int) -> tuple[int, int]:
        """Head sizes of queries/keys and of values that the kernel sees."""
        qk_size, v_size = (
            -(-size // self.head_multiple) * self.head_multiple
            for size in (qk_head_size, v_head_size)
        )
        if self.equal_head_sizes:
            qk_size = v_size = max(qk_size, v_size)
        return qk_size, v_size


def head_variants(
    make: Callable[..., Backend], *, native_sizes: bool
) -> tuple[Callable[[], Backend], ...]:
    """Variants of a backend that leave more and more of the heads' adaptation to us.

    With `native_sizes` values of another head size than the keys' are tried unpadded first.
    """
    sizes = (False, True) if native_sizes else (True,)
    return tuple(
        functools.partial(make, grouped_heads=grouped, equal_head_sizes=equal)
        for grouped in (True, False)
        for equal in sizes
    )


def adapted_forward(
    kernel: Callable[[Tensor, Tensor, Tensor], AttentionOutput],
    q_BNCH: Tensor,
    k_BKTH: Tensor,
    v_BKTH: Tensor,
    *,
    needs: KernelNeeds,
    unmasked: bool,
) -> AttentionOutput:
    """Call a forward kernel with heads as it needs them.

    Args:
        kernel: takes queries, keys and values in this order.
        q_BNCH: queries, any strides and head size.
        k_BKTH: keys.
        v_BKTH: values.
        needs: the kernel's demands.
        unmasked: every query sees every key, so grouped queries may stand behind each other.

    Returns:
        What the kernel returned, in the callers' heads and head sizes.
    """
    num_heads, num_kv_heads = q_BNCH.shape[1], k_BKTH.shape[1]
    qk_size, v_size = needs.padded_sizes(q_BNCH.shape[3], v_BKTH.shape[3])
    q, k, v = _shape(q_BNCH, qk_size), _shape(k_BKTH, qk_size), _shape(v_BKTH, v_size)
    ungrouped = num_heads != num_kv_heads and not needs.grouped_heads
    if ungrouped and unmasked:
        q = group_queries(q, num_kv_heads)
    elif ungrouped:
        k, v = repeat_heads(k, num_heads), repeat_heads(v, num_heads)
    out, lse = kernel(q, k, v)
    if ungrouped and unmasked:
        out = ungroup_queries(out, num_heads)
        lse = ungroup_queries(lse.unsqueeze(-1), num_heads).squeeze(-1)
    return AttentionOutput(out[..., : v_BKTH.shape[3]], lse)


def adapted_backward(
    kernel: Callable[[BackwardInputs], Gradients],
    given: BackwardInputs,
    *,
    needs: KernelNeeds,
    unmasked: bool,
) -> Gradients:
    """Call a backward kernel as `adapted_forward` calls a forward one."""
    num_heads, num_kv_heads = given.q.shape[1], given.k.shape[1]
    qk_size, v_size = needs.padded_sizes(given.q.shape[3], given.v.shape[3])
    q, k = (_shape(x, qk_size) for x in (given.q, given.k))
    dout, v, out = (_shape(x, v_size) for x in (given.dout, given.v, given.out))
    lse = given.lse
    ungrouped = num_heads != num_kv_heads and not needs.grouped_heads
    if ungrouped and unmasked:
        dout, q, out = (group_queries(x, num_kv_heads) for x in (dout, q, out))
        lse = group_queries(lse.unsqueeze(-1), num_kv_heads).squeeze(-1)
    elif ungrouped:
        k, v = repeat_heads(k, num_heads), repeat_heads(v, num_heads)
    dq, dk, dv = kernel(BackwardInputs(dout, q, k, v, out, lse))
    if ungrouped and unmasked:
        dq = ungroup_queries(dq, num_heads)
    dk, dv = sum_repeated_heads(dk, num_kv_heads), sum_repeated_heads(dv, num_kv_heads)
    qk_size, v_size = given.q.shape[3], given.v.shape[3]
    return Gradients(dq[..., :qk_size], dk[..., :qk_size], dv[..., :v_size])


def repeat_heads(x_BKTH: Tensor, num_heads: int) -> Tensor:
    """Repeat key heads until there are as many as query heads: N/K times the bytes."""
    num_kv_heads = x_BKTH.shape[1]
    return x_BKTH.repeat_interleave(num_heads // num_kv_heads, dim=1)


def sum_repeated_heads(dx_BNTH: Tensor, num_kv_heads: int) -> Tensor:
    """Gradient of `repeat_heads`; the sum runs in float32 at least and is returned so."""
    batch, num_heads, tokens, size = dx_BNTH.shape
    if num_kv_heads == num_heads:
        return dx_BNTH
    grouped_BKGTH = dx_BNTH.reshape(batch, num_kv_heads, -1, tokens, size)
    return grouped_BKGTH.sum(dim=2, dtype=torch.promote_types(dx_BNTH.dtype, torch.float32))


def group_queries(x_BNCH: Tensor, num_kv_heads: int) -> Tensor:
    """Put the queries that share a key head behind each other: [B, K, R, H].

    A kernel without grouped heads then needs no repeated keys. Only for unmasked attention.
    """
    batch, num_heads, tokens, size = x_BNCH.shape
    return x_BNCH.reshape(batch, num_kv_heads, num_heads // num_kv_heads * tokens, size)


def ungroup_queries(x_BKRH: Tensor, num_heads: int) -> Tensor:
    """Undo `group_queries`."""
    batch, num_kv_heads, rows, size = x_BKRH.shape
    return x_BKRH.reshape(batch, num_heads, rows * num_kv_heads // num_heads, size)


def _shape(x_BNCH: Tensor, head_size: int) -> Tensor:
    """Pad heads with zeros and lay them out without gaps, as all kernels read them.

    Zeros in queries and keys add nothing to scores; zeros in values give zeros in the output.
    """
    missing = head_size - x_BNCH.shape[3]
    if missing:
        return functional.pad(x_BNCH, (0, missing))
    return x_BNCH if x_BNCH.stride(3) == 1 else x_BNCH.contiguous()
