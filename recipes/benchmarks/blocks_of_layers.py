"""Simulates an order between by layer and by chunk: all chunks through a block of layers first.

    python recipes/benchmarks/blocks_of_layers.py

For shipped models with LoRA on one H100, 16K to 1M tokens, hosts of 64 to 1,900 GiB: the fastest
step that fits, layer by layer or chunk by chunk, against that of blocks of about 2, 4 and 8 layers
(the nearest divisor of the number of layers). A block is planned, by layer, as one layer with the
matmuls, saved bytes, keys and values of all of its layers; between two blocks, as between two
layers, there are two buffers of hidden states. Backward rebuilds one of its layers at a time.

Every number is a simulation with the shipped profile of an H100; none is measured. Neither
attention nor K/V are recomputed here, so that fewer rows fit than `sppo plan` finds. Needs no GPU
and no torch.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from rich.console import Console
from rich.table import Table

from sppo_hf.cli.common import trace_unknown_model
from sppo_hf.config import SPPOConfig
from sppo_hf.planning.chunk_bounds import chunk_cuts
from sppo_hf.planning.config_file import load_config
from sppo_hf.planning.cost import ATTENTION_BACKWARD_FLOPS, ModelCost
from sppo_hf.planning.decisions import Batch, Order
from sppo_hf.planning.feasibility import request_for
from sppo_hf.planning.hardware import load_profile
from sppo_hf.planning.memory import Budgets, ByteTables
from sppo_hf.planning.model_profile import LayerProfile
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.solve import BudgetViolation, Choices, solve_chunks

MODELS = ("llama-3.1-8b", "qwen3-4b", "gpt-oss-20b", "smollm2-135m")
SIZES = (2, 4, 8)
"""Layers of a block."""
TOKENS = (2**14, 2**17, 2**20)
HOSTS_GIB = (64, 256, 1900)
_SUMMED = (
    *("num_kv_heads", "mlp_width", "forward_flops", "input_gradient_flops"),
    *("weight_gradient_flops", "inputs_recompute_flops", "matmuls_recompute_flops"),
    *("inputs_bytes", "matmuls_bytes", "whole_bytes", "total_weights", "adapter_weights"),
    *("inputs_rerun_bytes", "inputs_rerun_early_bytes"),
    *("matmuls_rerun_bytes", "matmuls_rerun_early_bytes"),
)


def fused(layers: tuple[LayerProfile, ...]) -> LayerProfile:
    """Return one layer with the costs of all of these; windowed attention counts as matmuls."""
    summed = {name: sum(getattr(layer, name) for layer in layers) for name in _SUMMED}
    whole = [layer for layer in layers if layer.window is None] or list(layers)
    for layer in layers:
        if layer not in whole:
            flops = (layer.window or 0) * layer.attention_flops_per_key
            summed["forward_flops"] += flops
            summed["input_gradient_flops"] += int(ATTENTION_BACKWARD_FLOPS * flops)
    heads = sum(layer.num_heads for layer in whole)
    return replace(whole[0], num_heads=heads, **summed)


def in_blocks(shape: ModelShape, size: int) -> ModelShape:
    """Return the shape with each block of layers as one layer."""
    return replace(shape, layers=tuple(map(fused, _blocks(shape.layers, size))))


def _blocks(layers: tuple[LayerProfile, ...], size: int) -> Iterator[tuple[LayerProfile, ...]]:
    for at in range(0, len(layers), size):
        yield layers[at : at + size]


def nearest_divisor(number: int, size: int) -> int:
    """Return the divisor of `number` above 1 that is nearest to `size`."""
    return min((n for n in range(2, number) if number % n == 0), key=lambda n: abs(n - size))


def one_layer_at_a_time(of: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of `ByteTables` so that it returns the temporaries of one layer of a block."""

    @functools.wraps(of)
    def divided(tables: ByteTables, **options: Any) -> Any:
        size = SIZE_OF.get(id(tables.shape), 1)
        return tuple(found // size for found in of(tables, **options))

    return divided


SIZE_OF: dict[int, int] = {}
"""Layers of a block, by the id of its shape."""


def fastest(cost: ModelCost, tokens: int, host: int, orders: tuple[Order, ...]) -> float | None:
    """Return the seconds of the fastest step that fits; None if none fits."""
    found = solve_chunks(
        cost,
        Batch(batch_rows=1, tile_tokens=512, training=True),
        list(chunk_cuts(cost.shape, tokens, "even"))[-2:],
        Budgets(device=80 * 2**30, host=host * 2**30),
        Choices(kv_tiers=("device", "host")),
        orders=orders,
    )
    return None if isinstance(found, BudgetViolation) else found.step_seconds


def rows(model: str) -> Iterator[list[str]]:
    """Yields a model's rows of the table."""
    request = request_for(
        load_config(model),
        SPPOConfig(),
        profile=load_profile("h100"),
        total_tokens=TOKENS[0],
        lora_rank=16,
        trace=trace_unknown_model,
    )
    shape, profile = request.shape, request.device.profile
    assert profile is not None, "it was named"
    sizes = [nearest_divisor(shape.num_layers, size) for size in SIZES]
    blocks = {size: in_blocks(shape, size) for size in sizes}
    SIZE_OF.update((id(made), size) for size, made in blocks.items())
    for tokens, host in product(TOKENS, HOSTS_GIB):
        of = functools.partial(ModelCost, profile=profile, dtype_name="bfloat16")
        now = fastest(of(shape=shape), tokens, host, ("by_layer", "by_chunk"))
        cells = [model, f"{tokens:,}", f"{host} GiB", "no" if now is None else f"{now:.1f} s"]
        for size in sizes:
            then = fastest(of(shape=blocks[size]), tokens, host, ("by_layer",))
            said = "no" if then is None else f"{then:.1f} s"
            if then is not None and now is not None:
                said = f"{then / now - 1:+.1%}"
            cells.append(f"{said} ({size})")
        yield cells


def main() -> None:
    """Prints one table."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for name in ("_rerun_bytes", "_workspace"):
        found = vars(ByteTables)[name]
        made = one_layer_at_a_time(getattr(found, "func", found))
        setattr(ByteTables, name, property(made) if name == "_rerun_bytes" else made)
    table = Table(title="Time of a step in blocks of layers (in brackets), simulated")
    for heading in ("model", "tokens", "host", "as planned", *["blocks"] * len(SIZES)):
        table.add_column(heading, justify="right")
    for model in MODELS:
        for cells in rows(model):
            table.add_row(*cells)
            print(*cells, sep="\t", file=sys.stderr, flush=True)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
