"""Saved activations of a layer that is recomputed in backward without attending again.

A `RecomputedLayer` keeps the *inputs* of one (layer, chunk): the layer's input, attention's output
and its log-sum-exp. (With mode "hidden", which only a plan that fits no other way has, it keeps the
layer's input alone; then attention runs again too, on the keys and values in the store.) What
autograd saves inside the layer is dropped as it is saved. The first time that backward asks for any
of it, the layer's forward is rerun, with attention answered from what was kept, and stopped as soon
as the last saved tensor has been seen: its last matmul does not run again, nor any other that no
saved tensor depends on. With mode "matmuls" the outputs of matmuls are kept too (see `selective`),
so that only elementwise work is redone. What is kept stays on the device or is offloaded.

The rerun has the random state and autocast settings of the first forward, so that dropout inside a
layer (LoRA's, for one) repeats exactly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections import UserDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from sppo_hf.engine.attention_interface import chunked_attention
from sppo_hf.engine.chunk_context import Attended, ChunkContext
from sppo_hf.engine.indexer import indexers_in_tiles
from sppo_hf.engine.model_parts import without_cached_weights
from sppo_hf.engine.read_tensors import ReadTensors, Versions
from sppo_hf.engine.recurrent_state import LayerStates, StateKey, States, separate_documents
from sppo_hf.engine.selective import (
    Matmul,
    MatmulsChanged,
    SelectiveRecorder,
    SelectiveReplayer,
    UnusedMatmulFinder,
    UnusedMatmuls,
    UnusedMatmulSkipper,
)
from sppo_hf.engine.sequence_group import RecomputeExchanges
from sppo_hf.errors import SPPOError
from sppo_hf.offload.engine import OffloadEngine
from sppo_hf.offload.layer_offload import PrefetchOrder
from sppo_hf.offload.storage import OffloadedTensor, version_of
from sppo_hf.planning.activation_modes import ActivationMode
from sppo_hf.planning.tiers import Tier

AroundLayers = Callable[[], contextlib.AbstractContextManager[object]]
"""Makes the context in which layers run."""

InTiles = Callable[
    [nn.Module, Tensor, "RecomputedLayer | None"], contextlib.AbstractContextManager[None]
]
"""Makes the context in which a layer's token-wise modules run in tiles; see `sliced_calls`."""


class SavedTensor:
    """One tensor between forward and backward: offloaded, or on the device, where others use it."""

    def __init__(
        self, tensor: Tensor, engine: OffloadEngine | None = None, tier: Tier = "device"
    ) -> None:
        """Keep `tensor`, or start offloading it to `tier` by `engine`."""
        self._engine = engine
        self._tensor: Tensor | None = tensor if tier == "device" else None
        self._version = version_of(tensor)
        self._handle: OffloadedTensor | None = None
        if engine is not None and tier != "device":
            self._handle = engine.start_offload(tensor, tier=tier)

    def handles(self) -> Iterable[OffloadedTensor]:
        """The tensor's handle if it is offloaded, until it is taken or dropped."""
        return () if self._handle is None else (self._handle,)

    def take(self) -> Tensor:
        """Return the tensor, on the device, and drop the reference to it; once.

        Raises:
            SPPOError: One that was kept on the device was changed in place since it was saved.
        """
        tensor = self._on_device()
        self.drop()
        return tensor

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Tensor]:
        """Have the tensor on the device; afterwards it is where it was before. Raises as `take`."""
        engine, handle = self._engine, self._handle
        if engine is None or handle is None or not engine.bytes_to_prefetch([handle]):
            yield self._on_device()
            return
        tensor = self._on_device()
        try:
            yield tensor
        finally:
            del tensor
            engine.evict(handle)

    def drop(self) -> None:
        """Drop the tensor, taken or not."""
        if self._engine is not None and self._handle is not None:
            self._engine.release(self._handle)
        self._handle = self._tensor = None

    def _on_device(self) -> Tensor:
        if self._engine is not None and self._handle is not None:
            return self._engine.wait_for(self._handle)
        tensor = self._tensor
        assert tensor is not None, "a saved tensor is taken once"
        if version_of(tensor) != self._version:
            raise SPPOError(
                f"a tensor of shape {tuple(tensor.shape)} that is kept for recomputation was "
                "changed in place between forward and backward. Use operations that are not in "
                "place in the layer's hooks, or set recompute='none'."
            )
        return tensor


