"""Feasibility: does this model at this length fit that machine, and how fast is it?

`sppo estimate`, `sppo plan` and the notebooks use this. `request_for` makes a request of a model's
config, settings and a hardware profile, and `assess_request` plans it (`make_plan`). If nothing
fits, the result names the budget that is exceeded first. The machine need not be this one, so
nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, product, zip_longest
from typing import Literal, NamedTuple

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import BudgetError, ConfigError
from sppo_hf.planning.activation_modes import SAVED_BY_RECOMPUTE
from sppo_hf.planning.choices import (
    DeviceFacts,
    is_fixed,
    may_rerun_attention,
    read_budgets,
    read_choices,
    read_orders,
    read_placements,
    read_tiles,
)
from sppo_hf.planning.chunk_bounds import (
    TARGET_CHUNK_TOKENS,
    Bounds,
    chunk_bounds,
    chunk_cuts,
    even_bounds,
    most_chunks,
    names_cut,
    partitions_of,
)
from sppo_hf.planning.config_file import (
    check_config,
    classifier_outputs,
    count_embedded,
    has_encoders,
    text_config,
)
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions, Order
from sppo_hf.planning.hardware import HardwareProfile
from sppo_hf.planning.lowering import estimate, lower
from sppo_hf.planning.machine import host_reserve_bytes
from sppo_hf.planning.memory import Budgets, MemoryEstimate
from sppo_hf.planning.model_profile import FLOAT32_BYTES, LoraShape, Tracer, Training, find_profile
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.plan import Plan, PlanRequest, make_plan
from sppo_hf.planning.solve import (
    BudgetViolation,
    Choices,
    fits,
    fixed_policies,
    fixed_policy,
    kv_modes_of,
    min_memory,
    min_missing_bytes,
    missing_bytes,
    over_budget,
    simulate_plan,
    tiled_layers,
    with_kv,
)
from sppo_hf.planning.tiers import HOST, TIERS, Tier, offload_tiers
from sppo_hf.schedule.timeline import Timeline

_MOST_CHUNKS = 1024
# Limits below which planning takes seconds: units (chunks times layers) that are planned and
# simulated, and chunks that are solved for.
_MOST_UNITS = 2**15
_MOST_SOLVED_CHUNKS = 512

# Resolution and limit of the longest row that fits.
_LENGTH_STEP_TOKENS = 1024
_LONGEST_TOKENS = 2**27

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Supported dtypes, and the bytes of one element."""

CastBy = Literal["nothing", "autocast", "fsdp2"]
"""What casts float32 adapters to a 16-bit model's dtype: autocast their products; FSDP2, under
which layers have no kernels of Liger's either, gathers them in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """Result of a request."""

    request: PlanRequest
    plan: Plan | None
    """The plan; None if nothing fits."""

    first_limit: BudgetViolation | None
    """The first budget that the closest plan exceeds; None if a plan fits."""

    estimate: MemoryEstimate
    """Bytes of the plan, or of the closest one."""

    budgets: Budgets
    max_seq_len: int
    """The longest row that fits these budgets and settings, in tokens; 0 if none does."""

    enough: Mapping[Tier, int] = field(default_factory=dict[Tier, int])
    """If nothing fits: for each tier, a capacity with which it would fit if all else stays the
    same. Not always the smallest such capacity. Tiers for which none is enough are left out."""

    forbidding: tuple[str, ...] = ()
    """If nothing fits: settings that the user fixed and without which a plan would fit."""

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.plan is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """Result of one policy, in the same chunks as the plan that it is compared with."""

    policy: str
    """"auto", "none", "full" or "sppo"."""

    recompute: str
    """Recomputation: "none", "selective", "full", or "mixed" if the solver chose several."""

    first_limit: BudgetViolation | None
    """The first exceeded budget; None if it fits."""

    estimate: MemoryEstimate
    """Predicted bytes of the policy's plan."""

    step_seconds: float | None
    """Simulated seconds of a step; None if it does not fit."""

    tokens_per_second: float | None
    """Simulated tokens per second; None if it does not fit."""


