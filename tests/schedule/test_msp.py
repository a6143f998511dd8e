"""Multiplexed partitioning: the paper's sets and example, its lengths, and what moves for it."""

from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import COMPUTE_KINDS, Action
from sppo_hf.schedule.formulas import msp_forward_units
from sppo_hf.schedule.generate import Size, generate
from sppo_hf.schedule.lower import add_offload, add_transfers, lower
from sppo_hf.schedule.messages import messages
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import (
    bubble_fraction,
    fixed_seconds,
    peak_units,
    shared_seconds,
    simulate_pipeline,
)
from sppo_hf.schedule.torch_csv import to_torch_csv
from sppo_hf.schedule.validate import validate
from tests.sweeps import examples

UNIT = float(lcm(*range(1, 9)))
"""Seconds of a unit that shares of up to eight ranks divide without a rest."""


def msp(ranks: int, chunks: int, micro_batches: int = 1) -> Schedule:
    return generate("msp", Size(ranks, micro_batches, chunks))


def forward_units(schedule: Schedule) -> Fraction:
    forwards = schedule.keep(lambda action: action.kind == "F")
    seconds = shared_seconds(forwards, fixed_seconds(forward=UNIT))
    return Fraction(simulate_pipeline(forwards, seconds=seconds).end_seconds) / Fraction(UNIT)


def chunk_by_chunk(schedule: Schedule) -> Schedule:
    """Order the same forwards as greedy list scheduling does: what can begin first comes first.

    Of several the one of least stage and chunk together, of these the latest stage.
    """
    waiting = {
        (stage, unit): schedule.unit_ranks(stage, unit)
        for stage in range(schedule.num_stages)
        for unit in range(schedule.num_units)
    }
    free = [Fraction()] * schedule.num_ranks
    ends: dict[tuple[int, int], Fraction] = {}
    lists: list[list[Action]] = [[] for _ in schedule.ranks]
    while waiting:
        ready: list[tuple[Fraction, int, int]] = []
        for (stage, unit), ranks in waiting.items():
            needed = (stage - 1, unit), (stage, unit - 1)
            if not any(one in waiting for one in needed):
                begins = [*(free[rank] for rank in ranks), *(ends[n] for n in needed if n in ends)]
                ready.append((max(begins), stage + unit, -stage))
        begin, both, minus = min(ready)
        stage, unit = -minus, both + minus
        ranks = waiting.pop((stage, unit))
        ends[stage, unit] = begin + Fraction(1, len(ranks))
        for part, rank in enumerate(ranks):
            free[rank] = ends[stage, unit]
            lists[rank].append(Action("F", stage, unit, None, part if len(ranks) > 1 else None))
    return Schedule(tuple(map(tuple, lists)), schedule.chunks)


def test_the_papers_example_action_by_action() -> None:
    assert msp(2, 4).texts() == [
        ["0F0#0", "0F1", "0F2", "0F3", "1F3#0", "1B3#0", "0B3", "0B2", "0B1", "0B0#0"],
        ["0F0#1", "1F0", "1F1", "1F2", "1F3#1", "1B3#1", "1B2", "1B1", "1B0", "0B0#1"],
    ]


def test_the_papers_sets_of_ranks() -> None:
    schedule = msp(4, 8)
    sets = [
        {ranks: [u for u in range(8) if schedule.unit_ranks(stage, u) == ranks] for ranks in found}
        for stage in range(4)
        for found in [{schedule.unit_ranks(stage, u) for u in range(8)}]
    ]
    assert sets == [
        {(0, 1, 2, 3): [0, 1, 2], (0,): [3, 4, 5, 6, 7]},
        {(1, 2, 3): [0, 1], (1,): [2, 3, 4, 5, 6], (0, 1): [7]},
        {(2, 3): [0], (2,): [1, 2, 3, 4, 5], (0, 1, 2): [6, 7]},
        {(3,): [0, 1, 2, 3, 4], (0, 1, 2, 3): [5, 6, 7]},
    ]
    for rank in schedule.ranks:
        half = len(rank) // 2
        assert [a._replace(kind="F") for a in rank[: half - 1 : -1]] == list(rank[:half])


