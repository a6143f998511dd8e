"""Modes by name, and tables as text."""

import io

from rich.console import Console, RenderableType

from sppo_hf.planning.activation_modes import mode_of
from sppo_hf.planning.plan import Plan
from sppo_hf.reporting.plan_tables import plan_table

OFFLOAD = mode_of("whole", "host")
RECOMPUTE = mode_of("inputs", "device")
RECOMPUTE_OFFLOAD = mode_of("inputs", "host")


def shown(table: RenderableType, width: int = 110) -> str:
    """Returns a table as plain text of at most `width` columns."""
    sink = io.StringIO()
    Console(file=sink, width=width, color_system=None, force_terminal=False).print(table)
    return sink.getvalue()


def render_plan(plan: Plan, model_name: str, width: int = 100) -> str:
    """Returns a plan's table as plain text of at most `width` columns."""
    text = shown(plan_table(plan, model_name), width)
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")
