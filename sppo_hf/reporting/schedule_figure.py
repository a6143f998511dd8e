"""The picture of a schedule over ranks: what each rank does over time, and what it holds.

Also of a measured step over the simulation of its schedule, on one axis of time. Imports matplotlib
only to draw, and leaves its global state alone. Pictures of one rank's plan are
`sppo_hf.reporting.plan_figure`.
"""

# pyright: basic
# matplotlib leaves most keyword arguments untyped, which the strict check counts as mistakes.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sppo_hf.errors import ConfigError
from sppo_hf.reporting import gantt as bars
from sppo_hf.schedule.actions import KIND_NAMES, Action, Kind
from sppo_hf.schedule.measured_timeline import Difference
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import alive_units, bubble_fraction
from sppo_hf.schedule.timeline import COMPUTE, Timeline

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


ENDINGS = (".png", ".svg", ".pdf")
"""Endings of the files that can be drawn."""

_WIDTH_INCHES = 13.0
# A number needs about so much of the width per character, at font size 7.
_CHARACTER = 1 / 210
COMPUTE_HEIGHT = 0.8
_BESIDE_HEIGHT = 0.28
# Of a pair of rows, measured and simulated.
_MEASURED_HEIGHT = 0.62
_SIMULATED_HEIGHT = 0.42
_PAIR_HEIGHT = 1.35


def draw_schedule(schedule: Schedule, timeline: Timeline, *, path: str | Path, title: str) -> None:
    """Draws a simulated or measured schedule into a file.

    Above, a row for each rank: compute, numbered by micro-batch (and chunk, where there are
    several), and below it the resources that run beside it. Forwards of odd micro-batches are
    paler. Below, the bytes on each rank's device over time where the timeline has them, otherwise
    the units that are alive.

    Raises:
        ConfigError: matplotlib is missing, or the path's ending is none of `ENDINGS`.
        OSError: the file cannot be written.
    """
    rows = _rows(schedule, timeline)
    height = sum(_row_height(resources) for resources in rows)
    inches = [0.6, 0.3 + 0.42 * height, 2.2]
    figure = new_figure(path, height_inches=sum(inches) + 1.2)
    head, resources, held = figure.subplots(3, 1, height_ratios=inches)
    clock = bars.Clock.of(timeline)
    _write_title(head, schedule, timeline, clock=clock, title=title)
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
    """Makes an empty figure for a file, apart from matplotlib's global state.

    Args:
        path: the file that it will be written to.
        height_inches: its height.
        width_inches: its width; pictures over time are all as wide.
        what: is drawn, for messages.

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
    """Each rank's resources, compute first."""
    rows: list[list[str]] = []
    for rank in range(schedule.num_ranks):
        compute = f"{rank}{COMPUTE}"
        own = [
            resource for resource in timeline.resources if resource.partition(".")[0] == str(rank)
        ]
        # Receives take no time of their own: their sends are in the picture.
        beside = [
            resource
            for resource in own
            if resource != compute and timeline.busy_seconds(resource) > 0
        ]
        rows.append([compute, *beside])
    return rows


def _row_height(resources: Sequence[str]) -> float:
    return 1.0 + _BESIDE_HEIGHT * (len(resources) - 1)


def _write_title(
    axes: Axes, schedule: Schedule, timeline: Timeline, *, clock: bars.Clock, title: str
) -> None:
    said = [
        f"{schedule.num_ranks} ranks, {schedule.num_stages} stages",
        f"{schedule.num_micro_batches} micro-batches of {schedule.num_chunks} chunks",
        f"{clock.say(timeline.end_seconds)} a step",
        f"{bubble_fraction(timeline):.1%} idle",
    ]
    write_title(axes, title, [said])


