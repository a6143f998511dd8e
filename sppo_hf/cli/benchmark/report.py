"""Results as tables (speeds, longest lengths, definitions) and as pictures, from rows alone.

Tables are rich renderables, nothing is printed. Imports matplotlib only to draw, and leaves its
global state alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sppo_hf.cli.benchmark.contenders import BASES, DEFAULTS, IDEAL, LIGER, TILED, TODAY, parse
from sppo_hf.cli.benchmark.results import Job, Row, best_environment, groups
from sppo_hf.cli.common import writing
from sppo_hf.errors import ConfigError
from sppo_hf.reporting.plan_tables import format_seconds
from sppo_hf.rules import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEFINITIONS = (
    "Seconds are the median of the measured steps: forward, backward, clipping and the optimizer.",
    "of chkpt: speed over that of the fastest checkpointing contender that trained with the same"
    f" kernel; of today: over that of {TODAY}; of ideal: over the faster ideal's.",
    "Model TFLOPS count what the model needs: causal attention once, no recomputation. MFU divides"
    " them by the device's dense bfloat16 peak.",
    "Peaks are those of the whole training. Device: allocated by tensors, in brackets reserved by"
    " the allocator. Host: resident memory, to which the pinned comes on CUDA.",
    "Stall: time of a step in which compute stood still for copies, known for sppo only.",
    "ideal: everything kept, no hooks; ~ marks what is extrapolated from 1 and 2 layers, or from"
    " shorter lengths. +tiled: with the ideal's loss in place of logits of the whole sequence.",
)
_RATIOS = ("of chkpt", "of today", "of ideal")
_HEADINGS = ("tokens", "contender", "step", "tokens/s", *_RATIOS, "TFLOPS", "MFU")
_HEADINGS = (*_HEADINGS, "device", "host", "pinned", "stall")
_MAX_REASON_CHARS = 200


def tables(rows: Sequence[Row]) -> Group:
    """Lay out a file's rows: tables of speeds and of longest lengths by group, definitions."""
    parts: list[RenderableType] = []
    for group in groups(row for row in rows if row.kind == "speed"):
        parts += [speed_table(group), *_notes(group)]
    for group in groups(row for row in rows if row.kind == "longest"):
        parts += [longest_table(group), *_notes(group)]
    if not parts:
        return Group(Text("No results yet."))
    return Group(*parts, *(Text(line, style="dim") for line in DEFINITIONS))


def speed_table(rows: Sequence[Row]) -> Table:
    """Lay out one group: a line for each length and contender, without empty columns."""
    lines: list[tuple[bool, list[str]]] = []
    for total_tokens in sorted({row.job.total_tokens for row in rows}):
        at = [row for row in rows if row.job.total_tokens == total_tokens]
        speeds = {row.job.contender: row.numbers.tokens_per_second for row in at if row.trained}
        ideals = [speed for name, speed in speeds.items() if speed and parse(name).base == IDEAL]
        others = [*_fastest_checkpointing(speeds), max(ideals, default=None)]
        for index, row in enumerate(at):
            cells = _cells(row, others)
            first = f"{total_tokens:,}" if index == 0 else ""
            lines.append((index == len(at) - 1, [first, row.job.contender, *cells]))
    known = [any(cells[column] for _, cells in lines) for column in range(len(_HEADINGS))]
    table = Table(box=SIMPLE_HEAD, title=_title(rows), title_justify="left")
    for heading, is_known in zip(_HEADINGS, known, strict=True):
        if is_known:
            justify = "left" if heading == "contender" else "right"
            table.add_column(heading, justify=justify, no_wrap=True)
    for last, cells in lines:
        shown = [cell for cell, is_known in zip(cells, known, strict=True) if is_known]
        table.add_row(*shown, end_section=last)
    return table


