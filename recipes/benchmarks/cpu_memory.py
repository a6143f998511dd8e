"""Measures memory and time of a forward and backward on the CPU: plain, checkpointing, in chunks.

In chunks in both orders: by chunk (all layers of a chunk first) and by layer (all chunks of a layer
first), with "auto" chunks; and each layer over all tokens, with its token-wise modules in tiles.

    python recipes/benchmarks/cpu_memory.py --repeats 3 --check
    python recipes/benchmarks/cpu_memory.py --model hybrid
    python recipes/benchmarks/cpu_memory.py --model mha --tokens 16384 --only sppo "sppo by layer"

SmolLM2-135M-Instruct (or, with random weights, "hybrid", a Qwen3.5-shaped model, "indexed", a
DeepSeek-V3.2-shaped one, or "mha", SmolLM2's shape with as many K/V heads as query heads), float32,
all weights trainable, 4,096 tokens of real source code, no optimizer step. Every measurement is a
process of its own, so that no contender inherits another's memory; contenders run in turns, so that
a machine that slows down affects all of them. Memory is the process's peak above its resident
memory with the model loaded.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' own modules

import torch
from measuring import MHA, SHAPES, load, real_tokens
from report import forget_peak, loaded_bytes, peak_host_bytes
from rich.console import Console
from rich.table import Table
from smollm2 import DEFAULT_MODEL
from torch import nn

from sppo_hf import SPPOPlugin
from sppo_hf.rules import format_bytes

MAX_MEMORY_RATIO = 0.35
MAX_TIME_RATIO = 1.15
MAX_BY_LAYER_MEMORY_RATIO = {4096: 0.85, 16_384: 0.7}
"""Largest allowed ratio of memory by layer to memory by chunk, by number of tokens."""
MAX_BY_LAYER_MEMORY_RATIO_MHA = 0.6
"""The same at 16,384 tokens of a model with as many K/V heads as query heads."""
MAX_BY_LAYER_TIME_RATIO = 1.0
TILE_TOKENS = 512

Order = Literal["by_chunk", "by_layer"]


def _checkpointed(model: nn.Module) -> nn.Module:
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    return model


def _chunked(model: nn.Module, order: Order) -> nn.Module:
    return SPPOPlugin(order=order, show_progress=False).convert(model)


def _tiled(model: nn.Module) -> nn.Module:
    plugin = SPPOPlugin(
        num_chunks=1, order="by_layer", layer_tile_tokens=TILE_TOKENS, show_progress=False
    )
    return plugin.convert(model)


CONTENDERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "checkpointing": _checkpointed,
    "sppo": functools.partial(_chunked, order="by_chunk"),
    "sppo by layer": functools.partial(_chunked, order="by_layer"),
    "sppo in tiles": _tiled,
}


def measure(contender: str, model_name: str, tokens: int) -> dict[str, float]:
    """Load one contender in this process, and run one forward and backward."""
    input_ids = real_tokens(model_name, 1, tokens)
    model = CONTENDERS[contender](load(model_name))
    forget_peak()  # loading the weights does not count
    before_bytes = loaded_bytes(model)
    began = time.perf_counter()
    loss = model(input_ids=input_ids, labels=input_ids).loss
    loss.backward()
    seconds = time.perf_counter() - began
    norm = torch.linalg.vector_norm(
        torch.stack([p.grad.double().norm() for p in model.parameters() if p.grad is not None])
    )
    return {
        "seconds": seconds,
        "loaded_bytes": before_bytes,
        "peak_bytes_above_loaded": peak_host_bytes() - before_bytes,
        "loss": loss.item(),
        "gradient_norm": norm.item(),
    }


def run_all(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Run every contender `--repeats` times, in turns, each in a fresh process."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in options.only}
    for repeat in range(options.repeats):
        for name in options.only:
            command = [sys.executable, __file__, "--contender", name, "--model", options.model]
            command += ["--tokens", str(options.tokens), "--threads", str(options.threads)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            runs[name].append(json.loads(done.stdout.splitlines()[-1]))
            taken = runs[name][-1]
            above = format_bytes(taken["peak_bytes_above_loaded"])
            print(f"round {repeat + 1}: {name}: {taken['seconds']:.1f} s, {above}", file=sys.stderr)
    return runs


def summarise(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return each contender's fastest time and largest memory, and their ratios to the first's.

    The fastest run is the least disturbed one; of memory the worst case counts.
    """
    best = {
        name: {
            "seconds": min(run["seconds"] for run in taken),
            "median_seconds": statistics.median(run["seconds"] for run in taken),
            "peak_bytes_above_loaded": max(run["peak_bytes_above_loaded"] for run in taken),
            "loss": taken[0]["loss"],
            "gradient_norm": taken[0]["gradient_norm"],
        }
        for name, taken in runs.items()
    }
    first = next(iter(best.values()))
    for numbers in best.values():
        numbers["time_ratio"] = numbers["seconds"] / first["seconds"]
        numbers["memory_ratio"] = (
            numbers["peak_bytes_above_loaded"] / first["peak_bytes_above_loaded"]
        )
    return best