def _draw_rows(
    axes: Axes,
    schedule: Schedule,
    timeline: Timeline,
    *,
    rows: Sequence[Sequence[str]],
    clock: bars.Clock,
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
            _draw_beside(axes, timeline, resource=resource, at=place, clock=clock)
        at += _row_height(resources)
    axes.set_ylim(at, -0.2)
    axes.set_yticks(list(ticks), list(ticks.values()))
    for label in axes.get_yticklabels():
        label.set_fontsize(9 if label.get_text().startswith("rank") else 6)
    axes.tick_params(axis="y", length=0)
    add_legend(axes, kind_handles(kinds))


def draw_compute(
    axes: Axes,
    schedule: Schedule,
    timeline: Timeline,
    *,
    resource: str,
    at: float,
    clock: bars.Clock,
    height: float = COMPUTE_HEIGHT,
) -> None:
    """Draws the bars of a rank's compute, from `at` downwards, with their units' numbers."""
    spans = list(timeline.spans(resource))
    colours = [
        bars.mixed(
            bars.KIND_COLOURS[span.action.kind], 0.3 * (schedule.micro_batch(span.action) % 2)
        )
        for span in spans
    ]
    axes.broken_barh(
        [clock.place(span.start_seconds, span.end_seconds) for span in spans],
        (at, height),
        facecolors=colours,
        edgecolors="white",
        # Edges would cover bars that are hardly wider.
        linewidth=0.5 if len(spans) <= 250 else 0.0,
    )
    for span in spans:
        said = _numbered(schedule, span.action.unit)
        length = span.end_seconds - span.start_seconds
        if length < clock.end / clock.per_second * _CHARACTER * (len(said) + 0.4):
            continue
        middle = (span.start_seconds + span.end_seconds) / 2 * clock.per_second
        axes.text(
            middle,
            at + height / 2,
            said,
            ha="center",
            va="center",
            fontsize=7,
            color="white" if span.action.kind in bars.DARK_KINDS else "black",
        )


def _numbered(schedule: Schedule, unit: int) -> str:
    action = Action("F", 0, unit)
    micro_batch, chunk = schedule.micro_batch(action), schedule.chunk(action)
    return str(micro_batch) if schedule.num_chunks == 1 else f"{micro_batch}.{chunk}"


def _draw_beside(
    axes: Axes, timeline: Timeline, *, resource: str, at: float, clock: bars.Clock
) -> None:
    spans = list(timeline.spans(resource))
    axes.broken_barh(
        [clock.place(span.start_seconds, span.end_seconds) for span in spans],
        (at, _BESIDE_HEIGHT - 0.08),
        facecolors=[bars.KIND_COLOURS[span.action.kind] for span in spans],
        linewidth=0,
    )


def _draw_held(axes: Axes, schedule: Schedule, timeline: Timeline, clock: bars.Clock) -> None:
    tiers = [f"{rank}.device" for rank in range(schedule.num_ranks)]
    if set(tiers) <= set(timeline.tiers):
        most = max(timeline.peak(tier).num_bytes for tier in tiers)
        unit, size = bars.byte_unit(most)
        curves = [timeline.curve(tier) for tier in tiers]
        axes.set_title("bytes on each rank's device", loc="left", size=10)
    else:
        unit, size = "units", 1
        curves = alive_units(schedule, timeline)
        axes.set_title("units alive on each rank", loc="left", size=10)
    axes.set_ylabel(unit)
    last = max(schedule.num_ranks - 1, 1)
    for rank, curve in enumerate(curves):
        instants = bars.thin_out(curve, timeline.end_seconds)
        held = dict(curve)
        times = [*(at * clock.per_second for at in instants), clock.end]
        values = [held[at] / size for at in instants]
        axes.step(
            times,
            [*values, values[-1]],
            where="post",
            color=bars.mixed(bars.BLUE, 0.7 * rank / last),
            linewidth=1.3,
            label=f"rank {rank}: {max(values):.3g}",
        )
    axes.set_ylim(bottom=0.0)
    add_legend(axes, None)


def write_title(axes: Axes, title: str, lines: Sequence[Sequence[str]]) -> None:
    """Fills `axes` with the picture's title and, below it, lines of what is to be known."""
    axes.set_axis_off()
    # A dollar sign in a name begins no formula.
    axes.text(0.0, 0.75, title, fontsize=15, fontweight="bold", parse_math=False)
    for index, parts in enumerate(lines):
        place = 0.2 if len(lines) == 1 else 0.42 - 0.32 * index
        text = "  \N{MIDDLE DOT}  ".join(parts)
        axes.text(0.0, place, text, fontsize=12 - len(lines), color=bars.INK)


def share_time_axis(panels: Sequence[Axes], clock: bars.Clock) -> None:
    """Puts panels above each other on one time axis, which is written out once, below the last."""
    for axes in panels:
        axes.set_xlim(0.0, clock.end)
        axes.tick_params(axis="x", labelbottom=axes is panels[-1])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#E5E5E5", linewidth=0.6)
        axes.set_axisbelow(True)
    panels[-1].set_xlabel(f"time ({clock.unit})")


def add_legend(axes: Axes, handles: Sequence[Artist] | None) -> None:
    """Puts a legend to the right of `axes`: of `handles`, or of what it has itself."""
    handles = axes.get_legend_handles_labels()[0] if handles is None else handles
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
        Patch(facecolor=bars.KIND_COLOURS[kind], label=name)
        for kind, name in KIND_NAMES.items()
        if kind in kinds
    ]


