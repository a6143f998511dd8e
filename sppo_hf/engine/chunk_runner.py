"""One forward call in chunks: what lives between its first chunk and its last backward.

By chunk, a `ChunkRunner` runs the untouched base model on each slice of tokens; by layer, once on
all of them, and each decoder layer's hooks run the layer's forward on each slice. Either way the
hooks call `before_layer` and `after_layer`, which open and close the saved activations of each
(layer, chunk); in between, attention finds layer, chunk, keys and values in the `ChunkContext`, and
the saved activations decide what becomes of the tensors that autograd saves.

[Note: the reverse walk] Nothing here runs backward. The chunks' graphs are connected through the
links of `sppo_hf.attention.chunk_attention`, so a plain `loss.backward()` walks them from the last
chunk to the first, and saved activations are prefetched or recomputed when autograd asks for them.

[Note: what saved activations must not hold] A link has a grad_fn, whose saved tensors hold saved
activations. These live inside the autograd graph, where Python's garbage collector cannot see
cycles; one that held a link would never be freed. So their copy of the `ChunkContext` has no link
and no `ChunkRunner`. The same is true of states, which they hold detached.

[Note: states of recurrent layers] The states that a layer's mixers leave after a chunk go into the
next chunk with their graph (see `recurrent_state`), so gradients flow as autograd walks from chunk
to chunk. Where each chunk's backward is run by itself (`linked=False`), a chunk's states begin a
graph of their own, and their gradients are kept for the backward of the chunk that left them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sppo_hf.attention.kv_cache import KVStore, KVStream, LayerKV
from sppo_hf.attention.segments import BidirectionalSpan, RowSpans
from sppo_hf.engine.action_log import ActionLog, LayerLog
from sppo_hf.engine.attention_interface import MaskMeaning, chunked_attention
from sppo_hf.engine.chunk_context import (
    Attended,
    ChooseBackend,
    ChunkContext,
    current_of,
)
from sppo_hf.engine.cpu_heap import CpuChunkArena, HeapWatch, return_free_heap
from sppo_hf.engine.indexer import IndexKeys, indexers_in_tiles, indexers_of
from sppo_hf.engine.kv_offload import EngineTransfer, OffloadedKV, recompute_kv
from sppo_hf.engine.model_parts import ModelParts
from sppo_hf.engine.read_tensors import ReadTensors
from sppo_hf.engine.recompute import AroundLayers, RecomputedLayer
from sppo_hf.engine.recurrent_state import (
    LayerStates,
    StateCache,
    States,
    documents_in_chunk,
    separate_documents,
)
from sppo_hf.engine.sequence_group import SequenceGroup, rank_tokens
from sppo_hf.engine.sliced_calls import (
    NORM,
    Call,
    CannotRunByLayer,
    LayerTiles,
    PrefixLength,
    SlicedCall,
    TokenSlices,
    example_tokens,
    layer_calls,
    move_hooks_innermost,
)
from sppo_hf.engine.step_observer import StepTimer
from sppo_hf.engine.unit_graph import StateEnd, begin_graph
from sppo_hf.errors import UnsupportedModelError
from sppo_hf.offload.engine import OffloadEngine
from sppo_hf.offload.layer_offload import LayerOffload, PrefetchOrder, WeightCasts
from sppo_hf.offload.weights import HostWeights
from sppo_hf.planning.activation_modes import ActivationMode
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.decisions import KVMode
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.tiers import Tier, offload_tiers

# B batch rows, C tokens of a chunk, T tokens of the sequence, D model width.

SavedActivations = RecomputedLayer | LayerOffload


class _RunningLayer(NamedTuple):
    """One chunk of a layer, or of the final norm, while its forward runs."""

    context: ChunkContext
    entered: contextlib.ExitStack
    """Leaves `context` and the other contexts in which the layer runs."""
    activations: SavedActivations | None


@dataclass(slots=True)
class _BetweenChunks:
    """Tensors that a layer's chunks leave for its later chunks."""

    kv: KVStore | None
    """Keys and values; None in a layer without attention."""
    states: States = dataclasses.field(default_factory=dict)
    """States of the layer's mixers after the last chunk that ran."""
    index_keys: IndexKeys | None = None
    """Keys of the layer's indexer; None in a layer without one."""
    next_chunk: int = 0
    """First chunk that has not entered the layer."""
    link: Tensor | None = None
    """The link of the layer's attention in that chunk."""


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """The inputs of a forward call, ready to be cut along the tokens."""

    tokens: dict[str, Tensor]
    """`input_ids` `[B, T]` or `inputs_embeds` `[B, T, D]`, and other inputs with a token dim."""
    position_ids: Tensor
    """`[B or 1, T]`, or `[A, B or 1, T]` where they have A axes (text, time, height, width)."""
    constants: dict[str, Any]
    """Keyword arguments that are the same for every chunk."""
    added: dict[str, dict[Any, Tensor]] = dataclasses.field(default_factory=dict)
    """Arguments with tensors `[B, T, D]` that a decoder adds to the hidden states of some layers,
    by the layer's index or number; they are passed as `[B * C, D]`, or with `row_numbers` as
    `[B, C, D]`."""
    row_numbers: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Arguments `[B]` that stand for the mask of tokens to which a decoder adds them: all rows. Of
    a mask the device would have to tell in every chunk how many tokens it marks."""
    masks: dict[Any, MaskMeaning] = dataclasses.field(default_factory=dict)
    """The decoder's masks by kind of layer, or by None for all, where it is given them."""

    def spans(self, start: int, end: int) -> tuple[BidirectionalSpan, ...]:
        """Return what tokens of rows `[start, end)` see each other in both directions anywhere."""
        masks = [mask.of_rows(start, end) for mask in self.masks.values()]
        spans = [span for mask in masks for span in mask.spans]
        # Of one that only some layers have beyond their window, that one.
        spans.sort(key=lambda span: span.beyond_window)
        return tuple({(span.row, span.start): span for span in spans}.values())

    def rows(self, start: int, end: int) -> ChunkInputs:
        """Return the inputs of batch rows `[start, end)`."""
        positions = self.position_ids
        return ChunkInputs(
            {name: x[start:end] for name, x in self.tokens.items()},
            positions if positions.shape[-2] == 1 else positions[..., start:end, :],
            self.constants,
            {
                name: {layer: x[start:end] for layer, x in tensors.items()}
                for name, tensors in self.added.items()
            },
            {name: x[: end - start] for name, x in self.row_numbers.items()},
            {kind: mask.of_rows(start, end) for kind, mask in self.masks.items()},
        )

    def joined(self, parts: Sequence[tuple[int, int]]) -> ChunkInputs:
        """Return the inputs of tokens `[start, end)` of each part, one part after the other."""

        def join(x: Tensor, dim: int) -> Tensor:
            return torch.cat([x.narrow(dim, start, end - start) for start, end in parts], dim)

        return ChunkInputs(
            {name: join(x, 1) for name, x in self.tokens.items()},
            join(self.position_ids, -1),
            self.constants,
            {
                name: {layer: join(x, 1) for layer, x in tensors.items()}
                for name, tensors in self.added.items()
            },
            self.row_numbers,
            self.masks,
        )

    def chunk(self, start: int, end: int) -> dict[str, Any]:
        """Return keyword arguments of the base model for tokens `[start, end)`."""
        # Contiguous, as the copies are from which layers are recomputed: compiled code, which is
        # rerun on those, is specialised on strides.
        tokens = {name: x[:, start:end].contiguous() for name, x in self.tokens.items()}
        first = next(iter(tokens.values()))
        last_row_dim = 0 if self.row_numbers else 1
        added = {
            name: {layer: x[:, start:end].flatten(0, last_row_dim) for layer, x in tensors.items()}
            for name, tensors in self.added.items()
        }
        # All ones: padding is in the batch layout. Given a mask, Transformers does not look for
        # packed documents in the positions, which would wait for the device.
        mask: Any = self.masks.get(None, self.masks)
        if not mask:
            mask = torch.ones(first.shape[:2], dtype=torch.bool, device=first.device)
        return {
            **self.constants,
            **added,
            **self.row_numbers,
            **tokens,
            "position_ids": self.position_ids[..., start:end],
            "attention_mask": mask,
        }


