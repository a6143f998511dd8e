"""The simulator: equal to a plain reference, bounded by resources and paths, loud when stuck."""

import time
from collections.abc import Callable, Iterable
from graphlib import CycleError, TopologicalSorter
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.generate import Size, generate
from sppo_hf.schedule.lower import add_transfers, lower
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import (
    Change,
    alive_units,
    bubble_fraction,
    fixed_seconds,
    peak_units,
    simulate_pipeline,
)
from sppo_hf.schedule.timeline import Timeline
from tests.schedule.random_schedules import RandomSchedule, relaxed, schedules
from tests.schedule.simulated import simulate
from tests.schedule.sizes import FEW, SOME, Named
from tests.sweeps import examples

Needs = dict[str, str]


def resource(texts: str) -> list[Action]:
    return [Action.parse(text) for text in texts.split()]


def after(needs: Needs) -> Callable[[Action], Iterable[Action]]:
    return lambda action: resource(needs.get(str(action), ""))


@examples(20, whole=40)
@given(schedules())
def test_equals_the_reference(schedule: RandomSchedule) -> None:
    timeline = schedule.simulate()
    times = relaxed(schedule)
    assert len(timeline) == len(times)
    for action, (start, end) in times.items():
        span = timeline.span(action)
        assert (span.start_seconds, span.end_seconds) == (start, end)
        assert action in schedule.resources[span.resource]
        ready = max((times[other][1] for other in schedule.after[action]), default=0.0)
        assert span.ready_seconds == ready
    assert timeline.end_seconds == max((end for _, end in times.values()), default=0.0)


@examples(20, whole=40)
@given(schedules())
def test_no_shorter_than_the_busiest_resource_or_longest_path(
    schedule: RandomSchedule,
) -> None:
    timeline = schedule.simulate()
    busiest = max(sum(schedule.seconds[a] for a in held) for held in schedule.resources.values())
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
        assert all(name in str(caught.value) for name in schedule.resources)
    else:
        assert len(schedule.simulate()) == len(schedule.seconds)


def test_resources_that_wait_for_each_other_are_shown() -> None:
    resources = {
        "compute": resource("0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0 0F9"),
        "h2d": resource("0H1 0H3"),
        "d2h": resource("0D0"),
    }
    needs = {"0B3": "0H3", "0H1": "0B2", "0D0": "0F0"}
    with pytest.raises(ScheduleError) as caught:
        simulate(resources, seconds=lambda _: 1.0, after=after(needs))
    assert str(caught.value) == (
        "2 of 3 resources never end; each stops where brackets are:\n"
        "  compute  ... 0F1 0F2 0F3 [0B3] 0B2 0B1 0B0 ...  waits for 0H3, step 1 of 'h2d'\n"
        "  h2d      [0H1] 0H3  waits for 0B2, step 5 of 'compute'\n"
        "  d2h      done: actions 1\n"
        "An action may wait only for one that is on a resource and can run without it."
    )


def test_an_action_may_not_wait_for_a_later_one_of_its_resource() -> None:
    with pytest.raises(ScheduleError, match=r"\[0F0\] 0F1  waits for 0F1, step 1 of 'compute'"):
        simulate(
            {"compute": resource("0F0 0F1")}, seconds=lambda _: 1.0, after=after({"0F0": "0F1"})
        )


@pytest.mark.parametrize(
    ("resources", "where"),
    [
        ({"a": "0F0 0F1 0F0"}, "0F0 .* step 0 of 'a' and step 2 of 'a'"),
        ({"a": "0F0 0F1", "b": "0F1"}, "0F1 .* step 1 of 'a' and step 0 of 'b'"),
    ],
)
def test_an_action_may_be_on_the_resources_once(resources: dict[str, str], where: str) -> None:
    with pytest.raises(ScheduleError, match=where):
        simulate(
            {name: resource(texts) for name, texts in resources.items()},
            seconds=lambda _: 1.0,
            after=after({}),
        )


@pytest.mark.parametrize("bad", [-1e-9, nan, inf, -inf])
def test_durations_are_checked(bad: float) -> None:
    with pytest.raises(ScheduleError, match=f"0F1 takes {bad} seconds"):
        simulate(
            {"compute": resource("0F0 0F1")},
            seconds=lambda action: bad if action.unit else 1.0,
            after=after({}),
        )


