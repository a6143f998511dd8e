"""The engine of a model that is cut into stages: `forward` runs a whole schedule.

It is the pipeline's counterpart of `Engine`. A call with labels runs forwards and backwards of all
units of the batch over the ranks of the pipeline, and returns the loss on every rank;
`loss.backward()` then releases the gradients (see `gradients`). Rows of the batch are the
micro-batches. Calls that return log-probabilities per token, for a loss that the caller computes,
are run by `token_outputs`. Calls that a cut model cannot run are refused on every rank.
"""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.chunk_runner import ChunkRunner
from sppo_hf.engine.engine import Engine, chunk_labels, labelled_chunks
from sppo_hf.engine.family_guard import WITHOUT_ROUTER_LOSS, check_router_loss
from sppo_hf.engine.forward_calls import BatchLayout, ForwardCall, is_of_encoders, read_call
from sppo_hf.engine.loss import RouterLoss, divide_loss
from sppo_hf.engine.model_parts import (
    ModelParts,
    all_modules,
    check_adapters,
    check_layers,
    check_trainable,
    without_parameter_hooks,
)
from sppo_hf.engine.plan_cache import StepRows, trainable_mask
from sppo_hf.engine.read_tensors import ReadTensors
from sppo_hf.engine.sequence_group import SequenceGroup, rank_random_state, rank_tokens
from sppo_hf.engine.stage_messages import MessageLayout
from sppo_hf.engine.stages import StagedModel
from sppo_hf.engine.step_observer import StepObserver, StepRecord
from sppo_hf.errors import ConfigError, PipelineError, SPPOError, UnsupportedModelError
from sppo_hf.offload.engine import OffloadStats
from sppo_hf.pipeline.agreement import (
    call_facts,
    check_agreement,
    gather_refusals,
    refusal_message,
)
from sppo_hf.pipeline.executor import ActionRecord, Executor, Transport, UnitMarks
from sppo_hf.pipeline.gradients import (
    LossGradient,
    Replicas,
    StepGradients,
    refuse_post_accumulate_hooks,
    step_values,
)
from sppo_hf.pipeline.mesh import PipelineMesh
from sppo_hf.pipeline.multiplex import RemoteWeights
from sppo_hf.pipeline.sequence_parallel import SequenceRanks
from sppo_hf.pipeline.stage_plans import (
    BatchPlans,
    PreparedStep,
    StagePlanCache,
)
from sppo_hf.pipeline.stage_runner import AddLoss, StageRunner, first_layer_hook, last_layer_hook
from sppo_hf.pipeline.step_schedule import StepSchedule, check_size, step_schedule
from sppo_hf.pipeline.token_outputs import TokenCall
from sppo_hf.pipeline.unit_tensors import UnitTensors
from sppo_hf.pipeline.watchdog import GROUP_MARGIN_SECONDS, Watchdog, is_broken_connection
from sppo_hf.planning.model_profile import count_head_blocks
from sppo_hf.planning.model_shape import forward_flops, step_flops
from sppo_hf.planning.pipeline_choice import DEFAULT_SCHEDULE
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.generate import MSP
from sppo_hf.schedule.messages import ChunkRun


