"""Plans are made once for each batch shape, and corrected once by measured steps."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from sppo_hf.config import SPPOConfig
from sppo_hf.engine import plan_cache as plans_module
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.engine.model_parts import find_parts, suppress_peft_warnings
from sppo_hf.engine.plan_cache import PlanCache, PlannedOffload
from sppo_hf.engine.sequence_group import SequenceGroup
from sppo_hf.engine.step_observer import StepObserver, StepTimer
from sppo_hf.errors import BudgetError
from sppo_hf.offload.engine import OffloadEngine
from sppo_hf.planning.cost import Correction
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.prediction import MeasuredStep
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model, make_batch
from tests.planning.moments import moments_of
from tests.planning.situations import slow_cost, small_shape
from tests.planning.synthetic import mixed_plan
from tests.planning.test_prediction import as_measured, predicted


class _Plans(StepObserver):
    def __init__(self):
        self.seen = []

    def on_plan(self, plan, model_name):
        self.seen.append(plan)


def _cache(group: Any = None) -> PlanCache:
    config = SPPOConfig(num_chunks=3, show_plan=False)
    return PlanCache(find_parts(build_tiny_model("llama")), config, PlannedOffload(config), group)


def _step(model, *, tokens=20, rows=1):
    model(**make_batch(tokens=tokens, rows=rows)).loss.backward()


def _converted(model, **settings):
    plans = _Plans()
    settings = SPPOConfig(num_chunks=3, show_plan=False, **settings)
    return convert(model.train(), settings, observer=plans), plans.seen


def test_one_plan_per_shape():
    model, seen = _converted(build_tiny_model("llama"))
    for tokens in (20, 24, 20, 24):
        _step(model, tokens=tokens)
        model.zero_grad(set_to_none=True)
    assert [plan.total_tokens for plan in seen] == [20, 24]
    assert not any(plan.accumulates for plan in seen)


def test_accumulated_gradients_are_counted_in_plans():
    model, seen = _converted(build_tiny_model("llama"))
    for _ in range(3):
        _step(model)
    assert [plan.accumulates for plan in seen] == [False, True], "once, however often"
    once, twice = (moments_of(plan.estimate)[-1].device["gradients"] for plan in seen)
    # By layer, those of the layer whose backward runs are there twice.
    assert seen[0].order == "by_layer"
    assert once < twice < 2 * once
    model.zero_grad(set_to_none=True)
    _step(model)
    assert len(seen) == 2, "the first batch of a later step fits what was planned"


def test_small_gradients_do_not_change_plans():
    model, seen = _converted(add_lora(build_tiny_model("llama", vocab_size=10_000)))
    for _ in range(2):
        _step(model)
    (plan,) = seen
    assert moments_of(plan.estimate)[-1].device["gradients"] < 0.01 * plan.estimate.device.total


def test_a_corrected_plan_is_made_for_the_same_device(monkeypatch: pytest.MonkeyPatch):
    """With several devices, the model's need not be the current one."""
    asked: list[torch.device] = []
    facts = plans_module.device_facts

    def noted(device: torch.device, config: SPPOConfig, **known: Any):
        asked.append(device)
        return facts(device, config, **known)

    monkeypatch.setattr(plans_module, "device_facts", noted)
    book = _cache()
    device = torch.device("cpu", 1)
    plan = book.get(1, 20, device, StepObserver())
    assert book.get(1, 20, device, StepObserver()) is plan
    seconds = (1.0,) * 3
    measured = MeasuredStep(forward_seconds=seconds, backward_seconds=seconds, stall_seconds=0.0)
    found = plan, measured, Correction(backward=2.0)
    monkeypatch.setattr(book, "_new_corrections", lambda: iter([found]))
    # As if less of the device were free by then.
    monkeypatch.setattr("sppo_hf.planning.plan.loss_tile_tokens", lambda *_, **__: 7)
    book.correct(StepObserver())
    assert asked == [device] * 2
    corrected = book.get(1, 20, device, StepObserver())
    assert corrected is not plan
    assert corrected.tile_tokens == plan.tile_tokens != 7, "sums keep their order"
    book.get(1, 20, torch.device("cpu", 2), StepObserver())
    assert asked[2:] == [torch.device("cpu", 2)]


