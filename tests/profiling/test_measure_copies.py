"""Copies each way alone and at once; the bytes really move."""

import pytest
import torch

from sppo_hf.profiling.calibrate import BenchTimer, measure_copies
from tests.pipeline.fake_time import CPU, FakeClock


def test_alone_is_timed_per_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    moved: list[int] = []
    real = torch.Tensor.copy_

    def slow(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        clock.now += 0.5
        moved.append(source.nbytes)
        return real(self, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", slow)
    speed = measure_copies(clock.watch(most_seconds=0.1), 1000)
    assert speed.d2h == speed.h2d == 2000
    assert set(moved) == {1000}


def test_at_once_is_timed_by_a_real_clock() -> None:
    speed = measure_copies(BenchTimer(CPU, repeats=1, most_seconds=0.01), 2**20)
    assert all(1e6 < rate < 1e13 for rate in speed)


@pytest.mark.gpu
def test_pinned_copies_overlap() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    speed = measure_copies(BenchTimer(device), 2**27)
    assert speed.d2h > 1e9
    # Turns would make both at once as slow as one after the other. How much faster they are is the
    # machine's affair: a virtual one may share its bandwidth between the ways.
    at_once = max(1 / speed.both_d2h, 1 / speed.both_h2d)
    in_turn = 1 / speed.d2h + 1 / speed.h2d
    assert at_once < 0.95 * in_turn, f"{at_once / in_turn:.0%} of the time of turns: {speed}"
