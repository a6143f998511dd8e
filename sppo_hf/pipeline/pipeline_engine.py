"""The engine of a model that is cut into stages: `forward` runs a whole schedule.

It stands where `Engine` stands for one device. A call with labels runs forwards and backwards of
all units of the batch over the ranks of the pipeline, and returns the loss on every rank;
`loss.backward()` then hands out the gradients (see `gradients`). Rows of the batch are the
micro-batches. A call that asks for numbers per token instead, for a loss of the caller's, is the
business of `token_outputs`. What a cut model cannot be called for is refused alike on every rank.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.batch_layout import BatchLayout
from sppo_hf.engine.chunk_runner import ChunkRunner
from sppo_hf.engine.engine import Engine, chunk_labels, labelled_chunks
from sppo_hf.engine.family_guard import check_router_loss
from sppo_hf.engine.forward_calls import ForwardCall, read_call
from sppo_hf.engine.loss import ChunkedLoss, RouterLoss, divide_loss, liger_tile
from sppo_hf.engine.plan_cache import StepRows, trainable_mask
from sppo_hf.engine.sequence_group import SequenceGroup, rank_random_state, rank_tokens
from sppo_hf.engine.stages import MessageLayout, StagedModel
from sppo_hf.engine.step_observer import StepObserver, StepRecord
from sppo_hf.engine.structure import (
    ModelParts,
    check_adapters,
    check_trainable,
    without_parameter_hooks,
)
from sppo_hf.engine.versions import ReadTensors
from sppo_hf.errors import ConfigError, PipelineError, SPPOError, UnsupportedModelError
from sppo_hf.offload.engine import OffloadStats
from sppo_hf.pipeline.agreement import agree, all_true, call_facts, refusal_message, refused
from sppo_hf.pipeline.executor import ActionRecord, Executor, Transport, UnitMarks
from sppo_hf.pipeline.gradients import (
    PipelineLoss,
    Replicas,
    StepGradients,
    refuse_post_accumulate_hooks,
)
from sppo_hf.pipeline.mesh import PipelineMesh
from sppo_hf.pipeline.multiplex import (
    RemoteWeights,
    Run,
    SharedUnits,
    chunk_runs,
    count_head_blocks,
)
from sppo_hf.pipeline.sequence_parallel import SequenceRanks
from sppo_hf.pipeline.stage_plans import (
    BatchPlans,
    StagePlanCache,
    StepSchedule,
    check_size,
    step_schedule,
)
from sppo_hf.pipeline.stage_runner import AddLoss, StageRunner, first_layer_hook, last_layer_hook
from sppo_hf.pipeline.token_outputs import TokenCall
from sppo_hf.pipeline.watchdog import GROUP_MARGIN_SECONDS, Watchdog, is_broken_connection
from sppo_hf.planning.activation_modes import mode_of
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.model_shape import forward_flops, step_flops
from sppo_hf.planning.pipeline_choice import RULE
from sppo_hf.planning.plan import Plan
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.generate import MSP, Size


def refuse_call(parts: ModelParts, config: SPPOConfig, call: ForwardCall) -> None:
    """Refuse calls of a cut model that ask for more than the standard loss.

    Raises:
        ConfigError: No labels, logits of whole sequences, or inputs that need a gradient.
        UnsupportedModelError: A loss that is not the standard one.
    """
    name = parts.name
    if not call.has_labels:
        raise ConfigError(
            f"{name} is cut into {config.pp_size} stages (pp_size) and was called without "
            "labels, as generate() and predictions of logits do. Allowed: calls with labels, "
            "which return the loss. Remedy: pass labels; to generate, load the saved "
            "checkpoint without SPPO; in the Trainer set prediction_loss_only=True, and leave "
            "label_smoothing_factor and compute_loss_func out."
        )
    standard = parts.causal_lm.loss_function is ForCausalLMLoss
    if not call.head_arguments and not standard:
        raise UnsupportedModelError(
            f"{name} computes its loss outside the standard one for causal language models, "
            "which a pipeline cannot take apart. Train it with pp_size=1."
        )
    if call.head_arguments and getattr(parts.text_config, "output_router_logits", False):
        raise UnsupportedModelError(
            f"{name}: config.output_router_logits=True adds a loss to that of the labels, and "
            "whoever called the model computes another one from log-probabilities. Set "
            "model.config.output_router_logits = False."
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in call.tokens.values()):
        raise ConfigError(
            "inputs_embeds that need a gradient would get it before the loss's backward, from "
            "the first rank alone. Allowed with pp_size > 1: input_ids, or inputs_embeds that "
            "need none. Remedy: inputs_embeds.detach(), or pp_size=1."
        )
    if config.return_logits:
        raise ConfigError(
            "return_logits=True collects the logits of whole sequences, which in a pipeline "
            "are on its last rank alone. Allowed: return_logits=False with pp_size > 1. "
            "Remedy: drop return_logits."
        )
    call.refuse_unsupported(name)


_BACKWARDS = ("B", "I")


@dataclass(eq=False)
class PipelineStepTimer:
    """Watches one step of one rank."""

    engine: PipelineEngine
    call: ForwardCall
    step: StepSchedule
    _: KW_ONLY
    began: float
    """By `time.perf_counter()`, when the call came in."""
    name: str
    """For the words of others when this rank is lost."""

    def action(self, action: Action, words: str) -> None:
        """The rank is about to carry out `action`."""
        self.engine.watchdog.set_activity(f"{self.name}, {words}")
        if action.kind == "F" or action.kind in _BACKWARDS:
            direction = "forward" if action.kind == "F" else "backward"
            units = self.step.schedule.num_units
            self.engine.observer.on_unit(direction, action.unit, units)

    def done(
        self, executed: Sequence[ActionRecord], *, training: bool, planned_seconds: float | None
    ) -> OffloadStats:
        """The schedule has run; report what it cost, beside the seconds that were predicted.

        Tokens and FLOPs of the batch are split among the ranks of the pipeline, so that sums over
        all ranks count each once. Waiting for another rank is no stall here: the schedule's idle
        time is in the difference of seconds and compute.

        Returns:
            What was copied and waited for.
        """
        engine, call = self.engine, self.call
        mesh = engine.mesh
        sharing = len(mesh.sharing_ranks)
        start, end = rank_tokens(
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
                backward_seconds=time.perf_counter() - self.began - forward,
                offload=stats,
                planned_seconds=planned_seconds,
                num_chunks=self.step.schedule.num_chunks,
                training=training,
            )
        )
        return stats


ValueT = TypeVar("ValueT")


@dataclass(slots=True)
class Prepared:
    """What one call will run."""

    rows: list[tuple[int, int]]
    """Half-open rows of each micro-batch."""
    plans: BatchPlans
    bounds: Bounds
    """Of the chunks that hold any token that counts."""
    step: StepSchedule
    reduces: bool
    """Whether gradients are reduced over replicas."""
    runs: dict[tuple[int, int], Run] | None = None
    """Where ranks share units: by (stage, chunk) the run that it belongs to."""
    watch: PipelineStepTimer = field(init=False)
    units: list[UnitMarks] = field(init=False)
    """When they ran."""

    def plan(self, stage: int, micro_batch: int) -> Plan:
        """The plan of a micro-batch on a stage: what no action sends away stays.

        Those are the units whose backward follows their forward at once.
        """
        plan = self.plans.by_stage[stage]
        if not plan.training or not any(m.offload for row in plan.layer_modes for m in row):
            return plan
        first = micro_batch * len(self.bounds)
        modes = tuple(
            row
            if (stage, first + chunk) in self.step.sent
            else tuple(mode_of(mode.saved, "device") for mode in row)
            for chunk, row in enumerate(plan.layer_modes)
        )
        return replace(plan, layer_modes=modes)


class _RefusedByAll(Exception):
    """Every rank refuses a step, of which nothing has been sent."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        """What to tell the caller."""


class PipelineEngine(Engine):
    """Runs the stages of one rank."""

    def __init__(
        self,
        parts: ModelParts,
        config: SPPOConfig,
        observer: StepObserver,
        original_forward: Callable[..., Any],
        *,
        staged: StagedModel,
        mesh: PipelineMesh,
        watchdog: Watchdog,
    ) -> None:
        """Prepare to run; see `Engine` for the first arguments.

        `watchdog` is told what this rank does.
        """
        group = SequenceRanks.of_mesh(mesh) if mesh.sp_size > 1 else None
        super().__init__(parts, config, observer, original_forward, group=group)
        self.staged = staged
        self.mesh = mesh
        self.watchdog = watchdog
        self.reduces: Callable[[], bool] = lambda: True
        """Whether gradients are reduced over replicas in this step: not while they accumulate."""
        self.executed: list[ActionRecord] = []
        """What this rank did in the last step, and when."""
        self.loss_scaler: Any = None
        """The gradient scaler of float16 training, whose scale the loss will be multiplied by."""
        self.replicas = Replicas(mesh.replica_group, mesh.replica_control_group)
        self._stage_plans = StagePlanCache(self)
        if self.traces is not None:
            self.traces.rank = mesh.world_rank(mesh.pp_rank)
        self.uniform = True
        """Whether the last loss of a caller's own weighed all tokens alike; see `token_outputs`."""
        self._scale = 1.0
        self._calls = 0
        self._activity = ""
        """The part of a step that runs, numbered: "in forward pass 3"."""
        self._size_checked = False
        self._allowed_seconds = float(config.pp_timeout_seconds + GROUP_MARGIN_SECONDS)
        self._units: StageRunner | None = None
        self._unfit: SPPOError | None = None
        """Why this rank cannot run the batch that it was called with; `_prepare` tells all."""
        self._helped: RemoteWeights | None = None
        """Weights of other ranks' stages, once units of these run here."""
        self.trained: tuple[int, ...] = ()
        """By the ranks that share a batch, a number for which parameters train in this step: of its
        stages, or of all where it helps others'."""
        self._hook_ends()

    def _hook_ends(self) -> None:
        cut = self.staged.cut
        for stage in range(cut.num_stages) if self.staged.helps else cut.own:
            layers = cut.layers[stage]
            first, last = self.parts.layers[layers[0]], self.parts.layers[layers[-1]]
            if stage > 0:
                first.register_forward_pre_hook(
                    first_layer_hook(lambda: self._units), with_kwargs=True, prepend=True
                )
            last.register_forward_hook(last_layer_hook(lambda: self._units), with_kwargs=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stand-in for the model's forward.

        Raises:
            ConfigError: The batch or the settings cannot be run in a pipeline (see the message).
            UnsupportedModelError: The model cannot be trained exactly.
            PipelineError: A rank failed, or ranks do not agree.
            RankLostError: Another rank failed, ended or was lost.
        """
        self._refuse_other_threads()
        if self.running is not None:
            return self.original_forward(*args, **kwargs)
        if not self.enabled:
            raise UnsupportedModelError(
                f"{self.parts.name} was cut into stages and then reverted, so only a part of it is "
                "here, which cannot run by itself. Remedy: plugin.convert(model) again, or save it "
                "and load the checkpoint without SPPO."
            )
        call = read_call(self.parts, self.original_forward, args, kwargs)
        refuse_call(self.parts, self.config, call)
        self._unfit = self._unfit_model()
        # A batch that cannot be read is refused on all ranks alike, and the next one may be tried.
        layout = call.layout()
        kind = "forward" if torch.is_grad_enabled() else "evaluation"
        with self._alone():
            output = self.guarded(kind, lambda: self._run(call, layout))
        return output if call.return_dict else output.to_tuple()

    def _unfit_model(self) -> SPPOError | None:
        """Why this rank's part of the model cannot run; other ranks may have no such module."""
        try:
            if torch.is_grad_enabled():
                check_trainable(self.parts)
            check_router_loss(self.parts)
            check_adapters(self.parts)
        except SPPOError as error:
            return error
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineEngine:
        """Refuse copies: only a part of the model is here.

        Raises:
            UnsupportedModelError: Always.
        """
        raise UnsupportedModelError(
            f"{self.parts.name} is cut into stages, so a copy of it (as a reference model, or for "
            "averaged weights) would be a copy of one part that nothing runs. Remedy: load a "
            "reference model a second time; for averaged weights, train with pp_size=1."
        )

    def guarded(self, kind: str, run: Callable[[], ValueT]) -> ValueT:
        """Run a part of a step; other ranks hear where this one is, and errors name what failed.

        What it refuses on all ranks alike (see `_prepare`) is nobody's failure.

        Raises:
            PipelineError: This rank failed.
            RankLostError: Another one did.
        """
        self._calls += 1
        self._activity = f"in {kind} pass {self._calls}"
        with self.watchdog.collective_section(self._activity):
            try:
                with self.watchdog.reporting_failures(but=(_RefusedByAll,)):
                    output = run()
            except _RefusedByAll as refusal:
                raise refusal.error from refusal.error.__cause__
        self.watchdog.set_activity(f"after {kind} pass {self._calls}")
        return output

    def _run(self, call: ForwardCall, layout: BatchLayout) -> ModelOutput:  # type: ignore[override]
        self._try_kernels(call.device)
        if call.head_arguments:
            return TokenCall(self, call, layout).forward()
        gradients, units = self.run_schedule(
            call,
            layout,
            lambda prepared: self._label_loss(call, layout, prepared),
            scale=self._gradient_of_sum(call),
            reduces=torch.is_grad_enabled() and self.reduces_replicas(),
        )
        return self._output(call, units, gradients)

    def run_schedule(
        self,
        call: ForwardCall,
        layout: BatchLayout,
        make_loss: Callable[[Prepared], AddLoss],
        *,
        scale: Tensor,
        reduces: bool = False,
        records: bool = True,
    ) -> tuple[StepGradients | None, StageRunner]:
        """Run forwards of all units of a batch and, where gradients are enabled, backwards.

        Args:
            call: The batch.
            layout: Its layout.
            make_loss: Ends the forward of the last stage's chunks; called where that stage is.
            scale: The gradient of what that returns, `[]`.
            reduces: Whether gradients are averaged over replicas on the way.
            records: Whether observers are told what it cost.

        Returns:
            The gradients, held back (None without), and the units that ran.
        """
        training = torch.is_grad_enabled()
        prepared = self._prepare(call, layout, training=training, reduces=reduces)
        add_loss = None
        if self.staged.cut.has_last or prepared.step.name == MSP:
            with self.staged.running(self.staged.cut.num_stages - 1):
                add_loss = make_loss(prepared)
        units = self._make_units(call, layout, prepared, add_loss)
        step = self._attending(layout, prepared)
        self.plans.warm_up_attention(step, call.device, self.observer)
        parameters = list(self.parts.causal_lm.parameters())
        gradients = StepGradients(parameters) if training else None
        try:
            drawing = self.group
            if prepared.step.name == MSP:
                drawing = self._set_ranks(tuple(range(self.mesh.pp_size)))
            with without_parameter_hooks(parameters), rank_random_state(drawing, call.device):
                self._execute(prepared, units, gradients, scale)
            if self._helped is not None and prepared.runs is not None:
                self._helped.end_step()
            if gradients is not None:
                self._finish_gradients(gradients, reduces)
        except BaseException:
            if gradients is not None:
                gradients.abandon()
            if self._helped is not None:
                self._helped.drop_gradients()
            raise
        finally:
            self._units = None
        if self.traces is not None and training:
            self.traces.keep(self.executed)
        if records:
            step = prepared.plans.step
            stats = prepared.watch.done(
                self.executed,
                training=training,
                planned_seconds=None if step is None else step.step_seconds,
            )
            plans, done = prepared.plans, prepared.step
            if training and prepared.bounds == plans.bounds and done.name == plans.schedule:
                self._stage_plans.step_done(plans, done.schedule, prepared.units, stats)
        return gradients, units

    def _prepare(
        self, call: ForwardCall, layout: BatchLayout, *, training: bool, reduces: bool
    ) -> Prepared:
        """See that all ranks are about to run the same step, and that each of them can.

        [Note: refused by all]
        What is refused here is refused by every rank before anything was sent, whoever of them
        could not run it. So a script may catch the error and go on with another batch.

        Raises:
            _RefusedByAll: With what this rank refuses, or that another rank does, or that they do
                not agree.
        """
        began = time.perf_counter()
        refusal: Exception | None = None
        prepared = None
        try:
            self._agree(call, layout)
            if training:
                self._stage_plans.correct()
            prepared = self._plan(call, layout, training=training, reduces=reduces)
            if self._unfit is not None:
                raise self._unfit
            prepared.watch = PipelineStepTimer(
                self, call, prepared.step, began=began, name=self._activity
            )
        # Settings, budgets, memory, a kernel that is tried: whatever a rank plans with may fail.
        except Exception as error:
            if is_broken_connection(error):
                raise
            refusal = error  # raised below, when the others have heard of it
        summed = dict(self.parts.causal_lm.named_parameters()) if reduces else None
        said = refused(self.mesh, refusal, summed=summed)
        if refusal is not None:
            raise _RefusedByAll(refusal)
        if said:
            raise _RefusedByAll(PipelineError(refusal_message(said)))
        assert prepared is not None, "nothing was refused, so all was planned"
        self._allow_step(prepared.plans)
        return prepared

    def _plan(
        self, call: ForwardCall, layout: BatchLayout, *, training: bool, reduces: bool
    ) -> Prepared:
        rows = _micro_batches(call.batch_rows, self.config)
        plans = self._stage_plans.get(
            rows[0][1] - rows[0][0],
            call.total_tokens,
            call.device,
            micro_batches=len(rows),
            reduces=reduces,
        )
        # Behind the last exchange: what this rank alone refuses from here on, `refused` tells.
        if reduces:
            refuse_post_accumulate_hooks(self.parts.causal_lm.named_parameters())
        bounds = tuple(b for b in plans.bounds if b[0] < max(1, layout.used_tokens))
        name = plans.schedule
        if name == MSP and (call.head_arguments or len(bounds) < self.mesh.pp_size):
            name = RULE
        if name == MSP:
            self.helped_weights()
        step = step_schedule(
            self.config,
            name,
            len(rows),
            len(bounds),
            forward_only=not training,
            reduce=reduces,
            leaves=plans.leaves if training else frozenset(),
            stores=plans.stores if training else frozenset(),
            streams=plans.streams,
        )
        if RouterLoss.of(self.parts) is not None:
            _check_router_schedule(self.parts.name, step, call.batch_rows)
        if not self._size_checked:
            # Later batches may be short: the last one of an epoch, or one with much padding. They
            # run, with more idle time.
            check_size(step.name, Size(self.mesh.pp_size, len(rows), len(bounds), step.virtual))
            self._size_checked = True
        runs = chunk_runs(step.schedule, len(bounds)) if name == MSP else None
        return Prepared(rows, plans, bounds, step, reduces, runs)

    def _allow_step(self, plans: BatchPlans) -> None:
        """Let messages wait for as long as a step may take, which may be hours.

        NCCL counts a message's time from when it is asked for; a stage asks ahead, and waits while
        the pipeline fills. Lost ranks are the watchdog's affair, which asks for signs of life.
        """
        seconds = 2 * plans.longest_step_seconds(self.mesh.pp_size)
        if seconds > self._allowed_seconds:
            self._allowed_seconds = seconds
            self.mesh.allow_seconds(seconds)

    # -- one step ----------------------------------------------------------------------------

    def _agree(self, call: ForwardCall, layout: BatchLayout) -> None:
        facts = call_facts(call, self.config) | {"used tokens": layout.used_tokens}
        training = torch.is_grad_enabled()
        everyones = agree(self.mesh, facts, *(self._which_train_here() if training else (0, 0)))
        if training:
            self.trained = tuple(trained for trained, _ in everyones)
            self._refuse_apart(tuple(tied for _, tied in everyones))
            self.plans.notice_trained()

    def _which_train_here(self) -> tuple[int, int]:
        """Numbers for which parameters train: of those of `trained`, and of tied ones."""
        named = dict(self.parts.causal_lm.named_parameters())
        tied = [named[name] for name in sorted(self.staged.shared_names) if name in named]
        parameters = list(named.values())
        if self.staged.helps:
            stages = range(self.staged.cut.num_stages)
            parameters = [p for stage in stages for p in self.staged.parameters_of(stage)]
        return zlib.crc32(trainable_mask(parameters)), zlib.crc32(trainable_mask(tied))

    def _refuse_apart(self, tied: tuple[int, ...]) -> None:
        """Refuse that ranks sum gradients of different parameters; all of them do.

        They would wait for sums that others never ask for, or add what is of something else: both
        ends of a pipeline of two ranks sum in the group that sums the loss. `tied` has a number of
        each rank for which of those train that both ends hold.

        Raises:
            PipelineError: Ranks that share sequences train different parameters, or both ends of
                the pipeline different ones of those that they share.
        """
        size, said = self.mesh.sp_size, ""
        parts = [self.trained[at : at + size] for at in range(0, len(self.trained), size)]
        if any(len(set(numbers)) > 1 for numbers in parts):
            said = f"ranks that share every sequence (sp_size={size}) train different parameters"
        elif self.staged.shared_names and len({*tied[:size], *tied[-size:]}) > 1:
            names = ", ".join(sorted(self.staged.shared_names))
            said = f"{names} trains on one end of the pipeline and is frozen on the other"
        if said:
            raise PipelineError(
                f"{said}. Allowed: the same on all ranks that hold a parameter. Remedy: freeze and "
                "unfreeze before the model is converted, or on all ranks alike, by the names in "
                "model.named_parameters() (of tied weights the output embedding is on the last "
                "rank alone, the input embedding on the first and the last)."
            )

    def _make_units(
        self,
        call: ForwardCall,
        layout: BatchLayout,
        prepared: Prepared,
        add_loss: AddLoss | None,
    ) -> StageRunner:
        cut, runs = self.staged.cut, prepared.runs

        def run_of(stage: int, chunk: int) -> tuple[range, SequenceGroup | None]:
            if runs is None:
                return range(len(prepared.bounds)), self.group
            run = runs[stage, chunk]
            return run.chunks, self._set_ranks(run.ranks) if run.is_shared else None

        def make_sequence(stage: int, micro_batch: int, **varying: Any) -> ChunkRunner:
            return ChunkRunner(
                self.parts,
                prepared.plan(stage, micro_batch),
                choose_backend=self.plans.choose_backend,
                counters=self.counters,
                offload=self.offload,
                layers=cut.layers[stage],
                linked=False,
                **varying,
            )

        router_loss = RouterLoss.of(self.parts, backward_by_chunk=True)
        if router_loss is not None:
            # Transformers would put its hooks on the layers of the stage that runs first alone.
            with self.staged.whole():
                maybe_install_capturing_hooks(cast(PreTrainedModel, self.parts.base))

        def router_gradient() -> Tensor:
            assert router_loss is not None, "asked for where routers have a loss"
            router_loss.sum_over_ranks(self._sum_over_pipeline, call.device)
            # Over the ranks of a sequence gradients are averaged.
            return self.mesh.sp_size * self.expected_gradient() * router_loss.gradient()

        units = StageRunner(
            self.staged,
            call,
            layout,
            messages=self.messages(),
            bounds=prepared.bounds,
            rows=prepared.rows,
            make_sequence=make_sequence,
            head=self.head,
            add_loss=add_loss,
            labelled=frozenset(labelled_chunks(layout, prepared.bounds)),
            split=prepared.step.splits,
            router_loss=router_loss,
            make_router_gradient=None if router_loss is None else router_gradient,
            run_of=run_of,
        )
        self._units = units
        return units

    def _attending(self, layout: BatchLayout, prepared: Prepared) -> Iterator[StepRows]:
        """What this rank's units attend to."""
        alone = Run(range(len(prepared.bounds)), (self.mesh.pp_rank,))
        own = {(stage, alone) for stage in self.staged.cut.own}
        if prepared.runs is not None:
            own = {(stage, run) for (stage, _), run in prepared.runs.items()}
            own = {(stage, run) for stage, run in own if self.mesh.pp_rank in run.ranks}
        for stage, run in sorted(own, key=lambda one: (one[0], one[1].chunks.start)):
            plan, group = prepared.plans.by_stage[stage], self.group
            if run.is_shared:
                group = self._set_ranks(run.ranks)
            for start, end in prepared.rows:
                spans = layout.spans(start, end)
                yield StepRows(plan, end - start, spans, run.chunks, group)

    def _set_ranks(self, ranks: tuple[int, ...]) -> SequenceRanks:
        number = ranks.index(self.mesh.pp_rank)
        group, head_blocks = self.mesh.unit_groups[ranks], self._head_blocks()
        return SequenceRanks(group, number, len(ranks), head_blocks=head_blocks)

    def _head_blocks(self) -> int | None:
        layers = (layer for layer in self.shape().layers if layer.num_heads)
        return count_head_blocks(layers, self.mesh.pp_size, self.parts.name)

    def _label_loss(self, call: ForwardCall, layout: BatchLayout, prepared: Prepared) -> AddLoss:
        """Sums up the model's own loss, for the rank that has the last stage."""
        bounds, last_stage = prepared.bounds, self.staged.cut.num_stages - 1
        last_start = bounds[max(labelled_chunks(layout, bounds))][0]
        head_in_backward = self.parts.head_is_hooked()
        loss = ChunkedLoss(
            self.head.logits,
            self.parts.head_parameters(),
            tile_tokens=prepared.plans.by_stage[last_stage].tile_tokens,
            ignore_index=call.ignore_index,
            liger=liger_tile(self.parts, self.head, call.device),
            head_in_backward=head_in_backward,
            reads=self.parts.head_reads() if head_in_backward else None,
        )

        def add(
            hidden_BCD: Tensor, rows: slice, tokens: slice, group: SequenceGroup | None
        ) -> Tensor:
            assert call.shift_labels is not None, "calls without labels were refused"
            bounds_of = (tokens.start, tokens.stop)
            labels_BC = chunk_labels(call.shift_labels[rows], bounds_of, group, call.ignore_index)
            return loss.add(hidden_BCD, labels_BC, last=tokens.start == last_start)

        return add

    def messages(self) -> MessageLayout:
        """How stages pack what they give on."""
        return MessageLayout.of(self.parts, self.shape().layers)

    def _execute(
        self,
        prepared: Prepared,
        units: StageRunner,
        gradients: StepGradients | None,
        scale: Tensor,
    ) -> None:
        messages, layers = self.messages(), self.staged.cut.layers
        rows, bounds = prepared.rows, prepared.bounds

        def shape(unit: int, stage: int) -> tuple[int, ...]:
            micro_batch, chunk = divmod(unit, len(bounds))
            (row, row_end), (start, end) = rows[micro_batch], bounds[chunk]
            if self.group is not None:  # one token where it has none of its own
                start, end = rank_tokens(start, end, self.group.rank, self.group.size)
            return row_end - row, max(1, end - start), messages.width(layers[stage].start)

        def reduce(stage: int) -> None:
            assert gradients is not None, "only a training step reduces"
            if self._helped is not None and prepared.runs is not None:
                self._helped.settle(stage)
            gradients.start_reducing(self._parameters_of(stage), self.replicas)

        transport = Transport(self.mesh)
        executor = Executor(
            prepared.step.schedule,
            self.mesh.pp_rank,
            units,
            transport,
            shapes=shape,
            dtype=prepared.plans.dtype,
            scale=scale,
            reduce=reduce,
            on_action=prepared.watch.action,
            shared=self._shared_units(prepared, units, transport),
        )
        self.executed = executor.run()
        prepared.units = executor.units

    def _shared_units(
        self, prepared: Prepared, units: StageRunner, transport: Transport
    ) -> SharedUnits | None:
        if prepared.runs is None:
            return None
        stages, messages, shape = self.staged.cut.layers, self.messages(), self.shape()
        attending = self.parts.attending_layers()
        dtype = prepared.plans.dtype
        kind = self.mesh.device.type
        autocast = torch.is_autocast_enabled(kind) and dtype != torch.float64
        return SharedUnits(
            prepared.step.schedule,
            self.mesh.pp_rank,
            transport,
            runs=prepared.runs,
            bounds=prepared.bounds,
            rows=prepared.rows,
            widths=lambda stage: messages.width(stages[stage].start),
            layers=lambda stage: {
                index: shape.layers[index] for index in messages.kv_layers(stages[stage], attending)
            },
            head_blocks=self._head_blocks(),
            dtypes=(dtype, torch.get_autocast_dtype(kind) if autocast else dtype),
            stores=lambda stage, micro_batch, run: units.sequence(
                stage, micro_batch, run.chunks.start
            ),
            weights=self.helped_weights(),
        )

    def helped_weights(self) -> RemoteWeights:
        """Weights of other ranks' stages, on this rank's device; where units are shared.

        Raises:
            ConfigError: Other parameters train than when the model was converted.
        """
        if len(set(self.trained)) > 1:
            raise ConfigError(
                f"parameters of {self.parts.name} were frozen or unfrozen after it was converted, "
                "and ranks that run units of each other's stages (pp_msp) hold copies that were "
                "not. Allowed: with pp_msp, what trains from the conversion on. Remedy: freeze and "
                "unfreeze before the model is prepared, or set pp_msp='off'."
            )
        if self._helped is None:
            self._helped = RemoteWeights(self.staged, self.mesh)
        self._helped.begin_step(self.mesh.device)
        return self._helped

    def _finish_gradients(self, gradients: StepGradients, reduces: bool) -> None:
        shared = self.shared_parameters()
        if shared and self.mesh.embedding_group is not None:
            gradients.add_shared(shared, self.mesh.embedding_group)
        if shared and reduces:
            gradients.start_reducing(shared, self.replicas)
        gradients.take()

    def shared_parameters(self) -> list[nn.Parameter]:
        """The trained parameters of this rank that the pipeline's other end holds as well."""
        if self.mesh.embedding_group is None:
            return []
        named = dict(self.parts.causal_lm.named_parameters())
        names = sorted(name for name in self.staged.shared_names if name in named)
        return [named[name] for name in names if named[name].requires_grad]

    def _parameters_of(self, stage: int) -> list[nn.Parameter]:
        """Trained parameters of a stage of this rank, without those it shares."""
        cut = self.staged.cut
        found = [p for layer in cut.layers[stage] for p in self.parts.layers[layer].parameters()]
        if stage in (0, cut.num_stages - 1):
            inside = {id(p) for layer in self.parts.layers for p in layer.parameters()}
            found += [p for p in self.parts.causal_lm.parameters() if id(p) not in inside]
        shared = {id(p) for p in self.shared_parameters()}
        return [p for p in found if p.requires_grad and id(p) not in shared]

    def _count_and_divisor(self, call: ForwardCall) -> tuple[Tensor, Tensor]:
        """Labels that count, and what the summed loss is divided by, both `[]`."""
        assert call.shift_labels is not None, "calls without labels were refused"
        count = (call.shift_labels != call.ignore_index).sum()
        return count, call.divisor(count)

    def _gradient_of_sum(self, call: ForwardCall) -> Tensor:
        """What the schedule takes for the gradient of the loss's sum: as the last time, `[]`.

        Times the ranks that share the sequence, over which gradients are averaged.
        """
        count, divisor = self._count_and_divisor(call)
        scale = self.mesh.sp_size * self.expected_gradient().to(divisor.device) / divisor
        return torch.where(count > 0, scale, torch.zeros_like(scale))

    def expected_gradient(self) -> Tensor:
        """What gradient of the mean loss is expected, `[]`: the last, at the scaler's scale now."""
        wide = torch.promote_types(self.parts.causal_lm.dtype, torch.float32)
        return torch.as_tensor(self._scale * self._scaler_scale(), dtype=wide)

    def note_gradient(self, grad: float, scaled_by: Tensor | float | None = None) -> None:
        """The gradient of the mean loss was `grad`, at a scale of the scaler's: that of now."""
        # A scale of zero, or one that overflowed, is nothing to go on with.
        if grad != 0.0 and math.isfinite(grad):
            self._scale = grad / float(self._scaler_scale() if scaled_by is None else scaled_by)

    def reduces_replicas(self) -> bool:
        """Whether the gradients of this step are averaged over replicas."""
        return self.mesh.replica_group is not None and self.reduces()

    def agreed(self, value: bool) -> bool:
        """Whether all ranks of all replicas say so; all of them ask at the same moments."""
        return all_true(value, self.mesh.control_group, self.mesh.replica_control_group)

    def _scaler_scale(self) -> Tensor | float:
        scaler = self.loss_scaler
        if scaler is None or not scaler.is_enabled():
            return 1.0
        # A number on the device, which the scaler makes when it first scales a loss.
        return scaler._init_scale if scaler._scale is None else scaler._scale.clone()

    def _sum_over_pipeline(self, x: Tensor) -> Tensor:
        for group in (self.mesh.pp_group, self.mesh.sp_group):
            if group is not None:
                dist.all_reduce(x, group=group)
        return x

    def _output(
        self, call: ForwardCall, units: StageRunner, gradients: StepGradients | None
    ) -> ModelOutput:
        """The loss on every rank, shape `[]`; see `gradients` for its backward."""
        wide = torch.promote_types(self.parts.causal_lm.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=call.device)
        if units.losses:
            total = torch.stack(units.losses).sum().to(wide)
        # Zero on all but the last rank, unless they share its units.
        dist.all_reduce(total, group=self.mesh.pp_group)
        if self.mesh.sp_group is not None:
            dist.all_reduce(total, group=self.mesh.sp_group)
        output = CausalLMOutputWithPast(loss=divide_loss(total, *self._count_and_divisor(call)))
        if units.router_loss is not None:
            if gradients is None:  # in training it was done before the first backward
                units.router_loss.sum_over_ranks(self._sum_over_pipeline, call.device)
            output = units.router_loss.add_to_output(output)
        if gradients is None:
            return output
        ran_with, scaled_by = self.expected_gradient(), self._scaler_scale()
        reads = ReadTensors.of_named(self.parts.causal_lm.named_parameters())
        versions = reads.versions()

        def hand_out(grad: float) -> list[Tensor | None]:
            reads.refuse_changes(versions, "the backward of a pipeline's loss")
            given = gradients.hand_out(grad / float(ran_with))
            self.note_gradient(grad, scaled_by)
            return given

        anchor = torch.zeros((), device=total.device, requires_grad=True)
        output.loss = PipelineLoss.apply(output.loss, anchor, hand_out, *gradients.parameters())
        return output


def _check_router_schedule(name: str, step: StepSchedule, batch_rows: int) -> None:
    """Refuse a schedule that begins backward before the last forward, with a loss of routers.

    Its gradient needs all forwards, of all rows; see `router_loss`. With one micro-batch every
    schedule will do: the last stage runs its last chunk first, which all stages have run by then.

    Raises:
        ConfigError: Naming the schedule, the micro-batches and the remedy.
    """
    for actions in step.schedule.ranks:
        kinds = [action.kind for action in actions]
        backward = next((i for i, kind in enumerate(kinds) if kind in _BACKWARDS), len(kinds))
        if "F" in kinds[backward:]:
            break
    else:
        return
    raise ConfigError(
        f"{name}: config.output_router_logits=True adds a loss whose gradient needs to know how "
        f"often each expert was chosen in all {batch_rows} rows, and pp_schedule={step.name!r} "
        f"begins backward of the first of {step.schedule.num_micro_batches} micro-batches before "
        "forward of the last. Allowed: one micro-batch, or pp_schedule='gpipe'. Remedy: "
        f"micro_batch_size={batch_rows}, per_device_train_batch_size=1, pp_schedule='gpipe', or "
        "model.config.output_router_logits = False."
    )


def _micro_batches(batch_rows: int, config: SPPOConfig) -> list[tuple[int, int]]:
    """Half-open rows of each micro-batch: one row each, unless the settings say more."""
    size = min(config.micro_batch_size or 1, batch_rows)
    return [(start, min(start + size, batch_rows)) for start in range(0, batch_rows, size)]
