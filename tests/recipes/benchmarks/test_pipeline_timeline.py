"""The recipe as it is started from a shell, on two gloo ranks and a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.launch import ROOT, environment

pytest.importorskip("matplotlib")
pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_numbers_picture_and_trace(tmp_path: Path) -> None:
    figure, trace = tmp_path / "step.png", tmp_path / "step.json"
    sizes = ["--tokens", "32", "--hidden", "64", "--layers", "2", "--vocabulary", "64"]
    sizes += ["--micro-batches", "2", "--chunks", "2", "--steps", "1"]
    script = ROOT / "recipes/benchmarks/pipeline_timeline.py"
    result = subprocess.run(
        [sys.executable, str(script), *sizes, "--figure", str(figure), "--trace", str(trace)],
        env=environment(0, 1, 0),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    lines = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}
    measured, simulated = float(lines["measured"][0]), float(lines["simulated"][0])
    assert measured > 0
    assert simulated > 0
    assert float(lines["difference"][0]) == pytest.approx(measured - simulated, abs=2e-3)
    assert figure.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    # Four units, forward and backward, on two ranks, twice.
    kinds = [e["name"] for e in events if e["ph"] == "X" and e["name"][1] in "FB"]
    assert len(kinds) == 32
