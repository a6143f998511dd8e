"""Figures of plans, schedules and attention speeds, drawn with matplotlib.

`draw_plan` shows one rank's plan: modes of each chunk, bytes of every tier, resources over time.
`draw_schedule` shows all ranks of a schedule over time and the bytes or units that each holds.
matplotlib is imported only to draw, and its global state is not changed.

Colours are Okabe and Ito's, which colour-blind people can distinguish: blue is the device and its
compute, orange the host, purple the disk, green K/V, grey messages between ranks.
"""


# pyright: basic
# matplotlib leaves most keyword arguments untyped, which the strict check counts as mistakes.

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sppo_hf.errors import ConfigError
from sppo_hf.planning.activation_modes import SAVED, ActivationMode, mode_of
from sppo_hf.planning.memory import CAUSE_OF_SAVED, Cause
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.tiers import TIERS
from sppo_hf.reporting.plan_tables import format_lengths, format_tokens
from sppo_hf.rules import format_bytes
from sppo_hf.schedule.actions import COMPUTE_KINDS, KIND_NAMES, Action, Kind
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import alive_units, bubble_fraction
from sppo_hf.schedule.timeline import COMPUTE, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


BLUE, ORANGE, PURPLE, GREEN, RED = "#0072B2", "#E69F00", "#CC79A7", "#009E73", "#D55E00"
SKY, YELLOW, GREY, INK = "#56B4E9", "#F0E442", "#999999", "#333333"

