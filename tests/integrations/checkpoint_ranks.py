"""A job of test_checkpoints.py for each rank: runs of the Trainer that save and resume.

    {"runs": [{"name": "a", "kind": "trainer", ...}]}

Rank 0 writes what a run has seen to `<name>.json`. `make_trainer` also serves runs in one process.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import distributed as dist
from transformers import Trainer

from sppo_hf import SPPOPlugin
from sppo_hf.engine.model_parts import suppress_peft_warnings
from sppo_hf.errors import ConfigError
from tests.integrations.training import make_arguments, make_model, make_rows
from tests.pipeline.fork_server import leave_together

STEPS = 7


def make_trainer(run: dict[str, Any], folder: Path, **changes: Any) -> Trainer:
    """The Trainer of a run: four layers (adapters: two), `rows` per replica, two epochs begun."""
    settings = run.get("settings")
    plugin = None if settings is None else SPPOPlugin({"show_plan": False, **settings})
    args = make_arguments(
        folder / run["name"],
        **{
            "parallelism_config": plugin,
            "max_steps": STEPS,
            "per_device_train_batch_size": run.get("rows", 2),
            "per_device_eval_batch_size": run.get("rows", 2),
            "save_strategy": "steps",
            "save_steps": 4,
            "weight_decay": 0.1,
            **run.get("arguments", {}),
            **changes,
        },
    )
    layers = 2 if run.get("lora") else 4
    model = make_model(num_hidden_layers=layers, tie_word_embeddings=run.get("tied", False))
    if run.get("lora"):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        settings = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
        with suppress_peft_warnings():
            model = get_peft_model(model, settings)
    return Trainer(model, args, train_dataset=make_rows(12), eval_dataset=make_rows(4, seed=2))


def train(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train and return the log; with "torn_at", rank 1 dies in that step's save."""
    trainer = make_trainer(run, folder)
    if "torn_at" in run and trainer.args.process_index == 1:
        _die_at(trainer, run["torn_at"])
    resume = run.get("resume")
    trainer.train(resume_from_checkpoint=resume)
    seen: dict[str, Any] = {"history": trainer.state.log_history}
    if trainer.args.load_best_model_at_end:
        seen["best"] = trainer.state.best_model_checkpoint
        seen["eval"] = trainer.evaluate()["eval_loss"]
    if run.get("final"):
        trainer.save_model(str(folder / run["final"]))
    return seen


def _die_at(trainer: Trainer, step: int) -> None:
    """End this process when it has written its part of the checkpoint, before all have."""
    save = trainer._save_rng_state

    def save_or_die(output_dir: str) -> None:
        if trainer.state.global_step == step:
            time.sleep(1)  # the first rank goes on meanwhile, as far as it may
            os._exit(9)
        save(output_dir)

    trainer._save_rng_state = save_or_die  # type: ignore[method-assign]


def loop(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train by a raw loop of Accelerate, save after two steps, go on, return and go on again."""
    accelerator = Accelerator(
        cpu=True, parallelism_config=SPPOPlugin({"show_plan": False, **run["settings"]})
    )
    model = make_model(tie_word_embeddings=run.get("tied", False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rows = make_rows(16)

    def steps(first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            picked = rows[step * 4 : step * 4 + 4]
            loss = model(**{k: torch.stack([row[k] for row in picked]) for k in picked[0]}).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    steps(0, 2)
    accelerator.save_state(str(folder / run["name"]))
    drawn = torch.rand(1).item()
    went_on = steps(2, 4)
    accelerator.load_state(str(folder / run["name"]))
    again = torch.rand(1).item()
    resumed = steps(2, 4)
    accelerator.save_model(model, folder / f"{run['name']}-saved")
    whole = accelerator.get_state_dict(model)
    names = len(whole)
    inner = accelerator.unwrap_model(model)
    try:
        inner.save_pretrained(folder / "never")
        refused = ""
    except ConfigError as error:
        refused = str(error)
    inner.save_pretrained(
        folder / f"{run['name']}-gathered",
        is_main_process=accelerator.is_main_process,
        state_dict=whole,
    )
    return {
        "went_on": went_on,
        "resumed": resumed,
        "drawn": [drawn, again],
        "refused": refused,
        "gathered": names,
    }


def forget_plugin() -> None:
    """Let the process's next Accelerator have another plugin."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def main(job: dict[str, Any]) -> None:
    """Run a job."""
    torch.set_num_threads(1)
    folder = Path(job["folder"])
    for run in job["runs"]:
        forget_plugin()
        seen = {"trainer": train, "loop": loop}[run.get("kind", "trainer")](run, folder)
        if dist.get_rank() == 0:
            (folder / f"{run['name']}.json").write_text(json.dumps(seen))
    leave_together()
