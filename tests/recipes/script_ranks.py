"""A job for each rank: run a script, or a module's program, as the interpreter would.

{"argv": ["recipes/finetune.py", "--max_steps", "3"]}
{"module": "sppo_hf.run", "argv": ["--config", "sppo.yaml", "train.py"], "environment": {...}}

With `nodes` the ranks are those of that many nodes.

What most scripts import is imported here, before ranks are forked.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import tests.integrations.training  # noqa: F401

_IMPORTED = (
    *(f"sppo_hf.integrations.{name}" for name in ("arguments", "plugin", "progress")),
    *("sppo_hf.reporting.plan_tables", "rich.table", "matplotlib.pyplot"),
)
for name in _IMPORTED:
    with contextlib.suppress(ImportError):  # of an extra that is not installed
        importlib.import_module(name)


def main(job: dict[str, Any]) -> None:
    """Run a job; what ends the script ends the rank."""
    os.environ.update(job.get("environment", {}))
    if job.get("nodes", 1) > 1:
        local = int(os.environ["WORLD_SIZE"]) // job["nodes"]
        os.environ["LOCAL_WORLD_SIZE"] = str(local)
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % local)
    if "module" in job:
        sys.argv = [job["module"], *job["argv"]]
        sys.path[0] = os.getcwd()
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
    else:
        sys.argv = job["argv"]
        sys.path[0] = str(Path(job["argv"][0]).parent)
        runpy.run_path(job["argv"][0], run_name="__main__")
