"""Sequence parallelism: the interface to the ranks that share every chunk of a sequence.

Each of n ranks holds a contiguous part of every chunk's tokens, with their hidden states, saved
activations and losses. Attention needs all tokens, but not all heads. So before attention the ranks
exchange tokens for heads; each attends with its heads over all tokens of the chunk and stores the
K/V of these heads; afterwards they exchange heads for tokens (DeepSpeed-Ulysses, arXiv 2309.14509,
section 3.1). The collectives are in `sppo_hf.pipeline.sequence_parallel`.

[Note: gradients of a shared sequence]
A parameter's gradient is the sum over the ranks' tokens. Data parallelism (DDP, FSDP2) averages
gradients over all ranks, so each rank's gradient is multiplied by n where the loss begins
(`sum_over_ranks`), and the average is the sum. Where all ranks compute the same from gathered
tokens (`gather_tokens`), each gets the whole gradient and takes the part of its own tokens, times
n. So no other code in backward needs to know that a sequence is shared.

[Note: what the exchanges overlap with]
Queries, keys and values are all sent before the first of them is waited for, and so are their
gradients in backward. While one is in transit, another is copied into or out of its send buffer.
Layers still wait for the exchanges, since attention is called when all three are there, and the
rest of the layer needs its output. What could overlap more, and why it is not done:
- Queries and keys leave the rotary embedding right before a family's forward calls attention, so
  they cannot be sent earlier.
- Values are ready before that, after their projection, where a hook could send them. But they are
  the smallest of the three (one head for several query heads), the rotary embedding is short, and
  in families that normalise values, or project all three at once, they are not ready.
- Attention to earlier chunks needs only the queries, so K/V could be exchanged during it. But they
  are small, and two calls of attention whose results are merged cost more than that saves.
- The next chunk in the same layer is independent, but its hidden states come out of the layers
  before: two chunks would have to run at once, a layer apart, each with saved activations.
- With heads in several groups, attention of one group could overlap the exchange of another, at
  the cost of a call, a K/V store and a graph node for each group.
Recomputation overlaps more: attention's output, which was saved, is sent before the layer reruns,
during its norm and projections; queries, which only attention's own backward reads, are sent during
the rest of the layer and its backward.

[Note: a rank without tokens]
A chunk may have fewer tokens than there are ranks. Modules may fail on empty tensors, so a rank
without tokens runs one token of the row. It sends nothing of it, receives nothing for it in
attention, and has no label for it, so all of its gradients are zero.
"""

from __future__ import annotations

import itertools
import math
import zlib
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
    """Exchanges while a layer is recomputed; made once, even if the layer must rerun twice."""

    out: Exchange
    """Attention's output, from heads to tokens; started before the layer reruns."""
    query: Exchange | None = None
    """Queries, from tokens to heads; waited for when attention's own backward reads them."""
    indices: Tensor | None = None
    """What all queries read, where an indexer has chosen; gathered."""


class Exchange(Protocol):
    """An exchange of tensors with the other ranks that is under way."""

    def wait(self) -> Tensor:
        """Wait for the received tensor and return it."""
        ...

    def pending(self) -> Tensor:
        """The tensor that will be received, without gradient; see `SequenceGroup.wait_for`."""
        ...


