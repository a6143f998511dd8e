"""Plans for several devices: stages, replicas, chunks, cut, schedule and what is kept of frames.

Candidates are simulated, the most promising first; what does not fit on any one rank is rejected.
Frames follow one rule on all stages, and K/V stay on the device: this searches layouts, the solver
for one device searches frames. Knows nothing of how a layout is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from sppo_hf.errors import ConfigError
from sppo_hf.planning.cost import StageCost
from sppo_hf.planning.modes import Saved
from sppo_hf.planning.partition import Bounds, PrefixCost, balanced_bounds, ramp_bounds
from sppo_hf.planning.pipeline_cost import OffloadRule, PipelineCost
from sppo_hf.planning.programme import Budgets
from sppo_hf.planning.stages import StageWeights
from sppo_hf.schedule.formulas import bubble_fraction as formula_bubble
from sppo_hf.schedule.formulas import peak_units
from sppo_hf.schedule.generate import INTERLEAVED, Size, generate
from sppo_hf.schedule.lower import lower
from sppo_hf.schedule.pipeline import bubble_fraction, simulate_pipeline

_SCHEDULES = ("seq1f1b", "zb_seq1f1b", "interleaved_seq1f1b")
# What is kept of frames, and what of that leaves, fastest first.
_FRAMES: tuple[tuple[Saved, OffloadRule], ...] = (
    ("whole", "none"),
    ("whole", "sppo"),
    ("products", "none"),
    ("products", "full"),
    ("skeleton", "none"),
    ("skeleton", "full"),
)
_LEAST_CHUNK_TOKENS, _MOST_CHUNK_TOKENS = 2048, 32_768
_MOST_UNITS = 1024
# A ramp idles less than the formula of equal costs says, at best about half.
_RAMP_SHARE = 0.5


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

    partition: Literal["flops", "ramp"]
    """How it is cut."""

    saved: Saved
    """What is kept of frames."""

    offload: OffloadRule
    """What of that leaves the device."""


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
        if self.layout.offload != "none":
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


def solve_cluster(question: ClusterQuestion, *, keep: int = 5) -> ClusterAnswer:
    """Finds the fastest layouts.

    Candidates are taken in the order of an estimate, compute over ranks and the formula's idle
    time, until it exceeds the slowest of those to keep.

    Args:
        question: what is asked.
        keep: how many to return.

    Raises:
        ConfigError: no number of stages and replicas fits the devices, rows and layers.
    """
    ranked = sorted((_estimated_seconds(question, x), x) for x in layouts(question))
    if not ranked:
        raise ConfigError(
            f"{question.gpus} devices cannot share {question.rows} rows of "
            f"{question.total_tokens:,} tokens among stages of {question.cost.shape.num_layers} "
            "layers. Allowed: replicas that divide devices and rows, at most one stage per layer, "
            f"and at most {_MOST_UNITS:,} chunks on a rank. Remedy: more rows, or fewer devices."
        )
    best: list[ClusterPlan] = []
    closest: ClusterPlan | None = None
    tried = 0
    hopeless: list[tuple[int, Layout]] = []
    for seconds, layout in ranked:
        if len(best) >= keep and seconds > best[keep - 1].step_seconds:
            break
        least_bytes = _least_bytes(question, layout)
        if _over(least_bytes, question.budgets.device):
            hopeless.append((least_bytes, layout))
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
    num_layers, tokens = question.cost.shape.num_layers, question.total_tokens
    chunks = [
        2**power
        for power in range(12)
        if _LEAST_CHUNK_TOKENS * 2**power <= tokens <= _MOST_CHUNK_TOKENS * 2**power
    ]
    for stages in range(1, min(question.gpus, num_layers) + 1):
        replicas = question.gpus // stages
        if question.gpus % stages or question.rows % replicas:
            continue
        for num_chunks in chunks or [1]:
            if num_chunks * question.rows // replicas > _MOST_UNITS:
                continue
            yield from _variants(stages, replicas, num_chunks, num_layers)


def simulate_layout(question: ClusterQuestion, layout: Layout) -> ClusterPlan:
    """Simulates one layout; it need not fit."""
    cost, rows = question.cost, question.rows // layout.replicas
    bounds = _bounds(question, layout)
    size = Size(layout.stages, rows, layout.num_chunks, layout.virtual)
    schedule = generate(layout.schedule, size)
    costs = PipelineCost.of(
        schedule,
        cost,
        bounds,
        saved=layout.saved,
        offload=layout.offload,
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
    peaks = tuple(timeline.peak(f"{rank}.device").num_bytes for rank in range(layout.stages))
    hosts = [timeline.peak(f"{rank}.host").num_bytes for rank in range(layout.stages)]
    # Neighbouring stages share a node; replicas fill it up.
    shared = min(question.gpus_per_node, question.gpus)
    host_bytes = sum(sorted(hosts * layout.replicas, reverse=True)[:shared])
    again = sum(
        cost.recompute_seconds(layer, end - start, layout.saved)
        for start, end in bounds
        for layer in range(cost.shape.num_layers)
    )
    compute = sum(timeline.busy_seconds(f"{rank}.compute") for rank in range(layout.stages))
    budgets = question.budgets
    return ClusterPlan(
        layout=layout,
        layers=costs.stages,
        bounds=bounds,
        step_seconds=timeline.end_seconds,
        tokens_per_second=question.rows * question.total_tokens / timeline.end_seconds,
        bubble_fraction=bubble_fraction(timeline),
        recompute_fraction=rows * again / compute,
        peak_bytes=peaks,
        host_bytes=host_bytes,
        missing_bytes=_over(max(peaks), budgets.device) + _over(host_bytes, budgets.host),
    )


def _variants(stages: int, replicas: int, num_chunks: int, num_layers: int) -> Iterator[Layout]:
    cuts: tuple[Literal["flops", "ramp"], ...] = ("flops", "ramp")
    for schedule in _SCHEDULES if stages > 1 else _SCHEDULES[:1]:
        for virtual in (2, 4) if schedule in INTERLEAVED else (1,):
            if stages * virtual > num_layers:
                continue
            # A ramp needs chunks to rise and fall over, and is for filling a pipeline.
            for partition in cuts if num_chunks >= 3 and stages > 1 else cuts[:1]:
                for saved, offload in _FRAMES:
                    yield Layout(
                        schedule, stages, replicas, virtual, num_chunks, partition, saved, offload
                    )


def _bounds(question: ClusterQuestion, layout: Layout) -> Bounds:
    cut = ramp_bounds if layout.partition == "ramp" else balanced_bounds
    curve = PrefixCost.of(question.cost.shape)
    return cut(curve, question.total_tokens, layout.num_chunks)


def _estimated_seconds(question: ClusterQuestion, layout: Layout) -> float:
    """Compute over ranks, and the formula's idle time."""
    cost, rows = question.cost, question.rows // layout.replicas
    seconds = 0.0
    for start, end in _bounds(question, layout):
        seconds += cost.head_seconds(end - start)
        seconds += sum(
            cost.forward_seconds(i, start, end)
            + cost.backward_seconds(i, start, end)
            + cost.recompute_seconds(i, end - start, layout.saved)
            for i in range(cost.shape.num_layers)
        )
    size = Size(layout.stages, rows, layout.num_chunks, layout.virtual)
    idle = float(formula_bubble(layout.schedule, size))
    if layout.partition == "ramp":
        idle *= _RAMP_SHARE
    return seconds * rows / layout.stages / (1.0 - idle)


