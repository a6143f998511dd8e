"""The picture of a measured step over the simulation of its schedule, on one axis of time."""

# pyright: basic
# matplotlib leaves most keyword arguments untyped, which the strict check counts as mistakes.

from __future__ import annotations

from pathlib import Path

from sppo_hf.reporting import gantt as bars
from sppo_hf.reporting.schedule_figure import (
    add_legend,
    draw_compute,
    kind_handles,
    new_figure,
    share_time_axis,
    write_title,
)
from sppo_hf.schedule.actions import Kind
from sppo_hf.schedule.measured_timeline import Difference
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate_pipeline import bubble_fraction
from sppo_hf.schedule.timeline import COMPUTE, Timeline

_MEASURED_HEIGHT = 0.62
_SIMULATED_HEIGHT = 0.42
_ROW_HEIGHT = 1.35


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

    Args:
        schedule: what was run.
        measured: see `measured_timeline.measured_timeline`.
        simulated: with `measured_timeline.mean_seconds`.
        difference: what they differ by, told in words.
        path: file to write; its ending says what kind.
        title: the schedule's name and size, say.

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
        lane, top = f"{rank}{COMPUTE}", rank * _ROW_HEIGHT
        below = top + _MEASURED_HEIGHT + 0.06
        for timeline, at, height in (
            (measured, top, _MEASURED_HEIGHT),
            (simulated, below, _SIMULATED_HEIGHT),
        ):
            draw_compute(axes, schedule, timeline, lane=lane, at=at, clock=clock, height=height)
        ticks[top + _MEASURED_HEIGHT / 2] = f"rank {rank}, measured"
        ticks[below + _SIMULATED_HEIGHT / 2] = "simulated"
        kinds |= {span.action.kind for span in measured.spans(lane)}
    bottom = schedule.num_ranks * _ROW_HEIGHT - 0.2
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
