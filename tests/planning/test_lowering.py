"""The lowering: dependencies by hand, the look-ahead, bytes, and laws that hold for any decisions.

The estimate and the simulation are two readings of one program, so their peaks are equal; what the
program itself says is checked by hand and against who could hold what when.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo_hf.planning.activation_modes import KEEP, ActivationMode, mode_of
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.decisions import Decisions, KVMode
from sppo_hf.planning.lowering import (
    COMPUTE,
    D2H,
    H2D,
    ActionQueues,
    StepProgram,
    compute_seconds,
    estimate,
    lower,
)
from sppo_hf.planning.memory import Cause
from sppo_hf.planning.tiers import TIERS, Tier
from sppo_hf.schedule.actions import Action
from tests.planning.modes import OFFLOAD, RECOMPUTE, RECOMPUTE_OFFLOAD
from tests.planning.moments import moments_of, peak_by_cause
from tests.planning.shapes import llama_config, shape_of
from tests.planning.situations import (
    MIB,
    bounds_of,
    decided,
    dkv_bytes,
    falling_bounds,
    kv_bytes,
    on_host,
    runs,
    saved_bytes,
    slow_cost,
    small_shape,
)
from tests.sweeps import examples

DISK = mode_of("whole", "disk")
TWO_BY_TWO = ((0, 512), (512, 1024))


def text(actions: Iterable[Action]) -> list[str]:
    return [str(action) for action in actions]


def on_all(resources: ActionQueues) -> list[Action]:
    return [action for resource in resources.actions.values() for action in resource]


def needs(resources: ActionQueues, action: Action) -> set[Action]:
    actions = on_all(resources)
    return {actions[at] for at in resources.needs[actions.index(action)]}


def seconds_of(resources: ActionQueues, action: Action) -> float:
    return resources.seconds[on_all(resources).index(action)]


def after(resources: ActionQueues, action: str) -> set[str]:
    return set(text(needs(resources, Action.parse(action))))


def actions_of(what: Decisions, cost: ModelCost) -> ActionQueues:
    return lower(what, cost).resources


def frame(cost: ModelCost, tokens: int = 512) -> int:
    return saved_bytes(cost, 0, tokens)


def in_order(what: Decisions) -> list[tuple[int, int]]:
    """(chunk, layer) of all forwards but heads."""
    units = [(c, layer) for c in range(what.num_chunks) for layer in range(what.num_layers)]
    return sorted(units, key=lambda unit: unit[::-1]) if what.by_layer else units


def keys_here(what: Decisions) -> Decisions:
    return replace(what, kv_tier="device", kv_block_tokens=0, kv_modes=())


def test_order_of_units() -> None:
    resources = actions_of(decided(TWO_BY_TWO, layers=2), slow_cost(small_shape(2)))
    assert text(resources.actions[COMPUTE]) == [
        *("0F0.0", "0F0.1", "0F0.2", "0F1.0", "0F1.1", "0F1.2"),
        *("0B1.1", "0B1.0", "0B0.1", "0B0.0"),
    ]
    assert not any(
        resources.actions[resource] for resource in (D2H, H2D, "disk write", "disk read")
    )
    assert not any(resources.needs)


def test_order_of_units_by_layer() -> None:
    program = lower(by_layer(), slow_cost(small_shape(2)))
    assert text(program.resources.actions[COMPUTE]) == [
        *("0F0.0", "0F1.0", "0F0.1", "0F1.1", "0F0.2", "0F1.2"),
        *("0B1.1", "0B0.1", "0B1.0", "0B0.0"),
    ]
    assert [program.points.unit(at) for at in range(program.points.count)] == [
        (action.unit, action.layer) for action in program.resources.actions[COMPUTE]
    ]
    assert [moment.name for moment in moments_of(program.estimate)] == [
        *("forward of layer 1 of 2, chunk 2 of 2", "forward of layer 2 of 2, chunk 2 of 2"),
        "loss of chunk 2 of 2",
        *("start of backward of layer 2 of 2", "end of backward of layer 2 of 2"),
        *("start of backward of layer 1 of 2", "end of backward of layer 1 of 2"),
    ]


def by_layer(*kv_modes: KVMode, mode: ActivationMode = KEEP) -> Decisions:
    """Two layers of two chunks."""
    return decided(TWO_BY_TWO, mode, layers=2, order="by_layer", kv_modes=kv_modes)


def test_weights_on_the_host_by_hand() -> None:
    shape = on_host(small_shape(4), weights=True)
    cost = slow_cost(shape, host_update_bytes_per_second=1e9)
    resources = actions_of(decided(TWO_BY_TWO, layers=4, order="by_layer"), cost)
    assert text(resources.actions[H2D]) == [
        *("0P0.4#0", "0P0.0#0", "0P0.1#0", "0P0.2#0", "0P0.3#0"),
        *("0P0.1#1", "0P0.0#1"),  # those of the last two layers are still there
    ]
    assert text(resources.actions[D2H]) == ["0G0.3", "0G0.2", "0G0.1", "0G0.0", "0G0.4"]
    assert after(resources, "0F0.0") == {"0P0.4#0", "0P0.0#0"}
    assert after(resources, "0P0.2#0") == {"0F1.0"}
    assert after(resources, "0F0.2") == {"0P0.2#0"}
    assert after(resources, "0P0.0#1") == {"0B0.2"}
    # Gradients of one layer may be on their way.
    assert after(resources, "0B1.1") == {"0P0.1#1", "0G0.3"}
    assert after(resources, "0U0") == {"0B0.0", "0G0.4"}
    assert shape.host_resident is not None
    seconds = seconds_of(resources, Action.parse("0P0.2#0"))
    assert seconds == pytest.approx(shape.host_resident.layer_bytes[2] / 4e8)
    assert seconds_of(resources, Action.parse("0U0")) == pytest.approx(
        (3 * 2 + 2 * 8) * shape.trainable_parameters / 1e9
    )
    stays = replace(cost, shape=on_host(small_shape(4), weights=False))
    copies = text(actions_of(decided(TWO_BY_TWO, layers=4), stays).actions[H2D])
    assert copies == ["0P0.4#0", "0P0.0#0", "0P0.1#0", "0P0.2#0", "0P0.3#0"]


def test_keys_by_layer_by_hand() -> None:
    cost = slow_cost(small_shape(2))
    chunk, sums = kv_bytes(cost, 0, 512), dkv_bytes(cost, 0, 512)

    def held(tier: Tier, cause: Cause, *kv_modes: KVMode) -> list[int]:
        levels = lower(by_layer(*kv_modes, mode=RECOMPUTE), cost).levels[tier]
        return [size // chunk for size in levels[cause].during.tolist()]

    assert held("device", Cause.KV) == [1, 2, 3, 4, 4, 4, *(4, 3, 2, 1)]
    away: tuple[KVMode, KVMode] = ("host", "device")
    assert held("device", Cause.KV, *away) == [1, 2, 1, 2, 2, 2, *(2, 1, 2, 1)]
    assert held("host", Cause.KV, *away) == [0, 0, 2, 2, 2, 2, *(2, 2, 2, 2)]
    # They leave behind the forward of layer 1, until they are asked for at the latest, and are
    # asked for as the last chunk of layer 2 is entered.
    assert held("device", Cause.COPIES, *away) == [0, 0, 2, 2, 2, 2, *(2, 2, 0, 0)]
    again: tuple[KVMode, KVMode] = ("recompute", "recompute")
    assert held("device", Cause.KV, *again) == [1, 2, 1, 2, 0, 0, *(2, 1, 2, 1)]
    # Where frames are whole there is no input to make them from.
    whole = lower(by_layer(*again), cost).levels["device"][Cause.KV].during
    assert (whole // chunk).tolist() == [1, 2, 3, 4, 4, 4, *(4, 3, 2, 1)]
    program = lower(by_layer("host", "recompute", mode=RECOMPUTE), cost)
    assert program.levels["device"][Cause.DKV].during.tolist() == [0] * 6 + [sums, sums] * 2
    resources = program.resources
    assert text(resources.actions[D2H]) == ["0O1.0#0"]
    assert text(resources.actions[H2D]) == ["0K1.0#0"]
    assert after(resources, "0O1.0#0") == {"0F1.0"}
    assert after(resources, "0K1.0#0") == {"0F1.2", "0O1.0#0"}
    assert after(resources, "0B1.0") == {"0K1.0#0"}


def test_keys_that_are_made_again_take_time_and_inputs_once_more() -> None:
    cost = slow_cost(small_shape(2))
    modes: tuple[KVMode, KVMode] = ("device", "recompute")
    kept, again = (lower(by_layer("device", m, mode=RECOMPUTE_OFFLOAD), cost) for m in modes)
    seconds = again.seconds - kept.seconds
    assert seconds[6] == pytest.approx(2 * cost.kv_recompute_seconds(1, 512))
    assert seconds.sum() == pytest.approx(seconds[6])
    one = 512 * 256 * 2
    assert again.copied_bytes[1] - kept.copied_bytes[1] == one
    assert after(again.resources, "0B1.1") == {"0H1.1", "0K1.1#0"}
    assert seconds_of(again.resources, Action.parse("0K1.1#0")) == cost.h2d_seconds(one)


def test_hidden_states_by_layer_by_hand() -> None:
    cost = slow_cost(small_shape(2))
    levels = lower(by_layer(), cost).levels["device"]
    one = 512 * 256 * 2
    # Input and output of the running layer; the loss adds the gradient of each chunk.
    held = levels[Cause.HIDDEN].during.tolist()
    assert [size // one for size in held] == [4, 4, 4, 4, 5, 6, *(4, 4, 4, 4)]
    # Inputs of kept frames are those until the layer has run, and stay until its backward ends.
    frames, kept = levels[Cause.ACTIVATIONS].during.tolist(), frame(cost)
    whole = [kept - one, 2 * kept - 2 * one, 3 * kept - one, 4 * kept - 2 * one, 4 * kept, 4 * kept]
    assert frames == [*whole, 4 * kept, 3 * kept + one, 2 * kept, kept + one]


def test_gradients_by_layer_are_summed_one_layer_at_a_time() -> None:
    shape = shape_of(llama_config(num_hidden_layers=2), dtype_bytes=2)
    what = replace(by_layer(), accumulates=True)
    held = StepProgram(what, shape, "cuda").levels["device"][Cause.GRADIENTS]
    before = held.before
    one = (held.during[6:] - before).tolist()
    assert one == [one[0], one[0], one[2], one[2]]
    assert one[0] + one[2] == shape.gradient_bytes - 128_256 * 4096 * 4
    assert held.after[-1] == before


def test_evaluation_only_runs_forward() -> None:
    what = replace(decided(TWO_BY_TWO, OFFLOAD, layers=2), training=False)
    resources = actions_of(what, slow_cost(small_shape(2)))
    assert [action.kind for action in resources.actions[COMPUTE]] == ["F"] * 6
    assert not resources.actions[D2H]


def test_offload_by_hand() -> None:
    cost = slow_cost(small_shape(2))
    one = frame(cost)
    what = decided(TWO_BY_TWO, OFFLOAD, layers=2, max_pending_d2h_bytes=one, max_prefetch_bytes=one)
    resources = actions_of(what, cost)
    assert text(resources.actions[D2H]) == ["0D0.0", "0D0.1", "0D1.0", "0D1.1"]
    assert text(resources.actions[H2D]) == ["0H1.1", "0H1.0", "0H0.1", "0H0.0"]
    assert after(resources, "0D0.1") == {"0F0.1"}
    # One frame may wait: when the second has closed, the first must be gone.
    assert after(resources, "0F0.1") == set()
    assert after(resources, "0F0.2") == {"0D0.0"}
    assert after(resources, "0F1.0") == set()
    assert after(resources, "0F1.1") == {"0D0.1"}
    assert after(resources, "0F1.2") == {"0D1.0"}
    # One frame may be ahead: entering a frame asks for the one before it on the prefetch order.
    assert after(resources, "0H1.1") == {"0F1.2", "0D1.1"}
    assert after(resources, "0H1.0") == {"0F1.2", "0D1.0"}
    assert after(resources, "0H0.1") == {"0B1.1", "0D0.1"}
    assert after(resources, "0H0.0") == {"0B1.0", "0D0.0"}
    assert after(resources, "0B0.1") == {"0H0.1"}


def test_without_a_limit_what_left_with_the_unit_before_may_be_on_its_way() -> None:
    """A unit's activations and its K/V: as the runtime ends a group of copies with each layer."""
    cost = slow_cost(small_shape(2))
    what = decided(TWO_BY_TWO, OFFLOAD, layers=2)
    resources = actions_of(replace(what, kv_tier="host", kv_block_tokens=512), cost)
    assert text(resources.actions[D2H])[:4] == ["0D0.0", "0O0.0#0", "0D0.1", "0O0.1#0"]
    assert after(resources, "0F0.1") == set()
    assert after(resources, "0F0.2") == {"0O0.0#0"}
    assert after(resources, "0F1.0") == set()
    assert after(resources, "0F1.1") == {"0O0.1#0", "0K1.0#0"}


