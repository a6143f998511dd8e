"""Draw the README's charts from the numbers that are committed beside it.

    python recipes/benchmarks/readme_chart.py

Reads `results/h100.jsonl` and `results/h200.jsonl`, rows of `sppo bench`, and writes
`results/gpu_speed.svg`; reads `results/cpu_memory.json`, measured by `cpu_memory.py`, and writes
`results/cpu_memory.svg`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
GREY, BLUE = "#b8bfc9", "#2a6fbb"
# Text stays text, and equal numbers give an equal file.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "sppo_hf", "font.size": 10}
MODEL = "llama-3.1-8b"
OURS, THEIRS = "sppo-auto", "checkpointing+liger"


def draw_speed(sources: Sequence[Path], target: Path) -> None:
    """Two bars for each length: tokens per second of gradient checkpointing, and ours.

    Rows replace earlier ones of the same length and device. Of several devices the last counts on
    which both ran, or ours ran and checkpointing was out of memory.
    """
    ran: dict[tuple[int, str], dict[str, dict[str, Any]]] = {}
    for line in "".join(source.read_text(encoding="utf-8") for source in sources).splitlines():
        row = json.loads(line)
        if row["kind"] == "speed" and row["job"]["model"] == MODEL and row["status"] != "failed":
            place = row["job"]["total_tokens"], _device(row)
            ran.setdefault(place, {})[row["job"]["contender"]] = row
    found = {tokens: rows for (tokens, _), rows in ran.items() if {OURS, THEIRS} <= {*rows}}
    found = dict(sorted(found.items()))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.5, 0.55 + 0.62 * len(found)), layout="constrained")
        for place, rows in enumerate(found.values()):
            theirs, ours = (
                rows[name]["numbers"].get("tokens_per_second") for name in (THEIRS, OURS)
            )
            more = f"  ({ours / theirs:.2f} x)" if theirs else ""
            for at, speed, colour, label in (
                (place - 0.2, theirs or 0, GREY, f"{theirs:,.0f}" if theirs else "out of memory"),
                (place + 0.2, ours, BLUE, f"{ours:,.0f}{more}"),
            ):
                axes.bar_label(axes.barh(at, speed, height=0.38, color=colour), [label], padding=3)
        places = [f"{tokens:,} tokens, {_device(rows[OURS])}" for tokens, rows in found.items()]
        axes.set_yticks(range(len(found)), places)
        axes.set_title(
            "tokens/s of Llama-3.1-8B, LoRA: gradient checkpointing (grey), sppo_hf (blue)",
            loc="left",
            fontsize=10,
        )
        _plain(axes)
        figure.savefig(target, metadata={"Date": None})
        plt.close(figure)


def _device(row: dict[str, Any]) -> str:
    return row["environment"]["device_name"].split()[1]


def draw_memory(source: Path, target: Path) -> None:
    """A bar for each contender: peak memory above the loaded model."""
    measured = json.loads(source.read_text(encoding="utf-8"))
    peaks = {name: found["peak_gib_above_loaded"] for name, found in measured["contenders"].items()}
    colours = [GREY] * (len(peaks) - 1) + [BLUE]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.5, 2.1), layout="constrained")
        bars = axes.barh(list(peaks), list(peaks.values()), color=colours)
        axes.bar_label(bars, [f"{peak:.2f} GiB" for peak in peaks.values()], padding=3)
        axes.set_title("peak memory above the loaded model, forward and backward", loc="left")
        figure.supxlabel(
            f"{measured['model']}, {measured['tokens']:,} tokens; {measured['machine']}",
            fontsize=8,
        )
        _plain(axes)
        figure.savefig(target, metadata={"Date": None})
        plt.close(figure)


def _plain(axes: plt.Axes) -> None:
    axes.set_xticks([])
    axes.margins(x=0.12)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.invert_yaxis()


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    draw_speed([RESULTS / "h100.jsonl", RESULTS / "h200.jsonl"], RESULTS / "gpu_speed.svg")
    draw_memory(RESULTS / "cpu_memory.json", RESULTS / "cpu_memory.svg")
