"""Merging attention over disjoint sets of keys by their log-sum-exp.

Knows nothing of masks, kernels or layers. Backward needs no counterpart here: it is exact for each
set of keys once it is given the merged values, see
[Note: why merged values make backward exact] in `sppo_hf.attention.backends.base`.

Shapes: B batch, N query heads, C query tokens, H value head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sppo_hf.attention.backends.base import AttentionOutput, accumulation_dtype


def merge_partials(first: AttentionOutput, second: AttentionOutput) -> AttentionOutput:
    """Attention over the union of two disjoint sets of keys.

    Args:
        first: output and log-sum-exp over the one set.
        second: the same over the other set.

    Returns:
        Output (dtype of the first output) and log-sum-exp over both. Rows that saw no key in
        either have output 0 and log-sum-exp -inf. The sum runs in float32 (float64 for float64);
        one temporary of that dtype and the output's size is alive meanwhile.
    """
    out_BNCH = first.out_BNCH.to(accumulation_dtype(first.out_BNCH.dtype), copy=True)
    lse_BNC = first.lse_BNC.clone()
    merge_into(out_BNCH, lse_BNC, second)
    return AttentionOutput(out_BNCH.to(first.out_BNCH.dtype), lse_BNC)


def merge_into(out_BNCH: Tensor, lse_BNC: Tensor, other: AttentionOutput) -> None:
    """Merge `other` into `(out_BNCH, lse_BNC)` in place.

    Args:
        out_BNCH: output so far, in the accumulation dtype; overwritten. May be a strided view.
        lse_BNC: log-sum-exp so far; overwritten. May be a strided view.
        other: output and log-sum-exp over keys that were not counted yet.
    """
    other_lse_BNC = other.lse_BNC.to(lse_BNC.dtype)
    merged_BNC = torch.logaddexp(lse_BNC, other_lse_BNC)
    # -inf minus -inf is NaN; a row that neither side has seen stays at weight 0.
    anchor_BNC = merged_BNC.masked_fill(merged_BNC == float("-inf"), 0.0)
    weight_BNC1 = (other_lse_BNC - anchor_BNC).exp_().unsqueeze(-1).to(out_BNCH.dtype)
    # The weights of both sides sum to one, so this is their mean: one pass, and with half the error
    # of two products, whose rounded weights do not sum to one.
    out_BNCH.lerp_(other.out_BNCH.to(out_BNCH.dtype), weight_BNC1)
    lse_BNC.copy_(merged_BNC)
