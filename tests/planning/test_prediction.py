"""What measured steps teach: right speeds after one lesson, and no lesson where all is noise."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.planning.cost import Correction, ModelCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.prediction import MeasuredStep, Prediction, learn, predict, worth_correcting
from sppo_hf.planning.solve import simulate_plan
from sppo_hf.reporting.plan_tables import comparison_table
from tests.planning.modes import OFFLOAD, shown
from tests.planning.situations import (
    decided,
    falling_bounds,
    kv_bytes,
    saved_bytes,
    slow_cost,
    small_shape,
)
from tests.planning.synthetic import mixed_plan

WHAT = decided(falling_bounds(6), OFFLOAD, max_pending_d2h_bytes=2**20, max_prefetch_bytes=2**20)


def predicted(cost: ModelCost, what: Decisions = WHAT) -> Prediction:
    solution = simulate_plan(what, cost, policy="set")
    return predict(what, cost, solution.timeline, policy="set")


def as_measured(prediction: Prediction) -> MeasuredStep:
    """A step that went as predicted; where compute stood still is not told by chunk."""
    busy = sum(c.compute_seconds for c in prediction.chunks)
    stretch = prediction.step_seconds / busy
    return MeasuredStep(
        forward_seconds=tuple(stretch * c.forward_seconds for c in prediction.chunks),
        backward_seconds=tuple(stretch * c.backward_seconds for c in prediction.chunks),
        stall_seconds=prediction.stall_seconds,
        d2h_bytes=prediction.d2h_bytes,
        h2d_bytes=prediction.h2d_bytes,
    )


def test_a_step_that_goes_as_planned_teaches_nothing() -> None:
    said = predicted(slow_cost(small_shape()))
    assert said.stall_seconds > 0.05 * said.step_seconds, "copies are slow here"
    learned = learn(said, as_measured(said), Correction())
    for factor in (learned.forward, learned.backward, learned.d2h, learned.h2d):
        assert factor == pytest.approx(1.0, abs=0.01)
    assert not worth_correcting(Correction(), learned)


@given(forward=st.floats(0.3, 3.0), backward=st.floats(0.3, 3.0))
def test_wrong_compute_speeds_are_learned_from_one_step(forward: float, backward: float) -> None:
    cost = slow_cost(small_shape(), d2h_bytes_per_second=1e13, h2d_bytes_per_second=1e13)
    truth = replace(cost, correction=Correction(forward=forward, backward=backward))
    said, took = predicted(cost), as_measured(predicted(truth))
    learned = learn(said, took, Correction())
    assert learned.forward == pytest.approx(forward, rel=0.05)
    assert learned.backward == pytest.approx(backward, rel=0.05)


def test_slower_copies_are_blamed_for_longer_stalls() -> None:
    cost = slow_cost(small_shape())
    truth = replace(cost, correction=Correction(d2h=3.0, h2d=3.0))
    learned = learn(predicted(cost), as_measured(predicted(truth)), Correction())
    assert learned.d2h > 1.5
    assert learned.forward == pytest.approx(1.0, rel=0.05)
    assert worth_correcting(Correction(), learned)
    # And what is predicted with it is nearer to the truth than what was.
    after = predicted(replace(cost, correction=learned)).step_seconds
    right = predicted(truth).step_seconds
    assert abs(after - right) < 0.5 * abs(predicted(cost).step_seconds - right)


def test_lessons_build_on_each_other() -> None:
    cost = slow_cost(small_shape())
    before = Correction(forward=2.0, backward=2.0)
    said = predicted(replace(cost, correction=before))
    learned = learn(said, as_measured(said), before)
    assert learned.forward == pytest.approx(2.0, rel=0.01)


def test_all_slower_alike_is_not_worth_a_new_plan() -> None:
    alike = Correction(forward=2.0, backward=2.0, d2h=2.0, h2d=2.0)
    assert not worth_correcting(Correction(), alike)
    assert worth_correcting(Correction(), replace(alike, d2h=2.5))


def test_copied_bytes_count_every_frame_and_every_block() -> None:
    cost = slow_cost(small_shape())
    said = predicted(cost)
    frames = sum(saved_bytes(cost, i, length) for length in WHAT.chunk_lengths for i in range(4))
    assert said.d2h_bytes == said.h2d_bytes == frames
    streamed = predicted(cost, replace(WHAT, kv_tier="host", kv_block_tokens=1024))
    # Keys leave once, sums once for every later chunk; both come back for every chunk that reads.
    assert streamed.d2h_bytes > frames + 4 * kv_bytes(cost, 0, WHAT.total_tokens)
    assert streamed.h2d_bytes > streamed.d2h_bytes


@pytest.mark.parametrize("num_chunks", [4, 64])
def test_the_table_lays_both_side_by_side(num_chunks: int) -> None:
    cost = slow_cost(small_shape())
    what = decided(falling_bounds(num_chunks), OFFLOAD)
    said = predicted(cost, what)
    plan = replace(mixed_plan(num_chunks), prediction=said, cost=cost)
    slower = replace(said, step_seconds=2 * said.step_seconds)
    took = replace(as_measured(slower), disk_write_bytes=3 * 2**30)
    text = shown(comparison_table(plan, plan, took), 100)
    for words in ("forward", "backward", "standing still", "to host", "to disk", "3.00 GiB"):
        assert words in text
    assert "chunk 1, both ways" in text
    assert f"chunk {num_chunks}, both ways" in text
    assert text.count("both ways") <= 12
    assert "The same plan is chosen again" in text
