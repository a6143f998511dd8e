"""cuDNN's fused attention as built into PyTorch, on CUDA.

Its mask is causal only for as many queries as keys here, so bands come from `RectangleBackend`.
Not covered: soft-capped scores, float32, and single queries or keys, which go to the reference:
PyTorch itself keeps one key from cuDNN, and with one query some releases of cuDNN raise in backward
and others are wrong.

Shapes: B batch, N query heads, K key/value heads, C query tokens, T key tokens, H head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sppo_hf.attention.backends.aligned import cuda_half_reason
from sppo_hf.attention.backends.base import (
    Attended,
    CausalBand,
    Gradients,
    Requirement,
    determinism,
)
from sppo_hf.attention.backends.heads import KernelNeeds
from sppo_hf.attention.backends.rectangles import RectangleBackend
from sppo_hf.attention.backends.reference import Reference


class CuDNN(RectangleBackend):
    """`aten::_scaled_dot_product_cudnn_attention` and its backward."""

    name = "cudnn"
    plans_each_shape = True

    def __init__(
        self, *, grouped_heads: bool = True, equal_head_sizes: bool = False, aten: Any = None
    ) -> None:
        """Make one.

        Args:
            grouped_heads: let the kernel handle fewer key heads than query heads.
            equal_head_sizes: pad values to the head size of the keys, or the other way round.
            aten: namespace of the two operators; None for PyTorch's own.
        """
        needs = KernelNeeds(
            grouped_heads=grouped_heads, head_multiple=8, equal_head_sizes=equal_head_sizes
        )
        super().__init__(needs)
        self._aten = torch.ops.aten if aten is None else aten
        self._lse_rank = 4
        self._reference = Reference()

    def reason_unsupported(self, requirement: Requirement) -> str | None:
        """CUDA, 16 bits, head sizes up to 256, no soft cap, no demand for determinism."""
        head_size = max(requirement.qk_head_size, requirement.v_head_size)
        reason = cuda_half_reason(
            requirement.device_type, requirement.dtype, head_size, largest_head_size=256
        )
        if reason is not None:
            return reason
        if requirement.softcap:
            return "cannot soft-cap scores"
        # PyTorch leaves cuDNN out by itself, but only where it chooses the kernel.
        if determinism() == 2:
            return "has no deterministic backward, which torch.use_deterministic_algorithms demands"
        return None

    def kernel_forward(
        self, q_BNCH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, *, causal: bool, scale: float
    ) -> Attended:
        """See `RectangleBackend.kernel_forward`."""
        if _is_single(q_BNCH, k_BKTH):
            band = _band(k_BKTH, causal=causal)
            return self._reference.forward(q_BNCH, k_BKTH, v_BKTH, band=band, scale=scale)
        out_BNCH, lse, *_ = self._aten._scaled_dot_product_cudnn_attention(
            q_BNCH, k_BKTH, v_BKTH, None, True, 0.0, causal, False, scale=scale
        )
        # PyTorch's versions differ in whether a unit dim is left; backward wants the same.
        self._lse_rank = lse.dim()
        return Attended(out_BNCH, lse.squeeze(-1) if lse.dim() == 4 else lse)

    def kernel_backward(
        self,
        dout_BNCH: Tensor,
        q_BNCH: Tensor,
        k_BKTH: Tensor,
        v_BKTH: Tensor,
        attended: Attended,
        *,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """See `RectangleBackend.kernel_backward`."""
        if _is_single(q_BNCH, k_BKTH):
            band = _band(k_BKTH, causal=causal)
            return self._reference.backward(
                dout_BNCH, q_BNCH, k_BKTH, v_BKTH, *attended, band=band, scale=scale
            )
        lse = attended.lse_BNC.contiguous()
        # The seed is read only under dropout.
        seed = torch.zeros((), dtype=torch.int64, device=q_BNCH.device)
        return Gradients(
            *self._aten._scaled_dot_product_cudnn_attention_backward(
                # Gradients that are expanded views have strides of 0, which the graph rejects.
                dout_BNCH.contiguous(),
                q_BNCH,
                k_BKTH,
                v_BKTH,
                attended.out_BNCH.contiguous(),
                lse.unsqueeze(-1) if self._lse_rank == 4 else lse,
                seed,
                seed,
                None,
                None,
                None,
                q_BNCH.shape[2],
                k_BKTH.shape[2],
                0.0,
                causal,
                scale=scale,
            )
        )


def _is_single(q_BNCH: Tensor, k_BKTH: Tensor) -> bool:
    """True if there is just one query or just one key."""
    return q_BNCH.shape[2] == 1 or k_BKTH.shape[2] == 1


def _band(k_BKTH: Tensor, *, causal: bool) -> CausalBand:
    """What the kernel sees: row i the keys up to i, or every row every key."""
    return CausalBand(0 if causal else k_BKTH.shape[2] - 1)
