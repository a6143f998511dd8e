"""What is counted, and what the tensors are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.attention.backends.autotune import Workload, short
from sppo_hf.attention.backends.base import AttentionSpec, CausalBand
from sppo_hf.attention.backends.reference import Reference
from tests.attention.oracle import Answer, Problem, assert_equal, solve, visible

CPU = torch.device("cpu")


def _load(chunk, prefix, *, window=None, heads=4, **needs):
    settings = {"device_type": "cpu", "dtype": torch.float64, "qk_head_size": 8, "v_head_size": 6}
    requirement = AttentionSpec(**settings | {"gqa_ratio": 2} | needs, window=window is not None)
    return Workload(
        requirement=requirement,
        query_heads=heads,
        chunk_tokens=chunk,
        prefix_tokens=prefix,
        window_tokens=window,
    )


@given(st.integers(1, 20), st.integers(0, 20), st.none() | st.integers(1, 45))
def test_pairs_are_those_that_the_mask_shows(chunk, prefix, window):
    load = _load(chunk, prefix, window=window)
    seen = visible(CausalBand(prefix, window), chunk, prefix + chunk)
    assert load.visible_pairs == int(seen.sum())
    # Two products, each a multiplication and an addition per element of a head.
    assert load.forward_flops == load.visible_pairs * 4 * 2 * (8 + 6)
    assert load.backward_flops == 2.5 * load.forward_flops


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [False, True])
def test_a_made_workload_is_attention_of_a_chunk(window, softcap):
    load = _load(7, 12, window=window, softcap=softcap)
    made = load.make(CPU)
    attended = made.forward(Reference())
    grads = made.backward(Reference(), attended)
    problem = Problem(made.q_BNCH, made.k_BKTH, made.v_BKTH, made.dout_BNCH)
    seen = visible(CausalBand(12, window), 7, 19)
    expected = solve(problem, seen, scale=8**-0.5, softcap=50.0 if softcap else None)
    assert_equal(Answer(*attended, *grads), expected, 1e-10)
    assert made.k_BKTH.shape == (1, 2, 19, 8)
    forward, backward = made.work(Reference())
    assert torch.equal(forward().out_BNCH, attended.out_BNCH)
    assert torch.equal(backward().dq_BNCH, grads.dq_BNCH)


def test_the_users_random_numbers_stay_and_ours_repeat():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    made = [_load(3, 4).make(CPU) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(made[0].k_BKTH, made[1].k_BKTH)
    assert not torch.equal(_load(3, 4).make(CPU, seed=1).k_BKTH, made[0].k_BKTH)


def test_bytes_are_those_of_all_tensors():
    load = _load(16, 48, dtype=torch.bfloat16)
    made = load.make(CPU)
    attended = made.forward(Reference())
    grads = made.backward(Reference(), attended)
    inputs = (made.q_BNCH, made.k_BKTH, made.v_BKTH, made.dout_BNCH)
    assert load.num_bytes == sum(x.nbytes for x in (*inputs, *attended, *grads))


def test_shortening_cuts_the_prefix_first_and_stops():
    load = _load(4096, 32768)
    assert load.shortened(load.num_bytes) is load
    half = load.shortened(load.num_bytes - 1)
    assert (half.chunk_tokens, half.prefix_tokens) == (4096, 16384)
    least = load.shortened(0)
    assert (least.chunk_tokens, least.prefix_tokens) == (1024, 1024)
    assert load.shortened(least.num_bytes).num_bytes <= least.num_bytes


def test_words():
    assert [short(n) for n in (512, 4096, 131072, 2**20, 1536)] == [
        "512",
        "4K",
        "128K",
        "1M",
        "1,536",
    ]
    assert str(_load(4096, 32768)) == "4K x 32K"
    assert str(_load(512, 0, window=1024)) == "512 x 0, window 1K"


def test_heads_that_cannot_be_shared_out():
    with pytest.raises(AssertionError, match="3 heads for groups of 2"):
        _load(1, 1, heads=3)
