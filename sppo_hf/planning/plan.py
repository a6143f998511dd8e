"""The Plan: every decision about one batch shape, made before it runs, with reasons.

`make_plan` turns a request (settings, a model's shape, a device's facts) into chunk bounds, a mode
per (layer, chunk), tiers, look-ahead and a memory estimate. It refuses what cannot fit, and says
which budget is exceeded, by how many bytes, and what helps. A Plan is a value: engine, tables and
tests read the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial

from sppo_hf.config import PLAN_VERSION, SPPOConfig
from sppo_hf.errors import BudgetError, ConfigError
from sppo_hf.planning.activation_modes import (
    KEEP,
    SAVED_BY_RECOMPUTE,
    ActivationMode,
    Saved,
    mode_of,
)
from sppo_hf.planning.choices import (
    FRAGMENTATION_SHARE,
    DeviceFacts,
    Placement,
    allowed_activation_tiers,
    is_searched,
    may_rerun_attention,
    named_budgets,
    named_loss_tile,
    read_budgets,
    read_choices,
    read_orders,
    read_placements,
    read_tiles,
    reserves_fragmentation,
)
from sppo_hf.planning.chunk_bounds import (
    TARGET_CHUNK_TOKENS,
    Bounds,
    chunk_bounds,
    chunk_cuts,
    most_chunks,
    names_cut,
    partitions_of,
)
from sppo_hf.planning.cost import Correction, ModelCost
from sppo_hf.planning.decisions import Batch, Decisions, LayerModes, Order, modes_used
from sppo_hf.planning.hardware import UNKNOWN_LINK
from sppo_hf.planning.lowering import StepProgram, estimate, lower
from sppo_hf.planning.memory import Budgets, MemoryEstimate, check_budget, standing_device_bytes
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.policies import uniform_modes
from sppo_hf.planning.prediction import Prediction, predict
from sppo_hf.planning.solve import (
    EQUALLY_FAST,
    BudgetViolation,
    Choices,
    Solution,
    fits,
    fixed_policy,
    kv_modes_of,
    lower_budgets,
    min_memory,
    missing_bytes,
    over_budget,
    reduce_host_memory,
    simulate_plan,
    solve_chunks,
    tiled_layers,
    with_kv,
)
from sppo_hf.planning.stages import budgets_per_micro_batch, with_copies_by_unit
from sppo_hf.planning.tiers import TIERS, Tier
from sppo_hf.planning.tile_sizes import loss_tile_tokens
from sppo_hf.registry import OFFLOAD_POLICIES
from sppo_hf.rules import format_bytes

_NEARLY_FULL = 0.8
"""Share of the device's budget above which more memory would change a plan."""


def limit_text(limit: BudgetViolation, budgets: Budgets, total_tokens: int) -> str:
    """Returns why nothing fits, in bytes, and the remedy."""
    have = budgets.of(limit.tier) or 0
    need = have + limit.missing_bytes
    return (
        f"{limit.tier} memory cannot hold rows of {total_tokens:,} tokens under any allowed "
        f"plan: at least {need:,} bytes ({format_bytes(need)}) at the {limit.moment}, "
        f"{have:,} bytes ({format_bytes(have)}) in the budget, {limit.missing_bytes:,} bytes "
        f"missing. {TIERS[limit.tier].remedy}"
    )


def _check_standing_bytes(task: _Task) -> None:
    """Checks bytes that are held throughout the step against budgets named by the user.

    Raises:
        BudgetError: no choice of chunks can fit.
    """
    # Only a budget that the user named is a reason to refuse: without one, the weights are already
    # where they are, or sharded over devices in a way that is not visible here.
    shape, named = task.shape, named_budgets(task.config)
    if shape.host_resident is not None and "host" in named and task.training:
        assert task.budgets.host is not None, "a budget that is named is known"
        check_budget(
            "host",
            "weights, gradients and optimizer states that are kept there",
            need_bytes=shape.host_resident.held_bytes,
            have_bytes=task.budgets.host,
            remedy="Raise host_memory, train fewer parameters, or leave more on the device "
            "(weights='device', optimizer='device'). No choice of chunks changes these bytes.",
        )
    if "device" in named and task.budgets.device is not None:
        check_budget(
            "device",
            "weights and gradients" if task.training else "the weights",
            need_bytes=shape.weight_bytes + shape.gradient_bytes * task.training,
            have_bytes=task.budgets.device,
            remedy="Raise device_memory, train fewer parameters (LoRA has almost no gradients), or "
            "load the model in a smaller dtype or quantised. No choice of chunks changes these "
            "bytes.",
        )


