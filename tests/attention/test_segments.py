"""Every visible (query, key) pair is in exactly one segment, and no hidden pair is in any.

Blocks are whole consecutive chunks, no more tokens than allowed, and cover what is read.
"""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.attention.segments import (
    AttentionSegment,
    Block,
    RowSpans,
    chunk_segments,
    cut_blocks,
    group_adjacent,
    whole_sequence,
)


def _visible(spans: RowSpans, query: int, key: int, window: int | None, local: int | None) -> bool:
    if key > query or key >= spans.valid_tokens:
        return False
    if window is not None and key <= query - window:
        return False
    # Padding belongs to the last document that has real tokens.
    start = max(s for s, _ in spans.documents if s <= min(query, spans.valid_tokens))
    if local is not None and (query - start) // local != (key - start) // local:
        return False
    return key >= start


@st.composite
def _problems(draw):
    total = draw(st.integers(1, 24))
    packed = draw(st.booleans())
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        if packed:
            starts = sorted({0, *draw(st.lists(st.integers(0, total - 1), max_size=4))})
            documents = tuple(zip(starts, [*starts[1:], total], strict=True))
            rows.append(RowSpans(documents, total))
        else:
            rows.append(RowSpans(((0, total),), draw(st.integers(0, total))))
    start = draw(st.integers(0, total - 1))
    end = draw(st.integers(start + 1, total))
    window = draw(st.one_of(st.none(), st.integers(1, total + 2)))
    local = draw(st.one_of(st.none(), st.integers(1, total + 2)))
    return tuple(rows), start, end, window, local


@given(_problems())
def test_pieces_cover_exactly_what_is_visible(problem):
    rows, start, end, window, local = problem
    covered: dict[tuple[int, int, int], int] = {}
    for segment in chunk_segments(start, end, rows, window=window, local=local):
        assert start <= segment.q_start < segment.q_end <= end
        assert segment.k_start < segment.k_end
        for row in range(len(rows)) if segment.row is None else [segment.row]:
            for query in range(segment.q_start, segment.q_end):
                for key in range(segment.k_start, min(segment.k_end, query + 1)):
                    if window is None or key > query - window:
                        pair = (row, query, key)
                        covered[pair] = covered.get(pair, 0) + 1
    expected = {
        (row, query, key): 1
        for row, spans in enumerate(rows)
        for query in range(start, end)
        for key in range(end)
        if _visible(spans, query, key, window, local)
    }
    assert covered == expected


def test_plain_rows_are_one_piece_cut_at_the_window():
    (segment,) = chunk_segments(8, 12, None, window=3)
    assert (segment.row, segment.q_start, segment.q_end, segment.k_start, segment.k_end) == (
        None,
        8,
        12,
        6,
        12,
    )


def test_plain_rows_are_cut_where_blocks_end_and_read_no_key_before_them():
    segments = chunk_segments(5, 15, None, window=None, local=7)
    assert [(p.q_start, p.q_end, p.k_start, p.k_end) for p in segments] == [
        (5, 7, 0, 7),
        (7, 14, 7, 14),
        (14, 15, 14, 15),
    ]


def test_chunks_of_earlier_blocks_are_not_brought_back():
    bounds = ((0, 4), (4, 8), (8, 12), (12, 16))
    segments = chunk_segments(12, 16, None, window=None, local=10)
    (block,) = cut_blocks(bounds, segments, block_tokens=16)
    assert (block.chunks, block.start, block.end) == (range(2, 4), 8, 16)


def test_rows_that_are_alike_share_one_piece():
    spans = RowSpans(((0, 4), (4, 9)), 9)
    assert all(segment.row is None for segment in chunk_segments(0, 9, (spans, spans), window=None))


@given(_problems())
def test_runs_keep_all_pieces_in_order_and_are_what_one_call_can_do(problem):
    rows, start, end, window, local = problem
    segments = chunk_segments(start, end, rows, window=window, local=local)
    runs = list(group_adjacent(segments))
    assert tuple(segment for run in runs for segment in run) == segments
    for run in runs:
        if len(run) > 1:
            assert len({segment.row for segment in run}) == 1
            assert all(segment.q_end == segment.k_end for segment in run)
            queries = sum(segment.q_end - segment.q_start for segment in run)
            keys = sum(segment.k_end - segment.k_start for segment in run)
            assert queries == run[-1].q_end - run[0].q_start
            assert keys == run[-1].k_end - run[0].k_start


def test_documents_are_one_run_and_padding_is_its_own():
    spans = RowSpans(((0, 4), (4, 6), (6, 12)), 9)
    segments = chunk_segments(2, 12, (spans,), window=None)
    assert [len(run) for run in group_adjacent(segments)] == [3, 1]


# -- blocks --------------------------------------------------------------------------------------

BOUNDS = ((0, 3), (3, 4), (4, 9), (9, 12))


def _spans(blocks):
    return [(b.start, b.end) for b in blocks]


def test_everything_at_once():
    blocks = cut_blocks(BOUNDS, (AttentionSegment(None, 9, 12, 0, 12),), block_tokens=12)
    assert blocks == (whole_sequence(BOUNDS),)


def test_a_long_chunk_is_a_block_of_its_own():
    blocks = cut_blocks(BOUNDS, (AttentionSegment(None, 9, 12, 0, 12),), block_tokens=4)
    assert _spans(blocks) == [(0, 4), (4, 9), (9, 12)]
    assert [list(b.chunks) for b in blocks] == [[0, 1], [2], [3]]


def test_chunks_behind_a_window_or_in_a_hole_are_not_read():
    assert _spans(cut_blocks(BOUNDS, (AttentionSegment(None, 9, 12, 5, 12),), block_tokens=99)) == [
        (4, 12)
    ]
    segments = (AttentionSegment(0, 9, 12, 9, 12), AttentionSegment(1, 9, 12, 1, 3))
    assert _spans(cut_blocks(BOUNDS, segments, block_tokens=99)) == [(0, 3), (9, 12)]
    assert cut_blocks(BOUNDS, (), block_tokens=99) == ()


def test_pieces_are_cut_to_the_block():
    block = Block(range(1, 3), 3, 9)
    segments = (
        AttentionSegment(0, 9, 12, 0, 12),
        AttentionSegment(1, 9, 12, 9, 12),
        AttentionSegment(2, 9, 10, 5, 8),
    )
    assert list(block.cut(segments)) == [
        AttentionSegment(0, 9, 12, 3, 9),
        AttentionSegment(2, 9, 10, 5, 8),
    ]


@given(data=st.data())
def test_each_key_of_a_piece_is_in_exactly_one_block(data):
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    edges = [0, *itertools.accumulate(lengths)]
    bounds = tuple(itertools.pairwise(edges))
    key = st.integers(0, edges[-1] - 1)
    spans = data.draw(st.lists(st.tuples(key, key).map(sorted), max_size=3))
    segments = tuple(
        AttentionSegment(row, 0, 1, low, high + 1) for row, (low, high) in enumerate(spans)
    )
    block_tokens = data.draw(st.integers(1, edges[-1] + 1))
    blocks = cut_blocks(bounds, segments, block_tokens=block_tokens)
    for block in blocks:
        assert bounds[block.chunks.start][0] == block.start
        assert bounds[block.chunks.stop - 1][1] == block.end
        assert len(block.chunks) == 1 or block.end - block.start <= block_tokens
        assert list(block.cut(segments)), "a block that nobody reads is not brought"
    for segment in segments:
        seen = [k for b in blocks for p in b.cut((segment,)) for k in range(p.k_start, p.k_end)]
        assert seen == list(range(segment.k_start, segment.k_end))
