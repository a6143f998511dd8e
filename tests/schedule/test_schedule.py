"""The Schedule value: sizes, ranks of stages, micro-batches and chunks of units."""

import pytest

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.generate import Size, generate
from sppo_hf.schedule.schedule import Schedule


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
