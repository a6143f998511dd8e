"""The disk store: bytes come back, faults are reported, queues and budgets hold."""

import contextlib
import copy
import errno
import gc
import logging
import os
import pickle
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sppo_hf.errors import BudgetError, OffloadError
from sppo_hf.offload import disk
from sppo_hf.offload import store as stores
from sppo_hf.offload.disk import DiskExtent, DiskSpace
from sppo_hf.offload.disk_files import BLOCK_BYTES, StoreFolder, aligned_bytes
from tests.offload.disk_store import DiskStore, DiskWrite
from tests.offload.faulty_disk import PATIENCE_SECONDS, FaultyDisk
from tests.sweeps import examples

SLAB_BYTES = 8 * BLOCK_BYTES


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyDisk]:
    disk = FaultyDisk(monkeypatch)
    yield disk
    disk.resume()


def make_store(directory: Path, **settings: int | bool | None) -> DiskStore:
    return DiskStore(directory, **{"slab_bytes": SLAB_BYTES, "threads": 1, **settings})  # pyright: ignore


def host_bytes(num_bytes: int, seed: int = 0, *, shift: int = 0) -> Tensor:
    """Random bytes, `shift` bytes behind an aligned address."""
    memory = torch.from_numpy(aligned_bytes(num_bytes + shift))[shift:]
    generator = torch.Generator().manual_seed(seed)
    return memory.copy_(torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=generator))


def read_back(store: DiskStore, write: DiskWrite) -> Tensor:
    memory = torch.zeros(write.extent.num_bytes, dtype=torch.uint8)
    store.start_read(write.extent, memory).wait()
    return memory


@examples(20, whole=40)
@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(("write", "write", "read", "release")),
            st.one_of(st.integers(1, 3 * SLAB_BYTES), st.sampled_from((1, BLOCK_BYTES, 8191))),
            st.sampled_from((0, 512, 3)),
        ),
        max_size=25,
    ),
    budget=st.one_of(st.none(), st.integers(0, 12 * SLAB_BYTES)),
    threads=st.integers(1, 3),
    checksum=st.booleans(),
)
def test_any_sequence_of_writes_reads_and_releases(
    actions: list[tuple[str, int, int]], budget: int | None, threads: int, checksum: bool
) -> None:
    held: list[tuple[DiskWrite, Tensor]] = []
    with tempfile.TemporaryDirectory() as directory:
        store = make_store(
            Path(directory),
            **{"budget_bytes": budget, "threads": threads, "checksum": checksum},
            max_queued_bytes=SLAB_BYTES,
        )
        for number, (action, value, shift) in enumerate(actions):
            if action == "write":
                source = host_bytes(value, number, shift=shift)
                try:
                    held.append((store.write(source), source))
                except BudgetError:
                    assert budget is not None
            elif held and action == "read":
                write, source = held[value % len(held)]
                assert torch.equal(read_back(store, write), source)
            elif held:
                store.release(held.pop(value % len(held))[0].extent)
            assert store.space.used_bytes <= store.space.peak_bytes <= store.space.reserved_bytes
            assert store.space.reserved_bytes <= store.space.budget_bytes
        for write, source in held:
            write.ticket.wait()
            assert torch.equal(read_back(store, write), source)
        for write, _ in held:
            store.release(write.extent)
        await_empty(store)
        store.close()
        assert not list(Path(directory).iterdir())


def await_empty(store: DiskStore) -> None:
    """Wait until all extents are free, also those released during a transfer."""
    deadline_seconds = time.monotonic() + PATIENCE_SECONDS
    while store.space.used_bytes and time.monotonic() < deadline_seconds:
        time.sleep(0.001)
    assert store.space.used_bytes == store.transfers.queued_bytes == 0


