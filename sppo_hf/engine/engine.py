"""The engine of one converted model: its `forward`, and the step that it runs.

`Engine.forward` replaces the causal language model's `forward`. Calls with labels, and calls
without labels in training, run the sequence chunk by chunk (`ForwardStep`); all others go to the
original forward, so generation, caches and inference work as before. The result is an ordinary loss
on an ordinary autograd graph: the user calls `loss.backward()`, and DDP, FSDP2 and gradient scalers
work as usual.

Where the weights are is in `weight_placement`, and how a batch is planned in `plan_cache`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack  # type: ignore[import-not-found]
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput

from sppo_hf.attention.segments import BidirectionalSpan
from sppo_hf.config import SPPOConfig
from sppo_hf.engine.action_log import ActionLog, TraceFolder
from sppo_hf.engine.chunk_context import current_of
from sppo_hf.engine.chunk_runner import ChunkInputs, ChunkRunner
from sppo_hf.engine.cpu_heap import HeapWatch
from sppo_hf.engine.device_facts import as_current_device
from sppo_hf.engine.encoded_inputs import (
    EncodedInputs,
    as_inputs,
    encode,
    encoded_token_bytes,
    encoders,
)
from sppo_hf.engine.family_guard import check_router_loss
from sppo_hf.engine.foreign_code import check_foreign_code, check_rotary_hooks, check_spectral_norm
from sppo_hf.engine.forward_calls import BatchLayout, ForwardCall, read_call
from sppo_hf.engine.layer_kernels import (
    free_inputs_of_8_bit_layers,
    prepare_layers,
    restore_layers,
)
from sppo_hf.engine.logits import CollectedLogits, LogitsRequest
from sppo_hf.engine.loss import ChunkedLoss, ModelHead, RouterLoss, divide_loss, liger_tile
from sppo_hf.engine.mixer_kernels import check_mixer_kernels
from sppo_hf.engine.model_parts import (
    ModelParts,
    all_modules,
    are_sharded,
    check_adapters,
    check_layers,
    check_trainable,
    have_mixers,
    own_parameters,
    without_cached_weights,
)
from sppo_hf.engine.plan_cache import PlanCache, PlannedOffload, StepRows
from sppo_hf.engine.read_tensors import ReadTensors
from sppo_hf.engine.recompute import RandomState
from sppo_hf.engine.sequence_group import SequenceGroup, rank_token_counts, rank_tokens
from sppo_hf.engine.sliced_calls import CannotRunByLayer, NotTokenWise
from sppo_hf.engine.step_observer import Direction, StepObserver, StepTimer, release_failed_backward
from sppo_hf.engine.weight_placement import WeightPlacement
from sppo_hf.errors import ConfigError, SPPOError, UnsupportedModelError
from sppo_hf.offload.engine import OffloadEngine, OffloadStats
from sppo_hf.offload.host_memory import HostPoolFull
from sppo_hf.offload.weights import HostWeights
from sppo_hf.planning.chunk_bounds import Bounds, moved_out_of
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.tiers import TIERS, Tier
from sppo_hf.rules import format_bytes

# B batch rows, T tokens of the sequence, D model width, V vocabulary.


class Engine:
    """Runs one model chunk by chunk."""

    def __init__(
        self,
        parts: ModelParts,
        config: SPPOConfig,
        observer: StepObserver,
        original_forward: Callable[..., Any],
        *,
        group: SequenceGroup | None = None,
    ) -> None:
        """Prepare to run `parts` under `config`; changes nothing in the model.

        `observer` receives plans, units and records of steps; `group` are the ranks that share
        every sequence, None if this rank has whole sequences.
        """
        self.parts = parts
        self.config = config
        self.observer = observer
        self.original_forward = original_forward
        self.group = group
        self.enabled = True
        self.counters: dict[str, int] = {}
        self.logits_request: LogitsRequest | None = None
        """Logits that calls in evaluation collect; None outside of the Trainer's evaluation."""
        self.external_loss_name = ""
        """Name of what computes the loss from logits, for messages; "" if unknown."""
        self.head = ModelHead(parts, original_forward)
        self.planned_offload = PlannedOffload(config)
        self.plans = PlanCache(parts, config, self.planned_offload, group)
        self.traces = None if config.trace_dir is None else TraceFolder(config.trace_dir)
        """Writes the actions of the last step to files; None without `trace_dir`."""
        self.placement = WeightPlacement(
            parts, config, self.plans, self.planned_offload, observer, self.traces
        )
        self._warned: set[str] = set()
        self._checked_modules: list[weakref.ref[torch.nn.Module]] = []
        """The model's modules when they were checked."""
        self.modules_changed = False
        """Whether modules were added or replaced since the conversion."""
        self._kernels_checked = False
        self._has_run = False
        self._in_original_forward = False
        self._thread: int | None = None
        self._thread_lock = threading.Lock()
        self._last_timer: StepTimer | None = None
        """Of the last chunked forward, until its backward has ended. Not owned by the autograd
        graph alone: of one whose backward raised in its last unit, all that held it may be gone."""

    # -- the model's forward -----------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, in chunks if the call has labels or is in training.

        Raises:
            ConfigError: The batch or the settings cannot be run.
            UnsupportedModelError: The model cannot be trained exactly.
            BudgetError: No plan fits the memory budgets.
            SPPOError: Another thread runs the model, or torch.func transforms it.
        """
        if not self.enabled:
            return self.original_forward(*args, **kwargs)
        self._refuse_other_threads()
        if self.running is not None:
            return self.original_forward(*args, **kwargs)
        call = read_call(self.parts, self.original_forward, args, kwargs)
        training = self.parts.causal_lm.training and torch.is_grad_enabled()
        if not call.has_labels and (not training or call.uses_cache):
            return self._run_original(*args, **kwargs)
        call.refuse_unsupported(self.parts.name)
        if torch.is_grad_enabled():
            check_trainable(self.parts)
        check_layers(self.parts)
        check_router_loss(self.parts, call.router_loss)
        check_adapters(self.parts)
        with self._exclusive(call.device):
            self._check_kernels(call.device)
            output = self._run(call)
        # A classifier's own forward returns what it likes.
        is_whole = call.return_dict or not isinstance(output, ModelOutput)
        return output if is_whole else output.to_tuple()

    @torch.inference_mode(False)  # the first call may be an evaluation's; kernels are for training
    def _check_kernels(self, device: torch.device) -> None:
        """Check kernels and give them to the modules that take them, before the first step."""
        if not self._kernels_checked:
            free_inputs_of_8_bit_layers(self.parts)
            check_mixer_kernels(self.parts, device)
            prepare_layers(self.parts, self.config, device)
            self._kernels_checked = True

    def remember_modules(self, modules: Sequence[torch.nn.Module]) -> None:
        """Take `modules`, all of the model, as checked."""
        self._checked_modules = [weakref.ref(module) for module in modules]

    def _check_new_modules(self, modules: Sequence[torch.nn.Module]) -> None:
        """Check code of the user's own, if modules were added or replaced since it was checked."""
        check_spectral_norm(self.parts, modules)
        known = self._checked_modules
        if len(known) == len(modules) and all(
            ref() is module for ref, module in zip(known, modules, strict=True)
        ):
            return
        self.modules_changed = True
        check_rotary_hooks(self.parts)
        check_foreign_code(self.parts, one_chunk=self.config.one_chunk)
        self.remember_modules(modules)

    def _run_original(self, *args: Any, **kwargs: Any) -> Any:
        before, self._in_original_forward = self._in_original_forward, True
        try:
            with self.placement.loaded(backward_follows=False):
                return self.original_forward(*args, **kwargs)
        finally:
            self._in_original_forward = before

    def before_unchunked_layer(self, index: int) -> None:
        """Called before a decoder layer that runs outside of a chunked forward.

        Raises:
            ConfigError: The layer trains, and `forward` has never been called: a wrapper has stored
                the forward from before the conversion, so training would never be chunked.
        """
        if self._in_original_forward and self.weights is not None:
            self.weights.enter_layer(index)
        trains = self.parts.causal_lm.training and torch.is_grad_enabled()
        if self._in_original_forward or not trains:
            return
        if not any(p.requires_grad for p in self.parts.causal_lm.parameters()):
            return
        name, base = self.parts.name, type(self.parts.base).__name__
        seen = (
            f"layers of {name} run in training, but not through the forward that SPPO installed: "
            f"their {base} is called directly, or by a wrapper that stored the model's forward "
            "before it was converted (PEFT's AdaptionPrompt does)"
        )
        if self._has_run:
            self.warn_once("outside", f"{seen}. Such calls are not chunked.")
            return
        raise ConfigError(
            f"{seen}. SPPO would never be in use. Allowed: calls of {name} itself, or of a wrapper "
            f"made after the conversion. Remedy: where your own code (compute_loss, say) calls the "
            f"{base}, call the model; else call model = plugin.convert(model) before the model is "
            "wrapped (by get_peft_model, for example); or train without SPPO."
        )

    def _refuse_other_threads(self) -> None:
        if self._thread not in (None, threading.get_ident()):
            raise SPPOError(
                f"{self.parts.name} is running a forward in another thread. One thread at a time "
                "may call a model that SPPO has converted; give each thread a model of its own."
            )

    @contextlib.contextmanager
    def _exclusive(self, device: torch.device) -> Iterator[None]:
        """Context of a chunked forward on `device`, in which one thread may be at a time.

        A script may have moved its model to another GPU than the current one, which is then the
        current one here, as it is in autograd's thread.

        Raises:
            SPPOError: Another thread is in it, or torch.func transforms the call.
        """
        if peek_interpreter_stack() is not None:
            raise SPPOError(
                f"{self.parts.name} is converted by SPPO, whose backward torch.func.grad and other "
                "function transforms cannot run. Use loss.backward() or torch.autograd.grad, or "
                "revert the model."
            )
        with self._thread_lock:
            self._refuse_other_threads()
            self._thread = threading.get_ident()
        try:
            with as_current_device(device), without_cached_weights():
                yield
        finally:
            self._thread = None

    def _run(self, call: ForwardCall) -> Any:
        start_seconds = time.perf_counter()
        self._has_run = True
        release_failed_backward(self._last_timer)
        logits = self._requested_logits(call)
        layout = call.layout(all_positions=logits.whole or logits.reduce is not None)
        self.plans.correct(self.observer)
        rows, tokens, device = call.batch_rows, call.total_tokens, call.device
        self.placement.place(device)
        modules = all_modules(self.parts.causal_lm)
        self._check_new_modules(modules)
        if torch.is_grad_enabled():
            self.placement.update_trainable(device, own_parameters(modules))
        while True:
            plan = self.plan(
                *(rows, tokens, device),
                return_logits=logits.whole,
                router_loss=call.router_loss,
                encoded_token_bytes=encoded_token_bytes(call),
            )
            loss_tiles = self.check_plan(call, plan, whole_logits=bool(CollectedLogits(logits)))
            self.placement.place_as_planned(plan, device)
            random = None if self.plans.has_run(plan) else RandomState(device)
            try:
                step = ForwardStep(
                    *(self, call, layout, plan, logits, start_seconds),
                    modules=modules,
                    loss_tiles=loss_tiles,
                )
                self._last_timer = step.timer
                return step.run()
            except CannotRunByLayer as reason:
                if plan.order == "by_chunk":
                    raise UnsupportedModelError(
                        f"{self.parts.name} cannot run in parts: {reason}. Set "
                        "layer_tile_tokens=0, or train it without sppo_hf."
                    ) from reason
                self.placement.return_layers_to_device(device)
                self.plans.refuse_by_layer(str(reason))
            except NotTokenWise as reason:
                self.plans.refuse_tiles(str(reason))
            except (RuntimeError, HostPoolFull) as error:
                if random is None or not self._shrink_plan(plan, error, "forward"):
                    raise
            # After the except clause, whose error holds tensors of the failed forward. So do these.
            step = self._last_timer = None
            if random is not None:
                random.restore()
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def replan_after_failed_backward(self, error: RuntimeError | HostPoolFull) -> bool:
        """Plan with less memory from now on, if it ran out in the first backward of a plan.

        Returns:
            Whether to repeat the step, forward and backward. False if the forward had found
            gradients, to which the backward would have added.
        """
        timer = self._last_timer
        if timer is None or not timer.is_in_backward or self.plans.has_trained(timer.plan):
            return False
        if self.plans.has_gradients:
            return False
        return self._shrink_plan(timer.plan, error, "backward")

    def _shrink_plan(self, plan: Plan, error: Exception, direction: Direction) -> bool:
        """After memory ran out, lower that tier's budget; returns whether to run again."""
        # Ranks gather sharded weights, and exchange tokens of a shared sequence, in collectives, so
        # one rank cannot repeat a step by itself.
        has_collectives = self.parts.is_sharded() or self.group is not None
        tier: Tier = "host" if isinstance(error, HostPoolFull) else "device"
        if has_collectives or (tier == "device" and not is_out_of_memory(error)):
            return False
        before, after = plan.budgets.of(tier), self.plans.shrink(plan, tier)
        if before is None or after is None:
            return False
        warnings.warn(
            f"the {tier}'s memory ran out in the first {direction} of a plan "
            f"({str(error).splitlines()[0]}); this batch runs once more, planned with "
            f"{format_bytes(after)} instead of {format_bytes(before)}. If it happens again, set "
            f"{TIERS[tier].setting} below that.",
            stacklevel=2,
        )
        return True

    def check_plan(self, call: ForwardCall, plan: Plan, *, whole_logits: bool) -> int:
        """Refuse a plan that other ranks would wait for; here there are none.

        With `whole_logits` ranks that share a sequence compute those of all tokens.

        Returns:
            The number of tiles that the loss of each chunk has at least.
        """
        return 1

    @contextlib.contextmanager
    def refusing_together(self) -> Iterator[None]:
        """Context of what may refuse images after `check_plan`; here no rank waits for it."""
        yield

    def most_loss_tiles(self, call: ForwardCall, plan: Plan, *, whole_logits: bool) -> int:
        """The number of tiles of the chunk that has most of them on any rank that shares it."""
        tokens = self.most_loss_tokens(call, plan, whole_logits=whole_logits)
        return -(-tokens // plan.tile_tokens)

    def most_loss_tokens(self, call: ForwardCall, plan: Plan, *, whole_logits: bool) -> int:
        """Tokens, over all rows that run together, of the longest chunk on any such rank."""
        ranks = 1 if self.group is None or whole_logits else self.group.size
        tokens = max(max(rank_token_counts(end - start, ranks)) for start, end in plan.bounds)
        rows = max(end - start for start, end in call.row_groups(self.config))
        return rows * tokens

    def step_done(self, log: ActionLog | None, timer: StepTimer) -> None:
        """Called when a training step, forward and backward, has ended on the host."""
        if timer is self._last_timer:
            self._last_timer = None
        self.plans.step_done(timer)
        if self.traces is not None and log is not None:
            self.traces.keep_log(log)

    def _requested_logits(self, call: ForwardCall) -> LogitsRequest:
        """Return which logits this call collects."""
        request = self.logits_request
        if request is None or torch.is_grad_enabled():
            # A head of TRL's returns no logits.
            whole = self.config.return_logits and not call.head_arguments
            return LogitsRequest(whole=whole, requested_by="return_logits" if whole else "")
        if request.reduce is not None and call.aligned_labels is None:
            return LogitsRequest(whole=True, requested_by=request.requested_by)
        return request

    # -- decisions ---------------------------------------------------------------------------

    def plan(
        self,
        batch_rows: int,
        total_tokens: int,
        device: torch.device,
        *,
        return_logits: bool = False,
        router_loss: bool = False,
        encoded_token_bytes: tuple[int, int] = (0, 0),
    ) -> Plan:
        """The plan for batches of this shape; made and shown at the first call, then reused.

        The keywords are those of `PlanCache.get`.
        """
        if device.type == "cuda":
            self.plans.host_resident_bytes = self.placement.unpinned_host_bytes()
            pinned_bytes = 0 if self.weights is None else self.weights.pinned_gradient_bytes
            self.plans.pinned_gradient_bytes = pinned_bytes
        return self.plans.get(
            *(batch_rows, total_tokens, device, self.observer),
            return_logits=return_logits,
            router_loss=router_loss,
            encoded_token_bytes=encoded_token_bytes,
        )

    def shape(self) -> ModelShape:
        """The model's shape; see `PlanCache.shape`."""
        return self.plans.shape()

    @property
    def weights(self) -> HostWeights | None:
        """The host-resident weights; None while all weights are on the device."""
        return self.placement.weights

    @property
    def offload(self) -> OffloadEngine:
        """The offload engine, which exists once a batch was planned."""
        return self.planned_offload.engine

    @property
    def running(self) -> ChunkRunner | None:
        """The runner of the chunked forward that this thread is in; None outside of one."""
        context = current_of(self.parts)
        return None if context is None else context.runner

    def last_position(self) -> Tensor | None:
        """Largest position of the running sequence, `[1, 1]`; None if none runs."""
        context = current_of(self.parts)
        return None if context is None else context.last_position

    def chunked_loss(
        self,
        call: ForwardCall,
        plan: Plan,
        *,
        head_in_backward: bool,
        on_logits: Callable[[Tensor, slice], None] | None = None,
        min_tiles: int = 1,
    ) -> ChunkedLoss:
        """The standard loss of a call, summed over chunks; keywords are those of `ChunkedLoss`."""
        parts = self.parts
        return ChunkedLoss(
            self.head.logits,
            parts.head_parameters(),
            tile_tokens=plan.tile_tokens,
            ignore_index=call.ignore_index,
            on_logits=on_logits,
            liger=liger_tile(parts, self.head, call.device),
            head_in_backward=head_in_backward,
            sharded=[m for m in parts.head_modules() if hasattr(m, "set_reshard_after_backward")],
            reads=ReadTensors.of_module(parts.causal_lm, parts.base) if head_in_backward else None,
            min_tiles=min_tiles,
        )

    def report_to(self, observer: StepObserver) -> None:
        """Send reports to another observer from now on."""
        self.observer = self.placement.observer = observer

    def take_stats(self) -> OffloadStats:
        """Counters of the offload engine since the last call."""
        return self.planned_offload.take_stats()

    def close(self) -> None:
        """Wait for copies, free host memory, and restore the modules' own code."""
        if self.traces is not None:
            self.traces.poll()
        self.planned_offload.close()
        restore_layers(self.parts)
        self.placement.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        """A new engine for the copied model, with streams, slabs and plans of its own."""
        # In the memo before the model is copied, whose hooks refer to the engine.
        fresh = memo[id(self)] = Engine.__new__(type(self))
        Engine.__init__(
            fresh,
            copy.deepcopy(self.parts, memo),
            self.config,
            self.observer,
            copy.deepcopy(self.original_forward, memo),
            group=self.group,
        )
        fresh.enabled = self.enabled
        fresh.placement.copy_settings(self.placement)
        return fresh

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, for streams, slabs and hooks belong to this process.

        Raises:
            SPPOError: Always.
        """
        raise SPPOError(
            f"{self.parts.name} is converted by SPPO and cannot be pickled (torch.save(model), a "
            "process that is spawned with it). Save model.state_dict() or "
            "model.save_pretrained(folder), or call plugin.revert(model) before."
        )

    def warn_once(self, key: str, message: str) -> None:
        """Warn, unless a warning of this key was given before."""
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, stacklevel=2)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of a batch that pass the chunks together, before the next group does."""

    rows: tuple[int, int]
    """The first row, and one past the last."""
    plan: Plan
    """The step's plan, of which no chunk ends within `bidirectional`."""
    bidirectional: tuple[BidirectionalSpan, ...]
    """Tokens that see each other in both directions."""
    first_unit: int
    """Number of the group's first chunk in the log."""


@dataclass(eq=False)
class ForwardStep:
    """One call that runs in chunks, by one plan: its forward, until it returns the output."""

    engine: Engine
    call: ForwardCall
    layout: BatchLayout
    plan: Plan
    logits: LogitsRequest
    start_seconds: float
    _: KW_ONLY
    modules: Sequence[torch.nn.Module]
    loss_tiles: int = 1
    """Tiles that the loss of each chunk has at least."""

    def __post_init__(self) -> None:
        self._parts = self.engine.parts
        self._group = self.engine.group
        self._is_sharded = are_sharded(self.modules)
        """Whether FSDP2 shards the model."""
        # FSDP2 gathers weights for every chunk or group of rows then, for which all ranks wait: no
        # rank may leave out chunks of padding or without labels, which others do not have.
        by_chunk = self.plan.order == "by_chunk"
        several_groups = self.call.micro_batch_rows(self.engine.config) < self.call.batch_rows
        self._runs_all_chunks = self._is_sharded and (by_chunk or several_groups)
        self._has_states = have_mixers(self.modules)
        """Whether recurrent states are passed from chunk to chunk, beside K/V."""
        self._log: ActionLog | None = None
        """The step's actions, in training with `trace_dir`."""
        if self.engine.traces is not None:
            self.engine.traces.poll()
            self._log = ActionLog(self.call.device) if torch.is_grad_enabled() else None
        self.timer = StepTimer(
            self.engine.observer,
            self.plan,
            self.engine.shape(),
            device=self.call.device,
            take_stats=self.engine.take_stats,
            start_seconds=self.start_seconds,
            # Not a method of this object: the graph owns the timer, and would hold the inputs.
            on_step=functools.partial(self.engine.step_done, self._log),
            share=(0, 1)
            if self.engine.group is None
            else (self.engine.group.rank, self.engine.group.size),
        )
        self._heap: HeapWatch | None = None
        """Frees heap memory on a CPU."""
        self._encoded: EncodedInputs | None = None
        """The text decoder's inputs, if some are images or sound."""
        self._groups: list[RowGroup] = []

    def run(self) -> Any:
        """Run the layers, then head and loss; returns what the model's forward would.

        Raises:
            UnsupportedModelError: The call asks for a router loss, whose factors are not found.
        """
        engine, call, plan = self.engine, self.call, self.plan
        router_loss = RouterLoss.of_call(call)
        with engine.placement.loaded(backward_follows=torch.is_grad_enabled(), log=self._log):
            self._begin()
            standard = self._parts.causal_lm.loss_function is ForCausalLMLoss
            in_tiles = call.has_labels and standard and not call.head_arguments
            # Else head and loss get the hidden states of whole rows, padding included.
            step = (self._step_rows(group, skip_padding=in_tiles) for group in self._groups)
            engine.plans.warm_up_attention(step, call.device, engine.observer)
            self._heap = HeapWatch.of_step(plan, self._parts.causal_lm.parameters())
            output: Any
            if in_tiles:
                output = self._loss(router_loss)
            else:
                if not call.head_arguments:
                    self._warn_of_full_logits(self._loss_owner())
                output = self._run_full_head(router_loss)
            if router_loss is not None:
                if self._group is not None:
                    router_loss.sum_over_ranks(self._group.sum_over_ranks)
                output = router_loss.add_to_output(output, router_loss.value())
        self.timer.forward_done(output)
        engine.plans.forward_done(plan)
        return output

    def _begin(self) -> None:
        """Run the encoders of images and sound, and find the groups of rows."""
        call, encoded = self.call, None
        # In sharded encoders other ranks would wait for this one, and could not be told.
        if call.encoder_inputs and are_sharded(encoders(self._parts)):
            encoded = encode(call)
        with self.engine.refusing_together():
            if call.encoder_inputs:
                seen, output_class = encoded or encode(call)
                self._encoded = EncodedInputs(as_inputs(call, seen), output_class)
            self._groups = self._row_groups()

    def _row_groups(self) -> list[RowGroup]:
        """Groups of rows that run one after the other: one, or as `micro_batch_size` says.

        Where images of several rows leave no place between chunks, rows run one by one.

        Raises:
            ConfigError: A chunk cannot hold a row's image, or not those of all rows, where rows
                cannot run one by one: ranks have agreed on the number of groups, or weights are on
                the host.
        """
        at_once = self._is_sharded or self.engine.weights is not None
        found: list[tuple[tuple[int, int], Plan]] = []
        for start, end in self.call.row_groups(self.engine.config):
            try:
                found.append(((start, end), self._plan_of(start, end)))
            except ConfigError:
                if end - start == 1 or at_once:
                    raise
                each = range(start, end)
                found += [((row, row + 1), self._plan_of(row, row + 1)) for row in each]
        return [
            RowGroup(rows, plan, self._bidirectional(*rows), index * plan.num_chunks)
            for index, (rows, plan) in enumerate(found)
        ]

    def _bidirectional(self, start: int, end: int) -> tuple[BidirectionalSpan, ...]:
        return () if self._encoded is None else self._encoded.inputs.spans(start, end)

    def _plan_of(self, start: int, end: int) -> Plan:
        """The plan, of which no chunk ends where tokens of rows `[start, end)` see each other.

        It is one plan for all batches of this shape, wherever their images are.
        """
        plan = self.plan
        spans = ((span.start, span.end) for span in self._bidirectional(start, end))
        bounds = moved_out_of(plan.bounds, spans)
        if bounds == plan.bounds:
            return plan
        moved = replace(plan, bounds=bounds)
        if self._runs_all_chunks:  # ranks have agreed on the number of the loss's tiles
            whole = bool(CollectedLogits(self.logits))
            longest = self.engine.most_loss_tokens(self.call, moved, whole_logits=whole)
            tile_tokens = max(plan.tile_tokens, -(-longest // self.loss_tiles))
            moved = replace(moved, tile_tokens=tile_tokens)
        return moved

    def _step_rows(self, group: RowGroup, *, skip_padding: bool) -> StepRows:
        """What runs of a group, for kernels that build a plan for each shape."""
        used = self.layout.used_tokens if skip_padding and not self._runs_all_chunks else 0
        used = used or self.call.total_tokens
        chunks = range(sum(start < used for start, _ in group.plan.bounds))
        start, end = group.rows
        spans = self.layout.spans(start, end)
        rows = (group.plan, end - start, spans, chunks)
        return StepRows(*rows, self._group, group.bidirectional)

    def _loss(self, router_loss: RouterLoss | None) -> CausalLMOutputWithPast:
        """Run the layers, and head and standard loss chunk by chunk, with the requested logits."""
        call, groups, logits = self.call, self._groups, self.logits
        assert call.shift_labels is not None
        if logits.whole and logits.requested_by:
            self._warn_of_full_logits(logits.requested_by)
        labels = call.shift_labels if call.aligned_labels is None else call.aligned_labels
        # In training, logits are part of the graph, so that a loss may be computed from them. They
        # are computed beside the tiles of the loss, which have their gradients before backward.
        in_graph = logits.whole and torch.is_grad_enabled()
        collected = CollectedLogits(logits)
        # Collected logits are those of whole rows, on every rank.
        sharing = None if collected else self._group
        head_in_backward = self._is_sharded or self._parts.head_is_hooked()
        loss = self.engine.chunked_loss(
            call,
            max((group.plan for group in groups), key=lambda plan: plan.tile_tokens),
            head_in_backward=head_in_backward,
            on_logits=collected.add if collected and not in_graph else None,
            min_tiles=self.loss_tiles,
        )
        totals: list[Tensor] = []
        for group in groups:
            plan = group.plan
            counts = labelled_chunks(self.layout, plan.bounds)
            if self._runs_all_chunks:
                counts = set(range(plan.num_chunks))
            # By layer the layers' backward comes after the loss's of all chunks.
            frees = counts if plan.order == "by_chunk" else {min(counts)}
            collected.begin_group()
            rows = slice(*group.rows)
            labels_BT = call.shift_labels[rows]
            # Not if the head runs right before the layers' backward: its logits are at the peak.
            backward_next = group is groups[-1] and not head_in_backward and not in_graph
            hidden = self._hidden(
                group,
                backward_next=backward_next,
                whole_chunks=sharing is None,
                router_loss=router_loss,
            )
            for chunk, hidden_BCD in hidden:
                if chunk in counts:
                    start, end = plan.bounds[chunk]
                    labels_BC = chunk_labels(labels_BT, (start, end), sharing, call.ignore_index)
                    final = group is groups[-1] and chunk == max(counts)
                    collected.begin_chunk(labels[rows, start:end])
                    totals.append(loss.add(hidden_BCD, labels_BC, last=final, frees=chunk in frees))
                    if in_graph:
                        collected.add(
                            self.engine.head.logits(hidden_BCD).flatten(0, 1), slice(None)
                        )
        total = torch.stack(totals).sum()
        total = total if sharing is None else sharing.sum_over_ranks(total)
        count = (call.shift_labels != call.ignore_index).sum().to(total.device)
        value = divide_loss(total, count, call.divisor(count))
        whole = collected.finish(call.total_tokens)
        kept = None if whole is None else call.select_kept_logits(whole)
        if kept is None and logits.reduce is not None:
            # The Trainer reads the number of tokens from it when it gathers outputs of ranks.
            kept = torch.zeros(call.batch_rows, call.total_tokens, device=call.device)
        return CausalLMOutputWithPast(loss=value, logits=kept)

    def _run_full_head(self, router_loss: RouterLoss | None) -> Any:
        """Run the layers in chunks, then the model's own head and loss over the whole sequence."""
        call = self.call
        hidden_BTD = self._whole_hidden(router_loss)
        return self.engine.head.run(hidden_BTD, **call.loss_arguments, **call.head_arguments)

    def _whole_hidden(self, router_loss: RouterLoss | None) -> Tensor:
        """Hidden states of all rows and tokens, `[B, T, D]`; no copy is left beside them."""
        rows = []
        for group in self._groups:
            chunks = self._hidden(
                group, skip_padding=False, whole_chunks=True, router_loss=router_loss
            )
            rows.append(torch.cat([hidden_BCD for _, hidden_BCD in chunks], dim=1))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _loss_owner(self) -> str:
        """Name of what computes a loss from full logits in place of the standard loss."""
        if self.call.has_labels:
            loss = self._parts.causal_lm.loss_function
            return f"the loss of the model's own ({getattr(loss, '__name__', type(loss).__name__)})"
        return self.engine.external_loss_name or "whoever called the model without labels"

    def _warn_of_full_logits(self, requested_by: str) -> None:
        call, vocab = self.call, self._parts.text_config.vocab_size
        size = call.batch_rows * call.total_tokens * vocab
        more = ", several times that while their gradient is computed"
        outside = torch.is_grad_enabled() and requested_by != "return_logits"
        self.engine.warn_once(
            f"whole logits: {requested_by}",
            f"logits of the whole sequence are made, asked for by {requested_by}: "
            f"{call.batch_rows} x {call.total_tokens} x {vocab} values, "
            f"{format_bytes(4 * size)} in float32"
            f"{more if outside else ''}.",
        )

    def _hidden(
        self,
        group: RowGroup,
        *,
        skip_padding: bool = True,
        backward_next: bool = False,
        whole_chunks: bool,
        router_loss: RouterLoss | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (chunk, hidden states `[B, C, D]`) of a group of rows.

        If ranks share the sequence, C counts this rank's tokens, or all with `whole_chunks`.
        """
        engine, call, layout, plan = self.engine, self.call, self.layout, group.plan
        inputs, encoded = self._inputs(), self._encoded
        runner = ChunkRunner(
            self._parts,
            plan,
            rows=layout.spans(*group.rows),
            last_position=inputs.position_ids.max().view(1, 1),
            # Not a method of this object either: layers that run again in backward hold it.
            choose_backend=functools.partial(
                engine.plans.choose_backend, varied=bool(group.bidirectional)
            ),
            counters=engine.counters,
            offload=engine.offload,
            log=self._log,
            first_unit=group.first_unit,
            weights=engine.weights,
            group=self._group,
            heap=self._heap,
            has_states=self._has_states,
            is_sharded=self._is_sharded,
            root=None if encoded is None else self._parts.decoder,
        )
        inputs = inputs.rows(*group.rows)
        skip_padding &= layout.used_tokens > 0 and not self._runs_all_chunks
        stop = layout.used_tokens if skip_padding else call.total_tokens
        chunks = runner.run(inputs, stop_token=stop, timer=self.timer)
        for chunk, output in chunks:
            engine.head.output_class = type(output) if encoded is None else encoded.output_class
            hidden_BCD = output.last_hidden_state
            if router_loss is not None:
                router_loss.add(
                    output.router_logits, call.attention_mask, group.rows, runner.rank_tokens(chunk)
                )
            self.timer.watch_backward(chunk, hidden_BCD)
            if whole_chunks and self._group is not None:
                start, end = plan.bounds[chunk]
                hidden_BCD = self._group.gather_tokens(hidden_BCD, end - start)
            yield chunk, hidden_BCD
        if backward_next:  # the last chunk's loss is done, so its logits are freed
            runner.start_backward()

    def _inputs(self) -> ChunkInputs:
        """Inputs of whole rows that chunks are slices of: tokens, or their embeddings."""
        if self._encoded is not None:
            return self._encoded.inputs
        call, embedded = self.call, self._parts.embed_sequence(self.call.tokens)
        tokens = call.tokens
        if embedded is not None:
            others = {name: x for name, x in call.tokens.items() if name != "input_ids"}
            tokens = {"inputs_embeds": embedded, **others}
        return ChunkInputs(tokens, call.positions(), call.constants | call.router_switch)


_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "outside pytorch's allocator",
    "alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED
    "device_allocation_failed",  # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device's memory ran out.

    cuDNN and cuBLAS take memory from the driver; their errors are plain `RuntimeError`s.
    """
    message = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or any(
        text in message for text in _OUT_OF_MEMORY_TEXTS
    )


def chunk_labels(
    labels_BT: Tensor, bounds: tuple[int, int], group: SequenceGroup | None, ignore_index: int
) -> Tensor:
    """Labels of the tokens of a chunk that this rank holds, `[B, C]`."""
    start, end = bounds if group is None else rank_tokens(*bounds, group.rank, group.size)
    if start == end:  # see [Note: a rank without tokens] in sequence_group
        return labels_BT.new_full((len(labels_BT), 1), ignore_index)
    return labels_BT[:, start:end]


def labelled_chunks(layout: BatchLayout, bounds: Bounds) -> set[int]:
    """Chunks whose loss must be computed: those with labels, or all if there are no labels."""
    used = [i for i, (s, _) in enumerate(bounds) if s < max(layout.used_tokens, 1)]
    labelled = {i for i in used if layout.has_label(*bounds[i])}
    return labelled or set(used)
