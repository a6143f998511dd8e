"""Chunked attention against whole attention, values and gradients, in float64."""

import gc
import weakref

import pytest
import torch

from sppo_hf.attention.backends.aten import AtenFlash
from sppo_hf.attention.backends.base import AttentionSpec
from sppo_hf.attention.backends.reference import Reference
from sppo_hf.attention.backends.select import select_backend
from sppo_hf.attention.chunk_attention import AttentionCall, chunk_attention
from sppo_hf.attention.kv_cache import LayerKV
from sppo_hf.attention.segments import AttentionSegment, RowSpans
from tests.attention.backends.fake_kernels import FakeAten
from tests.attention.layers import attend_in_chunks
from tests.attention.oracle import dense_attention
from tests.sweeps import pairs

B, N, K, H, HV, T = 2, 4, 2, 8, 6, 13
BOUNDS = {
    "one": ((0, 13),),
    "uneven": ((0, 1), (1, 6), (6, 13)),
    "single tokens": tuple((i, i + 1) for i in range(13)),
}


def _inputs(sinks):
    torch.manual_seed(1)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    q, k, v = make(B, N, T, H), make(B, K, T, H), make(B, K, T, HV)
    return q, k, v, (make(N) if sinks else None)


def _attend(inputs, rows="plain", window=None, *, bounds="uneven", backend=None, counters=None):
    """Outputs [B, T, N, H] of chunked attention, and the K/V store."""
    q, k, v, sinks = inputs
    if backend is None:
        sizes = {"qk_head_size": H, "v_head_size": HV, "gqa_ratio": N // K}
        requirement = AttentionSpec(device_type="cpu", dtype=torch.float64, **sizes)
        backend = select_backend("auto", requirement).backend
    return attend_in_chunks(
        *(q, k, v),
        **{"sinks": sinks, "rows": ROWS[rows], "window": window, "scale": 0.3},
        **{"bounds": BOUNDS[bounds], "backend": backend, "counters": counters},
    )


ROWS = {
    "plain": None,
    "padded": (RowSpans(((0, T),), 9), RowSpans(((0, T),), T)),
    "packed": (RowSpans(((0, 4), (4, T)), T), RowSpans(((0, 1), (1, 7), (7, T)), T)),
    "packed alike": (RowSpans(((0, 4), (4, 5), (5, T)), T),) * 2,
}


class Counting(FakeAten):
    """Counts its calls, and those of them that are for several documents."""

    def __init__(self):
        super().__init__()
        self.forwards = self.documents = 0

    def _flash_attention_forward(self, q, *args, **kwargs):
        if q.dim() == 3:  # which runs the fake once more for each document
            self.documents += 1
            self.forwards -= len(args[2]) - 1
        self.forwards += 1
        return super()._flash_attention_forward(q, *args, **kwargs)


@pytest.mark.parametrize(("rows", "bounds", "window"), pairs(ROWS, BOUNDS, [None, 1, 4]))
def test_documents_at_once_are_what_they_are_one_by_one(bounds, rows, window):
    inputs = _inputs(sinks=True)
    weights = torch.randn(B, T, N, HV, dtype=torch.float64)
    found = []
    for at_once in (True, False):
        backend = AtenFlash(documents_at_once=at_once, aten=Counting())
        out, _ = _attend(inputs, rows, window, bounds=bounds, backend=backend)
        found.append((out, *torch.autograd.grad((out * weights).sum(), inputs)))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_documents_of_a_row_are_one_call():
    for at_once, forwards, documents in ((True, 2, 2), (False, 5, 0)):
        aten = Counting()
        backend = AtenFlash(documents_at_once=at_once, aten=aten)
        _attend(_inputs(False), "packed", bounds="one", backend=backend)
        assert (aten.forwards, aten.documents) == (forwards, documents)


@pytest.mark.parametrize(("rows", "bounds", "window"), pairs(ROWS, BOUNDS, [None, 1, 4]))
@pytest.mark.parametrize("sinks", [False, True])
def test_equals_whole_attention(bounds, rows, window, sinks):
    inputs = _inputs(sinks)
    leaves = [x for x in inputs if x is not None]
    *qkv, sink_logits = inputs
    expected = dense_attention(*qkv, sinks=sink_logits, rows=ROWS[rows], window=window, scale=0.3)
    weights = torch.randn_like(expected)
    whole = torch.autograd.grad((expected * weights).sum(), leaves)
    counters: dict[str, int] = {}
    out, kv = _attend(inputs, rows, window, bounds=bounds, counters=counters)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    chunked = torch.autograd.grad((out * weights).sum(), leaves)
    torch.testing.assert_close(chunked, whole, rtol=1e-10, atol=1e-11)
    assert counters["attention_forwards"] == len(BOUNDS[bounds])
    assert kv.kv_bytes == kv.gradient_bytes == 0


def test_loss_from_the_first_chunk_alone():
    inputs = _inputs(False)
    expected = dense_attention(*inputs[:3], sinks=None, rows=None, window=None, scale=0.3)
    whole = torch.autograd.grad(expected[:, :1].sum(), inputs[:3])
    out, _ = _attend(inputs)
    chunked = torch.autograd.grad(out[:, :1].sum(), inputs[:3])
    torch.testing.assert_close(chunked, whole)


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_queries_keys_or_values_that_need_a_gradient_alone(trained):
    """As values do in a first layer with LoRA on them alone."""
    inputs = _inputs(False)
    for at, x in enumerate(inputs[:3]):
        x.requires_grad_(at == trained)
    expected = dense_attention(*inputs[:3], sinks=None, rows=None, window=None, scale=0.3)
    weights = torch.randn_like(expected)
    (whole,) = torch.autograd.grad((expected * weights).sum(), inputs[trained])
    (chunked,) = torch.autograd.grad((_attend(inputs)[0] * weights).sum(), inputs[trained])
    torch.testing.assert_close(chunked, whole)


@pytest.mark.parametrize("tokens", [T, H])
def test_of_one_segment_that_is_the_chunk_the_kernels_output_is_not_copied(tokens):
    """Of a shorter one, behind which no query sees a key, it is put into zeros."""

    class Watched(Reference):
        def forward(self, *args, **kwargs):
            found.append(super().forward(*args, **kwargs))
            return found[-1]

    found = []
    q, k, v, _ = _inputs(False)
    segments = (AttentionSegment(None, T, T + tokens, T, T + tokens),)
    kv, backend = LayerKV(((0, T), (T, 2 * T))), Watched()
    call = AttentionCall(kv, 1, T, segments, backend, scale=0.3)
    out, _ = chunk_attention(q, k, v, sinks_N=None, link=None, call=call)
    assert out.shape == (B, T, N, HV)
    assert (out.data_ptr() == found[0].out_BNCH.data_ptr()) == (tokens == T)
    assert torch.equal(out[:, :tokens].transpose(1, 2), found[0].out_BNCH)
    assert not out[:, tokens:].any()


def test_a_dropped_graph_frees_its_keys_at_once():
    gc.disable()
    try:
        out, kv = _attend(_inputs(False))
        gone = weakref.ref(kv)
        del out, kv
        assert gone() is None
    finally:
        gc.enable()
