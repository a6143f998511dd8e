"""The trace: an event per action on its resource's thread, a counter per tier, microseconds."""

import json
from pathlib import Path
from typing import Any

from sppo_hf.reporting.chrome_trace import chrome_trace, write_trace
from sppo_hf.schedule.actions import Action
from sppo_hf.schedule.simulate import Change
from sppo_hf.schedule.timeline import Timeline
from tests.schedule.simulated import simulate

F0, F1, B0 = Action("F", 0, 0), Action("F", 1, 0), Action("B", 1, 0)


def two_ranks() -> Timeline:
    return simulate(
        {"0.compute": [F0], "1.compute": [F1, B0], "link": []},
        seconds=lambda action: 0.25 if action.kind == "F" else 0.5,
        after=lambda action: [F0] if action == F1 else [],
        changes=lambda action: [Change(f"{action.stage}.device", "frames", 8)],
    )


def of_phase(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_actions() -> None:
    waited = {"waited for": "0F0", "waited microseconds": 250_000.0}
    assert of_phase(chrome_trace(two_ranks()), "X") == [
        {"ph": "X", "name": "0F0", "cat": "forward", "pid": 0, "tid": 0, "ts": 0.0, "dur": 250_000},
        {
            **{"ph": "X", "name": "1F0", "cat": "forward", "pid": 1, "tid": 1},
            **{"ts": 250_000.0, "dur": 250_000.0, "args": waited},
        },
        {
            **{"ph": "X", "name": "1B0", "cat": "backward", "pid": 1, "tid": 1},
            **{"ts": 500_000.0, "dur": 500_000.0},
        },
    ]


def test_names() -> None:
    named = of_phase(chrome_trace(two_ranks()), "M")
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in named if e["name"] == "thread_name"}
    assert threads == {(0, 0): "compute", (1, 1): "compute", (0, 2): "link"}
    processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}


def test_memory() -> None:
    counters = of_phase(chrome_trace(two_ranks()), "C")
    assert [(e["name"], e["pid"], e["ts"], e["args"]) for e in counters] == [
        ("device memory", 0, 0.0, {"bytes": 8}),
        ("device memory", 1, 0.0, {"bytes": 0}),
        ("device memory", 1, 250_000.0, {"bytes": 8}),
        ("device memory", 1, 500_000.0, {"bytes": 16}),
    ]


def test_file_is_json(tmp_path: Path) -> None:
    write_trace(two_ranks(), tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == chrome_trace(two_ranks())
