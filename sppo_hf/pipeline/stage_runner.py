"""Units of the stages that are here: forward and backward of one (stage, micro-batch, chunk).

Each unit's backward is asked for by itself, with the gradient of what the unit gave on, and returns
the gradient of what it received. Chunks of a micro-batch go forward in order and back in reverse,
as gradients of keys and values demand; between micro-batches and stages any order will do.

Nothing here knows ranks, messages or schedules: tensors come in and go out.

[Note: backward in two halves] Zero-bubble schedules fill waiting time with weight gradients
(arXiv 2401.10241). While a `WeightGradients` is entered, every `linear` on a trained parameter
becomes an autograd node whose backward computes the gradient of its input and notes down what the
weight's needs. Everything else that trains (norms, biases of other operations, experts' grouped
products) gets its gradient in the first half, which is exact as well and costs little.
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

from sppo_hf.engine.batch_layout import BatchLayout
from sppo_hf.engine.chunk_runner import ChunkInputs, ChunkRunner
from sppo_hf.engine.forward_calls import ForwardCall
from sppo_hf.engine.loss import ModelHead, RouterLoss
from sppo_hf.engine.sequence_group import SequenceGroup
from sppo_hf.engine.stages import (
    SHARED_KV,
    InputGradient,
    MessageLayout,
    StagedModel,
    StateEnd,
    UnitGraph,
    UnpackedMessage,
    enter,
)
from sppo_hf.errors import SPPOError, UnsupportedModelError
from sppo_hf.planning.chunk_bounds import Bounds


class WeightGradients:
    """Weight gradients that are due, in order; one object per unit of backward."""

    def __init__(self) -> None:
        self._due: list[tuple[Tensor, Tensor, Tensor, Tensor | None]] = []

    def add(self, x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Note a product `x @ weight.T + bias` whose output has gradient `grad`."""
        self._due.append((x, grad, weight, bias))

    def __len__(self) -> int:
        """Products that are due."""
        return len(self._due)

    @torch.no_grad()
    def run(self) -> None:
        """Compute what is due and add it to `.grad`, last layers first, letting go as it goes."""
        self._due.reverse()
        while self._due:
            x, grad, weight, bias = self._due.pop()
            grad_MO = grad.reshape(-1, grad.shape[-1])
            if weight.requires_grad:
                x_MI = x.reshape(-1, x.shape[-1]).to(grad.dtype)
                _accumulate(weight, grad_MO.T @ x_MI)
            if bias is not None and bias.requires_grad:
                _accumulate(bias, grad_MO.sum(0))


