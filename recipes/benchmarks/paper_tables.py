"""SPPO's and Seq1F1B's published tables beside what the planner makes of the same questions.

    python recipes/benchmarks/paper_tables.py --check

Every number of ours is a **simulation** of a whole step over all ranks, none is measured; published
ones are quoted. Assumed are: the shipped A100-80GB profile (public figures), but 13 GB/s each way
between GPU and host, which SPPO's figure 5 comes to; 240 GB/s within a node and 20 GB/s a GPU
between nodes; 95% of a device's memory, 90% of 2 TB host memory per node of 8 GPUs; one sequence a
step, as in the paper; bf16 weights and gradients, two float32 Adam states. Models are GPT shapes:
4h MLP, as many K/V heads as heads, heads of 128, tied vocabulary of 50,257.

Layouts are searched over data, pipeline and sequence parallelism, chunks and schedules; groups of
sequence-parallel GPUs stay within a node unless nothing else fits. Of (a) and (b) shared units
(msp) may also be those of sequence-parallel groups and with K/V on the host, as SPPO's are; "runs"
is the best of what our runtime carries out. Seq1F1B's table and (c) have no sequence parallelism,
copies of 20.5 GB/s and 25 GB/s on every hop.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from sppo_hf.cli.common import trace_unknown_model
from sppo_hf.planning.chunk_bounds import even_bounds
from sppo_hf.planning.cluster import ClusterPlan, ClusterRequest, simulate_layout, solve_cluster
from sppo_hf.planning.config_file import load_config
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.hardware import DATASHEETS, HardwareProfile, load_profile
from sppo_hf.planning.layouts import Layout, SearchSpace
from sppo_hf.planning.memory import Budgets
from sppo_hf.planning.model_profile import Training, find_profile
from sppo_hf.planning.model_shape import ModelShape, step_flops
from sppo_hf.planning.pipeline_cost import OffloadRule
from sppo_hf.rules import format_bytes

DEVICE_SHARE, HOST_BYTES, GPUS_PER_NODE = 0.95, int(0.9 * 2e12), 8
LINK_BYTES_PER_SECOND = 25e9
SLACK = 0.02
K = 1024


class Published(NamedTuple):
    """One model of SPPO's table (arXiv 2503.10377): total tokens/s by length."""

    name: str
    hidden_size: int
    layers: int
    gpus: int
    lengths_k: tuple[int, ...]
    sppo: tuple[int, ...]
    megatron: tuple[int | None, ...]
    """Megatron's speed with recomputation; None where it ran out of memory or none is given."""


PAPER = (
    Published(
        *("7B", 4096, 32, 32, (512, 640, 768, 896, 1024)),
        *((10_910, 8860, 6900, 5660, 5250), (9180, 7530, 6350, None, None)),
    ),
    Published(
        *("13B", 5120, 40, 64, (512, 640, 768, 1024, 1280)),
        *((13_430, 11_460, 8650, 6240, 5230), (10_900, 9330, None, None, None)),
    ),
    Published(
        *("65B", 8192, 80, 128, (512, 600, 640, 768, 1024)),
        *((6460, 6140, 5110, 2000, 2000), (5030, 1810, 1620, None, None)),
    ),
)
# Seq1F1B (arXiv 2406.03488), 7B on 32 A100: length in K, its tokens/s, and plain 1F1B's.
SEQ1F1B = ((32, 53_500, 48_200), (128, 30_400, None))
SEQ1F1B_ROWS = 32
# Lengths of SPPO's ablation, in K; for 7B, the first length of its table.
ABLATED_K = {"7B": 512, "13B": 512, "65B": 640}

RULES = (("whole", "sppo"), ("matmuls", "full"), ("inputs", "none"), ("inputs", "full"))
"""What is saved, and what of it is offloaded, in every search."""

