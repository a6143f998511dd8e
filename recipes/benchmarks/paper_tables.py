"""SPPO's and Seq1F1B's published tables beside what the planner makes of the same questions.

    python recipes/benchmarks/paper_tables.py --check

Every number of ours is a **simulation** of a whole step over all ranks, none is measured; published
ones are quoted. Assumed are: the shipped A100-80GB profile (public figures), but 13 GB/s each way
between GPU and host, which SPPO's figure 5 comes to; 240 GB/s within a node and 20 GB/s a GPU
between nodes; 95% of a device's memory, 90% of 2 TB host memory per node of 8 GPUs; one sequence a
step, as in the paper; bf16 weights and gradients, two float32 Adam states. Models are GPT shapes:
4h MLP, as many K/V heads as heads, heads of 128, tied vocabulary of 50,257.

Layouts are searched over data, pipeline and sequence parallelism, chunks and schedules; groups of
sequence-parallel GPUs stay within a node unless nothing else fits. Of (a) and (b) shared units
(msp) may also be those of sequence-parallel groups and with K/V on the host, as SPPO's are; "runs"
is the best of what our runtime carries out. Seq1F1B's table and (c) have no sequence parallelism,
copies of 20.5 GB/s and 25 GB/s on every hop.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from paper_questions import (
    PAPER,
    PUBLISHED_LONGEST_K,
    SCALED,
    SCALED_LENGTHS_K,
    SEQ1F1B,
    K,
    ablation_rows,
    longest,
    longest_7b,
    paper_row,
    scaling_row,
    seq1f1b_row,
    trl_row,
)
from rich.console import Console
from rich.table import Table

from sppo_hf.rules import format_bytes


def collect(options: argparse.Namespace) -> dict[str, list[Any]]:
    """All tables, several questions at a time."""
    names = [model.name for model in PAPER]
    jobs: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
        "ablation": (ablation_rows, names),
        "paper": (
            paper_row,
            [(i, j) for i, model in enumerate(PAPER) for j in range(len(model.lengths_k))],
        ),
        "longest_7b": (longest_7b, list(PUBLISHED_LONGEST_K)),
        "trl": (trl_row, [K]),
        "seq1f1b": (seq1f1b_row, list(range(len(SEQ1F1B)))),
        "scaling": (scaling_row, [(n, tokens) for n in SCALED for tokens in SCALED_LENGTHS_K]),
        "longest": (longest, [(name, stages) for name in SCALED for stages in SCALED[name]]),
    }
    with ProcessPoolExecutor(options.workers) as pool:
        found = {
            table: [pool.submit(make, at) for at in places]
            for table, (make, places) in jobs.items()
            if table in options.tables
        }
        return {table: [future.result() for future in rows] for table, rows in found.items()}


def layout_words(row: dict[str, Any]) -> str:
    """A layout in words: dp/pp/sp, chunks, and what activations and K/V do."""
    virtual = f" {row['virtual']}" if row["virtual"] > 1 else ""
    again = {"whole": "no", "matmuls": "selective", "inputs": "full"}[row["saved"]]
    leaving = {"none": "", "full": ", offloaded", "sppo": ", partly offloaded"}[row["offload"]]
    kv = ", K/V on host" if row["kv_tier"] == "host" else ""
    name = row["schedule"].removesuffix("_seq1f1b")
    sharded = ", FSDP" if row["sharded"] else ""
    return (
        f"{row['replicas']}/{row['stages']}/{row['sp']}{sharded}, {row['num_chunks']} chunks, "
        f"{name}{virtual}, {again} recompute{leaving}{kv}"
    )


def speed(row: dict[str, Any]) -> str:
    if row["fits"]:
        return f"{row['tokens_per_second']:,.0f}"
    return f"lacks {format_bytes(row['lacks'])}"


def used(row: dict[str, Any]) -> tuple[str, str]:
    """Device of the fullest rank, host of the fullest node."""
    return format_bytes(row["device_bytes"]), f"{row['host_bytes'] / 1e12:.2f} TB"


Rows = list[Any]


def _paper(found: Rows) -> list[tuple[str, ...]]:
    return [
        (
            f"{row['model']}, {row['gpus']}",
            f"{row['tokens'] // K}K",
            f"{row['sppo']:,}",
            "" if row["megatron"] is None else f"{row['megatron']:,}",
            speed(row),
            *(f"{row['mfu']:.1%}", f"{row['idle']:.1%}", f"{row['again']:.1%}"),
            *(f"{row['exchange']:.1%}", f"{row['never_idle']:,.0f}"),
            *(*used(row), layout_words(row)),
            *(speed(row["runs"]), layout_words(row["runs"])),
        )
        for row in found
    ]


def _seq1f1b(found: Rows) -> list[tuple[str, ...]]:
    return [
        (
            f"{row['tokens'] // K}K",
            f"{row['published']:,}",
            "" if row["published_1f1b"] is None else f"{row['published_1f1b']:,}",
            *(speed(row["ours_1f1b"]), speed(row["ours"])),
            *(f"{row['ours']['mfu']:.1%}", layout_words(row["ours"])),
        )
        for row in found
    ]


def _ablation(found: Rows) -> list[tuple[str, ...]]:
    return [
        (
            f"{row['model']}, {row['tokens'] // K}K",
            *(row["ingredient"], f"{row['tokens_per_second']:,.0f}"),
            f"{row['tokens_per_second'] / steps[0]['tokens_per_second']:.2f}",
            "" if row["published"] is None else f"{row['published']:.2f}",
            *(f"{row['idle']:.1%}", format_bytes(row["device_bytes"])),
            "" if row["fits"] else format_bytes(row["lacks"]),
            layout_words(row),
        )
        for steps in found
        for row in steps
    ]


def _scaling(found: Rows) -> list[tuple[str, ...]]:
    return [
        (
            *(row["model"], f"{row['tokens'] // K**2}M", f"{gpus:,}"),
            *(f"{best['per_gpu']:,.2f}", *used(best), "yes" if best["fits"] else "NO"),
            layout_words({**best, "replicas": gpus // best["stages"]}),
        )
        for row in found
        for gpus, best in row["gpus"].items()
    ]


def _longest_7b(found: Rows) -> list[tuple[str, ...]]:
    return [
        (
            f"{row['gpus']}",
            *(f"{row[who] / K**2:.3g}M" for who in ("sppo", "megatron", "tokens")),
        )
        for row in found
    ]


def _trl(found: Rows) -> list[tuple[str, ...]]:
    return [
        (
            *(row["model"], f"{row['tokens'] // K}K", f"{row['trl_seconds']:,.0f} s"),
            f"{plan['step_seconds']:,.0f} s" if plan["fits"] else speed(plan),
            *(f"{plan['mfu']:.1%}", f"{plan['idle']:.1%}", *used(plan), layout_words(plan)),
        )
        for row in found
        for plan in row["plans"]
    ]


_TABLES: dict[str, tuple[str, str, Callable[[Rows], list[tuple[str, ...]]]]] = {
    "paper": (
        "(a) tokens/s of all GPUs: ours SIMULATED; SPPO and Megatron as published",
        "model, GPUs|tokens|SPPO|Megatron|ours|MFU|idle|again|all-to-all|never idle"
        "|device|node's host|plan|runs|its plan",
        _paper,
    ),
    "seq1f1b": (
        "Seq1F1B's 7B on 32 GPUs, tokens/s: ours SIMULATED; theirs as published",
        "tokens|Seq1F1B|1F1B|our 1F1B|ours|MFU|plan",
        _seq1f1b,
    ),
    "ablation": (
        "(b) SPPO's four steps at SPPO's own layout: ours SIMULATED; figure 11's as published",
        "model, tokens|step|tokens/s|relative|published|idle|device|lacks|plan",
        _ablation,
    ),
    "scaling": (
        "(c) tokens/s per GPU, SIMULATED; what does not fit, as if it did",
        "model|tokens|GPUs|per GPU|device|node's host|fits|plan",
        _scaling,
    ),
    "longest_7b": (
        "(d) longest row of 7B: ours SIMULATED; SPPO and Megatron as published",
        "GPUs|SPPO|Megatron|ours",
        _longest_7b,
    ),
    "trl": (
        "(e) all weights, 8 H100, one row a step: ours SIMULATED; TRL's measured by them",
        "model|tokens|TRL|ours|MFU|idle|device|node's host|plan",
        _trl,
    ),
}
"""By the name of what is simulated: title, headings, and the cells of what was found."""


def show(tables: dict[str, Rows]) -> None:
    """All tables on the terminal."""
    console = Console(width=190)
    for name, (title, columns, cells) in _TABLES.items():
        made = Table(title=title, title_justify="left")
        for heading in columns.split("|"):
            made.add_column(heading, justify="left" if heading.endswith("plan") else "right")
        for row in cells(tables.get(name, [])):
            made.add_row(*row)
        if made.row_count:
            console.print(made)
    for row in tables.get("longest", []):
        words = f"{row['model']}, pipelines of {row['stages']} GPUs"
        console.print(f"{words}: longest row {row['tokens'] / K**2:.2f}M tokens (simulated)")


def wrong(tables: dict[str, list[Any]]) -> list[str]:
    """What the tables say that cannot be, or should not."""
    found: list[str] = []
    for row in tables.get("paper", []):
        where = f"{row['model']} at {row['tokens']:,}"
        if not row["fits"]:
            found.append(f"{where}: no layout fits")
        if row["tokens_per_second"] > row["never_idle"]:
            found.append(f"{where}: faster than GPUs that never idle")
    for steps in tables.get("ablation", []):
        none, full, share, shared = (step["tokens_per_second"] for step in steps)
        if not full <= share <= none or not share < shared:
            found.append(f"{steps[0]['model']}: the four steps are not in the paper's order")
    for row in tables.get("longest_7b", []):
        if row["tokens"] < row["sppo"]:
            found.append(f"7B on {row['gpus']} GPUs: shorter than SPPO's longest row")
    for name in SCALED:
        lengths = [row["tokens"] for row in tables.get("longest", []) if row["model"] == name]
        if lengths != sorted(lengths):
            found.append(f"{name}: more GPUs hold less: {lengths}")
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["paper", "ablation", "longest_7b", "trl", "seq1f1b", "scaling", "longest"]
    parser.add_argument("--tables", nargs="+", choices=names, default=names)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="file that all numbers are written to")
    parser.add_argument("--check", action="store_true", help="exit status 1 if they contradict")
    options = parser.parse_args(argv)
    began = time.perf_counter()
    tables = collect(options)
    show(tables)
    missed = wrong(tables)
    if options.json:
        text = {"simulated": True, "tables": tables, "wrong": missed}
        options.json.write_text(json.dumps(text, indent=2))
    print(f"{time.perf_counter() - began:.0f} s")
    for sentence in missed:
        print(f"missed: {sentence}", file=sys.stderr)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
