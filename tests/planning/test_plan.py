"""make_plan: what "auto" decides, what is refused, what is warned of."""

from dataclasses import replace
from typing import Any

import pytest

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import BudgetError, ConfigError
from sppo_hf.planning.activation_modes import KEEP, ActivationMode
from sppo_hf.planning.choices import FRAGMENTATION_SHARE, DeviceFacts, read_placements
from sppo_hf.planning.hardware import load_profile
from sppo_hf.planning.plan import Plan, PlanRequest, make_plan
from sppo_hf.planning.solve import fits
from sppo_hf.reporting.plan_tables import attention_recompute_text
from tests.planning.modes import OFFLOAD, RECOMPUTE, RECOMPUTE_OFFLOAD, render_plan
from tests.planning.moments import moments_of
from tests.planning.questions import question
from tests.planning.shapes import llama_config, shape_of

CPU = DeviceFacts(kind="cpu", name="a CPU", memory_bytes={"device": 2**40, "host": 2**40})
CUDA = DeviceFacts(
    kind="cuda", name="a GPU", memory_bytes={"device": 80 * 2**30, "host": 256 * 2**30}
)


def plan(
    *,
    device: DeviceFacts = CUDA,
    total_tokens: int = 32_768,
    training: bool = True,
    by_layer_refusal: str | None = None,
    on_host_refusal: str | None = None,
    sharded: bool = False,
    trains_all: bool = False,
    model: dict[str, int] | None = None,
    **settings: Any,
) -> Plan:
    settings = {"weights": "device", "optimizer": "device", **settings}
    trained: dict[str, int] = {} if trains_all else {"trainable_parameters": 42_000_000}
    shape = shape_of(llama_config(**(model or {})), dtype_bytes=2, **trained)
    return make_plan(
        PlanRequest(
            config=SPPOConfig.from_dict(settings),
            shape=shape,
            device=device,
            backend_name="reference",
            backend_reason="asked for",
            batch_rows=1,
            total_tokens=total_tokens,
            training=training,
            by_layer_refusal=by_layer_refusal,
            on_host_refusal=on_host_refusal,
            sharded=sharded,
        )
    )


@pytest.mark.parametrize(
    ("device", "settings", "mode"),
    [
        (CUDA, {}, RECOMPUTE_OFFLOAD),
        (CPU, {}, RECOMPUTE),
        (CUDA, {"recompute": "none"}, OFFLOAD),
        (CUDA, {"offload": "none"}, RECOMPUTE),
        (CUDA, {"recompute": "none", "offload": "none"}, KEEP),
        (CPU, {"offload": "full"}, RECOMPUTE_OFFLOAD),
    ],
)
def test_modes(device: DeviceFacts, settings: dict[str, str], mode: ActivationMode) -> None:
    made = plan(device=device, order="by_chunk", **settings)
    keeps_last = device is CPU and not settings
    for chunk in range(made.num_chunks):
        expected = KEEP if keeps_last and chunk == made.num_chunks - 1 else mode
        assert {made.mode(layer, chunk) for layer in range(32)} == {expected}


def test_of_two_chunks_the_last_is_kept() -> None:
    made = plan(device=CPU, num_chunks=2, total_tokens=1024, order="by_chunk")
    assert [made.mode(0, chunk) for chunk in range(2)] == [RECOMPUTE, KEEP]


def test_a_single_chunk_is_not_kept_by_itself() -> None:
    assert plan(device=CPU, num_chunks=1).mode(0, 0) == RECOMPUTE


def test_on_a_cpu_the_order_is_the_one_with_less_memory() -> None:
    made = plan(device=CPU)
    assert made.order == "by_layer"
    assert made.order_reason == "auto: less memory"
    assert {mode for row in made.layer_modes for mode in row} == {RECOMPUTE}
    assert made.kv_modes == ("recompute",) * 31 + ("device",)
    other = plan(device=CPU, order="by_chunk")
    above = [p.estimate.device.total - p.estimate.device["weights"] for p in (made, other)]
    assert above[0] < 0.65 * above[1]
    # What is nearly as small needs nothing twice.
    assert plan(device=CPU, recompute="none", offload_kv="none").kv_modes == ("device",) * 32


def test_an_order_that_saves_little_memory_says_so() -> None:
    """Of orders that are alike the first is taken, which nobody should believe to be smaller."""
    made = plan(device=CPU, total_tokens=4096, num_chunks=4, recompute="none")
    other = plan(device=CPU, total_tokens=4096, num_chunks=4, recompute="none", order="by_chunk")
    assert made.order == "by_layer"
    assert made.estimate.device.total >= other.estimate.device.total
    assert made.order_reason == "auto: about as little memory as the other"


