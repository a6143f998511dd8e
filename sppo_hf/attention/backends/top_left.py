"""Causal bands out of kernels that know only "everything" and "causal square".

Many kernels offer a causal mask just for equal numbers of queries and keys, and no window. Here a
band is cut into rectangles that such kernels can do, each call's result is merged by log-sum-exp,
and backward runs rectangle by rectangle with the merged values. A subclass gives the two kernel
calls and nothing else, so all index arithmetic is tested on the CPU with a made-up kernel.

Shapes: B batch, N query heads, K key/value heads, C query tokens, T key tokens, H head size.

[Note: cutting a window]
For rows a..b-1 (at most as many as the window) the band consists of three rectangles: the *causal*
square of the rows' own keys, the *full* rectangle of keys that all rows see, and at the far end
the *edge* square, where row i sees keys from i on. Turned around in both directions the edge is a
causal square again:

    keys  ──►   edge      full      causal
    row 0       ■ ■ ■   ■ ■ ■ ■ ■   ■ · · ·
    row 1       · ■ ■   ■ ■ ■ ■ ■   ■ ■ · ·
    row 2       · · ■   ■ ■ ■ ■ ■   ■ ■ ■ ·
    row 3       · · ·   ■ ■ ■ ■ ■   ■ ■ ■ ■
"""

from __future__ import annotations

import enum
import functools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sppo_hf.attention.backends.adapters import KernelNeeds, adapted_backward, adapted_forward
from sppo_hf.attention.backends.base import (
    AttentionOutput,
    Backend,
    BackwardInputs,
    CausalBand,
    Extent,
    Gradients,
    Mask,
    accumulation_dtype,
    empty_forward,
    merge_into,
)


class Form(enum.Enum):
    """What is visible inside a rectangle."""

    FULL = "full"
    """Every row sees every key."""
    CAUSAL = "causal"
    """A square; row i sees keys up to i."""
    EDGE = "edge"
    """A square; row i sees keys from i on."""


@dataclass(frozen=True, slots=True)
class Rectangle(Extent):
    """A rectangle of rows and keys, and what is visible in it."""

    form: Form


def cut_band(
    band: CausalBand, num_rows: int, num_keys: int, *, tile_rows: int = 512
) -> list[Rectangle]:
    """Cut a band over so many rows and keys into rectangles: each visible pair once, no hidden one.

    Args:
        band: the band.
        num_rows: query rows, C.
        num_keys: keys, T.
        tile_rows: rows that share their rectangles under a window. More rows mean fewer calls and
            more work at the two slanted sides.

    Returns:
        Rectangles in an order in which they may be merged. Without a window at most three.
    """
    rectangles: list[Rectangle] = []
    seen = band.trim(num_rows, num_keys)
    height = seen.row_stop - seen.row_start
    tile = height if seen.band.window is None else min(tile_rows, seen.band.window)
    for first in range(0, height, max(tile, 1)):
        rectangles += _cut_tile(
            seen.band, first, min(first + tile, height), seen.key_stop - seen.key_start
        )
    return [
        Rectangle(
            rectangle.row_start + seen.row_start,
            rectangle.row_stop + seen.row_start,
            rectangle.key_start + seen.key_start,
            rectangle.key_stop + seen.key_start,
            rectangle.form,
        )
        for rectangle in rectangles
        if not rectangle.empty
    ]


def _cut_tile(band: CausalBand, first: int, last: int, num_keys: int) -> Iterator[Rectangle]:
    """Rectangles of the rows first..last-1, of which there are no more than the window has keys."""
    own = band.q_start + first
    if last - first == 1:
        # All that one row sees lies side by side, its own key included; squares of one key are
        # what kernels do slowly or not at all.
        far = 0 if band.window is None else max(0, own - band.window + 1)
        yield Rectangle(first, last, far, min(own + 1, num_keys), Form.FULL)
        return
    square = min(max(num_keys - own, 0), last - first)
    yield Rectangle(first, first + square, own, own + square, Form.CAUSAL)
    yield Rectangle(first + square, last, own, num_keys, Form.FULL)  # rows behind the last key
    if band.window is None:
        yield Rectangle(first, last, 0, min(own, num_keys), Form.FULL)
        return
    shared = band.q_start + last - band.window
    yield Rectangle(first, last, max(0, shared), min(own, num_keys), Form.FULL)
    # Keys far..shared-1 are the edge; where the sequence begins inside it, or the keys end, only
    # the square cut_off..stop of it exists, and the rows above see all of that square's keys.
    far = own - band.window + 1
    cut_off = max(0, -far)
    stop = min(shared, num_keys) - far
    yield Rectangle(first + cut_off, first + stop, far + cut_off, far + stop, Form.EDGE)
    yield Rectangle(first, first + cut_off, far + cut_off, far + stop, Form.FULL)


