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

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from sppo_hf.attention.kv_cache import KVStore
from sppo_hf.engine.chunk_runner import ChunkRunner
from sppo_hf.engine.sequence_group import (
    SequenceGroup,
    held_kv_heads,
    kv_head_transfers,
    rank_tokens,
)
from sppo_hf.engine.stages import StagedModel
from sppo_hf.engine.structure import ModelParts
from sppo_hf.errors import PipelineError, UnsupportedModelError
from sppo_hf.pipeline.gradients import buckets_of, parts_of
from sppo_hf.pipeline.mesh import PipelineMesh
from sppo_hf.planning.model_profile import LayerProfile, count_head_blocks
from sppo_hf.schedule.actions import COMPUTE_KINDS, Action, Kind
from sppo_hf.schedule.messages import ChunkRun, Message
from sppo_hf.schedule.schedule import Schedule

if TYPE_CHECKING:
    from sppo_hf.pipeline.executor import Transport
    from sppo_hf.pipeline.stage_plans import PreparedStep

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


_UnitKey = tuple[Kind, int, int]
"""Kind of send, stage and unit of a result that messages carry."""

_LayerTensors = Tensor | list[tuple[Tensor, Tensor]]
"""K/V, or dK/dV, of all layers: one flat message, or a pair for each layer."""


