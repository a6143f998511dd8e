"""Chunked attention with sinks, windows and padding in 16 bits, chunk by chunk, on CUDA and CPU.

Compared with dense attention in float64; `test_chunk_attention.py` runs both in float64.
"""

import pytest
import torch

from sppo_hf.attention.backends.base import AttentionSpec
from sppo_hf.attention.backends.select import AUTO_ORDER
from sppo_hf.attention.segments import RowSpans
from tests.attention.backends.usable import usable_backend
from tests.attention.layers import attend_in_chunks
from tests.attention.oracle import dense_attention

B, K = 2, 2
LIMITS = {torch.bfloat16: 3e-2, torch.float16: 5e-3}
BOUNDS = ((0, 1), (1, 130), (130, 387), (387, 421))  # odd lengths, one of them a single token
ROWS = {
    "plain": None,
    "padded": (RowSpans(((0, 421),), 421), RowSpans(((0, 421),), 200)),
    "packed": (RowSpans(((0, 421),), 421), RowSpans(((0, 77), (77, 300), (300, 421)), 421)),
}


def check(name, device, dtype, *, head_size, groups, sinks, window, rows):
    """Compare outputs and all gradients, those of sinks included, in the norm of each."""
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
    how = {"rows": ROWS[rows], "window": window, "scale": head_size**-0.5}
    expected = dense_attention(*wide[:3], sinks=wide[3] if sinks else None, **how)
    # Rounded for both: a gradient of sinks sums terms of both signs, and such errors with them.
    weights = torch.randn(expected.shape, generator=generator).to(device, dtype)
    theirs = [expected, *torch.autograd.grad((expected * weights.double()).sum(), wide)]

    counters: dict[str, int] = {}
    out, _ = attend_in_chunks(
        *leaves[:3],
        sinks=leaves[3] if sinks else None,
        **how,
        bounds=BOUNDS,
        backend=backend,
        counters=counters,
    )
    ours = [out, *torch.autograd.grad((out * weights).sum(), leaves)]
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
