"""draw_plan: readable pictures in three formats, without a display and without global state.

And what they are made of: few bars, stacks that add up, a colour for every cause and mode.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from sppo_hf.errors import ConfigError
from sppo_hf.planning.activation_modes import all_modes
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.lowering import lower
from sppo_hf.planning.memory import Cause
from sppo_hf.planning.plan import Plan
from sppo_hf.reporting.figures import FINEST, draw_plan, join_spans, mode_colour, stack_causes
from sppo_hf.rules import format_bytes
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.simulate import Change
from sppo_hf.schedule.timeline import Timeline
from tests.planning.situations import runs
from tests.planning.synthetic import GIB, mixed_plan, simulated
from tests.schedule.simulated import simulate
from tests.sweeps import examples, sample

matplotlib = pytest.importorskip("matplotlib")
# Not of the pure tier, which is the standard library's.
pytestmark = pytest.mark.fake

BUDGETS = {"device": 80 * GIB, "host": 512 * GIB, "disk": None}


def draw(plan: Plan, timeline: Timeline, path: Path, **changes: Any) -> Path:
    draw_plan(
        plan, timeline, **{"budgets": BUDGETS, "path": path, "title": "A $5 model", **changes}
    )
    return path


def words_in(svg: Path) -> str:
    """All that an SVG says: matplotlib draws text as shapes, each after a comment with it."""
    text = svg.read_text()
    return "\n".join(part.split("-->")[0].strip() for part in text.split("<!--")[1:])


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Hand out the figure that was saved last."""
    from matplotlib.figure import Figure

    saved: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *args: Any, **settings: Any) -> None:
        saved.append(self)
        save(self, *args, **settings)

    monkeypatch.setattr(Figure, "savefig", keep)
    return lambda: saved[-1]


@pytest.mark.parametrize(
    ("ending", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".PDF", b"%PDF")]
)
def test_formats_leave_matplotlibs_settings_alone(
    tmp_path: Path, ending: str, magic: bytes
) -> None:
    before = dict(matplotlib.rcParams)
    with_pyplot = "matplotlib.pyplot" in sys.modules
    path = draw(mixed_plan(2, 2), simulated(mixed_plan(2, 2)), tmp_path / f"plan{ending}")
    assert path.read_bytes().startswith(magic)
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == with_pyplot


