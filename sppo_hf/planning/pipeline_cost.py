"""PipelineCost: seconds and bytes of every action of a schedule over ranks, for a real model.

`sppo_hf.schedule.simulate` reads them. They come from ModelCost and from the byte tables of the
memory estimate, so a pipeline of one rank and the planner agree.

[Note: K/V on the host] Blocks of earlier K/V are copied while the attention that reads them runs,
as actions of their own (K, O; L and S behind the host) on the resources of activation
copies. Each rank that shares a unit copies its own heads.

[Note: what a rank is] A rank of a schedule stands for all devices that share its units by sequence
parallelism (`ModelCost.sp`); seconds and bytes are those of one of them, and messages go from each
to its counterpart on the other rank. Where ranks share a unit, all their devices are one larger
group.

[Note: more devices than heads] Where the devices of a shared unit are more than query heads,
several have the same head and divide its queries; then each holds that head's K/V whole. Where
they cannot divide heads evenly (`count_head_blocks`), the one with most sets the pace; its K/V are
counted as even shares.

[Note: weights of shared units] A rank that shares units of a stage not its own needs its weights
(`sppo_hf.pipeline.multiplex` says when): frozen ones are on every rank, of others the memory of one
more stage is counted, and their transfer beside the first and the last unit of a run. Each device
of a group receives its share from its counterpart on the other rank and the rest from neighbours.

[Note: slices of keys and values] Each run of a stage's chunks with the same ranks has a K/V store
of its own, as in `sppo_hf.pipeline.multiplex`, so a rank may hold a chunk's slices twice:
- From the first unit of a run on, its ranks have their heads of all chunks before, too, until the
  run's last backward has ended. What other ranks send for that stays on the device until that unit.
- A run's first backward makes dK/dV sums for all of these chunks, which are kept on the tier of K/V
  until they are added to those of the run before. Received sums are on the device until then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sppo_hf.errors import ConfigError
from sppo_hf.planning.activation_modes import SAVED, Saved
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Batch, Order
from sppo_hf.planning.memory import (
    CAUSE_OF_SAVED,
    CONTEXT_BYTES,
    Bytes,
    ByteTables,
    Cause,
    byte_tables,
)
from sppo_hf.planning.model_profile import count_head_blocks
from sppo_hf.planning.policies import sppo_leaving
from sppo_hf.planning.stages import StageWeights, balanced_stages, kv_copies_of
from sppo_hf.planning.tiers import HOST, TIERS, Tier
from sppo_hf.planning.tile_sizes import kv_block_tokens
from sppo_hf.schedule.actions import (
    KV_COPY_KINDS,
    Action,
    Kind,
    is_kv_copy,
    kv_copy_pass,
    kv_copy_share,
    unit_share,
)
from sppo_hf.schedule.lower import KVCopy, lower
from sppo_hf.schedule.messages import SENDS, ChunkRun, Message, chunk_runs, messages
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import Change, simulate_pipeline
from sppo_hf.schedule.timeline import Timeline

OffloadRule = Literal["none", "full", "sppo"]
"""How much of the saved activations is offloaded: nothing, all, or the paper's share."""

_RECEIVES: frozenset[Kind] = frozenset(SENDS.values())
"""Receives only mark an arrival: they take no time, and the send counts the bytes."""

_KV_SENDS: tuple[Kind, ...] = ("SEND_KV", "SEND_DKV")

_Key = tuple[Kind, int, int, int | None]
"""Kind, stage, chunk and part of an action."""


