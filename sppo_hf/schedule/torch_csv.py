"""Schedules in and out of the CSV of torch.distributed.pipelining: a row for each rank.

A cell holds an action. Torch's `_load_csv` reads format "compute_only", with compute alone, and
"compute_comms", with sends and receives as well. There every unit is a micro-batch of its own, and
a gradient reduction has no unit. Torch itself is not needed.
"""

from __future__ import annotations

import csv
import io
import re
from typing import Literal

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import COMPUTE_KINDS, Action, Kind
from sppo_hf.schedule.schedule import Schedule

TorchFormat = Literal["compute_only", "compute_comms"]

_TRANSFERS: frozenset[Kind] = frozenset({"SEND_F", "RECV_F", "SEND_B", "RECV_B"})
_REDUCTION = re.compile(r"([0-9]+)REDUCE_GRAD", re.ASCII)
# What torch's own lowering adds: gathering and freeing of sharded parameters around a stage, and
# (from 2.15 on) places at which sends and reductions have to have ended.
_ADDED = re.compile(r"[0-9]+(UNSHARD|RESHARD|WAIT_REDUCE_GRAD|WAIT_SEND_[FB][0-9]+)", re.ASCII)


def to_torch_csv(
    schedule: Schedule, format: TorchFormat = "compute_only", *, waits: bool = False
) -> str:
    """Writes a schedule as CSV.

    Args:
        schedule: what is not in the format (copies to the host and back, say) is left out.
        format: "compute_only", or "compute_comms" for one with sends and receives.
        waits: whether to write where sends and reductions must have ended, which torch asks for in
            "compute_comms" from 2.15 on and has no word for before: a reduction before what comes
            after it, sends at the end, when every receiver has got as far.

    Raises:
        ScheduleError: sends are asked for and there are none between several ranks; or an action is
            one layer's, which torch has no word for.
    """
    kinds = COMPUTE_KINDS
    if format == "compute_comms":
        kinds |= _TRANSFERS | {"REDUCE_GRAD"}
        sent = any(action.kind in _TRANSFERS for rank in schedule.ranks for action in rank)
        if schedule.num_ranks > 1 and not sent:
            raise ScheduleError(
                "This schedule has no sends, and 'compute_comms' is a format with them. Remedy: "
                "lower it with add_transfers, or write it as 'compute_only'."
            )
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for rank in schedule.ranks:
        cells: list[str] = []
        sends: list[str] = []
        for action in rank:
            if action.kind in kinds:
                cells.append(_cell(action))
                if waits and action.kind == "REDUCE_GRAD":
                    cells.append(f"{action.stage}WAIT_REDUCE_GRAD")
                elif waits and action.kind in ("SEND_F", "SEND_B"):
                    sends.append(f"{action.stage}WAIT_{action.kind}{action.unit}")
        writer.writerow([*cells, *sends])
    return out.getvalue()


def from_torch_csv(text: str, *, num_chunks: int = 1) -> Schedule:
    """Reads a schedule from CSV.

    Empty cells (idle steps), gathering and freeing of sharded parameters, and waits for the end of
    a send or a reduction are left out. A reduction gets the unit of the last backward of its stage
    before it.

    Args:
        text: the CSV's contents.
        num_chunks: chunks of a micro-batch, which the CSV does not know.

    Raises:
        ScheduleError: a cell is no action, such as an overlapped pair; it is named by rank and
            step.
    """
    ranks: list[tuple[Action, ...]] = []
    for rank, row in enumerate(csv.reader(io.StringIO(text))):
        actions: list[Action] = []
        for step, cell in enumerate(cell.strip() for cell in row):
            if cell and not _ADDED.fullmatch(cell):
                try:
                    actions.append(_action(cell, actions))
                except ScheduleError as error:
                    raise ScheduleError(f"Rank {rank}, step {step} of the CSV: {error}") from error
        ranks.append(tuple(actions))
    return Schedule(tuple(ranks), num_chunks)


def _cell(action: Action) -> str:
    if action.layer is not None or action.part is not None:
        raise ScheduleError(
            f"{action} is one layer's or one part's. Allowed in torch's CSV: actions on a whole "
            "stage and unit, such as 2F5."
        )
    return f"{action.stage}REDUCE_GRAD" if action.kind == "REDUCE_GRAD" else str(action)


def _action(cell: str, before: list[Action]) -> Action:
    match = _REDUCTION.fullmatch(cell)
    if match is None:
        return Action.parse(cell)
    stage = int(match[1])
    units = (a.unit for a in reversed(before) if a.stage == stage and a.kind in ("B", "W"))
    return Action("REDUCE_GRAD", stage, next(units, 0))
