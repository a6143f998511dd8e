"""The order in which frames closed in forward, read backward to bring each back ahead of its use.

Knows nothing of tensors: a frame is anything that names its handles. The tape looks at frames
weakly: autograd's graph owns them, so a dropped graph takes its frames and their bytes with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

from sppo_hf.offload.handles import OffloadedTensor


class Frame(Protocol):
    """All that backward needs of one (layer, chunk), as far as the tape must know it."""

    def handles(self) -> Iterable[OffloadedTensor]:
        """The handles of what backward still needs, first needed first; none if all was kept."""
        ...


class Mover(Protocol):
    """The engine's side of a tape."""

    def close_frame(self, leave_bytes: int | None = None) -> None:
        """Let compute wait until at most `leave_bytes` are on their way out."""
        ...

    def bytes_to_fetch(self, handles: Iterable[OffloadedTensor]) -> int:
        """Device bytes that a prefetch of all `handles` would take."""
        ...

    def prefetch(self, handle: OffloadedTensor) -> None:
        """Start bringing the tensor back to the device."""
        ...

    def read_ahead(self, handle: OffloadedTensor) -> bool:
        """Start reading the tensor from disk, if it is there; False if that has to wait."""
        ...


class Tape:
    """The frames of one sequence, made by `OffloadEngine.new_tape`.

    The look-ahead is counted per tape, since only the frames of one tape have an order among
    them; autograd reads the tapes of several forwards one after another.

    Args:
        mover: moves what the frames' handles stand for.
        leave_bytes: what may be on its way out when a frame has closed; None for one frame.
        fetch_bytes: the most bytes of frames that are prefetched and not yet used. The next frame
            that has bytes is always prefetched, whatever its size.
        reads_ahead: whether frames beyond those are read from disk as early as there is room.
    """

    def __init__(
        self,
        mover: Mover,
        *,
        leave_bytes: int | None = None,
        fetch_bytes: int = 0,
        reads_ahead: bool = False,
    ) -> None:
        assert leave_bytes is None or leave_bytes >= 0, "a bound on bytes is not negative"
        assert fetch_bytes >= 0, "a tape cannot look back"
        self._mover = mover
        self._leave_bytes = leave_bytes
        self._fetch_bytes = fetch_bytes
        self._frames: list[weakref.ref[Frame]] = []
        self._index_of: weakref.WeakKeyDictionary[Frame, int] = weakref.WeakKeyDictionary()
        self._reads_ahead = reads_ahead
        # Backward is at frame `_at`; all between it and `_next` has been asked for, and all
        # between it and `_next_read` is on the host or being read.
        self._at = self._next = self._next_read = -1
        self._ahead: dict[int, int] = {}
        """Bytes of frames by index that were prefetched and not yet used."""

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def ahead_bytes(self) -> int:
        """Bytes of frames that are prefetched, not yet used and still wanted."""
        for index in [index for index in self._ahead if self._frames[index]() is None]:
            del self._ahead[index]  # this part of the graph was dropped
        return sum(self._ahead.values())

    def record(self, frame: Frame) -> None:
        """Append `frame` (weakly referenced, hashed by identity) when it closes."""
        assert frame not in self._index_of, "a frame closes once"
        self._index_of[frame] = len(self._frames)
        self._frames.append(weakref.ref(frame))
        self._mover.close_frame(self._leave_bytes)

    def on_backward(self, frame: Frame) -> None:
        """Prefetch `frame` and those before it within the window; call at its first use.

        Cheap when called again: what is there or under way is not asked for twice.
        """
        assert frame in self._index_of, "a frame is used in backward after it has closed"
        index = self._index_of[frame]
        self._ahead.pop(index, None)
        for handle in frame.handles():
            self._mover.prefetch(handle)
        self._look_ahead_of(index)

    def start_backward(self) -> None:
        """Prefetch the last frames; worth calling where the loss's own backward runs before."""
        self._look_ahead_of(len(self._frames))

    def _look_ahead_of(self, index: int) -> None:
        if index <= self._next or index > self._at:  # backward has jumped
            self._next = self._next_read = index - 1
        self._at = index
        self._fetch_ahead()
        if self._reads_ahead:
            self._read_ahead()

    def _fetch_ahead(self) -> None:
        while self._next >= 0:
            frame = self._frames[self._next]()
            handles = tuple(frame.handles()) if frame is not None else ()
            # A frame without bytes (kept, dropped, or back already) is no frame to stop at.
            num_bytes = self._mover.bytes_to_fetch(handles)
            if num_bytes > 0:
                ahead_bytes = self.ahead_bytes
                if ahead_bytes > 0 and ahead_bytes + num_bytes > self._fetch_bytes:
                    return
                self._ahead[self._next] = num_bytes
                for handle in handles:
                    self._mover.prefetch(handle)
            self._next -= 1

    def _read_ahead(self) -> None:
        self._next_read = min(self._next_read, self._next)
        while self._next_read >= 0:
            frame = self._frames[self._next_read]()
            for handle in frame.handles() if frame is not None else ():
                if not self._mover.read_ahead(handle):
                    return
            self._next_read -= 1
