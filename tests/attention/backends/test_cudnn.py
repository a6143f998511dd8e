"""CuDNN on a made-up kernel with the real one's signature and mask; the real one on a GPU."""

import pytest
import torch

from sppo_hf.attention.backends.aten import CuDNN
from sppo_hf.attention.backends.base import AttentionSpec, BackwardInputs, CausalBand
from tests.attention.backends.cases import CASES, check, deterministic
from tests.attention.backends.fake_kernels import FakeAten
from tests.attention.oracle import Answer, Problem, assert_equal, make_problem, solve
from tests.sweeps import pairs

VARIANTS = [
    CuDNN(aten=FakeAten()),
    CuDNN(key_tile=1, aten=FakeAten()),
    CuDNN(key_tile=1, aten=FakeAten(lse_rank=3)),
    CuDNN(key_tile=4, aten=FakeAten()),
    CuDNN(key_tile=4, grouped_heads=False, aten=FakeAten(grouped_heads=False)),
    CuDNN(key_tile=4, equal_head_sizes=True, aten=FakeAten()),
]


@pytest.mark.parametrize(
    ("variant", "case", "v_head_size"), pairs(range(len(VARIANTS)), CASES, [8, 5, 20])
)
def test_matches_oracle(variant, case, v_head_size):
    rows, keys, band = case
    check(VARIANTS[variant], band, rows=rows, keys=keys, v_head_size=v_head_size)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 7), (7, 1)])
def test_a_single_query_or_key_goes_to_the_reference(rows, keys, causal):
    aten = FakeAten()
    backend, (q, k, v, dout) = CuDNN(aten=aten), make_problem(rows=rows, keys=keys)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    expected = solve(Problem(q, k, v, dout), seen.tril() if causal else seen, scale=0.4)
    attended = backend.kernel_forward(q, k, v, causal=causal, scale=0.4)
    grads = backend.kernel_backward(
        BackwardInputs(dout, q, k, v, *attended), causal=causal, scale=0.4
    )
    assert_equal(Answer(*attended, *grads), expected, 1e-10)
    assert aten.calls == []


class Layouts(FakeAten):
    """Remembers the strides that a plan is looked up by, and those that it is then used with."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _scaled_dot_product_cudnn_attention_backward(self, dout, q, k, v, out, *args, **kwargs):
        key = tuple((tuple(x.shape), x.stride()) for x in (q, k, v))
        self.seen.append((key, (dout.stride(), out.stride())))
        return super()._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, *args, **kwargs
        )


def test_a_plan_is_always_used_with_the_layout_that_it_was_made_for():
    """PyTorch's key of a plan has the strides of queries, keys and values only."""
    aten, made = Layouts(), {}
    backend = CuDNN(key_tile=1, aten=aten)
    for run_tokens in (9, 40):  # keys are a slice of a longer run, whose length is in its strides
        k = torch.randn(1, run_tokens, 2, 8).transpose(1, 2)[:, :, :9]
        q, dout = (torch.randn(1, 7, 4, 8).transpose(1, 2) for _ in range(2))
        attended = backend.kernel_forward(q, k, k, causal=False, scale=1.0)
        expanded = dout[:, :, :1].expand(q.shape)
        for gradient in (dout, dout.contiguous(), expanded):
            for out in (attended.out_BNCH, attended.out_BNCH.contiguous()):
                merged = attended._replace(out_BNCH=out)
                given = BackwardInputs(gradient, q, k, k, *merged)
                backend.kernel_backward(given, causal=False, scale=1.0)
    assert len(aten.seen) == 12
    for key, layout in aten.seen:
        assert made.setdefault(key, layout) == layout
    assert len(made) == 1


def test_grouped_queries_behind_each_other_are_not_single():
    aten = FakeAten(grouped_heads=False)
    check(CuDNN(grouped_heads=False, aten=aten), CausalBand(12), rows=1, keys=13)
    assert aten.calls == [((2, 2, 2, 8), (2, 2, 13, 8))]


def test_it_is_not_deterministic():
    asked = AttentionSpec(
        device_type="cuda", dtype=torch.bfloat16, qk_head_size=128, v_head_size=128
    )
    with deterministic("warn"):
        assert CuDNN().reason_unsupported(asked) is None
    with deterministic("error"):
        assert "no deterministic backward" in CuDNN().reason_unsupported(asked)
