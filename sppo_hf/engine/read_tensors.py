"""Checks that backward reads what forward read, and restores it where a layer is rerun.

Autograd compares versions of the tensors that it saves. Tensors that nobody saves, because a rerun
layer reads them again in backward or because their gradients are computed in forward already, are
compared here. Settings of modules (whether they train, which adapter is active) are restored while
a layer is rerun.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sppo_hf.engine.model_parts import all_modules, is_compiled
from sppo_hf.errors import SPPOError
from sppo_hf.offload.storage import version_of

Versions = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Read:
    key: str
    """Name of the tensor in the module that has it."""
    tensor: Tensor
    owner: dict[str, Any] | None = None
    """The module's dict that has it; None if it is no module's."""
    may_change: bool = False
    """Whether the module may replace it before backward, as it may a buffer."""

    def is_replaced(self) -> bool:
        """Whether the module has another tensor in its place now."""
        return self.owner is not None and self.owner.get(self.key) is not self.tensor

    def can_be_restored(self) -> bool:
        """Whether the tensor can be put back into the module: its memory is its own.

        FSDP and bitsandbytes allocate and free the memory of theirs.
        """
        return type(self.tensor) in (Tensor, nn.Parameter) and type(self.tensor.data) is Tensor

    def name_in(self, root: nn.Module | None) -> str:
        """The tensor's name in `root`. Looked for in errors alone: names take long to make."""
        for prefix, module in () if root is None else root.named_modules():
            if self.owner is module._parameters or self.owner is module._buffers:
                return f"{prefix}.{self.key}" if prefix else self.key
        return self.key


_MISSING = object()
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_SCALARS = frozenset((bool, int, float, str, type(None)))


def _is_setting(value: Any) -> bool:
    """Whether an attribute is a number, a string, None, or a collection of these."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is dict:
        return all(type(x) in _SCALARS for pair in value.items() for x in pair)
    return kind in (list, tuple, set) and all(type(x) in _SCALARS for x in value)


class _Settings:
    """Attributes of modules that are settings, with their values in forward.

    Lists, and no object for each setting: a model has ten thousand settings, which Python's garbage
    collector would go through during the step.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._owners = [vars(module) for module in modules]
        self._values = [_settings_of(owner) for owner in self._owners]

    def changed(self) -> list[tuple[dict[str, Any], dict[str, Any], str]]:
        """Return (attributes, settings in forward, name) of those that have other values now."""
        return [
            (owner, values, key)
            for owner, values in zip(self._owners, self._values, strict=True)
            for key, value in values.items()
            if (now := owner.get(key, _MISSING)) is not value
            and (type(now) is not type(value) or now != value)
        ]

    def ignore_changed(self) -> None:
        """Forget those that have other values now."""
        for _, values, key in self.changed():
            del values[key]


def _settings_of(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the settings among a module's attributes, with copies of collections."""
    return {
        key: value.copy() if type(value) in (list, dict, set) else value
        for key, value in attributes.items()
        if key not in _INTERNAL and _is_setting(value)
    }


class ReadTensors:
    """Tensors that a part of the model reads beside its inputs, and the settings of its modules."""

    def __init__(self, reads: Iterable[_Read], modules: Sequence[nn.Module] = ()) -> None:
        """Note what `modules` read, of which the first contains the others."""
        self.are_compiled = any(map(is_compiled, modules))
        """Whether `torch.compile` compiled any of the modules, which no dispatch mode may watch."""
        self._reads = tuple(reads)
        self._settings = _Settings(modules)
        self._root = modules[0] if modules else None
        self._need_grads = [read.tensor.requires_grad for read in self._reads]
        self._own_writes: set[int] = set()

    @classmethod
    def of_module(cls, module: nn.Module, *without: nn.Module) -> ReadTensors:
        """Parameters, buffers and settings of `module`, except of the modules `without` in it.

        Buffers may be replaced, as rotary tables are when they grow.
        """
        reads: list[_Read] = []
        modules = all_modules(module, *without)
        for child in modules:
            for key, tensor in child._parameters.items():
                if tensor is not None:
                    reads.append(_Read(key, tensor, child._parameters))
            for key, tensor in child._buffers.items():
                if tensor is not None:
                    reads.append(_Read(key, tensor, child._buffers, may_change=True))
        return cls(reads, modules)

    @classmethod
    def of_named(cls, named: Iterable[tuple[str, Tensor]]) -> ReadTensors:
        """Read tensors from (name, tensor) pairs."""
        return cls(_Read(name, tensor) for name, tensor in named)

    def versions(self) -> Versions:
        """Number of in-place writes to each tensor so far."""
        return tuple(version_of(read.tensor) for read in self._reads)

    def ignore_own_writes(self, versions: Versions) -> None:
        """Stop checking what the module's own forward has written into since `versions`.

        PEFT's adapters on experts write the values that were there; counters are another case. Such
        writes cannot be told from others. Settings and buffers that forward itself has changed are
        not restored either.
        """
        self._settings.ignore_changed()
        self._own_writes |= {
            index
            for index, (read, before) in enumerate(zip(self._reads, versions, strict=True))
            if version_of(read.tensor) != before or (read.may_change and read.is_replaced())
        }

    def check_unchanged(self, versions: Versions, where: str) -> None:
        """Check that every tensor is what it was when `versions` was read in forward.

        Raises:
            SPPOError: A tensor was written into, or replaced by one that cannot be restored; names
                it and `where`.
        """
        for index, (read, version) in enumerate(zip(self._reads, versions, strict=True)):
            if index in self._own_writes:
                continue
            replaced = not read.may_change and read.is_replaced() and not read.can_be_restored()
            if replaced or version_of(read.tensor) != version:
                happened = "replaced" if replaced else "changed in place"
                name = read.name_in(self._root)
                raise SPPOError(
                    f"{where}: {name} was {happened} between forward and backward, so the "
                    "gradients would not be those of the loss. Change it after backward "
                    "(optimizer.step(), for one), or run the forward again after the change."
                )

    @contextlib.contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """Context of a rerun: parameters, buffers and settings are those of forward inside.

        A script may have frozen parameters, switched to another adapter (PEFT), called `eval()`, or
        called the model with other weights (`torch.func.functional_call`) in between, which does
        not affect autograd's own graph. Afterwards all is as it was before.
        """
        undo: list[Callable[[], object]] = []
        try:
            for index, (read, needs_grad) in enumerate(
                zip(self._reads, self._need_grads, strict=True)
            ):
                if index in self._own_writes:
                    continue
                if read.is_replaced() and read.can_be_restored():
                    assert read.owner is not None, "a replaced tensor has an owner"
                    undo.append(_assign(read.owner, read.key, read.tensor))
                if read.tensor.requires_grad != needs_grad and read.tensor.is_leaf:
                    read.tensor.requires_grad_(needs_grad)
                    undo.append(lambda x=read.tensor, back=not needs_grad: x.requires_grad_(back))
            for owner, values, key in self._settings.changed():
                undo.append(_assign(owner, key, values[key]))
            yield
        finally:
            for restore in reversed(undo):
                restore()


def _assign(owner: dict[str, Any], key: str, value: Any) -> Callable[[], None]:
    """Assign an entry of a module's dict; return a function that undoes it."""
    before = owner.get(key, _MISSING)
    owner[key] = value

    def undo() -> None:
        if before is _MISSING:
            owner.pop(key, None)
        else:
            owner[key] = before

    return undo