def test_files_of_earlier_steps_are_free_for_later_plans(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """They are kept, so the disk has less free than a step may use."""
    known: list[Mapping[str, int]] = []
    facts = plans_module.device_facts

    def noted(
        device: torch.device, config: SPPOConfig, *, own_bytes: Mapping[str, int], **others: Any
    ):
        known.append(own_bytes)
        return facts(device, config, own_bytes=own_bytes, **others)

    monkeypatch.setattr(plans_module, "device_facts", noted)
    model = build_tiny_model("llama").train()
    settings = {"num_chunks": 2, "offload": "full", "offload_tier": "disk", "show_plan": False}
    config = SPPOConfig(offload_dir=str(tmp_path), min_offload_size=1, **settings)
    convert(model, config)
    for tokens in (40, 30):
        model(**make_batch(tokens=tokens)).loss.backward()
    engine = get_engine(model)
    assert engine is not None
    assert known == [{}, engine.offload.reserved_bytes]
    assert known[1]["disk"] > 0


def test_each_set_of_trained_parameters_has_its_own_plans():
    """Adapters that take turns are planned for once each; one that is off in an evaluation, too."""
    peft = pytest.importorskip("peft")
    model, seen = _converted(build_tiny_model("llama"))
    settings = {"task_type": "CAUSAL_LM", "init_lora_weights": False}
    few = peft.LoraConfig(**settings, r=2, target_modules=["q_proj"])
    many = peft.LoraConfig(**settings, r=8, target_modules=["q_proj", "down_proj"])
    with suppress_peft_warnings():
        wrapped = peft.get_peft_model(model, few, adapter_name="few").train()
        wrapped.add_adapter("many", many)
    for name in ("few", "many") * 3:
        wrapped.set_adapter(name)
        _step(wrapped)
        wrapped.zero_grad(set_to_none=True)
        with torch.no_grad(), wrapped.disable_adapter():
            wrapped(**make_batch(tokens=20))
    trained = [plan.shape.gradient_bytes for plan in seen if plan.training]
    assert len(trained) == 2
    assert 0 < trained[0] < trained[1]
    assert len(seen) == 3, "one of evaluation"


def test_plans_of_the_least_recently_trained_sets_are_dropped(monkeypatch: pytest.MonkeyPatch):
    """LISA, for one, draws new sets of trained layers all the time; the last ones are kept."""
    monkeypatch.setattr(plans_module, "_MAX_TRAINED_SETS", 3)
    model, seen = _converted(build_tiny_model("llama", num_hidden_layers=2))
    engine = get_engine(model)
    assert engine is not None

    def train(only: str) -> int:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == only)
        _step(model)
        model.zero_grad(set_to_none=True)
        return len(seen)

    names = [name for name, _ in model.named_parameters() if "layers" in name][:5]
    assert [train(name) for name in names] == list(range(1, 6))
    assert [train(name) for name in reversed(names[2:])] == [5] * 3
    assert train(names[0]) == 6
    assert train(names[2]) == 6, "used later than its neighbours"
    assert train(names[4]) == 7, "not used for the longest time"
    book = engine.plans
    assert len(book._plans) == len(book._shapes) == len(book._runs) == 3


@pytest.mark.parametrize("shares", [(0.5,), (1.0, 0.5)], ids=str)
def test_plans_use_the_host_memory_that_the_system_grants(shares, monkeypatch, caplog):
    """Also where the system gives less than it gave a moment before."""
    asked = []

    def reserve(self, host_bytes, progress):
        asked.append(host_bytes)
        return int(shares[len(asked) - 1] * host_bytes)

    monkeypatch.setattr(OffloadEngine, "reserve", reserve)
    model, _seen = _converted(build_tiny_model("llama"), offload="full")
    with (
        caplog.at_level(logging.WARNING, logger="sppo_hf"),
        pytest.raises(BudgetError, match="host"),
    ):
        _step(model)
    # What is fixed by the settings cannot shrink, so the last plan says what is missing.
    assert asked == asked[:1] * len(shares)
    assert asked[0] > 0
    assert caplog.text.count("the system gave") == len(shares)


