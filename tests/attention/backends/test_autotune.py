"""A race on a clock of its own: who wins, who is left out, and when it is over."""

import gc
import logging
import weakref

import pytest
import torch

from sppo_hf.attention.backends.aten import CPUFlash
from sppo_hf.attention.backends.autotune import (
    BUDGET_SECONDS,
    Workload,
    autotune,
    autotune_key,
    representative_workload,
)
from sppo_hf.attention.backends.base import AttentionSpec
from sppo_hf.attention.backends.reference import Reference
from tests.attention.backends.cases import deterministic
from tests.attention.backends.racers import FakeClock, Racer, raising

CPU = torch.device("cpu")


def requirement(**changes):
    settings = {"device_type": "cpu", "dtype": torch.float32, "qk_head_size": 8, "v_head_size": 8}
    return AttentionSpec(**settings | changes)


SMALL = Workload(requirement=requirement(), query_heads=2, chunk_tokens=4, prefix_tokens=8)


@pytest.fixture
def clock():
    return FakeClock()


def run(racers, clock, **settings):
    return autotune(racers, requirement(), CPU, load=SMALL, clock=clock, **settings)


def test_laps_are_forward_and_backward_together_behind_a_warm_up(clock):
    result = run([Racer("a", clock, 0.01, first_seconds=0.5)], clock)
    (lap,) = result.laps
    assert lap.seconds == pytest.approx(0.01)
    assert lap.flops_per_second == pytest.approx(3.5 * SMALL.forward_flops / 0.01)
    assert result.load == "4 x 8"
    assert result.lasting


def test_the_fastest_is_first(clock):
    racers = [Racer("a", clock, 0.03), Racer("b", clock, 0.01), Racer("c", clock, 0.02)]
    result = run(racers, clock)
    assert [lap.name for lap in result.laps] == ["a", "b", "c"]
    assert [lap.name for lap in result.ranking()] == ["b", "c", "a"]


def test_close_ones_keep_the_listed_order(clock):
    racers = [Racer("a", clock, 0.0102), Racer("b", clock, 0.01), Racer("c", clock, 0.01)]
    assert [lap.name for lap in run(racers, clock).ranking()] == ["a", "b", "c"]
    racers[0].seconds = 0.0104
    assert [lap.name for lap in run(racers, clock).ranking()] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("error", "lasting"),
    [(RuntimeError("no kernel\nat line 3"), True), (torch.OutOfMemoryError("2 GiB"), False)],
)
def test_one_that_fails_is_left_out_and_logged(clock, caplog, error, lasting):
    racers = [Racer("a", clock, fails=raising(error)), Racer("b", clock)]
    with caplog.at_level(logging.WARNING, logger="sppo_hf"):
        result = run(racers, clock)
    assert [lap.name for lap in result.laps] == ["b"]
    reason = f"raised {type(error).__name__} when timed: {str(error).splitlines()[0]}"
    assert result.left_out == {"a": reason}
    assert f"attention backend a {reason}" in caplog.text
    assert result.lasting is lasting


def test_all_may_fail(clock):
    result = run([Racer("a", clock, fails=raising(RuntimeError()))], clock)
    assert result.laps == ()
    assert result.ranking() == []


def test_time_is_bounded(clock):
    racers = [Racer(name, clock, 0.15) for name in "abcdefgh"]
    result = run(racers, clock)
    # No timed call is begun past the budget, and none of these takes longer than 0.15 seconds; each
    # that is timed has one call before that is not.
    timed = [lap.name for lap in result.laps]
    assert timed == ["a", "b", "c"]
    assert clock.now <= BUDGET_SECONDS + 0.15 * (1 + len(timed))
    assert set(result.left_out) == set("defgh")
    assert not result.lasting, "another time, all may be timed"
    assert result.left_out["h"] == "was not timed, for lack of time"
    assert racers[-1].forwards == 0


def test_the_first_counts_however_slow_it_is(clock):
    racers = [Racer("a", clock, 50.0), Racer("b", clock)]
    result = run(racers, clock)
    assert clock.now == 100.0
    assert [lap.name for lap in result.laps] == ["a"]


def test_building_a_kernel_is_not_part_of_its_time(clock):
    racers = [Racer("a", clock, 0.01), Racer("b", clock, 0.001, first_seconds=9.0)]
    result = run(racers, clock)
    assert [lap.name for lap in result.ranking()] == ["b", "a"]
    assert result.left_out == {}
    assert result.lasting


def test_a_timer_may_be_given(clock):
    seconds = {"a": 3.0, "b": 2.0}
    running = []

    def timer(work):
        work()
        return seconds[running[-1]]

    racers = [Racer(name, clock, fails=lambda name=name: running.append(name)) for name in "ab"]
    result = run(racers, clock, timer=timer)
    assert [lap.seconds for lap in result.laps] == [3.0, 2.0]


def test_memory_is_free_afterwards_even_of_one_that_failed(clock):
    held = []

    def note():
        tensor = torch.empty(1000)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError(f"no room beside {tensor.nbytes} bytes")

    made = []
    original = Workload.make

    def make(self, device):
        tensors = original(self, device)
        made.append(weakref.ref(tensors))
        return tensors

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Workload, "make", make)
            run([Racer("a", clock, fails=note), Racer("b", clock)], clock)
        assert len(made) == 1
        assert [one() for one in (*made, *held)] == [None, None]
    finally:
        gc.enable()


def test_what_is_raced_over(clock):
    load = representative_workload(requirement(gqa_ratio=4, dtype=torch.bfloat16), None)
    assert (load.query_heads, load.kv_heads, str(load)) == (16, 4, "4K x 32K")
    assert representative_workload(requirement(gqa_ratio=5), None).query_heads == 15
    assert representative_workload(requirement(gqa_ratio=71), None).query_heads == 71
    assert str(representative_workload(requirement(window=True), None)) == "4K x 4K, window 1K"
    for free_bytes in (2**34, 2**28):
        load = representative_workload(requirement(qk_head_size=128), free_bytes)
        assert load.num_bytes <= free_bytes / 4


def test_features_reach_the_backend(clock):
    racer = Racer("a", clock)
    asked = requirement(softcap=True, window=True)
    load = Workload(
        requirement=asked, query_heads=2, chunk_tokens=4, prefix_tokens=8, window_tokens=5
    )
    autotune([racer], asked, CPU, load=load, clock=clock)
    assert racer.seen[0] == ((1, 2, 12, 8), 8, 5, 50.0)


def test_real_backends_on_the_cpu():
    load = Workload(requirement=requirement(), query_heads=2, chunk_tokens=64, prefix_tokens=64)
    result = autotune([CPUFlash(), Reference()], requirement(), CPU, load=load)
    assert {lap.name for lap in result.laps} == {"cpu_flash", "reference"}
    assert all(lap.seconds > 0 for lap in result.laps)


def test_the_key_tells_apart_what_changes_speeds():
    name, key = autotune_key(["a", "b"], requirement(), CPU)
    assert name
    assert key["torch"] == torch.__version__
    assert autotune_key(["a", "b"], requirement(), CPU) == (name, key)
    assert autotune_key(["a"], requirement(), CPU)[1] != key
    assert autotune_key(["a", "b"], requirement(dtype=torch.float16), CPU)[1] != key
    assert autotune_key(["a", "b"], requirement(window=True), CPU)[1] != key
    with deterministic("warn"):
        warned = autotune_key(["a", "b"], requirement(), CPU)[1]
    with deterministic("error"):
        refused = autotune_key(["a", "b"], requirement(), CPU)[1]
    assert warned != key != refused != warned
