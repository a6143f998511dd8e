"""Multiplexed sequence partitioning (SPPO, arXiv 2503.10377, table 3): units that ranks share.

Of stage i of P, the first chunks ("left") are run by ranks i .. P-1 together and the last ones
("right") by ranks 0 .. i, who would idle while the pipeline fills and drains; those between by rank
i alone. The ranks of a shared unit are called its *set*. A shared unit is a sequence-parallel one
on its set (`sppo_hf.engine.sequence_group`): each rank has a part of its tokens, and in attention a
part of its heads. `sppo_hf.schedule.generate.msp` gives the order, `sppo_hf.schedule.messages` says
what is sent.

[Note: what the paper leaves open]
- *Weights.* Every rank runs units of all stages. Frozen weights (with LoRA and QLoRA, most of them)
  are on every rank permanently. Trained weights are broadcast by their owner in the set for each
  run of shared units, forward and again backward. The broadcast starts one unit ahead, and its
  memory is freed when the run ends. The granularity is a stage and not a layer: each rank goes
  through shared units stage by stage, so a stage's weights come twice a step, and those of no more
  than two other stages are there at once, while layer by layer they would come twice for each unit.
  Where a stage's units follow each other (the last stage's backward its forward, the next row's
  forward the first stage's backward) the weights stay on the device.
- *Gradients of weights.* Each rank of a set sums those of its tokens. The last backward of a run
  starts their reduction to the owner, stage by stage, which is waited for one unit later.
  Other ranks have no optimizer state for them, and the model's `parameters()` does not list them,
  so nobody can freeze or unfreeze them: conversion settles which weights train. With replicas of
  the pipeline, owners average their gradients at the end of the step.
- *Heads.* Sets have 2 to P ranks, and few models have heads for all of these sizes. Where query
  heads cannot be divided evenly, ranks divide key/value heads as evenly as possible
  (`count_head_blocks`).
- *K/V.* In a set each rank has the K/V of its share of the heads. When the set of a stage changes,
  the new ranks get the heads that they will attend with, of all chunks so far; a chunk's are sent
  as soon as it has run. Each run of units that one set computes has K/V stores of its own, so the
  old set's stay where they are for backward.
- *Gradients of K/V.* What later sets add to dK/dV of a chunk comes back the same way, in the
  precision in which it was summed, before that chunk's own backward. Until then it waits in the
  store that summed it, whose other contents are freed when its run has ended. In float32 that is
  twice the size of 16-bit K/V, so chunks' sums are not packed all at once: one unit sends one.
- *Offloaded K/V.* Where a plan keeps K/V on the host or a disk, each rank's heads of a shared unit
  are offloaded too, and stream in and out beside its share. K/V of another set come during the
  units before the set's first one, one chunk beside each, and are on the device until that unit
  begins and offloads them: at most a rank's share of a stage's K/V. To offload them as they come,
  somebody would have to wait for them in the middle of units of other stages. Without an action of
  its own in the program nobody could prove that this never deadlocks (a message comes when its
  sender has come that far); the wait would stand between other copies of the stream; and where a
  chunk's heads come from several ranks, a store can take it only with the last of them. So they
  wait on the device, and are counted (`sppo_hf.planning.pipeline_cost`).
- *K/V that layers share.* The rank that runs the first reader of a stage holds what came with the
  message, like K/V of its own.
- *Tokens.* Parts are cut as in sequence parallelism (`rank_tokens`), of any length. What passes
  between stages is cut where parts of both sets overlap; what stays on its rank is not sent.
- *The loss* of a shared chunk is computed by all ranks of its set, each with the head, and summed.

Not covered: `sp_size` above 1 besides, and recurrent layers. Evaluation, losses computed by the
caller, and batches of fewer chunks than stages run without shared units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from sppo_hf.engine.indexer import indexers_of
from sppo_hf.engine.model_parts import ModelParts
from sppo_hf.engine.stages import StagedModel
from sppo_hf.errors import UnsupportedModelError
from sppo_hf.pipeline.gradients import buckets_of, parts_of
from sppo_hf.pipeline.mesh import PipelineMesh
from sppo_hf.planning.model_profile import LayerProfile, count_head_blocks
from sppo_hf.schedule.actions import COMPUTE_KINDS, Action
from sppo_hf.schedule.messages import ChunkRun
from sppo_hf.schedule.schedule import Schedule

# B batch rows, C tokens of a chunk, c tokens of a part of it, W width of a message, N query heads,
# K key/value heads, H head size. P is the number of ranks.


class WeightUse(NamedTuple):
    """Shared units of one stage that a rank runs one after the other, on one broadcast."""

    stage: int
    run: ChunkRun
    ahead: Action
    """The compute before them, during which the broadcast runs; `first` if there is none."""
    first: Action
    last: Action


def weight_uses(
    schedule: Schedule, rank: int, runs: Mapping[tuple[int, int], ChunkRun]
) -> list[WeightUse]:
    """Return the uses of shared stages' weights on a rank, in order."""
    found: list[WeightUse] = []
    previous: tuple[int, tuple[int, ...]] | None = None
    computes = [action for action in schedule.ranks[rank] if action.kind in COMPUTE_KINDS]
    for ahead, action in pairwise([computes[0], *computes]):
        run = runs[action.stage, schedule.chunk(action)]
        current = action.stage, run.ranks
        if run.is_shared and current == previous:
            found[-1] = found[-1]._replace(last=action)
        elif run.is_shared:
            found.append(WeightUse(action.stage, run, ahead, action, action))
        previous = current
    return found


