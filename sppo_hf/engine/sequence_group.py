"""Sequence parallelism: what the engine asks of the ranks that share every chunk of a sequence.

Each of n ranks holds a contiguous part of every chunk's tokens: hidden states, saved activations
and the loss are of these tokens alone. Attention needs all tokens, but not all heads. So before it
the ranks exchange tokens for heads, each attends with its heads over all tokens of the chunk and
keeps the keys and values of these heads, and afterwards heads are exchanged for tokens again
(DeepSpeed-Ulysses, arXiv 2309.14509, section 3.1).

[Note: gradients of a shared sequence]
A parameter's gradient is the sum of what the ranks' tokens give. Data parallelism (DDP, FSDP2)
averages gradients over all ranks, so that every rank's part is made n times as large where the loss
begins (`sum_over_ranks`), and the average is the sum. What all ranks compute alike from gathered
tokens (`gather_tokens`) gives each of them the whole gradient, of which each takes its own tokens',
n times as large. So nothing else in backward knows that a sequence is shared.

[Note: what an exchange hides behind]
Queries, keys and values are sent together before any of them is waited for, and in backward their
gradients: while one travels, others are made ready to be sent, or put where they belong. Layers
wait for them, since attention is called when all three are there, and what follows in a layer
needs its output. What could begin earlier, or hide them, and why it is not done:
- Queries and keys end in the rotary embedding, the last thing that a family's forward does before
  it calls attention: until then there is nothing to send.
- Values are ready before that, behind their projection, where a hook could send them. They are the
  few of the three (one head of them for several of queries), the rotary embedding is short beside
  products, and in families that norm values, or project all three at once, they are not ready.
- Attention to earlier chunks needs the queries alone, so keys and values could travel beside it;
  but they, too, are few, and attending twice, with the results merged, costs more than it hides.
- The next chunk in the same layer depends on none of this, but its hidden states come out of the
  layers before: two chunks would have to run side by side, a layer apart, each with its frames.
- Cut into groups of heads, attention could hide the exchanges of another group, with a call, a
  store and a node of the graph for each group.
Where a layer is recomputed, more can hide: attention's output, which was kept, is sent before
the layer runs again, so that it travels beside norm and projections; the queries, which nothing but
attention's own backward reads, travel beside the rest of the layer and its backward.

[Note: a rank without tokens]
A chunk may have fewer tokens than there are ranks. Modules are not made for no tokens at all, so a
rank without any runs one token of the row's: it sends nothing of it to the others, gets nothing
back in attention, and has no label for it, so every gradient that it gives is zero.

Everything here is plain arithmetic; `sppo_hf.pipeline.sequence_parallel` has the collectives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from sppo_hf.errors import ConfigError

# B batch rows, N query heads, K key/value heads, c tokens of this rank's part, C tokens of the
# chunk, H head size. n is the number of ranks.

ValueT = TypeVar("ValueT")


@dataclass(slots=True)
class RecomputeExchanges:
    """What ranks exchange while they recompute a layer; once, however often it must run."""

    out: Exchange
    """Attention's output, from heads to tokens: started before the layer runs."""
    query: Exchange | None = None
    """Queries, from tokens to heads: waited for when attention's own backward reads them."""


class Exchange(Protocol):
    """A tensor that was sent to the other ranks, for what they send."""

    def wait(self) -> Tensor:
        """What has come."""
        ...

    def pending(self) -> Tensor:
        """Where it will be, without a gradient; `SequenceGroup.wait_for` it before it is read."""
        ...


