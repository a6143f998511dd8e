"""Simulation: when the actions of a schedule run, and the bytes that each tier holds meanwhile.

Every resource (a compute stream, copy engine, link or disk of one rank) runs its actions in order,
one at a time. Each action begins when its resource is free and all its dependencies have ended.
`simulate_positions` works for any resources and takes about a microsecond per action.
`simulate_pipeline` works for a Schedule over ranks and takes two to three.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import inf
from typing import Literal, NamedTuple

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import KV_COPY_KINDS, Action, Kind
from sppo_hf.schedule.dependencies import DependencyGraph
from sppo_hf.schedule.messages import messages
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.timeline import COMPUTE, ByteEvent, Timeline

_NEIGHBOURS_SHOWN = 3


class Change(NamedTuple):
    """Bytes of a tier that an action allocates (positive) or frees (negative)."""

    tier: str
    """Name of the tier, such as "device"; "0.device" for rank 0's in a pipeline."""

    cause: str
    """Use of the bytes: a `planning.memory.Cause`, or any other name."""

    num_bytes: int

    at: Literal["start", "end"] = "start"
    """Whether the change happens at the start or at the end of the action."""


def simulate_positions(
    resources: Mapping[str, Sequence[Action]],
    *,
    seconds: Sequence[float],
    needs: Sequence[Sequence[int]],
    changes: Callable[[Action], Iterable[Change]] | None = None,
    standing: Iterable[Change] = (),
) -> Timeline:
    """Simulates when every action runs, and the bytes of every tier meanwhile.

    Args:
        resources: actions of each resource, in the order in which it runs them. An action's
            position is its index when the lists of all resources are joined.
        seconds: duration of the action at each position, zero or more.
        needs: for each position, the positions of the actions that must end before it begins,
            besides its predecessor on its resource.
        changes: returns the bytes that an action allocates and frees; called once per action.
        standing: bytes held from the start, such as weights; their `at` is ignored.

    Raises:
        ScheduleError: an action is listed twice, or a duration is negative or not finite.
        DeadlockError: resources wait for each other; the message shows each such resource with the
            action at which it stopped.
    """
    run = _Run(resources)
    run.play(seconds, needs)
    if run.blocked:
        stuck = [(run.actions[at], run.actions[other]) for at, other in run.blocked.values()]
        raise DeadlockError(_deadlock(tuple(resources), run), stuck)
    return Timeline(
        actions=run.actions,
        positions=run.positions,
        ranges=dict(zip(resources, run.ranges, strict=True)),
        starts=run.starts,
        ends=run.ends,
        readies=run.readies,
        latest=run.latest,
        events=_byte_events(run, changes, standing),
    )


class DeadlockError(ScheduleError):
    """Resources wait for each other."""

    def __init__(self, message: str, stuck: Sequence[tuple[Action, Action]]) -> None:
        super().__init__(message)
        self.stuck = tuple(stuck)
        """(action, dependency) of each blocked resource: the action that cannot begin, and the one
        that it waits for."""


class _Run:
    """State of a simulation; lists have one entry per position, as in `Timeline`."""

    def __init__(self, resources: Mapping[str, Sequence[Action]]) -> None:
        self.actions = [action for resource in resources.values() for action in resource]
        self.positions = {action: position for position, action in enumerate(self.actions)}
        count = len(self.actions)
        if len(self.positions) != count:
            raise ScheduleError(_repeated(resources))
        bounds = [0, *accumulate(len(resource) for resource in resources.values())]
        self.ranges = [range(first, stop) for first, stop in pairwise(bounds)]
        self.starts = [0.0] * count
        self.readies = [0.0] * count
        self.latest = [-1] * count
        self.ends = [-1.0] * count
        """End of each action in seconds; -1 if it has not run."""
        self.blocked: dict[int, tuple[int, int]] = {}
        """For each blocked resource: the position of the action that cannot begin, and the position
        of the one that it waits for."""

    def play(self, seconds: Sequence[float], needs: Sequence[Sequence[int]]) -> None:
        """Runs each resource until an action has to wait, and continues once its dependency ended.

        Each action is visited once, and once more for each dependency that blocked its resource. No
        queue of events by time is needed, since every resource's order is given.
        """
        ends, starts = self.ends, self.starts
        next_positions = [held.start for held in self.ranges]
        waiting: dict[int, list[int]] = {}
        runnable = list(reversed(range(len(self.ranges))))
        while runnable:
            resource = runnable.pop()
            self.blocked.pop(resource, None)
            first, stop = self.ranges[resource].start, self.ranges[resource].stop
            free = ends[next_positions[resource] - 1] if next_positions[resource] > first else 0.0
            for position in range(next_positions[resource], stop):
                ready, latest = 0.0, -1
                for found in needs[position]:
                    end = ends[found]
                    if end < 0.0:
                        self.blocked[resource] = (position, found)
                        waiting.setdefault(found, []).append(resource)
                        next_positions[resource] = position
                        break
                    if end > ready:
                        ready, latest = end, found
                else:
                    start = ready if ready > free else free
                    took_seconds = seconds[position]
                    if not 0.0 <= took_seconds < inf:
                        raise ScheduleError(_bad_duration(self.actions[position], took_seconds))
                    free = start + took_seconds
                    starts[position], ends[position] = start, free
                    self.readies[position], self.latest[position] = ready, latest
                    if position in waiting:
                        runnable.extend(waiting.pop(position))
                    continue
                break