def test_kept_frames_ask_for_nothing() -> None:
    cost = slow_cost(small_shape(2))
    modes = ((OFFLOAD, OFFLOAD), (KEEP, KEEP))
    resources = actions_of(decided(TWO_BY_TWO, modes, layers=2, max_prefetch_bytes=9 * MIB), cost)
    # Nothing enters the prefetch order before the first frame that is on it.
    assert after(resources, "0H0.1") == {"0B1.0", "0D0.1"}
    assert after(resources, "0H0.0") == {"0B1.0", "0D0.0"}


def test_recomputed_frames_ask_for_those_before_them() -> None:
    cost = slow_cost(small_shape(2))
    modes = ((OFFLOAD, OFFLOAD), (KEEP, RECOMPUTE))
    resources = actions_of(decided(TWO_BY_TWO, modes, layers=2), cost)
    assert after(resources, "0H0.1") == {"0F1.2", "0D0.1"}
    assert after(resources, "0H0.0") == {"0B1.0", "0D0.0"}


def test_disk_by_hand() -> None:
    cost = slow_cost(small_shape(2))
    one = frame(cost)
    what = decided(TWO_BY_TWO, DISK, layers=2, max_pending_d2h_bytes=9 * one, staging_bytes=2 * one)
    resources = actions_of(what, cost)
    assert text(resources.actions["disk write"]) == ["0S0.0", "0S0.1", "0S1.0", "0S1.1"]
    assert text(resources.actions["disk read"]) == ["0L1.1", "0L1.0", "0L0.1", "0L0.0"]
    assert after(resources, "0S0.1") == {"0D0.1"}
    # Two frames fit into staging.
    assert after(resources, "0D0.1") == {"0F0.1"}
    assert after(resources, "0D1.0") == {"0F1.0", "0S0.0"}
    # Nothing is read before forward is over, and staging is empty enough by then.
    assert after(resources, "0L1.1") == {"0F1.2", "0S1.1", "0S1.0"} | {"0F1.2"}
    assert after(resources, "0L0.1") == {"0F1.2", "0S0.1", "0H1.1"}
    assert after(resources, "0H1.1") == {"0F1.2", "0S1.1", "0L1.1"}