KIND_COLOURS: dict[Kind, str] = {
    "F": SKY,
    "B": BLUE,
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
DARK_KINDS: frozenset[Kind] = frozenset({"B", "I", "H", "L", "O", "P", "SEND_B"})
"""Kinds with dark colours, which get white letters."""

FINEST = 1 / 2000
"""Fraction of the width below which bars and gaps are too narrow to be drawn."""


def mixed(colour: str, white: float) -> str:
    """Returns a colour ("#RRGGBB") mixed with a fraction of white."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02X}" for part in parts)


@dataclass(frozen=True, slots=True)
class Clock:
    """The unit of time that suits the length of a timeline."""

    unit: str
    """Name of the unit, in the plural."""

    per_second: float
    """Units per second."""

    end: float
    """End of the timeline in this unit; 1 if it takes no time, so that an axis has a length."""

    @classmethod
    def of(cls, timeline: Timeline) -> Clock:
        """Chooses the largest of seconds, milliseconds and microseconds that is not too large."""
        units = (("seconds", 1.0), ("milliseconds", 1e3), ("microseconds", 1e6))
        unit, per_second = next(
            (choice for choice in units if timeline.end_seconds * choice[1] >= 1.0), units[0]
        )
        return cls(unit, per_second, timeline.end_seconds * per_second or 1.0)

    def place(self, start_seconds: float, end_seconds: float) -> tuple[float, float]:
        """Returns the start and the length of a bar in this unit."""
        return start_seconds * self.per_second, (end_seconds - start_seconds) * self.per_second

    def say(self, seconds: float) -> str:
        """Writes a time with three digits and the unit."""
        amount = seconds * self.per_second
        return f"{amount:,.0f} {self.unit}" if amount >= 100 else f"{amount:.3g} {self.unit}"


def byte_unit(num_bytes: int) -> tuple[str, int]:
    """Returns the largest binary unit that is not above `num_bytes`, and its bytes."""
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next((choice for choice in units if num_bytes >= choice[1]), ("bytes", 1))


class Bar(NamedTuple):
    """Consecutive spans of one kind and unit that are drawn as one bar."""

    kind: Kind
    """Kind of the actions."""

    unit: int
    """Unit of the actions."""

    start_seconds: float
    """Start of the first span."""

    end_seconds: float
    """End of the last span."""

    busy_seconds: float
    """Sum of the spans, without the gaps between them."""

    @property
    def length_seconds(self) -> float:
        """Seconds from start to end."""
        return self.end_seconds - self.start_seconds

    @property
    def colour(self) -> str:
        """The kind's colour, alternating by unit, and paler with more gaps."""
        work = self.busy_seconds / self.length_seconds if self.length_seconds > 0 else 1.0
        return mixed(KIND_COLOURS[self.kind], 1.0 - (1.0 - 0.3 * (self.unit % 2)) * max(work, 0.25))


def join_spans(spans: Iterable[Span], finest_seconds: float) -> list[Bar]:
    """Joins what a resource did for one chunk, across gaps of at most `finest_seconds`."""
    bars: list[Bar] = []
    for action, _, start, end, _ in spans:
        last = bars[-1] if bars else None
        same = last is not None and (last.kind, last.unit) == (action.kind, action.unit)
        if last is not None and same and start - last.end_seconds <= finest_seconds:
            busy_seconds = last.busy_seconds + end - start
            bars[-1] = last._replace(end_seconds=end, busy_seconds=busy_seconds)
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
    """Returns the times of a curve that are needed to draw it at the picture's resolution.

    Keeps the highest and the last point of each column of the picture.
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


ENDINGS = (".png", ".svg", ".pdf")
"""Supported endings of a figure's file."""

_WIDTH_INCHES = 13.0
# Width of a character of a number at font size 7, as a fraction of the figure's width.
_CHARACTER = 1 / 210
COMPUTE_HEIGHT = 0.8
_BESIDE_HEIGHT = 0.28


def draw_schedule(schedule: Schedule, timeline: Timeline, *, path: str | Path, title: str) -> None:
    """Draws a simulated or measured schedule into a file.

    The upper panel has rows for each rank: compute, numbered by micro-batch (and chunk, if there
    are several), and below it the other resources. Forwards of odd micro-batches are paler. The
    lower panel shows the bytes on each rank's device over time if the timeline has them, otherwise
    the number of live units.

    Raises:
        ConfigError: matplotlib is missing, or the path's ending is none of `ENDINGS`.
        OSError: the file cannot be written.
    """
    rows = _rows(schedule, timeline)
    height = sum(_row_height(resources) for resources in rows)
    inches = [0.6, 0.3 + 0.42 * height, 2.2]
    figure = new_figure(path, height_inches=sum(inches) + 1.2)
    head, resources, held = figure.subplots(3, 1, height_ratios=inches)
    clock = Clock.of(timeline)
    facts = [
        f"{schedule.num_ranks} ranks, {schedule.num_stages} stages",
        f"{schedule.num_micro_batches} micro-batches of {schedule.num_chunks} chunks",
        f"{clock.say(timeline.end_seconds)} a step",
        f"{bubble_fraction(timeline):.1%} idle",
    ]
    write_title(head, title, [facts])
    _draw_rows(resources, schedule, timeline, rows=rows, clock=clock)
    _draw_held(held, schedule, timeline, clock)
    share_time_axis([resources, held], clock)
    figure.savefig(path, dpi=150)


def new_figure(
    path: str | Path,
    *,
    height_inches: float,
    width_inches: float = _WIDTH_INCHES,
    what: str = "a schedule",
) -> Figure:
    """Makes an empty figure for a file, without using matplotlib's global state.

    Args:
        path: the file that the figure will be written to.
        height_inches: height of the figure.
        width_inches: width of the figure; all figures over time have the same.
        what: the object to draw, for error messages.

    Raises:
        ConfigError: matplotlib is missing, or the path's ending is none of `ENDINGS`.
    """
    path = Path(path)
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError(
            f"Cannot draw {what} into {path.name!r}: its ending must be one of "
            f"{', '.join(ENDINGS)}, which says what kind of picture it is."
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"Drawing {what} needs matplotlib, which is not installed: pip install matplotlib."
        ) from error
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def _rows(schedule: Schedule, timeline: Timeline) -> list[list[str]]:
    """Returns the names of each rank's resources, compute first."""
    rows = [[f"{rank}{COMPUTE}"] for rank in range(schedule.num_ranks)]
    for rank, row in enumerate(rows):
        own = (name for name in timeline.resources if name.partition(".")[0] == str(rank))
        # Receives take no time; their sends are shown.
        row += (name for name in own if name not in row and timeline.busy_seconds(name) > 0)
    return rows


def _row_height(resources: Sequence[str]) -> float:
    return 1.0 + _BESIDE_HEIGHT * (len(resources) - 1)


def _draw_rows(
    axes: Axes,
    schedule: Schedule,
    timeline: Timeline,
    *,
    rows: Sequence[Sequence[str]],
    clock: Clock,
) -> None:
    kinds: set[Kind] = set()
    ticks: dict[float, str] = {}
    at = 0.0
    for rank, resources in enumerate(rows):
        ticks[at + COMPUTE_HEIGHT / 2] = f"rank {rank}"
        draw_compute(axes, schedule, timeline, resource=resources[0], at=at, clock=clock)
        kinds |= {span.action.kind for resource in resources for span in timeline.spans(resource)}
        for below, resource in enumerate(resources[1:]):
            place = at + COMPUTE_HEIGHT + 0.04 + below * _BESIDE_HEIGHT
            ticks[place + 0.1] = resource.partition(".")[2]
            spans = list(timeline.spans(resource))
            colours = [KIND_COLOURS[span.action.kind] for span in spans]
            height = _BESIDE_HEIGHT - 0.08
            _draw_bars(axes, spans, place, height, clock, facecolors=colours, linewidth=0)
        at += _row_height(resources)
    label_rows(axes, ticks, at, small=6)
    add_legend(axes, kind_handles(kinds))


def draw_compute(
    axes: Axes,
    schedule: Schedule,
    timeline: Timeline,
    *,
    resource: str,
    at: float,
    clock: Clock,
    height: float = COMPUTE_HEIGHT,
) -> None:
    """Draws the bars of a rank's compute, from `at` downwards, with their units' numbers."""
    spans = list(timeline.spans(resource))
    colours = [
        mixed(KIND_COLOURS[span.action.kind], 0.3 * (schedule.micro_batch(span.action) % 2))
        for span in spans
    ]
    # Edges would cover narrow bars.
    edge = 0.5 if len(spans) <= 250 else 0.0
    style = {"facecolors": colours, "edgecolors": "white", "linewidth": edge}
    _draw_bars(axes, spans, at, height, clock, **style)
    for span in spans:
        said = _numbered(schedule, span.action.unit)
        length = span.end_seconds - span.start_seconds
        if length < clock.end / clock.per_second * _CHARACTER * (len(said) + 0.4):
            continue
        middle = (span.start_seconds + span.end_seconds) / 2 * clock.per_second
        _write_number(axes, middle, at + height / 2, said, span.action.kind, fontsize=7)


def _write_number(
    axes: Axes, x: float, y: float, text: str, kind: Kind, *, fontsize: float
) -> None:
    colour = "white" if kind in DARK_KINDS else "black"
    axes.text(x, y, text, ha="center", va="center", fontsize=fontsize, color=colour)


def _numbered(schedule: Schedule, unit: int) -> str:
    action = Action("F", 0, unit)
    micro_batch, chunk = schedule.micro_batch(action), schedule.chunk(action)
    return str(micro_batch) if schedule.num_chunks == 1 else f"{micro_batch}.{chunk}"


def _draw_bars(
    axes: Axes, bars: Iterable[Span | Bar], at: float, height: float, clock: Clock, **style: Any
) -> None:
    places = [clock.place(bar.start_seconds, bar.end_seconds) for bar in bars]
    axes.broken_barh(places, (at, height), **style)


def label_rows(axes: Axes, ticks: Mapping[float, str], bottom: float, *, small: float) -> None:
    """Labels rows from the top down; those that name a rank are larger."""
    axes.set_ylim(bottom, -0.2)
    axes.set_yticks(list(ticks), list(ticks.values()))
    for label in axes.get_yticklabels():
        label.set_fontsize(9 if label.get_text().startswith("rank") else small)
    axes.tick_params(axis="y", length=0)


def _draw_held(axes: Axes, schedule: Schedule, timeline: Timeline, clock: Clock) -> None:
    tiers = [f"{rank}.device" for rank in range(schedule.num_ranks)]
    if set(tiers) <= set(timeline.tiers):
        most = max(timeline.peak(tier).num_bytes for tier in tiers)
        unit, size = byte_unit(most)
        curves = [timeline.curve(tier) for tier in tiers]
        axes.set_title("bytes on each rank's device", loc="left", size=10)
    else:
        unit, size = "units", 1
        curves = alive_units(schedule, timeline)
        axes.set_title("units alive on each rank", loc="left", size=10)
    axes.set_ylabel(unit)
    last = max(schedule.num_ranks - 1, 1)
    for rank, curve in enumerate(curves):
        instants = thin_out(curve, timeline.end_seconds)
        held = dict(curve)
        times = [*(at * clock.per_second for at in instants), clock.end]
        values = [held[at] / size for at in instants]
        axes.step(
            times,
            [*values, values[-1]],
            where="post",
            color=mixed(BLUE, 0.7 * rank / last),
            linewidth=1.3,
            label=f"rank {rank}: {max(values):.3g}",
        )
    axes.set_ylim(bottom=0.0)
    add_legend(axes, axes.get_legend_handles_labels()[0])


def write_title(axes: Axes, title: str, lines: Sequence[Sequence[str]]) -> None:
    """Fills `axes` with the picture's title and lines of facts below it."""
    axes.set_axis_off()
    # A dollar sign in a name must not begin a formula.
    axes.text(0.0, 0.75, title, fontsize=15, fontweight="bold", parse_math=False)
    for index, parts in enumerate(lines):
        place = 0.2 if len(lines) == 1 else 0.42 - 0.32 * index
        text = "  \N{MIDDLE DOT}  ".join(parts)
        axes.text(0.0, place, text, fontsize=12 - len(lines), color=INK)


def share_time_axis(panels: Sequence[Axes], clock: Clock) -> None:
    """Gives all panels the same time axis, with labels below the last one only."""
    for axes in panels:
        axes.set_xlim(0.0, clock.end)
        axes.tick_params(axis="x", labelbottom=axes is panels[-1])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#E5E5E5", linewidth=0.6)
        axes.set_axisbelow(True)
    panels[-1].set_xlabel(f"time ({clock.unit})")


def add_legend(axes: Axes, handles: Sequence[Artist]) -> None:
    """Puts a legend to the right of `axes`."""
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.005, 1.0),
        borderaxespad=0.0,
        frameon=False,
        fontsize=8,
        ncols=1 + len(handles) // 12,
    )


