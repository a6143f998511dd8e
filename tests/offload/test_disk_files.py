"""Slab files with and without O_DIRECT, their checksums, and folders that leave nothing behind."""

import errno
import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.device_facts import device_facts
from sppo_hf.errors import ConfigError
from sppo_hf.offload import disk_files
from sppo_hf.offload.disk_files import (
    BLOCK_BYTES,
    Bytes,
    SlabFile,
    StoreFolder,
    aligned_bytes,
)
from sppo_hf.offload.slabs import round_up
from sppo_hf.offload.store import checksum
from tests.offload.faulty_disk import FaultyDisk
from tests.pipeline.fork_server import fork_server

NUM_BYTES = 16 * BLOCK_BYTES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slab.bin"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_files, "PIECE_BYTES", 3 * BLOCK_BYTES)


def memories(seed: int = 0) -> Iterator[Bytes]:
    """Yield random bytes of aligned and unaligned lengths and addresses."""
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
        assert source.size <= sum(moved) <= round_up(source.size, BLOCK_BYTES)
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


def test_space_is_reserved_at_once(path: Path) -> None:
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


def test_a_file_swapped_in_under_its_name_is_not_written(
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


def test_neighbouring_bytes_are_unchanged(path: Path) -> None:
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


@pytest.mark.parametrize("max_bytes", [1000, BLOCK_BYTES + 1, 2 * BLOCK_BYTES])
@pytest.mark.parametrize("direct", [True, False])
def test_partial_transfers_are_continued(
    path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int, direct: bool
) -> None:
    faulty = FaultyDisk(monkeypatch)
    file = SlabFile(path, NUM_BYTES, keep_name=False)
    file._is_direct = direct and file._is_direct
    faulty.max_bytes = max_bytes
    check_round_trips(file)
    assert max(moved for _, moved in faulty.writes) <= round_up(max_bytes, BLOCK_BYTES)
    file.close()


def test_the_unaligned_rest_of_a_partial_transfer_goes_through_the_page_cache(
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


def test_a_file_system_that_refuses_o_direct_is_used_without_it(
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


def test_a_file_system_whose_o_direct_fails_is_used_without_it(
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


def test_another_error_of_o_direct_is_raised(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = FaultyDisk(monkeypatch)
    file = SlabFile(path, NUM_BYTES, keep_name=False)
    faulty.errors = [OSError(errno.EIO, "Input/output error")]
    with pytest.raises(OSError, match="Input/output"):
        file.write(aligned_bytes(BLOCK_BYTES), 0, lambda _: None)
    assert not faulty.writes
    file.close()


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_without_fallocate_the_free_bytes_are_checked(
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
def test_a_checksum_detects_every_flipped_bit_and_swap(num_bytes: int) -> None:
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


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_no_file_remains_however_a_process_ends(tmp_path: Path) -> None:
    """Named files of a killed process are removed by the next store."""
    jobs = [{"named": named, "finalized": True} for named in (False, True)]
    ended = fork_server().launch_all(
        "tests.offload.ending_stores", jobs, ranks=[1, 1], folder=tmp_path
    )
    told = []
    for index, one in enumerate(ended):
        assert one.codes == [0], one.logs
        told.append(json.loads((tmp_path / str(index) / "told.json").read_text()))
        assert told[-1]["codes"] == [-signal.SIGKILL, -signal.SIGTERM, 0]
        assert told[-1]["forked_code"] == 3, "a forked child is refused"
        if os.path.exists("/proc/self/fd"):
            assert told[-1]["open_in_child"] == []
        stores = tmp_path / str(index) / "stores"
        assert not list(stores.iterdir()), "a normal end leaves nothing"
    nameless, named = told
    assert nameless["left"] == [[], [], []]
    assert nameless["after_new_store"] == []
    assert nameless["intact_after_fork"] == []
    assert [len(names) for names in named["left"]] == [1, 1, 1]
    assert len({name for names in named["left"] for name in names}) == 3
    assert len(named["after_new_store"]) == 1
    assert named["intact_after_fork"] == named["after_new_store"]


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a removed file cannot be used."""
    monkeypatch.setattr(disk_files, "_why_names_are_needed", lambda directory: "a test says so")


def folder_name(*, host: str | None = None, number: int = 1) -> str:
    return f"sppo-{host or disk_files._host_name()}-{os.getpid()}-{number:016x}"


def make_leftover(directory: Path, name: str, *, num_bytes: int = 5000) -> Path:
    path = directory / name
    path.mkdir()
    (path / "lock").touch()
    (path / "slab-0000.bin").write_bytes(bytes(num_bytes))
    return path


def test_files_have_no_names_and_take_space_until_they_are_closed(tmp_path: Path) -> None:
    folder = StoreFolder(tmp_path / "a")
    assert folder.path == tmp_path / "a"
    assert not folder.keeps_names
    file = folder.new_file(BLOCK_BYTES)
    assert not list(folder.path.iterdir())
    assert os.fstat(file._buffered).st_blocks > 0
    file.close()
    folder.remove()
    folder.remove()
    assert folder.path.is_dir(), "the user's own folder stays"


def test_a_relative_folder_is_resolved_when_the_store_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = StoreFolder(Path("here"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    folder.new_file(BLOCK_BYTES).close()
    assert (tmp_path / "here").is_dir()
    assert not list((tmp_path / "elsewhere").iterdir())
    folder.remove()


@pytest.mark.parametrize("call", ["unlink", "fallocate", "pwritev", "preadv", "bytes"])
def test_a_file_system_without_removed_files_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def refuse(descriptor: Any, *_: object) -> int:
        if call == "unlink" or not os.fstat(descriptor).st_nlink:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        raise AssertionError("only the trial block is written here")

    def other_bytes(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return buffers[0].nbytes

    if call == "unlink":
        monkeypatch.setattr(Path, "unlink", refuse)
    elif call == "bytes":
        monkeypatch.setattr(os, "preadv", other_bytes)
    else:
        monkeypatch.setattr(os, "posix_fallocate" if call == "fallocate" else call, refuse)
    folder = StoreFolder(tmp_path)
    monkeypatch.undo()
    assert folder.keeps_names
    assert folder.path.parent == tmp_path
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(folder.path) in message
    assert ("other bytes" if call == "bytes" else os.strerror(errno.ESTALE)) in message
    file = folder.new_file(BLOCK_BYTES)
    assert file.path.exists()
    file.close()
    folder.remove()
    assert [path.suffix for path in tmp_path.iterdir()] == [".bin"] * (call == "unlink")


def test_a_full_disk_says_nothing_about_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    folder = StoreFolder(tmp_path)
    assert not folder.keeps_names
    assert not list(tmp_path.iterdir())
    folder.remove()


@pytest.mark.usefixtures("named")
def test_a_private_folder_is_made_and_removed_once(tmp_path: Path) -> None:
    folder = StoreFolder(tmp_path / "a")
    assert folder.path.parent == tmp_path / "a"
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.path.iterdir()] == ["lock"]
    folder.new_file(BLOCK_BYTES).close()
    assert len(list(folder.path.iterdir())) == 2
    folder.remove()
    folder.remove()
    assert not list((tmp_path / "a").iterdir())


@pytest.mark.usefixtures("named")
def test_folders_of_living_processes_are_kept(tmp_path: Path) -> None:
    first, second = StoreFolder(tmp_path), StoreFolder(tmp_path)
    assert first.path.is_dir()
    assert second.path.is_dir()
    first.remove()
    assert [path.name for path in tmp_path.iterdir()] == [second.path.name]
    second.remove()


def test_leftovers_are_removed_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=disk_files.__name__)
    leftovers = [make_leftover(tmp_path, folder_name(number=number)) for number in range(3)]
    taken_bytes = sum(
        file.stat().st_blocks * 512 for leftover in leftovers for file in leftover.iterdir()
    )
    (tmp_path / folder_name(number=9)).mkdir()  # its maker died before it had a lock
    folder = StoreFolder(tmp_path)
    assert not list(tmp_path.iterdir())
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(tmp_path) in message
    assert "removed 4 folders" in message
    assert f"{taken_bytes} bytes" in message
    folder.remove()


def test_folders_of_others_are_kept(tmp_path: Path) -> None:
    kept = [
        make_leftover(tmp_path, folder_name(host="another.host")),
        make_leftover(tmp_path, "sppo-results"),
        make_leftover(tmp_path, f"old-{folder_name()}"),
    ]
    elsewhere = make_leftover(tmp_path, "elsewhere")
    (tmp_path / folder_name(number=2)).symlink_to(elsewhere)
    (tmp_path / folder_name(number=3)).touch()
    unlocked = tmp_path / folder_name(number=4)  # files, but no lock: not a store's doing
    unlocked.mkdir()
    (unlocked / "notes").touch()
    StoreFolder(tmp_path).remove()
    for path in (*kept, elsewhere):
        assert (path / "slab-0000.bin").exists()
    assert (unlocked / "notes").exists()
    assert len(list(tmp_path.iterdir())) == 7


def test_a_leftover_that_cannot_be_removed_is_logged_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leftover = make_leftover(tmp_path, folder_name())
    (leftover / "a_folder").mkdir()
    folder = StoreFolder(tmp_path)
    assert leftover.is_dir()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(leftover) in record.getMessage()
    folder.remove()


@pytest.mark.usefixtures("named")
def test_another_name_is_tried_if_the_lock_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [False, True]
    monkeypatch.setattr(disk_files, "_take_lock", lambda descriptor: answers.pop(0))
    folder = StoreFolder(tmp_path)
    assert not answers
    assert len(list(tmp_path.iterdir())) == 2  # the other process is about to remove one
    folder.remove()


@pytest.mark.usefixtures("named")
def test_another_name_is_tried_if_the_new_folder_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_lock = disk_files._take_lock
    removed: list[Path] = []

    def remove_first(descriptor: int) -> bool:
        if not removed:
            (path,) = tmp_path.iterdir()
            removed.append(path)
            (path / "lock").unlink()
            path.rmdir()
        return take_lock(descriptor)

    monkeypatch.setattr(disk_files, "_take_lock", remove_first)
    folder = StoreFolder(tmp_path)
    assert folder.path not in removed
    assert folder.path.is_dir()
    folder.remove()


@pytest.mark.usefixtures("named")
def test_a_file_system_without_locks_works_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(descriptor: int) -> bool:
        raise OSError("No locks available")

    monkeypatch.setattr(disk_files, "_take_lock", no_locks)
    first = StoreFolder(tmp_path)
    second = StoreFolder(tmp_path)
    assert first.path.is_dir()
    assert any(f"{tmp_path}: no file locks" in record.getMessage() for record in caplog.records)
    first.remove()
    second.remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    path = f"{tmp_path}/file{below}"
    with pytest.raises(ConfigError, match=f"offload_dir is '{path}'.*Remedy: name such a folder"):
        StoreFolder(Path(path))


@pytest.mark.parametrize(
    ("name", "seen", "reason"),
    [
        ("x" * 300, "x" * 300, "File name too long"),
        ("x/" * 2500, "…x/x/x", "File name too long"),
        ("a\0b", "a\\\\x00b", "null (byte|character)"),
        ("a\ud800b", "a\\\\ud800b", "surrogates not allowed"),
    ],
    ids=["long component", "long path", "zero byte", "surrogate"],
)
def test_an_impossible_folder_name_is_refused(
    tmp_path: Path, name: str, seen: str, reason: str
) -> None:
    directory = tmp_path / name
    attempts = [lambda: StoreFolder(directory)]
    if len(name) < 4096 and name.isprintable():  # others the settings refuse already
        attempts.append(lambda: _ask_for_free_bytes(directory))
    for attempt in attempts:
        with pytest.raises(ConfigError, match=rf"offload_dir is '.*{seen}.*{reason}") as caught:
            attempt()
        assert str(caught.value).isprintable(), "it can be written to any terminal"
        assert "Allowed: a folder" in str(caught.value)
        assert "Remedy: name such a folder" in str(caught.value)
    assert not list(tmp_path.iterdir())


def _ask_for_free_bytes(directory: Path) -> None:
    """Look up the free bytes of a folder, as planning does first."""
    config = SPPOConfig(offload_dir=str(directory))
    if device_facts(torch.device("cpu"), config).memory_bytes["disk"]:
        StoreFolder(directory)  # a parent's free bytes are as good; the folder itself is not made


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_unreadable_parent_is_refused(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    reader, writer = os.pipe()
    if os.fork() == 0:  # root may search everything, so a child becomes somebody else
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            for attempt in (StoreFolder, _ask_for_free_bytes):
                try:
                    attempt(locked / "folder")
                except ConfigError as error:
                    os.write(writer, f"{error}\n".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        lines = told.read().splitlines()
    os.wait()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(
            f"offload_dir is '{locked}/folder', which cannot be used: Permission"
        )
        assert "Remedy: name such a folder" in line


@pytest.mark.parametrize("call", ["mkdir", "exists", "open"])
def test_an_unusable_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os if call == "open" else Path, call, refuse)
    with pytest.raises(ConfigError, match=f"offload_dir is '{tmp_path}'.*Permission denied"):
        _ask_for_free_bytes(tmp_path) if call == "exists" else StoreFolder(tmp_path)


def test_free_bytes_are_known_even_when_the_folder_is_gone(tmp_path: Path) -> None:
    folder = StoreFolder(tmp_path / "folder")
    folder.path.rmdir()
    assert folder.free_bytes > 0
    folder.remove()


def test_a_missing_parent_is_refused(tmp_path: Path) -> None:
    """For example a disk that is not mounted: files would fill the disk of the parent folder."""
    for attempt in (StoreFolder, _ask_for_free_bytes):
        with pytest.raises(ConfigError, match=r"not-mounted' does not exist.*Remedy: name such"):
            attempt(tmp_path / "not-mounted" / "offload")
    assert not list(tmp_path.iterdir())
    (tmp_path / "not-mounted").mkdir()
    _ask_for_free_bytes(tmp_path / "not-mounted" / "offload")
    assert StoreFolder(tmp_path / "not-mounted" / "offload").path.is_dir()
