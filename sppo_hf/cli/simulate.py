"""`sppo simulate --pp-schedule NAME --pp-size P`: when every rank of a pipeline does what.

Only arguments, printing and files; schedules are `sppo_hf.schedule`, a model's seconds and bytes
`sppo_hf.planning.pipeline_cost`. Neither torch nor Transformers is imported, and matplotlib only to
draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sppo_hf.cli import common
from sppo_hf.config import SPPOConfig, parse_bytes
from sppo_hf.errors import ConfigError
from sppo_hf.planning.chunk_bounds import chunk_bounds
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.hardware import UNKNOWN_LINK, load_profile
from sppo_hf.planning.pipeline_cost import PipelineCost
from sppo_hf.planning.plan_request import question_for
from sppo_hf.reporting.chrome_trace import write_trace
from sppo_hf.reporting.figures import ENDINGS, draw_schedule
from sppo_hf.rules import format_bytes, show
from sppo_hf.schedule.generate import ALL_SCHEDULES, INTERLEAVED, Size, generate
from sppo_hf.schedule.lower import lower
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import (
    bubble_fraction,
    fixed_seconds,
    peak_units,
    shared_seconds,
    simulate_pipeline,
)
from sppo_hf.schedule.timeline import Timeline, over_time

_MOST_STAGES = 1024
# Chunks of all micro-batches on all stages: what is simulated in a few seconds.
_MOST_UNITS = 2**15
_MOST_UNITS_OF_MODEL = 2**14
_MOST_SECONDS = 1e9
# Below, seconds of a step are no longer told apart from rounding.
_LEAST_SECONDS = 1e-12
_WIDEST_TEXT = 200


class Offload(StrEnum):
    """What of each frame leaves the device; a choice on the command line."""

    none = "none"
    full = "full"
    sppo = "sppo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A schedule that was simulated."""

    schedule: Schedule
    """Its compute."""

    lowered: Schedule
    """With sends and copies, as it was simulated."""

    timeline: Timeline
    """When all of it ran."""

    peak_bytes: list[int] | None = None
    """Most bytes on the device, by rank; None without a model."""

    layers: tuple[range, ...] = ()
    """Layers of each stage of the model."""

    @property
    def bubble_fraction(self) -> float:
        """Share of the ranks' time without compute."""
        return bubble_fraction(self.timeline)

    @property
    def peak_units(self) -> list[float]:
        """Most units alive, by rank."""
        return peak_units(self.lowered, self.timeline)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineArguments:
    """The command line as it was typed."""

    schedule: str
    stages: int
    micro_batches: int
    chunks: int
    virtual: int
    forward: float | None
    backward: float | None
    weight: float | None
    send: float | None
    model: str | None
    seq_len: str | None
    hardware: str | None
    link: str | None
    rows: int
    dtype: common.Dtype
    lora: int | None
    partition: common.Partition
    offload: Offload
    recompute: bool

    @property
    def name(self) -> str:
        """What is simulated: "seq1f1b", or "seq1f1b, Llama-3.1-8B, 128K tokens"."""
        parts = [] if self.model is None else [self.model, f"{self.seq_len} tokens"]
        return ", ".join((self.schedule, *parts))

    @property
    def title(self) -> str:
        """The same with its size: "seq1f1b, 4 ranks, 8 micro-batches of 4 chunks"."""
        parts = [self.name, f"{self.stages} ranks"]
        parts += [f"{self.virtual} stages each"] if self.virtual > 1 else []
        return ", ".join((*parts, f"{self.micro_batches} micro-batches of {self.chunks} chunks"))

    @property
    def forward_seconds(self) -> float:
        """Of one unit, without a model."""
        return 1.0 if self.forward is None else self.forward

    @property
    def backward_seconds(self) -> float:
        """Likewise."""
        return 2.0 if self.backward is None else self.backward

    def simulate(self) -> Simulated:
        """Generates the schedule and simulates it.

        Raises:
            ScheduleError: there is no such schedule, or not of this size.
            ConfigError: a value is refused, or two that exclude each other are given.
            UnsupportedModelError: the engine refuses such models.
        """
        self._check()
        size = Size(self.stages, self.micro_batches, self.chunks, self.virtual)
        schedule = generate(self.schedule, size)
        if self.model is not None:
            return self._simulate_model(schedule)
        lowered = lower(schedule) if self.send else schedule
        seconds = fixed_seconds(
            self.forward_seconds,
            self.backward_seconds,
            weight=self.weight,
            send=self.send or 0.0,
        )
        timeline = simulate_pipeline(lowered, seconds=shared_seconds(schedule, seconds))
        return Simulated(schedule=schedule, lowered=lowered, timeline=timeline)

    def _simulate_model(self, schedule: Schedule) -> Simulated:
        assert self.model is not None, "asked only with one"
        assert self.seq_len is not None, "checked before"
        profile = load_profile(self.hardware or common.DEFAULT_HARDWARE)
        config = SPPOConfig(num_chunks=self.chunks, partition=self.partition.value)
        question = question_for(
            common.read_model(self.model),
            config,
            profile=profile,
            total_tokens=common.parse_tokens(self.seq_len),
            batch_rows=self.rows,
            dtype_name=str(self.dtype),
            lora_rank=self.lora,
            trace=common.trace_unknown,
        )
        bounds = chunk_bounds(
            config,
            question.shape,
            question.total_tokens,
            device_kind=profile.kind,
            stages=schedule.num_stages,
        )
        costs = PipelineCost(
            schedule,
            ModelCost(
                shape=question.shape,
                profile=profile,
                dtype_name=str(self.dtype),
                batch_rows=self.rows,
            ),
            bounds,
            saved="inputs" if self.recompute else "whole",
            offload=self.offload.value,
            link_bytes_per_second=parse_bytes(self.link, field="--link", total_bytes=None)
            if self.link
            else UNKNOWN_LINK,
        )
        lowered = costs.lowered(schedule)
        timeline = costs.simulate(lowered)
        peaks = [timeline.peak(f"{r}.device").num_bytes for r in range(schedule.num_ranks)]
        return Simulated(
            schedule=schedule,
            lowered=lowered,
            timeline=timeline,
            peak_bytes=peaks,
            layers=costs.stages,
        )

    def _check(self) -> None:
        seconds = {
            "--forward": self.forward,
            "--backward": self.backward,
            "--weight": self.weight,
            "--send": self.send,
        }
        of_model = {
            "--seq-len": self.seq_len,
            "--hardware": self.hardware,
            "--link": self.link,
            "--lora": self.lora,
            "--recompute": self.recompute or None,
            "--offload": None if self.offload is Offload.none else self.offload,
        }
        wrong = of_model if self.model is None else seconds
        for option in (name for name, value in wrong.items() if value is not None):
            allowed = "with --model" if self.model is None else "without --model, which has its own"
            raise ConfigError(
                f"{option} was given. Allowed: only {allowed}. Remedy: leave one of them out."
            )
        if self.model is not None and self.seq_len is None:
            raise ConfigError(
                "--model was given without --seq-len. Allowed: both. Remedy: add --seq-len 128K, "
                "the tokens of each row."
            )
        for option, value in seconds.items():
            if value and not _LEAST_SECONDS <= value <= _MOST_SECONDS:
                raise ConfigError(
                    f"{option} is {value}. Allowed: seconds, zero or {_LEAST_SECONDS:g} to "
                    f"{_MOST_SECONDS:g}. Remedy: use 1."
                )
        if (self.weight or 0.0) > self.backward_seconds:
            raise ConfigError(
                f"--weight is {self.weight}, more than --backward, {self.backward_seconds}. "
                "Allowed: a part of it. Remedy: --backward is the whole backward; raise it."
            )
        self._check_size()

    def _check_size(self) -> None:
        """Refuse what would take minutes or gigabytes to simulate, before anything is made."""
        sizes = {
            "--pp-size": self.stages,
            "--pp-virtual-stages": self.virtual,
            "--micro-batches": self.micro_batches,
            "--num-chunks": self.chunks,
        }
        most = _MOST_UNITS if self.model is None else _MOST_UNITS_OF_MODEL
        units = math.prod(max(1, size) for size in sizes.values())
        if units > most or self.stages * self.virtual > _MOST_STAGES:
            seen = " x ".join(f"{name} {show(size)}" for name, size in sizes.items())
            raise ConfigError(
                f"{seen} are {show(units)} chunks over all stages. Allowed: a product of at most "
                f"{most:,}{'' if self.model is None else ' with --model'}, and at most "
                f"{_MOST_STAGES:,} stages in all. Remedy: simulate fewer micro-batches; the bubble "
                "of many follows from the bubble of a few."
            )


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
    hardware: common.Hardware = None,
    link: Annotated[
        str | None,
        typer.Option(help="Bytes per second between ranks, each way.  [default: 25GiB]"),
    ] = None,
    rows: common.Rows = 1,
    dtype: common.ComputeDtype = common.Dtype.bfloat16,
    lora: common.Lora = None,
    partition: common.Cut = common.Partition.auto,
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
    as_json: common.AsJson = False,
) -> None:
    """Simulate a pipeline schedule: its bubbles, and what each rank holds.

    Costs are seconds that you give, the same for all chunks, or those of a model on a machine.

    Exit code 0: simulated. 2: bad input.
    """
    arguments = common.from_options(PipelineArguments, locals())
    with common.bad_input(as_json):
        common.check_figure(figure)
        simulated = arguments.simulate()
        with common.writing(figure, trace):
            if figure is not None:
                timeline, name = simulated.timeline, arguments.name
                draw_schedule(simulated.lowered, timeline, path=figure, title=name)
            if trace is not None:
                write_trace(simulated.timeline, trace)
    if as_json:
        common.echo_json(_to_dict(simulated))
    else:
        out = common.console()
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
