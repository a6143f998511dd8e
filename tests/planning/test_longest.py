"""The search: right for every answer, at most its limit, and in few tries."""

from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.planning.search import Found, search_longest


@given(answer=st.integers(0, 100_000), limit=st.integers(64, 65_536))
def test_it_finds_the_longest_multiple(answer: int, limit: int) -> None:
    tried: list[int] = []

    def trains(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= answer

    found = search_longest(trains, step_tokens=64, most_tokens=limit)
    assert max(tried) <= limit
    assert len(set(tried)) == len(tried)
    assert len(tried) <= 24
    assert found.longest_tokens == max([0, *(t for t in tried if t <= answer)])
    if found.failed_tokens is None:
        assert found.longest_tokens * 2 > limit
    else:
        assert found.failed_tokens - found.longest_tokens == 64
        assert found.longest_tokens <= answer < found.failed_tokens


def test_nothing_trains() -> None:
    assert search_longest(lambda _: False, step_tokens=64, most_tokens=999) == Found(0, 64)
