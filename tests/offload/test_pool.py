"""The host pool lends disjoint bytes, joins what comes back, and stays within its budget."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.pool import ALIGNMENT_BYTES, HostPool, Region

SLAB_BYTES = 8 * ALIGNMENT_BYTES


def _check_disjoint(regions: list[Region]) -> None:
    for number, region in enumerate(regions):
        region.memory.fill_(number)
    for number, region in enumerate(regions):
        assert bool((region.memory == number).all())


@given(
    st.lists(
        st.one_of(
            st.integers(1, 2 * SLAB_BYTES).map(lambda num_bytes: ("allocate", num_bytes)),
            st.integers(0, 30).map(lambda which: ("release", which)),
        ),
        max_size=40,
    ),
    st.one_of(st.none(), st.integers(0, 6 * SLAB_BYTES)),
)
def test_any_sequence_of_loans(actions: list[tuple[str, int]], budget: int | None) -> None:
    pool = HostPool(SLAB_BYTES, budget_bytes=budget)
    lent: list[Region] = []
    for action, value in actions:
        if action == "release" and lent:
            pool.release(lent.pop(value % len(lent)))
        elif action == "allocate":
            used_bytes = pool.used_bytes
            try:
                lent.append(pool.allocate(value))
                assert lent[-1].memory.numel() == value
                assert lent[-1].memory.data_ptr() % 16 == 0
            except BudgetError:
                assert budget is not None
                assert pool.used_bytes == used_bytes
        assert pool.used_bytes == sum(region.reserved_bytes for region in lent)
        assert pool.used_bytes <= pool.peak_bytes <= pool.reserved_bytes
        assert budget is None or pool.reserved_bytes <= budget
        assert 0.0 <= pool.fragmentation <= 1.0
        _check_disjoint(lent)
    for region in lent:
        pool.release(region)
    assert pool.used_bytes == 0
    # All joined again: each slab is one hole, so its own size can be lent in one piece.
    reserved_bytes = pool.reserved_bytes
    whole = [pool.try_allocate(slab.memory.numel()) for slab in pool._slabs]
    assert None not in whole
    assert pool.used_bytes == reserved_bytes


def test_bytes_are_reused_and_slabs_are_not_added_for_them() -> None:
    pool = HostPool(SLAB_BYTES)
    for _ in range(100):
        regions = [pool.allocate(ALIGNMENT_BYTES) for _ in range(8)]
        for region in regions:
            pool.release(region)
    assert pool.reserved_bytes == SLAB_BYTES
    assert pool.peak_bytes == SLAB_BYTES


def test_fragmentation_is_the_share_outside_the_largest_hole() -> None:
    pool = HostPool(SLAB_BYTES)
    assert pool.fragmentation == 0.0
    regions = [pool.allocate(ALIGNMENT_BYTES) for _ in range(8)]
    assert pool.fragmentation == 0.0
    for region in (regions[0], regions[2], regions[3]):
        pool.release(region)
    assert pool.fragmentation == pytest.approx(1 / 3)


def test_a_request_larger_than_a_slab_gets_its_own() -> None:
    pool = HostPool(SLAB_BYTES)
    assert pool.allocate(5 * SLAB_BYTES).memory.numel() == 5 * SLAB_BYTES
    assert pool.reserved_bytes == 5 * SLAB_BYTES


def test_the_last_slab_shrinks_to_what_the_budget_leaves() -> None:
    pool = HostPool(SLAB_BYTES, budget_bytes=SLAB_BYTES + 2 * ALIGNMENT_BYTES + 1)
    pool.allocate(SLAB_BYTES)
    pool.allocate(2 * ALIGNMENT_BYTES)
    assert pool.reserved_bytes == SLAB_BYTES + 2 * ALIGNMENT_BYTES


def test_a_spent_budget_says_what_is_needed_and_had() -> None:
    pool = HostPool(SLAB_BYTES, budget_bytes=SLAB_BYTES)
    pool.allocate(SLAB_BYTES)
    with pytest.raises(BudgetError, match=re.escape(f"of {SLAB_BYTES} bytes are reserved")):
        pool.allocate(1)


def test_a_double_release_and_a_foreign_region_are_refused() -> None:
    pool = HostPool(SLAB_BYTES)
    region = pool.allocate(10)
    with pytest.raises(AssertionError, match="not from"):
        HostPool(SLAB_BYTES).release(region)
    pool.release(region)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(region)
    with pytest.raises(AssertionError, match="after its release"):
        _ = region.memory


def test_memory_that_cannot_be_pinned_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, pin_memory: bool, **kwargs: object) -> torch.Tensor:
        assert pin_memory
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(OffloadError, match=r"RLIMIT_MEMLOCK.*use_pin_memory"):
        HostPool(SLAB_BYTES, pin=True).allocate(10)


def test_pinned_slabs_are_powers_of_two_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, *, dtype, pin_memory: empty(size, dtype=dtype))
    pool = HostPool(SLAB_BYTES, pin=True, budget_bytes=7 * SLAB_BYTES)
    pool.allocate(3 * SLAB_BYTES)
    assert pool.reserved_bytes == 4 * SLAB_BYTES
    pool.allocate(2 * SLAB_BYTES)
    assert pool.reserved_bytes == 6 * SLAB_BYTES
