"""Lowered stages: dependencies by hand, the tape's rule, and laws that hold for any decisions."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo_hf.planning.cost import StageCost
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.modes import KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_OFFLOAD, mode_of
from sppo_hf.planning.stage import COMPUTE, D2H, H2D, READ, WRITE, StageLanes, lower
from sppo_hf.schedule.actions import Action
from tests.planning.situations import (
    MIB,
    bounds_of,
    decided,
    falling_bounds,
    runs,
    slow_cost,
    small_shape,
)

DISK = mode_of("whole", "disk")
TWO_BY_TWO = ((0, 512), (512, 1024))


def text(actions: Iterable[Action]) -> list[str]:
    return [str(action) for action in actions]


def after(lanes: StageLanes, action: str) -> set[str]:
    return set(text(lanes.after[Action.parse(action)]))


def frame(cost: StageCost, tokens: int = 512) -> int:
    return cost.frame_bytes(0, tokens, "whole")


def test_order_of_units() -> None:
    lanes = lower(decided(TWO_BY_TWO, layers=2), slow_cost(small_shape(2)))
    assert text(lanes.lanes[COMPUTE]) == [
        *("0F0.0", "0F0.1", "0F0.2", "0F1.0", "0F1.1", "0F1.2"),
        *("0B1.1", "0B1.0", "0B0.1", "0B0.0"),
    ]
    assert not any(lanes.lanes[lane] for lane in (D2H, H2D, WRITE, READ))
    assert not any(lanes.after.values())


def test_evaluation_only_runs_forward() -> None:
    what = replace(decided(TWO_BY_TWO, OFFLOAD, layers=2), training=False)
    lanes = lower(what, slow_cost(small_shape(2)))
    assert [action.kind for action in lanes.lanes[COMPUTE]] == ["F"] * 6
    assert not lanes.lanes[D2H]


def test_offload_by_hand() -> None:
    cost = slow_cost(small_shape(2))
    one = frame(cost)
    what = decided(TWO_BY_TWO, OFFLOAD, layers=2, leave_bytes=one, fetch_bytes=one)
    lanes = lower(what, cost)
    assert text(lanes.lanes[D2H]) == ["0D0.0", "0D0.1", "0D1.0", "0D1.1"]
    assert text(lanes.lanes[H2D]) == ["0H1.1", "0H1.0", "0H0.1", "0H0.0"]
    assert after(lanes, "0D0.1") == {"0F0.1"}
    # One frame may wait: when the second has closed, the first must be gone.
    assert after(lanes, "0F0.1") == set()
    assert after(lanes, "0F0.2") == {"0D0.0"}
    assert after(lanes, "0F1.0") == set()
    assert after(lanes, "0F1.1") == {"0D0.1"}
    assert after(lanes, "0F1.2") == {"0D1.0"}
    # One frame may be ahead: entering a frame asks for the one before it on the tape.
    assert after(lanes, "0H1.1") == {"0F1.2", "0D1.1"}
    assert after(lanes, "0H1.0") == {"0F1.2", "0D1.0"}
    assert after(lanes, "0H0.1") == {"0B1.1", "0D0.1"}
    assert after(lanes, "0H0.0") == {"0B1.0", "0D0.0"}
    assert after(lanes, "0B0.1") == {"0H0.1"}


def test_kept_frames_ask_for_nothing() -> None:
    cost = slow_cost(small_shape(2))
    modes = ((OFFLOAD, OFFLOAD), (KEEP, KEEP))
    lanes = lower(decided(TWO_BY_TWO, modes, layers=2, fetch_bytes=9 * MIB), cost)
    # Nothing enters the tape before the first frame that is on it.
    assert after(lanes, "0H0.1") == {"0B1.0", "0D0.1"}
    assert after(lanes, "0H0.0") == {"0B1.0", "0D0.0"}


def test_recomputed_frames_ask_for_those_before_them() -> None:
    cost = slow_cost(small_shape(2))
    modes = ((OFFLOAD, OFFLOAD), (KEEP, RECOMPUTE))
    lanes = lower(decided(TWO_BY_TWO, modes, layers=2), cost)
    assert after(lanes, "0H0.1") == {"0F1.2", "0D0.1"}
    assert after(lanes, "0H0.0") == {"0B1.0", "0D0.0"}


def test_disk_by_hand() -> None:
    cost = slow_cost(small_shape(2))
    one = frame(cost)
    what = decided(TWO_BY_TWO, DISK, layers=2, leave_bytes=9 * one, staging_bytes=2 * one)
    lanes = lower(what, cost)
    assert text(lanes.lanes[WRITE]) == ["0S0.0", "0S0.1", "0S1.0", "0S1.1"]
    assert text(lanes.lanes[READ]) == ["0L1.1", "0L1.0", "0L0.1", "0L0.0"]
    assert after(lanes, "0S0.1") == {"0D0.1"}
    # Two frames fit into staging.
    assert after(lanes, "0D0.1") == {"0F0.1"}
    assert after(lanes, "0D1.0") == {"0F1.0", "0S0.0"}
    # Nothing is read before forward is over, and staging is empty enough by then.
    assert after(lanes, "0L1.1") == {"0F1.2", "0S1.1", "0S1.0"} | {"0F1.2"}
    assert after(lanes, "0L0.1") == {"0F1.2", "0S0.1", "0H1.1"}
    assert after(lanes, "0H1.1") == {"0F1.2", "0S1.1", "0L1.1"}


def test_streamed_keys_by_hand() -> None:
    cost = slow_cost(small_shape(2))
    what = decided(TWO_BY_TWO, layers=2, kv_tier="host", kv_block_tokens=1024)
    lanes = lower(what, cost)
    assert text(lanes.lanes[D2H]) == [
        *("0O0.0#0", "0O0.1#0", "0O1.0#0", "0O1.1#0"),
        *("0O1.1#1", "0O1.0#1"),  # chunk 0's own sums never leave
    ]
    assert text(lanes.lanes[H2D]) == [
        *("0K1.0#0", "0K1.1#0"),
        *("0K1.1#1", "0K1.0#1", "0K0.1#1", "0K0.0#1"),
    ]
    assert after(lanes, "0K1.0#0") == {"0F0.1", "0O0.0#0"}
    assert "0K1.0#0" in after(lanes, "0F1.1")
    assert after(lanes, "0K0.1#1") == {"0B1.1", "0O1.1#1"}
    seconds = lanes.seconds
    forward, last, first = (Action.parse(a) for a in ("0K1.0#0", "0K1.0#1", "0K0.0#1"))
    # K/V of 512 tokens; K/V of all, no sums yet; K/V and float32 sums of 512.
    assert seconds[last] == pytest.approx(2 * seconds[forward])
    assert seconds[first] == pytest.approx(3 * seconds[forward])
    # Sums that leave after the last chunk are those of the tokens before it.
    out = seconds[Action.parse("0O1.0#1")]
    assert out == pytest.approx(cost.d2h_seconds(cost.dkv_bytes(0, 512), both=True))


def test_windows_stream_what_is_seen() -> None:
    cost = slow_cost(small_shape(2, window=100))
    bounds = ((0, 256), (256, 512), (512, 768))
    lanes = lower(decided(bounds, layers=2, kv_tier="host", kv_block_tokens=768), cost)
    local, full = (lanes.seconds[Action("K", 0, 2, layer, 0)] for layer in (0, 1))
    assert full == pytest.approx(2 * local)


@dataclass(eq=False)
class _Handle:
    frame: int
    num_bytes: int


@dataclass(eq=False)
class _Frame:
    held: list[_Handle]

    def handles(self) -> list[_Handle]:
        return self.held


class _Mover:
    """Counts as the engine does, without tensors."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def close_frame(self, leave_bytes: int | None = None) -> None:
        pass

    def bytes_to_fetch(self, handles: Iterable[_Handle]) -> int:
        return sum(h.num_bytes for h in handles if h.frame not in self.asked)

    def prefetch(self, handle: _Handle) -> None:
        if handle.frame not in self.asked:
            self.asked.append(handle.frame)


