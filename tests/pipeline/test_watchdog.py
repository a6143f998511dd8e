"""The watchdog: ranks that are silent, killed, failed or ended in order, and the error for each."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sppo_hf.errors import RankLostError
from sppo_hf.pipeline import watchdog as module
from sppo_hf.pipeline.watchdog import (
    AFTER_TRAINING,
    Heartbeat,
    Process,
    Watchdog,
    is_broken_connection,
    process_state,
    this_process,
    watch_launch,
)

TIMEOUT = 0.4
BROKEN = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
OTHER_MACHINE = Process("another machine", 1, 1)


class FakeStore:
    """A launch's key-value store in this process; it may break, or not answer."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.gone = False
        self.answers = threading.Event()
        self.answers.set()

    def _look(self) -> None:
        self.answers.wait()
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

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._look()
        with self.lock:
            if self.held.get(key, b"") == expected.encode():
                self.held[key] = desired.encode()
            return self.held[key]

    def heartbeat(self, rank: int) -> Heartbeat:
        return Heartbeat.parse(self.held[f"sppo/alive/{rank}"])


class Launch:
    """Watchdogs of some ranks that share a store, and what ended whom."""

    def __init__(self) -> None:
        self.store = FakeStore()
        self.ended: dict[int, str] = {}
        self.dogs: list[Watchdog] = []

    def start(
        self, rank: int, ranks: int = 2, *, timeout: float = TIMEOUT, store_rank: int | None = None
    ) -> Watchdog:
        def end(message: str) -> None:
            self.ended[rank] = message

        store: Any = self.store
        others = range(ranks)
        dog = Watchdog(
            rank,
            others,
            timeout_seconds=timeout,
            store=store,
            store_rank=store_rank,
            end_process=end,
        )
        self.dogs.append(dog)
        return dog

    def pretend(
        self, rank: int, activity: str, process: Process = OTHER_MACHINE, **fields: Any
    ) -> None:
        """Write one heartbeat in the place of a rank."""
        heartbeat = Heartbeat(7, activity, 3, process, **fields)
        self.store.set(f"sppo/alive/{rank}", json.dumps(dataclasses.asdict(heartbeat)))


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(module, "_TELL_SECONDS", 0.5)
    made = Launch()
    yield made
    made.store.answers.set()
    for dog in made.dogs:
        dog.close()
    alive = [t.name for t in threading.enumerate() if t.name.startswith("sppo-watchdog")]
    assert not alive


@pytest.fixture
def child() -> Iterator[tuple[int, Process]]:
    """A process of this machine: its number, and how ranks know it."""
    with subprocess.Popen(["sleep", "60"]) as running:
        start_ticks = int(
            Path(f"/proc/{running.pid}/stat").read_text().rpartition(")")[2].split()[19]
        )
        yield running.pid, Process(this_process().machine, running.pid, start_ticks)
        running.kill()


