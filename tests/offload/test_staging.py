"""The engine with a disk tier: what goes there, when the host waits, what is raised."""

from __future__ import annotations

import pytest
import torch

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.copy_streams import StreamCopier
from sppo_hf.offload.engine import OffloadEngine, make_engine
from sppo_hf.offload.host_memory import PAGE_BYTES, HostPool
from sppo_hf.offload.layer_offload import PrefetchOrder
from sppo_hf.offload.storage import OffloadedTensor
from sppo_hf.offload.tiers import Staging
from tests.fakes.device import FakeDevice, RaceError
from tests.fakes.disk import FakeDisk

PAGE_FLOATS = PAGE_BYTES // 4


class _Group:
    def __init__(self, handle: OffloadedTensor) -> None:
        self.handle = handle

    def handles(self) -> tuple[OffloadedTensor, ...]:
        return (self.handle,)


class _Bench:
    """An engine, its fake device and its fake disk; the copies take one second each."""

    def __init__(
        self, staging_pages: int = 4, host_pages: int | None = 0, disk_seconds: float = 5.0
    ) -> None:
        self.device = FakeDevice(lambda stream, num_bytes: 1.0)
        copier = StreamCopier(self.device)
        seconds = lambda num_bytes: disk_seconds  # noqa: E731
        self.disk = FakeDisk(self.device, seconds, seconds)
        self.staging = Staging(self.disk, staging_pages * PAGE_BYTES, clock=lambda: self.device.now)
        budget_bytes = None if host_pages is None else host_pages * PAGE_BYTES
        pool = HostPool(PAGE_BYTES, budget_bytes=budget_bytes)
        self.engine = OffloadEngine(copier, pool, min_offload_elements=4, behind=[self.staging])

    def tensor(self, pages: int = 1) -> torch.Tensor:
        return self.device.tensor(torch.rand(pages * PAGE_FLOATS))

    def send(self, pages: int = 1) -> OffloadedTensor:
        return self.engine.start_offload(self.tensor(pages), tier="disk")

    def settle(self) -> None:
        """Run until all transfers and copies under way have ended."""
        for _ in range(4):
            self.device.finish()
            self.engine.limit_pending_d2h(0)


def test_bytes_pass_through_staging_to_disk_and_back() -> None:
    bench = _Bench()
    tensor = bench.tensor()
    values = tensor.clone()
    handle = bench.engine.start_offload(tensor, tier="disk")
    del tensor
    assert bench.engine.stats().host_used_bytes == PAGE_BYTES
    bench.settle()
    stats = bench.engine.stats()
    assert stats.host_used_bytes == 0, "the disk has it"
    assert stats.disk_write_bytes == PAGE_BYTES == bench.disk.used_bytes
    bench.device.look_for_freed()
    assert bench.device.device_bytes == 0
    bench.engine.prefetch(handle)
    assert bench.engine.stats().disk_read_bytes == PAGE_BYTES
    assert bench.engine.stats().h2d_bytes == 0, "a read is under way"
    bench.device.advance(6.0)
    bench.engine.limit_pending_d2h()
    assert bench.engine.stats().h2d_bytes == PAGE_BYTES, "the next call sent it on"
    assert torch.equal(bench.engine.wait_for(handle), values)
    assert bench.engine.stats().disk_stall_seconds == 0.0
    assert bench.device.host_waits == 0
    bench.settle()
    assert bench.engine.stats().host_used_bytes == 0
    assert bench.disk.used_bytes == PAGE_BYTES, "still owned"
    bench.engine.release(handle)
    assert bench.disk.used_bytes == 0
    bench.engine.assert_drained()


def test_waiting_for_a_disk_read_blocks_the_host_and_is_counted() -> None:
    bench = _Bench()
    handle = bench.send()
    bench.settle()
    bench.engine.wait_for(handle)
    stats = bench.engine.take_stats()
    assert stats.disk_stall_seconds == pytest.approx(5.0)
    assert stats.stall_seconds >= 5.0
    assert bench.engine.take_stats().disk_stall_seconds == 0.0


def test_a_prefetch_before_the_write_ended_is_served_from_staging() -> None:
    bench = _Bench(disk_seconds=100.0)
    handle = bench.send()
    bench.engine.limit_pending_d2h(0)  # the source is free, its bytes are on the host
    bench.engine.wait_for(handle)
    bench.device.advance(10.0)
    bench.engine.evict(handle)  # now they are being written
    bench.engine.wait_for(handle)
    assert bench.engine.stats().h2d_bytes == 2 * PAGE_BYTES
    assert bench.engine.stats().disk_read_bytes == 0
    assert bench.device.host_waits == 0
    bench.engine.release(handle)
    assert bench.disk.used_bytes == 0
    assert bench.staging.pool.used_bytes == PAGE_BYTES, "the write still reads it"
    bench.settle()
    assert bench.staging.pool.used_bytes == 0


