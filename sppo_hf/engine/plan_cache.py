"""The plans of one model, and the offload engine that is made for them.

A plan is made at the first batch of each shape, reused, and corrected once. `PlanCache` gathers
what the torch-free planner needs (the model's shape, the device's facts, the attention backend).
`PlannedOffload` makes the offload engine for the first plan, reserves the memory that plans need,
and replaces the engine when it must grow. Once the device has
finished a plan's first steps, the measured times correct the speeds that the plan was made with.
"""

from __future__ import annotations

import functools
import logging
import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from sppo_hf.attention.backends.base import AttentionSpec, Backend, determinism
from sppo_hf.attention.backends.select import Selection, select_backend
from sppo_hf.attention.segments import BidirectionalSpan, RowSpans
from sppo_hf.attention.warm_up import ChunkedRows, LayerAttention, WarmUp
from sppo_hf.config import SPPOConfig
from sppo_hf.engine.device_facts import (
    device_facts,
    dtype_name,
    model_shape,
    reserve_driver_memory,
    use_expandable_segments,
)
from sppo_hf.engine.model_parts import ModelParts
from sppo_hf.engine.sequence_group import SequenceGroup, held_kv_heads, local_heads
from sppo_hf.engine.step_observer import StepObserver, StepTimer
from sppo_hf.errors import ConfigError, RankLostError, SPPOError
from sppo_hf.offload.copy_streams import Copier
from sppo_hf.offload.engine import OffloadEngine, OffloadStats, make_copier, make_engine
from sppo_hf.offload.host_memory import Progress
from sppo_hf.offload.store import Store
from sppo_hf.planning.cost import Correction
from sppo_hf.planning.memory import CONTEXT_BYTES, Cause
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.plan import Plan, PlanRequest, make_plan, other_plan_warnings
from sppo_hf.planning.prediction import MeasuredStep, learn, worth_correcting
from sppo_hf.planning.tiers import TIERS, Tier, allowed_behind_host
from sppo_hf.rules import format_bytes

logger = logging.getLogger(__name__)

STEP_MEASURED = 2
"""Step of a plan that is measured: the first allocates, pins and compiles; later ones are alike."""


class BatchShape(NamedTuple):
    """What plans depend on: a plan is made for each of these, and used for all such batches."""

    batch_rows: int
    """Rows that run together; in a pipeline those of a micro-batch."""
    total_tokens: int
    """Length of each row, padding included."""
    training: bool
    device: torch.device
    trained: Hashable
    """Which parameters train; empty in evaluation."""
    return_logits: bool = False
    """Whether the logits of all tokens are kept."""
    router_loss: bool = False
    """See `ModelShape`."""
    encoded_token_bytes: tuple[int, int] = (0, 0)
    """See `ModelShape`."""
    micro_batches: int = 1
    """Number of micro-batches of a pipeline's step."""


@dataclass(slots=True)
class _PlanRuns:
    """A plan, and how often it ran."""

    plan: Plan
    has_run: bool = False
    """Whether a forward under it was completed."""
    num_steps: int = 0
    """Training steps, forward and backward, that were completed under it."""


_MAX_FIXED_LENGTHS = 3
"""With rows of more lengths than this, every batch is expected to have a new length."""

_SHRINK_FACTOR = 0.95
"""Share of a tier's budget to plan with after memory ran out under it."""

_WARM_UP_SECONDS = 120.0
"""How long a step may wait for kernels that build plans for each shape, on this or another rank."""

_MIN_GRADIENT_SHARE = 0.01
"""Gradients that take less than this share of the device's peak do not change plans."""

_MAX_TRAINED_SETS = 8
"""Sets of trained parameters whose plans are kept: enough for adapters that take turns."""


class RecentTrainedSets:
    """The sets of trained parameters that were used last, whose plans are kept."""

    def __init__(self) -> None:
        """Begin with no set."""
        self._sets: dict[Hashable, None] = {}

    def use(self, trained: Hashable) -> Hashable | None:
        """Mark a set as used now; returns the least recently used one if there are too many."""
        self._sets.pop(trained, None)
        self._sets[trained] = None
        if len(self._sets) <= _MAX_TRAINED_SETS:
            return None
        forgotten = next(iter(self._sets))
        del self._sets[forgotten]
        return forgotten


