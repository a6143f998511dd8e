"""A model's pipeline: one rank agrees with the planner, ranks add up, rules move what they say."""

from dataclasses import replace
from typing import Any

import pytest

from sppo_hf.config import SPPOConfig
from sppo_hf.planning.activation_modes import Saved, mode_of
from sppo_hf.planning.choices import DeviceFacts
from sppo_hf.planning.chunk_bounds import Bounds, PrefixCost, balanced_bounds, even_bounds
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.hardware import load_profile
from sppo_hf.planning.lowering import COMPUTE, StepProgram, fixed_levels
from sppo_hf.planning.lowering import lower as lower_stage
from sppo_hf.planning.memory import CONTEXT_BYTES, GRAPH_NODE_BYTES, ByteTables, Cause
from sppo_hf.planning.pipeline_cost import OffloadRule, PipelineCost
from sppo_hf.planning.plan import PlanRequest, make_plan
from sppo_hf.planning.policies import sppo_modes, uniform_modes
from sppo_hf.planning.stages import stage_shape
from sppo_hf.planning.tile_sizes import kv_block_tokens, loss_tile_tokens
from sppo_hf.schedule import formulas
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.generate import Size, generate
from sppo_hf.schedule.lower import lower
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.simulate import bubble_fraction, simulate_pipeline
from sppo_hf.schedule.timeline import Timeline
from sppo_hf.schedule.validate import validate
from tests.planning.moments import peak_by_cause
from tests.planning.profiles import PROFILE
from tests.planning.shapes import llama_config, shape_of
from tests.planning.situations import decided, dkv_bytes, kv_bytes

SHAPE = shape_of(llama_config(), dtype_bytes=2)
COST = ModelCost(shape=SHAPE, profile=PROFILE, dtype_name="bfloat16")
TOKENS = 65_536


def bounds_of(num_chunks: int) -> Bounds:
    return balanced_bounds(PrefixCost.of(SHAPE), TOKENS, num_chunks)


def run(schedule: Schedule, costs: PipelineCost) -> Timeline:
    lowered = costs.lowered(schedule)
    return costs.simulate(lowered)


def made(
    name: str, size: Size, *, offload: OffloadRule = "none", **changes: object
) -> tuple[Schedule, PipelineCost]:
    schedule = generate(name, size)
    costs = PipelineCost(
        schedule,
        COST,
        bounds_of(size.num_chunks),
        offload=offload,
        **changes,  # pyright: ignore[reportArgumentType]
    )
    return schedule, costs


def test_a_stage_offloads_by_the_papers_rule_what_its_rank_will() -> None:
    _, costs = made("seq1f1b", Size(2, 1, 8), offload="sppo")
    layers = costs.stages[0]
    alone = replace(COST, shape=stage_shape(SHAPE, layers, last=False))
    modes = sppo_modes(alone, decided(bounds_of(8), layers=len(layers)))
    ranks = [sum(mode.offload for mode in row) for row in modes]
    planned = [round(ratio * len(layers)) for ratio in costs.ratios[0]]
    assert ranks == planned
    assert 0 < sum(planned) < 8 * len(layers)


@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.parametrize("saved", ["whole", "inputs"])
def test_one_rank_is_what_the_planner_simulates(saved: Saved, sp: int) -> None:
    """Also where ranks share every chunk: `sppo plan --gpus` and the runtime's plan agree."""
    schedule, costs = made("gpipe", Size(1, 1, 8), saved=saved)
    cost = COST.with_sequence_parallel(sp, 1e11)
    timeline = run(schedule, replace(costs, cost=cost))
    decisions = Decisions(
        batch_rows=1,
        bounds=bounds_of(8),
        layer_modes=uniform_modes(8, SHAPE.num_layers, mode_of(saved, "device")),
        training=True,
        tile_tokens=loss_tile_tokens(SHAPE, device_kind="cuda"),
    )
    planned = lower_stage(decisions, cost).simulate(with_bytes=True)
    assert timeline.end_seconds == pytest.approx(planned.end_seconds)
    assert timeline.busy_seconds("0.compute") == pytest.approx(planned.busy_seconds(COMPUTE))
    ours, theirs = timeline.curves_by_cause("0.device"), planned.curves_by_cause("device")
    for cause in ("kv", "dkv", "frames" if saved == "whole" else "skeletons"):
        assert max(size for _, size in ours[cause]) == max(size for _, size in theirs[cause])
        assert ours[cause][-1][1] == 0
    # All its layers' frames are taken at once here, layer by layer there; so no less is held.
    most, other = timeline.peak("0.device").num_bytes, planned.peak("device").num_bytes
    assert 0.98 * other <= most <= 1.1 * other


