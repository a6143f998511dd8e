"""The engine on the fake device: for any sizes, speeds and orders nothing races, leaks or grows.

Steps with a disk tier, failures and several forwards are in `test_plans`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.copy_streams import StreamCopier, StreamTicket
from sppo_hf.offload.engine import OffloadEngine, PendingCopies
from sppo_hf.offload.host_memory import HostPool
from sppo_hf.offload.layer_offload import PrefetchOrder
from sppo_hf.offload.storage import OffloadedStorage, OffloadedTensor
from sppo_hf.offload.tiers import Staging
from tests.fakes.device import FakeDevice, RaceError
from tests.fakes.disk import FakeDisk
from tests.offload.orders import asked_within
from tests.sweeps import examples

SLAB_BYTES = 2**14
DURATIONS = st.sampled_from([0.0, 0.1, 1.0, 7.0, 50.0])
WINDOWS = st.one_of(st.none(), st.integers(0, 30_000))


def _engine(
    device: FakeDevice, *, min_offload_elements: int = 1, budget_bytes: int | None = None
) -> OffloadEngine:
    pool = HostPool(SLAB_BYTES, budget_bytes=budget_bytes)
    return OffloadEngine(StreamCopier(device), pool, min_offload_elements=min_offload_elements)


def _slow_device(seconds: float = 10.0) -> FakeDevice:
    return FakeDevice(lambda stream, num_bytes: seconds)


class _Group:
    """Handles of one layer, held in place of autograd's graph; backward needs the last first."""

    def __init__(self, *handles: OffloadedTensor) -> None:
        self.held = list(handles)

    def handles(self) -> list[OffloadedTensor]:
        return self.held[::-1]


@examples(50, whole=100)
@given(
    sizes=st.lists(st.integers(8, 3000), min_size=3, max_size=12),
    lane_seconds=st.tuples(DURATIONS, DURATIONS),
    data=st.data(),
)
def test_the_device_never_holds_more_than_two_layers(
    sizes: list[int], lane_seconds: tuple[float, float], data: st.DataObject
) -> None:
    # Forward holds the layer in use and the pending one, backward the layer in use and the one
    # ahead. No clock is looked at: the host runs ahead of the device without limit.
    device = FakeDevice(lambda stream, num_bytes: lane_seconds[stream.endswith("2")])
    engine = _engine(device)
    prefetch_order, groups = PrefetchOrder(engine), []
    for size in sizes:
        tensor = device.tensor(torch.rand(size), data.draw(DURATIONS))
        groups.append(_Group(engine.start_offload(tensor)))
        del tensor
        prefetch_order.record(groups[-1], len(groups) - 1)
    for group in reversed(groups):
        prefetch_order.on_backward(group)
        tensor = engine.wait_for(group.held[0])
        device.kernel(reads=[tensor], seconds=data.draw(DURATIONS))
        del tensor
        group.held.clear()
    engine.close()
    device.look_for_freed()
    assert device.device_bytes == 0
    two_frames_bytes = 4 * max(one + two for one, two in pairwise(sizes))
    assert device.peak_device_bytes <= two_frames_bytes


def _pending_bytes(engine: OffloadEngine) -> int:
    return sum(stored.span.num_bytes for stored in engine._live if not stored.d2h_ticket.ordered)


