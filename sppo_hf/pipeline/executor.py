"""The executor: carries out one rank's actions of a schedule, in order.

A table from kinds of action to handlers. It knows actions and units; not how a unit is computed
(`model.stage_units`), how messages travel (`transport`) or who made the schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from sppo_hf.engine.step_timer import Mark
from sppo_hf.errors import PipelineError
from sppo_hf.pipeline.multiplex import SharedUnits
from sppo_hf.pipeline.stage_runner import StageRunner
from sppo_hf.pipeline.transport import Transport
from sppo_hf.schedule.actions import (
    COMPUTE_KINDS,
    KIND_NAMES,
    Action,
    Kind,
    is_stream,
    stream_way,
)
from sppo_hf.schedule.measured_timeline import ActionRecord
from sppo_hf.schedule.messages import SENDS
from sppo_hf.schedule.schedule import Schedule


class UnitMarks(NamedTuple):
    """A unit that ran, between two marks in the device's work."""

    action: Action
    begin: Mark
    end: Mark


class Executor:
    """Runs the actions of one rank for one step."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        units: StageRunner,
        transport: Transport,
        *,
        shapes: Callable[[int, int], tuple[int, ...]],
        dtype: torch.dtype,
        scale: Tensor,
        reduce: Callable[[int], None],
        on_action: Callable[[Action, str], None],
        shared: SharedUnits | None = None,
    ) -> None:
        """Prepare; runs nothing.

        Args:
            schedule: Lowered: with sends and receives, and with the copies of this rank.
            rank: This rank in the pipeline.
            units: Computes.
            transport: Carries messages.
            shapes: Returns the shape of a unit's message to a stage, `[B, C, W]`; its gradient has
                the same.
            dtype: Of the messages.
            scale: Gradient of the loss's sum, `[]`.
            reduce: Starts reducing a stage's gradients over replicas.
            on_action: Is told before each action, which it is and in words.
            shared: What goes in and out where ranks share units; None where none do.
        """
        self._schedule = schedule
        self._rank = rank
        self._units = units
        self._transport = transport
        self._shapes = shapes
        self._dtype = dtype
        self._scale = scale
        self._reduce = reduce
        self._on_action = on_action
        self._shared = shared
        self._outbox: dict[tuple[Kind, int, int], Tensor] = {}
        self._last_stage = schedule.num_stages - 1
        self._ready_seconds = 0.0
        self._device = scale.device
        self._ready = Mark(self._device)
        self.units: list[UnitMarks] = []
        """When each unit ran by the device's clock, known once the device has passed the last."""
        self._handlers: dict[Kind, Callable[[Action], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward,
            "W": self._weights,
            "D": lambda action: self._units.settle(*self._place(action)),
            "H": lambda action: self._units.prefetch(*self._place(action)),
            "S": self._store,
            "L": self._load,
            "K": lambda action: self._units.begin_stream(
                *self._place(action), backward=stream_way(action) == 1
            ),
            "O": lambda action: self._units.end_stream(*self._place(action)),
            "SEND_F": lambda action: self._send(action, action.stage + 1),
            "SEND_B": lambda action: self._send(action, action.stage - 1),
            "RECV_F": lambda action: self._receive(action, action.stage - 1),
            "RECV_B": lambda action: self._receive(action, action.stage + 1),
            "REDUCE_GRAD": lambda action: self._reduce(action.stage),
        }
        if shared is not None:
            self._handlers |= dict.fromkeys(SENDS, shared.send)
            self._handlers |= dict.fromkeys(SENDS.values(), shared.receive)

    def run(self) -> list[ActionRecord]:
        """Carry out all actions.

        Returns:
            What was done and when, in order.

        Raises:
            PipelineError: The schedule is wrong. Whatever an action raises is passed on as it is;
                `on_action` was told which one it is.
        """
        done: list[ActionRecord] = []
        for step, action in enumerate(self._schedule.ranks[self._rank]):
            start = self._ready_seconds = time.perf_counter()
            computes = action.kind in COMPUTE_KINDS
            if computes:
                self._ready = Mark(self._device)
            self._on_action(action, f"action {step} ({self._say(action)})")
            with record_function(f"sppo/{action}"):
                self._handlers[action.kind](action)
            if computes:
                self.units.append(UnitMarks(action, self._ready, Mark(self._device)))
            done.append(ActionRecord(action, start, time.perf_counter(), self._ready_seconds))
        self._transport.finish()
        taken = not self._outbox and (self._shared is None or self._shared.finished())
        if not taken or not self._units.finished():
            raise PipelineError(
                f"rank {self._rank} of the pipeline has work left after its last action. The "
                "schedule is wrong."
            )
        return done

    def _say(self, action: Action) -> str:
        chunk, micro_batch = self._schedule.chunk(action), self._schedule.micro_batch(action)
        return (
            f"{action}: {KIND_NAMES[action.kind]} of stage {action.stage}, micro-batch "
            f"{micro_batch}, chunk {chunk}"
        )

    def _place(self, action: Action) -> tuple[int, int, int]:
        return action.stage, self._schedule.micro_batch(action), self._schedule.chunk(action)

    def _forward(self, action: Action) -> None:
        self._start(action)
        received = self._take("RECV_F", action) if action.stage > 0 else None
        self._begin(action)
        given = self._units.forward(*self._place(action), received)
        if given is not None:
            if given.dtype != self._dtype:
                raise PipelineError(
                    f"stage {action.stage} gives on hidden states in {given.dtype}, the next one "
                    f"expects {self._dtype}, the model's own. Train this model with pp_size=1."
                )
            self._put("SEND_F", action, given)
        if self._shared is not None:
            self._shared.end(action)

    def _backward(self, action: Action) -> None:
        self._start(action)
        self._units.before_backward()
        grad = self._take("RECV_B", action) if action.stage < self._last_stage else None
        self._begin(action)
        given = self._units.backward(*self._place(action), grad, scale=self._scale)
        if given is not None:
            self._put("SEND_B", action, given)
        if self._shared is not None:
            self._shared.end(action)

    def _weights(self, action: Action) -> None:
        self._units.weights(*self._place(action))

    def _start(self, action: Action) -> None:
        """A unit comes next, whatever it still waits for."""
        if self._shared is not None:
            self._shared.start(action)

    def _begin(self, action: Action) -> None:
        """What a unit needs besides what neighbours give it is here, where units are shared."""
        if self._shared is not None:
            self._shared.begin(action)
            self._note_ready()

    def _store(self, action: Action) -> None:
        if is_stream(action):
            self._units.end_stream(*self._place(action))
        else:
            self._units.store(*self._place(action))

    def _load(self, action: Action) -> None:
        if is_stream(action):
            self._units.begin_stream(*self._place(action), backward=stream_way(action) == 2)
        else:
            self._units.load(*self._place(action))

    def _take(self, kind: Kind, action: Action) -> Tensor:
        if self._shared is not None:
            stage = action.stage + (-1 if kind == "RECV_F" else 1)
            return self._shared.take(action, stage)
        tensor = self._transport.take(Action(kind, action.stage, action.unit))
        self._note_ready()
        return tensor

    def _note_ready(self) -> None:
        # What was waited is no part of the unit's own seconds.
        self._ready_seconds = time.perf_counter()
        self._ready = Mark(self._device)

    def _put(self, kind: Kind, action: Action, given: Tensor) -> None:
        if self._shared is not None:
            self._shared.put(action, given)
        else:
            self._outbox[kind, action.stage, action.unit] = given

    def _send(self, action: Action, stage: int) -> None:
        tensor = self._outbox.pop((action.kind, action.stage, action.unit))
        self._transport.send(tensor, self._schedule.stage_ranks[stage])

    def _receive(self, action: Action, stage: int) -> None:
        self._transport.receive(
            action,
            self._shapes(action.unit, max(stage, action.stage)),
            self._dtype,
            self._schedule.stage_ranks[stage],
        )
