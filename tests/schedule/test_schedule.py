"""The Schedule value: sizes, ranks of stages, micro-batches and chunks of units."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import KIND_NAMES, Action
from sppo_hf.schedule.generate import Size, generate
from sppo_hf.schedule.schedule import Schedule, show_marked
from sppo_hf.schedule.simulate import fixed_seconds, simulate_pipeline
from sppo_hf.schedule.timeline import over_time


def ranks(*texts: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(map(Action.parse, text.split())) for text in texts)


def test_sizes_are_those_asked_for() -> None:
    schedule = generate("interleaved_seq1f1b", Size(3, 4, 2, 2))
    assert (schedule.num_ranks, schedule.num_stages) == (3, 6)
    assert (schedule.num_units, schedule.num_micro_batches, schedule.num_chunks) == (8, 4, 2)
    assert schedule.stage_ranks == (0, 1, 2, 0, 1, 2)
    action = Action("F", 1, 5)
    assert (schedule.micro_batch(action), schedule.chunk(action)) == (2, 1)


def test_a_schedule_is_a_value() -> None:
    first, second = generate("gpipe", Size(2, 2)), generate("gpipe", Size(2, 2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != Schedule(first.ranks, 2)


def test_texts_and_keep() -> None:
    schedule = Schedule(ranks("0F0 0SEND_F0", "1RECV_F0 1F0"))
    assert schedule.texts() == [["0F0", "0SEND_F0"], ["1RECV_F0", "1F0"]]
    assert schedule.keep(lambda action: action.kind == "F").texts() == [["0F0"], ["1F0"]]


def test_an_empty_schedule() -> None:
    schedule = Schedule(())
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_units) == (0, 0, 0)
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (("0F0 1F0", "2F0 1B0"), "1B0 is step 1 of rank 1, but stage 1 is on rank 0"),
        (("0F0", "2F0"), "No rank has an action of stage 1, but there is a stage 2"),
    ],
)
def test_stages_belong_to_one_rank(texts: tuple[str, ...], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        _ = Schedule(ranks(*texts)).stage_ranks


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
