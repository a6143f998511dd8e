"""The engine of a model that is cut into stages: `forward` runs a whole schedule.

It stands where `Engine` stands for one device. A call with labels runs forwards and backwards of
all units of the batch over the ranks of the pipeline, and returns the loss on every rank;
`loss.backward()` then hands out the gradients (see `gradients`). Rows of the batch are the
micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers.modeling_outputs import CausalLMOutputWithPast

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import PipelineError, UnsupportedModelError
from sppo_hf.model.calls import ForwardCall, read_call
from sppo_hf.model.engine import Engine, labelled_chunks
from sppo_hf.model.fused import fused_tile
from sppo_hf.model.layout import BatchLayout
from sppo_hf.model.loss import ChunkedLoss, divide_loss
from sppo_hf.model.observer import StepObserver
from sppo_hf.model.parameter_hooks import hooks_set_aside
from sppo_hf.model.sequence import Sequence
from sppo_hf.model.stage_units import StageUnits, first_layer_hook, last_layer_hook
from sppo_hf.model.stages import StagedModel
from sppo_hf.model.structure import ModelParts, check_trainable
from sppo_hf.model.versions import ReadTensors
from sppo_hf.planning.partition import Bounds
from sppo_hf.runtime.agreement import agree, settings_number
from sppo_hf.runtime.call_limits import refuse_call
from sppo_hf.runtime.executor import Done, Executor
from sppo_hf.runtime.gradients import (
    PipelineLoss,
    Replicas,
    StepGradients,
    refuse_post_accumulate_hooks,
)
from sppo_hf.runtime.mesh import PipelineMesh
from sppo_hf.runtime.schedules import StepSchedule, check_size, step_schedule
from sppo_hf.runtime.stage_plans import BatchPlans, StagePlans
from sppo_hf.runtime.step_watch import StepWatch
from sppo_hf.runtime.transport import Transport
from sppo_hf.runtime.watchdog import Watchdog
from sppo_hf.schedule.generate import Size

# B batch rows, C tokens of a chunk, D model width.


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

        Args:
            parts: The cut model.
            config: The settings.
            observer: Is told about plans, units and records.
            original_forward: The model's own.
            staged: The stages of this rank.
            mesh: Its place among the ranks.
            watchdog: Is told what this rank does.
        """
        super().__init__(parts, config, observer, original_forward)
        self.staged = staged
        self.mesh = mesh
        self.watchdog = watchdog
        self.reduces: Callable[[], bool] = lambda: True
        """Whether gradients are reduced over replicas in this step: not while they accumulate."""
        self.executed: list[Done] = []
        """What this rank did in the last step, and when."""
        self.loss_scaler: Any = None
        """The gradient scaler of float16 training, whose scale the loss will be multiplied by."""
        self._replicas = Replicas(mesh.replicas, mesh.replicas_control)
        self._stage_plans = StagePlans(self)
        self._scale = 1.0
        self._steps = 0
        self._units: StageUnits | None = None
        self._hook_ends()

    def _hook_ends(self) -> None:
        cut = self.staged.cut
        for stage in cut.own:
            layers = cut.layers[stage]
            first, last = self.parts.layers[layers[0]], self.parts.layers[layers[-1]]
            if stage > 0:
                first.register_forward_pre_hook(
                    first_layer_hook(lambda: self._units), with_kwargs=True, prepend=True
                )
            last.register_forward_hook(last_layer_hook(lambda: self._units))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stand-in for the model's forward.

        Raises:
            ConfigError: The batch or the settings cannot be run in a pipeline (see the message).
            UnsupportedModelError: The model cannot be trained exactly.
            PipelineError: A rank failed, or ranks do not agree.
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
        if torch.is_grad_enabled():
            check_trainable(self.parts)
        # A batch that cannot be read is refused on all ranks alike, and the next one may be tried.
        layout = call.layout()
        with self._alone():
            output = self._run_guarded(call, layout)
        return output if call.return_dict else output.to_tuple()

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineEngine:
        """Refuse copies: only a part of the model is here.

        Raises:
            UnsupportedModelError: Always.
        """
        raise UnsupportedModelError(
            f"{self.parts.name} is cut into stages, so a copy of it (as a reference model, or for "
            "averaged weights) would be a copy of one part that nothing runs. Allowed with "
            "pp_size > 1: one model. Remedy: train with pp_size=1, or without the copy."
        )

    def _run_guarded(self, call: ForwardCall, layout: BatchLayout) -> CausalLMOutputWithPast:
        self._steps += 1
        self.watchdog.doing(f"in forward {self._steps}")
        try:
            return self._run(call, layout)
        except BaseException as error:
            self.watchdog.report(error)
            if not isinstance(error, Exception):
                raise  # an interrupt, which is nobody's failure
            reason = self.watchdog.explain(error)
            if reason is error and isinstance(error, RuntimeError):
                # A collective that broke off; actions have been named by the executor.
                reason = PipelineError(
                    f"rank {self.mesh.pp_rank} of the pipeline failed while "
                    f"{self.watchdog.activity}: {error}"
                )
            if reason is error:
                raise
            raise reason from error
        finally:
            self.watchdog.doing(f"after forward {self._steps}")

    def _run(self, call: ForwardCall, layout: BatchLayout) -> CausalLMOutputWithPast:  # type: ignore[override]
        began = time.perf_counter()
        self._agree(call, layout)
        training = torch.is_grad_enabled()
        rows = _micro_batches(call.batch_rows, self.config)
        plans = self._stage_plans.get(
            rows[0][1] - rows[0][0], call.total_tokens, call.device, micro_batches=len(rows)
        )
        used = max(1, layout.used_tokens)
        bounds = tuple(b for b in plans.bounds if b[0] < used)
        reduces = training and self.mesh.dp_size > 1 and self.reduces()
        step = step_schedule(
            self.config, len(rows), len(bounds), forward_only=not training, reduce=reduces
        )
        if self._steps == 1:
            # Later batches may be short: the last one of an epoch, or one with much padding. They
            # run, with more idle time.
            check_size(step.name, Size(self.mesh.pp_size, len(rows), len(bounds), step.virtual))
        watch = StepWatch(self, call, step, began)
        units = self._make_units(call, layout, bounds, rows, plans, step)
        if reduces:
            refuse_post_accumulate_hooks(self.parts.causal_lm.named_parameters())
        parameters = list(self.parts.causal_lm.parameters())
        gradients = StepGradients(parameters) if training else None
        try:
            with hooks_set_aside(parameters):
                self._execute(call, step, plans, units, bounds, rows, gradients, watch)
            if gradients is not None:
                self._finish_gradients(gradients, reduces)
        except BaseException:
            if gradients is not None:
                gradients.abandon()
            raise
        finally:
            self._units = None
        watch.done(self.executed, training=training)
        return CausalLMOutputWithPast(loss=self._loss_value(call, units, gradients))

    # -- one step ----------------------------------------------------------------------------

    def _agree(self, call: ForwardCall, layout: BatchLayout) -> None:
        ids = call.tokens.get("input_ids")
        facts = {
            "rows": call.batch_rows,
            "tokens": call.total_tokens,
            "used tokens": layout.used_tokens,
            # With the layout, the only read from the device before the first chunk.
            "sum of input_ids": 0 if ids is None else int(ids.sum()),
            "sum of labels": 0 if call.shift_labels is None else int(call.shift_labels.sum()),
            "training": int(torch.is_grad_enabled()),
            "settings": settings_number(self.config),
        }
        agree(self.mesh, facts)

    def _make_units(
        self,
        call: ForwardCall,
        layout: BatchLayout,
        bounds: Bounds,
        rows: list[tuple[int, int]],
        plans: BatchPlans,
        step: StepSchedule,
    ) -> StageUnits:
        cut = self.staged.cut

        def make_sequence(stage: int, **varying: Any) -> Sequence:
            return Sequence(
                self.parts,
                plans.by_stage[stage],
                choose_backend=self.plans.choose_backend,
                counters=self.counters,
                offload=self.offload,
                layers=cut.layers[stage],
                linked=False,
                **varying,
            )

        loss = None
        if cut.has_last:
            loss = ChunkedLoss(
                self.head.logits,
                self.parts.head_parameters(),
                tile_tokens=plans.by_stage[cut.num_stages - 1].tile_tokens,
                ignore_index=call.ignore_index,
                fused=fused_tile(self.parts, self.head, call.device),
                head_in_backward=self.parts.head_is_hooked(),
            )
        units = StageUnits(
            self.staged,
            call,
            layout,
            bounds=bounds,
            rows=rows,
            make_sequence=make_sequence,
            enter=self._enter,
            head=self.head,
            loss=loss,
            labelled=frozenset(labelled_chunks(layout, bounds)),
            split=step.splits,
        )
        self._units = units
        return units

    def _enter(self, sequence: Sequence | None) -> None:
        self.running = sequence

    def _execute(
        self,
        call: ForwardCall,
        step: StepSchedule,
        plans: BatchPlans,
        units: StageUnits,
        bounds: Bounds,
        rows: list[tuple[int, int]],
        gradients: StepGradients | None,
        watch: StepWatch,
    ) -> None:
        width = self.parts.text_config.hidden_size

        def shape(unit: int) -> tuple[int, ...]:
            micro_batch, chunk = divmod(unit, len(bounds))
            (row, row_end), (start, end) = rows[micro_batch], bounds[chunk]
            return row_end - row, end - start, width

        def reduce(stage: int) -> None:
            assert gradients is not None, "only a training step reduces"
            gradients.start_reducing(self._parameters_of(stage), self._replicas)

        self.executed = Executor(
            step.schedule,
            self.mesh.pp_rank,
            units,
            Transport(self.mesh),
            shapes=shape,
            dtype=plans.dtype,
            scale=self._gradient_of_sum(call),
            reduce=reduce,
            on_action=watch.action,
        ).run()

    def _finish_gradients(self, gradients: StepGradients, reduces: bool) -> None:
        shared = self.shared_parameters()
        if shared and self.mesh.ends is not None:
            gradients.add_shared(shared, self.mesh.ends)
        if shared and reduces:
            gradients.start_reducing(shared, self._replicas)
        gradients.take()

    def shared_parameters(self) -> list[nn.Parameter]:
        """The trained parameters of this rank that the pipeline's other end holds as well."""
        if self.mesh.ends is None:
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
        """What the schedule takes for the gradient of the loss's sum: as the last time, `[]`."""
        count, divisor = self._count_and_divisor(call)
        scale = self._expected_gradient().to(divisor.device) / divisor
        return torch.where(count > 0, scale, torch.zeros_like(scale))

    def _expected_gradient(self) -> Tensor:
        """What gradient of the loss is expected, `[]`: the last one, at the scaler's scale now."""
        wide = torch.promote_types(self.parts.causal_lm.dtype, torch.float32)
        return torch.as_tensor(self._scale * self._scaler_scale(), dtype=wide)

    def _scaler_scale(self) -> Tensor | float:
        scaler = self.loss_scaler
        if scaler is None or not scaler.is_enabled():
            return 1.0
        # A number on the device, which the scaler makes when it first scales a loss.
        return scaler._init_scale if scaler._scale is None else scaler._scale.clone()

    def _loss_value(
        self, call: ForwardCall, units: StageUnits, gradients: StepGradients | None
    ) -> Tensor:
        """The loss on every rank, shape `[]`; see `gradients` for its backward."""
        wide = torch.promote_types(self.parts.causal_lm.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=call.device)
        if units.losses:
            total = torch.stack(units.losses).sum().to(wide)
        last = self.mesh.world_rank(self.mesh.pp_size - 1)
        dist.broadcast(total, last, group=self.mesh.pipeline)
        loss = divide_loss(total, *self._count_and_divisor(call))
        if gradients is None:
            return loss
        ran_with, scaled_by = self._expected_gradient(), self._scaler_scale()
        reads = ReadTensors.of_named(self.parts.causal_lm.named_parameters())
        versions = reads.versions()

        def hand_out(grad: float) -> list[Tensor | None]:
            reads.refuse_changes(versions, "the backward of a pipeline's loss")
            given = gradients.hand_out(grad / float(ran_with))
            # A scale of zero, or one that overflowed, is nothing to go on with.
            if grad != 0.0 and math.isfinite(grad):
                self._scale = grad / float(scaled_by)
            return given

        anchor = torch.zeros((), device=total.device, requires_grad=True)
        return PipelineLoss.apply(loss, anchor, hand_out, *gradients.parameters())


def _micro_batches(batch_rows: int, config: SPPOConfig) -> list[tuple[int, int]]:
    """Half-open rows of each micro-batch: one row each, unless the settings say more."""
    size = min(config.micro_batch_size or 1, batch_rows)
    return [(start, min(start + size, batch_rows)) for start in range(0, batch_rows, size)]
