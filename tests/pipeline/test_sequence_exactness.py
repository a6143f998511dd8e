"""Sequences that gloo ranks share are exact: losses, every gradient by name, the norm of all.

Invariants 1 to 3 of the design. All cases of one size run in one launch; a case's reference is the
unmodified model in rank 0's process, in float64.
"""

import re
import shutil
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from sppo_hf.engine.family_guard import PROVED
from sppo_hf.testing.tiny_families import FAMILIES
from tests.pipeline.pipeline_cases import UNEVEN, Case, kinds, merge_cases
from tests.pipeline.test_pipeline_exactness import launch
from tests.sweeps import ALL, turn

pytestmark = pytest.mark.process

KEEP = {"recompute": "none", "offload": "none"}
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}


def case_of(name: str, family: str = "llama", **others: Any) -> Case:
    # Hooks on parameters would see a rank's part of a gradient, as under DDP.
    size = {"layers": 2} if family in ("llama", "llama-bias-tied") else {}
    settings = {"order": "by_chunk", **others.pop("settings", {})}
    case = {"name": name, "family": family, "rows": 2, "hooks": False, "settings": settings}
    return {**case, **size, **others}


BATCHES = [
    case_of("even", settings={"num_chunks": 3, **KEEP}),
    case_of("uneven, one-token tail", settings={"chunk_lengths": UNEVEN, **KEEP}),
    case_of("fewer tokens than ranks", tokens=3, settings={"num_chunks": 3}),
    case_of("padding", padding=[0, 9, 20], rows=3, settings={"chunk_lengths": UNEVEN}),
    case_of("packed", packed=[9, 6, 8]),
    case_of("labels in one token", labels=[11, 13]),
    case_of("labels in the tail", labels=[22, 23], settings={"chunk_lengths": UNEVEN}),
    case_of("no labels", labels=[0, 0]),
    case_of("micro-batches", rows=3, settings={"num_chunks": 3, "micro_batch_size": 2}),
    case_of("accumulation", items=True, steps=[{}, {"scale": 2.0}, {"evaluate": True}]),
    case_of("a loss of the caller's", steps=[{"loss": "weighed"}, {}], packed=[9, 6, 8]),
]
PLANS = [
    case_of(f"{recompute}, {offload}, {kv}", settings={"chunk_lengths": UNEVEN, **plan})
    for recompute in ("none", "full")
    for offload, kv in (("none", "full"), ("full", "none"), ("full", "full"))
    for plan in [
        {"recompute": recompute, "offload": offload, "offload_kv": kv, "min_offload_size": 1}
    ]
] + [
    case_of("selective", settings={"chunk_lengths": UNEVEN, "recompute": "selective"}),
    case_of(
        "selective, all leaves, experts",
        "qwen3_moe",
        settings={
            "chunk_lengths": UNEVEN,
            "min_offload_size": 1,
            "offload": "full",
            "recompute": "selective",
        },
    ),
    case_of(
        "a solved plan, corrected",
        settings={"hardware": "h100", "num_chunks": 3},
        # Planned anew for the second, beside whose gradients there are those of the first.
        steps=[{}, {}, {}, {}],
    ),
    case_of("the paper's rule", settings={"hardware": "h100", "num_chunks": 3, "offload": "sppo"}),
]
MODELS = [
    case_of("LoRA", lora=True, noise=5.0),
    case_of("frozen front", frozen=["layers.0.", "embed"]),
    case_of("tied", "llama-bias-tied"),
    case_of("windows and sinks", "gpt_oss", settings={"num_chunks": 3, "recompute": "full"}),
    case_of("soft caps, tied", "gemma2"),
    case_of("MLA, experts", "deepseek_v3"),
    case_of("experts", "qwen3_moe", settings={"num_chunks": 3, "recompute": "full"}),
    case_of("a loss of the routers", "mixtral-router-loss", padding=[0, 9]),
    case_of("shared keys", "gemma3n_text"),
    case_of("rows are classified", "llama ForSequenceClassification", padding=[0, 9]),
    case_of("tokens are classified", "qwen3_moe ForTokenClassification", lora=True),
    case_of("images", "qwen3_vl", images=3, padding=[0, 9]),
    case_of("images, LoRA", "gemma3", images=3, lora=True),
]
BY_LAYER = [
    {
        **case,
        "name": f"{case['name']}, by layer",
        "settings": {**case["settings"], "order": "by_layer"},
    }
    for case in [*BATCHES, *PLANS, *MODELS, case_of("by index", "llama4_text")]
][:: 1 if ALL else 9]
ZB, HELD = {"pp_schedule": "zb_seq1f1b"}, {"reduces": False}
# Both rows at a time; other cases have one after the other.
TOGETHER = {} if ALL else {"micro_batch_size": 2}
_MEAN, _WEIGHED = {"loss": "mean"}, {"loss": "weighed"}
_OWN_LOSSES = [{**_MEAN, "scale": 3.0, **HELD}, {**_WEIGHED, "evaluate": True, **HELD}, _WEIGHED]
if ALL:
    _OWN_LOSSES[1:] = [{**_WEIGHED, **HELD}, _OWN_LOSSES[1], {**_MEAN, "scale": 0.5, **HELD}, _MEAN]
