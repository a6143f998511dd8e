"""How far gradients in bfloat16 are from float32's, of the plain model and cut into many chunks.

    python recipes/benchmarks/bf16_gradients.py --check

A weight's gradient is the sum of what its chunks give, so in 16 bits more chunks could mean more
rounding. Weights are rounded to bfloat16 first, so all three know the same model: in float32 (the
reference), in bfloat16 untouched, and in bfloat16 in chunks. The error of a gradient is the norm of
its difference from the reference by the reference's norm: over all weights together, and of the
weight for which it is largest beside the plain model's. With --check the exit status is 1 if
chunks are farther from float32 than 1.1 times the plain model (invariant 1).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from measuring import real_tokens
from rich.console import Console
from rich.table import Table
from smollm2 import DEFAULT_MODEL, load_model
from torch import Tensor, nn

from sppo_hf import SPPOPlugin
from sppo_hf.testing.tiny_models import build_tiny_model

MOST_RATIO = 1.1

Gradients = dict[str, Tensor]


def gradients(model: nn.Module, ids: Tensor, **settings: Any) -> Gradients:
    """Gradients in float32 of a step on `ids` `[1, T]`; with settings in chunks, then reverted."""
    plugin = None
    if settings:
        plugin = SPPOPlugin(**settings, show_plan=False, show_progress=False)
        plugin.convert(model)
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    if plugin is not None:
        plugin.revert(model)
    return found


def errors(found: Gradients, exact: Gradients) -> dict[str, float]:
    """Relative errors of every weight's gradient, and of all together under ""."""
    off = {name: float((found[name] - exact[name]).norm()) for name in exact}
    size = {name: float(exact[name].norm()) for name in exact}

    def norm(parts: dict[str, float]) -> float:
        return sum(x * x for x in parts.values()) ** 0.5

    return {"": norm(off) / norm(size)} | {n: off[n] / size[n] for n in exact if size[n]}


def main() -> None:
    """Measure, print a table, and with --check judge it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--chunks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--models", nargs="+", default=["tiny", DEFAULT_MODEL])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    table = Table("model", "how", "all weights", "of plain", "worst weight", "of plain")
    worst = 0.0
    for name in options.models:
        torch.manual_seed(0)
        if name == "tiny":
            model = build_tiny_model("llama", dtype=torch.bfloat16)
            ids = torch.randint(0, model.config.vocab_size, (1, options.tokens))
        else:
            model = load_model(name, dtype=torch.bfloat16)
            ids = real_tokens(name, 1, options.tokens)
        model.train()
        exact = gradients(model.float(), ids)
        model.bfloat16()
        plain = errors(gradients(model, ids), exact)
        table.add_row(name, "plain bfloat16", f"{plain['']:.2%}", "1.00", "", "")
        for chunks in options.chunks:
            for order in ("by_chunk", "by_layer"):
                settings = {"num_chunks": chunks, "order": order, "recompute": "full"}
                ours = errors(gradients(model, ids, **settings), exact)
                ratios = {n: ours[n] / plain[n] for n in ours if n and plain[n]}
                which = max(ratios, key=ratios.__getitem__)
                worst = max(worst, ours[""] / plain[""])
                table.add_row(
                    *("", f"{chunks} chunks, {order}", f"{ours['']:.2%}"),
                    *(f"{ours[''] / plain['']:.2f}", f"{ours[which]:.2%} ({which})"),
                    f"{ratios[which]:.2f}",
                )
    Console(width=140).print(table)
    if options.check and worst > MOST_RATIO:
        sys.exit(1)


if __name__ == "__main__":
    main()
