"""The offload engine on the CPU: round trips, handles, budgets, how it is made, its stats."""

from __future__ import annotations

import errno
import gc
import re
import threading
import time
import weakref
from dataclasses import astuple, fields
from pathlib import Path

import pytest
import torch

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.copy_streams import HostCopier, StreamCopier
from sppo_hf.offload.engine import OffloadEngine, OffloadStats, make_engine
from sppo_hf.offload.host_memory import ALIGNMENT_BYTES, PAGE_BYTES, HostPool
from sppo_hf.offload.storage import OffloadedTensor
from tests.fakes.device import FakeDevice
from tests.offload.disk_store import DiskStore
from tests.offload.faulty_disk import FaultyDisk
from tests.offload.small_stack import TOKENS, WIDTH, assert_same, loss_of, make_blocks

SLAB_BYTES = 2**14


def _engine(
    device: FakeDevice, *, own_streams: bool = True, budget_bytes: int | None = None
) -> OffloadEngine:
    pool = HostPool(SLAB_BYTES, budget_bytes=budget_bytes)
    copier = StreamCopier(device, own_streams=own_streams)
    return OffloadEngine(copier, pool, min_offload_elements=4)


def _slow_device(seconds: float = 10.0) -> FakeDevice:
    return FakeDevice(lambda stream, num_bytes: seconds)


def test_the_source_is_reused_until_its_copy_has_ended() -> None:
    device = _slow_device()
    engine = _engine(device)
    source = device.tensor(torch.rand(100))
    handle = engine.start_offload(source)
    assert engine.wait_for(handle).data_ptr() == source.data_ptr()
    assert engine.stats().h2d_bytes == 0


def test_views_of_a_storage_are_copied_once_and_the_last_handle_frees_it() -> None:
    device = _slow_device()
    engine = _engine(device)
    fused = device.tensor(torch.rand(20, 30))
    parts = fused.split(10, dim=1)
    handles = [engine.start_offload(part) for part in parts]
    handles.append(engine.start_offload(fused.t()))
    assert engine.stats().d2h_bytes == 20 * 30 * 4
    assert engine.stats().live_handles == 1
    expected = [part.clone() for part in parts]
    del fused, parts
    device.finish()
    for handle, values in zip(handles, expected, strict=False):
        assert torch.equal(engine.wait_for(handle), values)
    assert engine.stats().h2d_bytes == 20 * 30 * 4
    for handle in handles[:-1]:
        engine.release(handle)
    assert engine.pool.used_bytes > 0
    engine.release(handles[-1])
    device.finish()
    engine.assert_drained()
    assert engine.pool.used_bytes == 0


def test_a_storage_at_a_reused_address_is_another_storage() -> None:
    engine = OffloadEngine(HostCopier(), HostPool(SLAB_BYTES), min_offload_elements=1)
    handles = []
    addresses = set()
    for value in range(1000):  # the C library reuses few addresses of aligned blocks, but some
        tensor = torch.full((100,), float(value))
        addresses.add(tensor.data_ptr())
        handles.append(engine.start_offload(tensor))
        del tensor
    assert len(addresses) < 1000, "the test needs reuse to mean anything"
    for value, handle in enumerate(handles):
        assert bool((engine.wait_for(handle) == value).all())


def test_a_new_version_of_a_storage_is_copied_again() -> None:
    device = _slow_device(0.0)
    engine = _engine(device)
    tensor = device.tensor(torch.zeros(100))
    first = engine.start_offload(tensor)
    device.advance(1.0)
    engine.stats()  # looks at the clock: the copy is over
    tensor.add_(1.0)
    second = engine.start_offload(tensor)
    assert bool((engine.wait_for(first) == 0.0).all())
    assert bool((engine.wait_for(second) == 1.0).all())


