"""What the picture of a plan shows beside bars, before anything is drawn: modes, stacked bytes.

Knows a Timeline and modes; knows nothing of matplotlib. Colours are those of `schedule.bars`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from sppo_hf.planning.activation_modes import FrameMode
from sppo_hf.planning.causes import OF_SAVED, Cause
from sppo_hf.planning.tiers import TIERS
from sppo_hf.reporting.gantt import mixed
from sppo_hf.schedule.timeline import Timeline


def mode_colour(mode: FrameMode) -> str:
    """Returns the tier's colour, paler the less of the frame is saved."""
    paler = 0.15 * (mode.saved == "hidden")  # than what its bytes are counted with
    return mixed(TIERS[mode.tier].colour, OF_SAVED[mode.saved].paleness + paler)


class Layer(NamedTuple):
    """One cause's part of a stack of bytes over time."""

    name: str
    """The cause, as a person reads it."""

    colour: str
    """What it is filled with."""

    held_bytes: list[int]
    """Its bytes at each instant asked for."""


def stack_causes(timeline: Timeline, tier: str, instants: Sequence[float]) -> list[Layer]:
    """Reads off each cause's bytes at each instant, lowest layer first."""
    curves = timeline.curves_by_cause(tier)
    # Several ranks' tiers are "0.device", "1.device" and so on.
    tier_colour = TIERS[tier.rpartition(".")[2]].colour
    layers: list[Layer] = []
    # What lasts lies below what passes, so that the bottom of the stack lies still.
    for cause in sorted(map(Cause, curves), key=list(Cause).index):
        times = [seconds for seconds, _ in curves[cause]]
        held_bytes = [curves[cause][bisect_right(times, at) - 1][1] for at in instants]
        fill = cause.colour or mixed(tier_colour, cause.paleness)
        layers.append(Layer(cause.label, fill, held_bytes))
    return layers
