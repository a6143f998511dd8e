"""Tables of plans and answers: complete, readable at 80 to 140 columns and for many chunks."""

from dataclasses import replace

import pytest

from sppo_hf.config import SPPOConfig
from sppo_hf.planning.activation_modes import KEEP, ActivationMode, all_modes, mode_of
from sppo_hf.planning.choices import DeviceFacts
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.feasibility import assess_request, compare_policies, plan_for
from sppo_hf.planning.hardware import load_profile
from sppo_hf.planning.model_profile import LoraShape
from sppo_hf.planning.plan import Plan, PlanRequest, make_plan
from sppo_hf.reporting.plan_tables import (
    ChunkGroup,
    chunk_table,
    estimate_table,
    format_lengths,
    format_seconds,
    format_speed,
    format_tokens,
    group_chunks,
    plan_tables,
    span,
    words,
)
from sppo_hf.rules import format_bytes
from tests.planning.modes import OFFLOAD, RECOMPUTE, RECOMPUTE_OFFLOAD, render_plan, shown
from tests.planning.questions import TOO_LONG_TOKENS, answer, question
from tests.planning.shapes import llama_config, shape_of

CUDA = DeviceFacts(
    kind="cuda", name="a GPU", memory_bytes={"device": 80 * 2**30, "host": 256 * 2**30}
)


def plan(
    *,
    total_tokens: int = 65_536,
    training: bool = True,
    device: DeviceFacts = CUDA,
    config: SPPOConfig | None = None,
) -> Plan:
    return make_plan(
        PlanRequest(
            config=config or SPPOConfig(),
            shape=shape_of(llama_config(), dtype_bytes=2, trainable_parameters=42_000_000),
            device=device,
            backend_name="cudnn",
            backend_reason="fastest here for bf16 and heads of 128",
            batch_rows=1,
            total_tokens=total_tokens,
            training=training,
        )
    )


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * 2**20, "10.0 MiB"),
        (1000 * 2**20, "0.98 GiB"),
        (123 * 2**30, "123 GiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_format_bytes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_format_tokens() -> None:
    assert format_tokens(1) == "1 token"
    assert format_tokens(65_536) == "65,536 tokens"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00085, "850 us"),
        (0.0123, "12.3 ms"),
        (0.9994, "999 ms"),
        (1.5, "1.50 s"),
        (64.66, "64.7 s"),
        (1234.4, "1,234 s"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_format_speed() -> None:
    assert format_speed(2025.7, 0.273) == "2,026 tokens/s, MFU 27.3%"
    assert format_speed(12.34, None) == "12.3 tokens/s"


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ((700,), "1 chunk of 700"),
        ((512, 512, 176), "3 chunks: 512 512 176"),
        ((4096,) * 32, "32 chunks of 4,096"),
        ((4096,) * 32 + (10,), "33 chunks of 4,096, last 10"),
        (tuple(range(9000, 1000, -1000)), "8 chunks, 9,000 falling to 2,000"),
        ((5, 9, 2, 5, 9, 2, 5), "7 chunks, 2 to 9"),
    ],
)
def test_format_lengths(lengths: tuple[int, ...], text: str) -> None:
    assert format_lengths(lengths) == text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_table_keeps_its_width_and_says_everything(width: int) -> None:
    made = plan()
    text = render_plan(made, "meta-llama/Llama-3.1-8B", width)
    assert max(len(line) for line in text.splitlines()) <= width
    flat = " ".join(text.split())
    for needed in ("meta-llama/Llama-3.1-8B", "65,536 tokens", "8 chunks", "cudnn", "fastest here"):
        assert needed in flat
    for tier in (made.estimate.device, made.estimate.host):
        assert format_bytes(tier.total) in flat
        assert all(format_bytes(size) in flat for _, size in tier.items() if size)


def test_table_leaves_out_what_is_zero_and_modes_of_evaluation() -> None:
    text = render_plan(plan(training=False), "m")
    assert "evaluation" in text
    for absent in ("gradients", "optimizer", "dK/dV", "host memory", "recompute", "offload"):
        assert absent not in text


def test_warnings_stand_below_the_table() -> None:
    text = render_plan(plan(total_tokens=200_000), "m")
    assert text.splitlines()[-1].strip()
    assert "Warning: rows of 200,000 tokens" in text


SOLVED = replace(CUDA, profile=load_profile("h100"))


