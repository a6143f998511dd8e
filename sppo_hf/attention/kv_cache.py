"""Keys and values of one layer for one forward call, and the gradients that wait for them.

One entry per chunk, so that memory really shrinks chunk by chunk in backward: a single buffer with
views would keep every byte until the last chunk is done. A kernel wants one run of keys, so the
entries that a query needs are joined for the moment of the call; that copy moves a few bytes per
thousand FLOPs of the attention it serves.

[Note: dK/dV order] Later chunks attend to earlier keys, so dK/dV of chunk i is complete only
after every chunk j > i ran its backward in this layer. `sppo_hf.attention.chunk_attention` makes
autograd wait for that. Here it means: `add_gradient` may be called for chunks up to the one that
runs backward now, and `take_gradient(i)` ends the life of chunk i's entry. Sums are kept in float32
(or the keys' own type when that is wider), because up to N - 1 contributions meet in one element.

`LayerKV` has everything on the device while a layer runs, and may put it away between the layer's
forward and its backward; `sppo_hf.attention.streamed_kv` has the store for keys that wait
elsewhere. `KVStore` is what both are to attention.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sppo_hf.attention.segments import AttentionSegment, Block, Bounds, whole_sequence
from sppo_hf.errors import SPPOError

# B batch rows, K key/value heads, C tokens of a chunk, T tokens of a run of keys, H head size.

Keep = Callable[[str, Tensor], Tensor]
"""Gives a tensor of a kind a place to stay; returns what is there."""


Bring = Callable[[], tuple[Tensor, Tensor]]
"""Gives keys and values of a chunk back, each BKCH."""


class Keys(Protocol):
    """Keys and values of one block, on the device."""

    @property
    def block(self) -> Block:
        """Which tokens are here."""
        ...

    def run(self, start: int, end: int, row: int | None) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens `[start, end)` of `row` (all rows if None), each BKTH."""
        ...

    def add_gradient(self, start: int, dk_BKTH: Tensor, dv_BKTH: Tensor, row: int | None) -> None:
        """Add gradients of tokens `[start, start + T)` of `row`; gives the tensors away."""
        ...