def test_bytes_in_use_are_counted(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write = store.write(host_bytes(5000))
    write.ticket.wait()
    assert store.space.used_bytes == store.space.peak_bytes == 2 * BLOCK_BYTES
    assert store.space.reserved_bytes == SLAB_BYTES
    read_back(store, write)
    read_back(store, write)
    store.release(write.extent)
    assert (store.space.used_bytes, store.space.peak_bytes) == (0, 2 * BLOCK_BYTES)
    store.close()


def test_many_threads_may_use_a_store_at_once(tmp_path: Path) -> None:
    store = make_store(tmp_path, threads=2, max_queued_bytes=4 * BLOCK_BYTES)
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(25):
            source = host_bytes(1 + 500 * turn, 100 * number + turn, shift=number)
            write = store.write(source)
            if not torch.equal(read_back(store, write), source):
                wrong.append(number)
            store.release(write.extent)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE_SECONDS)
    assert not wrong
    assert store.space.used_bytes == 0
    store.close()


def test_released_bytes_are_reused_and_files_are_not_added_for_them(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for turn in range(30):
        writes = [store.write(host_bytes(BLOCK_BYTES, turn)) for _ in range(8)]
        for write in writes:
            write.ticket.wait()
            store.release(write.extent)
    assert store.space.reserved_bytes == store.space.peak_bytes == SLAB_BYTES
    store.close()


def test_a_read_waits_for_its_own_write(tmp_path: Path, faulty: FaultyDisk) -> None:
    store = make_store(tmp_path)
    faulty.writes_flow.clear()
    source, target = host_bytes(9000), torch.zeros(9000, dtype=torch.uint8)
    write = store.write(source)
    faulty.await_write()
    ticket = store.start_read(write.extent, target)
    assert not write.ticket.done()
    assert not ticket.done()
    assert not faulty.read_begun.acquire(timeout=0.05)
    faulty.resume()
    ticket.wait()
    assert write.ticket.done()
    assert ticket.done()
    assert torch.equal(target, source)
    store.close()


def test_reads_pass_writes_that_are_stuck(tmp_path: Path, faulty: FaultyDisk) -> None:
    store = make_store(tmp_path)
    source = host_bytes(9000)
    first = store.write(source)
    first.ticket.wait()
    faulty.writes_flow.clear()
    second = store.write(source)
    assert torch.equal(read_back(store, first), source)
    assert not second.ticket.done()
    faulty.resume()
    store.close()


def test_releasing_a_write_that_has_not_begun_cancels_it(
    tmp_path: Path, faulty: FaultyDisk
) -> None:
    store = make_store(tmp_path)
    faulty.writes_flow.clear()
    running = store.write(host_bytes(BLOCK_BYTES))
    waiting = store.write(host_bytes(3 * BLOCK_BYTES))
    faulty.await_write()
    store.release(waiting.extent)
    assert waiting.ticket.done()
    waiting.ticket.wait()
    assert store.space.used_bytes == store.transfers.queued_bytes == BLOCK_BYTES
    faulty.resume()
    running.ticket.wait()
    store.close()
    assert faulty.writes == [(0, BLOCK_BYTES)]


def test_bytes_released_during_a_transfer_are_free_after_it(
    tmp_path: Path, faulty: FaultyDisk
) -> None:
    store = make_store(tmp_path)
    faulty.writes_flow.clear()
    write = store.write(host_bytes(BLOCK_BYTES))
    faulty.await_write()
    store.release(write.extent)
    assert store.space.used_bytes == BLOCK_BYTES
    assert not write.ticket.done()
    faulty.resume()
    write.ticket.wait()
    assert store.space.used_bytes == 0

    source, target = host_bytes(BLOCK_BYTES, 7), torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
    write = store.write(source)
    write.ticket.wait()
    faulty.reads_flow.clear()
    ticket = store.start_read(write.extent, target)
    store.release(write.extent)
    assert store.space.used_bytes == BLOCK_BYTES
    faulty.resume()
    ticket.wait()
    assert torch.equal(target, source)
    assert store.space.used_bytes == 0
    store.close()


def test_a_write_with_a_read_behind_it_is_not_cancelled(tmp_path: Path, faulty: FaultyDisk) -> None:
    store = make_store(tmp_path)
    faulty.writes_flow.clear()
    store.write(host_bytes(BLOCK_BYTES))
    source, target = host_bytes(100, 3), torch.zeros(100, dtype=torch.uint8)
    write = store.write(source)
    ticket = store.start_read(write.extent, target)
    store.release(write.extent)
    faulty.resume()
    ticket.wait()
    assert torch.equal(target, source)
    store.close()


def test_a_full_queue_holds_the_host_back(tmp_path: Path, faulty: FaultyDisk) -> None:
    store = make_store(tmp_path, max_queued_bytes=3 * BLOCK_BYTES)
    faulty.writes_flow.clear()
    started: list[DiskWrite] = []
    queued_bytes: list[int] = []

    def produce() -> None:
        for turn in range(12):
            started.append(store.write(host_bytes(BLOCK_BYTES, turn)))
            queued_bytes.append(store.transfers.queued_bytes)

    producer = threading.Thread(target=produce)
    producer.start()
    faulty.await_write()
    producer.join(0.1)
    assert producer.is_alive()
    assert len(started) == 3
    faulty.resume()
    producer.join(PATIENCE_SECONDS)
    assert len(started) == 12
    assert max(queued_bytes) == 3 * BLOCK_BYTES
    store.close()


def test_a_write_larger_than_the_queue_goes_alone(tmp_path: Path) -> None:
    store = make_store(tmp_path, max_queued_bytes=BLOCK_BYTES)
    for turn in range(3):
        source = host_bytes(5 * BLOCK_BYTES, turn)
        assert torch.equal(read_back(store, store.write(source)), source)
    store.close()


def test_an_exhausted_budget_names_the_folder_and_the_missing_bytes(tmp_path: Path) -> None:
    store = make_store(tmp_path, budget_bytes=SLAB_BYTES + 1)
    store.write(host_bytes(SLAB_BYTES)).ticket.wait()
    with pytest.raises(BudgetError, match=r"disk_memory.*offload_dir") as caught:
        store.write(host_bytes(1))
    for seen in (
        str(store.space.folder.path),
        f"{BLOCK_BYTES} bytes more",
        f"{SLAB_BYTES} of {SLAB_BYTES + 1}",
    ):
        assert seen in str(caught.value)
    assert store.transfers.queued_bytes == 0
    store.close()


def test_an_exhausted_budget_waits_for_extents_being_released(
    tmp_path: Path, faulty: FaultyDisk
) -> None:
    store = make_store(tmp_path, budget_bytes=SLAB_BYTES)
    faulty.writes_flow.clear()
    first = store.write(host_bytes(SLAB_BYTES))
    faulty.await_write()
    store.release(first.extent)
    timer = threading.Timer(0.05, faulty.resume)
    timer.start()
    source = host_bytes(SLAB_BYTES, 5)
    assert torch.equal(read_back(store, store.write(source)), source)
    timer.join()
    store.close()


def test_the_default_budget_leaves_free_space_on_the_disk(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, slab_bytes=SLAB_BYTES)
    free_bytes = store.space.folder.free_bytes
    assert 0 <= store.space.budget_bytes < max(free_bytes - 2**29, 1)
    store.close()


def test_extents_are_not_released_or_read_again(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write = store.write(host_bytes(10))
    store.release(write.extent)
    with pytest.raises(AssertionError, match="twice"):
        store.release(write.extent)
    with pytest.raises(AssertionError, match="after its release"):
        read_back(store, write)
    store.close()


def test_closing_cancels_queued_transfers_and_removes_the_files(
    tmp_path: Path, faulty: FaultyDisk
) -> None:
    store = make_store(tmp_path)
    kept = store.write(host_bytes(BLOCK_BYTES))
    kept.ticket.wait()
    faulty.await_write()
    assert store.space.reserved_bytes == SLAB_BYTES
    faulty.writes_flow.clear()
    faulty.reads_flow.clear()
    memory = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
    running = store.write(memory)
    faulty.await_write()
    waiting = store.write(memory)
    reads = [store.start_read(kept.extent, memory.clone()) for _ in range(2)]
    faulty.await_read()
    closer = threading.Thread(target=store.close)
    closer.start()
    # Only what had begun is held; the rest is given up at once.
    with pytest.raises(OffloadError, match="closed"):
        reads[1].wait()
    waiting.ticket.wait()
    assert not running.ticket.done()
    faulty.resume()
    closer.join(PATIENCE_SECONDS)
    running.ticket.wait()
    reads[0].wait()
    assert not list(tmp_path.iterdir())
    store.release(kept.extent)
    store.close()
    with pytest.raises(OffloadError, match="was closed"):
        store.write(memory)
    with pytest.raises(OffloadError, match="was closed"):
        store.start_read(running.extent, memory)


def test_no_transfer_needs_a_thread_that_the_system_may_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faulty: FaultyDisk
) -> None:
    """An executor keeps what it has queued, and does it later, although `submit` raises for it."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = make_store(tmp_path, threads=2)
    faulty.writes_flow.clear()
    held = [store.write(host_bytes(BLOCK_BYTES, 0))]
    faulty.await_write()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    held.append(store.write(host_bytes(BLOCK_BYTES, 1)))
    faulty.resume()
    for seed, write in enumerate(held):
        assert torch.equal(read_back(store, write), host_bytes(BLOCK_BYTES, seed))
        store.release(write.extent)
    assert store.space.used_bytes == 0
    store.close()
    with pytest.raises(OffloadError, match="can't start new thread"):
        make_store(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_store_that_is_dropped_cleans_up(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.write(host_bytes(BLOCK_BYTES))
    del store
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_store_dropped_in_one_of_its_own_threads_cleans_up(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.write(host_bytes(BLOCK_BYTES)).ticket.wait()
    held, dropped = [store], threading.Event()
    writers, transfers = store._writers, store.transfers
    del store

    def drop() -> None:
        held.clear()
        gc.collect()
        dropped.set()

    writers.submit(drop)
    assert dropped.wait(PATIENCE_SECONDS)
    for helper in [thread for thread in threading.enumerate() if thread.name == "sppo-disk-end"]:
        helper.join(PATIENCE_SECONDS)
    assert transfers.space.reserved_bytes == 0, "the files are closed, not only removed"
    assert not list(tmp_path.iterdir())


class _InterruptedOnEntry(threading.Condition):
    def __enter__(self) -> bool:
        """As a signal's handler does that runs when the lock has just been acquired."""
        super().__enter__()
        raise KeyboardInterrupt


def test_an_interrupt_leaves_the_lock_to_the_threads(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    changed = store.transfers.changed
    store.transfers.changed = _InterruptedOnEntry(changed._lock)  # type: ignore[attr-defined]
    with contextlib.suppress(KeyboardInterrupt):
        store.allocate(BLOCK_BYTES)
    store.transfers.changed = changed
    writing = store.write(host_bytes(BLOCK_BYTES)).ticket._future
    assert writing.exception(timeout=PATIENCE_SECONDS) is None


class _HeldForEver:
    def __enter__(self) -> None:
        raise AssertionError("nobody in this process will let the lock go")

    def __exit__(self, *_: object) -> None:
        """Never entered."""


def test_a_forked_child_is_refused_before_it_could_wait_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path)
    write, target = store.write(host_bytes(100)), torch.zeros(100, dtype=torch.uint8)
    write.ticket.wait()
    with monkeypatch.context() as child:
        child.setattr(store.transfers, "process_id", os.getpid() + 1)
        child.setattr(store.transfers, "lock", _HeldForEver())
        for call in (
            lambda: store.write(host_bytes(100)),
            lambda: store.start_read(write.extent, target),
            lambda: store.release(write.extent),
            write.ticket.done,
            write.ticket.wait,
        ):
            with pytest.raises(OffloadError, match="forked"):
                call()
        store.close()
    assert torch.equal(read_back(store, write), host_bytes(100))
    store.close()


def test_a_store_cannot_be_pickled_or_copied(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for refused in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"neither pickled nor copied.*make a Store"):
            refused(store)
    store.close()


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def check_still_works(store: DiskStore) -> None:
    source = host_bytes(3 * BLOCK_BYTES + 5, 9)
    write = store.write(source)
    assert torch.equal(read_back(store, write), source)
    store.release(write.extent)


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EIO, "check the disk"), (errno.ENOSPC, "bytes free; free some")]
)
def test_a_failed_write_is_raised_by_its_ticket_and_by_reads(
    tmp_path: Path, faulty: FaultyDisk, number: int, remedy: str
) -> None:
    store = make_store(tmp_path)
    faulty.errors = [os_error(number)]
    source = host_bytes(BLOCK_BYTES)
    write = store.write(source)
    for _ in range(2):
        with pytest.raises(OffloadError, match=f"writing .*{errno.errorcode[number]}.*{remedy}"):
            write.ticket.wait()
    with pytest.raises(OffloadError, match=re.escape(str(write.extent.place.slab.file))):
        write.ticket.done()
    with pytest.raises(OffloadError, match="writing"):
        store.start_read(write.extent, source)
    assert store.transfers.queued_bytes == 0
    check_still_works(store)
    store.release(write.extent)
    assert store.space.used_bytes == 0
    store.close()


