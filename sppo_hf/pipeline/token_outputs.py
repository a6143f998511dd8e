"""Calls of a pipeline that return numbers per token: log-probabilities for a loss of the caller's.

TRL puts a head on the model that returns the log-probability of each label instead of a loss; its
trainers make the loss of that. Only they know its gradient, and only when `loss.backward()` is
called, but a pipeline's forwards and backwards are interleaved. So a schedule may have to run
twice, see [Note: which gradient]; dropout then repeats itself. Any loss is exact, and so is any
number of calls per step, of a frozen reference model, say.

[Note: which gradient]
Where the loss is a mean or a sum over tokens, as in fine-tuning by next-token prediction, every
label's log-probability gets the same gradient, and only that number is not known beforehand. The
forward call then runs forwards and backwards for a gradient of its own choice, and the gradients of
the weights are multiplied by what was wrong about it: nothing runs twice. For any other loss
(preferences, for one) the forward call runs forwards alone, and `loss.backward()` runs forwards and
backwards with the gradients that arrived: one more forward than an ordinary step. Which of both a
forward call does follows from what the last `loss.backward()` brought, on all ranks alike; if that
turns out wrong, what was computed is dropped, and `loss.backward()` runs the schedule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd import Variable
from transformers.modeling_outputs import ModelOutput

from sppo_hf.engine.batch_layout import BatchLayout
from sppo_hf.engine.engine import chunk_labels
from sppo_hf.engine.forward_calls import ForwardCall
from sppo_hf.engine.recompute import RunContext
from sppo_hf.engine.sequence_group import SequenceGroup, rank_tokens
from sppo_hf.engine.versions import ReadTensors
from sppo_hf.errors import SPPOError, UnsupportedModelError
from sppo_hf.pipeline.gradients import StepGradients, average_after_backward

if TYPE_CHECKING:
    from sppo_hf.pipeline.pipeline_engine import PipelineEngine

# B batch rows, C tokens of a chunk, T tokens of the sequence, D model width.

_LOG_PROBS = "log_probs"


class HeadOutputs:
    """What the model's head returns for every token, put together from chunks on the last rank.

    Only tensors of the labels' shape are kept. Where no chunk with a label was, they are zero, as
    the head returns them for labels that do not count.
    """

    def __init__(
        self, engine: PipelineEngine, call: ForwardCall, gradients: dict[str, Tensor] | None = None
    ) -> None:
        """Gather nothing yet of what the head is to be asked for.

        `gradients`, `[B, T]` by name, are for the outputs' backward; None where there is none.
        """
        self._head, self._group = engine.loss, engine.group
        self._call = call
        self._gradients = gradients or {}
        self.kind: type[Any] = ModelOutput
        """The class of what the head returned."""
        self.whole: dict[str, Tensor] = {}
        """`[B, T]` by name; zero for tokens of other ranks that share the sequence."""

    def add(
        self, hidden_BCD: Tensor, rows: slice, tokens: slice, _: SequenceGroup | None
    ) -> Tensor:
        """Run the head over a chunk; a number whose gradient is the given ones, shape `[]`."""
        labels = self._call.shift_labels
        assert labels is not None, "a pipeline runs with labels"
        part = bounds = (tokens.start, tokens.stop)
        if self._group is not None:
            part = rank_tokens(*bounds, self._group.rank, self._group.size)
        labels_BC = chunk_labels(labels[rows], bounds, self._group, self._call.ignore_index)
        output = self._head.run(hidden_BCD, shift_labels=labels_BC, **self._call.head_arguments)
        self.kind = type(output)
        total = torch.zeros((), device=hidden_BCD.device)
        for name, value in output.items():
            if not isinstance(value, Tensor) or value.shape != labels_BC.shape:
                continue
            if name not in self.whole:
                self.whole[name] = value.new_zeros(labels.shape)
            if part[0] == part[1]:
                continue
            self.whole[name][rows, slice(*part)] = value.detach()
            if name in self._gradients and value.requires_grad:
                total = total + (value * self._gradients[name][rows, slice(*part)]).sum()
        return total


class TokenCall:
    """One call that returns numbers per token, and the backward that may follow."""

    def __init__(self, engine: PipelineEngine, call: ForwardCall, layout: BatchLayout) -> None:
        """Run nothing yet; `call` asks the head for something (`call.head_arguments`)."""
        self._engine = engine
        self._call = call
        self._layout = layout
        self._context = RunContext(call.device)
        self._parameters = [p for p in engine.parts.causal_lm.parameters() if p.requires_grad]
        self._reads = ReadTensors.of_named(engine.parts.causal_lm.named_parameters())
        self._versions = self._reads.versions()
        self._gradients: StepGradients | None = None
        self._ran_with = 1.0

    def forward(self) -> ModelOutput:
        """Run the schedule; what the head returns for all tokens, on every rank.

        Raises:
            UnsupportedModelError: The head returned nothing per token.
        """
        engine, training = self._engine, torch.is_grad_enabled()
        gradients = None
        if training and engine.uniform:
            self._ran_with = self._guess()
            shape, device = self._counts().shape, self._call.device
            gradients = {_LOG_PROBS: torch.full(shape, self._ran_with, device=device)}
        outputs = HeadOutputs(engine, self._call, gradients)
        with torch.set_grad_enabled(gradients is not None):
            self._gradients, _ = engine.run_schedule(
                self._call,
                self._layout,
                lambda _: outputs.add,
                scale=self._scale(),
                records=not training or gradients is not None,
            )
        whole = self._share(outputs)
        if training:
            anchor = torch.zeros((), device=self._call.device, requires_grad=True)
            values = _Held.apply(
                anchor, self._backward, tuple(whole), *whole.values(), *self._parameters
            )
            whole = dict(zip(whole, values, strict=True))
        return self._output(outputs.kind, whole)

    # -- what the caller gets ----------------------------------------------------------------

    def _share(self, outputs: HeadOutputs) -> dict[str, Tensor]:
        """Hand the last stage's numbers to all ranks that share the batch, `[B, T]` by name."""
        mesh = self._engine.mesh
        last = mesh.world_rank(mesh.pp_size - 1)
        dtypes = {name: value.dtype for name, value in outputs.whole.items()}
        box: list[Any] = [(outputs.kind, dtypes)]
        dist.broadcast_object_list(box, mesh.sharing_ranks[-1], group=mesh.control_group)
        outputs.kind, dtypes = box[0]
        if not dtypes:
            raise UnsupportedModelError(
                f"the head of {self._engine.parts.name} was asked for "
                f"{', '.join(self._call.head_arguments)} and returned no number per token, so a "
                "pipeline cannot gather it from chunks. Train it with pp_size=1."
            )
        assert self._call.shift_labels is not None, "a pipeline runs with labels"
        shape = self._call.shift_labels.shape
        whole = {}
        for name, dtype in dtypes.items():
            value = outputs.whole.get(name)
            if value is None:
                value = torch.empty(shape, dtype=dtype, device=self._call.device)
            # Flags travel as bytes: not every backend sends truth values.
            sent = value.view(torch.uint8) if dtype == torch.bool else value
            dist.broadcast(sent, last, group=mesh.pp_group)
            if mesh.sp_group is not None:
                dist.all_reduce(sent, group=mesh.sp_group)
            whole[name] = value
        return whole

    def _output(self, kind: type[Any], whole: dict[str, Tensor]) -> ModelOutput:
        """As the head returns it: without the last position, unless labels came shifted."""
        call = self._call
        if "shift_labels" not in call.loss_arguments:
            whole = {name: value[:, :-1] for name, value in whole.items()}
        has_loss = any(field.name == "loss" for field in dataclasses.fields(kind))
        if has_loss and _LOG_PROBS in whole:
            count = self._counts().sum().clamp(min=1)
            items = count if call.num_items_in_batch is None else call.divisor(count)
            whole["loss"] = -whole[_LOG_PROBS].sum() / items
        return kind(**whole)

    # -- backward ----------------------------------------------------------------------------

    def _backward(self, grads: dict[str, Tensor]) -> list[Tensor | None]:
        """Gradients of the trained weights, for those of the outputs, `[B, T]` by name."""
        return self._engine.guarded("backward", lambda: self._run_backward(grads))

    def _run_backward(self, grads: dict[str, Tensor]) -> list[Tensor | None]:
        engine = self._engine
        self._reads.refuse_changes(self._versions, "the backward of what a pipeline returned")
        grad = self._uniform_gradient(grads)
        uniform = engine.agreed(grad is not None)
        if uniform and grad is not None and math.isfinite(grad) and grad != 0.0:
            engine.note_gradient(-grad * int(self._counts().sum()))
        speculated, self._gradients = self._gradients, None
        # Both have been agreed on by now.
        engine.uniform = uniform
        if speculated is not None and uniform and grad is not None:
            if engine.reduces_replicas():
                average_after_backward(self._parameters, engine.replicas)
            return self._handed_out(speculated, grad / self._ran_with)
        outputs = HeadOutputs(engine, self._call, grads)
        with self._context.restored(), torch.enable_grad():
            gradients, _ = engine.run_schedule(
                self._call,
                self._layout,
                lambda _: outputs.add,
                scale=self._scale(),
                reduces=engine.reduces_replicas(),
                # What was computed for nothing has been counted.
                records=speculated is None,
            )
        assert gradients is not None, "the schedule ran with gradients"
        return self._handed_out(gradients, 1.0)

    def _handed_out(self, gradients: StepGradients, factor: float) -> list[Tensor | None]:
        """The gradients of `_parameters`, None for those that got none."""
        names = [id(parameter) for parameter in gradients.parameters()]
        given = dict(zip(names, gradients.hand_out(factor), strict=True))
        # Autograd calls hooks of whatever it is given an entry for. Those that were averaged have
        # their gradient already.
        without = [p for p in self._parameters if id(p) not in given]
        _hooks_see_gradients_alone(without)
        return [given.get(id(parameter)) for parameter in self._parameters]

    def _uniform_gradient(self, grads: dict[str, Tensor]) -> float | None:
        """The one gradient of all log-probabilities that count; None where there are several."""
        if grads.keys() != {_LOG_PROBS}:
            return None
        found = grads[_LOG_PROBS][self._counts()]
        if not found.numel():
            return self._ran_with
        lowest, highest = torch.stack(torch.aminmax(found)).tolist()
        return lowest if lowest == highest else None

    def _counts(self) -> Tensor:
        assert self._call.shift_labels is not None, "a pipeline runs with labels"
        return self._call.shift_labels != self._call.ignore_index

    def _scale(self) -> Tensor:
        """As `PipelineEngine._gradient_of_sum` says, `[]`."""
        return torch.full((), float(self._engine.mesh.sp_size), device=self._call.device)

    def _guess(self) -> float:
        """The gradient to run with: a power of two, so that scaling by it loses nothing."""
        guess = float(self._engine.expected_gradient()) / max(1, int(self._counts().sum()))
        return -math.ldexp(1.0, round(math.log2(guess))) if 0.0 < guess < math.inf else -1.0


