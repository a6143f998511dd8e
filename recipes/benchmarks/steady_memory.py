"""Measures whether memory stays as it is over many steps that offload, under the Trainer.

    python recipes/benchmarks/steady_memory.py --check               # on a GPU where there is one
    python recipes/benchmarks/steady_memory.py --tokens 512 --disk . # activations on disk

Rows of three lengths take turns, so that there are three plans and memory is freed in another order
than it was taken in. Noted after every step: bytes that the device's allocator has given out and
has reserved, host memory for offloading (on a GPU page-locked), and what the process holds. They
may grow while plans are new; `--check` compares the last tenth of the steps with the second.
Tokens, and the weights of a folder that has none, are random: neither changes how much memory is
taken.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from measuring import MHA, load
from rich.console import Console
from rich.table import Table
from transformers import Trainer, TrainerCallback, TrainingArguments

from sppo_hf import SPPOPlugin
from sppo_hf.cli.common import parse_tokens
from sppo_hf.engine.convert import get_engine
from sppo_hf.rules import format_bytes

LENGTHS = (1.0, 0.5, 0.75)
"""Shares of `--tokens` that rows have, in turn."""

MAX_GROWTH = 1.02
"""Largest ratio of the most bytes in the last tenth of the steps to those in the second tenth."""

COLUMNS = {
    "allocated": "device, tensors",
    "reserved": "device, reserved",
    "host": "host, offloading",
    "resident": "process",
}


class Memory(TrainerCallback):
    """Notes bytes after every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note them."""
        on_gpu = torch.cuda.is_available()
        offloaded = get_engine(kwargs["model"]).offload.stats()
        self.steps.append(
            {
                "allocated": torch.cuda.memory_allocated() if on_gpu else 0,
                "reserved": torch.cuda.memory_reserved() if on_gpu else 0,
                "host": offloaded.host_bytes,
                "resident": psutil.Process().memory_info().rss,
                "seconds": time.monotonic(),
            }
        )


def train(options: argparse.Namespace, folder: str) -> list[dict[str, float]]:
    """Train on random rows; returns what was noted after every step."""
    model: Any = load(options.model)
    vocabulary = model.config.get_text_config().vocab_size
    drawn = torch.Generator().manual_seed(0)
    rows = []
    for step in range(options.steps):
        tokens = int(options.tokens * LENGTHS[step % len(LENGTHS)])
        ids = torch.randint(vocabulary, (tokens,), generator=drawn)
        rows.append({"input_ids": ids, "labels": ids})
    on_gpu = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=1,
        num_train_epochs=1,
        # Rows in their order, so that lengths take turns.
        train_sampling_strategy="sequential",
        learning_rate=1e-5,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        parallelism_config=SPPOPlugin(
            offload=options.offload,
            recompute=options.recompute,
            device_memory=options.device_memory,
            offload_dir=options.disk,
            show_progress=False,
        ),
    )
    memory = Memory()
    Trainer(model, arguments, train_dataset=rows, callbacks=[memory]).train()
    return memory.steps


def growth(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the most bytes of the last tenth of the steps over those of the second tenth."""
    tenth = len(steps) // 10
    early, late = steps[tenth : 2 * tenth], steps[-tenth:]
    found = {}
    for name in COLUMNS:
        before, after = (max(step[name] for step in part) for part in (early, late))
        found[name] = after / before if before else 1.0
    return found


def show(steps: list[dict[str, float]]) -> None:
    """Print memory after some steps, and how much it grew."""
    table = Table(title="Memory after a step")
    for heading in ("step", *COLUMNS.values(), "seconds a step since the row before"):
        table.add_column(heading, justify="right")
    shown = sorted({9, len(steps) // 10, len(steps) // 4, len(steps) // 2, len(steps) - 1})
    for before, index in zip([None, *shown[:-1]], shown, strict=True):
        cells = [format_bytes(int(steps[index][name])) for name in COLUMNS]
        if before is None:
            seconds = ""
        else:
            took = steps[index]["seconds"] - steps[before]["seconds"]
            seconds = f"{took / (index - before):.2f}"
        table.add_row(f"{index + 1:,}", *cells, seconds)
    grew = growth(steps)
    table.add_row("growth", *(f"{grew[name]:.3f}" for name in COLUMNS), "")
    Console(width=110).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MHA, help="default: 148M parameters, random weights")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--tokens", type=parse_tokens, default=16384, help="length of the longest rows"
    )
    parser.add_argument("--offload", default="full")
    parser.add_argument("--recompute", default="selective")
    parser.add_argument("--device-memory")
    parser.add_argument("--disk", help="offload into this folder, too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit with 1 where memory grew")
    options = parser.parse_args()
    if options.steps < 20:
        parser.error(f"--steps {options.steps}: at least 20, for tenths of them are compared")
    with tempfile.TemporaryDirectory() as folder:
        steps = train(options, folder)
    if options.json:
        options.json.write_text(json.dumps(steps))
    show(steps)
    grown = [name for name, ratio in growth(steps).items() if ratio > MAX_GROWTH]
    for name in grown:
        print(f"grew by more than {MAX_GROWTH - 1:.0%}: {COLUMNS[name]}", file=sys.stderr)
    return int(options.check and bool(grown))


if __name__ == "__main__":
    sys.exit(main())
