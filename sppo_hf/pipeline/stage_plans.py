"""Plans of a rank's stages and the schedule of a step, made at the first batch of each shape."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import distributed as dist

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.device_facts import device_facts, dtype_name, reserve_driver_memory, whole_shape
from sppo_hf.engine.offload_holder import offloaded_bytes
from sppo_hf.engine.plan_cache import (
    STEP_MEASURED,
    RecentTrainedSets,
    shared_plan,
    warn_reduced_host_memory,
)
from sppo_hf.errors import BudgetError, ConfigError
from sppo_hf.offload.engine import OffloadStats
from sppo_hf.pipeline.agreement import make_and_gather, make_on_all_ranks, make_on_first_rank
from sppo_hf.planning.choices import read_budgets
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.cost import Correction, ModelCost
from sppo_hf.planning.hardware import UNKNOWN_LINK, cpu_estimate, cuda_estimate, peak_flops
from sppo_hf.planning.memory import CONTEXT_BYTES
from sppo_hf.planning.model_shape import step_flops
from sppo_hf.planning.pipeline_choice import (
    DEFAULT_SCHEDULE,
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
from sppo_hf.schedule.generate import MSP, Size, generate
from sppo_hf.schedule.lower import KVCopy, add_kv_copies, add_transfers, lower
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.validate import validate

if TYPE_CHECKING:
    from sppo_hf.pipeline.executor import UnitMarks
    from sppo_hf.pipeline.pipeline_engine import PipelineEngine


@dataclass(frozen=True, slots=True)
class BatchPlans:
    """Plans with which this rank runs batches of one shape."""

    bounds: Bounds
    """Half-open (start, end) of each chunk in tokens, the same on all ranks."""
    dtype: torch.dtype
    """Dtype of hidden states sent between stages: the embedding's."""
    by_stage: dict[int, Plan]
    """Plans of this rank's stages; of all stages if ranks share units."""
    micro_batches: int = 1
    schedule: str = DEFAULT_SCHEDULE
    """Name of the schedule, the same on all ranks."""
    step: PipelineStep | None = None
    """Predicted step of all ranks; None until they have exchanged their plans."""

    @property
    def offloaded(self) -> frozenset[tuple[int, int]]:
        """(stage, chunk) of this rank that have any offloaded activations."""
        return frozenset(
            (stage, chunk)
            for stage, plan in self.by_stage.items()
            for chunk, row in enumerate(plan.layer_modes)
            if plan.training and any(mode.offload for mode in row)
        )

    @property
    def stored(self) -> frozenset[tuple[int, int]]:
        """(stage, chunk) of this rank that have any activations on a tier behind the host."""
        return frozenset(
            (stage, chunk)
            for stage, chunk in self.offloaded
            if any(TIERS[mode.tier].behind_host for mode in self.by_stage[stage].layer_modes[chunk])
        )

    @property
    def kv_copies(self) -> frozenset[KVCopy]:
        """Copies of K/V beside units of this rank's stages, as arguments of `add_kv_copies`."""
        found: set[KVCopy] = set()
        for stage, plan in self.by_stage.items():
            if plan.kv_tier == "device":
                continue
            tables = plan.program().tables
            layers = np.bincount(tables.kind_of, minlength=len(tables.kinds))
            of_stage = kv_copies_of(tables, plan.kv_tier, [layers])
            found |= {(kind, stage, chunk, part) for kind, _, chunk, part in of_stage}
        return frozenset(found)

    def longest_step_seconds(self, ranks: int) -> float:
        """Return the predicted seconds of a step in which `ranks` such ranks run one by one.

        This bounds the time that a message can wait. 0 if the device's speed is unknown.
        """
        predictions = [plan.prediction for plan in self.by_stage.values()]
        seconds = sum(one.step_seconds for one in predictions if one is not None)
        return ranks * self.micro_batches * seconds


