"""Ranks that share sequences: their collectives, and the engines of a model that is not cut.

What ranks share and why gradients are right: `sppo_hf.engine.sequence_group`. With one stage the
model is whole on every rank (or sharded by FSDP2), and DDP or FSDP2 averages gradients over all
ranks. In a pipeline `PipelineEngine` does both.

[Note: an exchange is two autograd nodes]
The first starts the exchange and the second waits for it. In backward the second starts the
exchange of the gradient, and the first waits for that. So of several exchanges that were started
one after the other (queries, keys, values) the gradients are exchanged at the same time, too:
autograd runs all second nodes, which are younger, before any first. PyTorch's own differentiable
collective waits within its backward. What a second node has started reaches the first through
`_Path.gradient`, since gradients must have the shape of what was received in forward; zeros without
memory take their place in the graph.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F
from transformers.modeling_outputs import ModelOutput

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.device_facts import model_shape
from sppo_hf.engine.encoded_inputs import encoders
from sppo_hf.engine.engine import Engine
from sppo_hf.engine.forward_calls import ForwardCall
from sppo_hf.engine.model_parts import ModelParts, are_sharded
from sppo_hf.engine.plan_cache import trainable_mask
from sppo_hf.engine.recurrent_state import mixers_of
from sppo_hf.engine.sequence_group import (
    check_heads,
    local_heads,
    rank_random_state,
    rank_token_counts,
)
from sppo_hf.engine.step_observer import StepObserver
from sppo_hf.errors import BudgetError, ConfigError, PipelineError, UnsupportedModelError
from sppo_hf.pipeline.agreement import (
    call_facts,
    check_agreement,
    check_replicas,
    gather,
    gather_of_sharded,
    gather_reasons,
    make_on_all_ranks,
    refusal_message,
)
from sppo_hf.pipeline.mesh import PipelineMesh
from sppo_hf.pipeline.watchdog import Watchdog, is_broken_connection
from sppo_hf.planning.plan import Plan

# B batch rows, N heads, c tokens of this rank's part, C tokens of the chunk, H head size, D width.

ValueT = TypeVar("ValueT")


@dataclass(eq=False)
class SequenceRanks:
    """Ranks that share a sequence, or some of its chunks; see `SequenceGroup` for what they do."""

    group: Any
    rank: int
    """This rank in the group."""
    size: int
    _: KW_ONLY
    head_blocks: int | None = None
    """Number of blocks in which they divide heads, see `local_heads`."""
    control_group: Any = None
    """The same ranks, for a few numbers on the CPU."""

    @classmethod
    def of_mesh(cls, mesh: PipelineMesh) -> SequenceRanks:
        """Return the ranks of this process's sequence, in a mesh whose `sp_size` is above 1."""
        assert mesh.sp_group is not None, "ranks share a sequence only where sp_size is above 1"
        return cls(mesh.sp_group, mesh.sp_rank, mesh.sp_size, control_group=mesh.sp_control_group)

    def start_tokens_to_heads(self, x_BNcH: Tensor, chunk_tokens: int) -> Exchange:
        """Start an exchange of `[B, N, c, H]` for `[B, n, C, H]`, n of the N heads."""
        lengths = rank_token_counts(chunk_tokens, self.size)
        assert x_BNcH.shape[2] == lengths[self.rank], "every rank has its part of the chunk"
        to_heads, to_tokens = self._ways(lengths, x_BNcH.shape[1])
        return Exchange(x_BNcH, to_heads, to_tokens)

    def start_heads_to_tokens(self, x_BNCH: Tensor) -> Exchange:
        """Start an exchange of `[B, n, C, H]`, n of the N heads, for `[B, N, c, H]`."""
        _, own, chunk_tokens, _ = x_BNCH.shape
        runs = self.size if self.head_blocks is None else self.head_blocks
        heads = own // len(local_heads(runs, self.rank, self.size, self.head_blocks)) * runs
        to_heads, to_tokens = self._ways(rank_token_counts(chunk_tokens, self.size), heads)
        return Exchange(x_BNCH, to_tokens, to_heads)

    def _ways(self, lengths: list[int], num_heads: int) -> tuple[_ToHeads, _ToTokens]:
        ranks = range(self.size)
        counts = [len(local_heads(num_heads, r, self.size, self.head_blocks)) for r in ranks]
        return _ToHeads(self, lengths, counts), _ToTokens(self, lengths, counts)

    def wait_for(self, x: Tensor) -> Tensor:
        """Wait until the exchange that fills `x` is done; at once where there is none."""
        return functional.wait_tensor(x)

    def gather_tokens(self, x_BcD: Tensor, chunk_tokens: int) -> Tensor:
        """Gather `[B, c, D]` to `[B, C, D]`."""
        return _GatheredTokens.apply(x_BcD, self, rank_token_counts(chunk_tokens, self.size))

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Sum over the ranks."""
        return _SummedOverRanks.apply(x, self)

    def decide(self, make: Callable[[], ValueT], better: Callable[[ValueT], float]) -> ValueT:
        """Make a value on each rank, and return the one whose `better` is smallest on all ranks.

        Raises:
            Exception: What `make` raised here.
            PipelineError: It raised on another rank.
        """
        made, scores = make_on_all_ranks(make, self.control_group, share=better)
        best = min(range(self.size), key=scores.__getitem__)
        shared = [made]
        source = dist.get_global_rank(self.control_group, best)
        dist.broadcast_object_list(shared, source, group=self.control_group)
        return shared[0]

    def start_all_to_all(
        self, sent: Tensor, sent_lengths: list[int], received_lengths: list[int]
    ) -> Tensor:
        """Start sending runs of the first dim to the ranks in order, and receiving theirs.

        Returns:
            What is received, joined; `wait_for` it.
        """
        # The functional collective, not `dist.all_to_all_single`: dispatch modes that follow which
        # tensor depends on which (`sppo_hf.engine.selective`) see its inputs and outputs.
        name = self.group.group_name
        sent = sent.contiguous()  # required before PyTorch 2.13
        return torch.ops._c10d_functional.all_to_all_single(
            sent, received_lengths, sent_lengths, name
        )


@dataclass(frozen=True, slots=True)
class _Direction:
    """One direction of an exchange; subclasses have `start` and `unpack`."""

    ranks: SequenceRanks
    lengths: list[int]
    """Tokens of each rank."""
    counts: list[int]
    """Heads of each rank."""

    @property
    def tokens(self) -> int:
        """Tokens of this rank."""
        return self.lengths[self.ranks.rank]

    @property
    def heads(self) -> int:
        """Heads of this rank."""
        return self.counts[self.ranks.rank]


class _ToHeads(_Direction):
    """`[B, N, c, H]` to `[B, n, C, H]`, n of the N heads; in memory `[C, n, B, H]`."""

    __slots__ = ()

    def start(self, x_BNcH: Tensor) -> Tensor:
        rows, _, _, head_size = x_BNcH.shape
        x_cNBH = x_BNcH.permute(2, 1, 0, 3)
        if len(set(self.counts)) == 1:  # one copy
            split = x_cNBH.unflatten(1, (len(self.counts), self.heads)).transpose(0, 1)
            sent = split.reshape(-1, rows, head_size)
        else:
            parts = x_cNBH.split(self.counts, dim=1)
            sent = torch.cat([part.reshape(-1, rows, head_size) for part in parts])
        sent_lengths = [self.tokens * count for count in self.counts]
        received_lengths = [self.heads * tokens for tokens in self.lengths]
        return self.ranks.start_all_to_all(sent, sent_lengths, received_lengths)

    def unpack(self, received: Tensor) -> Tensor:
        x_CnBH = received.view(sum(self.lengths), self.heads, *received.shape[1:])
        return x_CnBH.permute(2, 1, 0, 3)


class _ToTokens(_Direction):
    """`[B, n, C, H]`, n of the N heads, to `[B, N, c, H]`, in memory `[B, c, N, H]`."""

    __slots__ = ()

    def start(self, x_BNCH: Tensor) -> Tensor:
        rows, _, _, head_size = x_BNCH.shape
        sent = x_BNCH.permute(2, 1, 0, 3).reshape(-1, rows, head_size)
        sent_lengths = [self.heads * tokens for tokens in self.lengths]
        received_lengths = [self.tokens * count for count in self.counts]
        return self.ranks.start_all_to_all(sent, sent_lengths, received_lengths)

    def unpack(self, received: Tensor) -> Tensor:
        (rows, head_size), tokens = received.shape[1:], self.tokens
        if len(set(self.counts)) == 1:  # one copy
            x_ncNBH = received.view(len(self.counts), tokens, self.heads, rows, head_size)
            x_BcNH = x_ncNBH.permute(3, 1, 0, 2, 4).reshape(
                rows, tokens, sum(self.counts), head_size
            )
        else:
            parts = received.split([tokens * count for count in self.counts])
            x_BcNH = torch.cat(
                [
                    part.view(tokens, count, rows, head_size).permute(2, 0, 1, 3)
                    for part, count in zip(parts, self.counts, strict=True)
                ],
                dim=2,
            )
        return x_BcNH.transpose(1, 2)


@dataclass(slots=True)
class _Path:
    """Both directions of an exchange: of the tensor, and of its gradient."""

    there: _ToHeads | _ToTokens
    back: _ToHeads | _ToTokens
    gradient: Tensor | None = None
    """The gradient that is being received, between the backwards of both nodes."""


class Exchange:
    """A running exchange of tensors with the other ranks; see `engine.sequence_group`."""

    def __init__(self, x: Tensor, there: _ToHeads | _ToTokens, back: _ToHeads | _ToTokens) -> None:
        self._path = _Path(there, back)
        self._received = _StartExchange.apply(x, self._path)

    def wait(self) -> Tensor:
        """Wait for what the others send, and return it."""
        return _WaitForExchange.apply(self._received, self._path)

    def pending(self) -> Tensor:
        """Return where it will be, without a gradient; `SequenceRanks.wait_for` it before use."""
        return self._path.there.unpack(self._received.detach())


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, path: _Path) -> Tensor:  # type: ignore[override]
        ctx.path = path
        return path.there.start(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        gradient, ctx.path.gradient = ctx.path.gradient, None
        return ctx.path.back.unpack(functional.wait_tensor(gradient)), None


class _WaitForExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, path: _Path) -> Tensor:  # type: ignore[override]
        ctx.path, ctx.shape = path, received.shape
        return path.there.unpack(functional.wait_tensor(received))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.path.gradient = ctx.path.back.start(grad)
        return grad.new_zeros(()).expand(ctx.shape), None


class _GatheredTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BcD: Tensor, ranks: SequenceRanks, lengths: list[int]) -> Tensor:  # type: ignore[override]
        ctx.ranks, ctx.lengths, ctx.own_tokens = ranks, lengths, x_BcD.shape[1]
        tokens = lengths[ranks.rank]
        x_cBD = x_BcD.detach()[:, :tokens].transpose(0, 1)
        sent = x_cBD.expand(ranks.size, *x_cBD.shape).flatten(0, 1).contiguous()
        received_CBD = ranks.start_all_to_all(sent, [tokens] * ranks.size, lengths)
        return functional.wait_tensor(received_CBD).transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BCD: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        # See [Note: gradients of a shared sequence].
        own_BcD = grad_BCD.split(ctx.lengths, dim=1)[ctx.ranks.rank] * ctx.ranks.size
        missing = ctx.own_tokens - own_BcD.shape[1]
        return F.pad(own_BcD, (0, 0, 0, missing)), None, None


class _SummedOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: SequenceRanks) -> Tensor:  # type: ignore[override]
        ctx.size = ranks.size
        total = x.detach().clone()
        dist.all_reduce(total, group=ranks.group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        # See [Note: gradients of a shared sequence].
        return grad * ctx.size, None


def check_shareable_sequences(parts: ModelParts, sp_size: int) -> None:
    """Refuse models whose sequences ranks cannot share.

    A recurrent or convolutional mixer computes along all tokens, inside each family's own code.
    With gathered tokens all ranks would compute the same, and save as many activations as without
    sharing; dividing its heads would need changes inside that code, between projections and
    convolution.

    Raises:
        ConfigError: Heads cannot be divided among the ranks; says among how many they can.
        UnsupportedModelError: Layers carry a state along the tokens.
    """
    mixers = [mixers_of(layer) for layer in parts.layers]
    stateful = [type(found[0]).__name__ for found in mixers if found]
    if stateful:
        raise UnsupportedModelError(
            f"{parts.name}: {len(stateful)} of its {len(mixers)} layers are recurrent or "
            f"convolutional ({', '.join(sorted({*stateful}))}), and sp_size={sp_size} cuts every "
            "chunk along its tokens, which only attention puts together again. Allowed: sp_size=1. "
            f"Remedy: drop sp_size; with pp_size={sp_size} the ranks share the layers instead, and "
            "without either they shard the model (FSDP2) and have sequences of their own."
        )
    heads = [layer.num_heads for layer in model_shape(parts).layers if layer.num_heads]
    check_heads(math.gcd(*heads), sp_size, parts.name)


def gathers_of(
    engine: Engine, call: ForwardCall, plan: Plan, *, whole_logits: bool
) -> tuple[int, int, int, int]:
    """Return what says how often a call gathers sharded weights, for `check_replicas`.

    Layer by layer, one group of rows is computed with what was gathered once.
    """
    encodes = bool(call.encoder_inputs) and are_sharded(encoders(engine.parts))
    groups = sum(1 for _ in call.row_groups(engine.config))
    if plan.order == "by_layer" and groups == 1:
        return 1, 1, 1, int(encodes)
    tiles = engine.most_loss_tiles(call, plan, whole_logits=whole_logits)
    return plan.num_chunks, groups, tiles, int(encodes)


_NO_NUMBERS = (0,) * 5
"""In place of what `check_plan` compares: as many, for all ranks have to gather as many."""


class _ComparingEngine(Engine):
    """An engine whose replicas wait for each other in every step, if FSDP2 shards the model.

    Before a step they compare how often they will gather weights; where all of these are gathered
    as often whatever the batch is, they compare nothing. In what they compare, a rank that refuses
    its batch by then tells the others, who would wait for it, and all raise. Where there are images
    on any rank, they compare once more when these have been encoded.
    """

    _told: tuple[type[Exception], ...] = (Exception,)
    """What others are told of; where ranks share sequences, what all of these raise alike."""
    _others_wait = False
    """Whether others are about to compare, or wait for this rank to do so."""
    _images_anywhere = False
    """Whether any rank has images or sound in this step, as all that have compared know."""

    def _compares(self) -> bool:
        """Whether replicas compare their steps; the same on all of them."""
        raise NotImplementedError

    def _gather(self, numbers: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        """Gather as many numbers from each replica; returns them by rank."""
        raise NotImplementedError

    def _groups(self) -> Sequence[Any]:
        """The groups over which replicas gather, one after the other."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, as `Engine.forward` does.

        Raises:
            PipelineError: Another rank refuses its batch, or ranks do not agree.
        """
        if not self.enabled or self.running is not None:
            return super().forward(*args, **kwargs)
        # Without labels the call may be one that is not cut into chunks; `plan` knows. And ranks
        # that share a sequence wait for each other first, in `check_agreement`.
        self._others_wait = self.group is None and kwargs.get("labels") is not None
        self._images_anywhere = False
        try:
            return super().forward(*args, **kwargs)
        except self._told as error:
            if self._others_wait and not is_broken_connection(error) and self._compares():
                self._exchange(refusal=error)
            raise
        finally:
            self._others_wait = False

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Plan, as `Engine.plan` does; what that raises, others are told."""
        self._others_wait = True
        return super().plan(*args, **kwargs)

    def check_plan(self, call: ForwardCall, plan: Plan, *, whole_logits: bool) -> int:
        """Refuse what would gather weights more often on some replicas, where FSDP2 shards.

        Raises:
            PipelineError: On all ranks; or another rank refuses its batch.
        """
        compares = self._compares()
        if not compares:
            self._others_wait = False
        if not compares and (self.group is None or not self.parts.is_sharded()):
            return 1
        own = gathers_of(self, call, plan, whole_logits=whole_logits)
        if not compares:
            return own[2]
        by_rank = self._exchange((*own, int(bool(call.encoder_inputs))))
        self._images_anywhere = any(images for *_, images in by_rank.values())
        gathers = {rank: gathered[:-1] for rank, gathered in by_rank.items()}
        return check_replicas(gathers, order=plan.order)

    @contextlib.contextmanager
    def refusing_together(self) -> Iterator[None]:
        """Context of what may refuse images after `check_plan`: all ranks do, or none.

        Raises:
            PipelineError: Another rank refuses its batch.
        """
        if not self._images_anywhere:
            yield
            return
        try:
            yield
        except self._told as error:
            if not is_broken_connection(error):
                self._exchange(refusal=error)
            raise
        self._exchange()

    def _exchange(
        self, numbers: tuple[int, ...] = _NO_NUMBERS, *, refusal: Exception | None = None
    ) -> dict[int, tuple[int, ...]]:
        """Gather numbers from each replica, and tell the others if this one refuses its batch.

        Raises:
            PipelineError: Another replica refuses its own, and this one does not.
        """
        self._others_wait = False
        by_rank = self._gather((*numbers, int(refusal is not None)))
        if any(refuses for *_, refuses in by_rank.values()):
            reasons = gather_reasons(refusal, self._groups())
            if refusal is None:
                raise PipelineError(refusal_message(reasons))
        return {rank: gathered[:-1] for rank, gathered in by_rank.items()}


