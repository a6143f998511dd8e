"""Timeline: when each action of a schedule ran, what it waited for, and the bytes over time.

`simulate` makes a Timeline from durations and `measured_timeline` makes one from a measured run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import Action

COMPUTE = ".compute"
"""Suffix in the name of each rank's compute resource, as in "3.compute" for rank 3."""


class Span(NamedTuple):
    """One action's time on its resource, in seconds since the start of the schedule."""

    action: Action
    resource: str
    start_seconds: float
    end_seconds: float
    ready_seconds: float
    """Time at which all its dependencies had ended; earlier than `start_seconds` if its resource
    was still busy then."""


class Stall(NamedTuple):
    """A period in which a resource was idle although it had actions left."""

    action: Action
    """The action that could not begin."""

    seconds: float
    waited_for: Action
    """The dependency of `action` that ended last."""

    start_seconds: float


class Peak(NamedTuple):
    """Peak of the bytes that a tier holds."""

    num_bytes: int
    seconds: float
    """Time at which the peak is first reached."""


ByteEvent = tuple[float, int, str]
"""Bytes allocated (positive) or freed (negative) at one instant: (seconds, bytes, cause)."""


# No slots: a cached property needs the instance's dictionary.
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Timeline:
    """When every action ran, resource by resource, and how many bytes each tier held meanwhile.

    Lists have one entry per action, resource by resource. (A list of objects would be slow: a plan
    has tens of thousands of actions, and a solver simulates hundreds of plans.) Everything else is
    computed on request.

    [Note: bytes at one instant] All changes at the same instant are summed before a curve shows
    them, as if bytes were freed first. An action that begins exactly when another ends usually does
    so because it waited for it, and then allocates what the other freed. So a peak is too small
    only if two unrelated actions meet at one instant; and an action of zero seconds that allocates
    bytes at its start and frees them at its end does not show.
    """

    actions: Sequence[Action]
    """All actions, grouped by resource, in each resource's order."""

    positions: Mapping[Action, int]
    """Index of each action in these lists."""

    ranges: Mapping[str, range]
    """Positions of each resource's actions."""

    starts: Sequence[float]
    """Start of each action, in seconds."""

    ends: Sequence[float]
    """End of each action, in seconds."""

    readies: Sequence[float]
    """Time at which all dependencies of each action had ended, in seconds."""

    latest: Sequence[int]
    """Position of the dependency of each action that ended last; -1 if none delayed it."""

    events: Mapping[str, Sequence[ByteEvent]]
    """Changes of each tier's bytes, in any order."""

    @cached_property
    def end_seconds(self) -> float:
        """End of the last action, in seconds."""
        return max(self.ends, default=0.0)

    @property
    def resources(self) -> tuple[str, ...]:
        """Names of the resources, in the order of `ranges`."""
        return tuple(self.ranges)

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers whose bytes change, in the order of their first change."""
        return tuple(self.events)

    def __len__(self) -> int:
        return len(self.actions)

    def span(self, action: Action) -> Span:
        """Returns the span of an action.

        Raises:
            ScheduleError: the action is not on this timeline.
        """
        position = self.positions.get(action)
        if position is None:
            raise ScheduleError(f"{action} is not on this timeline: no resource had it.")
        (resource,) = (name for name, held in self.ranges.items() if position in held)
        return self._span(position, resource)

    def spans(self, resource: str | None = None) -> Iterator[Span]:
        """Yields the spans of one resource in order, or of all resources one after the other."""
        for name in self.resources if resource is None else (resource,):
            for position in self._positions(name):
                yield self._span(position, name)

    def busy_seconds(self, resource: str) -> float:
        """Returns the seconds in which a resource ran actions."""
        starts, ends = self.starts, self.ends
        return sum(ends[position] - starts[position] for position in self._positions(resource))

    def stall_seconds(self, resource: str) -> float:
        """Returns the seconds in which a resource had work left, but waited for another resource.

        The time before its first action counts; the time after its last action does not.
        """
        # Gaps are summed (rather than end minus busy seconds), so that no gaps give exactly zero.
        return sum(stall.seconds for stall in self.stalls(resource))

    def stalls(self, resource: str, *, over_seconds: float = 0.0) -> list[Stall]:
        """Returns the stalls of a resource that lasted longer than `over_seconds`, in order."""
        found: list[Stall] = []
        free_seconds = 0.0
        for position in self._positions(resource):
            seconds = self.starts[position] - free_seconds
            if seconds > over_seconds:
                waited_for = self.actions[self.latest[position]]
                found.append(Stall(self.actions[position], seconds, waited_for, free_seconds))
            free_seconds = self.ends[position]
        return found

    def curve(self, tier: str) -> list[tuple[float, int]]:
        """Returns a tier's bytes over time as (seconds, bytes held from then on), from 0 seconds.

        See [Note: bytes at one instant].
        """
        return _curve(self.events.get(tier, ()))

    def curves_by_cause(self, tier: str) -> dict[str, list[tuple[float, int]]]:
        """Returns one curve for each cause of a tier's bytes; they add up to `curve(tier)`."""
        causes: dict[str, list[ByteEvent]] = {}
        for event in self.events.get(tier, ()):
            causes.setdefault(event[-1], []).append(event)
        return {cause: _curve(events) for cause, events in causes.items()}

    def peak(self, tier: str) -> Peak:
        """Returns the peak of a tier's bytes and the time at which it is first reached."""
        curve = self.curve(tier)
        most = max(num_bytes for _, num_bytes in curve)
        return Peak(most, next(at for at, num_bytes in curve if num_bytes == most))

    def _positions(self, resource: str) -> range:
        try:
            return self.ranges[resource]
        except KeyError:
            raise ScheduleError(
                f"There is no resource {resource!r} on this timeline; its resources are "
                f"{', '.join(map(repr, self.resources)) or 'none'}."
            ) from None

    def _span(self, position: int, resource: str) -> Span:
        start, end = self.starts[position], self.ends[position]
        return Span(self.actions[position], resource, start, end, self.readies[position])