class _SharedPlans(NamedTuple):
    """Facts about a rank's stages that it sends to all ranks of a step."""

    plans: dict[int, Plan]
    """Plans of the rank's stages; empty unless ranks share units."""
    seconds: dict[int, StageSeconds] | None
    """Predicted seconds of each of the rank's stages; None if speeds are unknown."""
    offloaded: frozenset[tuple[int, int]]
    stored: frozenset[tuple[int, int]]
    kv_copies: frozenset[KVCopy]

    @staticmethod
    def of(plans: BatchPlans) -> _SharedPlans:
        """Select the facts of this rank's plans that other ranks need."""
        by_stage = plans.by_stage
        seconds = None
        if all(plan.prediction is not None for plan in by_stage.values()):
            seconds = {stage: stage_seconds(plan) for stage, plan in by_stage.items()}
        shared = by_stage if plans.schedule == MSP else {}
        return _SharedPlans(shared, seconds, plans.offloaded, plans.stored, plans.kv_copies)


@dataclass(frozen=True, slots=True)
class _MeasuredBatch:
    """A training step that was launched; the device may still have to finish its units."""

    shape: tuple[Any, ...]
    plans: BatchPlans
    schedule: Schedule
    units: list[UnitMarks]
    stats: OffloadStats
    own_stages: tuple[int, ...]

    def measured(self, stage: int) -> MeasuredStep:
        """Return average seconds and bytes of one micro-batch on a stage.

        Call this after the device has finished the last unit. For a unit that several ranks share,
        this rank measures its own share, exchanges included, and scales it to the whole unit. Bytes
        and stalls are measured for the whole rank and divided evenly.
        """
        chunks, count = len(self.plans.bounds), self.plans.micro_batches
        forward, backward = [0.0] * chunks, [0.0] * chunks
        for action, begin, end in self.units:
            if action.stage == stage:
                seconds = forward if action.kind == "F" else backward
                whole = begin.seconds_until(end) / float(self.schedule.share(action))
                seconds[action.unit % chunks] += whole / count
        share = count * len(self.own_stages)
        return MeasuredStep(
            forward_seconds=tuple(forward),
            backward_seconds=tuple(backward),
            stall_seconds=self.stats.stall_seconds / share,
            d2h_bytes=self.stats.d2h_bytes // share,
            h2d_bytes=self.stats.h2d_bytes // share,
            disk_write_bytes=self.stats.disk_write_bytes // share,
            disk_read_bytes=self.stats.disk_read_bytes // share,
        )