def test_a_solved_plan_says_what_becomes_of_chunks_and_how_long_a_step_takes() -> None:
    settings = SPPOConfig(offload_kv="none", order="by_chunk")
    made = plan(total_tokens=131_072, device=SOLVED, config=settings)
    flat = " ".join(render_plan(made, "m", 220).split())
    assert made.prediction is not None
    assert format_seconds(made.prediction.step_seconds) in flat
    assert f"{made.prediction.tokens_per_second:,.0f} tokens/s, MFU" in flat
    assert "speeds as measured on one" in flat
    groups = group_chunks(made, most=6)
    assert len(groups) > 1
    for group in groups:
        assert f"{group.text} {group.title}" in flat
    assert made.max_pending_d2h_bytes is not None
    assert f"look-ahead {format_bytes(made.max_pending_d2h_bytes)}" in flat
    assert "K/V on the" not in flat


def test_keys_that_wait_elsewhere_are_named() -> None:
    made = plan(device=SOLVED, config=SPPOConfig(offload_kv="full", num_chunks=8, order="by_chunk"))
    assert made.kv_tier == "host"
    assert "K/V on the host streamed back layer by layer" in " ".join(
        render_plan(made, "m").split()
    )
    blocks = replace(made, kv_block_tokens=8192)
    assert "in blocks of 8,192 tokens" in " ".join(render_plan(blocks, "m").split())


def test_the_order_is_said_in_words() -> None:
    made = plan(config=SPPOConfig(recompute="full", offload="none"))
    assert made.by_layer
    flat = " ".join(render_plan(made, "m").split())
    assert "order layer by layer, chunks inside auto: less memory" in flat
    assert "until backward" not in flat, "all are kept"
    spread = replace(made, kv_modes=("host",) * 30 + ("recompute", "device"))
    flat = " ".join(render_plan(spread, "m").split())
    assert "K/V 1 kept, 30 to host, 1 recomputed of 32 layers" in flat
    tiled = plan(config=SPPOConfig(num_chunks=1, order="by_layer", layer_tile_tokens=2048))
    flat = " ".join(render_plan(tiled, "m").split())
    assert "order layer by layer, each over all tokens set by the user" in flat
    assert "tiles of 2,048 tokens MLPs, norms and adapters inside a layer" in flat
    by_chunk = plan(config=SPPOConfig(order="by_chunk"))
    assert "order chunk by chunk, layers inside set by the user" in " ".join(
        render_plan(by_chunk, "m").split()
    )


def test_measured_speeds_are_not_called_estimates() -> None:
    assert SOLVED.profile is not None
    measured = replace(SOLVED, profile=replace(SOLVED.profile, estimated=False))
    text = render_plan(plan(device=measured, config=SPPOConfig(num_chunks=2)), "m")
    assert "speeds were measured" in text
    assert "estimate" not in text
    public = plan(device=replace(SOLVED, profile=load_profile("a100")))
    assert "speeds and sizes are estimates" in render_plan(public, "m")


@pytest.mark.parametrize(
    ("lora", "kernels", "said"),
    [
        (LoraShape(rank=16), True, True),
        (LoraShape(rank=16, dtype_bytes=2), True, False),
        (LoraShape(rank=16, autocast=True), False, True),
        (LoraShape(rank=16, autocast=True), True, False),
        (LoraShape(rank=16, autocast=True, dropout=0.1), True, True),
    ],
    ids=str,
)
def test_adapters_wider_than_the_model_are_named(
    lora: LoraShape, kernels: bool, said: bool
) -> None:
    shape = replace(shape_of(llama_config(), dtype_bytes=2, lora=lora), layer_kernels=kernels)
    for device, speaks in ((SOLVED, said), (replace(SOLVED, kind="cpu"), False)):
        made = make_plan(
            PlanRequest(
                config=SPPOConfig(num_chunks=2, offload="none", recompute="full"),
                shape=shape,
                device=device,
                backend_name="cudnn",
                backend_reason="",
                batch_rows=1,
                total_tokens=8192,
                training=True,
            )
        )
        text = " ".join(render_plan(made, "m").split())
        assert ("adapters 32 bits" in text) is speaks
        assert ("autocast_adapter_dtype=False" in text) is speaks


def test_an_estimate_that_fits() -> None:
    found = answer(32_768)
    assert found.plan is not None
    assert found.plan.prediction is not None
    text = shown(estimate_table(found, "Llama-3.1-8B, LoRA rank 16"))
    flat = " ".join(text.split())
    assert flat.startswith("SPPO estimate: Llama-3.1-8B, LoRA rank 16 fits yes")
    assert f"longest {found.max_seq_len:,} tokens" in flat
    assert format_seconds(found.plan.prediction.step_seconds) in flat
    assert f"{found.plan.prediction.tokens_per_second:,.0f} tokens/s, MFU" in flat
    for _, size in found.estimate.device.items():
        assert not size or format_bytes(size) in flat
    assert flat.count("recomputation not counted") == 1, "MFU is defined once"


