"""Autocast's casts of weights: known when autograd saves one, and made again when backward asks.

Under autocast every product casts its float32 weight, and autograd saves the cast as it would save
an activation. Kept or offloaded, a layer's weights would be there once for every chunk. A cast is
cheap to repeat and the weight is there anyway, so backward repeats it: the bits are the same.

There are two kinds. Autocast remembers casts of trained weights until it ends, and the cast's
`grad_fn` leads to the weight. Casts of frozen weights, and of parts of a weight (one expert's), it
makes anew for every product and leaves no trace of; those are seen as they are made, by a dispatch
mode.


The frames of one forward, by their numbers, and the prefetches that are due in its backward.

When backward enters a frame, those are prefetched that the step's program lists there. Which these
are comes in as data (`StepProgram.lowest_prefetched` in `sppo_hf.planning.lowering`), so the order
that was planned and simulated is the order that runs.

A frame is anything that names its handles. Frames are known weakly: autograd's graph owns them, so
a dropped graph takes its frames and their bytes with it.

[Note: backwards that are not the planned one] A batch with padding runs fewer chunks, a gradient of
a part of the graph enters fewer layers, and a graph may be walked in several goes. What a frame
that is not there would have asked for is then asked for by the next one that is entered; a jump
asks for nothing between, and what it lands on comes back when it is entered.


A frame whose bytes autograd saves: hooks that send them away at the save and fetch them at use.

Casts of weights are let go of and made again, wherever the frame's bytes wait (see `casts`).

Whoever opens and closes it around some computation decides what is in it.

Where hooks of others are active too, the innermost pair gets the tensor: what a model checkpoints
or offloads by itself inside a frame stays its own affair, and hooks around a frame see nothing of
what the frame saves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from sppo_hf.offload.engine import OffloadEngine
from sppo_hf.offload.storage import OffloadedTensor
from sppo_hf.offload.weights import HostWeights, SavedWeight
from sppo_hf.planning.tiers import Tier

# Of a layer whose casts are fewer than this share of its weights (adapters) they stay.
_WORTH = 0.125


class WeightCasts(TorchDispatchMode):
    """Knows casts of weights among what is saved between `start` and `stop`.

    Args:
        watch: whether there are casts that autocast does not remember.
        label: whose weights they are, for messages.
    """

    def __init__(self, *, watch: bool, label: object = None) -> None:
        super().__init__()
        self._watch = watch
        self._label = label
        # A weak reference keeps a storage's identity from being given to another.
        self._seen: dict[int, tuple[StorageWeakRef, Tensor, int]] = {}

    @classmethod
    def of(cls, layer: nn.Module, device_type: str, label: object = None) -> WeightCasts | None:
        """For one forward of `layer`; None where autocast casts little of its weights or nothing.

        Args:
            layer: the module that runs.
            device_type: of the device that it runs on, "cuda".
            label: whose weights they are, for messages.
        """
        if not torch.is_autocast_enabled(device_type):
            return None
        dtype = torch.get_autocast_dtype(device_type)
        weights = list(layer.parameters())
        cast = [p for p in weights if p.dim() > 1 and _is_cast(p, dtype)]
        if sum(p.numel() for p in cast) <= _WORTH * sum(p.numel() for p in weights):
            return None
        remembered = all(p.requires_grad and p.dim() == 2 for p in cast)
        return cls(watch=not remembered, label=label)

    def start(self) -> None:
        """Begin to look for casts; costs time per operation only where autocast forgets some."""
        if self._watch:
            self.__enter__()

    def stop(self) -> None:
        """Look no more; in the thread of `start`."""
        if self._watch:
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Run the operation, and remember the result of a cast of a weight."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and _is_weight(args[0]):
            storage = result.untyped_storage()
            # Not detached: here, below autograd, that would count its own versions.
            self._seen[storage._cdata] = StorageWeakRef(storage), args[0], result._version
        return result

    def cast_of(self, saved: Tensor) -> SavedWeight | None:
        """What stands for `saved` if it is a cast of a weight, or a view of one; else None."""
        if type(saved) is not Tensor or not saved.is_floating_point():
            return None
        seen = self._seen.get(saved.untyped_storage()._cdata)
        weight = _remembered(saved) if seen is None else seen[1]
        # What somebody has written into is no longer the cast.
        if weight is None or saved._version != (0 if seen is None else seen[2]):
            return None
        if weight.device != saved.device or not _is_cast(weight, saved.dtype):
            return None
        known = weight if type(weight) is Parameter else weight.detach()
        return SavedWeight.of(known, saved, self._label)


def _is_cast(weight: Tensor, dtype: torch.dtype) -> bool:
    return weight.is_floating_point() and weight.dtype not in (dtype, torch.float64)


def _is_weight(tensor: Tensor) -> bool:
    return type(tensor) is Parameter or type(tensor._base) is Parameter


def _remembered(saved: Tensor) -> Tensor | None:
    """The weight whose whole cast `saved` views, as autograd's graph tells."""
    cast = saved if saved._base is None else saved._base
    node = cast.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    leaf = getattr(node.next_functions[0][0], "variable", None)
    return leaf if type(leaf) is Parameter else None