class StagePlanCache:
    """Plans of the stages of one engine, by shape of the batch.

    A shape is (rows, tokens, number of micro-batches, training, device, checksums of the trained
    parameters).
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine
        self._host_bytes: int | None = None
        """Bytes of host memory that the system granted after it refused a plan's; else None."""
        self._plans: dict[tuple[Any, ...], BatchPlans] = {}
        """Plans by shape and by whether gradients are held twice."""
        self._choices: dict[tuple[Any, ...], tuple[PipelineChoice, torch.dtype]] = {}
        self._steps: dict[tuple[Any, ...], PipelineStep] = {}
        self._warned: set[str] = set()
        self._recent_trained = RecentTrainedSets()
        self._accumulates = False
        self._num_steps: dict[tuple[Any, ...], int] = {}
        """Number of training steps that ran, by shape."""
        self._to_learn_from: list[_MeasuredBatch] = []
        self._corrections: dict[tuple[Any, ...], dict[int, Correction]] = {}
        """Corrections of speeds by measured steps, by shape and stage."""
        self._corrected: dict[tuple[Any, ...], _MeasuredBatch] = {}
        """Measured step by shape, until it is shown beside the corrected plans."""

    def get(
        self,
        rows: int,
        total_tokens: int,
        device: torch.device,
        *,
        micro_batches: int,
        reduces: bool = False,
    ) -> BatchPlans:
        """Return the plans for `micro_batches` micro-batches of `rows` rows.

        All ranks call this at once. For a new shape each rank sends the predicted seconds of its
        stages to the others, so that all make the same prediction of the step. `reduces` is whether
        gradients are averaged over replicas in this step.

        Raises:
            ConfigError: The settings do not fit the length.
            BudgetError: A budget is too small.
            PipelineError: Another rank could not plan a new shape.
        """
        training = torch.is_grad_enabled()
        self._accumulates |= training and self._holds_gradients_twice()
        if self._engine.mesh.unit_groups:  # ranks that share units plan together
            twice = torch.tensor(int(self._accumulates))
            dist.all_reduce(twice, op=dist.ReduceOp.MAX, group=self._engine.mesh.control_group)
            self._accumulates = bool(twice)
        trained = self._engine.trained_checksums
        if training:
            self._forget(self._recent_trained.use(trained))
        batch = (rows, total_tokens, micro_batches, training, device)
        # The best schedule and the seconds of stages depend on the parameters that any rank trains.
        shape = (*batch, trained if training else ())
        if shape not in self._choices:
            self._choices[shape] = self._choose(*batch)
        key = (*shape, self._accumulates)
        if key not in self._plans:
            choice, dtype = self._choices[shape]
            corrections = self._corrections.get(shape, {})

            def make() -> BatchPlans:
                by_stage = self._make_plans(
                    rows, total_tokens, device, micro_batches, training, choice, corrections
                )
                return BatchPlans(choice.bounds, dtype, by_stage, micro_batches, choice.schedule)

            shared: list[_SharedPlans] = []
            if training and (shape not in self._steps or choice.schedule == MSP):
                plans, shared = make_on_all_ranks(
                    make, self._engine.mesh.control_group, share=_SharedPlans.of
                )
                if choice.schedule == MSP:
                    # Ranks that share a unit must recompute the same parts of it, so each uses the
                    # plan of the stage's owner.
                    everyones = {s: plan for one in shared for s, plan in one.plans.items()}
                    plans = replace(plans, by_stage=everyones | plans.by_stage)
            else:
                plans = make()
            if shape not in self._steps:
                self._steps[shape] = self._predict(plans, choice, shared, reduces=reduces)
            step = self._steps[shape]
            by_stage = {s: replace(plan, pipeline=step) for s, plan in plans.by_stage.items()}
            self._plans[key] = replace(plans, by_stage=by_stage, step=step)
            # Shown last: if this raises, the next batch still finds the same plans on all ranks.
            self._show(shape, self._plans[key])
        return self._plans[key]

    def _forget(self, trained: Hashable | None) -> None:
        """Drop all data for a set of trained parameters, which is the same on all ranks."""
        if trained is None:
            return
        by_shape: tuple[dict[tuple[Any, ...], Any], ...] = (
            *(self._choices, self._steps, self._num_steps, self._corrections, self._corrected),
        )
        for values in by_shape:
            for shape in [shape for shape in values if shape[-1] == trained]:
                del values[shape]
        self._plans = {key: plans for key, plans in self._plans.items() if key[-2] != trained}
        self._to_learn_from = [one for one in self._to_learn_from if one.shape[-1] != trained]

    def _choose(
        self,
        rows: int,
        total_tokens: int,
        micro_batches: int,
        training: bool,
        device: torch.device,
    ) -> tuple[PipelineChoice, torch.dtype]:
        """Choose schedule, chunks and dtype of messages, the same on all ranks; all call this."""
        engine = self._engine
        config, parts = engine.config, engine.parts

        def choose() -> tuple[PipelineChoice, torch.dtype]:
            options: dict[str, Any] = {
                "micro_batches": micro_batches,
                "may_share": training and bool(engine.mesh.unit_groups),
            }
            if training:
                choice = choose_pipeline(
                    config,
                    whole_shape(parts),
                    total_tokens,
                    batch_rows=rows,
                    device=device_facts(device, config),
                    dtype_name=dtype_name(parts),
                    **options,
                )
            else:
                choice = default_choice(
                    config, engine.shape(), total_tokens, device_kind=device.type, **options
                )
            return choice, parts.causal_lm.dtype

        return make_on_first_rank(engine.mesh, choose)

    def _show(self, shape: tuple[Any, ...], plans: BatchPlans) -> None:
        engine, corrected = self._engine, self._corrected.pop(shape, None)
        cut = engine.staged.cut
        for stage in cut.own:
            layers = cut.layers[stage]
            name = (
                f"{engine.parts.name}, stage {stage} of {cut.num_stages} (layers "
                f"{layers.start} to {layers.stop - 1})"
            )
            engine.observer.on_plan(plans.by_stage[stage], name)
        if corrected is not None:
            for stage in corrected.own_stages:
                before, after = corrected.plans.by_stage[stage], plans.by_stage[stage]
                engine.observer.on_correction(before, after, corrected.measured(stage))

    # -- correction by measured steps ----------------------------------------------------------

    def step_done(
        self, plans: BatchPlans, schedule: Schedule, units: list[UnitMarks], stats: OffloadStats
    ) -> None:
        """Record a training step that ran all chunks; the device may not have finished it yet."""
        key = next((key for key, made in self._plans.items() if made is plans), None)
        is_predicted = plans.step is not None and plans.step.step_seconds is not None
        if key is None or not is_predicted or not self._engine.config.correct_plan:
            return
        shape = key[:-1]
        self._num_steps[shape] = self._num_steps.get(shape, 0) + 1
        if self._num_steps[shape] == STEP_MEASURED:
            own = self._engine.staged.cut.own
            self._to_learn_from.append(_MeasuredBatch(shape, plans, schedule, units, stats, own))

    def correct(self) -> None:
        """Drop plans whose first steps ran at other speeds than predicted, once for each shape.

        All ranks call this at once, before the same step. Each rank computes corrections for its
        own stages; `get` then makes new plans with the corrections of all ranks.
        """
        if not self._to_learn_from:
            return
        batch, before = self._to_learn_from[0], Correction()

        def learn_own() -> dict[int, Correction] | None:
            if not batch.units[-1].end.is_reached():
                return None
            return {
                stage: learn(plan.prediction, batch.measured(stage), before)
                for stage in batch.own_stages
                for plan in [batch.plans.by_stage[stage]]
                if plan.prediction is not None
            }

        try:
            gathered = make_and_gather(self._engine.mesh, learn_own)
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
        # Of the ranks that share sequences of a stage, the slowest counts, as the others wait.
        self._corrections[batch.shape] = {
            stage: max(
                (x[stage] for x in by_rank if stage in x), key=lambda x: x.forward + x.backward
            )
            for stage in batch.own_stages
            if any(stage in x for x in by_rank)
        }
        self._corrected[batch.shape] = batch
        self._steps.pop(batch.shape, None)
        for key in [key for key in self._plans if key[:-1] == batch.shape]:
            del self._plans[key]

    def _predict(
        self,
        plans: BatchPlans,
        choice: PipelineChoice,
        shared: list[_SharedPlans],
        *,
        reduces: bool,
    ) -> PipelineStep:
        """Predict the step of all ranks by simulation, from the facts that they exchanged."""
        engine = self._engine
        mesh, config = engine.mesh, engine.config
        one = next(iter(plans.by_stage.values()))
        step = PipelineStep(
            schedule=choice.schedule,
            reason=choice.reason,
            ranks=mesh.pp_size,
            replicas=mesh.dp_size,
            micro_batches=plans.micro_batches,
        )
        if not one.training or any(stages.seconds is None for stages in shared):
            return step
        seconds_of = {s: table for one in shared for s, table in (one.seconds or {}).items()}
        offloaded = frozenset[tuple[int, int]]().union(*(one.offloaded for one in shared))
        stored = frozenset[tuple[int, int]]().union(*(one.stored for one in shared))
        kv_copies = frozenset[KVCopy]().union(*(one.kv_copies for one in shared))
        whole = engine.shape()

        def message_seconds(stage: int, chunk: int) -> float:
            start, end = plans.bounds[chunk]
            tokens = one.batch_rows * one.shape.tokens_per_rank(end - start)
            layer = engine.staged.cut.layers[stage].start
            return tokens * whole.message_bytes_per_token(layer) / UNKNOWN_LINK

        def schedule_of(micro_batches: int) -> Schedule:
            made = step_schedule(
                config,
                choice.schedule,
                micro_batches,
                len(plans.bounds),
                forward_only=False,
                reduce=reduces,
                offloaded=offloaded,
                stored=stored,
                kv_copies=kv_copies,
            )
            return made.schedule

        average_bytes = 2 * (mesh.dp_size - 1) / mesh.dp_size * one.shape.gradient_bytes
        seconds, idle = pipeline_step(
            schedule_of,
            seconds_of,
            micro_batches=plans.micro_batches,
            ranks=mesh.pp_size,
            message_seconds=message_seconds,
            reduce_seconds=average_bytes / UNKNOWN_LINK,
        )
        peak = peak_flops(one.device.name)
        rows = plans.micro_batches * one.batch_rows
        flops = step_flops(whole, rows, one.total_tokens)
        devices = mesh.pp_size * one.shape.sp
        mfu = None if peak is None else flops / seconds / (devices * peak)
        return replace(step, step_seconds=seconds, bubble_fraction=idle, mfu=mfu)

    def _holds_gradients_twice(self) -> bool:
        """Whether other gradients exist beside a step's: accumulated ones, or buckets in flight."""
        parameters = self._engine.parts.causal_lm.parameters()
        return self._engine.mesh.replica_group is not None or any(
            p.grad is not None for p in parameters
        )

    def _make_plans(
        self,
        rows: int,
        total_tokens: int,
        device: torch.device,
        micro_batches: int,
        training: bool,
        choice: PipelineChoice,
        corrections: Mapping[int, Correction],
    ) -> dict[int, Plan]:
        """Plan this rank's stages, and allocate the host memory that they need together.

        Ranks that share a sequence call this at once; if one of them raises, all do.
        """
        engine = self._engine
        cut = engine.staged.cut
        alive = self._alive(choice.schedule, micro_batches, len(choice.bounds)) if training else 1.0
        batches = max(1, math.ceil(alive))

        @functools.cache
        def rank_request() -> PlanRequest:
            return self._rank_request(
                rows, total_tokens, device, training, choice, alive=alive * len(cut.own)
            )

        def plan_of(stage: int) -> Plan:
            last = stage == cut.num_stages - 1
            rank = rank_request()
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

        while True:
            plans = {
                stage: shared_plan(functools.partial(plan_of, stage), engine.group)
                for stage in cut.own
            }
            # Each plan has a share of the budgets; all share one pool of host memory.
            budgets = read_budgets(rank_request().config, rank_request().device)
            pooled = [replace(plan, budgets=budgets) for plan in plans.values()]
            given_bytes = engine.plans.min_granted_bytes(
                functools.partial(
                    engine.offload_holder.prepare,
                    device,
                    *pooled,
                    batches=batches,
                    progress=engine.observer.on_host_memory,
                )
            )
            if given_bytes is None or given_bytes >= (self._host_bytes or math.inf):
                break
            warn_reduced_host_memory(batches * sum(map(offloaded_bytes, pooled)), given_bytes)
            self._host_bytes = given_bytes
            rank_request.cache_clear()
        whole = engine.shape()
        for plan in plans.values():
            others = other_plan_warnings(engine.config, whole, total_tokens, training=training)
            for warning in (*plan.warnings, *others):
                if warning not in self._warned:
                    self._warned.add(warning)
                    warnings.warn(warning, stacklevel=2)
        return plans

    def _rank_request(
        self,
        rows: int,
        total_tokens: int,
        device: torch.device,
        training: bool,
        choice: PipelineChoice,
        *,
        alive: float,
    ) -> PlanRequest:
        """Return the request on which the plans of all stages of this rank are based.

        Its `shape` is that of the whole model.
        """
        engine = self._engine
        config, shape = engine.config, engine.shape()
        if self._host_bytes is not None:
            config = config.replace(host_memory=self._host_bytes)
        if choice.schedule == MSP:
            remote = engine.remote_weights()
            shape = replace(
                shape,
                weight_bytes=shape.weight_bytes + remote.resident_bytes + remote.passing_bytes,
                gradient_bytes=shape.gradient_bytes + remote.passing_bytes,
            )
        backend, reason = engine.plans.describe_backends(shape, device)
        facts = device_facts(device, config)
        if config.device_memory is None:
            reserve_driver_memory(device, CONTEXT_BYTES["cuda"])
        if engine.group is not None:
            shape = replace(shape, sp=engine.group.size)
        return PlanRequest(
            config=config,
            shape=shape,
            device=facts,
            backend_name=backend,
            backend_reason=reason,
            batch_rows=rows,
            total_tokens=total_tokens,
            training=training,
            dtype_name=dtype_name(engine.parts),
            bounds=choice.bounds,
            by_layer=False,
            alive=alive,
            accumulates=training and self._accumulates,
        )

    def _plan_stage(self, request: PlanRequest, choice: PipelineChoice, micro_batches: int) -> Plan:
        """Plan a stage; if ranks share units, beside the K/V of other stages that this rank holds.

        The bytes of these K/V depend on the tier that the plan chooses for K/V, so planning is
        repeated until they agree.
        """
        while True:
            plan = make_plan(request)
            if choice.schedule != MSP or not request.training:
                return plan
            slices = self._slices(request, plan.kv_tier, micro_batches)
            # Bytes never shrink, or the tier of K/V might alternate forever.
            slices = {
                tier: max(slices.get(tier, 0), request.slices.get(tier, 0))
                for tier in {**request.slices, **slices}
            }
            if slices == request.slices:
                return plan
            request = replace(request, slices=slices)

    def _slices(self, request: PlanRequest, kv_tier: Tier, micro_batches: int) -> dict[Tier, int]:
        engine, bounds, facts = self._engine, request.bounds, request.device
        assert bounds is not None, "a pipeline's chunks are decided"
        # Bytes hardly depend on speeds (only through the arrival of messages), so guesses suffice.
        estimate = cpu_estimate(facts.name)
        if facts.kind != "cpu":
            estimate = cuda_estimate(facts.name, peak_flops(facts.name))
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
        made = step_schedule(config, name, micro_batches, chunks, forward_only=False, reduce=False)
        units = made.schedule.live_units[self._engine.mesh.pp_rank]
        return max(1.0, units / chunks / config.pp_virtual_stages)


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """A lowered and validated schedule."""

    name: str
    schedule: Schedule
    """The actions of all ranks, with sends, receives and copies."""
    splits_backward: bool
    """Whether backward is split into input gradients and weight gradients."""
    virtual: int
    """Number of stages of each rank."""
    offloaded_units: frozenset[tuple[int, int]] = frozenset()
    """(stage, unit) whose activations an action of the schedule offloads."""


