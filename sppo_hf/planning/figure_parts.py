"""What the picture of a plan shows beside bars, before anything is drawn: modes, stacked bytes.

Knows a Timeline and modes; knows nothing of matplotlib. Colours are those of `schedule.bars`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from sppo_hf.planning.modes import FrameMode, Saved
from sppo_hf.schedule.bars import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, YELLOW, mixed
from sppo_hf.schedule.timeline import Timeline

_TIER_COLOURS = {"device": BLUE, "host": ORANGE, "disk": PURPLE}
_PALENESS: dict[Saved, float] = {"whole": 0.0, "products": 0.4, "skeleton": 0.7}
# From what lasts to what passes, so that the bottom of the stack lies still. A number is how much
# paler than its tier's colour.
_CAUSES: dict[str, tuple[str, str | float]] = {
    "weights": ("weights", "#6E6E6E"),
    "gradients": ("gradients", GREY),
    "optimizer": ("optimizer", "#C4C4C4"),
    "kv": ("K/V", GREEN),
    "dkv": ("dK/dV", "#7FCEB9"),
    "skeletons": ("skeletons", 0.7),
    "frames": ("frames", 0.0),
    "logits_tile": ("logits", RED),
    "chunk_workspace": ("live chunk", YELLOW),
}
_PALENESS_OF_OTHERS = (0.5, 0.8, 0.25, 0.65)


def mode_colour(mode: FrameMode) -> str:
    """Returns the tier's colour, paler the less of the frame is saved."""
    return mixed(_TIER_COLOURS[mode.tier], _PALENESS[mode.saved])


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
    tier_colour = _TIER_COLOURS.get(tier.rpartition(".")[2], BLUE)
    known = [cause for cause in _CAUSES if cause in curves]
    others = sorted(cause for cause in curves if cause not in _CAUSES)
    layers: list[Layer] = []
    for cause in known + others:
        times = [seconds for seconds, _ in curves[cause]]
        held_bytes = [curves[cause][bisect_right(times, at) - 1][1] for at in instants]
        if cause in _CAUSES:
            name, colour = _CAUSES[cause]
        else:
            name = cause.replace("_", " ")
            colour = _PALENESS_OF_OTHERS[others.index(cause) % len(_PALENESS_OF_OTHERS)]
        fill = colour if isinstance(colour, str) else mixed(tier_colour, colour)
        layers.append(Layer(name, fill, held_bytes))
    return layers