def check_shareable_units(parts: ModelParts, layers: Iterable[LayerProfile], pp_size: int) -> None:
    """Refuse models whose units ranks cannot share.

    Raises:
        ConfigError: Heads cannot be divided among the ranks of every set.
        UnsupportedModelError: Layers carry a state along the tokens.
    """
    if any(map(indexers_of, parts.layers)):
        raise UnsupportedModelError(
            f"{parts.name} cannot be trained with pp_msp='on': its layers have indexers, which "
            "choose keys for all of a chunk's tokens. Allowed: models whose queries read all keys "
            "that they see. Remedy: pp_msp='off'."
        )
    if parts.has_recurrent_state:
        raise UnsupportedModelError(
            f"{parts.name} cannot be trained with pp_msp='on': it has recurrent or convolutional "
            "layers, whose states go from token to token. Allowed: models in which every layer "
            "attends. Remedy: pp_msp='off'."
        )
    count_head_blocks((layer for layer in layers if layer.num_heads), pp_size, parts.name)


class RemoteWeights:
    """Trained weights of other ranks' stages on this rank: broadcast, used, and freed."""

    def __init__(self, staged: StagedModel, mesh: PipelineMesh) -> None:
        """Free the memory of other stages' trained weights until their first broadcast."""
        self._staged = staged
        self._mesh = mesh
        self._own = {id(p) for p in staged.parts.causal_lm.parameters()}
        self._trained = {
            stage: [p for p in staged.parameters_of(stage) if p.requires_grad]
            for stage in range(staged.cut.num_stages)
        }
        self._had_gradient: set[int] = set()
        """Ids of the weights that had a gradient on this rank when it was reduced."""
        self._reduced: dict[nn.Parameter, Tensor] = {}
        """Gradients of own weights summed over sets, kept apart from `.grad` of this rank."""
        self._fetches: dict[int, list[tuple[Any, Tensor, list[nn.Parameter]]]] = {}
        """Running broadcasts of each stage: c10d Work, buffer, and the weights to copy it to (none
        where the buffer is the weight)."""
        self._reductions: list[tuple[Any, Tensor, list[nn.Parameter]]] = []
        """Running reductions: c10d Work, buffer, and the weights whose sums end on this rank."""
        for parameters in self._trained.values():
            for parameter in self._remote(parameters):
                # A storage of its own: what was loaded may be a part of a file.
                parameter.data = torch.empty_like(parameter.data)
                parameter.untyped_storage().resize_(0)

    @property
    def resident_bytes(self) -> int:
        """Bytes of other stages' weights that are always here: those that do not train."""
        modules = self._staged.borrowed_modules()
        found = {id(p): p for module in modules for p in module.parameters()}
        return sum(
            p.nbytes for p in found.values() if not p.requires_grad and id(p) not in self._own
        )

    @property
    def passing_bytes(self) -> int:
        """Bytes of trained weights of the largest two other stages.

        While one is in use, weights of the next or gradients of the last are being sent.
        """
        sizes = sorted(
            sum(p.nbytes for p in self._remote(parameters)) for parameters in self._trained.values()
        )
        return sum(sizes[-2:])

    def begin_step(self, device: torch.device) -> None:
        """Put other stages' modules on the model's device and in its training mode."""
        training = self._staged.parts.causal_lm.training
        for module in self._staged.borrowed_modules():
            module.train(training)
            for child in module.modules():
                for parameter in child._parameters.values():
                    if parameter is not None and parameter.device != device:
                        parameter.data = _moved(parameter, device)
                for name, buffer in child._buffers.items():
                    if buffer is not None and buffer.device != device:
                        child._buffers[name] = buffer.to(device)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop gradients that were not handed over, as after an error."""
        for state in (self._had_gradient, self._reduced, self._fetches, self._reductions):
            state.clear()
        for parameters in self._trained.values():
            for parameter in self._remote(parameters):
                parameter.grad = None

    @torch.no_grad()
    def start_fetch(self, stage: int, run: ChunkRun) -> None:
        """Start the broadcast of a stage's trained weights in a run's set.

        On the owner, and where a bucket is one tensor, it is sent and received in place.
        """
        is_owner, owner = self._mesh.pp_rank == stage, self._mesh.world_rank(stage)
        group = self._mesh.unit_groups[run.ranks]
        fetches = self._fetches[stage] = []
        for bucket in buckets_of(self._trained[stage]):
            for parameter in self._remote(bucket):
                parameter.untyped_storage().resize_(parameter.nbytes)
            # By `.data`: backward must not see a change, the values are the same as in forward.
            flats = [parameter.data.reshape(-1) for parameter in bucket]
            in_place = len(bucket) == 1 and bucket[0].is_contiguous()
            if not is_owner:
                in_place = in_place and id(bucket[0]) not in self._own
            if in_place:
                flat = flats[0]
            elif is_owner:
                flat = torch.cat(flats)
            else:
                numel = sum(p.numel() for p in bucket)
                flat = torch.empty(numel, dtype=bucket[0].dtype, device=self._mesh.device)
            work = dist.broadcast(flat, owner, group=group, async_op=True)
            fetches.append((work, flat, [] if in_place else bucket))

    @torch.no_grad()
    def wait_for_fetch(self, stage: int) -> None:
        """Wait until the stage's trained weights are here."""
        for work, flat, bucket in self._fetches.pop(stage):
            work.wait()
            for parameter, part in parts_of(flat, bucket):
                if id(parameter) not in self._own:
                    parameter.data.copy_(part)

    def drop(self, stage: int) -> None:
        """Free the stage's trained weights, unless this rank owns them."""
        if stage != self._mesh.pp_rank:
            for parameter in self._remote(self._trained[stage]):
                parameter.untyped_storage().resize_(0)

    @torch.no_grad()
    def start_reduce(self, stage: int, run: ChunkRun) -> None:
        """Start summing the gradients of a stage's weights over a run's set, at the owner."""
        self.wait_for_reduce()
        is_owner, owner = self._mesh.pp_rank == stage, self._mesh.world_rank(stage)
        group = self._mesh.unit_groups[run.ranks]
        for bucket in buckets_of(self._trained[stage]):
            self._had_gradient |= {id(p) for p in bucket if p.grad is not None}
            flat = torch.cat([self._contribution(p, is_owner).reshape(-1) for p in bucket])
            for parameter in bucket if is_owner else self._remote(bucket):
                parameter.grad = None
            work = dist.reduce(flat, owner, group=group, async_op=True)
            self._reductions.append((work, flat, bucket if is_owner else []))

    @torch.no_grad()
    def wait_for_reduce(self) -> None:
        """Wait for running reductions; their owner keeps the sums apart from `.grad`."""
        for work, flat, bucket in self._reductions:
            work.wait()
            for parameter, total in parts_of(flat, bucket):
                earlier = self._reduced.get(parameter)
                self._reduced[parameter] = total if earlier is None else earlier + total
        self._reductions.clear()

    def _contribution(self, parameter: nn.Parameter, is_owner: bool) -> Tensor:
        """Return what this rank adds to the gradient of a weight in a reduction."""
        grad = parameter.grad
        if not is_owner and id(parameter) in self._own:
            grad = None  # a tied weight: both ends of the pipeline sum it at the end of the step
        return torch.zeros_like(parameter) if grad is None else grad.to(parameter.dtype)

    def _add_reduced(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add to `.grad` what was summed over sets."""
        for parameter in parameters:
            total = self._reduced.pop(parameter, None)
            if total is not None:
                parameter.grad = total if parameter.grad is None else parameter.grad + total

    def complete_gradients(self, stage: int) -> None:
        """Complete `.grad` of a stage of this rank, before replicas average it."""
        self.wait_for_reduce()
        self._add_reduced(self._trained[stage])

    def end_step(self) -> None:
        """Complete `.grad` after all units; None where no rank had a gradient, as without MSP."""
        self.wait_for_reduce()
        every = [p for parameters in self._trained.values() for p in parameters]
        had = [id(p) in self._had_gradient for p in every]
        counts = torch.tensor(had, dtype=torch.int32, device="cpu")
        dist.all_reduce(counts, group=self._mesh.control_group)
        self._add_reduced(p for p, count in zip(every, counts.tolist(), strict=True) if count)
        self._had_gradient.clear()
        self._reduced.clear()

    def _remote(self, parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
        return (p for p in parameters if id(p) not in self._own)


def _moved(parameter: nn.Parameter, device: torch.device) -> Tensor:
    """Return the parameter's data on a device; without memory where it has none."""
    if parameter.untyped_storage().nbytes() or not parameter.numel():
        return parameter.data.to(device)
    moved = torch.empty_like(parameter.data, device=device)
    moved.untyped_storage().resize_(0)
    return moved