_OF_OWN_LOSSES: dict[str, Any] = {"packed": {"packed": [9, 6, 8]}, "LoRA": {"lora": True}}
if not ALL:
    _OF_OWN_LOSSES = {"packed, LoRA": {"packed": [9, 6, 8], "lora": True}}
IN_PIPELINES = [
    case_of("one-token tail, late weights", settings={"chunk_lengths": UNEVEN, **ZB}),
    case_of("tied, padding", "llama-bias-tied", padding=[0, 9, 20], rows=3),
    case_of("accumulation", steps=[HELD, {"scale": 2.0}, {"evaluate": True}], items=True),
    case_of("packed", packed=[9, 6, 8], settings={"num_chunks": 3, "recompute": "full"}),
    case_of("LoRA", lora=True, settings={"num_chunks": 3, **ZB}),
    case_of(
        "several stages a rank",
        layers=4,
        settings={"num_chunks": 3, "pp_schedule": "interleaved_seq1f1b", "pp_virtual_stages": 2},
    ),
    case_of(
        "all leaves",
        settings={
            "chunk_lengths": UNEVEN,
            "min_offload_size": 1,
            "offload": "full",
            "offload_kv": "full",
            "recompute": "full",
        },
    ),
    case_of(
        "a solved plan, corrected",
        settings={"num_chunks": 3, "hardware": "h100"},
        steps=[HELD, HELD, {}],
    ),
    case_of("changed scale", steps=[{**HELD, "scale": 2.0}, {"scale": 0.5}]),
    case_of("experts, late weights", "mixtral", settings={"num_chunks": 3, **ZB, **TOGETHER}),
    case_of("windows and sinks", "gpt_oss"),
    # Families differ neither in what stages nor in what the ranks of a sequence do.
    *([case_of("MLA, experts", "deepseek_v3", settings={"num_chunks": 3})] if ALL else []),
    case_of(
        "few labels",
        "gemma2" if ALL else "llama",
        labels=[11, 13],
        settings={"num_chunks": 3, **TOGETHER},
    ),
    case_of(
        "a loss of the routers",
        "mixtral-router-loss",
        padding=[0, 9],
        steps=[{"scale": 3.0}, {"evaluate": True}],
        settings={"chunk_lengths": UNEVEN, "micro_batch_size": 2},
    ),
    *(
        case_of(
            f"losses of the caller's: {name}",
            settings={"chunk_lengths": [1, 21, 1], **TOGETHER},
            steps=_OWN_LOSSES,
            **batch,
        )
        for name, batch in _OF_OWN_LOSSES.items()
    ),
]

