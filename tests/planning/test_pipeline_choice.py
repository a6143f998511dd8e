"""What "auto" is in a pipeline: simulated where speeds are known, by rule where they are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError
from sppo_hf.planning.choices import DeviceFacts
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.hardware import UNKNOWN_LINK, load_profile
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.pipeline_choice import (
    DEFAULT_SCHEDULE,
    PipelineChoice,
    choose_pipeline,
    pipeline_step,
    stage_seconds,
)
from sppo_hf.planning.pipeline_cost import PipelineCost
from sppo_hf.planning.plan import PlanRequest, make_plan
from sppo_hf.planning.stages import stage_shape
from sppo_hf.schedule.generate import MSP, Size, generate
from sppo_hf.schedule.lower import lower
from sppo_hf.schedule.simulate import simulate_pipeline
from tests.planning.shapes import tiny_shape

SHAPE = tiny_shape(num_hidden_layers=8, hidden_size=2048, intermediate_size=8192)
H100 = DeviceFacts(kind="cuda", name="H100", profile=load_profile("h100"))
TOKENS = 65_536


def _choose(
    device: DeviceFacts = H100,
    micro_batches: int = 1,
    tokens: int = TOKENS,
    may_share: bool = False,
    shape: ModelShape = SHAPE,
    **settings: Any,
) -> PipelineChoice:
    config = SPPOConfig(pp_size=4, **settings)
    return choose_pipeline(
        config,
        shape,
        tokens,
        micro_batches=micro_batches,
        batch_rows=1,
        device=device,
        dtype_name="bfloat16",
        may_share=may_share,
    )


def _seconds(choice: PipelineChoice, micro_batches: int) -> float:
    """A step in the planner's own simulation, with layers kept whole."""
    assert H100.profile is not None
    schedule = generate(choice.schedule, Size(4, micro_batches, len(choice.bounds)))
    cost = ModelCost(shape=SHAPE, profile=H100.profile, dtype_name="bfloat16")
    link = UNKNOWN_LINK
    costs = PipelineCost(schedule, cost, choice.bounds, link_bytes_per_second=link)
    return simulate_pipeline(lower(schedule), seconds=costs.seconds).end_seconds


@pytest.mark.parametrize("micro_batches", [1, 16])
def test_the_choice_is_no_slower_than_the_rule(micro_batches: int) -> None:
    keep = {"recompute": "none", "offload": "none", "offload_kv": "none"}
    ruled = _choose(DeviceFacts(kind="cuda", name="?"), micro_batches, **keep)
    assert (ruled.schedule, "by rule" in ruled.reason) == (DEFAULT_SCHEDULE, True)
    chosen = _choose(micro_batches=micro_batches, **keep)
    assert "simulated" in chosen.reason
    seconds = [_seconds(one, micro_batches) for one in (chosen, ruled)]
    assert seconds[0] <= seconds[1]
    if micro_batches > 1:
        assert seconds[0] < 0.99 * seconds[1]


def test_units_are_shared_where_that_is_faster() -> None:
    """One long sequence, most of whose work is attention: all ranks fill and drain together."""
    keep = {"recompute": "none", "offload": "none", "offload_kv": "none", "chunk_tokens": 16_384}
    apart = _choose(tokens=4 * TOKENS, **keep)
    assert apart.schedule != MSP
    shared = _choose(tokens=4 * TOKENS, may_share=True, **keep)
    assert (shared.schedule, "simulated" in shared.reason) == (MSP, True)
    assert _seconds(shared, 1) < 0.97 * _seconds(apart, 1)
    seconds = apart.reason.removeprefix("auto: ").partition(" s a step")[0]
    assert f"{apart.schedule} {seconds} s" in shared.reason, "among those that are slower"
    assert _choose(tokens=4 * TOKENS, may_share=True, pp_msp="off", **keep) == apart
    away = {**keep, "offload_kv": "full"}
    assert _choose(tokens=4 * TOKENS, may_share=True, **away).schedule == MSP
    # Of many rows others fill the idle time, and what is sent besides costs more.
    assert _choose(micro_batches=16, may_share=True, **keep).schedule != MSP


