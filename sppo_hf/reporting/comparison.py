"""A measured step beside its plan: seconds per phase and chunk, bytes, and what was learned.

Uses rich and prints nothing by itself.
"""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sppo_hf.planning.plan import Plan
from sppo_hf.planning.prediction import MeasuredStep
from sppo_hf.reporting.plan_tables import format_seconds
from sppo_hf.rules import format_bytes

_MOST_CHUNKS = 12


def comparison_table(before: Plan, after: Plan, measured: MeasuredStep) -> Group:
    """Lays a measured step beside its plan, and says what is done about the difference.

    Args:
        before: the plan that ran; it has a prediction.
        after: the plan from now on.
        measured: a step of `before`.
    """
    planned = before.prediction
    assert planned is not None, "a plan is corrected where it predicted something"
    title = "SPPO: measured beside planned"
    if before.pipeline is not None:
        title += ", one micro-batch on this rank's stage"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("what", style="bold")
    table.add_column("planned", justify="right")
    table.add_column("measured", justify="right")
    forward = sum(chunk.forward_seconds for chunk in planned.chunks)
    backward = sum(chunk.backward_seconds for chunk in planned.chunks)
    rows = (
        ("forward", forward, sum(measured.forward_seconds)),
        ("backward", backward, sum(measured.backward_seconds)),
        ("standing still", planned.stall_seconds, measured.stall_seconds),
        ("step", planned.forward_backward_seconds, measured.step_seconds),
    )
    for name, said, took in rows:
        table.add_row(name, format_seconds(said), format_seconds(took))
    for name, said, took in (
        ("to host", planned.d2h_bytes, measured.d2h_bytes),
        ("to device", planned.h2d_bytes, measured.h2d_bytes),
    ):
        if said or took:
            table.add_row(name, format_bytes(said), format_bytes(took))
    for name, took in (
        ("to disk", measured.disk_write_bytes),
        ("from disk", measured.disk_read_bytes),
    ):
        if took:
            table.add_row(name, "", format_bytes(took))
    for chunk in _chunks_shown(before.num_chunks):
        said = planned.chunks[chunk].compute_seconds
        took = measured.forward_seconds[chunk] + measured.backward_seconds[chunk]
        name = f"chunk {chunk + 1}, both ways"
        table.add_row(name, format_seconds(said), format_seconds(took))
    return Group(table, Text(_conclusion(before, after)))


def _chunks_shown(num_chunks: int) -> list[int]:
    """All chunks, or of many so many, evenly spaced, the first and the last among them."""
    most = min(num_chunks, _MOST_CHUNKS)
    return sorted({round(i * (num_chunks - 1) / max(1, most - 1)) for i in range(most)})


def _conclusion(before: Plan, after: Plan) -> str:
    same = ("order", "layer_modes", "kv_tier", "kv_modes")
    if all(getattr(after, name) == getattr(before, name) for name in same):
        return "The same plan is still the fastest that fits; only its prediction is corrected."
    assert after.prediction is not None, "a corrected plan is predicted"
    changed = sum(
        a != b
        for row_a, row_b in zip(before.layer_modes, after.layer_modes, strict=True)
        for a, b in zip(row_a, row_b, strict=True)
    )
    return (
        f"Planned anew with the measured speeds: {changed} of "
        f"{before.num_chunks * before.num_layers} layers of chunks are treated otherwise, "
        f"{after.prediction.step_seconds:.3g} s a step predicted."
    )