# No slots: a cached property needs the instance's dictionary.
@dataclass(frozen=True)
class PipelineCost:
    """Costs of all stages of a model, one sequence of `bounds` per micro-batch and row.

    Raises:
        ConfigError: the schedule has more stages than the model has layers.
    """

    schedule: Schedule = field(repr=False)
    """Compute actions alone; defines stages, their ranks, and shared units."""

    cost: ModelCost
    """Costs of layers on one device; its `batch_rows` are the rows of a micro-batch."""

    bounds: Bounds
    _: KW_ONLY

    split: tuple[range, ...] = ()
    """Layers of each stage; balanced by cost where empty."""

    saved: Saved = "whole"
    """The activations that each layer saves for backward; the rest is recomputed."""

    offload: OffloadRule = "none"
    """The part of these that is offloaded."""

    activation_tier: Tier = HOST
    kv_tier: Tier = "device"
    """Tier of K/V and of their accumulated gradients."""

    link_bytes_per_second: float = float("inf")
    """Rate between ranks of different nodes, each way."""

    node_bytes_per_second: float | None = None
    """Rate between ranks of one node; None: as between nodes."""

    rank_nodes: tuple[Hashable, ...] = ()
    """Node of each rank; empty if all are on different nodes."""

    devices_per_node: int = 8
    reduce_seconds: float = 0.0
    """Seconds that reducing a stage's gradients over replicas of the pipeline takes."""

    _seconds: dict[_Key, float] = field(
        default_factory=dict[_Key, float], init=False, repr=False, compare=False
    )
    _changes: dict[_Key, tuple[Change, ...]] = field(
        default_factory=dict[_Key, tuple[Change, ...]], init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        assert self.schedule.num_chunks == len(self.bounds), "a unit is a chunk of a micro-batch"
        assert self.stages, "raises here, rather than at the first use, if there are too few layers"

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """Layers of each stage."""
        return self.split or balanced_stages(self.cost, self.bounds, self.schedule.num_stages)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return self.schedule.stage_ranks

    @cached_property
    def _micro_batch(self) -> Schedule:
        """The first micro-batch; all others cost the same."""
        return self.schedule.keep(lambda action: action.unit < len(self.bounds))

    @cached_property
    def _runs(self) -> dict[tuple[int, int], ChunkRun]:
        """The run of each (stage, chunk)."""
        return chunk_runs(self._micro_batch)

    @cached_property
    def _messages(self) -> dict[Action, Message]:
        """Messages of a micro-batch by their send."""
        return messages(self._micro_batch)

    @cached_property
    def ratios(self) -> tuple[tuple[float, ...], ...]:
        """[stages][chunks] Share of saved activations that is offloaded; empty without offload."""
        if self.offload == "none":
            return ()
        if self.offload == "full":
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
                # K/V take a part of the copy bandwidth while forwards run.
                self._streamed["F"][1].sum(axis=1).tolist(),
                strict=True,
            )
        )

    def leaves(self, stage: int, unit: int) -> bool:
        """Returns whether any saved activations of a unit are offloaded."""
        return bool(self.ratios) and self.ratios[stage][unit % len(self.bounds)] > 0

    def stores(self, stage: int, unit: int) -> bool:
        """Returns whether saved activations of a unit are stored on a tier behind the host."""
        return TIERS[self.activation_tier].behind_host and self.leaves(stage, unit)

    @property
    def kv_copies(self) -> frozenset[KVCopy]:
        """Copies of K/V beside units."""
        if self.kv_tier == "device":
            return frozenset()
        return kv_copies_of(self._tables, self.kv_tier, list(self._counts))

    def lowered(self, schedule: Schedule, *, reduce: bool = False) -> Schedule:
        """Returns a schedule of compute with transfers, copies and reductions added."""
        leaves, stores, kv_copies = self.leaves, self.stores, self.kv_copies
        return lower(schedule, offloaded=leaves, stored=stores, kv_copies=kv_copies, reduce=reduce)

    def simulate(self, lowered: Schedule) -> Timeline:
        """Simulates a lowered schedule, with the bytes of every rank's tiers."""
        return simulate_pipeline(
            lowered, seconds=self.seconds, changes=self.changes, standing=self.standing()
        )

    def seconds(self, action: Action) -> float:
        """Returns how long an action takes."""
        kind, stage, unit, _, part = action
        if kind in _RECEIVES:
            return 0.0
        key = (kind, stage, unit % len(self.bounds), part)
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds[key] = self._timed(*key)
        return found

    def changes(self, action: Action) -> tuple[Change, ...]:
        """Returns the bytes that an action allocates and frees, on "R.device", "R.host" and so on.

        A send also allocates the receiver's buffer, so the schedule must have its sends where
        neighbouring stages are on different ranks.
        """
        kind, stage, unit, _, part = action
        if kind in _RECEIVES or kind in KV_COPY_KINDS:
            return ()  # bytes of K/V are changed by their unit
        key = (kind, stage, unit % len(self.bounds), part)
        found = self._changes.get(key)
        if found is None:
            changed = self._passed(*key) if kind in SENDS else self._changed(*key)
            found = self._changes[key] = tuple([change for change in changed if change[2]])
        return found

    def standing(self) -> Iterator[Change]:
        """Yields the bytes that every rank holds throughout the step."""
        for rank in sorted(set(self.stage_ranks)):
            device = f"{rank}.device"
            yield Change(device, Cause.RESERVE, CONTEXT_BYTES[self.cost.profile.kind])
        for rank, held in zip(self.stage_ranks, self._weights, strict=True):
            device = f"{rank}.device"
            yield Change(device, Cause.WEIGHTS, held.weights)
            yield Change(device, Cause.GRADIENTS, held.gradients)
            yield Change(device, Cause.OPTIMIZER, held.optimizer)
        if len(self.stages) == 1 and self.schedule.num_micro_batches > 1:
            # No pipeline: rows are batches whose gradients are accumulated. Autograd sums those of
            # one beside those of the batches before.
            yield Change("0.device", Cause.GRADIENTS, self.cost.shape.gradient_bytes)
        # The stages of other ranks whose units each rank shares.
        helped: dict[int, set[int]] = {}
        for (stage, _), run in self._runs.items():
            for rank in run.ranks:
                if rank != self.stage_ranks[stage]:
                    helped.setdefault(rank, set()).add(stage)
        for rank, stages in sorted(helped.items()):
            others = [self._weights[stage] for stage in sorted(stages)]
            device, most = f"{rank}.device", sum if self._frozen else max
            yield Change(device, Cause.WEIGHTS, most(w.weights for w in others))
            if not self._frozen:
                yield Change(device, Cause.GRADIENTS, most(w.gradients for w in others))

    def own_kv_bytes(self, stage: int) -> dict[Tier, int]:
        """Returns bytes of a stage's K/V and dK/dV of a row: on their tier, and in passing."""
        whole = {self.kv_tier: int(self._kv[stage].sum() + self._dkv[stage].sum())}
        if self.kv_tier == "device":
            return whole
        _, kv, dkv = self._tables.kv_in_transit
        return {**whole, "device": int((kv + dkv).max())}

    def activation_bytes(self, stage: int, chunk: int) -> int:
        """Returns saved bytes of a chunk in all layers of a stage."""
        return int(self._frames[stage, chunk])

    def message_bytes(self, stage: int, chunk: int) -> int:
        """Returns the bytes that a stage receives for a chunk; their gradient has as many."""
        shape, (start, end) = self.cost.shape, self.bounds[chunk]
        size = shape.message_bytes_per_token(self.stages[stage][0])
        return size * self.cost.batch_rows * shape.tokens_per_rank(end - start)

    def rate(self, rank: int, other: int) -> float:
        """Returns the bytes per second between two ranks, each way."""
        nodes = self.rank_nodes
        if self.node_bytes_per_second is not None and nodes and nodes[rank] == nodes[other]:
            return self.node_bytes_per_second
        return self.link_bytes_per_second

    # -- seconds -------------------------------------------------------------------------------

    def _passed_seconds(self, message: Message) -> float:
        """Seconds of a send."""
        size = self._passed_bytes(message)
        seconds = size / self.rate(message.source, message.target)
        if message.send.kind == "SEND_DKV" and self.kv_tier != "device":
            seconds += self.cost.h2d_seconds(size, both=True)
            if TIERS[self.kv_tier].behind_host:
                seconds += self.cost.load_seconds(self.kv_tier, size)
        return seconds

    def _passed_bytes(self, message: Message) -> int:
        """Bytes of a message."""
        kind, stage, chunk, _, _ = message.send
        if kind in ("SEND_F", "SEND_B"):
            given = stage + (kind == "SEND_F")
            return int(self.message_bytes(given, chunk) * message.share)
        sizes = self._kv if kind == "SEND_KV" else self._dkv
        end = message.consumer if kind == "SEND_KV" else message.producer
        copies = self._copies(self._runs[end.stage, end.unit])
        return int(int(sizes[stage, chunk]) * message.share * copies)

    def _copies(self, run: ChunkRun) -> float:
        """Copies of K/V among ranks, above 1 where several have the same head; see the note."""
        if not run.is_shared:
            return 1.0
        heads = max(1, *(layer.num_heads for layer in self.cost.shape.layers))
        return max(1.0, self.cost.sp * len(run.ranks) / heads)

    def _share(self, run: ChunkRun) -> float:
        """Share of K/V that each rank of a run has."""
        return self._copies(run) / len(run.ranks)

    def _timed(self, kind: Kind, stage: int, chunk: int, part: int | None) -> float:
        action = Action(kind, stage, chunk, None, part)
        if kind in SENDS:
            return self._passed_seconds(self._messages[action])
        if kind == "REDUCE_GRAD":
            return self.reduce_seconds
        share = 1 / len(self._runs[stage, chunk].ranks)
        if is_kv_copy(action):
            forward = kv_copy_pass(action) == (0 if kind in ("K", "O") else 1)
            slices = self._streamed_slices(stage, chunk, kv_copy_share(action), forward=forward)
            streamed = (int(size[stage, chunk]) for size in self._streamed["F" if forward else "B"])
            come, leave = (int(n * share) + m for n, m in zip(streamed, slices, strict=True))
            return self._copied_seconds(kind, self.kv_tier, come if kind in "KL" else leave)
        if kind in ("S", "L", "D", "H"):
            size = self._leaving_bytes(stage, chunk)
            return self._copied_seconds(kind, self.activation_tier, size) * share
        if kind not in self._compute:
            return 0.0
        return self._computing_seconds(kind, stage, chunk)

    def _copied_seconds(self, kind: Kind, tier: Tier, size: int) -> float:
        """Seconds of a copy to or from the host, or of a write to or a read from a tier."""
        cost = self.cost
        if kind in ("S", "L"):
            return (cost.store_seconds if kind == "S" else cost.load_seconds)(tier, size)
        return (cost.d2h_seconds if kind in ("D", "O") else cost.h2d_seconds)(size, both=True)

    def _streamed_slices(
        self, stage: int, chunk: int, part: int, *, forward: bool
    ) -> tuple[int, int]:
        """Extra bytes to and from the device because each run of chunks has its own K/V store.

        Before a run's first unit, slices of all earlier chunks; in backward, dK/dV sums to which
        those of the following run are added.
        """
        run = self._runs[stage, chunk]
        begins, before, rank = chunk == run.chunks.start, range(run.chunks.start), run.ranks[part]
        if forward:
            if not begins or not before:
                return 0, 0
            earlier = self._runs[stage, chunk - 1]
            own = self._slice(self._kv, stage, chunk - 1, before) if rank in earlier.ranks else 0
            return own, self._slice(self._kv, stage, chunk, before)
        if run.chunks.stop == len(self.bounds):
            return 0, 0
        added = range(chunk + 1) if begins else range(chunk, chunk + 1)
        action = Action("B", stage, chunk, None, part if run.is_shared else None)
        senders = {m.source for m in self._received.get(action, ()) if m.send.kind == "SEND_DKV"}
        sums, last = self._slice(self._dkv, stage, chunk, added), run.chunks.stop
        # Each is added by itself; for the run's last chunk nothing is there before the first.
        come, leave = (len(senders) - (chunk == last - 1)) * sums, len(senders) * sums
        if rank in self._runs[stage, last].ranks:
            come, leave = come + sums, leave + sums
            come += self._slice(self._dkv, stage, last, added)
        return max(0, come), leave

    def _computing_seconds(self, kind: Kind, stage: int, chunk: int) -> float:
        chunks, ranks = self._runs[stage, chunk]
        if len(ranks) == 1:
            return float(self._compute[kind][stage, chunk])
        # All devices of these ranks exchange heads; the slowest hop between them counts.
        rate = min(self.rate(a, b) for a, b in combinations(ranks, 2))
        rate = min(rate, self.cost.all_to_all_bytes_per_second)
        if (len(ranks), rate) not in self._of_ranks:
            sp = self.cost.sp * len(ranks)
            blocks = head_blocks_of(self.cost, self.schedule.num_ranks)
            cost = self.cost.with_sequence_parallel(sp, rate, blocks)
            self._of_ranks[len(ranks), rate] = self._added_up(cost)
        seconds = float(self._of_ranks[len(ranks), rate][kind][stage, chunk])
        if self._frozen:
            return seconds
        held, group = self._weights[stage], min(self.cost.sp, self.devices_per_node)
        begins, ends = chunk == chunks.start, chunk == chunks[-1]
        size = held.weights * (begins if kind == "F" else ends)
        size += held.gradients * (begins and kind in ("B", "W"))
        near = self.node_bytes_per_second or self.link_bytes_per_second
        hop = min(self.rate(a, b) for a, b in combinations(ranks, 2))
        return max(seconds, size / group / hop + size * (group - 1) / group / near)

    @cached_property
    def _frozen(self) -> bool:
        """Whether ranks keep a copy of other stages' weights: those that do not train."""
        return self.cost.shape.lora is not None

    @cached_property
    def _weights(self) -> tuple[StageWeights, ...]:
        return tuple(StageWeights.of(self.cost.shape, layers) for layers in self.stages)

    @cached_property
    def _compute(self) -> dict[Kind, NDArray[np.float64]]:
        """Seconds of a unit in all layers of its stage, [stages, chunks], by kind of compute."""
        return self._added_up(self.cost)

    @cached_property
    def _of_ranks(self) -> dict[tuple[int, float], dict[Kind, NDArray[np.float64]]]:
        """`_compute` for units shared by some ranks that exchange heads at some bytes/s."""
        return {}

    def _added_up(self, cost: ModelCost) -> dict[Kind, NDArray[np.float64]]:
        work, counts = cost.unit_seconds(self.bounds), self._counts
        forward = counts @ work.forward
        forward[-1] += work.head
        backward = counts @ (work.backward + work.recompute[:, SAVED.index(self.saved)])
        weight = counts @ work.weight
        return {"F": forward, "B": backward, "I": backward - weight, "W": weight}

    @cached_property
    def _streamed(self) -> dict[Kind, tuple[Bytes, Bytes]]:
        """[stages, chunks] Bytes of K/V and sums copied to the device and from it, by pass."""
        tables, counts = self._tables, self._counts
        return {
            "F": (counts @ tables.kv_in_forward, counts @ tables.kv_out_forward),
            "B": (counts @ tables.kv_in_backward, counts @ tables.kv_out_backward),
        }

    # -- bytes ---------------------------------------------------------------------------------

    def _changed(self, kind: Kind, stage: int, chunk: int, part: int | None) -> Iterator[Change]:
        """Changes by one rank's action; for a shared unit, its share of the whole unit's."""
        if is_kv_copy(Action(kind, stage, chunk, None, part)):
            return  # bytes of K/V are changed by their unit
        if kind in ("F", "B", "I"):
            yield from self._unit_changed(kind, stage, chunk, part)
        ranks = self._runs[stage, chunk].ranks
        if len(ranks) == 1:
            yield from self._changed_whole(kind, stage, chunk, ranks[0])
            return
        share = unit_share(Action(kind, stage, chunk, None, part)) or 0
        for change in self._changed_whole(kind, stage, chunk, ranks[share]):
            # Each rank has an autograd graph of its own, with as many nodes for fewer tokens.
            parts = 1 if Cause(change.cause) is Cause.GRAPH else len(ranks)
            yield change._replace(num_bytes=int(change.num_bytes / parts))

    def _passed(self, kind: Kind, stage: int, chunk: int, part: int | None) -> Iterator[Change]:
        """Changes by a send, of bytes that the units at both ends do not count.

        The sender's buffer is there until it is sent, the receiver's until its unit uses it.
        """
        message = self._messages[Action(kind, stage, chunk, None, part)]
        size = self._passed_bytes(message)
        source, target = (f"{r}.device" for r in (message.source, message.target))
        yield Change(target, Cause.KV if kind == "SEND_KV" else Cause.MESSAGES, size)
        if kind == "SEND_DKV":  # packed when it is sent; see the note on slices
            yield Change(source, Cause.MESSAGES, size)
            if message.source not in self._runs[stage, message.consumer.unit].ranks:
                yield Change(f"{message.source}.{self.kv_tier}", Cause.DKV, -size)
        yield Change(source, Cause.MESSAGES, -size, "end")

    def _unit_changed(
        self, kind: Kind, stage: int, chunk: int, part: int | None
    ) -> Iterator[Change]:
        """Changes of messages, K/V and dK/dV by one rank of a unit; see the note on slices."""
        run, action = self._runs[stage, chunk], Action(kind, stage, chunk, None, part)
        rank = run.ranks[part or 0]
        device, waits = (f"{rank}.{tier}" for tier in ("device", self.kv_tier))
        begins, away = chunk == run.chunks.start, self.kv_tier != "device"
        these = range(chunk + 1) if begins else range(chunk, chunk + 1)
        (received, came), (given, packed) = (
            [
                sum(self._passed_bytes(m) for m in messages if (m.send.kind in _KV_SENDS) == of_kv)
                for of_kv in (False, True)
            ]
            for messages in (self._received.get(action, ()), self._sent.get(action, ()))
        )
        if away:
            forward, backward, sums = (int(sizes[chunk]) for sizes in self._tables.kv_in_transit)
            passing = {Cause.KV: forward} if kind == "F" else {Cause.KV: backward, Cause.DKV: sums}
            share = self._share(run)
            yield from _during(device, {cause: int(n * share) for cause, n in passing.items()})
        yield Change(device, Cause.MESSAGES, given, "end")
        # What a forward receives becomes part of its saved activations; a backward frees its input.
        yield Change(device, Cause.MESSAGES, -received, "start" if kind == "F" else "end")
        if kind == "F":
            yield Change(device, Cause.MESSAGES, packed, "end")
            yield Change(waits, Cause.KV, self._slice(self._kv, stage, chunk, these))
            yield Change(device, Cause.KV, -came, "end" if away else "start")
            return
        yield Change(device, Cause.MESSAGES, -came)
        if run.chunks.stop < len(self.bounds) and rank in self._runs[stage, run.chunks.stop].ranks:
            yield Change(waits, Cause.DKV, -self._slice(self._dkv, stage, run.chunks.stop, these))
        if chunk == run.chunks.stop - 1:
            all_before = range(chunk + 1)
            yield Change(waits, Cause.DKV, self._slice(self._dkv, stage, chunk, all_before))
        yield Change(waits, Cause.KV, -self._slice(self._kv, stage, chunk, these), "end")
        own = range(chunk, chunk + 1)
        yield Change(waits, Cause.DKV, -self._slice(self._dkv, stage, chunk, own), "end")

    def _slice(self, sizes: Bytes, stage: int, chunk: int, chunks: range) -> int:
        """Sum over `chunks` of [stages, chunks] bytes, a rank's share in the run of `chunk`."""
        share = self._share(self._runs[stage, chunk])
        return sum(int(sizes[stage, other] * share) for other in chunks)

    @cached_property
    def _received(self) -> dict[Action, list[Message]]:
        """Messages that each unit needs."""
        return _grouped(self._messages.values(), lambda message: message.consumer)

    @cached_property
    def _sent(self) -> dict[Action, list[Message]]:
        """Messages that each unit makes."""
        return _grouped(self._messages.values(), lambda message: message.producer)

    def _changed_whole(self, kind: Kind, stage: int, chunk: int, rank: int) -> Iterator[Change]:
        device, host = f"{rank}.device", f"{rank}.host"
        cause = CAUSE_OF_SAVED[self.saved]
        held = {why: int(sizes[stage, chunk]) for why, sizes in self._until_backward.items()}
        held[cause] = self.activation_bytes(stage, chunk)
        if kind == "F":
            yield from (Change(device, why, size) for why, size in held.items())
        if kind in ("F", "B", "I"):
            forward, backward = self._workspaces
            sizes = {Cause.WORKSPACE: (forward if kind == "F" else backward)[chunk]}
            if stage == len(self.stages) - 1 and kind == "F":
                # Layers and loss do not run at the same time.
                loss = int(self._tables.logits[chunk]) - sizes[Cause.WORKSPACE]
                sizes[Cause.LOGITS_TILE] = max(0, loss)
            yield from _during(device, sizes)
        if kind in ("B", "W"):
            yield from (Change(device, why, -size, "end") for why, size in held.items())
        if kind not in ("D", "H", "S", "L"):
            return
        size, behind = self._leaving_bytes(stage, chunk), f"{rank}.{self.activation_tier}"
        if kind in ("D", "H"):
            source, target = (device, host) if kind == "D" else (host, device)
            yield Change(target, cause, size)
            yield Change(source, cause, -size, "end")
            if kind == "H" and TIERS[self.activation_tier].behind_host:
                yield Change(behind, cause, -size, "end")
        elif kind == "S":  # on the host only on their way
            yield Change(behind, cause, size)
            yield Change(host, cause, -size, "end")
        else:
            yield Change(host, cause, size)

    def _leaving_bytes(self, stage: int, chunk: int) -> int:
        return round(self.ratios[stage][chunk] * self.activation_bytes(stage, chunk))

    @cached_property
    def _until_backward(self) -> dict[Cause, Bytes]:
        """[stages, chunks] Bytes of each cause in `ByteTables.until_backward`."""
        tables = self._tables.until_backward
        return {cause: self._counts @ table for cause, table in tables.items()}

    @cached_property
    def _workspaces(self) -> tuple[list[int], list[int]]:
        """[chunks] Temporaries of the layer with most, in forward and in backward."""
        tables = self._tables
        backward = tables.workspace_backward[:, SAVED.index(self.saved)]
        return tables.workspace_forward.max(axis=0).tolist(), backward.max(axis=0).tolist()

    @cached_property
    def _counts(self) -> Bytes:
        """[stages, kinds] Number of layers."""
        kind_of, kinds = self._tables.kind_of, len(self._tables.kinds)
        return np.array([np.bincount(kind_of[list(s)], minlength=kinds) for s in self.stages])

    @cached_property
    def _kv(self) -> Bytes:
        """[stages, chunks] Bytes of K/V."""
        return self._counts @ self._tables.kv

    @cached_property
    def _dkv(self) -> Bytes:
        """[stages, chunks] Bytes of dK/dV sums, which later chunks write."""
        return self._counts @ self._tables.dkv

    @cached_property
    def _frames(self) -> Bytes:
        """[stages, chunks] Bytes of saved activations."""
        return self._counts @ self._tables.saved[:, SAVED.index(self.saved)]

    @cached_property
    def _tables(self) -> ByteTables:
        shape, profile, rows = self.cost.shape, self.cost.profile, self.cost.batch_rows
        kind = profile.kind
        batch = Batch(batch_rows=rows, training=True, tile_tokens=self.cost.loss_tile_tokens)
        decisions = batch.decisions(self.bounds, shape.num_layers)
        if self.kv_tier == "device":
            return byte_tables(shape, decisions, kind)
        block = kv_block_tokens(
            shape,
            self.bounds[-1][1],
            batch_rows=rows,
            device_kind=kind,
            device_bytes=self.cost.profile.device_bytes,
        )
        decisions = replace(decisions, kv_tier=self.kv_tier, kv_block_tokens=block)
        return byte_tables(shape, decisions, kind)