def request_for(
    model_config: object,
    config: SPPOConfig,
    *,
    profile: HardwareProfile,
    total_tokens: int,
    batch_rows: int = 1,
    accumulates: bool = False,
    images: bool = False,
    dtype_name: str = "bfloat16",
    lora_rank: int | None = None,
    cast_by: CastBy = "nothing",
    trace: Tracer,
) -> PlanRequest:
    """Builds a request.

    `model_config` is a Transformers config, or an object with the fields of a `config.json`; naming
    `offload_dir` gives the machine a disk. `profile` has its speeds, and its capacities where
    `config` names no budget. With `images`, rows have some (or sound), whose encoders run outside
    of the plan. `dtype_name` is one of `DTYPE_BYTES`, and `lora_rank` that of float32 adapters on
    all linear layers, which `cast_by` casts. `trace` makes the model's profile if it is not known.

    Raises:
        UnsupportedModelError: the engine refuses this family.
        ConfigError: a rank below one, sizes that make no model, or `images` for a model of text.
    """
    check_config(model_config)
    if images and not has_encoders(model_config):
        raise ConfigError(
            "--images is set, but this model's configuration has no encoder of images or sound "
            "(vision_config, audio_config). Remedy: leave it out."
        )
    size = DTYPE_BYTES[dtype_name]
    lora = None if lora_rank is None else LoraShape(rank=lora_rank)
    sharded, narrow = cast_by == "fsdp2", size < FLOAT32_BYTES
    if lora is not None and sharded:
        lora = replace(lora, dtype_bytes=size)
    elif lora is not None:
        lora = replace(lora, autocast=narrow and cast_by == "autocast")
    training = Training(
        dtype_bytes=size,
        parameter_bytes=size,
        lora=lora,
        layer_kernels=not sharded and _has_layer_kernels(config, profile),
    )
    shape = ModelShape.from_profile(find_profile(model_config, training, trace))
    outputs = classifier_outputs(model_config)
    if outputs is None:
        routed = bool(getattr(text_config(model_config), "output_router_logits", False))
        shape = replace(shape, router_loss=routed)
    else:
        shape = shape.with_classifier(outputs)
    if images:
        held = count_embedded(model_config) * shape.hidden_size * size
        shape = replace(shape, encoded_token_bytes=(held, 2 * held if lora is None else 0))
    return PlanRequest(
        shape=shape,
        config=config,
        device=DeviceFacts(
            kind=profile.kind,
            name=profile.name,
            memory_bytes={
                **{name: tier.profiled_bytes(profile) for name, tier in TIERS.items()},
                HOST: _host_bytes(profile),
            },
            profile=profile,
        ),
        total_tokens=total_tokens,
        batch_rows=batch_rows,
        accumulates=accumulates,
        dtype_name=dtype_name,
        by_layer_refusal=shape.by_layer_refusal,
    )


def _has_layer_kernels(config: SPPOConfig, profile: HardwareProfile) -> bool:
    """Whether a run of these settings on that machine is known to have Liger's kernels."""
    allowed = config.layer_kernels == "auto" and not config.compile
    return allowed and profile.layer_kernels is True


def _host_bytes(profile: HardwareProfile) -> int | None:
    """Returns the host bytes that a plan for that machine may use if no budget is named."""
    total = profile.host_bytes
    if total is None or profile.kind == "cpu":
        return total
    return total - host_reserve_bytes(total)


