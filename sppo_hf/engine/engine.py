"""The engine of one converted model: its `forward`, its plans, and what it tells observers.

`Engine.forward` stands in for the causal language model's `forward`. With labels (or in training
without them) it runs the sequence chunk by chunk; every other call goes straight to the untouched
model, so generation, caches and inference stay what they were. It returns an ordinary loss on an
ordinary autograd graph: `loss.backward()` is the user's, and so are DDP, FSDP2 and gradient
scalers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack  # type: ignore[import-not-found]
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.action_log import ActionLog, TraceFolder
from sppo_hf.engine.batch_layout import BatchLayout
from sppo_hf.engine.chunk_context import current_of
from sppo_hf.engine.chunk_runner import ChunkInputs, ChunkRunner
from sppo_hf.engine.cpu_heap import HeapWatch
from sppo_hf.engine.device_facts import device_facts, model_shape
from sppo_hf.engine.family_guard import check_router_loss
from sppo_hf.engine.forward_calls import ForwardCall, read_call
from sppo_hf.engine.layer_kernels import check_mixer_kernels, prepare_layers, restore_layers
from sppo_hf.engine.logits import LogitsCollector, LogitsRequest
from sppo_hf.engine.loss import ChunkedLoss, ModelHead, RouterLoss, divide_loss, liger_tile
from sppo_hf.engine.offload_holder import OffloadHolder
from sppo_hf.engine.plan_cache import PlanCache, StepRows, trainable_mask
from sppo_hf.engine.recompute import RandomState
from sppo_hf.engine.sequence_group import SequenceGroup, rank_tokens
from sppo_hf.engine.sliced_calls import CannotRunByLayer, NotTokenWise
from sppo_hf.engine.step_observer import Direction, StepObserver, StepTimer, release_failed_backward
from sppo_hf.engine.structure import ModelParts, check_adapters, check_layers, check_trainable
from sppo_hf.errors import ConfigError, SPPOError, UnsupportedModelError
from sppo_hf.offload.engine import OffloadEngine, OffloadStats
from sppo_hf.offload.weights import HostWeights, can_be_host_resident
from sppo_hf.planning.choices import Placement, read_budgets, read_placements
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.memory import standing_device_bytes
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.plan import Plan
from sppo_hf.rules import format_bytes
from sppo_hf.schedule.actions import Action

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
        """Prepare to run `parts` under `config`; touches nothing yet.

        Args:
            parts: The model.
            config: The settings.
            observer: Is told about plans, units and records.
            original_forward: The model's own.
            group: The ranks that share every sequence; None where this one has whole sequences.
        """
        self.parts = parts
        self.config = config
        self.observer = observer
        self.original_forward = original_forward
        self.group = group
        self.enabled = True
        self.counters: dict[str, int] = {}
        self.logits_request: LogitsRequest | None = None
        """What calls in evaluation do with logits while it is set."""
        self.external_loss_name = ""
        """Who computes the loss from logits, as a script names it; "" where nobody said."""
        self.head = ModelHead(parts, original_forward)
        self.offload_holder = OffloadHolder(config)
        self.plans = PlanCache(parts, config, self.offload_holder, group)
        self.traces = None if config.trace_dir is None else TraceFolder(config.trace_dir)
        """Keeps what the last step did, where the settings ask for it."""
        self._log: ActionLog | None = None
        self._heap: HeapWatch | None = None
        """Of the running step."""
        self.weights: HostWeights | None = None
        """What rests on the host, once it was put there."""
        self._placed = config
        """The settings, with weights and optimizer where they are now."""
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int | None] = (
            weakref.WeakKeyDictionary()
        )
        """Those whose states go where the weights go; what these take, see `_resting_bytes`, or
        None where an update may have changed it."""
        self._warned: set[str] = set()
        self._trained_when_placed = b""
        """Which parameters trained when weights were put on the host, one byte each."""
        self._kernels_tried = False
        self._has_run = False
        self._passes_on = False
        self._thread: int | None = None
        self._thread_lock = threading.Lock()
        # Weakly: the graph owns it, and its backward may never come.
        self._last_watch: Callable[[], StepTimer | None] = lambda: None

    # -- the model's forward -----------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stand-in for the model's forward.

        Raises:
            ConfigError: If the batch or the settings cannot be run (see the message).
            UnsupportedModelError: If the model cannot be trained exactly.
            BudgetError: If a budget cannot hold what it must.
            SPPOError: If another thread runs the model, or torch.func transforms it.
        """
        if not self.enabled:
            return self.original_forward(*args, **kwargs)
        self._refuse_other_threads()
        if self.running is not None:
            return self.original_forward(*args, **kwargs)
        call = read_call(self.parts, self.original_forward, args, kwargs)
        training = self.parts.causal_lm.training and torch.is_grad_enabled()
        if not call.has_labels and (not training or call.uses_cache):
            return self._pass_on(*args, **kwargs)
        call.refuse_unsupported(self.parts.name)
        if torch.is_grad_enabled():
            check_trainable(self.parts)
        check_layers(self.parts)
        check_router_loss(self.parts)
        check_adapters(self.parts)
        with self._alone():
            self._try_kernels(call.device)
            output = self._run(call)
        return output if call.return_dict else output.to_tuple()

    def _try_kernels(self, device: torch.device) -> None:
        """Before the first step: see `check_mixer_kernels`."""
        if not self._kernels_tried:
            check_mixer_kernels(self.parts, device)
            self._kernels_tried = True

    def _pass_on(self, *args: Any, **kwargs: Any) -> Any:
        before, self._passes_on = self._passes_on, True
        try:
            with self._weights_there(backward_follows=False):
                return self.original_forward(*args, **kwargs)
        finally:
            self._passes_on = before

    def before_unchunked_layer(self, index: int) -> None:
        """A decoder layer is about to run, and no sequence of ours is running.

        Raises:
            ConfigError: It trains, and `forward` has never been called: somebody kept the one from
                before the conversion, so all of training would go on without chunks.
        """
        if self._passes_on and self.weights is not None:
            self.weights.enter_layer(index)
        trains = self.parts.causal_lm.training and torch.is_grad_enabled()
        if self._passes_on or not trains:
            return
        if not any(p.requires_grad for p in self.parts.causal_lm.parameters()):
            return
        name, base = self.parts.name, type(self.parts.base).__name__
        seen = (
            f"layers of {name} run in training, but not through the forward that SPPO put there: "
            f"their {base} is called directly, or by a wrapper that stored the model's forward "
            "before it was converted (PEFT's AdaptionPrompt does)"
        )
        if self._has_run:
            self._warn_once("outside", f"{seen}. Such calls are not chunked.")
            return
        raise ConfigError(
            f"{seen}. SPPO would never be in use. Allowed: calls of {name} itself, or of a wrapper "
            "made after the conversion. Remedy: model = plugin.convert(model) before the model is "
            "wrapped (by get_peft_model, for one); or train without SPPO."
        )

    def _refuse_other_threads(self) -> None:
        if self._thread not in (None, threading.get_ident()):
            raise SPPOError(
                f"{self.parts.name} is running a forward in another thread. One thread at a time "
                "may call a model that SPPO has converted; give each thread a model of its own."
            )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Context of a chunked forward: in one thread, and of no function transform.

        Raises:
            SPPOError: Another thread is in one, or torch.func is.
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
            yield
        finally:
            self._thread = None

    def _run(self, call: ForwardCall) -> ModelOutput:
        began = time.perf_counter()
        if not self._has_run:
            prepare_layers(self.parts, self.config, call.device)
        self._has_run = True
        release_failed_backward(self._last_watch())
        logits = self._wanted_logits(call)
        layout = call.layout(all_positions=logits.whole or logits.reduce is not None)
        self.plans.correct(self.observer)
        rows, tokens, device = call.batch_rows, call.total_tokens, call.device
        self.place_weights(device)
        self._notice_trained(device)
        while True:
            plan = self.plan(rows, tokens, device, return_logits=logits.whole)
            self._rest_as_planned(plan, device)
            random = None if self.plans.has_run(plan) else RandomState(device)
            try:
                return self._run_plan(call, layout, plan, logits, began)
            except CannotRunByLayer as reason:
                if plan.order == "by_chunk":
                    raise UnsupportedModelError(
                        f"{self.parts.name} cannot run in parts: {reason}. Set "
                        "layer_tile_tokens=0, or train it without sppo_hf."
                    ) from reason
                self._stop_resting_layers(device)
                self.plans.refuse_by_layer(str(reason))
            except NotTokenWise as reason:
                self.plans.refuse_tiles(str(reason))
            except RuntimeError as error:
                if random is None or not self._plan_with_less(plan, error, "forward"):
                    raise
            # Here, where the error and all that it holds of the failed forward are gone.
            if random is not None:
                random.restore()
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def replan_after_failed_backward(self, error: RuntimeError) -> bool:
        """Plan with less memory from now on, if it ran out in the first backward of a plan.

        Returns:
            Whether the step is worth a second try: the forward must run again with the backward.
        """
        watch = self._last_watch()
        if watch is None or not watch.is_in_backward or self.plans.has_trained(watch.plan):
            return False
        return self._plan_with_less(watch.plan, error, "backward")

    def _plan_with_less(self, plan: Plan, error: RuntimeError, direction: Direction) -> bool:
        """Whether what raised `error` is worth a second try with less memory."""
        # Sharded weights are gathered by all ranks together, and tokens of a shared sequence are
        # exchanged, so one cannot begin again by itself.
        together = self.parts.is_sharded() or self.group is not None
        if not is_out_of_memory(error) or together:
            return False
        before, after = plan.budgets.device, self.plans.shrink(plan)
        if before is None or after is None:
            return False
        warnings.warn(
            f"the device's memory ran out in the first {direction} of a plan "
            f"({str(error).splitlines()[0]}); this batch runs once more, planned with "
            f"{format_bytes(after)} instead of {format_bytes(before)}. If it happens again, set "
            "device_memory below that.",
            stacklevel=2,
        )
        return True

    def _run_plan(
        self,
        call: ForwardCall,
        layout: BatchLayout,
        plan: Plan,
        logits: LogitsRequest,
        began_seconds: float,
    ) -> ModelOutput:
        watch = StepTimer(
            self.observer,
            plan,
            self.shape(),
            device=call.device,
            took=self.take_stats,
            began_seconds=began_seconds,
            on_step=self._step_done,
            share=(0, 1) if self.group is None else (self.group.rank, self.group.size),
        )
        if self.traces is not None:
            self.traces.poll()
            self._log = ActionLog(call.device) if torch.is_grad_enabled() else None
        self._last_watch = weakref.ref(watch)
        router_loss = RouterLoss.of(self.parts)
        if router_loss is not None and (call.head_arguments or not call.has_labels):
            raise UnsupportedModelError(
                f"{self.parts.name}: config.output_router_logits=True adds a loss to that of the "
                f"labels, and {self._who_computes_the_loss(call)} computes another one. Set "
                "model.config.output_router_logits = False."
            )
        used = layout.used_tokens or call.total_tokens
        chunks = range(sum(start < used for start, _ in plan.bounds))
        step = (
            StepRows(plan, end - start, layout.spans(start, end), chunks, self.group)
            for start, end in call.row_groups(self.config)
        )
        self.plans.warm_up_attention(step, call.device, self.observer)
        with self._weights_there(backward_follows=torch.is_grad_enabled()):
            self._heap = HeapWatch.of_step(plan, self.parts.causal_lm.parameters())
            if call.head_arguments:
                output = self._whole_head(call, layout, plan, watch)
            elif call.has_labels and self.parts.causal_lm.loss_function is ForCausalLMLoss:
                output = self._loss(call, layout, plan, watch, logits, router_loss)
                if router_loss is not None:
                    if self.group is not None:
                        router_loss.sum_over_ranks(self.group.sum_over_ranks)
                    output = router_loss.add_to_output(output)
            else:
                self._warn_of_whole_logits(call, self._who_computes_the_loss(call))
                output = self._whole_head(call, layout, plan, watch)
        watch.forward_done(output)
        self.plans.ran(plan)
        return output

    def _step_done(self, watch: StepTimer) -> None:
        self.plans.step_done(watch)
        log, self._log = self._log, None
        if self.traces is not None and log is not None:
            self.traces.keep_log(log)

    def _wanted_logits(self, call: ForwardCall) -> LogitsRequest:
        """What this call does with logits."""
        request = self.logits_request
        if request is None or torch.is_grad_enabled():
            whole = self.config.return_logits
            return LogitsRequest(whole=whole, requested_by="return_logits" if whole else "")
        if request.reduce is not None and call.aligned_labels is None:
            return LogitsRequest(whole=True, requested_by=request.requested_by)
        return request

    def _loss(
        self,
        call: ForwardCall,
        layout: BatchLayout,
        plan: Plan,
        watch: StepTimer,
        logits: LogitsRequest,
        router_loss: RouterLoss | None,
    ) -> CausalLMOutputWithPast:
        assert call.shift_labels is not None
        if logits.whole and logits.requested_by:
            self._warn_of_whole_logits(call, logits.requested_by)
        labels = call.shift_labels if call.aligned_labels is None else call.aligned_labels
        # Those of training are part of the graph, so that a loss may be made of them; they are
        # computed beside the tiles of the loss, whose gradients are there before its backward.
        in_graph = logits.whole and torch.is_grad_enabled()
        whole = LogitsCollector() if logits.whole else None
        reduced = LogitsCollector(logits.reduce) if logits.reduce is not None else None
        collectors = [collector for collector in (whole, reduced) if collector is not None]

        def on_logits(logits_MV: Tensor, tile: slice) -> None:
            for collector in collectors:
                collector.add(logits_MV, tile)

        # Logits that somebody collects are those of whole rows, on every rank.
        sharing = None if collectors else self.group
        head_in_backward = self.parts.is_sharded() or self.parts.head_is_hooked()
        loss = ChunkedLoss(
            self.head.logits,
            self.parts.head_parameters(),
            tile_tokens=plan.tile_tokens,
            ignore_index=call.ignore_index,
            on_logits=on_logits if collectors and not in_graph else None,
            liger=liger_tile(self.parts, self.head, call.device),
            head_in_backward=head_in_backward,
            reads=self.parts.head_reads() if head_in_backward else None,
        )
        counts = labelled_chunks(layout, plan.bounds)
        groups = list(call.row_groups(self.config))
        last = (groups[-1], max(counts))
        totals: list[Tensor] = []
        for group in groups:
            for collector in collectors:
                collector.begin_group()
            labels_BT = call.shift_labels[group[0] : group[1]]
            # Not where a head runs before the layers' backward: its logits are at the peak.
            backward_next = group == groups[-1] and not head_in_backward and not in_graph
            hidden = self._hidden(
                call,
                layout,
                plan,
                watch,
                group,
                backward_next=backward_next,
                whole_chunks=sharing is None,
                router_loss=router_loss,
            )
            for chunk, hidden_BCD in hidden:
                if chunk in counts:
                    start, end = plan.bounds[chunk]
                    labels_BC = chunk_labels(labels_BT, (start, end), sharing, call.ignore_index)
                    final = (group, chunk) == last
                    for collector in collectors:
                        collector.begin_chunk(labels[group[0] : group[1], start:end])
                    totals.append(loss.add(hidden_BCD, labels_BC, last=final))
                    if in_graph:
                        on_logits(self.head.logits(hidden_BCD).flatten(0, 1), slice(None))
        total = torch.stack(totals).sum()
        total = total if sharing is None else sharing.sum_over_ranks(total)
        count = (call.shift_labels != call.ignore_index).sum().to(total.device)
        value = divide_loss(total, count, call.divisor(count))
        if reduced is not None:
            logits.reduced, logits.failure = reduced.result(), reduced.failure
            logits.logits_tokens = call.total_tokens
            logits.vocab_size, logits.logits_dtype = reduced.vocab_size, reduced.logits_dtype
        kept = None if whole is None else call.select_kept_logits(whole.result())
        if kept is None and reduced is not None:
            # Whoever collects outputs of several ranks learns the number of tokens from it.
            kept = torch.zeros(call.batch_rows, call.total_tokens, device=call.device)
        return CausalLMOutputWithPast(loss=value, logits=kept)

    def _whole_head(
        self, call: ForwardCall, layout: BatchLayout, plan: Plan, watch: StepTimer
    ) -> ModelOutput:
        """Chunked layers, then the head (and loss) that is there over the whole sequence."""
        rows = []
        for group in call.row_groups(self.config):
            chunks = self._hidden(
                call, layout, plan, watch, group, skip_padding=False, whole_chunks=True
            )
            rows.append(torch.cat([hidden_BCD for _, hidden_BCD in chunks], dim=1))
        return self.head.run(torch.cat(rows), **call.loss_arguments, **call.head_arguments)

    def _who_computes_the_loss(self, call: ForwardCall) -> str:
        """Who asks for whole logits in place of the standard loss."""
        if call.has_labels:
            loss = self.parts.causal_lm.loss_function
            return f"the loss of the model's own ({getattr(loss, '__name__', type(loss).__name__)})"
        return self.external_loss_name or "whoever called the model without labels"

    def _warn_of_whole_logits(self, call: ForwardCall, requested_by: str) -> None:
        vocab = self.parts.text_config.vocab_size
        size = call.batch_rows * call.total_tokens * vocab
        more = ", several times that while their gradient is computed"
        outside = torch.is_grad_enabled() and requested_by != "return_logits"
        self._warn_once(
            f"whole logits: {requested_by}",
            f"logits of the whole sequence are made, asked for by {requested_by}: "
            f"{call.batch_rows} x {call.total_tokens} x {vocab} values, "
            f"{format_bytes(4 * size)} in float32"
            f"{more if outside else ''}.",
        )

    def _hidden(
        self,
        call: ForwardCall,
        layout: BatchLayout,
        plan: Plan,
        watch: StepTimer,
        group: tuple[int, int],
        *,
        skip_padding: bool = True,
        backward_next: bool = False,
        whole_chunks: bool = False,
        router_loss: RouterLoss | None = None,
    ) -> Any:
        """Yield (chunk, hidden states `[B, C, D]`) of a group of rows.

        Of chunks that ranks share they are those of this rank's tokens, unless `whole_chunks`.
        """
        positions = call.positions()
        sequence = ChunkRunner(
            self.parts,
            plan,
            rows=layout.spans(*group),
            last_position=positions.max().view(1, 1),
            choose_backend=self.plans.choose_backend,
            counters=self.counters,
            offload=self.offload,
            log=self._log,
            first_unit=plan.num_chunks * (group[0] // call.micro_batch_rows(self.config)),
            weights=self.weights,
            group=self.group,
            heap=self._heap,
        )
        constants = dict(call.constants)
        if router_loss is not None:
            constants["output_router_logits"] = True
        slices = ChunkInputs(self._inputs(call), positions, constants).rows(*group)
        stop = layout.used_tokens if skip_padding and layout.used_tokens else call.total_tokens
        chunks = sequence.run(slices, stop_token=stop, watch=watch)
        for chunk, output in chunks:
            self.head.output_class = type(output)
            hidden_BCD = output.last_hidden_state
            if router_loss is not None:
                router_loss.add(
                    output.router_logits, call.attention_mask, group, sequence.rank_tokens(chunk)
                )
            watch.watch_backward(chunk, hidden_BCD)
            if whole_chunks and self.group is not None:
                start, end = plan.bounds[chunk]
                hidden_BCD = self.group.gather_tokens(hidden_BCD, end - start)
            yield chunk, hidden_BCD
        if backward_next:  # the last chunk's loss is done, so its logits are gone
            sequence.start_backward()

    def _inputs(self, call: ForwardCall) -> dict[str, Tensor]:
        """What is cut along the tokens."""
        embedded = self.parts.embed_sequence(call.tokens)
        if embedded is None:
            return call.tokens
        others = {name: x for name, x in call.tokens.items() if name != "input_ids"}
        return {"inputs_embeds": embedded, **others}

    # -- decisions ---------------------------------------------------------------------------

    def plan(
        self,
        batch_rows: int,
        total_tokens: int,
        device: torch.device,
        *,
        return_logits: bool = False,
    ) -> Plan:
        """The plan for batches of this shape; made, shown and remembered the first time."""
        if device.type == "cuda":
            self.plans.host_resident_bytes = self._resting_bytes()
            locked = 0 if self.weights is None else self.weights.pinned_gradient_bytes
            self.plans.pinned_gradient_bytes = locked
        return self.plans.get(
            batch_rows, total_tokens, device, self.observer, return_logits=return_logits
        )

    def shape(self) -> ModelShape:
        """The model's shape, read once."""
        return self.plans.shape()

    @property
    def offload(self) -> OffloadEngine:
        """The offload engine; there once a batch was planned."""
        return self.offload_holder.engine

    @property
    def running(self) -> ChunkRunner | None:
        """What runs chunks in this model now, in this thread; None where nothing does."""
        context = current_of(self.parts)
        return None if context is None else context.runner

    def last_position(self) -> Tensor | None:
        """Largest position of the running sequence, `[1, 1]`; None when none runs."""
        context = current_of(self.parts)
        return None if context is None else context.last_position

    def take_stats(self) -> OffloadStats:
        """What the offload engine did since the last time this was asked."""
        return self.offload_holder.take_stats()

    def close(self) -> None:
        """Wait for copies under way, give the host memory back and modules their own code."""
        if self.traces is not None:
            self.traces.poll()
        self.offload_holder.close()
        restore_layers(self.parts)
        weights, self.weights = self.weights, None
        if weights is not None:
            weights.close()

    # -- weights on the host -------------------------------------------------------------------

    def place_weights(self, device: torch.device) -> None:
        """Put what the settings say to rest on the host, and everything else on `device`.

        Does nothing the second time, nor where nothing is to rest. Trained weights rest where their
        optimizer is; adapters on frozen layers that rest there go with them.
        """
        if self.weights is None:
            self._place_weights(device)

    def _notice_trained(self, device: torch.device) -> None:
        """Plan for the parameters that train, and place anew if these are others than then."""
        if not torch.is_grad_enabled():
            return
        self.plans.notice_trained()
        if self.weights is not None and self._trained_when_placed != self._which_train():
            self._place_weights(device)

    def _which_train(self) -> bytes:
        return trainable_mask(self.parts.causal_lm.parameters())

    def _place_weights(self, device: torch.device) -> None:
        rests = host_resident_predicate(self._placed)
        if rests is None:
            if self.weights is not None:
                self.weights.close()
                self.weights = None
            return
        if self.weights is not None:
            self.weights.release()
        layers, others = host_resident_parameters(self.parts, rests)
        resting = {id(p) for group in [*layers, others] for p in group}
        for module in self.parts.causal_lm.modules():
            for parameter in module.parameters(recurse=False):
                if id(parameter) not in resting and parameter.device != device:
                    parameter.data = parameter.data.to(device)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.device != device:
                    module._buffers[name] = buffer.to(device)
        copier = self.offload_holder.copier(device)
        self._trained_when_placed = self._which_train()
        self.weights = HostWeights(
            layers,
            others,
            copier=copier,
            keep_device_copies=self._placed.weights != "host",
            locker=copier.page_locker if self.config.use_pin_memory else None,
            previous=self.weights,
            progress=self.observer.on_host_memory,
        )
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                if self.weights.has(parameter):
                    state.update(
                        (name, value.to("cpu"))
                        for name, value in state.items()
                        if isinstance(value, Tensor)
                    )
            self._optimizers[optimizer] = None

    def register_optimizer(
        self, optimizer: torch.optim.Optimizer, states_bytes: int | None, why_not: str = ""
    ) -> None:
        """An optimizer will update the model: what settings leave open may rest on the host.

        Args:
            optimizer: Its states follow the weights.
            states_bytes: What it will keep; None where that is not known.
            why_not: Why it must find its weights on the device, as a part of a sentence.
        """
        if optimizer in self._optimizers:
            return
        self._optimizers[optimizer] = None
        known = self._optimizers  # and not the engine, which the optimizer would keep alive
        # A wrapper that skips Optimizer.__init__ may lack some; what it loads counts after a step.
        with contextlib.suppress(AttributeError):
            optimizer.register_step_post_hook(lambda one, *_: known.update({one: None}))
            optimizer.register_load_state_dict_post_hook(lambda one: known.update({one: None}))
        if states_bytes is not None:
            self.plans.optimizer_bytes = states_bytes + (self.plans.optimizer_bytes or 0)
        if len(self._optimizers) == 1 or why_not:
            self.plans.device_only_reason = why_not

    def move_to_host_if_too_large(self, device: torch.device) -> None:
        """Put on the host what settings leave open and no length leaves room for on the device."""
        if self.plans.device_only_reason or self.weights is not None:
            return
        facts = device_facts(device, self.config)
        budget = read_budgets(self.config, facts).device
        if budget is None or len(read_placements(self.config, facts)) == 1:
            return
        whole = replace(model_shape(self.parts, device), optimizer_bytes=self.plans.optimizer_bytes)
        asked, *others = read_placements(self.config, facts, adapters=whole.lora is not None)

        def least_bytes(places: Placement) -> int:
            shape = whole.with_host_residents(weights=places.weights, optimizer=places.optimizer)
            return standing_device_bytes(shape, device.type)

        if others and least_bytes(asked) > budget:
            fitting = (places for places in others if least_bytes(places) <= budget)
            self._rest(next(fitting, others[-1]), device)

    def _rest_as_planned(self, plan: Plan, device: torch.device) -> None:
        """Put on the host what settings leave open and a plan has there."""
        resting = plan.shape.host_resident
        if resting is None or not plan.training:
            return
        if self.weights is None or self.weights.keep_device_copies != resting.stays:
            places = Placement(weights=not resting.stays, optimizer=resting.gradient_bytes > 0)
            self._rest(places, device, plan)

    def _rest(self, places: Placement, device: torch.device, plan: Plan | None = None) -> None:
        placed = places.set_in(self.config)
        if not places.weights:
            # They may follow where longer rows ask for it.
            placed = placed.replace(weights=self.config.weights)
        self._placed = placed
        self.plans.rest(placed, plan)
        self._place_weights(device)

    def _stop_resting_layers(self, device: torch.device) -> None:
        """Bring layers' weights back that were put on the host for a walk layer by layer."""
        if self.config.weights == "auto" and self._placed.weights == "host":
            self._placed = self._placed.replace(weights="device")
            self.plans.rest(self._placed)
            self._place_weights(device)

    def _resting_bytes(self) -> int:
        """Host memory that gradients and optimizer states of weights at rest take, if not pinned.

        A plan counts it, so the host's free memory, which is without it, is not all there is. (The
        weights themselves may be a file's, and are counted twice where they are not pinned.)
        """
        if self.weights is None:
            return 0
        total = sum(tensor.nbytes for tensor in self.weights.gradients if not tensor.is_pinned())
        for optimizer, known_bytes in list(self._optimizers.items()):
            if known_bytes is None:
                # Every forward asks, and states are many.
                known_bytes = self._optimizers[optimizer] = self._states_bytes(optimizer)
            total += known_bytes
        return total

    def _states_bytes(self, optimizer: torch.optim.Optimizer) -> int:
        """Host memory that an optimizer's states of weights at rest take, if not pinned."""
        assert self.weights is not None, "weights rest"
        states = (
            value
            for parameter, state in optimizer.state.items()
            if self.weights.has(parameter)
            for value in state.values()
            if isinstance(value, Tensor) and value.device.type == "cpu"
        )
        return sum(value.nbytes for value in states if not value.is_pinned())

    def begin_update(self) -> None:
        """The optimizer's step begins: what rests on the host is there, and whole."""
        if self.weights is not None:
            # A forward whose loss was dropped has left weights on the device.
            self.weights.move_to_host()
            if self.traces is not None:
                self.traces.begin_update()

    def end_update(self) -> None:
        """The optimizer's step has ended."""
        if self.weights is not None and self.traces is not None:
            self.traces.end_update()

    @contextlib.contextmanager
    def _weights_there(self, *, backward_follows: bool) -> Iterator[None]:
        """Context of a forward: weights that rest on the host come when they are used."""
        if self.weights is None:
            yield
            return
        log = self._log
        self.weights.on_fetch = None if log is None else functools.partial(_note_weights, log)
        self.weights.start_forward()
        try:
            yield
        except BaseException:
            self.weights.move_to_host()
            raise
        if not backward_follows:
            self.weights.move_to_host()

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        """A fresh engine for the copied model; streams, slabs and plans are made anew."""
        fresh = memo[id(self)] = Engine.__new__(type(self))  # first: the layers' hooks refer to us
        Engine.__init__(
            fresh,
            copy.deepcopy(self.parts, memo),
            self.config,
            self.observer,
            copy.deepcopy(self.original_forward, memo),
            group=self.group,
        )
        fresh.enabled = self.enabled
        fresh._placed = self._placed
        fresh.plans.rest(self._placed)
        return fresh

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, which would need streams, slabs and hooks of this process.

        Raises:
            SPPOError: Always.
        """
        raise SPPOError(
            f"{self.parts.name} is converted by SPPO and cannot be pickled (torch.save(model), a "
            "process that is spawned with it). Save model.state_dict() or "
            "model.save_pretrained(folder), or call plugin.revert(model) before."
        )

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, stacklevel=2)


def _note_weights(log: ActionLog, layer: int, backward: bool) -> None:
    log.note(Action("P", 0, 0, layer, int(backward)))


Rests = Callable[[torch.nn.Parameter], bool]
"""Whether a parameter of a decoder layer rests on the host."""


def host_resident_predicate(config: SPPOConfig) -> Rests | None:
    """Which parameters of layers rest on the host; None where none do."""
    frozen, trained = config.host_resident
    if not frozen and not trained:
        return None
    return lambda parameter: trained if parameter.requires_grad else frozen


def host_resident_parameters(
    parts: ModelParts, rests: Rests
) -> tuple[list[list[torch.nn.Parameter]], list[torch.nn.Parameter]]:
    """Parameters that rest on the host: by decoder layer, and trained ones of all the rest."""
    owners: dict[int, set[int]] = {}
    for index, layer in enumerate(parts.layers):
        for parameter in layer.parameters():
            owners.setdefault(id(parameter), set()).add(index)
    layers: list[list[torch.nn.Parameter]] = [[] for _ in parts.layers]
    others: list[torch.nn.Parameter] = []
    for parameter in parts.causal_lm.parameters():
        of = owners.get(id(parameter), set())
        if not can_be_host_resident(parameter) or not rests(parameter):
            continue
        if len(of) == 1:
            layers[next(iter(of))].append(parameter)
        elif parameter.requires_grad or of:
            others.append(parameter)
    return layers, others


_RAN_OUT = ("out of memory", "outside pytorch's allocator", "alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device's memory ran out, in PyTorch's allocator or beside it.

    cuDNN and cuBLAS take memory from the driver, and their errors are plain `RuntimeError`s.
    """
    said = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or any(words in said for words in _RAN_OUT)


def chunk_labels(
    labels_BT: Tensor, bounds: tuple[int, int], group: SequenceGroup | None, ignore_index: int
) -> Tensor:
    """Labels of the tokens of a chunk whose hidden states are here."""
    start, end = bounds if group is None else rank_tokens(*bounds, group.rank, group.size)
    if start == end:  # see [Note: a rank without tokens] in sequence_group
        return labels_BT.new_full((len(labels_BT), 1), ignore_index)
    return labels_BT[:, start:end]


def labelled_chunks(layout: BatchLayout, bounds: Bounds) -> set[int]:
    """Chunks whose loss must be computed: those with labels, or all if there is no label at all."""
    used = [i for i, (s, _) in enumerate(bounds) if s < max(layout.used_tokens, 1)]
    labelled = {i for i in used if layout.has_label(*bounds[i])}
    return labelled or set(used)