class _Stop(Exception):
    """Ends a rerun of a layer's forward: all that is needed of it is there."""


class _NoMode(contextlib.nullcontext[None]):
    """Takes the place of a dispatch mode where a rerun needs none."""

    def on_saved(self, tensor: Tensor) -> None:
        """Do nothing."""


_RerunMode = SelectiveReplayer | UnusedMatmulFinder | UnusedMatmulSkipper | _NoMode
"""The dispatch mode under which a layer's forward is rerun; it is left while attention runs."""


_NOT_SEARCHED = UnusedMatmuls((), ())
_found: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, UnusedMatmuls | None]]
_found = weakref.WeakKeyDictionary()


def _unused_matmuls(layer: nn.Module) -> dict[Hashable, UnusedMatmuls | None]:
    """Return the unused matmuls that were found in `layer`, by `RecomputedLayer._kind`.

    None for a kind of rerun in which all matmuls must run. See [Note: unused matmuls].
    """
    return _found.setdefault(layer, {})


_Slot = tuple["RecomputedLayer", int]
"""The place of a saved tensor, which autograd's graph holds instead of it, by its number."""


class _FirstTiledCall(NamedTuple):
    """A call of a module in tiles in a layer's first forward, for its rerun."""

    need_grads: list[bool]
    """Which of its outputs need gradients."""
    random_state: RunContext | None
    """Random state after it, where its outputs are kept and it does not run again."""


