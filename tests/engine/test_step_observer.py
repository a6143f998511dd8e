"""Events for observers, labels of units in a profiler's trace, and times on a late device."""

import gc
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from sppo_hf import SPPOPlugin
from sppo_hf.engine import step_observer
from sppo_hf.engine.step_observer import ChunkTimer, ObserverHub, StepObserver
from tests.integrations.training import make_model


class _Listener(StepObserver):
    def __init__(self, heard: list[tuple[object, ...]]) -> None:
        self.heard = heard

    def on_unit(self, direction, chunk, num_chunks):
        self.heard.append((direction, chunk, num_chunks))


@pytest.mark.parametrize("event", [name for name in vars(StepObserver) if name.startswith("on_")])
def test_every_event_reaches_every_subscriber_once(event: str) -> None:
    heard: list[tuple[object, ...]] = []

    class Listener(StepObserver):
        pass

    setattr(Listener, event, lambda self, *values: heard.append(values))
    hub, first, second = ObserverHub(), Listener(), Listener()
    for listener in (first, second, first):
        hub.subscribe(listener)
    getattr(hub, event)("one", 2)
    assert heard == [("one", 2)] * 2


def test_unsubscribed_and_deleted_observers_receive_nothing():
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


def test_a_profiler_that_starts_in_a_step_gets_labels_from_the_next_unit_on(tmp_path: Path) -> None:
    plugin = SPPOPlugin(num_chunks=3, order="by_chunk", show_plan=False, show_progress=False)
    model = plugin.convert(make_model()).train()
    ids = torch.arange(48)[None]
    loss = model(input_ids=ids, labels=ids).loss
    with torch.profiler.profile() as profiler:
        loss.backward()
    model(input_ids=ids, labels=ids).loss.backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = labels(tmp_path / "trace.json")
    assert [name for name, _, _ in found] == [f"sppo/backward chunk {chunk}" for chunk in (2, 1, 0)]


class _LateMark:
    """A mark on a device whose clock the test sets."""

    now = 0.0
    reached_until = 0.0

    def __init__(self, device: torch.device) -> None:
        assert torch.device(device).type == "cuda"
        self.at = _LateMark.now

    def is_reached(self) -> bool:
        return self.at <= _LateMark.reached_until

    def seconds_until(self, later: Any) -> float:
        return later.at - self.at


def test_seconds_are_known_when_the_device_has_reached_the_last_mark(monkeypatch):
    monkeypatch.setattr(step_observer, "Mark", _LateMark)
    timer = ChunkTimer("cuda")
    for second, (phase, chunk) in enumerate(
        [("forward", 0), ("forward", 1), ("end", 0), ("backward", 1), ("backward", 0), ("end", 0)]
    ):
        _LateMark.now = float(second**2)
        timer.enter(phase, chunk)
    _LateMark.reached_until = 16.0
    assert not timer.is_ready()
    with pytest.raises(AssertionError):
        timer.seconds("forward", 2)
    _LateMark.reached_until = 25.0
    assert timer.seconds("forward", 2) == (1.0, 3.0)
    assert timer.seconds("backward", 2) == (9.0, 7.0), "what lies between the phases is neither's"


def test_marks_are_recorded_in_the_stream_of_the_models_device(monkeypatch):
    """Whatever the current device is: autograd's thread has another than the main thread."""
    recorded = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            recorded.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    timer = ChunkTimer(torch.device("cuda", 1))
    timer.enter("forward", 0)
    timer.enter("end")
    assert recorded == ["stream of cuda:1"] * 2
