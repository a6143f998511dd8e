"""A job for each rank: tiny pipelines whose ranks keep what they did in `trace_dir`.

The job holds `pp_size`, `out` (a folder) and `runs`: mappings of `name`, `settings`, `rows` and
`evaluate`; each run's files lie in the folder of its name.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from sppo_hf.config import SPPOConfig
from sppo_hf.model.convert import get_engine, revert
from sppo_hf.model.tiny import build_tiny_model, make_batch
from sppo_hf.runtime.pipeline import convert_to_stages
from sppo_hf.runtime.pipeline_engine import PipelineEngine

TOKENS = 23
LAYERS = 6


def run(one: dict[str, Any], pp_size: int, folder: Path) -> None:
    """Train a step of a tiny model, and perhaps evaluate after it."""
    model = build_tiny_model("llama", num_hidden_layers=LAYERS)
    settings = {"min_offload_size": 1, "show_plan": False, **one["settings"]}
    config = SPPOConfig(pp_size=pp_size, trace_dir=str(folder / one["name"]), **settings)
    convert_to_stages(model, config)
    batch = make_batch(rows=one.get("rows", 3), tokens=TOKENS)
    model(**batch).loss.backward()
    engine = get_engine(model)
    assert isinstance(engine, PipelineEngine)
    engine.offload.assert_drained()
    if one.get("evaluate"):
        with torch.no_grad():
            model(**batch)
    revert(model)


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
