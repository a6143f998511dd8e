"""Page-locked memory is handed out whole and in order, and nothing stays locked that nobody has."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from sppo_hf.errors import OffloadError
from sppo_hf.offload import host_memory as module
from sppo_hf.offload.copy_streams import StreamCopier
from sppo_hf.offload.host_memory import PAGE_BYTES, host_memory, locked_bytes
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


def test_a_piece_is_given_out_when_all_of_it_was_touched_and_locked(
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
def test_a_refusal_comes_after_what_was_given_before_it(
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


def test_who_stops_early_leaves_nothing_locked() -> None:
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
