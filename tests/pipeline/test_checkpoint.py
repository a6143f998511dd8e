"""Checkpoints of cut models: plain Transformers and PEFT load them, and so does any layout."""

import json
import random
import resource
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.distributed import checkpoint as dcp
from transformers import AutoModelForCausalLM

from sppo_hf.engine.model_parts import suppress_peft_warnings
from sppo_hf.errors import ConfigError, PipelineError
from sppo_hf.pipeline.checkpoint import RankCoords, load_weights, save_weights, saving
from sppo_hf.pipeline.checkpoint_files import (
    MARK_NAME,
    STATE_FOLDER,
    check_complete,
    find_damage,
    newest_complete,
)
from sppo_hf.pipeline.checkpoint_state import (
    has_state,
    load_random_state,
    load_state,
    random_state,
    read_full_state,
    save_state,
)
from sppo_hf.testing.tiny_models import build_tiny_model
from tests.integrations.launch import make_once, run_ranks
from tests.pipeline.checkpoint_ranks import fill_state, make_model, make_optimizer, moments

peft = pytest.importorskip("peft", reason="needs PEFT")

JOB = "tests.pipeline.checkpoint_ranks"
TWO = {"pp_size": 2}
INTERLEAVED = {"pp_size": 2, "pp_virtual_stages": 2, "pp_schedule": "interleaved_seq1f1b"}
MODELS = {
    "small-shards": {
        "family": "llama",
        "layers": 4,
        "dtype": "bfloat16",
        "max_shard_size": "8KB",
        "settings": TWO,
    },
    "tied": {"family": "gemma2", "layers": 6, "settings": INTERLEAVED},
    "experts": {"family": "qwen3_moe", "layers": 4, "settings": TWO},
    "adapters": {"family": "llama", "layers": 4, "lora": True, "settings": TWO},
}


