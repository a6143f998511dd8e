"""A mover that really moves: bytes go to other storage, and what is given up is spoilt.

Every fetched tensor turns into NaN when it is evicted or released, so whoever still reads it is
found by its result. Bytes that are back on the device are counted; `trace` says what came when.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(eq=False)
class Parcel:
    """A handle."""

    label: str
    away: np.ndarray | None
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    here: Tensor | None = None


@dataclass
class PoisoningMover:
    """See the module's docstring."""

    parcels: list[Parcel] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    peak_here_bytes: int = 0
    settled: int = 0

    def send(self, tensor: Tensor) -> Parcel:
        assert not tensor.requires_grad
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), (
            "what is sent must not drag a larger storage along"
        )
        in_memory = tensor.as_strided((tensor.numel(),), (1,), 0)
        away = in_memory.view(torch.uint8).numpy().copy()
        label = f"p{len(self.parcels)}"
        self.parcels.append(Parcel(label, away, tensor.shape, tensor.stride(), tensor.dtype))
        return self.parcels[-1]

    def prefetch(self, handle: Parcel) -> None:
        assert handle.away is not None, "prefetched after its release"
        if handle.here is None:
            self.trace.append(f"prefetch {handle.label}")
            flat = torch.from_numpy(handle.away.copy()).view(handle.dtype)
            handle.here = flat.as_strided(handle.shape, handle.stride)
            self.peak_here_bytes = max(self.peak_here_bytes, self.here_bytes)

    def fetch(self, handle: Parcel) -> Tensor:
        if handle.here is None:
            self.trace.append(f"late {handle.label}")
        self.prefetch(handle)
        assert handle.here is not None
        return handle.here

    def evict(self, handle: Parcel) -> None:
        assert handle.away is not None, "evicted after its release"
        if handle.here is not None:
            handle.here.fill_(float("nan"))
        handle.here = None

    def release(self, handle: Parcel) -> None:
        assert handle.away is not None, "released twice"
        self.evict(handle)
        handle.away = None

    def settle(self) -> None:
        self.settled += 1

    @property
    def here_bytes(self) -> int:
        """Bytes that are back on the device."""
        return sum(_bytes(p.here) for p in self.parcels if p.here is not None)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that are away."""
        return sum(p.away.nbytes for p in self.parcels if p.away is not None)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
