"""Seconds by a clock, and a place apart from what is going on."""

import gc
import threading

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from sppo_hf.attention.backends.autotune import device_seconds, run_isolated
from tests.attention.backends.racers import FakeClock

CPU = torch.device("cpu")


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
