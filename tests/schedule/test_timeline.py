"""A Timeline's sums: busy and stalled seconds, bytes over time, peaks and their causes."""

from collections import Counter

import pytest
from hypothesis import given

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.simulate import Change
from sppo_hf.schedule.timeline import Peak, Timeline
from tests.schedule.random_schedules import RandomSchedule, schedules
from tests.schedule.simulated import simulate
from tests.sweeps import examples

F0, F1, B1, B0 = (Action.parse(text) for text in ("0F0", "0F1", "0B1", "0B0"))
D0, H0 = (Action.parse(text) for text in ("0D0", "0H0"))


def one_chunk_leaves() -> Timeline:
    """Chunk 0 leaves during chunk 1's forward and is fetched, too late, during its backward.

    compute  F0 F1 B1 .. B0      0-1-2-4, stalls until 5, then until 7
    d2h         D0               stalls until 1, then until 2.5
    h2d            H0            waits for D0: 2.5-5
    """
    seconds = {F0: 1.0, F1: 1.0, B1: 2.0, B0: 2.0, D0: 1.5, H0: 2.5}
    needs = {D0: [F0], H0: [D0], B0: [H0]}
    changes = {
        F0: [Change("device", "frames", 10)],
        F1: [Change("device", "frames", 10)],
        B1: [Change("device", "work", 3), Change("device", "work", -3, "end")],
        D0: [Change("host", "frames", 10), Change("device", "frames", -10, "end")],
        H0: [Change("device", "frames", 10), Change("host", "frames", -10, "end")],
        B0: [Change("device", "frames", -10, "end")],
    }
    changes[B1].append(Change("device", "frames", -10, "end"))
    return simulate(
        {"compute": [F0, F1, B1, B0], "d2h": [D0], "h2d": [H0], "disk write": []},
        seconds=seconds.__getitem__,
        after=lambda action: needs.get(action, []),
        changes=changes.__getitem__,
        standing=[Change("device", "weights", 100)],
    )


def test_busy_and_stalled_seconds() -> None:
    timeline = one_chunk_leaves()
    assert timeline.end_seconds == 7.0
    assert timeline.resources == ("compute", "d2h", "h2d", "disk write")
    busy = [timeline.busy_seconds(resource) for resource in timeline.resources]
    assert busy == [6.0, 1.5, 2.5, 0.0]
    stalled = [timeline.stall_seconds(resource) for resource in timeline.resources]
    assert stalled == [1.0, 1.0, 2.5, 0.0]


def test_stalls_say_what_was_waited_for() -> None:
    timeline = one_chunk_leaves()
    (stall,) = timeline.stalls("compute")
    assert stall == (B0, 1.0, H0, 4.0)
    assert [stall.action for stall in timeline.stalls("h2d", over_seconds=1.0)] == [H0]
    assert timeline.stalls("compute", over_seconds=1.0) == []


def test_spans() -> None:
    timeline = one_chunk_leaves()
    assert timeline.span(B0) == (B0, "compute", 5.0, 7.0, 5.0)
    assert timeline.span(F1).ready_seconds == 0.0
    assert [span.action for span in timeline.spans()] == [F0, F1, B1, B0, D0, H0]
    assert [span.action for span in timeline.spans("d2h")] == [D0]
    assert len(timeline) == 6


def test_curves_and_peaks() -> None:
    timeline = one_chunk_leaves()
    assert timeline.tiers == ("device", "host")
    assert timeline.curve("device") == [
        *((0.0, 110), (1.0, 120), (2.0, 123), (2.5, 123), (4.0, 110), (7.0, 100)),
    ]
    assert timeline.curve("host") == [(0.0, 0), (1.0, 10), (5.0, 0)]
    assert timeline.peak("device") == Peak(123, 2.0)
    assert timeline.peak("host") == Peak(10, 1.0)
    assert timeline.curve("disk") == [(0.0, 0)]
    assert timeline.peak("disk") == Peak(0, 0.0)


def test_what_is_given_back_at_an_instant_comes_first() -> None:
    # Both units need a workspace of 7, the second just when the first gives it back.
    timeline = simulate(
        {"compute": [F0, F1]},
        seconds=lambda _: 0.1,
        after=lambda _: (),
        changes=lambda _: [Change("device", "work", 7), Change("device", "work", -7, "end")],
    )
    assert timeline.peak("device") == Peak(7, 0.0)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    timeline = one_chunk_leaves()
    with pytest.raises(ScheduleError, match=r"no resource 'h2h'.*'compute', 'd2h', 'h2d'"):
        timeline.busy_seconds("h2h")
    with pytest.raises(ScheduleError, match="0B9"):
        timeline.span(Action("B", 0, 9))


@examples(20, whole=40)
@given(schedules())
def test_a_resource_is_busy_stalled_or_done(schedule: RandomSchedule) -> None:
    timeline = schedule.simulate()
    for resource in timeline.resources:
        last = max((span.end_seconds for span in timeline.spans(resource)), default=0.0)
        spent = timeline.busy_seconds(resource) + timeline.stall_seconds(resource)
        assert spent == pytest.approx(last, abs=1e-9)
        for stall in timeline.stalls(resource):
            assert stall.waited_for in schedule.after[stall.action]
            waited_until = timeline.span(stall.waited_for).end_seconds
            assert waited_until == timeline.span(stall.action).start_seconds
            assert stall.start_seconds + stall.seconds == pytest.approx(waited_until)


@examples(20, whole=40)
@given(schedules())
def test_bytes_equal_a_plain_sum_at_every_instant(schedule: RandomSchedule) -> None:
    timeline = schedule.simulate()
    for tier in ("device", "host"):
        curve = timeline.curve(tier)
        held: Counter[tuple[float, str]] = Counter()
        for span in timeline.spans():
            for change in schedule.changes[span.action]:
                if change.tier == tier:
                    at = span.start_seconds if change.at == "start" else span.end_seconds
                    held[at, change.cause] += change.num_bytes
        assert [at for at, _ in curve] == sorted({0.0, *(at for at, _ in held)})
        for now, num_bytes in curve:
            assert num_bytes == sum(n for (at, _), n in held.items() if at <= now)
        peak = timeline.peak(tier)
        assert peak.num_bytes == max(num_bytes for _, num_bytes in curve)
        assert (peak.seconds, peak.num_bytes) in curve
        finals = [curve[-1][1] for curve in timeline.curves_by_cause(tier).values()]
        assert sum(finals) == curve[-1][1]


@examples(20, whole=40)
@given(schedules())
def test_all_given_back_is_nothing_left(schedule: RandomSchedule) -> None:
    standing = [Change("device", "weights", 50)]
    timeline = simulate(
        schedule.resources,
        seconds=schedule.seconds.__getitem__,
        after=schedule.after.__getitem__,
        changes=lambda action: [
            Change("device", "work", 1 + action.unit),
            Change("device", "work", -1 - action.unit, "end"),
        ],
        standing=standing,
    )
    curve = timeline.curve("device")
    assert curve[-1][1] == 50
    assert all(50 <= num_bytes for _, num_bytes in curve)
    running = [
        sum(1 + s.action.unit for s in timeline.spans() if s.start_seconds <= now < s.end_seconds)
        for now, _ in curve
    ]
    assert [num_bytes - 50 for _, num_bytes in curve] == running
