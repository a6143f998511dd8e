"""Division of tokens and heads among ranks; for collectives see test_sequence_exactness.py."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.engine.sequence_group import (
    check_heads,
    local_heads,
    needed_kv_heads,
    rank_random_state,
    rank_token_counts,
    rank_tokens,
    select_kv_heads,
)
from sppo_hf.errors import ConfigError


@given(st.integers(0, 50), st.integers(0, 50), st.integers(2, 9))
def test_parts_follow_each_other_and_are_even(start: int, tokens: int, size: int) -> None:
    parts = [rank_tokens(start, start + tokens, rank, size) for rank in range(size)]
    assert parts[0][0] == start
    assert parts[-1][1] == start + tokens
    assert all(one[1] == other[0] for one, other in itertools.pairwise(parts))
    lengths = [end - begin for begin, end in parts]
    assert lengths == rank_token_counts(tokens, size)
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6))
def test_every_rank_has_the_kv_heads_of_its_query_heads(size: int, own: int, sharing: int) -> None:
    heads = size * own
    if heads % sharing:
        return
    keys = heads // sharing
    found = needed_kv_heads(heads, keys, size) or list(range(keys))
    per_rank, group = len(found) // size, heads // len(found)
    for head in range(heads):
        rank, inside = divmod(head, own)
        assert found[rank * per_rank + inside // group] == head // sharing


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 5))
def test_ranks_divide_all_heads_in_whole_runs(size: int, runs: int, heads: int) -> None:
    parts = [local_heads(runs * heads, part, size, runs) for part in range(size)]
    assert [head for part in parts for head in part] == list(range(runs * heads))
    counts = [len(part) // heads for part in parts]
    assert all(len(part) % heads == 0 for part in parts)
    assert max(counts) - min(counts) <= 1
    if runs % size == 0:
        assert parts == [local_heads(runs * heads, part, size) for part in range(size)]


def test_heads_are_sent_once_where_ranks_divide_those_of_keys() -> None:
    assert needed_kv_heads(8, 4, 2) is None
    assert needed_kv_heads(8, 2, 4) == [0, 0, 1, 1]
    assert needed_kv_heads(6, 2, 3) == [0, 0, 0, 1, 1, 1]
    x_BKcH = torch.randn(2, 3, 4, 5)
    assert select_kv_heads(x_BKcH, None) is x_BKcH
    assert torch.equal(select_kv_heads(x_BKcH, [0, 0, 2]), x_BKcH[:, [0, 0, 2]])


def test_sizes_that_do_not_divide_the_heads_are_refused_with_those_that_do() -> None:
    check_heads(12, 4, "a model")
    with pytest.raises(ConfigError, match=r"sp_size=5 .* 12 .*Allowed: 1, 2, 3, 4, 6, 12\."):
        check_heads(12, 5, "a model")


def test_ranks_draw_different_dropout_and_equal_numbers_afterwards() -> None:
    drawn, after = [], []
    for rank in range(2):
        torch.manual_seed(7)
        with rank_random_state(SimpleNamespace(rank=rank), torch.device("cpu")):  # type: ignore[arg-type]
            drawn.append(torch.rand(4).tolist())
        with rank_random_state(SimpleNamespace(rank=rank), torch.device("cpu")):  # type: ignore[arg-type]
            drawn.append(torch.rand(4).tolist())
        after.append(torch.rand(4).tolist())
    assert len(set(map(tuple, drawn))) == 4
    assert after[0] == after[1]


def test_a_forward_without_dropout_leaves_the_order_of_rows_as_it_is() -> None:
    before = torch.get_rng_state()
    with rank_random_state(SimpleNamespace(rank=1), torch.device("cpu")):  # type: ignore[arg-type]
        torch.zeros(4)
    assert torch.equal(torch.get_rng_state(), before)
