"""The watchdog: who is silent, who failed, who left in order, and what is said of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sppo_hf.errors import PipelineError
from sppo_hf.runtime import watchdog as module
from sppo_hf.runtime.watchdog import Watchdog

TIMEOUT = 0.4


class FakeStore:
    """What a launch's key-value store does, in this process; may break."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.gone = False

    def _look(self) -> None:
        if self.gone:
            raise RuntimeError("Connection reset by peer")

    def set(self, key: str, value: str) -> None:
        self._look()
        self.held[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._look()
        return self.held[key]

    def check(self, keys: list[str]) -> bool:
        self._look()
        return all(key in self.held for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> None:
        self._look()
        with self.lock:
            if self.held.get(key, b"") == expected.encode():
                self.held[key] = desired.encode()


class Launch:
    """Watchdogs of some ranks that share a store, and what ended whom."""

    def __init__(self) -> None:
        self.store = FakeStore()
        self.ended: dict[int, str] = {}
        self.dogs: list[Watchdog] = []

    def start(self, rank: int, ranks: int = 2, *, timeout: float = TIMEOUT) -> Watchdog:
        def end(message: str) -> None:
            self.ended[rank] = message

        store: Any = self.store
        dog = Watchdog(rank, range(ranks), timeout_seconds=timeout, store=store, end=end)
        self.dogs.append(dog)
        return dog


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(module, "_WORDS_SECONDS", 0.3)
    made = Launch()
    yield made
    for dog in made.dogs:
        dog.close()
    assert not [t for t in threading.enumerate() if t.name == "sppo-watchdog" and t.is_alive()]


def eventually(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_ranks_that_live_are_left_alone(launch: Launch) -> None:
    # Slow machines hold threads up, so signs of life must be far closer than the timeout.
    first, _ = launch.start(0, timeout=2.0), launch.start(1, timeout=2.0)
    first.doing("in action 0F0")
    assert eventually(lambda: b"in action 0F0" in launch.store.held.get("sppo/alive/0", b""))
    time.sleep(3.0)
    assert not launch.ended


def test_a_silent_rank_ends_the_others_by_its_last_words(launch: Launch) -> None:
    launch.start(0)
    launch.store.set("sppo/alive/1", "7 in action 1B3")
    assert eventually(lambda: 0 in launch.ended)
    said = launch.ended[0]
    assert said.startswith("sppo_hf: rank 0 ends because rank 1 has given no sign of life for")
    assert said.endswith("(pp_timeout_seconds); it was last seen in action 1B3")


def test_a_rank_that_has_not_begun_is_waited_for(launch: Launch) -> None:
    launch.start(0)
    time.sleep(3 * TIMEOUT)
    assert not launch.ended


def test_a_rank_that_left_in_order_is_not_missed(launch: Launch) -> None:
    launch.start(0)
    other = launch.start(1)
    assert eventually(lambda: "sppo/alive/1" in launch.store.held)
    other.close()
    other.close()
    time.sleep(3 * TIMEOUT)
    assert not launch.ended


def test_a_failure_is_told_to_the_others(launch: Launch) -> None:
    first, second = launch.start(0, timeout=60), launch.start(1, timeout=60)
    # They look only so often; here at once.
    first._pause = second._pause = 0.02
    second.doing("in action 1F2")
    second.report(ValueError("a bad number"))
    words = "rank 1 failed while in action 1F2: ValueError: a bad number"
    found = first.explain(RuntimeError("Connection closed by peer"))
    assert isinstance(found, PipelineError)
    assert str(found) == f"another rank of the launch failed: {words}"


def test_who_is_stuck_is_ended_by_anothers_failure(launch: Launch) -> None:
    launch.start(0)
    second = launch.start(1)
    second.doing("in forward 3")
    second.report(ValueError("a bad number"))
    assert eventually(lambda: 0 in launch.ended)
    assert launch.ended[0].endswith(
        "because rank 1 failed while in forward 3: ValueError: a bad number"
    )
    # Its own exception is on its way there.
    time.sleep(TIMEOUT)
    assert 1 not in launch.ended


def test_ones_own_error_is_raised_as_it_is(launch: Launch) -> None:
    dog = launch.start(1)
    error = ValueError("a bad number")
    dog.report(error)
    assert dog.explain(error) is error


def test_an_error_that_nobody_explains_is_raised_as_it_is(launch: Launch) -> None:
    dog = launch.start(0)
    error = RuntimeError("Connection closed by peer")
    assert dog.explain(error) is error


def test_ranks_are_told_apart_by_their_whole_number(launch: Launch) -> None:
    launch.store.set("sppo/failed", "rank 12 failed while in forward 1: a bad number")
    dog = launch.start(1, ranks=13)
    assert isinstance(dog.explain(RuntimeError()), PipelineError)


def test_the_first_to_fail_is_the_one_to_blame(launch: Launch) -> None:
    first, second = launch.start(0), launch.start(1)
    second.report(ValueError("the cause"))
    first.report(RuntimeError("the consequence"))
    assert launch.store.get("sppo/failed").endswith(b"the cause")
    assert "the cause" in str(first.explain(RuntimeError("the consequence")))


def test_a_store_that_is_gone_ends_the_rank(launch: Launch) -> None:
    launch.start(0)
    launch.store.gone = True
    assert eventually(lambda: 0 in launch.ended)
    assert "the process that holds the launch's store is gone (Connection" in launch.ended[0]


def test_a_store_that_comes_back_in_time_does_not(launch: Launch) -> None:
    launch.start(0, timeout=4.0)
    launch.store.gone = True
    time.sleep(0.6)
    launch.store.gone = False
    time.sleep(2.0)
    assert not launch.ended


def test_reporting_to_a_store_that_is_gone_only_warns(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    dog = launch.start(0, timeout=60)
    launch.store.gone = True
    with caplog.at_level("WARNING", logger=module.__name__):
        dog.report(ValueError("a bad number"))
    assert "other ranks are not told" in caplog.text
    assert "a bad number" in caplog.text
    dog.close()


def test_a_rank_that_left_is_ended_by_nobody(launch: Launch) -> None:
    dog = launch.start(0)
    dog.close()
    launch.store.set("sppo/failed", "rank 1 failed while starting: x")
    time.sleep(3 * TIMEOUT)
    assert not launch.ended
