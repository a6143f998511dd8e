"""Units of the stages that are here: forward and backward of one (stage, micro-batch, chunk).

Each unit's backward is asked for by itself, with the gradient of what the unit gave on, and returns
the gradient of what it received. Chunks of a micro-batch go forward in order and back in reverse,
as gradients of keys and values demand; between micro-batches and stages any order will do.

Nothing here knows ranks, messages or schedules: tensors come in and go out.

Backward in two halves: gradients of inputs at once, those of weights when they are asked for.

Zero-bubble schedules fill waiting time with weight gradients (arXiv 2401.10241). While a
`WeightGradients` is entered, every `linear` on a trained parameter becomes an autograd node whose
backward computes the gradient of its input and notes down what the weight's needs. Everything else
that trains (norms, biases of other operations, experts' grouped products) gets its gradient in the
first half, which is exact as well and costs little.

Knows nothing of chunks or schedules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
from sppo_hf.engine.head import ModelHead
from sppo_hf.engine.stage_input import StageInput, StateEnd, UnitGraph, enter
from sppo_hf.engine.stage_message import MessageLayout
from sppo_hf.engine.stages import StagedModel
from sppo_hf.errors import SPPOError, UnsupportedModelError
from sppo_hf.planning.chunk_bounds import Bounds


class WeightGradients:
    """Weight gradients that are due, in order; one object per unit of backward."""

    def __init__(self) -> None:
        """Owe nothing yet."""
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

AddLoss = Callable[[Tensor, slice, slice], Tensor]
"""Takes a chunk's hidden states `[B, C, D]`, which rows of the batch they are and which tokens;
returns what backward starts from, shape `[]`."""


@dataclass(slots=True)
class _MicroBatch:
    """One micro-batch on one stage."""

    sequence: ChunkRunner
    slices: ChunkInputs
    embedded: Tensor | None = None
    """`[B, T, D]`, with the embedding's graph, where tokens are embedded once."""
    embedded_grad: Tensor | None = None
    due_chunk: int = 0
    """The chunk whose forward comes next."""
    units: dict[int, UnitGraph] = field(default_factory=dict)