def refuse_call(parts: ModelParts, config: SPPOConfig, call: ForwardCall) -> None:
    """Refuse calls of a cut model that need more than the standard loss.

    Raises:
        ConfigError: The call has no labels, requests logits of whole sequences, or has inputs that
            need a gradient.
        UnsupportedModelError: The model's loss is not the standard one.
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
    if torch.is_grad_enabled() and any(x.requires_grad for x in call.tokens.values()):
        raise ConfigError(
            "inputs_embeds that need a gradient would get it before the loss's backward, from "
            "the first rank alone. Allowed with pp_size > 1: input_ids, or inputs_embeds that "
            "need none. Remedy: pp_size=1, or LoRA in place of prompt tuning; where nothing that "
            "trains has made them, inputs_embeds.detach()."
        )
    if config.return_logits:
        raise ConfigError(
            "return_logits=True collects the logits of whole sequences, which in a pipeline "
            "are on its last rank alone. Allowed: return_logits=False with pp_size > 1. "
            "Remedy: drop return_logits."
        )
    call.refuse_unsupported(name)
    if call.encoder_inputs:
        argument = max(call.encoder_inputs, key=is_of_encoders)
        raise ConfigError(
            f"{name} is cut into {config.pp_size} stages (pp_size), where {argument} is not "
            "supported: only the first one has encoders of images or sound, and all would need "
            "what these say of positions. Remedy: pp_size=1 (with FSDP2, or sp_size), or batches "
            "of text."
        )


_BACKWARDS = ("B", "I")

ValueT = TypeVar("ValueT")


class _RefusedByAll(Exception):
    """Raised on every rank to refuse a step before any message of it was sent.

    Its argument is the exception to raise to the caller.
    """


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
        """Prepare to run. The first arguments are those of `Engine`."""
        group = SequenceRanks.of_mesh(mesh) if mesh.sp_size > 1 else None
        super().__init__(parts, config, observer, original_forward, group=group)
        self.staged = staged
        self.mesh = mesh
        self.watchdog = watchdog
        self.syncs_gradients: Callable[[], bool] = lambda: True
        """Returns whether this step averages gradients over replicas; False while they
        accumulate."""
        self.executed: list[ActionRecord] = []
        """Actions of this rank in the last step, with their times."""
        self.loss_gradient = LossGradient(parts.causal_lm)
        self.replicas = Replicas(mesh.replica_group, mesh.replica_control_group)
        self._stage_plans = StagePlanCache(self)
        if self.traces is not None:
            self.traces.rank = mesh.world_rank(mesh.pp_rank)
        self.loss_is_uniform = True
        """Whether the caller's last loss weighed all tokens equally; see `token_outputs`."""
        self._num_calls = 0
        self._activity = ""
        """Name of the running call for error messages: "in forward pass 3"."""
        self._size_checked = False
        self._allowed_seconds = float(config.pp_timeout_seconds + GROUP_MARGIN_SECONDS)
        self._stage_runner: StageRunner | None = None
        """Runner of the current step; None outside of a step."""
        self._model_error: SPPOError | None = None
        """Reason why this rank cannot run the current batch; `_prepare` sends it to all ranks."""
        self._remote_weights: RemoteWeights | None = None
        """Weights of other ranks' stages; None until units of these run here."""
        self.trained_checksums: tuple[int, ...] = ()
        """Checksum of the parameters that train in this step, for each rank that shares the batch:
        of the parameters of its stages, or of all stages if it runs units of others."""
        self._register_stage_hooks()

    def _register_stage_hooks(self) -> None:
        cut = self.staged.cut
        for stage in range(cut.num_stages) if self.staged.borrows_stages else cut.own:
            layers = cut.layers[stage]
            first, last = self.parts.layers[layers[0]], self.parts.layers[layers[-1]]
            if stage > 0:
                first.register_forward_pre_hook(
                    first_layer_hook(lambda: self._stage_runner), with_kwargs=True, prepend=True
                )
            last.register_forward_hook(
                last_layer_hook(lambda: self._stage_runner), with_kwargs=True
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stand-in for the model's forward.

        Raises:
            ConfigError: The batch or the settings cannot be run in a pipeline.
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
        self._model_error = self._check_model(call)
        # All ranks refuse a malformed batch alike, so a script may continue with the next one.
        layout = call.layout()
        kind = "forward" if torch.is_grad_enabled() else "evaluation"
        with self._exclusive(call.device):
            output = self.guarded(kind, lambda: self._run(call, layout))
        return output if call.return_dict else output.to_tuple()

    def _check_model(self, call: ForwardCall) -> SPPOError | None:
        """Return the reason why this rank's stages cannot run, if any; other ranks may differ."""
        try:
            if torch.is_grad_enabled():
                check_trainable(self.parts)
                self.staged.check_unshared()
            check_layers(self.staged.parts_here)
            check_router_loss(self.parts, call.router_loss)
            check_adapters(self.parts)
            with self.staged.whole():
                self._check_new_modules(all_modules(self.parts.causal_lm))
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
        """Run a "forward", "evaluation" or "backward" pass; report its failure to other ranks.

        See [Note: who may raise when] in `agreement`.

        Raises:
            PipelineError: This rank failed.
            RankLostError: Another one did.
        """
        self._num_calls += 1
        self._activity = f"in {kind} pass {self._num_calls}"
        with self.watchdog.collective_section(self._activity):
            try:
                with self.watchdog.reporting_failures(except_for=(_RefusedByAll,)):
                    output = run()
            except _RefusedByAll as refusal:
                (error,) = refusal.args
                raise error from error.__cause__
        self.watchdog.set_activity(f"after {kind} pass {self._num_calls}")
        return output

    def _run(self, call: ForwardCall, layout: BatchLayout) -> ModelOutput:  # type: ignore[override]
        self._check_kernels(call.device)
        if call.head_arguments:
            return TokenCall(self, call, layout).forward()
        reads = self.reads()
        versions = reads.versions()
        gradients, runner = self.run_schedule(
            call,
            layout,
            self._make_label_loss,
            scale=self._gradient_of_sum(call),
            router_gradient=self._router_gradient,
            reduces=torch.is_grad_enabled() and self.averages_gradients(),
        )
        reads.ignore_own_writes(versions)
        return self._output(call, runner, gradients, reads)

    def reads(self) -> ReadTensors:
        """All weights on this rank, which nobody may change between forward and backward."""
        return ReadTensors.of_named(self.parts.causal_lm.named_parameters())

    def run_schedule(
        self,
        call: ForwardCall,
        layout: BatchLayout,
        make_loss: Callable[[PreparedStep], AddLoss],
        *,
        scale: Tensor,
        router_gradient: Callable[[RouterLoss], Tensor] | None = None,
        reduces: bool = False,
        records: bool = True,
    ) -> tuple[StepGradients | None, StageRunner]:
        """Run forwards of all units of a batch and, where gradients are enabled, backwards.

        `make_loss` makes the loss of the last stage's chunks, on ranks that run it; `scale` is its
        gradient, `[]`. `router_gradient` returns the gradient `[E]` by every unit's sums of router
        probabilities, when all forwards have run. Gradients are averaged over replicas meanwhile if
        `reduces`, and seconds and bytes are reported to observers if `records`.

        Returns:
            The gradients, not yet in `.grad` (None without backward), and the runner of the units.
        """
        began_seconds = time.perf_counter()
        training = torch.is_grad_enabled()
        prepared = self._prepare(call, layout, training=training, reduces=reduces)
        plans, step = prepared.plans, prepared.step
        add_loss = None
        if self.staged.cut.has_last or step.name == MSP:
            with self.staged.running(self.staged.cut.num_stages - 1):
                add_loss = make_loss(prepared)
        runner = self._make_stage_runner(prepared, add_loss, router_gradient)
        self.plans.warm_up_attention(self._step_rows(prepared), call.device, self.observer)
        parameters = list(self.parts.causal_lm.parameters())
        gradients = StepGradients(parameters) if training else None
        try:
            random_group = self.group
            if step.name == MSP:
                random_group = self._set_group(tuple(range(self.mesh.pp_size)))
            with without_parameter_hooks(parameters), rank_random_state(random_group, call.device):
                units = self._execute(prepared, runner, gradients, scale)
            if prepared.weights is not None:
                prepared.weights.end_step()
            if gradients is not None:
                self._finish_gradients(gradients, reduces)
        except BaseException:
            if gradients is not None:
                gradients.discard()
            if prepared.weights is not None:
                prepared.weights.drop_gradients()
            raise
        finally:
            self._stage_runner = None
        if self.traces is not None and training:
            self.traces.keep([self._with_tier(record, prepared) for record in self.executed])
        if records:
            stats = self._record_step(prepared, training=training, began_seconds=began_seconds)
            if training and prepared.bounds == plans.bounds and step.name == plans.choice.schedule:
                self._stage_plans.step_done(plans, step.schedule, units, stats)
        return gradients, runner

    def _record_step(
        self, prepared: PreparedStep, *, training: bool, began_seconds: float
    ) -> OffloadStats:
        """Report a finished step, with its predicted seconds, to the observer.

        Tokens and FLOPs of the batch are divided among the ranks that share it, so that sums over
        all ranks count them once. Waiting for another rank is not counted as a stall: the
        schedule's idle time is the step's seconds without compute.
        """
        mesh, call, predicted = self.mesh, prepared.call, prepared.plans.step
        num_sharing = len(mesh.sharing_ranks)
        start, end = rank_tokens(
            0, call.batch_rows * call.total_tokens, mesh.rank - mesh.sharing_ranks[0], num_sharing
        )
        count_flops = step_flops if training else forward_flops
        flops = count_flops(self.shape(), call.batch_rows, call.total_tokens)
        forward_seconds = sum(
            record.end_seconds - record.start_seconds
            for record in self.executed
            if record.action.kind == "F"
        )
        stats = self.take_stats()
        self.observer.on_record(
            StepRecord(
                tokens=end - start,
                batch_rows=call.batch_rows,
                total_tokens=call.total_tokens,
                model_flops=flops / num_sharing,
                forward_seconds=forward_seconds,
                backward_seconds=time.perf_counter() - began_seconds - forward_seconds,
                offload=stats,
                planned_seconds=None if predicted is None else predicted.step_seconds,
                num_chunks=prepared.step.schedule.num_chunks,
                training=training,
            )
        )
        return stats

    def _prepare(
        self, call: ForwardCall, layout: BatchLayout, *, training: bool, reduces: bool
    ) -> PreparedStep:
        """Check that all ranks are about to run the same step, and that each of them can.

        See [Note: who may raise when] in `agreement`.

        Raises:
            _RefusedByAll: This rank refuses the step, or another rank does, or they do not agree.
        """
        refusal: Exception | None = None
        prepared = None
        try:
            self._check_agreement(call)
            if training:
                self._stage_plans.correct()
            prepared = self._plan(call, layout, training=training, reduces=reduces)
            if self._model_error is not None:
                raise self._model_error
        # Planning may fail on one rank for many reasons: settings, budgets, memory, a kernel.
        except Exception as error:
            if is_broken_connection(error):
                raise
            refusal = error  # raised below, when the others have heard of it
        averaged = dict(self.parts.causal_lm.named_parameters()) if reduces else None
        reasons = gather_refusals(self.mesh, refusal, averaged=averaged)
        if refusal is not None:
            raise _RefusedByAll(refusal)
        if reasons:
            raise _RefusedByAll(PipelineError(refusal_message(reasons)))
        assert prepared is not None, "nothing was refused, so all was planned"
        self._allow_step(prepared.plans)
        return prepared

    def _plan(
        self, call: ForwardCall, layout: BatchLayout, *, training: bool, reduces: bool
    ) -> PreparedStep:
        rows = _micro_batches(call.batch_rows, self.config)
        if call.router_loss:
            RouterLoss.of_call(call)  # refused here, if it is, and so by all ranks
            # With all layers in place, as hooks are added once, to layers that are there.
            with self.staged.whole():
                maybe_install_capturing_hooks(cast(PreTrainedModel, self.parts.decoder))
        plans = self._stage_plans.get(
            rows[0][1] - rows[0][0],
            call.total_tokens,
            call.device,
            micro_batches=len(rows),
            reduces=reduces,
            router_loss=call.router_loss,
        )
        # After the last exchange: `gather_refusals` tells what this rank alone refuses from here.
        if reduces:
            refuse_post_accumulate_hooks(self.parts.causal_lm.named_parameters())
        bounds = tuple(b for b in plans.bounds if b[0] < max(1, layout.used_tokens))
        name = plans.choice.schedule
        if name == MSP and (call.head_arguments or len(bounds) < self.mesh.pp_size):
            name = DEFAULT_SCHEDULE
        weights = self.remote_weights() if name == MSP else None
        step = step_schedule(
            *(self.config, name, len(rows), len(bounds)),
            forward_only=not training,
            reduce=reduces,
            copies=plans.copies,
        )
        # With a head of TRL's, all forwards run before the first backward.
        if call.router_loss and not call.head_arguments:
            _check_router_schedule(self.parts.name, step, call.batch_rows)
        if not self._size_checked:
            # The first batch only: later ones may be short (the last of an epoch, or one with much
            # padding), and run with more idle time.
            check_size(step.name, step.size)
            self._size_checked = True
        return PreparedStep(call, layout, rows, plans, bounds, step, weights)

    def _allow_step(self, plans: BatchPlans) -> None:
        """Raise the timeout of messages to the longest duration of a step, which may be hours.

        NCCL measures a message's time from the call that posts it; a stage posts receives early,
        and waits while the pipeline fills. The watchdog detects lost ranks by missing signs of
        life.
        """
        # A step in which such ranks run one by one bounds the time that a message can wait.
        predictions = [plan.prediction for plan in plans.by_stage.values()]
        of_rank = sum(one.step_seconds for one in predictions if one is not None)
        seconds = 2 * self.mesh.pp_size * plans.shape.micro_batches * of_rank
        if seconds > self._allowed_seconds:
            self._allowed_seconds = seconds
            self.mesh.allow_seconds(seconds)

    # -- one step ----------------------------------------------------------------------------

    def _check_agreement(self, call: ForwardCall) -> None:
        facts = call_facts(call, self.config)
        if not torch.is_grad_enabled():
            check_agreement(self.mesh, facts, 0, 0)
            return
        named = dict(self.parts.causal_lm.named_parameters())
        tied = [named[name] for name in sorted(self.staged.shared_names) if name in named]
        own = parameters = list(named.values())
        if self.staged.borrows_stages:
            stages = range(self.staged.cut.num_stages)
            own = [p for stage in stages for p in self.staged.parameters_of(stage)]
        checksums = (zlib.crc32(trainable_mask(each)) for each in (own, tied))
        everyones = check_agreement(self.mesh, facts, *checksums)
        self.trained_checksums = tuple(trained for trained, _ in everyones)
        self._check_trained_alike(tuple(checksum for _, checksum in everyones))
        self.plans.update_trainable(parameters)

    def _check_trained_alike(self, tied: tuple[int, ...]) -> None:
        """Check on all ranks that gradients that are summed belong to the same parameters.

        Otherwise ranks would wait for a collective that others never start, or add gradients of
        different parameters (in a pipeline of two ranks, both ends sum them in the group that sums
        the loss). `tied` has each rank's checksum of the trained parameters that both ends hold.

        Raises:
            PipelineError: Ranks that share sequences train different parameters, or the two ends of
                the pipeline train different ones of the parameters that they share.
        """
        size, difference = self.mesh.sp_size, ""
        trained = self.trained_checksums
        by_stage = [trained[at : at + size] for at in range(0, len(trained), size)]
        if any(len(set(checksums)) > 1 for checksums in by_stage):
            difference = (
                f"ranks that share every sequence (sp_size={size}) train different parameters"
            )
        elif self.staged.shared_names and len({*tied[:size], *tied[-size:]}) > 1:
            names = ", ".join(sorted(self.staged.shared_names))
            difference = f"{names} trains on one end of the pipeline and is frozen on the other"
        if difference:
            raise PipelineError(
                f"{difference}. Allowed: the same on all ranks that hold a parameter. Remedy: "
                "freeze and unfreeze before the model is converted, or on all ranks alike, by the "
                "names in model.named_parameters() (of tied weights the output embedding is on the "
                "last rank alone, the input embedding on the first and the last)."
            )

    def _make_stage_runner(
        self,
        prepared: PreparedStep,
        add_loss: AddLoss | None,
        router_gradient: Callable[[RouterLoss], Tensor] | None = None,
    ) -> StageRunner:
        cut, call = self.staged.cut, prepared.call

        def make_runner(stage: int, micro_batch: int, **varying: Any) -> ChunkRunner:
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

        router_loss = RouterLoss.of_call(call, backward_by_chunk=True)
        make_router_gradient = None
        if router_loss is not None and router_gradient is not None:
            make_router_gradient = functools.partial(router_gradient, router_loss)
        self._stage_runner = StageRunner(
            self.staged,
            prepared,
            messages=self.messages(),
            make_runner=make_runner,
            head=self.head,
            add_loss=add_loss,
            group_of=self._group_of,
            router_loss=router_loss,
            make_router_gradient=make_router_gradient,
        )
        return self._stage_runner

    def _router_gradient(self, router_loss: RouterLoss) -> Tensor:
        """Return the gradient `[E]` of the loss by each unit's sums of router probabilities."""
        self.sum_router_loss(router_loss)
        # Scaled, as gradients are averaged over the ranks of a sequence.
        scale = self.mesh.sp_size * self.loss_gradient.expected() * router_loss.coefficient
        return scale * router_loss.gradient()

    def sum_router_loss(self, router_loss: RouterLoss) -> None:
        """Sum a router loss over all ranks that share the batch, after their last forward."""
        router_loss.sum_over_ranks(self._sum_over_pipeline, self.mesh.device)

    def _step_rows(self, prepared: PreparedStep) -> Iterator[StepRows]:
        """Yield the rows of tokens that this rank's units attend to, to warm up kernels."""
        every = dict.fromkeys((stage, run) for (stage, _), run in prepared.step.runs.items())
        for stage, run in every:
            if self.mesh.pp_rank in run.ranks:
                plan, group = prepared.plans.by_stage[stage], self._group_of(run)
                for start, end in prepared.rows:
                    spans = prepared.layout.spans(start, end)
                    yield StepRows(plan, end - start, spans, run.chunks, group)

    def _group_of(self, run: ChunkRun) -> SequenceGroup | None:
        """Return the ranks that share the tokens of a run's chunks."""
        return self._set_group(run.ranks) if run.is_shared else self.group

    def _set_group(self, ranks: tuple[int, ...]) -> SequenceRanks:
        """Return the sequence group of a set of ranks that share units and include this one."""
        group, rank = self.mesh.unit_groups[ranks], ranks.index(self.mesh.pp_rank)
        return SequenceRanks(group, rank, len(ranks), head_blocks=self._head_blocks())

    def _head_blocks(self) -> int | None:
        layers = (layer for layer in self.shape().layers if layer.num_heads)
        return count_head_blocks(layers, self.mesh.pp_size, self.parts.name)

    def _make_label_loss(self, prepared: PreparedStep) -> AddLoss:
        """Make the model's loss, summed over chunks; for ranks that run the last stage."""
        call, layout = prepared.call, prepared.layout
        bounds, last_stage = prepared.bounds, self.staged.cut.num_stages - 1
        last_start = bounds[max(labelled_chunks(layout, bounds))][0]
        plan = prepared.plans.by_stage[last_stage]
        loss = self.chunked_loss(call, plan, head_in_backward=self.parts.head_is_hooked())

        def add(
            hidden_BCD: Tensor, rows: slice, tokens: slice, group: SequenceGroup | None
        ) -> Tensor:
            assert call.shift_labels is not None, "calls without labels were refused"
            bounds_of = (tokens.start, tokens.stop)
            labels_BC = chunk_labels(call.shift_labels[rows], bounds_of, group, call.ignore_index)
            return loss.add(hidden_BCD, labels_BC, last=tokens.start == last_start)

        return add

    def messages(self) -> MessageLayout:
        """Return the layout of messages from each stage to the next."""
        return MessageLayout.of(self.parts, self.shape().layers)

    def _execute(
        self,
        prepared: PreparedStep,
        runner: StageRunner,
        gradients: StepGradients | None,
        scale: Tensor,
    ) -> list[UnitMarks]:
        """Run the schedule; return the units that ran, with their times."""
        schedule = prepared.step.schedule

        def reduce(stage: int) -> None:
            assert gradients is not None, "only a training step averages gradients"
            if prepared.weights is not None:
                prepared.weights.complete_gradients(stage)
            gradients.start_averaging(self._parameters_of(stage), self.replicas)

        def on_action(action: Action, description: str) -> None:
            self.watchdog.set_activity(f"{self._activity}, {description}")
            if action.kind == "F" or action.kind in _BACKWARDS:
                direction = "forward" if action.kind == "F" else "backward"
                self.observer.on_unit(direction, action.unit, schedule.num_units)

        executor = Executor(
            runner,
            self._make_unit_tensors(prepared, runner),
            scale=scale,
            reduce=reduce,
            on_action=on_action,
        )
        self.executed = executor.run()
        return executor.units

    def _with_tier(self, record: ActionRecord, prepared: PreparedStep) -> ActionRecord:
        """Return a record that names the tiers behind the host, if it wrote to or read from any."""
        if record.action.kind not in ("S", "L"):
            return record
        chunk = prepared.step.schedule.chunk(record.action)
        return record._replace(tier=prepared.plans.tiers_behind_host(record.action, chunk))

    def _make_unit_tensors(self, prepared: PreparedStep, runner: StageRunner) -> UnitTensors:
        stages, messages, shape = self.staged.cut.layers, self.messages(), self.shape()
        attending = self.parts.attending_layers()
        dtype = prepared.plans.dtype
        kind = self.mesh.device.type
        autocast = torch.is_autocast_enabled(kind) and dtype != torch.float64
        return UnitTensors(
            prepared,
            self.mesh.pp_rank,
            Transport(self.mesh),
            group=self.group,
            message_width=lambda stage: messages.width(stages[stage].start),
            layers=lambda stage: {
                index: shape.layers[index] for index in messages.kv_layers(stages[stage], attending)
            },
            head_blocks=None if prepared.weights is None else self._head_blocks(),
            kv_dtype=torch.get_autocast_dtype(kind) if autocast else dtype,
            stores=lambda stage, micro_batch, run: runner.chunk_runner(
                stage, micro_batch, run.chunks.start
            ),
        )

    def remote_weights(self) -> RemoteWeights:
        """Return the weights of other ranks' stages on this rank's device, if units are shared.

        Raises:
            ConfigError: Other parameters train than when the model was converted, or modules were
                added or replaced.
        """
        if len(set(self.trained_checksums)) > 1:
            raise ConfigError(
                f"parameters of {self.parts.name} were frozen or unfrozen after it was converted, "
                "and ranks that run units of each other's stages (pp_msp) hold copies that were "
                "not. Allowed: with pp_msp, the parameters that trained at the conversion. Remedy: "
                "freeze and unfreeze before the model is prepared, or set pp_msp='off'."
            )
        if self.modules_changed:
            raise ConfigError(
                f"modules of {self.parts.name} were added or replaced after it was converted, and "
                "ranks that run units of each other's stages (pp_msp) hold those that were there "
                "before. Allowed: with pp_msp, the modules that were converted. Remedy: change "
                "them before the model is prepared, or set pp_msp='off'."
            )
        if self._remote_weights is None:
            self._remote_weights = RemoteWeights(self.staged, self.mesh)
        self._remote_weights.begin_step(self.mesh.device)
        return self._remote_weights

    def _finish_gradients(self, gradients: StepGradients, reduces: bool) -> None:
        if tied := self.shared_parameters():
            gradients.sum_tied(tied, self.mesh.embedding_group)
            if reduces:
                gradients.start_averaging(tied, self.replicas)
        gradients.collect()

    def shared_parameters(self) -> list[nn.Parameter]:
        """Return this rank's trained parameters that the other end of the pipeline holds too.

        These are tied embeddings.
        """
        if self.mesh.embedding_group is None:
            return []
        named = dict(self.parts.causal_lm.named_parameters())
        names = sorted(name for name in self.staged.shared_names if name in named)
        return [named[name] for name in names if named[name].requires_grad]

    def _parameters_of(self, stage: int) -> list[nn.Parameter]:
        """Return parameters of a stage of this rank, without `shared_parameters`."""
        cut = self.staged.cut
        found = [p for layer in cut.layers[stage] for p in self.parts.layers[layer].parameters()]
        if stage in (0, cut.num_stages - 1):
            in_layers = {id(p) for layer in self.parts.layers for p in layer.parameters()}
            found += [p for p in self.parts.causal_lm.parameters() if id(p) not in in_layers]
        tied = {id(p) for p in self.shared_parameters()}
        return [p for p in found if id(p) not in tied]

    def _count_and_divisor(self, call: ForwardCall) -> tuple[Tensor, Tensor]:
        """Return the number of labels and the divisor of the summed loss, both `[]`."""
        assert call.shift_labels is not None, "calls without labels were refused"
        count = (call.shift_labels != call.ignore_index).sum()
        return count, call.divisor(count)

    def _gradient_of_sum(self, call: ForwardCall) -> Tensor:
        """Return the gradient of the summed loss with which the schedule runs, `[]`.

        It is multiplied by the number of ranks that share a sequence, as these average gradients.
        """
        count, divisor = self._count_and_divisor(call)
        scale = self.mesh.sp_size * self.loss_gradient.expected().to(divisor.device) / divisor
        return torch.where(count > 0, scale, torch.zeros_like(scale))

    def averages_gradients(self) -> bool:
        """Whether the gradients of this step are averaged over replicas."""
        return self.mesh.replica_group is not None and self.syncs_gradients()

    def _sum_over_pipeline(self, x: Tensor) -> Tensor:
        for group in (self.mesh.pp_group, self.mesh.sp_group):
            if group is not None:
                dist.all_reduce(x, group=group)
        return x

    def _output(
        self,
        call: ForwardCall,
        runner: StageRunner,
        gradients: StepGradients | None,
        reads: ReadTensors,
    ) -> ModelOutput:
        """Return the loss on every rank, shape `[]`; see `gradients` for its backward."""
        wide = torch.promote_types(self.parts.causal_lm.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=call.device)
        if runner.losses:
            total = torch.stack(runner.losses).sum().to(wide)
        # The loss is zero on ranks that run no units of the last stage.
        self._sum_over_pipeline(total)
        output = CausalLMOutputWithPast(loss=divide_loss(total, *self._count_and_divisor(call)))
        if runner.router_loss is not None:
            if gradients is None:  # in training it was done before the first backward
                self.sum_router_loss(runner.router_loss)
            output = runner.router_loss.add_to_output(output, runner.router_loss.value())
        if gradients is None:
            return output
        used_gradient, loss_scale = self.loss_gradient.expected(), self.loss_gradient.loss_scale()
        versions = reads.versions()

        def release(grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
            assert grads[0] is not None, "the loss is the only value"
            # The only read from the device, after all of the step's work was launched.
            grad = grads[0].item()
            reads.check_unchanged(versions, "the backward of a pipeline's loss")
            released = gradients.release(grad / float(used_gradient))
            self.loss_gradient.note(grad, loss_scale)
            return released

        assert output.loss is not None, "calls with labels have a loss"
        (output.loss,) = step_values((output.loss,), gradients.parameters(), release)
        return output


def _check_router_schedule(name: str, step: StepSchedule, batch_rows: int) -> None:
    """Refuse schedules that begin backward before the last forward if there is a router loss.

    The router loss's gradient needs all forwards of all rows; see `router_loss`. With one
    micro-batch every schedule works: the last stage begins backward with its last chunk, which all
    stages have run by then.

    Raises:
        ConfigError: The schedule does so; the message has the micro-batches and a remedy.
    """
    for actions in step.schedule.ranks:
        kinds = [action.kind for action in actions]
        backward = next((i for i, kind in enumerate(kinds) if kind in _BACKWARDS), len(kinds))
        if "F" in kinds[backward:]:
            break
    else:
        return
    raise ConfigError(
        f"{name}: output_router_logits=True adds a loss whose gradient needs to know how "
        f"often each expert was chosen in all {batch_rows} rows, and pp_schedule={step.name!r} "
        f"begins backward of the first of {step.schedule.num_micro_batches} micro-batches before "
        "forward of the last. Allowed: one micro-batch, or pp_schedule='gpipe'. Remedy: "
        f"micro_batch_size={batch_rows}, per_device_train_batch_size=1, pp_schedule='gpipe'; or "
        f"{WITHOUT_ROUTER_LOSS}."
    )


def _micro_batches(batch_rows: int, config: SPPOConfig) -> list[tuple[int, int]]:
    """Return the rows of each micro-batch, half-open: `micro_batch_size` rows each, or one."""
    size = min(config.micro_batch_size or 1, batch_rows)
    return [(start, min(start + size, batch_rows)) for start in range(0, batch_rows, size)]