LONG = SearchSpace(
    schedules=("seq1f1b", "interleaved_seq1f1b"),
    partitions=("even", "bounded"),
    activation_rules=RULES,
    sp=(1,),
    # As in the papers.
    sharded=(False,),
    orders=("by_chunk",),
    chunk_tokens=(8 * K, 32 * K),
    min_device_share=0.9,
)
_PLAIN = replace(
    LONG,
    schedules=("1f1b",),
    partitions=("even",),
    activation_rules=(("whole", "none"), ("matmuls", "none"), ("inputs", "none")),
    kv_tiers=("device",),
)
# All layouts for one sequence a step, on the papers' machine.
ONE_ROW = SearchSpace(
    schedules=("seq1f1b", "zb_seq1f1b", "interleaved_seq1f1b", "msp"),
    partitions=("bounded",),
    activation_rules=RULES,
    sp=(4, 8, 16),
    chunk_tokens=(K, 8 * K),
    # SPPO shares units between sequence-parallel groups, which our runtime does not yet do.
    beyond_runtime=True,
)
# The steps of SPPO's ablation, at its own layout and without recomputation.
ABLATION: tuple[tuple[str, str, OffloadRule], ...] = (
    ("nothing offloaded", "seq1f1b", "none"),
    ("all offloaded", "seq1f1b", "full"),
    ("the paper's share offloaded", "seq1f1b", "sppo"),
    ("+ multiplexed partitioning", "msp", "sppo"),
)
ABLATED_LAYOUTS = {"7B": (8, 4, 32), "13B": (8, 8, 32), "65B": (16, 8, 80)}
"""SP, PP and N of the paper's table at these lengths."""
PUBLISHED_ABLATION = {"13B": (1.0, 0.91, 1.23, 1.44), "65B": (None, 2.1, 3.38, 3.48)}
"""Read off figure 11. Of 13B relative to nothing offloaded; of 65B to Megatron, as printed."""
COPY_BYTES_PER_SECOND = 13e9
"""Each way with both at once, computed from the gigabytes and milliseconds of figure 5."""
MAX_ACTIONS = 240_000
"""Simulated for one question, as by `sppo plan`; a longer search may find a faster layout."""
PUBLISHED_LONGEST_K = {32: (1331, 1024), 64: (2048, 1408), 128: (4096, 2181)}
"""Longest lengths of 7B in K, SPPO's and Megatron's, by number of GPUs."""

# Numbers of stages that divide each model evenly, and numbers of GPUs.
SCALED = {"Llama 8B": (8, 16, 32), "Llama 70B": (40, 80)}
SCALED_GPUS = (128, 1024)
SCALED_LENGTHS_K = (K, 4 * K, 16 * K)
# Tokens of a step in each pipeline, if a row is shorter.
PIPELINE_TOKENS = 4 * K * K


def shape_of(config: object) -> ModelShape:
    """The shape of a model whose weights, all in bf16, are all trained."""
    training = Training(dtype_bytes=2, parameter_bytes=2)
    return ModelShape.from_profile(find_profile(config, training, trace_unknown_model))


@cache
def gpt(name: str) -> ModelShape:
    model = next(model for model in PAPER if model.name == name)
    config = SimpleNamespace(
        model_type="gpt2",
        n_embd=model.hidden_size,
        n_layer=model.layers,
        n_head=model.hidden_size // 128,
        vocab_size=50_257,
    )
    return shape_of(config)


@cache
def llama(name: str) -> ModelShape:
    config = load_config("llama-3.1-8b")
    if name == "Llama 70B":
        sizes = {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80}
        config = SimpleNamespace(**{**vars(config), **sizes, "num_attention_heads": 64})
    return shape_of(config)


def question(
    shape: ModelShape,
    gpus: int,
    tokens: int,
    rows: int,
    space: SearchSpace = LONG,
    profile: HardwareProfile | None = None,
) -> ClusterRequest:
    """A question without sequence parallelism, all links as slow as those between nodes."""
    profile = profile or load_profile("a100-80gb")
    assert profile.device_bytes is not None, "shipped profiles know their memory"
    return ClusterRequest(
        cost=ModelCost(shape=shape, profile=profile, dtype_name="bfloat16"),
        total_tokens=tokens,
        rows=rows,
        gpus=gpus,
        budgets=Budgets(device=int(DEVICE_SHARE * profile.device_bytes), host=HOST_BYTES, disk=0),
        gpus_per_node=GPUS_PER_NODE,
        link_bytes_per_second=LINK_BYTES_PER_SECOND,
        space=space,
    )


