"""Layouts over devices: the fastest that fit, none missed, and what is said where none does."""

import itertools
import math
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError, ScheduleError
from sppo_hf.planning import cluster
from sppo_hf.planning.activation_modes import RECOMPUTE_BY_SAVED, Saved
from sppo_hf.planning.choices import DeviceFacts
from sppo_hf.planning.cluster import (
    ClusterRequest,
    _few_rows,
    _num_actions,
    _reduce_seconds,
    _simulate_rows,
    _warm_up,
    _worse,
    layouts,
    simulate_layout,
    solve_cluster,
)
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Order
from sppo_hf.planning.layouts import Layout, SearchSpace
from sppo_hf.planning.memory import Budgets
from sppo_hf.planning.pipeline_cost import head_blocks_of
from sppo_hf.planning.plan import PlanRequest, make_plan
from sppo_hf.planning.tiers import Tier
from sppo_hf.registry import SCHEDULES
from sppo_hf.schedule.generate import (
    MSP,
    Size,
    all_schedules,
    forwards_before_backward,
    generate,
    is_interleaved,
    splits_backward,
)
from sppo_hf.schedule.schedule import Schedule
from tests.planning.profiles import PROFILE, changed
from tests.planning.shapes import llama_config, shape_of
from tests.sweeps import ALL, examples

SHAPE = shape_of(
    llama_config(hidden_size=1024, intermediate_size=3584, num_hidden_layers=8, vocab_size=32_000),
    dtype_bytes=2,
)
GIB = 2**30
QUESTION = ClusterRequest(
    cost=ModelCost(shape=SHAPE, profile=PROFILE, dtype_name="bfloat16"),
    total_tokens=16_384,
    rows=4,
    gpus=4,
    budgets=Budgets(device=None, host=None, disk=0),
)


def test_a_classifier_is_given_no_pipeline() -> None:
    cost = replace(QUESTION.cost, shape=SHAPE.with_classifier(2))
    found = {layout.stages for layout in layouts(replace(QUESTION, cost=cost))}
    assert found == {1}
    assert {1, 2, 4} <= {layout.stages for layout in layouts(QUESTION)}


@pytest.mark.parametrize("exchange", [{"takes_more": True}, {"returns_more": True}], ids=str)
def test_layers_that_exchange_more_than_hidden_states_are_given_no_pipeline(
    exchange: dict[str, bool],
) -> None:
    layers = tuple(replace(layer, **exchange) for layer in SHAPE.layers)
    cost = replace(QUESTION.cost, shape=replace(SHAPE, layers=layers))
    assert {layout.stages for layout in layouts(replace(QUESTION, cost=cost))} == {1}


def within(device: float, host: float = 1000.0) -> ClusterRequest:
    budgets = Budgets(device=int(device * GIB), host=int(host * GIB), disk=0)
    return replace(QUESTION, budgets=budgets)


def test_the_best_are_the_fastest_of_all_that_fit() -> None:
    space = SearchSpace(chunk_tokens=(2048, 8192))
    question = replace(within(5.2), rows=2, total_tokens=8192, space=space)
    answer = solve_cluster(question, keep=3)
    everything = [simulate_layout(question, layout) for layout in layouts(question)]
    # A layout of which nothing leaves is the one that offloads nothing.
    others = [plan for plan in everything if plan.offloads or plan.layout.offload == "none"]
    fitting = sorted(
        (plan for plan in others if not plan.missing_bytes), key=lambda p: p.step_seconds
    )
    assert 0 < len(fitting) < len(everything) == answer.num_candidates
    assert [plan.step_seconds for plan in answer.best] == [p.step_seconds for p in fitting[:3]]
    assert answer.num_simulated < answer.num_candidates
    assert all(max(plan.peak_bytes) <= 5.2 * GIB for plan in answer.best)


def test_of_those_that_take_as_long_the_one_with_less_memory_comes_first() -> None:
    plan = simulate_layout(QUESTION, next(layouts(QUESTION)))
    small = replace(plan, step_seconds=1.00001, peak_bytes=(1,))
    large = replace(plan, step_seconds=1.0, peak_bytes=(2,))
    slow = replace(plan, step_seconds=1.002, peak_bytes=(0,))
    assert sorted([slow, large, small], key=_worse) == [small, large, slow]


EVERYTHING = SearchSpace(
    schedules=("1f1b", "seq1f1b", "zb_seq1f1b", "interleaved_seq1f1b", "msp"),
    partitions=("even", "flops", "bounded"),
    sharded=(False, True),
    beyond_runtime=True,
)


