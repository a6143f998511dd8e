"""Micro-batches of different numbers of chunks: generated, validated, simulated, written down."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.generate import GENERATORS, Size, generate, needs_even_chunks
from sppo_hf.schedule.lower import lower
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import fixed_seconds, simulate_pipeline
from sppo_hf.schedule.validate import validate
from tests.sweeps import examples

EVEN = [name for name in GENERATORS if needs_even_chunks(name)]
NAMES = [name for name in GENERATORS if name not in EVEN]


@given(
    name=st.sampled_from(NAMES),
    ranks=st.integers(1, 4),
    chunks=st.lists(st.integers(1, 5), min_size=1, max_size=5),
)
@examples(33, whole=100)
def test_uneven_steps_run(name: str, ranks: int, chunks: list[int]) -> None:
    schedule = generate(name, Size.uneven(ranks, chunks))
    assert (schedule.num_units, schedule.num_micro_batches) == (sum(chunks), len(chunks))
    lowered = lower(schedule, offloaded=lambda stage, unit: unit % 2 == 0, reduce=True)
    validate(lowered)
    assert Schedule.parse(str(lowered)) == lowered
    timeline = simulate_pipeline(lowered, seconds=fixed_seconds(1, 2, send=0.25, copy=0.5))
    back = "I" if name == "zb_seq1f1b" else "B"
    for stage in range(schedule.num_stages):
        unit = 0
        for micro_batch, count in enumerate(chunks):
            for chunk in range(count):
                forward = Action("F", stage, unit)
                assert schedule.micro_batch(forward) == micro_batch
                assert schedule.chunk(forward) == chunk
                if chunk:
                    # Keys and values come from the chunk before, their gradients from that behind.
                    for first, second in (
                        (forward._replace(unit=unit - 1), forward),
                        (Action(back, stage, unit), Action(back, stage, unit - 1)),
                    ):
                        ends = timeline.span(first).end_seconds
                        assert ends <= timeline.span(second).start_seconds
                unit += 1


def test_by_hand() -> None:
    schedule = generate("seq1f1b", Size.uneven(1, (1, 3)))
    assert " ".join(schedule.texts()[0]) == "0F0 0F1 0F2 0B0 0F3 0B3 0B2 0B1"
    assert str(schedule).startswith("chunks 1 3\n")
    assert Schedule(schedule.ranks, (2, 2)) == Schedule(schedule.ranks, 2)


def test_what_is_wrong_is_named() -> None:
    whole = generate("gpipe", Size.uneven(1, (2, 3)))
    with pytest.raises(ScheduleError, match="5, so that 2 micro-batches have all their chunks"):
        validate(whole.keep(lambda action: action.unit < 4))
    for name in EVEN:
        with pytest.raises(ScheduleError, match=r"whole micro-batches.*1 to 3 chunks.*seq1f1b"):
            generate(name, Size.uneven(2, (1, 3)))
    with pytest.raises(ScheduleError, match="chunks = 0"):
        generate("gpipe", Size.uneven(1, (0, 3)))
    with pytest.raises(ScheduleError, match="or one number for each of them"):
        Schedule.parse("chunks 2 0\nstep  rank 0\n0     0F0\n")
