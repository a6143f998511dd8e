"""What is on its way out of the device, oldest first: which sources may be freed, and when.

Knows nothing of handles or pools. One lane copies in order, so what compute waits for, and what the
host sees done, is always a prefix of this queue. Rules 2 and 3 of [Note: offload lifetimes].
"""

from __future__ import annotations

from collections import deque

from sppo_hf.offload.cargo import Cargo
from sppo_hf.offload.lanes import wait_for_all


class Leaving:
    """The cargoes whose source is still on the device although its copy has been enqueued.

    One for all tapes of an engine: the device's memory is one, and so is the lane.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[int, Cargo]] = deque()  # (frame, cargo)
        self._frame = 0
        self.num_bytes = 0
        """Bytes enqueued and not yet ordered."""

    def add(self, cargo: Cargo) -> None:
        """Append a cargo whose copy has just been enqueued; it belongs to the open frame."""
        self._queue.append((self._frame, cargo))
        self.num_bytes += cargo.span.num_bytes

    def close_frame(self, leave_bytes: int | None) -> None:
        """Let compute wait for the oldest copies until at most `leave_bytes` are left.

        With None, until nothing but the frame that closes is left. Which copies are waited for
        follows from sizes alone, not from time. One wait, for the last of them, does for all.
        """
        going: list[Cargo] = []
        while self._queue:
            frame, _ = self._queue[0]
            enough = frame == self._frame if leave_bytes is None else self.num_bytes <= leave_bytes
            if enough:
                break
            going.append(self._pop())
        wait_for_all(cargo.out_ticket for cargo in going)
        for cargo in going:
            cargo.drop_source()
        self._frame += 1

    def poll(self) -> None:
        """Free the sources whose copies have ended; never blocks."""
        while self._queue and self._queue[0][1].out_ticket.ordered:
            self._pop().drop_source()

    def forget(self) -> None:
        """Empty the queue; who owns the cargoes sees to their copies."""
        self._queue.clear()
        self.num_bytes = 0

    def _pop(self) -> Cargo:
        _, cargo = self._queue.popleft()
        self.num_bytes -= cargo.span.num_bytes
        return cargo
