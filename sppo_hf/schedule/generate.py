"""Generators: from numbers of ranks, micro-batches and chunks to a Schedule of compute actions.

Most are a pair of orders (forwards, and backwards chunk by chunk in reverse) and a rule for how
they alternate. Sends, copies and reductions are added by `lower`. P, M, N and V in the words below
are ranks, micro-batches, chunks per micro-batch and virtual stages per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from sppo_hf.errors import ScheduleError
from sppo_hf.registry import SCHEDULES
from sppo_hf.schedule.actions import Action, Kind
from sppo_hf.schedule.schedule import Schedule


class Size(NamedTuple):
    """How large a schedule is."""

    num_ranks: int
    """P: ranks of the pipeline."""

    num_micro_batches: int
    """M: micro-batches of a step."""

    num_chunks: int = 1
    """N: chunks of a micro-batch."""

    num_virtual: int = 1
    """V: stages of each rank; stage s is on rank `s % num_ranks`."""

    chunks: tuple[int, ...] = ()
    """Chunks of each micro-batch where they differ; `num_chunks` is then the most of them."""

    @classmethod
    def uneven(cls, num_ranks: int, chunks: Sequence[int]) -> Size:
        """Returns the size of a step whose micro-batches have so many chunks each."""
        most = max(chunks, default=0)
        uneven = tuple(chunks) if len(set(chunks)) > 1 else ()
        return cls(num_ranks, len(chunks), most, chunks=uneven)

    @property
    def num_units(self) -> int:
        """Units that each stage carries out."""
        return sum(self.chunks) if self.chunks else self.num_micro_batches * self.num_chunks

    @property
    def unit_bounds(self) -> list[tuple[int, int]]:
        """Of each micro-batch the first unit, and the one after its last."""
        counts = self.chunks or (self.num_chunks,) * self.num_micro_batches
        return list(pairwise(accumulate(counts, initial=0)))


Generator = Callable[[Size], Schedule]


def register_schedule(
    name: str, *, interleaved: bool = False, even: bool = False
) -> Callable[[Generator], Generator]:
    """Decorator: the schedule can be asked for by name.

    Args:
        name: value of the setting `pp_schedule`.
        interleaved: whether it may put several stages on a rank.
        even: whether it needs as many chunks in each micro-batch.
    """

    def register(made: Generator) -> Generator:
        SCHEDULES.add(name, made, interleaved=interleaved, even=even)
        return made

    return register


@register_schedule("gpipe")
def gpipe(size: Size) -> Schedule:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965); every unit is alive at once."""
    units, reverse = _orders(size)
    return Schedule(
        tuple(
            (*_of_stage("F", rank, units), *_of_stage("B", rank, reverse))
            for rank in range(size.num_ranks)
        ),
        size.chunks or size.num_chunks,
    )


@register_schedule("1f1b", even=True)
def one_forward_one_backward(size: Size) -> Schedule:
    """1F1B by whole micro-batches (PipeDream-Flush, arXiv 2006.09503).

    Rank r warms up with P - r - 1 micro-batches. With several chunks these follow each other from
    stage to stage, but a micro-batch's backward still begins only after its last chunk's forward
    on all stages, and a whole micro-batch is alive at once.
    """
    units, reverse = _orders(size)
    ranks: list[tuple[Action, ...]] = []
    for rank in range(size.num_ranks):
        forwards, backwards = _of_stage("F", rank, units), _of_stage("B", rank, reverse)
        warm_up = _warm_up_by_row(size, rank)
        ranks.append(_alternate(forwards, backwards, warm_up, run=size.num_chunks))
    return Schedule(tuple(ranks), size.chunks or size.num_chunks)


@register_schedule("seq1f1b")
def seq1f1b(size: Size) -> Schedule:
    """1F1B by chunks (Seq1F1B, arXiv 2406.03488): rank r warms up with P - r - 2 + N forwards.

    Micro-batches go first in first out, their chunks last in first out, so that the gradients of
    keys and values are complete when a chunk's backward needs them.
    """
    units, reverse = _orders(size)
    return Schedule(
        tuple(
            _alternate(
                _of_stage("F", rank, units), _of_stage("B", rank, reverse), _warm_up(size, rank)
            )
            for rank in range(size.num_ranks)
        ),
        size.chunks or size.num_chunks,
    )


@register_schedule("zb_seq1f1b")
def zb_seq1f1b(size: Size) -> Schedule:
    """Seq1F1B with weight gradients apart and late (ZB-H1, arXiv 2401.10241, on chunks).

    Rank r is r weight gradients behind its input gradients, which fills the time in which earlier
    ranks still wait for gradients; every rank then holds as much as rank 0.
    """
    units, reverse = _orders(size)
    ranks: list[tuple[Action, ...]] = []
    for rank in range(size.num_ranks):
        order: list[Action] = []
        inputs = 0
        late = _of_stage("W", rank, reverse)
        forwards, backwards = _of_stage("F", rank, units), _of_stage("I", rank, reverse)
        for action in _alternate(forwards, backwards, _warm_up(size, rank)):
            order.append(action)
            if action.kind == "I":
                order += late[max(inputs - rank, 0) : max(inputs - rank + 1, 0)]
                inputs += 1
        ranks.append((*order, *late[max(inputs - rank, 0) :]))
    return Schedule(tuple(ranks), size.chunks or size.num_chunks)


