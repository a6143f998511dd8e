"""Backends beside each other, on a clock of their own: what is measured, and what is left out."""

import io

import pytest
import torch
from rich.console import Console

from recipes.benchmarks import attention_kernels as measuring
from recipes.benchmarks.attention_kernels import (
    Group,
    Point,
    backends_table,
    best_of,
    by_size,
    draw_backends,
    measure_backends,
)
from sppo_hf.attention.backends import select
from sppo_hf.attention.backends.autotune import Workload
from sppo_hf.attention.backends.base import AttentionSpec
from sppo_hf.errors import ConfigError
from sppo_hf.profiling.calibrate import Heads
from tests.attention.backends.racers import Racer, raising
from tests.profiling.fake_time import CPU, FakeClock

HEADS = Heads(4, 2, 8)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def racers(monkeypatch, clock):
    found = {name: Racer(name, clock, seconds) for name, seconds in (("a", 0.4), ("b", 0.2))}
    for name, racer in found.items():
        monkeypatch.setitem(select.BACKENDS, name, (lambda racer=racer: racer,))
    monkeypatch.setattr(measuring, "find_mismatch", lambda *_: None)
    select._find_on_device.cache_clear()
    yield found
    select._find_on_device.cache_clear()


def run(clock, **settings):
    asked = {
        "dtypes": [torch.float32],
        "heads": [HEADS],
        "chunks": [4],
        "prefixes": [8],
        "names": ["a", "b"],
        "most_seconds": 1e6,
        "watch": clock.watch(most_seconds=0.01),
    }
    groups = []
    for group in measure_backends(CPU, **asked | settings):
        groups += [group] if group not in groups else []
    return groups


def load(chunk, prefix, window=None):
    requirement = AttentionSpec(
        device_type="cpu",
        dtype=torch.float32,
        qk_head_size=8,
        v_head_size=8,
        gqa_ratio=2,
        window=window is not None,
    )
    return Workload(
        requirement=requirement,
        query_heads=4,
        chunk_tokens=chunk,
        prefix_tokens=prefix,
        window_tokens=window,
    )


def test_forward_and_backward_are_timed_apart(clock, racers):
    (group,) = run(clock)
    a, b = group.points
    assert (a.backend, a.chunk_tokens, a.prefix_tokens) == ("a", 4, 8)
    assert a.forward_seconds == pytest.approx(0.1)
    assert a.backward_seconds == pytest.approx(0.3)
    flops = load(4, 8).forward_flops
    assert a.forward_flops_per_second == pytest.approx(flops / 0.1)
    assert a.backward_flops_per_second == pytest.approx(2.5 * flops / 0.3)
    assert b.flops_per_second == pytest.approx(3.5 * flops / 0.2)
    assert racers["a"].seen[0] == ((1, 2, 12, 8), 8, None, None)


def test_every_size_from_little_work_to_much(clock, racers):
    groups = run(clock, chunks=[4, 2], prefixes=[8, 0], dtypes=[torch.float32, torch.float64])
    assert [str(group) for group in groups] == [
        "float32, 4/2 heads of 8",
        "float64, 4/2 heads of 8",
    ]
    sizes = [(p.chunk_tokens, p.prefix_tokens) for p in groups[1].points if p.backend == "a"]
    assert sizes == [(2, 0), (4, 0), (2, 8), (4, 8)]


def test_a_window_reaches_the_backend_and_its_flops(clock, racers):
    (group,) = run(clock, window_tokens=3)
    assert str(group) == "float32, 4/2 heads of 8, window 3"
    assert racers["a"].seen[0][2] == 3
    rate = group.points[0].forward_flops_per_second
    assert rate == pytest.approx(load(4, 8, 3).forward_flops / 0.1)


def test_one_that_fails_leaves_the_others(clock, racers):
    racers["a"].fails = raising(torch.OutOfMemoryError("CUDA out of memory\nTried to"))
    (group,) = run(clock)
    a, b = group.points
    assert a.flops_per_second is None
    assert a.reason == "raised OutOfMemoryError: CUDA out of memory"
    assert b.reason is None


def test_one_that_differs_from_the_reference_is_not_measured(clock, racers, monkeypatch):
    differs = {"a": "differs from the reference in dQ"}
    monkeypatch.setattr(measuring, "find_mismatch", lambda backend, *_: differs.get(backend.name))
    (group,) = run(clock, names=["a", "b", "aten_flash"])
    assert {point.backend for point in group.points} == {"b"}
    assert group.left_out == {**differs, "aten_flash": "runs on CUDA, not on cpu"}


def test_what_would_take_too_long_is_left_out(clock, racers):
    # a does a backward of the first size in 0.3 seconds; the second is five times as much.
    (group,) = run(clock, prefixes=[0, 8], most_seconds=0.8)
    reasons = {(p.backend, p.prefix_tokens): p.reason for p in group.points}
    assert reasons["a", 0] is reasons["b", 8] is None
    assert reasons["a", 8].startswith("would take about 1.")
    assert racers["a"].forwards < 10


def test_what_does_not_fit_is_left_out(clock, racers, monkeypatch):
    monkeypatch.setattr(measuring, "host_memory_bytes", lambda: 2 * load(4, 8).num_bytes - 2)
    (group,) = run(clock, prefixes=[0, 8])
    assert [p.reason is None for p in group.points] == [True, True, False, False]
    assert "do not fit into" in group.points[-1].reason


def point(backend, prefix, forward, backward, chunk=4096):
    together = 3.5 / (1 / forward + 2.5 / backward)
    rates = (forward * 1e12, backward * 1e12, together * 1e12)
    return Point(backend, chunk, prefix, 1e-3, 2.5e-3, *rates)


def group(*points):
    return Group(
        dtype="bfloat16",
        heads=Heads(32, 8, 128),
        window_tokens=None,
        left_out={"flash_attention_3": "is not installed"},
        auto="cudnn: 612 TFLOPS",
        points=list(points),
    )


POINTS = (
    point("aten_flash", 0, 400.0, 300.0),
    point("cudnn", 0, 300.0, 250.0),
    point("aten_flash", 32768, 450.0, 400.0),
    point("cudnn", 32768, 700.0, 600.0),
    Point("reference", 4096, 32768, reason="would take about 12.0 s"),
)


def written(group):
    sink = io.StringIO()
    Console(file=sink, width=140, color_system=None).print(backends_table(group))
    return sink.getvalue()


def test_the_table_has_every_size_and_the_gain_over_the_common_kernel():
    text = written(group(*POINTS))
    first, second = (line for line in text.splitlines() if "│" in line)
    cells = [cell.strip() for cell in first.strip("│").split("│")]
    assert cells == ["4K", "0", "400 / 300", "300 / 250", "", "1.00"]
    cells = [cell.strip() for cell in second.strip("│").split("│")]
    assert cells == ["4K", "32K", "450 / 400", "700 / 600", "-", "1.51"]
    assert '"auto" takes cudnn: 612 TFLOPS' in text
    assert "flash_attention_3 is not installed" in text
    assert "reference: would take about 12.0 s" in text


def test_without_the_common_kernel_there_is_no_gain():
    assert "best /" not in written(group(POINTS[1]))


def test_the_best_is_by_forward_and_backward_together():
    row = by_size(group(*POINTS))[4096, 0]
    assert best_of(row) is POINTS[0]
    assert best_of({"reference": POINTS[-1]}) is None


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ConfigError, match="Nothing was measured"):
        draw_backends([group(POINTS[-1])], tmp_path / "kernels.png", title="")
