"""What pictures of a Timeline are made of, before anything is drawn: bars, colours, units.

Colours are Okabe and Ito's, which the colour-blind can tell apart: blue is the device and its
compute, orange the host, purple the disk, green keys and values, grey what passes between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sppo_hf.schedule.actions import Kind
from sppo_hf.schedule.timeline import Span, Timeline

BLUE, ORANGE, PURPLE, GREEN, RED = "#0072B2", "#E69F00", "#CC79A7", "#009E73", "#D55E00"
SKY, YELLOW, GREY, INK = "#56B4E9", "#F0E442", "#999999", "#333333"

KIND_COLOURS: dict[Kind, str] = {
    "F": SKY,
    "B": BLUE,
    "R": GREY,
    "D": ORANGE,
    "H": "#B87D00",
    "S": PURPLE,
    "L": "#8C4A6E",
    "K": GREEN,
    "O": "#00523C",
    "P": "#6E6E6E",
    "G": "#BDBDBD",
    "U": YELLOW,
    "I": "#2E5F8A",
    "W": "#7A8FC7",
    "SEND_F": "#B5B5B5",
    "RECV_F": "#D9D9D9",
    "SEND_B": "#7D7D7D",
    "RECV_B": "#C2C2C2",
    "SEND_KV": "#8FBFAE",
    "RECV_KV": "#CFE5DD",
    "SEND_DKV": "#5E9C86",
    "RECV_DKV": "#B4D3C8",
    "REDUCE_GRAD": RED,
}
DARK_KINDS: frozenset[Kind] = frozenset({"B", "I", "H", "L", "R", "O", "P", "SEND_B"})
"""Kinds on whose colour white letters can be read better than black ones."""

FINEST = 1 / 2000
"""Bars and gaps narrower than this part of the width are finer than the picture can show."""


def mixed(colour: str, white: float) -> str:
    """Returns a colour ("#RRGGBB") made paler by a share of white."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02X}" for part in parts)


@dataclass(frozen=True, slots=True)
class Clock:
    """The unit in which a timeline's seconds are easy to read."""

    unit: str
    """Its name, in the plural."""

    per_second: float
    """How many of it a second has."""

    end: float
    """The timeline's end, in this unit; 1 where it takes no time, so that an axis has a length."""

    @classmethod
    def of(cls, timeline: Timeline) -> Clock:
        """Chooses seconds, milliseconds or microseconds: the first of which there is one."""
        units = (("seconds", 1.0), ("milliseconds", 1e3), ("microseconds", 1e6))
        unit, per_second = next(
            (choice for choice in units if timeline.end_seconds * choice[1] >= 1.0), units[0]
        )
        return cls(unit, per_second, timeline.end_seconds * per_second or 1.0)

    def place(self, start_seconds: float, end_seconds: float) -> tuple[float, float]:
        """Returns where a bar begins and how long it is, in this unit."""
        return start_seconds * self.per_second, (end_seconds - start_seconds) * self.per_second

    def say(self, seconds: float) -> str:
        """Writes a time with at least three digits and the unit."""
        amount = seconds * self.per_second
        return f"{amount:,.0f} {self.unit}" if amount >= 100 else f"{amount:.3g} {self.unit}"


def byte_unit(num_bytes: int) -> tuple[str, int]:
    """Returns the largest binary unit of which there is one, and its bytes."""
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next((choice for choice in units if num_bytes >= choice[1]), ("bytes", 1))


class Bar(NamedTuple):
    """Spans of one kind and one chunk that follow so closely that they look like one."""

    kind: Kind
    """What was done."""

    unit: int
    """For which unit."""

    start_seconds: float
    """Begin of the first."""

    end_seconds: float
    """End of the last."""

    busy_seconds: float
    """Sum of the spans; the rest is gaps too fine to be seen."""

    @property
    def length_seconds(self) -> float:
        """From begin to end."""
        return self.end_seconds - self.start_seconds

    @property
    def colour(self) -> str:
        """The kind's colour, alternating a little by unit, and paler the more gaps there are."""
        work = self.busy_seconds / self.length_seconds if self.length_seconds > 0 else 1.0
        return mixed(KIND_COLOURS[self.kind], 1.0 - (1.0 - 0.3 * (self.unit % 2)) * max(work, 0.25))


def join_spans(spans: Iterable[Span], finest_seconds: float) -> list[Bar]:
    """Joins what a resource did for one chunk, across gaps of at most `finest_seconds`."""
    bars: list[Bar] = []
    for action, _, start, end, _ in spans:
        last = bars[-1] if bars else None
        if (
            last is not None
            and (last.kind, last.unit) == (action.kind, action.unit)
            and start - last.end_seconds <= finest_seconds
        ):
            busy_seconds = last.busy_seconds + end - start
            bars[-1] = Bar(last.kind, last.unit, last.start_seconds, end, busy_seconds)
        else:
            bars.append(Bar(action.kind, action.unit, start, end, end - start))
    return bars


def longest_bars(bars: Iterable[Bar], at_least_seconds: float) -> list[Bar]:
    """Returns the longest bar of each kind and unit, where it is long enough for its number."""
    longest: dict[tuple[Kind, int], Bar] = {}
    for bar in bars:
        best = longest.setdefault((bar.kind, bar.unit), bar)
        if bar.length_seconds > best.length_seconds:
            longest[bar.kind, bar.unit] = bar
    return [bar for bar in longest.values() if bar.length_seconds >= at_least_seconds]


def thin_out(curve: Sequence[tuple[float, float]], end_seconds: float) -> list[float]:
    """Picks the instants of a curve that the picture can show apart.

    Of each column of the picture they are the highest, which may not be lost, and the last, which
    lasts.
    """
    kept: set[int] = set()
    column_seconds = end_seconds * FINEST or 1.0
    column, highest = -1, 0
    for at, (seconds, num_bytes) in enumerate(curve):
        if int(seconds / column_seconds) != column:
            kept |= {highest, max(at - 1, 0)}
            column, highest = int(seconds / column_seconds), at
        elif num_bytes > curve[highest][1]:
            highest = at
    return [curve[at][0] for at in sorted(kept | {highest, len(curve) - 1})]
