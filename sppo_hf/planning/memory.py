"""Bytes of a step: their causes, budgets, sizes of everything held, and the estimate of all tiers.

A step is a sequence of points, the computations of a device in order. A `Level` is one cause's
bytes on one tier at each point. A `MemoryEstimate` is a set of levels, and so are the changes that
the simulator sums. `ByteTables` computes each size in one place; `lowering` says when each is
allocated and freed, and `pipeline_cost` does so for the units of a pipeline. Every figure is a
prediction from the model's shape and the batch; figures that are assumptions rather than
consequences say so (`optimizer`, `workspace`, `reserve`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sppo_hf.errors import BudgetError
from sppo_hf.planning.activation_modes import SAVED, Saved
from sppo_hf.planning.decisions import Batch, Decisions
from sppo_hf.planning.model_profile import FLOAT32_BYTES, LayerProfile
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.tiers import TIERS, Tier
from sppo_hf.planning.tile_sizes import (
    BIAS_BYTES,
    INDEX_TILE_BYTES,
    MAX_COPIED_BYTES,
    parallel_heads,
)
from sppo_hf.rules import format_bytes


class Cause(StrEnum):
    """A cause of bytes. Its value is its key in JSON and its name in a simulation's changes.

    Ordered as in tables and figures: bytes held through a step come before temporary ones.
    """

    label: str
    """Name in tables."""

    meaning: str
    """Explanation beside the name; "" if the name is enough."""

    colour: str
    """Fill colour in pictures; "" for the colour of its tier, see `paleness`."""

    paleness: float
    """Share of white mixed into its tier's colour."""

    def __new__(
        cls, value: str, label: str, meaning: str, colour: str = "", paleness: float = 0.0
    ) -> Cause:
        """Make a member from its key and attributes."""
        cause = str.__new__(cls, value)
        cause._value_ = value
        cause.label, cause.meaning = label, meaning
        cause.colour, cause.paleness = colour, paleness
        return cause

    WEIGHTS = "weights", "weights", "", "#6E6E6E"
    LORA = "lora", "adapters", "", "#858585"
    GRADIENTS = "gradients", "gradients", "", "#999999"
    OPTIMIZER = "optimizer", "optimizer", "AdamW's, in float32, where it is not known", "#C4C4C4"
    KV = "kv", "K/V", "", "#009E73"
    DKV = "dkv", "dK/dV", "float32 accumulators", "#7FCEB9"
    ACTIVATIONS = "frames", "activations", "all that backward needs of a layer"
    PRODUCTS = "products", "matrix products", "with layer inputs and attention outputs", "", 0.4
    INPUTS = "skeletons", "layer inputs", "and attention outputs, to recompute the rest", "", 0.7
    HIDDEN = "hidden", "hidden states", "at the final norm and the loss, embeddings", "#56B4E9"
    ROUTERS = "routers", "routers", "probabilities of experts, for the routers' loss", "#A6761D"
    INDEX = "index", "index", "indexers' keys, and choices that several layers read", "#7A9A01"
    GRAPH = "graph", "graph", "autograd's nodes, where host memory is the device's", "#8C6BB1"
    MESSAGES = "messages", "messages", "between stages, sent or received", "#B5B5B5"
    LOGITS_TILE = "logits_tile", "logits", "of one tile of the loss", "#D55E00"
    WORKSPACE = "workspace", "temporaries", "of the running layer", "#F0E442"
    COPIES = "copies", "copies", "on their way between tiers", "#B87D00"
    SLABS = "slabs", "slabs", "unused rest of host memory taken in slabs", "#F2D9B0"
    RESERVE = "reserve", "reserve", "device context, fragmentation", "#E5E5E5"


CAUSE_OF_SAVED: dict[Saved, Cause] = {
    "whole": Cause.ACTIVATIONS,
    "matmuls": Cause.PRODUCTS,
    "inputs": Cause.INPUTS,
    "hidden": Cause.INPUTS,
}
"""Cause of a layer's saved activations, by how much is saved."""


class MemoryBreakdown(dict[Cause, int]):
    """Bytes on one tier, by cause; 0 for a missing cause."""

    def __missing__(self, cause: Cause) -> int:
        return 0

    @property
    def total(self) -> int:
        """Sum over all causes."""
        return sum(self.values())

    @property
    def held(self) -> int:
        """Bytes held for backward, without copies in flight and unused parts of slabs."""
        return self.total - self[Cause.COPIES] - self[Cause.SLABS]

    def shown(self) -> Iterator[tuple[Cause, int]]:
        """Yields (cause, bytes) of all causes with bytes, in the order of `Cause`."""
        return ((cause, self[cause]) for cause in Cause if self[cause])


Bytes = NDArray[np.int64]


