"""Pictures of schedules, from any timeline; of formats and what is missing see test_figures.py."""

from pathlib import Path

import pytest

from sppo_hf.reporting.figures import draw_schedule
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.generate import Size, generate
from sppo_hf.schedule.lower import lower
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import Change, fixed_seconds, peak_units, simulate_pipeline
from sppo_hf.schedule.timeline import Timeline

pytest.importorskip("matplotlib")


def lowered() -> tuple[Schedule, Timeline]:
    schedule = lower(
        generate("zb_seq1f1b", Size(2, 2, 2)), offloaded=lambda stage, unit: unit == 0, reduce=True
    )
    seconds = fixed_seconds(1, 2, send=0.25, copy=0.5, reduce=1)
    return schedule, simulate_pipeline(schedule, seconds=seconds)


def texts(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_a_picture_says_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    # Letters as text, so that they can be read back.
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    schedule, timeline = lowered()
    draw_schedule(schedule, timeline, path=tmp_path / "picture.svg", title="the title")
    said = texts(tmp_path / "picture.svg")
    for word in ("the title", "rank 0", "rank 1", "d2h", "h2d", "send 1", "send 0", "reduce"):
        assert f">{word}<" in said
    for word in ("input gradient", "weight gradient", "send activation", "2 micro-batches of 2"):
        assert word in said
    assert ">0.1<" in said
    assert ">1.0<" in said
    assert "units alive on each rank" in said
    most = peak_units(schedule, timeline)
    assert all(f">rank {rank}: {units}<" in said for rank, units in enumerate(most))


def test_bytes_are_drawn_where_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    schedule = generate("gpipe", Size(2, 2))

    def changes(action: Action) -> list[Change]:
        size = 3 * 2**30 * (1 if action.kind == "F" else -1)
        return [Change(f"{action.stage}.device", "frames", size, "start" if size > 0 else "end")]

    timeline = simulate_pipeline(schedule, seconds=fixed_seconds(), changes=changes)
    draw_schedule(schedule, timeline, path=tmp_path / "picture.svg", title="bytes")
    said = texts(tmp_path / "picture.svg")
    assert ">GiB<" in said
    assert ">rank 0: 6<" in said
    assert "bytes on each rank" in said


def test_a_step_of_no_time_and_many_units_are_drawn(tmp_path: Path) -> None:
    schedule = generate("seq1f1b", Size(4, 8, 16))
    for seconds in (fixed_seconds(0, 0), fixed_seconds(1, 2)):
        timeline = simulate_pipeline(schedule, seconds=seconds)
        draw_schedule(schedule, timeline, path=tmp_path / "picture.png", title="many")
        assert (tmp_path / "picture.png").stat().st_size > 5000