@pytest.mark.fake
@given(run=runs())
@settings(max_examples=60)
def test_the_look_ahead_is_the_tapes(run: tuple[StageCost, Decisions]) -> None:
    from sppo_hf.offload.tape import Tape

    cost, what = run
    what = replace(what, kv_tier="device", kv_block_tokens=0)
    lanes = lower(what, cost)
    mover = _Mover()
    tape = Tape(mover, fetch_bytes=what.fetch_bytes or 0)  # type: ignore[arg-type]
    frames: dict[tuple[int, int], _Frame] = {}
    order = [(c, layer) for c in range(what.num_chunks) for layer in range(what.num_layers)]
    for at, (chunk, layer) in enumerate(order):
        mode, (start, end) = what.mode(layer, chunk), what.bounds[chunk]
        if mode == KEEP:
            continue
        size = cost.frame_bytes(layer, end - start, mode.saved)
        frames[chunk, layer] = _Frame([_Handle(at, size)] if mode.offload else [])
        tape.record(frames[chunk, layer])  # type: ignore[arg-type]
    asked_in: dict[int, Action | None] = {}
    previous = lanes.lanes[COMPUTE][len(lanes.lanes[COMPUTE]) - len(order) - 1]
    for chunk, layer in reversed(order):
        before = len(mover.asked)
        if (chunk, layer) in frames:
            tape.on_backward(frames[chunk, layer])  # type: ignore[arg-type]
        for frame_at in mover.asked[before:]:
            asked_in[frame_at] = previous
        previous = Action("B", 0, chunk, layer)
    expected = [Action("H", 0, *order[at]) for at in asked_in]
    assert lanes.lanes[H2D] == expected
    for at, gate in asked_in.items():
        assert gate in lanes.after[Action("H", 0, *order[at])]
    assert weakref.ref(tape)() is tape


