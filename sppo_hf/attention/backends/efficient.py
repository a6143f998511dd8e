"""Memory-efficient attention (CUTLASS) as built into PyTorch, on CUDA.

The one fused CUDA kernel for float32 and for odd head sizes. Slower than flash kernels; takes no
grouped heads, so keys are repeated for the causal squares only. Not covered: soft-capped scores.

Shapes: B batch, N query heads, K key/value heads, C query tokens, T key tokens, H head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sppo_hf.attention.backends.adapters import KernelNeeds, TopLeftBackend
from sppo_hf.attention.backends.base import (
    HALF_DTYPES,
    AttentionOutput,
    AttentionSpec,
    BackwardInputs,
    Gradients,
    missing_kernel,
    register_backend,
)

_DTYPES = (torch.float32, *HALF_DTYPES)
_LSE_MULTIPLE = 32


@register_backend("efficient", cuda=6)
class Efficient(TopLeftBackend):
    """`aten::_scaled_dot_product_efficient_attention` and its backward."""

    def __init__(self, *, aten: Any = None) -> None:
        """Make one; `aten` has the two operators, None for PyTorch's own."""
        super().__init__(KernelNeeds(grouped_heads=False, head_multiple=8, equal_head_sizes=False))
        self._aten = torch.ops.aten if aten is None else aten

    def reason_unsupported(self, requirement: AttentionSpec) -> str | None:
        """CUDA, 16 or 32 bits, no soft cap."""
        return missing_kernel(requirement, "cuda", _DTYPES)

    def kernel_forward(
        self, q_BNCH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, *, causal: bool, scale: float
    ) -> AttentionOutput:
        """See `TopLeftBackend.kernel_forward`."""
        out_BNCH, lse, *_ = self._aten._scaled_dot_product_efficient_attention(
            q_BNCH, k_BKTH, v_BKTH, None, True, 0.0, causal, scale=scale
        )
        return AttentionOutput(out_BNCH, lse[..., : q_BNCH.shape[2]])

    def kernel_backward(self, given: BackwardInputs, *, causal: bool, scale: float) -> Gradients:
        """See `TopLeftBackend.kernel_backward`."""
        # The kernel reads whole groups of rows; +inf gives the rows that do not exist weight 0.
        missing = -given.lse.shape[2] % _LSE_MULTIPLE
        lse = functional.pad(given.lse, (0, missing), value=float("inf")).contiguous()
        # In 16 bits the kernel sums dout * out itself. It steps through the rows of `out` as those
        # of a dense [B, C, N, H] and, other than with dout, neither asks for that nor copies.
        out_BNCH = given.out.transpose(1, 2).contiguous().transpose(1, 2)
        # The seed is read only under dropout, so nothing need be in it.
        seed = torch.empty((), dtype=torch.int64, device=given.q.device)
        dq, dk, dv, _ = self._aten._scaled_dot_product_efficient_attention_backward(
            *given[:4],
            None,
            out_BNCH,
            lse,
            seed,
            seed,
            0.0,
            [True, True, True, False],
            causal,
            scale=scale,
        )
        return Gradients(dq, dk, dv)
