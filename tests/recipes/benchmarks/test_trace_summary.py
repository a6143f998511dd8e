"""The script: packed and plain traces, a table, JSON, and what is no trace."""

import gzip
import json
from pathlib import Path

import pytest

from recipes.benchmarks.trace_summary import largest_gaps, main
from sppo_hf.cli.benchmark.trace_summary import divide
from tests.cli.benchmark.test_trace_summary import made


@pytest.mark.parametrize("packed", [True, False])
def test_it_prints_where_the_time_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], packed: bool
) -> None:
    content = json.dumps({"traceEvents": made()}).encode()
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(content) if packed else content)
    assert main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "Step of 1 ms" in out
    assert "exposed copy" in out
    assert "37.0%" in out
    assert main([str(path), "--json", "--gaps", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["gaps"]) == 1
    assert found["compute_seconds"] == pytest.approx(500e-6)


def test_the_largest_gaps_are_named() -> None:
    end, *others = largest_gaps(divide(made()), 3)
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
    assert largest_gaps(divide(made()), 5)[-1].what == "exposed copy"


@pytest.mark.parametrize("content", ["no JSON", "[]", '{"other": 1}', "7"])
def test_what_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    assert main([str(path)]) == 2
    assert "cannot be summarised" in capsys.readouterr().err
    assert main([str(tmp_path / "absent.json")]) == 2
