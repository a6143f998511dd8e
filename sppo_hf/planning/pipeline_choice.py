"""Choice of a pipeline's schedule and chunks, where the settings leave them open, by simulation.

Also predicts the time of a step from the plans of all its stages. Without a hardware profile a
fixed rule decides. Stages, ranks and rows are given; `cluster` searches layouts over devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError
from sppo_hf.planning.activation_modes import Saved
from sppo_hf.planning.choices import (
    DeviceFacts,
    named_loss_tile,
    read_budgets,
    read_choices,
)
from sppo_hf.planning.chunk_bounds import Bounds, names_cut
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.hardware import UNKNOWN_LINK
from sppo_hf.planning.memory import Budgets
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.pipeline_cost import OffloadRule, PipelineCost
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.stages import MIN_CHUNK_TOKENS, bounds_with_count, pipeline_bounds
from sppo_hf.planning.tiers import DEVICE, HOST, TIERS, Tier, tiers_behind_host
from sppo_hf.schedule.actions import Action, Kind, is_kv_copy, kv_copy_pass
from sppo_hf.schedule.generate import MSP, Size, generate
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import bubble_fraction, simulate_pipeline
from sppo_hf.schedule.timeline import Timeline

DEFAULT_SCHEDULE = "seq1f1b"
"""Schedule for "auto" without a hardware profile: of those with whole backwards and one stage on a
rank it idles least."""

AUTO_SCHEDULES: tuple[str, ...] = (DEFAULT_SCHEDULE, "zb_seq1f1b")
"""Schedules that "auto" chooses from, for one stage on a rank."""

# Limit on the actions of one simulation, about a third of a second.
_MAX_ACTIONS = 30_000
_CHUNK_COUNT_FACTORS = (0.5, 1, 2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineChoice:
    """The schedule and the chunks of a pipeline."""

    schedule: str
    bounds: Bounds

    reason: str


def default_choice(
    config: SPPOConfig,
    shape: ModelShape,
    total_tokens: int,
    *,
    micro_batches: int,
    device_kind: str,
    may_share: bool = False,
) -> PipelineChoice:
    """Returns the choice without a hardware profile: four units a stage or more.

    Fewer where rows are short or the settings fix the chunks.

    Raises:
        ConfigError: the settings do not fit this length.
    """
    shares = may_share and config.pp_msp == "on"
    bounds = pipeline_bounds(
        config,
        shape,
        total_tokens,
        stages=config.pp_size,
        # With shared units each micro-batch fills and drains the pipeline by itself.
        micro_batches=1 if shares else micro_batches,
        device_kind=device_kind,
    )
    if shares and not names_cut(config) and len(bounds) < config.pp_size <= total_tokens:
        bounds = bounds_with_count(config, shape, total_tokens, config.pp_size)
    name = DEFAULT_SCHEDULE if config.pp_schedule == "auto" else config.pp_schedule
    if shares:
        if len(bounds) < config.pp_size:
            raise ConfigError(
                f"pp_msp='on' with pp_size={config.pp_size} and {len(bounds)} chunks of "
                f"{total_tokens} tokens: ranks share the first and the last chunks of each stage. "
                "Allowed: as many chunks as ranks, or more. Remedy: more chunks (num_chunks, "
                "chunk_tokens), longer sequences, or pp_msp='off'."
            )
        name = MSP
    reason = "set by the user" if _is_set(config) else "auto: by rule, as no speeds are known"
    return PipelineChoice(schedule=name, bounds=bounds, reason=reason)


def choose_pipeline(
    config: SPPOConfig,
    shape: ModelShape,
    total_tokens: int,
    *,
    batch_rows: int,
    device: DeviceFacts,
    dtype_name: str,
    micro_batches: int,
    may_share: bool = False,
) -> PipelineChoice:
    """Chooses by simulating candidates with the device's speeds.

    Each candidate is simulated with the first of `_activation_rules` that fits; each stage's own
    plan decides anew later. Finer cuts are tried as long as simulating them is fast.

    Raises:
        ConfigError: the settings do not fit this length.
    """
    batch: dict[str, Any] = {"micro_batches": micro_batches, "may_share": may_share}
    ruled = default_choice(config, shape, total_tokens, device_kind=device.kind, **batch)
    if _is_set(config) or device.profile is None:
        return ruled
    cost = ModelCost(
        shape=shape,
        profile=device.profile,
        dtype_name=dtype_name,
        batch_rows=batch_rows,
        tile_tokens=named_loss_tile(config),
    )
    search = _Search(config, cost, micro_batches, device)
    for bounds in _cuts(config, shape, ruled.bounds, device.kind):
        search.add_candidate(ruled.schedule, bounds)
    if config.pp_schedule == "auto" and config.pp_msp != "on":
        cuts = [bounds for *_, bounds in sorted(search.found)]
        for bounds in cuts[:2]:
            for name in AUTO_SCHEDULES[1:]:
                search.add_candidate(name, bounds)
        # Shared units leave little idle time, so coarse cuts may be the best.
        for bounds in cuts if may_share and config.pp_msp == "auto" else ():
            search.add_candidate(MSP, bounds)
    missing, seconds, _, name, bounds = min(search.found)
    reason = f"auto: {seconds:,.3g} s a step, the fastest of {len(search.found)} simulated"
    others = [
        f"{other} {min(found)[1]:,.3g} s"
        for other in dict.fromkeys((ruled.schedule, *AUTO_SCHEDULES, MSP))
        if other != name and (found := [one for one in search.found if one[3] == other])
    ]
    if others:
        reason += f" ({', '.join(others)})"
    if missing:
        reason = f"auto: of {len(search.found)} simulated the one that lacks least memory"
    return PipelineChoice(schedule=name, bounds=bounds, reason=reason)


class _Search:
    """The candidates simulated so far."""

    def __init__(
        self, config: SPPOConfig, cost: ModelCost, micro_batches: int, device: DeviceFacts
    ) -> None:
        self._config, self._cost, self._micro_batches = config, cost, micro_batches
        self._budgets = read_budgets(config, device)
        self._activation_rules = list(_activation_rules(config, device))
        away = (tier for tier in read_choices(config, device).tiers if tier != DEVICE)
        self._activation_tier = next(away, HOST)
        self.found: list[tuple[int, float, int, str, Bounds]] = []
        """(bytes over budget, step seconds, index, schedule, chunks); the minimum is chosen."""

    def add_candidate(self, name: str, bounds: Bounds) -> None:
        """Simulates a candidate, unless it has too many actions."""
        config = self._config
        if name == MSP and len(bounds) < config.pp_size:
            return
        stages = config.pp_size * config.pp_virtual_stages
        few = min(self._micro_batches, _simulated_micro_batches(config.pp_size)[1])
        if self.found and 6 * few * len(bounds) * stages > _MAX_ACTIONS:
            return
        ways: list[tuple[int, float]] = []
        for saved, offload, kv_tier in self._activation_rules:
            ways.append(self._simulate(name, bounds, saved, offload, kv_tier))
            if not ways[-1][0]:
                break
        self.found.append((*min(ways), len(self.found), name, bounds))

    def _simulate(
        self, name: str, bounds: Bounds, saved: Saved, offload: OffloadRule, kv_tier: Tier
    ) -> tuple[int, float]:
        config = self._config
        missing = 0

        def seconds_of(micro_batches: int) -> float:
            nonlocal missing
            size = Size(config.pp_size, micro_batches, len(bounds), config.pp_virtual_stages)
            schedule = generate(name, size)
            costs = PipelineCost(
                schedule,
                self._cost,
                bounds,
                saved=saved,
                offload=offload,
                activation_tier=self._activation_tier,
                kv_tier=kv_tier,
                link_bytes_per_second=UNKNOWN_LINK,
            )
            timeline = costs.simulate(costs.lowered(schedule))
            missing = max(missing, _missing(timeline, config.pp_size, self._budgets))
            return timeline.end_seconds

        seconds = _extrapolated_seconds(seconds_of, self._micro_batches, config.pp_size)
        return missing, seconds


StageSeconds = Mapping[tuple[Kind, int | None], list[float]]
"""Seconds of a stage's actions: by kind and part, [chunks]."""


