"""Staging regions on their way back to their pool: free once nothing touches them any more.

Knows nothing of cargoes. Threads know no streams, so a region that a thread may get next is free
only when the host has *seen* its copies end: rule 7 of [Note: offload lifetimes].
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sppo_hf.offload.disk_verbs import DiskTransfer, finish, is_over
from sppo_hf.offload.lanes import Ticket
from sppo_hf.offload.pool import HostPool, Region


@dataclass(slots=True, eq=False)
class _Return:
    """A region that nobody wants any more, and what may still touch it."""

    region: Region
    copies: list[Ticket]
    transfers: list[DiskTransfer]

    def is_over(self) -> bool:
        while self.copies and self.copies[-1].done():
            self.copies.pop()
        while not self.copies and self.transfers and is_over(self.transfers[-1]):
            self.transfers.pop()
        return not self.copies and not self.transfers

    def finish(self) -> None:
        for copy in self.copies:
            copy.finish()
        for transfer in self.transfers:
            finish(transfer)


class Returns:
    """The regions of `pool` that are on their way back to it, oldest first."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._queue: deque[_Return] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def num_bytes(self) -> int:
        """Bytes taken from the pool by what is on its way back."""
        return sum(one.region.reserved_bytes for one in self._queue)

    def add(self, region: Region, copies: list[Ticket], transfers: list[DiskTransfer]) -> None:
        """Give `region` back when all of `copies` and `transfers` have ended."""
        self._queue.append(_Return(region, copies, transfers))

    def poll(self) -> None:
        """Give back what is free, up to the first that is not; cheap."""
        while self._queue and self._give(self._queue[0]):
            self._queue.popleft()

    def poll_all(self) -> None:
        """Give back all that is free: what comes after a slow write may be."""
        self._queue = deque(one for one in self._queue if not self._give(one))

    def finish_first(self) -> None:
        """Block the host until the oldest is free, and give it back."""
        self._queue[0].finish()
        self.poll()

    def _give(self, one: _Return) -> bool:
        if not one.is_over():
            return False
        self._pool.release(one.region)
        return True
