"""Search for the fastest layouts of a training step over several devices.

A layout is a number of stages, replicas and chunks, a schedule, and one rule for what all stages
save, recompute and offload. Without a pipeline FSDP2 may shard the model, and devices may go
layer by layer, as one device alone may. Layouts are sorted by a lower bound on their step time
(`LowerBounds`) and simulated in that order, until the bound exceeds the slowest of the plans to
keep: a pipeline by `PipelineCost`, a single stage by its own program (`lowering`). Those whose
lower bound on memory exceeds a budget are not simulated. Which single activations to save is the
solver's question, for one device (`solve`).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

from sppo_hf.errors import ConfigError
from sppo_hf.planning.activation_modes import mode_of
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Batch
from sppo_hf.planning.hardware import UNKNOWN_LINK
from sppo_hf.planning.layouts import Layout, LowerBounds, SearchSpace
from sppo_hf.planning.lowering import COMPUTE, StepProgram, lower
from sppo_hf.planning.memory import Budgets
from sppo_hf.planning.model_profile import count_head_blocks
from sppo_hf.planning.pipeline_cost import (
    PipelineCost,
    exposed_reduce_seconds,
    gather_stall_seconds,
)
from sppo_hf.planning.policies import uniform_modes
from sppo_hf.planning.solve import Choices, fixed_policy, with_kv
from sppo_hf.planning.tiers import HOST, TIERS, Tier, tiers_behind_host
from sppo_hf.schedule.generate import (
    SHARED_UNIT_SCHEDULES,
    Size,
    forwards_before_backward,
    generate,
    is_interleaved,
    splits_backward,
)
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import period_seconds
from sppo_hf.schedule.timeline import Timeline

# The program of one stage, for one row, takes about as long as so many actions of a pipeline: at
# least, and for each layer of a chunk without copies and with them.
_PROGRAM_ACTIONS, _KEPT_ACTIONS, _COPIED_ACTIONS = 200, 0.4, 3.0

# Layouts whose ranks share units may take this share of the actions that all others may take.
_SHARING = 0.25

# So may those with FSDP2, where they are only compared with the best.
_COMPARING = 0.25


# No slots: a cached property needs the instance's dictionary.
@dataclass(frozen=True, kw_only=True)
class ClusterRequest:
    """Rows of a length, and devices to train them on."""

    cost: ModelCost
    """Costs of the model on one device, for one row at a time."""

    total_tokens: int
    """Length of each row."""

    rows: int
    """Rows of a step, over all replicas."""

    gpus: int
    budgets: Budgets
    """Budgets of one device, and of the host of one node."""

    gpus_per_node: int = 8

    link_bytes_per_second: float = UNKNOWN_LINK
    """Rate from a device to one of another node, each way."""

    node_bytes_per_second: float | None = None
    """Rate from a device to one of its own node, each way; None: as between nodes."""

    space: SearchSpace = field(default_factory=SearchSpace)
    shares_units: bool = True
    """Whether ranks of a pipeline can share units of this model (`count_head_blocks`), where its
    heads can be divided among them."""

    sharded_cost: ModelCost | None = None
    """Costs of the layers that FSDP2 gathers, before it shards them; None where they are those of
    `cost`."""

    fsdp2_refusal: str = ""
    """Why no layout has FSDP2, as a sentence; "" where some may."""

    @cached_property
    def bounds_of_layout(self) -> LowerBounds:
        """Lower bounds on what each layout takes."""
        fastest_rate = max(self._within_node, self.link_bytes_per_second)
        return LowerBounds(
            self.cost,
            self.total_tokens,
            self.rows,
            self.group_bytes_per_second,
            fastest_rate,
            self.sharded_cost,
        )

    def min_step_seconds(self, layout: Layout) -> float:
        """Returns a lower bound on the time of a layout's step."""
        reduce_seconds = _reduce_seconds(self, layout)
        return self.bounds_of_layout.seconds(layout, reduce_seconds=reduce_seconds)

    @property
    def ranks_per_node(self) -> int:
        """Devices that share a host; all of them where they are fewer than a node has."""
        return min(self.gpus_per_node, self.gpus)

    def group_bytes_per_second(self, sp: int) -> float:
        """Returns the rate between the devices of a sequence-parallel group of that size."""
        return self.link_bytes_per_second if self.crosses_nodes(sp) else self._within_node

    def crosses_nodes(self, sp: int) -> bool:
        """Returns whether any group of that many devices spans several nodes."""
        return self.gpus > self.gpus_per_node and self.gpus_per_node % sp != 0

    @property
    def sequence_parallel(self) -> tuple[int, ...]:
        """Sizes of sequence-parallel groups that this model can be run on.

        They must divide the heads of every layer; recurrent layers cannot be divided.
        """
        shape = self.cost.shape
        heads = {shape.layers[i].num_heads for i in shape.layer_kinds}
        divides = not shape.has_recurrent_state and all(heads)
        return tuple(
            sp
            for sp in self.space.sp
            if sp == 1 or (divides and sp <= self.gpus and not any(number % sp for number in heads))
        )

    def can_run(self, layout: Layout) -> bool:
        """Returns whether the runtime can run a layout.

        No sequence-parallel groups share units, and no classifier is cut into stages, nor a model
        whose layers exchange more than hidden states.
        """
        shape = self.cost.shape
        if layout.sharded and self.fsdp2_refusal:
            return False
        if layout.stages > 1 and (shape.head_width is not None or shape.stages_refusal):
            return False
        if layout.order == "by_layer" and layout.kv_tier != "device":
            # K/V that other layers read stay until all of these have run.
            return not any(shape.layers[i].borrows_keys for i in shape.layer_kinds)
        if layout.schedule not in SHARED_UNIT_SCHEDULES:
            return True
        return self.shares_units and layout.sp == 1 and layout.stages in self._sharing_stages

    @cached_property
    def _sharing_stages(self) -> frozenset[int]:
        """Numbers of stages whose ranks can divide attention heads in units that they share."""
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
    """A simulated layout."""

    layout: Layout
    layers: tuple[range, ...]

    bounds: Bounds

    step_seconds: float
    """Seconds of a step over all rows, the reduction of gradients included."""

    tokens_per_second: float
    """Tokens per second of all devices together."""

    bubble_fraction: float
    """Share of the ranks' time in which they do not compute."""

    recompute_fraction: float
    """Share of compute that is recomputation."""

    peak_bytes: tuple[int, ...]
    """[ranks] Peak bytes on one device of each rank."""

    host_bytes: int
    """Peak bytes on the host of the fullest node, if all its ranks peak at the same time."""

    missing_bytes: int
    """Bytes by which budgets are exceeded, over all tiers; 0 where the layout fits."""

    disk_bytes: int = 0
    """Peak bytes behind the host (on disk), counted in the same way."""

    offloads: bool = False
    """Whether any saved activations are offloaded; not those of a forward whose backward follows at
    once."""

    @property
    def reason(self) -> str:
        """The causes of lost time, as text."""
        parts = [f"idle {self.bubble_fraction:.1%}"]
        if self.recompute_fraction > 0:
            parts.append(f"recompute {self.recompute_fraction:.1%}")
        if self.offloads or self.layout.kv_tier != "device":
            parts.append("copies beside compute")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResult:
    """The result of a search."""

    best: tuple[ClusterPlan, ...]
    """Plans that fit, fastest first."""

    closest: ClusterPlan | None
    """The simulated layout that exceeds budgets by the fewest bytes; None if all fit."""

    num_simulated: int
    """Layouts that were simulated; the others are too large or too slow by their lower bounds."""

    num_candidates: int

    num_skipped: int = 0
    """Layouts that might be among the best, but were not simulated, to limit the search."""

    skipped_min_seconds: float | None = None
    """Lower bound on the step time of all of these; None where there are none."""

    sharded: ClusterPlan | None = None
    """To compare: the fastest layout with FSDP2 that fits, else the closest to fitting. None if one
    is among the best, if nothing fits, or if there is no such layout."""