def several_processes(test: Callable[..., None]) -> Callable[..., None]:
    """Mark what needs several of them."""
    return pytest.mark.process(pytest.mark.slow(test))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model saved by two pipelines of two ranks, and loaded by one pipeline of four."""
    tasks = [{"do": "save", "name": name, **model} for name, model in MODELS.items()]
    four = {"settings": {"pp_size": 4}, "seed": 5}
    tasks += [
        {**task, "do": "load", **changed} for task in tasks for changed in (four, {"seed": 5})
    ]
    return make_once(
        tmp_path_factory, "saved", lambda out: run_ranks(JOB, {"tasks": tasks}, 4, out)
    )


def reference(name: str, seed: int = 0):
    """The whole model in one process, stepped as the ranks stepped theirs, and its optimizer."""
    model = make_model({**MODELS[name], "seed": seed})
    optimizer = make_optimizer(model)
    if seed == 0:
        fill_state(optimizer, model)
    return model, optimizer


def assert_same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


@several_processes
@pytest.mark.parametrize("name", [n for n, m in MODELS.items() if "lora" not in m])
def test_from_pretrained_loads_the_same_tensors(saved: Path, name: str):
    loaded, info = AutoModelForCausalLM.from_pretrained(
        saved / name, output_loading_info=True, dtype="auto"
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    expected, _ = reference(name)
    assert_same_tensors(loaded.state_dict(), expected.state_dict())


@several_processes
@pytest.mark.parametrize("name", [n for n, m in MODELS.items() if "lora" not in m])
def test_the_folder_is_what_save_pretrained_writes(saved: Path, tmp_path: Path, name: str):
    expected, _ = reference(name)
    expected.save_pretrained(tmp_path, max_shard_size="1KB")
    plain, ours = (
        json.loads((folder / "model.safetensors.index.json").read_text())
        for folder in (tmp_path, saved / name)
    )
    assert ours["weight_map"].keys() == plain["weight_map"].keys()
    assert ours["metadata"] == plain["metadata"]
    # A rank writes what it holds, so there are as many files as writers at least.
    files = set(ours["weight_map"].values())
    assert files == {path.name for path in (saved / name).glob("*.safetensors")}
    assert len(files) == 2 or "max_shard_size" in MODELS[name]
    for file in files:
        with safe_open(saved / name / file, framework="pt") as shard:
            sizes = [shard.get_tensor(key).nbytes for key in shard.keys()]
        limit = {"8KB": 8000}.get(MODELS[name].get("max_shard_size"), 10**12)
        assert sum(sizes) <= limit or len(sizes) == 1
    configs = [
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path, saved / name)
    ]
    assert configs[0] == configs[1]


@several_processes
def test_peft_loads_the_adapters(saved: Path):
    expected, _ = reference("adapters")
    base = make_model({**MODELS["adapters"], "lora": False})
    with suppress_peft_warnings():
        loaded = peft.PeftModel.from_pretrained(base, saved / "adapters")
    assert_same_tensors(loaded.state_dict(), expected.state_dict())
    assert not (saved / "adapters" / "config.json").exists()


@several_processes
@pytest.mark.parametrize("name", MODELS)
def test_all_of_a_model_can_be_gathered(saved: Path, name: str):
    expected, _ = reference(name)
    gathered = torch.load(saved / f"{name}.gathered.pt")
    assert_same_tensors(gathered, dict(expected.state_dict()))


@several_processes
@pytest.mark.parametrize("pp_size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_of_any_layout_load_what_they_hold(saved: Path, name: str, pp_size: int):
    expected, optimizer = reference(name)
    weights = {n: float(t.double().sum()) for n, t in expected.state_dict().items()}
    states = moments(optimizer, expected)
    seen_weights, seen_states = {}, {}
    for rank in range(4):
        seen = json.loads((saved / f"{name}-{pp_size}-{rank}.json").read_text())
        if "lora" in MODELS[name]:  # the base, of another seed, is not in an adapter's folder
            seen["weights"] = {n: w for n, w in seen["weights"].items() if "lora" in n}
        assert seen["weights"].items() <= weights.items()
        assert seen["moments"].items() <= states.items()
        assert seen["last_epoch"] == 1
        assert seen["lr"] == pytest.approx(1e-3 * (1 / 3 + 2 / 15))
        seen_weights |= seen["weights"]
        seen_states |= seen["moments"]
        # Ranks 0 to 3 were (replica, stage) 00, 01, 10, 11; of four stages the last two were not.
        came_from = rank if pp_size == 2 or rank < 2 else 0
        assert (
            seen["drawn"]
            == torch.rand(1, generator=torch.Generator().manual_seed(100 + came_from)).item()
        )
    assert seen_weights == {n: w for n, w in weights.items() if n in seen_weights}
    assert seen_weights.keys() >= (weights.keys() if "lora" not in MODELS[name] else states.keys())
    assert seen_states == states


@several_processes
@pytest.mark.parametrize("name", MODELS)
def test_one_process_loads_it_all(saved: Path, name: str):
    expected, optimizer = reference(name)
    model, fresh = reference(name, seed=5)
    if "lora" in MODELS[name]:  # the base is not in an adapter's folder
        model, fresh = reference(name)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.zero_()
    load_weights(model, saved / name)
    load_state(saved / name, model, [fresh], [torch.optim.lr_scheduler.LinearLR(fresh)])
    assert_same_tensors(model.state_dict(), expected.state_dict())
    assert moments(fresh, model) == moments(optimizer, expected)
    load_random_state(saved / name, model)
    assert torch.initial_seed() == 100
    # And an optimizer that numbers its parameters, as one without SPPO does.
    plain, schedulers = read_full_state(saved / name)
    theirs = optimizer.state_dict()
    assert plain["state"].keys() == theirs["state"].keys()
    for index, values in theirs["state"].items():
        assert_same_tensors(plain["state"][index], values)
    assert [g["params"] for g in plain["param_groups"]] == [
        g["params"] for g in theirs["param_groups"]
    ]
    assert schedulers[0]["last_epoch"] == 1


@several_processes
@pytest.mark.parametrize("shards", [0, 1])
def test_a_save_that_a_rank_did_not_survive_is_torn(tmp_path: Path, shards: int):
    task = {"family": "llama", "layers": 4, "max_shard_size": "8KB", "settings": TWO}
    tasks = [
        {**task, "do": "save", "name": "checkpoint-1"},
        {**task, "do": "die", "name": "checkpoint-2", "shards": shards},
    ]
    with pytest.raises(AssertionError, match="9"):
        run_ranks(JOB, {"tasks": tasks}, 2, tmp_path)
    torn = tmp_path / "checkpoint-2"
    assert find_damage(torn) == "its save did not come to its end"
    assert not list(torn.glob("*.safetensors"))
    assert newest_complete(tmp_path)[0] == tmp_path / "checkpoint-1"
    with pytest.raises(ConfigError, match=r"checkpoint-2' is torn.*checkpoint-1', the newest"):
        check_complete(torn)
    AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")


def test_one_process_saves_and_loads(tmp_path: Path):
    model, optimizer = reference("tied")
    with saving(tmp_path, RankCoords()):
        save_weights(model, tmp_path)
        random.seed(3)
        np.random.seed(4)
        torch.manual_seed(5)
        save_state(tmp_path, model, [optimizer], [])
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    assert (tmp_path / "model.safetensors").exists()
    assert find_damage(tmp_path) is None
    loaded, fresh = reference("tied", seed=5)
    load_weights(loaded, tmp_path)
    load_state(tmp_path, loaded, [fresh], [])
    load_random_state(tmp_path, loaded)
    assert_same_tensors(loaded.state_dict(), model.state_dict())
    assert moments(fresh, loaded) == moments(optimizer, model)
    assert drawn == (random.random(), np.random.rand(), torch.rand(1).item())


@pytest.mark.parametrize("files", [1, 2, 3])
def test_transformers_finds_all_files_of_one_process(tmp_path: Path, files: int):
    model, _ = reference("small-shards")
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    with saving(tmp_path, RankCoords()):
        save_weights(model, tmp_path, max_shard_size=1 + int(1.2 * size / files))
    assert len(list(tmp_path.glob("*.safetensors"))) == files
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert_same_tensors(loaded.state_dict(), model.state_dict())


@several_processes
def test_replicas_share_the_writing(saved: Path):
    for name in MODELS:
        sizes = [
            (saved / name / STATE_FOLDER / f"rank-{replica}-{stage}.safetensors").stat().st_size
            for replica in range(2)
            for stage in range(2)
        ]
        index = json.loads((saved / name / STATE_FOLDER / "index.json").read_text())
        assert len(index["random"]) == 4
        # Two states of four bytes for each trained number, and headers.
        trained = sum(len(g["names"]) for g in index["optimizers"][0]["groups"])
        assert len(index["optimizers"][0]["state"]) == trained
        assert min(sizes) > max(sizes) / 8, (name, sizes)


def test_a_save_that_the_disk_refuses_names_the_file(tmp_path: Path):
    model, _ = reference("tied")
    with saving(tmp_path / "checkpoint-1", RankCoords()):
        save_weights(model, tmp_path / "checkpoint-1")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    refused = r"model\.safetensors' could not be written: File too large.*Remedy: free space"
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(PipelineError, match=refused):
            save_weights(model, tmp_path / "checkpoint-2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert find_damage(tmp_path / "checkpoint-2") == "its save did not come to its end"
    assert newest_complete(tmp_path)[0] == tmp_path / "checkpoint-1"


def test_the_former_format_is_refused_and_both_remedies_work(tmp_path: Path):
    model, optimizer = reference("tied")
    target = tmp_path / STATE_FOLDER
    with saving(tmp_path, RankCoords()):
        save_weights(model, tmp_path)
    state = {"groups": [[]], "schedulers": [], "rng/0/0": {}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one process saves alone
        dcp.save(state, checkpoint_id=target, no_dist=True)
    assert has_state(tmp_path)
    with pytest.raises(ConfigError, match=r"could run code.*export_optimizer.*delete"):
        load_state(tmp_path, model, [optimizer], [])
    (tmp_path / "optimizer.pt").touch()
    assert not has_state(tmp_path)
    (tmp_path / "optimizer.pt").unlink()
    shutil.rmtree(target)
    (tmp_path / MARK_NAME).unlink()
    (tmp_path / "trainer_state.json").write_text("{}")
    assert not has_state(tmp_path)
    assert find_damage(tmp_path) is None


def test_another_model_is_refused(tmp_path: Path):
    model, optimizer = reference("tied")
    with saving(tmp_path, RankCoords()):
        save_weights(model, tmp_path)
        save_state(tmp_path, model, [optimizer], [])
    larger = make_model({**MODELS["tied"], "layers": 7})
    with pytest.raises(ConfigError, match=r"lacks .* tensors"):
        load_weights(larger, tmp_path)
    with pytest.raises(ConfigError, match=r"Group 0 .* has no 'model.layers.6"):
        load_state(tmp_path, larger, [make_optimizer(larger)], [])
    with pytest.raises(ConfigError, match="has shape"):
        load_weights(build_tiny_model("gemma2", intermediate_size=8), tmp_path)
    with pytest.raises(ConfigError, match="holds 1 optimizers"):
        load_state(tmp_path, model, [], [])


def test_random_numbers_are_those_of_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", asked.append)

    def on(*devices: str) -> Any:
        parameters = [SimpleNamespace(device=torch.device(device)) for device in devices]
        return SimpleNamespace(parameters=lambda: iter(parameters))

    for devices in (("cuda:1", "cuda:1", "cpu"), ("cpu",), ("cuda:0", "cuda:1")):
        random_state(on(*devices))
    # The current one where the model has none, or several.
    assert asked == [torch.device("cuda", 1), torch.device("cuda"), torch.device("cuda")]
