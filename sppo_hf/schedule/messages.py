"""Messages between ranks: activations, gradients and, where units are shared, K/V and dK/dV.

They follow from where units are computed; lowering, validation, simulation and costs all read them
here.

[Note: what moves where units are shared] The n ranks of a shared unit hold n-ths of its tokens, in
order: of what passes between stages and of all that is saved. Attention divides it by heads
instead, so of keys and values, and of the sums of their gradients, each rank holds an n-th of the
heads of all tokens so far. Where the next chunk of a stage has another set of ranks, K/V of all
earlier chunks are sent to those that lack them, each chunk's as soon as it has run; the old ranks
keep theirs for backward. Backward sends gradient sums the same way back: all that later chunks add
to a chunk's dK/dV arrives where its backward runs, before it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from sppo_hf.schedule.actions import Action, Kind
from sppo_hf.schedule.schedule import Schedule

SENDS: dict[Kind, Kind] = {
    "SEND_F": "RECV_F",
    "SEND_B": "RECV_B",
    "SEND_KV": "RECV_KV",
    "SEND_DKV": "RECV_DKV",
}
"""Each kind of send, and the receive that is its other end."""

TRANSFERS: frozenset[Kind] = frozenset({*SENDS, *SENDS.values()})


_ALL = Fraction(1)


class ChunkRun(NamedTuple):
    """Neighbouring chunks of one stage that the same ranks compute."""

    chunks: range
    ranks: tuple[int, ...]

    @property
    def is_shared(self) -> bool:
        """Whether there are several ranks."""
        return len(self.ranks) > 1


class Message(NamedTuple):
    """One message from one rank to another."""

    send: Action
    receive: Action
    source: int
    target: int
    producer: Action
    """Compute action of `source` that makes the data; it is sent once that has ended."""

    consumer: Action
    """Compute action of `target` that needs the data."""

    share: Fraction
    """Share of the whole unit's activation, gradient or K/V."""


def messages(schedule: Schedule) -> dict[Action, Message]:
    """Returns all messages by their send, in the order in which each rank produces them."""
    back: dict[tuple[int, int], Kind] = {
        (stage, unit): kind
        for rank in schedule.ranks
        for kind, stage, unit, _, _ in rank
        if kind in ("B", "I")
    }
    homes, shared = schedule.stage_ranks, schedule.shared_units
    moved: dict[Action, list[Message]] = {}
    for message in _of_keys(schedule, back) if shared else ():
        moved.setdefault(message.producer, []).append(message)
    found: dict[Action, Message] = {}
    for rank, actions in enumerate(schedule.ranks):
        for made in actions:
            forward = made.kind == "F"
            if not (forward or made.kind in ("B", "I")):
                continue
            keys = moved.get(made, ())
            # Gradients in the order in which backwards need them, or all would come at once.
            for message in keys if forward else reversed(keys):
                found[message.send] = message
            stage = made.stage + (1 if forward else -1)
            kind: Kind | None = "F" if forward else back.get((stage, made.unit))
            if not 0 <= stage < len(homes) or kind is None:
                continue
            send: Kind = "SEND_F" if forward else "SEND_B"
            if shared:
                for message in _pieces_from(schedule, send, made, stage, kind):
                    found[message.send] = message
            elif homes[stage] != rank:
                # By far the most frequent case, inlined for speed in a search over layouts.
                sent = Action(send, made[1], made[2])
                received = Action(SENDS[send], stage, made[2])
                used = Action(kind, stage, made[2])
                found[sent] = Message(sent, received, rank, homes[stage], made, used, _ALL)
    return found