_TOGETHER = "start {0} start {1} start {2} wait {0} wait {1} wait {2}"
_FORWARD = f"matmuls {_TOGETHER.format(0, 1, 2)} start 3 wait 3 matmuls"
EXCHANGES = {
    recompute: re.findall(r"matmuls|\w+ \d+", f"{_FORWARD} {backward} matmuls")
    for recompute, backward in {
        # The gradient of attention's output; those of values, keys and queries.
        "none": f"start 4 wait 4 {_TOGETHER.format(5, 6, 7)}",
        # 4 is attention's output once more, 5 the queries.
        "full": "start 4 matmuls start 5 wait 4 matmuls start 6 wait 6 wait 5 "
        + _TOGETHER.format(7, 8, 9),
    }.items()
}
"""Order of exchanges and matmuls of one layer in one chunk, forward and backward."""

FAST = (
    *("uneven, one-token tail", "padding", "packed", "labels in one token", "accumulation"),
    *("a loss of the caller's", "full, full, full", "a solved plan, corrected", "LoRA"),
    "windows and sinks",
)
"""Names of those that run always on two ranks."""


def assert_attended_once(result: dict[str, Any], cases: list[Case]) -> None:
    """Attention ran forward once per layer, chunk and group of rows, on every rank."""
    for one, case in zip(result["cases"], cases, strict=True):
        settings = case.get("settings", {"num_chunks": 3})
        lengths = settings.get("chunk_lengths", [])
        chunks = len(lengths) or settings.get("num_chunks", 3)
        if "padding" in case or "labels" in case or "micro_batch_size" in settings:
            continue
        wanted = one["attending_layers"] * chunks * len(case.get("steps", [{}]))
        assert one["attention_forwards"] == [wanted] * len(one["attention_forwards"]), one


