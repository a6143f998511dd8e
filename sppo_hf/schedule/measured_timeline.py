"""Timeline of a measured run, and its comparison with the simulation of its schedule.

The timeline is made from each rank's records of (action, start, end). All ranks must read the same
clock, as processes on one machine do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import COMPUTE_KINDS, Action, Kind
from sppo_hf.schedule.dependencies import DependencyGraph
from sppo_hf.schedule.messages import SENDS
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import simulate_pipeline
from sppo_hf.schedule.timeline import Timeline


class ActionRecord(NamedTuple):
    """Times of an action that a rank ran, in seconds of the host's clock."""

    action: Action
    start_seconds: float
    """Time at which the rank started it; waiting for a message follows."""

    end_seconds: float
    ready_seconds: float
    """Time at which the message that it waited for had arrived; `start_seconds` if it waited for
    none."""


def measured_timeline(schedule: Schedule, executed: Sequence[Sequence[ActionRecord]]) -> Timeline:
    """Returns the timeline of a measured step: each rank's compute, without waiting for messages.

    Returns:
        A timeline with the resources "0.compute", "1.compute" and so on, without bytes. Its zero is
        the earliest start of an action on any rank.

    Raises:
        ScheduleError: a rank's actions or their order differ from the schedule.
    """
    _check(schedule, executed)
    waits = DependencyGraph(schedule.keep(lambda action: action.kind in COMPUTE_KINDS))
    resources = dict(zip(waits.resources, _computed(executed), strict=True))
    return _timeline(resources, _begin(executed), waits.needs)


def rank_timeline(rank: int, executed: Sequence[ActionRecord]) -> Timeline:
    """Returns the timeline of one rank's actions: compute without waiting, copies, messages.

    Args:
        rank: the rank, with which names of resources begin: "0.compute", "0.d2h", "0.send", ...
        executed: the rank's records in order; those of asynchronous actions have the times of their
            start calls.
    """
    resources: dict[str, list[ActionRecord]] = {}
    for one in executed:
        resources.setdefault(f"{rank}.{_RESOURCE_NAMES[one.action.kind]}", []).append(one)
    return _timeline(resources, executed[0].start_seconds if executed else 0.0)


def _timeline(
    resources: Mapping[str, Sequence[ActionRecord]],
    zero: float,
    needs: Sequence[Sequence[int]] | None = None,
) -> Timeline:
    """Returns the timeline of records by resource.

    Args:
        resources: records of each resource, in order.
        zero: host clock's seconds that become 0.
        needs: dependencies, as in `simulate_positions`; None if unknown.
    """
    done = [one for resource in resources.values() for one in resource]
    bounds = accumulate(map(len, resources.values()), initial=0)
    starts = [one.ready_seconds - zero for one in done]
    ends = [one.end_seconds - zero for one in done]
    # An action without known dependencies waited for the action before it on its resource.
    latest, readies = [max(position - 1, 0) for position in range(len(done))], starts
    if needs is not None:
        latest = [
            max(needed, key=ends.__getitem__, default=before)
            for before, needed in zip(latest, needs, strict=True)
        ]
        readies = [
            ends[last] if needed else 0.0 for last, needed in zip(latest, needs, strict=True)
        ]
    return Timeline(
        actions=[one.action for one in done],
        positions={one.action: position for position, one in enumerate(done)},
        ranges={name: range(*span) for name, span in zip(resources, pairwise(bounds), strict=True)},
        starts=starts,
        ends=ends,
        readies=readies,
        latest=latest,
        events={},
    )


_RESOURCE_NAMES: dict[Kind, str] = {
    **dict.fromkeys(COMPUTE_KINDS, "compute"),
    **{"D": "d2h", "O": "d2h", "H": "h2d", "K": "h2d", "S": "disk write", "L": "disk read"},
    **{"P": "h2d", "G": "d2h", "U": "host compute"},
    **dict.fromkeys(SENDS, "send"),
    **dict.fromkeys(SENDS.values(), "recv"),
    "REDUCE_GRAD": "reduce",
}