def test_named_tiles_of_the_loss_take_their_bytes_and_seconds() -> None:
    """Logits of more tokens at once, and fewer sums of the head's gradient."""
    _, auto = made("seq1f1b", Size(2, 1, 2))
    named, last = replace(auto, cost=replace(COST, tile_tokens=8192)), Action("F", 1, 1)
    more, fewer = (
        sum(size for _, why, size, _ in one.changes(last) if why == Cause.LOGITS_TILE and size > 0)
        for one in (named, auto)
    )
    assert more > 2 * fewer
    assert named.seconds(last) < auto.seconds(last)


def test_a_split_backward_takes_as_long_as_a_whole_one() -> None:
    _, costs = made("seq1f1b", Size(2, 1, 4))
    for stage in range(2):
        for chunk in range(4):
            whole = costs.seconds(Action("B", stage, chunk))
            first, late = (costs.seconds(Action(kind, stage, chunk)) for kind in ("I", "W"))
            assert first + late == pytest.approx(whole)
            # Attention has no weights, so late chunks of equal cost have less of it.
            assert 0.0 < late < 0.5 * whole
    assert costs.seconds(Action("W", 0, 3)) < costs.seconds(Action("W", 0, 0))
    # Chunks of another micro-batch cost the same.
    assert costs.seconds(Action("F", 1, 6)) == costs.seconds(Action("F", 1, 2))


def test_ranks_share_the_work_and_the_weights() -> None:
    schedule, costs = made("seq1f1b", Size(4, 2, 4))
    timeline = run(schedule, costs)
    alone = run(*made("gpipe", Size(1, 2, 4)))
    busy = [timeline.busy_seconds(f"{rank}.compute") for rank in range(4)]
    assert sum(busy) == pytest.approx(alone.busy_seconds("0.compute"))
    assert max(busy) < 1.1 * min(busy)
    weights = [timeline.curves_by_cause(f"{rank}.device")["weights"][0][1] for rank in range(4)]
    assert sum(weights) == pytest.approx(SHAPE.weight_bytes, abs=9)
    for rank in range(4):
        held = timeline.curves_by_cause(f"{rank}.device")
        assert held["frames"][-1][1] == held["kv"][-1][1] == held["dkv"][-1][1] == 0
        assert held["reserve"] == [(0.0, CONTEXT_BYTES["cuda"])]
        assert min(size for curve in held.values() for _, size in curve) >= 0


def test_virtual_stages_of_a_rank_add_up() -> None:
    schedule, costs = made("interleaved_seq1f1b", Size(2, 2, 2, 2))
    timeline = run(schedule, costs)
    assert len(costs.stages) == 4
    assert sorted(timeline.tiers) == ["0.device", "1.device"]
    weights = [timeline.curves_by_cause(f"{rank}.device")["weights"][-1][1] for rank in range(2)]
    assert sum(weights) == pytest.approx(SHAPE.weight_bytes, abs=9)


def test_links_cost_what_passes_over_them() -> None:
    _, costs = made("seq1f1b", Size(2, 1, 4), link_bytes_per_second=1e9)
    start, end = bounds_of(4)[1]
    num_bytes = (end - start) * 4096 * 2
    assert costs.seconds(Action("SEND_F", 0, 1)) == pytest.approx(num_bytes / 1e9)
    assert costs.seconds(Action("SEND_B", 1, 1)) == pytest.approx(num_bytes / 1e9)
    assert costs.seconds(Action("RECV_F", 1, 1)) == 0.0
    slow, fast = (
        run(*made("seq1f1b", Size(4, 2, 4), link_bytes_per_second=rate)).end_seconds
        for rate in (1e8, 1e12)
    )
    assert slow > fast


