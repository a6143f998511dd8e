"""The script: packed and plain traces, a table, JSON, and what is no trace."""

import gzip
import json
from pathlib import Path

import pytest

from recipes.benchmarks.trace_summary import main
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


@pytest.mark.parametrize("content", ["no JSON", "[]", '{"other": 1}', "7"])
def test_what_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    assert main([str(path)]) == 2
    assert "cannot be summarised" in capsys.readouterr().err
    assert main([str(tmp_path / "absent.json")]) == 2
