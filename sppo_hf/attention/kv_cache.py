"""Keys and values of one layer for one forward call, and the sums of their gradients.

Each chunk has its own tensors, so that memory shrinks chunk by chunk in backward; views of a single
buffer would keep every byte until the last chunk is done. Kernels take one run of keys, so the
tensors of several chunks are joined for the duration of a call; that copy moves a few bytes per
thousand FLOPs of the attention that it serves.

[Note: dK/dV order] Later chunks attend to earlier keys, so dK/dV of chunk i is complete only
after every chunk j > i ran its backward in this layer. `sppo_hf.attention.chunk_attention` makes
autograd wait for that. `add_gradient` may be called for chunks up to the one that runs backward
now, and `take_gradient(i)` frees chunk i's K/V and sums. Sums are kept in float32 (or the keys'
dtype when that is wider), because up to N contributions are added up in one element.

`LayerKV` has all K/V on the device while a layer runs, and can offload them between the layer's
forward and its backward. `sppo_hf.attention.streamed_kv` has the store that keeps them off the
device and streams them through in blocks. Attention sees both as a `KVStore`: `LayerKV` says what
the methods do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sppo_hf.attention.segments import AttentionSegment, Block, Bounds, whole_sequence
from sppo_hf.errors import SPPOError

if TYPE_CHECKING:
    from sppo_hf.attention.streamed_kv import KVStore

# B batch rows, K key/value heads, C tokens of a chunk, T tokens of a run of keys, H head size.

Keep = Callable[[str, Tensor], Tensor]
"""Copies a tensor ("keys" or "values") to where it can stay on the device, if need be; returns it
from there."""

LoadKV = Callable[[], tuple[Tensor, Tensor]]
"""Loads offloaded keys and values of a chunk back onto the device, each BKCH."""

Pair = tuple[Any, Any]
"""Keys and values, or the sums of their gradients: tensors BKCH, or handles of offloaded ones."""


class KVByChunk:
    """Keys and values of a layer and sums of their gradients, chunk by chunk, as tensors.

    Stores that hold them in another form override `_hold`, `_read`, `_release` and `_like`.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._keys: dict[int, Pair] = {}
        self._sums: dict[int, Pair] = {}

    def _hold(self, pair: tuple[Tensor, Tensor]) -> Pair:
        """Return the form in which two tensors are held."""
        return pair

    def _read(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """Return the tensors on the device; the caller may write into them before `_hold`."""
        return pair

    def _release(self, pair: Pair) -> None:
        """Free what is held."""

    def _like(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Return tensors of the shapes and dtypes of the keys and values of `chunk`."""
        return self._keys[chunk]

    # For pipelines whose ranks share units: another rank's store takes over some chunks.

    def chunk_kv(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Return K/V of `chunk`, each BKCH; the store keeps them."""
        return self._read(self._keys[chunk])

    def gradient_sums(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Return the sums of dK and dV so far, each BKCH, in the dtype of the sums."""
        if chunk not in self._sums:
            k, v = self._like(chunk)
            return sum_zeros(k), sum_zeros(v)
        k, v = self._read(self._sums[chunk])
        # A first contribution is held as the kernel gave it, which may be in a narrower dtype.
        return k.to(sum_dtype(k)), v.to(sum_dtype(v))

    def free_gradient_sums(self, chunk: int) -> None:
        """Free the sums of `chunk`."""
        if chunk in self._sums:
            self._release(self._sums.pop(chunk))

    def add_gradient_sums(
        self, chunk: int, dk_BKCH: Tensor, dv_BKCH: Tensor, heads: list[int]
    ) -> None:
        """Add another store's `gradient_sums` for some heads; a head may occur twice."""
        sums = self.gradient_sums(chunk)
        self.free_gradient_sums(chunk)
        for total, part in zip(sums, (dk_BKCH, dv_BKCH), strict=True):
            # Not by an index tensor: the host would wait for its copy to the device.
            for place, head in enumerate(heads):
                total[:, head] += part[:, place]
        self._sums[chunk] = self._hold(sums)


class LayerKV(KVByChunk):
    """Keys and values of one layer on the device, with their gradient sums."""

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self.block = whole_sequence(bounds)
        self._taken: set[int] = set()
        self._offloaded: dict[int, LoadKV] = {}

    @classmethod
    def of_block(cls, start: int, end: int, k_BKTH: Tensor, v_BKTH: Tensor) -> LayerKV:
        """Return K/V of tokens `[start, end)` as those of one chunk, where they lie."""
        store = cls(((start, end),))
        store._keys[0] = k_BKTH, v_BKTH
        return store

    def put(self, chunk: int, k_BKCH: Tensor, v_BKCH: Tensor, *, keep: Keep | None = None) -> None:
        """Store K/V of `chunk`, which is about to attend; in place if dense and not for `keep`."""
        start, end = self._bounds[chunk]
        assert k_BKCH.shape[2] == end - start, "a chunk's keys must cover exactly its tokens"
        self._keys[chunk] = (_place("keys", k_BKCH, keep), _place("values", v_BKCH, keep))

    def blocks(
        self,
        segments: tuple[AttentionSegment, ...],
        *,
        window: int | None,
        local: int | None = None,
    ) -> tuple[Block, ...]:
        """Return the blocks in which the K/V that `segments` see will be provided: one here."""
        return (self.block,)

    def forward_blocks(
        self, chunk: int, blocks: tuple[Block, ...], *, borrowed: bool = False
    ) -> Iterator[LayerKV]:
        """Yield the blocks that `chunk` attends to in forward, one after the other.

        A block is on the device until the next is requested, so all must be consumed. `borrowed`:
        the caller is a layer that reads another layer's K/V, or one that is recomputed.
        """
        self.load_until(chunk)
        yield self

    def backward_blocks(
        self, chunk: int, blocks: tuple[Block, ...], *, borrowed: bool = False
    ) -> Iterator[LayerKV]:
        """Yield the same blocks in backward, where each takes its gradients."""
        self.load_until(chunk)
        yield self

    def offload_chunk(self, chunk: int, load_kv: LoadKV) -> tuple[Tensor, Tensor]:
        """Return K/V of `chunk` and forget them; `load_kv` loads them when they are needed."""
        self._offloaded[chunk] = load_kv
        return self._keys.pop(chunk)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Chunks whose K/V are on the device."""
        return tuple(self._keys)

    def load_until(self, last: int) -> None:
        """Load the offloaded K/V of all chunks up to `last`."""
        for chunk in sorted(chunk for chunk in self._offloaded if chunk <= last):
            k_BKCH, v_BKCH = self._offloaded[chunk]()
            del self._offloaded[chunk]
            self.put(chunk, k_BKCH, v_BKCH)

    def run(self, start: int, end: int, row: int | None) -> tuple[Tensor, Tensor]:
        """Return K/V of tokens `[start, end)` of `row` (all rows if None), each BKTH.

        Raises:
            SPPOError: backward has already freed one of the chunks (a second backward).
        """
        ks, vs = [], []
        for chunk, inner, _ in self._overlaps(start, end):
            if chunk not in self._keys:
                raise kv_freed_error(chunk)
            k_BKCH, v_BKCH = self._keys[chunk]
            ks.append(select_row(k_BKCH, row)[:, :, inner])
            vs.append(select_row(v_BKCH, row)[:, :, inner])
        if len(ks) == 1:
            return ks[0], vs[0]
        return join_tokens(ks), join_tokens(vs)

    def add_gradient(self, start: int, dk_BKTH: Tensor, dv_BKTH: Tensor, row: int | None) -> None:
        """Add gradients of tokens `[start, start + T)` of `row`; takes ownership of the tensors."""
        for chunk, inner, outer in self._overlaps(start, start + dk_BKTH.shape[2]):
            assert chunk not in self._taken, "a gradient arrived after its chunk was finished"
            dk, dv = dk_BKTH[:, :, outer], dv_BKTH[:, :, outer]
            if chunk not in self._sums and dk.shape == self._keys[chunk][0].shape:
                self._sums[chunk] = own_sum(dk), own_sum(dv)
                continue
            sum_k, sum_v = self._sums[chunk] = self.gradient_sums(chunk)
            select_row(sum_k, row)[:, :, inner] += dk
            select_row(sum_v, row)[:, :, inner] += dv

    def take_sums(self, chunk: int) -> tuple[Tensor, Tensor] | None:
        """Free K/V of `chunk`, and return and forget its sums; None if there are none."""
        self._keys.pop(chunk, None)
        self._taken.add(chunk)
        return self._sums.pop(chunk, None)

    def take_gradient(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Return dK and dV of `chunk` in the keys' own dtype, and free its K/V and sums."""
        self.load_until(chunk)
        k, v = self._keys[chunk]
        sums = self.take_sums(chunk)
        if sums is None:
            return torch.zeros_like(k), torch.zeros_like(v)
        return sums[0].to(k.dtype), sums[1].to(v.dtype)

    def put_attended(self, chunk: int, k_BKCH: Tensor, v_BKCH: Tensor) -> None:
        """Store K/V of a `chunk` whose attention already ran, with another store."""
        self.put(chunk, k_BKCH, v_BKCH)

    def free_kv(self, chunk: int) -> None:
        """Free K/V of `chunk`, whose own backward runs with another store; keep the sums."""
        sums = self.gradient_sums(chunk)
        self.take_sums(chunk)
        self._sums[chunk] = sums

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held now."""
        return sum(k.nbytes + v.nbytes for k, v in self._keys.values())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradient sums held now."""
        return sum(k.nbytes + v.nbytes for k, v in self._sums.values())

    def _overlaps(self, start: int, end: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield (chunk, slice in the chunk, slice in the run) of chunks in `[start, end)`."""
        for chunk, (chunk_start, chunk_end) in enumerate(self._bounds):
            low, high = max(start, chunk_start), min(end, chunk_end)
            if low < high:
                inner = slice(low - chunk_start, high - chunk_start)
                yield chunk, inner, slice(low - start, high - start)


class KVOwners:
    """Finds the store that holds the K/V which a layer attends to, within one chunk.

    Layers that share K/V (Gemma 3n, Gemma 4) receive the identical tensors of an earlier layer.
    """

    def __init__(self) -> None:
        self._owners: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor], KVStore]] = {}

    def store_of(self, key: Tensor, value: Tensor) -> KVStore | None:
        """Return the store of the earlier layer with these tensors, or None if there is none."""
        known = self._owners.get(id(key))
        if known is not None and known[0]() is key and known[1]() is value:
            return known[2]
        return None

    def add(self, key: Tensor, value: Tensor, store: KVStore) -> None:
        """Register that `store` holds these tensors."""
        self._owners[id(key)] = (weakref.ref(key), weakref.ref(value), store)


def kv_freed_error(chunk: int) -> SPPOError:
    """Return the error for reading K/V that backward has freed."""
    return SPPOError(
        f"keys of chunk {chunk} were freed: backward ran already. "
        "Chunked sequences allow one backward per forward (retain_graph=True is not "
        "supported); run the forward again."
    )


def select_row(x: Tensor, row: int | None) -> Tensor:
    """Return row `row` of `x` as a batch of one, or all rows if None."""
    return x if row is None else x[row : row + 1]


def join_tokens(parts_BKCH: Sequence[Tensor]) -> Tensor:
    """Join the tokens of all parts to one BKTH tensor, in the memory layout of the parts.

    A projection gives keys as views of BCKH memory. Joined as such they are contiguous runs,
    which CUDA copies in wide words; along their third dim it would go element by element. Kernels
    that want BCKH get what they want.
    """
    parts_BCKH = [part.transpose(1, 2) for part in parts_BKCH]
    if all(part.is_contiguous() for part in parts_BCKH):
        return torch.cat(parts_BCKH, dim=1).transpose(1, 2)
    return torch.cat(list(parts_BKCH), dim=2)


# Copies below keep the order of dims in memory, so that tensors that are joined or added later have
# the same layout, and gradients reach the projection in its own.


def dense(x: Tensor) -> Tensor:
    """Return `x` detached, cloned if it is a view into a larger storage.

    A view of a fused q/k/v projection would keep the whole projection alive.
    """
    x = x.detach()
    return x if x.untyped_storage().nbytes() <= x.nbytes else x.clone()


def own_sum(x: Tensor) -> Tensor:
    """Return `x`, or where it is a view into more memory a dense copy in the dtype of sums."""
    return x if x.untyped_storage().nbytes() <= x.nbytes else x.to(sum_dtype(x), copy=True)


def sum_zeros(x: Tensor) -> Tensor:
    """Return zeros of the shape of `x` in the dtype of gradient sums."""
    return torch.zeros_like(x, dtype=sum_dtype(x))


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of gradient sums: float32, or that of `x` if wider."""
    return torch.promote_types(x.dtype, torch.float32)


def _place(kind: str, x: Tensor, keep: Keep | None) -> Tensor:
    kept = x if keep is None else keep(kind, x)
    # A tensor that `keep` has copied may be a view into a larger buffer, which is where it belongs.
    return dense(kept) if kept is x or kept.data_ptr() == x.data_ptr() else kept
