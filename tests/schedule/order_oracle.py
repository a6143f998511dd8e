"""The slow, plain answer to whether a schedule can run: all edges written down, and no cycle."""

from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from sppo_hf.schedule.actions import COMPUTE_KINDS, Action
from sppo_hf.schedule.schedule import Schedule

Edge = tuple[Action, Action]


def edges(schedule: Schedule, rank_of: dict[int, int]) -> Iterator[Edge]:
    """Yield (what must be first, what needs it) for all actions there are, as the paper has it."""
    there = {action for rank in schedule.ranks for action in rank}
    sent = any(action.kind == "SEND_F" or action.kind == "SEND_B" for action in there)
    split = any(action.kind == "I" for action in there)
    back = "I" if split else "B"
    last = len(rank_of) - 1
    for kind, s, u, _, _ in sorted(there):
        this = Action(kind, s, u)
        if kind == "F":
            if u % schedule.num_chunks:
                yield Action("F", s, u - 1), this
            if s:
                crosses = sent and rank_of[s] != rank_of[s - 1]
                yield (Action("RECV_F", s, u) if crosses else Action("F", s - 1, u)), this
        if kind == back:
            yield Action("F", s, u), this
            if (u + 1) % schedule.num_chunks:
                yield Action(back, s, u + 1), this
            if s < last:
                crosses = sent and rank_of[s] != rank_of[s + 1]
                yield (Action("RECV_B", s, u) if crosses else Action(back, s + 1, u)), this
            if Action("D", s, u) in there:
                yield Action("H", s, u), this
        for needed, needing, step in (
            ("I", "W", 0),
            ("F", "D", 0),
            ("D", "H", 0),
            ("F", "SEND_F", 0),
            (back, "SEND_B", 0),
            ("SEND_F", "RECV_F", -1),
            ("SEND_B", "RECV_B", 1),
        ):
            if kind == needing:
                yield Action(needed, s + step, u), this  # pyright: ignore[reportArgumentType]


def can_run(schedule: Schedule) -> bool:
    """Whether a training schedule is whole, in order on every rank, and free of cycles."""
    homes = {(a.stage, r) for r, rank in enumerate(schedule.ranks) for a in rank}
    rank_of = dict(sorted(homes))
    counts = Counter(action for rank in schedule.ranks for action in rank)
    if len(rank_of) < len(homes) or max(counts.values()) > 1:
        return False
    graph: dict[Action, set[Action]] = {action: set() for action in counts}
    step_of = {a: step for rank in schedule.ranks for step, a in enumerate(rank)}
    for first, then in edges(schedule, rank_of):
        if first not in counts:
            return False
        same_rank = rank_of[first.stage] == rank_of[then.stage]
        if same_rank and step_of[first] > step_of[then]:
            return False
        graph[then].add(first)
    for rank in schedule.ranks:
        # Only compute holds up what is listed behind it.
        before: list[Action] = []
        for action in rank:
            graph[action] |= set(before)
            if action.kind in COMPUTE_KINDS:
                before = [action]
    return _whole(schedule, counts) and _in_link_order(schedule, rank_of) and _acyclic(graph)


def _acyclic(graph: dict[Action, set[Action]]) -> bool:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return True


def _whole(schedule: Schedule, there: Counter[Action]) -> bool:
    stages = {action.stage for action in there}
    units = schedule.num_micro_batches * schedule.num_chunks
    kinds = {action.kind for action in there}
    needed = [("F", "I", "W") if "I" in kinds or "W" in kinds else ("F", "B")]
    whole = all(
        Action(kind, stage, unit) in there
        for stage in range(max(stages) + 1)
        for unit in range(units)
        for kind in needed[0]
    )
    pairs = (("SEND_F", "RECV_F", 1), ("SEND_B", "RECV_B", -1))
    matched = all(
        {(a.stage + step, a.unit) for a in there if a.kind == send}
        == {(a.stage, a.unit) for a in there if a.kind == receive}
        for send, receive, step in pairs
    )
    return whole and matched


def _in_link_order(schedule: Schedule, rank_of: dict[int, int]) -> bool:
    links: dict[tuple[str, int, int], list[tuple[str, int, int]]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for kind, stage, unit, _, _ in actions:
            word, _, letter = kind.partition("_")
            if word == "SEND":
                to = stage + (1 if letter == "F" else -1)
                links.setdefault(("S", rank, rank_of[to]), []).append((letter, to, unit))
            if word == "RECV":
                origin = stage - (1 if letter == "F" else -1)
                links.setdefault(("R", rank_of[origin], rank), []).append((letter, stage, unit))
    return all(
        messages == links[("R" if way == "S" else "S", source, target)]
        for (way, source, target), messages in links.items()
    )
