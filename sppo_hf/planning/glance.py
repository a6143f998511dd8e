"""Glance: what a layout takes at least, in seconds and bytes, found without simulating it.

A search over layouts orders them by it and leaves out what cannot fit. Terms are those of
PipelineCost, with stages taken as equal where that makes them smaller. Knows nothing of budgets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sppo_hf.planning.cost import StageCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.layouts import Cut, Layout, bounds_of
from sppo_hf.planning.memory import ByteTables, byte_tables
from sppo_hf.planning.modes import KEEP, SAVED, Saved
from sppo_hf.planning.partition import Bounds, PrefixCost
from sppo_hf.planning.pipeline_cost import KVTier
from sppo_hf.planning.policies import uniform_modes
from sppo_hf.planning.policy import sppo_ratios
from sppo_hf.planning.stages import StageWeights
from sppo_hf.schedule.generate import SHARING, Size, begun_units

# Frames of so many chunks may be on their way when backward begins, not on the host.
_UNDER_WAY_CHUNKS = 3


class _Streams(NamedTuple):
    """Bytes of K/V and gradient sums that a layer's units of one chunk stream."""

    forward_out: int
    backward_out: int
    forward_in: int
    backward_in: int

    def out(self, both: bool) -> int:
        """Beside a frame's copy to the host; see the note on K/V in `pipeline_cost`."""
        return self.forward_out + (self.backward_out if both else 0)

    def back(self, both: bool) -> int:
        """Beside its copy back."""
        return self.backward_in + (self.forward_in if both else 0)


@dataclass(frozen=True, slots=True)
class _Work:
    """Seconds of each of a sequence's chunks in the whole model."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    """The part of backward that is weight gradients."""
    least_layer: float
    """Of the cheapest layer, forward and backward over all chunks."""
    streams: tuple[_Streams, ...]
    """K/V of each chunk's units, in the layer that has least."""


class _Room(NamedTuple):
    """Bytes of a rank while a chunk runs back."""

    frame: int
    """Of a layer."""
    kv: int
    """Of a layer, where they are on the device: this chunk's and those of all before it."""
    workspace: int
    """Temporaries of the running layer."""


_Batch = tuple[Cut, int, Saved, KVTier, int]
"""What a sequence's seconds and bytes on all ranks depend on."""


def _batch(layout: Layout) -> _Batch:
    return layout.partition, layout.num_chunks, layout.saved, layout.kv_tier, layout.sp