def _check_named_budgets(task: _Task, predicted: MemoryEstimate) -> None:
    """Checks the bytes of modes set by the user against budgets named by the user.

    Raises:
        BudgetError: a budget of the host or a tier behind it is too small.
    """
    config = task.config
    for limit in over_budget(predicted, task.budgets):
        if limit.tier == "device" or limit.tier not in named_budgets(config):
            continue
        have = task.budgets.of(limit.tier)
        assert have is not None, "a tier over its budget has one"
        check_budget(
            limit.tier,
            f"what offload={config.offload!r} sends there",
            need_bytes=have + limit.missing_bytes,
            have_bytes=have,
            remedy=f"Raise {TIERS[limit.tier].setting}, set recompute='full' (less to send) or "
            "offload='auto' (sends what fits), or shorten the sequences.",
        )


def _warnings(task: _Task, modes: LayerModes, predicted: MemoryEstimate) -> Iterator[str]:
    """Yields warnings that do not stop a run.

    About the model's positions, exceeded budgets, a PyTorch setting that would let a nearly full
    device hold more, recurrent layers (whose installed kernels matter), and what the model cannot.
    """
    shape, budgets, limit = task.shape, task.budgets, task.shape.max_positions_tokens
    if limit is not None and task.total_tokens > limit:
        yield (
            f"rows of {task.total_tokens:,} tokens are longer than the {limit:,} positions this "
            f"model was made for: packed documents of at most {limit:,} tokens are as good as "
            "before, of longer ones expect poor quality unless the model scales its positions"
        )
    for over in over_budget(predicted, budgets):
        have = budgets.of(over.tier) or 0
        causes = predicted.of(over.tier)
        most = max(causes, key=causes.__getitem__)
        yield (
            f"predicted {over.tier} peak {format_bytes(have + over.missing_bytes)} is over the "
            f"{format_bytes(have)} there are (most of it {most}, {format_bytes(causes[most])}); "
            + _remedy(modes_used(modes), over.tier)
        )
    nearly = budgets.device is not None and predicted.device.total > _NEARLY_FULL * budgets.device
    if nearly and reserves_fragmentation(task.config, task.device):
        yield (
            f"{FRAGMENTATION_SHARE:.0%} of the device's memory are reserved for fragmentation of "
            "PyTorch's allocator; to use them, add expandable_segments:True to "
            "PYTORCH_ALLOC_CONF, or leave that unset"
        )
    if scans := sum(layer.scans for layer in shape.layers):
        yield (
            f"{scans} of {shape.num_layers} layers are recurrent: the FLOPs and saved bytes of "
            "their scans are those of Transformers' torch code; kernels save less"
        )
    if task.by_layer_refusal:
        yield f"order: by_chunk, because {task.by_layer_refusal}"
    if task.tiles_refusal:
        yield f"layer_tile_tokens: 0, because {task.tiles_refusal}"


def planned_for(shape: ModelShape, total_tokens: int) -> str:
    """Returns the text in `sppo.yaml` that says what a written plan was made for."""
    return f"plan {PLAN_VERSION}: {_model_of(shape)}; {total_tokens} tokens"


def other_plan_warnings(
    config: SPPOConfig, shape: ModelShape, total_tokens: int, *, training: bool
) -> Iterator[str]:
    """Yields warnings if a written plan was made for another model or other lengths.

    Such a run is slower than planned, or does not fit. Settings that were not written by `sppo
    plan` do not name a model. Evaluation may have rows of other lengths.
    """
    if config.planned_for is None:
        return
    made, _, length = config.planned_for.partition(": ")[2].rpartition("; ")
    again = "Remedy: write it again with `sppo plan MODEL --seq-len N --write`"
    if made != _model_of(shape):
        yield (
            f"the plan in these settings is of a model of {made}; this one has {_model_of(shape)}. "
            + again
        )
    if training and length != f"{total_tokens} tokens":
        yield (
            f"the plan in these settings is of rows of {length}; these have {total_tokens} tokens. "
            + again
        )


def _model_of(shape: ModelShape) -> str:
    return f"{shape.num_layers} layers of {shape.hidden_size}, vocabulary {shape.vocab_size}"


def _remedy(modes: frozenset[ActivationMode], tier: Tier) -> str:
    if tier == "device" and not all(mode.recompute for mode in modes):
        return "recompute='full' holds less"
    if tier == "device" and not all(mode.offload for mode in modes):
        return "shorter sequences, or offload='full' where the host has free memory, hold less"
    if tier == "host" and not all(mode.recompute for mode in modes):
        return "recompute='full' sends less"
    return "shorter chunks or shorter sequences hold less"


# Attempts to make a stage's plan fit with copies by unit.
_ATTEMPTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStep:
    """Predicted step of all stages of a pipeline."""

    schedule: str
    reason: str
    """Reason for the schedule and the chunks."""

    ranks: int
    replicas: int
    """Number of data-parallel pipelines."""

    micro_batches: int
    """Micro-batches per step."""

    step_seconds: float | None = None
    """Predicted seconds of all stages and micro-batches; None if speeds are unknown."""

    bubble_fraction: float = 0.0
    """Share of the ranks' time without compute."""

    mfu: float | None = None
    """Share of all ranks' dense bf16 peak; None if that is unknown."""


