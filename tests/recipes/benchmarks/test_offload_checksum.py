"""The benchmark of the disk's checks on a tiny model: both ways timed, and bytes counted."""

import json
from pathlib import Path

import pytest

from tests.recipes.tiny import save_tiny_model

FOLDER = Path(__file__).parents[3] / "recipes" / "benchmarks"


def test_checks_are_timed_by_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import offload_checksum

    model, numbers = save_tiny_model(tmp_path / "model"), tmp_path / "numbers.json"
    words = ["--model", str(model), "--tokens", "256", "--chunk-tokens", "64", "--steps", "2"]
    words += ["--threads", "1", "--dir", str(tmp_path), "--json", str(numbers)]
    # Above any limit, `--check` fails.
    monkeypatch.setattr(offload_checksum, "MAX_RATIO", 0.0)
    assert offload_checksum.main([*words, "--check"]) == 1
    taken = json.loads(numbers.read_text())
    assert taken["ratio"] == pytest.approx(taken["seconds_checked"] / taken["seconds_unchecked"])
    # Each byte is summed when it is written and when it is read.
    assert taken["checked_bytes"] > 0
    assert taken["checked_bytes"] % 2 == 0
    assert 0.0 < taken["checksum_cpu_seconds"] < taken["seconds_checked"]
