"""Plans for several devices: stages, replicas, chunks, cut, schedule and what is kept of frames.

Candidates are simulated, the most promising first; what does not fit on any one rank is rejected.
Order and rejection go by `LowerBounds`: the seconds and bytes that a layout takes at least, found
without simulating it, with the terms of PipelineCost; seconds with the layout's own stages, bytes
with stages taken as equal where that makes them smaller. Frames and K/V follow one rule on all
stages: this searches layouts, the solver for one device searches frames.

[Note: what a step takes at least] A rank computes its units one after the other, and is idle at
four times at least, of any rows (`_Passing`). *Fill*: before a chunk of the first row can have come
to it through the ranks before. *Turn*: before its first backward, for that row must have passed all
stages, and its last chunk come back; forwards that the rank has begun till then are not idle.
*Tail*: the mirror image of that, after its last forward. *Drain*: that of fill, while the last
row's chunks still pass back through the ranks before. Fill and turn may be the same time, and so
may tail and drain; turn and tail are not, unless the last forward comes before the first backward.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sppo_hf.errors import ConfigError
from sppo_hf.planning.activation_modes import KEEP, SAVED, Saved
from sppo_hf.planning.chunk_bounds import Bounds, PrefixCost
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.hardware import UNKNOWN_LINK
from sppo_hf.planning.layouts import Cut, Layout, SearchSpace, bounds_of
from sppo_hf.planning.memory import ByteTables, byte_tables
from sppo_hf.planning.memory_snapshots import Budgets
from sppo_hf.planning.model_profile import head_granules
from sppo_hf.planning.pipeline_cost import PipelineCost, granules_of
from sppo_hf.planning.policies import sppo_ratios, uniform_modes
from sppo_hf.planning.stages import StageWeights, balanced_stages
from sppo_hf.planning.tiers import HOST, TIERS, Tier, tiers_behind_host
from sppo_hf.schedule.generate import (
    INTERLEAVED,
    SHARING,
    Size,
    begun_units,
    generate,
    groups_of,
)
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import period_seconds
from sppo_hf.schedule.timeline import Timeline

# What layouts whose ranks share units may be simulated beside all others: this share of it.
_SHARING = 0.25

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


_Batch = tuple[Cut, int, Saved, Tier, int]
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

    `exchange_rate` is bytes per second between so many sequence-parallel devices, and
    `fastest_rate` between the two devices that are nearest to each other.
    """

    def __init__(
        self,
        cost: ModelCost,
        total_tokens: int,
        rows: int,
        exchange_rate: Callable[[int], float],
        fastest_rate: float,
    ) -> None:
        self._cost = cost
        self._costs = {1: cost}
        self._exchange_rate = exchange_rate
        self._fastest_rate = fastest_rate
        self._tokens = total_tokens
        self._rows = rows
        self._curve = PrefixCost.of(cost.shape)
        alike = cost.shape.alike
        self._kinds = {kind: alike.count(kind) for kind in sorted(set(alike))}
        self._bounds: dict[tuple[Cut, int], Bounds] = {}
        self._work: dict[_Batch, _Work] = {}
        self._passing: dict[tuple[_Batch, int, int, bool], _Passing] = {}
        self._rooms: dict[_Batch, list[_Room]] = {}
        self._shared: dict[tuple[object, ...], NDArray[np.float64]] = {}
        self._costs_of_sets: dict[tuple[int, int, int | None], ModelCost] = {}
        self._stages: dict[tuple[Cut, int, int, int], tuple[range, ...]] = {}
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
            self._costs[sp] = self._cost.shared_by(sp, self._exchange_rate(sp))
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
            shares = layout.schedule in SHARING
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
            groups = groups_of(size)
        begun = np.array(begun_units(layout.schedule, size))
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
            alike = np.array(self._cost.shape.alike)
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
        """Copies of frames out and back, and K/V on the same lanes."""
        bounds, rows = self.bounds(layout), self._rows // layout.replicas
        layers: float = self._layer_counts(layout)[0]
        if layout.schedule in SHARING:
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
        if layout.schedule in SHARING:
            # Of K/V, which not all ranks of a unit have, nothing is counted: a bound stays one.
            out = back = frames
        seconds = [
            self._cost.d2h_seconds(out, both=True),
            self._cost.h2d_seconds(back, both=True),
        ]
        if frames and TIERS[layout.frame_tier].behind_host:
            seconds.append(self._cost.store_seconds(layout.frame_tier, frames))
            seconds.append(self._cost.load_seconds(layout.frame_tier, frames))
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
        if layout.schedule in SHARING:
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
        if layout.schedule in SHARING:
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
        if by_rule or layout.frame_tier != HOST:
            ratios = (0.0,) * len(bounds)
        sizes: dict[tuple[int, int], int] = {}
        anywhere: dict[tuple[int, int], int] = {}
        for ratio, (start, end) in zip(ratios, bounds, strict=True):
            frame, kv = self._frame_bytes(layout, end - start), self._kv_bytes(layout, end - start)
            sizes[start, end] = int(ratio * frame) + (kv if on_host else 0)
            anywhere[start, end] = frame + kv
        limited = by_rule and layout.frame_tier == HOST and device_bytes is not None
        ranks: list[int] = []
        # The first ranks hold most.
        for rank in range(min(layout.stages, ranks_per_node)):
            if layout.schedule in SHARING:
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
        if layout.schedule in SHARING:
            return ()
        size = Size(layout.stages, rows, num_chunks, layout.virtual)
        held = begun_units(layout.schedule, size)[rank] // layout.virtual
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
        granules = granules_of(self.cost(layout), layout.stages)
        key = (*_batch(layout), size, granules)
        if key not in self._shared:
            sharing = layout.sp, size, granules
            if sharing not in self._costs_of_sets:
                cost = self.cost(layout)
                if size > 1:
                    cost = cost.shared_by(layout.sp * size, self._fastest_rate, granules)
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
            inner = {shape.alike[i]: i for i in range(1, shape.num_layers - 1)}
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
            self._frames[key] = min(cost.frame_bytes(kind, tokens, saved) for kind in self._kinds)
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
        sizes = [max(cost.frame_bytes(i, n, layout.saved) for i in self._kinds) for n in lengths]
        ratios = sppo_ratios(sizes, max(0.0, float(room)) / len(bounds))
        return tuple(max(0.0, ratio - layout.virtual / (2 * layers)) for ratio in ratios)


