"""Schedule: the actions of each rank in order, as one immutable value with a text form.

    chunks 1
    step  rank 0  rank 1
    0     0F0     1F0
    1     0B0     1B0

A step is an index in a rank's list, not a time: `timeline.over_time` shows when actions run.
`validate` says whether the order can run and `simulate` how long it takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, takewhile

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import Action, Kind


# No slots: a cached property needs the instance's dictionary.
@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order.

    Units are numbered through: the chunks of the first micro-batch, then those of the second, and
    so on. If all micro-batches have the same number of chunks, a unit is
    `micro-batch * num_chunks + chunk`. A stage belongs to one rank; a rank may hold several stages
    ("virtual" stages). Some units of a stage may be shared by several ranks: then each of them
    computes its share of the tokens, all at the same time, and has its own action with its own
    `part`.
    """

    ranks: tuple[tuple[Action, ...], ...]

    chunks: int | tuple[int, ...] = 1
    """Number of chunks of every micro-batch; one number for each micro-batch if they differ."""

    def __post_init__(self) -> None:
        """Write equal numbers of chunks as one number, so that equal schedules compare equal."""
        if isinstance(self.chunks, tuple) and len(set(self.chunks)) == 1:
            object.__setattr__(self, "chunks", self.chunks[0])

    @property
    def num_chunks(self) -> int:
        """Chunks of a micro-batch; the maximum if they differ."""
        return self.chunks if isinstance(self.chunks, int) else max(self.chunks, default=1)

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return len(self.stage_ranks)

    @cached_property
    def num_units(self) -> int:
        """Units of each stage: micro-batches times chunks."""
        return 1 + max((action.unit for rank in self.ranks for action in rank), default=-1)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches; the last one counts even if some of its chunks are missing."""
        return len(self.first_units) - 1

    @cached_property
    def first_units(self) -> tuple[int, ...]:
        """First unit of each micro-batch, followed by the end of the last one.

        If all have the same number of chunks, the number of micro-batches follows from the units.
        """
        if isinstance(self.chunks, tuple):
            return tuple(accumulate(self.chunks, initial=0))
        return tuple(range(0, self.num_units + self.chunks, self.chunks))

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """Rank that each stage belongs to: the one with its units that are not shared.

        If all units of a stage are shared: the rank with share 0 of the first of them.

        Raises:
            ScheduleError: unshared units of a stage are on two ranks; or a stage is on no rank
                although a higher one is.
        """
        found: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            for step, action in enumerate(actions):
                if action.part is None and found.setdefault(action.stage, rank) != rank:
                    raise ScheduleError(
                        f"{action} is step {step} of rank {rank}, but stage {action.stage} is on "
                        f"rank {found[action.stage]}. Allowed: all actions of a stage on one rank, "
                        "but for units that are shared, each rank's with its #part."
                    )
        for (stage, _), ranks in sorted(self.shared_units.items()):
            found.setdefault(stage, ranks[0])
        missing = [stage for stage in range(max(found, default=-1)) if stage not in found]
        if missing:
            raise ScheduleError(
                f"No rank has an action of stage {missing[0]}, but there is a stage {max(found)}. "
                "Allowed: stages numbered from 0 without gaps."
            )
        return tuple(found[stage] for stage in sorted(found))

    @cached_property
    def shared_units(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Ranks of each (stage, unit) that several ranks compute together, in order of their parts.

        Raises:
            ScheduleError: the parts of a unit's forward are not 0, 1 and so on, each on a different
                rank.
        """
        held: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for rank, actions in enumerate(self.ranks):
            for kind, stage, unit, _, part in actions:
                if kind == "F" and part is not None:
                    held.setdefault((stage, unit), []).append((part, rank))
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        for (stage, unit), shares in sorted(held.items()):
            ranks = tuple(rank for _, rank in sorted(shares))
            parts = sorted(part for part, _ in shares)
            if parts != list(range(len(parts))) or not 1 < len(parts) == len(set(ranks)):
                raise ScheduleError(
                    f"{Action('F', stage, unit)} is shared by ranks {ranks} as parts {parts}. "
                    "Allowed: parts 0, 1 and so on, at least two, each on a rank of its own."
                )
            found[stage, unit] = ranks
        return found

    def unit_ranks(self, stage: int, unit: int) -> tuple[int, ...]:
        """Returns the ranks that compute a unit: one, or all that share it in order of `part`."""
        return self.shared_units.get((stage, unit)) or (self.stage_ranks[stage],)

    def unit_actions(self, kind: Kind, stage: int, unit: int) -> tuple[Action, ...]:
        """Returns a unit's actions of one kind, one for each rank in order of `part`."""
        ranks = self.shared_units.get((stage, unit))
        if ranks is None:
            return (Action(kind, stage, unit),)
        return tuple(Action(kind, stage, unit, None, part) for part in range(len(ranks)))

    def unit_action(self, kind: Kind, stage: int, unit: int, part: int) -> Action:
        """Returns a unit's action of one kind: share `part` of it, or all if it is not shared."""
        shared = (stage, unit) in self.shared_units
        return Action(kind, stage, unit, None, part if shared else None)

    def share(self, action: Action) -> Fraction:
        """Returns the fraction of its unit that an action computes; 1 if it is not shared."""
        shared = action.part is not None and self.shared_units.get(action[1:3])
        return Fraction(1, len(shared)) if shared else Fraction(1)

    @cached_property
    def forwards_before_backward(self) -> tuple[int, ...]:
        """Number of forwards of each rank before its first backward, [ranks]; shares are summed."""
        backwards = ("B", "I")
        before = (takewhile(lambda a: a.kind not in backwards, rank) for rank in self.ranks)
        if self.shared_units:
            return tuple(round(sum(self.share(a) for a in b if a.kind == "F")) for b in before)
        return tuple(sum(a.kind == "F" for a in actions) for actions in before)

    def chunk(self, action: Action) -> int:
        """Returns the chunk of an action's unit."""
        return action.unit - self.first_units[self.micro_batch(action)]

    def micro_batch(self, action: Action) -> int:
        """Returns the micro-batch of an action's unit."""
        if isinstance(self.chunks, int):
            return action.unit // self.chunks
        return bisect_right(self.first_units, action.unit) - 1

    def keep(self, wanted: Callable[[Action], bool]) -> Schedule:
        """Returns the schedule with only those actions for which `wanted` is true."""
        ranks = tuple(tuple(a for a in rank if wanted(a)) for rank in self.ranks)
        return Schedule(ranks, self.chunks)

    def texts(self) -> list[list[str]]:
        """Returns each rank's actions as text."""
        return [[str(action) for action in rank] for rank in self.ranks]

    def __str__(self) -> str:
        return format_grid(self.texts(), self.chunks)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Reads the text form back; the exact inverse of `str(schedule)`.

        Raises:
            ScheduleError: a line or an action is malformed, see `parse_grid`.
        """
        return cls(*parse_grid(text))


NOTHING = "."
"""Text of an empty cell of the grid."""

_SHOWN_STEPS = 6
_HEAD_LINES = 2


def format_grid(ranks: Sequence[Sequence[str]], chunks: int | tuple[int, ...]) -> str:
    """Returns the text form of a schedule's actions; `parse_grid` is its exact inverse."""
    steps = range(max(map(len, ranks), default=0))
    chunks = chunks if isinstance(chunks, tuple) else (chunks,)
    return " ".join(("chunks", *map(str, chunks))) + "\n" + _table(ranks, steps)