def machine() -> HardwareProfile:
    """The papers' A100, with copies at the rate of their figure."""
    ways = ("d2h", "h2d", "both_d2h", "both_h2d")
    rates = {f"{way}_bytes_per_second": COPY_BYTES_PER_SECOND for way in ways}
    return replace(load_profile("a100-80gb"), **rates)


def one_row(
    shape: ModelShape,
    gpus: int,
    tokens: int,
    space: SearchSpace = ONE_ROW,
    profile: HardwareProfile | None = None,
) -> ClusterRequest:
    """A question about steps of one sequence, with the profile's rates within and between nodes."""
    profile = profile or machine()
    assert profile.network_bytes_per_second is not None, "shipped profiles know their links"
    return replace(
        question(shape, gpus, tokens, 1, space, profile),
        link_bytes_per_second=profile.network_bytes_per_second,
        node_bytes_per_second=profile.node_bytes_per_second,
    )


def exchange_fraction(asked: ClusterRequest, plan: ClusterPlan) -> float:
    """Share of the ranks' compute time spent in all-to-alls, without those of shared units."""
    cost = asked.bounds_of_layout.cost(plan.layout)
    layers = range(cost.shape.num_layers)
    seconds = 2 * sum(
        cost.all_to_all_seconds(layer, end - start)
        for start, end in plan.bounds
        for layer in layers
    )
    busy = plan.step_seconds * (1.0 - plan.bubble_fraction) * plan.layout.stages
    return seconds / busy


