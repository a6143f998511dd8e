"""Plans of a rank's stages, made at the first batch of each shape."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import distributed as dist

from sppo_hf.engine.device_facts import (
    device_facts,
    dtype_name,
    use_expandable_segments,
    whole_shape,
)
from sppo_hf.engine.plan_cache import (
    STEP_MEASURED,
    BatchShape,
    RecentTrainedSets,
    shared_plan,
)
from sppo_hf.errors import BudgetError
from sppo_hf.offload.engine import OffloadStats
from sppo_hf.pipeline.agreement import make_on_all_ranks, make_on_first_rank
from sppo_hf.pipeline.step_schedule import Copies, StepSchedule, step_schedule
from sppo_hf.planning.activation_modes import mode_of
from sppo_hf.planning.choices import read_budgets
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.cost import Correction, ModelCost
from sppo_hf.planning.hardware import UNKNOWN_LINK, cpu_estimate, cuda_estimate, peak_flops
from sppo_hf.planning.model_shape import step_flops
from sppo_hf.planning.pipeline_choice import (
    PipelineChoice,
    StageSeconds,
    choose_pipeline,
    default_choice,
    pipeline_step,
    stage_seconds,
)
from sppo_hf.planning.pipeline_cost import PipelineCost, extra_shared_unit_bytes
from sppo_hf.planning.plan import PipelineStep, Plan, PlanRequest, make_plan, other_plan_warnings
from sppo_hf.planning.prediction import MeasuredStep, learn, worth_correcting
from sppo_hf.planning.stages import kv_copies_of, stage_shape
from sppo_hf.planning.tiers import TIERS, Tier
from sppo_hf.schedule.actions import Action, Kind, is_kv_copy
from sppo_hf.schedule.generate import MSP, Size, generate
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import fixed_seconds, peak_units, simulate_pipeline

if TYPE_CHECKING:
    from sppo_hf.engine.forward_calls import BatchLayout, ForwardCall
    from sppo_hf.pipeline.executor import UnitMarks
    from sppo_hf.pipeline.multiplex import RemoteWeights
    from sppo_hf.pipeline.pipeline_engine import PipelineEngine


def _copies_of(by_stage: Mapping[int, Plan]) -> Copies:
    """Return the copies of stages that run by these plans."""
    found: set[tuple[Kind, int, int, int | None]] = set()
    for stage, plan in by_stage.items():
        for chunk, row in enumerate(plan.layer_modes if plan.training else ()):
            if any(mode.offload for mode in row):
                found.add(("D", stage, chunk, None))
            if any(TIERS[mode.tier].behind_host for mode in row):
                found.add(("S", stage, chunk, None))
        if plan.kv_tier != "device":
            tables = plan.program().tables
            layers = np.bincount(tables.kind_of, minlength=len(tables.kinds))
            of_stage = kv_copies_of(tables, plan.kv_tier, [layers])
            found |= {(kind, stage, chunk, part) for kind, _, chunk, part in of_stage}
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class BatchPlans:
    """Plans with which this rank runs batches of one shape."""

    shape: BatchShape
    choice: PipelineChoice
    """Schedule and chunks, the same on all ranks."""
    dtype: torch.dtype
    """Dtype of hidden states sent between stages: the embedding's."""
    by_stage: dict[int, Plan]
    """Plans of this rank's stages; of all stages if ranks share units."""
    step: PipelineStep | None = None
    """Predicted step of all ranks; None until they have exchanged their plans."""

    @property
    def bounds(self) -> Bounds:
        """Half-open (start, end) of each chunk in tokens."""
        return self.choice.bounds

    @property
    def copies(self) -> Copies:
        """Copies of this rank's stages."""
        return _copies_of(self.by_stage)

    def tiers_behind_host(self, action: Action, chunk: int) -> str:
        """Return the names of these tiers that a copy of a chunk's unit uses, joined by "+"."""
        plan = self.by_stage[action.stage]
        if is_kv_copy(action):
            used = {plan.kv_tier}
        else:
            used = {mode.tier for mode in plan.layer_modes[chunk]}
        return "+".join(name for name, tier in TIERS.items() if name in used and tier.behind_host)

    def shared(self) -> _SharedPlans:
        """Return the facts of this rank's plans that other ranks need."""
        by_stage, seconds = self.by_stage, None
        if all(plan.prediction is not None for plan in by_stage.values()):
            seconds = {stage: stage_seconds(plan) for stage, plan in by_stage.items()}
        return _SharedPlans(by_stage if self.choice.schedule == MSP else {}, seconds, self.copies)


