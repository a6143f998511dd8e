"""What the engine needs of a disk, in a few verbs; `disk.DiskStore` has them, and so has a fake.

Knows nothing of files or threads.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from torch import Tensor

from sppo_hf.errors import SPPOError


class DiskTransfer(Protocol):
    """A write or read under way in the background, as `disk_queue.DiskTicket` is."""

    def done(self) -> bool:
        """Whether it is over; polls, never blocks; raises OffloadError if it failed."""
        ...

    def wait(self) -> None:
        """Block the host until it is over; raises as `done`."""
        ...


class DiskWriting(Protocol):
    """A write that was started, as `disk.DiskWrite` is."""

    @property
    def extent(self) -> Any:
        """Where the bytes will be."""
        ...

    @property
    def ticket(self) -> DiskTransfer:
        """What to ask about the write."""
        ...


class Disk(Protocol):
    """What staging needs of `disk.DiskStore`."""

    def start_write(self, host_bytes: Tensor) -> DiskWriting:
        """Start writing uint8 `host_bytes` [n]; may block while too much waits."""
        ...

    def start_read(self, extent: Any, host_bytes: Tensor) -> DiskTransfer:
        """Start filling uint8 `host_bytes` [n] with an extent of n bytes."""
        ...

    def release(self, extent: Any) -> None:
        """Give an extent back, even under its transfers."""
        ...

    def close(self) -> None:
        """End the threads and remove the files."""
        ...


def is_over(transfer: DiskTransfer) -> bool:
    """Whether a transfer has ended, well or not; does not wait."""
    try:
        return transfer.done()
    except SPPOError:
        return True


def finish(transfer: DiskTransfer) -> None:
    """Block the host until a transfer has ended, well or not."""
    with contextlib.suppress(SPPOError):
        transfer.wait()
