"""Offloads what autograd saves, one decoder layer and chunk at a time, and prefetches it in order.

`LayerOffload` is a pair of saved-tensor hooks: at the save a tensor's bytes start their way to
another tier, at its use in backward they are waited for. `PrefetchOrder` knows all groups of
handles of one forward and prefetches those that are due when backward enters one of them.
`WeightCasts` recognizes autocast's casts of weights, which are neither kept nor offloaded but cast
again, wherever a layer's other activations go.

Where hooks of others are active too, the innermost pair gets the tensor. So what a model
checkpoints or offloads by itself inside a layer is left alone, and hooks around the layer see
nothing of it.

[Note: backwards that are not the planned one] A batch with padding runs fewer chunks, a gradient of
a part of the graph enters fewer layers, and a graph may be walked in several passes. What a missing
group would have prefetched is then prefetched by the next one that is entered; a jump to an earlier
group prefetches nothing in between, and that group comes back when it is entered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
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

_MIN_CAST_SHARE = 0.125
"""Share of a layer's weights that autocast must cast for its casts to be worth recognizing; with
less (adapters) they are treated like activations."""


class PrefetchGroup(Protocol):
    """Handles that are prefetched together: what backward needs of one (layer, chunk), for one."""

    def handles(self) -> Iterable[OffloadedTensor]:
        """The handles that backward still needs, first needed first; none if all was kept."""
        ...


@dataclass(eq=False)
class PrefetchOrder:
    """Prefetches the groups of one sequence in the order that was planned.

    Groups are numbered in the order of forward. Which ones are prefetched when backward enters one
    comes in as data, so the order that was planned and simulated is the order that runs. Groups are
    referenced weakly: autograd's graph owns them, so a dropped graph frees their bytes.
    """

    engine: OffloadEngine
    """Owns the handles."""
    _: KW_ONLY
    max_pending_d2h_bytes: int | None = None
    """Bound on the D2H copies that are pending when a group has been recorded; None for those of
    one group."""
    lowest_prefetched: Sequence[int] | None = None
    """By number of a group, the lowest number that has been prefetched once backward has entered it
    (as have all between); a group beyond the end prefetches itself alone. None: each prefetches the
    one before it."""
    on_prefetch: Callable[[int], None] | None = None
    """Called with the number of a group when it is first prefetched."""

    def __post_init__(self) -> None:
        assert self.max_pending_d2h_bytes is None or self.max_pending_d2h_bytes >= 0, (
            "a bound on bytes is not negative"
        )
        self._groups: dict[int, weakref.ref[PrefetchGroup]] = {}
        self._number_of: weakref.WeakKeyDictionary[PrefetchGroup, int | None]
        self._number_of = weakref.WeakKeyDictionary()
        self._reported: set[int] = set()
        self._num_recorded = 0
        # Backward is at group `_current`; all between it and `_next` have been prefetched, and all
        # between it and `_next_read` are in host memory or being read into it.
        self._current = self._next = self._next_read = -1

    def __len__(self) -> int:
        return self._num_recorded

    def record(self, group: PrefetchGroup, number: int | None = None) -> None:
        """Add a group that is complete, and bound the D2H copies that are pending.

        `number` is its place in the order of forward. None: it is prefetched only when it is
        entered itself, and then prefetches no other.
        """
        assert group not in self._number_of, "a group is recorded once"
        self._number_of[group] = number
        self._num_recorded += 1
        if number is not None:
            self._groups[number] = weakref.ref(group)
        self.engine.limit_pending_d2h(self.max_pending_d2h_bytes)

    def on_backward(self, group: PrefetchGroup) -> None:
        """Prefetch a group and those due with it; call at its first use in backward.

        Cheap when called again: what was prefetched is not copied twice.
        """
        assert group in self._number_of, "a group is used in backward after it was recorded"
        number = self._number_of[group]
        if number is None:
            for handle in group.handles():
                self.engine.prefetch(handle)
            return
        self._prefetch(number)
        self._enter(number)

    def start_backward(self, *numbers: int) -> None:
        """Prefetch what entering these groups would, before backward runs."""
        for number in numbers:
            self._enter(number)

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Prefetch the groups of these numbers, in their order."""
        for number in numbers:
            self._prefetch(number)

    def read_ahead(self, numbers: Iterable[int]) -> None:
        """Start reading these groups from disk into host memory, in order, as space allows."""
        for number in numbers:
            if not self._read_group_ahead(number):
                return

    def _enter(self, number: int) -> None:
        if number > self._current:  # backward has begun, or begun anew
            self._next = self._next_read = number
        self._current = number
        if self.lowest_prefetched is None:
            lowest = number - 1
        elif number < len(self.lowest_prefetched):
            lowest = self.lowest_prefetched[number]
        else:
            lowest = number + 1
        for due in range(min(self._next, number), max(lowest, 0) - 1, -1):
            self._prefetch(due)
            self._next = due - 1
        if self.engine.reads_ahead:
            self._next_read = min(self._next_read, self._next)
            while self._next_read >= 0 and self._read_group_ahead(self._next_read):
                self._next_read -= 1

    def _prefetch(self, number: int) -> None:
        handles = tuple(self._handles(number))
        if handles and self.on_prefetch is not None and number not in self._reported:
            self._reported.add(number)
            self.on_prefetch(number)
        for handle in handles:
            self.engine.prefetch(handle)

    def _read_group_ahead(self, number: int) -> bool:
        """Start reading a group; False if there was no space for all of it."""
        return all(self.engine.read_ahead(handle) for handle in self._handles(number))

    def _handles(self, number: int) -> Iterable[OffloadedTensor]:
        reference = self._groups.get(number)
        group = None if reference is None else reference()
        return () if group is None else group.handles()


