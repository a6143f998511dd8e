"""Marks tell complete checkpoints from torn ones."""

import json
import os
from pathlib import Path

import pytest

from sppo_hf.errors import ConfigError
from sppo_hf.pipeline import checkpoint
from sppo_hf.pipeline.checkpoint_files import (
    MARK_NAME,
    check_complete,
    find_damage,
    mark_complete,
    mark_incomplete,
    newest_complete,
    read_mark,
)


def save(folder: Path) -> Path:
    mark_incomplete(folder)
    (folder / "model.safetensors").write_bytes(b"12345")
    (folder / "config.json").write_text("{}")
    (folder / "sppo_optimizer").mkdir()
    (folder / "sppo_optimizer" / "index.json").write_bytes(b"{ }")
    assert find_damage(folder) == "its save did not come to its end"
    mark_complete(folder, {"layout": {"pp_size": 2}})
    return folder


def test_a_complete_folder_stays_complete_when_files_are_added_or_edited(tmp_path: Path):
    folder = save(tmp_path / "checkpoint-1")
    assert find_damage(folder) is None
    assert read_mark(folder) == {
        "complete": True,
        "format": 2,
        "layout": {"pp_size": 2},
        "files": {
            "model.safetensors": [5, "770a59bd"],
            "config.json": None,
            "sppo_optimizer/index.json": [3, "75ed7ae7"],
        },
    }
    (folder / "config.json").write_text('{"edited": 1}')
    (folder / "optimizer.pt").write_bytes(b"1")
    assert find_damage(folder) is None
    check_complete(folder)


@pytest.mark.parametrize(
    ("name", "content", "lacks"),
    [
        ("model.safetensors", b"1234", "model.safetensors has 4 bytes instead of 5"),
        ("model.safetensors", b"12354", "the bytes of model.safetensors are not those"),
        ("sppo_optimizer/index.json", None, "sppo_optimizer/index.json is missing"),
        ("sppo_optimizer/index.json", b"{\t}", "the bytes of sppo_optimizer/index.json are not"),
        ("config.json", None, "config.json is missing"),
        (MARK_NAME, b"{", "its sppo_checkpoint.json is damaged"),
        (MARK_NAME, b"[" * 100_000, "its sppo_checkpoint.json is damaged"),
        (MARK_NAME, b'{"complete": true}', "its sppo_checkpoint.json is damaged"),
        (MARK_NAME, b'{"complete": true, "files": []}', "its sppo_checkpoint.json is damaged"),
        (MARK_NAME, b'{"complete": 1, "files": {}}', "its save did not come to its end"),
        (MARK_NAME, None, "it has no sppo_checkpoint.json, which is written last"),
    ],
)
def test_what_is_gone_or_cut_is_named(tmp_path: Path, name, content, lacks):
    folder = save(tmp_path / "checkpoint-1")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    assert str(find_damage(folder)).startswith(lacks)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "x" * 6000, "a\0b", ""])
@pytest.mark.parametrize("noted", [None, [3, "00000000"]])
def test_a_mark_that_names_files_elsewhere_is_damaged_and_nothing_is_asked_of_them(
    tmp_path: Path, name, noted
):
    folder = save(tmp_path / "checkpoint-1")
    (tmp_path / "secret").write_text("ok")
    mark = {"complete": True, "format": 2, "files": {name: noted}}
    (folder / MARK_NAME).write_text(json.dumps(mark))
    assert find_damage(folder) == "its sppo_checkpoint.json is damaged"


def test_a_mark_that_is_a_pipe_is_damaged_and_not_waited_for(tmp_path: Path):
    folder = save(tmp_path / "checkpoint-1")
    (folder / MARK_NAME).unlink()
    os.mkfifo(folder / MARK_NAME)
    assert find_damage(folder) == "its sppo_checkpoint.json is damaged"


def test_marks_of_the_former_format_are_read_and_of_a_later_one_refused(tmp_path: Path):
    folder = save(tmp_path / "checkpoint-1")
    former = {"complete": True, "files": {"model.safetensors": 5, "config.json": None}}
    (folder / MARK_NAME).write_text(json.dumps(former))
    assert find_damage(folder) is None
    later = {"complete": True, "format": 3, "files": "of another kind"}
    (folder / MARK_NAME).write_text(json.dumps(later))
    for ask in (check_complete, find_damage, lambda folder: newest_complete(folder.parent)):
        with pytest.raises(ConfigError, match=r"has format 3, of a later version .* up to 2"):
            ask(folder)


def test_a_share_of_the_digests_is_compared(tmp_path: Path):
    folder = save(tmp_path / "checkpoint-1")
    (folder / "model.safetensors").write_bytes(b"12354")
    assert [find_damage(folder, share=(rank, 2)) is None for rank in range(2)] == [False, True]


def test_files_that_were_there_before_are_no_part_of_a_save(tmp_path: Path):
    for name in ("stale.safetensors", "new.safetensors"):
        (tmp_path / name).write_bytes(b"1")
    before = mark_incomplete(tmp_path)
    (tmp_path / "new.safetensors").write_bytes(b"12")
    mark_complete(tmp_path, {}, before=before)
    assert list((read_mark(tmp_path) or {})["files"]) == ["new.safetensors"]


def test_a_folder_of_the_trainers_own_is_complete_with_its_state(tmp_path: Path):
    (tmp_path / "trainer_state.json").write_text("{}")
    assert find_damage(tmp_path) is None
    (tmp_path / "trainer_state.json").write_text("{")
    assert find_damage(tmp_path) == "its trainer_state.json is damaged"


def test_checkpoints_inside_a_folder_are_none_of_its_files(tmp_path: Path):
    save(tmp_path / "checkpoint-1")
    mark_complete(tmp_path, {})
    assert read_mark(tmp_path) == {"complete": True, "format": 2, "files": {}}


def test_the_newest_complete_one_is_found_by_number(tmp_path: Path):
    assert newest_complete(tmp_path / "nowhere") == (None, {})
    for step in (8, 9, 10, 11):
        save(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-final").mkdir()
    mark_incomplete(tmp_path / "checkpoint-11")
    (tmp_path / "checkpoint-10" / "model.safetensors").unlink()
    newest, torn = newest_complete(tmp_path)
    assert newest == tmp_path / "checkpoint-9"
    assert [folder.name for folder in torn] == ["checkpoint-11", "checkpoint-10"]
    with pytest.raises(ConfigError, match=r"checkpoint-11' is torn.*resume from .*checkpoint-9'"):
        check_complete(tmp_path / "checkpoint-11")


@pytest.mark.parametrize("damaged", ["a.safetensors", "b.safetensors", None])
def test_ranks_share_the_reading_and_agree(tmp_path: Path, monkeypatch, damaged: str | None):
    mark_incomplete(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(b"12")
    mark_complete(tmp_path, {})
    if damaged:
        (tmp_path / damaged).write_bytes(b"21")
    found = [find_damage(tmp_path, share=(rank, 2)) for rank in range(2)]
    monkeypatch.setattr(checkpoint, "_all_processes", lambda world: None)
    monkeypatch.setattr(checkpoint.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(checkpoint.dist, "get_world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(checkpoint.dist, "get_rank", lambda rank=rank: rank)

        def gather(group, own, rank=rank):
            assert own == found[rank]
            return found

        monkeypatch.setattr(checkpoint, "_gather_over", gather)
        assert (checkpoint.find_damage_together(tmp_path) is not None) is bool(damaged)
