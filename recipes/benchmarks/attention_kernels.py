"""Compares attention backends: a chunk of queries against a prefix, forward and backward.

    python recipes/benchmarks/attention_kernels.py --json kernels.json --figure kernels.png

TFLOPS of every backend that supports this device and agrees with the reference, by chunk and prefix
length. FLOPs are those of visible query-key pairs (the causal half counts once); a backward counts
as 2.5 forwards. Without a GPU the sizes are small and show only that everything runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sppo_hf import SPPOConfig
from sppo_hf.attention.backends.select import BACKENDS
from sppo_hf.engine.device_facts import device_facts, device_versions
from sppo_hf.errors import SPPOError
from sppo_hf.profiling.calibrate import Heads
from sppo_hf.profiling.measure_backends import (
    Group,
    backends_table,
    draw_backends,
    measure_backends,
)

SIZES: dict[str, dict[str, Any]] = {
    # Llama-3.1-8B's layer, one with heads of 64, and one without grouped heads.
    "cuda": {
        "chunks": [512, 1024, 2048, 4096, 8192, 16384],
        "prefixes": [0, 8192, 32768, 131072],
        "heads": ["32/8/128", "32/8/64", "16/16/128"],
        "dtypes": ["bfloat16"],
    },
    "cpu": {
        "chunks": [64, 256],
        "prefixes": [0, 1024],
        "heads": ["4/2/64"],
        "dtypes": ["float32"],
    },
}


def heads_of(text: str) -> Heads:
    query, key_value, size = (int(part) for part in text.split("/"))
    if query % key_value:
        raise argparse.ArgumentTypeError(f"{query} query heads over {key_value} key heads")
    return Heads(query, key_value, size)


def parse(argv: list[str]) -> argparse.Namespace:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default=kind, choices=("cuda", "cpu"))
    parser.add_argument("--chunks", type=int, nargs="+", help="tokens")
    parser.add_argument("--prefixes", type=int, nargs="+", help="tokens")
    parser.add_argument("--heads", nargs="+", help="query/key heads/size, as 32/8/128")
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--window", type=int, help="tokens that a query sees; default: all")
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), default=list(BACKENDS))
    parser.add_argument("--most-seconds", type=float, default=1.0, help="for one call")
    parser.add_argument("--json", type=Path, help="file that all numbers are written to")
    parser.add_argument("--figure", type=Path, help="file that the picture is drawn into")
    options = parser.parse_args(argv)
    for name, value in SIZES[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main(argv: list[str]) -> int:
    options = parse(argv)
    device, groups = torch.device(options.device), list[Group]()
    about = {
        "device": device_facts(device, SPPOConfig()).name,
        "versions": device_versions(device),
    }
    measured = measure_backends(
        device,
        dtypes=[getattr(torch, name) for name in options.dtypes],
        heads=[heads_of(text) for text in options.heads],
        chunks=options.chunks,
        prefixes=options.prefixes,
        window_tokens=options.window,
        names=options.backends,
        most_seconds=options.most_seconds,
    )
    with Console(stderr=True).status("checking backends") as status:
        for group in measured:
            if not groups or groups[-1] is not group:
                groups.append(group)
            if options.json:  # what was measured stays measured, whatever comes next
                found = {**about, "groups": [one.to_json() for one in groups]}
                options.json.write_text(json.dumps(found, indent=1))
            status.update(f"{group}: {len(group.points)} points")
    for group in groups:
        Console(width=120).print(backends_table(group))
    if options.figure:
        draw_backends(groups, options.figure, title=about["device"])
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SPPOError as error:
        sys.exit(str(error))