class Budgets:
    """Bytes that each tier may hold; None for no limit, 0 for no such tier.

    Args:
        by_tier: bytes by the tier's name; tiers left out hold nothing.
    """

    def __init__(self, **by_tier: int | None) -> None:
        self.by_tier = by_tier

    def of(self, tier: Tier) -> int | None:
        """Returns a tier's budget."""
        return self.by_tier.get(tier, 0)

    def replace(self, **by_tier: int | None) -> Budgets:
        """Returns a copy with other budgets of some tiers."""
        return Budgets(**{**self.by_tier, **by_tier})

    @property
    def device(self) -> int | None:
        """Bytes that the device may hold; None for no limit."""
        return self.of("device")

    @property
    def host(self) -> int | None:
        """Bytes that host memory may hold; None for no limit."""
        return self.of("host")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Budgets) and all(self.of(t) == other.of(t) for t in TIERS)

    def __hash__(self) -> int:
        return hash(tuple(map(self.of, TIERS)))

    def __repr__(self) -> str:
        return f"Budgets({', '.join(f'{tier}={size}' for tier, size in self.by_tier.items())})"


class Level(NamedTuple):
    """Bytes of one cause on one tier at the points of a step."""

    before: int
    """Bytes before the first point."""

    during: Bytes
    """Bytes while each point runs, [points]."""

    after: Bytes
    """Bytes between each point and the next, [points]."""


Levels = Mapping[Tier, Mapping[Cause, Level]]


@dataclass(frozen=True, slots=True)
class Points:
    """The computations of a step in order: forward over chunks and layers, then backward.

    By chunk, all layers of a chunk come before the next chunk; by layer, all chunks of a layer
    before the next layer. Head and loss of a chunk follow its layers, as layer `num_layers`.
    Backward is the reverse, without heads.
    """

    num_chunks: int
    num_layers: int
    training: bool
    by_layer: bool = False
    """Whether all chunks of a layer run before the next layer."""

    @property
    def num_forward(self) -> int:
        """Number of points of forward."""
        return self.num_chunks * (self.num_layers + 1)

    @property
    def count(self) -> int:
        """Number of points."""
        return self.num_forward + self.training * self.num_chunks * self.num_layers

    def forward(self, chunk: int, layer: int) -> int:
        """Returns the point of a forward, or of a chunk's head."""
        if self.by_layer:
            return layer * self.num_chunks + chunk
        return chunk * (self.num_layers + 1) + layer

    def backward(self, chunk: int, layer: int) -> int:
        """Returns the point of a backward."""
        chunks_after, layers_after = self.num_chunks - 1 - chunk, self.num_layers - 1 - layer
        if self.by_layer:
            return self.num_forward + layers_after * self.num_chunks + chunks_after
        return self.num_forward + chunks_after * self.num_layers + layers_after

    def unit(self, at: int) -> tuple[int, int]:
        """Returns the chunk and the layer of a point; `num_layers` for a head."""
        backward = at >= self.num_forward
        place = at - self.num_forward * backward
        if self.by_layer:
            layer, chunk = divmod(place, self.num_chunks)
        else:
            chunk, layer = divmod(place, self.num_layers + (not backward))
        if backward:
            return self.num_chunks - 1 - chunk, self.num_layers - 1 - layer
        return chunk, layer

    def arrange(self, forward: Any, head: Any, backward: Any) -> NDArray[Any]:
        """Arranges quantities of units in the order of points.

        Args:
            forward: [chunks, layers] or a number, for forwards.
            head: [chunks] or a number, for heads.
            backward: [chunks, layers] or a number, for backwards.
        """
        layers = self.num_layers
        kind = np.result_type(forward, head, backward)
        arranged = np.empty(self.count, dtype=np.float64 if kind.kind == "f" else np.int64)
        ahead = self._grid(arranged[: self.num_forward], layers + 1)
        ahead[:, :layers] = forward
        ahead[:, layers] = head
        if self.training:
            self._grid(arranged[self.num_forward :], layers)[::-1, ::-1] = backward
        return arranged

    def in_backward(self, quantity: NDArray[Any]) -> NDArray[Any]:
        """Arranges [chunks, layers] in the order of backward."""
        walked = quantity.T if self.by_layer else quantity
        return walked[::-1, ::-1].ravel()

    def _grid(self, arranged: NDArray[Any], layers: int) -> NDArray[Any]:
        """Returns a view of [points] as [chunks, layers]."""
        if self.by_layer:
            return arranged.reshape(layers, self.num_chunks).T
        return arranged.reshape(self.num_chunks, layers)

    def name(self, at: int) -> str:
        """Returns a point's name in words."""
        chunk, layer = self.unit(at)
        of_chunk = f"chunk {chunk + 1} of {self.num_chunks}"
        if layer == self.num_layers:
            return f"loss of {of_chunk}"
        # Position among the points of the chunk's (or layer's) backward.
        place, most = self.num_layers - 1 - layer, self.num_layers
        if self.by_layer:
            place, most = self.num_chunks - 1 - chunk, self.num_chunks
        what, between = "forward", self.by_layer
        if at >= self.num_forward:
            between = 0 < place < most - 1
            what = (
                "backward" if between else "start of backward" if place == 0 else "end of backward"
            )
        if self.by_layer:
            within = f", {of_chunk}" if between else ""
            return f"{what} of layer {layer + 1} of {self.num_layers}{within}"
        within = f" of layer {layer}" if between else ""
        return f"{what}{within} of {of_chunk}"