@pytest.mark.parametrize(
    ("ranks", "chunks"), [(p, n) for p in (2, 4, 8) for n in (4, 8, 13, 64) if n >= p]
)
def test_forward_takes_what_the_formulas_say(ranks: int, chunks: int) -> None:
    schedule = msp(ranks, chunks)
    assert forward_units(schedule) == msp_forward_units(ranks, chunks)
    if chunks <= 13 or ranks == 4:
        slower = forward_units(chunk_by_chunk(schedule))
        assert slower == msp_forward_units(ranks, chunks, chunk_by_chunk=True)
        harmonic = sum(Fraction(1, n) for n in range(1, ranks + 1))
        assert slower == chunks + 2 * (ranks - harmonic) - (ranks - 1)
    # Neither sends, copies out and back, nor backward change that where they take no time.
    away = lower(schedule, offloaded=lambda _stage, _unit: True)
    seconds = shared_seconds(schedule, fixed_seconds(UNIT, 2 * UNIT))
    whole = 3 * msp_forward_units(ranks, chunks)
    for lowered in (schedule, add_transfers(schedule), away):
        timeline = simulate_pipeline(lowered, seconds=seconds)
        assert timeline.end_seconds == whole * Fraction(UNIT)
    assert 1 - bubble_fraction(timeline) == pytest.approx(float(3 * chunks / whole))


def test_ranks_of_a_unit_compute_it_together() -> None:
    schedule = add_transfers(msp(3, 5))
    base = fixed_seconds(1.0, 2.0, send=0.3)
    uneven = shared_seconds(schedule, lambda a: base(a) * (1 + (7 * a.unit + 3 * a.stage) % 5))
    timeline = simulate_pipeline(schedule, seconds=uneven)
    for stage, unit in schedule.shared_units:
        for kind in ("F", "B"):
            spans = [timeline.span(a) for a in schedule.unit_actions(kind, stage, unit)]
            assert len({span.start_seconds for span in spans}) == 1
            assert len({span.end_seconds for span in spans}) == 1
            assert len({span.resource for span in spans}) == len(spans) > 1


@pytest.mark.parametrize(("ranks", "chunks", "rows"), [(1, 2, 1), (2, 2, 2), (4, 4, 1), (3, 7, 2)])
def test_it_can_run_with_all_that_goes_beside_it(ranks: int, chunks: int, rows: int) -> None:
    schedule = msp(ranks, chunks, rows)
    lowered = lower(schedule, offloaded=lambda _stage, unit: unit % 2 == 0, reduce=True)
    for made in (schedule, add_transfers(schedule), lowered):
        validate(made)
        assert Schedule.parse(str(made)) == made
    validate(add_transfers(schedule.keep(lambda action: action.kind == "F")))


@pytest.mark.parametrize("kind", ["KV", "DKV"])
def test_keys_come_to_all_that_lack_them_and_their_gradients_go_back(kind: str) -> None:
    ranks, chunks = 4, 8
    schedule = msp(ranks, chunks)
    found: dict[tuple[int, int, int], Fraction] = {}
    for message in messages(schedule).values():
        if message.send.kind == f"SEND_{kind}":
            _, stage, unit, _, _ = message.send
            ends = message.source, message.target
            helper = ends[1] if kind == "KV" else ends[0]
            owner = ends[0] if kind == "KV" else ends[1]
            key = stage, unit, helper if owner == stage else -owner
            found[key] = found.get(key, Fraction()) + message.share
    expected = {
        (stage, unit, helper): Fraction(1, stage + 1)
        for stage in range(ranks)
        for helper in range(stage)
        for unit in range(chunks - stage)
    } | {
        # The owner's steady units need all heads of what the first units' ranks have in slices.
        (stage, unit, -helper): Fraction(1, ranks - stage)
        for stage in range(ranks)
        for helper in range(stage + 1, ranks)
        for unit in range(ranks - 1 - stage)
    }
    assert found == expected


