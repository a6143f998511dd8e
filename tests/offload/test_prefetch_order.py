"""The prefetch order prefetches what is listed with the frame that backward enters, each once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.offload.layer_offload import PrefetchOrder
from tests.offload.orders import asked_within


class _Handle:
    def __init__(self, name: int, num_bytes: int) -> None:
        self.name = name
        self.num_bytes = num_bytes


class _Frame:
    def __init__(self, name: int, num_bytes: int) -> None:
        self.handle = _Handle(name, num_bytes)

    def handles(self) -> tuple[_Handle, ...]:
        return (self.handle,)


class _Mover:
    """Notes what the prefetch order asks for; what was asked for has no bytes to fetch any more."""

    reads_ahead = True

    def __init__(self) -> None:
        self.log: list[int] = []
        self.read: list[int] = []
        self.offload_holder = 0
        self.closed: list[int | None] = []

    def limit_pending_d2h(self, max_pending_d2h_bytes: int | None = None) -> None:
        self.closed.append(max_pending_d2h_bytes)

    def prefetch(self, handle: _Handle) -> None:
        if handle.name not in self.log and handle.num_bytes:
            self.log.append(handle.name)

    def read_ahead(self, handle: _Handle) -> bool:
        if self.offload_holder == 0:
            return False
        self.offload_holder -= 1
        self.read.append(handle.name)
        return True


def _prefetch_order(
    sizes: list[int], asked: list[int] | None = None
) -> tuple[PrefetchOrder, list[_Frame], list[int]]:
    mover = _Mover()
    prefetch_order = PrefetchOrder(mover, max_pending_d2h_bytes=7, lowest_prefetched=asked)
    frames = [_Frame(name, num_bytes) for name, num_bytes in enumerate(sizes)]
    for number, frame in enumerate(frames):
        prefetch_order.record(frame, number)
    assert len(prefetch_order) == len(sizes)
    assert mover.closed == [7] * len(sizes)
    return prefetch_order, frames, mover.log


def _read_backward(
    prefetch_order: PrefetchOrder, frames: list[_Frame], log: list[int]
) -> list[list[int]]:
    seen: list[list[int]] = []
    for frame in reversed(frames):
        prefetch_order.on_backward(frame)
        seen.append(list(log))
        prefetch_order.on_backward(frame)
        assert log == seen[-1], "a second call changes nothing"
    return seen


def test_one_ahead_where_nothing_is_listed() -> None:
    prefetch_order, frames, log = _prefetch_order([5] * 4)
    assert _read_backward(prefetch_order, frames, log) == [
        [3, 2],
        [3, 2, 1],
        [3, 2, 1, 0],
        [3, 2, 1, 0],
    ]


def test_what_is_listed_is_asked_for_and_no_more() -> None:
    prefetch_order, frames, log = _prefetch_order([5] * 6, [0, 0, 0, 3, 2, 4])
    assert _read_backward(prefetch_order, frames, log) == [
        [5, 4],
        [5, 4, 3, 2],
        [5, 4, 3, 2],
        [5, 4, 3, 2, 1, 0],
        [5, 4, 3, 2, 1, 0],
        [5, 4, 3, 2, 1, 0],
    ]


def test_a_tape_without_a_list_for_them_brings_frames_back_one_by_one() -> None:
    prefetch_order, frames, log = _prefetch_order([5] * 3, [])
    prefetch_order.prefetch([1, 0])
    assert log == [1, 0]
    assert _read_backward(prefetch_order, frames, log) == [[1, 0, 2]] * 3


def test_prefetches_are_told_once_by_number() -> None:
    mover, told = _Mover(), list[int]()
    prefetch_order = PrefetchOrder(mover, lowest_prefetched=[0, 0, 1], on_prefetch=told.append)
    frames = [_Frame(name, 5) for name in range(3)]
    for number, frame in enumerate(frames):
        prefetch_order.record(frame, number)
    for frame in (*reversed(frames), frames[0]):
        prefetch_order.on_backward(frame)
    assert told == [2, 1, 0]


def test_a_frame_without_a_number_comes_for_itself_alone() -> None:
    prefetch_order, frames, log = _prefetch_order([5] * 2)
    norm = _Frame(7, 5)
    prefetch_order.record(norm)
    prefetch_order.on_backward(norm)
    assert log == [7]
    prefetch_order.on_backward(frames[1])
    assert log == [7, 1, 0]


def test_frames_that_never_ran_leave_their_prefetches_to_the_next() -> None:
    mover = _Mover()
    prefetch_order = PrefetchOrder(mover, lowest_prefetched=[0, 0, 0, 1, 3])
    frames = [_Frame(name, 5) for name in range(3)]
    for number, frame in enumerate(frames):
        prefetch_order.record(frame, number)
    prefetch_order.on_backward(frames[2])
    assert mover.log == [2, 1, 0]


def test_a_jump_prefetches_only_what_is_listed_with_its_goal() -> None:
    prefetch_order, frames, log = _prefetch_order([5] * 6)
    prefetch_order.on_backward(frames[5])
    prefetch_order.on_backward(frames[1])
    assert log == [5, 4, 1, 0]


def test_a_jump_back_up_goes_on_from_there() -> None:
    prefetch_order, frames, log = _prefetch_order([5] * 6)
    prefetch_order.on_backward(frames[1])
    prefetch_order.on_backward(frames[0])
    prefetch_order.on_backward(frames[5])
    assert log == [1, 0, 5, 4]


def test_the_last_frame_can_be_started_before_backward() -> None:
    prefetch_order, frames, log = _prefetch_order([5] * 3)
    prefetch_order.start_backward(2)
    assert log == [2, 1]
    prefetch_order.on_backward(frames[2])
    assert log == [2, 1]
    prefetch_order.on_backward(frames[1])
    assert log == [2, 1, 0]
    _prefetch_order([])[0].start_backward(3)


def test_a_frame_is_recorded_once_and_before_its_use() -> None:
    prefetch_order, frames, _ = _prefetch_order([5])
    with pytest.raises(AssertionError, match="recorded once"):
        prefetch_order.record(frames[0])
    with pytest.raises(AssertionError, match="after it was recorded"):
        prefetch_order.on_backward(_Frame(1, 5))


def test_the_tape_keeps_no_frame_alive() -> None:
    prefetch_order, frames, log = _prefetch_order([5] * 3)
    first, second, third = frames
    dropped = weakref.ref(second)
    frames.clear()
    gc.disable()
    try:
        del second
        assert dropped() is None
    finally:
        gc.enable()
    prefetch_order.on_backward(third)
    assert log == [2]
    prefetch_order.on_backward(first)
    assert log == [2, 0]


def test_reads_run_ahead_of_prefetches_as_far_as_there_is_room() -> None:
    mover = _Mover()
    prefetch_order = PrefetchOrder(mover, lowest_prefetched=asked_within([5] * 12, 10))
    frames = [_Frame(name, 5) for name in range(12)]
    for number, frame in enumerate(frames):
        prefetch_order.record(frame, number)
    mover.offload_holder = 3
    prefetch_order.on_backward(frames[11])
    assert (mover.log, mover.read) == ([11, 10, 9], [8, 7, 6])
    prefetch_order.on_backward(frames[10])
    assert mover.read == [8, 7, 6], "no room"
    mover.offload_holder = 2
    prefetch_order.on_backward(frames[9])
    assert (mover.log[-1], mover.read) == (7, [8, 7, 6, 5, 4])
    mover.offload_holder = 9
    prefetch_order.on_backward(frames[3])  # a jump
    assert (mover.log[-3:], mover.read[5:]) == ([3, 2, 1], [0])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.data())
def test_any_list_is_followed(sizes: list[int], data: st.DataObject) -> None:
    asked = [data.draw(st.integers(0, number)) for number in range(len(sizes))]
    prefetch_order, frames, log = _prefetch_order(sizes, asked)
    expected: list[int] = []
    for number in _down(len(sizes)):
        prefetch_order.on_backward(frames[number])
        expected += [one for one in _down(number + 1) if one >= asked[number]]
        expected = list(dict.fromkeys(one for one in expected if sizes[one]))
        assert log == expected


def _down(count: int) -> Iterator[int]:
    return iter(range(count - 1, -1, -1))
