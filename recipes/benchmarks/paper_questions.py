"""The questions of `paper_tables.py`: published figures, models, machines, and what is simulated.

Knows nothing of printing. Assumptions are said there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from sppo_hf.cli.planning_arguments import trace_unknown
from sppo_hf.planning.cluster import (
    ClusterPlan,
    ClusterQuestion,
    Layout,
    SearchSpace,
    simulate_layout,
    solve_cluster,
)
from sppo_hf.planning.config_file import load_config
from sppo_hf.planning.cost import StageCost
from sppo_hf.planning.flops import PEAK_FLOPS, step_flops
from sppo_hf.planning.model_profile import Training, find_profile
from sppo_hf.planning.moments import Budgets
from sppo_hf.planning.partition import even_bounds
from sppo_hf.planning.profile_store import load_profile
from sppo_hf.planning.shape import ModelShape

DEVICE_SHARE, HOST_BYTES, GPUS_PER_NODE = 0.95, int(0.9 * 2e12), 8
LINK_BYTES_PER_SECOND = 25e9
ROWS = 12
# Where such a batch does not fit, one of so few rows may: each pipeline then holds one.
FEW_ROWS = 3
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
    """With recomputation; None where it was out of memory or no figure is given."""


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
# At which length SPPO's own ablation was made, and for 7B the first of its table.
ABLATED_K = {"7B": 512, "13B": 512, "65B": 640}

AWAY = (("whole", "sppo"), ("products", "full"), ("skeleton", "full"))
STAY = (("whole", "none"), ("products", "none"), ("skeleton", "none"))
LONG = SearchSpace(
    schedules=("seq1f1b", "interleaved_seq1f1b"),
    partitions=("even", "bounded"),
    frames=(("whole", "sppo"), ("products", "full"), ("skeleton", "none"), ("skeleton", "full")),
    kv_tiers=("device", "host"),
    chunk_tokens=(8 * K, 32 * K),
    least_used=0.9,
)
_PLAIN = replace(
    LONG, schedules=("1f1b", "seq1f1b"), partitions=("even",), frames=STAY, kv_tiers=("device",)
)
_CUT = replace(_PLAIN, partitions=("even", "bounded"))
_OFFLOADED = replace(_CUT, frames=(*AWAY, *STAY))
_STREAMED = replace(_OFFLOADED, kv_tiers=("device", "host"))
_SCHEDULES = ("1f1b", "seq1f1b", "zb_seq1f1b", "interleaved_seq1f1b")
ABLATION: tuple[tuple[str, SearchSpace], ...] = (
    ("equal lengths, 1f1b or seq1f1b, recompute", _PLAIN),
    ("+ partition by cost", _CUT),
    ("+ frames offloaded", _OFFLOADED),
    ("+ K/V on the host", _STREAMED),
    ("+ interleaved and zero-bubble", replace(_STREAMED, schedules=_SCHEDULES)),
)
"""Each may choose from all that those before it may."""

# Models by the numbers of stages that make them equal, and GPUs that their pipelines are made of.
SCALED = {"Llama 8B": (8, 16, 32), "Llama 70B": (40, 80)}
SCALED_GPUS = (128, 1024)
SCALED_LENGTHS_K = (K, 4 * K, 16 * K)
# Tokens of a step in each pipeline, if a row is shorter.
PIPELINE_TOKENS = 4 * K * K


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
    training = Training(dtype_bytes=2, parameter_bytes=2)
    return ModelShape.from_profile(find_profile(config, training, trace_unknown))


@cache
def llama(name: str) -> ModelShape:
    config = load_config("llama-3.1-8b")
    if name == "Llama 70B":
        sizes = {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80}
        config = SimpleNamespace(**{**vars(config), **sizes, "num_attention_heads": 64})
    training = Training(dtype_bytes=2, parameter_bytes=2)
    return ModelShape.from_profile(find_profile(config, training, trace_unknown))


def question(
    shape: ModelShape, gpus: int, tokens: int, rows: int, space: SearchSpace = LONG
) -> ClusterQuestion:
    profile = load_profile("a100-80gb")
    assert profile.device_bytes is not None, "the shipped profile knows its memory"
    device = int(DEVICE_SHARE * profile.device_bytes)
    return ClusterQuestion(
        cost=StageCost(shape=shape, profile=profile, dtype_name="bfloat16"),
        total_tokens=tokens,
        rows=rows,
        gpus=gpus,
        budgets=Budgets(device=device, host=HOST_BYTES, disk=0),
        gpus_per_node=GPUS_PER_NODE,
        link_bytes_per_second=LINK_BYTES_PER_SECOND,
        space=space,
    )


def ceilings(asked: ClusterQuestion) -> tuple[float, float]:
    """Tokens/s if no GPU ever idled: nothing run twice, and every forward, attention too, twice.

    Kernels at their best, in chunks of 16K. The second is more than full recomputation can reach.
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


