"""What each action of a lowered stage takes and gives back, for curves of bytes over time.

The terms are the estimate's; here they come and go action by action instead of chunk by chunk.
Knows nothing of when actions run.
"""

from __future__ import annotations

from collections.abc import Iterator

from sppo_hf.planning.cost import StageCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.memory import CAUSES, MemoryModel
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.simulate import Change


class StageBytes:
    """Changes of one lowered stage."""

    def __init__(self, decisions: Decisions, cost: StageCost, device_kind: str) -> None:
        """Prepare for the actions of `lower(decisions, cost)`."""
        self._what = decisions
        self._cost = cost
        self._memory = MemoryModel(cost.shape, decisions, device_kind)
        self._last = decisions.num_chunks - 1
        after = self._memory.gradient_bytes(0, "end of backward")
        self._written = after - self._memory.gradient_bytes(0, "forward")

    def standing(self) -> Iterator[Change]:
        """Yields what is there before the step and after it."""
        fixed = self._memory.fixed_device(0, "forward", 0, 0, frozenset(), frozenset())
        for cause in ("weights", "lora", "gradients", "optimizer", "reserve"):
            yield Change("device", cause, getattr(fixed, cause))

    def changes(self, action: Action) -> Iterator[Change]:
        """Yields the bytes that an action takes and gives back."""
        chunk, layer = action.unit, action.layer
        assert layer is not None, "a stage is lowered layer by layer"
        if layer == self._what.num_layers:
            yield from self._during("logits_tile", self._memory.logits_bytes(chunk))
        elif action.kind == "F":
            yield from self._forward(chunk, layer)
        elif action.kind == "B":
            yield from self._backward(chunk, layer)
        elif action.part is None:
            yield from self._copy(action.kind, chunk, layer)

    def _forward(self, chunk: int, layer: int) -> Iterator[Change]:
        what = self._what
        mode = what.layer_modes[chunk][layer]
        yield from self._during(
            "workspace", self._memory.workspace_bytes(chunk, "forward", frozenset({mode}))
        )
        start, end = what.bounds[chunk]
        yield Change(what.kv_tier, "kv", self._cost.kv_bytes(layer, end - start), "end")
        if what.training:
            yield Change("device", CAUSES[mode.saved], self._frame(chunk, layer), "end")

    def _backward(self, chunk: int, layer: int) -> Iterator[Change]:
        what, cost = self._what, self._cost
        mode = what.layer_modes[chunk][layer]
        yield from self._during(
            "workspace", self._memory.workspace_bytes(chunk, "backward", frozenset({mode}))
        )
        start, end = what.bounds[chunk]
        tier = what.kv_tier
        if chunk == self._last:
            yield Change("device", "gradients", self._share(layer), "end")
            # The first to go backward writes the gradient sums of all chunks before it.
            yield Change(tier, "dkv", cost.dkv_bytes(layer, start))
        else:
            yield Change(tier, "dkv", -cost.dkv_bytes(layer, end - start), "end")
        yield Change(tier, "kv", -cost.kv_bytes(layer, end - start), "end")
        yield Change("device", CAUSES[mode.saved], -self._frame(chunk, layer), "end")
        if chunk == layer == 0:
            # The step ends; what the optimizer takes is not its affair.
            yield Change("device", "gradients", -self._written, "end")

    def _share(self, layer: int) -> int:
        """A layer's part of the gradients that backward of the last chunk writes first."""
        layers = self._what.num_layers
        return self._written * (layer + 1) // layers - self._written * layer // layers

    def _copy(self, kind: str, chunk: int, layer: int) -> Iterator[Change]:
        mode = self._what.layer_modes[chunk][layer]
        cause, size = CAUSES[mode.saved], self._frame(chunk, layer)
        if kind == "D":
            yield Change("host", cause, size)
            yield Change("device", cause, -size, "end")
        elif kind == "S":
            yield Change("disk", cause, size)
            yield Change("host", cause, -size, "end")
        elif kind == "L":
            yield Change("host", cause, size)
            yield Change("disk", cause, -size, "end")
        elif kind == "H":
            yield Change("device", cause, size)
            yield Change("host", cause, -size, "end")

    def _during(self, cause: str, num_bytes: int) -> Iterator[Change]:
        yield Change("device", cause, num_bytes)
        yield Change("device", cause, -num_bytes, "end")

    def _frame(self, chunk: int, layer: int) -> int:
        saved = self._what.layer_modes[chunk][layer].saved
        return self._memory.frame_bytes(layer, chunk, saved)
