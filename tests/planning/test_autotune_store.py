"""Races are kept once, whole, and whoever publishes first decides."""

import json
import logging
import os
import threading
from pathlib import Path

import pytest

from sppo_hf.planning import autotune_store as race_store
from sppo_hf.planning.autotune_store import (
    AutotuneResult,
    Timing,
    autotune_path,
    format_tflops,
    publish_autotune,
    read_autotune,
)


def result(*seconds: float, **changes: object) -> AutotuneResult:
    laps = tuple(Timing("abcdefgh"[i], s, 1e12 / s) for i, s in enumerate(seconds))
    return AutotuneResult("4K x 32K", laps, {"z": "is not installed"}, **changes)  # type: ignore[arg-type]


def test_what_is_published_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "one.json"
    assert read_autotune(path) is None
    assert publish_autotune(path, result(1.0, 2.0)) == result(1.0, 2.0)
    assert read_autotune(path) == result(1.0, 2.0)
    assert [file.name for file in path.parent.iterdir()] == ["one.json"]


def test_the_first_stays(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    publish_autotune(path, result(1.0, 2.0))
    assert publish_autotune(path, result(2.0, 1.0)) == result(1.0, 2.0)


def test_many_at_once_all_read_the_same(tmp_path: Path) -> None:
    path, ready = tmp_path / "one.json", threading.Barrier(8)
    told: list[AutotuneResult] = []

    def rank(number: int) -> None:
        ready.wait()
        told.append(publish_autotune(path, result(1.0, 2.0 + number)))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 8
    assert set(told_laps := [one.laps for one in told]) == {told_laps[0]}
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("kept", [result(1.0, lasting=False), result()])
def test_what_may_be_otherwise_next_time_is_not_kept(tmp_path: Path, kept: AutotuneResult) -> None:
    assert publish_autotune(tmp_path / "one.json", kept) is kept
    assert list(tmp_path.iterdir()) == []


GOOD = {"format": 1, "load": "x", "left_out": {}}
DAMAGED = {
    "no JSON": "{",
    "no object": "[]",
    "no laps": json.dumps({**GOOD, "laps": []}),
    "a lap without a rate": json.dumps({**GOOD, "laps": [{"name": "a", "seconds": 1.0}]}),
    "no seconds": json.dumps(
        {**GOOD, "laps": [{"name": "a", "seconds": 0, "flops_per_second": 1}]}
    ),
    "another format": json.dumps(
        {**GOOD, "format": 9, "laps": [{"name": "a", "seconds": 1, "flops_per_second": 1}]}
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_replaced(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "one.json"
    path.write_text(DAMAGED[case])
    with caplog.at_level(logging.WARNING, logger="sppo_hf"):
        assert read_autotune(path) is None
    assert "are measured again" in caplog.text
    assert publish_autotune(path, result(1.0)) == result(1.0)
    assert read_autotune(path) == result(1.0)


def test_no_folder_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert publish_autotune(tmp_path / "file" / "one.json", result(1.0)) == result(1.0)


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_link)
    path = tmp_path / "one.json"
    assert publish_autotune(path, result(1.0)) == result(1.0)
    assert [file.name for file in tmp_path.iterdir()] == ["one.json"]


def test_the_place_hangs_on_all_of_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    path = autotune_path("NVIDIA H100 80GB HBM3", {"torch": "2.13", "backends": ["a", "b"]})
    assert path.parent == tmp_path / "sppo_hf" / "attention"
    assert path.name.startswith("nvidia-h100-80gb-hbm3-")
    assert path == autotune_path("NVIDIA H100 80GB HBM3", {"backends": ["a", "b"], "torch": "2.13"})
    others = [
        autotune_path("NVIDIA H100", {"torch": "2.13", "backends": ["a", "b"]}),
        autotune_path("NVIDIA H100 80GB HBM3", {"torch": "2.14", "backends": ["a", "b"]}),
        autotune_path("NVIDIA H100 80GB HBM3", {"torch": "2.13", "backends": ["b", "a"]}),
    ]
    assert len({path, *others}) == 4
    monkeypatch.setattr(race_store, "_FORMAT", 2)
    assert autotune_path("NVIDIA H100 80GB HBM3", {"torch": "2.13", "backends": ["a", "b"]}) != path


def test_ranking_takes_the_listed_order_among_close_ones() -> None:
    assert [lap.name for lap in result(1.02, 1.0, 2.05, 2.0, 0.5).ranking()] == list("eabcd")


def test_the_race_in_words() -> None:
    raced = AutotuneResult(
        "4K x 32K", (Timing("aten_flash", 2.0, 431.4e12), Timing("cudnn", 1.0, 612.2e12)), {}
    )
    assert raced.text("cudnn") == "cudnn: 612 TFLOPS at 4K x 32K, aten_flash 431"
    assert raced.text("aten_flash") == "aten_flash: 431 TFLOPS at 4K x 32K, cudnn 612"
    assert [format_tflops(x) for x in (99.94e12, 98.14e12, 3.251e10)] == ["99.9", "98.1", "0.0325"]