class TopLeftBackend(Backend):
    """Backend on a kernel that can do a full rectangle and a causal square.

    The kernel calls get heads as `needs` demands them: padded, repeated or grouped by then.
    """

    needs: KernelNeeds

    widens = False
    """True if the kernel calls return results in the accumulation dtype."""

    def __init__(self, needs: KernelNeeds, *, tile_rows: int = 512) -> None:
        self.needs = needs
        self._tile_rows = tile_rows

    @abstractmethod
    def kernel_forward(
        self, q_BNCH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, *, causal: bool, scale: float
    ) -> AttentionOutput:
        """Attend over everything, or (C = T only) causally."""

    @abstractmethod
    def kernel_backward(self, given: BackwardInputs, *, causal: bool, scale: float) -> Gradients:
        """Gradient of `kernel_forward` given merged values."""

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
        assert softcap is None, f"{self.name} was chosen although scores are soft-capped"
        assert isinstance(band, CausalBand), f"{self.name} takes one document at a time"
        num_rows = q_BNCH.shape[2]
        rectangles = cut_band(band, num_rows, k_BKTH.shape[2], tile_rows=self._tile_rows)
        if not q_BNCH.shape[0]:
            return empty_forward(q_BNCH, v_BKTH.shape[3])
        if len(rectangles) == 1 and rectangles[0].rows == slice(0, num_rows):
            part = self._forward_rectangle(rectangles[0], q_BNCH, k_BKTH, v_BKTH, scale)
            return AttentionOutput(part.out_BNCH.to(q_BNCH.dtype), part.lse_BNC)
        rows = _Filling([rectangle.rows for rectangle in rectangles], num_rows)
        sums_dtype = accumulation_dtype(q_BNCH.dtype)
        out_dtype = sums_dtype if rows.overlap else q_BNCH.dtype
        out_BNCH = _empty_by_token(q_BNCH, v_BKTH.shape[3], out_dtype)
        lse_BNC = q_BNCH.new_empty(q_BNCH.shape[:3], dtype=sums_dtype)
        for gap in rows.gaps:
            out_BNCH[:, :, gap] = 0.0
            lse_BNC[:, :, gap] = float("-inf")
        for rectangle, first in zip(rectangles, rows.first, strict=True):
            part = self._forward_rectangle(rectangle, q_BNCH, k_BKTH, v_BKTH, scale)
            out, lse = out_BNCH[:, :, rectangle.rows], lse_BNC[:, :, rectangle.rows]
            if first:
                out.copy_(part.out_BNCH)
                lse.copy_(part.lse_BNC)
            else:
                merge_into(out, lse, part)
        return AttentionOutput(out_BNCH.to(q_BNCH.dtype), lse_BNC)

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
        assert softcap is None, f"{self.name} was chosen although scores are soft-capped"
        assert isinstance(band, CausalBand), f"{self.name} takes one document at a time"
        sums_dtype = accumulation_dtype(q_BNCH.dtype)
        rectangles = cut_band(band, q_BNCH.shape[2], k_BKTH.shape[2], tile_rows=self._tile_rows)
        rows = _Filling([rectangle.rows for rectangle in rectangles], q_BNCH.shape[2])
        keys = _Filling([rectangle.keys for rectangle in rectangles], k_BKTH.shape[2])
        # Only rectangles that overlap sum over the same keys; else what the kernel gives is enough.
        keys_dtype = sums_dtype if self.widens or keys.overlap else k_BKTH.dtype
        given = BackwardInputs(dout_BNCH, q_BNCH, k_BKTH, v_BKTH, out_BNCH, lse_BNC)
        dq_BNCH = _empty_by_token(q_BNCH, q_BNCH.shape[3], sums_dtype)
        dk_BKTH, dv_BKTH = (torch.empty_like(x, dtype=keys_dtype) for x in (k_BKTH, v_BKTH))
        if not q_BNCH.shape[0]:
            rectangles = []
        for sums, filling in ((dq_BNCH, rows), (dk_BKTH, keys), (dv_BKTH, keys)):
            for gap in filling.gaps:
                sums[:, :, gap] = 0.0
        for rectangle, *first in zip(rectangles, rows.first, keys.first, strict=False):
            grads = self._backward_rectangle(rectangle, given, scale)
            _write(dq_BNCH[:, :, rectangle.rows], grads.dq_BNCH, first=first[0])
            _write(dk_BKTH[:, :, rectangle.keys], grads.dk_BKTH, first=first[1])
            _write(dv_BKTH[:, :, rectangle.keys], grads.dv_BKTH, first=first[1])
        return Gradients(dq_BNCH.to(q_BNCH.dtype), dk_BKTH, dv_BKTH)

    def _forward_rectangle(
        self, rectangle: Rectangle, q_BNCH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, scale: float
    ) -> AttentionOutput:
        """Attend over one rectangle; an edge is turned around."""
        form = rectangle.form
        q = _turn(q_BNCH[:, :, rectangle.rows], form)
        k, v = (_turn(x[:, :, rectangle.keys], form) for x in (k_BKTH, v_BKTH))
        unmasked = form is Form.FULL
        kernel = functools.partial(self.kernel_forward, causal=not unmasked, scale=scale)
        attended = adapted_forward(kernel, q, k, v, needs=self.needs, unmasked=unmasked)
        return AttentionOutput(*(_turn(x, form) for x in attended))

    def _backward_rectangle(
        self, rectangle: Rectangle, given: BackwardInputs, scale: float
    ) -> Gradients:
        """Gradient of `_forward_rectangle`."""
        form, rows, keys = rectangle.form, rectangle.rows, rectangle.keys
        parts = zip(given, (rows, rows, keys, keys, rows, rows), strict=True)
        turned = BackwardInputs(*(_turn(x[:, :, part], form) for x, part in parts))
        unmasked = form is Form.FULL
        kernel = functools.partial(self.kernel_backward, causal=not unmasked, scale=scale)
        grads = adapted_backward(kernel, turned, needs=self.needs, unmasked=unmasked)
        return Gradients(*(_turn(grad, form) for grad in grads))


