"""Plans of a rank's stages, by batch shape; made when the shape first comes."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sppo_hf.model.facts import device_facts, dtype_name, leave_to_driver
from sppo_hf.model.plans import shared_plan
from sppo_hf.planning.choices import read_budgets
from sppo_hf.planning.memory import CONTEXT_BYTES
from sppo_hf.planning.partition import Bounds
from sppo_hf.planning.plan import Plan, make_plan
from sppo_hf.planning.stage_plan import pipeline_bounds, rank_shape, stage_shape
from sppo_hf.runtime.agreement import first_rank_says
from sppo_hf.runtime.schedules import schedule_name, step_schedule

if TYPE_CHECKING:
    from sppo_hf.runtime.pipeline_engine import PipelineEngine


@dataclass(frozen=True, slots=True)
class BatchPlans:
    """How batches of one shape run here."""

    bounds: Bounds
    """The chunks, the same on all ranks."""
    dtype: torch.dtype
    """Of hidden states between stages: the embedding's."""
    by_stage: dict[int, Plan]
    """Of each stage of this rank."""
    micro_batches: int = 1

    def longest_step_seconds(self, ranks: int) -> float:
        """Predicted seconds if `ranks` ranks, all as fast as this one, ran one after the other.

        What a message waits for is at most that. 0 where the device's speed is unknown.
        """
        predictions = [plan.prediction for plan in self.by_stage.values()]
        stages = sum(one.step_seconds for one in predictions if one is not None)
        return ranks * self.micro_batches * stages


class StagePlans:
    """Plans of the stages of one engine."""

    def __init__(self, engine: PipelineEngine) -> None:
        """Hold none yet."""
        self._engine = engine
        self._made: dict[tuple[Any, ...], BatchPlans] = {}
        self._shared: dict[tuple[Any, ...], tuple[Bounds, torch.dtype]] = {}
        self._warned: set[str] = set()
        self._accumulates = False

    def get(
        self, rows: int, total_tokens: int, device: torch.device, *, micro_batches: int
    ) -> BatchPlans:
        """The plans for `micro_batches` micro-batches of `rows` rows.

        Raises:
            ConfigError: The settings do not fit the length.
            BudgetError: A budget cannot hold what it must.
        """
        training = torch.is_grad_enabled()
        self._accumulates |= training and self._holds_gradients_twice()
        shape = (rows, total_tokens, micro_batches, training, device)
        if shape not in self._shared:
            self._shared[shape] = self._share(total_tokens, device, micro_batches)
        key = (*shape, self._accumulates)
        if key not in self._made:
            bounds, dtype = self._shared[shape]
            plans = self._make(rows, total_tokens, device, micro_batches, training, bounds)
            self._made[key] = BatchPlans(bounds, dtype, plans, micro_batches)
        return self._made[key]

    def _share(
        self, total_tokens: int, device: torch.device, micro_batches: int
    ) -> tuple[Bounds, torch.dtype]:
        """Chunks and dtype of messages, on which all ranks agree; all ask for them at once."""
        engine = self._engine
        bounds = pipeline_bounds(
            engine.config,
            engine.shape(),
            total_tokens,
            stages=engine.config.pp_size,
            micro_batches=micro_batches,
            device_kind=device.type,
        )
        return first_rank_says(engine.mesh, (bounds, engine.parts.causal_lm.dtype))

    def _holds_gradients_twice(self) -> bool:
        """Whether a step's gradients lie beside others: earlier ones, or those being reduced."""
        parameters = self._engine.parts.causal_lm.parameters()
        return self._engine.mesh.replicas is not None or any(p.grad is not None for p in parameters)

    def _make(
        self,
        rows: int,
        total_tokens: int,
        device: torch.device,
        micro_batches: int,
        training: bool,
        bounds: Bounds,
    ) -> dict[int, Plan]:
        engine = self._engine
        config, cut = engine.config, engine.staged.cut
        whole = engine.shape()
        alive = self._alive(micro_batches, len(bounds)) if training else 1.0
        backend, reason = engine.plans.describe_backends(whole, device)
        facts = device_facts(device, config)
        if config.device_memory is None:
            leave_to_driver(device, CONTEXT_BYTES["cuda"])
        plans = {}
        for stage in cut.own:
            shape = stage_shape(whole, cut.layers[stage], last=stage == cut.num_stages - 1)
            if engine.group is not None:
                shape = rank_shape(shape, engine.group.size)
            make = partial(
                make_plan,
                config,
                shape,
                device=facts,
                backend_name=backend,
                backend_reason=reason,
                batch_rows=rows,
                total_tokens=total_tokens,
                training=training,
                dtype_name=dtype_name(engine.parts),
                bounds=bounds,
                alive=alive * len(cut.own),
                accumulates=training and self._accumulates,
            )
            plans[stage] = shared_plan(make, engine.group)
            self._announce(stage, plans[stage])
            # Each plan has a share of the budgets, and one pool serves them all.
            pool = replace(plans[stage], budgets=read_budgets(config, facts))
            engine.room.prepare(device, pool, batches=max(1, math.ceil(alive)))
        return plans

    def _announce(self, stage: int, plan: Plan) -> None:
        for warning in plan.warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                warnings.warn(warning, stacklevel=2)
        engine = self._engine
        layers = engine.staged.cut.layers[stage]
        name = (
            f"{engine.parts.name}, stage {stage} of {engine.staged.cut.num_stages} (layers "
            f"{layers.start} to {layers.stop - 1}, {schedule_name(engine.config)} over "
            f"{engine.mesh.pp_size} ranks x {engine.mesh.dp_size} replicas)"
        )
        engine.observer.on_plan(plan, name)

    def _alive(self, micro_batches: int, chunks: int) -> float:
        """Micro-batches that each stage of this rank has alive at most, in whole ones."""
        config = self._engine.config
        made = step_schedule(config, micro_batches, chunks, forward_only=False, reduce=False)
        units = made.schedule.live_units[self._engine.mesh.pp_rank]
        return max(1.0, units / chunks / config.pp_virtual_stages)