def test_streamed_keys_by_hand() -> None:
    cost = slow_cost(small_shape(2))
    what = decided(TWO_BY_TWO, layers=2, kv_tier="host", kv_block_tokens=1024)
    resources = actions_of(what, cost)
    assert text(resources.actions[D2H]) == [
        *("0O0.0#0", "0O0.1#0", "0O1.0#0", "0O1.1#0"),
        *("0O1.1#1", "0O1.0#1"),  # chunk 0's own sums never leave
    ]
    assert text(resources.actions[H2D]) == [
        *("0K1.0#0", "0K1.1#0"),
        *("0K1.1#1", "0K1.0#1", "0K0.1#1", "0K0.0#1"),
    ]
    assert after(resources, "0K1.0#0") == {"0F0.1", "0O0.0#0"}
    assert "0K1.0#0" in after(resources, "0F1.1")
    assert after(resources, "0K0.1#1") == {"0B1.1", "0O1.1#1"}
    forward, last, first = (Action.parse(a) for a in ("0K1.0#0", "0K1.0#1", "0K0.0#1"))
    # K/V of 512 tokens; K/V of all, no sums yet; K/V and float32 sums of 512.
    assert seconds_of(resources, last) == pytest.approx(2 * seconds_of(resources, forward))
    assert seconds_of(resources, first) == pytest.approx(3 * seconds_of(resources, forward))
    # Sums that leave after the last chunk are those of the tokens before it.
    out = seconds_of(resources, Action.parse("0O1.0#1"))
    assert out == pytest.approx(cost.d2h_seconds(dkv_bytes(cost, 0, 512), both=True))


