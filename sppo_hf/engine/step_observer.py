"""Events of a step for observers: its plan, the unit that runs, and its times and copies.

`StepObserver` is the interface that a Trainer callback, a progress bar or a benchmark implements.
The engine calls its methods from inside the training step, so they must be quick and must never
wait for the device. `StepTimer` marks when units begin and end, and makes these calls.

On a CPU a mark is a clock reading. On CUDA it is an event, whose time is known only once the device
has passed it; until then the timer says so, and the engine asks again at its next call. Nothing
here waits for the device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import Variable, profiler

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
    """Tokens, times and copies of one forward and, in training, its backward on this rank.

    Seconds are the host's wall time between the engine's own marks. On a CUDA device work is
    queued, so they are exact only over many steps; nothing here synchronises to sharpen them.
    """

    tokens: int
    """Tokens processed on this rank: ``batch_rows * total_tokens``, padding included, or its share
    of them if ranks share a batch."""
    batch_rows: int
    total_tokens: int
    """Length of each row, padding included."""
    model_flops: float
    """Floating-point operations of the model itself, without recomputation."""
    forward_seconds: float
    """Wall time of the forward chunk loop."""
    backward_seconds: float
    """Wall time of the backward; 0 in evaluation."""
    offload: OffloadStats
    """Copies and waits during the step, and what host memory and disk hold at its end."""
    planned_seconds: float | None
    """The plan's prediction; None if the device's speed is unknown."""
    num_chunks: int
    training: bool
    """Whether the step had a backward."""


class StepObserver:
    """Base of all observers; every method does nothing until overridden."""

    def on_plan(self, plan: Plan, model_name: str) -> None:
        """Called before a plan is first used; `model_name` is the model's class.

        Not for a corrected plan, which `on_correction` gets; its order may be another one.
        """

    def on_correction(self, before: Plan, after: Plan, measured: MeasuredStep) -> None:
        """Called when measured speeds have replaced those of the profile.

        `after` has the modes of `before` if no others are faster.
        """

    def on_host_memory(self, ready_bytes: int, wanted_bytes: int) -> None:
        """Called after each piece of host memory is page-locked, which may take seconds in all.

        `wanted_bytes` will be requested in all; the system may give less.
        """

    def on_attention_ready(self, backend: str, num_shapes: int, seconds: float) -> None:
        """Called when attention kernels have built their plans for new shapes.

        `backend` names the backends, `num_shapes` counts shapes of forward and backward together.
        """

    def on_unit(self, direction: Direction, chunk: int, num_chunks: int) -> None:
        """Called when a unit begins; backward runs the chunks in reverse.

        Chunks count from 0. In runs layer by layer, `chunk` counts on through the layers, and
        `num_chunks` is the number for all layers together.
        """

    def on_record(self, record: StepRecord) -> None:
        """Called after a forward (and its backward, in training)."""


class ObserverHub(StepObserver):
    """Passes every event on to its subscribers.

    An engine gets its observer when the model is converted, while a Trainer's metrics are wanted
    only while it trains. Subscribers are held by weak references, so a deleted Trainer gets none.

    Args:
        own: Observers that are subscribed from the start and live as long as the hub.
    """

    def __init__(self, *own: StepObserver) -> None:
        self._own = own
        self._subscribers: WeakSet[StepObserver] = WeakSet(own)

    def subscribe(self, observer: StepObserver) -> None:
        """Add an observer; adding one twice changes nothing."""
        self._subscribers.add(observer)

    def unsubscribe(self, observer: StepObserver) -> None:
        """Remove an observer, if it is subscribed."""
        self._subscribers.discard(observer)


def _tell_all(event: str) -> Callable[..., None]:
    """Return a method that calls the method `event` of every subscriber."""

    def tell(hub: ObserverHub, *values: Any) -> None:
        for observer in list(hub._subscribers):
            getattr(observer, event)(*values)

    return tell


for _event in [name for name in vars(StepObserver) if name.startswith("on_")]:
    setattr(ObserverHub, _event, _tell_all(_event))


Phase = Literal["forward", "backward", "end"]


class Mark:
    """A point in time of a device's current stream: an event on CUDA, else a clock reading."""

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        self._event: torch.cuda.Event | None = None
        self._at_seconds = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            # The device need not be the current one of this thread.
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._at_seconds = time.perf_counter()

    def is_reached(self) -> bool:
        """Whether the device has reached this point; never waits."""
        return self._event is None or self._event.query()

    def seconds_until(self, later: Mark) -> float:
        """Seconds from this mark to a later one of the same device; both must be reached."""
        if self._event is None or later._event is None:
            assert self._event is later._event, "marks of one timer are of one kind"
            return later._at_seconds - self._at_seconds
        return self._event.elapsed_time(later._event) / 1e3


@dataclass(slots=True)
class ChunkTimer:
    """The marks of one forward call and its backward."""

    device: torch.device | str
    """Device of the marks; without an index, the current one of that type."""

    _marks: list[tuple[Phase, int, Mark]] = field(default_factory=list)

    def enter(self, phase: Phase, chunk: int = 0) -> None:
        """Mark the beginning of a chunk, or the end of a phase."""
        self._marks.append((phase, chunk, Mark(self.device)))

    def is_ready(self) -> bool:
        """Whether the device has reached all marks."""
        return not self._marks or self._marks[-1][2].is_reached()

    def seconds(self, phase: Phase, num_chunks: int) -> tuple[float, ...]:
        """Seconds of each chunk in a phase, summed over groups of rows, and over layers."""
        assert self.is_ready(), "seconds are known once the work is done"
        sums = [0.0] * num_chunks
        for (name, chunk, begin), (_, _, later) in zip(self._marks, self._marks[1:], strict=False):
            if name == phase:
                sums[chunk % num_chunks] += begin.seconds_until(later)
        return tuple(sums)


