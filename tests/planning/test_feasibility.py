"""Answers: they fit their budgets, agree with each other, and "auto" is as fast as any rule.

As fast up to what it gives for less host memory.
"""

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import BudgetError, ConfigError, UnsupportedModelError
from sppo_hf.planning import feasibility
from sppo_hf.planning import plan as plans
from sppo_hf.planning.config_file import load_config
from sppo_hf.planning.feasibility import (
    Found,
    PolicyResult,
    assess_request,
    compare_policies,
    plan_for,
    request_for,
    search_longest,
    timeline_of,
)
from sppo_hf.planning.hardware import load_profile
from sppo_hf.planning.model_profile import ModelProfile, Training
from sppo_hf.planning.plan import make_plan
from sppo_hf.planning.solve import EQUALLY_FAST, HOST_PRICE, fits, over_budget
from sppo_hf.rules import format_bytes
from tests.planning.moments import moments_of
from tests.planning.questions import GIB, TOO_LONG_TOKENS, answer, question
from tests.planning.shapes import by_hand, llama_config
from tests.sweeps import sample

LENGTHS = sample((8192, 65_536, 32_768), 2)


def policies(total_tokens: int) -> tuple[PolicyResult, ...]:
    asked, made = answer(total_tokens).request, answer(total_tokens).plan
    assert made is not None
    return compare_policies(asked, made)


@pytest.mark.parametrize("total_tokens", LENGTHS)
def test_what_fits_is_within_every_budget(total_tokens: int) -> None:
    found = answer(total_tokens)
    assert found.plan is not None
    assert found.first_limit is None
    assert found.max_seq_len >= total_tokens
    assert found.estimate == found.plan.estimate
    assert fits(found.estimate, found.budgets)
    assert found.budgets.device == 12 * GIB
    assert found.budgets.host == 16 * GIB
    assert found.budgets.of("disk") == 0


def test_what_does_not_fit_says_which_limit_breaks_first_and_by_how_much() -> None:
    found = answer(TOO_LONG_TOKENS)
    assert found.plan is None
    limit = found.first_limit
    assert limit == next(over_budget(found.estimate, found.budgets))
    assert limit.missing_bytes > 0
    assert 0 < found.max_seq_len < TOO_LONG_TOKENS
    # With just as much more of that tier, the tier is enough for the same plan.
    budget = found.budgets.of(limit.tier)
    assert budget is not None
    assert found.estimate.of(limit.tier).total == budget + limit.missing_bytes


def test_the_longest_row_fits_and_a_longer_one_does_not() -> None:
    longest = answer(8192).max_seq_len
    make_plan(question(longest, num_chunks="auto"))
    with pytest.raises(BudgetError):
        make_plan(question(longest + 16_384))


def test_a_disk_lets_rows_be_longer() -> None:
    longest = [
        assess_request(question(8192, disk=disk, host_memory=8 * GIB)).max_seq_len
        for disk in (False, True)
    ]
    assert longest[1] > 1.2 * longest[0]


@pytest.mark.parametrize("total_tokens", LENGTHS)
def test_auto_is_first_among_the_policies(total_tokens: int) -> None:
    results = policies(total_tokens)
    assert results[0].policy == "auto"
    assert {result.policy for result in results} == {"auto", "none", "full", "sppo"}
    fitting = [r for r in results if r.first_limit is None]
    assert list(results[: len(fitting)]) == fitting, "what does not fit comes last"
    seconds = [result.step_seconds for result in fitting]
    assert None not in seconds
    assert seconds == sorted(seconds, key=lambda s: s or 0.0)
    for result in results[len(fitting) :]:
        assert result.step_seconds is result.tokens_per_second is None
        assert not fits(result.estimate, answer(total_tokens).budgets)


def test_auto_is_as_fast_as_chunks_given_by_hand() -> None:
    """Products are equally fast in chunks and in tiles of any size, so compute tells nothing."""

    def seconds(**settings: Any) -> float:
        config = SPPOConfig(device_memory=30 * GIB, host_memory=24 * GIB, **settings)
        asked = request_for(
            llama_config(num_hidden_layers=16),
            config,
            profile=load_profile("h100"),
            total_tokens=131_072,
            lora_rank=16,
            trace=by_hand,
        )
        made = plan_for(asked)
        assert made.prediction is not None
        return made.prediction.step_seconds

    assert seconds() <= EQUALLY_FAST * seconds(num_chunks=8)


