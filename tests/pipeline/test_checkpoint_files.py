"""Files of checkpoints: what is written is read again, and errors name the file."""

import errno
import json
import math
import os
import resource
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sppo_hf.errors import ConfigError, PipelineError
from sppo_hf.pipeline import checkpoint, checkpoint_files
from sppo_hf.pipeline.checkpoint_files import (
    MARK_NAME,
    TensorFiles,
    check_complete,
    decode,
    digests_of,
    encode,
    find_damage,
    mark_complete,
    mark_incomplete,
    newest_complete,
    read_json,
    read_mark,
    reading,
    write_json,
    write_tensors,
    writing,
)

TENSORS = {
    "weight": torch.arange(24.0).reshape(4, 6).t(),
    "half": torch.randn(3, 5).bfloat16(),
    "small": torch.randn(7).to(torch.float8_e4m3fn),
    "step": torch.tensor(3.0),
    "flags": torch.tensor([True, False, True]),
    "none": torch.empty(0, 4),
    "ids": torch.arange(5),
    "words": torch.tensor([1, 2**32 - 1], dtype=torch.uint32),
    "complex": torch.randn(2, dtype=torch.complex64),
}


def test_written_tensors_are_read_by_safetensors(tmp_path: Path):
    digest = write_tensors(TENSORS, tmp_path / "a.safetensors")
    seen = load_file(tmp_path / "a.safetensors")
    assert seen.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert seen[name].dtype == tensor.dtype, name
        assert seen[name].shape == tensor.shape, name
        ours, theirs = (t.contiguous().view(-1).view(torch.uint8) for t in (seen[name], tensor))
        assert torch.equal(ours, theirs), name
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert digests_of([tmp_path / "a.safetensors"]) == [digest]


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 1000])
def test_digests_are_those_of_blocks_and_find_every_flipped_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
):
    monkeypatch.setattr(checkpoint_files, "BLOCK_BYTES", 64)
    monkeypatch.setattr(checkpoint_files, "_READ_BYTES", 24)
    path, data = tmp_path / "file", os.urandom(size)
    path.write_bytes(data)
    crcs = [zlib.crc32(data[at : at + 64]).to_bytes(4, "little") for at in range(0, size, 64)]
    whole = f"{zlib.crc32(b''.join(crcs)):08x}"
    assert digests_of([path, path]) == [(size, whole)] * 2
    hasher = checkpoint_files.Hasher()
    for at in range(0, size, 37):
        hasher.update(memoryview(data)[at : at + 37])
    assert hasher.digest() == (size, whole)
    for byte in range(0, size, 13):
        changed = bytearray(data)
        changed[byte] ^= 1 << byte % 8
        path.write_bytes(changed)
        assert digests_of([path]) != [(size, whole)]


def test_values_come_back_as_they_were(tmp_path: Path):
    value = {
        "numbers": [1, 0.1, -0.0, True, None, math.inf, -math.inf, 10**20],
        "betas": (0.9, (0.999, "text")),
        "milestones": Counter({30: 1, 80: 2}),
        "!tag": {1: "one", "1": "text"},
        "dtype": torch.bfloat16,
        "moments": {"a": torch.randn(3), "b": [torch.tensor(4)]},
        "state": ("MT19937", np.arange(5, dtype=np.uint32), np.float64(0.5)),
    }
    tensors: dict[str, torch.Tensor] = {}

    def keep(path: str, tensor: torch.Tensor) -> str:
        tensors[path] = tensor
        return "t.safetensors"

    write_json({"value": encode(value, "at", keep)}, tmp_path / "index.json")
    write_tensors(tensors, tmp_path / "t.safetensors")
    back = decode(read_json(tmp_path / "index.json")["value"], "at", TensorFiles(tmp_path).read)
    assert repr(back) == repr(value).replace("np.float64(0.5)", "0.5")
    assert isinstance(back["milestones"], Counter)
    assert math.isnan(decode(encode(math.nan, "at", keep), "at", TensorFiles(tmp_path).read))


