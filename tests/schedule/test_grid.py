"""Text forms: grids parse back, marks are seen, and pictures show what runs when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import KIND_NAMES, Action
from sppo_hf.schedule.generate import Size, generate
from sppo_hf.schedule.schedule import Schedule, over_time, show_marked
from sppo_hf.schedule.simulate import fixed_seconds, simulate_pipeline

small = st.integers(0, 20)
actions = st.builds(
    Action, st.sampled_from(list(KIND_NAMES)), small, small, st.none() | small, st.none() | small
)


@given(st.lists(st.lists(actions, max_size=5), max_size=4), st.integers(1, 9))
def test_parse_undoes_print(ranks: list[list[Action]], num_chunks: int) -> None:
    schedule = Schedule(tuple(map(tuple, ranks)), num_chunks)
    assert Schedule.parse(str(schedule)) == schedule


def test_idle_steps_between_actions_are_forgotten() -> None:
    text = "chunks 1\nstep  rank 0  rank 1\n0     0F0     .\n1     0B0     1F0\n"
    assert Schedule.parse(text).texts() == [["0F0", "0B0"], ["1F0"]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Line 1 .* is ''. Allowed: 'chunks N'"),
        ("chunks 0\nstep\n", "Line 1 .* is 'chunks 0'"),
        ("chunks two\nstep\n", "Line 1 "),
        ("chunks 1\n", "Line 2 .* is ''"),
        ("chunks 1\nstep  rank 1\n", "Line 2 .* is 'step rank 1'"),
        ("chunks 1\nstep  rank 0\n1     0F0\n", "Line 3 .*Allowed: step 0 and 1 cells"),
        ("chunks 1\nstep  rank 0\n0     0F0  0F1\n", "Line 3 .*'0     0F0  0F1'"),
        ("chunks 1\nstep  rank 0\n0     0F0\n\n", "Line 4 "),
        ("chunks 1\nstep  rank 0\n0     0X0\n", "Line 3 .*'0X0' is no action"),
    ],
)
def test_malformed_text_is_named_by_line(text: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        Schedule.parse(text)


def test_marks_are_shown_with_what_is_around_them() -> None:
    shown = show_marked(generate("gpipe", Size(2, 16)), [(1, 3), (0, 30)])
    lines = shown.splitlines()
    assert lines[0] == "step  rank 0  rank 1"
    assert lines[4] == "3     0F3     [1F3]   <-- here"
    # Six steps on each side; the rest is left out.
    assert [line.split()[0] for line in lines[1:]] == [
        *map(str, range(10)),
        "...",
        *map(str, range(24, 32)),
    ]
    assert lines[-2] == "30    [0B14]  1B14    <-- here"


def test_the_end_of_a_rank_can_be_marked() -> None:
    schedule = Schedule.parse(
        "chunks 1\nstep  rank 0  rank 1\n0     0F0     1F0\n1     0F1     .\n"
    )
    assert show_marked(schedule, [(1, 1)]).splitlines()[-1] == "1     0F1     [end]   <-- here"


def test_over_time_shows_begin_length_and_idleness() -> None:
    timeline = simulate_pipeline(generate("1f1b", Size(2, 1)), seconds=fixed_seconds(1, 2))
    assert over_time(timeline, 1.0) == (
        "rank 0  0F0 .   .   .   0B0 =\nrank 1  .   1F0 1B0 =   .   .\n"
    )
    with pytest.raises(ScheduleError, match="slot_seconds is 0"):
        over_time(timeline, 0)
