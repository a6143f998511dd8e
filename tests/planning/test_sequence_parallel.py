"""Sequence parallelism and shared units in costs: what is divided, what is not, what it takes."""

from dataclasses import replace

import pytest

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError
from sppo_hf.planning.activation_modes import RECOMPUTE_BY_SAVED, Saved
from sppo_hf.planning.choices import DeviceFacts
from sppo_hf.planning.chunk_bounds import even_bounds
from sppo_hf.planning.cluster import ClusterRequest, layouts, simulate_layout, solve_cluster
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.layouts import Layout, SearchSpace
from sppo_hf.planning.lowering import StepProgram
from sppo_hf.planning.memory import CAUSE_OF_SAVED, Budgets, Cause, byte_tables
from sppo_hf.planning.model_profile import LoraShape
from sppo_hf.planning.pipeline_cost import PipelineCost, extra_shared_unit_bytes
from sppo_hf.planning.plan import PlanRequest, make_plan
from sppo_hf.planning.stages import StageWeights
from sppo_hf.planning.tile_sizes import kv_block_tokens, passing_bytes
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.generate import Size, generate
from sppo_hf.schedule.timeline import Timeline
from tests.planning.moments import peak_by_cause
from tests.planning.profiles import PROFILE, changed
from tests.planning.shapes import llama_config, shape_of
from tests.planning.situations import decided

CONFIG = llama_config(
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=32_000,
)
SHAPE = shape_of(CONFIG)
COST = ModelCost(shape=SHAPE, profile=PROFILE, dtype_name="bfloat16")
TOKENS = 65_536
GIB = 2**30
FRAMES = CAUSE_OF_SAVED["whole"]


def shared(sp: int, rate: float = 1e11, cost: ModelCost = COST) -> ModelCost:
    return cost.with_sequence_parallel(sp, rate)


def run(name: str, size: Size, cost: ModelCost, **changes: object) -> tuple[PipelineCost, Timeline]:
    schedule = generate(name, size)
    bounds = even_bounds(TOKENS, size.num_chunks)
    costs = PipelineCost(schedule, cost, bounds, **changes)  # pyright: ignore[reportArgumentType]
    lowered = costs.lowered(schedule)
    timeline = costs.simulate(lowered)
    return costs, timeline


