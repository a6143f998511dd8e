"""Attention on PyTorch's fused CPU kernel.

The kernel is the one behind `scaled_dot_product_attention` on the CPU. It is causal only from the
top left, so bands come from `TopLeftBackend`. Not covered: soft-capped scores.

The kernel's backward gives each key head of each row to one thread. Where that leaves threads
without work, key heads are repeated for it, and the gradients of those that are one are summed
(`parallel_heads`).

16-bit inputs are computed in float32. The kernel would sum key gradients in 16 bits, which puts
them up to twice as far from the truth, and its float16 backward is ten times slower; a float32
copy of the keys and values of one call is the price.

Shapes: B batch, N query heads, K key/value heads, C query tokens, T key tokens, H head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sppo_hf.attention.backends.adapters import (
    KernelNeeds,
    TopLeftBackend,
    repeat_heads,
    sum_repeated_heads,
)
from sppo_hf.attention.backends.base import (
    HALF_DTYPES,
    AttentionOutput,
    AttentionSpec,
    BackwardInputs,
    Gradients,
    accumulation_dtype,
    missing_kernel,
    register_backend,
)
from sppo_hf.planning.tile_sizes import MOST_COPIED_BYTES, parallel_heads

_DTYPES = (torch.float64, torch.float32, *HALF_DTYPES)


@register_backend("cpu_flash", cpu=1)
class CPUFlash(TopLeftBackend):
    """Fused CPU kernel, forward and backward; memory linear in tokens."""

    widens = True

    def __init__(self, *, grouped_heads: bool = True, tile_rows: int = 512) -> None:
        """Make one; `tile_rows` is that of `top_left.cut_band`, others are as in `AtenFlash`."""
        super().__init__(KernelNeeds(grouped_heads=grouped_heads), tile_rows=tile_rows)

    def reason_unsupported(self, requirement: AttentionSpec) -> str | None:
        """CPU tensors of the usual dtypes, without soft cap."""
        return missing_kernel(requirement, "cpu", _DTYPES)

    def kernel_forward(
        self, q_BNCH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, *, causal: bool, scale: float
    ) -> AttentionOutput:
        """See `TopLeftBackend.kernel_forward`."""
        dtype = accumulation_dtype(q_BNCH.dtype)
        q, k, v = q_BNCH.to(dtype), k_BKTH.to(dtype), v_BKTH.to(dtype)
        return AttentionOutput(
            *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, scale=scale
            )
        )

    def kernel_backward(self, given: BackwardInputs, *, causal: bool, scale: float) -> Gradients:
        """See `TopLeftBackend.kernel_backward`."""
        dtype = accumulation_dtype(given.q.dtype)
        dout, q, k, v, out = (x.to(dtype) for x in given[:5])
        rows, num_heads, num_kv_heads = *q.shape[:2], k.shape[1]
        heads = parallel_heads(rows, num_heads, num_kv_heads, torch.get_num_threads())
        copied = rows * heads * k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()
        if heads > num_kv_heads and copied <= MOST_COPIED_BYTES:
            k, v = repeat_heads(k, heads), repeat_heads(v, heads)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, given.lse, 0.0, causal, scale=scale
        )
        dk, dv = (sum_repeated_heads(x, num_kv_heads) for x in (dk, dv))
        return Gradients(dq, dk, dv)
