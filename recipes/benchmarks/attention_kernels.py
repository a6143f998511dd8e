"""Compares attention backends: a chunk of queries against a prefix, forward and backward.

    python recipes/benchmarks/attention_kernels.py --json kernels.json --figure kernels.png

TFLOPS of every backend that supports this device and agrees with the reference, by chunk and prefix
length. FLOPs are those of visible query-key pairs (the causal half counts once); a backward counts
as 2.5 forwards. Without a GPU the sizes are small and show only that everything runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from sppo_hf import SPPOConfig
from sppo_hf.attention.backends.autotune import Workload, short
from sppo_hf.attention.backends.base import AttentionSpec, Backend
from sppo_hf.attention.backends.select import BACKENDS, find_backend, find_mismatch, select_backend
from sppo_hf.engine.device_facts import device_facts, device_versions
from sppo_hf.errors import ConfigError, SPPOError
from sppo_hf.planning.autotune_store import format_tflops
from sppo_hf.planning.machine import host_memory_bytes
from sppo_hf.profiling.calibrate import BenchTimer, Heads
from sppo_hf.reporting.figures import new_figure
from sppo_hf.reporting.plan_tables import format_seconds
from sppo_hf.rules import format_bytes

SIZES: dict[str, dict[str, Any]] = {
    # Llama-3.1-8B's layer, one with heads of 64, and one without grouped heads.
    "cuda": {
        "chunks": [512, 1024, 2048, 4096, 8192, 16384],
        "prefixes": [0, 8192, 32768, 131072],
        "heads": ["32/8/128", "32/8/64", "16/16/128"],
        "dtypes": ["bfloat16"],
    },
    "cpu": {
        "chunks": [64, 256],
        "prefixes": [0, 1024],
        "heads": ["4/2/64"],
        "dtypes": ["float32"],
    },
}


logger = logging.getLogger(__name__)

YARDSTICK = "aten_flash"
"""Backend that the last column of tables compares with; every PyTorch for CUDA has it."""

_PANEL_INCHES = (3.6, 3.0)


@dataclass(frozen=True, slots=True)
class Point:
    """Times of one backend at one chunk and prefix length."""

    backend: str

    chunk_tokens: int

    prefix_tokens: int

    forward_seconds: float | None = None
    """None where it was not measured."""

    backward_seconds: float | None = None

    forward_flops_per_second: float | None = None
    """Counts visible pairs of queries and keys only."""

    backward_flops_per_second: float | None = None
    """Backward counts as 2.5 forwards."""

    flops_per_second: float | None = None
    """Forward and backward together."""

    reason: str | None = None
    """Why there is no measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All points of one dtype and layer shape."""

    dtype: str
    """Name of the dtype, such as "bfloat16"."""

    heads: Heads

    window_tokens: int | None
    """Length of the sliding window, or None."""

    left_out: dict[str, str]
    """Backends that were not measured, and why: unsupported, or not equal to the reference."""

    auto: str
    """Which backend "auto" selects, with its reason."""

    points: list[Point]

    def __str__(self) -> str:
        """Describe what the points have in common."""
        window = "" if self.window_tokens is None else f", window {self.window_tokens:,}"
        return f"{self.dtype}, {self.heads}{window}"

    def to_json(self) -> dict[str, Any]:
        """A value for `json.dumps`."""
        return asdict(self) | {"heads": self.heads._asdict()}


def measure_backends(
    device: torch.device,
    *,
    dtypes: Sequence[torch.dtype],
    heads: Sequence[Heads],
    chunks: Sequence[int],
    prefixes: Sequence[int],
    window_tokens: int | None = None,
    names: Iterable[str] = tuple(BACKENDS),
    most_seconds: float = 1.0,
    watch: BenchTimer | None = None,
) -> Iterator[Group]:
    """Measure all backends at all sizes; yield each group at its start and after each point.

    Args:
        device: a CPU or the current CUDA device.
        dtypes: of queries, keys and values.
        heads: kinds of layers.
        chunks: lengths of the chunk, in tokens.
        prefixes: keys before the chunk's own, in tokens.
        window_tokens: keys that a query sees; None for all before it.
        names: backends, of `BACKENDS`.
        most_seconds: limit for one forward or backward; sizes that would take longer at the rate of
            the sizes before are left out.
        watch: timer; None makes one.
    """
    watch = watch or BenchTimer(device, most_seconds=most_seconds)
    for dtype in dtypes:
        for layer in heads:
            requirement = AttentionSpec(
                device_type=device.type,
                dtype=dtype,
                qk_head_size=layer.size,
                v_head_size=layer.size,
                window=window_tokens is not None,
                gqa_ratio=layer.query // layer.key_value,
            )
            found = {name: _agreeing(name, requirement, device) for name in names}
            group = Group(
                dtype=str(dtype).removeprefix("torch."),
                heads=layer,
                window_tokens=window_tokens,
                left_out={name: what for name, what in found.items() if isinstance(what, str)},
                auto=select_backend("auto", requirement).reason,
                points=[],
            )
            yield group
            able = [backend for backend in found.values() if isinstance(backend, Backend)]
            loads = [
                Workload(
                    requirement=requirement,
                    query_heads=layer.query,
                    chunk_tokens=chunk,
                    prefix_tokens=prefix,
                    window_tokens=window_tokens,
                )
                for chunk in chunks
                for prefix in prefixes
            ]
            for point in _measure(watch, able, loads, most_seconds):
                group.points.append(point)
                yield group


def _agreeing(name: str, requirement: AttentionSpec, device: torch.device) -> Backend | str:
    """Return the backend if it is supported and agrees with the reference, else why not."""
    found = find_backend(name, requirement)
    # On CUDA `find_backend` has compared it already.
    if isinstance(found, str) or name == "reference" or device.type == "cuda":
        return found
    return find_mismatch(found, requirement, device) or found


def _measure(
    watch: BenchTimer, backends: Sequence[Backend], loads: Sequence[Workload], most_seconds: float
) -> Iterator[Point]:
    """Yield the points of all backends, from the smallest to the largest size."""
    rates: dict[str, float] = {}
    for load in sorted(loads, key=lambda load: load.forward_flops):
        for backend in backends:
            point = _point(watch, backend, load, rates.get(backend.name), most_seconds)
            if point.flops_per_second is not None:
                rates[backend.name] = point.flops_per_second
            yield point


def _point(
    watch: BenchTimer, backend: Backend, load: Workload, rate: float | None, most_seconds: float
) -> Point:
    """Measure one point, or note why it is left out."""

    def without(reason: str) -> Point:
        return Point(backend.name, load.chunk_tokens, load.prefix_tokens, reason=reason)

    if rate is not None and load.backward_flops / rate > most_seconds:
        return without(f"would take about {format_seconds(load.backward_flops / rate)}")
    available_bytes = _available_bytes(watch.device)
    if load.num_bytes > available_bytes:
        return without(
            f"{format_bytes(load.num_bytes)} do not fit into {format_bytes(available_bytes)}"
        )
    try:
        seconds = [watch.seconds(work) for work in _works(load, backend, watch.device)]
    # Kernels raise all kinds of exceptions; the others are still measured.
    except Exception as error:
        logger.debug("backend %s failed on %s", backend.name, load, exc_info=True)
        first_line = (str(error).strip().splitlines() or [""])[0]
        return without(f"raised {type(error).__name__}: {first_line}")
    forward, backward = seconds
    return Point(
        backend.name,
        load.chunk_tokens,
        load.prefix_tokens,
        forward_seconds=forward,
        backward_seconds=backward,
        forward_flops_per_second=load.forward_flops / forward,
        backward_flops_per_second=load.backward_flops / backward,
        flops_per_second=(load.forward_flops + load.backward_flops) / (forward + backward),
    )


def _works(
    load: Workload, backend: Backend, device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    # A function of its own, so that tensors of one size are freed before those of the next.
    return load.make(device).work(backend)


def _available_bytes(device: torch.device) -> int:
    """Return the bytes that a measurement may use: half of the free memory."""
    if device.type != "cuda":
        return host_memory_bytes() // 2
    free_bytes, _ = torch.cuda.mem_get_info(device)
    cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free_bytes + cached_bytes) // 2


def backends_table(group: Group) -> Lines:
    """Return a table of TFLOPS of forward and backward; the fastest in sum is bold."""
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
    """Return the points by (chunk, prefix) in tokens, and by backend."""
    sizes: dict[tuple[int, int], dict[str, Point]] = {}
    for point in group.points:
        row = sizes.setdefault((point.chunk_tokens, point.prefix_tokens), {})
        row[point.backend] = point
    return sizes


def best_of(row: dict[str, Point]) -> Point | None:
    """Return the fastest point in forward plus backward, or None if none was measured."""
    measured = [point for point in row.values() if point.flops_per_second is not None]
    return max(measured, key=lambda point: point.flops_per_second or 0.0, default=None)


def draw_backends(groups: Sequence[Group], path: str | Path, *, title: str) -> None:
    """Draw TFLOPS against chunk length: a row for each group, a panel for each prefix.

    Raises:
        ConfigError: as `new_figure`, or nothing was measured.
        OSError: the file cannot be written.
    """
    groups = [group for group in groups if any(p.flops_per_second for p in group.points)]
    if not groups:
        raise ConfigError("Nothing was measured, so there is nothing to draw. Try smaller sizes.")
    prefixes = sorted({point.prefix_tokens for group in groups for point in group.points})
    chunks = sorted({point.chunk_tokens for group in groups for point in group.points})
    names = list(dict.fromkeys(point.backend for group in groups for point in group.points))
    wide, high = _PANEL_INCHES
    figure = new_figure(
        path,
        height_inches=high * len(groups) + 0.6,
        width_inches=wide * len(prefixes),
        what="attention backends",
    )
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


def heads_of(text: str) -> Heads:
    query, key_value, size = (int(part) for part in text.split("/"))
    if query % key_value:
        raise argparse.ArgumentTypeError(f"{query} query heads over {key_value} key heads")
    return Heads(query, key_value, size)


def parse(argv: list[str]) -> argparse.Namespace:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default=kind, choices=("cuda", "cpu"))
    parser.add_argument("--chunks", type=int, nargs="+", help="tokens")
    parser.add_argument("--prefixes", type=int, nargs="+", help="tokens")
    parser.add_argument("--heads", nargs="+", help="query/key heads/size, as 32/8/128")
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--window", type=int, help="tokens that a query sees; default: all")
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), default=list(BACKENDS))
    parser.add_argument("--most-seconds", type=float, default=1.0, help="for one call")
    parser.add_argument("--json", type=Path, help="file that all numbers are written to")
    parser.add_argument("--figure", type=Path, help="file that the picture is drawn into")
    options = parser.parse_args(argv)
    for name, value in SIZES[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main(argv: list[str]) -> int:
    options = parse(argv)
    device, groups = torch.device(options.device), list[Group]()
    about = {
        "device": device_facts(device, SPPOConfig()).name,
        "versions": device_versions(device),
    }
    measured = measure_backends(
        device,
        dtypes=[getattr(torch, name) for name in options.dtypes],
        heads=[heads_of(text) for text in options.heads],
        chunks=options.chunks,
        prefixes=options.prefixes,
        window_tokens=options.window,
        names=options.backends,
        most_seconds=options.most_seconds,
    )
    with Console(stderr=True).status("checking backends") as status:
        for group in measured:
            if not groups or groups[-1] is not group:
                groups.append(group)
            if options.json:  # what was measured stays measured, whatever comes next
                found = {**about, "groups": [one.to_json() for one in groups]}
                options.json.write_text(json.dumps(found, indent=1))
            status.update(f"{group}: {len(group.points)} points")
    for group in groups:
        Console(width=120).print(backends_table(group))
    if options.figure:
        draw_backends(groups, options.figure, title=about["device"])
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SPPOError as error:
        sys.exit(str(error))