def mean_seconds(
    schedule: Schedule, executed: Sequence[Sequence[ActionRecord]]
) -> Callable[[Action], float]:
    """Returns durations for a simulation: means over micro-batches for each (kind, stage, chunk).

    Sends, receives and reductions take 0 seconds; `explain` finds their cost.
    """
    found: dict[tuple[str, int, int], list[float]] = {}
    for one in _flat(_computed(executed)):
        place = (one.action.kind, one.action.stage, schedule.chunk(one.action))
        found.setdefault(place, []).append(one.end_seconds - one.ready_seconds)
    means = {place: sum(times) / len(times) for place, times in found.items()}
    return lambda a: means.get((a.kind, a.stage, schedule.chunk(a)), 0.0)


class Difference(NamedTuple):
    """Difference between a measured step and its simulation, as the sum of three parts."""

    measured_seconds: float
    """Measured duration, from the first action's start to the last one's end on any rank."""

    simulated_seconds: float
    """Duration simulated with `mean_seconds`."""

    uneven_seconds: float
    """Part due to units whose duration differs from the mean of their kind, stage and chunk."""

    between_seconds: float
    """Part due to the host between units: starting messages, bookkeeping, a late start."""

    message_seconds: float
    """Part due to messages: their transfer, and the time until the waiting rank continues."""


def explain(schedule: Schedule, executed: Sequence[Sequence[ActionRecord]]) -> Difference:
    """Finds the reasons why the measured step is longer than the simulated one.

    The schedule is simulated again with each unit's own seconds, and then with the host's seconds
    before each unit added. The remaining difference is attributed to messages.

    Raises:
        ScheduleError: a rank's actions or their order differ from the schedule.
    """
    measured = measured_timeline(schedule, executed)
    compute = _computed(executed)
    own = {one.action: one.end_seconds - one.ready_seconds for one in _flat(compute)}
    before: dict[Action, float] = {}
    zero = _begin(executed)
    for rank in compute:
        free = zero
        for one in rank:
            before[one.action] = one.start_seconds - free
            free = one.end_seconds

    def step_seconds(seconds: Callable[[Action], float]) -> float:
        return simulate_pipeline(schedule, seconds=seconds).end_seconds

    simulated = step_seconds(mean_seconds(schedule, executed))
    uneven = step_seconds(lambda action: own.get(action, 0.0))
    between = step_seconds(lambda action: own.get(action, 0.0) + before.get(action, 0.0))
    return Difference(
        measured.end_seconds,
        simulated,
        uneven - simulated,
        between - uneven,
        measured.end_seconds - between,
    )


def _check(schedule: Schedule, executed: Sequence[Sequence[ActionRecord]]) -> None:
    if len(executed) != schedule.num_ranks:
        raise ScheduleError(
            f"{len(executed)} ranks were measured, but the schedule has {schedule.num_ranks}. "
            "Remedy: gather what all ranks of one pipeline did in one step."
        )
    for rank, (done, listed) in enumerate(zip(executed, schedule.ranks, strict=True)):
        for step in range(max(len(done), len(listed))):
            did = str(done[step].action) if step < len(done) else "nothing"
            wanted = str(listed[step]) if step < len(listed) else "nothing"
            if did != wanted:
                raise ScheduleError(
                    f"rank {rank} did {did} at step {step}, where the schedule lists {wanted}. "
                    "Remedy: compare a run with the schedule that it ran, sends included."
                )


def _begin(executed: Sequence[Sequence[ActionRecord]]) -> float:
    return min(rank[0].start_seconds for rank in executed if rank)


def _computed(executed: Sequence[Sequence[ActionRecord]]) -> list[list[ActionRecord]]:
    return [[one for one in rank if one.action.kind in COMPUTE_KINDS] for rank in executed]


def _flat(executed: Sequence[Sequence[ActionRecord]]) -> list[ActionRecord]:
    return [one for rank in executed for one in rank]