@pytest.mark.parametrize("offload", ["full", "sppo"])
def test_what_leaves_comes_back_and_lowers_the_peak(offload: OffloadRule) -> None:
    size = Size(2, 2, 8)
    kept = run(*made("seq1f1b", size))
    schedule, costs = made("seq1f1b", size, offload=offload)
    timeline = run(schedule, costs)
    for rank in range(2):
        assert (
            timeline.peak(f"{rank}.device").num_bytes < 0.7 * kept.peak(f"{rank}.device").num_bytes
        )
        assert timeline.curve(f"{rank}.host")[-1][1] == 0
        held = timeline.curves_by_cause(f"{rank}.device")["frames"]
        assert held[-1][1] == 0
        assert min(num_bytes for _, num_bytes in held) >= 0


def test_frames_go_on_behind_the_host() -> None:
    size = Size(2, 1, 8)
    _, near = made("seq1f1b", size, offload="full")
    schedule, far = made("seq1f1b", size, offload="full", activation_tier="disk", kv_tier="disk")
    lowered = lower(schedule, offloaded=far.leaves, stored=far.stores, kv_copies=far.kv_copies)
    validate(lowered)
    timeline = simulate_pipeline(lowered, seconds=far.seconds, changes=far.changes)
    there = peak_by_cause(run(schedule, near), "0.host")[Cause.ACTIVATIONS]
    on_disk = peak_by_cause(timeline, "0.disk")
    assert on_disk[Cause.ACTIVATIONS] == there
    assert on_disk[Cause.KV] > 0
    # In host memory frames are while they pass.
    assert timeline.peak("0.host").num_bytes < there
    assert timeline.curve("0.host")[-1][1] == timeline.curve("0.disk")[-1][1] == 0
    layers, sums = far.stages[0], 0
    for start, _ in bounds_of(8):
        sums += sum(dkv_bytes(COST, i, start) for i in layers)
    keys = sum(kv_bytes(COST, i, TOKENS) for i in layers)
    written = COST.store_seconds("disk", there + keys + sums)
    assert timeline.busy_seconds("0.store") == pytest.approx(written)
    kinds = [action.kind for action in lowered.ranks[0]]
    assert {kind: kinds.count(kind) for kind in "KOSL"} == {"K": 15, "O": 15, "S": 22, "L": 22}


def test_the_papers_rule_moves_the_same_bytes_of_every_chunk() -> None:
    _, costs = made("seq1f1b", Size(2, 1, 8), offload="sppo")
    for stage in range(2):
        sizes = [costs.ratios[stage][c] * costs.activation_bytes(stage, c) for c in range(8)]
        partly = [size for size, ratio in zip(sizes, costs.ratios[stage], strict=True) if ratio < 1]
        assert sizes[-1] == 0
        assert partly[:-1] == pytest.approx([partly[0]] * (len(partly) - 1))
        assert not costs.leaves(stage, 7)
        assert costs.leaves(stage, 8)


def test_messages_take_a_buffer_at_both_ends_for_as_long_as_they_pass() -> None:
    rate = 1e9
    schedule, costs = made("seq1f1b", Size(3, 2, 4), link_bytes_per_second=rate)
    timeline = run(schedule, costs)
    longest = max(costs.message_bytes(1, chunk) for chunk in range(4))
    for rank in range(3):
        curve = timeline.curves_by_cause(f"{rank}.device")["messages"]
        assert curve[-1][1] == 0
        assert min(size for _, size in curve) == 0
        # Ranks between two others have messages both ways.
        most = max(size for _, size in curve)
        assert longest <= most <= (4 if rank == 1 else 3) * longest
    alone = run(*made("gpipe", Size(1, 2, 4)))
    assert "messages" not in alone.curves_by_cause("0.device")


