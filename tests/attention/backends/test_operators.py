"""The installed PyTorch's own operators take what the backends hand them, without a GPU.

Tensors without memory go through each operator's schema and its meta function: names, positions and
numbers of arguments and results, shapes and dtypes. What kernels compute, only a GPU tells.
"""

import inspect

import pytest
import torch

from sppo_hf.attention.backends.aten import AtenFlash, CuDNN, Efficient
from sppo_hf.attention.backends.base import CausalBand, Documents
from tests.attention.backends.fake_kernels import FakeAten

ROWS, HEADS, KV_HEADS = 2, 8, 2


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