@pytest.mark.parametrize("prefetched", [False, True])
def test_a_source_modified_during_its_copy_is_refused(prefetched: bool) -> None:
    device = _slow_device()
    engine = _engine(device)
    tensor = device.tensor(torch.zeros(100))
    handle = engine.start_offload(tensor, label="layer 3, chunk 1")
    if prefetched:
        engine.prefetch(handle)
        device.finish()
        engine.stats()
    tensor.add_(1.0)
    device.finish()
    with pytest.raises(OffloadError, match=r"layer 3, chunk 1.*modified in place"):
        engine.wait_for(handle)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0, 7),
        torch.rand(3),
        torch.rand(100, device="meta"),
        torch.eye(20).to_sparse(),
        torch.view_as_complex(torch.rand(50, 2)).conj(),
    ],
    ids=["no elements", "small", "another device", "sparse", "conjugate view"],
)
def test_a_tensor_that_cannot_be_offloaded_is_kept_in_the_handle(tensor: torch.Tensor) -> None:
    engine = _engine(_slow_device())
    handle = engine.start_offload(tensor)
    assert not handle.is_offloaded
    engine.prefetch(handle)
    back = engine.wait_for(handle)
    assert back.shape == tensor.shape
    assert back.layout == tensor.layout
    assert back.device == tensor.device
    engine.release(handle)
    with pytest.raises(AssertionError, match="released twice"):
        engine.release(handle)


def test_a_released_handle_is_refused_with_the_reason() -> None:
    engine = _engine(_slow_device())
    handle = engine.start_offload(torch.rand(100))
    engine.release(handle)
    with pytest.raises(OffloadError, match="retain_graph"):
        engine.wait_for(handle)
    with pytest.raises(AssertionError, match="released twice"):
        engine.release(handle)


def test_leaked_bytes_are_reported() -> None:
    engine = _engine(_slow_device())
    handle = engine.start_offload(torch.rand(100))
    with pytest.raises(OffloadError, match=r"1 offloaded storages \(400 bytes\)"):
        engine.assert_drained()
    engine.release(handle)
    engine.assert_drained()


def test_a_handle_in_a_reference_cycle_is_no_leak() -> None:
    engine = _engine(_slow_device())
    cycle: list[object] = [engine.start_offload(torch.rand(100))]
    cycle.append(cycle)
    del cycle
    engine.assert_drained()


