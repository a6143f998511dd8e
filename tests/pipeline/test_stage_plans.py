"""Plans of stages, what ranks exchange of them, and the schedule and prediction of a step."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import get_engine
from sppo_hf.engine.forward_calls import read_call
from sppo_hf.engine.plan_cache import BatchShape, offloaded_bytes
from sppo_hf.errors import BudgetError, ConfigError, OffloadError, ScheduleError
from sppo_hf.offload.engine import OffloadEngine
from sppo_hf.pipeline import stage_plans
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.pipeline.stage_plans import (
    BatchPlans,
    StagePlanCache,
)
from sppo_hf.pipeline.step_schedule import Copies, StepSchedule, check_size, step_schedule
from sppo_hf.planning.choices import DeviceFacts
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.hardware import UNKNOWN_LINK, load_profile
from sppo_hf.planning.pipeline_choice import PipelineChoice
from sppo_hf.planning.pipeline_cost import PipelineCost
from sppo_hf.planning.plan import PlanRequest, make_plan
from sppo_hf.planning.stages import stage_shape
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.generate import GENERATORS, Size, generate
from sppo_hf.schedule.lower import add_transfers, lower
from sppo_hf.schedule.simulate import simulate_pipeline
from sppo_hf.schedule.validate import validate
from sppo_hf.testing.tiny_models import make_batch
from tests.pipeline.test_pipeline_engine import make
from tests.planning.shapes import tiny_shape

SHAPE = tiny_shape(num_hidden_layers=6, hidden_size=2048, intermediate_size=8192)


CPU = torch.device("cpu")
BATCH = BatchShape(1, 20, True, CPU, (7, 8))
WANTED = (
    BATCH,
    PipelineChoice(schedule="seq1f1b", bounds=((0, 10), (10, 20)), reason="set by the user"),
    {},
)
"""Arguments of `StagePlanCache._make_plans`."""


def _engine() -> PipelineEngine:
    engine = get_engine(make(offload="full", recompute="full"))
    assert isinstance(engine, PipelineEngine)
    return engine


@pytest.mark.parametrize("shares", [(1.0, None), (0.5,), (1.0, 0.5)], ids=str)
def test_stages_are_planned_again_with_the_host_memory_that_the_system_grants(
    shares: tuple[float | None, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where the system gives less than it gave a moment before."""
    asked: list[int] = []

    def reserve(self: OffloadEngine, host_bytes: int, progress: object) -> int | None:
        share = shares[len(asked)]
        asked.append(host_bytes)
        return None if share is None else int(share * host_bytes)

    monkeypatch.setattr(OffloadEngine, "reserve", reserve)
    cache = StagePlanCache(_engine())
    if shares[-1] is not None:
        # What is fixed by the settings cannot shrink, so the second plan says what is missing.
        with pytest.raises(BudgetError, match="host"):
            cache._make_plans(*WANTED)
    else:
        (plan,) = cache._make_plans(*WANTED).values()
        assert plan.budgets.host == asked[0] == asked[1]
    assert "the system gave" in caplog.text


def test_one_pool_serves_all_stages_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning more of it would stop the middle of a step."""
    asked: list[int] = []

    def reserve(self: OffloadEngine, host_bytes: int, progress: object) -> None:
        asked.append(host_bytes)

    monkeypatch.setattr(OffloadEngine, "reserve", reserve)
    name = "interleaved_seq1f1b"
    model = make(4, offload="full", recompute="full", pp_virtual_stages=2, pp_schedule=name)
    engine = get_engine(model)
    assert isinstance(engine, PipelineEngine)
    choice = PipelineChoice(schedule=name, bounds=((0, 10), (10, 20)), reason="set by the user")
    cache = StagePlanCache(engine)
    plans = cache._make_plans(BATCH._replace(micro_batches=2), choice, {})
    batches = math.ceil(cache._alive(name, 2, 2))
    assert len(plans) == 2
    assert asked == [batches * sum(map(offloaded_bytes, plans.values()))]


def test_stages_are_planned_anew_for_other_trained_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once for each set of them, on all ranks, whichever rank has others than before."""
    others = [7]

    def check_agreement(mesh: object, facts: object, *own: int) -> list[tuple[int, ...]]:
        return [own, *((number, 0) for number in others)]

    monkeypatch.setattr("sppo_hf.pipeline.pipeline_engine.check_agreement", check_agreement)
    chosen: list[object] = []

    def make_on_first_rank(mesh: object, make: Callable[[], Any]) -> Any:
        chosen.append(mesh)
        return make()

    monkeypatch.setattr(stage_plans, "make_on_first_rank", make_on_first_rank)
    monkeypatch.setattr(stage_plans, "make_on_all_ranks", _alone)
    model = make(num_chunks=2)
    engine: Any = get_engine(model)
    call = read_call(engine.parts, engine.original_forward, (), make_batch(tokens=20))

    def plan() -> BatchPlans:
        engine._check_agreement(call)
        return engine._stage_plans.get(1, 20, torch.device("cpu"), micro_batches=1)

    whole = plan()
    assert plan() is whole
    model.model.embed_tokens.weight.requires_grad_(False)
    less = plan()
    model.model.embed_tokens.weight.requires_grad_(True)
    assert plan() is whole
    gradients = [one.by_stage[0].shape.gradient_bytes for one in (whole, less)]
    assert gradients[0] - gradients[1] == model.model.embed_tokens.weight.nbytes
    assert len(chosen) == 2
    others[:] = [8]
    plan()
    assert len(chosen) == 3
    # Of sets that are drawn again and again those that trained last are known.
    cache = engine._stage_plans
    for number in range(10, 20):
        others[:] = [number]
        plan()
    assert len(cache._shapes) == 8
    assert all(len(known.plans) == 1 for known in cache._shapes.values())
    others[:] = [12]
    plan()
    assert len(chosen) == 13
    others[:] = [11]
    plan()
    assert len(chosen) == 14