def test_fixed_policies_do_what_they_say() -> None:
    for policy, offloaded in (("none", 0), ("full", 1)):
        made = plan_for(question(8192, offload=policy, recompute="none"))
        modes = {mode for row in made.layer_modes for mode in row}
        assert {int(mode.offload) for mode in modes} == {offloaded}
        assert not any(mode.recompute for mode in modes)
    made = plan_for(question(32_768, offload="sppo", recompute="none", num_chunks=4))
    assert not any(mode.offload for mode in made.layer_modes[-1]), "the last chunk stays"


def test_a_fixed_policy_has_its_own_longest_row() -> None:
    kept = assess_request(question(8192, offload="none", recompute="none"))
    assert kept.max_seq_len < answer(8192).max_seq_len
    fixed = assess_request(question(8192, num_chunks=1))
    assert fixed.max_seq_len < answer(8192).max_seq_len, "one chunk has to hold it all"


def test_fixed_chunks_that_are_more_than_short_rows_have_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feasibility, "_LENGTH_STEP_TOKENS", 16)
    monkeypatch.setattr(feasibility, "_LONGEST_TOKENS", 64)
    assert assess_request(question(64, num_chunks=20)).max_seq_len == 64
    with pytest.raises(ConfigError, match="num_chunks=90"):
        assess_request(question(64, num_chunks=90))


def test_the_timeline_holds_the_bytes_of_the_plan() -> None:
    found = answer(32_768)
    assert found.plan is not None
    assert found.plan.prediction is not None
    timeline = timeline_of(found.plan)
    assert timeline.end_seconds == pytest.approx(found.plan.prediction.step_seconds)
    for tier in ("device", "host"):
        predicted = found.estimate.of(tier).total
        held = timeline.peak(tier).num_bytes if tier in timeline.tiers else 0
        assert held <= predicted * 1.05 + GIB


def test_what_the_engine_refuses_is_refused_before_anything_is_planned() -> None:
    asked = question(1024)
    assert asked.device.profile is not None
    with pytest.raises(UnsupportedModelError, match="recurrent"):
        request_for(
            llama_config(model_type="mamba"),
            asked.config,
            profile=asked.device.profile,
            total_tokens=1024,
            trace=by_hand,
        )


@pytest.mark.timeout(30)
def test_short_chunks_do_not_make_the_search_for_the_longest_row_long() -> None:
    """Millions of chunks are not walked; where they are merged, the answer hardly changes."""
    rule = {"recompute": "full", "offload": "none"}
    short = assess_request(question(256, chunk_tokens=8, **rule)).max_seq_len
    longer = assess_request(question(256, chunk_tokens=64, **rule)).max_seq_len
    assert short > 8 * 1024, "so chunks were merged"
    assert short == pytest.approx(longer, rel=0.02)


def test_accumulated_gradients_are_counted() -> None:
    shape_changes = {"total_tokens": 8192, "dtype_name": "bfloat16"}
    once, more = (
        assess_request(
            request_for(
                llama_config(num_hidden_layers=2),
                SPPOConfig(device_memory="80GiB", order="by_chunk", optimizer="device"),
                profile=load_profile("h100"),
                accumulates=accumulates,
                trace=by_hand,
                **shape_changes,
            )
        )
        for accumulates in (False, True)
    )
    assert once.plan is not None
    assert more.plan is not None
    last = [moments_of(answer.estimate)[-1].device["gradients"] for answer in (once, more)]
    assert last[1] == 2 * last[0] > 0
    assert more.max_seq_len < once.max_seq_len


def test_a_length_that_nobody_has_is_answered_at_once() -> None:
    start = time.process_time()
    found = assess_request(question(2**31 - 1))
    assert not found.fits
    assert time.process_time() - start < 10
    assert found.max_seq_len == answer(TOO_LONG_TOKENS).max_seq_len


@pytest.mark.parametrize(
    ("total_tokens", "settings", "most"),
    [
        (2**20, {"num_chunks": 10**6}, 512),
        (2**20, {"chunk_tokens": 1}, 512),
        (2**25, {"offload": "full", "recompute": "full"}, 1024),
    ],
)
def test_more_chunks_than_can_be_planned_are_refused_with_a_number_that_can_be(
    total_tokens: int, settings: dict[str, Any], most: int
) -> None:
    with pytest.raises(ConfigError, match=rf"minutes to plan.*set num_chunks.* to {most:,} or"):
        assess_request(question(total_tokens, **settings))


def test_a_machine_without_limits_is_not_searched_for_one() -> None:
    asked = request_for(
        llama_config(),
        SPPOConfig(),
        profile=load_profile("cpu"),
        total_tokens=4096,
        trace=by_hand,
    )
    start = time.process_time()
    assert assess_request(asked).max_seq_len > 10**8
    assert time.process_time() - start < 5


