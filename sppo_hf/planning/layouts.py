"""Layouts: how a step may be spread over devices, and which of these ways a search looks at.

Also `LowerBounds`: the seconds and bytes that a layout takes at least.

[Note: what a step takes at least] A rank computes its units one after the other, and is idle at
four times at least, of any rows (`_Passing`). *Fill*: before a chunk of the first row can have come
to it through the ranks before. *Turn*: before its first backward, for that row must have passed all
stages, and its last chunk come back; forwards that the rank has begun till then are not idle.
*Tail*: the mirror image of that, after its last forward. *Drain*: that of fill, while the last
row's chunks still pass back through the ranks before. Fill and turn may be the same time, and so
may tail and drain; turn and tail are not, unless the last forward comes before the first backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sppo_hf.planning.activation_modes import KEEP, SAVED, Saved
from sppo_hf.planning.chunk_bounds import (
    Bounds,
    PrefixCost,
    auto_bounds,
    balanced_bounds,
    even_bounds,
)
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.memory import ByteTables, byte_tables
from sppo_hf.planning.pipeline_cost import OffloadRule, head_blocks_of
from sppo_hf.planning.policies import sppo_ratios, uniform_modes
from sppo_hf.planning.stages import StageWeights, balanced_stages
from sppo_hf.planning.tiers import HOST, TIERS, Tier
from sppo_hf.schedule.generate import (
    INTERLEAVED,
    MSP,
    SHARED_UNIT_SCHEDULES,
    Size,
    forwards_before_backward,
    micro_batch_groups,
)

PartitionMode = Literal["even", "flops", "bounded"]
"""How a sequence is cut: equal lengths; equal FLOPs; equal FLOPs as far as no chunk is much longer
or shorter than the mean, so that no frame is."""


class Layout(NamedTuple):
    """How a step is spread over devices."""

    schedule: str
    """Name of the schedule."""

    stages: int
    """Ranks of a pipeline."""

    replicas: int
    """Pipelines beside each other, each with its share of the rows."""

    virtual: int
    """Stages of each rank."""

    num_chunks: int
    """Chunks of a sequence."""

    partition: PartitionMode
    """How it is cut."""

    saved: Saved
    """What is kept of frames."""

    offload: OffloadRule
    """What of that leaves the device."""

    kv_tier: Tier = "device"
    """Where keys, values and their gradient sums wait."""

    sp: int = 1
    """Devices that share each stage's units by sequence parallelism: each rank of a pipeline is so
    many."""

    sharded: bool = False
    """Whether weights, gradients and optimizer states are sharded over all devices of a stage
    (FSDP); only without a pipeline."""

    activation_tier: Tier = HOST
    """Where what leaves goes."""

    @property
    def devices(self) -> int:
        """Devices in use."""
        return self.stages * self.replicas * self.sp

    def to_json(self) -> dict[str, Any]:
        """Returns the fields by the names that they have in JSON."""
        row = self._asdict()
        row["frame_tier"] = row.pop("activation_tier")
        return row

    def nodes_of(self, rank: int, devices_per_node: int) -> tuple[tuple[int, int], ...]:
        """Returns the first and last node that a rank's devices are on, in every replica.

        Devices are numbered by replica, then stage, then place in their group, and fill node after
        node; so groups stay within nodes where they can.
        """
        first = [(replica * self.stages + rank) * self.sp for replica in range(self.replicas)]
        return tuple((d // devices_per_node, (d + self.sp - 1) // devices_per_node) for d in first)

    def rank_nodes(self, devices_per_node: int) -> tuple[Hashable, ...]:
        """Returns a node for each rank: equal where two are on one node in all replicas."""
        found: list[Hashable] = []
        for rank in range(self.stages):
            nodes = self.nodes_of(rank, devices_per_node)
            within = all(first == last for first, last in nodes)
            found.append(nodes if within else rank)
        return tuple(found)

    def hops_between_nodes(self, devices_per_node: int) -> int:
        """Returns how many hops from stage to stage leave a node."""
        nodes = self.rank_nodes(devices_per_node)
        return sum(here != there for here, there in pairwise(nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """What a search may choose from."""

    schedules: tuple[str, ...] = ("seq1f1b", "zb_seq1f1b", "interleaved_seq1f1b", MSP)
    """Where there is more than one stage; on a single one they are all the same."""

    beyond_runtime: bool = False
    """Whether ranks may share units where none can yet run that: groups of sequence-parallel
    devices, or heads that cannot be divided."""

    virtual: tuple[int, ...] = (2, 4)
    """Stages of a rank, for schedules that put several on one."""

    partitions: tuple[PartitionMode, ...] = ("flops",)
    """How sequences are cut."""

    frames: tuple[tuple[Saved, OffloadRule], ...] = (
        ("whole", "none"),
        ("whole", "sppo"),
        ("matmuls", "none"),
        ("matmuls", "full"),
        ("inputs", "none"),
        ("inputs", "full"),
    )
    """What is kept of frames, and what of that leaves, fastest first."""

    kv_tiers: tuple[Tier, ...] = ("device", "host")
    """Where K/V may wait."""

    activation_tiers: tuple[Tier, ...] = (HOST,)
    """Where what leaves of frames may go."""

    sp: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Sequence-parallel devices of a rank. Groups that leave a node are looked at only where
    nothing else fits."""

    sharded: tuple[bool, ...] = (False,)
    """Whether weights may be sharded where there is one stage."""

    chunk_tokens: tuple[int, int] = (2048, 32_768)
    """Least and most tokens of a chunk on one device, on average: of a rank's share where several
    share it. A row that is shorter is one chunk."""

    max_units: int = 1024
    """Chunks of all rows that pass through one pipeline in a step."""

    min_device_share: float = 1.0
    """Share of the devices that must be used; below 1, some may stand idle so that stages become
    equal."""

    def layouts(
        self, *, gpus: int, rows: int, total_tokens: int, num_layers: int, sp: Iterable[int] = (1,)
    ) -> Iterator[Layout]:
        """Yields every layout of `rows` rows over devices.

        Args:
            gpus: devices; stages times replicas times `sp` are as many, or a little fewer
                (`min_device_share`).
            rows: rows of a step; replicas divide them.
            total_tokens: length of a row.
            num_layers: no more stages than that.
            sp: devices that may share a rank's units.
        """
        for group in sp:
            for layout in self._of_groups(
                gpus // group, rows, -(-total_tokens // group), num_layers
            ):
                if layout.stages * layout.replicas * group >= self.min_device_share * gpus:
                    yield layout._replace(sp=group)

    def _of_groups(
        self, gpus: int, rows: int, total_tokens: int, num_layers: int
    ) -> Iterator[Layout]:
        """Yields layouts over groups of devices that each see so many tokens of a row."""
        shortest, longest = self.chunk_tokens
        chunks = [
            2**power
            for power in range(total_tokens.bit_length())
            if shortest * 2**power <= total_tokens <= longest * 2**power
        ]
        for stages in range(1, min(gpus, num_layers) + 1):
            least = math.ceil(self.min_device_share * gpus / stages)
            # A rank more than the largest stage's layers ask for only makes others smaller.
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
        # A single chunk is cut in no way, and a single stage is run by no schedule.
        cuts = self.partitions if num_chunks > 1 else self.partitions[:1]
        for schedule in self.schedules if stages > 1 else self.schedules[:1]:
            for virtual in self.virtual if schedule in INTERLEAVED and stages > 1 else (1,):
                if stages * virtual > num_layers or (
                    schedule in SHARED_UNIT_SCHEDULES and num_chunks < stages
                ):
                    continue
                for partition in cuts:
                    for (saved, offload), kv_tier in product(self.frames, self.kv_tiers):
                        for sharded in self.sharded if stages == 1 else (False,):
                            for tier in (HOST,) if offload == "none" else self.activation_tiers:
                                yield Layout(
                                    *(schedule, stages, replicas, virtual, num_chunks),
                                    *(partition, saved, offload, kv_tier, 1, sharded, tier),
                                )


