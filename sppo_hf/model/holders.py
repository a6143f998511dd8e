"""Where a recomputed frame's tensors wait for backward: on the device, or away from it.

Knows nothing of layers: a holder has one tensor, which is taken once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Protocol

from torch import Tensor

from sppo_hf.errors import SPPOError
from sppo_hf.model.versions import version_of
from sppo_hf.offload.engine import OffloadedTensor, OffloadEngine
from sppo_hf.planning.modes import AwayTier


class Holder(Protocol):
    """One tensor between forward and backward."""

    def handles(self) -> Iterable[OffloadedTensor]:
        """The handle of the tensor, if it is away."""
        ...

    def take(self) -> Tensor:
        """The tensor, on the device; the holder lets go of it."""
        ...

    def borrow(self) -> contextlib.AbstractContextManager[Tensor]:
        """The tensor, on the device, for a while; it waits where it did before and after."""
        ...

    def drop(self) -> None:
        """Let go of the tensor, taken or not."""
        ...


class Kept:
    """A tensor that stays on the device, and perhaps is still in use there."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._version = version_of(tensor)

    def handles(self) -> Iterable[OffloadedTensor]:
        """See `Holder`."""
        return ()

    def take(self) -> Tensor:
        """See `Holder`.

        Raises:
            SPPOError: The tensor was changed in place since.
        """
        tensor = self._checked()
        self.drop()
        return tensor

    def borrow(self) -> contextlib.AbstractContextManager[Tensor]:
        """See `Holder`."""
        return contextlib.nullcontext(self._checked())

    def _checked(self) -> Tensor:
        assert self._tensor is not None, "a kept tensor is taken once"
        tensor = self._tensor
        if version_of(tensor) != self._version:
            raise SPPOError(
                f"a tensor of shape {tuple(tensor.shape)} that is kept for recomputation was "
                "changed in place between forward and backward. Use operations that are not in "
                "place in the layer's hooks, or set recompute='none'."
            )
        return tensor

    def drop(self) -> None:
        """See `Holder`."""
        self._tensor = None


class Offloaded:
    """A tensor that travels to `tier` and back."""

    def __init__(self, engine: OffloadEngine, tensor: Tensor, tier: AwayTier) -> None:
        self._engine = engine
        self._handle: OffloadedTensor | None = engine.start_offload(tensor, tier=tier)

    def handles(self) -> Iterable[OffloadedTensor]:
        """See `Holder`."""
        return () if self._handle is None else (self._handle,)

    def take(self) -> Tensor:
        """See `Holder`."""
        assert self._handle is not None, "an offloaded tensor is taken once"
        tensor = self._engine.wait_for(self._handle)
        self.drop()
        return tensor

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Tensor]:
        """See `Holder`."""
        assert self._handle is not None, "an offloaded tensor is taken once"
        was_away = self._engine.bytes_to_fetch(self.handles()) > 0
        tensor = self._engine.wait_for(self._handle)
        try:
            yield tensor
        finally:
            if was_away and self._handle is not None:
                del tensor
                self._engine.evict(self._handle)

    def drop(self) -> None:
        """See `Holder`."""
        if self._handle is not None:
            self._engine.release(self._handle)
            self._handle = None
