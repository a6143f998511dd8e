"""What a stage gives on to the next for a chunk, as one tensor, and its gradient comes back as one.

For most models that is hidden states `[B, C, D]`. Gemma 3n and Gemma 4's small ones need two more
things behind them, `[B, C, W]` in all: inputs of every later layer, made of token ids in front of
the first ("per-layer inputs"), and keys and values that later layers read instead of having their
own. A stage hands on what it does not use itself. Gemma 3n's hidden states are several of each
token (AltUp, arXiv 2301.13310), `[S, B, C, D]`.

`enter` and `UnitGraph` are the two ends of a unit's graph, without the tensors that pass there:
frames decide where hidden states wait for a unit's backward. A leaf for what the unit was given, or
a reference to what it gave on, would keep these on the device whatever the frames do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sppo_hf.engine.structure import ModelParts
from sppo_hf.planning.model_profile import LayerProfile

# B batch rows, C tokens of a chunk, D model width, W width of a message, L layers of the model,
# K KV heads, H head size, P width of a layer's own inputs, S hidden states of a token.

SHARED_KV = "shared_kv_states"
"""The argument of layers that holds keys for others: `[B, K, C, H]` each, by the owner's type, or
by its index (Gemma 3n before Transformers 5.23)."""

_SharedKVStates = Mapping[Any, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class _SharedKV:
    """Keys and values of one layer that others read."""

    name: str
    """What the model calls them: the type of these layers."""
    owner: int
    readers: tuple[int, ...]
    """The layers that read them, all behind it."""
    num_heads: int
    sizes: tuple[int, int]
    """Of a key and of a value head."""


@dataclass(frozen=True, slots=True)
class UnpackedMessage:
    """A message taken apart."""

    hidden: Tensor
    """What the first layer is given: `[B, C, D]`, or `[S, B, C, D]`."""
    arguments: dict[str, Any]
    """What the base model is called with besides."""
    shared: dict[Any, tuple[Tensor, Tensor]]
    """Keys and values that layers of earlier stages have left, by all names that they go by."""


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """How messages between the stages of one model are packed."""

    num_layers: int
    hidden_size: int
    num_streams: int
    """S; 1 where layers give on one hidden state of each token."""
    per_layer_size: int
    """P; 0 where layers have no inputs of their own."""
    shared: tuple[_SharedKV, ...]

    @classmethod
    def of(cls, parts: ModelParts, layers: Sequence[LayerProfile]) -> MessageLayout:
        """Read the layout off a model's configuration and the profile of all of its layers."""
        text: Any = parts.text_config
        borrowers = [index for index, layer in enumerate(layers) if layer.borrows_keys]
        shared: list[_SharedKV] = []
        for name in sorted({text.layer_types[index] for index in borrowers}):
            readers = [index for index in borrowers if text.layer_types[index] == name]
            owner = max(i for i in range(borrowers[0]) if text.layer_types[i] == name)
            layer = layers[owner]
            sizes = (layer.qk_head_size, layer.v_head_size)
            shared.append(_SharedKV(name, owner, tuple(readers), layer.num_kv_heads, sizes))
        size = getattr(text, "hidden_size_per_layer_input", 0) or 0
        streams = getattr(text, "altup_num_inputs", 0) or 1
        return cls(len(layers), text.hidden_size, streams, size, tuple(shared))

    @property
    def is_hidden_only(self) -> bool:
        """Whether nothing but hidden states travels."""
        return self.num_streams == 1 and not self.per_layer_size and not self.shared

    def width(self, start: int) -> int:
        """W of the message to the stage whose first layer is `start`."""
        per_layer = (self.num_layers - start) * self.per_layer_size
        shared = sum(keys.num_heads * sum(keys.sizes) for keys in self._shared(start))
        return self.num_streams * self.hidden_size + per_layer + shared

    def pack(
        self,
        start: int,
        hidden: Tensor,
        per_layer: Sequence[Tensor],
        shared: _SharedKVStates,
    ) -> Tensor:
        """Pack the message to the stage whose first layer is `start`.

        Args:
            start: The first layer of the stage that it goes to.
            hidden: What the layer before it returned, `[B, C, D]` or `[S, B, C, D]`.
            per_layer: Own inputs `[B, C, P]` of layer `start` and of each after it, if they have.
            shared: See `SHARED_KV`.

        Returns:
            `[B, C, W]`, with the graphs of all.
        """
        if self.is_hidden_only:
            return hidden
        if self.num_streams > 1:
            hidden = hidden.movedim(0, -2).flatten(-2)
        found = [shared[k.name if k.name in shared else k.owner] for k in self._shared(start)]
        flat = [state.transpose(1, 2).flatten(2) for states in found for state in states]
        return torch.cat([hidden, *per_layer, *flat], dim=-1)

    def unpack(self, start: int, message_BCW: Tensor) -> UnpackedMessage:
        """Take apart what came to the stage whose first layer is `start`."""
        if self.is_hidden_only:
            return UnpackedMessage(message_BCW, {}, {})
        size = self.per_layer_size
        kinds = self._shared(start)
        per_layer = (self.num_layers - start) * size
        widths = [keys.num_heads * width for keys in kinds for width in keys.sizes]
        streams = self.num_streams * self.hidden_size
        hidden, own, *flat = message_BCW.split([streams, per_layer, *widths], dim=-1)
        if self.num_streams > 1:
            hidden = hidden.unflatten(-1, (self.num_streams, -1)).movedim(-2, 0)
        arguments: dict[str, Any] = {}
        if size:
            # Layers find theirs by index; those before this stage do not run.
            absent = own.new_zeros(*own.shape[:2], start * size)
            all_own = torch.cat([absent, own], dim=-1)
            arguments["per_layer_inputs"] = all_own.unflatten(-1, (self.num_layers, size))
        states, shared = iter(flat), {}
        for keys in kinds:
            key, value = _heads(keys, states)
            shared |= dict.fromkeys((keys.name, keys.owner), (key, value))
        return UnpackedMessage(hidden.contiguous(), arguments, shared)

    def kv_layers(self, layers: range, attending: Collection[int]) -> list[int]:
        """The layers of a stage that hold keys and values, of which `attending` attend.

        Returns:
            Those that attend to keys of their own, and the first of those that read keys of the
            same layer of an earlier stage: what came with the message is held there for all.
        """
        readers = {index: keys for keys in self.shared for index in layers if index in keys.readers}
        first = {keys.name: index for index, keys in reversed(readers.items())}
        return [
            index
            for index in layers
            if index in attending
            and (
                index not in readers
                or (readers[index].owner < layers.start and first[readers[index].name] == index)
            )
        ]

    def _shared(self, start: int) -> list[_SharedKV]:
        """Those that a layer before `start` has and one from there on reads."""
        return [keys for keys in self.shared if keys.owner < start <= keys.readers[-1]]