def assess_request(request: PlanRequest) -> PlanResult:
    """Plans a request; finds the longest row that fits and, if nothing fits, sufficient capacities.

    Raises:
        ConfigError: the settings do not fit this length.
    """
    plan = plan_for(request)
    placed = _placements(request)
    longest_tokens = _longest(placed, plan)
    fitting = PlanResult(
        request=request,
        plan=plan,
        first_limit=None,
        estimate=plan.estimate,
        budgets=plan.budgets,
        # The search tries lengths in steps and only the shortest chunks, so the requested length
        # may fit although the search found a smaller one.
        max_seq_len=max(longest_tokens, request.total_tokens),
    )
    if fits(plan.estimate, plan.budgets):
        return fitting
    limit, closest = _closest(placed, plan)
    return replace(
        fitting,
        plan=None,
        first_limit=limit,
        estimate=closest,
        max_seq_len=longest_tokens,
        enough={} if request.device.kind == "cpu" else _sufficient_bytes(placed, plan),
        forbidding=_forbidding(request),
    )


def _forbidding(request: PlanRequest) -> tuple[str, ...]:
    """Returns the settings that forbid the planner a plan that fits; none if there is no such."""
    names = ("offload", "recompute", "offload_kv")
    fixed = tuple(name for name in names if getattr(request.config, name) != "auto")
    free = replace(request, config=request.config.replace(**dict.fromkeys(fixed, "auto")))
    return fixed if fixed and is_possible(free) else ()


def is_possible(request: PlanRequest) -> bool:
    """Whether the batch fits; faster than `assess_request`.

    Raises:
        ConfigError: the settings do not fit this length.
    """
    plan = plan_for(request)
    return fits(plan.estimate, plan.budgets)


def _placements(request: PlanRequest) -> list[PlanRequest]:
    """Returns the request with each allowed placement of weights and optimizer."""
    places = read_placements(
        request.config,
        request.device,
        adapters=request.shape.lora is not None,
        by_layer="by_layer" in _orders(request),
    )
    return [request.with_placement(one) for one in places]


def plan_for(request: PlanRequest) -> Plan:
    """Makes the plan; if nothing fits, one that exceeds budgets and warns about it.

    Raises:
        ConfigError: the settings do not fit this length, or there are so many chunks and layers
            that planning would take minutes.
    """
    config = request.config
    _check_units(request)
    if request.device.kind == "cpu" and config.device_memory is not None:
        # On a CPU, activations are kept only within a budget that the settings name.
        try:
            return _plan_within_budgets(request, config)
        except BudgetError:
            pass
    # A run is refused if a named budget is exceeded; an answer has to describe the closest plan.
    for tier in TIERS.values():
        if tier.named(config) is not None:
            config = tier.with_budget(config, None)
    return _plan_within_budgets(request, config)