class KVStore(Protocol):
    """Keys and values of one layer for one sequence, wherever they are."""

    def put(self, chunk: int, k_BKCH: Tensor, v_BKCH: Tensor, *, keep: Keep | None = None) -> None:
        """Take keys and values of `chunk`, which is about to attend."""
        ...

    def blocks(
        self,
        segments: tuple[AttentionSegment, ...],
        *,
        window: int | None,
        local: int | None = None,
    ) -> tuple[Block, ...]:
        """The blocks in which `segments` (of a layer with this mask) can be read."""
        ...

    def walk(
        self, chunk: int, blocks: tuple[Block, ...], *, borrowed: bool = False
    ) -> Iterator[Keys]:
        """Bring the blocks that `chunk` attends to in forward, one after the other.

        A block is on the device until the next is asked for, so the walk must be finished. With
        `borrowed` it is for another layer, after the one that put the keys here, or for one that
        runs again.
        """
        ...

    def walk_back(
        self, chunk: int, blocks: tuple[Block, ...], *, borrowed: bool = False
    ) -> Iterator[Keys]:
        """The same in backward, where each block takes its gradients."""
        ...

    def take_gradient(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Return dK and dV of `chunk` in the keys' own dtype, and free the chunk's entry."""
        ...

    # Where units of a pipeline change ranks, a later store takes over what earlier ones have:

    def put_attended(self, chunk: int, k_BKCH: Tensor, v_BKCH: Tensor) -> None:
        """Take keys and values of a `chunk` that has attended, with another store."""
        ...

    def chunk_kv(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `chunk`, each BKCH, which stay here too."""
        ...

    def free_kv(self, chunk: int) -> None:
        """Free keys and values of `chunk`, whose own backward runs with another store.

        The sums of their gradients wait here.
        """
        ...

    def gradient_sums(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Those sums of dK and dV, as they were summed, each BKCH; they stay here too."""
        ...

    def free_gradient_sums(self, chunk: int) -> None:
        """Free them."""
        ...

    def add_gradient_sums(
        self, chunk: int, dk_BKCH: Tensor, dv_BKCH: Tensor, heads: list[int]
    ) -> None:
        """Add another store's `gradient_sums` for some heads; a head may occur twice."""
        ...


class LayerKV:
    """Keys and values of one layer on the device, chunk by chunk, with their gradient sums."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.block = whole_sequence(bounds)
        self._keys: dict[int, tuple[Tensor, Tensor]] = {}
        self._grads: dict[int, tuple[Tensor, Tensor]] = {}
        self._taken: set[int] = set()
        self._away: dict[int, Bring] = {}

    def put(self, chunk: int, k_BKCH: Tensor, v_BKCH: Tensor, *, keep: Keep | None = None) -> None:
        """Keep keys and values of `chunk`.

        `keep` copies a tensor to where it can stay. What it gives back as it is, and all without
        it, is shared if dense.
        """
        start, end = self._bounds[chunk]
        assert k_BKCH.shape[2] == end - start, "a chunk's keys must cover exactly its tokens"
        self._keys[chunk] = (_kept("keys", k_BKCH, keep), _kept("values", v_BKCH, keep))

    def blocks(
        self,
        segments: tuple[AttentionSegment, ...],
        *,
        window: int | None,
        local: int | None = None,
    ) -> tuple[Block, ...]:
        """One block: everything is here."""
        return (self.block,)

    def walk(
        self, chunk: int, blocks: tuple[Block, ...], *, borrowed: bool = False
    ) -> Iterator[Keys]:
        """See `KVStore.walk`."""
        self.load_until(chunk)
        yield self

    def walk_back(
        self, chunk: int, blocks: tuple[Block, ...], *, borrowed: bool = False
    ) -> Iterator[Keys]:
        """See `KVStore.walk_back`."""
        self.load_until(chunk)
        yield self

    def offload_chunk(self, chunk: int, bring: Bring) -> tuple[Tensor, Tensor]:
        """Let go of keys and values of `chunk`, which are returned, until a chunk attends to them.

        `bring` gives them back then.
        """
        self._away[chunk] = bring
        return self._keys.pop(chunk)

    def restore(
        self, chunk: int, k_BKCH: Tensor, v_BKCH: Tensor, *, keep: Keep | None = None
    ) -> None:
        """Take keys and values of `chunk`, if they are away: nobody need bring them any more."""
        if self._away.pop(chunk, None) is not None:
            self.put(chunk, k_BKCH, v_BKCH, keep=keep)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Chunks whose keys and values are on the device."""
        return tuple(self._keys)

    def load_until(self, last: int) -> None:
        """Bring back what is away of the chunks up to `last`."""
        for chunk in sorted(chunk for chunk in self._away if chunk <= last):
            self.restore(chunk, *self._away[chunk]())

    def run(self, start: int, end: int, row: int | None) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens `[start, end)` of `row` (all rows if None), each BKTH.

        Raises:
            SPPOError: If backward already freed one of the chunks (a second backward).
        """
        ks, vs = [], []
        for chunk, inner, _ in self._overlaps(start, end):
            if chunk not in self._keys:
                raise gone(chunk)
            k_BKCH, v_BKCH = self._keys[chunk]
            ks.append(rows_of(k_BKCH, row)[:, :, inner])
            vs.append(rows_of(v_BKCH, row)[:, :, inner])
        if len(ks) == 1:
            return ks[0], vs[0]
        return join_tokens(ks), join_tokens(vs)

    def add_gradient(self, start: int, dk_BKTH: Tensor, dv_BKTH: Tensor, row: int | None) -> None:
        """Add gradients of tokens `[start, start + T)` of `row` to the sums of their chunks."""
        for chunk, inner, outer in self._overlaps(start, start + dk_BKTH.shape[2]):
            assert chunk not in self._taken, "a gradient arrived after its chunk was finished"
            dk, dv = dk_BKTH[:, :, outer], dv_BKTH[:, :, outer]
            if chunk not in self._grads:
                k, v = self._keys[chunk]
                if dk.shape == k.shape:
                    self._grads[chunk] = (sum_copy(dk), sum_copy(dv))
                    continue
                self._grads[chunk] = (sum_zeros(k), sum_zeros(v))
            sum_k, sum_v = self._grads[chunk]
            rows_of(sum_k, row)[:, :, inner] += dk
            rows_of(sum_v, row)[:, :, inner] += dv

    def take_gradient(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Return dK and dV of `chunk` in the keys' own dtype, and free the chunk's entry."""
        self.load_until(chunk)
        k, v = self._keys.pop(chunk)
        self._taken.add(chunk)
        sums = self._grads.pop(chunk, None)
        if sums is None:
            return torch.zeros_like(k), torch.zeros_like(v)
        return sums[0].to(k.dtype), sums[1].to(v.dtype)

    def put_attended(self, chunk: int, k_BKCH: Tensor, v_BKCH: Tensor) -> None:
        """See `KVStore.put_attended`."""
        self.put(chunk, k_BKCH, v_BKCH)

    def chunk_kv(self, chunk: int) -> tuple[Tensor, Tensor]:
        """See `KVStore.chunk_kv`."""
        return self._keys[chunk]

    def free_kv(self, chunk: int) -> None:
        """See `KVStore.free_kv`."""
        k, v = self._keys.pop(chunk)
        self._taken.add(chunk)
        if chunk not in self._grads:
            self._grads[chunk] = sum_zeros(k), sum_zeros(v)

    def gradient_sums(self, chunk: int) -> tuple[Tensor, Tensor]:
        """See `KVStore.gradient_sums`."""
        return self._grads[chunk]

    def free_gradient_sums(self, chunk: int) -> None:
        """See `KVStore.free_gradient_sums`."""
        del self._grads[chunk]

    def add_gradient_sums(
        self, chunk: int, dk_BKCH: Tensor, dv_BKCH: Tensor, heads: list[int]
    ) -> None:
        """See `KVStore.add_gradient_sums`."""
        if chunk not in self._grads:
            k, v = self._keys[chunk]
            self._grads[chunk] = sum_zeros(k), sum_zeros(v)
        add_heads(self._grads[chunk], (dk_BKCH, dv_BKCH), heads)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held now."""
        return sum(k.nbytes + v.nbytes for k, v in self._keys.values())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradient sums held now."""
        return sum(k.nbytes + v.nbytes for k, v in self._grads.values())

    def _overlaps(self, start: int, end: int) -> Iterator[tuple[int, slice, slice]]:
        """Chunks that `[start, end)` touches: (chunk, slice in the chunk, slice in the run)."""
        for chunk, (chunk_start, chunk_end) in enumerate(self._bounds):
            low, high = max(start, chunk_start), min(end, chunk_end)
            if low < high:
                inner = slice(low - chunk_start, high - chunk_start)
                yield chunk, inner, slice(low - start, high - start)


class KVOwners:
    """Which layer's store holds the keys that a layer attends to, for one chunk.

    Layers that share keys (Gemma 3n, Gemma 4) are given the very tensors of an earlier layer.
    """

    def __init__(self) -> None:
        self._owners: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor], KVStore]] = {}

    def store_of(self, key: Tensor, value: Tensor) -> KVStore | None:
        """The store of the layer that attended with these tensors before; None for the first."""
        known = self._owners.get(id(key))
        if known is not None and known[0]() is key and known[1]() is value:
            return known[2]
        return None

    def add(self, key: Tensor, value: Tensor, store: KVStore) -> None:
        """`store` holds these from now on."""
        self._owners[id(key)] = (weakref.ref(key), weakref.ref(value), store)


