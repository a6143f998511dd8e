"""Marks of one step of a pipeline, made into units and a record for observers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sppo_hf.model.calls import ForwardCall
from sppo_hf.model.observer import StepRecord
from sppo_hf.model.sequence_group import part_of
from sppo_hf.planning.flops import forward_flops, step_flops
from sppo_hf.runtime.schedules import StepSchedule
from sppo_hf.schedule.actions import Action

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sppo_hf.offload.stats import OffloadStats
    from sppo_hf.runtime.executor import Done
    from sppo_hf.runtime.pipeline_engine import PipelineEngine

_BACKWARDS = ("B", "I")


class StepWatch:
    """Watches one step of one rank."""

    def __init__(
        self,
        engine: PipelineEngine,
        call: ForwardCall,
        step: StepSchedule,
        *,
        began: float,
        name: str,
    ) -> None:
        """Start watching.

        Args:
            engine: Whose observer and watchdog are told.
            call: What is run.
            step: How it is run.
            began: `time.perf_counter()` when the call came in.
            name: Of the call, for the words of others when this rank is lost.
        """
        self._engine = engine
        self._call = call
        self._step = step
        self._began = began
        self._name = name

    def action(self, action: Action, words: str) -> None:
        """The rank is about to carry out `action`."""
        self._engine.watchdog.doing(f"{self._name}, {words}")
        if action.kind == "F" or action.kind in _BACKWARDS:
            direction = "forward" if action.kind == "F" else "backward"
            units = self._step.schedule.num_units
            self._engine.observer.on_unit(direction, action.unit, units)

    def done(
        self, executed: Sequence[Done], *, training: bool, planned_seconds: float | None
    ) -> OffloadStats:
        """The schedule has run; report what it cost, beside the seconds that were predicted.

        Tokens and FLOPs of the batch are split among the ranks of the pipeline, so that sums over
        all ranks count each once. Waiting for another rank is no stall here: the schedule's idle
        time is in the difference of seconds and compute.

        Returns:
            What was copied and waited for.
        """
        engine, call = self._engine, self._call
        mesh = engine.mesh
        sharing = len(mesh.sharing_ranks)
        start, end = part_of(
            0, call.batch_rows * call.total_tokens, mesh.rank - mesh.sharing_ranks[0], sharing
        )
        flops = step_flops if training else forward_flops
        forwards = [done for done in executed if done.action.kind == "F"]
        forward = sum(done.end_seconds - done.start_seconds for done in forwards)
        stats = engine.take_stats()
        engine.observer.on_record(
            StepRecord(
                tokens=end - start,
                batch_rows=call.batch_rows,
                total_tokens=call.total_tokens,
                model_flops=flops(engine.shape(), call.batch_rows, call.total_tokens) / sharing,
                forward_seconds=forward,
                backward_seconds=time.perf_counter() - self._began - forward,
                offload=stats,
                planned_seconds=planned_seconds,
                num_chunks=self._step.schedule.num_chunks,
                training=training,
            )
        )
        return stats
