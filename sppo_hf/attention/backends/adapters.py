"""Base classes that turn a fused kernel's abilities into a full `Backend`.

Kernels differ in the masks and heads that they accept. `TopLeftBackend` serves kernels that know
only "no mask" and "causal square": the band is cut into such rectangles, whose results are merged
by log-sum-exp. `BottomRightBackend` serves flash-attention kernels, which take more keys than
queries, align the causal mask at the bottom right and know windows and packed documents: usually
one call. `adapted_forward` and `adapted_backward` pad head sizes and repeat or group heads. A
subclass supplies the two kernel calls; the index arithmetic is tested on the CPU with fake kernels.

Shapes: B batch, N query heads, K key/value heads, G = N/K, C query tokens, T key tokens, H head
size; R = G*C for queries grouped by key head.

[Note: cutting a window]
For rows a..b-1 (at most as many as the window has keys) the band consists of three rectangles: the
*causal* square of the rows' own keys, the *full* rectangle of keys that all rows see, and at the
far end the *edge* square, where row i sees keys from i on. With both directions reversed, the edge
is a causal square again:

    keys  ──►   edge      full      causal
    row 0       ■ ■ ■   ■ ■ ■ ■ ■   ■ · · ·
    row 1       · ■ ■   ■ ■ ■ ■ ■   ■ ■ · ·
    row 2       · · ■   ■ ■ ■ ■ ■   ■ ■ ■ ·
    row 3       · · ·   ■ ■ ■ ■ ■   ■ ■ ■ ■
"""

from __future__ import annotations

import enum
import functools
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Unpack

import torch
from torch import Tensor
from torch.nn import functional

from sppo_hf.attention.backends.base import (
    AttentionOutput,
    Backend,
    BackwardInputs,
    CausalBand,
    Documents,
    Extent,
    Gradients,
    Mask,
    Scores,
    accumulation_dtype,
    chosen_mask,
    empty_forward,
    merge_into,
)
from sppo_hf.planning.tile_sizes import BIAS_BYTES

