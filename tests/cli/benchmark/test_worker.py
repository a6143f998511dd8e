"""Every contender trains for real, with the same loss; what is read off the run makes sense."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from sppo_hf.cli.benchmark import worker
from sppo_hf.cli.benchmark.contenders import BASES, OURS, TODAY
from sppo_hf.cli.benchmark.results import Numbers, Row
from sppo_hf.cli.benchmark.trace_summary import divide, total_seconds
from sppo_hf.cli.benchmark.worker import (
    Measurement,
    UnitClock,
    _limit_memory,
    host_peak_bytes,
    memory_numbers,
    out_of_memory_reason,
    run_job,
)
from sppo_hf.engine.trace_profile import trace_config
from sppo_hf.errors import BudgetError, ConfigError, OffloadError
from sppo_hf.planning.config_file import load_config
from sppo_hf.planning.model_profile import Training
from sppo_hf.planning.model_shape import ModelShape, step_flops
from tests.cli.benchmark.made_rows import JOB
from tests.cli.benchmark.tiny import tiny_job
from tests.sweeps import ALL


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def _cpu_offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let those who offload from an accelerator take the CPU for one, without pinning."""
    own = torch.autograd.graph.save_on_cpu

    def unpinned(*_: Any, **__: Any) -> Any:
        return own(pin_memory=False)

    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", unpinned)

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        # Optimizers ask whether there is one that is available; TRL asks for its name.
        return None if check_available else torch.device("cpu")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)
    trl = pytest.importorskip("trl.models.activation_offloading")
    on_cpu = partial(trl.get_act_offloading_ctx_manager, use_pin_memory=False, use_streams=False)
    monkeypatch.setattr(trl, "get_act_offloading_ctx_manager", on_cpu)


def measure(folder: Path, contender: str, **changes: Any) -> Numbers:
    return Measurement(tiny_job(folder, contender, **changes)).run()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    AcceleratorState._reset_state(reset_partial_state=True)
    return measure(tmp_path_factory.mktemp("plain"), "plain")


@pytest.mark.usefixtures("_cpu_offloads")
@pytest.mark.parametrize(
    "contender", [*(name for name in BASES if name != "plain"), "checkpointing+tiled"]
)
def test_every_contender_trains_with_the_loss_of_plain(
    contender: str, plain: Numbers, tmp_path: Path
) -> None:
    if contender == "alst":
        pytest.importorskip("deepspeed", reason="is installed by who compares with it")
    if contender == "unsloth":
        pytest.importorskip("unsloth", reason="is installed by who compares with it")
    # The paper's rule needs a device of which something is known.
    numbers = measure(tmp_path, contender, hardware="cpu" if contender in OURS else None)
    assert numbers.first_loss == pytest.approx(plain.first_loss, rel=1e-3)
    # One step later the weights have changed alike.
    assert numbers.loss == pytest.approx(plain.loss, rel=1e-3)
    assert len(numbers.step_seconds) == len(numbers.warm_up_seconds) == 1
    assert numbers.median_step_seconds == numbers.step_seconds[0] > 0
    assert numbers.tokens_per_second == pytest.approx(64 / numbers.step_seconds[0])
    assert numbers.model_flops == plain.model_flops
    kernel = "sdpa's choice" if contender == TODAY else "cpu_flash"
    assert (numbers.kernel, numbers.mfu) == (kernel, None)
    assert numbers.host_peak_bytes is not None
    assert bool(numbers.chunk_lengths) is (contender in OURS)
    if contender in OURS:
        assert sum(numbers.chunk_lengths) == 64
        chunks = len(numbers.chunk_lengths)
        assert len(numbers.forward_chunk_seconds) == chunks
        assert len(numbers.backward_chunk_seconds) == chunks
        assert numbers.median_step_seconds is not None
        inside = sum(numbers.forward_chunk_seconds) + sum(numbers.backward_chunk_seconds)
        assert 0 < inside < numbers.median_step_seconds
        assert numbers.stall_seconds is not None
        assert numbers.planned_host_bytes is not None
        assert numbers.correction is not None
        assert {*numbers.correction.values()} == {1.0}, "too few steps to correct anything"


@pytest.mark.usefixtures("_cpu_offloads")
@pytest.mark.parametrize("lora_dtype", ["float32", "bfloat16"] if ALL else ["float32"])
def test_adapters_train_alike(tmp_path: Path, lora_dtype: str) -> None:
    pytest.importorskip("peft")
    found = {}
    for contender in ("plain", "checkpointing", "sppo-full", "ideal"):
        numbers = measure(
            tmp_path, contender, lora_rank=4, lora_dtype=lora_dtype, dtype="bfloat16", steps=3
        )
        AcceleratorState._reset_state(reset_partial_state=True)
        found[contender] = numbers.first_loss, numbers.loss
    for losses in found.values():
        assert losses == pytest.approx(found["plain"], rel=1e-2)