def longest_table(rows: Sequence[Row]) -> Table:
    """Lay out searches for the longest length, with the predicted lengths for sppo."""
    table = Table(box=SIMPLE_HEAD, title=f"Longest, {_title(rows)}", title_justify="left")
    table.add_column("contender", no_wrap=True)
    for heading in ("trains", "does not", "estimated", "device", "host"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("ended by", overflow="fold", min_width=20)
    for row in rows:
        n = row.numbers
        if row.status == "not available" or n.longest_tokens is None:
            table.add_row(row.job.contender, "-", "-", "-", "-", "-", row.reason)
            continue
        estimated = "-"
        if n.planned_longest_tokens is not None:
            estimated = f"{n.planned_longest_tokens:,}"
            if n.longest_tokens and n.failed_tokens is not None:  # else the search had no end
                estimated += f" ({n.planned_longest_tokens / n.longest_tokens - 1:+.0%})"
        failed = "-" if n.failed_tokens is None else f"{n.failed_tokens:,}"
        cells = (f"{n.longest_tokens:,}", failed, estimated, _device(row))
        table.add_row(row.job.contender, *cells, _bytes(n.host_peak_bytes), row.reason[:200])
    return table


def progress_line(row: Row, *, done: int, total: int, elapsed_seconds: float) -> str:
    """Describe in one line how a job ended."""
    n = row.numbers
    count = f"[{done}/{total}]" if total else f"[{done}]"
    text = row.status
    if row.trained and n.tokens_per_second is not None:
        memory = n.device_allocated_bytes or n.host_peak_bytes
        text = f"{n.tokens_per_second:,.0f} tokens/s, {_bytes(memory)}"
        text += " (extrapolated)" if row.status == "extrapolated" else ""
    if row.kind == "longest" and n.longest_tokens is not None:
        text = f"longest {n.longest_tokens:,} tokens"
    elif row.reason and not row.trained:
        text += f": {row.reason}"
    what = "" if row.kind != "try" else "try "
    duration = "" if row.wall_seconds is None else f", {row.wall_seconds:.0f} s"
    where = "" if row.kind == "longest" else f" at {row.job.total_tokens:,}"
    elapsed = f"{int(elapsed_seconds) // 60}:{int(elapsed_seconds) % 60:02d}"
    return f"{elapsed} {count} {what}{row.job.contender}{where}: {text}{duration}"


def describe_job(job: Job) -> str:
    """Describe the settings that a group shares: "llama-3.1-8b, bfloat16, LoRA r=16"."""
    trained = "all weights" if job.lora_rank is None else f"LoRA r={job.lora_rank}"
    if job.lora_rank is not None and job.lora_dtype != job.dtype:
        trained += f" in {job.lora_dtype}"
    parts = [job.model, job.dtype + (" autocast" if job.autocast else ""), trained]
    if job.attention != "auto":
        parts.append(f"attention {job.attention}")
    if job.device_memory is not None:
        parts.append(f"device memory {job.device_memory}")
    if job.host_memory is not None:
        parts.append(f"host memory {job.host_memory}")
    return ", ".join(parts)


def _title(rows: Sequence[Row]) -> str:
    device = best_environment(rows).get("device_name", "")
    return describe_job(rows[0].job) + (f", on {device}" if device else "")


def _notes(rows: Sequence[Row]) -> list[Text]:
    """Notes below a table: machine and date, kernels, and why rows are missing."""
    found = best_environment(rows)
    notes = []
    if found:
        versions = ", ".join(f"{k} {v}" for k, v in found.get("versions", {}).items())
        memory = [f"host {format_bytes(found['host_memory_bytes'])}"]
        if found.get("device_memory_bytes"):
            memory.insert(0, f"device {format_bytes(found['device_memory_bytes'])}")
        line = f"{found.get('date', '')}; {', '.join(memory)}; {versions}"
        notes.append(Text(line, style="dim"))
    ran = [row for row in rows if row.numbers.kernel is not None]
    kernels = {str(row.numbers.kernel) for row in ran if parse(row.job.contender).base != TODAY}
    if kernels:
        notes.append(Text(f"attention kernel: {', '.join(sorted(kernels))}", style="dim"))
    if len(kernels) > 1:
        line = "Kernels differ, so ratios between these rows say little: name one with --attention."
        notes.append(Text(line, style="bold"))
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.kind == "speed" and row.reason:
            reason = " ".join(row.reason.split())[:_MAX_REASON_CHARS]
            line = f"{row.job.contender}: {row.status}: {reason}"
            reasons.setdefault(line, []).append(f"{row.job.total_tokens:,}")
    notes += [Text(f"{line} ({', '.join(at)})", style="dim") for line, at in reasons.items()]
    return [*notes, Text("")]


def _fastest_checkpointing(
    speeds: Mapping[str, float | None],
) -> tuple[float | None, float | None]:
    """Tokens per second of the fastest checkpointing contender.

    Returns:
        With the common kernel, and with the kernel that PyTorch chooses; None where none trained.
    """
    common: list[float] = []
    default: list[float] = []
    for name, speed in speeds.items():
        contender = parse(name)
        if speed is not None and contender.checkpoints:
            (default if contender.base == TODAY else common).append(speed)
    return max(common, default=None), max(default, default=None)


def _cells(row: Row, others: Sequence[float | None]) -> list[str]:
    """Cells after the contender's name; `others` are the speeds that `_RATIOS` divide by."""
    n = row.numbers
    if not row.trained:
        # Of a run that ended early only its memory is known.
        return [row.status, *[""] * 6, _device(row), _bytes(n.host_peak_bytes), "", ""]
    about = "~" if row.status == "extrapolated" else ""
    seconds, speed = n.median_step_seconds, n.tokens_per_second
    assert seconds is not None, "a row that trained has seconds"
    assert speed is not None, "and a speed"
    return [
        about + format_seconds(seconds),
        f"{about}{speed:,.0f}",
        *("" if other is None else f"{speed / other:.2f}" for other in others),
        "" if n.model_tflops is None else f"{n.model_tflops:#.3g}".rstrip("."),
        "" if n.mfu is None else f"{n.mfu:.1%}",
        about * (n.device_allocated_bytes is not None) + _device(row),
        about + _bytes(n.host_peak_bytes),
        _bytes(n.pinned_bytes),
        "" if n.stall_seconds is None else f"{n.stall_seconds / seconds:.1%}",
    ]


def _device(row: Row) -> str:
    n = row.numbers
    if n.device_allocated_bytes is None:
        return ""
    if n.device_reserved_bytes is None:
        return _bytes(n.device_allocated_bytes)
    return f"{_bytes(n.device_allocated_bytes)} ({_bytes(n.device_reserved_bytes)})"


def _bytes(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_bytes(size_bytes)


FILE_NAME = "results.png"

_MARGIN = 1.3
_NARROW = 5.0
_MAX_LIMIT_RATIO = 3.0

# Fixed colours and markers, so that pictures of different runs can be compared.
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
class Curve:
    """A curve of one contender."""

    contender: str
    points: tuple[tuple[int, float], ...]
    """Pairs of tokens and value, sorted by tokens."""
    extrapolated: frozenset[int]
    """Lengths whose value is extrapolated."""


def lines(rows: Sequence[Row], value: str) -> list[Curve]:
    """Return a curve for every contender that trained.

    Args:
        rows: Those of one group.
        value: The field of `Numbers` that is drawn.
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
            found.append(Curve(name, points, frozenset(t for t, _, guessed in own if guessed)))
    return found


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every group of comparable rows into the folder.

    Returns:
        The files: `results.png`, and `results-2.png` and so on for further groups.

    Raises:
        ConfigError: Matplotlib is missing, or a file cannot be written.
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
    _set_ticks(speed, lambda value: f"{value:,.6g}", base=10)
    _set_ticks(memory, lambda size: format_bytes(round(size)), base=2)
    device = environment.get("device_name", "")
    figure.suptitle(f"{describe_job(rows[0].job)}\n{device}, {environment.get('date', '')[:10]}")
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)


def _plot(axes: Axes, found: Sequence[Curve], label: str) -> None:
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
    axes.set_xticks(lengths, [_short_tokens(tokens) for tokens in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    if found:
        values = [value for line in found for _, value in line.points]
        axes.set_ylim(min(values) / _MARGIN, max(values) * _MARGIN)


def _draw_limit(axes: Axes, limit_bytes: int | None, owner: str) -> None:
    """Draw the machine's memory as a line, if it is near the values."""
    low, high = axes.get_ylim()
    if not limit_bytes or limit_bytes > _MAX_LIMIT_RATIO * high:
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


def _set_ticks(axes: Axes, name: Callable[[float], str], *, base: int) -> None:
    """Set few ticks at round numbers, labelled with numbers rather than powers."""
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


def _short_tokens(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"
