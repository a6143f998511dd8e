"""Units that ranks share: exact against one unmodified process, and what passes between sets.

Invariants 1 and 2 of the design. What ran is held against its program in
`test_executed_actions.py`; simulated, `tests/schedule/test_msp.py`.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from sppo_hf.engine.model_parts import find_parts
from sppo_hf.engine.sequence_group import held_kv_heads, kv_head_transfers, local_heads
from sppo_hf.engine.stages import StageCut, StagedModel
from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.pipeline import multiplex
from sppo_hf.pipeline.multiplex import (
    RemoteWeights,
    check_shareable_units,
    count_head_blocks,
)
from sppo_hf.pipeline.unit_tensors import UnitTensors
from sppo_hf.planning.model_profile import LayerProfile
from sppo_hf.schedule.generate import MSP, Size, generate
from sppo_hf.schedule.messages import ChunkRun, chunk_runs, messages
from sppo_hf.testing.tiny_models import build_tiny_model
from tests.integrations.launch import run_ranks
from tests.pipeline.pipeline_cases import Case, merge_cases
from tests.pipeline.test_pipeline_exactness import assert_exact
from tests.sweeps import ALL, sample

UNEVEN = [1, 13, 8, 1]
"""Chunks of as many lengths as four ranks need to share units."""
HEADS = [(8, 8), (12, 12), (12, 4), (12, 1), (24, 8), (32, 8), (40, 8), (28, 4), (64, 8), (60, 12)]


def layers_of(*heads: tuple[int, int]) -> list[LayerProfile]:
    made = [SimpleNamespace(num_heads=queries, num_kv_heads=keys) for queries, keys in heads]
    return cast(Any, made)


def test_heads_are_divided_evenly_or_by_keys() -> None:
    assert count_head_blocks(layers_of((12, 4), (24, 2)), 4, "it") is None
    assert count_head_blocks(layers_of((32, 8)), 2, "it") is None
    assert count_head_blocks(layers_of((32, 8)), 4, "it") == 8
    assert count_head_blocks(layers_of((32, 8), (32, 4)), 4, "it") == 4
    said = (
        r"3 ranks cannot divide its 4 attention heads, nor 3 its 2 key/value heads. Allowed: "
        r"pp_size=2 with this model. Remedy: one of these, or pp_msp='off'"
    )
    with pytest.raises(ConfigError, match=said):
        count_head_blocks(layers_of((4, 2)), 3, "it")
    with pytest.raises(ConfigError, match="Allowed: pp_size=2 or 3 or 4 with"):
        count_head_blocks(layers_of((28, 4)), 8, "it")
    with pytest.raises(ConfigError, match=r"Allowed: no pp_size with .* Remedy: pp_msp='off'"):
        count_head_blocks(layers_of((7, 1)), 2, "it")


def test_models_with_states_are_refused() -> None:
    parts = find_parts(build_tiny_model("lfm2"))
    with pytest.raises(UnsupportedModelError, match=r"recurrent or convolutional layers.*Remedy"):
        check_shareable_units(parts, (), 2)


@pytest.mark.parametrize(("queries", "keys"), HEADS)
def test_every_key_comes_once_from_a_rank_that_sends(queries: int, keys: int) -> None:
    """Heads that pass between any two sets are all that is needed, in messages of the schedule."""
    most = 4
    schedule = generate(MSP, Size(most, 1, 6))
    planned = {
        (m.producer.part or 0, len(schedule.unit_ranks(*m.producer[1:3]))): set[tuple[int, int]]()
        for m in messages(schedule).values()
    }
    for message in messages(schedule).values():
        if message.send.kind == "SEND_KV":
            here = message.producer.part or 0, len(schedule.unit_ranks(*message.producer[1:3]))
            there = message.consumer.part or 0, len(schedule.unit_ranks(*message.consumer[1:3]))
            planned[here].add(there)
    head_blocks = count_head_blocks(layers_of((queries, keys)), most, "it")
    for before, after in [(size, 1) for size in (2, 3, 4)] + [(1, size) for size in (2, 3, 4)]:
        for yours in range(after):
            need = held_kv_heads(queries, keys, yours, after, head_blocks)
            came: list[int] = []
            for mine in range(before):
                have = held_kv_heads(queries, keys, mine, before, head_blocks)
                source, target = kv_head_transfers(have, need)
                came += target
                for one, other in zip(source, target, strict=True):
                    assert need[other].start in have[one]
                # Ranks that are in both sets keep theirs: the owner, first of those at the
                # beginning and last of those at the end.
                owner = (mine == 0 and after == 1) or (before == 1 and yours == after - 1)
                if target and not owner:
                    assert (yours, after) in planned[mine, before]
            assert sorted(came) == list(range(len(need)))


def test_a_block_of_several_keys_has_the_queries_that_read_them() -> None:
    """Four blocks of two keys and eight queries, divided among three ranks."""
    for part, keys in enumerate((range(2), range(2, 4), range(4, 8))):
        held = held_kv_heads(32, 8, part, 3, 4)
        assert held == [range(4 * key, 4 * key + 4) for key in keys]
        assert local_heads(32, part, 3, 4) == range(held[0].start, held[-1].stop)


def test_a_stage_has_up_to_three_runs() -> None:
    schedule = generate(MSP, Size(3, 2, 5))
    runs = chunk_runs(schedule)
    assert [(run.chunks, run.ranks) for run in dict.fromkeys(runs[1, c] for c in range(5))] == [
        (range(1), (1, 2)),
        (range(1, 4), (1,)),
        (range(4, 5), (0, 1)),
    ]
    assert {runs[0, c].ranks for c in range(5)} == {(0, 1, 2), (0,)}
    assert runs[2, 4].ranks == (0, 1, 2)


class Passing:
    """Stands for `RemoteWeights`, and notes what would pass between ranks."""

    def __init__(self) -> None:
        """Begin without records."""
        self.seen: dict[tuple[int, ...], list[str]] = {}
        """Collectives that were started, by set."""
        self.here: list[int] = []
        """Stages whose weights are on their way or here."""

    def start_fetch(self, stage: int, run: ChunkRun) -> None:
        """Weights start; those of two stages at most are held."""
        self.seen.setdefault(run.ranks, []).append(f"weights {stage}")
        self.here.append(stage)
        assert len(self.here) <= 2

    def wait_for_fetch(self, stage: int) -> None:
        """Check that the oldest broadcast is the one waited for."""
        assert self.here[0] == stage

    def drop(self, stage: int) -> None:
        """Check that weights are freed in the order of their broadcasts."""
        assert self.here.pop(0) == stage

    def start_reduce(self, stage: int, run: ChunkRun) -> None:
        """Gradients start."""
        assert stage in self.here
        self.seen[run.ranks].append(f"gradients {stage}")

    def wait_for_reduce(self) -> None:
        """They are there."""


@pytest.mark.parametrize(("ranks", "rows", "chunks"), [(2, 1, 2), (2, 3, 4), (3, 2, 3), (4, 2, 6)])
def test_all_ranks_of_a_set_begin_its_collectives_in_one_order(
    ranks: int, rows: int, chunks: int
) -> None:
    """Else they would wait for each other. Weights that stay between two runs do not come again."""
    compute = generate(MSP, Size(ranks, rows, chunks))
    seen: list[dict[tuple[int, ...], list[str]]] = []
    for rank in range(ranks):
        weights, nothing = Passing(), cast(Any, None)
        made = SimpleNamespace(
            schedule=compute, messages=messages(compute), runs=chunk_runs(compute)
        )
        prepared = SimpleNamespace(
            step=made,
            bounds=tuple((chunk, chunk + 1) for chunk in range(chunks)),
            rows=[(row, row + 1) for row in range(rows)],
            plans=SimpleNamespace(dtype=torch.float32),
            weights=weights,
        )
        shared = UnitTensors(
            cast(Any, prepared),
            rank,
            nothing,
            message_width=nothing,
            group=None,
            layers=lambda stage: {},
            head_blocks=None,
            kv_dtype=torch.float32,
            stores=lambda *_: cast(Any, SimpleNamespace(kv_stores=lambda layers: [])),
        )
        for action in compute.ranks[rank]:
            shared.start_prefetch(action)
            shared.wait_for_inputs(action)
            if action.part is not None:  # tokens for heads, in every layer
                unit_ranks = compute.unit_ranks(action.stage, action.unit)
                weights.seen[unit_ranks].append(str(action._replace(part=None)))
            shared.finish_unit(action, None)
        assert not weights.here
        seen.append(weights.seen)
    for ranks_of_set in {ranks for one in seen for ranks in one}:
        first, *others = (seen[rank][ranks_of_set] for rank in ranks_of_set)
        assert all(other == first for other in others)
    # Of the first stage: once for all rows' backwards and the forwards behind them.
    assert seen[0][tuple(range(ranks))].count("weights 0") == 1 + rows
    assert seen[0][tuple(range(ranks))].count("gradients 0") == rows
    assert seen[0][tuple(range(ranks))].count(f"weights {ranks - 1}") == rows


class OtherRank:
    """Stands for torch.distributed on the owner of a set of two, of whose weights one trains."""

    def __init__(self, grad: Tensor | None) -> None:
        """`grad` is that of the weight on the other rank."""
        self.grad = grad
        self.calls: list[str] = []

    def broadcast(self, flat: Tensor, src: int, *, group: str, async_op: bool) -> Any:
        """The owner's weights reach the other rank."""
        assert async_op
        self.calls.append(f"broadcast {flat.numel()} from {src} in {group}")
        return SimpleNamespace(wait=lambda: None)

    def reduce(self, flat: Tensor, dst: int, *, group: str, async_op: bool) -> Any:
        """The other rank's gradient comes, when it is waited for."""
        assert async_op
        self.calls.append(f"reduce {flat.numel()} to {dst} in {group}")
        theirs = 0 if self.grad is None else self.grad.reshape(-1)
        return SimpleNamespace(wait=lambda: flat.add_(theirs))

    def all_reduce(self, there: Tensor, *, group: str) -> None:
        """Whether the other rank had any."""
        assert group == "control"
        there[0] += self.grad is not None


