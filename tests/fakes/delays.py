"""A device's streams with random pauses, so that missing waits between streams show.

`DelayedRuntime` stands in for a `CudaRuntime`, around one, where a pause keeps the stream busy on
the device, or around a `FakeDevice`, where it takes logical time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from sppo_hf.offload.copy_streams import CudaRuntime
from tests.fakes.device import FakeDevice

FAKE_SECONDS = (0.0, 0.0, 0.1, 1.0, 7.0)
CUDA_CYCLES = (0, 0, 10**4, 10**5, 10**6)
"""Up to about a millisecond: longer than any copy or kernel of the tests."""


class DelayedRuntime:
    """See the module.

    Args:
        inner: does the work.
        pause: enqueues a pause on the current stream, or none.
        spoil: overwrites device bytes that were just allocated, so that early reads show.
        only_copies: whether compute never pauses.
    """

    def __init__(
        self,
        inner: CudaRuntime | FakeDevice,
        pause: Callable[[], None],
        spoil: Callable[[Tensor], None] = lambda tensor: None,
        *,
        only_copies: bool = False,
    ) -> None:
        self.device = inner.device
        self.inner = inner
        self._pause = pause
        self._spoil = spoil
        self._only_copies = only_copies

    def current_stream(self) -> Any:
        return self.inner.current_stream()

    def new_stream(self) -> Any:
        return self.inner.new_stream()

    def new_event(self, *, timed: bool) -> Any:
        return self.inner.new_event(timed=timed)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return self.inner.use_stream(stream)

    def empty_bytes(self, num_bytes: int) -> Tensor:
        """Pause compute; return bytes that are NaN in any float dtype until a copy fills them."""
        if not self._only_copies:
            self._pause()
        empty = self.inner.empty_bytes(num_bytes)
        self._spoil(empty)
        return empty

    def copy_bytes(self, destination: Tensor, source: Tensor) -> None:
        """Pause the current stream, then copy."""
        self._pause()
        self.inner.copy_bytes(destination, source)

    def lock_pages(self, address: int, num_bytes: int) -> None:
        self.inner.lock_pages(address, num_bytes)

    def unlock_pages(self, address: int) -> None:
        self.inner.unlock_pages(address)


def delayed_fake(device: FakeDevice, seed: int) -> DelayedRuntime:
    """The fake device with random pauses on all of its streams."""
    draw = random.Random(seed)
    return DelayedRuntime(device, lambda: device.kernel(seconds=draw.choice(FAKE_SECONDS)))


def delayed_cuda(
    seed: int, cycles: Sequence[int] = CUDA_CYCLES, *, only_copies: bool = False
) -> DelayedRuntime:
    """The current CUDA device with pauses of one of `cycles` on its streams."""
    draw = random.Random(seed)

    def pause() -> None:
        drawn = draw.choice(cycles)
        if drawn:
            torch.cuda._sleep(drawn)

    device = torch.device("cuda", torch.cuda.current_device())
    return DelayedRuntime(
        CudaRuntime(device), pause, lambda tensor: tensor.fill_(0xFF), only_copies=only_copies
    )