def release_failed_backward(timer: StepTimer | None) -> None:
    """Free the memory that the backward of `timer` holds, if it raised.

    [Note: what a failed backward leaves] When a node raises, autograd drops the graph. On a CPU,
    however, the nodes that were ready to run (the losses of all earlier chunks are, from the start)
    stay in a queue of the calling thread, and with them most of the graph, so that all offloaded
    activations of the step would be held through the next forward. The next backward of any graph
    empties the queue before it does anything else, so this runs the smallest possible one. On CUDA
    the device's thread empties the queue by itself.
    """
    if timer is not None and timer.is_in_backward:
        with torch.enable_grad():
            torch.zeros((), device="cpu", requires_grad=True).backward()


@dataclass(eq=False)
class StepTimer:
    """Times one forward call and its backward, and reports them to observers and the profiler."""

    observer: StepObserver
    plan: Plan
    shape: ModelShape
    """The model's shape, to count FLOPs."""
    _: KW_ONLY
    device: torch.device
    """The model's device."""
    take_stats: Callable[[], OffloadStats]
    """Returns what the offload engine did since the last call."""
    start_seconds: float
    """`time.perf_counter()` at the beginning of the call."""
    on_step: Callable[[StepTimer], None]
    """Called when a training step has been recorded."""
    share: tuple[int, int] = (0, 1)
    """This rank's number among the ranks that share the sequence, and the number of ranks. Summed
    over the ranks, records count each token and FLOP once."""

    def __post_init__(self) -> None:
        self._forward_seconds = 0.0
        self._backward_start_seconds: float | None = None
        self._backward_ended = False
        self._chunk_timer = ChunkTimer(self.device)
        self._label = contextlib.ExitStack()
        """The profiler's label of the running unit, such as "sppo/forward chunk 3"."""
        self._stats = OffloadStats()

    @property
    def is_in_backward(self) -> bool:
        """Whether backward has begun and not ended: it is running, or it raised."""
        return self._backward_start_seconds is not None and not self._backward_ended

    def measured(self) -> MeasuredStep | None:
        """Seconds of each chunk and bytes copied; None until the device has finished the step."""
        if not self._chunk_timer.is_ready():
            return None
        num_chunks = self.plan.num_chunks
        return MeasuredStep(
            forward_seconds=self._chunk_timer.seconds("forward", num_chunks),
            backward_seconds=self._chunk_timer.seconds("backward", num_chunks),
            stall_seconds=self._stats.stall_seconds,
            d2h_bytes=self._stats.d2h_bytes,
            h2d_bytes=self._stats.h2d_bytes,
            disk_write_bytes=self._stats.disk_write_bytes,
            disk_read_bytes=self._stats.disk_read_bytes,
        )

    def forward_unit(self, chunk: int, layer: int | None = None) -> None:
        """Report that the forward of a chunk begins, in runs by layer of this layer's chunk."""
        if self.plan.device.kind == "cpu" and layer is None:
            return_free_heap()
        self._enter("forward", chunk, layer)

    def watch_backward(self, chunk: int, hidden_BCD: Tensor, layer: int | None = None) -> None:
        """Report the backward of a unit when the gradient of its output `hidden_BCD` arrives.

        In runs by layer, `layer` is None for the norm and head behind all layers.
        """
        if hidden_BCD.requires_grad:
            hidden_BCD.register_hook(lambda _grad: self._backward_unit(chunk, layer))

    def _enter(self, direction: Direction, chunk: int, layer: int | None) -> None:
        self._chunk_timer.enter(direction, chunk)
        if self.plan.order == "by_chunk":
            self._set_label(f"sppo/{direction} chunk {chunk}")
            self.observer.on_unit(direction, chunk, self.plan.num_chunks)
        elif layer is not None:
            self._set_label(f"sppo/{direction} layer {layer} chunk {chunk}")
            units = self.plan.num_layers * self.plan.num_chunks
            self.observer.on_unit(direction, layer * self.plan.num_chunks + chunk, units)

    def _set_label(self, name: str) -> None:
        self._label.close()  # a unit ends when the next one begins
        if profiler._is_profiler_enabled:  # or 0.1 ms a unit for nothing
            self._label.enter_context(profiler.record_function(name))

    def forward_done(self, output: Mapping[str, Any] | Sequence[Any]) -> None:
        """End the forward; also the step, if its output needs no gradient."""
        self._forward_seconds = time.perf_counter() - self.start_seconds
        self._chunk_timer.enter("end")
        self._label.close()
        values = output.values() if isinstance(output, Mapping) else output
        tensors = [value for value in values if isinstance(value, Tensor)]
        if not any(value.requires_grad for value in tensors):
            self._record(training=False, backward_seconds=0.0)

    def _backward_unit(self, chunk: int, layer: int | None) -> None:
        if self.plan.device.kind == "cpu" and layer is None:
            return_free_heap()
        if self._backward_start_seconds is None:
            self._backward_start_seconds = time.perf_counter()
            Variable._execution_engine.queue_callback(self._backward_done)
        self._enter("backward", chunk, layer)

    def _backward_done(self) -> None:
        assert self._backward_start_seconds is not None
        self._backward_ended = True
        self._chunk_timer.enter("end")
        self._label.close()
        seconds = time.perf_counter() - self._backward_start_seconds
        self._record(training=True, backward_seconds=seconds)

    def _record(self, *, training: bool, backward_seconds: float) -> None:
        rows, tokens = self.plan.batch_rows, self.plan.total_tokens
        flops = step_flops if training else forward_flops
        start, end = rank_tokens(0, rows * tokens, *self.share)
        self._stats = self.take_stats()
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
