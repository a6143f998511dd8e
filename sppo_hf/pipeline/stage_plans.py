"""Plans of a rank's stages, and the schedule of a step; made when a batch's shape first comes."""

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
from sppo_hf.offload.stats import OffloadStats
from sppo_hf.pipeline.agreement import all_say, make_on_all_ranks, make_on_first_rank
from sppo_hf.planning.choices import read_budgets
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.cost import Correction, ModelCost
from sppo_hf.planning.hardware import UNKNOWN_LINK, cpu_estimate, cuda_estimate, peak_flops
from sppo_hf.planning.memory import CONTEXT_BYTES
from sppo_hf.planning.model_shape import step_flops
from sppo_hf.planning.pipeline_choice import (
    RULE,
    PipelineChoice,
    StageSeconds,
    choose_pipeline,
    pipeline_step,
    rule_choice,
    stage_seconds,
)
from sppo_hf.planning.pipeline_cost import PipelineCost, bytes_of_slices
from sppo_hf.planning.plan import PipelineStep, Plan, PlanRequest, make_plan, other_plan_warnings
from sppo_hf.planning.prediction import MeasuredStep, learn, worth_correcting
from sppo_hf.planning.stages import stage_shape, streams_of
from sppo_hf.planning.tiers import TIERS, Tier
from sppo_hf.schedule.generate import MSP, Size, generate
from sppo_hf.schedule.lower import Stream, add_streams, add_transfers, lower
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.validate import validate

if TYPE_CHECKING:
    from sppo_hf.pipeline.executor import UnitMarks
    from sppo_hf.pipeline.pipeline_engine import PipelineEngine


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
    schedule: str = RULE
    """Name of the schedule, the same on all ranks."""
    step: PipelineStep | None = None
    """What all ranks do together, once they have said what they take."""

    @property
    def leaves(self) -> frozenset[tuple[int, int]]:
        """The (stage, chunk) of this rank of which anything leaves the device."""
        return frozenset(
            (stage, chunk)
            for stage, plan in self.by_stage.items()
            for chunk, row in enumerate(plan.layer_modes)
            if plan.training and any(mode.offload for mode in row)
        )

    @property
    def stores(self) -> frozenset[tuple[int, int]]:
        """Those of which anything goes on to a tier behind the host."""
        return frozenset(
            (stage, chunk)
            for stage, chunk in self.leaves
            for row in (self.by_stage[stage].layer_modes[chunk],)
            if any(TIERS[mode.tier].behind_host for mode in row)
        )

    @property
    def streams(self) -> frozenset[Stream]:
        """What keys and values of this rank's stages do beside units, as `add_streams` says it."""
        found: set[Stream] = set()
        for stage, plan in self.by_stage.items():
            if plan.kv_tier == "device":
                continue
            tables = plan.program().tables
            layers = np.bincount(tables.kind_of, minlength=len(tables.kinds))
            of_stage = streams_of(tables, plan.kv_tier, [layers])
            found |= {(kind, stage, chunk, part) for kind, _, chunk, part in of_stage}
        return frozenset(found)

    def longest_step_seconds(self, ranks: int) -> float:
        """Predicted seconds if `ranks` ranks, all as fast as this one, ran one after the other.

        What a message waits for is at most that. 0 where the device's speed is unknown.
        """
        predictions = [plan.prediction for plan in self.by_stage.values()]
        stages = sum(one.step_seconds for one in predictions if one is not None)
        return ranks * self.micro_batches * stages


class _Said(NamedTuple):
    """What a rank says of its own stages to all that run a step with it."""

    plans: dict[int, Plan]
    """By stage; only where ranks share units, and need each other's."""
    seconds: dict[int, StageSeconds] | None
    """By stage; None where speeds are not known."""
    leaves: frozenset[tuple[int, int]]
    stores: frozenset[tuple[int, int]]
    streams: frozenset[Stream]


def _say(plans: BatchPlans) -> _Said:
    of_stages = plans.by_stage
    known = all(plan.prediction is not None for plan in of_stages.values())
    seconds = {stage: stage_seconds(plan) for stage, plan in of_stages.items()} if known else None
    shared = of_stages if plans.schedule == MSP else {}
    return _Said(shared, seconds, plans.leaves, plans.stores, plans.streams)


