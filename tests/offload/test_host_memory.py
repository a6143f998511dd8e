"""Host memory: pages that are locked by threads, free lists, and the pool against a reference."""

from __future__ import annotations

import gc
import multiprocessing
import re
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload import host_memory as module
from sppo_hf.offload.copy_streams import StreamCopier
from sppo_hf.offload.host_memory import (
    ALIGNMENT_BYTES,
    PAGE_BYTES,
    HostPool,
    HostPoolFull,
    Region,
    host_memory,
    locked_bytes,
)
from sppo_hf.offload.slabs import FreeList
from tests.fakes.device import FakeDevice

SIZES = [8 * PAGE_BYTES, 3 * PAGE_BYTES, 5 * PAGE_BYTES + 100, PAGE_BYTES]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_PART_BYTES", 2 * PAGE_BYTES)
    monkeypatch.setattr(module, "_num_threads", lambda: 3)
    gc.collect()
    gc.disable()  # everything below is freed without it
    others_bytes = locked_bytes()
    yield
    gc.enable()
    assert locked_bytes() == others_bytes


def test_a_piece_is_yielded_when_all_of_it_was_touched_and_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    touched: list[tuple[int, int, int]] = []
    touch, device = module._touch, FakeDevice()

    def slow_touch(pages: module._Pages, start: int) -> None:
        time.sleep(0.002 * (start == 0))  # the first part of a piece is the last that is there
        touch(pages, start)
        touched.append((pages.array().ctypes.data, start, threading.get_ident()))

    def on_lock(address: int, num_bytes: int) -> None:
        starts = {start for where, start, _ in touched if where == address}
        assert starts == {*range(0, num_bytes, 2 * PAGE_BYTES)}, "locked before it is there"
        time.sleep(0.005 * (num_bytes == SIZES[0]))

    monkeypatch.setattr(module, "_touch", slow_touch)
    device.on_lock = on_lock
    kept = []
    for memory, size in zip(host_memory(SIZES, device), SIZES, strict=True):
        assert memory.numel() == size
        assert device.locked[memory.data_ptr()] == size
        kept.append(memory.fill_(len(kept)))
    assert [int(memory.unique()) for memory in kept] == [0, 1, 2, 3]
    assert locked_bytes() >= sum(SIZES) == sum(device.locked.values())
    assert len({thread for *_, thread in touched}) > 1
    middle = kept[1][PAGE_BYTES:]
    del kept, memory
    assert [*device.locked.values()] == SIZES[1:2], "a view holds its piece"
    del middle
    assert not device.locked


@pytest.mark.parametrize("third", ["driver", "system", "free memory"])
def test_a_refusal_is_raised_after_the_earlier_pieces(
    monkeypatch: pytest.MonkeyPatch, third: str
) -> None:
    device, made = FakeDevice(), [0]

    def refuse_the_third(*_: int) -> int:
        made[0] += 1
        if made[0] == 3:
            if third == "free memory":
                return PAGE_BYTES
            raise {"driver": RuntimeError, "system": OSError}[third]("no more of it")
        return 2**40

    if third == "driver":
        device.on_lock = refuse_the_third
    elif third == "free memory":
        monkeypatch.setattr(module, "free_host_memory_bytes", refuse_the_third)
    else:

        class _Refused(module._Pages):
            def __new__(cls, *args: int) -> _Refused:
                refuse_the_third()
                return super().__new__(cls, *args)

        monkeypatch.setattr(module, "_Pages", _Refused)
    threads = threading.active_count()
    pieces = host_memory(SIZES, device)
    given = [next(pieces), next(pieces)]
    said = "of host memory are free" if third == "free memory" else "no more of it"
    with pytest.raises(OffloadError, match=f"{said}.*use_pin_memory"):
        next(pieces)
    assert [*device.locked.values()] == SIZES[:2]
    assert threading.active_count() == threads, "no thread is left"
    given.clear()
    assert not device.locked


def test_stopping_early_leaves_nothing_locked() -> None:
    device = FakeDevice()
    pieces = host_memory(SIZES, device)
    first = next(pieces)
    pieces.close()
    assert [*device.locked.values()] == SIZES[:1]
    del first
    assert not device.locked