def test_units_that_must_be_shared_are_or_the_step_is_refused() -> None:
    on = {"pp_msp": "on", "may_share": True}
    chosen = _choose(chunk_tokens=TOKENS // 4, **on)
    assert (chosen.schedule, chosen.reason) == (MSP, "set by the user")
    assert _choose(DeviceFacts(kind="cuda", name="?"), **on).schedule == MSP
    assert _choose(**on).schedule == MSP
    cpu = DeviceFacts(kind="cpu", name="?")
    assert [len(_choose(cpu, 16, tokens, **on).bounds) for tokens in (4, 23)] == [4, 4]
    said = "pp_msp='on' with pp_size=4 and 2 chunks of 65536 tokens.*Allowed: .*Remedy: more chunks"
    with pytest.raises(ConfigError, match=said):
        _choose(chunk_tokens=TOKENS // 2, **on)


def test_what_is_set_stays() -> None:
    lengths = [16_384] * 4
    chosen = _choose(chunk_lengths=lengths, pp_schedule="1f1b")
    assert (chosen.schedule, chosen.reason) == ("1f1b", "set by the user")
    assert [end - start for start, end in chosen.bounds] == lengths
    assert _choose(pp_schedule="gpipe").schedule == "gpipe"
    free = _choose(chunk_lengths=lengths)
    assert [end - start for start, end in free.bounds] == lengths
    assert "simulated" in free.reason


def test_memory_decides_before_speed() -> None:
    """With little memory, what fits is taken, however slow."""
    keep: dict[str, Any] = {"recompute": "none", "offload": "none", "offload_kv": "none"}
    roomy, tight = _choose(**keep), _choose(device_memory="1GiB", **keep)
    assert "lacks least memory" in tight.reason
    assert "lacks" not in roomy.reason
    keep |= {"num_chunks": 1, "shape": replace(SHAPE, vocab_size=131_072)}
    reasons = [
        _choose(device_memory="60GiB", loss_tile_tokens=tile, **keep).reason
        for tile in (512, TOKENS)
    ]
    assert ["lacks" in reason for reason in reasons] == [False, True], "32 GiB of logits"


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["seq1f1b", "zb_seq1f1b"])
@pytest.mark.parametrize("kv_tier", ["device", "host"])
def test_stages_add_up_to_the_planners_simulation(name: str, recompute: str, kv_tier: str) -> None:
    """What ranks say of their own stages gives the step that the search over layouts predicts."""
    ranks, rows, profile = 4, 3, H100.profile
    saved = {"none": "whole", "selective": "matmuls", "full": "inputs"}[recompute]
    bounds = tuple((at * 4096, (at + 1) * 4096) for at in range(4))
    schedule = generate(name, Size(ranks, rows, len(bounds)))
    assert profile is not None
    cost = ModelCost(shape=SHAPE, profile=profile, dtype_name="bfloat16", tile_tokens=300)
    costs = PipelineCost(
        schedule,
        cost,
        bounds,
        saved=saved,  # type: ignore[arg-type]
        offload="full",
        kv_tier=kv_tier,
        link_bytes_per_second=UNKNOWN_LINK,
    )
    lowered = costs.lowered(schedule)
    expected = simulate_pipeline(lowered, seconds=costs.seconds).end_seconds
    config = SPPOConfig(
        pp_size=ranks,
        recompute=recompute,
        offload="full",
        offload_kv="none" if kv_tier == "device" else "full",
        chunk_lengths=[4096] * 4,  # type: ignore[arg-type]
        loss_tile_tokens=300,
    )
    plans = [
        make_plan(
            PlanRequest(
                config=config,
                shape=stage_shape(SHAPE, layers, last=stage == ranks - 1),
                device=H100,
                total_tokens=bounds[-1][1],
                bounds=bounds,
                alive=1.0,
            )
        )
        for stage, layers in enumerate(costs.stages)
    ]
    message = costs.message_bytes(1, 0) / UNKNOWN_LINK
    seconds, idle = pipeline_step(
        lambda count: lower(
            generate(name, Size(ranks, count, len(bounds))),
            offloaded=lambda stage, unit: True,
            kv_copies=costs.kv_copies,
        ),
        {stage: stage_seconds(plan) for stage, plan in enumerate(plans)},
        micro_batches=rows,
        ranks=ranks,
        message_seconds=lambda stage, chunk: message,
    )
    assert seconds == pytest.approx(expected, rel=1e-3)
    assert 0 < idle < 1


def test_many_micro_batches_follow_from_few() -> None:
    table = {("F", None): [1.0, 1.0], ("B", None): [2.0, 2.0]}
    said = {
        count: pipeline_step(
            lambda count: lower(generate("seq1f1b", Size(4, count, 2))),
            dict.fromkeys(range(4), table),  # type: ignore[arg-type]
            micro_batches=count,
            ranks=4,
            message_seconds=lambda stage, chunk: 0.1,
        )[0]
        for count in (12, 40)
    }
    whole = lower(generate("seq1f1b", Size(4, 40, 2)))
    seconds = {"F": 1.0, "B": 2.0, "SEND_F": 0.1, "SEND_B": 0.1}
    simulated = simulate_pipeline(whole, seconds=lambda a: seconds.get(a.kind, 0.0))
    assert said[40] == pytest.approx(simulated.end_seconds)
    assert said[12] < said[40]
