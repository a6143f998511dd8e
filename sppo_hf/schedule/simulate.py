"""The event simulator: lanes of actions in, a Timeline out.

Every lane (a compute stream, a copy engine, a link, a disk, of one rank or of many) carries out its
actions in order, one at a time; each action begins once its lane is free and all that it depends on
is done. Costs about a microsecond per action, plus what `changes` costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Literal, NamedTuple

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.timeline import ByteEvent, Timeline

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
    lanes: Mapping[str, Sequence[Action]],
    *,
    seconds: Sequence[float],
    needs: Sequence[Sequence[int]],
    changes: Callable[[Action], Iterable[Change]] | None = None,
    standing: Iterable[Change] = (),
) -> Timeline:
    """Works out when every action runs, and the bytes of every tier meanwhile.

    Args:
        lanes: the actions of each lane in the order in which it carries them out. An action's
            position is its place when all lanes are written one after the other.
        seconds: how long the action at each position takes. Zero is allowed.
        needs: the positions of what must be done before it begins, besides its predecessor on its
            lane.
        changes: the bytes that an action takes and gives back; called once for each.
        standing: bytes held from the start, such as weights; their `at` is not looked at.

    Raises:
        ScheduleError: an action is on the lanes twice; a duration is negative or not finite; or
            lanes wait for each other: then the message shows each such lane with the action at
            which it stopped.
    """
    run = _Run(lanes)
    run.play(seconds, needs)
    if run.blocked:
        stuck = [(run.actions[at], run.actions[other]) for at, other in run.blocked.values()]
        raise DeadlockError(_deadlock(tuple(lanes), run), stuck)
    return Timeline(
        actions=run.actions,
        positions=run.positions,
        ranges=dict(zip(lanes, run.ranges, strict=True)),
        starts=run.starts,
        ends=run.ends,
        readies=run.readies,
        latest=run.latest,
        events=_byte_events(run, changes, standing),
    )


class DeadlockError(ScheduleError):
    """Lanes wait for each other."""

    def __init__(self, message: str, stuck: Sequence[tuple[Action, Action]]) -> None:
        super().__init__(message)
        self.stuck = tuple(stuck)
        """Of each lane that never ends: the action at which it stops, and what that waits for."""


class _Run:
    """The state of a simulation, position by position (`Timeline` says what that is)."""

    def __init__(self, lanes: Mapping[str, Sequence[Action]]) -> None:
        self.actions = [action for lane in lanes.values() for action in lane]
        self.positions = {action: position for position, action in enumerate(self.actions)}
        count = len(self.actions)
        if len(self.positions) != count:
            raise ScheduleError(_repeated(lanes))
        bounds = [0, *accumulate(len(lane) for lane in lanes.values())]
        self.ranges = [range(first, stop) for first, stop in pairwise(bounds)]
        self.starts = [0.0] * count
        self.readies = [0.0] * count
        self.latest = [-1] * count
        self.ends = [-1.0] * count
        """-1: not done."""
        self.blocked: dict[int, tuple[int, int]] = {}
        """By lane that did not end: the position at which it stopped, and what it waits for."""

    def play(self, seconds: Sequence[float], needs: Sequence[Sequence[int]]) -> None:
        """Runs each lane as far as it comes, and again once what stopped it is done.

        Each action is looked at once, and once more for each dependency that stopped its lane; no
        queue of events by time is needed, since every lane's order is given.
        """
        ends, starts = self.ends, self.starts
        next_positions = [held.start for held in self.ranges]
        waiting: dict[int, list[int]] = {}
        runnable = list(reversed(range(len(self.ranges))))
        while runnable:
            lane = runnable.pop()
            self.blocked.pop(lane, None)
            first, stop = self.ranges[lane].start, self.ranges[lane].stop
            free = ends[next_positions[lane] - 1] if next_positions[lane] > first else 0.0
            for position in range(next_positions[lane], stop):
                ready, latest = 0.0, -1
                for found in needs[position]:
                    end = ends[found]
                    if end < 0.0:
                        self.blocked[lane] = (position, found)
                        waiting.setdefault(found, []).append(lane)
                        next_positions[lane] = position
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


def _repeated(lanes: Mapping[str, Sequence[Action]]) -> str:
    seen: dict[Action, tuple[str, int]] = {}
    for name, lane in lanes.items():
        for step, action in enumerate(lane):
            if action in seen:
                other, earlier = seen[action]
                return (
                    f"{action} is on the lanes twice: step {earlier} of {other!r} and step {step} "
                    f"of {name!r}. Each action runs once; tell them apart by layer or part."
                )
            seen[action] = (name, step)
    raise AssertionError("asked for an action that is there twice where none is")


def _deadlock(names: Sequence[str], run: _Run) -> str:
    width = max(map(len, names))
    rows: list[str] = []
    for lane, name in enumerate(names):
        held = run.ranges[lane]
        if lane not in run.blocked:
            rows.append(f"  {name:<{width}}  done: actions {len(held)}")
            continue
        stuck, other = run.blocked[lane]
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
        f"{len(run.blocked)} of {len(names)} lanes never end; each stops where brackets are:\n"
        + "\n".join(rows)
        + "\nAn action may wait only for one that is on a lane and can run without it."
    )


def _whereabouts(position: int, names: Sequence[str], run: _Run) -> str:
    lane = next(lane for lane, held in enumerate(run.ranges) if position in held)
    return f"step {position - run.ranges[lane].start} of {names[lane]!r}"