def draw_comparison(
    schedule: Schedule,
    *,
    measured: Timeline,
    simulated: Timeline,
    difference: Difference,
    path: str | Path,
    title: str,
) -> None:
    """Draws a measured step and its simulation into a file.

    A pair of rows for each rank: measured above, simulated below. Dashed lines mark both ends.

    Raises:
        ConfigError: matplotlib is missing, or the path's ending is not one that can be drawn.
        OSError: the file cannot be written.
    """
    rows_inches = 0.75 * schedule.num_ranks + 0.5
    figure = new_figure(path, height_inches=rows_inches + 1.7)
    head, axes = figure.subplots(2, 1, height_ratios=[0.9, rows_inches])
    longer = max(measured, simulated, key=lambda timeline: timeline.end_seconds)
    clock = bars.Clock.of(longer)
    write_title(head, title, _said(measured, simulated, difference, clock))
    kinds: set[Kind] = set()
    ticks: dict[float, str] = {}
    for rank in range(schedule.num_ranks):
        resource, top = f"{rank}{COMPUTE}", rank * _PAIR_HEIGHT
        below = top + _MEASURED_HEIGHT + 0.06
        for timeline, at, height in (
            (measured, top, _MEASURED_HEIGHT),
            (simulated, below, _SIMULATED_HEIGHT),
        ):
            draw_compute(
                axes, schedule, timeline, resource=resource, at=at, clock=clock, height=height
            )
        ticks[top + _MEASURED_HEIGHT / 2] = f"rank {rank}, measured"
        ticks[below + _SIMULATED_HEIGHT / 2] = "simulated"
        kinds |= {span.action.kind for span in measured.spans(resource)}
    bottom = schedule.num_ranks * _PAIR_HEIGHT - 0.2
    ends = [
        axes.axvline(
            timeline.end_seconds * clock.per_second,
            color=colour,
            linestyle="--",
            linewidth=0.9,
            label=f"end, {name}",
        )
        for name, timeline, colour in (
            ("measured", measured, bars.INK),
            ("simulated", simulated, bars.GREY),
        )
    ]
    axes.set_ylim(bottom, -0.2)
    axes.set_yticks(list(ticks), list(ticks.values()))
    for label in axes.get_yticklabels():
        label.set_fontsize(9 if "measured" in label.get_text() else 7)
    axes.tick_params(axis="y", length=0)
    share_time_axis([axes], clock)
    axes.set_xlim(0.0, clock.end * 1.005)
    add_legend(axes, [*kind_handles(kinds), *ends])
    figure.savefig(path, dpi=150)


def _said(
    measured: Timeline, simulated: Timeline, difference: Difference, clock: bars.Clock
) -> list[list[str]]:
    parts = (
        ("uneven units", difference.uneven_seconds),
        ("host between units", difference.between_seconds),
        ("messages", difference.message_seconds),
    )
    named = [
        f"{name} {clock.say(timeline.end_seconds)} a step, {bubble_fraction(timeline):.1%} idle"
        for name, timeline in (("measured", measured), ("simulated", simulated))
    ]
    signs = [f"{name} {seconds * clock.per_second:+.3g}" for name, seconds in parts]
    return [named, [f"the difference in {clock.unit}: {signs[0]}", *signs[1:]]]