def _curve(events: Sequence[ByteEvent]) -> list[tuple[float, int]]:
    curve: list[tuple[float, int]] = []
    held_bytes, last_seconds = 0, 0.0
    for seconds, num_bytes, _ in sorted(events):
        if seconds != last_seconds:
            curve.append((last_seconds, held_bytes))
            last_seconds = seconds
        held_bytes += num_bytes
    curve.append((last_seconds, held_bytes))
    return curve


def over_time(timeline: Timeline, slot_seconds: float) -> str:
    """Returns all ranks' compute over time as text, one line per rank and one column per time slot.

    An action is shown in the slot in which it begins, followed by "=" in later slots that it
    occupies; "." is a slot without compute.

    Args:
        timeline: timeline of a schedule over ranks.
        slot_seconds: length of a slot. Actions shorter than this may not be shown.

    Raises:
        ScheduleError: `slot_seconds` is not above zero.
    """
    if not slot_seconds > 0:
        raise ScheduleError(f"slot_seconds is {slot_seconds}. Allowed: a number above zero.")
    num_slots = round(timeline.end_seconds / slot_seconds)
    rows: dict[str, list[str]] = {}
    for resource in timeline.resources:
        if not resource.endswith(COMPUTE):
            continue
        row = rows[f"rank {resource.removesuffix(COMPUTE)}"] = ["."] * num_slots
        for span in timeline.spans(resource):
            first, stop = (
                round(at / slot_seconds) for at in (span.start_seconds, span.end_seconds)
            )
            for slot in range(first, min(stop, num_slots)):
                row[slot] = "="
            if first < num_slots:
                row[first] = str(span.action)
    width = max((len(cell) for row in rows.values() for cell in row), default=0)
    label = max(map(len, rows), default=0)
    return "".join(
        f"{name:<{label}}  {' '.join(cell.ljust(width) for cell in row).rstrip()}\n"
        for name, row in rows.items()
    )
