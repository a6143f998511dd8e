"""Calls of a pipeline that return values per token: log-probabilities for a loss of the caller's.

TRL puts a head on the model that returns the log-probability of each label instead of a loss; its
trainers compute the loss from that. Only they know its gradient, and only when `loss.backward()` is
called, but a pipeline's forwards and backwards are interleaved. So a schedule may have to run
twice, see [Note: which gradient]; dropout then draws the same numbers. Any loss is exact, and so is
any number of calls per step (of a frozen reference model, say). The routers' loss, which such a
head returns beside them, is one number whose gradient is as unknown.

[Note: which gradient]
Where the loss is a mean or a sum over tokens, as in fine-tuning by next-token prediction, every
label's log-probability gets the same gradient, and only that number is not known beforehand. The
forward call then runs forwards and backwards for an assumed gradient, and the gradients of the
weights are multiplied by actual over assumed: nothing runs twice. For any other loss (of
preferences, for one, or with one of routers) the forward call runs forwards only, and
`loss.backward()` runs forwards and backwards with the gradients that arrived: one more forward than
an ordinary step. Which of both a forward call does follows from what the last `loss.backward()`
brought, on all ranks alike; if that turns out wrong, what was computed is dropped, and
`loss.backward()` runs the schedule.
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

from sppo_hf.engine.engine import chunk_labels
from sppo_hf.engine.forward_calls import BatchLayout, ForwardCall
from sppo_hf.engine.loss import RouterLoss
from sppo_hf.engine.recompute import RunContext
from sppo_hf.engine.sequence_group import SequenceGroup, rank_tokens
from sppo_hf.errors import UnsupportedModelError
from sppo_hf.pipeline.agreement import all_true
from sppo_hf.pipeline.gradients import StepGradients, average_after_backward, step_values

if TYPE_CHECKING:
    from sppo_hf.pipeline.pipeline_engine import PipelineEngine

# B batch rows, C tokens of a chunk, T tokens of the sequence, D model width.

_LOG_PROBS = "log_probs"
_ROUTER_LOSS = "aux_loss"


class HeadOutputs:
    """Outputs of the model's head for every token, assembled from chunks on the last rank.

    Only tensors of the labels' shape are kept. They are zero for chunks without labels, as the head
    returns for labels that do not count.
    """

    def __init__(
        self, engine: PipelineEngine, call: ForwardCall, gradients: dict[str, Tensor] | None = None
    ) -> None:
        """Begin without outputs.

        `gradients`, `[B, T]` by output's name, are backpropagated; None where no backward runs.
        """
        self._head, self._group = engine.head, engine.group
        self._call = call
        self._gradients = gradients or {}
        self.output_class: type[Any] = ModelOutput
        """Class of what the head returned."""
        self.tensors: dict[str, Tensor] = {}
        """`[B, T]` by name; zero for tokens of other ranks that share the sequence."""

    def add_chunk(
        self, hidden_BCD: Tensor, rows: slice, tokens: slice, _: SequenceGroup | None
    ) -> Tensor:
        """Run the head over a chunk; returns a number whose gradient is `gradients`, `[]`."""
        labels = self._call.shift_labels
        assert labels is not None, "a pipeline runs with labels"
        part = bounds = (tokens.start, tokens.stop)
        if self._group is not None:
            part = rank_tokens(*bounds, self._group.rank, self._group.size)
        labels_BC = chunk_labels(labels[rows], bounds, self._group, self._call.ignore_index)
        output = self._head.run(hidden_BCD, shift_labels=labels_BC, **self._call.head_arguments)
        self.output_class = type(output)
        total = torch.zeros((), device=hidden_BCD.device)
        for name, value in output.items():
            if not isinstance(value, Tensor) or value.shape != labels_BC.shape:
                continue
            if name not in self.tensors:
                self.tensors[name] = value.new_zeros(labels.shape)
            if part[0] == part[1]:
                continue
            self.tensors[name][rows, slice(*part)] = value.detach()
            if name in self._gradients and value.requires_grad:
                total = total + (value * self._gradients[name][rows, slice(*part)]).sum()
        return total


class TokenCall:
    """One call that returns values per token, and the backward that may follow."""

    def __init__(self, engine: PipelineEngine, call: ForwardCall, layout: BatchLayout) -> None:
        """Prepare `call`, which asks the head for something (`call.head_arguments`)."""
        self._engine = engine
        self._call = call
        self._layout = layout
        self._context = RunContext(call.device)
        self._parameters = [p for p in engine.parts.causal_lm.parameters() if p.requires_grad]
        self._reads = engine.reads()
        self._versions = self._reads.versions()
        self._gradients: StepGradients | None = None
        """Gradients for `_assumed_gradient`; None where forward ran no backward."""
        self._assumed_gradient = 1.0
        """Gradient of each log-probability that forward ran backward with."""
        self._router_loss: RouterLoss | None = None
        """The routers' loss, of all ranks' sums; None where the call asked for none."""

    def forward(self) -> ModelOutput:
        """Run the schedule; returns what the head returns for all tokens, on every rank.

        Raises:
            UnsupportedModelError: The head returned nothing per token.
        """
        engine, training = self._engine, torch.is_grad_enabled()
        gradients = None
        if training and engine.loss_is_uniform and not self._call.router_loss:
            self._assumed_gradient = self._assume_gradient()
            shape, device = self._counts().shape, self._call.device
            gradients = {_LOG_PROBS: torch.full(shape, self._assumed_gradient, device=device)}
        outputs = HeadOutputs(engine, self._call, gradients)
        with torch.set_grad_enabled(gradients is not None):
            self._gradients, runner = engine.run_schedule(
                self._call,
                self._layout,
                lambda _: outputs.add_chunk,
                scale=self._scale(),
                records=not training or gradients is not None,
            )
        self._reads.ignore_own_writes(self._versions)
        tensors = self._broadcast(outputs)
        self._router_loss = runner.router_loss
        if self._router_loss is not None:
            engine.sum_router_loss(self._router_loss)
            value = self._router_loss.value()
            if value is not None:
                tensors[_ROUTER_LOSS] = value
        if training:
            names = tuple(tensors)

            def release(grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
                named = {n: g for n, g in zip(names, grads, strict=True) if g is not None}
                return self._engine.guarded("backward", lambda: self._run_backward(named))

            values = step_values(tuple(tensors.values()), self._parameters, release)
            tensors = dict(zip(names, values, strict=True))
        return self._output(outputs.output_class, tensors)

    # -- output ------------------------------------------------------------------------------

    def _broadcast(self, outputs: HeadOutputs) -> dict[str, Tensor]:
        """Broadcast the last stage's values to all ranks that share the batch; `[B, T]` by name."""
        mesh = self._engine.mesh
        last = mesh.world_rank(mesh.pp_size - 1)
        dtypes = {name: value.dtype for name, value in outputs.tensors.items()}
        shared: list[Any] = [(outputs.output_class, dtypes)]
        dist.broadcast_object_list(shared, mesh.sharing_ranks[-1], group=mesh.control_group)
        outputs.output_class, dtypes = shared[0]
        if not dtypes:
            raise UnsupportedModelError(
                f"the head of {self._engine.parts.name} was asked for "
                f"{', '.join(self._call.head_arguments)} and returned no number per token, so a "
                "pipeline cannot gather it from chunks. Train it with pp_size=1."
            )
        assert self._call.shift_labels is not None, "a pipeline runs with labels"
        shape = self._call.shift_labels.shape
        tensors = {}
        for name, dtype in dtypes.items():
            value = outputs.tensors.get(name)
            if value is None:
                value = torch.empty(shape, dtype=dtype, device=self._call.device)
            # Booleans are sent as bytes: not every backend sends them.
            sent = value.view(torch.uint8) if dtype == torch.bool else value
            dist.broadcast(sent, last, group=mesh.pp_group)
            if mesh.sp_group is not None:
                dist.all_reduce(sent, group=mesh.sp_group)
            tensors[name] = value
        return tensors

    def _output(self, output_class: type[Any], tensors: dict[str, Tensor]) -> ModelOutput:
        """Return what the head returns: without the last position, unless labels came shifted."""
        call = self._call
        router_loss = tensors.pop(_ROUTER_LOSS, None)
        if "shift_labels" not in call.loss_arguments:
            tensors = {name: value[:, :-1] for name, value in tensors.items()}
        has_loss = any(field.name == "loss" for field in dataclasses.fields(output_class))
        if has_loss and _LOG_PROBS in tensors:
            count = self._counts().sum().clamp(min=1)
            items = count if call.num_items_in_batch is None else call.divisor(count)
            tensors["loss"] = -tensors[_LOG_PROBS].sum() / items
        output: ModelOutput = output_class(**tensors)
        return (
            output
            if self._router_loss is None
            else self._router_loss.add_to_output(output, router_loss)
        )

    # -- backward ----------------------------------------------------------------------------

    def _run_backward(self, grads: dict[str, Tensor]) -> list[Tensor | None]:
        """Return gradients of `_parameters` for those of the outputs, `[B, T]` by name."""
        engine = self._engine
        self._reads.check_unchanged(self._versions, "the backward of what a pipeline returned")
        grad = self._uniform_gradient(grads)
        groups = engine.mesh.control_group, engine.mesh.replica_control_group
        is_uniform = all_true(grad is not None, *groups)
        if is_uniform and grad is not None and math.isfinite(grad) and grad != 0.0:
            engine.loss_gradient.note(-grad * int(self._counts().sum()))
        speculated, self._gradients = self._gradients, None
        engine.loss_is_uniform = is_uniform
        if speculated is not None and is_uniform and grad is not None:
            if engine.averages_gradients():
                average_after_backward(self._parameters, engine.replicas)
            return self._release(speculated, grad / self._assumed_gradient)
        outputs = HeadOutputs(engine, self._call, grads)
        router_grad = grads.get(_ROUTER_LOSS, torch.zeros((), device=self._call.device))

        def router_gradient(_: RouterLoss) -> Tensor:
            # Of the sums that the forward call found; those of this run are the same.
            assert self._router_loss is not None, "the call asked for the routers' loss"
            return self._scale() * router_grad * self._router_loss.gradient()

        with self._context.restored(), torch.enable_grad():
            gradients, _ = engine.run_schedule(
                self._call,
                self._layout,
                lambda _: outputs.add_chunk,
                scale=self._scale(),
                router_gradient=router_gradient,
                reduces=engine.averages_gradients(),
                # A speculative run has been recorded already.
                records=speculated is None,
            )
        assert gradients is not None, "the schedule ran with gradients"
        return self._release(gradients, 1.0)

    def _release(self, gradients: StepGradients, factor: float) -> list[Tensor | None]:
        """Return the gradients of `_parameters`, None for those that got none."""
        ids = [id(parameter) for parameter in gradients.parameters()]
        by_id = dict(zip(ids, gradients.release(factor), strict=True))
        # Autograd calls hooks of all parameters that are inputs of the node. Parameters whose
        # gradient was averaged have it already.
        _skip_hooks_without_gradient([p for p in self._parameters if id(p) not in by_id])
        return [by_id.get(id(parameter)) for parameter in self._parameters]

    def _uniform_gradient(self, grads: dict[str, Tensor]) -> float | None:
        """Return the one gradient of all log-probabilities that count; None if they differ."""
        if grads.keys() != {_LOG_PROBS}:
            return None
        counted = grads[_LOG_PROBS][self._counts()]
        if not counted.numel():
            return self._assumed_gradient
        lowest, highest = torch.stack(torch.aminmax(counted)).tolist()
        return lowest if lowest == highest else None

    def _counts(self) -> Tensor:
        """Return which labels count, `[B, T]`."""
        assert self._call.shift_labels is not None, "a pipeline runs with labels"
        return self._call.shift_labels != self._call.ignore_index

    def _scale(self) -> Tensor:
        """Return the gradient of what `HeadOutputs.add_chunk` returns, `[]`.

        Gradients are averaged over the ranks of a sequence.
        """
        return torch.full((), float(self._engine.mesh.sp_size), device=self._call.device)

    def _assume_gradient(self) -> float:
        """Return the gradient to run with: a power of two, so that scaling by it is exact."""
        guess = float(self._engine.loss_gradient.expected()) / max(1, int(self._counts().sum()))
        return -math.ldexp(1.0, round(math.log2(guess))) if 0.0 < guess < math.inf else -1.0


def _skip_hooks_without_gradient(parameters: Iterable[nn.Parameter]) -> None:
    """Keep the backward that runs now from calling hooks of `parameters` with None.

    No backward of the plain model reaches a parameter that gets no gradient. A hook is called all
    the same where another call of the step brings one. torch's own hook that waits for several
    parameters counts all that autograd visits, and must see the None.
    """
    guarded: list[tuple[dict[int, Any], int, Any]] = []
    for hooks in (p._backward_hooks for p in parameters if p._backward_hooks):
        for key, hook in hooks.items():
            is_torchs = getattr(hook, "__module__", "") == "torch.autograd.graph"
            if not is_torchs and not isinstance(hook, _Guarded):
                guarded.append((hooks, key, hook))
                hooks[key] = _Guarded(hook)

    def restore() -> None:
        for hooks, key, hook in guarded:
            if key in hooks:  # else it was removed meanwhile
                hooks[key] = hook

    if guarded:
        # A backward that raises leaves guards, which change nothing for hooks that get a gradient.
        Variable._execution_engine.queue_callback(restore)


class _Guarded:
    """A hook on a parameter that is not called without a gradient."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self._hook = hook

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else self._hook(grad)