def _hooks_see_gradients_alone(parameters: Iterable[nn.Parameter]) -> None:
    """Keep the backward that runs now from calling hooks of `parameters` with None.

    No backward of the plain model reaches a parameter that gets no gradient. A hook is called all
    the same where another call of the step brings one. torch's own hook that waits for several
    parameters counts all that autograd visits, and sees its None.
    """
    guarded: list[tuple[dict[int, Any], int, Any]] = []
    for hooks in (p._backward_hooks for p in parameters if p._backward_hooks):
        for key, hook in hooks.items():
            waits = getattr(hook, "__module__", "") == "torch.autograd.graph"
            if not waits and not isinstance(hook, _Guarded):
                guarded.append((hooks, key, hook))
                hooks[key] = _Guarded(hook)

    def give_back() -> None:
        for hooks, key, hook in guarded:
            if key in hooks:  # else it was removed meanwhile
                hooks[key] = hook

    if guarded:
        # A backward that raises leaves guards, which change nothing for hooks that get a gradient.
        Variable._execution_engine.queue_callback(give_back)


class _Guarded:
    """A hook on a parameter that is called for gradients alone."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self._hook = hook

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else self._hook(grad)


class _Held(torch.autograd.Function):
    """Numbers of a step, whose backward exchanges their gradients for those of parameters."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        _anchor: Tensor,
        exchange: Callable[[dict[str, Tensor]], list[Tensor | None]],
        names: tuple[str, ...],
        *values_and_parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.exchange, ctx.names, ctx.spent = exchange, names, False
        held = tuple(value.clone() for value in values_and_parameters[: len(names)])
        ctx.mark_non_differentiable(*(x for x in held if not x.is_floating_point()))
        return held

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if ctx.spent:
            raise SPPOError(
                "backward ran twice through what a pipeline returned. Chunked sequences allow one "
                "backward per forward (retain_graph=True is not supported); run the forward again."
            )
        ctx.spent = True
        named = {n: g for n, g in zip(ctx.names, grads, strict=True) if g is not None}
        return *(None,) * (3 + len(grads)), *ctx.exchange(named)
