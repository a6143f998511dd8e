"""The collectives of ranks that share sequences: tokens for heads, sums, decisions.

What they are for: `sppo_hf.engine.sequence_group`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F

from sppo_hf.engine.sequence_group import check_heads, part_lengths
from sppo_hf.engine.structure import ModelParts
from sppo_hf.errors import PipelineError, UnsupportedModelError
from sppo_hf.pipeline.mesh import PipelineMesh

# B batch rows, N heads, c tokens of this rank's part, C tokens of the chunk, H head size, D width.

ValueT = TypeVar("ValueT")


class SequenceRanks:
    """The ranks of this process's sequence; see `SequenceGroup` for what they do."""

    granules: int | None = None

    def __init__(self, mesh: PipelineMesh) -> None:
        """Wrap the groups of a mesh whose `sp_size` is above 1."""
        assert mesh.sequence is not None, "ranks share a sequence only where sp_size is above 1"
        self.size = mesh.sp_size
        self.rank = mesh.sp_rank
        self._group = mesh.sequence
        self._control = mesh.sequence_control

    def tokens_to_heads(self, x_BNcH: Tensor, chunk_tokens: int) -> Tensor:
        """`[B, N, c, H]` to `[B, N / n, C, H]`."""
        rows, num_heads, tokens, head_size = x_BNcH.shape
        own, lengths = num_heads // self.size, part_lengths(chunk_tokens, self.size)
        assert tokens == lengths[self.rank], "every rank has its part of the chunk"
        x_cnBNH = x_BNcH.permute(2, 1, 0, 3).reshape(tokens, self.size, own, rows, head_size)
        sent = x_cnBNH.permute(1, 0, 3, 2, 4).reshape(self.size * tokens, rows, own, head_size)
        got_CBNH = self._exchange(sent, [tokens] * self.size, lengths)
        return got_CBNH.permute(1, 2, 0, 3)

    def heads_to_tokens(self, x_BCNH: Tensor) -> Tensor:
        """`[B, C, N / n, H]` to `[B, c, N, H]`."""
        rows, chunk_tokens, own, head_size = x_BCNH.shape
        lengths = part_lengths(chunk_tokens, self.size)
        tokens = lengths[self.rank]
        sent_CBNH = x_BCNH.transpose(0, 1).contiguous()
        got = self._exchange(sent_CBNH, lengths, [tokens] * self.size)
        x_ncBNH = got.view(self.size, tokens, rows, own, head_size)
        return x_ncBNH.permute(2, 1, 0, 3, 4).reshape(rows, tokens, self.size * own, head_size)

    def gather_tokens(self, x_BcD: Tensor, chunk_tokens: int) -> Tensor:
        """`[B, c, D]` to `[B, C, D]`."""
        return _GatheredTokens.apply(x_BcD, self, part_lengths(chunk_tokens, self.size))

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum over the ranks."""
        return _SummedOverRanks.apply(x, self)

    def decide(self, make: Callable[[], ValueT], better: Callable[[ValueT], float]) -> ValueT:
        """What the rank has made for whose `better` is smallest.

        Raises:
            Exception: What `make` raised here.
            PipelineError: It raised on another rank.
        """
        refusal: Exception | None = None
        made: Any = None
        try:
            made = make()
            said = better(made), ""
        except Exception as error:  # noqa: BLE001 (raised below, when the others have heard)
            refusal = error
            said = math.inf, f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, said, group=self._control)
        if refusal is not None:
            raise refusal
        refusals = [words for _, words in answers if words]
        if refusals:
            raise PipelineError(f"This batch is run by no rank, because {'; '.join(refusals)}")
        best = min(range(self.size), key=lambda rank: answers[rank][0])
        box = [made]
        first = dist.get_global_rank(self._control, best)
        dist.broadcast_object_list(box, first, group=self._control)
        return box[0]

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks, without a gradient."""
        total = x.detach().clone()
        dist.all_reduce(total, group=self._group)
        return total

    def gathered(self, x_BcD: Tensor, lengths: list[int]) -> Tensor:
        """All tokens, without a gradient."""
        tokens = lengths[self.rank]
        x_cBD = x_BcD.detach()[:, :tokens].transpose(0, 1)
        sent = x_cBD.expand(self.size, *x_cBD.shape).flatten(0, 1).contiguous()
        got_CBD = self._exchange(sent, [tokens] * self.size, lengths)
        return got_CBD.transpose(0, 1)

    def _exchange(self, sent: Tensor, sent_lengths: list[int], lengths: list[int]) -> Tensor:
        """Send runs of the first dim to the ranks in order, and join what they send."""
        # The functional collective: autograd knows its backward, and modes that follow what
        # depends on what (`sppo_hf.engine.selective`) see through it.
        got = functional.all_to_all_single_autograd(sent, lengths, sent_lengths, self._group)
        return got.wait() if isinstance(got, functional.AsyncCollectiveTensor) else got


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


def refuse_unshareable(parts: ModelParts, sp_size: int) -> None:
    """Refuse models whose sequences cannot be shared.

    Raises:
        ConfigError: Heads cannot be divided among the ranks; says among how many they can.
        UnsupportedModelError: Layers carry a state along the tokens.
    """
    stateful = [index for index in range(len(parts.layers)) if parts.has_state(index)]
    if stateful:
        mixers = sorted({type(parts.layers[index]).__name__ for index in stateful})
        raise UnsupportedModelError(
            f"{parts.name}: layers {', '.join(map(str, stateful))} ({', '.join(mixers)}) are "
            f"recurrent or convolutional, and sp_size={sp_size} cuts chunks along the tokens, "
            "which only attention puts together again. Train it with sp_size=1 (with pp_size, "
            "ranks share the layers instead)."
        )
    num_heads = getattr(parts.text_config, "num_attention_heads", None)
    if isinstance(num_heads, int):
        check_heads(num_heads, sp_size, parts.name)
