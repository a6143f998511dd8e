"""Multiplexed sequence partitioning (SPPO, arXiv 2503.10377, table 3): units that ranks share.

Of stage i of P, the first chunks ("left") are run by ranks i .. P-1 together and the last ones
("right") by ranks 0 .. i, who would idle while the pipeline fills and drains; those between by rank
i alone. A shared unit is a sequence-parallel one on its set (`sppo_hf.engine.sequence_group`): each
rank has a part of its tokens, and in attention a part of its heads. `sppo_hf.schedule.generate.msp`
gives the order, `sppo_hf.schedule.messages` says what moves.

[Note: what the paper leaves open]
- *Weights.* Every rank runs units of all stages. What is frozen is on every rank for good: that is
  what LoRA and QLoRA have most of. What trains comes from its owner for a run of shared units,
  forward and again backward, by a broadcast in the set that is started a unit ahead, and its memory
  is given back when the run ends. By stage and not by layer: each rank goes through shared units
  stage by stage, so a stage's weights come twice a step and those of no more than two other stages
  are there at once, while layer by layer they would come twice for each unit. Where a stage's units
  follow each other (the last stage's backward its forward, the next row's forward the first stage's
  backward) they stay.
- *Gradients of weights.* Each rank of a set sums those of its tokens; with the last backward of a
  run they start on their way to the owner, stage by stage too, and are waited for a unit later.
  Helpers have no optimizer states, and to the model's `parameters()` a helped stage is not there:
  nobody can freeze or unfreeze it, so which weights train is settled by the conversion.
  With replicas of the pipeline, owners average theirs at the end of the step.
- *Heads.* Sets have 2 to P ranks, and few models have heads for all of these sizes. Where query
  heads cannot be divided evenly, ranks divide key/value heads as evenly as can be
  (`count_head_blocks`).
- *Keys and values.* In a set each rank has the heads that its size gives it. When the set of a
  stage changes, the ranks that come in get the heads that they will attend with, of all chunks so
  far; a chunk's are sent as soon as it has run. Each run of units that one set computes has a store
  of its own, so the old set's stay where they are for backward.
- *Their gradients.* What later sets add to the gradients of a chunk's keys comes back the same way,
  in the precision in which it was summed, before that chunk's own backward. Until then it waits in
  the store that summed it, of which nothing else is left when its run has ended. In float32 that is
  twice what 16-bit keys are, so chunks' sums are not packed all at once: they go a unit apart.
- *Keys and values elsewhere.* Where a plan has them wait on the host or a disk, each rank's heads
  of a shared unit do, too, and stream in and out beside its share. What comes from another set
  comes in the units before the set's first one, a chunk's beside each, and is on the device until
  that one begins, which sends it away: at most a rank's share of a stage's keys and values. To send
  it away as it comes somebody has to wait for it in the middle of other units, of other stages.
  Without an action of its own in the program nobody would know that they cannot wait for each
  other (a message comes when its sender has come that far), and in a copy's resource it would stand
  between theirs; and where a chunk's heads come from several ranks, a store can take it only with
  the last of them. So it waits, and is counted (`sppo_hf.planning.pipeline_cost`).
- *Keys that layers share.* The rank that runs the first reader of a stage holds what came with the
  message, like keys of its own.
- *Tokens.* Parts are cut as in sequence parallelism (`rank_tokens`), of any length; what passes
  between stages is cut where parts of both sets overlap, and what stays on its rank is not sent.
- *The loss* of a shared chunk is computed by all ranks of its set, each with the head, and summed.

Not covered: `sp_size` above 1 besides, and recurrent layers. Evaluation, losses of a caller's own,
and batches of fewer chunks than stages run without shared units.
"""

from __future__ import annotations

import math
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
    held_kv_heads,
    kv_head_transfers,
    rank_tokens,
)
from sppo_hf.engine.stages import StagedModel
from sppo_hf.engine.structure import ModelParts
from sppo_hf.errors import PipelineError, UnsupportedModelError
from sppo_hf.pipeline.gradients import buckets_of
from sppo_hf.pipeline.mesh import PipelineMesh
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.model_profile import LayerProfile, count_head_blocks
from sppo_hf.schedule.actions import COMPUTE_KINDS, Action, Kind
from sppo_hf.schedule.messages import Message, messages
from sppo_hf.schedule.schedule import Schedule