def test_flops_are_those_of_the_model(plain: Numbers, tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    training = Training(dtype_bytes=4, parameter_bytes=4)
    shape = ModelShape.from_profile(trace_config(load_config(job.model), training))
    assert plain.model_flops == step_flops(shape, 1, 64)
    assert plain.model_tflops is not None
    assert plain.median_step_seconds is not None
    speed = step_flops(shape, 1, 64) / plain.median_step_seconds
    assert plain.model_tflops == pytest.approx(speed / 1e12)


def test_several_steps_have_a_median_and_chunks(tmp_path: Path) -> None:
    numbers = measure(
        tmp_path, "sppo-auto", steps=3, warm_up=0, device_memory="3.5MiB", total_tokens=1024
    )
    assert len(numbers.step_seconds) == 3
    assert numbers.median_step_seconds == sorted(numbers.step_seconds)[1]
    assert len(numbers.chunk_lengths) > 1, "a small budget makes short chunks"
    assert len(numbers.forward_chunk_seconds) == len(numbers.chunk_lengths)


def test_fewer_layers_and_numbers_before_the_end(tmp_path: Path) -> None:
    measurement = Measurement(tiny_job(tmp_path, "ideal", layers=1))
    seen: list[Numbers] = []
    assert measurement.known().host_peak_bytes is None, "nothing has run"
    numbers = measurement.run(lambda: seen.append(measurement.known()))
    assert [len(known.step_seconds) for known in seen] == [0, 0, 1]
    assert [known.first_loss is None for known in seen] == [True, False, False]
    whole = Measurement(tiny_job(tmp_path, "ideal")).known()
    assert numbers.model_flops is not None
    assert whole.model_flops is not None
    assert numbers.model_flops < whole.model_flops


def test_one_more_step_is_traced(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "trace.json.gz"
    numbers = measure(tmp_path, "sppo-none", trace=str(path))
    assert len(numbers.step_seconds) == 1, "the traced step is not measured"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [str(event.get("name")) for event in events]
    assert names.count("sppo/step") == 1
    assert names.count("sppo/forward layer 0 chunk 0") == 1
    step = divide(events)
    assert not step.on_device
    assert total_seconds([*step.compute, *step.launching]) == pytest.approx(
        total_seconds([step.step])
    )
    assert step.compute


def test_the_longest_length_is_predicted(tmp_path: Path) -> None:
    small = measure(tmp_path, "sppo-auto", predict=True, device_memory="64MiB")
    AcceleratorState._reset_state(reset_partial_state=True)
    large = measure(tmp_path, "sppo-auto", predict=True, device_memory="256MiB")
    assert small.planned_longest_tokens is not None
    assert large.planned_longest_tokens is not None
    assert 64 <= small.planned_longest_tokens < large.planned_longest_tokens


def test_a_budget_limits_all_contenders_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", given.append)
    for device in ("cuda", "cpu"):
        _limit_memory(JOB.replace(device_memory="40GiB"), torch.device(device))
    _limit_memory(JOB, torch.device("cuda"))
    assert given == [0.5]


def test_peaks_of_a_device_are_those_of_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "max_memory_allocated": 60,
        "max_memory_reserved": 70,
        "memory_reserved": 65,
        "mem_get_info": (20, 100),
        "memory_stats": {},
        "host_memory_stats": {},
    }
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, found=value: found)
    device = torch.device("cuda")
    numbers = memory_numbers(device, [(50, 55), (62, 80)])
    assert (numbers["device_allocated_bytes"], numbers["device_reserved_bytes"]) == (62, 80)
    assert numbers["device_step_bytes"] == (50, 62)
    assert numbers["device_outside_bytes"] == 100 - 20 - 65
    assert memory_numbers(device)["device_allocated_bytes"] == 60


def test_stalls_are_those_of_the_step_that_ended() -> None:
    clock = UnitClock(torch.device("cpu"))
    assert clock.stall_seconds(slice(0, 9)) is None
    for total in (0.5, 0.75, 1.75):
        clock.step_ended(total)
    assert clock.stall_seconds(slice(1, 3)) == pytest.approx((0.25 + 1.0) / 2)


def test_the_host_peak_is_of_this_process(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t 9999 kB\nVmHWM:\t    1234 kB\nThreads:\t1\n")
    assert host_peak_bytes(status) == 1234 * 1024
    assert host_peak_bytes(tmp_path / "missing") > 2**20


@pytest.mark.parametrize(
    ("error", "start"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "device: CUDA out of memory."),
        (MemoryError(), "host: MemoryError"),
        (BudgetError("80 GiB"), "refused before the first step: 80 GiB"),
        (OffloadError("pinning"), "pinned host memory: pinning"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), "host or device: Def"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), "host or device: CUBLAS"),
        (RuntimeError("CUDA error: out of memory"), "host or device: CUDA error"),
    ],
)
def test_errors_about_memory(error: Exception, start: str) -> None:
    reason = out_of_memory_reason(error)
    assert reason is not None
    assert reason.startswith(start)
    assert "\n" not in reason


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2"), ConfigError("dtype")])
def test_errors_about_something_else(error: Exception) -> None:
    assert out_of_memory_reason(error) is None


def test_real_host_memory_runs_out() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory_reason(caught.value) is not None


class Failing(worker.Measurement):
    """Comes as far as its weights."""

    error: Exception = torch.OutOfMemoryError("CUDA out of memory")

    def run(self, on_step=lambda: None) -> Numbers:  # type: ignore[no-untyped-def]
        on_step()
        raise self.error

    def known(self) -> Numbers:
        return Numbers(host_loaded_bytes=7)


def test_out_of_memory_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "Measurement", Failing)
    rows: list[Row] = []
    run_job(tiny_job(tmp_path), rows.append)
    assert [row.status for row in rows] == ["killed", "out of memory"]
    assert rows[-1].reason == "device: CUDA out of memory"
    assert rows[-1].numbers.host_loaded_bytes == 7
    # A build's version may have more behind it than the package's.
    assert torch.__version__.startswith(rows[-1].environment["versions"]["torch"])


def test_other_errors_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "Measurement", Failing)
    monkeypatch.setattr(Failing, "error", RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        run_job(tiny_job(tmp_path), lambda _: None)


@pytest.mark.gpu
def test_a_waiting_worker_holds_nothing_of_the_device() -> None:
    script = """
import ctypes
from sppo_hf.cli.benchmark import worker
cuda, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
assert not active.value, "imports made a context"
"""
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[3], check=True)
