"""Predicts the longest sequence with which each well-known checkpoint can be trained on one GPU.

    python recipes/tools/checkpoint_table.py qwen3.5   # prints Markdown
    python recipes/tools/checkpoint_table.py --write   # recipes/MODELS.md and `sppo check --list`

`checkpoints.json` beside this file has the sizes of each, written by hand from what is public, or
the name of a configuration that comes with the package. No weights are read, and nothing is
measured: lengths are what the memory estimate allows. Under a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

from recipes.tools.family_table import LONGEST, ROOT, checkpoints_markdown, write_page
from sppo_hf.cli.common import trace_unknown_model
from sppo_hf.config import SPPOConfig
from sppo_hf.planning.config_file import load_config, to_namespace
from sppo_hf.planning.feasibility import assess_request, request_for
from sppo_hf.planning.hardware import load_profile

CONFIGS = Path(__file__).with_name("checkpoints.json")
HARDWARE, HOST_MEMORY, RANK = "h100-80gb", "256GiB", 16
TOKENS = 8192
"""Length of the plan request, on which the longest length does not depend."""


def longest(name: str, config: str | dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's parameters, and its longest sequence in tokens (or 0)."""
    model = load_config(config) if isinstance(config, str) else to_namespace(config)
    answer = assess_request(
        request_for(
            model,
            SPPOConfig(host_memory=HOST_MEMORY),
            profile=load_profile(HARDWARE),
            total_tokens=TOKENS,
            lora_rank=RANK,
            trace=trace_unknown_model,
        )
    )
    shape = answer.request.shape
    return {
        "name": name,
        "family": str(getattr(model, "model_type", "")),
        "parameters": shape.total_parameters - shape.trainable_parameters,
        "longest_tokens": answer.max_seq_len,
        "positions_tokens": shape.max_positions_tokens,
    }


def table(names: Sequence[str] = ()) -> dict[str, Any]:
    """Return all rows, or those whose names contain one of `names`, and the assumptions."""
    configs: dict[str, str | dict[str, Any]] = json.loads(CONFIGS.read_text(encoding="utf-8"))
    wanted = {
        name: config
        for name, config in configs.items()
        if not names or any(part.lower() in name.lower() for part in names)
    }
    return {
        "transformers": transformers.__version__,
        "hardware": HARDWARE,
        "host_memory": HOST_MEMORY,
        "lora_rank": RANK,
        "checkpoints": [longest(name, config) for name, config in wanted.items()],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict and write; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; default: all")
    parser.add_argument("--write", action="store_true", help="write the page and the list instead")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    found = table(options.names)
    if options.write and not options.names:
        (ROOT / LONGEST).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        write_page(ROOT)
    else:
        print(checkpoints_markdown(found), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
