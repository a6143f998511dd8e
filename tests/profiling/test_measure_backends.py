"""Backends beside each other, on a clock of their own: what is measured, and what is left out."""

import json

import pytest
import torch

from sppo_hf.attention.backends import select
from sppo_hf.attention.backends.autotune import Workload
from sppo_hf.attention.backends.base import AttentionSpec
from sppo_hf.profiling import measure_backends as measuring
from sppo_hf.profiling.measure_backends import LayerHeads, measure_backends
from tests.attention.backends.racers import Racer, raising
from tests.pipeline.fake_time import CPU, FakeClock

HEADS = LayerHeads(4, 2, 8)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def racers(monkeypatch, clock):
    found = {name: Racer(name, clock, seconds) for name, seconds in (("a", 0.4), ("b", 0.2))}
    for name, racer in found.items():
        monkeypatch.setitem(select.BACKENDS, name, (lambda racer=racer: racer,))
    monkeypatch.setattr(measuring, "find_mismatch", lambda *_: None)
    select._find_on.cache_clear()
    yield found
    select._find_on.cache_clear()


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


def test_real_ones_on_the_cpu_as_json():
    groups = list(
        measure_backends(
            CPU, dtypes=[torch.bfloat16], heads=[HEADS], chunks=[16], prefixes=[0, 16],
            most_seconds=0.02,
        )
    )  # fmt: skip
    group = json.loads(json.dumps(groups[-1].to_json()))
    assert group["dtype"] == "bfloat16"
    assert group["heads"] == {"query": 4, "key_value": 2, "size": 8}
    assert {point["backend"] for point in group["points"]} == {"cpu_flash", "reference"}
    assert all(point["flops_per_second"] > 0 for point in group["points"])
    assert group["auto"].startswith("cpu_flash: CPU, bfloat16")
    assert "flash_attention_3" in group["left_out"]
