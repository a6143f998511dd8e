"""Measurements on a fake clock and on this machine: timer, compute, copies, disk."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sppo_hf.attention.backends.base import AttentionOutput, Backend, Gradients
from sppo_hf.attention.backends.select import Selection
from sppo_hf.errors import ConfigError
from sppo_hf.profiling import calibrate as measure_compute
from sppo_hf.profiling import calibrate as module
from sppo_hf.profiling.calibrate import (
    BenchTimer,
    Heads,
    measure_attention,
    measure_copies,
    measure_disk,
    measure_host_update,
    measure_launch,
    measure_matmul,
    measure_memory,
)
from tests.profiling.fake_time import CPU, FakeClock


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


def test_samples_are_of_a_device_that_has_been_busy_for_a_while() -> None:
    clock = FakeClock()

    def work() -> None:
        clock.now += 0.01 if clock.now < 0.4 else 0.012  # at its power limit by then

    assert clock.watch().seconds(work) == pytest.approx(0.01)
    clock.now = 0.0
    watch = clock.watch(load_seconds=0.5)
    curve = watch.curve([1, 2], lambda _: (work, 1.2), budget_seconds=0.3)
    assert [tokens for tokens, _ in curve.points] == [1, 2], "load is not charged to the budget"
    assert curve.at(1) == curve.at(2) == pytest.approx(100)


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


MIB = 2**20


def test_measures_and_leaves_nothing(tmp_path: Path) -> None:
    speed = measure_disk(tmp_path / "made", 32 * MIB)
    assert 1e6 < speed.write < 1e12
    assert 1e6 < speed.read < 1e12
    assert list((tmp_path / "made").iterdir()) == []


def _without_direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let O_DIRECT be refused as some file systems do; returns the flags of what was opened."""
    real = os.open
    seen: list[int] = []

    def refuse(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        seen.append(flags)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(module.os, "open", refuse)
    return seen


def test_falls_back_where_the_cache_cannot_be_bypassed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[int] = []
    monkeypatch.setattr(module.os, "posix_fadvise", lambda *args: dropped.append(args[3]))
    opened = _without_direct(monkeypatch)
    speed = measure_disk(tmp_path, 32 * MIB)
    assert speed.read > 1e6
    assert dropped == [os.POSIX_FADV_DONTNEED]
    assert opened
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_measured_by_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ticks() -> Iterator[float]:
        now = 0.0
        while True:
            yield now
            now += 1.0

    counts = {"pwrite": 0, "preadv": 0}
    for name in counts:
        real = getattr(os, name)

        def counted(*args: object, real: object = real, name: str = name) -> int:
            counts[name] += 1
            return real(*args)  # type: ignore[operator, no-any-return]

        monkeypatch.setattr(module.os, name, counted)
    clock = ticks()
    speed = measure_disk(tmp_path, 512 * MIB, most_seconds=4.5, clock=lambda: next(clock))
    # Started at 0; 1 to 4 let a block go, 5 does not, 6 is after the flush.
    assert counts == {"pwrite": 4, "preadv": 4}
    assert speed.write == pytest.approx(4 * 8 * MIB / 6)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"offload_dir='.*/file/x'.*Not a directory.*Remedy"):
        measure_disk(tmp_path / "file" / "x", 32 * MIB)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b", "x" * 300])
def test_a_name_that_no_folder_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"offload_dir='.*cannot be measured.*Remedy"):
        measure_disk(tmp_path / name, 32 * MIB)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(module.tempfile, "NamedTemporaryFile", refuse)
    with pytest.raises(ConfigError, match=r"offload_dir=.*Permission denied.*another folder"):
        measure_disk(tmp_path, 32 * MIB)


def test_a_full_disk_is_refused_before_and_during(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "free_disk_bytes", lambda folder: 100 * MIB)
        with pytest.raises(ConfigError, match=r"No space left.*128 MiB free"):
            measure_disk(tmp_path, 1024 * MIB)
    monkeypatch.setattr(module.os, "pwrite", lambda *args: 4096)
    with pytest.raises(ConfigError, match="No space left"):
        measure_disk(tmp_path, 64 * MIB)
    assert list(tmp_path.iterdir()) == []
