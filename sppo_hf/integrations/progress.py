"""What a person sees: the plan once, and a bar inside steps that take long.

An observer of the engine; whether bars are wanted at all is told to it from outside. Everything
goes to stderr, on the main process only.
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
"""A step that is over sooner than this shows no bar."""

REDRAW_AFTER_SECONDS = 0.1
"""The bar is drawn at most this often."""

_LEAST_COLUMNS = 100


class ProgressReporter(StepObserver):
    """Prints the first plan as a table, and shows "chunk 3/8 backward" during long steps.

    The bar takes the first free line below other bars of tqdm, the Trainer's among them, and is
    erased when its step ends. It needs a terminal or a notebook; elsewhere it stays away.

    Args:
        show_plan: Whether to print the table.
        show_progress: Whether to show the bar.
    """

    def __init__(self, *, show_plan: bool = True, show_progress: bool = True) -> None:
        self.show_plan = show_plan
        self.show_progress = show_progress
        self.bars_wanted = True
        self._shown: set[bool] = set()
        self._bar: tqdm[Any] | None = None
        self._step_began_seconds: float | None = None
        self._bar_direction: Direction = "forward"

    def on_plan(self, plan: Plan, model_name: str) -> None:
        """Print the first plan of training and the first of evaluation; later ones are no news.

        An evaluation before training must not hide the plan of what takes the time.
        """
        self._end_step()  # the bar of host memory, where the system gave less
        if not self.show_plan or plan.training in self._shown or not _is_main_process():
            return
        self._shown.add(plan.training)
        _print(plan_table(plan, model_name))

    def on_correction(self, before: Plan, after: Plan, measured: MeasuredStep) -> None:
        """Say what was measured beside what was planned, and what follows from it."""
        if self.show_plan and _is_main_process():
            _print(comparison_table(before, after, measured))

    def on_host_memory(self, ready_bytes: int, wanted_bytes: int) -> None:
        """Show how much of it is page-locked, once that has taken long enough."""
        if not self.show_progress:
            return
        if self._step_began_seconds is None:
            self._step_began_seconds = time.monotonic()
        if ready_bytes == wanted_bytes:
            self._end_step()
        elif self._bar is not None:
            self._bar.update(ready_bytes - self._bar.n)
        elif self._deserves_bar():
            self._bar = _new_bar("page-locking host memory", wanted_bytes, unit="B")
            self._bar.update(ready_bytes)

    def on_attention_ready(self, backend: str, num_shapes: int, seconds: float) -> None:
        """Say what the first step of a length waited for."""
        self._end_step()
        if self.show_progress and _is_main_process():
            _print(
                Text(
                    f"attention: {backend} built what it needs for {num_shapes} shapes "
                    f"({seconds:.1f} s, once for each)"
                )
            )

    def on_unit(self, direction: Direction, chunk: int, num_chunks: int) -> None:
        """Move the bar, once the step has taken long enough to deserve one."""
        if not self.show_progress:
            return
        if (direction == "forward" and chunk == 0) or self._step_began_seconds is None:
            self._end_step()
            self._step_began_seconds = time.monotonic()
        title = f"chunk {chunk + 1}/{num_chunks} {direction}"
        if self._bar is None:
            if not self._deserves_bar():
                return
            self._bar = _new_bar(title, num_chunks, unit="chunk")
            self._bar_direction = direction
        elif self._bar_direction != direction:
            self._bar.reset(total=num_chunks)
            self._bar_direction = direction
        done = chunk if direction == "forward" else num_chunks - 1 - chunk
        self._bar.set_description(title, refresh=False)
        self._bar.update(done - self._bar.n)

    def on_record(self, record: StepRecord) -> None:
        """Erase the bar: the step has ended."""
        self._end_step()

    def _end_step(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._step_began_seconds = None

    def _deserves_bar(self) -> bool:
        began_seconds = self._step_began_seconds
        if began_seconds is None or time.monotonic() - began_seconds < SHOW_AFTER_SECONDS:
            return False
        if not self.bars_wanted or not _is_main_process():
            return False
        return _in_notebook() or sys.stderr.isatty()


def _print(table: RenderableType) -> None:
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        console = Console(file=sys.stderr, width=_LEAST_COLUMNS)
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
    """Return whether `tqdm.auto` chose the widget."""
    return any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)


def _is_main_process() -> bool:
    """Return whether this is rank 0, by the variable that every launcher sets."""
    return int(os.environ.get("RANK", "0")) == 0