def test_what_rests_on_the_host_leaves_less_of_it_to_activations() -> None:
    """Frames are sent where there is room beside the weights, so that the batch fits."""
    found = assess_request(question(65_536, offload_kv="full", weights="host", host_memory="10GiB"))
    assert found.fits
    assert found.plan is not None
    assert found.plan.shape.host_resident is not None


def test_less_host_memory_is_taken_where_that_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question(20_480, layers=32, device_memory=60 * GIB, host_memory=128 * GIB)
    light = plan_for(asked)
    monkeypatch.setattr(plans, "reduce_host_memory", lambda cost, found, *_: found)
    heavy = plan_for(asked)
    assert light.prediction is not None
    assert heavy.prediction is not None
    assert light.prediction.step_seconds <= heavy.prediction.step_seconds
    assert light.estimate.host.total < 0.85 * heavy.estimate.host.total


def test_a_little_time_is_given_for_much_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question(131_072, layers=32, device_memory=80 * GIB, host_memory=128 * GIB)
    light = plan_for(asked)
    monkeypatch.setattr(plans, "reduce_host_memory", lambda cost, found, *_: found)
    fast = plan_for(asked)
    assert light.prediction is not None
    assert fast.prediction is not None
    slower = light.prediction.step_seconds / fast.prediction.step_seconds
    freed_bytes = fast.estimate.host.total - light.estimate.host.total
    assert 1.0 < slower <= EQUALLY_FAST
    assert slower - 1 < HOST_PRICE * freed_bytes / (128 * GIB)
    assert light.estimate.host.total < 0.5 * fast.estimate.host.total
    said = f"{slower - 1:.2%} slower than the fastest that fits, for {format_bytes(freed_bytes)}"
    assert light.offload_reason == f"auto: {said} less host memory (solver)"


def test_a_stage_says_so_without_numbers_of_a_plan_that_does_not_run() -> None:
    asked = question(131_072, layers=32, device_memory=80 * GIB, host_memory=128 * GIB)
    stage = plan_for(replace(asked, alive=1.0, by_layer_refusal=""))
    assert stage.offload_reason == (
        "auto: nearly the fastest that fits, for less host memory (solver)"
    )


def test_host_memory_that_saves_much_time_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question(65_536, device_memory=22 * GIB, host_memory=32 * GIB)
    found = plan_for(asked)
    monkeypatch.setattr(plans, "reduce_host_memory", lambda cost, found, *_: found)
    assert found.layer_modes == plan_for(asked).layer_modes
    assert found.estimate.host.total > 30 * GIB
    assert found.offload_reason == "auto: fastest that fits (solver)"


def test_a_model_that_cannot_go_layer_by_layer_is_planned_by_chunk() -> None:
    def trace(config: object, training: Training) -> ModelProfile:
        found = by_hand(config, training)
        layers = tuple(replace(layer, returns_more=True) for layer in found.layers)
        return replace(found, layers=layers)

    asked, other = (
        request_for(
            # Profiles are stored by configuration.
            llama_config(num_hidden_layers=8, vocab_size=vocabulary),
            SPPOConfig(device_memory=20 * GIB, host_memory=64 * GIB),
            profile=load_profile("h100"),
            total_tokens=131_072,
            trace=make,
        )
        for make, vocabulary in ((trace, 128_264), (by_hand, 128_256))
    )
    assert asked.by_layer_refusal == "layer 0 returns more than hidden states"
    assert plan_for(other).order == "by_layer"
    found = assess_request(asked)
    assert found.plan is not None
    assert found.plan.order == "by_chunk"
    assert "order: by_chunk, because layer 0 returns more" in " ".join(found.plan.warnings)
    assert found.max_seq_len < assess_request(other).max_seq_len


