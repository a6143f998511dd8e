"""The host pool lends disjoint bytes, joins what comes back, and stays within its budget."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload import host_memory as pool_module
from sppo_hf.offload.host_memory import ALIGNMENT_BYTES, PAGE_BYTES, HostPool, Region
from tests.fakes.device import FakeDevice

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


def _refuse_from(device: FakeDevice, number: int) -> list[int]:
    """Let a driver lock so many slabs; returns the sizes of those, in order."""
    locked: list[int] = []

    def on_lock(address: int, num_bytes: int) -> None:
        if len(locked) == number:
            raise RuntimeError("CUDA error: out of memory")
        locked.append(num_bytes)

    device.on_lock = on_lock
    return locked


def test_memory_that_cannot_be_pinned_names_the_limit() -> None:
    device = FakeDevice()
    _refuse_from(device, 0)
    pool = HostPool(SLAB_BYTES, locker=device)
    with pytest.raises(OffloadError, match=r"out of memory.*RLIMIT_MEMLOCK.*use_pin_memory"):
        pool.allocate(10)
    with pytest.raises(OffloadError, match="out of memory"):
        pool.reserve(SLAB_BYTES)
    assert not device.locked


def test_slabs_have_the_bytes_that_were_asked_for() -> None:
    device = FakeDevice()
    pool = HostPool(SLAB_BYTES, locker=device, budget_bytes=7 * SLAB_BYTES)
    pool.allocate(3 * SLAB_BYTES)
    pool.reserve(5 * SLAB_BYTES)
    assert pool.reserved_bytes == 5 * SLAB_BYTES == sum(device.locked.values())
    pool.reserve(1000 * SLAB_BYTES)
    assert sorted(device.locked.values()) == [2 * SLAB_BYTES, 2 * SLAB_BYTES, 3 * SLAB_BYTES]


def test_a_closed_pool_has_nothing_locked_unless_it_is_lent() -> None:
    device = FakeDevice()
    pool = HostPool(SLAB_BYTES, locker=device)
    region = pool.allocate(SLAB_BYTES)
    pool.close()
    assert sum(device.locked.values()) == SLAB_BYTES, "somebody still has a region"
    pool.release(region)
    del region
    pool.close()
    assert not device.locked
    assert pool.reserved_bytes == pool.free_bytes == 0
    pool.allocate(1)
    assert device.locked


@given(
    st.integers(1, 40 * SLAB_BYTES),
    st.one_of(st.none(), st.integers(0, 30 * SLAB_BYTES)),
)
def test_what_was_reserved_is_one_slab_and_needs_no_growth(
    num_bytes: int, budget: int | None
) -> None:
    pool = HostPool(SLAB_BYTES, budget_bytes=budget)
    pool.reserve(num_bytes)
    reserved_bytes = pool.reserved_bytes
    pool.reserve(num_bytes)
    assert pool.reserved_bytes == reserved_bytes
    if budget is None or budget >= max(num_bytes, SLAB_BYTES) + ALIGNMENT_BYTES:
        pool.allocate(num_bytes)
        assert num_bytes <= pool.reserved_bytes <= max(num_bytes, SLAB_BYTES) + ALIGNMENT_BYTES
    else:
        assert budget - ALIGNMENT_BYTES < pool.reserved_bytes + ALIGNMENT_BYTES
        assert pool.reserved_bytes <= budget
    assert pool.grown_bytes == 0
    assert pool.reserved_bytes == reserved_bytes


@pytest.mark.parametrize("locked", [True, False])
def test_what_the_system_refuses_makes_the_budget_smaller(
    monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    empty, given = torch.empty, []

    def refuse_the_third(size: int, *, dtype: torch.dtype) -> torch.Tensor:
        if len(given) == 2:
            raise RuntimeError("out of memory")
        given.append(size)
        return empty(size, dtype=dtype)

    device = FakeDevice()
    if locked:
        given = _refuse_from(device, 2)
    else:
        monkeypatch.setattr(torch, "empty", refuse_the_third)
    monkeypatch.setattr(pool_module, "MAX_SLAB_BYTES", 4 * SLAB_BYTES)
    pool = HostPool(SLAB_BYTES, locker=device if locked else None)
    told: list[tuple[int, int]] = []
    pool.reserve(16 * SLAB_BYTES, lambda *sizes: told.append(sizes))
    assert len(given) == 2
    assert told == [(slabs * SLAB_BYTES, 16 * SLAB_BYTES) for slabs in (0, 4, 8)]
    assert pool.budget_bytes == pool.reserved_bytes == 8 * SLAB_BYTES
    assert sum(device.locked.values()) == 8 * SLAB_BYTES * locked
    pool.allocate(4 * SLAB_BYTES)
    pool.allocate(4 * SLAB_BYTES)
    with pytest.raises(BudgetError, match="out of memory"):
        pool.allocate(1)


def test_nothing_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(OffloadError, match="gave no memory"):
        HostPool(SLAB_BYTES).reserve(SLAB_BYTES)


def test_growth_that_was_not_reserved_is_counted() -> None:
    pool = HostPool(SLAB_BYTES)
    pool.reserve(SLAB_BYTES)
    pool.allocate(SLAB_BYTES)
    assert pool.grown_bytes == 0
    pool.allocate(1)
    assert pool.grown_bytes == SLAB_BYTES


@pytest.mark.parametrize("num_bytes", [1, PAGE_BYTES, 3 * PAGE_BYTES + 1, 2**22])
def test_slabs_and_regions_start_at_pages_where_that_is_asked_for(num_bytes: int) -> None:
    pool = HostPool(SLAB_BYTES, alignment_bytes=PAGE_BYTES)
    for _ in range(5):
        region = pool.allocate(num_bytes)
        assert region.memory.data_ptr() % PAGE_BYTES == 0
        assert region.reserved_bytes % PAGE_BYTES == 0
        assert region.memory.numel() == num_bytes
