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

import numpy as np
from numpy.typing import NDArray

from sppo_hf.planning.causes import OF_SAVED, Cause
from sppo_hf.planning.cost import StageCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.lowering import Lifetime, kv_lifetimes
from sppo_hf.planning.memory import CONTEXT_BYTES, ByteTables, byte_tables
from sppo_hf.planning.modes import KEEP, SAVED, Saved
from sppo_hf.planning.moments import Bytes
from sppo_hf.planning.partition import Bounds
from sppo_hf.planning.policies import sppo_leaving, uniform_modes
from sppo_hf.planning.portions import kv_block_tokens, loss_tile_tokens
from sppo_hf.planning.stages import StageWeights, balanced_stages
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
        key = (action.kind, action.stage, action.unit % len(self.bounds))
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
            yield Change(device, Cause.RESERVE, CONTEXT_BYTES[self.cost.profile.kind])
        for stage, rank in enumerate(self.stage_ranks):
            held = StageWeights.of(self.cost.shape, self.stages[stage])
            yield Change(f"{rank}.device", Cause.WEIGHTS, held.weights)
            yield Change(f"{rank}.device", Cause.GRADIENTS, held.gradients)
            yield Change(f"{rank}.device", Cause.OPTIMIZER, held.optimizer)

    def frame_bytes(self, stage: int, chunk: int) -> int:
        """Returns what is saved of a chunk in all layers of a stage."""
        return int(self._frames[stage, chunk])

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
        seconds = float(self._compute[kind][stage, chunk]) if kind in self._compute else 0.0
        if kind in ("F", "B", "I"):
            come, leave = self._streamed_bytes("F" if kind == "F" else "B", stage, chunk)
            # How long the links are busy with K/V and their gradient sums of a unit.
            come_seconds = self.cost.h2d_seconds(come, both=True)
            seconds = max(seconds, come_seconds, self.cost.d2h_seconds(leave, both=True))
        return seconds

    @cached_property
    def _compute(self) -> dict[Kind, NDArray[np.float64]]:
        """[stages, chunks] Seconds of each kind's units: those of a stage's layers, added up."""
        work, counts = self.cost.unit_seconds(self.bounds), self._counts
        forward = counts @ work.forward
        forward[-1] += work.head
        backward = counts @ (work.backward + work.recompute[:, SAVED.index(self.saved)])
        weight = counts @ work.weight
        return {"F": forward, "B": backward, "I": backward - weight, "W": weight}

    def _streamed_bytes(self, kind: Kind, stage: int, chunk: int) -> tuple[int, int]:
        """K/V and gradient sums of a unit that come to the device, and that leave it."""
        come, leave = self._streamed[kind]
        return int(come[stage, chunk]), int(leave[stage, chunk])

    @cached_property
    def _streamed(self) -> dict[Kind, tuple[Bytes, Bytes]]:
        tables, counts = self._tables, self._counts
        return {
            "F": (counts @ tables.kv_in_forward, counts @ tables.kv_out_forward),
            "B": (counts @ tables.kv_in_backward, counts @ tables.kv_out_backward),
        }

    def _beside(self, kind: Kind, stage: int, chunk: int) -> int:
        """Bytes of K/V that a frame's copy shares its link with; see the note on K/V."""
        out = kind == "D"
        forward, backward = (self._streamed_bytes(unit, stage, chunk)[out] for unit in ("F", "B"))
        if self.takes_turns:
            return forward + backward
        return forward if out else backward

    # -- bytes ---------------------------------------------------------------------------------

    def _ratios_of(self, offload: OffloadRule) -> tuple[tuple[float, ...], ...]:
        if offload == "none":
            return ()
        if offload == "full":
            return ((1.0,) * len(self.bounds),) * len(self.stages)
        work = self._counts @ self.cost.unit_seconds(self.bounds).forward
        return tuple(
            tuple(
                leaving / len(stage)
                for leaving in sppo_leaving(
                    self.cost, sizes, seconds, members=len(stage), kv_bytes=kv_bytes
                )
            )
            for stage, sizes, seconds, kv_bytes in zip(
                self.stages,
                self._frames.tolist(),
                work.sum(axis=1).tolist(),
                # What K/V leave of the link while forwards run.
                self._streamed["F"][1].sum(axis=1).tolist(),
                strict=True,
            )
        )

    def _changed(self, kind: Kind, stage: int, chunk: int) -> Iterator[Change]:
        device = f"{self.stage_ranks[stage]}.device"
        host = f"{self.stage_ranks[stage]}.host"
        cause = OF_SAVED[self.saved]
        if kind == "F":
            yield Change(device, cause, self.frame_bytes(stage, chunk))
        if kind in ("F", "B", "I"):
            yield from self._passing(device, kind, stage, chunk)
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
        if self.kv_tier != "device":
            forward, backward, sums = (int(sizes[chunk]) for sizes in self._tables.kv_passing)
            streamed = {Cause.KV: forward, Cause.DKV: 0}
            if kind != "F":
                streamed = {Cause.KV: backward, Cause.DKV: sums}
            yield from _during(device, streamed)
        for cause, forward, backward, given in self._lifetimes:
            taken = forward if kind == "F" else backward
            yield Change(waits, cause, int(taken[stage, chunk]))
            if kind != "F":
                yield Change(waits, cause, -int(given[stage, chunk]), "end")

    @cached_property
    def _lifetimes(self) -> tuple[Lifetime, ...]:
        """[stages, chunks] Those of the one lowering, added up over the layers of each stage."""
        return tuple(
            Lifetime(cause, *(self._counts @ sizes for sizes in tables))
            for cause, *tables in kv_lifetimes(self._tables)
        )

    def _transferred(self, kind: Kind, stage: int, chunk: int) -> Iterator[Change]:
        """Buffers of what passes between ranks: one till it is sent, the other till it is used.

        What a forward received becomes part of its frame; what a backward received ends with it.
        """
        cause, size = Cause.MESSAGES, self.message_bytes(chunk)
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

    def _passing(self, device: str, kind: Kind, stage: int, chunk: int) -> Iterator[Change]:
        """Temporaries of the running layer and, on the last stage, of the loss."""
        tables = self._tables
        table = tables.workspace_forward if kind == "F" else tables.workspace_backward
        size = int(table[:, chunk].max())
        if kind != "F" and self.saved != "whole":
            size = int((table + tables.rebuilt)[:, chunk].max())
        sizes = {Cause.WORKSPACE: size}
        if stage == len(self.stages) - 1 and kind == "F":
            # Layers and loss do not run at once.
            sizes[Cause.LOGITS_TILE] = max(0, int(tables.logits[chunk]) - size)
        yield from _during(device, sizes)

    @cached_property
    def _counts(self) -> Bytes:
        """[stages, kinds] Layers of each kind on each stage."""
        kind_of, kinds = self._tables.kind_of, len(self._tables.kinds)
        return np.array([np.bincount(kind_of[list(s)], minlength=kinds) for s in self.stages])

    @cached_property
    def _frames(self) -> Bytes:
        """[stages, chunks] What is saved."""
        return self._counts @ self._tables.saved[:, SAVED.index(self.saved)]

    @cached_property
    def _decisions(self) -> Decisions:
        shape, kind = self.cost.shape, self.cost.profile.kind
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
            layer_modes=uniform_modes(len(self.bounds), shape.num_layers, KEEP),
            training=True,
            tile_tokens=loss_tile_tokens(shape, device_kind=kind),
            kv_tier=self.kv_tier,
            kv_block_tokens=block,
        )

    @cached_property
    def _tables(self) -> ByteTables:
        return byte_tables(self.cost.shape, self._decisions, self.cost.profile.kind)


def _during(device: str, sizes: dict[Cause, int]) -> Iterator[Change]:
    """Yields bytes that are there while an action runs."""
    for cause, size in sizes.items():
        yield Change(device, cause, size)
        yield Change(device, cause, -size, "end")
