"""The search: right for every answer, at most its limit, and in few tries."""

from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.planning.search import Found, search_longest

SIZES = {
    "yes or no": lambda over: 1 if over > 0 else -1,
    "a line": lambda over: over,
    "a curve": lambda over: over**3,
    "flat below": lambda over: over if over > 0 else -1e-9,
    "flat above": lambda over: 1e-9 if over > 0 else over,
}
"""What is missing, of the tokens that are too many."""


@given(
    answer=st.integers(0, 100_000), limit=st.integers(64, 65_536), size=st.sampled_from([*SIZES])
)
def test_it_finds_the_longest_multiple(answer: int, limit: int, size: str) -> None:
    tried: list[int] = []

    def missing(tokens: int) -> float:
        tried.append(tokens)
        return SIZES[size](tokens - answer)

    found = search_longest(missing, step_tokens=64, most_tokens=limit)
    assert max(tried) <= limit
    assert len(set(tried)) == len(tried)
    assert len(tried) <= (24 if size == "yes or no" else 44)
    assert found.longest_tokens == max([0, *(t for t in tried if t <= answer)])
    if found.failed_tokens is None:
        assert found.longest_tokens == limit // 64 * 64
    else:
        assert found.failed_tokens - found.longest_tokens == 64
        assert found.longest_tokens <= answer < found.failed_tokens


def test_nothing_trains() -> None:
    assert search_longest(lambda _: 1, step_tokens=64, most_tokens=999) == Found(0, 64)


@given(answer=st.integers(64, 60_000), known=st.floats(0, 1))
def test_a_known_length_is_where_it_begins(answer: int, known: float) -> None:
    tried: list[int] = []

    def missing(tokens: int) -> float:
        tried.append(tokens)
        return tokens - answer

    known_tokens = int(known * answer)
    found = search_longest(missing, step_tokens=64, most_tokens=2**17, known_tokens=known_tokens)
    assert found.longest_tokens == answer // 64 * 64
    assert min(tried) > known_tokens // 64 * 64


def test_a_straight_line_takes_few_tries() -> None:
    tried: list[int] = []

    def missing(tokens: int) -> float:
        tried.append(tokens)
        return tokens - 370_900

    found = search_longest(missing, step_tokens=1024, most_tokens=2**27, known_tokens=131_072)
    assert found == Found(370_688, 371_712)
    assert len(tried) <= 5
