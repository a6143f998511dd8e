"""Which keys a chunk's queries see, as a list of plain causal problems; which are read together.

A chunk of a padded or packed batch is cut into *segments*: a run of queries of some rows that
attends to one run of keys, causally. Block-diagonal masks (packed documents) and key padding
then need no mask tensor and no special kernel: every backend that can do causal attention can
do them, exactly. Over keys that do not all fit on the device, attention runs block by block of
whole chunks, and is merged. This module is integers only.

Padding in front of a row is a document of its own. Not covered: masks that are not causal, holes in
the padding mask. The batch layout (`sppo_hf.engine.batch_layout`) refuses those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

Bounds = tuple[tuple[int, int], ...]
"""`(start, end)` of every chunk, in tokens."""


@dataclass(frozen=True, slots=True)
class AttentionSegment:
    """Queries `[q_start, q_end)` of `row` attend causally to keys `[k_start, k_end)`.

    Positions are indices into the whole sequence. `k_end <= q_end`; it is smaller than `q_start`
    only for padded queries, which see every real key of their row.
    """

    row: int | None
    """Row of the batch, or None for all rows at once."""
    q_start: int
    q_end: int
    k_start: int
    k_end: int


@dataclass(frozen=True, slots=True)
class RowSpans:
    """The documents of one row: consecutive `[start, end)` spans that cover `[0, total)`.

    With padding there is one document `[0, length)` and the padded tail sees the keys of it.
    """

    documents: tuple[tuple[int, int], ...]
    valid_tokens: int
    """Keys at and after this index are padding that no query may see."""


def chunk_segments(
    start: int,
    end: int,
    rows: tuple[RowSpans, ...] | None,
    *,
    window: int | None,
    local: int | None = None,
) -> tuple[AttentionSegment, ...]:
    """Cut chunk `[start, end)` into segments.

    Args:
        start: First token of the chunk.
        end: One past its last token.
        rows: The spans of every row, or None when every row is one document without padding.
        window: Sliding window in tokens (a query sees itself and `window - 1` earlier keys).
        local: Tokens of a block (Llama 4's chunked attention): a query sees the keys of its own
            block, counted from the start of its document.

    Returns:
        Pieces in order of row and query. Queries that see no key at all (a row without real
        tokens, padding further than a window behind the last real token) are in no segment.
    """
    if rows is None:
        return tuple(
            AttentionSegment(None, q_start, q_end, _first_key(first, q_start, window), q_end)
            for first, q_start, q_end in _own_blocks(0, start, end, local)
        )
    same = all(spans == rows[0] for spans in rows)
    segments: list[AttentionSegment] = []
    for row, spans in enumerate(rows[:1] if same else rows):
        segments += _row_segments(None if same else row, spans, start, end, window, local)
    return tuple(segments)


def side_by_side(segments: Iterable[AttentionSegment]) -> Iterator[tuple[AttentionSegment, ...]]:
    """Group the segments that a kernel for documents of any length can do in one call.

    Yields:
        Runs of segments of one row whose queries and keys are adjacent and each of which ends at
        its last query's own key. Any other segment is a run of its own.
    """
    run: list[AttentionSegment] = []
    for segment in segments:
        if run and not _follows(run[-1], segment):
            yield tuple(run)
            run = []
        run.append(segment)
    if run:
        yield tuple(run)


def _follows(one: AttentionSegment, other: AttentionSegment) -> bool:
    ends_alike = one.q_end == one.k_end and other.q_end == other.k_end
    adjacent = one.q_end == other.q_start and one.k_end == other.k_start
    return one.row == other.row and ends_alike and adjacent


def _row_segments(
    row: int | None,
    spans: RowSpans,
    start: int,
    end: int,
    window: int | None,
    local: int | None,
) -> list[AttentionSegment]:
    segments: list[AttentionSegment] = []
    for document_start, document_end in spans.documents:
        begin = max(start, document_start)
        stop = min(end, document_end, max(spans.valid_tokens, document_start))
        for first, q_start, q_end in _own_blocks(document_start, begin, stop, local):
            first_key = _first_key(first, q_start, window)
            segments.append(AttentionSegment(row, q_start, q_end, first_key, q_end))
    pad_start = max(start, spans.valid_tokens)
    document_start = max(s for s, _ in spans.documents if s <= spans.valid_tokens)
    for first, q_start, q_end in _own_blocks(document_start, pad_start, end, local):
        first_key = _first_key(first, q_start, window)
        if first_key < spans.valid_tokens:
            segments.append(AttentionSegment(row, q_start, q_end, first_key, spans.valid_tokens))
    return segments


def _own_blocks(
    document_start: int, start: int, end: int, local: int | None
) -> Iterator[tuple[int, int, int]]:
    """Runs of queries `[start, end)` that may see the same first key: (that key, start, end)."""
    while start < end:
        if local is None:
            yield document_start, start, end
            return
        first = start - (start - document_start) % local
        stop = min(end, first + local)
        yield first, start, stop
        start = stop


def _first_key(first: int, q_start: int, window: int | None) -> int:
    return first if window is None else max(first, q_start - window + 1)


@dataclass(frozen=True, slots=True)
class Block:
    """The keys of consecutive chunks."""

    chunks: range
    start: int
    """First token."""
    end: int
    """One past the last token."""

    def cut(self, segments: Iterable[AttentionSegment]) -> Iterator[AttentionSegment]:
        """What is left of `segments` when only this block's keys are there.

        Queries stay as they are, also where a window hides the whole block from some of them:
        backends give those a log-sum-exp of -inf, and merging weighs them with zero.
        """
        for segment in segments:
            k_start, k_end = max(segment.k_start, self.start), min(segment.k_end, self.end)
            if k_start < k_end:
                yield replace(segment, k_start=k_start, k_end=k_end)


def whole_sequence(bounds: Bounds) -> Block:
    """All chunks as one block."""
    return Block(range(len(bounds)), bounds[0][0], bounds[-1][1])


def cut_blocks(
    bounds: Bounds, segments: tuple[AttentionSegment, ...], *, block_tokens: int
) -> tuple[Block, ...]:
    """The blocks that `segments` read, in order of their tokens.

    Chunks without any of their keys are in no block; one longer than `block_tokens` has its own.
    """
    blocks: list[Block] = []
    for chunk, (start, end) in enumerate(bounds):
        if not any(segment.k_start < end and start < segment.k_end for segment in segments):
            continue
        last = blocks[-1] if blocks else None
        if last is not None and last.chunks.stop == chunk and end - last.start <= block_tokens:
            blocks[-1] = Block(range(last.chunks.start, chunk + 1), last.start, end)
        else:
            blocks.append(Block(range(chunk, chunk + 1), start, end))
    return tuple(blocks)
