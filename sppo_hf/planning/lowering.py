"""The one lowering: decisions about one device's step become its program.

A `StepProgram` is all that is known of a step before it runs: the computations in their order (its
points), each with its seconds and with the bytes that it takes and gives back on every tier, and
the copies beside them, which follow from byte counts alone. The estimate is the running sum of
these bytes, the simulator adds up the same, the linear program takes its rows from the same arrays,
and `pipeline_cost` adds up the tables beneath it over the layers of a stage.

[Note: when bytes come and go] A point takes bytes when it begins and gives back when it ends, so a
peak is always at a point's begin, and no stall changes it. On the device, what a layer saves is
there from its forward on. What leaves it goes where compute waits for copies out: of all that has
left so far no more than `max_pending_d2h_bytes` is still there. What comes back is there from the
point on that asks for it. Elsewhere bytes are taken when their copy out is enqueued, right behind
the forward, and given back with the backward.

[Note: the order of copies] Copies of one resource end in order. A frame closes when forward ends;
the next unit waits until no more than `max_pending_d2h_bytes` are on their way out. When backward
enters a frame that leaves or is recomputed, frames are asked for in the order of backward, as long
as those ahead of their use stay within `max_prefetch_bytes`; one frame may always be ahead. Frames
that are kept whole ask for nothing. In a pipeline whole chunks are asked for, as `fetch_chunks`
says. `sppo_hf.offload` carries this out: its prefetch order is given `lowest_prefetched`.

[Note: the order of work] By chunk, keys and values of all layers wait for their gradients, and so
do the gradient sums: a pipeline must pass a chunk on before it begins the next. By layer, a layer's
keys and values are all there when its forward ends, and are not read before its backward: like what
else is saved they stay, leave in one copy and come back while the backward of the layer above runs,
or are made again from the layer's inputs. Gradient sums are there for the one layer whose backward
runs; what weighs instead are hidden states of all tokens between two layers.

[Note: weights on the host] What is outside of the layers comes before the first forward and stays;
a layer's weights are asked for when the layer before it is entered, in both directions, and those
of the last two forwards are still there when backward begins. A layer's gradients leave when the
last chunk's (by its number the first) backward has made them whole; those of one layer may be on
their way while the next one computes. When all have left the host updates its weights. A plan is of
the batch that the update follows; where batches accumulate, the others have none.
`sppo_hf.offload.weights` carries this out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sppo_hf.planning.activation_modes import SAVED, all_modes, mode_of
from sppo_hf.planning.causes import OF_SAVED, Cause
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions, KVMode
from sppo_hf.planning.memory import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    HOST_SLAB_BYTES,
    ByteTables,
    byte_tables,
)
from sppo_hf.planning.memory_snapshots import Bytes, Level, MemoryEstimate, Points
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.tiers import TIERS, Tier, offload_tiers, tiers_behind_host
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.simulate import Change, simulate_positions
from sppo_hf.schedule.timeline import Timeline

COMPUTE, D2H, H2D = "compute", "d2h", "h2d"
HOST_COMPUTE = "host compute"
"""The resource of an optimizer that works in host memory."""

LAYERS_THERE = 2
"""Layers that rest on the host and are on the device at a time: the one in use and the next."""

# What is a part of a slab on a CPU goes when all of its chunk has gone.
_IN_SLABS = (Cause.KV, Cause.PRODUCTS, Cause.INPUTS)
MOVED = frozenset(Cause) - {Cause.WEIGHTS, Cause.LORA, Cause.OPTIMIZER, Cause.GRADIENTS}
"""What comes and goes on the device within a step, and so leaves holes."""


def lower(decisions: Decisions, cost: ModelCost) -> StepProgram:
    """Returns the program of one step (of one forward, where there is no training)."""
    return StepProgram(decisions, cost.shape, cost.profile.kind, cost)


def estimate(
    shape: ModelShape, decisions: Decisions, *, device_kind: str = "cuda"
) -> MemoryEstimate:
    """Predicts the bytes of one forward (and backward, when training) on one device."""
    return StepProgram(decisions, shape, device_kind).estimate


def least_device_bytes(tables: ByteTables) -> NDArray[np.float64]:
    """Returns what the device holds at every point whatever the modes are, its holes counted."""
    share = FRAGMENTATION[tables.device_kind]
    standing = sum(tables.standing.values()) + CONTEXT_BYTES[tables.device_kind]
    held = np.full(tables.points.count, float(standing))
    for cause, level in mode_free_levels(tables)["device"].items():
        held += level.during * (1.0 + share * (cause in MOVED))
    return held


def compute_seconds(decisions: Decisions, cost: ModelCost) -> float:
    """Returns the seconds of all compute of a step, an update on the host too; waiting left out."""
    seconds = float(lower(decisions, cost).seconds.sum())
    return seconds + cost.update_seconds * decisions.training


class StepProgram:
    """The program of one device's step; each part of it is worked out when asked for."""

    def __init__(
        self,
        decisions: Decisions,
        shape: ModelShape,
        device_kind: str,
        cost: ModelCost | None = None,
    ) -> None:
        """Prepare; `cost` is asked for seconds only, so bytes are known without it."""
        streams = decisions.kv_tier != "device"
        assert not (streams and decisions.by_layer), "by layer, `kv_modes` says where K/V wait"
        self.decisions = decisions
        self.tables = byte_tables(shape, decisions, device_kind)
        self.points = self.tables.points
        self._cost = cost

    # -- modes ---------------------------------------------------------------------------------

    @cached_property
    def modes(self) -> Bytes:
        """[chunks, layers] Index of each frame's mode in `all_modes`: tier by tier."""
        chunks = self.decisions.layer_modes
        # Modes are shared constants, and rows are often the same object.
        rows = {id(row): row for row in chunks}
        number = {id(mode): at for at, mode in enumerate(all_modes())}
        numbers = [[number[id(mode_of(m.saved, m.tier))] for m in row] for row in rows.values()]
        place = {row: at for at, row in enumerate(rows)}
        return np.array(numbers, dtype=np.int64)[[place[id(row)] for row in chunks]]

    @cached_property
    def tiers(self) -> Bytes:
        """[chunks, layers] Index of the tier on which each frame waits, in `TIERS`."""
        return self.modes // len(SAVED)

    @cached_property
    def activation_bytes(self) -> Bytes:
        """[chunks, layers] What is saved of each."""
        tables = self.tables
        chunks = np.arange(self.points.num_chunks)[:, None]
        return tables.saved[tables.kind_of, self.modes % len(SAVED), chunks]

    @cached_property
    def offloaded_bytes(self) -> Bytes:
        """[chunks, layers] The same of what leaves the device; 0 elsewhere."""
        return np.where(self.modes >= len(SAVED), self.activation_bytes, 0) * self.points.training

    def kv_bytes(self, *modes: KVMode) -> Bytes:
        """[layers] By layer: keys and values that are treated in one of these ways; 0 elsewhere."""
        what, tables = self.decisions, self.tables
        if not what.by_layer:
            return np.zeros(what.num_layers, dtype=np.int64)
        chosen = np.array([what.kv_mode(layer) in modes for layer in range(what.num_layers)])
        return np.where(chosen, tables.layer_kv, 0)

    @cached_property
    def kv_away_bytes(self) -> Bytes:
        """[layers] By layer: keys and values that leave the device, in training."""
        return self.kv_bytes(*offload_tiers()) * self.points.training

    @cached_property
    def kept_keys(self) -> Bytes:
        """[chunks, layers] By layer: keys and values that stay on the device until backward.

        Those to be made again stay too where a frame is kept whole: it keeps no input by itself.
        """
        tables = self.tables
        whole = self.modes % len(SAVED) == SAVED.index("whole")
        stays = (self.kv_bytes("device") > 0) | ((self.kv_bytes("recompute") > 0) & whole)
        return np.where(stays, tables.of_layers(tables.kv), 0)

    @cached_property
    def again_inputs(self) -> Bytes:
        """[layers] Inputs that come back once more, to make keys and values from.

        Those of the last chunk are back for its recomputation.
        """
        again = (self.kv_bytes("recompute") > 0) & (self.modes[:-1] % len(SAVED) > 0)
        inputs = np.where(self.offloaded_bytes[:-1] > 0, self.tables.hidden_states[:-1, None], 0)
        return np.where(again, inputs, 0).sum(axis=0)

    @cached_property
    def attends_again(self) -> NDArray[np.bool_]:
        """[chunks, layers] Frames whose backward runs attention forward once more."""
        attends = np.array([layer.num_heads > 0 for layer in self.tables.shape.layers])
        again = self.modes % len(SAVED) == SAVED.index("hidden")
        return again & attends & self.points.training

    @cached_property
    def attention_again_seconds(self) -> float:
        """What that takes."""
        assert self._cost is not None, "seconds are asked of a program with costs"
        work = self._cost.unit_seconds(self.decisions.bounds, self.decisions.layer_tile_tokens)
        more = work.recompute[:, SAVED.index("hidden")] - work.recompute[:, SAVED.index("inputs")]
        return float(np.where(self.attends_again, more[self.tables.kind_of].T, 0.0).sum())

    @cached_property
    def streamed_again(self) -> Bytes:
        """[chunks, layers] K/V that come once more, for attention that runs again in backward."""
        tables = self.tables
        seen = tables.kv_per_token * (tables.prefix_tokens + tables.lengths)
        return np.where(self.attends_again, tables.of_layers(seen), 0) * tables.streams

    @cached_property
    def copied_bytes(self) -> tuple[int, int]:
        """Bytes to the host and back over a step."""
        tables, away = self.tables, self.offloaded_bytes
        kinds = np.bincount(tables.kind_of)

        def summed(forward: Bytes, backward: Bytes) -> int:
            streamed = kinds @ (forward + backward * self.points.training)
            return int(away.sum() + streamed.sum() + self.kv_away_bytes.sum())

        out = summed(tables.kv_out_forward, tables.kv_out_backward)
        back = summed(tables.kv_in_forward, tables.kv_in_backward)
        return out, back + int(self.again_inputs.sum() + self.streamed_again.sum())

    # -- seconds -------------------------------------------------------------------------------

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """[points] How long each takes."""
        assert self._cost is not None, "seconds are asked of a program with costs"
        kind_of = self.tables.kind_of
        what = self.decisions
        work = self._cost.unit_seconds(what.bounds, what.layer_tile_tokens)
        forward, backward = work.forward[kind_of].T, work.backward[kind_of].T
        if self.points.training:
            chunks = np.arange(self.points.num_chunks)[:, None]
            backward = backward + work.recompute[kind_of, self.modes % len(SAVED), chunks]
            again = self.kv_bytes("recompute") > 0
            if again.any():
                # Where the layer's backward begins.
                made = np.where(self.modes % len(SAVED) > 0, work.keys[kind_of].T, 0.0)
                backward[-1] += np.where(again, made.sum(axis=0), 0.0)
        head = work.head if self.points.training else work.head_evaluated
        return self.points.lay(forward, head, backward)

    # -- the look-ahead ------------------------------------------------------------------------

    @cached_property
    def asked(self) -> Bytes:
        """[entries] Entries asked for, from the first on, once each is entered; see `_tape`."""
        asked = np.zeros(self._tape.sizes.size, dtype=np.int64)
        on_tape, following, _ = self._look_ahead
        asked[on_tape] = following
        return np.maximum.accumulate(asked)

    @cached_property
    def asked_bytes(self) -> Bytes:
        """[chunks * layers, in the order of backward] Bytes asked for by each point of it."""
        _, _, sums = self._look_ahead
        places = self._tape.places
        # Of several entries at a place, the last.
        return sums[self.asked][np.append(np.flatnonzero(np.diff(places)), places.size - 1)]

    @cached_property
    def lowest_prefetched(self) -> list[int]:
        """The same as the engine counts: by a frame's number, the lowest number asked for.

        By chunk that is the number of its forward among all layers' forwards. By layer a layer's
        keys and values have a number too, behind those of its frames.
        """
        points, prefetch_order = self.points, self._tape
        total = points.num_chunks * points.num_layers
        numbers = total - 1 - prefetch_order.places
        if self.decisions.by_layer:
            layer, chunk = np.divmod(numbers, points.num_chunks)
            total += points.num_layers
            numbers = layer * (points.num_chunks + 1) + np.where(
                prefetch_order.keys, points.num_chunks, chunk
            )
        lowest = np.full(total, total)
        lowest[numbers] = np.where(self.asked > 0, numbers[np.maximum(self.asked, 1) - 1], total)
        # What has no entry asks for nothing more.
        return np.minimum.accumulate(lowest[::-1])[::-1].tolist()

    @cached_property
    def actions(self) -> list[Action]:
        """All actions in the order in which they are enqueued."""
        return self.resources.listed

    @cached_property
    def asked_at(self) -> dict[int, list[Action]]:
        """By place in backward: the copies that are asked for when it is entered."""
        on_tape, following, _ = self._look_ahead
        prefetch_order, points = self._tape, self.points
        away = np.flatnonzero(prefetch_order.sizes)
        gates = prefetch_order.places[on_tape[np.searchsorted(following, away, side="right")]]
        found: dict[int, list[Action]] = {}
        for gate, entry in zip(gates.tolist(), away.tolist(), strict=True):
            chunk, layer = points.unit(points.num_forward + int(prefetch_order.places[entry]))
            copy = Action("K", 0, chunk, layer, 0) if prefetch_order.keys[entry] else None
            found.setdefault(gate, []).append(copy or Action("H", 0, chunk, layer))
        return found

    @cached_property
    def _tape(self) -> _Tape:
        """What may come back, in the order of backward."""
        points = self.points
        sizes = points.in_backward(self.offloaded_bytes)
        enters = points.in_backward(self.modes) != SAVED.index("whole")
        places = np.arange(sizes.size)
        keys = np.zeros(sizes.size, dtype=bool)
        (layers,) = np.nonzero(self.kv_away_bytes[::-1])
        if layers.size:
            # A layer's keys are one entry more, in front of its frames.
            at = layers * points.num_chunks
            sizes = np.insert(sizes, at, self.kv_away_bytes[::-1][layers])
            enters, keys = np.insert(enters, at, True), np.insert(keys, at, True)
            places = np.insert(places, at, at)
        return _Tape(sizes, enters, places, keys)

    @cached_property
    def _look_ahead(self) -> tuple[Bytes, Bytes, Bytes]:
        """Entries that ask, up to which entry each does, and bytes of the first 0, 1 ... ones."""
        limit = self.decisions.max_prefetch_bytes or 0
        sizes = self._tape.sizes
        sums = np.concatenate(([0], np.cumsum(sizes)))
        if self.decisions.fetch_chunks is not None:
            # The first layer of each chunk asks for all of it, and of as many more.
            layers = self.points.num_layers
            first = np.arange(0, sizes.size, layers)
            asked = first + (1 + self.decisions.fetch_chunks) * layers
            return first, np.minimum(asked, sizes.size), sums
        on_tape = np.flatnonzero(self._tape.enters)
        used = sums[on_tape + 1]
        following = np.searchsorted(sums, used + limit, side="right") - 1
        # One frame may always be ahead, however large.
        alone = (sums[following] == used) & (following < sizes.size)
        further = sums[np.minimum(following + 1, sizes.size)]
        following = np.where(alone, np.searchsorted(sums, further, side="right") - 1, following)
        return on_tape, following, sums

    # -- bytes ---------------------------------------------------------------------------------

    @cached_property
    def estimate(self) -> MemoryEstimate:
        """The running sums of all bytes."""
        return MemoryEstimate(self.points, self.standing, self.levels)

    @cached_property
    def standing(self) -> dict[Tier, dict[Cause, int]]:
        """What is there before the step and after it, and never changes, by tier and cause."""
        what, tables = self.decisions, self.tables
        standing: dict[Tier, dict[Cause, int]] = {tier: {} for tier in TIERS}
        standing["device"] = dict(tables.standing)
        behind = tiers_behind_host()
        away = self.tiers[self.offloaded_bytes > 0]
        through = any((away == list(TIERS).index(tier)).any() for tier in behind)
        host = standing["host"]
        host.update(tables.host_resident)
        if what.kv_tier in behind or through or self.kv_bytes(*behind).any():
            # A region through which bytes pass on their way to a tier behind the host and back.
            host[Cause.COPIES] = what.staging_bytes
        if tables.device_kind == "cuda":
            # The host's pool is made of slabs, and does not shrink within a step.
            most = sum(level.during for level in self.levels["host"].values())
            host[Cause.SLABS] = -(int(np.max(most)) + host.get(Cause.COPIES, 0)) % HOST_SLAB_BYTES
        return standing

    @cached_property
    def levels(self) -> dict[Tier, dict[Cause, Level]]:
        """What comes and goes, over all points; see [Note: when bytes come and go]."""
        levels: dict[Tier, dict[Cause, Level]] = {
            tier: dict(levels) for tier, levels in mode_free_levels(self.tables).items()
        }
        if self.points.training:
            self._hold_frames(levels)
        if self.points.by_layer:
            self._hold_keys(levels)
        workspace = self._workspace()
        levels["device"][Cause.WORKSPACE] = passing(workspace)
        levels["device"][Cause.COPIES] = self._copies()
        kind = self.tables.device_kind
        moved = [v for c, v in levels["device"].items() if c in MOVED]
        share, context = FRAGMENTATION[kind], CONTEXT_BYTES[kind]
        levels["device"][Cause.RESERVE] = _derived(
            self.points, moved, lambda held: context + (share * held).astype(np.int64)
        )
        return levels

    def _hold_frames(self, levels: dict[Tier, dict[Cause, Level]]) -> None:
        points = self.points
        present = np.bincount(self.modes.ravel(), minlength=len(all_modes()))
        for index in np.flatnonzero(present).tolist():
            mode = all_modes()[index]
            here = self.modes == index
            size = np.where(here, self.activation_bytes, 0)
            cause = OF_SAVED[mode.saved]
            inputs = np.where(here & self._shares_inputs, self.tables.hidden_states[:, None], 0)
            if inputs.any():
                # Theirs are the hidden states between layers until the layer has run, which are
                # alive as a whole until the layer's backward ends.
                size -= inputs
                taken, given = (np.zeros_like(inputs) for _ in range(2))
                taken[-1] = given[0] = inputs.sum(axis=0)
                handed = points.lay(taken, 0, 0)
                handed = np.concatenate(([0], handed[:-1]))
                level = _running(0, handed, points.lay(0, 0, given))
                _add(levels[mode.tier], cause, level)
            _add(
                levels[mode.tier],
                cause,
                _waiting(self.tables, cause, mode.tier, size, 0, size),
            )

    @cached_property
    def _shares_inputs(self) -> NDArray[np.bool_]:
        """[chunks, layers] By layer: frames whose input is a part of that of all tokens.

        What autograd saves is, and what reduced frames keep if all of a layer do, on the device;
        see `sppo_hf.engine.cpu_heap`. Parts of several rows are made dense, which copies them.
        """
        tables, points = self.tables, self.points
        here = self.modes < len(SAVED)
        if not points.by_layer or tables.rows > 1:
            return np.zeros_like(here)
        reduced = self.modes % len(SAVED) > 0
        parts = points.num_chunks > 1 or tables.device_kind != "cpu"
        stay = (here & reduced).all(axis=0) & parts
        return here & (~reduced | stay)

    def _hold_keys(self, levels: dict[Tier, dict[Cause, Level]]) -> None:
        """Adds keys and values of a layer between its forward and its backward."""
        points, last = self.points, self.points.num_chunks - 1
        layers = range(points.num_layers)
        if not points.training:
            # Only keys that are to stay do, to the end.
            taken = np.zeros(points.count, dtype=np.int64)
            taken[[points.forward(last, layer) + 1 for layer in layers]] = self.kv_bytes("device")
            given = np.zeros_like(taken)
            given[-1] = taken.sum()
            return _add(levels["device"], Cause.KV, _running(0, taken, given))
        sizes = {tier: self.kv_bytes(tier) for tier in offload_tiers()}
        sizes["device"] = self.kept_keys.sum(axis=0)
        for tier in TIERS:
            if not sizes[tier].any():
                continue
            taken = np.zeros(points.count, dtype=np.int64)
            given = taken.copy()
            taken[[points.forward(last, layer) + 1 for layer in layers]] = sizes[tier]
            # On the device they are the running layer's from there on.
            ends = [points.backward(last, layer) - 1 for layer in layers]
            if tier != "device":
                ends = [points.backward(0, layer) for layer in layers]
            given[ends] = sizes[tier]
            _add(levels[tier], Cause.KV, _running(0, taken, given))

    def _workspace(self) -> Bytes:
        """[points] Temporaries; layers and head, or layers and embedding, take turns."""
        tables, points = self.tables, self.points
        forward = tables.of_layers(tables.workspace_forward)
        if not points.training:
            return points.lay(forward, 0, 0)
        again = np.where(self.modes % len(SAVED) > 0, tables.of_layers(tables.rebuilt), 0)
        backward = tables.of_layers(tables.workspace_backward) + again
        backward[:, 0] = np.maximum(backward[:, 0], tables.embedding_backward)
        return points.lay(forward, 0, backward)

    def _copies(self) -> Level:
        """[points] Device bytes on their way out or back, the running frame's among them."""
        tables, points, limit = self.tables, self.points, self.decisions.max_pending_d2h_bytes
        away = self.offloaded_bytes
        ahead = points.num_forward

        def still_leaving(left: Bytes) -> Bytes:
            """[...] What is still there of all that left before each point."""
            if limit is not None:
                return np.minimum(np.cumsum(left) - left, limit)
            # All but the newest copy has gone.
            newest = np.maximum.accumulate(np.where(left > 0, np.arange(len(left)), -1))
            newest = np.concatenate(([-1], newest[:-1]))
            return np.where(newest >= 0, left[newest], 0)

        own = points.lay(away, 0, away)
        leaving = tables.of_layers(tables.kv_out_forward)
        if self.kv_away_bytes.any():
            leaving = leaving.copy()
            leaving[-1] = self.kv_away_bytes
        out = own + points.lay(leaving, 0, tables.of_layers(tables.kv_out_backward))
        if tables.streams:
            out[ahead:] -= own[ahead:]
            during = own + still_leaving(out)
        else:
            during = own.copy()
            during[:ahead] += still_leaving(out[:ahead])
        after = during.copy()
        if points.training:
            used = np.cumsum(own[ahead:])
            # What waits to be used, the running frame's included.
            coming = self.asked_bytes - (used - own[ahead:])
            if tables.streams:
                during[ahead:] = np.maximum(during[ahead:], coming)
            else:
                # Frames that had not left when backward began need not come back.
                rest = np.full(len(used), still_leaving(np.append(out[:ahead], 0))[-1])
                asked = self.asked_bytes
                away_layers = np.flatnonzero(self.kv_away_bytes).tolist()
                if away_layers:
                    begins = [
                        points.backward(points.num_chunks - 1, i) - ahead for i in away_layers
                    ]
                    # Keys can only come back once they, and all before them, have left.
                    rest[begins[-1] :] = 0
                    # From there on they are the running layer's.
                    used_keys = np.zeros_like(used)
                    used_keys[begins] = self.kv_away_bytes[away_layers]
                    asked = asked - np.cumsum(used_keys)
                during[ahead:] = np.maximum(rest, asked) - (used - own[ahead:])
            after[ahead:] = during[ahead:] - own[ahead:]
        after[-1] = 0
        return Level(0, during, after)

    def changes(self, at: int) -> Iterator[Change]:
        """Yields the bytes that the computation at a point takes and gives back."""
        for tier, cause, begins, ends in self._steps:
            if begins[at]:
                yield Change(tier, cause, begins[at])
            if ends[at]:
                yield Change(tier, cause, ends[at], "end")

    @cached_property
    def _steps(self) -> list[tuple[Tier, Cause, list[int], list[int]]]:
        """By tier and cause: what each point takes when it begins and when it ends."""
        return [
            (tier, cause, begins.tolist(), (level.after - level.during).tolist())
            for tier, levels in self.levels.items()
            for cause, level in levels.items()
            for begins in [level.during - np.concatenate(([level.before], level.after[:-1]))]
        ]

    # -- actions -------------------------------------------------------------------------------

    @cached_property
    def resources(self) -> ActionQueues:
        """The actions of each resource, with seconds and with what they wait for."""
        assert self._cost is not None, "seconds are asked of a program with costs"
        return _Laying(self, self._cost).lay()

    def simulate(self, *, with_bytes: bool = False) -> Timeline:
        """Runs all resources; with the bytes of every tier over time where asked for."""
        resources = self.resources
        if not with_bytes:
            return resources.simulate()
        at = {action: at for at, action in enumerate(resources.actions[COMPUTE])}
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
        return resources.simulate(
            changes=lambda action: self.changes(at[action]) if action in at else (),
            standing=standing,
        )