def kind_handles(kinds: set[Kind]) -> list[Artist]:
    """Makes a legend's entries for kinds of action."""
    from matplotlib.patches import Patch

    return [
        Patch(facecolor=KIND_COLOURS[kind], label=name)
        for kind, name in KIND_NAMES.items()
        if kind in kinds
    ]


_MAX_NUMBERS = 45
_NARROWEST_NUMBERED = 1 / 60
_MAX_BUDGET_RATIO = 3.0
_WAITING: dict[str, Any] = {
    "facecolor": "white",
    "edgecolor": RED,
    "hatch": "/////",
    "linewidth": 0,
}
"""Style of the time in which a resource waits."""


def draw_plan(
    plan: Plan,
    timeline: Timeline,
    *,
    budgets: Mapping[str, int | None],
    path: str | Path,
    title: str,
) -> None:
    """Draws a plan into a file: modes by chunk, memory of each tier over time, resources over time.

    Budgets are dashed lines; None where unknown. The timeline is the simulated step, or a measured
    one.

    A bar is paler where it has gaps too fine to be seen. A budget more than three times the peak is
    only named.

    Raises:
        ConfigError, OSError: as `draw_schedule`.
    """
    tiers = [tier for tier in timeline.tiers if timeline.peak(tier).num_bytes > 0]
    resources = [name for name in timeline.resources if any(True for _ in timeline.spans(name))]
    memory_inches = [2.2 if at == 0 else 1.1 for at in range(len(tiers))]
    inches = [0.6, 2.2, *memory_inches, 0.2 + 0.4 * max(len(resources), 1)]
    height = sum(inches) + 0.8 + 0.35 * len(inches)
    figure = new_figure(path, height_inches=height, what="a plan")
    grid = figure.subplots(len(inches), 1, squeeze=False, height_ratios=inches)
    head, modes, *memory, below = grid[:, 0]
    clock = Clock.of(timeline)
    rows = "" if plan.batch_rows == 1 else f"{plan.batch_rows} rows of "
    facts = [
        rows + format_tokens(plan.total_tokens),
        format_lengths(plan.chunk_lengths),
        f"{plan.num_layers} layers",
    ]
    if timeline.end_seconds > 0:
        tokens_per_second = plan.batch_rows * plan.total_tokens / timeline.end_seconds
        facts += [f"{clock.say(timeline.end_seconds)} a step", f"{tokens_per_second:,.0f} tokens/s"]
    write_title(head, title, [facts])
    _draw_modes(modes, plan)
    for axes, tier in zip(memory, tiers, strict=True):
        _draw_memory(axes, timeline, tier, budget_bytes=budgets.get(tier), clock=clock)
    _draw_resources(below, timeline, resources, clock)
    share_time_axis([*memory, below], clock)
    figure.savefig(path, dpi=150)


