"""Marks tell complete checkpoints from torn ones."""

from pathlib import Path

import pytest

from sppo_hf.errors import ConfigError
from sppo_hf.runtime.checkpoint_marks import (
    MARK_NAME,
    mark_complete,
    mark_incomplete,
    newest_complete,
    read_mark,
    refuse_torn,
    what_is_torn,
)


def save(folder: Path) -> Path:
    mark_incomplete(folder)
    (folder / "model.safetensors").write_bytes(b"12345")
    (folder / "config.json").write_text("{}")
    (folder / "sppo_optimizer").mkdir()
    (folder / "sppo_optimizer" / "__0_0.distcp").write_bytes(b"123")
    assert what_is_torn(folder) == "its save did not come to its end"
    mark_complete(folder, {"layout": {"pp_size": 2}})
    return folder


def test_a_complete_folder_stays_complete_when_files_are_added_or_edited(tmp_path: Path):
    folder = save(tmp_path / "checkpoint-1")
    assert what_is_torn(folder) is None
    assert read_mark(folder) == {
        "complete": True,
        "layout": {"pp_size": 2},
        "files": {"model.safetensors": 5, "config.json": None, "sppo_optimizer/__0_0.distcp": 3},
    }
    (folder / "config.json").write_text('{"edited": 1}')
    (folder / "optimizer.pt").write_bytes(b"1")
    assert what_is_torn(folder) is None
    refuse_torn(folder)


@pytest.mark.parametrize(
    ("name", "content", "lacks"),
    [
        ("model.safetensors", b"1234", "model.safetensors has 4 bytes instead of 5"),
        ("sppo_optimizer/__0_0.distcp", None, "sppo_optimizer/__0_0.distcp is missing"),
        ("config.json", None, "config.json is missing"),
        (MARK_NAME, b"{", "its save did not come to its end"),
        (MARK_NAME, None, "it has no trainer_state.json, which is written last"),
    ],
)
def test_what_is_gone_or_cut_is_named(tmp_path: Path, name, content, lacks):
    folder = save(tmp_path / "checkpoint-1")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    assert what_is_torn(folder) == lacks


def test_a_folder_of_the_trainers_own_is_complete_with_its_state(tmp_path: Path):
    (tmp_path / "trainer_state.json").write_text("{}")
    assert what_is_torn(tmp_path) is None


def test_checkpoints_inside_a_folder_are_none_of_its_files(tmp_path: Path):
    save(tmp_path / "checkpoint-1")
    mark_complete(tmp_path, {})
    assert read_mark(tmp_path) == {"complete": True, "files": {}}


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
        refuse_torn(tmp_path / "checkpoint-11")
