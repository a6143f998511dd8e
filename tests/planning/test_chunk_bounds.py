"""Chunk bounds: the papers' worked lengths, exactness on any length, errors that help."""

from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError
from sppo_hf.planning.chunk_bounds import (
    TARGET_TOKENS,
    Bounds,
    PrefixCost,
    auto_bounds,
    balanced_bounds,
    chunk_bounds,
    chunk_cuts,
    even_bounds,
    moved_out_of,
)
from sppo_hf.planning.model_shape import ModelShape
from tests.planning.shapes import gpt_shape, llama_config, shape_of, tiny_shape
from tests.planning.situations import small_shape


def lengths(bounds: Bounds) -> list[int]:
    return [end - start for start, end in bounds]


def assert_covers(bounds: Bounds, total_tokens: int) -> None:
    assert bounds[0][0] == 0
    assert bounds[-1][1] == total_tokens
    assert all(length >= 1 for length in lengths(bounds))
    assert all(left[1] == right[0] for left, right in pairwise(bounds))


@pytest.mark.parametrize(
    ("shape", "total_tokens", "expected"),
    [
        (gpt_shape(4096, 32, 32), 32_768, [11_020, 8421, 7088, 6239]),
        (gpt_shape(4096, 32, 32), 131_072, [55_701, 30_878, 24_070, 20_423]),
        (gpt_shape(6144, 64, 64), 65_536, [23_416, 16_630, 13_641, 11_848]),
    ],
    ids=["7B-32K", "7B-128K", "30B-64K"],
)
def test_worked_lengths(shape: ModelShape, total_tokens: int, expected: list[int]) -> None:
    bounds = balanced_bounds(PrefixCost.of(shape), total_tokens, 4, round_to_tokens=1)
    assert lengths(bounds) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    "windows",
    [(None,), (100,), (None, 64), (16, 64, 256)],
    ids=["full", "window", "mixed", "three windows"],
)
def test_prefix_cost_is_the_sum_over_tokens_and_inverts(windows: tuple[int | None, ...]) -> None:
    kinds = ["full_attention" if w is None else "sliding_attention" for w in windows]
    layers = tuple(
        tiny_shape(num_hidden_layers=1, layer_types=[kind], sliding_window=window).layers[0]
        for kind, window in zip(kinds, windows, strict=True)
    )
    base = tiny_shape()
    shape = ModelShape(
        layers=layers,
        vocab_size=base.vocab_size,
        tied=True,
        dtype_bytes=2,
        total_parameters=1,
        trainable_parameters=1,
        weight_bytes=2,
        gradient_bytes=2,
    )
    cost = PrefixCost.of(shape)
    for total in (1, 50, 100, 1000):
        # The midpoint rule is exact here but for the token that a window's edge cuts.
        by_token = sum(
            shape.linear_flops_per_token()
            + sum(c.attention_flops_per_key * min(x + 0.5, c.window or total) for c in layers)
            for x in range(total)
        )
        assert cost.upto(total) == pytest.approx(by_token, rel=1e-3)
        assert cost.tokens_for(cost.upto(total)) == pytest.approx(total)


def test_windows_flatten_the_lengths() -> None:
    full = balanced_bounds(PrefixCost.of(tiny_shape()), 4000, 4)
    windowed = balanced_bounds(PrefixCost.of(tiny_shape(sliding_window=8)), 4000, 4)
    assert lengths(full)[0] > 1.5 * lengths(full)[-1]
    assert max(lengths(windowed)) - min(lengths(windowed)) < 40


def test_long_chunks_end_on_tiles() -> None:
    shape = shape_of(llama_config(), dtype_bytes=2)
    bounds = chunk_bounds(SPPOConfig(num_chunks=8), shape, 65_001)
    assert all(end % 128 == 0 for _, end in bounds[:-1])
    assert_covers(bounds, 65_001)


def test_even() -> None:
    config = SPPOConfig(num_chunks=7, partition="even")
    bounds = chunk_bounds(config, tiny_shape(), 100)
    assert_covers(bounds, 100)
    assert set(lengths(bounds)) == {14, 15}


