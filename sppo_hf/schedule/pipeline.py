"""Simulation of a Schedule over all its ranks: what each action waits for, and when it runs.

Every rank has a compute lane, a copy lane each way, a lane to and from each rank that it talks to,
and one for reductions; `simulate` does the rest. Seconds and bytes come in as callables, so this
knows nothing of models. Costs two to three microseconds per action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from sppo_hf.schedule.actions import Action, Kind
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import Change, simulate_positions
from sppo_hf.schedule.timeline import COMPUTE, Timeline
from sppo_hf.schedule.waits import Waits

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

    What waits for what is said in `waits`, [Note: what an action waits for].
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
    waits = Waits(schedule)
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
            first = [Action(kind, stage, (group + ahead) * chunks) for group in groups]
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
    }
    return lambda action: table.get(action.kind, copy)


def bubble_fraction(timeline: Timeline) -> float:
    """Returns the share of all ranks' time in which they do not compute, 0 to 1."""
    lanes = [lane for lane in timeline.lanes if lane.endswith(COMPUTE)]
    whole = len(lanes) * timeline.end_seconds
    # In this order whole numbers give the fraction itself, rounded once.
    return (whole - sum(map(timeline.busy_seconds, lanes))) / whole if whole else 0.0


def alive_units(schedule: Schedule, timeline: Timeline) -> list[list[tuple[float, int]]]:
    """Returns, rank by rank, how many units' activations it holds over time.

    A unit is alive from the begin of its forward to the end of its backward (of its weight gradient
    where backward is split), less the time that it is away from the device, whatever its length.

    Returns:
        For each rank (seconds, units from then on), beginning at zero seconds.
    """
    events: list[list[tuple[float, int]]] = [[] for _ in schedule.ranks]
    stage_ranks = schedule.stage_ranks
    whole = any(action.kind in ("B", "W") for rank in schedule.ranks for action in rank)
    for (kind, stage, *_), _, start, end, _ in timeline.spans():
        if kind in ("F", "H"):
            events[stage_ranks[stage]].append((start, 1))
        if kind in ("B", "W", "D") or (kind == "F" and not whole):
            events[stage_ranks[stage]].append((end, -1))
    return [_summed(sorted(rank)) for rank in events]


def peak_units(schedule: Schedule, timeline: Timeline) -> list[int]:
    """Returns the most units that each rank holds at once; see `alive_units`."""
    return [max(units for _, units in curve) for curve in alive_units(schedule, timeline)]


def _summed(events: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    curve = [(0.0, 0)]
    for at, change in events:
        held = curve[-1][1] + change
        if at == curve[-1][0]:
            curve[-1] = (at, held)
        else:
            curve.append((at, held))
    return curve