def stage_seconds(plan: Plan) -> StageSeconds:
    """Returns how long each kind of a stage's units takes, by chunk: layers and modes added up.

    Parts are those of K/V streams; of a unit that ranks share the seconds are those of the whole.
    """
    assert plan.cost is not None, "the caller has a hardware profile"
    program, cost = plan.program(), plan.cost
    tables, chunks = program.tables, plan.num_chunks
    ahead = program.points.num_forward
    forward = program.seconds[:ahead].reshape(chunks, -1).sum(axis=1)
    backward = program.seconds[ahead:].reshape(chunks, -1).sum(axis=1)[::-1]
    weight = cost.unit_seconds(plan.bounds).weight[tables.kind_of].sum(axis=0)
    away = program.offloaded_bytes.sum(axis=1)
    tier = plan.kv_tier
    found: dict[tuple[Kind, int | None], list[float]] = {}
    for part, come, leave in (
        (0, tables.kv_in_forward, tables.kv_out_forward),
        (1, tables.kv_in_backward, tables.kv_out_backward),
    ):
        into, out = (tables.of_layers(side).sum(axis=1).tolist() for side in (come, leave))
        found["K", part] = [cost.h2d_seconds(size, both=True) for size in into]
        found["O", part] = [cost.d2h_seconds(size, both=True) for size in out]
        if TIERS[tier].behind_host:
            found["L", part + 1] = [cost.load_seconds(tier, size) for size in into]
            found["S", part + 1] = [cost.store_seconds(tier, size) for size in out]
    names = list(TIERS)
    stored = {
        name: np.where(program.tiers == names.index(name), program.offloaded_bytes, 0).sum(axis=1)
        for name in tiers_behind_host()
    }
    passed: dict[Kind, Callable[[Tier, float], float]] = {
        "S": cost.store_seconds,
        "L": cost.load_seconds,
    }
    for kind, of in passed.items():
        found[kind, None] = [
            sum((of(name, float(sizes[chunk])) for name, sizes in stored.items()), 0.0)
            for chunk in range(chunks)
        ]
    found["F", None] = forward.tolist()
    found["B", None] = backward.tolist()
    found["I", None] = (backward - weight).tolist()
    found["W", None] = weight.tolist()
    found["D", None] = [cost.d2h_seconds(size, both=True) for size in away.tolist()]
    found["H", None] = [cost.h2d_seconds(size, both=True) for size in away.tolist()]
    return found


