"""Bytes in windows: pending copies, prefetches ahead of use, and evictions in between."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import OffloadError
from sppo_hf.offload.copy_streams import StreamCopier
from sppo_hf.offload.engine import OffloadEngine
from sppo_hf.offload.host_memory import HostPool
from sppo_hf.offload.layer_offload import PrefetchOrder
from sppo_hf.offload.storage import OffloadedTensor
from tests.fakes.device import FakeDevice
from tests.offload.orders import asked_within
from tests.sweeps import examples

SLAB_BYTES = 2**14
DURATIONS = st.sampled_from([0.0, 0.1, 1.0, 7.0, 50.0])
WINDOWS = st.one_of(st.none(), st.integers(0, 30_000))


class _Group:
    def __init__(self, *handles: OffloadedTensor) -> None:
        self.held = list(handles)

    def handles(self) -> list[OffloadedTensor]:
        return self.held


def _engine(device: FakeDevice) -> OffloadEngine:
    return OffloadEngine(StreamCopier(device), HostPool(SLAB_BYTES), min_offload_elements=1)


def _slow_device(seconds: float = 10.0) -> FakeDevice:
    return FakeDevice(lambda stream, num_bytes: seconds)


def _leaving_bytes(engine: OffloadEngine) -> int:
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
        assert _leaving_bytes(engine) <= window_bytes + 4 * size
        prefetch_order.record(groups[-1], len(groups) - 1)
        assert _leaving_bytes(engine) <= window_bytes
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
    assert _leaving_bytes(engine) == 800


def test_without_a_bound_only_the_last_layer_is_pending() -> None:
    engine = _engine(_slow_device())
    prefetch_order = PrefetchOrder(engine)
    held = [engine.start_offload(torch.rand(500)), engine.start_offload(torch.rand(100))]
    prefetch_order.record(_Group(*held))
    assert _leaving_bytes(engine) == 2400
    held.append(engine.start_offload(torch.rand(100)))
    prefetch_order.record(_Group(held[-1]))
    assert _leaving_bytes(engine) == 400


def test_closing_a_layer_puts_at_most_one_wait_on_compute() -> None:
    device = _slow_device()
    engine = _engine(device)
    prefetch_order, groups = PrefetchOrder(engine, max_pending_d2h_bytes=1000), []
    for _ in range(5):
        groups.append(_Group(*(engine.start_offload(torch.rand(100)) for _ in range(7))))
        before = device.compute.waits
        prefetch_order.record(groups[-1])
        assert device.compute.waits == before + 1
        assert _leaving_bytes(engine) == 800
    # Used in another order than they come back in: the first that is used is behind the others.
    last = groups.pop()
    prefetch_order.on_backward(last)
    before = device.compute.waits
    for handle in reversed(last.held):
        engine.wait_for(handle)
    assert device.compute.waits == before + 1


def test_dropping_under_copies_puts_one_wait_per_stream_on_compute() -> None:
    device = _slow_device()
    engine = _engine(device)
    handles = [engine.start_offload(torch.rand(100)) for _ in range(8)]
    engine.limit_pending_d2h(max_pending_d2h_bytes=0)
    for handle in handles:
        engine.prefetch(handle)
    handles += [engine.start_offload(torch.rand(100)) for _ in range(8)]
    engine.limit_pending_d2h()
    before = device.compute.waits
    handles.clear()
    engine.close()
    assert device.compute.waits == before + 2


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


def test_bytes_to_prefetch_count_aliases_once() -> None:
    device = _slow_device()
    engine = _engine(device)
    whole = device.tensor(torch.rand(20, 30))
    handles = [engine.start_offload(part) for part in (whole, *whole.split(10, dim=1))]
    handles.append(OffloadedTensor.kept(whole, None))
    assert engine.bytes_to_prefetch(handles) == 2400
    engine.prefetch(handles[1])
    assert engine.bytes_to_prefetch(handles) == 0
    engine.evict(handles[2])
    assert engine.bytes_to_prefetch(handles) == 2400
    engine.abandon()
    assert engine.bytes_to_prefetch(handles) == 0


def test_an_evicted_tensor_can_be_prefetched_repeatedly() -> None:
    device = _slow_device()
    engine = _engine(device)
    values = torch.rand(100)
    handle = engine.start_offload(device.tensor(values))
    engine.limit_pending_d2h(0)
    for _ in range(3):
        engine.prefetch(handle)
        tensor = engine.wait_for(handle)
        device.kernel(reads=[tensor], seconds=1.0)
        assert torch.equal(tensor, values)
        del tensor
        engine.evict(handle)
        engine.evict(handle)
        device.look_for_freed()
        assert device.device_bytes == 0
    assert engine.stats().d2h_bytes == 400
    assert engine.stats().h2d_bytes == 3 * 400
    assert device.now == 0.0, "the host waited for nothing"


def test_evicting_during_the_d2h_copy_lets_it_finish() -> None:
    device = _slow_device()
    engine = _engine(device)
    handle = engine.start_offload(device.tensor(torch.rand(100)))
    tensor = engine.wait_for(handle)  # the source itself
    engine.evict(handle)
    del tensor
    device.look_for_freed()
    assert device.device_bytes == 400, "its copy has not ended"
    device.finish()
    engine.stats()
    device.look_for_freed()
    assert device.device_bytes == 0
    engine.wait_for(handle)
    assert engine.stats().h2d_bytes == 400


def test_evicting_a_reused_source_after_its_copy() -> None:
    device = _slow_device()
    engine = _engine(device)
    handle = engine.start_offload(device.tensor(torch.rand(100)))
    engine.prefetch(handle)
    device.finish()
    engine.evict(handle)
    device.look_for_freed()
    assert device.device_bytes == 0
    assert engine.bytes_to_prefetch([handle]) == 400


def test_evict_ignores_kept_tensors_and_refuses_released_ones() -> None:
    engine = _engine(_slow_device())
    small = OffloadedTensor.kept(torch.rand(3), None)
    engine.evict(small)
    assert engine.wait_for(small).shape == (3,)
    handle = engine.start_offload(torch.rand(100))
    engine.release(handle)
    with pytest.raises(OffloadError, match="was released"):
        engine.evict(handle)
