"""Which keys are read together: whole consecutive chunks, at most so many tokens of them.

Attention over keys that do not all fit on the device runs block by block and is merged. This module
is integers only; it knows nothing of tensors, of kernels or of where the keys are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from sppo_hf.attention.segments import AttentionSegment

Bounds = tuple[tuple[int, int], ...]
"""`(start, end)` of every chunk, in tokens."""


@dataclass(frozen=True, slots=True)
class Block:
    """The keys of consecutive chunks."""

    chunks: range
    start: int
    """First token."""
    end: int
    """One past the last token."""

    def cut(self, pieces: Iterable[AttentionSegment]) -> Iterator[AttentionSegment]:
        """What is left of `segments` when only this block's keys are there.

        Queries stay as they are, also where a window hides the whole block from some of them:
        backends give those a log-sum-exp of -inf, and merging weighs them with zero.
        """
        for piece in pieces:
            k_start, k_end = max(piece.k_start, self.start), min(piece.k_end, self.end)
            if k_start < k_end:
                yield replace(piece, k_start=k_start, k_end=k_end)


def whole_sequence(bounds: Bounds) -> Block:
    """All chunks as one block."""
    return Block(range(len(bounds)), bounds[0][0], bounds[-1][1])


def cut_blocks(
    bounds: Bounds, pieces: tuple[AttentionSegment, ...], *, block_tokens: int
) -> tuple[Block, ...]:
    """The blocks that `segments` read, in order of their tokens.

    Args:
        bounds: Chunks of the sequence.
        pieces: What is attended to. Chunks without any of their keys are in no block.
        block_tokens: Most tokens of a block; a chunk that is longer is a block of its own.
    """
    blocks: list[Block] = []
    for chunk, (start, end) in enumerate(bounds):
        if not any(piece.k_start < end and start < piece.k_end for piece in pieces):
            continue
        last = blocks[-1] if blocks else None
        if last is not None and last.chunks.stop == chunk and end - last.start <= block_tokens:
            blocks[-1] = Block(range(last.chunks.start, chunk + 1), last.start, end)
        else:
            blocks.append(Block(range(chunk, chunk + 1), start, end))
    return tuple(blocks)