class SequenceGroup(Protocol):
    """The ranks that share a sequence; all of them call each method at the same moments."""

    @property
    def size(self) -> int:
        """n, at least 2."""
        ...

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        ...

    @property
    def head_blocks(self) -> int | None:
        """See `local_heads`."""
        ...

    def start_tokens_to_heads(self, x_BNcH: Tensor, chunk_tokens: int) -> Exchange:
        """Give every rank its heads of all tokens: `[B, N, c, H]` to `[B, N / n, C, H]`."""
        ...

    def start_heads_to_tokens(self, x_BNCH: Tensor) -> Exchange:
        """Give every rank its tokens of all heads: `[B, N / n, C, H]` to `[B, N, c, H]`."""
        ...

    def wait_for(self, x: Tensor) -> Tensor:
        """A tensor that was `pending`, once it is there; others are there at once."""
        ...

    def gather_tokens(self, x_BcD: Tensor, chunk_tokens: int) -> Tensor:
        """All tokens on every rank, `[B, C, D]`; see [Note: gradients of a shared sequence]."""
        ...

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum of a tensor over the ranks; see [Note: gradients of a shared sequence]."""
        ...

    def decide(self, make: Callable[[], ValueT], better: Callable[[ValueT], float]) -> ValueT:
        """What one rank has made, on all of them: the one for which `better` is smallest.

        Raises:
            Exception: What `make` raised here.
            PipelineError: It raised on another rank.
        """
        ...


@contextmanager
def rank_random_state(group: SequenceGroup | None, device: torch.device) -> Iterator[None]:
    """Let dropout draw otherwise on each rank that shares a sequence; afterwards all are alike.

    Trainers give all ranks one seed, by which tokens of different ranks would be dropped alike.
    Recomputation in backward restores what held in forward, wherever that came from.
    """
    if group is None or not torch.is_grad_enabled():
        yield
        return
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed + group.rank)
        yield


def rank_tokens(start: int, end: int, rank: int, size: int) -> tuple[int, int]:
    """The tokens of `[start, end)` that a rank holds.

    Where there are fewer than ranks, the last ranks have one each and the others none.
    """
    tokens = end - start
    return start + tokens * rank // size, start + tokens * (rank + 1) // size


def rank_token_counts(tokens: int, size: int) -> list[int]:
    """Tokens of each rank's part of a chunk of `tokens` tokens."""
    ends = [tokens * rank // size for rank in range(size + 1)]
    return [end - start for start, end in itertools.pairwise(ends)]


def check_heads(num_heads: int, size: int, name: str) -> None:
    """Refuse ranks that cannot have equally many heads.

    Of layers that have different numbers `num_heads` is what divides all of them.

    Raises:
        ConfigError: `size` does not divide `num_heads`; says which sizes do.
    """
    if num_heads % size:
        allowed = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ConfigError(
            f"sp_size={size} does not divide the {num_heads} attention heads of {name}, which the "
            "ranks that share a sequence divide among them. Allowed: "
            f"{', '.join(map(str, allowed))}. Remedy: one of these that divides the number of "
            "processes, too; more processes than that are data-parallel replicas."
        )


def needed_kv_heads(num_heads: int, num_kv_heads: int, size: int) -> list[int] | None:
    """Which key/value head each rank's groups of query heads need, rank by rank.

    Query heads `[r * N / n, (r + 1) * N / n)` are rank r's. They are cut into groups of equally
    many heads that share one key/value head, as large as can be.

    Returns:
        Key/value heads by group, as many for each rank; a head that several ranks need is there
        several times. None where it is every head once, in order.
    """
    own, sharing = num_heads // size, num_heads // num_kv_heads
    group = math.gcd(own, sharing)
    if group == sharing:
        return None
    return [first // sharing for first in range(0, num_heads, group)]


def local_heads(num_heads: int, part: int, size: int, head_blocks: int | None = None) -> range:
    """The heads, of so many queries, keys or values, of one of the ranks that divide them.

    `head_blocks` runs of equally many heads are not divided further; None where `size` divides
    `num_heads`.
    """
    runs = num_heads if head_blocks is None else head_blocks
    heads = num_heads // runs
    return range(heads * (runs * part // size), heads * (runs * (part + 1) // size))


def held_kv_heads(
    num_heads: int, num_kv_heads: int, part: int, size: int, head_blocks: int | None = None
) -> list[range]:
    """For each key/value head that a rank holds, in order, the query heads it is held for."""
    order = None if head_blocks is not None else needed_kv_heads(num_heads, num_kv_heads, size)
    count = num_kv_heads if order is None else len(order)
    group = num_heads // count
    held = local_heads(count, part, size, head_blocks)
    return [range(group * head, group * (head + 1)) for head in held]


def kv_head_transfers(have: list[range], need: list[range]) -> tuple[list[int], list[int]]:
    """Which keys pass between two ranks, of sets that divide the same heads otherwise.

    Each key/value head that the second rank holds comes from the rank that has the first of the
    query heads for which it is held; gradients go back the same way. What they hold is said by
    `held_kv_heads`.

    Returns:
        Their places among the key/value heads that the first rank holds, and, as many, among those
        of the second.
    """
    pairs = [
        (source, target)
        for target, wanted in enumerate(need)
        for source, held in enumerate(have)
        if wanted.start in held
    ]
    return [source for source, _ in pairs], [target for _, target in pairs]


def select_kv_heads(x_BKcH: Tensor, heads: list[int] | None) -> Tensor:
    """The heads of `needed_kv_heads`, `[B, len(heads), c, H]`; their gradients are summed."""
    if heads is None:
        return x_BKcH
    # Not by an index: autograd would save it, and a copy on the host would wait for the device.
    return torch.cat([x_BKcH[:, head : head + 1] for head in heads], dim=1)
