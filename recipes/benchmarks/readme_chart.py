"""Draw the README's chart from the numbers that are committed beside it.

    python recipes/benchmarks/readme_chart.py

Reads `results/cpu_memory.json`, measured by `cpu_memory.py`, and writes `results/cpu_memory.svg`.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"


def draw(source: Path, target: Path) -> None:
    """A bar for each contender: peak memory above the loaded model."""
    measured = json.loads(source.read_text(encoding="utf-8"))
    peaks = {name: found["peak_gib_above_loaded"] for name, found in measured["contenders"].items()}
    colours = ["#b8bfc9"] * (len(peaks) - 1) + ["#2a6fbb"]
    # Text stays text, and equal numbers give an equal file.
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sppo_hf", "font.size": 10}):
        figure, axes = plt.subplots(figsize=(7.5, 2.1), layout="constrained")
        bars = axes.barh(list(peaks), list(peaks.values()), color=colours)
        axes.bar_label(bars, [f"{peak:.2f} GiB" for peak in peaks.values()], padding=3)
        axes.set_title("peak memory above the loaded model, forward and backward", loc="left")
        figure.supxlabel(
            f"{measured['model']}, {measured['tokens']:,} tokens; {measured['machine']}",
            fontsize=8,
        )
        axes.set_xticks([])
        axes.margins(x=0.12)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.invert_yaxis()
        figure.savefig(target, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    draw(RESULTS / "cpu_memory.json", RESULTS / "cpu_memory.svg")
