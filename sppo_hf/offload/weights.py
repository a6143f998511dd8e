"""Parameters that rest in host memory and come to the device for as long as they are used.

A parameter at rest *is* its host tensor (`Parameter.data`), so an optimizer, gradient clipping,
`state_dict` and checkpoints see ordinary parameters in ordinary memory and need no knowledge of
this. While a layer runs, forward or backward, its parameters are device copies; two layers are on
the device at a time, the one in use and the next one, on its way.

[Note: weights that come and go]
- Copies are made by the `Copier` that frames travel with, and the rules of [Note: offload
  lifetimes] hold: a copy in is behind all compute so far, its user waits for its ticket, and what
  was waited for is the compute stream's and can be freed like anything else.
- What autograd saves of a weight is the parameter or a view of it. A view would keep the device
  bytes of every layer alive until its backward, so frames keep `SavedWeight`s, which look at the
  parameter's bytes of the time when backward asks.
- `Parameter.data = ...` keeps the parameter's version, hooks and identity. What gathers its
  gradient autograd makes anew for another device, so a layer's weights come once in a forward:
  hooks would see the gradient of each coming by itself. (They do where two forwards have one
  backward.)
- A gradient leaves for the host as soon as it is complete; what earlier batches left there is added
  up on the host. Until backward ends `Parameter.grad` is None, afterwards it is the host's.
- Copies are never trusted over an optimizer's step: a forward brings its own.
- Where memory is page-locked, a layer's weights and gradients have one piece of it, made before
  anything runs, and each tensor a storage of its own within: whoever saves one saves its bytes, and
  whoever looks for shared memory finds none. A gradient has its place; only one that is to be added
  to an earlier one arrives elsewhere, in a pool for two layers' gradients (`arriving_bytes`).
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

from sppo_hf.errors import OffloadError
from sppo_hf.offload.copy_streams import Copier, Ticket
from sppo_hf.offload.host_memory import (
    ALIGNMENT_BYTES,
    HostPool,
    PageLocker,
    Progress,
    Region,
    host_memory,
)
from sppo_hf.offload.storage import MODIFIED, version_of
from sppo_hf.planning.model_shape import arriving_bytes

_SLOTS = 2
"""Layers whose weights are on the device at a time: the one in use and the next."""


def can_be_host_resident(parameter: Parameter) -> bool:
    """Whether a parameter is no more than its bytes: quantized and sharded ones stay."""
    return (
        type(parameter) is Parameter
        and parameter.layout == torch.strided
        and (parameter.is_floating_point() or parameter.is_complex())
        and not parameter.is_meta
        and parameter.numel() > 0
    )


@dataclass(slots=True, eq=False)
class SavedWeight:
    """Stands for a weight that autograd saved, a cast of one or a view of either: has no bytes."""

    weight: Tensor
    """A parameter, whose bytes may have moved since, or a part of one."""
    version: int
    dtype: torch.dtype
    """What the weight was cast to; its own where it was not."""
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Of the view within the weight or its cast, in elements."""
    label: object

    @classmethod
    def of(cls, weight: Tensor, saved: Tensor, label: object) -> SavedWeight:
        """What stands for `saved`, a view of `weight` or of its cast."""
        offset = int(saved.storage_offset())
        shape, stride = saved.shape, saved.stride()
        return cls(weight, version_of(weight), saved.dtype, shape, stride, offset, label)

    @torch.no_grad()
    def make(self) -> Tensor:
        """The view of the bytes that the weight has now.

        Raises:
            OffloadError: the weight was written into since forward.
        """
        if version_of(self.weight) != self.version:
            of = f" of {self.label}" if self.label is not None else ""
            shape = tuple(self.weight.shape)
            raise OffloadError(f"a weight{of}, {self.weight.dtype}, shape {shape}, {MODIFIED}")
        cast = self.weight.detach().to(self.dtype)
        return cast.as_strided(self.shape, self.stride, self.offset)