def test_a_moment_that_is_neither_start_nor_end_is_refused() -> None:
    wrong = Change("device", "frames", 1, at="middle")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ScheduleError, match=r"0F0.*'middle'.*'start' or 'end'"):
        simulate(
            {"compute": resource("0F0")},
            seconds=lambda _: 1.0,
            after=after({}),
            changes=lambda _: [wrong],
        )


def test_no_time_at_all() -> None:
    resources = {"a": resource("0F0 0F1"), "b": resource("0D0"), "c": []}
    timeline = simulate(resources, seconds=lambda _: 0.0, after=after({"0D0": "0F1"}))
    assert timeline.end_seconds == 0.0
    assert timeline.stalls("b") == []
    assert simulate({}, seconds=lambda _: 0.0, after=after({})).end_seconds == 0.0


def test_ranks_are_resources() -> None:
    # Two stages, two units, F = 1 s and B = 2 s: 3 units of 3 s each when one fills the pipeline.
    resources = {"0.compute": resource("0F0 0F1 0B1 0B0"), "1.compute": resource("1F0 1F1 1B1 1B0")}
    needs = {"1F0": "0F0", "1F1": "0F1", "0B1": "1B1", "0B0": "1B0"}
    timeline = simulate(
        resources, seconds=lambda action: 1.0 if action.kind == "F" else 2.0, after=after(needs)
    )
    assert timeline.end_seconds == 9.0
    assert timeline.stall_seconds("0.compute") == 3.0
    assert timeline.stall_seconds("1.compute") == 1.0


def start(timeline: Timeline, text: str) -> float:
    return timeline.span(Action.parse(text)).start_seconds


def test_links_that_take_no_time_change_nothing() -> None:
    for name, size in FEW[::5]:
        schedule = generate(name, size)
        plain = simulate_pipeline(schedule, seconds=fixed_seconds(2, 3, weight=1))
        sent = simulate_pipeline(add_transfers(schedule), seconds=fixed_seconds(2, 3, weight=1))
        for rank in range(size.num_ranks):
            resource = f"{rank}.compute"
            assert list(plain.spans(resource)) == [
                span._replace(ready_seconds=plain.span(span.action).ready_seconds)
                for span in sent.spans(resource)
            ]


def test_sends_delay_what_needs_them_and_hide_behind_compute() -> None:
    # Fill: (P - 1) forwards and sends; then, with F = B = 2 and sends of 1, all is hidden but the
    # way back of the last gradient.
    schedule = add_transfers(generate("gpipe", Size(3, 4)))
    timeline = simulate_pipeline(schedule, seconds=fixed_seconds(2, 2, send=1))
    assert [start(timeline, f"{stage}F0") for stage in range(3)] == [0, 3, 6]
    assert start(timeline, "2F3") == 6 + 3 * 2
    assert timeline.end_seconds == 6 + 4 * 2 + 4 * 2 + 2 * (1 + 2)
    assert timeline.span(Action.parse("0SEND_F1")).resource == "0.send 1"
    assert timeline.span(Action.parse("1RECV_F1")).resource == "1.recv 0"
    assert timeline.busy_seconds("0.send 1") == 4


def test_a_slow_link_is_the_bottleneck() -> None:
    schedule = add_transfers(generate("gpipe", Size(2, 4)))
    timeline = simulate_pipeline(schedule, seconds=fixed_seconds(1, 1, send=5))
    # One message after the other, each 5 long.
    assert [start(timeline, f"1F{unit}") for unit in range(4)] == [6, 11, 16, 21]


def test_directions_of_a_link_do_not_wait_for_each_other() -> None:
    schedule = add_transfers(generate("seq1f1b", Size(2, 4, 2)))
    timeline = simulate_pipeline(schedule, seconds=fixed_seconds(1, 1, send=1.5))
    assert any(
        forth.start_seconds < back.end_seconds and back.start_seconds < forth.end_seconds
        for forth in timeline.spans("0.send 1")
        for back in timeline.spans("1.send 0")
    )


def test_a_message_waits_until_its_receiver_is_ready() -> None:
    # Rank 1 lists the receive of unit 1 only behind the forward of unit 0.
    schedule = add_transfers(generate("gpipe", Size(2, 2)), receives_ahead=0)
    timeline = simulate_pipeline(schedule, seconds=fixed_seconds(1, 1, send=1))
    assert start(timeline, "1F0") == 2
    assert start(timeline, "0SEND_F1") == 3
    ahead = simulate_pipeline(
        add_transfers(generate("gpipe", Size(2, 2))), seconds=fixed_seconds(1, 1, send=1)
    )
    assert start(ahead, "0SEND_F1") == 2


