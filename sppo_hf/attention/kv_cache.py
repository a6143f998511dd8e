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
forward and its backward. `StreamedKV` keeps them off the device and streams them through in blocks.
Attention sees both as a `KVStore`: `LayerKV` says what the methods do.

[Note: streamed keys and values] A `KVStream` belongs to one sequence and makes one `StreamedKV` per
layer. A chunk's K/V are offloaded when the chunk attends; in forward and backward, attention of a
(layer, chunk) reads one block after the other. During the compute on a block the next one is
prefetched: of this layer, or after its last block the first of the layer that runs next. So beside
the running chunk's own K/V at most two blocks are on the device, however long the sequence is. (A
block of several chunks is joined into one run for the kernel; its parts are freed before the next
block is loaded.) Backward reads a block's K/V and the float32 sums of their gradients, adds its
share and offloads the sums. The running chunk's own sums are complete then and are kept on the
device, because `take_gradient` is called next. Bytes copied per (layer, chunk): the K/V that it
reads, once in forward and once in backward, and the sums both ways. A `KVTransfer` does the copies,
to host memory or disk, and orders them against compute.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sppo_hf.attention.segments import (
    AttentionSegment,
    Block,
    Bounds,
    RowSpans,
    chunk_segments,
    cut_blocks,
    whole_sequence,
)
from sppo_hf.errors import SPPOError

# B batch rows, K key/value heads, C tokens of a chunk, T tokens of a run of keys or of a block, H
# head size.

Keep = Callable[[str, Tensor], Tensor]
"""Copies a tensor ("keys" or "values") to where it can stay on the device, if need be; returns it
from there."""

LoadKV = Callable[[], tuple[Tensor, Tensor]]
"""Loads offloaded keys and values of a chunk back onto the device, each BKCH."""

Handle = Any
"""An offloaded tensor; opaque to all but the `KVTransfer` that made it."""

Pair = tuple[Any, Any]
"""Keys and values, or the sums of their gradients: tensors BKCH, or their handles."""


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


class KVTransfer(Protocol):
    """Offloads tensors and loads them back, any number of times each.

    A handle's tensor is on the device from `prefetch` or `fetch` until `evict`. No call blocks the
    host; compute that is enqueued later waits for the copies that it needs.
    """

    def send(self, tensor: Tensor) -> Handle:
        """Start offloading `tensor`; the handle owns the bytes until `release`.

        The caller may go on reading `tensor` but must not write to it, and should drop it soon: the
        device memory is free when the caller's reference and the copy are gone.
        """
        ...

    def prefetch(self, handle: Handle) -> None:
        """Start loading the tensor; does nothing if it is on the device."""
        ...

    def fetch(self, handle: Handle) -> Tensor:
        """Return the tensor on the device, read-only and valid until `evict` or `release`."""
        ...

    def evict(self, handle: Handle) -> None:
        """Free the copy on the device, if there is one; the offloaded bytes are kept."""
        ...

    def release(self, handle: Handle) -> None:
        """Free all bytes, on the device and offloaded; the handle becomes invalid."""
        ...

    def settle(self) -> None:
        """Bound the bytes of pending sends: later compute may have to wait for earlier ones."""
        ...


