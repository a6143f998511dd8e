"""What a stage gives on to the next for a chunk, as one tensor, and its gradient comes back as one.

For most models that is hidden states `[B, C, D]`. Gemma 4's small ones need two more things behind
them, `[B, C, W]` in all: inputs of every later layer, made of token ids in front of the first
("per-layer inputs"), and keys and values that later layers read instead of having their own. A
stage hands on what it does not use itself.

Not covered: models whose layers give on more than one hidden state (Gemma 3n).
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sppo_hf.engine.structure import ModelParts
from sppo_hf.planning.model_profile import LayerProfile

try:
    from transformers.cache_utils import KVSharingDict
except ImportError:  # before Transformers 5.23 models made one of these
    KVSharingDict: Any = UserDict

# B batch rows, C tokens of a chunk, D model width, W width of a message, L layers of the model,
# K KV heads, H head size, P width of a layer's own inputs.


@dataclass(frozen=True, slots=True)
class _SharedKeys:
    """Keys and values of one layer that others read."""

    name: str
    """What the model calls them: the type of these layers."""
    owner: int
    last_reader: int
    num_heads: int
    sizes: tuple[int, int]
    """Of a key and of a value head."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message taken apart."""

    hidden: Tensor
    """`[B, C, D]`."""
    arguments: dict[str, Any]
    """What the base model is called with besides."""


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """How messages between the stages of one model are packed."""

    num_layers: int
    hidden_size: int
    per_layer_size: int
    """P; 0 where layers have no inputs of their own."""
    shared: tuple[_SharedKeys, ...]

    @classmethod
    def of(cls, parts: ModelParts, layers: Sequence[LayerProfile]) -> MessageLayout:
        """Read the layout off a model's configuration and the profile of all of its layers."""
        text: Any = parts.text_config
        borrowers = [index for index, layer in enumerate(layers) if layer.borrows_keys]
        shared: list[_SharedKeys] = []
        for name in sorted({text.layer_types[index] for index in borrowers}):
            readers = [index for index in borrowers if text.layer_types[index] == name]
            owner = max(i for i in range(borrowers[0]) if text.layer_types[i] == name)
            layer = layers[owner]
            sizes = (layer.qk_head_size, layer.v_head_size)
            shared.append(_SharedKeys(name, owner, readers[-1], layer.num_kv_heads, sizes))
        size = getattr(text, "hidden_size_per_layer_input", 0) or 0
        return cls(len(layers), text.hidden_size, size, tuple(shared))

    @property
    def is_hidden_alone(self) -> bool:
        """Whether nothing but hidden states travels."""
        return not self.per_layer_size and not self.shared

    def width(self, start: int) -> int:
        """W of the message to the stage whose first layer is `start`."""
        per_layer = (self.num_layers - start) * self.per_layer_size
        shared = sum(keys.num_heads * sum(keys.sizes) for keys in self._shared(start))
        return self.hidden_size + per_layer + shared

    def new_shared(self) -> dict[str, Any]:
        """The argument in which the layers of a first stage leave keys for others, if any do."""
        return {"shared_kv_states": KVSharingDict()} if self.shared else {}

    def pack(
        self,
        start: int,
        hidden_BCD: Tensor,
        per_layer: Sequence[Tensor],
        shared: Mapping[str, tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Pack the message to the stage whose first layer is `start`.

        Args:
            start: The first layer of the stage that it goes to.
            hidden_BCD: What the layer before it returned.
            per_layer: Own inputs `[B, C, P]` of layer `start` and of each after it, if they have.
            shared: Keys and values `[B, K, C, H]` by the name that the model has for them.

        Returns:
            `[B, C, W]`, with the graphs of all.
        """
        if self.is_hidden_alone:
            return hidden_BCD
        kinds = self._shared(start)
        states = [state for keys in kinds for state in shared[keys.name]]
        flat = [state.transpose(1, 2).flatten(2) for state in states]
        return torch.cat([hidden_BCD, *per_layer, *flat], dim=-1)

    def unpack(self, start: int, message_BCW: Tensor) -> Received:
        """Take apart what came to the stage whose first layer is `start`."""
        if self.is_hidden_alone:
            return Received(message_BCW, {})
        size = self.per_layer_size
        kinds = self._shared(start)
        per_layer = (self.num_layers - start) * size
        widths = [keys.num_heads * width for keys in kinds for width in keys.sizes]
        hidden, own, *flat = message_BCW.split([self.hidden_size, per_layer, *widths], dim=-1)
        arguments: dict[str, Any] = {}
        if size:
            # Layers find theirs by index; those before this stage do not run.
            absent = own.new_zeros(*own.shape[:2], start * size)
            all_own = torch.cat([absent, own], dim=-1)
            arguments["per_layer_inputs"] = all_own.unflatten(-1, (self.num_layers, size))
        if self.shared:
            states = iter(flat)
            arguments["shared_kv_states"] = KVSharingDict(
                {keys.name: tuple(_heads(keys, states)) for keys in kinds}
            )
        return Received(hidden.contiguous(), arguments)

    def _shared(self, start: int) -> list[_SharedKeys]:
        """Those that a layer before `start` has and one from there on reads."""
        return [keys for keys in self.shared if keys.owner < start <= keys.last_reader]


def _heads(keys: _SharedKeys, states: Iterator[Tensor]) -> Iterator[Tensor]:
    """The next key and value as attention takes them, `[B, K, C, H]`."""
    for size in keys.sizes:
        state = next(states).unflatten(-1, (keys.num_heads, size))
        yield state.transpose(1, 2).contiguous()
