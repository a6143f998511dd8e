"""Plans for several devices: stages, replicas, chunks, cut, schedule and what is kept of frames.

Candidates are simulated, the most promising first; what does not fit on any one rank is rejected.
Frames and K/V follow one rule on all stages: this searches layouts, the solver for one device
searches frames. Knows nothing of how a layout is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from sppo_hf.errors import ConfigError
from sppo_hf.planning.cost import StageCost
from sppo_hf.planning.glance import Glance
from sppo_hf.planning.layouts import Layout, SearchSpace
from sppo_hf.planning.partition import Bounds
from sppo_hf.planning.pipeline_cost import PipelineCost
from sppo_hf.planning.programme import Budgets
from sppo_hf.planning.stages import StageWeights
from sppo_hf.schedule.formulas import peak_units
from sppo_hf.schedule.generate import INTERLEAVED, Size, generate
from sppo_hf.schedule.lower import lower
from sppo_hf.schedule.pipeline import period_seconds, simulate_pipeline
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.timeline import Timeline

__all__ = [
    "ClusterAnswer",
    "ClusterPlan",
    "ClusterQuestion",
    "Layout",
    "SearchSpace",
    "layouts",
    "simulate_layout",
    "solve_cluster",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterQuestion:
    """Rows of a length, and devices to train them on."""

    cost: StageCost
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

    link_bytes_per_second: float = 25 * 2.0**30
    """Of the slowest hop between neighbours, each way."""

    space: SearchSpace = field(default_factory=SearchSpace)
    """What may be chosen."""

    glance: Glance = field(init=False, repr=False, compare=False)
    """What layouts take at least."""

    def __post_init__(self) -> None:
        """Prepare to look at layouts."""
        glance = Glance(self.cost, self.total_tokens, self.rows)
        object.__setattr__(self, "glance", glance)

    @property
    def ranks_per_node(self) -> int:
        """Devices that share a host, if there are so many."""
        return min(self.gpus_per_node, self.gpus)


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
    """What budgets lack, over device and host; 0 where it fits."""

    @property
    def why(self) -> str:
        """What the time goes into, in words."""
        parts = [f"idle {self.bubble_fraction:.1%}"]
        if self.recompute_fraction > 0:
            parts.append(f"recompute {self.recompute_fraction:.1%}")
        if self.layout.offload != "none" or self.layout.kv_tier != "device":
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


def solve_cluster(question: ClusterQuestion, *, keep: int = 5, slack: float = 0.0) -> ClusterAnswer:
    """Finds the fastest layouts.

    Candidates are taken in the order of the least time that they can take, until it exceeds the
    slowest of those to keep.

    Args:
        question: what is asked.
        keep: how many to return.
        slack: how much longer than necessary their steps may take, as a share; a search that need
            not be sure of the last percent is many times shorter.

    Raises:
        ConfigError: no number of stages and replicas fits the devices, rows and layers.
    """
    glance, budgets = question.glance, question.budgets
    ranked = sorted((glance.seconds(x), x) for x in layouts(question))
    if not ranked:
        raise ConfigError(
            f"{question.gpus} devices cannot share {question.rows} rows of "
            f"{question.total_tokens:,} tokens among stages of {question.cost.shape.num_layers} "
            "layers. Allowed: replicas that divide devices and rows, at most one stage per layer, "
            f"and at most {question.space.most_units:,} chunks on a rank. Remedy: more rows, or "
            "fewer devices."
        )
    best: list[ClusterPlan] = []
    closest: ClusterPlan | None = None
    tried = 0
    hopeless: list[tuple[int, Layout]] = []
    for seconds, layout in ranked:
        if len(best) >= keep and seconds * (1.0 + slack) > best[keep - 1].step_seconds:
            break
        lacking = _over(glance.device_bytes(layout), budgets.device)
        lacking += _over(glance.host_bytes(layout, question.ranks_per_node), budgets.host)
        if lacking:
            hopeless.append((lacking, layout))
            continue
        tried += 1
        plan = simulate_layout(question, layout)
        if not plan.missing_bytes:
            best = sorted([*best, plan], key=lambda p: p.step_seconds)[:keep]
        elif closest is None or plan.missing_bytes < closest.missing_bytes:
            closest = plan
    if not best and closest is None:
        closest = simulate_layout(question, min(hopeless)[1])
    return ClusterAnswer(best=tuple(best), closest=closest, tried=tried, candidates=len(ranked))


def layouts(question: ClusterQuestion) -> Iterator[Layout]:
    """Yields every layout that is worth a look."""
    return question.space.layouts(
        gpus=question.gpus,
        rows=question.rows,
        total_tokens=question.total_tokens,
        num_layers=question.cost.shape.num_layers,
    )


def simulate_layout(question: ClusterQuestion, layout: Layout) -> ClusterPlan:
    """Simulates one layout; it need not fit.

    A step's rows are alike, so a pipeline soon repeats itself: of many rows only as many are
    simulated as show it, and what the others add is known (`period_seconds`).
    """
    cost, rows = question.cost, question.rows // layout.replicas
    bounds = question.glance.bounds(layout)
    warm_up, every = _warm_up(layout, rows)
    count = _few_rows(rows, warm_up, every)
    while True:
        schedule, costs, timeline = _simulated(question, layout, count)
        if count == rows:
            more = 0.0
            break
        period = period_seconds(schedule, timeline, warm_up=warm_up, every=every)
        if period is not None:
            more = (rows - count) // every * period
            break
        count = rows if 4 * count > rows else 2 * count + (rows - 2 * count) % every
    step_seconds = timeline.end_seconds + more
    peaks = tuple(timeline.peak(f"{rank}.device").num_bytes for rank in range(layout.stages))
    hosts = [timeline.peak(f"{rank}.host").num_bytes for rank in range(layout.stages)]
    # Neighbouring stages share a node; replicas fill it up.
    fullest = sorted(hosts * layout.replicas, reverse=True)
    host_bytes = sum(fullest[: question.ranks_per_node])
    again = sum(
        cost.recompute_seconds(layer, end - start, layout.saved)
        for start, end in bounds
        for layer in range(cost.shape.num_layers)
    )
    busy = sum(timeline.busy_seconds(f"{rank}.compute") for rank in range(layout.stages)) / count
    budgets = question.budgets
    return ClusterPlan(
        layout=layout,
        layers=costs.stages,
        bounds=bounds,
        step_seconds=step_seconds,
        tokens_per_second=question.rows * question.total_tokens / step_seconds,
        bubble_fraction=1.0 - rows * busy / (layout.stages * step_seconds),
        recompute_fraction=again / busy,
        peak_bytes=peaks,
        host_bytes=host_bytes,
        missing_bytes=_over(max(peaks), budgets.device) + _over(host_bytes, budgets.host),
    )


def _simulated(
    question: ClusterQuestion, layout: Layout, rows: int
) -> tuple[Schedule, PipelineCost, Timeline]:
    """Simulates `rows` rows in each pipeline."""
    size = Size(layout.stages, rows, layout.num_chunks, layout.virtual)
    schedule = generate(layout.schedule, size)
    costs = PipelineCost.of(
        schedule,
        question.cost,
        question.glance.bounds(layout),
        saved=layout.saved,
        offload=layout.offload,
        kv_tier=layout.kv_tier,
        link_bytes_per_second=question.link_bytes_per_second,
    )
    reduced = layout.replicas > 1
    if reduced:
        costs = replace(costs, reduce_seconds=_reduce_seconds(question, costs, layout.replicas))
    timeline = simulate_pipeline(
        lower(schedule, leaves=costs.leaves, reduce=reduced),
        seconds=costs.seconds,
        changes=costs.changes,
        standing=costs.standing(),
    )
    return schedule, costs, timeline


def _warm_up(layout: Layout, rows: int) -> tuple[int, int]:
    """Rows that a pipeline has begun when the first comes back, and rows that pass it together.

    The second is 0 where groups of rows are not all of one size.
    """
    size = Size(layout.stages, rows, layout.num_chunks, layout.virtual)
    units = peak_units(layout.schedule, size)[0]
    warm_up = -(-units // (layout.num_chunks * layout.virtual))
    if layout.schedule not in INTERLEAVED:
        return warm_up, 1
    every = -(-layout.stages // layout.num_chunks)
    return warm_up, 0 if rows % every else every


def _few_rows(rows: int, warm_up: int, every: int) -> int:
    """Returns the fewest rows in which a pipeline can be seen to repeat itself, or all."""
    if not every:
        return rows
    few = warm_up + 2 * every + 1
    few += (rows - few) % every
    # A try that may fail should cost much less than doing without.
    return few if 2 * few <= rows else rows


def _reduce_seconds(question: ClusterQuestion, costs: PipelineCost, replicas: int) -> float:
    """A ring all-reduce of the largest stage's gradients: 2 (R - 1) / R of them over each link."""
    largest = max(StageWeights.of(question.cost.shape, s).gradients for s in costs.stages)
    return 2 * (replicas - 1) / replicas * largest / question.link_bytes_per_second


def _over(num_bytes: int, budget_bytes: int | None) -> int:
    return 0 if budget_bytes is None else max(0, num_bytes - budget_bytes)
