"""Lowering: the decisions about one device's step become its program.

A `StepProgram` holds all that is known of a step before it runs: the computations in order (its
points), each with its duration and with the bytes that it allocates and frees on every tier, and
the copies that run beside them, which follow from byte counts alone. The memory estimate is the
running sum of these bytes, the simulator sums the same, the linear program takes its rows from the
same arrays, and `pipeline_cost` sums the underlying tables over the layers of a stage.

[Note: when bytes come and go] A point allocates when it begins and frees when it ends, so a peak is
always at the begin of a point, and stalls do not change it. On the device, what a layer saves is
allocated by its forward. Offloaded bytes are freed where compute waits for copies to the host: of
all bytes offloaded so far at most `max_pending_d2h_bytes` are still on the device. Prefetched bytes
are allocated at the point that starts the prefetch. On the host and behind it, bytes are allocated
when their copy is enqueued, right behind the forward, and freed with the backward.

[Note: the order of copies] Copies of one resource end in order. When a forward of a layer has
ended, the next unit waits until at most `max_pending_d2h_bytes` are on their way to the host. When
backward reaches a unit whose activations are offloaded or recomputed, it starts prefetches in the
order of backward, as long as the bytes ahead of their use stay within `max_prefetch_bytes`; one
layer's activations may always be ahead. Units whose activations are kept whole start no prefetch.
In a pipeline whole chunks are prefetched, as `prefetch_chunks` says. `sppo_hf.offload` carries this
out: its prefetch order is given `lowest_prefetched`.

[Note: the order of work] By chunk, K/V of all layers are held until their gradients are known, and
so are the gradient sums: a pipeline must pass a chunk on before it begins the next. By layer, a
layer's K/V are complete when its forward ends, and are not read before its backward: like other
saved activations they are kept, or offloaded in one copy and prefetched while the backward of the
layer above runs, or recomputed from the layer's inputs. Gradient sums exist only for the layer
whose backward runs. Instead, hidden states of all tokens are held between two layers.

[Note: weights on the host] Weights outside of the layers are loaded before the first forward and
kept. A layer's weights are loaded when the layer before it begins, in both directions; those of the
last two forwards are still on the device when backward begins. A layer's gradients are offloaded
when they are complete, after the backward of chunk 0; those of one layer may be on their way while
the next layer computes. When all have arrived, the host updates its weights. A plan describes the
batch that is followed by the update; with gradient accumulation the other batches have none.
`sppo_hf.offload.weights` carries this out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sppo_hf.planning.activation_modes import SAVED, all_modes, mode_of
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions, KVMode
from sppo_hf.planning.memory import (
    CAUSE_OF_SAVED,
    CONTEXT_BYTES,
    FRAGMENTATION,
    HOST_SLAB_BYTES,
    Bytes,
    ByteTables,
    Cause,
    Level,
    MemoryEstimate,
    byte_tables,
)
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.tiers import TIERS, Tier, offload_tiers, tiers_behind_host
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.simulate import Change, simulate_positions
from sppo_hf.schedule.timeline import Timeline

COMPUTE, D2H, H2D = "compute", "d2h", "h2d"
HOST_COMPUTE = "host compute"
"""The resource of an optimizer that runs on the host."""

_COMPUTE, _D2H, _H2D, _HOST_COMPUTE, _BEHIND = range(5)
"""Indices of these resources, and of the first one of the tiers behind the host."""

RESIDENT_LAYERS = 2
"""Layers with host-resident weights that are on the device at a time: the running one and the next.
"""

# On a CPU these are parts of one slab, which is freed as a whole with its chunk.
_IN_SLABS = (Cause.KV, Cause.PRODUCTS, Cause.INPUTS)
TRANSIENT_CAUSES = frozenset(Cause) - {Cause.WEIGHTS, Cause.LORA, Cause.OPTIMIZER, Cause.GRADIENTS}
"""Causes whose bytes on the device are allocated and freed within a step, and fragment memory."""


def lower(decisions: Decisions, cost: ModelCost) -> StepProgram:
    """Returns the program of one step (of one forward, where there is no training)."""
    return StepProgram(decisions, cost.shape, cost.profile.kind, cost)


def estimate(
    shape: ModelShape, decisions: Decisions, *, device_kind: str = "cuda"
) -> MemoryEstimate:
    """Predicts the bytes of one forward (and backward, when training) on one device."""
    return StepProgram(decisions, shape, device_kind).estimate


def min_device_bytes(tables: ByteTables) -> NDArray[np.float64]:
    """Returns the device bytes that every choice of modes holds, with fragmentation, [points]."""
    share = FRAGMENTATION[tables.device_kind]
    standing = sum(tables.standing.values()) + CONTEXT_BYTES[tables.device_kind]
    held = np.full(tables.points.count, float(standing))
    for cause, level in fixed_levels(tables)["device"].items():
        held += level.during * (1.0 + share * (cause in TRANSIENT_CAUSES))
    return held


def compute_seconds(decisions: Decisions, cost: ModelCost) -> float:
    """Returns the compute seconds of a step, including an update on the host, without stalls."""
    seconds = float(lower(decisions, cost).seconds.sum())
    return seconds + cost.update_seconds * decisions.training


class StepProgram:
    """The program of one device's step. Its parts are computed on first use."""

    def __init__(
        self,
        decisions: Decisions,
        shape: ModelShape,
        device_kind: str,
        cost: ModelCost | None = None,
    ) -> None:
        """Prepare the program; `cost` is needed for durations only."""
        streams = decisions.kv_tier != "device"
        assert not (streams and decisions.by_layer), "by layer, `kv_modes` says where K/V wait"
        self.decisions = decisions
        self.tables = byte_tables(shape, decisions, device_kind)
        self.points = self.tables.points
        self._cost = cost

    # -- modes ---------------------------------------------------------------------------------

    @cached_property
    def modes(self) -> Bytes:
        """[chunks, layers] Index of each unit's mode in `all_modes`, which goes tier by tier."""
        chunks = self.decisions.layer_modes
        # Modes are shared constants, and rows are often the same object.
        rows = {id(row): row for row in chunks}
        number = {id(mode): at for at, mode in enumerate(all_modes())}
        numbers = [[number[id(mode_of(m.saved, m.tier))] for m in row] for row in rows.values()]
        place = {row: at for at, row in enumerate(rows)}
        return np.array(numbers, dtype=np.int64)[[place[id(row)] for row in chunks]]

    @cached_property
    def tiers(self) -> Bytes:
        """[chunks, layers] Index in `TIERS` of the tier of each unit's activations."""
        return self.modes // len(SAVED)

    @cached_property
    def activation_bytes(self) -> Bytes:
        """[chunks, layers] Bytes of each unit's saved activations."""
        tables = self.tables
        chunks = np.arange(self.points.num_chunks)[:, None]
        return tables.saved[tables.kind_of, self.modes % len(SAVED), chunks]

    @cached_property
    def offloaded_bytes(self) -> Bytes:
        """[chunks, layers] Bytes of each unit's offloaded activations; 0 where they are kept."""
        return np.where(self.modes >= len(SAVED), self.activation_bytes, 0) * self.points.training

    def kv_bytes(self, *modes: KVMode) -> Bytes:
        """[layers] By layer: K/V bytes of layers whose K/V mode is one of `modes`; else 0."""
        decisions, tables = self.decisions, self.tables
        if not decisions.by_layer:
            return np.zeros(decisions.num_layers, dtype=np.int64)
        chosen = np.array(
            [decisions.kv_mode(layer) in modes for layer in range(decisions.num_layers)]
        )
        return np.where(chosen, tables.layer_kv, 0)

    @cached_property
    def offloaded_kv_bytes(self) -> Bytes:
        """[layers] By layer: K/V bytes that are offloaded, in training."""
        return self.kv_bytes(*offload_tiers()) * self.points.training

    @cached_property
    def reloaded_input_bytes(self) -> Bytes:
        """[layers] Bytes of offloaded layer inputs that are loaded a second time, to recompute K/V.

        Inputs of the last chunk are not among them: they are loaded for its own recomputation.
        """
        recomputed = (self.kv_bytes("recompute") > 0) & (self.modes[:-1] % len(SAVED) > 0)
        inputs = np.where(self.offloaded_bytes[:-1] > 0, self.tables.hidden_states[:-1, None], 0)
        return np.where(recomputed, inputs, 0).sum(axis=0)

    @cached_property
    def reruns_attention(self) -> NDArray[np.bool_]:
        """[chunks, layers] Units whose backward reruns attention's forward."""
        attends = np.array([layer.num_heads > 0 for layer in self.tables.shape.layers])
        not_saved = self.modes % len(SAVED) == SAVED.index("hidden")
        return not_saved & attends & self.points.training

    @property
    def attention_rerun_seconds(self) -> float:
        """Seconds of a step that rerunning attention's forward takes."""
        assert self._cost is not None, "durations need a program with costs"
        work = self._cost.unit_seconds(self.decisions.bounds, self.decisions.layer_tile_tokens)
        more = work.recompute[:, SAVED.index("hidden")] - work.recompute[:, SAVED.index("inputs")]
        return float(np.where(self.reruns_attention, more[self.tables.kind_of].T, 0.0).sum())

    @cached_property
    def restreamed_kv_bytes(self) -> Bytes:
        """[chunks, layers] K/V bytes streamed a second time, to rerun attention in backward."""
        tables = self.tables
        seen = tables.kv_per_token * (tables.prefix_tokens + tables.lengths)
        return np.where(self.reruns_attention, tables.of_layers(seen), 0) * tables.streams

    @cached_property
    def copied_bytes(self) -> tuple[int, int]:
        """Bytes copied to the host and to the device over a step."""
        tables = self.tables
        kinds = np.bincount(tables.kind_of)

        def summed(forward: Bytes, backward: Bytes) -> int:
            streamed = kinds @ (forward + backward * self.points.training)
            return int(self.offloaded_bytes.sum() + streamed.sum() + self.offloaded_kv_bytes.sum())

        out = summed(tables.kv_out_forward, tables.kv_out_backward)
        back = summed(tables.kv_in_forward, tables.kv_in_backward)
        return out, back + int(self.reloaded_input_bytes.sum() + self.restreamed_kv_bytes.sum())

    # -- seconds -------------------------------------------------------------------------------

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """[points] Seconds of each computation."""
        assert self._cost is not None, "durations need a program with costs"
        kind_of = self.tables.kind_of
        decisions = self.decisions
        work = self._cost.unit_seconds(decisions.bounds, decisions.layer_tile_tokens)
        forward, backward = work.forward[kind_of].T, work.backward[kind_of].T
        if self.points.training:
            chunks = np.arange(self.points.num_chunks)[:, None]
            backward = backward + work.recompute[kind_of, self.modes % len(SAVED), chunks]
            recomputed = self.kv_bytes("recompute") > 0
            if recomputed.any():
                # Where the layer's backward begins.
                made = np.where(self.modes % len(SAVED) > 0, work.kv_recompute[kind_of].T, 0.0)
                backward[-1] += np.where(recomputed, made.sum(axis=0), 0.0)
        head = work.head if self.points.training else work.head_evaluated
        return self.points.arrange(forward, head, backward)

    # -- the look-ahead ------------------------------------------------------------------------

    @cached_property
    def num_prefetched(self) -> Bytes:
        """[entries] How many entries are prefetched when each entry is reached."""
        num_prefetched = np.zeros(self._prefetch_entries.sizes.size, dtype=np.int64)
        asking, following, _ = self._prefetch_limits
        num_prefetched[asking] = following
        return np.maximum.accumulate(num_prefetched)

    @cached_property
    def prefetched_bytes(self) -> Bytes:
        """[chunks * layers, in the order of backward] Bytes prefetched up to each point."""
        _, _, sums = self._prefetch_limits
        places = self._prefetch_entries.places
        # Of several entries at a place, the last.
        return sums[self.num_prefetched][
            np.append(np.flatnonzero(np.diff(places)), places.size - 1)
        ]

    @cached_property
    def lowest_prefetched(self) -> list[int]:
        """The lowest number prefetched when each is reached, as the engine numbers units.

        By chunk a unit's number is the place of its forward among all forwards. By layer a layer's
        K/V have a number too, behind those of its chunks.
        """
        points, prefetch_order = self.points, self._prefetch_entries
        total = points.num_chunks * points.num_layers
        numbers = total - 1 - prefetch_order.places
        if self.decisions.by_layer:
            layer, chunk = np.divmod(numbers, points.num_chunks)
            total += points.num_layers
            numbers = layer * (points.num_chunks + 1) + np.where(
                prefetch_order.is_kv, points.num_chunks, chunk
            )
        lowest = np.full(total, total)
        lowest[numbers] = np.where(
            self.num_prefetched > 0, numbers[np.maximum(self.num_prefetched, 1) - 1], total
        )
        # Numbers without an entry prefetch nothing.
        return np.minimum.accumulate(lowest[::-1])[::-1].tolist()

    @cached_property
    def actions(self) -> list[Action]:
        """All actions in the order in which they are enqueued."""
        return self.resources.enqueued

    @cached_property
    def prefetches_at(self) -> dict[int, list[Action]]:
        """Copies that start when backward reaches a place, by place."""
        asking, following, _ = self._prefetch_limits
        prefetch_order, points = self._prefetch_entries, self.points
        offloaded = np.flatnonzero(prefetch_order.sizes)
        gates = prefetch_order.places[asking[np.searchsorted(following, offloaded, side="right")]]
        found: dict[int, list[Action]] = {}
        for gate, entry in zip(gates.tolist(), offloaded.tolist(), strict=True):
            chunk, layer = points.unit(points.num_forward + int(prefetch_order.places[entry]))
            copy = Action("K", 0, chunk, layer, 0) if prefetch_order.is_kv[entry] else None
            found.setdefault(gate, []).append(copy or Action("H", 0, chunk, layer))
        return found

    @cached_property
    def _prefetch_entries(self) -> _PrefetchEntries:
        """Units that can be prefetched, in the order of backward."""
        points = self.points
        sizes = points.in_backward(self.offloaded_bytes)
        enters = points.in_backward(self.modes) != SAVED.index("whole")
        places = np.arange(sizes.size)
        is_kv = np.zeros(sizes.size, dtype=bool)
        (layers,) = np.nonzero(self.offloaded_kv_bytes[::-1])
        if layers.size:
            # A layer's K/V are one more entry, in front of those of its chunks.
            at = layers * points.num_chunks
            sizes = np.insert(sizes, at, self.offloaded_kv_bytes[::-1][layers])
            enters, is_kv = np.insert(enters, at, True), np.insert(is_kv, at, True)
            places = np.insert(places, at, at)
        return _PrefetchEntries(sizes, enters, places, is_kv)

    @cached_property
    def _prefetch_limits(self) -> tuple[Bytes, Bytes, Bytes]:
        """Entries that start prefetches, where each stops, and cumulative bytes of all."""
        limit = self.decisions.max_prefetch_bytes or 0
        sizes = self._prefetch_entries.sizes
        sums = np.concatenate(([0], np.cumsum(sizes)))
        if self.decisions.prefetch_chunks is not None:
            # The first layer of each chunk prefetches the whole chunk, and
            # `prefetch_chunks` more.
            layers = self.points.num_layers
            first = np.arange(0, sizes.size, layers)
            last = first + (1 + self.decisions.prefetch_chunks) * layers
            return first, np.minimum(last, sizes.size), sums
        asking = np.flatnonzero(self._prefetch_entries.enters)
        used = sums[asking + 1]
        following = np.searchsorted(sums, used + limit, side="right") - 1
        # One unit's activations may always be ahead, however large.
        alone = (sums[following] == used) & (following < sizes.size)
        further = sums[np.minimum(following + 1, sizes.size)]
        following = np.where(alone, np.searchsorted(sums, further, side="right") - 1, following)
        return asking, following, sums

    # -- bytes ---------------------------------------------------------------------------------

    @cached_property
    def estimate(self) -> MemoryEstimate:
        """The memory estimate: running sums of all bytes."""
        return MemoryEstimate(self.points, self.standing, self.levels)

    @cached_property
    def standing(self) -> dict[Tier, dict[Cause, int]]:
        """Bytes that are held throughout the step, by tier and cause."""
        decisions, tables = self.decisions, self.tables
        standing: dict[Tier, dict[Cause, int]] = {tier: {} for tier in TIERS}
        standing["device"] = dict(tables.standing)
        behind = tiers_behind_host()
        used = self.tiers[self.offloaded_bytes > 0]
        # Each tier behind the host that is used has a staging region through which bytes pass.
        through = [
            bool(
                decisions.kv_tier == tier
                or (used == list(TIERS).index(tier)).any()
                or self.kv_bytes(tier).any()
            )
            for tier in behind
        ]
        host = standing["host"]
        host.update(tables.host_resident)
        if any(through):
            host[Cause.COPIES] = sum(through) * decisions.staging_bytes
        if tables.device_kind == "cuda":
            # The host's pool is made of slabs, and does not shrink within a step.
            most = sum(level.during for level in self.levels["host"].values())
            host[Cause.SLABS] = -(int(np.max(most)) + host.get(Cause.COPIES, 0)) % HOST_SLAB_BYTES
        return standing

    @cached_property
    def levels(self) -> dict[Tier, dict[Cause, Level]]:
        """Bytes that change within the step; see [Note: when bytes come and go]."""
        levels: dict[Tier, dict[Cause, Level]] = {
            tier: dict(levels) for tier, levels in fixed_levels(self.tables).items()
        }
        if self.points.training:
            self._add_activations(levels)
        if self.points.by_layer:
            self._add_kv(levels)
        workspace = self._workspace_bytes()
        levels["device"][Cause.WORKSPACE] = passing(workspace)
        levels["device"][Cause.COPIES] = self._copies_level()
        kind = self.tables.device_kind
        moved = [v for c, v in levels["device"].items() if c in TRANSIENT_CAUSES]
        share, context = FRAGMENTATION[kind], CONTEXT_BYTES[kind]
        before, during, after = (np.sum(parts, axis=0) for parts in zip(*moved, strict=True))
        levels["device"][Cause.RESERVE] = Level(
            context + int(share * before),
            context + (share * during).astype(np.int64),
            context + (share * after).astype(np.int64),
        )
        return levels

    def _add_activations(self, levels: dict[Tier, dict[Cause, Level]]) -> None:
        points = self.points
        present = np.bincount(self.modes.ravel(), minlength=len(all_modes()))
        for index in np.flatnonzero(present).tolist():
            mode = all_modes()[index]
            here = self.modes == index
            size = np.where(here, self.activation_bytes, 0)
            cause = CAUSE_OF_SAVED[mode.saved]
            inputs = np.where(here & self._shares_inputs, self.tables.hidden_states[:, None], 0)
            if inputs.any():
                # Such inputs are the hidden states between layers while the layer
                # runs forward, and are held as a whole until the layer's backward
                # ends.
                size -= inputs
                allocated, freed = (np.zeros_like(inputs) for _ in range(2))
                allocated[-1] = freed[0] = inputs.sum(axis=0)
                entered = points.arrange(allocated, 0, 0)
                entered = np.concatenate(([0], entered[:-1]))
                level = _level_of_changes(0, entered, points.arrange(0, 0, freed))
                _add(levels[mode.tier], cause, level)
            _add(
                levels[mode.tier],
                cause,
                _lifetime_level(self.tables, cause, mode.tier, size, 0, size),
            )

    @cached_property
    def _shares_inputs(self) -> NDArray[np.bool_]:
        """[chunks, layers] By layer: units whose saved input is a view into that of all tokens.

        What autograd saves is, and what reduced activations save if all of a layer do, on the
        device; see `sppo_hf.engine.cpu_heap`. With several rows the views are made contiguous,
        which copies them.
        """
        tables, points = self.tables, self.points
        here = self.modes < len(SAVED)
        if not points.by_layer or tables.rows > 1:
            return np.zeros_like(here)
        reduced = self.modes % len(SAVED) > 0
        parts = points.num_chunks > 1 or tables.device_kind != "cpu"
        stay = (here & reduced).all(axis=0) & parts
        return here & (~reduced | stay)

    def _add_kv(self, levels: dict[Tier, dict[Cause, Level]]) -> None:
        """Adds K/V of each layer between its forward and its backward."""
        points, last = self.points, self.points.num_chunks - 1
        layers = range(points.num_layers)
        if not points.training:
            # Only K/V that are kept, to the end of the forward.
            allocated = np.zeros(points.count, dtype=np.int64)
            allocated[[points.forward(last, layer) + 1 for layer in layers]] = self.kv_bytes(
                "device"
            )
            freed = np.zeros_like(allocated)
            freed[-1] = allocated.sum()
            return _add(levels["device"], Cause.KV, _level_of_changes(0, allocated, freed))
        sizes = {tier: self.kv_bytes(tier) for tier in offload_tiers()}
        # K/V to be recomputed are kept too where the activations are kept whole, because a layer
        # input is not saved separately then.
        whole = self.modes % len(SAVED) == SAVED.index("whole")
        stays = (self.kv_bytes("device") > 0) | ((self.kv_bytes("recompute") > 0) & whole)
        kept = np.where(stays, self.tables.of_layers(self.tables.kv), 0)
        sizes["device"] = kept.sum(axis=0)
        for tier in TIERS:
            if not sizes[tier].any():
                continue
            allocated = np.zeros(points.count, dtype=np.int64)
            freed = allocated.copy()
            allocated[[points.forward(last, layer) + 1 for layer in layers]] = sizes[tier]
            # On the device they count as the running layer's from there on.
            ends = [points.backward(last, layer) - 1 for layer in layers]
            if tier != "device":
                ends = [points.backward(0, layer) for layer in layers]
            freed[ends] = sizes[tier]
            _add(levels[tier], Cause.KV, _level_of_changes(0, allocated, freed))

    def _workspace_bytes(self) -> Bytes:
        """[points] Temporary bytes; those of layers, head and embedding never overlap."""
        tables, points = self.tables, self.points
        forward = tables.of_layers(tables.workspace_forward)
        if not points.training:
            return points.arrange(forward, 0, 0)
        chunks = np.arange(points.num_chunks)[:, None]
        saved = self.modes % len(SAVED)
        backward = tables.workspace_backward[tables.kind_of, saved, chunks]
        backward[:, 0] = np.maximum(backward[:, 0], tables.embedding_backward)
        return points.arrange(forward, 0, backward)

    def _copies_level(self) -> Level:
        """[points] Device bytes of copies in flight, the running unit's included."""
        tables, points, limit = self.tables, self.points, self.decisions.max_pending_d2h_bytes
        ahead = points.num_forward

        def still_leaving(left: Bytes) -> Bytes:
            """Returns the bytes not yet freed of what was offloaded before each point."""
            if limit is not None:
                return np.minimum(np.cumsum(left) - left, limit)
            # All but the newest copy has ended.
            newest = np.maximum.accumulate(np.where(left > 0, np.arange(len(left)), -1))
            newest = np.concatenate(([-1], newest[:-1]))
            return np.where(newest >= 0, left[newest], 0)

        own = points.arrange(self.offloaded_bytes, 0, self.offloaded_bytes)
        leaving = tables.of_layers(tables.kv_out_forward)
        if self.offloaded_kv_bytes.any():
            leaving = leaving.copy()
            leaving[-1] = self.offloaded_kv_bytes
        out = own + points.arrange(leaving, 0, tables.of_layers(tables.kv_out_backward))
        if tables.streams:
            out[ahead:] -= own[ahead:]
            during = own + still_leaving(out)
        else:
            during = own.copy()
            during[:ahead] += still_leaving(out[:ahead])
        after = during.copy()
        if points.training:
            used = np.cumsum(own[ahead:])
            # Prefetched bytes that have not been used, the running unit's included.
            coming = self.prefetched_bytes - (used - own[ahead:])
            if tables.streams:
                during[ahead:] = np.maximum(during[ahead:], coming)
            else:
                # Activations whose copy to the host had not ended when backward
                # begins need no prefetch.
                rest = np.full(len(used), still_leaving(np.append(out[:ahead], 0))[-1])
                prefetched = self.prefetched_bytes
                kv_layers = np.flatnonzero(self.offloaded_kv_bytes).tolist()
                if kv_layers:
                    begins = [points.backward(points.num_chunks - 1, i) - ahead for i in kv_layers]
                    # K/V can only be prefetched once they, and all before
                    # them, have been copied.
                    rest[begins[-1] :] = 0
                    # From there on they count as the running layer's.
                    used_kv = np.zeros_like(used)
                    used_kv[begins] = self.offloaded_kv_bytes[kv_layers]
                    prefetched = prefetched - np.cumsum(used_kv)
                during[ahead:] = np.maximum(rest, prefetched) - (used - own[ahead:])
            after[ahead:] = during[ahead:] - own[ahead:]
        after[-1] = 0
        return Level(0, during, after)

    def changes(self, at: int) -> Iterator[Change]:
        """Yields the bytes that the computation at a point allocates and frees."""
        for tier, levels in self.levels.items():
            for cause, level in levels.items():
                before = int(level.after[at - 1]) if at else level.before
                during = int(level.during[at])
                if during != before:
                    yield Change(tier, cause, during - before)
                if level.after[at] != during:
                    yield Change(tier, cause, int(level.after[at]) - during, "end")

    # -- actions -------------------------------------------------------------------------------

    @cached_property
    def resources(self) -> ActionQueues:
        """The actions of each resource, with durations and dependencies."""
        assert self._cost is not None, "durations need a program with costs"
        return _ActionScheduler(self, self._cost).schedule()

    def simulate(self, *, with_bytes: bool = False) -> Timeline:
        """Simulates the step; with the bytes of every tier over time if `with_bytes`."""
        actions, seconds, needs, _ = self.resources
        if not with_bytes:
            return simulate_positions(actions, seconds=seconds, needs=needs)
        at = {action: at for at, action in enumerate(actions[COMPUTE])}
        standing = [
            Change(tier, cause, size)
            for tier, sizes in self.standing.items()
            for cause, size in sizes.items()
        ]
        standing += [
            Change(tier, cause, level.before)
            for tier, levels in self.levels.items()
            for cause, level in levels.items()
            if level.before
        ]
        return simulate_positions(
            actions,
            seconds=seconds,
            needs=needs,
            changes=lambda action: self.changes(at[action]) if action in at else (),
            standing=standing,
        )


