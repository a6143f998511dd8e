"""Chunked attention against whole attention, values and gradients, in float64."""

import gc
import weakref

import pytest
import torch

from sppo_hf.attention.backends.aten import AtenFlash
from sppo_hf.attention.backends.base import AttentionSpec
from sppo_hf.attention.backends.select import select_backend
from sppo_hf.attention.chunk_attention import AttentionCall, chunk_attention
from sppo_hf.attention.kv_cache import LayerKV
from sppo_hf.attention.segments import RowSpans, chunk_segments
from tests.attention.backends.fake_kernels import FakeAten

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


def _dense(q, k, v, sinks, rows, window, scale):
    k, v = k.repeat_interleave(N // K, 1), v.repeat_interleave(N // K, 1)
    scores = q @ k.transpose(-1, -2) * scale
    at = torch.arange(T)
    visible = (at[None] <= at[:, None])[None].repeat(B, 1, 1)
    if window:
        visible &= (at[None] > at[:, None] - window)[None]
    for row, spans in enumerate(rows or ()):
        document = torch.zeros(T, dtype=torch.long)
        for start, _ in spans.documents:
            document[start:] += 1
        visible[row] &= document[None] == document[:, None]
        visible[row] &= (at < spans.valid_tokens)[None]
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, N, 1, 1).expand(B, N, T, 1)], -1)
    p = torch.softmax(scores, -1)
    return (p[..., :T] @ v).transpose(1, 2)


def _usual():
    sizes = {"qk_head_size": H, "v_head_size": HV, "gqa_ratio": N // K}
    asked = AttentionSpec(device_type="cpu", dtype=torch.float64, **sizes)
    return select_backend("auto", asked).backend


def _chunked(q, k, v, sinks, rows, window, scale, bounds, counters, backend=None):
    kv, link, outs = LayerKV(bounds), None, []
    backend = backend or _usual()
    for chunk, (start, end) in enumerate(bounds):
        call = AttentionCall(
            kv=kv,
            chunk=chunk,
            chunk_start=start,
            segments=chunk_segments(start, end, rows, window=window),
            backend=backend,
            scale=scale,
            window=window,
            counters=counters,
        )
        part = slice(start, end)
        out, link = chunk_attention(
            q[:, :, part], k[:, :, part], v[:, :, part], sinks_N=sinks, link=link, call=call
        )
        outs.append(out)
    return torch.cat(outs, 1), kv


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


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [None, 1, 4])
def test_documents_at_once_are_what_they_are_one_by_one(bounds, rows, window):
    inputs = _inputs(sinks=True)
    weights = torch.randn(B, T, N, HV, dtype=torch.float64)
    found = []
    for at_once in (True, False):
        backend = AtenFlash(documents_at_once=at_once, aten=Counting())
        out, _ = _chunked(*inputs, ROWS[rows], window, 0.3, BOUNDS[bounds], {}, backend)
        found.append((out, *torch.autograd.grad((out * weights).sum(), inputs)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_documents_of_a_row_are_one_call():
    rows = ROWS["packed"]
    for at_once, forwards, documents in ((True, 2, 2), (False, 5, 0)):
        aten = Counting()
        backend = AtenFlash(documents_at_once=at_once, aten=aten)
        _chunked(*_inputs(False), rows, None, 0.3, BOUNDS["one"], {}, backend)
        assert (aten.forwards, aten.documents) == (forwards, documents)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("sinks", [False, True])
def test_equals_whole_attention(bounds, rows, window, sinks):
    inputs = _inputs(sinks)
    leaves = [x for x in inputs if x is not None]
    expected = _dense(*inputs, ROWS[rows], window, 0.3)
    visible = ~expected.detach().isnan()  # dense softmax of nothing; ours gives zeros there
    weights = torch.randn_like(expected) * visible
    whole = torch.autograd.grad((expected.nan_to_num() * weights).sum(), leaves)
    counters: dict[str, int] = {}
    out, kv = _chunked(*inputs, ROWS[rows], window, 0.3, BOUNDS[bounds], counters)
    torch.testing.assert_close(out[visible], expected[visible], rtol=1e-12, atol=1e-12)
    if rows == "padded" and not bool(visible.all()):
        return  # the dense oracle's own gradient is NaN there
    chunked = torch.autograd.grad((out * weights).sum(), leaves)
    for ours, theirs in zip(chunked, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
    assert counters["attention_forwards"] == len(BOUNDS[bounds])
    assert kv.kv_bytes == kv.gradient_bytes == 0


def test_loss_from_the_first_chunk_alone():
    inputs = _inputs(False)
    expected = _dense(*inputs, None, None, 0.3)[:, :1].sum()
    whole = torch.autograd.grad(expected, inputs[:3])
    out, _ = _chunked(*inputs, None, None, 0.3, BOUNDS["uneven"], {})
    chunked = torch.autograd.grad(out[:, :1].sum(), inputs[:3])
    for ours, theirs in zip(chunked, whole, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_dropped_graph_frees_its_keys_at_once():
    gc.disable()
    try:
        out, kv = _chunked(*_inputs(False), None, None, 0.3, BOUNDS["uneven"], {})
        gone = weakref.ref(kv)
        del out, kv
        assert gone() is None
    finally:
        gc.enable()