class StepRows(NamedTuple):
    """Rows that run together in a step, and which of their chunks run on this rank."""

    plan: Plan
    batch_rows: int
    spans: tuple[RowSpans, ...] | None
    """Documents and padding of each row; None if every row is one document."""
    chunks: range
    group: SequenceGroup | None
    """The ranks that share the chunks; None if this rank has whole chunks."""
    bidirectional: tuple[BidirectionalSpan, ...] = ()
    """Tokens that see each other in both directions."""


def offloaded_bytes(plan: Plan) -> int:
    """Peak host bytes of a plan's offload engine: all but weights, optimizer and gradients.

    With what its last slab leaves unused.
    """
    host = plan.estimate.host
    others = (Cause.WEIGHTS, Cause.OPTIMIZER, Cause.GRADIENTS)
    return host.total - sum(host[cause] for cause in others)


def new_offload_engine(
    config: SPPOConfig, device: torch.device, plan: Plan, *, copier: Copier | None = None
) -> OffloadEngine:
    """Return an offload engine for the settings of `config` and the budgets of `plan`.

    Args:
        config: The settings.
        device: Where the model is.
        plan: Has the budgets.
        copier: Copies host-resident weights; None if there are none.

    Raises:
        ConfigError: A tier that the settings name cannot be used.
    """
    stores = [
        Store(
            tier,
            TIERS[tier].open(config, plan.budgets.of(tier)),
            checksum=config.offload_checksum,
            max_queued_bytes=plan.staging_bytes,
        )
        for tier in allowed_behind_host(config, device.type)
    ]
    budget = plan.budgets.host
    if stores and device.type == "cpu":
        # The host's memory is the device's: it only stages what goes to the tiers behind it.
        budget = len(stores) * plan.staging_bytes
    return make_engine(
        device,
        use_streams=config.use_streams,
        use_pin_memory=config.use_pin_memory,
        budget_bytes=budget,
        min_offload_elements=config.min_offload_size,
        stores=stores,
        staging_bytes=plan.staging_bytes,
        copier=copier,
    )


