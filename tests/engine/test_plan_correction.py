"""Steps are measured without waiting for the device, and each plan is corrected once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch

from sppo_hf.engine import step_observer
from sppo_hf.engine.plan_cache import ProfileCorrector
from sppo_hf.engine.sequence_group import SequenceGroup
from sppo_hf.engine.step_observer import ChunkTimer, StepTimer
from sppo_hf.planning.cost import Correction
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.prediction import MeasuredStep
from tests.planning.situations import slow_cost, small_shape
from tests.planning.synthetic import mixed_plan
from tests.planning.test_prediction import as_measured, predicted


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


def _step(corrector: ProfileCorrector, plan: Plan, took: MeasuredStep | None) -> _Timer:
    timer = _Timer(plan, took)
    corrector.step_done(cast(StepTimer, timer))
    return timer


def test_only_the_second_step_is_measured():
    corrector, plan = ProfileCorrector(), _plan()
    _step(corrector, plan, _slower(plan))
    assert not list(corrector.new_corrections()), "the first step allocates and compiles"
    _step(corrector, plan, _slower(plan))
    (found,) = corrector.new_corrections()
    assert found.plan is plan
    assert found.correction.backward / found.correction.forward > 2
    for _ in range(3):
        _step(corrector, plan, _slower(plan))
        assert not list(corrector.new_corrections()), "once"


def test_measuring_does_not_wait_for_the_device():
    corrector, plan = ProfileCorrector(), _plan()
    _step(corrector, plan, None)
    timer = _step(corrector, plan, None)
    assert not list(corrector.new_corrections())
    timer.took = _slower(plan)
    assert len(list(corrector.new_corrections())) == 1


def test_a_corrected_plan_is_not_corrected_again():
    corrector, plan = ProfileCorrector(), _plan()
    assert plan.cost is not None
    plan = replace(plan, cost=replace(plan.cost, correction=Correction(backward=2.0)))
    for _ in range(2):
        _step(corrector, plan, _slower(plan))
    assert not list(corrector.new_corrections())


def test_plans_without_a_prediction_are_left_alone():
    corrector = ProfileCorrector()
    for _ in range(2):
        _step(corrector, mixed_plan(6), None)
    assert not list(corrector.new_corrections())


class _Group:
    """Two ranks that share a sequence, of which the other one `took` so long."""

    took: MeasuredStep | None = None

    def decide(self, make: Callable[[], Any], better: Callable[[Any], float]) -> Any:
        return min(make(), self.took, key=better)


def test_ranks_that_share_a_sequence_learn_from_the_slowest_once_all_are_there():
    group, plan = _Group(), _plan()
    corrector = ProfileCorrector(cast(SequenceGroup, group))
    slow = _slower(plan)
    for _ in range(2):
        _step(corrector, plan, replace(slow, forward_seconds=(0.0,) * len(slow.forward_seconds)))
    assert not list(corrector.new_corrections()), "the other one's device is behind"
    group.took = slow
    (found,) = corrector.new_corrections()
    assert found.measured is slow


class _Late:
    """A mark on a device whose clock the test sets."""

    now = 0.0
    passed_until = 0.0

    def __init__(self, device: torch.device) -> None:
        assert torch.device(device).type == "cuda"
        self.at = _Late.now

    def is_reached(self) -> bool:
        return self.at <= _Late.passed_until

    def seconds_until(self, later: Any) -> float:
        return later.at - self.at


def test_seconds_are_known_when_the_device_has_reached_the_last_mark(monkeypatch):
    monkeypatch.setattr(step_observer, "Mark", _Late)
    timer = ChunkTimer("cuda")
    for second, (phase, chunk) in enumerate(
        [("forward", 0), ("forward", 1), ("end", 0), ("backward", 1), ("backward", 0), ("end", 0)]
    ):
        _Late.now = float(second**2)
        timer.enter(phase, chunk)
    _Late.passed_until = 16.0
    assert not timer.is_ready()
    with pytest.raises(AssertionError):
        timer.seconds("forward", 2)
    _Late.passed_until = 25.0
    assert timer.seconds("forward", 2) == (1.0, 3.0)
    assert timer.seconds("backward", 2) == (9.0, 7.0), "what lies between the phases is neither's"


def test_marks_are_recorded_in_the_stream_of_the_models_device(monkeypatch):
    """Whatever the current device is: autograd's thread has another than the main thread."""
    recorded = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            recorded.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    timer = ChunkTimer(torch.device("cuda", 1))
    timer.enter("forward", 0)
    timer.enter("end")
    assert recorded == ["stream of cuda:1"] * 2