def test_windows_stream_what_is_seen() -> None:
    cost = slow_cost(small_shape(2, window=100))
    bounds = ((0, 256), (256, 512), (512, 768))
    resources = actions_of(decided(bounds, layers=2, kv_tier="host", kv_block_tokens=768), cost)
    local, full = (seconds_of(resources, Action("K", 0, 2, layer, 0)) for layer in (0, 1))
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

    reads_ahead = False

    def __init__(self) -> None:
        self.asked: list[int] = []

    def limit_pending_d2h(self, max_pending_d2h_bytes: int | None = None) -> None:
        pass

    def prefetch(self, handle: _Handle) -> None:
        if handle.num_bytes and handle.frame not in self.asked:
            self.asked.append(handle.frame)


@pytest.mark.fake
@given(run=runs())
@examples(20, whole=60)
def test_the_engine_prefetches_where_the_program_does(run: tuple[ModelCost, Decisions]) -> None:
    from sppo_hf.offload.layer_offload import PrefetchOrder

    cost, what = run
    what = keys_here(what)
    resources = actions_of(what, cost)
    mover = _Mover()
    prefetch_order = PrefetchOrder(mover, lowest_prefetched=lower(what, cost).lowest_prefetched)  # type: ignore[arg-type]
    frames: dict[tuple[int, int], _Frame] = {}
    order = in_order(what)
    for at, (chunk, layer) in enumerate(order):
        mode, (start, end) = what.mode(layer, chunk), what.bounds[chunk]
        if mode == KEEP:
            continue
        size = saved_bytes(cost, layer, end - start, mode.saved)
        frames[chunk, layer] = _Frame([_Handle(at, size)] if mode.offload else [])
        # By layer a layer's keys have the number behind its frames.
        number = at + layer * what.by_layer
        prefetch_order.record(frames[chunk, layer], number)  # type: ignore[arg-type]
    asked_in: dict[int, Action | None] = {}
    previous = resources.actions[COMPUTE][len(resources.actions[COMPUTE]) - len(order) - 1]
    for chunk, layer in reversed(order):
        before = len(mover.asked)
        if (chunk, layer) in frames:
            prefetch_order.on_backward(frames[chunk, layer])  # type: ignore[arg-type]
        for frame_at in mover.asked[before:]:
            asked_in[frame_at] = previous
        previous = Action("B", 0, chunk, layer)
    expected = [Action("H", 0, *order[at]) for at in asked_in]
    assert [copy for copy in resources.actions[H2D] if copy.kind == "H"] == expected
    for at, gate in asked_in.items():
        assert gate in needs(resources, Action("H", 0, *order[at]))
    assert weakref.ref(prefetch_order)() is prefetch_order


