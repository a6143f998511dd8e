"""`sppo simulate --pp-schedule NAME --pp-size P`: when every rank of a pipeline does what.

Neither torch nor Transformers is imported, and matplotlib only to draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sppo_hf.cli import common
from sppo_hf.config import SPPOConfig, parse_bytes
from sppo_hf.errors import ConfigError
from sppo_hf.planning.chunk_bounds import chunk_bounds
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.feasibility import request_for
from sppo_hf.planning.hardware import UNKNOWN_LINK, load_profile
from sppo_hf.planning.pipeline_cost import PipelineCost
from sppo_hf.reporting.chrome_trace import write_trace
from sppo_hf.reporting.figures import ENDINGS, draw_schedule
from sppo_hf.rules import format_bytes, show
from sppo_hf.schedule.generate import Size, all_schedules, generate, interleaved_schedules
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

_MAX_STAGES = 1024
# Chunks of all micro-batches on all stages: what is simulated in a few seconds.
_MAX_UNITS = 2**15
_MAX_UNITS_OF_MODEL = 2**14
_MAX_SECONDS = 1e9
# Shorter actions could not be told from rounding errors of a step's seconds.
_MIN_SECONDS = 1e-12
_MAX_TEXT_WIDTH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A schedule and its simulated timeline."""

    schedule: Schedule
    """The units alone."""

    lowered: Schedule
    """The schedule with sends and copies, as it was simulated."""

    timeline: Timeline
    """Start and end of every action."""

    peak_bytes: list[int] | None = None
    """Peak memory of each rank's device, [ranks]; None without a model."""

    layers: tuple[range, ...] = ()
    """Decoder layers of each stage, [stages]; () without a model."""

    @property
    def peak_units(self) -> list[float]:
        """Most units whose activations a rank holds at once, [ranks]."""
        return peak_units(self.lowered, self.timeline)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateArguments:
    """Options of `sppo simulate`, as they were typed."""

    pp_schedule: Annotated[str, typer.Option(help=f"One of {', '.join(all_schedules())}.")]
    pp_size: Annotated[int, typer.Option(help="Ranks of the pipeline, each with one stage.")]
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 1
    num_chunks: Annotated[int, typer.Option(help="Chunks of each micro-batch.")] = 1
    pp_virtual_stages: Annotated[
        int,
        typer.Option(
            help=f"Stages of each rank; only {', '.join(interleaved_schedules())} has several."
        ),
    ] = 1
    forward: Annotated[
        float | None,
        typer.Option(help="Seconds of one chunk's forward on one stage. \\[default: 1]"),
    ] = None
    backward: Annotated[
        float | None, typer.Option(help="Seconds of its whole backward. \\[default: 2]")
    ] = None
    weight: Annotated[
        float | None,
        typer.Option(help="The part of it that weight gradients take. \\[default: half]"),
    ] = None
    send: Annotated[
        float | None, typer.Option(help="Seconds of one chunk on a link. \\[default: 0]")
    ] = None
    model: Annotated[
        str | None,
        typer.Option(help="Instead of seconds: a model folder, a config.json, or a hub id."),
    ] = None
    seq_len: Annotated[
        str | None, typer.Option(help="Tokens of each row, with --model: 131072, 128K or 1M.")
    ] = None
    hardware: common.Hardware = None
    link: Annotated[
        str | None,
        typer.Option(help="Bytes per second between ranks, each way. \\[default: 25GiB]"),
    ] = None
    micro_batch_size: common.MicroBatchSize = 1
    dtype: common.Dtype = "bfloat16"
    lora: common.Lora = None
    partition: common.Partition = "auto"
    offload: Annotated[
        Literal["none", "full", "sppo"],
        typer.Option(help="What is offloaded of each layer and chunk, by a fixed rule."),
    ] = "none"
    recompute: Annotated[
        bool,
        typer.Option(
            help="Keep layer inputs and attention outputs, and recompute the rest in backward."
        ),
    ] = False
    figure: Annotated[
        Path | None,
        typer.Option(help=f"Draw the timeline into a file ({', '.join(ENDINGS)})."),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the timeline as JSON for ui.perfetto.dev."),
    ] = None

    @property
    def name(self) -> str:
        """Title of a picture: "seq1f1b", or "seq1f1b, Llama-3.1-8B, 128K tokens"."""
        parts = [] if self.model is None else [self.model, f"{self.seq_len} tokens"]
        return ", ".join((self.pp_schedule, *parts))

    @property
    def title(self) -> str:
        """Title of the table: "seq1f1b, 4 ranks, 8 micro-batches of 4 chunks"."""
        parts = [self.name, f"{self.pp_size} ranks"]
        parts += [f"{self.pp_virtual_stages} stages each"] if self.pp_virtual_stages > 1 else []
        return ", ".join(
            (*parts, f"{self.micro_batches} micro-batches of {self.num_chunks} chunks")
        )

    @property
    def unit_seconds(self) -> tuple[float, float]:
        """Seconds of a forward and of a backward unit without a model."""
        forward = 1.0 if self.forward is None else self.forward
        return forward, 2.0 if self.backward is None else self.backward

    def simulate(self) -> Simulation:
        """Generate the schedule and simulate it.

        Raises:
            ScheduleError: There is no such schedule, or not of this size.
            ConfigError: A value is refused, or two that exclude each other are given.
            UnsupportedModelError: The engine refuses such models.
        """
        self._check()
        size = Size(self.pp_size, self.micro_batches, self.num_chunks, self.pp_virtual_stages)
        schedule = generate(self.pp_schedule, size)
        if self.model is not None:
            return self._simulate_model(schedule)
        lowered = lower(schedule) if self.send else schedule
        seconds = fixed_seconds(*self.unit_seconds, weight=self.weight, send=self.send or 0.0)
        timeline = simulate_pipeline(lowered, seconds=shared_seconds(schedule, seconds))
        return Simulation(schedule=schedule, lowered=lowered, timeline=timeline)

    def _simulate_model(self, schedule: Schedule) -> Simulation:
        assert self.model is not None, "called only with a model"
        assert self.seq_len is not None, "checked before"
        profile = load_profile(self.hardware or common.DEFAULT_HARDWARE)
        config = SPPOConfig(num_chunks=self.num_chunks, partition=self.partition)
        request = request_for(
            common.read_model(self.model),
            config,
            profile=profile,
            total_tokens=common.parse_tokens(self.seq_len),
            batch_rows=self.micro_batch_size,
            dtype_name=self.dtype,
            lora_rank=self.lora,
            trace=common.trace_unknown_model,
        )
        bounds = chunk_bounds(
            config,
            request.shape,
            request.total_tokens,
            device_kind=profile.kind,
            stages=schedule.num_stages,
        )
        cost = ModelCost(
            shape=request.shape,
            profile=profile,
            dtype_name=self.dtype,
            batch_rows=self.micro_batch_size,
        )
        link_rate: float = UNKNOWN_LINK
        if self.link:
            link_rate = parse_bytes(self.link, field="--link", total_bytes=None)
        costs = PipelineCost(
            schedule,
            cost,
            bounds,
            saved="inputs" if self.recompute else "whole",
            offload=self.offload,
            link_bytes_per_second=link_rate,
        )
        lowered = costs.lowered(schedule)
        timeline = costs.simulate(lowered)
        peaks = [timeline.peak(f"{r}.device").num_bytes for r in range(schedule.num_ranks)]
        return Simulation(
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
        model_options = {
            "--seq-len": self.seq_len,
            "--hardware": self.hardware,
            "--link": self.link,
            "--lora": self.lora,
            "--recompute": self.recompute or None,
            "--offload": None if self.offload == "none" else self.offload,
        }
        wrong = model_options if self.model is None else seconds
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
            if value and not _MIN_SECONDS <= value <= _MAX_SECONDS:
                raise ConfigError(
                    f"{option} is {value}. Allowed: seconds, zero or {_MIN_SECONDS:g} to "
                    f"{_MAX_SECONDS:g}. Remedy: use 1."
                )
        backward = self.unit_seconds[1]
        if (self.weight or 0.0) > backward:
            raise ConfigError(
                f"--weight is {self.weight}, more than --backward, {backward}. "
                "Allowed: a part of it. Remedy: --backward is the whole backward; raise it."
            )
        self._check_size()

    def _check_size(self) -> None:
        """Refuse sizes that would take minutes or gigabytes to simulate."""
        sizes = {
            "--pp-size": self.pp_size,
            "--pp-virtual-stages": self.pp_virtual_stages,
            "--micro-batches": self.micro_batches,
            "--num-chunks": self.num_chunks,
        }
        most = _MAX_UNITS if self.model is None else _MAX_UNITS_OF_MODEL
        units = math.prod(max(1, size) for size in sizes.values())
        if units > most or self.pp_size * self.pp_virtual_stages > _MAX_STAGES:
            seen = " x ".join(f"{name} {show(size)}" for name, size in sizes.items())
            raise ConfigError(
                f"{seen} are {show(units)} chunks over all stages. Allowed: a product of at most "
                f"{most:,}{'' if self.model is None else ' with --model'}, and at most "
                f"{_MAX_STAGES:,} stages in all. Remedy: simulate fewer micro-batches; the bubble "
                "of many follows from the bubble of a few."
            )


@common.with_options(SimulateArguments)
def simulate(arguments: SimulateArguments, as_json: common.AsJson = False) -> None:
    """Simulate a pipeline schedule: its bubbles, and what each rank holds.

    Costs are seconds that you give, the same for all chunks, or those of a model on a machine.

    Exit code 0: simulated. 2: bad input.
    """
    figure, trace = arguments.figure, arguments.trace
    with common.bad_input(as_json):
        common.check_figure(figure)
        simulation = arguments.simulate()
        with common.writing(figure, trace):
            if figure is not None:
                timeline, name = simulation.timeline, arguments.name
                draw_schedule(simulation.lowered, timeline, path=figure, title=name)
            if trace is not None:
                write_trace(simulation.timeline, trace)
    if as_json:
        common.echo_json(_to_dict(simulation))
    else:
        out = common.console()
        out.print(_table(simulation, arguments.title))
        _print_over_time(out, simulation, arguments)


def _to_dict(simulation: Simulation) -> dict[str, Any]:
    has_no_sends = simulation.lowered is simulation.schedule
    return {
        "bubble_fraction": bubble_fraction(simulation.timeline),
        "step_seconds": simulation.timeline.end_seconds,
        "peak_units": simulation.peak_units,
        "peak_bytes": simulation.peak_bytes,
        # Sends are listed also where they were given no time and so were not simulated.
        "actions": (lower(simulation.schedule) if has_no_sends else simulation.lowered).texts(),
    }


def _table(simulation: Simulation, title: str) -> Group:
    table = Table(show_edge=False)
    with_model = () if simulation.peak_bytes is None else ("peak memory", "layers")
    for heading in ("rank", "stages", "busy", "peak units", *with_model):
        is_text = heading in ("stages", "layers")
        table.add_column(heading, justify="left" if is_text else "right")
    seconds = simulation.timeline.end_seconds
    for rank, units in enumerate(simulation.peak_units):
        stages = [s for s, r in enumerate(simulation.schedule.stage_ranks) if r == rank]
        busy = simulation.timeline.busy_seconds(f"{rank}.compute") / seconds if seconds else 1.0
        row = [str(rank), " ".join(map(str, stages)), f"{busy:.1%}", f"{units:.4g}"]
        if simulation.peak_bytes is not None:
            layers = (simulation.layers[stage] for stage in stages)
            row.append(format_bytes(simulation.peak_bytes[rank]))
            row.append(" ".join(f"{held.start}-{held.stop - 1}" for held in layers))
        table.add_row(*row)
    idle = bubble_fraction(simulation.timeline)
    caption = f"a step takes {seconds:,.6g} seconds, ranks idle {idle:.2%} of it"
    return Group(Text(title, style="bold"), table, Text(caption))


def _print_over_time(out: Any, simulation: Simulation, arguments: SimulateArguments) -> None:
    """Print the timeline as text, if units take whole seconds and it is not too wide."""
    if arguments.model is not None or simulation.schedule.shared_units:
        return
    narrow = simulation.timeline.end_seconds <= _MAX_TEXT_WIDTH
    shown = (
        narrow
        and all(s == int(s) >= 1 for s in arguments.unit_seconds)
        and over_time(simulation.timeline, 1.0)
    )
    if shown and max(map(len, shown.splitlines())) <= _MAX_TEXT_WIDTH:
        out.print(Text("\n" + shown), soft_wrap=True)