def _bad_duration(action: Action, took_seconds: float) -> str:
    return (
        f"{action} takes {took_seconds} seconds; a duration must be zero or more, and finite. "
        "Check the rates that it was computed from."
    )


def _byte_events(
    run: _Run,
    changes: Callable[[Action], Iterable[Change]] | None,
    standing: Iterable[Change],
) -> dict[str, list[ByteEvent]]:
    events: defaultdict[str, list[ByteEvent]] = defaultdict(list)
    for tier, cause, num_bytes, _ in standing:
        events[tier].append((0.0, num_bytes, cause))
    if changes is not None:
        for action, start, end in zip(run.actions, run.starts, run.ends, strict=True):
            for tier, cause, num_bytes, at in changes(action):
                if at == "start":
                    events[tier].append((start, num_bytes, cause))
                elif at == "end":
                    events[tier].append((end, num_bytes, cause))
                else:
                    raise ScheduleError(
                        f"{action} changes {cause!r} of {tier!r} at {at!r}; a change is at 'start' "
                        "or 'end'."
                    )
    return dict(events)


def _repeated(resources: Mapping[str, Sequence[Action]]) -> str:
    seen: dict[Action, tuple[str, int]] = {}
    for name, resource in resources.items():
        for step, action in enumerate(resource):
            if action in seen:
                other, earlier = seen[action]
                return (
                    f"{action} is on the resources twice: step {earlier} of {other!r} and step "
                    f"{step} of {name!r}. Each action runs once; tell them apart by layer or part."
                )
            seen[action] = (name, step)
    raise AssertionError("asked for an action that is there twice where none is")


def _deadlock(names: Sequence[str], run: _Run) -> str:
    width = max(map(len, names))
    rows: list[str] = []
    for resource, name in enumerate(names):
        held = run.ranges[resource]
        if resource not in run.blocked:
            rows.append(f"  {name:<{width}}  done: actions {len(held)}")
            continue
        stuck, other = run.blocked[resource]
        first = max(held.start, stuck - _NEIGHBOURS_SHOWN)
        stop = min(held.stop, stuck + _NEIGHBOURS_SHOWN + 1)
        shown = [
            f"[{run.actions[position]}]" if position == stuck else str(run.actions[position])
            for position in range(first, stop)
        ]
        row = " ".join((*["..."][: first > held.start], *shown, *["..."][: stop < held.stop]))
        rows.append(
            f"  {name:<{width}}  {row}  waits for {run.actions[other]}, "
            f"{_whereabouts(other, names, run)}"
        )
    return (
        f"{len(run.blocked)} of {len(names)} resources never end; each stops where brackets are:\n"
        + "\n".join(rows)
        + "\nAn action may wait only for one that is on a resource and can run without it."
    )


def _whereabouts(position: int, names: Sequence[str], run: _Run) -> str:
    resource = next(resource for resource, held in enumerate(run.ranges) if position in held)
    return f"step {position - run.ranges[resource].start} of {names[resource]!r}"


_SAME = 1e-9
"""Periods whose relative difference is at most this are equal up to rounding."""


def simulate_pipeline(
    schedule: Schedule,
    *,
    seconds: Callable[[Action], float],
    changes: Callable[[Action], Iterable[Change]] | None = None,
    standing: Iterable[Change] = (),
) -> Timeline:
    """Simulates when every action of every rank runs.

    Dependencies are described in `dependencies`, [Note: what an action waits for]. If the schedule
    has no sends, results are available on other ranks at once.

    Args:
        schedule: a schedule of compute actions alone, or a lowered one.
        seconds: returns the duration of an action. The duration of a transfer is that of its send;
            its receive, which only marks the arrival, should take 0 seconds.
        changes: returns the bytes that an action allocates and frees; tiers of rank 3 are named
            "3.device" and so on.
        standing: bytes held from the start.

    Returns:
        A timeline with the resources "0.compute", "0.d2h", "0.send 1" (to rank 1), "1.recv 0" and
        so on: each rank's compute, and other resources that have actions.

    Raises:
        ScheduleError: an action is listed twice or depends on one that is not listed, or ranks wait
            for each other. `validate` explains such errors better.
    """
    waits = DependencyGraph(schedule)
    return simulate_positions(
        waits.resources,
        seconds=[seconds(action) for resource in waits.resources.values() for action in resource],
        needs=waits.needs,
        changes=changes,
        standing=standing,
    )


