"""Simulation: when the actions of a schedule run, and what each tier holds meanwhile.

Every resource (a compute stream, a copy engine, a link, a disk, of one rank or of many) carries out
its actions in order, one at a time; each action begins once its resource is free and all that it
depends on is done. `simulate_positions` does this for any resources, at about a microsecond per
action; `simulate_pipeline` for a Schedule over ranks, at two to three.
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
    """Bytes of a tier that an action takes (positive) or gives back (negative)."""

    tier: str
    """Which memory; any name, such as "device" or, of several ranks, "0.device"."""

    cause: str
    """What the bytes are for."""

    num_bytes: int
    """How many."""

    at: Literal["start", "end"] = "start"
    """Whether when the action begins or when it is done."""


def simulate_positions(
    resources: Mapping[str, Sequence[Action]],
    *,
    seconds: Sequence[float],
    needs: Sequence[Sequence[int]],
    changes: Callable[[Action], Iterable[Change]] | None = None,
    standing: Iterable[Change] = (),
) -> Timeline:
    """Works out when every action runs, and the bytes of every tier meanwhile.

    Args:
        resources: the actions of each resource in the order in which it carries them out. An
            action's position is its place when all resources are written one after the other.
        seconds: how long the action at each position takes. Zero is allowed.
        needs: the positions of what must be done before it begins, besides its predecessor on its
            resource.
        changes: the bytes that an action takes and gives back; called once for each.
        standing: bytes held from the start, such as weights; their `at` is not looked at.

    Raises:
        ScheduleError: an action is on the resources twice; a duration is negative or not finite; or
            resources wait for each other: then the message shows each such resource with the action
            at which it stopped.
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
        """Of each resource that never ends: the action at which it stops, and what that waits
        for."""


class _Run:
    """The state of a simulation, position by position (`Timeline` says what that is)."""

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
        """-1: not done."""
        self.blocked: dict[int, tuple[int, int]] = {}
        """By resource that did not end: the position at which it stopped, and what it waits for."""

    def play(self, seconds: Sequence[float], needs: Sequence[Sequence[int]]) -> None:
        """Runs each resource as far as it comes, and again once what stopped it is done.

        Each action is looked at once, and once more for each dependency that stopped its resource;
        no queue of events by time is needed, since every resource's order is given.
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
"""Periods that differ by no more than this share are the same, rounded differently."""


def simulate_pipeline(
    schedule: Schedule,
    *,
    seconds: Callable[[Action], float],
    changes: Callable[[Action], Iterable[Change]] | None = None,
    standing: Iterable[Change] = (),
) -> Timeline:
    """Works out when every action of every rank runs.

    What waits for what is said in `dependencies`, [Note: what an action waits for].
    Without sends in the schedule, what one rank computes is at hand on the other at once.

    Args:
        schedule: compute actions alone, or lowered.
        seconds: how long an action takes. That of a transfer is its send's; its receive, which
            only marks the arrival, should take none.
        changes: the bytes that an action takes and gives back; tiers are named "3.device" for
            rank 3's.
        standing: bytes held from the start.

    Returns:
        A timeline whose resources are "0.compute", "0.d2h", "0.send 1" (to rank 1), "1.recv 0", and
        so on; only resources with actions, and each rank's compute.

    Raises:
        ScheduleError: an action is there twice or waits for one that is not there, or ranks wait
            for each other. `validate` says such things better.
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
    """Returns how much longer a step takes with `every` micro-batches more, where that shows.

    It shows where every stage does the same at the same distance twice in a row: then the middle of
    the step repeats itself, and more micro-batches of the same lengths only repeat it more often.
    They take this time each, and no byte more at once.

    Args:
        schedule: what ran, `warm_up + 2 * every + 1` micro-batches at least.
        timeline: when it ran.
        warm_up: micro-batches whose forwards the first rank has begun, whole or in part, when its
            first backward begins.
        every: micro-batches that pass together; their number in the schedule is a multiple.

    Returns:
        Seconds; None where stages still drift apart.
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
    """Returns durations that depend on nothing but the kind of action.

    Args:
        forward: seconds of one unit's forward.
        backward: seconds of its whole backward.
        weight: the part of `backward` that weight gradients take where it is split; None for half.
        send: seconds that a link is busy with one unit's activation or gradient.
        copy: seconds of one unit's copy to the host, or back.
        reduce: seconds of one stage's gradient reduction.
    """
    weight = backward / 2 if weight is None else weight
    table: dict[Kind, float] = {
        "F": forward,
        "B": backward,
        "I": backward - weight,
        "W": weight,
        "R": forward,
        "SEND_F": send,
        "SEND_B": send,
        "RECV_F": 0.0,
        "RECV_B": 0.0,
        "REDUCE_GRAD": reduce,
        **dict.fromkeys(KV_COPY_KINDS, 0.0),
    }
    return lambda action: table.get(action.kind, copy)


def bubble_fraction(timeline: Timeline) -> float:
    """Returns the share of all ranks' time in which they do not compute, 0 to 1."""
    resources = [resource for resource in timeline.resources if resource.endswith(COMPUTE)]
    whole = len(resources) * timeline.end_seconds
    # In this order whole numbers give the fraction itself, rounded once.
    return (whole - sum(map(timeline.busy_seconds, resources))) / whole if whole else 0.0


def shared_seconds(
    schedule: Schedule, seconds: Callable[[Action], float]
) -> Callable[[Action], float]:
    """Returns durations in which each rank's share of a unit, and each message, takes its share."""
    if not schedule.shared_units:
        return seconds
    sent = messages(schedule)

    def shared(action: Action) -> float:
        message = sent.get(action)
        return seconds(action) * (schedule.share(action) if message is None else message.share)

    return shared


def alive_units(schedule: Schedule, timeline: Timeline) -> list[list[tuple[float, float]]]:
    """Returns, rank by rank, how many units' activations it holds over time.

    A unit is alive from the begin of its forward to the end of its backward (of its weight gradient
    where backward is split), less the time that it is away from the device, whatever its length. Of
    a shared unit each rank holds its share.

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
    """Returns the most units that each rank holds at once; see `alive_units`."""
    return [max(units for _, units in curve) for curve in alive_units(schedule, timeline)]


def _summed(events: Sequence[tuple[float, Fraction | int]]) -> list[tuple[float, float]]:
    curve: list[tuple[float, Fraction | int]] = [(0.0, 0)]
    for at, change in events:
        held = curve[-1][1] + change
        if at == curve[-1][0]:
            curve[-1] = (at, held)
        else:
            curve.append((at, held))
    # Whole numbers stay what they are.
    return [(at, int(held) if held == int(held) else float(held)) for at, held in curve]