def test_a_rank_holds_its_share_of_what_it_shares() -> None:
    def held(schedule: Schedule) -> list[float]:
        seconds = shared_seconds(schedule, fixed_seconds())
        return peak_units(schedule, simulate_pipeline(schedule, seconds=seconds))

    schedule = msp(2, 4)
    assert held(schedule) == [4, 4]
    assert schedule.forwards_before_backward == (4, 4)
    assert max(held(msp(8, 16))) < 16.6


def test_offload_is_each_ranks_own() -> None:
    lowered = add_offload(msp(2, 4), lambda _stage, unit: unit == 0)
    assert [str(a) for rank in lowered.ranks for a in rank if a.kind == "D"] == [
        "0D0#0",
        "0D0#1",
        "1D0",
    ]


def test_shares_go_on_behind_the_host_and_come_back_from_there() -> None:
    """Each rank's own: stored when it has left the device, read a unit ahead of its copy back."""
    first = lambda _stage, unit: unit == 0  # noqa: E731
    lowered = add_offload(msp(2, 4), first, first)
    validate(lowered)
    assert Schedule.parse(str(lowered)) == lowered
    for rank, parts in ((0, ("#0", "#0")), (1, ("#1", "#3"))):
        beside = [t for t in lowered.texts()[rank] if t[:3] in ("0D0", "0S0", "0L0", "0H0")]
        share, stored = parts
        assert beside == [f"0D0{share}", f"0S0{stored}", f"0L0{stored}", f"0H0{share}"]
    timeline = simulate_pipeline(lowered, seconds=fixed_seconds(copy=0.4))
    for rank in range(2):
        spans = [timeline.span(a) for a in lowered.ranks[rank] if a.kind in "DSLH"]
        spans = [span for span in spans if span.action.stage == 0]
        for before, after in pairwise(spans):
            assert before.end_seconds <= after.start_seconds
    text = str(lowered)
    for wrong in (text.replace("0S0#3", "0S0#6"), text.replace("0L0#3", "0L3#3")):
        with pytest.raises(ScheduleError, match="is no share of a unit"):
            validate(Schedule.parse(wrong))
    # What was not stored cannot be read.
    with pytest.raises(ScheduleError, match=r"0L0#3 \(load\) needs 0S0, what it copies"):
        validate(lowered.keep(lambda action: str(action) != "0S0#3"))


@pytest.mark.parametrize("rows", [1, 2])
def test_sums_of_gradients_go_one_by_one_in_the_order_in_which_they_are_needed(rows: int) -> None:
    """Else all of a stage's would be packed, and wait, at both ends at once."""
    schedule = add_transfers(msp(4, 8, rows))
    validate(schedule)
    for rank, kind, turns in ((0, "SEND_DKV", 4), (1, "RECV_DKV", 3)):
        actions = schedule.ranks[rank]
        passed = [a for a in actions if (a.kind, a.stage) == (kind, 1)][:7]
        assert [a.unit for a in passed] == [6, 5, 4, 3, 2, 1, 0]
        steps = [actions.index(a) for a in passed]
        beside = [
            sum(a.kind in COMPUTE_KINDS for a in actions[before:after])
            for before, after in pairwise(steps)
        ]
        assert max(beside) == 1
        assert sum(beside) == turns


