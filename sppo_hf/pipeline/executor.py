"""The executor: carries out one rank's actions of a schedule, in order, and sends its messages.

A table from kinds of action to handlers. It knows actions and units; not how a unit is computed
(`stage_runner`) or who made the schedule.

[Note: messages] Both ends know shapes from the plan. A send is started when its tensor is there and
kept until it has arrived; a receive is started when the schedule lists it, into a buffer made then,
and awaited by whoever takes it. On CUDA all of it is ordered on streams and the host waits for
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.profiler import record_function

from sppo_hf.engine.step_observer import Mark
from sppo_hf.errors import PipelineError
from sppo_hf.pipeline.mesh import PipelineMesh
from sppo_hf.pipeline.multiplex import SharedUnits
from sppo_hf.pipeline.stage_runner import StageRunner
from sppo_hf.schedule.actions import (
    COMPUTE_KINDS,
    KIND_NAMES,
    Action,
    Kind,
    is_kv_copy,
    kv_copy_pass,
)
from sppo_hf.schedule.measured_timeline import ActionRecord
from sppo_hf.schedule.messages import SENDS
from sppo_hf.schedule.schedule import Schedule


class Transport:
    """The messages of one step, of one rank."""

    def __init__(self, mesh: PipelineMesh) -> None:
        self._mesh = mesh
        self._sending: list[tuple[Any, Tensor]] = []
        self._coming: dict[Hashable, tuple[Any, Tensor]] = {}

    @property
    def device(self) -> torch.device:
        """Where messages arrive."""
        return self._mesh.device

    def send(self, tensor: Tensor, target: int) -> None:
        """Start sending to a rank of the pipeline; the tensor must not be written to any more."""
        # Gloo says so only when it is waited for; there, sent tensors stay until the step's end.
        self._sending = [(work, x) for work, x in self._sending if not work.is_completed()]
        tensor = tensor.detach().contiguous()
        group = self._mesh.links[self._mesh.pp_rank, target]
        work = dist.isend(tensor, self._mesh.world_rank(target), group=group)
        self._sending.append((work, tensor))

    def receive(
        self, key: Hashable, shape: tuple[int, ...], dtype: torch.dtype, source: int
    ) -> None:
        """Start receiving from a rank of the pipeline; `take` it by `key`."""
        buffer = torch.empty(shape, dtype=dtype, device=self._mesh.device)
        group = self._mesh.links[source, self._mesh.pp_rank]
        work = dist.irecv(buffer, self._mesh.world_rank(source), group=group)
        self._coming[key] = (work, buffer)

    def take(self, key: Hashable) -> Tensor:
        """The message of `key`, once it is here.

        Raises:
            PipelineError: Nobody started to receive it: the schedule is wrong.
        """
        if key not in self._coming:
            raise PipelineError(f"{key} is needed before its receive was started.")
        work, buffer = self._coming.pop(key)
        work.wait()
        return buffer

    def finish(self) -> None:
        """Wait until everything has been sent.

        Raises:
            PipelineError: Something came that nobody took.
        """
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
        if self._coming:
            raise PipelineError(f"received and never used: {sorted(map(str, self._coming))}.")


class UnitMarks(NamedTuple):
    """A unit that ran, between two marks in the device's work."""

    action: Action
    begin: Mark
    end: Mark


