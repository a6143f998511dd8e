"""A job of test_checkpoint.py for each rank: cut models, save them, load what is asked.

    {"tasks": [{"do": "save", "name": ...}, ...]}

A task is "save", "load", or "die" (rank 1 does, in the middle of a save), with the `settings` of
the pipeline. After a "load", each rank writes what it has to `<name>-<pp_size>-<rank>.json`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from sppo_hf.config import SPPOConfig
from sppo_hf.pipeline import checkpoint
from sppo_hf.pipeline.checkpoint import (
    gather_weights,
    load_weights,
    rank_coords_of,
    save_weights,
    saving,
)
from sppo_hf.pipeline.checkpoint_state import (
    load_random_state,
    load_state,
    random_state,
    save_state,
)
from sppo_hf.pipeline.convert import convert_over_ranks
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model
from tests.pipeline.fork_server import leave_together


def make_model(task: dict[str, Any]) -> nn.Module:
    """The whole model of a task; every process makes the same."""
    layers = {"num_hidden_layers": task["layers"]}
    if task["family"] == "gemma2":
        layers["layer_types"] = (["sliding_attention", "full_attention"] * 9)[: task["layers"]]
    dtype = getattr(torch, task.get("dtype", "float32"))
    model = build_tiny_model(task["family"], seed=task.get("seed", 0), dtype=dtype, **layers)
    return add_lora(model) if task.get("lora") else model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW in two groups, as the Trainer makes it, with a state that tells parameters apart."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if "norm" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3)


def fill_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Step once with gradients that depend on values alone, so that any layout has the same."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = parameter.detach().sin()
    optimizer.step()
    optimizer.zero_grad()


def moments(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, float]:
    """A number per parameter that depends on all of its optimizer state."""
    names = {id(p): n for n, p in model.named_parameters()}
    return {
        names[id(p)]: sum(
            (index + 1) * float(torch.as_tensor(value).double().sum())
            for index, (_, value) in enumerate(sorted(values.items()))
        )
        for p, values in optimizer.state.items()
    }


def run(task: dict[str, Any], out: Path) -> None:
    """Do one task on this rank."""
    config = SPPOConfig(show_plan=False, pp_timeout_seconds=60, **task["settings"])
    model = convert_over_ranks(make_model(task), config)
    folder = out / task["name"]
    optimizer = make_optimizer(model)
    if task["do"] != "load":
        fill_state(optimizer, model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    if task["do"] == "load":
        load_weights(model, folder)
        load_state(folder, model, [optimizer], [scheduler])
        load_random_state(folder, model)
        drawn = torch.rand(1).item()
        seen = {
            "weights": {n: float(t.double().sum()) for n, t in model.state_dict().items()},
            "moments": moments(optimizer, model),
            "lr": optimizer.param_groups[0]["lr"],
            "last_epoch": scheduler.last_epoch,
            "drawn": drawn,
        }
        (out / f"{task['name']}-{config.pp_size}-{dist.get_rank()}.json").write_text(
            json.dumps(seen)
        )
        return
    optimizer.step()  # of no gradients: schedulers want to come after a step
    scheduler.step()
    torch.manual_seed(100 + dist.get_rank())
    if task["do"] == "die" and dist.get_rank() == 1:
        _die_after(task["shards"])
    with saving(folder, rank_coords_of(model)):
        save_weights(model, folder, max_shard_size=task.get("max_shard_size", "50GB"))
        save_state(folder, model, [optimizer], [scheduler])
    assert random_state(model)["cpu"].equal(torch.random.get_rng_state()), "saving draws no numbers"
    gathered = gather_weights(model)
    assert bool(gathered) == (dist.get_rank() == 0), len(gathered)
    if gathered:
        torch.save(gathered, out / f"{task['name']}.gathered.pt")


def _die_after(shards: int) -> None:
    """End this process, as kill -9 would, when it has written so many shards."""
    write, written = checkpoint.write_file, 0

    def write_or_die(tensors: Any, path: Path) -> None:
        nonlocal written
        if written == shards:
            os._exit(9)
        write(tensors, path)
        written += 1

    checkpoint.write_file = write_or_die


def main(job: dict[str, Any]) -> None:
    """Run a job."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for task in job["tasks"]:
        run(task, Path(job["folder"]))
    leave_together()
