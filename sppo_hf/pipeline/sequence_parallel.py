"""Ranks that share sequences: their collectives, and the engine of one of them.

What is shared and why gradients come out right: `sppo_hf.engine.sequence_group`. With one stage the
model is whole on every rank (or sharded by FSDP2), and DDP or FSDP2 averages gradients over all
ranks. In a pipeline `PipelineEngine` does both.

[Note: an exchange is two nodes]
Autograd sees an exchange as two nodes, of which the first starts it and the second waits for it. In
backward the second starts the exchange of the gradient, and the first waits for that. So of several
exchanges that were started one after the other (queries, keys, values) gradients are on their way
together, too: autograd runs all second nodes, which are younger, before any first. PyTorch's own
differentiable collective waits within its backward. What a second node has started reaches the
first beside autograd, since gradients must have the shape of what was received in forward; zeros
without memory take their place in the graph.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from sppo_hf.engine.engine import Engine
from sppo_hf.engine.forward_calls import ForwardCall
from sppo_hf.engine.plan_cache import trainable_mask
from sppo_hf.engine.recurrent_state import mixers_of
from sppo_hf.engine.sequence_group import (
    check_heads,
    local_heads,
    rank_random_state,
    rank_token_counts,
)
from sppo_hf.engine.step_observer import StepObserver
from sppo_hf.engine.structure import ModelParts
from sppo_hf.errors import BudgetError, ConfigError, PipelineError, UnsupportedModelError
from sppo_hf.pipeline.agreement import call_facts, check_agreement, make_on_all_ranks
from sppo_hf.pipeline.mesh import PipelineMesh
from sppo_hf.pipeline.watchdog import Watchdog

# B batch rows, N heads, c tokens of this rank's part, C tokens of the chunk, H head size, D width.

ValueT = TypeVar("ValueT")


@dataclass(eq=False)
class SequenceRanks:
    """Ranks that share a sequence, or some of its chunks; see `SequenceGroup` for what they do."""

    group: Any
    rank: int
    """Of this one, in the group."""
    size: int
    _: KW_ONLY
    head_blocks: int | None = None
    """By which they divide heads, see `local_heads`."""
    control: Any = None
    """A group for decisions, on processors."""

    @classmethod
    def of_mesh(cls, mesh: PipelineMesh) -> SequenceRanks:
        """The ranks of this process's sequence, in a mesh whose `sp_size` is above 1."""
        assert mesh.sp_group is not None, "ranks share a sequence only where sp_size is above 1"
        return cls(mesh.sp_group, mesh.sp_rank, mesh.sp_size, control=mesh.sp_control_group)

    def start_tokens_to_heads(self, x_BNcH: Tensor, chunk_tokens: int) -> Exchange:
        """`[B, N, c, H]` to `[B, n, C, H]`, n of the N heads."""
        lengths = rank_token_counts(chunk_tokens, self.size)
        assert x_BNcH.shape[2] == lengths[self.rank], "every rank has its part of the chunk"
        return self._exchange(x_BNcH, lengths, x_BNcH.shape[1], to_heads=True)

    def start_heads_to_tokens(self, x_BNCH: Tensor) -> Exchange:
        """`[B, n, C, H]`, n of the N heads, to `[B, N, c, H]`."""
        _, own, chunk_tokens, _ = x_BNCH.shape
        runs = self.size if self.head_blocks is None else self.head_blocks
        heads = own // len(local_heads(runs, self.rank, self.size, self.head_blocks)) * runs
        return self._exchange(
            x_BNCH, rank_token_counts(chunk_tokens, self.size), heads, to_heads=False
        )

    def _exchange(
        self, x: Tensor, lengths: list[int], num_heads: int, *, to_heads: bool
    ) -> Exchange:
        every = range(self.size)
        counts = [len(local_heads(num_heads, r, self.size, self.head_blocks)) for r in every]
        heads, tokens = _ToHeads(self, lengths, counts), _ToTokens(self, lengths, counts)
        return Exchange(x, heads, tokens) if to_heads else Exchange(x, tokens, heads)

    def wait_for(self, x: Tensor) -> Tensor:
        """`x`, once what an exchange brings is in it; at once where nothing is missing."""
        return functional.wait_tensor(x)

    def gather_tokens(self, x_BcD: Tensor, chunk_tokens: int) -> Tensor:
        """`[B, c, D]` to `[B, C, D]`."""
        return _GatheredTokens.apply(x_BcD, self, rank_token_counts(chunk_tokens, self.size))

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum over the ranks."""
        return _SummedOverRanks.apply(x, self)

    def decide(self, make: Callable[[], ValueT], better: Callable[[ValueT], float]) -> ValueT:
        """What the rank has made for whose `better` is smallest.

        Raises:
            Exception: What `make` raised here.
            PipelineError: It raised on another rank.
        """
        made, answers = make_on_all_ranks(make, self.control, share=better)
        best = min(range(self.size), key=answers.__getitem__)
        box = [made]
        first = dist.get_global_rank(self.control, best)
        dist.broadcast_object_list(box, first, group=self.control)
        return box[0]

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks, without a gradient."""
        total = x.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def gathered(self, x_BcD: Tensor, lengths: list[int]) -> Tensor:
        """All tokens, without a gradient."""
        tokens = lengths[self.rank]
        x_cBD = x_BcD.detach()[:, :tokens].transpose(0, 1)
        sent = x_cBD.expand(self.size, *x_cBD.shape).flatten(0, 1).contiguous()
        got_CBD = self.start(sent, [tokens] * self.size, lengths)
        return functional.wait_tensor(got_CBD).transpose(0, 1)

    def start(self, sent: Tensor, sent_lengths: list[int], lengths: list[int]) -> Tensor:
        """Send runs of the first dim to the ranks in order; what they send will be joined.

        Returns:
            Where it will be; `wait_for` it.
        """
        # The functional collective: modes that follow what depends on what
        # (`sppo_hf.engine.selective`) see through it.
        name = self.group.group_name
        sent = sent.contiguous()  # before PyTorch 2.13 it must be
        return torch.ops._c10d_functional.all_to_all_single(sent, lengths, sent_lengths, name)


