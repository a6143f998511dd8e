"""Bytes of keys, values and their gradient sums that a unit brings to the device and sends away.

The one place that knows which part of the prefix travels; the simulator and the linear programme
both ask it. Where K/V stay on the device, nothing travels. Knows nothing of seconds or lanes.
"""

from __future__ import annotations

from bisect import bisect_right

from sppo_hf.planning.cost import StageCost
from sppo_hf.planning.decisions import Decisions


class KVStreams:
    """Traffic of one batch shape's keys and values, unit by unit."""

    def __init__(self, decisions: Decisions, cost: StageCost) -> None:
        """Prepare for `decisions`; its modes are not looked at."""
        self._cost = cost
        self._bounds = decisions.bounds
        self._starts = [start for start, _ in decisions.bounds]
        self.active = decisions.kv_tier != "device"
        """Whether anything travels."""

    def forward_in(self, layer: int, chunk: int) -> int:
        """The prefix's K/V, which the chunk's queries attend to beside their own."""
        return self._cost.kv_bytes(layer, self._prefix(layer, chunk)) if self.active else 0

    def forward_out(self, layer: int, chunk: int) -> int:
        """The chunk's own K/V."""
        start, end = self._bounds[chunk]
        return self._cost.kv_bytes(layer, end - start) if self.active else 0

    def backward_in(self, layer: int, chunk: int) -> int:
        """K/V of the prefix and of the chunk; their sums too, once a later chunk has written."""
        if not self.active:
            return 0
        start, end = self._bounds[chunk]
        tokens = self._prefix(layer, chunk) + end - start
        written = tokens if chunk < len(self._bounds) - 1 else 0
        return self._cost.kv_bytes(layer, tokens) + self._cost.dkv_bytes(layer, written)

    def backward_out(self, layer: int, chunk: int) -> int:
        """The prefix's gradient sums; the chunk's own are complete and used at once."""
        return self._cost.dkv_bytes(layer, self._prefix(layer, chunk)) if self.active else 0

    def _prefix(self, layer: int, chunk: int) -> int:
        """Tokens before the chunk that its queries see, in whole chunks."""
        start, _ = self._bounds[chunk]
        window = self._cost.shape.layers[layer].window
        if window is None or window > start:
            return start
        # The chunk's first query sees `window - 1` keys before its own.
        return start - self._starts[bisect_right(self._starts, start - window + 1) - 1]