@pytest.mark.parametrize("mine", [True, False])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("theirs", [True, False])
def test_a_weight_has_a_gradient_if_any_rank_has_one(
    monkeypatch: pytest.MonkeyPatch, mine: bool, late: bool, theirs: bool
) -> None:
    """A rank gets no gradient of experts to which none of its tokens came."""
    parts = find_parts(build_tiny_model("llama", num_hidden_layers=2))
    cut = StageCut((range(1), range(1, 2)), (0,))
    staged = StagedModel(parts, cut, borrows_stages=True)
    weights = staged.parameters_of(0)
    one = weights[0]
    for weight in weights[1:]:
        weight.requires_grad_(False)
    other = OtherRank(torch.full_like(one, 2.0) if theirs else None)
    monkeypatch.setattr(multiplex, "dist", other)
    mesh: Any = SimpleNamespace(
        pp_rank=0,
        control_group="control",
        unit_groups={(0, 1): "both"},
        device=torch.device("cpu"),
        world_rank=lambda rank: rank,
    )
    helped = RemoteWeights(staged, mesh)
    trained_elsewhere = [p for p in staged.parameters_of(1) if p.requires_grad]
    assert trained_elsewhere
    assert not any(p.untyped_storage().nbytes() for p in trained_elsewhere)
    run = ChunkRun(range(1), (0, 1))
    helped.begin_step(mesh.device)
    helped.start_fetch(0, run)
    helped.wait_for_fetch(0)
    one.grad = torch.ones_like(one) if mine else None
    helped.start_reduce(0, run)
    if late:  # units of its own, or a later run
        one.grad = torch.ones_like(one) if one.grad is None else one.grad + 1
    helped.end_step()
    assert other.calls == [
        f"broadcast {one.numel()} from 0 in both",
        f"reduce {one.numel()} to 0 in both",
    ]
    total = mine + late + 2 * theirs
    if total:
        assert one.grad is not None
        assert one.grad.eq(total).all()
    else:
        assert one.grad is None


