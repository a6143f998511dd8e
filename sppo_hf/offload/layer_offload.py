"""A frame whose bytes autograd saves: hooks that send them away at the save and fetch them at use.

Casts of weights are let go of and made again, wherever the frame's bytes wait (see `casts`).

Whoever opens and closes it around some computation decides what is in it.

Where hooks of others are active too, the innermost pair gets the tensor: what a model checkpoints
or offloads by itself inside a frame stays its own affair, and hooks around a frame see nothing of
what the frame saves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from sppo_hf.offload.engine import OffloadEngine
from sppo_hf.offload.layer_offload import PrefetchOrder, WeightCasts
from sppo_hf.offload.storage import OffloadedTensor, SavedWeight
from sppo_hf.offload.weights import HostWeights
from sppo_hf.planning.tiers import Tier


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
        view = None if self._weights is None else self._weights.view_of(tensor, self._label)
        if view is not None:
            return _Saved(self, view)
        if self._tier == "device" or _is_parameter(tensor):
            return _Saved(self, OffloadedTensor.stayed(tensor, self._label))
        handle = self._engine.start_offload(tensor, label=self._label, tier=self._tier)
        if handle.is_moved:
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
