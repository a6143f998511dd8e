"""Slab files move any bytes, aligned or not, past the page cache or through it, in any pieces."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from sppo_hf.offload import disk_files
from sppo_hf.offload.disk_files import (
    BLOCK_BYTES,
    Bytes,
    SlabFile,
    aligned_bytes,
    checksum,
    round_up,
)
from tests.offload.faulty_disk import FaultyDisk

NUM_BYTES = 16 * BLOCK_BYTES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slab.bin"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_files, "PIECE_BYTES", 3 * BLOCK_BYTES)


def memories(seed: int = 0) -> Iterator[Bytes]:
    """Random bytes of all kinds of lengths and addresses."""
    generator = np.random.default_rng(seed)
    for size in (1, 77, BLOCK_BYTES, BLOCK_BYTES + 1, 7 * BLOCK_BYTES, NUM_BYTES - 5):
        for shift in (0, 1, 512):
            memory = aligned_bytes(size + shift)[shift:]
            memory[:] = generator.integers(0, 256, size, dtype=np.uint8)
            yield memory


def check_round_trips(file: SlabFile) -> None:
    for number, source in enumerate(memories()):
        moved: list[int] = []
        offset = 0 if source.size > 8 * BLOCK_BYTES else number % 8 * BLOCK_BYTES
        file.write(source, offset, moved.append)
        assert source.size <= sum(moved) <= round_up(source.size)
        for shift in (0, 9):
            target = aligned_bytes(source.size + shift + 1)[shift:]
            target[-1] = 123
            file.read(target[: source.size], offset, moved.append)
            assert np.array_equal(target[: source.size], source)
            assert target[source.size] == 123, "the byte behind is somebody else's"


@pytest.mark.parametrize("keep_name", [True, False])
def test_round_trips(path: Path, keep_name: bool) -> None:
    file = SlabFile(path, NUM_BYTES, keep_name=keep_name)
    assert path.exists() == keep_name
    assert os.fstat(file._buffered).st_size == NUM_BYTES
    assert os.fstat(file._buffered).st_nlink == keep_name
    assert str(path) in str(file)
    check_round_trips(file)
    assert file._is_direct == (file._direct is not None), "nothing was refused"
    file.close()


def test_space_is_taken_at_once(path: Path) -> None:
    file = SlabFile(path, 64 * BLOCK_BYTES, keep_name=False)
    assert os.fstat(file._buffered).st_blocks * 512 >= 64 * BLOCK_BYTES
    file.close()


def test_a_file_has_no_name_any_more_before_it_has_bytes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    reserve = os.posix_fallocate

    def look(descriptor: int, offset: int, num_bytes: int) -> None:
        seen.append(path.exists())
        reserve(descriptor, offset, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", look)
    SlabFile(path, NUM_BYTES, keep_name=False).close()
    assert seen == [False], "a process killed here would leave a file"


def test_a_file_that_was_put_in_its_place_is_not_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("the file is opened once here")
    real_open, ways = os.open, [os.link, os.symlink]
    victim = path.with_name("victim")
    victim.write_bytes(b"precious")

    def swap(name: Path, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            path.unlink()
            ways.pop()(victim, path)
        return real_open(name, flags, mode)

    monkeypatch.setattr(os, "open", swap)
    while ways:
        with pytest.raises(OSError, match=r"another file|symbolic links"):
            SlabFile(path, NUM_BYTES, keep_name=False)
    assert victim.read_bytes() == b"precious"


def test_neighbours_are_left_alone(path: Path) -> None:
    file = SlabFile(path, NUM_BYTES, keep_name=False)
    background = aligned_bytes(NUM_BYTES)
    background[:] = 7
    file.write(background, 0, lambda _: None)
    for memory in memories():
        if memory.size < 3 * BLOCK_BYTES:
            file.write(memory, 4 * BLOCK_BYTES, lambda _: None)
    file.read(seen := aligned_bytes(NUM_BYTES), 0, lambda _: None)
    outside = np.ones(NUM_BYTES, bool)
    outside[4 * BLOCK_BYTES : 6 * BLOCK_BYTES] = False
    assert (seen[outside] == 7).all()
    file.close()


@pytest.mark.parametrize("most_bytes", [1000, BLOCK_BYTES + 1, 2 * BLOCK_BYTES])
@pytest.mark.parametrize("direct", [True, False])
def test_partial_transfers_are_continued(
    path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int, direct: bool
) -> None:
    faulty = FaultyDisk(monkeypatch)
    file = SlabFile(path, NUM_BYTES, keep_name=False)
    file._is_direct = direct and file._is_direct
    faulty.most_bytes = most_bytes
    check_round_trips(file)
    assert max(moved for _, moved in faulty.writes) <= round_up(most_bytes)
    file.close()


def test_what_a_partial_transfer_left_unaligned_goes_through_the_page_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SlabFile(path, NUM_BYTES, keep_name=False)
    if file._direct is None:
        pytest.skip("the filesystem of the tests has no O_DIRECT")
    used: list[tuple[bool, int]] = []

    def odd(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        used.append((descriptor == file._direct, offset))
        # As if the device had stopped in the middle of a block.
        return os.pwrite(file._buffered, buffers[0][: 1000 if len(used) == 1 else None], offset)

    monkeypatch.setattr(os, "pwritev", odd)
    source = aligned_bytes(2 * BLOCK_BYTES)
    source[:] = np.arange(2 * BLOCK_BYTES) % 251
    file.write(source, BLOCK_BYTES, lambda _: None)
    assert used == [(True, BLOCK_BYTES), (False, BLOCK_BYTES + 1000)]
    target = aligned_bytes(source.size)
    file.read(target, BLOCK_BYTES, lambda _: None)
    assert np.array_equal(target, source)
    file.close()


def test_a_filesystem_that_refuses_o_direct_is_used_without(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refuse(name: Path, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(name, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    file = SlabFile(path, NUM_BYTES, keep_name=False)
    assert file._direct is None
    check_round_trips(file)
    file.close()


def test_a_filesystem_that_accepts_o_direct_but_cannot_is_used_without(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SlabFile(path, NUM_BYTES, keep_name=False)
    if file._direct is None:
        pytest.skip("the filesystem of the tests has no O_DIRECT")
    refused: list[int] = []
    write = os.pwritev

    def refuse(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if descriptor == file._direct:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    check_round_trips(file)
    assert len(refused) == 1
    file.close()


def test_another_error_of_o_direct_is_no_reason_to_go_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = FaultyDisk(monkeypatch)
    file = SlabFile(path, NUM_BYTES, keep_name=False)
    faulty.errors = [OSError(errno.EIO, "Input/output error")]
    with pytest.raises(OSError, match="Input/output"):
        file.write(aligned_bytes(BLOCK_BYTES), 0, lambda _: None)
    assert not faulty.writes
    file.close()


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_filesystem_that_cannot_reserve_is_asked_for_its_free_bytes(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    file = SlabFile(path, NUM_BYTES, keep_name=False)
    check_round_trips(file)
    file.close()
    monkeypatch.setattr(disk_files, "free_bytes", lambda descriptor: NUM_BYTES - 1)
    with pytest.raises(OSError, match="No space left"):
        SlabFile(path, NUM_BYTES, keep_name=False)
    assert not path.exists()


def test_a_file_that_does_not_fit_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, num_bytes: int) -> None:
        os.ftruncate(descriptor, num_bytes // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    open_before = set(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else set()
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            SlabFile(path, NUM_BYTES, keep_name=False)
    assert not path.exists()
    if open_before:
        assert len(os.listdir("/proc/self/fd")) == len(open_before)


def test_aligned_bytes_can_be_a_tensor() -> None:
    for size in (1, 4095, 100_000):
        memory = torch.from_numpy(aligned_bytes(size))
        assert memory.numel() == size
        assert memory.data_ptr() % BLOCK_BYTES == 0


def test_files_are_private_to_user_and_process(path: Path) -> None:
    file = SlabFile(path, NUM_BYTES, keep_name=True)
    assert path.stat().st_mode & 0o777 == 0o600
    assert not os.get_inheritable(file._buffered)
    file.close()


@pytest.mark.parametrize("num_bytes", [1, 8, BLOCK_BYTES, 3 * BLOCK_BYTES + 77])
def test_a_checksum_knows_every_bit_and_every_place(num_bytes: int) -> None:
    generator = np.random.default_rng(num_bytes)
    memory = aligned_bytes(num_bytes)
    memory[:] = generator.integers(0, 256, num_bytes, dtype=np.uint8)
    good = checksum(memory)
    assert checksum(np.concatenate([memory[:1], memory])[1:]) == good, "wherever the bytes are"
    for bit in (0, 7):
        for byte in {0, num_bytes // 2, num_bytes - 1}:
            memory[byte] ^= 1 << bit
            assert checksum(memory) != good
            memory[byte] ^= 1 << bit
    if num_bytes > 2 * BLOCK_BYTES:
        words = memory[: 2 * BLOCK_BYTES].view(np.uint64)
        for first, second in ((0, 1), (3, 511), (5, 512 + 5), (0, 1023)):
            words[[first, second]] = words[[second, first]]
            assert checksum(memory) != good, "words that changed places"
            words[[first, second]] = words[[second, first]]
    assert checksum(memory) == good