@examples(50, whole=150)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    lane_seconds=st.tuples(DURATIONS, DURATIONS),
    max_pending_d2h_bytes=WINDOWS,
    max_prefetch_bytes=WINDOWS,
    data=st.data(),
)
def test_the_device_holds_the_layer_in_use_and_one_window(
    sizes: list[int],
    lane_seconds: tuple[float, float],
    max_pending_d2h_bytes: int | None,
    max_prefetch_bytes: int | None,
    data: st.DataObject,
) -> None:
    # Half of the runs never look at the clock: the host is ahead of the device without limit.
    device = FakeDevice(lambda stream, num_bytes: lane_seconds[stream.endswith("2")])
    engine = _engine(device)
    sizes_bytes = [4 * size for size in sizes]
    asked = asked_within(sizes_bytes, max_prefetch_bytes)
    prefetch_order, groups = (
        PrefetchOrder(engine, max_pending_d2h_bytes=max_pending_d2h_bytes, lowest_prefetched=asked),
        [],
    )
    largest_bytes = max(sizes_bytes)
    passes = data.draw(st.booleans())
    for size in sizes:
        tensor = device.tensor(torch.rand(size), data.draw(DURATIONS))
        groups.append(_Group(engine.start_offload(tensor)))
        del tensor
        window_bytes = largest_bytes if max_pending_d2h_bytes is None else max_pending_d2h_bytes
        assert _pending_bytes(engine) <= window_bytes + 4 * size
        prefetch_order.record(groups[-1], len(groups) - 1)
        assert _pending_bytes(engine) <= window_bytes
        device.advance(data.draw(DURATIONS) if passes else 0.0)
    if data.draw(st.booleans()):
        prefetch_order.start_backward(len(groups) - 1)
        assert groups[-1].held[0].stored().device_bytes is not None
        device.advance(data.draw(DURATIONS) if passes else 0.0)
    while groups:
        group = groups.pop()
        prefetch_order.on_backward(group)
        tensor = engine.wait_for(group.held[0])
        device.kernel(reads=[tensor], seconds=data.draw(DURATIONS))
        ahead = [one.held[0].stored() for one in groups]
        ahead_bytes = sum(one.span.num_bytes for one in ahead if one.device_bytes is not None)
        assert ahead_bytes <= max(max_prefetch_bytes or 0, largest_bytes)
        assert not groups or ahead[-1].device_bytes is not None, "the next group is on its way"
        del tensor, group, ahead
        device.advance(data.draw(DURATIONS) if passes else 0.0)
    engine.assert_drained()
    engine.close()
    device.look_for_freed()
    assert device.device_bytes == 0
    # The layer in use, what is prefetched ahead of it, and the copies that forward left pending.
    left_bytes = largest_bytes if max_pending_d2h_bytes is None else max_pending_d2h_bytes
    bound_bytes = largest_bytes + max(max_prefetch_bytes or 0, largest_bytes) + left_bytes
    assert device.peak_device_bytes <= bound_bytes


def test_pending_copies_are_bounded_for_all_prefetch_orders_together() -> None:
    engine = _engine(_slow_device())
    prefetch_orders = [PrefetchOrder(engine, max_pending_d2h_bytes=800) for _ in range(2)]
    held = []
    for _ in range(4):
        for prefetch_order in prefetch_orders:
            held.append(_Group(engine.start_offload(torch.rand(100))))
            prefetch_order.record(held[-1])
    assert _pending_bytes(engine) == 800


def test_without_a_bound_only_the_last_layer_is_pending() -> None:
    engine = _engine(_slow_device())
    prefetch_order = PrefetchOrder(engine)
    held = [engine.start_offload(torch.rand(500)), engine.start_offload(torch.rand(100))]
    prefetch_order.record(_Group(*held))
    assert _pending_bytes(engine) == 2400
    held.append(engine.start_offload(torch.rand(100)))
    prefetch_order.record(_Group(held[-1]))
    assert _pending_bytes(engine) == 400


def test_closing_a_layer_puts_at_most_one_wait_on_compute() -> None:
    device = _slow_device()
    engine = _engine(device)
    prefetch_order, groups = PrefetchOrder(engine, max_pending_d2h_bytes=1000), []
    for _ in range(5):
        groups.append(_Group(*(engine.start_offload(torch.rand(100)) for _ in range(7))))
        before = device.compute.waits
        prefetch_order.record(groups[-1])
        assert device.compute.waits == before + 1
        assert _pending_bytes(engine) == 800
    # Used in another order than they come back in: the first that is used is behind the others.
    last = groups.pop()
    prefetch_order.on_backward(last)
    before = device.compute.waits
    for handle in last.held:
        engine.wait_for(handle)
    assert device.compute.waits == before + 1


