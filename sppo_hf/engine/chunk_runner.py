"""One forward call in chunks: what lives between its first chunk and its last backward.

By chunk, a `ChunkRunner` runs the untouched base model on each slice of tokens; by layer, once on
all of them, and each decoder layer's hooks run the layer's forward on each slice. Either way the
hooks call `before_layer` and `after_layer`, which open and close a frame for each (layer, chunk);
in between, attention finds layer, chunk and keys in the `ChunkContext`, and the frame decides what
becomes of the tensors that autograd saves.

[Note: the reverse walk] Nothing here runs backward. The chunks' graphs hang together through the
links of `sppo_hf.attention.chunk_attention`, so a plain `loss.backward()` walks them from the last
chunk to the first, and the frames bring back or recompute what they need when autograd asks for it.

[Note: what a frame must not hold] A link has a grad_fn, whose saved tensors hold frames. Frames
live inside the autograd graph, where Python's garbage collector cannot see circles; a frame that
held a link would never be freed. So a frame's copy of its `ChunkContext` has none, and no
`ChunkRunner`. The same is true of states, which a frame holds detached.

[Note: states of recurrent layers] What a layer's mixers leave behind a chunk goes into the next
chunk with its graph (see `recurrent_state`), so gradients come back as autograd walks from chunk to
chunk. Where each chunk's backward is run by itself, a chunk's states begin a graph of their own,
and their gradients wait for the backward of the chunk that left them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sppo_hf.attention.kv_cache import KVOwners, KVStore, LayerKV
from sppo_hf.attention.segments import RowSpans
from sppo_hf.engine.action_log import ActionLog, LayerLog
from sppo_hf.engine.attention_interface import chunked_attention
from sppo_hf.engine.chunk_context import (
    Attended,
    ChooseBackend,
    ChunkContext,
    current_of,
)
from sppo_hf.engine.cpu_heap import CpuChunkArena, HeapWatch, return_free_heap
from sppo_hf.engine.kv_offload import OffloadedKV, RecomputedKV, kv_stream
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
    EXAMPLE_TOKENS,
    NORM,
    CallExample,
    CannotRunByLayer,
    LayerTiles,
    PrefixLength,
    SlicedCall,
    TokenSlices,
    layer_examples,
    move_hooks_innermost,
)
from sppo_hf.engine.stages import StateEnd, enter
from sppo_hf.engine.step_observer import StepTimer
from sppo_hf.engine.structure import ModelParts
from sppo_hf.engine.versions import ReadTensors
from sppo_hf.errors import UnsupportedModelError
from sppo_hf.offload.engine import OffloadEngine
from sppo_hf.offload.layer_offload import LayerOffload, PrefetchOrder, WeightCasts
from sppo_hf.offload.weights import HostWeights
from sppo_hf.planning.activation_modes import ActivationMode
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.decisions import KVMode
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.tiers import offload_tiers

# B batch rows, C tokens of a chunk, T tokens of the sequence, D model width.

SavedActivations = RecomputedLayer | LayerOffload


class _OpenLayer(NamedTuple):
    """A chunk of a layer that runs."""

    context: ChunkContext
    entered: contextlib.ExitStack
    """Its context, and what else holds while it runs."""
    frame: SavedActivations | None


@dataclasses.dataclass(slots=True)
class _BetweenChunks:
    """What one layer's chunks leave for the chunks after them."""

    kv: KVStore | None
    """None in a layer without attention."""
    states: States = dataclasses.field(default_factory=dict)
    """Those of its mixers."""
    link: Tensor | None = None
    """That of its attention."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkInputs:
    """The inputs of a forward call, ready to be cut along the tokens."""

    tokens: dict[str, Tensor]
    """`input_ids` `[B, T]` or `inputs_embeds` `[B, T, D]`, and whatever else has a token dim."""
    position_ids: Tensor
    """`[B or 1, T]`, or `[A, B or 1, T]` where they have A axes (text, time, height, width)."""
    constants: dict[str, Any]
    """Keyword arguments that are the same for every chunk."""

    def rows(self, start: int, end: int) -> ChunkInputs:
        """The same for batch rows `[start, end)`."""
        positions = self.position_ids
        return ChunkInputs(
            {name: x[start:end] for name, x in self.tokens.items()},
            positions if positions.shape[-2] == 1 else positions[..., start:end, :],
            self.constants,
        )

    def chunk(self, start: int, end: int) -> dict[str, Any]:
        """Keyword arguments of the base model for tokens `[start, end)`."""
        # Dense, as the copies are from which layers are recomputed: compiled code, which backward
        # runs once more on those, asks for the strides that it was made for.
        tokens = {name: x[:, start:end].contiguous() for name, x in self.tokens.items()}
        first = next(iter(tokens.values()))
        return {
            **self.constants,
            **tokens,
            "position_ids": self.position_ids[..., start:end],
            # All ones: padding is known to the layout. A mask that is there keeps Transformers from
            # looking for packed documents in the positions, which would wait for the device.
            "attention_mask": torch.ones(first.shape[:2], dtype=torch.bool, device=first.device),
        }


_RECOMPUTED = ActivationMode("inputs", "device")

# Layers times tokens of prefix between two times that free heap is given back in backward.
_TRIM_TOKENS = 8192


class ChunkRunner:
    """The state of one forward call over one group of rows."""

    def __init__(
        self,
        parts: ModelParts,
        plan: Plan,
        *,
        rows: tuple[RowSpans, ...] | None,
        last_position: Tensor,
        choose_backend: ChooseBackend,
        counters: dict[str, int],
        offload: OffloadEngine,
        layers: range | None = None,
        linked: bool = True,
        around_layers: AroundLayers = contextlib.nullcontext,
        log: ActionLog | None = None,
        first_unit: int = 0,
        weights: HostWeights | None = None,
        group: SequenceGroup | None = None,
        heap: HeapWatch | None = None,
    ) -> None:
        """Prepare empty stores for every layer.

        Args:
            parts: The model.
            plan: Bounds and modes; its layers are those of `layers`.
            rows: Documents and padding per row, or None for plain causal rows.
            last_position: Largest position of the sequence, `[1, 1]`.
            choose_backend: Picks the attention backend for what a layer asks.
            counters: Receives counts for tests and logs.
            offload: Moves frames, and keys and values where they do not stay, away and back.
            layers: The layers that run here, of all that the model has; None for all.
            linked: Whether autograd itself walks from chunk to chunk. If not, the caller runs each
                chunk's backward by itself, in reverse.
            around_layers: Is entered around every forward of layers, the first and the second.
            log: Is told what each layer does; None where nobody asks, or whole units are noted.
            first_unit: How the log counts this sequence's first chunk.
            weights: What rests on the host and comes for each layer; None where nothing does.
            group: The ranks that share every chunk; None where this one has all tokens.
            heap: Of the step, which all its groups of rows share; None where no free heap may stay,
                for the plan is of more than this call.
        """
        self._parts = parts
        self._plan = plan
        self._rows = rows
        self._group = group
        self._sequence = ChunkContext(
            model=parts,
            last_position=last_position,
            rows=rows,
            choose_backend=choose_backend,
            counters=counters,
            group=group,
        )
        self._layers = range(len(parts.layers)) if layers is None else layers
        self._linked = linked
        self._around_layers = around_layers
        self._tiles = LayerTiles(plan.layer_tile_tokens)
        self._weights = weights
        self._offload = offload
        self._stream = kv_stream(plan, offload, rows=rows, linked=linked)
        self._log = None
        if log is not None:
            self._log = LayerLog(log, plan, self._stream, first_unit, weights)
        self._prefetch_order = self._new_prefetch_order()
        attending = parts.attending_layers()
        self._between_chunks = [
            _BetweenChunks(self._new_store() if layer in attending else None)
            for layer in self._layers
        ]
        self._cache: StateCache | None = None
        if any(parts.has_state(layer) for layer in self._layers):
            self._cache = StateCache(len(parts.layers))
        self._state_ends: dict[int, list[StateEnd]] = {}
        self._reads: dict[nn.Module, ReadTensors] = {}
        self._watch: StepTimer | None = None
        # Of the running call of the base model, and of what runs in it:
        self._chunks = range(0)
        self._chunk = 0
        self._arena = CpuChunkArena(len(self._layers))
        self._examples: dict[int, CallExample] = {}
        self._cut: SlicedCall | None = None
        self._open: _OpenLayer | None = None
        self._norm: RecomputedLayer | None = None
        self._norm_parts = 1
        self._layer_frames: dict[int, weakref.ref[RecomputedLayer]] = {}
        self._heap = HeapWatch(None) if heap is None else heap

    def _new_prefetch_order(self) -> PrefetchOrder:
        plan = self._plan
        away = any(mode.offload for row in plan.layer_modes for mode in row)
        away = plan.training and (away or any(mode in offload_tiers() for mode in plan.kv_modes))
        return PrefetchOrder(
            self._offload,
            max_pending_d2h_bytes=plan.max_pending_d2h_bytes,
            # Without links the caller says when the frames of a chunk are to come.
            lowest_prefetched=plan.program().lowest_prefetched if away and self._linked else [],
            # Not a method of ours: see [Note: what a frame must not hold].
            on_prefetch=None if self._log is None else self._log.prefetched,
        )

    def _new_store(self) -> KVStore:
        return LayerKV(self._plan.bounds) if self._stream is None else self._stream.add_layer()

    def run(
        self, slices: ChunkInputs, *, stop_token: int, watch: StepTimer
    ) -> Iterator[tuple[int, Any]]:
        """Run the base model over the chunks; yields (chunk, the base model's output).

        Args:
            slices: Inputs.
            stop_token: Chunks that start at or after this token are left out (only padding).
            watch: Is told of each unit before it runs.

        Raises:
            CannotRunByLayer: The plan goes layer by layer, and the model cannot be run so.
        """
        self._watch = watch
        chunks = range(sum(start < stop_token for start, _ in self._plan.bounds))
        if self._plan.order == "by_layer":
            made = self._run_by_layer(slices, chunks)
        else:
            made = self._run_by_chunk(slices, chunks, watch)
        for chunk, output in made:
            yield chunk, output
            del output
            if self._log is not None:
                self._log.end_head()  # the loss is done when the next chunk is asked for
        self.end_forward()

    def kv_stores(self, layers: Sequence[int]) -> list[KVStore]:
        """Keys and values of some of the layers that run here, which have some of their own."""
        found = (self._between_chunks[layer - self._layers.start].kv for layer in layers)
        return [store for store in found if store is not None]

    def rank_tokens(self, chunk: int) -> tuple[int, int]:
        """The tokens of a chunk that are this rank's: all, or its part of them."""
        start, end = self._plan.bounds[chunk]
        if self._group is None:
            return start, end
        return rank_tokens(start, end, self._group.rank, self._group.size)

    def run_tokens(self, chunk: int) -> tuple[int, int]:
        """`rank_tokens`, or one token where it has none; see [Note: a rank without tokens]."""
        start, end = self.rank_tokens(chunk)
        return start, max(start + 1, end)

    def _run_by_chunk(
        self, slices: ChunkInputs, chunks: range, watch: StepTimer
    ) -> Iterator[tuple[int, Any]]:
        for chunk in chunks:
            watch.forward_unit(chunk)
            yield chunk, self.run_chunk(chunk, slices.chunk(*self.run_tokens(chunk)))

    def _run_by_layer(self, slices: ChunkInputs, chunks: range) -> Iterator[tuple[int, Any]]:
        assert self._group is None, "ranks that share a sequence go chunk by chunk"
        bounds = self._plan.bounds[: chunks.stop]
        for module in (*self._parts.layers, self._parts.final_norm()):
            if module is not None:
                move_hooks_innermost(module)
        if len(chunks) > 1:
            few = min(EXAMPLE_TOKENS, bounds[-1][1] - 1)
            inputs = slices.chunk(0, few)
            self._examples = layer_examples(
                self._parts, lambda: self._run_base(inputs, range(1), few)
            )
        output = self._run_base(slices.chunk(0, bounds[-1][1]), chunks, bounds[-1][1])
        output_class, hidden = type(output), TokenSlices(output.last_hidden_state, dim=1)
        # Of each layer with a router, those of all chunks.
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
        """Run the base model over one chunk; chunks come in order.

        Args:
            chunk: Index of the chunk.
            inputs: Keyword arguments of the base model, as `ChunkInputs.chunk` makes them of
                `run_tokens`.

        Returns:
            The base model's output.
        """
        return self._run_base(inputs, range(chunk, chunk + 1), self._plan.bounds[chunk][1])

    def _run_base(self, inputs: dict[str, Any], chunks: range, end: int) -> Any:
        """Run the base model once over the tokens of `chunks`, the last of which is at `end`."""
        self._chunks = chunks
        self._chunk = chunks.start
        # All layers of one chunk of several have a slab in common; of the only one each its own,
        # which goes as soon as its backward has run.
        self._arena = CpuChunkArena(len(self._layers) if self._plan.num_chunks > 1 else 1)
        start = self._plan.bounds[chunks.start][0]
        if getattr(self._parts.text_config, "attn_temperature_tuning", False):
            prefix = PrefixLength(self.rank_tokens(chunks.start)[0])
            inputs = {**inputs, self._parts.cache_argument(): prefix}
        # Not kept: it has this runner, and both would wait for Python's garbage collector.
        context = dataclasses.replace(self._sequence, runner=self, owners=KVOwners())
        with chunked_attention(context), self._around_layers():
            try:
                inputs = self._with_cache(inputs, start, end)
                output = self._parts.base(**inputs, return_dict=True)
            finally:
                # Torch calls a layer's hooks after exceptions, but not after KeyboardInterrupt.
                self._cancel_layer()
                self._close_norm(failed=True)
                self._cut = None
        if self._plan.device.kind == "cpu":
            return_free_heap()  # the head's logits come next
        return output

    def _with_cache(self, inputs: dict[str, Any], start: int, end: int) -> dict[str, Any]:
        """The base model's arguments, with the states' cache where it has any."""
        if self._cache is None:
            return {**inputs, "use_cache": False}
        if "position_ids" not in self._parts.base_arguments():
            inputs.pop("position_ids")
        inputs["attention_mask"] = self._padding_mask(inputs["attention_mask"], start, end)
        return {**inputs, self._parts.cache_argument(): self._cache, "use_cache": True}

    def _padding_mask(self, ones_BC: Tensor, start: int, end: int) -> Tensor:
        """Real tokens among `[start, end)`; mixers take padding for zeros.

        Models ask whether it is all ones, which waits for the device unless it is on the host. Only
        where padding's own outputs count is it in the batch's rows at all.
        """
        mask_BC = torch.ones(ones_BC.shape, dtype=torch.bool)
        for row, spans in enumerate(self._rows or ()):
            mask_BC[row, max(0, spans.valid_tokens - start) :] = False
        padded = self._rows is not None and any(row.valid_tokens < end for row in self._rows)
        return mask_BC.to(ones_BC.device) if padded else mask_BC

    def state_ends(self, chunk: int) -> list[StateEnd]:
        """Where the backward of `chunk` starts besides its output, if chunks are not linked."""
        return self._state_ends.pop(chunk, [])

    def end_forward(self) -> None:
        """No chunk comes any more."""
        for between in self._between_chunks:
            between.states = {}
        if self._stream is not None:
            self._stream.end_forward()

    def start_backward(self) -> None:
        """Bring back what backward needs first: little else runs on the device before it."""
        last = len(self._layers) - 1
        numbers = [self._number(self._chunk, last)]
        if self._plan.order == "by_layer":  # the layer's keys and values come first
            numbers.insert(0, self._number(self._plan.num_chunks, last))
        self._prefetch_order.start_backward(*numbers)

    def prefetch(self, chunk: int) -> None:
        """Bring back all frames of a chunk, first needed first."""
        self._prefetch_order.prefetch(self._backward_numbers(chunk))

    def read_ahead(self, chunk: int) -> None:
        """Start bringing all frames of a chunk into host memory, as far as there is room."""
        self._prefetch_order.read_ahead(self._backward_numbers(chunk))

    def _backward_numbers(self, chunk: int) -> range:
        first = self._number(chunk, 0)
        return range(first + len(self._layers) - 1, first - 1, -1)

    def begin_stream(self, chunk: int, *, backward: bool) -> None:
        """Start bringing the keys and values that a chunk reads first, if they wait elsewhere."""
        if self._stream is not None:
            self._stream.begin(chunk, backward=backward)

    def poll(self) -> None:
        """Move on what has ended of copies."""
        self._offload.poll()

    def settle(self) -> None:
        """Let compute wait until few enough bytes are on their way out."""
        self._offload.limit_pending_d2h(self._plan.max_pending_d2h_bytes)

    def _number(self, chunk: int, layer: int) -> int:
        """A frame's number: its place in the order of forward; `layer` counts from the first.

        By layer, `chunk` behind the last one stands for the layer's keys and values.
        """
        if self._plan.order == "by_layer":
            return layer * (self._plan.num_chunks + 1) + chunk
        return chunk * len(self._layers) + layer

    def before_layer(
        self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Open the frame of layer `index` and the first chunk; returns that chunk's arguments."""
        if self._weights is not None:
            self._weights.enter_layer(index)
        where = f"layer {index} ({type(layer).__name__})"
        self._layer_frames = {}
        if len(self._chunks) > 1:
            if layer._backward_hooks:
                raise CannotRunByLayer(
                    f"{where} has backward hooks, which would see one chunk of all"
                )
            modes = {self._plan.mode(index - self._layers.start, c) for c in self._chunks}
            stays = all(mode.recompute and mode.tier == "device" for mode in modes)
            self._arena = CpuChunkArena(len(self._chunks), keep_whole_inputs=stays)
        example = self._examples.get(index)
        self._cut = SlicedCall(
            args, kwargs, bounds=self._call_bounds(), example=example, where=where
        )
        return self._open_layer(index, layer, self._chunks.start)

    def _call_bounds(self) -> Bounds:
        """Those of the chunks that this call of the base model is for."""
        return self._plan.bounds[self._chunks.start : self._chunks.stop]

    def _other_parts(
        self,
        module: nn.Module,
        output: Any,
        count: int,
        open_part: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]],
        close_part: Callable[[Any], None],
    ) -> Any:
        """Close the first of `count` parts of `module`, which gave `output`, and run the others.

        Returns:
            The output over all tokens of this call; None where that is `output` itself.
        """
        cut, self._cut = self._cut, None
        close_part(output)
        if count == 1:
            return None
        assert cut is not None, "what runs in parts was cut"
        cut.put(0, output)
        for index in range(1, count):
            self._cut = cut
            args, kwargs = open_part(index)
            self._cut = None
            output = module.forward(*args, **kwargs)
            del args, kwargs
            close_part(output)
            cut.put(index, output)
        return cut.joined()

    def _open_layer(
        self, index: int, layer: nn.Module, chunk: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert self._cut is not None, "a layer that runs was given its arguments"
        self._chunk = chunk
        if self._plan.order == "by_layer" and self._watch is not None:
            self._watch.forward_unit(chunk, index)
        args, kwargs = self._cut.take(chunk - self._chunks.start)
        start, end = self._plan.bounds[chunk]
        between = self._between_chunks[index - self._layers.start]
        context = dataclasses.replace(
            self._context(),
            layer=index,
            chunk=chunk,
            start=start,
            end=end,
            kv=between.kv,
            states=self._begin_states(between.states, start, end),
            link=between.link,
            keep=self._arena.keep,
            attended=Attended(),
        )
        frame = self._frame(layer, context) if torch.is_grad_enabled() else None
        if isinstance(frame, RecomputedLayer):
            context = dataclasses.replace(context, stash=frame)
            self._layer_frames[chunk] = weakref.ref(frame)
        hidden = args[0] if args else kwargs["hidden_states"]
        self._watch_heap(index, end, hidden)
        if self._log is not None:
            self._log.begin_layer(self._chunk, index - self._layers.start, hidden)
        if self._weights is not None and index > 0 and chunk == 0 and hidden.requires_grad:
            # The layer below is entered, and those of the one below that are on their way, before
            # anything else is asked for.
            enter = functools.partial(self._weights.enter_layer, index - 1, backward=True)
            hidden.register_hook(lambda _grad: enter())
        tiled = frame if isinstance(frame, RecomputedLayer) else None
        with contextlib.ExitStack() as entered:
            entered.enter_context(self._tiles.inside(layer, hidden, tiled))
            entered.enter_context(context.entered())
            entered.enter_context(separate_documents(layer, context.states))
            self._open = _OpenLayer(context, entered.pop_all(), frame)
        if isinstance(frame, RecomputedLayer):
            frame.open(args, kwargs)
        elif frame is not None:
            frame.open()
        return args, kwargs

    def _context(self) -> ChunkContext:
        """That of the base model's forward, between layers."""
        context = current_of(self._parts)
        assert context is not None, "layers run in a forward of the base model"
        assert context.layer is None, "a layer is left before the next one is entered"
        return context

    def _begin_states(self, before: States, start: int, end: int) -> LayerStates | None:
        """A layer's states for the chunk `[start, end)`; None in a model without any."""
        if self._cache is None:
            return None
        assert not before or end - start > 1, "see [Note: chunks of one token] in states"
        if not self._linked:
            before = {key: self._enter_state(state) for key, state in before.items()}
        return LayerStates(before, documents_in_chunk(self._rows, start, end))

    def _enter_state(self, state: Tensor) -> Tensor:
        """`state` as the beginning of the running chunk's graph."""
        if not state.requires_grad:
            return state
        given, input_gradient = enter(state)
        assert input_gradient is not None, (
            "what needs a gradient is computed with gradients enabled"
        )
        self._state_ends.setdefault(self._chunk - 1, []).append(StateEnd.of(state, input_gradient))
        return given

    def _watch_heap(self, index: int, end: int, hidden: Tensor) -> None:
        """On a CPU, let no holes of layers' temporaries add up to more than the plan has room for.

        Measured with SmolLM2 at 4,096 tokens by layer: 45 MB a layer in forward, in one chunk 280.
        What a layer leaves grows with its prefix; so that short ones are not slowed down, only
        every few layers where it is given back in any case.
        """
        if hidden.device.type != "cpu":
            return
        heap = self._heap
        if heap.may_keep_free_heap or index % max(1, _TRIM_TOKENS // (end * hidden.shape[0])) == 0:
            heap.between_layers()
            if hidden.requires_grad:
                hidden.register_hook(lambda _grad: heap.between_layers())

    def after_layer(self, index: int, layer: nn.Module, output: Any, *, failed: bool) -> Any:
        """Close the frame of layer `index` and the first chunk, and run the layer on the others.

        Args:
            index: Index of the layer.
            layer: The layer.
            output: What its forward returned for the first chunk.
            failed: Whether it raised.

        Returns:
            The output over all tokens; None where that is `output` itself.
        """
        if failed:
            self._cancel_layer()
            return None

        def open_chunk(part: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return self._open_layer(index, layer, self._chunks[part])

        def close_chunk(output: Any) -> None:
            self._close_layer()
            if self._plan.order == "by_layer" and self._watch is not None:
                hidden = output[0] if isinstance(output, tuple) else output
                self._watch.watch_backward(self._chunk, hidden, index)

        joined = self._other_parts(layer, output, len(self._chunks), open_chunk, close_chunk)
        away = self._end_layer(index) if self._plan.order == "by_layer" else None
        whole = output if joined is None else joined
        hidden = whole[0] if isinstance(whole, tuple) else whole
        if away is not None and hidden.requires_grad:
            away.prefetch_before_backward(hidden)
        return joined

    def _kv_mode(self, layer: int) -> KVMode:
        modes = self._plan.kv_modes
        return modes[layer - self._layers.start] if modes else "device"

    def _end_layer(self, index: int) -> OffloadedKV | None:
        """All chunks of layer `index` are done: its keys and values wait as the plan says.

        Returns:
            Those that were sent away.
        """
        position = index - self._layers.start
        between, frames = self._between_chunks[position], self._layer_frames
        between.link, between.states, store = None, {}, between.kv
        self._layer_frames = {}
        mode = self._kv_mode(index)
        if mode == "device" or not isinstance(store, LayerKV):
            return None
        if mode == "recompute":
            # Inputs that are away come back for this, and once more for their own chunk.
            last = self._plan.num_chunks - 1
            borrowed = (
                c for c in store.chunks if c < last and self._plan.mode(position, c).offload
            )
            first = next(borrowed, None)
            for chunk in store.chunks:
                frame, noted = frames.get(chunk), None
                if self._log is not None and chunk == first:
                    noted = functools.partial(self._log.kv_moved, position, back=True)
                if frame is not None or not torch.is_grad_enabled():
                    store.offload_chunk(chunk, RecomputedKV(index, chunk, frame, noted))
        elif torch.is_grad_enabled():
            away = OffloadedKV(
                self._offload, self._prefetch_order, mode, f"keys and values of layer {index}"
            )
            for chunk in store.chunks:
                away.add(chunk, store)
            self._prefetch_order.record(away, self._number(self._plan.num_chunks, position))
            if self._log is not None:
                self._log.kv_moved(position, back=False)
            return away
        return None

    def _cancel_layer(self) -> None:
        """Leave the layer that runs, if one does, after an exception in it."""
        if self._open is None:
            return
        opened, self._open = self._open, None
        opened.entered.close()
        if opened.frame is not None and opened.frame.is_open:
            opened.frame.cancel()

    def _close_layer(self) -> None:
        assert self._open is not None, "a layer that ran was opened"
        (context, entered, frame), self._open = self._open, None
        entered.close()
        assert context.layer is not None, "the context of a layer"
        position = context.layer - self._layers.start
        recorded = len(self._prefetch_order)
        if frame is not None:
            frame.close()
        if self._log is not None:
            self._log.end_layer(self._chunk, position, frame)
        if self._stream is not None and len(self._prefetch_order) == recorded:
            # No frame was closed, which bounds pending copies otherwise.
            self._stream.transfer.settle()
        if context.kv is not None and not context.attended.times:
            raise UnsupportedModelError(
                f"{self._parts.name} cannot run chunk by chunk: layer {context.layer} did not "
                "attend through Transformers' AttentionInterface. Train it without sppo_hf."
            )
        between = self._between_chunks[position]
        if self._linked:
            between.link = context.attended.link
        if context.states is not None:
            between.states = context.states.after

    def before_norm(
        self, norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Open the frame of the final norm and the first chunk; returns that chunk's arguments.

        The frame keeps the norm's input, and nothing else. Norms of 16-bit models work in float32
        and save what they work on: at 128K tokens 2 GiB of Llama-3.1-8B, and 1 GiB more where their
        weights train.
        """
        bounds, example = self._call_bounds(), self._examples.get(NORM)
        tiles = self._tiles.bounds(args, kwargs) if len(bounds) == 1 else bounds
        if len(tiles) > len(bounds):  # called with [B, T, D] alone
            bounds, example = tiles, CallExample.of((args[0][:, :EXAMPLE_TOKENS],), {})
        self._norm_parts = len(bounds)
        self._cut = SlicedCall(args, kwargs, bounds=bounds, example=example, where="the final norm")
        return self._open_norm(norm, 0)

    def _open_norm(self, norm: nn.Module, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert self._cut is not None, "a norm that runs was given its arguments"
        self._chunk = chunk = min(self._chunks.start + index, self._chunks.stop - 1)
        args, kwargs = self._cut.take(index)
        if self._log is not None and index < len(self._chunks):
            hidden = args[0] if args else kwargs["hidden_states"]
            self._log.begin_layer(chunk, len(self._layers), hidden)
        if torch.is_grad_enabled():
            self._norm = RecomputedLayer(
                norm,
                context=self._context(),
                around_layers=self._around_layers,
                prefetch_order=self._prefetch_order,
                offload=self._offload,
                keep=lambda _kind, hidden: hidden,
                mode=_RECOMPUTED,
                label=f"final norm, chunk {chunk}",
                reads=self._reads_of(norm),
            )
            self._norm.open(args, kwargs)
        return args, kwargs

    def after_norm(self, norm: nn.Module, output: Any, *, failed: bool) -> Any:
        """Close the frame of the final norm; see `after_layer`."""
        if failed:
            self._close_norm(failed=True)
            return None
        return self._other_parts(
            norm,
            output,
            self._norm_parts,
            lambda index: self._open_norm(norm, index),
            lambda _: self._close_norm(),
        )

    def _close_norm(self, *, failed: bool = False) -> None:
        frame, self._norm = self._norm, None
        if frame is None:
            return
        if failed:
            frame.cancel()
        else:
            frame.close()

    def _reads_of(self, module: nn.Module) -> ReadTensors:
        """What `module` reads in this forward; found once, since modules have many parts."""
        if module not in self._reads:
            self._reads[module] = ReadTensors.of_module(module)
        return self._reads[module]

    def _frame(self, layer: nn.Module, context: ChunkContext) -> SavedActivations | None:
        index, chunk = context.layer, context.chunk
        assert index is not None, "the context of a layer"
        position = index - self._layers.start
        mode = self._plan.mode(position, chunk)
        number, label = self._number(chunk, position), f"layer {index}, chunk {chunk}"
        weights, before_use = self._weights, None
        if weights is not None:
            before_use = functools.partial(weights.enter_layer, index, backward=True)
        if mode.recompute:
            return RecomputedLayer(
                layer,
                context=context,
                around_layers=self._around_layers,
                in_tiles=self._tiles.inside,
                # The layer's keys are made again from what this frame is about to let go of.
                before_recompute=None
                if self._kv_mode(index) != "recompute" or not isinstance(context.kv, LayerKV)
                else functools.partial(context.kv.load_until, chunk),
                prefetch_order=self._prefetch_order,
                offload=self._offload,
                keep=self._arena.keep,
                mode=mode,
                label=label,
                reads=self._reads_of(layer),
                number=number,
                before_use=before_use,
            )
        casts = WeightCasts.of(layer, self._plan.device.kind, label)
        if mode.tier == "device" and casts is None and weights is None:
            return None  # autograd itself keeps it
        return LayerOffload(
            self._offload,
            self._prefetch_order,
            label=label,
            tier=mode.tier,
            casts=casts,
            number=number,
            weights=weights,
            before_use=before_use,
        )