def _pieces_from(
    schedule: Schedule, send: Kind, made: Action, stage: int, kind: Kind
) -> Iterator[Message]:
    """Yields messages from one rank's share of a unit to the ranks of the neighbouring stage."""
    here = schedule.unit_ranks(made.stage, made.unit)
    there = schedule.unit_ranks(stage, made.unit)
    for piece, (mine, yours, share) in enumerate(_overlaps(len(here), len(there))):
        if mine != (made.part or 0) or here[mine] == there[yours]:
            continue
        part = None if len(here) == len(there) == 1 else piece
        yield Message(
            Action(send, made.stage, made.unit, None, part),
            Action(SENDS[send], stage, made.unit, None, part),
            *(here[mine], there[yours], made),
            schedule.unit_action(kind, stage, made.unit, yours),
            share,
        )


def _of_keys(schedule: Schedule, back: dict[tuple[int, int], Kind]) -> Iterator[Message]:
    """Yields messages of K/V where a stage's units change ranks, and of dK/dV sums in backward."""
    for stage in sorted({stage for stage, _ in schedule.shared_units}):
        for first, stop in pairwise(schedule.first_units):
            pieces = [0] * (stop - first)
            for before, after in pairwise(_unit_runs(schedule, stage, range(first, stop))):
                for unit in range(first, after.start):
                    # K/V of earlier runs came to this one's ranks with its first unit.
                    ends = max(unit, before.start), after.start
                    for message in _moved(schedule, stage, unit, ends, pieces[unit - first], back):
                        pieces[unit - first] += message.send.kind == "SEND_KV"
                        yield message


def _moved(
    schedule: Schedule,
    stage: int,
    unit: int,
    ends: tuple[int, int],
    piece: int,
    back: dict[tuple[int, int], Kind],
) -> Iterator[Message]:
    """Yields messages of one unit's K/V between the ranks of the units `ends`, and back."""
    here, there = (schedule.unit_ranks(stage, end) for end in ends)
    crossing = [o for o in _overlaps(len(here), len(there)) if here[o[0]] != there[o[1]]]
    kinds = [back.get((stage, end)) for end in ends]
    for part, (mine, yours, share) in enumerate(crossing, piece):
        ahead = schedule.unit_action("F", stage, ends[0], mine)
        late = schedule.unit_action("F", stage, ends[1], yours)
        ranks = here[mine], there[yours]
        sent, received = (Action(k, stage, unit, None, part) for k in ("SEND_KV", "RECV_KV"))
        yield Message(sent, received, ranks[0], ranks[1], ahead, late, share)
        if kinds[0] is not None and kinds[1] is not None:
            made, used = late._replace(kind=kinds[1]), ahead._replace(kind=kinds[0])
            sent, received = (Action(k, stage, unit, None, part) for k in ("SEND_DKV", "RECV_DKV"))
            yield Message(sent, received, ranks[1], ranks[0], made, used, share)


def chunk_runs(schedule: Schedule) -> dict[tuple[int, int], ChunkRun]:
    """Returns the run of each (stage, chunk); all micro-batches have the same."""
    found: dict[tuple[int, int], ChunkRun] = {}
    for stage in range(schedule.num_stages):
        for chunks in _unit_runs(schedule, stage, range(schedule.num_chunks)):
            run = ChunkRun(chunks, schedule.unit_ranks(stage, chunks.start))
            found.update(((stage, chunk), run) for chunk in chunks)
    return found


def _unit_runs(schedule: Schedule, stage: int, units: range) -> list[range]:
    """Returns the runs of neighbouring units that the same ranks compute."""
    starts = [units.start]
    for before, unit in pairwise(units):
        if schedule.unit_ranks(stage, before) != schedule.unit_ranks(stage, unit):
            starts.append(unit)
    return [range(first, stop) for first, stop in pairwise([*starts, units.stop])]


@lru_cache(maxsize=4096)
def _overlaps(here: int, there: int) -> list[tuple[int, int, Fraction]]:
    """Returns overlaps (part, part, share) of a whole cut into `here` and `there` equal parts."""
    found: list[tuple[int, int, Fraction]] = []
    for mine in range(here):
        for yours in range(there):
            low = max(Fraction(mine, here), Fraction(yours, there))
            high = min(Fraction(mine + 1, here), Fraction(yours + 1, there))
            if low < high:
                found.append((mine, yours, high - low))
    return found