def test_layers_that_were_kept_are_skipped() -> None:
    engine = _engine(_slow_device())
    prefetch_order = PrefetchOrder(engine, max_pending_d2h_bytes=0, lowest_prefetched=[0, 0, 0, 0])
    groups = [
        _Group(engine.start_offload(torch.rand(100))),
        _Group(),
        _Group(OffloadedTensor.kept(torch.rand(100), None)),
        _Group(engine.start_offload(torch.rand(100))),
    ]
    for number, group in enumerate(groups):
        prefetch_order.record(group, number)
    prefetch_order.on_backward(groups[3])
    assert engine.stats().h2d_bytes == 800


class EngineUnderAnyUse(RuleBasedStateMachine):
    """Calls every public method in any order, within a budget; tensors must come back unchanged."""

    BUDGET_BYTES = 3 * SLAB_BYTES
    HAS_DISK = False

    def __init__(self) -> None:
        super().__init__()
        self.device = FakeDevice(lambda stream, num_bytes: num_bytes * 1e-3)
        self.engine = self.new_engine()
        self.sources: list[torch.Tensor] = []
        self.held: list[tuple[OffloadedTensor, torch.Tensor]] = []
        self.orphans: list[OffloadedTensor] = []

    def new_engine(self) -> OffloadEngine:
        return _engine(self.device, min_offload_elements=4, budget_bytes=self.BUDGET_BYTES)

    @rule(size=st.integers(4, 2500), seconds=DURATIONS)
    def compute(self, size: int, seconds: float) -> None:
        self.sources.append(self.device.tensor(torch.rand(size), seconds))

    @precondition(lambda self: self.sources)
    @rule(
        which=st.integers(0, 99),
        start=st.integers(0, 99),
        step=st.integers(1, 3),
        tier=st.sampled_from(["host", "disk", "far"]),
    )
    def offload(self, which: int, start: int, step: int, tier: str) -> None:
        source = self.sources[which % len(self.sources)]
        view = source[start % max(1, len(source) // 4) :: step]
        used_bytes = self.engine.pool.used_bytes
        try:
            tier = tier if self.HAS_DISK else "host"
            handle = self.engine.start_offload(view, tier=tier)
        except BudgetError:
            assert not self.HAS_DISK, "there is always room on the far tier"
            assert self.engine.pool.used_bytes <= used_bytes
            return
        self.held.append((handle, view.clone()))

    @precondition(lambda self: self.sources)
    @rule(which=st.integers(0, 99))
    def drop_source(self, which: int) -> None:
        del self.sources[which % len(self.sources)]

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def prefetch(self, which: int) -> None:
        self.engine.prefetch(self.held[which % len(self.held)][0])

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), seconds=DURATIONS)
    def use(self, which: int, seconds: float) -> None:
        handle, expected = self.held[which % len(self.held)]
        tensor = self.engine.wait_for(handle)
        self.device.kernel(reads=[tensor], seconds=seconds)
        assert torch.equal(tensor, expected)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def read_ahead(self, which: int) -> None:
        self.engine.read_ahead(self.held[which % len(self.held)][0])

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def evict(self, which: int) -> None:
        handle, _ = self.held[which % len(self.held)]
        self.engine.evict(handle)
        if handle.is_offloaded:
            assert self.engine.bytes_to_prefetch([handle, handle]) == handle.stored().span.num_bytes

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), by_dropping=st.booleans())
    def let_go(self, which: int, by_dropping: bool) -> None:
        handle, _ = self.held.pop(which % len(self.held))
        if not by_dropping:
            self.engine.release(handle)

    @rule()
    def limit_pending_d2h(self) -> None:
        self.engine.limit_pending_d2h()

    @rule(seconds=DURATIONS)
    def advance(self, seconds: float) -> None:
        self.device.advance(seconds)

    @rule()
    def fail(self) -> None:
        self.engine.abandon()
        self.orphans = [handle for handle, _ in self.held if handle.is_offloaded]
        self.held = [(handle, value) for handle, value in self.held if not handle.is_offloaded]

    @invariant()
    def within_budget(self) -> None:
        stats = self.engine.stats()
        assert stats.host_used_bytes <= stats.host_bytes <= self.BUDGET_BYTES

    @invariant()
    def abandoned_handles_raise(self) -> None:
        for handle in self.orphans:
            with pytest.raises(OffloadError, match="earlier step failed"):
                self.engine.wait_for(handle)

    def teardown(self) -> None:
        self.held.clear()
        self.sources.clear()
        self.engine.assert_drained()
        self.engine.close()
        self.device.look_for_freed()
        assert self.engine.stats().host_used_bytes == 0
        assert self.device.device_bytes == 0


