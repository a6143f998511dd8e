"""Offloaded keys, values and gradient sums that are streamed through the device block by block.

A `KVStream` belongs to one sequence and makes one `StreamedKV` per layer. A chunk's K/V are
offloaded when the chunk attends; in forward and backward, attention of a (layer, chunk) reads one
block after the other. During the compute on a block the next one is prefetched: of this layer, or
after its last block the first of the layer that runs next. So beside the running chunk's own K/V at
most two blocks are on the device, however long the sequence is. (A block of several chunks is
joined into one run for the kernel; its parts are freed before the next block is loaded.)

Backward reads a block's K/V and the float32 sums of their gradients, adds its share and offloads
the sums. The running chunk's own sums are complete then and are kept on the device, because
`take_gradient` is called next. Bytes copied per (layer, chunk): the K/V that it reads, once in
forward and once in backward, and the sums both ways.

A `KVTransfer` does the copies, to host memory or disk, and orders them against compute. For why
backward may free what it frees see [Note: dK/dV order] in `sppo_hf.attention.kv_cache`.
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
    KVByChunk,
    LayerKV,
    Pair,
    dense,
    join_tokens,
    kv_freed_error,
    sum_dtype,
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
"""An offloaded tensor; opaque to all but the `KVTransfer` that made it."""


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
        store = self._layers[-1 if backward else 0]()
        if store is not None:
            self.prefetch(
                store.first_backward_handles(chunk)
                if backward
                else store.first_forward_handles(chunk)
            )

    def next_forward_handles(self, layer: int, chunk: int) -> list[Handle]:
        """Return what forward reads first after attention of `chunk` in `layer`."""
        if layer + 1 == len(self._layers) and not self.linked:
            return []
        layer, chunk = (layer + 1, chunk) if layer + 1 < len(self._layers) else (0, chunk + 1)
        store = self._layers[layer]() if chunk < len(self.bounds) else None
        return [] if store is None else store.first_forward_handles(chunk)

    def next_backward_handles(self, layer: int, chunk: int) -> list[Handle]:
        """Return what backward reads first after attention of `chunk` in `layer`."""
        if not (layer or self.linked):
            return []
        layer, chunk = (layer - 1, chunk) if layer else (len(self._layers) - 1, chunk - 1)
        store = self._layers[layer]() if chunk >= 0 else None
        return [] if store is None else store.first_backward_handles(chunk)


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
        after = functools.partial(self._stream.next_forward_handles, self._layer, chunk)
        if borrowed:
            after = _no_handles  # the layer that runs next is not known here
        try:
            yield from self._load_blocks(blocks, after, sums=False)
        finally:
            self._own = None

    def backward_blocks(
        self, chunk: int, blocks: tuple[Block, ...], *, borrowed: bool = False
    ) -> Iterator[LayerKV]:
        """See `LayerKV.backward_blocks`."""
        before = functools.partial(self._stream.next_backward_handles, self._layer, chunk)
        running: int | None = chunk
        if borrowed:
            before, running = _no_handles, None
        # The blocks second: whatever ends the first of them lets it evict what it has loaded.
        for keys, block in zip(self._load_blocks(blocks, before, sums=True), blocks, strict=True):
            yield keys
            self._add_gradient(block, keys.take_sums(0), running)
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

    def first_forward_handles(self, chunk: int) -> list[Handle]:
        """Return what forward of `chunk` will read first, as far as is known before it runs."""
        if not self._keys:
            return []
        start, end = self._stream.bounds[chunk]
        rows = self._stream.rows
        segments = chunk_segments(start, end, rows, window=self._window, local=self._local)
        return [h for block in self._blocks_of(segments)[:1] for h in self._handles(block)]

    def first_backward_handles(self, chunk: int) -> list[Handle]:
        """Return what backward of `chunk` will read first."""
        return [
            handle
            for block in self._blocks.get(chunk, ())[:1]
            for handle in self._handles(block, sums=True)
        ]

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
        self, blocks: tuple[Block, ...], upcoming: Callable[[], list[Handle]], *, sums: bool
    ) -> Iterator[LayerKV]:
        """Yield one loaded block after the other; each is prefetched while the last is in use.

        `upcoming` returns what is needed after the last block, by this or another layer.
        """
        stream = self._stream
        stream.evict_except(
            handle for block in blocks[:1] for handle in self._handles(block, sums=sums)
        )
        for index, block in enumerate(blocks):
            k_BKTH, k_handles = self._join(block, 0)
            v_BKTH, v_handles = self._join(block, 1)
            keys = LayerKV.of_block(block.start, block.end, k_BKTH, v_BKTH)
            del k_BKTH, v_BKTH
            following = blocks[index + 1 : index + 2]
            if following:
                stream.prefetch(self._handles(following[0], sums=sums))
            else:
                stream.prefetch(upcoming())
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


def _no_handles() -> list[Handle]:
    return []