@pytest.mark.parametrize(("sp", "kv_heads"), [(2, 1), (4, 1), (8, 1), (3, 2)])
def test_bytes_of_a_layer_are_divided(sp: int, kv_heads: int) -> None:
    tokens = 24_000
    decisions = decided(((0, tokens), (tokens, 2 * tokens)), layers=SHAPE.num_layers)
    one, all_ranks = (byte_tables(cost.shape, decisions, "cuda") for cost in (shared(sp), COST))
    inputs, whole = (all_ranks.activations(saved)[0, 1] for saved in ("inputs", "whole"))
    assert one.activations("inputs")[0, 1] == inputs // sp
    # What attention returns is saved as its heads of all tokens, too.
    heads = -(-8 // sp) * 128 * tokens * 2
    assert one.activations("whole")[0, 1] == whole // sp + heads
    # Of 2 K/V heads; those that several ranks read are on each of them.
    assert (one.kv * 2 == all_ranks.kv * kv_heads).all()
    assert (one.dkv * 2 == all_ranks.dkv * kv_heads).all()


@pytest.mark.parametrize(("sp", "longer"), [(1, 1), (2, 2), (4, 2)])
def test_blocks_of_keys_are_longer_where_a_rank_has_fewer_heads(sp: int, longer: int) -> None:
    shape = replace(SHAPE, sp=sp)
    facts = {"batch_rows": 1, "device_kind": "cuda", "device_bytes": None}
    # 256 MiB of the keys and values of 2 heads of 128, in 2 bytes.
    assert kv_block_tokens(shape, 2**20, **facts) == longer * 262_144
    # Half of the least staging memory: the float32 sums of the keys of such a block.
    staged = passing_bytes(shape, 1024, batch_rows=1, block_tokens=longer * 262_144)
    assert staged == 2 * 262_144 * 2 * 2 * 128 * 4


def test_all_to_alls_move_what_ulysses_says() -> None:
    # (2 Hq + 2 Hkv) C d (n - 1) / n^2 elements of 2 bytes, each way; 8 + 2 heads of 128.
    tokens, sp, rate = 131_072, 2, 1e9
    sent = 2 * (8 + 2) * tokens * 128 * (sp - 1) // sp**2 * 2
    assert shared(sp, rate).all_to_all_seconds(0, tokens) == pytest.approx(sent / rate)
    fast, slow = shared(sp, 1e15), shared(sp, rate)
    for of in ("forward_seconds", "backward_seconds"):
        more = getattr(slow, of)(0, 0, tokens) - getattr(fast, of)(0, 0, tokens)
        assert more == pytest.approx(sent / rate, rel=1e-5)
    again = slow.recompute_seconds(0, tokens, "inputs")
    again -= fast.recompute_seconds(0, tokens, "inputs")
    assert again == pytest.approx(sent / rate * 8 / 10, rel=1e-5)
    assert slow.recompute_seconds(0, tokens, "matmuls") == pytest.approx(
        fast.recompute_seconds(0, tokens, "matmuls")
    )


def test_compute_is_divided_but_for_smaller_products() -> None:
    # At the curve's end, where chunks are long, rates are the same.
    tokens = 65_536
    for of in ("forward_seconds", "backward_seconds"):
        whole, half = (getattr(c, of)(0, 0, tokens) for c in (COST, shared(2, 1e18)))
        assert half == pytest.approx(whole / 2)
    assert shared(2).head_seconds(tokens) == pytest.approx(COST.head_seconds(tokens) / 2)
    # Three ranks have 3, 3 and 2 of 8 heads.
    assert shared(3, 1e18).forward_seconds(0, 0, 48_000) > COST.forward_seconds(0, 0, 48_000) / 3


@pytest.mark.parametrize("across", [False, True])
def test_a_run_exchanges_over_the_link_that_its_ranks_have(across: bool) -> None:
    profile = replace(PROFILE, node_bytes_per_second=3e11, network_bytes_per_second=2e10)
    plan = make_plan(
        PlanRequest(
            config=SPPOConfig(num_chunks=2, sp_size=2, sp_across_nodes=across, order="by_chunk"),
            shape=replace(SHAPE, sp=2),
            device=DeviceFacts(kind="cuda", name="a GPU", profile=profile),
            total_tokens=TOKENS,
        )
    )
    assert plan.cost is not None
    assert plan.cost.all_to_all_bytes_per_second == (2e10 if across else 3e11)


@pytest.mark.parametrize("saved", ["whole", "inputs"])
def test_a_runs_plan_is_what_the_search_over_layouts_simulates(saved: Saved) -> None:
    question = replace(QUESTION, gpus=2, rows=1)
    layout = Layout("gpipe", 1, 1, 1, 8, "flops", saved, "none", sp=2)
    found = simulate_layout(question, layout)
    plan = make_plan(
        PlanRequest(
            config=SPPOConfig(
                chunk_lengths=[end - start for start, end in found.bounds],
                recompute=RECOMPUTE_BY_SAVED[saved],
                **{"offload": "none", "offload_kv": "none", "sp_size": 2},
                order="by_chunk",
            ),
            shape=replace(SHAPE, sp=2),
            device=DeviceFacts(kind="cuda", name="a GPU", profile=question.cost.profile),
            backend_name="",
            backend_reason="",
            batch_rows=1,
            total_tokens=question.total_tokens,
            training=True,
        )
    )
    assert plan.cost is not None
    assert plan.prediction is not None
    # Each exchanges at the rate that it knows of, and gradients are not reduced on one device.
    rate = question.group_bytes_per_second(2)
    cost = replace(plan.cost, all_to_all_bytes_per_second=rate)
    seconds = StepProgram(plan, plan.shape, "cuda", cost).simulate().end_seconds
    reduced = question.cost.shape.gradient_bytes / rate
    assert found.step_seconds == pytest.approx(seconds + reduced, rel=1e-3)
    assert found.peak_bytes[0] == pytest.approx(plan.estimate.device.total, rel=0.1)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_rank_holds_a_share_of_all_but_weights(stages: int) -> None:
    sizes = [
        peak_by_cause(run("seq1f1b", Size(stages, 1, 8), c)[1], "0.device")
        for c in (COST, shared(2))
    ]
    for cause in (Cause.WEIGHTS, Cause.GRADIENTS, Cause.OPTIMIZER):
        assert sizes[1][cause] == sizes[0][cause]
    assert sizes[1][Cause.KV] == sizes[0][Cause.KV] // 2
    # Of 4 heads what attention returns for all tokens, in every layer of the first stage.
    returned = 8 // stages * 4 * 128 * TOKENS * 2
    assert sizes[1][FRAMES] == sizes[0][FRAMES] // 2 + returned
    if stages > 1:
        assert (
            run("seq1f1b", Size(2, 1, 8), shared(2))[0].message_bytes(1, 3)
            == TOKENS // 16 * 1024 * 2
        )


def test_windows_see_as_many_tokens_shared_or_not() -> None:
    windowed = replace(SHAPE, layers=tuple(replace(layer, window=4096) for layer in SHAPE.layers))
    slow = changed(both_h2d_bytes_per_second=1e3)
    seconds: list[list[float]] = []
    for cost in (COST, shared(2)):
        cost = replace(cost, shape=replace(windowed, sp=cost.sp), profile=slow)
        costs, _ = run("seq1f1b", Size(1, 1, 16), cost, kv_tier="host")
        seconds.append([costs.seconds(Action("K", 0, chunk, None, 0)) for chunk in range(1, 16)])
    assert seconds[0] == pytest.approx([2 * half for half in seconds[1]])
    # No more than the window and a chunk.
    assert len(set(seconds[0])) == 1


def test_links_have_two_speeds() -> None:
    layout = Layout("seq1f1b", 4, 2, 1, 8, "flops", "whole", "none", sp=2)
    # Devices 0-7 and 8-15: four ranks of two each fill a node.
    assert layout.hops_between_nodes(8) == 0
    assert layout.hops_between_nodes(4) == 1
    wide = layout._replace(sp=8, replicas=1)
    assert wide.hops_between_nodes(8) == 3
    # The second pipeline begins in the middle of a node, so another of its hops leaves one.
    uneven = layout._replace(stages=3)
    assert uneven.hops_between_nodes(8) == 1
    rates = {"link_bytes_per_second": 1e9, "node_bytes_per_second": 1e11}
    near, _ = run("seq1f1b", Size(4, 1, 8), COST, rank_nodes=(0, 0, 1, 1), **rates)
    assert [near.rate(rank, rank + 1) for rank in range(3)] == [1e11, 1e9, 1e11]
    far, _ = run("seq1f1b", Size(4, 1, 8), COST, **rates)
    assert far.rate(0, 1) == 1e9


QUESTION = ClusterRequest(
    cost=COST,
    total_tokens=TOKENS,
    rows=1,
    gpus=8,
    budgets=Budgets(device=None, host=None, disk=0),
    gpus_per_node=4,
    link_bytes_per_second=25e9,
    node_bytes_per_second=250e9,
)


def test_groups_leave_a_node_only_where_nothing_else_fits() -> None:
    assert {x.sp for x in layouts(QUESTION)} == {1, 2, 4}
    assert {x.sp for x in layouts(QUESTION, across=True)} == {8}
    assert all(x.devices == 8 for x in layouts(QUESTION))
    # Of groups of two on nodes of three one has a device of each; a single node has all.
    uneven = replace(QUESTION, gpus=6, gpus_per_node=3, space=SearchSpace(sp=(1, 2, 8)))
    assert [uneven.crosses_nodes(sp) for sp in (1, 2, 3)] == [False, True, False]
    assert {x.sp for x in layouts(uneven)} == {1}
    assert {x.sp for x in layouts(uneven, across=True)} == {2}
    together = replace(uneven, gpus_per_node=8)
    assert not any(x for x in layouts(together, across=True))
    assert (uneven.group_bytes_per_second(2), together.group_bytes_per_second(2)) == (25e9, 250e9)
    roomy = solve_cluster(QUESTION, keep=1)
    assert roomy.best[0].layout.sp <= 4
    one = replace(QUESTION, space=SearchSpace(schedules=("seq1f1b",), sp=(8,)))
    assert solve_cluster(one, keep=1).best[0].layout.sp == 8
    # The same answer as before, and what was looked at in vain besides.
    none = solve_cluster(replace(QUESTION, budgets=Budgets(device=GIB, host=None, disk=0)), keep=1)
    assert not none.best
    assert none.num_candidates == sum(
        1 for across in (False, True) for _ in layouts(QUESTION, across=across)
    )


def test_heads_that_cannot_be_split_and_states_are_not_shared() -> None:
    assert replace(QUESTION, space=SearchSpace(sp=(1, 3, 4, 8, 16))).sequence_parallel == (1, 4, 8)
    states = replace(SHAPE, layers=tuple(replace(x, state_bytes=4096) for x in SHAPE.layers))
    recurrent = replace(QUESTION, cost=replace(COST, shape=states))
    assert recurrent.sequence_parallel == (1,)
    with pytest.raises(ConfigError, match="8 devices cannot share 1 rows"):
        solve_cluster(
            replace(recurrent, space=SearchSpace(sp=(8,), chunk_tokens=(1, 2), max_units=1))
        )


def msp(stages: int = 4, **changes: object) -> Layout:
    layout = Layout("msp", stages, 1, 1, 16, "flops", "whole", "none", sp=2)
    return layout._replace(**changes)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("frames", [("whole", "sppo"), ("inputs", "full"), ("matmuls", "none")])
@pytest.mark.parametrize("kv_tier", ["device", "host"])
def test_shared_units_fill_the_pipeline(frames: tuple[str, str], kv_tier: str) -> None:
    saved, offload = frames
    mine = simulate_layout(QUESTION, msp(saved=saved, offload=offload, kv_tier=kv_tier))
    plain = simulate_layout(
        QUESTION, msp(schedule="seq1f1b", saved=saved, offload=offload, kv_tier=kv_tier)
    )
    assert mine.step_seconds < plain.step_seconds
    assert mine.bubble_fraction < plain.bubble_fraction
    if kv_tier == "device" and offload == "none":
        # What helping takes is room for one more stage's weights and gradients, and slices of K/V.
        held = [StageWeights.of(SHAPE, layers) for layers in mine.layers]
        helping = max(weights.weights + weights.gradients for weights in held)
        assert max(mine.peak_bytes) < 1.1 * max(plain.peak_bytes) + helping


@pytest.mark.parametrize(
    ("kv_tier", "activation_tier"), [("device", "host"), ("host", "host"), ("host", "disk")]
)
@pytest.mark.parametrize("rows", [1, 2])
def test_what_shared_units_take_they_give_back(
    kv_tier: str, activation_tier: str, rows: int
) -> None:
    tiers = {"kv_tier": kv_tier, "activation_tier": activation_tier}
    costs, timeline = run("msp", Size(4, rows, 8), shared(2), offload="full", **tiers)
    if activation_tier == "disk":
        for rank in range(4):
            # In host memory frames are while they pass: one that leaves, and one that comes.
            frames = {
                tier: max(n for _, n in timeline.curves_by_cause(f"{rank}.{tier}")[FRAMES])
                for tier in ("host", "disk")
            }
            assert 0 < frames["host"] < 0.6 * frames["disk"]
    standing: dict[str, int] = {}
    for change in costs.standing():
        standing[change.tier] = standing.get(change.tier, 0) + change.num_bytes
    for tier in timeline.tiers:
        # Shares are rounded down to bytes.
        assert timeline.curve(tier)[-1][1] == pytest.approx(standing.get(tier, 0), abs=2000)
        assert all(held >= -2000 for _, held in timeline.curve(tier))


def test_ranks_hold_slices_of_stages_that_they_help() -> None:
    """The first ones most. Where K/V rest on the host nearly all of it is there, too."""
    schedule, bounds = generate("msp", Size(4, 1, 8)), even_bounds(TOKENS, 8)
    slices: dict[str, list[dict[str, int]]] = {}
    for tier in ("device", "host"):
        costs = PipelineCost(schedule, COST, bounds, kv_tier=tier)
        slices[tier] = [extra_shared_unit_bytes(costs, schedule, rank) for rank in range(4)]
        own = costs.own_kv_bytes(0)[tier]
        assert 0.2 * own < slices[tier][0][tier] < 0.6 * own
        assert slices[tier][3] == {}
    assert "host" not in slices["device"][0]
    # What comes for a first unit, and what is being sent, waits on the device for a while.
    assert 0 < slices["host"][0]["device"] < 0.2 * slices["device"][0]["device"]


def test_helpers_have_frozen_weights_or_are_sent_others() -> None:
    lora = LoraShape(rank=16, dtype_bytes=4)
    frozen = replace(COST, shape=shape_of(CONFIG, lora=lora))
    costs, _ = run("msp", Size(2, 1, 8), frozen)
    whole = sum(StageWeights.of(frozen.shape, layers).weights for layers in costs.stages)
    held = [
        c.num_bytes for c in costs.standing() if c.tier == "1.device" and c.cause is Cause.WEIGHTS
    ]
    assert sum(held) == whole
    slow, fast = (
        run("msp", Size(2, 1, 8), COST, link_bytes_per_second=rate)[1].end_seconds
        for rate in (1e8, 1e15)
    )
    first, _ = run("msp", Size(2, 1, 8), COST)
    sent = [StageWeights.of(SHAPE, layers) for layers in first.stages]
    # Each of the two shared units waits for its stage's weights twice, and for gradients once.
    assert slow > sum(2 * w.weights + w.gradients for w in sent) / 1e8 > fast