def test_unknown_endings_are_refused(tmp_path: Path) -> None:
    plan = mixed_plan(2, 2)
    for name in ("plan.bmp", "plan"):
        with pytest.raises(ConfigError, match=rf"'{name}'.*\.png, \.svg, \.pdf"):
            draw(plan, simulated(plan), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plan = mixed_plan(2, 2)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        draw(plan, simulated(plan), tmp_path / "plan.png")


def test_says_what_it_shows(tmp_path: Path) -> None:
    plan = mixed_plan(8)
    timeline = simulated(plan, copy_slowness=3.0)
    said = words_in(draw(plan, timeline, tmp_path / "plan.svg"))
    peak = format_bytes(timeline.peak("device").num_bytes)
    for words in (
        *("A $5 model", "131,072 tokens", "8 chunks, ", "32 layers"),
        f"{timeline.end_seconds:.3g} seconds a step",
        *("keep", "offload", "disk", "recompute", "recompute+offload"),
        f"device: peak {peak}, over the budget of 80.0 GiB",
        *("weights", "K/V", "activations", "temporaries", "copies", "budget", "GiB"),
        f"resources: compute waits {timeline.stall_seconds('compute'):.3g} seconds",
        *("compute", "d2h", "disk write", "forward", "backward", "host to device", "waits"),
        *("time (seconds)", "position in the sequence (tokens)"),
    ):
        assert words in said, words
    assert f"{timeline.busy_seconds('compute') / timeline.end_seconds:.0%} busy" in said


def test_time_is_on_one_axis_and_a_budget_far_above_is_named_but_not_drawn(
    tmp_path: Path, drawn: Any
) -> None:
    plan = mixed_plan(4, 4)
    timeline = simulated(plan)
    draw(plan, timeline, tmp_path / "plan.png", budgets={"device": 10**15})
    _, modes, *panels = drawn().axes
    assert modes.get_xlim() == (0, plan.total_tokens)
    assert {axes.get_xlim() for axes in panels} == {(0.0, timeline.end_seconds)}
    assert len({axes.get_position().x0 for axes in panels}) == 1
    (device,) = (axes for axes in panels if axes.get_title(loc="left").startswith("device"))
    assert "(above the panel)" in device.get_title(loc="left")
    assert device.get_ylim()[1] * GIB < 2 * timeline.peak("device").num_bytes


@pytest.mark.parametrize(("num_chunks", "layers"), sample([(1, 2), (8, 32), (64, 80)], 2))
def test_no_words_lie_on_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_chunks: int, layers: int
) -> None:
    from matplotlib.text import Text

    # Tick labels outside an axis exist too, so only what is really drawn is looked at.
    boxes: dict[Text, Any] = {}
    page = [0.0, 0.0]
    draw_text = Text.draw

    def watch(self: Text, renderer: Any) -> None:
        draw_text(self, renderer)
        if self.get_text().strip():
            boxes[self] = self.get_window_extent(renderer)
            page[:] = [renderer.width, renderer.height]

    monkeypatch.setattr(Text, "draw", watch)
    plan = mixed_plan(num_chunks, layers)
    draw(plan, simulated(plan, copy_slowness=2.0), tmp_path / "plan.png")
    assert len(boxes) > 30
    assert not [
        text.get_text()
        for text, box in boxes.items()
        if box.x0 < 0 or box.y0 < 0 or box.x1 > page[0] or box.y1 > page[1]
    ]
    assert not [
        (one.get_text(), other.get_text())
        for (one, here), (other, there) in combinations(boxes.items(), 2)
        if min(here.x1, there.x1) - max(here.x0, there.x0) > 1
        and min(here.y1, there.y1) - max(here.y0, there.y0) > 1
    ]


def test_an_evaluation_has_no_modes(tmp_path: Path) -> None:
    plan = replace(mixed_plan(2, 2), training=False, batch_rows=3)
    timeline = simulate(
        {"compute": [Action("F", 0, 0), Action("F", 0, 1)], "D2H": []},
        seconds=lambda _: 1e-3,
        after=lambda _: (),
        changes=lambda _: [Change("device", "kv", 2048)],
    )
    said = words_in(draw(plan, timeline, tmp_path / "plan.svg"))
    assert "evaluation: nothing is kept for backward" in said
    assert "3 rows of 131,072 tokens" in said
    assert "time (milliseconds)" in said
    assert "KiB" in said
    assert "D2H" not in said


def test_nothing_to_show(tmp_path: Path) -> None:
    timeline = simulate({}, seconds=lambda _: 0.0, after=lambda _: ())
    assert "resources" in words_in(draw(mixed_plan(1, 1), timeline, tmp_path / "plan.svg"))


def test_a_large_plan_is_few_bars_and_all_its_work() -> None:
    timeline = simulated(mixed_plan(64, 80))
    for resource in timeline.resources:
        bars = join_spans(timeline.spans(resource), timeline.end_seconds * FINEST)
        assert len(bars) <= 700
        assert sum(bar.busy_seconds for bar in bars) == pytest.approx(
            timeline.busy_seconds(resource)
        )


@given(run=runs())
@examples(20, whole=40)
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
        standing = [Change(tier, cause, 1) for cause in Cause]
        timeline = simulate({}, seconds=lambda _: 0.0, after=lambda _: (), standing=standing)
        stack = stack_causes(timeline, tier, [0.0])
        assert len({layer.name for layer in stack}) == len(Cause)
        assert len({layer.colour for layer in stack}) == len(Cause)


def test_every_mode_has_a_colour_of_its_own() -> None:
    assert len({mode_colour(mode) for mode in all_modes()}) == len(all_modes()) == 12