ON = {"pp_msp": "on"}
AWAY = {"min_offload_size": 1, "offload": "full"}
# Later stages ask for embeddings of these tokens, and tiny vocabularies end before them.
ENCODERS = {"image_token_id": 0, "video_token_id": 1, "audio_token_id": 2}
MULTIMODAL: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("gemma3", "llava", "mistral3", "qwen2_5_vl", "qwen3_vl")},
    "gemma4": {"overrides": ENCODERS},
}
KEYS_AWAY = {"offload_kv": "full", "min_offload_size": 1}
EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
TWELVE = {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}


def case_of(name: str, family: str = "llama", **others: Any) -> Case:
    chunks = {"num_chunks": max(3, others.get("layers") or 0)}
    settings = {**ON, **others.pop("settings", chunks)}
    case = {"name": name, "family": family, "layers": 2, **others, "settings": settings}
    return cast(Case, {key: value for key, value in case.items() if value is not None})


TWO = [
    case_of(
        "uneven, recomputed", layers=3, settings={"chunk_lengths": UNEVEN, "recompute": "full"}
    ),
    case_of("padding, offloaded", rows=3, padding=[0, 9, 20], settings={"num_chunks": 5, **AWAY}),
    case_of("LoRA, tied", "llama-bias-tied", lora=True),
    case_of(
        "tied, offloaded, selective",
        "llama-bias-tied",
        settings={"chunk_lengths": UNEVEN, "recompute": "selective", **AWAY},
    ),
    case_of("windows and sinks", "gpt_oss", layers=3, settings={"chunk_lengths": UNEVEN}),
    case_of(
        "router loss",
        "mixtral-router-loss",
        rows=2,
        packed=[9, 6, 8],
        settings={"num_chunks": 4, "micro_batch_size": 2},
    ),
    case_of(
        "K/V on the host, windows and sinks",
        "gpt_oss",
        layers=3,
        rows=3,
        padding=[0, 9, 20],
        settings={"chunk_lengths": UNEVEN, "recompute": "full", **KEYS_AWAY, **AWAY},
    ),
    case_of(
        "shared keys, streams",
        "gemma3n_text",
        layers=None,
        settings={"chunk_lengths": UNEVEN, "recompute": "full", **AWAY},
    ),
    case_of("steps", items=True, steps=[{}, {"scale": 2.0}, {"evaluate": True}, {"scale": 0.5}]),
]
MORE = [
    case_of(
        "as many chunks as ranks, a key for all",
        overrides={"num_key_value_heads": 1},
        settings={"num_chunks": 2},
    ),
    case_of("labels in the tail", labels=[22, 23], settings={"chunk_lengths": UNEVEN}),
    case_of("packed, per-layer inputs", "gemma4_text", layers=None, packed=[9, 6, 8]),
    case_of("labels in the middle", labels=[7, 11]),
    case_of("no labels", labels=[0, 0]),
    case_of("LoRA", lora=True),
    case_of("K/V on the host", settings={"chunk_lengths": UNEVEN, "offload": "none", **KEYS_AWAY}),
    case_of("K/V on the host, LoRA", lora=True, settings={"num_chunks": 4, **KEYS_AWAY}),
    case_of(
        "shared keys, K/V on the host",
        "gemma4_text-shared-kv",
        layers=None,
        settings={"num_chunks": 4, **KEYS_AWAY},
    ),
    case_of("soft caps, frozen front", "gemma2", layers=3, frozen=["layers.0.", "embed"]),
    case_of("shared keys, LoRA", "gemma4_text-shared-kv", layers=None, lora=True),
    case_of("windows", "mistral", settings={"chunk_lengths": UNEVEN}),
    case_of("MLA, experts", "deepseek_v3", layers=3),
    case_of("experts", "qwen3_moe"),
    case_of("learned positions", "gpt2", layers=3),
    case_of("frozen end", layers=3, frozen=["layers.2.", "lm_head"]),
    case_of("all leaves", settings={"chunk_lengths": UNEVEN, "recompute": "full", **AWAY}),
    case_of("simulated", settings={"num_chunks": 4, "hardware": "h100"}),
    case_of(
        "simulated, corrected, K/V on the host",
        settings={"num_chunks": 4, "hardware": "h100", **KEYS_AWAY},
        steps=[{}, {}, {}],
    ),
    case_of("pairs", rows=5, settings={"micro_batch_size": 2, "chunk_lengths": UNEVEN}),
    case_of("a loss of the caller's", steps=[{"loss": "mean"}, {}]),
]
TRAINED_ON_TEXT = [
    case_of(f"trained on text: {name}", name, layers=None, **others)
    for name, others in MULTIMODAL.items()
]
FOUR = [
    case_of(
        "uneven heads, uneven chunks",
        layers=5,
        rows=1,
        overrides=EIGHT,
        settings={"chunk_lengths": UNEVEN, "recompute": "full", **KEYS_AWAY, **AWAY},
    ),
    case_of(
        "LoRA, tied, packed",
        "llama-bias-tied",
        layers=4,
        rows=1,
        lora=True,
        overrides=TWELVE,
        packed=[9, 6, 8],
    ),
]
MORE_OF_FOUR = [
    case_of(
        "K/V on the host",
        layers=4,
        rows=2,
        overrides=TWELVE,
        settings={"chunk_lengths": UNEVEN, "recompute": "selective", **KEYS_AWAY},
    ),
    case_of("a key for all", layers=4, overrides={**TWELVE, "num_key_value_heads": 1}),
    case_of("tails", layers=4, overrides=TWELVE, settings={"chunk_lengths": [20, 1, 1, 1]}),
    case_of(
        "windows and sinks",
        "gpt_oss",
        layers=4,
        overrides={**EIGHT, **MIXED},
        padding=[0, 9],
        settings={"chunk_lengths": UNEVEN},
    ),
    case_of("soft caps, tied", "gemma2", layers=4, overrides={**TWELVE, **MIXED}),
    case_of("MLA, experts", "deepseek_v3", layers=4),
    case_of("steps", layers=4, overrides=EIGHT, rows=3, items=True, steps=[{}, {"scale": 2.0}]),
]
REPLICAS = [
    case_of("plain", steps=[{"reduces": False}, {}], settings={"num_chunks": 3}),
    case_of("LoRA", lora=True, settings={"num_chunks": 3}),
]
REFUSED = [
    case_of("few chunks", settings={"chunk_tokens": 23}),
    case_of("frozen later", frozen_later=["layers.0."]),
]