def parse_grid(text: str) -> tuple[tuple[tuple[Action, ...], ...], int | tuple[int, ...]]:
    """Reads the text form; returns each rank's actions, and the chunks of each micro-batch.

    Columns are separated by spaces, so every cell must be filled, with "." where a rank has no
    action. A "." between actions is allowed and ignored.

    Raises:
        ScheduleError: a line or an action is malformed; the message names the line.
    """
    lines = text.splitlines()
    head = lines[0].split() if lines else []
    counts = [int(word) for word in head[1:] if word.isdecimal()]
    if head[:1] != ["chunks"] or not counts or len(counts) < len(head) - 1 or min(counts) < 1:
        raise ScheduleError(
            f"Line 1 of a schedule's text is {lines[0] if lines else ''!r}. Allowed: 'chunks N' "
            "with the number of chunks of a micro-batch, 1 or more; or one number for each of them."
        )
    names = lines[1].split() if len(lines) > 1 else []
    num_ranks = (len(names) - 1) // 2
    if names != _header(num_ranks).split():
        raise ScheduleError(
            f"Line 2 of a schedule's text is {' '.join(names)!r}. Allowed: 'step' and then "
            "'rank 0', 'rank 1' and so on."
        )
    ranks: list[list[Action]] = [[] for _ in range(num_ranks)]
    for number, line in enumerate(lines[_HEAD_LINES:], _HEAD_LINES + 1):
        step, *cells = line.split() or [""]
        if step != str(number - _HEAD_LINES - 1) or len(cells) != num_ranks:
            raise ScheduleError(
                f"Line {number} of a schedule's text is {line!r}. Allowed: step "
                f"{number - _HEAD_LINES - 1} and {num_ranks} cells, '{NOTHING}' for none."
            )
        for rank, cell in zip(ranks, cells, strict=True):
            if cell != NOTHING:
                rank.append(_parsed(cell, number))
    return tuple(map(tuple, ranks)), counts[0] if len(counts) == 1 else tuple(counts)