_BIAS_MULTIPLE = 16
"""Elements of which a row of a bias has a multiple in memory: CUTLASS reads 16 bytes at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNeeds:
    """What a kernel requires of its heads."""

    grouped_heads: bool
    """Takes fewer key/value heads than query heads."""

    head_multiple: int = 1
    """Head sizes must be a multiple of this."""

    equal_head_sizes: bool = True
    """Values must have the head size of queries and keys."""

    def padded_sizes(self, qk_head_size: int, v_head_size: int) -> tuple[int, int]:
        """Return the padded head sizes of queries/keys and of values."""
        qk_size, v_size = (
            -(-size // self.head_multiple) * self.head_multiple
            for size in (qk_head_size, v_head_size)
        )
        if self.equal_head_sizes:
            qk_size = v_size = max(qk_size, v_size)
        return qk_size, v_size


def head_variants(
    make: Callable[..., Backend], *, native_sizes: bool
) -> tuple[Callable[[], Backend], ...]:
    """Return variants of a backend, from least to most adaptation of heads before the kernel.

    `native_sizes`: whether values of another head size than the keys' are first tried unpadded.
    """
    sizes = (False, True) if native_sizes else (True,)
    return tuple(
        functools.partial(make, grouped_heads=grouped, equal_head_sizes=equal)
        for grouped in (True, False)
        for equal in sizes
    )


def adapted_forward(
    kernel: Callable[[Tensor, Tensor, Tensor], AttentionOutput],
    q_BNCH: Tensor,
    k_BKTH: Tensor,
    v_BKTH: Tensor,
    *,
    needs: KernelNeeds,
    unmasked: bool,
) -> AttentionOutput:
    """Call a forward kernel with heads as it needs them; returns results in the callers' heads.

    `unmasked`: every query sees every key, so queries of a group may be concatenated.
    """
    num_heads, num_kv_heads = q_BNCH.shape[1], k_BKTH.shape[1]
    qk_size, v_size = needs.padded_sizes(q_BNCH.shape[3], v_BKTH.shape[3])
    q, k, v = _shape(q_BNCH, qk_size), _shape(k_BKTH, qk_size), _shape(v_BKTH, v_size)
    ungrouped = num_heads != num_kv_heads and not needs.grouped_heads
    if ungrouped and unmasked:
        q = group_queries(q, num_kv_heads)
    elif ungrouped:
        k, v = repeat_heads(k, num_heads), repeat_heads(v, num_heads)
    out, lse = kernel(q, k, v)
    if ungrouped and unmasked:
        out = ungroup_queries(out, num_heads)
        lse = ungroup_queries(lse.unsqueeze(-1), num_heads).squeeze(-1)
    return AttentionOutput(out[..., : v_BKTH.shape[3]], lse)


def adapted_backward(
    kernel: Callable[[BackwardInputs], Gradients],
    given: BackwardInputs,
    *,
    needs: KernelNeeds,
    unmasked: bool,
) -> Gradients:
    """Call a backward kernel as `adapted_forward` calls a forward one."""
    num_heads, num_kv_heads = given.q.shape[1], given.k.shape[1]
    qk_size, v_size = needs.padded_sizes(given.q.shape[3], given.v.shape[3])
    q, k = (_shape(x, qk_size) for x in (given.q, given.k))
    dout, v, out = (_shape(x, v_size) for x in (given.dout, given.v, given.out))
    lse = given.lse
    ungrouped = num_heads != num_kv_heads and not needs.grouped_heads
    if ungrouped and unmasked:
        dout, q, out = (group_queries(x, num_kv_heads) for x in (dout, q, out))
        lse = group_queries(lse.unsqueeze(-1), num_kv_heads).squeeze(-1)
    elif ungrouped:
        k, v = repeat_heads(k, num_heads), repeat_heads(v, num_heads)
    dq, dk, dv = kernel(BackwardInputs(dout, q, k, v, out, lse))
    if ungrouped and unmasked:
        dq = ungroup_queries(dq, num_heads)
    dk, dv = sum_repeated_heads(dk, num_kv_heads), sum_repeated_heads(dv, num_kv_heads)
    qk_size, v_size = given.q.shape[3], given.v.shape[3]
    return Gradients(dq[..., :qk_size], dk[..., :qk_size], dv[..., :v_size])


def repeat_heads(x_BKTH: Tensor, num_heads: int) -> Tensor:
    """Repeat key heads to the number of query heads, N/K times the bytes."""
    num_kv_heads = x_BKTH.shape[1]
    return x_BKTH.repeat_interleave(num_heads // num_kv_heads, dim=1)


def sum_repeated_heads(dx_BNTH: Tensor, num_kv_heads: int) -> Tensor:
    """Return the gradient of `repeat_heads`, in float32 or wider where heads were repeated."""
    batch, num_heads, tokens, size = dx_BNTH.shape
    if num_kv_heads == num_heads:
        return dx_BNTH
    grouped_BKGTH = dx_BNTH.reshape(batch, num_kv_heads, -1, tokens, size)
    return grouped_BKGTH.sum(dim=2, dtype=torch.promote_types(dx_BNTH.dtype, torch.float32))


def group_queries(x_BNCH: Tensor, num_kv_heads: int) -> Tensor:
    """Concatenate the queries that share a key head: [B, K, R, H].

    A kernel without grouped heads then needs no repeated keys. For unmasked attention only.
    """
    batch, num_heads, tokens, size = x_BNCH.shape
    return x_BNCH.reshape(batch, num_kv_heads, num_heads // num_kv_heads * tokens, size)


def ungroup_queries(x_BKRH: Tensor, num_heads: int) -> Tensor:
    """Undo `group_queries`."""
    batch, num_kv_heads, rows, size = x_BKRH.shape
    return x_BKRH.reshape(batch, num_heads, rows * num_kv_heads // num_heads, size)


def _shape(x_BNCH: Tensor, head_size: int) -> Tensor:
    """Pad heads with zeros, and make their elements contiguous, as all kernels need.

    Zeros in queries and keys add nothing to scores; zeros in values give zeros in the output.
    """
    missing = head_size - x_BNCH.shape[3]
    if missing:
        return functional.pad(x_BNCH, (0, missing))
    return x_BNCH if x_BNCH.stride(3) == 1 else x_BNCH.contiguous()


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
    """Cut a band into rectangles that cover each visible pair once, and no hidden one.

    In an order in which they may be merged; without a window at most three. Under a window
    `tile_rows` share rectangles: more mean fewer kernel calls and more masked work.
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
    """Yield the rectangles of rows first..last-1, at most as many rows as the window has keys."""
    own = band.q_start + first
    if last - first == 1:
        # One row sees one run of keys, its own included; kernels do squares of one key slowly or
        # not at all.
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
    # Keys far..shared-1 are the edge. Where the sequence begins or the keys end inside it, only the
    # square cut_off..stop of it exists, and the rows above see all of that square's keys.
    far = own - band.window + 1
    cut_off = max(0, -far)
    stop = min(shared, num_keys) - far
    yield Rectangle(first + cut_off, first + stop, far + cut_off, far + stop, Form.EDGE)
    yield Rectangle(first, first + cut_off, far + cut_off, far + stop, Form.FULL)