@dataclass(eq=False)
class KVStream:
    """What the layers of one sequence share: the transfer, and what is prefetched but not used."""

    transfer: KVTransfer
    """Does the copies."""
    bounds: Bounds
    """`(start, end)` of every chunk, in tokens."""
    _: KW_ONLY
    rows: tuple[RowSpans, ...] | None
    """The documents of every row, or None when every row is one document."""
    block_tokens: int
    """Maximum tokens of a block; a longer chunk is a block by itself."""
    linked: bool = True
    """Whether each chunk runs right after the one before it. If not, nothing is prefetched for the
    next chunk until `begin` announces it."""

    def __post_init__(self) -> None:
        # Weak: autograd's graph holds the stores, and that of a frozen layer ends with forward.
        self._layers: list[weakref.ref[StreamedKV]] = []
        self._prefetched: dict[int, Handle] = {}

    def add_layer(self) -> StreamedKV:
        """Return an empty store for the next layer; the caller keeps it alive."""
        store = StreamedKV(self, len(self._layers))
        self._layers.append(weakref.ref(store))
        return store

    def end_forward(self) -> None:
        """Evict what was prefetched for a chunk that will not run."""
        self.evict_except(())

    def prefetch(self, handles: Iterable[Handle]) -> None:
        """Start loading `handles`, and remember them as not used yet."""
        for handle in handles:
            self.transfer.prefetch(handle)
            self._prefetched[id(handle)] = handle

    def evict_except(self, handles: Iterable[Handle]) -> None:
        """Evict what was prefetched but is not among `handles`, which are used now."""
        wanted = {id(handle) for handle in handles}
        for key in [key for key in self._prefetched if key not in wanted]:
            self.transfer.evict(self._prefetched.pop(key))

    def fetch(self, handle: Handle) -> Tensor:
        """Return the tensor on the device; it counts as used."""
        self._prefetched.pop(id(handle), None)
        return self.transfer.fetch(handle)

    def release(self, handle: Handle) -> None:
        """Free all bytes of `handle`."""
        self._prefetched.pop(id(handle), None)
        self.transfer.release(handle)

    def begin(self, chunk: int, *, backward: bool) -> None:
        """Start loading what the forward or backward of `chunk` reads first, in its first layer.

        For callers that run chunks one by one (`linked=False`); repeated calls do nothing.
        """
        self.prefetch(self._first_handles(-1 if backward else 0, chunk, backward=backward))

    def next_handles(self, layer: int, chunk: int, *, backward: bool) -> list[Handle]:
        """Return what is read first after attention of `chunk` in `layer`.

        By the next layer or, after the last one, by the first layer of the next chunk; in backward
        by the one before.
        """
        step = -1 if backward else 1
        layer += step
        if not 0 <= layer < len(self._layers):
            if not self.linked:
                return []
            layer, chunk = layer % len(self._layers), chunk + step
        return self._first_handles(layer, chunk, backward=backward)

    def _first_handles(self, layer: int, chunk: int, *, backward: bool) -> list[Handle]:
        store = self._layers[layer]() if 0 <= chunk < len(self.bounds) else None
        return [] if store is None else store.first_handles(chunk, backward=backward)


@dataclass(slots=True)
class _OnDevice:
    """K/V of a chunk, or the sums of their gradients, that are on the device."""

    chunk: int
    k: Tensor
    v: Tensor


