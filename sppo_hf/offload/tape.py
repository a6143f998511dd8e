"""The order in which frames closed in forward, read backward to bring each back one ahead of use.

Knows nothing of tensors: a frame is anything with `prefetch()`. The tape looks at frames weakly:
autograd's graph owns them, so a dropped graph takes its frames and their bytes with it at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol


class Frame(Protocol):
    """All that backward needs of one (layer, chunk), as far as the tape must know it."""

    def prefetch(self) -> None:
        """Start bringing the frame's bytes back to the device; cheap where there are none."""
        ...


class Tape:
    """The frames of one sequence, made by `OffloadEngine.new_tape`.

    Args:
        on_close: called at each `record`, at the frame boundary.
        frames_ahead: how many frames before the one in use are prefetched.
    """

    def __init__(self, on_close: Callable[[], None], *, frames_ahead: int = 1) -> None:
        assert frames_ahead >= 0, "a tape cannot look back"
        self._on_close = on_close
        self._frames_ahead = frames_ahead
        self._frames: list[weakref.ref[Frame]] = []
        self._index_of: weakref.WeakKeyDictionary[Frame, int] = weakref.WeakKeyDictionary()
        self._started: set[int] = set()

    def __len__(self) -> int:
        return len(self._frames)

    def record(self, frame: Frame) -> None:
        """Append `frame` (weakly referenced, hashed by identity) when it closes."""
        assert frame not in self._index_of, "a frame closes once"
        self._index_of[frame] = len(self._frames)
        self._frames.append(weakref.ref(frame))
        self._on_close()

    def on_backward(self, frame: Frame) -> None:
        """Prefetch `frame` and those before it; call at its first use in backward.

        Cheap when called again: each frame is started once, the one in use first.
        """
        assert frame in self._index_of, "a frame is used in backward after it has closed"
        index = self._index_of[frame]
        for ahead in range(index, max(index - self._frames_ahead, 0) - 1, -1):
            self._start(ahead)

    def start_backward(self) -> None:
        """Prefetch the last frame; worth calling where the loss's own backward runs before it."""
        if self._frames:
            self._start(len(self._frames) - 1)

    def _start(self, index: int) -> None:
        if index not in self._started:
            self._started.add(index)
            frame = self._frames[index]()
            if frame is not None:
                frame.prefetch()