_RECOMPUTED = ActivationMode("inputs", "device")

_TRIM_TOKENS = 8192
"""On a CPU, free heap is returned once the prefixes of the layers that ran since the last time have
this many tokens in all."""


@dataclass(eq=False)
class ChunkRunner:
    """Runs one forward call over one group of rows, chunk by chunk or layer by layer."""

    parts: ModelParts
    """The model."""
    plan: Plan
    """Chunk bounds and activation modes; its layers are those of `layers`."""
    _: KW_ONLY
    rows: tuple[RowSpans, ...] | None
    """Documents and padding per row, or None for plain causal rows."""
    last_position: Tensor
    """Largest position of the sequence, `[1, 1]`."""
    choose_backend: ChooseBackend
    """Picks the attention backend for a layer's attention."""
    counters: dict[str, int]
    """Receives counts for tests and logs."""
    offload: OffloadEngine
    """Moves saved activations, and keys and values that are not kept on the device."""
    layers: range | None = None
    """The model's layers that run on this rank; None for all."""
    linked: bool = True
    """Whether autograd itself walks from chunk to chunk. If not, the caller runs each chunk's
    backward by itself, in reverse."""
    around_layers: AroundLayers = contextlib.nullcontext
    """Makes a context that is entered around every forward of layers, reruns included."""
    log: ActionLog | None = None
    """Records what each layer does; None where nothing or only whole units are recorded."""
    first_unit: int = 0
    """Number of this sequence's first chunk in the log."""
    weights: HostWeights | None = None
    """Loads host-resident weights for each layer; None where there are none."""
    group: SequenceGroup | None = None
    """The ranks that share every chunk; None where this one has all tokens."""
    heap: HeapWatch | None = None
    """Watches the heap of the whole step, of all groups of rows; None: free heap is returned at
    every chance, since the plan covers more than this call."""
    has_states: bool | None = None
    """Whether any layer has recurrent states; None: look through `layers`."""
    is_sharded: bool = False
    """Whether FSDP2 shards the model."""
    root: nn.Module | None = None
    """The module that is called; None for the base model. The text decoder, if its inputs are what
    the base model has given it for whole rows; see `encoded_inputs`."""

    def __post_init__(self) -> None:
        self._root = self.parts.base if self.root is None else self.root
        self._layers = range(len(self.parts.layers)) if self.layers is None else self.layers
        self._tiles = LayerTiles(self.plan.layer_tile_tokens)
        self._stream: KVStream | None = None
        if self.plan.kv_tier != "device":
            self._stream = KVStream(
                EngineTransfer(
                    self.offload,
                    tier=self.plan.kv_tier,
                    max_pending_d2h_bytes=self.plan.max_pending_d2h_bytes,
                ),
                self.plan.bounds,
                rows=self.rows,
                block_tokens=self.plan.kv_block_tokens,
                linked=self.linked,
            )
        self._log = None
        if self.log is not None:
            self._log = LayerLog(self.log, self.plan, self._stream, self.first_unit, self.weights)
        self._prefetch_order = self._new_prefetch_order()
        attending = self.parts.attending_layers()
        total_tokens = self.plan.bounds[-1][1]
        self._between_chunks = [
            _BetweenChunks(
                self._new_store() if layer in attending else None,
                index_keys=IndexKeys(total_tokens)
                if indexers_of(self.parts.layers[layer])
                else None,
            )
            for layer in self._layers
        ]
        self._cache: StateCache | None = None
        if self.has_states is None:
            self.has_states = any(self.parts.has_state(layer) for layer in self._layers)
        if self.has_states:
            self._cache = StateCache(len(self.parts.layers))
        self._state_ends: dict[int, list[StateEnd]] = {}
        self._reads: dict[nn.Module, ReadTensors] = {}
        self._timer: StepTimer | None = None
        # While a call of the base model runs:
        self._chunks = range(0)
        self._chunk = 0
        self._arena = CpuChunkArena(len(self._layers))
        self._examples: dict[int, Call] | None = None
        self._call: SlicedCall | None = None
        self._running: _RunningLayer | None = None
        self._recomputed_chunks: dict[int, weakref.ref[RecomputedLayer]] = {}
        self._heap = HeapWatch(None) if self.heap is None else self.heap

    def _new_prefetch_order(self) -> PrefetchOrder:
        plan = self.plan
        offloads = plan.training and (
            any(mode.offload for row in plan.layer_modes for mode in row)
            or any(mode in offload_tiers() for mode in plan.kv_modes)
        )
        return PrefetchOrder(
            self.offload,
            max_pending_d2h_bytes=plan.max_pending_d2h_bytes,
            # Without links the caller says when a chunk's activations are prefetched.
            lowest_prefetched=plan.program().lowest_prefetched if offloads and self.linked else [],
            # Not a method of ours: see [Note: what saved activations must not hold].
            on_prefetch=None if self._log is None else self._log.prefetched,
        )

    def _new_store(self) -> KVStore:
        return LayerKV(self.plan.bounds) if self._stream is None else self._stream.add_layer()

    def run(
        self, inputs: ChunkInputs, *, stop_token: int, timer: StepTimer
    ) -> Iterator[tuple[int, Any]]:
        """Run the base model over the chunks; yields (chunk, the base model's output).

        Chunks that start at or after `stop_token` are padding and do not run.

        Raises:
            CannotRunByLayer: The plan goes layer by layer, which the model cannot do.
        """
        self._timer = timer
        chunks = range(sum(start < stop_token for start, _ in self.plan.bounds))
        if self.plan.order == "by_layer":
            outputs = self._run_by_layer(inputs, chunks)
        else:
            outputs = self._run_by_chunk(inputs, chunks, timer)
        for chunk, output in outputs:
            yield chunk, output
            del output
            if self._log is not None:
                self._log.end_head()  # the caller has computed the loss before it asks for more
        self.end_forward()

    def kv_stores(self, layers: Sequence[int]) -> list[KVStore]:
        """Return the stores of those `layers` that have keys and values of their own."""
        found = (self._between_chunks[layer - self._layers.start].kv for layer in layers)
        return [store for store in found if store is not None]

    def rank_tokens(self, chunk: int) -> tuple[int, int]:
        """Return `(start, end)` of this rank's tokens of a chunk: all, or its part of them."""
        start, end = self.plan.bounds[chunk]
        if self.group is None:
            return start, end
        return rank_tokens(start, end, self.group.rank, self.group.size)

    def run_tokens(self, chunk: int) -> tuple[int, int]:
        """Return `rank_tokens`, or one token where there are none.

        See [Note: a rank without tokens] in `sequence_group`.
        """
        start, end = self.rank_tokens(chunk)
        return start, max(start + 1, end)

    def _run_by_chunk(
        self, inputs: ChunkInputs, chunks: range, timer: StepTimer
    ) -> Iterator[tuple[int, Any]]:
        for chunk in chunks:
            timer.forward_unit(chunk)
            yield chunk, self.run_chunk(chunk, inputs.chunk(*self.run_tokens(chunk)))

    def _run_by_layer(self, inputs: ChunkInputs, chunks: range) -> Iterator[tuple[int, Any]]:
        bounds = self._bounds_of_call(chunks)
        if self.group is not None:
            inputs = inputs.joined([self.run_tokens(chunk) for chunk in chunks])
        tokens = bounds[-1][1]
        # Of one chunk no example is needed; but where FSDP2 shards the model, other ranks, which
        # may have more chunks, wait for this one to gather the embedding for theirs. And either all
        # ranks must find that the model cannot run by layer, or none.
        if len(chunks) > 1 or self.is_sharded:
            # With the last token, which is padding if any is: a mask of ones may be left out.
            few = [(0, 1)] * (example_tokens(tokens) - 1) + [(tokens - 1, tokens)]
            example = inputs.joined(few).chunk(0, len(few))
            with torch.no_grad():
                self._examples = layer_calls(
                    self.parts, lambda: self._run_base(example, range(1), few)
                )
        output = self._run_base(inputs.chunk(0, tokens), chunks, [(0, tokens)])
        output_class, hidden = type(output), TokenSlices(output.last_hidden_state, dim=1)
        # Of all chunks of the first layer with a router, then of the next layer, and so on.
        router_logits = output.get("router_logits")
        del output
        for chunk, (start, end) in enumerate(bounds):
            part = output_class(last_hidden_state=hidden.take(start, end))
            if router_logits is not None:
                part["router_logits"] = tuple(router_logits[chunk :: len(chunks)])
            if self._log is not None:
                self._log.begin_head(chunk)
            yield chunk, part

    def run_chunk(self, chunk: int, inputs: dict[str, Any]) -> Any:
        """Run the base model over one chunk, and return its output; chunks come in order.

        `inputs` are what `ChunkInputs.chunk` returns for `run_tokens`.
        """
        return self._run_base(inputs, range(chunk, chunk + 1), [self.plan.bounds[chunk]])

    def _run_base(
        self, inputs: dict[str, Any], chunks: range, places: Sequence[tuple[int, int]]
    ) -> Any:
        """Run the base model once over `chunks`, with tokens `[start, end)` of each place."""
        self._chunks = chunks
        self._chunk = chunks.start
        for module in (*self.parts.layers, self.parts.final_norm()):
            if module is not None:
                move_hooks_innermost(module)
        # All layers of a chunk share a slab; of a single chunk each has its own, which is freed as
        # soon as its backward has run.
        self._arena = CpuChunkArena(len(self._layers) if self.plan.num_chunks > 1 else 1)
        if getattr(self.parts.text_config, "attn_temperature_tuning", False):
            prefix = PrefixLength(self.rank_tokens(chunks.start)[0])
            inputs = {**inputs, self.parts.cache_argument(): prefix}
        # Not an attribute: it refers to this runner, and the cycle would outlive the call.
        context = ChunkContext(
            model=self.parts,
            runner=self,
            last_position=self.last_position,
            rows=self.rows,
            choose_backend=self.choose_backend,
            counters=self.counters,
            group=self.group,
        )
        noise = self.parts.noise_of_sequence(
            inputs["position_ids"].shape[-1], self.plan.bounds[-1][1]
        )
        with chunked_attention(context), self.around_layers(), noise:
            try:
                inputs = self._with_cache(inputs, places)
                output = self._root(**inputs, return_dict=True)
            finally:
                # Torch calls a layer's hooks after exceptions, but not after KeyboardInterrupt.
                self._cancel()
                self._call = None
        if self.plan.device.kind == "cpu":
            return_free_heap()  # the head's logits come next
        return output

    def _with_cache(
        self, inputs: dict[str, Any], places: Sequence[tuple[int, int]]
    ) -> dict[str, Any]:
        """Return the base model's arguments, with the cache of states where it has any."""
        if self._cache is None:
            return {**inputs, "use_cache": False}
        if self.root is None and "position_ids" not in self.parts.base_arguments():
            inputs.pop("position_ids")
        inputs["attention_mask"] = self._padding_mask(inputs["attention_mask"], places)
        return {**inputs, self.parts.cache_argument(): self._cache, "use_cache": True}

    def _padding_mask(self, ones_BC: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
        """Return the mask of real tokens at `places`, by which mixers zero padding.

        On the host where it is all ones: models ask for that, which would wait for the device.
        `self.rows` names padding only where its own outputs count.
        """
        mask_BC = torch.ones(ones_BC.shape, dtype=torch.bool, device="cpu")
        for row, spans in enumerate(self.rows or ()):
            tokens_C = torch.cat([torch.arange(*place) for place in places])
            mask_BC[row] = tokens_C < spans.valid_tokens
        return mask_BC if mask_BC.all() else mask_BC.to(ones_BC.device)

    def state_ends(self, chunk: int) -> list[StateEnd]:
        """Return where the backward of `chunk` starts besides its output; without links only."""
        return self._state_ends.pop(chunk, [])

    def end_forward(self) -> None:
        """Release what only later chunks would have needed."""
        for between in self._between_chunks:
            between.states = {}
        if self._stream is not None:
            self._stream.end_forward()

    def start_backward(self) -> None:
        """Prefetch what backward needs first: little else runs on the device before it."""
        last = len(self._layers) - 1
        numbers = [self._number(self._chunk, last)]
        if self.plan.order == "by_layer":  # the layer's keys and values come first
            numbers.insert(0, self._number(self.plan.num_chunks, last))
        self._prefetch_order.start_backward(*numbers)

    def prefetch(self, chunk: int) -> None:
        """Prefetch a chunk's saved activations, in the order of use."""
        self._prefetch_order.prefetch(self._backward_numbers(chunk))

    def read_ahead(self, chunk: int) -> None:
        """Start reading a chunk's saved activations into host memory, while there is space."""
        self._prefetch_order.read_ahead(self._backward_numbers(chunk))

    def _backward_numbers(self, chunk: int) -> range:
        first = self._number(chunk, 0)
        return range(first + len(self._layers) - 1, first - 1, -1)

    def begin_stream(self, chunk: int, *, backward: bool) -> None:
        """Prefetch the keys and values that a chunk reads first, if they are offloaded."""
        if self._stream is not None:
            self._stream.begin(chunk, backward=backward)

    def poll(self) -> None:
        """Process copies that have ended."""
        self.offload.poll()

    def settle(self) -> None:
        """Have the device wait until the bytes that are being offloaded are within the limit."""
        self.offload.limit_pending_d2h(self.plan.max_pending_d2h_bytes)

    def _number(self, chunk: int, layer: int) -> int:
        """Return the place of (chunk, layer) in the order of forward, for the prefetch order.

        `layer` counts from the first on this rank. By layer, the number of chunks stands for the
        layer's keys and values.
        """
        if self.plan.order == "by_layer":
            return layer * (self.plan.num_chunks + 1) + chunk
        return chunk * len(self._layers) + layer

    def before_layer(
        self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        """Open layer `index` for the first chunk; returns the layer's arguments for it."""
        if self.weights is not None:
            self.weights.enter_layer(index)
        where = f"layer {index} ({type(layer).__name__})"
        self._recomputed_chunks = {}
        if self._examples is not None:
            if layer._backward_hooks:
                raise CannotRunByLayer(
                    f"{where} has backward hooks, which would see one chunk of all"
                )
            if len(self._chunks) > 1:
                modes = {self.plan.mode(index - self._layers.start, c) for c in self._chunks}
                on_device = all(mode.recompute and mode.tier == "device" for mode in modes)
                self._arena = CpuChunkArena(len(self._chunks), keep_whole_inputs=on_device)
            self._call = SlicedCall(
                args,
                kwargs,
                bounds=self._bounds_of_call(self._chunks),
                first_tokens=[self.rank_tokens(chunk)[0] for chunk in self._chunks],
                example=self._examples[index],
                where=where,
            )
            args, kwargs = self._call.take(0)
        self._open_layer(index, layer, self._chunks.start, args, kwargs)
        return args, kwargs

    def _bounds_of_call(self, chunks: range) -> Bounds:
        """Return the bounds of chunks within the tokens of a call of the base model over them."""
        lengths = (end - start for start, end in map(self.run_tokens, chunks))
        return tuple(pairwise(accumulate(lengths, initial=0)))

    def _run_other_slices(
        self,
        module: nn.Module,
        output: Any,
        open_slice: Callable[..., None],
        close_slice: Callable[[Any], object],
    ) -> Any:
        """Close the first slice of a call, which gave `output`, and run the others.

        `open_slice` is called with the index of a slice, its arguments and keyword arguments.

        Returns:
            The output over all tokens of this call; None where that is `output` itself.
        """
        call, self._call = self._call, None
        close_slice(output)
        if call is None:
            return None
        call.put(0, output)
        for index in range(1, len(call.bounds)):
            args, kwargs = call.take(index)
            open_slice(index, args, kwargs)
            output = module.forward(*args, **kwargs)
            del args, kwargs
            close_slice(output)
            call.put(index, output)
        return call.joined()

    def _open_layer(
        self,
        index: int,
        layer: nn.Module,
        chunk: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._chunk = chunk
        if self.plan.order == "by_layer" and self._timer is not None:
            self._timer.forward_unit(chunk, index)
        start, end = self.plan.bounds[chunk]
        between = self._between_chunks[index - self._layers.start]
        if chunk < between.next_chunk:
            raise UnsupportedModelError(
                f"{self.parts.name} cannot be trained chunk by chunk: it runs layer {index} "
                f"({type(layer).__name__}) more than once, so keys and values of its calls could "
                "not be told apart. Train it without sppo_hf."
            )
        between.next_chunk = chunk + 1
        context = dataclasses.replace(
            self._context(),
            layer=index,
            chunk=chunk,
            start=start,
            end=end,
            kv=between.kv,
            states=self._begin_states(between.states, start, end),
            index_keys=between.index_keys,
            link=between.link,
            keep=self._arena.keep,
            attended=Attended(),
        )
        activations = self._new_activations(layer, context) if torch.is_grad_enabled() else None
        recomputed = activations if isinstance(activations, RecomputedLayer) else None
        if recomputed is not None:
            context = dataclasses.replace(context, stash=recomputed)
            self._recomputed_chunks[chunk] = weakref.ref(recomputed)
        hidden = args[0] if args else kwargs["hidden_states"]
        self._watch_heap(index, end, hidden)
        if self._log is not None:
            self._log.begin_layer(self._chunk, index - self._layers.start, hidden)
        if self.weights is not None and index > 0 and chunk == 0 and hidden.requires_grad:
            # In backward, before anything else is prefetched: load the weights of the layer below,
            # and start to load those of the one below that.
            enter = functools.partial(self.weights.enter_layer, index - 1, backward=True)
            hidden.register_hook(lambda _grad: enter())
        with contextlib.ExitStack() as entered:
            entered.enter_context(self._tiles.inside(layer, hidden, recomputed))
            entered.enter_context(context.entered())
            entered.enter_context(separate_documents(layer, context.states))
            entered.enter_context(indexers_in_tiles(layer))
            self._running = _RunningLayer(context, entered.pop_all(), activations)
        if recomputed is not None:
            recomputed.open(args, kwargs)
        elif isinstance(activations, LayerOffload):
            activations.open()

    def _context(self) -> ChunkContext:
        """Return the context of the base model's forward, between layers."""
        context = current_of(self.parts)
        assert context is not None, "layers run in a forward of the base model"
        assert context.layer is None, "a layer is left before the next one is entered"
        return context

    def _begin_states(self, before: States, start: int, end: int) -> LayerStates | None:
        """Return a layer's states for the chunk `[start, end)`; None in a model without any."""
        if self._cache is None:
            return None
        assert not before or end - start > 1, "see [Note: chunks of one token] in recurrent_state"
        if not self.linked:
            before = {key: self._enter_state(state) for key, state in before.items()}
        return LayerStates(before, documents_in_chunk(self.rows, start, end))

    def _enter_state(self, state: Tensor) -> Tensor:
        """Return `state` as a leaf of the running chunk's graph."""
        if not state.requires_grad:
            return state
        given, input_gradient = begin_graph(state)
        assert input_gradient is not None, (
            "what needs a gradient is computed with gradients enabled"
        )
        self._state_ends.setdefault(self._chunk - 1, []).append(StateEnd.of(state, input_gradient))
        return given

    def _watch_heap(self, index: int, end: int, hidden: Tensor) -> None:
        """On a CPU, return free heap between layers, so that fragmentation stays within the plan.

        Measured with SmolLM2 at 4,096 tokens by layer: 45 MB a layer in forward, 280 in one chunk.
        The free heap that a layer leaves grows with its prefix. Where none may be kept, it is
        returned only every few layers, so that short prefixes are not slowed down.
        """
        if hidden.device.type != "cpu":
            return
        heap = self._heap
        if heap.may_keep_free_heap or index % max(1, _TRIM_TOKENS // (end * hidden.shape[0])) == 0:
            heap.between_layers()
            if hidden.requires_grad:
                hidden.register_hook(lambda _grad: heap.between_layers())

    def after_layer(self, index: int, layer: nn.Module, output: Any, *, failed: bool) -> Any:
        """Close layer `index` for the first chunk, and run it on the others.

        `output` is what its forward returned for the first chunk, if it has not `failed`. Returns
        the output over all tokens; None where that is `output` itself.
        """
        if failed:
            self._cancel()
            return None

        def open_chunk(part: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._open_layer(index, layer, self._chunks[part], args, kwargs)

        def close_chunk(output: Any) -> None:
            self._close_layer()
            if self.plan.order == "by_layer" and self._timer is not None:
                hidden = output[0] if isinstance(output, tuple) else output
                self._timer.watch_backward(self._chunk, hidden, index)

        joined = self._run_other_slices(layer, output, open_chunk, close_chunk)
        offloaded_kv = self._end_layer(index) if self.plan.order == "by_layer" else None
        whole = output if joined is None else joined
        hidden = whole[0] if isinstance(whole, tuple) else whole
        if offloaded_kv is not None and hidden.requires_grad:
            offloaded_kv.prefetch_before_backward(hidden)
        return joined

    def _kv_mode(self, layer: int) -> KVMode:
        modes = self.plan.kv_modes
        return modes[layer - self._layers.start] if modes else "device"

    def _end_layer(self, index: int) -> OffloadedKV | None:
        """End layer `index` after its last chunk: keys and values are kept as the plan says.

        Returns:
            The keys and values if they are offloaded.
        """
        between = self._between_chunks[index - self._layers.start]
        recomputed, self._recomputed_chunks = self._recomputed_chunks, {}
        between.link, between.states, store = None, {}, between.kv
        mode = self._kv_mode(index)
        if mode == "device" or not isinstance(store, LayerKV):
            return None
        if mode == "recompute":
            self._drop_kv(index, store, recomputed)
            return None
        return self._offload_kv(index, store, mode) if torch.is_grad_enabled() else None

    def _drop_kv(
        self, index: int, store: LayerKV, recomputed: dict[int, weakref.ref[RecomputedLayer]]
    ) -> None:
        """Free a layer's keys and values, which are recomputed from its inputs in backward.

        Offloaded inputs are loaded for this, and once more for their own chunk.
        """
        position, last = index - self._layers.start, self.plan.num_chunks - 1
        loaded = (c for c in store.chunks if c < last and self.plan.mode(position, c).offload)
        first_loaded = next(loaded, None)
        for chunk in store.chunks:
            activations, on_recompute = recomputed.get(chunk), None
            if self._log is not None and chunk == first_loaded:
                on_recompute = functools.partial(self._log.kv_moved, position, back=True)
            if activations is not None or not torch.is_grad_enabled():
                where = f"layer {index}, chunk {chunk}"
                load = functools.partial(recompute_kv, where, activations, on_recompute)
                store.offload_chunk(chunk, load)

    def _offload_kv(self, index: int, store: LayerKV, tier: Tier) -> OffloadedKV:
        """Offload a layer's keys and values until its backward."""
        position = index - self._layers.start
        offloaded_kv = OffloadedKV(
            self.offload, self._prefetch_order, tier, f"keys and values of layer {index}"
        )
        for chunk in store.chunks:
            offloaded_kv.add(chunk, store)
        self._prefetch_order.record(offloaded_kv, self._number(self.plan.num_chunks, position))
        if self._log is not None:
            self._log.kv_moved(position, back=False)
        return offloaded_kv

    def _cancel(self) -> None:
        """Leave the layer or norm that runs, if one does, after an exception in it."""
        if self._running is None:
            return
        (_, entered, activations), self._running = self._running, None
        entered.close()
        if activations is not None and activations.is_open:
            activations.cancel()

    def _close(self) -> tuple[ChunkContext, SavedActivations | None]:
        """Leave the layer or norm that ran."""
        assert self._running is not None, "what ran was opened"
        (context, entered, activations), self._running = self._running, None
        entered.close()
        if activations is not None:
            activations.close()
        return context, activations

    def _close_layer(self) -> None:
        recorded = len(self._prefetch_order)
        context, activations = self._close()
        assert context.layer is not None, "the context of a layer"
        position = context.layer - self._layers.start
        if self._log is not None:
            self._log.end_layer(self._chunk, position, activations)
        if self._stream is not None and len(self._prefetch_order) == recorded:
            # Closing saved activations would have bounded pending copies.
            self._stream.transfer.settle()
        if context.kv is not None and not context.attended.times:
            raise UnsupportedModelError(
                f"{self.parts.name} cannot run chunk by chunk: layer {context.layer} did not "
                "attend through Transformers' AttentionInterface. Train it without sppo_hf."
            )
        between = self._between_chunks[position]
        if self.linked:
            between.link = context.attended.link
        if context.states is not None:
            between.states = context.states.after
        if context.chunk == self.plan.num_chunks - 1:
            between.index_keys = None

    def before_norm(self, norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Open the final norm for the first chunk; returns its arguments for that chunk.

        Only its input is saved. Norms of 16-bit models compute in float32 and save what they
        compute on: 2 GiB for Llama-3.1-8B at 128K tokens, and 1 GiB more where their weights train.
        """
        bounds = self._bounds_of_call(self._chunks)
        example = None if self._examples is None else self._examples[NORM]
        if len(bounds) == 1:
            bounds = self._tiles.bounds(args, kwargs)
            if len(bounds) > 1:  # called with [B, T, D] alone
                example = ((args[0][:, : example_tokens(args[0].shape[1])],), {})
        if example is not None:
            self._call = SlicedCall(
                args, kwargs, bounds=bounds, example=example, where="the final norm"
            )
            args, kwargs = self._call.take(0)
        self._open_norm(norm, 0, args, kwargs)
        return args, kwargs

    def _open_norm(
        self, norm: nn.Module, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._chunk = chunk = min(self._chunks.start + index, self._chunks.stop - 1)
        if self._log is not None and index < len(self._chunks):
            hidden = args[0] if args else kwargs["hidden_states"]
            self._log.begin_layer(chunk, len(self._layers), hidden)
        context, activations = self._context(), None
        if torch.is_grad_enabled():
            activations = RecomputedLayer(
                norm,
                context=context,
                around_layers=self.around_layers,
                prefetch_order=self._prefetch_order,
                offload=self.offload,
                keep=lambda _kind, hidden: hidden,
                mode=_RECOMPUTED,
                label=f"final norm, chunk {chunk}",
                reads=self._reads_of(norm),
            )
            activations.open(args, kwargs)
        self._running = _RunningLayer(context, contextlib.ExitStack(), activations)

    def after_norm(self, norm: nn.Module, output: Any, *, failed: bool) -> Any:
        """Close the final norm for the first chunk, and run it on the others; see `after_layer`."""
        if failed:
            self._cancel()
            return None
        return self._run_other_slices(
            norm,
            output,
            functools.partial(self._open_norm, norm),
            lambda _: self._close(),
        )

    def _reads_of(self, module: nn.Module) -> ReadTensors:
        """Return what `module` reads in this forward; collected once, as it may have many parts."""
        if module not in self._reads:
            self._reads[module] = ReadTensors.of_module(module)
        return self._reads[module]

    def _new_activations(self, layer: nn.Module, context: ChunkContext) -> SavedActivations | None:
        """Make the saved activations of a (layer, chunk); None where autograd keeps all."""
        index, chunk = context.layer, context.chunk
        assert index is not None, "the context of a layer"
        position = index - self._layers.start
        mode, reads = self.plan.mode(position, chunk), self._reads_of(layer)
        if mode.saved == "matmuls" and reads.are_compiled:
            mode = ActivationMode("inputs", mode.tier)
        number, label = self._number(chunk, position), f"layer {index}, chunk {chunk}"
        weights, before_use = self.weights, None
        if weights is not None:
            before_use = functools.partial(weights.enter_layer, index, backward=True)
        if mode.recompute:
            return RecomputedLayer(
                layer,
                context=context,
                around_layers=self.around_layers,
                in_tiles=self._tiles.inside,
                # Keys and values are recomputed from what is released when this layer is.
                before_recompute=None
                if self._kv_mode(index) != "recompute" or not isinstance(context.kv, LayerKV)
                else functools.partial(context.kv.load_until, chunk),
                prefetch_order=self._prefetch_order,
                offload=self.offload,
                keep=self._arena.keep,
                mode=mode,
                label=label,
                reads=reads,
                number=number,
                before_use=before_use,
            )
        casts = WeightCasts.of(layer, self.plan.device.kind, label)
        if mode.tier == "device" and casts is None and weights is None:
            return None  # autograd itself keeps what it saves
        return LayerOffload(
            self.offload,
            self._prefetch_order,
            label=label,
            tier=mode.tier,
            casts=casts,
            number=number,
            weights=weights,
            before_use=before_use,
        )