# -- levels ------------------------------------------------------------------------------------


def passing(sizes: Bytes) -> Level:
    """Returns the level of bytes that are held only while a point runs."""
    return Level(0, sizes, np.zeros_like(sizes))


class _PrefetchEntries(NamedTuple):
    """Units, and by layer offloaded K/V of layers, in the order in which backward reaches them."""

    sizes: Bytes
    """[entries] Bytes to prefetch; 0 where nothing is offloaded."""

    enters: NDArray[np.bool_]
    """[entries] Whether reaching the entry starts prefetches."""

    places: Bytes
    """[entries] The point at which each is reached, counted from the first point of backward."""

    is_kv: NDArray[np.bool_]
    """[entries] Whether the entry is a layer's K/V."""


def _lifetime_level(
    tables: ByteTables,
    cause: Cause,
    tier: Tier,
    forward: Bytes,
    backward: Bytes | int,
    freed: Bytes,
    *,
    freed_forward: Bytes | int = 0,
) -> Level:
    """Returns the level of bytes that units allocate and free on a tier, [chunks, layers] each."""
    points = tables.points
    slabs = tier == "device" and tables.device_kind == "cpu" and points.num_chunks > 1
    if slabs and cause in _IN_SLABS:
        # A slab holds what all layers of a chunk, or all chunks of a layer, keep.
        last = np.zeros_like(freed)
        if points.by_layer:
            last[0] = freed.sum(axis=0)
        else:
            last[:, 0] = freed.sum(axis=1)
        freed = last
    allocated = points.arrange(forward, 0, 0)
    if tier != "device":
        # Copies out are enqueued behind what makes their bytes.
        allocated = np.concatenate(([0], allocated[:-1]))
    # Sums of gradients are written before the unit's own K/V are freed.
    allocated = allocated + points.arrange(0, 0, backward)
    return _level_of_changes(0, allocated, points.arrange(freed_forward, 0, freed))


