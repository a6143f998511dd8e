"""A job of test_driver.py: the worker's program, in a process that was forked."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any

from sppo_hf.cli.benchmark import worker


def main(job: dict[str, Any]) -> None:
    """Run the job that a benchmark would write to the worker's standard input."""
    sys.stdin = io.StringIO(json.dumps(job["given"]))
    worker.main([str(os.getppid())])
