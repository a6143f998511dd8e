"""Compares predicted with measured memory peaks on this CPU, for many settings.

    python recipes/benchmarks/estimator.py --check

SmolLM2-135M-Instruct, and models of Qwen3.5's and DeepSeek-V3.2's shapes, in float32. The CPU's
memory stands for the device's, a folder for the host tier's. Peaks are above the loaded model, from
the operating system.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import HYBRID, INDEXED, in_own_process
from rich.console import Console
from rich.table import Table
from smollm2 import DEFAULT_MODEL

from sppo_hf.rules import format_bytes

MAX_RELATIVE_ERROR = 0.05
MAX_ERROR_BYTES = 2**30

JOBS: dict[str, dict[str, Any]] = {
    "recompute, 4,096": {"tokens": 4096, "settings": {"recompute": "full"}},
    "recompute, 8,192": {"tokens": 8192, "settings": {"recompute": "full"}},
    "recompute, 2 x 4,096": {"rows": 2, "tokens": 4096, "settings": {"recompute": "full"}},
    "keep, 2,048": {"tokens": 2048, "settings": {"recompute": "none", "offload": "none"}},
    "keep, 4,096": {"tokens": 4096, "settings": {"recompute": "none", "offload": "none"}},
    "full recompute, the rest to disk, 8,192": {
        "tokens": 8192,
        "settings": {"recompute": "full", "offload": "full", "offload_dir": "DIR"},
    },
    "solved for 4 GiB, 4,096": {"tokens": 4096, "settings": {"device_memory": "4GiB"}},
    "by layer, 4,096": {"tokens": 4096, "settings": {"order": "by_layer"}},
    "by layer, 8,192": {"tokens": 8192, "settings": {"order": "by_layer"}},
    "by layer, chunks of 512, 4,096": {
        "tokens": 4096,
        "settings": {"order": "by_layer", "chunk_tokens": 512},
    },
    "by layer, one chunk in tiles, 4,096": {
        "tokens": 4096,
        "settings": {"order": "by_layer", "num_chunks": 1, "layer_tile_tokens": 512},
    },
    "by layer, keep, 2,048": {
        "tokens": 2048,
        "settings": {"order": "by_layer", "recompute": "none", "offload": "none"},
    },
    "by layer, full recompute, the rest and K/V to disk, 4,096": {
        "tokens": 4096,
        "settings": {
            "order": "by_layer",
            "recompute": "full",
            "offload": "full",
            "offload_kv": "full",
            "offload_dir": "DIR",
        },
    },
    "LoRA, keep, 4,096": {
        "tokens": 4096,
        "lora": 16,
        "settings": {"recompute": "none", "offload": "none"},
    },
    "hybrid, recompute, 4,096": {
        "model": HYBRID,
        "tokens": 4096,
        "settings": {"chunk_tokens": 512, "recompute": "full"},
    },
    "hybrid, keep, 2,048": {
        "model": HYBRID,
        "tokens": 2048,
        "settings": {"chunk_tokens": 512, "recompute": "none", "offload": "none"},
    },
    "indexed, recompute, 2,048": {
        "model": INDEXED,
        "tokens": 2048,
        "settings": {"chunk_tokens": 512, "recompute": "full"},
    },
    "indexed, by layer, keep, 2,048": {
        "model": INDEXED,
        "tokens": 2048,
        "settings": {
            "order": "by_layer",
            "chunk_tokens": 512,
            "recompute": "none",
            "offload": "none",
        },
    },
}


def run(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """All jobs, one after the other."""
    results: dict[str, dict[str, Any]] = {}
    for name, job in JOBS.items():
        if options.only and options.only not in name:
            continue
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            named = {"order": "by_chunk", **job["settings"]}
            settings = {k: folder if v == "DIR" else v for k, v in named.items()}
            common = {"model": options.model, "rows": 1, "threads": options.threads}
            results[name] = in_own_process({**common, **job, "settings": settings})
        taken = results[name]
        off = taken["predicted_bytes_above_loaded"] / taken["peak_bytes_above_loaded"] - 1
        print(f"{name}: {taken['seconds']:.0f} s, off by {off:+.1%}", file=sys.stderr)
        if options.json:  # what was measured stays measured, whatever comes next
            options.json.write_text(json.dumps({"results": results}, indent=2))
    return results


def missed(results: dict[str, dict[str, Any]]) -> list[str]:
    """Settings whose prediction is off by more than 5% or 1 GiB."""
    found = []
    for name, taken in results.items():
        measured = taken["peak_bytes_above_loaded"]
        off = taken["predicted_bytes_above_loaded"] - measured
        if abs(off) > min(MAX_RELATIVE_ERROR * measured, MAX_ERROR_BYTES):
            found.append(f"{name}: off by {off / measured:+.1%}")
    return found


def show(results: dict[str, dict[str, Any]]) -> None:
    """One table on the terminal."""
    table = Table(title="Peak above the loaded model, predicted and measured")
    for heading in ("setting", "predicted", "measured", "off by", "moment"):
        table.add_column(heading, justify="left" if heading in ("setting", "moment") else "right")
    for name, taken in results.items():
        measured, predicted = (
            taken["peak_bytes_above_loaded"],
            taken["predicted_bytes_above_loaded"],
        )
        off = f"{predicted / measured - 1:+.1%}"
        table.add_row(name, format_bytes(predicted), format_bytes(measured), off, taken["moment"])
    Console(width=110).print(table)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="hub id or folder")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dir", type=Path, help="where offloaded bytes go")
    parser.add_argument("--only", help="settings whose name contains this")
    parser.add_argument("--json", type=Path, help="file that all numbers are written to")
    parser.add_argument("--check", action="store_true", help="exit status 1 if one is off")
    options = parser.parse_args(argv)
    results = run(options)
    show(results)
    wrong = missed(results)
    if options.json:
        options.json.write_text(json.dumps({"results": results, "missed": wrong}, indent=2))
    for sentence in wrong:
        print(f"missed: {sentence}", file=sys.stderr)
    return 1 if options.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