def _draw_modes(axes: Axes, plan: Plan) -> None:
    axes.set_title("layers of each chunk (numbered) by what becomes of them", loc="left", size=10)
    axes.set_xlim(0, plan.total_tokens)
    axes.set_ylim(0, plan.num_layers)
    axes.set_xlabel("position in the sequence (tokens)")
    axes.set_ylabel("layers")
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    _number_chunks(axes, plan)
    if not plan.training:
        text = "evaluation: nothing is kept for backward"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center")
        return
    starts = [start for start, _ in plan.bounds]
    bottoms = [0] * plan.num_chunks
    for mode in (mode_of(saved, tier) for tier in TIERS for saved in SAVED):
        counts = [row.count(mode) for row in plan.layer_modes]
        if any(counts):
            axes.bar(
                starts,
                counts,
                width=plan.chunk_lengths,
                bottom=bottoms,
                align="edge",
                color=mode_colour(mode),
                edgecolor="white",
                linewidth=0.8 if plan.num_chunks <= 32 else 0.3,
                label=str(mode),
            )
        bottoms = [bottom + count for bottom, count in zip(bottoms, counts, strict=True)]
    add_legend(axes, axes.get_legend_handles_labels()[0][::-1])  # top of the stack first


def _number_chunks(axes: Axes, plan: Plan) -> None:
    """Numbers the chunks along the top, without numbers that would touch the previous one."""
    places: dict[int, float] = {}
    last_tokens = float("-inf")
    for chunk, (start, end) in enumerate(plan.bounds):
        middle_tokens = (start + end) / 2
        if middle_tokens - last_tokens >= plan.total_tokens / _MAX_NUMBERS:
            places[chunk] = last_tokens = middle_tokens
    top = axes.secondary_xaxis("top")
    top.set_xticks(list(places.values()), [str(chunk) for chunk in places], fontsize=8)
    top.tick_params(length=0, pad=1)


