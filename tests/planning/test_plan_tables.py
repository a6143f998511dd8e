"""The table: readable at 80 and 120 columns, complete, and short for many chunks."""

from dataclasses import replace

import pytest

from sppo_hf.config import SPPOConfig
from sppo_hf.planning.choices import DeviceFacts
from sppo_hf.planning.hardware import load_profile
from sppo_hf.planning.model_profile import LoraShape
from sppo_hf.planning.plan import Plan, PlanRequest, make_plan
from sppo_hf.reporting.plan_tables import (
    format_lengths,
    format_seconds,
    format_speed,
    format_tokens,
    group_chunks,
)
from sppo_hf.rules import format_bytes
from tests.planning.modes import render_plan
from tests.planning.shapes import llama_config, shape_of

CUDA = DeviceFacts(
    kind="cuda", name="a GPU", device_memory_bytes=80 * 2**30, host_memory_bytes=256 * 2**30
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
    assert "Warning: sequences of 200,000 tokens" in text


SOLVED = replace(CUDA, profile=load_profile("h100"))


def test_a_solved_plan_says_what_becomes_of_chunks_and_how_long_a_step_takes() -> None:
    made = plan(total_tokens=131_072, device=SOLVED, config=SPPOConfig(offload_kv="none"))
    flat = " ".join(render_plan(made, "m", 220).split())
    assert made.prediction is not None
    assert format_seconds(made.prediction.step_seconds) in flat
    assert f"{made.prediction.tokens_per_second:,.0f} tokens/s, MFU" in flat
    assert "speeds and sizes are estimates" in flat
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
    assert "estimates" not in text


@pytest.mark.parametrize(("adapter_bytes", "said"), [(4, True), (2, False)])
def test_adapters_wider_than_the_model_are_named(adapter_bytes: int, said: bool) -> None:
    lora = LoraShape(rank=16, dtype_bytes=adapter_bytes)
    shape = shape_of(llama_config(), dtype_bytes=2, lora=lora)
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
