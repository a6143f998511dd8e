"""Attention in plain PyTorch: slow, exact, any dtype, any device.

Every other backend is compared with this one. Scores exist only for one tile of queries and one
tile of keys, so memory is bounded for any sequence length. Sums run in float32, or in
float64 for float64 inputs.

Shapes: B batch, N query heads, K key/value heads, C query tokens, T key tokens, S keys that a query
may read, H head size; lower case c and t for the tokens of one tile, and R = N/K * c for a tile's
queries grouped by key head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, Unpack

import torch
from torch import Tensor

from sppo_hf.attention.backends.adapters import group_queries, ungroup_queries
from sppo_hf.attention.backends.base import (
    AttentionOutput,
    AttentionSpec,
    Backend,
    BackwardInputs,
    CausalBand,
    Documents,
    Gradients,
    Mask,
    Scores,
    accumulation_dtype,
    chosen_mask,
    empty_forward,
    merge_into,
    register_backend,
)

_TILE_BYTES = 32 << 20
_TILE_ROWS = 128


class _Tile(NamedTuple):
    """The ranges of one tile of queries and keys, and the mask between them."""

    rows: slice
    keys: slice
    band: CausalBand
    """Its positions count from the first of all given queries and keys, not of the tile's."""


_T = TypeVar("_T")


def _without_autocast(method: Callable[..., _T]) -> Callable[..., _T]:
    """Let products of a method have the dtype of their factors, which autocast would narrow."""

    @functools.wraps(method)
    def run(self: Reference, first: Tensor, /, *others: Tensor, **settings: Any) -> _T:
        kind = first.device.type
        # Autocast does not support the meta device.
        if kind == "meta" or not torch.is_autocast_enabled(kind):
            return method(self, first, *others, **settings)
        with torch.autocast(kind, enabled=False):
            return method(self, first, *others, **settings)

    return run


