"""Generators: functions from a `Size` to a Schedule of compute actions.

Most combine two orders (of forwards, and of backwards with the chunks reversed) with a rule for how
these alternate. `lower` adds sends, copies and reductions. P, M, N and V stand for the numbers of
ranks, micro-batches, chunks per micro-batch and virtual stages per rank.
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
    """Numbers of ranks, micro-batches, chunks and virtual stages of a schedule."""

    num_ranks: int
    """P: ranks of the pipeline."""

    num_micro_batches: int
    """M: micro-batches of a step."""

    num_chunks: int = 1
    """N: chunks of a micro-batch."""

    num_virtual: int = 1
    """V: stages of each rank; stage s is on rank `s % num_ranks`."""

    chunks: tuple[int, ...] = ()
    """Number of chunks of each micro-batch if these numbers differ, else empty. `num_chunks` is the
    largest of them."""

    @classmethod
    def uneven(cls, num_ranks: int, chunks: Sequence[int]) -> Size:
        """Returns the size of a step whose i-th micro-batch has `chunks[i]` chunks."""
        most = max(chunks, default=0)
        uneven = tuple(chunks) if len(set(chunks)) > 1 else ()
        return cls(num_ranks, len(chunks), most, chunks=uneven)

    @property
    def num_units(self) -> int:
        """Number of units of each stage: chunks summed over all micro-batches."""
        return sum(self.chunks) if self.chunks else self.num_micro_batches * self.num_chunks

    @property
    def unit_bounds(self) -> list[tuple[int, int]]:
        """Half-open range (first unit, last unit + 1) of each micro-batch."""
        counts = self.chunks or (self.num_chunks,) * self.num_micro_batches
        return list(pairwise(accumulate(counts, initial=0)))


Generator = Callable[[Size], Schedule]


def register_schedule(
    name: str, *, interleaved: bool = False, even: bool = False
) -> Callable[[Generator], Generator]:
    """Decorator that registers a generator under a name.

    Args:
        name: value of the setting `pp_schedule`.
        interleaved: whether it may put several stages on a rank.
        even: whether it requires the same number of chunks in every micro-batch.
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

    Rank r warms up with P - r - 1 micro-batches. If a micro-batch has several chunks, these follow
    each other from stage to stage, but its backward still begins only after its last chunk's
    forward on all stages. So the activations of a whole micro-batch are alive at once.
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
    """Seq1F1B with separate, delayed weight gradients (ZB-H1, arXiv 2401.10241, on chunks).

    Rank r computes each weight gradient r units after its input gradient. This fills the time in
    which earlier ranks wait for gradients; every rank then holds as many activations as rank 0.
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
    its second, and so on. A group has P chunks if N divides P and P divides M * N, as in the paper.
    Otherwise it is a little larger. It always consists of whole micro-batches: a group that ended
    within one would need the backward of chunks whose forward has not run (a deadlock). And it has
    at least P chunks if the step has as many: fewer would leave ranks idle.
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

    The paper gives the sets but not the order. Here each rank computes left units stage by stage,
    then its steady ones, then right units stage by stage. Sets of left units are nested, so no rank
    waits there, and early stages drain while late stages are still steady. With equal costs,
    forward takes `N + 2 - 2 H_P + H_a + H_b` units of time, where H are harmonic numbers and a and
    b are P - 1 divided into two halves: N + 0.33 for P = 4, N + 0.48 for P = 8, always less than
    N + 0.62. Chunk by chunk, fill and drain would take P - H_P units of time each,
    `N + 2 (P - H_P) - (P - 1)` in all: N + 3.56 for P = 8.

    Each micro-batch runs forward and backward before the next one begins (the paper has one per
    step). So the activations of only one micro-batch are alive, however many there are.

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
"""Generators of schedules that a config or a command line may name, by that name."""

MSP = "msp"
"""Name of the schedule that shares units between ranks; the setting `pp_msp` selects it."""

SHARED_UNIT_SCHEDULES: dict[str, Generator] = {MSP: msp}
"""Generators of schedules that share units between ranks, by name. They work for some models and
layouts only, so `pp_schedule` does not accept their names."""


def all_schedules() -> tuple[str, ...]:
    """Returns all names of schedules, those of the user's own packages among them."""
    return (*SCHEDULES, *SHARED_UNIT_SCHEDULES)