def eventually(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


# -- what is seen of other ranks -----------------------------------------------------------------


def test_ranks_with_heartbeats_are_not_ended(launch: Launch) -> None:
    # Slow machines hold threads up, so signs of life must be far closer than the timeout.
    first, _ = launch.start(0, timeout=2.0), launch.start(1, timeout=2.0)
    first.set_step("in step 3")
    first.set_activity("action 2 (0F0)")
    assert eventually(lambda: launch.store.heartbeat(0).activity == "in step 3, action 2 (0F0)")
    time.sleep(3.0)
    assert not launch.ended


def test_a_silent_rank_ends_the_others_and_its_last_activity_is_named(launch: Launch) -> None:
    launch.start(0)
    launch.pretend(1, "in step 3, action 5 (1B3)")
    assert eventually(lambda: 0 in launch.ended)
    assert launch.ended[0].startswith(
        "sppo_hf: rank 0 ends because lost rank 1, last seen in step 3, action 5 (1B3): it has "
        "given no sign of life for"
    )
    assert "(pp_timeout_seconds: 0.4)" in launch.ended[0]


def test_a_rank_that_has_not_begun_is_waited_for(launch: Launch) -> None:
    launch.start(0)
    time.sleep(3 * TIMEOUT)
    assert not launch.ended


def test_a_rank_that_ended_in_order_ends_nobody(launch: Launch) -> None:
    launch.start(0)
    other = launch.start(1)
    assert eventually(lambda: "sppo/alive/1" in launch.store.held)
    other.close()
    other.close()
    time.sleep(3 * TIMEOUT)
    assert launch.store.heartbeat(1).has_left
    assert not launch.ended


def test_a_rank_that_destroyed_its_groups_ends_nobody(launch: Launch) -> None:
    launch.start(0)
    other = launch.start(1)
    assert eventually(lambda: "sppo/alive/1" in launch.store.held)
    assert not launch.store.heartbeat(1).has_left
    other._is_joined = lambda: False  # type: ignore[method-assign]
    assert eventually(lambda: launch.store.heartbeat(1).has_left)
    time.sleep(3 * TIMEOUT)
    assert not launch.ended


def test_a_killed_process_of_this_machine_is_found_at_once(
    launch: Launch, child: tuple[int, Process]
) -> None:
    dog = launch.start(0, timeout=60)
    dog._beat_seconds = dog._tick_seconds = 0.02
    launch.pretend(1, "in step 3", child[1])
    time.sleep(0.5)
    assert not launch.ended
    os.kill(child[0], signal.SIGKILL)
    with dog.collective_section():
        assert eventually(lambda: 0 in launch.ended)
    said = launch.ended[0]
    assert "because lost rank 1, last seen in step 3: its process ended without an error" in said
    # Those on other machines hear it.
    assert json.loads(launch.store.get("sppo/failed"))["rank"] == 1


def test_a_process_that_ends_after_training_ends_nobody(
    launch: Launch, child: tuple[int, Process]
) -> None:
    dog = launch.start(0)
    launch.pretend(1, module.AFTER_TRAINING, child[1])
    assert eventually(lambda: 1 in dog._peers)
    os.kill(child[0], signal.SIGKILL)
    time.sleep(3 * TIMEOUT)
    assert not launch.ended


def test_a_process_is_found_by_number_and_start(child: tuple[int, Process]) -> None:
    number, process = child
    own = this_process()
    assert process_state(own, own) == "runs"
    assert process_state(process, own) == "runs"
    assert (
        process_state(dataclasses.replace(process, start_ticks=process.start_ticks - 1), own)
        == "gone"
    )
    assert process_state(dataclasses.replace(process, machine="another"), own) is None
    assert process_state(process, dataclasses.replace(own, machine="")) is None
    os.kill(number, signal.SIGSTOP)
    assert eventually(lambda: process_state(process, own) == "stopped")
    os.kill(number, signal.SIGKILL)
    assert eventually(lambda: process_state(process, own) == "gone")


# -- which rank is blamed ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (BROKEN, True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (module.dist.DistStoreError("wait timeout after 10000ms"), True),
        (module.dist.DistBackendError("NCCL error"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("backend gloo is not for this"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_of_connections_are_told_from_others(error: BaseException, broken: bool) -> None:
    assert is_broken_connection(error) is broken
    wrapped = KeyError("x")
    wrapped.__cause__ = error
    assert is_broken_connection(wrapped) is broken


def test_a_failure_is_told_to_the_others(launch: Launch) -> None:
    first, second = launch.start(0, timeout=60), launch.start(1, timeout=60)
    # They look only so often; here at once.
    first._tick_seconds = second._tick_seconds = 0.02
    second.set_step("in step 3")
    second.set_activity("action 9 (1F2)")
    second.report_failure(ValueError("a bad number"))
    first.set_activity("in forward pass 3")
    found = first.translate_error(BROKEN)
    assert isinstance(found, RankLostError)
    assert str(found) == (
        "rank 1 failed in step 3, action 9 (1F2): ValueError: a bad number (rank 0 cannot go on; "
        "it was in forward pass 3)"
    )


def test_the_first_rank_to_fail_is_blamed(launch: Launch) -> None:
    first, second = launch.start(0), launch.start(1)
    second.report_failure(ValueError("the cause"))
    first.report_failure(ValueError("the consequence"))
    assert json.loads(launch.store.get("sppo/failed"))["message"].endswith("the cause")


def test_an_error_of_this_rank_is_not_translated(launch: Launch) -> None:
    dog = launch.start(1)
    error = ValueError("a bad number")
    assert dog.translate_error(error) is error
    dog.report_failure(error)
    assert dog.translate_error(BROKEN) is BROKEN


def test_a_broken_connection_is_never_ones_own_failure(
    launch: Launch, child: tuple[int, Process]
) -> None:
    # Rank 1 of three is killed; the two others notice each other's end first.
    first, last = launch.start(0, 3, timeout=4), launch.start(2, 3, timeout=4)
    launch.pretend(1, "in step 3", child[1])
    assert eventually(lambda: 1 in first._peers and 1 in last._peers)
    os.kill(child[0], signal.SIGKILL)
    for dog in (last, first):
        with pytest.raises(RankLostError, match=r"^lost rank 1, last seen in step 3: "):
            with dog.collective_section("clipping gradients"):
                raise BROKEN


def test_where_no_rank_has_failed_nobody_is_blamed(launch: Launch) -> None:
    first, second = launch.start(0, 3, timeout=1.0), launch.start(1, 3, timeout=1.0)
    second.set_activity("reading a batch")
    first.set_activity("in forward pass 2")
    assert eventually(lambda: launch.store.heartbeat(1).activity == "reading a batch")
    said = str(first.translate_error(BROKEN))
    assert said.startswith("rank 0 lost its connection to other ranks in forward pass 2, or got no")
    assert "rank 1 is reading a batch for 0 seconds; nothing was heard yet of rank 2" in said
    assert "Connection closed by peer" in said
    assert json.loads(launch.store.get("sppo/failed"))["rank"] is None


def test_a_rank_that_left_is_named_where_it_is_needed(launch: Launch) -> None:
    first, second = launch.start(0), launch.start(1)
    second.set_step("in step 3")
    second.close()
    said = str(first.translate_error(BROKEN))
    assert said.startswith("lost rank 1, last seen in step 3: its process ended without an error")


def test_a_rank_that_left_before_it_began_is_missed_where_it_is_needed(launch: Launch) -> None:
    first, second = launch.start(0), launch.start(1)
    second.close()
    time.sleep(3 * TIMEOUT)
    assert not launch.ended
    with first.collective_section("forming groups of ranks"):
        assert eventually(lambda: 0 in launch.ended)
    said = launch.ended[0]
    assert "because lost rank 1, last seen before training: its process ended without" in said


def test_sys_exit_in_training_is_told(launch: Launch) -> None:
    first, second = launch.start(0), launch.start(1)
    second.set_step("in step 3")
    with pytest.raises(SystemExit), second.collective_section("logging"):
        raise SystemExit(3)
    second.close()
    assert str(first.translate_error(BROKEN)).startswith(
        "rank 1 ended in step 3, logging by sys.exit(3)"
    )


def test_a_rank_that_hangs_is_ended_by_the_failure_of_another(launch: Launch) -> None:
    launch.start(0)
    second = launch.start(1)
    second.set_activity("in forward pass 3")
    second.report_failure(ValueError("a bad number"))
    assert eventually(lambda: 0 in launch.ended)
    assert "because rank 1 failed in forward pass 3: ValueError: a bad number" in launch.ended[0]
    # Its own exception is on its way there.
    time.sleep(TIMEOUT)
    assert 1 not in launch.ended


def test_a_rank_outside_collective_sections_has_time_to_end(launch: Launch) -> None:
    first, second = launch.start(0, timeout=3), launch.start(1, timeout=3)
    second.report_failure(ValueError("a bad number"))
    assert eventually(lambda: first._failure is not None)
    time.sleep(1.0)
    assert not launch.ended
    with first.collective_section():
        assert eventually(lambda: 0 in launch.ended, seconds=1.5)


def test_a_rank_that_was_stopped_itself_says_so(launch: Launch) -> None:
    dog = launch.start(1)
    dog._stopped_seconds, dog._resumed_at = 9.0, time.monotonic()
    dog.set_activity("in forward pass 3")
    said = str(dog.translate_error(BROKEN))
    assert "rank 1 itself was stopped, or held up, for 9 seconds in forward pass 3" in said


def test_a_section_ends_without_what_was_done_in_an_earlier_step(launch: Launch) -> None:
    """All of training is one, after which a rank may end in any way."""
    dog = launch.start(0)
    assert dog.activity == "before training"
    with dog.collective_section():
        dog.set_step("in step 1")
        dog.set_activity("logging")
        with dog.collective_section("saving"):
            assert dog.activity == "in step 1, saving"
        assert dog.activity == "in step 1, logging"
        dog.set_step(AFTER_TRAINING)
    assert dog.activity == AFTER_TRAINING


def test_an_error_that_passes_a_section_keeps_its_activity(launch: Launch) -> None:
    dog = launch.start(0)
    dog.set_step("in step 2")
    with dog.collective_section("clipping gradients"):
        assert dog.activity == "in step 2, clipping gradients"
    assert dog.activity == "in step 2"
    with pytest.raises(KeyError), dog.collective_section("logging"):
        raise KeyError("x")
    assert dog.describe_failure(KeyError("x")) == "rank 0 failed in step 2, logging: KeyError: 'x'"


# -- the store -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("gone", [True, False])
def test_a_store_that_does_not_answer_means_its_rank_is_lost(launch: Launch, gone: bool) -> None:
    dog = launch.start(1, 3, store_rank=0)
    launch.pretend(0, "in step 2")
    launch.pretend(2, "in step 2")
    assert eventually(lambda: {0, 2} <= set(dog._peers))
    if gone:
        launch.store.gone = True
    else:
        launch.store.answers.clear()
    assert eventually(lambda: 1 in launch.ended)
    assert "because lost rank 0, last seen in step 2: " in launch.ended[1]


def test_the_rank_with_the_store_waits_until_others_have_read_its_failure(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TELL_SECONDS", 10.0)
    first, second = (
        launch.start(0, timeout=8, store_rank=0),
        launch.start(1, timeout=8, store_rank=0),
    )
    assert eventually(lambda: 1 in first._peers and 0 in second._peers)
    first.report_failure(ValueError("a bad number"))
    first.close()
    assert second._failure is not None
    assert second._failure.message.endswith("a bad number")


def test_a_rank_that_knows_the_failure_reads_the_store_no_more(launch: Launch) -> None:
    """The process that holds it may end, of which torch would print a backtrace at last."""
    first, second = launch.start(0, store_rank=0), launch.start(1, store_rank=0)
    assert eventually(lambda: 1 in first._peers and 0 in second._peers)
    first.report_failure(ValueError("a bad number"))
    assert eventually(lambda: not second._threads[0].is_alive())
    assert second._failure is not None
    assert launch.store.heartbeat(1).knows_end
    assert eventually(lambda: not first._needs_store(1))
    launch.store.gone = True
    began = time.monotonic()
    second.close()
    assert time.monotonic() - began < module._TELL_SECONDS
    assert second._store_broke_at is None


def test_reporting_to_a_store_that_is_gone_only_warns(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    dog = launch.start(0, timeout=60)
    launch.store.gone = True
    with caplog.at_level("WARNING", logger=module.__name__):
        dog.report_failure(ValueError("a bad number"))
    assert "other ranks are not told" in caplog.text
    assert "a bad number" in caplog.text
    dog.close()


def test_a_rank_that_closed_its_watchdog_is_not_ended(launch: Launch) -> None:
    dog = launch.start(0)
    dog.close()
    failure = {"rank": 1, "reported_by": 1, "message": "rank 1 failed"}
    launch.store.set("sppo/failed", json.dumps(failure))
    time.sleep(3 * TIMEOUT)
    assert not launch.ended


def test_a_process_group_has_one_watchdog_and_the_next_group_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[int] = []

    class Dog:
        def __init__(self, rank: int, ranks: range, **_: Any) -> None:
            self.ranks = len(ranks)

        def watch_exit(self) -> None:
            """Watch nothing."""

        def close(self) -> None:
            closed.append(self.ranks)

    launch = SimpleNamespace(WORLD=object())
    sizes = iter((2, 3))
    dist = SimpleNamespace(
        group=launch, get_rank=lambda: 0, get_world_size=lambda: next(sizes), is_initialized=bool
    )
    monkeypatch.setattr(module, "dist", dist)
    monkeypatch.setattr(module, "Watchdog", Dog)
    monkeypatch.setattr(module, "_current", None)
    first = watch_launch(1.0)
    assert watch_launch(1.0) is first
    assert not closed
    launch.WORLD = object()
    second = watch_launch(1.0)
    assert second is not first
    assert closed == [2]
    assert watch_launch(1.0) is second