def test_messages_are_as_wide_as_what_the_stage_behind_needs() -> None:
    """Gemma 3n and Gemma 4 give on more than a hidden state, and less with every layer."""
    rate = 1e9
    schedule, plain = made("seq1f1b", Size(3, 1, 2), link_bytes_per_second=rate)
    narrow = SHAPE.hidden_size
    widths = tuple((4 + SHAPE.num_layers - layer) * narrow for layer in range(SHAPE.num_layers))
    wide = replace(plain, cost=replace(COST, shape=replace(SHAPE, message_elements=widths)))
    for stage in (1, 2):
        times = widths[plain.stages[stage][0]] / narrow
        assert times > 4
        for chunk in range(2):
            assert wide.message_bytes(stage, chunk) == times * plain.message_bytes(stage, chunk)
            for sent in (Action("SEND_F", stage - 1, chunk), Action("SEND_B", stage, chunk)):
                assert wide.seconds(sent) == pytest.approx(times * plain.seconds(sent))
    curve = run(schedule, wide).curves_by_cause("1.device")["messages"]
    assert curve[-1][1] == min(size for _, size in curve) == 0
    # What the middle rank is given is wider than what it gives on.
    assert max(size for _, size in curve) >= wide.message_bytes(1, 0) > wide.message_bytes(2, 0)


