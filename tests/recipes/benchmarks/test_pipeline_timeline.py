"""The recipe on two gloo ranks and a tiny model."""

import json
from pathlib import Path

import pytest

from tests.integrations.launch import ROOT, run_ranks

pytest.importorskip("matplotlib")
pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_numbers_picture_and_trace(tmp_path: Path) -> None:
    figure, trace = tmp_path / "step.png", tmp_path / "step.json"
    sizes = ["--tokens", "32", "--hidden", "64", "--layers", "2", "--vocabulary", "64"]
    sizes += ["--micro-batches", "2", "--chunks", "2", "--steps", "1"]
    script = str(ROOT / "recipes/benchmarks/pipeline_timeline.py")
    argv = [script, *sizes, "--figure", str(figure), "--trace", str(trace)]
    run_ranks("tests.recipes.script_ranks", {"argv": argv}, 1, tmp_path)
    printed = (tmp_path / "rank0.log").read_text().splitlines()
    lines = {line.split()[0]: line.split()[1:] for line in printed if line.strip()}
    measured, simulated = float(lines["measured"][0]), float(lines["simulated"][0])
    assert measured > 0
    assert simulated > 0
    assert float(lines["difference"][0]) == pytest.approx(measured - simulated, abs=2e-3)
    assert figure.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    # Four units, forward and backward, on two ranks, twice.
    kinds = [e["name"] for e in events if e["ph"] == "X" and e["name"][1] in "FB"]
    assert len(kinds) == 32