def _cut_keys(rectangle: Rectangle, most_keys: int) -> Iterator[Rectangle]:
    """Yield parts of at most `most_keys` keys; a square, which is masked, stays whole."""
    first, stop = rectangle.key_start, rectangle.key_stop
    if rectangle.form is not Form.FULL or stop - first <= most_keys:
        yield rectangle
        return
    for start in range(first, stop, most_keys):
        yield replace(rectangle, key_start=start, key_stop=min(start + most_keys, stop))


class TopLeftBackend(Backend):
    """Backend on a kernel that can do a full rectangle and a causal square.

    The kernel calls get heads that are already adapted to `needs`.
    """

    needs: KernelNeeds

    widens = False
    """Whether the kernel calls return results in the accumulation dtype."""

    takes_bias = False
    """Whether the kernel calls take a bias on the scores, without which no keys can be left out."""

    most_elements: int | None = None
    """Elements from a call's first key to its last that the kernel can count; None for any."""

    def __init__(self, needs: KernelNeeds, *, tile_rows: int = 512) -> None:
        self.needs = needs
        self._tile_rows = tile_rows

    @abstractmethod
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
        """Attend to all keys, or (only if C = T) causally; with a bias only if `takes_bias`."""

    @abstractmethod
    def kernel_backward(
        self,
        given: BackwardInputs,
        *,
        causal: bool,
        scale: float,
        bias_B1CT: Tensor | None = None,
    ) -> Gradients:
        """Gradient of `kernel_forward` given merged values."""

    @torch.no_grad()
    def forward(
        self, q_BNCH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, **scores: Unpack[Scores]
    ) -> AttentionOutput:
        """See `Backend.forward`."""
        if scores.get("chosen_BCS") is not None:
            assert self.takes_bias, f"{self.name} was chosen though it cannot leave out keys"
            return self._forward_chosen(q_BNCH, k_BKTH, v_BKTH, scores)
        num_rows, scale = q_BNCH.shape[2], scores["scale"]
        rectangles = self._cut(scores, num_rows, k_BKTH, v_BKTH)
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
    def backward(self, *given: Tensor, **scores: Unpack[Scores]) -> Gradients:
        """See `Backend.backward`."""
        inputs = BackwardInputs(*given)
        if scores.get("chosen_BCS") is not None:
            assert self.takes_bias, f"{self.name} was chosen though it cannot leave out keys"
            return self._backward_chosen(inputs, scores)
        _, q_BNCH, k_BKTH, v_BKTH, *_ = inputs
        sums_dtype = accumulation_dtype(q_BNCH.dtype)
        rectangles = self._cut(scores, q_BNCH.shape[2], k_BKTH, v_BKTH)
        rows = _Filling([rectangle.rows for rectangle in rectangles], q_BNCH.shape[2])
        keys = _Filling([rectangle.keys for rectangle in rectangles], k_BKTH.shape[2])
        # Only rectangles that overlap sum over the same keys; else what the kernel gives is enough.
        keys_dtype = sums_dtype if self.widens or keys.overlap else k_BKTH.dtype
        dq_BNCH = _empty_by_token(q_BNCH, q_BNCH.shape[3], sums_dtype)
        dk_BKTH, dv_BKTH = (torch.empty_like(x, dtype=keys_dtype) for x in (k_BKTH, v_BKTH))
        if not q_BNCH.shape[0]:
            rectangles = []
        for sums, filling in ((dq_BNCH, rows), (dk_BKTH, keys), (dv_BKTH, keys)):
            for gap in filling.gaps:
                sums[:, :, gap] = 0.0
        for rectangle, *first in zip(rectangles, rows.first, keys.first, strict=False):
            grads = self._backward_rectangle(rectangle, inputs, scores["scale"])
            _write(dq_BNCH[:, :, rectangle.rows], grads.dq_BNCH, first=first[0])
            _write(dk_BKTH[:, :, rectangle.keys], grads.dk_BKTH, first=first[1])
            _write(dv_BKTH[:, :, rectangle.keys], grads.dv_BKTH, first=first[1])
        return Gradients(dq_BNCH.to(q_BNCH.dtype), dk_BKTH, dv_BKTH)

    def _forward_chosen(
        self, q_BNCH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, scores: Scores
    ) -> AttentionOutput:
        """Attend to those keys of the band that were chosen."""
        out_BNCH, lse_BNC = empty_forward(q_BNCH, v_BKTH.shape[3])
        for tile in _tiles_of_chosen(q_BNCH, k_BKTH, scores):
            kernel = functools.partial(
                self.kernel_forward, causal=False, scale=scores["scale"], bias_B1CT=tile.bias_B1ct
            )
            rows, keys = tile.extent.rows, tile.extent.keys
            q, k, v = q_BNCH[:, :, rows], k_BKTH[:, :, keys], v_BKTH[:, :, keys]
            out, lse = adapted_forward(kernel, q, k, v, needs=self.needs, unmasked=False)
            blind_B1c = tile.blind_Bc[:, None]
            out_BNCH[:, :, rows] = out.masked_fill(blind_B1c[..., None], 0.0)
            lse_BNC[:, :, rows] = lse.masked_fill(blind_B1c, float("-inf"))
        return AttentionOutput(out_BNCH, lse_BNC)

    def _backward_chosen(self, given: BackwardInputs, scores: Scores) -> Gradients:
        """Gradient of `_forward_chosen`."""
        sums_dtype = accumulation_dtype(given.q.dtype)
        dq_BNCH = torch.zeros_like(given.q)
        dk_BKTH, dv_BKTH = (torch.zeros_like(x, dtype=sums_dtype) for x in (given.k, given.v))
        for tile in _tiles_of_chosen(given.q, given.k, scores):
            kernel = functools.partial(
                self.kernel_backward, causal=False, scale=scores["scale"], bias_B1CT=tile.bias_B1ct
            )
            part = _parts(given, tile.extent)
            # With a log-sum-exp of +inf all probabilities are zero.
            lse = part.lse.masked_fill(tile.blind_Bc[:, None], float("inf"))
            part = part._replace(lse=lse)
            grads = adapted_backward(kernel, part, needs=self.needs, unmasked=False)
            dq_BNCH[:, :, tile.extent.rows] = grads.dq_BNCH
            dk_BKTH[:, :, tile.extent.keys] += grads.dk_BKTH
            dv_BKTH[:, :, tile.extent.keys] += grads.dv_BKTH
            del grads  # of all keys; else there would be two calls' at once
        return Gradients(dq_BNCH, dk_BKTH, dv_BKTH)

    def _cut(
        self, scores: Scores, num_rows: int, k_BKTH: Tensor, v_BKTH: Tensor
    ) -> list[Rectangle]:
        """Cut the band, and unmasked rectangles with more keys than the kernel can address."""
        band = scores["band"]
        assert scores.get("softcap") is None, f"{self.name} was chosen though scores are capped"
        assert isinstance(band, CausalBand), f"{self.name} takes one document at a time"
        rectangles = cut_band(band, num_rows, k_BKTH.shape[2], tile_rows=self._tile_rows)
        if self.most_elements is None:
            return rectangles
        most_keys = max(1, self.most_elements // max(1, k_BKTH.stride(2), v_BKTH.stride(2)))
        return [part for whole in rectangles for part in _cut_keys(whole, most_keys)]

    def _forward_rectangle(
        self, rectangle: Rectangle, q_BNCH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, scale: float
    ) -> AttentionOutput:
        """Attend over one rectangle; an edge is reversed."""
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
        form = rectangle.form
        turned = BackwardInputs(*(_turn(x, form) for x in _parts(given, rectangle)))
        unmasked = form is Form.FULL
        kernel = functools.partial(self.kernel_backward, causal=not unmasked, scale=scale)
        grads = adapted_backward(kernel, turned, needs=self.needs, unmasked=unmasked)
        return Gradients(*(_turn(grad, form) for grad in grads))


class _TileOfChosen(NamedTuple):
    """Some rows with the keys that any of them may see, and what hides the others."""

    extent: Extent
    bias_B1ct: Tensor
    """0 for what a row reads, -inf for what it does not."""
    blind_Bc: Tensor
    """Which rows read none of these keys. Theirs is 0 for the first key: kernels divide by the sum
    of a row's probabilities, and what they give for these rows is not used."""


def _tiles_of_chosen(q_BNCH: Tensor, k_BKTH: Tensor, scores: Scores) -> Iterator[_TileOfChosen]:
    """Yield tiles of all rows that see keys of the band, as many as `BIAS_BYTES` allow."""
    band, chosen_BCS = scores["band"], scores.get("chosen_BCS")
    assert isinstance(band, CausalBand), "these kernels take one document at a time"
    assert chosen_BCS is not None, "keys were chosen"
    num_batch, _, num_rows, _ = q_BNCH.shape
    num_keys, device = k_BKTH.shape[2], q_BNCH.device
    tile_rows = max(1, BIAS_BYTES // max(1, num_batch * num_keys * q_BNCH.element_size()))
    for first in range(0, num_rows if num_batch else 0, tile_rows):
        shifted = CausalBand(band.q_start + first, band.window)
        seen = shifted.trim(min(tile_rows, num_rows - first), num_keys)
        if seen.empty:
            continue
        start, stop = first + seen.row_start, first + seen.row_stop
        extent = Extent(start, stop, seen.key_start, seen.key_stop)
        position_c1 = band.q_start + torch.arange(start, stop, device=device)[:, None]
        key_t = torch.arange(seen.key_start, seen.key_stop, device=device)
        in_band_ct = key_t <= position_c1
        if band.window is not None:
            in_band_ct &= key_t > position_c1 - band.window
        reads_Bct = chosen_mask(chosen_BCS[:, extent.rows], extent.keys) & in_band_ct
        blind_Bc = ~reads_Bct.any(dim=-1)
        reads_Bct[..., 0] |= blind_Bc
        padded = -(-len(key_t) // _BIAS_MULTIPLE) * _BIAS_MULTIPLE
        bias_Bct = q_BNCH.new_zeros(*reads_Bct.shape[:2], padded)
        bias_Bct = bias_Bct[..., : len(key_t)].masked_fill_(~reads_Bct, float("-inf"))
        yield _TileOfChosen(extent, bias_Bct[:, None], blind_Bc)


def _parts(given: BackwardInputs, extent: Extent) -> BackwardInputs:
    """Return the rows and keys of `extent`."""
    rows, keys = extent.rows, extent.keys
    parts = zip(given, (rows, rows, keys, keys, rows, rows), strict=True)
    return BackwardInputs(*(x[:, :, part] for x, part in parts))


def _turn(x: Tensor, form: Form) -> Tensor:
    """Reverse the tokens of an edge, which makes it a causal square, or back."""
    return x.flip(2) if form is Form.EDGE else x


class _Filling:
    """Which parts of an uninitialised buffer are written, which are added, and which zeroed.

    A part that overlaps no earlier one is written; any other is added. Tokens that no written part
    covers must be zeroed first. Zeroing a whole buffer of tens of thousands of tokens and adding to
    it would cost more than writing the part.
    """

    def __init__(self, parts: Sequence[slice], num_tokens: int) -> None:
        """Plan `parts`, half-open ranges in tokens, in the order in which they are computed."""
        written: list[slice] = []
        self.first: list[bool] = []
        """Whether each part is written rather than added."""
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
    """Allocate `[B, N, C, H]` with the memory layout of projections, `[B, C, N, H]`."""
    num_rows, num_heads, num_tokens, _ = q_BNCH.shape
    return q_BNCH.new_empty(num_rows, num_tokens, num_heads, head_size, dtype=dtype).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Reach:
    """How many keys a row sees before and after its own, with the last row at the last key.

    In tokens; None is unlimited.
    """

    left: int | None
    right: int | None

    @property
    def causal(self) -> bool:
        """Whether a row sees no later key than its own."""
        return self.right == 0

    @property
    def unmasked(self) -> bool:
        """Whether every row sees every key."""
        return self.left is None and self.right is None


@dataclass(frozen=True, slots=True)
class AlignedCall(Extent):
    """The rows, keys and reach of one kernel call."""

    reach: Reach
    offsets: Offsets | None = None
    """Offsets of packed documents in these rows and keys, or None."""


def align_band(band: CausalBand, num_rows: int, num_keys: int) -> list[AlignedCall]:
    """Express a band as at most three bottom-right-aligned calls.

    Returns:
        Calls with disjoint rows; empty if no row sees a key. Rows in no call see no key.
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
    # Rows behind the last key.
    if window is not None and seen.row_stop - split > seen.key_stop - seen.key_start:
        # Flash attention 2 cuts the right side to the number of keys, which would hide some from
        # the first of more rows than keys. These see all keys, so they have a call without a mask;
        # the other rows are fewer than the keys.
        whole = seen.row_start + seen.key_start + window - position
        unmasked = Reach(None, None)
        calls.append(AlignedCall(split, whole, seen.key_start, seen.key_stop, unmasked))
        split = whole
    if split < seen.row_stop:
        # The kernel aligns these rows to end at the last key; they are `behind` tokens later.
        behind = position + (seen.row_stop - seen.row_start) - seen.key_stop
        reach = Reach(None, None)
        if window is not None:
            reach = Reach(window - 1 - behind, behind)
        calls.append(AlignedCall(split, seen.row_stop, seen.key_start, seen.key_stop, reach))
    return calls


class Offsets(NamedTuple):
    """Offsets of documents, as kernels for variable lengths take them."""

    cu_q: Tensor
    """First query of each document, and the number of queries: int32, `[documents + 1]`."""

    cu_k: Tensor
    """The same of keys."""

    max_q: int
    """Queries of the longest document."""

    max_k: int
    """Keys of the longest document."""


@functools.lru_cache(maxsize=64)
def _offsets(documents: Documents, device: torch.device) -> Offsets:
    """Return the offsets on a device; cached, because all layers need the same."""

    def sums(lengths: tuple[int, ...]) -> Tensor:
        made = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cpu")
        # From pinned memory, or the host would wait for the device.
        return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made

    queries, keys = documents.num_queries, documents.num_keys
    return Offsets(sums(queries), sums(keys), max(queries), max(keys))


def with_documents(
    variants: tuple[Callable[..., Backend], ...],
) -> tuple[Callable[[], Backend], ...]:
    """Return each variant with packed documents in one kernel call, and then without."""
    return tuple(
        functools.partial(make, documents_at_once=at_once)
        for make in variants
        for at_once in (True, False)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """Arguments of a kernel beside its tensors."""

    reach: Reach
    scale: float
    softcap: float | None
    offsets: Offsets | None
    """Offsets of packed documents; None where every row is one document."""


class BottomRightBackend(Backend):
    """Backend on a kernel that aligns masks at the bottom right.

    The kernel calls get tensors as [B, tokens, heads, H] with heads adapted to `needs`; with
    `offsets`, tensors are [tokens, heads, H] and the log-sum-exp is [N, C].
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
        self, q_BNCH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, **scores: Unpack[Scores]
    ) -> AttentionOutput:
        """See `Backend.forward`."""
        parts: list[tuple[AlignedCall, AttentionOutput]] = []
        for call in _calls(scores["band"], q_BNCH, k_BKTH):
            part = adapted_forward(
                functools.partial(self._dense_forward, _kernel_call(call, scores)),
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
    def backward(self, *given: Tensor, **scores: Unpack[Scores]) -> Gradients:
        """See `Backend.backward`."""
        _, q_BNCH, k_BKTH, v_BKTH, *_ = inputs = BackwardInputs(*given)
        whole = slice(0, q_BNCH.shape[2]), slice(0, k_BKTH.shape[2])
        parts: list[tuple[AlignedCall, Gradients]] = []
        for call in _calls(scores["band"], q_BNCH, k_BKTH):
            part = adapted_backward(
                functools.partial(self._dense_backward, _kernel_call(call, scores)),
                _parts(inputs, call),
                needs=self.needs,
                unmasked=call.reach.unmasked,
            )
            if (call.rows, call.keys) == whole:
                return part
            parts.append((call, part))
        # Calls share their keys, so their gradients are summed in the accumulation dtype.
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


def _kernel_call(call: AlignedCall, scores: Scores) -> KernelCall:
    softcap = scores.get("softcap")
    return KernelCall(
        reach=call.reach, scale=scores["scale"], softcap=softcap, offsets=call.offsets
    )


def _calls(band: Mask, q_BNCH: Tensor, k_BKTH: Tensor) -> list[AlignedCall]:
    """Return the kernel calls of a mask; empty if no row sees a key."""
    num_rows, num_keys = q_BNCH.shape[2], k_BKTH.shape[2]
    if isinstance(band, Documents):
        reach = Reach(None if band.window is None else band.window - 1, 0)
        offsets = _offsets(band, q_BNCH.device)
        return [AlignedCall(0, num_rows, 0, num_keys, reach, offsets)]
    return align_band(band, num_rows, num_keys) if q_BNCH.shape[0] else []


def _by_token(x_BNCH: Tensor, call: KernelCall) -> Tensor:
    """Move tokens before heads, as kernels take them; drop the batch dim if there are offsets."""
    x_BCNH = x_BNCH.transpose(1, 2)
    return x_BCNH if call.offsets is None else x_BCNH.squeeze(0)
