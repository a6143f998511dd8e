"""Random plans on the fake device and disk: any tier for any group, at any speeds.

Each step runs forward and backward over groups that are kept, or wait on the host or on the disk,
as the host would enqueue them; some steps are broken off by an exception. The fake device asserts
the order of all work and that nothing is used after it was freed; the pools and the fake disk
assert that nothing is freed twice; the tests add values, windows, budgets and what is left.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.offload.copy_streams import StreamCopier, StreamTicket
from sppo_hf.offload.engine import OffloadEngine
from sppo_hf.offload.host_memory import PAGE_BYTES, HostPool
from sppo_hf.offload.layer_offload import PrefetchOrder
from sppo_hf.offload.storage import OffloadedStorage, OffloadedTensor
from sppo_hf.offload.tiers import Staging, _ReclaimedRegion
from tests.fakes.device import FakeDevice, RaceError
from tests.fakes.disk import FakeDisk
from tests.offload.orders import asked_within
from tests.sweeps import examples

Mode = Literal["keep", "host", "disk", "far"]
MAX_FLOATS = 3 * PAGE_BYTES // 4
SECONDS = [0.0, 0.0, 0.1, 1.0, 7.0, 50.0]


class _StepFails(Exception):
    pass


@dataclass
class Machine:
    """Sizes and speeds."""

    d2h_seconds: float = 1.0
    h2d_seconds: float = 1.0
    write_seconds: float = 1.0
    read_seconds: float = 1.0
    own_streams: bool = True
    host_pages: int = 4
    staging_pages: int = 4
    """Of each tier behind the host."""
    disk_pages: int | None = None
    """What finds no space there goes to the far tier, which is read as fast as the disk writes."""
    max_pending_d2h_bytes: int | None = None
    max_prefetch_bytes: int | None = None


MACHINES = st.builds(
    Machine,
    *[st.sampled_from(SECONDS)] * 4,
    own_streams=st.sampled_from([True, True, True, False]),
    host_pages=st.integers(0, 20),
    staging_pages=st.integers(3, 12),
    disk_pages=st.one_of(st.none(), st.integers(0, 8)),
    max_pending_d2h_bytes=st.one_of(st.none(), st.integers(0, 30_000)),
    max_prefetch_bytes=st.one_of(st.none(), st.integers(0, 30_000)),
)
FRAMES = st.lists(
    st.tuples(
        st.sampled_from(["keep", "host", "disk", "far"]),
        st.lists(st.integers(1, MAX_FLOATS - 2), max_size=3),
    ),
    min_size=1,
    max_size=8,
)


@dataclass(eq=False)
class Group:
    held: list[tuple[OffloadedTensor, torch.Tensor]] = field(default_factory=list)

    def handles(self) -> list[OffloadedTensor]:
        return [handle for handle, _ in reversed(self.held)]


class Training:
    """Runs steps of a plan and checks every bound on the way."""

    def __init__(self, machine: Machine, seed: int = 0) -> None:
        self.machine = machine
        self.random = random.Random(seed)
        self.events_left: int | None = None
        lanes = {"lane 1": machine.d2h_seconds, "lane 2": machine.h2d_seconds}
        self.device = FakeDevice(lambda stream, num_bytes: lanes.get(stream, 0.5))
        copier = StreamCopier(self.device, own_streams=machine.own_streams)
        write, read = (lambda _: machine.write_seconds), (lambda _: machine.read_seconds)
        room = None if machine.disk_pages is None else machine.disk_pages * PAGE_BYTES
        disk = FakeDisk(self.device, write, read, budget_bytes=room)
        self.stores = [disk, FakeDisk(self.device, read, write, name="far")]
        behind = [Staging(store, machine.staging_pages * PAGE_BYTES) for store in self.stores]
        self.pool = HostPool(2 * PAGE_BYTES, budget_bytes=machine.host_pages * PAGE_BYTES)
        self.staging_pools = [staging.pool for staging in behind]
        self.engine = OffloadEngine(copier, self.pool, min_offload_elements=4, behind=behind)

    def step(self, plan: list[tuple[Mode, list[int]]], fails_at: int | None = None) -> None:
        """Run one step; raise after `fails_at` events of forward and backward together."""
        self.events_left = fails_at
        groups, prefetch_order = self.forward(plan)
        self.backward(groups, prefetch_order)

    def forward(self, plan: list[tuple[Mode, list[int]]]) -> tuple[list[Group], PrefetchOrder]:
        machine = self.machine
        # A tensor shared with the group before is as long as that one's last.
        handed = list(accumulate(plan, lambda long, group: (group[1] or [long])[-1], initial=8))
        away = [
            4 * (long + sum(sizes)) * (mode != "keep")
            for long, (mode, sizes) in zip(handed, plan, strict=False)
        ]
        asked = asked_within(away, machine.max_prefetch_bytes)
        prefetch_order = PrefetchOrder(
            self.engine,
            max_pending_d2h_bytes=machine.max_pending_d2h_bytes,
            lowest_prefetched=asked,
        )
        groups: list[Group] = []
        carried = self.device.tensor(torch.rand(8))
        self.largest_bytes, self.dropped = 0, False
        self.used: set[OffloadedStorage] = set()
        for mode, sizes in plan:
            group = Group()
            before_bytes = self._pending_bytes()
            # A layer's output is saved by itself and by the next one.
            self._save(group, mode, carried)
            for size in sizes:
                carried = self.device.tensor(torch.rand(size), self.seconds())
                self._save(group, mode, carried)
                self._event()
            activation_bytes = sum(4 * value.numel() for _, value in group.held)
            self.largest_bytes = max(self.largest_bytes, activation_bytes)
            assert self._pending_bytes() <= before_bytes + activation_bytes
            prefetch_order.record(group, len(groups))
            left_bytes = (
                self.largest_bytes
                if machine.max_pending_d2h_bytes is None
                else machine.max_pending_d2h_bytes
            )
            assert self._pending_bytes() <= left_bytes
            groups.append(group)
            self.device.advance(self.seconds())
        return groups, prefetch_order

    def backward(self, groups: list[Group], prefetch_order: PrefetchOrder) -> None:
        while groups:
            group = groups.pop()
            if self.random.random() < 0.05:
                self.dropped = True  # a part of the graph, without its backward
                continue
            prefetch_order.on_backward(group)
            self._check_ahead(groups, group)
            while group.held:
                handle, expected = group.held.pop()
                tensor = self.engine.wait_for(handle)
                self.device.kernel(reads=[tensor], seconds=self.seconds())
                assert torch.equal(tensor, expected)
                del tensor
                if self.random.random() < 0.2:
                    self.engine.evict(handle)
                self.engine.release(handle)
                self._event()
            self._check_budgets()
            self.device.advance(self.seconds())

    def seconds(self) -> float:
        return self.random.choice(SECONDS)

    def end(self) -> None:
        """Check that nothing is left of a step, whether it failed or not."""
        self.engine.assert_drained()
        for _ in range(3):
            self.device.finish()
            self.engine.limit_pending_d2h(0)
        stats = self.engine.stats()
        assert stats.host_used_bytes == stats.live_handles == 0
        assert not any(store.used_bytes for store in self.stores)
        self.device.look_for_freed()
        assert self.device.device_bytes == 0

    def _save(self, group: Group, mode: Mode, tensor: torch.Tensor) -> None:
        if mode == "keep":
            handle = OffloadedTensor.kept(tensor, None)
        else:
            handle = self.engine.start_offload(tensor, tier=mode)
        group.held.append((handle, tensor.clone()))
        self._check_budgets()

    def _event(self) -> None:
        if self.events_left is not None:
            self.events_left -= 1
            if self.events_left <= 0:
                raise _StepFails

    def _pending_bytes(self) -> int:
        live = self.engine._live
        return sum(stored.span.num_bytes for stored in live if not stored.d2h_ticket.ordered)

    def _check_budgets(self) -> None:
        assert self.pool.used_bytes <= self.pool.reserved_bytes
        assert self.pool.reserved_bytes <= self.machine.host_pages * PAGE_BYTES
        for pool in self.staging_pools:
            assert pool.reserved_bytes <= self.machine.staging_pages * PAGE_BYTES

    def _check_ahead(self, groups: list[Group], entered: Group) -> None:
        """Check that only the window's bytes were prefetched of groups that are not in use yet."""
        # Tensors shared by groups were planned twice.
        max_bytes = max(self.machine.max_prefetch_bytes or 0, self.largest_bytes)
        in_use = {handle.stored() for handle, _ in entered.held if handle.is_offloaded}
        assert all(stored.is_prefetched for stored in in_use)
        if self.dropped:
            return  # a tensor shared with a dropped group is in nobody's window
        held = {
            handle.stored() for group in groups for handle in group.handles() if handle.is_offloaded
        }
        # A tensor that was in use and is shared with an earlier group stays for that one's use.
        self.used |= in_use
        on_device = [stored for stored in held - self.used if stored.device_bytes is not None]
        assert sum(stored.span.num_bytes for stored in on_device) <= max_bytes