def _turn(x: Tensor, form: Form) -> Tensor:
    """Reverse the tokens of an edge, which makes a causal square of it, or back."""
    return x.flip(2) if form is Form.EDGE else x


class _Filling:
    """How parts that may overlap fill a run of tokens without zeros to begin with.

    A part that meets no part before it is written, any other is added; what no written part covers
    must be blanked first. Over tens of thousands of tokens a pass for zeros and one to add to them
    cost more than the part itself takes to be written.
    """

    def __init__(self, parts: Sequence[slice], num_tokens: int) -> None:
        """Plan the parts, half-open ranges in tokens, in the order in which they come."""
        written: list[slice] = []
        self.first: list[bool] = []
        """Of each part: whether it is written rather than added."""
        for part in parts:
            new = all(part.stop <= other.start or other.stop <= part.start for other in written)
            self.first.append(new)
            written += [part] if new else []
        self.overlap = not all(self.first)
        """Whether any part is added."""
        self.gaps: list[slice] = []
        """Tokens that no written part covers."""
        end = 0
        for part in [*sorted(written, key=lambda x: x.start), slice(num_tokens, num_tokens)]:
            self.gaps += [slice(end, part.start)] if part.start > end else []
            end = part.stop


def _write(sums: Tensor, part: Tensor, *, first: bool) -> None:
    if first:
        sums.copy_(part)
    else:
        sums += part


def _empty_by_token(q_BNCH: Tensor, head_size: int, dtype: torch.dtype) -> Tensor:
    """Memory for `[B, N, C, H]` that lies as projections give and take it: `[B, C, N, H]`."""
    num_rows, num_heads, num_tokens, _ = q_BNCH.shape
    return q_BNCH.new_empty(num_rows, num_tokens, num_heads, head_size, dtype=dtype).transpose(1, 2)
