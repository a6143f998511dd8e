"""Measures what `offload_checksum` costs, which checks every byte read back from disk.

    python recipes/benchmarks/offload_checksum.py --check

SmolLM2-135M-Instruct in float32; the layer inputs that recomputation needs are offloaded to disk.
One converted model runs forward and backward with and without `offload_checksum` in turns, so that
other load on the machine slows both alike. The checks run on the copying threads, where their CPU
seconds are counted; a step may take less than that longer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from measuring import real_tokens
from rich.console import Console
from rich.table import Table
from smollm2 import DEFAULT_MODEL, load_model

from sppo_hf import SPPOPlugin
from sppo_hf.offload import store
from sppo_hf.offload.store import Bytes, Transfers, checksum
from sppo_hf.rules import format_bytes

MAX_RATIO = 1.03


@dataclass
class Switch:
    """Turns the checks of a store on and off, and counts what they take."""

    stores: list[Transfers] = field(default_factory=list)
    cpu_seconds: float = 0.0
    num_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def make(self, *args: Any, **kwargs: Any) -> Transfers:
        """Stand in for `Transfers`, and keep what it makes."""
        self.stores.append(Transfers(*args, **kwargs))
        return self.stores[-1]

    def checksum(self, memory: Bytes) -> int:
        """Stand in for `checksum`, in any thread, and count its CPU seconds."""
        start_seconds = time.thread_time()
        value = checksum(memory)
        seconds = time.thread_time() - start_seconds
        with self._lock:
            self.cpu_seconds += seconds
            self.num_bytes += memory.size
        return value

    def set_enabled(self, on: bool) -> None:
        """Switch the checks between steps, each of which reads only what it wrote itself."""
        for transfers in self.stores:
            transfers.verify = on
        self.cpu_seconds, self.num_bytes = 0.0, 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Medians over the steps of each kind; bytes are those of one step, written and read."""
    torch.set_num_threads(options.threads)
    input_ids = real_tokens(options.model, 1, options.tokens)
    model = load_model(options.model, dtype=torch.float32).train()
    switch = Switch()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    cpu_seconds: list[float] = []
    checked_bytes = 0
    with (
        tempfile.TemporaryDirectory(dir=options.dir) as folder,
        patch.object(store, "Transfers", switch.make),
        patch.object(store, "checksum", switch.checksum),
    ):
        plugin = SPPOPlugin(
            show_progress=False,
            show_plan=False,
            offload="full",
            recompute="full",
            chunk_tokens=options.chunk_tokens,
            offload_dir=folder,
        )
        plugin.convert(model)

        def step() -> float:
            start_seconds = time.perf_counter()
            model(input_ids=input_ids, labels=input_ids).loss.backward()
            return time.perf_counter() - start_seconds

        step()  # opens the files, and makes gradients, which every later step has
        for turn in range(options.steps):
            for on in (turn % 2 == 0, turn % 2 == 1):
                switch.set_enabled(on)
                seconds[on].append(step())
                if on:
                    cpu_seconds.append(switch.cpu_seconds)
                    checked_bytes = switch.num_bytes
                else:
                    assert switch.num_bytes == 0, "nothing is checked while checks are off"
        plugin.revert(model)
    on, off = (statistics.median(seconds[key]) for key in (True, False))
    return {
        "seconds_checked": on,
        "seconds_unchecked": off,
        "ratio": on / off,
        "checksum_cpu_seconds": statistics.median(cpu_seconds),
        "checked_bytes": checked_bytes,
    }


def show(taken: dict[str, Any]) -> None:
    """One table on the terminal."""
    table = Table(title="Forward and backward, medians", show_header=False)
    for name, text in (
        ("checked", f"{taken['seconds_checked']:.2f} s"),
        ("unchecked", f"{taken['seconds_unchecked']:.2f} s"),
        ("ratio", f"{taken['ratio']:.3f}"),
        ("CPU time of the checks", f"{taken['checksum_cpu_seconds']:.3f} s"),
        ("bytes written and read", format_bytes(taken["checked_bytes"])),
    ):
        table.add_row(name, text)
    Console(width=80).print(table)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="hub id or folder")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5, help="steps of each kind")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dir", type=Path, help="where offloaded bytes go")
    parser.add_argument("--json", type=Path, help="file that all numbers are written to")
    parser.add_argument(
        "--check", action="store_true", help=f"exit status 1 if the ratio is above {MAX_RATIO}"
    )
    options = parser.parse_args(argv)
    taken = measure(options)
    show(taken)
    if options.json:
        options.json.write_text(json.dumps(taken, indent=2))
    slow = taken["ratio"] > MAX_RATIO
    if slow:
        print(f"missed: ratio {taken['ratio']:.3f}, at most {MAX_RATIO}", file=sys.stderr)
    return 1 if options.check and slow else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