class ReplicaEngine(_ComparingEngine):
    """The engine of a model with sequences of this rank's own, which FSDP2 may shard."""

    def _sharded(self) -> Any:
        """A parameter that is gathered again and again; None if there is none.

        All are gathered, and stay so, after `set_reshard_after_backward(False)`.
        """
        parameters = self.parts.causal_lm.parameters()
        return next((p for p in parameters if hasattr(p, "device_mesh")), None)

    def _compares(self) -> bool:
        if not self.parts.is_sharded() or self._sharded() is None:
            return False
        may_differ = self.config.micro_batch_size or are_sharded(encoders(self.parts))
        return self.plans.is_by_chunk or bool(may_differ)

    def _gather(self, numbers: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        return gather_of_sharded(numbers, self._sharded())

    def _groups(self) -> Sequence[Any]:
        mesh = self._sharded().device_mesh
        return [mesh.get_group(axis) for axis in range(mesh.ndim)]


class SequenceParallelEngine(_ComparingEngine):
    """The engine of a model whose sequences this rank shares with others."""

    group: SequenceRanks
    _told = (ConfigError, BudgetError, UnsupportedModelError, PipelineError)

    def __init__(
        self,
        parts: ModelParts,
        config: SPPOConfig,
        observer: StepObserver,
        original_forward: Callable[..., Any],
        *,
        mesh: PipelineMesh,
        watchdog: Watchdog,
    ) -> None:
        group = SequenceRanks.of_mesh(mesh)
        super().__init__(parts, config, observer, original_forward, group=group)
        self.mesh = mesh
        self.watchdog = watchdog
        self._num_calls = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallelEngine:
        """Return an engine for the copied model, of the same ranks."""
        fresh = super().__deepcopy__(memo)
        assert isinstance(fresh, SequenceParallelEngine), "copies are of the same class"
        fresh.mesh, fresh.watchdog, fresh._num_calls = self.mesh, self.watchdog, 0
        return fresh

    def _compares(self) -> bool:
        return self.parts.is_sharded() and self.mesh.dp_size > 1

    def _gather(self, numbers: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        return gather(numbers, self.mesh.replica_control_group)

    def _groups(self) -> Sequence[Any]:
        return [self.mesh.replica_control_group]

    def _run(self, call: ForwardCall) -> ModelOutput:
        self._num_calls += 1
        kind = "forward" if torch.is_grad_enabled() else "evaluation"
        with (
            self.watchdog.collective_section(f"in {kind} pass {self._num_calls}"),
            self.watchdog.reporting_failures(except_for=self._told),
        ):
            facts = call_facts(call, self.config) | {
                "trained parameters": zlib.crc32(trainable_mask(self.parts.causal_lm.parameters())),
            }
            check_agreement(self.mesh, facts)
            with rank_random_state(self.group, call.device):
                output = super()._run(call)
        self.watchdog.set_activity(f"after {kind} pass {self._num_calls}")
        activity = f"in backward pass {self._num_calls}"
        for value in output.values():
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda _grad: self.watchdog.set_activity(activity))
        return output