def test_an_estimate_that_does_not_fit() -> None:
    found = answer(TOO_LONG_TOKENS)
    limit = found.first_limit
    assert limit is not None
    flat = " ".join(shown(estimate_table(found, "m")).split())
    assert f"fits no {limit.tier} lacks {format_bytes(limit.missing_bytes)}" in flat
    assert limit.moment in flat
    assert f"longest {found.max_seq_len:,} tokens" in flat
    assert "tokens/s" not in flat, "nothing is promised"


def test_nothing_fits_however_short() -> None:
    found = assess_request(question(1024, device_memory="5GiB", weights="device"))
    assert found.max_seq_len == 0
    assert "longest none" in " ".join(shown(estimate_table(found, "m")).split())


def test_a_plan_with_its_chunks_and_policies() -> None:
    found = answer(32_768)
    assert found.plan is not None
    results = compare_policies(found.request, found.plan)
    text = shown(plan_tables(found, results, "m"))
    flat = " ".join(text.split())
    for size in (found.estimate.device.total, found.estimate.host.total):
        assert format_bytes(size) in flat
    lines = [line.split() for line in text.splitlines()]
    start = next(i for i, words in enumerate(lines) if words[:2] == ["policy", "recompute"])
    assert lines[start + 2][:2] == ["auto", "mixed"], "the winner stands first"
    assert "sppo" in flat
    assert "lacks" in flat


def test_policies_are_compared_also_where_nothing_fits() -> None:
    asked = question(TOO_LONG_TOKENS)
    results = compare_policies(asked, plan_for(asked))
    flat = " ".join(shown(plan_tables(answer(TOO_LONG_TOKENS), results, "m")).split())
    assert "yes" not in flat
    assert "auto mixed - -" in flat


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (32_768, "would do --offload auto, --recompute auto what the planner chooses itself"),
        (TOO_LONG_TOKENS, "would do neither host memory nor a disk is enough"),
    ],
)
def test_choices_that_are_in_the_way_are_named(tokens: int, said: str) -> None:
    kept = assess_request(question(tokens, offload="none", recompute="none"))
    assert said in " ".join(shown(estimate_table(kept, "m")).split())


@pytest.mark.parametrize("width", [100, 140])
def test_many_chunks_stay_readable(width: int) -> None:
    made = plan_for(question(65_536, num_chunks=64, offload="full", recompute="none"))
    text = shown(chunk_table(made), width)
    assert len(text.splitlines()) <= 20
    assert max(map(len, text.splitlines())) <= width
    assert "1-64" in text
    assert "disk" not in text, "there is none"
    assert "8 to host" in text


def decisions(*rows: tuple[ActivationMode, ...]) -> Decisions:
    return Decisions(
        batch_rows=1,
        bounds=tuple((i, i + 1) for i in range(len(rows))),
        layer_modes=rows,
        training=True,
        tile_tokens=1,
    )


def mixed(kept: int) -> tuple[ActivationMode, ...]:
    return (KEEP,) * kept + (OFFLOAD,) * (8 - kept)


def test_equal_neighbours_are_one_group_whatever_their_order_of_layers() -> None:
    made = decisions(mixed(3), tuple(reversed(mixed(3))), mixed(8), mixed(3))
    groups = group_chunks(made, most=10)
    assert [(group.title, group.text) for group in groups] == [
        ("chunks 1-2", "3 kept, 5 to host"),
        ("chunk 3", "8 kept"),
        ("chunk 4", "3 kept, 5 to host"),
    ]


def test_too_many_are_grouped_by_the_modes_that_they_have() -> None:
    made = decisions(*(mixed(kept) for kept in (1, 2, 3, 4, 5)), (RECOMPUTE,) * 8)
    groups = group_chunks(made, most=2)
    assert groups == [
        ChunkGroup(0, 4, {KEEP: (1, 5), OFFLOAD: (3, 7)}),
        ChunkGroup(5, 5, {RECOMPUTE: (8, 8)}),
    ]
    assert groups[0].text == "1-5 kept, 3-7 to host"


@pytest.mark.parametrize(("chunks", "most"), [(64, 16), (65, 16), (7, 3), (5, 5), (1, 1)])
def test_never_more_than_asked_and_every_chunk_once(chunks: int, most: int) -> None:
    made = decisions(*((all_modes()[i % len(all_modes())],) * 2 for i in range(chunks)))
    groups = group_chunks(made, most=most)
    assert len(groups) <= most
    listed = [i for group in groups for i in range(group.first, group.last + 1)]
    assert listed == list(range(chunks))


def test_words_tell_all_modes_apart() -> None:
    assert len({words(mode) for mode in all_modes()}) == len(all_modes()) == 12
    assert words(RECOMPUTE_OFFLOAD) == "full recompute to host"
    assert words(mode_of("matmuls", "disk")) == "selective recompute to disk"


def test_span() -> None:
    assert span(3, 3) == "3"
    assert span(1024, 2048) == "1,024-2,048"
