"""Flash attention 2 as built into PyTorch, on CUDA.

Nothing to install. Windows and grouped heads are native; not covered: soft-capped scores, float32.

Shapes: B batch, N query heads, K key/value heads, C query tokens, T key tokens, H head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sppo_hf.attention.backends.adapters import (
    BottomRightBackend,
    KernelCall,
    KernelNeeds,
    Offsets,
    with_documents,
)
from sppo_hf.attention.backends.base import (
    HALF_DTYPES,
    AttentionSpec,
    Backend,
    BackwardInputs,
    missing_kernel,
    register_backend,
)


@register_backend("aten_flash", cuda=4)
class AtenFlash(BottomRightBackend):
    """`aten::_flash_attention_forward` and its backward."""

    @classmethod
    def variants(cls) -> tuple[Callable[[], Backend], ...]:
        """Grouped heads left to the kernel or not, each with packed documents or without."""
        return with_documents((cls, functools.partial(cls, grouped_heads=False)))

    def __init__(
        self, *, grouped_heads: bool = True, documents_at_once: bool = True, aten: Any = None
    ) -> None:
        """Make one.

        Args:
            grouped_heads: let the kernel handle fewer key heads than query heads.
            documents_at_once: let the kernel handle packed documents in one call.
            aten: namespace of the two operators; None for PyTorch's own.
        """
        self.needs = KernelNeeds(grouped_heads=grouped_heads, head_multiple=8)
        self.documents_at_once = documents_at_once
        self._aten = torch.ops.aten if aten is None else aten

    def reason_unsupported(self, requirement: AttentionSpec) -> str | None:
        """CUDA, 16 bits, head sizes up to 256, no soft cap."""
        return missing_kernel(requirement, "cuda", HALF_DTYPES, largest_head_size=256)

    def kernel_forward(
        self, q_BCNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, call: KernelCall
    ) -> tuple[Tensor, Tensor]:
        """See `BottomRightBackend.kernel_forward`."""
        assert call.softcap is None, "aten_flash was chosen although scores are soft-capped"
        out_BCNH, lse_BNC, *_ = self._aten._flash_attention_forward(
            q_BCNH,
            k_BTKH,
            v_BTKH,
            *_lengths(q_BCNH, k_BTKH, call.offsets),
            0.0,
            call.reach.causal,
            False,
            scale=call.scale,
            window_size_left=call.reach.left,
            window_size_right=call.reach.right,
        )
        return out_BCNH, lse_BNC

    def kernel_backward(
        self, given: BackwardInputs, call: KernelCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BottomRightBackend.kernel_backward`."""
        # The state of the random generator is read only under dropout, so nothing need be in it.
        random_state = torch.empty(2, dtype=torch.uint64, device=given.q.device)
        return self._aten._flash_attention_backward(
            *given,
            *_lengths(given.q, given.k, call.offsets),
            0.0,
            call.reach.causal,
            random_state,
            random_state,
            scale=call.scale,
            window_size_left=call.reach.left,
            window_size_right=call.reach.right,
        )


def _lengths(
    q_BCNH: Tensor, k_BTKH: Tensor, offsets: Offsets | None
) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Offsets of queries and keys, and how many there are, as both operators take them."""
    if offsets is None:
        return None, None, q_BCNH.shape[1], k_BTKH.shape[1]
    return offsets.cu_q, offsets.cu_k, offsets.max_q, offsets.max_k
