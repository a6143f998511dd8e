"""Measures errors of bfloat16 gradients against float32, of the plain model and in chunks.

    python recipes/benchmarks/bf16_gradients.py --check

Weights are rounded to bfloat16 first, so that all runs have the same model: in float32 (the
reference), unmodified in bfloat16 with two attention kernels, and in bfloat16 in chunks. An error
is the norm of the difference from the reference over the reference's norm, over all weights. Most
of it comes from rounding in a deep model's forward and is random: on one text any of the runs may
be twice as far as another. So the ratio to the plain model's error is taken text by text, and the
table has the geometric mean of the ratios with its 95% interval. With --check the exit status is 1
if a mean is above 1.1, or the mean for many chunks is above 1.1 times that for the fewest.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from typing import Any

import torch
from measuring import real_tokens
from rich.console import Console
from rich.table import Table
from smollm2 import DEFAULT_MODEL, load_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from sppo_hf import SPPOPlugin
from sppo_hf.testing.tiny_models import build_tiny_model

MAX_RATIO = 1.1

PLAIN, EAGER = "plain, sdpa", "plain, eager"

Gradients = dict[str, Tensor]


def gradients(model: nn.Module, ids: Tensor, **settings: Any) -> Gradients:
    """Return the gradients of a step on `ids` `[1, T]`, in chunks if there are settings."""
    plugin = None
    if settings:
        plugin = SPPOPlugin(**settings, show_plan=False, show_progress=False)
        plugin.convert(model)
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()  # leaves `found` its tensors
    if plugin is not None:
        plugin.revert(model)
    return found


def error(found: Gradients, exact: Gradients) -> float:
    """Relative error of all weights' gradients together."""
    off = sum(float((found[name].float() - exact[name]).square().sum()) for name in exact)
    return (off / sum(float(one.square().sum()) for one in exact.values())) ** 0.5


def mean_ratio(errors: list[float], others: list[float]) -> tuple[float, float, float]:
    """Geometric mean of the ratios text by text, and the ends of its 95% interval."""
    logs = [math.log(one / other) for one, other in zip(errors, others, strict=True)]
    mean = statistics.fmean(logs)
    off = 1.96 * statistics.stdev(logs) / len(logs) ** 0.5 if len(logs) > 1 else math.inf
    return math.exp(mean), math.exp(mean - off), math.exp(mean + off)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts weights; rotary frequencies stay in float32, as where a model is loaded in bfloat16."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def errors_by_way(
    model: PreTrainedModel, texts: tuple[Tensor, ...], ways: dict[str, dict[str, Any]]
) -> dict[str, list[float]]:
    """Return the error of every text: plain with each kernel, and with the settings of `ways`."""
    found: dict[str, list[float]] = {name: [] for name in (PLAIN, EAGER, *ways)}
    for number, ids in enumerate(texts):
        _cast(model, torch.float32)
        exact = gradients(model, ids)
        _cast(model, torch.bfloat16)
        for name, errors in found.items():
            model.set_attn_implementation("eager" if name == EAGER else "sdpa")
            errors.append(error(gradients(model, ids, **ways.get(name, {})), exact))
        model.set_attn_implementation("sdpa")
        line = ", ".join(f"{name} {errors[-1]:.4f}" for name, errors in found.items())
        print(f"text {number}: {line}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Measure, print a table, and with --check judge it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256, help="of a text (256)")
    parser.add_argument("--texts", type=int, default=32, help="two or more have an interval (32)")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 4], help="(1 and 4)")
    parser.add_argument("--orders", nargs="+", default=["by_chunk", "by_layer"])
    parser.add_argument("--models", nargs="+", default=["tiny", DEFAULT_MODEL])
    parser.add_argument("--check", action="store_true", help="fail where a mean is above 1.1")
    options = parser.parse_args()
    if options.texts < 1:
        parser.error(f"--texts is {options.texts}; allowed: 1 or more")
    ways = {
        f"{chunks} chunks, {order}": {"num_chunks": chunks, "order": order, "recompute": "full"}
        for chunks in sorted(set(options.chunks))
        for order in (options.orders if chunks > 1 else options.orders[:1])
    }
    fewest = next(iter(ways))
    table = Table("model", "how", "mean error", "of plain", "95% interval")
    worst = 0.0
    for name in options.models:
        torch.manual_seed(0)
        if name == "tiny":
            model = build_tiny_model("llama", dtype=torch.bfloat16)
            ids = torch.randint(0, model.config.vocab_size, (options.texts, options.tokens))
        else:
            model = load_model(name, dtype=torch.bfloat16)
            # Every other row: neighbours are of one file.
            ids = real_tokens(name, 2 * options.texts, options.tokens)[::2]
        model.train()
        found = errors_by_way(model, ids.split(1), ways)
        for way, errors in found.items():
            mean, low, high = mean_ratio(errors, found[PLAIN])
            mean_error = math.exp(statistics.fmean(map(math.log, errors)))
            interval = "" if way == PLAIN else f"{low:.3f} to {high:.3f}"
            table.add_row(name, way, f"{mean_error:.2%}", f"{mean:.3f}", interval)
            if way in ways:
                worst = max(worst, mean, mean_ratio(errors, found[fewest])[0])
    Console(width=100).print(table)
    if options.check and worst > MAX_RATIO:
        sys.exit(1)


if __name__ == "__main__":
    main()
