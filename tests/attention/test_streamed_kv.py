"""Offloaded K/V read in blocks: same results for any blocks, and bounded bytes on the device."""

import gc
import itertools
import weakref
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sppo_hf.attention.backends.aten import CPUFlash
from sppo_hf.attention.backends.base import AttentionOutput, Gradients
from sppo_hf.attention.backends.reference import Reference
from sppo_hf.attention.chunk_attention import AttentionCall, chunk_attention
from sppo_hf.attention.kv_cache import KVStream, LayerKV
from sppo_hf.attention.segments import RowSpans, chunk_segments
from sppo_hf.errors import SPPOError
from tests.attention.layers import KV_BYTES_PER_TOKEN, B, Layers, N


@dataclass(eq=False)
class Handle:
    """Bytes of a sent tensor in memory of their own, and a copy of it on the device, if any."""

    label: str
    offloaded: np.ndarray | None
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_device: Tensor | None = None


@dataclass
class PoisoningTransfer:
    """A `KVTransfer` that copies bytes to other memory, and fills with NaN what is evicted.

    Whoever still reads an evicted or released tensor then has NaN in its results. `trace` has the
    loads in order; "late" ones were not prefetched.
    """

    handles: list[Handle] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    peak_device_bytes: int = 0
    settled: int = 0

    def send(self, tensor: Tensor) -> Handle:
        assert not tensor.requires_grad
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), (
            "what is sent must not drag a larger storage along"
        )
        in_memory = tensor.as_strided((tensor.numel(),), (1,), 0)
        offloaded = in_memory.view(torch.uint8).numpy().copy()
        label = f"p{len(self.handles)}"
        self.handles.append(Handle(label, offloaded, tensor.shape, tensor.stride(), tensor.dtype))
        return self.handles[-1]

    def prefetch(self, handle: Handle) -> None:
        assert handle.offloaded is not None, "prefetched after its release"
        if handle.on_device is None:
            self.trace.append(f"prefetch {handle.label}")
            flat = torch.from_numpy(handle.offloaded.copy()).view(handle.dtype)
            handle.on_device = flat.as_strided(handle.shape, handle.stride)
            self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)

    def fetch(self, handle: Handle) -> Tensor:
        if handle.on_device is None:
            self.trace.append(f"late {handle.label}")
        self.prefetch(handle)
        assert handle.on_device is not None
        return handle.on_device

    def evict(self, handle: Handle) -> None:
        assert handle.offloaded is not None, "evicted after its release"
        if handle.on_device is not None:
            handle.on_device.fill_(float("nan"))
        handle.on_device = None

    def release(self, handle: Handle) -> None:
        assert handle.offloaded is not None, "released twice"
        self.evict(handle)
        handle.offloaded = None

    def settle(self) -> None:
        self.settled += 1

    @property
    def device_bytes(self) -> int:
        """Bytes of all copies on the device."""
        return sum(h.on_device.nbytes for h in self.handles if h.on_device is not None)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that were sent and not released."""
        return sum(h.offloaded.nbytes for h in self.handles if h.offloaded is not None)


def streamed(bounds, *, layers, block_tokens, rows=None):
    """Stores of a stream, and the transfer below them."""
    transfer = PoisoningTransfer()
    stream = KVStream(transfer, bounds, rows=rows, block_tokens=block_tokens)
    return [stream.add_layer() for _ in range(layers)], transfer, stream


def assert_same(bounds, *, block_tokens, rows=None, num_layers=2, **kwargs):
    plain = Layers(bounds, [LayerKV(bounds) for _ in range(num_layers)], rows=rows, **kwargs)
    stores, transfer, _ = streamed(bounds, layers=num_layers, block_tokens=block_tokens, rows=rows)
    ours = Layers(bounds, stores, rows=rows, **kwargs)
    outs, expected = ours.forward(), plain.forward()
    torch.testing.assert_close(outs, expected, rtol=1e-12, atol=1e-12)
    grads, expected_grads = ours.gradients(outs), plain.gradients(expected)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-12, atol=1e-12)
    assert ours.counters == plain.counters
    assert transfer.device_bytes == transfer.offloaded_bytes == 0, "all is released after backward"
    return transfer


UNEVEN = ((0, 1), (1, 3), (3, 8), (8, 9), (9, 13))
PACKED = (RowSpans(((0, 4), (4, 13)), 13), RowSpans(((0, 1), (1, 7), (7, 13)), 13))


@st.composite
def layouts(draw):
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    edges = [0, *itertools.accumulate(lengths)]
    tokens = edges[-1]

    def row():
        cuts = draw(st.sets(st.integers(1, tokens - 1), max_size=3)) if tokens > 1 else set()
        spans = tuple(itertools.pairwise([0, *sorted(cuts), tokens]))
        valid = draw(st.integers(spans[-1][0] + 1, tokens))
        return RowSpans(spans, valid)

    rows = draw(st.sampled_from(["one document", "alike", "each its own"]))
    if rows == "alike":
        spans = (row(),) * B
    else:
        spans = None if rows == "one document" else tuple(row() for _ in range(B))
    return {
        "bounds": tuple(itertools.pairwise(edges)),
        "rows": spans,
        "block_tokens": draw(st.integers(1, tokens + 1)),
        "windows": (draw(st.sampled_from([None, 1, 2, 5])), None),
        "sinks": draw(st.booleans()),
        "softcap": draw(st.sampled_from([None, 2.0])),
    }


@given(layout=layouts())
def test_any_chunks_blocks_windows_and_rows(layout):
    assert_same(**layout)


def test_a_block_of_several_chunks_lies_in_memory_as_they_do():
    bounds = ((0, 3), (3, 5), (5, 9))
    (store,), _, _ = streamed(bounds, layers=1, block_tokens=9)
    whole = [torch.randn(B, 9, 3, 4), torch.randn(B, 9, 3, 5)]
    for chunk, (start, end) in enumerate(bounds):
        k, v = (x[:, start:end].clone().transpose(1, 2) for x in whole)
        store.put(chunk, k, v)
        blocks = store.blocks(chunk_segments(start, end, None, window=None), window=None)
        for keys in store.forward_blocks(chunk, blocks):
            for got, want in zip(keys.run(0, end, None), whole, strict=True):
                assert torch.equal(got.transpose(1, 2), want[:, :end])
                assert got.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("rows", [None, PACKED], ids=["plain", "packed"])
def test_merged_outputs_lie_in_memory_as_the_layer_wants_them(rows):
    """The output projection reads all heads of a token at once."""
    bounds = UNEVEN
    stores, _, _ = streamed(bounds, layers=1, block_tokens=4, rows=rows)
    # The first chunks are read as one block, and their output is what the kernel gave.
    for (out,) in Layers(bounds, stores, rows=rows).forward()[2:]:
        assert out.shape[2] == N
        assert out.is_contiguous()


def _even(tokens, chunk):
    return tuple((i, i + chunk) for i in range(0, tokens, chunk))


@pytest.mark.parametrize("block_tokens", [4, 8, 16])
def test_two_blocks_are_here_however_long_the_sequence(block_tokens):
    """K/V: the block in use and the one ahead; backward has the float64 sums of both as well."""
    for tokens in (32, 64):
        bounds = _even(tokens, 4)
        stores, transfer, _ = streamed(bounds, layers=3, block_tokens=block_tokens)
        layers = Layers(bounds, stores, windows=(None,))
        outs = layers.forward()
        assert transfer.peak_device_bytes <= 2 * block_tokens * KV_BYTES_PER_TOKEN
        assert transfer.offloaded_bytes == 3 * tokens * KV_BYTES_PER_TOKEN
        layers.gradients(outs)
        assert transfer.peak_device_bytes <= 4 * block_tokens * KV_BYTES_PER_TOKEN
        assert transfer.settled > 0


def test_bytes_away_fall_chunk_by_chunk():
    bounds = _even(16, 4)
    stores, transfer, _ = streamed(bounds, layers=1, block_tokens=8)
    layers = Layers(bounds, stores)
    outs = layers.forward()
    (store,) = stores
    layers.gradients(outs[:2])
    assert transfer.offloaded_bytes == 0, "backward of chunk 0 ends the life of all later ones"
    with pytest.raises(SPPOError, match=r"chunk 0.*one backward per forward"):
        list(
            store.backward_blocks(
                1, store.blocks(chunk_segments(4, 8, None, window=None), window=None)
            )
        )


def test_every_block_but_the_first_is_prefetched():
    bounds = _even(32, 4)
    stores, transfer, _ = streamed(bounds, layers=2, block_tokens=8)
    layers = Layers(bounds, stores, windows=(None, 9))
    outs = layers.forward()
    assert [event for event in transfer.trace if event.startswith("late")] == []
    layers.gradients(outs)
    late = [event for event in transfer.trace if event.startswith("late")]
    # Backward's very first block: of the last layer and chunk, 8 tokens in 2 chunks, k and v.
    assert len(late) == 4


def test_blocks_outside_the_window_are_never_fetched():
    bounds = _even(32, 4)
    stores, transfer, _ = streamed(bounds, layers=1, block_tokens=4)
    layers = Layers(bounds, stores, windows=(4,))
    layers.forward()
    fetched = [event for event in transfer.trace if event.startswith("prefetch")]
    assert len(fetched) == 7 * 2, "each chunk reads the one before it, keys and values"


def test_a_guess_that_was_wrong_is_evicted():
    bounds = _even(16, 4)
    stores, transfer, stream = streamed(bounds, layers=1, block_tokens=4)
    layers = Layers(bounds, stores)
    layers.forward(chunks=3)
    assert transfer.device_bytes == 4 * KV_BYTES_PER_TOKEN, "chunk 3 would read chunk 0 first"
    stream.end_forward()
    assert transfer.device_bytes == 0


def test_a_walk_evicts_what_was_guessed_for_another():
    bounds = _even(16, 4)
    stores, transfer, _ = streamed(bounds, layers=2, block_tokens=4)
    Layers(bounds, stores, windows=(4,)).forward(chunks=3)
    assert transfer.device_bytes == 4 * KV_BYTES_PER_TOKEN, "chunk 3 would read chunk 2"
    walk = stores[0].backward_blocks(
        1, stores[0].blocks(chunk_segments(4, 8, None, window=4), window=4)
    )
    next(walk)
    assert transfer.device_bytes == 8 * KV_BYTES_PER_TOKEN, "chunk 0, and chunk 1 ahead"
    walk.close()


def test_loss_from_the_first_chunk_alone():
    bounds = UNEVEN
    stores, transfer, _ = streamed(bounds, layers=1, block_tokens=4)
    plain = Layers(bounds, [LayerKV(bounds)])
    ours = Layers(bounds, stores)
    found, wanted = (layers.gradients(layers.forward()[:1]) for layers in (ours, plain))
    torch.testing.assert_close(found, wanted)
    assert transfer.offloaded_bytes == 0, "chunks whose output nobody used are released too"


def test_output_of_a_middle_chunk_unused():
    """Its dK/dV come from later chunks only, and are fetched for `take_gradient`."""
    bounds = UNEVEN
    stores, transfer, _ = streamed(bounds, layers=1, block_tokens=4)
    plain = Layers(bounds, [LayerKV(bounds)])
    ours = Layers(bounds, stores)

    def without_middle(layers):
        outs = layers.forward()
        return layers.gradients([outs[1], outs[4]])

    found, wanted = without_middle(ours), without_middle(plain)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert transfer.offloaded_bytes == 0


def test_bfloat16_gradients_meet_in_float32():
    bounds = _even(8, 4)
    stores, transfer, _ = streamed(bounds, layers=1, block_tokens=4)
    (store,) = stores
    k, v = torch.ones(1, 1, 4, 2).bfloat16(), torch.ones(1, 1, 4, 3).bfloat16()
    for chunk in (0, 1):
        store.put(chunk, k, v)
        store._own = None
    segments = chunk_segments(4, 8, None, window=None)
    blocks = store.blocks(segments, window=None)
    for step, value in enumerate([1.0] + [2**-9] * 8):
        for keys in store.backward_blocks(1, blocks):
            start, row = keys.block.start, None
            keys.add_gradient(start, torch.full_like(k, value), torch.full_like(v, value), row)
        store._own_sums = None
        if step:
            assert transfer.handles[-1].dtype == torch.float32
    dk, dv = store.take_gradient(0)
    assert dk.dtype == dv.dtype == torch.bfloat16
    assert torch.equal(dk, torch.full_like(dk, 1 + 2**-6))


class _Shares(Reference):
    """Returns the given outputs and query gradients, block by block, with equal weights."""

    def __init__(self, outs, dqs):
        super().__init__()
        self.outs, self.dqs = iter(outs), iter(dqs)

    def forward(self, q, k, v, **kwargs):
        lse = torch.zeros(q.shape[:3], dtype=torch.float32)
        return AttentionOutput(torch.full_like(q, next(self.outs)), lse)

    def backward(self, dout, q, k, v, out, lse, **kwargs):
        return Gradients(torch.full_like(q, next(self.dqs)), torch.ones_like(k), torch.ones_like(v))


def test_bfloat16_blocks_meet_in_float32():
    bounds = tuple((i, i + 1) for i in range(9))
    stores, _, _ = streamed(bounds, layers=1, block_tokens=1)
    x = torch.ones(1, 1, 1, 2, dtype=torch.bfloat16)
    for chunk in range(8):
        stores[0].put(chunk, x, x)
    q, k, v = (x.clone().requires_grad_() for _ in range(3))
    call = AttentionCall(
        kv=stores[0],
        chunk=8,
        chunk_start=8,
        segments=chunk_segments(8, 9, None, window=None),
        backend=_Shares([1.0] + [0.0] * 8, [1.0] + [2**-9] * 8),
        scale=1.0,
    )
    out, _ = chunk_attention(q, k, v, sinks_N=None, link=None, call=call)
    assert torch.equal(out, torch.full_like(out, 1 / 9))
    out.sum().backward()
    assert torch.equal(q.grad, torch.full_like(q, 1 + 2**-6))


def test_a_slice_of_a_fused_projection_leaves_alone():
    fused = torch.randn(1, 3, 12, 2).transpose(1, 2)
    stores, transfer, _ = streamed(((0, 3),), layers=1, block_tokens=3)
    stores[0].put(0, fused[:, 4:8], fused[:, 8:12])
    assert transfer.offloaded_bytes == 8 * 3 * 2 * 4


def test_a_failing_kernel_gives_its_block_up():
    class Failing(CPUFlash):
        def forward(self, *args, **kwargs):
            if args[0].shape[2] == 5:
                raise ValueError("kernel")
            return super().forward(*args, **kwargs)

    bounds = ((0, 4), (4, 8), (8, 13))
    stores, transfer, stream = streamed(bounds, layers=1, block_tokens=4)
    layers = Layers(bounds, stores, backend=Failing())
    with pytest.raises(ValueError, match="kernel"):
        layers.forward()
    stream.end_forward()
    gc.collect()
    assert transfer.device_bytes == 0


def test_a_dropped_graph_frees_its_keys_at_once():
    gc.disable()
    try:
        bounds = UNEVEN
        stores, transfer, stream = streamed(bounds, layers=2, block_tokens=4)
        layers = Layers(bounds, stores)
        outs = layers.forward()
        gone = [weakref.ref(x) for x in (*stores, stream, transfer)]
        del stores, transfer, stream, layers, outs
        assert [reference() for reference in gone] == [None] * 4
    finally:
        gc.enable()


def test_the_store_of_a_frozen_layer_dies_with_forward():
    bounds = UNEVEN
    stores, _, _ = streamed(bounds, layers=2, block_tokens=4)
    layers = Layers(bounds, stores)
    for x in layers.inputs[0]:
        x.requires_grad_(False)
    outs = layers.forward()
    frozen, trained = (weakref.ref(x) for x in stores)
    del stores[:]
    gc.collect()
    assert frozen() is None
    assert trained() is not None
    layers.gradients([[chunk[1]] for chunk in outs])
