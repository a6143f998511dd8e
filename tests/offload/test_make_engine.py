"""Engines as they are made for users: slabs reserved, staging, and a real disk behind it."""

from __future__ import annotations

import errno
import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload.disk import DiskStore
from sppo_hf.offload.engine import OffloadEngine, make_engine
from sppo_hf.offload.host_memory import PAGE_BYTES
from tests.offload.faulty_disk import FaultyDisk
from tests.offload.small_stack import TOKENS, WIDTH, assert_same, loss_of, make_blocks

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


def test_staging_is_a_part_of_the_budget(tmp_path: Path) -> None:
    engine = make_engine(
        torch.device("cpu"), budget_bytes=64 * PAGE_BYTES, disk=DiskStore(tmp_path)
    )
    engine.reserve(2**40)
    assert engine.stats().host_bytes == 64 * PAGE_BYTES
    assert engine.pool.reserved_bytes == 48 * PAGE_BYTES
    engine.close()


@pytest.mark.parametrize("checksum", [False, True])
def test_a_real_disk_gives_the_bytes_back(tmp_path: Path, checksum: bool) -> None:
    disk = DiskStore(tmp_path, slab_bytes=2**20, checksum=checksum)
    engine = make_engine(torch.device("cpu"), budget_bytes=2**18, disk=disk, staging_bytes=2**17)
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


def test_gradients_through_a_real_disk_are_equal_to_the_bit(tmp_path: Path) -> None:
    blocks, hidden_CD = make_blocks(6), torch.rand(TOKENS, WIDTH)
    engine = make_engine(
        torch.device("cpu"),
        min_offload_elements=8,
        budget_bytes=2**15,
        staging_bytes=2**14,
        disk=DiskStore(tmp_path, slab_bytes=2**20),
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


@pytest.mark.parametrize("fails", ["writing", "reading"])
def test_what_breaks_in_a_thread_surfaces_in_the_step_and_names_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    faults = FaultyDisk(monkeypatch)
    disk = DiskStore(tmp_path, slab_bytes=2**20)
    engine = make_engine(torch.device("cpu"), min_offload_elements=8, budget_bytes=2**15, disk=disk)
    blocks, hidden_CD = make_blocks(6), torch.rand(TOKENS, WIDTH)

    def break_the_disk() -> None:
        faults.errors.append(OSError(errno.EIO, "as injected"))

    def step(before_backward: Callable[[], None]) -> None:
        loss = loss_of(blocks, hidden_CD, engine, tiers=("disk",))
        while disk.transfers.queued_bytes:
            time.sleep(0.001)
        before_backward()
        loss.backward()

    if fails == "writing":
        break_the_disk()
    with pytest.raises(OffloadError, match=rf"{fails} .*{tmp_path}.*EIO"):
        step(break_the_disk if fails == "reading" else lambda: None)
    engine.abandon()
    step(lambda: None)
    engine.assert_drained()
    engine.close()
    assert disk.space.reserved_bytes == 0
    assert not [one for one in threading.enumerate() if one.name.startswith("sppo-disk")]


@pytest.mark.parametrize("fails", ["writing", "reading", "room"])
def test_a_step_that_the_disk_failed_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """An error that knew the frames of the step would hold its graph, and the graph the error."""
    faults = FaultyDisk(monkeypatch)

    def fail() -> weakref.ref[OffloadEngine]:
        room = 0 if fails == "room" else None
        disk = DiskStore(tmp_path, slab_bytes=2**20, budget_bytes=room)
        engine = make_engine(
            torch.device("cpu"), min_offload_elements=8, budget_bytes=2**15, disk=disk
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
        with pytest.raises((OffloadError, BudgetError)):
            step()
        engine.abandon()
        return weakref.ref(engine)

    failed = fail()
    torch.zeros((), requires_grad=True).backward()  # what autograd had queued for this thread
    gc.collect()
    assert failed() is None