@dataclass(frozen=True, slots=True)
class _Measured:
    shape: tuple[Any, ...]
    plans: BatchPlans
    schedule: Schedule
    units: list[UnitMarks]
    stats: OffloadStats
    own: tuple[int, ...]
    """This rank's stages."""

    def measured(self, stage: int) -> MeasuredStep:
        """A micro-batch on a stage of this rank, on average; the device has come that far.

        Of a unit that n ranks share a rank measures its share, which stands for the n-th of it:
        what they exchange is in that. What was copied and waited for is known of the rank as a
        whole, and shared out evenly.
        """
        chunks, count = len(self.plans.bounds), self.plans.micro_batches
        forward, backward = [0.0] * chunks, [0.0] * chunks
        for action, begin, end in self.units:
            if action.stage == stage:
                seconds = forward if action.kind == "F" else backward
                whole = begin.seconds_until(end) / float(self.schedule.share(action))
                seconds[action.unit % chunks] += whole / count
        share = count * len(self.own)
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
    """Plans of the stages of one engine."""

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine
        self._host_bytes: int | None = None
        """What the system gave, once it refused what was planned with."""
        self._made: dict[tuple[Any, ...], BatchPlans] = {}
        self._choices: dict[tuple[Any, ...], tuple[PipelineChoice, torch.dtype]] = {}
        self._steps: dict[tuple[Any, ...], PipelineStep] = {}
        self._warned: set[str] = set()
        self._last_trained = RecentTrainedSets()
        self._accumulates = False
        self._seen: dict[tuple[Any, ...], int] = {}
        """Steps of each shape."""
        self._waiting: list[_Measured] = []
        self._learned: dict[tuple[Any, ...], dict[int, Correction]] = {}
        """By shape and stage."""
        self._corrected: dict[tuple[Any, ...], _Measured] = {}
        """By shape: what was measured, until the plans made with it are shown beside it."""

    def get(
        self,
        rows: int,
        total_tokens: int,
        device: torch.device,
        *,
        micro_batches: int,
        reduces: bool = False,
    ) -> BatchPlans:
        """The plans for `micro_batches` micro-batches of `rows` rows, and the step of all ranks.

        All ranks ask at once. When a shape first comes each says what its own stages take, which
        only it knows, so that all predict the step alike. `reduces` is whether gradients are
        averaged over replicas in it.

        Raises:
            ConfigError: The settings do not fit the length.
            BudgetError: A budget cannot hold what it must.
            PipelineError: Another rank has no plan for a shape that is new.
        """
        training = torch.is_grad_enabled()
        self._accumulates |= training and self._holds_gradients_twice()
        if self._engine.mesh.unit_groups:  # then ranks plan together
            twice = torch.tensor(int(self._accumulates))
            dist.all_reduce(twice, op=dist.ReduceOp.MAX, group=self._engine.mesh.control_group)
            self._accumulates = bool(twice)
        if training:
            self._forget(self._last_trained.use(self._engine.trained))
        wanted = (rows, total_tokens, micro_batches, training, device)
        # What any rank trains decides which schedule is best, and how long each stage takes.
        shape = (*wanted, self._engine.trained if training else ())
        if shape not in self._choices:
            self._choices[shape] = self._choose(*wanted)
        key = (*shape, self._accumulates)
        if key not in self._made:
            choice, dtype = self._choices[shape]
            learned = self._learned.get(shape, {})
            wanted = (rows, total_tokens, device, micro_batches, training)

            def make() -> BatchPlans:
                plans = self._make(*wanted, choice, learned)
                return BatchPlans(choice.bounds, dtype, plans, micro_batches, choice.schedule)

            said: list[_Said] = []
            if training and (shape not in self._steps or choice.schedule == MSP):
                plans, said = make_on_all_ranks(make, self._engine.mesh.control_group, say=_say)
                if choice.schedule == MSP:
                    # What of a unit is computed again must be the same on all that share it.
                    everyones = {s: plan for one in said for s, plan in one.plans.items()}
                    plans = replace(plans, by_stage=everyones | plans.by_stage)
            else:
                plans = make()
            if shape not in self._steps:
                self._steps[shape] = self._predict(plans, choice, said, reduces=reduces)
            self._made[key] = self._with_step(plans, self._steps[shape])
            # At last: whatever raises here, the next batch finds the same plans on all ranks.
            self._show(shape, self._made[key])
        return self._made[key]

    def _forget(self, trained: Hashable | None) -> None:
        """Forget all about a set of parameters that trained; all ranks forget the same."""
        if trained is None:
            return
        for of_shape in (self._choices, self._steps, self._seen, self._learned, self._corrected):
            for shape in [shape for shape in of_shape if shape[-1] == trained]:
                del of_shape[shape]
        self._made = {key: made for key, made in self._made.items() if key[-2] != trained}
        self._waiting = [one for one in self._waiting if one.shape[-1] != trained]

    def _choose(
        self,
        rows: int,
        total_tokens: int,
        micro_batches: int,
        training: bool,
        device: torch.device,
    ) -> tuple[PipelineChoice, torch.dtype]:
        """Schedule, chunks and dtype of messages, on which all ranks agree; all ask at once."""
        engine = self._engine
        config, parts = engine.config, engine.parts

        def choose() -> tuple[PipelineChoice, torch.dtype]:
            """Only on the first rank, which alone simulates."""
            wanted: dict[str, Any] = {
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
                    **wanted,
                )
            else:
                choice = rule_choice(
                    config, engine.shape(), total_tokens, device_kind=device.type, **wanted
                )
            return choice, parts.causal_lm.dtype

        return make_on_first_rank(engine.mesh, choose)

    def _show(self, shape: tuple[Any, ...], done: BatchPlans) -> None:
        corrected = self._corrected.pop(shape, None)
        for stage in self._engine.staged.cut.own:
            self._announce(stage, done.by_stage[stage])
        if corrected is not None:
            for stage in corrected.own:
                before, plan = corrected.plans.by_stage[stage], done.by_stage[stage]
                engine = self._engine
                engine.observer.on_correction(before, plan, corrected.measured(stage))

    # -- what was measured ---------------------------------------------------------------------

    def step_done(
        self, plans: BatchPlans, schedule: Schedule, units: list[UnitMarks], stats: OffloadStats
    ) -> None:
        """A training step of all chunks has ended on the host; the device may be behind."""
        key = next((key for key, made in self._made.items() if made is plans), None)
        known = plans.step is not None and plans.step.step_seconds is not None
        if key is None or not known or not self._engine.config.correct_plan:
            return
        shape = key[:-1]
        self._seen[shape] = self._seen.get(shape, 0) + 1
        if self._seen[shape] == STEP_MEASURED:
            own = self._engine.staged.cut.own
            self._waiting.append(_Measured(shape, plans, schedule, units, stats, own))

    def correct(self) -> None:
        """Plan anew, once for each shape, what the first steps have shown to run at other speeds.

        All ranks call this at once, before the same step. Each learns of its own stages; they plan
        anew together, so that all hear what the others' units will take.
        """
        if not self._waiting:
            return
        waiting, before = self._waiting[0], Correction()

        def learn_own() -> dict[int, Correction] | None:
            if not waiting.units[-1].end.passed():
                return None
            return {
                stage: learn(plan.prediction, waiting.measured(stage), before)
                for stage in waiting.own
                for plan in [waiting.plans.by_stage[stage]]
                if plan.prediction is not None
            }

        try:
            said = all_say(self._engine.mesh, learn_own)
        except Exception:
            self._waiting.pop(0)  # on all ranks; else every later batch would be refused, too
            raise
        everyone = [one for one in said if one is not None]
        if len(everyone) < len(self._engine.mesh.sharing_ranks):
            return
        self._waiting.pop(0)
        corrections = [one for learned in everyone for one in learned.values()]
        if not any(worth_correcting(before, one) for one in corrections):
            return
        shape = waiting.shape
        # Of the ranks that share a stage's sequences, the slowest one's, which the others wait for.
        self._learned[shape] = {
            stage: max(
                (x[stage] for x in everyone if stage in x), key=lambda x: x.forward + x.backward
            )
            for stage in waiting.own
            if any(stage in x for x in everyone)
        }
        self._corrected[shape] = waiting
        self._steps.pop(shape, None)
        for key in [key for key in self._made if key[:-1] == shape]:
            del self._made[key]

    def _with_step(self, plans: BatchPlans, step: PipelineStep) -> BatchPlans:
        by_stage = {stage: replace(p, pipeline=step) for stage, p in plans.by_stage.items()}
        return replace(plans, by_stage=by_stage, step=step)

    def _predict(
        self, plans: BatchPlans, choice: PipelineChoice, everyone: list[_Said], *, reduces: bool
    ) -> PipelineStep:
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
        if not one.training or any(said.seconds is None for said in everyone):
            return step
        stages = {s: table for said in everyone for s, table in (said.seconds or {}).items()}
        leaves = frozenset[tuple[int, int]]().union(*(said.leaves for said in everyone))
        stores = frozenset[tuple[int, int]]().union(*(said.stores for said in everyone))
        streams = frozenset[Stream]().union(*(said.streams for said in everyone))
        chunks = len(plans.bounds)
        whole = engine.shape()

        def message_seconds(stage: int, chunk: int) -> float:
            start, end = plans.bounds[chunk]
            tokens = one.batch_rows * one.shape.own_tokens(end - start)
            layer = engine.staged.cut.layers[stage].start
            return tokens * whole.message_bytes_per_token(layer) / UNKNOWN_LINK

        seconds, idle = pipeline_step(
            lambda count: (
                step_schedule(
                    config,
                    choice.schedule,
                    count,
                    chunks,
                    forward_only=False,
                    reduce=reduces,
                    leaves=leaves,
                    stores=stores,
                    streams=streams,
                ).schedule
            ),
            stages,
            micro_batches=plans.micro_batches,
            ranks=mesh.pp_size,
            message_seconds=message_seconds,
            reduce_seconds=2
            * (mesh.dp_size - 1)
            / mesh.dp_size
            * one.shape.gradient_bytes
            / UNKNOWN_LINK,
        )
        peak = peak_flops(one.device.name)
        rows = plans.micro_batches * one.batch_rows
        flops = step_flops(whole, rows, one.total_tokens)
        devices = mesh.pp_size * one.shape.sp
        mfu = None if peak is None else flops / seconds / (devices * peak)
        return replace(step, step_seconds=seconds, bubble_fraction=idle, mfu=mfu)

    def _holds_gradients_twice(self) -> bool:
        """Whether a step's gradients lie beside others: earlier ones, or those being reduced."""
        parameters = self._engine.parts.causal_lm.parameters()
        return self._engine.mesh.replica_group is not None or any(
            p.grad is not None for p in parameters
        )

    def _make(
        self,
        rows: int,
        total_tokens: int,
        device: torch.device,
        micro_batches: int,
        training: bool,
        choice: PipelineChoice,
        learned: Mapping[int, Correction],
    ) -> dict[int, Plan]:
        """Plans of this rank's stages, and the host memory that they need together.

        Ranks that share a sequence call this at once, and hear what any of them raises.
        """
        engine = self._engine
        cut = engine.staged.cut
        alive = self._alive(choice.schedule, micro_batches, len(choice.bounds)) if training else 1.0
        batches = max(1, math.ceil(alive))

        @functools.cache
        def rank_request() -> PlanRequest:
            wanted = rows, total_tokens, device, training, choice
            return self._rank_request(*wanted, alive=alive * len(cut.own))

        def plan_of(stage: int) -> Plan:
            last = stage == cut.num_stages - 1
            rank = rank_request()
            request = replace(rank, shape=stage_shape(rank.shape, cut.layers[stage], last=last))
            if stage in learned:
                with contextlib.suppress(BudgetError):  # what ran so far still fits
                    corrected = replace(request, correction=learned[stage])
                    return self._planned(corrected, choice, micro_batches)
            try:
                return self._planned(request, choice, micro_batches)
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
            # Each plan has a share of the budgets, and one pool serves them all.
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
        """What the plans of all stages of this rank ask for; its shape is the whole model's."""
        engine = self._engine
        config, shape = engine.config, engine.shape()
        if self._host_bytes is not None:
            config = config.replace(host_memory=self._host_bytes)
        if choice.schedule == MSP:
            helped = engine.helped_weights()
            shape = replace(
                shape,
                weight_bytes=shape.weight_bytes + helped.resident_bytes + helped.passing_bytes,
                gradient_bytes=shape.gradient_bytes + helped.passing_bytes,
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

    def _planned(self, request: PlanRequest, choice: PipelineChoice, micro_batches: int) -> Plan:
        """The plan of a stage; where ranks share units, beside what this one holds of others'.

        How much that is depends on where the plan has K/V wait, so it may take more than one.
        """
        while True:
            plan = make_plan(request)
            if choice.schedule != MSP or not request.training:
                return plan
            slices = self._slices(request, plan.kv_tier, micro_batches)
            # Never less than before, or K/V might go back and forth.
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
        # Bytes do not ask for speeds, but when messages come does, a little.
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
        return bytes_of_slices(costs, compute, engine.mesh.pp_rank)

    def _announce(self, stage: int, plan: Plan) -> None:
        engine = self._engine
        layers = engine.staged.cut.layers[stage]
        name = (
            f"{engine.parts.name}, stage {stage} of {engine.staged.cut.num_stages} (layers "
            f"{layers.start} to {layers.stop - 1})"
        )
        engine.observer.on_plan(plan, name)

    def _alive(self, name: str, micro_batches: int, chunks: int) -> float:
        """Micro-batches that each stage of this rank has alive at most, in whole ones."""
        config = self._engine.config
        made = step_schedule(config, name, micro_batches, chunks, forward_only=False, reduce=False)
        units = made.schedule.live_units[self._engine.mesh.pp_rank]
        return max(1.0, units / chunks / config.pp_virtual_stages)


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """A schedule, ready to be carried out."""

    name: str
    schedule: Schedule
    """With sends and receives."""
    splits: bool
    """Whether backward comes in two halves."""
    virtual: int
    """Stages of each rank."""
    sent: frozenset[tuple[int, int]] = frozenset()
    """The (stage, unit) that an action sends away."""


def step_schedule(
    config: SPPOConfig,
    name: str,
    micro_batches: int,
    chunks: int,
    *,
    forward_only: bool,
    reduce: bool,
    leaves: frozenset[tuple[int, int]] = frozenset(),
    stores: frozenset[tuple[int, int]] = frozenset(),
    streams: frozenset[Stream] = frozenset(),
) -> StepSchedule:
    """Make (or find) the schedule of a step.

    A rank may leave the others out of `leaves`, the (stage, chunk) of which anything leaves the
    device, of `stores`, those of which anything goes on to a tier behind the host, and of
    `streams`, what keys and values do beside units (see `add_streams`): it does not run their
    lists.
    """
    size = Size(config.pp_size, micro_batches, chunks, config.pp_virtual_stages)
    return _make(name, size, forward_only, reduce, leaves, stores, streams)


def check_size(name: str, size: Size) -> None:
    """Refuse schedules over fewer units than they need to be what they are.

    Raises:
        ConfigError: Naming the numbers and the remedy.
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
def _make(
    name: str,
    size: Size,
    forward_only: bool,
    reduce: bool,
    leaves: frozenset[tuple[int, int]],
    stores: frozenset[tuple[int, int]],
    streams: frozenset[Stream],
) -> StepSchedule:
    made = generate(name, size)
    if forward_only:
        forwards = made.keep(lambda action: action.kind == "F")
        lowered = add_transfers(add_streams(forwards, streams))
    else:
        chunks = size.num_chunks
        lowered = lower(
            made,
            leaves=lambda stage, unit: (stage, unit % chunks) in leaves,
            stores=lambda stage, unit: (stage, unit % chunks) in stores,
            streams=streams,
            reduce=reduce,
        )
    validate(lowered)  # once for each size; nothing wrong is ever run
    splits = any(action.kind == "W" for rank in lowered.ranks for action in rank)
    return StepSchedule(
        name,
        lowered,
        splits=splits,
        virtual=size.num_virtual,
        sent=frozenset((a.stage, a.unit) for rank in lowered.ranks for a in rank if a.kind == "D"),
    )