@register_schedule("interleaved_seq1f1b", interleaved=True, even=True)
def interleaved_seq1f1b(size: Size) -> Schedule:
    """Seq1F1B over several stages per rank (arXiv 2406.03488, after Megatron's, 2104.04473).

    Units pass a rank's stages in groups: all units of a group through its first stage, then through
    its second, and so on. A group is P chunks where N divides P and P divides M * N, as in the
    paper. Otherwise it is a little larger: always whole micro-batches, since a group that ends
    within one would need the backward of its last chunks before they have run (a deadlock), and
    never fewer than P chunks where there are as many, since that would leave ranks idle.
    """
    groups = micro_batch_groups(size)
    ranks: list[tuple[Action, ...]] = []
    for rank in range(size.num_ranks):
        stages = range(rank, size.num_ranks * size.num_virtual, size.num_ranks)
        forwards: list[Action] = []
        backwards: list[Action] = []
        for group in groups:
            units, reverse = _orders(size, group)
            forwards += (action for s in stages for action in _of_stage("F", s, units))
            backwards += (action for s in reversed(stages) for action in _of_stage("B", s, reverse))
        ranks.append(_alternate(forwards, backwards, _warm_up_by_group(size, rank)))
    return Schedule(tuple(ranks), size.chunks or size.num_chunks)


def msp(size: Size) -> Schedule:
    """Multiplexed sequence partitioning (SPPO, arXiv 2503.10377, table 3): all fill and drain.

    Of stage i, chunks 0 .. P-2-i ("left") are computed by ranks i .. P-1 together, chunks
    N-i .. N-1 ("right") by ranks 0 .. i together, and those between ("steady") by rank i alone.
    Backward is the mirror image on the same sets, so saved activations never move.

    The paper gives the sets and leaves the order open. Here each rank goes through left units stage
    by stage, then its steady ones, then right units stage by stage. Sets of left units are nested,
    so no rank waits there, and drains of early stages run while late stages are still steady: with
    equal costs, forward takes `N + 2 - 2 H_P + H_a + H_b` units, a + b = P - 1 halved, H harmonic
    numbers: N + 0.33 for P = 4, N + 0.48 for P = 8, never N + 0.62. Chunk by chunk, fill and drain
    would take P - H_P units each, `N + 2 (P - H_P) - (P - 1)` in all: N + 3.56 for P = 8.

    Micro-batches follow each other, each forward and back. The paper has one a step; so its memory
    is one's, whatever their number.

    Raises:
        ScheduleError: a micro-batch has fewer chunks than there are ranks.
    """
    num_ranks, bounds = size.num_ranks, size.unit_bounds
    shortest = min(stop - first for first, stop in bounds)
    if shortest < num_ranks:
        raise ScheduleError(
            f"Schedule 'msp' was asked for with {shortest} chunks on {num_ranks} ranks. Allowed: "
            "as many chunks as ranks or more, for the first and last of each stage are shared. "
            "Remedy: more chunks, or 'seq1f1b'."
        )
    ranks: list[tuple[Action, ...]] = []
    for rank in range(num_ranks):
        order: list[Action] = []
        for first, stop in bounds:
            forwards: list[tuple[int, int, int | None]] = []
            for stage in range(rank + 1):
                left = range(first, first + num_ranks - 1 - stage)
                forwards += ((stage, unit, rank - stage) for unit in left)
            steady = range(first + num_ranks - 1 - rank, stop - rank)
            forwards += ((rank, unit, None) for unit in steady)
            for stage in range(rank, num_ranks):
                forwards += ((stage, unit, rank) for unit in range(stop - stage, stop))
            order += (Action("F", stage, unit, None, part) for stage, unit, part in forwards)
            order += (
                Action("B", stage, unit, None, part) for stage, unit, part in reversed(forwards)
            )
        ranks.append(tuple(order))
    return Schedule(tuple(ranks), size.chunks or size.num_chunks)


GENERATORS: dict[str, Generator] = SCHEDULES
"""Each generator of schedules that run, by its name on the command line and in a config."""

MSP = "msp"
"""Name of the schedule that shares units between ranks; a config asks for it by `pp_msp`."""

SHARED_UNIT_SCHEDULES: dict[str, Generator] = {MSP: msp}
"""Those that share units between ranks. Not each model and layout can; a config does not take their
names."""

ALL_SCHEDULES: dict[str, Generator] = {**GENERATORS, **SHARED_UNIT_SCHEDULES}
"""All of them."""

INTERLEAVED = frozenset(SCHEDULES.names_with("interleaved"))
"""Names of those that put several stages on a rank."""

EVEN = frozenset(SCHEDULES.names_with("even"))
"""Names of those that need as many chunks in each micro-batch."""


