"""The linear program behind "auto": how many units of each slot get which activation mode.

Time is divided into slots: forward and backward of each chunk or, by layer, of each layer. A slot
lasts as long as its compute (recomputation included) and at least as long as the copies that must
be made during it; the sum is minimised. Bytes are conserved: activations are offloaded after they
were computed and prefetched before their use, and no more than the look-ahead waits on the device.
All of it is linear in the numbers of units, so the optimum over fractional numbers is found exactly
(HiGHS). It is a lower bound for every plan with these modes and this look-ahead. `solve` rounds the
numbers to whole units.

By chunk, a slot's units are its layers, in groups of layers that cost the same. By layer, they are
its chunks, which are treated as equal, since their bytes and their recomputation depend on their
tokens alone. Only where attention may be recomputed, which takes longer the more keys a chunk
attends to, are chunks divided into groups (`chunk_groups`). The layer's K/V are one more group,
with modes of their own.

This module knows nothing of where budgets come from, of rounding or of simulation.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sppo_hf.planning.activation_modes import SAVED, ActivationMode
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions, KVMode
from sppo_hf.planning.lowering import RESIDENT_LAYERS, fixed_levels, min_device_bytes
from sppo_hf.planning.memory import FRAGMENTATION, Budgets, Bytes, byte_tables
from sppo_hf.planning.tiers import Tier, offload_tiers, tiers_behind_host

if TYPE_CHECKING:
    from highspy import Highs


@dataclass(frozen=True, slots=True)
class Mix:
    """The optimum over fractional numbers of units."""

    counts: NDArray[np.float64]
    """Layers with each mode, [chunk, kind, mode]; by layer, chunks with each mode, [layer, group,
    mode], see `chunk_groups`."""

    seconds: float
    """Seconds of the step; no plan with these modes and this look-ahead is faster."""

    kv_shares: NDArray[np.float64] | None = None
    """Share of each layer's K/V with each K/V mode, [layer, K/V mode]; None by chunk."""


def chunk_groups(num_chunks: int, modes: Sequence[ActivationMode]) -> tuple[tuple[int, ...], ...]:
    """Returns groups of chunks that are treated as equal by layer: all in one, or eight groups.

    There are eight groups where attention may be recomputed: in the first of them that takes a
    fifteenth of its time in the last.
    """
    parts = min(num_chunks, 8) if any(mode.saved == "hidden" for mode in modes) else 1
    ends = (num_chunks * part // parts for part in range(parts + 1))
    return tuple(tuple(range(start, end)) for start, end in pairwise(ends))


class Terms(NamedTuple):
    """Left-hand sides of rows: columns and their factors, [rows, terms] each.

    No column is twice in a row; unused terms have a factor of 0.
    """

    columns: NDArray[np.int64]
    factors: NDArray[np.float64]

    def __neg__(self) -> Terms:
        """Returns the terms with the opposite sign."""
        return Terms(self.columns, -self.factors)

    def times(self, factor: float) -> Terms:
        """Returns the terms multiplied by `factor`."""
        return Terms(self.columns, factor * self.factors)

    def before(self) -> Terms:
        """Returns the terms moved down by one row; the first row is empty."""
        columns, factors = self.columns.copy(), np.zeros(self.factors.shape)
        columns[1:], factors[1:] = self.columns[:-1], self.factors[:-1]
        return Terms(columns, factors)


def joined(*terms: Terms) -> Terms:
    """Returns the row-wise sum: each row has the terms of that row of every argument, in order."""
    return Terms(
        np.concatenate([one.columns for one in terms], axis=1),
        np.concatenate([one.factors for one in terms], axis=1),
    )


class Rows:
    """Constraints on `row . x`, collected sparsely."""

    def __init__(self) -> None:
        self._columns: list[NDArray[np.int64]] = []
        self._factors: list[NDArray[np.float64]] = []
        self._counts: list[NDArray[np.int64]] = []
        self._bounds: list[NDArray[np.float64]] = []

    def add(self, *rows: tuple[Terms, ArrayLike], exists: NDArray[np.bool_] | None = None) -> None:
        """Adds one or several rows per slot with their bounds, ordered by slot.

        Args:
            rows: terms and bounds, [slots] each, of the first row of every slot, then of the
                second, and so on.
            exists: which of these rows exist, [slots, rows]; None for all.
        """
        slots, widest = len(rows[0][0].columns), max(terms.columns.shape[1] for terms, _ in rows)
        columns = np.zeros((slots, len(rows), widest), dtype=np.int64)
        factors = np.zeros((slots, len(rows), widest))
        bounds = np.empty((slots, len(rows)))
        for at, (terms, bound) in enumerate(rows):
            width = terms.columns.shape[1]
            columns[:, at, :width], factors[:, at, :width] = terms
            bounds[:, at] = bound
        if exists is not None:
            columns, factors, bounds = columns[exists], factors[exists], bounds[exists]
        used = factors != 0.0
        self._columns.append(columns[used])
        self._factors.append(factors[used])
        self._counts.append(used.sum(axis=-1).ravel())
        self._bounds.append(bounds.ravel())

    @property
    def bounds(self) -> NDArray[np.float64]:
        """Bounds of all rows, [rows]."""
        return np.concatenate([np.empty(0), *self._bounds])

    @staticmethod
    def matrix(*all_rows: Rows) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float64]]:
        """Returns the rows below each other in CSR form: row starts, columns and factors."""
        nothing = np.empty(0, dtype=np.int64)
        counts = np.concatenate([nothing, *(part for rows in all_rows for part in rows._counts)])
        columns = np.concatenate([nothing, *(part for rows in all_rows for part in rows._columns)])
        factors = [np.empty(0), *(part for rows in all_rows for part in rows._factors)]
        starts = np.concatenate(([0], np.cumsum(counts)))
        return starts.astype(np.int32), columns.astype(np.int32), np.concatenate(factors)