def ceilings(asked: ClusterRequest) -> tuple[float, float]:
    """Tokens/s if no GPU ever idled, without recomputation and with every forward run twice.

    In chunks of 16K, where kernels are fastest. The second recomputes attention too, which full
    recomputation here does not.
    """
    cost, tokens = asked.cost, asked.total_tokens
    once = twice = 0.0
    for start, end in even_bounds(tokens, max(1, tokens // (16 * K))):
        layers = range(cost.shape.num_layers)
        forward = sum(cost.forward_seconds(layer, start, end) for layer in layers)
        backward = sum(cost.backward_seconds(layer, start, end) for layer in layers)
        once += forward + backward + cost.head_seconds(end - start)
        twice += forward
    return asked.gpus * tokens / once, asked.gpus * tokens / (once + twice)


def as_row(asked: ClusterRequest, plan: ClusterPlan | None) -> dict[str, Any]:
    """Return a plan's row of a table; None: no layout came close to fitting."""
    if plan is None:
        return {"fits": False, "lacks": None}
    flops = step_flops(asked.cost.shape, asked.rows, asked.total_tokens)
    return {
        "fits": not plan.missing_bytes,
        "lacks": plan.missing_bytes,
        "rows": asked.rows,
        "gpus": asked.gpus,
        **plan.layout.to_json(),
        "chunk_lengths": [end - start for start, end in plan.bounds],
        "tokens_per_second": plan.tokens_per_second,
        "mfu": flops / (plan.step_seconds * DATASHEETS["A100"].peak_flops * asked.gpus),
        "idle": plan.bubble_fraction,
        "again": plan.recompute_fraction,
        "exchange": exchange_fraction(asked, plan),
        "device_bytes": max(plan.peak_bytes),
        "host_bytes": plan.host_bytes,
    }


def solved(asked: ClusterRequest) -> dict[str, Any]:
    answer = solve_cluster(asked, keep=1, slack=SLACK, max_actions=MAX_ACTIONS)
    return as_row(asked, answer.best[0] if answer.best else answer.closest)


def paper_row(at: tuple[int, int]) -> dict[str, Any]:
    """(a) Return the best layout for one model at one length, with one sequence a step."""
    model, place = PAPER[at[0]], at[1]
    tokens = model.lengths_k[place] * K
    asked = one_row(gpt(model.name), model.gpus, tokens)
    once, twice = ceilings(asked)
    # What our runtime can run: only single devices can share units, so sp=1 is searched too.
    space = replace(asked.space, sp=(1, *asked.space.sp), beyond_runtime=False)
    runs = solved(replace(asked, space=space))
    # Layouts with shared units have many actions, and a search spends only a quarter on them.
    shared = solved(replace(asked, space=replace(asked.space, schedules=("msp",))))
    found = (runs, solved(asked), shared)
    ours = max(found, key=lambda row: (row["fits"], row.get("tokens_per_second", 0)))
    return {
        "model": model.name,
        "tokens": tokens,
        "sppo": model.sppo[place],
        "megatron": model.megatron[place],
        "never_idle": once,
        "never_idle_recomputing": twice,
        **ours,
        "runs": runs,
    }


def seq1f1b_row(at: int) -> dict[str, Any]:
    """Return Seq1F1B's 7B: our plan, and plain 1F1B over whole rows."""
    tokens_k, published, plain = SEQ1F1B[at]
    space = replace(LONG, chunk_tokens=(2 * K, 32 * K), partitions=("flops",))
    asked = question(gpt("7B"), 32, tokens_k * K, SEQ1F1B_ROWS, space)
    whole = replace(_PLAIN, chunk_tokens=(tokens_k * K, tokens_k * K))
    return {
        "tokens": tokens_k * K,
        "published": published,
        "published_1f1b": plain,
        "ours": solved(asked),
        "ours_1f1b": solved(replace(asked, space=whole)),
    }


def ablation_rows(name: str) -> list[dict[str, Any]]:
    """(b) Return the four steps of SPPO's ablation at its own layout, fitting or not."""
    model = next(model for model in PAPER if model.name == name)
    tokens, (sp, stages, chunks) = ABLATED_K[name] * K, ABLATED_LAYOUTS[name]
    asked = one_row(gpt(name), model.gpus, tokens)
    found: list[dict[str, Any]] = []
    for place, (what, schedule, offload) in enumerate(ABLATION):
        layout = Layout(schedule, stages, 1, 1, chunks, "flops", "whole", offload, sp=sp)
        row = as_row(asked, simulate_layout(asked, layout))
        published = PUBLISHED_ABLATION.get(name, (None,) * len(ABLATION))[place]
        found.append(
            {**row, "model": name, "tokens": tokens, "ingredient": what, "published": published}
        )
    return found


def largest_count(fits: Callable[[int], bool], *, first: int) -> int:
    """Return the largest fitting count, by doubling from `first` and bisection; 0 if none does."""
    low, high = 0, first
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def longest_7b(gpus: int) -> dict[str, Any]:
    """(d) Return SPPO's 7B at its longest length, a multiple of 128K: one pipeline, sp=8."""
    step = 128 * K
    layouts = [Layout("seq1f1b", gpus // 8, 1, 1, 1, "bounded", "inputs", "full", "host", sp=8)]

    def fits(count: int) -> bool:
        tokens = count * step
        asked = one_row(gpt("7B"), gpus, tokens)
        return any(
            not simulate_layout(asked, x._replace(num_chunks=tokens // chunk)).missing_bytes
            for x in layouts
            for chunk in (32 * K, 64 * K)
        )

    count = largest_count(fits, first=8)
    sppo, megatron = PUBLISHED_LONGEST_K[gpus]
    return {"gpus": gpus, "tokens": count * step, "sppo": sppo * K, "megatron": megatron * K}


def trl_row(tokens_k: int) -> dict[str, Any]:
    """(e) Return Qwen3-8B, all weights, on 8 H100; at 1M tokens TRL measured 380 s."""
    config = load_config("qwen3-4b")
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    }
    config = SimpleNamespace(**{**vars(config), **sizes})
    if hasattr(config, "layer_types"):
        config.layer_types = ["full_attention"] * 36
    shape = shape_of(config)
    space = SearchSpace(
        schedules=("seq1f1b", "interleaved_seq1f1b", "msp"),
        activation_rules=RULES,
        sp=(1, 2, 4, 8),
        chunk_tokens=(4 * K, 16 * K),
    )
    asked = one_row(shape, 8, tokens_k * K, space, load_profile("h100"))
    answer = solve_cluster(asked, keep=3, slack=SLACK, max_actions=MAX_ACTIONS)
    plans = answer.best or ((answer.closest,) if answer.closest else ())
    flops = step_flops(shape, 1, asked.total_tokens)
    return {
        "model": "Qwen3-8B",
        "tokens": asked.total_tokens,
        "trl_seconds": 380.0 if tokens_k == K else None,
        "plans": [
            {
                **as_row(asked, plan),
                "step_seconds": plan.step_seconds,
                "mfu": flops / (plan.step_seconds * DATASHEETS["H100"].peak_flops * asked.gpus),
            }
            for plan in plans
        ],
    }


def scaled_layout(asked: ClusterRequest, chunk_tokens: int) -> Layout:
    return Layout(
        *("seq1f1b", asked.gpus, 1, 1, asked.total_tokens // chunk_tokens),
        *("bounded", "inputs", "full", "host"),
    )


def scaled_chunks(tokens: int) -> tuple[int, ...]:
    """Chunk lengths to try: shorter ones fill a pipeline sooner, which matters for short rows."""
    return (16 * K, 32 * K) if tokens <= PIPELINE_TOKENS else (32 * K,)


def scaling_row(at: tuple[str, int]) -> dict[str, Any]:
    """(c) Return the best pipeline for a length, replicated over all GPUs.

    Reducing gradients over replicas takes less than a thousandth of such steps and is left out.
    """
    name, tokens_k = at
    shape, tokens = llama(name), tokens_k * K
    rows = max(1, PIPELINE_TOKENS // tokens)
    tried: list[dict[str, Any]] = []
    for stages in SCALED[name] if tokens <= PIPELINE_TOKENS else SCALED[name][-1:]:
        for chunk_tokens in scaled_chunks(tokens):
            asked = question(shape, stages, tokens, rows)
            tried.append(as_row(asked, simulate_layout(asked, scaled_layout(asked, chunk_tokens))))
    per_gpu: dict[int, dict[str, Any]] = {}
    for gpus in SCALED_GPUS:
        speeds = [
            {**row, "per_gpu": gpus // row["stages"] * row["tokens_per_second"] / gpus}
            for row in tried
        ]
        fitting = [row for row in speeds if row["fits"]]
        per_gpu[gpus] = max(fitting, key=lambda row: row["per_gpu"], default={})
        if not fitting:
            # Does not fit: shows how much host memory a node would need.
            per_gpu[gpus] = min(speeds, key=lambda row: row["host_bytes"])
    return {"model": name, "tokens": tokens, "gpus": per_gpu}


def longest(at: tuple[str, int]) -> dict[str, Any]:
    """(c) Return the longest row, a multiple of 256K tokens, that fits a pipeline."""
    name, stages = at

    def fits(count: int) -> bool:
        asked = question(llama(name), stages, count * 256 * K, 1)
        return any(
            not simulate_layout(asked, scaled_layout(asked, chunk_tokens)).missing_bytes
            for chunk_tokens in scaled_chunks(asked.total_tokens)
        )

    count = largest_count(fits, first=1)
    return {"model": name, "stages": stages, "tokens": count * 256 * K}


def collect(options: argparse.Namespace) -> dict[str, list[Any]]:
    """Compute all tables, several questions at a time."""
    names = [model.name for model in PAPER]
    jobs: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
        "ablation": (ablation_rows, names),
        "paper": (
            paper_row,
            [(i, j) for i, model in enumerate(PAPER) for j in range(len(model.lengths_k))],
        ),
        "longest_7b": (longest_7b, list(PUBLISHED_LONGEST_K)),
        "trl": (trl_row, [K]),
        "seq1f1b": (seq1f1b_row, list(range(len(SEQ1F1B)))),
        "scaling": (scaling_row, [(n, tokens) for n in SCALED for tokens in SCALED_LENGTHS_K]),
        "longest": (longest, [(name, stages) for name in SCALED for stages in SCALED[name]]),
    }
    with ProcessPoolExecutor(options.workers) as pool:
        found = {
            table: [pool.submit(make, at) for at in places]
            for table, (make, places) in jobs.items()
            if table in options.tables
        }
        return {table: [future.result() for future in rows] for table, rows in found.items()}


def layout_words(row: dict[str, Any]) -> str:
    """A layout in words: dp/pp/sp, chunks, and what activations and K/V do."""
    virtual = f" {row['virtual']}" if row["virtual"] > 1 else ""
    again = {"whole": "no", "matmuls": "selective", "inputs": "full"}[row["saved"]]
    leaving = {"none": "", "full": ", offloaded", "sppo": ", partly offloaded"}[row["offload"]]
    kv = ", K/V on host" if row["kv_tier"] == "host" else ""
    name = row["schedule"].removesuffix("_seq1f1b")
    if row["stages"] == 1:
        name = row["order"].replace("_", " ")
    sharded = ", FSDP2" if row["sharded"] else ""
    return (
        f"{row['replicas']}/{row['stages']}/{row['sp']}{sharded}, {row['num_chunks']} chunks, "
        f"{name}{virtual}, {again} recompute{leaving}{kv}"
    )


def speed(row: dict[str, Any]) -> str:
    if row["fits"]:
        return f"{row['tokens_per_second']:,.0f}"
    return f"lacks {format_bytes(row['lacks'])}"


def used(row: dict[str, Any]) -> tuple[str, str]:
    """Device of the fullest rank, host of the fullest node."""
    return format_bytes(row["device_bytes"]), f"{row['host_bytes'] / 1e12:.2f} TB"


Rows = list[Any]


def _paper(found: Rows) -> list[tuple[str, ...]]:
    return [
        (
            f"{row['model']}, {row['gpus']}",
            f"{row['tokens'] // K}K",
            f"{row['sppo']:,}",
            "" if row["megatron"] is None else f"{row['megatron']:,}",
            speed(row),
            *(f"{row['mfu']:.1%}", f"{row['idle']:.1%}", f"{row['again']:.1%}"),
            *(f"{row['exchange']:.1%}", f"{row['never_idle']:,.0f}"),
            *(*used(row), layout_words(row)),
            *(speed(row["runs"]), layout_words(row["runs"])),
        )
        for row in found
    ]


def _seq1f1b(found: Rows) -> list[tuple[str, ...]]:
    return [
        (
            f"{row['tokens'] // K}K",
            f"{row['published']:,}",
            "" if row["published_1f1b"] is None else f"{row['published_1f1b']:,}",
            *(speed(row["ours_1f1b"]), speed(row["ours"])),
            *(f"{row['ours']['mfu']:.1%}", layout_words(row["ours"])),
        )
        for row in found
    ]


def _ablation(found: Rows) -> list[tuple[str, ...]]:
    return [
        (
            f"{row['model']}, {row['tokens'] // K}K",
            *(row["ingredient"], f"{row['tokens_per_second']:,.0f}"),
            f"{row['tokens_per_second'] / steps[0]['tokens_per_second']:.2f}",
            "" if row["published"] is None else f"{row['published']:.2f}",
            *(f"{row['idle']:.1%}", format_bytes(row["device_bytes"])),
            "" if row["fits"] else format_bytes(row["lacks"]),
            layout_words(row),
        )
        for steps in found
        for row in steps
    ]


def _scaling(found: Rows) -> list[tuple[str, ...]]:
    return [
        (
            *(row["model"], f"{row['tokens'] // K**2}M", f"{gpus:,}"),
            *(f"{best['per_gpu']:,.2f}", *used(best), "yes" if best["fits"] else "NO"),
            layout_words({**best, "replicas": gpus // best["stages"]}),
        )
        for row in found
        for gpus, best in row["gpus"].items()
    ]


def _longest_7b(found: Rows) -> list[tuple[str, ...]]:
    return [
        (
            f"{row['gpus']}",
            *(f"{row[who] / K**2:.3g}M" for who in ("sppo", "megatron", "tokens")),
        )
        for row in found
    ]


def _trl(found: Rows) -> list[tuple[str, ...]]:
    return [
        (
            *(row["model"], f"{row['tokens'] // K}K", f"{row['trl_seconds']:,.0f} s"),
            f"{plan['step_seconds']:,.0f} s" if plan["fits"] else speed(plan),
            *(f"{plan['mfu']:.1%}", f"{plan['idle']:.1%}", *used(plan), layout_words(plan)),
        )
        for row in found
        for plan in row["plans"]
    ]


_TABLES: dict[str, tuple[str, str, Callable[[Rows], list[tuple[str, ...]]]]] = {
    "paper": (
        "(a) tokens/s of all GPUs: ours SIMULATED; SPPO and Megatron as published",
        "model, GPUs|tokens|SPPO|Megatron|ours|MFU|idle|again|all-to-all|never idle"
        "|device|node's host|plan|runs|its plan",
        _paper,
    ),
    "seq1f1b": (
        "Seq1F1B's 7B on 32 GPUs, tokens/s: ours SIMULATED; theirs as published",
        "tokens|Seq1F1B|1F1B|our 1F1B|ours|MFU|plan",
        _seq1f1b,
    ),
    "ablation": (
        "(b) SPPO's four steps at SPPO's own layout: ours SIMULATED; figure 11's as published",
        "model, tokens|step|tokens/s|relative|published|idle|device|lacks|plan",
        _ablation,
    ),
    "scaling": (
        "(c) tokens/s per GPU, SIMULATED; what does not fit, as if it did",
        "model|tokens|GPUs|per GPU|device|node's host|fits|plan",
        _scaling,
    ),
    "longest_7b": (
        "(d) longest row of 7B: ours SIMULATED; SPPO and Megatron as published",
        "GPUs|SPPO|Megatron|ours",
        _longest_7b,
    ),
    "trl": (
        "(e) all weights, 8 H100, one row a step: ours SIMULATED; TRL's measured by them",
        "model|tokens|TRL|ours|MFU|idle|device|node's host|plan",
        _trl,
    ),
}
"""Tables by name: title, headings, and the function that makes the cells."""


def show(tables: dict[str, Rows]) -> None:
    """All tables on the terminal."""
    console = Console(width=190)
    for name, (title, columns, cells) in _TABLES.items():
        made = Table(title=title, title_justify="left")
        for heading in columns.split("|"):
            made.add_column(heading, justify="left" if heading.endswith("plan") else "right")
        for row in cells(tables.get(name, [])):
            made.add_row(*row)
        if made.row_count:
            console.print(made)
    for row in tables.get("longest", []):
        words = f"{row['model']}, pipelines of {row['stages']} GPUs"
        console.print(f"{words}: longest row {row['tokens'] / K**2:.2f}M tokens (simulated)")


def wrong(tables: dict[str, list[Any]]) -> list[str]:
    """Return a message for each number in the tables that is impossible or suspicious."""
    found: list[str] = []
    for row in tables.get("paper", []):
        where = f"{row['model']} at {row['tokens']:,}"
        if not row["fits"]:
            found.append(f"{where}: no layout fits")
        if row["tokens_per_second"] > row["never_idle"]:
            found.append(f"{where}: faster than GPUs that never idle")
    for steps in tables.get("ablation", []):
        none, full, share, shared = (step["tokens_per_second"] for step in steps)
        if not full <= share <= none or not share < shared:
            found.append(f"{steps[0]['model']}: the four steps are not in the paper's order")
    for row in tables.get("longest_7b", []):
        if row["tokens"] < row["sppo"]:
            found.append(f"7B on {row['gpus']} GPUs: shorter than SPPO's longest row")
    for name in SCALED:
        lengths = [row["tokens"] for row in tables.get("longest", []) if row["model"] == name]
        if lengths != sorted(lengths):
            found.append(f"{name}: more GPUs hold less: {lengths}")
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["paper", "ablation", "longest_7b", "trl", "seq1f1b", "scaling", "longest"]
    parser.add_argument("--tables", nargs="+", choices=names, default=names)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="file that all numbers are written to")
    parser.add_argument("--check", action="store_true", help="exit status 1 if they contradict")
    options = parser.parse_args(argv)
    began = time.perf_counter()
    tables = collect(options)
    show(tables)
    missed = wrong(tables)
    if options.json:
        text = {"simulated": True, "tables": tables, "wrong": missed}
        options.json.write_text(json.dumps(text, indent=2))
    print(f"{time.perf_counter() - began:.0f} s")
    for sentence in missed:
        print(f"missed: {sentence}", file=sys.stderr)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