class MemoryEstimate:
    """Predicted bytes per tier over a step: constant ones and levels."""

    def __init__(
        self, points: Points, standing: Mapping[Tier, Mapping[Cause, int]], levels: Levels
    ) -> None:
        self.points = points
        self._standing = standing
        self._levels = levels

    def total(self, tier: Tier) -> Bytes:
        """Returns a tier's bytes at every point: [points]."""
        total = np.full(self.points.count, sum(self._standing[tier].values()), dtype=np.int64)
        for level in self._levels[tier].values():
            total += level.during
        return total

    def peak_bytes(self, *tiers: Tier) -> int:
        """Returns the peak of the sum of some tiers' bytes."""
        return int(np.sum([self.total(tier) for tier in tiers], axis=0).max())

    def most_bytes(self, cause: Cause) -> int:
        """Returns the peak of a cause's level on the device."""
        level = self._levels["device"].get(cause)
        return 0 if level is None else int(level.during.max())

    def standing_bytes(self, cause: Cause) -> int:
        """Returns a cause's constant bytes on the device and the host."""
        return sum(self._standing[tier].get(cause, 0) for tier in ("device", "host"))

    def peak(self, tier: Tier) -> int:
        """Returns the first point at which a tier holds most bytes."""
        return int(self.total(tier).argmax())

    def at(self, point: int, tier: Tier) -> MemoryBreakdown:
        """Returns a tier's bytes at a point; causes without bytes are left out."""
        found = dict(self._standing[tier])
        for cause, level in self._levels[tier].items():
            found[cause] = found.get(cause, 0) + int(level.during[point])
        return MemoryBreakdown((cause, size) for cause, size in found.items() if size)

    def of(self, tier: Tier) -> MemoryBreakdown:
        """Returns a tier's bytes at its peak; offloaded ones of the host and the disk."""
        return self.at(self.peak(tier), tier)

    def moment_of(self, tier: Tier) -> str:
        """Returns the name of the point of a tier's peak: "start of backward of chunk 8 of 8"."""
        return self.points.name(self.peak(tier))

    @property
    def device(self) -> MemoryBreakdown:
        """The device's bytes at its peak; in ordinary memory if the CPU computes."""
        return self.of("device")

    @property
    def host(self) -> MemoryBreakdown:
        """Offloaded bytes in host memory at its peak."""
        return self.of("host")

    @property
    def moment(self) -> str:
        """Name of the point of the device's peak."""
        return self.moment_of("device")


# The assumption behind `optimizer`: AdamW with both moments in float32.
OPTIMIZER_BYTES_PER_PARAMETER = 8
# Bytes of the driver, kernels' code, cuBLAS and cuDNN's plans beside all tensors: an assumption.
CONTEXT_BYTES = {"cpu": 0, "cuda": 1536 * 2**20}
# Fragmentation of the caching allocator and the heap, as a share of the bytes allocated in a step.
FRAGMENTATION = {"cpu": 0.03, "cuda": 0.02}
HOST_SLAB_BYTES = 256 * 2**20
MAX_SLAB_BYTES = 8 * 2**30
"""Maximum size of a slab that is reserved: the driver may refuse tens of GiB in one piece which it
gives in several."""
# A step on a GPU whose plan left 0.2% of 107 GiB found no room for its last piece of 448 MiB: the
# ends of slabs held 0.25%. First fit of such pieces left up to 0.8% where that was simulated.
_SLAB_ENDS = 0.01
"""Share of several slabs that their ends, in which no piece fits, come to."""
# Bytes of a node of autograd's graph, with its edges, hooks and our records of saved tensors. The C
# library allocated 325,110 bytes for each forward of a Gated DeltaNet layer of Qwen3.5, whose graph
# has 445 nodes.
GRAPH_NODE_BYTES = 730


def most_piece_bytes(budget_bytes: int) -> int:
    """Returns the bytes of whole page-locked slabs that pieces fill in a budget."""
    without_ends = max(min(budget_bytes, MAX_SLAB_BYTES), int((1 - _SLAB_ENDS) * budget_bytes))
    return max(0, without_ends) // HOST_SLAB_BYTES * HOST_SLAB_BYTES


def standing_device_bytes(shape: ModelShape, device_kind: str) -> int:
    """Returns the device bytes at the end of backward that do not depend on the batch."""
    return shape.standing_bytes + CONTEXT_BYTES[device_kind]


def byte_tables(shape: ModelShape, decisions: Decisions, device_kind: str) -> ByteTables:
    """Returns the tables of a batch; they do not depend on modes, and are cached."""
    return _byte_tables(_Batch(shape, decisions, device_kind))


# All that no search changes, and what a search changes and the tables read.
_of_batch = attrgetter(*(field.name for field in fields(Batch)))
_of_tables = attrgetter("bounds", "kv_tier", "kv_block_tokens", "by_layer")


class _Batch:
    """Key of tables; shapes are compared by identity, which is faster than by fields.

    It holds the shape, so that its address is not reused.
    """

    def __init__(self, shape: ModelShape, decisions: Decisions, device_kind: str) -> None:
        self.shape, self.decisions, self.device_kind = shape, decisions, device_kind
        self._key = id(shape), device_kind, _of_batch(decisions), _of_tables(decisions)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Batch) and self._key == other._key


