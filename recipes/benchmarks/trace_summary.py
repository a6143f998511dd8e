"""Prints where the time of a traced training step went, and its three largest gaps.

    sppo bench llama-3.1-8b --seq-lens 32K --contenders sppo-auto --trace
    python recipes/benchmarks/trace_summary.py bench/trace-sppo-auto-32768.json.gz

Reads any Chrome trace of torch.profiler, gzipped or not. `sppo_hf.cli.benchmark.trace_summary`
explains how a step is divided.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sppo_hf.cli.benchmark.trace_summary import Summary, read_events, summarise
from sppo_hf.reporting.plan_tables import format_seconds


def show(summary: Summary, console: Console) -> None:
    """Two tables on the terminal."""
    device = "" if summary.on_device else " (no device: the host's operators are the compute)"
    console.print(f"Step of {format_seconds(summary.step_seconds)}{device}")
    table = Table()
    for heading in ("", "seconds", "share"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, (seconds, share) in summary.shares().items():
        table.add_row(name, format_seconds(seconds), f"{share:.1%}")
    for name, seconds in summary.class_seconds.items():
        if seconds:
            table.add_row(
                f"  {name}", format_seconds(seconds), f"{seconds / summary.step_seconds:.1%}"
            )
    console.print(table)
    gaps = Table(title="Largest gaps between kernels", show_lines=True)
    for heading in ("at", "long", "what", "unit", "after", "before", "host's longest call"):
        gaps.add_column(heading, overflow="fold")
    for gap in summary.gaps:
        seconds = (format_seconds(gap.start_seconds), format_seconds(gap.seconds))
        gaps.add_row(*seconds, gap.what, gap.unit, gap.before, gap.after, gap.host)
    console.print(gaps)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="trace.json or trace.json.gz")
    parser.add_argument("--gaps", type=int, default=3, help="how many to name")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(argv)
    try:
        summary = summarise(read_events(options.trace), max_gaps=options.gaps)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{options.trace} cannot be summarised: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(asdict(summary)))
    else:
        show(summary, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
