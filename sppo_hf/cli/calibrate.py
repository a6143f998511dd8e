"""`sppo calibrate`: measure this machine, and keep the figures for the planner.

Measuring is `sppo_hf.profiling.calibrate`, and `sppo_hf.planning.hardware` keeps the figures. Torch
is imported when the command runs.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sppo_hf.cli import common
from sppo_hf.planning.hardware import profile_to_json, save_profile
from sppo_hf.rules import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sppo_hf.planning.hardware import HardwareProfile


def calibrate(
    device: Annotated[
        str, typer.Option(help="cuda, cuda:1, cpu; auto takes the current GPU, else the CPU.")
    ] = "auto",
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Dtype to measure, once for each: bfloat16, float16, float32, float64."
            " \\[default: bfloat16 and float32]",
            show_default=False,
        ),
    ] = None,
    offload_dir: Annotated[
        Path | None,
        typer.Option(help="Measure the disk of this folder too, with a file of 1 GiB."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the profile here rather than under the Hugging Face cache."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Seconds only; figures too rough to plan with, not kept."),
    ] = False,
    as_json: common.AsJson = False,
) -> None:
    """Measure how fast this machine computes, copies and writes, for the planner.

    Takes one to two minutes; let nothing else run meanwhile. The figures are kept under the Hugging
    Face cache and used from then on, as long as the device and the versions of torch, CUDA and the
    driver stay the same. A file written with --output is used by the setting hardware="FILE".

    Exit code 0: measured. 2: bad input.
    """
    start_seconds = time.perf_counter()
    with common.bad_input(as_json):
        profile = _measure(device, dtype or [], offload_dir, quick)
        # Rough figures would mislead every later plan, so --quick writes only a named file.
        path = None if quick and output is None else save_profile(profile, output)
    if as_json:
        typer.echo(profile_to_json(profile), nl=False)
        return
    _print(profile)
    seconds = time.perf_counter() - start_seconds
    kept = "not kept" if path is None else f"kept in {path}"
    text = f"Measured in {seconds:.0f} seconds; {kept}"
    common.console().print(text, highlight=False, soft_wrap=True)


def _measure(
    device_name: str, dtype_names: Sequence[str], offload_dir: Path | None, quick: bool
) -> HardwareProfile:
    """Measure with a progress bar on stderr."""
    import torch

    from sppo_hf.profiling.calibrate import calibrate as measure

    if device_name == "auto":
        device_name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device_name)
    except RuntimeError as error:
        raise typer.BadParameter(
            f"{device_name!r} is no device; allowed are auto, cpu, cuda, cuda:0 and so on",
            param_hint="--device",
        ) from error
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=common.console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def show(title: str, done: int, total: int) -> None:
            progress.update(task, description=title, completed=done, total=total)

        return measure(
            device,
            dtype_names=dtype_names,
            offload_dir=offload_dir,
            quick=quick,
            on_progress=show,
        )


def _print(profile: HardwareProfile) -> None:
    """Print the curves as one table, all other figures as another."""
    title = f"[bold]{profile.name}[/bold], {profile.source}"
    common.console().print(title, highlight=False, soft_wrap=True)
    curves = Table(title="FLOP/s by tokens of a chunk", title_justify="left")
    curves.add_column("tokens", justify="right")
    columns = [
        (f"{title}\n{dtype}", dict(curve.points))
        for dtype in profile.matmul_flops
        for title, curve in (
            ("linear", profile.matmul_flops[dtype]),
            ("attention", profile.attention_forward_flops[dtype]),
            ("backward", profile.attention_backward_flops[dtype]),
        )
    ]
    for title, _ in columns:
        curves.add_column(title, justify="right")
    for tokens in sorted({tokens for _, points in columns for tokens in points}):
        cells = [_scaled(points.get(tokens)) for _, points in columns]
        curves.add_row(str(tokens), *cells)
    common.console().print(curves)
    others = Table(show_header=False)
    others.add_column(style="bold")
    others.add_column(justify="right")
    for title, rate in (
        ("memory", profile.memory_bytes_per_second),
        ("device to host", profile.d2h_bytes_per_second),
        ("  both ways at once", profile.both_d2h_bytes_per_second),
        ("host to device", profile.h2d_bytes_per_second),
        ("  both ways at once", profile.both_h2d_bytes_per_second),
        ("optimizer's update on the host", profile.host_update_bytes_per_second),
        ("disk, writing", profile.disk_write_bytes_per_second),
        ("disk, reading", profile.disk_read_bytes_per_second),
    ):
        others.add_row(title, f"{_scaled(rate)}B/s" if rate is not None else "not measured")
    others.add_row("a layer takes at least", f"{profile.launch_seconds * 1e3:.2f} ms")
    for title, size in (
        ("device memory", profile.device_bytes),
        ("host memory", profile.host_bytes),
        ("free on the disk", profile.disk_bytes),
    ):
        others.add_row(title, "not known" if size is None else format_bytes(size))
    others.add_row("NUMA node", "only one" if profile.numa_node is None else str(profile.numa_node))
    common.console().print(others)


def _scaled(rate: float | None) -> str:
    """Format a rate with three digits and its SI prefix: "412 T", "25.1 G"."""
    if rate is None:
        return ""
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= factor:
            return f"{rate / factor:#.3g}".rstrip(".") + f" {prefix}"
    return f"{rate:.3g} "
