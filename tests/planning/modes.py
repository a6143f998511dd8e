"""Modes by name, a plan's table as text, and an estimate moment by moment."""

import io

from rich.console import Console

from sppo_hf.planning.activation_modes import mode_of
from sppo_hf.planning.memory_snapshots import MemoryEstimate, MemorySnapshot
from sppo_hf.planning.plan import Plan
from sppo_hf.reporting.plan_tables import plan_table

OFFLOAD = mode_of("whole", "host")
RECOMPUTE = mode_of("inputs", "device")
RECOMPUTE_OFFLOAD = mode_of("inputs", "host")


def render_plan(plan: Plan, model_name: str, width: int = 100) -> str:
    """Return the table as plain text of at most `width` columns."""
    sink = io.StringIO()
    console = Console(file=sink, width=width, color_system=None, force_terminal=False)
    console.print(plan_table(plan, model_name))
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines()).strip("\n")


def moments_of(estimate: MemoryEstimate) -> tuple[MemorySnapshot, ...]:
    """Return where each chunk's (or layer's) forward ends, and its backward begins and ends."""
    points = estimate.points
    chunks, layers = range(points.num_chunks), range(points.num_layers)
    if points.by_layer:
        shown = [points.forward(chunks[-1], layer) for layer in (*layers, points.num_layers)]
        ends = [(chunk, layer) for layer in layers[::-1] for chunk in (chunks[-1], 0)]
    else:
        shown = [points.forward(chunk, points.num_layers) for chunk in chunks]
        ends = [(chunk, layer) for chunk in chunks[::-1] for layer in (layers[-1], 0)]
    if points.training:
        shown += dict.fromkeys(points.backward(*unit) for unit in ends)
    return tuple(map(estimate.moment_at, shown))
