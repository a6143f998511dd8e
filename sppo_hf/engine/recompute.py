"""A frame that is recomputed in backward, without running attention again.

The frame of one (layer, chunk) keeps the layer's *inputs*: its input, attention's output and its
log-sum-exp. (Where a plan that fits no other way says so it keeps the input alone; then attention
runs again too, on the keys and values that are there.) What autograd saves inside the layer is
dropped as it is saved; the first time backward asks for any of it, the layer runs once more, with
attention answered from what is kept, and is stopped as soon as the last saved tensor has been seen
(so its last matrix product does not run again either, nor any other that no saved tensor depends
on). A frame may keep the outputs of the layer's *products* too (see `selective`), so that only
elementwise work is done again. What is kept stays on the device or travels through the offload
engine.

The layer's random state and autocast settings are those of the first forward, so dropout inside a
layer (LoRA's, for one) repeats exactly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections import UserDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from sppo_hf.engine.attention_interface import chunked_attention
from sppo_hf.engine.chunk_context import Attended, ChunkContext
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
from sppo_hf.engine.versions import ReadTensors, Versions
from sppo_hf.errors import SPPOError
from sppo_hf.offload.engine import OffloadEngine
from sppo_hf.offload.layer_offload import PrefetchOrder
from sppo_hf.offload.storage import OffloadedTensor, version_of
from sppo_hf.planning.activation_modes import ActivationMode
from sppo_hf.planning.tiers import OffloadTier

AroundLayers = Callable[[], contextlib.AbstractContextManager[object]]
"""Makes a context in which layers run."""

InTiles = Callable[
    [nn.Module, Tensor, "RecomputedLayer | None"], contextlib.AbstractContextManager[None]
]
"""Makes a context in which a layer's token-wise modules run in tiles; see `sliced_calls`."""


class SavedTensor(Protocol):
    """One tensor between forward and backward."""

    def handles(self) -> Iterable[OffloadedTensor]:
        """The handle of the tensor, if it is away."""
        ...

    def take(self) -> Tensor:
        """The tensor, on the device; the holder lets go of it."""
        ...

    def borrow(self) -> contextlib.AbstractContextManager[Tensor]:
        """The tensor, on the device, for a while; it waits where it did before and after."""
        ...

    def drop(self) -> None:
        """Let go of the tensor, taken or not."""
        ...


class SavedOnDevice:
    """A tensor that stays on the device, and perhaps is still in use there."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._version = version_of(tensor)

    def handles(self) -> Iterable[OffloadedTensor]:
        """See `SavedTensor`."""
        return ()

    def take(self) -> Tensor:
        """See `SavedTensor`.

        Raises:
            SPPOError: The tensor was changed in place since.
        """
        tensor = self._checked()
        self.drop()
        return tensor

    def borrow(self) -> contextlib.AbstractContextManager[Tensor]:
        """See `SavedTensor`."""
        return contextlib.nullcontext(self._checked())

    def _checked(self) -> Tensor:
        assert self._tensor is not None, "a kept tensor is taken once"
        tensor = self._tensor
        if version_of(tensor) != self._version:
            raise SPPOError(
                f"a tensor of shape {tuple(tensor.shape)} that is kept for recomputation was "
                "changed in place between forward and backward. Use operations that are not in "
                "place in the layer's hooks, or set recompute='none'."
            )
        return tensor

    def drop(self) -> None:
        """See `SavedTensor`."""
        self._tensor = None


class SavedOffloaded:
    """A tensor that travels to `tier` and back."""

    def __init__(self, engine: OffloadEngine, tensor: Tensor, tier: OffloadTier) -> None:
        self._engine = engine
        self._handle: OffloadedTensor | None = engine.start_offload(tensor, tier=tier)

    def handles(self) -> Iterable[OffloadedTensor]:
        """See `SavedTensor`."""
        return () if self._handle is None else (self._handle,)

    def take(self) -> Tensor:
        """See `SavedTensor`."""
        assert self._handle is not None, "an offloaded tensor is taken once"
        tensor = self._engine.wait_for(self._handle)
        self.drop()
        return tensor

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Tensor]:
        """See `SavedTensor`."""
        assert self._handle is not None, "an offloaded tensor is taken once"
        was_away = self._engine.bytes_to_prefetch(self.handles()) > 0
        tensor = self._engine.wait_for(self._handle)
        try:
            yield tensor
        finally:
            if was_away and self._handle is not None:
                del tensor
                self._engine.evict(self._handle)

    def drop(self) -> None:
        """See `SavedTensor`."""
        if self._handle is not None:
            self._engine.release(self._handle)
            self._handle = None


class _Stop(Exception):
    """Every saved tensor has been seen again; the rest of the layer's forward is not needed."""


