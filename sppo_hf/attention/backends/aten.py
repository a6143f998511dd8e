"""The fused attention kernels that are built into PyTorch: flash, cuDNN and efficient on CUDA, CPU.

None of them can soft-cap scores.

Shapes: B batch, N query heads, K key/value heads, C query tokens, T key tokens, H head size.

[Note: what cuDNN's backward is given]
Whole tiles of keys. On Hopper some releases (at least 9.17 to 9.30) return NaN in dQ where half of
a tile of 128 keys is empty, no mask is used and scores are low. The keys behind the last whole tile
of an unmasked rectangle therefore go to flash attention. Chunk bounds are multiples of 128 tokens,
so this costs an extra call only where a user set other bounds.

Fixed strides. PyTorch builds a plan for each shape and strides of queries, keys and values, but
leaves the strides of the output and its gradient out of the plan's key (2.11), so these must always
be laid out alike. Everything is passed as dense [B, tokens, heads, H], the layout of most models'
projections. In any other layout the number of keys would be part of the strides (in a head-major
tensor, or in the batch stride of a slice even when B is 1), and every chunk would need its own
plans. Tensors in other layouts, and prefixes of several rows, are copied; that costs about as much
as joining them did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sppo_hf.attention.backends.adapters import (
    BottomRightBackend,
    KernelCall,
    KernelNeeds,
    Offsets,
    TopLeftBackend,
    head_variants,
    repeat_heads,
    sum_repeated_heads,
    with_documents,
)
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
from sppo_hf.planning.tile_sizes import MAX_COPIED_BYTES, parallel_heads


@register_backend("aten_flash", cuda=4)
class AtenFlash(BottomRightBackend):
    """Flash attention 2 on CUDA; windows and grouped heads are native, 16 bits only.

    Calls `aten::_flash_attention_forward` and its backward.
    """

    @classmethod
    def variants(cls) -> tuple[Callable[[], Backend], ...]:
        """Return variants with and without grouped heads and packed documents in the kernel."""
        return with_documents((cls, functools.partial(cls, grouped_heads=False)))

    def __init__(
        self, *, grouped_heads: bool = True, documents_at_once: bool = True, aten: Any = None
    ) -> None:
        """Let the kernel handle fewer key heads than query heads, and packed documents in one call.

        `aten` has the two operators; None for PyTorch's own.
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
    """Return offsets and numbers of queries and keys, as both operators take them."""
    if offsets is None:
        return None, None, q_BCNH.shape[1], k_BTKH.shape[1]
    return offsets.cu_q, offsets.cu_k, offsets.max_q, offsets.max_k


_CPU_DTYPES = (torch.float64, torch.float32, *HALF_DTYPES)


