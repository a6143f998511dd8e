"""What attention asks of whoever takes keys, values and their gradients away and brings them back.

Attention knows that bytes can be elsewhere, not where: host memory, a disk and a test's dictionary
are all a `KVTransfer`. It knows nothing of streams; orders between copies and compute are the
mover's.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

Handle = Any
"""Stands for a tensor that was sent; only its mover looks inside."""


class KVTransfer(Protocol):
    """Moves tensors away from the device and back, any number of times each.

    A handle is *here* from `prefetch` or `fetch` until `evict`, else *away*. All calls return at
    once as far as the host is concerned; compute enqueued later finds what they promise.
    """

    def send(self, tensor: Tensor) -> Handle:
        """Start taking `tensor` away; its handle is away, and owns the bytes until `release`.

        The caller may go on reading its own reference, must not write to it, and should drop it
        soon: the device memory is free once that and the copy are over.
        """
        ...

    def prefetch(self, handle: Handle) -> None:
        """Start bringing the bytes back; nothing if they are here."""
        ...

    def fetch(self, handle: Handle) -> Tensor:
        """The tensor on the device, valid until `evict` or `release`; must not be written to."""
        ...

    def evict(self, handle: Handle) -> None:
        """Give the device's copy up; the bytes stay away. Nothing if they are not here."""
        ...

    def release(self, handle: Handle) -> None:
        """Give all bytes up, here and away; the handle ends."""
        ...

    def settle(self) -> None:
        """A good moment to bound what is still leaving: compute may wait for earlier sends."""
        ...