# Of three chunks two ranks share the first of stage 0 and the last of stage 1. Weights come beside
# the unit before, gradients leave beside the one behind; nothing is before the first unit.
_OF_A_SHARED_UNIT = "start weights, matmuls, wait weights, matmuls, start gradients"
WEIGHTS = (
    f"start weights, wait weights, matmuls, {_OF_A_SHARED_UNIT}, matmuls, wait gradients, "
    f"{_OF_A_SHARED_UNIT}, wait gradients"
).split(", ")
"""Order of collectives and matmuls in a step, on each of the two ranks."""


def launch(cases: list[Case], folder: Path, *, pp_size: int, ranks: int, **job: Any) -> Any:
    out = folder / "result.json"
    job |= {"cases": cases, "pp_size": pp_size, "sp_size": 1, "out": str(out)}
    run_ranks("tests.pipeline.pipeline_ranks", job, ranks, folder, timeout_seconds=400)
    result = json.loads(out.read_text())
    assert_exact(result["cases"], cases)
    for one, case in zip(result["cases"], cases, strict=True):
        # Those whose last step is the model's own loss in training have shared units on each rank.
        assert all(one["shared"]), one
        assert not any(one["left"]), case
        if "steps" not in case:  # once in every layer of every forward, shared or not
            assert all(ran == units > 0 for ran, units in one["attended"]), one
    return result


