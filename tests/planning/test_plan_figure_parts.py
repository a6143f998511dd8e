"""What the picture of a plan is made of: few bars, stacks that add up, a colour for every cause."""

import pytest
from hypothesis import given, settings

from sppo_hf.planning.activation_modes import ALL_MODES
from sppo_hf.planning.causes import Cause
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.lowering import lower
from sppo_hf.reporting.gantt import FINEST, join_spans
from sppo_hf.reporting.plan_figure import mode_colour, stack_causes
from sppo_hf.schedule.timeline import Timeline
from tests.planning.situations import runs
from tests.planning.synthetic import mixed_plan, simulated


def test_a_large_plan_is_few_bars_and_all_its_work() -> None:
    timeline = simulated(mixed_plan(64, 80))
    for lane in timeline.lanes:
        bars = join_spans(timeline.spans(lane), timeline.end_seconds * FINEST)
        assert len(bars) <= 700
        assert sum(bar.busy_seconds for bar in bars) == pytest.approx(timeline.busy_seconds(lane))


@given(run=runs())
@settings(max_examples=40)
def test_stacks_add_up_to_the_curves_and_know_every_cause(run: tuple[ModelCost, Decisions]) -> None:
    cost, what = run
    timeline = lower(what, cost).simulate(with_bytes=True)
    for tier in timeline.tiers:
        curve = timeline.curve(tier)
        stack = stack_causes(timeline, tier, [at for at, _ in curve])
        assert [
            sum(parts) for parts in zip(*(layer.held_bytes for layer in stack), strict=True)
        ] == [num_bytes for _, num_bytes in curve]
        assert [layer.name for layer in stack] == [
            cause.label for cause in Cause if cause in timeline.curves_by_cause(tier)
        ]


def test_causes_can_be_told_apart() -> None:
    for tier in ("device", "3.host"):
        timeline = _holding_everything(tier)
        stack = stack_causes(timeline, tier, [0.0])
        assert len({layer.name for layer in stack}) == len(Cause)
        assert len({layer.colour for layer in stack}) == len(Cause)


def _holding_everything(tier: str) -> Timeline:
    from sppo_hf.schedule.simulate import Change, simulate

    return simulate(
        {}, seconds=lambda _: 0.0, after=lambda _: (), standing=[Change(tier, c, 1) for c in Cause]
    )


def test_every_mode_has_a_colour_of_its_own() -> None:
    assert len({mode_colour(mode) for mode in ALL_MODES}) == len(ALL_MODES) == 12