def generate(name: str, size: Size) -> Schedule:
    """Returns the schedule of that name and size.

    Raises:
        ScheduleError: there is no such schedule, a number is below one, or several stages per rank
            or uneven micro-batches are asked of a schedule that has none.
    """
    if name not in SCHEDULES and name not in SHARED_UNIT_SCHEDULES:
        raise ScheduleError(
            f"There is no schedule {name!r}. Allowed: {', '.join(ALL_SCHEDULES)}. Remedy: name one "
            "of these."
        )
    if size.chunks and name in EVEN:
        raise ScheduleError(
            f"Schedule {name!r} takes turns by whole micro-batches, and was asked for with "
            f"micro-batches of {min(size.chunks)} to {size.num_chunks} chunks. Allowed: as many "
            "chunks in each. Remedy: 'seq1f1b', which takes turns by chunks."
        )
    shortest = min(size.chunks, default=size.num_chunks)
    numbers = (size.num_ranks, size.num_micro_batches, shortest, size.num_virtual)
    for what, number in zip(("ranks", "micro-batches", "chunks", "virtual"), numbers, strict=True):
        if number < 1:
            raise ScheduleError(
                f"Schedule {name!r} was asked for with {what} = {number}. Allowed: 1 or more. "
                "Remedy: use 1 for what you do not want split."
            )
    if size.num_virtual > 1 and name not in INTERLEAVED:
        raise ScheduleError(
            f"Schedule {name!r} was asked for with {size.num_virtual} virtual stages per rank. "
            f"Allowed: 1; only {', '.join(sorted(INTERLEAVED))} puts several on a rank. Remedy: "
            "use that one, or one stage per rank."
        )
    return (SHARED_UNIT_SCHEDULES if name in SHARED_UNIT_SCHEDULES else SCHEDULES)[name](size)


@lru_cache(maxsize=4096)
def forwards_before_backward(name: str, size: Size) -> tuple[int, ...]:
    """Returns `generate(name, size).forwards_before_backward`, by formula for 1F1B-like schedules.

    Raises:
        ScheduleError: as `generate`, where it is asked.
    """
    if name not in _ALTERNATING or size.chunks:
        return generate(name, size).forwards_before_backward
    warm_up = _ALTERNATING[name]
    run = size.num_chunks if warm_up is _warm_up_by_row else 1
    forwards = size.num_units * size.num_virtual
    return tuple(min(forwards, warm_up(size, rank) + run) for rank in range(size.num_ranks))


def _warm_up_by_row(size: Size, rank: int) -> int:
    return min(size.num_ranks - rank - 1, size.num_micro_batches) * size.num_chunks


def _warm_up(size: Size, rank: int) -> int:
    return min(size.num_ranks - rank - 2 + size.num_chunks, size.num_units)


def _warm_up_by_group(size: Size, rank: int) -> int:
    longest = max(map(len, micro_batch_groups(size))) * size.num_chunks
    warm_up = (size.num_virtual - 1) * longest + 2 * (size.num_ranks - rank - 1)
    return min(warm_up + size.num_chunks - 1, size.num_units * size.num_virtual)


_ALTERNATING: dict[str, Callable[[Size, int], int]] = {
    "1f1b": _warm_up_by_row,
    "seq1f1b": _warm_up,
    "zb_seq1f1b": _warm_up,
    "interleaved_seq1f1b": _warm_up_by_group,
}
"""Forwards of a rank before it takes turns, of schedules that do."""


def _orders(size: Size, micro_batches: range | None = None) -> tuple[list[int], list[int]]:
    """Units in forward order, and in backward order: each micro-batch's chunks last to first."""
    units = [range(*ends) for ends in size.unit_bounds]
    picked = units if micro_batches is None else units[micro_batches.start : micro_batches.stop]
    return (
        [unit for chunks in picked for unit in chunks],
        [unit for chunks in picked for unit in reversed(chunks)],
    )


def _of_stage(kind: Kind, stage: int, units: Iterable[int]) -> list[Action]:
    return [Action(kind, stage, unit) for unit in units]


def _alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int, *, run: int = 1
) -> tuple[Action, ...]:
    """First `warm_up` forwards, then `run` forwards and `run` backwards by turns; what is left."""
    order = list(forwards[:warm_up])
    turns = range(0, len(forwards) - warm_up, run)
    for at in turns:
        order += forwards[warm_up + at : warm_up + at + run]
        order += backwards[at : at + run]
    return (*order, *backwards[len(turns) * run :])


def micro_batch_groups(size: Size) -> list[range]:
    """Returns which micro-batches pass a rank's stages together, where it has several.

    As few as make up P chunks, or all.
    """
    least = -(-size.num_ranks // size.num_chunks)
    count = max(1, size.num_micro_batches // least)
    # As even as can be: a shorter last group would leave ranks idle.
    bounds = [size.num_micro_batches * at // count for at in range(count + 1)]
    return [range(first, stop) for first, stop in pairwise(bounds)]