def test_the_allocator_is_set_before_a_rank_asks_for_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without expandable segments, plans leave a part of the device to holes."""
    order: list[str] = []
    facts = stage_plans.device_facts

    def noted(*args: Any, **known: Any) -> DeviceFacts:
        order.append("facts")
        return facts(*args, **known)

    monkeypatch.setattr(stage_plans, "device_facts", noted)
    monkeypatch.setattr(stage_plans, "use_expandable_segments", lambda _: order.append("set"))
    monkeypatch.setattr(stage_plans, "make_on_first_rank", lambda mesh, make: make())
    engine: Any = _engine()
    StagePlanCache(engine)._choose(BATCH)
    assert order == ["set", "facts"]


def _alone(make: Callable[[], Any], group: object, *, share: Callable[[Any], Any]) -> Any:
    """Stand in for `make_on_all_ranks` with one rank."""
    made = make()
    return made, [share(made)]


def test_corrections_are_forgotten_with_the_set_of_trained_parameters() -> None:
    cache: Any = StagePlanCache(_engine())
    cache._shapes = dict.fromkeys((BATCH, BATCH._replace(trained=(8, 9))), object())
    cache._to_learn_from = [SimpleNamespace(plans=SimpleNamespace(shape=BATCH))]
    cache._forget((7, 8))
    assert [shape.trained for shape in cache._shapes] == [(8, 9)]
    assert not cache._to_learn_from


def test_a_correction_that_raises_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped on all ranks; otherwise every later batch would be refused, too."""
    asked: list[object] = []

    def make_on_all_ranks(make: Callable[[], Any], *_: object, **__: object) -> Any:
        asked.append(make)
        raise BudgetError("no room")

    monkeypatch.setattr(stage_plans, "make_on_all_ranks", make_on_all_ranks)
    cache: Any = StagePlanCache(_engine())
    cache._to_learn_from = [SimpleNamespace()]
    with pytest.raises(BudgetError, match="no room"):
        cache.correct()
    cache.correct()
    assert len(asked) == 1


class _Group:
    """Ranks that share a sequence, which hear what a rank raises while they decide."""

    size = 1

    def __init__(self) -> None:
        self.heard: list[Exception] = []

    def decide(self, make: Callable[[], Any], better: Callable[[Any], float]) -> Any:
        try:
            return make()
        except OffloadError as error:
            self.heard.append(error)
            raise


