"""The schedule of a pipeline's step, with all sends, receives and copies of its ranks."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError
from sppo_hf.schedule.actions import Action, Kind
from sppo_hf.schedule.generate import Size, generate
from sppo_hf.schedule.lower import add_kv_copies, add_transfers, lower
from sppo_hf.schedule.messages import ChunkRun, Message, chunk_runs, messages
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.validate import validate

Copies = frozenset[tuple[Kind, int, int, int | None]]
"""Copies beside the units of some stages: (kind, stage, chunk, part). "D" of offloaded activations,
"S" of those behind the host, and those of K/V (with a part), as `add_kv_copies` takes them."""


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """A lowered and validated schedule."""

    name: str
    schedule: Schedule
    """The actions of all ranks, with sends, receives and copies."""
    splits_backward: bool
    """Whether backward is split into input gradients and weight gradients."""
    size: Size
    messages: dict[Action, Message]
    """All messages by their send."""
    runs: dict[tuple[int, int], ChunkRun]
    """Run of chunks that each (stage, chunk) belongs to."""
    offloaded_units: frozenset[tuple[int, int]] = frozenset()
    """(stage, unit) whose activations an action of the schedule offloads."""


def check_size(name: str, size: Size) -> None:
    """Check that a step has enough units for its schedule.

    Raises:
        ConfigError: There are too few; the message has the numbers and a remedy.
    """
    if size.num_virtual > 1 and size.num_units < size.num_ranks:
        raise ConfigError(
            f"pp_schedule={name!r} with pp_virtual_stages={size.num_virtual} passes groups of at "
            f"least pp_size={size.num_ranks} units through a rank's stages, but this batch has "
            f"{size.num_micro_batches} micro-batches of {size.num_chunks} chunks, "
            f"{size.num_units} units. Allowed: micro-batches x chunks >= pp_size. Remedy: a larger "
            "per-device batch, more chunks (num_chunks, chunk_tokens), or pp_virtual_stages=1."
        )


def step_schedule(
    config: SPPOConfig,
    name: str,
    micro_batches: int,
    chunks: int,
    *,
    forward_only: bool = False,
    reduce: bool = False,
    copies: Copies = frozenset(),
) -> StepSchedule:
    """Return the schedule of a step, made at the first call with these arguments.

    `copies` of other ranks may be left out, as this rank does not run their actions.
    """
    size = Size(config.pp_size, micro_batches, chunks, config.pp_virtual_stages)
    return _make_schedule(name, size, forward_only, reduce, copies)


@functools.lru_cache(maxsize=64)
def _make_schedule(
    name: str, size: Size, forward_only: bool, reduce: bool, copies: Copies
) -> StepSchedule:
    made, chunks = generate(name, size), size.num_chunks
    if forward_only:
        forwards = made.keep(lambda action: action.kind == "F")
        lowered = add_transfers(add_kv_copies(forwards, copies))
    else:
        lowered = lower(
            made,
            offloaded=lambda stage, unit: ("D", stage, unit % chunks, None) in copies,
            stored=lambda stage, unit: ("S", stage, unit % chunks, None) in copies,
            kv_copies=copies,
            reduce=reduce,
        )
    validate(lowered)  # once for each size; nothing wrong is ever run
    actions = [action for rank in lowered.ranks for action in rank]
    return StepSchedule(
        name,
        lowered,
        splits_backward=any(action.kind == "W" for action in actions),
        size=size,
        messages=messages(lowered),
        runs=chunk_runs(lowered),
        offloaded_units=frozenset((a.stage, a.unit) for a in actions if a.kind == "D"),
    )