def test_two_ranks_are_exact(tmp_path: Path) -> None:
    named = {case["name"]: case for case in (*BATCHES, *PLANS, *MODELS)}
    cases = merge_cases([named[name] for name in FAST])
    recomputes = ["none", "full"]
    more = {"bytes": True, "orders": recomputes, "machines": True}
    more["actions"] = str(tmp_path / "actions")
    result = launch(cases, tmp_path, sp_size=2, ranks=2, **more)
    for planned, done in result["actions"]:
        assert done == planned
        assert len(done) > 4 * 3 * 4, "forward and backward, away and back"
    for refused, allowed in result["machines"]:
        assert "sp_size=2 lets ranks 0 to 1 share a sequence, but this machine has" in refused
        assert allowed == "nothing"
    assert result["orders"] == [EXCHANGES[recompute] for recompute in recomputes]
    assert_attended_once(result, cases)
    # By what each of them has measured they would have two.
    corrected = next(i for i, c in enumerate(cases) if "a solved plan, corrected" in c["name"])
    mine, other = result["cases"][corrected]["corrections"]
    assert mine == other
    assert len(mine) == 1
    one, two = result["bytes"]
    # Exactly half: 64 tokens, their chunks and all heads are even.
    assert two["keys_and_values"] * 2 == one["keys_and_values"] > 0
    # Half, and attention's output in both layouts; the tiny Llama has 2 query heads for each of
    # keys, so that is as large as keys and values. Labels and a few numbers are of all tokens.
    wanted = one["saved"] / 2 + two["keys_and_values"]
    assert wanted <= two["saved"] < 1.001 * wanted, (one, two)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(ALL and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_norms_and_mlps_are_as_exact_as_float32_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other cases run in float64, for which forwards are wrapped and nothing is compiled.

    What is new with several ranks is where graphs begin and end, for which any compiler will do;
    Inductor's code is compared in `test_layer_kernels.py`, and here with everything asked for.
    """
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    recomputes, backend = (["none", "full"], "inductor") if ALL else (["full"], "aot_eager")
    job = {"compiled": recomputes, "backend": backend}
    result = launch([], tmp_path, sp_size=2, ranks=2, **job)
    for ranks in result["compiled"]:
        for rank in ranks:
            assert rank["graphs"] >= 3, "norms, MLPs, and those of one token"
            assert rank["gradients"] > 10
            # Rounding differs, as between two orders of the same sums.
            assert 0 < rank["compiled"] < 2 * max(rank["plain"], rank["eager"]) < 1e-5, rank
            assert rank["compiled"] != rank["eager"], "other code ran"


def test_heads_that_three_ranks_cannot_divide_are_refused(tmp_path: Path) -> None:
    # Of two heads of keys, three ranks have one, both, and the other.
    name, recomputed = "six query heads, two of keys", {"num_chunks": 3, "recompute": "full"}
    cases = [case_of(name, overrides=SIX_HEADS, settings=recomputed)]
    if ALL:
        cases.append(case_of("by default", overrides=SIX_HEADS))
    refused = (case_of("four heads"),)
    result = launch(cases, tmp_path, sp_size=3, ranks=3, refused=refused)
    assert_attended_once(result, cases)
    for said in result["refusals"]["four heads"]:
        assert "sp_size=3 does not divide the 4 attention heads" in said
        assert "Allowed: 1, 2, 4." in said


def test_two_replicas_of_two_ranks_are_exact(tmp_path: Path) -> None:
    lora = case_of("LoRA", lora=True, steps=[{}, {}])
    named = {case["name"]: case for case in (*BATCHES, *MODELS)}
    names = ("uneven, one-token tail", "packed", "soft caps, tied", "MLA, experts")
    cases = merge_cases([lora, *(named[name] for name in names)])
    launch(cases, tmp_path, sp_size=2, ranks=4)


def test_a_pipeline_of_stages_that_share_sequences_is_exact(tmp_path: Path) -> None:
    launch(IN_PIPELINES[:3], tmp_path, pp_size=2, sp_size=2, ranks=4)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_all_pipelines_of_stages_that_share_sequences_are_exact(tmp_path: Path) -> None:
    launch(merge_cases(IN_PIPELINES[3:]), tmp_path / "four", pp_size=2, sp_size=2, ranks=4)
    # Of four pairs of ranks the second two are a replica.
    replicas = IN_PIPELINES[2:0:-1]
    if not ALL:
        replicas = [{**IN_PIPELINES[2], "steps": [HELD, {}], "settings": {"num_chunks": 2}}]
    launch(replicas, tmp_path / "eight", pp_size=2, sp_size=2, ranks=8)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_all_plans_and_models_are_exact_on_two_and_four_ranks(tmp_path: Path) -> None:
    # Of the plans every second one, which together have each setting.
    cases = [*BATCHES, *turn(PLANS, 2, 1), *MODELS, *BY_LAYER]
    rest = [case for case in cases if case["name"] not in FAST]
    rest = merge_cases(rest)
    two = launch(rest, tmp_path / "two", sp_size=2, ranks=2)
    assert_attended_once(two, rest)
    # Two heads of keys: each is on two of four ranks. What a rank offloads depends on no other, and
    # what is beside attention is as with two.
    four = [*BATCHES[1:6:2], PLANS[3], *MODELS[3:6:2], BY_LAYER[1]]
    if ALL:
        four = [*BATCHES, *PLANS[::3], *MODELS, *BY_LAYER]
    four = merge_cases(four)
    assert_attended_once(launch(four, tmp_path / "four", sp_size=4, ranks=4), four)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_every_family_is_exact(tmp_path: Path) -> None:
    names = [name for name, family in FAMILIES.items() if family.model_type in PROVED]
    assert len(names) > 60
    if not ALL:
        others = {case["family"] for case in (*BATCHES, *PLANS, *MODELS)}
        names = [name for name in names if name in kinds(1) - others]
    plans = [{"recompute": r, "offload": o} for r in ("none", "full") for o in ("none", "full")]
    orders = [{"order": order} for order in ("by_chunk", "by_layer")]
    cases = [
        case_of(name, name, settings={"num_chunks": 3 if ALL else 2, **plan, **order})
        for name, plan, order in zip(names, cycle(plans), cycle([*orders, *orders[::-1]]))
    ]
    launch(cases, tmp_path, sp_size=2, ranks=2)
