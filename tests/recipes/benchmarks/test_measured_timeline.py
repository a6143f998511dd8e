"""Measured steps: as timelines, as durations, and what they differ from a simulation by.

Steps are made up: simulated, and then noted down as ranks would have done.
"""

from collections.abc import Callable

import pytest

from recipes.benchmarks.pipeline_timeline import (
    compared_trace,
    explain,
    mean_seconds,
    measured_timeline,
)
from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import COMPUTE_KINDS, Action
from sppo_hf.schedule.generate import GENERATORS, Size, generate
from sppo_hf.schedule.lower import lower
from sppo_hf.schedule.measured_timeline import ActionRecord
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import bubble_fraction, fixed_seconds, simulate_pipeline
from sppo_hf.schedule.timeline import Timeline

CLOCK = 1000.0
"""Time of the host's clock when the step begins."""

SIZE = Size(2, 4, 3)


def noted(
    schedule: Schedule, timeline: Timeline, *, host: Callable[[Action], float] = lambda action: 0.0
) -> list[list[ActionRecord]]:
    """Make the records of ranks that ran as on the timeline.

    Args:
        schedule: with sends and receives.
        timeline: its simulation; a unit's span includes what `host` says of it.
        host: seconds that a rank was busy with something else before a unit.
    """
    ranks: list[list[ActionRecord]] = []
    for actions in schedule.ranks:
        now = CLOCK
        done: list[ActionRecord] = []
        for action in actions:
            if action.kind not in COMPUTE_KINDS:
                done.append(ActionRecord(action, now, now, now))
                continue
            span = timeline.span(action)
            busy = host(action)
            begin, end = CLOCK + span.start_seconds + busy, CLOCK + span.end_seconds
            done.append(ActionRecord(action, now + busy, end, begin))
            now = end
        ranks.append(done)
    return ranks


def made(name: str = "seq1f1b", size: Size = SIZE) -> Schedule:
    return lower(generate(name, size))


def by_chunk(schedule: Schedule) -> Callable[[Action], float]:
    """Seconds that differ by kind, stage and chunk, and not by micro-batch."""
    plain = fixed_seconds(1, 2)
    return lambda a: plain(a) * (1 + schedule.chunk(a) + 0.25 * a.stage)


@pytest.mark.parametrize("name", GENERATORS)
def test_what_went_as_simulated_is_the_simulation(name: str) -> None:
    schedule = made(name, Size(2, 4, 3, 2 if name.startswith("inter") else 1))
    seconds = by_chunk(schedule)
    simulated = simulate_pipeline(schedule, seconds=seconds)
    executed = noted(schedule, simulated)
    measured = measured_timeline(schedule, executed)
    assert measured.resources == ("0.compute", "1.compute")
    for resource in measured.resources:
        for mine, other in zip(measured.spans(resource), simulated.spans(resource), strict=True):
            assert mine.action == other.action
            assert mine[2:4] == pytest.approx(other[2:4])
    assert bubble_fraction(measured) == pytest.approx(bubble_fraction(simulated))
    mean = mean_seconds(schedule, executed)
    for rank in schedule.ranks:
        for action in rank:
            assert mean(action) == pytest.approx(seconds(action))
    found = explain(schedule, executed)
    assert found.measured_seconds == pytest.approx(found.simulated_seconds)
    assert found[2:] == pytest.approx((0, 0, 0), abs=1e-9)


def test_stalls_say_what_was_waited_for() -> None:
    schedule = made(size=Size(2, 1, 2))
    executed = noted(schedule, simulate_pipeline(schedule, seconds=fixed_seconds(1, 2)))
    (stall,) = measured_timeline(schedule, executed).stalls("1.compute")
    assert (str(stall.action), str(stall.waited_for)) == ("1F0", "0F0")
    assert stall.seconds == pytest.approx(1)


def test_means_are_over_micro_batches() -> None:
    schedule = made(size=Size(1, 2, 1))
    seconds = {"0F0": 1.0, "0F1": 3.0, "0B0": 5.0, "0B1": 6.0}
    timeline = simulate_pipeline(schedule, seconds=lambda action: seconds[str(action)])
    mean = mean_seconds(schedule, noted(schedule, timeline))
    assert mean(Action("F", 0, 1)) == pytest.approx(2.0)
    assert mean(Action("B", 0, 0)) == pytest.approx(5.5)
    assert mean(Action("W", 0, 0)) == 0.0


