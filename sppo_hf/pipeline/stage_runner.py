"""Units of the stages on this rank: forward and backward of one (stage, micro-batch, chunk).

Each unit's backward is called by itself, with the gradient of the unit's output, and returns the
gradient of its input. Chunks of a micro-batch run forward in order and backward in reverse, as
gradients of K/V require; between micro-batches and stages any order will do.

Nothing here knows ranks, messages or schedules: tensors come in and go out.

[Note: backward in two halves] Zero-bubble schedules fill waiting time with weight gradients
(arXiv 2401.10241). While `DeferWeights` is entered, every `linear` on a trained parameter becomes
an autograd node whose backward computes the gradient of its input only, and adds what the weight's
gradient needs to a `WeightGradients`. Everything else that trains (norms, biases of other
operations, experts' grouped matmuls) gets its gradient in the first half, which is exact as well
and costs little.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sppo_hf.engine.chunk_runner import ChunkInputs, ChunkRunner
from sppo_hf.engine.engine import labelled_chunks
from sppo_hf.engine.loss import ModelHead, RouterLoss
from sppo_hf.engine.sequence_group import SequenceGroup
from sppo_hf.engine.stage_messages import SHARED_KV, MessageLayout, UnpackedMessage
from sppo_hf.engine.stages import StagedModel
from sppo_hf.engine.unit_graph import InputGradient, StateEnd, UnitGraph, begin_graph
from sppo_hf.errors import SPPOError
from sppo_hf.pipeline.stage_plans import PreparedStep
from sppo_hf.schedule.actions import KIND_NAMES, Kind
from sppo_hf.schedule.messages import ChunkRun

# B batch rows, C tokens of a chunk, T tokens of the sequence, D model width, W width of a message.


class WeightGradients:
    """Deferred weight gradients of one unit's backward, in order."""

    def __init__(self) -> None:
        self._deferred: list[tuple[Tensor, Tensor, Tensor, Tensor | None]] = []

    def add(self, x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Defer the gradients of `x @ weight.T + bias`, whose output has gradient `grad`."""
        self._deferred.append((x, grad, weight, bias))

    def __len__(self) -> int:
        """Return the number of deferred matmuls."""
        return len(self._deferred)

    @torch.no_grad()
    def run(self) -> None:
        """Add the deferred gradients to `.grad`, last layers first, and free their inputs."""
        self._deferred.reverse()
        while self._deferred:
            x, grad, weight, bias = self._deferred.pop()
            grad_MO = grad.reshape(-1, grad.shape[-1])
            if weight.requires_grad:
                x_MI = x.reshape(-1, x.shape[-1]).to(grad.dtype)
                _accumulate(weight, grad_MO.T @ x_MI)
            if bias is not None and bias.requires_grad:
                _accumulate(bias, grad_MO.sum(0))


def _accumulate(parameter: Tensor, grad: Tensor) -> None:
    grad = grad.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad += grad


class DeferWeights(TorchFunctionMode):
    """Context in which linear layers defer their weights' gradients, to `store()` in backward."""

    def __init__(self, store: Callable[[], WeightGradients]) -> None:
        super().__init__()
        self._store = store

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace `linear` where a parameter is trained."""
        kwargs = kwargs or {}
        if func is F.linear and torch.is_grad_enabled():
            x, weight, bias = _linear_arguments(*args, **kwargs)
            if isinstance(weight, nn.Parameter) and weight.requires_grad:
                return _Linear.apply(x, weight, bias, self._store)
        return func(*args, **kwargs)


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        store: Callable[[], WeightGradients],
    ) -> Tensor:
        ctx.save_for_backward(x)
        # Not by save_for_backward: saved-tensor hooks are for activations, not parameters.
        ctx.weight, ctx.bias, ctx.store = weight, bias, store
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        ctx.store().add(x.detach(), grad, ctx.weight, ctx.bias)
        dx = (grad @ ctx.weight.to(grad.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, None


AddLoss = Callable[[Tensor, slice, slice, SequenceGroup | None], Tensor]
"""Takes a chunk's hidden states `[B, C, D]`, its rows of the batch, its tokens, and the ranks that
share these; returns the loss to start backward from, shape `[]`."""


@dataclass(slots=True)
class _ActiveRun:
    """One micro-batch on one stage between its first forward and its last backward.

    Where units change ranks, only one run of its chunks.
    """

    runner: ChunkRunner
    inputs: ChunkInputs
    chunks: range
    group: SequenceGroup | None
    """The ranks that share the chunks; None for one rank."""
    embedded: Tensor | None = None
    """`[B, T, D]`, with the embedding's graph, where all tokens are embedded at once."""
    embedded_grad: Tensor | None = None
    next_chunk: int = 0
    """Chunk of the next forward."""
    units: dict[int, UnitGraph] = field(default_factory=dict)
    """Units that wait for their backward, by chunk."""


@dataclass(eq=False)
class StageRunner:
    """Runs all units of this rank's stages in one step."""

    staged: StagedModel
    prepared: PreparedStep
    _: KW_ONLY
    messages: MessageLayout
    """Layout of what stages send to the next."""
    make_runner: Callable[..., ChunkRunner]
    """Makes the chunk runner of (stage, micro-batch), given ChunkRunner's varying keywords."""
    head: ModelHead
    """The model's head; `output_class` is set to the class of the base model's outputs."""
    add_loss: AddLoss | None
    """Computes the loss of a chunk; None where the last stage is not here."""
    group_of: Callable[[ChunkRun], SequenceGroup | None]
    """Returns the ranks that share the tokens of a run's chunks; None for one rank. Each run has
    K/V stores of its own."""
    router_loss: RouterLoss | None = None
    """Takes the routers' logits of every unit; None where they have no loss."""
    make_router_gradient: Callable[[], Tensor] | None = None
    """Returns the gradient of a unit's sums of router probabilities, `[E]`. Called once, by all
    ranks together; see `before_backward`."""

    def __post_init__(self) -> None:
        self._splits = self.prepared.step.splits_backward
        self._labelled = labelled_chunks(self.prepared.layout, self.prepared.bounds)
        self._router_gradient: Tensor | None = None
        self._active: dict[tuple[int, int, int], _ActiveRun] = {}
        """Runs by stage, micro-batch and first chunk."""
        self._deferred: dict[tuple[int, int, int], WeightGradients] = {}
        """Weight gradients of units whose second half of backward has not run, by stage,
        micro-batch and chunk."""
        self._current_deferred = WeightGradients()
        self.received: UnpackedMessage | None = None
        """What the first layer of the running stage gets; None for its own arguments. Models scale
        embeddings or add positions to them before their first layer, which must not happen again to
        hidden states that come from another stage."""
        self.last_output: tuple[Tensor, Mapping[Any, Any]] | None = None
        """What the last layer of the running stage returned, and K/V that layers share."""
        self.losses: list[Tensor] = []
        """Detached sums of the losses of the last stage's chunks."""

    # -- forward -----------------------------------------------------------------------------

    def forward(
        self, stage: int, micro_batch: int, chunk: int, received: Tensor | None
    ) -> Tensor | None:
        """Run a unit forward; chunks come in order.

        `received` is `[B, C, W]` from the stage before; None on the first stage.

        Returns:
            `[B, C, W]`, detached, for the stage after; None on the last stage.

        Raises:
            SPPOError: The chunk is out of order.
        """
        run = self._get_or_begin(stage, micro_batch, chunk)
        if chunk != run.next_chunk:
            raise _out_of_order("forward", stage, micro_batch, chunk, run.next_chunk)
        run.next_chunk += 1
        rows = self.prepared.rows[micro_batch]
        hidden, stage_input, router_sums = self._run_layers(stage, run, chunk, received, rows=rows)
        unit = UnitGraph.of(hidden, stage_input, received)
        unit.router = router_sums
        output: Tensor | None = None
        if stage < self.staged.cut.num_stages - 1:
            output = hidden.detach()
        elif self.add_loss is not None and chunk in self._labelled:
            with self.staged.running(stage):
                tokens = slice(*self.prepared.bounds[chunk])
                unit.loss = self.add_loss(hidden, slice(*rows), tokens, run.group)
            self.losses.append(unit.loss.detach())
        if torch.is_grad_enabled():
            run.units[chunk] = unit
        if chunk == run.chunks[-1]:
            run.runner.end_forward()
            if not torch.is_grad_enabled():
                del self._active[self._key(stage, micro_batch, chunk)]
        return output

    def chunk_runner(self, stage: int, micro_batch: int, chunk: int) -> ChunkRunner:
        """Return the chunk runner, with its K/V, of a unit's run; made if it is not there."""
        return self._get_or_begin(stage, micro_batch, chunk).runner

    def _key(self, stage: int, micro_batch: int, chunk: int) -> tuple[int, int, int]:
        return stage, micro_batch, self.prepared.step.runs[stage, chunk].chunks.start

    def _get_or_begin(self, stage: int, micro_batch: int, chunk: int) -> _ActiveRun:
        key = self._key(stage, micro_batch, chunk)
        if key not in self._active:
            run = self.prepared.step.runs[stage, chunk]
            self._active[key] = self._begin_run(stage, micro_batch, run)
        return self._active[key]

    def _begin_run(self, stage: int, micro_batch: int, run: ChunkRun) -> _ActiveRun:
        call, group = self.prepared.call, self.group_of(run)
        start, end = self.prepared.rows[micro_batch]
        positions = call.positions()
        runner = self.make_runner(
            stage,
            micro_batch,
            rows=self.prepared.layout.spans(start, end),
            last_position=positions.max().view(1, 1),
            around_layers=self._around_layers if self._splits else contextlib.nullcontext,
            group=group,
        )
        constants = call.constants | call.router_switch
        inputs = ChunkInputs(call.tokens, positions, constants).rows(start, end)
        embedded = None
        if stage == 0:
            with self.staged.running(stage):
                embedded = self.staged.parts.embed_sequence(inputs.tokens)
        if embedded is not None:
            others = {name: x for name, x in inputs.tokens.items() if name != "input_ids"}
            inputs = replace(inputs, tokens={"inputs_embeds": embedded.detach(), **others})
        chunks = run.chunks
        return _ActiveRun(runner, inputs, chunks, group, embedded, next_chunk=chunks.start)

    def _around_layers(self) -> contextlib.AbstractContextManager[object]:
        return DeferWeights(lambda: self._current_deferred)

    def _run_layers(
        self,
        stage: int,
        run: _ActiveRun,
        chunk: int,
        received: Tensor | None,
        *,
        rows: tuple[int, int],
    ) -> tuple[Tensor, InputGradient | None, Tensor | None]:
        """Run the stage's layers over a chunk.

        Returns:
            The output for the next stage `[B, C, W]`, or from the last to the head `[B, C, D]`;
            where the gradient of the stage's input will be; and what `RouterLoss.add` returned.
        """
        inputs = run.inputs.chunk(*run.runner.run_tokens(chunk))
        stage_input = None
        if received is not None:
            for name in ("input_ids", "inputs_embeds"):
                inputs.pop(name, None)
            message, stage_input = begin_graph(received)
            parts = self.messages.unpack(self.staged.cut.layers[stage].start, message)
            # Only its shape and dtype are used: layers get another one, see `StageRunner.received`.
            placeholder_BCD = parts.hidden if parts.hidden.dim() == 3 else parts.hidden[0]
            inputs["inputs_embeds"] = placeholder_BCD.detach()
            inputs |= parts.arguments
            self.received = parts
        elif run.embedded is not None:
            inputs["inputs_embeds"], stage_input = begin_graph(inputs["inputs_embeds"])
        try:
            with self.staged.running(stage):
                output = run.runner.run_chunk(chunk, inputs)
            last_output = self.last_output
        finally:
            self.received = self.last_output = None
            own_inputs = self.staged.take_layer_inputs(stage)
        self.head.output_class = type(output)
        router_sums = None
        if self.router_loss is not None:
            mask, tokens = self.prepared.call.attention_mask, run.runner.rank_tokens(chunk)
            router_sums = self.router_loss.add(output.router_logits, mask, rows, tokens)
        if stage == self.staged.cut.num_stages - 1:
            return output.last_hidden_state, stage_input, router_sums
        assert last_output is not None, "the last layer of a stage ran"
        end = self.staged.cut.layers[stage].stop
        hidden, shared = last_output
        return self.messages.pack(end, hidden, own_inputs, shared), stage_input, router_sums

    # -- copies ------------------------------------------------------------------------------

    def copy(self, kind: Kind, stage: int, micro_batch: int, chunk: int) -> None:
        """Carry out an action on a unit's saved activations.

        "D" ends their offload, which layers began as each ran: compute waits until at most one unit
        is being copied. "S" starts writing them to a tier behind the host, "L" reading all that the
        unit's backward needs from there, and "H" copying it to the device.

        Raises:
            SPPOError: The unit does not wait for a backward.
        """
        run = self._active.get(self._key(stage, micro_batch, chunk))
        if run is None or chunk not in run.units:
            due = None if run is None else max(run.units, default=None)
            raise _out_of_order(KIND_NAMES[kind], stage, micro_batch, chunk, due)
        if kind == "D":
            run.runner.settle()
        elif kind == "S":
            run.runner.poll()
        elif kind == "L":
            run.runner.read_ahead(chunk)
        else:
            run.runner.prefetch(chunk)

    def end_stream(self, stage: int, micro_batch: int, chunk: int) -> None:
        """End the offload of a unit's K/V, or of their gradients.

        Compute waits until at most what the plan allows is being copied.
        """
        run = self._active.get(self._key(stage, micro_batch, chunk))
        if run is not None:  # else its last backward ran, and nothing of it is offloaded
            run.runner.settle()

    # -- backward ----------------------------------------------------------------------------

    def before_backward(self) -> None:
        """Let all ranks sum the router loss's statistics of all forwards, once.

        Called before a rank waits for its first gradient, which depends on another rank's backward.
        """
        if self.make_router_gradient is not None:
            self._router_gradient = self.make_router_gradient()
            self.make_router_gradient = None

    def backward(
        self, stage: int, micro_batch: int, chunk: int, grad: Tensor | None, *, scale: Tensor
    ) -> Tensor | None:
        """Run a unit's backward; chunks come in reverse.

        Where schedules split it, all but the weights of linear layers. `grad` is `[B, C, W]` from
        the stage after; None on the last one, where `scale`, `[]`, is the gradient of the loss's
        sum.

        Returns:
            `[B, C, W]` for the stage before; None on the first stage.

        Raises:
            SPPOError: The chunk is out of order, or forwards of this micro-batch are missing.
        """
        key = self._key(stage, micro_batch, chunk)
        run = self._active.get(key)
        due = None
        if run is not None and run.next_chunk == run.chunks.stop:
            due = max(run.units, default=None)
        if run is None or chunk != due:
            raise _out_of_order("backward", stage, micro_batch, chunk, due)
        unit = run.units.pop(chunk)
        if self._splits:
            self._current_deferred = WeightGradients()
            self._deferred[stage, micro_batch, chunk] = self._current_deferred
        states = [end for end in run.runner.state_ends(chunk) if end.grad is not None]
        with self.staged.running(stage):  # the head may be recomputed
            self._run_backward(unit, grad, scale, states)
        input_grad = None
        if stage > 0:
            assert unit.input_gradient is not None, "a later stage received its input"
            input_grad = unit.input_gradient.grad
            input_grad = unit.received_zeros() if input_grad is None else input_grad
        elif run.embedded is not None:
            self._collect_embedding_gradient(run, chunk, unit)
        if chunk == run.chunks.start:
            del self._active[key]
        return input_grad

    def _run_backward(
        self, unit: UnitGraph, grad: Tensor | None, scale: Tensor, states: list[StateEnd]
    ) -> None:
        if unit.end is None:
            return  # nothing up to here is trained
        # Forward may run under autocast; a backward never does.
        with torch.autocast(unit.device.type, enabled=False):
            ends = [end.end for end in states]
            grads = [end.grad for end in states]
            if unit.loss is not None and unit.loss.requires_grad:
                ends.append(get_gradient_edge(unit.loss))
                grads.append(scale.to(unit.loss))
            else:
                # Also without labels: later chunks may have left gradients for its K/V.
                ends.append(unit.end)
                grads.append(unit.zeros() if grad is None else grad)
            if unit.router is not None and unit.router.requires_grad:
                ends.append(get_gradient_edge(unit.router))
                grads.append(self._router_gradient)
            torch.autograd.backward(ends, grads)

    def _collect_embedding_gradient(self, run: _ActiveRun, chunk: int, unit: UnitGraph) -> None:
        """Collect the gradient of all tokens' embeddings; the last backward backpropagates it."""
        assert run.embedded is not None, "tokens were embedded once"
        assert unit.input_gradient is not None, "and chunks are slices of that"
        if run.embedded_grad is None:
            run.embedded_grad = torch.zeros_like(run.embedded)
        start, end = run.runner.run_tokens(chunk)
        if unit.input_gradient.grad is not None:
            run.embedded_grad[:, start:end] = unit.input_gradient.grad
        if chunk == run.chunks.start:
            with torch.autocast(run.embedded.device.type, enabled=False):
                run.embedded.backward(run.embedded_grad)

    def backward_weights(self, stage: int, micro_batch: int, chunk: int) -> None:
        """Run the second half of a unit's backward.

        Raises:
            SPPOError: The first half has not run.
        """
        deferred = self._deferred.pop((stage, micro_batch, chunk), None)
        if deferred is None:
            raise SPPOError(
                f"weight gradients of stage {stage}, micro-batch {micro_batch}, chunk {chunk} were "
                "asked for before its backward. The schedule is wrong."
            )
        deferred.run()

    @property
    def is_finished(self) -> bool:
        """Whether no unit waits for a backward or its second half."""
        return not self._active and not self._deferred


def _out_of_order(
    direction: str, stage: int, micro_batch: int, chunk: int, due: int | None
) -> SPPOError:
    expected = "none is due yet" if due is None else f"chunk {due} is due"
    return SPPOError(
        f"{direction} of stage {stage}, micro-batch {micro_batch} was asked for with chunk {chunk},"
        f" but {expected}: chunks go forward in order, and back in reverse once all are through. "
        "The schedule is wrong."
    )


def first_layer_hook(
    get_runner: Callable[[], StageRunner | None],
) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]:
    """Make a pre-hook (with keywords) for first layers of stages; see `StageRunner.received`."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runner = get_runner()
        received = None if runner is None else runner.received
        if received is None:
            return None
        if received.shared:
            kwargs[SHARED_KV].update(received.shared)
        if args:
            return (received.hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": received.hidden}

    return hook


def last_layer_hook(get_runner: Callable[[], StageRunner | None]) -> Callable[..., None]:
    """Make a hook (with keywords) for last layers of stages; see `StageRunner.last_output`."""

    def hook(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        runner = get_runner()
        if runner is None:
            return
        hidden = output[0] if isinstance(output, tuple) else output
        runner.last_output = hidden, kwargs.get(SHARED_KV) or {}

    return hook
