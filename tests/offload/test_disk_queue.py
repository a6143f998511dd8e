"""What goes wrong in the background is told to who asks, by path, and harms nothing else."""

import errno
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sppo_hf.errors import OffloadError
from sppo_hf.offload import disk
from sppo_hf.offload.disk import DiskStore
from sppo_hf.offload.disk_files import BLOCK_BYTES
from tests.offload.faulty_disk import FaultyDisk
from tests.offload.test_disk import host_bytes, make_store, read_back


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyDisk]:
    disk = FaultyDisk(monkeypatch)
    yield disk
    disk.resume()


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def check_still_works(store: DiskStore) -> None:
    source = host_bytes(3 * BLOCK_BYTES + 5, 9)
    write = store.start_write(source)
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
    write = store.start_write(source)
    for _ in range(2):
        with pytest.raises(OffloadError, match=f"writing .*{errno.errorcode[number]}.*{remedy}"):
            write.ticket.wait()
    with pytest.raises(OffloadError, match=re.escape(str(write.extent.slab.file))):
        write.ticket.done()
    with pytest.raises(OffloadError, match="writing"):
        store.start_read(write.extent, source)
    assert store.transfers.write_bytes == store.transfers.queued_bytes == 0
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
    write = store.start_write(host_bytes(BLOCK_BYTES))
    ticket = store.start_read(write.extent, torch.zeros(BLOCK_BYTES, dtype=torch.uint8))
    faulty.resume()
    with pytest.raises(OffloadError, match=r"writing .* failed: EIO"):
        ticket.wait()
    store.release(write.extent)
    assert store.space.used_bytes == 0
    store.close()


def test_a_failed_read_spoils_its_extent_and_no_other(tmp_path: Path, faulty: FaultyDisk) -> None:
    store = make_store(tmp_path)
    write = store.start_write(host_bytes(BLOCK_BYTES))
    write.ticket.wait()
    faulty.errors = [os_error(errno.EIO)]
    with pytest.raises(
        OffloadError, match=f"reading .*{store.transfers.folder.path}.* failed: EIO.*offload_dir"
    ):
        read_back(store, write)
    with pytest.raises(OffloadError, match="reading"):
        read_back(store, write)
    check_still_works(store)
    store.release(write.extent)
    assert store.space.used_bytes == 0
    store.close()


def test_what_nobody_foresaw_is_raised_and_the_threads_live_on(
    tmp_path: Path, faulty: FaultyDisk
) -> None:
    store = make_store(tmp_path)
    faulty.errors = [MemoryError()]
    write = store.start_write(host_bytes(BLOCK_BYTES))
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
def test_the_checksum_finds(tmp_path: Path, damage: str) -> None:
    store = make_store(tmp_path)
    source = host_bytes(3 * BLOCK_BYTES + 77)
    write = store.start_write(source)
    write.ticket.wait()
    assert torch.equal(read_back(store, write), source)
    file = write.extent.slab.file
    os.pwrite(file._buffered, DAMAGE[damage](source.numpy().tobytes()), 0)
    place = re.escape(f"{source.numel()} bytes at offset 0 of {file} came back changed")
    with pytest.raises(OffloadError, match=place):
        read_back(store, write)
    check_still_works(store)
    store.close()


def test_without_a_checksum_bytes_come_back_as_the_disk_has_them(tmp_path: Path) -> None:
    store = make_store(tmp_path, checksum=False)
    write = store.start_write(host_bytes(BLOCK_BYTES))
    write.ticket.wait()
    os.pwrite(write.extent.slab.file._buffered, bytes(BLOCK_BYTES), 0)
    assert not read_back(store, write).any()
    store.close()


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write = store.start_write(host_bytes(2 * BLOCK_BYTES))
    write.ticket.wait()
    os.ftruncate(write.extent.slab.file._buffered, BLOCK_BYTES)
    with pytest.raises(OffloadError, match=r"reading .*EIO, the file ended early"):
        read_back(store, write)
    store.close()


def test_a_slow_disk_is_told_once_with_its_speed(
    tmp_path: Path,
    faulty: FaultyDisk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger=disk.__name__)
    monkeypatch.setattr(disk, "SLOW_WAIT_SECONDS", 0.01)
    store = make_store(tmp_path, max_queued_bytes=BLOCK_BYTES)
    for _ in range(2):
        faulty.writes_flow.clear()
        write = store.start_write(host_bytes(BLOCK_BYTES))
        timer = threading.Timer(0.15, faulty.resume)
        timer.start()
        write.ticket.wait()
        timer.join()
        store.release(write.extent)
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(store.transfers.folder.path) in message
    assert "moved 0 bytes (0 bytes/s)" in message
    assert store.transfers.wait_seconds > 0.2
    store.close()


def test_a_full_queue_tells_of_a_slow_disk_too(
    tmp_path: Path,
    faulty: FaultyDisk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(disk, "SLOW_WAIT_SECONDS", 0.01)
    store = make_store(tmp_path, max_queued_bytes=BLOCK_BYTES)
    faulty.writes_flow.clear()
    store.start_write(host_bytes(BLOCK_BYTES))
    timer = threading.Timer(0.15, faulty.resume)
    timer.start()
    store.start_write(host_bytes(BLOCK_BYTES)).ticket.wait()
    timer.join()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    store.close()
