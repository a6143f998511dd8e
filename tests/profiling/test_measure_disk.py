"""Disk speed: the file goes away, both ways of writing work, and failures name the folder."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sppo_hf.errors import ConfigError
from sppo_hf.profiling import calibrate as module
from sppo_hf.profiling.calibrate import measure_disk

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
    assert not speed.direct
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
