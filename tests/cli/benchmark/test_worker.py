"""Which errors are about memory, and the row that such an error leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sppo_hf.cli.benchmark import worker
from sppo_hf.cli.benchmark.results import Numbers, Row
from sppo_hf.cli.benchmark.worker import memory_reason, run_job
from sppo_hf.errors import BudgetError, ConfigError, OffloadError
from tests.cli.benchmark.tiny import tiny_job


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
    reason = memory_reason(error)
    assert reason is not None
    assert reason.startswith(start)
    assert "\n" not in reason


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2"), ConfigError("dtype")])
def test_errors_about_something_else(error: Exception) -> None:
    assert memory_reason(error) is None


def test_real_host_memory_runs_out() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert memory_reason(caught.value) is not None


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
