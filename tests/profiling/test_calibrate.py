"""A whole calibration with small sizes, and what it refuses before it starts."""

import time
from pathlib import Path

import pytest
import torch

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.device_facts import device_facts, device_versions
from sppo_hf.errors import ConfigError
from sppo_hf.planning.hardware import (
    HardwareProfile,
    profile_for,
    profile_from_json,
    profile_to_json,
    save_profile,
)
from sppo_hf.profiling import calibrate as module
from sppo_hf.profiling.calibrate import SIZES, calibrate
from tests.profiling.fake_time import CPU
from tests.sweeps import ALL

Told = list[tuple[str, int, int]]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[HardwareProfile, Told]:
    told: Told = []
    profile = calibrate(
        CPU,
        dtype_names=["float32", "bfloat16"],
        offload_dir=tmp_path_factory.mktemp("disk"),
        quick=True,
        on_progress=lambda title, done, total: told.append((title, done, total)),
    )
    return profile, told


def test_every_figure_is_filled(quick: tuple[HardwareProfile, Told]) -> None:
    profile, _ = quick
    facts = device_facts(CPU, SPPOConfig())
    assert (profile.name, profile.kind) == (facts.name, "cpu")
    assert not profile.estimated
    assert "too small" in profile.source
    assert "cpu_flash for float32" in profile.source
    for curves in (
        profile.matmul_flops,
        profile.attention_forward_flops,
        profile.attention_backward_flops,
    ):
        assert set(curves) == {"float32", "bfloat16"}
    assert profile.disk_read_bytes_per_second
    assert profile.disk_write_bytes_per_second
    assert profile.disk_bytes
    assert profile.offload_dir
    assert Path(profile.offload_dir).is_absolute()
    assert profile.host_bytes == facts.memory_bytes["host"]
    assert profile.pinned_bytes is None, "a CPU pins nothing"
    assert profile.versions == device_versions(CPU)


def test_progress_counts_up_to_the_end(quick: tuple[HardwareProfile, Told]) -> None:
    _, told = quick
    assert [done for _, done, _ in told] == list(range(10))
    assert {total for _, _, total in told} == {9}
    assert told[0][0] == "disk", "first, because a folder may be refused"
    assert told[-1][0] == "done"


def test_it_is_found_again(
    quick: tuple[HardwareProfile, Told], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, _ = quick
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    save_profile(profile)
    name = device_facts(CPU, SPPOConfig()).name
    assert profile_for(name, "cpu", device_versions(CPU)) == profile
    assert profile_for(name, "cpu", {**device_versions(CPU), "threads": "99"}).estimated
    assert profile_from_json(profile_to_json(profile), where="x") == profile


def test_bad_input_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(module, "measure_matmul", never)
    with pytest.raises(ConfigError, match=r"dtype='bf16'.*nearest, 'bfloat16'"):
        calibrate(CPU, dtype_names=["bf16"])
    with pytest.raises(ConfigError, match=r"device='meta'.*Allowed: cpu"):
        calibrate(torch.device("meta"))
    with pytest.raises(ConfigError, match=r"device='cuda:99'"):
        calibrate(torch.device("cuda", 99))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"offload_dir=.*Not a directory"):
        calibrate(CPU, offload_dir=tmp_path / "file" / "x")


@pytest.mark.parametrize(
    ("kind", "limit", "expected"),
    [("cuda", 2**20, None), ("cuda", 2**40, 2**40), ("cuda", None, None), ("cpu", 2**40, None)],
)
def test_a_lock_limit_that_does_not_bind_is_none(
    monkeypatch: pytest.MonkeyPatch, kind: str, limit: int | None, expected: int | None
) -> None:
    monkeypatch.setattr(module, "lockable_bytes", lambda: limit)
    device = torch.device(kind)
    assert module._pinnable_bytes(device, pinned_so_far_bytes=2**29) == expected


def test_sizes_rise_and_dwarf_the_caches() -> None:
    for sizes in SIZES.values():
        assert list(sizes.tokens) == sorted(set(sizes.tokens))
        assert min(sizes.memory_bytes, sizes.copy_bytes) >= 2**27
        # Matrix products, attention forward and backward, for two dtypes; the disk has 30 seconds.
        assert 6 * sizes.budget_seconds + 30 < (120 if sizes is SIZES["cuda"] else 60)


@pytest.mark.slow
@pytest.mark.skipif(not ALL, reason="measures for most of its minute; bash tests/run.sh --all")
@pytest.mark.timeout(300)
def test_a_cpu_takes_less_than_a_minute() -> None:
    start_seconds = time.perf_counter()
    profile = calibrate(CPU)
    assert time.perf_counter() - start_seconds < 60
    assert profile.matmul_flops["float32"].at(4096) > 1e9
    assert profile.disk_read_bytes_per_second is None


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_gpu_takes_less_than_two_minutes(tmp_path: Path) -> None:
    start_seconds = time.perf_counter()
    profile = calibrate(torch.device("cuda"), offload_dir=tmp_path)
    assert time.perf_counter() - start_seconds < 120
    half = profile.matmul_flops["bfloat16"]
    assert half.at(256) < half.at(8192)
    assert profile.matmul_flops["float32"].at(8192) < half.at(8192)