def test_a_correction_without_a_feasible_plan_keeps_the_plan(monkeypatch: pytest.MonkeyPatch):
    book = _cache()
    wanted = 1, 20, torch.device("cpu"), StepObserver()
    plan = book.get(*wanted)
    seconds = (1.0,) * 3
    measured = MeasuredStep(forward_seconds=seconds, backward_seconds=seconds, stall_seconds=0.0)
    found = plan, measured, Correction(backward=2.0)
    monkeypatch.setattr(book, "_new_corrections", lambda: iter([found]))

    def refuse(request: Any):
        raise BudgetError("no room")

    monkeypatch.setattr(plans_module, "make_plan", refuse)
    book.correct(StepObserver())
    assert book.get(*wanted) is plan


def test_a_written_plan_of_another_model_gives_a_warning():
    made_for = "plan 1: 99 layers of 64, vocabulary 1000; 20 tokens"
    model, seen = _converted(build_tiny_model("llama"), planned_for=made_for)
    _step(model)
    (plan,) = seen
    (said,) = [warning for warning in plan.warnings if "the plan in" in warning]
    assert "is of a model of 99 layers of 64" in said
    assert "write it again" in said
    assert "20 tokens" not in said, "of this length it is"


@dataclass
class _Timer:
    """A finished step; `took` is None while the device is behind."""

    plan: Plan
    took: MeasuredStep | None

    def measured(self) -> MeasuredStep | None:
        return self.took


def _plan() -> Plan:
    cost = slow_cost(small_shape())
    return replace(mixed_plan(6), prediction=predicted(cost), cost=cost)


def _slower(plan: Plan) -> MeasuredStep:
    """Backward takes three times as long as planned."""
    assert plan.prediction is not None
    as_planned = as_measured(plan.prediction)
    return replace(as_planned, backward_seconds=tuple(3 * s for s in as_planned.backward_seconds))


def _finish_step(cache: PlanCache, plan: Plan, took: MeasuredStep | None) -> _Timer:
    timer = _Timer(plan, took)
    cache.step_done(cast(StepTimer, timer))
    return timer


def test_only_the_second_step_is_measured():
    cache, plan = _cache(), _plan()
    _finish_step(cache, plan, _slower(plan))
    assert not list(cache._new_corrections()), "the first step allocates and compiles"
    _finish_step(cache, plan, _slower(plan))
    ((corrected, _, correction),) = cache._new_corrections()
    assert corrected is plan
    assert correction.backward / correction.forward > 2
    for _ in range(3):
        _finish_step(cache, plan, _slower(plan))
        assert not list(cache._new_corrections()), "once"


def test_measuring_does_not_wait_for_the_device():
    cache, plan = _cache(), _plan()
    _finish_step(cache, plan, None)
    timer = _finish_step(cache, plan, None)
    assert not list(cache._new_corrections())
    timer.took = _slower(plan)
    assert len(list(cache._new_corrections())) == 1


def test_a_corrected_plan_is_not_corrected_again():
    cache, plan = _cache(), _plan()
    assert plan.cost is not None
    plan = replace(plan, cost=replace(plan.cost, correction=Correction(backward=2.0)))
    for _ in range(2):
        _finish_step(cache, plan, _slower(plan))
    assert not list(cache._new_corrections())


def test_plans_without_a_prediction_are_not_corrected():
    cache = _cache()
    for _ in range(2):
        _finish_step(cache, mixed_plan(6), None)
    assert not list(cache._new_corrections())


class _Group:
    """Two ranks that share a sequence, of which the other one `took` so long."""

    took: MeasuredStep | None = None

    def decide(self, make: Callable[[], Any], better: Callable[[Any], float]) -> Any:
        return min(make(), self.took, key=better)


def test_ranks_that_share_a_sequence_learn_from_the_slowest_rank():
    group, plan = _Group(), _plan()
    cache = _cache(cast(SequenceGroup, group))
    slow = _slower(plan)
    for _ in range(2):
        _finish_step(cache, plan, replace(slow, forward_seconds=(0.0,) * len(slow.forward_seconds)))
    assert not list(cache._new_corrections()), "the other one's device is behind"
    group.took = slow
    ((_, measured, _),) = cache._new_corrections()
    assert measured is slow