# No slots: a cached property needs the instance's dictionary.
@dataclass(frozen=True, kw_only=True)
class ClusterQuestion:
    """Rows of a length, and devices to train them on."""

    cost: ModelCost
    """The model on one device, one row at a time."""

    total_tokens: int
    """Length of each row."""

    rows: int
    """Rows of a step, over all devices."""

    gpus: int
    """Devices."""

    budgets: Budgets
    """Bytes of one device, and of one node's host."""

    gpus_per_node: int = 8
    """Devices that share a host."""

    link_bytes_per_second: float = UNKNOWN_LINK
    """From a device to one of another node, each way."""

    node_bytes_per_second: float | None = None
    """From a device to one of its own node, each way; None where it is the same."""

    space: SearchSpace = field(default_factory=SearchSpace)
    """What may be chosen."""

    shares_units: bool = True
    """Whether ranks of a pipeline can share units of this model (`head_granules`), where its heads
    can be divided among them."""

    @cached_property
    def bounds_of_layout(self) -> LowerBounds:
        """What layouts take at least."""
        fastest_rate = max(self._within_node, self.link_bytes_per_second)
        return LowerBounds(
            self.cost, self.total_tokens, self.rows, self.exchange_rate, fastest_rate
        )

    def least_seconds(self, layout: Layout) -> float:
        """Returns the least time of a layout's step."""
        reduce_seconds = _reduce_seconds(self, layout)
        return self.bounds_of_layout.seconds(layout, reduce_seconds=reduce_seconds)

    @property
    def ranks_per_node(self) -> int:
        """Devices that share a host, if there are so many."""
        return min(self.gpus_per_node, self.gpus)

    def exchange_rate(self, sp: int) -> float:
        """Returns the bytes per second between sequence-parallel devices, each way."""
        return self.link_bytes_per_second if self.crosses_nodes(sp) else self._within_node

    def crosses_nodes(self, sp: int) -> bool:
        """Returns whether some of the groups of so many devices lie on two nodes or more."""
        return self.gpus > self.gpus_per_node and self.gpus_per_node % sp != 0

    @property
    def sequence_parallel(self) -> tuple[int, ...]:
        """Sizes of groups that can share units: each has heads of every layer, as many each.

        Layers without attention over all heads (recurrent ones, states) are not shared.
        """
        shape = self.cost.shape
        kinds = {shape.layers[i] for i in shape.alike}
        return tuple(
            sp
            for sp in self.space.sp
            if sp == 1
            or (
                sp <= self.gpus
                and not shape.has_states
                and all(layer.num_heads and layer.num_heads % sp == 0 for layer in kinds)
            )
        )

    def can_run(self, layout: Layout) -> bool:
        """Returns whether the runtime takes a layout: units are shared by single devices alone."""
        if layout.schedule not in SHARING:
            return True
        return self.shares_units and layout.sp == 1 and layout.stages in self._sharing_stages

    @cached_property
    def _sharing_stages(self) -> frozenset[int]:
        """Numbers of stages whose ranks can divide the heads of units that they share."""
        attending = [layer for layer in self.cost.shape.layers if layer.num_heads]
        found: list[int] = []
        for stages in range(2, min(self.gpus, self.cost.shape.num_layers) + 1):
            try:
                head_granules(attending, stages, "the model")
            except ConfigError:
                break
            found.append(stages)
        return frozenset(found)

    @property
    def _within_node(self) -> float:
        return self.node_bytes_per_second or self.link_bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """A layout that was simulated."""

    layout: Layout
    """What it is."""

    layers: tuple[range, ...]
    """Layers of each stage."""

    bounds: Bounds
    """The chunks."""

    step_seconds: float
    """Of all rows, gradients reduced."""

    tokens_per_second: float
    """Of all devices together."""

    bubble_fraction: float
    """Share of the ranks' time without compute."""

    recompute_fraction: float
    """Share of compute that runs again."""

    peak_bytes: tuple[int, ...]
    """Most bytes on each rank's device."""

    host_bytes: int
    """Most bytes on any node's host, if all its ranks hold most at once."""

    missing_bytes: int
    """What budgets lack, over all tiers; 0 where it fits."""

    disk_bytes: int = 0
    """Most bytes behind any node's host, likewise."""

    offloads: bool = False
    """Whether anything of frames leaves a device: not where backward follows forward at once."""

    @property
    def why(self) -> str:
        """What the time goes into, in words."""
        parts = [f"idle {self.bubble_fraction:.1%}"]
        if self.recompute_fraction > 0:
            parts.append(f"recompute {self.recompute_fraction:.1%}")
        if self.offloads or self.layout.kv_tier != "device":
            parts.append("copies beside compute")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAnswer:
    """What a search came to."""

    best: tuple[ClusterPlan, ...]
    """Those that fit, fastest first."""

    closest: ClusterPlan | None
    """Of those that do not fit, the one that lacks least; None if all that were tried fit."""

    tried: int
    """Layouts that were simulated; others were too large at a glance, or too slow."""

    candidates: int
    """Layouts that there are."""

    unseen: int = 0
    """Layouts that might be among the best, and were not simulated, to be done sooner."""

    unseen_seconds: float | None = None
    """What the step of any of these takes at least; None where there are none."""