class SequenceGroup(Protocol):
    """The ranks that share a sequence; all of them make the same calls in the same order."""

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
        """Exchange this rank's tokens for its heads: `[B, N, c, H]` to `[B, N / n, C, H]`."""
        ...

    def start_heads_to_tokens(self, x_BNCH: Tensor) -> Exchange:
        """Exchange this rank's heads for its tokens: `[B, N / n, C, H]` to `[B, N, c, H]`."""
        ...

    def wait_for(self, x: Tensor) -> Tensor:
        """Wait until `x` was received, if it is a `pending` tensor, and return it."""
        ...

    def gather_tokens(self, x_BcD: Tensor, chunk_tokens: int) -> Tensor:
        """All tokens on every rank, `[B, C, D]`; see [Note: gradients of a shared sequence]."""
        ...

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum of a tensor over the ranks; see [Note: gradients of a shared sequence]."""
        ...

    def decide(self, make: Callable[[], ValueT], better: Callable[[ValueT], float]) -> ValueT:
        """Return on all ranks the value of the rank for which `better` is smallest.

        Raises:
            Exception: Whatever `make` raised on this rank.
            PipelineError: `make` raised on another rank.
        """
        ...


@contextmanager
def rank_random_state(group: SequenceGroup | None, device: torch.device) -> Iterator[None]:
    """Context in which each rank that shares a sequence draws its own random numbers.

    Trainers give all ranks the same seed, so dropout would drop the same tokens on each of them.
    Recomputation restores the random state of the forward, so it draws the same numbers again.
    Afterwards the state is as before where nothing was drawn, as without sharing: scripts draw the
    order of their rows from it.
    """
    if group is None or not torch.is_grad_enabled():
        yield
        return
    on_cuda = device.type == "cuda"

    def states() -> list[Tensor]:
        cuda = [torch.cuda.get_rng_state(device)] if on_cuda else []
        return [*cuda, torch.get_rng_state()]

    # The device's own comes first: its modules draw from that.
    seed = zlib.crc32(states()[0].numpy().tobytes())
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        torch.manual_seed(seed + group.rank)
        before = states()
        yield
        is_drawn = not all(map(torch.equal, before, states()))
    if is_drawn:  # the next forward draws other numbers
        torch.empty((), device=device).uniform_()


def rank_tokens(start: int, end: int, rank: int, size: int) -> tuple[int, int]:
    """The tokens of `[start, end)` that a rank holds, as a half-open range.

    If there are fewer tokens than ranks, the last ranks hold one each and the others none.
    """
    tokens = end - start
    return start + tokens * rank // size, start + tokens * (rank + 1) // size


def rank_token_counts(tokens: int, size: int) -> list[int]:
    """Tokens of each rank's part of a chunk of `tokens` tokens."""
    ends = [tokens * rank // size for rank in range(size + 1)]
    return [end - start for start, end in itertools.pairwise(ends)]


def check_heads(num_heads: int, size: int, name: str) -> None:
    """Refuse a number of ranks that does not divide the heads.

    If layers have different numbers of heads, `num_heads` is their greatest common divisor.

    Raises:
        ConfigError: `size` does not divide `num_heads`; names the sizes that do.
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
    """The K/V heads that each rank's query heads need, rank by rank.

    Rank r has query heads `[r * N / n, (r + 1) * N / n)`. They are divided into groups that share
    one K/V head; all groups have the same size, which is as large as possible.

    Returns:
        The K/V head of each group. Every rank has the same number of groups, and a head that
        several ranks need is listed several times. None if that is every head once, in order.
    """
    own, sharing = num_heads // size, num_heads // num_kv_heads
    group = math.gcd(own, sharing)
    if group == sharing:
        return None
    return [first // sharing for first in range(0, num_heads, group)]


def local_heads(num_heads: int, part: int, size: int, head_blocks: int | None = None) -> range:
    """The heads of rank `part` of `size` ranks that divide `num_heads` heads.

    Heads are divided in `head_blocks` blocks of equal size; None if `size` divides `num_heads`.
    """
    runs = num_heads if head_blocks is None else head_blocks
    heads = num_heads // runs
    return range(heads * (runs * part // size), heads * (runs * (part + 1) // size))


def held_kv_heads(
    num_heads: int, num_kv_heads: int, part: int, size: int, head_blocks: int | None = None
) -> list[range]:
    """The query heads that read each of the K/V heads of rank `part`, one range per K/V head."""
    order = None if head_blocks is not None else needed_kv_heads(num_heads, num_kv_heads, size)
    count = num_kv_heads if order is None else len(order)
    group = num_heads // count
    held = local_heads(count, part, size, head_blocks)
    return [range(group * head, group * (head + 1)) for head in held]


def kv_head_transfers(have: list[range], need: list[range]) -> tuple[list[int], list[int]]:
    """The K/V heads that one rank sends to another which divides the same heads differently.

    A K/V head comes from the rank that holds it for the first of the receiver's query heads;
    gradients return the same way. `have` and `need` are `held_kv_heads` of sender and receiver.

    Returns:
        Indices among the sender's K/V heads, and the corresponding ones of the receiver.
    """
    pairs = [
        (source, target)
        for target, wanted in enumerate(need)
        for source, held in enumerate(have)
        if wanted.start in held
    ]
    return [source for source, _ in pairs], [target for _, target in pairs]


def select_kv_heads(x_BKcH: Tensor, heads: list[int] | None) -> Tensor:
    """Select K/V heads, `[B, len(heads), c, H]`; heads selected twice sum their gradients."""
    if heads is None:
        return x_BKcH
    # Not by an index tensor, which autograd would save and a copy to the device would wait for.
    return torch.cat([x_BKcH[:, head : head + 1] for head in heads], dim=1)