@dataclass(eq=False)
class RecomputedLayer:
    """Saved activations of one (layer, chunk) in recompute mode, attention's results included.

    Use: `open(args, kwargs)` before the layer's forward, `close()` after it.
    """

    layer: nn.Module
    """The decoder layer (or the final norm)."""
    _: KW_ONLY
    context: ChunkContext
    """The context of the layer's first forward."""
    around_layers: AroundLayers
    """Makes a context that is entered around the rerun."""
    prefetch_order: PrefetchOrder | None
    """Decides when offloaded tensors are prefetched; None for a tile, whose tensors are prefetched
    with the layer's."""
    offload: OffloadEngine
    """Moves what is saved, if the mode offloads."""
    keep: Callable[[str, Tensor], Tensor] | None
    """Maps (kind, tensor) to the tensor that is kept on the device: itself, or a copy."""
    mode: ActivationMode
    """What is saved ("inputs", "matmuls" or "hidden"), and on which tier."""
    label: str
    """Names the layer and chunk in errors, for example "layer 3, chunk 1"."""
    reads: ReadTensors
    """What the layer reads beside its arguments."""
    in_tiles: InTiles = lambda layer, hidden, activations: contextlib.nullcontext()
    """Makes the context in which its token-wise modules run in tiles in the rerun."""
    number: int | None = None
    """Place in the order of forward, for the prefetch order."""
    before_recompute: Callable[[], None] | None = None
    """Called before the rerun, while what `recompute_kv` needs is there."""
    before_use: Callable[[], None] | None = None
    """Called before the rerun, and whenever backward asks for a saved tensor."""

    def __post_init__(self) -> None:
        assert self.mode.recompute, f"what is saved whole is not recomputed: {self.mode}"
        states, self.context = self.context.states, self.context.for_recompute()
        self._as_in_forward = self.reads.as_in_forward
        # Set by `open`, or during forward:
        self._hidden: SavedTensor | None = None
        self._attention: tuple[SavedTensor, SavedTensor] | None = None
        self._choice: SavedTensor | None = None
        self._input_states: States = {} if states is None else states.before
        self._states: dict[StateKey, tuple[SavedTensor, bool]] = {}
        self._matmuls: tuple[Matmul, ...] | None = None
        self._tile_matmuls: list[Matmul] = []
        """The matmuls of all modules that ran in tiles."""
        self._tiled_calls: list[_FirstTiledCall] = []
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._read_arguments: tuple[ReadTensors, Versions] | None = None
        self._versions: Versions = ()
        self._shared_context: RunContext | None = None
        self._saved_shapes: list[tuple[int, ...]] = []
        """Shape of each tensor that autograd saved; the garbage collector visits no such tuples."""
        self._saved_dtypes: list[torch.dtype] = []
        self._recorder: SelectiveRecorder | None = None
        self._hooks: Any = None
        # During and after the rerun:
        self._rerun_mode: _RerunMode = _NoMode()
        self._next_tiled_call = 0
        self._attends = False
        """Whether attention runs in the rerun now, outside of its mode."""
        self._attention_results: tuple[Tensor, Tensor] | None = None
        self._chosen: Tensor | None = None
        self._exchanged: RecomputeExchanges | None = None
        self._recomputed: dict[int, Tensor] | None = None

    # -- forward -----------------------------------------------------------------------------

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Save what the rerun needs, and start dropping what autograd saves."""
        hidden = args[0] if args else kwargs["hidden_states"]
        self._hidden_requires_grad = hidden.requires_grad
        self._shape = hidden.shape
        self._hidden = self._hold("inputs", hidden.detach())
        states, self._input_states = self._input_states, {}
        self._states = {
            # Without the layer's number: tensors of a kind lie beside each other for all layers.
            (kind, layer, index): (
                self._hold(f"{kind} states {index}", state.detach()),
                state.requires_grad,
            )
            for (kind, layer, index), state in states.items()
        }
        others = tree_map_only(
            Tensor, _detach, _without_shared_kv(_with_hidden(None, args, kwargs))
        )
        self._arguments = cast("tuple[tuple[Any, ...], dict[str, Any]]", others)
        self._versions = self.reads.versions()
        arguments = ReadTensors.of_named(_named_arguments(*self._arguments))
        self._read_arguments = (arguments, arguments.versions())
        self._run_context = RunContext(hidden.device, like=self._shared_context)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        if self.mode.saved == "matmuls":
            self._recorder = SelectiveRecorder(
                self.layer,
                hidden,
                hold=self._hold_matmul,
                model=self.context.model.causal_lm,
            )
            self._recorder.start(*states.values())

    @property
    def is_open(self) -> bool:
        """Whether the layer's first forward runs."""
        return self._hooks is not None

    def close(self) -> None:
        """End the first forward, and enter the prefetch order."""
        if self._recorder is not None:
            self._matmuls = self._recorder.stop()
            self._recorder = None
        self._unhook()
        self.keep = None
        self.reads.ignore_own_writes(self._versions)
        if not self._saved_shapes:
            self._release()  # nothing in the layer needs a gradient
        elif self.prefetch_order is not None:
            self.prefetch_order.record(self, self.number)

    def cancel(self) -> None:
        """End the first forward after an exception in it."""
        if self._recorder is not None:
            self._recorder.abandon()
            self._recorder = None
        self._unhook()
        self._release()

    def _unhook(self) -> None:
        assert self._hooks is not None, "closed while open"
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(None, None, None)

    def _hold(self, kind: str, tensor: Tensor) -> SavedTensor:
        if self.mode.tier != "device":
            return SavedTensor(tensor, self.offload, self.mode.tier)
        assert self.keep is not None, "tensors are saved in the first forward"
        return SavedTensor(self.keep(kind, tensor))

    def _hold_matmul(self, kind: str, tensor: Tensor) -> SavedTensor:
        # `keep` lays tensors of one shape beside each other. Experts have as many tokens as chose
        # them, so there are no others of that shape; and a subclass is more than its bytes.
        per_token = tensor.numel() == self._shape[:-1].numel() * tensor.shape[-1]
        if self.mode.offload or (per_token and type(tensor) is Tensor):
            return self._hold(kind, tensor)
        return SavedTensor(tensor)

    def _pack(self, tensor: Tensor) -> _Slot:
        if self._recorder is not None:
            self._recorder.on_saved(tensor)
        self._saved_shapes.append(tuple(tensor.shape))
        self._saved_dtypes.append(tensor.dtype)
        return self, len(self._saved_shapes) - 1

    # -- attention's results; see `chunk_attention.Stash` --------------------------------------

    @property
    def is_recompute(self) -> bool:
        """Whether the layer is rerun."""
        return not self.is_open

    def get(self) -> tuple[Tensor, Tensor] | None:
        """Return attention's `(out, lse)` in a rerun; None where attention must run.

        Between this and `put` attention runs, outside of the layer's dispatch mode: its matmuls are
        not the layer's.
        """
        if self._recorder is not None:
            self._recorder.pause()
        elif self.is_recompute and self._attention_results is None:
            self._rerun_mode.__exit__(None, None, None)
            self._attends = True
        return self._attention_results

    def put(self, out_BNCH: Tensor, lse_BNC: Tensor) -> None:
        """Save attention's results of the first forward, unless attention is rerun too."""
        if self.is_open and self.mode.saved != "hidden":
            self._attention = (self._hold("outputs", out_BNCH), self._hold("sums", lse_BNC))
        if self._recorder is not None:
            self._recorder.start(out_BNCH, lse_BNC)
        elif self._attends:
            self._leave_attention()
            if isinstance(self._rerun_mode, UnusedMatmulFinder):
                self._rerun_mode.add_inputs(out_BNCH, lse_BNC)

    def _leave_attention(self) -> None:
        """Enter the rerun's mode again after attention ended or failed."""
        if self._attends:
            self._attends = False
            self._rerun_mode.__enter__()

    def begin_choice(self) -> None:
        """An indexer begins to choose keys, outside of the layer's dispatch mode."""
        if self._recorder is not None:
            self._recorder.pause()

    def end_choice(self, indices_BCS: Tensor | None) -> None:
        """Save what an indexer has chosen; None for all keys that a query sees."""
        if indices_BCS is not None:
            self._choice = self._hold("chosen keys", indices_BCS)
        if self._recorder is not None:
            self._recorder.start()

    def chosen(self) -> Tensor | None:
        """Return in a rerun what `end_choice` took."""
        return self._chosen

    # -- modules of the layer that run in tiles ------------------------------------------------

    def run_tiles(
        self, run: Callable[[], list[Tensor]], hidden: Tensor, num_outputs: int
    ) -> tuple[list[Tensor], list[bool]]:
        """Run a module in tiles, outside of the layer's dispatch mode.

        `run` runs all tiles; in a rerun without gradients, and only where it must: outputs that
        took matmuls are kept like a matmul's, where those are kept. Returns the module's outputs,
        and which of them needed gradients in the first forward.
        """
        if self.is_open:
            return self._run_tiles_first(run, hidden)
        call = self._tiled_calls[self._next_tiled_call]
        self._next_tiled_call += 1
        mode = self._rerun_mode
        if isinstance(mode, SelectiveReplayer) and call.random_state is not None:
            call.random_state.restore()
            return mode.replay_tiles(num_outputs), call.need_grads
        mode.__exit__(None, None, None)
        try:
            with torch.no_grad():
                outputs = run()
        finally:
            mode.__enter__()
        if isinstance(mode, UnusedMatmulFinder):
            mode.add_inputs(*outputs)
        return outputs, call.need_grads

    def _run_tiles_first(
        self, run: Callable[[], list[Tensor]], hidden: Tensor
    ) -> tuple[list[Tensor], list[bool]]:
        random_state, recorder = None, self._recorder
        if recorder is None:
            outputs = run()
        else:
            recorder.pause()
            num_matmuls = len(self._tile_matmuls)
            outputs = run()
            has_matmuls = len(self._tile_matmuls) > num_matmuls
            if has_matmuls:
                random_state = RunContext(outputs[0].device, like=self._run_context)
            recorder.start()
            recorder.add_tiles(hidden, outputs, as_matmuls=has_matmuls)
        need_grads = [x.requires_grad for x in outputs]
        self._tiled_calls.append(_FirstTiledCall(need_grads, random_state))
        return outputs, need_grads

    # -- backward ----------------------------------------------------------------------------

    def handles(self) -> Iterator[OffloadedTensor]:
        """Yield the handles of what is offloaded, in the order in which backward needs them."""
        for saved in self._saved_tensors():
            yield from saved.handles()
        for matmul in self._tile_matmuls:
            if matmul.output is not None:
                yield from matmul.output.handles()

    def unpack(self, index: int) -> Tensor:
        """Return the saved tensor of slot `index`; the first time the layer is rerun.

        Raises:
            SPPOError: On a second backward, or if the rerun was not like the first forward.
        """
        if self.before_use is not None:
            self.before_use()
        if self._recomputed is None:
            if self.prefetch_order is not None:
                self.prefetch_order.on_backward(self)
            self._recomputed = dict(enumerate(self._recompute()))
        if index not in self._recomputed:
            raise SPPOError(
                f"{self.label}: backward asked twice for the same saved tensor. Chunked sequences "
                "allow one backward per forward (retain_graph=True is not supported)."
            )
        return self._recomputed.pop(index)

    def _recompute(self) -> list[Tensor]:
        """Rerun the layer; returns all that autograd saved in its first forward."""
        if self._hidden is None:
            raise SPPOError(f"{self.label}: nothing to recompute from; was forward interrupted?")
        try:
            self._refuse_changes()
            if self.before_recompute is not None:
                self.before_recompute()
            hidden = self._hidden.take().detach().requires_grad_(self._hidden_requires_grad)
            if self._attention is not None:
                self._attention_results = (self._attention[0].take(), self._attention[1].take())
            if self._choice is not None:
                self._chosen = self._choice.take()
            states: States = {
                key: saved.take().detach().requires_grad_(needs_grad)
                for key, (saved, needs_grad) in self._states.items()
            }
            kind = self._kind()
            if self._matmuls is None:
                mode = self._unused_matmuls_mode(hidden, kind)
            else:
                mode = SelectiveReplayer(self._matmuls, width=hidden.shape[-1], label=self.label)
            recomputed = self._rerun(hidden, states, mode, kind)
        finally:
            self._attention_results = self._exchanged = self._chosen = None
            self._release()
        self._check_repeated(recomputed)
        return recomputed

    def recompute_kv(self) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first forward, BKCH: the layer is rerun up to attention.

        Called before backward asks for what autograd saved; all that is saved remains so.

        Raises:
            SPPOError: What the layer reads has changed, or its forward was interrupted.
        """
        saved_hidden = self._hidden
        if saved_hidden is None:
            raise SPPOError(
                f"{self.label}: nothing to recompute keys and values from; was forward interrupted?"
            )
        self._refuse_changes()
        with contextlib.ExitStack() as borrowed:
            hidden = borrowed.enter_context(saved_hidden.borrow())
            states = {
                key: borrowed.enter_context(saved.borrow())
                for key, (saved, _) in self._states.items()
            }
            if self._choice is not None:
                self._chosen = borrowed.enter_context(self._choice.borrow())
            kind = ("keys and values", self._kind())  # queries are not needed here
            mode = self._unused_matmuls_mode(hidden, kind)
            try:
                k_BKCH, v_BKCH = self._rerun(hidden, states, mode, kind, to_kv=True)
            finally:
                self._chosen = None
        return k_BKCH, v_BKCH

    def _rerun(
        self,
        hidden: Tensor,
        states: States,
        mode: _RerunMode,
        kind: Hashable,
        *,
        to_kv: bool = False,
    ) -> list[Tensor]:
        """Rerun the layer under `mode`, and without it if that is not like its first forward.

        Returns:
            All that autograd saves; with `to_kv` keys and values, BKCH, at which the rerun ends.
        """
        found: list[Tensor] = []
        wanted = 2 if to_kv else len(self._saved_shapes)

        def keep(tensor: Tensor) -> None:
            mode.on_saved(tensor)
            found.append(tensor.detach())
            if len(found) == wanted:
                raise _Stop

        def on_kv(k_BKCH: Tensor, v_BKCH: Tensor) -> None:
            keep(k_BKCH)
            keep(v_BKCH)

        saves = torch.autograd.graph.saved_tensors_hooks(keep, _no_unpack)
        with self._as_first(mode), torch.no_grad() if to_kv else torch.enable_grad():
            try:
                with contextlib.suppress(_Stop), contextlib.nullcontext() if to_kv else saves, mode:
                    arguments = _with_hidden(hidden, *self._arguments)
                    self._run_layer(*arguments, states, on_kv if to_kv else None)
                is_like_first = True
            except MatmulsChanged:
                is_like_first = False
        if isinstance(mode, UnusedMatmulFinder | UnusedMatmulSkipper) and not to_kv:
            # Something in the layer may behave otherwise under a mode.
            is_like_first = is_like_first and self._is_repeated(found)
        if not is_like_first:
            found.clear()
            _unused_matmuls(self.layer)[kind] = None
            return self._rerun(hidden, states, _NoMode(), kind, to_kv=to_kv)
        if isinstance(mode, UnusedMatmulFinder):
            _unused_matmuls(self.layer)[kind] = mode.result()
        return found

    @contextlib.contextmanager
    def _as_first(self, mode: _RerunMode) -> Iterator[None]:
        """Restore what held in the first forward, for a rerun under `mode`."""
        self._rerun_mode, self._next_tiled_call = mode, 0
        try:
            with self._run_context.restored(), self._as_in_forward():
                yield
        finally:
            self._rerun_mode = _NoMode()

    def _run_layer(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        states: States,
        on_kv: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        """Run the layer's forward in its context; see [Note: backward has no context].

        `states` are those of before the chunk; what mixers write now is dropped. `on_kv` gets keys
        and values, BKCH, and ends the run.
        """
        first, group, attention = self.context.states, self.context.group, self._attention_results
        if group is not None and attention is not None and self._exchanged is None:
            self._exchanged = RecomputeExchanges(group.start_heads_to_tokens(attention[0]))
        context = dataclasses.replace(
            self.context,
            stash=self,
            exchanged=self._exchanged,
            states=None if first is None else LayerStates(states, first.documents),
            on_kv=on_kv,
            attended=Attended(),
        )
        with (
            chunked_attention(context),
            self.in_tiles(self.layer, args[0] if args else kwargs["hidden_states"], self),
            separate_documents(self.layer, context.states),
            indexers_in_tiles(self.layer),
            self.around_layers(),
        ):
            # `forward`, not a call: hooks (ours, FSDP's) belong to the first forward.
            try:
                self.layer.forward(*args, **kwargs)
            finally:
                self._leave_attention()

    def _unused_matmuls_mode(self, hidden: Tensor, kind: Hashable) -> _RerunMode:
        """The mode of a rerun for which no matmuls were kept: skips unused ones, or finds them."""
        if self.reads.are_compiled:
            return _NoMode()
        known = _unused_matmuls(self.layer).get(kind, _NOT_SEARCHED)
        if known is _NOT_SEARCHED:
            return UnusedMatmulFinder(hidden)
        return _NoMode() if known is None else UnusedMatmulSkipper(known, width=hidden.shape[-1])

    def _kind(self) -> Hashable:
        """Return a key that is equal for reruns of a layer with the same unused matmuls."""
        saved = (*map(len, self._saved_shapes), *self._saved_dtypes)
        # Some layers have another branch for a single token.
        return self._hidden_requires_grad, self._shape[:-1].numel() == 1, saved

    def _refuse_changes(self) -> None:
        assert self._read_arguments is not None, "forward has noted the arguments"
        arguments, versions = self._read_arguments
        where = f"recomputing {self.label}"
        self.reads.check_unchanged(self._versions, where)
        arguments.check_unchanged(versions, where)

    def _is_repeated(self, recomputed: list[Tensor]) -> bool:
        shapes, dtypes = [tuple(x.shape) for x in recomputed], [x.dtype for x in recomputed]
        return shapes == self._saved_shapes and dtypes == self._saved_dtypes

    def _check_repeated(self, recomputed: list[Tensor]) -> None:
        if not self._is_repeated(recomputed):
            raise SPPOError(
                f"{self.label}: the layer saved {len(recomputed)} tensors when recomputed, "
                f"{len(self._saved_shapes)} in forward, or of other shapes. Its forward depends on "
                "something that changed in between. Set recompute='none' for this model."
            )

    def _saved_tensors(self) -> Iterator[SavedTensor]:
        if self._hidden is not None:
            yield self._hidden
        yield from self._attention or ()
        if self._choice is not None:
            yield self._choice
        yield from (saved for saved, _ in self._states.values())
        yield from (matmul.output for matmul in self._matmuls or () if matmul.output is not None)

    def _release(self) -> None:
        for saved in self._saved_tensors():
            saved.drop()
        self._hidden = self._attention = self._choice = None
        self._matmuls = self._read_arguments = None
        self._states = {}
        self._arguments = ((), {})


class RecomputedTile(RecomputedLayer):
    """Saved activations of a call of one of a layer's modules on some of the tokens.

    The layer has the call's input, or recomputes it, so a tile keeps matmuls alone. The layer has
    them prefetched, and shares what is the same of the run context.
    """

    def __init__(
        self, layer: RecomputedLayer, module: nn.Module, label: str, hidden: SavedTensor
    ) -> None:
        """Prepare for a call of `module`, while the first forward of `layer` runs.

        `label` names the module and the tokens, the same in all layers of a kind; `hidden` has the
        call's input in backward.
        """
        keep = layer.keep
        assert keep is not None, "tiles are made in the first forward"
        super().__init__(
            module,
            context=layer.context,
            around_layers=layer.around_layers,
            prefetch_order=None,
            offload=layer.offload,
            keep=lambda kind, tensor: keep(f"{label}, {kind}", tensor),
            mode=layer.mode,
            label=f"{layer.label}, {label}",
            reads=ReadTensors(()),  # the layer compares what all of it reads
            before_use=layer.before_use,
        )
        self._input = hidden
        self._layer_matmuls = layer._tile_matmuls
        self._shared_context = layer._run_context
        self._as_in_forward = layer._as_in_forward

    def _hold(self, kind: str, tensor: Tensor) -> SavedTensor:
        return self._input if kind == "inputs" else super()._hold(kind, tensor)

    def close(self) -> None:
        """End the first forward."""
        super().close()
        self._layer_matmuls += self._matmuls or ()

    def _run_layer(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        states: States,
        on_kv: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        """Run the module; it has no attention and no states."""
        with self.around_layers():
            self.layer.forward(*args, **kwargs)


_T = TypeVar("_T")


def checkpoint(run: Callable[..., _T], *args: Any) -> _T:
    """Return `run(*args)`, which saves its arguments alone and is run again in backward.

    This is `torch.utils.checkpoint`, whose hooks of saved tensors end even if `run` raises. PyTorch
    2.11 leaves them in place then, and what is saved later would be recomputed by this `run`.
    """
    is_forward = True
    raised: list[BaseException] = []

    def guarded(*args: Any) -> Any:
        try:
            return run(*args)
        except BaseException as error:
            if not is_forward:
                raise
            raised.append(error)

    result: _T = torch.utils.checkpoint.checkpoint(guarded, *args, use_reentrant=False)
    is_forward = False
    if raised:
        raise raised.pop()
    return result


class RandomState:
    """The state of the random generators of the CPU and of a device, to be restored."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Put the generators back into this state."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


