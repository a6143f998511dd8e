"""The tape prefetches the frame in use and those before it within a window of bytes, each once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.offload.tape import Tape


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
    """Notes what the tape asks for; what was asked for has no bytes to fetch any more."""

    def __init__(self) -> None:
        self.log: list[int] = []
        self.read: list[int] = []
        self.room = 0
        self.closed: list[int | None] = []

    def close_frame(self, leave_bytes: int | None = None) -> None:
        self.closed.append(leave_bytes)

    def bytes_to_fetch(self, handles: Iterable[_Handle]) -> int:
        return sum(handle.num_bytes for handle in handles if handle.name not in self.log)

    def prefetch(self, handle: _Handle) -> None:
        if handle.name not in self.log and handle.num_bytes:
            self.log.append(handle.name)

    def read_ahead(self, handle: _Handle) -> bool:
        if self.room == 0:
            return False
        self.room -= 1
        self.read.append(handle.name)
        return True


def _tape(sizes: list[int], fetch_bytes: int = 0) -> tuple[Tape, list[_Frame], list[int]]:
    mover = _Mover()
    tape = Tape(mover, leave_bytes=7, fetch_bytes=fetch_bytes)
    frames = [_Frame(name, num_bytes) for name, num_bytes in enumerate(sizes)]
    for frame in frames:
        tape.record(frame)
    assert len(tape) == len(sizes)
    assert mover.closed == [7] * len(sizes)
    return tape, frames, mover.log


def _read_backward(tape: Tape, frames: list[_Frame], log: list[int]) -> list[list[int]]:
    seen: list[list[int]] = []
    for frame in reversed(frames):
        tape.on_backward(frame)
        seen.append(list(log))
        tape.on_backward(frame)
        assert log == seen[-1], "a second call changes nothing"
    return seen


def test_one_ahead_where_no_window_is_given() -> None:
    tape, frames, log = _tape([5] * 4)
    assert _read_backward(tape, frames, log) == [[3, 2], [3, 2, 1], [3, 2, 1, 0], [3, 2, 1, 0]]


@pytest.mark.parametrize(
    ("fetch_bytes", "expected"),
    [(9, [3, 2]), (10, [3, 2, 1]), (14, [3, 2, 1]), (15, [3, 2, 1, 0]), (99, [3, 2, 1, 0])],
)
def test_as_many_ahead_as_the_window_holds(fetch_bytes: int, expected: list[int]) -> None:
    tape, frames, log = _tape([5] * 4, fetch_bytes)
    tape.on_backward(frames[3])
    assert log == expected


def test_the_next_frame_is_fetched_though_it_is_larger_than_the_window() -> None:
    tape, frames, log = _tape([5, 50, 5], fetch_bytes=10)
    tape.on_backward(frames[2])
    assert log == [2, 1]
    assert tape.ahead_bytes == 50


def test_frames_without_bytes_are_passed_over() -> None:
    tape, frames, log = _tape([5, 0, 0, 5, 0, 5])
    assert _read_backward(tape, frames, log)[:3] == [[5, 3], [5, 3], [5, 3, 0]]


def test_a_jump_prefetches_only_around_its_goal() -> None:
    tape, frames, log = _tape([5] * 6)
    tape.on_backward(frames[5])
    tape.on_backward(frames[1])
    assert log == [5, 4, 1]  # what was fetched for nothing still counts as ahead
    del frames[4]
    gc.collect()
    tape.on_backward(frames[1])
    assert log == [5, 4, 1, 0]


def test_a_jump_forward_goes_on_from_there() -> None:
    tape, frames, log = _tape([5] * 6)
    tape.on_backward(frames[1])
    tape.on_backward(frames[0])
    tape.on_backward(frames[5])
    assert log == [1, 0, 5, 4]


def test_the_last_frame_can_be_started_before_backward() -> None:
    tape, frames, log = _tape([5] * 2)
    tape.start_backward()
    assert log == [1]
    tape.on_backward(frames[1])
    assert log == [1, 0]
    _tape([])[0].start_backward()


def test_a_frame_is_recorded_once_and_before_its_use() -> None:
    tape, frames, _ = _tape([5])
    with pytest.raises(AssertionError, match="closes once"):
        tape.record(frames[0])
    with pytest.raises(AssertionError, match="after it has closed"):
        tape.on_backward(_Frame(1, 5))


def test_the_tape_keeps_no_frame_alive() -> None:
    tape, frames, log = _tape([5] * 3)
    first, second, third = frames
    dropped = weakref.ref(second)
    frames.clear()
    gc.disable()
    try:
        del second
        assert dropped() is None
    finally:
        gc.enable()
    tape.on_backward(third)
    assert log == [2, 0]
    assert tape.ahead_bytes == 5
    del first
    assert tape.ahead_bytes == 0


def test_reads_run_ahead_of_prefetches_as_far_as_there_is_room() -> None:
    mover = _Mover()
    tape = Tape(mover, fetch_bytes=10, reads_ahead=True)
    frames = [_Frame(name, 5) for name in range(12)]
    for frame in frames:
        tape.record(frame)
    mover.room = 3
    tape.on_backward(frames[11])
    assert (mover.log, mover.read) == ([11, 10, 9], [8, 7, 6])
    tape.on_backward(frames[10])
    assert mover.read == [8, 7, 6], "no room"
    mover.room = 2
    tape.on_backward(frames[9])
    assert (mover.log[-1], mover.read) == (7, [8, 7, 6, 5, 4])
    mover.room = 9
    tape.on_backward(frames[3])  # a jump, with a full window
    assert (mover.log[-1], mover.read[5:]) == (3, [2, 1, 0])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(0, 30))
def test_the_window_is_kept_and_the_next_frame_is_always_there(
    sizes: list[int], fetch_bytes: int
) -> None:
    tape, frames, log = _tape(sizes, fetch_bytes)
    for index in reversed(range(len(sizes))):
        tape.on_backward(frames[index])
        with_bytes = [one for one in reversed(range(len(sizes))) if sizes[one]]
        assert log == with_bytes[: len(log)], "in the order of need, each once"
        ahead = [one for one in log if one < index]
        assert tape.ahead_bytes == sum(sizes[one] for one in ahead)
        left = [one for one in with_bytes if one < index]
        assert ahead[:1] == left[:1]
        assert len(ahead) <= 1 or tape.ahead_bytes <= fetch_bytes
        # And no smaller than it may be: the frame after the last one would not fit.
        if len(ahead) < len(left):
            assert tape.ahead_bytes + sizes[left[len(ahead)]] > fetch_bytes
