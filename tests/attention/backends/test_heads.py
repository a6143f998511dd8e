"""Heads adapted to a kernel give what the kernel would give on heads it takes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.attention.backends.adapters import (
    KernelNeeds,
    adapted_backward,
    adapted_forward,
    group_queries,
    sum_repeated_heads,
    ungroup_queries,
)
from sppo_hf.attention.backends.base import AttentionOutput, BackwardInputs, Gradients
from tests.attention.backends.fake_kernels import _attend, _attend_backward
from tests.attention.oracle import Answer, assert_equal, make_problem, solve

NEEDS = [
    KernelNeeds(grouped_heads=grouped, head_multiple=multiple, equal_head_sizes=equal)
    for grouped in (True, False)
    for multiple in (1, 8)
    for equal in (True, False)
]


@pytest.mark.parametrize("unmasked", [True, False])
@pytest.mark.parametrize("v_head_size", [3, 12, 20])
@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_adapted_kernel_matches_oracle(needs, v_head_size, unmasked):
    problem = make_problem(rows=6, keys=6, head_size=12, v_head_size=v_head_size)
    seen = torch.ones(6, 6, dtype=torch.bool)
    seen = seen if unmasked else seen.tril()

    def look(q, k, v):
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        assert q.shape[-1] % needs.head_multiple == v.shape[-1] % needs.head_multiple == 0
        assert not needs.equal_head_sizes or q.shape[-1] == v.shape[-1]
        assert needs.grouped_heads or q.shape[1] == k.shape[1] == v.shape[1]
        # Grouping makes more rows; all of them see everything.
        return seen if q.shape[2] == 6 else torch.ones(q.shape[2], 6, dtype=torch.bool)

    def forward(q, k, v):
        return AttentionOutput(*_attend(q, k, v, look(q, k, v), 0.3))

    def backward(given):
        return Gradients(*_attend_backward(*given, look(*given[1:4]), 0.3))

    q, k, v, dout = problem
    attended = adapted_forward(forward, q, k, v, needs=needs, unmasked=unmasked)
    given = BackwardInputs(dout, q, k, v, *attended)
    grads = adapted_backward(backward, given, needs=needs, unmasked=unmasked)
    assert_equal(Answer(*attended, *grads), solve(problem, seen, scale=0.3), 1e-12)


def test_keys_are_not_repeated_where_nothing_is_masked():
    q, k, v, _ = make_problem(rows=6, keys=6, heads=8, kv_heads=2)
    heads = []

    def forward(q, k, v):
        heads.append((q.shape[1], k.shape[1]))
        return AttentionOutput(*_attend(q, k, v, torch.ones(q.shape[2], 6, dtype=torch.bool), 0.3))

    needs = KernelNeeds(grouped_heads=False)
    adapted_forward(forward, q, k, v, needs=needs, unmasked=True)
    adapted_forward(forward, q, k, v, needs=needs, unmasked=False)
    assert heads == [(2, 2), (8, 8)]


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_grouping_is_undone(batch, kv_heads, groups, tokens):
    x = torch.randn(batch, kv_heads * groups, tokens, 3)
    assert torch.equal(ungroup_queries(group_queries(x, kv_heads), kv_heads * groups), x)


def test_repeated_heads_are_summed_in_float32():
    # 1 + 2^-7 has no bit to spare in bfloat16, so sums there would be rounded.
    x = torch.full((1, 8, 1, 1), 1 + 2**-7, dtype=torch.bfloat16)
    summed = sum_repeated_heads(x, 1)
    assert summed.dtype == torch.float32
    assert summed.item() == 8 * (1 + 2**-7)
