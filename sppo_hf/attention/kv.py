"""Keys and values of one layer for one forward call, and the gradients that wait for them.

One entry per chunk, so that memory really shrinks chunk by chunk in backward: a single buffer with
views would keep every byte until the last chunk is done. A kernel wants one run of keys, so the
entries that a query needs are joined for the moment of the call; that copy moves a few bytes per
thousand FLOPs of the attention it serves.

[Note: dK/dV order] Later chunks attend to earlier keys, so dK/dV of chunk i is complete only
after every chunk j > i ran its backward in this layer. `sppo_hf.attention.function` makes autograd
wait for that. Here it means: `add_gradient` may be called for chunks up to the one that runs
backward now, and `take_gradient(i)` ends the life of chunk i's entry. Sums are kept in float32
(or the keys' own type when that is wider), because up to N - 1 contributions meet in one element.

Knows nothing of layers, models, streams or where the bytes live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from sppo_hf.errors import SPPOError

# B batch rows, K key/value heads, C tokens of a chunk, T tokens of a run of keys, H head size.

Keep = Callable[[str, Tensor], Tensor]
"""Gives a tensor of a kind a place to stay; returns what is there."""


class LayerKV:
    """Keys and values of one layer, chunk by chunk, with their gradient sums."""

    def __init__(self, bounds: tuple[tuple[int, int], ...]) -> None:
        """Prepare an empty store.

        Args:
            bounds: `(start, end)` of every chunk, in tokens; they cover the sequence.
        """
        self._bounds = bounds
        self._keys: dict[int, tuple[Tensor, Tensor]] = {}
        self._grads: dict[int, tuple[Tensor, Tensor]] = {}
        self._taken: set[int] = set()

    def put(self, chunk: int, k_BKCH: Tensor, v_BKCH: Tensor, *, keep: Keep | None = None) -> None:
        """Keep keys and values of `chunk`.

        Args:
            chunk: Index of the chunk.
            k_BKCH: Its keys.
            v_BKCH: Its values.
            keep: Copies a tensor to where it can stay; by default it is shared if dense.
        """
        start, end = self._bounds[chunk]
        assert k_BKCH.shape[2] == end - start, "a chunk's keys must cover exactly its tokens"
        if keep is None:
            self._keys[chunk] = (_dense(k_BKCH), _dense(v_BKCH))
        else:
            self._keys[chunk] = (keep("keys", k_BKCH), keep("values", v_BKCH))

    def has(self, chunk: int) -> bool:
        """Whether keys and values of `chunk` are here."""
        return chunk in self._keys

    def run(self, start: int, end: int, row: int | None) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens `[start, end)` of `row` (all rows if None), each BKTH.

        Raises:
            SPPOError: If backward already freed one of the chunks (a second backward).
        """
        ks, vs = [], []
        for chunk, inner, _ in self._overlaps(start, end):
            if chunk not in self._keys:
                raise SPPOError(
                    f"keys of chunk {chunk} are gone: backward ran already and freed them. "
                    "Chunked sequences allow one backward per forward (retain_graph=True is not "
                    "supported); run the forward again."
                )
            k_BKCH, v_BKCH = self._keys[chunk]
            ks.append(_rows(k_BKCH, row)[:, :, inner])
            vs.append(_rows(v_BKCH, row)[:, :, inner])
        if len(ks) == 1:
            return ks[0], vs[0]
        return torch.cat(ks, dim=2), torch.cat(vs, dim=2)

    def add_gradient(self, start: int, dk_BKTH: Tensor, dv_BKTH: Tensor, row: int | None) -> None:
        """Add gradients of tokens `[start, start + T)` of `row` to the sums of their chunks."""
        for chunk, inner, outer in self._overlaps(start, start + dk_BKTH.shape[2]):
            assert chunk not in self._taken, "a gradient arrived after its chunk was finished"
            dk, dv = dk_BKTH[:, :, outer], dv_BKTH[:, :, outer]
            if chunk not in self._grads:
                k, v = self._keys[chunk]
                if dk.shape == k.shape:
                    self._grads[chunk] = (_sum_copy(dk), _sum_copy(dv))
                    continue
                self._grads[chunk] = (_sum_zeros(k), _sum_zeros(v))
            sum_k, sum_v = self._grads[chunk]
            _rows(sum_k, row)[:, :, inner] += dk
            _rows(sum_v, row)[:, :, inner] += dv

    def take_gradient(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Return dK and dV of `chunk` in the keys' own dtype, and free the chunk's entry."""
        k, v = self._keys.pop(chunk)
        self._taken.add(chunk)
        sums = self._grads.pop(chunk, None)
        if sums is None:
            return torch.zeros_like(k), torch.zeros_like(v)
        return sums[0].to(k.dtype), sums[1].to(v.dtype)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held now."""
        return sum(_bytes(k) + _bytes(v) for k, v in self._keys.values())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradient sums held now."""
        return sum(_bytes(k) + _bytes(v) for k, v in self._grads.values())

    def _overlaps(self, start: int, end: int) -> Iterator[tuple[int, slice, slice]]:
        """Chunks that `[start, end)` touches: (chunk, slice in the chunk, slice in the run)."""
        for chunk, (chunk_start, chunk_end) in enumerate(self._bounds):
            low, high = max(start, chunk_start), min(end, chunk_end)
            if low < high:
                inner = slice(low - chunk_start, high - chunk_start)
                yield chunk, inner, slice(low - start, high - start)


def _rows(x: Tensor, row: int | None) -> Tensor:
    return x if row is None else x[row : row + 1]


def _dense(x: Tensor) -> Tensor:
    # A view into a larger tensor (a fused q/k/v projection) would keep all of it alive.
    x = x.detach()
    return (
        x
        if x.untyped_storage().nbytes() <= _bytes(x)
        else x.clone(memory_format=torch.contiguous_format)
    )


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _sum_copy(x: Tensor) -> Tensor:
    return x.to(_sum_dtype(x), copy=True, memory_format=torch.contiguous_format)


def _sum_zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=_sum_dtype(x), device=x.device)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
