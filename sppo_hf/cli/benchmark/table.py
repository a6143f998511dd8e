"""Rows as tables: speeds by length and contender, longest lengths, and what the numbers mean.

Reads rows only, so that a table of an old file is the table of its day. Uses rich, prints nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sppo_hf.cli.benchmark.contenders import IDEAL, TODAY, parse
from sppo_hf.cli.benchmark.results import Job, Row, best_environment, groups
from sppo_hf.reporting.plan_tables import format_seconds
from sppo_hf.rules import format_bytes

DEFINITIONS = (
    "Seconds are the median of the measured steps: forward, backward, clipping and the optimizer.",
    "of chkpt: speed over that of the fastest checkpointing contender that trained with the same"
    f" kernel; of today: over that of {TODAY}; of ideal: over the ideal's.",
    "Model TFLOPS count what the model needs: causal attention once, no recomputation. MFU divides"
    " them by the device's dense bfloat16 peak.",
    "Peaks are those of the whole training. Device: allocated by tensors, in brackets reserved by"
    " the allocator. Host: resident memory, to which the pinned comes on CUDA.",
    "Stall: time of a step in which compute stood still for copies, known for sppo only.",
    "ideal: everything kept, no hooks; ~ marks what is extrapolated from 1 and 2 layers, or from"
    " shorter lengths. +tiled: with the ideal's loss in place of logits of the whole sequence.",
)
_RATIOS = ("of chkpt", "of today", "of ideal")
_HEADINGS = ("tokens", "contender", "step", "tokens/s", *_RATIOS, "TFLOPS", "MFU")
_HEADINGS = (*_HEADINGS, "device", "host", "pinned", "stall")
_MOST_REASON_CHARS = 200


def tables(rows: Sequence[Row]) -> Group:
    """Lays out a file's rows.

    One table of speeds for each group that may be compared, then one of longest lengths, then what
    the numbers mean.
    """
    parts: list[RenderableType] = []
    for group in groups(row for row in rows if row.kind == "speed"):
        parts += [speed_table(group), *_notes(group)]
    for group in groups(row for row in rows if row.kind == "longest"):
        parts += [longest_table(group), *_notes(group)]
    if not parts:
        return Group(Text("No results yet."))
    return Group(*parts, *(Text(line, style="dim") for line in DEFINITIONS))


def speed_table(rows: Sequence[Row]) -> Table:
    """Lays out one group: a line for each length and contender, with ratios to two of them.

    Columns of which nothing is known are left out.
    """
    lines: list[tuple[bool, list[str]]] = []
    for total_tokens in sorted({row.job.total_tokens for row in rows}):
        at = [row for row in rows if row.job.total_tokens == total_tokens]
        speeds = {row.job.contender: row.numbers.tokens_per_second for row in at if row.trained}
        for index, row in enumerate(at):
            others = [_fastest_checkpointing(speeds), _fastest_today(speeds), speeds.get(IDEAL)]
            cells = _cells(row, others)
            first = f"{total_tokens:,}" if index == 0 else ""
            lines.append((index == len(at) - 1, [first, row.job.contender, *cells]))
    known = [any(cells[column] for _, cells in lines) for column in range(len(_HEADINGS))]
    table = Table(box=SIMPLE_HEAD, title=_title(rows), title_justify="left")
    for heading, is_known in zip(_HEADINGS, known, strict=True):
        if is_known:
            justify = "left" if heading == "contender" else "right"
            table.add_column(heading, justify=justify, no_wrap=True)
    for last, cells in lines:
        shown = [cell for cell, is_known in zip(cells, known, strict=True) if is_known]
        table.add_row(*shown, end_section=last)
    return table


def longest_table(rows: Sequence[Row]) -> Table:
    """Lays out searches for the longest length, the estimator's word beside those of ours."""
    table = Table(box=SIMPLE_HEAD, title=f"Longest, {_title(rows)}", title_justify="left")
    table.add_column("contender", no_wrap=True)
    for heading in ("trains", "does not", "estimated", "device", "host"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("ended by", overflow="fold", min_width=20)
    for row in rows:
        n = row.numbers
        if row.status == "not available" or n.longest_tokens is None:
            table.add_row(row.job.contender, "-", "-", "-", "-", "-", row.reason)
            continue
        estimated = "-"
        if n.planned_longest_tokens is not None:
            estimated = f"{n.planned_longest_tokens:,}"
            if n.longest_tokens and n.failed_tokens is not None:  # else the search had no end
                estimated += f" ({n.planned_longest_tokens / n.longest_tokens - 1:+.0%})"
        failed = "-" if n.failed_tokens is None else f"{n.failed_tokens:,}"
        cells = (f"{n.longest_tokens:,}", failed, estimated, _device(row))
        table.add_row(row.job.contender, *cells, _bytes(n.host_peak_bytes), row.reason[:200])
    return table


def progress_line(row: Row, *, done: int, total: int, elapsed_seconds: float) -> str:
    """Says in one line what became of a row."""
    n = row.numbers
    count = f"[{done}/{total}]" if total else f"[{done}]"
    said = row.status
    if row.trained and n.tokens_per_second is not None:
        memory = n.device_allocated_bytes or n.host_peak_bytes
        said = f"{n.tokens_per_second:,.0f} tokens/s, {_bytes(memory)}"
        said += " (extrapolated)" if row.status == "extrapolated" else ""
    if row.kind == "longest" and n.longest_tokens is not None:
        said = f"longest {n.longest_tokens:,} tokens"
    elif row.reason and not row.trained:
        said += f": {row.reason}"
    what = "" if row.kind != "try" else "try "
    took = "" if row.wall_seconds is None else f", {row.wall_seconds:.0f} s"
    where = "" if row.kind == "longest" else f" at {row.job.total_tokens:,}"
    elapsed = f"{int(elapsed_seconds) // 60}:{int(elapsed_seconds) % 60:02d}"
    return f"{elapsed} {count} {what}{row.job.contender}{where}: {said}{took}"


def describe_job(job: Job) -> str:
    """Names what all rows of a group have in common: "llama-3.1-8b, bfloat16, LoRA r=16"."""
    trained = "all weights" if job.lora_rank is None else f"LoRA r={job.lora_rank}"
    if job.lora_rank is not None and job.lora_dtype != job.dtype:
        trained += f" in {job.lora_dtype}"
    parts = [job.model, job.dtype + (" autocast" if job.autocast else ""), trained]
    if job.attention != "auto":
        parts.append(f"attention {job.attention}")
    if job.device_memory is not None:
        parts.append(f"device memory {job.device_memory}")
    if job.host_memory is not None:
        parts.append(f"host memory {job.host_memory}")
    return ", ".join(parts)


def _title(rows: Sequence[Row]) -> str:
    device = best_environment(rows).get("device_name", "")
    return describe_job(rows[0].job) + (f", on {device}" if device else "")


def _notes(rows: Sequence[Row]) -> list[Text]:
    """Where and when, and why rows are missing."""
    found = best_environment(rows)
    notes = []
    if found:
        versions = ", ".join(f"{k} {v}" for k, v in found.get("versions", {}).items())
        memory = [f"host {format_bytes(found['host_memory_bytes'])}"]
        if found.get("device_memory_bytes"):
            memory.insert(0, f"device {format_bytes(found['device_memory_bytes'])}")
        line = f"{found.get('date', '')}; {', '.join(memory)}; {versions}"
        notes.append(Text(line, style="dim"))
    ran = [row for row in rows if row.numbers.kernel is not None]
    kernels = {str(row.numbers.kernel) for row in ran if parse(row.job.contender).base != TODAY}
    if kernels:
        notes.append(Text(f"attention kernel: {', '.join(sorted(kernels))}", style="dim"))
    if len(kernels) > 1:
        line = "Kernels differ, so ratios between these rows say little: name one with --attention."
        notes.append(Text(line, style="bold"))
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.kind == "speed" and row.reason:
            reason = " ".join(row.reason.split())[:_MOST_REASON_CHARS]
            said = f"{row.job.contender}: {row.status}: {reason}"
            reasons.setdefault(said, []).append(f"{row.job.total_tokens:,}")
    notes += [Text(f"{said} ({', '.join(at)})", style="dim") for said, at in reasons.items()]
    return [*notes, Text("")]


def _fastest_checkpointing(speeds: Mapping[str, float | None]) -> float | None:
    """Tokens per second of the fastest that checkpoints, of those with everyone's kernel."""
    found = [
        speed
        for name, speed in speeds.items()
        if speed is not None and parse(name).checkpoints and parse(name).base != TODAY
    ]
    return max(found, default=None)


def _fastest_today(speeds: Mapping[str, float | None]) -> float | None:
    """The same of those with the kernel that PyTorch takes by itself."""
    found = [speed for name, speed in speeds.items() if speed and parse(name).base == TODAY]
    return max(found, default=None)


def _cells(row: Row, others: Sequence[float | None]) -> list[str]:
    """Cells behind the name; `others` are the speeds that `_RATIOS` are of."""
    n = row.numbers
    if not row.trained:
        # What is known of a run that ended early is its memory.
        return [row.status, *[""] * 6, _device(row), _bytes(n.host_peak_bytes), "", ""]
    about = "~" if row.status == "extrapolated" else ""
    seconds, speed = n.median_step_seconds, n.tokens_per_second
    assert seconds is not None, "a row that trained has seconds"
    assert speed is not None, "and a speed"
    return [
        about + format_seconds(seconds),
        f"{about}{speed:,.0f}",
        *("" if other is None else f"{speed / other:.2f}" for other in others),
        "" if n.model_tflops is None else f"{n.model_tflops:#.3g}".rstrip("."),
        "" if n.mfu is None else f"{n.mfu:.1%}",
        about * (n.device_allocated_bytes is not None) + _device(row),
        about + _bytes(n.host_peak_bytes),
        _bytes(n.pinned_bytes),
        "" if n.stall_seconds is None else f"{n.stall_seconds / seconds:.1%}",
    ]


def _device(row: Row) -> str:
    n = row.numbers
    if n.device_allocated_bytes is None:
        return ""
    if n.device_reserved_bytes is None:
        return _bytes(n.device_allocated_bytes)
    return f"{_bytes(n.device_allocated_bytes)} ({_bytes(n.device_reserved_bytes)})"


def _bytes(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_bytes(size_bytes)