if TYPE_CHECKING:
    from sppo_hf.pipeline.executor import Transport

# B batch rows, C tokens of a chunk, c tokens of a part of it, W width of a message, N query heads,
# K key/value heads, H head size. P is the number of ranks.


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring chunks of one stage that the same ranks compute."""

    chunks: range
    ranks: tuple[int, ...]

    @property
    def is_shared(self) -> bool:
        """Whether there are several ranks."""
        return len(self.ranks) > 1


class WeightUse(NamedTuple):
    """Shared units of one stage that a rank runs one after the other, on its weights."""

    stage: int
    run: Run
    ahead: Action
    """The compute before them, beside which the weights come; their own first if there is none."""
    first: Action
    last: Action


def weight_uses(
    schedule: Schedule, rank: int, runs: Mapping[tuple[int, int], Run]
) -> list[WeightUse]:
    """What a rank needs the weights of helped or shared stages for, in order."""
    found: list[WeightUse] = []
    before: tuple[int, tuple[int, ...]] | None = None
    computes = [action for action in schedule.ranks[rank] if action.kind in COMPUTE_KINDS]
    for ahead, action in pairwise([computes[0], *computes]):
        run = runs[action.stage, schedule.chunk(action)]
        here = action.stage, run.ranks
        if here == before:
            found[-1:] = [found[-1]._replace(last=action)] if run.is_shared else found[-1:]
        elif run.is_shared:
            found.append(WeightUse(action.stage, run, ahead, action, action))
        before = here
    return found


def chunk_runs(schedule: Schedule, num_chunks: int) -> dict[tuple[int, int], Run]:
    """The run of each (stage, chunk); all micro-batches have the same."""
    found: dict[tuple[int, int], Run] = {}
    for stage in range(schedule.num_stages):
        ranks = [schedule.unit_ranks(stage, chunk) for chunk in range(num_chunks)]
        starts = [c for c in range(num_chunks) if c == 0 or ranks[c] != ranks[c - 1]]
        for start, stop in pairwise([*starts, num_chunks]):
            run = Run(range(start, stop), ranks[start])
            found.update(((stage, chunk), run) for chunk in run.chunks)
    return found


def check_shareable_units(parts: ModelParts, layers: Iterable[LayerProfile], pp_size: int) -> None:
    """Refuse models whose units ranks cannot share.

    Raises:
        ConfigError: Heads cannot be divided among the ranks of every set.
        UnsupportedModelError: Layers carry a state along the tokens.
    """
    if parts.has_states:
        raise UnsupportedModelError(
            f"{parts.name} cannot be trained with pp_msp='on': it has recurrent or convolutional "
            "layers, whose states go from token to token. Allowed: models in which every layer "
            "attends. Remedy: pp_msp='off'."
        )
    count_head_blocks((layer for layer in layers if layer.num_heads), pp_size, parts.name)


class RemoteWeights:
    """Weights of the stages that other ranks own, while they are here."""

    def __init__(self, staged: StagedModel, mesh: PipelineMesh) -> None:
        """Free what trains in other ranks' stages; it comes when it is needed."""
        self._staged = staged
        self._mesh = mesh
        self._own = {id(p) for p in staged.parts.causal_lm.parameters()}
        self._trained = {
            stage: [p for p in staged.parameters_of(stage) if p.requires_grad]
            for stage in range(staged.cut.num_stages)
        }
        self._there: set[int] = set()
        """Which weights had a gradient here when it was handed over."""
        self._aside: dict[nn.Parameter, Tensor] = {}
        """Of own weights, what was summed over sets, until it joins what this rank sums alone."""
        self._coming: dict[int, list[tuple[Any, Tensor, list[nn.Parameter]]]] = {}
        """By stage, weights on their way: what to wait for, and whose they are if not in place."""
        self._leaving: list[tuple[Any, Tensor, list[nn.Parameter]]] = []
        """Gradients on their way, and whose sums they will be here."""
        for parameters in self._trained.values():
            for parameter in self._foreign(parameters):
                # In a storage of its own: what was loaded may be a part of a file.
                parameter.data = torch.empty_like(parameter.data)
                parameter.untyped_storage().resize_(0)

    @property
    def resident_bytes(self) -> int:
        """Bytes of other ranks' weights that are here all along: those that do not train."""
        modules = self._staged.borrowed_modules()
        found = {id(p): p for module in modules for p in module.parameters()}
        return sum(
            p.nbytes for p in found.values() if not p.requires_grad and id(p) not in self._own
        )

    @property
    def passing_bytes(self) -> int:
        """Bytes of what trains in the largest two of other ranks' stages.

        While one is in use, weights of the next are on their way, or gradients of the last.
        """
        sizes = sorted(
            sum(p.nbytes for p in self._foreign(parameters))
            for parameters in self._trained.values()
        )
        return sum(sizes[-2:])

    def begin_step(self, device: torch.device) -> None:
        """Let helped stages be as the model is: on its device, and training or not."""
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
        for held in (self._there, self._aside, self._coming, self._leaving):
            held.clear()
        for parameters in self._trained.values():
            for parameter in self._foreign(parameters):
                parameter.grad = None

    @torch.no_grad()
    def start_fetch(self, stage: int, run: Run) -> None:
        """Start bringing what trains in a stage from its owner to all ranks of a run's set.

        On the owner, and where a tensor travels alone, it is sent and received where it lies.
        """
        is_owner = self._mesh.pp_rank == stage
        coming = self._coming[stage] = []
        for bucket in buckets_of(self._trained[stage]):
            for parameter in self._foreign(bucket):
                storage = parameter.untyped_storage()
                storage.resize_(parameter.nbytes)
            # Not a change that backward should see: the same values as in forward.
            flats = [parameter.data.reshape(-1) for parameter in bucket]
            alone = len(bucket) == 1 and bucket[0].is_contiguous()
            if not is_owner:
                alone = alone and id(bucket[0]) not in self._own
            if alone:
                flat = flats[0]
            elif is_owner:
                flat = torch.cat(flats)
            else:
                numbers = sum(p.numel() for p in bucket)
                flat = torch.empty(numbers, dtype=bucket[0].dtype, device=self._mesh.device)
            work = dist.broadcast(
                flat,
                self._mesh.world_rank(stage),
                group=self._mesh.unit_groups[run.ranks],
                async_op=True,
            )
            coming.append((work, flat, [] if alone else bucket))

    @torch.no_grad()
    def wait_for_fetch(self, stage: int) -> None:
        """What trains in the stage is here, once its fetch has ended."""
        for work, flat, bucket in self._coming.pop(stage):
            work.wait()
            parts = flat.split([p.numel() for p in bucket]) if bucket else ()
            for parameter, part in zip(bucket, parts, strict=True):
                if id(parameter) not in self._own:
                    parameter.data.copy_(part.view_as(parameter))

    def drop(self, stage: int) -> None:
        """Units of the stage have run: give memory back."""
        if stage != self._mesh.pp_rank:
            self._free(stage)

    @torch.no_grad()
    def start_reduce(self, stage: int, run: Run) -> None:
        """Start summing the gradients of a stage's weights over a run's set, at the owner."""
        self.wait_for_reduce()
        is_owner = self._mesh.pp_rank == stage
        for bucket in buckets_of(self._trained[stage]):
            self._there |= {id(p) for p in bucket if p.grad is not None}
            flat = torch.cat([self._given(p, is_owner).reshape(-1) for p in bucket])
            for parameter in bucket if is_owner else self._foreign(bucket):
                parameter.grad = None
            work = dist.reduce(
                flat,
                self._mesh.world_rank(stage),
                group=self._mesh.unit_groups[run.ranks],
                async_op=True,
            )
            self._leaving.append((work, flat, bucket if is_owner else []))

    @torch.no_grad()
    def wait_for_reduce(self) -> None:
        """Gradients that were on their way are at their owner, beside what it sums itself."""
        for work, flat, bucket in self._leaving:
            work.wait()
            totals = flat.split([p.numel() for p in bucket]) if bucket else ()
            for parameter, total in zip(bucket, totals, strict=True):
                before = self._aside.get(parameter)
                total = total.view_as(parameter)
                self._aside[parameter] = total if before is None else before + total
        self._leaving.clear()

    def _given(self, parameter: nn.Parameter, is_owner: bool) -> Tensor:
        """What this rank adds to the gradient of a weight."""
        grad = parameter.grad
        if not is_owner and id(parameter) in self._own:
            grad = None  # both ends of the pipeline hold it, and sum it in the end
        return torch.zeros_like(parameter) if grad is None else grad.to(parameter.dtype)

    def _join(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add to gradients what was summed over sets."""
        for parameter in parameters:
            total = self._aside.pop(parameter, None)
            if total is not None:
                parameter.grad = total if parameter.grad is None else parameter.grad + total

    def settle(self, stage: int) -> None:
        """A stage of this rank has its whole gradient, which replicas are about to average."""
        self.wait_for_reduce()
        self._join(self._trained[stage])

    def end_step(self) -> None:
        """All units have run. What no rank has a gradient of, as without us, has none."""
        self.wait_for_reduce()
        every = [p for parameters in self._trained.values() for p in parameters]
        there = torch.tensor([id(p) in self._there for p in every], dtype=torch.int32)
        dist.all_reduce(there, group=self._mesh.control_group)
        self._join(p for p, count in zip(every, there.tolist(), strict=True) if count)
        self._there.clear()
        self._aside.clear()

    def _foreign(self, parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
        return (p for p in parameters if id(p) not in self._own)

    def _free(self, stage: int) -> None:
        for parameter in self._foreign(self._trained[stage]):
            parameter.untyped_storage().resize_(0)


def _moved(parameter: nn.Parameter, device: torch.device) -> Tensor:
    """The parameter's data on a device; without memory where it has none."""
    if parameter.untyped_storage().nbytes() or not parameter.numel():
        return parameter.data.to(device)
    moved = torch.empty_like(parameter.data, device=device)
    moved.untyped_storage().resize_(0)
    return moved


_Given = Tensor | list[tuple[Tensor, Tensor]]
"""Keys and values of all layers: one dim, as they travel, or by layer."""

Stores = Callable[[int, int, Run], ChunkRunner]
"""The sequence of (stage, micro-batch, run), made when it is first asked for."""


@dataclass(eq=False)
class SharedUnits:
    """What goes in and out of the units of one rank in one step, where units are shared."""

    schedule: Schedule
    rank: int
    """This rank in the pipeline."""
    transport: Transport
    _: KW_ONLY
    runs: Mapping[tuple[int, int], Run]
    """`chunk_runs` the schedule."""
    bounds: Bounds
    """Of the chunks."""
    rows: list[tuple[int, int]]
    """Half-open rows of each micro-batch."""
    widths: Callable[[int], int]
    """W of the messages to a stage."""
    layers: Callable[[int], Mapping[int, LayerProfile]]
    """The layers of a stage that hold keys and values, by number."""
    head_blocks: int | None
    """How sets divide heads, see `count_head_blocks`."""
    dtypes: tuple[torch.dtype, torch.dtype]
    """Of hidden states between stages, and of keys and values."""
    stores: Stores
    """Gives a run's keys and values."""
    weights: RemoteWeights
    """Of other ranks' stages."""

    def __post_init__(self) -> None:
        self._dtype, self._key_dtype = self.dtypes
        self._messages: dict[Action, Message] = {}
        """By send, and by receive, those of this rank."""
        self._used: dict[Action, list[Message]] = {}
        """What comes for each compute."""
        self._left: dict[tuple[Any, ...], int] = {}
        """How often the result of a unit, or the sums of one, are still to be taken."""
        for send, message in messages(_compute_of(self.schedule)).items():
            if message.source == self.rank:
                self._messages[send] = message
                if send.kind in ("SEND_F", "SEND_B"):
                    key = (send.kind, send.stage, send.unit)
                    self._left[key] = self._left.get(key, 0) + 1
            if message.target == self.rank:
                self._messages[message.receive] = message
                self._used.setdefault(message.used, []).append(message)
        self._made: dict[tuple[Any, ...], tuple[int, Tensor]] = {}
        """What units gave on that is to be taken: its first token in the chunk, `[B, c, W]`."""
        self._sums: dict[tuple[Any, ...], tuple[list[KVStore], int]] = {}
        """Stores of runs that have ended, with sums of a chunk's dK and dV that are to go back."""
        self._ending: list[KVStore] = []
        """Keys of the run whose last backward runs."""
        visits = weight_uses(self.schedule, self.rank, self.runs)
        self._fetched_in = {visit.ahead: visit for visit in visits}
        self._first = {visit.first: visit for visit in visits}
        self._last = {visit.last: visit for visit in visits}

    # -- hidden states and their gradients -----------------------------------------------------

    def tokens(self, action: Action) -> tuple[int, int]:
        """The tokens, counted in the chunk, that are of a compute's part."""
        start, end = self.bounds[self.schedule.chunk(action)]
        size = len(self.schedule.unit_ranks(action.stage, action.unit))
        return rank_tokens(0, end - start, action.part or 0, size)

    def take(self, action: Action, stage: int) -> Tensor:
        """What a compute is given: `[B, c, W]` from `stage`, put together."""
        start, end = self.tokens(action)
        kind: Kind = "SEND_F" if stage < action.stage else "SEND_B"
        pieces: list[tuple[int, Tensor]] = []
        for message in self._used.get(action, ()):
            if message.send.kind == kind:
                low, high = self._overlap(message)
                if low < high:
                    pieces.append((low, self.transport.take(message.receive)))
        key = (kind, stage, action.unit)
        if key in self._made:
            first, made = self._made[key]
            low, high = max(start, first), min(end, first + made.shape[1])
            if low < high:
                pieces.append((low, made[:, low - first : high - first]))
            self._release(key)
        if not pieces:  # see [Note: a rank without tokens] in sequence_group
            # Layers that divide by what they are given (Gemma 3n) cannot be given zeros.
            number = 1.0 if kind == "SEND_F" else 0.0
            shape, device = self._shape(action, stage, 1), self.transport.device
            return torch.full(shape, number, dtype=self._dtype, device=device)
        pieces.sort(key=lambda piece: piece[0])
        found = [piece for _, piece in pieces]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def put(self, action: Action, given: Tensor) -> None:
        """A compute gave `given` on."""
        kind: Kind = "SEND_F" if action.kind == "F" else "SEND_B"
        stage = action.stage + (1 if kind == "SEND_F" else -1)
        key = (kind, action.stage, action.unit)
        if self.rank in self.schedule.unit_ranks(stage, action.unit):
            self._left[key] = self._left.get(key, 0) + 1
        start, end = self.tokens(action)
        if self._left.get(key):
            self._made[key] = start, given[:, : end - start]

    def _release(self, key: tuple[Any, ...]) -> None:
        self._left[key] -= 1
        if not self._left[key]:
            del self._left[key]
            self._made.pop(key, None)
            if key in self._sums:
                stores, chunk = self._sums.pop(key)
                for keys in stores:
                    keys.drop_sums(chunk)

    def _overlap(self, message: Message) -> tuple[int, int]:
        """The tokens of the chunk that a message of hidden states or gradients carries."""
        mine, yours = self.tokens(message.made), self.tokens(message.used)
        return max(mine[0], yours[0]), min(mine[1], yours[1])

    def _shape(self, action: Action, other: int, tokens: int) -> tuple[int, ...]:
        row, row_end = self.rows[self.schedule.micro_batch(action)]
        return row_end - row, tokens, self.widths(max(action.stage, other))

    # -- keys and values -----------------------------------------------------------------------

    def _run(self, action: Action) -> Run:
        return self.runs[action.stage, self.schedule.chunk(action)]

    def _keys_of(
        self, forward: Action, late: Action
    ) -> list[tuple[LayerProfile, list[int], list[int]]]:
        """By layer, the heads that pass from the ranks of one unit to those of a later one."""
        return [
            (layer, *kv_head_transfers(self._held(layer, forward), self._held(layer, late)))
            for layer in self.layers(forward.stage).values()
        ]

    def _held(self, layer: LayerProfile, action: Action) -> list[range]:
        """What a rank holds of a layer's keys for one of its computes; see `held_kv_heads`."""
        size = len(self.schedule.unit_ranks(action.stage, action.unit))
        heads = layer.num_heads, layer.num_kv_heads
        return held_kv_heads(*heads, action.part or 0, size, self.head_blocks)

    def _key_numbers(self, message: Message) -> int:
        """Numbers in a message of keys and values, or of their gradients."""
        forward = message.send.kind == "SEND_KV"
        ends = (message.made, message.used) if forward else (message.used, message.made)
        start, end = self.bounds[self.schedule.chunk(message.send)]
        row, row_end = self.rows[self.schedule.micro_batch(message.send)]
        widths = (
            len(heads) * (layer.qk_head_size + layer.v_head_size)
            for layer, heads, _ in self._keys_of(*ends)
        )
        return (row_end - row) * (end - start) * sum(widths)

    def _packed_keys(self, message: Message) -> Tensor:
        """Keys and values of one chunk, for a rank of the set after: all layers, one dim."""
        stores = self._key_stores(message.made)
        chunk = self.schedule.chunk(message.send)
        flat: list[Tensor] = []
        places = self._keys_of(message.made, message.used)
        for (layer, source, _), keys in zip(places, stores, strict=True):
            for x_BKCH, size in zip(
                keys.keys_and_values(chunk), (layer.qk_head_size, layer.v_head_size), strict=True
            ):
                self._check_keys(message.made, layer, x_BKCH, size)
                flat.append(_heads(x_BKCH, source).reshape(-1))
        return torch.cat(flat)

    def _check_keys(self, action: Action, layer: LayerProfile, x_BKCH: Tensor, size: int) -> None:
        heads = len(self._held(layer, action))
        if (x_BKCH.shape[1], x_BKCH.shape[3], x_BKCH.dtype) != (heads, size, self._key_dtype):
            raise PipelineError(
                f"keys or values of stage {action.stage} are {list(x_BKCH.shape)} in "
                f"{x_BKCH.dtype}, and ranks that share units expect {heads} heads of {size} in "
                f"{self._key_dtype}. Train this model with pp_msp='off'."
            )

    def _key_stores(self, action: Action) -> list[KVStore]:
        """Keys and values of the run of a compute, by layer."""
        stage = action.stage
        runner = self.stores(stage, self.schedule.micro_batch(action), self._run(action))
        return runner.kv_stores(list(self.layers(stage)))

    def _import_keys(self, action: Action) -> None:
        """Before the first unit of a run: keys and values of all chunks before it."""
        run = self._run(action)
        first = run.chunks.start
        if first == 0:
            return
        before = self.runs[action.stage, first - 1]
        unit = action.unit - first
        coming: dict[int, list[Message]] = {}
        for message in self._used.get(action, ()):
            if message.send.kind == "SEND_KV":
                coming.setdefault(message.send.unit - unit, []).append(message)
        stores = self._key_stores(action)
        for chunk in range(first):
            made: list[list[Tensor] | None] = [None] * len(stores)
            for message in coming.get(chunk, ()):
                if self._key_numbers(message):
                    flat = self.transport.take(message.receive)
                    self._place_keys(made, message.made, action, chunk, flat)
            if self.rank in before.ranks:
                there = self._ahead(action, before, max(chunk, before.chunks.start))
                own = self._key_stores(there)
                kept = [keys.keys_and_values(chunk) for keys in own]
                self._place_keys(made, there, action, chunk, kept)
            for keys, tensors in zip(stores, made, strict=True):
                assert tensors is not None, "somebody has each layer's keys"
                keys.put_earlier(chunk, *tensors)

    def _ahead(self, action: Action, before: Run, chunk: int) -> Action:
        """This rank's forward of an earlier chunk of the same stage and micro-batch."""
        unit = action.unit - self.schedule.chunk(action) + chunk
        part = before.ranks.index(self.rank) if before.is_shared else None
        return Action("F", action.stage, unit, None, part)

    def _place_keys(
        self,
        made: list[list[Tensor] | None],
        forward: Action,
        late: Action,
        chunk: int,
        given: _Given,
    ) -> None:
        """Put heads that another set had, or this rank in it, where this run wants them."""
        parts = self._taken_apart(forward, late, chunk, given, of_late=False)
        for index, (layer, _, target, passed) in enumerate(parts):
            tensors = made[index]
            if tensors is None:
                held = len(self._held(layer, late))
                tensors = made[index] = [
                    torch.empty(
                        *(x.shape[0], held, *x.shape[2:]),
                        dtype=self._key_dtype,
                        device=self.transport.device,
                    )
                    for x in passed
                ]
            for tensor, x_BKCH in zip(tensors, passed, strict=True):
                for place, head in enumerate(target):
                    tensor[:, head] = x_BKCH[:, place]

    def _taken_apart(
        self, forward: Action, late: Action, chunk: int, given: _Given, *, of_late: bool
    ) -> Iterator[tuple[LayerProfile, list[int], list[int], list[Tensor]]]:
        """By layer: it, places of heads that pass between two units in both, and the heads, BKCH.

        Where nothing came they are a rank's own, of the later unit with `of_late`.
        """
        start, end = self.bounds[chunk]
        row, row_end = self.rows[self.schedule.micro_batch(late)]
        offset = 0
        for index, (layer, source, target) in enumerate(self._keys_of(forward, late)):
            passed: list[Tensor] = []
            for which, size in enumerate((layer.qk_head_size, layer.v_head_size)):
                if isinstance(given, Tensor):
                    shape = (row_end - row, len(target), end - start, size)
                    numbers = math.prod(shape)
                    passed.append(given[offset : offset + numbers].view(shape))
                    offset += numbers
                else:
                    passed.append(_heads(given[index][which], target if of_late else source))
            yield layer, source, target, passed

    # -- their gradients -----------------------------------------------------------------------

    def _import_sums(self, action: Action) -> None:
        """Before a unit's backward: what later sets add to the gradients of keys."""
        run, chunk = self._run(action), self.schedule.chunk(action)
        if run.chunks.stop == len(self.bounds):
            return
        stores = self._key_stores(action)
        forward = action._replace(kind="F")
        for message in self._used.get(action, ()):
            if message.send.kind == "SEND_DKV" and self._key_numbers(message):
                flat = self.transport.take(message.receive)
                late = message.made._replace(kind="F")
                self._add_sums(stores, forward, late, self.schedule.chunk(message.send), flat)
        after = self.runs[action.stage, run.chunks.stop]
        if self.rank not in after.ranks:
            return
        late = self._ahead(action, after, after.chunks.start)
        for earlier in range(chunk + 1) if chunk == run.chunks.start else (chunk,):
            unit = action.unit - chunk + earlier
            key: tuple[Kind, int, int] = ("SEND_DKV", action.stage, unit)
            ended, _ = self._sums[self._sums_key(key, after)]
            found = [keys.sums(earlier) for keys in ended]
            self._add_sums(stores, forward, late, earlier, found)
            self._release(self._sums_key(key, after))

    def _sums_key(self, key: tuple[Kind, int, int], run: Run) -> tuple[Any, ...]:
        # Sums of one chunk go back from the last set to the one before, and on from there.
        return (*key, run.chunks.start)

    def _add_sums(
        self, stores: list[KVStore], forward: Action, late: Action, chunk: int, given: _Given
    ) -> None:
        parts = self._taken_apart(forward, late, chunk, given, of_late=True)
        for store, (_, source, target, (dk_BKCH, dv_BKCH)) in zip(stores, parts, strict=True):
            if target:
                store.add_sums(chunk, dk_BKCH, dv_BKCH, source)

    def _packed_sums(self, message: Message) -> Tensor:
        key = self._sums_key(
            ("SEND_DKV", message.send.stage, message.send.unit), self._run(message.made)
        )
        flat: list[Tensor] = []
        forward, late = (a._replace(kind="F") for a in (message.used, message.made))
        places, (stores, chunk) = self._keys_of(forward, late), self._sums[key]
        for (_, _, target), keys in zip(places, stores, strict=True):
            flat += (_heads(x_BKCH, target).reshape(-1) for x_BKCH in keys.sums(chunk))
        return torch.cat(flat)

    # -- around units --------------------------------------------------------------------------

    def start(self, action: Action) -> None:
        """A compute comes next: what the one after it needs is on its way from now on."""
        first = self._first.get(action)
        if first is not None and first.ahead == action:
            self.weights.start_fetch(first.stage, first.run)
        ahead = self._fetched_in.get(action)
        if ahead is not None and ahead is not first:
            self.weights.start_fetch(ahead.stage, ahead.run)

    def begin(self, action: Action) -> None:
        """A compute is about to run: weights, keys and gradients of keys are there from now on."""
        visit = self._first.get(action)
        if visit is not None:
            self.weights.wait_for_fetch(visit.stage)
        run, chunk = self._run(action), self.schedule.chunk(action)
        if action.kind == "F":
            if chunk == run.chunks.start:
                self._import_keys(action)
            return
        self._import_sums(action)
        if chunk == run.chunks.start:
            self._ending = self._key_stores(action)

    def end(self, action: Action) -> None:
        """A compute has run."""
        run, chunk = self._run(action), self.schedule.chunk(action)
        self.weights.wait_for_reduce()
        if action.kind != "F" and chunk == run.chunks.start:
            self._keep_sums(action, run)
            if run.is_shared:
                self.weights.start_reduce(action.stage, run)
        visit = self._last.get(action)
        if visit is not None:
            self.weights.drop(visit.stage)

    def _keep_sums(self, action: Action, run: Run) -> None:
        first = run.chunks.start
        if first == 0:
            return
        stores, self._ending = self._ending, []
        before = self.runs[action.stage, first - 1]
        for chunk in range(first):
            unit = action.unit - first + chunk
            key = self._sums_key(("SEND_DKV", action.stage, unit), run)
            for keys in stores:
                keys.drop_keys(chunk)
            takers = self._sum_sends(action, unit) + (self.rank in before.ranks)
            assert takers, "each rank of a run has heads that ranks of the one before had"
            self._left[key] = takers
            self._sums[key] = stores, chunk

    def _sum_sends(self, action: Action, unit: int) -> int:
        return sum(
            message.made == action and message.send.unit == unit
            for send, message in self._messages.items()
            if send.kind == "SEND_DKV"
        )

    # -- messages ------------------------------------------------------------------------------

    def send(self, action: Action) -> None:
        """Carry out a send; one without numbers is none."""
        message = self._messages[action]
        if action.kind in ("SEND_KV", "SEND_DKV"):
            if self._key_numbers(message):
                forward = action.kind == "SEND_KV"
                flat = self._packed_keys(message) if forward else self._packed_sums(message)
                self.transport.send(flat, message.target)
            if action.kind == "SEND_DKV":
                key = (action.kind, action.stage, action.unit)
                self._release(self._sums_key(key, self._run(message.made)))
            return
        low, high = self._overlap(message)
        key = (action.kind, action.stage, action.unit)
        if low < high:
            first, made = self._made[key]
            self.transport.send(made[:, low - first : high - first], message.target)
        self._release(key)

    def receive(self, action: Action) -> None:
        """Start a receive."""
        message = self._messages[action]
        if action.kind in ("RECV_KV", "RECV_DKV"):
            numbers = self._key_numbers(message)
            dtype = self._key_dtype
            if action.kind == "RECV_DKV":
                dtype = torch.promote_types(dtype, torch.float32)
            if numbers:
                self.transport.receive(action, (numbers,), dtype, message.source)
            return
        low, high = self._overlap(message)
        if low < high:
            shape = self._shape(message.used, message.made.stage, high - low)
            self.transport.receive(action, shape, self._dtype, message.source)

    def finished(self) -> bool:
        """Whether nothing waits to be taken any more."""
        return not self._made and not self._sums


def _heads(x_BKCH: Tensor, places: list[int]) -> Tensor:
    """Some heads; not by an index, whose copy to the device the host would wait for."""
    if not places:
        return x_BKCH[:, :0]
    if places == list(range(places[0], places[-1] + 1)):
        return x_BKCH[:, places[0] : places[-1] + 1]
    return torch.cat([x_BKCH[:, head : head + 1] for head in places], dim=1)


def _compute_of(schedule: Schedule) -> Schedule:
    return schedule.keep(lambda action: action.kind in ("F", "B"))
