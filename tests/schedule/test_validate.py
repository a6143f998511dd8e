"""The validator: takes what can run, finds every corruption of it, and shows where."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.generate import Size, generate
from sppo_hf.schedule.lower import add_transfers, lower
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.validate import validate
from tests.schedule.order_oracle import can_run
from tests.schedule.sizes import SOME
from tests.sweeps import examples

Lists = list[list[Action]]


def _all(stage: int, unit: int) -> bool:
    return True


PLAIN = [generate(*case) for case in SOME]
LOWERED = [lower(schedule, offloaded=lambda stage, unit: unit % 2 == 0) for schedule in PLAIN]
ALL = [*PLAIN, *LOWERED]


def is_valid(schedule: Schedule) -> bool:
    try:
        validate(schedule)
    except ScheduleError:
        return False
    return True


def remade(schedule: Schedule, lists: Lists) -> Schedule:
    return Schedule(tuple(map(tuple, lists)), schedule.chunks)


def fault_of(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as caught:
        validate(schedule)
    return str(caught.value)


@pytest.mark.parametrize("schedule", ALL, ids=range(len(ALL)))
def test_oracle_and_validator_take_what_is_valid(schedule: Schedule) -> None:
    assert can_run(schedule)
    validate(schedule)


@examples(100, whole=300)
@given(st.sampled_from(ALL), st.data())
def test_a_missing_action_is_found(schedule: Schedule, data: st.DataObject) -> None:
    lists = [list(rank) for rank in schedule.ranks]
    rank = data.draw(st.sampled_from(lists))
    rank.pop(data.draw(st.integers(0, len(rank) - 1)))
    assert not is_valid(remade(schedule, lists))


UNEVEN = generate("seq1f1b", Size.uneven(3, (3, 1, 2)))
MORE = [
    lower(generate("seq1f1b", Size(2, 2, 4)), offloaded=_all, stored=_all, reduce=True),
    lower(generate("interleaved_seq1f1b", Size(2, 1, 4, 2)), offloaded=_all, reduce=True),
    lower(generate("zb_seq1f1b", Size(3, 1, 4)), reduce=True),
    add_transfers(generate("seq1f1b", Size(3, 2, 2)).keep(lambda action: action.kind == "F")),
    lower(UNEVEN, offloaded=_all, reduce=True),
]
"""Schedules with disk, several stages a rank, reductions, uneven micro-batches; an evaluation."""


@pytest.mark.parametrize("schedule", MORE, ids=range(len(MORE)))
def test_valid_schedules_with_all_that_goes_beside_compute(schedule: Schedule) -> None:
    validate(schedule)


@examples(33, whole=100)
@given(st.sampled_from(ALL), st.data())
def test_an_action_that_is_there_twice_is_found(schedule: Schedule, data: st.DataObject) -> None:
    lists = [list(rank) for rank in schedule.ranks]
    action = data.draw(st.sampled_from([a for rank in lists for a in rank]))
    target = data.draw(st.sampled_from(lists))
    target.insert(data.draw(st.integers(0, len(target))), action)
    message = fault_of(remade(schedule, lists))
    assert f"{action} " in message
    assert "is there twice" in message


@examples(100, whole=300)
@given(st.sampled_from(ALL), st.data())
def test_two_actions_in_each_others_place_are_found_where_it_matters(
    schedule: Schedule, data: st.DataObject
) -> None:
    lists = [list(rank) for rank in schedule.ranks]
    rank = data.draw(st.sampled_from(lists))
    first, second = (data.draw(st.integers(0, len(rank) - 1)) for _ in range(2))
    rank[first], rank[second] = rank[second], rank[first]
    changed = remade(schedule, lists)
    assert is_valid(changed) == can_run(changed)


@examples(66, whole=200)
@given(st.sampled_from(PLAIN), st.randoms(use_true_random=False))
def test_any_order_is_judged_as_by_the_oracle(schedule: Schedule, random) -> None:
    lists = [list(rank) for rank in schedule.ranks]
    for rank in lists:
        # Moves some actions a little, so that many orders are right on each rank by itself.
        for _ in range(random.randint(0, 3)):
            at = random.randrange(len(rank))
            rank.insert(max(0, at + random.randint(-4, 4)), rank.pop(at))
    changed = remade(schedule, lists)
    assert is_valid(changed) == can_run(changed)


@examples(33, whole=100)
@given(st.sampled_from(ALL), st.data())
def test_an_action_of_another_unit_stage_or_kind_is_found(
    schedule: Schedule, data: st.DataObject
) -> None:
    lists = [list(rank) for rank in schedule.ranks]
    rank = data.draw(st.sampled_from(lists))
    step = data.draw(st.integers(0, len(rank) - 1))
    old = rank[step]
    new = data.draw(
        st.sampled_from(
            [
                old._replace(unit=old.unit + 1),
                old._replace(stage=old.stage + 1),
                old._replace(layer=0),
                old._replace(kind="W" if old.kind == "F" else "F"),
                old._replace(kind="K"),
            ]
        )
    )
    rank[step] = new
    assert not is_valid(remade(schedule, lists))


def test_sequences_run_back_last_chunk_first() -> None:
    schedule = generate("seq1f1b", Size(2, 1, 3))
    swapped = Schedule.parse(str(schedule).replace("1B2", "1B9").replace("1B1", "1B2"))
    message = fault_of(Schedule.parse(str(swapped).replace("1B9", "1B1")))
    assert message.startswith(
        "Rank 1, step 3: 1B1 (backward) needs 1B2, which completes the gradients of its keys and "
        "values (chunks run in reverse); that is at rank 1, step 4. Allowed: 1B2 earlier on its "
        "rank.\n"
    )
    assert "\n3     0B2     [1B1]   <-- here\n" in message


def test_deadlocks_show_where_every_rank_stands() -> None:
    # Each rank's own order is right; together they wait for each other.
    schedule = Schedule.parse(
        "chunks 1\nstep  rank 0  rank 1\n0  0F0  1F0\n1  0B0  1F1\n2  0F1  1B0\n3  0B1  1B1\n"
    )
    message = fault_of(schedule)
    assert message == (
        "2 actions wait for each other, a deadlock:\n"
        "  rank 0, step 1: 0B0 waits for 1B0, rank 1, step 2\n"
        "  rank 1, step 1: 1F1 waits for 0F1, rank 0, step 2\n"
        "Allowed: an order in which each action waits for earlier ones only.\n"
        "step  rank 0  rank 1\n"
        "0     0F0     1F0\n"
        "1     [0B0]   [1F1]   <-- here\n"
        "2     0F1     1B0\n"
        "3     0B1     1B1\n"
    )


def test_the_papers_groups_deadlock_where_chunks_do_not_divide_ranks() -> None:
    # Groups of P = 2 chunks over two stages per rank, three chunks a micro-batch: the backward of
    # the first group would begin within the micro-batch.
    order = "0F0 0F1 2F0 2F1 0F2 2F2 2B2 2B1 0B2 0B1 2B0 0B0".split()
    right = Schedule((tuple(map(Action.parse, order)), _other_rank(order)), 3)
    validate(right)
    wrong = "0F0 0F1 2F0 2F1 2B1 2B0 0F2 2F2 2B2 0B1 0B0 0B2".split()
    message = fault_of(Schedule((tuple(map(Action.parse, wrong)), _other_rank(wrong)), 3))
    assert "2B1 (backward) needs 2B2" in message


def _other_rank(order: list[str]) -> tuple[Action, ...]:
    actions = map(Action.parse, order)
    return tuple(action._replace(stage=action.stage + 1) for action in actions)


def one_rank(text: str, num_chunks: int = 1) -> Schedule:
    return Schedule((tuple(map(Action.parse, text.split())),), num_chunks)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (one_rank("0B0 0F0"), "Rank 0, step 0: 0B0 (backward) needs 0F0, its forward; that is at"),
        (one_rank("0F0 0W0 0I0"), "0W0 (weight gradient) needs 0I0, its input gradient"),
        (one_rank("0F0 0I0 0B0 0W0"), "0B0 (backward) comes beside another backward"),
        (one_rank("0F0 0I0"), "Unit 0 of stage 0 has F and I (rank 0, 2 steps). Allowed: F and B"),
        (one_rank("0F0 0B0 0F1"), "Unit 1 of stage 0 has F "),
        (one_rank("0F0 0B0", 2), "so that there are 1 units. Allowed: 2, so that 1 micro-batches"),
        (one_rank("0D0 0F0 0H0 0B0"), "0D0 (device to host) needs 0F0, what it copies"),
        (one_rank("0F0 0D0 0B0 0H0"), "0B0 (backward) needs 0H0, its saved activations"),
        (one_rank("0F0 0B0 0D0 0H0"), "0B0 (backward) needs 0H0, its saved activations"),
        (one_rank("0F0 0F1 0B0 0REDUCE_GRAD0 0B1"), "(reduce gradients) comes before 0B1, whose"),
        (one_rank("0F0 0B0 0F1 0B1 0REDUCE_GRAD0 0REDUCE_GRAD1"), "is the second of its stage"),
        (one_rank("0F0 0REDUCE_GRAD0"), "comes before any backward"),
        (one_rank("0F0 0S0 0B0"), "0S0 (store) needs 0D0, what it copies; that is nowhere"),
        (one_rank("0F0 0D0 0S0 0H0 0L0 0B0"), "needs 0L0, what it copies; that is at"),
        (one_rank("0F0 0K0 0B0"), "0K0 (K/V in) is beside no unit"),
        (one_rank("0F0 0K0#0 0B0"), "0K0#0 (K/V in) is on the wrong side of its unit"),
        (one_rank("0O0#1 0F0 0B0"), "0O0#1 (K/V out) is on the wrong side of its unit"),
        (one_rank("0F0 0B0 0L0#1"), "0L0#1 (load) is on the wrong side of its unit"),
        (one_rank("0F0 0D0.1 0B0"), "0D0.1 (device to host) has no place in a schedule over ranks"),
        (one_rank("0F0 0SEND_F0 0B0"), "0SEND_F0 (send activation) has no other end"),
        (one_rank("0F0 1F0 0SEND_F0"), "on the same rank. Allowed: transfers between ranks"),
        (one_rank("0F0 1F0 0B0 1B0"), "0B0 (backward) needs 1B0, its gradient; that is at rank 0"),
        (one_rank("0F0 0B0 2F0 2B0"), "No rank has an action of stage 1"),
    ],
)  # fmt: skip
def test_faults_are_named(schedule: Schedule, said: str) -> None:
    assert said in fault_of(schedule)


def test_messages_are_named() -> None:
    schedule = add_transfers(generate("1f1b", Size(2, 2)))
    unsent = schedule.keep(lambda a: str(a) != "0SEND_F1")
    assert "1RECV_F1 (receive activation) has no match: no rank has 0SEND_F1" in fault_of(unsent)
    unreceived = schedule.keep(lambda a: str(a) != "0RECV_B1")
    assert "0B1 (backward) needs 0RECV_B1, its gradient from rank 1; that is nowhere" in fault_of(
        unreceived
    )
    crossed = add_transfers(generate("gpipe", Size(2, 2)))
    lists = [list(rank) for rank in crossed.ranks]
    first, second = (lists[1].index(Action("RECV_F", 1, unit)) for unit in range(2))
    assert (first, second) == (0, 1)
    lists[1][:2] = lists[1][1::-1]
    message = fault_of(remade(crossed, lists))
    assert "1RECV_F1 (receive activation) is received from rank 0 where that rank sends" in message
    # Both ends of what should have been received there.
    assert "\n0     0F0         [1RECV_F1]  <-- here\n" in message
    assert "\n1     [0SEND_F0]  1RECV_F0    <-- here\n" in message
    assert "in the order of the sends" in message


def test_reductions_are_of_all_stages_or_of_none() -> None:
    schedule = lower(generate("1f1b", Size(2, 2)), reduce=True)
    validate(schedule)
    message = fault_of(schedule.keep(lambda a: str(a) != "0REDUCE_GRAD1"))
    assert message.startswith("The gradients of stage 0 are not reduced, those of stage 1 are")
    assert "[end]" in message


def test_evaluation_needs_no_backward() -> None:
    schedule = generate("seq1f1b", Size(3, 2, 2)).keep(lambda a: a.kind == "F")
    assert validate(schedule) is None
    assert validate(add_transfers(schedule)) is None
    assert "Unit 3 of stage 2 has no action" in fault_of(schedule.keep(lambda a: str(a) != "2F3"))


def test_validation_takes_time_linear_in_the_number_of_actions() -> None:
    seconds: list[float] = []
    for chunks in (48, 192):
        schedule = lower(
            generate("seq1f1b", Size(8, 1, chunks)), offloaded=lambda stage, unit: True, reduce=True
        )
        taken: list[float] = []
        for _ in range(3):
            begin = time.process_time()
            validate(schedule)
            taken.append(time.process_time() - begin)
        seconds.append(min(taken))
    assert seconds[1] < 2.5 * 4 * seconds[0]