@pytest.mark.process
def test_two_ranks_are_exact(tmp_path: Path) -> None:
    settings = {"chunk_lengths": UNEVEN, "recompute": "full", "disk_memory": "1GiB", **AWAY}
    disk = case_of("disk", rows=2, settings={**settings, "offload_dir": str(tmp_path / "disk")})
    sizes = {"pp_size": 2, "ranks": 2, "weights": True}
    result = launch([disk, *merge_cases(TWO)], tmp_path, refused=REFUSED, **sizes)
    # All that has left the device has gone on to the disk.
    for left_bytes, disk_bytes in result["cases"][0]["written"]:
        assert left_bytes == disk_bytes > 0
    assert not any(disk_bytes for _, disk_bytes in result["cases"][1]["written"])
    assert result["weights"] == [WEIGHTS] * 2
    said = result["refusals"]
    for rank in range(2):
        assert "pp_msp='on' with pp_size=2 and 1 chunks of 23 tokens" in said["few chunks"][rank]
        # By the rank, too, whose own parameters all train.
        assert "were frozen or unfrozen after it was converted" in said["frozen later"][rank]
        assert all("Remedy: " in said[case["name"]][rank] for case in REFUSED)


@pytest.mark.process
def test_four_ranks_are_exact(tmp_path: Path) -> None:
    launch(FOUR, tmp_path, pp_size=4, ranks=4)


@pytest.mark.process
def test_two_replicas_of_two_ranks_are_exact(tmp_path: Path) -> None:
    launch(REPLICAS, tmp_path, pp_size=2, ranks=4)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("cases", "ranks"),
    [
        ([*sample(merge_cases(MORE), 2), *sample(TRAINED_ON_TEXT, 3)], 2),
        *([(MORE_OF_FOUR, 4)] if ALL else []),
    ],
)
def test_more_are_exact(cases: list[Case], ranks: int, tmp_path: Path) -> None:
    launch(cases, tmp_path, pp_size=ranks, ranks=ranks)