@given(run=runs())
@settings(max_examples=80)
def test_any_decisions_run_to_their_end(run: tuple[StageCost, Decisions]) -> None:
    cost, what = run
    lanes = lower(what, cost)
    timeline = lanes.simulate()  # raises on a deadlock
    for chunk in range(what.num_chunks):
        for layer in range(what.num_layers):
            mode = what.mode(layer, chunk)
            forward, back = (timeline.span(Action(k, 0, chunk, layer)) for k in ("F", "B"))
            if not mode.offload:
                continue
            out, home = (timeline.span(Action(k, 0, chunk, layer)) for k in ("D", "H"))
            assert forward.end_seconds <= out.start_seconds
            assert out.end_seconds <= home.start_seconds
            assert home.end_seconds <= back.start_seconds
            if mode.tier == "disk":
                store, load = (timeline.span(Action(k, 0, chunk, layer)) for k in ("S", "L"))
                assert out.end_seconds <= store.start_seconds
                assert store.end_seconds <= load.start_seconds
                assert load.end_seconds <= home.start_seconds


@given(run=runs())
@settings(max_examples=80)
def test_windows_of_the_look_ahead(run: tuple[StageCost, Decisions]) -> None:
    """Leaving: as a unit begins, no more than the limit waits. Ahead: the limit, or one frame."""
    cost, what = run
    timeline = lower(what, cost).simulate()

    def size(chunk: int, layer: int) -> int:
        start, end = what.bounds[chunk]
        return cost.frame_bytes(layer, end - start, what.mode(layer, chunk).saved)

    away = [
        (chunk, layer)
        for chunk in range(what.num_chunks)
        for layer in range(what.num_layers)
        if what.mode(layer, chunk).offload
    ]
    ends = {at: timeline.span(Action("D", 0, *at)).end_seconds for at in away}
    if what.leave_bytes is not None:
        for span in timeline.spans(COMPUTE):
            now = span.action
            if now.kind == "F":
                waiting = [
                    at
                    for at in away
                    if at < (now.unit, now.layer) and ends[at] > span.start_seconds
                ]
                assert sum(size(*at) for at in waiting) <= what.leave_bytes
    limit = what.fetch_bytes or 0
    starts = {at: timeline.span(Action("H", 0, *at)).start_seconds for at in away}
    for span in timeline.spans(COMPUTE):
        if span.action.kind == "B":
            here = (span.action.unit, span.action.layer)
            ahead = [at for at in away if at < here and starts[at] < span.end_seconds]
            assert sum(size(*at) for at in ahead) <= max(
                limit, max((size(*at) for at in ahead), default=0)
            )


@given(bounds=bounds_of(), streams=st.booleans())
@settings(max_examples=20)
def test_infinitely_fast_copies_cost_nothing(bounds: object, streams: bool) -> None:
    fast = dict.fromkeys(
        (
            *("d2h_bytes_per_second", "h2d_bytes_per_second"),
            *("both_d2h_bytes_per_second", "both_h2d_bytes_per_second"),
        ),
        1e30,
    )
    cost = slow_cost(small_shape(3), **fast)
    what = decided(bounds, RECOMPUTE_OFFLOAD, layers=3)  # type: ignore[arg-type]
    if streams:
        what = replace(what, kv_tier="host", kv_block_tokens=what.total_tokens)
    timeline = lower(what, cost).simulate()
    assert timeline.end_seconds == pytest.approx(timeline.busy_seconds(COMPUTE))


def test_slow_copies_bound_the_step() -> None:
    cost = slow_cost(small_shape(4), d2h_bytes_per_second=1e6, h2d_bytes_per_second=1e9)
    what = decided(falling_bounds(4), OFFLOAD, leave_bytes=0, fetch_bytes=MIB)
    timeline = lower(what, cost).simulate()
    moved = sum(frame(cost, length) for length in what.chunk_lengths) * 4
    assert timeline.end_seconds > moved / 1e6
