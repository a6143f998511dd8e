"""Warm-up, medians, groups of short calls, and the limits in seconds, on a clock of our own."""

from collections.abc import Callable

import pytest
import torch

from tests.pipeline.fake_time import FakeClock


def test_the_warm_up_does_not_count() -> None:
    clock = FakeClock()
    assert clock.watch().seconds(clock.work(0.2, 0.01)) == pytest.approx(0.01)


def test_the_median_leaves_a_hiccup_out() -> None:
    clock = FakeClock()
    work = clock.work(0.01, 0.01, 0.01, 0.5, 0.012, 0.014, 0.016)
    assert clock.watch(most_seconds=9).seconds(work) == pytest.approx(0.014)


def test_short_work_is_timed_in_groups() -> None:
    clock = FakeClock()
    assert clock.watch(repeats=4).seconds(clock.work(1e-5)) == pytest.approx(1e-5)
    assert clock.calls == 2 + 4 * 200
    clock.calls = 0
    clock.watch(repeats=4).seconds(clock.work(1e-3))
    assert clock.calls == 2 + 4 * 3


def test_no_sample_is_begun_past_the_limit() -> None:
    clock = FakeClock()
    clock.watch(repeats=100, most_seconds=1.0).seconds(clock.work(0.3))
    assert clock.now == pytest.approx(1.2), "the sample that crosses the limit is the last"


def test_long_work_is_timed_once_and_never_by_its_first_call() -> None:
    clock = FakeClock()
    assert clock.watch(most_seconds=1.0).seconds(clock.work(9.0, 0.5)) == 0.5
    assert clock.calls == 2


def test_a_curve_divides_amounts_by_seconds() -> None:
    clock = FakeClock()

    def work_of(tokens: int) -> tuple[Callable[[], None], float]:
        return clock.work(tokens * 1e-4), tokens * 50.0

    curve = clock.watch().curve([64, 256], work_of, budget_seconds=100)
    assert [tokens for tokens, _ in curve.points] == [64, 256]
    assert curve.at(64) == pytest.approx(5e5)
    assert curve.at(256) == pytest.approx(5e5)


def test_a_curve_stops_before_its_budget_is_exceeded() -> None:
    clock = FakeClock()

    def work_of(tokens: int) -> tuple[Callable[[], None], float]:
        return clock.work(float(tokens)), 3.0 * tokens

    curve = clock.watch().curve([1, 2, 4, 8], work_of, budget_seconds=24)
    # Two calls of 1 and of 2 seconds, then two of 4; two calls of 8 would end at 30.
    assert [tokens for tokens, _ in curve.points] == [1, 2, 4]
    assert clock.now == 14
    first_only = clock.watch().curve([100, 200], work_of, budget_seconds=1)
    assert [tokens for tokens, _ in first_only.points] == [100]


def test_what_a_first_call_builds_does_not_end_a_curve() -> None:
    """A kernel that plans takes a second at each size; no time would be left for long ones."""
    clock = FakeClock()
    curve = clock.watch().curve(
        [1, 2, 4], lambda tokens: (clock.work(60.0, 0.5), 1.0), budget_seconds=6
    )
    assert [tokens for tokens, _ in curve.points] == [1, 2, 4]
    assert curve.at(4) == 2.0


def test_a_curve_stops_where_memory_ends() -> None:
    clock = FakeClock()

    def work_of(tokens: int) -> tuple[Callable[[], None], float]:
        if tokens > 64:
            raise torch.OutOfMemoryError
        return clock.work(0.01), 1.0

    curve = clock.watch().curve([32, 64, 128], work_of, budget_seconds=100)
    assert [tokens for tokens, _ in curve.points] == [32, 64]
    with pytest.raises(torch.OutOfMemoryError):
        clock.watch().curve([128], work_of, budget_seconds=100)


@pytest.mark.gpu
def test_cuda_work_is_timed_to_its_end() -> None:
    from sppo_hf.profiling.calibrate import BenchTimer

    device = torch.device("cuda")
    small, large = (torch.randn(size, size, device=device) for size in (512, 8192))
    watch = BenchTimer(device)
    # 4096 times the work; launching alone would take the same time for both.
    assert watch.seconds(lambda: large @ large) > 50 * watch.seconds(lambda: small @ small)