@pytest.mark.parametrize(("ranks", "chunks"), [(3, 7), (5, 5), (6, 9), (8, 8)])
def test_units_wait_for_keys_and_sums_and_none_waits_for_itself(ranks: int, chunks: int) -> None:
    schedule = lower(msp(ranks, chunks))
    validate(schedule)
    timeline = simulate_pipeline(schedule, seconds=fixed_seconds(send=0.7))
    begins = {
        s.action: s.start_seconds
        for resource in timeline.resources
        for s in timeline.spans(resource)
    }
    moved = [m for m in messages(schedule).values() if m.send.kind in ("SEND_KV", "SEND_DKV")]
    assert len(moved) > ranks
    for message in moved:
        assert timeline.span(message.receive).end_seconds <= begins[message.consumer]


def test_sums_that_are_sent_behind_what_waits_for_their_use_are_a_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second of five ranks would wait for the first, which waits for its gradient."""

    def later(places: Any, rank: int, compute: Action, count: int, *_: object) -> int:
        return places.compute_after(rank, compute, count)

    monkeypatch.setattr("sppo_hf.schedule.lower._Places.last_before", later)
    with pytest.raises(ScheduleError, match=r"deadlock[\s\S]*1RECV_DKV0#3 waits for 1SEND_DKV0#3"):
        validate(lower(msp(5, 5)))


def test_keys_that_wait_elsewhere_stream_beside_each_share() -> None:
    kinds = [("K", 0), ("O", 0), ("L", 1), ("S", 1), ("K", 1), ("O", 1), ("L", 2), ("S", 2)]
    kv_copies = {(kind, stage, 2, way) for kind, way in kinds for stage in range(2)}
    lowered = lower(msp(2, 3), kv_copies=kv_copies)  # type: ignore[arg-type]
    validate(lowered)
    assert Schedule.parse(str(lowered)) == lowered
    forward, backward = (
        [f"1L2#{way + 1}", f"1K2#{way}", f"1{kind}2#0", f"1O2#{way}", f"1S2#{way + 1}"]
        for kind, way in (("F", 0), ("B", 1))
    )
    texts = lowered.texts()
    for rank, more in ((0, 0), (1, 3)):
        # A rank's own are told apart by its share: three numbers each.
        shown = [t for t in texts[rank] if t[:3] in ("1L2", "1K2", "1F2", "1B2", "1O2", "1S2")]
        wanted = [
            text.replace("#0", f"#{rank}")
            if text[1] in "FB"
            else f"{text[:4]}{int(text[4:]) + more}"
            for text in (*forward, *backward)
        ]
        assert shown == wanted
    text = str(lowered).replace("1K2#0", "1K2#6")
    with pytest.raises(ScheduleError, match=r"1K2#6 .* is not of a unit of this rank, or not of"):
        validate(Schedule.parse(text))


@examples(33, whole=100)
@given(st.sampled_from([add_transfers(msp(3, 4)), msp(2, 3)]), st.data())
def test_what_is_missing_or_elsewhere_is_found(schedule: Schedule, data: st.DataObject) -> None:
    lists = [list(rank) for rank in schedule.ranks]
    source = data.draw(st.sampled_from(lists))
    action = source.pop(data.draw(st.integers(0, len(source) - 1)))
    if data.draw(st.booleans()):
        others = [rank for rank in lists if rank is not source]
        other = data.draw(st.sampled_from(others))
        other.insert(data.draw(st.integers(0, len(other))), action)
    with pytest.raises(ScheduleError):
        validate(Schedule(tuple(map(tuple, lists)), schedule.chunks))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ScheduleError, match="with 3 chunks on 4 ranks"):
        msp(4, 3)
    with pytest.raises(ScheduleError, match=r"as parts \[0, 2\]"):
        validate(Schedule.parse("chunks 1\nstep rank 0 rank 1\n0 0F0#0 0F0#2\n"))
    with pytest.raises(ScheduleError, match=r"0B1#0 .* is no share of a unit"):
        validate(
            Schedule.parse("chunks 2\nstep rank 0\n0 0F0\n1 0F1\n2 0B1#0\n3 0B0\n"),
        )
    with pytest.raises(ScheduleError, match="0F0#0 is one layer's or one part's"):
        to_torch_csv(msp(2, 2))
