"""Checkpoints through the Trainer and Accelerate: any layout resumes any other's, on one curve."""

import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sppo_hf.errors import ConfigError
from sppo_hf.integrations.checkpoints import EXPORT_NOTE_NAME, TrainerCheckpoints
from sppo_hf.pipeline.checkpoint_files import MARK_NAME, find_damage, mark_incomplete
from tests.integrations.checkpoint_ranks import STEPS, make_trainer
from tests.integrations.launch import make_once, run_ranks
from tests.integrations.training import make_model

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

NEAR = 1e-4
TWO = {"pp_size": 2, "num_chunks": 2}
FOUR = {"pp_size": 4, "num_chunks": 2}


def launch(folder: Path, ranks: int, runs: list[dict]) -> dict[str, dict]:
    run_ranks("tests.integrations.checkpoint_ranks", {"runs": runs}, ranks, folder)
    return {run["name"]: json.loads((folder / f"{run['name']}.json").read_text()) for run in runs}


def series(seen: dict, name: str = "loss", after: int = 0) -> list[float]:
    return [e[name] for e in seen["history"] if name in e and e["step"] > after]


def train_here(run: dict, folder: Path, resume: object = None, **changes) -> dict:
    trainer = make_trainer(run, folder, **changes)
    trainer.train(resume_from_checkpoint=resume)
    return {"history": trainer.state.log_history}


def train_on_two(folder: Path) -> None:
    """All that two ranks do, and one process without SPPO from the start to the end."""
    train_here({"name": "plain"}, folder)
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    limited = {**best, "save_steps": 2, "save_total_limit": 1}
    launch(
        folder,
        2,
        [
            {"name": "whole", "settings": TWO, "final": "final"},
            {
                "name": "again",
                "settings": TWO,
                "resume": str(folder / "whole" / "checkpoint-4"),
                "arguments": limited,
            },
            {"name": "from-plain", "settings": TWO, "resume": str(folder / "plain/checkpoint-4")},
            {"name": "adapters", "settings": TWO, "lora": True, "tied": True},
            {"name": "raw", "kind": "loop", "settings": TWO, "tied": True},
        ],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_once(tmp_path_factory, "checkpoints", train_on_two)


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict:
    """What the plain process has seen."""
    state = json.loads((folder / "plain" / f"checkpoint-{STEPS}/trainer_state.json").read_text())
    return {"history": state["log_history"]}


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, dict]:
    """What two ranks have seen, by run."""
    names = ("whole", "again", "from-plain", "adapters", "raw")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


def test_a_pipeline_follows_one_process(plain: dict, two: dict):
    for name in ("loss", "grad_norm", "learning_rate"):
        assert len(series(plain, name)) == STEPS
        assert series(two["whole"], name) == pytest.approx(series(plain, name), abs=NEAR, rel=NEAR)


@pytest.mark.parametrize("name", ["again", "from-plain"])
def test_two_ranks_resume(plain: dict, two: dict, name: str):
    assert len(series(two[name], after=4)) == STEPS - 4
    for key in ("loss", "grad_norm", "learning_rate"):
        expected = series(plain, key, after=4)
        assert series(two[name], key, after=4) == pytest.approx(expected, abs=NEAR, rel=NEAR)


def test_four_ranks_resume_what_two_saved(folder: Path, plain: dict, two: dict):
    resume = {"resume": str(folder / "whole" / "checkpoint-4")}
    runs = [
        {"name": "replicas", "settings": TWO, "rows": 1, **resume},
        {"name": "stages", "settings": FOUR, **resume},
    ]
    for name, seen in launch(folder, 4, runs).items():
        for key in ("loss", "grad_norm"):
            expected = series(plain, key, after=4)
            assert series(seen, key, after=4) == pytest.approx(expected, abs=NEAR, rel=NEAR), name


@pytest.mark.parametrize("settings", [None, {"num_chunks": 3}], ids=["without", "with"])
def test_one_process_resumes_without_sppo_and_with_it(
    folder: Path,
    plain: dict,
    two: dict,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict | None,
):
    copy = tmp_path / "checkpoint-4"
    shutil.copytree(folder / "whole" / "checkpoint-4", copy)
    run = {"name": "one", "settings": settings}
    if settings is None:
        with pytest.raises(FileNotFoundError, match=r"optimizer\.pt"):
            train_here(run, tmp_path, str(copy))
        note = copy / EXPORT_NOTE_NAME
        command = next(line for line in note.read_text().splitlines() if "python -c" in line)
        python, option, program = shlex.split(command)
        assert (python, option) == ("python", "-c")
        monkeypatch.chdir(copy)
        exec(program, {})
        assert not note.exists()
    seen = train_here(run, tmp_path, str(copy))
    for key in ("loss", "grad_norm", "learning_rate"):
        expected = series(plain, key, after=4)
        assert series(seen, key, after=4) == pytest.approx(expected, abs=NEAR, rel=NEAR)


def test_adapters_resume_in_one_process(folder: Path, two: dict, tmp_path: Path):
    run = {"name": "one", "settings": {"num_chunks": 3}, "lora": True, "tied": True}
    checkpoint = folder / "adapters" / "checkpoint-4"
    assert (checkpoint / "adapter_model.safetensors").exists()
    seen = train_here(run, tmp_path, str(checkpoint))
    expected = series(two["adapters"], after=4)
    assert len(expected) == STEPS - 4
    assert series(seen, after=4) == pytest.approx(expected, abs=NEAR, rel=NEAR)


