"""Run the exactness harness over all tiny families and write the README's table of them.

`python recipes/tools/family_table.py` prints Markdown, `--output FILE` writes it; names as
arguments choose families. The exit code is 1 if any family is neither exact nor refused.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError, SPPOError
from sppo_hf.model.check import CheckResult, check_model
from sppo_hf.model.tiny import tiny_config
from sppo_hf.model.tiny_families import FAMILIES
from sppo_hf.planning.layer import LayerShape
from sppo_hf.planning.reader import read_layers

TOKENS = 29
SETTINGS = (
    SPPOConfig(num_chunks=1, recompute="full", offload="none"),
    SPPOConfig(chunk_lengths=(1, 6, 3, 5, 2, 12), recompute="none", offload="full"),
    SPPOConfig(chunk_lengths=(1, 6, 3, 5, 2, 12), recompute="full", offload="none"),
)
ONE_TOKEN = SPPOConfig(
    chunk_lengths=(1,) * TOKENS, recompute="full", offload="full", min_offload_size=1
)
"""Not for models with states, of which a chunk behind the first has two tokens."""


# One family that breaks must not lose the others' results.
_CRASHES = (TypeError, RuntimeError, AttributeError, LookupError, AssertionError, ValueError)


class Row(NamedTuple):
    """One family in the table."""

    name: str
    feature: str
    status: str
    error: float
    reason: str


def check_family(name: str) -> Row:
    """The worst of several chunkings and modes, or the reason of the refusal."""
    feature = FAMILIES[name].feature
    results: list[CheckResult] = []
    single = [] if any(layer.mixer for layer in _layers(name)) else [ONE_TOKEN]
    for settings in [*SETTINGS, *single]:
        try:
            result = check_model(name, settings, tokens=TOKENS)
        except ConfigError as error:
            return Row(name, feature, "refused", 0.0, _short(str(error)))
        except _CRASHES as error:
            return Row(name, f"{feature} ({type(error).__name__})", "NOT EXACT", math.inf, "")
        if result.status == "refused":
            return Row(name, feature, "refused", 0.0, _short(result.reason))
        results.append(result)
    worst = max(results, key=lambda result: result.error or 0.0)
    status = "exact" if all(result.status == "exact" for result in results) else "NOT EXACT"
    return Row(name, feature, status, worst.error or 0.0, "")


def _layers(name: str) -> tuple[LayerShape, ...]:
    try:
        return read_layers(tiny_config(name))
    except SPPOError:
        return ()  # the reason of the refusal comes from the check


def _short(reason: str) -> str:
    """The reason alone: neither the model's name in front nor the remedy behind."""
    reason = re.split(r"\. (?:Train|Set|sppo_hf|Load)|; (?:only|save)", reason)[0]
    reason = re.sub(r"^\w+ cannot (?:be trained|run) chunk by chunk: ", "", reason)
    return re.sub(r"^\w+: ", "", reason).replace("|", r"\|")


def markdown(rows: Sequence[Row]) -> str:
    """Two tables: what is exact, and what is refused and why."""
    lines = [
        "| family | what it exercises | worst relative error, float64 |",
        "|---|---|---|",
    ]
    for row in rows:
        if row.status != "refused":
            mark = "" if row.status == "exact" else " **NOT EXACT**"
            lines.append(f"| {row.name} | {row.feature} | {row.error:.0e}{mark} |")
    lines += ["", "| refused | reason |", "|---|---|"]
    lines += [f"| {row.name} | {row.reason} |" for row in rows if row.status == "refused"]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and write; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", default=None, help="default: all")
    parser.add_argument("--output", type=Path, help="file to write; default: standard output")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.families or ()) - set(FAMILIES))
    if unknown:
        parser.error(f"unknown families {unknown}; known: {', '.join(FAMILIES)}")
    transformers.logging.set_verbosity_error()
    # Products of a few thousand numbers: handing them to other threads takes ten times as long.
    torch.set_num_threads(1)
    rows = []
    for name in options.families or FAMILIES:
        rows.append(check_family(name))
        print(f"{name}: {rows[-1].status}", file=sys.stderr, flush=True)
    if options.output is None:
        print(markdown(rows), end="")
    else:
        options.output.write_text(markdown(rows), encoding="utf-8")
    return int(any(row.status == "NOT EXACT" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
