"""Generators: their steps, and bubbles and peaks equal to the literature's formulas, exactly."""

from itertools import chain, product
from pathlib import Path

import pytest

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule import formulas
from sppo_hf.schedule.generate import GENERATORS, Size, generate, is_interleaved
from sppo_hf.schedule.lower import lower
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import fixed_seconds, peak_units, simulate_pipeline
from sppo_hf.schedule.timeline import over_time
from sppo_hf.schedule.validate import validate
from tests.schedule.sizes import FEW, Named, named_sizes
from tests.sweeps import ALL, sample, turn

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_SIZES = {
    "gpipe": Size(3, 2, 2),
    "1f1b": Size(4, 6),
    "seq1f1b": Size(4, 3, 3),
    "interleaved_seq1f1b": Size(2, 4, 2, 2),
    "zb_seq1f1b": Size(4, 4, 2),
}
# Whole numbers, so that times in floats are exact. Uneven ones show more than F = I = W.
EQUAL, UNEVEN = formulas.UnitCosts(1, 1, 1), formulas.UnitCosts(3, 5, 2)


def assert_formulas(case: Named, costs: formulas.UnitCosts) -> None:
    name, size = case
    schedule = generate(name, size)
    timeline = simulate_pipeline(
        schedule,
        seconds=fixed_seconds(costs.forward, costs.input + costs.weight, weight=costs.weight),
    )
    assert timeline.end_seconds == formulas.step_length(name, size, costs), case
    assert peak_units(schedule, timeline) == formulas.peak_units(name, size), case
    work = size.num_units * size.num_virtual * sum(costs)
    for rank in range(size.num_ranks):
        assert timeline.busy_seconds(f"{rank}.compute") == work, case


@pytest.mark.parametrize("name", formulas.SCHEDULES_WITH_FORMULAS)
@pytest.mark.parametrize("costs", [EQUAL, UNEVEN], ids=["equal", "uneven"])
def test_small_sizes_meet_the_formulas(name: str, costs: formulas.UnitCosts) -> None:
    for case in FEW:
        if case[0] == name:
            assert_formulas(case, costs)


@pytest.mark.parametrize(
    "case",
    [
        ("gpipe", Size(16, 3, 32)),
        ("1f1b", Size(16, 16, 1)),
        ("seq1f1b", Size(16, 3, 32)),
        ("seq1f1b", Size(13, 16, 7)),
        ("interleaved_seq1f1b", Size(16, 4, 8, 4)),
        ("interleaved_seq1f1b", Size(12, 5, 5, 3)),
        ("zb_seq1f1b", Size(16, 2, 32)),
        ("zb_seq1f1b", Size(11, 16, 3)),
    ],
    ids=str,
)
def test_large_sizes_meet_the_formulas(case: Named) -> None:
    assert_formulas(case, EQUAL)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", formulas.SCHEDULES_WITH_FORMULAS)
def test_all_promised_sizes_meet_the_formulas(name: str) -> None:
    # P <= 16, M <= 16, N <= 32, V <= 4: every P, and every kind of N and of M, by turns.
    micro_batches, chunks = (1, 2, 3, 4, 5, 8, 11, 16), (1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 32)
    most = 256 if ALL else 128
    for p, (index, n) in chain.from_iterable(
        product((p,), turn([*enumerate(chunks)], 3, p)) for p in range(1, 17)
    ):
        for case in named_sizes((p,), (micro_batches[(p + index) % 8],), (n,)):
            if case[0] == name and case[1].num_units * case[1].num_virtual <= most:
                assert_formulas(case, EQUAL)
    for p, m, n in sample([*product((2, 7, 16), (9, 16), (24, 32))], 5):
        assert_formulas((name, Size(p, m, n, 4 if is_interleaved(name) else 1)), EQUAL)


@pytest.mark.parametrize("name", GENERATORS)
def test_small_sizes_are_valid(name: str) -> None:
    sizes = [size for found, size in FEW[::3] if found == name]
    assert sizes
    for size in sizes:
        assert validate(generate(name, size)) is None, size  # raises where it is not


@pytest.mark.parametrize("name", GOLDEN_SIZES)
def test_steps_are_those_of_the_golden_files(name: str) -> None:
    schedule = generate(name, GOLDEN_SIZES[name])
    text = (GOLDEN / f"{name}.txt").read_text()
    assert str(schedule) == text
    assert Schedule.parse(text) == schedule
    timeline = simulate_pipeline(schedule, seconds=fixed_seconds(1, 2))
    assert over_time(timeline, 1.0) == (GOLDEN / f"{name}_over_time.txt").read_text()


def test_the_lowered_golden_file() -> None:
    schedule = generate("seq1f1b", Size(2, 2, 2))
    lowered = lower(schedule, offloaded=lambda *unit: unit in {(0, 0), (0, 2), (1, 2)}, reduce=True)
    text = (GOLDEN / "lowered_seq1f1b.txt").read_text()
    assert str(lowered) == text
    assert Schedule.parse(text) == lowered


def test_seq1f1b_warms_up_and_runs_back_as_the_paper_says() -> None:
    # Rank r: P - r - 2 + N forwards, then by turns; the i-th backward is micro-batch i // N,
    # chunk N - 1 - i mod N.
    size = Size(4, 3, 4)
    for rank, actions in enumerate(generate("seq1f1b", size).ranks):
        first = next(step for step, action in enumerate(actions) if action.kind == "B")
        assert first - 1 == 4 - rank - 2 + 4
        backwards = [action.unit for action in actions if action.kind == "B"]
        assert backwards == [i // 4 * 4 + 3 - i % 4 for i in range(12)]


def test_one_chunk_makes_seq1f1b_plain_1f1b() -> None:
    for p, m in product((1, 2, 4), (1, 3, 8)):
        assert generate("seq1f1b", Size(p, m)) == generate("1f1b", Size(p, m))


def test_zero_bubble_is_late_by_rank() -> None:
    for rank, actions in enumerate(generate("zb_seq1f1b", Size(4, 4, 2)).ranks):
        texts = [action.kind for action in actions]
        last_input = len(texts) - 1 - texts[::-1].index("I")
        assert texts[last_input + 1 :] == ["W"] * (rank + 1)


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("1F1B", Size(1, 1), "no schedule '1F1B'. Allowed: gpipe, 1f1b"),
        ("gpipe", Size(0, 1), "ranks = 0. Allowed: 1 or more"),
        ("gpipe", Size(1, -1), "micro-batches = -1"),
        ("seq1f1b", Size(1, 1, 0), "chunks = 0"),
        ("interleaved_seq1f1b", Size(1, 1, 1, 0), "virtual = 0"),
        ("seq1f1b", Size(2, 2, 2, 2), "2 virtual stages per rank. Allowed: 1; only interleaved"),
    ],
)
def test_impossible_sizes_are_refused(name: str, size: Size, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        generate(name, size)