# -- levels ------------------------------------------------------------------------------------


def passing(sizes: Bytes) -> Level:
    """Returns what is there only while a point runs."""
    return Level(0, sizes, np.zeros_like(sizes))


class _Tape(NamedTuple):
    """Frames, and by layer the keys that leave, in the order in which backward enters them."""

    sizes: Bytes
    """Bytes that come back; 0 where nothing left."""

    enters: NDArray[np.bool_]
    """Which ask for those behind them."""

    places: Bytes
    """The point of backward at which each is entered, counted from the first."""

    keys: NDArray[np.bool_]
    """Which are keys and values of a layer."""


def _kv_lifetimes(tables: ByteTables) -> Iterator[tuple[Cause, tuple[Bytes, Bytes, Bytes]]]:
    """Yields, of keys and values and of their gradient sums, when they come and go where K/V wait.

    [kinds, chunks] each: what a forward takes, what a backward takes, what a backward gives back.
    """
    yield Cause.KV, (tables.kv, np.zeros_like(tables.kv), tables.kv * tables.training)
    if tables.training:
        # The first backward writes the sums of all chunks before it.
        written = np.zeros_like(tables.dkv)
        written[:, -1] = tables.dkv.sum(axis=1)
        yield Cause.DKV, (np.zeros_like(tables.dkv), written, tables.dkv)


