"""Every pair of YAML files in recipes/configs starts a run that trains as one process does.

On the CPU over gloo. Accelerate itself starts two processes on one node (with everything asked for
by this interpreter, and also two on each of two nodes, which are made smaller to that); other ranks
are forked, which takes seconds less for each, into the environment that Accelerate makes of their
file.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sppo_hf.cli.plan import FSDP2_SETTINGS
from sppo_hf.config import SPPOConfig
from tests.integrations.launch import free_port, launch_environment, run_ranks
from tests.integrations.training import needs_fsdp2
from tests.pipeline.forked_python import write_interpreter
from tests.sweeps import ALL

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipes" / "configs"
LAUNCH = "accelerate.commands.launch"
LAUNCHED = (
    *("1_gpu", "2_gpus", "4_gpus", "8_gpus"),
    *("2_gpus_sp", "4_gpus_pp_sp", "4_gpus_msp", "8_gpus_fsdp_sp"),
)
# The others with everything: what they differ in are settings, with which
# tests/integrations/test_pipeline.py trains.
RUN = ("1_gpu", "2_gpus")
PAIRS = (*LAUNCHED, "8_gpus_fsdp2", "1_gpu_hybrid", "2_nodes")
ROWS = 4 if ALL else 2
"""Of all devices in a step."""
LAYERS = 8 if ALL else 4
"""Layers of the model: one for each rank of the largest launch."""


def _start(folder: Path, rows: int, *launch: str, sppo: Path) -> subprocess.Popen:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", LAUNCH, *_words(folder, rows, *launch, sppo=sppo)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # The compiler, which PEFT's imports ask for, takes each process two seconds.
    env["TORCHDYNAMO_DISABLE"] = "1"
    return subprocess.Popen(
        command, env=env, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def _fork_launch(folder: Path, rows: int, *launch: str, sppo: Path) -> None:
    """Run what `_start` would, with the launcher forked, and what it starts by its interpreter."""
    job: dict[str, Any] = {
        "module": LAUNCH,
        "argv": _words(folder, rows, *launch, sppo=sppo),
        "environment": {"PYTHON_EXEC": write_interpreter(folder / "python")},
    }
    run_ranks("tests.recipes.script_ranks", job, 1, folder)


def _words(folder: Path, rows: int, *launch: str, sppo: Path) -> list[str]:
    """Arguments of Accelerate's launcher."""
    port = [] if "--machine_rank" in launch else ["--main_process_port", str(free_port())]
    program = ["-m", "sppo_hf.run", "--config", str(sppo), *_script(folder, rows), str(LAYERS)]
    return [*launch, *port, *program]


def _fork(
    folder: Path,
    rows: int,
    ranks: int,
    *launch: str,
    sppo: Path | None = None,
    family: str = str(LAYERS),
    nodes: int = 1,
) -> None:
    """Run what `_start` would, as that many ranks in the environment that Accelerate gives them."""
    job: dict[str, Any] = {
        "argv": [*_script(folder, rows), family],
        "environment": launch_environment(*launch, "train_tiny.py") if launch else {},
        "nodes": nodes,
    }
    if sppo is not None:
        job |= {"module": "sppo_hf.run", "argv": ["--config", str(sppo), *job["argv"]]}
    run_ranks("tests.recipes.script_ranks", job, ranks, folder)


def _script(folder: Path, rows: int) -> list[str]:
    return [str(Path(__file__).with_name("train_tiny.py")), str(folder), str(rows)]


