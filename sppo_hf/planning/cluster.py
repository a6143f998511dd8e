"""Plans for several devices: stages, replicas, chunks, cut, schedule and what is kept of frames.

Candidates are simulated, the most promising first; what does not fit on any one rank is rejected.
Order and rejection go by `LowerBounds`: the seconds and bytes that a layout takes at least, found
without simulating it, with the terms of PipelineCost; seconds with the layout's own stages, bytes
with stages taken as equal where that makes them smaller. Frames and K/V follow one rule on all
stages: this searches layouts, the solver for one device searches frames.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

from sppo_hf.errors import ConfigError
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.hardware import UNKNOWN_LINK
from sppo_hf.planning.layouts import Layout, LowerBounds, SearchSpace
from sppo_hf.planning.memory_snapshots import Budgets
from sppo_hf.planning.model_profile import count_head_blocks
from sppo_hf.planning.pipeline_cost import PipelineCost
from sppo_hf.planning.tiers import HOST, TIERS, Tier, tiers_behind_host
from sppo_hf.schedule.generate import (
    INTERLEAVED,
    SHARED_UNIT_SCHEDULES,
    Size,
    forwards_before_backward,
    generate,
)
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import period_seconds
from sppo_hf.schedule.timeline import Timeline

# What layouts whose ranks share units may be simulated beside all others: this share of it.
_SHARING = 0.25


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
    """Whether ranks of a pipeline can share units of this model (`count_head_blocks`), where its
    heads can be divided among them."""

    @cached_property
    def bounds_of_layout(self) -> LowerBounds:
        """What layouts take at least."""
        fastest_rate = max(self._within_node, self.link_bytes_per_second)
        return LowerBounds(
            self.cost, self.total_tokens, self.rows, self.group_bytes_per_second, fastest_rate
        )

    def min_step_seconds(self, layout: Layout) -> float:
        """Returns the least time of a layout's step."""
        reduce_seconds = _reduce_seconds(self, layout)
        return self.bounds_of_layout.seconds(layout, reduce_seconds=reduce_seconds)

    @property
    def ranks_per_node(self) -> int:
        """Devices that share a host, if there are so many."""
        return min(self.gpus_per_node, self.gpus)

    def group_bytes_per_second(self, sp: int) -> float:
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
        kinds = {shape.layers[i] for i in shape.layer_kinds}
        return tuple(
            sp
            for sp in self.space.sp
            if sp == 1
            or (
                sp <= self.gpus
                and not shape.has_recurrent_state
                and all(layer.num_heads and layer.num_heads % sp == 0 for layer in kinds)
            )
        )

    def can_run(self, layout: Layout) -> bool:
        """Returns whether the runtime takes a layout: units are shared by single devices alone."""
        if layout.schedule not in SHARED_UNIT_SCHEDULES:
            return True
        return self.shares_units and layout.sp == 1 and layout.stages in self._sharing_stages

    @cached_property
    def _sharing_stages(self) -> frozenset[int]:
        """Numbers of stages whose ranks can divide the heads of units that they share."""
        attending = [layer for layer in self.cost.shape.layers if layer.num_heads]
        found: list[int] = []
        for stages in range(2, min(self.gpus, self.cost.shape.num_layers) + 1):
            try:
                count_head_blocks(attending, stages, "the model")
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
    def reason(self) -> str:
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

    num_simulated: int
    """Layouts that were simulated; others were too large at a glance, or too slow."""

    num_candidates: int
    """Layouts that there are."""

    num_skipped: int = 0
    """Layouts that might be among the best, and were not simulated, to be done sooner."""

    skipped_min_seconds: float | None = None
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
            f"and at most {question.space.max_units:,} chunks on a rank. Remedy: more rows, or "
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
        num_simulated=within.num_simulated + across.num_simulated,
        num_candidates=within.num_candidates + across.num_candidates,
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
    looked_at = [
        (question.min_step_seconds(x), x.hops_between_nodes(per_node), x) for x in candidates
    ]
    ranked = [(seconds, layout) for seconds, _, layout in sorted(looked_at)]
    if not ranked:
        return None
    search = _Search(question, keep, slack)
    with _no_collection():
        unseen = search.go_through(
            [one for one in ranked if one[1].schedule not in SHARED_UNIT_SCHEDULES], most_actions
        )
        # Units that ranks share have bounds without idle time, so they would all come first, and
        # many actions: apart, so that nothing else is left out for them.
        unseen += search.go_through(
            [one for one in ranked if one[1].schedule in SHARED_UNIT_SCHEDULES],
            most_actions * _SHARING,
        )
        if not search.best:
            search.simulate_closest([layout for _, layout in unseen], most_actions)
    seconds = [at for at, x in unseen if search.may_win(at) and not search.has_seen(x)]
    return ClusterAnswer(
        best=tuple(search.best),
        closest=search.closest,
        num_simulated=search.num_simulated,
        num_candidates=len(ranked),
        num_skipped=len(seconds),
        skipped_min_seconds=min(seconds, default=None),
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
    def num_simulated(self) -> int:
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
        if unseen and not self.num_simulated:
            self._simulate(min(unseen, key=self._all_actions), math.inf)
            return
        # Little is known of what units take that ranks share.
        hopeless = sorted(
            self._hopeless, key=lambda one: (one[1].schedule in SHARED_UNIT_SCHEDULES, *one)
        )
        # Before a pipeline repeats itself, less than twice what all its rows take is simulated.
        small = [one for one in hopeless if 2 * self._all_actions(one[1]) <= most_actions]
        if small:
            lacking, layout = small[0]
            if self.closest is None or lacking < self.closest.missing_bytes:
                self._simulate(layout, math.inf)
        elif not self.num_simulated:
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
            layout = layout._replace(offload="none", activation_tier=HOST)
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
            for resource in timeline.resources
            if resource.endswith(".d2h")
            for span in timeline.spans(resource)
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
        activation_tier=layout.activation_tier,
        kv_tier=layout.kv_tier,
        link_bytes_per_second=question.link_bytes_per_second,
        node_bytes_per_second=question.node_bytes_per_second,
        rank_nodes=layout.rank_nodes(question.gpus_per_node),
        devices_per_node=question.gpus_per_node,
        shards=layout.devices if layout.sharded else 1,
        shard_bytes_per_second=question.group_bytes_per_second(layout.devices),
        reduce_seconds=reduce_seconds,
    )
    return schedule, costs, costs.simulate(costs.lowered(schedule, reduce=reduce_seconds > 0))


def _warm_up(layout: Layout, rows: int) -> tuple[int, int]:
    """Rows that a pipeline has begun when the first comes back, and rows that pass it together.

    The second is 0 where groups of rows are not all of one size.
    """
    size = Size(layout.stages, rows, layout.num_chunks, layout.virtual)
    if layout.schedule in SHARED_UNIT_SCHEDULES:
        # One row after the other.
        return 1, 1
    units = forwards_before_backward(layout.schedule, size)[0]
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
    copies *= 2 if TIERS[layout.activation_tier].behind_host else 1
    copies += 0 if layout.kv_tier == "device" else 4
    units, passes = stages * chunks, 4 * (stages - 1) * chunks
    if layout.schedule in SHARED_UNIT_SCHEDULES:
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
    seconds = 2 * (sp - 1) / sp * largest / question.group_bytes_per_second(sp)
    within = layout.devices <= question.gpus_per_node and question.node_bytes_per_second
    rate = within or question.link_bytes_per_second
    return seconds + 2 * (replicas - 1) / replicas * largest / sp / rate


def _over(num_bytes: int, budget_bytes: int | None) -> int:
    return 0 if budget_bytes is None else max(0, num_bytes - budget_bytes)
