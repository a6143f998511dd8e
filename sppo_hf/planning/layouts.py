"""Layouts of a training step over devices, the space of them that a search covers, and bounds.

`LowerBounds` says what a layout takes at least, so that `cluster` need not simulate all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sppo_hf.planning.activation_modes import SAVED, Saved
from sppo_hf.planning.chunk_bounds import (
    Bounds,
    PrefixCost,
    auto_bounds,
    balanced_bounds,
    even_bounds,
)
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Batch, Order
from sppo_hf.planning.memory import Bytes, ByteTables, byte_tables
from sppo_hf.planning.pipeline_cost import OffloadRule, head_blocks_of
from sppo_hf.planning.policies import sppo_ratios
from sppo_hf.planning.stages import StageWeights, balanced_stages
from sppo_hf.planning.tiers import HOST, Tier
from sppo_hf.schedule.generate import (
    MSP,
    SHARED_UNIT_SCHEDULES,
    Size,
    forwards_before_backward,
    is_interleaved,
    splits_backward,
)

PartitionMode = Literal["even", "flops", "bounded"]
"""How a sequence is cut: equal lengths; equal FLOPs; equal FLOPs, but no chunk much longer or
shorter than the mean, so that saved activations are of similar size."""


FSDP2_TORCH = (2, 13)
"""Oldest PyTorch whose FSDP2 calls modules of one unit a different number of times.

