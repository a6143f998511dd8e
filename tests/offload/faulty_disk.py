"""A disk that is slow, partial or broken on demand: between the disk tier and the system."""

import fcntl
import os
import threading
from collections.abc import Callable

import pytest

from sppo_hf.offload import disk_files
from sppo_hf.offload.disk_files import BLOCK_BYTES
from sppo_hf.offload.slabs import round_up

PATIENCE_SECONDS = 30.0
"""A held transfer fails after this time, so that a failing test ends."""


class FaultyDisk:
    """Stands in for os.pwritev and os.preadv.

    Args:
        monkeypatch: undoes it after the test.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes_flow = threading.Event()
        """While cleared, every write waits at its start."""
        self.reads_flow = threading.Event()
        """The same for reads."""
        self.write_begun = threading.Semaphore(0)
        """Counts the system calls that write, including those that wait."""
        self.read_begun = threading.Semaphore(0)
        """The same for reads."""
        self.errors: list[BaseException] = []
        """Errors that the next calls raise, one each."""
        self.max_bytes: int | None = None
        """Maximum bytes of one call; a whole number of blocks past the page cache."""
        self.writes: list[tuple[int, int]] = []
        """Offset and bytes of every write that was made."""
        self.resume()
        # A new store's trial block is no transfer of a test.
        monkeypatch.setattr(disk_files, "_why_names_are_needed", lambda directory: None)
        write, read = os.pwritev, os.preadv
        monkeypatch.setattr(os, "pwritev", self._wrap(write, is_write=True))
        monkeypatch.setattr(os, "preadv", self._wrap(read, is_write=False))

    def resume(self) -> None:
        """Let everything flow."""
        self.writes_flow.set()
        self.reads_flow.set()

    def await_write(self) -> None:
        """Wait until a thread is about to write (once for each call)."""
        assert self.write_begun.acquire(timeout=PATIENCE_SECONDS)

    def await_read(self) -> None:
        """Wait until a thread is about to read (once for each call)."""
        assert self.read_begun.acquire(timeout=PATIENCE_SECONDS)

    def _wrap(
        self, call: Callable[[int, list[memoryview], int], int], *, is_write: bool
    ) -> Callable[[int, list[memoryview], int], int]:
        flow = self.writes_flow if is_write else self.reads_flow
        begun = self.write_begun if is_write else self.read_begun

        def faulty(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            begun.release()
            assert flow.wait(PATIENCE_SECONDS), "a test held a transfer for too long"
            if self.errors:
                raise self.errors.pop(0)
            (memory,) = buffers
            max_bytes = self.max_bytes
            if max_bytes is not None and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                max_bytes = round_up(max_bytes, BLOCK_BYTES)
            memory = memory[:max_bytes]
            moved = call(descriptor, [memory], offset)
            if is_write:
                self.writes.append((offset, moved))
            return moved

        return faulty