def test_the_pool_does_not_grow_for_dropped_storages() -> None:
    device = _slow_device()
    engine = _engine(device, budget_bytes=SLAB_BYTES)
    for _ in range(20):
        # Dropped without use while its copy is under way; the next one needs the same bytes.
        engine.start_offload(device.tensor(torch.rand(SLAB_BYTES // 4)))
    assert engine.pool.reserved_bytes == SLAB_BYTES


def test_an_exhausted_budget_leaves_the_engine_usable() -> None:
    engine = _engine(_slow_device(), budget_bytes=2 * ALIGNMENT_BYTES)
    handle = engine.start_offload(torch.rand(ALIGNMENT_BYTES // 4))
    with pytest.raises(BudgetError, match="host tier"):
        engine.start_offload(torch.rand(ALIGNMENT_BYTES))
    engine.release(handle)
    engine.start_offload(torch.rand(ALIGNMENT_BYTES // 4))


def test_a_tier_that_the_engine_lacks_is_refused_with_those_that_it_has() -> None:
    engine = _engine(_slow_device())
    with pytest.raises(OffloadError, match=r"has host alone.*offload_tier"):
        engine.start_offload(torch.rand(64), tier="disk")


def test_a_failing_copy_frees_its_region(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(_slow_device())
    with monkeypatch.context() as patch:
        patch.setattr(FakeDevice, "copy_bytes", lambda *_: (_ for _ in ()).throw(RuntimeError()))
        with pytest.raises(RuntimeError):
            engine.start_offload(torch.rand(100))
    assert engine.pool.used_bytes == 0
    engine.assert_drained()


def test_closing_frees_everything_without_time_passing() -> None:
    device = _slow_device()
    engine = _engine(device)
    handles = [engine.start_offload(device.tensor(torch.rand(100))) for _ in range(3)]
    assert engine.stats().live_handles == 3
    engine.close()
    assert engine.pool.used_bytes == 0
    device.look_for_freed()
    assert device.device_bytes == 0
    del handles  # only now: those who hold them keep nothing alive


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


def test_taken_stats_count_since_the_last_call() -> None:
    device = _slow_device(2.0)
    engine = _engine(device)
    for expected in (400, 800):
        handles = [engine.start_offload(device.tensor(torch.rand(expected // 4)))]
        device.finish()
        engine.wait_for(handles[0])
        device.finish()
        stats = engine.take_stats()
        assert (stats.d2h_bytes, stats.h2d_bytes) == (expected, expected)
        assert stats.stall_seconds == pytest.approx(2.0)
        assert stats.pinned_bytes == 0
        assert stats.host_bytes == SLAB_BYTES
        assert stats.host_peak_bytes >= stats.host_used_bytes >= expected
        assert stats.grown_bytes == (SLAB_BYTES if expected == 400 else 0)
        assert stats.live_handles == 1
        handles.clear()
    assert engine.stats().d2h_bytes == 1200


def test_threads_share_an_engine() -> None:
    engine = OffloadEngine(HostCopier(), HostPool(SLAB_BYTES), min_offload_elements=1)
    wrong: list[int] = []

    def work(value: int) -> None:
        for size in range(1, 150):
            handle = engine.start_offload(torch.full((size,), float(value)))
            if not bool((engine.wait_for(handle) == value).all()):
                wrong.append(value)
            if size % 2:
                engine.release(handle)
            if size % 25 == 0:
                gc.collect(0)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    engine.assert_drained()
    assert engine.pool.used_bytes == 0


def test_engines_are_made_for_cpu_and_cuda_only() -> None:
    engine = make_engine(torch.device("cpu"), use_pin_memory=True)
    assert not engine.pool.pinned
    assert engine.device == torch.device("cpu")
    with pytest.raises(OffloadError, match="meta"):
        make_engine(torch.device("meta"))


PAGE_FLOATS = PAGE_BYTES // 4


def test_reserving_makes_the_slabs_once() -> None:
    engine = make_engine(torch.device("cpu"), slab_bytes=PAGE_BYTES, budget_bytes=64 * PAGE_BYTES)
    engine.reserve(48 * PAGE_BYTES)
    handles = [engine.start_offload(torch.rand(PAGE_FLOATS)) for _ in range(48)]
    assert engine.stats().grown_bytes == 0
    assert engine.stats().host_bytes == 48 * PAGE_BYTES
    handles.append(engine.start_offload(torch.rand(PAGE_FLOATS)))
    assert engine.stats().grown_bytes == PAGE_BYTES
    assert engine.stats().host_peak_bytes == 49 * PAGE_BYTES
    del handles[::2]
    assert engine.stats().fragmentation > 0.9
    engine.close()


def test_staging_is_part_of_the_budget(tmp_path: Path) -> None:
    engine = make_engine(
        torch.device("cpu"), budget_bytes=64 * PAGE_BYTES, stores=[DiskStore(tmp_path)]
    )
    engine.reserve(2**40)
    assert engine.stats().host_bytes == 64 * PAGE_BYTES
    assert engine.pool.reserved_bytes == 48 * PAGE_BYTES
    engine.close()


@pytest.mark.parametrize("checksum", [False, True])
def test_round_trip_through_a_real_disk(tmp_path: Path, checksum: bool) -> None:
    disk = DiskStore(tmp_path, slab_bytes=2**20, checksum=checksum)
    engine = make_engine(
        torch.device("cpu"), budget_bytes=2**18, stores=[disk], staging_bytes=2**17
    )
    for _ in range(3):
        held = []
        for number in range(40):  # 2 MB through 128 KB
            values = torch.rand(5000 + 500 * number)
            tier = "disk" if number % 3 else "host"
            held.append((engine.start_offload(values.clone(), tier=tier), values))
        for handle, values in reversed(held):
            engine.prefetch(handle)
            assert torch.equal(engine.wait_for(handle), values)
            engine.release(handle)
        held.clear()
        del handle
        engine.assert_drained()
    stats = engine.stats()
    assert stats.host_peak_bytes <= stats.host_bytes <= 2**18
    assert stats.disk_read_bytes > 0
    assert stats.spilled_bytes > 0
    assert disk.space.reserved_bytes > 0
    engine.close()
    assert disk.space.reserved_bytes == 0


def test_gradients_through_a_real_disk_are_bitwise_equal(tmp_path: Path) -> None:
    blocks, hidden_CD = make_blocks(6), torch.rand(TOKENS, WIDTH)
    engine = make_engine(
        torch.device("cpu"),
        min_offload_elements=8,
        budget_bytes=2**15,
        staging_bytes=2**14,
        stores=[DiskStore(tmp_path, slab_bytes=2**20)],
    )

    def gradients(with_engine: OffloadEngine | None) -> list[torch.Tensor]:
        blocks.zero_grad()
        loss_of(blocks, hidden_CD, with_engine, tiers=("disk", "host", "disk")).backward()
        return [parameter.grad for parameter in blocks.parameters()]

    for _ in range(3):
        assert_same(gradients(engine), gradients(None))
        engine.assert_drained()
    stats = engine.stats()
    assert 0 < stats.disk_read_bytes <= stats.disk_write_bytes
    assert stats.host_peak_bytes <= 2**15
    loss = loss_of(blocks, hidden_CD, engine, tiers=("disk",))
    del loss  # dropped without backward
    engine.assert_drained()
    engine.close()


@pytest.mark.parametrize("fails", ["writing", "reading", "room"])
def test_a_step_that_the_disk_failed_says_where_and_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """An error whose traceback held the step's frames would keep the graph alive."""
    faults, place = FaultyDisk(monkeypatch), re.escape(str(tmp_path))
    said = rf"more are needed .*{place}" if fails == "room" else rf"{fails} .*{place}.*EIO"

    def fail() -> weakref.ref[OffloadEngine]:
        room = 0 if fails == "room" else None
        disk = DiskStore(tmp_path, slab_bytes=2**20, budget_bytes=room)
        engine = make_engine(
            torch.device("cpu"), min_offload_elements=8, budget_bytes=2**15, stores=[disk]
        )

        def step() -> None:
            loss = loss_of(make_blocks(6), torch.rand(TOKENS, WIDTH), engine, tiers=("disk",))
            while disk.transfers.queued_bytes:
                time.sleep(0.001)
            if fails == "reading":
                faults.errors.append(OSError(errno.EIO, "as injected"))
            loss.backward()

        if fails == "writing":
            faults.errors.append(OSError(errno.EIO, "as injected"))
        with pytest.raises((OffloadError, BudgetError), match=said):
            step()
        engine.abandon()
        return weakref.ref(engine)

    failed = fail()
    torch.zeros((), requires_grad=True).backward()  # what autograd had queued for this thread
    gc.collect()
    assert failed() is None


AS_NOW = {
    "pinned_bytes",
    "host_bytes",
    "host_used_bytes",
    "live_handles",
    "host_peak_bytes",
    "fragmentation",
}


def test_counters_are_subtracted_and_state_is_not() -> None:
    names = [field.name for field in fields(OffloadStats)]
    before = OffloadStats(**{name: number for number, name in enumerate(names)})
    now = OffloadStats(**{name: 100 + 3 * number for number, name in enumerate(names)})
    since = now.since(before)
    for number, name in enumerate(names):
        expected = 100 + 3 * number if name in AS_NOW else 100 + 2 * number
        assert getattr(since, name) == expected, name
    assert (since + before) == now
    assert not any(astuple(OffloadStats())), "nothing has moved yet"