def test_a_read_that_was_started_before_the_write_failed_fails_too(
    tmp_path: Path, faulty: FaultyDisk
) -> None:
    store = make_store(tmp_path)
    faulty.writes_flow.clear()
    faulty.errors = [os_error(errno.EIO)]
    write = store.write(host_bytes(BLOCK_BYTES))
    ticket = store.start_read(write.extent, torch.zeros(BLOCK_BYTES, dtype=torch.uint8))
    faulty.resume()
    with pytest.raises(OffloadError, match=r"writing .* failed: EIO"):
        ticket.wait()
    store.release(write.extent)
    assert store.space.used_bytes == 0
    store.close()


def test_a_failed_read_loses_its_extent_and_no_other(tmp_path: Path, faulty: FaultyDisk) -> None:
    store = make_store(tmp_path)
    write = store.write(host_bytes(BLOCK_BYTES))
    write.ticket.wait()
    faulty.errors = [os_error(errno.EIO)]
    with pytest.raises(
        OffloadError, match=f"reading .*{store.space.folder.path}.* failed: EIO.*offload_dir"
    ):
        read_back(store, write)
    with pytest.raises(OffloadError, match="reading"):
        read_back(store, write)
    check_still_works(store)
    store.release(write.extent)
    assert store.space.used_bytes == 0
    store.close()