def solve_cluster(
    request: ClusterRequest,
    *,
    keep: int = 5,
    slack: float = 0.0,
    max_actions: float = math.inf,
) -> ClusterResult:
    """Finds the fastest layouts that fit.

    Args:
        request: model, rows, devices, budgets and search space.
        keep: how many plans to return.
        slack: share by which the returned plans may be slower than the best; a search that need
            not be sure of the last percent is many times shorter.
        max_actions: limit on simulated actions, over all candidates. Half of them are for
            candidates that need at most an eighth of the limit; larger ones follow. A fourth of the
            limit is added for candidates whose ranks share units, and another for those with FSDP2
            where none of these is among the best. At least one candidate is simulated.

    Raises:
        ConfigError: no number of stages and replicas fits the devices, rows and layers.
    """
    search = _Search(request, keep, slack)
    search.run(layouts(request), max_actions)
    if not search.best:
        # Groups that span nodes are slow: only where nothing else fits.
        search.run(layouts(request, across=True), max_actions)
    if not search.num_candidates:
        raise ConfigError(
            f"{request.gpus} devices cannot share {request.rows} rows of "
            f"{request.total_tokens:,} tokens among stages of {request.cost.shape.num_layers} "
            "layers. Allowed: replicas that divide devices and rows, at most one stage per layer, "
            f"and at most {request.space.max_units:,} chunks on a rank. Remedy: more rows, or "
            "fewer devices."
        )
    compared: ClusterPlan | None = None
    if search.best and not any(plan.layout.sharded for plan in search.best):
        other = _Search(request, 1, slack)
        found = (layout for layout in layouts(request) if layout.sharded)
        other.run(found, max_actions * _COMPARING)
        compared = next(iter(other.best), other.closest)
        if other.best and search.may_win(other.best[0].step_seconds):
            search.add(other.best[0])
            compared = None
    return replace(search.result(), sharded=compared)


