"""The picture of a benchmark: tokens/s and peak bytes against length, one line per contender.

Reads rows only. Imports matplotlib when it draws, and leaves its global state alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sppo_hf.cli.benchmark.contenders import BASES, DEFAULTS, LIGER
from sppo_hf.cli.benchmark.results import Row, best_environment, groups
from sppo_hf.cli.benchmark.table import describe_job
from sppo_hf.errors import ConfigError
from sppo_hf.planning.report import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE_NAME = "results.png"

# One colour and marker per contender, whoever else is there: pictures of two days compare.
_COLOURS = {
    "plain": "#777777",
    "checkpointing": "#d55e00",
    "checkpointing-offload": "#e69f00",
    "trl-offload": "#cc79a7",
    "sppo-none": "#9ecae1",
    "sppo-full": "#6baed6",
    "sppo-sppo": "#3182bd",
    "sppo-auto": "#08306b",
    "ideal": "#009e73",
}
_MARKERS = dict(zip(BASES, "osD^v<>*P", strict=True))


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
    figure = Figure(figsize=(13, 5.6), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    _plot(speed, lines(rows, "tokens_per_second"), "tokens per second")
    _plot(memory, on_device or lines(rows, "host_peak_bytes"), "")
    where = "device peak, allocated" if on_device else "host peak, resident"
    memory.set_ylabel(where)
    _byte_ticks(memory)
    limit = environment.get("device_memory_bytes" if on_device else "host_memory_bytes")
    if limit:
        memory.axhline(limit, color="black", linewidth=1, linestyle="--")
        memory.annotate(
            f"the {'device' if on_device else 'host'} has {format_bytes(limit)}",
            (0.02, limit),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            fontsize=9,
        )
    device = environment.get("device_name", "")
    figure.suptitle(f"{describe_job(rows[0].job)}\n{device}, {environment.get('date', '')[:10]}")
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}. Remedy: name a writable folder."
        ) from error


def _plot(axes: Axes, found: Sequence[Line], label: str) -> None:
    for line in found:
        base = line.contender.removesuffix(LIGER)
        style: dict[str, Any] = {
            "color": _COLOURS[base],
            "linestyle": ":" if line.contender.endswith(LIGER) else "-",
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
    if not found:
        return
    low = min(value for line in found for _, value in line.points)
    high = max(value for line in found for _, value in line.points)
    axes.set_ylim(low / 1.3, high * 1.3)
    _number_ticks(axes, low / 1.3, high * 1.3, (1, 1.5, 2, 3, 5, 7), 10.0, lambda v: f"{v:,.6g}")


def _byte_ticks(axes: Axes) -> None:
    low, high = axes.get_ylim()
    _number_ticks(axes, low, high, (1, 1.5), 2.0, lambda size: format_bytes(round(size)))


def _number_ticks(
    axes: Axes, low: float, high: float, steps: Sequence[float], base: float, name: Any
) -> None:
    """Ticks that a person reads: few, in numbers and not in powers."""
    from math import ceil, floor, log

    exponents = range(floor(log(low, base)), ceil(log(high, base)) + 1)
    ticks = [step * base**exponent for exponent in exponents for step in steps]
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(shown, [name(tick) for tick in shown])


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"