@examples(83, whole=250)
@given(machine=MACHINES, plan=FRAMES, seed=st.integers(0, 2**32))
def test_any_plan_is_ordered_exact_bounded_and_drained(
    machine: Machine, plan: list[tuple[Mode, list[int]]], seed: int
) -> None:
    training = Training(machine, seed)
    for _ in range(2):
        training.step(plan)
        training.end()
    moved = sum(4 * max(size, 8) for mode, sizes in plan for size in [8, *sizes])
    stats = training.engine.stats()
    assert stats.d2h_bytes <= 2 * 2 * moved
    assert stats.disk_write_bytes <= stats.d2h_bytes
    if not any(mode in ("disk", "far") for mode, _ in plan) and not stats.spilled_bytes:
        assert training.device.host_waits == 0, "without a disk the host never waits"
    training.engine.close()


@examples(50, whole=150)
@given(
    machine=MACHINES,
    plan=FRAMES,
    seed=st.integers(0, 2**32),
    fails_at=st.integers(1, 40),
    abandons=st.booleans(),
)
def test_a_step_that_fails_leaves_a_clean_engine(
    machine: Machine,
    plan: list[tuple[Mode, list[int]]],
    seed: int,
    fails_at: int,
    abandons: bool,
) -> None:
    training = Training(machine, seed)
    try:
        training.step(plan, fails_at)
    except _StepFails:
        if abandons:
            training.engine.abandon()
    # Values, order and what is left are asserted by each of these.
    training.end()
    training.step(plan)
    training.end()
    training.engine.close()
    assert training.engine.pool.used_bytes == 0


