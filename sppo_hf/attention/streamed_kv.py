"""Keys, values and their gradient sums that wait elsewhere and come back block by block.

`KVStream` belongs to one sequence and makes one `StreamedKV` a layer. A chunk's keys and values
leave when the chunk attends; in forward and backward, attention of a (layer, chunk) walks over the
blocks it reads. While a block is computed on, the next one is prefetched: of this layer, or after
the last block the first of whatever layer comes next. So beside the running chunk's own keys at
most two blocks are on the device, however long the sequence is: the one in use and the one ahead.
(A block of several chunks is joined into one run for the kernel; its parts leave before the next
block comes.)

Backward reads a block's keys again and with them the float32 sums of its gradients, adds its share
and sends the sums away. The running chunk's own sums are complete then and stay, for
`take_gradient` is called next. The bytes that cross the bus per (layer, chunk) are those of the
keys it reads, in forward once; in backward once, and the sums in and out.

Where bytes go is the affair of a `KVTransfer`: host memory, a disk and a test's dictionary are all
one, and orders between copies and compute are its own. See
[Note: dK/dV order] in `sppo_hf.attention.kv_cache` for why backward may free what it frees.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sppo_hf.attention.kv_cache import (
    Keep,
    Keys,
    add_heads,
    dense,
    gone,
    join_tokens,
    rows_of,
    sum_dtype,
    sum_zeros,
)
from sppo_hf.attention.segments import (
    AttentionSegment,
    Block,
    Bounds,
    RowSpans,
    chunk_segments,
    cut_blocks,
)

# B batch rows, K key/value heads, C tokens of a chunk, T tokens of a block, H head size.

Handle = Any
"""Stands for a tensor that was sent; only its mover looks inside."""

Pair = tuple[Handle, Handle]
"""Handles of keys and values, or of their gradient sums."""


class KVTransfer(Protocol):
    """Moves tensors away from the device and back, any number of times each.

    A handle is *here* from `prefetch` or `fetch` until `evict`, else *away*. All calls return at
    once as far as the host is concerned; compute enqueued later finds what they promise.
    """

    def send(self, tensor: Tensor) -> Handle:
        """Start taking `tensor` away; its handle is away, and owns the bytes until `release`.

        The caller may go on reading its own reference, must not write to it, and should drop it
        soon: the device memory is free once that and the copy are over.
        """
        ...

    def prefetch(self, handle: Handle) -> None:
        """Start bringing the bytes back; nothing if they are here."""
        ...

    def fetch(self, handle: Handle) -> Tensor:
        """The tensor on the device, valid until `evict` or `release`; must not be written to."""
        ...

    def evict(self, handle: Handle) -> None:
        """Give the device's copy up; the bytes stay away. Nothing if they are not here."""
        ...

    def release(self, handle: Handle) -> None:
        """Give all bytes up, here and away; the handle ends."""
        ...

    def settle(self) -> None:
        """A good moment to bound what is still leaving: compute may wait for earlier sends."""
        ...