def test_late_messages_are_told_apart() -> None:
    schedule = made()
    slow = simulate_pipeline(schedule, seconds=fixed_seconds(1, 2, send=0.25))
    fast = simulate_pipeline(schedule, seconds=fixed_seconds(1, 2))
    found = explain(schedule, noted(schedule, slow))
    assert found.simulated_seconds == pytest.approx(fast.end_seconds)
    late = slow.end_seconds - fast.end_seconds
    assert late > 0.2
    assert found[2:] == pytest.approx((0, 0, late))


def test_the_hosts_time_between_units_is_told_apart() -> None:
    schedule = made()

    def host(action: Action) -> float:
        return 0.25 if action.stage == 1 else 0.0

    plain = fixed_seconds(1, 2)
    busy = simulate_pipeline(
        schedule,
        seconds=lambda a: plain(a) + (host(a) if a.kind in COMPUTE_KINDS else 0.0),
    )
    found = explain(schedule, noted(schedule, busy, host=host))
    fast = simulate_pipeline(schedule, seconds=plain)
    extra = busy.end_seconds - fast.end_seconds
    assert extra >= 0.25 * 24
    assert found.simulated_seconds == pytest.approx(fast.end_seconds)
    assert found[2:] == pytest.approx((0, extra, 0), abs=1e-9)


def test_uneven_units_are_told_apart() -> None:
    schedule = made()
    plain = fixed_seconds(1, 2)
    uneven = simulate_pipeline(
        schedule, seconds=lambda a: plain(a) * (1.5 if schedule.micro_batch(a) % 2 else 0.5)
    )
    found = explain(schedule, noted(schedule, uneven))
    even = simulate_pipeline(schedule, seconds=plain)
    assert found.simulated_seconds == pytest.approx(even.end_seconds)
    extra = uneven.end_seconds - even.end_seconds
    assert abs(extra) > 0.1
    assert found[2:] == pytest.approx((extra, 0, 0), abs=1e-9)


def test_a_rank_that_begins_late_counts_from_the_first() -> None:
    schedule = made(size=Size(2, 1, 1))
    executed = noted(schedule, simulate_pipeline(schedule, seconds=fixed_seconds(1, 2)))
    executed[0] = [ActionRecord(a, b + 0.5, e + 0.5, r + 0.5) for a, b, e, r, _ in executed[0]]
    executed[0][0] = executed[0][0]._replace(start_seconds=CLOCK + 0.5)
    measured = measured_timeline(schedule, executed)
    # Rank 1 was there first, and waited.
    assert measured.span(Action("F", 0, 0)).start_seconds == pytest.approx(0.5)


@pytest.mark.parametrize("change", ["swap", "less", "more", "ranks"])
def test_another_order_is_refused(change: str) -> None:
    schedule = made(size=Size(2, 2, 2))
    executed = noted(schedule, simulate_pipeline(schedule, seconds=fixed_seconds()))
    words = r"rank 1 did .* at step \d+, where the schedule lists"
    if change == "swap":
        executed[1][2], executed[1][3] = executed[1][3], executed[1][2]
    elif change == "less":
        executed[1].pop()
        words = "rank 1 did nothing at step"
    elif change == "more":
        executed[1].append(executed[1][0])
        words = "the schedule lists nothing"
    else:
        executed.append([])
        words = "3 ranks were measured, but the schedule has 2"
    with pytest.raises(ScheduleError, match=words):
        measured_timeline(schedule, executed)


def test_a_trace_of_both_keeps_them_apart() -> None:
    schedule = made(size=Size(2, 1, 1))
    timeline = simulate_pipeline(schedule, seconds=fixed_seconds())
    slower = simulate_pipeline(schedule, seconds=fixed_seconds(2, 4))
    events = compared_trace({"measured": slower, "simulated": timeline})["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert names == {
        "rank 0, measured": 0,
        "rank 0, simulated": 1,
        "rank 1, measured": 2,
        "rank 1, simulated": 3,
    }
    lengths = {e["pid"]: e["dur"] for e in events if e["name"] in ("0F0", "1F0")}
    assert lengths == {0: 2e6, 1: 1e6, 2: 2e6, 3: 1e6}