class PrefetchGroup(Protocol):
    """All that backward needs of one (layer, chunk), as far as the prefetch order must know it."""

    def handles(self) -> Iterable[OffloadedTensor]:
        """The handles of what backward still needs, first needed first; none if all was kept."""
        ...


class PrefetchOrder:
    """The frames of one sequence.

    Args:
        mover: moves what the frames' handles stand for.
        max_pending_d2h_bytes: what may be on its way out when a frame has closed; None for one
            frame.
        asked: by number of a frame, the lowest number that has been prefetched once backward has
            entered it (its own and those above are); None: the frame before it. A frame above the
            end asks for nothing but itself.
        on_prefetch: is told the number of a frame when its bytes are asked for.
    """

    def __init__(
        self,
        mover: OffloadEngine,
        *,
        max_pending_d2h_bytes: int | None = None,
        asked: Sequence[int] | None = None,
        on_prefetch: Callable[[int], None] | None = None,
    ) -> None:
        assert max_pending_d2h_bytes is None or max_pending_d2h_bytes >= 0, (
            "a bound on bytes is not negative"
        )
        self._mover = mover
        self._leave_bytes = max_pending_d2h_bytes
        self._asked = asked
        self._frames: dict[int, weakref.ref[PrefetchGroup]] = {}
        self._number_of: weakref.WeakKeyDictionary[PrefetchGroup, int | None] = (
            weakref.WeakKeyDictionary()
        )
        self._reads_ahead = mover.reads_ahead
        self._on_prefetch = on_prefetch
        self._told: set[int] = set()
        self._recorded = 0
        # Backward is at frame `_at`; all between it and `_next` has been asked for, and all
        # between it and `_next_read` is on the host or being read.
        self._at = self._next = self._next_read = -1

    def __len__(self) -> int:
        return self._recorded

    def record(self, frame: PrefetchGroup, number: int | None = None) -> None:
        """Take `frame` (weakly referenced, hashed by identity) when it closes.

        Args:
            frame: Has its handles.
            number: Its place in the order of forward; None: it is prefetched for no other frame,
                and prefetches none.
        """
        assert frame not in self._number_of, "a frame closes once"
        self._number_of[frame] = number
        self._recorded += 1
        if number is not None:
            self._frames[number] = weakref.ref(frame)
        self._mover.limit_pending_d2h(self._leave_bytes)

    def on_backward(self, frame: PrefetchGroup) -> None:
        """Prefetch `frame` and those that are listed with it; call at its first use.

        Cheap when called again: what is there or under way is not asked for twice.
        """
        assert frame in self._number_of, "a frame is used in backward after it has closed"
        number = self._number_of[frame]
        if number is None:
            for handle in frame.handles():
                self._mover.prefetch(handle)
            return
        self._fetch(number)
        self._enter(number)

    def start_backward(self, *numbers: int) -> None:
        """Do now what entering frames `numbers` would, where little else runs before."""
        for number in numbers:
            self._enter(number)

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Prefetch the frames of these numbers, in their order."""
        for number in numbers:
            self._fetch(number)

    def read_ahead(self, numbers: Iterable[int]) -> None:
        """Start reading these frames into host memory, in their order, while there is room."""
        for number in numbers:
            for handle in self._handles(number):
                if not self._mover.read_ahead(handle):
                    return

    def _enter(self, number: int) -> None:
        if number > self._at:  # backward has begun, or begun anew
            self._next = self._next_read = number
        self._at = number
        lowest = number - 1 if self._asked is None else number + 1
        if self._asked is not None and number < len(self._asked):
            lowest = self._asked[number]
        for due in range(min(self._next, number), max(lowest, 0) - 1, -1):
            self._fetch(due)
            self._next = due - 1
        if self._reads_ahead:
            self._read_ahead()

    def _fetch(self, number: int) -> None:
        handles = tuple(self._handles(number))
        if handles and self._on_prefetch is not None and number not in self._told:
            self._told.add(number)
            self._on_prefetch(number)
        for handle in handles:
            self._mover.prefetch(handle)

    def _handles(self, number: int) -> Iterable[OffloadedTensor]:
        reference = self._frames.get(number)
        frame = None if reference is None else reference()
        return () if frame is None else frame.handles()

    def _read_ahead(self) -> None:
        self._next_read = min(self._next_read, self._next)
        while self._next_read >= 0:
            for handle in self._handles(self._next_read):
                if not self._mover.read_ahead(handle):
                    return
            self._next_read -= 1


class _Saved(NamedTuple):
    """What the graph keeps instead of a tensor; the only strong reference to the handle."""

    frame: LayerOffload
    handle: OffloadedTensor | SavedWeight


class LayerOffload:
    """Offloads what autograd saves between `open` and `close`, and brings it back in backward.

    Also a context manager. One thread opens, computes and closes; backward may run in another.

    Args:
        engine: moves the tensors.
        prefetch_order: gets the frame when it closes.
        label: what the frame is, for messages.
        tier: where its bytes are to wait. What an earlier frame has moved waits where that put it.
        casts: knows autocast's casts of weights; None where there are none worth knowing.
        number: its place in the order of forward, for the prefetch order.
        weights: weights that rest on the host; None where none do.
        before_use: called each time before backward gets anything of the frame.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        prefetch_order: PrefetchOrder,
        *,
        label: object = None,
        tier: Tier = "host",
        casts: WeightCasts | None = None,
        number: int | None = None,
        weights: HostWeights | None = None,
        before_use: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._prefetch_order = prefetch_order
        self._label = label
        self._tier: Tier = tier
        self._casts = casts
        self._number = number
        self._weights = weights
        self._before_use = before_use
        self._hooks: saved_tensors_hooks | None = None
        self._closed = False
        self._used = False
        # Weak, so that a dropped graph gives its bytes back although the prefetch order knows the
        # frame.
        self._handles: list[weakref.ref[OffloadedTensor]] = []

    @property
    def is_open(self) -> bool:
        """Whether the frame's hooks are active."""
        return self._hooks is not None

    def open(self) -> None:
        """Start catching what autograd saves in this thread."""
        assert not self.is_open, "a frame is opened while it is open"
        assert not self._closed, "a frame is opened again after it has closed"
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._hooks = hooks
        if self._casts is not None:
            self._casts.start()

    def close(self) -> None:
        """Stop catching, and put the frame on the prefetch order."""
        self.cancel()
        self._closed = True
        self._prefetch_order.record(self, self._number)

    def cancel(self) -> None:
        """Stop catching after an exception; what was caught returns with its graph."""
        assert self._hooks is not None, "a frame is closed while it is open"
        hooks, self._hooks = self._hooks, None
        casts, self._casts = self._casts, None
        if casts is not None:
            casts.stop()
        hooks.__exit__(None, None, None)

    def handles(self) -> Iterator[OffloadedTensor]:
        """Those of the moved tensors that the graph still holds."""
        # Backward needs first what was saved last.
        for reference in reversed(self._handles):
            handle = reference()
            if handle is not None:
                yield handle

    def __enter__(self) -> LayerOffload:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.cancel()

    def _pack(self, tensor: Tensor) -> _Saved:
        cast = None if self._casts is None else self._casts.cast_of(tensor)
        if cast is not None:
            return _Saved(self, cast)
        view = None if self._weights is None else self._weights.saved_view_of(tensor, self._label)
        if view is not None:
            return _Saved(self, view)
        if self._tier == "device" or _is_parameter(tensor):
            return _Saved(self, OffloadedTensor.stayed(tensor, self._label))
        handle = self._engine.start_offload(tensor, label=self._label, tier=self._tier)
        if handle.is_offloaded:
            self._handles.append(weakref.ref(handle))
        return _Saved(self, handle)

    def _unpack(self, saved: _Saved) -> Tensor:
        # Autograd may ask inside the frame too (a gradient taken within the layer): not yet
        # backward of the sequence, so nothing is prefetched for it.
        if self._closed and self._before_use is not None:
            self._before_use()
        if self._closed and not self._used:
            self._used = True
            self._prefetch_order.on_backward(self)
        if isinstance(saved.handle, SavedWeight):
            return saved.handle.make()
        return self._engine.wait_for(saved.handle)


def _is_parameter(tensor: Tensor) -> bool:
    """Whether it is a parameter or a view of one, which stay on the device."""
    return isinstance(tensor, Parameter) or isinstance(tensor._base, Parameter)
