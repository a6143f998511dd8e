"""A step's schedule: the one that the settings name, lowered, checked, made once."""

from typing import Any

import pytest

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError, ScheduleError
from sppo_hf.pipeline.stage_plans import StepSchedule, check_size, step_schedule
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.generate import GENERATORS, Size, generate
from sppo_hf.schedule.lower import add_transfers, lower
from sppo_hf.schedule.validate import validate


def made(
    name: str = "seq1f1b",
    *,
    size: tuple[int, int] = (3, 4),
    pp_size: int = 2,
    forward_only: bool = False,
    reduce: bool = False,
    **settings: Any,
) -> StepSchedule:
    config = SPPOConfig(pp_size=pp_size, pp_schedule=name, **settings)  # type: ignore[arg-type]
    return step_schedule(config, name, *size, forward_only=forward_only, reduce=reduce)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("reduce", [False, True])
def test_a_step_is_the_lowered_schedule(name: str, reduce: bool) -> None:
    virtual = 2 if name == "interleaved_seq1f1b" else 1
    step = made(name, reduce=reduce, pp_virtual_stages=virtual)
    assert step.schedule == lower(generate(name, Size(2, 3, 4, virtual)), reduce=reduce)
    assert (step.name, step.splits) == (name, name == "zb_seq1f1b")
    validate(step.schedule)
    reductions = {a.stage for rank in step.schedule.ranks for a in rank if a.kind == "REDUCE_GRAD"}
    assert reductions == (set(range(2 * virtual)) if reduce else set())


@pytest.mark.parametrize("name", GENERATORS)
def test_evaluation_runs_forwards_alone(name: str) -> None:
    step = made(name, forward_only=True, reduce=True)
    kinds = {action.kind for rank in step.schedule.ranks for action in rank}
    assert kinds == {"F", "SEND_F", "RECV_F"}
    assert not step.splits
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