def _draw_memory(
    axes: Axes, timeline: Timeline, tier: str, *, budget_bytes: int | None, clock: Clock
) -> None:
    peak = timeline.peak(tier)
    unit, unit_bytes = byte_unit(peak.num_bytes)
    instants = thin_out(timeline.curve(tier), timeline.end_seconds)
    # Each value is drawn up to the next instant, the last one up to the end of the figure.
    times = [*(at * clock.per_second for at in instants), clock.end]
    top = [0.0] * len(times)
    for name, colour, held_bytes in stack_causes(timeline, tier, instants):
        bottom, held_bytes = top, [*held_bytes, held_bytes[-1]]
        top = [base + held / unit_bytes for base, held in zip(bottom, held_bytes, strict=True)]
        axes.fill_between(times, bottom, top, step="post", color=colour, linewidth=0, label=name)
    axes.step(times, top, where="post", color=INK, linewidth=0.4)
    words = f"{tier}: peak {format_bytes(peak.num_bytes)}"
    highest_bytes = peak.num_bytes
    over = False
    if budget_bytes is not None:
        over = peak.num_bytes > budget_bytes
        words += f"{', over the budget' if over else ''} of {format_bytes(budget_bytes)}"
        # A budget far above the peak would compress the curves to a thin band.
        if budget_bytes <= _MAX_BUDGET_RATIO * peak.num_bytes:
            highest_bytes = max(highest_bytes, budget_bytes)
            budget = budget_bytes / unit_bytes
            axes.axhline(budget, color="black", linestyle="--", linewidth=1.4, label="budget")
        else:
            words += " (above the panel)"
    place = (peak.seconds * clock.per_second, peak.num_bytes / unit_bytes)
    axes.plot(*place, marker="v", color=INK, markersize=6, clip_on=False)
    axes.set_title(words, loc="left", size=10, color=RED if over else "black")
    axes.set_ylabel(unit)
    axes.set_ylim(0, 1.12 * highest_bytes / unit_bytes)
    add_legend(axes, axes.get_legend_handles_labels()[0][::-1])  # top of the stack first


