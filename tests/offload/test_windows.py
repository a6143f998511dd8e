"""Bytes in windows: what leaves, what comes back ahead of use, and what is evicted in between."""

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


class _Frame:
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
def test_the_device_holds_the_frame_in_work_and_one_window(
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
    prefetch_order, frames = (
        PrefetchOrder(engine, max_pending_d2h_bytes=max_pending_d2h_bytes, lowest_prefetched=asked),
        [],
    )
    largest_bytes = max(sizes_bytes)
    passes = data.draw(st.booleans())
    for size in sizes:
        tensor = device.tensor(torch.rand(size), data.draw(DURATIONS))
        frames.append(_Frame(engine.start_offload(tensor)))
        del tensor
        window_bytes = largest_bytes if max_pending_d2h_bytes is None else max_pending_d2h_bytes
        assert _leaving_bytes(engine) <= window_bytes + 4 * size
        prefetch_order.record(frames[-1], len(frames) - 1)
        assert _leaving_bytes(engine) <= window_bytes
        device.advance(data.draw(DURATIONS) if passes else 0.0)
    if data.draw(st.booleans()):
        prefetch_order.start_backward(len(frames) - 1)
        assert frames[-1].held[0].stored().device_bytes is not None
        device.advance(data.draw(DURATIONS) if passes else 0.0)
    while frames:
        frame = frames.pop()
        prefetch_order.on_backward(frame)
        tensor = engine.wait_for(frame.held[0])
        device.kernel(reads=[tensor], seconds=data.draw(DURATIONS))
        ahead = [one.held[0].stored() for one in frames]
        ahead_bytes = sum(one.span.num_bytes for one in ahead if one.device_bytes is not None)
        assert ahead_bytes <= max(max_prefetch_bytes or 0, largest_bytes)
        assert not frames or ahead[-1].device_bytes is not None, "the next frame is on its way"
        del tensor, frame, ahead
        device.advance(data.draw(DURATIONS) if passes else 0.0)
    engine.assert_drained()
    engine.close()
    device.look_for_freed()
    assert device.device_bytes == 0
    # The frame in work, what is ahead of it, and what forward left on its way out.
    left_bytes = largest_bytes if max_pending_d2h_bytes is None else max_pending_d2h_bytes
    bound_bytes = largest_bytes + max(max_prefetch_bytes or 0, largest_bytes) + left_bytes
    assert device.peak_device_bytes <= bound_bytes


def test_what_leaves_is_bounded_for_all_tapes_together() -> None:
    engine = _engine(_slow_device())
    prefetch_orders = [PrefetchOrder(engine, max_pending_d2h_bytes=800) for _ in range(2)]
    held = []
    for _ in range(4):
        for prefetch_order in prefetch_orders:
            held.append(_Frame(engine.start_offload(torch.rand(100))))
            prefetch_order.record(held[-1])
    assert _leaving_bytes(engine) == 800


def test_without_a_window_one_frame_leaves_whatever_left_before_it() -> None:
    engine = _engine(_slow_device())
    prefetch_order = PrefetchOrder(engine)
    held = [engine.start_offload(torch.rand(500)), engine.start_offload(torch.rand(100))]
    prefetch_order.record(_Frame(*held))
    assert _leaving_bytes(engine) == 2400
    held.append(engine.start_offload(torch.rand(100)))
    prefetch_order.record(_Frame(held[-1]))
    assert _leaving_bytes(engine) == 400


def test_a_frame_that_closes_puts_one_wait_at_most_on_compute() -> None:
    device = _slow_device()
    engine = _engine(device)
    prefetch_order, frames = PrefetchOrder(engine, max_pending_d2h_bytes=1000), []
    for _ in range(5):
        frames.append(_Frame(*(engine.start_offload(torch.rand(100)) for _ in range(7))))
        before = device.compute.waits
        prefetch_order.record(frames[-1])
        assert device.compute.waits == before + 1
        assert _leaving_bytes(engine) == 800
    # Used in another order than they come back in: the first that is used is behind the others.
    last = frames.pop()
    prefetch_order.on_backward(last)
    before = device.compute.waits
    for handle in reversed(last.held):
        engine.wait_for(handle)
    assert device.compute.waits == before + 1


def test_what_was_dropped_under_copies_puts_one_wait_for_each_lane_on_compute() -> None:
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


def test_frames_that_were_kept_are_passed_over() -> None:
    engine = _engine(_slow_device())
    prefetch_order = PrefetchOrder(engine, max_pending_d2h_bytes=0, lowest_prefetched=[0, 0, 0, 0])
    frames = [
        _Frame(engine.start_offload(torch.rand(100))),
        _Frame(),
        _Frame(OffloadedTensor.kept(torch.rand(100), None)),
        _Frame(engine.start_offload(torch.rand(100))),
    ]
    for number, frame in enumerate(frames):
        prefetch_order.record(frame, number)
    prefetch_order.on_backward(frames[3])
    assert engine.stats().h2d_bytes == 800


def test_bytes_to_fetch_count_aliases_once_and_nothing_twice() -> None:
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


def test_an_evicted_tensor_comes_back_as_often_as_it_is_wanted() -> None:
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


def test_evicting_before_the_source_has_left_lets_it_leave() -> None:
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


def test_evicting_the_source_that_served_after_it_had_left() -> None:
    device = _slow_device()
    engine = _engine(device)
    handle = engine.start_offload(device.tensor(torch.rand(100)))
    engine.prefetch(handle)
    device.finish()
    engine.evict(handle)
    device.look_for_freed()
    assert device.device_bytes == 0
    assert engine.bytes_to_prefetch([handle]) == 400


def test_evict_does_nothing_for_what_stayed_and_refuses_what_is_gone() -> None:
    engine = _engine(_slow_device())
    small = OffloadedTensor.kept(torch.rand(3), None)
    engine.evict(small)
    assert engine.wait_for(small).shape == (3,)
    handle = engine.start_offload(torch.rand(100))
    engine.release(handle)
    with pytest.raises(OffloadError, match="was released"):
        engine.evict(handle)