def bounds_of(
    curve: PrefixCost, total_tokens: int, num_chunks: int, partition: PartitionMode
) -> Bounds:
    """Cuts a sequence as a layout says."""
    if partition == "even":
        return even_bounds(total_tokens, num_chunks)
    if partition == "bounded":
        mean = total_tokens // num_chunks
        return auto_bounds(curve, total_tokens, target_tokens=mean, partition="flops")
    return balanced_bounds(curve, total_tokens, num_chunks)


# Of two sums of the same seconds in another order, one is no smaller than this share of the other.
_ROUNDED = 1.0 - 1e-10

# The schedule whose weight gradients come later than what other ranks wait for.
_SPLITTING = "zb_seq1f1b"

# Frames of so many chunks may be on their way when backward begins, not on the host.
_UNDER_WAY_CHUNKS = 3


class _Work(NamedTuple):
    """Seconds of a sequence's chunks in the whole model."""

    forward: float
    backward: float
    streamed: tuple[int, int]
    """K/V and gradient sums of all chunks that leave and that come, in the layer that has least."""
    outlasts: NDArray[np.float64]
    """[kinds] How much longer than a layer's last backward, that of the first chunk, what comes of
    its K/V takes; less than 0 where it takes less."""


class _Passing(NamedTuple):
    """[ranks] Seconds of a row on its way through a pipeline; see the note on what a step takes."""

    each: NDArray[np.float64]
    """Of a rank's computes."""

    fill: NDArray[np.float64]
    turn: NDArray[np.float64]
    """Until the first backward can begin, with all that the rank has begun till then."""

    tail: NDArray[np.float64]
    """From the last forward's end on, likewise."""

    drain: NDArray[np.float64]

    forwards: NDArray[np.float64]
    """[stages of a rank, ranks, chunks + 1] Of the first chunks."""

    backwards: NDArray[np.float64]
    """Likewise; of input gradients where these come first."""

    weights: NDArray[np.float64]
    """Of weight gradients that come later; 0 where none do."""