def _gather_seconds(cost: ModelCost, bounds: Bounds, kind: Kind, chunk: int) -> float:
    """Seconds in which FSDP2 gathers the weights of a model's unit.

    Those of all layers and of the embedding for every unit, except a frozen embedding's in
    backward. Norm and head stay from the first forward to the first backward, and then come for
    every backward; with them a tied embedding, which stays throughout.
    """
    found, shape = sum(map(cost.gather_seconds, range(cost.shape.num_layers))), cost.shape
    of_head = chunk == 0 if kind == "F" else chunk < len(bounds) - 1 and not shape.tied
    of_embedding = not shape.tied and (kind == "F" or shape.embedding_trained)
    return found + (of_head + of_embedding) * cost.gather_seconds(None)


def gather_stall_seconds(cost: ModelCost, bounds: Bounds, saved: Saved, *, order: Order) -> float:
    """Returns the seconds that a row waits for gathered weights.

    By layer a layer's come once in each direction, while another layer runs over all chunks. With
    the last layer's come norm and head, which stay until backward; nothing runs before an embedding
    of their own has come. By chunk all come for every chunk, each while the layer before runs.
    """
    shape, head = cost.shape, cost.gather_seconds(None)
    if order == "by_chunk":
        stalled, heads = 0.0, cost.unit_seconds(bounds).head.tolist()
        for chunk, head_seconds in enumerate(heads):
            forward, backward = map(sum, _layer_seconds(cost, bounds, saved, chunk))
            coming, back = (_gather_seconds(cost, bounds, kind, chunk) for kind in ("F", "B"))
            stalled += max(0.0, coming - forward - head_seconds) + max(0.0, back - backward)
        return stalled
    layers = [cost.gather_seconds(layer) for layer in range(shape.num_layers)]
    forward, backward = _layer_seconds(cost, bounds, saved)
    ahead, back = layers[:], layers[:]
    ahead[-1] += head
    back[0] += head * (shape.embedding_trained and not shape.tied)
    waits = [
        max(0.0, coming - computing)
        for coming, computing in zip([*ahead, *back], [*forward, *backward], strict=True)
    ]
    return sum(waits) + head * (not shape.tied)


