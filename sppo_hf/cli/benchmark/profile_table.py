"""What a token costs each contender, by what the device was doing: from traces of one step each.

Times of a traced step are longer than those of a measured one, most of all in launch gaps: tracing
costs the host time. Compare columns, and the classes of kernels with what theory says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from sppo_hf.cli.benchmark.driver import trace_path
from sppo_hf.cli.benchmark.results import Row
from sppo_hf.cli.benchmark.trace_summary import read_events, summarise

FILE = "profile.json"


def profiles(rows: Iterable[Row], folder: Path) -> list[dict[str, Any]]:
    """Returns what each trace in `folder` of a measured row says, and writes it into `FILE`.

    Each entry has the contender, its length, the steps' microseconds per token when measured and
    when traced, and the latter's parts by name.
    """
    found = []
    for row in rows:
        path = trace_path(folder, row.job.contender, row.job.total_tokens)
        if row.kind != "speed" or row.status != "measured" or not path.exists():
            continue
        tokens, measured = row.job.total_tokens, row.numbers.median_step_seconds
        try:
            summary = summarise(read_events(path))
        except (ValueError, KeyError, TypeError, EOFError):
            continue  # a worker was killed while it wrote; `trace_summary.py` says what is wrong
        found.append(
            {
                "contender": row.job.contender,
                "total_tokens": tokens,
                "measured_us_per_token": None if measured is None else 1e6 * measured / tokens,
                "traced_us_per_token": 1e6 * summary.step_seconds / tokens,
                "parts_us_per_token": summary.microseconds_per_token(tokens),
                "on_device": summary.on_device,
            }
        )
    if found:
        (folder / FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def profile_table(found: list[dict[str, Any]]) -> Table:
    """Returns a table with a line per class and a column per contender and length."""
    table = Table(title="Microseconds per token of a traced step")
    table.add_column("")
    for one in found:
        table.add_column(f"{one['contender']}\n{one['total_tokens']:,}", justify="right")
    names = dict.fromkeys(name for one in found for name in one["parts_us_per_token"])
    for name in names:
        values = [one["parts_us_per_token"].get(name, 0.0) for one in found]
        if any(values):
            table.add_row(name, *map(_figure, values))
    table.add_section()
    table.add_row("traced step", *(_figure(one["traced_us_per_token"]) for one in found))
    table.add_row("measured step", *(_figure(one["measured_us_per_token"]) for one in found))
    return table


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