@register_backend("reference")
class Reference(Backend):
    """Tiled attention from elementary operations, to compare the others with."""

    documents_at_once = True

    def __init__(self, tile_bytes: int = _TILE_BYTES) -> None:
        """Make one; a tile of scores takes `tile_bytes`, and a few exist at the same time."""
        self._tile_bytes = tile_bytes

    def reason_unsupported(self, requirement: AttentionSpec) -> str | None:
        """Only dtypes that are not floating-point are unsupported."""
        if not requirement.dtype.is_floating_point:
            return f"{requirement.dtype} is not a floating-point type"
        return None

    @_without_autocast
    @torch.no_grad()
    def forward(
        self, q_BNCH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, **scores: Unpack[Scores]
    ) -> AttentionOutput:
        """See `Backend.forward`."""
        num_kv_heads, scale, softcap = k_BKTH.shape[1], scores["scale"], scores.get("softcap")
        out_BNCH, lse_BNC = empty_forward(q_BNCH, v_BKTH.shape[3])
        sums_dtype = accumulation_dtype(q_BNCH.dtype)
        out_BNCH = out_BNCH.to(sums_dtype)
        chosen_BCS = scores.get("chosen_BCS")
        for rows, keys, seen in self._tiles(q_BNCH, k_BKTH, scores["band"]):
            q_BKRH = group_queries(q_BNCH[:, :, rows], num_kv_heads).to(sums_dtype)
            v_BKtH = v_BKTH[:, :, keys].to(sums_dtype)
            s_BKRt, _ = _scores(q_BKRH, k_BKTH[:, :, keys], scale, softcap)
            _hide(s_BKRt, seen, rows, keys, chosen_BCS)
            lse_BKR = torch.logsumexp(s_BKRt, dim=-1)
            p_BKRt = s_BKRt.sub_(_finite(lse_BKR).unsqueeze(-1)).exp_()
            part = AttentionOutput(
                ungroup_queries(p_BKRt @ v_BKtH, q_BNCH.shape[1]),
                lse_BKR.view(*q_BNCH.shape[:2], rows.stop - rows.start),
            )
            merge_into(out_BNCH[:, :, rows], lse_BNC[:, :, rows], part)
        return AttentionOutput(out_BNCH.to(q_BNCH.dtype), lse_BNC)

    @_without_autocast
    @torch.no_grad()
    def backward(self, *given: Tensor, **scores: Unpack[Scores]) -> Gradients:
        """See `Backend.backward`."""
        dout_BNCH, q_BNCH, k_BKTH, v_BKTH, out_BNCH, lse_BNC = BackwardInputs(*given)
        scale, softcap = scores["scale"], scores.get("softcap")
        num_heads, num_kv_heads = q_BNCH.shape[1], k_BKTH.shape[1]
        sums_dtype = accumulation_dtype(q_BNCH.dtype)
        dq_BNCH = torch.zeros(q_BNCH.shape, dtype=sums_dtype, device=q_BNCH.device)
        dk_BKTH = torch.zeros(k_BKTH.shape, dtype=sums_dtype, device=k_BKTH.device)
        dv_BKTH = torch.zeros(v_BKTH.shape, dtype=sums_dtype, device=v_BKTH.device)
        for rows, keys, seen in self._tiles(q_BNCH, k_BKTH, scores["band"]):
            q_BKRH = group_queries(q_BNCH[:, :, rows], num_kv_heads).to(sums_dtype)
            dout_BKRH = group_queries(dout_BNCH[:, :, rows], num_kv_heads).to(sums_dtype)
            out_BKRH = group_queries(out_BNCH[:, :, rows], num_kv_heads).to(sums_dtype)
            lse_BKR = group_queries(lse_BNC[:, :, rows].unsqueeze(-1), num_kv_heads).squeeze(-1)
            k_BKtH = k_BKTH[:, :, keys].to(sums_dtype)
            s_BKRt, slope_BKRt = _scores(q_BKRH, k_BKtH, scale, softcap)
            _hide(s_BKRt, seen, rows, keys, scores.get("chosen_BCS"))
            p_BKRt = s_BKRt.sub_(_finite(lse_BKR.to(sums_dtype)).unsqueeze(-1)).exp_()
            dv_BKTH[:, :, keys] += p_BKRt.transpose(2, 3) @ dout_BKRH
            ds_BKRt = dout_BKRH @ v_BKTH[:, :, keys].to(sums_dtype).transpose(2, 3)
            ds_BKRt.sub_((dout_BKRH * out_BKRH).sum(-1, keepdim=True)).mul_(p_BKRt).mul_(scale)
            if slope_BKRt is not None:
                ds_BKRt.mul_(slope_BKRt)
            dq_BNCH[:, :, rows] += ungroup_queries(ds_BKRt @ k_BKtH, num_heads)
            dk_BKTH[:, :, keys] += ds_BKRt.transpose(2, 3) @ q_BKRH
        return Gradients(dq_BNCH.to(q_BNCH.dtype), dk_BKTH, dv_BKTH)

    def _tiles(self, q_BNCH: Tensor, k_BKTH: Tensor, mask: Mask) -> Iterator[_Tile]:
        """Yield tiles that cover all visible pairs of the mask."""
        if not (q_BNCH.shape[0] and q_BNCH.shape[1]):
            return
        row_bytes = q_BNCH.shape[0] * q_BNCH.shape[1] * accumulation_dtype(q_BNCH.dtype).itemsize
        tile_rows = max(1, min(_TILE_ROWS, self._tile_bytes // row_bytes))
        tile_keys = max(1, self._tile_bytes // (row_bytes * tile_rows))
        if isinstance(mask, Documents):
            documents = list(mask)
        else:
            documents = [(slice(0, q_BNCH.shape[2]), slice(0, k_BKTH.shape[2]), mask)]
        for all_rows, all_keys, own in documents:
            band = CausalBand(own.q_start + all_keys.start - all_rows.start, own.window)
            for first in range(all_rows.start, all_rows.stop, tile_rows):
                last = min(first + tile_rows, all_rows.stop)
                # Trimmed tile by tile, so that keys which only other tiles see are skipped.
                shifted = CausalBand(band.q_start + first - all_keys.start, band.window)
                seen = shifted.trim(last - first, all_keys.stop - all_keys.start)
                rows = slice(first + seen.row_start, first + seen.row_stop)
                key_stop = all_keys.start + seen.key_stop
                for key in range(all_keys.start + seen.key_start, key_stop, tile_keys):
                    yield _Tile(rows, slice(key, min(key + tile_keys, key_stop)), band)


def _finite(lse: Tensor) -> Tensor:
    """Replace -inf by 0, so that hidden scores give probability 0, not NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def _scores(
    q_BKRH: Tensor, k_BKtH: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return scores and, with a soft cap, their derivative by uncapped scores: ``1 - tanh^2``."""
    s_BKRt = (q_BKRH @ k_BKtH.to(q_BKRH.dtype).transpose(2, 3)).mul_(scale)
    if softcap is None:
        return s_BKRt, None
    tanh_BKRt = s_BKRt.div_(softcap).tanh_()
    return tanh_BKRt * softcap, 1.0 - tanh_BKRt.square_()


def _hide(
    s_BKRt: Tensor, band: CausalBand, rows: slice, keys: slice, chosen_BCS: Tensor | None
) -> None:
    device = s_BKRt.device
    position_c1 = band.q_start + torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    key_t = torch.arange(keys.start, keys.stop, device=device)
    hidden_ct = key_t > position_c1
    if band.window is not None:
        hidden_ct |= key_t <= position_c1 - band.window
    grouped = s_BKRt.view(*s_BKRt.shape[:2], -1, *hidden_ct.shape)
    if chosen_BCS is not None:
        hidden_ct = (hidden_ct | ~chosen_mask(chosen_BCS[:, rows], keys))[:, None, None]
    grouped.masked_fill_(hidden_ct, float("-inf"))