class WeightCasts(TorchDispatchMode):
    """Recognizes autocast's casts of weights among the tensors that a layer's forward saves.

    Under autocast every matmul casts its float32 weight, and autograd saves the cast as it would
    save an activation. Kept or offloaded, a layer's weights would be there once for every chunk. A
    cast is cheap and the weight is there anyway, so backward casts again: the bits are the same.

    There are two kinds. Autocast caches casts of trained weights until it ends, and the cast's
    `grad_fn` leads to the weight. Casts of frozen weights, and of parts of a weight (one expert's),
    it makes anew for every matmul and leaves no trace of; those are seen as they are made, by this
    dispatch mode.

    Args:
        watch: Whether there are casts that autocast does not cache, so that the mode is needed.
        label: What the weights belong to, for error messages.
    """

    def __init__(self, *, watch: bool, label: object = None) -> None:
        super().__init__()
        self._watch = watch
        self._label = label
        # Storage key of a cast: a weak reference, which keeps the key from being given to another
        # storage; the weight; the cast's version.
        self._seen: dict[int, tuple[StorageWeakRef, Tensor, int]] = {}

    @classmethod
    def of(cls, layer: nn.Module, device_type: str, label: object = None) -> WeightCasts | None:
        """Return one for a forward of `layer`; None where autocast casts little of its weights."""
        if not torch.is_autocast_enabled(device_type):
            return None
        dtype = torch.get_autocast_dtype(device_type)
        weights = list(layer.parameters())
        cast = [p for p in weights if p.dim() > 1 and _is_cast(p, dtype)]
        if sum(p.numel() for p in cast) <= _MIN_CAST_SHARE * sum(p.numel() for p in weights):
            return None
        cached = all(p.requires_grad and p.dim() == 2 for p in cast)
        return cls(watch=not cached, label=label)

    def start(self) -> None:
        """Start watching; costs time per operation only where autocast does not cache some."""
        if self._watch:
            self.__enter__()

    def stop(self) -> None:
        """Stop watching, in the thread of `start`."""
        if self._watch:
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Run the operation, and remember its result if it cast a weight."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and _is_parameter(args[0]):
            storage = result.untyped_storage()
            # Not detached: here, below autograd, that would count its own versions.
            self._seen[storage._cdata] = StorageWeakRef(storage), args[0], result._version
        return result

    def cast_of(self, saved: Tensor) -> SavedWeight | None:
        """Return what stands for `saved` if it is a cast of a weight or a view of one."""
        if type(saved) is not Tensor or not saved.is_floating_point():
            return None
        seen = self._seen.get(saved.untyped_storage()._cdata)
        weight = _cached_cast_source(saved) if seen is None else seen[1]
        # A cast that was written into is no longer the cast.
        if weight is None or saved._version != (0 if seen is None else seen[2]):
            return None
        if weight.device != saved.device or not _is_cast(weight, saved.dtype):
            return None
        source = weight if type(weight) is Parameter else weight.detach()
        return SavedWeight.of(source, saved, self._label)