@pytest.mark.parametrize("name", ["gpipe", "zb_seq1f1b", "msp"])
def test_graphs_take_memory_of_a_cpu_until_backward_is_over(name: str) -> None:
    layers = tuple(
        replace(layer, graph_nodes=400, graph_nodes_per_1024=256) for layer in SHAPE.layers
    )
    chunks, profile = 4, replace(PROFILE, kind="cpu")
    schedule, plain = made(name, Size(2, 1, chunks))
    assert "graph" not in run(schedule, plain).curves_by_cause("0.device"), "of a GPU"
    costs = replace(plain, cost=replace(COST, shape=replace(SHAPE, layers=layers), profile=profile))
    nodes = [400 + 256 * (end - start) // 1024 for start, end in costs.bounds]
    for rank in range(2):
        # Both ranks share the first stage's first unit and the last stage's last.
        assert list(schedule.shared_units) == ([(0, 0), (1, chunks - 1)] if name == "msp" else [])
        units = {(rank, chunk) for chunk in range(chunks)} | {*schedule.shared_units}
        all_nodes = sum(len(costs.stages[stage]) * nodes[chunk] for stage, chunk in units)
        curve = run(schedule, costs).curves_by_cause(f"{rank}.device")["graph"]
        most = max(size for _, size in curve)
        assert curve[-1][1] == 0
        # With one row all forwards come first.
        assert most == GRAPH_NODE_BYTES * all_nodes
        if name == "msp":
            continue
        # As the stage counts by itself.
        shape = stage_shape(costs.cost.shape, costs.stages[rank], last=rank == 1)
        what = decided(costs.bounds, layers=len(costs.stages[rank]))
        alone = StepProgram(what, shape, "cpu").levels["device"][Cause.GRAPH]
        assert most == alone.during.max()
    if name == "zb_seq1f1b":
        ended = {
            kind: [x.num_bytes for x in costs.changes(Action(kind, 0, 1)) if x.cause is Cause.GRAPH]
            for kind in ("F", "I", "W")
        }
        assert ended["F"] == [-x for x in ended["W"]]
        assert not ended["I"], "what is late needs it still"
    if name == "msp":
        (shared_unit, ranks), *_ = schedule.shared_units.items()
        for part, rank in enumerate(ranks):
            action = Action("F", *shared_unit, None, part)
            (change,) = (x for x in costs.changes(action) if x.cause is Cause.GRAPH)
            stage, chunk = shared_unit
            held = GRAPH_NODE_BYTES * len(costs.stages[stage]) * nodes[chunk]
            assert (change.tier, change.num_bytes) == (f"{rank}.device", held)


def test_what_is_held_until_backward_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cause more in the table counts on one device and in a pipeline, under its own name."""
    held = property(lambda tables: {Cause.COPIES: 3 * tables.rows * tables.lengths[None, :]})
    monkeypatch.setattr(ByteTables, "until_backward", held)
    shape = replace(SHAPE)  # tables are kept by the shape itself
    schedule, plain = made("gpipe", Size(2, 1, 4))
    costs = replace(plain, cost=replace(COST, shape=shape))
    for rank in range(2):
        layers = len(costs.stages[rank])
        curve = run(schedule, costs).curves_by_cause(f"{rank}.device")["copies"]
        assert max(size for _, size in curve) == 3 * layers * TOKENS
        assert curve[-1][1] == 0
        stage = stage_shape(shape, costs.stages[rank], last=rank == 1)
        levels = StepProgram(decided(costs.bounds, layers=layers), stage, "cuda")
        level = fixed_levels(levels.tables)["device"][Cause.COPIES]
        assert level.during.max() == 3 * layers * TOKENS
        assert level.after[-1] == 0


@pytest.mark.parametrize("name", ["seq1f1b", "zb_seq1f1b"])
@pytest.mark.parametrize("rows", [1, 2])
def test_keys_and_values_that_wait_on_the_host(name: str, rows: int) -> None:
    size = Size(2, rows, 8)
    here = run(*made(name, size, saved="inputs"))
    schedule, costs = made(name, size, saved="inputs", kv_tier="host")
    timeline = run(schedule, costs)
    for rank, layers in enumerate(costs.stages):
        kv = sum(kv_bytes(COST, i, TOKENS) for i in layers)
        held = timeline.curves_by_cause(f"{rank}.host")
        most = {cause: max(n for _, n in held[cause]) for cause in ("kv", "dkv")}
        assert kv <= most["kv"] <= rows * kv
        # All but the last chunk's sums wait; there they are twice as wide.
        assert 1.5 * kv < most["dkv"] < 2 * kv
        assert held["kv"][-1][1] == held["dkv"][-1][1] == 0
        device = timeline.curves_by_cause(f"{rank}.device")
        assert device["kv"][-1][1] == device["dkv"][-1][1] == 0
        assert max(n for _, n in device["kv"]) < 0.5 * kv
        assert timeline.peak(f"{rank}.device").num_bytes < here.peak(f"{rank}.device").num_bytes
    assert timeline.end_seconds >= here.end_seconds


def test_what_a_unit_streams_runs_beside_it_and_holds_up_what_follows() -> None:
    slow = replace(PROFILE, both_h2d_bytes_per_second=1e8, both_d2h_bytes_per_second=1e12)
    cost = ModelCost(shape=SHAPE, profile=slow, dtype_name="bfloat16")
    schedule = generate("seq1f1b", Size(2, 1, 4))
    away, here = (
        PipelineCost(schedule, cost, bounds_of(4), kv_tier=tier) for tier in ("host", "device")
    )
    layers = away.stages[0]
    start, end = bounds_of(4)[2]
    prefix = sum(kv_bytes(cost, i, start) for i in layers)
    forward, into = Action("F", 0, 2), Action("K", 0, 2, None, 0)
    assert away.seconds(into) == pytest.approx(prefix / 1e8)
    whole = sum(kv_bytes(cost, i, end) + dkv_bytes(cost, i, end) for i in layers)
    assert away.seconds(Action("K", 0, 2, None, 1)) == pytest.approx(whole / 1e8)
    assert away.seconds(forward) == here.seconds(forward) < away.seconds(into)
    # Nothing comes in for the first chunk's forward.
    assert ("K", 0, 0, 0) not in away.kv_copies
    lowered = lower(schedule, kv_copies=away.kv_copies)
    timeline = simulate_pipeline(lowered, seconds=away.seconds)
    beside = timeline.span(into)
    assert beside.start_seconds == timeline.span(forward).start_seconds
    for later in (Action("F", 0, 3), Action("SEND_F", 0, 2)):
        assert timeline.span(later).start_seconds == beside.end_seconds


@pytest.mark.parametrize("rows", [1, 2])
def test_copies_of_frames_share_resources_with_keys_and_values(rows: int) -> None:
    size = Size(2, rows, 4)
    schedule, away = made("seq1f1b", size, offload="full", kv_tier="host")
    lowered = lower(schedule, offloaded=away.leaves, kv_copies=away.kv_copies)
    timeline = simulate_pipeline(lowered, seconds=away.seconds)
    for resource, copy, stream in (("0.d2h", "D", "O"), ("0.h2d", "H", "K")):
        listed = [a for a in lowered.ranks[0] if a.kind in (copy, stream)]
        assert {a.kind for a in listed} == {copy, stream}
        spans = timeline.spans(resource)
        assert sorted(span.action for span in spans) == sorted(listed)
        assert timeline.busy_seconds(resource) == pytest.approx(sum(map(away.seconds, listed)))
    # Of its own, a copy takes as long as where keys and values stay.
    _, here = made("seq1f1b", size, offload="full")
    assert away.seconds(Action("H", 0, 2)) == here.seconds(Action("H", 0, 2))


@pytest.mark.parametrize("saved", ["whole", "matmuls", "inputs"])
def test_one_rank_that_offloads_both_takes_as_long_as_the_planner_says(saved: Saved) -> None:
    """Layers' copies there, whole units' here: they differ by a unit at both ends of a pass."""
    chunks = 32
    schedule, costs = made(
        "seq1f1b", Size(1, 1, chunks), saved=saved, offload="full", kv_tier="host"
    )
    modes = uniform_modes(chunks, SHAPE.num_layers, mode_of(saved, "host"))
    block = kv_block_tokens(SHAPE, TOKENS, batch_rows=1, device_kind="cuda", device_bytes=None)
    decisions = replace(
        decided(bounds_of(chunks), layers=SHAPE.num_layers),
        layer_modes=modes,
        tile_tokens=COST.loss_tile_tokens,
        kv_tier="host",
        kv_block_tokens=block,
    )
    planned = lower_stage(decisions, COST).simulate()
    timeline = run(schedule, costs)
    assert timeline.end_seconds == pytest.approx(planned.end_seconds, rel=0.02)
    if saved == "whole":
        assert planned.end_seconds > 1.03 * planned.busy_seconds(COMPUTE), "copies count"


@pytest.mark.parametrize(("ratio", "idle"), [(0.25, 0.21), (0.5, 0.27), (1.0, 0.33), (2.0, 0.39)])
def test_bubbles_of_equal_lengths_are_those_of_the_notes(ratio: float, idle: float) -> None:
    # P=8, N=4, M=16, by attention's FLOPs over the linear ones; with equal cost .099, and .304 for
    # plain 1F1B, which equal lengths exceed from a ratio of about 0.7 on.
    size = Size(8, 16, 4)
    tokens = 65_536
    curve = PrefixCost((0.0,), (0.0,), (1.0,), (2 * ratio / tokens,))

    def idle_of(bounds: Bounds) -> float:
        def seconds(action: Action) -> float:
            start, end = bounds[action.unit % 4]
            forward = curve.upto(end) - curve.upto(start)
            return forward * (1 if action.kind == "F" else 2)

        return bubble_fraction(simulate_pipeline(generate("seq1f1b", size), seconds=seconds))

    assert idle_of(even_bounds(tokens, 4)) == pytest.approx(idle, abs=0.005)
    balanced = balanced_bounds(curve, tokens, 4, round_to_tokens=1)
    assert idle_of(balanced) == pytest.approx(7 / 71, abs=5e-4)
    plain = float(formulas.bubble_fraction("1f1b", Size(8, 16)))
    assert (idle_of(even_bounds(tokens, 4)) > plain) == (ratio > 0.7)


@pytest.mark.parametrize("kv_tier", ["device", "host"])
def test_the_papers_rule_is_what_each_stage_runs(kv_tier: Any) -> None:
    """As many layers of every chunk leave in the simulation as in the plans of the stages."""
    profile, bounds = load_profile("a100"), bounds_of(8)
    cost = ModelCost(shape=SHAPE, profile=profile, dtype_name="bfloat16")
    schedule = generate("seq1f1b", Size(2, 2, len(bounds)))
    costs = PipelineCost(schedule, cost, bounds, offload="sppo", kv_tier=kv_tier)
    kv = "none" if kv_tier == "device" else "full"
    config = SPPOConfig(pp_size=2, offload="sppo", recompute="none", offload_kv=kv)
    for stage, layers in enumerate(costs.stages):
        plan = make_plan(
            PlanRequest(
                config=config,
                shape=stage_shape(SHAPE, layers, last=stage == 1),
                device=DeviceFacts(kind="cuda", name="A100", profile=profile),
                total_tokens=bounds[-1][1],
                bounds=bounds,
                alive=1.0,
            )
        )
        leaving = [sum(mode.offload for mode in row) for row in plan.layer_modes]
        assert [round(ratio * len(layers)) for ratio in costs.ratios[stage]] == leaving
        assert 0 < sum(leaving) < (len(bounds) - 1) * len(layers)
