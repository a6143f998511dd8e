"""Timeline: when each action of a schedule ran, what it waited for, and the bytes over time.

`simulate` makes one from durations and `measured_timeline` from a measured run, so that the two can
be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import Action

COMPUTE = ".compute"
"""What the name of each rank's compute resource ends in: rank 3's is "3.compute"."""


class Span(NamedTuple):
    """One action's time on its resource, in seconds since the start of the schedule."""

    action: Action
    """What ran."""

    resource: str
    """Where it ran."""

    start_seconds: float
    """When it began."""

    end_seconds: float
    """When it was done."""

    ready_seconds: float
    """When all it depends on was done; before `start_seconds` if its resource was busy until
    then."""


class Stall(NamedTuple):
    """A time in which a resource had work left and stood still."""

    action: Action
    """The action that could not begin."""

    seconds: float
    """How long its resource stood still for it."""

    waited_for: Action
    """What it waited for: of all it depends on, the one that was done last."""

    resource: str
    """The resource that stood still."""

    start_seconds: float
    """When it began to stand still."""


class Peak(NamedTuple):
    """The most bytes that a tier held at once."""

    num_bytes: int
    """How many."""

    seconds: float
    """Since when; the first time, if there are several."""


ByteEvent = tuple[float, int, str]
"""Bytes taken (positive) or given back (negative) at an instant: seconds, bytes, cause."""


# No slots: a cached property needs the instance's dictionary.
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Timeline:
    """When every action ran, resource by resource, and how many bytes each tier held meanwhile.

    Lists have one entry per action, resource after resource; a list of objects would be slow, for a
    plan has tens of thousands of actions and a solver simulates hundreds of plans. All else is
    worked out when asked for; a tier's curve is kept once made.

    [Note: bytes at one instant] Changes at the same instant are added up before a curve shows them,
    as if what is given back came first. An action that begins exactly when another ends mostly does
    so because it waited for it, and then takes what the other gave back. So a peak may be too small
    only where two unrelated actions touch at one instant, and an action of zero seconds that takes
    bytes at its start and gives them back at its end shows nothing.
    """

    actions: Sequence[Action]
    """All actions, a resource's next to each other in the resource's order."""

    positions: Mapping[Action, int]
    """Where in these lists each action is."""

    ranges: Mapping[str, range]
    """The positions of each resource's actions."""

    starts: Sequence[float]
    """Begin of each action, in seconds."""

    ends: Sequence[float]
    """End of each action, in seconds."""

    readies: Sequence[float]
    """When all that each action depends on was done, in seconds."""

    latest: Sequence[int]
    """Position of what each action depends on and was done last; -1 if nothing held it up."""

    events: Mapping[str, Sequence[ByteEvent]]
    """Changes of each tier's bytes, in any order."""

    @cached_property
    def end_seconds(self) -> float:
        """When the last action was done."""
        return max(self.ends, default=0.0)

    @cached_property
    def _curves(self) -> dict[str, list[tuple[float, int]]]:
        return {}

    @property
    def resources(self) -> tuple[str, ...]:
        """Names of the resources, in the order in which they were given."""
        return tuple(self.ranges)

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers whose bytes changed, in the order in which they first did."""
        return tuple(self.events)

    def __len__(self) -> int:
        return len(self.actions)

    def span(self, action: Action) -> Span:
        """Returns when an action ran.

        Raises:
            ScheduleError: it did not.
        """
        position = self.positions.get(action)
        if position is None:
            raise ScheduleError(f"{action} is not on this timeline: no resource had it.")
        (resource,) = (name for name, held in self.ranges.items() if position in held)
        return self._span(position, resource)

    def spans(self, resource: str | None = None) -> Iterator[Span]:
        """Yields a resource's spans in order; if None, those of all, one after the other."""
        for name in self.resources if resource is None else (resource,):
            for position in self._positions(name):
                yield self._span(position, name)

    def busy_seconds(self, resource: str) -> float:
        """Returns the seconds in which a resource was at work."""
        starts, ends = self.starts, self.ends
        return sum(ends[position] - starts[position] for position in self._positions(resource))

    def stall_seconds(self, resource: str) -> float:
        """Returns the seconds in which a resource had work left, but waited for another resource.

        The time before its first action counts; that after its last does not.
        """
        # Gap by gap rather than end less busy, so that a resource without gaps has exactly none.
        return sum(stall.seconds for stall in self._stalls(resource))

    def stalls(self, resource: str | None = None, *, over_seconds: float = 0.0) -> list[Stall]:
        """Lists when resources stood still, and what for.

        Args:
            resource: this resource's only, in its order; all resources', in order of time, if None.
            over_seconds: those that lasted longer.
        """
        found = [
            stall
            for name in (self.resources if resource is None else (resource,))
            for stall in self._stalls(name)
            if stall.seconds > over_seconds
        ]
        if resource is None:
            found.sort(key=lambda stall: stall.start_seconds)
        return found

    def curve(self, tier: str) -> list[tuple[float, int]]:
        """Returns a tier's bytes over time: (seconds, bytes that it holds from then on).

        Begins at zero seconds. See [Note: bytes at one instant].
        """
        if tier not in self._curves:
            self._curves[tier] = _curve(self.events.get(tier, ()))
        return self._curves[tier]

    def curves_by_cause(self, tier: str) -> dict[str, list[tuple[float, int]]]:
        """Returns one curve for each cause of a tier's bytes; they add up to `curve(tier)`."""
        causes: dict[str, list[ByteEvent]] = {}
        for event in self.events.get(tier, ()):
            causes.setdefault(event[-1], []).append(event)
        return {cause: _curve(events) for cause, events in causes.items()}

    def peak(self, tier: str) -> Peak:
        """Returns the most bytes that a tier held at once, and since when."""
        curve = self.curve(tier)
        most = max(num_bytes for _, num_bytes in curve)
        return Peak(most, next(at for at, num_bytes in curve if num_bytes == most))

    def peak_by_cause(self, tier: str) -> dict[str, int]:
        """Returns what made up a tier's peak: bytes by cause, largest first, none of zero."""
        at_seconds = self.peak(tier).seconds
        held: dict[str, int] = {}
        for seconds, num_bytes, cause in self.events.get(tier, ()):
            if seconds <= at_seconds:
                held[cause] = held.get(cause, 0) + num_bytes
        ranked = sorted(held.items(), key=lambda item: -item[1])
        return {cause: num_bytes for cause, num_bytes in ranked if num_bytes}

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

    def _stalls(self, resource: str) -> Iterator[Stall]:
        free_seconds = 0.0
        for position in self._positions(resource):
            start_seconds = self.starts[position]
            if start_seconds > free_seconds:
                yield Stall(
                    self.actions[position],
                    start_seconds - free_seconds,
                    self.actions[self.latest[position]],
                    resource,
                    free_seconds,
                )
            free_seconds = self.ends[position]


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
    """Returns the compute of all ranks over time, a line for each rank and a column for each slot.

    An action stands in the slot in which it begins, followed by "=" in those that it goes on
    through; "." is a slot without work.

    Args:
        timeline: of a schedule over ranks.
        slot_seconds: length of a slot; at most the shortest action, or some are not seen.

    Raises:
        ScheduleError: the length is not above zero.
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