@given(num_chunks=st.integers(1, 40), more=st.integers(0, 200))
def test_short_even_chunks_end_at_the_nearest_tokens(num_chunks: int, more: int) -> None:
    total = num_chunks + more
    bounds = even_bounds(total, num_chunks)
    assert len(bounds) == num_chunks
    for number, (_, end) in enumerate(bounds, 1):
        assert abs(end - total * number / num_chunks) <= 0.5


def test_long_even_chunks_have_two_lengths() -> None:
    for total_tokens, num_chunks in ((100_000, 12), (131_072, 16), (65_001, 8)):
        bounds = even_bounds(total_tokens, num_chunks)
        assert_covers(bounds, total_tokens)
        *same, last = lengths(bounds)
        assert len(set(same)) == 1
        assert same[0] % 128 == 0
        assert last <= same[0] <= total_tokens / num_chunks + 128


def test_chunks_whose_rounded_lengths_would_leave_nothing_for_the_last_differ_by_a_step() -> None:
    bounds = even_bounds(10_250, 10)  # nine of 1,152 are more than all
    assert_covers(bounds, 10_250)
    assert set(lengths(bounds)[:-1]) == {1024}


def test_auto_is_even_on_one_device_and_balanced_where_work_has_to_be() -> None:
    shape = shape_of(llama_config(), dtype_bytes=2)

    def cut(stages: int, **settings: object) -> Bounds:
        config = SPPOConfig(num_chunks=8, **settings)  # type: ignore[arg-type]
        return chunk_bounds(config, shape, 131_072, stages=stages)

    even, flops = (cut(1, partition=partition) for partition in ("even", "flops"))
    assert even != flops
    assert cut(1) == even
    assert cut(4) == cut(1, offload="sppo") == flops
    assert cut(4, partition="even") == even


@pytest.mark.parametrize(
    ("total_tokens", "expected"),
    [(1, [1]), (511, [511]), (512, [512]), (1300, [512, 512, 276]), (1024, [512, 512])],
)
def test_chunk_tokens(total_tokens: int, expected: list[int]) -> None:
    bounds = chunk_bounds(SPPOConfig(chunk_tokens=512), tiny_shape(), total_tokens)
    assert lengths(bounds) == expected


def test_explicit_lengths() -> None:
    config = SPPOConfig(chunk_lengths=(5, 3, 4))
    assert chunk_bounds(config, tiny_shape(), 12) == ((0, 5), (5, 8), (8, 12))


def test_explicit_lengths_that_do_not_sum_name_sum_length_and_remedy() -> None:
    config = SPPOConfig(chunk_lengths=(5, 3, 4))
    with pytest.raises(
        ConfigError, match=r"sum to 12 tokens.*13 tokens long.*chunk_tokens"
    ) as error:
        chunk_bounds(config, tiny_shape(), 13)
    assert "pad or pack every batch to 12 tokens" in str(error.value)


def test_more_chunks_than_tokens() -> None:
    with pytest.raises(ConfigError, match=r"num_chunks=8 is more than the 7 tokens.*chunk_tokens"):
        chunk_bounds(SPPOConfig(num_chunks=8), tiny_shape(), 7)
    assert lengths(chunk_bounds(SPPOConfig(num_chunks=7), tiny_shape(), 7)) == [1] * 7


@pytest.mark.parametrize("partition", ["flops", "even"])
@given(total_tokens=st.integers(1, 5000), num_chunks=st.integers(1, 300))
def test_any_count_covers_any_length(partition: str, total_tokens: int, num_chunks: int) -> None:
    num_chunks = min(num_chunks, total_tokens)
    config = SPPOConfig.from_dict({"num_chunks": num_chunks, "partition": partition})
    bounds = chunk_bounds(config, tiny_shape(sliding_window=64), total_tokens)
    assert len(bounds) == num_chunks
    assert_covers(bounds, total_tokens)


@given(total_tokens=st.integers(1, 100_000))
def test_auto_never_fails_and_stays_near_its_target(total_tokens: int) -> None:
    bounds = chunk_bounds(SPPOConfig(), tiny_shape(), total_tokens, device_kind="cpu")
    assert_covers(bounds, total_tokens)
    assert max(lengths(bounds)) <= 2 * 512 + 16
    if len(bounds) > 1:
        assert min(lengths(bounds)) >= 512 // 4 - 16