def test_places_that_cannot_be_the_answer_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is the one of a search through all of them."""
    asked = request_for(
        llama_config(num_hidden_layers=8),
        SPPOConfig(device_memory=26 * GIB, host_memory=64 * GIB, num_chunks=4),
        profile=load_profile("h100"),
        total_tokens=32_768,
        trace=by_hand,
    )
    found = plan_for(asked)
    searched: list[bool] = []
    make = plans._plan_placed

    def make_all(request: plans.PlanRequest, *, under_seconds: float, **again: bool) -> plans.Plan:
        searched.append(under_seconds < float("inf"))
        return make(request, under_seconds=float("inf"), **again)

    monkeypatch.setattr(plans, "_plan_placed", make_all)
    monkeypatch.setattr(plans, "standing_device_bytes", lambda *_: 0)
    whole = plan_for(asked)
    assert searched == [False, False, True], "the first does not fit, the second does"
    assert found.shape.host_resident is not None
    assert (found.layer_modes, found.kv_modes, found.bounds, found.places_reason) == (
        *(whole.layer_modes, whole.kv_modes, whole.bounds),
        whole.places_reason,
    )


def test_a_disk_makes_no_plan_slower() -> None:
    """What goes there for a gain of moments may come back late."""
    allowing, without = plan_for(question(65_536, disk=True)), plan_for(question(65_536))
    assert allowing.prediction is not None
    assert without.prediction is not None
    most = EQUALLY_FAST * without.prediction.step_seconds
    assert allowing.prediction.step_seconds <= most


def test_returned_logits_count_in_the_longest_row() -> None:
    found = assess_request(question(8192, return_logits=True))
    assert found.max_seq_len < answer(8192).max_seq_len


def test_named_tiles_count_in_the_longest_row_of_several_chunks() -> None:
    settings: dict[str, Any] = {"num_chunks": 2, "order": "by_chunk", "recompute": "full"}
    settings |= {"offload": "none", "offload_kv": "none"}
    tiled, whole = (
        assess_request(question(4096, layer_tile_tokens=tile, **settings)).max_seq_len
        for tile in (256, 0)
    )
    assert tiled > whole


SIZES = {
    "yes or no": lambda over: 1 if over > 0 else -1,
    "a line": lambda over: over,
    "a curve": lambda over: over**3,
    "flat below": lambda over: over if over > 0 else -1e-9,
    "flat above": lambda over: 1e-9 if over > 0 else over,
}
"""Missing amounts, as functions of the tokens above the longest length."""


@given(
    answer=st.integers(0, 100_000), limit=st.integers(64, 65_536), size=st.sampled_from([*SIZES])
)
def test_the_search_finds_the_longest_multiple(answer: int, limit: int, size: str) -> None:
    tried: list[int] = []

    def missing(tokens: int) -> float:
        tried.append(tokens)
        return SIZES[size](tokens - answer)

    found = search_longest(missing, step_tokens=64, most_tokens=limit)
    assert max(tried) <= limit
    assert len(set(tried)) == len(tried)
    assert len(tried) <= (24 if size == "yes or no" else 44)
    assert found.longest_tokens == max([0, *(t for t in tried if t <= answer)])
    if found.failed_tokens is None:
        assert found.longest_tokens == limit // 64 * 64
    else:
        assert found.failed_tokens - found.longest_tokens == 64
        assert found.longest_tokens <= answer < found.failed_tokens


def test_where_no_length_fits() -> None:
    assert search_longest(lambda _: 1, step_tokens=64, most_tokens=999) == Found(0, 64)


@given(answer=st.integers(64, 60_000), known=st.floats(0, 1))
def test_the_search_begins_at_a_known_length(answer: int, known: float) -> None:
    tried: list[int] = []

    def missing(tokens: int) -> float:
        tried.append(tokens)
        return tokens - answer

    known_tokens = int(known * answer)
    found = search_longest(missing, step_tokens=64, most_tokens=2**17, known_tokens=known_tokens)
    assert found.longest_tokens == answer // 64 * 64
    assert min(tried) > known_tokens // 64 * 64


def test_a_straight_line_takes_few_tries() -> None:
    tried: list[int] = []

    def missing(tokens: int) -> float:
        tried.append(tokens)
        return tokens - 370_900

    found = search_longest(missing, step_tokens=1024, most_tokens=2**27, known_tokens=131_072)
    assert found == Found(370_688, 371_712)
    assert len(tried) <= 5


@pytest.mark.parametrize(
    ("known", "settings", "counted"),
    [
        (True, {}, True),
        (True, {"pp_size": 2, "sp_size": 2}, True),
        (True, {"layer_kernels": "none"}, False),
        (True, {"compile": True}, False),
        (False, {}, False),
        (None, {}, False),
    ],
)
def test_kernels_in_layers_count_where_they_are_known_to_run(
    known: bool | None, settings: dict[str, Any], counted: bool
) -> None:
    """A machine that was not measured may have none, so its plans count what saves more."""

    def trace(*_: Any) -> Any:
        raise AssertionError("profiles with kernels are shipped")

    asked = request_for(
        load_config("llama-3.1-8b"),
        SPPOConfig(**settings),
        profile=replace(load_profile("h100"), layer_kernels=known),
        total_tokens=2**15,
        lora_rank=16,
        trace=trace,
    )
    assert asked.shape.layer_kernels == counted
    saved = asked.shape.activation_bytes_per_token(1)
    without = 291_400
    assert saved < 0.9 * without if counted else saved == without