def _check_units(request: PlanRequest) -> None:
    config, kind, layers = request.config, request.device.kind, request.shape.num_layers
    ruled = is_fixed(config, request.device)
    ruled = ruled or (kind == "cpu" and config.device_memory is None)
    most = min(_MOST_UNITS // layers, _MOST_CHUNKS if ruled else _MOST_SOLVED_CHUNKS)
    if config.chunk_lengths is not None:
        num_chunks = len(config.chunk_lengths)
    elif config.num_chunks != "auto":
        num_chunks = config.num_chunks
    elif config.chunk_tokens is not None:
        num_chunks = -(-request.total_tokens // config.chunk_tokens)
    elif ruled or kind == "cpu":
        num_chunks = -(-request.total_tokens // TARGET_CHUNK_TOKENS[kind])
    else:
        num_chunks = most_chunks(request.total_tokens)
    # More chunks than tokens are refused where the chunks are made.
    if most < num_chunks <= request.total_tokens:
        raise ConfigError(
            f"{request.total_tokens:,} tokens in {num_chunks:,} chunks through {layers:,} layers "
            f"would take minutes to plan. Allowed for so many layers: {most:,} chunks. Remedy: set "
            f"num_chunks (--num-chunks) to {most:,} or less."
        )


def _plan_within_budgets(request: PlanRequest, config: SPPOConfig) -> Plan:
    """Makes the plan under `config`, with the request's budgets as what the machine has."""
    budgets = read_budgets(request.config, request.device)
    device = replace(request.device, memory_bytes=budgets.by_tier)
    return make_plan(replace(request, config=config, device=device))


def timeline_of(plan: Plan) -> Timeline:
    """Simulates a plan made with a profile, with the bytes of every tier over time."""
    return lower(plan, _cost(plan)).simulate(with_bytes=True)


def compare_policies(request: PlanRequest, plan: Plan) -> tuple[PolicyResult, ...]:
    """Compares "auto" with every fixed policy, in the same chunks and with K/V on the same tier.

    Returns:
        The fastest first, "auto" before its equals; those that do not fit last.
    """
    reruns_attention = any(mode.saved == "hidden" for row in plan.layer_modes for mode in row)
    choices = read_choices(request.config, request.device, rerun_attention=reruns_attention)
    base = replace(plan, max_pending_d2h_bytes=None, max_prefetch_bytes=None, prefetch_chunks=None)
    named = [("auto, recompute mixed", plan), *fixed_policies(_cost(plan), base, choices)]
    results = [_result(plan, name, decisions) for name, decisions in named]
    return tuple(sorted(results, key=lambda r: r.step_seconds or float("inf")))


def _result(plan: Plan, name: str, decisions: Decisions) -> PolicyResult:
    cost = _cost(plan)
    predicted = lower(decisions, cost).estimate
    limit = next(over_budget(predicted, plan.budgets), None)
    seconds = None
    if limit is None:
        seconds = simulate_plan(decisions, cost, policy=name).step_seconds
    tokens = plan.batch_rows * plan.total_tokens
    policy, recompute = name.split(", recompute ")
    return PolicyResult(
        policy=policy,
        recompute=recompute,
        first_limit=limit,
        estimate=predicted,
        step_seconds=seconds,
        tokens_per_second=None if seconds is None else tokens / seconds,
    )


def _closest(placed: list[PlanRequest], plan: Plan) -> tuple[BudgetViolation, MemoryEstimate]:
    """Returns the first exceeded budget and the estimate of the closest plan."""
    predictions = [plan.estimate, *(one for q in placed for one in _min_memory_estimates(q, plan))]
    missing = partial(missing_bytes, budgets=plan.budgets)
    closest = min(filter(missing, predictions), key=missing)
    return next(over_budget(closest, plan.budgets)), closest


def _sufficient_bytes(placed: list[PlanRequest], plan: Plan) -> dict[Tier, int]:
    """Returns by tier a capacity with which some plan fits, if any capacity is enough."""
    found: dict[Tier, int] = {}
    for tier in offload_tiers():
        if not TIERS[tier].called:
            continue
        unlimited = plan.budgets.replace(**{tier: None})
        sizes = [
            one.peak_bytes(tier)
            for request in placed
            for one in _min_memory_estimates(
                replace(request, config=TIERS[tier].allowing(request.config)),
                replace(plan, budgets=unlimited),
            )
            if fits(one, unlimited)
        ]
        if sizes:
            found[tier] = min(sizes)
    return found


def _longest(placed: list[PlanRequest], plan: Plan) -> int:
    budgets = plan.budgets
    config, kind = placed[0].config, placed[0].device.kind
    there = [name for name, tier in TIERS.items() if tier.is_available(config, kind)]
    if all(budgets.of(tier) is None for tier in there):
        return _LONGEST_TOKENS
    most_cuts = len(partitions_of(config))
    costs = [_cost_of(request, plan) for request in placed]
    fitted = 0

    def missing(tokens: int) -> float:
        """Returns the fewest missing bytes of any plan; if one fits, minus its free bytes."""
        nonlocal fitted
        bases = [
            (request, cost, base)
            for request, cost in zip(placed, costs, strict=True)
            for base in _bases(request, cost, plan, tokens, most_cuts=most_cuts)
        ]
        fewest = float("inf")
        # The base that fitted at another length is tried first, as it most likely fits again.
        for at in sorted(range(len(bases)), key=lambda at: at != fitted):
            request, cost, base = bases[at]
            if min_missing_bytes(cost, base, budgets, _choices(request)) > fewest:
                continue
            found = lower(_min_memory_plan(request, cost, budgets, base), cost).estimate
            lacking = missing_bytes(found, budgets)
            if not lacking:
                fitted = at
                return -sum(
                    budget - found.peak_bytes(tier)
                    for tier in there
                    if (budget := budgets.of(tier)) is not None
                )
            fewest = min(fewest, lacking)
        return fewest

    fits_now = fits(plan.estimate, budgets)
    return search_longest(
        missing,
        step_tokens=_LENGTH_STEP_TOKENS,
        most_tokens=_LONGEST_TOKENS,
        known_tokens=placed[0].total_tokens if fits_now else 0,
    ).longest_tokens


def _min_memory_estimates(request: PlanRequest, plan: Plan) -> Iterator[MemoryEstimate]:
    """Yields the least memory of each allowed order, cut and K/V mode."""
    cost = _cost_of(request, plan)
    for base in _bases(request, cost, plan, request.total_tokens):
        least = _min_memory_plan(request, cost, plan.budgets, base)
        yield estimate(request.shape, least, device_kind=request.device.kind)


def _bases(
    request: PlanRequest,
    cost: ModelCost,
    plan: Plan,
    total_tokens: int,
    *,
    most_cuts: int | None = None,
) -> Iterator[Decisions]:
    """Yields all allowed orders, cuts and K/V modes, with activation modes left open.

    `plan` was made for the request at any length. With `most_cuts`, only so many ways to cut are
    tried, shortest chunks first and for each length all of `partitions_of`.
    """
    config, kind = request.config, request.device.kind
    choices = _choices(request)
    # A policy that offloads some activations divides chunks, and does not choose a tier for K/V.
    chooses = config.offload_is_partial
    orders = _orders(request)
    cuts = islice(_cuts(request, cost, total_tokens), most_cuts)
    # The tile size of layers is left open if the settings do so.
    batch = replace(plan, layer_tile_tokens=0) if config.layer_tile_tokens == "auto" else plan
    bases = [
        batch.decisions(bounds, plan.num_layers, order)
        for order, bounds in product(orders[-1:] if chooses else orders, cuts)
    ]
    if "by_layer" in orders and not chooses:
        tiles = read_tiles(config, request.device)[:1]
        bases += tiled_layers(batch, total_tokens, plan.num_layers, tiles)
    for base in bases:
        for kv_mode in kv_modes_of(cost.shape, base, choices)[: 1 if chooses else None]:
            yield with_kv(base, kv_mode, cost.shape, plan.budgets, kind)


def _orders(request: PlanRequest) -> tuple[Order, ...]:
    by_layer = request.by_layer_refusal is None
    return read_orders(request.config, by_layer=by_layer, sharded=request.sharded)


def _min_memory_plan(
    request: PlanRequest, cost: ModelCost, budgets: Budgets, base: Decisions
) -> Decisions:
    """Returns one of `_bases` with the modes that need the least memory."""
    config, choices = request.config, _choices(request)
    if not is_fixed(config, request.device):
        return min_memory(cost, base, budgets, choices)
    saved = SAVED_BY_RECOMPUTE.get(config.recompute, "whole")
    decisions = fixed_policy(cost, base, config.offload, saved, choices)
    assert decisions is not None, "a rule that the user sets may use the tiers that it needs"
    return decisions


def _choices(request: PlanRequest) -> Choices:
    reruns_attention = may_rerun_attention(request.config, request.device, request.shape)
    return read_choices(request.config, request.device, rerun_attention=reruns_attention)


def _cuts(request: PlanRequest, cost: ModelCost, total_tokens: int) -> Iterator[Bounds]:
    config, kind = request.config, request.device.kind
    if not (names_cut(config) or is_fixed(config, request.device) or kind == "cpu"):
        by_kind = (chunk_cuts(cost.shape, total_tokens, kind) for kind in partitions_of(config))
        for alike in zip_longest(*by_kind):
            yield from (bounds for bounds in alike if bounds is not None)
        return
    num_chunks = config.num_chunks if config.chunk_lengths is None else len(config.chunk_lengths)
    # The time of an estimate grows with the number of chunks. Fewer, longer chunks need a little
    # more memory, so a length that fits with them fits with the usual ones too.
    usual_tokens = _MOST_CHUNKS * TARGET_CHUNK_TOKENS[kind]
    if num_chunks != "auto":
        # Other lengths than the requested one are cut into the same number of chunks.
        config = config.replace(chunk_lengths=None, num_chunks=min(num_chunks, total_tokens))
    elif config.chunk_tokens and total_tokens > _MOST_CHUNKS * config.chunk_tokens:
        config = config.replace(chunk_tokens=None, num_chunks=_MOST_CHUNKS)
    elif not config.chunk_tokens and total_tokens > usual_tokens:
        # No usual chunk is longer than twice the average.
        yield even_bounds(total_tokens, _MOST_CHUNKS // 2)
        return
    yield chunk_bounds(config, cost.shape, total_tokens, device_kind=kind)


def _cost_of(request: PlanRequest, plan: Plan) -> ModelCost:
    """Returns the plan's costs with the request's shape, whose weights may be elsewhere."""
    return replace(_cost(plan), shape=request.shape)


def _cost(plan: Plan) -> ModelCost:
    assert plan.cost is not None, "a plan made with a profile has costs"
    return plan.cost


class Found(NamedTuple):
    """Result of `search_longest`."""

    longest_tokens: int
    """The longest length that fits; 0 if none does."""

    failed_tokens: int | None
    """The shortest length that does not fit; None if the search ended at its limit."""


def search_longest(
    missing: Callable[[int], float], *, step_tokens: int, most_tokens: int, known_tokens: int = 0
) -> Found:
    """Searches the longest multiple of `step_tokens` that fits.

    Assumes that all lengths below one that fits fit too. Doubles the length until one fails, then
    tries where linear interpolation of the missing amount is zero, or the middle if two such tries
    in a row have not halved the interval. Takes about twice the logarithm of the answer in tries by
    bisection, few by interpolation, twice as many at worst.

    Args:
        missing: tries a length in tokens and returns how much is missing, in any unit: at most 0
            if it fits, and the less the more is free. A bare yes or no is -1 or 1.
        step_tokens: resolution, and the first length tried.
        most_tokens: the longest length tried.
        known_tokens: a length that is known to fit.
    """
    good, bad = known_tokens // step_tokens * step_tokens, None
    at_good, at_bad = 0.0, 0.0
    most_tokens -= most_tokens % step_tokens
    while good < most_tokens:
        tried = min(max(2 * good, step_tokens), most_tokens)
        at_tried = missing(tried)
        if at_tried > 0:
            bad, at_bad = tried, at_tried
            break
        good, at_good = tried, at_tried
    if bad is None:
        return Found(good, None)
    slow = 0
    while bad - good > step_tokens:
        left = bad - good
        share = at_good / (at_good - at_bad) if at_good < 0 and slow < 2 else 0.5
        middle = good + int(share * left) // step_tokens * step_tokens
        middle = min(max(middle, good + step_tokens), bad - step_tokens)
        at_middle = missing(middle)
        if at_middle > 0:
            bad, at_bad = middle, at_middle
        else:
            good, at_good = middle, at_middle
        slow = 0 if 2 * (bad - good) <= left + step_tokens else slow + 1
    return Found(good, bad)
