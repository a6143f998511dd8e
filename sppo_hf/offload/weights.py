"""Host-resident parameters: kept in host memory, on the device only while they are used.

A host-resident parameter *is* its host tensor (`Parameter.data`), so an optimizer, gradient
clipping, `state_dict` and checkpoints see ordinary parameters in ordinary memory and need no
knowledge of this. While a layer runs, forward or backward, its parameters are device copies; two
layers are on the device at a time: the one in use, and the next one, being prefetched.

[Note: host-resident weights]
- Copies are made by the `Copier` that saved activations use, and the rules of [Note: offload
  lifetimes] hold: an H2D copy is behind all compute so far, its user waits for its ticket, and what
  was waited for is the compute stream's and can be freed like anything else.
- What autograd saves of a weight is the parameter or a view of it. A view would keep the device
  bytes of every layer alive until its backward, so the hooks keep a `SavedWeight` instead, which
  reads the parameter's bytes at the time when backward asks.
- `Parameter.data = ...` keeps the parameter's version, hooks and identity. But autograd makes a new
  node that accumulates its gradient for another device, and hooks would see the gradient of each
  node by itself, so a layer's weights are copied once in a forward. (Hooks do see them apart where
  two forwards have one backward.)
- A gradient is copied to the host as soon as it is complete, and added there to what earlier
  batches left. Until backward ends `Parameter.grad` is None, afterwards it is the host's. Only
  hooks of others that run after accumulation find it, whole and on the device.
- Copies are never reused over an optimizer's step: each forward copies anew.
- If memory is page-locked, a layer's weights and gradients share one piece of it, made before
  anything runs, in which each tensor has a storage of its own: saving one saves its bytes alone,
  and a search for shared memory finds none. A gradient has its own bytes there; only one that is to
  be added to an earlier one arrives elsewhere, in a pool for two layers' gradients
  (`arriving_bytes`).
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from sppo_hf.errors import ConfigError, OffloadError
from sppo_hf.offload.copy_streams import Copier, Ticket
from sppo_hf.offload.host_memory import (
    ALIGNMENT_BYTES,
    HostPool,
    PageLocker,
    Progress,
    Region,
    host_memory,
)
from sppo_hf.offload.slabs import round_up
from sppo_hf.offload.storage import MODIFIED, version_of
from sppo_hf.planning.model_shape import arriving_bytes

_MAX_LAYERS_ON_DEVICE = 2
"""The layer in use and the next one."""


def can_be_host_resident(parameter: Parameter) -> bool:
    """Whether a parameter is no more than its bytes, unlike quantized and sharded ones."""
    return (
        type(parameter) is Parameter
        and parameter.layout == torch.strided
        and (parameter.is_floating_point() or parameter.is_complex())
        and not parameter.is_meta
        and parameter.numel() > 0
    )


@dataclass(slots=True, eq=False)
class SavedWeight:
    """Takes the place of a saved weight, a cast of one, or a view of either; holds no bytes."""

    weight: Tensor
    """A parameter, whose bytes may have moved since, or a part of one."""
    version: int
    """Version of `weight` when it was saved."""
    dtype: torch.dtype
    """Dtype of the cast, or of the weight itself."""
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """First element of the view within the weight or its cast."""
    label: object
    """What the weight belongs to, for error messages."""

    @classmethod
    def of(cls, weight: Tensor, saved: Tensor, label: object) -> SavedWeight:
        """Return what stands for `saved`, a view of `weight` or of its cast."""
        offset = int(saved.storage_offset())
        shape, stride = saved.shape, saved.stride()
        return cls(weight, version_of(weight), saved.dtype, shape, stride, offset, label)

    @torch.no_grad()
    def make(self) -> Tensor:
        """Return the view of the bytes that the weight has now, cast again if it was a cast.

        Raises:
            OffloadError: The weight was written into since forward.
        """
        if version_of(self.weight) != self.version:
            of = f" of {self.label}" if self.label is not None else ""
            shape = tuple(self.weight.shape)
            raise OffloadError(f"a weight{of}, {self.weight.dtype}, shape {shape}, {MODIFIED}")
        cast = self.weight.detach().to(self.dtype)
        return cast.as_strided(self.shape, self.stride, self.offset)


@dataclass(slots=True, eq=False)
class _Weight:
    """One host-resident parameter, its device copy and its gradient."""

    parameter: Parameter
    host: Tensor
    """Its bytes on the host, contiguous."""
    device: Tensor | None = None
    """The copy on the device, complete or under way."""
    ticket: Ticket | None = None
    """The H2D copy, until it is waited for."""
    gradient: Tensor | None = None
    """Sum on the host of earlier batches and this backward so far; None outside of backward."""
    gradient_bytes: Tensor | None = None
    """Page-locked bytes for its gradient; None if it has none of its own."""
    sends_gradient: RemovableHandle | None = None
    """The hook that sends the gradient to the host; None if it does not train."""
    _used_version: int = 0
    """Version of the parameter when it became its device copy."""
    _gradient_holder: weakref.ref[Any] | None = None
    """Alive as long as anybody holds a gradient in `gradient_bytes`."""

    @property
    def has_replaced_data(self) -> bool:
        """Whether other data was assigned to the parameter, on any device."""
        own = (self.host,) if self.device is None else (self.host, self.device)
        return self.parameter.data.data_ptr() not in [tensor.data_ptr() for tensor in own]

    def adopt_replaced_data(self) -> bool:
        """Take data that was assigned to the parameter as its bytes, not page-locked, on the host.

        The former bytes stay as they are: who swaps averaged weights in assigns them again later.

        Returns:
            Whether it has another shape or dtype (resized embeddings, say).
        """
        data = self.parameter.data
        is_other = data.shape != self.host.shape or data.dtype != self.host.dtype
        if is_other:
            self.gradient_bytes = None
        self.host = self.parameter.data = data.to("cpu").contiguous()
        self.to_host()
        return is_other

    def gradient_buffer(self, gradient: Tensor) -> Tensor | None:
        """Its page-locked bytes as an uninitialized tensor like `gradient`.

        None if it has none, if the dtype differs, or if an earlier step's gradient there is still
        in use.
        """
        taken = self._gradient_holder is not None and self._gradient_holder() is not None
        if self.gradient_bytes is None or taken or gradient.dtype != self.host.dtype:
            return None
        buffer, holder = _tensor_with_own_storage(self.gradient_bytes, self.host)
        self._gradient_holder = weakref.ref(holder)
        return buffer

    def prefetch(self, copier: Copier) -> Ticket:
        """Start copying the bytes to the device."""
        copied, self.ticket = copier.start_h2d(_bytes_of(self.host))
        self.device = copied.view(self.host.dtype).view(self.host.shape)
        return self.ticket

    def use(self) -> None:
        """Make the parameter its device copy, with compute behind the copying."""
        assert self.device is not None, "a weight is prefetched before it is used"
        if self.ticket is not None:
            self.ticket.wait()
            self.ticket = None
            self.parameter.data = self.device
            self._used_version = version_of(self.parameter)

    def to_host(self, *, keep_writes: bool = False) -> None:
        """Make the parameter its host bytes, and free the device copy; replaced data stays.

        The copy is copied back if the parameter was written into since its use began; with
        `keep_writes` always, for writes into `Parameter.data` (PEFT's merging) change no version.
        """
        is_used = self.device is not None and self.ticket is None
        if self.ticket is not None:
            self.ticket.wait()  # nobody did, and its bytes may not be freed under the copy
            self.ticket = None
        if not self.has_replaced_data:
            if is_used and (keep_writes or version_of(self.parameter) != self._used_version):
                self.host.copy_(self.parameter.data)
            self.parameter.data = self.host
        self.device = None

    def run_own_hook_last(self) -> bool:
        """Have the hook that sends the gradient run after all others; returns whether there are."""
        hooks: Any = self.parameter._post_accumulate_grad_hooks
        assert self.sends_gradient is not None, "it trains"
        own = self.sends_gradient.id
        hooks[own] = hooks.pop(own)  # autograd reads the order of a plain dict
        return len(hooks) > 1


@dataclass(slots=True)
class _Accumulation:
    """A gradient that is added to what earlier batches left, once its D2H copy has ended."""

    weight: _Weight
    arrived: Tensor
    """The host tensor that the gradient is copied to."""
    ticket: Ticket
    region: Region | None
    """The memory of `arrived` if it is the pool's."""


class HostWeights:
    """The host-resident parameters of one model.

    Args:
        layers: Host-resident parameters of each layer, in the order of forward. One that several
            layers share belongs to `others`.
        others: Those outside of the layers; they are on the device from the start of a forward
            until its backward has ended.
        copier: Copies the bytes.
        keep_device_copies: Whether layers' copies are kept from forward to backward: weights are
            then on the host for the optimizer's sake alone.
        locker: Page-locks the host's bytes; None for plain memory.
        previous: Had host-resident parameters and was released; what both have keeps its memory.
        progress: Called as memory is page-locked.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Parameter]],
        others: Sequence[Parameter],
        *,
        copier: Copier,
        keep_device_copies: bool = False,
        locker: PageLocker | None = None,
        previous: HostWeights | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._copier = copier
        self._locker = locker
        self.keep_device_copies = keep_device_copies
        """Whether layers' copies are kept on the device from forward to backward."""
        self._max_layers = len(layers) if keep_device_copies else _MAX_LAYERS_ON_DEVICE
        known = {} if previous is None else previous._weight_of
        *self._layers, self._others = self._take_parameters([*layers, others], known, progress)
        self.on_fetch: Callable[[int, bool], None] | None = None
        """Called with a layer whose weights are prefetched, and whether for its backward; those
        outside of the layers count as the layer behind the last."""
        self.layers_with_sent_gradients: set[int] = set()
        """Layers, numbered as in `on_fetch`, that sent gradients since the last forward began."""
        self.peak_bytes = 0
        """Maximum of `device_bytes` so far."""
        self._weight_of = {id(weight.parameter): weight for weight in self._all()}
        self._layer_of = {
            id(weight.parameter): layer
            for layer, group in enumerate([*self._layers, self._others])
            for weight in group
        }
        self._on_device: dict[int, None] = {}
        """Layers with device copies, complete or under way, the most recently used at the end."""
        self._in_use: int | None = None
        self._is_in_backward = False
        """Whether a backward runs whose end will be noticed."""
        self._pending_gradients: deque[tuple[Tensor, Ticket]] = deque()
        """Gradients on the device whose D2H copies are enqueued."""
        self._accumulations: deque[_Accumulation] = deque()
        self._last_h2d: Ticket | None = None
        self._last_d2h: Ticket | None = None
        self._arrival_pool: HostPool | None = None
        """Memory for gradients that are added to earlier ones; not pinned before the first."""
        self._size_gradient_memory()
        trained = [weight for weight in self._all() if weight.parameter.requires_grad]
        self._hooks = [hook for weight in trained for hook in _gradient_hooks(self, weight)]

    @property
    def host_bytes(self) -> int:
        """Bytes of all these parameters on the host."""
        return sum(weight.host.nbytes for weight in self._all())

    @property
    def pinned_gradient_bytes(self) -> int:
        """Page-locked memory for gradients, in use or not."""
        own = (weight.gradient_bytes for weight in self._all())
        own_bytes = sum(memory.nbytes for memory in own if memory is not None)
        return own_bytes + (0 if self._arrival_pool is None else self._arrival_pool.reserved_bytes)

    @property
    def gradients(self) -> Iterator[Tensor]:
        """The gradients that are on the host."""
        for weight in self._all():
            gradient = weight.parameter.grad if weight.gradient is None else weight.gradient
            if gradient is not None and gradient.device.type == "cpu":
                yield gradient

    @property
    def device_bytes(self) -> int:
        """Bytes of the copies that are on the device now."""
        return sum(w.device.nbytes for w in self._all() if w.device is not None)

    def has(self, parameter: Tensor) -> bool:
        """Whether `parameter` is host-resident here."""
        return id(parameter) in self._weight_of

    # -- a pass ------------------------------------------------------------------------------

    def start_forward(self) -> None:
        """Prepare for a forward: copy to the device what is needed throughout.

        After a backward that raised, its gradients are dropped, and those of earlier batches that
        accumulate with it. After a forward without a backward the copies that it left on the device
        are the weights, into which others may have written.
        """
        if self._is_in_backward:  # it raised, so its end was not noticed
            self._is_in_backward = False
            while self._accumulations:
                self._release(self._accumulations.popleft())
            for weight in self._all():
                weight.gradient = None
            self.move_to_host(keep_writes=True)
        replaced = [weight for weight in self._all() if weight.has_replaced_data]
        if replaced:
            self._finish_h2d()
            if any([weight.adopt_replaced_data() for weight in replaced]):
                self._size_gradient_memory()
        self._drop_device_copies(keep_writes=True)
        self.layers_with_sent_gradients.clear()
        self._start_h2d(self._others, len(self._layers), backward=False)
        for weight in self._others:
            weight.use()
        self.peak_bytes = max(self.peak_bytes, self.device_bytes)

    def enter_layer(self, layer: int, *, backward: bool = False) -> None:
        """Put layer `layer` on the device for use, and prefetch the next in this direction."""
        if backward:
            self._notice_end()
        if layer == self._in_use:
            return
        self._prefetch(layer, in_use=layer, backward=backward)
        for weight in self._layers[layer]:
            weight.use()
        self._in_use = layer
        following = layer - 1 if backward else layer + 1
        if 0 <= following < len(self._layers):
            self._prefetch(following, in_use=layer, backward=backward)

    def move_to_host(self, *, keep_writes: bool = False) -> None:
        """Put all parameters and gradients on the host, before others read or write them.

        With `keep_writes` others may have written into parameters since a forward; see
        `start_forward`.
        """
        self._drop_device_copies(keep_writes=keep_writes)
        # From now on the host may write parameters and read gradients, so here, once a step, it
        # waits. Copies of a direction end in order.
        self._finish_h2d()
        self._finish_gradients()
        for weight in self._all():
            if weight.gradient is not None:
                weight.parameter.grad, weight.gradient = weight.gradient, None

    def saved_view_of(self, saved: Tensor, label: object = None) -> SavedWeight | None:
        """Return what stands for `saved` if it is one of these parameters or a view of one."""
        parameter: Any = saved if saved._base is None else saved._base
        if id(parameter) not in self._weight_of:
            return None
        return SavedWeight.of(parameter, saved, label)

    def release(self) -> None:
        """Leave every parameter on the host, for a successor to take over."""
        self.move_to_host(keep_writes=True)
        for hook in self._hooks:
            hook.remove()

    def close(self) -> None:
        """Put every parameter and its gradient back on the device for good."""
        device = self._copier.device
        self.release()
        for weight in self._all():
            parameter = weight.parameter
            gradient, parameter.grad = parameter.grad, None
            parameter.data = weight.host.to(device)
            parameter.grad = None if gradient is None else gradient.to(device)
        if self._arrival_pool is not None:
            self._arrival_pool.close()

    # -- copies ------------------------------------------------------------------------------

    def _take_parameters(
        self,
        groups: Sequence[Sequence[Parameter]],
        known: dict[int, _Weight],
        progress: Progress | None,
    ) -> list[list[_Weight]]:
        """Put parameters on the host, one group after the other, so that few are there twice."""
        fresh = [[p for p in group if id(p) not in known] for group in groups]
        sizes = [0 if self._locker is None else sum(map(_locked_bytes, group)) for group in fresh]
        pieces = host_memory([size for size in sizes if size], self._locker)
        taken, locked_bytes = dict(known), 0
        for group, size in zip(fresh, sizes, strict=True):
            if size and progress is not None:
                progress(locked_bytes, sum(sizes))
            memory = next(pieces) if size else None
            for parameter in group:
                taken[id(parameter)], memory = _put_on_host(parameter, memory)
            locked_bytes += size
        if locked_bytes and progress is not None:
            progress(locked_bytes, locked_bytes)
        return [[taken[id(parameter)] for parameter in group] for group in groups]

    def _prefetch(self, layer: int, *, in_use: int, backward: bool) -> None:
        """Start copying a layer in; the least recently used others are dropped for it."""
        if layer in self._on_device:
            self._on_device[layer] = self._on_device.pop(layer)
            return
        while len(self._on_device) >= self._max_layers:
            self._drop(next(other for other in self._on_device if other != in_use))
        self._on_device[layer] = None
        try:
            self._start_h2d(self._layers[layer], layer, backward=backward)
        except BaseException:
            self._drop(layer)  # memory ran out after some of its weights
            raise
        self.peak_bytes = max(self.peak_bytes, self.device_bytes)

    def _start_h2d(self, weights: Sequence[_Weight], layer: int, *, backward: bool) -> None:
        if weights and self.on_fetch is not None:
            self.on_fetch(layer, backward)
        for weight in weights:
            self._last_h2d = weight.prefetch(self._copier)

    def _drop(self, layer: int, *, keep_writes: bool = False) -> None:
        del self._on_device[layer]
        for weight in self._layers[layer]:
            weight.to_host(keep_writes=keep_writes)
        if self._in_use == layer:
            self._in_use = None

    def _drop_device_copies(self, *, keep_writes: bool) -> None:
        for layer in list(self._on_device):
            self._drop(layer, keep_writes=keep_writes)
        for weight in self._others:
            weight.to_host(keep_writes=keep_writes)

    def _all(self) -> Iterator[_Weight]:
        for group in self._layers:
            yield from group
        yield from self._others

    def _finish_h2d(self) -> None:
        """Block the host until no copy reads its weights any more."""
        if self._last_h2d is not None:
            self._last_h2d.finish()
            self._last_h2d = None

    # -- gradients ---------------------------------------------------------------------------

    def _notice_end(self) -> None:
        """Have autograd call back when the running backward has ended."""
        if not self._is_in_backward:
            self._is_in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._is_in_backward = False
        self.move_to_host()

    def _before_gradient(self, weight: _Weight, _: Tensor) -> None:
        """Set `.grad` aside before autograd adds to it: that is on another device.

        Hooks of others that run after accumulation find the whole of it, on the device.
        """
        self._notice_end()
        parameter = weight.parameter
        if parameter.grad is not None:
            weight.gradient, parameter.grad = parameter.grad, None
        if weight.run_own_hook_last() and weight.gradient is not None:
            self._finish_gradients()
            earlier, weight.gradient = weight.gradient, None
            parameter.grad = earlier.to(parameter.device)

    @torch.no_grad()
    def _after_gradient(self, weight: _Weight, parameter: Tensor) -> None:
        """Start copying a complete gradient to the host.

        Raises:
            ConfigError: Another hook has taken the gradient, to update the weight at once: that
                would change a copy on the device, which is dropped.
        """
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            raise ConfigError(
                f"A post-accumulate gradient hook on a parameter of shape {tuple(parameter.shape)} "
                "removes .grad, as optimizers do that update each weight during backward, but this "
                "weight is on the host (optimizer='host' or weights='host', or chosen because it "
                "does not fit). Allowed: hooks that leave .grad as it is. Remedy: an optimizer "
                "whose step() runs after backward, or optimizer='device' and weights='device'."
            )
        gradient = gradient.contiguous()
        arrived, region = self._allocate_arrival(weight, gradient)
        ticket = self._copier.start_d2h(_bytes_of(gradient), _bytes_of(arrived))
        self._last_d2h = ticket
        self.layers_with_sent_gradients.add(self._layer_of[id(parameter)])
        self._pending_gradients.append((gradient, ticket))
        self._limit_pending_gradients()
        if weight.gradient is None:
            weight.gradient = arrived
        else:
            self._accumulations.append(_Accumulation(weight, arrived, ticket, region))
        self._accumulate_arrived()

    def _allocate_arrival(self, weight: _Weight, gradient: Tensor) -> tuple[Tensor, Region | None]:
        """Return where a gradient arrives, and the region of the pool if it is from there."""
        pool = self._arrival_pool
        if weight.gradient is None or pool is None:
            own = weight.gradient_buffer(gradient) if weight.gradient is None else None
            return torch.empty_like(gradient, device="cpu") if own is None else own, None
        region = pool.try_allocate(gradient.nbytes)
        while region is None and self._accumulations:
            # The host is two layers ahead of what has arrived.
            self._accumulations[0].ticket.finish()
            self._accumulate_arrived()
            region = pool.try_allocate(gradient.nbytes)
        region = region or pool.allocate(gradient.nbytes)
        return region.memory.view(gradient.dtype).view(gradient.shape), region

    def _size_gradient_memory(self) -> None:
        """Make the memory that gradients take on their way; none may be on it."""
        *gradients, outer = (
            sum(weight.host.nbytes for weight in group if weight.parameter.requires_grad)
            for group in (*self._layers, self._others)
        )
        self._max_pending_bytes = max(gradients, default=0)
        if self._arrival_pool is not None:
            self._arrival_pool.close()
        if self._locker is not None and self._max_pending_bytes + outer:
            self._arrival_pool = HostPool(arriving_bytes(gradients, outer), locker=self._locker)

    def _finish_gradients(self) -> None:
        """Block the host until all gradients have arrived, and add them to earlier ones."""
        if self._last_d2h is not None:
            self._last_d2h.finish()
            self._last_d2h = None
        self._pending_gradients.clear()
        while self._accumulations:
            self._accumulations[0].ticket.finish()
            self._add(self._accumulations.popleft())

    def _limit_pending_gradients(self) -> None:
        """Free gradients whose copies are over; compute waits where too many are pending."""
        pending_bytes = sum(gradient.nbytes for gradient, _ in self._pending_gradients)
        while self._pending_gradients:
            gradient, ticket = self._pending_gradients[0]
            if not ticket.ordered:
                if pending_bytes <= self._max_pending_bytes:
                    return
                ticket.wait()
            pending_bytes -= gradient.nbytes
            self._pending_gradients.popleft()

    def _accumulate_arrived(self) -> None:
        while self._accumulations and self._accumulations[0].ticket.done():
            self._add(self._accumulations.popleft())

    def _add(self, accumulation: _Accumulation) -> None:
        assert accumulation.weight.gradient is not None, "there is an earlier gradient to add to"
        accumulation.weight.gradient += accumulation.arrived
        self._release(accumulation)

    def _release(self, accumulation: _Accumulation) -> None:
        if accumulation.region is not None and self._arrival_pool is not None:
            # Should its copy be under way still, the next one into this region is behind it.
            self._arrival_pool.release(accumulation.region)


def _locked_bytes(parameter: Parameter) -> int:
    """Page-locked bytes for a parameter, and for its gradient if it is trained."""
    size = round_up(parameter.nbytes, ALIGNMENT_BYTES)
    return 2 * size if parameter.requires_grad else size


def _put_on_host(parameter: Parameter, memory: Tensor | None) -> tuple[_Weight, Tensor | None]:
    """Make a parameter host-resident in the first bytes of `memory`; return the rest of that.

    With None it is left where it is if that is host memory already.
    """
    now = parameter.data
    gradient_bytes = None
    if memory is not None:
        host, _ = _tensor_with_own_storage(memory[: now.nbytes], now)
        if parameter.requires_grad:
            start = round_up(now.nbytes, ALIGNMENT_BYTES)
            gradient_bytes = memory[start : start + now.nbytes]
        memory = memory[_locked_bytes(parameter) :]
        host.copy_(now)
    elif now.device.type == "cpu" and now.is_contiguous():
        host = now
    else:
        host = torch.empty(now.shape, dtype=now.dtype, device="cpu")
        host.copy_(now)
    weight = _Weight(parameter, host, gradient_bytes=gradient_bytes)
    gradient, parameter.grad = parameter.grad, None
    parameter.data = host
    if gradient is not None:
        buffer = weight.gradient_buffer(gradient)
        parameter.grad = gradient.to("cpu") if buffer is None else buffer.copy_(gradient)
    return weight, memory


def _tensor_with_own_storage(memory: Tensor, like: Tensor) -> tuple[Tensor, Any]:
    """View bytes as a tensor like `like` with a storage of its own; also returns its holder."""
    holder = memory.numpy()
    return torch.frombuffer(holder, dtype=like.dtype).view(like.shape), holder


def _gradient_hooks(weights: HostWeights, weight: _Weight) -> Iterator[Any]:
    parameter = weight.parameter
    yield parameter.register_hook(functools.partial(weights._before_gradient, weight))
    weight.sends_gradient = parameter.register_post_accumulate_grad_hook(
        functools.partial(weights._after_gradient, weight)
    )
    yield weight.sends_gradient


def _bytes_of(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes, uint8 [n]."""
    return tensor.detach().reshape(-1).view(torch.uint8)
