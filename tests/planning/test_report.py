"""The table: readable at 80 and 120 columns, complete, and short for many chunks."""

import pytest

from sppo_hf.config import SPPOConfig
from sppo_hf.planning.plan import DeviceFacts, Plan, make_plan
from sppo_hf.planning.report import format_bytes, format_lengths, format_tokens, render_plan
from sppo_hf.planning.shape import ModelShape
from tests.planning.shapes import llama_config

CUDA = DeviceFacts(
    kind="cuda", name="a GPU", device_memory_bytes=80 * 2**30, host_memory_bytes=256 * 2**30
)


def plan(*, total_tokens: int = 65_536, training: bool = True) -> Plan:
    return make_plan(
        SPPOConfig(),
        ModelShape.from_config(llama_config(), dtype_bytes=2, trainable_parameters=42_000_000),
        device=CUDA,
        backend_name="cudnn",
        backend_reason="fastest here for bf16 and heads of 128",
        batch_rows=1,
        total_tokens=total_tokens,
        training=training,
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