def pipeline_step(
    make: Callable[[int], Schedule],
    stages: Mapping[int, StageSeconds],
    *,
    micro_batches: int,
    ranks: int,
    message_seconds: Callable[[int, int], float],
    reduce_seconds: float = 0.0,
) -> tuple[float, float]:
    """Returns the seconds of a pipeline's step, and the share of it in which ranks are idle.

    Ranks that share a unit take equal shares of its time; K/V and weights that pass between them
    are not counted.

    `make` returns the lowered schedule of a number of micro-batches, `message_seconds` the seconds
    of the message that a (stage, chunk) receives; `stages` are the `stage_seconds` of each stage.
    """
    idle = 0.0

    def seconds_of(count: int) -> float:
        nonlocal idle
        schedule = make(count)

        def seconds(action: Action) -> float:
            chunk = schedule.chunk(action)
            if action.kind in ("SEND_F", "SEND_B"):
                return message_seconds(action.stage + (action.kind == "SEND_F"), chunk)
            if action.kind == "REDUCE_GRAD":
                return reduce_seconds
            way = kv_copy_pass(action) if is_kv_copy(action) else None
            of_kind = stages[action.stage].get((action.kind, way))
            return 0.0 if of_kind is None else of_kind[chunk] * float(schedule.share(action))

        timeline = simulate_pipeline(schedule, seconds=seconds)
        idle = bubble_fraction(timeline)
        return timeline.end_seconds

    seconds = _extrapolated_seconds(seconds_of, micro_batches, ranks)
    return seconds, idle


def _extrapolated_seconds(
    seconds_of: Callable[[int], float], micro_batches: int, ranks: int
) -> float:
    """Extrapolates the seconds of a step from simulations of a few micro-batches."""
    fewer, few = _simulated_micro_batches(ranks)
    if micro_batches <= few:
        return seconds_of(micro_batches)
    before, after = seconds_of(fewer), seconds_of(few)
    return after + (micro_batches - few) * (after - before) / (few - fewer)


def _simulated_micro_batches(ranks: int) -> tuple[int, int]:
    """Two numbers of micro-batches, multiples of `ranks`, between which a step grows evenly."""
    return 2 * ranks, 3 * ranks


def _is_set(config: SPPOConfig) -> bool:
    return names_cut(config) and (config.pp_schedule != "auto" or config.pp_msp == "on")


def _cuts(
    config: SPPOConfig, shape: ModelShape, ruled: Bounds, device_kind: str
) -> Iterator[Bounds]:
    """Yields the default chunks, then coarser and finer ones where the settings leave them open."""
    yield ruled
    if names_cut(config):
        return
    total_tokens = ruled[-1][1]
    most = max(1, total_tokens // MIN_CHUNK_TOKENS[device_kind])
    numbers = {min(most, max(1, round(times * len(ruled)))) for times in _CHUNK_COUNT_FACTORS}
    for number in sorted(numbers - {len(ruled)}):
        yield bounds_with_count(config, shape, total_tokens, number)


def _activation_rules(
    config: SPPOConfig, device: DeviceFacts
) -> Iterator[tuple[Saved, OffloadRule, Tier]]:
    """Yields what is saved, how much of it is offloaded, and the tier of K/V; fastest first."""
    choices = read_choices(config, device)
    rules: dict[str, tuple[OffloadRule, ...]] = {
        "none": ("none",),
        "full": ("full",),
        "sppo": ("sppo",),
        "auto": ("none", "full") if len(choices.tiers) > 1 else ("none",),
    }
    for kv_tier in choices.kv_tiers:
        for saved in choices.saved:
            for rule in rules[config.offload]:
                yield saved, rule, kv_tier


def _missing(timeline: Timeline, ranks: int, budgets: Budgets) -> int:
    """Bytes by which the fullest rank exceeds its budgets."""
    missing = 0
    for tier, budget in budgets.by_tier.items():
        if budget is not None:
            peak = max(timeline.peak(f"{rank}.{tier}").num_bytes for rank in range(ranks))
            missing += max(0, peak - budget)
    return missing