def test_auto_bounds_the_first_chunk_of_a_million_tokens() -> None:
    cost = PrefixCost.of(shape_of(llama_config(), dtype_bytes=2))
    free = lengths(balanced_bounds(cost, 1_000_000, 122))
    held = lengths(auto_bounds(cost, 1_000_000, target_tokens=8192, partition="flops"))
    assert free[0] > 60_000
    assert len(held) == 122
    assert max(held) == 16_384
    # Beyond the longest chunks FLOPs are equal again, up to bounds rounded by 64 of 4,500.
    tail = [cost.upto(sum(held[: i + 1])) - cost.upto(sum(held[:i])) for i in range(60, 122)]
    assert max(tail) < 1.07 * min(tail)


def test_auto_on_cuda_aims_at_8k() -> None:
    shape = shape_of(llama_config(), dtype_bytes=2)
    assert len(chunk_bounds(SPPOConfig(), shape, 8192, device_kind="cuda")) == 1
    assert len(chunk_bounds(SPPOConfig(), shape, 65_536, device_kind="cuda")) == 8


def test_cuts_aim_at_targets_once_each() -> None:
    shape = small_shape()
    cuts = list(chunk_cuts(shape, 65_536, "flops"))
    assert [len(bounds) for bounds in cuts] == [65_536 // target for target in TARGET_TOKENS]
    assert len(list(chunk_cuts(shape, 1000, "flops"))) == 1


def test_rows_of_any_length_have_a_cut_with_few_chunks() -> None:
    for tokens in (2**20, 2**24):
        cuts = list(chunk_cuts(small_shape(), tokens, "even"))
        assert cuts
        assert min(len(bounds) for bounds in cuts) <= max(256, tokens // 16_384)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 300), st.integers(2, 30)), max_size=12),
)
def test_no_chunk_ends_in_a_span(lengths, spans):
    """Each bound that is in some moves to an end of all of them, and all together the least."""
    ends = list(accumulate(lengths))
    bounds = tuple(pairwise([0, *ends]))
    inside = [(start, start + tokens) for start, tokens in spans if start + tokens <= ends[-1]]

    def places(bound):
        """The next on either side that are in no span; `bound` itself if it is in none."""
        free = [x for x in range(ends[-1] + 1) if not any(start < x < end for start, end in inside)]
        return {max(x for x in free if x <= bound), min(x for x in free if x >= bound)}

    def grows(moved):
        return all(one < other for one, other in pairwise((0, *moved, ends[-1])))

    possible = list(filter(grows, product(*map(places, ends[:-1]))))
    if not possible:
        with pytest.raises(ConfigError, match="has to hold all"):
            moved_out_of(bounds, inside)
        return
    least = min(sum(abs(x - y) for x, y in zip(one, ends, strict=False)) for one in possible)
    moved = moved_out_of(bounds, inside)
    assert moved[-1][1] == ends[-1]
    found = tuple(end for _, end in moved[:-1])
    assert found in possible
    assert sum(abs(x - y) for x, y in zip(found, ends, strict=False)) == least


def test_bounds_move_to_the_nearer_end_of_overlapping_spans():
    bounds = ((0, 10), (10, 20), (20, 30), (30, 40))
    assert moved_out_of(bounds, ()) == bounds
    spans = [(8, 12), (11, 16), (19, 24), (24, 29), (30, 33)]
    assert moved_out_of(bounds, spans) == ((0, 8), (8, 19), (19, 30), (30, 40))
    # Both bounds are nearest to its first token, which only one of them can be.
    assert moved_out_of(((0, 4), (4, 6), (6, 20)), [(3, 12)]) == ((0, 3), (3, 12), (12, 20))
    with pytest.raises(
        ConfigError, match=r"20 tokens in 4 chunks: tokens 3 to 12 see .* all 9\. S"
    ):
        moved_out_of(((0, 4), (4, 6), (6, 12), (12, 20)), [(3, 12)])