@lru_cache(maxsize=64)
def _byte_tables(batch: _Batch) -> ByteTables:
    return ByteTables(batch.shape, batch.decisions, batch.device_kind)


class ByteTables:
    """Bytes of one batch shape. Arrays are [kinds, chunks] unless stated otherwise.

    Layers of one kind have equal bytes; `kind_of` gives the kind of each layer.
    """

    def __init__(self, shape: ModelShape, decisions: Decisions, device_kind: str) -> None:
        """Compute the common quantities; use `byte_tables` for a cached instance."""
        self._decisions, batch_rows = decisions, decisions.batch_rows
        self._sp, alike = shape.sp, shape.layer_kinds
        bounds, kv_block_tokens = decisions.bounds, decisions.kv_block_tokens
        if shape.sp > 1:
            # Bounds of a rank's shares of the chunks, as if these followed each other.
            own = (shape.tokens_per_rank(end - start) for start, end in bounds)
            bounds = tuple(pairwise(accumulate(own, initial=0)))
            kv_block_tokens = shape.tokens_per_rank(kv_block_tokens)
        shape = shape.per_rank
        self.shape = shape
        """The model's shape; if ranks share sequences, one rank's part of it."""
        self.rows = batch_rows
        self.training = decisions.training
        self.kv_tier: Tier = decisions.kv_tier
        self.device_kind = device_kind
        self.streams = decisions.kv_tier != "device"
        """Whether K/V are streamed between tiers."""
        self.accumulates = decisions.accumulates
        """Whether gradients of earlier batches exist."""
        self._parameter_bytes = shape.parameter_bytes or shape.dtype_bytes
        self.starts, self.ends = np.array(bounds, dtype=np.int64).T
        """First token of each chunk, and the token after its last one, [chunks] each."""
        self.lengths = self.ends - self.starts
        """Tokens of each chunk, [chunks]."""
        in_a_tile = -(-decisions.layer_tile_tokens // batch_rows)
        self._at_once = np.minimum(self.lengths, in_a_tile) if in_a_tile else self.lengths
        """Tokens of each row on which token-wise modules of layers run at once, [chunks]."""
        by_layer = decisions.by_layer
        self.points = Points(len(bounds), shape.num_layers, self.training, by_layer)
        kinds, self.kind_of = np.unique(np.array(alike), return_inverse=True)
        self.kinds: list[int] = kinds.tolist()
        """A representative layer of each kind, [kinds]; `kind_of` is the kind of each layer,
        [layers]."""
        tokens = batch_rows * self.lengths
        per_token = [[shape.activation_bytes_per_token(i, s) for s in SAVED] for i in self.kinds]
        states = batch_rows * _by_kind(shape.state_bytes, self.kinds)
        self.saved = np.array(per_token, dtype=np.int64)[:, :, None] * tokens + states[:, :, None]
        """Bytes saved of a layer for each value in `SAVED`, [kinds, saved, chunks]."""
        self.kv_per_token = batch_rows * _by_kind(shape.kv_bytes_per_token, self.kinds)
        """K/V bytes of one token of all rows, [kinds, 1]."""
        self.dkv_per_token = batch_rows * _by_kind(shape.dkv_bytes_per_token, self.kinds)
        """dK/dV bytes of one token of all rows, [kinds, 1]."""
        self.kv = self.kv_per_token * self.lengths
        """K/V bytes of each chunk."""
        self.dkv = self.dkv_per_token * np.append(self.lengths[:-1], 0)
        """dK/dV bytes of each chunk. Those of the last chunk, whose backward is first, are zero: it
        writes the sums of all chunks before it."""
        longest = np.maximum.accumulate(self.lengths)
        most = np.maximum(self.starts, self.lengths)
        self.block_tokens = np.minimum(np.maximum(kv_block_tokens, longest), most)
        """Tokens per block of streamed K/V, [chunks]: at least one chunk, at most all earlier ones.
        """
        self._longest = longest

    def activations(self, saved: Saved) -> Bytes:
        """Returns the bytes that each layer saves over each chunk, [chunks, layers]."""
        return self.of_layers(self.saved[:, SAVED.index(saved)])

    @cached_property
    def members(self) -> list[list[int]]:
        """The layers of each kind."""
        return [np.flatnonzero(self.kind_of == kind).tolist() for kind in range(len(self.kinds))]

    def of_layers(self, table: Bytes) -> Bytes:
        """Returns a table [kinds, chunks] as [chunks, layers]."""
        return table[self.kind_of].T

    @property
    def row_tokens(self) -> int:
        """Tokens of each row, those of all ranks that share it."""
        return self._decisions.bounds[-1][1]

    # -- streamed K/V --------------------------------------------------------------------------

    @cached_property
    def prefix_tokens(self) -> Bytes:
        """Earlier tokens that a chunk's queries attend to, in whole chunks."""
        rows: list[Bytes] = []
        for kind in self.kinds:
            window = self.shape.layers[kind].window
            hidden = np.zeros_like(self.starts)
            if window is not None:
                # The chunk's first query attends to `window - 1` keys before its own.
                first = np.maximum(self.starts - window + 1, 0)
                hidden = self.starts[np.searchsorted(self.starts, first, side="right") - 1]
            rows.append(self.starts - hidden)
        return np.array(rows)

    @cached_property
    def both_ways(self) -> tuple[bool, bool]:
        """Whether copies run both ways at once, in forward and in backward.

        Host-resident weights are loaded while activations are offloaded, and their gradients are
        offloaded while activations are loaded.
        """
        resident = self.shape.host_resident
        comes = resident is not None and not resident.keeps_device_copies
        leaves = resident is not None and resident.gradient_bytes > 0
        return self.streams or comes, self.streams or leaves

    @cached_property
    def kv_in_forward(self) -> Bytes:
        """Bytes of K/V loaded in forward: those of earlier chunks."""
        return self.streams * self.kv_per_token * self.prefix_tokens

    @cached_property
    def kv_out_forward(self) -> Bytes:
        """Bytes of K/V offloaded in forward: those of the chunk."""
        return self.streams * self.kv

    @cached_property
    def kv_in_backward(self) -> Bytes:
        """Bytes loaded in backward: K/V of the chunk and its prefix, and their sums of dK/dV."""
        tokens = self.prefix_tokens + self.lengths
        sums = self.dkv_per_token * tokens
        sums[:, -1] = 0
        return self.streams * (self.kv_per_token * tokens + sums)

    @cached_property
    def kv_out_backward(self) -> Bytes:
        """Bytes offloaded in backward: sums of dK/dV of earlier chunks."""
        return self.streams * self.dkv_per_token * self.prefix_tokens

    @cached_property
    def kv_in_transit(self) -> tuple[Bytes, Bytes, Bytes]:
        """Device bytes of streamed K/V in forward, and of K/V and of dK/dV in backward.

        [chunks] each, of the layer with the most. Besides the chunk's own K/V these are the block
        in use, the next one and, if a block has several chunks, the tensor in which they are
        concatenated. In backward there are also the sums of dK/dV of these blocks and of the
        previous one, which is being offloaded, and the gradient of the block in use before it is
        added.
        """
        block = self.block_tokens
        joined = np.where(block > self._longest, block, 0)
        kv_per_token, dkv_per_token = self.kv_per_token.max(), self.dkv_per_token.max()
        kv = kv_per_token * (2 * block + joined + self.lengths)
        dkv = dkv_per_token * (3 * block + self.lengths) + kv_per_token * block
        return kv, kv, dkv

    # -- temporaries of a running unit -----------------------------------------------------------

    @cached_property
    def workspace_forward(self) -> Bytes:
        """Bytes of temporaries of a layer's forward."""
        token_wise, attention = self._workspace(backward=False)
        return np.maximum(token_wise, attention)

    @cached_property
    def workspace_backward(self) -> Bytes:
        """Bytes of temporaries of a layer's backward, [kinds, saved, chunks], by what is saved.

        With what recomputation makes: activations, and under autocast cast weights. On CUDA the
        peak is either at the begin, when all of that is there and token-wise modules run backward,
        or in attention, when backward has freed what was saved behind it. A CPU's heap may not
        reuse what the one has freed for the other, so both count.
        """
        token_wise, attention = self._workspace(backward=True)
        rerun, early = self._rerun_bytes
        if self.device_kind == "cuda":
            begin, later = token_wise[:, None] + rerun, attention[:, None] + early
            return np.maximum(begin, later)
        return np.maximum(token_wise, attention)[:, None] + rerun

    @cached_property
    def _rerun_bytes(self) -> tuple[Bytes, Bytes]:
        """Bytes that recomputation makes, and those still there in attention's backward.

        [kinds, saved, chunks] each. Where token-wise modules run in tiles, one tile of the largest
        of these counts. What is saved is not made again, but on a CPU counts twice, as a part of a
        slab that is in use until all of it is.
        """
        layers, casts = self.shape.layers, _by_kind(self.shape.cast_bytes, self.kinds)
        tiled = self.rows * _by_kind(lambda kind: layers[kind].tiled_bytes, self.kinds)
        tile = self.rows * _by_kind(lambda kind: layers[kind].tile_bytes, self.kinds)
        less = tiled * self.lengths - tile * self._at_once
        less = np.where(self._at_once < self.lengths, np.maximum(less, 0), 0)
        whole = self.saved[:, SAVED.index("whole")]
        states = self.rows * _by_kind(self.shape.state_bytes, self.kinds)
        rerun, early = np.zeros_like(self.saved), np.zeros_like(self.saved)
        for at, saved in enumerate(SAVED):
            if saved == "whole":
                continue
            made, remains = whole, np.zeros_like(whole)
            if self.device_kind == "cuda":
                sizes = np.array([layers[kind].rerun_bytes(saved) for kind in self.kinds])
                made, remains = self.rows * self.lengths * sizes.T[:, :, None] + states
            rerun[:, at] = np.maximum(made - less, remains) + casts
            early[:, at] = remains + casts
        return rerun, early

    def _workspace(self, *, backward: bool) -> tuple[Bytes, Bytes]:
        """Returns the bytes of temporaries of a layer over one chunk, by where in it they are.

        In token-wise modules, and in attention. The MLP holds about two intermediates in forward
        and four with their gradients in backward (of a tile, where it runs in tiles; with Liger's
        kernels, which write over what was saved, two), beside two or four full-width tensors.
        Attention holds q, its output and (in backward) their gradients, and one layer's whole
        prefix of K/V (and dK/dV of one call) once more. CUDA's flash kernels (FlashAttention 2's
        and cuDNN's) write dK/dV for every query head before they sum those that share a key head,
        and sum dQ in float32, as attention to several blocks of keys does. A CPU's may be given K/V
        of a call with repeated heads, and gives back as many gradients. Where an indexer chooses,
        there is a call for every few queries, with dK/dV of all keys that are summed in float32.
        """
        copies = 4 if backward else 2
        on_cuda = self.device_kind == "cuda"
        nothing = np.zeros_like(self.ends)
        prefix = nothing if self.streams else np.where(self.starts > 0, self.ends, 0)
        keys_of_a_call = all_keys = self.block_tokens if self.streams else self.ends
        if on_cuda and backward and not self.streams:
            # Of the chunk's own keys and those before it, the more.
            keys_of_a_call = np.maximum(self.starts, self.lengths)
        token_wise: list[Bytes] = []
        in_attention: list[Bytes] = []
        for kind in self.kinds:
            layer = self.shape.layers[kind]
            full_width = self.lengths * copies * layer.hidden_size
            mlp = (2 if self._writes_over_saved else copies) * layer.mlp_width
            mlp += 0 if backward else self._wide_adapters_elements(layer)
            per_query = layer.q_elements + layer.attention_output_elements
            joined = layer.kv_elements * prefix * (2 if backward else 1)
            if backward and layer.chosen:
                in_float32 = max(1, FLOAT32_BYTES // self.shape.dtype_bytes)
                joined = layer.kv_elements * (prefix + (1 + in_float32) * all_keys)
            if on_cuda and backward:
                if not (self.streams or layer.chosen):
                    joined = joined + layer.kv_elements * keys_of_a_call
                if layer.num_heads > layer.num_kv_heads:
                    joined = joined + per_query * keys_of_a_call
                sums = (1 + (self.starts > 0)) * layer.q_elements * self.lengths
                joined = joined + sums * FLOAT32_BYTES // self.shape.dtype_bytes
            attention = self.lengths * (copies // 2) * per_query + full_width + joined
            chosen = self._choice_bytes(layer, backward=backward)
            repeated = 2 * self._repeated_bytes(layer, keys_of_a_call) * backward
            size = self.shape.dtype_bytes * self.rows
            outside = self._at_once * mlp + full_width
            if not (on_cuda and backward):
                outside = outside + joined
            token_wise.append(outside * size + (0 if on_cuda else repeated))
            in_attention.append(attention * size + repeated + chosen)
        return np.array(token_wise), np.array(in_attention)

    def _choice_bytes(self, layer: LayerProfile, *, backward: bool) -> Bytes:
        """Returns the bytes of an indexer's temporaries, or of those of attention to its choice.

        The former are two tensors of a tile's scores and all index keys in float32, the latter a
        bias with masks of its size. Ranks that share a sequence choose for their own tokens, and
        gather what was chosen. By layer its index keys are there, too, until all chunks have
        chosen. [chunks]
        """
        if not layer.chosen:
            return np.zeros_like(self.ends)
        queries, keys = self._sp * self.lengths, self._sp * self.ends
        bias = 3 * np.minimum(BIAS_BYTES, self.rows * queries * keys * self.shape.dtype_bytes)
        if self._sp > 1:
            bias = bias + self.rows * queries * layer.chosen_bytes
        one_query = self.rows * layer.index_heads * keys * FLOAT32_BYTES
        scores = np.minimum(np.maximum(INDEX_TILE_BYTES, one_query), one_query * self.lengths)
        index_keys = self.rows * keys * layer.index_head_size * FLOAT32_BYTES
        held = self.points.by_layer * self.rows * self.lengths.sum() * layer.index_bytes
        return bias if backward else held + np.maximum(bias, 2 * scores + index_keys)

    @property
    def _writes_over_saved(self) -> bool:
        """Whether backward of the MLP writes its gradients over what was saved."""
        lora = self.shape.lora
        widens = lora is not None and lora.dtype_bytes > self.shape.dtype_bytes
        return self.shape.layer_kernels and not widens

    def _repeated_bytes(self, layer: LayerProfile, keys: Bytes) -> Bytes:
        """Returns the bytes of K/V with heads repeated to keep a CPU's threads busy, [chunks]."""
        own = layer.num_kv_heads // self._sp
        if self.device_kind != "cpu" or not own:
            return np.zeros_like(keys)
        heads = layer.num_heads // self._sp
        repeated = parallel_heads(self.rows, heads, own, self.shape.cpu_threads)
        # A rank attends with its heads over the tokens of all ranks that share the sequence.
        elements = self._sp * repeated * (layer.qk_head_size + layer.v_head_size)
        size = max(FLOAT32_BYTES, self.shape.dtype_bytes) * self.rows * elements * keys
        return np.where((repeated > own) & (size <= MAX_COPIED_BYTES), size, 0)

    def _wide_adapters_elements(self, layer: LayerProfile) -> int:
        """Temporary elements of MLP adapters in a wider dtype, counted in the model's dtype.

        These are the second factor's output, its scaled value, and the sum with the frozen weight's
        output.
        """
        lora = self.shape.lora
        if lora is None or lora.autocast or lora.dtype_bytes <= self.shape.dtype_bytes:
            return 0
        return 3 * layer.adapted_mlp_width * lora.dtype_bytes // self.shape.dtype_bytes

    @cached_property
    def kept_logits(self) -> int:
        """Bytes of the logits of the whole sequence if they are returned to the caller, else 0."""
        if not self._decisions.return_logits:
            return 0
        tokens = self.rows * self._decisions.total_tokens
        return tokens * self.shape.vocab_size * self.shape.dtype_bytes

    @cached_property
    def logits(self) -> Bytes:
        """Bytes while a chunk's loss is computed, [chunks], without logits that are returned.

        These are a tile of logits in the model's dtype and its log-probabilities in float32, which
        the gradient replaces, and the gradient in the model's dtype if that is narrower. From the
        second tile on, the head's gradient of one tile is added, beside their sum, if it is not
        accumulated in place (see `engine.loss`). Saved tensors of a head that caps its logits are
        not counted.
        """
        shape = self.shape
        tokens = self.lengths * self.rows
        tile = np.minimum(self._decisions.tile_tokens, tokens)
        float32_bytes = max(FLOAT32_BYTES, shape.dtype_bytes)
        narrow_bytes = shape.dtype_bytes if shape.dtype_bytes < float32_bytes else 0
        per_token = shape.num_logits * (shape.dtype_bytes + float32_bytes + narrow_bytes)
        sums = (tokens > tile) & self.training
        sums[1:] = self.training
        if self.device_kind == "cpu" and not narrow_bytes:
            sums[:] = False
        return tile * per_token + sums * self.head_gradient_bytes(self._parameter_bytes)

    @cached_property
    def embedding_backward(self) -> Bytes:
        """Bytes of the embedding's backward, which follows that of a chunk's first layer, [chunks].

        By layer, and on a CPU, the embedding runs once per sequence, and its backward follows that
        of the first chunk.
        """
        ends = np.ones_like(self.lengths)
        if self.device_kind == "cpu" or self.points.by_layer:
            ends[1:] = 0
        return ends * self.embedding_gradient_bytes(self._parameter_bytes)

    @cached_property
    def graph(self) -> Bytes:
        """Host bytes of autograd's graph of a layer over a chunk, whatever the number of rows."""
        if self.device_kind != "cpu" or not self.training:
            return np.zeros_like(self.kv)
        layers = self.shape.layers
        nodes = _by_kind(lambda kind: layers[kind].graph_nodes, self.kinds)
        added = _by_kind(lambda kind: layers[kind].graph_nodes_per_1024, self.kinds)
        return GRAPH_NODE_BYTES * (nodes + added * self.lengths // 1024)

    @cached_property
    def routers(self) -> Bytes:
        """Bytes of a layer's probabilities of experts, or of their gradient, [kinds, chunks]."""
        layers = self.shape.layers
        per_token = _by_kind(lambda kind: layers[kind].router_bytes, self.kinds)
        counted = self.training and self.shape.router_loss
        return counted * self.rows * per_token * self.lengths

    @cached_property
    def index(self) -> Bytes:
        """Bytes of a layer's index keys, and of choices that later layers get, [kinds, chunks].

        By layer keys are freed when the layer has run, and are among its temporaries.
        """
        layers, by_chunk = self.shape.layers, not self.points.by_layer
        per_token = _by_kind(
            lambda kind: by_chunk * layers[kind].index_bytes + layers[kind].passed_on_bytes,
            self.kinds,
        )
        return self.rows * per_token * self.lengths

    @property
    def until_backward(self) -> dict[Cause, Bytes]:
        """Device bytes of a layer over a chunk from its forward until its backward ends, by cause.

        Beside K/V and saved activations, whose tier is a decision. A cause that is added here is
        counted on one device and in pipelines.
        """
        return {Cause.ROUTERS: self.routers, Cause.GRAPH: self.graph, Cause.INDEX: self.index}

    def embedding_gradient_bytes(self, size: int) -> int:
        """Returns the bytes of the embedding's gradient, `size` an element; 0 if it is frozen."""
        shape = self.shape
        return shape.vocab_size * shape.hidden_size * size if shape.embedding_trained else 0

    def head_gradient_bytes(self, size: int) -> int:
        """Returns the bytes of the head's gradient, `size` an element; 0 if it is frozen."""
        shape = self.shape
        return shape.num_logits * shape.hidden_size * size if shape.embedding_trained else 0

    # -- held through a step ---------------------------------------------------------------------

    @cached_property
    def standing(self) -> dict[Cause, int]:
        """Bytes that the device holds from step to step, without gradients."""
        shape = self.shape
        away = 0 if shape.host_resident is None else shape.host_resident.optimizer_bytes
        states = (shape.states_bytes - away) * self.training
        lora = min(shape.lora_bytes, shape.weight_bytes)
        return {
            Cause.WEIGHTS: shape.weight_bytes - lora,
            Cause.LORA: lora,
            Cause.OPTIMIZER: states,
        }

    @cached_property
    def host_resident(self) -> dict[Cause, int]:
        """Bytes that the host holds from step to step, with host-resident weights or optimizer."""
        resident = self.shape.host_resident
        if resident is None:
            return {}
        adds_up = self.accumulates and self.device_kind == "cuda"
        gradients = resident.gradient_bytes + resident.arriving_bytes * adds_up
        return {
            Cause.WEIGHTS: resident.weight_bytes,
            Cause.OPTIMIZER: resident.optimizer_bytes * self.training,
            Cause.GRADIENTS: gradients * self.training,
        }

    @cached_property
    def gradients(self) -> tuple[int, int]:
        """Gradient bytes before backward, and bytes that the first backward adds.

        Autograd sums a parameter's gradients of all chunks before it adds them to those of earlier
        batches. The head's sum is computed with the loss, in float32 at least.
        """
        shape = self.shape
        if not self.training:
            return 0, 0
        if shape.shards > 1:
            # FSDP2 reduces a parameter's gradient when autograd has summed it over all chunks. By
            # chunk that is the case in the first chunk's backward, which comes last.
            whole, reduced = shape.unsharded_gradient_bytes, shape.gradient_bytes
            if self.accumulates:
                return whole, reduced
            return 0, reduced if self.points.by_layer else max(whole, reduced)
        head = self.head_gradient_bytes(max(FLOAT32_BYTES, shape.dtype_bytes))
        if shape.host_resident is not None and shape.host_resident.gradient_bytes:
            # Gradients are offloaded once computed; those of earlier batches are on the host.
            return head, shape.gradient_bytes
        earlier = shape.gradient_bytes if self.accumulates else 0
        return earlier + head, shape.gradient_bytes - head

    @cached_property
    def layer_kv(self) -> Bytes:
        """K/V bytes of each layer over all tokens, [layers]."""
        return self.kv.sum(axis=1)[self.kind_of]

    @cached_property
    def hidden_states(self) -> Bytes:
        """Bytes of a layer's input or output, [chunks]; under autocast in the weights' dtype.

        Gemma 3n has several hidden states per token.
        """
        return self.rows * self._hidden_bytes * self.lengths

    @cached_property
    def per_layer_inputs(self) -> int:
        """Bytes of per-layer inputs of all tokens, as Gemma 3n and 4 have them."""
        if not self.shape.message_elements:
            return 0
        beside = self.shape.message_bytes_per_token(0) - self._hidden_bytes
        return self.rows * beside * int(self.lengths.sum())

    @property
    def _hidden_bytes(self) -> int:
        """Bytes of a layer's input per token."""
        return self.shape.activation_bytes_per_token(self.shape.num_layers - 1, "hidden")

    @cached_property
    def hidden(self) -> tuple[Bytes, int, int]:
        """Bytes of hidden states held until backward, [chunks], and of embeddings on a CPU.

        By chunk, the hidden states are the final norm's input and the gradient of its output; of a
        classifier, whose head runs behind the last chunk, also its output; it and its gradient have
        the tokens of all ranks that share the sequence. On a CPU tokens are embedded once for the
        whole sequence, and the embeddings' gradient is assembled as a whole in backward. The two
        integers are these bytes in forward and in backward. Under autocast all of them have the
        weights' dtype.
        """
        shape = self.shape
        token_bytes = self.training * self.rows * shape.hidden_size * self._parameter_bytes
        whole = 0
        embedded_at_once = self.device_kind == "cpu" and not any(shape.encoded_token_bytes)
        if embedded_at_once and shape.embedding_trained:
            whole = token_bytes * int(self.ends[-1])
        held = 2 if shape.head_width is None else 1 + 2 * self._sp
        return held * token_bytes * self.lengths, whole, 2 * whole


def _by_kind(per_token: Callable[[int], int], kinds: list[int]) -> Bytes:
    return np.array([[per_token(kind)] for kind in kinds], dtype=np.int64)


def check_budget(tier: str, what: str, *, need_bytes: int, have_bytes: int, remedy: str) -> None:
    """Checks that bytes which no plan can avoid are within a tier's budget.

    Raises:
        BudgetError: they are not; the message names the tier, the use of the bytes, the bytes
            needed and available, and the remedy.
    """
    if need_bytes > have_bytes:
        raise BudgetError(
            f"{tier} memory cannot hold {what}: {need_bytes:,} bytes ({format_bytes(need_bytes)})"
            f" needed, {have_bytes:,} bytes ({format_bytes(have_bytes)}) in the budget, "
            f"{need_bytes - have_bytes:,} bytes missing. {remedy}"
        )
