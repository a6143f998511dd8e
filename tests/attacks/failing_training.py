"""A job of the area `ranks`: a Trainer over several ranks, one of which is lost at a given point.

`rank` fails in the third step, in one of `PHASES`, by one of `FAULTS`. Before it does, a batch that
every rank refuses is tried and given up, which must leave no trace.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from sppo_hf import ConfigError, SPPOPlugin
from sppo_hf.engine.step_observer import StepObserver
from sppo_hf.integrations import checkpoints
from tests.integrations.training import make_arguments, make_model, make_rows

STEP = 3

PHASES = {
    "before": r"before training",
    "groups": r"before training",
    "dataset": r"reading a batch",
    "forward": r"action \d+ \(\d+F|in forward pass \d+",
    "backward": r"action \d+ \(\d+B|in backward pass \d+",
    "optimizer": r"in the optimizer",
    "logging": r"logging",
    "evaluation": r"in evaluation pass \d+",
    "save": r"saving checkpoint-",
}
"""Phases in which a rank fails, and what the other ranks report about it."""

SILENT = ("kill", "segv", "term", "os_exit", "stop")
FAULTS = (*SILENT, "raise", "exit", "interrupt")
"""Ways in which a rank fails; `SILENT` ones leave it no time for a message."""


class Saboteur(StepObserver, TrainerCallback):
    """Fails once, in one phase."""

    def __init__(self, job: dict[str, Any], folder: Path) -> None:
        self.job, self.folder = job, folder
        self.steps = 0

    def at(self, phase: str) -> None:
        """Fail, if this is the rank and the phase to fail in."""
        if self.job["phase"] != phase or int(os.environ["RANK"]) != self.job["rank"]:
            return
        how = self.job["how"]
        if how in SILENT:
            # So that the others have heard where this rank is.
            time.sleep(self.job["timeout"] / 8 + 0.7)
        (self.folder / "reached").touch()
        if how == "raise":
            raise KeyError("sabotage")
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "exit":
            sys.exit(0)
        if how == "os_exit":
            os._exit(0)
        if how == "segv":
            ctypes.string_at(0)
        kinds = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
        os.kill(os.getpid(), kinds[how])
        time.sleep(60)

    def on_unit(self, direction: str, chunk: int, num_chunks: int) -> None:
        if self.steps >= STEP and chunk == 1:
            evaluates = direction == "forward" and not torch.is_grad_enabled()
            self.at("evaluation" if evaluates else direction)

    def on_step_begin(self, *_: Any, **others: Any) -> None:
        self.steps += 1

    def on_pre_optimizer_step(self, *_: Any, **others: Any) -> None:
        if self.steps >= STEP:
            self.at("optimizer")

    def on_log(self, *_: Any, **others: Any) -> None:
        if self.steps >= STEP:
            self.at("logging")


class Rows(torch.utils.data.Dataset):
    """Rows that fail to be read from the third step on."""

    def __init__(self, saboteur: Saboteur) -> None:
        self.rows, self.saboteur = make_rows(64), saboteur

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.saboteur.steps >= STEP - 1:
            self.saboteur.at("dataset")
        return self.rows[index]


def main(job: dict[str, Any]) -> None:
    """Train until the rank fails."""
    folder = Path(job["folder"])
    saboteur = Saboteur(job, folder)
    plugin = SPPOPlugin(
        **job["sizes"],
        chunk_lengths=(12, 12),
        pp_timeout_seconds=job["timeout"],
        show_plan=False,
    )
    args = make_arguments(
        folder / "run",
        parallelism_config=plugin,
        max_steps=100,
        save_strategy="steps",
        save_steps=STEP,
        eval_strategy="steps",
        eval_steps=STEP,
    )
    time.sleep(1.0)  # loading a model takes longer
    saboteur.at("before")
    eval_rows: Any = make_rows(8, seed=2)
    trainer = Trainer(
        make_model(num_hidden_layers=max(2, job["sizes"].get("pp_size", 1))),
        args,
        train_dataset=Rows(saboteur),
        eval_dataset=eval_rows,
        callbacks=[saboteur],
    )
    saboteur.at("groups")
    plugin.observer.subscribe(saboteur)
    # Of a pipeline, and of whole models.
    for owner, name in ((checkpoints, "save_state"), (Trainer, "_save_optimizer_and_scheduler")):
        _fail_first(saboteur, owner, name)
    _try_a_bad_batch(trainer)
    trainer.train()
    raise AssertionError("nothing failed")


def _fail_first(saboteur: Saboteur, owner: Any, name: str) -> None:
    save = getattr(owner, name)

    def failing(*others: Any, **named: Any) -> Any:
        saboteur.at("save")
        return save(*others, **named)

    setattr(owner, name, failing)


def _try_a_bad_batch(trainer: Trainer) -> None:
    model = trainer.accelerator.prepare(trainer.model)
    ids = torch.ones(1, 7, dtype=torch.int64)
    with pytest.raises(ConfigError, match="chunk_lengths"):  # they add up to 24 tokens
        model(input_ids=ids, labels=ids)