class StageRunner:
    """All units of the stages of this rank in one step."""

    def __init__(
        self,
        staged: StagedModel,
        call: ForwardCall,
        layout: BatchLayout,
        *,
        messages: MessageLayout,
        bounds: Bounds,
        rows: list[tuple[int, int]],
        make_sequence: MakeSequence,
        head: ModelHead,
        add_loss: AddLoss | None,
        labelled: frozenset[int],
        split: bool = False,
    ) -> None:
        """Prepare a step; runs nothing.

        Args:
            staged: The stages.
            call: The batch.
            layout: Its layout.
            messages: How stages pack what they give on.
            bounds: The chunks that run.
            rows: Half-open rows of each micro-batch.
            make_sequence: Makes the state of one micro-batch on one stage.
            head: Is told the class of the base model's outputs.
            add_loss: Ends the forward of a chunk; None where the last stage is not here.
            labelled: Chunks whose loss is computed.
            split: Whether backward comes in two halves.
        """
        self._staged = staged
        self._call = call
        self._layout = layout
        self._messages = messages
        self._bounds = bounds
        self._rows = rows
        self._make_sequence = make_sequence
        self._head = head
        self._add_loss = add_loss
        self._labelled = labelled
        self._split = split
        self._running: dict[tuple[int, int], _MicroBatch] = {}
        self._due: dict[tuple[int, int, int], WeightGradients] = {}
        self._now = WeightGradients()
        self._received: Tensor | None = None
        self._given: Tensor | None = None
        self.losses: list[Tensor] = []
        """Detached sums of the losses of the last stage's chunks."""

    # -- forward -----------------------------------------------------------------------------

    def forward(
        self, stage: int, micro_batch: int, chunk: int, received: Tensor | None
    ) -> Tensor | None:
        """Run a unit forward.

        Args:
            stage: A stage of this rank.
            micro_batch: Index of the rows.
            chunk: Index of the chunk; comes after the chunk before it.
            received: `[B, C, W]` from the stage before; None on the first stage.

        Returns:
            `[B, C, W]`, detached, for the stage after; None on the last stage.

        Raises:
            SPPOError: Another chunk is due.
        """
        running = self._open(stage, micro_batch)
        if chunk != running.due_chunk:
            raise _out_of_order("forward", stage, micro_batch, chunk, running.due_chunk)
        running.due_chunk += 1
        hidden, inlet = self._run_layers(stage, running, chunk, received)
        unit = UnitGraph.of(hidden, inlet, received)
        given: Tensor | None = None
        if stage < self._staged.cut.num_stages - 1:
            given = hidden.detach()
        else:
            unit.loss = self._end_chunk(micro_batch, chunk, hidden)
        if torch.is_grad_enabled():
            running.units[chunk] = unit
        if chunk == len(self._bounds) - 1:
            running.sequence.end_forward()
            if not torch.is_grad_enabled():
                del self._running[stage, micro_batch]
        return given

    def _open(self, stage: int, micro_batch: int) -> _MicroBatch:
        key = (stage, micro_batch)
        if key not in self._running:
            self._running[key] = self._begin(stage, micro_batch)
        return self._running[key]

    def _begin(self, stage: int, micro_batch: int) -> _MicroBatch:
        start, end = self._rows[micro_batch]
        positions = self._call.positions()
        spans = self._layout.rows
        sequence = self._make_sequence(
            stage,
            micro_batch,
            rows=None if spans is None else spans[start:end],
            last_position=positions.max().view(1, 1),
            around_layers=self._around_layers if self._split else contextlib.nullcontext,
        )
        slices = ChunkInputs(self._call.tokens, positions, self._call.constants).rows(start, end)
        embedded = self._embed(slices) if stage == 0 else None
        if embedded is not None:
            others = {name: x for name, x in slices.tokens.items() if name != "input_ids"}
            slices = replace(slices, tokens={"inputs_embeds": embedded.detach(), **others})
        return _MicroBatch(sequence, slices, embedded)

    def _embed(self, slices: ChunkInputs) -> Tensor | None:
        """Embeddings of the whole sequence where one backward of the embedding is much cheaper.

        See `Engine._inputs`: on a CPU the embedding's gradient costs seconds, and once is enough.
        """
        embedding = self._staged.parts.causal_lm.get_input_embeddings()
        ids = slices.tokens.get("input_ids")
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in embedding.parameters())
        if ids is None or ids.device.type != "cpu" or not trained or self._staged.parts.reads_ids:
            return None
        return embedding(ids)

    def _around_layers(self) -> contextlib.AbstractContextManager[object]:
        return DeferWeights(lambda: self._now)

    def _run_layers(
        self, stage: int, running: _MicroBatch, chunk: int, received: Tensor | None
    ) -> tuple[Tensor, StageInput | None]:
        """Run the stage's layers over a chunk.

        Returns:
            What goes to the next stage `[B, C, W]`, or from the last to the head `[B, C, D]`; and
            where the gradient of what the stage was given will be.
        """
        inputs = running.slices.chunk(*running.sequence.run_tokens(chunk))
        inlet = None
        if received is not None:
            for name in ("input_ids", "inputs_embeds"):
                inputs.pop(name, None)
            message, inlet = enter(received)
            parts = self._messages.unpack(self._staged.cut.layers[stage].start, message)
            # Only for its shape and dtype: layers get another one, see `first_layer_input`.
            inputs["inputs_embeds"] = parts.hidden.detach()
            inputs |= parts.arguments
            self._received = parts.hidden
        else:
            inputs |= self._messages.new_shared()
            if running.embedded is not None:
                inputs["inputs_embeds"], inlet = enter(inputs["inputs_embeds"])
        try:
            with self._staged.running(stage):
                output = running.sequence.run_chunk(chunk, inputs)
            given = self._given
        finally:
            self._received = self._given = None
            own_inputs = self._staged.take_given(stage)
        self._head.output_class = type(output)
        if stage == self._staged.cut.num_stages - 1:
            return output.last_hidden_state, inlet
        assert given is not None, "the last layer of a stage ran"
        end = self._staged.cut.layers[stage].stop
        shared = inputs.get("shared_kv_states", {})
        return self._messages.pack(end, given, own_inputs, shared), inlet

    def first_layer_input(self) -> Tensor | None:
        """What the first layer of the running stage must be given instead; None: what it gets.

        Models scale embeddings or add positions to them before their first layer, which must not
        happen again to hidden states that come from another stage.
        """
        return self._received

    def last_layer_output(self, hidden: Tensor) -> None:
        """Take note of what the last layer of the running stage returned."""
        self._given = hidden

    def _end_chunk(self, micro_batch: int, chunk: int, hidden_BCD: Tensor) -> Tensor | None:
        if self._add_loss is None or chunk not in self._labelled:
            return None
        loss = self._add_loss(
            hidden_BCD, slice(*self._rows[micro_batch]), slice(*self._bounds[chunk])
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
        running = self._running.get((stage, micro_batch))
        if running is None or chunk != running.due_chunk - 1:
            due = None if running is None else running.due_chunk - 1
            raise _out_of_order("device to host", stage, micro_batch, chunk, due)
        running.sequence.settle()

    def prefetch(self, stage: int, micro_batch: int, chunk: int) -> None:
        """Start bringing back all that a unit's backward needs.

        Raises:
            SPPOError: Nothing of it waits for a backward.
        """
        running = self._running.get((stage, micro_batch))
        if running is None or chunk not in running.units:
            due = None if running is None else max(running.units, default=None)
            raise _out_of_order("host to device", stage, micro_batch, chunk, due)
        running.sequence.prefetch(chunk)

    # -- backward ----------------------------------------------------------------------------

    def backward(
        self, stage: int, micro_batch: int, chunk: int, grad: Tensor | None, *, scale: Tensor
    ) -> Tensor | None:
        """Run a unit's backward; with `split`, all of it but the weights of linear layers.

        Args:
            stage: A stage of this rank.
            micro_batch: Index of the rows.
            chunk: Index of the chunk; comes after the backward of the chunk after it.
            grad: `[B, C, W]` from the stage after; None on the last stage.
            scale: Gradient of the loss's sum, `[]`; used on the last stage.

        Returns:
            `[B, C, W]` for the stage before; None on the first stage.

        Raises:
            SPPOError: Another chunk is due, or a forward of this micro-batch.
        """
        running = self._running.get((stage, micro_batch))
        whole = running is not None and running.due_chunk == len(self._bounds)
        due = max(running.units, default=None) if running is not None and whole else None
        if running is None or chunk != due:
            raise _out_of_order("backward", stage, micro_batch, chunk, due)
        unit = running.units.pop(chunk)
        if self._split:
            self._now = self._due[stage, micro_batch, chunk] = WeightGradients()
        states = [end for end in running.sequence.state_ends(chunk) if end.grad is not None]
        self._run_backward(unit, grad, scale, states)
        given = self._gradient_of_input(stage, running, chunk, unit)
        if chunk == 0:
            del self._running[stage, micro_batch]
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
            torch.autograd.backward(ends, grads)

    def _gradient_of_input(
        self, stage: int, running: _MicroBatch, chunk: int, unit: UnitGraph
    ) -> Tensor | None:
        if stage > 0:
            assert unit.inlet is not None, "a later stage received its input"
            return unit.received_zeros() if unit.inlet.grad is None else unit.inlet.grad
        if running.embedded is not None:
            self._collect_embedding(running, chunk, unit)
        return None

    def _collect_embedding(self, running: _MicroBatch, chunk: int, unit: UnitGraph) -> None:
        """Gather the embeddings' gradient; the last chunk to come sends it into the embedding."""
        assert running.embedded is not None, "tokens were embedded once"
        assert unit.inlet is not None, "and chunks are slices of that"
        if running.embedded_grad is None:
            running.embedded_grad = torch.zeros_like(running.embedded)
        start, end = running.sequence.run_tokens(chunk)
        if unit.inlet.grad is not None:
            running.embedded_grad[:, start:end] = unit.inlet.grad
        if chunk == 0:
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
        if args:
            return (received, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": received}

    return hook


def last_layer_hook(units: Callable[[], StageRunner | None]) -> Callable[..., None]:
    """A hook for last layers of stages; see `last_layer_output`."""

    def hook(layer: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        running = units()
        if running is None:
            return
        hidden, *others = output if isinstance(output, tuple) else (output,)
        if any(isinstance(other, Tensor) for other in others):
            raise UnsupportedModelError(
                f"{type(layer).__name__} gives the next layer more than hidden states, which does "
                "not travel between the stages of a pipeline. Train it on one device (pp_size=1)."
            )
        running.last_layer_output(hidden)

    return hook
