"""Which keys a chunk's queries see, as causal segments, and the blocks in which keys are read.

A chunk of a padded or packed batch is cut into *segments*: a run of queries of one or all rows that
attends causally to one run of keys. Packed documents (block-diagonal masks) and key padding then
need no mask tensor and no special kernel: every causal attention kernel can do them, exactly. Keys
that do not all fit on the device are read in blocks of whole chunks, whose results are merged. This
module computes with integers only.

Padding in front of a row counts as a document of its own. Masks that are not causal, or padding
between real tokens, are refused by the batch layout (`sppo_hf.engine.forward_calls`).
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
    only for padded queries, which see all real keys of their row.
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

    A padded row has one document `[0, length)`, whose keys the padded tail sees too.
    """

    documents: tuple[tuple[int, int], ...]
    valid_tokens: int
    """Keys at and after this index are padding that no query may see."""


@dataclass(frozen=True, slots=True)
class BidirectionalSpan:
    """Tokens `[start, end)` of `row` that see each other in both directions, such as an image's.

    They see earlier tokens as others do. All of them are in one chunk.
    """

    row: int
    start: int
    end: int
    beyond_window: bool = False
    """Whether a sliding window hides none of them from each other."""

    def segments(self, window: int | None) -> Iterator[tuple[AttentionSegment, bool]]:
        """Yield what the span's queries see that no causal segment has, and whether it is reversed.

        Where it is, the last query sees one key, the last, and each before it one key more.
        """
        yield AttentionSegment(self.row, self.start, self.end - 1, self.start + 1, self.end), True
        if self.beyond_window and window is not None and self.start + window < self.end:
            first, last = self.start + window, self.end - window
            yield AttentionSegment(self.row, first, self.end, self.start, last), False


def chunk_segments(
    start: int,
    end: int,
    rows: tuple[RowSpans, ...] | None,
    *,
    window: int | None,
    local: int | None = None,
) -> tuple[AttentionSegment, ...]:
    """Cut chunk `[start, end)` into segments, in order of row and query.

    `rows` is None when every row is one document without padding. With a sliding `window` a query
    sees itself and `window - 1` earlier keys; with `local`, the tokens of a block (Llama 4's
    chunked attention), the keys of its own block, counted from the start of its document. Queries
    that see no key at all (a row without real tokens, padding further than a window behind the last
    real token) are in no segment.
    """
    if rows is None:
        rows = (RowSpans(((0, end),), end),)
    same = all(spans == rows[0] for spans in rows)
    segments: list[AttentionSegment] = []
    for row, spans in enumerate(rows[:1] if same else rows):
        segments += _row_segments(None if same else row, spans, start, end, window, local)
    return tuple(segments)


def group_adjacent(segments: Iterable[AttentionSegment]) -> Iterator[tuple[AttentionSegment, ...]]:
    """Group segments that a kernel for packed documents can do in one call.

    Yields:
        Runs of segments of one row whose queries and keys are adjacent and each of which ends at
        its last query's own key. Any other segment is a run by itself.
    """
    run: list[AttentionSegment] = []
    for segment in segments:
        if run and not _is_adjacent(run[-1], segment):
            yield tuple(run)
            run = []
        run.append(segment)
    if run:
        yield tuple(run)


def _is_adjacent(one: AttentionSegment, other: AttentionSegment) -> bool:
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
        for first, q_start, q_end in _local_runs(document_start, begin, stop, local):
            first_key = _first_key(first, q_start, window)
            segments.append(AttentionSegment(row, q_start, q_end, first_key, q_end))
    pad_start = max(start, spans.valid_tokens)
    document_start = max(s for s, _ in spans.documents if s <= spans.valid_tokens)
    for first, q_start, q_end in _local_runs(document_start, pad_start, end, local):
        first_key = _first_key(first, q_start, window)
        if first_key < spans.valid_tokens:
            segments.append(AttentionSegment(row, q_start, q_end, first_key, spans.valid_tokens))
    return segments


def _local_runs(
    document_start: int, start: int, end: int, local: int | None
) -> Iterator[tuple[int, int, int]]:
    """Yield (first visible key, start, end) for runs of queries of one local block or document."""
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
    """The keys of consecutive chunks, read together."""

    chunks: range
    start: int
    """First token."""
    end: int
    """One past the last token."""

    def cut(self, segments: Iterable[AttentionSegment]) -> Iterator[AttentionSegment]:
        """Yield `segments` restricted to this block's keys.

        Queries are not restricted, even where a window hides the whole block from some of them:
        backends return a log-sum-exp of -inf for those, and merging gives them weight zero.
        """
        for segment in segments:
            k_start, k_end = max(segment.k_start, self.start), min(segment.k_end, self.end)
            if k_start < k_end:
                yield replace(segment, k_start=k_start, k_end=k_end)


def whole_sequence(bounds: Bounds) -> Block:
    """Return all chunks as one block."""
    return Block(range(len(bounds)), bounds[0][0], bounds[-1][1])


def cut_blocks(
    bounds: Bounds, segments: tuple[AttentionSegment, ...], *, block_tokens: int
) -> tuple[Block, ...]:
    """Return the blocks of at most `block_tokens` that `segments` read, in order of tokens.

    Chunks with none of these keys are in no block; a chunk longer than a block is one by itself.
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
