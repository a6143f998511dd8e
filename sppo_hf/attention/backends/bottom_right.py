"""Causal bands by one call of a kernel that aligns its mask at the bottom right.

Flash-attention kernels take more keys than queries, let the last query see the last key, and know
windows and grouped heads. A band then is one call, without merging. Only padded queries, which
stand behind the last key, need a second one. Packed documents are one call too, if the kernel takes
where each begins. As in `top_left`, a subclass gives the kernel calls, so the index arithmetic is
tested on the CPU with a made-up kernel.

Shapes: B batch, N query heads, K key/value heads, C query tokens, T key tokens, H head size.
"""

from __future__ import annotations

import functools
import itertools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sppo_hf.attention.backends.adapters import KernelNeeds, adapted_backward, adapted_forward
from sppo_hf.attention.backends.base import (
    AttentionOutput,
    Backend,
    BackwardInputs,
    CausalBand,
    Documents,
    Extent,
    Gradients,
    Mask,
    accumulation_dtype,
    empty_forward,
)


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a row sees around its own key, where the last row's own key is the last key.

    Attributes are in tokens; None is unlimited.
    """

    left: int | None
    right: int | None

    @property
    def causal(self) -> bool:
        """True if a row sees nothing behind its own key."""
        return self.right == 0

    @property
    def unmasked(self) -> bool:
        """True if every row sees every key."""
        return self.left is None and self.right is None


@dataclass(frozen=True, slots=True)
class AlignedCall(Extent):
    """One kernel call: its rows and keys, and the reach between them."""

    reach: Reach
    offsets: Offsets | None = None
    """Where documents begin in these rows and keys, if they are several."""


def align_band(band: CausalBand, num_rows: int, num_keys: int) -> list[AlignedCall]:
    """Say a band over so many rows and keys as at most two bottom-right-aligned calls.

    Returns:
        The calls, with disjoint rows; none if no row sees a key. Rows in no call see nothing.
    """
    seen = band.trim(num_rows, num_keys)
    if seen.empty:
        return []
    window = seen.band.window
    # Position of the first row, in the coordinates of `num_keys`.
    position = seen.key_start + seen.band.q_start
    split = seen.row_start + max(0, seen.key_stop - position)
    calls: list[AlignedCall] = []
    if split > seen.row_start:
        reach = Reach(None if window is None else window - 1, 0)
        calls.append(AlignedCall(seen.row_start, split, seen.key_start, seen.key_stop, reach))
    if split < seen.row_stop:
        # The kernel takes these rows to end at the last key; they stand `behind` tokens later.
        behind = position + (seen.row_stop - seen.row_start) - seen.key_stop
        reach = Reach(None, None)
        if window is not None:
            reach = Reach(window - 1 - behind, behind)
        calls.append(AlignedCall(split, seen.row_stop, seen.key_start, seen.key_stop, reach))
    return calls


class Offsets(NamedTuple):
    """Where documents begin, as kernels for variable lengths take it."""

    cu_q: Tensor
    """First query of each document, and their number: int32, `[documents + 1]`."""

    cu_k: Tensor
    """The same of keys."""

    max_q: int
    """Queries of the longest document."""

    max_k: int
    """Keys of the longest document."""


@functools.lru_cache(maxsize=64)
def _offsets(documents: Documents, device: torch.device) -> Offsets:
    """The offsets on a device; layer after layer asks for the same."""

    def sums(lengths: tuple[int, ...]) -> Tensor:
        made = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        # From pinned memory, or the host would wait for the device.
        return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made

    queries, keys = documents.num_queries, documents.num_keys
    return Offsets(sums(queries), sums(keys), max(queries), max(keys))


def with_documents(
    variants: tuple[Callable[..., Backend], ...],
) -> tuple[Callable[[], Backend], ...]:
    """Each variant with packed documents left to the kernel, then without."""
    return tuple(
        functools.partial(make, documents_at_once=at_once)
        for make in variants
        for at_once in (True, False)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """What a kernel is told beside its tensors."""

    reach: Reach
    scale: float
    softcap: float | None
    offsets: Offsets | None
    """Where documents begin; None where rows are one each."""


class BottomRightBackend(Backend):
    """Backend on a kernel that aligns masks at the bottom right.

    The kernel calls get tensors as [B, tokens, heads, H], and heads as `needs` demands them; given
    `offsets`, as [tokens, heads, H] and the log-sum-exp as [N, C].
    """

    needs: KernelNeeds

    @abstractmethod
    def kernel_forward(
        self, q_BCNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, call: KernelCall
    ) -> tuple[Tensor, Tensor]:
        """Attend; returns `out_BCNH` and `lse_BNC`."""

    @abstractmethod
    def kernel_backward(
        self, given: BackwardInputs, call: KernelCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of `kernel_forward` given merged values; same layout as the inputs."""

    @torch.no_grad()
    def forward(
        self,
        q_BNCH: Tensor,
        k_BKTH: Tensor,
        v_BKTH: Tensor,
        *,
        band: Mask,
        scale: float,
        softcap: float | None = None,
    ) -> AttentionOutput:
        """See `Backend.forward`."""
        parts: list[tuple[AlignedCall, AttentionOutput]] = []
        for call in _calls(band, q_BNCH, k_BKTH):
            told = KernelCall(reach=call.reach, scale=scale, softcap=softcap, offsets=call.offsets)
            part = adapted_forward(
                functools.partial(self._dense_forward, told),
                q_BNCH[:, :, call.rows],
                k_BKTH[:, :, call.keys],
                v_BKTH[:, :, call.keys],
                needs=self.needs,
                unmasked=call.reach.unmasked,
            )
            if call.rows == slice(0, q_BNCH.shape[2]):
                return part
            parts.append((call, part))
        out_BNCH, lse_BNC = empty_forward(q_BNCH, v_BKTH.shape[3])
        for call, part in parts:
            out_BNCH[:, :, call.rows] = part.out_BNCH
            lse_BNC[:, :, call.rows] = part.lse_BNC
        return AttentionOutput(out_BNCH, lse_BNC)

    @torch.no_grad()
    def backward(
        self,
        dout_BNCH: Tensor,
        q_BNCH: Tensor,
        k_BKTH: Tensor,
        v_BKTH: Tensor,
        out_BNCH: Tensor,
        lse_BNC: Tensor,
        *,
        band: Mask,
        scale: float,
        softcap: float | None = None,
    ) -> Gradients:
        """See `Backend.backward`."""
        whole = slice(0, q_BNCH.shape[2]), slice(0, k_BKTH.shape[2])
        parts: list[tuple[AlignedCall, Gradients]] = []
        for call in _calls(band, q_BNCH, k_BKTH):
            told = KernelCall(reach=call.reach, scale=scale, softcap=softcap, offsets=call.offsets)
            part = adapted_backward(
                functools.partial(self._dense_backward, told),
                BackwardInputs(
                    dout_BNCH[:, :, call.rows],
                    q_BNCH[:, :, call.rows],
                    k_BKTH[:, :, call.keys],
                    v_BKTH[:, :, call.keys],
                    out_BNCH[:, :, call.rows],
                    lse_BNC[:, :, call.rows],
                ),
                needs=self.needs,
                unmasked=call.reach.unmasked,
            )
            if (call.rows, call.keys) == whole:
                return part
            parts.append((call, part))
        # Two calls share their keys, so their gradients are summed in the accumulation dtype.
        keys_dtype = accumulation_dtype(k_BKTH.dtype) if len(parts) > 1 else k_BKTH.dtype
        dq_BNCH = torch.zeros_like(q_BNCH)
        dk_BKTH, dv_BKTH = (torch.zeros_like(x, dtype=keys_dtype) for x in (k_BKTH, v_BKTH))
        for call, part in parts:
            dq_BNCH[:, :, call.rows] = part.dq_BNCH
            dk_BKTH[:, :, call.keys] += part.dk_BKTH
            dv_BKTH[:, :, call.keys] += part.dv_BKTH
        return Gradients(dq_BNCH, dk_BKTH, dv_BKTH)

    def _dense_forward(
        self, call: KernelCall, q_BNCH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor
    ) -> AttentionOutput:
        tensors = (_by_token(x, call) for x in (q_BNCH, k_BKTH, v_BKTH))
        out_BCNH, lse_BNC = self.kernel_forward(*tensors, call=call)
        if call.offsets is not None:
            out_BCNH, lse_BNC = out_BCNH.unsqueeze(0), lse_BNC.unsqueeze(0)
        return AttentionOutput(out_BCNH.transpose(1, 2), lse_BNC)

    def _dense_backward(self, call: KernelCall, given: BackwardInputs) -> Gradients:
        # Kernels step through the log-sum-exp by its shape, whatever its strides are.
        lse = given.lse.contiguous()
        lse = lse if call.offsets is None else lse.squeeze(0)
        by_token = (_by_token(x, call) for x in given[:5])
        grads = self.kernel_backward(BackwardInputs(*by_token, lse=lse), call)
        batched = grads if call.offsets is None else (grad.unsqueeze(0) for grad in grads)
        return Gradients(*(grad.transpose(1, 2) for grad in batched))


def _calls(band: Mask, q_BNCH: Tensor, k_BKTH: Tensor) -> list[AlignedCall]:
    """The kernel calls of a mask; none if no row sees a key."""
    num_rows, num_keys = q_BNCH.shape[2], k_BKTH.shape[2]
    if isinstance(band, Documents):
        reach = Reach(None if band.window is None else band.window - 1, 0)
        offsets = _offsets(band, q_BNCH.device)
        return [AlignedCall(0, num_rows, 0, num_keys, reach, offsets)]
    return align_band(band, num_rows, num_keys) if q_BNCH.shape[0] else []


def _by_token(x_BNCH: Tensor, call: KernelCall) -> Tensor:
    """Tokens before heads, as kernels take them; without the batch where there are offsets."""
    x_BCNH = x_BNCH.transpose(1, 2)
    return x_BCNH if call.offsets is None else x_BCNH.squeeze(0)