def missed_targets(best: dict[str, dict[str, float]], tokens: int, model: str) -> list[str]:
    """Describe in sentences the targets that the chunked model missed."""
    missed = []
    if {"sppo", "sppo by layer"} <= best.keys() and tokens in MAX_BY_LAYER_MEMORY_RATIO:
        by_layer, by_chunk = (
            best[name]["peak_bytes_above_loaded"] for name in ("sppo by layer", "sppo")
        )
        ratio, most = by_layer / by_chunk, MAX_BY_LAYER_MEMORY_RATIO[tokens]
        if model == MHA and tokens == 16_384:
            most = MAX_BY_LAYER_MEMORY_RATIO_MHA
        if ratio > most:
            missed.append(f"memory by layer is {ratio:.3f} of that by chunk, not <= {most}")
        ratio = best["sppo by layer"]["seconds"] / best["sppo"]["seconds"]
        if ratio > MAX_BY_LAYER_TIME_RATIO:
            missed.append(f"time by layer is {ratio:.3f} of that by chunk, not <= 1")
    if not {"sppo", "plain", "checkpointing"} <= best.keys():
        return missed
    ours, plain = best["sppo"], best["plain"]
    if ours["memory_ratio"] > MAX_MEMORY_RATIO:
        missed.append(f"memory is {ours['memory_ratio']:.3f} of plain, not <= {MAX_MEMORY_RATIO}")
    if ours["time_ratio"] > MAX_TIME_RATIO:
        missed.append(f"time is {ours['time_ratio']:.3f} of plain, not <= {MAX_TIME_RATIO}")
    if ours["seconds"] > best["checkpointing"]["seconds"]:
        missed.append("slower than gradient checkpointing")
    for name in ("loss", "gradient_norm"):
        if abs(ours[name] - plain[name]) > 1e-4 * abs(plain[name]):
            missed.append(f"{name} is {ours[name]:.7f}, plain has {plain[name]:.7f}")
    return missed


def show(best: dict[str, dict[str, float]], options: argparse.Namespace) -> None:
    """One table on the terminal."""
    title = f"{options.model}, {options.tokens:,} tokens, {options.threads} threads, float32"
    table = Table(title=title, caption=f"{options.repeats} runs each: fastest time, largest memory")
    table.add_column("contender")
    of_first = f"of {next(iter(best))}"
    for heading in ("above loaded model", of_first, "seconds", of_first, "loss"):
        table.add_column(heading, justify="right")
    for name, numbers in best.items():
        table.add_row(
            name,
            format_bytes(numbers["peak_bytes_above_loaded"]),
            f"{numbers['memory_ratio']:.3f}",
            f"{numbers['seconds']:.1f}",
            f"{numbers['time_ratio']:.3f}",
            f"{numbers['loss']:.6f}",
        )
    Console().print(table)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help=f"hub id, folder, or one of {', '.join(SHAPES)}"
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="who takes part"
    )
    parser.add_argument("--json", type=Path, help="file that all numbers are written to")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a target is missed")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.model = SHAPES.get(options.model, options.model)
    return options


def main(argv: list[str]) -> int:
    options = parse(argv)
    if options.contender:
        torch.set_num_threads(options.threads)
        print(json.dumps(measure(options.contender, options.model, options.tokens)))
        return 0
    runs = run_all(options)
    best = summarise(runs)
    show(best, options)
    missed = missed_targets(best, options.tokens, options.model)
    content: dict[str, Any] = {"settings": vars(options), "best": best, "runs": runs}
    content["load_average"] = os.getloadavg()
    if options.json:
        options.json.write_text(json.dumps(content | {"missed": missed}, indent=2, default=str))
    for sentence in missed:
        print(f"missed: {sentence}", file=sys.stderr)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
