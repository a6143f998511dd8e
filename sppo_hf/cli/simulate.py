"""`sppo simulate --pp-schedule NAME --pp-size P`: when every rank of a pipeline does what.

Only arguments, printing and files; schedules are `sppo_hf.schedule`, a model's seconds and bytes
`sppo_hf.planning.pipeline_cost`. Neither torch nor Transformers is imported, and matplotlib only to
draw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sppo_hf.cli import planning_arguments as given
from sppo_hf.cli.pipeline_arguments import Offload, PipelineArguments, Simulated
from sppo_hf.errors import ConfigError
from sppo_hf.reporting.chrome_trace import write_trace
from sppo_hf.reporting.schedule_figure import ENDINGS, draw_schedule
from sppo_hf.rules import format_bytes
from sppo_hf.schedule.generate import ALL_SCHEDULES, INTERLEAVED
from sppo_hf.schedule.grid import over_time
from sppo_hf.schedule.lower import lower

_WIDEST_TEXT = 200


def simulate(
    schedule: Annotated[
        str, typer.Option("--pp-schedule", help=f"One of {', '.join(ALL_SCHEDULES)}.")
    ],
    stages: Annotated[
        int, typer.Option("--pp-size", help="Ranks of the pipeline, each with one stage.")
    ],
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 1,
    chunks: Annotated[int, typer.Option("--num-chunks", help="Chunks of each micro-batch.")] = 1,
    virtual: Annotated[
        int,
        typer.Option(
            "--pp-virtual-stages",
            help=f"Stages of each rank; only {', '.join(INTERLEAVED)} has several.",
        ),
    ] = 1,
    forward: Annotated[
        float | None,
        typer.Option(help="Seconds of one chunk's forward on one stage.  [default: 1]"),
    ] = None,
    backward: Annotated[
        float | None, typer.Option(help="Seconds of its whole backward.  [default: 2]")
    ] = None,
    weight: Annotated[
        float | None,
        typer.Option(help="The part of it that weight gradients take.  [default: half]"),
    ] = None,
    send: Annotated[
        float | None, typer.Option(help="Seconds of one chunk on a link.  [default: 0]")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Instead of seconds: a model folder, a config.json, or a hub id."),
    ] = None,
    seq_len: Annotated[
        str | None, typer.Option(help="Tokens of each row, with --model: 131072, 128K or 1M.")
    ] = None,
    hardware: given.Hardware = None,
    link: Annotated[
        str | None,
        typer.Option(help="Bytes per second between ranks, each way.  [default: 25GiB]"),
    ] = None,
    rows: given.Rows = 1,
    dtype: given.ComputeDtype = given.Dtype.bfloat16,
    lora: given.Lora = None,
    partition: given.Cut = given.Partition.auto,
    offload: Annotated[
        Offload, typer.Option(help="What is offloaded of each layer and chunk, by a fixed rule.")
    ] = Offload.none,
    recompute: Annotated[
        bool,
        typer.Option(
            help="Keep layer inputs and attention outputs, and recompute the rest in backward."
        ),
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(help=f"Draw the timeline into a file ({', '.join(ENDINGS)})."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the timeline as JSON for ui.perfetto.dev."),
    ] = None,
    as_json: given.AsJson = False,
) -> None:
    """Simulate a pipeline schedule: its bubbles, and what each rank holds.

    Costs are seconds that you give, the same for all chunks, or those of a model on a machine.

    Exit code 0: simulated. 2: bad input.
    """
    arguments = given.from_options(PipelineArguments, locals())
    with given.bad_input(as_json):
        given.check_figure(figure)
        simulated = arguments.simulate()
        _write_files(simulated, arguments.name, figure, trace)
    if as_json:
        given.echo_json(_to_dict(simulated))
    else:
        out = given.console()
        out.print(_table(simulated, arguments.title))
        _print_over_time(out, simulated, arguments)


def _to_dict(simulated: Simulated) -> dict[str, Any]:
    bare = simulated.lowered is simulated.schedule
    return {
        "bubble_fraction": simulated.bubble_fraction,
        "step_seconds": simulated.timeline.end_seconds,
        "peak_units": simulated.peak_units,
        "peak_bytes": simulated.peak_bytes,
        # A rank sends also where sends were given no time.
        "actions": (lower(simulated.schedule) if bare else simulated.lowered).texts(),
    }


def _table(simulated: Simulated, title: str) -> Group:
    table = Table(show_edge=False)
    table.add_column("rank", justify="right")
    table.add_column("stages")
    table.add_column("busy", justify="right")
    table.add_column("peak units", justify="right")
    if simulated.peak_bytes is not None:
        table.add_column("peak memory", justify="right")
        table.add_column("layers")
    seconds = simulated.timeline.end_seconds
    for rank, units in enumerate(simulated.peak_units):
        stages = [s for s, r in enumerate(simulated.schedule.stage_ranks) if r == rank]
        busy = simulated.timeline.busy_seconds(f"{rank}.compute") / seconds if seconds else 1.0
        row = [str(rank), " ".join(map(str, stages)), f"{busy:.1%}", f"{units:.4g}"]
        if simulated.peak_bytes is not None:
            layers = (simulated.layers[stage] for stage in stages)
            row.append(format_bytes(simulated.peak_bytes[rank]))
            row.append(" ".join(f"{held.start}-{held.stop - 1}" for held in layers))
        table.add_row(*row)
    said = f"a step takes {seconds:,.6g} seconds, ranks idle {simulated.bubble_fraction:.2%} of it"
    return Group(Text(title, style="bold"), table, Text(said))


def _print_over_time(out: Any, simulated: Simulated, arguments: PipelineArguments) -> None:
    """Shows the timeline as text, where units take whole seconds and it is not wide."""
    if arguments.model is not None or simulated.schedule.shared_units:
        return
    slots = [arguments.forward_seconds, arguments.backward_seconds]
    narrow = simulated.timeline.end_seconds <= _WIDEST_TEXT
    shown = narrow and all(s == int(s) >= 1 for s in slots) and over_time(simulated.timeline, 1.0)
    if shown and max(map(len, shown.splitlines())) <= _WIDEST_TEXT:
        out.print(Text("\n" + shown), soft_wrap=True)


def _write_files(simulated: Simulated, title: str, figure: Path | None, trace: Path | None) -> None:
    try:
        if figure is not None:
            draw_schedule(simulated.lowered, simulated.timeline, path=figure, title=title)
        if trace is not None:
            write_trace(simulated.timeline, trace)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or figure or trace} cannot be written: {error.strerror}. Remedy: name"
            " a file in a writable folder."
        ) from error
