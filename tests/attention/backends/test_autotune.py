"""Timing of backends on a fake clock: workloads, isolation, which is fastest, when it ends."""

import gc
import logging
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from sppo_hf.attention.backends.aten import CPUFlash
from sppo_hf.attention.backends.autotune import (
    BUDGET_SECONDS,
    Workload,
    autotune,
    autotune_key,
    device_seconds,
    representative_workload,
    run_isolated,
    short,
)
from sppo_hf.attention.backends.base import AttentionSpec, CausalBand
from sppo_hf.attention.backends.reference import Reference
from tests.attention.backends.cases import deterministic
from tests.attention.backends.racers import FakeClock, Racer, raising
from tests.attention.oracle import Answer, Problem, assert_equal, solve, visible

CPU = torch.device("cpu")


def requirement(**changes):
    settings = {"device_type": "cpu", "dtype": torch.float32, "qk_head_size": 8, "v_head_size": 8}
    return AttentionSpec(**settings | changes)


SMALL = Workload(requirement=requirement(), query_heads=2, chunk_tokens=4, prefix_tokens=8)


@pytest.fixture
def clock():
    return FakeClock()


def run(racers, clock):
    return autotune(racers, requirement(), CPU, load=SMALL, clock=clock)


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


def test_seconds_of_all_calls_together():
    clock = FakeClock()

    def work():
        clock.now += 0.25

    assert device_seconds(work, CPU, calls=3, clock=clock) == 0.75


def test_nothing_around_it_reaches_what_runs_apart():
    weight = torch.randn(4, 4, requires_grad=True)
    saved = []

    class Recorder(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    def work():
        product = weight @ weight
        return product.requires_grad, product.dtype, torch.is_grad_enabled()

    hooks = saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)
    with hooks, Recorder() as recorder, torch.autocast("cpu", dtype=torch.bfloat16):
        assert run_isolated(work, CPU) == (False, torch.float32, False)
        assert recorder.count == 0
        assert work() == (True, torch.bfloat16, True), "all of them were active here"
    assert recorder.count
    assert saved


def test_random_state_is_put_back_also_after_an_exception():
    torch.manual_seed(2)
    before = torch.get_rng_state()

    def work():
        torch.rand(100)
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        run_isolated(work, CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_thread_is_left():
    before = threading.active_count()
    with FlopCounterMode(display=False):
        assert run_isolated(lambda: 5, CPU) == 5
    assert threading.active_count() == before


@pytest.mark.gpu
def test_events_time_the_device_and_memory_is_given_back():
    device = torch.device("cuda", torch.cuda.current_device())
    gc.collect()  # what earlier tests left would else go, or not, meanwhile
    torch.cuda.empty_cache()
    reserved, state = torch.cuda.memory_reserved(), torch.cuda.get_rng_state()
    stream = torch.cuda.Stream()

    def work():
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        torch.rand(2**26, device=device)
        cycles = 10**7  # 2 ms at 5 GHz, 29 ms at the 345 MHz of a card that was idle
        return device_seconds(lambda: torch.cuda._sleep(cycles), device, calls=3)

    with torch.cuda.stream(stream):
        assert 3 * 2e-3 < run_isolated(work, device) < 3 * 100e-3
    assert torch.cuda.memory_reserved() <= reserved
    assert torch.equal(torch.cuda.get_rng_state(), state)


def _load(chunk, prefix, *, window=None, heads=4, **needs):
    settings = {"device_type": "cpu", "dtype": torch.float64, "qk_head_size": 8, "v_head_size": 6}
    requirement = AttentionSpec(**settings | {"gqa_ratio": 2} | needs, window=window is not None)
    return Workload(
        requirement=requirement,
        query_heads=heads,
        chunk_tokens=chunk,
        prefix_tokens=prefix,
        window_tokens=window,
    )


@given(st.integers(1, 20), st.integers(0, 20), st.none() | st.integers(1, 45))
def test_pairs_are_those_that_the_mask_shows(chunk, prefix, window):
    load = _load(chunk, prefix, window=window)
    seen = visible(CausalBand(prefix, window), chunk, prefix + chunk)
    assert load.visible_pairs == int(seen.sum())
    # Two products, each a multiplication and an addition per element of a head.
    assert load.forward_flops == load.visible_pairs * 4 * 2 * (8 + 6)
    assert load.backward_flops == 2.5 * load.forward_flops


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [False, True])
def test_a_made_workload_is_attention_of_a_chunk(window, softcap):
    load = _load(7, 12, window=window, softcap=softcap)
    made = load.make(CPU)
    attended = made.forward(Reference())
    grads = made.backward(Reference(), attended)
    problem = Problem(made.q_BNCH, made.k_BKTH, made.v_BKTH, made.dout_BNCH)
    seen = visible(CausalBand(12, window), 7, 19)
    expected = solve(problem, seen, scale=8**-0.5, softcap=50.0 if softcap else None)
    assert_equal(Answer(*attended, *grads), expected, 1e-10)
    assert made.k_BKTH.shape == (1, 2, 19, 8)
    forward, backward = made.work(Reference())
    assert torch.equal(forward().out_BNCH, attended.out_BNCH)
    assert torch.equal(backward().dq_BNCH, grads.dq_BNCH)


def test_the_users_random_numbers_stay_and_ours_repeat():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    made = [_load(3, 4).make(CPU) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(made[0].k_BKTH, made[1].k_BKTH)


def test_bytes_are_those_of_all_tensors():
    load = _load(16, 48, dtype=torch.bfloat16)
    made = load.make(CPU)
    attended = made.forward(Reference())
    grads = made.backward(Reference(), attended)
    inputs = (made.q_BNCH, made.k_BKTH, made.v_BKTH, made.dout_BNCH)
    assert load.num_bytes == sum(x.nbytes for x in (*inputs, *attended, *grads))


def test_shortening_cuts_the_prefix_first_and_stops():
    load = _load(4096, 32768)
    assert load.shortened(load.num_bytes) is load
    half = load.shortened(load.num_bytes - 1)
    assert (half.chunk_tokens, half.prefix_tokens) == (4096, 16384)
    least = load.shortened(0)
    assert (least.chunk_tokens, least.prefix_tokens) == (1024, 1024)
    assert load.shortened(least.num_bytes).num_bytes <= least.num_bytes


def test_words():
    assert [short(n) for n in (512, 4096, 131072, 2**20, 1536)] == [
        "512",
        "4K",
        "128K",
        "1M",
        "1,536",
    ]
    assert str(_load(4096, 32768)) == "4K x 32K"
    assert str(_load(512, 0, window=1024)) == "512 x 0, window 1K"


def test_heads_that_cannot_be_shared_out():
    with pytest.raises(AssertionError, match="3 heads for groups of 2"):
        _load(1, 1, heads=3)