def test_copies_run_beside_compute_and_hold_up_the_unit_after_next() -> None:
    schedule = lower(generate("gpipe", Size(1, 1, 4)), offloaded=lambda stage, unit: unit < 3)
    timeline = simulate_pipeline(schedule, seconds=fixed_seconds(1, 1, copy=1.5))
    # D0 from 1 to 2.5, so F1 begins at 1 and F2 only at 2.5; D1 then ends at 4, before F3 may.
    assert [start(timeline, f"0F{unit}") for unit in range(4)] == [0, 1, 2.5, 4]
    assert start(timeline, "0D1") == 2.5
    # D2 ends at 5.5 only, so B3 begins then, and H2 beside it.
    assert [start(timeline, text) for text in ("0D2", "0B3", "0H2", "0B2")] == [4, 5.5, 5.5, 7]


def test_keys_and_values_pass_beside_their_unit_and_hold_up_what_follows() -> None:
    kv_copies = {("K", 0, 1, 0), ("O", 0, 0, 0), ("K", 0, 0, 1), ("O", 0, 1, 1), ("L", 0, 0, 2)}
    schedule = lower(generate("seq1f1b", Size(2, 1, 2)), kv_copies=kv_copies)
    assert list(map(str, schedule.ranks[0][:6])) == "0F0 0SEND_F0 0O0#0 0K1#0 0F1 0SEND_F1".split()
    seconds = {"K": 2.5, "O": 1.5, "L": 3.0}
    fixed = fixed_seconds(1, 1, send=0.25)
    timeline = simulate_pipeline(schedule, seconds=lambda a: seconds.get(a.kind) or fixed(a))
    # Out beside the first forward, until 1.5; in beside the second, which waited for that.
    assert [start(timeline, text) for text in ("0O0#0", "0F1", "0K1#0")] == [0, 1.5, 1.5]
    # What is sent of a unit has seen all its keys.
    assert [start(timeline, text) for text in ("0SEND_F0", "0SEND_F1")] == [1.5, 4]
    # The other rank's two forwards and a backward later, and no earlier though resources are free.
    assert [start(timeline, text) for text in ("0B1", "0O1#1")] == [6.5, 6.5]
    # Sums of the last chunk's backward leave until 8; only then the other one begins, and what is
    # on the disk comes beside it.
    assert [start(timeline, text) for text in ("0L0#2", "0B0", "0K0#1")] == [8, 8, 8]
    assert timeline.end_seconds == 11


def test_the_papers_worked_example_of_offloading() -> None:
    # SPPO's figure: A = (4, 3, 2, 1), alpha = (1/2, 2/3, 1, none): memory 4, 5, 5, 4.
    held, away = (4, 3, 2, 1), (2, 2, 2, 0)
    schedule = lower(generate("gpipe", Size(1, 1, 4)), offloaded=lambda stage, unit: unit < 3)

    def changes(action: Action) -> list[Change]:
        size, part = held[action.unit], away[action.unit]
        return {
            "F": [Change("0.device", "frames", size)],
            "D": [Change("0.device", "frames", -part, "end")],
            "H": [Change("0.device", "frames", part)],
            "B": [Change("0.device", "frames", -size, "end")],
        }[action.kind]

    # A copy takes as long as the next chunk's forward.
    timeline = simulate_pipeline(schedule, seconds=fixed_seconds(1, 2, copy=1), changes=changes)
    curve = dict(timeline.curve("0.device"))
    # Held when a chunk has ended: less what comes at that instant, the next chunk's or, at the
    # turn, what is fetched for backward.
    coming = (*held[1:], away[2])
    assert [curve[float(at)] - new for at, new in enumerate(coming, 1)] == [4, 5, 5, 4]


def test_reductions_run_beside_the_last_backwards() -> None:
    schedule = lower(generate("1f1b", Size(3, 2)), reduce=True)
    timeline = simulate_pipeline(schedule, seconds=fixed_seconds(1, 2, reduce=2))
    plain = simulate_pipeline(generate("1f1b", Size(3, 2)), seconds=fixed_seconds(1, 2))
    # The last stage ends first and reduces while the others still compute; stage 0's is in sight.
    assert start(timeline, "2REDUCE_GRAD1") == plain.span(Action.parse("2B1")).end_seconds
    assert timeline.end_seconds == plain.end_seconds + 2


