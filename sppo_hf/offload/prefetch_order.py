"""The frames of one forward, by their numbers, and the prefetches that are due in its backward.

When backward enters a frame, those are prefetched that the step's program lists there. Which these
are comes in as data (`StepProgram.asked` in `sppo_hf.planning.lowering`), so the order that was
planned and simulated is the order that runs.

A frame is anything that names its handles. Frames are known weakly: autograd's graph owns them, so
a dropped graph takes its frames and their bytes with it.

[Note: backwards that are not the planned one] A batch with padding runs fewer chunks, a gradient of
a part of the graph enters fewer layers, and a graph may be walked in several goes. What a frame
that is not there would have asked for is then asked for by the next one that is entered; a jump
asks for nothing between, and what it lands on comes back when it is entered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from sppo_hf.offload.storage import OffloadedTensor

if TYPE_CHECKING:
    from sppo_hf.offload.engine import OffloadEngine


class Frame(Protocol):
    """All that backward needs of one (layer, chunk), as far as the prefetch order must know it."""

    def handles(self) -> Iterable[OffloadedTensor]:
        """The handles of what backward still needs, first needed first; none if all was kept."""
        ...


class PrefetchOrder:
    """The frames of one sequence, made by `OffloadEngine.new_prefetch_order`.

    Args:
        mover: moves what the frames' handles stand for.
        max_pending_d2h_bytes: what may be on its way out when a frame has closed; None for one
            frame.
        asked: by number of a frame, the lowest number that has been prefetched once backward has
            entered it (its own and those above are); None: the frame before it. A frame above the
            end asks for nothing but itself.
        reads_ahead: whether frames beyond those are read from disk as early as there is room.
        on_prefetch: is told the number of a frame when its bytes are asked for.
    """

    def __init__(
        self,
        mover: OffloadEngine,
        *,
        max_pending_d2h_bytes: int | None = None,
        asked: Sequence[int] | None = None,
        reads_ahead: bool = False,
        on_prefetch: Callable[[int], None] | None = None,
    ) -> None:
        assert max_pending_d2h_bytes is None or max_pending_d2h_bytes >= 0, (
            "a bound on bytes is not negative"
        )
        self._mover = mover
        self._leave_bytes = max_pending_d2h_bytes
        self._asked = asked
        self._frames: dict[int, weakref.ref[Frame]] = {}
        self._number_of: weakref.WeakKeyDictionary[Frame, int | None] = weakref.WeakKeyDictionary()
        self._reads_ahead = reads_ahead
        self._on_prefetch = on_prefetch
        self._told: set[int] = set()
        self._recorded = 0
        # Backward is at frame `_at`; all between it and `_next` has been asked for, and all
        # between it and `_next_read` is on the host or being read.
        self._at = self._next = self._next_read = -1

    def __len__(self) -> int:
        return self._recorded

    def record(self, frame: Frame, number: int | None = None) -> None:
        """Take `frame` (weakly referenced, hashed by identity) when it closes.

        Args:
            frame: Has its handles.
            number: Its place in the order of forward; None: it is prefetched for no other frame,
                and prefetches none.
        """
        assert frame not in self._number_of, "a frame closes once"
        self._number_of[frame] = number
        self._recorded += 1
        if number is not None:
            self._frames[number] = weakref.ref(frame)
        self._mover.close_frame(self._leave_bytes)

    def on_backward(self, frame: Frame) -> None:
        """Prefetch `frame` and those that are listed with it; call at its first use.

        Cheap when called again: what is there or under way is not asked for twice.
        """
        assert frame in self._number_of, "a frame is used in backward after it has closed"
        number = self._number_of[frame]
        if number is None:
            for handle in frame.handles():
                self._mover.prefetch(handle)
            return
        self._fetch(number)
        self._enter(number)

    def start_backward(self, *numbers: int) -> None:
        """Do now what entering frames `numbers` would, where little else runs before."""
        for number in numbers:
            self._enter(number)

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Prefetch the frames of these numbers, in their order."""
        for number in numbers:
            self._fetch(number)

    def read_ahead(self, numbers: Iterable[int]) -> None:
        """Start reading these frames into host memory, in their order, while there is room."""
        for number in numbers:
            for handle in self._handles(number):
                if not self._mover.read_ahead(handle):
                    return

    def _enter(self, number: int) -> None:
        if number > self._at:  # backward has begun, or begun anew
            self._next = self._next_read = number
        self._at = number
        lowest = number - 1 if self._asked is None else number + 1
        if self._asked is not None and number < len(self._asked):
            lowest = self._asked[number]
        for due in range(min(self._next, number), max(lowest, 0) - 1, -1):
            self._fetch(due)
            self._next = due - 1
        if self._reads_ahead:
            self._read_ahead()

    def _fetch(self, number: int) -> None:
        handles = tuple(self._handles(number))
        if handles and self._on_prefetch is not None and number not in self._told:
            self._told.add(number)
            self._on_prefetch(number)
        for handle in handles:
            self._mover.prefetch(handle)

    def _handles(self, number: int) -> Iterable[OffloadedTensor]:
        reference = self._frames.get(number)
        frame = None if reference is None else reference()
        return () if frame is None else frame.handles()

    def _read_ahead(self) -> None:
        self._next_read = min(self._next_read, self._next)
        while self._next_read >= 0:
            for handle in self._handles(self._next_read):
                if not self._mover.read_ahead(handle):
                    return
            self._next_read -= 1