class Glance:
    """Lower bounds for layouts of one model, length and number of rows."""

    def __init__(
        self,
        cost: StageCost,
        total_tokens: int,
        rows: int,
        exchange_rate: Callable[[int], float] = lambda _: math.inf,
    ) -> None:
        """Prepare for layouts.

        Args:
            cost: of one device.
            total_tokens: length of a row.
            rows: rows of a step.
            exchange_rate: bytes per second between so many sequence-parallel devices.
        """
        self._cost = cost
        self._costs = {1: cost}
        self._exchange_rate = exchange_rate
        self._tokens = total_tokens
        self._rows = rows
        self._curve = PrefixCost.of(cost.shape)
        alike = cost.shape.alike
        self._kinds = {kind: alike.count(kind) for kind in sorted(set(alike))}
        self._bounds: dict[tuple[Cut, int], Bounds] = {}
        self._work: dict[_Batch, _Work] = {}
        self._rooms: dict[_Batch, list[_Room]] = {}
        self._states: int | None = None

    def cost(self, layout: Layout) -> StageCost:
        """Returns the costs of a device of a layout, which may share its rank's units."""
        sp = layout.sp
        if sp not in self._costs:
            rate = self._exchange_rate(sp)
            self._costs[sp] = replace(self._cost, sp=sp, exchange_bytes_per_second=rate)
        return self._costs[sp]

    def bounds(self, layout: Layout) -> Bounds:
        """Returns the chunks of a layout."""
        key = (layout.partition, layout.num_chunks)
        if key not in self._bounds:
            made = bounds_of(self._curve, self._tokens, layout.num_chunks, layout.partition)
            self._bounds[key] = made
        return self._bounds[key]

    def seconds(self, layout: Layout) -> float:
        """Returns the least time of a step: of compute or of what must pass over a link."""
        return max(self._compute_seconds(layout), self._copy_seconds(layout))

    def _compute_seconds(self, layout: Layout) -> float:
        """Compute over ranks, and the time that it takes to fill and drain the pipeline.

        The rank with most layers computes all along, but for the time in which the longest chunk
        passes through all other ranks, forward and back: whatever chunks come before it, it cannot
        be there earlier.
        """
        work = self._worked(layout)
        ranks, rows = layout.stages, self._rows // layout.replicas
        whole = sum(work.forward) + sum(work.backward)
        most_layers = -(-self._cost.shape.num_layers // (ranks * layout.virtual))
        if layout.schedule in SHARING:
            # All ranks fill and drain together; shares of a unit take its share at least.
            return rows * whole / ranks
        share = max(1 / ranks, most_layers * work.least_layer / whole)
        passing = max(work.forward) + max(work.backward)
        if layout.schedule == "zb_seq1f1b":
            # As in `formulas`: weight gradients are late, and as much of other work fills in.
            late = max(work.weight)
            inputs = max(work.backward) - late
            passing -= late + min(late, inputs, max(work.forward))
        waits = layout.virtual - 1
        missing = max(0, ranks - rows * layout.num_chunks) / ranks
        idle = (1 - share) * passing + waits * missing * whole / layout.num_chunks
        return rows * share * whole + idle / layout.virtual

    def _copy_seconds(self, layout: Layout) -> float:
        """Copies of frames out and back, with the K/V that PipelineCost has share their links."""
        if layout.offload == "none":
            return 0.0
        bounds, work = self.bounds(layout), self._worked(layout)
        rows = self._rows // layout.replicas
        out = back = 0.0
        ratios = self._ratios(layout)
        # A frame whose backward follows its forward at once stays.
        for chunk in range(len(bounds) - 1):
            if not ratios[chunk]:
                continue
            start, end = bounds[chunk]
            size = ratios[chunk] * self._frame_bytes(layout, end - start)
            both = rows > 1
            out += size + work.streams[chunk].out(both)
            back += size + work.streams[chunk].back(both)
        layers = rows * self._layer_counts(layout)[0]
        if layout.schedule in SHARING:
            layers = rows * self._cost.shape.num_layers / layout.stages
        return layers * max(
            self._cost.d2h_seconds(out, both=True), self._cost.h2d_seconds(back, both=True)
        )

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
        if layout.kv_tier == "device":
            kept += self._kv_bytes(layout, tokens) + self._sum_bytes(layout)
        if layout.schedule in SHARING:
            # Of first and last units a rank has a share; it has all of those between.
            kept = kept * (layout.num_chunks - layout.stages + 1) // (2 * layout.num_chunks)
        early = self._early(layout, 0)
        ahead = 0
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

    def host_bytes(self, layout: Layout, ranks_per_node: int) -> int:
        """Returns less than the fullest node's host holds when first backwards begin."""
        away = self._sum_bytes(layout) if layout.kv_tier != "device" else 0
        bounds = self.bounds(layout)
        # The paper's rule sends whole layers, and no more than K/V and the last stage leave room.
        ratios = (0.0,) * len(bounds) if layout.offload == "sppo" else self._ratios(layout)

        sizes: dict[tuple[int, int], int] = {}
        for ratio, (start, end) in zip(ratios, bounds, strict=True):
            size = int(ratio * self._frame_bytes(layout, end - start))
            size += self._kv_bytes(layout, end - start) if layout.kv_tier != "device" else 0
            sizes[start, end] = size
        ranks: list[int] = []
        # The first ranks hold most.
        for rank in range(min(layout.stages, ranks_per_node)):
            if layout.schedule in SHARING:
                shared, count = layout.stages - 1, len(bounds)
                held = sum(sorted(sizes[unit] for unit in bounds)[: max(0, count - 2 * shared - 3)])
                ranks.append(held)
                continue
            units = (*bounds, *self._early(layout, rank))
            # Frames of the newest chunks may still be on their way.
            ranks.append(away + sum(sizes[unit] for unit in units[:-_UNDER_WAY_CHUNKS]))
        fullest = sorted(ranks * (layout.replicas * layout.sp), reverse=True)[:ranks_per_node]
        return sum(fullest) * (self._cost.shape.num_layers // layout.stages)

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
        ahead = np.maximum(work.forward, cost.h2d_seconds(1.0, both=True) * tables.kv_in_forward)
        back = np.maximum(
            work.backward + work.recompute[:, SAVED.index(saved)],
            cost.h2d_seconds(1.0, both=True) * tables.kv_in_backward,
        )
        sides = (
            *(tables.kv_out_forward, tables.kv_out_backward),
            *(tables.kv_in_forward, tables.kv_in_backward),
        )
        least = zip(*(side.min(axis=0).tolist() for side in sides), strict=True)
        return _Work(
            forward=tuple((work.head + counts @ ahead).tolist()),
            backward=tuple((counts @ back).tolist()),
            weight=tuple((counts @ work.weight).tolist()),
            least_layer=float((ahead + back).sum(axis=1).min()),
            streams=tuple(_Streams(*sizes) for sizes in least),
        )

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
            bounds=cost.rank_bounds(self.bounds(layout)),
            layer_modes=uniform_modes(layout.num_chunks, num_layers, KEEP),
            training=True,
            tile_tokens=1,
            kv_tier=layout.kv_tier,
        )
        return byte_tables(cost.rank_shape, decisions, cost.profile.kind)

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
        cost = self.cost(layout)
        return min(cost.kv_bytes(kind, tokens) for kind in self._kinds)

    def _sum_bytes(self, layout: Layout) -> int:
        """Gradient sums that the last chunk's backward writes; first for one stage of a rank."""
        last, _ = self.bounds(layout)[-1]
        cost = self.cost(layout)
        return min(cost.dkv_bytes(kind, last) for kind in self._kinds) // layout.virtual

    def _frame_bytes(self, layout: Layout, tokens: int) -> int:
        cost = self.cost(layout)
        return min(cost.frame_bytes(kind, tokens, layout.saved) for kind in self._kinds)

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
        seconds = sum(self._worked(layout).forward) / self._cost.shape.num_layers
        room = seconds / self._cost.d2h_seconds(1.0, both=True)
        sizes = [self._frame_bytes(layout, end - start) for start, end in bounds]
        return sppo_ratios(sizes, room / len(bounds))