_FASTER = "auto: the faster of those that fit"
_ORDER_OF_THE_FASTEST = "auto: that of the fastest that fits"
_LESS_MEMORY = "auto: less memory"
_AS_LITTLE_MEMORY = "auto: about as little memory as the other"
# Plans on a CPU whose peaks differ by less than this ratio are equal in memory, and the one with
# fewer chunks is faster: SmolLM2 by layer at 4,096 tokens, 8 chunks 34.8 s, 4 chunks 31.0 s, 2
# chunks 28.6 s.
_EQUAL_MEMORY_RATIO = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Decisions):
    """How one batch shape is run, with reasons."""

    shape: ModelShape
    """The model, or a stage of it."""

    device: DeviceFacts
    backend_name: str
    backend_reason: str
    recompute_reason: str
    offload_reason: str
    order_reason: str = ""
    places_reason: str = ""
    """Reason for host-resident weights or optimizer; "" without them."""

    estimate: MemoryEstimate
    """Predicted bytes."""

    budgets: Budgets
    """Bytes that each tier may hold: the config's budget, else what the machine has, else unknown.
    """

    prediction: Prediction | None = None
    """Predicted seconds; None if speeds are unknown."""

    cost: ModelCost | None = None
    pipeline: PipelineStep | None = None
    """The pipeline that this is a stage of; other fields then describe one micro-batch on this
    stage."""

    warnings: tuple[str, ...] = ()
    """Warnings for the user, which stop nothing."""

    def program(self) -> StepProgram:
        """Returns the program of the step: its actions in order, with bytes and seconds."""
        return StepProgram(self, self.shape, self.device.kind, self.cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A batch of a model on a machine, with settings: all inputs of a plan."""

    shape: ModelShape
    config: SPPOConfig
    """Settings; budgets that are not named come from the device."""

    device: DeviceFacts
    """The machine; with a profile, "auto" minimises time."""

    total_tokens: int
    """Length of each row."""

    batch_rows: int = 1
    training: bool = True
    accumulates: bool = False
    """Whether gradients of earlier batches exist, as with gradient accumulation."""

    dtype_name: str = "bfloat16"
    """Dtype of compute."""

    backend_name: str = "auto"
    backend_reason: str = "chosen once the model is loaded; as fast as the profile says"
    correction: Correction | None = None
    """Correction of the profile by measured steps."""

    bounds: Bounds | None = None
    """Fixed chunks; None if chunks are decided too."""

    alive: float | None = None
    """Number of micro-batches that share the budgets of a pipeline stage, see
    `budgets_per_micro_batch`; None for a device that runs the whole model."""

    other_stages_kv_bytes: Mapping[Tier, int] = field(default_factory=dict[Tier, int])
    """K/V bytes, by tier, of the units of other stages that this rank shares. They are subtracted
    from the budgets; see `pipeline_cost.extra_shared_unit_bytes`."""

    by_layer_refusal: str | None = None
    """Why the model's layers cannot be called on parts of a sequence. It is shown in a warning, as
    a part of a sentence, unless it is empty; None if they can be. So are the next two."""

    on_host_refusal: str | None = None
    """Why "auto" may not put weights and optimizer on the host; None if it may."""

    tiles_refusal: str | None = None
    """Why token-wise modules of layers cannot run in tiles; None if they can."""

    sharded: bool = False
    """Whether FSDP2 shards the model, so that ranks gather weights together."""

    def with_placement(self, places: Placement) -> PlanRequest:
        """Returns the request with weights and optimizer placed, in settings and shape."""
        shape = self.shape.with_host_residents(weights=places.weights, optimizer=places.optimizer)
        return replace(self, config=places.set_in(self.config), shape=shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task(PlanRequest):
    """A request with its settings resolved to budgets, choices and costs."""

    batch: Batch
    budgets: Budgets
    choices: Choices
    orders: tuple[Order, ...]
    tiles: tuple[int, ...]
    """Tile sizes for token-wise modules of one chunk over all tokens."""
    cost: ModelCost | None
    under_seconds: float
    """See `solve`."""


_PlanOrError = Plan | BudgetError
"""A plan, or why the request is refused."""


def make_plan(request: PlanRequest) -> Plan:
    """Decides how a batch is run.

    Raises:
        ConfigError: the settings do not fit this length.
        BudgetError: a budget named by the user is too small.
    """
    made = _choose_attention(request)
    if not _fits(made) and (remedy := _remedy_without_groups(request)):
        made = _with_remedy(made, remedy)
    if isinstance(made, BudgetError):
        raise made
    return made


def _fits(made: _PlanOrError) -> bool:
    return isinstance(made, Plan) and not _missing_bytes(made)


def _missing_bytes(plan: Plan) -> int:
    return missing_bytes(plan.estimate, plan.budgets)


def _with_remedy(made: _PlanOrError, remedy: str) -> _PlanOrError:
    if isinstance(made, BudgetError):
        return BudgetError(f"{made} Or: {remedy}.")
    return replace(made, warnings=(*made.warnings, remedy))


def _remedy_without_groups(request: PlanRequest) -> str:
    """Returns a remedy if the batch would fit without groups of rows.

    Beside groups no weights are put on the host.
    """
    rows = request.config.micro_batch_size
    if rows is None or not request.training or request.on_host_refusal is not None:
        return ""
    whole = replace(request, config=request.config.replace(micro_batch_size=None))
    if _possible_places(whole) == _possible_places(request) or not _fits(_choose_attention(whole)):
        return ""
    return (
        f"without micro_batch_size={rows} it fits, as weights may then be kept on the "
        "host: give batches of as many rows, and accumulate gradients over more of them"
    )


def _possible_places(request: PlanRequest) -> tuple[Placement, ...]:
    return read_placements(
        request.config,
        request.device,
        adapters=request.shape.lora is not None,
        by_layer=request.by_layer_refusal is None,
    )


def _choose_attention(request: PlanRequest) -> _PlanOrError:
    """Plans with one attention forward; if that does not fit, with rerun attention if that does.

    If the settings forbid to rerun attention, a plan that would fit is mentioned as a remedy. Other
    settings are not tried.
    """
    made = _choose_placement(request, rerun_attention=False)
    allowing = request.config.replace(attention_once=False)
    may_rerun = request.training and request.alive is None
    if _fits(made) or not (
        may_rerun and may_rerun_attention(allowing, request.device, request.shape)
    ):
        return made
    required = request.config.attention_once
    more = _choose_placement(request, rerun_attention=True)
    if _fits(more):
        remedy = "attention_once=False makes it fit: attention of some layers then runs again"
        return _with_remedy(made, remedy) if required else more
    if required:
        return made
    if isinstance(made, Plan) and isinstance(more, Plan):
        # Estimates may be wrong, so the plan that exceeds budgets by least is run, with a warning.
        return min(made, more, key=_missing_bytes)
    # Of two refusals the one of the plan that needs fewer bytes.
    return more if isinstance(made, BudgetError) and isinstance(more, BudgetError) else made


def _choose_placement(request: PlanRequest, *, rerun_attention: bool) -> _PlanOrError:
    """Plans with one of the allowed placements of weights and optimizer."""
    first, *others = _possible_places(request)
    refusal = request.on_host_refusal
    if others and request.training and refusal is None:
        return _fastest_placement(request, (first, *others), rerun_attention=rerun_attention)
    made = _plan_placed(
        request.with_placement(first), rerun_attention=rerun_attention, under_seconds=float("inf")
    )
    late = request.training and refusal and others
    if late and isinstance(made, Plan) and _missing_bytes(made):
        return _with_remedy(made, f"weights and optimizer: on the device, because {refusal}")
    return made


def _fastest_placement(
    request: PlanRequest, places: Sequence[Placement], *, rerun_attention: bool
) -> _PlanOrError:
    """Plans with the first placement; if that does not fit, with the fastest that does.

    [Note: weights and optimizer by themselves] What fits on the device is kept there, without
    copies and without an update by the processor. Otherwise simulation decides between the
    optimizer alone on the host and all layers' weights too. The optimizer alone loads each weight
    once per batch, not twice; without the weights the device has more memory for activations. Of
    nearly equal plans, the first is taken. The first of `places` has the fewest bytes on the host.
    """
    requests = {tried: request.with_placement(tried) for tried in places}
    make = partial(_plan_placed, rerun_attention=rerun_attention)
    made: dict[Placement, _PlanOrError] = {}
    fitting: list[Plan] = []
    for tried, placed in requests.items():
        budget = read_budgets(placed.config, placed.device).device
        if budget is not None and budget < standing_device_bytes(placed.shape, placed.device.kind):
            continue
        # A later placement is taken only if it is faster by more than simulation's error.
        under_seconds = min(map(_step_seconds, fitting), default=float("inf")) / EQUALLY_FAST
        plan = made[tried] = make(placed, under_seconds=under_seconds)
        if isinstance(plan, Plan) and not _missing_bytes(plan):
            if tried == places[0]:
                return plan
            fitting.append(plan)
    if fitting:
        least = min(map(_step_seconds, fitting))
        best = next(plan for plan in fitting if _step_seconds(plan) <= EQUALLY_FAST * least)
    else:
        every = [
            made.get(tried) or make(placed, under_seconds=float("inf"))
            for tried, placed in requests.items()
        ]
        plans = [plan for plan in every if isinstance(plan, Plan)]
        if not plans:
            return BudgetError(
                f"{every[0]} Nor with weights and optimizer on the host: {every[-1]}"
            )
        best = min(plans, key=_missing_bytes)
    if best.shape.host_resident is None:
        return best
    reason = "auto: not all fits on the device"
    if len(fitting) > 1 and best.prediction is not None:
        reason += "; the fastest that does"
    return replace(best, places_reason=reason)


def _step_seconds(plan: Plan) -> float:
    return float("inf") if plan.prediction is None else plan.prediction.step_seconds


def _plan_placed(
    request: PlanRequest, *, rerun_attention: bool, under_seconds: float
) -> _PlanOrError:
    """Plans with the placement in the request's settings and shape; see `solve`."""
    task = _resolve(request, rerun_attention=rerun_attention, under_seconds=under_seconds)
    try:
        _check_standing_bytes(task)
        decided = _decide(task) if task.alive is None else _decide_by_unit(task)
        predicted = _estimate(task, decided.decisions)
        _check_named_budgets(task, predicted)
    except BudgetError as error:
        return error
    return Plan(
        **{f.name: getattr(decided.decisions, f.name) for f in fields(Decisions)},
        shape=task.shape,
        device=task.device,
        backend_name=task.backend_name,
        backend_reason=task.backend_reason,
        recompute_reason=decided.recompute_reason,
        offload_reason=decided.offload_reason,
        order_reason=_order_reason(task, decided),
        places_reason="" if task.shape.host_resident is None else "set by the user",
        estimate=predicted,
        budgets=task.budgets,
        prediction=decided.prediction,
        cost=task.cost,
        warnings=tuple(_warnings(task, decided.decisions.layer_modes, predicted)),
    )


def _resolve(request: PlanRequest, *, rerun_attention: bool, under_seconds: float) -> _Task:
    config, device = request.config, request.device
    budgets = _budgets(request)
    tiled = request.bounds is None and request.tiles_refusal is None
    batch = _batch(request, budgets)
    return _Task(
        **{f.name: getattr(request, f.name) for f in fields(PlanRequest)},
        batch=batch,
        budgets=budgets,
        choices=read_choices(config, device, rerun_attention=rerun_attention),
        orders=read_orders(
            config, by_layer=request.by_layer_refusal is None, sharded=request.sharded
        ),
        tiles=read_tiles(config, device) if tiled else (),
        cost=_model_cost(request, batch.tile_tokens),
        under_seconds=under_seconds,
    )


def _budgets(request: PlanRequest) -> Budgets:
    """Returns what each tier may hold of this batch; in a pipeline, of one micro-batch."""
    config, shape, device = request.config, request.shape, request.device
    budgets = read_budgets(config, device)
    if device.kind == "cpu" and shape.host_resident is not None and config.device_memory is None:
        # On a CPU, host-resident weights and optimizer take a part of the device's own memory.
        rest = None if budgets.device is None else budgets.device - shape.host_resident.held_bytes
        budgets = budgets.replace(device=rest)
    for tier, size in request.other_stages_kv_bytes.items():
        budget = budgets.of(tier)
        budgets = budgets.replace(**{tier: None if budget is None else max(0, budget - size)})
    if request.alive is not None and request.alive > 1:
        standing_bytes = shape.weight_bytes + shape.gradient_bytes
        budgets = budgets_per_micro_batch(
            budgets, standing_bytes=standing_bytes, alive=request.alive
        )
    return budgets


def _batch(request: PlanRequest, budgets: Budgets) -> Batch:
    config, kind = request.config, request.device.kind
    tile_tokens, layer_tile_tokens = named_loss_tile(config), config.layer_tile_tokens
    if tile_tokens is None:
        tile_tokens = loss_tile_tokens(request.shape, device_kind=kind, device_bytes=budgets.device)
    # The staging region for a tier behind the host is small beside the host's budget.
    staging_bytes = 2**30 if budgets.host is None else min(4 * 2**30, budgets.host // 16)
    return Batch(
        batch_rows=request.batch_rows,
        tile_tokens=tile_tokens,
        layer_tile_tokens=0 if layer_tile_tokens == "auto" else layer_tile_tokens,
        training=request.training,
        accumulates=request.accumulates,
        return_logits=config.return_logits,
        staging_bytes=max(64 * 2**20, 0 if kind == "cpu" else staging_bytes),
    )


def _model_cost(request: PlanRequest, tile_tokens: int) -> ModelCost | None:
    """Returns the costs of the model on the device; None if the device's speeds are unknown."""
    profile = request.device.profile
    if profile is None:
        return None
    across_nodes = request.config.sp_across_nodes
    rate = profile.network_bytes_per_second if across_nodes else profile.node_bytes_per_second
    return ModelCost(
        shape=request.shape,
        # A profile of another kind of device is used for its speeds only.
        profile=replace(profile, kind=request.device.kind),
        dtype_name=request.dtype_name,
        batch_rows=request.batch_rows,
        all_to_all_bytes_per_second=rate or UNKNOWN_LINK,
        tile_tokens=tile_tokens,
        correction=request.correction or Correction(),
    )


def _tiled_layers(task: _Task) -> Iterator[Decisions]:
    if "by_layer" in task.orders:
        yield from tiled_layers(task.batch, task.total_tokens, task.shape.num_layers, task.tiles)


def _order_reason(task: _Task, decided: _Decided) -> str:
    if task.config.order == decided.decisions.order:
        return "set by the user"
    if len(task.orders) > 1:
        return decided.order_reason
    if task.config.weights == "host":
        return "by chunk all weights would come from the host for every chunk"
    if task.sharded and decided.decisions.order == "by_layer":
        return "by chunk FSDP2 would gather all weights for every chunk"
    return "a pipeline's" if task.config.pp_size > 1 else "the only one that this model can run in"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decided:
    decisions: Decisions
    recompute_reason: str
    offload_reason: str
    order_reason: str = _LESS_MEMORY
    prediction: Prediction | None = None


def _decide(task: _Task) -> _Decided:
    config = task.config
    if not task.batch.training:
        return _decide_evaluation(task)
    if config.offload_is_partial:
        return _decide_by_policy(task)
    if task.cost is None or not is_searched(config, task.device):
        return _decide_by_rule(task)
    return _decide_by_search(task, task.cost)


def _decide_by_unit(task: _Task) -> _Decided:
    """Decides about a pipeline stage, whose copies of whole units take more bytes."""
    best: _Decided | None = None
    lowered, kept = task, True
    for _ in range(_ATTEMPTS):
        try:
            decided = _decide(lowered)
        except BudgetError:
            if best is None:
                raise
            break
        made = with_copies_by_unit(decided.decisions, task.shape, task.device.kind)
        best, kept = replace(decided, decisions=made), made is decided.decisions
        over = list(over_budget(_estimate(task, made), task.budgets))
        if not over or kept:
            break
        lowered = replace(lowered, budgets=lower_budgets(lowered.budgets, over))
    assert best is not None, "the first attempt decides or raises"
    if best.prediction is None or task.cost is None or kept:
        return best
    predicted = _simulate(task.cost, best.decisions, policy=best.prediction.policy)
    return replace(best, prediction=predicted)


def _decide_evaluation(task: _Task) -> _Decided:
    """Decides about an evaluation: nothing is saved, and only K/V may be offloaded."""
    borrows = any(layer.borrows_keys for layer in task.shape.layers)
    found: list[Decisions] = []
    for base in (base for order in task.orders for base in _bases(task, order)):
        made = _place_kv(task, base)
        if made.by_layer and not borrows:
            # K/V are not read after their layer has run, so they are dropped.
            made = replace(made, kv_modes=("recompute",) * made.num_layers)
        found.append(made)
    decisions, order_reason = _min_memory_choice(task, found)
    return _Decided(
        decisions=decisions, recompute_reason="", offload_reason="", order_reason=order_reason
    )


def _kv_placements(task: _Task, base: Decisions) -> Iterator[Decisions]:
    """Yields the plan with K/V on each allowed tier, nearest first."""
    for kv_mode in kv_modes_of(task.shape, base, task.choices):
        yield with_kv(base, kv_mode, task.shape, task.budgets, task.device.kind)


def _place_kv(task: _Task, decisions: Decisions) -> Decisions:
    """Returns the plan with K/V on the nearest tier with which all fits; the farthest if none."""
    placed = list(_kv_placements(task, decisions))
    fitting = (one for one in placed if fits(_estimate(task, one), task.budgets))
    return next(fitting, placed[-1])


def _estimate(task: _Task, decisions: Decisions) -> MemoryEstimate:
    return estimate(task.shape, decisions, device_kind=task.device.kind)


def _decide_by_policy(task: _Task) -> _Decided:
    """Decides by the offload policy named in the settings."""
    policy = task.config.offload
    if task.cost is None:
        raise ConfigError(
            f"offload={policy!r} weighs copies against compute, but nothing is known of the speed "
            f"of {task.device.name!r}. Run `sppo calibrate`, name a profile (hardware='h100'), or "
            "use offload='full' or 'none'."
        )
    saved = SAVED_BY_RECOMPUTE.get(task.config.recompute, "whole")
    # A fixed policy divides chunks; it is used by layer only if the settings name that order.
    base = _base(task, task.orders[-1])
    base = with_kv(base, task.choices.kv_tiers[0], task.shape, task.budgets, task.device.kind)
    choices = task.choices
    if len(choices.tiers) == 1:
        choices = replace(choices, tiers=("device", "host"))
    decisions = fixed_policy(task.cost, base, policy, saved, choices)
    assert decisions is not None, "the rule uses tiers that are there"
    return _Decided(
        decisions=decisions,
        recompute_reason=(
            f"{policy}: never" if task.config.recompute == "auto" else "set by the user"
        ),
        offload_reason=f"{policy}: {OFFLOAD_POLICIES.facts(policy)['reason']}",
        order_reason=f"{policy}: a rule about chunks",
        prediction=_simulate(task.cost, decisions, policy=policy),
    )


def _decide_by_rule(task: _Task) -> _Decided:
    """Decides without a search: modes are set by the user, or only memory counts."""
    config, device = task.config, task.device
    saved: Saved = "inputs"
    recompute_reason = "auto: least memory, and attention is not run again"
    if config.recompute != "auto":
        saved, recompute_reason = SAVED_BY_RECOMPUTE[config.recompute], "set by the user"
    away = allowed_activation_tiers(config, device)
    offload, offload_reason = bool(away), "auto: copies overlap with compute on their own streams"
    if config.offload != "auto":
        offload, offload_reason = config.offload == "full", "set by the user"
    elif device.kind == "cpu" and away:
        offload_reason = (
            f"auto: on a CPU the host's memory is the device's, so bytes go to the {away[0]}"
        )
    elif device.kind == "cpu":
        offload_reason = "auto: on a CPU the host's memory is the device's"
    tier: Tier = ((away or ("host",))[0]) if offload else "device"
    mode = mode_of(saved, tier)
    bases = [base for order in task.orders for base in _bases(task, order)]
    found = [
        d for base in (*bases, *_tiled_layers(task)) for d in _rule_candidates(task, base, mode)
    ]
    decisions, order_reason = _min_memory_choice(task, found)
    if decisions.layer_modes[-1][0] != mode:
        recompute_reason += "; the last chunk is kept, for its backward comes at once"
    by_time = device.kind != "cpu" and task.cost is not None
    return _Decided(
        decisions=decisions,
        recompute_reason=recompute_reason,
        offload_reason=offload_reason,
        order_reason=_FASTER if by_time else order_reason,
        prediction=None if task.cost is None else _simulate(task.cost, decisions, policy="set"),
    )


def _rule_candidates(task: _Task, base: Decisions, mode: ActivationMode) -> Iterator[Decisions]:
    """Yields plans with one activation mode and K/V on the nearest tier with which all fits.

    By layer on a CPU K/V are tried on each tier, nearest first: a plan that takes little more
    memory with nearer K/V saves time, see `_min_memory_choice`.
    """
    config, on_cpu = task.config, task.device.kind == "cpu"
    modes = uniform_modes(base.num_chunks, base.num_layers, mode)
    # By chunk, the last chunk's backward follows at once, so keeping its activations costs one
    # chunk's bytes for a moment and saves a recomputation. On a GPU chunks are many times longer,
    # and the solver decides whether they fit. By layer, the last layer's activations are as long as
    # the sequence.
    automatic = config.recompute == config.offload == "auto"
    if automatic and on_cpu and base.num_chunks > 1 and not base.by_layer:
        modes = (*modes[:-1], (KEEP,) * base.num_layers)
    base = replace(base, layer_modes=modes)
    if base.by_layer and on_cpu:
        yield from _kv_placements(task, base)
    else:
        yield _place_kv(task, base)


def _bases(task: _Task, order: Order) -> Iterator[Decisions]:
    """Yields bases by layer on a CPU with the fewest chunks first; otherwise the configured cut.

    Chunk by chunk, K/V and the last chunk's activations take more memory than the saved time is
    worth; by layer a chunk's temporaries are those of one layer. One chunk for all tokens saves no
    measurable time.
    """
    base = _base(task, order)
    target = TARGET_CHUNK_TOKENS[task.device.kind]
    seen = {base.bounds}
    if base.by_layer and task.device.kind == "cpu" and not _cut_is_named(task):
        for power in range((task.total_tokens // target).bit_length() - 2, 0, -1):
            bounds = _bounds(task, target << power)
            if bounds not in seen:
                seen.add(bounds)
                yield task.batch.decisions(bounds, base.num_layers, order)
    yield base


def _min_memory_choice(task: _Task, found: Sequence[Decisions]) -> tuple[Decisions, str]:
    """Returns the first plan with the least memory, and the reason for its order.

    On a CPU, plans with nearly as little memory count as equal.
    """
    if len(found) == 1:
        return found[0], _LESS_MEMORY
    held = [_memory_rank(task, decisions) for decisions in found]
    missing, least = min(held)
    most = least * (_EQUAL_MEMORY_RATIO if task.device.kind == "cpu" else 1)
    first, *others = (
        decisions
        for decisions, (over, size) in zip(found, held, strict=True)
        if over == missing and size <= most
    )
    alike = any(other.order != first.order for other in others)
    return first, _AS_LITTLE_MEMORY if alike else _LESS_MEMORY


def _memory_rank(task: _Task, decisions: Decisions) -> tuple[int, float]:
    """Returns missing bytes, then memory, or on a GPU in training seconds.

    An evaluation takes the same time in both orders.
    """
    predicted = _estimate(task, decisions)
    missing = missing_bytes(predicted, task.budgets)
    if task.device.kind == "cpu" or task.cost is None or not task.batch.training:
        return missing, predicted.device.total
    return missing, simulate_plan(decisions, task.cost, policy="set").step_seconds


def _decide_by_search(task: _Task, cost: ModelCost) -> _Decided:
    """Decides by the solver, which compares plans by simulation."""
    limits: list[BudgetViolation] = []
    fastest, order_reason = "fastest that fits", _FASTER
    for cuts in _cuts(task, cost):
        found = solve_chunks(
            *(cost, task.batch, cuts, task.budgets, task.choices),
            orders=task.orders,
            tiles=task.tiles,
            under_seconds=task.under_seconds,
        )
        if isinstance(found, BudgetViolation):
            limits.append(found)
            continue
        if task.device.kind == "cuda" and found.step_seconds < task.under_seconds:
            light = reduce_host_memory(cost, found, task.budgets, task.choices)
            if light.step_seconds > found.step_seconds:
                fastest = _reason_for_less_host_memory(task, cost, found, light)
                order_reason = _ORDER_OF_THE_FASTEST
            found = light
        break
    else:
        fastest, order_reason = "the closest to fitting", "auto: the closest to fitting"
        closest = min(limits, key=lambda limit: limit.missing_bytes)
        found = _closest_to_fitting(task, cost, closest)
    reason = f"auto: {fastest} ({found.policy})"
    config = task.config
    return _Decided(
        decisions=found.decisions,
        recompute_reason=reason if config.recompute == "auto" else "set by the user",
        offload_reason=reason if config.offload == "auto" else "set by the user",
        order_reason=order_reason,
        prediction=predict(found.decisions, cost, found.timeline, policy=found.policy),
    )


def _reason_for_less_host_memory(
    task: _Task, cost: ModelCost, fastest: Solution, light: Solution
) -> str:
    """Returns why `light` is taken, which is a little slower than the fastest plan that fits."""
    if task.alive is not None:  # the numbers are those of the plan before its copies by unit
        return "nearly the fastest that fits, for less host memory"
    slower = light.step_seconds / fastest.step_seconds - 1.0
    held, less = (lower(one.decisions, cost).estimate.host.total for one in (fastest, light))
    return (
        f"{slower:.2%} slower than the fastest that fits, for {format_bytes(held - less)} less "
        "host memory"
    )


def _closest_to_fitting(task: _Task, cost: ModelCost, limit: BudgetViolation) -> Solution:
    """Returns the plan closest to fitting, if only limits of the machine are exceeded.

    Raises:
        BudgetError: the user named the exceeded budget.
    """
    if limit.tier in named_budgets(task.config):
        raise BudgetError(limit_text(limit, task.budgets, task.total_tokens))
    usual_tokens = most_chunks(task.total_tokens) * TARGET_CHUNK_TOKENS[task.device.kind]
    if _cut_is_fixed(task) or task.total_tokens <= usual_tokens:
        bounds = _bounds(task)
    else:
        # The default chunks are more than a search tries, and would take minutes to simulate.
        *_, cuts = _cuts(task, cost)
        bounds = cuts[-1]
    bases = [task.batch.decisions(bounds, task.shape.num_layers, order) for order in task.orders]
    bases += _tiled_layers(task)
    plans = [
        min_memory(cost, placed, task.budgets, task.choices)
        for base in bases
        for placed in _kv_placements(task, base)
    ]
    best = min(plans, key=lambda plan: missing_bytes(_estimate(task, plan), task.budgets))
    for other in over_budget(_estimate(task, best), task.budgets):
        if other.tier in named_budgets(task.config):
            raise BudgetError(limit_text(other, task.budgets, task.total_tokens))
    return simulate_plan(best, cost, policy="least memory")


def _base(task: _Task, order: Order) -> Decisions:
    return task.batch.decisions(_bounds(task), task.shape.num_layers, order)


def _bounds(task: _Task, target_tokens: int | None = None) -> Bounds:
    kind = task.device.kind
    return task.bounds or chunk_bounds(
        task.config, task.shape, task.total_tokens, device_kind=kind, target_tokens=target_tokens
    )


def _cuts(task: _Task, cost: ModelCost) -> Iterator[list[Bounds]]:
    """Yields ways to cut that the config allows, each for when nothing fits with earlier ones.

    On a CPU these are fixed.
    """
    if _cut_is_fixed(task):
        yield [base.bounds for base in _bases(task, task.orders[0])]
        return
    for partition in partitions_of(task.config):
        yield list(chunk_cuts(task.shape, task.total_tokens, partition))


def _cut_is_fixed(task: _Task) -> bool:
    return _cut_is_named(task) or task.device.kind == "cpu"


def _cut_is_named(task: _Task) -> bool:
    return task.bounds is not None or names_cut(task.config)


def _simulate(cost: ModelCost, decisions: Decisions, *, policy: str) -> Prediction:
    played = simulate_plan(decisions, cost, policy=policy)
    return predict(decisions, cost, played.timeline, policy=policy)
