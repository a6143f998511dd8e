"""What the picture of a plan is made of: few bars, stacks that add up, colours of modes."""

import pytest

from sppo_hf.planning.figure_parts import mode_colour, stack_causes
from sppo_hf.planning.modes import ALL_MODES
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.bars import FINEST, KIND_COLOURS, join_spans, mixed
from sppo_hf.schedule.simulate import Change, simulate
from tests.planning.synthetic import Step, mixed_plan


def test_a_large_plan_is_few_bars_and_all_its_work() -> None:
    timeline = Step(mixed_plan(64, 80)).simulate()
    for lane in timeline.lanes:
        bars = join_spans(timeline.spans(lane), timeline.end_seconds * FINEST)
        assert len(bars) <= 700
        assert sum(bar.busy_seconds for bar in bars) == pytest.approx(timeline.busy_seconds(lane))


def test_a_stack_adds_up_to_the_curve() -> None:
    timeline = Step(mixed_plan(8)).simulate()
    for tier in ("device", "host", "disk"):
        curve = timeline.curve(tier)
        stack = stack_causes(timeline, tier, [at for at, _ in curve])
        assert [
            sum(parts) for parts in zip(*(layer.held_bytes for layer in stack), strict=True)
        ] == [num_bytes for _, num_bytes in curve]
    device = stack_causes(timeline, "device", [0.0])
    names = [layer.name for layer in device]
    assert names == ["weights", "gradients", "K/V", "frames", "live chunk"]


def test_a_cause_has_its_tiers_colour_on_every_rank() -> None:
    timeline = simulate(
        {"1.compute": [Action("F", 1, 0)]},
        seconds=lambda _: 1.0,
        after=lambda _: (),
        changes=lambda _: [Change("1.host", "frames", 1), Change("1.host", "disk_staging", 1)],
    )
    frames, staging = stack_causes(timeline, "1.host", [0.0])
    assert (frames.name, staging.name) == ("frames", "disk staging")
    assert frames.colour == KIND_COLOURS["D"]
    assert staging.colour == mixed(KIND_COLOURS["D"], 0.5)


def test_every_mode_has_a_colour_of_its_own() -> None:
    assert len({mode_colour(mode) for mode in ALL_MODES}) == len(ALL_MODES) == 9
