"""Whatever happens in the middle of the engine's calls, nothing races, leaks or waits for ever.

A garbage collection or another thread may drop tensors at any moment, the device may have no memory
for a copy, a transfer may fail, Ctrl-C may end a wait for a store, and compute may change streams.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.copy_streams import StreamCopier
from sppo_hf.offload.engine import OffloadEngine
from sppo_hf.offload.host_memory import PAGE_BYTES, HostPool
from sppo_hf.offload.storage import OffloadedTensor
from sppo_hf.offload.tiers import Staging
from tests.fakes.device import FakeDevice
from tests.fakes.disk import FakeDisk
from tests.sweeps import sample

PAGE_FLOATS = PAGE_BYTES // 4
EVENTS = ("drops", "out of memory", "failures", "interrupts", "streams")


class _Bench:
    """An engine with up to three tiers behind the host, and handles with the values they have.

    Args:
        seed: draws sizes, speeds, operations and events.
        event: what happens in the middle of calls.
    """

    def __init__(self, seed: int, event: str) -> None:
        self.draw = random.Random(seed)
        self.event = event
        self.held: list[tuple[OffloadedTensor, torch.Tensor]] = []
        self.in_call = False
        choice = self.draw.choice
        self.device = FakeDevice(lambda stream, num_bytes: choice([0.0, 0.1, 1.0, 7.0]))
        self.streams = [self.device.compute, *(self.device.new_stream() for _ in range(2))]
        self.disks = [self._disk(f"tier {number}") for number in range(choice([1, 2, 3]))]
        self.stagings = [
            Staging(disk, choice([2, 3, 4, 8]) * PAGE_BYTES, clock=lambda: self.device.now)
            for disk in self.disks
        ]
        pool = HostPool(PAGE_BYTES, budget_bytes=choice([0, 4 * PAGE_BYTES]))
        self._disturb(self.device, "empty_bytes", torch.OutOfMemoryError)
        self.engine = OffloadEngine(
            StreamCopier(self.device), pool, min_offload_elements=4, behind=self.stagings
        )

    def _disk(self, name: str) -> FakeDisk:
        def seconds(num_bytes: int) -> float:
            return self.draw.choice([0.0, 1.0, 5.0, 30.0])

        budget_bytes = self.draw.choice([None, 20 * PAGE_BYTES])
        disk = FakeDisk(self.device, seconds, seconds, budget_bytes=budget_bytes, name=name)
        self._disturb(disk, "allocate", None)
        self._disturb(disk, "start_write", KeyboardInterrupt)
        self._disturb(disk, "start_read", None)
        return disk

    def _disturb(self, owner: object, method: str, error: type[BaseException] | None) -> None:
        """Let something happen before `method`; it may raise `error` if that is the event."""
        call: Callable[..., Any] = getattr(owner, method)
        raised_by = {torch.OutOfMemoryError: "out of memory", KeyboardInterrupt: "interrupts"}

        def disturbed(*args: Any) -> Any:
            if self.in_call:
                chance = self.draw.random()
                if error is not None and self.event == raised_by[error] and chance < 0.1:
                    raise error
                if self.held and self.event == "drops" and chance < 0.3:
                    self.held.pop(self.draw.randrange(len(self.held)))
                elif chance > 0.9:
                    self.device.advance(self.draw.choice([0.1, 1.0, 10.0]))
            return call(*args)

        setattr(owner, method, disturbed)

    def step(self) -> None:
        """One operation, with what happens in it."""
        if self.event == "streams":
            self.device._current = self.draw.choice(self.streams)
        for disk in self.disks:
            disk.fail_writes = self.event == "failures" and self.draw.random() < 0.1
            disk.fail_reads = self.event == "failures" and self.draw.random() < 0.1
        operations = [self.send] * 3 + [self.use] * 5 + [self.drop] * 2 + [self.pass_time]
        operation = self.draw.choice(operations)
        self.in_call = True
        try:
            operation()
        except (BudgetError, torch.OutOfMemoryError, KeyboardInterrupt):
            pass
        except OffloadError:
            if self.event != "failures":
                raise
        finally:
            self.in_call = False

    def send(self) -> None:
        values = torch.rand(self.draw.choice([1, 1, 2]) * PAGE_FLOATS)
        tier = self.draw.choice(["host", *(disk.name for disk in self.disks)])
        source = self.device.tensor(values)
        self.held.append((self.engine.start_offload(source, tier=tier), values))

    def use(self) -> None:
        if not self.held:
            return
        handle, values = self.draw.choice(self.held)
        call = self.draw.choice(["prefetch", "read_ahead", "evict", "wait_for", "wait_for"])
        tensor = getattr(self.engine, call)(handle)
        if call == "wait_for":
            self.check(tensor, values)

    def drop(self) -> None:
        if self.held:
            handle, _ = self.held.pop(self.draw.randrange(len(self.held)))
            if self.draw.random() < 0.5:
                self.engine.release(handle)

    def pass_time(self) -> None:
        self.device.advance(self.draw.choice([0.1, 1.0, 10.0]))
        self.engine.limit_pending_d2h(self.draw.choice([None, 0, 2 * PAGE_BYTES]))

    def check(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        if self.event != "streams":  # who reads on another stream than the bytes' has to order that
            self.device.kernel(reads=[tensor])
        assert torch.equal(tensor, values)

    def check_all(self) -> None:
        """Check what is left, and that nothing is once that is dropped."""
        for handle, values in self.held if self.event != "failures" else ():
            self.check(self.engine.wait_for(handle), values)
        handle = None  # else the last one lives on
        self.held.clear()
        for _ in range(30):
            self.device.finish()
            with contextlib.suppress(OffloadError):
                self.engine.limit_pending_d2h(0)
        self.engine.assert_drained()
        assert self.engine.stats().host_used_bytes == 0
        assert not any(disk.extents for disk in self.disks)
        self.device.look_for_freed()
        assert self.device.device_bytes == 0
        self.engine.close()


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("seed", sample(range(12), 3))
def test_nothing_races_leaks_or_waits_for_ever(seed: int, event: str) -> None:
    for part in range(10):
        bench = _Bench(100 * seed + part, event)
        for _ in range(60):
            bench.step()
        bench.check_all()