@given(run=runs())
@examples(26, whole=80)
def test_any_decisions_run_to_their_end(run: tuple[ModelCost, Decisions]) -> None:
    cost, what = run
    timeline = lower(what, cost).simulate()  # raises on a deadlock
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
@examples(26, whole=80)
def test_windows_of_the_look_ahead(run: tuple[ModelCost, Decisions]) -> None:
    """Leaving: as a unit begins, no more than the limit waits. Ahead: the limit, or one frame."""
    cost, what = run
    if what.by_layer:
        what = keys_here(what)
    program = lower(what, cost)
    timeline, place = program.simulate(), program.points.forward

    def size(chunk: int, layer: int) -> int:
        start, end = what.bounds[chunk]
        return saved_bytes(cost, layer, end - start, what.mode(layer, chunk).saved)

    away = [
        (chunk, layer)
        for chunk in range(what.num_chunks)
        for layer in range(what.num_layers)
        if what.mode(layer, chunk).offload
    ]
    ends = {at: timeline.span(Action("D", 0, *at)).end_seconds for at in away}
    if what.max_pending_d2h_bytes is not None:
        for span in timeline.spans(COMPUTE):
            now = span.action
            if now.kind == "F":
                waiting = [
                    at
                    for at in away
                    if place(*at) < place(now.unit, now.layer or 0)
                    and ends[at] > span.start_seconds
                ]
                assert sum(size(*at) for at in waiting) <= what.max_pending_d2h_bytes
    limit = what.max_prefetch_bytes or 0
    starts = {at: timeline.span(Action("H", 0, *at)).start_seconds for at in away}
    for span in timeline.spans(COMPUTE):
        if span.action.kind == "B":
            here = place(span.action.unit, span.action.layer or 0)
            ahead = [at for at in away if place(*at) < here and starts[at] < span.end_seconds]
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


