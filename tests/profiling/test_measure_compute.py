"""What is counted: FLOPs of linear layers and of visible pairs, bytes, seconds per layer."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sppo_hf.attention.backends.base import AttentionOutput, Backend, Gradients
from sppo_hf.attention.backends.select import Selection
from sppo_hf.profiling import calibrate as measure_compute
from sppo_hf.profiling.calibrate import (
    BenchTimer,
    Heads,
    measure_attention,
    measure_host_update,
    measure_launch,
    measure_matmul,
    measure_memory,
)
from tests.pipeline.fake_time import CPU, FakeClock


def _ticking(monkeypatch: pytest.MonkeyPatch, target: object, name: str, clock: FakeClock) -> None:
    """Let every call of `target.name` take a tenth of a second on the clock."""
    real = getattr(target, name)

    def slow(*args: object, **kwargs: object) -> object:
        clock.now += 0.1
        return real(*args, **kwargs)

    monkeypatch.setattr(target, name, slow)


def test_matmul_counts_two_flops_per_weight_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    _ticking(monkeypatch, measure_compute.functional, "linear", clock)
    weights, tokens = ((8, 16), (32, 4)), 5
    with FlopCounterMode(display=False) as counter:
        curve = measure_matmul(
            clock.watch(most_seconds=0.01),
            torch.float32,
            weights=weights,
            tokens=[tokens],
            budget_seconds=9,
        )
    # Two calls of the two layers, 0.2 seconds each, of which the first is not timed.
    assert curve.points == ((tokens, pytest.approx(counter.get_total_flops() / 2 / 0.2)),)


class _Recorder(Backend):
    """Notes what it is asked for; forward takes 1 second, backward 5."""

    name = "recorder"

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.seen: list[tuple[object, ...]] = []

    def reason_unsupported(self, requirement: object) -> None:
        return None

    def forward(self, q_BNCH, k_BKTH, v_BKTH, *, band, scale, softcap=None):  # type: ignore[no-untyped-def]
        self.clock.now += 1
        self.seen.append((tuple(q_BNCH.shape), tuple(k_BKTH.shape), band.q_start, scale))
        return AttentionOutput(torch.empty_like(q_BNCH), torch.empty(q_BNCH.shape[:3]))

    def backward(self, dout, q, k, v, out, lse, *, band, scale, softcap=None):  # type: ignore[no-untyped-def]
        self.clock.now += 5
        return Gradients(q, k, v)


def test_attention_is_the_chosen_backends_behind_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    backend = _Recorder(clock)
    asked: list[str] = []

    def select(name: str, requirement: object) -> Selection:
        asked.append(f"{name} for {requirement}")
        return Selection(backend, "test")

    monkeypatch.setattr(measure_compute, "select_backend", select)
    heads = Heads(query=4, key_value=2, size=16)
    watch = clock.watch(most_seconds=0.1)
    speed = measure_attention(watch, torch.bfloat16, heads=heads, tokens=[8], budget_seconds=99)
    assert asked == ["auto for CPU, bfloat16, head size 16, 2 query heads per key head"]
    assert backend.seen[0] == ((1, 4, 8, 16), (1, 2, 40, 16), 32, 0.25)
    # Each of 8 queries sees the prefix of 32, itself and those before it; 4 heads of 16.
    flops = 4 * (8 * 32 + 36) * 4 * 16
    assert speed.forward.at(8) == pytest.approx(flops)
    assert speed.backward.at(8) == pytest.approx(2.5 * flops / 5)
    assert speed.backend == "recorder"


def test_backward_is_not_tried_past_forwards_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    backend = _Recorder(clock)
    monkeypatch.setattr(
        measure_compute, "select_backend", lambda name, requirement: Selection(backend, "test")
    )
    speed = measure_attention(
        clock.watch(most_seconds=0.1),
        torch.float32,
        heads=Heads(query=1, key_value=1, size=8),
        tokens=[2, 4, 64],
        budget_seconds=30,
    )
    assert [tokens for tokens, _ in speed.forward.points] == [2, 4]
    assert {tokens for tokens, _ in speed.backward.points} <= {2, 4}


def test_memory_counts_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    _ticking(monkeypatch, torch, "mul", clock)
    assert measure_memory(clock.watch(most_seconds=0.01), 4000) == pytest.approx(8000 / 0.1)


def test_an_update_counts_weights_and_moments_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    _ticking(monkeypatch, torch, "_fused_adamw_", clock)
    found = measure_host_update(clock.watch(most_seconds=0.01), 1000)
    assert found == pytest.approx((3 + 2 * 2) * 4000 / 0.1)


def test_a_layer_without_work_takes_some_time() -> None:
    assert 1e-6 < measure_launch(BenchTimer(CPU, repeats=1, most_seconds=0.05)) < 1