@dataclass(frozen=True, slots=True)
class _Way:
    """How a tensor goes to the other ranks; a way has `start` and `unpack`."""

    ranks: SequenceRanks
    lengths: list[int]
    """Tokens of each rank."""
    counts: list[int]
    """Heads of each rank."""

    @property
    def tokens(self) -> int:
        """Of this rank."""
        return self.lengths[self.ranks.rank]

    @property
    def heads(self) -> int:
        """Of this rank."""
        return self.counts[self.ranks.rank]


class _ToHeads(_Way):
    """`[B, N, c, H]` to `[B, n, C, H]`, n of the N heads; in memory `[C, n, B, H]`."""

    __slots__ = ()

    def start(self, x_BNcH: Tensor) -> Tensor:
        rows, _, _, head_size = x_BNcH.shape
        x_cNBH = x_BNcH.permute(2, 1, 0, 3)
        if len(set(self.counts)) == 1:  # one copy
            split = x_cNBH.unflatten(1, (len(self.counts), self.counts[0])).transpose(0, 1)
            sent = split.reshape(-1, rows, head_size)
        else:
            parts = x_cNBH.split(self.counts, dim=1)
            sent = torch.cat([part.reshape(-1, rows, head_size) for part in parts])
        gone = [self.tokens * count for count in self.counts]
        return self.ranks.start(sent, gone, [self.heads * c for c in self.lengths])

    def unpack(self, got: Tensor) -> Tensor:
        return got.view(sum(self.lengths), self.heads, *got.shape[1:]).permute(2, 1, 0, 3)


class _ToTokens(_Way):
    """`[B, n, C, H]`, n of the N heads, to `[B, N, c, H]`, in memory `[B, c, N, H]`."""

    __slots__ = ()

    def start(self, x_BNCH: Tensor) -> Tensor:
        rows, _, _, head_size = x_BNCH.shape
        sent = x_BNCH.permute(2, 1, 0, 3).reshape(-1, rows, head_size)
        came = [self.tokens * count for count in self.counts]
        return self.ranks.start(sent, [self.heads * c for c in self.lengths], came)

    def unpack(self, got: Tensor) -> Tensor:
        (rows, head_size), tokens = got.shape[1:], self.tokens
        if len(set(self.counts)) == 1:  # one copy
            x_ncNBH = got.view(len(self.counts), tokens, self.counts[0], rows, head_size)
            x_BcNH = x_ncNBH.permute(3, 1, 0, 2, 4).reshape(
                rows, tokens, sum(self.counts), head_size
            )
        else:
            parts = got.split([tokens * count for count in self.counts])
            x_BcNH = torch.cat(
                [
                    part.view(tokens, count, rows, head_size).permute(2, 0, 1, 3)
                    for part, count in zip(parts, self.counts, strict=True)
                ],
                dim=2,
            )
        return x_BcNH.transpose(1, 2)