@given(run=runs(), training=st.booleans())
@examples(20, whole=60)
def test_compute_is_the_sum_of_what_each_unit_takes(
    run: tuple[ModelCost, Decisions], training: bool
) -> None:
    cost, what = run[0], replace(run[1], training=training)
    expected = cost.update_seconds if training else 0.0
    for chunk, (start, end) in enumerate(what.bounds):
        expected += cost.head_seconds(end - start, training=training)
        for layer in range(what.num_layers):
            expected += cost.forward_seconds(layer, start, end)
            if training:
                saved = what.mode(layer, chunk).saved
                expected += cost.backward_seconds(layer, start, end)
                expected += cost.recompute_seconds(layer, end - start, saved, start=start)
                if what.by_layer and what.kv_mode(layer) == "recompute" and saved != "whole":
                    expected += cost.kv_recompute_seconds(layer, end - start)
    assert compute_seconds(what, cost) == pytest.approx(expected)


@given(run=runs(), training=st.booleans())
@examples(20, whole=60)
def test_copies_take_as_long_as_what_is_said_to_be_copied(
    run: tuple[ModelCost, Decisions], training: bool
) -> None:
    what = replace(run[1], training=training)
    cost = slow_cost(
        small_shape(what.num_layers),
        both_d2h_bytes_per_second=5e8,
        both_h2d_bytes_per_second=5e8,
    )
    program = lower(what, cost)
    for resource, num_bytes in zip((D2H, H2D), program.copied_bytes, strict=True):
        resources = program.resources
        seconds = sum(seconds_of(resources, action) for action in resources.actions[resource])
        assert seconds == pytest.approx(num_bytes / 5e8)


def test_slow_copies_bound_the_step() -> None:
    cost = slow_cost(small_shape(4), d2h_bytes_per_second=1e6, h2d_bytes_per_second=1e9)
    what = decided(falling_bounds(4), OFFLOAD, max_pending_d2h_bytes=0, max_prefetch_bytes=MIB)
    timeline = lower(what, cost).simulate()
    moved = sum(frame(cost, length) for length in what.chunk_lengths) * 4
    assert timeline.end_seconds > moved / 1e6


# -- bytes -------------------------------------------------------------------------------------


@given(run=runs(), kind=st.sampled_from(["cuda", "cpu"]), training=st.booleans())
@examples(50, whole=150)
def test_simulated_peaks_are_the_estimates(
    run: tuple[ModelCost, Decisions], kind: str, training: bool
) -> None:
    cost, what = run
    cost = replace(cost, profile=replace(cost.profile, kind=kind))
    what = replace(what, training=training, accumulates=training, return_logits=True)
    timeline = lower(what, cost).simulate(with_bytes=True)
    predicted = estimate(cost.shape, what, device_kind=kind)
    for tier in TIERS:
        held = predicted.of(tier)
        assert held.total == predicted.peak_bytes(tier)
        if tier in timeline.tiers:
            assert peak_by_cause(timeline, tier) == held
        else:
            assert not held


@given(run=runs())
@examples(20, whole=60)
def test_all_bytes_return(run: tuple[ModelCost, Decisions]) -> None:
    cost, what = run
    program = lower(what, cost)
    timeline = program.simulate(with_bytes=True)
    for tier in timeline.tiers:
        standing = sum(program.standing[tier].values())
        standing += sum(level.before for level in program.levels[tier].values())
        curve = timeline.curve(tier)
        assert curve[-1][1] == standing
        assert all(num_bytes >= standing for _, num_bytes in curve)


