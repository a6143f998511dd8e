"""Timelines as traces for chrome://tracing and ui.perfetto.dev.

The format is JSON: complete, counter and metadata events, times in microseconds.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sppo_hf.schedule.actions import KIND_NAMES
from sppo_hf.schedule.timeline import Timeline

_RANK_PREFIX = re.compile(r"(\d+)\.(.+)", re.ASCII)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Returns the trace as the object that its JSON file holds.

    Each resource is a thread, and each tier a counter of bytes. Resources and tiers named
    "3.compute" or "3.device" belong to the process of rank 3, all others to that of rank 0.
    """
    events: list[dict[str, Any]] = []
    ranks: set[int] = set()
    for thread, resource in enumerate(timeline.resources):
        rank, name = _rank_and_name(resource)
        ranks.add(rank)
        place = {"pid": rank, "tid": thread}
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
        order = {"sort_index": thread}
        events.append({"ph": "M", "name": "thread_sort_index", **place, "args": order})
        stalls = {stall.action: stall for stall in timeline.stalls(resource)}
        for span in timeline.spans(resource):
            event: dict[str, Any] = {
                "ph": "X",
                "name": str(span.action),
                "cat": KIND_NAMES[span.action.kind],
                **place,
                "ts": span.start_seconds * 1e6,
                "dur": (span.end_seconds - span.start_seconds) * 1e6,
            }
            stall = stalls.get(span.action)
            if stall is not None:
                event["args"] = {
                    "waited for": str(stall.waited_for),
                    "waited microseconds": stall.seconds * 1e6,
                }
            events.append(event)
    for tier in timeline.tiers:
        rank, name = _rank_and_name(tier)
        ranks.add(rank)
        events += (
            {
                "ph": "C",
                "name": f"{name} memory",
                "pid": rank,
                "ts": at_seconds * 1e6,
                "args": {"bytes": num_bytes},
            }
            for at_seconds, num_bytes in timeline.curve(tier)
        )
    for rank in sorted(ranks):
        place = {"pid": rank, "tid": 0}
        title = {"name": f"rank {rank}"}
        events.append({"ph": "M", "name": "process_name", **place, "args": title})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Writes the trace of a timeline to a JSON file.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")


def _rank_and_name(resource: str) -> tuple[int, str]:
    match = _RANK_PREFIX.fullmatch(resource)
    return (0, resource) if match is None else (int(match[1]), match[2])
