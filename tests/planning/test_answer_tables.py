"""Tables of answers: the verdict first, every number of the plan, readable at 64 chunks."""

import io

import pytest
from rich.console import Console, RenderableType

from sppo_hf.planning.plan_request import compare_policies, plan_for, request_plan
from sppo_hf.reporting.plan_tables import chunk_table, estimate_table, format_seconds, plan_tables
from sppo_hf.rules import format_bytes
from tests.planning.questions import TOO_LONG_TOKENS, answer, question


def shown(table: RenderableType, width: int = 110) -> str:
    sink = io.StringIO()
    Console(file=sink, width=width, color_system=None).print(table)
    return sink.getvalue()


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
    found = request_plan(question(1024, device_memory="16GiB", weights="device"))
    assert found.max_seq_len == 0
    assert "longest none" in " ".join(shown(estimate_table(found, "m")).split())


def test_a_plan_with_its_chunks_and_policies() -> None:
    found = answer(32_768)
    assert found.plan is not None
    results = compare_policies(found.question, found.plan)
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


@pytest.mark.parametrize("width", [100, 140])
def test_many_chunks_stay_readable(width: int) -> None:
    made = plan_for(question(65_536, num_chunks=64, offload="full", recompute="none"))
    text = shown(chunk_table(made), width)
    assert len(text.splitlines()) <= 20
    assert max(map(len, text.splitlines())) <= width
    assert "1-64" in text
    assert "disk" not in text, "there is none"
    assert "32 to host" in text
