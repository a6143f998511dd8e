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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sppo_hf.cli.benchmark.trace_summary import (
    LABELS,
    STEP_LABEL,
    Division,
    Span,
    divide,
    intersect,
    on_host,
    read_events,
    span_of,
    subtract,
    total_seconds,
)
from sppo_hf.reporting.plan_tables import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A period in which no kernel ran."""

    start_seconds: float
    """Seconds from the start of the step."""

    seconds: float
    """Length of the gap."""

    what: str
    """"exposed copy", "launch gap" or "other", whichever fills most of it."""

    unit: str
    """Label of the unit in which it began; "" for none."""

    before: str
    """Kernel that ended before it."""

    after: str
    """Kernel that began after it."""

    host: str
    """The host's longest call within the gap; "" for none."""


def largest_gaps(found: Division, most: int) -> list[Gap]:
    """The largest periods without a kernel, longest first."""
    gaps = subtract([found.step], found.compute)
    return [describe(gap, found) for gap in sorted(gaps, key=lambda s: s[0] - s[1])[:most]]


def describe(span: Span, found: Division) -> Gap:
    """Describe a gap: its cause, and the kernels around it."""
    step, kernels, complete = found.step, found.kernels, found.complete
    kinds = {
        "exposed copy": found.copying,
        "launch gap": found.launching,
        "other": found.waiting,
    }
    before = [e for e in kernels if span_of(e)[1] <= span[0] + 1e-3]
    after = [e for e in kernels if span_of(e)[0] >= span[1] - 1e-3]
    calls = [
        (total_seconds(intersect([span_of(e)], [span])), str(e["name"]))
        for e in complete
        if e.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver")
    ]
    host_seconds, host = max(calls, default=(0.0, ""))
    open_labels = [
        str(e["name"])
        for e in complete
        if str(e["name"]).startswith(LABELS) and e["name"] != STEP_LABEL and on_host(e)
        if span_of(e)[0] <= span[0] < span_of(e)[1]
    ]
    return Gap(
        start_seconds=(span[0] - step[0]) / 1e6,
        seconds=total_seconds([span]),
        what=max(kinds, key=lambda kind: total_seconds(intersect([span], kinds[kind]))),
        unit=open_labels[-1].removeprefix(LABELS) if open_labels else "",
        before=str(max(before, key=lambda e: span_of(e)[1])["name"])
        if before
        else "the step began",
        after=str(min(after, key=lambda e: span_of(e)[0])["name"]) if after else "the step ended",
        host=host if host_seconds else "",
    )


def seconds_of(found: Division) -> dict[str, Any]:
    """The seconds of a step by cause, and of its compute by class of kernel, for JSON."""
    return {
        "step_seconds": total_seconds([found.step]),
        "compute_seconds": total_seconds(found.compute),
        "exposed_copy_seconds": total_seconds(found.copying),
        "launch_gap_seconds": total_seconds(found.launching),
        "other_seconds": total_seconds(found.waiting),
        "class_seconds": found.class_seconds(),
        "on_device": found.on_device,
    }


def show(taken: dict[str, Any], largest: list[Gap], console: Console) -> None:
    """Two tables on the terminal."""
    device = "" if taken["on_device"] else " (no device: the host's operators are the compute)"
    step_seconds = taken["step_seconds"]
    console.print(f"Step of {format_seconds(step_seconds)}{device}")
    table = Table()
    for heading in ("", "seconds", "share"):
        table.add_column(heading, justify="right" if heading else "left")
    rows = {
        "compute": taken["compute_seconds"],
        "exposed copy": taken["exposed_copy_seconds"],
        "launch gaps": taken["launch_gap_seconds"],
        "other": taken["other_seconds"],
    }
    rows |= {f"  {name}": seconds for name, seconds in taken["class_seconds"].items() if seconds}
    for name, seconds in rows.items():
        table.add_row(name, format_seconds(seconds), f"{seconds / step_seconds:.1%}")
    console.print(table)
    gaps = Table(title="Largest gaps between kernels", show_lines=True)
    for heading in ("at", "long", "what", "unit", "after", "before", "host's longest call"):
        gaps.add_column(heading, overflow="fold")
    for gap in largest:
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
        found = divide(read_events(options.trace))
        taken, largest = seconds_of(found), largest_gaps(found, options.gaps)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{options.trace} cannot be summarised: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(taken | {"gaps": [asdict(gap) for gap in largest]}))
    else:
        show(taken, largest, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