def show_marked(schedule: Schedule, marks: Collection[tuple[int, int]]) -> str:
    """Returns the lines of the grid around some steps, with the marked actions in brackets.

    Args:
        schedule: any schedule, valid or not.
        marks: (rank, step) of each marked action; a step past a rank's end marks its end.
    """
    ranks = [[str(action) for action in rank] for rank in schedule.ranks]
    for rank, step in marks:
        if step < len(ranks[rank]):
            ranks[rank][step] = f"[{ranks[rank][step]}]"
        else:
            ranks[rank] += [NOTHING] * (step - len(ranks[rank])) + ["[end]"]
    last = max(map(len, ranks), default=0)
    wanted = sorted({at for _, step in marks for at in _around(step, last)})
    return _table(ranks, wanted, {step for _, step in marks})


def _header(num_ranks: int) -> str:
    return "  ".join(("step", *(f"rank {rank}" for rank in range(num_ranks))))


def _around(step: int, last: int) -> range:
    return range(max(0, step - _SHOWN_STEPS), min(last, step + _SHOWN_STEPS + 1))


def _table(
    ranks: Sequence[Sequence[str]], steps: Sequence[int], pointed: Collection[int] = ()
) -> str:
    names = [f"rank {rank}" for rank in range(len(ranks))]
    widths = [max((len(name), *map(len, rank))) for name, rank in zip(names, ranks, strict=True)]
    widths = [max(len("step"), len(str(max(steps, default=0)))), *widths]
    rows = [["step", *names]]
    for at, step in enumerate(steps):
        if at and step != steps[at - 1] + 1:
            rows.append(["..."])
        row = [rank[step] if step < len(rank) else NOTHING for rank in ranks]
        rows.append([str(step), *row, *["<-- here"][: step in pointed]])
    # A marked row has one more cell, "<-- here".
    widths.append(0)
    return "".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths[: len(row)], strict=True)
        ).rstrip()
        + "\n"
        for row in rows
    )


def _parsed(cell: str, number: int) -> Action:
    try:
        return Action.parse(cell)
    except ScheduleError as error:
        raise ScheduleError(f"Line {number} of a schedule's text: {error}") from error