def solve_cluster(
    question: ClusterQuestion,
    *,
    keep: int = 5,
    slack: float = 0.0,
    most_actions: float = math.inf,
) -> ClusterAnswer:
    """Finds the fastest layouts.

    Candidates are taken in the order of the least time that they can take, until it exceeds the
    slowest of those to keep.

    Args:
        question: what is asked.
        keep: how many to return.
        slack: how much longer than necessary their steps may take, as a share; a search that need
            not be sure of the last percent is many times shorter.
        most_actions: how many actions may be simulated, over all candidates. Half of them are for
            candidates that take an eighth of them or less; the rest comes after. A fourth of it is
            for candidates whose ranks share units, besides. At least one candidate is simulated.

    Raises:
        ConfigError: no number of stages and replicas fits the devices, rows and layers.
    """
    answer = _solved(question, layouts(question), keep, slack, most_actions)
    if answer is None or not answer.best:
        # Only now groups that leave a node.
        across = _solved(question, layouts(question, across=True), keep, slack, most_actions)
        answer = answer if across is None else _together(answer, across)
    if answer is None:
        raise ConfigError(
            f"{question.gpus} devices cannot share {question.rows} rows of "
            f"{question.total_tokens:,} tokens among stages of {question.cost.shape.num_layers} "
            "layers. Allowed: replicas that divide devices and rows, at most one stage per layer, "
            f"and at most {question.space.most_units:,} chunks on a rank. Remedy: more rows, or "
            "fewer devices."
        )
    return answer