@dataclass(slots=True, eq=False)
class _Weight:
    """One parameter, where it rests, and where it is."""

    parameter: Parameter
    host: Tensor
    """Its bytes at rest, contiguous."""
    device: Tensor | None = None
    """The copy on the device, on its way or there."""
    ticket: Ticket | None = None
    gradient: Tensor | None = None
    """On the host, of earlier batches and of this backward so far; only while backward runs."""
    place: Tensor | None = None
    """Page-locked bytes for its gradient; None where it has none of its own."""
    _in_place: weakref.ref[Any] | None = None
    """What lives as long as anybody holds the gradient in `place`."""

    def settle(self) -> None:
        """Take over what somebody has put in the parameter's place, on whatever device."""
        now = self.parameter.data
        if now.data_ptr() == self.host.data_ptr():
            return
        if self.device is None or now.data_ptr() != self.device.data_ptr():
            self.host.copy_(now)
        self.rest()

    def place_for(self, gradient: Tensor) -> Tensor | None:
        """Its place, uninitialised; None where there is none or it is of another dtype.

        Also where somebody keeps what is there: the gradient of a step before.
        """
        taken = self._in_place is not None and self._in_place() is not None
        if self.place is None or taken or gradient.dtype != self.host.dtype:
            return None
        made, holder = _alone(self.place, self.host)
        self._in_place = weakref.ref(holder)
        return made

    def fetch(self, copier: Copier) -> Ticket:
        """Start bringing the bytes to the device."""
        copied, self.ticket = copier.start_h2d(_bytes_of(self.host))
        self.device = copied.view(self.host.dtype).view(self.host.shape)
        return self.ticket

    def use(self) -> None:
        """Let the parameter be its copy on the device, with compute behind its coming."""
        assert self.device is not None, "what is used was fetched"
        if self.ticket is not None:
            self.ticket.wait()
            self.ticket = None
            self.parameter.data = self.device

    def rest(self) -> None:
        """Let the parameter be its bytes on the host, and free the copy."""
        if self.ticket is not None:
            self.ticket.wait()  # nobody has: its bytes may not be freed under the copy
            self.ticket = None
        self.parameter.data = self.host
        self.device = None


@dataclass(slots=True)
class _Sum:
    """A gradient on its way to be added to what earlier batches left."""

    weight: _Weight
    arrived: Tensor
    ticket: Ticket
    region: Region | None
    """Where it arrives, to be given back."""


