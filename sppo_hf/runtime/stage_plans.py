"""Plans of a rank's stages, by batch shape; made when the shape first comes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sppo_hf.model.facts import device_facts, dtype_name
from sppo_hf.planning.partition import Bounds
from sppo_hf.planning.plan import Plan, make_plan
from sppo_hf.planning.stage_plan import pipeline_bounds, stage_shape
from sppo_hf.runtime.agreement import bounds_of_first
from sppo_hf.runtime.schedules import schedule_name
from sppo_hf.schedule.formulas import peak_units
from sppo_hf.schedule.generate import Size

if TYPE_CHECKING:
    from sppo_hf.runtime.pipeline_engine import PipelineEngine


@dataclass(frozen=True, slots=True)
class BatchPlans:
    """How batches of one shape run here."""

    bounds: Bounds
    """The chunks, the same on all ranks."""
    by_stage: dict[int, Plan]
    """Of each stage of this rank."""


class StagePlans:
    """Plans of the stages of one engine."""

    def __init__(self, engine: PipelineEngine) -> None:
        """Hold none yet."""
        self._engine = engine
        self._made: dict[tuple[Any, ...], BatchPlans] = {}
        self._warned: set[str] = set()

    def get(
        self, rows: int, total_tokens: int, device: torch.device, *, micro_batches: int
    ) -> BatchPlans:
        """The plans for `micro_batches` micro-batches of `rows` rows.

        Raises:
            ConfigError: The settings do not fit the length.
            BudgetError: A budget cannot hold what it must.
        """
        training = torch.is_grad_enabled()
        key = (rows, total_tokens, micro_batches, training, device.type)
        if key not in self._made:
            self._made[key] = self._make(rows, total_tokens, device, micro_batches, training)
        return self._made[key]

    def _make(
        self, rows: int, total_tokens: int, device: torch.device, micro_batches: int, training: bool
    ) -> BatchPlans:
        engine = self._engine
        config, cut = engine.config, engine.staged.cut
        whole = engine.shape()
        bounds = pipeline_bounds(
            config,
            whole,
            total_tokens,
            stages=config.pp_size,
            micro_batches=micro_batches,
            device_kind=device.type,
        )
        bounds = bounds_of_first(engine.mesh, bounds)
        alive = self._alive(micro_batches, len(bounds)) if training else 1.0
        backend, reason = engine.plans.describe_backends(whole, device)
        plans = {}
        for stage in cut.own:
            plans[stage] = make_plan(
                config,
                stage_shape(whole, cut.layers[stage], last=stage == cut.num_stages - 1),
                device=device_facts(device, config),
                backend_name=backend,
                backend_reason=reason,
                batch_rows=rows,
                total_tokens=total_tokens,
                training=training,
                dtype_name=dtype_name(engine.parts),
                bounds=bounds,
                alive=alive * len(cut.own),
            )
            self._announce(stage, plans[stage])
            engine.room.prepare(device, plans[stage], batches=max(1, round(alive + 0.5)))
        return BatchPlans(bounds, plans)

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
        size = Size(config.pp_size, micro_batches, chunks, config.pp_virtual_stages)
        units = peak_units(schedule_name(config), size)[self._engine.mesh.pp_rank]
        return max(1.0, units / chunks / config.pp_virtual_stages)
