"""cuDNN's fused attention as built into PyTorch, on CUDA.

Its mask is causal only for as many queries as keys here, so bands come from `TopLeftBackend`.
Not covered: soft-capped scores, float32, and single queries or keys, which go to the reference:
PyTorch itself keeps one key from cuDNN, and with one query some releases of cuDNN raise in backward
and others are wrong.

[Note: what cuDNN's backward is given]
Whole tiles of keys: on Hopper some releases (9.17 to 9.30 at least) give NaN in dQ where half of a
tile of 128 keys is empty, no mask is used and scores are low. Keys behind the last whole tile of an
unmasked rectangle go to flash attention instead. Chunks' bounds are multiples of 128 tokens, so
this costs a call only where a user set others.

Fixed strides: PyTorch builds a plan for each shape and strides of queries, keys and values, but
keeps those of the output and its gradient out of the key (2.11), so these must always be laid out
alike. All lie token by token without gaps, as most models' projections give them: what lies head by
head has the run's length in its strides, and so has the batch stride of a prefix, though nobody
steps over it where there is one row; every chunk would need plans of its own. What lies otherwise,
and prefixes of several rows, are copied, which costs about as much as it did to join them.

Shapes: B batch, N query heads, K key/value heads, C query tokens, T key tokens, H head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sppo_hf.attention.backends.adapters import KernelNeeds, TopLeftBackend, head_variants
from sppo_hf.attention.backends.aten import AtenFlash
from sppo_hf.attention.backends.base import (
    HALF_DTYPES,
    AttentionOutput,
    AttentionSpec,
    Backend,
    BackwardInputs,
    CausalBand,
    Gradients,
    accumulation_dtype,
    determinism,
    missing_kernel,
    register_backend,
)
from sppo_hf.attention.backends.reference import Reference


@register_backend("cudnn", cuda=5)
class CuDNN(TopLeftBackend):
    """`aten::_scaled_dot_product_cudnn_attention` and its backward."""

    plans_each_shape = True

    @classmethod
    def variants(cls) -> tuple[Callable[[], Backend], ...]:
        """Heads adapted less or more."""
        return head_variants(cls, native_sizes=True)

    def __init__(
        self,
        *,
        grouped_heads: bool = True,
        equal_head_sizes: bool = False,
        key_tile: int = 128,
        aten: Any = None,
    ) -> None:
        """Make one.

        Args:
            grouped_heads: let the kernel handle fewer key heads than query heads.
            equal_head_sizes: pad values to the head size of the keys, or the other way round.
            key_tile: unmasked backward gets multiples of so many keys.
            aten: namespace of the two operators; None for PyTorch's own.
        """
        needs = KernelNeeds(
            grouped_heads=grouped_heads, head_multiple=8, equal_head_sizes=equal_head_sizes
        )
        super().__init__(needs)
        self._aten = torch.ops.aten if aten is None else aten
        self._key_tile = key_tile
        self._lse_rank = 4
        self._reference = Reference()
        self._flash = AtenFlash(aten=aten)

    def reason_unsupported(self, requirement: AttentionSpec) -> str | None:
        """CUDA, 16 bits, head sizes up to 256, no soft cap, no demand for determinism."""
        reason = missing_kernel(requirement, "cuda", HALF_DTYPES, largest_head_size=256)
        # PyTorch leaves cuDNN out by itself, but only where it chooses the kernel.
        if reason is None and determinism() == 2:
            return "has no deterministic backward, which torch.use_deterministic_algorithms demands"
        return reason

    def kernel_forward(
        self, q_BNCH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, *, causal: bool, scale: float
    ) -> AttentionOutput:
        """See `TopLeftBackend.kernel_forward`."""
        if _is_single(q_BNCH, k_BKTH):
            band = _band(k_BKTH, causal=causal)
            return self._reference.forward(q_BNCH, k_BKTH, v_BKTH, band=band, scale=scale)
        q, k, v = (_by_token(x) for x in (q_BNCH, k_BKTH, v_BKTH))
        out_BNCH, lse, *_ = self._aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        # PyTorch's versions differ in whether a unit dim is left; backward wants the same.
        self._lse_rank = lse.dim()
        return AttentionOutput(out_BNCH, lse.squeeze(-1) if lse.dim() == 4 else lse)

    def kernel_backward(self, given: BackwardInputs, *, causal: bool, scale: float) -> Gradients:
        """See `TopLeftBackend.kernel_backward`."""
        if _is_single(given.q, given.k):
            band = _band(given.k, causal=causal)
            return self._reference.backward(*given, band=band, scale=scale)
        num_keys = given.k.shape[2]
        rest = 0 if causal else num_keys % self._key_tile
        if not rest:
            return self._tiled_backward(given, causal=causal, scale=scale)
        # See [Note: what cuDNN's backward is given].
        whole = num_keys - rest
        k, v = given.k.split([whole, rest], dim=2), given.v.split([whole, rest], dim=2)
        # Every row stands behind all of these keys.
        last = self._flash.backward(
            *given._replace(k=k[1], v=v[1]), band=CausalBand(rest), scale=scale
        )
        if not whole:
            return last
        tiled = given._replace(k=k[0], v=v[0])
        first = self._tiled_backward(tiled, causal=False, scale=scale)
        dk_BKTH, dv_BKTH = (torch.cat(x, dim=2) for x in zip(first[1:], last[1:], strict=True))
        sums_dtype = accumulation_dtype(given.q.dtype)
        return Gradients(first.dq_BNCH.to(sums_dtype) + last.dq_BNCH, dk_BKTH, dv_BKTH)

    def _tiled_backward(self, given: BackwardInputs, *, causal: bool, scale: float) -> Gradients:
        """The kernel's backward; unmasked only over whole tiles of keys."""
        q_BNCH, k_BKTH, v_BKTH = (_by_token(x) for x in given[1:4])
        lse = given.lse.contiguous()
        # The seed is read only under dropout, so nothing need be in it.
        seed = torch.empty((), dtype=torch.int64, device=q_BNCH.device)
        return Gradients(
            *self._aten._scaled_dot_product_cudnn_attention_backward(
                _by_token(given.dout),
                q_BNCH,
                k_BKTH,
                v_BKTH,
                _by_token(given.out),
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


def _by_token(x_BNCH: Tensor) -> Tensor:
    """The same values, laid out as [B, C, N, H] without gaps; a copy only where they are not."""
    x_BCNH = x_BNCH.transpose(1, 2).contiguous()
    _, num_tokens, num_heads, head_size = x_BCNH.shape
    # Where a dim is 1, `contiguous` leaves whatever stride it has.
    strides = (num_tokens * num_heads * head_size, num_heads * head_size, head_size, 1)
    return x_BCNH.as_strided(x_BCNH.shape, strides).transpose(1, 2)


def _is_single(q_BNCH: Tensor, k_BKTH: Tensor) -> bool:
    """True if there is just one query or just one key."""
    return q_BNCH.shape[2] == 1 or k_BKTH.shape[2] == 1


def _band(k_BKTH: Tensor, *, causal: bool) -> CausalBand:
    """What the kernel sees: row i the keys up to i, or every row every key."""
    return CausalBand(0 if causal else k_BKTH.shape[2] - 1)