def interleaved_schedules() -> tuple[str, ...]:
    """Returns the names of the schedules that may put several stages on a rank."""
    return SCHEDULES.names_with("interleaved")


def is_interleaved(name: str) -> bool:
    """Whether a schedule may put several stages on a rank."""
    return bool(SCHEDULES.facts(name).get("interleaved"))


def needs_even_chunks(name: str) -> bool:
    """Whether a schedule requires the same number of chunks in every micro-batch."""
    return bool(SCHEDULES.facts(name).get("even"))


def splits_backward(name: str) -> bool:
    """Whether a schedule computes gradients of weights apart from those of inputs.

    True also for one that refuses the small size at which this is looked up.
    """
    return _splits_backward(SHARED_UNIT_SCHEDULES.get(name) or SCHEDULES[name])


@lru_cache(maxsize=256)
def _splits_backward(make: Generator) -> bool:
    try:
        made = make(Size(2, 2, 2))
    except ScheduleError:
        return True
    return any(action.kind == "W" for rank in made.ranks for action in rank)


def generate(name: str, size: Size) -> Schedule:
    """Returns the schedule of that name and size.

    Raises:
        ScheduleError: there is no such schedule; a number is below one; or the schedule does not
            support several stages per rank, or micro-batches with different numbers of chunks.
    """
    if name not in SCHEDULES and name not in SHARED_UNIT_SCHEDULES:
        raise ScheduleError(
            f"There is no schedule {name!r}. Allowed: {', '.join(all_schedules())}. Remedy: name "
            "one of these."
        )
    if size.chunks and needs_even_chunks(name):
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
    if size.num_virtual > 1 and not is_interleaved(name):
        raise ScheduleError(
            f"Schedule {name!r} was asked for with {size.num_virtual} virtual stages per rank. "
            f"Allowed: 1; only {', '.join(interleaved_schedules())} puts several on a rank. "
            "Remedy: use that one, or one stage per rank."
        )
    return (SHARED_UNIT_SCHEDULES if name in SHARED_UNIT_SCHEDULES else SCHEDULES)[name](size)


@lru_cache(maxsize=4096)
def forwards_before_backward(name: str, size: Size) -> tuple[int, ...]:
    """Returns `generate(name, size).forwards_before_backward`, by formula for 1F1B-like schedules.

    Raises:
        ScheduleError: `generate` is called and raises it.
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
"""For 1F1B-like schedules, the function that returns a rank's warm-up: the number of forwards
before forwards and backwards alternate."""


def _orders(size: Size, micro_batches: range | None = None) -> tuple[list[int], list[int]]:
    """Returns units in forward order and in backward order, with chunks last to first.

    `micro_batches` limits both to some micro-batches; None for all.
    """
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
    """Returns `warm_up` forwards, then `run` of each by turns, then the rest."""
    order = list(forwards[:warm_up])
    turns = range(0, len(forwards) - warm_up, run)
    for at in turns:
        order += forwards[warm_up + at : warm_up + at + run]
        order += backwards[at : at + run]
    return (*order, *backwards[len(turns) * run :])


def micro_batch_groups(size: Size) -> list[range]:
    """Returns the groups of micro-batches of `interleaved_seq1f1b`.

    Each is as small as possible but has at least P chunks; all micro-batches form one group if they
    have fewer.
    """
    least = -(-size.num_ranks // size.num_chunks)
    count = max(1, size.num_micro_batches // least)
    # Groups are as even as possible: a shorter last group would leave ranks idle.
    bounds = [size.num_micro_batches * at // count for at in range(count + 1)]
    return [range(first, stop) for first, stop in pairwise(bounds)]