@pytest.mark.parametrize("case", SOME, ids=str)
def test_alive_units_begin_and_end_with_none(case: Named) -> None:
    schedule = generate(*case)
    for lowered in (schedule, lower(schedule, offloaded=lambda stage, unit: unit % 2 == 0)):
        timeline = simulate_pipeline(lowered, seconds=fixed_seconds(1, 2, copy=0.5, send=0.25))
        for curve in alive_units(lowered, timeline):
            times = [at for at, _ in curve]
            assert times == sorted(set(times))
            assert curve[-1][1] == 0
            assert all(units >= 0 for _, units in curve)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_a_list_says_how_many_units_live_whatever_actions_take(case: Named) -> None:
    schedule = lower(generate(*case))
    plain = simulate_pipeline(schedule, seconds=fixed_seconds())
    for seconds in (fixed_seconds(1, 2), fixed_seconds(5, 1, weight=0.25, send=0.5)):
        timeline = simulate_pipeline(schedule, seconds=seconds)
        assert peak_units(schedule, plain) == peak_units(schedule, timeline)
        for rank, begun in enumerate(schedule.forwards_before_backward):
            kinds = [span.action.kind for span in timeline.spans(f"{rank}.compute")]
            assert set(kinds[:begun]) <= {"F"}
            assert kinds[begun] != "F"


def test_offload_lowers_the_peak() -> None:
    schedule = generate("seq1f1b", Size(4, 2, 16))
    kept = simulate_pipeline(schedule, seconds=fixed_seconds(1, 2))
    assert peak_units(schedule, kept) == [19, 18, 17, 16]
    lowered = lower(schedule, offloaded=lambda stage, unit: True)
    away = simulate_pipeline(lowered, seconds=fixed_seconds(1, 2, copy=0.5))
    assert max(peak_units(lowered, away)) <= 4
    assert away.end_seconds == kept.end_seconds


def test_forwards_alone_hold_one_unit() -> None:
    schedule = generate("gpipe", Size(2, 3)).keep(lambda action: action.kind == "F")
    timeline = simulate_pipeline(schedule, seconds=fixed_seconds(1, 2))
    assert timeline.end_seconds == 4
    assert peak_units(schedule, timeline) == [1, 1]


def test_bubbles() -> None:
    schedule = generate("1f1b", Size(4, 8))
    timeline = simulate_pipeline(schedule, seconds=fixed_seconds(1, 2))
    assert bubble_fraction(timeline) == pytest.approx(3 / 11)
    nothing = simulate_pipeline(schedule, seconds=fixed_seconds(0, 0))
    assert bubble_fraction(nothing) == 0.0


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (("0F0", "1B0"), "1B0 needs an action that no rank has"),
        (("0F1",), "0F1 needs an action that no rank has"),
        (("0F0 0SEND_F0",), r"0SEND_F0 \(send activation\) has no other end: .* stage 1"),
        (("0F0 0F0",), "0F0 is on the resources twice"),
        (("0F1 0F0",), r"\[0F1\] 0F0  waits for 0F0"),
    ],
)
def test_what_cannot_run_is_refused(ranks: tuple[str, ...], said: str) -> None:
    actions = tuple(tuple(map(Action.parse, rank.split())) for rank in ranks)
    with pytest.raises(ScheduleError, match=said):
        simulate_pipeline(Schedule(actions, 2), seconds=fixed_seconds())


def test_ranks_that_wait_for_each_other_are_shown() -> None:
    schedule = Schedule.parse(
        "chunks 1\nstep  rank 0  rank 1\n0  0F0  1F0\n1  0B0  1F1\n2  0F1  1B0\n3  0B1  1B1\n"
    )
    with pytest.raises(ScheduleError, match="2 of 2 resources never end") as caught:
        simulate_pipeline(schedule, seconds=fixed_seconds())
    assert "0F0 [0B0] 0F1 0B1  waits for 1B0, step 2 of '1.compute'" in str(caught.value)
    assert "1F0 [1F1] 1B0 1B1  waits for 0F1, step 2 of '0.compute'" in str(caught.value)


@pytest.mark.slow
def test_speed() -> None:
    # 300,000 actions a second on an idle core. Where others compute too it was 29,000 once; what
    # looks at all actions again for each of them does not come to 2,000.
    schedule = generate("zb_seq1f1b", Size(16, 16, 32))
    count = sum(map(len, schedule.ranks))
    begin = time.process_time()
    simulate_pipeline(schedule, seconds=fixed_seconds())
    assert count / (time.process_time() - begin) > 1e4
