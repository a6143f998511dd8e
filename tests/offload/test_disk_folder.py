"""A store's folder goes with its process, however that ends, and with no other."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sppo_hf.errors import ConfigError
from sppo_hf.offload import disk_folder
from sppo_hf.offload.disk_folder import StoreFolder

ROOT = Path(__file__).parent.parent.parent

# One interpreter for all, because importing torch takes longer than the rest. It forks a child for
# each way to end, tells what the directory holds afterwards, and then ends normally itself.
SCRIPT = """
import gc, json, os, signal, sys, warnings
from pathlib import Path
import torch
from sppo_hf.errors import OffloadError
from sppo_hf.offload.disk import DiskStore

warnings.simplefilter("ignore")  # newer Pythons warn of fork beside threads, which is the point
directory = Path(sys.argv[1])
names = lambda: sorted(path.name for path in directory.iterdir())
memory = torch.arange(9000, dtype=torch.int16).view(torch.uint8)


def make():
    store = DiskStore(directory, slab_bytes=1 << 16)
    write = store.start_write(memory)
    write.ticket.wait()
    return store, write


def run(child):
    number = os.fork()
    if number == 0:
        try:
            child()
        finally:
            os._exit(7)
    return os.waitpid(number, 0)[1]


def killed():
    store, _ = make()
    os.kill(os.getpid(), signal.SIGKILL)


def left_at_once():
    store, _ = make()
    os._exit(0)


told = {"killed_status": run(killed), "after_kill": names()}
told["left_status"] = run(left_at_once)
told["after_exit_without_cleanup"] = names()
store, write = make()
told["after_new_store"] = names() == [store.path.name]


def forked():
    global store
    try:
        store.start_read(write.extent, torch.zeros_like(memory))
    except OffloadError as error:
        refused = "forked" in str(error)
    try:
        write.ticket.done()
    except OffloadError as error:
        refused = refused and "forked" in str(error)
    store.close()
    del store
    gc.collect()
    os._exit(3 if refused else 4)


told["forked_status"] = os.waitstatus_to_exitcode(run(forked))
target = torch.zeros_like(memory)
store.start_read(write.extent, target).wait()
told["intact_after_fork"] = bool(torch.equal(target, memory)) and names() == [store.path.name]
# The child has none of our files open: its lock would outlive us.
reader, writer = os.pipe()
if os.fork() == 0:
    folders = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
               if os.path.exists(f"/proc/self/fd/{fd}")]
    os.write(writer, json.dumps([name for name in folders if "sppo-" in name]).encode())
    os._exit(0)
told["open_in_child"] = json.loads(os.read(reader, 4096))
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], Path]:
    directory = tmp_path_factory.mktemp("stores")
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), directory


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
class TestEndings:
    def test_a_killed_process_leaves_its_folder_to_the_next_store(
        self, told: tuple[dict[str, list[str]], Path]
    ) -> None:
        said = told[0]
        assert said["killed_status"] == signal.SIGKILL
        assert len(said["after_kill"]) == 1
        assert len(said["after_exit_without_cleanup"]) == 1
        assert said["after_kill"] != said["after_exit_without_cleanup"]
        assert said["after_new_store"] is True

    def test_a_normal_end_leaves_nothing(self, told: tuple[dict[str, list[str]], Path]) -> None:
        assert not list(told[1].iterdir())

    def test_a_forked_child_can_neither_use_nor_remove_it(
        self, told: tuple[dict[str, list[str]], Path]
    ) -> None:
        assert told[0]["forked_status"] == 3
        assert told[0]["intact_after_fork"] is True

    @pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
    def test_a_forked_child_does_not_keep_the_lock(
        self, told: tuple[dict[str, list[str]], Path]
    ) -> None:
        assert told[0]["open_in_child"] == []


def folder_name(*, host: str | None = None, number: int = 1) -> str:
    return f"sppo-{host or disk_folder._host()}-{os.getpid()}-{number:016x}"