class _Search:
    """A search under way."""

    def __init__(self, request: ClusterRequest, keep: int, slack: float) -> None:
        self._request = request
        self._keep = keep
        self._slack = slack
        self._actions = 0
        self._too_large: list[tuple[int, Layout]] = []
        """Layouts that exceed a budget by their lower bounds, and by how many bytes."""
        self._unseen: list[tuple[float, Layout]] = []
        """Layouts that were left out because of the limit on actions, by their least seconds."""
        self.num_candidates = 0
        self.simulated: dict[Layout, int] = {}
        """Bytes above the budgets of every layout that was simulated or equals one that was."""
        self.best: list[ClusterPlan] = []
        self.closest: ClusterPlan | None = None

    def run(self, candidates: Iterable[Layout], max_actions: float) -> None:
        """Simulate those of a set of layouts that may be among the best."""
        request, per_node = self._request, self._request.ranks_per_node
        # Of two that seem to take as long, the one with fewer hops between nodes comes first.
        bounded = [
            (request.min_step_seconds(x), x.hops_between_nodes(per_node), x) for x in candidates
        ]
        ranked = [(seconds, layout) for seconds, _, layout in sorted(bounded)]
        self.num_candidates += len(ranked)
        with _no_collection():
            unseen = self.simulate_all(
                [one for one in ranked if one[1].schedule not in SHARED_UNIT_SCHEDULES], max_actions
            )
            # Bounds of layouts with shared units leave out idle time, so these would all come
            # first, and they have many actions: a limit of their own, so that they displace no
            # others.
            unseen += self.simulate_all(
                [one for one in ranked if one[1].schedule in SHARED_UNIT_SCHEDULES],
                max_actions * _SHARING,
            )
            if ranked and not self.best:
                self.simulate_closest([layout for _, layout in unseen], max_actions)
        self._unseen += unseen

    def result(self) -> ClusterResult:
        """Returns what was found."""
        skipped = [at for at, x in self._unseen if self.may_win(at) and x not in self.simulated]
        return ClusterResult(
            best=tuple(self.best),
            closest=self.closest,
            num_simulated=len(self.simulated),
            num_candidates=self.num_candidates,
            num_skipped=len(skipped),
            skipped_min_seconds=min(skipped, default=None),
        )

    def may_win(self, seconds: float) -> bool:
        """Returns whether a step of that many seconds would be among the best."""
        if len(self.best) < self._keep:
            return True
        return seconds * (1.0 + self._slack) <= self.best[-1].step_seconds

    def simulate_all(
        self, ranked: Iterable[tuple[float, Layout]], max_actions: float
    ) -> list[tuple[float, Layout]]:
        """Simulates candidates: small ones first, then large ones, then those that hardly fit.

        Returns the candidates that are left out because of the limit on actions.
        """
        limit = self._actions + max_actions
        half = self._actions + max_actions / 2
        large, doubtful = self.simulate(ranked, each=max_actions / 8, in_all=half)
        large, more = self.simulate(large, each=max_actions, in_all=limit)
        doubtful = sorted([*doubtful, *more])
        late, _ = self.simulate(doubtful, each=max_actions, in_all=limit, include_doubtful=True)
        return [*large, *late]

    def simulate(
        self,
        ranked: Iterable[tuple[float, Layout]],
        *,
        each: float,
        in_all: float,
        include_doubtful: bool = False,
    ) -> tuple[list[tuple[float, Layout]], list[tuple[float, Layout]]]:
        """Simulates candidates, sorted by a lower bound on seconds, as long as they may win.

        At most `each` actions of one candidate and `in_all` of this search so far and here. Without
        `include_doubtful` not those of which even the variant that saves least does not fit.

        Returns:
            Candidates that need more actions than the limits, and doubtful ones.
        """
        budgets = self._request.budgets
        large: list[tuple[float, Layout]] = []
        doubtful: list[tuple[float, Layout]] = []
        for seconds, layout in ranked:
            if not self.may_win(seconds):
                break
            if layout in self.simulated:
                continue
            excess, device_bytes = self._excess(layout)
            if excess:
                self._too_large.append((excess, layout))
                continue
            if not include_doubtful and 2 * device_bytes > (budgets.device or math.inf):
                saved, offload = self._request.space.activation_rules[-1]
                least = layout._replace(saved=saved, offload=offload)
                if least not in self.simulated and not self._excess(least)[0]:
                    self._simulate(least, min(each, in_all - self._actions))
                if self.simulated.get(least, 0):
                    doubtful.append((seconds, layout))
                    continue
            limit = min(each, in_all - self._actions)
            if layout not in self.simulated and not self._simulate(layout, limit):
                large.append((seconds, layout))
        return large, doubtful

    def _excess(self, layout: Layout) -> tuple[int, int]:
        """Lower bounds: bytes by which a layout exceeds budgets, and its bytes on one device."""
        bounds_of_layout, budgets = self._request.bounds_of_layout, self._request.budgets
        device_bytes = bounds_of_layout.device_bytes(layout)
        excess = _over(device_bytes, budgets.device)
        if budgets.host is not None:
            per_node = self._request.ranks_per_node
            host_bytes = bounds_of_layout.host_bytes(layout, per_node, budgets.device)
            excess += _over(host_bytes, budgets.host)
        return excess, device_bytes

    def simulate_closest(self, unseen: Sequence[Layout], max_actions: float) -> None:
        """Simulates one candidate where none fits, so that there is a closest one to show.

        Of those that cannot fit, the one that exceeds budgets by least; where nothing was simulated
        and some may fit, the one with the fewest actions.
        """
        if unseen and not self.simulated:
            self._simulate(min(unseen, key=self._all_actions), math.inf)
            return
        # Bounds of layouts with shared units are loose: these last.
        hopeless = sorted(
            self._too_large, key=lambda one: (one[1].schedule in SHARED_UNIT_SCHEDULES, *one)
        )
        # Simulating until a pipeline repeats itself takes less than twice the actions of all rows.
        small = [one for one in hopeless if 2 * self._all_actions(one[1]) <= max_actions]
        if small:
            excess, layout = small[0]
            if self.closest is None or excess < self.closest.missing_bytes:
                self._simulate(layout, math.inf)
        elif not self.simulated:
            self._simulate(min((x for _, x in hopeless), key=self._all_actions), math.inf)

    def _all_actions(self, layout: Layout) -> int:
        if layout.stages == 1:
            return _num_program_actions(layout, self._request.cost.shape.num_layers)
        return _num_actions(layout, self._request.rows // layout.replicas)

    def add(self, plan: ClusterPlan) -> None:
        """Adds a plan that fits, if it is among the best."""
        self.best = sorted([*self.best, plan], key=_worse)[: self._keep]

    def _simulate(self, layout: Layout, max_actions: float) -> bool:
        plan, actions = _simulate_within(self._request, layout, max_actions)
        self._actions += actions
        if plan is None:
            return False
        self.simulated[layout] = plan.missing_bytes
        stays = layout.saved, "none"
        if (
            layout.offload != "none"
            and not plan.offloads
            and stays in self._request.space.activation_rules
        ):
            # Nothing is offloaded: this is the same as the layout without offload.
            layout = layout._replace(offload="none", activation_tier=HOST)
            if layout in self.simulated:
                return True
            self.simulated[layout] = plan.missing_bytes
            plan = replace(plan, layout=layout)
        if not plan.missing_bytes:
            self.add(plan)
        elif self.closest is None or plan.missing_bytes < self.closest.missing_bytes:
            self.closest = plan
        return True


def _worse(plan: ClusterPlan) -> tuple[float, bool, bool, int, float]:
    """Sort key of plans: time, then whether anything is copied for nothing, then memory.

    Times that are the same to four digits are no difference: no simulation is that good.
    """
    copies = plan.offloads, plan.layout.kv_tier != "device"
    seconds = float(f"{plan.step_seconds:.4g}")
    return seconds, *copies, max(plan.peak_bytes), plan.step_seconds


def layouts(request: ClusterRequest, *, across: bool = False) -> Iterator[Layout]:
    """Yields every layout to consider.

    With `across`, those whose sequence-parallel groups span nodes; otherwise all others.
    """
    space = request.space
    found = space.layouts(
        gpus=request.gpus,
        rows=request.rows,
        total_tokens=request.total_tokens,
        num_layers=request.cost.shape.num_layers,
        sp=[sp for sp in request.sequence_parallel if request.crosses_nodes(sp) == across],
    )
    if request.cost.shape.by_layer_refusal is not None and not space.beyond_runtime:
        found = _by_chunk(found)
    return (layout for layout in found if space.beyond_runtime or request.can_run(layout))


def _by_chunk(found: Iterable[Layout]) -> Iterator[Layout]:
    """Yields the layouts of a model that cannot go layer by layer; FSDP2's then go by chunk."""
    for layout in found:
        if layout.sharded:
            yield layout._replace(order="by_chunk")
        elif layout.order == "by_chunk":
            yield layout


def simulate_layout(request: ClusterRequest, layout: Layout) -> ClusterPlan:
    """Simulates one layout, whether or not it fits.

    All rows of a step are alike, so a pipeline soon repeats itself: of many rows only as many are
    simulated as show its period, and the others add whole periods (`period_seconds`).
    """
    plan, _ = _simulate_within(request, layout, math.inf)
    assert plan is not None, "nothing was too large"
    return plan


def _simulate_within(
    request: ClusterRequest, layout: Layout, max_actions: float
) -> tuple[ClusterPlan | None, int]:
    """Simulates a layout within a limit on actions; returns the plan, if any, and its actions."""
    rows = request.rows // layout.replicas
    if layout.stages == 1:
        actions = _num_program_actions(layout, request.cost.shape.num_layers)
        found = None if actions > max_actions else _plan_of_one_stage(request, layout, rows)
        return found, 0 if found is None else actions
    warm_up, every = _warm_up(layout, rows)
    count, actions = _few_rows(rows, warm_up, every), 0
    while True:
        actions += _num_actions(layout, count)
        if actions > max_actions:
            return None, actions - _num_actions(layout, count)
        schedule, costs, timeline = _simulate_rows(request, layout, count)
        if count == rows:
            return _plan_of(request, layout, costs, timeline, rows, 0.0), actions
        period = period_seconds(schedule, timeline, warm_up=warm_up, every=every)
        if period is not None:
            more = (rows - count) // every * period
            return _plan_of(request, layout, costs, timeline, count, more), actions
        count = rows if 4 * count > rows else 2 * count + (rows - 2 * count) % every


def _plan_of(
    request: ClusterRequest,
    layout: Layout,
    costs: PipelineCost,
    timeline: Timeline,
    rows: int,
    more_seconds: float,
) -> ClusterPlan:
    """Returns a plan from the simulation of `rows` rows and the seconds that the others add."""
    cost, bounds = costs.cost, costs.bounds
    step_seconds = timeline.end_seconds + more_seconds
    peaks = tuple(timeline.peak(f"{rank}.device").num_bytes for rank in range(layout.stages))

    def node_bytes(tier: Tier) -> int:
        """Sum over the fullest ranks that one node can hold."""
        held = [timeline.peak(f"{rank}.{tier}").num_bytes for rank in range(layout.stages)]
        fullest = sorted(held * (layout.replicas * layout.sp), reverse=True)
        return sum(fullest[: request.ranks_per_node])

    of_node = {tier: node_bytes(tier) for tier in (HOST, *tiers_behind_host())}
    recompute_seconds = _recompute_seconds(cost, bounds, layout)
    busy = sum(timeline.busy_seconds(f"{rank}.compute") for rank in range(layout.stages)) / rows
    budgets, all_rows = request.budgets, request.rows // layout.replicas
    return ClusterPlan(
        layout=layout,
        layers=costs.stages,
        bounds=bounds,
        step_seconds=step_seconds,
        tokens_per_second=request.rows * request.total_tokens / step_seconds,
        bubble_fraction=1.0 - all_rows * busy / (layout.stages * step_seconds),
        recompute_fraction=recompute_seconds / busy,
        peak_bytes=peaks,
        host_bytes=of_node[HOST],
        disk_bytes=sum(of_node.values()) - of_node[HOST],
        offloads=any(
            span.action.kind == "D"
            for resource in timeline.resources
            if resource.endswith(".d2h")
            for span in timeline.spans(resource)
        ),
        missing_bytes=_over(max(peaks), budgets.device)
        + sum(_over(size, budgets.of(tier)) for tier, size in of_node.items()),
    )


def _plan_of_one_stage(request: ClusterRequest, layout: Layout, rows: int) -> ClusterPlan:
    """Returns the plan of a layout without a pipeline, `rows` rows one after the other."""
    parts, budgets = request.bounds_of_layout, request.budgets
    cost, bounds = parts.cost(layout), parts.bounds(layout)
    program = program_of_one_stage(request, layout, rows)
    timeline, held = program.simulate(), program.estimate
    busy = timeline.busy_seconds(COMPUTE)
    step_seconds = rows * timeline.end_seconds + _reduce_seconds(request, layout)
    if layout.sharded:
        stalled = gather_stall_seconds(cost, bounds, layout.saved, order=layout.order)
        step_seconds += rows * stalled
    sharing = min(request.ranks_per_node, layout.devices)
    of_node = {tier: sharing * held.peak_bytes(tier) for tier in (HOST, *tiers_behind_host())}
    device_bytes = held.peak_bytes("device")
    return ClusterPlan(
        layout=layout,
        layers=(range(cost.shape.num_layers),),
        bounds=bounds,
        step_seconds=step_seconds,
        tokens_per_second=request.rows * request.total_tokens / step_seconds,
        bubble_fraction=1.0 - rows * busy / step_seconds,
        recompute_fraction=_recompute_seconds(cost, bounds, layout) / busy,
        peak_bytes=(device_bytes,),
        host_bytes=of_node[HOST],
        disk_bytes=sum(of_node.values()) - of_node[HOST],
        offloads=bool(program.offloaded_bytes.any()),
        missing_bytes=_over(device_bytes, budgets.device)
        + sum(_over(size, budgets.of(tier)) for tier, size in of_node.items()),
    )


def program_of_one_stage(request: ClusterRequest, layout: Layout, rows: int) -> StepProgram:
    """Returns the program of a device without a pipeline for one of its `rows` rows.

    Decisions are those that a run makes of these settings (`plan`).
    """
    parts, budgets = request.bounds_of_layout, request.budgets
    cost, bounds = parts.cost(layout), parts.bounds(layout)
    kind, shape = cost.profile.kind, cost.shape
    batch = Batch(
        batch_rows=cost.batch_rows,
        training=True,
        accumulates=rows > 1,
        tile_tokens=cost.loss_tile_tokens,
    )
    base = batch.decisions(bounds, shape.num_layers, layout.order)
    base = with_kv(base, layout.kv_tier, shape, budgets, kind)
    if layout.offload == "sppo":
        choices = Choices(tiers=("device", layout.activation_tier))
        decisions = fixed_policy(cost, base, "sppo", layout.saved, choices)
        assert decisions is not None, "the rule uses tiers that are there"
    else:
        tier = "device" if layout.offload == "none" else layout.activation_tier
        mode = mode_of(layout.saved, tier)
        modes = uniform_modes(len(bounds), shape.num_layers, mode)
        decisions = replace(base, layer_modes=modes)
    return lower(decisions, cost)


def _recompute_seconds(cost: ModelCost, bounds: Bounds, layout: Layout) -> float:
    return sum(
        cost.recompute_seconds(layer, end - start, layout.saved)
        for start, end in bounds
        for layer in range(cost.shape.num_layers)
    )


def _simulate_rows(
    request: ClusterRequest, layout: Layout, rows: int
) -> tuple[Schedule, PipelineCost, Timeline]:
    """Simulates `rows` rows in each pipeline."""
    size = Size(layout.stages, rows, layout.num_chunks, layout.virtual)
    schedule, parts = generate(layout.schedule, size), request.bounds_of_layout
    reduce_seconds = _reduce_seconds(request, layout)
    costs = PipelineCost(
        schedule,
        parts.cost(layout),
        parts.bounds(layout),
        split=parts.stages(layout),
        saved=layout.saved,
        offload=layout.offload,
        activation_tier=layout.activation_tier,
        kv_tier=layout.kv_tier,
        link_bytes_per_second=request.link_bytes_per_second,
        node_bytes_per_second=request.node_bytes_per_second,
        rank_nodes=layout.rank_nodes(request.gpus_per_node),
        devices_per_node=request.gpus_per_node,
        reduce_seconds=reduce_seconds,
    )
    return schedule, costs, costs.simulate(costs.lowered(schedule, reduce=reduce_seconds > 0))


def _warm_up(layout: Layout, rows: int) -> tuple[int, int]:
    """Rows begun before the first backward, and rows that pass the stages as one group.

    The second is 0 where groups of rows are not all of one size.
    """
    size = Size(layout.stages, rows, layout.num_chunks, layout.virtual)
    if layout.schedule in SHARED_UNIT_SCHEDULES:
        # Rows follow each other, each forward and back.
        return 1, 1
    units = forwards_before_backward(layout.schedule, size)[0]
    warm_up = -(-units // (layout.num_chunks * layout.virtual))
    if not is_interleaved(layout.schedule):
        return warm_up, 1
    every = -(-layout.stages // layout.num_chunks)
    return warm_up, 0 if rows % every else every


@contextmanager
def _no_collection() -> Generator[None]:
    """Turns garbage collection off: no cycles are made here, and it would scan all actions."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _num_program_actions(layout: Layout, num_layers: int) -> int:
    """Returns how many actions of a pipeline take as long as the program of one stage."""
    copies = layout.offload != "none" or layout.kv_tier != "device"
    each = _COPIED_ACTIONS if copies else _KEPT_ACTIONS
    return _PROGRAM_ACTIONS + int(each * layout.num_chunks * num_layers)


def _num_actions(layout: Layout, rows: int) -> int:
    """Returns the number of actions of `rows` rows in a lowered schedule, or a few more.

    Counts copies of all chunks, also of those that are not copied.
    """
    stages, chunks = layout.stages * layout.virtual, layout.num_chunks
    computes = 3 if splits_backward(layout.schedule) else 2
    copies = 0 if layout.offload == "none" else 2
    copies *= 2 if TIERS[layout.activation_tier].behind_host else 1
    copies += 0 if layout.kv_tier == "device" else 4
    units, passes = stages * chunks, 4 * (stages - 1) * chunks
    if layout.schedule in SHARED_UNIT_SCHEDULES:
        # Each rank of a shared unit has an action of its own.
        ahead = range(stages)
        units = sum((stages - 1 - i) * (stages - i) + i * (i + 1) for i in ahead)
        units += stages * (chunks - stages + 1)
        # Hidden states pass from each share to each that needs some of them; K/V and dK/dV pass
        # from each rank to all others.
        passes += 16 * math.comb(stages, 3) + 2 * stages * (stages - 1) * chunks
    return rows * (units * (computes + copies) + passes)


def _few_rows(rows: int, warm_up: int, every: int) -> int:
    """Returns the fewest rows that show whether a pipeline repeats itself, or all."""
    if not every:
        return rows
    few = warm_up + 2 * every + 1
    few += (rows - few) % every
    # An attempt that may fail should cost much less than simulating all rows.
    return few if 2 * few <= rows else rows


def _reduce_seconds(request: ClusterRequest, layout: Layout) -> float:
    """Seconds of a ring all-reduce of the largest stage's gradients over R replicas.

    2 (R - 1) / R of them pass over each link. n sequence-parallel devices first reduce-scatter
    among themselves and all-gather in the end, so 1 / n of the gradients passes between replicas.
    Of sharded gradients those seconds that no compute hides.
    """
    if layout.devices == layout.stages:
        return 0.0
    if layout.sharded:
        parts = request.bounds_of_layout
        cost, bounds = parts.cost(layout), parts.bounds(layout)
        return exposed_reduce_seconds(cost, bounds, layout.saved, order=layout.order)
    largest = request.bounds_of_layout.gradient_bytes(layout)
    sp, replicas = layout.sp, layout.replicas
    seconds = 2 * (sp - 1) / sp * largest / request.group_bytes_per_second(sp)
    within = layout.devices <= request.gpus_per_node and request.node_bytes_per_second
    rate = within or request.link_bytes_per_second
    return seconds + 2 * (replicas - 1) / replicas * largest / sp / rate


def _over(num_bytes: int, budget_bytes: int | None) -> int:
    return 0 if budget_bytes is None else max(0, num_bytes - budget_bytes)