def _finish(*processes: subprocess.Popen) -> None:
    try:
        printed = [process.communicate(timeout=170)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [p.returncode for p in processes] == [0] * len(processes), "\n".join(printed)[-4000:]


def _history(folder: Path) -> list[tuple[float, float]]:
    entries = json.loads((folder / "history.json").read_text())
    return [(entry["loss"], entry["grad_norm"]) for entry in entries if "loss" in entry]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> list[tuple[float, float]]:
    folder = tmp_path_factory.mktemp("plain")
    _fork(folder, ROWS, 1)
    return _history(folder)


def test_every_pair_is_tested_and_valid():
    assert {path.name for path in CONFIGS.iterdir()} == set(PAIRS)
    for name in PAIRS:
        config = SPPOConfig.from_yaml(CONFIGS / name / "sppo.yaml")
        launch = yaml.safe_load((CONFIGS / name / "accelerate.yaml").read_text())
        assert launch["num_processes"] % config.sharing_ranks == 0
        assert str(launch["num_processes"] // launch["num_machines"]) == {"2_nodes": "8"}.get(
            name, name.split("_")[0]
        )


@pytest.mark.parametrize("name", ["8_gpus_fsdp2", "8_gpus_fsdp_sp"])
def test_the_sharded_pairs_ask_for_fsdp2_as_planned_runs_do(name):
    """That it trains as without chunks: tests/integrations/test_distributed.py, on two ranks."""
    launch = yaml.safe_load((CONFIGS / name / "accelerate.yaml").read_text())
    assert launch["distributed_type"] == "FSDP"
    assert launch["fsdp_config"] == FSDP2_SETTINGS


def test_pairs_of_one_node_launch_as_two_processes_are_launched():
    two = yaml.safe_load((CONFIGS / "2_gpus" / "accelerate.yaml").read_text())
    for name, changes in {
        "1_gpu": {"num_processes": 1, "distributed_type": "NO"},
        "1_gpu_hybrid": {"num_processes": 1, "distributed_type": "NO"},
        "4_gpus": {"num_processes": 4},
        "8_gpus": {"num_processes": 8},
        "2_gpus_sp": {},
        "4_gpus_pp_sp": {"num_processes": 4},
        "4_gpus_msp": {"num_processes": 4},
        "8_gpus_fsdp_sp": {
            "num_processes": 8,
            "distributed_type": "FSDP",
            "fsdp_config": FSDP2_SETTINGS,
        },
    }.items():
        launch = yaml.safe_load((CONFIGS / name / "accelerate.yaml").read_text())
        assert launch == {**two, **changes}


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[needs_fsdp2] * ("fsdp" in name))
        for name in (LAUNCHED if ALL else RUN)
    ],
)
def test_a_pair_trains_as_one_process_does(name, tmp_path, plain):
    accelerate, sppo = CONFIGS / name / "accelerate.yaml", CONFIGS / name / "sppo.yaml"
    processes = yaml.safe_load(accelerate.read_text())["num_processes"]
    replicas = processes // SPPOConfig.from_yaml(sppo).sharing_ranks
    launch = ("--config_file", str(accelerate), "--mixed_precision", "no")
    if name == "2_gpus" and ALL:
        _finish(_start(tmp_path, ROWS // replicas, *launch, sppo=sppo))
    elif name == "2_gpus":
        _fork_launch(tmp_path, ROWS // replicas, *launch, sppo=sppo)
    else:
        _fork(tmp_path, ROWS // replicas, processes, *launch, sppo=sppo)
    *_, last = json.loads((tmp_path / "history.json").read_text())
    assert last["wrapper"].startswith("FSDP") == ("fsdp" in name)
    for ours, theirs in zip(_history(tmp_path), plain, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_hybrid_trains_in_chunks_as_without(tmp_path):
    settings = yaml.safe_load((CONFIGS / "1_gpu_hybrid" / "sppo.yaml").read_text())
    sppo = tmp_path / "sppo.yaml"
    sppo.write_text(yaml.safe_dump({**settings, "chunk_tokens": 10}))
    histories = []
    for name, settings_file in (("chunks", sppo), ("plain", None)):
        _fork(tmp_path / name, 4, 1, sppo=settings_file, family="qwen3_5_text")
        histories.append(_history(tmp_path / name))
    for ours, theirs in zip(*histories, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_two_nodes_train_as_one_process_does(tmp_path, plain):
    settings = yaml.safe_load((CONFIGS / "2_nodes" / "sppo.yaml").read_text())
    sppo = tmp_path / "sppo.yaml"
    sppo.write_text(yaml.safe_dump({**settings, "pp_size": 2}))
    launch = ["--config_file", str(CONFIGS / "2_nodes" / "accelerate.yaml"), "--num_processes", "4"]
    launch += ["--mixed_precision", "no", "--main_process_port", str(free_port())]
    nodes = [(tmp_path / f"node{n}", (*launch, "--machine_rank", str(n))) for n in range(2)]
    if ALL:
        _finish(*(_start(folder, ROWS // 2, *words, sppo=sppo) for folder, words in nodes))
    else:
        folder, words = nodes[0]
        _fork(folder, ROWS // 2, 4, *words, sppo=sppo, nodes=2)
    for ours, theirs in zip(_history(tmp_path / "node0"), plain, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