def test_ranks_that_share_a_sequence_are_told_when_one_gets_no_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would wait for it in a collective."""

    def reserve(*_: object) -> int | None:
        raise OffloadError("not a byte")

    monkeypatch.setattr(OffloadEngine, "reserve", reserve)
    engine, group = _engine(), _Group()
    monkeypatch.setattr(engine.plans, "_group", group)
    with pytest.raises(OffloadError) as raised:
        StagePlanCache(engine)._make_plans(*WANTED)
    assert group.heard == [raised.value]


def test_the_step_shown_has_messages_as_wide_as_they_are() -> None:
    """Gemma 3n and 4 give more than a hidden state on; the search over layouts says the same."""
    h100, rows, name = load_profile("h100"), 2, "seq1f1b"
    bounds = tuple((4096 * at, 4096 * (at + 1)) for at in range(3))
    config = SPPOConfig(
        pp_size=3, chunk_lengths=(4096,) * 3, recompute="none", offload="none", offload_kv="none"
    )
    device = DeviceFacts(kind="cuda", name="a GPU", profile=h100)
    seconds = {}
    for times in (1, 100):
        # Less with every layer, as inputs of layers behind it are left.
        widths = tuple((times + 6 - layer) * SHAPE.hidden_size for layer in range(6))
        shape = replace(SHAPE, message_elements=widths)
        costs = PipelineCost(
            generate(name, Size(3, rows, 3)),
            ModelCost(shape=shape, profile=h100, dtype_name="bfloat16"),
            bounds,
            link_bytes_per_second=UNKNOWN_LINK,
        )
        plans = {
            stage: make_plan(
                PlanRequest(
                    config=config,
                    shape=stage_shape(shape, layers, last=stage == 2),
                    device=device,
                    total_tokens=bounds[-1][1],
                    bounds=bounds,
                    alive=1.0,
                )
            )
            for stage, layers in enumerate(costs.stages)
        }
        engine: Any = SimpleNamespace(
            mesh=SimpleNamespace(pp_size=3, dp_size=1),
            config=config,
            staged=SimpleNamespace(cut=SimpleNamespace(layers=costs.stages)),
            shape=lambda shape=shape: shape,
        )
        choice = PipelineChoice(schedule=name, bounds=bounds, reason="set by the user")
        shape_of_batch = BatchShape(1, bounds[-1][1], True, CPU, (), micro_batches=rows)
        batch = BatchPlans(shape_of_batch, choice, torch.bfloat16, plans)
        said = [batch.shared()]
        shown = StagePlanCache(engine)._predict(batch, said, reduces=False)
        lowered = lower(generate(name, Size(3, rows, 3)))
        expected = simulate_pipeline(lowered, seconds=costs.seconds).end_seconds
        assert shown.step_seconds == pytest.approx(expected, rel=1e-3)
        seconds[times] = expected
    assert seconds[100] > 1.1 * seconds[1]


# -- the schedule of a step


def made(
    name: str = "seq1f1b",
    *,
    size: tuple[int, int] = (3, 4),
    pp_size: int = 2,
    forward_only: bool = False,
    reduce: bool = False,
    copies: Copies = frozenset(),
    **settings: Any,
) -> StepSchedule:
    config = SPPOConfig(pp_size=pp_size, pp_schedule=name, **settings)  # type: ignore[arg-type]
    return step_schedule(
        config, name, *size, forward_only=forward_only, reduce=reduce, copies=copies
    )


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("reduce", [False, True])
def test_a_step_is_the_lowered_schedule(name: str, reduce: bool) -> None:
    virtual = 2 if name == "interleaved_seq1f1b" else 1
    step = made(name, reduce=reduce, pp_virtual_stages=virtual)
    assert step.schedule == lower(generate(name, Size(2, 3, 4, virtual)), reduce=reduce)
    assert (step.name, step.splits_backward) == (name, name == "zb_seq1f1b")
    validate(step.schedule)
    reductions = {a.stage for rank in step.schedule.ranks for a in rank if a.kind == "REDUCE_GRAD"}
    assert reductions == (set(range(2 * virtual)) if reduce else set())


def test_copies_of_a_chunk_are_made_in_every_micro_batch() -> None:
    copies: Copies = frozenset({("D", 0, 0, None), ("D", 0, 1, None), ("S", 0, 1, None)})
    step = made(size=(2, 3), copies=copies)
    assert step.offloaded_units == {(0, 0), (0, 1), (0, 3), (0, 4)}
    stored = {(a.stage, a.unit) for rank in step.schedule.ranks for a in rank if a.kind == "S"}
    assert stored == {(0, 1), (0, 4)}


@pytest.mark.parametrize("name", GENERATORS)
def test_evaluation_runs_forwards_alone(name: str) -> None:
    step = made(name, forward_only=True, reduce=True)
    kinds = {action.kind for rank in step.schedule.ranks for action in rank}
    assert kinds == {"F", "SEND_F", "RECV_F"}
    assert not step.splits_backward
    forwards = generate(name, Size(2, 3, 4)).keep(lambda action: action.kind == "F")
    assert step.schedule == add_transfers(forwards)


def test_a_schedule_that_cannot_run_is_refused_before_it_runs(monkeypatch) -> None:
    right = GENERATORS["gpipe"]
    monkeypatch.setitem(
        GENERATORS, "gpipe", lambda size: right(size).keep(lambda a: a != Action("B", 1, 2))
    )
    with pytest.raises(ScheduleError, match=r"0B2 .* needs 1B2"):
        made("gpipe", size=(3, 7))


def test_a_schedule_is_made_once_for_each_size() -> None:
    assert made() is made(num_chunks=4)
    assert made() is not made(size=(3, 5))
    assert made() is not made(reduce=True)


def test_too_few_units_for_interleaving_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        check_size("interleaved_seq1f1b", Size(4, 1, 3, 2))
    said = str(caught.value)
    for part in ("pp_schedule='interleaved_seq1f1b'", "pp_size=4", "1 micro-batches of 3 chunks"):
        assert part in said
    assert "Remedy" in said
    check_size("interleaved_seq1f1b", Size(4, 1, 4, 2))
    # Other schedules only idle, and so does this one where a later batch is short.
    check_size("seq1f1b", Size(4, 1, 1))
    step = made("interleaved_seq1f1b", size=(1, 3), pp_size=4, pp_virtual_stages=2)
    validate(step.schedule)
