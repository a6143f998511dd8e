"""Modes by name, and a plan's table as text."""

import io

from rich.console import Console

from sppo_hf.planning.activation_modes import mode_of
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
