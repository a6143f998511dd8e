"""The engine on the fake device: whatever the sizes, speeds and orders, nothing races or leaks."""

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
from tests.sweeps import examples

SLAB_BYTES = 2**14
DURATIONS = st.sampled_from([0.0, 0.1, 1.0, 7.0, 50.0])


def _engine(
    device: FakeDevice, *, own_streams: bool = True, budget_bytes: int | None = None
) -> OffloadEngine:
    pool = HostPool(SLAB_BYTES, budget_bytes=budget_bytes)
    copier = StreamCopier(device, own_streams=own_streams)
    return OffloadEngine(copier, pool, min_offload_elements=4)


def _slow_device(seconds: float = 10.0) -> FakeDevice:
    return FakeDevice(lambda stream, num_bytes: seconds)


class _Group:
    """A group of handles like that of a recomputed layer, held by what stands for the graph."""

    def __init__(
        self, engine: OffloadEngine, prefetch_order: PrefetchOrder, handles: list[OffloadedTensor]
    ) -> None:
        self.engine = engine
        self.prefetch_order = prefetch_order
        self.held = handles

    def handles(self) -> list[OffloadedTensor]:
        return self.held[::-1]


class _Training:
    """Steps of forward and backward over layers of given sizes, as the host would enqueue them."""

    def __init__(self, device: FakeDevice, engine: OffloadEngine) -> None:
        self.device = device
        self.engine = engine
        self.values: dict[int, torch.Tensor] = {}

    def forward(self, sizes: list[list[int]], compute_seconds: Callable[[], float]) -> list[_Group]:
        prefetch_order, groups = PrefetchOrder(self.engine), []
        carried = self.device.tensor(torch.rand(8))
        for activation_sizes in sizes:
            # A layer's output is saved by itself and by the next one.
            handles = [self._save(carried)]
            for size in activation_sizes:
                carried = self.device.tensor(torch.rand(size), compute_seconds())
                handles.append(self._save(carried))
            groups.append(_Group(self.engine, prefetch_order, handles))
            prefetch_order.record(groups[-1], len(groups) - 1)
            self.device.advance(compute_seconds())
        return groups

    def backward(
        self,
        groups: list[_Group],
        compute_seconds: Callable[[], float],
        keep: Callable[[], bool] = lambda: True,
    ) -> None:
        for group in reversed(groups):
            if not keep():
                group.held.clear()  # this part of the graph was dropped
                continue
            group.prefetch_order.on_backward(group)
            while group.held:
                handle = group.held.pop()
                tensor = self.engine.wait_for(handle)
                self.device.kernel(reads=[tensor], seconds=compute_seconds())
                assert torch.equal(tensor, self.values.pop(id(handle)))
                del tensor
                self.engine.release(handle)
            self.device.advance(compute_seconds())

    def _save(self, tensor: torch.Tensor) -> OffloadedTensor:
        handle = self.engine.start_offload(tensor)
        self.values[id(handle)] = tensor.clone()
        return handle


@examples(150, whole=300)
@given(
    sizes=st.lists(st.lists(st.integers(1, 3000), max_size=4), min_size=1, max_size=6),
    lane_seconds=st.tuples(DURATIONS, DURATIONS),
    own_streams=st.booleans(),
    data=st.data(),
)
def test_any_training_is_ordered_exact_and_drained(
    sizes: list[list[int]],
    lane_seconds: tuple[float, float],
    own_streams: bool,
    data: st.DataObject,
) -> None:
    device = FakeDevice(lambda stream, num_bytes: lane_seconds[stream.endswith("2")])
    engine = _engine(device, own_streams=own_streams)
    training = _Training(device, engine)
    seconds = lambda: data.draw(DURATIONS)  # noqa: E731
    for _ in range(3):
        groups = training.forward(sizes, seconds)
        training.backward(groups, seconds, keep=lambda: data.draw(st.integers(0, 5)) > 0)
        training.values.clear()
        engine.assert_drained()
    device.finish()
    stats = engine.stats()
    assert stats.host_used_bytes == stats.live_handles == 0
    device.look_for_freed()
    assert device.device_bytes == 0
    assert stats.h2d_bytes <= stats.d2h_bytes


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
        groups.append(_Group(engine, prefetch_order, [engine.start_offload(tensor)]))
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


class EngineUnderAnyUse(RuleBasedStateMachine):
    """Every public verb in any order, with a budget, against what was put in."""

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
        return _engine(self.device, budget_bytes=self.BUDGET_BYTES)

    @rule(size=st.integers(4, 2500), seconds=DURATIONS)
    def compute(self, size: int, seconds: float) -> None:
        self.sources.append(self.device.tensor(torch.rand(size), seconds))

    @precondition(lambda self: self.sources)
    @rule(
        which=st.integers(0, 99),
        start=st.integers(0, 99),
        step=st.integers(1, 3),
        to_disk=st.booleans(),
    )
    def offload(self, which: int, start: int, step: int, to_disk: bool) -> None:
        source = self.sources[which % len(self.sources)]
        view = source[start % max(1, len(source) // 4) :: step]
        used_bytes = self.engine.pool.used_bytes
        try:
            tier = "disk" if to_disk and self.HAS_DISK else "host"
            handle = self.engine.start_offload(view, tier=tier)
        except BudgetError:
            assert not self.HAS_DISK, "there is always room on the disk"
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
    """The same with staging memory of one slab, and a disk behind it."""

    HAS_DISK = True

    def new_engine(self) -> OffloadEngine:
        self.disk = FakeDisk(self.device, lambda size: size * 4e-3, lambda size: size * 2e-3)
        copier = StreamCopier(self.device)
        pool = HostPool(SLAB_BYTES, budget_bytes=self.BUDGET_BYTES - SLAB_BYTES)
        staging = Staging(self.disk, SLAB_BYTES)
        return OffloadEngine(copier, pool, min_offload_elements=4, staging=staging)

    @invariant()
    def extents_have_owners(self) -> None:
        live_bytes = sum(stored.span.num_bytes for stored in self.engine._live)
        assert self.disk.used_bytes <= live_bytes


TestEngineUnderAnyUse = EngineUnderAnyUse.TestCase
TestEngineWithDiskUnderAnyUse = EngineWithDiskUnderAnyUse.TestCase
TestEngineWithDiskUnderAnyUse.settings = settings(examples(75, whole=150), stateful_step_count=40)
TestEngineUnderAnyUse.settings = settings(examples(75, whole=150), stateful_step_count=40)


def _one_training(device: FakeDevice) -> None:
    engine = _engine(device)
    training = _Training(device, engine)
    for _ in range(2):
        groups = training.forward([[900], [900, 50], [900]], lambda: 1.0)
        training.backward(groups, lambda: 1.0)
    evicted = training.forward([[900]], lambda: 1.0)[0].held[-1]
    device.finish()
    engine.prefetch(evicted)
    engine.evict(evicted)  # its copy back is under way, and nobody waited for it
    dropped = training.forward([[900], [900]], lambda: 1.0)
    for group in dropped:
        for handle in group.handles():
            engine.prefetch(handle)
        group.held.clear()
    training.forward([[900]], lambda: 1.0)
    del dropped


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
    _one_training(_slow_device())
    MUTANTS[mutant](monkeypatch)
    with pytest.raises(RaceError):
        _one_training(_slow_device())
