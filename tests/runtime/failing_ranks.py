"""A job that test_failures.py starts once per rank: train through a pipeline until one rank fails.

    failing_ranks.py '{"pp_size": 3, "rank": 1, "how": "throw", "timeout": 10, "folder": "..."}'

In the third forward, in the backward of chunk 1, rank `rank` throws, hangs or waits for its death;
"config" gives it another number of chunks from the start. "step 3" is written to its file first.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist

from sppo_hf.config import SPPOConfig
from sppo_hf.model.convert import get_engine
from sppo_hf.model.observer import StepObserver
from sppo_hf.model.tiny import build_tiny_model, make_batch
from sppo_hf.runtime.pipeline import convert_to_stages


class Saboteur(StepObserver):
    """Fails in one unit."""

    def __init__(self, job: dict) -> None:
        self.job = job
        self.forwards = 0

    def on_unit(self, direction: str, chunk: int, num_chunks: int) -> None:
        if direction == "forward" and chunk == 0:
            self.forwards += 1
        if self.forwards == 3 and direction == "backward" and chunk == 1:
            (Path(self.job["folder"]) / "reached").write_text(str(os.getpid()))
            if self.job["how"] == "throw":
                raise ValueError("sabotage")
            time.sleep(600)  # "die" is killed meanwhile, "hang" is not


def main() -> None:
    """Train until something breaks."""
    job = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine = rank == job["rank"]
    config = SPPOConfig(
        pp_size=job["pp_size"],
        num_chunks=5 if mine and job["how"] == "config" else 4,
        pp_timeout_seconds=job["timeout"],
    )
    model = build_tiny_model("llama", num_hidden_layers=4, dtype=torch.float32)
    sabotages = mine and job["how"] in ("throw", "hang", "die")
    observer = Saboteur(job) if sabotages else StepObserver()
    convert_to_stages(model, config, observer=observer)
    engine = get_engine(model)
    assert engine is not None
    for step in range(50):
        loss = model(**make_batch(rows=2, tokens=23, seed=step)).loss
        loss.backward()
        model.zero_grad()
    raise AssertionError("nothing failed")


if __name__ == "__main__":
    main()