@register_backend("cpu_flash", cpu=1)
class CPUFlash(TopLeftBackend):
    """The fused CPU kernel behind `scaled_dot_product_attention`; memory linear in tokens.

    Its backward gives each key head of each row to one thread. Where that leaves threads idle, key
    heads are repeated, and the gradients of the copies are summed (`parallel_heads`).

    16-bit inputs are computed in float32. The kernel would sum key gradients in 16 bits, which puts
    them up to twice as far from the exact result, and its float16 backward is ten times slower; the
    price is a float32 copy of the keys and values of one call.
    """

    widens = True
    takes_bias = True

    def __init__(self, *, grouped_heads: bool = True, tile_rows: int = 512) -> None:
        """Make one; for `tile_rows` see `cut_band`."""
        super().__init__(KernelNeeds(grouped_heads=grouped_heads), tile_rows=tile_rows)

    def reason_unsupported(self, requirement: AttentionSpec) -> str | None:
        """CPU tensors of the usual dtypes, without soft cap."""
        return missing_kernel(requirement, "cpu", _CPU_DTYPES, chosen=True)

    def kernel_forward(
        self,
        q_BNCH: Tensor,
        k_BKTH: Tensor,
        v_BKTH: Tensor,
        *,
        causal: bool,
        scale: float,
        bias_B1CT: Tensor | None = None,
    ) -> AttentionOutput:
        """See `TopLeftBackend.kernel_forward`."""
        dtype = accumulation_dtype(q_BNCH.dtype)
        q, k, v = q_BNCH.to(dtype), k_BKTH.to(dtype), v_BKTH.to(dtype)
        bias = None if bias_B1CT is None else bias_B1CT.to(dtype)
        return AttentionOutput(
            *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=bias, scale=scale
            )
        )

    def kernel_backward(
        self,
        given: BackwardInputs,
        *,
        causal: bool,
        scale: float,
        bias_B1CT: Tensor | None = None,
    ) -> Gradients:
        """See `TopLeftBackend.kernel_backward`."""
        dtype = accumulation_dtype(given.q.dtype)
        dout, q, k, v, out = (x.to(dtype) for x in given[:5])
        bias = None if bias_B1CT is None else bias_B1CT.to(dtype)
        rows, num_heads, num_kv_heads = *q.shape[:2], k.shape[1]
        heads = parallel_heads(rows, num_heads, num_kv_heads, torch.get_num_threads())
        copied = rows * heads * k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()
        if heads > num_kv_heads and copied <= MAX_COPIED_BYTES:
            k, v = repeat_heads(k, heads), repeat_heads(v, heads)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, given.lse, 0.0, causal, attn_mask=bias, scale=scale
        )
        dk, dv = (sum_repeated_heads(x, num_kv_heads) for x in (dk, dv))
        return Gradients(dq, dk, dv)


@register_backend("cudnn", cuda=5)
class CuDNN(TopLeftBackend):
    """cuDNN's fused attention on CUDA, 16 bits only.

    Single queries or keys go to the reference: PyTorch itself keeps single keys from cuDNN, and
    with one query some releases of cuDNN raise in backward and others are wrong.
    """

    plans_each_shape = True

    @classmethod
    def variants(cls) -> tuple[Callable[[], Backend], ...]:
        """Return variants that adapt fewer heads first, see `head_variants`."""
        return head_variants(cls, native_sizes=True)

    def __init__(
        self,
        *,
        grouped_heads: bool = True,
        equal_head_sizes: bool = False,
        key_tile: int = 128,
        aten: Any = None,
    ) -> None:
        """Make one for `KernelNeeds`; unmasked backward gets a multiple of `key_tile` keys.

        `aten` has the two operators; None for PyTorch's own.
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
        # PyTorch excludes cuDNN then, too, but only where it chooses the kernel itself.
        if reason is None and determinism() == 2:
            return "has no deterministic backward, which torch.use_deterministic_algorithms demands"
        return reason

    def kernel_forward(
        self,
        q_BNCH: Tensor,
        k_BKTH: Tensor,
        v_BKTH: Tensor,
        *,
        causal: bool,
        scale: float,
        bias_B1CT: Tensor | None = None,
    ) -> AttentionOutput:
        """See `TopLeftBackend.kernel_forward`."""
        if _is_single(q_BNCH, k_BKTH):
            band = _band(k_BKTH, causal=causal)
            return self._reference.forward(q_BNCH, k_BKTH, v_BKTH, band=band, scale=scale)
        q, k, v = (_by_token(x) for x in (q_BNCH, k_BKTH, v_BKTH))
        out_BNCH, lse, *_ = self._aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        # PyTorch's versions differ in whether a unit dim is kept; backward takes the same shape.
        self._lse_rank = lse.dim()
        return AttentionOutput(out_BNCH, lse.squeeze(-1) if lse.dim() == 4 else lse)

    def kernel_backward(
        self,
        given: BackwardInputs,
        *,
        causal: bool,
        scale: float,
        bias_B1CT: Tensor | None = None,
    ) -> Gradients:
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
        # Every query comes after all of these keys.
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
    """Return `x` laid out as dense [B, C, N, H]; copies only other layouts."""
    x_BCNH = x_BNCH.transpose(1, 2).contiguous()
    _, num_tokens, num_heads, head_size = x_BCNH.shape
    # `contiguous` does not normalise the strides of dims of size 1.
    strides = (num_tokens * num_heads * head_size, num_heads * head_size, head_size, 1)
    return x_BCNH.as_strided(x_BCNH.shape, strides).transpose(1, 2)


def _is_single(q_BNCH: Tensor, k_BKTH: Tensor) -> bool:
    """Return whether there is only one query or only one key."""
    return q_BNCH.shape[2] == 1 or k_BKTH.shape[2] == 1


def _band(k_BKTH: Tensor, *, causal: bool) -> CausalBand:
    """Return the kernel's mask as a band: causal from the top left, or none."""
    return CausalBand(0 if causal else k_BKTH.shape[2] - 1)