@dataclass(eq=False)
class KVStream:
    """What the layers of one sequence share: the mover, and the block that is ahead of its use."""

    mover: KVTransfer
    """Takes tensors away and brings them back."""
    bounds: Bounds
    """`(start, end)` of every chunk, in tokens."""
    _: KW_ONLY
    rows: tuple[RowSpans, ...] | None
    """The spans of every row, or None when every row is one document."""
    block_tokens: int
    """Most tokens of a block; a longer chunk is a block of its own."""
    linked: bool = True
    """Whether a chunk follows the one before it at once. If not, nothing is prefetched for the next
    one until `begin` says that it comes."""

    def __post_init__(self) -> None:
        # Weakly: autograd's graph holds stores, and one of a frozen layer is to die with forward.
        self._layers: list[weakref.ref[StreamedKV]] = []
        self._ahead: dict[int, Handle] = {}

    def add_layer(self) -> StreamedKV:
        """An empty store for the next layer; the caller keeps it alive."""
        store = StreamedKV(self, len(self._layers))
        self._layers.append(weakref.ref(store))
        return store

    def end_forward(self) -> None:
        """Give up what was prefetched for a chunk that will not run."""
        self.expect(())

    def prefetch(self, handles: Iterable[Handle]) -> None:
        """Start bringing `handles` back, and remember that nobody has used them yet."""
        for handle in handles:
            self.mover.prefetch(handle)
            self._ahead[id(handle)] = handle

    def expect(self, handles: Iterable[Handle]) -> None:
        """Give up what is ahead but not among `handles`, which are used now."""
        wanted = {id(handle) for handle in handles}
        for key in [key for key in self._ahead if key not in wanted]:
            self.mover.evict(self._ahead.pop(key))

    def fetch(self, handle: Handle) -> Tensor:
        """The tensor on the device; no longer ahead of its use."""
        self._ahead.pop(id(handle), None)
        return self.mover.fetch(handle)

    def release(self, handle: Handle) -> None:
        """Give all bytes of `handle` up."""
        self._ahead.pop(id(handle), None)
        self.mover.release(handle)

    def begin(self, chunk: int, *, backward: bool) -> None:
        """Start bringing what a chunk's forward, or its backward, reads first, in its first layer.

        For callers that run chunks one by one (`linked=False`); asking again does nothing more.
        """
        store = self._layers[-1 if backward else 0]()
        if store is not None:
            self.prefetch(
                store.first_of_walk_back(chunk) if backward else store.first_of_walk(chunk)
            )

    def first_after(self, layer: int, chunk: int) -> list[Handle]:
        """What forward reads first after `chunk` has attended in `layer`."""
        if layer + 1 == len(self._layers) and not self.linked:
            return []
        layer, chunk = (layer + 1, chunk) if layer + 1 < len(self._layers) else (0, chunk + 1)
        store = self._layers[layer]() if chunk < len(self.bounds) else None
        return [] if store is None else store.first_of_walk(chunk)

    def first_before(self, layer: int, chunk: int) -> list[Handle]:
        """What backward reads first after that of `chunk` in `layer`."""
        if not (layer or self.linked):
            return []
        layer, chunk = (layer - 1, chunk) if layer else (len(self._layers) - 1, chunk - 1)
        store = self._layers[layer]() if chunk >= 0 else None
        return [] if store is None else store.first_of_walk_back(chunk)