@pytest.mark.parametrize("tokens", [16_384, 65_536])
def test_byte_bounds_are_below_simulated_peaks(tokens: int) -> None:
    question = replace(QUESTION, total_tokens=tokens, space=EVERYTHING)
    bounds_of_layout = question.bounds_of_layout
    looked_at = list(layouts(question))
    assert {layout.sp for layout in looked_at} == {1, 2, 4}
    for layout in looked_at[:: max(1, len(looked_at) // (197 if ALL else 47))]:
        plan = simulate_layout(question, layout)
        assert bounds_of_layout.device_bytes(layout) <= max(plan.peak_bytes), layout
        device_bytes = max(plan.peak_bytes)
        assert bounds_of_layout.host_bytes(layout, 4) <= plan.host_bytes, layout
        assert bounds_of_layout.host_bytes(layout, 4, device_bytes) <= plan.host_bytes, layout
        assert question.min_step_seconds(layout) <= plan.step_seconds, layout


def test_of_the_papers_rule_no_more_is_counted_than_whole_layers_of_a_stage() -> None:
    """Of few layers perhaps none leaves, where a disk would take longer than all computes."""
    slow = replace(PROFILE, disk_write_bytes_per_second=5e8, disk_read_bytes_per_second=5e8)
    cost = ModelCost(shape=SHAPE, profile=slow, dtype_name="bfloat16")
    space = SearchSpace(activation_rules=(("whole", "sppo"),), activation_tiers=("host", "disk"))
    question, stored = replace(QUESTION, cost=cost, space=space), 0
    for layout in list(layouts(question))[:: 1 if ALL else 3]:
        plan = simulate_layout(question, layout)
        assert question.min_step_seconds(layout) <= plan.step_seconds, layout
        stored += plan.disk_bytes > 0
    assert stored


def _drawn(random: Random) -> tuple[ClusterRequest, Layout]:
    """A question, and one of its layouts."""
    config = llama_config(
        hidden_size=512,
        intermediate_size=random.choice((512, 2048)),
        num_hidden_layers=random.randint(4, 12),
        vocab_size=random.choice((1000, 32_000, 200_000)),
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    schedules = ("gpipe", "1f1b", "seq1f1b", "zb_seq1f1b", "interleaved_seq1f1b", "msp")
    space = replace(
        EVERYTHING,
        schedules=(random.choice(schedules),),
        virtual=(2, 3),
        chunk_tokens=(random.choice((512, 2048)), 16_384),
        min_device_share=0.7,
    )
    question = replace(
        QUESTION,
        cost=replace(QUESTION.cost, shape=shape_of(config, dtype_bytes=2)),
        total_tokens=random.choice((1000, 8192, 30_000)),
        rows=random.randint(1, 9),
        gpus=random.randint(2, 6),
        link_bytes_per_second=random.choice((1e9, math.inf)),
        space=space,
    )
    looked_at = list(layouts(question))
    return question, random.choice(looked_at or [_ALONE._replace(replicas=1)])


_ALONE = Layout("seq1f1b", 1, 1, 1, 1, "flops", "whole", "none")


@examples(60, whole=4000)
@given(st.integers(0, 2**32))
def test_seconds_bounds_are_below_simulated_steps(seed: int) -> None:
    question, layout = _drawn(Random(seed))
    found = simulate_layout(question, layout).step_seconds
    assert question.min_step_seconds(layout) <= found, layout


def test_gradients_are_reduced_while_the_last_sums_still_come() -> None:
    """Over slow copies the sums of the last unit's keys come for longer than it computes."""
    profile = changed(h2d_bytes_per_second=2e8, both_h2d_bytes_per_second=2e8)
    question = replace(
        QUESTION,
        cost=replace(QUESTION.cost, profile=profile),
        link_bytes_per_second=1e9,
        node_bytes_per_second=1e9,
    )
    for stages, replicas in ((1, 4), (2, 2)):
        layout = Layout(
            *("seq1f1b", stages, replicas, 1, 2, "flops", "inputs", "none"), kv_tier="host"
        )
        plan = simulate_layout(question, layout)
        assert question.min_step_seconds(layout) <= plan.step_seconds, layout


def test_units_are_shared_as_fast_as_devices_exchange() -> None:
    """Between nodes that may be faster than within one."""
    layout = Layout("msp", 4, 2, 1, 8, "flops", "whole", "none")
    question = replace(
        QUESTION,
        gpus=8,
        gpus_per_node=1,
        link_bytes_per_second=math.inf,
        node_bytes_per_second=1e8,
    )
    assert question.min_step_seconds(layout) <= simulate_layout(question, layout).step_seconds


@pytest.mark.parametrize("schedule", ["seq1f1b", "zb_seq1f1b", "interleaved_seq1f1b", "msp"])
def test_the_least_that_a_layout_takes_is_near_what_it_takes(schedule: str) -> None:
    """The head makes the last stage longer; links take no time, so computes are all there is."""
    space = SearchSpace(
        schedules=(schedule,), kv_tiers=("device",), activation_rules=(("matmuls", "none"),)
    )
    question = replace(QUESTION, space=space, link_bytes_per_second=math.inf)
    bounds_of_layout = question.bounds_of_layout
    looked_at = [
        layout
        for gpus in (3, 4)
        for layout in layouts(replace(question, gpus=gpus))
        if layout.stages > 1 and layout.stages * layout.virtual < 8
    ]
    assert looked_at
    near: list[float] = []
    for layout in looked_at:
        rows = question.rows // layout.replicas
        _, costs, timeline = _simulate_rows(question, layout, rows)
        busiest = max(timeline.busy_seconds(f"{rank}.compute") for rank in range(layout.stages))
        found = bounds_of_layout.seconds(layout)
        # The head over a share of a chunk is a little slower than its share of the whole.
        assert busiest * (0.99 if schedule == "msp" else 1 - 1e-9) <= found, layout
        assert costs.stages == bounds_of_layout.stages(layout)
        near.append(found / timeline.end_seconds)
    assert max(near) <= 1
    assert sum(near) / len(near) > LEAST_NEAR[schedule]


LEAST_NEAR = {"seq1f1b": 0.9, "zb_seq1f1b": 0.9, "interleaved_seq1f1b": 0.9, "msp": 0.9}
"""A share of the step, on average."""


@pytest.mark.parametrize("kv_tier", ["device", "host"])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_search_knows_how_many_actions_it_will_simulate(stages: int, kv_tier: Tier) -> None:
    """No fewer, and where chunks do not leave no more, reductions aside."""
    question = replace(QUESTION, gpus=stages, rows=2)
    for schedule, offload in product(("seq1f1b", "zb_seq1f1b", MSP), ("none", "full")):
        for chunks in (stages, 16):
            layout = Layout(
                *(schedule, stages, 1, 1, chunks, "flops", "matmuls", offload), kv_tier=kv_tier
            )
            *_, timeline = _simulate_rows(question, layout, 2)
            found = _num_actions(layout, 2)
            assert len(timeline) <= found < 1.6 * len(timeline), layout
            if offload == "none" and kv_tier == "device":
                assert len(timeline) == found, layout


@pytest.mark.parametrize(("tokens", "rows"), [(4096, 1), (16_384, 4)])
def test_a_split_backward_of_the_users_own_is_known_to_be_split(
    tokens: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All weight gradients come last, so that no rank waits for them."""

    def mine(size: Size) -> Schedule:
        made = generate("zb_seq1f1b", size)
        late = [[action for action in rank if action.kind == "W"] for rank in made.ranks]
        kept = [[action for action in rank if action.kind != "W"] for rank in made.ranks]
        ranks = tuple((*some, *others) for some, others in zip(kept, late, strict=True))
        return Schedule(ranks, made.chunks)

    monkeypatch.setitem(SCHEDULES, "mine", mine)
    layout = Layout("mine", 4, 1, 1, 4, "even", "whole", "none")
    question = replace(QUESTION, total_tokens=tokens, rows=rows, link_bytes_per_second=math.inf)
    *_, timeline = _simulate_rows(question, layout, rows)
    assert _num_actions(layout, rows) == len(timeline)
    assert question.min_step_seconds(layout) <= timeline.end_seconds


def test_a_schedule_that_is_not_made_for_few_chunks_may_be_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mine(size: Size) -> Schedule:
        if size.num_chunks < 4:
            raise ScheduleError("too few chunks")
        return generate("zb_seq1f1b", size)

    monkeypatch.setitem(SCHEDULES, "mine", mine)
    assert splits_backward("mine")
    assert [name for name in all_schedules() if splits_backward(name)] == ["zb_seq1f1b", "mine"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "seq1f1b", "zb_seq1f1b", "interleaved_seq1f1b"])
def test_units_that_ranks_have_begun_are_known_without_their_schedule(name: str) -> None:
    for ranks, rows, chunks in product((1, 2, 3, 5), (1, 2, 3, 7), (1, 2, 4, 9)):
        for virtual in (1, 2, 3) if is_interleaved(name) else (1,):
            size = Size(ranks, rows, chunks, virtual)
            assert (
                forwards_before_backward(name, size)
                == generate(name, size).forwards_before_backward
            ), size


@pytest.mark.parametrize("name", ["1f1b", "seq1f1b", "zb_seq1f1b", "interleaved_seq1f1b", MSP])
def test_rows_that_begin_before_a_backward_are_known_without_their_schedule(name: str) -> None:
    for stages, rows, chunks in product((2, 3, 4), (1, 2, 5), (2, 4)):
        virtual = 2 if is_interleaved(name) else 1
        chunks = 1 if name == "1f1b" else max(chunks, stages) if name == MSP else chunks
        layout = Layout(name, stages, 1, virtual, chunks, "even", "whole", "none")
        made = generate(name, Size(stages, rows, chunks, virtual))
        first = itertools.takewhile(lambda action: action.kind == "F", made.ranks[0])
        begun = {made.micro_batch(action) for action in first}
        warm_up, every = _warm_up(layout, rows)
        # Of a group that passes the stages as one, some may begin later.
        most = warm_up + every - 1 if every else rows
        assert warm_up <= len(begun) <= most, layout


def test_units_are_shared_where_the_runtime_takes_them() -> None:
    def sharing(question: ClusterRequest) -> set[tuple[int, int, str, str]]:
        looked_at = (x for x in layouts(question) if x.schedule == MSP)
        return {(x.stages, x.sp, x.kv_tier, x.activation_tier) for x in looked_at}

    space = SearchSpace(activation_tiers=("host", "disk"))
    question = replace(QUESTION, space=space)
    assert sharing(question) == {
        (stages, 1, kv_tier, activation_tier)
        for stages in (2, 4)
        for kv_tier in ("device", "host")
        for activation_tier in ("host", "disk")
    }
    assert sharing(replace(question, shares_units=False)) == set()
    # Three ranks cannot divide 8 query heads, nor 2 key/value heads; so neither can four.
    few = tuple(replace(layer, num_heads=8, num_kv_heads=2) for layer in SHAPE.layers)
    cost = replace(QUESTION.cost, shape=replace(SHAPE, layers=few))
    assert {stages for stages, *_ in sharing(replace(question, cost=cost))} == {2}


def test_uneven_heads_set_the_pace_of_shared_units() -> None:
    """Of 8 key/value heads three ranks have 2, 3 and 3: attention takes 9/8 of a third."""
    cost, far = QUESTION.cost, 2**24
    head_blocks = head_blocks_of(cost, 4)
    assert head_blocks == 8
    whole, share = (
        c.forward_seconds(1, far, far + 3 * 4096)
        for c in (cost, cost.with_sequence_parallel(3, 1e18, head_blocks))
    )
    assert share / whole == pytest.approx(3 / 8, rel=0.02)


def test_with_memory_to_spare_replicas_win_and_nothing_is_recomputed() -> None:
    best = solve_cluster(within(1000), keep=1).best[0]
    assert (best.layout.stages, best.layout.replicas) == (1, 4)
    assert (best.layout.saved, best.layout.offload) == ("whole", "none")
    assert best.bubble_fraction < 0.2
    assert best.recompute_fraction == 0.0
    # In words, nothing that takes no time.
    assert replace(best, bubble_fraction=0.125).reason == "idle 12.5%"
    assert replace(best, recompute_fraction=0.2).reason.endswith(", recompute 20.0%")
    away = replace(best, layout=best.layout._replace(kv_tier="host"))
    assert away.reason.endswith("%, copies beside compute")


def test_a_layout_of_which_nothing_leaves_is_not_simulated_twice() -> None:
    """And is found, even where no action is left for the other one."""
    search = cluster._Search(QUESTION, keep=1, slack=0.0)
    stays = Layout("seq1f1b", 1, 4, 1, 1, "flops", "matmuls", "none")
    # By that rule the last chunk stays on the device.
    assert search._simulate(stays._replace(offload="sppo"), math.inf)
    assert search.best == [simulate_layout(QUESTION, stays)]
    assert stays in search.simulated


@pytest.mark.parametrize("order", ["by_chunk", "by_layer"])
@pytest.mark.parametrize("saved", ["whole", "matmuls", "inputs"])
def test_a_layout_of_one_stage_is_what_its_run_plans(order: Order, saved: Saved) -> None:
    """To the byte, whatever leaves the device."""
    budgets = Budgets(device=1000 * GIB, host=1000 * GIB, disk=0)
    question = replace(QUESTION, total_tokens=65_536, rows=2, gpus=2, budgets=budgets)
    cost, memory = QUESTION.cost, {"device": 2000 * GIB, "host": 2000 * GIB}
    for offload, kv_tier in product(("none", "full", "sppo"), ("device", "host")):
        layout = Layout("seq1f1b", 1, 2, 1, 8, "flops", saved, offload, kv_tier, order=order)
        found = simulate_layout(question, layout)
        config = SPPOConfig(
            chunk_lengths=[end - start for start, end in found.bounds],
            recompute=RECOMPUTE_BY_SAVED[saved],
            offload=offload,
            offload_kv="none" if kv_tier == "device" else "full",
            order=order,
            device_memory=budgets.device,
            host_memory=budgets.host,
        )
        plan = make_plan(
            PlanRequest(
                shape=cost.shape,
                config=config,
                device=DeviceFacts(kind="cuda", name="a", memory_bytes=memory, profile=PROFILE),
                total_tokens=question.total_tokens,
                batch_rows=1,
                accumulates=False,
                dtype_name=cost.dtype_name,
                by_layer_refusal=None,
            )
        )
        assert found.peak_bytes == (plan.estimate.peak_bytes("device"),)
        assert plan.prediction is not None
        reduced = _reduce_seconds(question, layout)
        assert found.step_seconds - reduced == pytest.approx(plan.prediction.step_seconds)
        assert found.host_bytes == 2 * plan.estimate.peak_bytes("host")


def test_less_memory_is_slower() -> None:
    space = SearchSpace(chunk_tokens=(2048, 8192))
    seconds = [
        solve_cluster(replace(within(gib), total_tokens=8192, space=space), keep=1)
        .best[0]
        .step_seconds
        for gib in (1000.0, 6.9, 3.9)
    ]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


def test_the_host_is_a_limit_too() -> None:
    space = SearchSpace(chunk_tokens=(2048, 8192), schedules=("interleaved_seq1f1b",), sp=(1, 2))
    roomy, tight = (
        solve_cluster(replace(within(3.3, host=host), rows=2, space=space), keep=1)
        for host in (1000, 0.5)
    )
    assert roomy.best[0].host_bytes > 0.5 * GIB
    assert tight.best
    assert all(plan.host_bytes <= 0.5 * GIB for plan in tight.best)


def test_the_closest_layout_is_returned_where_none_fits() -> None:
    answer = solve_cluster(within(0.5))
    assert answer.best == ()
    assert answer.closest is not None
    assert answer.closest.missing_bytes > 0
    assert answer.closest.missing_bytes == max(answer.closest.peak_bytes) - GIB // 2


def test_layouts_over_budget_by_their_bounds_are_not_simulated() -> None:
    """Also of the paper's rule, whose frames must be somewhere."""
    space = SearchSpace(chunk_tokens=(4096, 8192), sp=(1,))
    question = replace(within(0.8, host=0.2), total_tokens=131_072, space=space)
    answer = solve_cluster(question)
    some = [simulate_layout(question, layout) for layout in list(layouts(question))[::11]]
    assert answer.num_simulated == 1
    assert answer.num_skipped == 0
    assert answer.closest is not None
    assert 0 < answer.closest.missing_bytes < 1.1 * min(plan.missing_bytes for plan in some)


def test_reductions_cost_time_on_slow_links() -> None:
    layout = Layout("seq1f1b", 1, 4, 1, 1, "flops", "whole", "none")
    fast, slow = (
        simulate_layout(replace(QUESTION, link_bytes_per_second=rate), layout).step_seconds
        for rate in (1e12, 1e9)
    )
    # A ring over four replicas moves 2 * 3/4 of the gradients over each link.
    wait = 1.5 * SHAPE.gradient_bytes * (1 / 1e9 - 1 / 1e12)
    assert slow - fast == pytest.approx(wait)


def test_work_is_shared_by_all_devices() -> None:
    for layout in (
        Layout("seq1f1b", 4, 1, 1, 4, "flops", "whole", "none"),
        Layout("seq1f1b", 2, 2, 1, 4, "flops", "whole", "none"),
        Layout("interleaved_seq1f1b", 2, 2, 2, 4, "flops", "whole", "none"),
    ):
        plan = simulate_layout(QUESTION, layout)
        assert len(plan.peak_bytes) == layout.stages
        assert len(plan.layers) == layout.stages * layout.virtual
        assert plan.tokens_per_second == pytest.approx(4 * 16_384 / plan.step_seconds)
        assert "idle" in plan.reason


def test_devices_that_cannot_share_the_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"11 devices cannot share 3 rows .* 8 layers"):
        solve_cluster(replace(QUESTION, gpus=11, rows=3))
    stages = {(x.stages, x.replicas) for x in layouts(replace(QUESTION, gpus=7, rows=3))}
    assert stages == {(7, 1)}


def test_a_search_with_slack_is_shorter_and_within_it() -> None:
    sure = solve_cluster(within(6), keep=1)
    quick = solve_cluster(within(6), keep=1, slack=0.1)
    assert quick.num_simulated < sure.num_simulated
    assert quick.best[0].step_seconds <= 1.1 * sure.best[0].step_seconds


def test_keys_and_values_on_the_host_let_longer_rows_fit() -> None:
    space = SearchSpace(
        schedules=("seq1f1b",),
        partitions=("bounded",),
        activation_rules=(("inputs", "full"),),
        chunk_tokens=(8192, 8192),
        kv_tiers=("device",),
        sp=(1,),
    )
    # Of a rank's two layers K/V are 2 GiB, and their gradient sums twice that.
    long = replace(within(7.9), total_tokens=2**20, rows=1, space=space)
    here = solve_cluster(long, keep=1)
    space = replace(space, kv_tiers=("device", "host"))
    away = solve_cluster(replace(long, space=space), keep=1)
    assert here.best == ()
    assert away.best[0].layout.kv_tier == "host"
    assert away.best[0].host_bytes > 0
    assert "copies beside compute" in away.best[0].reason


def test_many_rows_are_what_few_rows_show(monkeypatch: pytest.MonkeyPatch) -> None:
    # Zero-bubble's and 1F1B's ranks drift longest; interleaved rows pass in groups of two.
    looked_at = [
        Layout("seq1f1b", 4, 1, 1, 4, "flops", "whole", "sppo"),
        Layout("1f1b", 4, 1, 1, 4, "flops", "matmuls", "none"),
        Layout("zb_seq1f1b", 4, 1, 1, 4, "flops", "inputs", "full", "host"),
        Layout("interleaved_seq1f1b", 2, 2, 4, 2, "even", "matmuls", "full"),
        Layout("interleaved_seq1f1b", 4, 1, 2, 2, "flops", "whole", "none"),
    ]
    question = replace(QUESTION, rows=64)
    few = [simulate_layout(question, layout) for layout in looked_at]
    counts: list[int] = []

    def all_rows(rows: int, warm_up: int, every: int) -> int:
        counts.append(_few_rows(rows, warm_up, every))
        return rows

    monkeypatch.setattr(cluster, "_few_rows", all_rows)
    for layout, plan in zip(looked_at, few, strict=True):
        whole = simulate_layout(question, layout)
        assert plan.step_seconds == pytest.approx(whole.step_seconds, rel=1e-9), layout
        assert plan.bubble_fraction == pytest.approx(whole.bubble_fraction, abs=1e-9)
        assert plan.recompute_fraction == pytest.approx(whole.recompute_fraction, abs=1e-12)
        assert (plan.peak_bytes, plan.host_bytes) == (whole.peak_bytes, whole.host_bytes)
    assert max(counts) < 16


def test_a_search_cut_short_says_what_it_did_not_see() -> None:
    question = within(6)
    whole = solve_cluster(question, keep=3)
    assert (whole.num_skipped, whole.skipped_min_seconds) == (0, None)
    short = solve_cluster(question, keep=3, max_actions=2000)
    assert 0 < short.num_simulated < whole.num_simulated
    assert short.num_skipped > 0
    assert short.skipped_min_seconds is not None
    # What it missed is no faster than it says.
    assert short.skipped_min_seconds <= whole.best[0].step_seconds
    assert short.best[0].step_seconds < 1.1 * whole.best[0].step_seconds
    # Where nothing is small enough, the smallest is simulated.
    least = solve_cluster(question, max_actions=1)
    assert least.num_simulated == 1
    assert least.num_skipped == least.num_candidates - 1 - sum(
        question.bounds_of_layout.device_bytes(layout) > 6 * GIB for layout in layouts(question)
    )
