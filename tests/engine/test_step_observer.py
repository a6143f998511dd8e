"""The hub passes events on to those who are there, and keeps nobody alive."""

import gc

from sppo_hf.engine.step_observer import ObserverHub, StepObserver


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