def test_memory_is_unlocked_when_copies_are_over() -> None:
    device = FakeDevice(lambda stream, num_bytes: 5.0)
    (memory,) = host_memory([PAGE_BYTES], device)
    source = device.tensor(torch.zeros(PAGE_BYTES, dtype=torch.uint8))
    StreamCopier(device).start_d2h(source, memory)
    del memory
    assert device.now == 5.0
    assert not device.locked


def test_a_forked_child_sees_the_bytes_and_unlocks_nothing() -> None:
    device = FakeDevice()
    (memory,) = host_memory([PAGE_BYTES], device)
    memory.fill_(7)
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()

    def child(memories: list[torch.Tensor]) -> None:
        seen = int(memories[0][-1])
        memories.clear()
        found.put((seen, len(device.locked)))

    memories = [memory]
    del memory
    process = context.Process(target=child, args=(memories,))
    process.start()
    assert found.get() == (7, 1)
    process.join()
    assert len(device.locked) == 1


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
def test_a_double_free_is_refused(offset: int, size: int) -> None:
    free_list = FreeList(16)
    assert free_list.allocate(16) == 0
    free_list.free(0, 4)
    free_list.free(12, 4)
    with pytest.raises(AssertionError, match="overlaps free memory"):
        free_list.free(offset, size)


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
    # All joined: each slab is one free block, so its own size can be allocated in one piece.
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


def test_what_an_evaluation_allocated_can_be_trained_with() -> None:
    pool = HostPool(4096)
    with torch.inference_mode():
        pool.release(pool.allocate(10))
    pool.allocate(10).memory.copy_(torch.arange(10, dtype=torch.uint8))


def test_fragmentation_is_the_share_outside_the_largest_free_block() -> None:
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


def test_an_exhausted_budget_names_needed_and_available_bytes() -> None:
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
    """Let `device` lock `number` slabs and refuse more; returns the sizes of those locked."""
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


def test_slabs_have_the_requested_bytes() -> None:
    device = FakeDevice()
    pool = HostPool(SLAB_BYTES, locker=device, budget_bytes=7 * SLAB_BYTES)
    pool.allocate(3 * SLAB_BYTES)
    pool.reserve(5 * SLAB_BYTES)
    assert pool.reserved_bytes == 5 * SLAB_BYTES == sum(device.locked.values())
    pool.reserve(1000 * SLAB_BYTES)
    assert sorted(device.locked.values()) == [2 * SLAB_BYTES, 2 * SLAB_BYTES, 3 * SLAB_BYTES]


def test_a_closed_pool_keeps_only_allocated_slabs_locked() -> None:
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
def test_reserved_memory_is_one_slab_and_needs_no_growth(
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
def test_a_refusal_by_the_system_reduces_the_budget(
    monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    empty, given = torch.empty, []

    def refuse_the_third(size: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        if len(given) == 2:
            raise RuntimeError("out of memory")
        given.append(size)
        return empty(size, dtype=dtype, device=device)

    device = FakeDevice()
    if locked:
        given = _refuse_from(device, 2)
    else:
        monkeypatch.setattr(torch, "empty", refuse_the_third)
    monkeypatch.setattr(module, "MAX_SLAB_BYTES", 4 * SLAB_BYTES)
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


def test_a_pool_that_the_system_lets_grow_no_further_is_full() -> None:
    """Then the next tier takes what is offloaded; a later step asks the system no more."""
    device = FakeDevice()
    locked = _refuse_from(device, 1)
    pool = HostPool(SLAB_BYTES, locker=device, budget_bytes=9 * SLAB_BYTES)
    pool.allocate(SLAB_BYTES)
    for _ in range(2):
        with pytest.raises(HostPoolFull, match=r"4096 of 4096 bytes .*out of memory"):
            pool.allocate(1)
    assert locked == [SLAB_BYTES] == [pool.budget_bytes]


def test_no_memory_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(OffloadError, match="gave no memory"):
        HostPool(SLAB_BYTES).reserve(SLAB_BYTES)


@pytest.mark.parametrize("num_bytes", [1, PAGE_BYTES, 3 * PAGE_BYTES + 1, 2**22])
def test_slabs_and_regions_start_at_pages_if_requested(num_bytes: int) -> None:
    pool = HostPool(SLAB_BYTES, alignment_bytes=PAGE_BYTES)
    for _ in range(5):
        region = pool.allocate(num_bytes)
        assert region.memory.data_ptr() % PAGE_BYTES == 0
        assert region.reserved_bytes % PAGE_BYTES == 0
        assert region.memory.numel() == num_bytes
