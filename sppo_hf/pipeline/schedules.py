"""The schedule of a step, lowered, and made once for each size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError
from sppo_hf.schedule.generate import Size, generate
from sppo_hf.schedule.lower import Stream, add_streams, add_transfers, lower
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.validate import validate


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """A schedule, ready to be carried out."""

    name: str
    schedule: Schedule
    """With sends and receives."""
    splits: bool
    """Whether backward comes in two halves."""
    reduces: bool
    """Whether gradients are reduced over replicas."""
    virtual: int
    """Stages of each rank."""
    sent: frozenset[tuple[int, int]] = frozenset()
    """The (stage, unit) that an action sends away."""


def step_schedule(
    config: SPPOConfig,
    name: str,
    micro_batches: int,
    chunks: int,
    *,
    forward_only: bool,
    reduce: bool,
    leaves: frozenset[tuple[int, int]] = frozenset(),
    stores: frozenset[tuple[int, int]] = frozenset(),
    streams: frozenset[Stream] = frozenset(),
) -> StepSchedule:
    """Make (or find) the schedule of a step.

    Args:
        config: Ranks, stages per rank.
        name: Of the schedule.
        micro_batches: Of the batch.
        chunks: Of each.
        forward_only: Whether nothing is run backward.
        reduce: Whether gradients are reduced over replicas.
        leaves: The (stage, chunk) of which anything leaves the device. A rank may leave out those
            of others, whose lists it does not run.
        stores: Those of which anything goes on to a tier behind the host.
        streams: What keys and values do beside units; see `add_streams`.
    """
    size = Size(config.pp_size, micro_batches, chunks, config.pp_virtual_stages)
    return _make(name, size, forward_only, reduce, leaves, stores, streams)


def check_size(name: str, size: Size) -> None:
    """Refuse schedules over fewer units than they need to be what they are.

    Raises:
        ConfigError: Naming the numbers and the remedy.
    """
    if size.num_virtual > 1 and size.num_units < size.num_ranks:
        raise ConfigError(
            f"pp_schedule={name!r} with pp_virtual_stages={size.num_virtual} passes groups of at "
            f"least pp_size={size.num_ranks} units through a rank's stages, but this batch has "
            f"{size.num_micro_batches} micro-batches of {size.num_chunks} chunks, "
            f"{size.num_units} units. Allowed: micro-batches x chunks >= pp_size. Remedy: a larger "
            "per-device batch, more chunks (num_chunks, chunk_tokens), or pp_virtual_stages=1."
        )


@lru_cache(maxsize=64)
def _make(
    name: str,
    size: Size,
    forward_only: bool,
    reduce: bool,
    leaves: frozenset[tuple[int, int]],
    stores: frozenset[tuple[int, int]],
    streams: frozenset[Stream],
) -> StepSchedule:
    made = generate(name, size)
    if forward_only:
        forwards = made.keep(lambda action: action.kind == "F")
        lowered = add_transfers(add_streams(forwards, streams))
    else:
        chunks = size.num_chunks
        lowered = lower(
            made,
            leaves=lambda stage, unit: (stage, unit % chunks) in leaves,
            stores=lambda stage, unit: (stage, unit % chunks) in stores,
            streams=streams,
            reduce=reduce,
        )
    validate(lowered)  # once for each size; nothing wrong is ever run
    splits = any(action.kind == "W" for rank in lowered.ranks for action in rank)
    return StepSchedule(
        name,
        lowered,
        splits=splits,
        reduces=reduce and not forward_only,
        virtual=size.num_virtual,
        sent=frozenset((a.stage, a.unit) for rank in lowered.ranks for a in rank if a.kind == "D"),
    )
