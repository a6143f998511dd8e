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
    """Two rows of bars, one a contender: peak memory above the loaded model, and seconds."""
    measured = json.loads(source.read_text(encoding="utf-8"))
    contenders = measured["contenders"]
    names = list(contenders)
    colours = ["#b8bfc9"] * (len(names) - 1) + ["#2a6fbb"]
    # Text stays text, and equal numbers give an equal file.
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sppo_hf", "font.size": 10}):
        figure, axes = plt.subplots(1, 2, figsize=(9, 2.3), sharey=True, layout="constrained")
        for axis, (key, title, form) in zip(
            axes,
            (
                ("peak_gib_above_loaded", "peak memory above the loaded model", "{:.2f} GiB"),
                ("seconds", "forward and backward", "{:.1f} s"),
            ),
            strict=True,
        ):
            bars = axis.barh(names, [contenders[name][key] for name in names], color=colours)
            axis.bar_label(bars, [form.format(contenders[name][key]) for name in names], padding=3)
            axis.set_title(title, fontsize=10, loc="left")
            axis.set_xticks([])
            axis.margins(x=0.18)
            axis.spines[:].set_visible(False)
            axis.tick_params(length=0)
        axes[0].invert_yaxis()
        figure.supxlabel(
            f"{measured['model']}, {measured['tokens']:,} tokens; {measured['machine']}",
            fontsize=8,
        )
        figure.savefig(target, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    draw(RESULTS / "cpu_memory.json", RESULTS / "cpu_memory.svg")