@dataclass(eq=False)
class UnitTensors:
    """Inputs and outputs of one rank's units in one step, whether ranks share units or not.

    For each unit the executor calls `start_prefetch`, `take_input`, `wait_for_inputs` and
    `finish_unit`, in this order.
    """

    prepared: PreparedStep
    rank: int
    transport: Transport
    _: KW_ONLY
    message_width: Callable[[int], int]
    """Returns W of the messages to a stage."""
    group: SequenceGroup | None
    """The ranks that share every sequence; each has a part of every unit's tokens."""
    layers: Callable[[int], Mapping[int, LayerProfile]]
    """Returns the layers of a stage that hold K/V, by index."""
    head_blocks: int | None
    """Number of blocks in which sets divide heads, see `count_head_blocks`."""
    kv_dtype: torch.dtype
    stores: Callable[[int, int, ChunkRun], ChunkRunner]
    """Returns the chunk runner, which has the K/V stores, of (stage, micro-batch, run)."""

    def __post_init__(self) -> None:
        self.schedule, self.bounds = self.prepared.step.schedule, self.prepared.bounds
        self.rows, self.runs = self.prepared.rows, self.prepared.step.runs
        self.dtype, self.weights = self.prepared.plans.dtype, self.prepared.weights
        self._messages: dict[Action, Message] = {}
        """This rank's messages by send action and by receive action."""
        self._incoming: dict[Action, list[Message]] = {}
        """Messages that each compute needs."""
        self._num_takers: Counter[tuple[Any, ...]] = Counter()
        """Number of times that each result (by `_UnitKey`) or sum (by `_sums_key`) is still to be
        read."""
        for send, message in self.prepared.step.messages.items():
            if message.source == self.rank:
                self._messages[send] = message
                if send.kind in ("SEND_F", "SEND_B"):
                    self._num_takers[send.kind, send.stage, send.unit] += 1
            if message.target == self.rank:
                self._messages[message.receive] = message
                self._incoming.setdefault(message.consumer, []).append(message)
        self._outputs: dict[_UnitKey, tuple[int, Tensor]] = {}
        """Results of units still to be read: first token within the chunk, and `[B, c, W]`."""
        self._sums: dict[tuple[Any, ...], tuple[list[KVStore], int]] = {}
        """Stores of ended runs, with a chunk whose sums of dK and dV are still to be read."""
        self._ending: list[KVStore] = []
        """K/V stores of the run whose last backward is running."""
        uses = weight_uses(self.schedule, self.rank, self.runs)
        self._use_after = {use.ahead: use for use in uses}
        self._use_by_first = {use.first: use for use in uses}
        self._use_by_last = {use.last: use for use in uses}

    # -- hidden states and their gradients -----------------------------------------------------

    def tokens(self, action: Action) -> tuple[int, int]:
        """Return the half-open tokens, counted within the chunk, of a compute's part."""
        start, end = self.bounds[self.schedule.chunk(action)]
        rank, size = action.part or 0, len(self._run(action).ranks)
        if self.group is not None:
            rank, size = self.group.rank, self.group.size
        return rank_tokens(0, end - start, rank, size)

    def take_input(self, action: Action) -> Tensor:
        """Assemble the input `[B, c, W]` of a compute from what the stage before it computed.

        For a backward, that is the next stage.
        """
        start, end = self.tokens(action)
        kind: Kind = "SEND_F" if action.kind == "F" else "SEND_B"
        stage = action.stage + (-1 if kind == "SEND_F" else 1)
        pieces: list[tuple[int, Tensor]] = []
        for message in self._incoming.get(action, ()):
            if message.send.kind == kind:
                low, high = self._overlap(message)
                if low < high:
                    pieces.append((low, self.transport.take(message.receive)))
        key = (kind, stage, action.unit)
        if key in self._outputs:
            first, output = self._outputs[key]
            low, high = max(start, first), min(end, first + output.shape[1])
            if low < high:
                pieces.append((low, output[:, low - first : high - first]))
            self._release(key)
        if not pieces:  # see [Note: a rank without tokens] in sequence_group
            # Not zeros forward: layers such as Gemma 3n's divide by what they are given.
            value = 1.0 if kind == "SEND_F" else 0.0
            shape, device = self._message_shape(action, stage, 1), self.transport.device
            return torch.full(shape, value, dtype=self.dtype, device=device)
        tensors = [piece for _, piece in sorted(pieces, key=lambda piece: piece[0])]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)

    def _put_output(self, action: Action, output: Tensor) -> None:
        """Keep a compute's output `[B, c, W]` until its sends, and this rank, have read it."""
        kind: Kind = "SEND_F" if action.kind == "F" else "SEND_B"
        stage = action.stage + (1 if kind == "SEND_F" else -1)
        key = (kind, action.stage, action.unit)
        if self.rank in self.runs[stage, self.schedule.chunk(action)].ranks:
            self._num_takers[key] += 1
        start, end = self.tokens(action)
        if self._num_takers[key]:
            self._outputs[key] = start, output[:, : end - start]

    def _release(self, key: tuple[Any, ...]) -> None:
        """Free a result or a sum after its last reader."""
        assert self._num_takers[key] > 0, f"{key} was read more often than it was counted"
        self._num_takers[key] -= 1
        if not self._num_takers[key]:
            del self._num_takers[key]
            self._outputs.pop(key, None)
            if key in self._sums:
                stores, chunk = self._sums.pop(key)
                for store in stores:
                    store.free_gradient_sums(chunk)

    def _overlap(self, message: Message) -> tuple[int, int]:
        """Return the tokens of the chunk that a message of hidden states or gradients carries."""
        made, used = self.tokens(message.producer), self.tokens(message.consumer)
        return max(made[0], used[0]), min(made[1], used[1])

    def _message_shape(self, action: Action, other_stage: int, tokens: int) -> tuple[int, ...]:
        row, row_end = self.rows[self.schedule.micro_batch(action)]
        return row_end - row, tokens, self.message_width(max(action.stage, other_stage))

    # -- K/V -----------------------------------------------------------------------------------

    def _run(self, action: Action) -> ChunkRun:
        return self.runs[action.stage, self.schedule.chunk(action)]

    def _passing_heads(
        self, earlier: Action, later: Action
    ) -> list[tuple[LayerProfile, list[int], list[int]]]:
        """Return which heads pass between the ranks of two units of a stage, in order of forward.

        By layer: the profile, positions in what the rank of `earlier` holds, and as many positions
        in what the rank of `later` holds.
        """
        return [
            (layer, *kv_head_transfers(self._held(layer, earlier), self._held(layer, later)))
            for layer in self.layers(earlier.stage).values()
        ]

    def _held(self, layer: LayerProfile, action: Action) -> list[range]:
        """Return the key/value heads that a rank holds for a compute; see `held_kv_heads`."""
        size = len(self._run(action).ranks)
        heads = layer.num_heads, layer.num_kv_heads
        return held_kv_heads(*heads, action.part or 0, size, self.head_blocks)

    def _heads_of_message(
        self, message: Message
    ) -> list[tuple[LayerProfile, list[int], list[int]]]:
        """Return `_passing_heads` of a message of K/V or of their gradients, the sender's first."""
        if message.send.kind == "SEND_KV":
            return self._passing_heads(message.producer, message.consumer)
        passing = self._passing_heads(message.consumer, message.producer)
        return [(layer, in_later, in_earlier) for layer, in_earlier, in_later in passing]

    def _kv_numel(self, message: Message) -> int:
        """Return the number of elements in a message of K/V or of their gradients."""
        start, end = self.bounds[self.schedule.chunk(message.send)]
        row, row_end = self.rows[self.schedule.micro_batch(message.send)]
        widths = (
            len(heads) * (layer.qk_head_size + layer.v_head_size)
            for layer, heads, _ in self._heads_of_message(message)
        )
        return (row_end - row) * (end - start) * sum(widths)

    def _pack(self, message: Message) -> Tensor:
        """Flatten a chunk's K/V or sums of dK/dV, of all layers, for a rank of another set."""
        is_forward, chunk = message.send.kind == "SEND_KV", self.schedule.chunk(message.send)
        stores = self._kv_stores(message.producer) if is_forward else None
        if stores is None:
            stores, _ = self._sums[self._key_of_sums(message)]
        flat: list[Tensor] = []
        heads = self._heads_of_message(message)
        for (layer, positions, _), store in zip(heads, stores, strict=True):
            tensors = store.chunk_kv(chunk) if is_forward else store.gradient_sums(chunk)
            for x_BKCH, size in zip(tensors, (layer.qk_head_size, layer.v_head_size), strict=True):
                held = len(self._held(layer, message.producer))
                found = x_BKCH.shape[1], x_BKCH.shape[3], x_BKCH.dtype
                if is_forward and found != (held, size, self.kv_dtype):
                    raise PipelineError(
                        f"keys or values of stage {message.producer.stage} are "
                        f"{list(x_BKCH.shape)} in {x_BKCH.dtype}, and ranks that share units "
                        f"expect {held} heads of {size} in {self.kv_dtype}. Train this model with "
                        "pp_msp='off'."
                    )
                flat.append(_heads(x_BKCH, positions).reshape(-1))
        return torch.cat(flat)

    def _kv_stores(self, action: Action) -> list[KVStore]:
        """Return the K/V stores, by layer, of the run that a compute belongs to."""
        stage = action.stage
        runner = self.stores(stage, self.schedule.micro_batch(action), self._run(action))
        return runner.kv_stores(list(self.layers(stage)))

    def _import_kv(self, action: Action) -> None:
        """Fill the K/V stores of a new run with all chunks before it, before its first unit."""
        run = self._run(action)
        first = run.chunks.start
        if first == 0:
            return
        previous_run = self.runs[action.stage, first - 1]
        first_unit = action.unit - first
        incoming: dict[int, list[Message]] = {}
        for message in self._incoming.get(action, ()):
            if message.send.kind == "SEND_KV":
                incoming.setdefault(message.send.unit - first_unit, []).append(message)
        stores = self._kv_stores(action)
        for chunk in range(first):
            assembled: list[list[Tensor] | None] = [None] * len(stores)
            for message in incoming.get(chunk, ()):
                if self._kv_numel(message):
                    flat = self.transport.take(message.receive)
                    self._place_kv(assembled, message.producer, action, chunk, flat)
            if self.rank in previous_run.ranks:
                chunk_here = max(chunk, previous_run.chunks.start)
                earlier = self._forward_in(action, previous_run, chunk_here)
                own = [store.chunk_kv(chunk) for store in self._kv_stores(earlier)]
                self._place_kv(assembled, earlier, action, chunk, own)
            for store, tensors in zip(stores, assembled, strict=True):
                assert tensors is not None, "some rank of the previous set has each layer's K/V"
                store.put_attended(chunk, *tensors)

    def _forward_in(self, action: Action, run: ChunkRun, chunk: int) -> Action:
        """Return this rank's forward of another chunk, in `run`, of the same stage and row."""
        unit = action.unit - self.schedule.chunk(action) + chunk
        part = run.ranks.index(self.rank) if run.is_shared else None
        return Action("F", action.stage, unit, None, part)

    def _place_kv(
        self,
        assembled: list[list[Tensor] | None],
        earlier: Action,
        later: Action,
        chunk: int,
        source: _LayerTensors,
    ) -> None:
        """Copy heads of the previous set into the K/V of `later`'s rank, by layer."""
        heads = self._split_heads(earlier, later, chunk, source, by_later=False)
        for index, (layer, _, positions, tensors_BKCH) in enumerate(heads):
            whole = assembled[index]
            if whole is None:
                num_held = len(self._held(layer, later))
                whole = assembled[index] = [
                    torch.empty(
                        *(x.shape[0], num_held, *x.shape[2:]),
                        dtype=self.kv_dtype,
                        device=self.transport.device,
                    )
                    for x in tensors_BKCH
                ]
            for tensor, x_BKCH in zip(whole, tensors_BKCH, strict=True):
                for place, head in enumerate(positions):
                    tensor[:, head] = x_BKCH[:, place]

    def _split_heads(
        self, earlier: Action, later: Action, chunk: int, source: _LayerTensors, *, by_later: bool
    ) -> Iterator[tuple[LayerProfile, list[int], list[int], list[Tensor]]]:
        """Yield by layer what passes between two forwards: `_passing_heads`, and BKCH tensors.

        `source` is a flat message of these heads, or what this rank holds of each layer: for the
        later forward if `by_later`, else for the earlier.
        """
        start, end = self.bounds[chunk]
        row, row_end = self.rows[self.schedule.micro_batch(later)]
        offset = 0
        for index, (layer, in_earlier, in_later) in enumerate(self._passing_heads(earlier, later)):
            tensors: list[Tensor] = []
            for which, head_size in enumerate((layer.qk_head_size, layer.v_head_size)):
                if isinstance(source, Tensor):
                    shape = (row_end - row, len(in_later), end - start, head_size)
                    numel = math.prod(shape)
                    tensors.append(source[offset : offset + numel].view(shape))
                    offset += numel
                else:
                    positions = in_later if by_later else in_earlier
                    tensors.append(_heads(source[index][which], positions))
            yield layer, in_earlier, in_later, tensors

    # -- gradients of K/V ----------------------------------------------------------------------

    def _import_sums(self, action: Action) -> None:
        """Add what later sets summed of dK/dV to this run's stores, before a unit's backward."""
        run, chunk = self._run(action), self.schedule.chunk(action)
        if run.chunks.stop == len(self.bounds):
            return
        stores = self._kv_stores(action)
        for message in self._incoming.get(action, ()):
            if message.send.kind == "SEND_DKV" and self._kv_numel(message):
                flat = self.transport.take(message.receive)
                of_chunk = self.schedule.chunk(message.send)
                self._add_sums(stores, action, message.producer, of_chunk, flat)
        next_run = self.runs[action.stage, run.chunks.stop]
        if self.rank not in next_run.ranks:
            return
        later = self._forward_in(action, next_run, next_run.chunks.start)
        for earlier in range(chunk + 1) if chunk == run.chunks.start else (chunk,):
            key = self._sums_key(action.stage, action.unit - chunk + earlier, next_run)
            ended, _ = self._sums[key]
            sums = [store.gradient_sums(earlier) for store in ended]
            self._add_sums(stores, action, later, earlier, sums)
            self._release(key)

    def _sums_key(self, stage: int, unit: int, run: ChunkRun) -> tuple[Any, ...]:
        # With the run: sums of one chunk go back from the last set to the one before, and so on.
        return "SEND_DKV", stage, unit, run.chunks.start

    def _add_sums(
        self,
        stores: list[KVStore],
        earlier: Action,
        later: Action,
        chunk: int,
        source: _LayerTensors,
    ) -> None:
        heads = self._split_heads(earlier, later, chunk, source, by_later=True)
        for store, (_, in_earlier, in_later, (dk_BKCH, dv_BKCH)) in zip(stores, heads, strict=True):
            if in_later:
                store.add_gradient_sums(chunk, dk_BKCH, dv_BKCH, in_earlier)

    def _key_of_sums(self, message: Message) -> tuple[Any, ...]:
        send = message.send
        return self._sums_key(send.stage, send.unit, self._run(message.producer))

    def _keep_sums(self, action: Action, run: ChunkRun) -> None:
        """After a run's last backward: keep the sums for earlier chunks, free everything else."""
        first = run.chunks.start
        if first == 0:
            return
        stores, self._ending = self._ending, []
        is_in_previous = self.rank in self.runs[action.stage, first - 1].ranks
        for chunk in range(first):
            unit = action.unit - first + chunk
            for store in stores:
                store.free_kv(chunk)
            num_sends = sum(
                message.producer == action and message.send.unit == unit
                for send, message in self._messages.items()
                if send.kind == "SEND_DKV"
            )
            num_takers = num_sends + is_in_previous
            assert num_takers, "each rank of a run has heads that ranks of the previous one had"
            key = self._sums_key(action.stage, unit, run)
            self._num_takers[key] = num_takers
            self._sums[key] = stores, chunk

    # -- around units --------------------------------------------------------------------------

    def start_prefetch(self, action: Action) -> None:
        """Before a compute waits for anything: start the broadcast for the compute after it."""
        if self.weights is None:
            return
        use = self._use_by_first.get(action)
        if use is not None and use.ahead == action:
            self.weights.start_fetch(use.stage, use.run)
        next_use = self._use_after.get(action)
        if next_use is not None and next_use is not use:
            self.weights.start_fetch(next_use.stage, next_use.run)

    def wait_for_inputs(self, action: Action) -> None:
        """Right before a compute: wait for its weights, K/V and gradients of K/V."""
        if self.weights is None:
            return
        use = self._use_by_first.get(action)
        if use is not None:
            self.weights.wait_for_fetch(use.stage)
        run, chunk = self._run(action), self.schedule.chunk(action)
        if action.kind == "F":
            if chunk == run.chunks.start:
                self._import_kv(action)
            return
        self._import_sums(action)
        if chunk == run.chunks.start:
            self._ending = self._kv_stores(action)

    def finish_unit(self, action: Action, output: Tensor | None) -> None:
        """After a compute: keep its output, reduce gradients, free weights and K/V of its run.

        `output` is `[B, c, W]` for the stage after it (of a backward, before); None for none.
        """
        if output is not None:
            self._put_output(action, output)
        if self.weights is None:
            return
        run, chunk = self._run(action), self.schedule.chunk(action)
        self.weights.wait_for_reduce()
        if action.kind != "F" and chunk == run.chunks.start:
            self._keep_sums(action, run)
            if run.is_shared:
                self.weights.start_reduce(action.stage, run)
        use = self._use_by_last.get(action)
        if use is not None:
            self.weights.drop(use.stage)

    # -- messages ------------------------------------------------------------------------------

    def send(self, action: Action) -> None:
        """Carry out a send; nothing is sent where a message would be empty."""
        message = self._messages[action]
        if action.kind in ("SEND_KV", "SEND_DKV"):
            if self._kv_numel(message):
                self.transport.send(self._pack(message), message.target)
            if action.kind == "SEND_DKV":
                self._release(self._key_of_sums(message))
            return
        low, high = self._overlap(message)
        key = (action.kind, action.stage, action.unit)
        if low < high:
            first, output = self._outputs[key]
            self.transport.send(output[:, low - first : high - first], message.target)
        self._release(key)

    def receive(self, action: Action) -> None:
        """Start a receive; nothing is received where a message would be empty."""
        message = self._messages[action]
        if action.kind in ("RECV_KV", "RECV_DKV"):
            numel, dtype = self._kv_numel(message), self.kv_dtype
            if action.kind == "RECV_DKV":
                dtype = torch.promote_types(dtype, torch.float32)
            if numel:
                self.transport.receive(action, (numel,), dtype, message.source)
            return
        low, high = self._overlap(message)
        if low < high:
            shape = self._message_shape(message.consumer, message.producer.stage, high - low)
            self.transport.receive(action, shape, self.dtype, message.source)

    @property
    def is_finished(self) -> bool:
        """Whether every result and every sum has been read."""
        return not self._outputs and not self._sums


def _heads(x_BKCH: Tensor, positions: list[int]) -> Tensor:
    """Select heads by slices: an index would be copied to the device, and the host would wait."""
    if not positions:
        return x_BKCH[:, :0]
    if positions == list(range(positions[0], positions[-1] + 1)):
        return x_BKCH[:, positions[0] : positions[-1] + 1]
    return torch.cat([x_BKCH[:, head : head + 1] for head in positions], dim=1)
