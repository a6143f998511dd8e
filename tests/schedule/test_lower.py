"""Lowering passes: what they add, where, and that compute keeps its order."""

from graphlib import TopologicalSorter
from itertools import chain, pairwise
from typing import Any

import pytest

from sppo_hf.schedule.actions import COMPUTE_KINDS, Action
from sppo_hf.schedule.dependencies import DependencyGraph
from sppo_hf.schedule.generate import Size, generate, msp
from sppo_hf.schedule.lower import add_offload, add_reductions, add_transfers, lower
from sppo_hf.schedule.messages import messages
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.validate import validate
from tests.schedule.sizes import FEW, SOME, Named


def of_kind(schedule: Schedule, *kinds: str) -> list[Action]:
    return [a for rank in schedule.ranks for a in rank if a.kind in kinds]


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_lowered_schedules_are_valid_and_keep_their_compute(ahead: int) -> None:
    for name, size in FEW[ahead::9]:
        schedule = generate(name, size)
        away = add_offload(schedule, lambda stage, unit: (stage + unit) % 3 != 1)
        lowered = add_transfers(add_reductions(away), receives_ahead=ahead)
        validate(lowered)
        assert lowered.keep(lambda a: a.kind in COMPUTE_KINDS) == schedule
        # The order of passes does not matter for what is there.
        other = add_reductions(add_offload(add_transfers(schedule), lambda s, u: (s + u) % 3 != 1))
        validate(other)
        assert sorted(of_kind(other, "D", "H", "SEND_F", "RECV_B", "REDUCE_GRAD")) == sorted(
            of_kind(lowered, "D", "H", "SEND_F", "RECV_B", "REDUCE_GRAD")
        )


@pytest.mark.parametrize("case", SOME, ids=str)
def test_every_edge_between_ranks_has_one_message(case: Named) -> None:
    name, size = case
    lowered = add_transfers(generate(name, size))
    stages, units = lowered.num_stages, lowered.num_units
    for send, receive, step in (("SEND_F", "RECV_F", 1), ("SEND_B", "RECV_B", -1)):
        sent = {(a.stage + step, a.unit) for a in of_kind(lowered, send)}
        received = {(a.stage, a.unit) for a in of_kind(lowered, receive)}
        targets = range(1, stages) if step == 1 else range(stages - 1)
        assert sent == received == {(stage, unit) for stage in targets for unit in range(units)}


def test_stages_of_one_rank_send_each_other_nothing() -> None:
    lowered = add_transfers(generate("interleaved_seq1f1b", Size(1, 2, 2, 3)))
    assert lowered == generate("interleaved_seq1f1b", Size(1, 2, 2, 3))
    validate(lowered)


def test_a_send_follows_what_it_sends_at_once() -> None:
    for rank in lower(generate("zb_seq1f1b", Size(3, 2, 2)), offloaded=lambda s, u: True).ranks:
        for before, action in pairwise(rank):
            if action.kind == "SEND_F":
                assert before == action._replace(kind="F")
            if action.kind == "SEND_B":
                assert before == action._replace(kind="I")


def test_receives_are_listed_as_far_ahead_as_asked() -> None:
    schedule = generate("gpipe", Size(2, 4))
    for ahead in range(4):
        rank = add_transfers(schedule, receives_ahead=ahead).ranks[1]
        before = rank[: rank.index(Action("RECV_F", 1, 3))]
        # Unit 3 is the fourth compute of its rank.
        assert sum(a.kind == "F" for a in before) == 3 - ahead


def test_no_message_waits_for_a_compute_that_its_receive_is_listed_before() -> None:
    """Else a rank whose host waits there for its device, and so for the receive, would not end."""
    shared = (msp(Size(3, 2, 5)), msp(Size(4, 1, 8)), msp(Size.uneven(4, (5, 7))))
    for schedule in (*(generate(name, size) for name, size in FEW[::7]), *shared):
        for ahead in (1, 3):
            lowered = add_transfers(schedule, receives_ahead=ahead)
            receives = {m.receive: m.producer for m in messages(schedule).values()}
            awaited = latest_computes(schedule)
            for rank, actions in enumerate(lowered.ranks):
                done = -1
                for action in actions:
                    done += action.kind in COMPUTE_KINDS
                    if action in receives:
                        assert awaited[receives[action]][rank] <= done, (schedule, action)


