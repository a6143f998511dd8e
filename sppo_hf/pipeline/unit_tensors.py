"""What goes into and comes out of a rank's units: hidden states, K/V, and the gradients of both.

`UnitTensors` assembles a unit's input from the messages of other ranks and from what this rank
computed itself, keeps its output until all have read it, and carries out sends and receives. If
ranks share units, it also passes K/V and their gradients on from one set of ranks to the next; see
[Note: what the paper leaves open] in `multiplex`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sppo_hf.attention.kv_cache import KVStore
from sppo_hf.engine.chunk_runner import ChunkRunner
from sppo_hf.engine.sequence_group import (
    SequenceGroup,
    held_kv_heads,
    kv_head_transfers,
    rank_tokens,
)
from sppo_hf.errors import PipelineError
from sppo_hf.pipeline.multiplex import weight_uses
from sppo_hf.planning.model_profile import LayerProfile
from sppo_hf.schedule.actions import Action, Kind
from sppo_hf.schedule.messages import ChunkRun, Message

if TYPE_CHECKING:
    from sppo_hf.pipeline.executor import Transport
    from sppo_hf.pipeline.stage_plans import PreparedStep

# B batch rows, C tokens of a chunk, c tokens of a part of it, W width of a message, N query heads,
# K key/value heads, H head size.

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
