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

from sppo_hf.attention.backends.base import (
    AttentionOutput,
    Backend,
    CausalBand,
    Documents,
    DocumentsBackend,
    Gradients,
    accumulation_dtype,
    empty_forward,
)
from sppo_hf.attention.backends.heads import KernelNeeds, adapted_backward, adapted_forward


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
class AlignedCall:
    """One kernel call: half-open ranges of rows and keys in tokens, and the reach between them."""

    row_start: int
    row_stop: int
    key_start: int
    key_stop: int
    reach: Reach

    @property
    def rows(self) -> slice:
        """Query tokens of the call."""
        return slice(self.row_start, self.row_stop)

    @property
    def keys(self) -> slice:
        """Key tokens of the call."""
        return slice(self.key_start, self.key_stop)


def align_band(band: CausalBand, num_rows: int, num_keys: int) -> list[AlignedCall]:
    """Say a band as at most two bottom-right-aligned calls with disjoint rows.

    Args:
        band: the band.
        num_rows: query rows, C.
        num_keys: keys, T.

    Returns:
        The calls; none if no row sees a key. Rows in no call see nothing.
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

    @classmethod
    def of(cls, documents: Documents, device: torch.device) -> Offsets:
        """The offsets on a device; layer after layer asks for the same."""
        return _offsets(documents, device)


@functools.lru_cache(maxsize=64)
def _offsets(documents: Documents, device: torch.device) -> Offsets:
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


class BottomRightBackend(DocumentsBackend):
    """Backend on a kernel that aligns masks at the bottom right.

    The kernel calls get tensors as [B, tokens, heads, H], and heads as `needs` demands them; given
    `offsets`, as [tokens, heads, H] and the log-sum-exp as [N, C].
    """

    needs: KernelNeeds

    @abstractmethod
    def kernel_forward(
        self,
        q_BCNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        *,
        reach: Reach,
        scale: float,
        softcap: float | None,
        offsets: Offsets | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend; returns `out_BCNH` and `lse_BNC`."""

    @abstractmethod
    def kernel_backward(
        self,
        dout_BCNH: Tensor,
        q_BCNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        out_BCNH: Tensor,
        lse_BNC: Tensor,
        *,
        reach: Reach,
        scale: float,
        softcap: float | None,
        offsets: Offsets | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of `kernel_forward` given merged values; same layout as the inputs."""

    @torch.no_grad()
    def forward(
        self,
        q_BNCH: Tensor,
        k_BKTH: Tensor,
        v_BKTH: Tensor,
        *,
        band: CausalBand,
        scale: float,
        softcap: float | None = None,
    ) -> AttentionOutput:
        """See `Backend.forward`."""
        num_rows = q_BNCH.shape[2]
        calls = align_band(band, num_rows, k_BKTH.shape[2]) if q_BNCH.shape[0] else []
        parts: list[AttentionOutput] = []
        for call in calls:
            kernel = functools.partial(
                self._dense_forward, reach=call.reach, scale=scale, softcap=softcap
            )
            parts.append(
                adapted_forward(
                    kernel,
                    q_BNCH[:, :, call.rows],
                    k_BKTH[:, :, call.keys],
                    v_BKTH[:, :, call.keys],
                    needs=self.needs,
                    unmasked=call.reach.unmasked,
                )
            )
        if len(calls) == 1 and calls[0].rows == slice(0, num_rows):
            return parts[0]
        out_BNCH, lse_BNC = empty_forward(q_BNCH, v_BKTH.shape[3])
        for call, part in zip(calls, parts, strict=True):
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
        band: CausalBand,
        scale: float,
        softcap: float | None = None,
    ) -> Gradients:
        """See `Backend.backward`."""
        num_rows, num_keys = q_BNCH.shape[2], k_BKTH.shape[2]
        calls = align_band(band, num_rows, num_keys) if q_BNCH.shape[0] else []
        parts: list[Gradients] = []
        for call in calls:
            kernel = functools.partial(
                self._dense_backward, reach=call.reach, scale=scale, softcap=softcap
            )
            parts.append(
                adapted_backward(
                    kernel,
                    dout_BNCH[:, :, call.rows],
                    q_BNCH[:, :, call.rows],
                    k_BKTH[:, :, call.keys],
                    v_BKTH[:, :, call.keys],
                    AttentionOutput(out_BNCH[:, :, call.rows], lse_BNC[:, :, call.rows]),
                    needs=self.needs,
                    unmasked=call.reach.unmasked,
                )
            )
        if len(calls) == 1 and calls[0].rows == slice(0, num_rows):
            if calls[0].keys == slice(0, num_keys):
                return parts[0]
        # Two calls share their keys, so their gradients are summed in the accumulation dtype.
        keys_dtype = accumulation_dtype(k_BKTH.dtype) if len(calls) > 1 else k_BKTH.dtype
        dq_BNCH = torch.zeros_like(q_BNCH)
        dk_BKTH, dv_BKTH = (torch.zeros_like(x, dtype=keys_dtype) for x in (k_BKTH, v_BKTH))
        for call, part in zip(calls, parts, strict=True):
            dq_BNCH[:, :, call.rows] = part.dq_BNCH
            dk_BKTH[:, :, call.keys] += part.dk_BKTH
            dv_BKTH[:, :, call.keys] += part.dv_BKTH
        return Gradients(dq_BNCH, dk_BKTH, dv_BKTH)

    @torch.no_grad()
    def forward_documents(
        self,
        q_BNCH: Tensor,
        k_BKTH: Tensor,
        v_BKTH: Tensor,
        *,
        documents: Documents,
        window: int | None,
        scale: float,
        softcap: float | None = None,
    ) -> AttentionOutput:
        """See `DocumentsBackend.forward_documents`."""
        kernel = functools.partial(
            self._dense_forward,
            reach=Reach(None if window is None else window - 1, 0),
            scale=scale,
            softcap=softcap,
            offsets=Offsets.of(documents, q_BNCH.device),
        )
        return adapted_forward(kernel, q_BNCH, k_BKTH, v_BKTH, needs=self.needs, unmasked=False)

    @torch.no_grad()
    def backward_documents(
        self,
        dout_BNCH: Tensor,
        q_BNCH: Tensor,
        k_BKTH: Tensor,
        v_BKTH: Tensor,
        out_BNCH: Tensor,
        lse_BNC: Tensor,
        *,
        documents: Documents,
        window: int | None,
        scale: float,
        softcap: float | None = None,
    ) -> Gradients:
        """See `DocumentsBackend.backward_documents`."""
        kernel = functools.partial(
            self._dense_backward,
            reach=Reach(None if window is None else window - 1, 0),
            scale=scale,
            softcap=softcap,
            offsets=Offsets.of(documents, q_BNCH.device),
        )
        attended = AttentionOutput(out_BNCH, lse_BNC)
        return adapted_backward(
            kernel, dout_BNCH, q_BNCH, k_BKTH, v_BKTH, attended, needs=self.needs, unmasked=False
        )

    def _dense_forward(
        self,
        q_BNCH: Tensor,
        k_BKTH: Tensor,
        v_BKTH: Tensor,
        *,
        reach: Reach,
        scale: float,
        softcap: float | None,
        offsets: Offsets | None = None,
    ) -> AttentionOutput:
        """`kernel_forward` on tensors with heads before tokens."""
        out_BCNH, lse_BNC = self.kernel_forward(
            *(_by_token(x, offsets) for x in (q_BNCH, k_BKTH, v_BKTH)),
            reach=reach,
            scale=scale,
            softcap=softcap,
            offsets=offsets,
        )
        if offsets is not None:
            out_BCNH, lse_BNC = out_BCNH.unsqueeze(0), lse_BNC.unsqueeze(0)
        return AttentionOutput(out_BCNH.transpose(1, 2), lse_BNC)

    def _dense_backward(
        self,
        dout_BNCH: Tensor,
        q_BNCH: Tensor,
        k_BKTH: Tensor,
        v_BKTH: Tensor,
        attended: AttentionOutput,
        *,
        reach: Reach,
        scale: float,
        softcap: float | None,
        offsets: Offsets | None = None,
    ) -> Gradients:
        """`kernel_backward` on tensors with heads before tokens."""
        # Kernels step through the log-sum-exp by its shape, whatever its strides are.
        lse = attended.lse_BNC.contiguous()
        grads = self.kernel_backward(
            _by_token(dout_BNCH, offsets),
            _by_token(q_BNCH, offsets),
            _by_token(k_BKTH, offsets),
            _by_token(v_BKTH, offsets),
            _by_token(attended.out_BNCH, offsets),
            lse if offsets is None else lse.squeeze(0),
            reach=reach,
            scale=scale,
            softcap=softcap,
            offsets=offsets,
        )
        batched = grads if offsets is None else (grad.unsqueeze(0) for grad in grads)
        return Gradients(*(grad.transpose(1, 2) for grad in batched))


def _by_token(x_BNCH: Tensor, offsets: Offsets | None) -> Tensor:
    """Tokens before heads, as kernels take them; without the batch where there are offsets."""
    x_BCNH = x_BNCH.transpose(1, 2)
    return x_BCNH if offsets is None else x_BCNH.squeeze(0)