class StreamedKV(KVByChunk):
    """Keys and values of one layer that are offloaded; made by `KVStream.add_layer`."""

    def __init__(self, stream: KVStream, layer: int) -> None:
        super().__init__(stream.bounds)
        self._stream = stream
        self._layer = layer
        self._blocks: dict[int, tuple[Block, ...]] = {}
        self._window: int | None = None
        self._local: int | None = None
        self._shapes: dict[int, tuple[torch.Size, torch.Size]] = {}
        self._empty = torch.empty(0, device="cpu")
        """Has the dtype and device of keys and values."""
        self._own: _OnDevice | None = None
        self._own_sums: _OnDevice | None = None

    def put(self, chunk: int, k_BKCH: Tensor, v_BKCH: Tensor, *, keep: Keep | None = None) -> None:
        """Start offloading K/V of `chunk`; they are on the device until its attention is over.

        `keep` is not used, because nothing is kept on the device.
        """
        start, end = self._bounds[chunk]
        assert k_BKCH.shape[2] == end - start, "a chunk's keys must cover exactly its tokens"
        own = self._own = _OnDevice(chunk, dense(k_BKCH), dense(v_BKCH))
        self._keys[chunk] = self._hold((own.k, own.v))
        self._shapes[chunk] = own.k.shape, own.v.shape
        self._empty = own.k.new_empty(0)

    def _hold(self, pair: tuple[Tensor, Tensor]) -> Pair:
        k, v = pair
        return self._stream.transfer.send(k), self._stream.transfer.send(v)

    def _read(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """Return copies, because what was fetched is evicted at once."""
        k, v = (self._stream.fetch(handle).clone() for handle in pair)
        for handle in pair:
            self._stream.transfer.evict(handle)
        return k, v

    def _release(self, pair: Pair) -> None:
        for handle in pair:
            self._stream.release(handle)

    def _like(self, chunk: int) -> tuple[Tensor, Tensor]:
        k, v = (self._empty.new_empty(()).expand(shape) for shape in self._shapes[chunk])
        return k, v

    def blocks(
        self,
        segments: tuple[AttentionSegment, ...],
        *,
        window: int | None,
        local: int | None = None,
    ) -> tuple[Block, ...]:
        """Return the blocks in which `segments` are read; the mask is noted for prefetches."""
        self._window, self._local = window, local
        return self._blocks_of(segments)

    def forward_blocks(
        self, chunk: int, blocks: tuple[Block, ...], *, borrowed: bool = False
    ) -> Iterator[LayerKV]:
        """See `LayerKV.forward_blocks`."""
        self._blocks[chunk] = blocks
        try:
            yield from self._load_blocks(chunk, blocks, borrowed=borrowed, backward=False)
        finally:
            self._own = None

    def backward_blocks(
        self, chunk: int, blocks: tuple[Block, ...], *, borrowed: bool = False
    ) -> Iterator[LayerKV]:
        """See `LayerKV.backward_blocks`."""
        loaded = self._load_blocks(chunk, blocks, borrowed=borrowed, backward=True)
        # The blocks second: whatever ends the first of them lets it evict what it has loaded.
        for keys, block in zip(loaded, blocks, strict=True):
            yield keys
            self._add_gradient(block, keys.take_sums(0), None if borrowed else chunk)
            self._stream.transfer.settle()

    def take_gradient(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Return dK and dV of `chunk` in the keys' own dtype; frees it and all later chunks.

        Backward of the later ones is over by now, or will never run.
        """
        k, v = self._like(chunk)
        own, self._own_sums = self._own_sums, None
        if own is not None:
            assert own.chunk == chunk, "the chunk that walked back takes its gradient next"
            gradient = (own.k.to(k.dtype), own.v.to(v.dtype))
        elif chunk in self._sums:  # later chunks read its keys, but its own output was not used
            sum_k, sum_v = (self._stream.fetch(handle) for handle in self._sums[chunk])
            gradient = (sum_k.to(k.dtype, copy=True), sum_v.to(v.dtype, copy=True))
        else:
            gradient = (torch.zeros_like(k), torch.zeros_like(v))
        for entries in (self._keys, self._sums):
            for done in [other for other in entries if other >= chunk]:
                self._release(entries.pop(done))
        return gradient

    def put_attended(self, chunk: int, k_BKCH: Tensor, v_BKCH: Tensor) -> None:
        """See `LayerKV.put_attended`."""
        self.put(chunk, k_BKCH, v_BKCH)
        self._own = None
        self._stream.transfer.settle()  # K/V of many chunks may follow each other

    def free_kv(self, chunk: int) -> None:
        """See `LayerKV.free_kv`."""
        self._release(self._keys.pop(chunk))

    def add_gradient_sums(
        self, chunk: int, dk_BKCH: Tensor, dv_BKCH: Tensor, heads: list[int]
    ) -> None:
        """Add as all stores do; the sums that are sent again are bounded."""
        super().add_gradient_sums(chunk, dk_BKCH, dv_BKCH, heads)
        self._stream.transfer.settle()

    def first_handles(self, chunk: int, *, backward: bool) -> list[Handle]:
        """Return what `chunk` will read first, in forward as far as is known before it runs."""
        blocks = self._blocks.get(chunk, ())
        if not backward and self._keys:
            rows, mask = self._stream.rows, {"window": self._window, "local": self._local}
            blocks = self._blocks_of(chunk_segments(*self._bounds[chunk], rows, **mask))
        return self._first_of(blocks, sums=backward)

    def _first_of(self, blocks: tuple[Block, ...], *, sums: bool) -> list[Handle]:
        return [handle for block in blocks[:1] for handle in self._handles(block, sums=sums)]

    def _blocks_of(self, segments: tuple[AttentionSegment, ...]) -> tuple[Block, ...]:
        return cut_blocks(self._stream.bounds, segments, block_tokens=self._stream.block_tokens)

    def _handles(self, block: Block, *, sums: bool = False) -> list[Handle]:
        """Return what must be loaded for `block`, in the order of its use."""
        chunks = [chunk for chunk in block.chunks if self._own is None or chunk != self._own.chunk]
        pairs = [self._keys[chunk] for chunk in chunks if chunk in self._keys]
        if sums:
            pairs += [self._sums[chunk] for chunk in chunks if chunk in self._sums]
        return [handle for pair in pairs for handle in pair]

    def _load_blocks(
        self, chunk: int, blocks: tuple[Block, ...], *, borrowed: bool, backward: bool
    ) -> Iterator[LayerKV]:
        """Yield one loaded block after the other; each is prefetched while the last is in use.

        After the last block what comes next is prefetched, in this or another layer. If the K/V are
        `borrowed`, the layer that runs next is not known here.
        """
        stream = self._stream
        stream.evict_except(self._first_of(blocks, sums=backward))
        for index, block in enumerate(blocks):
            k_BKTH, k_handles = self._join(block, 0)
            v_BKTH, v_handles = self._join(block, 1)
            keys = LayerKV.of_block(block.start, block.end, k_BKTH, v_BKTH)
            del k_BKTH, v_BKTH
            if index + 1 < len(blocks):
                stream.prefetch(self._handles(blocks[index + 1], sums=backward))
            elif not borrowed:
                stream.prefetch(stream.next_handles(self._layer, chunk, backward=backward))
            try:
                yield keys
            finally:
                keys.take_sums(0)
                for handle in k_handles + v_handles:
                    stream.transfer.evict(handle)

    def _join(self, block: Block, which: int) -> tuple[Tensor, list[Handle]]:
        """Return keys (`which` 0) or values (1) of `block` as one run, and what to evict later."""
        parts: list[Tensor] = []
        handles: list[Handle] = []
        for chunk in block.chunks:
            if self._own is not None and self._own.chunk == chunk:
                parts.append((self._own.k, self._own.v)[which])
                continue
            if chunk not in self._keys:
                raise kv_freed_error(chunk)
            handles.append(self._keys[chunk][which])
            parts.append(self._stream.fetch(handles[-1]))
        if len(parts) == 1:
            return parts[0], handles
        joined = join_tokens(parts)
        for handle in handles:
            self._stream.transfer.evict(handle)
        return joined, []

    def _add_gradient(
        self, block: Block, gradient: tuple[Tensor, Tensor] | None, running: int | None
    ) -> None:
        """Add a block's gradient to the sums of its chunks, and offload the sums.

        Those of the `running` chunk are kept on the device; None offloads all (a layer that borrows
        the K/V takes no gradient).
        """
        if gradient is None:
            return
        dk_BKTH, dv_BKTH = gradient
        for chunk in block.chunks:
            start, end = self._bounds[chunk]
            tokens = slice(start - block.start, end - block.start)
            before = self._sums.pop(chunk, (None, None))
            sum_k = self._add_to_sum(before[0], dk_BKTH[:, :, tokens])
            sum_v = self._add_to_sum(before[1], dv_BKTH[:, :, tokens])
            if chunk == running:
                self._own_sums = _OnDevice(chunk, sum_k, sum_v)
            else:
                self._sums[chunk] = self._hold((sum_k, sum_v))

    def _add_to_sum(self, before: Handle | None, share_BKCH: Tensor) -> Tensor:
        if before is None:
            return dense(share_BKCH.to(sum_dtype(share_BKCH)))
        total = self._stream.fetch(before) + share_BKCH
        self._stream.release(before)
        return total


KVStore = LayerKV | StreamedKV
"""Keys and values of one layer for one sequence, on the device or offloaded."""


KVOwners = dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor], KVStore]]
"""By the identity of keys, within one chunk: they, their values, and the store that holds both.

Layers that share K/V (Gemma 3n, Gemma 4) receive the identical tensors of an earlier layer."""


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
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def own_sum(x: Tensor) -> Tensor:
    """Return `x`, or where it shares or repeats memory a dense copy in the dtype of sums."""
    owned = x.untyped_storage().nbytes() == x.nbytes and 0 not in x.stride()
    return x if owned else x.to(sum_dtype(x), copy=True)


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
