"""A Schedule as a grid of text, steps down and ranks across, which parses back; and over time.

    chunks 1
    step  rank 0  rank 1
    0     0F0     1F0
    1     0B0     1B0

A step is a place in a rank's list, not an instant: what stands side by side need not run at once.
`over_time` shows that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.timeline import COMPUTE, Timeline

if TYPE_CHECKING:
    from sppo_hf.schedule.schedule import Schedule

NOTHING = "."
"""Where a rank has no action."""

_SHOWN_STEPS = 6
_HEAD_LINES = 2


def format_grid(ranks: Sequence[Sequence[str]], chunks: int | tuple[int, ...]) -> str:
    """Returns the text form of a schedule's actions; `parse_grid` is its exact inverse."""
    steps = range(max(map(len, ranks), default=0))
    chunks = chunks if isinstance(chunks, tuple) else (chunks,)
    return " ".join(("chunks", *map(str, chunks))) + "\n" + _table(ranks, steps)


def parse_grid(text: str) -> tuple[tuple[tuple[Action, ...], ...], int | tuple[int, ...]]:
    """Reads the text form; returns each rank's actions, and the chunks of each micro-batch.

    Columns are told apart by spaces, so every cell is filled, with "." where a rank has nothing;
    that may stand between actions too, and is then forgotten.

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
    """Returns the grid around some steps, with their actions in brackets.

    Args:
        schedule: any, in whatever order.
        marks: (rank, step) of what is marked; a step past a rank's end marks the end.
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


def over_time(timeline: Timeline, slot_seconds: float) -> str:
    """Returns the compute of all ranks over time, a line for each rank and a column for each slot.

    An action stands in the slot in which it begins, followed by "=" in those that it goes on
    through; "." is a slot without work.

    Args:
        timeline: of a schedule over ranks.
        slot_seconds: length of a slot; at most the shortest action, or some are not seen.

    Raises:
        ScheduleError: the length is not above zero.
    """
    if not slot_seconds > 0:
        raise ScheduleError(f"slot_seconds is {slot_seconds}. Allowed: a number above zero.")
    num_slots = round(timeline.end_seconds / slot_seconds)
    rows: dict[str, list[str]] = {}
    for lane in timeline.lanes:
        if not lane.endswith(COMPUTE):
            continue
        row = rows[f"rank {lane.removesuffix(COMPUTE)}"] = [NOTHING] * num_slots
        for span in timeline.spans(lane):
            first, stop = (
                round(at / slot_seconds) for at in (span.start_seconds, span.end_seconds)
            )
            for slot in range(first, min(stop, num_slots)):
                row[slot] = "="
            if first < num_slots:
                row[first] = str(span.action)
    width = max((len(cell) for row in rows.values() for cell in row), default=0)
    label = max(map(len, rows), default=0)
    return "".join(
        f"{name:<{label}}  {' '.join(cell.ljust(width) for cell in row).rstrip()}\n"
        for name, row in rows.items()
    )


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
    # A pointed row is longer than the columns.
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
