"""A tier that one class adds is planned with, simulated and reported like the others."""

from collections.abc import Iterator

import pytest

from sppo_hf.planning.activation_modes import SAVED, all_modes, mode_of
from sppo_hf.planning.feasibility import PlanResult, assess_request, compare_policies, timeline_of
from sppo_hf.planning.hardware import HardwareProfile
from sppo_hf.planning.tiers import TIERS, TierModel, register_tier
from sppo_hf.reporting.figures import mode_colour, stack_causes
from sppo_hf.reporting.plan_json import answer_to_dict
from sppo_hf.reporting.plan_tables import plan_tables
from tests.planning.modes import shown
from tests.planning.questions import GIB, question

TOKENS = 16_384


@pytest.fixture(scope="module")
def remote() -> Iterator[type[TierModel]]:
    """Memory of another machine, over a network of 20 GB/s."""

    @register_tier("remote")
    class Remote(TierModel):
        colour = "#123456"

        def store_rate(self, profile: HardwareProfile) -> float:
            return 20e9

        def load_rate(self, profile: HardwareProfile) -> float:
            return 10e9

    yield Remote
    TIERS.remove("remote")


@pytest.fixture(scope="module")
def found(remote: type[TierModel]) -> PlanResult:
    settings = {"recompute": "none", "host_memory": "4GiB", "offload_kv": "none"}
    return assess_request(question(TOKENS, more_tiers="remote=256GiB", **settings))


@pytest.mark.usefixtures("remote")
def test_there_are_modes_for_it() -> None:
    assert len(all_modes()) == len(set(all_modes())) == 4 * len(SAVED)
    assert str(mode_of("inputs", "remote")) == "recompute+remote"
    assert len({mode_colour(mode) for mode in all_modes()}) == len(all_modes())


def test_it_is_planned_with(found: PlanResult) -> None:
    plan = found.plan
    assert plan is not None, "the host alone is too small for what whole frames take"
    assert any(mode.tier == "remote" for row in plan.layer_modes for mode in row)
    assert found.budgets.of("remote") == 256 * GIB
    held = plan.estimate.of("remote").total
    away = plan.program().offloaded_bytes[plan.program().tiers == list(TIERS).index("remote")]
    assert held == away.sum() > 0


def test_its_writes_and_reads_are_simulated_on_resources_of_its_own(found: PlanResult) -> None:
    assert found.plan is not None
    timeline = timeline_of(found.plan)
    held = found.plan.estimate.of("remote").total
    assert timeline.busy_seconds("remote write") == pytest.approx(held / 20e9)
    assert timeline.busy_seconds("remote read") == pytest.approx(held / 10e9)
    assert timeline.peak("remote").num_bytes == held
    assert {action.kind for action in found.plan.program().resources.actions["remote read"]} == {
        "L"
    }


def test_it_is_reported(found: PlanResult) -> None:
    assert found.plan is not None
    held = found.plan.estimate.of("remote").total
    said = answer_to_dict(found)
    assert said["peak_bytes"]["remote"] == held
    assert sum(said["peak_by_cause"]["remote"].values()) == held
    results = compare_policies(found.request, found.plan)
    flat = " ".join(shown(plan_tables(found, results, "m"), width=160).split())
    assert "remote memory" in flat, "the peak of each tier"
    assert "to remote" in flat, "what becomes of layers"
    assert "remote peak" in flat, "policies side by side"
    assert "remote 256 GiB" in flat, "their budgets"
    stack = stack_causes(
        timeline_of(found.plan), "remote", [found.plan.prediction.step_seconds / 2]
    )  # type: ignore[union-attr]
    assert [layer.name for layer in stack] == ["activations"]
    assert stack[0].held_bytes[0] > 0
