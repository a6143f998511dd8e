"""Sizes of schedules that tests go through: a handful by default, and all that are promised."""

from collections.abc import Iterator
from itertools import product

from sppo_hf.schedule.generate import GENERATORS, Size, is_interleaved

Named = tuple[str, Size]


def named_sizes(
    ranks: tuple[int, ...], micro_batches: tuple[int, ...], chunks: tuple[int, ...]
) -> Iterator[Named]:
    """Yield every generator with every size, V from 1 to 4 where it may."""
    for name in GENERATORS:
        virtual = (1, 2, 3, 4) if is_interleaved(name) else (1,)
        for p, m, n, v in product(ranks, micro_batches, chunks, virtual):
            yield name, Size(p, m, n, v)


FEW = list(named_sizes((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 4)))
"""Small ones, in which every remainder of micro-batches and chunks by ranks occurs."""

SOME = [
    ("seq1f1b", Size(3, 2, 3)),
    ("1f1b", Size(3, 4, 2)),
    ("gpipe", Size(2, 2, 2)),
    ("zb_seq1f1b", Size(3, 3, 2)),
    ("interleaved_seq1f1b", Size(2, 2, 2, 2)),
    ("interleaved_seq1f1b", Size(4, 3, 3, 2)),
]
"""One or two of each generator."""
