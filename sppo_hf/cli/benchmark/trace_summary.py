"""Divides the time of a traced step into classes of kernels, exposed copies, launch gaps and other.

Reads Chrome traces as torch.profiler writes them.

[Note: how a step is divided]
The step is the event labelled "sppo/step" (without one, the whole trace), extended until the
device's last work of it has ended. *Compute* is the time when a kernel runs on any stream. *Exposed
copies* are the time when a copy or a fill runs and no kernel does. In the rest the device is idle:
*launch gaps* while the host works (or is in Python), *other* while the host waits in a
synchronising call. The four add up to the step. In a trace without a device, the host's operators
count as compute, and the time between them as launch gaps.

Compute is divided by the names of kernels (`CLASSES`). Where kernels of two classes overlap, the
time counts for the first class, so the classes add up to the compute.

A traced step takes longer than a measured one, above all in launch gaps, because tracing costs host
time. Compare contenders with each other, and classes of kernels with what theory says.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from sppo_hf.cli.benchmark.driver import trace_path
from sppo_hf.cli.benchmark.results import Row

STEP_LABEL = "sppo/step"
LABELS = "sppo/"

_COPIES = ("gpu_memcpy", "gpu_memset")
_DEVICE = ("kernel", *_COPIES)
_WAITS = ("Synchronize", "StreamWaitValue", "EventQuery")

REST = "norms, rotary, activations, adds"
"""Kernels of no class: elementwise ones and reductions."""

CLASSES: dict[str, re.Pattern[str]] = {
    name: re.compile(words, re.IGNORECASE)
    for name, words in {
        "attention": r"flash|fmha|sdpa|scaled_dot_product|attention|mha_",
        "loss": r"cross_entropy|log_?softmax|nll_loss",
        "matrix products": r"gemm|gemv|split_?k|cutlass|cublas|nvjet|xmma|grouped_mm|"
        r"aten::(b?mm|addb?mm|baddbmm|linear|matmul)$|_mm_kernel|matmul",
        "messages": r"nccl|c10d",
        # Not torch.compile's fused kernels, whose names list all their parts, often "to_copy".
        "copies on the device": r"^(?!triton_).*"
        r"(copy|cat|clone|contiguous|memcpy|memset|fill|zero_|transpose)",
        "optimizer": r"adam|multi_tensor|foreach",
    }.items()
}
"""Patterns of kernels' names (on a CPU, operators' names) by class; the first match counts."""

Span = tuple[float, float]
"""Start and end in microseconds."""


FILE = "profile.json"


def profiles(rows: Iterable[Row], folder: Path) -> list[dict[str, Any]]:
    """Summarize the trace in `folder` of each measured row, and write all summaries to `FILE`.

    Each entry has the contender, the length, the microseconds per token of the measured and of the
    traced step, and the latter by cause. Traces older than the file are not read again, because
    reading one takes seconds.
    """
    found: list[dict[str, Any]] = []
    before = _read_before(folder / FILE)
    for row in rows:
        path = trace_path(folder, row.job.contender, row.job.total_tokens)
        if row.kind != "speed" or row.status != "measured" or not path.exists():
            continue
        tokens, measured = row.job.total_tokens, row.numbers.median_step_seconds
        place = {"contender": row.job.contender, "total_tokens": tokens}
        now = {"measured_us_per_token": None if measured is None else 1e6 * measured / tokens}
        known = before.get(tuple(place.values()))
        if known is not None and path.stat().st_mtime < (folder / FILE).stat().st_mtime:
            found.append({**known, **now})
            continue
        try:
            step = divide(read_events(path))
        except (ValueError, KeyError, TypeError, EOFError):
            continue  # the worker was killed while it wrote the trace
        traced = {
            "traced_us_per_token": 1e6 * total_seconds([step.step]) / tokens,
            "parts_us_per_token": step.microseconds_per_token(tokens),
            "on_device": step.on_device,
        }
        found.append({**place, **now, **traced})
    if found:
        (folder / FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _read_before(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Read the entries of an earlier call, by contender and length; {} without such a file."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {(one["contender"], one["total_tokens"]): one for one in entries}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def profile_table(found: list[dict[str, Any]]) -> Table:
    """Lay out profiles: a line for each cause, a column for each contender and length."""
    table = Table(title="Microseconds per token of a traced step")
    table.add_column("")
    for one in found:
        table.add_column(f"{one['contender']}\n{one['total_tokens']:,}", justify="right")
    names = dict.fromkeys(name for one in found for name in one["parts_us_per_token"])
    for name in names:
        values = [one["parts_us_per_token"].get(name, 0.0) for one in found]
        if any(values):
            table.add_row(name, *map(_format_value, values))
    table.add_section()
    table.add_row("traced step", *(_format_value(one["traced_us_per_token"]) for one in found))
    table.add_row("measured step", *(_format_value(one["measured_us_per_token"]) for one in found))
    return table


def _format_value(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read the events of a trace's file, gzipped or not.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no JSON.
    """
    content = path.read_bytes()
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    trace = json.loads(content)
    return trace["traceEvents"] if isinstance(trace, dict) else trace