def gone(chunk: int) -> SPPOError:
    """The error of reading keys that backward has freed."""
    return SPPOError(
        f"keys of chunk {chunk} are gone: backward ran already and freed them. "
        "Chunked sequences allow one backward per forward (retain_graph=True is not "
        "supported); run the forward again."
    )


def rows_of(x: Tensor, row: int | None) -> Tensor:
    """Row `row` of `x`, or all of them."""
    return x if row is None else x[row : row + 1]


def join_tokens(parts_BKCH: Sequence[Tensor]) -> Tensor:
    """One run of the tokens of all parts, BKTH, in the layout in which the parts lie.

    A projection gives keys as views of BCKH memory. Joined as such they are contiguous runs,
    which CUDA copies in wide words; along their third dim it would go element by element. Kernels
    that want BCKH get what they want.
    """
    parts_BCKH = [part.transpose(1, 2) for part in parts_BKCH]
    if all(part.is_contiguous() for part in parts_BCKH):
        return torch.cat(parts_BCKH, dim=1).transpose(1, 2)
    return torch.cat(list(parts_BKCH), dim=2)


# What is copied keeps the order of its dims in memory, so that what is joined or added later lies
# alike, and a gradient goes back into the projection as it lies.


def dense(x: Tensor) -> Tensor:
    """`x` without gradient, in a storage of its own size.

    A view into a larger tensor (a fused q/k/v projection) would keep all of that alive.
    """
    x = x.detach()
    return x if x.untyped_storage().nbytes() <= x.nbytes else x.clone()


def sum_copy(x: Tensor) -> Tensor:
    """A dense copy of `x` that gradients can be summed in."""
    return x.to(sum_dtype(x), copy=True)


def sum_zeros(x: Tensor) -> Tensor:
    """Zeros like `x` that gradients can be summed in."""
    return torch.zeros_like(x, dtype=sum_dtype(x))


def add_heads(sums: tuple[Tensor, Tensor], more: tuple[Tensor, Tensor], heads: list[int]) -> None:
    """Add to sums of dK and dV, in place, what came for some of their heads."""
    for total, part in zip(sums, more, strict=True):
        # Not by an index, whose copy to the device the host would wait for.
        for place, head in enumerate(heads):
            total[:, head] += part[:, place]


def sum_dtype(x: Tensor) -> torch.dtype:
    """Dtype of gradient sums: float32, or that of `x` if wider."""
    return torch.promote_types(x.dtype, torch.float32)


def _kept(kind: str, x: Tensor, keep: Keep | None) -> Tensor:
    kept = x if keep is None else keep(kind, x)
    # Where `keep` has copied, the tensor may well be a part of something larger: that is its place.
    return dense(kept) if kept is x or kept.data_ptr() == x.data_ptr() else kept