class DeferWeights(TorchFunctionMode):
    """Context in which linear layers leave their weights' gradients to `store()`.

    Args:
        store: Returns where to note what is due, when backward runs.
    """

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
        # Parameters are not saved tensors here: they are no activations, and no frame's business.
        ctx.weight, ctx.bias, ctx.store = weight, bias, store
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        ctx.store().add(x.detach(), grad, ctx.weight, ctx.bias)
        dx = (grad @ ctx.weight.to(grad.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, None


def _accumulate(parameter: Tensor, grad: Tensor) -> None:
    grad = grad.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad += grad


MakeSequence = Callable[..., ChunkRunner]
"""Makes the sequence of (stage, micro-batch); takes Sequence's keywords that vary."""

AddLoss = Callable[[Tensor, slice, slice, SequenceGroup | None], Tensor]
"""Takes a chunk's hidden states `[B, C, D]`, which rows of the batch they are, which tokens, and
who shares these; returns what backward starts from, shape `[]`."""

RunOf = Callable[[int, int], tuple[range, SequenceGroup | None]]
"""Of (stage, chunk): the chunks around it that the same ranks run, and these, if they are several;
keys and values of each such run are apart."""


@dataclass(slots=True)
class _MicroBatch:
    """One micro-batch on one stage; where units change ranks, a run of its chunks."""

    sequence: ChunkRunner
    slices: ChunkInputs
    chunks: range
    """Those that run on it."""
    group: SequenceGroup | None
    """The ranks that share them."""
    embedded: Tensor | None = None
    """`[B, T, D]`, with the embedding's graph, where tokens are embedded once."""
    embedded_grad: Tensor | None = None
    due_chunk: int = 0
    """The chunk whose forward comes next."""
    units: dict[int, UnitGraph] = field(default_factory=dict)


@dataclass(eq=False)
class StageRunner:
    """All units of the stages of this rank in one step."""

    staged: StagedModel
    call: ForwardCall
    layout: BatchLayout
    _: KW_ONLY
    messages: MessageLayout
    """How stages pack what they give on."""
    bounds: Bounds
    """The chunks that run."""
    rows: list[tuple[int, int]]
    """Half-open rows of each micro-batch."""
    make_sequence: MakeSequence
    """Makes the state of one micro-batch on one stage."""
    head: ModelHead
    """Is told the class of the base model's outputs."""
    add_loss: AddLoss | None
    """Ends the forward of a chunk; None where the last stage is not here."""
    labelled: frozenset[int]
    """Chunks whose loss is computed."""
    run_of: RunOf
    """See `RunOf`."""
    split: bool = False
    """Whether backward comes in two halves."""
    router_loss: RouterLoss | None = None
    """Is given the routers' logits of every unit; None where they have no loss."""
    make_router_gradient: Callable[[], Tensor] | None = None
    """Returns the gradient of a unit's sums of router probabilities, `[E]`; called once, by all
    ranks together, see `before_backward`."""

    def __post_init__(self) -> None:
        self._router_gradient: Tensor | None = None
        self._running: dict[tuple[int, int, int], _MicroBatch] = {}
        """By stage, micro-batch and first chunk of a run."""
        self._due: dict[tuple[int, int, int], WeightGradients] = {}
        self._now = WeightGradients()
        self._received: UnpackedMessage | None = None
        self._given: tuple[Tensor, Mapping[Any, Any]] | None = None
        self.losses: list[Tensor] = []
        """Detached sums of the losses of the last stage's chunks."""

    # -- forward -----------------------------------------------------------------------------

    def forward(
        self, stage: int, micro_batch: int, chunk: int, received: Tensor | None
    ) -> Tensor | None:
        """Run a unit forward, whose chunk comes after the chunk before it.

        `received` is `[B, C, W]` from the stage before; None on the first stage.

        Returns:
            `[B, C, W]`, detached, for the stage after; None on the last stage.

        Raises:
            SPPOError: Another chunk is due.
        """
        running = self._open(stage, micro_batch, chunk)
        if chunk != running.due_chunk:
            raise _out_of_order("forward", stage, micro_batch, chunk, running.due_chunk)
        running.due_chunk += 1
        hidden, input_gradient, router = self._run_layers(
            stage, running, chunk, received, rows=self.rows[micro_batch]
        )
        unit = UnitGraph.of(hidden, input_gradient, received)
        unit.router = router
        given: Tensor | None = None
        if stage < self.staged.cut.num_stages - 1:
            given = hidden.detach()
        else:
            with self.staged.running(stage):
                unit.loss = self._end_chunk(micro_batch, chunk, hidden, running.group)
        if torch.is_grad_enabled():
            running.units[chunk] = unit
        if chunk == running.chunks[-1]:
            running.sequence.end_forward()
            if not torch.is_grad_enabled():
                del self._running[self._key(stage, micro_batch, chunk)]
        return given

    def sequence(self, stage: int, micro_batch: int, chunk: int) -> ChunkRunner:
        """What a chunk of a stage runs on, with keys and values; made if it is not there."""
        return self._open(stage, micro_batch, chunk).sequence

    def _key(self, stage: int, micro_batch: int, chunk: int) -> tuple[int, int, int]:
        return stage, micro_batch, self.run_of(stage, chunk)[0].start

    def _open(self, stage: int, micro_batch: int, chunk: int) -> _MicroBatch:
        key = self._key(stage, micro_batch, chunk)
        if key not in self._running:
            self._running[key] = self._begin(stage, micro_batch, *self.run_of(stage, chunk))
        return self._running[key]

    def _begin(
        self, stage: int, micro_batch: int, chunks: range, group: SequenceGroup | None
    ) -> _MicroBatch:
        start, end = self.rows[micro_batch]
        positions = self.call.positions()
        sequence = self.make_sequence(
            stage,
            micro_batch,
            rows=self.layout.spans(start, end),
            last_position=positions.max().view(1, 1),
            around_layers=self._around_layers if self.split else contextlib.nullcontext,
            group=group,
        )
        constants = dict(self.call.constants)
        if self.router_loss is not None:
            constants["output_router_logits"] = True
        slices = ChunkInputs(self.call.tokens, positions, constants).rows(start, end)
        with self.staged.running(stage):
            parts = self.staged.parts
            embedded = parts.embed_sequence(slices.tokens) if stage == 0 else None
        if embedded is not None:
            others = {name: x for name, x in slices.tokens.items() if name != "input_ids"}
            slices = replace(slices, tokens={"inputs_embeds": embedded.detach(), **others})
        return _MicroBatch(sequence, slices, chunks, group, embedded, due_chunk=chunks.start)

    def _around_layers(self) -> contextlib.AbstractContextManager[object]:
        return DeferWeights(lambda: self._now)

    def _run_layers(
        self,
        stage: int,
        running: _MicroBatch,
        chunk: int,
        received: Tensor | None,
        *,
        rows: tuple[int, int],
    ) -> tuple[Tensor, InputGradient | None, Tensor | None]:
        """Run the stage's layers over a chunk.

        Returns:
            What goes to the next stage `[B, C, W]`, or from the last to the head `[B, C, D]`;
            where the gradient of what the stage was given will be; and what
            `RouterLoss.add` returned.
        """
        inputs = running.slices.chunk(*running.sequence.run_tokens(chunk))
        input_gradient = None
        if received is not None:
            for name in ("input_ids", "inputs_embeds"):
                inputs.pop(name, None)
            message, input_gradient = enter(received)
            parts = self.messages.unpack(self.staged.cut.layers[stage].start, message)
            # Only for its shape and dtype: layers get another one, see `first_layer_input`.
            one_BCD = parts.hidden if parts.hidden.dim() == 3 else parts.hidden[0]
            inputs["inputs_embeds"] = one_BCD.detach()
            inputs |= parts.arguments
            self._received = parts
        elif running.embedded is not None:
            inputs["inputs_embeds"], input_gradient = enter(inputs["inputs_embeds"])
        try:
            with self.staged.running(stage):
                output = running.sequence.run_chunk(chunk, inputs)
            given = self._given
        finally:
            self._received = self._given = None
            own_inputs = self.staged.take_layer_inputs(stage)
        self.head.output_class = type(output)
        router = None
        if self.router_loss is not None:
            router = self.router_loss.add(
                output.router_logits,
                self.call.attention_mask,
                rows,
                running.sequence.rank_tokens(chunk),
            )
        if stage == self.staged.cut.num_stages - 1:
            return output.last_hidden_state, input_gradient, router
        assert given is not None, "the last layer of a stage ran"
        end = self.staged.cut.layers[stage].stop
        hidden, shared = given
        return self.messages.pack(end, hidden, own_inputs, shared), input_gradient, router

    def first_layer_input(self) -> UnpackedMessage | None:
        """What the first layer of the running stage must be given instead; None: what it gets.

        Models scale embeddings or add positions to them before their first layer, which must not
        happen again to hidden states that come from another stage.
        """
        return self._received

    def last_layer_output(self, hidden: Tensor, shared: Mapping[Any, Any]) -> None:
        """Take note of what the last layer of the running stage returned, and left for others."""
        self._given = hidden, shared

    def _end_chunk(
        self, micro_batch: int, chunk: int, hidden_BCD: Tensor, group: SequenceGroup | None
    ) -> Tensor | None:
        if self.add_loss is None or chunk not in self.labelled:
            return None
        loss = self.add_loss(
            hidden_BCD, slice(*self.rows[micro_batch]), slice(*self.bounds[chunk]), group
        )
        self.losses.append(loss.detach())
        return loss

    # -- copies ------------------------------------------------------------------------------

    def settle(self, stage: int, micro_batch: int, chunk: int) -> None:
        """Send a unit away: its layers' copies were started as each ran, and this is their end.

        Compute waits until no more than one unit is on its way out.

        Raises:
            SPPOError: Its forward has not just run.
        """
        running = self._running.get(self._key(stage, micro_batch, chunk))
        if running is None or chunk != running.due_chunk - 1:
            due = None if running is None else running.due_chunk - 1
            raise _out_of_order("device to host", stage, micro_batch, chunk, due)
        running.sequence.settle()

    def store(self, stage: int, micro_batch: int, chunk: int) -> None:
        """Send what has left the device on to its tier behind the host; writes go on beside."""
        self._waiting("store", stage, micro_batch, chunk).sequence.poll()

    def load(self, stage: int, micro_batch: int, chunk: int) -> None:
        """Start bringing all that a unit's backward needs into host memory."""
        self._waiting("load", stage, micro_batch, chunk).sequence.read_ahead(chunk)

    def prefetch(self, stage: int, micro_batch: int, chunk: int) -> None:
        """Start bringing back all that a unit's backward needs.

        Raises:
            SPPOError: Nothing of it waits for a backward.
        """
        self._waiting("host to device", stage, micro_batch, chunk).sequence.prefetch(chunk)

    def begin_stream(self, stage: int, micro_batch: int, chunk: int, *, backward: bool) -> None:
        """Start bringing the keys and values that a unit reads first; the rest comes as it runs."""
        if not backward:
            self._open(stage, micro_batch, chunk).sequence.begin_stream(chunk, backward=False)
            return
        running = self._waiting("K/V in", stage, micro_batch, chunk)
        running.sequence.begin_stream(chunk, backward=True)

    def end_stream(self, stage: int, micro_batch: int, chunk: int) -> None:
        """Send the keys and values of a unit, or their gradients, away: this is their copies' end.

        Compute waits until no more than the plan allows is on its way out.
        """
        running = self._running.get(self._key(stage, micro_batch, chunk))
        if running is not None:  # else its last backward ran, and nothing of it is away
            running.sequence.settle()

    def _waiting(self, what: str, stage: int, micro_batch: int, chunk: int) -> _MicroBatch:
        running = self._running.get(self._key(stage, micro_batch, chunk))
        if running is None or chunk not in running.units:
            due = None if running is None else max(running.units, default=None)
            raise _out_of_order(what, stage, micro_batch, chunk, due)
        return running

    # -- backward ----------------------------------------------------------------------------

    def before_backward(self) -> None:
        """Let all ranks add up what backward needs of all forwards: the numbers of a router loss.

        Called before a rank waits for its first gradient, which comes of another rank's backward.
        """
        if self.make_router_gradient is not None:
            self._router_gradient = self.make_router_gradient()
            self.make_router_gradient = None

    def backward(
        self, stage: int, micro_batch: int, chunk: int, grad: Tensor | None, *, scale: Tensor
    ) -> Tensor | None:
        """Run a unit's backward, whose chunk comes after the one after it.

        With `split`, all of it but the weights of linear layers. `grad` is `[B, C, W]` from the
        stage after; None on the last stage, where `scale`, `[]`, is the gradient of the loss's sum.

        Returns:
            `[B, C, W]` for the stage before; None on the first stage.

        Raises:
            SPPOError: Another chunk is due, or a forward of this micro-batch.
        """
        key = self._key(stage, micro_batch, chunk)
        running = self._running.get(key)
        whole = running is not None and running.due_chunk == running.chunks.stop
        due = max(running.units, default=None) if running is not None and whole else None
        if running is None or chunk != due:
            raise _out_of_order("backward", stage, micro_batch, chunk, due)
        unit = running.units.pop(chunk)
        if self.split:
            self._now = self._due[stage, micro_batch, chunk] = WeightGradients()
        states = [end for end in running.sequence.state_ends(chunk) if end.grad is not None]
        with self.staged.running(stage):  # the head may run again
            self._run_backward(unit, grad, scale, states)
        given = self._gradient_of_input(stage, running, chunk, unit)
        if chunk == running.chunks.start:
            del self._running[key]
        return given

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
                # Without labels of its own, later chunks still left gradients for its keys.
                ends.append(unit.end)
                grads.append(unit.zeros() if grad is None else grad)
            if unit.router is not None and unit.router.requires_grad:
                ends.append(get_gradient_edge(unit.router))
                grads.append(self._router_gradient)
            torch.autograd.backward(ends, grads)

    def _gradient_of_input(
        self, stage: int, running: _MicroBatch, chunk: int, unit: UnitGraph
    ) -> Tensor | None:
        if stage > 0:
            assert unit.input_gradient is not None, "a later stage received its input"
            return (
                unit.received_zeros()
                if unit.input_gradient.grad is None
                else unit.input_gradient.grad
            )
        if running.embedded is not None:
            self._collect_embedding(running, chunk, unit)
        return None

    def _collect_embedding(self, running: _MicroBatch, chunk: int, unit: UnitGraph) -> None:
        """Gather the embeddings' gradient; the last chunk to come sends it into the embedding."""
        assert running.embedded is not None, "tokens were embedded once"
        assert unit.input_gradient is not None, "and chunks are slices of that"
        if running.embedded_grad is None:
            running.embedded_grad = torch.zeros_like(running.embedded)
        start, end = running.sequence.run_tokens(chunk)
        if unit.input_gradient.grad is not None:
            running.embedded_grad[:, start:end] = unit.input_gradient.grad
        if chunk == running.chunks.start:
            with torch.autocast(running.embedded.device.type, enabled=False):
                running.embedded.backward(running.embedded_grad)

    def weights(self, stage: int, micro_batch: int, chunk: int) -> None:
        """The second half of a unit's backward.

        Raises:
            SPPOError: The first half has not run.
        """
        due = self._due.pop((stage, micro_batch, chunk), None)
        if due is None:
            raise SPPOError(
                f"weight gradients of stage {stage}, micro-batch {micro_batch}, chunk {chunk} were "
                "asked for before its backward. The schedule is wrong."
            )
        due.run()

    def finished(self) -> bool:
        """Whether nothing waits for a backward any more."""
        return not self._running and not self._due


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
    units: Callable[[], StageRunner | None],
) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]:
    """A pre-hook (with keywords) for first layers of stages; see `first_layer_input`."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        running = units()
        received = None if running is None else running.first_layer_input()
        if received is None:
            return None
        if received.shared:
            kwargs[SHARED_KV].update(received.shared)
        if args:
            return (received.hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": received.hidden}

    return hook


def last_layer_hook(units: Callable[[], StageRunner | None]) -> Callable[..., None]:
    """A hook (with keywords) for last layers of stages; see `last_layer_output`."""

    def hook(layer: nn.Module, _: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        running = units()
        if running is None:
            return
        hidden, *others = output if isinstance(output, tuple) else (output,)
        if any(isinstance(other, Tensor) for other in others):
            raise UnsupportedModelError(
                f"{type(layer).__name__} gives the next layer more than hidden states, which does "
                "not travel between the stages of a pipeline. Train it on one device (pp_size=1)."
            )
        running.last_layer_output(hidden, kwargs.get(SHARED_KV) or {})

    return hook