def _together(within: ClusterAnswer | None, across: ClusterAnswer) -> ClusterAnswer:
    """The answer of two searches, the first of which found nothing that fits."""
    if within is None:
        return across
    closest = [plan for plan in (within.closest, across.closest) if plan is not None]
    return replace(
        across,
        closest=min(closest, key=lambda plan: plan.missing_bytes, default=None),
        tried=within.tried + across.tried,
        candidates=within.candidates + across.candidates,
    )


def _solved(
    question: ClusterQuestion,
    candidates: Iterable[Layout],
    keep: int,
    slack: float,
    most_actions: float,
) -> ClusterAnswer | None:
    """Searches some layouts; None if there are none."""
    per_node = question.ranks_per_node
    # Of two that seem to take as long, the one with fewer hops between nodes comes first.
    looked_at = [(question.least_seconds(x), x.hops_between_nodes(per_node), x) for x in candidates]
    ranked = [(seconds, layout) for seconds, _, layout in sorted(looked_at)]
    if not ranked:
        return None
    search = _Search(question, keep, slack)
    with _no_collection():
        unseen = search.go_through(
            [one for one in ranked if one[1].schedule not in SHARING], most_actions
        )
        # Units that ranks share have bounds without idle time, so they would all come first, and
        # many actions: apart, so that nothing else is left out for them.
        unseen += search.go_through(
            [one for one in ranked if one[1].schedule in SHARING], most_actions * _SHARING
        )
        if not search.best:
            search.simulate_closest([layout for _, layout in unseen], most_actions)
    seconds = [at for at, x in unseen if search.may_win(at) and not search.has_seen(x)]
    return ClusterAnswer(
        best=tuple(search.best),
        closest=search.closest,
        tried=search.tried,
        candidates=len(ranked),
        unseen=len(seconds),
        unseen_seconds=min(seconds, default=None),
    )


