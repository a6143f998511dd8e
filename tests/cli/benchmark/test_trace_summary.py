"""A step's time divided, on a trace made by hand whose every microsecond is known."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sppo_hf.cli.benchmark.driver import trace_path
from sppo_hf.cli.benchmark.trace_summary import (
    FILE,
    REST,
    STEP_LABEL,
    Division,
    divide,
    profile_table,
    profiles,
    read_events,
    total_seconds,
)
from tests.cli.benchmark.made_rows import ended_row, speed_row

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


def parts(step: Division) -> list[float]:
    """Microseconds of compute, exposed copies, launch gaps and the rest."""
    spans = (step.compute, step.copying, step.launching, step.waiting)
    return [1e6 * total_seconds(of_part) for of_part in spans]


def test_every_microsecond_is_somewhere() -> None:
    step = divide(made())
    assert step.on_device
    assert step.step == (0, 1000)
    assert parts(step) == pytest.approx([500, 50 + 50, 100 + 50 + 20 + 200, 30])
    assert sum(parts(step)) == pytest.approx(1000)


def test_a_device_that_ends_after_the_host() -> None:
    late = [*made(), event("late", "kernel", 950, 1200)]
    step = divide(late)
    assert step.step == (0, 1200)
    assert total_seconds(step.compute) == pytest.approx(750e-6)


def test_without_a_label_the_trace_is_the_step() -> None:
    events = [e for e in made() if e["name"] != STEP_LABEL and e.get("ts", 0) >= 0]
    step = divide(events)
    assert step.step == (100, 800)
    assert total_seconds(step.compute) == pytest.approx(500e-6)


def test_kernel_classes_add_up_to_compute() -> None:
    names = {
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "matrix products",
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT": "matrix products",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>": "matrix products",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, ...>": "matrix products",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_...>": "matrix products",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
        "fmha_cutlassB_bf16_aligned_128x64_k128_sm80(...)": "attention",
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90": "attention",
        "void flash::flash_bwd_dq_dk_dv_loop_kernel<...>": "attention",
        "ncclDevKernel_SendRecv": "messages",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)": "messages",
        "void at::native::CatArrayBatchedCopy<...>": "copies on the device",
        "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda"
        "(...)>": "copies on the device",
        "void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<...>>": (
            "copies on the device"
        ),
        "void at::native::cunn_LogSoftMaxForward<...>": "loss",
        "liger_cross_entropy_kernel": "loss",
        "void at::native::multi_tensor_apply_kernel<FusedAdam...>": "optimizer",
        "void at::native::vectorized_elementwise_kernel<4, silu>": REST,
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps...>>": REST,
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": REST,
        "triton_poi_fused_cat_mul_neg_1": REST,
        "_swiglu_forward_kernel": REST,
        "_rms_norm_forward_kernel": REST,
    }
    events = [
        event(name, "kernel", 100 * at, 100 * at + 10 + at, tid=7) for at, name in enumerate(names)
    ]
    # A copy of 40 beside a product of 10: only what the product leaves is the copy's.
    events.append(event("direct_copy_kernel", "kernel", 95, 120, tid=9))
    step = divide(events)
    expected: dict[str, float] = {}
    for at, name in enumerate(names.values()):
        expected[name] = expected.get(name, 0.0) + (10 + at) * 1e-6
    expected["copies on the device"] += (5 + 9) * 1e-6
    assert step.class_seconds() == pytest.approx(expected)
    assert sum(step.class_seconds().values()) == pytest.approx(total_seconds(step.compute))
    per_token = step.microseconds_per_token(4)
    assert per_token["messages"] == pytest.approx(1e6 * expected["messages"] / 4)
    assert sum(per_token.values()) == pytest.approx(1e6 * total_seconds([step.step]) / 4)


def test_a_real_trace_of_a_cpu(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x, weight = torch.rand(300, 200, requires_grad=True), torch.rand(200, 200)
    with torch.profiler.profile() as profiler, torch.profiler.record_function(STEP_LABEL):
        (torch.nn.functional.silu(x @ weight) @ weight).sum().backward()
    path = tmp_path / "trace.json.gz"
    profiler.export_chrome_trace(str(path))
    step = divide(read_events(path))
    assert not step.on_device
    assert step.class_seconds()["matrix products"] > 0
    assert step.class_seconds()[REST] > 0
    assert step.class_seconds()["attention"] == 0


def test_a_trace_without_a_device() -> None:
    on_host = ("cpu_op", "user_annotation")
    step = divide(e for e in made() if e.get("cat") in on_host)
    assert not step.on_device
    assert parts(step) == pytest.approx([75 + 30, 0, 1000 - 105, 0])


def test_nothing_ran() -> None:
    with pytest.raises(ValueError, match="neither kernels nor operators"):
        divide([event("a", "user_annotation", 0, 1)])


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
        expected = [len(kernel), len(copy - kernel), len(rest - wait), len(rest & wait)]
        assert parts(divide(events)) == pytest.approx(expected)


def test_contenders_are_laid_side_by_side(tmp_path: Path) -> None:
    rows = [
        speed_row("sppo-auto", 100, 0.0008),
        speed_row("ideal", 100, 0.0005),  # not traced
        speed_row("plain", 100, 0.0007),  # its worker was killed while it wrote
        ended_row("checkpointing", 100, "out of memory", "device"),
    ]
    trace = gzip.compress(json.dumps({"traceEvents": made()}).encode())
    trace_path(tmp_path, "sppo-auto", 100).write_bytes(trace)
    trace_path(tmp_path, "plain", 100).write_bytes(trace[:100])
    found = profiles(rows, tmp_path)
    assert json.loads((tmp_path / FILE).read_text()) == found
    (one,) = found
    assert one["measured_us_per_token"] == pytest.approx(8.0)
    assert one["traced_us_per_token"] == pytest.approx(10.0)
    assert sum(one["parts_us_per_token"].values()) == pytest.approx(10.0)
    assert one["parts_us_per_token"]["attention"] == pytest.approx(2.0)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(profile_table(found))
    text = console.export_text()
    assert "attention" in text
    assert "messages" not in text, "nobody sent any"
    assert "10.0" in text


def test_a_trace_is_read_once_unless_it_changes(tmp_path: Path) -> None:
    path = trace_path(tmp_path, "sppo-auto", 100)
    path.write_text(json.dumps({"traceEvents": made()}))
    os.utime(path, (1, 1))
    (first,) = profiles([speed_row("sppo-auto", 100, 0.0008)], tmp_path)
    path.write_text("no JSON")
    os.utime(path, (1, 1))
    (again,) = profiles([speed_row("sppo-auto", 100, 0.0004)], tmp_path)
    assert again == {**first, "measured_us_per_token": pytest.approx(4.0)}
    os.utime(path, (2**32, 2**32))
    assert profiles([speed_row("sppo-auto", 100, 0.0008)], tmp_path) == []


def test_without_traces_there_are_no_profiles(tmp_path: Path) -> None:
    assert profiles([speed_row("sppo-auto", 100, 1.0)], tmp_path) == []
    assert not (tmp_path / FILE).exists()