def test_on_a_cpu_keys_are_kept_where_that_takes_little_more_and_fits() -> None:
    asked: dict[str, Any] = {"total_tokens": 4096, "order": "by_layer", "chunk_tokens": 512}
    kept = plan(device=CPU, **asked)
    assert kept.kv_modes == ("device",) * 32
    too_little = kept.estimate.device.total - 1
    again = plan(device=replace(CPU, memory_bytes={"device": too_little}), **asked)
    assert fits(again.estimate, again.budgets)
    assert again.kv_modes == ("recompute",) * 31 + ("device",)
    # Nor is a budget of the user's refused that some place of K/V keeps to.
    named = {"recompute": "full", "offload": "none", "device_memory": too_little}
    assert plan(device=CPU, **asked, **named).kv_modes == again.kv_modes


@pytest.mark.parametrize("training", [True, False])
def test_on_a_cpu_chunks_are_as_few_as_take_little_more(training: bool) -> None:
    asked: dict[str, Any] = {"device": CPU, "total_tokens": 65_536, "training": training}
    made = plan(**asked)
    by_length = {
        tokens: plan(**asked, order="by_layer", chunk_tokens=tokens).estimate.device.total
        for tokens in (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
    }
    tokens = made.bounds[0][1]
    assert 512 < tokens < 32_768
    assert by_length[tokens] <= 1.05 * min(by_length.values()) < by_length[2 * tokens]
    # Chunk by chunk longer ones would take what they save; who names a length gets it.
    assert plan(**asked, order="by_chunk").num_chunks == 128
    assert plan(**asked, chunk_tokens=1024).num_chunks == 64
    short = plan(**{**asked, "total_tokens": 700})
    assert short.num_chunks == 1


@pytest.mark.parametrize("training", [True, False])
def test_orders_that_cannot_be(training: bool) -> None:
    assert plan(order="by_chunk", training=training).order == "by_chunk"
    assert plan(pp_size=2, training=training).order == "by_chunk"
    kept = plan(by_layer_refusal="", training=training)
    assert (kept.order, kept.warnings) == ("by_chunk", ())
    said = plan(by_layer_refusal="layer 3 returns two tensors", training=training, order="by_layer")
    assert said.order == "by_chunk"
    assert said.warnings == ("order: by_chunk, because layer 3 returns two tensors",)
    assert plan(order="by_layer", training=training).order_reason == "set by the user"


def test_weights_of_all_ranks_are_gathered_once_a_pass_unless_somebody_asks_for_more() -> None:
    """By chunk the ranks with fewer chunks would wait for ever, where rows have other lengths."""
    found = plan(sharded=True)
    assert found.order == "by_layer"
    assert found.order_reason == "by chunk FSDP2 would gather all weights for every chunk"
    assert plan(sharded=True, order="by_chunk").order == "by_chunk"
    assert plan(sharded=True, by_layer_refusal="").order == "by_chunk"


def test_reasons_say_who_decided() -> None:
    assert plan().offload_reason.startswith("auto")
    assert plan(offload="full").offload_reason == "set by the user"
    assert plan(recompute="none").recompute_reason == "set by the user"


def test_bounds_and_tile_follow_the_config() -> None:
    made = plan(chunk_tokens=10_000, loss_tile_tokens=100)
    assert made.chunk_lengths == (10_000, 10_000, 10_000, 2768)
    assert made.num_chunks == 4
    assert made.tile_tokens == 100
    assert plan().tile_tokens == 512
    with pytest.raises(ConfigError, match="chunk_lengths"):
        plan(chunk_lengths=[5, 6])


def test_device_that_cannot_hold_weights_and_gradients() -> None:
    with pytest.raises(
        BudgetError, match=r"device memory cannot hold weights and gradients.*15\.0 GiB.*8\.00 GiB"
    ):
        plan(device_memory="8GiB")
    with pytest.raises(BudgetError, match="device memory cannot hold the weights:"):
        plan(device_memory="8GiB", training=False)


def test_fraction_of_the_device() -> None:
    assert plan(device_memory=0.5).budgets.device == 40 * 2**30
    with pytest.raises(BudgetError, match="device memory"):
        plan(device_memory=0.1)


def test_host_that_cannot_hold_what_full_offload_sends() -> None:
    with pytest.raises(BudgetError, match=r"host memory cannot hold what offload='full'.*offload="):
        plan(offload="full", host_memory="4GiB")


def test_evaluation_by_layer_holds_the_keys_of_one_layer() -> None:
    made = plan(training=False)
    assert made.by_layer
    assert set(made.kv_modes) == {"recompute"}
    one = 32_768 * 2 * 8 * 128 * 2
    assert max(moment.device["kv"] for moment in moments_of(made.estimate)) == one


def test_evaluation_walks_in_the_order_with_less_memory() -> None:
    """Of few layers with one head of keys all K/V take less than hidden states of all tokens."""
    few = {"num_hidden_layers": 2, "num_key_value_heads": 1, "vocab_size": 1000}
    for model, expected in ((few, "by_chunk"), ({}, "by_layer")):
        made, one, other = (
            plan(training=False, model=model, order=order)
            for order in ("auto", "by_layer", "by_chunk")
        )
        least = min(one.estimate.device.total, other.estimate.device.total)
        assert made.order == expected
        assert made.estimate.device.total == least
        assert made.order_reason == "auto: less memory"


def test_evaluation_needs_no_host() -> None:
    assert plan(training=False, host_memory="1MiB", offload="full").estimate.host.total == 0


def test_an_allocator_that_leaves_holes_is_left_room_for_them() -> None:
    holes = replace(CUDA, expandable_segments=False)
    assert plan(device=holes).budgets.device == 80 * 2**30 - int(FRAGMENTATION_SHARE * 80 * 2**30)
    assert plan(device=holes).warnings == (), "half the device is free"
    full = plan(device=holes, recompute="none", offload="none", total_tokens=4096 * 13)
    assert any("expandable_segments:True" in warning for warning in full.warnings)
    # What the user names is his word, and processors have no such allocator.
    assert plan(device=holes, device_memory="40GiB").budgets.device == 40 * 2**30
    assert plan(device=replace(CPU, expandable_segments=False)).budgets.device == 2**40
    assert plan().budgets.device == 80 * 2**30


def test_warnings() -> None:
    assert plan().warnings == ()
    (rotary,) = plan(total_tokens=131_073, device_memory="999GiB").warnings
    assert "131,073 tokens" in rotary
    assert "131,072 positions" in rotary
    (device,) = plan(device_memory="17GiB").warnings
    assert "predicted device peak" in device
    assert "over the 17.0 GiB" in device
    assert "recompute='full'" in plan(recompute="none", offload="none").warnings[0]


AUTO = {"weights": "auto", "optimizer": "auto"}
FAST = replace(
    CUDA,
    memory_bytes={"device": 80 * 2**30, "host": 512 * 2**30},
    profile=load_profile("h100"),
)


def places(made: Plan) -> str:
    resting = made.shape.host_resident
    if resting is None:
        return "device"
    return "optimizer" if resting.keeps_device_copies else "weights"


def test_what_fits_on_the_device_stays_there() -> None:
    made = plan(device=FAST, num_chunks=2, **AUTO)
    assert places(made) == "device"
    assert made.places_reason == ""
    assert made.prediction == plan(device=FAST, num_chunks=2).prediction


def test_chunks_given_by_hand_are_no_faster_on_a_cpu() -> None:
    """Within a budget; the rule's short chunks come after longer ones, and after tiles."""
    device = replace(CPU, profile=load_profile("cpu"))
    small = {"num_hidden_layers": 4, "hidden_size": 512, "vocab_size": 1000}
    asked: dict[str, Any] = {"device": device, "model": small, "device_memory": "2GiB"}
    auto, *others = (
        plan(total_tokens=8192, **asked, **settings).prediction
        for settings in ({}, {"num_chunks": 2}, {"num_chunks": 4}, {"num_chunks": 8})
    )
    assert auto is not None
    for other in others:
        assert other is not None
        assert auto.step_seconds <= 1.01 * other.step_seconds


def test_what_waits_for_copies_is_held_against_plans_of_fewer_modes() -> None:
    """Four short rows leave compute little time to hide copies behind; see `solve`."""
    asked = {"device_memory": 79 * 2**30, "host_memory": 128 * 2**30}
    made, *others = (
        make_plan(replace(question(8192, layers=32, **asked, **settings), batch_rows=4)).prediction
        for settings in ({}, {"recompute": "selective"}, {"recompute": "full"})
    )
    assert made is not None
    for other in others:
        assert other is not None
        assert made.step_seconds <= other.step_seconds


def test_what_does_not_is_as_fast_as_the_fastest_place() -> None:
    """All weights, gradients and states of an 8B model take 90 GiB."""
    made = plan(device=FAST, trains_all=True, num_chunks=2, **AUTO)
    assert made.places_reason == "auto: not all fits on the device; the fastest that does"
    assert made.estimate.device.total <= 80 * 2**30
    others = [
        plan(device=FAST, trains_all=True, num_chunks=2, weights=weights, optimizer="host")
        for weights in ("device", "host")
    ]
    assert [places(other) for other in others] == ["optimizer", "weights"]
    assert [other.places_reason for other in others] == ["set by the user"] * 2
    least = min(other.prediction.step_seconds for other in others)
    assert made.prediction.step_seconds <= 1.01 * least
    assert made.prediction.update_seconds > 0


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"order": "by_chunk"}, "optimizer"),
        ({"by_layer_refusal": "it has one layer only"}, "optimizer"),
        ({"optimizer": "device"}, "device"),
        ({"device": CPU}, "device"),
        ({"training": False}, "device"),
        ({"on_host_refusal": "2 processes reduce gradients"}, "device"),
    ],
)
def test_where_weights_cannot_rest_on_the_host(changes: dict[str, Any], place: str) -> None:
    made = plan(**{"device": FAST, "trains_all": True, "num_chunks": 2, **AUTO, **changes})
    assert places(made) == place
    said = any("on the device, because 2 processes reduce" in text for text in made.warnings)
    assert said == ("on_host_refusal" in changes)


