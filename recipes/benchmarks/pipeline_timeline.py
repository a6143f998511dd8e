"""A pipeline's step on gloo ranks, measured, and drawn over the simulation of its schedule.

    python recipes/benchmarks/pipeline_timeline.py --figure timeline.png --trace timeline.json

Starts its ranks itself, on one machine, one thread each: a small random Llama with SmolLM2-135M's
width, by default. Of several steps the one of median length is shown. Durations for the simulation
are that step's own, as means over micro-batches, so what is compared is the order of actions and
what the simulator leaves out; the last lines say what makes the difference.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from torch import distributed as dist
from torch import multiprocessing
from transformers import LlamaConfig, LlamaForCausalLM

from sppo_hf import SPPOConfig
from sppo_hf.engine.convert import get_engine
from sppo_hf.pipeline.convert import convert_over_ranks
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.registry import SCHEDULES
from sppo_hf.reporting.chrome_trace import write_trace
from sppo_hf.reporting.figures import draw_comparison
from sppo_hf.schedule.generate import Size, generate
from sppo_hf.schedule.lower import lower
from sppo_hf.schedule.measured_timeline import (
    ActionRecord,
    explain,
    mean_seconds,
    measured_timeline,
)
from sppo_hf.schedule.simulate import bubble_fraction, simulate_pipeline


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
    if options.figure:
        title = f"{options.schedule}, {options.ranks} gloo ranks, {options.tokens:,} tokens a row"
        both = {"measured": measured, "simulated": simulated}
        draw_comparison(schedule, **both, difference=found, path=options.figure, title=title)
    if options.trace:
        write_trace({"measured": measured, "simulated": simulated}, options.trace)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