Accelerate shards the final norm and the head as one unit, and the head runs once for each tile of
the loss. Earlier versions reshard the unit in the middle of backward."""


class Layout(NamedTuple):
    """How a training step is spread over devices."""

    schedule: str
    stages: int
    """Ranks of a pipeline."""

    replicas: int
    """Data-parallel pipelines, each with its share of the rows."""

    virtual: int
    """Virtual stages of each rank."""

    num_chunks: int
    """Chunks of a row."""

    partition: PartitionMode
    saved: Saved
    """The activations that each layer saves for backward; the rest is recomputed."""

    offload: OffloadRule
    """The part of these that is offloaded."""

    kv_tier: Tier = "device"
    """Tier of K/V and of their accumulated gradients."""

    sp: int = 1
    """Sequence-parallel devices that make up each rank of a pipeline."""

    sharded: bool = False
    """Whether FSDP2 shards weights, gradients and optimizer states over all devices; only without a
    pipeline."""

    activation_tier: Tier = HOST
    order: Order = "by_chunk"
    """Order of chunks and layers; by chunk in a pipeline."""

    @property
    def devices(self) -> int:
        """Number of devices in use."""
        return self.stages * self.replicas * self.sp

    @property
    def shards(self) -> int:
        """Number of devices over which FSDP2 shards the model."""
        return self.devices if self.sharded else 1

    @property
    def kind(self) -> str:
        """What trainers call the layout: a schedule of pipelines, else DDP or FSDP2."""
        if self.stages > 1:
            return self.schedule
        kind = "FSDP2" if self.sharded else "DDP"
        return f"{kind} by chunk" if self.order == "by_chunk" else kind

    @property
    def name(self) -> str:
        """The layout in words: "FSDP2, 8 GPUs", "DDP with sequence parallelism of 8"."""
        found = self.kind
        if self.stages > 1:
            found += f", {self.replicas} x " if self.replicas > 1 else ", "
            found += f"{self.stages} stages"
        if self.sp > 1:
            found += f" with sequence parallelism of {self.sp}"
        return found if self.devices == self.sp > 1 else f"{found}, {self.devices} GPUs"

    def to_json(self) -> dict[str, Any]:
        """Returns the fields by the names that they have in JSON, and the layout's name."""
        row = {"name": self.name, **self._asdict()}
        row["frame_tier"] = row.pop("activation_tier")
        return row

    def rank_nodes(self, devices_per_node: int) -> tuple[Hashable, ...]:
        """Returns the node of each rank, equal where two share a node in all replicas.

        Devices are numbered by replica, then stage, then place in their group, and fill node after
        node; so groups stay within nodes where they can.
        """
        found: list[Hashable] = []
        for rank in range(self.stages):
            first = [(replica * self.stages + rank) * self.sp for replica in range(self.replicas)]
            nodes = tuple(
                (d // devices_per_node, (d + self.sp - 1) // devices_per_node) for d in first
            )
            found.append(nodes if all(start == end for start, end in nodes) else rank)
        return tuple(found)

    def hops_between_nodes(self, devices_per_node: int) -> int:
        """Returns how many hops from stage to stage leave a node."""
        nodes = self.rank_nodes(devices_per_node)
        return sum(here != there for here, there in pairwise(nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The values that a search tries for each field of a layout."""

    schedules: tuple[str, ...] = ("seq1f1b", "zb_seq1f1b", "interleaved_seq1f1b", MSP)
    """Schedules, where there is more than one stage; on a single one they are all the same."""

    beyond_runtime: bool = False
    """Whether to include shared units that the runtime refuses: of sequence-parallel groups, or
    with heads that cannot be divided."""

    virtual: tuple[int, ...] = (2, 4)
    """Stages per rank, for interleaved schedules."""

    partitions: tuple[PartitionMode, ...] = ("flops",)
    activation_rules: tuple[tuple[Saved, OffloadRule], ...] = (
        ("whole", "none"),
        ("whole", "sppo"),
        ("matmuls", "none"),
        ("matmuls", "full"),
        ("inputs", "none"),
        ("inputs", "full"),
    )
    """Pairs of what each layer saves and how much of it is offloaded, fastest first."""

    kv_tiers: tuple[Tier, ...] = ("device", "host")
    activation_tiers: tuple[Tier, ...] = (HOST,)
    sp: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Sizes of sequence-parallel groups. Those that span nodes are tried only where nothing else
    fits."""

    sharded: tuple[bool, ...] = (False, True)
    """Whether weights are sharded, where there is one stage on several devices."""

    orders: tuple[Order, ...] = ("by_layer", "by_chunk")
    """Orders, where there is one stage. Sharded weights go by layer: by chunk all would be gathered
    for every chunk, and no gradient reduced before the last one."""

    chunk_tokens: tuple[int, int] = (2048, 32_768)
    """Minimum and maximum mean tokens of a chunk on one device (its share in a sequence-parallel
    group). A shorter row is one chunk."""

    max_units: int = 1024
    """Maximum number of chunks, over all rows, that pass through one pipeline in a step."""

    min_device_share: float = 1.0
    """Share of the devices that must be used; below 1 some may be left out, so that stages become
    equal."""

    def layouts(
        self, *, gpus: int, rows: int, total_tokens: int, num_layers: int, sp: Iterable[int] = (1,)
    ) -> Iterator[Layout]:
        """Yields every layout of `rows` rows of a step over devices.

        Stages times replicas times `sp` are as many as `gpus`, or a little fewer
        (`min_device_share`). Replicas divide rows, and no more stages than layers are tried.
        """
        for group in sp:
            for layout in self._of_groups(
                gpus // group, rows, -(-total_tokens // group), num_layers
            ):
                layout = layout._replace(sp=group)
                if layout.devices < self.min_device_share * gpus:
                    continue
                if layout.stages > 1:
                    yield layout
                    continue
                for sharded in self.sharded if layout.devices > 1 else (False,):
                    for order in ("by_layer",) if sharded else self.orders:
                        yield layout._replace(sharded=sharded, order=order)

    def _of_groups(
        self, gpus: int, rows: int, total_tokens: int, num_layers: int
    ) -> Iterator[Layout]:
        """Yields layouts over `gpus` groups of devices, `total_tokens` tokens of a row on each."""
        shortest, longest = self.chunk_tokens
        chunks = [
            2**power
            for power in range(total_tokens.bit_length())
            if shortest * 2**power <= total_tokens <= longest * 2**power
        ]
        for stages in range(1, min(gpus, num_layers) + 1):
            least = math.ceil(self.min_device_share * gpus / stages)
            # One stage more leaves the largest stage as large: only others become smaller.
            needless = stages > 1 and -(-num_layers // stages) == -(-num_layers // (stages - 1))
            for replicas in range(least, gpus // stages + 1):
                if rows % replicas or (needless and stages * replicas < gpus):
                    continue
                for num_chunks in chunks or [1]:
                    if num_chunks * rows // replicas <= self.max_units:
                        yield from self._variants(stages, replicas, num_chunks, num_layers)

    def _variants(
        self, stages: int, replicas: int, num_chunks: int, num_layers: int
    ) -> Iterator[Layout]:
        # A single chunk is not cut, and with a single stage all schedules are the same.
        cuts = self.partitions if num_chunks > 1 else self.partitions[:1]
        for schedule in self.schedules if stages > 1 else self.schedules[:1]:
            for virtual in self.virtual if is_interleaved(schedule) and stages > 1 else (1,):
                if stages * virtual > num_layers or (
                    schedule in SHARED_UNIT_SCHEDULES and num_chunks < stages
                ):
                    continue
                for partition in cuts:
                    for (saved, offload), kv_tier in product(self.activation_rules, self.kv_tiers):
                        for tier in (HOST,) if offload == "none" else self.activation_tiers:
                            yield Layout(
                                *(schedule, stages, replicas, virtual, num_chunks),
                                *(partition, saved, offload, kv_tier, 1, False, tier),
                            )


def bounds_of(
    curve: PrefixCost, total_tokens: int, num_chunks: int, partition: PartitionMode
) -> Bounds:
    """Returns the chunks of a row that is cut into `num_chunks`."""
    if partition == "even":
        return even_bounds(total_tokens, num_chunks)
    if partition == "bounded":
        mean = total_tokens // num_chunks
        return auto_bounds(curve, total_tokens, target_tokens=mean, partition="flops")
    return balanced_bounds(curve, total_tokens, num_chunks)


# Sums of the same seconds in another order differ by rounding; bounds are lowered by this share.
_ROUNDING = 1.0 - 1e-10

# The schedule of which it is known how much later than input gradients weight gradients come.
_SPLIT_BACKWARD = "zb_seq1f1b"

# Saved activations of so many chunks may still be on their way to the host when backward begins.
_CHUNKS_IN_FLIGHT = 3

_Made = TypeVar("_Made")


def _once(*names: str) -> Callable[[Callable[..., _Made]], Callable[..., _Made]]:
    """Decorates a method to be called once for equal fields `names` of layouts, and arguments."""
    fields = attrgetter(*names)

    def decorate(make: Callable[..., _Made]) -> Callable[..., _Made]:
        def known(self: LowerBounds, layout: Layout, *args: Any) -> _Made:
            key = (make, fields(layout), args)
            if key not in self.known:
                self.known[key] = make(self, layout, *args)
            return self.known[key]

        return known

    return decorate


_COST = ("sp", "shards")
"""The fields on which costs of a device depend."""

_WORK = ("partition", "num_chunks", "saved", *_COST)
"""The fields on which a row's compute and saved activations depend."""

_STAGES = ("partition", "num_chunks", *_COST, "stages", "virtual")
"""The fields on which the layers of stages depend."""


class LowerBounds:
    """Lower bounds on the step time and the peak bytes of layouts, found without simulation.

    One object is for one model, length and number of rows. Costs and byte sizes are those of
    `PipelineCost`. Layers of one kind cost the same (`ModelShape.layer_kinds`); where a rank's
    layers may be of any kind, bytes are those of the lightest one.

    [Note: why a step takes at least that long] A rank computes its units one after the other. It is
    idle before the first chunk of the first row has come to it through the ranks before (*fill*),
    and after its own last unit, while the last row's first chunk passes back through these ranks
    (*drain*). Copies, messages and reductions only add to that. Ranks that share units fill and
    drain together, so of them only compute counts.
    """

    def __init__(
        self,
        cost: ModelCost,
        total_tokens: int,
        rows: int,
        group_bytes_per_second: Callable[[int], float],
        fastest_bytes_per_second: float,
        sharded_cost: ModelCost | None = None,
    ) -> None:
        """Take what all layouts have in common, as `cluster.ClusterRequest` has it.

        `sharded_cost` is `cost` with the layers that FSDP2 gathers, where they differ. Rates are
        between the devices of a sequence-parallel group of a size, and between the two
        devices that are nearest to each other.
        """
        self._cost, self._sharded_cost = cost, sharded_cost or cost
        self._group_bytes_per_second = group_bytes_per_second
        self._fastest_bytes_per_second = fastest_bytes_per_second
        self._tokens = total_tokens
        self._rows = rows
        self._curve = PrefixCost.of(cost.shape)
        self._kinds = sorted(set(cost.shape.layer_kinds))
        self.known: dict[Hashable, Any] = {}
        """Values of `_once`."""

    # -- parts of a layout, which simulation uses too -----------------------------------------

    @_once(*_COST)
    def cost(self, layout: Layout) -> ModelCost:
        """Returns the costs of one device of a layout."""
        cost, rate = self._cost, self._group_bytes_per_second
        if layout.sharded:
            cost = self._sharded_cost.with_shards(layout.shards, rate(layout.shards))
        if layout.sp > 1:
            cost = cost.with_sequence_parallel(layout.sp, rate(layout.sp))
        return cost

    @_once("num_chunks", "partition")
    def bounds(self, layout: Layout) -> Bounds:
        """Returns the chunks of a layout."""
        return bounds_of(self._curve, self._tokens, layout.num_chunks, layout.partition)

    @_once(*_STAGES)
    def stages(self, layout: Layout) -> tuple[range, ...]:
        """Returns the layers of each stage of a layout."""
        count = layout.stages * layout.virtual
        return balanced_stages(self.cost(layout), self.bounds(layout), count)

    @_once(*_STAGES)
    def gradient_bytes(self, layout: Layout) -> int:
        """Returns the bytes of gradients of the stage that has most."""
        stages, shape = self.stages(layout), self._cost.shape
        return max(StageWeights.of(shape, layers).gradients for layers in stages)

    # -- seconds -------------------------------------------------------------------------------

    def seconds(self, layout: Layout, *, reduce_seconds: float = 0.0) -> float:
        """Returns the least seconds that a step can take; see the note of this class.

        `reduce_seconds` are those of reducing one stage's gradients over replicas, which begins
        after the stage's last backward.
        """
        per_row, idle = self._rank_seconds(layout)
        rows = self._rows // layout.replicas
        return float((rows * per_row + idle).max()) * _ROUNDING + reduce_seconds

    @_once(*_WORK, "schedule", "stages", "virtual")
    def _rank_seconds(self, layout: Layout) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Seconds of compute for each row, and idle seconds whatever the number of rows, [ranks].

        A rank may be idle longer.
        """
        if layout.schedule in SHARED_UNIT_SCHEDULES:
            return self._sharing_ranks(layout), np.zeros(layout.stages)
        ranks, virtual = layout.stages, layout.virtual
        counts = self._layer_counts(layout)
        work = self.cost(layout).unit_seconds(self.bounds(layout))
        forward = counts @ work.forward
        forward[-1] += work.head
        backward = counts @ (work.backward + work.recompute[:, SAVED.index(layout.saved)])
        per_row = (forward + backward).sum(axis=1).reshape(virtual, ranks).sum(axis=0)
        # Seconds of the first chunk on each rank, forward and back.
        ahead, back, late = forward[:ranks, 0], backward[:ranks, 0], np.zeros(ranks)
        if layout.schedule == _SPLIT_BACKWARD:
            # Rank p is p weight gradients late, and the step ends with the first rank's last one.
            weight = (counts @ work.weight)[:ranks]
            back = back - weight[:, 0]
            late = np.arange(1, ranks + 1) * weight.max(axis=1) - weight[0, 0]
        elif splits_backward(layout.schedule):
            # A rank may compute weight gradients while others drain.
            back = np.zeros(ranks)
        drain = np.cumsum(back) - back - late
        return per_row, np.cumsum(ahead) - ahead + np.maximum(drain, 0.0)

    def _sharing_ranks(self, layout: Layout) -> NDArray[np.float64]:
        """Seconds of ranks that share each stage's first and last units, as `generate.msp` does.

        Of stage s of P the first P-1-s chunks are shared by ranks s to P-1, and the last s chunks
        by ranks 0 to s.
        """
        ranks, chunks = layout.stages, layout.num_chunks
        counts = self._layer_counts(layout)
        by_set_size = [self._shared_seconds(layout, size) for size in range(1, ranks + 1)]
        per_row = np.zeros(ranks)
        for stage in range(ranks):
            first, last = ranks - 1 - stage, chunks - stage
            together = counts[stage] @ by_set_size[first][:, :first].sum(axis=1)
            per_row[stage:] += together / (ranks - stage)
            per_row[stage] += counts[stage] @ by_set_size[0][:, first:last].sum(axis=1)
            together = counts[stage] @ by_set_size[stage][:, last:].sum(axis=1)
            per_row[: stage + 1] += together / (stage + 1)
        head = self.cost(layout).unit_seconds(self.bounds(layout)).head
        alone = chunks - ranks + 1
        per_row[-1] += head[:alone].sum()
        per_row += head[alone:].sum() / ranks
        return np.maximum(per_row, per_row.mean())

    @_once(*_WORK, "stages")
    def _shared_seconds(self, layout: Layout, size: int) -> NDArray[np.float64]:
        """[kinds, chunks] Seconds of a layer's unit that `size` ranks share, added up over them."""
        cost = self.cost(layout)
        if size > 1:
            blocks, rate = head_blocks_of(cost, layout.stages), self._fastest_bytes_per_second
            cost = cost.with_sequence_parallel(layout.sp * size, rate, blocks)
        work = cost.unit_seconds(self.bounds(layout))
        recompute = work.recompute[:, SAVED.index(layout.saved)]
        return size * (work.forward + work.backward + recompute)

    # -- bytes ---------------------------------------------------------------------------------

    def device_bytes(self, layout: Layout) -> int:
        """Returns a lower bound on the peak bytes of a layout's fullest device.

        Looks at the rank with most layers and at the first one, which has begun most chunks, when
        the first backward begins and while backward runs over each chunk.
        """
        shape = self._cost.shape
        shares = layout.schedule in SHARED_UNIT_SCHEDULES
        # Stages are balanced; where the head lightens the last one, others have more layers.
        max_layers = -(-shape.num_layers // layout.stages)
        first_layers = shape.num_layers // layout.stages
        states, gradients = (size // layout.shards for size in self._model_state_bytes)
        kept = self._kept_bytes(layout)
        activations, chunk_kv, dkv = self._layer_bytes(layout)
        if layout.stages == 1:
            # No layer's sums are there before its backward, nor gradients before the first one.
            kv = int(chunk_kv.sum()) * (layout.kv_tier == "device")
            # By layer that rule divides layers.
            kept *= layout.order == "by_chunk" or layout.offload != "sppo"
            return max_layers * (states - gradients + max(gradients, kept + kv))
        if layout.kv_tier != "device":
            chunk_kv, dkv = np.zeros_like(chunk_kv), 0
        kv, only_first = int(chunk_kv.sum()) + dkv, 0
        if shares:
            # Every rank has at least half of its own units' bytes that it does not share. The first
            # rank, which shares no last chunks, needs all K/V for its own.
            share = (layout.num_chunks - layout.stages + 1) / (2 * layout.num_chunks)
            kept, only_first = int(kept * share), kv - int(kv * share)
            kv -= only_first
        later = self._later_rows_chunks(layout, 0)
        only_first += int(chunk_kv[later].sum())
        if layout.offload == "none":
            only_first += int(activations[later].sum())
        per_layer = states + kept + kv
        at_first_backward = max(max_layers * per_layer, first_layers * (per_layer + only_first))
        if shares:
            return at_first_backward
        workspaces = self._tables(layout).workspace_backward[:, SAVED.index(layout.saved)]
        workspaces = workspaces.max(axis=0)
        # While backward runs over each chunk, there are K/V up to its end and its own activations.
        # Those of a rank's other stages may be offloaded; its last stage has a layer or more.
        layers_here = max_layers if layout.virtual == 1 or layout.offload == "none" else 1
        running = max_layers * np.cumsum(chunk_kv) + layers_here * activations + workspaces
        at_first_backward += int(workspaces[-1])
        return max(at_first_backward, max_layers * states + int(running.max()))

    def host_bytes(
        self, layout: Layout, ranks_per_node: int, device_bytes: int | None = None
    ) -> int:
        """Returns a lower bound on the bytes of the fullest host when the first backwards begin.

        `device_bytes` is the budget of one device, of which `ranks_per_node` share a host.
        """
        chunks, layers = layout.num_chunks, self._cost.shape.num_layers // layout.stages
        kv_on_host, to_host = layout.kv_tier != "device", layout.activation_tier == HOST
        # The paper's rule offloads whole layers, and no more than K/V and the last stage let it: at
        # least what devices cannot hold.
        by_rule = layout.offload == "sppo"
        ratios = np.array(self._offload_ratios(layout)) * (to_host and not by_rule)
        activations, kv, dkv = self._layer_bytes(layout)
        on_host = (ratios * activations).astype(np.int64) + kv * kv_on_host
        on_any_tier = activations + kv
        held_by_rank: list[int] = []
        # The first ranks hold most.
        for rank in range(min(layout.stages, ranks_per_node)):
            if layout.schedule in SHARED_UNIT_SCHEDULES:
                own = max(0, chunks - 2 * (layout.stages - 1) - _CHUNKS_IN_FLIGHT)
                units = np.argsort(on_any_tier, kind="stable")[:own].tolist()
                held = int(on_host[units].sum())
            else:
                units = [*range(chunks), *self._later_rows_chunks(layout, rank)]
                held = int(on_host[units[:-_CHUNKS_IN_FLIGHT]].sum()) + dkv * kv_on_host
            if layout.order == "by_layer":
                # All but the last layer's.
                held = int(on_host.sum()) * (layers - 1) // layers
            if by_rule and to_host and device_bytes is not None:
                total = int(on_any_tier[units].sum())
                held = max(held, total - device_bytes // layers)
            held_by_rank.append(held)
        fullest = sorted(held_by_rank * (layout.replicas * layout.sp), reverse=True)
        return sum(fullest[:ranks_per_node]) * layers

    @_once(*_STAGES)
    def _layer_counts(self, layout: Layout) -> NDArray[np.int64]:
        """[stages, kinds] How many layers of each kind a stage has."""
        kinds = np.array(self.cost(layout).shape.layer_kinds)
        held = [kinds[layers.start : layers.stop] for layers in self.stages(layout)]
        return np.array([[(those == kind).sum() for kind in np.unique(kinds)] for those in held])

    def _later_rows_chunks(self, layout: Layout, rank: int) -> list[int]:
        """Chunks of later rows that a rank has begun when its first backward begins.

        Where a rank has several stages, chunks begun on some of them count as fewer whole ones, and
        as short ones.
        """
        rows, num_chunks = self._rows // layout.replicas, layout.num_chunks
        if layout.schedule in SHARED_UNIT_SCHEDULES:
            return []
        size = Size(layout.stages, rows, num_chunks, layout.virtual)
        begun = forwards_before_backward(layout.schedule, size)[rank] // layout.virtual
        count = min(begun, rows * num_chunks) - num_chunks
        chunks = [*range(num_chunks)][:: -1 if layout.virtual > 1 else 1]
        return (chunks * -(-count // num_chunks))[: max(0, count)]

    @_once("partition", "num_chunks", *_COST, "kv_tier")
    def _tables(self, layout: Layout) -> ByteTables:
        """Bytes of layers over chunks, on one device."""
        cost, bounds = self.cost(layout), self.bounds(layout)
        batch = Batch(batch_rows=cost.batch_rows, training=True, tile_tokens=1)
        decisions = replace(batch.decisions(bounds, cost.shape.num_layers), kv_tier=layout.kv_tier)
        return byte_tables(cost.shape, decisions, cost.profile.kind)

    # All of these are the bytes of one layer, the one with the fewest.

    @cached_property
    def _model_state_bytes(self) -> tuple[int, int]:
        """Weights, gradients and optimizer states, and gradients; without embedding and head."""
        shape = self._cost.shape
        # One layer of each kind, neither first nor last; a kind that is only there counts 0.
        inner = {shape.layer_kinds[i]: i for i in range(1, shape.num_layers - 1)}
        held = [StageWeights.of(shape, range(i, i + 1)) for i in inner.values()]
        if len(inner) < len(self._kinds):
            return 0, 0
        least = min(held, key=lambda w: w.weights + w.gradients + w.optimizer)
        return least.weights + least.gradients + least.optimizer, least.gradients

    @_once(*_WORK, "kv_tier", "virtual")
    def _layer_bytes(self, layout: Layout) -> tuple[Bytes, Bytes, int]:
        """Saved activations and K/V of each chunk, [chunks], and sums of dK/dV.

        The sums are those that the last chunk's backward writes, first for one stage of a rank.
        """
        tables = self._tables(layout)
        saved = tables.saved[:, SAVED.index(layout.saved)].min(axis=0)
        dkv = int(tables.dkv.min(axis=0).sum()) // layout.virtual
        return saved, tables.kv.min(axis=0), dkv

    def _kept_bytes(self, layout: Layout) -> int:
        """Saved activations of a row that are not offloaded."""
        # The paper's rule rounds to whole layers of a stage, up by half a layer at most.
        rounding = 0.5 * layout.stages * layout.virtual / self._cost.shape.num_layers
        ratios = [min(1.0, r + rounding * (0.0 < r < 1.0)) for r in self._offload_ratios(layout)]
        activations, _, _ = self._layer_bytes(layout)
        return int(((1.0 - np.array(ratios)) * activations).astype(np.int64).sum())

    def _offload_ratios(self, layout: Layout) -> tuple[float, ...]:
        """Share of each chunk's saved activations that is offloaded."""
        bounds = self.bounds(layout)
        if layout.offload == "none":
            return (0.0,) * len(bounds)
        if layout.offload == "full":
            return (1.0,) * len(bounds)
        # Seconds of an average layer. The head's count, as they let the last stage offload more.
        cost = self.cost(layout)
        work = cost.unit_seconds(bounds)
        _, counts = np.unique(cost.shape.layer_kinds, return_counts=True)
        seconds = (counts @ work.forward + work.head).sum() / cost.shape.num_layers
        copied = float(seconds) / cost.d2h_seconds(1.0, both=True)
        sizes, _, _ = self._layer_bytes(layout)
        return sppo_ratios(sizes.tolist(), copied / len(bounds))
