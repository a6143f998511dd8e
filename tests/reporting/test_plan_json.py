"""The schema of `--json`: exact keys, plain types, and sums that agree with the plan."""

import json
from typing import Any

import pytest

from sppo_hf.planning.feasibility import assess_request, compare_policies
from sppo_hf.reporting.plan_json import answer_to_dict, chunks_to_list, policies_to_list
from tests.planning.questions import TOO_LONG_TOKENS, answer, question

REQUIRED = {
    *("fits", "first_limit", "chunks", "peak_bytes", "step_seconds", "tokens_per_second", "mfu"),
    *("stall_seconds", "max_seq_len"),
}
ADDED = {
    *(
        "policy",
        "order",
        "weights",
        "optimizer",
        "update_seconds",
        "attention_again_seconds",
        "layer_tile_tokens",
        "kv_tier",
        "kv_modes",
        "kv_block_tokens",
        "hardware",
        "estimated",
        "peak_by_cause",
    ),
    *("moments", "warnings"),
}
CHUNK = {
    *("start", "end", "tokens", "keep_layers", "offload_layers", "recompute_layers"),
    *("attention_again_layers", "offload_ratio"),
    *("compute_seconds", "d2h_seconds", "h2d_seconds"),
}


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


def test_an_answer_that_fits() -> None:
    found = answer(32_768)
    result = through_json(answer_to_dict(found))
    assert set(result) == REQUIRED | ADDED
    assert result["fits"] is True
    assert result["first_limit"] is None
    assert result["max_seq_len"] == found.max_seq_len
    assert set(result["peak_bytes"]) == {"device", "host", "disk"}
    for tier, size in result["peak_bytes"].items():
        assert size == sum(result["peak_by_cause"][tier].values())
    assert result["tokens_per_second"] == pytest.approx(32_768 / result["step_seconds"])
    assert 0 < result["mfu"] < 1
    assert 0 <= result["stall_seconds"] < result["step_seconds"]
    assert result["hardware"] == "NVIDIA H100 80GB HBM3"
    assert result["estimated"] is True
    assert result["kv_tier"] in ("device", "host")


def test_chunks_cover_the_sequence_and_add_up() -> None:
    found = answer(32_768)
    assert found.plan is not None
    assert found.plan.prediction is not None
    chunks = through_json(chunks_to_list(found.plan))
    assert [set(chunk) for chunk in chunks] == [CHUNK] * found.plan.num_chunks
    assert chunks[0]["start"] == 0
    assert chunks[-1]["end"] == 32_768
    for chunk, modes in zip(chunks, found.plan.layer_modes, strict=True):
        assert chunk["tokens"] == chunk["end"] - chunk["start"]
        assert chunk["keep_layers"] == sum(str(mode) == "keep" for mode in modes)
        assert chunk["offload_layers"] == sum(mode.tier != "device" for mode in modes)
        assert chunk["recompute_layers"] == sum(mode.saved != "whole" for mode in modes)
        assert 0 <= chunk["offload_ratio"] <= 1
        assert (chunk["offload_ratio"] > 0) == (chunk["offload_layers"] > 0)
    busy = sum(chunk["compute_seconds"] for chunk in chunks)
    step, stalls = found.plan.prediction.step_seconds, found.plan.prediction.stall_seconds
    assert busy == pytest.approx(step - stalls)


def test_the_ratio_is_of_bytes() -> None:
    found = assess_request(question(8192, offload="full", recompute="full", num_chunks=2))
    ratios = [chunk["offload_ratio"] for chunk in answer_to_dict(found)["chunks"]]
    assert ratios == [1.0, 1.0]
    assert all(c["d2h_seconds"] > 0 < c["h2d_seconds"] for c in answer_to_dict(found)["chunks"])


def test_an_answer_that_does_not_fit() -> None:
    found = answer(TOO_LONG_TOKENS)
    result = through_json(answer_to_dict(found))
    assert set(result) == REQUIRED | ADDED
    assert result["fits"] is False
    assert result["chunks"] == []
    assert set(result["first_limit"]) == {"tier", "missing_bytes", "moment"}
    assert result["first_limit"]["missing_bytes"] > 0
    assert 0 < result["max_seq_len"] < TOO_LONG_TOKENS
    assert result["peak_bytes"] == {"device": None, "host": None, "disk": None}
    for key in ("step_seconds", "tokens_per_second", "mfu", "stall_seconds", "policy", "kv_tier"):
        assert result[key] is None
    assert sum(result["peak_by_cause"][result["first_limit"]["tier"]].values()) > 0


def test_policies() -> None:
    found = answer(32_768)
    assert found.plan is not None
    results = through_json(policies_to_list(compare_policies(found.request, found.plan)))
    assert results[0]["policy"] == "auto"
    keys = {
        *("policy", "frames", "fits", "first_limit", "step_seconds", "tokens_per_second"),
        "peak_bytes",
    }
    assert all(set(result) == keys for result in results)
    assert all(result["fits"] == (result["step_seconds"] is not None) for result in results)
