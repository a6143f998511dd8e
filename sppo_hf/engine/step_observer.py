"""What a step tells whoever watches it: its plan, the unit that runs, and what the step cost.

`StepObserver` is the interface that a Trainer callback, a progress bar or a benchmark implements.
The engine calls its methods from inside the training step, so they must be quick and must never
wait for the device. `StepTimer` marks when units begin and end, and makes these calls.

On a CPU a mark is a clock reading. On CUDA it is an event, whose time is known only once the device
has passed it; until then the timer says so, and the engine asks again at its next call. Nothing
here waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.profiler import record_function
from transformers.modeling_outputs import ModelOutput

from sppo_hf.engine.cpu_heap import return_free_heap
from sppo_hf.engine.sequence_group import rank_tokens
from sppo_hf.offload.engine import OffloadStats
from sppo_hf.planning.model_shape import ModelShape, forward_flops, step_flops
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.prediction import MeasuredStep

# B batch rows, C tokens of a chunk, D model width.

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


Phase = Literal["forward", "backward", "end"]


class Mark:
    """The point in a device's work at which the host is now: a clock reading, or on CUDA an event.

    That is in the device's current stream; the device need not be the current one.
    """

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        self._event: torch.cuda.Event | None = None
        self._at_seconds = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            # Autograd's thread has the model's device as its current one, others have what is set.
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._at_seconds = time.perf_counter()

    def passed(self) -> bool:
        """Whether the work has come to this point; never waits. The host's always has."""
        return self._event is None or self._event.query()

    def seconds_until(self, later: Mark) -> float:
        """Seconds from here to a later mark of the same kind; both passed."""
        if self._event is None or later._event is None:
            assert self._event is later._event, "marks of one timer are of one kind"
            return later._at_seconds - self._at_seconds
        return self._event.elapsed_time(later._event) / 1e3


@dataclass(slots=True)
class ChunkTimer:
    """The marks of one forward call and its backward."""

    device: torch.device | str
    """Where the work runs; without an index, on the current device of that kind."""

    _marks: list[tuple[Phase, int, Mark]] = field(default_factory=list)

    def enter(self, phase: Phase, chunk: int = 0) -> None:
        """Mark that a chunk begins, or that a phase ends."""
        self._marks.append((phase, chunk, Mark(self.device)))

    def ready(self) -> bool:
        """Whether all marks have been passed."""
        return not self._marks or self._marks[-1][2].passed()

    def seconds(self, phase: Phase, num_chunks: int) -> tuple[float, ...]:
        """Seconds per chunk in a phase; chunks that several groups of rows went through add up.

        By layer, units count on through the layers, and a chunk's of all layers add up.
        """
        assert self.ready(), "seconds are known once the work is done"
        sums = [0.0] * num_chunks
        for (name, chunk, begin), (_, _, later) in zip(self._marks, self._marks[1:], strict=False):
            if name == phase:
                sums[chunk % num_chunks] += begin.seconds_until(later)
        return tuple(sums)


def release_failed_backward(watch: StepTimer | None) -> None:
    """Free what a backward that raised has left, if that was the backward of `watch`.

    [Note: what a failed backward leaves] When a node raises, autograd forgets the graph, but on a
    CPU those of its nodes that were ready to run (the losses of all earlier chunks are, from the
    start) stay in a queue of the calling thread, and with them most of the graph: all that the step
    had sent away would lie there through the next forward. The next backward of any kind throws
    them out before it does anything else, so the smallest one is run. On CUDA the thread of the
    device does so by itself.
    """
    if watch is not None and watch.is_in_backward:
        with torch.enable_grad():
            torch.zeros((), requires_grad=True).backward()


