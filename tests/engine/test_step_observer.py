"""What observers are told, and the labels of units in a profiler's trace."""

import gc
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from sppo_hf import SPPOPlugin
from sppo_hf.engine.step_observer import ObserverHub, StepObserver, UnitLabel
from tests.integrations.training import make_model


class _Listener(StepObserver):
    def __init__(self, heard: list[tuple[object, ...]]) -> None:
        self.heard = heard

    def on_plan(self, plan, model_name):
        self.heard.append(("plan", plan, model_name))

    def on_unit(self, direction, chunk, num_chunks):
        self.heard.append((direction, chunk, num_chunks))

    def on_record(self, record):
        self.heard.append(("record", record))


def test_every_event_reaches_every_subscriber_once():
    hub, heard = ObserverHub(), []
    first, second = _Listener(heard), _Listener(heard)
    for listener in (first, second, first):
        hub.subscribe(listener)
    hub.on_plan("plan", "name")
    hub.on_unit("forward", 0, 4)
    hub.on_record("record")
    assert sorted(heard, key=str) == sorted(
        2 * [("plan", "plan", "name"), ("forward", 0, 4), ("record", "record")], key=str
    )


def test_who_left_or_is_gone_hears_nothing():
    hub, heard = ObserverHub(), []
    left, gone = _Listener(heard), _Listener(heard)
    hub.subscribe(left)
    hub.subscribe(gone)
    hub.unsubscribe(left)
    hub.unsubscribe(left)
    del gone
    gc.collect()
    hub.on_unit("forward", 0, 4)
    assert heard == []


def labels(trace: Path) -> list[tuple[str, float, float]]:
    """Name, start and end of our labels, in order of their start."""
    events = json.loads(trace.read_text())["traceEvents"]
    ours = [e for e in events if str(e.get("name")).startswith("sppo/") and e["ph"] == "X"]
    return sorted(((e["name"], e["ts"], e["ts"] + e["dur"]) for e in ours), key=lambda e: e[1])


def test_a_profiled_step_has_a_label_for_every_unit(tmp_path: Path) -> None:
    plugin = SPPOPlugin(num_chunks=3, order="by_chunk", show_plan=False, show_progress=False)
    model = plugin.convert(make_model()).train()
    ids = torch.arange(48)[None]
    with torch.profiler.profile() as profiler:
        model(input_ids=ids, labels=ids).loss.backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = labels(tmp_path / "trace.json")
    forward = [f"sppo/forward chunk {chunk}" for chunk in (0, 1, 2)]
    backward = [f"sppo/backward chunk {chunk}" for chunk in (2, 1, 0)]
    assert [name for name, _, _ in found] == forward + backward
    for (_, _, end), (_, start, _) in pairwise(found):
        assert end <= start + 1, "units follow each other (1 us for rounding)"


def test_a_label_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            seen.append(self.name)

        def __exit__(self, *_: object) -> None:
            seen.append(f"end of {self.name}")

    monkeypatch.setattr("sppo_hf.engine.step_observer.record_function", Recorded)
    label = UnitLabel()
    label.leave()
    label.enter("a")
    label.enter("b")
    label.leave()
    label.leave()
    assert seen == ["sppo/a", "end of sppo/a", "sppo/b", "end of sppo/b"]
