"""A job of test_failures.py: train by hand until one rank fails.

Training runs through a pipeline (with `shared`, one whose ranks share units), or with `sp_size` on
shared sequences. After so many `forwards` of a first chunk, in the backward of chunk 1 (or of
`unit`), rank `rank` throws, hangs, or leaves by `os._exit`; with "refuse" it alone finds no plan
for the second batch; with `raises`, pairs of a name and a rank, that rank finds none for one new
batch after the other, as what planning calls by that name finds none (with "on_plan" in its place,
who is shown the plan raises; with "dropout", its own config drops attention probabilities); with
"correct" it alone finds none when all plan anew by what was measured, with "config" it has another
number of chunks from the start, with "freeze" it alone freezes what has one of `frozen` in its
name, for the second batch. What was refused last is tried once more and given up, so that a later
failure must be told in its own words.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from sppo_hf.config import SPPOConfig
from sppo_hf.engine import plan_cache
from sppo_hf.engine.convert import get_engine
from sppo_hf.engine.step_observer import StepObserver
from sppo_hf.errors import (
    BudgetError,
    ConfigError,
    PipelineError,
    SPPOError,
    UnsupportedModelError,
)
from sppo_hf.pipeline import convert as pipeline
from sppo_hf.pipeline import stage_plans
from sppo_hf.pipeline.convert import convert_over_ranks
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.pipeline.sequence_parallel import SequenceParallelEngine
from sppo_hf.planning.cost import Correction
from sppo_hf.planning.prediction import MeasuredStep
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch


class FailingObserver(StepObserver):
    """Fails in one unit."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.forwards = 0

    def on_unit(self, direction: str, chunk: int, num_chunks: int) -> None:
        if direction == "forward" and chunk == 0:
            self.forwards += 1
        begun, failing = self.job["forwards"], self.job.get("unit", 1)
        if self.forwards >= begun and direction == "backward" and chunk == failing:
            (Path(self.job["folder"]) / "reached").touch()
            if self.job["how"] == "hang":
                time.sleep(600)
            if self.job["how"] == "leave":
                os._exit(0)
            raise ValueError("sabotage")


def main(job: dict[str, Any]) -> None:
    """Train until something breaks."""
    dist.init_process_group("gloo")
    mine = dist.get_rank() == job["rank"]
    sp_size = job.get("sp_size", 1)
    config = SPPOConfig(
        pp_size=job["pp_size"],
        sp_size=sp_size,
        num_chunks=5 if mine and job["how"] == "config" else 4,
        pp_timeout_seconds=job["timeout"],
        pp_msp="on" if job.get("shared") else "off",
        hardware=job.get("hardware"),
    )
    # A message between ranks that live times out by itself, so much later than a silent rank.
    pipeline.GROUP_MARGIN_SECONDS = 3
    family, layers = job.get("family", "llama"), max(2, job["pp_size"])
    model: Any = build_tiny_model(family, num_hidden_layers=layers, dtype=torch.float32)
    convert_over_ranks(model, config, observer=FailingObserver(job) if mine else StepObserver())
    engine = get_engine(model)
    for step in range(50):
        rows = 2 if dist.get_rank() < config.sharing_ranks else 3
        batch = make_batch(rows=rows, tokens=23, seed=step)
        if job["how"] == "refuse" and step == 1:
            assert isinstance(engine, PipelineEngine)
            for index, (where, rank) in enumerate(job.get("raises", [("get", job["rank"])])):
                if "raises" in job:  # a length that was not planned for yet
                    batch = make_batch(rows=rows, tokens=29 + index, seed=step)
                _refuse_once(engine, model, batch, where, rank)
        if job["how"] == "correct" and step == 1:
            assert isinstance(engine, SequenceParallelEngine)
            _correct_once(engine, model, batch, mine=mine)
        if job["how"] == "freeze" and step == 1:
            _freeze_once(model, batch, job["frozen"] if mine else [])
        model(**batch).loss.backward()
        model.zero_grad()
        if (Path(job["folder"]) / "reached").exists():
            time.sleep(3.0)  # a replica that needs nobody goes on until it is told, without haste
    raise AssertionError("nothing failed")


def _refuse_once(
    engine: PipelineEngine, model: Any, batch: dict[str, Any], where: str, rank: int
) -> None:
    """Let one rank refuse a batch: all do."""
    mine = dist.get_rank() == rank

    def refuse(*_: Any, **others: Any) -> None:
        raise BudgetError("no room")

    refuses = pytest.MonkeyPatch()
    error: type[SPPOError] = BudgetError
    words = "no room"
    if where == "dropout":
        error, words = UnsupportedModelError, "attention_dropout"
        if mine:
            refuses.setattr(model.config, "attention_dropout", 0.5)
    elif mine and where == "on_plan":
        refuses.setattr(engine.observer, where, refuse)
    elif mine and where == "get":
        refuses.setattr(engine._stage_plans, "get", refuse)
    elif mine:
        refuses.setattr(plan_cache if where == "device_facts" else stage_plans, where, refuse)
    own = mine or where == "choose_pipeline"
    told = f"no rank, because rank {rank} refuses it: {error.__name__}: .*{words}"
    with pytest.raises(error if own else PipelineError, match=words if own else told):
        model(**batch)
    refuses.undo()


def _correct_once(
    engine: SequenceParallelEngine, model: Any, batch: dict[str, Any], *, mine: bool
) -> None:
    """Let one rank refuse what all plan anew: they go on with what they had."""
    (plan,) = engine.plans._plans.values()
    seconds = (1.0,) * 4
    measured = MeasuredStep(forward_seconds=seconds, backward_seconds=seconds, stall_seconds=0.0)
    found = plan, measured, Correction(backward=2.0)

    def refuse(*_: Any, **others: Any) -> None:
        raise ConfigError("no such device")

    refuses = pytest.MonkeyPatch()
    refuses.setattr(engine.plans, "_new_corrections", lambda: iter([found]))
    if mine:
        refuses.setattr(plan_cache, "device_facts", refuse)
    model(**batch).loss.backward()
    model.zero_grad()
    refuses.undo()
    assert list(engine.plans._plans.values()) == [plan]


def _freeze_once(model: Any, batch: dict[str, Any], frozen: list[str]) -> None:
    """Let one rank freeze some parameters for a batch: all refuse it, and run it afterwards."""
    parameters = [p for n, p in model.named_parameters() if any(part in n for part in frozen)]
    assert len(parameters) == len(frozen)
    for parameter in parameters:
        parameter.requires_grad_(False)
    with pytest.raises(PipelineError, match=r"train.*Remedy: .*freeze and unfreeze .*alike"):
        model(**batch)
    for parameter in parameters:
        parameter.requires_grad_(True)
