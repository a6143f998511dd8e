"""What a token costs by kernel class: from rows and traces made by hand."""

from __future__ import annotations

import gzip
import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from sppo_hf.cli.benchmark.driver import trace_path
from sppo_hf.cli.benchmark.trace_summary import FILE, profile_table, profiles
from tests.cli.benchmark.made_rows import ended_row, speed_row
from tests.cli.benchmark.test_trace_summary import made


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


def test_a_trace_is_read_once_and_again_when_it_is_new(tmp_path: Path) -> None:
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


def test_without_traces_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert profiles([speed_row("sppo-auto", 100, 1.0)], tmp_path) == []
    assert not (tmp_path / FILE).exists()
