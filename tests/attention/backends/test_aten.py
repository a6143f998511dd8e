"""PyTorch's own kernels: calls that fit the installed operators, and results on fake kernels."""

import inspect

import pytest
import torch

from sppo_hf.attention.backends.aten import AtenFlash, CuDNN, Efficient
from sppo_hf.attention.backends.base import AttentionSpec, BackwardInputs, CausalBand, Documents
from tests.attention.backends.cases import CASES, check, deterministic, run
from tests.attention.backends.fake_kernels import FakeAten
from tests.attention.oracle import Answer, Problem, assert_equal, make_problem, solve, visible
from tests.sweeps import pairs, turn

ROWS, HEADS, KV_HEADS = 2, 8, 2
V_HEAD_SIZES = (8, 5, 20)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("make", [CuDNN, AtenFlash, Efficient])
def test_operators_take_and_give_what_backends_expect(make, window):
    tokens, keys, sizes = 77, 180, (128, 64)

    def made(heads, length, size):
        shape = (ROWS, length, heads, size)
        return torch.empty(shape, dtype=torch.bfloat16, device="meta").transpose(1, 2)

    q = made(HEADS, tokens, sizes[0])
    k, v = made(KV_HEADS, keys, sizes[0]), made(KV_HEADS, keys, sizes[1])
    backend, settings = make(), {"band": CausalBand(130, window), "scale": 0.1}
    out, lse = backend.forward(q, k, v, **settings)
    grads = backend.backward(torch.empty_like(out), q, k, v, out, lse, **settings)
    assert (out.shape, out.dtype) == ((ROWS, HEADS, tokens, sizes[1]), torch.bfloat16)
    assert (lse.shape, lse.dtype) == (out.shape[:3], torch.float32)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
    assert grads.dq_BNCH.dtype == torch.bfloat16


@pytest.mark.parametrize("window", [None, 50])
def test_the_operator_takes_documents_of_any_length(window):
    queries, keys = (40, 1, 77, 9), (170, 1, 77, 9)  # the first began in an earlier chunk

    def made(heads, length):
        shape = (1, length, heads, 64)
        return torch.empty(shape, dtype=torch.bfloat16, device="meta").transpose(1, 2)

    q, k, v = made(HEADS, sum(queries)), made(KV_HEADS, sum(keys)), made(KV_HEADS, sum(keys))
    backend = AtenFlash()
    settings = {"band": Documents(queries, keys, window), "scale": 0.1}
    out, lse = backend.forward(q, k, v, **settings)
    grads = backend.backward(torch.empty_like(out), q, k, v, out, lse, **settings)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]


OPERATORS = [
    name for name in vars(FakeAten) if name.startswith(("_flash_attention", "_scaled_dot_product"))
]


@pytest.mark.parametrize("name", OPERATORS)
def test_made_up_kernels_have_the_operators_arguments(name):
    operator, fake = getattr(torch.ops.aten, name), getattr(FakeAten(), name)
    real = operator.default._schema.arguments
    made = inspect.signature(fake).parameters.values()
    assert len([a for a in real if not a.kwarg_only]) == len([p for p in made if p.kind < 3])
    named = {p.name for p in made if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert named <= {a.name for a in real if a.kwarg_only}


ATEN_FLASH_VARIANTS = [
    AtenFlash(aten=FakeAten()),
    AtenFlash(grouped_heads=False, aten=FakeAten(grouped_heads=False)),
]


@pytest.mark.parametrize(
    ("variant", "case", "v_head_size"), pairs(range(len(ATEN_FLASH_VARIANTS)), CASES, V_HEAD_SIZES)
)
def test_aten_flash_matches_oracle(variant, case, v_head_size):
    rows, keys, band = case
    check(ATEN_FLASH_VARIANTS[variant], band, rows=rows, keys=keys, v_head_size=v_head_size)


CUDNN_VARIANTS = [
    CuDNN(aten=FakeAten()),
    CuDNN(key_tile=1, aten=FakeAten()),
    CuDNN(key_tile=1, aten=FakeAten(lse_rank=3)),
    CuDNN(key_tile=4, aten=FakeAten()),
    CuDNN(key_tile=4, grouped_heads=False, aten=FakeAten(grouped_heads=False)),
    CuDNN(key_tile=4, equal_head_sizes=True, aten=FakeAten()),
]


@pytest.mark.parametrize(
    ("variant", "case", "v_head_size"),
    [
        (variant, case, v_head_size)
        for index, case in enumerate(CASES)
        for variant in turn(range(len(CUDNN_VARIANTS)), 2, index)
        for v_head_size in turn(V_HEAD_SIZES, 3, index + variant // 2)
    ],
)
def test_cudnn_matches_oracle(variant, case, v_head_size):
    rows, keys, band = case
    check(CUDNN_VARIANTS[variant], band, rows=rows, keys=keys, v_head_size=v_head_size)


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


EFFICIENT_VARIANTS = [
    Efficient(aten=FakeAten()),
]


@pytest.mark.parametrize("backend", EFFICIENT_VARIANTS, ids=range(len(EFFICIENT_VARIANTS)))
@pytest.mark.parametrize(
    ("case", "v_head_size"),
    [(case, size) for index, case in enumerate(CASES) for size in turn(V_HEAD_SIZES, 3, index)],
)
def test_efficient_matches_oracle(backend, case, v_head_size):
    rows, keys, band = case
    check(backend, band, rows=rows, keys=keys, v_head_size=v_head_size)


def test_keys_are_repeated_for_the_diagonal_only():
    aten = FakeAten()
    check(Efficient(aten=aten), CausalBand(20), rows=5, keys=25, heads=6, kv_heads=2)
    assert aten.calls == [((2, 6, 5, 8), (2, 6, 5, 8)), ((2, 2, 15, 8), (2, 2, 20, 8))]


@pytest.mark.parametrize("window", [None, 30])
def test_efficient_gets_no_more_keys_than_it_can_address(window):
    aten, band, keys = FakeAten(), CausalBand(40, window), 47
    backend = Efficient(aten=aten)
    assert backend.most_elements == 2**31 - 1
    backend.most_elements = 10 * 2 * 8  # of ten keys of two heads, laid out token by token
    problem = make_problem(rows=7, keys=keys, heads=4, kv_heads=2, head_size=8)
    by_token = Problem(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in problem))
    expected = solve(by_token, visible(band, 7, keys), scale=0.4)
    assert_equal(run(backend, by_token, band, scale=0.4, softcap=None), expected, 1e-10)
    assert max(k_shape[2] for _, k_shape in aten.calls) == 10
