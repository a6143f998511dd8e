"""Whether what backward reads is still what forward read.

Autograd compares versions of the tensors that it saves. What is saved by nobody, because it is read
once more in backward or because gradients are there already, is compared here. What a module was
set to, which autograd needs no more once forward has run, is put back for a second forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
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
    """Where a module looks it up, by the last part of `name`; None for what is no module's."""
    may_change: bool = False
    """Whether the module may have another one by the time of backward; a buffer."""

    @property
    def key(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    def is_replaced(self) -> bool:
        """Whether the module has another one now."""
        return self.owner is not None and self.owner.get(self.key) is not self.tensor

    def can_return(self) -> bool:
        """Whether a module can be given the tensor again: it is no view of others' memory.

        Those of FSDP and bitsandbytes have memory that their library gives and takes.
        """
        return type(self.tensor) in (Tensor, nn.Parameter) and type(self.tensor.data) is Tensor


_MISSING = object()
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_SCALARS = (bool, int, float, str, type(None))


def _is_plain(value: Any) -> bool:
    """Whether an attribute is a number, a word, or a collection of these."""
    if type(value) in _SCALARS:
        return True
    if type(value) is dict:
        return all(type(x) in _SCALARS for pair in value.items() for x in pair)
    return type(value) in (list, tuple, set) and all(type(x) in _SCALARS for x in value)


@dataclass(frozen=True, slots=True)
class _Setting:
    """An attribute of a module that is no tensor, as it was in forward."""

    owner: dict[str, Any]
    key: str
    value: Any

    @classmethod
    def of(cls, owner: dict[str, Any], key: str) -> _Setting:
        value = owner[key]
        return cls(owner, key, value.copy() if type(value) in (list, dict, set) else value)

    def is_changed(self) -> bool:
        now = self.owner.get(self.key, _MISSING)
        return now is not self.value and (type(now) is not type(self.value) or now != self.value)


class ReadTensors:
    """Tensors that a piece of the model reads beside what passes through it, and its settings.

    Settings are plain attributes of its modules: whether they train, which adapter is active.
    """

    def __init__(self, reads: Iterable[_Read], settings: Iterable[_Setting] = ()) -> None:
        self._reads = tuple(reads)
        self._settings = list(settings)
        self._need_grads = [read.tensor.requires_grad for read in self._reads]
        self._own_writes: set[int] = set()

    @classmethod
    def of_module(cls, module: nn.Module, *without: nn.Module) -> ReadTensors:
        """Parameters, buffers and settings of `module`, but not of modules `without` in it.

        Buffers may be replaced, as tables of positions are when they grow.
        """
        reads: list[_Read] = []
        settings: list[_Setting] = []
        for prefix, child in module.named_modules(memo=set(without)):
            own = vars(child)
            settings += (
                _Setting.of(own, key)
                for key, value in own.items()
                if key not in _INTERNAL and _is_plain(value)
            )
            start = f"{prefix}." if prefix else ""
            for key, tensor in child._parameters.items():
                if tensor is not None:
                    reads.append(_Read(start + key, tensor, child._parameters))
            for key, tensor in child._buffers.items():
                if tensor is not None:
                    reads.append(_Read(start + key, tensor, child._buffers, may_change=True))
        return cls(reads, settings)

    @classmethod
    def of_named(cls, named: Iterable[tuple[str, Tensor]]) -> ReadTensors:
        """Tensors with names."""
        return cls(_Read(name, tensor) for name, tensor in named)

    def versions(self) -> Versions:
        """How often each was written into so far."""
        return tuple(version_of(read.tensor) for read in self._reads)

    def ignore_own_writes(self, versions: Versions) -> None:
        """Compare no more what the module's own forward has written into since `versions`.

        PEFT's adapters on experts do so, with the values that were there; counters are another
        case. What else may have been written there cannot be told apart. Settings and buffers that
        it has changed itself are not put back either.
        """
        self._settings = [setting for setting in self._settings if not setting.is_changed()]
        self._own_writes |= {
            index
            for index, (read, before) in enumerate(zip(self._reads, versions, strict=True))
            if version_of(read.tensor) != before or (read.may_change and read.is_replaced())
        }

    def check_unchanged(self, versions: Versions, where: str) -> None:
        """Refuse to go on where a tensor is not what it was when `versions` was asked in forward.

        Raises:
            SPPOError: Naming the first tensor that was written into, or replaced for good, and
                `where`.
        """
        for index, (read, version) in enumerate(zip(self._reads, versions, strict=True)):
            if index in self._own_writes:
                continue
            replaced = not read.may_change and read.is_replaced() and not read.can_return()
            if replaced or version_of(read.tensor) != version:
                happened = "replaced" if replaced else "changed in place"
                raise SPPOError(
                    f"{where}: {read.name} was {happened} between forward and backward, so the "
                    "gradients would not be those of the loss. Change it after backward "
                    "(optimizer.step(), for one), or run the forward again after the change."
                )

    @contextlib.contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """Context of a second forward: parameters, buffers and settings are those of the first one.

        A script may have frozen parameters, switched to another adapter (PEFT), called `eval()`, or
        called the model with other weights (`torch.func.functional_call`) in between: autograd's
        own graph of the first forward knows nothing of it. Afterwards all is as it was before.
        """
        undo: list[Callable[[], object]] = []
        try:
            for index, (read, needs_grad) in enumerate(
                zip(self._reads, self._need_grads, strict=True)
            ):
                if index in self._own_writes:
                    continue
                if read.is_replaced() and read.can_return():
                    assert read.owner is not None, "what is replaced has an owner"
                    undo.append(_put(read.owner, read.key, read.tensor))
                if read.tensor.requires_grad != needs_grad and read.tensor.is_leaf:
                    read.tensor.requires_grad_(needs_grad)
                    undo.append(lambda x=read.tensor, back=not needs_grad: x.requires_grad_(back))
            for setting in self._settings:
                if setting.is_changed():
                    undo.append(_put(setting.owner, setting.key, setting.value))
            yield
        finally:
            for put_back in reversed(undo):
                put_back()


def _put(owner: dict[str, Any], key: str, value: Any) -> Callable[[], None]:
    """Give a module an attribute or a parameter; returns what undoes it."""
    before = owner.get(key, _MISSING)
    owner[key] = value

    def undo() -> None:
        if before is _MISSING:
            owner.pop(key, None)
        else:
            owner[key] = before

    return undo