class _Nothing(contextlib.nullcontext[None]):
    """Leaves a layer's second forward alone."""

    def saved(self, tensor: Tensor) -> None:
        """Autograd saves `tensor`."""


_Aside = SelectiveReplayer | UnusedMatmulFinder | UnusedMatmulSkipper | _Nothing
"""What runs beside a layer's second forward."""


_UNKNOWN = UnusedMatmuls((), ())
_NO_READS = ReadTensors(())
_found: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, UnusedMatmuls | None]]
_found = weakref.WeakKeyDictionary()


def _needless(layer: nn.Module) -> dict[Hashable, UnusedMatmuls | None]:
    """What was found of `layer`, by kind of its forward; see [Note: needless products]."""
    return _found.setdefault(layer, {})


def is_compiled(layer: nn.Module) -> bool:
    """Whether `torch.compile` made a part of `layer`.

    Beside a dispatch mode such a part would run in eager mode, from then on for good, and what it
    saves would be something else.
    """
    return any(
        # By name: importing its class takes seconds.
        type(module).__name__ == "OptimizedModule"
        or module._compiled_call_impl is not None
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
        for module in layer.modules()
    )


class _Slot:
    """What autograd holds instead of a saved tensor."""

    __slots__ = ("frame", "index")

    def __init__(self, frame: RecomputedLayer, index: int) -> None:
        self.frame = frame
        self.index = index


class _Unseen(NamedTuple):
    """What ran in a layer's first forward, unseen."""

    need_grads: list[bool]
    """Which of its outputs needed gradients."""
    after: RunContext | None
    """What random numbers come behind it, where it does not run again but is kept."""


@dataclass(slots=True)
class _OfParts:
    """What the parts of a layer have come to that have frames of their own."""

    products: list[Matmul] = field(default_factory=list[Matmul])
    """Those that they hold."""
    multiply: bool = False
    """Whether those that ran last have products."""