@pytest.mark.parametrize(
    "value",
    [print, object(), {(1, 2): 3}, {"a": {1, 2}}, torch.randn(2, 2).to_sparse(), b"bytes"],
    ids=["function", "object", "tuple-key", "set", "sparse", "bytes"],
)
def test_what_could_only_be_stored_as_code_is_refused_when_it_is_saved(value):
    with pytest.raises(ConfigError, match=r"schedulers/0.*(without code|cannot hold)"):
        encode([value], "schedulers", lambda path, tensor: "file")


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"[]",
        b"[" * 200_000,
        b"\xff\xfe",
        b'{"a": ' + b"1" * 5000 + b"}",
        pytest.param(b" " * (checkpoint_files.MAX_JSON + 1), id="large"),
    ],
    ids=lambda value: repr(value[:8]),
)
def test_json_that_is_damaged_is_named(tmp_path: Path, damaged: bytes):
    (tmp_path / "index.json").write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"index\.json' cannot be read"):
        read_json(tmp_path / "index.json")


@pytest.mark.parametrize(
    "stored",
    [
        {"!tensor": "../t.safetensors"},
        {"!tensor": "/etc/passwd"},
        {"!tensor": "x" * 6000},
        {"!tensor": 5},
        {"!tensor": "other.safetensors"},
        {"!tensor": "t.safetensors", "!tuple": []},
        {"!reduce": ["os.system", "true"]},
        {"!dict": 4},
        {"!dict": [[[1], 2]]},
        {"!dtype": "load"},
        {"!float": "1"},
        {"!tuple": [10**400]},
        {"!array": "t.safetensors"},
    ],
    ids=lambda stored: repr(stored)[:40],
)
def test_hostile_values_are_refused(tmp_path: Path, stored):
    write_tensors({"at/a": torch.ones(2).bfloat16()}, tmp_path / "t.safetensors")
    with pytest.raises(ConfigError), reading(tmp_path / "index.json"):
        decode({"a": stored}, "at", TensorFiles(tmp_path).read)


def test_a_damaged_file_of_tensors_is_named(tmp_path: Path):
    path = tmp_path / "t.safetensors"
    write_tensors({"a": torch.ones(20)}, path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:3], b"\xff" * 40, whole[:8] + b"[" + whole[9:]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"t\.safetensors' cannot be read"):
            TensorFiles(tmp_path).read("t.safetensors", "a")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"no ordinary file"):
        TensorFiles(tmp_path).read("t.safetensors", "a")


def test_what_the_disk_refuses_names_the_path(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    asked = {
        "a.safetensors": lambda path: write_tensors({"a": torch.ones(100_000)}, path),
        "index.json": lambda path: write_json({"a": [0] * 100_000}, path),
        "optimizer.pt": lambda path: torch.save(torch.ones(100_000), path),
    }
    for name, write in asked.items():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(PipelineError, match=rf"{name}' could not be written") as refused:
                with writing(tmp_path / name):
                    write(tmp_path / name)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "ulimit -f" in str(refused.value)
        assert name == "optimizer.pt" or "File too large" in str(refused.value)


def test_errors_of_a_network_are_not_blamed_on_the_disk(tmp_path: Path):
    for error in (ConnectionResetError(errno.ECONNRESET, "reset"), OSError("HTTP 500")):
        with pytest.raises(type(error)), writing(tmp_path):
            raise error
    with pytest.raises(RuntimeError, match="gloo"), writing(tmp_path):
        raise RuntimeError("gloo: connection closed by peer")


def test_a_json_file_is_written_without_a_trace_beside_it(tmp_path: Path):
    write_json({"a": [1, {"b": None}]}, tmp_path / "index.json")
    assert json.loads((tmp_path / "index.json").read_text()) == {"a": [1, {"b": None}]}
    assert [path.name for path in tmp_path.iterdir()] == ["index.json"]


# -- marks


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
    mark_complete(tmp_path, {}, existing=before)
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
    monkeypatch.setattr(checkpoint, "_world_group", lambda world: None)
    monkeypatch.setattr(checkpoint.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(checkpoint.dist, "get_world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(checkpoint.dist, "get_rank", lambda rank=rank: rank)

        def make_on_all_ranks(make, group, *, share, rank=rank):
            assert share(make()) == found[rank]
            return found[rank], found

        monkeypatch.setattr(checkpoint, "make_on_all_ranks", make_on_all_ranks)
        assert (checkpoint.find_damage_together(tmp_path) is not None) is bool(damaged)
