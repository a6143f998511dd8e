"""The plans of one model: made when a batch shape first comes, remembered, corrected once.

Gathers what the torch-free planner needs (the model's shape, the device's facts, the attention
backend) and keeps the offload engine as large as the plans want it. When the device has come to the
end of a plan's first steps, their measured times become a correction of the speeds that the plan
was made with. Runs nothing.
"""

from __future__ import annotations

import functools
import logging
import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from sppo_hf.attention.backends.base import AttentionSpec, Backend, determinism
from sppo_hf.attention.backends.select import Selection, select_backend
from sppo_hf.attention.segments import RowSpans
from sppo_hf.attention.warm_up import ChunkedRows, LayerAttention, WarmUp
from sppo_hf.config import SPPOConfig
from sppo_hf.engine.device_facts import (
    device_facts,
    dtype_name,
    model_shape,
    reserve_driver_memory,
    use_expandable_segments,
)
from sppo_hf.engine.offload_holder import OffloadHolder, offloaded_bytes
from sppo_hf.engine.sequence_group import SequenceGroup, held_kv_heads, local_heads
from sppo_hf.engine.step_observer import StepObserver, StepTimer
from sppo_hf.engine.structure import ModelParts
from sppo_hf.errors import ConfigError, RankLostError, SPPOError
from sppo_hf.planning.cost import Correction
from sppo_hf.planning.memory import CONTEXT_BYTES
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.plan import Plan, PlanRequest, make_plan, other_plan_warnings
from sppo_hf.planning.prediction import MeasuredStep, learn, worth_correcting
from sppo_hf.rules import format_bytes

logger = logging.getLogger(__name__)

# The first step allocates, pins and compiles; the second is like all that follow.
STEP_MEASURED = 2


@dataclass(frozen=True, slots=True)
class ProfileCorrection:
    """A plan, what a step of it took, and the correction that follows."""

    plan: Plan
    measured: MeasuredStep
    correction: Correction


class ProfileCorrector:
    """Watches steps until each plan has been measured once."""

    def __init__(self, group: SequenceGroup | None = None) -> None:
        """Watch none yet; the ranks of `group`, which share every sequence, must learn the same."""
        self._group = group
        self._steps: dict[int, int] = {}
        self._plans: list[Plan] = []
        self._waiting: list[StepTimer] = []

    def step_done(self, watch: StepTimer) -> None:
        """A training step has ended on the host; the device may be behind."""
        plan = watch.plan
        if plan.prediction is None or plan.cost is None:
            return
        if id(plan) not in self._steps:
            self._plans.append(plan)  # keeps its id from being given away
        steps = self._steps[id(plan)] = self._steps.get(id(plan), 0) + 1
        if steps == STEP_MEASURED:
            self._waiting.append(watch)

    def new_corrections(self) -> Iterator[ProfileCorrection]:
        """Yields what has been learned since the last time; asks the device, never waits for it."""
        waiting, self._waiting = self._waiting, []
        for watch in waiting:
            measured = self._measured(watch)
            if measured is None:
                self._waiting.append(watch)
                continue
            plan = watch.plan
            assert plan.prediction is not None, "plans without one are not watched"
            assert plan.cost is not None, "a prediction was made with a cost"
            before = plan.cost.correction
            correction = learn(plan.prediction, measured, before)
            if before == Correction() and worth_correcting(before, correction):
                yield ProfileCorrection(plan, measured, correction)

    def _measured(self, watch: StepTimer) -> MeasuredStep | None:
        """What a step took: on the slowest of the ranks, once the devices of all are done with it.

        Ranks wait for each other in every layer, and all of them ask at the same moments.
        """
        if self._group is None:
            return watch.measured()
        return self._group.decide(
            watch.measured, lambda took: -math.inf if took is None else -took.step_seconds
        )


# Rows of more lengths than this are taken to have a new length with every batch.
_FEW_LENGTHS = 3

# What is planned with of a budget under which memory ran out.
_LESS = 0.95

# A step of ours may wait for kernels' plans, and ranks for a rank that makes some.
_WARM_UP_SECONDS = 120.0

# Gradients below this share of the device's peak change no plan.
_FEW_GRADIENTS = 0.01

