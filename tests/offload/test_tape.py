"""The tape prefetches the frame in use and the one before it, each once."""

import gc
import weakref

import pytest

from sppo_hf.offload.tape import Tape


class _Frame:
    def __init__(self, name: int, log: list[int]) -> None:
        self.name = name
        self.log = log

    def prefetch(self) -> None:
        self.log.append(self.name)


def _tape(num_frames: int, frames_ahead: int = 1) -> tuple[Tape, list[_Frame], list[int]]:
    log: list[int] = []
    closed: list[None] = []
    tape = Tape(lambda: closed.append(None), frames_ahead=frames_ahead)
    frames = [_Frame(name, log) for name in range(num_frames)]
    for frame in frames:
        tape.record(frame)
    assert len(closed) == len(tape) == num_frames
    return tape, frames, log


def test_one_ahead() -> None:
    tape, frames, log = _tape(4)
    seen = []
    for frame in reversed(frames):
        tape.on_backward(frame)
        tape.on_backward(frame)
        seen.append(list(log))
    assert seen == [[3, 2], [3, 2, 1], [3, 2, 1, 0], [3, 2, 1, 0]]


@pytest.mark.parametrize(("ahead", "expected"), [(0, [3]), (2, [3, 2, 1]), (9, [3, 2, 1, 0])])
def test_other_distances(ahead: int, expected: list[int]) -> None:
    tape, frames, log = _tape(4, ahead)
    tape.on_backward(frames[3])
    assert log == expected


def test_a_jump_prefetches_only_around_its_goal() -> None:
    tape, frames, log = _tape(6)
    tape.on_backward(frames[5])
    tape.on_backward(frames[1])
    assert log == [5, 4, 1, 0]


def test_the_last_frame_can_be_started_before_backward() -> None:
    tape, frames, log = _tape(2)
    tape.start_backward()
    assert log == [1]
    tape.on_backward(frames[1])
    assert log == [1, 0]
    _tape(0)[0].start_backward()


def test_a_frame_is_recorded_once_and_before_its_use() -> None:
    tape, frames, _ = _tape(1)
    with pytest.raises(AssertionError, match="closes once"):
        tape.record(frames[0])
    with pytest.raises(AssertionError, match="after it has closed"):
        tape.on_backward(_Frame(1, []))


def test_the_tape_keeps_no_frame_alive() -> None:
    tape, frames, log = _tape(3)
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
    tape.on_backward(first)
    assert log == [2, 0]