def _is_parameter(tensor: Tensor) -> bool:
    return type(tensor) is Parameter or type(tensor._base) is Parameter


def _is_cast(weight: Tensor, dtype: torch.dtype) -> bool:
    return weight.is_floating_point() and weight.dtype not in (dtype, torch.float64)


def _cached_cast_source(saved: Tensor) -> Tensor | None:
    """The weight whose whole cast `saved` views, according to autograd's graph."""
    cast = saved if saved._base is None else saved._base
    node = cast.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    leaf = getattr(node.next_functions[0][0], "variable", None)
    return leaf if type(leaf) is Parameter else None


class _Saved(NamedTuple):
    """Stored by autograd's graph in place of a tensor; the only strong reference to the handle."""

    group: LayerOffload
    handle: OffloadedTensor | SavedWeight


@dataclass(eq=False)
class LayerOffload:
    """Offloads what autograd saves between `open` and `close`, and loads it in backward.

    One thread opens, computes and closes; backward may run in another. Also a context manager.
    """

    engine: OffloadEngine
    """Copies the tensors."""
    prefetch_order: PrefetchOrder
    """Gets this group of handles when it closes."""
    _: KW_ONLY
    label: object = None
    """What is saved here, for error messages."""
    tier: Tier = "host"
    """Where the tensors go. A storage that an earlier layer has offloaded stays there."""
    casts: WeightCasts | None = None
    """Recognizes autocast's casts of weights; None where there are none."""
    number: int | None = None
    """Its place in the order of forward, for the prefetch order."""
    weights: HostWeights | None = None
    """Host-resident weights; None where there are none."""
    before_use: Callable[[], None] | None = None
    """Called each time before backward gets any of its tensors."""

    def __post_init__(self) -> None:
        self._hooks: saved_tensors_hooks | None = None
        self._is_closed = False
        self._is_used = False
        # Weak, so that a dropped graph frees its bytes although the prefetch order knows this.
        self._handles: list[weakref.ref[OffloadedTensor]] = []

    @property
    def is_open(self) -> bool:
        """Whether its hooks are active."""
        return self._hooks is not None

    def open(self) -> None:
        """Start taking what autograd saves in this thread."""
        assert not self.is_open, "a layer's offload is opened while it is open"
        assert not self._is_closed, "a layer's offload is opened again after it has closed"
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._hooks = hooks
        if self.casts is not None:
            self.casts.start()

    def close(self) -> None:
        """Stop taking tensors, and record the group with the prefetch order."""
        self.cancel()
        self._is_closed = True
        self.prefetch_order.record(self, self.number)

    def cancel(self) -> None:
        """Stop taking tensors after an exception; those taken are freed with their graph."""
        assert self._hooks is not None, "a layer's offload is closed while it is open"
        hooks, self._hooks = self._hooks, None
        casts, self.casts = self.casts, None
        if casts is not None:
            casts.stop()
        hooks.__exit__(None, None, None)

    def handles(self) -> Iterator[OffloadedTensor]:
        """The offloaded tensors that the graph still holds, in the order of backward's use."""
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
        weight = None if self.casts is None else self.casts.cast_of(tensor)
        if weight is None and self.weights is not None:
            weight = self.weights.saved_view_of(tensor, self.label)
        if weight is not None:
            return _Saved(self, weight)
        if (
            self.tier == "device"
            or isinstance(tensor, Parameter)
            or isinstance(tensor._base, Parameter)
        ):
            return _Saved(self, OffloadedTensor.kept(tensor, self.label))
        handle = self.engine.start_offload(tensor, label=self.label, tier=self.tier)
        if handle.is_offloaded:
            self._handles.append(weakref.ref(handle))
        return _Saved(self, handle)

    def _unpack(self, saved: _Saved) -> Tensor:
        # Before it has closed, a gradient is taken within the layer: not yet the backward of the
        # sequence, so nothing is prefetched for it.
        if self._is_closed and self.before_use is not None:
            self.before_use()
        if self._is_closed and not self._is_used:
            self._is_used = True
            self.prefetch_order.on_backward(self)
        if isinstance(saved.handle, SavedWeight):
            return saved.handle.make()
        return self.engine.wait_for(saved.handle)
