"""PipelineCost: seconds and bytes of every action of a schedule over ranks, for a real model.

`sppo_hf.schedule.pipeline` asks it. All figures come from StageCost and from the terms of the
memory estimate, so a pipeline of one rank and the planner agree. Knows nothing of how a schedule
was made.

[Note: K/V that wait on the host] Blocks of the prefix pass beside the attention that they are for,
so a unit takes as long as its compute or as what it streams each way, whichever is longest. Frames
share these links. Their copies are charged with what units stream in the same direction, so that no
more passes over a link than it carries: of its own forward for a copy out and of its own backward
for a copy back, and of both where forwards and backwards take turns.
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
from sppo_hf.planning.portions import kv_block_tokens, loss_tile_tokens
from sppo_hf.planning.stages import StageWeights, balanced_stages
from sppo_hf.planning.streams import KVStreams
from sppo_hf.schedule.actions import Action, Kind
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import Change

OffloadRule = Literal["none", "full", "sppo"]
"""What of each frame leaves the device: nothing, all of it, or the paper's share."""

KVTier = Literal["device", "host"]
"""Where keys and values, and their gradient sums, wait between their uses."""


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

    kv_tier: KVTier = "device"
    """Where K/V wait."""

    takes_turns: bool = False
    """Whether a rank's forwards and backwards take turns, as they do with several micro-batches."""

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
        kv_tier: KVTier = "device",
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
            kv_tier=kv_tier,
            takes_turns=schedule.num_units > schedule.num_chunks,
            link_bytes_per_second=link_bytes_per_second,
        )
        return replace(made, ratios=made._ratios_of(offload))

    def leaves(self, stage: int, unit: int) -> bool:
        """Returns whether anything of a frame leaves the device."""
        return bool(self.ratios) and self.ratios[stage][unit % len(self.bounds)] > 0

    def seconds(self, action: Action) -> float:
        """Returns how long an action takes."""
        # Copies differ between like stages where their ratios do.
        stage = action.stage if action.kind in ("D", "H") else self._alike[action.stage]
        key = (action.kind, stage, action.unit % len(self.bounds))
        if key not in self._seconds:
            self._seconds[key] = self._timed(*key)
        return self._seconds[key]

    def changes(self, action: Action) -> tuple[Change, ...]:
        """Returns the bytes that an action takes and gives back, on "R.device" and "R.host".

        A send takes and gives back the receiver's buffer too; where neighbouring stages are on
        different ranks, the schedule must have its sends.
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
        tokens = self._tokens(chunk)
        return sum(
            self.cost.frame_bytes(i, tokens, self.saved) for i in self._of(self._alike[stage])
        )

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
            size = self._leaving_bytes(stage, chunk) + self._beside("D", stage, chunk)
            return self.cost.d2h_seconds(size, both=True)
        if kind == "H":
            size = self._leaving_bytes(stage, chunk) + self._beside("H", stage, chunk)
            return self.cost.h2d_seconds(size, both=True)
        if kind == "F":
            return max(self._forward_seconds(stage, chunk), self._stream_seconds("F", stage, chunk))
        if kind == "W":
            return self._weight_seconds(stage, chunk)
        if kind in ("B", "I"):
            seconds = self._backward_seconds(stage, chunk)
            seconds -= self._weight_seconds(stage, chunk) if kind == "I" else 0.0
            return max(seconds, self._stream_seconds("B", stage, chunk))
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

    def _weight_seconds(self, stage: int, chunk: int) -> float:
        return sum(self.cost.weight_seconds(i, self._tokens(chunk)) for i in self._of(stage))

    def _stream_seconds(self, kind: Kind, stage: int, chunk: int) -> float:
        """How long the links are busy with K/V and their gradient sums of a unit."""
        come, leave = self._streamed_bytes(kind, stage, chunk)
        return max(self.cost.h2d_seconds(come, both=True), self.cost.d2h_seconds(leave, both=True))

    def _streamed_bytes(self, kind: Kind, stage: int, chunk: int) -> tuple[int, int]:
        """K/V and gradient sums of a unit that come to the device, and that leave it."""
        streams, layers = self._streams, self._of(stage)
        if not streams.active:
            return 0, 0
        if kind == "F":
            come, leave = streams.forward_in, streams.forward_out
        else:
            come, leave = streams.backward_in, streams.backward_out
        return sum(come(i, chunk) for i in layers), sum(leave(i, chunk) for i in layers)

    def _beside(self, kind: Kind, stage: int, chunk: int) -> int:
        """Bytes of K/V that a frame's copy shares its link with; see the note on K/V."""
        out = kind == "D"
        forward, backward = (self._streamed_bytes(unit, stage, chunk)[out] for unit in ("F", "B"))
        if self.takes_turns:
            return forward + backward
        return forward if out else backward

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
        by_kind: dict[int, tuple[float, ...]] = {}
        for stage in sorted(set(self._alike)):
            room = sum(self._forward_seconds(stage, chunk) for chunk in chunks)
            room /= self.cost.d2h_seconds(1.0, both=True)
            # What K/V leave of the link while forwards run.
            room -= sum(self._streamed_bytes("F", stage, chunk)[1] for chunk in chunks)
            sizes = [self.frame_bytes(stage, chunk) for chunk in chunks]
            by_kind[stage] = sppo_ratios(sizes, max(0.0, room) / len(chunks))
        return tuple(by_kind[stage] for stage in self._alike)

    def _changed(self, kind: Kind, stage: int, chunk: int) -> Iterator[Change]:
        device = f"{self.stage_ranks[stage]}.device"
        host = f"{self.stage_ranks[stage]}.host"
        cause = CAUSES[self.saved]
        if kind == "F":
            yield Change(device, cause, self.frame_bytes(stage, chunk))
            yield from self._passing(device, stage, chunk, "forward")
        elif kind in ("B", "I"):
            yield from self._passing(device, stage, chunk, "start of backward")
        if kind in ("F", "B", "I"):
            yield from self._kv_changed(kind, stage, chunk)
        yield from self._transferred(kind, stage, chunk)
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

    def _kv_changed(self, kind: Kind, stage: int, chunk: int) -> Iterator[Change]:
        """K/V and their gradient sums, where they wait and while they pass the device."""
        device, waits = (f"{self.stage_ranks[stage]}.{t}" for t in ("device", self.kv_tier))
        start, end = self.bounds[chunk]
        layers = self._of(self._alike[stage])
        own = sum(self.cost.kv_bytes(i, end - start) for i in layers)
        if self.kv_tier != "device":
            passing = self._memory.stream_bytes(chunk, backward=kind != "F")
            for cause, size in zip(("kv", "dkv"), passing, strict=True):
                yield Change(device, cause, size)
                yield Change(device, cause, -size, "end")
        if kind == "F":
            yield Change(waits, "kv", own)
            return
        if chunk == len(self.bounds) - 1:
            # The first chunk to run back writes the gradient sums of all chunks before it.
            yield Change(waits, "dkv", sum(self.cost.dkv_bytes(i, start) for i in layers))
        else:
            sums = sum(self.cost.dkv_bytes(i, end - start) for i in layers)
            yield Change(waits, "dkv", -sums, "end")
        yield Change(waits, "kv", -own, "end")

    def _transferred(self, kind: Kind, stage: int, chunk: int) -> Iterator[Change]:
        """Buffers of what passes between ranks: one till it is sent, the other till it is used.

        What a forward received becomes part of its frame; what a backward received ends with it.
        """
        cause, size = "messages", self.message_bytes(chunk)
        back = kind in ("B", "I", "SEND_B")
        target, source = (stage - 1, stage + 1) if back else (stage + 1, stage - 1)
        here = f"{self.stage_ranks[stage]}.device"
        if kind in ("SEND_F", "SEND_B"):
            yield Change(f"{self.stage_ranks[target]}.device", cause, size)
            yield Change(here, cause, -size, "end")
        elif kind in ("F", "B", "I"):
            if self._other_rank(stage, source):
                yield Change(here, cause, -size, "end" if back else "start")
            if self._other_rank(stage, target):
                yield Change(here, cause, size, "end")

    def _other_rank(self, stage: int, other: int) -> bool:
        inside = 0 <= other < len(self.stages)
        return inside and self.stage_ranks[stage] != self.stage_ranks[other]

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
    def _alike(self) -> tuple[int, ...]:
        """For each stage the first one that costs and saves the same."""
        kinds, last = self.cost.shape.alike, len(self.stages) - 1
        first: dict[object, int] = {}
        return tuple(
            first.setdefault((tuple(kinds[i] for i in layers), stage == last), stage)
            for stage, layers in enumerate(self.stages)
        )

    @cached_property
    def _decisions(self) -> Decisions:
        shape, kind = self.cost.shape, self.cost.profile.kind
        mode = mode_of(self.saved, "device")
        block = 0
        if self.kv_tier != "device":
            block = kv_block_tokens(
                shape,
                self.bounds[-1][1],
                batch_rows=self.cost.batch_rows,
                device_kind=kind,
                device_bytes=self.cost.profile.device_bytes,
            )
        return Decisions(
            batch_rows=self.cost.batch_rows,
            bounds=self.bounds,
            layer_modes=uniform_modes(len(self.bounds), shape.num_layers, mode),
            training=True,
            tile_tokens=loss_tile_tokens(shape, device_kind=kind),
            kv_tier=self.kv_tier,
            kv_block_tokens=block,
        )

    @cached_property
    def _memory(self) -> MemoryModel:
        return MemoryModel(self.cost.shape, self._decisions, self.cost.profile.kind)

    @cached_property
    def _streams(self) -> KVStreams:
        return KVStreams(self._decisions, self.cost)