class PlannedOffload:
    """The offload engine of one model; there is none before `prepare`."""

    def __init__(self, config: SPPOConfig) -> None:
        self._config = config
        self._engine: OffloadEngine | None = None
        self._staging_bytes = 0
        self._copier: Copier | None = None

    def copier(self, device: torch.device) -> Copier:
        """Return the copier for host-resident weights, which the offload engine shares."""
        if self._copier is None and self._engine is not None:
            self._copier = self._engine.copier
        elif self._copier is None:
            self._copier = make_copier(device, use_streams=self._config.use_streams)
        return self._copier

    def prepare(
        self,
        device: torch.device,
        *plans: Plan,
        batches: int = 1,
        progress: Progress | None = None,
    ) -> int | None:
        """Make the engine for the first plans, and reserve the host memory that the plans need.

        Pinning memory takes seconds and must not happen in the middle of a step. There is a plan
        for each stage on this rank, of which `batches` batches may be offloaded at the same time.

        Returns:
            Bytes that the host tier has if the system refused to give what the plans need, else
            None.

        Raises:
            ConfigError: A tier that the settings name cannot be used.
            OffloadError: the host gives no (pinned) memory.
        """
        # Longer chunks need a larger staging slab. An engine that holds tensors is not replaced.
        largest = max(plans, key=lambda plan: plan.staging_bytes)
        grows = self._engine is not None and self._staging_bytes < largest.staging_bytes
        if grows and not self.engine.stats().live_handles:
            self.close()
        if self._engine is None:
            self._engine = new_offload_engine(self._config, device, largest, copier=self._copier)
            self._staging_bytes = largest.staging_bytes
        return self._engine.reserve(batches * sum(map(offloaded_bytes, plans)), progress)

    @property
    def engine(self) -> OffloadEngine:
        """The offload engine; `prepare` must have been called."""
        assert self._engine is not None, "no batch was planned yet"
        return self._engine

    @property
    def reserved_bytes(self) -> Mapping[Tier, int]:
        """Bytes beyond host memory that the engine has taken, by tier; empty without an engine."""
        return {} if self._engine is None else self._engine.reserved_bytes

    def take_stats(self) -> OffloadStats:
        """Counters of the engine since the last call; zeros without an engine."""
        return OffloadStats() if self._engine is None else self._engine.take_stats()

    def close(self) -> None:
        """Wait for copies under way and give the host memory back."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


class PlanCache:
    """The plans of one model by batch shape."""

    def __init__(
        self,
        parts: ModelParts,
        config: SPPOConfig,
        planned_offload: PlannedOffload,
        group: SequenceGroup | None = None,
    ) -> None:
        """Begin without plans.

        `planned_offload` reserves the memory of each plan. All ranks of `group` run the same plans.
        """
        self._parts = parts
        self._config = config
        self._planned_offload = planned_offload
        self._group = group
        self._plans: dict[BatchShape, Plan] = {}
        """By shape, in which `trainable_mask` says what trains."""
        self._selections: dict[tuple[AttentionSpec, int], Selection] = {}
        self._lengths: set[int] = set()
        """Row lengths seen in training, up to one more than `_MAX_FIXED_LENGTHS`."""
        self.trained = b""
        """`trainable_mask` of the model; empty until the first training batch."""
        self.has_gradients = False
        """Whether the last training batch found gradients of an earlier one."""
        self._last_trained = RecentTrainedSets()
        self._shapes: dict[Hashable, ModelShape] = {}
        """The model's shape by the mask of trained parameters."""
        self._accumulates = False
        self._warned: set[str] = set()
        self._to_learn_from: list[StepTimer] = []
        """Steps whose measured times correct a plan, once the device has finished them."""
        self._by_chunk_reason = ""
        """Why the model cannot run layer by layer; "" unless that was found out."""
        self._untiled_reason = ""
        """Why layers cannot run in tiles; "" unless that was found out."""
        self._runs: dict[int, _PlanRuns] = {}
        """By the plan's id; holds the plan, so that no other one gets the id."""
        self._shrunk: set[Tier] = set()
        """Tiers whose budget was lowered after memory ran out."""
        self._warm_up = WarmUp(budget_seconds=_WARM_UP_SECONDS)
        self.device_only_reason = "no Accelerator has said which optimizer will update them"
        """Why plans may not move weights and optimizer to the host; "" if they may."""
        self.optimizer_bytes: int | None = None
        """Size of the optimizer's states; None if unknown."""
        self.host_resident_bytes = 0
        """Pageable host memory that gradients and optimizer states of host-resident weights take
        already. Plans of training count it."""
        self.pinned_gradient_bytes = 0
        """Page-locked memory of host-resident gradients. Plans of training count it; in evaluation
        it is not available."""

    def _runs_of(self, plan: Plan) -> _PlanRuns:
        return self._runs.setdefault(id(plan), _PlanRuns(plan))

    def has_run(self, plan: Plan) -> bool:
        """Whether a forward under `plan` was completed."""
        return self._runs_of(plan).has_run

    def forward_done(self, plan: Plan) -> None:
        """Note that a forward under `plan` was completed."""
        self._runs_of(plan).has_run = True

    def has_trained(self, plan: Plan) -> bool:
        """Whether a backward under `plan` was completed."""
        return self._runs_of(plan).num_steps > 0

    @property
    def is_by_chunk(self) -> bool:
        """Whether all plans go chunk by chunk, as set or as the model needs it."""
        return self._config.order == "by_chunk"

    def refuse_by_layer(self, reason: str) -> None:
        """Plan chunk by chunk from now on; `reason` says why layer by layer is not possible.

        Raises:
            ConfigError: Weights were to be on the host, for which layer by layer is needed.
        """
        if self._config.weights == "host":
            raise ConfigError(
                f"weights='host' needs chunks that go layer by layer, and {self._parts.name} "
                f"cannot: {reason}. Allowed: weights='auto' or 'device'. Remedy: drop weights; "
                "optimizer='host' still keeps gradients and the optimizer there."
            )
        self._by_chunk_reason = reason
        self._config = self._config.replace(order="by_chunk")
        self._plans = {key: p for key, p in self._plans.items() if p.order == "by_chunk"}

    def refuse_tiles(self, reason: str) -> None:
        """Plan without tiles in layers from now on; `reason` says why they are not possible."""
        self._untiled_reason = reason
        self._config = self._config.replace(layer_tile_tokens=0)
        self._plans = {key: p for key, p in self._plans.items() if not p.layer_tile_tokens}

    def set_placement(self, config: SPPOConfig, plan: Plan | None = None) -> None:
        """Plan with `config.weights` and `config.optimizer` from now on.

        Drops all plans but `plan`, which was made with this placement.
        """
        self._config = self._config.replace(weights=config.weights, optimizer=config.optimizer)
        self._plans = {key: one for key, one in self._plans.items() if one is plan}

    def shrink(self, plan: Plan, tier: Tier) -> int | None:
        """Lower a tier's budget below that of `plan`, which ran out of memory and is dropped.

        Other plans are kept if they have run. Returns the new budget in bytes; None if there is no
        budget, or it was lowered before.
        """
        before = plan.budgets.of(tier)
        if tier in self._shrunk or not before:
            return None
        self._shrunk.add(tier)
        budget = int(_SHRINK_FACTOR * before)
        self._config = TIERS[tier].with_budget(self._config, budget)
        self._plans = {
            key: one for key, one in self._plans.items() if self.has_run(one) and one is not plan
        }
        return budget

    def get(
        self,
        batch_rows: int,
        total_tokens: int,
        device: torch.device,
        observer: StepObserver,
        *,
        return_logits: bool = False,
        router_loss: bool = False,
        encoded_token_bytes: tuple[int, int] = (0, 0),
    ) -> Plan:
        """The plan for batches of this shape; made and shown at the first call, then reused.

        With `return_logits` the plan counts the logits of all tokens, with `router_loss` what that
        keeps, and `encoded_token_bytes` as `ModelShape` does.

        Raises:
            ConfigError: The device's type is not supported, or the settings do not fit the length.
            BudgetError: No plan fits the memory budgets.
        """
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"the model is on a device of type {device.type!r}; chunked training runs on "
                "'cuda' and 'cpu'. Move the model (under a Trainer: use_cpu=True), or revert the "
                "plugin."
            )
        training = torch.is_grad_enabled()
        self._notice_accumulation(training)
        if training and len(self._lengths) <= _MAX_FIXED_LENGTHS:
            self._lengths.add(total_tokens)
        trained = self.trained if training else b""
        shape = BatchShape(
            *(batch_rows, total_tokens, training, device, trained, return_logits, router_loss),
            encoded_token_bytes=encoded_token_bytes,
        )
        if shape not in self._plans:
            plan = self._plan_within(shape, observer)
            for warning in plan.warnings:
                if warning not in self._warned:
                    self._warned.add(warning)
                    warnings.warn(warning, stacklevel=2)
            self._plans[shape] = plan
            observer.on_plan(plan, self._parts.name)
        return self._plans[shape]

    def make_within(
        self,
        device: torch.device,
        make: Callable[[], Sequence[Plan]],
        observer: StepObserver,
        *,
        batches: int = 1,
    ) -> Sequence[Plan]:
        """Make plans and reserve their host memory; make them again if the system grants less.

        `batches` batches are alive at a time. Ranks that share a sequence call this at once; if one
        of them raises, all do.
        """
        before_bytes = math.inf
        while True:
            plans = make()
            if self._config.device_memory is None:
                reserve_driver_memory(device, CONTEXT_BYTES["cuda"])
            prepare = functools.partial(
                self._planned_offload.prepare,
                device,
                *plans,
                batches=batches,
                progress=observer.on_host_memory,
            )
            if self._group is None:
                granted_bytes = prepare()
            else:  # the smallest amount granted to a rank; None if all got what they need
                granted_bytes = self._group.decide(
                    prepare, lambda granted: math.inf if granted is None else granted
                )
            if granted_bytes is None or granted_bytes >= before_bytes:
                return plans
            logger.warning(
                "%s of host memory were planned, and the system gave %s; planning again with that",
                format_bytes(batches * sum(map(offloaded_bytes, plans))),
                format_bytes(granted_bytes),
            )
            self._config = self._config.replace(host_memory=granted_bytes)
            before_bytes = granted_bytes

    def _plan_within(self, shape: BatchShape, observer: StepObserver, **options: Any) -> Plan:
        make = functools.partial(self._make_plan, shape, **options)
        (plan,) = self.make_within(shape.device, lambda: [shared_plan(make, self._group)], observer)
        return plan

    def _notice_accumulation(self, training: bool) -> None:
        """Once a batch finds gradients of an earlier one, count them in all plans of training.

        Plans that they would change are dropped. The first batch of a later step also has them if
        gradients are zeroed in place; otherwise it needs less than planned.
        """
        if not training or self._accumulates:
            return
        if self.has_gradients:
            self._accumulates = True
            for shape, plan in list(self._plans.items()):
                threshold_bytes = _MIN_GRADIENT_SHARE * plan.estimate.device.total
                if plan.training and plan.shape.gradient_bytes > threshold_bytes:
                    del self._plans[shape]

    def _make_plan(
        self, batch: BatchShape, *, tiles: Mapping[str, int] | None = None, **options: Any
    ) -> Plan:
        device, training = batch.device, batch.training
        trained = batch.trained or self.trained
        if trained not in self._shapes:
            # With the device, which host-resident weights do not tell.
            self._shapes[trained] = model_shape(self._parts, device)
        shape = self._shapes[trained]
        if shape.shards == 1:
            # What an optimizer told before FSDP2 sharded and widened its weights no longer holds.
            shape = replace(shape, optimizer_bytes=self.optimizer_bytes)
        config = self._config.replace(return_logits=batch.return_logits, **(tiles or {}))
        request = self.request(
            batch,
            shape,
            accumulates=training and self._accumulates,
            by_layer_refusal=self._by_chunk_reason or None,
            on_host_refusal=self.device_only_reason or None,
            tiles_refusal=self._untiled_reason or None,
            **options,
        )
        request = replace(request, config=config)
        others = other_plan_warnings(
            self._config, request.shape, batch.total_tokens, training=training
        )
        plan = make_plan(request)
        return replace(plan, warnings=(*plan.warnings, *others))

    def request(self, batch: BatchShape, shape: ModelShape, **options: Any) -> PlanRequest:
        """Return the request of a plan for batches of this shape; `options` are fields of it."""
        device = batch.device
        use_expandable_segments(device)
        shape = replace(
            shape,
            router_loss=batch.router_loss,
            encoded_token_bytes=batch.encoded_token_bytes,
        )
        name, reason = self.describe_backends(shape, device)
        if self._group is not None:
            shape = replace(shape, sp=self._group.size)
        counted_bytes = self.host_resident_bytes if batch.training else -self.pinned_gradient_bytes
        return PlanRequest(
            config=self._config,
            shape=shape,
            device=device_facts(
                device,
                self._config,
                counted_bytes=counted_bytes,
                own_bytes=self._planned_offload.reserved_bytes,
            ),
            backend_name=name,
            backend_reason=reason,
            batch_rows=batch.batch_rows,
            total_tokens=batch.total_tokens,
            training=batch.training,
            dtype_name=dtype_name(self._parts, device),
            sharded=self._parts.is_sharded(),
            **options,
        )

    def device_bytes_with_logits(
        self, batch_rows: int, total_tokens: int, device: torch.device
    ) -> tuple[int, int | None]:
        """Peak of an evaluation that keeps the logits of all tokens of a batch, and the budget.

        Both of the device, in bytes; the budget is None if there is none.

        Raises:
            BudgetError: The weights alone are over the budget.
        """
        plan = self._make_plan(
            BatchShape(batch_rows, total_tokens, False, device, b"", return_logits=True)
        )
        return plan.estimate.device.total, plan.budgets.device

    def step_done(self, timer: StepTimer) -> None:
        """Note that a training step has ended on the host; the device may be behind."""
        plan, runs = timer.plan, self._runs_of(timer.plan)
        runs.num_steps += 1
        is_predicted = plan.prediction is not None and plan.cost is not None
        if is_predicted and runs.num_steps == STEP_MEASURED:
            self._to_learn_from.append(timer)

    def _new_corrections(self) -> Iterator[tuple[Plan, MeasuredStep, Correction]]:
        """Yield plans with the measured times of a step, and the correction that follows.

        Never waits for the device; all ranks that share sequences derive the same corrections.
        """
        waiting, self._to_learn_from = self._to_learn_from, []
        for timer in waiting:
            measured = self._measured(timer)
            if measured is None:
                self._to_learn_from.append(timer)
                continue
            plan = timer.plan
            assert plan.prediction is not None, "plans without one are not measured"
            assert plan.cost is not None, "a prediction was made with a cost"
            before = plan.cost.correction
            correction = learn(plan.prediction, measured, before)
            if before == Correction() and worth_correcting(before, correction):
                yield plan, measured, correction

    def _measured(self, timer: StepTimer) -> MeasuredStep | None:
        """Times of a step on the slowest rank; None until the devices of all ranks are done."""
        if self._group is None:
            return timer.measured()
        return self._group.decide(
            timer.measured, lambda step: -math.inf if step is None else -step.step_seconds
        )

    def correct(self, observer: StepObserver) -> None:
        """Make plans again whose first steps ran at other speeds than predicted, once each."""
        if not self._config.correct_plan:
            return
        for before, measured, correction in self._new_corrections():
            shape = next((shape for shape, plan in self._plans.items() if plan is before), None)
            if shape is None:
                continue
            try:
                after = self._plan_within(
                    shape,
                    observer,
                    correction=correction,
                    # Other chunks and tiles would change the order of sums; other modes change no
                    # number.
                    bounds=before.bounds,
                    tiles={
                        "layer_tile_tokens": before.layer_tile_tokens,
                        "loss_tile_tokens": before.tile_tokens,
                    },
                )
            except RankLostError:
                raise
            # If a rank that shares the sequence fails, the others get a PipelineError.
            except SPPOError as error:
                logger.info("no plan at the measured speeds: %s", error)
                continue  # the plan so far still fits
            self._plans[shape] = after
            observer.on_correction(before, after, measured)

    def update_trainable(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Note which of the model's parameters train now, and whether any has a gradient.

        Each set of trained parameters has plans of its own. To be called before each training
        batch. Not in evaluation, where parameters may be frozen for a while (PEFT's
        `disable_adapter`).
        """
        self.trained = trainable_mask(parameters)
        self.has_gradients = any(parameter.grad is not None for parameter in parameters)
        forgotten = self._last_trained.use(self.trained)
        if forgotten is None:
            return
        self._shapes.pop(forgotten, None)
        for shape in [shape for shape in self._plans if shape.trained == forgotten]:
            self._runs.pop(id(self._plans.pop(shape)), None)

    def shape(self) -> ModelShape:
        """The model's shape with the parameters that train now."""
        if self.trained not in self._shapes:
            self._shapes[self.trained] = model_shape(self._parts)
        return self._shapes[self.trained]

    def choose_backend(self, requirement: AttentionSpec, *, varied: bool = False) -> Backend:
        """The attention backend for a layer's requirement.

        If rows have many lengths, or chunks other lengths in each batch (`varied`), "auto" prefers
        a backend that builds nothing for each shape.

        Raises:
            ConfigError: The configured backend is not installed or does not support it.
        """
        return self._select(replace(requirement, varied=requirement.varied or varied)).backend

    def _select(self, requirement: AttentionSpec) -> Selection:
        if len(self._lengths) > _MAX_FIXED_LENGTHS:
            requirement = replace(requirement, varied=True)
        key = requirement, determinism()
        if key not in self._selections:
            selection = select_backend(self._config.attention_backend, requirement)
            logger.info("attention: %s", selection.reason)
            self._selections[key] = selection
        return self._selections[key]

    def describe_backends(self, shape: ModelShape, device: torch.device) -> tuple[str, str]:
        """Names and reasons of the attention backends, in order of their first layers.

        Choosing may time kernels, which should happen before the first layer runs.
        """
        chosen: dict[str, str] = {}
        for layer in self._attentions(shape, device):
            selection = self._select(_requirement(layer, device))
            chosen.setdefault(selection.backend.name, selection.reason)
        if not chosen:
            return "none", "no layer of the model has attention"
        return ", ".join(chosen), "\n".join(chosen.values())

    def _attentions(
        self, shape: ModelShape, device: torch.device, group: SequenceGroup | None = None
    ) -> Iterator[LayerAttention]:
        """Yield the distinct attentions of this rank's layers, in order."""
        weight = next(p for layer in self._parts.layers for p in layer.parameters())
        dtype = weight.dtype if weight.dtype.is_floating_point else torch.bfloat16
        if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device.type)
        # Llama 4 attends within blocks of this many tokens; the profile has it as a window.
        block_tokens = getattr(self._parts.text_config, "attention_chunk_size", None)
        seen: set[LayerAttention] = set()
        for layer in (layer for layer in shape.layers if layer.num_heads):
            heads = layer.num_heads, layer.num_kv_heads
            if group is not None:
                part = (group.rank, group.size, group.head_blocks)
                heads = len(local_heads(heads[0], *part)), len(held_kv_heads(*heads, *part))
            in_blocks = layer.window is not None and layer.window == block_tokens
            attention = LayerAttention(
                num_heads=heads[0],
                num_kv_heads=heads[1],
                qk_head_size=layer.qk_head_size,
                v_head_size=layer.v_head_size,
                window=None if in_blocks else layer.window,
                local=layer.window if in_blocks else None,
                chosen=layer.chosen,
                softcap=getattr(self._parts.text_config, "attn_logit_softcapping", None),
                dtype=dtype,
            )
            if attention not in seen:
                seen.add(attention)
                yield attention

    def warm_up_attention(
        self, step: Iterable[StepRows], device: torch.device, observer: StepObserver
    ) -> None:
        """Let kernels that build a plan for each shape build the plans of a step.

        To be called before activations fill the device; see `attention/warm_up.py`. Does nothing
        for other kernels and for known shapes.
        """
        if not any(one.backend.plans_each_shape for one in self._selections.values()):
            return
        start_seconds, num_shapes = time.monotonic(), 0
        names: set[str] = set()
        for part in step:
            plan = part.plan
            rows = ChunkedRows(
                batch_rows=part.batch_rows,
                bounds=plan.bounds,
                chunks=part.chunks,
                spans=part.spans,
                bidirectional=part.bidirectional,
                block_tokens=None if plan.kv_tier == "device" else plan.kv_block_tokens,
                backward=torch.is_grad_enabled(),
                reruns_attention=any(
                    mode.saved == "hidden" for row in plan.layer_modes for mode in row
                ),
            )
            for layer in self._attentions(plan.shape, device, part.group):
                varied = part.spans is not None or bool(part.bidirectional)
                backend = self.choose_backend(_requirement(layer, device), varied=varied)
                new = self._warm_up.run(layer, rows, backend, device)
                num_shapes += new
                names |= {backend.name} if new else set()
        if num_shapes:
            seconds = time.monotonic() - start_seconds
            observer.on_attention_ready(", ".join(sorted(names)), num_shapes, seconds)


def _requirement(layer: LayerAttention, device: torch.device) -> AttentionSpec:
    spec = AttentionSpec.of_layer(
        layer, device_type=device.type, dtype=layer.dtype, softcap=layer.softcap is not None
    )
    return spec if layer.local is None else replace(spec, varied=True)


def trainable_mask(parameters: Iterable[torch.nn.Parameter]) -> bytes:
    """One byte for each parameter: whether it requires a gradient."""
    return bytes(parameter.requires_grad for parameter in parameters)


def shared_plan(make: Callable[[], Plan], group: SequenceGroup | None) -> Plan:
    """The plan of the rank with the smallest device budget, on all ranks that share a sequence.

    With different modes, ranks would exchange tokens at different moments.
    """
    if group is None:
        return make()
    return group.decide(make, lambda plan: plan.budgets.device or math.inf)
