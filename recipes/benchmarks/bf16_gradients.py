"""How far gradients in bfloat16 are from float32's, of the plain model and cut into many chunks.

    python recipes/benchmarks/bf16_gradients.py --check

Autograd adds up a weight's gradient over chunks in the weight's dtype, so in 16 bits more chunks
could mean more rounding. Weights are rounded to bfloat16 first, so all three know the same model:
in float32 (the reference), in bfloat16 untouched, and in bfloat16 in chunks; with one chunk nothing
is added up. The error is the norm of the difference from the reference by the reference's norm,
over all weights and texts together. What a deep model rounds in forward decides most of it: with
another attention kernel the plain model's may be twice as large or half. So many chunks are held
against one: with --check the exit status is 1 if they are 1.1 times as far from float32.
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


def error(found: list[Gradients], exact: list[Gradients]) -> float:
    """Relative error of all weights' gradients of all texts together."""
    pairs = [
        (one[name], other[name]) for one, other in zip(found, exact, strict=True) for name in other
    ]
    off = sum(float((one - other).square().sum()) for one, other in pairs)
    return (off / sum(float(other.square().sum()) for _, other in pairs)) ** 0.5


def main() -> None:
    """Measure, print a table, and with --check judge it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--orders", nargs="+", default=["by_chunk", "by_layer"])
    parser.add_argument("--models", nargs="+", default=["tiny", DEFAULT_MODEL])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    table = Table("model", "how", "error", "of plain")
    worst = 0.0  # of many chunks beside one
    for name in options.models:
        torch.manual_seed(0)
        if name == "tiny":
            model = build_tiny_model("llama", dtype=torch.bfloat16)
            ids = torch.randint(0, model.config.vocab_size, (options.texts, options.tokens))
        else:
            model = load_model(name, dtype=torch.bfloat16)
            ids = real_tokens(name, options.texts, options.tokens)
        model.train()
        texts = ids.split(1)
        model.float()
        exact = [gradients(model, text) for text in texts]
        model.bfloat16()
        plain = error([gradients(model, text) for text in texts], exact)
        table.add_row(name, "plain bfloat16", f"{plain:.2%}", "1.00")
        for order in options.orders:
            one: float | None = None
            for chunks in options.chunks:
                settings = {"num_chunks": chunks, "order": order, "recompute": "full"}
                ours = error([gradients(model, text, **settings) for text in texts], exact)
                one = one or ours
                worst = max(worst, ours / one)
                how = f"{chunks} chunks, {order}"
                table.add_row("", how, f"{ours:.2%}", f"{ours / plain:.2f}")
                print(f"{name}, {how}: {ours / plain:.3f} of plain", file=sys.stderr, flush=True)
    Console(width=100).print(table)
    if options.check and worst > MOST_RATIO:
        sys.exit(1)


if __name__ == "__main__":
    main()