def latest_computes(schedule: Schedule) -> dict[Action, list[int]]:
    """Of each compute, the last one of every rank that must begin before it ends, by its turn."""
    graph = DependencyGraph(schedule)
    needs = {a: {graph.actions[p] for p in graph.needs[at]} for at, a in enumerate(graph.actions)}
    for before, action in chain(*map(pairwise, schedule.ranks)):
        needs[action].add(before)
    turns = {a: (rank, t) for rank, own in enumerate(schedule.ranks) for t, a in enumerate(own)}
    found: dict[Action, list[int]] = {}
    # Shares of a unit need the same, and each other.
    units: dict[tuple[Any, ...], list[Action]] = {}
    for action in turns:
        units.setdefault(action[:3], []).append(action)
    order = {u: {need[:3] for a in shares for need in needs[a]} for u, shares in units.items()}
    for unit in TopologicalSorter(order).static_order():
        latest = [-1] * schedule.num_ranks
        for before in chain(*(needs[share] for share in units[unit])):
            latest = list(map(max, latest, found[before]))
        for share in units[unit]:
            rank, turn = turns[share]
            latest[rank] = max(latest[rank], turn)
        found.update(dict.fromkeys(units[unit], latest))
    return found


def test_a_reduction_comes_as_soon_as_gradients_are_complete() -> None:
    for name in ("seq1f1b", "zb_seq1f1b"):
        for rank in lower(generate(name, Size(2, 2, 2)), reduce=True).ranks:
            last = max(step for step, a in enumerate(rank) if a.kind in ("B", "W"))
            reduction = next(step for step, a in enumerate(rank) if a.kind == "REDUCE_GRAD")
            between = {a.kind for a in rank[last + 1 : reduction]}
            assert reduction > last
            assert between <= {"SEND_B"}
            assert rank[reduction].unit == rank[last].unit
    # Of several stages on a rank the last one ends first, and need not wait.
    virtual = lower(generate("interleaved_seq1f1b", Size(2, 2, 1, 2)), reduce=True)
    texts = virtual.texts()[0]
    assert texts.index("2REDUCE_GRAD1") < texts.index("0B1")


def test_the_units_asked_for_are_offloaded() -> None:
    schedule = generate("seq1f1b", Size(2, 2, 4))
    leaving = {(0, 1), (1, 0), (1, 5)}
    lowered = add_offload(schedule, lambda *unit: unit in leaving)
    assert {a[1:3] for a in of_kind(lowered, "D")} == leaving
    assert {a[1:3] for a in of_kind(lowered, "H")} == leaving
    assert add_offload(schedule, lambda stage, unit: False) == schedule


def test_what_would_only_come_back_stays() -> None:
    # The last chunk's backward follows its forward at once on the last stage.
    lowered = add_offload(generate("seq1f1b", Size(2, 1, 3)), lambda stage, unit: True)
    assert [str(a) for a in lowered.ranks[1]] == [
        *("1F0", "1D0", "1F1", "1D1", "1F2", "1H1", "1B2", "1H0", "1B1", "1B0")
    ]


def test_frames_come_back_one_backward_ahead() -> None:
    rank = add_offload(generate("gpipe", Size(1, 1, 4)), lambda stage, unit: True).ranks[0]
    texts = [str(a) for a in rank]
    assert texts[-7:] == ["0H2", "0B3", "0H1", "0B2", "0H0", "0B1", "0B0"]


def test_forwards_alone_offload_nothing() -> None:
    schedule = generate("gpipe", Size(2, 2)).keep(lambda action: action.kind == "F")
    lowered = lower(schedule, offloaded=lambda stage, unit: True, reduce=True)
    assert {a.kind for a in of_kind(lowered, *COMPUTE_KINDS, "D", "H", "REDUCE_GRAD")} == {"F"}
    validate(lowered)