@examples(20, whole=60)
@given(machine=MACHINES, plans=st.tuples(FRAMES, FRAMES), seed=st.integers(0, 2**32))
def test_two_forwards_before_their_backwards(
    machine: Machine, plans: tuple[list[tuple[Mode, list[int]]], ...], seed: int
) -> None:
    training = Training(machine, seed)
    forwards = [training.forward(plan) for plan in plans]
    while forwards:
        groups, prefetch_order = forwards.pop()
        training.largest_bytes = 2**20  # of which forward is not known any more
        training.backward(groups, prefetch_order)
    training.end()
    training.engine.close()
    assert training.engine.pool.used_bytes == 0


def test_a_slow_disk_and_small_staging_only_cost_time() -> None:
    machine = Machine(write_seconds=50.0, read_seconds=50.0, host_pages=0, staging_pages=3)
    training = Training(machine)
    training.step([("disk", [MAX_FLOATS - 2, 500])] * 8)
    training.end()
    assert training.staging_pools[0].peak_bytes <= 3 * PAGE_BYTES
    assert training.device.host_waits > 0


def test_two_slow_tiers_with_small_staging_only_cost_time() -> None:
    """One takes what the other has no space for; see [Note: staging never deadlocks]."""
    machine = Machine(
        write_seconds=50.0, read_seconds=50.0, host_pages=0, staging_pages=3, disk_pages=9
    )
    training = Training(machine)
    training.step([("disk", [MAX_FLOATS - 2, 500]), ("far", [MAX_FLOATS - 2, 500])] * 4)
    assert training.engine.stats().spilled_bytes > 0
    training.end()
    for pool in training.staging_pools:
        assert 2 * PAGE_BYTES <= pool.peak_bytes <= 3 * PAGE_BYTES


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "staging regions are free as soon as compute stands behind their copies": lambda patch: (
        patch.setattr(StreamTicket, "done", lambda self: self.is_behind or self.event.query())
    ),
    "staging regions are free under their writes": lambda patch: patch.setattr(
        _ReclaimedRegion, "is_over", lambda self: True
    ),
    "reads count as over from the start": lambda patch: patch.setattr(
        "sppo_hf.offload.tiers.Staging._end_reads", _end_reads_at_once
    ),
}


def _end_reads_at_once(staging: Staging) -> None:
    while staging._reading:
        stored = staging._reading.popleft()
        if not stored.retired:
            stored.staged.read = None
            staging._loaded[stored] = None
            staging._start_h2d(stored)


def _some_steps() -> None:
    for seed in range(5):
        machine = Machine(write_seconds=3.0, read_seconds=3.0, host_pages=0, staging_pages=6)
        training = Training(machine, seed)
        for _ in range(3):
            training.step([("disk", [900, 1000])] * 8)
            training.end()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_fakes_detect_a_broken_disk_tier(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _some_steps()
    MUTANTS[mutant](monkeypatch)
    with pytest.raises(RaceError):
        _some_steps()