@dataclass(slots=True)
class _Here:
    """Keys and values (or their gradient sums) of a chunk that are on the device."""

    chunk: int
    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class _Like:
    """What a chunk's keys and values look like while they are away."""

    k_shape: torch.Size
    v_shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of the sums of their gradients."""
        return torch.promote_types(self.dtype, torch.float32)

    def zeros(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        of = functools.partial(torch.zeros, dtype=dtype, device=self.device)
        return of(self.k_shape), of(self.v_shape)


class _BlockKeys:
    def __init__(self, block: Block, k_BKTH: Tensor, v_BKTH: Tensor) -> None:
        self.block = block
        self.gradient: tuple[Tensor, Tensor] | None = None
        self._here: tuple[Tensor, Tensor] | None = (k_BKTH, v_BKTH)

    def run(self, start: int, end: int, row: int | None) -> tuple[Tensor, Tensor]:
        assert self._here is not None, "a block is read before the next one is asked for"
        tokens = slice(start - self.block.start, end - self.block.start)
        k_BKTH, v_BKTH = self._here
        return rows_of(k_BKTH, row)[:, :, tokens], rows_of(v_BKTH, row)[:, :, tokens]

    def add_gradient(self, start: int, dk_BKTH: Tensor, dv_BKTH: Tensor, row: int | None) -> None:
        assert self._here is not None, "a gradient comes before the next block is asked for"
        if self.gradient is None:
            if dk_BKTH.shape == self._here[0].shape:
                self.gradient = (dk_BKTH, dv_BKTH)
                return
            self.gradient = (sum_zeros(self._here[0]), sum_zeros(self._here[1]))
        tokens = slice(start - self.block.start, start - self.block.start + dk_BKTH.shape[2])
        sum_k, sum_v = (x.to(sum_dtype(x)) for x in self.gradient)
        self.gradient = (sum_k, sum_v)
        rows_of(sum_k, row)[:, :, tokens] += dk_BKTH
        rows_of(sum_v, row)[:, :, tokens] += dv_BKTH

    def close(self) -> None:
        """Let go of the keys; gradients stay."""
        self._here = None


class StreamedKV:
    """Keys and values of one layer that wait elsewhere; a `KVStore`. Made by `KVStream`."""

    def __init__(self, stream: KVStream, layer: int) -> None:
        self._stream = stream
        self._layer = layer
        self._keys: dict[int, Pair] = {}
        self._sums: dict[int, Pair] = {}
        self._blocks: dict[int, tuple[Block, ...]] = {}
        self._window: int | None = None
        self._local: int | None = None
        self._like: dict[int, _Like] = {}
        self._own: _Here | None = None
        self._own_sums: _Here | None = None

    def put(self, chunk: int, k_BKCH: Tensor, v_BKCH: Tensor, *, keep: Keep | None = None) -> None:
        """Send keys and values of `chunk` away; here until its forward walk is over.

        `keep` is not used: what leaves needs no place to stay.
        """
        start, end = self._stream.bounds[chunk]
        assert k_BKCH.shape[2] == end - start, "a chunk's keys must cover exactly its tokens"
        own = self._own = _Here(chunk, dense(k_BKCH), dense(v_BKCH))
        mover = self._stream.mover
        self._keys[chunk] = (mover.send(own.k), mover.send(own.v))
        self._like[chunk] = _Like(own.k.shape, own.v.shape, own.k.dtype, own.k.device)

    def blocks(
        self,
        segments: tuple[AttentionSegment, ...],
        *,
        window: int | None,
        local: int | None = None,
    ) -> tuple[Block, ...]:
        """The blocks in which `segments` are read; remembers the mask for what is ahead."""
        self._window, self._local = window, local
        return self._cut(segments)

    def walk(
        self, chunk: int, blocks: tuple[Block, ...], *, borrowed: bool = False
    ) -> Iterator[Keys]:
        """See `KVStore.walk`."""
        self._blocks[chunk] = blocks
        after = functools.partial(self._stream.first_after, self._layer, chunk)
        if borrowed:
            after = _nothing  # which layer comes next is not known here
        try:
            yield from self._visit(blocks, after, sums=False)
        finally:
            self._own = None

    def walk_back(
        self, chunk: int, blocks: tuple[Block, ...], *, borrowed: bool = False
    ) -> Iterator[Keys]:
        """See `KVStore.walk_back`."""
        before = functools.partial(self._stream.first_before, self._layer, chunk)
        running: int | None = chunk
        if borrowed:
            before, running = _nothing, None
        for keys in self._visit(blocks, before, sums=True):
            yield keys
            keys.close()
            self._add_gradient(keys, running)
            self._stream.mover.settle()

    def take_gradient(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Return dK and dV of `chunk` in the keys' own dtype; frees it and all later chunks.

        Backward is through with the later ones by now, or will never come to them.
        """
        like = self._like[chunk]
        own, self._own_sums = self._own_sums, None
        if own is not None:
            assert own.chunk == chunk, "the chunk that walked back takes its gradient next"
            gradient = (own.k.to(like.dtype), own.v.to(like.dtype))
        elif chunk in self._sums:  # later chunks read its keys, its own output was not used
            sum_k, sum_v = (self._stream.fetch(handle) for handle in self._sums[chunk])
            gradient = (sum_k.to(like.dtype, copy=True), sum_v.to(like.dtype, copy=True))
        else:
            gradient = like.zeros(like.dtype)
        for entries in (self._keys, self._sums):
            for done in [other for other in entries if other >= chunk]:
                for handle in entries.pop(done):
                    self._stream.release(handle)
        return gradient

    def put_attended(self, chunk: int, k_BKCH: Tensor, v_BKCH: Tensor) -> None:
        """See `KVStore.put_attended`."""
        self.put(chunk, k_BKCH, v_BKCH)
        self._own = None
        self._stream.mover.settle()  # many chunks' follow each other

    def chunk_kv(self, chunk: int) -> tuple[Tensor, Tensor]:
        """See `KVStore.chunk_kv`; copies, for what was brought is given up at once."""
        return self._copies(self._keys[chunk])

    def free_kv(self, chunk: int) -> None:
        """See `KVStore.free_kv`."""
        for handle in self._keys.pop(chunk):
            self._stream.release(handle)

    def gradient_sums(self, chunk: int) -> tuple[Tensor, Tensor]:
        """See `KVStore.gradient_sums`; copies, for what was brought is given up at once."""
        like = self._like[chunk]
        if chunk not in self._sums:
            return like.zeros(like.sum_dtype)
        return self._copies(self._sums[chunk])

    def free_gradient_sums(self, chunk: int) -> None:
        """See `KVStore.free_gradient_sums`."""
        for handle in self._sums.pop(chunk, ()):
            self._stream.release(handle)

    def add_gradient_sums(
        self, chunk: int, dk_BKCH: Tensor, dv_BKCH: Tensor, heads: list[int]
    ) -> None:
        """See `KVStore.add_gradient_sums`."""
        before, like = self._sums.pop(chunk, None), self._like[chunk]
        if before is None:
            sums = like.zeros(like.sum_dtype)
        else:
            sums = self._copies(before)
            for handle in before:
                self._stream.release(handle)
        add_heads(sums, (dk_BKCH, dv_BKCH), heads)
        sum_k, sum_v = sums
        self._sums[chunk] = (self._stream.mover.send(sum_k), self._stream.mover.send(sum_v))
        self._stream.mover.settle()

    def _copies(self, pair: Pair) -> tuple[Tensor, Tensor]:
        k, v = (self._stream.fetch(handle).clone() for handle in pair)
        for handle in pair:
            self._stream.mover.evict(handle)
        return k, v

    def first_of_walk(self, chunk: int) -> list[Handle]:
        """What forward of `chunk` will read first, as far as it can be known before it comes."""
        if not self._keys:
            return []
        start, end = self._stream.bounds[chunk]
        rows = self._stream.rows
        segments = chunk_segments(start, end, rows, window=self._window, local=self._local)
        return [h for block in self._cut(segments)[:1] for h in self._handles(block)]

    def first_of_walk_back(self, chunk: int) -> list[Handle]:
        """What backward of `chunk` will read first."""
        return [
            handle
            for block in self._blocks.get(chunk, ())[:1]
            for handle in self._handles(block, sums=True)
        ]

    def _cut(self, segments: tuple[AttentionSegment, ...]) -> tuple[Block, ...]:
        return cut_blocks(self._stream.bounds, segments, block_tokens=self._stream.block_tokens)

    def _handles(self, block: Block, *, sums: bool = False) -> list[Handle]:
        """What must come for `block`, in the order in which it is used."""
        chunks = [chunk for chunk in block.chunks if self._own is None or chunk != self._own.chunk]
        pairs = [self._keys[chunk] for chunk in chunks if chunk in self._keys]
        if sums:
            pairs += [self._sums[chunk] for chunk in chunks if chunk in self._sums]
        return [handle for pair in pairs for handle in pair]

    def _visit(
        self, blocks: tuple[Block, ...], upcoming: Callable[[], list[Handle]], *, sums: bool
    ) -> Iterator[_BlockKeys]:
        """Bring one block after the other, each prefetched while the one before it is in use.

        `upcoming` tells what is needed after the last of them, by whichever layer.
        """
        stream = self._stream
        stream.expect(handle for block in blocks[:1] for handle in self._handles(block, sums=sums))
        for index, block in enumerate(blocks):
            k_BKTH, k_handles = self._join(block, 0)
            v_BKTH, v_handles = self._join(block, 1)
            keys = _BlockKeys(block, k_BKTH, v_BKTH)
            del k_BKTH, v_BKTH
            following = blocks[index + 1 : index + 2]
            if following:
                stream.prefetch(self._handles(following[0], sums=sums))
            else:
                stream.prefetch(upcoming())
            try:
                yield keys
            finally:
                keys.close()
                for handle in k_handles + v_handles:
                    stream.mover.evict(handle)

    def _join(self, block: Block, which: int) -> tuple[Tensor, list[Handle]]:
        """Keys (`which` 0) or values (1) of `block` as one run, and what to evict after its use."""
        parts: list[Tensor] = []
        handles: list[Handle] = []
        for chunk in block.chunks:
            if self._own is not None and self._own.chunk == chunk:
                parts.append((self._own.k, self._own.v)[which])
                continue
            if chunk not in self._keys:
                raise gone(chunk)
            handles.append(self._keys[chunk][which])
            parts.append(self._stream.fetch(handles[-1]))
        if len(parts) == 1:
            return parts[0], handles
        joined = join_tokens(parts)
        for handle in handles:
            self._stream.mover.evict(handle)
        return joined, []

    def _add_gradient(self, keys: _BlockKeys, running: int | None) -> None:
        """Add a block's gradient to the sums of its chunks; those of the running chunk stay.

        With None none stays: a layer that borrows the keys takes no gradient of theirs.
        """
        if keys.gradient is None:
            return
        (dk_BKTH, dv_BKTH), keys.gradient = keys.gradient, None
        mover = self._stream.mover
        for chunk in keys.block.chunks:
            start, end = self._stream.bounds[chunk]
            tokens = slice(start - keys.block.start, end - keys.block.start)
            before = self._sums.pop(chunk, (None, None))
            sum_k = self._sum(before[0], dk_BKTH[:, :, tokens])
            sum_v = self._sum(before[1], dv_BKTH[:, :, tokens])
            if chunk == running:
                self._own_sums = _Here(chunk, sum_k, sum_v)
            else:
                self._sums[chunk] = (mover.send(sum_k), mover.send(sum_v))

    def _sum(self, before: Handle | None, share_BKCH: Tensor) -> Tensor:
        if before is None:
            return dense(share_BKCH.to(sum_dtype(share_BKCH)))
        total = self._stream.fetch(before) + share_BKCH
        self._stream.release(before)
        return total


def _nothing() -> list[Handle]:
    return []