# Sets of parameters that train of which plans are kept: adapters that take turns, not layers that
# are drawn anew again and again.
_MOST_TRAINED = 8


class RecentTrainedSets:
    """The sets of parameters that trained last, of which plans are kept."""

    def __init__(self) -> None:
        """None yet."""
        self._sets: dict[Hashable, None] = {}

    def use(self, trained: Hashable) -> Hashable | None:
        """Note that a set trains now.

        Returns:
            The set that has not trained for the longest time, where that is one too many; else
            None.
        """
        self._sets.pop(trained, None)
        self._sets[trained] = None
        if len(self._sets) <= _MOST_TRAINED:
            return None
        forgotten = next(iter(self._sets))
        del self._sets[forgotten]
        return forgotten


class StepRows(NamedTuple):
    """Rows that run together in a step, and what of them runs here."""

    plan: Plan
    batch_rows: int
    spans: tuple[RowSpans, ...] | None
    """Documents and padding of each; None where every row is one document."""
    chunks: range
    group: SequenceGroup | None
    """The ranks that share the chunks; None where this one runs them alone."""


class PlanCache:
    """Plans by batch shape."""

    def __init__(
        self,
        parts: ModelParts,
        config: SPPOConfig,
        room: OffloadHolder,
        group: SequenceGroup | None = None,
    ) -> None:
        """Hold none yet; `room` is prepared for every plan, which all ranks of `group` run."""
        self._parts = parts
        # Ranks that share a sequence exchange the tokens of one chunk after the other.
        self._config = config if group is None else config.replace(order="by_chunk")
        self._offload = room
        self._group = group
        self._plans: dict[tuple[int, int, bool, torch.device, bool, bytes], Plan] = {}
        """Those of training also by which parameters train."""
        self._selections: dict[tuple[AttentionSpec, int], Selection] = {}
        self._lengths: set[int] = set()
        """Tokens of the rows that training has seen, until they are taken to vary."""
        self._trained = b""
        """Which parameters train, one byte each; empty until a batch trains any."""
        self._last_trained = RecentTrainedSets()
        self._shapes: dict[bytes, ModelShape] = {}
        """By the same."""
        self._accumulates = False
        self._warned: set[str] = set()
        self._teacher = ProfileCorrector(group)
        self._by_chunk_reason = ""
        """Why the model cannot go layer by layer, once that is known."""
        self._untiled_reason = ""
        """Why layers cannot run in tiles, once that is known."""
        self._have_run: dict[int, Plan] = {}
        """By identity; the plan is held, so that no other gets it."""
        self._have_trained: dict[int, Plan] = {}
        """Likewise."""
        self._shrunk = False
        self._warm_up = WarmUp(budget_seconds=_WARM_UP_SECONDS)
        self.device_only_reason = "no Accelerator has said which optimizer will update them"
        """Why weights and optimizer stay on the device where the settings leave that open."""
        self.optimizer_bytes: int | None = None
        """What the optimizer keeps, once that is known."""
        self.host_resident_bytes = 0
        """Host memory, not pinned, that gradients and optimizer states at rest take already."""
        self.pinned_gradient_bytes = 0
        """Page-locked memory that gradients at rest have; like the above it is in plans of training
        alone, and in an evaluation nobody's to use."""

    def has_run(self, plan: Plan) -> bool:
        """Whether a forward under `plan` has come to its end."""
        return id(plan) in self._have_run

    def ran(self, plan: Plan) -> None:
        """A forward under `plan` has come to its end."""
        self._have_run[id(plan)] = plan

    def has_trained(self, plan: Plan) -> bool:
        """Whether a backward under `plan` has come to its end."""
        return id(plan) in self._have_trained

    def refuse_by_layer(self, reason: str) -> None:
        """Plan chunk by chunk from now on; `reason` says why the model cannot go by layer."""
        self._by_chunk_reason = reason
        self._config = self._config.replace(order="by_chunk")
        self._plans = {key: p for key, p in self._plans.items() if p.order == "by_chunk"}

    def refuse_tiles(self, reason: str) -> None:
        """Plan without tiles in layers from now on; `reason` says what cannot run in them."""
        self._untiled_reason = reason
        self._config = self._config.replace(layer_tile_tokens=0)
        self._plans = {key: p for key, p in self._plans.items() if not p.layer_tile_tokens}

    def rest(self, config: SPPOConfig, plan: Plan | None = None) -> None:
        """Plan with weights and optimizer where `config` has them from now on.

        `plan` was made so, and is kept.
        """
        self._config = self._config.replace(weights=config.weights, optimizer=config.optimizer)
        self._plans = {key: one for key, one in self._plans.items() if one is plan}

    def shrink(self, plan: Plan) -> int | None:
        """Plan with less than the device budget of `plan` from now on, where nothing has run yet.

        `plan` itself is dropped, for that is the one that failed.

        Returns:
            The new budget in bytes; None where there is none, or it was made smaller before.
        """
        if self._shrunk or plan.budgets.device is None:
            return None
        self._shrunk = True
        budget = int(_LESS * plan.budgets.device)
        self._config = self._config.replace(device_memory=budget)
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
    ) -> Plan:
        """The plan for batches of this shape; made, shown and remembered the first time.

        With `return_logits` the logits of all tokens are kept.

        Raises:
            ConfigError: The device is of another type, or the settings do not fit the length.
            BudgetError: A budget cannot hold what it must.
        """
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"the model is on a device of type {device.type!r}; chunked training runs on "
                "'cuda' and 'cpu'. Move the model (under a Trainer: use_cpu=True), or revert the "
                "plugin."
            )
        training = torch.is_grad_enabled()
        self._notice_accumulation(training)
        if training and len(self._lengths) <= _FEW_LENGTHS:
            self._lengths.add(total_tokens)
        trained = self._trained if training else b""
        key = (batch_rows, total_tokens, training, device, return_logits, trained)
        if key not in self._plans:
            plan = self._plan_within(
                *(device, batch_rows, total_tokens, observer),
                training=training,
                return_logits=return_logits,
            )
            for warning in plan.warnings:
                if warning not in self._warned:
                    self._warned.add(warning)
                    warnings.warn(warning, stacklevel=2)
            self._plans[key] = plan
            observer.on_plan(plan, self._parts.name)
        return self._plans[key]

    def _plan_within(
        self,
        device: torch.device,
        batch_rows: int,
        total_tokens: int,
        observer: StepObserver,
        **wanted: Any,
    ) -> Plan:
        """A batch planned with the host memory that the system really gives, which it then has."""
        least_bytes = math.inf
        while True:
            make = functools.partial(self._make_plan, device, batch_rows, total_tokens, **wanted)
            plan = shared_plan(make, self._group)
            if self._config.device_memory is None:
                reserve_driver_memory(device, CONTEXT_BYTES["cuda"])
            given_bytes = self.min_granted_bytes(
                functools.partial(
                    self._offload.prepare, device, plan, progress=observer.on_host_memory
                )
            )
            if given_bytes is None or given_bytes >= least_bytes:
                return plan
            warn_reduced_host_memory(offloaded_bytes(plan), given_bytes)
            self._config = self._config.replace(host_memory=given_bytes)
            least_bytes = given_bytes

    def min_granted_bytes(self, prepare: Callable[[], int | None]) -> int | None:
        """The least that any rank was given of host memory; None where all got what they need.

        `prepare` asks for it on this rank. Where it raises, no rank waits for the others.
        """
        if self._group is None:
            return prepare()
        return self._group.decide(prepare, lambda given: math.inf if given is None else given)

    def _notice_accumulation(self, training: bool) -> None:
        """Plan anew when gradients of earlier batches turn out to be there, if they weigh enough.

        From then on every training plan counts them: also the first batch of a later step has them
        where gradients are zeroed in place, and else needs less than planned.
        """
        if not training or self._accumulates:
            return
        if any(p.grad is not None for p in self._parts.causal_lm.parameters()):
            self._accumulates = True
            for key, plan in list(self._plans.items()):
                more_bytes = plan.shape.gradient_bytes
                if plan.training and more_bytes > _FEW_GRADIENTS * plan.estimate.device.total:
                    del self._plans[key]

    def _make_plan(
        self,
        device: torch.device,
        batch_rows: int,
        total_tokens: int,
        *,
        training: bool,
        return_logits: bool,
        layer_tile_tokens: int | None = None,
        trained: bytes | None = None,
        **learned: Any,
    ) -> Plan:
        if trained is None:
            trained = self._trained
        if trained not in self._shapes:
            # Weights that rest on the host say nothing of the device.
            self._shapes[trained] = model_shape(self._parts, device)
        shape = replace(self._shapes[trained], optimizer_bytes=self.optimizer_bytes)
        if self._group is not None:
            shape = replace(shape, sp=self._group.size)
        others = other_plan_warnings(self._config, shape, total_tokens, training=training)
        use_expandable_segments(device)
        name, reason = self.describe_backends(shape, device)
        config = self._config.replace(return_logits=return_logits)
        if layer_tile_tokens is not None:
            config = config.replace(layer_tile_tokens=layer_tile_tokens)
        request = PlanRequest(
            config=config,
            shape=shape,
            device=device_facts(
                device,
                self._config,
                counted_bytes=self.host_resident_bytes if training else -self.pinned_gradient_bytes,
            ),
            backend_name=name,
            backend_reason=reason,
            batch_rows=batch_rows,
            total_tokens=total_tokens,
            training=training,
            accumulates=training and self._accumulates,
            dtype_name=dtype_name(self._parts, device),
            by_layer=self._by_chunk_reason or True,
            on_host=self.device_only_reason or True,
            in_tiles=self._untiled_reason or True,
            **learned,
        )
        plan = make_plan(request)
        return replace(plan, warnings=(*plan.warnings, *others))

    def device_bytes_with_logits(
        self, batch_rows: int, total_tokens: int, device: torch.device
    ) -> tuple[int, int | None]:
        """What an evaluation takes that keeps the logits of all tokens of a batch.

        Returns:
            The predicted peak on the device in bytes, logits among them, and the device's budget;
            None where none is known.

        Raises:
            BudgetError: The weights alone are over the budget.
        """
        plan = self._make_plan(device, batch_rows, total_tokens, training=False, return_logits=True)
        # Of sharded weights, most are on other ranks, which the plan does not see.
        elsewhere_bytes = self.shape().weight_bytes if self._parts.is_sharded() else 0
        return plan.estimate.device.total - elsewhere_bytes, plan.budgets.device

    def step_done(self, watch: StepTimer) -> None:
        """A training step has ended on the host; the device may be behind."""
        self._have_trained[id(watch.plan)] = watch.plan
        self._teacher.step_done(watch)

    def correct(self, observer: StepObserver) -> None:
        """Plan anew, once, what the first steps have shown to run at other speeds."""
        if not self._config.correct_plan:
            return
        for correction_found in self._teacher.new_corrections():
            before = correction_found.plan
            key = next((key for key, plan in self._plans.items() if plan is before), None)
            if key is None:
                continue
            rows, tokens, training, device, return_logits, trained = key
            try:
                after = self._plan_within(
                    *(device, rows, tokens, observer),
                    training=training,
                    return_logits=return_logits,
                    trained=trained,
                    correction=correction_found.correction,
                    # Other chunks would round sums in another order; other modes change no number.
                    bounds=before.bounds,
                    layer_tile_tokens=before.layer_tile_tokens,
                )
            except RankLostError:
                raise
            # Ranks that share a sequence hear of each other's as a PipelineError: whatever it is
            # that one of them refuses, all go on.
            except SPPOError as error:
                logger.info("no plan at the measured speeds: %s", error)
                continue  # what ran so far still fits
            self._plans[key] = after
            observer.on_correction(before, after, correction_found.measured)

    def notice_trained(self) -> None:
        """Plan for the parameters that train now, anew if these have not trained together before.

        To be called before each batch that trains any. An evaluation may freeze some for a while,
        as PEFT's `disable_adapter` does; that plans nothing anew.
        """
        self._trained = trainable_mask(self._parts.causal_lm.parameters())
        forgotten = self._last_trained.use(self._trained)
        if not isinstance(forgotten, bytes):
            return
        self._shapes.pop(forgotten, None)
        for key in [key for key in self._plans if key[-1] == forgotten]:
            plan = self._plans.pop(key)
            self._have_run.pop(id(plan), None)
            self._have_trained.pop(id(plan), None)

    def shape(self) -> ModelShape:
        """The model's shape, read once for the parameters that are trained."""
        if self._trained not in self._shapes:
            self._shapes[self._trained] = model_shape(self._parts)
        return self._shapes[self._trained]

    def choose_backend(self, requirement: AttentionSpec) -> Backend:
        """The backend for a layer's requirement.

        Once rows turn out to have many lengths, "auto" prefers one that builds nothing per shape.

        Raises:
            ConfigError: If the configured one is not installed or cannot do it.
        """
        return self._select(requirement).backend

    def _select(self, requirement: AttentionSpec) -> Selection:
        if len(self._lengths) > _FEW_LENGTHS:
            requirement = replace(requirement, varied=True)
        key = requirement, determinism()
        if key not in self._selections:
            selection = select_backend(self._config.attention_backend, requirement)
            logger.info("attention: %s", selection.reason)
            self._selections[key] = selection
        return self._selections[key]

    def describe_backends(self, shape: ModelShape, device: torch.device) -> tuple[str, str]:
        """Names and reasons of attention backends, in the order of the first layer of each kind.

        Choosing may time kernels, which had better happen now than inside the first layer.
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
        """What this rank's part of each layer attends with, in order; each kind once."""
        weight = next(p for layer in self._parts.layers for p in layer.parameters())
        dtype = weight.dtype if weight.dtype.is_floating_point else torch.bfloat16
        if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device.type)
        # Of Llama 4, whose layers see blocks of so many tokens: their shapes call it a window.
        block_tokens = getattr(self._parts.text_config, "attention_chunk_size", None)
        met: set[LayerAttention] = set()
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
                softcap=getattr(self._parts.text_config, "attn_logit_softcapping", None),
                dtype=dtype,
            )
            if attention not in met:
                met.add(attention)
                yield attention

    def warm_up_attention(
        self, step: Iterable[StepRows], device: torch.device, observer: StepObserver
    ) -> None:
        """Let kernels that build a plan for each shape build those of a step now.

        To be called before activations fill the device; see `attention/warm_up.py`. Does nothing
        for other kernels, and for shapes that were there before.
        """
        if not any(one.backend.plans_each_shape for one in self._selections.values()):
            return
        began, num_shapes = time.monotonic(), 0
        names: set[str] = set()
        for part in step:
            plan = part.plan
            rows = ChunkedRows(
                batch_rows=part.batch_rows,
                bounds=plan.bounds,
                chunks=part.chunks,
                spans=part.spans,
                block_tokens=None if plan.kv_tier == "device" else plan.kv_block_tokens,
                backward=torch.is_grad_enabled(),
                again=any(mode.saved == "hidden" for row in plan.layer_modes for mode in row),
            )
            for layer in self._attentions(plan.shape, device, part.group):
                requirement = _requirement(layer, device)
                if part.spans is not None:
                    requirement = replace(requirement, varied=True)
                backend = self.choose_backend(requirement)
                new = self._warm_up.run(layer, rows, backend, device)
                num_shapes += new
                names |= {backend.name} if new else set()
        if num_shapes:
            seconds = time.monotonic() - began
            observer.on_attention_ready(", ".join(sorted(names)), num_shapes, seconds)


def _requirement(layer: LayerAttention, device: torch.device) -> AttentionSpec:
    spec = AttentionSpec.of_layer(
        layer, device_type=device.type, dtype=layer.dtype, softcap=layer.softcap is not None
    )
    return spec if layer.local is None else replace(spec, varied=True)


def trainable_mask(parameters: Iterable[torch.nn.Parameter]) -> bytes:
    """Which of some parameters train, one byte each."""
    return bytes(parameter.requires_grad for parameter in parameters)


def warn_reduced_host_memory(planned_bytes: int, given_bytes: int) -> None:
    """Say that the system gives less host memory than was planned with."""
    logger.warning(
        "%s of host memory were planned with, and the system gave %s; planning with those",
        format_bytes(planned_bytes),
        format_bytes(given_bytes),
    )


def shared_plan(make: Callable[[], Plan], group: SequenceGroup | None) -> Plan:
    """The plan that all ranks run that share a sequence: of the one with the least memory.

    In another mode a rank would exchange tokens at other moments.
    """
    if group is None:
        return make()
    return group.decide(make, lambda plan: plan.budgets.device or math.inf)
