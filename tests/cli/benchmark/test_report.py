"""Tables and lines of progress, from rows alone."""

from __future__ import annotations

import builtins
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sppo_hf.cli.benchmark.report import draw, lines, progress_line, tables
from sppo_hf.cli.benchmark.results import Numbers, Row
from sppo_hf.errors import ConfigError
from tests.cli.benchmark.made_rows import ENVIRONMENT, JOB, ended_row, many_rows, speed_row


def text(rows: Sequence[Row], width: int = 160) -> str:
    sink = io.StringIO()
    Console(file=sink, width=width, color_system=None).print(tables(rows))
    return sink.getvalue()


def cells(shown: str, *start: str) -> list[str]:
    """The line whose first words these are, cut at wide gaps."""
    for line in shown.splitlines():
        found = [part.strip() for part in line.strip().split("  ") if part.strip()]
        if found[: len(start)] == list(start):
            return found
    raise AssertionError(f"no line starts with {start} in\n{shown}")


def test_speeds_have_ratios_to_checkpointing_and_to_the_ideal() -> None:
    rows = [
        speed_row("checkpointing", 65_536, 20.0),
        speed_row("sppo-auto", 65_536, 16.0, stall_seconds=0.16, pinned_bytes=2**30),
        speed_row("ideal", 65_536, 15.2, status="extrapolated", device_allocated_bytes=2**38),
    ]
    shown = text(rows)
    assert "llama-3.1-8b, bfloat16, LoRA r=16 in float32, on Pretended GPU" in shown
    first = cells(shown, "65,536", "checkpointing")
    assert first[2:] == ["20.0 s", "3,277", "1.00", "0.76", "321", "32.5%"]
    ours = cells(shown, "sppo-auto")
    assert ours[1:] == ["16.0 s", "4,096", "1.25", "0.95", "321", "32.5%", "1.00 GiB", "1.0%"]
    assert cells(shown, "ideal")[1:3] == ["~15.2 s", "~4,312"]
    assert "~256 GiB" in shown
    assert "causal attention once, no recomputation" in shown
    rows.append(speed_row("ideal+liger", 65_536, 14.4))
    assert cells(text(rows), "sppo-auto")[4] == "0.90", "to the faster of both"
    assert cells(text(rows), "ideal")[4] == "0.95"
    assert "device 80.0 GiB, host 256 GiB" in shown


def test_ratios_are_to_the_fastest_checkpointing_and_to_what_users_have_today() -> None:
    rows = [
        speed_row("checkpointing-offload+tiled", 65_536, 22.0, kernel="cudnn"),
        speed_row("checkpointing+tiled", 65_536, 20.0, kernel="cudnn"),
        speed_row("checkpointing-default", 65_536, 10.0, kernel="sdpa's choice"),
        speed_row("sppo-auto", 65_536, 16.0, kernel="cudnn"),
    ]
    shown = text(rows)
    assert cells(shown, "sppo-auto")[3:5] == ["1.25", "0.62"]
    assert "attention kernel: cudnn" in shown
    assert "Kernels differ" not in shown
    rows.append(speed_row("checkpointing-default+tiled", 65_536, 8.0, kernel="sdpa's choice"))
    assert cells(text(rows), "sppo-auto")[3:5] == ["1.25", "0.50"]
    rows.append(speed_row("ideal", 65_536, 15.0, kernel="aten_flash"))
    assert "Kernels differ" in text(rows)


def test_rows_that_were_not_measured_say_so() -> None:
    shown = text(many_rows())
    assert "out of memory" in cells(shown, "32,768", "plain")
    assert "plain: out of memory: device: CUDA out of memory (32,768, 65,536, 131,072)" in shown
    assert "checkpointing+liger: not available: liger-kernel is not installed (8,192" in shown
    assert "killed" in cells(shown, "checkpointing", "killed")


def test_a_run_that_ended_early_shows_its_memory() -> None:
    row = ended_row("plain", 8192, "out of memory", "device")
    row = Row.from_dict({**row.to_dict(), "numbers": {"device_allocated_bytes": 3 * 2**30}})
    assert cells(text([row]), "8,192", "plain") == ["8,192", "plain", "out of memory", "3.00 GiB"]


def test_empty_columns_are_left_out() -> None:
    shown = text([speed_row("plain", 8192, 1.0, mfu=None)])
    assert "MFU" not in shown.splitlines()[2]
    assert "of chkpt" not in shown.splitlines()[2]


def test_longest_lengths_stand_beside_the_estimate() -> None:
    rows = [
        Row(
            kind="longest",
            status="measured",
            job=JOB.replace(contender="sppo-auto"),
            reason="1,052,672 tokens: out of memory, device: full",
            numbers=Numbers(
                longest_tokens=1_048_576, failed_tokens=1_052_672, planned_longest_tokens=1_000_000
            ),
            environment=ENVIRONMENT,
        ),
        Row(kind="longest", status="not available", job=JOB, reason="peft is not installed"),
    ]
    shown = text(rows)
    ours = cells(shown, "sppo-auto")
    assert ours[1:4] == ["1,048,576", "1,052,672", "1,000,000 (-5%)"]
    assert "peft is not installed" in shown


def test_different_settings_stand_apart() -> None:
    shown = text([speed_row("plain", 64, 1.0), speed_row("plain", 64, 2.0, job={"dtype": "x"})])
    assert shown.count("on Pretended") == 2


def test_no_rows() -> None:
    assert text([]).strip() == "No results yet."


def test_progress() -> None:
    def line(row: Row) -> str:
        return progress_line(row, done=3, total=40, elapsed_seconds=125.9)

    row = speed_row("sppo-auto", 8192, 2.0, device_allocated_bytes=2**34)
    assert line(row) == "2:05 [3/40] sppo-auto at 8,192: 4,096 tokens/s, 16.0 GiB, 12 s"
    row = ended_row("plain", 65_536, "out of memory", "device: full")
    assert line(row) == "2:05 [3/40] plain at 65,536: out of memory: device: full"
    row = speed_row("plain", 4096, 1.0, kind="try")
    assert "[3/40] try plain at 4,096" in line(row)
    row = speed_row("plain", 4096, 1.0, kind="longest", longest_tokens=12_288)
    assert line(row) == "2:05 [3/40] plain: longest 12,288 tokens, 12 s"
    assert progress_line(row, done=3, total=0, elapsed_seconds=1.0).startswith("0:01 [3] ")


def test_a_line_for_everyone_who_trained() -> None:
    found = {line.contender: line for line in lines(many_rows(), "tokens_per_second")}
    assert list(found) == ["plain", "checkpointing", "sppo-auto", "ideal"]
    assert [tokens for tokens, _ in found["checkpointing"].points] == [8192, 32_768, 65_536]
    assert found["ideal"].extrapolated == {32_768, 65_536, 131_072}
    assert found["sppo-auto"].extrapolated == frozenset()
    speeds = [speed for _, speed in found["sppo-auto"].points]
    assert speeds == sorted(speeds, reverse=True)


def test_every_group_gets_a_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    other = speed_row("plain", 4096, 1.0, job={"lora_rank": None}, host_peak_bytes=2**30)
    files = draw([*many_rows(), other], tmp_path / "new")
    assert [file.name for file in files] == ["results.png", "results-2.png"]
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG")
        assert file.stat().st_size > 20_000


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert draw([ended_row("plain", 64, "failed", "x")], tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return own(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match="--no-picture"):
        draw([speed_row("plain", 64, 1.0)], tmp_path)
