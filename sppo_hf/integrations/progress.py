"""ProgressReporter: prints the plan once, and draws a bar inside steps that take long.

It observes the engine and writes to stderr, on the main process only.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.text import Text
from tqdm.auto import tqdm

from sppo_hf.engine.step_observer import Direction, StepObserver, StepRecord
from sppo_hf.reporting.plan_tables import comparison_table, plan_table

if TYPE_CHECKING:
    from sppo_hf.planning.plan import Plan
    from sppo_hf.planning.prediction import MeasuredStep

SHOW_AFTER_SECONDS = 3.0
"""Shorter steps show no bar."""

REDRAW_AFTER_SECONDS = 0.1
"""Least time between two drawings of the bar."""

_MIN_COLUMNS = 100


class ProgressReporter(StepObserver):
    """Prints the first plan as a table, and shows "chunk 3/8 backward" during long steps.

    The bar is a line below other bars of tqdm, the Trainer's among them, and is erased when its
    step ends. It is drawn in terminals and notebooks only.

    Args:
        show_plan: Whether to print the table.
        show_progress: Whether to show the bar.
    """

    def __init__(self, *, show_plan: bool = True, show_progress: bool = True) -> None:
        self.show_plan = show_plan
        self.show_progress = show_progress
        self.bars_wanted = True
        """False with the Trainer's `disable_tqdm`."""
        self._printed_plans: set[bool] = set()
        """`Plan.training` of the plans that were printed."""
        self._bar: tqdm[Any] | None = None
        self._step_start_seconds: float | None = None
        self._bar_direction: Direction = "forward"

    def on_plan(self, plan: Plan, model_name: str) -> None:
        """Print the first plan of training and the first of evaluation."""
        self._end_step()  # closes the bar for host memory, where the system gave less than wanted
        if not self.show_plan or plan.training in self._printed_plans or not _is_main_process():
            return
        self._printed_plans.add(plan.training)
        _print(plan_table(plan, model_name))

    def on_correction(self, before: Plan, after: Plan, measured: MeasuredStep) -> None:
        """Print what was measured beside what was planned, and the corrected plan."""
        if self.show_plan and _is_main_process():
            _print(comparison_table(before, after, measured))

    def on_host_memory(self, ready_bytes: int, wanted_bytes: int) -> None:
        """Show how much host memory is page-locked, once that has taken long enough."""
        if not self.show_progress:
            return
        if self._step_start_seconds is None:
            self._step_start_seconds = time.monotonic()
        if ready_bytes == wanted_bytes:
            self._end_step()
        elif self._bar is not None:
            self._bar.update(ready_bytes - self._bar.n)
        elif self._is_bar_due():
            self._bar = _new_bar("page-locking host memory", wanted_bytes, unit="B")
            self._bar.update(ready_bytes)

    def on_attention_ready(self, backend: str, num_shapes: int, seconds: float) -> None:
        """Print what the first step of a new length waited for."""
        self._end_step()
        if self.show_progress and _is_main_process():
            _print(
                Text(
                    f"attention: {backend} built what it needs for {num_shapes} shapes "
                    f"({seconds:.1f} s, once for each)"
                )
            )

    def on_unit(self, direction: Direction, chunk: int, num_chunks: int) -> None:
        """Move the bar, once the step has taken long enough to show one."""
        if not self.show_progress:
            return
        if (direction == "forward" and chunk == 0) or self._step_start_seconds is None:
            self._end_step()
            self._step_start_seconds = time.monotonic()
        title = f"chunk {chunk + 1}/{num_chunks} {direction}"
        if self._bar is None:
            if not self._is_bar_due():
                return
            self._bar = _new_bar(title, num_chunks, unit="chunk")
            self._bar_direction = direction
        elif self._bar_direction != direction:
            self._bar.reset(total=num_chunks)
            self._bar_direction = direction
        num_done = chunk if direction == "forward" else num_chunks - 1 - chunk
        self._bar.set_description(title, refresh=False)
        self._bar.update(num_done - self._bar.n)

    def on_record(self, record: StepRecord) -> None:
        """Erase the bar at the end of a step."""
        self._end_step()

    def _end_step(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._step_start_seconds = None

    def _is_bar_due(self) -> bool:
        start_seconds = self._step_start_seconds
        if start_seconds is None or time.monotonic() - start_seconds < SHOW_AFTER_SECONDS:
            return False
        if not self.bars_wanted or not _is_main_process():
            return False
        return _in_notebook() or sys.stderr.isatty()


def _print(table: RenderableType) -> None:
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        console = Console(file=sys.stderr, width=_MIN_COLUMNS)
    with tqdm.external_write_mode(file=sys.stderr):  # not behind the Trainer's bar, in its line
        console.print(table)


def _new_bar(title: str, total: int, *, unit: str) -> tqdm[Any]:
    return tqdm(
        desc=title,
        total=total,
        leave=False,
        dynamic_ncols=True,
        unit=unit,
        unit_scale=unit == "B",
        file=sys.stderr,
        mininterval=REDRAW_AFTER_SECONDS,
    )


def _in_notebook() -> bool:
    """Whether `tqdm.auto` chose the notebook's widget."""
    return any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)


def _is_main_process() -> bool:
    """Whether this is rank 0, by the variable that every launcher sets."""
    return int(os.environ.get("RANK", "0")) == 0