def exposed_reduce_seconds(cost: ModelCost, bounds: Bounds, saved: Saved, *, order: Order) -> float:
    """Returns the seconds of FSDP2's reductions of all gradients that no compute hides.

    A layer's gradients are reduced while the layer below it runs backward, and weights are gathered
    over the same links. By chunk that is all in the last backward, of the first chunk: autograd
    gives a gradient when it has summed it over all chunks.
    """
    gathering = [cost.gather_seconds(layer) for layer in range(cost.shape.num_layers)]
    reducing = [cost.reduce_seconds(layer) for layer in range(cost.shape.num_layers)]
    head = cost.reduce_seconds(None)
    reducing[-1] += head
    by_layer = order == "by_layer"
    _, computing = _layer_seconds(cost, bounds, saved, chunk=None if by_layer else 0)
    if not by_layer:
        computing, reducing = [sum(computing)], [sum(reducing)]
        gathering = [_gather_seconds(cost, bounds, "B", 0)]
    exposed = sum(
        max(seconds, coming + leaving) - max(seconds, coming)
        for seconds, coming, leaving in zip(computing, gathering, reducing, strict=True)
    )
    # The embedding's, which come last, are behind all compute.
    return exposed + head * (not cost.shape.tied)


def _layer_seconds(
    cost: ModelCost, bounds: Bounds, saved: Saved, chunk: int | None = None
) -> tuple[list[float], list[float]]:
    """Seconds of each layer's forward and backward, over all chunks or one."""
    work, shape = cost.unit_seconds(bounds), cost.shape
    counted = slice(None) if chunk is None else slice(chunk, chunk + 1)
    place = {kind: at for at, kind in enumerate(sorted(set(shape.layer_kinds)))}
    kinds = [place[kind] for kind in shape.layer_kinds]
    backward = work.backward + work.recompute[:, SAVED.index(saved)]
    forward, backward = (x[kinds, counted].sum(axis=1) for x in (work.forward, backward))
    return forward.tolist(), backward.tolist()