class _SharedPlans(NamedTuple):
    """Facts about a rank's stages that it sends to all ranks of a step."""

    plans: dict[int, Plan]
    """Plans of the rank's stages; empty unless ranks share units."""
    seconds: dict[int, StageSeconds] | None
    """Predicted seconds of each of the rank's stages; None if speeds are unknown."""
    copies: Copies


@dataclass(frozen=True, slots=True)
class _MeasuredBatch:
    """A training step that was launched; the device may still have to finish its units."""

    plans: BatchPlans
    schedule: Schedule
    units: list[UnitMarks]
    stats: OffloadStats

    def measured(self, stage: int, *, own_stages: int) -> MeasuredStep:
        """Return average seconds and bytes of one micro-batch on a stage of this rank's.

        Call this after the device has finished the last unit. For a unit that several ranks share,
        this rank measures its own share, exchanges included, and scales it to the whole unit. Bytes
        and stalls are measured for the whole rank and divided evenly.
        """
        chunks, count = len(self.plans.bounds), self.plans.shape.micro_batches
        forward, backward = [0.0] * chunks, [0.0] * chunks
        for action, begin, end in self.units:
            if action.stage == stage:
                seconds = forward if action.kind == "F" else backward
                whole = begin.seconds_until(end) / float(self.schedule.share(action))
                seconds[action.unit % chunks] += whole / count
        share = count * own_stages
        return MeasuredStep(
            forward_seconds=tuple(forward),
            backward_seconds=tuple(backward),
            stall_seconds=self.stats.stall_seconds / share,
            d2h_bytes=self.stats.d2h_bytes // share,
            h2d_bytes=self.stats.h2d_bytes // share,
            disk_write_bytes=self.stats.disk_write_bytes // share,
            disk_read_bytes=self.stats.disk_read_bytes // share,
        )


@dataclass(slots=True)
class _KnownShape:
    """All that is known of batches of one shape."""

    choice: PipelineChoice
    dtype: torch.dtype
    plans: dict[bool, BatchPlans] = field(default_factory=dict)
    """By whether gradients are held twice."""
    step: PipelineStep | None = None
    num_steps: int = 0
    corrections: dict[int, Correction] = field(default_factory=dict)
    """Corrections of speeds by measured steps, by stage."""
    corrected: _MeasuredBatch | None = None
    """Measured step, until it is shown beside the corrected plans."""


