"""A job for each rank: tiny pipelines whose ranks keep what they did in `trace_dir`.

The job holds `pp_size`, `out` (a folder) and `runs`: mappings of `name`, `settings`, `rows`,
`tokens`, `steps`, `evaluate` and `overrides` (of the model's config); each run's files lie in the
folder of its name, and with them what an observer of each rank was told.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import get_engine, revert
from sppo_hf.engine.step_observer import StepObserver, StepRecord
from sppo_hf.pipeline.convert import convert_to_stages
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.planning.measured import MeasuredStep
from sppo_hf.planning.plan import Plan
from sppo_hf.reporting.plan_tables import render_plan
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch

TOKENS = 23
LAYERS = 6


class Told(StepObserver):
    """What this rank's engine tells its observer."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.plans: list[dict[str, Any]] = []
        self.planned: list[float | None] = []
        self.written: list[int] = []
        self.corrections: list[dict[str, float]] = []

    def on_plan(self, plan: Plan, model_name: str) -> None:
        """Note the step that it is a part of."""
        assert plan.pipeline is not None, "all ranks agree on a step before it is shown"
        said = dataclasses.asdict(plan.pipeline)
        self.plans.append({**said, "name": model_name, "text": render_plan(plan, model_name)})

    def on_correction(self, before: Plan, after: Plan, measured: MeasuredStep) -> None:
        """Note seconds before and after."""
        assert before.prediction is not None
        assert after.prediction is not None
        self.corrections.append(
            {
                "before": before.prediction.step_seconds,
                "measured": measured.step_seconds,
                "after": after.prediction.step_seconds,
            }
        )

    def on_record(self, record: StepRecord) -> None:
        """Note what was predicted, and what went to the disk."""
        self.planned.append(record.planned_seconds)
        self.written.append(record.offload.disk_write_bytes)


def run(one: dict[str, Any], pp_size: int, folder: Path) -> None:
    """Train a step of a tiny model, and perhaps evaluate after it."""
    overrides = {"num_hidden_layers": LAYERS, **one.get("overrides", {})}
    model = build_tiny_model("llama", **overrides)
    settings = {"min_offload_size": 1, "show_plan": False, **one["settings"]}
    config = SPPOConfig(pp_size=pp_size, trace_dir=str(folder / one["name"]), **settings)
    told = Told()
    convert_to_stages(model, config, observer=told)
    batch = make_batch(rows=one.get("rows", 3), tokens=one.get("tokens", TOKENS))
    for _ in range(one.get("steps", 1)):
        model.zero_grad()
        model(**batch).loss.backward()
    engine = get_engine(model)
    assert isinstance(engine, PipelineEngine)
    engine.offload.assert_drained()
    if one.get("evaluate"):
        with torch.no_grad():
            model(**batch)
    revert(model)
    path = folder / one["name"] / f"told{dist.get_rank()}.json"
    path.write_text(json.dumps(vars(told)))


def main(job: dict[str, Any]) -> None:
    """Run a job."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for one in job["runs"]:
        run(one, job["pp_size"], Path(job["out"]))
    dist.barrier()
    # See two_ranks.py of the integrations: nothing is left to shut down in order.
    os._exit(0)
