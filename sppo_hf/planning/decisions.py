"""Decisions: everything about one batch shape that the solver, or a user, may choose.

The estimator, the simulator and the engine read these and nothing else of a plan, so what is
predicted is what is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sppo_hf.planning.activation_modes import ActivationMode
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.tiers import TIERS, Tier

Order = Literal["by_chunk", "by_layer"]
"""How the grid of layers and chunks is walked: all layers of a chunk first, as a pipeline must, or
all chunks of a layer first."""

KVMode = str
"""By layer: the tier where a layer's keys and values wait between its forward and its backward, or
"recompute": they are made again from the layer's inputs."""

LayerModes = tuple[tuple[ActivationMode, ...], ...]
"""`layer_modes[chunk][layer]`."""


def layer_modes_of(rows: Sequence[Sequence[ActivationMode]], *, by_layer: bool) -> LayerModes:
    """Returns `layer_modes` of rows that are those of chunks, or by layer those of layers.

    Rows that are equal are one object, which readers need to look at only once.
    """
    chosen = zip(*rows, strict=True) if by_layer else rows
    seen: dict[tuple[int, ...], tuple[ActivationMode, ...]] = {}
    return tuple(seen.setdefault(tuple(map(id, row)), tuple(row)) for row in chosen)


def modes_used(layer_modes: LayerModes) -> frozenset[ActivationMode]:
    """Returns the modes that there are among all frames."""
    rows = {id(row): row for row in layer_modes}
    return frozenset({id(mode): mode for row in rows.values() for mode in row}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """How one batch shape is run, without the reasons."""

    batch_rows: int
    """Rows of the batch that go through the chunks together."""

    bounds: Bounds
    """Half-open (start, end) of each chunk, in tokens."""

    layer_modes: LayerModes
    """`layer_modes[chunk][layer]`: what becomes of each frame."""

    training: bool
    """Whether a backward follows. If not, no frame is kept and modes mean nothing."""

    tile_tokens: int
    """Tokens whose logits exist at once while the loss is computed."""

    layer_tile_tokens: int = 0
    """Tokens of all rows on which a layer's token-wise modules run at once; 0: all of a chunk."""

    order: Order = "by_chunk"
    """How the grid of layers and chunks is walked."""

    kv_modes: tuple[KVMode, ...] = ()
    """`kv_modes[layer]`, by layer only; empty keeps all on the device."""

    accumulates: bool = False
    """Whether gradients of earlier batches are there already: autograd sums up this batch's beside
    them, so that during backward there are two of each."""

    return_logits: bool = False
    """Whether the logits of the whole sequence are kept for the caller."""

    kv_tier: Tier = "device"
    """Where keys and values, and their gradients, wait between their uses."""

    kv_block_tokens: int = 0
    """Away from the device, K/V come back in blocks of whole chunks of at most so many tokens."""

    max_pending_d2h_bytes: int | None = None
    """Device bytes that may wait for their copy to the host; None: those of two frames."""

    max_prefetch_bytes: int | None = None
    """Device bytes that may have come back before their use; None: those of one frame."""

    prefetch_chunks: int | None = None
    """Instead of bytes: the chunks that have come back, whole, before their use; as a pipeline asks
    for them, unit by unit."""

    staging_bytes: int = 2**30
    """Host bytes through which frames pass on their way to and from the disk."""

    @property
    def by_layer(self) -> bool:
        """Whether all chunks of a layer run before the next layer."""
        return self.order == "by_layer"

    @property
    def slots(self) -> range:
        """The outer loop of the grid: chunks, or by layer layers."""
        return range(self.num_layers if self.by_layer else self.num_chunks)

    def units(self, slot: int) -> list[tuple[int, int]]:
        """Returns (chunk, layer) of a slot's units, in their order."""
        if self.by_layer:
            return [(chunk, slot) for chunk in range(self.num_chunks)]
        return [(slot, layer) for layer in range(self.num_layers)]

    @property
    def total_tokens(self) -> int:
        """Tokens of each row, padding included."""
        return self.bounds[-1][1]

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return len(self.bounds)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layer_modes[0])

    @property
    def chunk_lengths(self) -> tuple[int, ...]:
        """Tokens per chunk."""
        return tuple(end - start for start, end in self.bounds)

    def mode(self, layer: int, chunk: int) -> ActivationMode:
        """Returns what becomes of the frame of (layer, chunk)."""
        return self.layer_modes[chunk][layer]

    def kv_mode(self, layer: int) -> KVMode:
        """Returns what becomes of a layer's keys and values, by layer."""
        return self.kv_modes[layer] if self.kv_modes else "device"

    @property
    def farthest_kv_tier(self) -> Tier:
        """The farthest tier on which any keys and values wait."""
        used = {self.kv_tier, *self.kv_modes}
        return next(tier for tier in reversed(TIERS) if tier in used)