def _draw_resources(axes: Axes, timeline: Timeline, resources: Sequence[str], clock: Clock) -> None:
    from matplotlib.patches import Patch

    finest_seconds = timeline.end_seconds * FINEST
    kinds: set[Kind] = set()
    waits: dict[str, float] = {}
    for row, resource in enumerate(resources):
        drawn = join_spans(timeline.spans(resource), finest_seconds)
        here: set[Kind] = {bar.kind for bar in drawn}
        kinds |= here
        colours = [bar.colour for bar in drawn]
        _draw_bars(axes, drawn, row - 0.4, 0.8, clock, facecolors=colours, linewidth=0)
        for bar in longest_bars(drawn, timeline.end_seconds * _NARROWEST_NUMBERED):
            start, length = clock.place(bar.start_seconds, bar.end_seconds)
            _write_number(axes, start + length / 2, row, str(bar.unit), bar.kind, fontsize=8)
        if here & COMPUTE_KINDS:
            waits[resource] = timeline.stall_seconds(resource)
            stalls = timeline.stalls(resource, over_seconds=finest_seconds)
            places = [clock.place(s.start_seconds, s.start_seconds + s.seconds) for s in stalls]
            axes.broken_barh(places, (row - 0.4, 0.8), **_WAITING)
    end_seconds = timeline.end_seconds or 1.0
    labels = [
        f"{resource}\n{timeline.busy_seconds(resource) / end_seconds:.0%} busy"
        for resource in resources
    ]
    axes.set_yticks(range(len(resources)), labels, fontsize=9)
    axes.set_ylim(max(len(resources), 1) - 0.5, -0.5)
    said = ", ".join(
        f"{resource} waits {clock.say(seconds)}" for resource, seconds in waits.items()
    )
    # With many ranks, the title does not name stalls.
    axes.set_title(
        f"resources: {said}" if 1 <= len(waits) <= 3 else "resources", loc="left", size=10
    )
    handles = kind_handles(kinds)
    if any(waits.values()):
        handles.append(Patch(label="waits", **_WAITING))
    add_legend(axes, handles)


def mode_colour(mode: ActivationMode) -> str:
    """Returns the tier's colour, paler the fewer activations are saved."""
    paler = 0.15 * (mode.saved == "hidden")  # than what its bytes are counted with
    return mixed(TIERS[mode.tier].colour, CAUSE_OF_SAVED[mode.saved].paleness + paler)


class Layer(NamedTuple):
    """Bytes of one cause over time, as one layer of a stacked chart."""

    name: str
    """Label of the cause."""

    colour: str
    """Fill colour."""

    held_bytes: list[int]
    """Bytes at each of the requested times."""


def stack_causes(timeline: Timeline, tier: str, instants: Sequence[float]) -> list[Layer]:
    """Returns each cause's bytes at the given times, lowest layer first."""
    curves = timeline.curves_by_cause(tier)
    # Several ranks' tiers are "0.device", "1.device" and so on.
    tier_colour = TIERS[tier.rpartition(".")[2]].colour
    layers: list[Layer] = []
    # Lasting bytes come below temporary ones, so that the bottom of the stack is steady.
    for cause in sorted(map(Cause, curves), key=list(Cause).index):
        times = [seconds for seconds, _ in curves[cause]]
        held_bytes = [curves[cause][bisect_right(times, at) - 1][1] for at in instants]
        fill = cause.colour or mixed(tier_colour, cause.paleness)
        layers.append(Layer(cause.label, fill, held_bytes))
    return layers