def as_row(asked: ClusterQuestion, plan: ClusterPlan | None) -> dict[str, Any]:
    """What is said of a plan; of none, if nothing came near."""
    if plan is None:
        return {"fits": False, "lacks": None}
    flops = step_flops(asked.cost.shape, asked.rows, asked.total_tokens)
    return {
        "fits": not plan.missing_bytes,
        "lacks": plan.missing_bytes,
        "rows": asked.rows,
        "gpus": asked.gpus,
        **plan.layout._asdict(),
        "chunk_lengths": [end - start for start, end in plan.bounds],
        "tokens_per_second": plan.tokens_per_second,
        "mfu": flops / (plan.step_seconds * PEAK_FLOPS["A100"] * asked.gpus),
        "idle": plan.bubble_fraction,
        "again": plan.recompute_fraction,
        "device_bytes": max(plan.peak_bytes),
        "host_bytes": plan.host_bytes,
    }


def solved(asked: ClusterQuestion) -> dict[str, Any]:
    answer = solve_cluster(asked, keep=1, slack=SLACK)
    return as_row(asked, answer.best[0] if answer.best else answer.closest)


def faster(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fastest that fits, else the one that lacks least."""
    fitting = [row for row in rows if row["fits"]]
    if fitting:
        return max(fitting, key=lambda row: row["tokens_per_second"])
    return min(rows, key=lambda row: row["lacks"])


def paper_row(rows: int, at: tuple[int, int]) -> dict[str, Any]:
    """(a) One model at one of its lengths, in a small batch where a full one does not fit."""
    model, place = PAPER[at[0]], at[1]
    tokens = model.lengths_k[place] * K
    shape = gpt(model.name)
    asked = question(shape, model.gpus, tokens, rows)
    once, twice = ceilings(asked)
    found = solved(asked)
    if not found["fits"]:
        found = solved(question(shape, model.gpus, tokens, FEW_ROWS))
    return {
        "model": model.name,
        "tokens": tokens,
        "sppo": model.sppo[place],
        "megatron": model.megatron[place],
        "never_idle": once,
        "never_idle_recomputing": twice,
        **found,
    }


def seq1f1b_row(at: int) -> dict[str, Any]:
    """Seq1F1B's 7B: our plan, and plain 1F1B with whole rows that keeps or recomputes."""
    tokens_k, published, plain = SEQ1F1B[at]
    space = replace(LONG, chunk_tokens=(2 * K, 32 * K), partitions=("flops",))
    asked = question(gpt("7B"), 32, tokens_k * K, SEQ1F1B_ROWS, space)
    whole = replace(_PLAIN, schedules=("1f1b",), chunk_tokens=(tokens_k * K, tokens_k * K))
    return {
        "tokens": tokens_k * K,
        "published": published,
        "published_1f1b": plain,
        "ours": solved(asked),
        "ours_1f1b": solved(replace(asked, space=whole)),
    }


def ablation_rows(rows: int, name: str) -> list[dict[str, Any]]:
    """(b) Spaces that grow by one ingredient each; the best of a larger one is no worse."""
    model = next(model for model in PAPER if model.name == name)
    tokens = ABLATED_K[name] * K
    found: list[dict[str, Any]] = []
    for what, space in ABLATION:
        row = solved(question(gpt(name), model.gpus, tokens, rows, space))
        # A search may stop within SLACK of the best, and what came before is still allowed.
        row = faster([row, *found[-1:]])
        found.append({**row, "model": name, "tokens": tokens, "ingredient": what})
    return found


def scaled_layout(asked: ClusterQuestion, chunk_tokens: int) -> Layout:
    return Layout(
        *("seq1f1b", asked.gpus, 1, 1, asked.total_tokens // chunk_tokens),
        *("bounded", "skeleton", "full", "host"),
    )


def scaled_chunks(tokens: int) -> tuple[int, ...]:
    """Shorter chunks fill a pipeline sooner; past a few hundred, longer ones do too."""
    return (16 * K, 32 * K) if tokens <= PIPELINE_TOKENS else (32 * K,)


def scaling_row(at: tuple[str, int]) -> dict[str, Any]:
    """(c) A length: the best pipeline, as often beside itself as there are GPUs.

    Gradients are reduced over pipelines in less than a thousandth of such steps; left out.
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
            # On paper only: what a node's host would have to hold.
            per_gpu[gpus] = min(speeds, key=lambda row: row["host_bytes"])
    return {"model": name, "tokens": tokens, "gpus": per_gpu}


def longest(at: tuple[str, int]) -> dict[str, Any]:
    """(c) The longest row, in steps of 256K tokens, that a pipeline of so many GPUs holds."""
    name, stages = at

    def fits(count: int) -> bool:
        asked = question(llama(name), stages, count * 256 * K, 1)
        return any(
            not simulate_layout(asked, scaled_layout(asked, chunk_tokens)).missing_bytes
            for chunk_tokens in scaled_chunks(asked.total_tokens)
        )

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return {"model": name, "stages": stages, "tokens": low * 256 * K}