def _heads(keys: _SharedKV, states: Iterator[Tensor]) -> Iterator[Tensor]:
    """The next key and value as attention takes them, `[B, K, C, H]`."""
    for size in keys.sizes:
        state = next(states).unflatten(-1, (keys.num_heads, size))
        yield state.transpose(1, 2).contiguous()


@dataclass(slots=True)
class InputGradient:
    """Where the gradient of what a unit was given arrives."""

    grad: Tensor | None = None


class _Enter(torch.autograd.Function):
    """The beginning of a unit's graph, which holds none of what goes in."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, x: Tensor, input_gradient: InputGradient) -> Tensor:  # type: ignore[override]
        ctx.input_gradient = input_gradient
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.input_gradient.grad = grad
        return None, None, None


@dataclass(frozen=True, slots=True)
class StateEnd:
    """A state that a unit left for the next one: where its gradient goes, and where it arrives."""

    end: GradientEdge
    input_gradient: InputGradient

    @property
    def grad(self) -> Tensor | None:
        """The state's gradient; None where nothing that the unit after trains depends on it."""
        return self.input_gradient.grad

    @classmethod
    def of(cls, state: Tensor, input_gradient: InputGradient) -> StateEnd:
        """Note the end of the graph that leads to `state`, and the unit after's input_gradient for it."""
        return cls(get_gradient_edge(state), input_gradient)


@dataclass(slots=True)
class UnitGraph:
    """What waits for a unit's backward."""

    end: GradientEdge | None
    """Of what the unit gave on, or its loss was computed from; None where nothing is trained."""
    shape: torch.Size
    """Of that, `[B, C, D]`, or `[B, C, W]` of a whole message."""
    received_shape: torch.Size
    """Of what it was given, likewise."""
    dtype: torch.dtype
    device: torch.device
    input_gradient: InputGradient | None
    """For what it was given; None where it began with tokens."""
    loss: Tensor | None = None
    """Sum of the chunk's losses, on the last stage, where it has labels."""
    router: Tensor | None = None
    """The chunk's sums of router probabilities `[E]`, where the model has a loss of its routers."""

    @classmethod
    def of(
        cls, given: Tensor, input_gradient: InputGradient | None, received: Tensor | None
    ) -> UnitGraph:
        """Note the ends of a graph that leads from `received` to `given`."""
        end = get_gradient_edge(given) if given.requires_grad else None
        received_shape = given.shape if received is None else received.shape
        return cls(end, given.shape, received_shape, given.dtype, given.device, input_gradient)

    def zeros(self) -> Tensor:
        """No gradient of what it gave on."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def received_zeros(self) -> Tensor:
        """No gradient of what it was given."""
        return torch.zeros(self.received_shape, dtype=self.dtype, device=self.device)


def enter(x: Tensor) -> tuple[Tensor, InputGradient | None]:
    """`x` as the beginning of a graph, and where its gradient will be."""
    if not torch.is_grad_enabled():
        return x.detach(), None
    input_gradient = InputGradient()
    anchor = torch.zeros((), device=x.device, requires_grad=True)
    return _Enter.apply(anchor, x.detach(), input_gradient), input_gradient
