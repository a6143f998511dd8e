"""Chunked attention with sinks, windows and padding in 16 bits, chunk by chunk, on CUDA and CPU.

Measured against dense attention in float64, as `test_function.py` does it in float64 throughout.
"""

import pytest
import torch

from sppo_hf.attention.backends.base import AttentionSpec
from sppo_hf.attention.backends.select import AUTO_ORDER
from sppo_hf.attention.chunk_attention import AttentionCall, chunk_attention
from sppo_hf.attention.kv_cache import LayerKV
from sppo_hf.attention.segments import RowSpans, chunk_segments
from tests.attention.backends.usable import usable_backend

B, K = 2, 2
LIMITS = {torch.bfloat16: 3e-2, torch.float16: 5e-3}
BOUNDS = ((0, 1), (1, 130), (130, 387), (387, 421))  # odd lengths, one of them a single token
ROWS = {
    "plain": None,
    "padded": (RowSpans(((0, 421),), 421), RowSpans(((0, 421),), 200)),
    "packed": (RowSpans(((0, 421),), 421), RowSpans(((0, 77), (77, 300), (300, 421)), 421)),
}


def _dense(q, k, v, sinks, rows, window):
    """Dense attention in float64; `[B, T, N, H]`, and zeros in rows that see nothing."""
    tokens, groups = q.shape[2], q.shape[1] // k.shape[1]
    at = torch.arange(tokens, device=q.device)
    seen = (at[None] <= at[:, None])[None].repeat(B, 1, 1)
    if window:
        seen &= (at[None] > at[:, None] - window)[None]
    for row, spans in enumerate(rows or ()):
        document = torch.zeros(tokens, dtype=torch.long, device=q.device)
        for start, _ in spans.documents:
            document[start:] += 1
        seen[row] &= document[None] == document[:, None]
        seen[row] &= (at < spans.valid_tokens)[None]
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen[:, None], -1e300)
    logits = (
        [scores] if sinks is None else [scores, sinks.view(1, -1, 1, 1).expand_as(scores)[..., :1]]
    )
    p = torch.softmax(torch.cat(logits, -1), -1)[..., :tokens] * seen[:, None]
    return (p @ v.repeat_interleave(groups, 1)).transpose(1, 2)


def check(name, device, dtype, *, head_size, groups, sinks, window, rows):
    """Outputs and all gradients, sinks' included, in the norm of each."""
    requirement = AttentionSpec(
        device_type=device,
        dtype=dtype,
        qk_head_size=head_size,
        v_head_size=head_size,
        window=window is not None,
        gqa_ratio=groups,
    )
    backend = usable_backend(name, requirement)
    tokens = BOUNDS[-1][1]
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, heads, tokens, head_size) for heads in (K * groups, K, K)]
    shapes += [(K * groups,)] if sinks else []
    leaves = [
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in shapes
    ]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = _dense(*wide[:3], wide[3] if sinks else None, ROWS[rows], window)
    weights = torch.randn(expected.shape, generator=generator).to(device, torch.float64)
    theirs = [expected, *torch.autograd.grad((expected * weights).sum(), wide)]

    kv, link, outs, counters = LayerKV(BOUNDS), None, [], {}
    for chunk, (start, end) in enumerate(BOUNDS):
        call = AttentionCall(
            kv=kv,
            chunk=chunk,
            chunk_start=start,
            segments=chunk_segments(start, end, ROWS[rows], window=window),
            backend=backend,
            scale=head_size**-0.5,
            window=window,
            counters=counters,
        )
        q, k, v = (x[:, :, start:end] for x in leaves[:3])
        sink = leaves[3] if sinks else None
        out, link = chunk_attention(q, k, v, sinks_N=sink, link=link, call=call)
        outs.append(out)
    out = torch.cat(outs, 1)
    ours = [out, *torch.autograd.grad((out * weights.to(dtype)).sum(), leaves)]
    assert counters["attention_forwards"] == len(BOUNDS)
    for label, one, two in zip(("out", "dQ", "dK", "dV", "dsinks"), ours, theirs, strict=False):
        assert one.dtype == dtype
        error = (one.double() - two).norm() / two.norm()
        assert error <= LIMITS[dtype], f"{label}: {error:.1e}"


CASES = pytest.mark.parametrize(
    ("sinks", "window", "rows"),
    [
        (False, None, "plain"),
        (True, None, "plain"),
        (True, 100, "plain"),
        (True, None, "packed"),
        (True, 100, "padded"),
        (False, 100, "packed"),
    ],
)


@pytest.mark.gpu
@CASES
@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize("name", ["auto", *AUTO_ORDER["cuda"]])
def test_on_cuda(name, dtype, head_size, groups, sinks, window, rows):
    check(
        name,
        "cuda",
        dtype,
        head_size=head_size,
        groups=groups,
        sinks=sinks,
        window=window,
        rows=rows,
    )


@CASES
@pytest.mark.parametrize(
    ("name", "dtype"), [("auto", torch.bfloat16), ("reference", torch.float16)]
)
def test_on_the_cpu(name, dtype, sinks, window, rows):
    check(name, "cpu", dtype, head_size=16, groups=2, sinks=sinks, window=window, rows=rows)
