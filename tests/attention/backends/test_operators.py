"""The installed PyTorch's own operators take what the backends hand them, without a GPU.

Tensors without memory go through each operator's schema and its meta function: names, positions and
numbers of arguments and results, shapes and dtypes. What kernels compute, only a GPU tells.
"""

import pytest
import torch

from sppo_hf.attention.backends.aten_flash import AtenFlash
from sppo_hf.attention.backends.base import CausalBand
from sppo_hf.attention.backends.cudnn import CuDNN
from sppo_hf.attention.backends.efficient import Efficient

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
