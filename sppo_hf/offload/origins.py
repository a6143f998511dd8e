"""Which storages have been moved: so that a storage saved by several frames moves once.

Knows nothing of copies. Storages are known by identity; a weak reference to each keeps its identity
from being given to another as long as a move of it is known.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sppo_hf.offload.cargo import Cargo, Owner
from sppo_hf.offload.spans import Span


@dataclass(slots=True)
class _Origin:
    """The moves that started from one storage."""

    storage: StorageWeakRef
    owners: list[weakref.ref[Owner]]

    def alive(self) -> Iterator[Owner]:
        for reference in self.owners:
            owner = reference()
            if owner is not None and not owner.cargo.abandoned:
                yield owner


class Origins:
    """The moves under way or over whose bytes somebody still owns, by storage."""

    def __init__(self) -> None:
        self._origins: dict[int, _Origin] = {}

    def __len__(self) -> int:
        return len(self._origins)

    def owner_of(self, tensor: Tensor) -> Owner | None:
        """The owner of a move that already holds all bytes of `tensor` in their present version."""
        origin = self._origins.get(tensor.untyped_storage()._cdata)
        if origin is None:
            return None
        span = Span.of(tensor)
        for owner in origin.alive():
            cargo = owner.cargo
            if cargo.version == tensor._version and cargo.span.contains(span):
                return owner
        return None

    def add(self, tensor: Tensor, owner: Owner) -> None:
        """Remember that `owner` moved `tensor`; its cargo has the storage's key."""
        storage = StorageWeakRef(tensor.untyped_storage())
        origin = self._origins.setdefault(owner.cargo.storage_key, _Origin(storage, []))
        origin.owners.append(weakref.ref(owner))

    def forget(self, cargo: Cargo) -> None:
        """Forget a move that nobody owns any more."""
        origin = self._origins.get(cargo.storage_key)
        if origin is None:
            return
        origin.owners = [weakref.ref(owner) for owner in origin.alive()]
        if not origin.owners:
            del self._origins[cargo.storage_key]
