"""What the first steps of a plan teach: the speeds it should have been made with.

Collects the watches of finished steps and, when the device has come that far, turns one of them
into a correction. Knows nothing of how plans are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sppo_hf.model.watch import ForwardWatch
from sppo_hf.planning.cost import Correction
from sppo_hf.planning.measured import MeasuredStep, learn, worth_correcting
from sppo_hf.planning.plan import Plan

# The first step allocates, pins and compiles; the second is like all that follow.
STEP_MEASURED = 2


@dataclass(frozen=True, slots=True)
class Lesson:
    """A plan, what a step of it took, and the correction that follows."""

    plan: Plan
    measured: MeasuredStep
    correction: Correction


class Teacher:
    """Watches steps until each plan has been measured once."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self._plans: list[Plan] = []
        self._waiting: list[ForwardWatch] = []

    def step_done(self, watch: ForwardWatch) -> None:
        """A training step has ended on the host; the device may be behind."""
        plan = watch.plan
        if plan.prediction is None or plan.cost is None:
            return
        if id(plan) not in self._steps:
            self._plans.append(plan)  # keeps its id from being given away
        steps = self._steps[id(plan)] = self._steps.get(id(plan), 0) + 1
        if steps == STEP_MEASURED:
            self._waiting.append(watch)

    def lessons(self) -> Iterator[Lesson]:
        """Yields what has been learned since the last time; asks the device, never waits for it."""
        waiting, self._waiting = self._waiting, []
        for watch in waiting:
            measured = watch.measured()
            if measured is None:
                self._waiting.append(watch)
                continue
            plan = watch.plan
            assert plan.prediction is not None, "plans without one are not watched"
            assert plan.cost is not None, "a prediction was made with a cost"
            before = plan.cost.correction
            correction = learn(plan.prediction, measured, before)
            if before == Correction() and worth_correcting(before, correction):
                yield Lesson(plan, measured, correction)
