"""How long the planner itself takes, in CPU seconds: solver, simulator, validator, command line.

    python recipes/benchmarks/planner_speed.py --check

The solver gets a Llama-like model of 80 layers in 64 chunks with K/V on the host: by chunk, by
layer, and choosing between them. The simulator gets the resulting plan, and the validator a
pipeline of 8 ranks and 256 chunks whose activations are all offloaded. Commands are started as a
user would. CPU seconds hardly depend on other programs that run; wall time does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sppo_hf.cli.common import trace_unknown_model
from sppo_hf.config import SPPOConfig
from sppo_hf.planning.chunk_bounds import even_bounds
from sppo_hf.planning.config_file import load_config
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Batch, Order
from sppo_hf.planning.feasibility import request_for
from sppo_hf.planning.hardware import load_profile
from sppo_hf.planning.lowering import lower
from sppo_hf.planning.memory import Budgets
from sppo_hf.planning.solve import BudgetViolation, Choices, solve_chunks
from sppo_hf.schedule.generate import Size, generate
from sppo_hf.schedule.lower import lower as lower_schedule
from sppo_hf.schedule.validate import validate

CHUNKS = 64
LAYERS = 80
CHUNK_TOKENS = 8192
GIB = 2**30
ORDERS: dict[str, tuple[Order, ...]] = {
    "by chunk": ("by_chunk",),
    "by layer": ("by_layer",),
    "both orders": ("by_layer", "by_chunk"),
}
SOLVE = "solve, 64 chunks x 80 layers, {}"
VALIDATE = "validate 8 ranks x 256 chunks, {}"
LIMIT_SECONDS = {
    **dict.fromkeys(map(SOLVE.format, ORDERS), 1.0),
    VALIDATE.format("seq1f1b"): 0.5,
    "sppo --help": 0.5,
    "sppo estimate, 128K, LoRA": 1.5,
    "sppo estimate, 128K, all weights": 1.5,
}


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """CPU seconds of every repetition, by what was done; the simulator's in actions per second."""
    config = load_config(options.model)
    config.num_hidden_layers = LAYERS
    request = request_for(
        config,
        SPPOConfig(),
        profile=load_profile("h100"),
        total_tokens=CHUNKS * CHUNK_TOKENS,
        lora_rank=16,
        trace=trace_unknown_model,
    )
    assert request.device.profile is not None, "a profile was named"
    cost = ModelCost(
        shape=request.shape,
        profile=request.device.profile,
        dtype_name="bfloat16",
        batch_rows=1,
    )
    batch = Batch(batch_rows=1, tile_tokens=512, training=True)
    cuts = [even_bounds(CHUNKS * CHUNK_TOKENS, CHUNKS)]
    budgets = Budgets(device=140 * GIB, host=2048 * GIB, disk=0)
    choices = Choices(kv_tiers=("host",))
    found: Any = None

    def solved(orders: tuple[Order, ...]) -> None:
        nonlocal found
        found = solve_chunks(cost, batch, cuts, budgets, choices, orders=orders)

    taken = {
        SOLVE.format(name): _seconds(lambda orders=orders: solved(orders), options.repeat)
        for name, orders in ORDERS.items()
    }
    assert not isinstance(found, BudgetViolation), f"{found} breaks"
    program = lower(found.decisions, cost)
    actions = len(program.simulate())
    seconds = _seconds(lambda: program.simulate(), options.repeat)
    taken["simulate, actions per second"] = [actions / s for s in seconds]
    for name, virtual in (("seq1f1b", 1), ("interleaved_seq1f1b", 2)):
        made = generate(name, Size(8, 1, 256, virtual))
        lowered = lower_schedule(made, offloaded=lambda stage, unit: True, reduce=True)
        checked = _seconds(lambda lowered=lowered: validate(lowered), options.repeat)
        taken[VALIDATE.format(name)] = checked
    shipped, long = options.model, ["--seq-len", "128K"]
    for name, words in (
        ("sppo --help", ["--help"]),
        ("sppo estimate, 128K, LoRA", ["estimate", shipped, *long, "--lora", "16"]),
        ("sppo estimate, 128K, all weights", ["estimate", shipped, *long]),
        (
            "sppo plan --gpus 128, 16 rows of 128K",
            ["plan", shipped, *long, "--gpus", "128", "--micro-batch-size", "16"],
        ),
    ):
        _run(words)  # compiles the modules, as installing does
        taken[name] = _seconds(lambda words=words: _run(words), options.repeat)
    return taken


def _seconds(work: Callable[[], Any], repeat: int) -> list[float]:
    taken = []
    for _ in range(repeat):
        began = _cpu_seconds()
        work()
        taken.append(_cpu_seconds() - began)
    return taken


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the child processes it waited for."""
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + others.ru_utime + others.ru_stime


def _run(words: list[str]) -> None:
    command = [sys.executable, "-c", "from sppo_hf.cli import main; main()", *words]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=environment)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b", help="config.json, or a shipped name")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file that all numbers are written to")
    parser.add_argument("--check", action="store_true", help="exit status 1 if one takes longer")
    options = parser.parse_args(argv)
    taken = measure(options)
    table = Table(title="CPU seconds: median (best, worst)")
    for heading in ("what", "median", "best", "worst", "limit"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name, values in taken.items():
        unit = "/s" if "per second" in name else " s"
        best, worst = (max, min) if unit == "/s" else (min, max)
        cells = (statistics.median(values), best(values), worst(values))
        limit = LIMIT_SECONDS.get(name)
        shown = [f"{value:,.0f}{unit}" if unit == "/s" else f"{value:.3f}{unit}" for value in cells]
        table.add_row(name, *shown, "" if limit is None else f"{limit:g} s")
    Console(width=100).print(table)
    if options.json:
        options.json.write_text(json.dumps(taken, indent=2))
    slow = [n for n, most in LIMIT_SECONDS.items() if statistics.median(taken[n]) > most]
    for name in slow:
        print(f"missed: {name}", file=sys.stderr)
    return 1 if options.check and slow else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
