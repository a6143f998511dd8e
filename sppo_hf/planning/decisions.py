"""Decisions: everything about one batch shape that the solver, or a user, may choose.

Estimator, simulator and engine read these and no other part of a plan, so a prediction describes
exactly what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from sppo_hf.planning.activation_modes import KEEP, ActivationMode
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.tiers import TIERS, Tier

Order = Literal["by_chunk", "by_layer"]
"""Order of the grid of layers and chunks: all layers of a chunk first (as a pipeline must), or all
chunks of a layer first."""

KVMode = str
"""Treatment of one layer's K/V in order "by_layer": the tier that holds them between the layer's
forward and backward, or "recompute" to recompute them from the layer's inputs."""

LayerModes = tuple[tuple[ActivationMode, ...], ...]
"""`layer_modes[chunk][layer]`."""


def layer_modes_of(rows: Sequence[Sequence[ActivationMode]], *, by_layer: bool) -> LayerModes:
    """Returns `layer_modes` from rows of modes, one per chunk, or by layer one per layer.

    Equal rows become one object, so that readers process them once.
    """
    chosen = zip(*rows, strict=True) if by_layer else rows
    seen: dict[tuple[int, ...], tuple[ActivationMode, ...]] = {}
    return tuple(seen.setdefault(tuple(map(id, row)), tuple(row)) for row in chosen)


def modes_used(layer_modes: LayerModes) -> frozenset[ActivationMode]:
    """Returns the set of modes that are used."""
    rows = {id(row): row for row in layer_modes}
    return frozenset({id(mode): mode for row in rows.values() for mode in row}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The batch that is planned for: all decisions that no search changes."""

    batch_rows: int
    """Rows of the batch that pass the chunks together."""

    tile_tokens: int
    """Tokens whose logits are held at once while the loss is computed."""

    layer_tile_tokens: int = 0
    """Tokens, over all rows, on which a layer's token-wise modules run at once; 0 for whole chunks.
    """

    training: bool
    """Whether a backward follows. If not, nothing is saved and activation modes have no effect."""

    accumulates: bool = False
    """Whether gradients of earlier batches exist. Autograd sums this batch's gradients beside them,
    so backward holds two of each."""

    return_logits: bool = False
    """Whether the logits of the whole sequence are returned to the caller."""

    staging_bytes: int = 2**30
    """Host memory through which activations pass to and from each tier behind the host."""

    def decisions(self, bounds: Bounds, num_layers: int, order: Order = "by_chunk") -> Decisions:
        """Returns decisions that keep all activations on the device, for others to change."""
        return Decisions(
            **{field.name: getattr(self, field.name) for field in fields(Batch)},
            bounds=bounds,
            layer_modes=((KEEP,) * num_layers,) * len(bounds),
            order=order,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions(Batch):
    """How one batch shape is run."""

    bounds: Bounds
    """Half-open (start, end) of each chunk, in tokens."""

    layer_modes: LayerModes
    """Activation mode of each unit, `layer_modes[chunk][layer]`."""

    order: Order = "by_chunk"
    kv_modes: tuple[KVMode, ...] = ()
    """K/V mode of each layer, by layer only; empty keeps all K/V on the device."""

    kv_tier: Tier = "device"
    """Tier that holds K/V and their gradients between uses, in order "by_chunk" only."""

    kv_block_tokens: int = 0
    """Tokens per block of K/V that are streamed to the device, at most, in whole chunks."""

    max_pending_d2h_bytes: int | None = None
    """Maximum device bytes that wait for their copy to the host; None for those of two units."""

    max_prefetch_bytes: int | None = None
    """Maximum device bytes prefetched before their use; None for those of one unit."""

    prefetch_chunks: int | None = None
    """Chunks prefetched before their use, instead of `max_prefetch_bytes`; a pipeline prefetches
    unit by unit."""

    @property
    def by_layer(self) -> bool:
        """Whether all chunks of a layer run before the next layer."""
        return self.order == "by_layer"

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
        """Returns the activation mode of (layer, chunk)."""
        return self.layer_modes[chunk][layer]

    def kv_mode(self, layer: int) -> KVMode:
        """Returns the K/V mode of a layer; "device" by chunk."""
        return self.kv_modes[layer] if self.kv_modes else "device"

    @property
    def farthest_kv_tier(self) -> Tier:
        """The farthest tier that holds any K/V."""
        used = {self.kv_tier, *self.kv_modes}
        return next(tier for tier in reversed(TIERS) if tier in used)
