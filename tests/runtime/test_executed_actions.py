"""What every rank of a pipeline did is what its program lists, copies included, in that order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.generate import Size, generate
from sppo_hf.schedule.lower import lower
from tests.integrations.launch import run_ranks

pytestmark = pytest.mark.process

ROWS, CHUNKS = 3, 4


def _launch(runs: list[dict[str, Any]], ranks: int, folder: Path) -> dict[str, list[list[str]]]:
    """By run, what each rank wrote."""
    job = {"runs": runs, "pp_size": ranks, "out": str(folder)}
    run_ranks("tests.runtime.action_ranks", job, ranks, folder / "ranks")
    return {
        one["name"]: [
            (folder / one["name"] / f"rank{rank}.actions").read_text().split()
            for rank in range(ranks)
        ]
        for one in runs
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_executed_is_planned_with_offload(ranks: int, tmp_path: Path) -> None:
    away = {"num_chunks": CHUNKS, "offload": "full"}
    names = ["gpipe", "seq1f1b", "zb_seq1f1b", "interleaved_seq1f1b"]
    runs: list[dict[str, Any]] = [
        {"name": name, "settings": {**away, "pp_schedule": name, "recompute": recompute}}
        for name, recompute in zip(names, ["none", "full", "none", "full"], strict=True)
    ]
    runs[-1]["settings"]["pp_virtual_stages"] = 2
    runs[1]["evaluate"] = True
    found = _launch(runs, ranks, tmp_path)
    for one in runs:
        name, virtual = one["name"], one["settings"].get("pp_virtual_stages", 1)
        compute = generate(name, Size(ranks, ROWS, CHUNKS, virtual))
        planned = lower(compute, leaves=lambda stage, unit: True)
        assert found[name] == planned.texts(), name
        kinds = [Action.parse(text).kind for rank in found[name] for text in rank]
        assert kinds.count("D") == kinds.count("H") > ranks * CHUNKS
        for rank in range(ranks):
            text = (tmp_path / name / f"rank{rank}.trace.json").read_text()
            events = json.loads(text)["traceEvents"]
            spans = [event["name"] for event in events if event["ph"] == "X"]
            assert sorted(spans) == sorted(found[name][rank])
            assert {event["pid"] for event in events} == {rank}
