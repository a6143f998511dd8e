"""Simulation of a Schedule over all its ranks: what each action waits for, and when it runs.

Every rank has a compute lane, a copy lane each way, a lane to and from each rank that it talks to,
and one for reductions; `simulate` does the rest. Seconds and bytes come in as callables, so this
knows nothing of models. Costs two to three microseconds per action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import pairwise

from sppo_hf.schedule.actions import STREAM_KINDS, Action, Kind
from sppo_hf.schedule.dependencies import DependencyGraph
from sppo_hf.schedule.messages import messages
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import Change, simulate_positions
from sppo_hf.schedule.timeline import COMPUTE, Timeline

_SAME = 1e-9
"""Periods that differ by no more than this share are the same, rounded differently."""


def simulate_pipeline(
    schedule: Schedule,
    *,
    seconds: Callable[[Action], float],
    changes: Callable[[Action], Iterable[Change]] | None = None,
    standing: Iterable[Change] = (),
) -> Timeline:
    """Works out when every action of every rank runs.

    What waits for what is said in `dependencies`, [Note: what an action waits for].
    Without sends in the schedule, what one rank computes is at hand on the other at once.

    Args:
        schedule: compute actions alone, or lowered.
        seconds: how long an action takes. That of a transfer is its send's; its receive, which
            only marks the arrival, should take none.
        changes: the bytes that an action takes and gives back; tiers are named "3.device" for
            rank 3's.
        standing: bytes held from the start.

    Returns:
        A timeline whose lanes are "0.compute", "0.d2h", "0.send 1" (to rank 1), "1.recv 0", and so
        on; only lanes with actions, and each rank's compute.

    Raises:
        ScheduleError: an action is there twice or waits for one that is not there, or ranks wait
            for each other. `validate` says such things better.
    """
    waits = DependencyGraph(schedule)
    return simulate_positions(
        waits.lanes,
        seconds=[seconds(action) for lane in waits.lanes.values() for action in lane],
        needs=waits.needs,
        changes=changes,
        standing=standing,
    )


def period_seconds(
    schedule: Schedule, timeline: Timeline, *, warm_up: int, every: int = 1
) -> float | None:
    """Returns how much longer a step takes with `every` micro-batches more, where that shows.

    It shows where every stage does the same at the same distance twice in a row: then the middle of
    the step repeats itself, and more micro-batches of the same lengths only repeat it more often.
    They take this time each, and no byte more at once.

    Args:
        schedule: what ran, `warm_up + 2 * every + 1` micro-batches at least.
        timeline: when it ran.
        warm_up: micro-batches whose forwards the first rank has begun, whole or in part, when its
            first backward begins.
        every: micro-batches that pass together; their number in the schedule is a multiple.

    Returns:
        Seconds; None where stages still drift apart.
    """
    chunks, count = schedule.num_chunks, schedule.num_micro_batches
    # The last three groups whose backwards run while forwards still begin.
    last = count - warm_up - 1
    groups = range(last - 2 * every, last + 1, every)
    assert groups[0] >= 0, "too few micro-batches to repeat anything"
    last_of: Kind = "W" if any(action.kind == "W" for action in schedule.ranks[0]) else "B"
    looked_at: tuple[tuple[Kind, int], ...] = (("F", warm_up), (last_of, 0))
    found: list[float] = []
    for stage in range(schedule.num_stages):
        for kind, ahead in looked_at:
            first = [schedule.unit_actions(kind, stage, (g + ahead) * chunks)[0] for g in groups]
            ends = [timeline.span(action).end_seconds for action in first]
            found += (later - earlier for earlier, later in pairwise(ends))
    least, most = min(found), max(found)
    return most if most - least <= _SAME * most else None


def fixed_seconds(
    forward: float = 1.0,
    backward: float = 2.0,
    *,
    weight: float | None = None,
    send: float = 0.0,
    copy: float = 0.0,
    reduce: float = 0.0,
) -> Callable[[Action], float]:
    """Returns durations that depend on nothing but the kind of action.

    Args:
        forward: seconds of one unit's forward.
        backward: seconds of its whole backward.
        weight: the part of `backward` that weight gradients take where it is split; None for half.
        send: seconds that a link is busy with one unit's activation or gradient.
        copy: seconds of one unit's copy to the host, or back.
        reduce: seconds of one stage's gradient reduction.
    """
    weight = backward / 2 if weight is None else weight
    table: dict[Kind, float] = {
        "F": forward,
        "B": backward,
        "I": backward - weight,
        "W": weight,
        "R": forward,
        "SEND_F": send,
        "SEND_B": send,
        "RECV_F": 0.0,
        "RECV_B": 0.0,
        "REDUCE_GRAD": reduce,
        **dict.fromkeys(STREAM_KINDS, 0.0),
    }
    return lambda action: table.get(action.kind, copy)


def bubble_fraction(timeline: Timeline) -> float:
    """Returns the share of all ranks' time in which they do not compute, 0 to 1."""
    lanes = [lane for lane in timeline.lanes if lane.endswith(COMPUTE)]
    whole = len(lanes) * timeline.end_seconds
    # In this order whole numbers give the fraction itself, rounded once.
    return (whole - sum(map(timeline.busy_seconds, lanes))) / whole if whole else 0.0


def shared_seconds(
    schedule: Schedule, seconds: Callable[[Action], float]
) -> Callable[[Action], float]:
    """Returns durations in which each rank's share of a unit, and each message, takes its share."""
    if not schedule.shared_units:
        return seconds
    sent = messages(schedule)

    def shared(action: Action) -> float:
        message = sent.get(action)
        return seconds(action) * (schedule.share(action) if message is None else message.share)

    return shared


def alive_units(schedule: Schedule, timeline: Timeline) -> list[list[tuple[float, float]]]:
    """Returns, rank by rank, how many units' activations it holds over time.

    A unit is alive from the begin of its forward to the end of its backward (of its weight gradient
    where backward is split), less the time that it is away from the device, whatever its length. Of
    a shared unit each rank holds its share.

    Returns:
        For each rank (seconds, units from then on), beginning at zero seconds.
    """
    events: list[list[tuple[float, Fraction | int]]] = [[] for _ in schedule.ranks]
    whole = any(action.kind in ("B", "W") for rank in schedule.ranks for action in rank)
    shared = bool(schedule.shared_units)
    for action, lane, start, end, _ in timeline.spans():
        rank = int(lane.partition(".")[0])
        units = schedule.share(action) if shared else 1
        if action.kind in ("F", "H"):
            events[rank].append((start, units))
        if action.kind in ("B", "W", "D") or (action.kind == "F" and not whole):
            events[rank].append((end, -units))
    return [_summed(sorted(rank)) for rank in events]


def peak_units(schedule: Schedule, timeline: Timeline) -> list[float]:
    """Returns the most units that each rank holds at once; see `alive_units`."""
    return [max(units for _, units in curve) for curve in alive_units(schedule, timeline)]


def _summed(events: Sequence[tuple[float, Fraction | int]]) -> list[tuple[float, float]]:
    curve: list[tuple[float, Fraction | int]] = [(0.0, 0)]
    for at, change in events:
        held = curve[-1][1] + change
        if at == curve[-1][0]:
            curve[-1] = (at, held)
        else:
            curve.append((at, held))
    # Whole numbers stay what they are.
    return [(at, int(held) if held == int(held) else float(held)) for at, held in curve]
