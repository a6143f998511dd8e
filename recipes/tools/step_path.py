"""Name the files of the package that one training step passes through, and their functions.

    python recipes/tools/step_path.py [--order by_layer] [--functions]

A tiny Llama trains in three chunks on the CPU: its saved activations go to the host, or are treated
as `--offload` says (a setting of `SPPOConfig`). The first steps, which make and correct the plan,
are not looked at; of the next every function of the package that is entered counts, in any thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch


def main() -> None:
    """Print the files, most functions first, and how many they are."""
    parser = argparse.ArgumentParser(
        description="Name the files that one training step passes through."
    )
    parser.add_argument("--order", choices=["by_chunk", "by_layer"], default="by_chunk")
    parser.add_argument("--offload", default="full", help="setting of SPPOConfig: full, none, ...")
    parser.add_argument("--functions", action="store_true", help="name each file's functions, too")
    options = parser.parse_args()
    entered = trace_step(order=options.order, offload=options.offload)
    files: dict[str, list[str]] = {}
    for (file, function), _ in sorted(entered.items()):
        files.setdefault(file, []).append(function)
    for file, functions in sorted(files.items(), key=lambda item: -len(item[1])):
        names = f"  {' '.join(functions)}" if options.functions else ""
        sys.stdout.write(f"{len(functions):4} {file}{names}\n")
    rooms = Counter(file.partition("/")[0] for file in files)
    counted = ", ".join(f"{count} {room}" for room, count in rooms.most_common())
    sys.stdout.write(f"{len(files)} files, {len(entered)} functions: {counted}\n")


def trace_step(**settings: Any) -> Counter[tuple[str, str]]:
    """How often one training step enters each (file, function) of the package.

    Args:
        **settings: Of `SPPOConfig`, beside three chunks of a tiny Llama's 96 tokens.
    """
    from sppo_hf import SPPOConfig
    from sppo_hf.engine.convert import convert
    from sppo_hf.testing.tiny_models import build_tiny_model

    model: Any = build_tiny_model("llama").train()
    convert(model, SPPOConfig(num_chunks=3, show_plan=False, min_offload_size=1, **settings))
    ids = torch.arange(96)[None] % 90

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    for _ in range(4):
        step()
    spec = importlib.util.find_spec("sppo_hf")
    assert spec is not None, "the package is there"
    assert spec.origin is not None, "it is a folder with an __init__"
    root = f"{Path(spec.origin).parent}/"
    entered: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root):
            entered[code.co_filename.removeprefix(root), code.co_qualname] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return entered


if __name__ == "__main__":
    main()