def make_leftover(directory: Path, name: str, *, num_bytes: int = 5000) -> Path:
    path = directory / name
    path.mkdir()
    (path / "lock").touch()
    (path / "slab-0000.bin").write_bytes(bytes(num_bytes))
    return path


def test_a_folder_is_made_with_its_parents_and_removed_once(tmp_path: Path) -> None:
    folder = StoreFolder(tmp_path / "a" / "b")
    assert folder.path.parent == tmp_path / "a" / "b"
    assert [path.name for path in folder.path.iterdir()] == ["lock"]
    (folder.path / "slab-0000.bin").write_bytes(b"x")
    folder.remove()
    folder.remove()
    assert not list((tmp_path / "a" / "b").iterdir())


def test_folders_whose_owner_lives_are_kept(tmp_path: Path) -> None:
    first, second = StoreFolder(tmp_path), StoreFolder(tmp_path)
    assert first.path.is_dir()
    assert second.path.is_dir()
    first.remove()
    assert [path.name for path in tmp_path.iterdir()] == [second.path.name]
    second.remove()


def test_leftovers_are_removed_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=disk_folder.__name__)
    leftovers = [make_leftover(tmp_path, folder_name(number=number)) for number in range(3)]
    taken_bytes = sum(
        file.stat().st_blocks * 512 for leftover in leftovers for file in leftover.iterdir()
    )
    (tmp_path / folder_name(number=9)).mkdir()  # its maker died before it had a lock
    folder = StoreFolder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [folder.path.name]
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(tmp_path) in message
    assert "removed 4 folders" in message
    assert f"{taken_bytes} bytes" in message
    folder.remove()


def test_what_others_made_is_kept(tmp_path: Path) -> None:
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


def test_a_leftover_that_cannot_be_removed_is_told_and_kept(
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


def test_another_name_is_tried_where_the_lock_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [False, True]
    monkeypatch.setattr(disk_folder, "_take_lock", lambda descriptor: answers.pop(0))
    folder = StoreFolder(tmp_path)
    assert not answers
    assert len(list(tmp_path.iterdir())) == 2  # the other process is about to remove one
    folder.remove()


def test_another_name_is_tried_where_the_new_folder_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_lock = disk_folder._take_lock
    removed: list[Path] = []

    def remove_first(descriptor: int) -> bool:
        if not removed:
            (path,) = tmp_path.iterdir()
            removed.append(path)
            (path / "lock").unlink()
            path.rmdir()
        return take_lock(descriptor)

    monkeypatch.setattr(disk_folder, "_take_lock", remove_first)
    folder = StoreFolder(tmp_path)
    assert folder.path not in removed
    assert folder.path.is_dir()
    folder.remove()


def test_a_filesystem_without_locks_works_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(descriptor: int) -> bool:
        raise OSError("No locks available")

    monkeypatch.setattr(disk_folder, "_take_lock", no_locks)
    first = StoreFolder(tmp_path)
    second = StoreFolder(tmp_path)
    assert first.path.is_dir()
    assert any(f"{tmp_path}: no file locks" in record.getMessage() for record in caplog.records)
    first.remove()
    second.remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_file_in_the_way_is_refused_by_name(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    path = f"{tmp_path}/file{below}"
    with pytest.raises(ConfigError, match=f"offload_dir is '{path}'.*Remedy: name such a folder"):
        StoreFolder(Path(path))


def test_a_directory_that_cannot_be_written_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match=f"offload_dir is '{tmp_path}'.*Permission denied"):
        StoreFolder(tmp_path)


def test_free_bytes_are_known_even_when_the_folder_is_gone(tmp_path: Path) -> None:
    folder = StoreFolder(tmp_path)
    (folder.path / "lock").unlink()
    folder.path.rmdir()
    assert folder.free_bytes > 0
    folder.remove()
