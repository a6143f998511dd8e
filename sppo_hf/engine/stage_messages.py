"""Messages between stages: what one stage sends to the next for a chunk, as one tensor.

`MessageLayout` packs what one stage sends to the next for a chunk into one tensor, whose gradient
comes back as one. For most models that is the hidden states `[B, C, D]`. Gemma 3n and Gemma 4's
small models append two more things, `[B, C, W]` in all: the inputs of every later layer that are
made of token ids before the first layer ("per-layer inputs"), and K/V that later layers read
instead of having their own. A stage forwards what it does not use itself. Gemma 3n has several
hidden states for each token (AltUp, arXiv 2301.13310), `[S, B, C, D]`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sppo_hf.engine.model_parts import ModelParts
from sppo_hf.planning.model_profile import LayerProfile

# B batch rows, C tokens of a chunk, D model width, W width of a message, K KV heads, H head size,
# P width of a layer's own inputs, S hidden states of a token.

SHARED_KV = "shared_kv_states"
"""The argument of layers for K/V that other layers read, `[B, K, C, H]` each, by the owner's type
(or by its index, in Gemma 3n before Transformers 5.23)."""

_SharedKVStates = Mapping[Any, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class _SharedKV:
    """K/V of one layer that other layers read."""

    name: str
    """The type of these layers, which is the model's name for the K/V."""
    owner: int
    """The layer that computes the K/V."""
    readers: tuple[int, ...]
    """The layers that read the K/V, all after the owner."""
    num_heads: int
    sizes: tuple[int, int]
    """Elements of one key head and of one value head."""


@dataclass(frozen=True, slots=True)
class UnpackedMessage:
    """The tensors of a message."""

    hidden: Tensor
    """Input of the stage's first layer, `[B, C, D]` or `[S, B, C, D]`."""
    arguments: dict[str, Any]
    """Further arguments of the base model."""
    shared: dict[Any, tuple[Tensor, Tensor]]
    """K/V of earlier stages, each by its type and by its owner's index."""


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """How messages between the stages of one model are packed."""

    num_layers: int
    hidden_size: int
    num_streams: int
    """S; 1 if layers return one hidden state for each token."""
    per_layer_size: int
    """P; 0 if layers have no inputs of their own."""
    shared: tuple[_SharedKV, ...]

    @classmethod
    def of(cls, parts: ModelParts, layers: Sequence[LayerProfile]) -> MessageLayout:
        """Derive the layout from a model's configuration and the profiles of all its layers."""
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
        """Whether messages consist of hidden states only."""
        return self.num_streams == 1 and not self.per_layer_size and not self.shared

    def width(self, start: int) -> int:
        """W of the message to the stage whose first layer is `start`."""
        per_layer = (self.num_layers - start) * self.per_layer_size
        shared = sum(kv.num_heads * sum(kv.sizes) for kv in self._shared(start))
        return self.num_streams * self.hidden_size + per_layer + shared

    def pack(
        self,
        start: int,
        hidden: Tensor,
        per_layer: Sequence[Tensor],
        shared: _SharedKVStates,
    ) -> Tensor:
        """Pack the message `[B, C, W]` to the stage whose first layer is `start`.

        Args:
            start: The first layer of that stage.
            hidden: The output of the layer before it, `[B, C, D]` or `[S, B, C, D]`.
            per_layer: The own inputs `[B, C, P]` of layer `start` and all later ones, or none.
            shared: The argument `SHARED_KV` of the layers before it.
        """
        if self.is_hidden_only:
            return hidden
        if self.num_streams > 1:
            hidden = hidden.movedim(0, -2).flatten(-2)
        found = [shared[k.name if k.name in shared else k.owner] for k in self._shared(start)]
        flat = [state.transpose(1, 2).flatten(2) for states in found for state in states]
        return torch.cat([hidden, *per_layer, *flat], dim=-1)

    def unpack(self, start: int, message_BCW: Tensor) -> UnpackedMessage:
        """Unpack the message to the stage whose first layer is `start`."""
        if self.is_hidden_only:
            return UnpackedMessage(message_BCW, {}, {})
        size = self.per_layer_size
        borrowed = self._shared(start)
        per_layer = (self.num_layers - start) * size
        widths = [kv.num_heads * width for kv in borrowed for width in kv.sizes]
        streams = self.num_streams * self.hidden_size
        hidden, own, *flat = message_BCW.split([streams, per_layer, *widths], dim=-1)
        if self.num_streams > 1:
            hidden = hidden.unflatten(-1, (self.num_streams, -1)).movedim(-2, 0)
        arguments: dict[str, Any] = {}
        if size:
            # Layers index them by number; those before this stage do not run.
            absent = own.new_zeros(*own.shape[:2], start * size)
            all_own = torch.cat([absent, own], dim=-1)
            arguments["per_layer_inputs"] = all_own.unflatten(-1, (self.num_layers, size))
        states, shared = iter(flat), {}
        for kv in borrowed:
            key, value = _heads(kv, states)
            shared |= dict.fromkeys((kv.name, kv.owner), (key, value))
        return UnpackedMessage(hidden.contiguous(), arguments, shared)

    def kv_layers(self, layers: range, attending: Collection[int]) -> list[int]:
        """The layers of a stage that store K/V; `attending` are the layers with attention.

        These are layers with K/V of their own, and the first reader of each layer's K/V of an
        earlier stage: it stores what came with the message for all readers.
        """
        readers = {index: kv for kv in self.shared for index in layers if index in kv.readers}
        first = {kv.name: index for index, kv in reversed(readers.items())}
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
        """K/V of layers before `start` that later layers read."""
        return [kv for kv in self.shared if kv.owner < start <= kv.readers[-1]]


def _heads(kv: _SharedKV, states: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield the next key and value in attention's layout, `[B, K, C, H]`."""
    for size in kv.sizes:
        state = next(states).unflatten(-1, (kv.num_heads, size))
        yield state.transpose(1, 2).contiguous()