def _least_bytes(question: ClusterQuestion, layout: Layout) -> int:
    """Less than any rank of this layout can do with, found without simulating it.

    The lightest equal share of the model's states and of a row's K/V, and where frames stay, the
    units that the last rank holds at least, each as small as the smallest chunk's.
    """
    shape, stages = question.cost.shape, layout.stages
    whole = StageWeights.of(shape, range(shape.num_layers))
    fixed = (whole.weights + whole.gradients + whole.optimizer) // stages
    layers = range(shape.num_layers)
    tokens = question.total_tokens
    fixed += sum(question.cost.kv_bytes(layer, tokens) for layer in layers) // stages
    if layout.offload != "none":
        return fixed
    size = Size(stages, question.rows // layout.replicas, layout.num_chunks, layout.virtual)
    shortest = min(end - start for start, end in _bounds(question, layout))
    held = min(peak_units(layout.schedule, size)) / (stages * layout.virtual)
    frames = sum(question.cost.frame_bytes(layer, shortest, layout.saved) for layer in layers)
    return fixed + int(held * frames)


def _reduce_seconds(question: ClusterQuestion, costs: PipelineCost, replicas: int) -> float:
    """A ring all-reduce of the largest stage's gradients: 2 (R - 1) / R of them over each link."""
    largest = max(StageWeights.of(question.cost.shape, s).gradients for s in costs.stages)
    return 2 * (replicas - 1) / replicas * largest / question.link_bytes_per_second


def _over(num_bytes: int, budget_bytes: int | None) -> int:
    return 0 if budget_bytes is None else max(0, num_bytes - budget_bytes)
