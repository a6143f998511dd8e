"""Causes: the uses of a plan's bytes, each with its name and colour.

The estimate, the simulator's curves, tables, figures and JSON all use these.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from sppo_hf.planning.activation_modes import Saved


class Cause(StrEnum):
    """A cause of bytes. Its value is its key in JSON and its name in a simulation's changes.

    Ordered as in tables and figures: bytes held through a step come before temporary ones.
    """

    label: str
    """Name in tables."""

    meaning: str
    """Explanation beside the name; "" if the name is enough."""

    colour: str
    """Fill colour in pictures; "" for the colour of its tier, see `paleness`."""

    paleness: float
    """Share of white mixed into its tier's colour."""

    def __new__(
        cls, value: str, label: str, meaning: str, colour: str = "", paleness: float = 0.0
    ) -> Cause:
        """Make a member from its key and attributes."""
        cause = str.__new__(cls, value)
        cause._value_ = value
        cause.label, cause.meaning = label, meaning
        cause.colour, cause.paleness = colour, paleness
        return cause

    WEIGHTS = "weights", "weights", "", "#6E6E6E"
    LORA = "lora", "adapters", "", "#858585"
    GRADIENTS = "gradients", "gradients", "", "#999999"
    OPTIMIZER = "optimizer", "optimizer", "AdamW's, in float32, where it is not known", "#C4C4C4"
    KV = "kv", "K/V", "", "#009E73"
    DKV = "dkv", "dK/dV", "float32 accumulators", "#7FCEB9"
    FRAMES = "frames", "activations", "all that backward needs of a layer"
    PRODUCTS = "products", "matrix products", "with layer inputs and attention outputs", "", 0.4
    INPUTS = "skeletons", "layer inputs", "and attention outputs, to recompute the rest", "", 0.7
    HIDDEN = "hidden", "hidden states", "at the final norm and the loss, embeddings", "#56B4E9"
    GRAPH = "graph", "graph", "autograd's nodes, where host memory is the device's", "#8C6BB1"
    MESSAGES = "messages", "messages", "between stages, sent or received", "#B5B5B5"
    LOGITS_TILE = "logits_tile", "logits", "of one tile of the loss", "#D55E00"
    WORKSPACE = "workspace", "temporaries", "of the running layer", "#F0E442"
    COPIES = "copies", "copies", "on their way between tiers", "#B87D00"
    SLABS = "slabs", "slabs", "unused rest of host memory taken in slabs", "#F2D9B0"
    RESERVE = "reserve", "reserve", "device context, fragmentation", "#E5E5E5"


CAUSE_OF_SAVED: dict[Saved, Cause] = {
    "whole": Cause.FRAMES,
    "matmuls": Cause.PRODUCTS,
    "inputs": Cause.INPUTS,
    "hidden": Cause.INPUTS,
}
"""Cause of a layer's saved activations, by how much is saved."""


class MemoryBreakdown(dict[Cause, int]):
    """Bytes on one tier, by cause; 0 for a missing cause."""

    def __missing__(self, cause: Cause) -> int:
        return 0

    @property
    def total(self) -> int:
        """Sum over all causes."""
        return sum(self.values())

    @property
    def held(self) -> int:
        """Bytes held for backward, without copies in flight and unused parts of slabs."""
        return self.total - self[Cause.COPIES] - self[Cause.SLABS]

    def shown(self) -> Iterator[tuple[Cause, int]]:
        """Yields (cause, bytes) of all causes with bytes, in the order of `Cause`."""
        return ((cause, self[cause]) for cause in Cause if self[cause])