def head_blocks_of(cost: ModelCost, num_ranks: int) -> int | None:
    """Returns `count_head_blocks` of a pipeline of `num_ranks` ranks that share units.

    None, as for heads that can be divided evenly, if the runtime refuses to share units.
    """
    attending = [layer for layer in cost.shape.layers if layer.num_heads]
    if cost.sp > 1 or not attending:
        return None
    try:
        return count_head_blocks(attending, num_ranks, "the model")
    except ConfigError:
        return None


def extra_shared_unit_bytes(costs: PipelineCost, schedule: Schedule, rank: int) -> dict[Tier, int]:
    """Returns bytes that a rank with shared units holds beside its own stage's K/V, by tier.

    The maximum over the step, of K/V, dK/dV and messages (see the note on slices), less one row's
    K/V and dK/dV, which the stage's own plan counts.
    """
    lowered = lower(schedule, kv_copies=costs.kv_copies)
    timeline = simulate_pipeline(lowered, seconds=costs.seconds, changes=costs.changes)
    own = costs.own_kv_bytes(costs.stage_ranks.index(rank))
    found: dict[Tier, int] = {}
    for tier in TIERS:
        curves = timeline.curves_by_cause(f"{rank}.{tier}")
        steps: list[tuple[float, int]] = []
        for cause in (Cause.KV, Cause.DKV, Cause.MESSAGES):
            curve = [(0.0, 0), *curves.get(cause, ())]
            steps += ((at, size - before) for (_, before), (at, size) in pairwise(curve))
        most = max(accumulate(size for _, size in sorted(steps)), default=0)
        if most > own.get(tier, 0):
            found[tier] = most - own.get(tier, 0)
    return found


def _grouped(
    found: Iterable[Message], end: Callable[[Message], Action]
) -> dict[Action, list[Message]]:
    by_end: dict[Action, list[Message]] = {}
    for message in found:
        by_end.setdefault(end(message), []).append(message)
    return by_end


def _during(device: str, sizes: dict[Cause, int]) -> Iterator[Change]:
    """Yields changes of bytes that are held while an action runs."""
    for cause, size in sizes.items():
        yield Change(device, cause, size)
        yield Change(device, cause, -size, "end")
