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
from sppo_hf.pipeline.stage_runner import StageRunner
from sppo_hf.pipeline.unit_tensors import UnitTensors
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


class Transport:
    """Point-to-point messages of one rank in one step; see [Note: messages]."""

    def __init__(self, mesh: PipelineMesh) -> None:
        self._mesh = mesh
        self._sends: list[tuple[Any, Tensor]] = []
        """Running sends: c10d Work, and the tensor that it reads."""
        self._receives: dict[Hashable, tuple[Any, Tensor]] = {}
        """Receives not yet taken: c10d Work, and the buffer that it fills."""

    @property
    def device(self) -> torch.device:
        """Device that messages are received on."""
        return self._mesh.device

    def send(self, tensor: Tensor, target: int) -> None:
        """Start sending to a rank of the pipeline; the tensor must not be written to afterwards."""
        # Gloo reports completion only to `wait`, so it keeps sent tensors until the step ends.
        self._sends = [(work, x) for work, x in self._sends if not work.is_completed()]
        tensor = tensor.detach().contiguous()
        group = self._mesh.links[self._mesh.pp_rank, target]
        work = dist.isend(tensor, self._mesh.world_rank(target), group=group)
        self._sends.append((work, tensor))

    def receive(
        self, key: Hashable, shape: tuple[int, ...], dtype: torch.dtype, source: int
    ) -> None:
        """Start receiving from a rank of the pipeline; `take` it by `key`."""
        buffer = torch.empty(shape, dtype=dtype, device=self._mesh.device)
        group = self._mesh.links[source, self._mesh.pp_rank]
        work = dist.irecv(buffer, self._mesh.world_rank(source), group=group)
        self._receives[key] = (work, buffer)

    def take(self, key: Hashable) -> Tensor:
        """Wait for the message of `key` and return it.

        Raises:
            PipelineError: Its receive was not started: the schedule is wrong.
        """
        if key not in self._receives:
            raise PipelineError(f"{key} is needed before its receive was started.")
        work, buffer = self._receives.pop(key)
        work.wait()
        return buffer

    def finish(self) -> None:
        """Wait for all sends.

        Raises:
            PipelineError: A message was received and not taken.
        """
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()
        if self._receives:
            raise PipelineError(f"received and never used: {sorted(map(str, self._receives))}.")


class UnitMarks(NamedTuple):
    """A unit that ran, between two marks on the device's stream."""

    action: Action
    begin: Mark
    end: Mark


@dataclass(eq=False)
class Executor:
    """Runs the actions of one rank for one step."""

    runner: StageRunner
    tensors: UnitTensors
    _: KW_ONLY
    scale: Tensor
    """Gradient of the loss's sum, `[]`."""
    reduce: Callable[[int], None]
    """Starts averaging a stage's gradients over replicas."""
    on_action: Callable[[Action, str], None]
    """Called before each action, with its description."""

    def __post_init__(self) -> None:
        self._schedule, self._rank = self.tensors.schedule, self.tensors.rank
        self._ready_seconds = 0.0
        """Time (`time.perf_counter()`) at which the running action had its inputs."""
        self._ready = Mark(self.scale.device)
        self.units: list[UnitMarks] = []
        """Units that ran, timed by the device's clock once it has passed the last mark."""
        self._handlers: dict[Kind, Callable[[Action], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward,
            "W": lambda action: self.runner.backward_weights(*self._place(action)),
            **dict.fromkeys(("D", "H", "S", "L", "K", "O"), self._copy),
            **dict.fromkeys(SENDS, self.tensors.send),
            **dict.fromkeys(SENDS.values(), self.tensors.receive),
            "REDUCE_GRAD": lambda action: self.reduce(action.stage),
        }

    def run(self) -> list[ActionRecord]:
        """Carry out all actions.

        Returns:
            The actions with their times, in order.

        Raises:
            PipelineError: The schedule is wrong. Whatever an action raises is passed on unchanged;
                `on_action` was told which one it is.
        """
        records: list[ActionRecord] = []
        for step, action in enumerate(self._schedule.ranks[self._rank]):
            start = self._ready_seconds = time.perf_counter()
            is_compute = action.kind in COMPUTE_KINDS
            if is_compute:
                self._ready = Mark(self.scale.device)
            stage, micro_batch, chunk = self._place(action)
            self.on_action(
                action,
                f"action {step} ({action}: {KIND_NAMES[action.kind]} of stage {stage}, micro-batch "
                f"{micro_batch}, chunk {chunk})",
            )
            with record_function(f"sppo/{action}"):
                self._handlers[action.kind](action)
            if is_compute:
                self.units.append(UnitMarks(action, self._ready, Mark(self.scale.device)))
            records.append(ActionRecord(action, start, time.perf_counter(), self._ready_seconds))
        self.tensors.transport.finish()
        if not self.tensors.is_finished or not self.runner.is_finished:
            raise PipelineError(
                f"rank {self._rank} of the pipeline has work left after its last action. The "
                "schedule is wrong."
            )
        return records

    def _place(self, action: Action) -> tuple[int, int, int]:
        return action.stage, self._schedule.micro_batch(action), self._schedule.chunk(action)

    # -- units -------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        received = self._wait_for_input(action, first_stage=0)
        output = self.runner.forward(*self._place(action), received)
        if output is not None and output.dtype != self.tensors.dtype:
            raise PipelineError(
                f"stage {action.stage} returns hidden states in {output.dtype}, the next one "
                f"expects {self.tensors.dtype}, the model's own. Train this model with pp_size=1."
            )
        self.tensors.finish_unit(action, output)

    def _backward(self, action: Action) -> None:
        grad = self._wait_for_input(action, first_stage=self._schedule.num_stages - 1)
        input_grad = self.runner.backward(*self._place(action), grad, scale=self.scale)
        self.tensors.finish_unit(action, input_grad)

    def _wait_for_input(self, action: Action, *, first_stage: int) -> Tensor | None:
        """Wait for all that a unit needs; returns what comes from another stage, if anything."""
        self.tensors.start_prefetch(action)
        if action.kind != "F":
            self.runner.before_backward()
        received = None if action.stage == first_stage else self.tensors.take_input(action)
        self.tensors.wait_for_inputs(action)
        # Waiting for inputs is not part of the unit's own seconds.
        self._ready_seconds = time.perf_counter()
        self._ready = Mark(self.scale.device)
        return received

    def _copy(self, action: Action) -> None:
        place = self._place(action)
        if not is_kv_copy(action):
            self.runner.copy(action.kind, *place)
        elif action.kind in ("K", "L"):
            backward = kv_copy_pass(action) == (1 if action.kind == "K" else 2)
            runner = self.runner.chunk_runner(*place)
            runner.begin_stream(self._schedule.chunk(action), backward=backward)
        else:
            self.runner.end_stream(*place)
