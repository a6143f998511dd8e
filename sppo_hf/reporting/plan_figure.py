"""The picture of a plan: what each chunk does, the bytes of every tier, the resources over time.

Imports matplotlib only to draw, and leaves its global state alone.
"""

# pyright: basic
# matplotlib leaves most keyword arguments untyped, which the strict check counts as mistakes.

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sppo_hf.planning.activation_modes import SAVED, ActivationMode, mode_of
from sppo_hf.planning.causes import OF_SAVED, Cause
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.tiers import TIERS
from sppo_hf.reporting import gantt as bars
from sppo_hf.reporting.plan_tables import format_lengths, format_tokens
from sppo_hf.reporting.schedule_figure import (
    add_legend,
    kind_handles,
    new_figure,
    share_time_axis,
    write_title,
)
from sppo_hf.rules import format_bytes
from sppo_hf.schedule.actions import COMPUTE_KINDS, Kind
from sppo_hf.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_MOST_NUMBERS = 45
_NARROWEST_NUMBERED = 1 / 60
_MOST_BUDGET = 3.0


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
        ConfigError: matplotlib is missing, or the path's ending is none of `ENDINGS`.
        OSError: the file cannot be written.
    """
    tiers = [tier for tier in timeline.tiers if timeline.peak(tier).num_bytes > 0]
    resources = [
        resource
        for resource in timeline.resources
        if next(timeline.spans(resource), None) is not None
    ]
    memory_inches = [2.2 if at == 0 else 1.1 for at in range(len(tiers))]
    inches = [0.6, 2.2, *memory_inches, 0.2 + 0.4 * max(len(resources), 1)]
    height = sum(inches) + 0.8 + 0.35 * len(inches)
    figure = new_figure(path, height_inches=height, what="a plan")
    grid = figure.subplots(len(inches), 1, squeeze=False, height_ratios=inches)
    head, modes, *memory, below = grid[:, 0]
    clock = bars.Clock.of(timeline)
    _write_title(head, plan, clock, timeline=timeline, title=title)
    _draw_modes(modes, plan)
    for axes, tier in zip(memory, tiers, strict=True):
        _draw_memory(axes, timeline, tier, budget_bytes=budgets.get(tier), clock=clock)
    _draw_resources(below, timeline, resources, clock)
    share_time_axis([*memory, below], clock)
    figure.savefig(path, dpi=150)


def _write_title(
    axes: Axes, plan: Plan, clock: bars.Clock, *, timeline: Timeline, title: str
) -> None:
    rows = "" if plan.batch_rows == 1 else f"{plan.batch_rows} rows of "
    said = [
        rows + format_tokens(plan.total_tokens),
        format_lengths(plan.chunk_lengths),
        f"{plan.num_layers} layers",
    ]
    if timeline.end_seconds > 0:
        tokens_per_second = plan.batch_rows * plan.total_tokens / timeline.end_seconds
        said += [f"{clock.say(timeline.end_seconds)} a step", f"{tokens_per_second:,.0f} tokens/s"]
    write_title(axes, title, [said])


def _draw_modes(axes: Axes, plan: Plan) -> None:
    axes.set_title("layers of each chunk (numbered) by what becomes of them", loc="left", size=10)
    axes.set_xlim(0, plan.total_tokens)
    axes.set_ylim(0, plan.num_layers)
    axes.set_xlabel("position in the sequence (tokens)")
    axes.set_ylabel("layers")
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    _number_chunks(axes, plan)
    if not plan.training:
        axes.text(0.5, 0.5, "evaluation: no frame is kept", transform=axes.transAxes, ha="center")
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
    add_legend(axes, _stacked(axes))


def _number_chunks(axes: Axes, plan: Plan) -> None:
    """Numbers the chunks along the top, leaving out those that would touch the one before."""
    places: dict[int, float] = {}
    last_tokens = float("-inf")
    for chunk, (start, end) in enumerate(plan.bounds):
        middle_tokens = (start + end) / 2
        if middle_tokens - last_tokens >= plan.total_tokens / _MOST_NUMBERS:
            places[chunk] = last_tokens = middle_tokens
    top = axes.secondary_xaxis("top")
    top.set_xticks(list(places.values()), [str(chunk) for chunk in places], fontsize=8)
    top.tick_params(length=0, pad=1)


def _stacked(axes: Axes) -> list[Artist]:
    """What is drawn in `axes`, for its legend, top of the stack first."""
    return axes.get_legend_handles_labels()[0][::-1]


def _draw_memory(
    axes: Axes, timeline: Timeline, tier: str, *, budget_bytes: int | None, clock: bars.Clock
) -> None:
    peak = timeline.peak(tier)
    unit, unit_bytes = bars.byte_unit(peak.num_bytes)
    instants = bars.thin_out(timeline.curve(tier), timeline.end_seconds)
    # Steps are drawn from each instant to the next, the last one to the end of the picture.
    times = [*(at * clock.per_second for at in instants), clock.end]
    top = [0.0] * len(times)
    for name, colour, held_bytes in stack_causes(timeline, tier, instants):
        bottom, held_bytes = top, [*held_bytes, held_bytes[-1]]
        top = [base + held / unit_bytes for base, held in zip(bottom, held_bytes, strict=True)]
        axes.fill_between(times, bottom, top, step="post", color=colour, linewidth=0, label=name)
    axes.step(times, top, where="post", color=bars.INK, linewidth=0.4)
    words = f"{tier}: peak {format_bytes(peak.num_bytes)}"
    highest_bytes = peak.num_bytes
    over = False
    if budget_bytes is not None:
        over = peak.num_bytes > budget_bytes
        words += f"{', over the budget' if over else ''} of {format_bytes(budget_bytes)}"
        # A budget far above would press what is held flat against the ground.
        if budget_bytes <= _MOST_BUDGET * peak.num_bytes:
            highest_bytes = max(highest_bytes, budget_bytes)
            budget = budget_bytes / unit_bytes
            axes.axhline(budget, color="black", linestyle="--", linewidth=1.4, label="budget")
        else:
            words += " (above the panel)"
    place = (peak.seconds * clock.per_second, peak.num_bytes / unit_bytes)
    axes.plot(*place, marker="v", color=bars.INK, markersize=6, clip_on=False)
    axes.set_title(words, loc="left", size=10, color=bars.RED if over else "black")
    axes.set_ylabel(unit)
    axes.set_ylim(0, 1.12 * highest_bytes / unit_bytes)
    add_legend(axes, _stacked(axes))


def _draw_resources(
    axes: Axes, timeline: Timeline, resources: Sequence[str], clock: bars.Clock
) -> None:
    finest_seconds = timeline.end_seconds * bars.FINEST
    kinds: set[Kind] = set()
    waits: dict[str, float] = {}
    for row, resource in enumerate(resources):
        drawn = bars.join_spans(timeline.spans(resource), finest_seconds)
        here: set[Kind] = {bar.kind for bar in drawn}
        kinds |= here
        axes.broken_barh(
            [clock.place(bar.start_seconds, bar.end_seconds) for bar in drawn],
            (row - 0.4, 0.8),
            facecolors=[bar.colour for bar in drawn],
            linewidth=0,
        )
        for bar in bars.longest_bars(drawn, timeline.end_seconds * _NARROWEST_NUMBERED):
            start, length = clock.place(bar.start_seconds, bar.end_seconds)
            colour = "white" if bar.kind in bars.DARK_KINDS else "black"
            place = {"ha": "center", "va": "center", "fontsize": 8}
            axes.text(start + length / 2, row, str(bar.unit), color=colour, **place)
        if here & COMPUTE_KINDS:
            waits[resource] = timeline.stall_seconds(resource)
            _draw_stalls(axes, row, timeline, resource=resource, clock=clock)
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
    # Of many ranks each, the waits are left to the eye.
    axes.set_title(
        f"resources: {said}" if 1 <= len(waits) <= 3 else "resources", loc="left", size=10
    )
    add_legend(axes, _resource_handles(kinds, waited=any(waits.values())))


def _draw_stalls(
    axes: Axes, row: int, timeline: Timeline, *, resource: str, clock: bars.Clock
) -> None:
    stalls = timeline.stalls(resource, over_seconds=timeline.end_seconds * bars.FINEST)
    axes.broken_barh(
        [clock.place(stall.start_seconds, stall.start_seconds + stall.seconds) for stall in stalls],
        (row - 0.4, 0.8),
        facecolors="white",
        edgecolor=bars.RED,
        hatch="/////",
        linewidth=0,
    )


def _resource_handles(kinds: set[Kind], *, waited: bool) -> list[Artist]:
    from matplotlib.patches import Patch

    handles = kind_handles(kinds)
    if waited:
        style = {"facecolor": "white", "edgecolor": bars.RED, "hatch": "/////", "linewidth": 0}
        handles.append(Patch(label="waits", **style))
    return handles


def mode_colour(mode: ActivationMode) -> str:
    """Returns the tier's colour, paler the less of the frame is saved."""
    paler = 0.15 * (mode.saved == "hidden")  # than what its bytes are counted with
    return bars.mixed(TIERS[mode.tier].colour, OF_SAVED[mode.saved].paleness + paler)


class Layer(NamedTuple):
    """One cause's part of a stack of bytes over time."""

    name: str
    """The cause, as a person reads it."""

    colour: str
    """What it is filled with."""

    held_bytes: list[int]
    """Its bytes at each instant asked for."""


def stack_causes(timeline: Timeline, tier: str, instants: Sequence[float]) -> list[Layer]:
    """Reads off each cause's bytes at each instant, lowest layer first."""
    curves = timeline.curves_by_cause(tier)
    # Several ranks' tiers are "0.device", "1.device" and so on.
    tier_colour = TIERS[tier.rpartition(".")[2]].colour
    layers: list[Layer] = []
    # What lasts lies below what passes, so that the bottom of the stack lies still.
    for cause in sorted(map(Cause, curves), key=list(Cause).index):
        times = [seconds for seconds, _ in curves[cause]]
        held_bytes = [curves[cause][bisect_right(times, at) - 1][1] for at in instants]
        fill = cause.colour or bars.mixed(tier_colour, cause.paleness)
        layers.append(Layer(cause.label, fill, held_bytes))
    return layers