def test_groups_of_rows_would_bring_all_weights_several_times() -> None:
    found = {
        rows: [place.weights for place in read_placements(SPPOConfig(micro_batch_size=rows), FAST)]
        for rows in (None, 1)
    }
    assert found == {None: [False, False, True], 1: [False, False]}


def test_what_would_fit_without_groups_of_rows_is_said() -> None:
    """Beside them no weights rest on the host; a batch of one group has more room."""
    said = "without micro_batch_size=4 it fits"
    for host_gib, helps in ((64, True), (8, False)):
        asked = {"device_memory": 24 * 2**30, "host_memory": host_gib * 2**30, "num_chunks": 2}
        group = replace(question(16_384, layers=32, micro_batch_size=4, **asked), batch_rows=4)
        with pytest.raises(BudgetError) as refused:
            make_plan(group)
        assert (said in str(refused.value)) == helps
        if helps:
            whole = replace(group, config=group.config.replace(micro_batch_size=None))
            assert make_plan(whole).places_reason == "auto: not all fits on the device"


SHALLOW = {"num_hidden_layers": 4}


def little(host: int = 5) -> DeviceFacts:
    return replace(FAST, memory_bytes={"device": 15 * 2**30, "host": host * 2**30})


@pytest.mark.parametrize(("refusal", "host"), [(None, 5), ("", 10)], ids=["layer", "chunk"])
def test_attention_runs_again_where_nothing_fits_otherwise(refusal: str | None, host: int) -> None:
    asked = {"total_tokens": 131_072, "num_chunks": 32, "model": SHALLOW}
    asked["by_layer_refusal"] = refusal
    device = little(host)
    roomy = plan(device=little(64), **asked)
    assert not roomy.program().reruns_attention.any()
    made = plan(device=device, **asked)
    assert fits(made.estimate, made.budgets)
    again = made.program().reruns_attention
    assert 0 < again.sum() < again.size
    # Where queries see few keys it takes less time for as many bytes.
    work = made.cost.unit_seconds(made.bounds).recompute
    most = again.mean() * (work[:, -1] - work[:, -2]).sum() * 4
    assert 0 < made.program().attention_rerun_seconds < 0.7 * most
    text = " ".join(render_plan(made, "Llama", width=400).split())
    assert f"attention again {attention_recompute_text(made)} " in text
    assert "memory has no room for its output" in text
    refused = plan(device=device, attention_once=True, **asked)
    assert not refused.program().reruns_attention.any()
    assert not fits(refused.estimate, refused.budgets)
    assert any("attention_once=False makes it fit" in said for said in refused.warnings)
    named = {"device_memory": 15 * 2**30, "host_memory": host * 2**30}
    with pytest.raises(BudgetError, match=r"memory cannot hold .* Or: attention_once=False makes"):
        plan(device=device, attention_once=True, **named, **asked)
    assert plan(device=device, **named, **asked).program().reruns_attention.any()