def test_folders_are_ordinary_and_complete(folder: Path):
    assert (folder / "final" / "training_args.bin").exists()
    last = AutoModelForCausalLM.from_pretrained(folder / "plain" / f"checkpoint-{STEPS}")
    for path in (folder / "final", folder / "whole" / f"checkpoint-{STEPS}"):
        assert find_damage(path) is None
        loaded, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        for name, tensor in last.state_dict().items():
            assert torch.allclose(loaded.state_dict()[name], tensor, atol=NEAR), name


def test_old_checkpoints_are_deleted_and_the_best_is_loaded(folder: Path, two: dict):
    seen = two["again"]
    kept = {path.name for path in (folder / "again").glob("checkpoint-*")}
    best = Path(seen["best"]).name
    assert kept == {best, f"checkpoint-{STEPS}"}
    losses = [e["eval_loss"] for e in seen["history"] if "eval_loss" in e]
    assert seen["eval"] == pytest.approx(min(losses[:-1]), rel=1e-6)


def test_all_ranks_that_shard_a_model_see_the_folder_of_the_best_checkpoint(tmp_path: Path):
    """The Trainer looks for it before FSDP writes; a rank that sees none would not load it."""
    seen = []

    class Kind:
        is_fsdp_enabled = True
        model = torch.nn.Linear(1, 1)
        args = None
        state = SimpleNamespace(global_step=3)

        def _get_output_dir(self, trial: object) -> str:
            return str(tmp_path)

        def _save_checkpoint(self, model: object, trial: object) -> None:
            seen.append((tmp_path / "checkpoint-3").is_dir())

    trainer: Any = Kind()
    TrainerCheckpoints(trainer)._save_checkpoint(trainer.model, None)
    assert seen == [True]


def test_accelerates_own_calls(folder: Path, two: dict):
    seen = two["raw"]
    assert seen["resumed"] == seen["went_on"]
    assert seen["drawn"][0] == seen["drawn"][1]
    assert "save_model(folder)" in seen["refused"]
    assert seen["gathered"] == len(make_model().state_dict())
    assert not (folder / "never").exists()
    saved, gathered = (
        AutoModelForCausalLM.from_pretrained(folder / f"raw-{kind}").state_dict()
        for kind in ("saved", "gathered")
    )
    assert saved.keys() == gathered.keys()
    assert all(torch.equal(saved[name], gathered[name]) for name in saved)


def test_a_rank_that_dies_while_it_saves(tmp_path: Path, plain: dict):
    arguments = {"save_steps": 2, "save_total_limit": 1}
    run = {"name": "run", "settings": TWO, "arguments": arguments, "torn_at": 4}
    with pytest.raises(AssertionError, match="9"):
        launch(tmp_path, 2, [run])
    # Not deleted, though one is the limit and the new one lacks nothing but its mark.
    assert find_damage(tmp_path / "run" / "checkpoint-2") is None
    assert (tmp_path / "run" / "checkpoint-4" / "model.safetensors.index.json").exists()
    assert find_damage(tmp_path / "run" / "checkpoint-4") == "its save did not come to its end"
    with pytest.warns(UserWarning, match=r"checkpoint-4.*resuming from '.*checkpoint-2'"):
        seen = train_here({**run, "settings": {"num_chunks": 3}}, tmp_path, True)
    assert [e["step"] for e in seen["history"] if "loss" in e] == list(range(1, STEPS + 1))
    assert series(seen, after=2) == pytest.approx(series(plain, after=2), abs=NEAR, rel=NEAR)


def test_flipped_bytes_are_found_and_such_a_checkpoint_is_passed_over(
    folder: Path, plain: dict, two: dict, tmp_path: Path
):
    run = {"name": "run", "settings": {"num_chunks": 3}}
    for step in (4, 8):
        shutil.copytree(folder / "whole" / "checkpoint-4", tmp_path / f"run/checkpoint-{step}")
    damaged = tmp_path / "run" / "checkpoint-8"
    files = json.loads((damaged / MARK_NAME).read_text())["files"]
    shards = [f"sppo_optimizer/rank-0-{stage}.safetensors" for stage in range(2)]
    # Each rank has noted what it wrote.
    assert set(shards) < {name for name, noted in files.items() if noted is not None}
    data = bytearray((damaged / shards[1]).read_bytes())
    data[-100] ^= 1
    (damaged / shards[1]).write_bytes(data)
    with pytest.raises(ConfigError, match=rf"torn: the bytes of {shards[1]} are not"):
        make_trainer(run, tmp_path).train(str(damaged))
    with pytest.warns(UserWarning, match=r"rank-0-1.*resuming from '.*checkpoint-4'"):
        seen = train_here(run, tmp_path, True)
    expected = series(plain, after=4)
    assert series(seen, after=4) == pytest.approx(expected, abs=NEAR, rel=NEAR)


def test_a_torn_checkpoint_is_refused(folder: Path, two: dict, tmp_path: Path):
    run = {"name": "run", "settings": {"num_chunks": 3}}
    for step in (4, 8):
        shutil.copytree(folder / "whole" / "checkpoint-4", tmp_path / f"run/checkpoint-{step}")
    mark_incomplete(tmp_path / "run" / "checkpoint-8")
    with pytest.raises(ConfigError, match=r"checkpoint-8' is torn.*checkpoint-4', the newest"):
        make_trainer(run, tmp_path).train(str(tmp_path / "run" / "checkpoint-8"))
    mark_incomplete(tmp_path / "run" / "checkpoint-4")
    with pytest.raises(ConfigError, match=r"No checkpoint in .* is complete"):
        make_trainer(run, tmp_path).train(resume_from_checkpoint=True)