class UnitLabel:
    """The profiler's label of the unit that runs: "sppo/forward chunk 3", counted from 0.

    Costs a microsecond where nobody profiles. A unit ends where the next begins, so one label at a
    time is open, from hooks that no `with` could span.
    """

    def __init__(self) -> None:
        self._open: record_function | None = None

    def enter(self, name: str) -> None:
        """Close the open label and open another."""
        self.leave()
        self._open = record_function(f"sppo/{name}")
        self._open.__enter__()

    def leave(self) -> None:
        """Close the open label, if there is one."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


@dataclass(eq=False)
class StepTimer:
    """Marks of one forward call and its backward, for observers and for a profiler's trace."""

    observer: StepObserver
    """Is told."""
    plan: Plan
    """What runs."""
    shape: ModelShape
    """For counting FLOPs."""
    _: KW_ONLY
    device: torch.device
    """Where the model is."""
    took: Callable[[], OffloadStats]
    """Returns what was moved since it was last asked."""
    began_seconds: float
    """`time.perf_counter()` when the call came in."""
    on_step: Callable[[StepTimer], None]
    """Is told when a training step has been recorded."""
    share: tuple[int, int] = (0, 1)
    """This rank's number among the ranks that share the sequence, and how many they are. Sums of
    tokens and FLOPs over the ranks count each once."""

    def __post_init__(self) -> None:
        self._forward_seconds = 0.0
        self._backward_began: float | None = None
        self._backward_ended = False
        self._stopwatch = ChunkTimer(self.device)
        self._label = UnitLabel()
        self._stats = OffloadStats()

    @property
    def is_in_backward(self) -> bool:
        """Whether backward has begun and not ended: it runs now, or it raised."""
        return self._backward_began is not None and not self._backward_ended

    def measured(self) -> MeasuredStep | None:
        """Seconds per chunk and bytes moved; None while the device has not come that far."""
        if not self._stopwatch.ready():
            return None
        num_chunks = self.plan.num_chunks
        return MeasuredStep(
            forward_seconds=self._stopwatch.seconds("forward", num_chunks),
            backward_seconds=self._stopwatch.seconds("backward", num_chunks),
            stall_seconds=self._stats.stall_seconds,
            d2h_bytes=self._stats.d2h_bytes,
            h2d_bytes=self._stats.h2d_bytes,
            disk_write_bytes=self._stats.disk_write_bytes,
            disk_read_bytes=self._stats.disk_read_bytes,
        )

    def forward_unit(self, chunk: int, layer: int | None = None) -> None:
        """Forward enters `chunk`; by layer, of `layer`."""
        if self.plan.device.kind == "cpu" and layer is None:
            return_free_heap()
        self._enter("forward", chunk, layer)

    def watch_backward(self, chunk: int, hidden_BCD: Tensor, layer: int | None = None) -> None:
        """Report when backward enters `chunk`; the last report comes when backward has ended.

        `hidden_BCD` is what the unit has computed. By layer, `layer` is None for what comes after
        all layers.
        """
        if hidden_BCD.requires_grad:
            hidden_BCD.register_hook(lambda _grad: self._backward_unit(chunk, layer))

    def _enter(self, direction: Direction, chunk: int, layer: int | None) -> None:
        self._stopwatch.enter(direction, chunk)
        if self.plan.order == "by_chunk":
            self._label.enter(f"{direction} chunk {chunk}")
            self.observer.on_unit(direction, chunk, self.plan.num_chunks)
        elif layer is not None:
            self._label.enter(f"{direction} layer {layer} chunk {chunk}")
            units = self.plan.num_layers * self.plan.num_chunks
            self.observer.on_unit(direction, layer * self.plan.num_chunks + chunk, units)

    def forward_done(self, output: ModelOutput) -> None:
        """Forward has ended; without a gradient to come, so has the step."""
        self._forward_seconds = time.perf_counter() - self.began_seconds
        self._stopwatch.enter("end")
        self._label.leave()
        tensors = [value for value in output.values() if isinstance(value, Tensor)]
        if not any(value.requires_grad for value in tensors):
            self._record(training=False, backward_seconds=0.0)

    def _backward_unit(self, chunk: int, layer: int | None) -> None:
        if self.plan.device.kind == "cpu" and layer is None:
            return_free_heap()
        if self._backward_began is None:
            self._backward_began = time.perf_counter()
            Variable._execution_engine.queue_callback(self._backward_done)
        self._enter("backward", chunk, layer)

    def _backward_done(self) -> None:
        assert self._backward_began is not None
        self._backward_ended = True
        self._stopwatch.enter("end")
        self._label.leave()
        self._record(training=True, backward_seconds=time.perf_counter() - self._backward_began)

    def _record(self, *, training: bool, backward_seconds: float) -> None:
        rows, tokens = self.plan.batch_rows, self.plan.total_tokens
        flops = step_flops if training else forward_flops
        start, end = rank_tokens(0, rows * tokens, *self.share)
        self._stats = self.took()
        prediction = self.plan.prediction
        self.observer.on_record(
            StepRecord(
                tokens=end - start,
                batch_rows=rows,
                total_tokens=tokens,
                model_flops=flops(self.shape, rows, tokens) / self.share[1],
                forward_seconds=self._forward_seconds,
                backward_seconds=backward_seconds,
                offload=self._stats,
                planned_seconds=prediction.forward_backward_seconds if prediction else None,
                num_chunks=self.plan.num_chunks,
                training=training,
            )
        )
        if training:
            self.on_step(self)
