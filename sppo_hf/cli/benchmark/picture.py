"""The picture of a benchmark: tokens/s and peak bytes against length, one line per contender.

Reads rows only. Imports matplotlib when it draws, and leaves its global state alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sppo_hf.cli.benchmark.contenders import BASES, DEFAULTS, LIGER, TILED, parse
from sppo_hf.cli.benchmark.results import Row, best_environment, groups
from sppo_hf.cli.benchmark.table import describe_job
from sppo_hf.errors import ConfigError
from sppo_hf.rules import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE_NAME = "results.png"

_MARGIN = 1.3
_NARROW = 5.0
_FARTHEST_LIMIT = 3.0

# One colour and marker per contender, whoever else is there: pictures of two days compare.
_COLOURS = {
    "plain": "#777777",
    "checkpointing": "#d55e00",
    "checkpointing-default": "#a6761d",
    "checkpointing-offload": "#e69f00",
    "trl-offload": "#cc79a7",
    "trl-long": "#8a2e6b",
    "unsloth": "#66a61e",
    "alst": "#8c564b",
    "accelerate-cp": "#17becf",
    "sppo-none": "#9ecae1",
    "sppo-full": "#6baed6",
    "sppo-sppo": "#3182bd",
    "sppo-auto": "#08306b",
    "ideal": "#009e73",
}
_STYLES = {"": "-", LIGER: ":", TILED: "--"}
_MARKERS = dict(zip(BASES, "osXD^ph8Hv<>*P", strict=True))


@dataclass(frozen=True, slots=True)
class Line:
    """What is drawn for one contender."""

    contender: str
    points: tuple[tuple[int, float], ...]
    """Tokens and value, by tokens."""
    extrapolated: frozenset[int]
    """Lengths whose value is extrapolated."""


def lines(rows: Sequence[Row], value: str) -> list[Line]:
    """Returns a line for every contender that trained at a length.

    Args:
        rows: of one group.
        value: field of `Numbers`.
    """
    found = []
    order = {name: index for index, name in enumerate(DEFAULTS)}
    names = dict.fromkeys(row.job.contender for row in rows)
    for name in sorted(names, key=lambda n: order.get(n, len(order))):
        own = [
            (row.job.total_tokens, float(number), row.status == "extrapolated")
            for row in rows
            if row.job.contender == name and row.trained
            if (number := getattr(row.numbers, value)) is not None
        ]
        if own:
            points = tuple((tokens, number) for tokens, number, _ in sorted(own))
            found.append(Line(name, points, frozenset(t for t, _, guessed in own if guessed)))
    return found


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draws every group of rows that may be compared into the folder.

    Returns:
        The files: `results.png`, and `results-2.png` and so on where there are several groups.

    Raises:
        ConfigError: matplotlib is missing, or a file cannot be written.
    """
    speeds = groups(row for row in rows if row.kind == "speed")
    files = []
    for group in (group for group in speeds if any(row.trained for row in group)):
        number = len(files) + 1
        name = FILE_NAME if number == 1 else FILE_NAME.replace(".", f"-{number}.")
        _draw_group(group, folder / name)
        files.append(folder / name)
    return files


def _draw_group(rows: Sequence[Row], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "pictures need matplotlib, which is not installed. Remedy: pip install "
            "'sppo-hf[figures]', or leave the picture out with --no-picture."
        ) from error
    environment = best_environment(rows)
    on_device = lines(rows, "device_allocated_bytes")
    figure = Figure(figsize=(13, 6.2), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    _plot(speed, lines(rows, "tokens_per_second"), "tokens per second")
    _plot(memory, on_device or lines(rows, "host_peak_bytes"), "")
    memory.set_ylabel("device peak, allocated" if on_device else "host peak, resident")
    limit = environment.get("device_memory_bytes" if on_device else "host_memory_bytes")
    _draw_limit(memory, limit, "device" if on_device else "host")
    _number(speed, lambda value: f"{value:,.6g}", base=10)
    _number(memory, lambda size: format_bytes(round(size)), base=2)
    device = environment.get("device_name", "")
    figure.suptitle(f"{describe_job(rows[0].job)}\n{device}, {environment.get('date', '')[:10]}")
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}. Remedy: name a writable folder."
        ) from error


def _plot(axes: Axes, found: Sequence[Line], label: str) -> None:
    for line in found:
        contender = parse(line.contender)
        base = contender.base
        style: dict[str, Any] = {
            "color": _COLOURS[base],
            "linestyle": _STYLES[contender.extra],
            "linewidth": 2.4 if base == "sppo-auto" else 1.4,
            "zorder": 3 if base == "sppo-auto" else 2,
        }
        tokens, values = zip(*line.points, strict=True)
        axes.plot(tokens, values, label=line.contender, marker=_MARKERS[base], **style)
        guessed = [(t, v) for t, v in line.points if t in line.extrapolated]
        if guessed:
            axes.plot(
                *zip(*guessed, strict=True),
                linestyle="",
                marker=_MARKERS[base],
                markerfacecolor="white",
                markeredgecolor=_COLOURS[base],
                zorder=4,
                label=f"{line.contender}, extrapolated",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="tokens per sequence", ylabel=label)
    lengths = sorted({tokens for line in found for tokens, _ in line.points})
    axes.set_xticks(lengths, [_short(tokens) for tokens in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    if found:
        values = [value for line in found for _, value in line.points]
        axes.set_ylim(min(values) / _MARGIN, max(values) * _MARGIN)


def _draw_limit(axes: Axes, limit_bytes: int | None, owner: str) -> None:
    """What the machine has, where it is near what was used."""
    low, high = axes.get_ylim()
    if not limit_bytes or limit_bytes > _FARTHEST_LIMIT * high:
        return
    axes.set_ylim(low, max(high, _MARGIN * limit_bytes))
    axes.axhline(limit_bytes, color="black", linewidth=1, linestyle="--", zorder=1)
    axes.annotate(
        f"the {owner} has {format_bytes(limit_bytes)}",
        (0.99, limit_bytes),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        horizontalalignment="right",
        fontsize=9,
    )


def _number(axes: Axes, name: Callable[[float], str], *, base: int) -> None:
    """Ticks that a person reads: few, and in numbers rather than in powers."""
    from matplotlib.ticker import MaxNLocator as locator

    low, high = axes.get_ylim()
    if high < _NARROW * low:
        unit = base ** floor(log(low, base) - 4) if base == 2 else 1.0
        steps = [1, 2, 4, 8, 10] if base == 2 else [1, 2, 2.5, 5, 10]
        ticks = [t * unit for t in locator(6, steps=steps).tick_values(low / unit, high / unit)]
    else:
        within = (1, 1.5) if base == 2 else (1, 1.5, 2, 3, 5, 7)
        exponents = range(floor(log(low, base)), ceil(log(high, base)) + 1)
        ticks = [step * float(base) ** exponent for exponent in exponents for step in within]
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(shown, [name(tick) for tick in shown])


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"