@given(run=runs())
@examples(20, whole=60)
def test_copies_hold_no_less_than_what_is_under_way(run: tuple[ModelCost, Decisions]) -> None:
    """Of the look-ahead the program counts what its own copies hold at any time."""
    cost, what = run
    what = keys_here(what)
    program = lower(what, cost)
    timeline = program.simulate()
    computed = {action: at for at, action in enumerate(program.resources.actions[COMPUTE])}
    copies = program.levels["device"][Cause.COPIES].during
    for action, at in computed.items():
        begins = timeline.span(action).start_seconds
        here = 0
        for chunk, row in enumerate(program.offloaded_bytes.tolist()):
            for layer, size in enumerate(row):
                if not size:
                    continue
                spans = [timeline.span(Action(k, 0, chunk, layer)) for k in ("F", "D", "H", "B")]
                forward, out, back, used = spans
                # A copy that no unit waits for may end early; bytes are counted until one does.
                leaving = forward.start_seconds <= begins < out.end_seconds
                returning = back.start_seconds <= begins < used.end_seconds
                here += size * (leaving or returning)
        assert here <= copies[at]


@given(run=runs())
@examples(20, whole=60)
def test_staging_is_bounded(run: tuple[ModelCost, Decisions]) -> None:
    """Bytes that pass through the host to the disk and back stay within the staging region."""
    cost, what = run
    to_disk = tuple(
        tuple(mode_of(mode.saved, "disk") if mode.offload else mode for mode in row)
        for row in what.layer_modes
    )
    what = keys_here(replace(what, layer_modes=to_disk))
    program = lower(what, cost)
    timeline = program.simulate()
    events: list[tuple[float, int]] = []
    for chunk, row in enumerate(program.offloaded_bytes.tolist()):
        for layer, size in enumerate(row):
            for first, last in (("D", "S"), ("L", "H")):
                if size:
                    spans = [timeline.span(Action(k, 0, chunk, layer)) for k in (first, last)]  # type: ignore[arg-type]
                    events += [(spans[0].start_seconds, size), (spans[1].end_seconds, -size)]
    held = 0
    for _, change in sorted(events):
        held += change
        # Every staging region of these runs holds the largest frame.
        assert held <= what.staging_bytes


def test_kept_frames_by_hand() -> None:
    cost = slow_cost(small_shape(2))
    what = decided(TWO_BY_TWO, layers=2)
    causes = lower(what, cost).simulate(with_bytes=True).curves_by_cause("device")
    assert max(held for _, held in causes["frames"]) == 2 * saved_bytes(cost, 0, 1024)
    assert max(held for _, held in causes["kv"]) == 2 * kv_bytes(cost, 0, 1024)
    assert max(held for _, held in causes["dkv"]) == 2 * dkv_bytes(cost, 0, 512)


def test_copies_by_hand() -> None:
    cost = slow_cost(small_shape(2))
    one = frame(cost)
    what = decided(TWO_BY_TWO, OFFLOAD, layers=2, max_pending_d2h_bytes=one, max_prefetch_bytes=one)
    levels = lower(what, cost).levels
    copies = levels["device"][Cause.COPIES].during.tolist()
    # The running frame and one that leaves; the head runs beside one. Backward begins with the
    # newest, which never left, asks for the one before it, and so on.
    assert [held // one for held in copies] == [1, 2, 1, 2, 2, 1, *(2, 2, 2, 1)]
    host = levels["host"][Cause.ACTIVATIONS].during.tolist()
    # A frame is there once its copy is enqueued, until its backward ends.
    assert [held // one for held in host] == [0, 1, 2, 2, 3, 4, *(4, 3, 2, 1)]


def test_what_recomputed_frames_keep_on_a_cpu_goes_chunk_by_chunk() -> None:
    cost = slow_cost(small_shape(2))
    what = decided(TWO_BY_TWO, RECOMPUTE, layers=2)
    sizes = [
        StepProgram(what, cost.shape, kind).levels["device"][Cause.INPUTS].after[-3:-1].tolist()
        for kind in ("cuda", "cpu")
    ]
    one = saved_bytes(cost, 0, 512, "inputs")
    assert sizes == [[2 * one, one], [2 * one, 2 * one]]