@dataclass(frozen=True, slots=True)
class Division:
    """A traced step, divided; each list of spans is sorted, in microseconds."""

    complete: list[Mapping[str, Any]]
    """All complete events ("X") of the trace."""

    kernels: list[Mapping[str, Any]]
    """The step's kernels; in a trace without a device the host's operators."""

    on_device: bool
    """Whether kernels were traced; else the host's operators count as compute."""

    step: Span
    compute: list[Span]
    copying: list[Span]
    """Exposed copies."""

    launching: list[Span]
    """Launch gaps."""

    waiting: list[Span]
    """The other time in which the device is idle."""

    def class_seconds(self) -> dict[str, float]:
        """Return the compute seconds by class of kernel, in the order of `CLASSES`, then `REST`."""
        spans: dict[str, list[Span]] = {name: [] for name in CLASSES}
        for kernel in self.kernels:
            words = str(kernel["name"])
            name = next((name for name, pattern in CLASSES.items() if pattern.search(words)), None)
            if name is not None:
                spans[name].append(span_of(kernel))
        found: dict[str, float] = {}
        rest = self.compute
        for name, of_class in spans.items():
            own = intersect(rest, _union(of_class))
            found[name] = total_seconds(own)
            rest = subtract(rest, own)
        return {**found, REST: total_seconds(rest)}

    def microseconds_per_token(self, tokens: int) -> dict[str, float]:
        """Return the step's microseconds per token, by class of kernel and kind of gap.

        Args:
            tokens: Number of tokens that the step trained.
        """
        parts = self.class_seconds()
        parts["exposed copies to or from the host"] = total_seconds(self.copying)
        parts["launch gaps"] = total_seconds(self.launching)
        parts["waiting for the device"] = total_seconds(self.waiting)
        return {name: 1e6 * seconds / tokens for name, seconds in parts.items()}


def divide(events: Iterable[Mapping[str, Any]]) -> Division:
    """Divide a traced step, given as `traceEvents` of a Chrome trace.

    Raises:
        ValueError: The trace has no kernels and no operators.
    """
    complete = [e for e in events if e.get("ph") == "X" and "dur" in e]
    device = [e for e in complete if e.get("cat") in _DEVICE]
    on_device = any(e["cat"] == "kernel" for e in device)
    working = device if on_device else [e for e in complete if e.get("cat") == "cpu_op"]
    step = _step(complete, working)
    working = [e for e in working if span_of(e)[1] > step[0] and span_of(e)[0] < step[1]]
    kernels = [e for e in working if e.get("cat") not in _COPIES]
    copies = [e for e in working if e.get("cat") in _COPIES]
    compute = intersect(_union(map(span_of, kernels)), [step])
    no_compute = subtract([step], compute)
    copying = intersect(no_compute, _union(map(span_of, copies)))
    idle = subtract(no_compute, copying)
    waits = _union(
        span_of(e) for e in complete if on_device and any(w in str(e["name"]) for w in _WAITS)
    )
    waiting = intersect(idle, waits)
    launching = subtract(idle, waiting)
    return Division(complete, kernels, on_device, step, compute, copying, launching, waiting)


def _step(complete: Sequence[Mapping[str, Any]], working: Sequence[Mapping[str, Any]]) -> Span:
    """Return the step's start and end; the device may end after the host."""
    labels = [span_of(e) for e in complete if e["name"] == STEP_LABEL and on_host(e)]
    spans = [span_of(e) for e in working]
    if not spans:
        raise ValueError(
            "the trace holds neither kernels nor operators: nothing ran in it, or it is no trace "
            "of torch.profiler"
        )
    if not labels:
        return min(start for start, _ in spans), max(end for _, end in spans)
    start, end = labels[0]
    return start, max([end, *(e for s, e in spans if s < end)])


def on_host(event: Mapping[str, Any]) -> bool:
    """Whether a label is the host's: the profiler draws it a second time on device streams."""
    return event.get("cat") != "gpu_user_annotation"


def span_of(event: Mapping[str, Any]) -> Span:
    """Return the start and end of a complete event."""
    start = float(event["ts"])
    return start, start + float(event["dur"])


def total_seconds(spans: Iterable[Span]) -> float:
    """Return the seconds of spans that do not overlap."""
    return sum(end - start for start, end in spans) / 1e6


def _union(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans as sorted spans that do not touch."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > start:
            merged.append((start, end))
    return merged


def intersect(one: list[Span], other: list[Span]) -> list[Span]:
    """Return the intersection of two sorted lists of spans."""
    found: list[Span] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(one: list[Span], other: list[Span]) -> list[Span]:
    """Return the first list of spans without the second; both sorted."""
    edges = [float("-inf"), *(edge for span in other for edge in span), float("inf")]
    return intersect(one, list(zip(edges[::2], edges[1::2], strict=True)))