def step_schedule(
    config: SPPOConfig,
    name: str,
    micro_batches: int,
    chunks: int,
    *,
    forward_only: bool,
    reduce: bool,
    offloaded: frozenset[tuple[int, int]] = frozenset(),
    stored: frozenset[tuple[int, int]] = frozenset(),
    kv_copies: frozenset[KVCopy] = frozenset(),
) -> StepSchedule:
    """Return the schedule of a step, made at the first call with these arguments.

    `offloaded` are the (stage, chunk) with offloaded activations, `stored` those with activations
    on a tier behind the host, `kv_copies` the copies of K/V beside units (see `add_kv_copies`).
    Those of other ranks may be left out, as this rank does not run their actions.
    """
    size = Size(config.pp_size, micro_batches, chunks, config.pp_virtual_stages)
    return _make_schedule(name, size, forward_only, reduce, offloaded, stored, kv_copies)


def check_size(name: str, size: Size) -> None:
    """Check that a step has enough units for its schedule.

    Raises:
        ConfigError: There are too few; the message has the numbers and a remedy.
    """
    if size.num_virtual > 1 and size.num_units < size.num_ranks:
        raise ConfigError(
            f"pp_schedule={name!r} with pp_virtual_stages={size.num_virtual} passes groups of at "
            f"least pp_size={size.num_ranks} units through a rank's stages, but this batch has "
            f"{size.num_micro_batches} micro-batches of {size.num_chunks} chunks, "
            f"{size.num_units} units. Allowed: micro-batches x chunks >= pp_size. Remedy: a larger "
            "per-device batch, more chunks (num_chunks, chunk_tokens), or pp_virtual_stages=1."
        )


@functools.lru_cache(maxsize=64)
def _make_schedule(
    name: str,
    size: Size,
    forward_only: bool,
    reduce: bool,
    offloaded: frozenset[tuple[int, int]],
    stored: frozenset[tuple[int, int]],
    kv_copies: frozenset[KVCopy],
) -> StepSchedule:
    made = generate(name, size)
    if forward_only:
        forwards = made.keep(lambda action: action.kind == "F")
        lowered = add_transfers(add_kv_copies(forwards, kv_copies))
    else:
        chunks = size.num_chunks
        lowered = lower(
            made,
            offloaded=lambda stage, unit: (stage, unit % chunks) in offloaded,
            stored=lambda stage, unit: (stage, unit % chunks) in stored,
            kv_copies=kv_copies,
            reduce=reduce,
        )
    validate(lowered)  # once for each size; nothing wrong is ever run
    actions = [action for rank in lowered.ranks for action in rank]
    return StepSchedule(
        name,
        lowered,
        splits_backward=any(action.kind == "W" for action in actions),
        virtual=size.num_virtual,
        offloaded_units=frozenset((a.stage, a.unit) for a in actions if a.kind == "D"),
    )