def _waiting(
    tables: ByteTables,
    cause: Cause,
    tier: Tier,
    forward: Bytes,
    backward: Bytes | int,
    given: Bytes,
    *,
    given_forward: Bytes | int = 0,
) -> Level:
    """Returns the level of a lifetime on a tier, [chunks, layers] each."""
    points = tables.points
    slabs = tier == "device" and tables.device_kind == "cpu" and points.num_chunks > 1
    if slabs and cause in _IN_SLABS:
        # A slab holds what all layers of a chunk, or all chunks of a layer, keep.
        last = np.zeros_like(given)
        if points.by_layer:
            last[0] = given.sum(axis=0)
        else:
            last[:, 0] = given.sum(axis=1)
        given = last
    taken = points.lay(forward, 0, backward)
    if tier != "device":
        # Copies out are enqueued behind what makes their bytes.
        taken = np.concatenate(([0], taken[:-1]))
    return _running(0, taken, points.lay(given_forward, 0, given))


@lru_cache(maxsize=64)
def mode_free_levels(tables: ByteTables) -> dict[Tier, dict[Cause, Level]]:
    """Returns what comes and goes whatever the modes are, by tier and cause."""
    points, tier = tables.points, tables.kv_tier
    levels: dict[Tier, dict[Cause, Level]] = {tier: {} for tier in TIERS}
    device = levels["device"]
    for cause, sizes in _kv_lifetimes(tables):
        forward, backward, given = map(tables.of_layers, sizes)
        ended: Bytes | int = 0
        if points.by_layer and cause is Cause.KV:
            # While the layer runs; `_hold_keys` adds where they are from forward to backward.
            ended = np.zeros_like(forward)
            ended[-1] = forward.sum(axis=0)
            backward = ended * points.training
        levels[tier][cause] = _waiting(
            tables, cause, tier, forward, backward, given, given_forward=ended
        )
    if tables.streams:
        forward, backward, sums = (table[:, None] for table in tables.kv_passing)
        device[Cause.KV] = passing(points.lay(forward, forward[:, 0], backward))
        device[Cause.DKV] = passing(points.lay(0, 0, sums))
    nothing = np.zeros((points.num_chunks, points.num_layers), dtype=np.int64)
    before, added = tables.gradients
    shares = nothing.copy()
    shares[-1] = np.diff(added * np.arange(points.num_layers + 1) // points.num_layers)
    ended = np.zeros(points.count, dtype=np.int64)
    ended[-1] = added * points.training
    if points.by_layer and tables.accumulates:
        # A layer's sums are complete when its backward ends, and are added to what is there.
        ended = points.lay(0, 0, shares[::-1])
    # The step ends; what the optimizer takes is not its affair.
    device[Cause.GRADIENTS] = _running(before, points.lay(0, 0, shares), ended)
    if points.by_layer:
        device[Cause.HIDDEN] = _between_layers(tables)
    elif points.training:
        waiting, embedded, embedded_back = tables.hidden
        given = nothing.copy()
        given[:, 0] = waiting
        taken = points.lay(0, waiting, 0)
        taken[0] += embedded
        taken[points.num_forward] += embedded_back - embedded
        given = points.lay(0, 0, given)
        given[-1] += embedded_back
        device[Cause.HIDDEN] = _running(0, taken, given)
    graph = tables.of_layers(tables.graph)
    if graph.any():
        device[Cause.GRAPH] = _running(0, points.lay(graph, 0, 0), points.lay(0, 0, graph))
    # Casts of trained weights, which autocast keeps until forward ends.
    casts = np.zeros(points.count, dtype=np.int64)
    casts[: points.num_forward] = tables.shape.cached_cast_bytes
    device[Cause.WEIGHTS] = Level(0, casts, np.append(casts[1:], 0))
    kept = tables.kept_logits
    logits = kept + points.lay(0, tables.logits, 0)
    device[Cause.LOGITS_TILE] = Level(kept, logits, np.full_like(logits, kept))
    return levels


def _between_layers(tables: ByteTables) -> Level:
    """Returns the level of hidden states of all tokens: a layer's input and output, and gradients.

    Behind the last layer, what the final norm was given and what it returned; what the loss leaves
    there are gradients, chunk by chunk. Inputs of layers beside hidden states are there for all
    layers at once, and so are their gradients.
    """
    points, sizes = tables.points, tables.hidden_states
    beside = tables.per_layer_inputs
    two = 2 * int(sizes.sum()) + beside
    during = points.lay(two, two + np.cumsum(sizes) * points.training, two + beside)
    return Level(0, during, np.append(np.minimum(during[:-1], during[1:]), 0))


def _add(levels: dict[Cause, Level], cause: Cause, level: Level) -> None:
    """Adds a level to what there is of its cause."""
    there = levels.get(cause)
    if there is not None:
        before, during, after = level
        level = Level(there.before + before, there.during + during, there.after + after)
    levels[cause] = level


def _running(before: int, taken: Bytes, given: Bytes) -> Level:
    """Returns the level of what each point takes when it begins and gives back when it ends."""
    after = before + np.cumsum(taken - given)
    return Level(before, after + given, after)


def _derived(points: Points, levels: Iterable[Level], of: Callable[[Any], Any]) -> Level:
    """Returns a level that follows from the sum of others."""
    before = 0
    during = np.zeros(points.count, dtype=np.int64)
    after = during.copy()
    for level in levels:
        before += level.before
        during += level.during
        after += level.after
    return Level(int(of(np.int64(before))), of(during), of(after))


# -- resources -------------------------------------------------------------------------------------


@dataclass(slots=True)
class ActionQueues:
    """Actions by resource, with what each takes and what it waits for."""

    actions: dict[str, list[Action]]
    """By resource, in its order."""

    seconds: list[float]
    """How long each takes: resource after resource."""

    needs: list[list[int]]
    """What each waits for, as places in the same order."""

    listed: list[Action]
    """All actions as they are enqueued: the program's one order."""

    def simulate(
        self,
        changes: Callable[[Action], Iterable[Change]] | None = None,
        standing: Iterable[Change] = (),
    ) -> Timeline:
        """Runs all resources; see `simulate_positions`."""
        return simulate_positions(
            self.actions,
            seconds=self.seconds,
            needs=self.needs,
            changes=changes,
            standing=standing,
        )


@dataclass(slots=True)
class _Queue:
    """Bytes that are somewhere until an action ends, oldest first, and who must wait for that."""

    limit_bytes: int | None
    """None: what was added last only."""
    queue: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    first: int = 0
    """Index of the oldest entry that nobody waited for."""
    num_bytes: int = 0
    """Of the entries that nobody waited for."""

    def add(self, action: int, num_bytes: int) -> None:
        self.queue.append((action, num_bytes))
        self.num_bytes += num_bytes

    def settle(self, room_bytes: int = 0) -> list[int]:
        """What must have ended so that `room_bytes` more are within the limit; oldest first."""
        ended: list[int] = []
        while self.first < len(self.queue) and self._too_much(room_bytes):
            action, num_bytes = self.queue[self.first]
            self.num_bytes -= num_bytes
            self.first += 1
            ended.append(action)
        return ended

    def _too_much(self, room_bytes: int) -> bool:
        if self.limit_bytes is None:
            return len(self.queue) - self.first > 1
        return self.num_bytes + room_bytes > self.limit_bytes


class _Laying:
    """The actions of a program being laid on resources; see [Note: the order of copies].

    Until all are there an action is known by a number: its index on its resource times the number
    of resources, plus the resource. Behind the copies' resources stand each tier's own, for writes
    and reads.
    """

    def __init__(self, program: StepProgram, cost: ModelCost) -> None:
        what, tables = program.decisions, program.tables
        self._program = program
        self._what = what
        self._cost = cost
        self._streams = tables.streams
        self._both = tables.both_ways
        """Whether copies run both ways at once, in forward and in backward."""
        self._resting = tables.shape.host_resident
        behind = [TIERS[tier] for tier in tiers_behind_host()]
        self._resources = [COMPUTE, D2H, H2D, HOST_COMPUTE]
        self._resources += [
            resource for tier in behind for resource in (tier.store_resource, tier.load_resource)
        ]
        self._writes = {tier.name: _BEHIND + 2 * at for at, tier in enumerate(behind)}
        """Resource of the writes of each tier behind the host; that of its reads is the next."""
        self._actions: list[list[Action]] = [[] for _ in self._resources]
        self._seconds: list[list[float]] = [[] for _ in self._resources]
        self._needs: list[list[list[int]]] = [[] for _ in self._resources]
        self._listed: list[Action] = []
        self._sizes = program.offloaded_bytes.tolist()
        self._tiers = np.array(list(TIERS), dtype=object)[program.tiers].tolist()
        self._streamed = [
            [tables.of_layers(table).tolist() for table in tables_of_phase]
            for tables_of_phase in (
                (tables.kv_in_forward, tables.kv_out_forward),
                (tables.kv_in_backward, tables.kv_out_backward),
            )
        ]
        come_back = np.array(self._streamed[1][0]) + program.streamed_again
        self._streamed[1][0] = come_back.tolist()
        # Copies of one resource end in order, so compute waits for the last of those that must end.
        self._leaving = _Queue(what.max_pending_d2h_bytes)
        self._waits: list[int] = []
        """What the next unit waits for, beside its own frame."""
        self._staged = _Queue(what.staging_bytes)
        """Host bytes of frames on their way to a tier behind the host or back."""
        # K/V pass chunk by chunk, in bytes far below a layer's; a layer's writes lag by one layer.
        self._kv_staged = _Queue(None)
        self._away: dict[tuple[int, int], int] = {}
        """After which action a frame can come back."""
        self._kv_away: dict[int, int] = {}
        """The same of a layer's newest keys, values and gradient sums."""
        self._kv_sizes = program.kv_away_bytes.tolist()
        self._weights: dict[int, int] = {}
        """After which copy a layer's weights are there; "layer" `num_layers` is what is outside."""
        gradients = () if self._resting is None else self._resting.layer_gradient_bytes
        self._gradients = _Queue(max(gradients, default=0))
        """Gradients on their way to the host."""
        self._turn: list[int] = []
        """The last action of forward: nothing is read ahead before it has ended."""

    def lay(self) -> ActionQueues:
        seconds = self._program.seconds.tolist()
        points = self._program.points
        self._forward(seconds)
        if points.training:
            self._turn = self._last_computed(1)
            self._backward(seconds[points.num_forward :])
        offsets = [0, *accumulate(map(len, self._actions))]
        resources = len(self._resources)
        return ActionQueues(
            actions=dict(zip(self._resources, self._actions, strict=True)),
            seconds=[taken for resource in self._seconds for taken in resource],
            needs=[
                [offsets[number % resources] + number // resources for number in needed]
                for resource in self._needs
                for needed in resource
            ],
            listed=self._listed,
        )

    def _forward(self, seconds: list[float]) -> None:
        what, points = self._what, self._program.points
        for at in range(points.num_forward):
            chunk, layer = points.unit(at)
            if layer == what.num_layers:
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
                self._away[chunk, layer] = self._send(copy, size, unit, tier)
            self._stream_out(chunk, layer, 0, unit)
            if chunk == what.num_chunks - 1 and self._kv_sizes[layer]:
                copy = Action("O", 0, chunk, layer, 0)
                sent = self._send(copy, self._kv_sizes[layer], unit, what.kv_mode(layer))
                self._kv_away[layer] = sent
            self._waits += [*self._leaving.settle()[-1:], *coming]

    def _backward(self, seconds: list[float]) -> None:
        what, points = self._what, self._program.points
        asked_at = self._program.asked_at
        last = what.num_chunks - 1
        inputs = self._program.again_inputs.tolist()
        for place, taken in enumerate(seconds):
            chunk, layer = points.unit(points.num_forward + place)
            if chunk == last:
                self._weights_for_backward(layer)
            for copy in asked_at.get(place, ()):
                self._fetch(copy)
            coming = self._stream_in(chunk, layer, 1)
            if self._sizes[chunk][layer]:
                self._waits.append(self._away[chunk, layer])
            if chunk == last and self._kv_sizes[layer]:
                self._waits.append(self._kv_away[layer])
            if chunk == last and inputs[layer]:
                self._waits.append(self._fetch_inputs(layer, inputs[layer]))
            unit = self._compute(Action("B", 0, chunk, layer), taken)
            self._stream_out(chunk, layer, 1, unit)
            if self._streams:
                self._waits += [*self._leaving.settle()[-1:], *coming]
            if chunk == 0:
                self._send_gradients(layer, unit)
        self._update()

    def _weights_for_forward(self, layer: int) -> None:
        """A layer is entered: its weights are there, and the next layer's are asked for."""
        resting = self._resting
        if resting is None:
            return
        if layer == 0:
            self._bring_weights(self._what.num_layers, resting.outer_bytes, 0)
        for coming in range(layer, min(layer + 2, self._what.num_layers)):
            if coming not in self._weights:
                self._bring_weights(coming, resting.layer_bytes[coming], 0)
        outer = [] if layer else [self._weights.get(self._what.num_layers)]
        self._waits += [at for at in (*outer, self._weights.get(layer)) if at is not None]

    def _weights_for_backward(self, layer: int) -> None:
        """The same in backward, where the last two layers' are there, or all of them."""
        resting, below = self._resting, layer - 1
        if resting is None or resting.stays:
            return
        if 0 <= below < self._what.num_layers - LAYERS_THERE:
            self._bring_weights(below, resting.layer_bytes[below], 1)
        if layer in self._weights:
            self._waits.append(self._weights[layer])

    def _bring_weights(self, layer: int, num_bytes: int, part: int) -> None:
        if num_bytes:
            seconds = self._cost.h2d_seconds(num_bytes, both=self._both[part])
            copy = Action("P", 0, 0, layer, part)
            self._weights[layer] = self._add(_H2D, copy, seconds, self._last_computed(1))

    def _send_gradients(self, layer: int, unit: int) -> None:
        """A layer's backward has ended; behind the first layer's, that of what is outside."""
        if self._resting is None:
            return
        sizes = [(layer, self._resting.layer_gradient_bytes[layer])]
        if layer == 0:
            sizes.append((self._what.num_layers, self._resting.outer_gradient_bytes))
        for of_layer, num_bytes in sizes:
            if num_bytes:
                seconds = self._cost.d2h_seconds(num_bytes, both=self._both[1])
                sent = self._add(_D2H, Action("G", 0, 0, of_layer), seconds, [unit])
                self._gradients.add(sent, num_bytes)
        self._waits += self._gradients.settle()[-1:]

    def _update(self) -> None:
        """What rests on the host is updated there once all gradients have come."""
        if self._resting is not None and self._resting.gradient_bytes:
            # The last copy out is that of the last gradients.
            last = len(self._actions[_D2H]) - 1
            needs = [*self._last_computed(1), last * len(self._resources) + _D2H]
            self._add(_HOST, Action("U", 0, 0), self._cost.update_seconds, needs)

    def _compute(self, action: Action, seconds: float) -> int:
        waits, self._waits = self._waits, []
        return self._add(_COMPUTE, action, seconds, waits)

    def _send(self, copy: Action, num_bytes: int, unit: int, tier: Tier) -> int:
        """Copies bytes to the host and on to their tier; returns what ends when they are away."""
        staged = self._staged if copy.kind == "D" else self._kv_staged
        resource = self._writes.get(tier)
        room = [] if resource is None else staged.settle(num_bytes)
        # What streams out in backward is streamed in forward too.
        seconds = self._cost.d2h_seconds(num_bytes, both=self._both[0])
        sent = self._add(_D2H, copy, seconds, [unit, *room])
        self._leaving.add(sent, num_bytes)
        if resource is None:
            return sent
        write = copy._replace(kind="S", part=None if copy.kind == "D" else (copy.part or 0) + 1)
        written = self._add(resource, write, self._cost.store_seconds(tier, num_bytes), [sent])
        staged.add(written, num_bytes)
        return written

    def _fetch(self, copy: Action) -> None:
        """Brings a frame back, or by layer a layer's keys and values ("K")."""
        chunk, layer = copy.unit, copy.layer
        assert layer is not None, "what comes back is of one layer"
        keys = copy.kind == "K"
        num_bytes = self._kv_sizes[layer] if keys else self._sizes[chunk][layer]
        away = self._kv_away[layer] if keys else self._away[chunk, layer]
        tier = self._what.kv_mode(layer) if keys else self._tiers[chunk][layer]
        resource = self._writes.get(tier)
        after = [*self._last_computed(1), away]
        staged = self._kv_staged if keys else self._staged
        if resource is not None:
            # Reads run ahead of their copies, as far as staging holds.
            waits = [*self._turn, away, *staged.settle(num_bytes)]
            read = Action("L", 0, chunk, layer, 1 if keys else None)
            after.append(self._load(resource, read, tier, num_bytes, waits))
        seconds = self._cost.h2d_seconds(num_bytes, both=self._both[1])
        back = self._add(_H2D, copy, seconds, after)
        if keys:
            self._kv_away[layer] = back
        else:
            self._away[chunk, layer] = back
        if resource is not None:
            staged.add(back, num_bytes)

    def _fetch_inputs(self, layer: int, num_bytes: int) -> int:
        """Brings a layer's inputs in chunk by chunk, to make its keys and values from."""
        chunks = range(self._what.num_chunks - 1)
        after = [*self._last_computed(1)]
        after += [self._away[chunk, layer] for chunk in chunks if (chunk, layer) in self._away]
        copy = Action("K", 0, self._what.num_chunks - 1, layer, 0)
        # What they are read from, where several tiers have some, is taken to be the farthest.
        tiers = {self._tiers[chunk][layer] for chunk in chunks if self._sizes[chunk][layer]}
        for tier in reversed(self._writes):
            if tier in tiers:
                load = copy._replace(kind="L", part=1)
                after.append(self._load(self._writes[tier], load, tier, num_bytes, after[:]))
                break
        return self._add(_H2D, copy, self._cost.h2d_seconds(num_bytes, both=self._both[1]), after)

    def _stream_in(self, chunk: int, layer: int, part: int) -> list[int]:
        """Brings a layer's prefix in beside its attention; returns what the next unit waits for.

        A unit cannot end before its last block has come, which is said here as: the next unit
        cannot begin. Blocks of a unit come while the one before it still computes.
        """
        num_bytes = self._streamed[part][0][chunk][layer]
        if not num_bytes:
            return []
        after = self._last_computed(2)[:-1]
        if layer in self._kv_away:
            after.append(self._kv_away[layer])
        resource = self._writes.get(self._what.kv_tier)
        if resource is not None:
            read = Action("L", 0, chunk, layer, part + 1)
            after = [*after, self._load(resource, read, self._what.kv_tier, num_bytes, after)]
        seconds = self._cost.h2d_seconds(num_bytes, both=True)
        return [self._add(_H2D, Action("K", 0, chunk, layer, part), seconds, after)]

    def _stream_out(self, chunk: int, layer: int, part: int, unit: int) -> None:
        """Sends a chunk's new K/V away (forward), or the prefix's gradient sums (backward)."""
        num_bytes = self._streamed[part][1][chunk][layer]
        if num_bytes:
            copy = Action("O", 0, chunk, layer, part)
            # Both resources are in order, so the newest stands for all before it.
            self._kv_away[layer] = self._send(copy, num_bytes, unit, self._what.kv_tier)

    def _last_computed(self, count: int) -> list[int]:
        """The last so many computations, oldest first; fewer where there are not so many."""
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


_COMPUTE, _D2H, _H2D, _HOST, _BEHIND = range(5)
