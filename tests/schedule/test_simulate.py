"""The simulator: equal to a plain reference, bounded by lanes and paths, loud when stuck."""

from collections.abc import Callable, Iterable
from graphlib import CycleError, TopologicalSorter
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.simulate import Change
from tests.schedule.random_schedules import RandomSchedule, relaxed, schedules
from tests.schedule.simulated import simulate
from tests.sweeps import examples

Needs = dict[str, str]


def lane(texts: str) -> list[Action]:
    return [Action.parse(text) for text in texts.split()]


def after(needs: Needs) -> Callable[[Action], Iterable[Action]]:
    return lambda action: lane(needs.get(str(action), ""))


@examples(20, whole=40)
@given(schedules())
def test_equals_the_reference(schedule: RandomSchedule) -> None:
    timeline = schedule.simulate()
    times = relaxed(schedule)
    assert len(timeline) == len(times)
    for action, (start, end) in times.items():
        span = timeline.span(action)
        assert (span.start_seconds, span.end_seconds) == (start, end)
        assert action in schedule.lanes[span.lane]
        ready = max((times[other][1] for other in schedule.after[action]), default=0.0)
        assert span.ready_seconds == ready
    assert timeline.end_seconds == max((end for _, end in times.values()), default=0.0)


@examples(20, whole=40)
@given(schedules())
def test_no_shorter_than_the_busiest_lane_and_the_longest_path(schedule: RandomSchedule) -> None:
    timeline = schedule.simulate()
    busiest = max(sum(schedule.seconds[a] for a in held) for held in schedule.lanes.values())
    path: dict[Action, float] = {}
    graph = {action: schedule.after[action] for action in schedule.seconds}
    for action in TopologicalSorter(graph).static_order():
        before = max((path[other] for other in graph[action]), default=0.0)
        path[action] = before + schedule.seconds[action]
    longest = max(path.values(), default=0.0)
    assert timeline.end_seconds >= max(busiest, longest) - 1e-9
    assert timeline.end_seconds <= sum(schedule.seconds.values()) + 1e-9


@examples(20, whole=40)
@given(schedules(), st.data())
def test_a_slower_action_makes_nothing_earlier(
    schedule: RandomSchedule, data: st.DataObject
) -> None:
    if not schedule.seconds:
        return
    before = schedule.simulate()
    slow = data.draw(st.sampled_from(list(schedule.seconds)))
    schedule.seconds[slow] += 0.7
    for earlier, later in zip(before.spans(), schedule.simulate().spans(), strict=True):
        assert later.start_seconds >= earlier.start_seconds
        assert later.end_seconds >= earlier.end_seconds


@examples(20, whole=40)
@given(schedules(cyclic=True))
def test_stops_exactly_where_there_is_a_cycle(schedule: RandomSchedule) -> None:
    graph = {action: schedule.needs(action) for action in schedule.seconds}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        with pytest.raises(ScheduleError, match="never end") as caught:
            schedule.simulate()
        assert all(name in str(caught.value) for name in schedule.lanes)
    else:
        assert len(schedule.simulate()) == len(schedule.seconds)


def test_lanes_that_wait_for_each_other_are_shown() -> None:
    lanes = {
        "compute": lane("0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0 0F9"),
        "h2d": lane("0H1 0H3"),
        "d2h": lane("0D0"),
    }
    needs = {"0B3": "0H3", "0H1": "0B2", "0D0": "0F0"}
    with pytest.raises(ScheduleError) as caught:
        simulate(lanes, seconds=lambda _: 1.0, after=after(needs))
    assert str(caught.value) == (
        "2 of 3 lanes never end; each stops where brackets are:\n"
        "  compute  ... 0F1 0F2 0F3 [0B3] 0B2 0B1 0B0 ...  waits for 0H3, step 1 of 'h2d'\n"
        "  h2d      [0H1] 0H3  waits for 0B2, step 5 of 'compute'\n"
        "  d2h      done: actions 1\n"
        "An action may wait only for one that is on a lane and can run without it."
    )


def test_an_action_may_not_wait_for_a_later_one_of_its_lane() -> None:
    with pytest.raises(ScheduleError, match=r"\[0F0\] 0F1  waits for 0F1, step 1 of 'compute'"):
        simulate({"compute": lane("0F0 0F1")}, seconds=lambda _: 1.0, after=after({"0F0": "0F1"}))


@pytest.mark.parametrize(
    ("lanes", "where"),
    [
        ({"a": "0F0 0F1 0F0"}, "0F0 .* step 0 of 'a' and step 2 of 'a'"),
        ({"a": "0F0 0F1", "b": "0F1"}, "0F1 .* step 1 of 'a' and step 0 of 'b'"),
    ],
)
def test_an_action_may_be_on_the_lanes_once(lanes: dict[str, str], where: str) -> None:
    with pytest.raises(ScheduleError, match=where):
        simulate(
            {name: lane(texts) for name, texts in lanes.items()},
            seconds=lambda _: 1.0,
            after=after({}),
        )


@pytest.mark.parametrize("bad", [-1e-9, nan, inf, -inf])
def test_durations_are_checked(bad: float) -> None:
    with pytest.raises(ScheduleError, match=f"0F1 takes {bad} seconds"):
        simulate(
            {"compute": lane("0F0 0F1")},
            seconds=lambda action: bad if action.unit else 1.0,
            after=after({}),
        )


def test_a_moment_that_is_neither_start_nor_end_is_refused() -> None:
    wrong = Change("device", "frames", 1, at="middle")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ScheduleError, match=r"0F0.*'middle'.*'start' or 'end'"):
        simulate(
            {"compute": lane("0F0")},
            seconds=lambda _: 1.0,
            after=after({}),
            changes=lambda _: [wrong],
        )


def test_no_time_at_all() -> None:
    lanes = {"a": lane("0F0 0F1"), "b": lane("0D0"), "c": []}
    timeline = simulate(lanes, seconds=lambda _: 0.0, after=after({"0D0": "0F1"}))
    assert timeline.end_seconds == 0.0
    assert timeline.stalls() == []
    assert simulate({}, seconds=lambda _: 0.0, after=after({})).end_seconds == 0.0


def test_ranks_are_lanes() -> None:
    # Two stages, two units, F = 1 s and B = 2 s: 3 units of 3 s each when one fills the pipeline.
    lanes = {"0.compute": lane("0F0 0F1 0B1 0B0"), "1.compute": lane("1F0 1F1 1B1 1B0")}
    needs = {"1F0": "0F0", "1F1": "0F1", "0B1": "1B1", "0B0": "1B0"}
    timeline = simulate(
        lanes, seconds=lambda action: 1.0 if action.kind == "F" else 2.0, after=after(needs)
    )
    assert timeline.end_seconds == 9.0
    assert timeline.stall_seconds("0.compute") == 3.0
    assert timeline.stall_seconds("1.compute") == 1.0