def minimise(objective: NDArray[np.float64], less: Rows, equal: Rows) -> NDArray[np.float64] | None:
    """Returns the x >= 0 that minimises `objective . x`, or None if no x meets the constraints.

    Args:
        objective: cost of each column, [width].
        less: rows that must be at most their bound.
        equal: rows that must equal their bound.
    """
    # Imported here: plans made by a rule, or on a CPU without a budget, solve no program.
    from highspy import HighsModelStatus, MatrixFormat, ObjSense, kHighsInf

    starts, columns, factors = Rows.matrix(less, equal)
    most, exactly = less.bounds, equal.bounds
    width, height = len(objective), len(most) + len(exactly)
    solver = _silent_solver()
    solver.passModel(
        *(width, height, len(factors), int(MatrixFormat.kRowwise), int(ObjSense.kMinimize), 0.0),
        *(objective, np.zeros(width), np.full(width, kHighsInf)),
        np.concatenate([np.full(len(most), -kHighsInf), exactly]),
        np.concatenate([most, exactly]),
        *(starts, columns, factors, np.zeros(width, dtype=np.int32)),
    )
    solver.run()
    if solver.getModelStatus() != HighsModelStatus.kOptimal:
        return None
    return np.array(solver.getSolution().col_value)


def _silent_solver() -> Highs:
    solver = _silent_class()()
    solver.silent()  # for versions whose constructor does not
    return solver


@cache
def _silent_class() -> type[Highs]:
    from highspy import Highs

    class Silent(Highs):
        def enableCallbacks(self) -> None:
            # The constructor calls this method, and version 1.16 prints a banner in it unless
            # output was switched off before.
            self.silent()
            super().enableCallbacks()

    return Silent


class _Group(NamedTuple):
    """Units of equal cost (or a layer's K/V), of which every slot has the same number.

    Each of them gets one of several modes, called ways here.
    """

    number: int
    """Number of units in a slot."""

    tiers: list[Tier]
    """Tier on which each way holds a unit, [ways]."""

    sizes: NDArray[np.float64]
    """GiB that one unit holds there, [ways, slots]."""

    seconds: NDArray[np.float64]
    """Seconds of recomputation in backward for one unit, [ways, slots]."""