@lru_cache(maxsize=64)
def fixed_levels(tables: ByteTables) -> dict[Tier, dict[Cause, Level]]:
    """Returns the levels that do not depend on activation modes, by tier and cause."""
    points, tier = tables.points, tables.kv_tier
    levels: dict[Tier, dict[Cause, Level]] = {tier: {} for tier in TIERS}
    device, none = levels["device"], np.zeros_like(tables.kv)
    # [kinds, chunks] each: allocated by forward, allocated by backward, freed by backward.
    lifetimes = {Cause.KV: (tables.kv, none, tables.kv * tables.training)}
    if tables.training:
        # The first backward writes the sums of all chunks before it.
        written = none.copy()
        written[:, -1] = tables.dkv.sum(axis=1)
        lifetimes[Cause.DKV] = (none, written, tables.dkv)
    for cause, sizes in lifetimes.items():
        forward, backward, freed = map(tables.of_layers, sizes)
        ended: Bytes | int = 0
        if points.by_layer and cause is Cause.KV:
            # While the layer runs; `_add_kv` adds them from there to backward.
            ended = np.zeros_like(forward)
            ended[-1] = forward.sum(axis=0)
            backward = ended * points.training
        levels[tier][cause] = _lifetime_level(
            tables, cause, tier, forward, backward, freed, freed_forward=ended
        )
    if tables.streams:
        forward, backward, sums = (table[:, None] for table in tables.kv_in_transit)
        device[Cause.KV] = passing(points.arrange(forward, forward[:, 0], backward))
        device[Cause.DKV] = passing(points.arrange(0, 0, sums))
    nothing = np.zeros((points.num_chunks, points.num_layers), dtype=np.int64)
    before, added = tables.gradients
    shares = nothing.copy()
    shares[-1] = np.diff(added * np.arange(points.num_layers + 1) // points.num_layers)
    ended = np.zeros(points.count, dtype=np.int64)
    ended[-1] = added * points.training
    if points.by_layer and tables.accumulates:
        # A layer's gradient sums are complete when its backward ends, and are added to
        # existing gradients.
        ended = points.arrange(0, 0, shares[::-1])
    # The step ends; bytes of the optimizer's update are not counted.
    device[Cause.GRADIENTS] = _level_of_changes(before, points.arrange(0, 0, shares), ended)
    _add_hidden_states(device, tables)
    for cause, table in tables.until_backward.items():
        if table.any():
            held = tables.of_layers(table)
            device[cause] = _level_of_changes(
                0, points.arrange(held, 0, 0), points.arrange(0, 0, held)
            )
    # Casts of trained weights, which autocast keeps until forward ends.
    casts = np.zeros(points.count, dtype=np.int64)
    casts[: points.num_forward] = tables.shape.cached_cast_bytes
    device[Cause.WEIGHTS] = Level(0, casts, np.append(casts[1:], 0))
    kept = tables.kept_logits
    logits = kept + points.arrange(0, tables.logits, 0)
    device[Cause.LOGITS_TILE] = Level(kept, logits, np.full_like(logits, kept))
    return levels


def _add_hidden_states(device: dict[Cause, Level], tables: ByteTables) -> None:
    """Adds the level of hidden states: by chunk those at the final norm and the loss."""
    points = tables.points
    if points.by_layer:
        device[Cause.HIDDEN] = _hidden_states_level(tables)
    elif points.training:
        waiting, embedded, embedded_back = tables.hidden
        freed = np.zeros((points.num_chunks, points.num_layers), dtype=np.int64)
        freed[:, 0] = waiting
        allocated = points.arrange(0, waiting, 0)
        allocated[0] += embedded
        allocated[points.num_forward] += embedded_back - embedded
        freed = points.arrange(0, 0, freed)
        freed[-1] += embedded_back
        device[Cause.HIDDEN] = _level_of_changes(0, allocated, freed)
    if any(tables.shape.encoded_token_bytes):
        tokens = tables.rows * tables.row_tokens
        forward, backward = (tokens * size for size in tables.shape.encoded_token_bytes)
        # By layer the gradient of embeddings is that of the first layer's input.
        backward = 0 if points.by_layer else backward
        _add(device, Cause.HIDDEN, _held(points.arrange(forward, forward, backward)))


def _hidden_states_level(tables: ByteTables) -> Level:
    """Returns the level of hidden states of all tokens by layer: inputs, outputs and gradients.

    Behind the last layer, these are the input and the output of the final norm; the loss replaces
    the output by gradients, chunk by chunk. Layer inputs beside hidden states are held for all
    layers at once, and so are their gradients.
    """
    points, sizes = tables.points, tables.hidden_states
    beside = tables.per_layer_inputs
    two = 2 * int(sizes.sum()) + beside
    return _held(points.arrange(two, two + np.cumsum(sizes) * points.training, two + beside))


def _held(during: Bytes) -> Level:
    """Returns the level of what is there within a step only, [points]."""
    return Level(0, during, np.append(np.minimum(during[:-1], during[1:]), 0))


def _add(levels: dict[Cause, Level], cause: Cause, level: Level) -> None:
    """Adds a level to the level of its cause."""
    there = levels.get(cause)
    if there is not None:
        before, during, after = level
        level = Level(there.before + before, there.during + during, there.after + after)
    levels[cause] = level


def _level_of_changes(before: int, allocated: Bytes, freed: Bytes) -> Level:
    """Returns the level of what each point allocates when it begins and frees when it ends."""
    after = before + np.cumsum(allocated - freed)
    return Level(before, after + freed, after)


# -- resources -------------------------------------------------------------------------------------


class ActionQueues(NamedTuple):
    """Actions of each resource in order, with durations and dependencies."""

    actions: dict[str, list[Action]]
    """Actions by resource, each list in execution order."""

    seconds: list[float]
    """Duration of each action, the lists of all resources one behind the other."""

    needs: list[list[int]]
    """Positions that each action waits for, in the same numbering."""

    enqueued: list[Action]
    """All actions in the order in which they are enqueued."""


class _Queue:
    """Bytes that are held until an action ends, oldest first.

    At most `limit_bytes` of them, or with None only what was added since the last `settle`: a
    unit's activations and its K/V, for one (`sppo_hf.offload.engine.PendingCopies`).
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._entries = deque[tuple[int, int]]()
        self._num_bytes = self._num_new = 0

    def add(self, action: int, num_bytes: int) -> None:
        self._entries.append((action, num_bytes))
        self._num_bytes += num_bytes
        self._num_new += 1

    def settle(self, new_bytes: int = 0) -> list[int]:
        """Returns what to wait for so that `new_bytes` more fit, oldest first."""
        ended: list[int] = []
        limit, newest, self._num_new = self._limit_bytes, self._num_new, 0
        while self._entries and (
            len(self._entries) > newest if limit is None else self._num_bytes + new_bytes > limit
        ):
            action, num_bytes = self._entries.popleft()
            self._num_bytes -= num_bytes
            ended.append(action)
        return ended


class _ActionScheduler:
    """Builds the actions of a program; see [Note: the order of copies].

    While they are built, an action is known by a number: its index on its resource times the number
    of resources, plus the index of the resource. Each tier behind the host has a resource for
    writes and one for reads, behind those of compute and copies.
    """

    def __init__(self, program: StepProgram, cost: ModelCost) -> None:
        decisions, tables = program.decisions, program.tables
        self._program, self._decisions, self._cost = program, decisions, cost
        self._both_ways = tables.both_ways
        """Whether copies run both ways at once, in forward and in backward."""
        self._host_resident = tables.shape.host_resident
        behind = [TIERS[tier] for tier in tiers_behind_host()]
        self._resources = [COMPUTE, D2H, H2D, HOST_COMPUTE]
        for tier in behind:
            self._resources += [tier.store_resource, tier.load_resource]
        self._writes = {tier.name: _BEHIND + 2 * at for at, tier in enumerate(behind)}
        """Resource of the writes of each tier behind the host; that of its reads is the next."""
        self._actions: list[list[Action]] = [[] for _ in self._resources]
        self._seconds: list[list[float]] = [[] for _ in self._resources]
        self._needs: list[list[list[int]]] = [[] for _ in self._resources]
        self._listed: list[Action] = []
        self._sizes = program.offloaded_bytes.tolist()
        self._tiers = np.array(list(TIERS), dtype=object)[program.tiers].tolist()
        come_back = tables.of_layers(tables.kv_in_backward) + program.restreamed_kv_bytes
        self._stream_in_bytes = (
            tables.of_layers(tables.kv_in_forward).tolist(),
            come_back.tolist(),
        )
        self._stream_out_bytes = [
            tables.of_layers(table).tolist()
            for table in (tables.kv_out_forward, tables.kv_out_backward)
        ]
        # Copies of one resource end in order, so compute waits for the last of those that must end.
        self._pending_d2h = _Queue(decisions.max_pending_d2h_bytes)
        self._waits: list[int] = []
        """Actions that the next unit waits for, beside the copy of its own activations."""
        self._staged = {tier.name: _Queue(decisions.staging_bytes) for tier in behind}
        """Host bytes of activations on their way to each tier behind the host or back."""
        # K/V are staged chunk by chunk, far fewer bytes than a layer's; writes lag by one
        # layer.
        self._kv_staged = {tier.name: _Queue(None) for tier in behind}
        self._available_after: dict[tuple[int, int], int] = {}
        """The action after which a unit's activations can be loaded, by (chunk, layer)."""
        self._kv_available_after: dict[int, int] = {}
        """The action after which a layer's newest K/V and gradient sums can be loaded."""
        self._kv_sizes = program.offloaded_kv_bytes.tolist()
        self._weights: dict[int, int] = {}
        """The copy that loads a layer's weights; `num_layers` are those outside of layers."""
        gradients = () if self._host_resident is None else self._host_resident.layer_gradient_bytes
        self._gradients = _Queue(max(gradients, default=0))
        """Bytes of gradients on their way to the host."""
        self._forward_end: list[int] = []
        """The last action of forward, before which nothing is read for backward."""

    def schedule(self) -> ActionQueues:
        """Returns the actions of the whole step."""
        seconds = self._program.seconds.tolist()
        points = self._program.points
        self._forward(seconds)
        if points.training:
            self._forward_end = self._last_computed(1)
            self._backward(seconds[points.num_forward :])
        offsets = [0, *accumulate(map(len, self._actions))]
        resources = len(self._resources)
        return ActionQueues(
            actions=dict(zip(self._resources, self._actions, strict=True)),
            seconds=[duration for resource in self._seconds for duration in resource],
            needs=[
                [offsets[number % resources] + number // resources for number in needed]
                for resource in self._needs
                for needed in resource
            ],
            enqueued=self._listed,
        )

    def _forward(self, seconds: list[float]) -> None:
        decisions, points = self._decisions, self._program.points
        for at in range(points.num_forward):
            chunk, layer = points.unit(at)
            if layer == decisions.num_layers:
                self._compute(Action("F", 0, chunk, layer), seconds[at])
                continue
            if chunk == 0:
                self._weights_for_forward(layer)
            coming = self._stream_in(chunk, layer, 0)
            unit = self._compute(Action("F", 0, chunk, layer), seconds[at])
            size = self._sizes[chunk][layer]
            if size:
                copy = Action("D", 0, chunk, layer)
                tier = self._tiers[chunk][layer]
                self._available_after[chunk, layer] = self._offload(copy, size, unit, tier)
            self._stream_out(chunk, layer, 0, unit)
            if chunk == decisions.num_chunks - 1 and self._kv_sizes[layer]:
                copy = Action("O", 0, chunk, layer, 0)
                sent = self._offload(copy, self._kv_sizes[layer], unit, decisions.kv_mode(layer))
                self._kv_available_after[layer] = sent
            self._waits += [*self._pending_d2h.settle()[-1:], *coming]

    def _backward(self, seconds: list[float]) -> None:
        decisions, points = self._decisions, self._program.points
        prefetches_at = self._program.prefetches_at
        last = decisions.num_chunks - 1
        inputs = self._program.reloaded_input_bytes.tolist()
        for place, duration in enumerate(seconds):
            chunk, layer = points.unit(points.num_forward + place)
            if chunk == last:
                self._weights_for_backward(layer)
            for copy in prefetches_at.get(place, ()):
                self._prefetch(copy)
            coming = self._stream_in(chunk, layer, 1)
            if self._sizes[chunk][layer]:
                self._waits.append(self._available_after[chunk, layer])
            if chunk == last and self._kv_sizes[layer]:
                self._waits.append(self._kv_available_after[layer])
            if chunk == last and inputs[layer]:
                self._waits.append(self._load_inputs(layer, inputs[layer]))
            unit = self._compute(Action("B", 0, chunk, layer), duration)
            self._stream_out(chunk, layer, 1, unit)
            if self._decisions.kv_tier != "device":
                self._waits += [*self._pending_d2h.settle()[-1:], *coming]
            if chunk == 0:
                self._send_gradients(layer, unit)
        self._update()

    def _weights_for_forward(self, layer: int) -> None:
        """Waits for a layer's weights in forward, and loads those of the next layer."""
        host_resident = self._host_resident
        if host_resident is None:
            return
        if layer == 0:
            self._load_weights(self._decisions.num_layers, host_resident.outer_bytes, 0)
        for coming in range(layer, min(layer + 2, self._decisions.num_layers)):
            if coming not in self._weights:
                self._load_weights(coming, host_resident.layer_bytes[coming], 0)
        outer = [] if layer else [self._weights.get(self._decisions.num_layers)]
        self._waits += [at for at in (*outer, self._weights.get(layer)) if at is not None]

    def _weights_for_backward(self, layer: int) -> None:
        """Waits for a layer's weights in backward and loads those of the layer below.

        The last two layers' weights, or all, are still on the device from forward.
        """
        host_resident, below = self._host_resident, layer - 1
        if host_resident is None or host_resident.keeps_device_copies:
            return
        if 0 <= below < self._decisions.num_layers - RESIDENT_LAYERS:
            self._load_weights(below, host_resident.layer_bytes[below], 1)
        if layer in self._weights:
            self._waits.append(self._weights[layer])

    def _load_weights(self, layer: int, num_bytes: int, part: int) -> None:
        if num_bytes:
            seconds = self._cost.h2d_seconds(num_bytes, both=self._both_ways[part])
            copy = Action("P", 0, 0, layer, part)
            self._weights[layer] = self._add(_H2D, copy, seconds, self._last_computed(1))

    def _send_gradients(self, layer: int, unit: int) -> None:
        """Offloads a layer's gradients; with those of layer 0, also those outside of layers."""
        if self._host_resident is None:
            return
        sizes = [(layer, self._host_resident.layer_gradient_bytes[layer])]
        if layer == 0:
            sizes.append((self._decisions.num_layers, self._host_resident.outer_gradient_bytes))
        for of_layer, num_bytes in sizes:
            if num_bytes:
                seconds = self._cost.d2h_seconds(num_bytes, both=self._both_ways[1])
                sent = self._add(_D2H, Action("G", 0, 0, of_layer), seconds, [unit])
                self._gradients.add(sent, num_bytes)
        self._waits += self._gradients.settle()[-1:]

    def _update(self) -> None:
        """Updates host-resident weights once all gradients have arrived."""
        if self._host_resident is not None and self._host_resident.gradient_bytes:
            # The last copy out is that of the last gradients.
            last = len(self._actions[_D2H]) - 1
            needs = [*self._last_computed(1), last * len(self._resources) + _D2H]
            self._add(_HOST_COMPUTE, Action("U", 0, 0), self._cost.update_seconds, needs)

    def _compute(self, action: Action, seconds: float) -> int:
        waits, self._waits = self._waits, []
        return self._add(_COMPUTE, action, seconds, waits)

    def _offload(self, copy: Action, num_bytes: int, unit: int, tier: Tier) -> int:
        """Copies bytes to the host and on to their tier; returns the action that ends last."""
        staged = (self._staged if copy.kind == "D" else self._kv_staged).get(tier)
        resource = self._writes.get(tier)
        room = [] if staged is None else staged.settle(num_bytes)
        # What streams out in backward has streamed out in forward too.
        seconds = self._cost.d2h_seconds(num_bytes, both=self._both_ways[0])
        sent = self._add(_D2H, copy, seconds, [unit, *room])
        self._pending_d2h.add(sent, num_bytes)
        if resource is None or staged is None:
            return sent
        write = copy._replace(kind="S", part=None if copy.kind == "D" else (copy.part or 0) + 1)
        written = self._add(resource, write, self._cost.store_seconds(tier, num_bytes), [sent])
        staged.add(written, num_bytes)
        return written

    def _prefetch(self, copy: Action) -> None:
        """Loads a unit's activations, or by layer a layer's K/V (kind "K")."""
        chunk, layer = copy.unit, copy.layer
        assert layer is not None, "what comes back is of one layer"
        is_kv = copy.kind == "K"
        num_bytes = self._kv_sizes[layer] if is_kv else self._sizes[chunk][layer]
        available = (
            self._kv_available_after[layer] if is_kv else self._available_after[chunk, layer]
        )
        tier = self._decisions.kv_mode(layer) if is_kv else self._tiers[chunk][layer]
        resource = self._writes.get(tier)
        after = [*self._last_computed(1), available]
        staged = (self._kv_staged if is_kv else self._staged).get(tier)
        if resource is not None and staged is not None:
            # Reads run ahead of their copies, as far as staging holds.
            waits = [*self._forward_end, available, *staged.settle(num_bytes)]
            read = Action("L", 0, chunk, layer, 1 if is_kv else None)
            after.append(self._load(resource, read, tier, num_bytes, waits))
        seconds = self._cost.h2d_seconds(num_bytes, both=self._both_ways[1])
        back = self._add(_H2D, copy, seconds, after)
        if is_kv:
            self._kv_available_after[layer] = back
        else:
            self._available_after[chunk, layer] = back
        if staged is not None:
            staged.add(back, num_bytes)

    def _load_inputs(self, layer: int, num_bytes: int) -> int:
        """Loads a layer's offloaded inputs, to recompute its K/V."""
        last = self._decisions.num_chunks - 1
        away = [chunk for chunk in range(last) if self._sizes[chunk][layer]]
        after = self._last_computed(1)
        after += [self._available_after[chunk, layer] for chunk in away]
        copy = Action("K", 0, last, layer, 0)
        # Inputs of one layer may be on several tiers; all are taken to be on the farthest of these.
        tiers = {self._tiers[chunk][layer] for chunk in away}
        tier = next((tier for tier in reversed(self._writes) if tier in tiers), None)
        if tier is not None:
            load = copy._replace(kind="L", part=1)
            after.append(self._load(self._writes[tier], load, tier, num_bytes, after[:]))
        seconds = self._cost.h2d_seconds(num_bytes, both=self._both_ways[1])
        return self._add(_H2D, copy, seconds, after)

    def _stream_in(self, chunk: int, layer: int, part: int) -> list[int]:
        """Streams a layer's earlier K/V in; returns what the next unit waits for.

        A unit cannot end before its last block has arrived, which is expressed as a dependency of
        the next unit. Blocks of a unit are copied while the unit before it still computes.
        """
        num_bytes = self._stream_in_bytes[part][chunk][layer]
        if not num_bytes:
            return []
        after, tier = self._last_computed(2)[:-1], self._decisions.kv_tier
        if layer in self._kv_available_after:
            after.append(self._kv_available_after[layer])
        if tier in self._writes:
            read = Action("L", 0, chunk, layer, part + 1)
            after = [*after, self._load(self._writes[tier], read, tier, num_bytes, after)]
        seconds = self._cost.h2d_seconds(num_bytes, both=True)
        return [self._add(_H2D, Action("K", 0, chunk, layer, part), seconds, after)]

    def _stream_out(self, chunk: int, layer: int, part: int, unit: int) -> None:
        """Offloads new K/V of a chunk (forward) or gradient sums of its prefix (backward)."""
        num_bytes = self._stream_out_bytes[part][chunk][layer]
        if num_bytes:
            copy = Action("O", 0, chunk, layer, part)
            # Both resources work in order, so the newest action stands for all before it.
            sent = self._offload(copy, num_bytes, unit, self._decisions.kv_tier)
            self._kv_available_after[layer] = sent

    def _last_computed(self, count: int) -> list[int]:
        """Returns the last `count` computations, oldest first; fewer near the start."""
        done = len(self._actions[_COMPUTE])
        return [at * len(self._resources) + _COMPUTE for at in range(max(done - count, 0), done)]

    def _load(
        self, writes: int, action: Action, tier: Tier, num_bytes: int, needs: list[int]
    ) -> int:
        """Reads into host memory, on the resource behind that of the tier's writes."""
        return self._add(writes + 1, action, self._cost.load_seconds(tier, num_bytes), needs)

    def _add(self, resource: int, action: Action, seconds: float, needs: list[int]) -> int:
        self._actions[resource].append(action)
        self._seconds[resource].append(seconds)
        self._needs[resource].append(needs)
        self._listed.append(action)
        return (len(self._actions[resource]) - 1) * len(self._resources) + resource
