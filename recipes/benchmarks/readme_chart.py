"""Draw the README's charts from the numbers that are committed beside it.

    python recipes/benchmarks/readme_chart.py

Reads `results/h200.jsonl`, rows of `sppo bench` on a GPU, and writes `results/h200.svg`; reads
`results/cpu_memory.json`, measured by `cpu_memory.py`, and writes `results/cpu_memory.svg`.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
GREY, BLUE = "#b8bfc9", "#2a6fbb"
# Text stays text, and equal numbers give an equal file.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "sppo_hf", "font.size": 10}
OURS, THEIRS = "sppo-auto", "checkpointing+liger"


def draw_speed(source: Path, target: Path) -> None:
    """Two bars for each length: tokens per second of gradient checkpointing, and ours."""
    speeds: dict[int, dict[str, float]] = {}
    for line in source.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["status"] == "measured":  # later rows replace earlier ones
            by_name = speeds.setdefault(row["job"]["total_tokens"], {})
            by_name[row["job"]["contender"]] = row["numbers"]["tokens_per_second"]
    speeds = {tokens: found for tokens, found in speeds.items() if {OURS, THEIRS} <= {*found}}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.5, 0.55 + 0.62 * len(speeds)), layout="constrained")
        for place, tokens in enumerate(sorted(speeds)):
            theirs, ours = speeds[tokens][THEIRS], speeds[tokens][OURS]
            for at, speed, colour, label in (
                (place - 0.2, theirs, GREY, f"{theirs:,.0f}"),
                (place + 0.2, ours, BLUE, f"{ours:,.0f}  ({ours / theirs:.2f} x)"),
            ):
                axes.bar_label(axes.barh(at, speed, height=0.38, color=colour), [label], padding=3)
        axes.set_yticks(range(len(speeds)), [f"{tokens:,} tokens" for tokens in sorted(speeds)])
        axes.set_title(
            "tokens/s of Llama-3.1-8B, LoRA: gradient checkpointing (grey), sppo_hf (blue)",
            loc="left",
            fontsize=10,
        )
        _plain(axes)
        figure.savefig(target, metadata={"Date": None})
        plt.close(figure)


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
    draw_speed(RESULTS / "h200.jsonl", RESULTS / "h200.svg")
    draw_memory(RESULTS / "cpu_memory.json", RESULTS / "cpu_memory.svg")
