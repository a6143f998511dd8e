"""Bytes of lowered stages over time: they come, they go, and the estimate bounds them."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings

from sppo_hf.planning.cost import StageCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.memory import estimate
from sppo_hf.planning.modes import KEEP, OFFLOAD, mode_of
from sppo_hf.planning.stage import lower
from sppo_hf.planning.stage_bytes import StageBytes
from sppo_hf.schedule.timeline import Timeline
from tests.planning.situations import decided, falling_bounds, runs, slow_cost, small_shape

DISK = mode_of("whole", "disk")


def played(what: Decisions, cost: StageCost) -> tuple[Timeline, StageBytes]:
    held = StageBytes(what, cost, "cuda")
    return lower(what, cost).simulate(held), held


@given(run=runs())
@settings(max_examples=60)
def test_all_bytes_return(run: tuple[StageCost, Decisions]) -> None:
    cost, what = run
    timeline, held = played(what, cost)
    standing = Counter[str]()
    for change in held.standing():
        standing[change.tier] += change.num_bytes
    for tier in timeline.tiers:
        curve = timeline.curve(tier)
        assert curve[-1][1] == standing[tier]
        assert all(num_bytes >= standing[tier] for _, num_bytes in curve)


@given(run=runs())
@settings(max_examples=60)
def test_staging_is_bounded(run: tuple[StageCost, Decisions]) -> None:
    """Bytes that pass through the host to the disk and back stay within the staging region."""
    cost, what = run
    to_disk = tuple(
        tuple(mode_of(mode.saved, "disk") if mode.offload else mode for mode in row)
        for row in what.layer_modes
    )
    what = replace(what, layer_modes=to_disk, kv_tier="device", kv_block_tokens=0)
    timeline, _ = played(what, cost)
    # Every staging region of these runs holds the largest frame.
    assert max(num_bytes for _, num_bytes in timeline.curve("host")) <= what.staging_bytes


@given(run=runs())
@settings(max_examples=80)
def test_the_estimate_bounds_the_curves(run: tuple[StageCost, Decisions]) -> None:
    cost, what = run
    timeline, _ = played(what, cost)
    predicted = estimate(cost.shape, what)
    for tier in ("host", "disk"):
        if tier in timeline.tiers:
            assert timeline.peak(tier).num_bytes <= getattr(predicted, tier).total
    assert timeline.peak("device").num_bytes <= predicted.device.total


@pytest.mark.parametrize("mode", [KEEP, OFFLOAD, DISK, mode_of("skeleton", "device")])
def test_the_estimate_is_close(mode: object) -> None:
    """Without what it leaves out: blocks that stream, gradients of the last layer's output."""
    cost = slow_cost(small_shape(24))
    what = decided(falling_bounds(8, tokens=2048), mode, layers=24)  # type: ignore[arg-type]
    timeline, _ = played(what, cost)
    predicted = estimate(cost.shape, what).device
    assert timeline.peak("device").num_bytes > 0.85 * (predicted.total - predicted.hidden)


def test_kept_frames_by_hand() -> None:
    cost = slow_cost(small_shape(2))
    what = decided(((0, 512), (512, 1024)), layers=2)
    timeline, _ = played(what, cost)
    causes = timeline.curves_by_cause("device")
    frames = 2 * cost.frame_bytes(0, 1024, "whole")
    assert max(held for _, held in causes["frames"]) == frames
    assert max(held for _, held in causes["kv"]) == 2 * cost.kv_bytes(0, 1024)
    assert max(held for _, held in causes["dkv"]) == 2 * cost.dkv_bytes(0, 512)