class _Room(NamedTuple):
    """Bytes of a rank while a chunk runs back."""

    frame: int
    """Of a layer."""
    kv: int
    """Of a layer, where they are on the device: this chunk's and those of all before it."""
    workspace: int
    """Temporaries of the running layer."""


class _Shared(NamedTuple):
    """[kinds] Seconds of a layer's units of one stage and row, on all ranks that share them."""

    left: NDArray[np.float64]
    """Of the first chunks, which this stage's rank and all behind it compute together."""

    steady: NDArray[np.float64]
    """Of those that its rank computes alone."""

    right: NDArray[np.float64]
    """Of the last chunks, which its rank and all before it compute together."""


_Batch = tuple[PartitionMode, int, Saved, Tier, int]
"""What a sequence's seconds and bytes on all ranks depend on."""


def _batch(layout: Layout) -> _Batch:
    return layout.partition, layout.num_chunks, layout.saved, layout.kv_tier, layout.sp


# Of seconds by stage and chunk, [S, N], forward or back: backward goes through stages and chunks as
# forward does, from the other end.


def _filling(units_PN: NDArray[np.float64]) -> NDArray[np.float64]:
    """[P, N] How long each rank waits for each chunk at least, while others compute it."""
    first_N = np.cumsum(units_PN[0]) - units_PN[0]
    return first_N + np.cumsum(units_PN, axis=0) - np.cumsum(units_PN, axis=1)


def _around(units_SN: NDArray[np.float64]) -> float:
    """How long a row takes from the first chunk on the first stage to the last on the last."""
    ahead_N = np.cumsum(units_SN[0]) - units_SN[0]
    behind_N = units_SN[-1].sum() - np.cumsum(units_SN[-1])
    return float((ahead_N + units_SN.sum(axis=0) + behind_N).max())


def _those_behind(units_P: NDArray[np.float64]) -> NDArray[np.float64]:
    """[P] A chunk on all stages behind each rank's last one."""
    return units_P.sum() - np.cumsum(units_P)


