"""Measures how memory grows with length on a CPU with activations, and K/V too, on disk.

    python recipes/benchmarks/disk_tokens.py --check

SmolLM2-135M-Instruct in float32, 2,048 to 16,384 tokens in chunks of 512. Peaks are above the
loaded model; the growth per token is the slope of a straight line through them, without what does
not depend on the length. K/V and dK/dV in float32 take 92 KB per token, and a plain backward keeps
about 1.9 MB per token.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from measuring import in_own_process
from rich.console import Console
from rich.table import Table
from smollm2 import DEFAULT_MODEL

from sppo_hf.rules import format_bytes

CHUNK_TOKENS = 512
SETTINGS: dict[str, dict[str, Any]] = {
    "activations on disk": {"offload": "full", "recompute": "full"},
    "activations and K/V on disk": {"offload": "full", "recompute": "full", "offload_kv": "full"},
}
MAX_BYTES_PER_TOKEN = {"activations on disk": 120_000, "activations and K/V on disk": 40_000}


def run(options: argparse.Namespace) -> dict[str, dict[int, dict[str, Any]]]:
    """Every setting at every length."""
    results: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in SETTINGS}
    for name, settings in SETTINGS.items():
        for tokens in options.tokens:
            with tempfile.TemporaryDirectory(dir=options.dir) as folder:
                job = {
                    "model": options.model,
                    "rows": 1,
                    "tokens": tokens,
                    "threads": options.threads,
                    "warm_up": False,
                    "settings": {**settings, "chunk_tokens": CHUNK_TOKENS, "offload_dir": folder},
                }
                results[name][tokens] = in_own_process(job)
            taken = results[name][tokens]
            above = format_bytes(taken["peak_bytes_above_loaded"])
            if options.json:  # what was measured stays measured, whatever comes next
                options.json.write_text(json.dumps(results, indent=2))
            print(f"{name}, {tokens:,} tokens: {above}, {taken['seconds']:.0f} s", file=sys.stderr)
    return results


def slope_bytes(taken: dict[int, dict[str, Any]]) -> float:
    """Growth of the peak, bytes per token: least squares over the lengths."""
    peaks = [run["peak_bytes_above_loaded"] for run in taken.values()]
    return float(np.polyfit(list(taken), peaks, 1)[0])


def show(results: dict[str, dict[int, dict[str, Any]]]) -> None:
    """One table on the terminal."""
    table = Table(title="Peak above the loaded model")
    for heading in ("setting", "tokens", "peak", "on disk", "seconds", "waiting for the disk"):
        table.add_column(heading, justify="left" if heading == "setting" else "right")
    for name, taken in results.items():
        for tokens, run in taken.items():
            peak, disk = run["peak_bytes_above_loaded"], run["disk_bytes"]
            row = [name, f"{tokens:,}", format_bytes(peak), format_bytes(disk)]
            table.add_row(*row, f"{run['seconds']:.0f}", f"{run['stall_seconds']:.1f}")
        table.add_row(f"  growth: {slope_bytes(taken) / 1e3:.1f} KB per token", end_section=True)
    Console(width=110).print(table)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="hub id or folder")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16_384])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dir", type=Path, help="where offloaded bytes go")
    parser.add_argument("--json", type=Path, help="file that all numbers are written to")
    parser.add_argument("--check", action="store_true", help="exit status 1 if one grows faster")
    options = parser.parse_args(argv)
    results = run(options)
    show(results)
    wrong = [
        f"{name}: {slope_bytes(taken) / 1e3:.1f} KB per token"
        for name, taken in results.items()
        if slope_bytes(taken) > MAX_BYTES_PER_TOKEN[name]
    ]
    for sentence in wrong:
        print(f"missed: {sentence}", file=sys.stderr)
    return 1 if options.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
