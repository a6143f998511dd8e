"""Neighbouring chunks that are treated alike, so that sixty-four of them read like six.

Knows modes and counts of layers; nothing of tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.modes import ALL_MODES, FrameMode


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """Chunks `first` to `last`, both included, and how many of their layers have each mode."""

    first: int
    """Index of the first chunk."""

    last: int
    """Index of the last chunk."""

    layers: dict[FrameMode, tuple[int, int]]
    """Fewest and most layers per chunk, of modes that occur, in the order of `ALL_MODES`."""

    @property
    def title(self) -> str:
        """The chunks, counted from one: "chunk 3", "chunks 1-5"."""
        if self.first == self.last:
            return f"chunk {self.first + 1}"
        return f"chunks {self.numbers}"

    @property
    def numbers(self) -> str:
        """The same without the word: "3", "1-5"."""
        return span(self.first + 1, self.last + 1)

    @property
    def text(self) -> str:
        """What becomes of the layers: "20 kept, 12 full recompute to host"."""
        parts = (f"{span(*counts)} {words(mode)}" for mode, counts in self.layers.items())
        return ", ".join(parts)


def group_chunks(decisions: Decisions, *, most: int) -> list[ChunkGroup]:
    """Groups neighbours that are treated alike, into `most` groups if it can be.

    Equal ones; if that leaves more than `most`, those with the same modes in other numbers; if that
    still does, as many chunks to a group as it takes.
    """
    chunks = decisions.num_chunks
    counts = [Counter(row) for row in decisions.layer_modes]
    each = -(-chunks // most)
    keys: tuple[Callable[[int], Hashable], ...] = (
        lambda chunk: tuple(sorted((str(mode), n) for mode, n in counts[chunk].items())),
        lambda chunk: frozenset(counts[chunk]),
        lambda chunk: chunk // each,
    )
    groups: list[list[int]] = []
    for key in keys:
        groups = [list(group) for _, group in groupby(range(chunks), key)]
        if len(groups) <= most:
            break
    return [_group(group, counts) for group in groups]


def words(mode: FrameMode) -> str:
    """Says what becomes of a layer's activations: "kept", "to host", "full recompute to host"."""
    recomputed = {"whole": "", "products": "selective recompute", "skeleton": "full recompute"}
    away = f"to {mode.tier}" if mode.offload else ""
    return f"{recomputed[mode.saved]} {away}".strip() or "kept"


def span(low: int, high: int) -> str:
    """Writes a range: "3" or "3-5"."""
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def _group(chunks: Sequence[int], counts: Sequence[Counter[FrameMode]]) -> ChunkGroup:
    layers: dict[FrameMode, tuple[int, int]] = {}
    for mode in ALL_MODES:
        numbers = [counts[chunk][mode] for chunk in chunks]
        if any(numbers):
            layers[mode] = min(numbers), max(numbers)
    return ChunkGroup(chunks[0], chunks[-1], layers)