class LinearProgram:
    """The program of one batch shape, for given modes and look-ahead."""

    def __init__(
        self,
        decisions: Decisions,
        cost: ModelCost,
        budgets: Budgets,
        modes: Sequence[ActivationMode],
        *,
        kv_modes: Sequence[KVMode] = (),
        host_price: float = 0.0,
        most_seconds: float = float("inf"),
    ) -> None:
        """Prepare the program for units with `modes` and, by layer, K/V with `kv_modes`.

        Those of `decisions` are ignored. `host_price` are the seconds that a GiB of host memory
        must save to be used, and `most_seconds` limits the step.
        """
        self._decisions = decisions
        self._cost = cost
        self._budgets = budgets
        self._modes = modes
        self._host_price = host_price
        self._most_seconds = most_seconds
        self._tables = byte_tables(cost.shape, decisions, cost.profile.kind)
        self._work = cost.unit_seconds(decisions.bounds, decisions.layer_tile_tokens)
        if decisions.by_layer:
            self._groups = [*self._groups_by_layer(), self._kv_group(kv_modes)]
        else:
            self._groups = self._groups_by_chunk()
        last = len(self._groups) - 1
        self._kv_groups = range(last, last + 1) if decisions.by_layer else range(0)
        """Indices of the groups that are K/V; empty by chunk."""
        self._slots = decisions.num_layers if decisions.by_layer else decisions.num_chunks
        groups = self._groups
        self._tiers = [tier for group in groups for tier in group.tiers]
        """Tier of each way of all groups, group by group, [ways]."""
        self._group_of = np.repeat(np.arange(len(groups)), [len(group.tiers) for group in groups])
        self._sizes = np.concatenate([group.sizes for group in groups]).T
        """GiB that one unit holds, [slots, ways]."""
        self._rerun_seconds = np.concatenate([group.seconds for group in groups]).T
        """Seconds of recomputation for one unit, [slots, ways]."""
        self._ways = len(self._tiers)
        self._x = self._slots * self._ways
        self._at = np.arange(self._x).reshape(self._slots, self._ways)
        """Columns that hold the counts, [slots, ways]."""
        # After the counts: one column per slot and purpose.
        self._offload_tiers = offload_tiers()
        self._behind = tiers_behind_host()
        written, stored, read = (
            [f"{what} {tier}" for tier in self._behind] for what in ("written", "stored", "read")
        )
        names = (
            *("forward", "backward", "kept", *self._offload_tiers),
            *("out", *written, "sums", *stored, "coming", "back", *read),
        )
        self._column = {name: self._x + i * self._slots for i, name in enumerate(names)}
        self._width = self._x + len(names) * self._slots
        self._compute_seconds = 0.0
        self._less = Rows()
        self._equal = Rows()

    def _groups_by_chunk(self) -> list[_Group]:
        """Returns one group for each kind of layer."""
        saved = [SAVED.index(mode.saved) for mode in self._modes]
        tiers: list[Tier] = [mode.tier for mode in self._modes]
        sizes, seconds = self._tables.saved / _GIB, self._work.recompute
        return [
            _Group(len(members), tiers, sizes[kind, saved], seconds[kind, saved])
            for kind, members in enumerate(self._tables.members)
        ]

    def _groups_by_layer(self) -> list[_Group]:
        """Returns groups of chunks, each with the mean length of its chunks.

        Recomputed attention is counted with the seconds of the chunk of a group whose queries
        attend to the fewest keys.
        """
        tables, work, groups = self._tables, self._work.recompute, list[_Group]()
        saved = [SAVED.index(mode.saved) for mode in self._modes]
        tiers: list[Tier] = [mode.tier for mode in self._modes]
        hidden, inputs = SAVED.index("hidden"), SAVED.index("inputs")
        per_token = (work[:, hidden] - work[:, inputs]) / tables.lengths
        for chunks in map(list, chunk_groups(self._decisions.num_chunks, self._modes)):
            sizes, seconds = (
                table[:, :, chunks].mean(axis=2) for table in (tables.saved / _GIB, work)
            )
            attention_seconds = per_token[:, chunks].min(axis=1) * tables.lengths[chunks].mean()
            seconds[:, hidden] = seconds[:, inputs] + attention_seconds
            sizes, seconds = (table[tables.kind_of].T[saved] for table in (sizes, seconds))
            groups.append(_Group(len(chunks), tiers, sizes, seconds))
        return groups

    def _kv_group(self, kv_modes: Sequence[KVMode]) -> _Group:
        layers = self._decisions.num_layers
        sizes, seconds = np.zeros((2, len(kv_modes), layers))
        tiers: list[Tier] = []
        for way, mode in enumerate(kv_modes):
            if mode == "recompute":
                seconds[way] = self._work.kv_recompute.sum(axis=1)[self._tables.kind_of]
                tiers.append("device")
            else:
                sizes[way] = self._tables.layer_kv / _GIB
                tiers.append(mode)
        return _Group(1, tiers, sizes, seconds)

    def solve(self) -> Mix | None:
        """Returns the optimum, or None if nothing fits the budgets."""
        ones = np.ones((self._slots, self._ways))
        for_each = [(self._group_of == at, group) for at, group in enumerate(self._groups)]
        # Every unit has one way.
        self._equal.add(*((Terms(self._at[:, of], ones[:, of]), g.number) for of, g in for_each))
        self._limit_device()
        self._limit_tiers()
        self._bound_compute()
        self._bound_stores()
        self._bound_loads()
        objective = np.zeros(self._width)
        slots = self._slots
        objective[self._step_columns] = 1.0
        # Of equally fast plans the one that moves fewer bytes is preferred; the weight is so small
        # that it never costs noticeable time.
        moved = np.where([tier in self._offload_tiers for tier in self._tiers], self._sizes, 0.0)
        most = 0.0
        for at, group in enumerate(self._groups):
            of_group = moved[:, self._group_of == at]
            most += float(of_group.max(axis=1, initial=0.0).sum()) * group.number
        if most > 0.0:
            objective[: self._x] = _MOVING_SHARE * self._compute_seconds / most * moved.ravel()
        # Where forward ends, the host holds the most.
        objective[self._column["host"] + slots - 1] = self._host_price
        values = minimise(objective, self._less, self._equal)
        if values is None:
            return None
        seconds = float(values[self._step_columns].sum())
        counts = values[: self._x].reshape(slots, self._ways)
        num_unit_ways = self._ways - sum(len(self._groups[at].tiers) for at in self._kv_groups)
        if self._decisions.training:
            seconds += self._cost.update_seconds
        return Mix(
            counts[:, :num_unit_ways].reshape(slots, -1, len(self._modes)),
            seconds,
            counts[:, num_unit_ways:] if self._decisions.by_layer else None,
        )

    @property
    def _step_columns(self) -> slice:
        """Columns of the seconds of every slot's forward and backward."""
        first = self._column["forward"]
        return slice(first, first + 2 * self._slots)

    # -- terms: a row for each slot ------------------------------------------------------------

    def _terms(self, tiers: Container[str], groups: Container[int] | None = None) -> Terms:
        """Returns the sum of activations and K/V held on some tiers, one row per slot, in GiB.

        GiB instead of bytes keep the numbers in a range that suits the solver. `groups` are indices
        of the groups that count; None for all.
        """
        chosen = [
            way
            for way, tier in enumerate(self._tiers)
            if tier in tiers and (groups is None or int(self._group_of[way]) in groups)
        ]
        return Terms(self._at[:, chosen], self._sizes[:, chosen])

    def _kv_on(self, tiers: Container[str]) -> Terms:
        """Returns the same sum for K/V alone; empty by chunk."""
        return self._terms(tiers, self._kv_groups)

    def _col(self, name: str, factor: float = 1.0) -> Terms:
        first = self._column[name]
        columns = np.arange(first, first + self._slots)[:, None]
        return Terms(columns, np.full((self._slots, 1), factor))

    def _last(self, name: str) -> Terms:
        """Returns column `name` of the last slot."""
        columns, factors = self._col(name)
        return Terms(np.broadcast_to(columns[-1:], columns.shape), factors)

    def _from_the_end(self, tiers: Sequence[str]) -> list[Terms]:
        """Returns the GiB that each slot and all later ones together hold on some tiers."""
        return [part for tier in tiers for part in (self._last(tier), -self._col(tier).before())]

    # -- constraints -------------------------------------------------------------------------

    def _accumulate(self, name: str, tiers: Container[str]) -> None:
        """Makes column `name` of each slot the GiB that slots up to it hold on some tiers."""
        before = self._col(name).before()
        self._equal.add((joined(self._terms(tiers), self._col(name, -1.0), before), 0.0))

    def _limit_device(self) -> None:
        """Limits the device's bytes to its budget where a slot's forward and backward end.

        Kept activations and all other bytes change linearly between these points. Copies in flight
        and recomputed activations count as the modes allow.
        """
        self._accumulate("kept", _HERE)
        budget = self._budgets.device
        if budget is None:
            return
        share = 1.0 + FRAGMENTATION[self._cost.profile.kind]
        held = min_device_bytes(self._tables)
        copies, forward, backward = self._transient_bytes()
        kept = self._col("kept", share)
        # K/V of the running layer are on the device; those of the layer below are prefetched.
        running = joined(kept, -self._kv_on(_HERE).times(share))
        # Of the slot itself, only the activations of the running unit count.
        below = self._kv_on(self._offload_tiers).before().times(share)
        below = joined(kept.before(), below, self._running_activations(share=share))
        ahead, heads, begin, end, exists = self._ends()

        def free_gib(at: Bytes, passing: Bytes | int) -> NDArray[np.float64]:
            return (budget - (held[at] + share * (passing + copies))) / _GIB

        self._less.add(
            (running, free_gib(ahead, forward)),
            (kept, free_gib(heads, 0)),
            (running, free_gib(begin, backward)),
            (below, free_gib(end, backward)),
            exists=exists,
        )

    def _ends(self) -> tuple[Bytes, Bytes, Bytes, Bytes, NDArray[np.bool_]]:
        """Returns points of each slot: end of forward, head behind it, both ends of backward.

        Four arrays [slots], and which of these points exist, [slots, 4].
        """
        points: Any = self._tables.points  # numbers of its functions may be arrays
        slots = np.arange(self._slots)
        first, last_chunk = np.zeros_like(slots), points.num_chunks - 1
        last_layer = first + points.num_layers - 1
        exists = np.ones((self._slots, 4), dtype=bool)
        exists[0, 3] = False
        begin, end, heads = (slots, last_layer), (slots, first), slots
        if self._decisions.by_layer:
            begin, end, heads = (first + last_chunk, slots), (first, slots), first + last_chunk
            exists[:-1, 1] = False
        behind = points.forward(heads, last_layer + 1)
        return (
            points.forward(*begin),
            behind,
            points.backward(*begin),
            points.backward(*end),
            exists,
        )

    def _transient_bytes(self) -> tuple[Bytes, Bytes, Bytes]:
        """Returns peak bytes of copies, forward workspace and backward workspace, [slots] each."""
        tables, decisions = self._tables, self._decisions
        allowed = sorted({SAVED.index(mode.saved) for mode in self._modes})

        def most(table: Bytes) -> Bytes:
            """Returns the maximum over a chunk's layers or, by layer, over a layer's chunks."""
            return table.max(axis=1)[tables.kind_of] if decisions.by_layer else table.max(axis=0)

        running = np.zeros(self._slots, dtype=np.int64)
        for mode in self._modes:
            if mode.offload:
                running = np.maximum(running, most(tables.saved[:, SAVED.index(mode.saved)]))
        largest = np.maximum.accumulate(running)
        leaves = decisions.max_pending_d2h_bytes or 0
        copies = running + np.maximum(max(leaves, decisions.max_prefetch_bytes or 0), largest)
        keys_leave = tables.streams or any(
            tier in self._offload_tiers for at in self._kv_groups for tier in self._groups[at].tiers
        )
        copies = np.where(largest > 0, copies, leaves if keys_leave else 0)
        backward = tables.workspace_backward[:, allowed].max(axis=1)
        return copies, most(tables.workspace_forward), most(backward)

    def _running_activations(self, *, share: float) -> Terms:
        """Returns `share` of the GiB kept for one unit of each slot, if modes are spread evenly.

        The unit is the first layer's or, by layer, the first group of chunks'.
        """
        return self._terms(_HERE, [0]).times(share / self._groups[0].number)

    def _limit_tiers(self) -> None:
        decisions, points = self._decisions, self._tables.points
        last, layers = decisions.num_chunks - 1, points.num_layers
        used = {decisions.kv_tier, *self._tiers}
        passing = sum(tier in used for tier in self._behind)
        for tier in self._offload_tiers:
            self._accumulate(tier, {tier})
            budget = self._budgets.of(tier)
            if budget is None:
                continue
            if tier == "host":
                budget -= decisions.staging_bytes * passing + sum(
                    self._tables.host_resident.values()
                )
            levels = fixed_levels(self._tables)[tier].values()
            # Where forward ends, and after the first chunk's backward, when most gradient sums
            # wait.
            ends = [(points.forward(last, layers), self._slots - 1)]
            if last and not decisions.by_layer:
                ends.append((points.backward(last - 1, layers - 1), last - 1))
            columns, factors = self._col(tier)
            for at, framed in ends:
                held = sum(int(level.during[at]) for level in levels)
                of = slice(framed, framed + 1)
                self._less.add((Terms(columns[of], factors[of]), (budget - held) / _GIB))

    def _bound_compute(self) -> None:
        work, layers = self._work, self._tables.kind_of
        if self._decisions.by_layer:
            forward, backward = (w.sum(axis=1)[layers] for w in (work.forward, work.backward))
            forward[-1] += work.head.sum()
        else:
            forward = work.forward[layers].sum(axis=0) + work.head
            backward = work.backward[layers].sum(axis=0)
        self._compute_seconds = float((forward + backward).sum())
        rerun = joined(Terms(self._at, self._rerun_seconds), self._col("backward", -1.0))
        self._less.add((self._col("forward", -1.0), -forward), (rerun, -backward))
        if self._most_seconds < float("inf"):
            step = np.arange(self._width)[None, self._step_columns]
            update = self._cost.update_seconds * self._decisions.training
            self._less.add((Terms(step, np.ones(step.shape)), self._most_seconds - update))

    def _bound_stores(self) -> None:
        """Bounds copies to the host and writes: bytes moved by the end of each slot."""
        cost, decisions, tables = self._cost, self._decisions, self._tables
        per_gib = cost.d2h_seconds(_GIB, both=tables.both_ways[0])
        most_sums = float(self._largest_gib(tables.kv_out_backward).max())
        leave = (
            decisions.max_pending_d2h_bytes / _GIB if decisions.max_pending_d2h_bytes else most_sums
        )
        stage = leave + decisions.staging_bytes / _GIB
        stage += (decisions.kv_tier in self._behind) * 2 * most_sums
        stage += 2 * max(
            (float(self._groups[at].sizes.max()) for at in self._kv_groups), default=0.0
        )
        kv_gib = np.cumsum(self._kv_gib(tables.kv_out_forward))
        activations = [self._col(tier) for tier in self._offload_tiers]
        flows = self._lag_rows(
            "out", activations, kv_gib, lag_gib=leave, later=self._kv_on(self._offload_tiers)
        )
        for tier in self._behind:
            kv, later = (decisions.kv_tier == tier) * kv_gib, self._kv_on({tier})
            flows += self._lag_rows(
                f"written {tier}", [self._col(tier)], kv, lag_gib=stage, later=later
            )
        self._less.add(*flows)
        self._limit_rate("out", "forward", per_gib)
        for tier in self._behind:
            self._limit_rate(f"written {tier}", "forward", cost.store_seconds(tier, _GIB))
        gradients = self._gradients_gib()
        if not (tables.streams or gradients.any()):
            return
        # Backward's gradient sums follow the activations of forward that are not copied yet. Of
        # the weights' gradients, those of one slot may be in flight.
        activations = [self._last(tier) for tier in self._offload_tiers]
        leave += float(gradients.max())
        kv_gib = _cumulated(self._kv_gib(tables.kv_out_backward), float(kv_gib[-1]))
        flows = self._lag_rows("sums", activations, kv_gib + _cumulated(gradients), lag_gib=leave)
        for tier in self._behind:
            kv = (decisions.kv_tier == tier) * kv_gib
            flows += self._lag_rows(f"stored {tier}", [self._last(tier)], kv, lag_gib=stage)
        self._less.add(*map(_reversed, flows))
        per_gib = cost.d2h_seconds(_GIB, both=tables.both_ways[1])
        self._limit_rate("sums", "backward", per_gib, follows="out")
        for tier in self._behind:
            seconds = cost.store_seconds(tier, _GIB)
            self._limit_rate(f"stored {tier}", "backward", seconds, follows=f"written {tier}")

    def _bound_loads(self) -> None:
        """Bounds copies to the device and reads: bytes moved by the end of each slot.

        Activations are loaded from the last slot's on.
        """
        cost, decisions, tables = self._cost, self._decisions, self._tables
        per_gib = cost.h2d_seconds(_GIB, both=tables.both_ways[0])
        behind = decisions.kv_tier in self._behind
        # K/V from a tier behind the host arrive no faster than that tier reads.
        weights = self._weights_gib() * (not behind)
        fetch, staged = (decisions.max_prefetch_bytes or 0) / _GIB, decisions.staging_bytes / _GIB
        if tables.streams or weights.any():
            # K/V of a slot's first unit are loaded while the unit before it still runs.
            kv_gib = np.cumsum(self._kv_gib(tables.kv_in_forward) + weights[0])
            first = self._largest_gib(tables.kv_in_forward)
            first = np.append(first[1:], first[-1])
            self._less.add(*self._lag_rows("coming", [], kv_gib, lead_gib=first))
            read = cost.load_seconds(decisions.kv_tier, _GIB) if behind else 0.0
            self._limit_rate("coming", "forward", max(per_gib, read))
        per_gib = cost.h2d_seconds(_GIB, both=tables.both_ways[1])
        kv_gib = _cumulated(self._kv_gib(tables.kv_in_backward) + weights[1])
        largest = self._largest_gib(tables.kv_in_backward)
        lead = fetch + np.append(largest[:1], largest[:-1])
        # By layer, a slot's K/V are loaded before it begins.
        activations = [
            *self._from_the_end(self._offload_tiers),
            self._kv_on(self._offload_tiers).before(),
        ]
        flows = self._lag_rows("back", activations, kv_gib, lead_gib=lead)
        for tier in self._behind:
            stored = [*self._from_the_end((tier,)), self._kv_on({tier}).before()]
            kv = (decisions.kv_tier == tier) * kv_gib
            flows += self._lag_rows(f"read {tier}", stored, kv, lead_gib=lead + staged)
        self._less.add(*map(_reversed, flows))
        first = float(largest[-1])
        self._limit_rate("back", "backward", per_gib, head_start_gib=first)
        for tier in self._behind:
            read = cost.load_seconds(tier, _GIB)
            self._limit_rate(f"read {tier}", "backward", read, head_start_gib=first)

    def _weights_gib(self) -> NDArray[np.float64]:
        """Returns the GiB of weights loaded in each slot's forward and backward, [2, slots].

        Weights of the first unit, which waits for them, are left out.
        """
        host_resident, layers = self._cost.shape.host_resident, self._tables.points.num_layers
        found = np.zeros((2, self._slots))
        if host_resident is None:
            return found
        sizes = np.array(host_resident.layer_bytes) / _GIB
        if not self._decisions.by_layer:
            assert host_resident.keeps_device_copies, (
                "by chunk weights would come once for every chunk"
            )
            found[0, 0] = sizes[1:].sum()
            return found
        found[0, :-1] = sizes[1:]
        if not host_resident.keeps_device_copies and layers > RESIDENT_LAYERS:
            found[1, 1 : layers - RESIDENT_LAYERS + 1] = sizes[: layers - RESIDENT_LAYERS]
        return found

    def _gradients_gib(self) -> NDArray[np.float64]:
        """Returns the GiB of weight gradients that each slot's backward offloads, [slots]."""
        host_resident = self._cost.shape.host_resident
        found = np.zeros(self._slots)
        if host_resident is not None and self._decisions.by_layer:
            return np.array(host_resident.layer_gradient_bytes) / _GIB
        if host_resident is not None:
            found[0] = (np.array(host_resident.layer_gradient_bytes) / _GIB).sum()
        return found

    def _lag_rows(
        self,
        name: str,
        activations: Sequence[Terms],
        fixed_gib: NDArray[np.float64],
        *,
        lag_gib: float = 0.0,
        lead_gib: NDArray[np.float64] | float = 0.0,
        later: Terms | None = None,
    ) -> list[tuple[Terms, NDArray[np.float64]]]:
        """Returns rows that keep column `name` within a lag or lead at the end of each slot.

        The lag or lead is relative to the sum of `activations` and `fixed_gib`. The part
        `later` of the activations can be moved only after the slot has ended.
        """
        moved = self._col(name)
        waiting = () if later is None else (later,)
        return [
            (
                joined(moved, *(-part for part in activations), *waiting),
                fixed_gib + np.asarray(lead_gib),
            ),
            (joined(*activations, -moved), lag_gib - fixed_gib),
        ]

    def _limit_rate(
        self,
        name: str,
        slot: str,
        per_gib: float,
        *,
        follows: str | None = None,
        head_start_gib: float = 0.0,
    ) -> None:
        """Adds rows by which the copies in a slot take no longer than the slot.

        Column `name` has the GiB moved by the end of each slot, of "forward" or "backward", and
        continues from the last value of the forward column `follows`, or begins at zero with
        `head_start_gib` that may have moved before.
        """
        moved, taken = self._col(name, per_gib), self._col(slot, -1.0)
        if slot == "backward":
            (moved, _), (taken, _) = _reversed((moved, 0.0)), _reversed((taken, 0.0))
        before, bounds = -moved.before(), np.zeros(self._slots)
        if follows is None:
            bounds[0] = head_start_gib * per_gib
        else:
            before.columns[0] = self._column[follows] + self._slots - 1
            before.factors[0] = -per_gib
        self._less.add((joined(moved, taken, before), bounds))

    def _kv_gib(self, streamed: Bytes) -> NDArray[np.float64]:
        """Returns the GiB of K/V that all layers of a chunk stream, [slots]; 0 by layer."""
        if self._decisions.by_layer:
            return np.zeros(self._slots)
        return streamed[self._tables.kind_of].sum(axis=0) / _GIB

    def _largest_gib(self, streamed: Bytes) -> NDArray[np.float64]:
        """Returns the largest GiB of K/V that a layer of a chunk streams, [slots]; 0 by layer."""
        return np.zeros(self._slots) if self._decisions.by_layer else streamed.max(axis=0) / _GIB


_GIB = 2**30
# Largest share of a plan's time that may be given up for moving fewer bytes.
_MOVING_SHARE = 1e-5
_HERE = frozenset({"device"})


def _cumulated(sizes: NDArray[np.float64], first: float = 0.0) -> NDArray[np.float64]:
    """Returns for each slot `first` plus the sum of the sizes from the last slot down to it."""
    return np.cumsum([first, *sizes[::-1]])[:0:-1]


def _reversed(rows: tuple[Terms, ArrayLike]) -> tuple[Terms, ArrayLike]:
    """Returns rows in the order of backward."""
    (columns, factors), bounds = rows
    return Terms(columns[::-1], factors[::-1]), np.broadcast_to(bounds, len(columns))[::-1]