_EFFICIENT_DTYPES = (torch.float32, *HALF_DTYPES)
_LSE_MULTIPLE = 32


@register_backend("efficient", cuda=6)
class Efficient(TopLeftBackend):
    """Memory-efficient attention (CUTLASS) on CUDA, also for float32 and odd head sizes.

    Slower than flash kernels. It takes no grouped heads, so keys are repeated for causal squares.
    Its forward finds a block of keys by a product of 32 bits, which a million keys of 32 heads of
    128 exceed.
    """

    most_elements = 2**31 - 1
    takes_bias = True

    def __init__(self, *, aten: Any = None) -> None:
        """Make one; `aten` has the two operators, None for PyTorch's own."""
        super().__init__(KernelNeeds(grouped_heads=False, head_multiple=8, equal_head_sizes=False))
        self._aten = torch.ops.aten if aten is None else aten

    def reason_unsupported(self, requirement: AttentionSpec) -> str | None:
        """CUDA, 16 or 32 bits, no soft cap."""
        return missing_kernel(requirement, "cuda", _EFFICIENT_DTYPES, chosen=True)

    def kernel_forward(
        self,
        q_BNCH: Tensor,
        k_BKTH: Tensor,
        v_BKTH: Tensor,
        *,
        causal: bool,
        scale: float,
        bias_B1CT: Tensor | None = None,
    ) -> AttentionOutput:
        """See `TopLeftBackend.kernel_forward`."""
        out_BNCH, lse, *_ = self._aten._scaled_dot_product_efficient_attention(
            *(q_BNCH, k_BKTH, v_BKTH, _for_all_heads(bias_B1CT, q_BNCH)),
            *(True, 0.0, causal),
            scale=scale,
        )
        return AttentionOutput(out_BNCH, lse[..., : q_BNCH.shape[2]])

    def kernel_backward(
        self,
        given: BackwardInputs,
        *,
        causal: bool,
        scale: float,
        bias_B1CT: Tensor | None = None,
    ) -> Gradients:
        """See `TopLeftBackend.kernel_backward`."""
        # The kernel reads whole groups of rows; +inf gives the padding rows weight 0.
        missing = -given.lse.shape[2] % _LSE_MULTIPLE
        lse = functional.pad(given.lse, (0, missing), value=float("inf")).contiguous()
        # In 16 bits the kernel sums dout * out itself. It reads `out` as dense [B, C, N, H] and,
        # other than for dout, neither checks that nor copies.
        out_BNCH = given.out.transpose(1, 2).contiguous().transpose(1, 2)
        # The seed is read only under dropout, so nothing need be in it.
        seed = torch.empty((), dtype=torch.int64, device=given.q.device)
        dq, dk, dv, _ = self._aten._scaled_dot_product_efficient_attention_backward(
            *given[:4],
            _for_all_heads(bias_B1CT, given.q),
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


def _for_all_heads(bias_B1CT: Tensor | None, q_BNCH: Tensor) -> Tensor | None:
    return None if bias_B1CT is None else bias_B1CT.expand(-1, q_BNCH.shape[1], -1, -1)
