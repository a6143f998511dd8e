"""Whether what backward reads is still what forward read.

Autograd compares versions of the tensors that it saves. What is saved by nobody, because it is read
once more in backward or because gradients are there already, is compared here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sppo_hf.errors import SPPOError
from sppo_hf.offload.storage import version_of

Versions = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Read:
    name: str
    tensor: Tensor
    owner: dict[str, Any] | None = None
    """Where a module looks its parameter up, by the last part of `name`; None for all else."""


class ReadTensors:
    """Tensors that a piece of the model reads beside what passes through it."""

    def __init__(self, reads: Iterable[_Read]) -> None:
        self._reads = tuple(reads)
        self._own_writes: set[int] = set()

    @classmethod
    def of_module(cls, module: nn.Module) -> ReadTensors:
        """Parameters and buffers of `module`; parameters must stay the same objects, too.

        Buffers may be replaced, as tables of positions are when they grow.
        """
        reads: list[_Read] = []
        for prefix, child in module.named_modules():
            start = f"{prefix}." if prefix else ""
            for key, tensor in child._parameters.items():
                if tensor is not None:
                    reads.append(_Read(start + key, tensor, child._parameters))
            for key, tensor in child._buffers.items():
                if tensor is not None:
                    reads.append(_Read(start + key, tensor))
        return cls(reads)

    @classmethod
    def of_named(cls, named: Iterable[tuple[str, Tensor]]) -> ReadTensors:
        """Tensors with names."""
        return cls(_Read(name, tensor) for name, tensor in named)

    def versions(self) -> Versions:
        """How often each was written into so far."""
        return tuple(version_of(read.tensor) for read in self._reads)

    def leave_out_own_writes(self, versions: Versions) -> None:
        """Compare no more what the module's own forward has written into since `versions`.

        PEFT's adapters on experts do so, with the values that were there; counters are another
        case. What else may have been written there cannot be told apart.
        """
        self._own_writes |= {
            index
            for index, (now, before) in enumerate(zip(self.versions(), versions, strict=True))
            if now != before
        }

    def refuse_changes(self, versions: Versions, where: str) -> None:
        """Refuse to go on where a tensor is not what it was when `versions` was asked in forward.

        Raises:
            SPPOError: Naming the first tensor that was written into, or replaced, and `where`.
        """
        for index, (read, version) in enumerate(zip(self._reads, versions, strict=True)):
            if index in self._own_writes:
                continue
            key = read.name.rpartition(".")[2]
            replaced = read.owner is not None and read.owner.get(key) is not read.tensor
            if replaced or version_of(read.tensor) != version:
                happened = "replaced" if replaced else "changed in place"
                raise SPPOError(
                    f"{where}: {read.name} was {happened} between forward and backward, so the "
                    "gradients would not be those of the loss. Change it after backward "
                    "(optimizer.step(), for one), or run the forward again after the change."
                )