def test_dropped_tensors_are_not_written() -> None:
    bench = _Bench()
    bench.engine.release(bench.send())
    bench.settle()
    assert bench.disk.writes == 0
    bench.engine.assert_drained()


def test_the_host_waits_if_the_disk_is_slower() -> None:
    bench = _Bench(staging_pages=2)
    handles = [bench.send() for _ in range(2)]
    assert bench.device.host_waits == 0
    handles += [bench.send() for _ in range(6)]
    assert bench.staging.pool.peak_bytes == 2 * PAGE_BYTES
    # Six had to wait for regions; two writers at a time, five seconds each.
    assert bench.engine.stats().disk_stall_seconds >= 15.0
    assert len(handles) == 8


def test_a_tensor_larger_than_staging_is_refused_and_the_engine_goes_on() -> None:
    bench = _Bench(staging_pages=2)
    with pytest.raises(BudgetError, match=rf"{3 * PAGE_BYTES} bytes.*{2 * PAGE_BYTES} bytes"):
        bench.send(3)
    bench.engine.release(bench.send(2))
    bench.engine.assert_drained()


def test_without_a_disk_the_tier_is_refused() -> None:
    engine = make_engine(torch.device("cpu"))
    with pytest.raises(OffloadError, match="offload_dir"):
        engine.start_offload(torch.rand(5000), tier="disk")


def test_a_full_host_spills_to_disk() -> None:
    bench = _Bench(host_pages=2)
    handles = [bench.engine.start_offload(bench.tensor()) for _ in range(5)]
    bench.settle()
    stats = bench.engine.stats()
    assert stats.spilled_bytes == stats.disk_write_bytes == 3 * PAGE_BYTES
    assert bench.engine.pool.used_bytes == 2 * PAGE_BYTES
    for handle in handles:
        bench.engine.wait_for(handle)
        bench.engine.release(handle)
    bench.engine.assert_drained()


def test_reads_start_before_copies_and_within_half_of_staging() -> None:
    bench = _Bench(staging_pages=8)
    prefetch_order = PrefetchOrder(bench.engine, max_pending_d2h_bytes=0)
    groups = []
    for _ in range(12):
        groups.append(_Group(bench.send()))
        prefetch_order.record(groups[-1], len(groups) - 1)
        bench.settle()
    bench.engine.wait_for(groups[-1].handle)
    prefetch_order.on_backward(groups[-1])
    # The one in use, the one after it on its way to the device, and half of staging.
    assert bench.disk.reads == 1 + 1 + 4
    assert bench.staging.ahead_bytes == 4 * PAGE_BYTES
    bench.settle()
    stall_seconds = bench.engine.stats().disk_stall_seconds
    for group in reversed(groups[-6:]):
        prefetch_order.on_backward(group)
        bench.engine.wait_for(group.handle)
        bench.device.advance(2.0)
    assert bench.engine.stats().disk_stall_seconds == stall_seconds, "all of it was there"


def test_tensors_read_ahead_are_dropped_for_space() -> None:
    bench = _Bench(staging_pages=2)
    handles = [bench.send() for _ in range(4)]
    bench.settle()
    assert bench.engine.read_ahead(handles[3])
    assert not bench.engine.read_ahead(handles[2]), "half of staging is one page"
    bench.device.advance(10.0)
    bench.engine.limit_pending_d2h()
    big = bench.send(2)  # wants all of staging
    bench.settle()
    for handle in (*handles, big):
        bench.engine.wait_for(handle)
    assert bench.disk.reads == 1 + 5


def test_an_evicted_tensor_that_was_read_stays_in_host_memory() -> None:
    bench = _Bench()
    handle = bench.send()
    bench.settle()
    bench.engine.prefetch(handle)
    assert bench.engine.bytes_to_prefetch([handle]) == 0
    bench.engine.evict(handle)
    assert bench.engine.bytes_to_prefetch([handle]) == PAGE_BYTES
    bench.device.advance(10.0)
    bench.engine.limit_pending_d2h()
    assert bench.engine.stats().h2d_bytes == 0, "nobody wants it on the device any more"
    bench.engine.wait_for(handle)
    assert bench.disk.reads == 1


@pytest.mark.parametrize("fails", ["writes", "reads"])
def test_a_failed_transfer_is_raised_once_and_its_bytes_are_lost(fails: str) -> None:
    bench = _Bench()
    setattr(bench.disk, f"fail_{fails}", True)
    handle = bench.send()
    if fails == "reads":
        bench.settle()
        bench.engine.prefetch(handle)
    with pytest.raises(OffloadError, match="/fake/slab failed"):
        bench.settle()
    bench.engine.limit_pending_d2h()  # said once, and not again
    with pytest.raises(OffloadError, match="/fake/slab failed"):
        bench.engine.wait_for(handle)
    bench.engine.abandon()
    setattr(bench.disk, f"fail_{fails}", False)
    other = bench.send()
    bench.settle()
    bench.engine.wait_for(other)
    bench.engine.release(other)
    bench.settle()
    bench.engine.assert_drained()
    assert bench.engine.stats().host_used_bytes == 0
    assert bench.disk.used_bytes == 0


