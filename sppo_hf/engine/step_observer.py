"""What the engine tells whoever watches it: the plan, the unit it is in, and what a step cost.

The engine calls these methods from inside the training step, so an implementation must be quick and
must never wait for the device. This file knows nothing of who watches (a Trainer callback, a
progress bar, a benchmark, a test). An engine is given its observer when the model is converted, and
a Trainer's metrics are wanted only while that Trainer trains: an `ObserverHub` stands between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from weakref import WeakSet

if TYPE_CHECKING:
    from sppo_hf.offload.engine import OffloadStats
    from sppo_hf.planning.plan import Plan
    from sppo_hf.planning.prediction import MeasuredStep

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one forward and, in training, its backward did on this rank.

    Seconds are the host's wall time between the engine's own marks. On a CUDA device work is
    queued, so they are exact only over many steps; nothing here synchronises to sharpen them.
    """

    tokens: int
    """Tokens processed here: ``batch_rows * total_tokens``, padding included, or this rank's share
    of them where ranks share a batch."""

    batch_rows: int
    """Rows of the batch."""

    total_tokens: int
    """Length of each row, padding included."""

    model_flops: float
    """Floating-point operations the model itself asks for; recomputation is not counted."""

    forward_seconds: float
    """Wall time of the forward chunk loop."""

    backward_seconds: float
    """Wall time of the backward; 0 in evaluation."""

    offload: OffloadStats
    """What was copied and waited for meanwhile, and what host memory and disk hold at the end."""

    planned_seconds: float | None
    """What the plan predicted; None where nothing is known of the device's speed."""

    num_chunks: int
    """Chunks the sequence was cut into."""

    training: bool
    """Whether a backward belongs to this record."""


class StepObserver:
    """Base of all observers; every method does nothing until overridden."""

    def on_plan(self, plan: Plan, model_name: str) -> None:
        """A plan is about to be used for the first time, of a model with this name for readers."""

    def on_correction(self, before: Plan, after: Plan, measured: MeasuredStep) -> None:
        """The first steps have been measured, and speeds are no longer those of the profile.

        Modes of the plan from now on are the same where no others would be faster.
        """

    def on_host_memory(self, ready_bytes: int, wanted_bytes: int) -> None:
        """Host memory is being page-locked, which may take seconds; told after each piece.

        Args:
            ready_bytes: Of what is wanted, at first and so far.
            wanted_bytes: All of it; the system may give less.
        """

    def on_attention_ready(self, backend: str, num_shapes: int, seconds: float) -> None:
        """Attention's kernels have built plans for shapes that they had not met.

        Args:
            backend: Name, or names.
            num_shapes: Of forward and of backward.
            seconds: What it took.
        """

    def on_unit(self, direction: Direction, chunk: int, num_chunks: int) -> None:
        """The engine enters a unit; backward walks the chunks in reverse.

        Chunks count from 0. Layer by layer those of all layers before are counted too, and
        `num_chunks` are those of all layers.
        """

    def on_record(self, record: StepRecord) -> None:
        """A forward (and its backward, in training) has ended."""


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

    def on_host_memory(self, ready_bytes: int, wanted_bytes: int) -> None:
        """Tell every subscriber."""
        for observer in list(self._subscribers):
            observer.on_host_memory(ready_bytes, wanted_bytes)

    def on_attention_ready(self, backend: str, num_shapes: int, seconds: float) -> None:
        """Tell every subscriber."""
        for observer in list(self._subscribers):
            observer.on_attention_ready(backend, num_shapes, seconds)

    def on_unit(self, direction: Direction, chunk: int, num_chunks: int) -> None:
        """Tell every subscriber."""
        for observer in list(self._subscribers):
            observer.on_unit(direction, chunk, num_chunks)

    def on_record(self, record: StepRecord) -> None:
        """Tell every subscriber."""
        for observer in list(self._subscribers):
            observer.on_record(record)
