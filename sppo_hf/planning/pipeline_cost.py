"""PipelineCost: seconds and bytes of every action of a schedule over ranks, for a real model.

`sppo_hf.schedule.pipeline` asks it. All figures come from StageCost and from the terms of the
memory estimate, so a pipeline of one rank and the planner agree. K/V stay on the device. Knows
nothing of how a schedule was made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from sppo_hf.planning.cost import StageCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.memory import CAUSES, CONTEXT_BYTES, MemoryModel
from sppo_hf.planning.modes import Saved, mode_of
from sppo_hf.planning.partition import Bounds
from sppo_hf.planning.policies import uniform_modes
from sppo_hf.planning.policy import sppo_ratios
from sppo_hf.planning.portions import loss_tile_tokens
from sppo_hf.planning.stages import StageWeights, balanced_stages
from sppo_hf.schedule.actions import Action, Kind
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import Change

OffloadRule = Literal["none", "full", "sppo"]
"""What of each frame leaves the device: nothing, all of it, or the paper's share."""


# No slots: a cached property needs the instance's dictionary.
@dataclass(frozen=True, kw_only=True)
class PipelineCost:
    """Costs of all stages of a model, one sequence of `bounds` per micro-batch and row."""

    cost: StageCost
    """Of one layer on one device; its rows are those of a micro-batch."""

    bounds: Bounds
    """The chunks of a sequence."""

    stages: tuple[range, ...]
    """Layers of each stage."""

    stage_ranks: tuple[int, ...]
    """The rank of each stage."""

    saved: Saved = "whole"
    """What is kept of frames; the rest is recomputed."""

    ratios: tuple[tuple[float, ...], ...] = ()
    """Share of a frame that leaves, by stage and chunk; empty where none does."""

    link_bytes_per_second: float = float("inf")
    """Between neighbouring ranks, each way."""

    reduce_seconds: float = 0.0
    """Reduction of a stage's gradients over replicas of the pipeline."""

    _seconds: dict[tuple[Kind, int, int], float] = field(
        default_factory=dict[tuple[Kind, int, int], float], init=False, repr=False, compare=False
    )
    _changes: dict[tuple[Kind, int, int], tuple[Change, ...]] = field(
        default_factory=dict[tuple[Kind, int, int], tuple[Change, ...]],
        init=False,
        repr=False,
        compare=False,
    )

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        cost: StageCost,
        bounds: Bounds,
        *,
        saved: Saved = "whole",
        offload: OffloadRule = "none",
        link_bytes_per_second: float = float("inf"),
    ) -> PipelineCost:
        """Cuts the model into the schedule's stages, balanced, and applies a rule to its frames.

        Raises:
            ConfigError: the schedule has more stages than the model has layers.
        """
        assert schedule.num_chunks == len(bounds), "a unit is a chunk of a micro-batch"
        made = cls(
            cost=cost,
            bounds=bounds,
            stages=balanced_stages(cost, bounds, schedule.num_stages),
            stage_ranks=schedule.stage_ranks,
            saved=saved,
            link_bytes_per_second=link_bytes_per_second,
        )
        return replace(made, ratios=made._ratios_of(offload))

    def leaves(self, stage: int, unit: int) -> bool:
        """Returns whether anything of a frame leaves the device."""
        return bool(self.ratios) and self.ratios[stage][unit % len(self.bounds)] > 0

    def seconds(self, action: Action) -> float:
        """Returns how long an action takes."""
        chunk = action.unit % len(self.bounds)
        key = (action.kind, action.stage, chunk)
        if key not in self._seconds:
            self._seconds[key] = self._timed(*key)
        return self._seconds[key]

    def changes(self, action: Action) -> tuple[Change, ...]:
        """Returns the bytes that an action takes and gives back, on "R.device" and "R.host".

        Buffers of transfers are not counted: a chunk's hidden states, against a frame of many.
        """
        key = (action.kind, action.stage, action.unit % len(self.bounds))
        if key not in self._changes:
            self._changes[key] = tuple(self._changed(*key))
        return self._changes[key]

    def standing(self) -> Iterator[Change]:
        """Yields what every rank holds all through the step."""
        for rank in sorted(set(self.stage_ranks)):
            device = f"{rank}.device"
            yield Change(device, "reserve", CONTEXT_BYTES[self.cost.profile.kind])
        for stage, rank in enumerate(self.stage_ranks):
            held = StageWeights.of(self.cost.shape, self.stages[stage])
            yield Change(f"{rank}.device", "weights", held.weights)
            yield Change(f"{rank}.device", "gradients", held.gradients)
            yield Change(f"{rank}.device", "optimizer", held.optimizer)

    def frame_bytes(self, stage: int, chunk: int) -> int:
        """Returns what is saved of a chunk in all layers of a stage."""
        start, end = self.bounds[chunk]
        return sum(self.cost.frame_bytes(i, end - start, self.saved) for i in self.stages[stage])

    def message_bytes(self, chunk: int) -> int:
        """Returns the bytes that pass between stages for a chunk, each way."""
        start, end = self.bounds[chunk]
        shape = self.cost.shape
        size = shape.parameter_bytes or shape.dtype_bytes
        return self.cost.batch_rows * (end - start) * shape.hidden_size * size

    # -- seconds -------------------------------------------------------------------------------

    def _timed(self, kind: Kind, stage: int, chunk: int) -> float:
        if kind in ("SEND_F", "SEND_B"):
            return self.message_bytes(chunk) / self.link_bytes_per_second
        if kind == "REDUCE_GRAD":
            return self.reduce_seconds
        if kind == "D":
            return self.cost.d2h_seconds(self._leaving_bytes(stage, chunk), both=True)
        if kind == "H":
            return self.cost.h2d_seconds(self._leaving_bytes(stage, chunk), both=True)
        if kind == "F":
            return self._forward_seconds(stage, chunk)
        if kind in ("B", "I", "W"):
            weights = sum(self.cost.weight_seconds(i, self._tokens(chunk)) for i in self._of(stage))
            if kind == "W":
                return weights
            return self._backward_seconds(stage, chunk) - (weights if kind == "I" else 0.0)
        return 0.0

    def _forward_seconds(self, stage: int, chunk: int) -> float:
        seconds = sum(self.cost.forward_seconds(i, *self.bounds[chunk]) for i in self._of(stage))
        if stage == len(self.stages) - 1:
            seconds += self.cost.head_seconds(self._tokens(chunk))
        return seconds

    def _backward_seconds(self, stage: int, chunk: int) -> float:
        cost, tokens = self.cost, self._tokens(chunk)
        return sum(
            cost.backward_seconds(i, *self.bounds[chunk])
            + cost.recompute_seconds(i, tokens, self.saved)
            for i in self._of(stage)
        )

    def _of(self, stage: int) -> range:
        return self.stages[stage]

    def _tokens(self, chunk: int) -> int:
        start, end = self.bounds[chunk]
        return end - start

    # -- bytes ---------------------------------------------------------------------------------

    def _ratios_of(self, offload: OffloadRule) -> tuple[tuple[float, ...], ...]:
        if offload == "none":
            return ()
        chunks = range(len(self.bounds))
        if offload == "full":
            return ((1.0,) * len(chunks),) * len(self.stages)
        return tuple(
            sppo_ratios(
                [self.frame_bytes(stage, chunk) for chunk in chunks],
                sum(self._forward_seconds(stage, chunk) for chunk in chunks)
                / len(chunks)
                / self.cost.d2h_seconds(1.0, both=True),
            )
            for stage in range(len(self.stages))
        )

    def _changed(self, kind: Kind, stage: int, chunk: int) -> Iterator[Change]:
        device = f"{self.stage_ranks[stage]}.device"
        host = f"{self.stage_ranks[stage]}.host"
        start, end = self.bounds[chunk]
        cause = CAUSES[self.saved]
        if kind == "F":
            yield Change(device, cause, self.frame_bytes(stage, chunk))
            yield Change(device, "kv", self._kv_bytes(stage, end - start))
            yield from self._passing(device, stage, chunk, "forward")
        elif kind in ("B", "I"):
            yield from self._passing(device, stage, chunk, "start of backward")
            if chunk == len(self.bounds) - 1:
                # The first chunk to run back writes the gradient sums of all chunks before it.
                yield Change(device, "dkv", self._dkv_bytes(stage, start))
            else:
                yield Change(device, "dkv", -self._dkv_bytes(stage, end - start), "end")
            yield Change(device, "kv", -self._kv_bytes(stage, end - start), "end")
        if kind in ("B", "W"):
            yield Change(device, cause, -self.frame_bytes(stage, chunk), "end")
        if kind == "D":
            size = self._leaving_bytes(stage, chunk)
            yield Change(host, cause, size)
            yield Change(device, cause, -size, "end")
        if kind == "H":
            size = self._leaving_bytes(stage, chunk)
            yield Change(device, cause, size)
            yield Change(host, cause, -size, "end")

    def _leaving_bytes(self, stage: int, chunk: int) -> int:
        return round(self.ratios[stage][chunk] * self.frame_bytes(stage, chunk))

    def _kv_bytes(self, stage: int, tokens: int) -> int:
        return sum(self.cost.kv_bytes(i, tokens) for i in self._of(stage))

    def _dkv_bytes(self, stage: int, tokens: int) -> int:
        return sum(self.cost.dkv_bytes(i, tokens) for i in self._of(stage))

    def _passing(self, device: str, stage: int, chunk: int, phase: str) -> Iterator[Change]:
        """Temporaries of the running layer and, on the last stage, of the loss."""
        memory = self._memory
        mode = mode_of(self.saved, "device")
        sizes = {"workspace": memory.workspace_bytes(chunk, phase, frozenset({mode}))}
        if stage == len(self.stages) - 1 and phase == "forward":
            # Layers and loss do not run at once.
            sizes["logits_tile"] = max(0, memory.logits_bytes(chunk) - sizes["workspace"])
        for cause, size in sizes.items():
            yield Change(device, cause, size)
            yield Change(device, cause, -size, "end")

    @cached_property
    def _memory(self) -> MemoryModel:
        shape, kind = self.cost.shape, self.cost.profile.kind
        mode = mode_of(self.saved, "device")
        decisions = Decisions(
            batch_rows=self.cost.batch_rows,
            bounds=self.bounds,
            layer_modes=uniform_modes(len(self.bounds), shape.num_layers, mode),
            training=True,
            tile_tokens=loss_tile_tokens(shape, device_kind=kind),
        )
        return MemoryModel(shape, decisions, kind)
