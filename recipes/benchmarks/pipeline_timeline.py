"""A pipeline's step on gloo ranks, measured, and drawn over the simulation of its schedule.

    python recipes/benchmarks/pipeline_timeline.py --figure timeline.png --trace timeline.json

Starts its ranks itself, on one machine, one thread each: a small random Llama with SmolLM2-135M's
width, by default. Of several steps the one of median length is shown. Durations for the simulation
are that step's own, as means over micro-batches, so what is compared is the order of actions and
what the simulator leaves out; the last lines say what makes the difference.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import distributed as dist
from torch import multiprocessing
from transformers import LlamaConfig, LlamaForCausalLM

from sppo_hf import SPPOConfig
from sppo_hf.engine.convert import get_engine
from sppo_hf.errors import ScheduleError
from sppo_hf.pipeline.convert import convert_over_ranks
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.registry import SCHEDULES
from sppo_hf.reporting.chrome_trace import chrome_trace
from sppo_hf.reporting.figures import (
    GREY,
    INK,
    Clock,
    add_legend,
    draw_compute,
    kind_handles,
    label_rows,
    new_figure,
    share_time_axis,
    write_title,
)
from sppo_hf.schedule.actions import COMPUTE_KINDS, Action, Kind
from sppo_hf.schedule.dependencies import DependencyGraph
from sppo_hf.schedule.generate import Size, generate
from sppo_hf.schedule.lower import lower
from sppo_hf.schedule.measured_timeline import ActionRecord
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import bubble_fraction, simulate_pipeline
from sppo_hf.schedule.timeline import COMPUTE, Timeline


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedule", choices=SCHEDULES.names(), default="seq1f1b")
    parser.add_argument("--virtual", type=int, default=1, help="stages of each rank")
    parser.add_argument("--micro-batches", type=int, default=4, help="rows of the batch")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="of each row")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=576, help="width, a multiple of 64")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3, help="measured, after one that is not")
    parser.add_argument("--figure", type=Path, help="picture, .png, .svg or .pdf")
    parser.add_argument("--trace", type=Path, help="file for chrome://tracing or ui.perfetto.dev")
    return parser.parse_args(argv)


def model_of(options: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 192),
        max_position_embeddings=options.tokens,
    )
    return LlamaForCausalLM(config)


def run_rank(rank: int, options: argparse.Namespace, port: int, out: str) -> None:
    """Run the steps on one rank; rank 0 saves the actions of all ranks."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    config = SPPOConfig(
        pp_size=options.ranks,
        pp_schedule=options.schedule,
        pp_virtual_stages=options.virtual,
        num_chunks=options.chunks,
        recompute="none",
        show_plan=False,
        show_progress=False,
    )
    model = convert_over_ranks(model_of(options), config)
    engine = get_engine(model)
    assert isinstance(engine, PipelineEngine), "the model was just made into a pipeline"
    tokens = torch.randint(0, options.vocabulary, (options.micro_batches, options.tokens))
    dist.broadcast(tokens, 0)
    steps: list[list[list[ActionRecord]]] = []
    for _ in range(1 + options.steps):
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        everyone: list[list[ActionRecord]] = [[] for _ in range(options.ranks)]
        dist.all_gather_object(everyone, engine.executed)
        steps.append(everyone)
    if rank == 0:
        torch.save(steps[1:], out)
    dist.barrier()
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> list[list[list[ActionRecord]]]:
    """Return the actions of each rank in each step, in its own order."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port, out = probe.getsockname()[1], str(Path(folder) / "steps.pt")
        probe.close()
        # Forked ranks begin at once; others import everything again.
        method = "fork" if sys.platform == "linux" else "spawn"
        multiprocessing.start_processes(
            run_rank, (options, port, out), nprocs=options.ranks, start_method=method
        )
        # Written by this script itself a moment ago.
        steps: list[list[list[ActionRecord]]] = torch.load(out, weights_only=False)
        return steps


def measured_timeline(schedule: Schedule, executed: Sequence[Sequence[ActionRecord]]) -> Timeline:
    """Returns the timeline of a measured step: each rank's compute, without waiting for messages.

    All ranks must read the same clock, as processes on one machine do.

    Returns:
        A timeline with the resources "0.compute", "1.compute" and so on, without bytes. Its zero is
        the earliest start of an action on any rank.

    Raises:
        ScheduleError: a rank's actions or their order differ from the schedule.
    """
    _check(schedule, executed)
    waits = DependencyGraph(schedule.keep(lambda action: action.kind in COMPUTE_KINDS))
    ranks, zero = _computed(executed), _begin(executed)
    done = _flat(ranks)
    ends = [one.end_seconds - zero for one in done]
    latest = [
        max(needed, key=ends.__getitem__, default=max(position - 1, 0))
        for position, needed in enumerate(waits.needs)
    ]
    bounds = accumulate(map(len, ranks), initial=0)
    return Timeline(
        actions=[one.action for one in done],
        positions={one.action: position for position, one in enumerate(done)},
        ranges={n: range(*span) for n, span in zip(waits.resources, pairwise(bounds), strict=True)},
        starts=[one.ready_seconds - zero for one in done],
        ends=ends,
        readies=[
            ends[last] if needed else 0.0 for last, needed in zip(latest, waits.needs, strict=True)
        ],
        latest=latest,
        events={},
    )


def mean_seconds(
    schedule: Schedule, executed: Sequence[Sequence[ActionRecord]]
) -> Callable[[Action], float]:
    """Returns durations for a simulation: means over micro-batches for each (kind, stage, chunk).

    Sends, receives and reductions take 0 seconds; `explain` finds their cost.
    """
    found: dict[tuple[str, int, int], list[float]] = {}
    for one in _flat(_computed(executed)):
        place = (one.action.kind, one.action.stage, schedule.chunk(one.action))
        found.setdefault(place, []).append(one.end_seconds - one.ready_seconds)
    means = {place: sum(times) / len(times) for place, times in found.items()}
    return lambda a: means.get((a.kind, a.stage, schedule.chunk(a)), 0.0)


class Difference(NamedTuple):
    """Difference between a measured step and its simulation, as the sum of three parts."""

    measured_seconds: float
    """Measured duration, from the first action's start to the last one's end on any rank."""

    simulated_seconds: float
    """Duration simulated with `mean_seconds`."""

    uneven_seconds: float
    """Part due to units whose duration differs from the mean of their kind, stage and chunk."""

    between_seconds: float
    """Part due to the host between units: starting messages, bookkeeping, a late start."""

    message_seconds: float
    """Part due to messages: their transfer, and the time until the waiting rank continues."""


def explain(schedule: Schedule, executed: Sequence[Sequence[ActionRecord]]) -> Difference:
    """Finds the reasons why the measured step is longer than the simulated one.

    The schedule is simulated again with each unit's own seconds, and then with the host's seconds
    before each unit added. The remaining difference is attributed to messages.

    Raises:
        ScheduleError: a rank's actions or their order differ from the schedule.
    """
    measured = measured_timeline(schedule, executed)
    compute = _computed(executed)
    own = {one.action: one.end_seconds - one.ready_seconds for one in _flat(compute)}
    before: dict[Action, float] = {}
    zero = _begin(executed)
    for rank in compute:
        free = zero
        for one in rank:
            before[one.action] = one.start_seconds - free
            free = one.end_seconds

    def step_seconds(seconds: Callable[[Action], float]) -> float:
        return simulate_pipeline(schedule, seconds=seconds).end_seconds

    simulated = step_seconds(mean_seconds(schedule, executed))
    uneven = step_seconds(lambda action: own.get(action, 0.0))
    between = step_seconds(lambda action: own.get(action, 0.0) + before.get(action, 0.0))
    return Difference(
        measured.end_seconds,
        simulated,
        uneven - simulated,
        between - uneven,
        measured.end_seconds - between,
    )


def _check(schedule: Schedule, executed: Sequence[Sequence[ActionRecord]]) -> None:
    if len(executed) != schedule.num_ranks:
        raise ScheduleError(
            f"{len(executed)} ranks were measured, but the schedule has {schedule.num_ranks}. "
            "Remedy: gather what all ranks of one pipeline did in one step."
        )
    for rank, (done, listed) in enumerate(zip(executed, schedule.ranks, strict=True)):
        for step in range(max(len(done), len(listed))):
            did = str(done[step].action) if step < len(done) else "nothing"
            wanted = str(listed[step]) if step < len(listed) else "nothing"
            if did != wanted:
                raise ScheduleError(
                    f"rank {rank} did {did} at step {step}, where the schedule lists {wanted}. "
                    "Remedy: compare a run with the schedule that it ran, sends included."
                )


def _begin(executed: Sequence[Sequence[ActionRecord]]) -> float:
    return min(rank[0].start_seconds for rank in executed if rank)


def _computed(executed: Sequence[Sequence[ActionRecord]]) -> list[list[ActionRecord]]:
    return [[one for one in rank if one.action.kind in COMPUTE_KINDS] for rank in executed]


def _flat(executed: Sequence[Sequence[ActionRecord]]) -> list[ActionRecord]:
    return [one for rank in executed for one in rank]


# Heights of a pair of rows, measured above simulated.
_MEASURED_HEIGHT = 0.62
_SIMULATED_HEIGHT = 0.42
_PAIR_HEIGHT = 1.35


def draw_comparison(
    schedule: Schedule,
    *,
    measured: Timeline,
    simulated: Timeline,
    difference: Difference,
    path: str | Path,
    title: str,
) -> None:
    """Draws a measured step and its simulation into a file.

    A pair of rows for each rank: measured above, simulated below. Dashed lines mark both ends.

    Raises:
        ConfigError, OSError: as `sppo_hf.reporting.figures.draw_schedule`.
    """
    rows_inches = 0.75 * schedule.num_ranks + 0.5
    figure = new_figure(path, height_inches=rows_inches + 1.7)
    head, axes = figure.subplots(2, 1, height_ratios=[0.9, rows_inches])
    longer = max(measured, simulated, key=lambda timeline: timeline.end_seconds)
    clock = Clock.of(longer)
    write_title(head, title, _comparison_lines(measured, simulated, difference, clock))
    kinds: set[Kind] = set()
    ticks: dict[float, str] = {}
    for rank in range(schedule.num_ranks):
        resource, top = f"{rank}{COMPUTE}", rank * _PAIR_HEIGHT
        below = top + _MEASURED_HEIGHT + 0.06
        for timeline, at, height in (
            (measured, top, _MEASURED_HEIGHT),
            (simulated, below, _SIMULATED_HEIGHT),
        ):
            draw_compute(
                axes, schedule, timeline, resource=resource, at=at, clock=clock, height=height
            )
        ticks[top + _MEASURED_HEIGHT / 2] = f"rank {rank}, measured"
        ticks[below + _SIMULATED_HEIGHT / 2] = "simulated"
        kinds |= {span.action.kind for span in measured.spans(resource)}
    label_rows(axes, ticks, schedule.num_ranks * _PAIR_HEIGHT - 0.2, small=7)
    ends = [
        axes.axvline(
            timeline.end_seconds * clock.per_second,
            color=colour,
            linestyle="--",
            linewidth=0.9,
            label=f"end, {name}",
        )
        for name, timeline, colour in (
            ("measured", measured, INK),
            ("simulated", simulated, GREY),
        )
    ]
    share_time_axis([axes], clock)
    axes.set_xlim(0.0, clock.end * 1.005)
    add_legend(axes, [*kind_handles(kinds), *ends])
    figure.savefig(path, dpi=150)


def _comparison_lines(
    measured: Timeline, simulated: Timeline, difference: Difference, clock: Clock
) -> list[list[str]]:
    parts = (
        ("uneven units", difference.uneven_seconds),
        ("host between units", difference.between_seconds),
        ("messages", difference.message_seconds),
    )
    named = [
        f"{name} {clock.say(timeline.end_seconds)} a step, {bubble_fraction(timeline):.1%} idle"
        for name, timeline in (("measured", measured), ("simulated", simulated))
    ]
    signs = [f"{name} {seconds * clock.per_second:+.3g}" for name, seconds in parts]
    return [named, [f"the difference in {clock.unit}: {signs[0]}", *signs[1:]]]


def compared_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Returns one trace of several timelines of the same ranks, shown above each other.

    Args:
        timelines: timelines by name, such as "measured"; the name is added to the ranks' titles.
    """
    events: list[dict[str, Any]] = []
    for offset, (name, timeline) in enumerate(timelines.items()):
        for event in chrome_trace(timeline)["traceEvents"]:
            rank = event["pid"]
            if event["name"] == "process_name":
                event["args"] = {"name": f"rank {rank}, {name}"}
            events.append({**event, "pid": rank * len(timelines) + offset})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def main(argv: list[str]) -> int:
    options = parse(argv)
    size = Size(options.ranks, options.micro_batches, options.chunks, options.virtual)
    schedule = lower(generate(options.schedule, size))
    steps = sorted(measure(options), key=lambda step: explain(schedule, step).measured_seconds)
    step = steps[(len(steps) - 1) // 2]
    measured = measured_timeline(schedule, step)
    simulated = simulate_pipeline(schedule, seconds=mean_seconds(schedule, step))
    found = explain(schedule, step)
    say = Console(highlight=False, soft_wrap=True).print
    lengths = ", ".join(f"{explain(schedule, one).measured_seconds:.3f}" for one in steps)
    say(f"steps measured: {lengths} seconds; of the one of {found.measured_seconds:.3f}:")
    say(f"measured   {found.measured_seconds:.3f} s, {bubble_fraction(measured):.1%} idle")
    say(f"simulated  {found.simulated_seconds:.3f} s, {bubble_fraction(simulated):.1%} idle")
    gap = found.measured_seconds - found.simulated_seconds
    say(f"difference {gap:+.4f} s ({gap / found.simulated_seconds:+.1%}):")
    say(f"  {found.uneven_seconds:+.4f} s  units slower or faster than their mean")
    say(f"  {found.between_seconds:+.4f} s  the host between units")
    say(f"  {found.message_seconds:+.4f} s  messages on their way")
    both = {"measured": measured, "simulated": simulated}
    if options.figure:
        title = f"{options.schedule}, {options.ranks} gloo ranks, {options.tokens:,} tokens a row"
        draw_comparison(schedule, **both, difference=found, path=options.figure, title=title)
    if options.trace:
        options.trace.write_text(json.dumps(compared_trace(both)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