@pytest.mark.parametrize(
    "changes", [{"pp_size": 2}, {"recompute": "full"}, {"sp_size": 2}], ids=str
)
def test_where_attention_never_runs_again(changes: dict[str, Any]) -> None:
    asked = {"total_tokens": 131_072, "num_chunks": 32, "model": SHALLOW}
    made = plan(device=little(), **asked, **changes)
    assert not made.program().reruns_attention.any()
    assert not any("attention_once" in said for said in made.warnings)


def test_a_host_without_room_is_refused() -> None:
    budgets = {"device_memory": "80GiB", "host_memory": "64GiB"}
    with pytest.raises(BudgetError, match=r"host memory cannot hold weights, gradients and opt.*"):
        plan(device=FAST, trains_all=True, optimizer="host", **budgets)
    with pytest.raises(BudgetError, match=r"device memory cannot .* on the host: host memory"):
        plan(device=FAST, trains_all=True, num_chunks=2, **budgets, **AUTO)


def test_on_a_cpu_what_rests_is_in_the_device_s_memory() -> None:
    whole = plan(device=CPU, trains_all=True)
    rests = plan(device=CPU, trains_all=True, weights="host", optimizer="host")
    assert rests.budgets.device == whole.budgets.device - rests.shape.host_resident.held_bytes
