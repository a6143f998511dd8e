"""Attention backends beside each other, as tables and as a picture.

Knows what `measure_backends` yields, rich and matplotlib, which it imports only to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from sppo_hf.attention.backends.autotune import short
from sppo_hf.errors import ConfigError
from sppo_hf.planning.autotune_store import format_tflops
from sppo_hf.profiling.measure_backends import Group, Point

YARDSTICK = "aten_flash"
"""The kernel that every PyTorch for CUDA has: the last column is by how much it is beaten."""

_PANEL_INCHES = (3.6, 3.0)


def backends_table(group: Group) -> Lines:
    """TFLOPS of forward and backward at every size, the fastest of both together in bold.

    Args:
        group: measured points.
    """
    names = list(dict.fromkeys(point.backend for point in group.points))
    table = Table(title=f"{group}: TFLOPS forward / backward", title_justify="left")
    table.add_column("chunk", justify="right")
    table.add_column("prefix", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    compared = YARDSTICK in names
    if compared:
        table.add_column(f"best / {YARDSTICK}", justify="right")
    for (chunk, prefix), row in sorted(by_size(group).items()):
        fastest = best_of(row)
        cells = [_cell(row.get(name), row.get(name) is fastest) for name in names]
        if compared:
            cells.append(Text(_gain(fastest, row.get(YARDSTICK))))
        table.add_row(short(chunk), short(prefix), *cells)
    notes = {f"{point.backend}: {point.reason}" for point in group.points if point.reason}
    absent = [f"{name} {reason}" for name, reason in group.left_out.items()]
    lines = [f'"auto" takes {group.auto}', *absent, *sorted(notes)]
    return Lines(table, *(Text(line, style="dim") for line in lines))


def by_size(group: Group) -> dict[tuple[int, int], dict[str, Point]]:
    """Points by backend, by (chunk, prefix) in tokens."""
    sizes: dict[tuple[int, int], dict[str, Point]] = {}
    for point in group.points:
        row = sizes.setdefault((point.chunk_tokens, point.prefix_tokens), {})
        row[point.backend] = point
    return sizes


def best_of(row: dict[str, Point]) -> Point | None:
    """The fastest point, forward and backward together; None where none was measured."""
    measured = [point for point in row.values() if point.flops_per_second is not None]
    return max(measured, key=lambda point: point.flops_per_second or 0.0, default=None)


def draw_backends(groups: Sequence[Group], path: str | Path, *, title: str) -> None:
    """Draw TFLOPS against chunk length: a row for each group, a panel for each prefix.

    Args:
        groups: at least one with a measured point.
        path: file to write; its ending says what kind.
        title: the device's name, say.

    Raises:
        ConfigError: matplotlib is missing, or nothing was measured.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "Drawing needs matplotlib, which is not installed: pip install matplotlib."
        ) from error
    groups = [group for group in groups if any(p.flops_per_second for p in group.points)]
    if not groups:
        raise ConfigError("Nothing was measured, so there is nothing to draw. Try smaller sizes.")
    prefixes = sorted({point.prefix_tokens for group in groups for point in group.points})
    chunks = sorted({point.chunk_tokens for group in groups for point in group.points})
    names = list(dict.fromkeys(point.backend for group in groups for point in group.points))
    wide, high = _PANEL_INCHES
    figure = Figure(figsize=(wide * len(prefixes), high * len(groups) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(groups), len(prefixes), squeeze=False, sharex=True, sharey="row")
    for group, line in zip(groups, grid, strict=True):
        for prefix, axes in zip(prefixes, line, strict=True):
            for at, name in enumerate(names):
                points = sorted(
                    (point.chunk_tokens, point.flops_per_second / 1e12)
                    for point in group.points
                    if point.backend == name
                    and point.prefix_tokens == prefix
                    and point.flops_per_second is not None
                )
                if points:
                    axes.plot(*zip(*points, strict=True), "o-", color=f"C{at}", label=name)
            axes.set_xscale("log", base=2)
            axes.set_xticks(chunks, [short(chunk) for chunk in chunks], fontsize=8)
            axes.grid(color="#E5E5E5", linewidth=0.6)
            axes.set_title(f"{group}\nprefix {short(prefix)}", fontsize=8)
        line[0].set_ylim(bottom=0)
        line[0].set_ylabel("TFLOPS, forward + backward")
    for axes in grid[-1]:
        axes.set_xlabel("tokens of the chunk")
    handles = {
        label: handle
        for axes in grid.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles)
    )
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _cell(point: Point | None, fastest: bool) -> Text:
    if point is None:
        return Text("")
    if point.forward_flops_per_second is None or point.backward_flops_per_second is None:
        return Text("-", style="dim")
    rates = (point.forward_flops_per_second, point.backward_flops_per_second)
    return Text(" / ".join(map(format_tflops, rates)), style="bold" if fastest else "")


def _gain(fastest: Point | None, yardstick: Point | None) -> str:
    ours = None if fastest is None else fastest.flops_per_second
    theirs = None if yardstick is None else yardstick.flops_per_second
    return "" if ours is None or theirs is None else f"{ours / theirs:.2f}"
