"""A step's time divided, on a trace made by hand whose every microsecond is known."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sppo_hf.cli.benchmark.trace_summary import STEP_LABEL, summarise

# Microseconds. The host launches; kernels run on stream 7, copies on streams 8 and 9.
#
#   host     |label 0 ............................................. 1000|
#   stream 7   [100 matmul 300]      [400 flash 600]           [700 norm 800]
#   stream 8             [250 copy 350]                 [650 copy 720]
#   host waits                                    [610 .. 640]


def event(name: str, cat: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start, **more}


def made() -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "process_name", "ts": 0},
        {"ph": "i", "name": "Record Window End", "ts": 2000},
        event(STEP_LABEL, "user_annotation", 0, 1000, tid=1),
        event(STEP_LABEL, "gpu_user_annotation", 100, 800, tid=7),
        event("sppo/forward chunk 0", "user_annotation", 10, 320, tid=1),
        event("sppo/forward chunk 0", "gpu_user_annotation", 100, 300, tid=7),
        event("sppo/backward chunk 0", "user_annotation", 320, 900, tid=1),
        event("a kernel of the step before", "kernel", -50, -10, tid=7),
        event("matmul", "kernel", 100, 300, tid=7),
        event("flash", "kernel", 400, 600, tid=7),
        event("side", "kernel", 450, 500, tid=9),
        event("norm", "kernel", 700, 800, tid=7),
        event("Memcpy DtoH", "gpu_memcpy", 250, 350, tid=8),
        event("Memset", "gpu_memset", 650, 720, tid=8),
        event("aten::mm", "cpu_op", 20, 60, tid=1),
        event("aten::embedding", "cpu_op", 60, 95, tid=1),
        event("cudaLaunchKernel", "cuda_runtime", 355, 360, tid=1),
        event("cudaStreamSynchronize", "cuda_runtime", 610, 640, tid=1),
        event("aten::norm", "cpu_op", 660, 690, tid=1),
    ]


def test_every_microsecond_is_somewhere() -> None:
    summary = summarise(made())
    assert summary.on_device
    assert summary.step_seconds == pytest.approx(1000e-6)
    assert summary.compute_seconds == pytest.approx(500e-6)
    assert summary.exposed_copy_seconds == pytest.approx((50 + 50) * 1e-6)
    assert summary.other_seconds == pytest.approx(30e-6)
    assert summary.launch_gap_seconds == pytest.approx((100 + 50 + 20 + 200) * 1e-6)
    assert sum(share for _, share in summary.shares().values()) == pytest.approx(1.0)


def test_the_largest_gaps_are_named() -> None:
    end, *others = summarise(made()).gaps
    assert (end.seconds, end.start_seconds) == pytest.approx((200e-6, 800e-6))
    assert (end.before, end.after, end.unit) == ("norm", "the step ended", "backward chunk 0")
    by_start = sorted(others, key=lambda gap: gap.start_seconds)
    begin, middle = by_start
    assert (begin.before, begin.after, begin.what) == ("the step began", "matmul", "launch gap")
    assert begin.host == "aten::mm"
    assert begin.unit == "", "no unit had begun"
    assert (middle.before, middle.after) == ("matmul", "flash")
    assert middle.unit == "forward chunk 0"
    assert middle.seconds == pytest.approx(100e-6)
    assert summarise(made(), most_gaps=5).gaps[-1].what == "exposed copy"


def test_a_device_that_ends_after_the_host() -> None:
    late = [*made(), event("late", "kernel", 950, 1200)]
    summary = summarise(late)
    assert summary.step_seconds == pytest.approx(1200e-6)
    assert summary.compute_seconds == pytest.approx(750e-6)


def test_without_a_label_the_trace_is_the_step() -> None:
    events = [e for e in made() if e["name"] != STEP_LABEL and e.get("ts", 0) >= 0]
    summary = summarise(events)
    assert summary.step_seconds == pytest.approx(700e-6)
    assert summary.compute_seconds == pytest.approx(500e-6)


def test_a_trace_without_a_device() -> None:
    on_host = ("cpu_op", "user_annotation")
    summary = summarise(e for e in made() if e.get("cat") in on_host)
    assert not summary.on_device
    assert summary.compute_seconds == pytest.approx((75 + 30) * 1e-6)
    assert summary.exposed_copy_seconds == summary.other_seconds == 0
    assert summary.launch_gap_seconds == pytest.approx((1000 - 105) * 1e-6)


def test_nothing_ran() -> None:
    with pytest.raises(ValueError, match="neither kernels nor operators"):
        summarise([event("a", "user_annotation", 0, 1)])


def test_random_traces_agree_with_counting_microseconds() -> None:
    choose = random.Random(0)
    for _ in range(30):
        events = [event(STEP_LABEL, "user_annotation", 0, 400)]
        for name, cat in [("k", "kernel"), ("c", "gpu_memcpy"), ("xSynchronize", "cuda_runtime")]:
            for _ in range(choose.randint(1, 12)):
                start = choose.randint(0, 380)
                events.append(event(name, cat, start, min(400, start + choose.randint(1, 40))))
        covered = {
            cat: {
                us
                for e in events
                if e["cat"] == cat
                for us in range(int(e["ts"]), int(e["ts"] + e["dur"]))
            }
            for cat in ("kernel", "gpu_memcpy", "cuda_runtime")
        }
        kernel, copy, wait = covered.values()
        rest = set(range(400)) - kernel - copy
        summary = summarise(events)
        measured = [seconds * 1e6 for seconds, _ in summary.shares().values()]
        expected = [len(kernel), len(copy - kernel), len(rest - wait), len(rest & wait)]
        assert measured == pytest.approx(expected)