class _Search:
    """What was simulated so far, and what came of it."""

    def __init__(self, question: ClusterQuestion, keep: int, slack: float) -> None:
        self._question = question
        self._keep = keep
        self._slack = slack
        self._actions = 0
        self._hopeless: list[tuple[int, Layout]] = []
        """Bytes that a layout lacks at a glance."""
        self._missing: dict[Layout, int] = {}
        """Bytes that those lack that were simulated, or are the same as one that was."""
        self.best: list[ClusterPlan] = []
        self.closest: ClusterPlan | None = None

    @property
    def tried(self) -> int:
        """Layouts that were simulated."""
        return len(self._missing)

    def has_seen(self, layout: Layout) -> bool:
        """Returns whether a layout was simulated."""
        return layout in self._missing

    def may_win(self, seconds: float) -> bool:
        """Returns whether a step of that many seconds would be among the best."""
        if len(self.best) < self._keep:
            return True
        return seconds * (1.0 + self._slack) <= self.best[-1].step_seconds

    def go_through(
        self, ranked: Iterable[tuple[float, Layout]], most_actions: float
    ) -> list[tuple[float, Layout]]:
        """Simulates candidates: what is small, what is large, what seems not to fit.

        Returns those that would take more than `most_actions`, over all of them.
        """
        most = self._actions + most_actions
        half = self._actions + most_actions / 2
        large, doubtful = self.simulate(ranked, each=most_actions / 8, in_all=half)
        large, more = self.simulate(large, each=most_actions, in_all=most)
        doubtful = sorted([*doubtful, *more])
        late, _ = self.simulate(doubtful, each=most_actions, in_all=most, whatever=True)
        return [*large, *late]

    def simulate(
        self,
        ranked: Iterable[tuple[float, Layout]],
        *,
        each: float,
        in_all: float,
        whatever: bool = False,
    ) -> tuple[list[tuple[float, Layout]], list[tuple[float, Layout]]]:
        """Simulates candidates as long as they may win.

        Args:
            ranked: by the least seconds that their steps take.
            each: most actions that are simulated for one of them.
            in_all: most actions that are simulated until this returns, those before it counted.
            whatever: those too of which even what keeps least of frames does not fit.

        Returns:
            Those that would take more actions, and those that are left out as they hardly fit.
        """
        budgets = self._question.budgets
        large: list[tuple[float, Layout]] = []
        doubtful: list[tuple[float, Layout]] = []
        for seconds, layout in ranked:
            if not self.may_win(seconds):
                break
            if self.has_seen(layout):
                continue
            lacking, device_bytes = self._lacking(layout)
            if lacking:
                self._hopeless.append((lacking, layout))
                continue
            if not whatever and 2 * device_bytes > (budgets.device or math.inf):
                saved, offload = self._question.space.frames[-1]
                least = layout._replace(saved=saved, offload=offload)
                if not self.has_seen(least) and not self._lacking(least)[0]:
                    self._simulate(least, min(each, in_all - self._actions))
                if self._missing.get(least, 0):
                    doubtful.append((seconds, layout))
                    continue
            if not self.has_seen(layout) and not self._simulate(
                layout, min(each, in_all - self._actions)
            ):
                large.append((seconds, layout))
        return large, doubtful

    def _lacking(self, layout: Layout) -> tuple[int, int]:
        """Bytes that a layout lacks at a glance, and those that it needs on the device."""
        bounds_of_layout, budgets = self._question.bounds_of_layout, self._question.budgets
        device_bytes = bounds_of_layout.device_bytes(layout)
        lacking = _over(device_bytes, budgets.device)
        if budgets.host is not None:
            per_node = self._question.ranks_per_node
            host_bytes = bounds_of_layout.host_bytes(layout, per_node, budgets.device)
            lacking += _over(host_bytes, budgets.host)
        return lacking, device_bytes

    def simulate_closest(self, unseen: Sequence[Layout], most_actions: float) -> None:
        """Simulates what seems to lack least of those that cannot fit.

        Where nothing was simulated and some may fit, the smallest of these.
        """
        if unseen and not self.tried:
            self._simulate(min(unseen, key=self._all_actions), math.inf)
            return
        # Little is known of what units take that ranks share.
        hopeless = sorted(self._hopeless, key=lambda one: (one[1].schedule in SHARING, *one))
        # Before a pipeline repeats itself, less than twice what all its rows take is simulated.
        small = [one for one in hopeless if 2 * self._all_actions(one[1]) <= most_actions]
        if small:
            lacking, layout = small[0]
            if self.closest is None or lacking < self.closest.missing_bytes:
                self._simulate(layout, math.inf)
        elif not self.tried:
            self._simulate(min((x for _, x in hopeless), key=self._all_actions), math.inf)

    def _all_actions(self, layout: Layout) -> int:
        return _num_actions(layout, self._question.rows // layout.replicas)

    def _simulate(self, layout: Layout, most_actions: float) -> bool:
        plan, actions = _simulate_within(self._question, layout, most_actions)
        self._actions += actions
        if plan is None:
            return False
        self._missing[layout] = plan.missing_bytes
        stays = layout.saved, "none"
        if layout.offload != "none" and not plan.offloads and stays in self._question.space.frames:
            # Nothing leaves: it is another of the layouts, and known with it.
            layout = layout._replace(offload="none", frame_tier=HOST)
            if self.has_seen(layout):
                return True
            self._missing[layout] = plan.missing_bytes
            plan = replace(plan, layout=layout)
        if not plan.missing_bytes:
            self.best = sorted([*self.best, plan], key=_worse)[: self._keep]
        elif self.closest is None or plan.missing_bytes < self.closest.missing_bytes:
            self.closest = plan
        return True


def _worse(plan: ClusterPlan) -> tuple[float, bool, bool]:
    """What orders plans: time, then what moves for nothing."""
    return plan.step_seconds, plan.offloads, plan.layout.kv_tier != "device"


def layouts(question: ClusterQuestion, *, across: bool = False) -> Iterator[Layout]:
    """Yields every layout that is worth a look.

    With `across`, those some of whose groups of sequence-parallel devices leave a node; else all
    others.
    """
    space = question.space
    found = space.layouts(
        gpus=question.gpus,
        rows=question.rows,
        total_tokens=question.total_tokens,
        num_layers=question.cost.shape.num_layers,
        sp=[sp for sp in question.sequence_parallel if question.crosses_nodes(sp) == across],
    )
    return (layout for layout in found if space.beyond_runtime or question.can_run(layout))


def simulate_layout(question: ClusterQuestion, layout: Layout) -> ClusterPlan:
    """Simulates one layout; it need not fit.

    A step's rows are alike, so a pipeline soon repeats itself: of many rows only as many are
    simulated as show it, and what the others add is known (`period_seconds`).
    """
    plan, _ = _simulate_within(question, layout, math.inf)
    assert plan is not None, "nothing was too large"
    return plan


def _simulate_within(
    question: ClusterQuestion, layout: Layout, most_actions: float
) -> tuple[ClusterPlan | None, int]:
    """Simulates a layout if that takes so many actions at most, and says how many it took."""
    rows = question.rows // layout.replicas
    warm_up, every = _warm_up(layout, rows)
    count, actions = _few_rows(rows, warm_up, every), 0
    while True:
        actions += _num_actions(layout, count)
        if actions > most_actions:
            return None, actions - _num_actions(layout, count)
        schedule, costs, timeline = _simulated(question, layout, count)
        if count == rows:
            return _planned(question, layout, costs, timeline, rows, 0.0), actions
        period = period_seconds(schedule, timeline, warm_up=warm_up, every=every)
        if period is not None:
            more = (rows - count) // every * period
            return _planned(question, layout, costs, timeline, count, more), actions
        count = rows if 4 * count > rows else 2 * count + (rows - 2 * count) % every


def _planned(
    question: ClusterQuestion,
    layout: Layout,
    costs: PipelineCost,
    timeline: Timeline,
    rows: int,
    more_seconds: float,
) -> ClusterPlan:
    """Returns what was simulated of a pipeline's rows, and what the others add, as a plan."""
    cost, bounds = costs.cost, costs.bounds
    step_seconds = timeline.end_seconds + more_seconds
    peaks = tuple(timeline.peak(f"{rank}.device").num_bytes for rank in range(layout.stages))

    def node_bytes(tier: Tier) -> int:
        """Neighbouring stages share a node; replicas fill it up."""
        held = [timeline.peak(f"{rank}.{tier}").num_bytes for rank in range(layout.stages)]
        fullest = sorted(held * (layout.replicas * layout.sp), reverse=True)
        return sum(fullest[: question.ranks_per_node])

    host_bytes = node_bytes(HOST)
    behind = {tier: node_bytes(tier) for tier in tiers_behind_host()}
    again = sum(
        cost.recompute_seconds(layer, end - start, layout.saved)
        for start, end in bounds
        for layer in range(cost.shape.num_layers)
    )
    busy = sum(timeline.busy_seconds(f"{rank}.compute") for rank in range(layout.stages)) / rows
    budgets, all_rows = question.budgets, question.rows // layout.replicas
    return ClusterPlan(
        layout=layout,
        layers=costs.stages,
        bounds=bounds,
        step_seconds=step_seconds,
        tokens_per_second=question.rows * question.total_tokens / step_seconds,
        bubble_fraction=1.0 - all_rows * busy / (layout.stages * step_seconds),
        recompute_fraction=again / busy,
        peak_bytes=peaks,
        host_bytes=host_bytes,
        disk_bytes=sum(behind.values()),
        offloads=any(
            span.action.kind == "D"
            for lane in timeline.lanes
            if lane.endswith(".d2h")
            for span in timeline.spans(lane)
        ),
        missing_bytes=_over(max(peaks), budgets.device)
        + _over(host_bytes, budgets.host)
        + sum(_over(size, budgets.of(tier)) for tier, size in behind.items()),
    )


def _simulated(
    question: ClusterQuestion, layout: Layout, rows: int
) -> tuple[Schedule, PipelineCost, Timeline]:
    """Simulates `rows` rows in each pipeline."""
    size = Size(layout.stages, rows, layout.num_chunks, layout.virtual)
    schedule = generate(layout.schedule, size)
    reduce_seconds = _reduce_seconds(question, layout)
    costs = PipelineCost(
        schedule,
        question.bounds_of_layout.cost(layout),
        question.bounds_of_layout.bounds(layout),
        split=question.bounds_of_layout.stages(layout),
        saved=layout.saved,
        offload=layout.offload,
        frame_tier=layout.frame_tier,
        kv_tier=layout.kv_tier,
        link_bytes_per_second=question.link_bytes_per_second,
        node_bytes_per_second=question.node_bytes_per_second,
        rank_nodes=layout.rank_nodes(question.gpus_per_node),
        devices_per_node=question.gpus_per_node,
        shards=layout.devices if layout.sharded else 1,
        shard_bytes_per_second=question.exchange_rate(layout.devices),
        reduce_seconds=reduce_seconds,
    )
    return schedule, costs, costs.simulate(costs.lowered(schedule, reduce=reduce_seconds > 0))


def _warm_up(layout: Layout, rows: int) -> tuple[int, int]:
    """Rows that a pipeline has begun when the first comes back, and rows that pass it together.

    The second is 0 where groups of rows are not all of one size.
    """
    size = Size(layout.stages, rows, layout.num_chunks, layout.virtual)
    if layout.schedule in SHARING:
        # One row after the other.
        return 1, 1
    units = begun_units(layout.schedule, size)[0]
    warm_up = -(-units // (layout.num_chunks * layout.virtual))
    if layout.schedule not in INTERLEAVED:
        return warm_up, 1
    every = -(-layout.stages // layout.num_chunks)
    return warm_up, 0 if rows % every else every


@contextmanager
def _no_collection() -> Generator[None]:
    """Stops the search for cycles: none are made here, and it would look through all actions."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _num_actions(layout: Layout, rows: int) -> int:
    """Returns how many actions `rows` rows are in a lowered schedule, or a few more.

    More where chunks are not streamed or sent away that here are taken to be.
    """
    stages, chunks = layout.stages * layout.virtual, layout.num_chunks
    computes = 3 if layout.schedule == "zb_seq1f1b" else 2
    copies = 0 if layout.offload == "none" else 2
    copies *= 2 if TIERS[layout.frame_tier].behind_host else 1
    copies += 0 if layout.kv_tier == "device" else 4
    units, passes = stages * chunks, 4 * (stages - 1) * chunks
    if layout.schedule in SHARING:
        # Each rank has its share of a unit: of a stage's first and last ones several.
        ahead = range(stages)
        units = sum((stages - 1 - i) * (stages - i) + i * (i + 1) for i in ahead)
        units += stages * (chunks - stages + 1)
        # Hidden states go from each share to each that needs some of them, K/V and their sums from
        # each rank to all others.
        passes += 16 * math.comb(stages, 3) + 2 * stages * (stages - 1) * chunks
    return rows * (units * (computes + copies) + passes)


def _few_rows(rows: int, warm_up: int, every: int) -> int:
    """Returns the fewest rows in which a pipeline can be seen to repeat itself, or all."""
    if not every:
        return rows
    few = warm_up + 2 * every + 1
    few += (rows - few) % every
    # A try that may fail should cost much less than doing without.
    return few if 2 * few <= rows else rows


def _reduce_seconds(question: ClusterQuestion, layout: Layout) -> float:
    """A ring all-reduce of the largest stage's gradients: 2 (R - 1) / R of them over each link.

    Of n sequence-parallel devices each first gets its n-th of the sum over them, and in the end
    the others' shares. Sharded gradients are reduced unit by unit.
    """
    if layout.sharded or layout.replicas * layout.sp == 1:
        return 0.0
    largest = question.bounds_of_layout.gradient_bytes(layout)
    sp, replicas = layout.sp, layout.replicas
    seconds = 2 * (sp - 1) / sp * largest / question.exchange_rate(sp)
    within = layout.devices <= question.gpus_per_node and question.node_bytes_per_second
    rate = within or question.link_bytes_per_second
    return seconds + 2 * (replicas - 1) / replicas * largest / sp / rate


def _over(num_bytes: int, budget_bytes: int | None) -> int:
    return 0 if budget_bytes is None else max(0, num_bytes - budget_bytes)
