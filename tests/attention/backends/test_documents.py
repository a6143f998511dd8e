"""Packed documents in one call, on fake kernels; the real ones are checked on a GPU."""

from dataclasses import replace

import pytest
import torch

from sppo_hf.attention.backends.adapters import _offsets
from sppo_hf.attention.backends.aten import AtenFlash
from sppo_hf.attention.backends.base import AttentionSpec, Documents
from sppo_hf.attention.backends.flash_attn import (
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
)
from sppo_hf.attention.backends.reference import Reference
from sppo_hf.attention.backends.select import find_mismatch
from tests.attention.backends.fake_kernels import (
    FakeAten,
    FakeFlash2,
    FakeFlash3,
    FakeFlash4,
    FakeFlash4Early,
)
from tests.attention.oracle import Answer, Problem, assert_equal, make_problem, solve

BACKENDS = [
    AtenFlash(aten=FakeAten()),
    AtenFlash(grouped_heads=False, aten=FakeAten(grouped_heads=False)),
    FlashAttention2(interface=FakeFlash2),
    FlashAttention3(interface=FakeFlash3),
    FlashAttention4(interface=FakeFlash4),
    Reference(),
]
DOCUMENTS = [
    Documents((7,), (7,)),
    Documents((3, 1, 5), (3, 1, 5)),
    Documents((4, 6, 1), (9, 6, 1)),  # the first began in an earlier chunk
]
CPU = torch.device("cpu")


def seen_by(documents: Documents) -> torch.Tensor:
    """[queries, keys]: each query sees its document's keys up to its own."""
    seen = torch.zeros(sum(documents.num_queries), sum(documents.num_keys), dtype=torch.bool)
    for rows, keys, band in documents:
        part = seen[rows, keys]
        own = torch.arange(len(part)).unsqueeze(1) + band.q_start
        key = torch.arange(part.shape[1])
        part |= (key <= own) & (key > own - (documents.window or seen.numel()))
    return seen


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("documents", DOCUMENTS, ids=str)
@pytest.mark.parametrize("window", [None, 2])
def test_one_call_equals_the_oracle(backend, documents, window):
    documents = replace(documents, window=window)
    rows, keys = sum(documents.num_queries), sum(documents.num_keys)
    q, k, v, dout = make_problem(rows=rows, keys=keys, batch=1)
    expected = solve(Problem(q, k, v, dout), seen_by(documents), scale=0.4)
    attended = backend.forward(q, k, v, band=documents, scale=0.4)
    grads = backend.backward(dout, q, k, v, *attended, band=documents, scale=0.4)
    assert_equal(Answer(*attended, *grads), expected, 1e-10)


def requirement(**changes):
    sizes = {"qk_head_size": 16, "v_head_size": 16, "window": True, "gqa_ratio": 2}
    return AttentionSpec(device_type="cpu", dtype=torch.float32, **sizes | changes)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_kernels_are_checked_with_documents(backend):
    assert find_mismatch(backend, requirement(), CPU) is None


class Blurred(FakeAten):
    """Attends as if all documents were one."""

    def _flash_attention_forward(self, q, k, v, cum_q, cum_k, *args, **kwargs):
        if cum_q is None:
            return super()._flash_attention_forward(q, k, v, cum_q, cum_k, *args, **kwargs)
        lengths = (None, None, len(q), len(k), *args[2:])
        found = super()._flash_attention_forward(q[None], k[None], v[None], *lengths, **kwargs)
        return found[0][0], found[1][0], *found[2:]


def test_a_kernel_that_lets_documents_see_each_other_is_found():
    wrong = AtenFlash(aten=Blurred())
    assert "documents of 40, 1, 77, 9 queries" in (find_mismatch(wrong, requirement(), CPU) or "")
    one_by_one = AtenFlash(documents_at_once=False, aten=Blurred())
    assert find_mismatch(one_by_one, requirement(), CPU) is None


def test_a_release_without_documents_says_so():
    early = FlashAttention4(interface=FakeFlash4Early)
    found = find_mismatch(early, requirement(window=False), CPU)
    assert found is not None
    assert "does not know cu_seqlens" in found


def test_offsets_are_made_on_the_host_whatever_the_default_device_is():
    with torch.device("meta"):  # on CUDA they could not be pinned
        offsets = _offsets(Documents((3, 1), (5, 1)), CPU)
    assert (offsets.cu_q.tolist(), offsets.cu_k.tolist()) == ([0, 3, 4], [0, 5, 6])