class RunContext(RandomState):
    """Random state and autocast settings of a first forward, for its rerun."""

    def __init__(self, device: torch.device, *, like: RunContext | None = None) -> None:
        """Record what holds now, on the CPU and on `device`; equal state is shared with `like`."""
        super().__init__(device)
        if like is not None and torch.equal(self._cpu, like._cpu):
            self._cpu = like._cpu  # 5 KB
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {device.type, "cpu"}
        ]
        self._cache = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore what was recorded; at exit all is as it was before."""
        with contextlib.ExitStack() as stack:
            devices = [self._device] if self._cuda is not None else []
            stack.enter_context(torch.random.fork_rng(devices=devices))
            self.restore()
            stack.enter_context(without_cached_weights())
            for kind, enabled, dtype in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(
                            kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache
                        )
                    )
            yield


def _unpack(slot: _Slot) -> Tensor:
    activations, index = slot
    return activations.unpack(index)


def _no_unpack(_: object) -> Tensor:
    raise AssertionError("the graph of a recomputed layer is never run backward")


def _detach(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _without_shared_kv(arguments: Any) -> Any:
    """Replace the contents of containers of shared keys and values by tensors without memory.

    Through them layers hand K/V to later layers (Gemma 3n, Gemma 4). Saved activations that held
    them would keep them alive, and be held by them in turn. A rerun passes them to attention, which
    is answered from what was saved and reads their shapes alone; any other reader would find NaN.
    """
    return tree_map_only(
        UserDict,
        lambda shared: type(shared)(
            {key: tree_map_only(Tensor, _shape_only, x) for key, x in shared.items()}
        ),
        arguments,
    )


def _shape_only(tensor: Tensor) -> Tensor:
    empty = tensor.detach().new_full((), float("nan")).expand(tensor.shape)
    return empty.requires_grad_(tensor.requires_grad)


def _named_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among a layer's arguments, each with its argument's name."""
    for name, value in (*((f"argument {i}", x) for i, x in enumerate(args)), *kwargs.items()):
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                yield name, leaf


def _with_hidden(
    hidden: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (hidden, *args[1:]), kwargs
    return (), {**kwargs, "hidden_states": hidden}