class RecomputedLayer:
    """Frame of one (layer, chunk) in recompute mode; also the stash of its attention.

    Use: `open(args, kwargs)` before the layer's forward, `close()` after it.
    """

    def __init__(
        self,
        layer: nn.Module,
        *,
        context: ChunkContext,
        around_layers: AroundLayers,
        prefetch_order: PrefetchOrder | None,
        offload: OffloadEngine,
        keep: Callable[[str, Tensor], Tensor],
        mode: ActivationMode,
        label: str,
        reads: ReadTensors,
        in_tiles: InTiles = lambda layer, hidden, frame: contextlib.nullcontext(),
        number: int | None = None,
        before_recompute: Callable[[], None] | None = None,
        before_use: Callable[[], None] | None = None,
    ) -> None:
        """Make a frame.

        Args:
            layer: The decoder layer.
            context: That of the layer's first forward.
            around_layers: Is entered around the second forward.
            prefetch_order: Order of frames in this sequence, for prefetching; None for a frame
                that is a part of another one, which has the other's copies.
            offload: Moves what is kept, if the mode says so.
            keep: Gives a tensor that stays its place on the device.
            mode: What is kept ("inputs", "matmuls" or "hidden"), and where it waits.
            label: Name of the frame in errors, for example "layer 3, chunk 1".
            reads: What the layer reads beside its arguments.
            in_tiles: Lets its token-wise modules run in tiles in the second forward.
            number: Its place in the order of forward, for the prefetch order.
            before_recompute: Is called before the layer runs again, while the frame still has what
                `recompute_kv` needs.
            before_use: Called before the layer runs again, and before backward gets what it saved.
        """
        assert mode.recompute, f"a frame that is saved whole has nothing to recompute: {mode}"
        self._layer = layer
        self._context = context.for_recompute()
        self._around_layers = around_layers
        self._in_tiles = in_tiles
        self._prefetch_order = prefetch_order
        self._number = number
        self._offload = offload
        self._keep: Callable[[str, Tensor], Tensor] | None = keep
        self._beside: _Aside = _Nothing()
        self._of_parts = _OfParts()
        self._like: RunContext | None = None
        self._unseen: list[_Unseen] = []
        self._next_unseen = 0
        self._mode = mode
        self._label = label
        self._before_recompute = before_recompute
        self._reads = reads
        self._as_in_forward = reads.as_in_forward
        self._before_use = before_use
        self._versions: Versions = ()
        self._arguments: tuple[ReadTensors, Versions] | None = None
        self._meta: list[tuple[torch.Size, torch.dtype]] = []
        self._again: dict[int, Tensor] | None = None
        self._stash: tuple[SavedTensor, SavedTensor] | None = None
        self._hidden: SavedTensor | None = None
        self._given_states: States = {} if context.states is None else context.states.before
        self._states: dict[StateKey, tuple[SavedTensor, bool]] = {}
        self._exchanged: RecomputeExchanges | None = None
        """While the layer is recomputed: what the ranks that share its chunk exchange."""
        self._recorder: SelectiveRecorder | None = None
        self._products: tuple[Matmul, ...] | None = None
        self._rest: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._hooks: Any = None
        self._recomputing: tuple[Tensor, Tensor] | None = None
        self._attends = False
        """Whether attention runs in the second forward, where nobody watches."""

    # -- forward -----------------------------------------------------------------------------

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what the layer needs to run again, and start dropping what autograd saves."""
        hidden = args[0] if args else kwargs["hidden_states"]
        self._hidden_requires_grad = hidden.requires_grad
        self._shape = hidden.shape
        self._hidden = self._hold("inputs", hidden.detach())
        given, self._given_states = self._given_states, {}
        self._states = {
            # Those of all layers are of a kind, so that a chunk's lie beside each other.
            (kind, layer, at): (
                self._hold(f"{kind} states {at}", state.detach()),
                state.requires_grad,
            )
            for (kind, layer, at), state in given.items()
        }
        rest = tree_map_only(
            Tensor, _detach, _without_shared_keys(_with_hidden(None, args, kwargs))
        )
        self._rest = cast("tuple[tuple[Any, ...], dict[str, Any]]", rest)
        self._versions = self._reads.versions()
        arguments = ReadTensors.of_named(_named_arguments(*self._rest))
        self._arguments = (arguments, arguments.versions())
        self._run_context = RunContext(hidden.device, like=self._like)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        if self._mode.saved == "matmuls":
            self._recorder = SelectiveRecorder(
                self._layer,
                hidden,
                hold=self._hold_product,
                model=self._context.model.causal_lm,
            )
            self._recorder.start(*given.values())

    @property
    def is_open(self) -> bool:
        """Whether the frame watches what autograd saves."""
        return self._hooks is not None

    def close(self) -> None:
        """Stop watching what autograd saves, and put the frame on the prefetch order."""
        if self._recorder is not None:
            self._products = self._recorder.stop()
            self._recorder = None
        self._unhook()
        self._keep = None
        self._reads.ignore_own_writes(self._versions)
        if not self._meta:
            self._release()  # nothing in the layer needs a gradient
        elif self._prefetch_order is not None:
            self._prefetch_order.record(self, self._number)

    def cancel(self) -> None:
        """Stop watching after an exception in the layer's forward."""
        if self._recorder is not None:
            self._recorder.abandon()
            self._recorder = None
        self._unhook()
        self._release()

    def _unhook(self) -> None:
        assert self._hooks is not None, "a frame is closed while it is open"
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(None, None, None)

    def get(self) -> tuple[Tensor, Tensor] | None:
        """Attention's `(out, lse)` while the layer is recomputed, None where attention runs.

        That is between this and `put`, and is no product of the layer.
        """
        if self._recorder is not None:
            self._recorder.pause()
        elif self.is_recompute and self._recomputing is None:
            self._beside.__exit__(None, None, None)
            self._attends = True
        return self._recomputing

    def put(self, out_BNCH: Tensor, lse_BNC: Tensor) -> None:
        """Keep attention's results of the first forward, unless nothing will be recomputed."""
        if self._hooks is not None and self._mode.saved != "hidden":
            self._stash = (self._hold("outputs", out_BNCH), self._hold("sums", lse_BNC))
        if self._recorder is not None:
            self._recorder.resume(out_BNCH, lse_BNC)
        elif self._attends:
            self._attended()
            if isinstance(self._beside, UnusedMatmulFinder):
                self._beside.given(out_BNCH, lse_BNC)

    @property
    def is_recompute(self) -> bool:
        """Whether the layer runs again."""
        return not self.is_open

    def _attended(self) -> None:
        """Attention of the second forward has ended, or failed."""
        if self._attends:
            self._attends = False
            self._beside.__enter__()

    # -- parts of the layer that have frames of their own ----------------------------------------

    def part(self, module: nn.Module, label: str, hidden: SavedTensor) -> RecomputedTile:
        """A frame for a call of `module` on a part of the tokens, inside the layer's forward.

        `label` says what it is, and which tokens: the same in all layers of a kind. `hidden` has
        the call's input in backward.
        """
        keep = self._keep
        assert keep is not None, "parts are made while the frame is open"
        return RecomputedTile(
            module,
            hidden,
            context=self._context,
            around_layers=self._around_layers,
            prefetch_order=None,
            offload=self._offload,
            keep=lambda kind, tensor: keep(f"{label}, {kind}", tensor),
            mode=self._mode,
            label=f"{self._label}, {label}",
            reads=_NO_READS,  # this frame compares what all of the layer reads
            before_use=self._before_use,
            of_parts=self._of_parts,
            like=self._run_context,
            as_in_forward=self._as_in_forward,
        )

    def run_unseen(
        self, run: Callable[[], list[Tensor]], given: Tensor, count: int
    ) -> tuple[list[Tensor], list[bool]]:
        """Run parts of the layer, which are not recorded or answered with the rest of it.

        Args:
            run: Runs them; in the layer's second forward without gradients, and only if it must:
                what multiplies is kept like a product, where products are kept.
            given: What the parts are given.
            count: How many tensors they return.

        Returns:
            These, and which of them needed gradients in the first forward.
        """
        if self.is_open:
            after, recorder = None, self._recorder
            if recorder is None:
                outputs = run()
            else:
                recorder.pause()
                self._of_parts.multiply = False
                outputs = run()
                if self._of_parts.multiply:
                    after = RunContext(outputs[0].device, like=self._run_context)
                recorder.resume()
                recorder.add_unseen(given, outputs, as_products=self._of_parts.multiply)
            self._unseen.append(_Unseen([x.requires_grad for x in outputs], after))
            return outputs, self._unseen[-1].need_grads
        before, self._next_unseen = self._unseen[self._next_unseen], self._next_unseen + 1
        beside = self._beside
        if isinstance(beside, SelectiveReplayer) and before.after is not None:
            before.after.restore()
            return beside.unseen(count), before.need_grads
        beside.__exit__(None, None, None)
        try:
            with torch.no_grad():
                outputs = run()
        finally:
            beside.__enter__()
        if isinstance(beside, UnusedMatmulFinder):
            beside.given(*outputs)
        return outputs, before.need_grads

    def _hold(self, kind: str, tensor: Tensor) -> SavedTensor:
        if self._mode.tier != "device":
            return SavedOffloaded(self._offload, tensor, self._mode.tier)
        assert self._keep is not None, "what is kept is kept while the frame is open"
        return SavedOnDevice(self._keep(kind, tensor))

    def _hold_product(self, kind: str, tensor: Tensor) -> SavedTensor:
        # Experts have as many tokens as chose them, so there are no other tensors of that shape to
        # lie beside; and a subclass is more than its bytes.
        usual = tensor.numel() == self._shape[:-1].numel() * tensor.shape[-1]
        if self._mode.offload or (usual and type(tensor) is Tensor):
            return self._hold(kind, tensor)
        return SavedOnDevice(tensor)

    def _pack(self, tensor: Tensor) -> _Slot:
        if self._recorder is not None:
            self._recorder.saved(tensor)
        self._meta.append((tensor.shape, tensor.dtype))
        return _Slot(self, len(self._meta) - 1)

    # -- backward ----------------------------------------------------------------------------

    def handles(self) -> Iterator[OffloadedTensor]:
        """What is away, first needed first."""
        for holder in self._holders():
            yield from holder.handles()
        for product in self._of_parts.products:
            if product.holder is not None:
                yield from product.holder.handles()

    def saved(self, index: int) -> Tensor:
        """The saved tensor of slot `index`, recomputing the layer the first time.

        Raises:
            SPPOError: On a second backward, or if the layer did not repeat itself.
        """
        if self._before_use is not None:
            self._before_use()
        if self._again is None:
            if self._prefetch_order is not None:
                self._prefetch_order.on_backward(self)
            self._recompute()
        assert self._again is not None
        if index not in self._again:
            raise SPPOError(
                f"{self._label}: backward asked twice for the same saved tensor. Chunked sequences "
                "allow one backward per forward (retain_graph=True is not supported)."
            )
        return self._again.pop(index)

    def _recompute(self) -> None:
        if self._hidden is None:
            raise SPPOError(f"{self._label}: nothing to recompute from; was forward interrupted?")
        self._refuse_changes()
        if self._before_recompute is not None:
            self._before_recompute()
        hidden = self._hidden.take().detach().requires_grad_(self._hidden_requires_grad)
        if self._stash is not None:
            self._recomputing = (self._stash[0].take(), self._stash[1].take())
        states: States = {
            key: holder.take().detach().requires_grad_(needs_grad)
            for key, (holder, needs_grad) in self._states.items()
        }
        try:
            again = self._run_again(hidden, states, self._aside(hidden))
            if again is None:
                _needless(self._layer)[self._kind()] = None
                again = self._run_again(hidden, states, _Nothing())
        finally:
            self._recomputing = self._exchanged = None
            self._release()
        assert again is not None, "what computes all its products has no others"
        self._check_repeated(again)
        self._again = dict(enumerate(again))

    def recompute_kv(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the first forward, BKCH: the layer runs again up to its attention.

        Comes before backward asks for what autograd saved; what the frame keeps, it keeps.

        Raises:
            SPPOError: What the layer reads has changed, or its forward was interrupted.
        """
        hidden_holder = self._hidden
        if hidden_holder is None:
            raise SPPOError(f"{self._label}: nothing to make keys from; was forward interrupted?")
        self._refuse_changes()
        with contextlib.ExitStack() as borrowed:
            hidden = borrowed.enter_context(hidden_holder.borrow())
            states = {
                key: borrowed.enter_context(holder.borrow())
                for key, (holder, _) in self._states.items()
            }
            kind = ("keys", self._kind())  # queries are needless here
            found = self._run_to_keys(hidden, states, self._beside_all(hidden, kind), kind)
            if found is None:
                _needless(self._layer)[kind] = None
                found = self._run_to_keys(hidden, states, _Nothing(), kind)
        assert found is not None, "a layer whose keys are made again attends"
        return found

    def _run_to_keys(
        self, hidden: Tensor, states: States, aside: _Aside, kind: Hashable
    ) -> tuple[Tensor, Tensor] | None:
        """Keys and values; None if the layer does not repeat itself beside `aside`."""
        found: list[tuple[Tensor, Tensor]] = []

        def take(k_BKCH: Tensor, v_BKCH: Tensor) -> None:
            aside.saved(k_BKCH)
            aside.saved(v_BKCH)
            found.append((k_BKCH, v_BKCH))
            raise _Stop

        self._beside, self._next_unseen = aside, 0
        try:
            with (
                self._run_context.restored(),
                self._as_in_forward(),
                torch.no_grad(),
                contextlib.suppress(_Stop),
                aside,
            ):
                self._run_layer(*_with_hidden(hidden, *self._rest), states, take)
        except MatmulsChanged:
            return None
        finally:
            self._beside = _Nothing()
        assert found, "a layer whose keys are made again attends"
        if isinstance(aside, UnusedMatmulFinder):
            _needless(self._layer)[kind] = aside.result()
        return found[0]

    def _refuse_changes(self) -> None:
        assert self._arguments is not None, "what was opened has its arguments"
        arguments, versions = self._arguments
        where = f"recomputing {self._label}"
        self._reads.check_unchanged(self._versions, where)
        arguments.check_unchanged(versions, where)

    def _run_layer(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        states: States,
        on_kv: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        """Run the layer's forward once more; attention's results come from `get`.

        See [Note: backward has no context] in `chunk_context`. Of `states` what mixers write was
        written in forward; `on_kv` gets keys and values, BKCH, and ends the run.
        """
        given, group, stashed = self._context.states, self._context.group, self._recomputing
        if group is not None and stashed is not None and self._exchanged is None:
            self._exchanged = RecomputeExchanges(group.start_heads_to_tokens(stashed[0]))
        context = dataclasses.replace(
            self._context,
            stash=self,
            exchanged=self._exchanged,
            states=None if given is None else LayerStates(states, given.documents),
            on_kv=on_kv,
            attended=Attended(),
        )
        with (
            chunked_attention(context),
            self._in_tiles(self._layer, args[0] if args else kwargs["hidden_states"], self),
            separate_documents(self._layer, context.states),
            self._around_layers(),
        ):
            # `forward`, not a call: hooks (ours, FSDP's) belong to the first forward.
            try:
                self._layer.forward(*args, **kwargs)
            finally:
                self._attended()

    def _run_again(self, hidden: Tensor, states: States, aside: _Aside) -> list[Tensor] | None:
        """All that autograd saves; None if the layer does not repeat itself beside `aside`."""
        args, kwargs = _with_hidden(hidden, *self._rest)
        again: list[Tensor] = []

        def pack(tensor: Tensor) -> None:
            aside.saved(tensor)
            again.append(tensor.detach())
            if len(again) == len(self._meta):
                raise _Stop

        self._beside, self._next_unseen = aside, 0
        try:
            with (
                self._run_context.restored(),
                self._as_in_forward(),
                torch.enable_grad(),
                torch.autograd.graph.saved_tensors_hooks(pack, _no_unpack),
                contextlib.suppress(_Stop),
                aside,
            ):
                self._run_layer(args, kwargs, states)
        except MatmulsChanged:
            return None
        finally:
            self._beside = _Nothing()
        # Something in it may have minded the dispatch mode.
        if isinstance(aside, UnusedMatmulFinder | UnusedMatmulSkipper) and not self._is_repeated(
            again
        ):
            return None
        if isinstance(aside, UnusedMatmulFinder):
            _needless(self._layer)[self._kind()] = aside.result()
        return again

    def _aside(self, hidden: Tensor) -> _Aside:
        """What runs beside the layer: answers products, or learns which of them to answer."""
        width = hidden.shape[-1]
        if self._products is not None:
            return SelectiveReplayer(self._products, width=width, label=self._label)
        return self._beside_all(hidden, self._kind())

    def _beside_all(self, hidden: Tensor, kind: Hashable) -> _Aside:
        """What runs beside a second forward that computes all products but needless ones."""
        known = _needless(self._layer).get(kind, _UNKNOWN)
        if known is _UNKNOWN and not is_compiled(self._layer):
            return UnusedMatmulFinder(hidden)
        if known is _UNKNOWN:
            known = _needless(self._layer)[kind] = None
        return _Nothing() if known is None else UnusedMatmulSkipper(known, width=hidden.shape[-1])

    def _kind(self) -> Hashable:
        """What a layer's forwards have in common whose needless products are the same."""
        saved = tuple((len(shape), dtype) for shape, dtype in self._meta)
        # Some layers treat a single token in a way of its own.
        return self._hidden_requires_grad, self._shape[:-1].numel() == 1, saved

    def _is_repeated(self, again: list[Tensor]) -> bool:
        return [(t.shape, t.dtype) for t in again] == self._meta

    def _check_repeated(self, again: list[Tensor]) -> None:
        if not self._is_repeated(again):
            raise SPPOError(
                f"{self._label}: the layer saved {len(again)} tensors when recomputed, "
                f"{len(self._meta)} in forward, or of other shapes. Its forward depends on "
                "something that changed in between. Set recompute='none' for this model."
            )

    def _holders(self) -> Iterator[SavedTensor]:
        if self._hidden is not None:
            yield self._hidden
        yield from self._stash or ()
        yield from (holder for holder, _ in self._states.values())
        for product in self._products or ():
            if product.holder is not None:
                yield product.holder

    def _release(self) -> None:
        for holder in self._holders():
            holder.drop()
        self._hidden = self._stash = self._products = self._arguments = None
        self._states = {}
        self._rest = ((), {})


class RecomputedTile(RecomputedLayer):
    """Frame of a part of a layer's work, on some of its tokens; see `RecomputedLayer.part`.

    Its input is what the layer's own frame has, or makes again, so it keeps products alone.
    """

    def __init__(
        self,
        module: nn.Module,
        hidden: SavedTensor,
        *,
        of_parts: _OfParts,
        like: RunContext,
        as_in_forward: Callable[[], contextlib.AbstractContextManager[None]],
        **others: Any,
    ) -> None:
        """Make a frame; `others` are those of `RecomputedLayer`.

        `hidden` has the input in backward, `of_parts` gets what the part multiplied and holds; what
        is as in `like`, the layer's, is shared, and so is `as_in_forward`.
        """
        super().__init__(module, **others)
        self._as_in_forward = as_in_forward
        self._input = hidden
        self._of_parts = of_parts
        self._like = like

    def _hold(self, kind: str, tensor: Tensor) -> SavedTensor:
        return self._input if kind == "inputs" else super()._hold(kind, tensor)

    def close(self) -> None:
        """See `RecomputedLayer`."""
        super().close()
        products = self._products or ()
        self._of_parts.multiply = self._of_parts.multiply or bool(products)
        self._of_parts.products += [p for p in products if p.holder is not None]

    def _run_layer(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        states: States,
        on_kv: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        """Run the part again: it has no attention and no states."""
        with self._around_layers():
            self._layer.forward(*args, **kwargs)


class RandomState:
    """Random generators of the CPU and of a device, to be as they were."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Let the next draw be the one that would have come."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


class RunContext(RandomState):
    """Random state and autocast settings of a first forward, for a second one."""

    def __init__(self, device: torch.device, *, like: RunContext | None = None) -> None:
        """Note what holds now, on the CPU and on `device`; what is as in `like` is shared."""
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
        """Let what was noted hold once more; afterwards all is as it was before."""
        with contextlib.ExitStack() as stack:
            devices = [self._device] if self._cuda is not None else []
            stack.enter_context(torch.random.fork_rng(devices=devices))
            self.restore()
            for kind, enabled, dtype in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(
                            kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache
                        )
                    )
            yield


def _unpack(slot: _Slot) -> Tensor:
    return slot.frame.saved(slot.index)


def _no_unpack(_: object) -> Tensor:
    raise AssertionError("the graph of a recomputed layer is never run backward")


def _detach(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _without_shared_keys(arguments: Any) -> Any:
    """Arguments whose containers of shared keys are copies without the keys' memory.

    In them layers hand keys to later layers (Gemma 3n, Gemma 4). Those would be kept alive by a
    frame, and hold it in turn. A layer that is run again gives them to attention, which answers
    from the stash and looks at their shapes only; whatever else read them would find NaN.
    """
    return tree_map_only(UserDict, _with_shapes_only, arguments)


def _with_shapes_only(shared: UserDict[Any, Any]) -> UserDict[Any, Any]:
    return type(shared)({key: tree_map_only(Tensor, _shape_only, x) for key, x in shared.items()})


def _shape_only(tensor: Tensor) -> Tensor:
    nothing = tensor.detach().new_full((), float("nan")).expand(tensor.shape)
    return nothing.requires_grad_(tensor.requires_grad)


def _named_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors among a layer's arguments, with the argument's name for each."""
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