def _late(weight_PN: NDArray[np.float64]) -> NDArray[np.float64]:
    """[P, N] Weight gradients of each rank after its input gradient of a last chunk."""
    ranks, chunks = weight_PN.shape
    rows = 1 + -(-ranks // chunks)
    sums = np.cumsum(np.tile(weight_PN, (1, rows)), axis=1)
    behind: list[NDArray[np.float64]] = [sums[r, r : r + chunks] for r in range(ranks)]
    return np.array(behind)


def _summed(units_SN: NDArray[np.float64], virtual: int) -> NDArray[np.float64]:
    """[V, P, N + 1] Of so many first chunks, by stage of a rank."""
    sums = np.zeros((len(units_SN), units_SN.shape[1] + 1))
    np.cumsum(units_SN, axis=1, out=sums[:, 1:])
    return sums.reshape(virtual, -1, sums.shape[1])


def _of_first(
    sums: NDArray[np.float64], groups: Sequence[range], counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """[P] Seconds of so many of each rank's units, which pass its stages in groups of rows."""
    chunks = sums.shape[2] - 1
    num_ranks = int(sums.shape[1])
    ranks = np.arange(num_ranks)
    found, left = np.zeros(num_ranks), counts
    for group in groups:
        for of_stage in sums:
            count = np.minimum(left, len(group) * chunks)
            rows, rest = np.divmod(count, chunks)
            found += rows * of_stage[:, -1] + of_stage[ranks, rest]
            left = left - count
        if not left.any():
            break
    return found


class LowerBounds:
    """Lower bounds for layouts of one model, length and number of rows.

    `group_bytes_per_second` is bytes per second between so many sequence-parallel devices, and
    `fastest_rate` between the two devices that are nearest to each other.
    """

    def __init__(
        self,
        cost: ModelCost,
        total_tokens: int,
        rows: int,
        group_bytes_per_second: Callable[[int], float],
        fastest_rate: float,
    ) -> None:
        self._cost = cost
        self._costs = {1: cost}
        self._exchange_rate = group_bytes_per_second
        self._fastest_rate = fastest_rate
        self._tokens = total_tokens
        self._rows = rows
        self._curve = PrefixCost.of(cost.shape)
        alike = cost.shape.layer_kinds
        self._kinds = {kind: alike.count(kind) for kind in sorted(set(alike))}
        self._bounds: dict[tuple[PartitionMode, int], Bounds] = {}
        self._work: dict[_Batch, _Work] = {}
        self._passing: dict[tuple[_Batch, int, int, bool], _Passing] = {}
        self._rooms: dict[_Batch, list[_Room]] = {}
        self._shared: dict[tuple[object, ...], NDArray[np.float64]] = {}
        self._costs_of_sets: dict[tuple[int, int, int | None], ModelCost] = {}
        self._stages: dict[tuple[PartitionMode, int, int, int], tuple[range, ...]] = {}
        self._layers: dict[tuple[range, ...], NDArray[np.int64]] = {}
        self._gradients: dict[tuple[range, ...], int] = {}
        self._frames: dict[tuple[int, int, Saved], int] = {}
        self._keys: dict[tuple[int, int], int] = {}
        self._compute: dict[tuple[object, ...], float] = {}
        self._states: int | None = None

    def cost(self, layout: Layout) -> ModelCost:
        """Returns the costs of a device of a layout, which may share its rank's units."""
        sp = layout.sp
        if sp not in self._costs:
            self._costs[sp] = self._cost.with_sequence_parallel(sp, self._exchange_rate(sp))
        return self._costs[sp]

    def bounds(self, layout: Layout) -> Bounds:
        """Returns the chunks of a layout."""
        key = (layout.partition, layout.num_chunks)
        if key not in self._bounds:
            made = bounds_of(self._curve, self._tokens, layout.num_chunks, layout.partition)
            self._bounds[key] = made
        return self._bounds[key]

    def seconds(self, layout: Layout, *, reduce_seconds: float = 0.0) -> float:
        """Returns the least time of a step: of compute or of what must pass over a link.

        `reduce_seconds` is what the reduction of any stage's gradients takes, after its last
        backward.
        """
        key = (*_batch(layout), layout.schedule, layout.stages, layout.replicas, layout.virtual)
        if key not in self._compute:
            rows = self._rows // layout.replicas
            shares = layout.schedule in SHARED_UNIT_SCHEDULES
            found = self._sharing_seconds(layout) if shares else self._alone_seconds(layout, rows)
            self._compute[key] = found * _ROUNDED
        if reduce_seconds and layout.kv_tier != "device":
            # A reduction waits for the last backward, not for K/V that come beside it.
            still = (self._layers_of_stages(layout) @ self._worked(layout).outlasts).max()
            reduce_seconds = max(0.0, reduce_seconds - max(0.0, float(still)))
        return max(self._compute[key] + reduce_seconds, self._copy_seconds(layout))

    def stages(self, layout: Layout) -> tuple[range, ...]:
        """Returns the layers of each stage of a layout."""
        count = layout.stages * layout.virtual
        key = (layout.partition, layout.num_chunks, layout.sp, count)
        if key not in self._stages:
            self._stages[key] = balanced_stages(self.cost(layout), self.bounds(layout), count)
        return self._stages[key]

    def gradient_bytes(self, layout: Layout) -> int:
        """Returns the gradients of the stage that has most."""
        stages = self.stages(layout)
        if stages not in self._gradients:
            held = [StageWeights.of(self._cost.shape, layers) for layers in stages]
            self._gradients[stages] = max(weights.gradients for weights in held)
        return self._gradients[stages]

    def _alone_seconds(self, layout: Layout, rows: int) -> float:
        """Compute of ranks that share no units; see the note on what a step takes at least."""
        size = Size(layout.stages, rows, layout.num_chunks, layout.virtual)
        splits = layout.schedule == _SPLITTING
        way = self._passing_of(layout, splits)
        groups = [range(rows)]
        if layout.schedule in INTERLEAVED:
            groups = micro_batch_groups(size)
        begun = np.array(forwards_before_backward(layout.schedule, size))
        before = _of_first(way.forwards, groups, begun)
        after = _of_first(way.backwards, groups[::-1], begun)
        if splits:
            # A rank is as many weight gradients behind as there are ranks before it.
            late = np.minimum(begun + np.arange(layout.stages), size.num_units)
            after = after + _of_first(way.weights, groups, late)
        turn, tail = way.turn - before, way.tail - after
        once = np.maximum(way.fill, turn) + way.drain, way.fill + tail
        idle = np.maximum(*once)
        apart = begun < size.num_units * layout.virtual
        idle = np.where(apart, np.maximum(idle, turn + tail), idle)
        return float((rows * way.each + np.maximum(idle, 0.0)).max())

    def _passing_of(self, layout: Layout, splits: bool) -> _Passing:
        ranks, virtual = layout.stages, layout.virtual
        key = (_batch(layout), ranks, virtual, splits)
        if key in self._passing:
            return self._passing[key]
        counts = self._layers_of_stages(layout)
        work = self.cost(layout).unit_seconds(self.bounds(layout))
        again = work.recompute[:, SAVED.index(layout.saved)]
        weight = counts @ work.weight if splits else np.zeros((len(counts), layout.num_chunks))
        forward, backward = counts @ work.forward, counts @ (work.backward + again) - weight
        forward[-1] += work.head
        if layout.kv_tier != "device":
            # A rank's next unit waits for compute and K/V of this one, which run side by side.
            tables, come = self._tables(layout), self._cost.h2d_seconds(1.0, both=True)
            forward = np.maximum(forward, come * (counts @ tables.kv_in_forward))
            backward = np.maximum(backward, come * (counts @ tables.kv_in_backward))
        last = weight[0, 0]
        behind = slice(len(counts) - ranks, None)
        found = _Passing(
            each=(forward + backward + weight).sum(axis=1).reshape(virtual, ranks).sum(axis=0),
            fill=_filling(forward[:ranks]).max(axis=1),
            turn=_around(forward) + _those_behind(backward[behind, -1]),
            tail=_around(backward) + _those_behind(forward[behind, -1]) + last,
            drain=(_filling(backward[:ranks]) + last - _late(weight[:ranks])).max(axis=1),
            forwards=_summed(forward, virtual),
            backwards=_summed(backward, virtual),
            weights=_summed(weight, virtual),
        )
        self._passing[key] = found
        return found

    def _layers_of_stages(self, layout: Layout) -> NDArray[np.int64]:
        """[stages, kinds] How many layers of each kind a stage has."""
        stages = self.stages(layout)
        if stages not in self._layers:
            alike = np.array(self._cost.shape.layer_kinds)
            held = [alike[layers.start : layers.stop] for layers in stages]
            counts = [[(kinds == kind).sum() for kind in self._kinds] for kinds in held]
            self._layers[stages] = np.array(counts)
        return self._layers[stages]

    def _sharing_seconds(self, layout: Layout) -> float:
        """Compute of ranks that share units: all of them fill and drain together."""
        rows, work = self._rows // layout.replicas, self._worked(layout)
        whole = (work.forward + work.backward) / layout.stages
        return rows * max(whole, float(self._busy_sharing(layout).max()))

    def _copy_seconds(self, layout: Layout) -> float:
        """Copies of frames out and back, and K/V on the same resources."""
        bounds, rows = self.bounds(layout), self._rows // layout.replicas
        layers: float = self._layer_counts(layout)[0]
        if layout.schedule in SHARED_UNIT_SCHEDULES:
            layers = self._cost.shape.num_layers / layout.stages
        ratios = self._ratios(layout)
        if layout.offload == "sppo":
            ratios = self._least_ratios(layout, layers)
        # A frame whose backward follows its forward at once stays.
        frames = sum(
            ratio * self._frame_bytes(layout, end - start)
            for ratio, (start, end) in zip(ratios[:-1], bounds, strict=False)
        )
        out, back = (frames + size for size in self._worked(layout).streamed)
        if layout.schedule in SHARED_UNIT_SCHEDULES:
            # Of K/V, which not all ranks of a unit have, nothing is counted: a bound stays one.
            out = back = frames
        seconds = [
            self._cost.d2h_seconds(out, both=True),
            self._cost.h2d_seconds(back, both=True),
        ]
        if frames and TIERS[layout.activation_tier].behind_host:
            seconds.append(self._cost.store_seconds(layout.activation_tier, frames))
            seconds.append(self._cost.load_seconds(layout.activation_tier, frames))
        return rows * layers * max(seconds)

    def device_bytes(self, layout: Layout) -> int:
        """Returns less than the fullest rank's device holds.

        At two kinds of moments, for the rank with most layers or for the first, which has begun
        most chunks: when the first backward begins, and in the backward of each chunk.
        """
        layers, first_layers = self._layer_counts(layout)
        rooms = self._chunk_rooms(layout)
        states, tokens = self._state_bytes(), self._tokens
        if layout.sharded:
            states //= layout.devices
        kept = self._kept_bytes(layout)
        keys = 0
        if layout.kv_tier == "device":
            keys = self._kv_bytes(layout, tokens) + self._sum_bytes(layout)
        ahead = 0
        if layout.schedule in SHARED_UNIT_SCHEDULES:
            # Of first and last units a rank has a share; it has all of those between. The first
            # one, which has no last ones, needs all heads of all keys for its own.
            share = (layout.num_chunks - layout.stages + 1) / (2 * layout.num_chunks)
            kept, ahead = int(kept * share), keys - int(keys * share)
            keys -= ahead
        kept += keys
        early = self._early(layout, 0)
        if layout.offload == "none":
            ahead += sum(self._frame_bytes(layout, end - start) for start, end in early)
        if layout.kv_tier == "device":
            ahead += sum(self._kv_bytes(layout, end - start) for start, end in early)
        least = max(layers * (states + kept), first_layers * (states + kept + ahead))
        # The frames of a rank's other stages may be away; its last stage has a layer or more.
        frames = 1 if layout.virtual > 1 and layout.offload != "none" else layers
        if layout.schedule in SHARED_UNIT_SCHEDULES:
            return max(least, layers * states)
        running = max(layers * room.kv + frames * room.frame + room.workspace for room in rooms)
        return max(least + rooms[-1].workspace, layers * states + running)

    def host_bytes(
        self, layout: Layout, ranks_per_node: int, device_bytes: int | None = None
    ) -> int:
        """Returns less than the fullest node's host holds when first backwards begin.

        With `device_bytes`, where no device holds more than so many.
        """
        bounds, layers = self.bounds(layout), self._cost.shape.num_layers // layout.stages
        on_host = layout.kv_tier != "device"
        away = self._sum_bytes(layout) if on_host else 0
        ratios = self._ratios(layout)
        # The paper's rule sends whole layers, and no more than K/V and the last stage leave room:
        # at least what devices cannot hold.
        by_rule = layout.offload == "sppo"
        if by_rule or layout.activation_tier != HOST:
            ratios = (0.0,) * len(bounds)
        sizes: dict[tuple[int, int], int] = {}
        anywhere: dict[tuple[int, int], int] = {}
        for ratio, (start, end) in zip(ratios, bounds, strict=True):
            frame, kv = self._frame_bytes(layout, end - start), self._kv_bytes(layout, end - start)
            sizes[start, end] = int(ratio * frame) + (kv if on_host else 0)
            anywhere[start, end] = frame + kv
        limited = by_rule and layout.activation_tier == HOST and device_bytes is not None
        ranks: list[int] = []
        # The first ranks hold most.
        for rank in range(min(layout.stages, ranks_per_node)):
            if layout.schedule in SHARED_UNIT_SCHEDULES:
                count = max(0, len(bounds) - 2 * (layout.stages - 1) - _UNDER_WAY_CHUNKS)
                units = sorted(bounds, key=anywhere.__getitem__)[:count]
                held, all_held = (sum(each[unit] for unit in units) for each in (sizes, anywhere))
            else:
                units = (*bounds, *self._early(layout, rank))
                # Frames of the newest chunks may still be on their way.
                held = away + sum(sizes[unit] for unit in units[:-_UNDER_WAY_CHUNKS])
                all_held = sum(anywhere[unit] for unit in units)
            if limited and device_bytes is not None:
                held = max(held, all_held - device_bytes // layers)
            ranks.append(held)
        fullest = sorted(ranks * (layout.replicas * layout.sp), reverse=True)[:ranks_per_node]
        return sum(fullest) * layers

    # -- terms ---------------------------------------------------------------------------------

    def _layer_counts(self, layout: Layout) -> tuple[int, int]:
        """Layers of the rank that has most, and at least so many of the first one.

        Stages are balanced, and where the head lightens the last one, others have more.
        """
        num_layers = self._cost.shape.num_layers
        return -(-num_layers // layout.stages), num_layers // layout.stages

    def _early(self, layout: Layout, rank: int) -> Bounds:
        """Chunks of later rows that a rank has begun when its first backward begins.

        Where a rank has several stages, as many whole chunks as it has parts of them, short ones.
        """
        rows, num_chunks = self._rows // layout.replicas, layout.num_chunks
        if layout.schedule in SHARED_UNIT_SCHEDULES:
            return ()
        size = Size(layout.stages, rows, num_chunks, layout.virtual)
        held = forwards_before_backward(layout.schedule, size)[rank] // layout.virtual
        count = min(held, rows * num_chunks) - num_chunks
        bounds = self.bounds(layout)[:: -1 if layout.virtual > 1 else 1]
        return (bounds * -(-count // num_chunks))[: max(0, count)]

    def _worked(self, layout: Layout) -> _Work:
        key = _batch(layout)
        if key not in self._work:
            self._work[key] = self._add_up(layout)
        return self._work[key]

    def _add_up(self, layout: Layout) -> _Work:
        cost, bounds, saved = self.cost(layout), self.bounds(layout), layout.saved
        tables, work = self._tables(layout), cost.unit_seconds(bounds)
        counts = np.array(list(self._kinds.values()))
        # As for one rank, whose next unit waits for K/V of this one, too.
        ahead, back = work.forward, work.backward + work.recompute[:, SAVED.index(saved)]
        come = cost.h2d_seconds(1.0, both=True)
        came, came_back = come * tables.kv_in_forward, come * tables.kv_in_backward
        out = tables.kv_out_forward + tables.kv_out_backward
        into = tables.kv_in_forward + tables.kv_in_backward
        out_bytes, in_bytes = (int(side.sum(axis=1).min()) for side in (out, into))
        return _Work(
            forward=float(np.maximum(work.head + counts @ ahead, counts @ came).sum()),
            backward=float(np.maximum(counts @ back, counts @ came_back).sum()),
            streamed=(out_bytes, in_bytes),
            outlasts=(came_back - back)[:, 0],
        )

    def _busy_sharing(self, layout: Layout) -> NDArray[np.float64]:
        """[ranks] Computes of a row, where ranks share units."""
        ranks, counts = layout.stages, self._layers_of_stages(layout)
        each = np.zeros(ranks)
        for stage, (left, steady, right) in enumerate(self._shared_parts(layout)):
            each[stage:] += counts[stage] @ left / (ranks - stage)
            each[stage] += counts[stage] @ steady
            each[: stage + 1] += counts[stage] @ right / (stage + 1)
        head = self.cost(layout).unit_seconds(self.bounds(layout)).head
        alone = layout.num_chunks - ranks + 1
        each[-1] += head[:alone].sum()
        return each + head[alone:].sum() / ranks

    def _shared_parts(self, layout: Layout) -> list[_Shared]:
        """Returns a row's units by stage, shared as `generate.msp` does."""
        ranks, count = layout.stages, layout.num_chunks
        each = [self._shares(layout, size) for size in range(1, ranks + 1)]
        found: list[_Shared] = []
        for stage in range(ranks):
            left, right = ranks - 1 - stage, count - stage
            parts = each[left][:, :left], each[0][:, left:right], each[stage][:, right:]
            found.append(_Shared(*(part.sum(axis=1) for part in parts)))
        return found

    def _shares(self, layout: Layout, size: int) -> NDArray[np.float64]:
        """[kinds, chunks] Seconds of a layer's units on all ranks of a set of so many together."""
        head_blocks = head_blocks_of(self.cost(layout), layout.stages)
        key = (*_batch(layout), size, head_blocks)
        if key not in self._shared:
            sharing = layout.sp, size, head_blocks
            if sharing not in self._costs_of_sets:
                cost = self.cost(layout)
                if size > 1:
                    cost = cost.with_sequence_parallel(
                        layout.sp * size, self._fastest_rate, head_blocks
                    )
                self._costs_of_sets[sharing] = cost
            work = self._costs_of_sets[sharing].unit_seconds(self.bounds(layout))
            again = work.recompute[:, SAVED.index(layout.saved)]
            self._shared[key] = size * (work.forward + work.backward + again)
        return self._shared[key]

    def _chunk_rooms(self, layout: Layout) -> list[_Room]:
        key = _batch(layout)
        if key not in self._rooms:
            tables = self._tables(layout)
            again = tables.rebuilt if layout.saved != "whole" else 0
            workspaces = (tables.workspace_backward + again).max(axis=0).tolist()
            self._rooms[key] = [
                _Room(
                    self._frame_bytes(layout, end - start),
                    self._kv_bytes(layout, end) if layout.kv_tier == "device" else 0,
                    workspace,
                )
                for (start, end), workspace in zip(self.bounds(layout), workspaces, strict=True)
            ]
        return self._rooms[key]

    def _tables(self, layout: Layout) -> ByteTables:
        cost, num_layers = self.cost(layout), self._cost.shape.num_layers
        decisions = Decisions(
            batch_rows=cost.batch_rows,
            bounds=self.bounds(layout),
            layer_modes=uniform_modes(layout.num_chunks, num_layers, KEEP),
            training=True,
            tile_tokens=1,
            kv_tier=layout.kv_tier,
        )
        return byte_tables(cost.shape, decisions, cost.profile.kind)

    # Bytes of one layer, the lightest.

    def _state_bytes(self) -> int:
        """Weights, gradients and optimizer; what stands at the model's ends is left out."""
        if self._states is None:
            self._states, shape = 0, self._cost.shape
            # A layer of each kind that is not first or last; a kind that is only there counts 0.
            inner = {shape.layer_kinds[i]: i for i in range(1, shape.num_layers - 1)}
            held = [StageWeights.of(shape, range(i, i + 1)) for i in inner.values()]
            if len(inner) == len(self._kinds):
                self._states = min(w.weights + w.gradients + w.optimizer for w in held)
        return self._states

    def _kv_bytes(self, layout: Layout, tokens: int) -> int:
        # Shares are rounded up, chunk by chunk.
        key = (layout.sp, tokens)
        if key not in self._keys:
            cost = self.cost(layout)
            self._keys[key] = min(cost.kv_bytes(kind, tokens) for kind in self._kinds)
        return self._keys[key]

    def _sum_bytes(self, layout: Layout) -> int:
        """Gradient sums that the last chunk's backward writes; first for one stage of a rank."""
        last, _ = self.bounds(layout)[-1]
        cost = self.cost(layout)
        return min(cost.dkv_bytes(kind, last) for kind in self._kinds) // layout.virtual

    def _frame_bytes(self, layout: Layout, tokens: int) -> int:
        key = (layout.sp, tokens, layout.saved)
        if key not in self._frames:
            cost, saved = self.cost(layout), layout.saved
            self._frames[key] = min(
                cost.activation_bytes(kind, tokens, saved) for kind in self._kinds
            )
        return self._frames[key]

    def _kept_bytes(self, layout: Layout) -> int:
        """What stays on the device of a row's frames."""
        rounded = 0.5 * layout.stages * layout.virtual / self._cost.shape.num_layers
        ratios = [min(1.0, r + rounded * (0.0 < r < 1.0)) for r in self._ratios(layout)]
        return sum(
            int((1.0 - ratio) * self._frame_bytes(layout, end - start))
            for ratio, (start, end) in zip(ratios, self.bounds(layout), strict=True)
        )

    def _ratios(self, layout: Layout) -> tuple[float, ...]:
        bounds = self.bounds(layout)
        if layout.offload == "none":
            return (0.0,) * len(bounds)
        if layout.offload == "full":
            return (1.0,) * len(bounds)
        # Of a layer on average, the head's time counted: it makes the last stage's share larger.
        seconds = self._worked(layout).forward / self._cost.shape.num_layers
        room = seconds / self._cost.d2h_seconds(1.0, both=True)
        sizes = [self._frame_bytes(layout, end - start) for start, end in bounds]
        return sppo_ratios(sizes, room / len(bounds))

    def _least_ratios(self, layout: Layout, layers: float) -> tuple[float, ...]:
        """By the paper's rule, of a rank with so many layers; as if all had least to compute.

        Of each stage whole layers leave, perhaps half a one less than the rule says.
        """
        cost, bounds = self.cost(layout), self.bounds(layout)
        room = cost.unit_seconds(bounds).forward.sum(axis=1).min() / cost.d2h_seconds(1, both=True)
        room -= self._tables(layout).kv_out_forward.sum(axis=1).max()
        lengths = (end - start for start, end in bounds)
        sizes = [
            max(cost.activation_bytes(i, n, layout.saved) for i in self._kinds) for n in lengths
        ]
        ratios = sppo_ratios(sizes, max(0.0, float(room)) / len(bounds))
        return tuple(max(0.0, ratio - layout.virtual / (2 * layers)) for ratio in ratios)
