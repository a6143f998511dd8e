"""FreeList hand out disjoint bytes, first fit, and join whatever comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.offload.host_memory import FreeList

NUM_BYTES = 64


@given(st.lists(st.tuples(st.booleans(), st.integers(1, NUM_BYTES)), max_size=60))
def test_any_sequence_agrees_with_a_map_of_bytes(actions: list[tuple[bool, int]]) -> None:
    free_list = FreeList(NUM_BYTES)
    is_free = [True] * NUM_BYTES
    taken: list[tuple[int, int]] = []
    for take, value in actions:
        if take:
            fits = [
                offset
                for offset in range(NUM_BYTES - value + 1)
                if all(is_free[offset : offset + value])
            ]
            offset = free_list.allocate(value)
            assert offset == (fits[0] if fits else None)
            if offset is not None:
                is_free[offset : offset + value] = [False] * value
                taken.append((offset, value))
        elif taken:
            offset, size = taken.pop(value % len(taken))
            free_list.free(offset, size)
            is_free[offset : offset + size] = [True] * size
        runs = "".join("f" if free else "." for free in is_free).split(".")
        assert free_list.free_bytes == sum(is_free)
        assert free_list.largest_bytes == max(len(run) for run in runs)


@pytest.mark.parametrize(("offset", "size"), [(0, 8), (2, 4), (8, 8), (12, 4)])
def test_bytes_that_are_free_already_are_refused(offset: int, size: int) -> None:
    free_list = FreeList(16)
    assert free_list.allocate(16) == 0
    free_list.free(0, 4)
    free_list.free(12, 4)
    with pytest.raises(AssertionError, match="overlaps free memory"):
        free_list.free(offset, size)