class HostWeights:
    """The parameters of one model that rest on the host.

    Args:
        layers: of each layer in the order of forward, those that rest there. One that several
            layers share belongs to `others`.
        others: those outside of the layers; they are on the device from a forward's begin until
            its backward has ended.
        copier: moves bytes.
        stays: whether layers' copies stay from forward to backward, too: what rests on the host is
            then only there for its optimizer.
        locker: page-locks the host's bytes; None for none.
        before: had parameters at rest, and was released; what both have stays where it is.
        progress: is told of memory that is page-locked.
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
        """Whether layers' copies stay from forward to backward."""
        self._most = len(layers) if keep_device_copies else _SLOTS
        known = {} if previous is None else previous._of
        *self._layers, self._others = self._take_over([*layers, others], known, progress)
        self.on_fetch: Callable[[int, bool], None] | None = None
        """Is told the layer whose weights are on their way, and whether for its backward; what is
        outside of the layers counts as the layer behind the last."""
        self.layers_with_sent_gradients: set[int] = set()
        """Layers of which gradients have left since the last forward began; numbers as there."""
        self.peak_bytes = 0
        """Most bytes of copies on the device at a time, so far."""
        self._of = {id(weight.parameter): weight for weight in self._all()}
        self._layer_of = {
            id(weight.parameter): layer
            for layer, group in enumerate([*self._layers, self._others])
            for weight in group
        }
        self._slots: dict[int, None] = {}
        """Layers whose copies are on the device or on their way, the one used last at the end."""
        self._in_use: int | None = None
        self._backward = False
        """Whether a backward runs whose end will be noticed."""
        self._leaving: deque[tuple[Tensor, Ticket]] = deque()
        self._sums: deque[_Sum] = deque()
        self._last_in: Ticket | None = None
        self._last_out: Ticket | None = None
        *gradients, outer = (
            sum(weight.host.nbytes for weight in group if weight.parameter.requires_grad)
            for group in (*self._layers, self._others)
        )
        self._leave_bytes = max(gradients, default=0)
        self._arriving: HostPool | None = None
        """For gradients that will be added to earlier ones; pins nothing before the first."""
        if locker is not None and self._leave_bytes + outer:
            self._arriving = HostPool(arriving_bytes(gradients, outer), locker=locker)
        trained = [weight for weight in self._all() if weight.parameter.requires_grad]
        self._hooks = [hook for weight in trained for hook in _hooks(self, weight)]

    @property
    def host_bytes(self) -> int:
        """Of all that rests."""
        return sum(weight.host.nbytes for weight in self._all())

    @property
    def pinned_gradient_bytes(self) -> int:
        """Page-locked memory for gradients, whether they are there or not."""
        places = sum(weight.place.nbytes for weight in self._all() if weight.place is not None)
        return places + (0 if self._arriving is None else self._arriving.reserved_bytes)

    @property
    def gradients(self) -> Iterator[Tensor]:
        """Those that rest on the host, too."""
        for weight in self._all():
            gradient = weight.parameter.grad if weight.gradient is None else weight.gradient
            if gradient is not None and gradient.device.type == "cpu":
                yield gradient

    @property
    def device_bytes(self) -> int:
        """Of the copies that are on the device now."""
        return sum(w.device.nbytes for w in self._all() if w.device is not None)

    def has(self, parameter: Tensor) -> bool:
        """Whether `parameter` is one of them."""
        return id(parameter) in self._of

    # -- a pass ------------------------------------------------------------------------------

    def start_forward(self) -> None:
        """A forward begins: bring what is needed throughout, as it is now.

        After a backward that raised, the gradients so far are given up, those of earlier batches
        that accumulate with it included.
        """
        if self._backward:  # it raised, and nobody was told of its end
            self._backward = False
            while self._sums:
                self._forget(self._sums.popleft())
            for weight in self._all():
                weight.gradient = None
            self.move_to_host()
        for weight in self._all():
            weight.settle()
        self._rest_all()
        self.layers_with_sent_gradients.clear()
        self._start_fetch(self._others, len(self._layers), backward=False)
        for weight in self._others:
            weight.use()
        self.peak_bytes = max(self.peak_bytes, self.device_bytes)

    def enter_layer(self, layer: int, *, backward: bool = False) -> None:
        """Layer `layer` is about to be used; the next one in this direction comes beside it."""
        if backward:
            self._notice_end()
        if layer == self._in_use:
            return
        self._fetch(layer, keep=layer, backward=backward)
        for weight in self._layers[layer]:
            weight.use()
        self._in_use = layer
        following = layer - 1 if backward else layer + 1
        if 0 <= following < len(self._layers):
            self._fetch(following, keep=layer, backward=backward)

    def move_to_host(self) -> None:
        """Put everything to rest, gradients too; before anybody else reads or writes parameters."""
        self._rest_all()
        # Lanes end in order. What is at rest may be written by the host from now on, and gradients
        # read: here, once a step, the host waits.
        if self._hooks and self._last_in is not None:
            self._last_in.finish()
        if self._last_out is not None:
            self._last_out.finish()
        self._last_in = self._last_out = None
        self._leaving.clear()
        while self._sums:
            self._sums[0].ticket.finish()
            self._add(self._sums.popleft())
        for weight in self._all():
            if weight.gradient is not None:
                weight.parameter.grad, weight.gradient = weight.gradient, None

    def saved_view_of(self, saved: Tensor, label: object = None) -> SavedWeight | None:
        """What stands for `saved` if it is a parameter that rests, or a view of one; else None."""
        parameter: Any = saved if saved._base is None else saved._base
        if id(parameter) not in self._of:
            return None
        return SavedWeight.of(parameter, saved, label)

    def release(self) -> None:
        """Leave every parameter where it rests, for others to take over."""
        self.move_to_host()
        for hook in self._hooks:
            hook.remove()

    def close(self) -> None:
        """Put every parameter, and its gradient, back on the device for good."""
        device = self._copier.device
        self.release()
        for weight in self._all():
            parameter = weight.parameter
            gradient, parameter.grad = parameter.grad, None
            parameter.data = weight.host.to(device)
            parameter.grad = None if gradient is None else gradient.to(device)
        if self._arriving is not None:
            self._arriving.close()

    # -- copies ------------------------------------------------------------------------------

    def _take_over(
        self,
        groups: Sequence[Sequence[Parameter]],
        known: dict[int, _Weight],
        progress: Progress | None,
    ) -> list[list[_Weight]]:
        """Put parameters to rest, one group after the other, so that few are there twice."""
        fresh = [[p for p in group if id(p) not in known] for group in groups]
        sizes = [0 if self._locker is None else sum(map(_locked_bytes, group)) for group in fresh]
        pieces = host_memory([size for size in sizes if size], self._locker)
        taken, locked_bytes = dict(known), 0
        for group, size in zip(fresh, sizes, strict=True):
            if size and progress is not None:
                progress(locked_bytes, sum(sizes))
            memory = next(pieces) if size else None
            for parameter in group:
                taken[id(parameter)], memory = _at_rest(parameter, memory)
            locked_bytes += size
        if locked_bytes and progress is not None:
            progress(locked_bytes, locked_bytes)
        return [[taken[id(parameter)] for parameter in group] for group in groups]

    def _fetch(self, layer: int, *, keep: int, backward: bool) -> None:
        """Start bringing a layer; the one that was used longest ago makes room, but not `keep`."""
        if layer in self._slots:
            self._slots[layer] = self._slots.pop(layer)
            return
        while len(self._slots) >= self._most:
            oldest = next(slot for slot in self._slots if slot != keep)
            self._drop(oldest)
        self._start_fetch(self._layers[layer], layer, backward=backward)
        self._slots[layer] = None
        self.peak_bytes = max(self.peak_bytes, self.device_bytes)

    def _start_fetch(self, weights: Sequence[_Weight], layer: int, *, backward: bool) -> None:
        if weights and self.on_fetch is not None:
            self.on_fetch(layer, backward)
        for weight in weights:
            self._last_in = weight.fetch(self._copier)

    def _drop(self, layer: int) -> None:
        del self._slots[layer]
        for weight in self._layers[layer]:
            weight.rest()
        if self._in_use == layer:
            self._in_use = None

    def _rest_all(self) -> None:
        for layer in list(self._slots):
            self._drop(layer)
        for weight in self._others:
            weight.rest()

    def _all(self) -> Iterator[_Weight]:
        for group in self._layers:
            yield from group
        yield from self._others

    # -- gradients ---------------------------------------------------------------------------

    def _notice_end(self) -> None:
        """Be told when the running backward has ended."""
        if not self._backward:
            self._backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._backward = False
        self.move_to_host()

    def _before_gradient(self, weight: _Weight, _: Tensor) -> None:
        """Autograd is about to add a gradient: it must find none of another device."""
        self._notice_end()
        if weight.parameter.grad is not None:
            weight.gradient, weight.parameter.grad = weight.parameter.grad, None

    @torch.no_grad()
    def _after_gradient(self, weight: _Weight, parameter: Tensor) -> None:
        """A gradient is complete: send it to the host."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, "autograd has just put it there"
        gradient = gradient.contiguous()
        arrived, region = self._room_for(weight, gradient)
        ticket = self._copier.start_d2h(_bytes_of(gradient), _bytes_of(arrived))
        self._last_out = ticket
        self.layers_with_sent_gradients.add(self._layer_of[id(parameter)])
        self._leaving.append((gradient, ticket))
        self._let_go()
        if weight.gradient is None:
            weight.gradient = arrived
        else:
            self._sums.append(_Sum(weight, arrived, ticket, region))
        self._add_up()

    def _room_for(self, weight: _Weight, gradient: Tensor) -> tuple[Tensor, Region | None]:
        """Where a gradient arrives, and what of that is to be given back."""
        pool = self._arriving
        if weight.gradient is None or pool is None:
            own = weight.place_for(gradient) if weight.gradient is None else None
            return torch.empty_like(gradient, device="cpu") if own is None else own, None
        region = pool.try_allocate(gradient.nbytes)
        while region is None and self._sums:
            # The host is two layers ahead of what has arrived.
            self._sums[0].ticket.finish()
            self._add_up()
            region = pool.try_allocate(gradient.nbytes)
        region = region or pool.allocate(gradient.nbytes)
        return region.memory.view(gradient.dtype).view(gradient.shape), region

    def _let_go(self) -> None:
        """Free gradients whose copies are over; compute waits where too many are on their way."""
        waiting = sum(gradient.nbytes for gradient, _ in self._leaving)
        while self._leaving:
            gradient, ticket = self._leaving[0]
            if not ticket.ordered:
                if waiting <= self._leave_bytes:
                    return
                ticket.wait()
            waiting -= gradient.nbytes
            self._leaving.popleft()

    def _add_up(self) -> None:
        """Add what has arrived to what earlier batches left."""
        while self._sums and self._sums[0].ticket.done():
            self._add(self._sums.popleft())

    def _add(self, sum_: _Sum) -> None:
        assert sum_.weight.gradient is not None, "a sum is made of two"
        sum_.weight.gradient += sum_.arrived
        self._forget(sum_)

    def _forget(self, sum_: _Sum) -> None:
        if sum_.region is not None and self._arriving is not None:
            # Should its copy be on its way still, the next one into it is behind it.
            self._arriving.release(sum_.region)


def _locked_bytes(parameter: Parameter) -> int:
    """What a parameter takes of a piece of locked memory, its gradient included."""
    size = -(-parameter.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return 2 * size if parameter.requires_grad else size


def _at_rest(parameter: Parameter, memory: Tensor | None) -> tuple[_Weight, Tensor | None]:
    """Put a parameter into the first bytes of some locked memory; returns what is left of that.

    With None it stays where it is if that is host memory already.
    """
    now = parameter.data
    place = None
    if memory is not None:
        size = now.nbytes
        step = -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        host, _ = _alone(memory[:size], now)
        if parameter.requires_grad:
            place = memory[step : step + size]
        memory = memory[_locked_bytes(parameter) :]
        host.copy_(now)
    elif now.device.type == "cpu" and now.is_contiguous():
        host = now
    else:
        host = torch.empty(now.shape, dtype=now.dtype)
        host.copy_(now)
    weight = _Weight(parameter, host, place=place)
    gradient, parameter.grad = parameter.grad, None
    parameter.data = host
    if gradient is not None:
        kept = weight.place_for(gradient)
        parameter.grad = gradient.to("cpu") if kept is None else kept.copy_(gradient)
    return weight, memory


def _alone(memory: Tensor, like: Tensor) -> tuple[Tensor, Any]:
    """Some bytes as a tensor like another one with a storage of its own, and what that holds."""
    holder = memory.numpy()
    return torch.frombuffer(holder, dtype=like.dtype).view(like.shape), holder


def _hooks(weights: HostWeights, weight: _Weight) -> Iterator[Any]:
    parameter = weight.parameter
    yield parameter.register_hook(functools.partial(weights._before_gradient, weight))
    yield parameter.register_post_accumulate_grad_hook(
        functools.partial(weights._after_gradient, weight)
    )


def _bytes_of(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes, uint8 `[n]`."""
    return tensor.detach().reshape(-1).view(torch.uint8)