def test_an_unexpected_error_is_raised_and_the_threads_survive(
    tmp_path: Path, faulty: FaultyDisk
) -> None:
    store = make_store(tmp_path)
    faulty.errors = [MemoryError()]
    write = store.write(host_bytes(BLOCK_BYTES))
    with pytest.raises(OffloadError, match="unexpectedly: MemoryError") as caught:
        write.ticket.wait()
    assert isinstance(caught.value.__cause__, MemoryError)
    with pytest.raises(OffloadError, match="MemoryError"):
        read_back(store, write)
    check_still_works(store)
    store.release(write.extent)
    assert store.space.used_bytes == 0
    store.close()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit of the last byte": lambda good: good[:-1] + bytes([good[-1] ^ 1]),
    "a flipped highest bit of a word": lambda good: good[:7] + bytes([good[7] ^ 0x80]) + good[8:],
    "a zeroed block": lambda good: bytes(BLOCK_BYTES) + good[BLOCK_BYTES:],
    "stale bytes": lambda good: good[: -BLOCK_BYTES // 2] + good[: BLOCK_BYTES // 2],
    "blocks that changed places": lambda good: (
        good[BLOCK_BYTES : 2 * BLOCK_BYTES] + good[:BLOCK_BYTES] + good[2 * BLOCK_BYTES :]
    ),
    "all a block too far": lambda good: good[BLOCK_BYTES:] + good[:BLOCK_BYTES],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_checksum_detects(tmp_path: Path, damage: str) -> None:
    store = make_store(tmp_path)
    source = host_bytes(3 * BLOCK_BYTES + 77)
    write = store.write(source)
    write.ticket.wait()
    assert torch.equal(read_back(store, write), source)
    file = write.extent.place.slab.file
    os.pwrite(file._buffered, DAMAGE[damage](source.numpy().tobytes()), 0)
    place = re.escape(f"{source.numel()} bytes at offset 0 of {file} came back changed")
    with pytest.raises(OffloadError, match=place):
        read_back(store, write)
    check_still_works(store)
    store.close()


def test_without_a_checksum_damaged_bytes_are_returned(tmp_path: Path) -> None:
    store = make_store(tmp_path, checksum=False)
    write = store.write(host_bytes(BLOCK_BYTES))
    write.ticket.wait()
    os.pwrite(write.extent.place.slab.file._buffered, bytes(BLOCK_BYTES), 0)
    assert not read_back(store, write).any()
    store.close()


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write = store.write(host_bytes(2 * BLOCK_BYTES))
    write.ticket.wait()
    os.ftruncate(write.extent.place.slab.file._buffered, BLOCK_BYTES)
    with pytest.raises(OffloadError, match=r"reading .*EIO, the file ended early"):
        read_back(store, write)
    store.close()


def test_a_slow_disk_is_reported_once_with_its_speed(
    tmp_path: Path,
    faulty: FaultyDisk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger=stores.__name__)
    monkeypatch.setattr(stores, "SLOW_WAIT_SECONDS", 0.01)
    store = make_store(tmp_path, max_queued_bytes=BLOCK_BYTES)
    for _ in range(2):
        faulty.writes_flow.clear()
        write = store.write(host_bytes(BLOCK_BYTES))
        timer = threading.Timer(0.15, faulty.resume)
        timer.start()
        write.ticket.wait()
        timer.join()
        store.release(write.extent)
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(store.space.folder.path) in message
    assert "moved 0 bytes (0 bytes/s)" in message
    store.close()


def test_a_full_queue_reports_a_slow_disk(
    tmp_path: Path,
    faulty: FaultyDisk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(stores, "SLOW_WAIT_SECONDS", 0.01)
    store = make_store(tmp_path, max_queued_bytes=BLOCK_BYTES)
    faulty.writes_flow.clear()
    store.write(host_bytes(BLOCK_BYTES))
    timer = threading.Timer(0.15, faulty.resume)
    timer.start()
    store.write(host_bytes(BLOCK_BYTES)).ticket.wait()
    timer.join()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    store.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StoreFolder]:
    folder = StoreFolder(tmp_path)
    yield folder
    folder.remove()


class FakeFile:
    """A slab file without a file."""

    keeps_name = False

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def close(self) -> None:
        """Nothing to close."""


class FakeFolder:
    path = Path("/nowhere")
    free_bytes = 0
    new_file = FakeFile


def check_disjoint(extents: list[DiskExtent]) -> None:
    runs = sorted((id(e.slab), e.offset, e.offset + e.reserved_bytes) for e in extents)
    for (slab, _, end), (next_slab, start, _) in pairwise(runs):
        assert slab != next_slab or end <= start


@given(
    actions=st.lists(
        st.tuples(st.booleans(), st.one_of(st.integers(1, 3 * SLAB_BYTES), st.integers(1, 30))),
        max_size=50,
    ),
    budget=st.integers(0, 12 * SLAB_BYTES),
)
def test_any_sequence_of_loans(actions: list[tuple[bool, int]], budget: int) -> None:
    space = DiskSpace(FakeFolder(), slab_bytes=SLAB_BYTES, budget_bytes=budget)  # pyright: ignore
    lent: list[DiskExtent] = []
    for is_loan, value in actions:
        if is_loan:
            try:
                lent.append(space.allocate(value))
            except BudgetError:
                assert space.reserved_bytes + value > budget - BLOCK_BYTES
        elif lent:
            space.free(lent.pop(value % len(lent)))
        check_disjoint(lent)
        assert all(e.offset % BLOCK_BYTES == 0 and e.num_bytes <= e.reserved_bytes for e in lent)
        assert space.used_bytes == sum(extent.reserved_bytes for extent in lent)
        assert space.used_bytes <= space.peak_bytes <= space.reserved_bytes <= budget
    for extent in lent:
        space.free(extent)
    assert space.used_bytes == 0


def test_a_large_disk_needs_few_files() -> None:
    space = DiskSpace(FakeFolder(), slab_bytes=2**30, budget_bytes=2**41)  # pyright: ignore
    extents = [space.allocate(2**28) for _ in range(2**13)]
    assert len({id(extent.slab) for extent in extents}) < 70
    assert space.reserved_bytes == space.used_bytes == 2**41
    with pytest.raises(BudgetError):
        space.allocate(1)


def test_a_full_disk_names_the_folder_and_changes_nothing(
    folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = DiskSpace(folder, slab_bytes=SLAB_BYTES, budget_bytes=100 * SLAB_BYTES)
    first = space.allocate(SLAB_BYTES)
    with monkeypatch.context() as patch:

        def full(*_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(BudgetError, match=r"No space left.*Free some.*offload_dir") as caught:
            space.allocate(5000)
    for seen in (str(folder.path), f"{2 * BLOCK_BYTES} bytes more", "bytes free"):
        assert seen in str(caught.value)
    assert space.used_bytes == space.reserved_bytes == SLAB_BYTES
    assert not list(folder.path.iterdir())
    assert space.allocate(5000).slab is not first.slab
    space.close()


def test_reserved_bytes_are_logged(folder: StoreFolder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=disk.__name__)
    space = DiskSpace(folder, slab_bytes=SLAB_BYTES, budget_bytes=100 * SLAB_BYTES)
    for _ in range(2):
        space.allocate(SLAB_BYTES)
    told = [record.getMessage() for record in caplog.records]
    start = f"disk tier: {2 * SLAB_BYTES} bytes are reserved in {folder.path}, in 2 files"
    assert len(told) == 2
    assert told[1].startswith(f"{start} without names")
    space.close()


def test_a_file_size_limit_counts_as_a_full_disk(
    folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "posix_fallocate", too_large)
    space = DiskSpace(folder, slab_bytes=SLAB_BYTES, budget_bytes=SLAB_BYTES)
    with pytest.raises(BudgetError, match="File too large"):
        space.allocate(1)


def test_a_smaller_file_is_tried_only_on_a_full_disk(
    folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def broken(descriptor: int, offset: int, num_bytes: int) -> None:
        asked.append(num_bytes)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "posix_fallocate", broken)
    space = DiskSpace(folder, slab_bytes=SLAB_BYTES, budget_bytes=SLAB_BYTES)
    with pytest.raises(OffloadError, match="Input/output error"):
        space.allocate(1)
    assert asked == [SLAB_BYTES]


def test_a_nearly_full_disk_gets_a_smaller_file(
    folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nearly_full(descriptor: int, offset: int, num_bytes: int) -> None:
        if num_bytes > 3 * BLOCK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(descriptor, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", nearly_full)
    space = DiskSpace(folder, slab_bytes=SLAB_BYTES, budget_bytes=100 * SLAB_BYTES)
    space.allocate(2 * BLOCK_BYTES + 1)
    assert space.reserved_bytes == 3 * BLOCK_BYTES
    space.close()


def test_a_file_that_cannot_be_made_is_another_error(
    folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", read_only)
    space = DiskSpace(folder, slab_bytes=SLAB_BYTES, budget_bytes=SLAB_BYTES)
    with pytest.raises(
        OffloadError, match=f"{re.escape(str(folder.path))}.*Read-only.*offload_dir"
    ):
        space.allocate(1)
    assert space.reserved_bytes == 0


def test_an_error_is_described_by_place_cause_and_remedy(folder: StoreFolder) -> None:
    space = DiskSpace(folder, slab_bytes=SLAB_BYTES, budget_bytes=SLAB_BYTES)
    space.allocate(BLOCK_BYTES)
    extent = space.allocate(10)
    place = f"reading 10 bytes at offset {BLOCK_BYTES} of {extent.slab.file} failed"
    text = space.describe("reading", extent, OSError(errno.EIO, "Input/output error"))
    assert text.startswith(f"{place}: EIO, Input/output error. ")
    assert "check the disk" in text
    text = space.describe("writing", extent, OSError(errno.EDQUOT, "Disk quota exceeded"))
    assert "lower disk_memory" in text
    space.close()