def test_failures_of_an_abandoned_step_are_not_raised() -> None:
    bench = _Bench()
    bench.disk.fail_writes = True
    handle = bench.send()
    bench.device.finish()
    bench.engine.release(bench.send())  # passes things on, and raises nothing
    bench.device.finish()
    bench.engine.abandon()
    bench.settle()
    bench.engine.assert_drained()
    with pytest.raises(OffloadError, match="earlier step failed"):
        bench.engine.wait_for(handle)


def test_tensors_dropped_while_the_host_waits_for_staging_are_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A garbage collection, or another thread, drops a graph in the middle of a poll."""
    bench = _Bench(staging_pages=8)
    write_seconds = {1: 3.0, 2: 5.0, 3: 500.0, 6: 1.0}
    bench.disk.write_seconds = lambda num_bytes: write_seconds[num_bytes // PAGE_BYTES]
    read = bench.send(1)
    bench.settle()
    bench.engine.prefetch(read)
    written = [bench.send(pages) for pages in (1, 2, 3)]
    bench.device.advance(3.0)
    bench.engine.poll()  # all three are being written
    dropped, after, end_reads = [read, written.pop(1)], bench.device.now + 3.0, Staging._end_reads
    del read

    def drop_in_between(staging: Staging) -> None:
        if bench.device.now >= after:  # the first write and the read have ended, the second did not
            dropped.clear()
            bench.device.advance(3.0)
        end_reads(staging)

    monkeypatch.setattr(Staging, "_end_reads", drop_in_between)
    written.append(bench.send(6))  # waits for the first write, and then for the third
    for handle in written:
        bench.engine.wait_for(handle)
    assert not dropped


def test_an_interrupted_wait_for_the_write_queue_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C ends the wait for a full queue; what a notebook shows of it keeps the graph alive."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    bench = _Bench(staging_pages=2)
    values = [torch.rand(PAGE_FLOATS) for _ in range(3)]
    handles = [bench.engine.start_offload(bench.device.tensor(x), tier="disk") for x in values]
    bench.device.finish()
    with monkeypatch.context() as patch:
        patch.setattr(bench.disk, "start_write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            bench.engine.prefetch(handles[0])
    big = bench.send(2)  # wants all of staging
    for handle, expected in zip(handles, values, strict=True):
        assert torch.equal(bench.engine.wait_for(handle), expected)
    del handle, big
    handles.clear()
    bench.settle()
    bench.engine.assert_drained()
    assert bench.staging.pool.used_bytes == 0


def test_a_full_disk_is_reported_and_leaks_nothing() -> None:
    bench = _Bench()
    bench.disk.budget_bytes = 2 * PAGE_BYTES
    handles = [bench.send() for _ in range(2)]
    with pytest.raises(BudgetError, match="disk tier"):
        bench.send()
    handles.clear()
    bench.settle()
    bench.engine.assert_drained()
    assert bench.disk.used_bytes == 0
    assert bench.staging.pool.used_bytes == 0


def test_closing_waits_for_transfers_and_closes_the_disk() -> None:
    bench = _Bench()
    handles = [bench.send() for _ in range(3)]
    assert bench.engine.stats().live_handles == 3
    bench.engine.close()
    assert bench.disk.is_closed
    assert bench.staging.pool.used_bytes == 0
    assert bench.disk.used_bytes == 0
    bench.engine.close()
    del handles  # only now: those who hold them keep nothing alive


def test_the_fake_device_detects_a_write_before_its_copy() -> None:
    bench = _Bench()
    handle = bench.send()
    stored = handle.stored()
    stored.d2h_ticket.wait()  # ordered for compute, which says nothing to a thread
    assert stored.region is not None
    with pytest.raises(RaceError, match="read by lane"):
        bench.disk.start_write(stored.staged.extent, stored.region.memory)


def test_the_fake_device_detects_a_region_reused_under_its_write() -> None:
    bench = _Bench(staging_pages=1, disk_seconds=100.0)
    handle = bench.send()
    bench.device.advance(2.0)
    bench.engine.limit_pending_d2h()
    stored = handle.stored()
    assert stored.region is not None
    bench.staging.pool.release(stored.region)  # as a broken engine would
    stored.region = None
    with pytest.raises(RaceError, match="copy's write on lane 1"):
        bench.send()
