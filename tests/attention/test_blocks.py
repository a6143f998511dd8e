"""Blocks are whole consecutive chunks, no more tokens than allowed, and cover what is read."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.attention.blocks import Block, cut_blocks, whole_sequence
from sppo_hf.attention.segments import AttentionSegment

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
    pieces = (AttentionSegment(0, 9, 12, 9, 12), AttentionSegment(1, 9, 12, 1, 3))
    assert _spans(cut_blocks(BOUNDS, pieces, block_tokens=99)) == [(0, 3), (9, 12)]
    assert cut_blocks(BOUNDS, (), block_tokens=99) == ()


def test_pieces_are_cut_to_the_block():
    block = Block(range(1, 3), 3, 9)
    pieces = (
        AttentionSegment(0, 9, 12, 0, 12),
        AttentionSegment(1, 9, 12, 9, 12),
        AttentionSegment(2, 9, 10, 5, 8),
    )
    assert list(block.cut(pieces)) == [
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
    pieces = tuple(
        AttentionSegment(row, 0, 1, low, high + 1) for row, (low, high) in enumerate(spans)
    )
    block_tokens = data.draw(st.integers(1, edges[-1] + 1))
    blocks = cut_blocks(bounds, pieces, block_tokens=block_tokens)
    for block in blocks:
        assert bounds[block.chunks.start][0] == block.start
        assert bounds[block.chunks.stop - 1][1] == block.end
        assert len(block.chunks) == 1 or block.end - block.start <= block_tokens
        assert list(block.cut(pieces)), "a block that nobody reads is not brought"
    for piece in pieces:
        seen = [k for b in blocks for p in b.cut((piece,)) for k in range(p.k_start, p.k_end)]
        assert seen == list(range(piece.k_start, piece.k_end))