def period_seconds(
    schedule: Schedule, timeline: Timeline, *, warm_up: int, every: int = 1
) -> float | None:
    """Returns by how much `every` more micro-batches lengthen a step, if its middle is periodic.

    The middle is periodic if on every stage the last three groups of micro-batches follow each
    other at equal distances. Then more micro-batches of the same lengths only repeat it: each group
    takes this time, and peaks of memory do not grow.

    Args:
        schedule: schedule of at least `warm_up + 2 * every + 1` micro-batches.
        timeline: simulated timeline of the schedule.
        warm_up: number of micro-batches whose forwards the first rank has begun, at least in part,
            when its first backward begins.
        every: micro-batches in a group that passes the stages together; the number of micro-batches
            is a multiple of it.

    Returns:
        Seconds; None if the distances differ between groups or stages.
    """
    chunks, count = schedule.num_chunks, schedule.num_micro_batches
    # The last three groups whose backwards run while forwards still begin.
    last = count - warm_up - 1
    groups = range(last - 2 * every, last + 1, every)
    assert groups[0] >= 0, "too few micro-batches to repeat anything"
    last_of: Kind = "W" if any(action.kind == "W" for action in schedule.ranks[0]) else "B"
    looked_at: tuple[tuple[Kind, int], ...] = (("F", warm_up), (last_of, 0))
    found: list[float] = []
    for stage in range(schedule.num_stages):
        for kind, ahead in looked_at:
            first = [schedule.unit_actions(kind, stage, (g + ahead) * chunks)[0] for g in groups]
            ends = [timeline.span(action).end_seconds for action in first]
            found += (later - earlier for earlier, later in pairwise(ends))
    least, most = min(found), max(found)
    return most if most - least <= _SAME * most else None


def fixed_seconds(
    forward: float = 1.0,
    backward: float = 2.0,
    *,
    weight: float | None = None,
    send: float = 0.0,
    copy: float = 0.0,
    reduce: float = 0.0,
) -> Callable[[Action], float]:
    """Returns a function that gives durations by the kind of action alone.

    Args:
        forward: seconds of a unit's forward.
        backward: seconds of a unit's whole backward.
        weight: seconds of weight gradients if backward is split, a part of `backward`; None for
            half of it.
        send: seconds of sending one unit's activation or gradient.
        copy: seconds of one unit's copy to the host, or back.
        reduce: seconds of one stage's gradient reduction.
    """
    weight = backward / 2 if weight is None else weight
    table: dict[Kind, float] = {
        "F": forward,
        "B": backward,
        "I": backward - weight,
        "W": weight,
        "SEND_F": send,
        "SEND_B": send,
        "RECV_F": 0.0,
        "RECV_B": 0.0,
        "REDUCE_GRAD": reduce,
        **dict.fromkeys(KV_COPY_KINDS, 0.0),
    }
    return lambda action: table.get(action.kind, copy)


def bubble_fraction(timeline: Timeline) -> float:
    """Returns the share of all ranks' time without compute, from 0 to 1."""
    resources = [resource for resource in timeline.resources if resource.endswith(COMPUTE)]
    whole = len(resources) * timeline.end_seconds
    # In this order, integer durations give the exact fraction, rounded once.
    return (whole - sum(map(timeline.busy_seconds, resources))) / whole if whole else 0.0


def shared_seconds(
    schedule: Schedule, seconds: Callable[[Action], float]
) -> Callable[[Action], float]:
    """Returns `seconds` scaled by an action's share of its unit, or a message's share of a whole.

    For schedules without shared units these are the same durations.
    """
    if not schedule.shared_units:
        return seconds
    sent = messages(schedule)

    def shared(action: Action) -> float:
        message = sent.get(action)
        return seconds(action) * (schedule.share(action) if message is None else message.share)

    return shared


def alive_units(schedule: Schedule, timeline: Timeline) -> list[list[tuple[float, float]]]:
    """Returns the number of units whose activations each rank holds on the device over time.

    A unit is alive from the start of its forward to the end of its backward (of its weight gradient
    if backward is split), except while it is offloaded. Long and short chunks count alike; a rank's
    share of a shared unit counts as a fraction.

    Returns:
        For each rank (seconds, units from then on), beginning at zero seconds.
    """
    events: list[list[tuple[float, Fraction | int]]] = [[] for _ in schedule.ranks]
    whole = any(action.kind in ("B", "W") for rank in schedule.ranks for action in rank)
    shared = bool(schedule.shared_units)
    for action, resource, start, end, _ in timeline.spans():
        rank = int(resource.partition(".")[0])
        units = schedule.share(action) if shared else 1
        if action.kind in ("F", "H"):
            events[rank].append((start, units))
        if action.kind in ("B", "W", "D") or (action.kind == "F" and not whole):
            events[rank].append((end, -units))
    return [_summed(sorted(rank)) for rank in events]


def peak_units(schedule: Schedule, timeline: Timeline) -> list[float]:
    """Returns the peak number of units that each rank holds, [ranks]; see `alive_units`."""
    return [max(units for _, units in curve) for curve in alive_units(schedule, timeline)]


def _summed(events: Sequence[tuple[float, Fraction | int]]) -> list[tuple[float, float]]:
    curve: list[tuple[float, Fraction | int]] = [(0.0, 0)]
    for at, change in events:
        held = curve[-1][1] + change
        if at == curve[-1][0]:
            curve[-1] = (at, held)
        else:
            curve.append((at, held))
    # Whole numbers become integers.
    return [(at, int(held) if held == int(held) else float(held)) for at, held in curve]
