"""One observer that fans out to many, so that an engine made early can be watched later.

The engine is given its observer when the model is converted; a Trainer's metrics are wanted only
while that Trainer trains. The hub stands between them. It knows nothing of Accelerate or Trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

from sppo_hf.engine.step_observer import Direction, StepObserver, StepRecord

if TYPE_CHECKING:
    from sppo_hf.planning.measured import MeasuredStep
    from sppo_hf.planning.plan import Plan


class ObserverHub(StepObserver):
    """Passes every event on to the observers that are subscribed at that moment.

    Subscribers are held weakly: a Trainer that is gone stops listening, whatever became of its run.
    """

    def __init__(self) -> None:
        self._subscribers: WeakSet[StepObserver] = WeakSet()

    def subscribe(self, observer: StepObserver) -> None:
        """Add an observer; adding one twice changes nothing."""
        self._subscribers.add(observer)

    def unsubscribe(self, observer: StepObserver) -> None:
        """Remove an observer; removing one that is not there changes nothing."""
        self._subscribers.discard(observer)

    def on_plan(self, plan: Plan, model_name: str) -> None:
        """Tell every subscriber."""
        for observer in list(self._subscribers):
            observer.on_plan(plan, model_name)

    def on_correction(self, before: Plan, after: Plan, measured: MeasuredStep) -> None:
        """Tell every subscriber."""
        for observer in list(self._subscribers):
            observer.on_correction(before, after, measured)

    def on_unit(self, direction: Direction, chunk: int, num_chunks: int) -> None:
        """Tell every subscriber."""
        for observer in list(self._subscribers):
            observer.on_unit(direction, chunk, num_chunks)

    def on_record(self, record: StepRecord) -> None:
        """Tell every subscriber."""
        for observer in list(self._subscribers):
            observer.on_record(record)