class EngineWithDiskUnderAnyUse(EngineUnderAnyUse):
    """The same with a small disk and a far tier, behind staging memory of one slab each."""

    HAS_DISK = True

    def new_engine(self) -> OffloadEngine:
        speeds = (lambda size: size * 4e-3), (lambda size: size * 2e-3)
        self.stores = [
            FakeDisk(self.device, *speeds, budget_bytes=2 * SLAB_BYTES),
            FakeDisk(self.device, *speeds, name="far"),
        ]
        copier = StreamCopier(self.device)
        pool = HostPool(SLAB_BYTES, budget_bytes=self.BUDGET_BYTES - 2 * SLAB_BYTES)
        behind = [Staging(store, SLAB_BYTES) for store in self.stores]
        return OffloadEngine(copier, pool, min_offload_elements=4, behind=behind)

    @invariant()
    def extents_have_owners(self) -> None:
        live_bytes = sum(stored.span.num_bytes for stored in self.engine._live)
        assert sum(store.used_bytes for store in self.stores) <= live_bytes


TestEngineUnderAnyUse = EngineUnderAnyUse.TestCase
TestEngineWithDiskUnderAnyUse = EngineWithDiskUnderAnyUse.TestCase
TestEngineWithDiskUnderAnyUse.settings = settings(examples(75, whole=150), stateful_step_count=40)
TestEngineUnderAnyUse.settings = settings(examples(75, whole=150), stateful_step_count=40)


def _forward(device: FakeDevice, engine: OffloadEngine, *sizes: int) -> list[_Group]:
    """Layers of these sizes; each saves its input, which the layer before has saved, its output."""
    prefetch_order, groups = PrefetchOrder(engine), []
    carried = device.tensor(torch.rand(8))
    for size in sizes:
        before, carried = carried, device.tensor(torch.rand(size), 1.0)
        groups.append(_Group(engine.start_offload(before), engine.start_offload(carried)))
        prefetch_order.record(groups[-1], len(groups) - 1)
        device.advance(1.0)
    return groups


def _some_steps(device: FakeDevice) -> None:
    engine = _engine(device)
    for _ in range(2):
        for group in reversed(_forward(device, engine, 900, 50, 900)):
            for handle in group.handles():
                engine.prefetch(handle)
            while group.held:
                handle = group.held.pop()
                device.kernel(reads=[engine.wait_for(handle)], seconds=1.0)
                engine.release(handle)
            device.advance(1.0)
    evicted = _forward(device, engine, 900)[0].held[-1]
    device.finish()
    engine.prefetch(evicted)
    engine.evict(evicted)  # its copy back is under way, and nobody waited for it
    dropped = _forward(device, engine, 900, 900)
    for group in dropped:
        for handle in group.handles():
            engine.prefetch(handle)
        group.held.clear()
    _forward(device, engine, 900)


def _forget_source(pending: PendingCopies, max_bytes: int | None) -> None:
    for _, stored in pending._queue:
        stored.source = stored.watched = None


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a source is freed without waiting for its copy": lambda patch: patch.setattr(
        PendingCopies, "close_group", _forget_source
    ),
    "a copy counts as ordered from the start": lambda patch: patch.setattr(
        StreamTicket, "ordered", property(lambda self: True)
    ),
    "compute does not wait for the copy back": lambda patch: patch.setattr(
        StreamTicket, "wait", lambda self: None
    ),
    "device bytes are evicted under the copy into them": lambda patch: patch.setattr(
        OffloadedStorage, "evict", lambda self: setattr(self, "device_bytes", None)
    ),
    "regions and device bytes are given back under their copies": lambda patch: patch.setattr(
        OffloadedStorage, "ordered", property(lambda self: True)
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_fake_device_detects_a_broken_engine(
    mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _some_steps(_slow_device())
    MUTANTS[mutant](monkeypatch)
    with pytest.raises(RaceError):
        _some_steps(_slow_device())