@dataclass(slots=True)
class _Ways:
    """How a tensor goes to the other ranks, and how its gradient comes back."""

    there: _ToHeads | _ToTokens
    back: _ToHeads | _ToTokens
    gradient: Tensor | None = None
    """On its way back, where it has been started."""


class Exchange:
    """A tensor on its way to the other ranks, for what they send; see `engine.sequence_group`."""

    def __init__(self, x: Tensor, there: _ToHeads | _ToTokens, back: _ToHeads | _ToTokens) -> None:
        self._ways = _Ways(there, back)
        self._coming = _Started.apply(x, self._ways)

    def wait(self) -> Tensor:
        """What the others have sent."""
        return _Waited.apply(self._coming, self._ways)

    def pending(self) -> Tensor:
        """Where it will be: `SequenceRanks.wait_for` it before it is read; without a gradient."""
        return self._ways.there.unpack(self._coming.detach())


class _Started(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ways: _Ways) -> Tensor:  # type: ignore[override]
        ctx.ways = ways
        return ways.there.start(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        coming, ctx.ways.gradient = ctx.ways.gradient, None
        return ctx.ways.back.unpack(functional.wait_tensor(coming)), None


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, coming: Tensor, ways: _Ways) -> Tensor:  # type: ignore[override]
        ctx.ways, ctx.shape = ways, coming.shape
        return ways.there.unpack(functional.wait_tensor(coming))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.ways.gradient = ctx.ways.back.start(grad)
        return grad.new_zeros(()).expand(ctx.shape), None


class _GatheredTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BcD: Tensor, ranks: SequenceRanks, lengths: list[int]) -> Tensor:  # type: ignore[override]
        ctx.ranks, ctx.lengths, ctx.own_tokens = ranks, lengths, x_BcD.shape[1]
        return ranks.gathered(x_BcD, lengths)

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
        return ranks.summed(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        # See [Note: gradients of a shared sequence].
        return grad * ctx.size, None


def check_shareable_sequences(parts: ModelParts, sp_size: int) -> None:
    """Refuse models whose sequences cannot be shared.

    A recurrent or convolutional mixer computes along all tokens, inside each family's own code.
    Gathering the tokens for it would let all ranks compute the same, and save as much as without
    sharing; its heads could be shared only by taking that code apart, between projections and
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


class SequenceParallelEngine(Engine):
    """The engine of a model whose sequences this rank shares with others."""

    group: SequenceRanks

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
        self._calls = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallelEngine:
        """A fresh engine for the copied model, of the same ranks."""
        fresh = super().__deepcopy__(memo)
        assert isinstance(fresh, SequenceParallelEngine), "copies are of the same class"
        fresh.mesh, fresh.watchdog, fresh._calls = self.mesh, self.watchdog, 0
        return fresh

    def _run(self, call: ForwardCall) -> ModelOutput:
        self._calls += 1
        kind = "forward" if torch.is_grad_enabled() else "evaluation"
        with self._guarded(f"in {kind} pass {self._calls}"):
            mask = call.attention_mask
            read = {
                "sum of attention_mask": -1 if mask is None else int(mask.sum()),
                "trained parameters": zlib.crc32(trainable_mask(self.parts.causal_lm.parameters())),
            }
            check_agreement(self.mesh, call_facts(call, self.config) | read)
            with rank_random_state(self.group, call.device):
                output = super()._run(call)
        activity = f"in backward pass {self._calls}"
        for value in output.values():
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda _grad: self.watchdog.set_activity(activity))
        return output

    @contextmanager
    def _guarded(self, activity: str) -> Iterator[None]:
        """A part of a step: others hear where this rank is, and errors name what failed."""
        alike = (ConfigError, BudgetError, UnsupportedModelError, PipelineError)
        with (
            self.watchdog.collective_section(activity),
            self.watchdog.reporting_failures(except_for=alike),
        ):
            yield
        self.watchdog.set_activity(activity.replace("in ", "after ", 1))