class StagePlanCache:
    """Plans of the stages of one engine, by shape of the batch.

    In a shape, `trained` are the `trained_checksums` of the engine.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine
        self._shapes: dict[BatchShape, _KnownShape] = {}
        self._recent_trained = RecentTrainedSets()
        self._accumulates = False
        self._to_learn_from: list[_MeasuredBatch] = []

    def get(
        self,
        rows: int,
        total_tokens: int,
        device: torch.device,
        *,
        micro_batches: int,
        reduces: bool = False,
        router_loss: bool = False,
    ) -> BatchPlans:
        """Return the plans for `micro_batches` micro-batches of `rows` rows.

        All ranks call this at once. For a new shape each rank sends the predicted seconds of its
        stages to the others, so that all make the same prediction of the step. `reduces` is whether
        gradients are averaged over replicas in this step, `router_loss` whether routers have a
        loss.

        Raises:
            ConfigError: The settings do not fit the length.
            BudgetError: A budget is too small.
            PipelineError: Another rank could not plan a new shape.
        """
        training, mesh = torch.is_grad_enabled(), self._engine.mesh
        if training:  # other gradients beside a step's are accumulated ones, or buckets in flight
            parameters = self._engine.parts.causal_lm.parameters()
            twice = mesh.replica_group is not None or any(p.grad is not None for p in parameters)
            self._accumulates |= twice
        if mesh.unit_groups:  # ranks that share units plan together
            any_rank = torch.tensor(int(self._accumulates), device="cpu")
            dist.all_reduce(any_rank, op=dist.ReduceOp.MAX, group=mesh.control_group)
            self._accumulates = bool(any_rank)
        trained = self._engine.trained_checksums if training else ()
        if training:
            self._forget(self._recent_trained.use(trained))
        # The best schedule and the seconds of stages depend on the parameters that any rank trains.
        shape = BatchShape(
            *(rows, total_tokens, training, device, trained),
            router_loss=router_loss,
            micro_batches=micro_batches,
        )
        if shape not in self._shapes:
            self._shapes[shape] = _KnownShape(*self._choose(shape))
        known = self._shapes[shape]
        if self._accumulates not in known.plans:
            plans = self._plan(shape, known, reduces=reduces)
            known.plans[self._accumulates] = plans
            # Shown last: if this raises, the next batch still finds the same plans on all ranks.
            self._show(known, plans)
        return known.plans[self._accumulates]

    def _plan(self, shape: BatchShape, known: _KnownShape, *, reduces: bool) -> BatchPlans:
        """Make plans, with a prediction of the step; all ranks call this."""

        def make() -> BatchPlans:
            by_stage = self._make_plans(shape, known.choice, known.corrections)
            return BatchPlans(shape, known.choice, known.dtype, by_stage)

        shared: list[_SharedPlans] = []
        if shape.training and (known.step is None or known.choice.schedule == MSP):
            plans, shared = make_on_all_ranks(
                make, self._engine.mesh.control_group, share=BatchPlans.shared
            )
            if known.choice.schedule == MSP:
                # Ranks that share a unit must recompute the same parts of it, so each uses the
                # plan of the stage's owner.
                everyones = {s: plan for one in shared for s, plan in one.plans.items()}
                plans = replace(plans, by_stage=everyones | plans.by_stage)
        else:
            plans = make()
        if known.step is None:
            known.step = self._predict(plans, shared, reduces=reduces)
        by_stage = {s: replace(plan, pipeline=known.step) for s, plan in plans.by_stage.items()}
        return replace(plans, by_stage=by_stage, step=known.step)

    def _forget(self, trained: Hashable | None) -> None:
        """Drop all data for a set of trained parameters, which is the same on all ranks."""
        if trained is None:
            return
        self._shapes = {s: known for s, known in self._shapes.items() if s.trained != trained}
        self._to_learn_from = [
            one for one in self._to_learn_from if one.plans.shape.trained != trained
        ]

    def _choose(self, shape: BatchShape) -> tuple[PipelineChoice, torch.dtype]:
        """Choose schedule, chunks and dtype of messages, the same on all ranks; all call this."""
        engine, device = self._engine, shape.device
        config, parts = engine.config, engine.parts
        own_bytes = engine.planned_offload.reserved_bytes
        use_expandable_segments(device)

        def choose() -> tuple[PipelineChoice, torch.dtype]:
            options: dict[str, Any] = {
                "micro_batches": shape.micro_batches,
                "may_share": shape.training and bool(engine.mesh.unit_groups),
            }
            if shape.training:
                choice = choose_pipeline(
                    config,
                    replace(whole_shape(parts), router_loss=shape.router_loss),
                    shape.total_tokens,
                    batch_rows=shape.batch_rows,
                    device=device_facts(device, config, own_bytes=own_bytes),
                    dtype_name=dtype_name(parts),
                    **options,
                )
            else:
                choice = default_choice(
                    config, engine.shape(), shape.total_tokens, device_kind=device.type, **options
                )
            return choice, parts.causal_lm.dtype

        return make_on_first_rank(engine.mesh, choose)

    def _show(self, known: _KnownShape, plans: BatchPlans) -> None:
        engine, corrected = self._engine, known.corrected
        known.corrected = None
        cut = engine.staged.cut
        for stage in cut.own:
            layers = cut.layers[stage]
            name = (
                f"{engine.parts.name}, stage {stage} of {cut.num_stages} (layers "
                f"{layers.start} to {layers.stop - 1})"
            )
            engine.observer.on_plan(plans.by_stage[stage], name)
        if corrected is not None:
            for stage in cut.own:
                before, after = corrected.plans.by_stage[stage], plans.by_stage[stage]
                measured = corrected.measured(stage, own_stages=len(cut.own))
                engine.observer.on_correction(before, after, measured)

    # -- correction by measured steps ----------------------------------------------------------

    def step_done(
        self, plans: BatchPlans, schedule: Schedule, units: list[UnitMarks], stats: OffloadStats
    ) -> None:
        """Record a training step that ran all chunks; the device may not have finished it yet."""
        known = self._shapes.get(plans.shape)
        is_predicted = plans.step is not None and plans.step.step_seconds is not None
        if known is None or not is_predicted or not self._engine.config.correct_plan:
            return
        known.num_steps += 1
        if known.num_steps == STEP_MEASURED:
            self._to_learn_from.append(_MeasuredBatch(plans, schedule, units, stats))

    def correct(self) -> None:
        """Drop plans whose first steps ran at other speeds than predicted, once for each shape.

        All ranks call this at once, before the same step. Each rank computes corrections for its
        own stages; `get` then makes new plans with the corrections of all ranks.
        """
        if not self._to_learn_from:
            return
        batch, before = self._to_learn_from[0], Correction()
        own = self._engine.staged.cut.own

        def learn_own() -> dict[int, Correction] | None:
            if not batch.units[-1].end.is_reached():
                return None
            return {
                stage: learn(plan.prediction, batch.measured(stage, own_stages=len(own)), before)
                for stage in own
                for plan in [batch.plans.by_stage[stage]]
                if plan.prediction is not None
            }

        try:
            _, gathered = make_on_all_ranks(
                learn_own, self._engine.mesh.control_group, share=lambda learnt: learnt
            )
        except Exception:
            # Removed on all ranks, even after an error: else later batches would fail too.
            self._to_learn_from.pop(0)
            raise
        by_rank = [corrections for corrections in gathered if corrections is not None]
        if len(by_rank) < len(self._engine.mesh.sharing_ranks):
            return  # some device has not finished the step: try again before the next one
        self._to_learn_from.pop(0)
        every = [correction for corrections in by_rank for correction in corrections.values()]
        if not any(worth_correcting(before, correction) for correction in every):
            return
        known = self._shapes[batch.plans.shape]
        # Of the ranks that share sequences of a stage, the slowest counts, as the others wait.
        known.corrections = {
            stage: max(
                (x[stage] for x in by_rank if stage in x), key=lambda x: x.forward + x.backward
            )
            for stage in own
            if any(stage in x for x in by_rank)
        }
        known.corrected = batch
        known.step = None
        known.plans.clear()

    def _predict(
        self, plans: BatchPlans, shared: list[_SharedPlans], *, reduces: bool
    ) -> PipelineStep:
        """Predict the step of all ranks by simulation, from the facts that they exchanged."""
        engine = self._engine
        mesh, config = engine.mesh, engine.config
        choice, count = plans.choice, plans.shape.micro_batches
        one = next(iter(plans.by_stage.values()))
        step = PipelineStep(
            schedule=choice.schedule,
            reason=choice.reason,
            ranks=mesh.pp_size,
            replicas=mesh.dp_size,
            micro_batches=count,
        )
        if not one.training or any(stages.seconds is None for stages in shared):
            return step
        seconds_of = {s: table for one in shared for s, table in (one.seconds or {}).items()}
        copies: Copies = frozenset().union(*(one.copies for one in shared))
        whole = engine.shape()

        def message_seconds(stage: int, chunk: int) -> float:
            start, end = plans.bounds[chunk]
            tokens = one.batch_rows * one.shape.tokens_per_rank(end - start)
            layer = engine.staged.cut.layers[stage].start
            return tokens * whole.message_bytes_per_token(layer) / UNKNOWN_LINK

        def schedule_of(micro_batches: int) -> Schedule:
            made = (config, choice.schedule, micro_batches, len(plans.bounds))
            return step_schedule(*made, reduce=reduces, copies=copies).schedule

        average_bytes = 2 * (mesh.dp_size - 1) / mesh.dp_size * one.shape.gradient_bytes
        seconds, idle = pipeline_step(
            schedule_of,
            seconds_of,
            micro_batches=count,
            ranks=mesh.pp_size,
            message_seconds=message_seconds,
            reduce_seconds=average_bytes / UNKNOWN_LINK,
        )
        peak = peak_flops(one.device.name)
        rows = count * one.batch_rows
        flops = step_flops(whole, rows, one.total_tokens)
        devices = mesh.pp_size * one.shape.sp
        mfu = None if peak is None else flops / seconds / (devices * peak)
        return replace(step, step_seconds=seconds, bubble_fraction=idle, mfu=mfu)

    def _make_plans(
        self, shape: BatchShape, choice: PipelineChoice, corrections: Mapping[int, Correction]
    ) -> dict[int, Plan]:
        """Plan this rank's stages, and allocate the host memory that they need together.

        Ranks that share a sequence call this at once; if one of them raises, all do.
        """
        engine = self._engine
        cut, micro_batches = engine.staged.cut, shape.micro_batches
        alive = 1.0
        if shape.training:
            alive = self._alive(choice.schedule, micro_batches, len(choice.bounds))
        plans: dict[int, Plan] = {}

        def make() -> list[Plan]:
            rank_request = functools.cache(
                lambda: self._rank_request(shape, choice, alive=alive * len(cut.own))
            )

            def plan_of(stage: int) -> Plan:
                rank = rank_request()
                last = stage == cut.num_stages - 1
                request = replace(rank, shape=stage_shape(rank.shape, cut.layers[stage], last=last))
                if stage in corrections:
                    with contextlib.suppress(BudgetError):  # the uncorrected plan, which ran, fits
                        corrected = replace(request, correction=corrections[stage])
                        return self._plan_stage(corrected, choice, micro_batches)
                try:
                    return self._plan_stage(request, choice, micro_batches)
                except BudgetError as error:
                    raise BudgetError(
                        f"stage {stage} of {cut.num_stages}, of which {alive:.3g} micro-batches "
                        f"and {len(cut.own)} stages share this rank's memory (budgets below are "
                        f"one share): {error} More chunks (num_chunks), a schedule that begins "
                        "fewer units (pp_schedule='seq1f1b') or more ranks (pp_size) leave more."
                    ) from error

            for stage in cut.own:
                plans[stage] = shared_plan(functools.partial(plan_of, stage), engine.group)
            # Each plan has a share of the budgets; all share one pool of host memory.
            budgets = read_budgets(rank_request().config, rank_request().device)
            return [replace(plan, budgets=budgets) for plan in plans.values()]

        engine.plans.make_within(shape.device, make, engine.observer, batches=math.ceil(alive))
        for plan in plans.values():
            others = other_plan_warnings(
                engine.config, engine.shape(), shape.total_tokens, training=shape.training
            )
            for warning in (*plan.warnings, *others):
                engine.warn_once(warning, warning)
        return plans

    def _rank_request(
        self, batch: BatchShape, choice: PipelineChoice, *, alive: float
    ) -> PlanRequest:
        """Return the request on which the plans of all stages of this rank are based.

        Its `shape` is that of the whole model.
        """
        engine, shape = self._engine, self._engine.shape()
        if choice.schedule == MSP:
            remote = engine.remote_weights()
            shape = replace(
                shape,
                weight_bytes=shape.weight_bytes + remote.resident_bytes + remote.passing_bytes,
                gradient_bytes=shape.gradient_bytes + remote.passing_bytes,
            )
        return engine.plans.request(
            batch,
            shape,
            bounds=choice.bounds,
            by_layer_refusal="",
            alive=alive,
            accumulates=batch.training and self._accumulates,
        )

    def _plan_stage(self, request: PlanRequest, choice: PipelineChoice, micro_batches: int) -> Plan:
        """Plan a stage; if ranks share units, beside the K/V of other stages that this rank holds.

        The bytes of these K/V depend on the tier that the plan chooses for K/V, so planning is
        repeated until it chooses one that they were counted for.
        """
        counted: set[Tier] = set()
        while True:
            plan = make_plan(request)
            if choice.schedule != MSP or not request.training or plan.kv_tier in counted:
                return plan
            counted.add(plan.kv_tier)
            kv_bytes = self._other_stages_kv_bytes(request, plan.kv_tier, micro_batches)
            # The larger number of each tier, as it may come back to one that it chose before.
            most = Counter(request.other_stages_kv_bytes) | Counter(kv_bytes)
            request = replace(request, other_stages_kv_bytes=dict(most))

    def _other_stages_kv_bytes(
        self, request: PlanRequest, kv_tier: Tier, micro_batches: int
    ) -> dict[Tier, int]:
        engine, bounds, facts = self._engine, request.bounds, request.device
        assert bounds is not None, "a pipeline's chunks are decided"
        # Bytes hardly depend on speeds (only through the arrival of messages), so guesses suffice.
        estimate = cpu_estimate(facts.name)
        if facts.kind != "cpu":
            estimate = cuda_estimate(facts.name)
        cost = ModelCost(
            shape=engine.shape(),
            profile=facts.profile or estimate,
            dtype_name=request.dtype_name,
            batch_rows=request.batch_rows,
        )
        compute = generate(MSP, Size(engine.mesh.pp_size, min(micro_batches, 2), len(bounds)))
        costs = PipelineCost(
            compute,
            cost,
            bounds,
            split=engine.staged.cut.layers,
            kv_tier=kv_tier,
            link_bytes_per_second=UNKNOWN_LINK,
        )
        return extra_shared_unit_bytes(costs, compute, engine.mesh.pp_rank)

    def _alive(self, name: str, micro_batches: int, chunks: int) -> float:
        """Return the peak number of micro-batches whose activations a stage of this rank holds.

        At least 1; a chunk counts as a fraction of a micro-batch.
        """
        config = self._engine.config
        schedule = step_schedule(config, name, micro_batches, chunks).schedule
        timeline = simulate_pipeline(schedule, seconds=fixed_seconds())
        units = peak_units(schedule, timeline)[self._engine.mesh.pp_rank]
        return max(1.0, units / chunks / config.pp_virtual_stages)


@dataclass(slots=True)
class PreparedStep:
    """Batch of one call, with its plans and schedule, after all ranks agreed to run it."""

    call: ForwardCall
    layout: BatchLayout
    rows: list[tuple[int, int]]
    """Half-open range of rows of each micro-batch."""
    plans: BatchPlans
    bounds: Bounds
    """Half-open (start, end) in tokens of the chunks that have tokens besides padding."""
    step: StepSchedule
    weights: RemoteWeights | None = None
    """Weights of other ranks' stages; None if ranks share no units."""

    def plan(self, stage: int, micro_batch: int) -> Plan:
        """Return the plan of a micro-batch on a stage, with offloading only of scheduled units.

        The schedule has no offload action for units whose backward follows their forward at once.
        """
        plan = self.plans.by_stage[stage]
        if not plan.training or not any(m.offload for row in plan.layer_modes for m in row):
            return plan
        first = micro_batch * len(self.bounds)
        modes = tuple(
            row
            if (stage, first + chunk) in self.step.offloaded_units
            else tuple(mode_of(mode.saved, "device") for mode in row)
            for chunk, row in enumerate(plan.layer_modes)
        )
        return replace(plan, layer_modes=modes)