@dataclass(eq=False)
class Executor:
    """Runs the actions of one rank for one step."""

    schedule: Schedule
    """Lowered: with sends and receives, and with the copies of this rank."""
    rank: int
    """This rank in the pipeline."""
    runner: StageRunner
    transport: Transport
    _: KW_ONLY
    shapes: Callable[[int, int], tuple[int, ...]]
    """Returns the shape of a unit's message to a stage, `[B, C, W]`; its gradient has the same."""
    dtype: torch.dtype
    """Of the messages."""
    scale: Tensor
    """Gradient of the loss's sum, `[]`."""
    reduce: Callable[[int], None]
    """Starts reducing a stage's gradients over replicas."""
    on_action: Callable[[Action, str], None]
    """Is told before each action, which it is and in words."""
    shared: SharedUnits | None = None
    """What goes in and out where ranks share units; None where none do."""

    def __post_init__(self) -> None:
        self._outbox: dict[tuple[Kind, int, int], Tensor] = {}
        self._last_stage = self.schedule.num_stages - 1
        self._ready_seconds = 0.0
        self._device = self.scale.device
        self._ready = Mark(self._device)
        self.units: list[UnitMarks] = []
        """When each unit ran by the device's clock, known once the device has passed the last."""
        self._handlers: dict[Kind, Callable[[Action], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward,
            "W": self._weights,
            "D": lambda action: self.runner.settle(*self._place(action)),
            "H": lambda action: self.runner.prefetch(*self._place(action)),
            "S": self._store,
            "L": self._load,
            "K": lambda action: self.runner.begin_stream(
                *self._place(action), backward=kv_copy_pass(action) == 1
            ),
            "O": lambda action: self.runner.end_stream(*self._place(action)),
            "SEND_F": lambda action: self._send(action, action.stage + 1),
            "SEND_B": lambda action: self._send(action, action.stage - 1),
            "RECV_F": lambda action: self._receive(action, action.stage - 1),
            "RECV_B": lambda action: self._receive(action, action.stage + 1),
            "REDUCE_GRAD": lambda action: self.reduce(action.stage),
        }
        if self.shared is not None:
            self._handlers |= dict.fromkeys(SENDS, self.shared.send)
            self._handlers |= dict.fromkeys(SENDS.values(), self.shared.receive)

    def run(self) -> list[ActionRecord]:
        """Carry out all actions.

        Returns:
            What was done and when, in order.

        Raises:
            PipelineError: The schedule is wrong. Whatever an action raises is passed on as it is;
                `on_action` was told which one it is.
        """
        done: list[ActionRecord] = []
        for step, action in enumerate(self.schedule.ranks[self.rank]):
            start = self._ready_seconds = time.perf_counter()
            computes = action.kind in COMPUTE_KINDS
            if computes:
                self._ready = Mark(self._device)
            self.on_action(action, f"action {step} ({self._say(action)})")
            with record_function(f"sppo/{action}"):
                self._handlers[action.kind](action)
            if computes:
                self.units.append(UnitMarks(action, self._ready, Mark(self._device)))
            done.append(ActionRecord(action, start, time.perf_counter(), self._ready_seconds))
        self.transport.finish()
        taken = not self._outbox and (self.shared is None or self.shared.finished())
        if not taken or not self.runner.finished():
            raise PipelineError(
                f"rank {self.rank} of the pipeline has work left after its last action. The "
                "schedule is wrong."
            )
        return done

    def _say(self, action: Action) -> str:
        chunk, micro_batch = self.schedule.chunk(action), self.schedule.micro_batch(action)
        return (
            f"{action}: {KIND_NAMES[action.kind]} of stage {action.stage}, micro-batch "
            f"{micro_batch}, chunk {chunk}"
        )

    def _place(self, action: Action) -> tuple[int, int, int]:
        return action.stage, self.schedule.micro_batch(action), self.schedule.chunk(action)

    def _forward(self, action: Action) -> None:
        self._start(action)
        received = self._take("RECV_F", action) if action.stage > 0 else None
        self._begin(action)
        given = self.runner.forward(*self._place(action), received)
        if given is not None:
            if given.dtype != self.dtype:
                raise PipelineError(
                    f"stage {action.stage} gives on hidden states in {given.dtype}, the next one "
                    f"expects {self.dtype}, the model's own. Train this model with pp_size=1."
                )
            self._put("SEND_F", action, given)
        if self.shared is not None:
            self.shared.end(action)

    def _backward(self, action: Action) -> None:
        self._start(action)
        self.runner.before_backward()
        grad = self._take("RECV_B", action) if action.stage < self._last_stage else None
        self._begin(action)
        given = self.runner.backward(*self._place(action), grad, scale=self.scale)
        if given is not None:
            self._put("SEND_B", action, given)
        if self.shared is not None:
            self.shared.end(action)

    def _weights(self, action: Action) -> None:
        self.runner.weights(*self._place(action))

    def _start(self, action: Action) -> None:
        """A unit comes next, whatever it still waits for."""
        if self.shared is not None:
            self.shared.start(action)

    def _begin(self, action: Action) -> None:
        """What a unit needs besides what neighbours give it is here, where units are shared."""
        if self.shared is not None:
            self.shared.begin(action)
            self._note_ready()

    def _store(self, action: Action) -> None:
        if is_kv_copy(action):
            self.runner.end_stream(*self._place(action))
        else:
            self.runner.store(*self._place(action))

    def _load(self, action: Action) -> None:
        if is_kv_copy(action):
            self.runner.begin_stream(*self._place(action), backward=kv_copy_pass(action) == 2)
        else:
            self.runner.load(*self._place(action))

    def _take(self, kind: Kind, action: Action) -> Tensor:
        if self.shared is not None:
            stage = action.stage + (-1 if kind == "RECV_F" else 1)
            return self.shared.take(action, stage)
        tensor = self.transport.take(Action(kind, action.stage, action.unit))
        self._note_ready()
        return tensor

    def _note_ready(self) -> None:
        # What was waited is no part of the unit's own seconds.
        self._ready_seconds = time.perf_counter()
        self._ready = Mark(self._device)

    def _put(self, kind: Kind, action: Action, given: Tensor) -> None:
        if self.shared is not None:
            self.shared.put(action, given)
        else:
            self._outbox[kind, action.stage, action.unit] = given

    def _send(self, action: Action, stage: int) -> None:
        tensor = self._outbox.pop((action.kind, action.stage, action.unit))
        self.transport.send(tensor, self.schedule.stage_ranks[stage])

    def _receive(self, action: Action, stage: int) -> None:
        self.transport.receive(
            action,
            self.shapes(action.unit, max(stage, action.stage)),
            self.dtype,
            self.schedule.stage_ranks[stage],
        )
